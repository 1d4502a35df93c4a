"""Filters that refill: what they take, what it costs, what it biases, and that nothing is lost or counted twice.

The statistics are of the real `Rounds` and the real filters over a sampler of made-up responses, whose lengths and
outcomes are functions of the noise; whatever depends on a model is of real runs on the tiny world.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close, make_graded, queue_of
from short_runs import SMALL, WORLD, metrics_of, run_in_process, same_ending

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.base import EngineSession
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.loop import start
from grpo_lab.rollout.queue import RolloutBatch, RolloutQueue
from grpo_lab.rollout.rounds import Rounds
from grpo_lab.run.checkpoint import latest, load_state
from grpo_lab.run.recorder import Recorder
from grpo_lab.run.state import RunState, open_state
from grpo_lab.seeding import token_uniforms
from grpo_lab.tasks.base import Reward
from grpo_lab.tricks.group_filter import Active, Collected, OversampleAbort, Resample, Signal, has_signal
from grpo_lab.types import Completion, Exhausted, NoiseKey, OnFinish, Problem, Request, StopReason

# --- a sampler of made-up responses ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LastDigit(Reward):
    """Right where the text ends with a 1."""

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return float(finished and text.endswith("1"))


def drawn(key: NoiseKey, place: int) -> float:
    return float(token_uniforms(key, place, place + 1)[0])


class MadeUp(EngineSession):
    """Decodes one token of each running response at a time; the last two are the outcome's digit and the end."""

    def __init__(self, digits: tuple[int, int], end: int, right: Callable, length: Callable) -> None:
        self.digits, self.end, self.right, self.length = digits, end, right, length
        self.version, self.calls, self.asked = 0, 0, []

    def update_weights(self, weights: Iterable, version: int) -> None:
        self.version = version

    def close(self) -> None:
        pass

    def whole(self, key: NoiseKey) -> tuple[int, ...]:
        """The response as it is when nothing cuts it off."""
        digit = self.digits[int(self.right(key))]
        return (self.digits[0],) * (self.length(key) - 2) + (digit, self.end)

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        self.calls += 1
        self.asked += requests
        texts = [self.whole(request.noise)[len(request.prefix) :] for request in requests]
        results = [None if text else Completion.unsampled((), StopReason.EOS) for text in texts]
        aborted: set[int] = set()
        for time in range(1, max(map(len, texts), default=0) + 1):
            alive = [row for row, result in enumerate(results) if result is None]
            for row in (row for row in alive if len(texts[row]) == time):
                results[row] = self._part(texts[row], StopReason.EOS)
                aborted.update(on_finish(row, results[row]) if on_finish else ())
            for row in aborted & set(alive):
                results[row] = results[row] or self._part(texts[row][:time], StopReason.ABORTED)
        return results

    def _part(self, text: tuple[int, ...], stop: StopReason) -> Completion:
        return Completion.of(text, (-1.0,) * len(text), (self.version,) * len(text), stop)


@dataclass
class World:
    """A run, what it holds and its queue, without the learning."""

    run: RunConfig
    state: RunState
    queue: RolloutQueue

    def step(self, group_filter) -> tuple[Rounds, Collected]:
        """One step up to the filter."""
        queue, account = self.queue, self.state.account
        progress = account.spent(self.run.budget)
        rounds = Rounds(queue.source, queue.maker, self.state.session, queue.memory, account.steps, progress)
        collected = group_filter.collect(rounds, self.run.problems_per_step)
        queue.memory = rounds.remember(collected.made)
        numbers = tuple(rounds.numbers[index] for index in collected.made.indices)
        started = rounds.started(collected.made)
        RolloutBatch.of(
            replace(self.run.queue_settings, group_filter=group_filter),
            collected.made,
            collected.chosen,
            numbers=numbers,
            spent=tuple(rounds.spent),
            passed_over=rounds.passed_over,
            started=started,
            ready_at=0.0,
        ).count(account, self.state.model_flops)
        account.steps += 1
        return rounds, collected


def bernoulli(chance: float) -> Callable[[NoiseKey], bool]:
    return lambda key: drawn(key, 0) < chance


@pytest.fixture
def world(make_run: Callable[..., RunConfig], tiny_base: Path) -> Iterator[Callable[..., World]]:
    """world(right, length, "group_size=4", ...) -> the tiny world with made-up responses, or the model's without."""

    def build(right: Callable | None, length: Callable, *overrides: str) -> World:
        run = make_run("evaluation.initial_kl=false", *overrides)
        state = open_state(run, torch.device("cpu"), None)
        if right is not None:
            run = replace(run, reward=LastDigit(1.0, 0.0))
            zero, one = (state.tokenizer.convert_tokens_to_ids(digit) for digit in "01")
            state.session = MadeUp((zero, one), state.tokenizer.eos_token_id, right, length)
        return World(run, state, queue_of(run, state))

    yield build


def always(value: int) -> Callable[[NoiseKey], int]:
    return lambda key: value


def one_right(key: NoiseKey) -> bool:
    """The first response of each group is right and no other: every group has signal."""
    return key.response == 0


# --- which groups carry signal ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate,expected", [(0.02, 0.134), (0.1, 0.176), (0.3, 0.318), (0.5, 0.5), (0.9, 0.824)])
def test_what_is_kept_is_pulled_to_one_half(rate: float, expected: float) -> None:
    """All 256 outcomes of 8 responses, each with its chance: E[mean | signal] = p (1 - p^7) / (1 - p^8 - (1-p)^8)."""
    patterns = list(product((0.0, 1.0), repeat=8))
    kept = has_signal(make_graded(patterns), Signal.outcome)
    assert len(kept) == 254
    chances = [rate ** sum(pattern) * (1 - rate) ** (8 - sum(pattern)) for pattern in patterns]
    share = sum(chances[place] for place in kept)
    mean = sum(chances[place] * sum(patterns[place]) / 8 for place in kept) / share
    assert_close(share, 1 - rate**8 - (1 - rate) ** 8, 1e-12, "share with signal")
    assert_close(mean, rate * (1 - rate**7) / share, 1e-12, "closed form")
    assert_close(mean, expected, 6e-4, "to three digits")


def test_a_shaped_reward_gives_all_wrong_groups_a_phantom_signal() -> None:
    """By hand: all wrong with a penalty on one length; all right with one; mixed; all wrong and alike; all right."""
    outcome = [[0, 0, 0], [1, 1, 1], [0, 1, 0], [0, 0, 0], [1, 1, 1]]
    reward = [[0, -0.5, 0], [1, 1, 0.5], [0, 1, 0], [-0.5, -0.5, -0.5], [1, 1, 1]]
    graded = make_graded(reward, correctness=outcome)
    assert has_signal(graded, Signal.outcome) == [2]
    assert has_signal(graded, Signal.reward) == [0, 1, 2]
    # a row that is not counted says nothing: the mixed group without its right response is all wrong
    counted = [[True] * 3, [True] * 3, [True, False, True], [True] * 3, [False] * 3]
    assert has_signal(make_graded(reward, correctness=outcome, in_statistics=counted), Signal.outcome) == []
    assert has_signal(make_graded(reward, correctness=outcome, in_statistics=counted), Signal.reward) == [0, 1]


# --- what a full batch costs -----------------------------------------------------------------------------------

RATE, GROUP, BATCH = 0.9, 4, 16
SHARE = 1 - RATE**GROUP - (1 - RATE) ** GROUP  # 1 - 0.6561 - 0.0001 = 0.3438


def until_full(world: World, position: int) -> tuple[int, int]:
    """How many problems of the plain stream, one by one, fill a batch; and where in the stream that ends.

    Without rounds.py: the shuffled passes, and the sampler's outcomes of the problem at the step.
    """
    run, state = world.run, world.state
    size = len(state.problems)
    asked: set[int] = set()
    found = 0
    while found < BATCH:
        pass_, place = divmod(position, size // BATCH * BATCH)
        order = np.random.Generator(np.random.Philox(key=[run.seed, pass_])).permutation(size)
        index, position = int(order[place]), position + 1
        if index in asked:
            continue
        asked.add(index)
        keys = [NoiseKey(run.seed, "train", state.account.steps, state.problems[index].id, row) for row in range(GROUP)]
        found += len({state.session.right(key) for key in keys}) == 2
    return len(asked), position


@pytest.mark.extended
def test_active_sampling_generates_what_one_at_a_time_would_and_costs_one_over_the_share(world) -> None:
    """Each step's groups are those of a queue that replaces one by one, whose number is negative binomial.

    Its mean is 16 / 0.3438 = 46.5 and its deviation sqrt(16 * 0.6562) / 0.3438 = 9.4; in 30 steps 1.7 for the mean.
    """
    there = world(bernoulli(RATE), always(3), f"group_size={GROUP}", f"problems_per_step={BATCH}")
    made, position = [], 0
    for _ in range(30):
        expected, position = until_full(there, position)
        _, collected = there.step(Active(Signal.outcome, 100))
        assert collected.made.number == expected and there.queue.memory.looked == position
        assert collected.chosen == tuple(has_signal(collected.made.masked, Signal.outcome)), "and none of them is lost"
        assert len(collected.chosen) == BATCH and collected.chosen[-1] == expected - 1
        assert len(set(collected.made.indices)) == expected, "no problem twice in a step"
        made.append(expected)
    error = math.sqrt(BATCH * (1 - SHARE)) / SHARE / math.sqrt(len(made))
    assert_close(np.mean(made), BATCH / SHARE, 4 * error, "four standard errors around P / (1 - tied share)")


def short_of(batches: int) -> float:
    """The chance that so many batches hold fewer than a batch of groups with signal."""
    tries = batches * BATCH
    return sum(math.comb(tries, k) * SHARE**k * (1 - SHARE) ** (tries - k) for k in range(min(BATCH, tries + 1)))


def test_resampling_generates_whole_batches_until_one_is_full(world) -> None:
    """E[batches] = sum over k >= 0 of P(k batches are not enough), which is 3.49 here: 55.8 groups instead of 46.5."""
    there = world(bernoulli(RATE), always(3), f"group_size={GROUP}", f"problems_per_step={BATCH}")
    batches, position = [], 0
    for _ in range(30):
        needed, _ = until_full(there, position)
        _, collected = there.step(Resample(Signal.outcome, 100, oversample=1.0))
        position = there.queue.memory.looked
        assert collected.made.number == math.ceil(needed / BATCH) * BATCH
        assert collected.chosen == tuple(has_signal(collected.made.masked, Signal.outcome))[:BATCH]
        batches.append(collected.made.number // BATCH)
    chances = [short_of(k) for k in range(60)]
    mean = sum(chances)
    second = sum((2 * k + 1) * chance for k, chance in enumerate(chances))  # E[n^2] = sum (2k + 1) P(n > k)
    error = math.sqrt((second - mean**2) / len(batches))
    assert 3.3 < mean < 3.7 and error < 0.25
    assert_close(np.mean(batches), mean, 4 * error, "four standard errors")


@pytest.mark.few(2)
@pytest.mark.parametrize("oversample,number,asked", [(1.0, 3, 3), (3.0, 4, 12), (1.4, 3, 4), (0.2, 2, 1), (1.5, 1, 2)])
def test_a_round_of_resampling_is_so_many_batches_rounded(world, oversample: float, number: int, asked: int) -> None:
    """3 batches of 4 are 12; 1.4 * 3 = 4.2 is 4; 0.2 * 2 = 0.4 is the least, 1; and 1.5 is 2."""
    there = world(one_right, always(3), "group_size=2", f"problems_per_step={number}")
    _, collected = there.step(Resample(Signal.outcome, 10, oversample))
    assert collected.made.number == math.ceil(number / asked) * asked
    assert collected.chosen == tuple(range(number))


@pytest.mark.extended
def test_a_race_never_starts_fewer_than_are_missing(world) -> None:
    """1.1 * 3 = 3.3 is 3 groups, all of which are waited for."""
    there = world(one_right, lambda key: 2 + key.problem % 5, "group_size=2", "problems_per_step=3")
    rounds, collected = there.step(OversampleAbort(Signal.outcome, 1, oversample=1.1, keeps_partial=False))
    assert collected.made.number == 3 and rounds.started(collected.made) == 3


# --- a race takes the short ones --------------------------------------------------------------------------------


def test_the_bias_of_a_race_by_hand(world) -> None:
    """Two groups of two run, the first to end is taken; each length is 1, 2 or 3 (and one more, its end).

    A group ends with its longer response m: P(m <= 1, 2, 3) = 1/9, 4/9, 1. Both are above 0, 1, 2 with 1, 64/81, 25/81,
    so the winner's m is 1, 2, 3 with 17, 39, 25 of 81. Given m its mean length is 1, 5/3 of (1,2) (2,1) (2,2), and
    12/5: (17 * 1 + 39 * 5/3 + 25 * 12/5) / 81 = 142 / 81 = 1.753, not 2. All 81 cases are tried.
    """
    lengths: list[int] = []
    there = world(one_right, lambda key: lengths[2 * order.index(key.problem) + key.response], "group_size=2",
                  "problems_per_step=1")  # fmt: skip
    race = OversampleAbort(Signal.outcome, 1, oversample=2.0, keeps_partial=False)
    total = 0.0
    for case in product((2, 3, 4), repeat=4):
        lengths[:] = case
        there.queue.memory.looked = 0
        ahead = np.random.Generator(np.random.Philox(key=[0, 0])).permutation(len(there.state.problems))[:2]
        order = [there.state.problems[index].id for index in ahead]
        _, collected = there.step(race)
        total += float(collected.made.choose(collected.chosen).graded.lengths.double().mean()) - 1
    assert_close(total / 81, 142 / 81, 1e-12, "the mean accepted length")


def uneven(key: NoiseKey) -> int:
    """2 to 9 tokens, whatever the outcome."""
    return 2 + int(8 * drawn(key, 1))


MEAN, DEVIATION = 5.5, math.sqrt((8**2 - 1) / 12)  # of eight equally likely lengths


def predicted_by_order_statistics(batch: int, started: int, size: int) -> float:
    """Mean length in the `batch` groups that end first of `started`, over 20,000 races of plain numbers."""
    lengths = np.random.default_rng(0).integers(2, 10, (20_000, started, size))
    first = np.argsort(lengths.max(axis=2), axis=1, kind="stable")[:, :batch]
    return float(np.take_along_axis(lengths.mean(axis=2), first, axis=1).mean())


@pytest.mark.extended
@pytest.mark.parametrize("keeps_partial", [False, True], ids=["thrown away", "kept"])
def test_partial_responses_that_are_kept_take_the_length_bias_out(world, keeps_partial: bool) -> None:
    """50 steps of 4 groups of 3 are 600 lengths: a standard error of 2.29 / sqrt(600) = 0.094."""
    there = world(one_right, uneven, "group_size=3", "problems_per_step=4")
    race = OversampleAbort(Signal.outcome, 5, oversample=2.0, keeps_partial=keeps_partial)
    trained: list[int] = []
    for _ in range(50):
        _, collected = there.step(race)
        batch = collected.made.choose(collected.chosen)
        trained += batch.graded.lengths.flatten().tolist()
        assert batch.number == 4 and len(set(collected.made.indices)) == collected.made.number
        now = {left["index"] for left in there.queue.memory.leftovers}
        assert now.isdisjoint(collected.made.indices) and len(now) == len(there.queue.memory.leftovers)
    error = DEVIATION / math.sqrt(len(trained))
    if keeps_partial:
        assert_close(np.mean(trained), MEAN, 4 * error, "the population's mean")
        keys = {(request.noise.step, request.noise.problem) for request in there.state.session.asked}
        waiting = len(there.queue.memory.leftovers)
        assert len(keys) == 50 * 4 + waiting <= 50 * 4 + 8, "what is begun is trained once, or still waits"
    else:
        expected = predicted_by_order_statistics(4, 8, 3)
        assert expected < MEAN - 0.5 and np.mean(trained) < MEAN - 4 * error
        assert_close(np.mean(trained), expected, 4 * error, "what order statistics predict")


def test_groups_that_end_at_once_are_not_lost_and_cost_nothing_later(world) -> None:
    """Three groups of two responses of three tokens end in the same moment, and one is needed.

    Step 1 draws 6 responses of 3 tokens. Step 2 finds the second group ended, and starts nothing. So does step 3.
    """
    there = world(one_right, always(3), "group_size=2", "problems_per_step=1")
    race = OversampleAbort(Signal.outcome, 1, oversample=3.0, keeps_partial=True)
    account, session, memory = there.state.account, there.state.session, there.queue.memory
    rounds, first = there.step(race)
    assert rounds.started(first.made) == 3 and first.made.number == 1
    prompts = sum(len(request.prompt) for request in session.asked[::2])
    assert (account.prompts, account.completions, account.sampled_tokens) == (3, 6, prompts + 18)
    spent = account.flops
    left = [part["index"] for part in there.queue.memory.leftovers]
    assert memory is not there.queue.memory and memory.leftovers == []
    for place in (0, 1):
        _, collected = there.step(race)
        assert collected.made.indices == (left[place],) and session.calls == 1
        assert int(collected.made.rollouts.lengths.sum()) == 6
    assert (account.prompts, account.completions, account.sampled_tokens) == (3, 6, prompts + 18)
    assert account.flops == spent and account.discarded_tokens == 0
    assert [part["responses"][0]["tokens"] for part in there.queue.memory.leftovers] == [[], []], "drawn, not begun"
    _, collected = there.step(race)  # what was drawn in step 2 and not begun comes first
    assert session.calls == 2 and account.prompts == 6


def test_a_group_that_goes_on_is_counted_once_by_hand() -> None:
    """A prompt of 3 tokens, responses of 2 + 4 and 3 + 0 tokens; then one that was stopped before its turn."""
    cost = ModelFlops(weights=1, attention=0)  # 2 operations a token
    account = ComputeAccount()
    account.generated(cost, [3], [[2, 3]], [[0, 0]])
    assert (account.prompts, account.completions, account.sampled_tokens, account.flops) == (1, 2, 8, 16)
    account.generated(cost, [3], [[4, 0]], [[2, 3]])  # reads 3 + 2 tokens again and draws 4; the other has ended
    assert (account.prompts, account.completions, account.sampled_tokens, account.flops) == (1, 2, 12, 16 + 18)
    account.generated(cost, [5], [[0, 0]], [[0, 0]])
    assert (account.prompts, account.completions, account.sampled_tokens, account.flops) == (1, 2, 12, 34)
    account.generated(cost, [5], [[6, 0]], [[0, 0]], injected=2)  # of a group of two, one began
    assert (account.prompts, account.completions, account.sampled_tokens, account.flops) == (2, 3, 12 + 5 + 4, 34 + 22)


def test_a_step_that_cannot_be_filled_leaves_everything_as_it_was(world) -> None:
    there = world(one_right, uneven, "group_size=2", "problems_per_step=4")
    race = OversampleAbort(Signal.outcome, 2, oversample=2.0, keeps_partial=True)
    there.step(race)
    before, account = there.queue.memory, dict(vars(there.state.account))
    tensors = {name: value.clone() for name, value in before.to_state().items() if isinstance(value, torch.Tensor)}
    assert before.leftovers
    for left in before.leftovers:  # what has ended already was right once
        unbegun = {"tokens": [], "logprobs": [], "versions": [], "stop": "aborted"}
        left["responses"] = [dict(unbegun) for _ in left["responses"]]
    plain = (before.looked, before.passed, [dict(left) for left in before.leftovers])
    there.state.session.right = lambda key: False
    with pytest.raises(Exhausted, match=r"after 2 rounds of generation 0 of the 4 .* of 16 problems 0 were always "):
        there.step(race)
    after = there.queue.memory
    assert after is before and dict(vars(there.state.account)) == account
    assert (after.looked, after.passed, after.leftovers) == plain
    assert all(torch.equal(value.nan_to_num(), getattr(after, name).nan_to_num()) for name, value in tensors.items())


def test_a_split_that_is_asked_through_within_a_step_ends_the_run_clearly(world) -> None:
    """Of 64 problems 16 are drawn four times, none twice, and then there is none."""
    sizes = ["task.train_size=64", "task.probe_size=32", "evaluation.probe_problems=32"]
    there = world(lambda key: True, always(3), "group_size=2", "problems_per_step=16", *sizes)
    with pytest.raises(Exhausted, match=r"needs 16 problems, and of the 64 .* 0 can be taken: .* 64 were in this step"):
        there.step(Resample(Signal.outcome, 10, 1.0))


# --- partial responses of a real policy -------------------------------------------------------------------------

PARTIAL = ["group_filter=oversample_abort_partial", "problems_per_step=4", "group_size=4"]


@pytest.mark.extended
def test_a_continued_response_says_what_it_would_have_said(world) -> None:
    """Under unchanged weights nothing tells a response that was cut and went on from one that was not."""
    there = world(None, always(0), *PARTIAL)
    cut: set[int] = set()
    went_on = 0
    for _ in range(5):
        ahead = {left["index"]: left["step"] for left in there.queue.memory.leftovers if _tokens(left)}
        _, collected = there.step(there.run.group_filter)
        rollouts = collected.made.rollouts
        rows = [row for place, index in enumerate(collected.made.indices) if index in ahead
                for row in range(4 * place, 4 * place + 4)]  # fmt: skip
        requests = [
            Request(
                rollouts.prompt_of_row(row),
                NoiseKey(0, "train", ahead[collected.made.indices[row // 4]], rollouts.problems[row // 4].id, row % 4),
                there.run.engine.params,
            )
            for row in rows
        ]
        for row, whole in zip(rows, there.state.session.generate(requests)):
            length = int(rollouts.lengths[row])
            assert tuple(rollouts.tokens[row, :length].tolist()) == whole.tokens
            assert bool(rollouts.finished[row]) == (whole.stop is StopReason.EOS)
            assert_close(rollouts.sampler_logprobs[row, :length], whole.logprobs, 1e-4, "and is as likely")
        went_on += len(rows)
        cut |= ahead.keys()
    assert went_on >= 16 and cut


def _tokens(left: dict) -> int:
    return sum(len(part["tokens"]) for part in left["responses"])


def test_old_tokens_keep_the_log_probs_and_the_version_of_the_weights_that_drew_them(world) -> None:
    there = world(None, always(0), *PARTIAL)
    state, mixed = there.state, 0
    for _ in range(5):
        before = {left["index"]: left for left in there.queue.memory.leftovers}
        _, collected = there.step(there.run.group_filter)
        rollouts = collected.made.rollouts
        for place, index in enumerate(collected.made.indices):
            for member in range(4):
                row, length = 4 * place + member, int(rollouts.lengths[4 * place + member])
                versions = rollouts.weight_version[row, :length].tolist()
                part = before[index]["responses"][member] if index in before else {"tokens": [], "logprobs": []}
                old = len(part["tokens"])
                assert rollouts.tokens[row, :old].tolist() == part["tokens"]
                assert torch.equal(rollouts.sampler_logprobs[row, :old], torch.tensor(part["logprobs"]))
                assert versions[:old] == part.get("versions", []) and set(versions[old:]) <= {state.updates}
                assert all(version < state.updates for version in versions[:old])
                mixed += 0 < old < length
        with torch.no_grad():
            for weight in state.learner.parameters():
                weight.mul_(1.02)
        state.updates += 1
        state.session.update_weights(state.learner.state_dict().items(), state.updates)
    assert mixed >= 8


@pytest.mark.extended
def test_what_waits_is_continued_before_anything_new_in_a_race_of_several_waves(world) -> None:
    """Eight rows decode together, two groups of a race of eight: what was cut must not wait behind what is new."""
    there = world(None, always(0), *PARTIAL, "engine.max_rows=8")
    waiting, longest = {}, 0
    for _ in range(6):
        there.step(there.run.group_filter)
        now = {left["index"] for left in there.queue.memory.leftovers if _tokens(left)}
        waiting = {index: waiting.get(index, 0) + 1 for index in now}
        longest = max(longest, *waiting.values(), 0)
    assert 1 <= longest <= 2


# --- real runs --------------------------------------------------------------------------------------------------

FILTERS = sorted(path.stem for path in (conf_folder() / "group_filter").glob("*.yaml"))


@pytest.mark.few(1)
@pytest.mark.parametrize("name,max_rows", [*((name, 512) for name in FILTERS), ("oversample_abort_partial", 24)])
def test_every_token_is_trained_discarded_or_waits(tmp_path: Path, monkeypatch, name: str, max_rows: int) -> None:
    """What the engine drew, counted at the engine: prompts once a group, and every token at one place."""
    prompts: dict[tuple[int, int], int] = {}
    responses: set[tuple[int, int, int]] = set()
    tokens = [0]
    generate = NativeSession.generate

    def counted(self, requests, on_finish=None):
        completions = generate(self, requests, on_finish)
        for request, completion in zip(requests, completions):
            key = request.noise
            if key.stream == "train" and completion.ids:
                prompts[key.step, key.problem] = len(request.prompt)
                responses.add((key.step, key.problem, key.response))
                tokens[0] += len(completion.tokens)
        return completions

    monkeypatch.setattr(NativeSession, "generate", counted)
    folder = run_in_process(
        tmp_path, f"group_filter={name}", "problems_per_step=8", "group_size=4", "budget.amount=3",
        "reward_shaping=soft_overlong", "truncation=mask_after", f"engine.max_rows={max_rows}", *SMALL,
    )  # fmt: skip
    last = metrics_of(folder)[-1]["metrics"]
    memory = load_state(latest(folder / "checkpoints"))["queue"]["memory"]
    waiting = sum(_tokens(left) for left in memory["leftovers"])
    assert last["budget/prompts"] == len(prompts) and last["budget/completions"] == len(responses)
    assert last["budget/sampled_tokens"] == sum(prompts.values()) + tokens[0]
    assert tokens[0] == last["budget/trained_tokens"] + last["budget/discarded_tokens"] + waiting
    assert last["budget/discarded_tokens"] > 0, "cut rows are masked, if nothing else"
    assert (waiting > 0) == ("partial" in name)
    # every group that was made is remembered, once for each response
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    assert int(memory["attempts"].sum()) == 4 * sum(row["rollout/groups"] for row in rows)
    inert = json.loads((folder / "DONE").read_text())["no_ops"]
    assert (
        "group_filter" not in inert and max(row["active_fraction/group_filter"] for row in rows) > 0
    ) or name == "keep"


def run_of(*overrides: str) -> Callable[[Path], Path]:
    """`run_in_process` of the same configuration in any folder, composed once."""
    config, choices = compose_with_choices([*WORLD, *overrides])

    def run(folder: Path) -> Path:
        own = config.copy()
        own.runs_dir = str(folder)
        return start(own, "run", choices, ["test"])

    return run


def killed(run: Callable[[], object], kill: Callable[[Callable[[], None]], None]) -> bool:
    """Whether the run, started in a child, was killed by the SIGKILL that `kill` puts somewhere into its way."""
    child = os.fork()
    if child == 0:
        kill(lambda: os.kill(os.getpid(), signal.SIGKILL))
        try:
            run()
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def after_a_line(step: int, die: Callable[[], None]) -> None:
    """Kill between the line of this step and whatever would come next."""
    record = Recorder.record

    def recorded(self, state, *rest):
        record(self, state, *rest)
        if state.account.steps == step:
            die()

    Recorder.record = recorded


def within_a_step(step: int, die: Callable[[], None]) -> None:
    """Kill once the groups of the step are there and remembered, before anything is learnt from them."""
    remember = Rounds.remember

    def remembered(self, made):
        memory = remember(self, made)
        if self.number == step:
            die()
        return memory

    Rounds.remember = remembered


@pytest.mark.extended
def test_a_killed_run_remembers_its_problems_and_its_partial_responses(tmp_path: Path) -> None:
    overrides = [
        "group_filter=oversample_abort_partial", "curriculum=prioritized", "task.train_size=48", "task.probe_size=16",
        "problems_per_step=8", "group_size=4", "budget.amount=10", "checkpoint_every=3", *SMALL,
    ]  # fmt: skip
    run = run_of(*overrides)
    whole, again = run(tmp_path / "whole"), partial(run, tmp_path / "killed")
    for kill in (partial(within_a_step, 5), partial(after_a_line, 8)):
        assert killed(again, kill)
    assert again() == tmp_path / "killed" / "run" / "seed=0"
    same_ending(whole, tmp_path / "killed" / "run" / "seed=0")
    rows = [row["metrics"] for row in metrics_of(whole)[1:]]
    assert (
        max(row["active_fraction/curriculum"] for row in rows) > 0 and max(row["rollout/staleness"] for row in rows) > 1
    )
    ours, theirs = (
        load_state(latest(f / "checkpoints"))["queue"]["memory"] for f in (whole, tmp_path / "killed/run/seed=0")
    )
    assert ours["leftovers"] == theirs["leftovers"] != [] and ours["looked"] == theirs["looked"]
    assert torch.equal(ours["attempts"], theirs["attempts"]) and int(ours["attempts"].max()) > 4


@pytest.mark.extended
def test_a_filter_that_never_fills_ends_the_run_saved_and_with_the_remedy(tmp_path: Path) -> None:
    """As the policy learns, groups tie, and one round of 24 groups no longer holds 16 with signal."""
    overrides = [
        "group_filter=resample", "group_filter.max_rounds=1", "group_filter.oversample=1.5", "group_size=4",
        "budget.amount=200", "checkpoint_every=1000", *SMALL,
    ]  # fmt: skip
    with pytest.raises(Exhausted, match="after 1 rounds of generation"):
        run_in_process(tmp_path, *overrides)
    folder = tmp_path / "run" / "seed=0"
    said = (folder / "error.txt").read_text()
    steps = [row["step"] for row in metrics_of(folder)]
    assert steps == list(range(len(steps))) and len(steps) > 2, "every step that ended has its line"
    assert "raise group_size or group_filter.max_rounds" in said and "of the 16 groups of a batch carry signal" in said
    assert f"The run ends after step {steps[-1]}, saved in" in said and not (folder / "DONE").exists()
    saved = latest(folder / "checkpoints")
    assert saved.name == f"step={steps[-1]:06d}" and (saved / "model.safetensors").exists()
    assert load_state(saved)["ledger"]["steps"] == steps[-1]


@pytest.mark.extended
def test_a_world_without_signal_ends_before_its_first_step_as_often_as_it_is_asked(tmp_path: Path) -> None:
    """So low a temperature that all responses of a group are one; the second time it resumes from before step 1."""
    overrides = ["group_filter=active", "group_filter.max_rounds=2", "engine.temperature=1e-6", *SMALL]
    run, lines = run_of(*overrides), []
    for _ in range(2):
        with pytest.raises(Exhausted, match=r"after 2 rounds of generation 0 of the 16 .* after step 0, saved in"):
            run(tmp_path)
        lines.append((tmp_path / "run" / "seed=0" / "metrics.jsonl").read_bytes())
    assert lines[0] == lines[1] and lines[0].count(b"\n") == 1
    assert (tmp_path / "run" / "seed=0" / "error.1.txt").exists()


IDLE = ["engine.max_tokens=1", "group_filter=drop", "budget.amount=400", "checkpoint_every=2", *SMALL]


@pytest.mark.extended
def test_a_run_that_idles_ends_at_the_same_step_however_often_it_was_killed(tmp_path: Path, monkeypatch) -> None:
    """Responses of one token are all wrong. Six idle steps are enough here, and those before a kill count."""
    monkeypatch.setattr("grpo_lab.run.recorder._MAX_IDLE_STEPS", 6)
    run = run_of(*IDLE)
    with pytest.raises(Exhausted, match=r"6 steps in a row left no token .* after step 6, saved in .*step=000006"):
        run(tmp_path / "whole")
    again = partial(run, tmp_path / "killed")
    assert killed(again, partial(after_a_line, 5))
    with pytest.raises(Exhausted, match=r"The run ends after step 6, saved in"):
        again()
    one, other = (tmp_path / name / "run" / "seed=0" for name in ("whole", "killed"))
    assert (one / "metrics.jsonl").read_bytes() == (other / "metrics.jsonl").read_bytes()
    last = metrics_of(one)[-1]["metrics"]
    # 16 problems, 8 responses of one token: nothing is trained, and all 6 * 128 tokens are discarded
    assert (last["budget/discarded_tokens"], last["budget/trained_tokens"]) == (768, 0)
    assert last["budget/completions"] == 768 and "loosen group_filter or truncation" in (one / "error.txt").read_text()


@pytest.mark.extended
def test_a_run_whose_last_step_idles_is_a_finished_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("grpo_lab.run.recorder._MAX_IDLE_STEPS", 2)
    folder = run_in_process(tmp_path, *IDLE, "budget.amount=2")
    assert (folder / "DONE").exists() and len(metrics_of(folder)) == 3
