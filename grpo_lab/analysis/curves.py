"""The first figure: what an arm sees of itself and what it deploys, over the budget, one panel per arm and level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from grpo_lab.analysis.load import SweepData
from grpo_lab.analysis.outcome import DOWNSTREAM, GAP, HELDOUT, REWARD, TRUNCATED, Outcome
from grpo_lab.analysis.stats import Interval, t_interval
from grpo_lab.analysis.style import (
    BLACK,
    BLUE,
    BODY,
    GREEN,
    GREY,
    LINE,
    SMALL,
    TINY,
    VERMILLION,
    Drawn,
    broken,
    budget_label,
    heading_height,
    house_style,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.table import run_arms

SMOOTHING = 0.05  # share of X over which the running mean of a metric of every step goes
GRID = 101  # points on which the seeds of an arm are averaged
_COLUMNS = 6  # panels side by side
_BRACKET = 1.035  # of X: where the final gap is drawn
_LEFT, _RIGHT, _LEGEND, _PANEL = 0.68, 0.1, 0.45, 2.1  # inches


@dataclass(frozen=True)
class Series:
    """One of the four lines of a panel."""

    metric: str
    title: str
    colour: str
    dashes: str
    marker: str = ""  # evaluations have one, metrics of every step none


SERIES = (
    Series(REWARD, "training reward as the arm sees it", VERMILLION, "--"),
    Series(HELDOUT, "held-out accuracy, training protocol", BLUE, "-", "o"),
    Series(DOWNSTREAM, "downstream accuracy, harder problems", GREEN, "-", "s"),
    Series(TRUNCATED, "truncated share of training responses", BLACK, ":"),
)


def curve_numbers(data: SweepData, outcome: Outcome) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "seed" (a run's own points), "mean" (over seeds, with the t interval in low and high, of n seeds) or
    "final" (the final values of the gap that is written over a panel and drawn in it).
    """
    x = f"budget/{outcome.axis}"
    points = data.finished_points
    rows = []
    for level, arm in run_arms(data):
        labels = {"level": level, "arm": arm}
        here = points[(points["level"] == level) & (points["arm"] == arm)]
        for series in (series for series in SERIES if series.metric in here):
            named = labels | {"series": series.metric}
            seeds = []
            for seed, run in here[here[series.metric].notna()].groupby("seed"):
                seeds.append((run[x].to_numpy(), run[series.metric].to_numpy()))
                rows += [named | {"part": "seed", "seed": seed, "x": a, "value": b} for a, b in zip(*seeds[-1])]
            for at, mean in mean_line(seeds, outcome.budget, bool(series.marker)):
                rows.append(named | {"part": "mean", "x": at} | _columns(mean))
        for metric in (REWARD, HELDOUT, GAP):
            final = outcome.interval(level, arm, metric)
            rows.append(labels | {"series": metric, "part": "final", "x": outcome.budget} | _columns(final))
    names = ["level", "arm", "series", "part", "seed", "x", "value", "low", "high", "n"]
    return pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round(6)


def _columns(interval: Interval) -> dict[str, float | int]:
    return {"value": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def mean_line(
    seeds: Sequence[tuple[np.ndarray, np.ndarray]], budget: float, evaluations: bool
) -> list[tuple[float, Interval]]:
    """The mean over seeds (x and values of each) on one grid, which ends where the shortest seed or X does."""
    if not seeds:
        return []
    first, last = max(xs[0] for xs, _ in seeds), min(budget, *(xs[-1] for xs, _ in seeds))
    if evaluations:
        grid = _evaluation_grid([xs for xs, _ in seeds], first, last)
    else:
        grid = np.linspace(first, last, GRID)
        seeds = [(xs, running_mean(xs, values, SMOOTHING * budget)) for xs, values in seeds]
    on_grid = np.array([np.interp(grid, xs, values) for xs, values in seeds])
    return [(float(at), t_interval(column.tolist())) for at, column in zip(grid, on_grid.T)]


def _evaluation_grid(seeds: Sequence[np.ndarray], first: float, last: float) -> np.ndarray:
    """Where evaluations lie on average over seeds, from `first` to `last`, both included."""
    number = min(map(len, seeds))
    centres = np.mean([xs[:number] for xs in seeds], axis=0)
    return np.array([first, *centres[(centres > first) & (centres < last)], last])


def running_mean(xs: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """At every point, the mean of the points within half a width of it; at the ends, of those there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.searchsorted(xs, xs - width / 2, side="left")
    high = np.searchsorted(xs, xs + width / 2, side="right")
    return (sums[high] - sums[low]) / (high - low)


def draw_curves(data: SweepData, outcome: Outcome) -> Drawn:
    """The figure `<sweep>`: arms as columns, levels as rows, many arms in several rows a level; axes shared."""
    numbers = curve_numbers(data, outcome)
    arms = [arm for arm in data.arms if arm in set(numbers["arm"])]
    levels = [level for level in data.levels if level in set(numbers["level"])]
    columns = min(len(arms), _COLUMNS)
    rows = [(level, arms[start : start + columns]) for level in levels for start in range(0, len(arms), columns)]
    question = data.design.question if data.design else data.record.name
    bands = _bands(data)
    # In inches, from the top: question, legend, then titles and panel for every level, then label and footer.
    width = max(8.0, 0.9 + 1.75 * columns)
    footer = wrapped(_footer(data, outcome, bands, arms, levels), width - 0.2, TINY)
    titles = {arm: broken(arm, (width - _LEFT) / columns - 0.15, BODY) for arm in arms}
    over_panel = (max(map(len, titles.values())) * BODY + 2 * SMALL) * LINE + 0.06
    top = heading_height(question, width) + _LEGEND + over_panel
    bottom = 0.6 + len(footer) * TINY * LINE
    between = over_panel + 0.15
    height = top + bottom + _PANEL * len(rows) + between * (len(rows) - 1)
    with house_style(data.record.name):
        figure = Figure(figsize=(width, height))
        write_heading(figure, question)
        _legend(figure, heading_height(question, width), set(numbers["series"]))
        place = {"left": _LEFT / width, "right": 1 - _RIGHT / width, "top": 1 - top / height, "bottom": bottom / height}
        place |= {"wspace": 0.1, "hspace": between / _PANEL}
        panels = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=place)
        for (level, of_row), row in zip(rows, panels):
            for axes in row[len(of_row) :]:
                axes.set_visible(False)
            for arm, axes in zip(of_row, row):
                _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)], outcome.budget)
                _title(axes, data, outcome, level, arm, titles[arm])
            unit = "share of responses, reward"
            factor = data.design.factor if data.design else ""
            row[0].set_ylabel(f"{factor} = {level}\n{unit}" if factor else unit)
        # Bands of two seeds are wider than anything measured: the axes are those of the runs.
        drawn = numbers[numbers["part"] == "seed"]
        panels[0, 0].set_ylim(min(0.0, drawn["value"].min()) - 0.02, max(1.0, drawn["value"].max()) + 0.02)
        panels[0, 0].set_xlim(0, 1.02 * max(drawn["x"].max(), _BRACKET * outcome.budget))
        label, formatter = budget_label(outcome.axis, outcome.budget)
        panels[0, 0].xaxis.set_major_formatter(formatter)
        middle = (_LEFT + width - _RIGHT) / 2 / width
        figure.text(middle, (bottom - 0.36) / height, label, ha="center", va="center", fontsize=BODY)
        write_footer(figure, footer)
    return Drawn(data.record.name, figure, numbers, bands)


def _panel(axes: Axes, numbers: pd.DataFrame, budget: float) -> None:
    for series in SERIES:
        own = numbers[numbers["series"] == series.metric]
        seeds = own["seed"].nunique()
        for _, run in own[own["part"] == "seed"].groupby("seed"):
            axes.plot(run["x"], run["value"], color=series.colour, linewidth=0.5, alpha=0.32 / seeds**0.5)
        mean = own[own["part"] == "mean"]
        style = {"color": series.colour, "linewidth": 1.8, "marker": series.marker, "markersize": 3.6}
        axes.plot(mean["x"], mean["value"], series.dashes, label=series.metric, **style)
        if mean["n"].max() > 1:
            axes.fill_between(mean["x"], mean["low"], mean["high"], color=series.colour, alpha=0.15, linewidth=0)
    final = numbers[(numbers["part"] == "final") & numbers["series"].isin([REWARD, HELDOUT])]
    at = [_BRACKET * budget] * len(final)
    axes.plot(at, final["value"], "-_", color=GREY, linewidth=1.0, markersize=5, label=GAP)
    axes.spines[["top", "right"]].set_visible(False)


def _title(axes: Axes, data: SweepData, outcome: Outcome, level: str, arm: str, name: Sequence[str]) -> None:
    """The arm's name, its number of seeds and its gap, over a panel."""
    n, planned = data.seeds_finished(level, arm), data.seeds_planned(level, arm)
    count = (f"n = {n}" if n == planned else f"n = {n} of {planned} seeds") + (", no interval" if n == 1 else "")
    gap = outcome.interval(level, arm, GAP)
    of = f" (n = {gap.n})" if gap.n != n else ""
    lines = [count, f"gap {gap.text('+')}{of}"] if n else ["no finished run", ""]
    axes.set_title("\n".join(name), fontsize=BODY, fontweight="bold", loc="left", pad=5 + 2 * SMALL * 1.35)
    place = {"xytext": (0, 4), "xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate("\n".join(lines), (0, 1), fontsize=SMALL, **place)


def _legend(figure: Figure, heading: float, drawn: set[str]) -> None:
    shown = [series for series in SERIES if series.metric in drawn]
    handles = [
        Line2D([], [], color=series.colour, linestyle=series.dashes, marker=series.marker, markersize=4, linewidth=1.8)
        for series in shown
    ]
    width, height = figure.get_size_inches()
    place = {"loc": "upper left", "bbox_to_anchor": (0.08 / width, 1 - heading / height), "borderaxespad": 0.0}
    look = {"frameon": False, "fontsize": BODY, "handlelength": 3.2, "borderpad": 0.0, "columnspacing": 3}
    figure.legend(handles, [series.title for series in shown], ncols=2, **place, **look)


def _single(data: SweepData) -> bool:
    return bool(data.finished.groupby(["level", "arm"]).size().max() == 1)


def _bands(data: SweepData) -> str:
    smooth = f"metrics of every step as running means over {SMOOTHING:.0%} of the budget"
    if _single(data):
        return f"bold: the one run of an arm, {smooth}; thin: the same run as logged; one seed has no interval"
    return f"bold: mean over seeds, {smooth}; band: its 95% t interval; thin: single seeds as logged"


def _footer(data: SweepData, outcome: Outcome, bands: str, arms: Sequence[str], levels: Sequence[str]) -> str:
    absent = [arm for arm in data.arms if arm not in arms]
    if data.design:
        absent += [f"{data.design.factor} = {level}" for level in data.levels if level not in levels]
    interval = "" if _single(data) else ", 95% t interval"
    parts = [
        f"{bands[0].upper()}{bands[1:]}.",
        "Reward as the arm sees it: mean over the responses kept in the loss. "
        f"Gap (grey bracket): that reward over the last fifth less held-out accuracy at {outcome.at}{interval}.",
        f"Not run: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))
