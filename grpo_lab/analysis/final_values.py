"""Final values: one number per run and metric, at one budget that all finished runs reached.

The budget is X, the smallest final budget over the finished runs, on the axis that the design declares.

    metric logged         its final value
    at every step         the mean over the steps with 0.8 X < x <= X; the last step up to X where steps are longer
    at evaluations only   the value at X of the straight line between the run's own evaluations around X; of a run
                          that logs how much it asked, its last evaluation where only its last step went beyond X

Nothing is extrapolated. `average/<metric>` is the mean of a metric of every step over the whole run, 0 < x <= X. Where
a design names them, there are `start/<evaluation>`, its value at step 0, `below_best/<evaluation>`, the best mean of
three evaluations in a row less that of the last three, and `log_odds/<evaluation>`, ln (k + 1/2) / (n - k + 1/2) for k
right answers of n at the end. `tokens_to_half/<evaluation>` and `tokens_to_90/<evaluation>` are log2 of the sampled
tokens at which the run first reaches that share of the gain of the control of its level and seed. One that never does
counts with all its tokens, so that its slowness is understated; there is none where the control gains less than
LEAST_GAIN, or where the run is there at step 0.

A run has collapsed where it stopped before X on a loss that was not finite, or where its held-out accuracy under the
training protocol ends below half of what it was at its own start, and 10 points or more below. A collapse is a result,
and it counts: without it, an arm would be judged by the runs that survived. It is a result of its own, which a mean
cannot tell: see `stats.comparison`. A run that stopped has, by the rule `zero`, accuracy and reward 0 from its end on
and no other metrics; by the rule `last` every metric keeps the last value it had. One that did not stop keeps its
numbers.

A run may also end before X since nothing was left to train on: every problem is solved, the curriculum has run dry, or
the group filter fills no batch. It is no fault and no collapse. More budget would not change its policy, so every
metric keeps the last value it had. An evaluation keeps that of its last one, which may be some steps older than the
end: a run evaluates itself at its end only where its budget is spent.

Theory beside the measured overstatement: let q be the truncated share and a the accuracy of the responses that are
not truncated. An arm that masks truncated rows sees a in its loss and deploys (1 - q) a, so it overstates by q a; an
arm that trains on them overstates by 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData, bases_of
from grpo_lab.analysis.stats.collapse import Count
from grpo_lab.analysis.stats.comparison import Comparison, compare
from grpo_lab.analysis.stats.intervals import Interval, seed_differences
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.config.design import Collapsed
from grpo_lab.tracking.final_metrics import WINDOW
from grpo_lab.tracking.metrics import (
    BELOW_BEST,
    LOG_ODDS,
    OF_EVALUATIONS,
    START,
    TO_HALF,
    TO_NINE_TENTHS,
    logged_name,
)

FALLEN = 0.5  # of its own start: a held-out accuracy that ends below it has collapsed,
LOST = 0.1  # where it lost so much accuracy at least
RUN = 3  # evaluations in a row whose mean is a best or a last value
LEAST_GAIN = 0.02  # of accuracy, below which a control has no gain to be reached
TOKENS = "budget/sampled_tokens"
_SHARES = {TO_HALF: 0.5, TO_NINE_TENTHS: 0.9}  # of the control's gain

REWARD = "reward/in_loss_mean"
HELDOUT = "eval/heldout_training/accuracy"
DOWNSTREAM = "eval/downstream/accuracy"
TRUNCATED = "rollout/truncated"
EVALUATED = (HELDOUT, "eval/heldout/accuracy", DOWNSTREAM)
AVERAGE = "average/"  # before a metric of every step
GAP, OVERSTATEMENT, MASKED_SHARE, BEYOND = "gap", "overstatement", "q_times_a", "beyond_q_times_a"

# What is reported of every arm, in this order, and what to call it.
QUANTITIES = {
    REWARD: "reward in the loss",
    "reward/mean": "reward of all responses",
    HELDOUT: "held-out accuracy, training protocol",
    GAP: "reward in the loss - held-out accuracy, training protocol",
    "eval/heldout/accuracy": "held-out accuracy, evaluation protocol",
    DOWNSTREAM: "downstream accuracy",
    f"{AVERAGE}{TRUNCATED}": "truncated share, training, whole run",
    TRUNCATED: "truncated share, training",
    "eval/heldout_training/truncated": "truncated share, held-out, training protocol",
    "eval/downstream/truncated": "truncated share, downstream",
    "rollout/length": "response length, tokens",
    OVERSTATEMENT: "overstatement: training correctness in the loss less held-out accuracy",
    MASKED_SHARE: "overstatement that masking predicts",
    BEYOND: "overstatement less what masking predicts",
}


_ACCURACIES = ("/accuracy", "/verified_accuracy", "/accuracy_easiest", "/accuracy_hardest")


@dataclass(frozen=True, eq=False)
class FinalValues:
    """The final values of a sweep.

    `values` has one row per run that counts, `SweepData.counted`, with level, arm, seed and every metric, derived
    ones included; NaN where there is none. `masks` says whether the run took truncated rows out of its loss at any
    step, `filters` whether groups left its batch, `collapsed` whether it collapsed, `stopped` whether it did so before
    X, on a loss that was not finite, and `exhausted` whether it ended before X with nothing left to train on. `bases`
    maps a seed to its base; empty for a sweep of one base model.
    """

    axis: str
    budget: float  # X, in the axis's unit
    values: pd.DataFrame
    collapsed_as: Collapsed = Collapsed.zero
    bases: Mapping[int, int] = field(default_factory=dict)

    @property
    def at(self) -> str:
        """X in words."""
        amount = f"{self.budget:,.0f}" if self.budget >= 1000 else f"{self.budget:g}"
        return f"{amount} {self.axis.replace('_', ' ')}"

    @property
    def rule(self) -> str:
        """How final values are taken, in one sentence for readers of a figure."""
        rule = (
            f"Final values at {self.at}, the smallest final budget of the finished runs: per-step metrics are averaged "
            f"over its last {WINDOW:.0%}; evaluations are final ones, linearly interpolated to this budget for runs "
            "that went more than one step further"
        )
        if self.values["stopped"].any():
            as_what = "accuracy and reward 0" if self.collapsed_as is Collapsed.zero else "their last values"
            rule += f"; {int(self.values['stopped'].sum())} runs that stopped earlier count with {as_what}"
        if self.values["exhausted"].any():
            number = int(self.values["exhausted"].sum())
            rule += f"; {number} runs that ended earlier, with nothing left to train on, count with their last values"
        return rule

    @property
    def brackets(self) -> str:
        """The kind of interval of these values, as part of a sentence."""
        bases = len(set(self.bases.values()))
        return (
            f"95% t interval over {bases} base models, for a new base model"
            if bases > 1
            else "95% t interval over seeds"
        )

    @property
    def over_bases(self) -> str:
        """A sentence for figures, with a space before it: what intervals are about; empty for one base model."""
        bases = len(set(self.bases.values()))
        return f" Intervals are over {bases} base models, for a new base model." if bases > 1 else ""

    def collapsed(self, level: str, arm: str) -> int:
        """How many runs of an arm collapsed."""
        return self.collapses(level, arm).number

    def stopped(self, level: str, arm: str) -> int:
        """How many runs of an arm stopped before X on a loss that was not finite."""
        return int(self._runs(level, arm)["stopped"].sum())

    def collapses(self, level: str, arm: str) -> Count:
        """How many runs of an arm collapsed, of how many."""
        here = self._runs(level, arm)["collapsed"]
        return Count(int(here.sum()), len(here))

    @cached_property
    def _by_arm(self) -> dict[tuple[str, str], pd.DataFrame]:
        """(level, arm) -> its rows by seed."""
        return {place: rows.set_index("seed") for place, rows in groups_of(self.values, ["level", "arm"], sort=False)}

    def _runs(self, level: str, arm: str) -> pd.DataFrame:
        return self._by_arm.get((level, arm), self.values.head(0))

    def fallen(self, *places: tuple[str, str]) -> dict[int, tuple[bool, ...]]:
        """Seed -> which of these (level, arm) collapsed, for the seeds where one did."""
        marks = [self._runs(*place)["collapsed"] for place in places]
        seeds = [set(map(int, own.index[own])) for own in marks]
        return {seed: tuple(seed in own for own in seeds) for seed in sorted(set().union(*seeds))}

    def of(self, level: str, arm: str, metric: str) -> pd.Series:
        """One metric of one arm by seed, without the runs that lack it."""
        if metric not in self.values:
            return pd.Series(dtype=float)
        return self._runs(level, arm)[metric].dropna()

    def interval(self, level: str, arm: str, metric: str) -> Interval:
        """Mean over the arm's runs, for a new base model where they are of several; of a share, within 0 and 1."""
        own = self.compared(self.of(level, arm, metric), metric, (level, arm)).whole
        return own.within(0.0, 1.0) if is_share(metric) else own

    def difference(self, level: str, arm: str, control: str, metric: str) -> Interval:
        """Arm less control, paired by seed, for a new base model where the pairs are of several."""
        return self.comparison((level, arm), (level, control), metric).whole

    def comparison(self, place: tuple[str, str], reference: tuple[str, str], metric: str) -> Comparison:
        """One (level, arm) less another, paired by seed, with what collapses leave of it."""
        differences = seed_differences(self.of(*place, metric), self.of(*reference, metric))
        return self.compared(differences, metric, place, reference)

    def compared(self, values: pd.Series | Mapping[int, float], metric: str, *places: tuple[str, str]) -> Comparison:
        """Numbers by seed that are made of the runs of these (level, arm): their values, or differences of them."""
        return compare(values, self.bases, self.fallen(*places), grouped=is_rated(metric))

    def differences(self, level: str, arm: str, control: str, metric: str) -> pd.Series:
        """Arm less control for each seed that has both."""
        return seed_differences(self.of(level, arm, metric), self.of(level, control, metric))

    def masks(self, level: str, arm: str) -> bool:
        """True if any run of the arm masked truncated rows."""
        return bool(self._runs(level, arm)["masks"].any())

    def filters(self, level: str, arm: str) -> bool:
        """True if groups left the batch of any run of the arm, or never came into it."""
        return bool(self._runs(level, arm)["filters"].any())


def is_rated(metric: str) -> bool:
    """True if a metric is an accuracy or a reward, of which more is better and a run that stopped has 0."""
    if metric.startswith((BELOW_BEST, LOG_ODDS, *_SHARES)):
        return False
    metric = logged_name(metric)
    return metric.startswith("reward/") or metric.endswith(_ACCURACIES) or "/pass_at_" in metric


def is_share(metric: str) -> bool:
    """True if a metric's values lie within 0 and 1 whatever happens: shares of answers or of responses."""
    if metric.startswith((LOG_ODDS, *_SHARES)):
        return False
    return logged_name(metric).endswith((*_ACCURACIES, "/truncated", "/outcome", "/in_loss_outcome"))


def final_values(data: SweepData, axis: str | None = None) -> FinalValues:
    """The final values of a sweep, on the declared budget axis or on another entry of budget/*.

    Raises ValueError where none is finished or none logged the axis.
    """
    if data.finished.empty:
        counts = ", ".join(f"{number} {status}" for status, number in data.runs["status"].value_counts().items())
        raise ValueError(
            f"no run of {data.record.name} is finished ({counts or 'it has no runs'}): "
            "start the sweep's command again, and draw when some are"
        )
    axis = axis or data.axis
    x = f"budget/{axis}"
    points = data.counted_points
    if x not in points or data.finished_points[x].isna().all():
        raise ValueError(f"no finished run of {data.record.name} logged {x}: design.axis must name a budget of a run")
    budget = float(data.finished_points.groupby(LABELS, sort=False)[x].max().min())
    stopped, exhausted = (
        set(data.runs.loc[which, LABELS].itertuples(index=False, name=None))
        for which in (data.runs["collapsed"], data.exhausted)
    )
    named = [name for name in data.design.metrics if name.startswith(OF_EVALUATIONS)] if data.design else []
    rows, derived = [], [name for name in named if not name.startswith(tuple(_SHARES))]
    for labels, run in points.groupby(LABELS, sort=False):
        before = not run[x].max() >= budget
        short, dry = labels in stopped and before, labels in exhausted and before
        rule = Collapsed.last if dry else data.collapsed_as
        final = _ended_before(run, x, budget, rule) if short or dry else _final(run, x, budget)
        final |= {metric: _of_evaluations(run, metric, final) for metric in derived}
        marks = {"masks": _masked(run), "filters": bool((_column(run, "active_fraction/group_filter") > 0).any())}
        marks |= {"collapsed": short or _fell(run, final), "stopped": short, "exhausted": dry}
        rows.append({**dict(zip(LABELS, labels)), **final, **marks})
    values = pd.DataFrame(rows)
    for metric in set(named) - set(derived):
        values[metric] = _tokens_to(points, values, data.control, metric)
    return FinalValues(axis, budget, values, data.collapsed_as, bases_of(data))


def own_final(run: pd.DataFrame, metric: str, axis: str) -> float:
    """The final value of one run at its own end, from its steps with `step` and metrics; NaN where it logged none."""
    x = f"budget/{axis}"
    return _final(run, x, float(run[x].max())).get(metric, math.nan) if x in run else math.nan


def _of_evaluations(run: pd.DataFrame, metric: str, final: Mapping[str, float]) -> float:
    """A number of all evaluations of a run, see above; NaN where they were not logged, or fewer than three."""
    name = logged_name(metric)
    if name not in run:
        return math.nan
    if metric.startswith(START):
        return _mean(run.loc[run["step"] == 0, name].dropna().to_numpy())
    if metric.startswith(LOG_ODDS):
        share, number = final[name], final.get(f"{name.rpartition('/')[0]}/responses", math.nan)
        return math.log((share * number + 0.5) / ((1 - share) * number + 0.5))
    assert metric.startswith(BELOW_BEST), metric
    values = run[name].dropna().to_numpy()
    if len(values) < RUN:
        return math.nan
    means = np.convolve(values, np.full(RUN, 1 / RUN), mode="valid")
    return float(means.max() - means[-1])


def _tokens_to(points: pd.DataFrame, values: pd.DataFrame, control: str, metric: str) -> list[float]:
    """log2 of the sampled tokens to a share of the control's gain, for every row of final values."""
    share = next(share for prefix, share in _SHARES.items() if metric.startswith(prefix))
    evaluated, found = logged_name(metric), []
    ends = values.set_index(LABELS)[evaluated]
    curves = {place: token_curves(points, place, evaluated) for place in {*zip(values["level"], values["arm"])}}
    for level, arm, seed in values[LABELS].itertuples(index=False, name=None):
        own, other = (curves.get((level, one), {}).get(seed) for one in (arm, control))
        if own is None or other is None:
            found.append(math.nan)
            continue
        target = share_of_gain(other, float(ends.loc[level, control, seed]), share)
        tokens = min(reached(*own, target), float(own[0][-1]))
        found.append(math.log2(tokens) if tokens > 0 else math.nan)
    return found


def token_curves(points: pd.DataFrame, place: tuple[str, str], metric: str) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Sampled tokens and evaluations of every run of an arm at a level, by seed."""
    if metric not in points or TOKENS not in points:
        return {}
    own = points[(points["level"] == place[0]) & (points["arm"] == place[1]) & points[metric].notna()]
    return {
        int(str(seed)): (run[TOKENS].to_numpy(float), run[metric].to_numpy(float))
        for seed, run in own.sort_values("step").groupby("seed")
    }


def share_of_gain(control: tuple[np.ndarray, np.ndarray], end: float, share: float) -> float:
    """The control's start and `share` of its gain up to `end`; NaN where it gains less than LEAST_GAIN."""
    start = float(control[1][0])
    return start + share * (end - start) if end - start >= LEAST_GAIN else math.nan


def reached(x: np.ndarray, values: np.ndarray, target: float) -> float:
    """Where the line between the points first reaches `target`; inf where it never does, NaN for no target."""
    if math.isnan(target):
        return math.nan
    above = np.flatnonzero(values >= target)
    if not len(above):
        return math.inf
    at = int(above[0])
    if at == 0:
        return float(x[0])
    share = (target - values[at - 1]) / (values[at] - values[at - 1])
    return float(x[at - 1] + share * (x[at] - x[at - 1]))


def _fell(run: pd.DataFrame, final: Mapping[str, float]) -> bool:
    """True if held-out accuracy ends below half of its own start, and at least 10 points below."""
    evaluated = run[HELDOUT].dropna() if HELDOUT in run else run["step"].head(0)
    if evaluated.empty:
        return False
    start, end = float(evaluated.iloc[0]), final[HELDOUT]
    return end < FALLEN * start and start - end >= LOST


def _column(run: pd.DataFrame, name: str) -> pd.Series:
    return run[name].fillna(0.0) if name in run else pd.Series(0.0, index=run.index)


def _masked(run: pd.DataFrame) -> bool:
    """True if the truncation option took rows out of the loss; one it ended in its own way is no row it took out."""
    ended = _column(run, "rollout/interrupted") + _column(run, "rollout/stopped")
    return bool((_column(run, "active_fraction/truncation") - ended > 1e-9).any())


def evaluated_at(run: pd.DataFrame, x: str, budget: float) -> float:
    """The budget at which a run's evaluations are read: X, or its end if only its last step went beyond X.

    The last evaluation may be larger than those before, and a line from a small one would bring its noise in. Runs of
    earlier versions, whose evaluations are all of one size, do not log `eval/*/responses`: they are read at X.
    """
    at = run[x].dropna().to_numpy()
    sized = any(name.endswith("/responses") and run[name].notna().any() for name in run.columns.tolist())
    return float(at[-1]) if sized and len(at) > 1 and at[-2] < budget < at[-1] else budget


def _final(run: pd.DataFrame, x: str, budget: float) -> dict[str, float]:
    at, evaluated = run[x].to_numpy(), evaluated_at(run, x, budget)
    until = (at > 0) & (at <= budget)
    window = until & (at > (1 - WINDOW) * budget)
    if not window.any() and until.any():  # steps longer than the window: the last one
        window[np.flatnonzero(until)[-1]] = True
    final = {}
    names = [name for name in run.columns.tolist() if name not in (*LABELS, "step")]
    for name, values in zip(names, run[names].to_numpy(float).T):
        logged = ~np.isnan(values)
        if name.startswith("eval/"):
            final[name] = interpolate(at[logged], values[logged], evaluated)
        else:
            final[name] = _mean(values[window & logged])
            final[f"{AVERAGE}{name}"] = _mean(values[until & logged])
    return final | _derived(final)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else math.nan


def _ended_before(run: pd.DataFrame, x: str, budget: float, rule: Collapsed) -> dict[str, float]:
    """The final values of a run that ended before the budget."""
    end = float(run[x].max()) if run[x].notna().any() else 0.0
    lived = end / budget
    own = _final(run, x, end) if end > 0 else {}
    final = {}
    for name in (name for name in run.columns if name not in (*LABELS, "step")):
        seen = run[name].dropna()
        last = own.get(name, math.nan)
        if name.startswith("eval/"):
            last = float(seen.iloc[-1]) if len(seen) else math.nan
        never = seen.empty and (name.startswith("eval/") or end > 0)  # not of this run's metrics at all
        if rule is Collapsed.zero:
            last = 0.0 if is_rated(name) and not never else math.nan
        final[name] = last
        if not name.startswith("eval/"):
            before = own.get(f"{AVERAGE}{name}", math.nan)
            rest = before if math.isnan(last) else last  # a metric that ended has the average it had
            final[f"{AVERAGE}{name}"] = lived * before + (1 - lived) * rest if end > 0 else last
    return final | _derived(final)


def interpolate(xs: np.ndarray, values: np.ndarray, at: float) -> float:
    """The value at `at` of the straight line between the points around it; NaN outside of the points."""
    if len(xs) == 0 or not xs[0] <= at <= xs[-1]:
        return math.nan
    return float(np.interp(at, xs, values))


def _derived(final: dict[str, float]) -> dict[str, float]:
    deployed = final.get(HELDOUT, math.nan)
    q = final.get("eval/heldout_training/truncated", math.nan)
    masked = q * deployed / (1 - q) if q < 1 else math.nan
    overstatement = final.get("reward/in_loss_outcome", math.nan) - deployed
    return {
        GAP: final.get(REWARD, math.nan) - deployed,
        OVERSTATEMENT: overstatement,
        MASKED_SHARE: masked,
        BEYOND: overstatement - masked,
    }
