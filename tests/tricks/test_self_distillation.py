"""The policy as its own teacher: advantages worked out by hand, its prompts, and runs that learn from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import F64
from short_runs import SMALL, metrics_of, run_in_process, same_ending
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.learner.update import compute_logprobs, credited, estimate_advantages, make_inputs
from grpo_lab.loop import open_run
from grpo_lab.rollout.continuations import PrefixRollouts
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run.state import RunState
from grpo_lab.tricks.teacher import Opsd, Sdpo, SelfDistillation, TeacherPolicy
from grpo_lab.types import Problem

TEACHER = torch.tensor([[-1.0, -2.0, -0.5, 0.0], [-1.0, -9.0, -3.0, -0.25]], dtype=F64)
OLD = torch.tensor([[-2.0, -1.0, -0.5, 0.0], [-1.5, -1.0, -1.0, -0.5]], dtype=F64)
REWARDED = torch.tensor([[1.0, 1.0, 1.0, 0.0], [-1.0, 0.0, -1.0, -1.0]], dtype=F64)
BOTH_ROWS = torch.tensor([[True, True, True, False], [True, False, True, True]])
FIRST_ROW = torch.tensor([[True, True, True, False], [False, False, False, False]])


def opsd(prompt: str = "{question} {answer}", **numbers: float) -> Opsd:
    given = {"coefficient": 1.0, "discount": 0.0, "reward_weight": 0.0} | numbers
    return Opsd(prompt, TeacherPolicy.current, **given)


def sdpo(prompt: str = "{question} {response}", **numbers: float) -> Sdpo:
    given = {"coefficient": 1.0, "discount": 0.0, "reward_weight": 0.0} | numbers
    return Sdpo(prompt, TeacherPolicy.current, **given)


@pytest.mark.parametrize("plan", [opsd, sdpo])
def test_advantages_by_hand(plan: Callable[..., SelfDistillation]) -> None:
    # teacher - old of sampled tokens: 1, -1, 0 and 0.5, (injected), -2, 0.25
    assert plan()(REWARDED, TEACHER, OLD, BOTH_ROWS).tolist() == [[1, -1, 0, 0], [0.5, 0, -2, 0.25]]
    # each with all that follow: 1 - 1 + 0, -1 + 0, 0 and 0.5 - 2 + 0.25, ..., -2 + 0.25, 0.25; then doubled
    summed = plan(coefficient=2.0, discount=1.0)(REWARDED, TEACHER, OLD, BOTH_ROWS)
    assert summed.tolist() == [[0, -2, 0, 0], [-2.5, 0, -3.5, 0.5]]
    # the second row was shown nothing, so only the reward is left of it
    assert plan()(REWARDED, TEACHER, OLD, FIRST_ROW).tolist() == [[1, -1, 0, 0], [0, 0, 0, 0]]
    mixed = plan(reward_weight=0.5)(REWARDED, TEACHER, OLD, FIRST_ROW)
    assert mixed.tolist() == [[1.5, -0.5, 0.5, 0], [-0.5, 0, -0.5, -0.5]]


@pytest.mark.parametrize("plan", [opsd, sdpo])
def test_a_teacher_that_the_hint_does_not_move_teaches_nothing(plan: Callable[..., SelfDistillation]) -> None:
    assert plan(discount=0.9)(REWARDED, OLD, OLD, BOTH_ROWS).abs().max() == 0


def test_what_the_teacher_is_shown() -> None:
    problem = Problem(0, "3+4?", "7", 1)
    assert opsd().hint(problem, []) == opsd().hint(problem, ["3+4=7;#7"]) == "7"
    assert sdpo().hint(problem, []) is None
    assert sdpo().hint(problem, ["#7", "3+4=7;#7"]) == "#7"
    assert opsd("Q: {question} A: {answer}").question(problem, "7") == "Q: 3+4? A: 7"
    # a question or a response that holds a placeholder is inserted as it is
    odd = replace(problem, question="what is {response}?")
    assert sdpo().question(odd, "it is {question}") == "what is {response}? it is {question}"


def test_wrong_fields_are_refused() -> None:
    for numbers, said in (
        ({"coefficient": 0.0}, r"\.coefficient must be greater than 0"),
        ({"discount": 1.5}, r"\.discount must be in \[0, 1\]"),
        ({"reward_weight": -1.0}, r"\.reward_weight must be at least 0"),
        ({"prompt": "{question}"}, r"\.prompt must be a text with"),
        ({"prompt": "{answer} {answer} {response} {response}"}, r"\.prompt must be a text with"),
        ({"prompt": "{question} {question} {answer} {response}"}, r"\.prompt must be a text with"),
    ):
        for plan in (opsd, sdpo):
            with pytest.raises(ValueError, match=said):
                plan(**numbers)


# --- in a run -------------------------------------------------------------------------------------------------

OPSD = ("teacher=opsd", "teacher.prompt='{answer}#{question}'")
SDPO = ("teacher=sdpo", "teacher.prompt='{response}+{question}'")
PURE = ("scale=none", "surrogate=reinforce", "aggregation=token_mean", "updates=one", "optimizer.learning_rate=1e-3")


def shown(plan: SelfDistillation, problem: Problem, right: list[str]) -> str | None:
    """The teacher's prompt of the two options above, written out."""
    if isinstance(plan, Opsd):
        return f"{problem.answer}#{problem.question}"
    return f"{right[0]}+{problem.question}" if right else None


@contextmanager
def opened(*overrides: str) -> Iterator[tuple[RunConfig, RunState, RolloutQueue]]:
    config, _ = compose_with_choices(["world=tiny", "tracking=none", *SMALL, *PURE, *overrides])
    run = to_run(config)
    with open_run(run, torch.device("cpu")) as (state, queue, _):
        yield run, state, queue


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        (*SDPO, "microbatch_tokens=64"),
        (*OPSD, "engine.temperature=0.7"),
        (*SDPO, "packing=false", "teacher.reward_weight=1.0"),
    ],
    ids=lambda words: " ".join(words),
)
def test_tokens_are_learnt_by_what_a_plain_forward_pass_behind_the_longer_prompt_says(
    overrides: tuple[str, ...], tiny_base: Path
) -> None:
    with opened(*overrides) as (run, state, queue):
        plan, batch = run.teacher, queue.take()
        rollouts, graded = batch.rollouts, batch.filtered
        asked = rollouts.prompts
        before = compute_logprobs(run.logprob_tricks, state, graded, rollouts)
        ends = PrefixRollouts(queue.maker, "", state.session, state.account, state.model_flops, rollouts)
        advantages = estimate_advantages(run.baseline, run.scale, state, before, rollouts, ends)
        rewarded = credited(run.credit_tricks, rollouts, before, advantages, 0)
        inputs = make_inputs(plan, rollouts, before, rewarded, 0.0)
    assert isinstance(plan, SelfDistillation) and before.teacher_logprobs is not None
    assert not before.teacher_logprobs.requires_grad
    assert all(weight.grad is None for weight in state.learner.parameters())
    # the learner is trained behind its own prompts
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    encoded = tokenizer([problem.question for problem in rollouts.problems], add_special_tokens=False)["input_ids"]
    assert inputs.rollouts is rollouts and rollouts.prompts == asked == tuple(map(tuple, encoded))
    model, size, heard = AutoModelForCausalLM.from_pretrained(tiny_base), rollouts.group_size, 0
    rewarded = advantages.scaled.flatten()
    for row in range(rollouts.num_rows):
        group, member = divmod(row, size)
        texts = [
            tokenizer.decode(rollouts.tokens[group * size + other][: rollouts.lengths[group * size + other] - 1])
            for other in range(size)
            if graded.correctness[group, other] == 1 and other != member
        ]
        text = shown(plan, rollouts.problems[group], texts)
        scored = before.teacher_mask[row]
        if text is None:
            assert not scored.any()
            assert (inputs.advantages[row][rollouts.sampled_mask[row]] == plan.reward_weight * rewarded[row]).all()
            continue
        heard += 1
        assert torch.equal(scored, rollouts.sampled_mask[row])
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        response = rollouts.tokens[row][: rollouts.lengths[row]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([torch.tensor(prompt), response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs = (logits / run.engine.temperature).log_softmax(-1).gather(1, response[:, None]).squeeze(1)
        torch.testing.assert_close(before.teacher_logprobs[row][scored], logprobs.float(), rtol=0, atol=1e-4)
        gain = logprobs - before.old_logprobs[row][scored] + plan.reward_weight * rewarded[row]
        torch.testing.assert_close(inputs.advantages[row][scored], gain.float(), rtol=0, atol=1e-4)
    assert heard == rollouts.num_rows if isinstance(plan, Opsd) else 0 < heard < rollouts.num_rows


def test_a_response_that_does_not_fit_behind_the_longer_prompt_has_no_teacher() -> None:
    with opened(*OPSD) as (_, state, queue):
        batch = queue.take()
        assert state.privileged is not None
        rows, _ = state.privileged.behind(batch.rollouts, batch.filtered.correctness)
        assert rows == list(range(batch.rollouts.num_rows))
        _, every = state.privileged.behind(batch.rollouts, batch.filtered.correctness)
        long = [len(every.prompts[row]) + int(batch.rollouts.lengths[row]) for row in rows]
        limit = sorted(long)[len(long) // 2]
        kept, behind = replace(state.privileged, context=limit).behind(batch.rollouts, batch.filtered.correctness)
    assert kept == [row for row in rows if long[row] <= limit] and 0 < len(kept) < len(rows)
    assert torch.equal(behind.tokens, batch.rollouts.tokens[kept])


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("teacher=opsd",), r"teacher\.prompt='.*' cannot be written: .*set teacher\.prompt to a text"),
        (
            (OPSD[0], f"teacher.prompt='{'1+' * 50}{{answer}}#{{question}}'"),
            r"teacher\.prompt makes prompts of up to \d+ tokens, which with another 24 tokens of response exceed the "
            r"model's context of 128",
        ),
        (
            (SDPO[0], f"teacher.prompt='{'1+' * 40}{{response}}+{{question}}'"),
            r"of up to \d+ tokens with a response of engine\.max_tokens=24 in it",
        ),
    ],
)
def test_prompts_that_cannot_be_used_are_refused_before_a_model_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], said: str
) -> None:
    def load(*arguments: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("grpo_lab.run.state.load_model", load)
    with pytest.raises(ValueError, match=said):
        run_in_process(tmp_path, *SMALL, *PURE, *overrides)


def first_step(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(min((folder / "rollouts").glob("*.parquet")))


@pytest.mark.extended
def test_the_sampler_never_sees_the_hint(tmp_path: Path) -> None:
    words = (*SMALL, *PURE, "budget.amount=1", "rollouts_every=1")
    plain = first_step(run_in_process(tmp_path, *words, name="plain"))
    for name, teacher in (("opsd", OPSD), ("sdpo", SDPO)):
        taught = first_step(run_in_process(tmp_path, *words, *teacher, name=name))
        assert [list(row) for row in taught["tokens"]] == [list(row) for row in plain["tokens"]]
        assert [list(row) for row in taught["token_logprob"]] == [list(row) for row in plain["token_logprob"]]
        assert [list(row) for row in taught["token_advantage"]] != [list(row) for row in plain["token_advantage"]]


def taught_to_use(hint: str, tiny_base: Path, folder: Path) -> Path:
    """The tiny base after some steps of solutions behind a prompt with a hint, which it can use then."""
    config, _ = compose_with_choices(["world=tiny"])
    task = to_run(config).task
    problems, solutions = task.problems("train"), task.solutions("train")
    assert solutions is not None
    tokenizer, model = AutoTokenizer.from_pretrained(tiny_base), AutoModelForCausalLM.from_pretrained(tiny_base)
    shown = [
        hint.format(answer=one.answer, response=solution, question=one.question)
        for one, solution in zip(problems, solutions)
    ]
    prompts = tokenizer(shown, add_special_tokens=False)["input_ids"]
    answers = tokenizer(list(solutions), add_special_tokens=False)["input_ids"]
    optimizer, generator = torch.optim.AdamW(model.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    width = max(len(prompt) + len(answer) + 1 for prompt, answer in zip(prompts, answers))
    ids, labels = (torch.full((len(prompts), width), filler) for filler in (0, -100))
    for row, (prompt, answer) in enumerate(zip(prompts, answers)):
        whole = torch.tensor([*prompt, *answer, tokenizer.eos_token_id])
        ids[row, : len(whole)] = whole
        labels[row, len(prompt) : len(whole)] = whole[len(prompt) :]
    for _ in range(60):
        rows = torch.randint(len(prompts), (64,), generator=generator)
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def hinted_base(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return taught_to_use("{answer}#{question}", tiny_base, tmp_path_factory.mktemp("hinted") / "base")


def learnt(folder: Path, base: Path, *overrides: str) -> list[dict]:
    """The metrics before and after each of 16 steps; held-out accuracy is over 256 answers at both ends."""
    words = (*SMALL, *PURE, *overrides, "model=hf", f"model.path={base}", "budget.amount=16")
    lines = metrics_of(run_in_process(folder, *words, "evaluation.heldout_problems=64", "evaluation.samples=4"))
    return [line["metrics"] for line in lines]


@pytest.mark.extended
def test_a_policy_learns_from_itself_without_the_hint(hinted_base: Path, tmp_path: Path) -> None:
    """From the policy at the start. One that follows the learner undoes itself at this rate, as OPSD's authors warn."""
    lines = learnt(tmp_path, hinted_base, *OPSD)
    assert lines[-1]["eval/heldout/accuracy"] - lines[0]["eval/heldout/accuracy"] > 0.15
    assert all(line["active_fraction/teacher"] > 0.9 for line in lines[1:])
    assert lines[1]["teacher/reverse_kl"] > 0


@pytest.mark.extended
def test_a_policy_learns_from_its_right_responses(tiny_base: Path, tmp_path: Path) -> None:
    base = taught_to_use("{response}+{question}", tiny_base, tmp_path / "base")
    lines = learnt(tmp_path, base, *SDPO)
    assert lines[-1]["eval/heldout/accuracy"] - lines[0]["eval/heldout/accuracy"] > 0.1
    # a group of which no other response is right has no signal
    assert 0.5 < lines[1]["active_fraction/teacher"] < 1


@pytest.mark.extended
@pytest.mark.parametrize("lora", [(), ("model.lora.rank=4",)], ids=["whole", "lora"])
def test_a_teacher_that_averages_the_learner_is_resumed_to_the_same_bits(
    hinted_base: Path, tmp_path: Path, lora: tuple[str, ...]
) -> None:
    words = (
        *SMALL,
        *PURE,
        *OPSD,
        "model=hf",
        f"model.path={hinted_base}",
        *lora,
        "checkpoint_every=2",
        "reference=ema",
    )
    whole = run_in_process(tmp_path / "whole", *words, "budget.amount=4", "keep_checkpoints=9")
    parts = run_in_process(tmp_path / "parts", *words, "budget.amount=4", "keep_checkpoints=9")
    (parts / "DONE").unlink()
    for file in (parts / "checkpoints" / "step=000004").iterdir():
        file.unlink()
    (parts / "checkpoints" / "step=000004").rmdir()
    same_ending(whole, run_in_process(tmp_path / "parts", *words, "budget.amount=4", "keep_checkpoints=9"))
    frozen = run_in_process(tmp_path / "frozen", *words[:-1], "budget.amount=4")
    ours, theirs = (metrics_of(folder)[-1]["metrics"]["teacher/reverse_kl"] for folder in (whole, frozen))
    assert ours != theirs, "the average has moved from the policy at the start"
