"""The mean over seeds of curves whose points lie at different budgets."""

from __future__ import annotations

import math
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
    if not seeds:
        return []
    first, last = max(xs[0] for xs, _ in seeds), min(budget, *(xs[-1] for xs, _ in seeds))
    if last < first:
        return []
    if evaluations:
        grid = _evaluation_grid([xs for xs, _ in seeds], first, last)
    else:
        grid = np.linspace(first, last, points)
        seeds = [(xs, running_mean(xs, values, SMOOTHING * budget)) for xs, values in seeds]
    on_grid = np.array([np.interp(grid, xs, values) for xs, values in seeds])
    runs, several = len(on_grid), len(set(bases))
    on_grid = over_bases(on_grid, bases)
    n, mean = len(on_grid), on_grid.mean(axis=0)
    half = np.full(len(grid), math.nan)
    if n >= FOR_INTERVAL:
        half = critical_t(n - 1) * on_grid.std(axis=0, ddof=1) / math.sqrt(n)
    number = several if several > 1 else 0
    return [
        (float(at), Interval(float(m), float(m - h), float(m + h), runs, number)) for at, m, h in zip(grid, mean, half)
    ]


def over_bases(values: np.ndarray, bases: Sequence[int]) -> np.ndarray:
    """The means [B, K] over the seeds of each base model of values [S, K], NaN left out; unchanged for one."""
    if len(set(bases)) < 2:
        return values
    here, of = ~np.isnan(values), np.asarray(bases)
    sums, counts = np.where(here, values, 0.0), here.astype(float)
    with np.errstate(invalid="ignore"):
        return np.array([sums[of == base].sum(axis=0) / counts[of == base].sum(axis=0) for base in np.unique(of)])


def _evaluation_grid(seeds: Sequence[np.ndarray], first: float, last: float) -> np.ndarray:
    """Where evaluations lie on average over seeds, from `first` to `last`, both included."""
    number = min(map(len, seeds))
    centres = np.mean([xs[:number] for xs in seeds], axis=0)
    return np.unique([first, *centres[(centres > first) & (centres < last)], last])


def running_mean(xs: np.ndarray, values: np.ndarray, width: float) -> np.ndarray:
    """At every point, the mean of the points within half a width of it; at the ends, of those there are."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    low = np.searchsorted(xs, xs - width / 2, side="left")
    high = np.searchsorted(xs, xs + width / 2, side="right")
    return (sums[high] - sums[low]) / (high - low)
