"""Filters of the training problems in real runs: what is measured, kept, paid for, trained on, and refused."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from short_runs import SMALL, metrics_of, run_in_process, same_ending
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.cli import main
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.native import Native
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.rollout import pass_rates
from grpo_lab.rollout.pass_rates import Base, Rates, ResponseKind, measure
from grpo_lab.run.state import open_state
from grpo_lab.run.training_problems import check_trained, pass_rates_text, read_questions, training_problems
from grpo_lab.seeding import token_uniforms
from grpo_lab.tasks.base import Grades
from grpo_lab.tasks.verifiers import Strict
from grpo_lab.tricks.pass_rate import Measured
from grpo_lab.types import NoiseKey, Problem

CPU = torch.device("cpu")
SMALLER = [
    "task.train_size=48", "task.probe_size=16", "evaluation.probe_problems=16", "evaluation.ends_probe_problems=16",
]  # fmt: skip
FEW = ["pass_rate.samples=4", *SMALLER]
SHORT = [*SMALL, "budget.amount=2", "rollouts_every=1"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pass_rates"


def answers_of(run: RunConfig, problems: tuple[Problem, ...], own: Path | None = None, kind: str = "answers") -> Rates:
    plan = run.pass_rate
    assert isinstance(plan, Measured)
    folder = run.model.resolve()
    base = Base.of(folder, AutoTokenizer.from_pretrained(folder), CPU)
    sampling = run.sampling
    if kind == "answers":
        asked = ResponseKind.answers(sampling, plan)
    else:
        asked = ResponseKind.guesses(sampling, plan, base.tokenizer)
    return measure(sampling, plan, asked, base, problems, own)


def rows(rates: Rates) -> list[tuple[object, ...]]:
    """The table's rows as plain values, seconds last."""
    table = rates.table.assign(lengths=[tuple(map(int, row)) for row in rates.table["lengths"]])
    return list(table.itertuples(index=False, name=None))


def test_rates_and_guesses_are_those_of_plain_code(make_run) -> None:
    """Token by token through transformers' own forward, each token by its own uniform number."""
    run = make_run("pass_rate=kimi", "pass_rate.samples=3", "pass_rate.tries=3", "pass_rate.guess_tokens=4")
    problems = run.task.problems("train")[:12]
    folder = run.model.resolve()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).double(), AutoTokenizer.from_pretrained(folder)
    (mark,) = tokenizer("#", add_special_tokens=False)["input_ids"]

    def answer(problem: Problem, kind: str, response: int, begins: list[int], limit: int) -> tuple[str, bool]:
        key = NoiseKey(0, f"pass_rate/{kind}", 0, problem.id, response)
        prompt, tokens = tokenizer(problem.question, add_special_tokens=False)["input_ids"], list(begins)
        while len(tokens) < limit:
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1]
            chances = logits.softmax(-1).cumsum(-1)
            (drawn,) = token_uniforms(key, len(tokens), len(tokens) + 1)
            tokens.append(int((chances <= drawn * chances[-1]).sum()))
            if tokens[-1] == tokenizer.eos_token_id:
                return tokenizer.decode(tokens[:-1]), True
        return tokenizer.decode(tokens), False

    protocols = {}
    for kind, begins, limit in (("answers", [], run.engine.max_tokens), ("guesses", [mark], 5)):
        said = [[answer(problem, kind, one, begins, limit) for one in range(3)] for problem in problems]
        # a guess need not hold its end
        expected = [
            sum(run.reward(problem, text, ended or kind == "guesses") for text, ended in some)
            for problem, some in zip(problems, said)
        ]
        rates = answers_of(run, problems, kind=kind)
        assert rates.right == expected and rates.graded == [3] * 12, kind
        protocols[kind] = json.loads((rates.folder / "protocol.json").read_text())
    assert {kind: protocol["truncation"] for kind, protocol in protocols.items()} == {
        "answers": "Score()",
        "guesses": "",
    }
    assert {protocol["weights"] for protocol in protocols.values()} == {fingerprint(folder)}
    assert [protocol["phrase"] for protocol in protocols.values()] == [[], [mark]]
    assert 0 < sum(expected) < 36


@pytest.mark.extended
def test_what_was_measured_is_read_and_what_is_missing_is_measured(make_run, monkeypatch, cache: Path) -> None:
    run = make_run("pass_rate=band", *FEW, "engine.max_rows=16")
    problems, opened = run.task.problems("train"), []
    open_engine = Native.open
    monkeypatch.setattr(Native, "open", lambda self, *rest: opened.append(1) or open_engine(self, *rest))
    some = answers_of(run, problems[:20])
    again = answers_of(run, problems[4:12])
    assert len(opened) == 1 and rows(again) == rows(some)[4:12]
    whole = answers_of(run, problems)
    assert len(opened) == 2 and rows(whole)[:20] == rows(some)
    (folder,) = cache.iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "protocol.json", "rates.parquet"]
    assert len(pd.read_parquet(folder / "rates.parquet")) == 48
    assert json.loads((folder / "protocol.json").read_text())["samples"] == 4
    # another seed of the run changes nothing; whatever an answer depends on is another protocol
    assert rows(answers_of(replace(run, seed=5), problems)) == rows(whole) and len(opened) == 2
    for other in ("engine.temperature=0.5", "pass_rate.samples=5", "pass_rate.seed=1", "reward=lenient"):
        answers_of(make_run("pass_rate=band", *FEW, other), problems[:2])
    # what an outcome earns changes no outcome, so a recipe whose rewards are -1 and 1 measures nothing again
    assert rows(answers_of(make_run("pass_rate=band", *FEW, "reward.wrong=-1"), problems)) == rows(whole)
    asked = replace(problems[0], answer="0")
    answers_of(run, (asked,))
    assert len(opened) == 7 and len(list(cache.iterdir())) == 5


@pytest.mark.extended
def test_a_stopped_measurement_goes_on_and_ends_with_the_same_rates(make_run, monkeypatch, cache: Path) -> None:
    run = make_run("pass_rate=band", *FEW, "engine.max_rows=16")  # 16 problems a part
    problems = run.task.problems("train")
    sampled, calls = pass_rates._sampled, []

    def stops(*arguments: object) -> pd.DataFrame:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sampled(*arguments)

    monkeypatch.setattr(pass_rates, "_sampled", stops)
    with pytest.raises(KeyboardInterrupt):
        answers_of(run, problems)
    (folder,) = cache.iterdir()
    assert len(list(folder.glob("part-*.parquet"))) == 2 and not (folder / "rates.parquet").exists()
    rates = answers_of(run, problems)
    assert [len(call[5]) for call in calls] == [16, 16, 16, 16], "the third part alone is asked again"
    monkeypatch.setenv("GRPO_LAB_CACHE", str(cache / "elsewhere"))
    fresh = answers_of(run, problems)
    assert [row[:-1] for row in rows(rates)] == [row[:-1] for row in rows(fresh)], "all but the time it took"
    (folder / "rates.parquet").write_bytes(b"PAR1 no longer")
    monkeypatch.setenv("GRPO_LAB_CACHE", str(cache.parent))
    with pytest.raises(ValueError, match=r"rates\.parquet cannot be read .*delete it, and it will be measured again"):
        answers_of(run, problems)


def test_the_cost_by_hand(make_run) -> None:
    """Two problems, prompts of 3 and 5 tokens, two answers each; of one 2 tokens were injected."""
    run = make_run(
        "pass_rate=band", "cost_model.read_token=1", "cost_model.decode_step=10", "cost_model.decode_token=0"
    )
    table = pd.DataFrame(
        {"prompt_tokens": [3, 5], "lengths": [[4, 6], [1, 2]], "injected": [2, 0], "seconds": [0.5, 0.25]}
    )
    rates, account = Rates(table, Path()), ComputeAccount()
    rates.charge(run.cost_model, run.engine.max_rows, ModelFlops(weights=1, attention=0), account)
    assert (account.prompts, account.completions) == (2, 4)
    assert account.sampled_tokens == 3 + 5 + 4 + 6 + 1 + 2 - 2 and account.discarded_tokens == 11
    assert account.flops == 2 * (3 + 4 + 6 + 5 + 1 + 2) and account.trained_tokens == 0
    assert account.simulated_seconds == 8 + 10 * 6 and rates.seconds == 0.75


@pytest.mark.extended
def test_a_run_trains_on_what_is_left_pays_for_it_and_says_so(tmp_path: Path, make_run) -> None:
    overrides = [*SHORT, "pass_rate=skywork_or1", *FEW, "pass_rate.ranks_problems=true", "curriculum=easy_to_hard"]
    folder = run_in_process(tmp_path / "runs", *overrides)
    run = make_run(*overrides)
    rates = answers_of(run, run.task.problems("train"))
    left = {one.id: right for one, right in zip(run.task.problems("train"), rates.right) if 0 < right < 4}
    assert 16 <= len(left) < 48
    rollouts = pd.concat(pd.read_parquet(path) for path in (folder / "rollouts").iterdir())
    assert set(rollouts["problem_id"]) <= set(left)
    assert all(row.difficulty == 5 - left[row.problem_id] for row in rollouts.itertuples())
    start, *steps = [line["metrics"] for line in metrics_of(folder)]
    unsolved, solved = rates.right.count(0), rates.right.count(4)
    assert start["problems/trained"] == len(left) == 48 - unsolved - solved
    assert start["problems/dropped/pass_rate/unsolved"] == unsolved and start["pass_rate/unsolved"] == unsolved / 48
    assert start["pass_rate/mean"] == pytest.approx(sum(rates.right) / 48 / 4)
    tokens = int(rates.table["prompt_tokens"].sum() + sum(map(sum, rates.table["lengths"])))
    assert start["budget/sampled_tokens"] == tokens and start["budget/completions"] == 4 * 48
    assert steps[-1]["budget/sampled_tokens"] > tokens
    same = sum(one.id in left and one.difficulty == 5 - left[one.id] for one in run.task.problems("train"))
    assert all(row["active_fraction/pass_rate"] == 1 - same / 48 for row in (start, *steps)), (
        "dropped, or of another level"
    )
    described = json.loads((folder / "run.json").read_text())
    assert described["trained_on"]["problems"] == len(left) and described["trained_on"]["of"] == 48
    said = f"pass_rate dropped {unsolved + solved} of the 48 training problems (unsolved {unsolved}"
    assert any(line.startswith(said) for line in described["warnings"])
    assert described["data"] is None, "what is asked in evaluation is that of a run without the filter"
    timing = json.loads((folder / "timing.jsonl").read_text().splitlines()[0])["timing"]
    assert timing["time/pass_rate"] == pytest.approx(rates.seconds)
    probe = pd.read_parquet(min((folder / "eval").iterdir())).query("suite == 'probe'")
    assert set(probe["problem_id"]) == {one.id for one in run.task.problems("probe")}


@pytest.mark.extended
def test_a_run_goes_on_without_the_cache_as_if_it_had_never_stopped(tmp_path: Path, monkeypatch) -> None:
    overrides = [*SHORT, "pass_rate=band", *FEW, "checkpoint_every=1", "problems_per_step=8"]
    whole = run_in_process(tmp_path / "whole", *overrides)
    part = run_in_process(tmp_path / "part", *overrides)
    (part / "DONE").unlink()
    for path in (part / "checkpoints" / "step=000002").iterdir():
        path.unlink()
    (part / "checkpoints" / "step=000002").rmdir()
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "no cache"))
    monkeypatch.setattr(pass_rates, "_sampled", lambda *arguments: pytest.fail("the run has a copy"))
    same_ending(whole, run_in_process(tmp_path / "part", *overrides))
    # with other problems than it began with, it is refused
    (part / "DONE").unlink()
    described = json.loads((part / "run.json").read_text())
    assert (
        described["trained_on"]["fingerprint"]
        == json.loads((whole / "run.json").read_text())["trained_on"]["fingerprint"]
    )
    (copy,) = part.glob("pass_rates-answers-*.parquet")
    table = pd.read_parquet(copy)
    table.assign(right=(table["right"] + 1) % 5).to_parquet(copy)
    with pytest.raises(
        ValueError, match=r"other training problems \(\d+\) than when this run began \(\d+\): restore the base model"
    ):
        run_in_process(tmp_path / "part", *overrides)


def test_filters_apply_one_after_another_and_the_answers_stay_with_their_problems(tmp_path: Path, make_run) -> None:
    """Guesses first; only the rest is asked for whole answers. Demonstrations are of the problems that are left."""
    run = make_run(*FEW, "pass_rate=kimi", "pass_rate.tries=2", "problems_per_step=4")
    whole = run.task.problems("train")
    guesses = answers_of(run, whole, kind="guesses")
    left = [one for one, right in zip(whole, guesses.right) if right == 0]
    found = training_problems(run, CPU)
    assert [one.id for one in found.problems] == [one.id for one in left] and 4 <= len(left) < 48
    assert dict(found.dropped["pass_rate"]) == {"guessed": 48 - len(left)}
    assert [len(rates.table) for rates in found.rates] == [48, len(left)]
    assert pass_rates_text(found).count("sampled tokens in") == 2
    tuned = make_run(
        *FEW, "pass_rate=kimi", "pass_rate.tries=2", "problems_per_step=4", "sft=demonstrations",
        f"sft.problems={len(left)}", "sft.epochs=1", "sft.learning_rate=1e-9",
    )  # fmt: skip
    state = open_state(tuned, CPU, own=tmp_path)
    state.session.close()
    solutions = dict(zip((one.id for one in whole), run.task.solutions("train")))
    lengths = [len(state.tokenizer(solutions[one.id])["input_ids"]) + 1 for one in left]
    fits = [length for length in lengths if length <= run.engine.max_tokens]
    assert state.start.metrics["sft/length"] == pytest.approx(sum(fits) / len(fits))
    assert state.account.sampled_tokens > 0 and state.start.account.sampled_tokens == 0


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["pass_rate=skywork_or1", "pass_rate.low=0.99"],
            r"pass_rate leaves 0 of 48 training problems \(.*\), and problems_per_step=16: loosen pass_rate, lower",
        ),
        (
            ["question_filter=deduplicated", "question_filter.run_words=1", "question_filter.similarity=0.01"],
            r"question_filter leaves \d of 48 training problems \(near_evaluation \d+",
        ),
        (["pass_rate=band", "reward=gym"], "is none of reasoning-gym.*reward=math and verifier=math"),
        (
            ["pass_rate=kimi", "engine.max_tokens=100000"],
            r"engine\.max_tokens=100000, evaluation\.max_tokens=100000 and a prompt of",
        ),
    ],
)
def test_too_few_problems_and_what_cannot_be_asked_are_refused(make_run, overrides: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        open_state(make_run(*SMALLER, *overrides), CPU)


@pytest.mark.extended
def test_a_budget_that_the_rates_alone_spend_is_no_finished_run(tmp_path: Path) -> None:
    words = [*SHORT, "pass_rate=open", *FEW, "budget=sampled_tokens", "budget.amount=500"]
    with pytest.raises(
        ValueError, match=r"spent before the first step, on what pass_rate or sft sampled.*raise budget"
    ):
        run_in_process(tmp_path, *words, name="run")
    assert not (tmp_path / "run" / "seed=0" / "DONE").exists()


def test_the_command_refuses_what_a_run_refuses_and_says_where_memory_ran_out(monkeypatch) -> None:
    def measured(*words: str) -> str:
        monkeypatch.setattr("sys.argv", ["grpo-lab", "pass-rates", *SHORT, *FEW, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return str(ended.value)

    said = measured("pass_rate=kimi", "template.interruption=''")
    assert "a guess begins with the template's interruption, which is empty" in said

    def full(*_: object) -> pd.DataFrame:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(pass_rates, "_sampled", full)
    assert "out of memory (stage: pass_rate; no room): lower engine.max_rows" in measured("pass_rate=band")


def test_without_filters_a_run_is_as_it_was(make_run) -> None:
    run = make_run()
    found = training_problems(run, CPU)
    assert found.problems == run.task.problems("train") and found.record() is None
    assert (found.metrics, found.active, found.clock, found.notes()) == ({}, {}, {}, [])


def test_a_text_filter_leaves_evaluation_alone(tmp_path: Path, make_run) -> None:
    rows = [{"question": f"{n}+{n % 7}?", "answer": n + n % 7} for n in range(1, 60)]
    rows += [{"question": f"Prove that {n}=1", "answer": 1} for n in range(1, 30)]
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, filtered = (
        make_run("task=jsonl", f"task.path={path}", f"question_filter={name}") for name in ("none", "verifiable")
    )
    kept = read_questions(filtered.question_settings)
    assert {one.question for one in kept.problems} == {
        one.question for one in plain.task.problems("train") if "Prove" not in one.question
    }
    assert filtered.task.fingerprint() == plain.task.fingerprint()
    dropped = kept.whole - len(kept.problems)
    assert kept.notes() == [
        f"question_filter dropped {dropped} of the {kept.whole} training problems (proof {dropped})"
    ]
    assert kept.metrics == {"problems/dropped/question_filter/proof": dropped, "problems/trained": len(kept.problems)}
    assert any("Prove" in one.question for one in filtered.task.problems("heldout"))


def test_a_grader_that_fails_on_every_answer_is_refused_with_an_answer_that_it_should_read(
    make_run, monkeypatch
) -> None:
    def failing(reward: Strict, problems: Sequence[Problem], *rest: object) -> Grades:
        return Grades([math.nan] * len(problems), {})

    monkeypatch.setattr(Strict, "grades", failing)
    monkeypatch.setattr(Strict, "may_fail", True)
    run = make_run("pass_rate=band", *FEW)
    problems = run.task.problems("train")[:2]
    with pytest.raises(
        ValueError, match=f"the grader failed on all answers sampled for .*such as '{problems[0].answer}'"
    ):
        answers_of(run, problems)


@pytest.mark.extended
def test_a_run_goes_on_with_the_training_problems_that_it_began_with() -> None:
    began = {"fingerprint": "a", "problems": 3}
    for before in ({}, {"trained_on": None}, {"trained_on": began}):
        check_trained(before, began)
    for now, number in (({"fingerprint": "b", "problems": 2}, "2"), (None, "None")):
        with pytest.raises(
            ValueError, match=rf"the filters leave other training problems \({number}\) than when this run began \(3\)"
        ):
            check_trained({"trained_on": began}, now)
