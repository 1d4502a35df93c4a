"""Figures of curves and step metrics: what is drawn, counted, left out and stated."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.figures.curves import curve_numbers, draw_curves
from grpo_lab.analysis.figures.palette import looks
from grpo_lab.analysis.figures.panels import arranged
from grpo_lab.analysis.figures.step_metrics import draw_step_metrics
from grpo_lab.analysis.figures.style import Drawn, save
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import mean_line
from grpo_lab.analysis.tables.curves import curves_of, extremes, points_each, shortfalls, thinned
from grpo_lab.analysis.tables.step_curves import own_axes
from grpo_lab.config.design import read_design

PC, KEPT = "reward/outcome", "reward/in_loss_mean"


@pytest.fixture(scope="module")
def fall() -> SweepData:
    """`+hurts` turns over at half of the budget, one run of `+null` collapses before, all else is as planned."""
    planted = Planted(
        tricks=("hurts", "null"),
        kind="add_one",
        training={"hurts": 0.05},
        falls={"+hurts": 0.15},
        collapse={("+null", 2): 0.4},
        every=5,
        questions=256,
    )
    return synthetic_sweep(planted)


def changed(data: SweepData, where: pd.Series, metric: str, value: float) -> SweepData:
    """The sweep with one metric of some rows replaced."""
    points = data.points.copy()
    points.loc[where, metric] = value
    return replace(data, points=points)


def rows_of(data: SweepData, arm: str, seed: int) -> pd.Series:
    return (data.points["arm"] == arm) & (data.points["seed"] == seed)


def footer(drawn: Drawn) -> str:
    return drawn.caption


def texts(figure: Figure) -> str:
    return "\n".join(axes.get_title(loc="left") for axes in figure.axes)


# ---- lines over seeds


def test_a_thinned_line_keeps_its_ends_and_its_extremes() -> None:
    noise = np.random.default_rng(0).standard_normal(1000)
    run = pd.DataFrame({"level": "", "arm": "a", "seed": 0, "metric": PC, "x": np.arange(1000.0), "value": noise})
    xs, values = thinned(run, 40)[["x", "value"]].to_numpy().T
    assert len(xs) <= 40 and (xs[0], xs[-1]) == (0.0, 999.0) and (np.diff(xs) > 0).all()
    assert np.array_equal(noise[xs.astype(int)], values)  # the run's own points, none made up
    assert values.min() == noise.min() and values.max() == noise.max()
    assert len(thinned(run.head(40), 40)) == 40


def test_every_stretch_keeps_its_lowest_and_highest_point() -> None:
    # 8 points kept of 12: edges at 0, 4, 8, 12, so stretches of 4 points, and both ends.
    values = np.array([1.0, 5, 0, 2, 3, 3, 9, 4, 7, 6, 8, 6.5])
    kept = extremes(values, 8)
    assert kept.tolist() == [0, 1, 2, 4, 6, 9, 10, 11] and values[kept].tolist() == [1, 5, 0, 3, 9, 6, 8, 6.5]


def test_points_are_shared_out_over_the_lines() -> None:
    assert points_each(20) == 200 and points_each(50) == 80 and points_each(50, others=1000) == 60
    assert points_each(10_000) == 36 and points_each(0) == 200


def test_seeds_without_a_common_stretch_have_no_mean() -> None:
    early, late = (np.array([0.0, 1.0]), np.array([1.0, 1.0])), (np.array([2.0, 3.0]), np.array([1.0, 1.0]))
    assert mean_line([early, late], 10.0, evaluations=True) == []
    assert mean_line([], 10.0, evaluations=False) == []


def test_the_band_is_the_t_interval_at_every_point() -> None:
    seeds = [(np.array([0.0, 10.0]), np.array([0.0, value])) for value in (1.0, 2.0, 3.0)]
    (_, start), (at, end) = mean_line(seeds, 10.0, evaluations=True)
    half = 0.95 * math.sqrt(2 / (1 - 0.95**2)) / math.sqrt(3)  # the quantile for 2 degrees of freedom, sd 1
    assert (start.mean, start.low, start.high) == (0.0, 0.0, 0.0)
    assert (at, end.n) == (10.0, 3) and (end.low, end.high) == pytest.approx((2 - half, 2 + half))


def test_what_is_missing_is_told_and_left_out(fall: SweepData) -> None:
    assert shortfalls(fall, final_values(fall), [PC, DOWNSTREAM]) == []
    whole = changed(fall, rows_of(fall, "base", 1), DOWNSTREAM, math.nan)
    holes = changed(whole, rows_of(whole, "+null", 0) & whole.points["step"].isin([3, 4]), PC, math.inf)
    holes = changed(holes, rows_of(holes, "+null", 0) & (holes.points["step"] == 9), PC, math.nan)
    assert shortfalls(holes, final_values(holes), [PC, DOWNSTREAM, "train/k3_ref"]) == [
        "3 reward/outcome values are missing or not finite and left out: +null, seed 0.",
        "eval/downstream/accuracy is missing for base, seed 1.",
        "train/k3_ref was not logged.",
    ]
    curves = curves_of(holes, final_values(holes), [PC, DOWNSTREAM])
    first = curves.query("arm == '+null' and seed == 0 and metric == @PC")
    assert len(first) == 97 and np.isfinite(first["value"]).all()  # 100 steps train, 3 of them are out
    assert set(curves.query("arm == 'base' and metric == @DOWNSTREAM")["seed"]) == {0, 2, 3, 4}


def test_many_runs_with_something_missing_are_counted(fall: SweepData) -> None:
    data = synthetic_sweep(Planted(tricks=tuple("abcd"), kind="add_one", seeds=(0, 1), steps=20))
    without = changed(data, data.points["seed"] == 0, DOWNSTREAM, math.nan)
    assert shortfalls(without, final_values(without), [DOWNSTREAM]) == [
        "eval/downstream/accuracy is missing for 5 runs of 5 arms."
    ]


# ---- figure 1


def test_the_mark_stands_where_downstream_began_to_fall(fall: SweepData) -> None:
    finals = final_values(fall)
    marks = curve_numbers(fall, finals).query("part == 'onset' and series == 'divergence/onset_after_peak'")
    assert marks["arm"].tolist() == ["+hurts"]
    # The fall begins at half of 400,000 tokens; an evaluation is 20,000 tokens long.
    assert 200_000 < marks["x"].iloc[0] <= 280_000
    peak = curve_numbers(fall, finals).query("part == 'peak' and arm == '+hurts'").iloc[0]
    assert peak["series"] == DOWNSTREAM and abs(peak["x"] - 200_000) <= 40_000
    panel = draw_curves(fall, finals).figure.axes[1]
    assert panel.get_title(loc="left").startswith("+hurts\n")
    lines = {line.get_label(): line for line in panel.lines}
    assert set(lines["divergence/onset_after_peak"].get_xdata()) == {marks["x"].iloc[0]}
    assert lines["peak"].get_xydata().tolist() == [[peak["x"], peak["value"]]]


def test_the_marks_and_the_gap_are_those_of_the_table(fall: SweepData) -> None:
    finals = final_values(fall)
    table = divergence_table(fall, finals, np.random.default_rng(0)).set_index(["arm", "metric"])
    drawn = curve_numbers(fall, finals).query("part in ('onset', 'final')")
    assert len(drawn) >= 6
    for row in drawn.itertuples():
        there = table.loc[row.arm, row.series]
        ours = (row.x, row.low, row.high) if row.part == "onset" else (row.value, row.low, row.high)
        assert ours == pytest.approx((there["value"], there["low"], there["high"]), abs=1e-6, nan_ok=True)
        assert row.n == there["n"]
    found = table[table.index.get_level_values("metric").str.contains("onset")]["value"].notna().sum()
    assert found == (drawn["part"] == "onset").sum()  # and none that the table does not have


def test_a_collapsed_run_is_drawn_to_where_it_stopped_and_not_averaged(fall: SweepData) -> None:
    finals = final_values(fall)
    numbers = curve_numbers(fall, finals).query("arm == '+null'")
    stops = numbers[numbers["part"] == "stop"].set_index("series")
    assert set(stops["seed"]) == {2} and set(stops.index) == {PC, HELDOUT, DOWNSTREAM}
    assert set(stops["x"]) == {160_000}  # 40 of 100 steps of 4,000 tokens
    own = numbers[(numbers["part"] == "seed") & (numbers["seed"] == 2)]
    assert own["x"].max() == 160_000
    means = numbers[numbers["part"] == "mean"]
    assert set(means["n"]) == {4} and means["x"].max() == 400_000
    others = numbers[(numbers["part"] == "seed") & (numbers["series"] == DOWNSTREAM) & (numbers["seed"] != 2)]
    start = means[(means["series"] == DOWNSTREAM) & (means["x"] == 0)]["value"].iloc[0]
    assert start == pytest.approx(others[others["x"] == 0]["value"].mean(), abs=2e-6)
    drawn = draw_curves(fall, finals)
    assert "n = 4 of 5 seeds, 1 collapsed" in texts(drawn.figure)
    assert "Means leave out runs that collapsed before that." in footer(drawn)
    crosses = [line for line in drawn.figure.axes[2].lines if line.get_marker() == "X" and len(line.get_xdata())]
    assert len(crosses) == 3
    assert not [line for line in drawn.figure.axes[0].lines if line.get_marker() == "X" and len(line.get_xdata())]


@pytest.mark.extended
def test_an_arm_of_which_every_run_collapsed_is_drawn_without_a_mean() -> None:
    planted = Planted(tricks=("a",), kind="add_one", seeds=(0, 1), steps=40, collapse={("+a", 0): 0.5, ("+a", 1): 0.3})
    data = synthetic_sweep(planted)
    finals = final_values(data)
    numbers = curve_numbers(data, finals).query("arm == '+a'")
    assert set(numbers["part"]) == {"seed", "stop", "final"} and numbers.query("part == 'final'")["n"].iloc[0] == 0
    drawn = draw_curves(data, finals)
    assert "n = 0 of 2 seeds, 2 collapsed\ngap -" in texts(drawn.figure) and "Not run" not in footer(drawn)
    strip = draw_step_metrics(data, finals)
    assert "+a" in {text.get_text() for text in strip.figure.legends[0].get_texts()}


def test_reward_as_the_loss_sees_it_is_drawn_only_where_it_is_another(fall: SweepData) -> None:
    assert KEPT not in set(curve_numbers(fall, final_values(fall))["series"])
    data = changed(fall, rows_of(fall, "+hurts", 3) & (fall.points["step"] == 7), KEPT, 0.9)
    numbers = curve_numbers(data, final_values(data))
    assert set(numbers[numbers["series"] == KEPT]["arm"]) == {"+hurts"}
    hole = changed(fall, rows_of(fall, "base", 3) & (fall.points["step"] == 7), PC, math.nan)
    assert KEPT not in set(curve_numbers(hole, final_values(hole))["series"])  # a missing value is no other value


def test_a_seed_without_an_evaluation_is_not_averaged_and_named(fall: SweepData) -> None:
    data = changed(fall, rows_of(fall, "base", 4), DOWNSTREAM, math.nan)
    drawn = draw_curves(data, final_values(data))
    base = drawn.numbers.query("arm == 'base' and part == 'mean'").groupby("series")["n"].max()
    assert base.to_dict() == {PC: 5, HELDOUT: 5, DOWNSTREAM: 4}
    assert "eval/downstream/accuracy is missing for base, seed 4." in footer(drawn)
    assert "(n = 4)" in texts(drawn.figure)  # the gap change, of fewer runs than the panel has


def test_the_mean_ends_with_the_shortest_seed_and_a_bar_says_so(fall: SweepData) -> None:
    late = rows_of(fall, "base", 0) & (fall.points["step"] > 60)
    data = changed(fall, late, DOWNSTREAM, math.nan)
    drawn = draw_curves(data, final_values(data))
    mean = drawn.numbers.query("arm == 'base' and part == 'mean'").query("series == @DOWNSTREAM")
    assert mean["x"].max() == 240_000 and set(mean["n"]) == {5}
    bars = [line.get_xdata().tolist() for line in drawn.figure.axes[0].lines if line.get_marker() == "|"]
    assert [bar for bar in bars if bar] == [[240_000]]
    assert "Bar: a mean ends with the shortest of its seeds." in footer(drawn)
    assert "8 eval/downstream/accuracy values are missing or not finite and left out: base, seed 0." in footer(drawn)


def test_runs_that_go_beyond_x_are_drawn_but_not_averaged() -> None:
    data = synthetic_sweep(Planted(tricks=("a",), kind="add_one", seeds=(0, 1), steps=50))
    short = data.points[(data.points["seed"] == 1) | (data.points["step"] <= 40)]
    cut = replace(data, points=short.reset_index(drop=True))
    finals = final_values(cut)
    assert finals.budget == 160_000
    numbers = curve_numbers(cut, finals)
    assert numbers.query("part == 'mean'")["x"].max() == 160_000 < numbers.query("part == 'seed'")["x"].max()
    assert "Grey line: 160,000 sampled tokens, beyond which not every run goes." in footer(draw_curves(cut, finals))
    assert "Grey line" not in footer(draw_curves(data, final_values(data)))


def test_too_few_evaluations_or_seeds_show_no_onset() -> None:
    few = synthetic_sweep(Planted(tricks=("a",), kind="add_one", seeds=(0, 1), steps=20, falls={"+a": 0.2}))
    drawn = draw_curves(few, final_values(few))
    assert "Onsets need training reward and downstream accuracy of 3 seeds at 3 evaluations after step 0." in footer(
        drawn
    )
    assert "onset" not in set(drawn.numbers["part"])
    flat = Planted(tricks=("a",), kind="add_one", seeds=(0, 1, 2), steps=30, every=5, end=0.3, downstream_end=0.3)
    null = synthetic_sweep(flat)
    assert "No onset was detected, of a gap or of a fall." in footer(draw_curves(null, final_values(null)))


@pytest.mark.extended
def test_an_arm_whose_onset_was_looked_for_at_one_level_only_is_named(fall: SweepData) -> None:
    """The second level has two runs an arm, which are too few."""
    few = {name: getattr(fall, name).query("seed < 2").assign(level="few") for name in ("runs", "points", "answers")}
    both = {name: pd.concat([getattr(fall, name), table], ignore_index=True) for name, table in few.items()}
    data = replace(fall, **both)
    assert "Not tested: base, +hurts, +null." in footer(draw_curves(data, final_values(data)))
    assert "Not tested" not in footer(draw_curves(fall, final_values(fall)))


# ---- figure 9


@pytest.mark.extended
def test_the_strip_shows_step_metrics_and_says_which_are_zero(fall: SweepData) -> None:
    finals = final_values(fall)
    drawn = draw_step_metrics(fall, finals)
    assert drawn.name == "synthetic_step_metrics"
    titles = [axes.get_title(loc="left") for axes in drawn.figure.axes if axes.get_visible()]
    assert titles[:2] == ["entropy, nats a token", "KL from the initial policy, nats a response"]
    assert "train/approx_kl" not in set(drawn.numbers["series"])  # it only stands in where runs lack the other
    assert drawn.numbers.query("series == 'mismatch/k3' and part == 'mean'")["value"].unique().tolist() == [1e-9]
    assert "n: base 5, +hurts 5, +null 4." in footer(drawn) and "Cross: a run collapsed" in footer(drawn)
    quiet = changed(fall, fall.points["step"] > 0, "train/clip_fraction", 0.0)
    assert "0 throughout: clipped." in footer(draw_step_metrics(quiet, finals))


@pytest.mark.extended
def test_the_strip_has_the_budget_axis_of_the_curves(fall: SweepData) -> None:
    finals = final_values(fall)
    above, below = draw_curves(fall, finals).figure, draw_step_metrics(fall, finals).figure
    assert above.axes[0].get_xlim() == below.axes[0].get_xlim()
    assert above.axes[0].get_xlabel() == below.axes[-2].get_xlabel() == "sampled tokens (thousands)"


@pytest.mark.extended
def test_without_kl_from_the_initial_policy_that_of_an_update_stands_in(fall: SweepData) -> None:
    older = replace(fall, points=fall.points.drop(columns="eval/heldout_training/kl_initial"))
    drawn = draw_step_metrics(older, final_values(older))
    assert "train/approx_kl" in set(drawn.numbers["series"]) and "kl_initial" not in footer(drawn)


@pytest.mark.extended
def test_what_an_arm_touches_is_what_its_own_overrides_name() -> None:
    declared = {"a": ["truncation=mask_after"], "b": ["recipe=psr"], "c": ["aggregation=token_mean"]}
    node = {"kind": "add_one", "tricks": declared, "name": "x", "question": "x", "prediction": "x"}
    data = synthetic_sweep(Planted(tricks=("a", "b", "c"), kind="add_one", seeds=(0, 1), steps=20))
    node |= {"primary": DOWNSTREAM, "axis": "sampled_tokens", "seeds": [0, 1]}
    data = replace(data, design=read_design(node))
    points = data.points.assign(**{"active_fraction/scale": 0.7, "active_fraction/kl": 0.0})
    points.loc[points["arm"] == "+b", "active_fraction/kl"] = 0.4  # the control has scale too, and never kl
    points.loc[points["arm"] == "+a", "active_fraction/truncation"] = 0.2
    data = replace(data, points=points)
    assert own_axes(data) == {"base": [], "+a": ["active_fraction/truncation"], "+b": ["active_fraction/kl"], "+c": []}
    own = draw_step_metrics(data, final_values(data)).numbers.query(
        "series == 'active_fraction/own' and part == 'mean'"
    )
    assert own.groupby("arm")["value"].mean().to_dict() == pytest.approx({"+a": 0.2, "+b": 0.4})


@pytest.mark.extended
def test_of_many_arms_the_control_and_the_furthest_are_in_colour() -> None:
    data = synthetic_sweep(Planted(tricks=tuple("abcdefghij"), kind="add_one", seeds=(0, 1), steps=20))
    far = {"+b": 90.0, "+d": 5.0, "+e": 80.0, "+f": 70.0, "+j": 60.0}  # base ends at 26
    for arm, length in far.items():
        data = changed(data, data.points["arm"] == arm, "rollout/length", length)
    drawn = draw_step_metrics(data, final_values(data))
    length = drawn.numbers.query("series == 'rollout/length'")
    assert set(length.query("part == 'seed'")["arm"]) == {"base", *far}
    assert set(length.query("part == 'mean'")["arm"]) == set(data.arms)
    axes = next(axes for axes in drawn.figure.axes if axes.get_title(loc="left").startswith("response length"))
    assert sum(line.get_label() == "seed" for line in axes.lines) == 2 * len({"base", *far})
    assert "In colour: base and, for each metric, the 5 arms that end furthest from it." in footer(drawn)


@pytest.mark.extended
def test_a_sign_that_differs_by_decades_is_drawn_so(fall: SweepData) -> None:
    blown = changed(fall, fall.points["arm"] == "+hurts", "mismatch/k3", 1e-3)
    drawn = draw_step_metrics(blown, final_values(blown))
    scales = {axes.get_title(loc="left"): axes.get_yscale() for axes in drawn.figure.axes}
    assert scales["sampler mismatch (k3), nats a token (log above 1e-09)"] == "symlog"
    assert scales["entropy, nats a token"] == "linear"


def test_arms_have_looks_of_their_own() -> None:
    arms = ["base", "+a", "+b", "full", "-a", "-b"]
    found = looks(arms, "base")
    assert found["+a"][0] == found["-a"][0] and (found["+a"][1], found["-a"][1]) == ("-", "--")
    many = looks([f"arm{number}" for number in range(25)], "arm0")
    assert len(set(many.values())) == 25


def test_a_sweep_without_outcomes_has_no_curves(fall: SweepData) -> None:
    budgets = ["level", "arm", "seed", "step", *(name for name in fall.points if name.startswith("budget/"))]
    empty = replace(fall, points=fall.points[budgets])
    finals = final_values(empty)
    assert "reward/outcome" in draw_curves(empty, finals)
    assert "step metric" in draw_step_metrics(empty, finals)


def test_one_seed_has_no_interval() -> None:
    data = synthetic_sweep(Planted(tricks=("a",), kind="add_one", seeds=(0,), steps=40, every=4))
    assert "n = 1, no interval" in texts(draw_curves(data, final_values(data)).figure)
    assert "too few for an interval" in draw_step_metrics(data, final_values(data)).bands


# ---- what all share


def test_panels_stand_in_even_rows() -> None:
    assert [len(row) for row in arranged([str(k) for k in range(18)])] == [5, 5, 5, 3]
    assert [len(row) for row in arranged([str(k) for k in range(8)])] == [4, 4]
    assert [len(row) for row in arranged([str(k) for k in range(5)])] == [5]


@pytest.mark.extended
@pytest.mark.parametrize("draw", [draw_curves, draw_step_metrics])
def test_the_files_of_many_runs_stay_small_and_are_the_same_twice(draw: Callable[..., Drawn], tmp_path: Path) -> None:
    """Long runs and many of them give files that a browser and a repository take."""
    planted = Planted(tricks=tuple("abc"), kind="add_one", steps=400, every=50, questions=8, samples=1)
    data = synthetic_sweep(planted)
    finals = final_values(data)
    first, again = (save(draw(data, finals), tmp_path / place, {}) for place in "ab")
    assert first[0].stat().st_size < 400_000 and first[2].stat().st_size < 500_000
    lines = pd.read_csv(first[2]).query("part == 'seed'")
    assert lines.groupby([name for name in ("arm", "series", "seed") if name in lines]).size().max() <= 200
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
