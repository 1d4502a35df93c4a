"""A ratio of two means over the same observations, with its interval by the jackknife."""

from __future__ import annotations

import math

import numpy as np

from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, critical_t


def jackknife_ratio(pairs: np.ndarray) -> Interval:
    """The mean of the first column of `pairs` [N, 2] over that of the second; no bounds below FOR_INTERVAL of them.

    The standard error is that of the ratios with one observation left out, and t has N - 1 degrees of freedom. Use it
    where the second mean is well above 0; `interval_coverage` has its coverage.
    """
    n = len(pairs)
    ratio = float(pairs[:, 0].mean() / pairs[:, 1].mean())
    if n < FOR_INTERVAL:
        return Interval(ratio, math.nan, math.nan, n)
    sums = pairs.sum(axis=0) - pairs
    left = sums[:, 0] / sums[:, 1]
    half = critical_t(n - 1) * math.sqrt((n - 1) / n * float(((left - left.mean()) ** 2).sum()))
    return Interval(ratio, ratio - half, ratio + half, n)
