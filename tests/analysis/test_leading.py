"""What announces a loss: which readings count, alarms that the null sets, and intervals that hold the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from grpo_lab.analysis.divergence.leading import INDICATORS, Share, announced, lost_at, pair_counts, readings
from grpo_lab.analysis.tracks import Track

KL = INDICATORS["kl"]


def run_of(downstream: Sequence[float], kl: Sequence[float], steps: Sequence[int] | None = None, **others) -> Track:
    """One run with evaluations at equal budgets, NaN where nothing is given."""
    length = len(downstream)
    names = ("reward", "shaped", "probe", "heldout_training", "heldout", "sampled", "entropy")
    arrays = {name: np.full(length, math.nan) for name in (*names, "truncated", "ess")}
    arrays |= {"downstream": np.array(downstream, float), "kl": np.array(kl, float)}
    arrays |= {name: np.array(values, float) for name, values in others.items()}
    step = np.arange(length) if steps is None else np.array(steps)
    x = np.arange(length, dtype=float)
    return Track("", "a", 0, -1, step, x, around=(0, 0), lean=0.0, **arrays)


def test_a_run_that_begins_below_ten_points_says_nothing_of_a_loss() -> None:
    """Its readings are ignored, however high."""
    runs = [run_of([0.5, 0.5, 0.3], [0, 2, 0])] * 10 + [run_of([0.5, 0.5, 0.5], [0, 1, 0])] * 10
    unable = [run_of([0.09, 0.0, 0.0], [0, 9, 0])] * 10
    few, more = (announced(some, some[10:], KL, generator()) for some in (runs, runs + unable))
    assert few.auc.mean == 1.0 and few.caught.number == 10 and repr(more) == repr(few)


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


def test_a_loss_is_the_first_evaluation_ten_points_below_the_start() -> None:
    assert lost_at(run_of([0.5, 0.6, 0.45, 0.4, 0.2], [0.0] * 5)) == 3
    assert lost_at(run_of([0.5, 0.9, 0.7], [0.0] * 3)) is None  # ten points below its best is no loss from the start


def test_a_reading_is_the_change_in_the_direction_that_is_feared() -> None:
    run = run_of([0.5] * 3, [0.0, 0.4, 0.9], entropy=[1.0, 0.7, 0.8])
    np.testing.assert_allclose(readings(run, KL), [0.0, 0.4, 0.9])
    np.testing.assert_allclose(readings(run, INDICATORS["entropy"]), [0.0, 0.3, 0.2])


def test_only_readings_before_the_loss_and_before_the_end_are_compared_and_only_at_the_same_step() -> None:
    loses = run_of([0.5, 0.5, 0.5, 0.3, 0.3], [0.0, 1.0, 3.0, 9.0, 9.0])
    stays = run_of([0.5] * 5, [0.0, 2.0, 2.0, 2.0, 2.0])
    above, pairs = pair_counts([loses, stays], KL)
    assert pairs.tolist() == [[0, 2], [0, 0]] and above.tolist() == [[0, 1], [0, 0]]  # steps 1 and 2
    elsewhere = run_of([0.5] * 5, [0.0, 2.0, 2.0, 2.0, 2.0], steps=[0, 10, 20, 30, 40])
    assert not pair_counts([loses, elsewhere], KL)[1].any()


def test_the_area_is_one_for_a_perfect_announcement_and_a_half_for_none() -> None:
    losing = [run_of([0.5, 0.5, 0.5, 0.2], [0.0, 2.0 + i, 2.0 + i, 2.0]) for i in range(10)]
    staying = [run_of([0.5] * 4, [0.0, 1.0, 1.0, 1.0]) for _ in range(12)]
    found = announced(losing + staying, staying, KL, generator())
    assert (found.auc.mean, found.auc.low, found.auc.high, found.auc.n) == (1.0, 1.0, 1.0, 22)
    same = [run_of([0.5, 0.5, 0.5, 0.2], [0.0, 1.0, 1.0, 1.0]) for _ in range(10)]
    assert announced(same + staying, staying, KL, generator()).auc.mean == 0.5
    few = announced(losing[:9] + staying, staying, KL, generator())
    assert few.auc.mean == 1.0 and math.isnan(few.auc.low) and "too few for an interval" in few.note


def test_an_alarm_is_what_lies_above_the_bound_of_the_null_and_its_lead_is_in_budget() -> None:
    null = [run_of([0.5] * 6, [0.0, top / 2, top, top, top, 50.0]) for top in (1.0, 1.2, 1.4)]
    early = run_of([0.5] * 5 + [0.2], [0.0, 1.0, 5.0, 5.0, 5.0, 5.0])
    late = run_of([0.5] * 5 + [0.2], [0.0, 1.0, 1.0, 1.0, 1.0, 5.0])  # its alarm comes with the loss
    at_once = run_of([0.5, 0.2, 0.2, 0.2, 0.2, 0.2], [0.0, 9.0, 9.0, 9.0, 9.0, 9.0])  # nothing was read before
    found = announced([early, late, at_once, *null], null, KL, generator())
    # Mean 1.2, standard deviation 0.2, t(.95, 2) = 2.920: 1.2 + 2.920 * sqrt(4 / 3) * 0.2.
    assert found.threshold == pytest.approx(1.2 + 2.91999 * math.sqrt(4 / 3) * 0.2, abs=1e-4)
    assert (found.caught.number, found.caught.n) == (1, 2) and found.lead == (3 / 5,)
    assert (found.false.number, found.false.n) == (0, 3)


def test_a_null_run_alarms_falsely_when_the_others_set_the_bound() -> None:
    tops = (1.0, 1.01, 1.02, 1.03, 4.0)
    null = [run_of([0.5] * 4, [0.0, top, top, top]) for top in tops]
    found = announced(null, null, KL, generator())
    assert (found.false.number, found.false.n) == (1, 5)
    lost = run_of([0.5, 0.5, 0.2, 0.2], [0.0, 40.0, 40.0, 40.0])  # one that loses is no null run
    assert announced(null, [*null, lost], KL, generator()).false.n == 5
    assert math.isnan(announced(null, null[:2], KL, generator()).threshold)


def test_what_cannot_be_said_is_said_in_words() -> None:
    runs = [run_of([0.5] * 4, [math.nan] * 4), run_of([0.5] * 4, [math.nan] * 4)]
    assert announced(runs, runs, KL, generator()).note == "no run that could lose 10 points logged it"
    short = [run_of([0.5, 0.2], [0.0, 1.0])]
    assert announced(short, short, KL, generator()).note == "needs an evaluation between the first and the last one"


def test_a_share_has_the_interval_of_clopper_and_pearson() -> None:
    none = Share(0, 10).interval
    assert none.mean == 0 and none.low == 0 and none.high == pytest.approx(1 - 0.025**0.1)
    assert math.isnan(Share(0, 0).interval.mean)


def test_false_alarms_on_a_normal_null_are_one_in_twenty() -> None:
    rng, false, number = np.random.default_rng(1), 0, 0
    for _ in range(150):
        null = [run_of([0.5] * 4, [0.0, *(top := [rng.normal()]), top[0] - 1, 0.0]) for _ in range(6)]
        found = announced(null, null, KL, rng).false
        false, number = false + found.number, number + found.n
    assert 0.03 < false / number < 0.07


def test_levels_are_compared_and_alarmed_each_by_itself() -> None:
    """Readings of 10 are usual at one level and unheard of at the other."""
    calm = [replace(run_of([0.5] * 6, [0.0, *[top] * 4, 50.0]), level="calm") for top in (1.0, 1.2, 1.4)]
    wild = [replace(run_of([0.5] * 6, [0.0, *[top] * 4, 50.0]), level="wild") for top in (9.0, 10.0, 11.0)]
    loses = run_of([0.5] * 5 + [0.2], [0.0, 5.0, 5.0, 5.0, 5.0, 5.0])
    losing = [replace(loses, level="calm"), replace(loses, level="wild")]
    found = announced([*losing, *calm, *wild], [*calm, *wild], KL, generator())
    assert (found.caught.number, found.caught.n) == (1, 2)  # the one at the calm level, at its first reading
    assert found.lead == (4 / 5,) and (found.false.number, found.false.n) == (0, 6)
    assert found.threshold == pytest.approx(1.2 + 2.91999 * math.sqrt(4 / 3) * 0.2, abs=1e-4)  # that of calm, the lower
    assert found.auc.mean == 0.5  # above each null run of its level, or below each
    assert found.note.startswith("2 runs with a later loss, 6 without")
    # Two null runs at one level are too few for its own: all five set one threshold, which 5 does not reach.
    pooled = announced([*losing, *calm, *wild[:2]], [*calm, *wild[:2]], KL, generator())
    assert pooled.caught.number == 0 and pooled.threshold > 10
