"""Single runs over the budget, their means, and their missing values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import LABELS, NO_BASE, SweepData
from grpo_lab.analysis.stats.mean_line import GRID, mean_line, running_mean
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.tracking.metrics import harness_of

LINE = ["level", "arm", "series"]  # what a drawn line is of
_NUMBERS = [*LINE, "part", "seed", "x", "value", "low", "high", "n"]
_NAMED = 4  # arms that a sentence about missing values names one by one
_POINTS, _MOST = 4000, 200  # of all thin lines of a figure, and of one of them


def curves_of(data: SweepData, finals: FinalValues, metrics: Sequence[str]) -> pd.DataFrame:
    """Single runs: level, arm, seed, metric, x, value, reached, collapsed; a row per run, metric and logged step.

    `x` is the budget spent so far, in the unit of `finals.axis`; `value` is in the metric's unit. Values that are
    missing or not finite have no row. `reached` says whether the run came to X, so that means count it, `collapsed`
    whether it stopped on a loss that was not finite.
    """
    x = f"budget/{finals.axis}"
    points = data.counted_columns([x, *metrics]).sort_values("step", kind="stable").rename(columns={x: "x"})
    logged = [metric for metric in metrics if metric in points]
    furthest = points.groupby(LABELS)["x"].max()
    ends = data.counted[[*LABELS, "collapsed"]].merge((furthest >= finals.budget).rename("reached").reset_index())
    long = points.melt(id_vars=[*LABELS, "x"], value_vars=logged, var_name="metric")
    finite = np.isfinite(long["value"].astype(float)) & np.isfinite(long["x"].astype(float))
    found = long.loc[finite].merge(ends, on=LABELS)
    return found[[*LABELS, "metric", "x", "value", "reached", "collapsed"]]


def without_equal(curves: pd.DataFrame, data: SweepData, metric: str, other: str) -> pd.DataFrame:
    """The curves without those of `metric` for arms of which every run has the same number as `other`."""
    if not {metric, other} <= set(data.points):
        return curves
    points = data.counted_columns([metric, other]).dropna(subset=metric)
    apart = points.assign(apart=(points[metric] - points[other]).abs()).groupby(LABELS)["apart"].max()
    places = [(level, arm) for level, arm, _ in apart.index[~(apart <= 1e-9)]]
    differs = pd.MultiIndex.from_frame(curves[["level", "arm"]]).isin(places)
    return curves[(curves["metric"] != metric) | differs]


def means_of(curves: pd.DataFrame, finals: FinalValues, points: int = GRID) -> pd.DataFrame:
    """Means over the runs of a table of curves that came to X: level, arm, metric, x, value, low, high, n.

    low and high are the 95% t interval over seeds, over base models where there are several; NaN for fewer than three.
    Evaluations are averaged where they lie on average, a metric of every step as a running mean at `points` points.
    """
    rows = []
    for (level, arm, metric), own in groups_of(curves[curves["reached"]], ["level", "arm", "metric"], sort=False):
        runs = {seed: (run["x"].to_numpy(), run["value"].to_numpy()) for seed, run in groups_of(own, "seed")}
        bases = [finals.bases.get(int(seed), NO_BASE) for seed in runs]
        for x, mean in mean_line(list(runs.values()), finals.budget, metric.startswith("eval/"), points, bases):
            rows.append((level, arm, metric, x, mean.mean, mean.low, mean.high, mean.n))
    return pd.DataFrame(rows, columns=["level", "arm", "metric", "x", "value", "low", "high", "n"])


def line_numbers(
    curves: pd.DataFrame, finals: FinalValues, shown: pd.DataFrame | None = None, points: int = GRID
) -> pd.DataFrame:
    """The lines of a table of curves as drawn numbers; `shown` holds the points of single seeds (default: all).

    `part` is "seed" (a run's own points), "stop" (the last point of a run that collapsed) or "mean" (over n seeds,
    with the t interval in low and high, of a metric of every step at `points` points).
    """
    shown = curves if shown is None else shown
    stops = shown[shown["collapsed"]].groupby([*LABELS, "metric"], sort=False).tail(1)
    parts = {"seed": shown, "stop": stops, "mean": means_of(curves, finals, points)}
    return pd.concat([own.assign(part=part, series=own["metric"]) for part, own in parts.items() if len(own)])


def numbers_table(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of drawn numbers as one, by level, arm and series; budgets with six decimals."""
    rows = pd.concat([part for part in parts if len(part)]).reindex(columns=_NUMBERS)
    rows = rows.sort_values(LINE, kind="stable", ignore_index=True)
    return rows.astype({"seed": "Int64", "n": "Int64"}).round({"x": 6})


def thinned(curves: pd.DataFrame, points: int) -> pd.DataFrame:
    """A table of curves with at most `points` points of each line."""
    lines = groups_of(curves, [*LABELS, "metric"], sort=False)
    return pd.concat([line.iloc[extremes(line["value"].to_numpy(), points)] for _, line in lines])


def thinned_steps(curves: pd.DataFrame) -> pd.DataFrame:
    """The curves with as few points of metrics of every step as a figure's file can hold; evaluations keep all."""
    evaluated = curves["metric"].str.startswith("eval/")
    steps = curves[~evaluated]
    points = points_each(steps.groupby([*LABELS, "metric"]).ngroups, int(evaluated.sum()))
    return pd.concat([thinned(steps, points), curves[evaluated]]) if len(steps) else curves


def extremes(values: np.ndarray, points: int) -> np.ndarray:
    """At most `points` places of a line: both ends, and the lowest and the highest of every segment between."""
    if len(values) <= points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), points // 2, dtype=int)
    segments = list(itertools.pairwise(edges))
    lowest = [start + int(values[start:end].argmin()) for start, end in segments]
    highest = [start + int(values[start:end].argmax()) for start, end in segments]
    return np.unique([0, len(values) - 1, *lowest, *highest])


def points_each(lines: int, others: int = 0, fewest: int = 36) -> int:
    """The number of points that each of `lines` thin lines may have, beside `others` points that all stay.

    It bounds the size of a figure's file; a panel is too small to show more.
    """
    return int(np.clip((_POINTS - others) // max(lines, 1), fewest, _MOST))


def smoothed(curves: pd.DataFrame, metric: str, width: float) -> pd.DataFrame:
    """The curves with every run's values of one metric of every step as running means over `width` of budget."""
    runs = []
    for (*_, name), run in groups_of(curves, [*LABELS, "metric"], sort=False):
        values = run["value"].to_numpy()
        mean = running_mean(run["x"].to_numpy(), values, width) if name == metric else values
        runs.append(run.assign(value=mean))
    return pd.concat(runs)


def shortfalls(data: SweepData, finals: FinalValues, metrics: Sequence[str]) -> list[str]:
    """Sentences on missing or non-finite values of these metrics in single runs."""
    x = f"budget/{finals.axis}"
    suites = [name for name in data.points.columns if name.startswith("eval/") and name.endswith("/accuracy")]
    suites = [name for name in suites if harness_of(name) is None]  # those measure the steps that a user names
    points = data.counted_columns([x, *suites, *metrics])
    evaluated = points[suites].notna().any(axis=1)
    sentences = []
    for metric in metrics:
        values = points[metric] if metric in points else pd.Series(np.nan, index=points.index)
        # Step 0 trains on nothing, and most steps evaluate nothing.
        expected = evaluated if metric.startswith("eval/") else points["step"] > 0
        expected = values.notna() if harness_of(metric) else expected
        there = np.isfinite(values) & np.isfinite(points[x])
        lost = (expected & ~there) | np.isinf(values)
        counts = points[LABELS].assign(lost=lost, there=there).groupby(LABELS).sum()
        sentences += _lacking(metric, counts)
    return sentences


def _lacking(metric: str, counts: pd.DataFrame) -> list[str]:
    """Sentences about one metric; `counts` has its number of values lost and there by run."""
    if not counts["there"].any():
        return [f"{metric} was not logged."]
    short = counts[counts["lost"] > 0]
    absent, partly = short[short["there"] == 0], short[short["there"] > 0]
    sentences = [f"{metric} is missing for {named_runs(list(absent.index))}."] if len(absent) else []
    if number := int(partly["lost"].sum()):
        are = "value is" if number == 1 else "values are"
        sentences.append(
            f"{number} {metric} {are} missing or not finite and left out: {named_runs(list(partly.index))}."
        )
    return sentences


def named_runs(runs: Sequence[tuple[str, str, int]]) -> str:
    """Runs in words: arms with their seeds, or only how many of them where they are many."""
    seeds: dict[tuple[str, str], list[int]] = {}
    for level, arm, seed in runs:
        seeds.setdefault((level, arm), []).append(seed)
    if len(seeds) > _NAMED:
        return f"{len(runs)} runs of {len({arm for _, arm in seeds})} arms"
    named = [
        f"{arm}{f' at {level}' if level else ''}, seed{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for (level, arm), own in seeds.items()
    ]
    return "; ".join(named)
