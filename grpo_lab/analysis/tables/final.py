"""Final values of single runs and of arms, and their differences to the control, as tidy tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.rows import seeds_and_mean, table_of

_COLUMNS = ["level", "arm", "metric", "part", "seed", "value", "low", "high", "n"]


def finals_of(
    data: SweepData, finals: FinalValues, metrics: Sequence[str], less: str = "", scale: float = 1.0
) -> pd.DataFrame:
    """Final values, or those `less` an arm, paired by seed: level, arm, metric, part, seed, value, low, high, n.

    `part` is "seed" (a run, or a pair of runs) or "mean" (over n of them, with the 95% interval in low and high).
    Numbers are times `scale`. Arms without a value of a metric, or without a pair, have no row.
    """
    rows = []
    for level, arm in (place for place in data.run_arms if place[1] != less):
        for metric in metrics:
            own = finals.differences(level, arm, less, metric) if less else finals.of(level, arm, metric)
            if len(own):
                mean = finals.difference(level, arm, less, metric) if less else finals.interval(level, arm, metric)
                rows += seeds_and_mean({"level": level, "arm": arm, "metric": metric}, own, mean, scale)
    return table_of(rows, _COLUMNS)
