"""What comes of a number: which arms make a curve, hand numbers, and how the figure looks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from declared_experiments import saved_data
from planted_sweeps import Planted, synthetic_sweep
from test_figures import overlapping, words

from grpo_lab.analysis.build import draw_all
from grpo_lab.analysis.figures import dose_response
from grpo_lab.analysis.figures.step_metrics import draw_step_metrics
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.dose_response import swept_setting
from grpo_lab.config.design import read_design

LAGS = {"lag_4": ["schedule=one_step_off", "schedule.lag=4"], "lag_0": ["schedule=one_step_off", "schedule.lag=0"]}
LAGS |= {"lag_16": ["schedule.lag=16", "schedule=one_step_off"]}


def swept(arms: dict[str, Sequence[str]], seeds: tuple[int, ...] = (0, 1, 2)) -> SweepData:
    """Three planted arms, named and declared as `arms`; the second loses .2 downstream, the third .05."""
    planted = Planted(
        tricks=("helps", "hurts"), kind="add_one", downstream={"helps": -0.2, "hurts": -0.05}, seeds=seeds
    )
    data = synthetic_sweep(planted)
    named = dict(zip(data.arms, arms))
    node = planted.node() | {"kind": "arms", "arms": arms, "control": next(iter(arms)), "tricks": {}, "predictions": []}
    design = read_design({name: value for name, value in node.items() if name != "tricks"})
    record = replace(data.record, runs=[replace(entry, arm=named[entry.arm]) for entry in data.record.runs])
    tables = {name: getattr(data, name).replace({"arm": named}) for name in ("runs", "points", "answers")}
    return replace(data, record=record, design=design, **tables)


def test_the_arms_of_one_number_in_its_order() -> None:
    found = swept_setting(swept(LAGS))
    assert found.key == "schedule.lag" and list(found.values.items()) == [("lag_0", 0), ("lag_4", 4), ("lag_16", 16)]


@pytest.mark.parametrize(
    "third",
    [
        ["schedule=one_step_off", "schedule.lag=4"],  # the same once more
        ["schedule=one_step_off"],  # one without a value
        ["schedule=off_policy_k", "schedule.lag=8"],  # another schedule, too
        ["schedule=one_step_off", "schedule.lag=many"],  # no number
        ["schedule=one_step_off", "schedule.lag=nan"],
    ],
)
def test_other_arms_make_no_curve(third: list[str]) -> None:
    data = swept(LAGS | {"lag_16": third})
    finals = final_values(data)
    assert swept_setting(data) is None
    assert "one number" in dose_response.draw_dose_response(data, finals)


def test_the_numbers_are_the_outcomes_in_percent() -> None:
    data = swept(LAGS)
    finals = final_values(data)
    table = dose_response.dose_response_numbers(data, finals, swept_setting(data))
    for metric in (HELDOUT, DOWNSTREAM):
        for arm, x in (("lag_0", 0), ("lag_4", 4), ("lag_16", 16)):
            own = table[(table["metric"] == metric) & (table["arm"] == arm)]
            mean, wanted = own[own["part"] == "mean"].iloc[0], finals.interval("", arm, metric)
            assert set(own["x"]) == {x} and (own["part"] == "seed").sum() == mean["n"] == 3
            for name, value in (("value", wanted.mean), ("low", wanted.low), ("high", wanted.high)):
                assert mean[name] == pytest.approx(100 * value, abs=1e-5)


def test_the_figure_shows_every_value_and_nothing_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    data = swept(LAGS)
    drawn = dose_response.draw_dose_response(data, final_values(data))
    shown = words(drawn.figure)
    assert "schedule.lag" in shown and "downstream accuracy (%)" in shown and "95% t interval" in shown
    assert not overlapping(drawn.figure, monkeypatch)
    labels = [text.get_text() for text in drawn.figure.axes[0].get_xticklabels()]
    assert labels == ["0", "4", "16"]
    ticks = [[round(x) for x in axes.get_xticks()] for axes in drawn.figure.axes]
    assert ticks == [[0, 1, 2]] * len(drawn.figure.axes)
    downstream = drawn.numbers[(drawn.numbers["metric"] == DOWNSTREAM) & (drawn.numbers["part"] == "mean")]
    assert downstream.set_index("arm")["value"].idxmin() == "lag_0", "planted to lose most"


def test_small_numbers_are_told_apart() -> None:
    data = swept({f"at_{rate}": [f"optimizer.learning_rate={rate}"] for rate in ("5e-7", "2.5e-6", "1e-7")})
    drawn = dose_response.draw_dose_response(data, final_values(data))
    assert set(drawn.numbers["x"]) == {5e-7, 2.5e-6, 1e-7}
    axes = drawn.figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1e-07", "5e-07", "2.5e-06"]
    (line,) = (line for line in axes.lines if line.get_marker() == "o")
    assert sorted(line.get_xdata()) == [0, 1, 2] and np.isfinite(line.get_ydata()).all()


def test_one_seed_has_no_bars_and_too_few_values_say_so() -> None:
    one = swept(LAGS, seeds=(0,))
    drawn = dose_response.draw_dose_response(one, final_values(one))
    assert "too few for an interval" in drawn.bands and "t interval" not in words(drawn.figure)
    kept = {name: getattr(one, name).query("arm != 'lag_16'") for name in ("runs", "points", "answers")}
    few = replace(one, **kept)
    assert "fewer than 3" in dose_response.draw_dose_response(few, final_values(few))


@pytest.mark.extended
def test_a_sweep_of_a_number_has_the_figure_beside_the_others() -> None:
    data = swept(LAGS)
    drawn, missing = draw_all(data, final_values(data), ["dose_response"])
    assert "synthetic_dose_response" in {one.name for one in drawn} and "synthetic_dose_response" not in missing


@pytest.mark.extended
def test_titles_of_many_narrow_panels_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step metrics of four levels side by side."""
    data = saved_data("staleness")
    assert len(data.levels) == 4
    assert not overlapping(draw_step_metrics(data, final_values(data)).figure, monkeypatch)
