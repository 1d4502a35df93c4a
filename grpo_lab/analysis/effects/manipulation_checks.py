"""Manipulation checks: whether an arm's metric differs from its control's as much as the experiment requires."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.tracking.metrics import is_active_fraction
from grpo_lab.tracking.renames import metric_name


@dataclass(frozen=True)
class ManipulationCheck:
    """One requirement and what was measured: means over steps, then over seeds, and over base models at equal weight.

    `arm_mean`, `control_mean` and `least` are in the metric's unit; `runs` is the number of pairs of runs.
    """

    level: str
    arm: str
    metric: str
    control: str
    arm_mean: float
    control_mean: float
    least: float
    runs: int

    @property
    def passed(self) -> bool:
        """True if the arm is at least as far from its control as required; False where the metric was not logged."""
        return abs(self.arm_mean - self.control_mean) >= self.least

    @property
    def reason(self) -> str:
        """The numbers, such as `active_fraction/scale 0.01 beside 0.01 in base, difference 0; required 0.005`."""
        apart = self.arm_mean - self.control_mean
        if math.isnan(apart):
            return f"{self.metric} is not in the data; required {self.least:g} from {self.control}"
        return (
            f"{self.metric} {self.arm_mean:.4g} beside {self.control_mean:.4g} in {self.control}, "
            f"difference {apart:+.2g}; required {self.least:g}"
        )


def manipulation_checks(data: SweepData) -> list[ManipulationCheck]:
    """One check for every requirement of the design and every level at which its arm and its control have runs.

    A run's value is its mean over the training steps that logged it. Runs are paired by seed. A metric of the family
    active_fraction/* that some runs logged counts as 0 in those that did not.
    """
    if data.design is None or not data.design.requires:
        return []
    metrics = list(dict.fromkeys(metric for required in data.design.requires.values() for metric in required))
    means = run_means(data, metrics)
    found = []
    for level in data.levels:
        for arm, required in data.design.requires.items():
            pair = [means.get((level, name)) for name in (arm, data.control)]
            if pair[0] is None or pair[1] is None:
                continue
            seeds = pair[0].index.intersection(pair[1].index)
            if not len(seeds):
                continue
            for metric, least in required.items():
                here, there = (_over_bases(own.loc[seeds, ["base", metric]], metric) for own in pair if own is not None)
                found.append(ManipulationCheck(level, arm, metric, data.control, here, there, least, len(seeds)))
    return found


def run_means(data: SweepData, metrics: Iterable[str]) -> dict[tuple[str, str], pd.DataFrame]:
    """(level, arm) -> for each seed (the index) the base, and every metric's mean over the training steps."""
    points = data.counted_columns(metrics)
    points = points[points["step"] > 0]
    points = points.assign(**{name: float("nan") for name in metrics if name not in points})
    means = points.groupby(LABELS, sort=False)[list(metrics)].mean()
    logged = [name for name in metrics if is_active_fraction(name) and means[name].notna().any()]
    means = means.fillna(dict.fromkeys(logged, 0.0)).reset_index()
    means = means.merge(data.runs[[*LABELS, "base"]], on=LABELS)
    return {labels: own.set_index("seed") for labels, own in groups_of(means, ["level", "arm"], sort=False)}


def _over_bases(own: pd.DataFrame, metric: str) -> float:
    return float(own.groupby("base")[metric].mean().mean())


def failed_checks(data: SweepData) -> dict[tuple[str, str], str]:
    """(level, arm) -> reason, for every arm that fails a manipulation check of the design.

    The sweep's own runs decide where there are some; elsewhere its pilot does.
    """
    measured = manipulation_checks(data)
    places = {(check.level, check.arm) for check in measured}
    reasons = _reasons(measured, "")
    piloted = [check for check in map(from_record, data.record.pilot) if (check.level, check.arm) not in places]
    return reasons | _reasons(piloted, " in the pilot")


def _reasons(measured: Iterable[ManipulationCheck], where: str) -> dict[tuple[str, str], str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for check in measured:
        if not check.passed:
            reasons.setdefault((check.level, check.arm), []).append(check.reason + where)
    return {place: "; ".join(lines) for place, lines in reasons.items()}


def from_record(entry: Mapping[str, Any]) -> ManipulationCheck:
    """The check that a sweep's record holds of its pilot."""
    return ManipulationCheck(**{**entry, "metric": metric_name(entry["metric"])})
