"""Metrics by which pages of trackers compare runs: one value a run of rewards and accuracies, in the words of analysis.

`at_budget/<metric>` is the value at the run's own full budget X, `auc/<metric>` the mean of its curve over the share
of X that was spent. They are made of the run folder and sent once, when the run is done; the folder does not hold
them, and readers of a tracker leave them out. Analysis compares runs at a budget that all of them reached instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from grpo_lab.tracking.metrics import AT_BUDGET, AUC
from grpo_lab.tracking.run_reader import StepRecord

WINDOW = 0.2  # share of X, at its end, over which a metric of every step is averaged
COMPARED = (
    "reward/mean", "reward/outcome", "reward/in_loss_mean", "eval/heldout_training/accuracy", "eval/heldout/accuracy",
    "eval/downstream/accuracy",
)  # fmt: skip


def final_metrics(records: Sequence[StepRecord], described: Mapping[str, Any]) -> dict[str, float]:
    """The values of a finished run, by name; none where its log lacks the budget that ends it.

    `described` is the run's run.json, whose budget axis counts. An evaluation has no value at X where the run's last
    one lies before it: nothing is extrapolated.
    """
    axis = f"budget/{described['config'].get('budget.axis', 'steps')}"
    spent = [{**record.metrics, **record.timing}.get(axis, math.nan) for record in records]
    full = spent[-1] if spent else math.nan
    if not full > 0:  # NaN, too
        return {}
    share = np.array(spent) / full
    found = {}
    for name in COMPARED:
        values = np.array([record.metrics.get(name, math.nan) for record in records])
        logged = np.isfinite(values) & np.isfinite(share)
        if not name.startswith("eval/"):
            logged &= share > 0  # step 0 trains on nothing
        x, y = share[logged], values[logged]
        if not len(x):
            continue
        if name.startswith("eval/"):
            at_end = y[-1] if x[-1] == 1 else math.nan
        else:
            late = y[x > 1 - WINDOW]
            at_end = late.mean() if len(late) else y[-1]
        found |= {f"{AT_BUDGET}{name}": float(at_end), f"{AUC}{name}": _area(x, y)}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _area(x: np.ndarray, y: np.ndarray) -> float:
    """The area under straight lines between points, from share 0 to 1; the first value holds before it, the last after.

    So that of a constant is the constant.
    """
    return float(np.trapezoid(np.concatenate([y[:1], y, y[-1:]]), np.concatenate([[0.0], x, [1.0]])))
