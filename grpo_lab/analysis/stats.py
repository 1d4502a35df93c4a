"""The two intervals everything is reported with: of a mean over seeds, and of a difference paired by seed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean over n seeds with a confidence interval; low and high are NaN for n = 1, all three for n = 0."""

    mean: float
    low: float
    high: float
    n: int

    def text(self, sign: str = "") -> str:
        """`0.693 [0.681, 0.705]`; `sign="+"` writes the sign of positive numbers too."""
        if self.n == 0:
            return "-"
        if self.n == 1:
            return f"{self.mean:{sign}.3f}"
        return f"{self.mean:{sign}.3f} [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean of independent values.

    Coverage of the 95% interval, measured in 200,000 simulated experiments with n = 3 and with n = 5 seeds: 95% for
    normal values and for shares of 128 answers whose rate itself varies between seeds, 97% for differences of two
    skewed (exponential) values, 88% for strongly skewed values on their own.
    """
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(np.mean(values))
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(treated: pd.Series, control: pd.Series) -> Interval:
    """Treated less control, paired by seed (the index of both), over the seeds for which both have a value."""
    return t_interval(seed_differences(treated, control).tolist())


def seed_differences(treated: pd.Series, control: pd.Series) -> pd.Series:
    """Treated less control for each seed that has both, in the order of the seeds."""
    return (treated - control).dropna().sort_index()
