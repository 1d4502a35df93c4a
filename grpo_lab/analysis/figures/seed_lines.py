"""A metric over the budget, one line per run, with the values that are missing told in sentences."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.figures.panels import Cell
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.stats.mean_line import GRID, mean_line
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.tracking.metrics import harness_of

_NAMED = 4  # arms that a sentence about missing values names one by one
_POINTS, _MOST = 4000, 200  # of all thin lines of a figure, and of one of them


@dataclass(frozen=True)
class Line:
    """One run's finite values of one metric, in the order of its steps."""

    seed: int
    x: np.ndarray  # budget, on the axis of the final values
    value: np.ndarray
    reached: bool  # the run came to X, so it is in means over seeds
    stopped: bool  # it collapsed, and its last value is where
    base: int = -1  # of its initial policy, where the sweep has several


@dataclass(frozen=True)
class Lines:
    """The lines of some metrics of every finished or collapsed run; `shortfalls` says in sentences what they lack."""

    by_metric: Mapping[str, Mapping[Cell, Sequence[Line]]]
    shortfalls: Sequence[str]

    def of(self, metric: str, cell: Cell) -> Sequence[Line]:
        """A metric's lines of one arm at one level, by seed; none where it was not logged."""
        return self.by_metric.get(metric, {}).get(cell, ())

    @property
    def cells(self) -> list[Cell]:
        """Every level and arm that has a line of any metric, unordered."""
        return list(dict.fromkeys(cell for lines in self.by_metric.values() for cell in lines))


def seed_lines(data: SweepData, finals: FinalValues, metrics: Sequence[str]) -> Lines:
    """The lines of some metrics over `finals.axis`; missing values, and values not finite, are left out and told."""
    x = f"budget/{finals.axis}"
    suites = [name for name in data.points.columns if name.startswith("eval/") and name.endswith("/accuracy")]
    suites = [name for name in suites if harness_of(name) is None]  # those measure the steps that a user names
    logged = [metric for metric in dict.fromkeys(metrics) if metric in data.points]
    columns = list(dict.fromkeys([*LABELS, "step", x, *suites, *logged]))
    points = data.points[columns].merge(data.counted[[*LABELS, "collapsed"]], on=LABELS).sort_values("step")
    by_metric: dict[str, dict[Cell, list[Line]]] = {metric: {} for metric in metrics}
    short: dict[str, dict[tuple[str, str, int], tuple[int, int]]] = {metric: {} for metric in metrics}
    for (level, arm, seed), run in groups_of(points, LABELS):
        at = run[x].to_numpy()
        evaluated = run[suites].notna().any(axis=1).to_numpy()
        reached, stopped = bool(np.nanmax(at, initial=0) >= finals.budget), bool(run["collapsed"].iloc[0])
        for metric in logged:
            values = run[metric].to_numpy()
            finite = np.isfinite(values) & np.isfinite(at)
            # Step 0 trains on nothing, and most steps evaluate nothing.
            expected = evaluated if metric.startswith("eval/") else run["step"].to_numpy() > 0
            expected = ~np.isnan(values) if harness_of(metric) else expected
            lost = int((expected & ~finite).sum() + np.isinf(values[~expected]).sum())
            if lost:
                short[metric][level, arm, int(seed)] = (lost, int(finite.sum()))
            if finite.any():
                base = finals.bases.get(int(seed), -1)
                line = Line(int(seed), at[finite], values[finite], reached, stopped, base)
                by_metric[metric].setdefault((level, arm), []).append(line)
    sentences = [sentence for metric in by_metric for sentence in _shortfalls(metric, by_metric[metric], short[metric])]
    return Lines(by_metric, sentences)


def _shortfalls(
    metric: str, lines: Mapping[Cell, Sequence[Line]], short: Mapping[tuple[str, str, int], tuple[int, int]]
) -> list[str]:
    """What is missing of one metric; `short` says how many values each run lacks and how many it has."""
    if not lines:
        return [f"{metric} was not logged."]
    absent = [run for run, (_, there) in short.items() if not there]
    partly = {run: lost for run, (lost, there) in short.items() if there}
    sentences = [f"{metric} is missing for {named_runs(absent)}."] if absent else []
    if partly:
        number = sum(partly.values())
        are = "value is" if number == 1 else "values are"
        sentences.append(f"{number} {metric} {are} missing or not finite and left out: {named_runs(list(partly))}.")
    return sentences


def named_runs(runs: Sequence[tuple[str, str, int]]) -> str:
    """Runs in words: arms with their seeds, or only how many of them where they are many."""
    seeds: dict[Cell, list[int]] = {}
    for level, arm, seed in runs:
        seeds.setdefault((level, arm), []).append(seed)
    if len(seeds) > _NAMED:
        return f"{len(runs)} runs of {len({arm for _, arm in seeds})} arms"
    named = [
        f"{arm}{f' at {level}' if level else ''}, seed{'s' if len(own) > 1 else ''} {', '.join(map(str, own))}"
        for (level, arm), own in seeds.items()
    ]
    return "; ".join(named)


def points_each(lines: int, others: int = 0, fewest: int = 36) -> int:
    """How many points each of so many thin lines may have, beside `others` points that all stay.

    It bounds the size of a figure's file; a panel is too small to show more.
    """
    return int(np.clip((_POINTS - others) // max(lines, 1), fewest, _MOST))


def thinned(xs: np.ndarray, values: np.ndarray, points: int) -> tuple[np.ndarray, np.ndarray]:
    """At most `points` of a line's own points: both ends, and the lowest and the highest of every stretch between."""
    if len(xs) <= points:
        return xs, values
    edges = np.linspace(0, len(xs), points // 2, dtype=int)
    stretches = list(itertools.pairwise(edges))
    lowest = [start + int(values[start:end].argmin()) for start, end in stretches]
    highest = [start + int(values[start:end].argmax()) for start, end in stretches]
    chosen = np.unique([0, len(xs) - 1, *lowest, *highest])
    return xs[chosen], values[chosen]


def seed_rows(labels: Mapping[str, object], line: Line, points: int = _MOST) -> list[dict[str, Any]]:
    """One run's own points as rows of drawn numbers, and where it stopped if it collapsed."""
    xs, values = thinned(line.x, line.value, points)
    rows = [{**labels, "part": "seed", "seed": line.seed, "x": x, "value": y} for x, y in zip(xs, values)]
    return rows + [rows[-1] | {"part": "stop"}] if line.stopped else rows


def mean_rows(
    labels: Mapping[str, object], lines: Sequence[Line], budget: float, evaluations: bool, points: int = GRID
) -> list[dict[str, Any]]:
    """The mean over the runs that reached the budget as rows of drawn numbers, with its t interval."""
    whole = [line for line in lines if line.reached]
    curves, bases = [(line.x, line.value) for line in whole], [line.base for line in whole]
    mean = mean_line(curves, budget, evaluations, points, bases)
    return [{**labels, "part": "mean", "x": x} | as_columns(interval) for x, interval in mean]


def as_columns(interval: Interval) -> dict[str, float | int]:
    """An interval as columns of a table of drawn numbers."""
    return {"value": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def as_table(rows: Sequence[Mapping[str, object]], names: Sequence[str]) -> pd.DataFrame:
    """Rows of drawn numbers as a table with these columns, rounded to six decimals."""
    return pd.DataFrame(rows, columns=list(names)).astype({"seed": "Int64", "n": "Int64"}).round(6)
