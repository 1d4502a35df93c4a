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
from grpo_lab.analysis.scaling import fit_sweep
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


@pytest.mark.few(1)
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
    assert all(one.verdict == ("not significant" if one.difference.why else "supported") for one in hurts)
    assert sum(bool(one.difference.why) for one in hurts) == 1
    assert sum(one.verdict == "supported" for one in helps) >= REPEATS - 2
    assert "SYNTHETIC" in verdict_text(sweeps[0], final_values(sweeps[0]))


@pytest.mark.extended
def test_main_effects_and_interactions_of_a_factorial() -> None:
    planted = Planted(
        **SMALL | {"questions": 256},
        kind="factorial",
        training={"helps": 0.08, "hurts": -0.06, ("helps", "hurts"): 0.06},
    )
    found: dict[tuple[str, str], list[float]] = {}
    for seed in range(5):
        data = synthetic_sweep(planted, seed)
        for effect in trick_effects(data, final_values(data), [HELDOUT]):
            found.setdefault((effect.contrast.kind, effect.contrast.trick), []).append(effect.interval.mean)
    means = {key: float(np.mean(values)) for key, values in found.items()}
    # Half of the contexts have the other of the pair: 0.08 + 0.06 / 2 and -0.06 + 0.06 / 2
    assert means["main", "helps"] == pytest.approx(0.11, abs=0.012)
    assert means["main", "hurts"] == pytest.approx(-0.03, abs=0.012)
    assert means["main", "null"] == pytest.approx(0.0, abs=0.012)
    pairs = {key[1]: value for key, value in means.items() if key[0] == "interaction"}
    assert len(pairs) == 3
    (pair,) = (name for name in pairs if "helps" in name and "hurts" in name)
    assert pairs[pair] == pytest.approx(0.06, abs=0.02)
    assert all(abs(value) < 0.025 for name, value in pairs.items() if name != pair)


# ---- divergence


def rows_of(data: SweepData, metric: str) -> pd.DataFrame:
    table = divergence_table(data, final_values(data), np.random.default_rng(0))
    return table[table["metric"] == f"divergence/{metric}"].set_index("arm")


def test_the_onset_is_found_where_it_was_planted_and_nowhere_else() -> None:
    planted = Planted(**SMALL | {"questions": 256}, tricks=("hurts", "null"), falls={"+hurts": 0.3}, onset=0.5)
    every = planted.every * planted.tokens_per_step
    for seed in range(2):
        data = synthetic_sweep(planted, seed)
        onset, drop = rows_of(data, "onset_after_peak"), rows_of(data, "post_peak_drop")
        turned = 0.5 * planted.steps * planted.tokens_per_step
        assert turned < onset.loc["+hurts", "value"] <= turned + 2.5 * every
        assert drop.loc["+hurts", "low"] > 5  # percentage points
        for arm in ("base", "+null"):
            assert math.isnan(onset.loc[arm, "value"]) and "not detected" in onset.loc[arm, "note"]
            assert drop.loc[arm, "value"] < 5


@pytest.mark.extended
def test_the_gap_change_is_what_was_planted(sweeps: list[SweepData]) -> None:
    found = [rows_of(data, "gap_change").loc["base", "value"] for data in sweeps]
    # From the probe's 0.31 to 0.60 in training, from 0.30 to 0.45 downstream: 14 points
    assert np.mean(found) == pytest.approx(14, abs=3)


# ---- the asymptote


def test_the_asymptote_is_identified_only_where_it_can_be() -> None:
    late = {"tricks": ("null",), "seeds": (0, 1, 2, 3), "steps": 80, "every": 4, "questions": 512, "samples": 4}
    seen = synthetic_sweep(Planted(**late, midpoint=0.08, seed_sd=0.005, own_sd=0.002, steepness=2.0))
    (base,) = (condition for condition in fit_sweep(seen, final_values(seen)) if condition.arm == "base")
    assert base.identified, base.reasons
    # Held-out accuracy is 0.06 above training's, and its sigmoid ends a little beyond the last step: (1 + 0.08 ** 2)
    start = 0.36
    truth = start + 0.3 * (1 + 0.08**2.0)
    assert base.asymptote.low - 0.02 <= truth <= base.asymptote.high + 0.02
    early = synthetic_sweep(Planted(**late, midpoint=1.0, end=0.5))
    fits = fit_sweep(early, final_values(early))
    assert fits and not any(condition.identified for condition in fits) and all(condition.reasons for condition in fits)


# ---- from files


def test_the_same_numbers_come_back_from_run_folders(tmp_path: Path) -> None:
    planted = Planted(tricks=("helps",), seeds=(0, 1), steps=6, every=3, questions=8, collapse={("+helps", 1): 0.5})
    made = synthetic_sweep(planted)
    write_synthetic(planted, tmp_path)
    read = load_sweep(tmp_path, "synthetic")
    labels = ["arm", "seed", "step"]
    ours, theirs = (data.points.sort_values(labels).reset_index(drop=True) for data in (made, read))
    pd.testing.assert_frame_equal(ours[sorted(ours)], theirs[sorted(theirs)], check_dtype=False)
    labels += ["suite", "question"]
    ours, theirs = (data.answers.sort_values(labels).reset_index(drop=True) for data in (made, read))
    pd.testing.assert_frame_equal(ours, theirs, check_dtype=False)
    assert read.collapsed("", "+helps") == 1 and read.design == made.design
    assert all("SYNTHETIC" in str(place) for place in (read.record.command, read.design.question))
