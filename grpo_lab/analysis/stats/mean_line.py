"""The mean over seeds of curves whose points lie at different budgets."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np

from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, critical_t

SMOOTHING = 0.05  # share of X over which the running mean of a metric of every step goes
GRID = 51  # points on which the seeds of an arm are averaged


def mean_line(
    seeds: Sequence[tuple[np.ndarray, np.ndarray]],
    budget: float,
    evaluations: bool,
    points: int = GRID,
    bases: Sequence[int] = (),
) -> list[tuple[float, Interval]]:
    """The mean over seeds, given x and values of each, with its t interval from FOR_INTERVAL of them on, on one grid.

    `bases` are those of the seeds: where there are several, their means are averaged, and the interval is for another.
    The grid ends at X = `budget`, or with the shortest seed. Evaluations are averaged where they lie on average; a
    metric of every step is smoothed by a running mean first, at `points` points. Empty where the seeds share no
    stretch.
    """
    first, last = common_range([xs for xs, _ in seeds], budget)
    if not seeds or last < first:
        return []
    if evaluations:
        grid = evaluation_grid([xs for xs, _ in seeds], budget)
    else:
        grid = np.linspace(first, last, points)
        seeds = [(xs, running_mean(xs, values, SMOOTHING * budget)) for xs, values in seeds]
    several = len(set(bases))
    number = several if several > 1 else 0
    columns = (column.tolist() for column in (grid, *mean_on_grid(seeds, grid, bases)))
    return [(at, Interval(mean, low, high, n, number)) for at, mean, low, high, n in zip(*columns)]


def mean_on_grid(
    seeds: Sequence[tuple[np.ndarray, np.ndarray]], grid: np.ndarray, bases: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Mean, ends of its t interval, and number of seeds at every point of the grid, over the seeds that reach it.

    Where the seeds have several `bases`, the interval is over their means. NaN without a seed, or with too few.
    """
    on_grid = np.array([on_line(grid, xs, values) for xs, values in seeds])
    runs = np.isfinite(on_grid).sum(axis=0)
    on_grid = over_bases(on_grid, bases)
    n = np.isfinite(on_grid).sum(axis=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of points without a number
        mean, deviation = np.nanmean(on_grid, axis=0), np.nanstd(on_grid, axis=0, ddof=1)
    critical = [critical_t(k - 1) if k >= FOR_INTERVAL else math.nan for k in n.tolist()]
    half = critical * deviation / np.sqrt(np.maximum(n, 1))
    return mean, mean - half, mean + half, runs


def on_line(grid: np.ndarray, xs: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Values at the points of the grid by straight lines, NaN before the first and after the last."""
    # The last point of a grid is the mean or the end of the same numbers, up to rounding.
    slack = 1e-9 * (abs(grid[-1]) + 1)
    outside = (grid < xs[0] - slack) | (grid > xs[-1] + slack)
    return np.where(outside, math.nan, np.interp(grid, xs, values))


def common_range(seeds: Sequence[np.ndarray], budget: float) -> tuple[float, float]:
    """The first and the last x that all seeds reach, up to the budget."""
    return max((xs[0] for xs in seeds), default=budget), min((budget, *(xs[-1] for xs in seeds)))


def evaluation_grid(seeds: Sequence[np.ndarray], budget: float) -> np.ndarray:
    """Where evaluations lie on average over seeds, and the ends of their common range."""
    first, last = common_range(seeds, budget)
    number = min(map(len, seeds))
    centres = np.mean([xs[:number] for xs in seeds], axis=0)
    return np.unique([first, *centres[(centres > first) & (centres < last)], max(first, last)])


def over_bases(values: np.ndarray, bases: Sequence[int]) -> np.ndarray:
    """The means [B, K] over the seeds of each base model of values [S, K], NaN left out; unchanged for one."""
    if len(set(bases)) < 2:
        return values
    here, of = ~np.isnan(values), np.asarray(bases)
    sums, counts = np.where(here, values, 0.0), here.astype(float)
    with np.errstate(invalid="ignore"):
        return np.array([sums[of == base].sum(axis=0) / counts[of == base].sum(axis=0) for base in np.unique(of)])


def running_mean(xs: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """At every point, the mean of the points within half a width of it; at the ends, of those there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.searchsorted(xs, xs - width / 2, side="left")
    high = np.searchsorted(xs, xs + width / 2, side="right")
    return (sums[high] - sums[low]) / (high - low)
