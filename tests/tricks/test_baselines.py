"""Baselines that remember, and those that leave the group's mean; Focal and Unlikeliness beside them. By hand.

The whole loop with each of them stands in tests/learner/test_reference_loop.py.
"""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import F64, Endings, assert_close, make_graded, make_rollouts
from short_runs import metrics_of, run_in_process, same_ending
from torch import Tensor

from grpo_lab.tricks.baseline import Credit, GroupMean
from grpo_lab.tricks.baseline_group import Asymmetric, Kalman, Opmd
from grpo_lab.tricks.baseline_stateful import Ema, ValueTracker
from grpo_lab.tricks.convention import Singleton
from grpo_lab.tricks.reward_shaping import Unlikeliness
from grpo_lab.tricks.scale import Focal, GroupStd
from grpo_lab.types import Graded, Problem, Rollouts

EXACT = 1e-12
ZERO = Singleton.zero


# --- within a group -----------------------------------------------------------------------------------------


def test_a_kalman_filter_by_hand() -> None:
    """Without drift and with noise 1, from x = 0 and P = 1, the estimate is the mean of a 0 and the rows so far.

    R 1: P 1, K 1/2, x 1/2, P 1/2, A (1/2) / sqrt(1/2)
    R 0: K (1/2) / (3/2) = 1/3, x 1/2 - 1/6 = 1/3, P 1/3, A -(1/3) / sqrt(1/3)
    R 1: K (1/3) / (4/3) = 1/4, x 1/3 + (1/4)(2/3) = 1/2, P 1/4, A (1/2) / (1/2)
    """
    plain = Kalman(0.0, 1.0, 0.0, 1.0, 0.0)
    expected = [math.sqrt(1 / 2), -math.sqrt(1 / 3), 1.0]
    assert_close(plain(make_graded([[1, 0, 1]])), [expected], EXACT, "three rows")
    gap = make_graded([[1, 9, 0, 1]], in_statistics=[[True, False, True, True]])
    assert_close(plain(gap), [[expected[0], 0, *expected[1:]]], EXACT, "a row that does not count is passed over")
    # drift 1: P 2, K 2/3, x 2/3, P 2/3, A (1/3) / (sqrt(2/3) + 1)
    drifting = Kalman(1.0, 1.0, 0.0, 1.0, 1.0)
    assert_close(drifting(make_graded([[1]])), [[(1 / 3) / (math.sqrt(2 / 3) + 1)]], EXACT, "drift and eps")
    assert_close(Kalman(0.0, 1.0, 0.5, 1.0, 0.0)(make_graded([[0.5, 0.5]])), [[0, 0]], EXACT, "as expected")


def test_with_the_published_numbers_an_all_right_group_keeps_a_tenth_that_falls_as_one_over_sqrt_rows() -> None:
    """Row 1: 1 - x = 1 - K = .01/1.01001, P = .01 * 1.00001/1.01001, so A = sqrt(.01 / (1.01001 * 1.00001))."""
    found = Kalman(1e-5, 1e-2, 0.0, 1.0, 1e-8)(make_graded([[1.0] * 4, [0.0] * 4]))
    first = math.sqrt(0.01 / (1.01001 * 1.00001))
    assert_close(found[0, 0], first, 1e-7, "first row")
    assert_close(found[0], [first / math.sqrt(n) for n in (1, 2, 3, 4)], 5e-4, "as 1/sqrt(n), but for drift and prior")
    assert_close(found[1], [0.0] * 4, 0, "all wrong")


def test_a_shifted_mean_by_hand() -> None:
    graded = make_graded(
        [[1, 0, 0, 0], [1, 1, 1, 1], [0.6, 0, 0, 0]],
        in_statistics=[[True] * 4, [True, True, False, False], [True, False, False, False]],
    )
    expected = [[0.85, -0.15, -0.15, -0.15], [0.1, 0.1, 0, 0], [0] * 4]
    assert_close(Asymmetric(-0.1, ZERO)(graded), expected, EXACT, "mean .25, 1")
    raw = Asymmetric(-0.1, Singleton.raw)(graded)
    assert_close(raw, [*expected[:2], [0.6, 0, 0, 0]], EXACT, "a lone row's own reward")
    mixed = make_graded([[1, 0, 0, 0]])
    assert_close(Asymmetric(0.0, ZERO)(mixed), GroupMean(ZERO)(mixed), EXACT, "no shift")


def test_a_soft_maximum_by_hand() -> None:
    """ln((e + 1) / 2) = .62011450696; halved, as 1 + tau = 2."""
    soft = 0.6201145069582775
    graded = make_graded([[1, 0, 1], [1, 1, 1]], in_statistics=[[True, True, False], [True] * 3])
    found = Opmd(1.0, ZERO)(graded)
    assert_close(found, [[(1 - soft) / 2, -soft / 2, 0], [0] * 3], EXACT, "tau 1, ties exactly 0")
    # tau 1/2: (R - ln((e^2 + 1)/2)/2) / 1.5 = (R - .7168903656) / 1.5
    half = make_graded([[1, 0]])
    soft = math.log((math.e**2 + 1) / 2) / 2
    assert_close(Opmd(0.5, ZERO)(half), [[(1 - soft) / 1.5, -soft / 1.5]], EXACT, "tau 1/2")
    assert_close(10001 * Opmd(1e4, ZERO)(half), [[0.5, -0.5]], 1e-4, "tau large: the mean")
    assert_close((1 + 1e-3) * Opmd(1e-3, ZERO)(half), [[0, -1]], 1e-3, "tau small: the largest")
    assert torch.isfinite(Opmd(1e-3, ZERO)(half)).all(), "exp(1000) overflows"
    lone = make_graded([[1, 0]], in_statistics=[[True, False]])
    assert_close(Opmd(1.0, ZERO)(lone), [[0, 0]], 0, "lone")
    assert_close(Opmd(1.0, Singleton.raw)(lone), [[1, 0]], 0, "lone, raw")


def test_focal_weights_by_hand() -> None:
    """One of four right: std sqrt(3)/4, A .75 / (sqrt(3)/4) = sqrt(3) and -1/sqrt(3), times (3/4)^2. All right: 0."""
    graded = make_graded(
        [[1, 0, 0, 0], [1, 0.8, 1, 1]], correctness=[[1, 0, 0, 0], [1] * 4], in_statistics=[[True] * 4, [True] * 4]
    )
    centred = GroupMean(ZERO)(graded)
    found = Focal(0, 0.0, False, ZERO, 2.0)(centred, graded)
    wrong = -(9 / 16) / math.sqrt(3)
    assert_close(found, [[9 / 16 * math.sqrt(3), wrong, wrong, wrong], [0] * 4], EXACT, "gamma 2")
    three = replace(graded, in_statistics=torch.tensor([[True, True, False, False], [True] * 4]))
    lone = Focal(0, 0.0, False, ZERO, 1.0)(GroupMean(ZERO)(three), three)[0]
    assert_close(lone, [0.5, -0.5, 0, 0], EXACT, "the rate of counted rows: 1/2")
    tiny = Focal(1, 1e-6, False, ZERO, 1e-12)(centred, graded)[0]
    assert_close(tiny, GroupStd(1, 1e-6, False, ZERO)(centred, graded)[0], 1e-9, "gamma 0 is group_std")


def test_unlikely_right_answers_earn_more_by_hand() -> None:
    """beta 1/2, G 4, ranks 1 to 4: right ones lose (1/2)(4 - rank)/4 of their reward."""
    graded = make_graded(
        [[1, 0, 1, 1], [1, 1, 1, 2]],
        correctness=[[1, 0, 1, 1], [1] * 4],
        logprob=[[-1, -2, -3, -4], [-5, -2, -5, -1]],
    )
    shaped = Unlikeliness(0.5)(graded)
    # second group: ranks 3, 2, 3, 1; the last has a reward of 2
    added = [[-3 / 8, 0, -1 / 8, 0], [-1 / 8, -2 / 8, -1 / 8, -6 / 8]]
    assert_close(shaped.components["unlikeliness"], added, EXACT, "added")
    assert_close(shaped.reward, graded.reward + torch.tensor(added, dtype=F64), EXACT, "reward")
    assert torch.equal(shaped.correctness, graded.correctness)
    rounded = replace(graded, logprob=torch.tensor([[-1, -1 - 1e-7, -3, -4]] * 2, dtype=F64))
    assert_close(Unlikeliness(0.5)(rounded).components["unlikeliness"][1, :2], [-3 / 8] * 2, EXACT, "rounding is a tie")


# --- over steps ---------------------------------------------------------------------------------------------


def credit_of(rollouts: Rollouts, memory: dict, now: Tensor | None = None) -> Credit:
    """`now`: the learner's log-prob of every token of the past, as the difference from the sampler's then."""

    def learner(past: Rollouts) -> Tensor:
        assert now is not None, "nothing to compare with yet"
        return past.sampler_logprobs + now

    return Credit(
        rollouts, torch.zeros(rollouts.tokens.shape), None, Endings(rollouts), memory=memory, learner_logprobs=learner
    )


def test_a_moving_average_by_hand() -> None:
    """decay 1/2 from 0: b 0, 1/2, 1/4, 5/8, 13/16; the next step goes on from there."""
    baseline, rollouts = Ema(0.5), make_rollouts([1, 1, 1, 1], 2)
    memory = baseline.first_memory({})
    graded = make_graded([[1, 0], [1, 1]])
    found = baseline.centre(graded, credit_of(rollouts, memory))
    assert_close(found, [[1, -0.5], [0.75, 0.375]], EXACT, "before its own reward")
    left_out = make_graded([[0, 7], [1, 1]], in_statistics=[[True, False], [False, False]])
    found = baseline.centre(left_out, credit_of(rollouts, memory))
    assert_close(found, [[-0.8125, 0], [0, 0]], EXACT, "rows that do not count move nothing")
    assert memory == {"average": {"": 0.40625}}


def test_each_source_has_an_average_of_its_own() -> None:
    baseline, rollouts = Ema(0.9), make_rollouts([1, 1, 1], 1)
    rollouts = replace(rollouts, problems=tuple(Problem(n, "", "", 1, source="ab"[n % 2]) for n in range(3)))
    memory = baseline.first_memory({})
    found = baseline.centre(make_graded([[1], [2], [1]]), credit_of(rollouts, memory))
    assert_close(found, [[1], [2], [0.9]], EXACT, "b starts from 0")


def visit(baseline: ValueTracker, memory: dict, reward: list[list[float]], now: float | None = None) -> Tensor:
    size = len(reward[0])
    lengths = [2 + place for place in range(len(reward) * size)]
    rollouts = make_rollouts(lengths, size, sampler=torch.full((len(lengths), max(lengths)), -1.0, dtype=F64))
    graded: Graded = make_graded(reward)
    return baseline.centre(graded, credit_of(rollouts, memory, None if now is None else torch.tensor(now, dtype=F64)))


def test_a_tracked_value_by_hand() -> None:
    """a = b = 1/2. R 1: A 1/2, first visit D 0, rho .96, a 1.48, b .48.

    R 0 at D = half_life: A -1.48/1.96, rho 1/2, a .74, b .24 + 1. R 1 at no drift: A 1 - .74/1.98, a .96 * .74 + 1.
    """
    baseline = ValueTracker(0.06, 0.2, 0.96)
    memory = baseline.first_memory({})
    assert_close(visit(baseline, memory, [[1.0]]), [[0.5]], EXACT, "first")
    assert_close(visit(baseline, memory, [[0.0]], now=-0.06), [[-1.48 / 1.96]], EXACT, "second")
    assert_close(visit(baseline, memory, [[1.0]], now=0.0), [[1 - 0.74 / 1.98]], EXACT, "third")
    assert_close([memory["a"][0], memory["b"][0]], [1.7104, 1.1904], EXACT, "rho .96")
    visit(baseline, memory, [[0.0]], now=9.0)
    assert_close([memory["a"][0], memory["b"][0]], [0.2 * 1.7104, 0.2 * 1.1904 + 1], EXACT, "far: low")


def test_a_group_is_one_visit_and_two_problems_are_two() -> None:
    """Two rows: A R - 1/2, a .96/2 + 1, b .96/2 + 1; a constant rho needs neither the past nor the learner."""
    baseline = ValueTracker(0.06, 0.5, 0.5)
    memory = baseline.first_memory({})
    assert not baseline.scores_past
    assert_close(visit(baseline, memory, [[1, 0], [1, 1]]), [[0.5, -0.5], [0.5, 0.5]], EXACT, "first")
    assert memory == {"a": {0: 1.25, 1: 2.25}, "b": {0: 1.25, 1: 0.25}, "visit": {}}
    assert_close(visit(baseline, memory, [[1, 0], [1, 1]]), [[0.5, -0.5], [0.1, 0.1]], EXACT, "v 1/2 and 9/10")


def test_it_starts_from_what_was_measured_of_the_base_model() -> None:
    """low .875: a + b = 8; 3 of 7 right: a 8 * 3.5 / 8, b 8 * 4.5 / 8. Nothing graded: a = b = 1/2."""
    baseline = ValueTracker(0.06, 0.875, 0.96)
    memory = baseline.first_memory({0: (3, 7), 1: (0, 0)})
    assert memory == {"a": {0: 3.5}, "b": {0: 4.5}, "visit": {}}
    assert_close(visit(baseline, memory, [[1], [1]]), [[1 - 3.5 / 8], [0.5]], EXACT, "v")


def test_the_kept_responses_are_those_of_the_last_visit_in_tensors_of_their_own() -> None:
    baseline = ValueTracker(0.06, 0.2, 0.96)
    memory = baseline.first_memory({})
    visit(baseline, memory, [[1.0], [0.0]])
    kept = memory["visit"][0]
    assert kept["tokens"].shape == (1, 2) and kept["tokens"].untyped_storage().nbytes() == 16
    again = Rollouts(problems=(Problem(0, "", "", 1),), **kept)
    assert again.lengths.tolist() == [2] and again.sampler_logprobs.tolist() == [[-1.0, -1.0]]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Ema(1.0),
        lambda: ValueTracker(0.0, 0.8, 0.9),
        lambda: ValueTracker(0.06, 0.9, 0.8),
        lambda: ValueTracker(0.06, 0.9, 1.0),
        lambda: Kalman(-1.0, 1.0, 0.0, 1.0, 0.0),
        lambda: Kalman(0.0, 0.0, 0.0, 1.0, 0.0),
        lambda: Asymmetric(math.nan, ZERO),
        lambda: Opmd(0.0, ZERO),
        lambda: Focal(0, 1e-6, False, ZERO, 0.0),
        lambda: Unlikeliness(0.0),
        lambda: Unlikeliness(1.5),
    ],
)
def test_numbers_out_of_range_are_refused(wrong) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()


# --- runs ---------------------------------------------------------------------------------------------------

SIX_STEPS = (
    "budget.amount=6 checkpoint_every=2 keep_checkpoints=9 problems_per_step=8 group_size=1 task.train_size=16 "
    "task.probe_size=16 scale=none optimizer.learning_rate=1e-3 optimizer.warmup_updates=1 evaluation=brief "
    "evaluation.probe_problems=2 evaluation.heldout_problems=2 evaluation.downstream_problems=2"
)


def memory_of(folder: Path, step: int) -> dict:
    saved = torch.load(folder / "checkpoints" / f"step={step:06d}" / "state.pt", weights_only=True)
    return saved["memories"]["baseline"]


# Both keep their numbers in the same part of a checkpoint.
@pytest.mark.parametrize("baseline", [pytest.param("ema", marks=pytest.mark.extended), "value_tracker"])
def test_a_run_that_was_killed_goes_on_with_the_same_bits(tmp_path: Path, tiny_base: Path, baseline: str) -> None:
    """The folder as a kill after step 5 leaves it: the log is ahead of the last checkpoint, that of step 2."""
    overrides = [*SIX_STEPS.split(), f"baseline={baseline}"]
    whole = run_in_process(tmp_path / "whole", *overrides)
    cut = tmp_path / "cut" / "run" / "seed=0"
    shutil.copytree(whole, cut)
    (cut / "DONE").unlink()
    for step in (4, 6):
        shutil.rmtree(cut / "checkpoints" / f"step={step:06d}")
    lines = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_bytes(b"".join(lines[:6]))
    assert run_in_process(tmp_path / "cut", *overrides) == cut
    same_ending(whole, cut)
    assert repr(memory_of(whole, 6)) == repr(memory_of(cut, 6)) != repr(memory_of(whole, 2))
    assert max(row["metrics"]["active_fraction/baseline"] for row in metrics_of(whole)[1:]) > 0.5


def test_measured_pass_rates_reach_the_tracker(tmp_path: Path, tiny_base: Path) -> None:
    """With a constant rho of 1/2 and one visit a problem, a + b is half of 1 / (1 - low) = 2, and the 1 of its row."""
    overrides = "baseline=value_tracker baseline.low=0.5 baseline.high=0.5 pass_rate=band pass_rate.samples=4"
    wide = "pass_rate.low=0 pass_rate.high=1 budget.amount=2 checkpoint_every=2"
    folder = run_in_process(tmp_path, *SIX_STEPS.split(), *overrides.split(), *wide.split())
    memory = memory_of(folder, 2)
    assert len(memory["a"]) == 16
    assert_close([memory["a"][key] + memory["b"][key] for key in memory["a"]], [2.0] * 16, EXACT, "a + b")
    assert len({memory["a"][key] for key in memory["a"]}) > 2
