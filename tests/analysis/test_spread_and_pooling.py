"""Outcomes beside the mean effect: deviation and losses of runs, and effects pooled over sweeps and environments."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from declared_experiments import saved_data
from interval_coverage import outcomes
from pages.contrasts import comparable, contrast_of, effects_of, same_contrasts
from pages.pooled import Effect, pool
from planted_sweeps import Planted, synthetic_sweep
from scipy import stats

from grpo_lab.analysis.effects.spread import losing_bases, spread_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.stats.ratio import jackknife_ratio
from grpo_lab.analysis.stats.spread import spread_ratio
from grpo_lab.config.design import named_design

ROOT = Path(__file__).parents[2]


def test_the_ratio_of_deviations_by_hand() -> None:
    """With one run a base model about the mean of all; with two about each base model's own mean."""
    control = pd.Series([0.1, 0.2, 0.3, 0.4, 0.7])
    twice = spread_ratio(2 * control + 1, control, {})
    assert twice.mean == pytest.approx(2) and twice.low == pytest.approx(2) and twice.high == pytest.approx(2)
    other = pd.Series([0.5, 0.1, 0.4, 0.2, 0.9])
    found = spread_ratio(other, control, {})
    logs = [math.log(np.delete(other, i).std() / np.delete(control, i).std()) for i in range(5)]
    whole = math.log(other.std() / control.std())
    pseudo = 5 * whole - 4 * np.array(logs)
    half = stats.t.ppf(0.975, 4) * pseudo.std(ddof=1) / math.sqrt(5)
    assert found.mean == pytest.approx(math.exp(whole)) and found.n == 5 and found.bases == 0
    assert (found.low, found.high) == (
        pytest.approx(math.exp(pseudo.mean() - half)),
        pytest.approx(math.exp(pseudo.mean() + half)),
    )
    bases = {seed: seed % 4 for seed in range(8)}
    level = pd.Series([0.0, 5.0, 9.0, 2.0] * 2)
    noise = pd.Series([0.1, 0.3, 0.2, 0.4, -0.1, -0.3, -0.2, -0.4])
    assert spread_ratio(level + 3 * noise, noise, bases).mean == pytest.approx(3), "base models do not count"
    assert spread_ratio(level + 3 * noise, noise, bases).bases == 4


def test_a_ratio_of_deviations_that_is_unknown_says_why() -> None:
    values = pd.Series([0.1, 0.2, 0.4, 0.5])
    assert spread_ratio(values * 0, values, {}).why == "one of them does not deviate"
    few = spread_ratio(values[:3] * 2, values[:3], {})
    assert few.why == "3 runs, 4 that deviate are needed" and few.mean == pytest.approx(2) and math.isnan(few.low)
    assert math.isnan(spread_ratio(values[:1], values[:1], {}).mean) and spread_ratio(values[:0], values, {}).n == 0


def test_the_verdict_counts_who_loses() -> None:
    made = Planted(
        tricks=("helps", "harms"), kind="add_one", seeds=tuple(range(8)), bases=4, steps=20, every=4, own_sd=0.0,
        training={"helps": 0.1, "harms": -0.3}, downstream={"helps": 0.1, "harms": -0.3},
    )  # fmt: skip
    data = synthetic_sweep(made)
    finals = final_values(data)
    metric = "eval/downstream/accuracy"
    assert losing_bases(finals, "", "+harms", "base", metric, 0.1).text.startswith("4 of 4")
    assert losing_bases(finals, "", "+helps", "base", metric, 0.1).number == 0
    text = spread_text(data, finals)
    assert "standard deviation of seeds within a base model over that of base" in text
    assert "\n  Then the base models that lose and the runs that collapse" in text
    one_base = replace(data, runs=data.runs.assign(base=None))
    message = spread_text(one_base, final_values(one_base))
    assert "deviation of seeds over that of base" in message and "\n  Then the seeds that lose" in message
    assert "  +harms: " in text and "loses more than" in text and "in 4 of 4 (0.40 to 1.00); collapsed" in text


def test_pooling_by_hand() -> None:
    one = {0: 0.1, 1: 0.2, 2: 0.3}
    other = {0: 0.3, 1: 0.2, 2: 0.1}
    alone = pool([Effect("sums", one)])
    half = stats.t.ppf(0.975, 2) * np.std(list(one.values()), ddof=1) / math.sqrt(3)
    assert (alone.mean, alone.high - alone.mean, alone.n, alone.bases) == (
        pytest.approx(0.2),
        pytest.approx(half),
        1,
        3,
    )
    assert pool([Effect("sums", one), Effect("sums", other)]).high == pytest.approx(0.2), "averaged on each base model"
    two = pool([Effect("sums", one), Effect("length", {0: 0.5, 1: 0.7, 2: 0.9})])
    welch = stats.ttest_ind([0.5, 0.7, 0.9], [-0.1, -0.2, -0.3], equal_var=False).confidence_interval()
    assert (two.mean, two.n, two.bases) == (pytest.approx(0.45), 2, 6)
    assert (2 * two.low, 2 * two.high) == (pytest.approx(welch.low), pytest.approx(welch.high))
    many = pool([Effect(name, {base: value + at for base, value in one.items()}) for at, name in enumerate("abc")])
    assert many.mean == pytest.approx(1.2) and many.high - many.mean == pytest.approx(
        stats.t.ppf(0.975, 2) / math.sqrt(3)
    ), "equal environments: Student's t over their means"
    few = pool([Effect("sums", {0: 0.1, 1: 0.2})])
    assert few.why == "an environment with fewer than 3 base models" and math.isnan(few.low)
    assert (
        pool([Effect("sums", one, "collapsed runs in 1 of 8"), Effect("sums", other)]).text() == "0.200 [not reported]"
    )


@pytest.mark.extended
def test_the_same_contrast_is_found_in_other_sweeps() -> None:
    batching, bias = map(named_design, ("batching", "difficulty_bias"))
    prediction = next(one for one in bias.predictions if one.arm == "no_scale" or "none" in "".join(bias.arms[one.arm]))
    wanted = contrast_of(bias, ("", prediction.arm), ("", bias.control))
    assert wanted.treated == {"scale=none"} and not wanted.reference and comparable(batching, bias)
    pairs = same_contrasts(batching, wanted)
    assert [one for one, _ in pairs] and all("scale=none" in batching.arms[arm] for (_, arm), _ in pairs)
    finals = final_values(saved_data("batching"))
    effects = effects_of(batching, finals, pairs, "eval/heldout/accuracy")
    (condition, reference), *_ = pairs
    assert pool(effects[:1]).mean == pytest.approx(
        finals.comparison(condition, reference, "eval/heldout/accuracy").whole.mean
    )
    lenient, strict = (contrast_of(named_design("kl_penalty"), (level, "kl_0.04"), (level, "no_kl"))
                       for level in ("lenient", "strict"))  # fmt: skip
    assert lenient != strict, "a grader is a condition that decides"
    assert not comparable(named_design("acts_length"), bias)


@pytest.mark.extended
def test_new_intervals_hold_as_often_as_the_tables_say() -> None:
    spread, pooled, ratio = outcomes.tables(150)
    tables = outcomes.__doc__ or ""
    for table in (spread, pooled, ratio):
        assert table.title in tables
        lines = tables.split(table.title)[1].strip("\n").splitlines()
        for (label, values), line in zip(table.rows, lines[1:]):
            stated = [float(word) for word in line.strip().removeprefix(label).split()]
            assert np.abs(np.array(values) - stated).max() < 10, (table.title, label)
            assert min(stated) >= 85, "an interval that holds this rarely should not be shown"


def test_the_jackknife_of_a_ratio_by_hand() -> None:
    pairs = np.array([[1.0, 2.0], [2.0, 5.0], [3.0, 4.0]])
    found = jackknife_ratio(pairs)
    left = np.array([5 / 9, 4 / 6, 3 / 7])
    half = stats.t.ppf(0.975, 2) * math.sqrt(2 / 3 * ((left - left.mean()) ** 2).sum())
    assert (found.mean, found.high - found.mean) == (pytest.approx(6 / 11), pytest.approx(half))
    assert math.isnan(jackknife_ratio(pairs[:1]).low)
