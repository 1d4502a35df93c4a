"""Series of a log in which a high value is bad, and the step at which one changed.

A series is smoothed by a rolling median over a tenth of its values, five at least, so a single spike is no finding. Its
reading is the highest smoothed value. Fewer than five values have none.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_lab.tracking.metrics import SHARPENED

FEWEST = 5
RESAMPLES = 400
COVERED = 0.95
_TINY = 1e-12
_NOT_OF_THE_POLICY = ("eval/probe/", f"eval/{SHARPENED}", "eval/sampler_")


@dataclass(frozen=True)
class OnsetSpan:
    """The step from which a series is higher, with a 95% interval; equal to the first step where it always was."""

    step: int
    low: int
    high: int


@dataclass(frozen=True)
class PeakReading:
    """The highest smoothed value of a series, and its step."""

    value: float
    step: int


def window(n: int) -> int:
    """Number of values over which a series of n is smoothed."""
    return max(FEWEST, math.ceil(n / 10))


def smoothed(series: pd.Series) -> pd.Series:
    """The rolling median of the finite values; empty where there are fewer than five."""
    finite = series[np.isfinite(series)]
    return finite.rolling(window(len(finite))).median().dropna()


def reading(series: pd.Series) -> PeakReading | None:
    """The highest smoothed value, None where there are too few."""
    smooth = smoothed(series)
    if smooth.empty:
        return None
    place = int(np.argmax(smooth.to_numpy()))
    return PeakReading(float(smooth.iloc[place]), int(smooth.index.to_numpy()[place]))


def _relative(sign: int) -> Callable[[pd.Series], pd.Series]:
    """sign * log(value / start), where the start is the median of the first window."""

    def change(series: pd.Series) -> pd.Series:
        finite = series[np.isfinite(series)]
        start = finite.iloc[: window(len(finite))].median()
        if len(finite) < FEWEST or not start > _TINY:
            return finite.iloc[:0]
        return pd.Series(sign * np.log(finite.clip(lower=_TINY).to_numpy() / start), index=finite.index)

    return change


TRANSFORMS: Mapping[str, Callable[[pd.Series], pd.Series]] = {
    "level": lambda series: series,
    "size": lambda series: series.abs(),
    "shortfall": lambda series: 1 - series,
    "rise": _relative(1),
    "fall": _relative(-1),
}


def evaluations(table: pd.DataFrame) -> dict[str, pd.Series]:
    """Metric -> accuracies, of every evaluation in the log that asks the trained policy and is a share."""
    found = {}
    for name in table.columns:
        if not re.fullmatch(r"eval/[^/]+/accuracy", str(name)) or str(name).startswith(_NOT_OF_THE_POLICY):
            continue
        values = table[name].dropna()
        if len(values) >= 3 and values.between(0, 1).all():
            found[str(name)] = values
    return found


def lost_accuracy(table: pd.DataFrame, metric: str, rewards: pd.Series) -> pd.Series:
    """Of every evaluation but the first: how far it and the one before are below the best one before them both.

    Two in a row, since one may be noise. `rewards` is smoothed: 0 where reward is lower than at the best evaluation,
    since then training says so itself.
    """
    values = evaluations(table)[metric]
    at = np.interp(values.index, rewards.index, rewards.to_numpy())
    best = np.array([int(np.argmax(values.to_numpy()[: k + 1])) for k in range(len(values))])
    lost = np.where(at >= at[best], values.to_numpy()[best] - values.to_numpy(), 0.0)
    return pd.Series(lost, index=values.index).rolling(2).min().dropna()


def onset(series: pd.Series, threshold: float) -> OnsetSpan:
    """The change-point of a series whose smoothed values exceed a threshold.

    Least squares with one change of the mean, over the values up to one window after the alarm. The interval is that of
    the change-point in resampled series: the two means plus residuals in blocks of one window, so that the
    autocorrelation stays. Where the first smoothed value is above the threshold, there is no change to date.
    """
    finite = series[np.isfinite(series)]
    smooth = smoothed(series)
    steps, width = finite.index.to_numpy(), window(len(finite))
    alarm = int(np.argmax(smooth.to_numpy() > threshold))
    if alarm == 0:
        return OnsetSpan(int(steps[0]), int(steps[0]), int(steps[0]))
    end = min(alarm + 2 * width, len(finite))
    values = finite.to_numpy()[:end]
    cut = int(_changes(values[None])[0])
    means = np.where(np.arange(end) < cut, values[:cut].mean(), values[cut:].mean())
    rng = np.random.default_rng(0)
    starts = rng.integers(0, end, size=(RESAMPLES, math.ceil(end / width)))
    blocks = (starts[:, :, None] + np.arange(width)).reshape(RESAMPLES, -1)[:, :end] % end
    cuts = _changes(means + (values - means)[blocks])
    low, high = np.quantile(cuts, [(1 - COVERED) / 2, (1 + COVERED) / 2], method="nearest")
    low, high = min(int(low), cut), max(int(high), cut)
    return OnsetSpan(int(steps[cut]), int(steps[low]), int(steps[high]))


def _changes(values: np.ndarray) -> np.ndarray:
    """[R]: for every row of values [R, n] the first index of the second of two segments with least squared error."""
    n = values.shape[1]
    count = np.arange(1, n)
    before = np.cumsum(values, axis=1)[:, :-1]
    after = values.sum(axis=1, keepdims=True) - before
    return 1 + np.argmax(before**2 / count + after**2 / (n - count), axis=1)
