"""The tables of a sweep hold the numbers of its runs, curves, effects and verdict."""

from __future__ import annotations

import math
import re

import numpy as np
import pandas as pd
import pytest
from declared_experiments import saved_data

from grpo_lab.analysis.effects.contrasts import effects_table, trick_effects
from grpo_lab.analysis.effects.verdict import judge
from grpo_lab.analysis.final_values import DOWNSTREAM, final_values
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.tables import Tables, load


@pytest.fixture(scope="module")
def dapo() -> Tables:
    data = saved_data("dapo")
    return Tables(data, final_values(data))


def test_a_row_per_run_has_its_status_and_final_values(dapo: Tables) -> None:
    runs = dapo.runs.set_index(["level", "arm", "seed"])
    assert len(runs) == len(dapo.data.runs) and runs.index.is_unique
    assert set(runs["status"]) == set(dapo.data.runs["status"])
    for (level, arm, seed), row in runs.iterrows():
        assert row[DOWNSTREAM] == dapo.finals.of(level, arm, DOWNSTREAM)[seed]


def test_curves_hold_every_logged_value(dapo: Tables) -> None:
    curves = dapo.curves
    assert np.isfinite(curves[["x", "value"]].to_numpy(float)).all()
    for metric in ("reward/outcome", DOWNSTREAM):
        logged = dapo.data.counted_points[metric].dropna()
        own = curves.loc[curves["metric"] == metric, "value"]
        assert len(own) == len(logged) and own.sum() == pytest.approx(logged.sum())


def test_means_are_over_the_runs_that_came_to_the_common_budget(dapo: Tables) -> None:
    own = dapo.means.query("arm == 'base' and metric == @DOWNSTREAM").iloc[-1]
    final = dapo.finals.interval("", "base", DOWNSTREAM)
    assert own["x"] == dapo.finals.budget and own["n"] == final.n == 5
    assert own[["value", "low", "high"]].tolist() == pytest.approx([final.mean, final.low, final.high], abs=0.02)
    assert set(dapo.means["metric"]) == set(dapo.curves["metric"])


def test_effects_are_those_of_the_table_of_tricks(dapo: Tables) -> None:
    written = effects_table(dapo.data, dapo.finals)
    for ours, theirs in (("mean", "effect"), ("n", "n_pairs"), ("low", "low"), ("p_adjusted", "p_adjusted")):
        np.testing.assert_array_equal(dapo.effects[ours], written[theirs])


@pytest.mark.parametrize("sweep", ["dapo", "dapo_worlds"])
def test_every_column_of_the_table_of_tricks_is_filled_from_its_effect(sweep: str) -> None:
    """dapo_worlds has pairs with one collapsed run: only such have an effect of those alive."""
    data = saved_data(sweep)
    finals = final_values(data)
    effects, written = trick_effects(data, finals), effects_table(data, finals)
    assert any(effect.comparison.mixed for effect in effects) is (sweep == "dapo_worlds")
    for effect, row in zip(effects, written.to_dict("records"), strict=True):
        mixed = effect.comparison.mixed
        alive = effect.comparison.alive if mixed else Interval(math.nan, math.nan, math.nan, 0)
        expected = {
            "level": effect.contrast.level, "trick": effect.contrast.trick, "kind": effect.contrast.kind,
            "context": effect.contrast.context, "metric": effect.metric, "n_pairs": effect.n_pairs,
            "effect": effect.interval.mean, "low": effect.interval.low, "high": effect.interval.high, "p": effect.p,
            "p_adjusted": effect.p_adjusted, "correction": effect.correction, "family": effect.family,
            "minimum_detectable": effect.mde, "harm": effect.harm, "not_reported": effect.interval.why,
            "alive": alive.mean, "alive_low": alive.low, "alive_high": alive.high,
            "n_collapsed_with": effect.collapsed_with, "n_collapsed_without": effect.collapsed_without,
        }  # fmt: skip
        assert pd.isna(row.pop("n_alive")) if not mixed else row.pop("n_alive") == alive.n
        assert row == pytest.approx(expected, nan_ok=True)


def test_a_row_per_prediction_has_its_word(dapo: Tables) -> None:
    judged = judge(dapo.data, dapo.finals)
    assert dapo.verdict["verdict"].tolist() == [one.verdict for one in judged] and len(judged) > 0
    assert dapo.verdict["estimate"].tolist() == [one.difference.mean for one in judged]
    assert dapo.verdict["p_holm"].tolist() == [one.holm for one in judged]


def test_every_column_of_effects_and_verdict_is_documented(dapo: Tables) -> None:
    for name in ("effects", "verdict"):
        text = vars(Tables)[name].__doc__
        assert [one for one in getattr(dapo, name) if not re.search(rf"\b{one}\b", text)] == [], name


def test_one_line_loads_them_and_an_unknown_sweep_is_refused() -> None:
    assert {"kl=k3_loss", "kl_0.001"} <= set(load("kl_penalty").effects["trick"])
    with pytest.raises(ValueError, match="no_such_sweep"):
        load("no_such_sweep")
