"""Forced answers, stopped loops, lengths that prompts ask for, references that move, and the signs of all of them."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import F64, assert_close, loss_and_gradient, make_graded, make_rollouts
from helpers import make_run as loss_run
from sampling import CPU, FP32, requests_of
from short_runs import SMALL, metrics_of, run_in_process, same_ending
from transformers import AutoTokenizer

from grpo_lab.engines.native import Native
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.learner.response_metrics import repetition, response_metrics, target_length_metrics
from grpo_lab.policy.batching import StepInputs, rollout_logprobs
from grpo_lab.policy.models import load_model
from grpo_lab.rollout.grading import asking, decode, encode_prompts, grade, to_rollouts, tools_for, with_target_length
from grpo_lab.run.evaluate import evaluate, make_suites, pass_at_k
from grpo_lab.run.state import open_state, read_inputs
from grpo_lab.run.training_problems import training_problems
from grpo_lab.tasks.arithmetic import ArithmeticWorld, build_tokenizer
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.templates import Plain
from grpo_lab.tasks.verifiers import Near, Strict
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.precision import LmHead
from grpo_lab.tricks.reference import Ema, Frozen, Reset
from grpo_lab.tricks.reward_shaping import L1Exact, L1Max, NoShaping
from grpo_lab.tricks.truncation import Interrupt, RepetitionStop, Score
from grpo_lab.types import Completion, Groups, Microbatching, NoiseKey, Problem, Rollouts, StopReason

BUDGET = 24
INTERRUPT = Interrupt(earliest=0.5, latest=0.75, phrase="#", max_tokens=BUDGET)


@pytest.fixture
def session(tiny_base: Path) -> NativeSession:
    return Native(BUDGET, 1.0, 1.0, max_rows=512).open(tiny_base, FP32, CPU)


def both_ways(
    folder: Path, session: NativeSession, interrupt: Interrupt = INTERRUPT, rows: int = 192
) -> tuple[list[Completion], list[Completion]]:
    """The same requests with and without interruptions."""
    requests, tools = requests_of(folder, rows), tools_for(AutoTokenizer.from_pretrained(folder))
    return interrupt.generate(session, requests, tools), Score().generate(session, requests, tools)


def rollouts_of(folder: Path, completions: list[Completion]) -> Rollouts:
    requests = requests_of(folder, len(completions))
    problems = tuple(Problem(index, "", "7", 1) for index in range(len(requests)))
    return to_rollouts(problems, tuple(request.prompt for request in requests), 1, completions)


# --- interruptions ------------------------------------------------------------------------------------------


def test_an_interrupted_response_is_the_same_up_to_its_cut_then_the_phrase_then_its_own_answer(
    tiny_base: Path, session: NativeSession
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    (mark,) = tools_for(tokenizer).encode("#")
    forced, free = both_ways(tiny_base, session)
    cuts = []
    for with_it, without in zip(forced, free):
        if not with_it.injected.any():
            # Ended before its turn came: round(.5 * 24) = 12 is the first token after which one can be interrupted.
            assert with_it.ids == without.ids and with_it.stop is StopReason.EOS
            continue
        (cut,) = [place for place, put_in in enumerate(with_it.injected.tolist()) if put_in]
        cuts.append(cut)
        assert with_it.ids[:cut] == without.ids[:cut] and len(without.tokens) >= cut
        assert with_it.ids[cut] == mark and with_it.logprobs[cut] == 0.0
        assert len(with_it.tokens) > cut + 1 and len(with_it.tokens) <= BUDGET
        assert len(with_it.tokens) == len(with_it.logprobs) == len(with_it.weight_versions) == len(with_it.injected)
    # .5 and .75 of 24 are 12 and 18, both included; 60 responses and more leave none of the seven out.
    assert len(cuts) > 60 and set(cuts) == set(range(12, 19))


@pytest.mark.extended
def test_cuts_are_of_each_responses_own_noise(tiny_base: Path, session: NativeSession) -> None:
    forced, _ = both_ways(tiny_base, session)
    alone = []
    for request in requests_of(tiny_base, 192)[:24]:
        alone += INTERRUPT.generate(session, [request], tools_for(AutoTokenizer.from_pretrained(tiny_base)))
    assert [c.ids for c in alone] == [c.ids for c in forced[:24]]


def test_the_learner_gives_sampled_tokens_the_samplers_logprobs_behind_an_injected_phrase_too(
    tiny_base: Path, session: NativeSession
) -> None:
    forced, _ = both_ways(tiny_base, session)
    rollouts = rollouts_of(tiny_base, forced)
    learner = load_model(tiny_base, LmHead.same)
    scored, spread = rollout_logprobs(learner, rollouts, 1.0, FP32, Microbatching(4096, 192), CPU)
    assert_close(scored, rollouts.sampler_logprobs, 1e-4, "injected tokens are read as context")
    assert (scored[~rollouts.sampled_mask] == 0).all() and (spread[~rollouts.sampled_mask] == 0).all()
    behind = rollouts.sampled_mask & ((rollouts.response_mask & ~rollouts.sampled_mask).cumsum(dim=1) > 0)
    assert behind.sum() > 100
    # Were the phrase left out of what the learner reads, they would differ.
    without = replace(rollouts, tokens=torch.where(rollouts.sampled_mask, rollouts.tokens, 0))
    wrong, _ = rollout_logprobs(learner, without, 1.0, FP32, Microbatching(4096, 192), CPU)
    assert (wrong - scored)[behind].abs().max() > 0.1


def test_injected_tokens_are_real_and_never_trained(tiny_base: Path, session: NativeSession) -> None:
    """Nothing that is written on an injected token reaches the loss, and its log-prob has no gradient."""
    forced, _ = both_ways(tiny_base, session, rows=48)
    rollouts = rollouts_of(tiny_base, forced)
    injected = rollouts.response_mask & ~rollouts.sampled_mask
    assert torch.equal(rollouts.interrupted, injected.any(dim=1)) and 0 < int(injected.sum()) < rollouts.num_rows
    assert_close(rollouts.lengths, [len(c.tokens) for c in forced], 0, "the phrase counts as length")

    def gradient(junk: float) -> torch.Tensor:
        def spoilt(values: torch.Tensor) -> torch.Tensor:
            return torch.where(injected, junk, values.to(F64))

        drawn = rollouts.sampler_logprobs
        addressed = torch.arange(drawn.numel()).reshape(drawn.shape)
        own = replace(rollouts, tokens=addressed, sampler_logprobs=spoilt(drawn))
        advantages = spoilt(torch.ones_like(drawn))
        inputs = StepInputs(own, rollouts.sampled_mask, advantages, spoilt(drawn), spoilt(drawn - 0.1), None)
        k3 = K3Loss(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0)
        return loss_and_gradient(loss_run(kl=k3), inputs, spoilt(drawn + 0.05))[1]

    plain, spoilt = gradient(0.0), gradient(-5.0)
    assert (plain[injected] == 0).all() and (plain[rollouts.sampled_mask] != 0).all()
    assert torch.equal(plain, spoilt)


def test_the_answer_behind_the_mark_is_what_is_graded(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    encode = tools_for(tokenizer).encode
    (end,) = tokenizer("<eos>", add_special_tokens=False)["input_ids"]

    def forced(before: str, after: str, ends: bool) -> Completion:
        tokens, drawn = encode(before), encode(after) + (end,) * ends
        number = len(tokens) + 1 + len(drawn)
        injected = (False,) * len(tokens) + (True,) + (False,) * len(drawn)
        stop = StopReason.EOS if ends else StopReason.LENGTH
        return Completion.of(tokens + encode("#") + drawn, (0.0,) * number, (0,) * number, stop, injected)

    answers = [
        forced("3+4=", "7", True),
        forced("#9", "7", True),
        forced("3+4=", "8", True),
        forced("3+4=7;", "7", False),
    ]
    rollouts = to_rollouts((Problem(0, "3+4?", "7", 1),), (encode("3+4?"),), 4, answers)
    texts = decode(tokenizer, rollouts)
    assert texts == ["3+4=#7", "#9#7", "3+4=#8", "3+4=7;#7"]
    graded = grade(rollouts, texts, Strict(1.0, 0.0), [])
    assert_close(graded.correctness, [[1, 1, 0, 0]], 0, "a right answer counts, one that the budget cut does not")
    assert graded.truncated.tolist() == [[False, False, False, True]] and set(graded.components) == {"outcome"}
    near = grade(rollouts, texts, Near(1.0, 0.0, near=0.25, within=1), [])
    assert_close(near.correctness, graded.correctness, 0, "a part of the reward is no right answer")
    assert_close(near.reward, [[1, 1, 0.25, 0]], 0, "8 is one off 7")
    assert_close(near.components["part"], [[0, 0, 0.25, 0]], 0, "only finished responses")
    assert_close(graded.lengths, [[7, 5, 7, 8]], 0, "4 + 1 + 2, 2 + 1 + 2, 4 + 1 + 2, 6 + 1 + 1")


@pytest.mark.extended
def test_a_budget_without_room_for_phrase_and_token_is_left_alone(tiny_base: Path, session: NativeSession) -> None:
    # Cuts of 12 to 18; a phrase of 11 tokens leaves 24 - 11 = 13, so that only a cut of 12 has room for one token more.
    long = replace(INTERRUPT, phrase="#" * 11)
    forced, free = both_ways(tiny_base, session, long)
    touched = [c for c in forced if c.injected.any()]
    assert touched and all(c.injected.tolist().index(True) == 12 and len(c.tokens) == 24 for c in touched)
    assert all(sum(c.injected) == 11 and c.stop in (StopReason.LENGTH, StopReason.EOS) for c in touched)
    for with_it, without in zip(forced, free):
        if not with_it.injected.any():
            assert with_it == without, "not even one token earlier"
    none, free = both_ways(tiny_base, session, replace(INTERRUPT, phrase="#" * 12))
    assert [c.ids for c in none] == [c.ids for c in free] and not any(c.injected.any() for c in none)


def test_interruption_ends_what_the_budget_would_have_cut(tiny_base: Path, session: NativeSession) -> None:
    forced, free = both_ways(tiny_base, session)
    cut, was_cut = (sum(c.stop is StopReason.LENGTH for c in some) for some in (forced, free))
    assert was_cut > 20 and cut < was_cut / 4


@pytest.mark.extended
def test_only_the_training_protocol_interrupts_in_evaluation(tiny_base: Path, make_run) -> None:
    run = make_run("truncation=interrupt", "truncation.earliest=0.3", "truncation.latest=0.4")
    suites = make_suites(run)
    assert [suite.truncation for suite in suites] == [run.truncation, run.truncation, Score(), Score()]
    assert [suite.name for suite in suites] == ["probe", "heldout_training", "heldout", "downstream"]
    state = open_state(run, CPU, None)
    _, table = evaluate(suites, state.session, state.tokenizer, run.template, run.evaluation, run.seed)
    mean = table.groupby("suite")["length"].mean()
    # The tiny base answers "#<number>" within 4 tokens of the mark; cuts are at 7 to 10 of 24 tokens.
    assert mean["heldout_training"] < 14 and mean["downstream"] > 14
    state.session.close()


# --- loops --------------------------------------------------------------------------------------------------


def sure_end(logprobs: list[float], patience: int, probability: float) -> int | None:
    """After how many tokens a run of `patience` sure ones is complete, by counting; None where none ever is."""
    streak = 0
    for place, logprob in enumerate(logprobs):
        streak = streak + 1 if logprob > math.log(probability) else 0
        if streak == patience:
            return place + 1
    return None


@pytest.mark.parametrize(("share", "probability"), [(0.25, 0.9), (0.15, 0.8), (0.05, 0.99)])
def test_a_loop_stops_exactly_where_the_run_of_sure_tokens_is_complete(
    tiny_base: Path, session: NativeSession, share: float, probability: float
) -> None:
    requests, tools = requests_of(tiny_base, 96), tools_for(AutoTokenizer.from_pretrained(tiny_base))
    patience = round(share * BUDGET)  # 6, 4 (of 3.6) and 1 (of 1.2)
    stopping = RepetitionStop(share=share, probability=probability, max_tokens=BUDGET)
    stopped, free = stopping.generate(session, requests, tools), session.generate(requests)
    seen = set()
    for now, before in zip(stopped, free):
        end = sure_end(before.logprobs.tolist(), patience, probability)
        if end is None or (end == len(before.tokens) and before.stop is StopReason.EOS):
            assert now.ids == before.ids and now.stop is before.stop, "its own end of text comes first"
            seen.add("went on" if end is None else "ended on that token")
        else:
            assert now.ids == before.ids[:end] and now.stop is StopReason.REPETITION
            seen.add("stopped")
    assert "stopped" in seen and (share > 0.2 or len(seen) > 1)
    rollouts = rollouts_of(tiny_base, stopped)
    by_reason = [c.stop is StopReason.REPETITION for c in stopped]
    assert rollouts.looped.tolist() == by_reason
    graded = grade(rollouts, decode(AutoTokenizer.from_pretrained(tiny_base), rollouts), Strict(1.0, 0.0), [])
    assert graded.truncated.flatten()[rollouts.looped].all() and not rollouts.finished[rollouts.looped].any()
    assert float(graded.correctness.flatten()[rollouts.looped].sum()) == 0


def test_a_stream_says_what_a_batch_says(tiny_base: Path, session: NativeSession) -> None:
    """Also where loops are stopped, and where a response goes on behind what exists of it."""
    tools = tools_for(AutoTokenizer.from_pretrained(tiny_base))
    plain = requests_of(tiny_base, 48)
    begun = [
        replace(request, prefix=part.ids[:5])
        for request, part in zip(plain, session.generate(plain))
        if len(part.tokens) > 5
    ]
    stopping = RepetitionStop(share=0.15, probability=0.8, max_tokens=BUDGET)
    for requests in (plain, begun, [stopping.begins(request, tools) for request in plain]):
        expected = session.generate(requests)
        stream, found = session.open_stream(), {}
        for key, request in enumerate(requests):
            stream.add(key, request)
        while stream.busy:
            found |= dict(stream.take(wait=True))
        assert len(begun) > 20 and [found[key].ids for key in range(len(requests))] == [c.ids for c in expected]
        assert [found[key].stop for key in range(len(requests))] == [c.stop for c in expected]
    assert StopReason.REPETITION in {c.stop for c in expected}


def test_the_end_of_text_wins_over_a_loop_on_the_same_token(tiny_base: Path, session: NativeSession) -> None:
    """A patience of one stops at the first sure token; where that is the end of text the response is finished."""
    tools = tools_for(AutoTokenizer.from_pretrained(tiny_base))
    barely = RepetitionStop(share=1 / BUDGET, probability=1e-6, max_tokens=BUDGET)
    requests = requests_of(tiny_base, 96)
    whole = session.generate(requests)
    ended = [(request, c) for request, c in zip(requests, whole) if c.stop is StopReason.EOS]
    last = [replace(request, prefix=c.ids[:-1]) for request, c in ended]  # all but the end of text is there
    found = barely.generate(session, last, tools)
    assert len(found) > 20 and {c.stop for c in found} == {StopReason.EOS} and {len(c.tokens) for c in found} == {1}
    assert {c.stop for c in barely.generate(session, requests, tools)} == {StopReason.REPETITION}


# --- rewards that look at length ----------------------------------------------------------------------------


def test_a_target_length_covers_its_range_and_is_of_the_prompt_alone(make_run) -> None:
    shaping = L1Exact(alpha=0.03, shortest=8, longest=12)
    # Five lengths, a fifth of [0, 1) each.
    assert [shaping.draw_target_length(u) for u in (0.0, 0.199, 0.2, 0.999, 1 - 2**-53)] == [8, 8, 9, 12, 12]
    assert L1Max(alpha=0.03, shortest=8, longest=8, delta=0.5).draw_target_length(0.9999) == 8
    assert shaping.asks_for == range(8, 13) and NoShaping().draw_target_length(0.5) is None and not NoShaping().asks_for
    template = make_run().template
    problem = Problem(7, "3+4?", "7", 2)
    asked = with_target_length(shaping, template, problem, NoiseKey(0, "train", 3, 7, 0))
    assert asked == with_target_length(L1Max(0.1, 8, 12, 0.5), template, problem, NoiseKey(0, "train", 3, 7, 0)), (
        "arms share it"
    )
    assert asked.target_length in range(8, 13) and asked.question == f"3+4?{asked.target_length}?"
    assert with_target_length(NoShaping(), template, problem, NoiseKey(0, "train", 3, 7, 0)) is problem
    drawn = [
        with_target_length(shaping, template, problem, NoiseKey(0, "train", s, 7, 0)).target_length for s in range(500)
    ]
    # 100 expected of each, standard deviation sqrt(500 * .2 * .8) = 9
    assert all(abs(drawn.count(length) - 100) < 36 for length in range(8, 13))


@pytest.mark.extended
def test_the_longest_possible_target_length_must_fit_the_context(make_run, tiny_base: Path, tmp_path: Path) -> None:
    """Target lengths of 9 or 100000 tokens: the drawn ones may be short, and the prompt must fit with the long one."""
    context = json.loads((tiny_base / "config.json").read_text())["max_position_embeddings"]
    plain = make_run()
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    problems = plain.task.problems("train") + plain.task.problems("downstream") + plain.task.problems("heldout")
    longest = max(map(len, encode_prompts(tokenizer, plain.template, problems)))
    room = context - longest  # without a target length, exactly this budget fits
    fits = make_run(f"evaluation.downstream_max_tokens={room}")
    open_state(fits, CPU, None).session.close()
    asks = ["reward_shaping=l1_exact", "reward_shaping.shortest=9", "reward_shaping.longest=10"]
    # "10?" takes three tokens more, "9?" two. The budget is refused where most questions do not fit; where some do
    # not, these are left out.
    with pytest.raises(ValueError, match=f"lower evaluation.downstream_max_tokens to at most {room - 3}"):
        open_state(make_run(*asks, f"evaluation.downstream_max_tokens={room - 1}"), CPU, None)
    run = make_run(*asks, f"evaluation.downstream_max_tokens={room - 2}")
    asked = next(suite for suite in make_suites(run) if suite.name == "downstream").problems
    too_long = [len(prompt) > longest + 2 for prompt in encode_prompts(tokenizer, run.template, asked)]
    inputs = read_inputs(run, training_problems(run, CPU, None))
    kept = next(suite for suite in inputs.suites if suite.name == "downstream").problems
    assert kept == tuple(problem for problem, long in zip(asked, too_long) if not long) and 0 < len(kept) < len(asked)
    assert f"{sum(too_long)} of {len(asked)} downstream questions have prompts of more than" in inputs.left_out[0]
    open_state(make_run(*asks, f"evaluation.downstream_max_tokens={room - 3}"), CPU, None).session.close()


# --- references that move -----------------------------------------------------------------------------------


def test_shares_of_the_learner() -> None:
    assert [Reset(every=3).mixes(step) for step in range(7)] == [0, 0, 1, 0, 0, 1, 0]
    assert [Ema(decay=0.75).mixes(step) for step in range(3)] == [0.25] * 3
    assert [Frozen().mixes(step) for step in range(3)] == [0] * 3 and not Frozen().changes
    for wrong in (lambda: Reset(every=0), lambda: Ema(decay=0.0), lambda: Ema(decay=1.0)):
        with pytest.raises(ValueError, match=r"every|decay"):
            wrong()


@pytest.mark.extended
def test_the_references_weights_are_those_numbers(make_run) -> None:
    state = open_state(make_run("kl=k3_loss", "reference=ema"), CPU, None)
    assert state.initial is not state.reference, "the initial policy stays while the reference moves"
    with torch.no_grad():
        for own, learnt in zip(state.reference.parameters(), state.learner.parameters()):
            own.fill_(1.0)
            learnt.fill_(3.0)
    before = [own.clone() for own in state.initial.parameters()]
    state.refresh_reference(0.0)
    assert all((own == 1).all() for own in state.reference.parameters())
    state.refresh_reference(0.25)  # .75 * 1 + .25 * 3 = 1.5
    assert all((own == 1.5).all() for own in state.reference.parameters())
    state.refresh_reference(0.25)  # .75 * 1.5 + .25 * 3 = 1.875
    assert all((own == 1.875).all() for own in state.reference.parameters())
    with torch.no_grad():
        for learnt in state.learner.parameters():
            learnt.uniform_(-1, 1)
    state.refresh_reference(1.0)
    for own, learnt in zip(state.reference.parameters(), state.learner.parameters()):
        assert torch.equal(own, learnt.detach()) and own.data_ptr() != learnt.data_ptr()
    assert all(torch.equal(own, old) for own, old in zip(state.initial.parameters(), before))
    state.session.close()


@pytest.mark.parametrize(
    "reference",
    [["reference=reset", "reference.every=2"], pytest.param(["reference=ema"], marks=pytest.mark.extended)],
    ids=str,
)
def test_a_killed_run_with_a_reference_that_moves_ends_with_the_same_bits(tmp_path: Path, reference: list[str]) -> None:
    settings = [*reference, "kl=k3_loss", "kl.kl_coef=0.1", "updates=two", "budget.amount=5", *SMALL]
    settings += ["problems_per_step=4", "group_size=4"]
    whole = run_in_process(tmp_path / "whole", *settings, "checkpoint_every=3")
    broken = shutil.copytree(whole, tmp_path / "broken" / whole.relative_to(tmp_path / "whole"))
    (broken / "DONE").unlink()
    newest = max((broken / "checkpoints").iterdir())
    assert newest.name != min((broken / "checkpoints").iterdir()).name
    for file in sorted(newest.rglob("*"), reverse=True):
        file.unlink()
    newest.rmdir()  # as if it had been killed between step 3 and the end
    run_in_process(tmp_path / "broken", *settings, "checkpoint_every=3")
    same_ending(whole, broken)
    frozen = run_in_process(tmp_path / "frozen", *settings[len(reference) :])
    assert (
        metrics_of(frozen)[-1]["metrics"]["train/gradient_norm"]
        != (metrics_of(whole)[-1]["metrics"]["train/gradient_norm"])
    )


def test_the_loop_moves_the_reference_when_its_schedule_says(tmp_path: Path) -> None:
    """A copy after every second step: at steps 1 and 3 the learner is its own reference, at 2 and 4 a step away."""
    folder = run_in_process(
        tmp_path, "kl=k3_loss", "reference=reset", "reference.every=2", "updates=one", "budget.amount=4", *SMALL,
        "problems_per_step=4", "group_size=4",
    )  # fmt: skip
    away = [row["metrics"]["train/k3_ref"] for row in metrics_of(folder)[1:]]
    assert away[0] < 1e-8 < away[1] and away[2] < 1e-8 < away[3], away


# --- signs --------------------------------------------------------------------------------------------------


def test_repetition_by_hand() -> None:
    assert repetition([1, 2, 3, 4, 5]) == 0 and repetition([1, 2, 3, 4, 5, 6]) == 0
    # Eight runs of six equal tokens in thirteen: seven of the eight had been written before.
    assert repetition([4] * 13) == pytest.approx(7 / 8)
    # 1 2 3 twice and once more: runs begin at 1, 2, 3, 1 of nine tokens; the fourth repeats the first.
    assert repetition([1, 2, 3] * 3) == pytest.approx(1 / 4)


def groups_of(lengths: list[int], texts: list[str], outcome: list[list[float]], reward: list[list[float]]) -> Groups:
    rollouts = make_rollouts(lengths, len(outcome[0]))
    graded = make_graded(reward, correctness=outcome, lengths=torch.tensor(lengths).reshape(len(outcome), -1).tolist())
    return Groups(tuple(range(len(outcome))), rollouts, tuple(texts), graded, graded, graded)


def test_metrics_of_responses_by_hand() -> None:
    made = groups_of(
        [2, 3, 1, 2, 2, 3, 1, 2],
        ["~", "ok", "no ~ no", "", "a", "b", "c", "~~"],
        [[1, 0, 0, 0], [1, 1, 0, 0]],
        [[1.0, 0, 0, 0], [0.5, 0.5, 0, 0]],
    )
    looped = torch.tensor([True] + [False] * 7)
    sampled = made.rollouts.response_mask.clone()
    sampled[1, 1] = sampled[5, 0] = False
    made = replace(made, rollouts=replace(made.rollouts, looped=looped, sampled_mask=sampled))
    signs = response_metrics(made, ArithmeticWorld.check_again, torch.tensor([1.0, 0.75], dtype=F64))
    assert signs["rollout/check_again"] == 3 / 8 and signs["rollout/repetition"] == 0
    assert signs["rollout/interrupted"] == 2 / 8 and signs["rollout/stopped"] == 1 / 8
    # best less mean: 1 - .25 and .75 - .25; mean of .75 and .5
    assert signs["rollout/best_gap"] == pytest.approx(0.625)
    # 1 - C(3, 2) / C(4, 2) = 1 - 3/6 and 1 - C(2, 2) / C(4, 2) = 1 - 1/6; of four, one right is enough
    assert signs["rollout/pass_at_2"] == pytest.approx((1 / 2 + 5 / 6) / 2) and signs["rollout/pass_at_4"] == 1
    # Lengths 2 3 1 2 and 2 3 1 2 in both groups: mean 2, squares 0 1 1 0.
    assert signs["rollout/length_std_within"] == pytest.approx(0.5**0.5) and signs["rollout/length_std_across"] == 0
    assert "rollout/pass_at_8" not in signs and not [name for name in signs if name.startswith("target_length/")]
    assert pass_at_k(4, 0, 4) == 0
    assert any(mark in "Wait, I should double-check" for mark in Task.check_again)


def test_pass_at_k_is_of_the_responses_that_were_graded() -> None:
    """Of the first group three of four were graded, one right; of the second one, which is too few for pass@2.

    In the third a right response does not count, since it was truncated: two wrong ones and a right one are left.
    """
    made = groups_of([1] * 12, ["a"] * 12, [[1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]], [[0.0] * 4] * 3)
    counted = torch.tensor([[True, True, True, False], [True, False, False, False], [False, True, True, True]])
    made = replace(made, shaped=replace(made.shaped, in_statistics=counted))
    signs = response_metrics(made, ArithmeticWorld.check_again, torch.zeros(3, dtype=F64))
    # 1 - C(2, 2) / C(3, 2) = 2/3, twice
    assert signs["rollout/pass_at_2"] == pytest.approx(2 / 3)
    assert "rollout/pass_at_4" not in signs, "no group has four graded responses"


def test_metrics_of_target_lengths_by_hand() -> None:
    graded = make_graded([[0.0, 0], [0, 0]], lengths=[[10, 14], [20, 24]])
    assert target_length_metrics(graded) == {}
    asked = replace(graded, target_length=torch.tensor([[10, 10], [30, 30]]))
    # Mean lengths of 12 and 22 at 10 and 30: a slope of 10 / 20. Off by 0, 4, 10 and 6.
    assert target_length_metrics(asked) == pytest.approx(
        {"target_length/mean": 20, "target_length/error": 5, "target_length/slope": 0.5}
    )
    assert target_length_metrics(replace(graded, target_length=torch.full((2, 2), 16))) == pytest.approx(
        {"target_length/mean": 16, "target_length/error": (6 + 2 + 4 + 8) / 4}
    ), "one length for all has no slope"


@pytest.mark.extended
def test_the_probes_best_gap_remembers(make_run) -> None:
    state = open_state(make_run(), CPU, None)

    def answers(*outcomes: float) -> pd.DataFrame:
        return pd.DataFrame({"suite": ["probe"] * 4 + ["heldout"], "problem_id": [1, 1, 2, 2, 1], "outcome": outcomes})

    # Question 1 is right in one of two samples, question 2 never: 1 - .5 and 0 - 0.
    assert state.probe_gap(answers(1, 0, 0, 0, 0)) == 0.25
    # Now question 2 always, question 1 never: 1 - 0 and 1 - 1. The held-out question is no part of it.
    assert state.probe_gap(answers(0, 0, 1, 1, 1)) == 0.5
    assert state.probe_gap(answers(1, 1, 1, 1, 0)) == 0 and state.probe_best == {1: 1.0, 2: 1.0}
    state.session.close()


# --- in a run -----------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_interruptions_in_the_loop_end_truncation_and_are_logged(tmp_path: Path) -> None:
    short = ["budget.amount=2", "evaluation=brief", "updates=two", "rollouts_every=1"]
    plain = run_in_process(tmp_path / "plain", *short)
    forced = run_in_process(tmp_path / "forced", *short, "truncation=interrupt", "truncation.latest=0.8")
    before, after = (metrics_of(folder)[1]["metrics"] for folder in (plain, forced))
    assert before["rollout/truncated"] > 0.1 and after["rollout/truncated"] < before["rollout/truncated"] / 2
    # Whoever is not finished after .75 to .8 of 24 tokens, 18 or 19; among them all whom the budget would have cut.
    assert after["rollout/interrupted"] >= before["rollout/truncated"] and before["rollout/interrupted"] == 0
    assert after["active_fraction/truncation"] == pytest.approx(after["rollout/interrupted"])
    assert after["mismatch/k3"] < 1e-6, "the learner reads what the sampler read"
    (first,) = [path for path in (forced / "rollouts").iterdir() if path.name.startswith("step=000001")]
    table = pd.read_parquet(first)
    assert table["interrupted"].mean() == pytest.approx(after["rollout/interrupted"])
    for row in table[table["interrupted"]].itertuples():
        (place,) = [at for at, chosen in enumerate(row.token_sampled) if not chosen]
        assert row.tokens[place] == "#" and not row.token_in_loss[place] and row.token_advantage[place] == 0
        assert place in (18, 19)
    truncated = [f"eval/{suite}/truncated" for suite in ("heldout_training", "heldout")]
    evaluated = [metrics_of(folder)[0]["metrics"] for folder in (plain, forced)]
    assert evaluated[1][truncated[0]] < evaluated[0][truncated[0]] / 2
    assert evaluated[1][truncated[1]] == evaluated[0][truncated[1]], "the evaluation protocol knows no interruption"


def test_injected_tokens_are_in_no_counter(tmp_path: Path) -> None:
    """What was put in is neither drawn nor trained nor thrown away, and is below no fraction line."""
    folder = run_in_process(
        tmp_path, "truncation=interrupt", "truncation.latest=0.8", "aggregation=token_mean", "updates=one",
        "budget.amount=1", *SMALL,
    )  # fmt: skip
    row = metrics_of(folder)[1]["metrics"]
    table = pd.read_parquet(folder / "rollouts" / "step=000001.parquet")
    prompts = table.drop_duplicates("problem_id")["question"].str.len().sum()  # one token a character
    sampled = int(table["token_sampled"].map(sum).sum())
    assert sampled < table["length"].sum() and row["budget/sampled_tokens"] == prompts + sampled
    assert row["budget/trained_tokens"] == sampled and row["budget/discarded_tokens"] == 0
    assert row["factor/aggregation"] == pytest.approx(1, abs=1e-6), "each token of the loss weighs one in all of them"


@pytest.mark.extended
def test_loops_and_target_lengths_are_logged(tmp_path: Path) -> None:
    settings = ["budget.amount=2", "evaluation=brief", "updates=two", "rollouts_every=1"]
    folder = run_in_process(
        tmp_path, *settings, "truncation=repetition_stop", "truncation.share=0.2", "truncation.probability=0.9",
        "reward_shaping=l1_exact", "reward_shaping.shortest=6", "reward_shaping.longest=20",
    )  # fmt: skip
    rows = [row["metrics"] for row in metrics_of(folder)]
    for row in rows[1:]:
        assert row["rollout/stopped"] > 0 and row["active_fraction/truncation"] >= row["rollout/stopped"]
        assert (
            6 <= row["target_length/mean"] <= 20
            and row["target_length/error"] > 0
            and math.isfinite(row["target_length/slope"])
        )
        assert row["active_fraction/reward_shaping"] > 0.5
        assert {"rollout/repetition", "rollout/check_again", "rollout/best_gap", "rollout/pass_at_8"} <= row.keys()
    assert rows[0]["eval/probe/best_gap"] == 0, "one sample a question is its own best"
    table = pd.read_parquet(min((folder / "rollouts").iterdir()))
    for _, group in table.groupby("problem_id"):
        (wanted,) = set(group["wanted"])
        assert all(question.endswith(f"?{wanted}?") for question in group["question"])
    assert table["wanted"].nunique() > 5
    answers = [
        pd.read_parquet(path).set_index(["suite", "problem_id"])["wanted"] for path in (folder / "eval").iterdir()
    ]
    assert all(table.between(6, 20).all() for table in answers)
    assert all(table.equals(answers[0]) for table in answers), "a question asks for the same at every evaluation"


def test_a_question_of_another_wording_is_rendered_as_it_stands() -> None:
    template = Plain("think; ", "{question} Think for {tokens} tokens.", "[{question}]")
    asked = asking(template, Problem(1, "2+{tokens}?", "3", 1), 12)
    assert asked.question == "2+{tokens}? Think for 12 tokens." and asked.target_length == 12
    assert template.render(asked.question, build_tokenizer(64)) == "[2+{tokens}? Think for 12 tokens.]"
    with pytest.raises(ValueError, match=r"target_length must be a text with \{tokens\} in it once"):
        Plain("x", "{question}", "{question}")
