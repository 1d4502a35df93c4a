"""Final values: what every finished run came to at one common budget, by a rule fixed before the first run.

X is the smallest final budget over the finished runs of the sweep, on the axis the design declares. A metric logged
at every step counts with its mean over the steps with 0.8 X < x <= X (or with the last step up to X, where steps are
longer than that); a metric logged at evaluations only counts with the value at X of the straight line between the
run's own evaluations around it. Nothing is extrapolated. `average/<metric>` is the mean of a metric of every step over
all of 0 < x <= X: what the run went through, where the final value is what it came to.

Theory beside which overstatement is read: let q be the truncated share and a the accuracy of the responses that are
not cut. An arm that masks cut rows sees a in its loss and deploys (1 - q) a, so it overstates by q a; an arm that
trains on them overstates by 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_lab.analysis.load import LABELS, SweepData
from grpo_lab.analysis.stats import Interval, paired_difference, seed_differences, t_interval

WINDOW = 0.2  # share of X, at its end, over which a metric of every step is averaged
DEFAULT_AXIS = "sampled_tokens"  # of a sweep that declares none

REWARD = "reward/kept_mean"
HELDOUT = "eval/heldout_training/accuracy"
DOWNSTREAM = "eval/downstream/accuracy"
TRUNCATED = "rollout/truncated"
AVERAGE = "average/"  # before a metric of every step
GAP, OVERSTATEMENT, MASKED_SHARE, BEYOND = "gap", "overstatement", "q_times_a", "beyond_q_times_a"

# What is reported of every arm, in this order, and what to call it.
QUANTITIES = {
    REWARD: "reward as seen (kept responses)",
    "reward/mean": "reward of all responses",
    HELDOUT: "held-out accuracy",
    GAP: "gap (reward as seen - held-out accuracy)",
    "eval/heldout/accuracy": "held-out accuracy, evaluation protocol",
    DOWNSTREAM: "downstream accuracy",
    f"{AVERAGE}{TRUNCATED}": "truncated share, training, whole run",
    TRUNCATED: "truncated share, training",
    "eval/heldout_training/truncated": "truncated share, held-out",
    "eval/downstream/truncated": "truncated share, downstream",
    "rollout/length": "response length, tokens",
    OVERSTATEMENT: "overstatement (outcome as seen - held-out accuracy)",
    MASKED_SHARE: "q a, the overstatement that masking predicts",
    BEYOND: "overstatement - q a",
}


@dataclass(frozen=True)
class Outcome:
    """The final values of a sweep.

    `values` has one row per finished run: level, arm, seed, masks (whether the run took cut rows out of its loss
    anywhere, by its own data), and every metric, derived ones included, NaN where it cannot be had.
    """

    axis: str
    budget: float  # X, in the axis's unit
    values: pd.DataFrame

    @property
    def at(self) -> str:
        """X in words."""
        amount = f"{self.budget:,.0f}" if self.budget >= 1000 else f"{self.budget:g}"
        return f"{amount} {self.axis.replace('_', ' ')}"

    @property
    def rule(self) -> str:
        """The rule in one sentence, for whoever reads a figure."""
        return (
            f"Final values at X = {self.at}, the smallest final budget of the finished runs: metrics of every step "
            f"are means over {1 - WINDOW:g} X < x <= X, metrics of evaluations are interpolated linearly at X"
        )

    def of(self, level: str, arm: str, metric: str) -> pd.Series:
        """One metric of one arm by seed, without the runs that lack it."""
        if metric not in self.values:
            return pd.Series(dtype=float)
        here = self.values[(self.values["level"] == level) & (self.values["arm"] == arm)]
        return here.set_index("seed")[metric].dropna()

    def interval(self, level: str, arm: str, metric: str) -> Interval:
        """Mean over the arm's seeds."""
        return t_interval(self.of(level, arm, metric).tolist())

    def difference(self, level: str, arm: str, control: str, metric: str) -> Interval:
        """Arm less control, paired by seed."""
        return paired_difference(self.of(level, arm, metric), self.of(level, control, metric))

    def differences(self, level: str, arm: str, control: str, metric: str) -> pd.Series:
        """Arm less control for each seed that has both."""
        return seed_differences(self.of(level, arm, metric), self.of(level, control, metric))

    def masks(self, level: str, arm: str) -> bool:
        """Whether any run of the arm masked truncated rows."""
        here = self.values[(self.values["level"] == level) & (self.values["arm"] == arm)]
        return bool(here["masks"].any())


def budget_axis(data: SweepData) -> str:
    """The entry of budget/* on which the arms of the sweep are compared."""
    return data.design.axis if data.design else DEFAULT_AXIS


def final_values(data: SweepData) -> Outcome:
    """Apply the rule above to every finished run. Raises ValueError where none is finished."""
    if data.finished.empty:
        counts = ", ".join(f"{number} {status}" for status, number in data.runs["status"].value_counts().items())
        raise ValueError(
            f"no cell of {data.record.name} is finished ({counts or 'it has no cells'}): "
            "start the sweep's command again, and draw when some are"
        )
    axis = budget_axis(data)
    x = f"budget/{axis}"
    points = data.finished_points
    if x not in points:
        raise ValueError(f"no finished run of {data.record.name} logged {x}: design.axis must name a budget of a run")
    runs = points.groupby(LABELS, sort=False)
    budget = float(runs[x].max().min())
    rows = [dict(zip(LABELS, labels)) | _final(run, x, budget) for labels, run in runs]
    return Outcome(axis, budget, pd.DataFrame(rows))


def _final(run: pd.DataFrame, x: str, budget: float) -> dict[str, float | bool]:
    metrics = [name for name in run.columns if name not in (*LABELS, "step")]
    until = run[(run[x] > 0) & (run[x] <= budget)]
    window = until[until[x] > (1 - WINDOW) * budget]
    window = until.tail(1) if window.empty else window  # steps longer than the window: the last one
    stepwise = [name for name in metrics if not name.startswith("eval/")]
    final = {name: float(window[name].mean()) for name in stepwise}
    final |= {f"{AVERAGE}{name}": float(until[name].mean()) for name in stepwise}
    for name in (name for name in metrics if name.startswith("eval/")):
        evaluated = run[run[name].notna()]
        final[name] = interpolate(evaluated[x].to_numpy(), evaluated[name].to_numpy(), budget)
    return {**final, **_derived(final), "masks": bool((run.get("touched/truncation", pd.Series([0.0])) > 0).any())}


def interpolate(xs: np.ndarray, values: np.ndarray, at: float) -> float:
    """The value at `at` of the straight line between the points around it; NaN outside of the points."""
    if len(xs) == 0 or not xs[0] <= at <= xs[-1]:
        return math.nan
    return float(np.interp(at, xs, values))


def _derived(final: dict[str, float]) -> dict[str, float]:
    deployed = final.get(HELDOUT, math.nan)
    q = final.get("eval/heldout_training/truncated", math.nan)
    masked = q * deployed / (1 - q) if q < 1 else math.nan
    overstatement = final.get("reward/kept_outcome", math.nan) - deployed
    return {
        GAP: final.get(REWARD, math.nan) - deployed,
        OVERSTATEMENT: overstatement,
        MASKED_SHARE: masked,
        BEYOND: overstatement - masked,
    }
