"""Curricula: who comes next, by hand and by counting; what a run remembers of its problems, and how it runs dry."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from compositions import run_of
from helpers import F64, assert_close, queue_of
from short_runs import SMALL, metrics_of, run_in_process, same_ending

from grpo_lab.rollout.rounds import Rounds
from grpo_lab.run.checkpoint import latest, load_state
from grpo_lab.run.state import open_state
from grpo_lab.tricks.curriculum import (
    UNBOUNDED,
    Curriculum,
    DecidingResponses,
    EasyToHard,
    Kimi,
    Memory,
    NoPositiveResampling,
    Pool,
    Prioritized,
    PromptReplay,
    Unguessable,
    Uniform,
)
from grpo_lab.types import Exhausted


def remembering(rates: Sequence[float], attempts: int = 1000) -> Memory:
    """Each problem asked so often, with these shares of right responses."""
    memory = Memory.of(len(rates))
    memory.attempts += attempts
    memory.right += torch.tensor(rates, dtype=F64) * attempts
    memory.last = torch.tensor(rates, dtype=F64)
    return memory


def pool_of(
    memory: Memory, batch: int, *, seed: int = 0, progress: float = 0.0, difficulties: Sequence[int] | None = None,
    taken: frozenset[int] = frozenset(), possible_answers: Sequence[int] | None = None,
) -> Pool:  # fmt: skip
    size = len(memory.attempts)
    levels = torch.tensor(difficulties if difficulties is not None else [1] * size)
    possible = torch.tensor(possible_answers if possible_answers is not None else [UNBOUNDED] * size)
    return Pool(levels, possible, batch, seed, progress, memory, taken)


def frequencies(curriculum: Curriculum, pool: Pool, draws: int) -> torch.Tensor:
    """How often each problem is drawn in so many draws of a batch."""
    counts = torch.zeros(pool.size, dtype=F64)
    for _ in range(draws):
        counts[curriculum.draw(pool.batch, pool)] += 1
    return counts


# --- the stream -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size,batch", [(384, 16), (50, 16), (16, 16), (7, 3), (5, 1)])
@pytest.mark.parametrize("seed", [0, 3])
def test_uniform_draws_are_shuffled_passes_cut_into_batches(size: int, batch: int, seed: int) -> None:
    """Step by step: pass and place from the step alone, the last size mod batch of a pass left out."""
    pool = pool_of(Memory.of(size), batch, seed=seed)
    for step in range(3 * (size // batch) + 2):
        pass_, place = divmod(step, size // batch)
        order = np.random.Generator(np.random.Philox(key=[seed, pass_])).permutation(size)
        assert Uniform().draw(batch, pool) == order[place * batch : (place + 1) * batch].tolist()
    assert pool.memory.passed == 0 and pool.memory.looked == batch * (3 * (size // batch) + 2)


def test_a_draw_goes_on_where_the_last_one_ended_and_takes_nothing_twice() -> None:
    """Of 7 problems, 6 a pass: draws of 4, 1 and 5 in a step of batches of 3 cross into the second pass."""
    memory = Memory.of(7)
    first, second = (np.random.Generator(np.random.Philox(key=[0, n])).permutation(7).tolist() for n in (0, 1))
    stream = [*first[:6], *second[:6]]
    drawn = Uniform().draw(4, pool_of(memory, 3))
    assert drawn == stream[:4]
    drawn += Uniform().draw(1, pool_of(memory, 3, taken=frozenset(drawn)))
    assert drawn == stream[:5] and memory.looked == 5
    drawn += Uniform().draw(2, pool_of(memory, 3, taken=frozenset(drawn)))
    assert drawn[5] == stream[5] and drawn[6] == first[6], "the only one left, of the second pass"
    assert sorted(drawn) == list(range(7)) and memory.passed == 0, "what is in the step already was not passed over"
    with pytest.raises(
        Exhausted, match=r"a draw needs 1 problems, and of the 7 .* 0 can be taken: .* 7 were in this step"
    ):
        Uniform().draw(1, pool_of(memory, 3, taken=frozenset(drawn)))


# --- no positive resampling ---------------------------------------------------------------------------------------


def test_what_counts_as_positive_by_hand() -> None:
    """Three groups of four: 4 + 4 + 2 = 10 of 12 right; 1 + 4 + 4 = 9 of 12; 3 + 3 + 4 = 10; and one never asked."""
    memory = Memory.of(4)
    for group in ([4, 1, 3], [4, 4, 3], [2, 4, 4]):
        outcome = torch.tensor([[1.0] * right + [0.0] * (4 - right) for right in group], dtype=F64)
        memory.note(torch.tensor([0, 1, 2]), outcome, outcome - 0.5, torch.ones(3, outcome.shape[1], dtype=torch.bool))
    assert memory.attempts.tolist() == [12, 12, 12, 0] and memory.right.tolist() == [10, 9, 10, 0]
    assert memory.best.tolist() == [0.5, 0.5, 0.5, -math.inf]
    pool = pool_of(memory, 1)
    by_history = NoPositiveResampling(10 / 12, DecidingResponses.history).weights(pool)
    assert by_history.tolist() == [0, 1, 0, 1], "at the threshold is out"
    assert NoPositiveResampling(0.84, DecidingResponses.history).weights(pool).tolist() == [1, 1, 1, 1]
    by_last = NoPositiveResampling(0.875, DecidingResponses.last_group).weights(pool)
    assert by_last.tolist() == [1, 0, 0, 1], "2 of 4, 4 of 4, 4 of 4, and none"
    assert NoPositiveResampling(1.0, DecidingResponses.last_group).weights(pool).tolist() == [1, 0, 0, 1]
    nothing = torch.zeros(1, 4, dtype=F64)
    memory.note(torch.tensor([0]), nothing, nothing - 0.5, torch.ones_like(nothing, dtype=torch.bool))
    assert memory.last[0] == 0 and memory.best[0] == 0.5, "the best stays where the latest is worse"


@pytest.mark.parametrize("by", list(DecidingResponses), ids=lambda by: by.value)
def test_what_left_never_comes_back(by: DecidingResponses) -> None:
    """30 problems of all pass rates, three a draw: the draw that solves one is its last."""
    generator = torch.Generator().manual_seed(0)
    rates = torch.linspace(0.0, 0.6, 30, dtype=F64)
    memory = Memory.of(30)
    trick = NoPositiveResampling(0.75, by)
    gone: set[int] = set()
    for _ in range(60):
        drawn = trick.draw(3, pool_of(memory, 3))
        assert gone.isdisjoint(drawn)
        outcome = (torch.rand(3, 4, generator=generator, dtype=F64) < rates[drawn][:, None]).to(F64)
        memory.note(torch.tensor(drawn), outcome, outcome, torch.ones_like(outcome, dtype=torch.bool))
        rate = (
            outcome.mean(dim=1) if by is DecidingResponses.last_group else memory.right[drawn] / memory.attempts[drawn]
        )
        gone |= {index for index, share in zip(drawn, rate.tolist()) if share >= 0.75}
    assert 3 <= len(gone) < 28 and memory.passed > 0
    weights = trick.weights(pool_of(memory, 3))
    assert set((weights == 0).nonzero().flatten().tolist()) == gone


def test_half_of_all_groups_of_eight_at_a_pass_rate_of_four_fifths_reach_seven() -> None:
    """What the docstring says of `last_group`: 8 * 0.8^7 * 0.2 + 0.8^8 = 0.3355 + 0.1678."""
    assert_close(8 * 0.8**7 * 0.2 + 0.8**8, 0.5033, 1e-4, "7 or 8 of 8")
    memory = remembering([0.875, 0.8749])
    assert NoPositiveResampling(0.875, DecidingResponses.last_group).weights(pool_of(memory, 1)).tolist() == [0, 1]


# --- easy to hard --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "progress,size",
    [
        (0.0, 4),  # 0.2 of 20
        (0.125, 8),  # 0.2 + 0.8 * 0.25 = 0.4
        (0.25, 12),  # 0.2 + 0.8 * 0.5 = 0.6
        (0.49, 20),  # 0.2 + 0.8 * 0.98 = 0.984 of 20 = 19.68
        (0.5, 20),
        (0.9, 20),
    ],
)
def test_the_pool_grows_from_the_easiest_by_hand(progress: float, size: int) -> None:
    levels = [3, 1, 2, 1, 3] * 4  # eight of level 1 (places 1 and 3 of each five), four of 2, eight of 3
    pool = pool_of(Memory.of(20), 2, progress=progress, difficulties=levels)
    inside = EasyToHard(0.2, 0.5).weights(pool).nonzero().flatten().tolist()
    easy = [1, 3, 6, 8, 11, 13, 16, 18]
    hard = [*easy, 2, 7, 12, 17, 0, 4, 5, 9, 10, 14, 15, 19]
    assert inside == sorted(hard[:size])
    if size == 20:  # and then it is the plain stream
        assert EasyToHard(0.2, 0.5).draw(2, pool) == Uniform().draw(2, pool_of(Memory.of(20), 2))


def test_a_pool_holds_at_least_a_batch_and_a_larger_draw_says_what_to_change() -> None:
    pool = pool_of(Memory.of(20), 6)
    assert int(EasyToHard(0.05, 0.5).weights(pool).sum()) == 6, "and not 1 of 20"
    for trick in (EasyToHard(0.05, 0.5), Kimi(0.05, 0.5)):
        with pytest.raises(
            Exhausted, match=r"a draw needs 12 .* of the 20 .* 6 can be taken: .*raise curriculum.start_share"
        ):
            trick.draw(12, pool)


# --- prioritised ----------------------------------------------------------------------------------------------------


def test_the_stream_is_thinned_by_hand() -> None:
    """Shares 0, 0.5, 0.8, 1 right leave chances 1, 0.5, 0.2, 0 by a uniform number of the place in the stream."""
    memory = remembering([0.0, 0.5, 0.8, 1.0])
    pool = pool_of(memory, 1)
    expected, passed = [], 0
    for pass_ in range(6):
        generator = np.random.Generator(np.random.Philox(key=[0, pass_]))
        order, numbers = generator.permutation(4), generator.random(4)
        for index, number in zip(order, numbers):
            taken = number < [1.0, 0.5, 0.2, 0.0][index]
            expected += [int(index)] if taken else []
            passed += not taken
    drawn = [Prioritized().draw(1, pool)[0] for _ in expected]
    assert drawn == expected and 3 not in drawn and len(drawn) > 6
    assert memory.passed <= passed and memory.looked - memory.passed == len(drawn)


@pytest.mark.parametrize("curriculum", [Prioritized(), Kimi(start_share=1.0, ramp=1.0)])
def test_all_responses_of_a_problem_decide_and_not_its_latest_group(curriculum: Curriculum) -> None:
    """Two right of four and then none, none and then two, none at all: 2 of 8, 2 of 8 and 0 of 4 right."""
    memory = Memory.of(4)
    for problems, right in (([0, 1, 2], [2, 0, 0]), ([0, 1], [0, 2])):
        outcome = (torch.arange(4)[None, :] < torch.tensor(right)[:, None]).to(F64)
        memory.note(torch.tensor(problems), outcome, outcome, torch.ones_like(outcome, dtype=torch.bool))
    weights = curriculum.weights(pool_of(memory, 1))
    assert_close(weights, [0.75, 0.75, 1.0, 1.0], 0.0, "1 less the share of right responses")


def test_only_the_ratio_of_the_weights_matters() -> None:
    """Shares 0.9, 0.95 and 0.98 right are as 1, 0.5 and 0.2: nothing is passed over for being nearly solved."""
    one, other = (pool_of(remembering(rates), 1) for rates in ([0.0, 0.5, 0.8], [0.9, 0.95, 0.98]))
    assert_close(Prioritized().weights(other) / 0.1, Prioritized().weights(one), 1e-9, "up to a factor")
    assert [Prioritized().draw(1, one) for _ in range(40)] == [Prioritized().draw(1, other) for _ in range(40)]


@pytest.mark.few(1)
@pytest.mark.parametrize("batch", [1, 4])
def test_problems_come_in_proportion_to_how_often_they_were_wrong(batch: int) -> None:
    """40 problems; in n draws of a share w / sum(w) the deviation is below sqrt(n * share)."""
    rates = [place / 40 for place in range(40)]
    pool = pool_of(remembering(rates), batch)
    counts = frequencies(Prioritized(), pool, 2000 // batch)
    weights = 1 - torch.tensor(rates, dtype=F64)
    expected = 2000 * weights / weights.sum()
    assert float(((counts - expected) / expected.sqrt()).abs().max()) < 4
    assert float(counts[0] / counts[30]) > 2.5, "four times as often wrong"


@pytest.mark.extended
def test_kimi_is_both_of_them() -> None:
    """Of 40 problems the easiest half, and of these in proportion to 1 - s."""
    rates = [place / 40 for place in range(40)]
    levels = [1 + (place % 2) for place in range(40)]
    pool = pool_of(remembering(rates), 1, progress=0.0, difficulties=levels)
    kimi = Kimi(0.5, 0.5)
    weights = (1 - torch.tensor(rates, dtype=F64)) * (torch.tensor(levels) == 1)
    assert_close(kimi.weights(pool), weights, 1e-12, "by hand")
    counts = frequencies(kimi, pool, 1200)
    expected = 1200 * weights / weights.sum()
    inside = weights > 0
    assert float(counts[~inside].sum()) == 0
    assert float(((counts - expected) / expected.sqrt())[inside].abs().max()) < 4
    late = replace(pool, progress=0.7)
    assert_close(kimi.weights(late), Prioritized().weights(late), 0.0, "after the ramp")


# --- prompt replay --------------------------------------------------------------------------------------------------

REPLAY = PromptReplay(fraction=0.5, cooldown=2, most=2, lowest=0.25, highest=0.75)


def asked(trick: Curriculum, memory: Memory, batch: int, rates: dict[int, float], together: int) -> list[int]:
    """A batch drawn `together` problems at a time, and its results: groups of 8 with these pass rates, else all wrong.

    Until all are there none has a result, as in a step.
    """
    drawn: list[int] = []
    while len(drawn) < batch:
        drawn += trick.draw(together, pool_of(memory, batch, taken=frozenset(drawn)))
    outcome = torch.stack([(torch.arange(8) < 8 * rates.get(index, 0.0)).to(F64) for index in drawn])
    memory.note(torch.tensor(drawn), outcome, outcome, torch.ones_like(outcome, dtype=torch.bool))
    return drawn


@pytest.mark.parametrize("together", [4, 2, 1])
def test_medium_problems_come_again_after_their_pause_by_hand(together: int) -> None:
    """Twelve problems, four a batch, in batches of fresh ones f0, f1, ... of the plain stream.

    f0 has pass rate 0.5, f1 0.75, f2 0.875 (too easy), f3 0 and f4 0.25. Two of a batch may be replays, two batches
    later, twice at most.
    """
    plain = pool_of(Memory.of(12), 4)
    stream = [index for _ in range(6) for index in Uniform().draw(4, plain)]
    f, memory = stream, Memory.of(12)
    rates = {f[0]: 0.5, f[1]: 0.75, f[2]: 0.875, f[4]: 0.25}
    batches = [asked(REPLAY, memory, 4, rates, together) for _ in range(6)]
    assert batches[0] == f[0:4] and batches[1] == f[4:8], "nothing has rested yet"
    assert batches[2] == [f[0], f[1], f[8], f[9]], "nearest to 0.5 first; two of four"
    assert batches[3][0] == f[4], "only f4 has rested: f0 and f1 were asked in the batch before"
    fresh = [index for index in f[10:] if index != f[4]]
    assert batches[3][1:] == fresh[:3], "the stream goes on where it was, without what is in the batch"
    again = [index for index in (f[0], f[1]) if index not in batches[3]]  # the second pass may have met them already
    assert batches[4][: len(again)] == again
    assert memory.repeats == {index: sum(index in batch[:2] for batch in batches[2:]) for index in memory.repeats}
    assert max(memory.repeats.values()) <= 2 and memory.replayed >= 4
    later = [asked(REPLAY, memory, 4, rates, together) for _ in range(8)]
    assert max(memory.repeats.values()) == 2 and set(memory.repeats) <= set(rates) - {f[2]}
    assert all(len(set(batch)) == 4 for batch in later), "no problem twice in a batch"


def test_of_equally_near_ones_the_harder_and_less_repeated_comes_first() -> None:
    memory = Memory.of(8)
    memory.last[:] = torch.tensor([0.375, 0.625, 0.375, 0.5, 0.125, 0.75, 0.25, 0.875], dtype=F64)
    memory.drawn_at, memory.drawn = {index: index // 4 for index in range(8)}, [8]
    memory.repeats = {0: 1, 3: 2}
    trick = replace(REPLAY, fraction=1.0)
    assert trick.draw(4, pool_of(memory, 4)) == [2, 0, 1, 6], "3 was asked again twice, 4 and 7 lie outside"
    assert memory.repeats == {0: 2, 1: 1, 2: 1, 3: 2, 6: 1} and memory.drawn_at[2] == 8 and memory.looked == 0


def test_replays_are_of_the_source_whose_turn_it_is() -> None:
    """Half of the problems of each of two sources: a medium problem of one replaces a fresh one of the same."""
    memory, sources = Memory.of(8), torch.tensor([0] * 4 + [1] * 4)
    memory.last[:], memory.drawn_at, memory.drawn = 0.0, {5: 0}, [4, 4]
    memory.last[5] = 0.5
    pool = replace(pool_of(memory, 4), sources=sources, shares={"a": 0.5, "b": 0.5})
    drawn = REPLAY.draw(4, pool)
    assert [index // 4 for index in drawn] == [0, 1, 0, 1] and 5 in drawn and memory.drawn == [6, 6]
    assert memory.repeats == {5: 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("fraction", 0.0), ("fraction", 1.5), ("cooldown", 0), ("most", 0), ("lowest", 0.75), ("lowest", -0.1)],
)
def test_numbers_of_prompt_replay_out_of_range_are_named(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"PromptReplay.{field} must be"):
        replace(REPLAY, **{field: value})


@pytest.mark.extended
@pytest.mark.parametrize(
    "schedule",
    [("schedule=sync",), ("schedule=in_flight", "schedule.max_lag=1", "task.train_size=48")],  # 32 are on their way
    ids=lambda words: words[0],
)
def test_a_replay_survives_a_kill(tmp_path: Path, schedule: tuple[str, ...]) -> None:
    """Half the run, and the rest by the same command: who comes again, and every weight, as in one go."""
    words = ("curriculum=prompt_replay", "curriculum.cooldown=1", "curriculum.lowest=0.1", "curriculum.highest=0.9",
             "checkpoint_every=3", "keep_checkpoints=9", "budget.amount=6", *SPLIT, *SMALL, *schedule)  # fmt: skip
    whole = run_in_process(tmp_path / "whole", *words)
    memory = load_state(latest(whole / "checkpoints"))["queue"]["memory"]
    assert sum(memory["repeats"].values()) > 2
    shares = [row["metrics"]["active_fraction/curriculum"] for row in metrics_of(whole)[1:]]
    assert shares[0] == 0 and 0 < max(shares) <= 0.5
    killed = tmp_path / "killed" / "run" / "seed=0"
    shutil.copytree(whole, killed)
    (killed / "DONE").unlink()
    for place in (killed / "checkpoints").iterdir():
        if place.name > "step=000003":
            shutil.rmtree(place)
    run_in_process(tmp_path / "killed", *words)
    same_ending(killed, whole)


# --- one from the outside -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgotten(Curriculum):
    """What somebody else may write: problems whose latest group was below their best one, and new ones."""

    floor: float

    formula: ClassVar[str] = "P(i) proportional to {floor} + 1 - the share of right responses in its latest group"

    def weights(self, pool: Pool) -> torch.Tensor:
        last = pool.memory.last
        return torch.where(last.isnan(), 1.0, self.floor + 1 - last)


@pytest.mark.extended
def test_a_curriculum_of_ones_own_needs_its_weights_alone(make_run, tiny_base: Path) -> None:
    run = replace(
        make_run("problems_per_step=8", "group_size=2", "evaluation.initial_kl=false"), curriculum=Forgotten(0.1)
    )
    state = open_state(run, torch.device("cpu"), None)
    queue = queue_of(run, state)
    queue.memory.last[:300] = 1.0
    rounds = Rounds(queue.source, queue.maker, state.session, queue.memory, 0, 0.0)
    made = rounds.groups(8)
    queue.memory = rounds.remember(made)
    # 84 of 384 come with chance 1 and 300 with 0.1 / 1 = 0.1, so most that are looked at are passed over
    assert made.number == 8 and rounds.passed_over > 0
    assert_close(rounds.passed_over, queue.memory.passed / queue.memory.looked, 1e-12, "of those whose turn came")
    assert int(queue.memory.attempts.sum()) == 16


class Mistaken(Forgotten):
    def weights(self, pool: Pool) -> torch.Tensor:
        return 1 - pool.memory.last  # NaN before the first group


class Uneven(Forgotten):
    def weights(self, pool: Pool) -> torch.Tensor:
        return torch.tensor([1.0] + [1e-30] * (pool.size - 1), dtype=F64)


def test_weights_that_are_none_are_refused_and_never_waited_for(monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"Mistaken.weights must be finite and at least 0: .* memory.last NaN"):
        Mistaken(0.1).draw(2, pool_of(Memory.of(6), 2))
    monkeypatch.setattr("grpo_lab.tricks.curriculum._MOST_PASSES", 50)
    with pytest.raises(Exhausted, match=r"found 1 of 2 problems in 50 passes"):
        Uneven(0.1).draw(2, pool_of(Memory.of(6), 2))


# --- real runs -------------------------------------------------------------------------------------------------------

SPLIT = ["task.train_size=32", "task.probe_size=16", "problems_per_step=16", "group_size=4"]


@pytest.mark.extended
def test_a_run_that_has_solved_its_split_ends_saved_and_with_the_remedy(tmp_path: Path) -> None:
    """32 problems, two steps a pass; a problem with one right response of four is out, and soon 17 of them are."""
    with pytest.raises(Exhausted, match=r"the curriculum has run dry: a draw needs 16 problems, and of the 32 "):
        run_in_process(
            tmp_path, "curriculum=no_positive_resampling", "curriculum.threshold=0.25", "budget.amount=50",
            "checkpoint_every=1000", *SPLIT, *SMALL,
        )  # fmt: skip
    folder = tmp_path / "run" / "seed=0"
    rows = metrics_of(folder)
    assert [row["step"] for row in rows] == list(range(len(rows))) and 3 <= len(rows) < 50
    said = (folder / "error.txt").read_text()
    assert "choose a larger or harder task, or raise curriculum.threshold" in said
    assert f"The run ends after step {len(rows) - 1}, saved in" in said and not (folder / "DONE").exists()
    memory = load_state(latest(folder / "checkpoints"))["queue"]["memory"]
    left = int((memory["right"] < 0.25 * memory["attempts"].clamp(min=1)).sum())
    assert latest(folder / "checkpoints").name == f"step={len(rows) - 1:06d}" and left < 16
    assert f"{left} can be taken: " in said and "were in this step" not in said


@pytest.mark.few(1)
@pytest.mark.parametrize("option,acts", [("prioritized", False), ("easy_to_hard", True)])
def test_a_curriculum_that_passed_nothing_over_is_inert(tmp_path: Path, option: str, acts: bool) -> None:
    """In the first pass, of two steps, nothing was asked before and Prioritized takes all; the pool is a quarter."""
    folder = run_in_process(tmp_path, f"curriculum={option}", "budget.amount=2", *SPLIT, *SMALL)
    touched = [row["metrics"]["active_fraction/curriculum"] for row in metrics_of(folder)[1:]]
    assert (touched[0] > 0) == acts
    assert ("curriculum" in json.loads((folder / "DONE").read_text())["no_ops"]) == (not acts)
    memory = load_state(latest(folder / "checkpoints"))["queue"]["memory"]
    passed = [16 * share / (1 - share) for share in touched]  # of each step, beside the 16 that were taken
    assert_close(sum(passed), memory["passed"], 1e-9, "touched is the share of those whose turn came")


def test_questions_with_few_possible_answers_are_never_asked() -> None:
    pool = pool_of(Memory.of(6), 2, possible_answers=[2, UNBOUNDED, 9, 10, 5, UNBOUNDED])
    assert Unguessable(10).weights(pool).tolist() == [0, 1, 0, 1, 0, 1]
    assert {index for _ in range(20) for index in Unguessable(10).draw(2, pool)} == {1, 3, 5}
    assert Unguessable(2).weights(pool).tolist() == [1] * 6
    with pytest.raises(ValueError, match="fewest_answers"):
        Unguessable(1)
    with pytest.raises(Exhausted, match=r"of the 6 .* 3 can be taken: .*lower curriculum.fewest_answers"):
        Unguessable(10).draw(4, pool)


@pytest.mark.extended
def test_a_run_asks_the_questions_that_are_left_in_the_order_of_any_run(tmp_path: Path) -> None:
    """Half of the questions of world=guessable ask for a remainder by 2; those of uniform are walked past."""
    alike = ("world=guessable", "budget.amount=1", "problems_per_step=4", "task.train_size=64", "task.probe_size=16")
    folders = [
        run_in_process(tmp_path / name, *alike, f"curriculum={name}", *SMALL) for name in ("uniform", "unguessable")
    ]
    asked = [load_state(latest(folder / "checkpoints"))["queue"]["memory"]["attempts"] > 0 for folder in folders]
    task = run_of("world=guessable", "task.train_size=64", "task.probe_size=16").task
    few = torch.tensor([problem.possible_answers == 2 for problem in task.problems("train")])
    assert (asked[0] & few).any() and not (asked[1] & few).any() and asked[1].sum() == 4
    shares = [metrics_of(folder)[1]["metrics"]["active_fraction/curriculum"] for folder in folders]
    assert shares[0] == 0 < 0.5 < shares[1] < 1
