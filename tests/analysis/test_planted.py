"""Planted truths, end to end: what was planted is found, what was not is not, and what cannot be known is said."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from planted_sweeps import Planted, synthetic_sweep, write_synthetic
from scipy import stats as scipy_stats

from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.effects.contrasts import TRAINING_REWARD, TrickEffect, trick_effects
from grpo_lab.analysis.effects.verdict import judge, verdict_text
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, final_values
from grpo_lab.analysis.scaling.fits import fit_sweep
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.sweep_data import SweepData

SMALL = {"steps": 40, "every": 4, "questions": 64, "samples": 1}
TRUTH = Planted(
    **SMALL,
    training={"helps": 0.08, "hurts": 0.06, ("helps", "hurts"): -0.05},
    downstream={"helps": 0.10, "hurts": -0.12, ("helps", "hurts"): 0.06},
    falls={"+helps": 0.0, "+hurts": 0.25},
    onset=0.5,
)
# +hurts falls by 0.25 at the end, beyond what its trick does to the end value
FALL = {"added": 0.25, "left_out": 0.0}
REPEATS = 12


@pytest.fixture(scope="module")
def sweeps() -> list[SweepData]:
    """The same truths under other noise."""
    return [synthetic_sweep(TRUTH, seed) for seed in range(REPEATS)]


@pytest.fixture(scope="module")
def effects(sweeps: Sequence[SweepData]) -> list[list[TrickEffect]]:
    metrics = (DOWNSTREAM, TRAINING_REWARD, HELDOUT)
    return [trick_effects(data, final_values(data), metrics) for data in sweeps]


def of(effects: Sequence[Sequence[TrickEffect]], trick: str, kind: str, metric: str) -> list[TrickEffect]:
    return [
        effect
        for sweep in effects
        for effect in sweep
        if (effect.contrast.trick, effect.contrast.kind, effect.metric) == (trick, kind, metric)
    ]


def true_effect(planted: Planted, trick: str, context: str, effects: Mapping, metric: str) -> float:
    on, off = ("full", f"-{trick}") if context == "left_out" else (f"+{trick}", "base")
    fall = planted.falls.get(on, 0.0) - planted.falls.get(off, 0.0) if metric == DOWNSTREAM else 0.0
    return planted.added(effects, on) - planted.added(effects, off) - fall


@pytest.mark.parametrize("kind", ["added", "left_out"])
@pytest.mark.parametrize("trick", ["helps", "hurts", "null"])
def test_effects_are_recovered_without_bias(effects: list[list[TrickEffect]], trick: str, kind: str) -> None:
    for metric, planted in ((DOWNSTREAM, TRUTH.downstream), (HELDOUT, TRUTH.training)):
        truth = true_effect(TRUTH, trick, kind, planted, metric)
        found = [effect.interval.mean for effect in of(effects, trick, kind, metric)]
        assert len(found) == REPEATS
        error = np.std(found, ddof=1) / math.sqrt(REPEATS)
        # Four standard errors, and the half answer by which a share of 64 answers is off
        assert np.mean(found) == pytest.approx(truth, abs=4 * error + 0.004), (metric, truth)


def test_the_interaction_is_that_of_the_pair(effects: list[list[TrickEffect]]) -> None:
    """Left out of the whole less added to the base: what helps and hurts do together beyond both."""
    found = of(effects, "helps", "interaction", HELDOUT)
    assert len(found) == REPEATS
    assert np.mean([effect.interval.mean for effect in found]) == pytest.approx(-0.05, abs=0.012)
    null = of(effects, "null", "interaction", HELDOUT)
    assert np.mean([effect.interval.mean for effect in null]) == pytest.approx(0.0, abs=0.012)


@pytest.mark.extended
def test_nulls_are_not_resolved_at_the_nominal_rate_and_effects_are() -> None:
    """Two nulls, on training and downstream, added and left out, over 40 sweeps: 5% of intervals exclude 0."""
    planted = Planted(**SMALL, tricks=("helps", "null", "nil"), seeds=(0, 1, 2, 3), downstream={"helps": 0.15})
    wrong, found, tests, effects = 0, 0, 0, 0
    for seed in range(40):
        data = synthetic_sweep(planted, 100 + seed)
        for effect in trick_effects(data, final_values(data), [DOWNSTREAM, HELDOUT]):
            if effect.contrast.kind not in ("added", "left_out") or effect.interval.why:
                continue
            excludes = not effect.interval.contains(0.0)
            if effect.contrast.trick != "helps":
                tests, wrong = tests + 1, wrong + excludes
            elif effect.metric == DOWNSTREAM:
                effects, found = effects + 1, found + excludes
    # Four runs may look like two groups by chance; then the interval is withheld.
    assert tests >= 300 and effects >= 75  # of 320 and 80
    # Tests of one sweep share their reference arm, so they count for fewer: bounds of 120 independent ones at 99.8%.
    low, high = scipy_stats.binom.ppf([0.001, 0.999], 120, 0.05) / 120
    assert low <= wrong / tests <= high
    assert found >= 0.95 * effects


def test_the_words_of_the_verdict_follow(sweeps: list[SweepData]) -> None:
    judged = [{one.prediction.arm: one for one in judge(data, final_values(data))} for data in sweeps]
    hurts, helps = ([of_arm[arm] for of_arm in judged] for arm in ("+hurts", "+helps"))
    # Five runs may look like two groups by chance; then the interval is withheld, and no word rests on it.
    assert all(one.word == ("not resolved" if one.difference.why else "supported") for one in hurts)
    assert sum(bool(one.difference.why) for one in hurts) <= 2
    assert sum(one.word == "supported" for one in helps) >= REPEATS - 2
    assert "SYNTHETIC" in verdict_text(sweeps[0], final_values(sweeps[0]))
