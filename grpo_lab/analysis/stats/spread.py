"""Spread of the runs of an arm as a result of its own: the ratio of two arms' standard deviations, paired by seed.

Two tricks can end alike and differ in how much a single run can be trusted. With several seeds on a base model the
deviations are those of seeds from their base model's mean; with one, those of base models from the mean of all. The
interval is Student's t of Miller's jackknife (Biometrika 1968): of the pseudo-values n L - (n - 1) L_i of L, the log
of the ratio, with one base model (or run) left out. It needs no normal law, as the F test does; `interval_coverage` has
the coverage.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from grpo_lab.analysis.stats.intervals import Interval, t_interval

FEWEST = 4  # base models, or runs of one, from which on an interval is given


def spread_ratio(treated: pd.Series, control: pd.Series, bases: Mapping[int, int]) -> Interval:
    """The standard deviation of `treated` over that of `control`, both by seed, over the seeds of both.

    NaN with the reason in `why` where one of them does not deviate, or too few base models are left.
    """
    pairs = pd.concat([treated, control], axis=1).dropna()
    own = np.array([bases.get(int(str(seed)), -1) for seed in pairs.index])
    number, n, values = len(set(own)), len(pairs), pairs.to_numpy(float)
    nested = n > number > 1
    blocks = own if nested else np.zeros(n, dtype=int)
    units = own if nested else np.arange(n)
    none = Interval(math.nan, math.nan, math.nan, n, number if number > 1 else 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = _log_ratio(values, blocks)
        left = np.array([_log_ratio(values[units != unit], blocks[units != unit]) for unit in dict.fromkeys(units)])
    if n < 2 or not np.isfinite(whole):
        return replace(none, why="one of them does not deviate" if n > 1 else "")
    if len(left) < FEWEST or not np.isfinite(left).all():
        why = f"{len(left)} {'base models' if nested else 'runs'}, {FEWEST} that deviate are needed"
        return replace(none, mean=math.exp(whole), why=why)
    found = t_interval((len(left) * whole - (len(left) - 1) * left).tolist())
    return replace(none, mean=math.exp(whole), low=math.exp(found.low), high=math.exp(found.high))


def _log_ratio(values: np.ndarray, blocks: np.ndarray) -> float:
    """ln of the ratio of the columns' standard deviations about the means of their blocks."""
    deviations = values.copy()
    for block in np.unique(blocks):
        deviations[blocks == block] -= values[blocks == block].mean(axis=0)
    one, other = (deviations**2).sum(axis=0) if len(values) else (math.nan, math.nan)
    return float(0.5 * (np.log(one) - np.log(other)))
