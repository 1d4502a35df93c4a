"""Final values of single runs and of arms, and their differences to the control, as tidy tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.rows import seeds_and_mean, table_of

_COLUMNS = ["level", "arm", "metric", "part", "seed", "value", "low", "high", "n"]


def finals_of(data: SweepData, finals: FinalValues, metrics: Sequence[str], scale: float = 1.0) -> pd.DataFrame:
    """Final values: level, arm, metric, part, seed, value, low, high, n, numbers times `scale`.

    `part` is "seed" (a run) or "mean" (over n runs, with the 95% interval in low and high). Arms without a value of a
    metric have no row.
    """
    rows = []
    for level, arm in data.run_arms:
        for metric in metrics:
            own = finals.of(level, arm, metric)
            if len(own):
                labels = {"level": level, "arm": arm, "metric": metric}
                rows += seeds_and_mean(labels, own, finals.interval(level, arm, metric), scale)
    return table_of(rows, _COLUMNS)


def differences_of(data: SweepData, finals: FinalValues, metrics: Sequence[str]) -> pd.DataFrame:
    """Arm less control, paired by seed, in the metric's unit: the columns of `finals_of`, with n pairs.

    Arms that share no seed with the control have no row.
    """
    rows = []
    for level, arm in (place for place in data.run_arms if place[1] != data.control):
        for metric in metrics:
            own = finals.differences(level, arm, data.control, metric)
            if len(own):
                labels = {"level": level, "arm": arm, "metric": metric}
                rows += seeds_and_mean(labels, own, finals.difference(level, arm, data.control, metric))
    return table_of(rows, _COLUMNS)
