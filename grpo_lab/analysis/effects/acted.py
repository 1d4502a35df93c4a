"""Whether tricks acted as their experiment requires: what an arm's metric is apart from its control's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.tracking.metrics import is_touched


@dataclass(frozen=True)
class Action:
    """One requirement and what was measured: means over steps, then over seeds, and over bases at equal weight.

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
    def acts(self) -> bool:
        """Whether the arm is at least as far from its control as required; not so where the metric was not logged."""
        return abs(self.arm_mean - self.control_mean) >= self.least

    @property
    def reason(self) -> str:
        """The numbers in words, such as `touched/scale 0.01 beside 0.01 in base, apart by 0; required 0.005`."""
        apart = self.arm_mean - self.control_mean
        if math.isnan(apart):
            return f"{self.metric} is not in the data; required {self.least:g} from {self.control}"
        return (
            f"{self.metric} {self.arm_mean:.4g} beside {self.control_mean:.4g} in {self.control}, "
            f"apart by {apart:+.2g}; required {self.least:g}"
        )


def actions(data: SweepData) -> list[Action]:
    """What every requirement of the design came to, for the levels at which its arm and its control have runs.

    A run's value is its mean over the training steps that logged it. Runs are paired by seed. A metric of the family
    touched/* that some runs logged counts as 0 in those that did not.
    """
    if data.design is None or not data.design.requires:
        return []
    metrics = list(dict.fromkeys(metric for asked in data.design.requires.values() for metric in asked))
    means = run_means(data, metrics)
    found = []
    for level in data.levels:
        for arm, asked in data.design.requires.items():
            pair = [means.get((level, name)) for name in (arm, data.control)]
            if pair[0] is None or pair[1] is None:
                continue
            seeds = pair[0].index.intersection(pair[1].index)
            if not len(seeds):
                continue
            for metric, least in asked.items():
                here, there = (_over_bases(own.loc[seeds, ["base", metric]], metric) for own in pair if own is not None)
                found.append(Action(level, arm, metric, data.control, here, there, least, len(seeds)))
    return found


def run_means(data: SweepData, metrics: Iterable[str]) -> dict[tuple[str, str], pd.DataFrame]:
    """(level, arm) -> for each seed (the index) the base, and every metric's mean over the training steps."""
    points = data.counted_columns(metrics)
    points = points[points["step"] > 0]
    points = points.assign(**{name: float("nan") for name in metrics if name not in points})
    means = points.groupby(LABELS, sort=False)[list(metrics)].mean()
    logged = [name for name in metrics if is_touched(name) and means[name].notna().any()]
    means = means.fillna(dict.fromkeys(logged, 0.0)).reset_index()
    means = means.merge(data.runs[[*LABELS, "base"]], on=LABELS)
    return {labels: own.set_index("seed") for labels, own in groups_of(means, ["level", "arm"], sort=False)}


def _over_bases(own: pd.DataFrame, metric: str) -> float:
    return float(own.groupby("base")[metric].mean().mean())


def could_not_act(data: SweepData) -> dict[tuple[str, str], str]:
    """(level, arm) -> why its trick could not act, for every arm that falls short of what the design requires.

    The sweep's own runs decide where there are some; elsewhere its pilot does.
    """
    measured = actions(data)
    places = {(action.level, action.arm) for action in measured}
    reasons = _reasons(measured, "")
    piloted = [action for action in map(from_record, data.record.pilot) if (action.level, action.arm) not in places]
    return reasons | _reasons(piloted, " in the pilot")


def _reasons(measured: Iterable[Action], where: str) -> dict[tuple[str, str], str]:
    said: dict[tuple[str, str], list[str]] = {}
    for action in measured:
        if not action.acts:
            said.setdefault((action.level, action.arm), []).append(action.reason + where)
    return {place: "; ".join(lines) for place, lines in said.items()}


def from_record(entry: Mapping[str, Any]) -> Action:
    """The action that a sweep's record holds of its pilot."""
    return Action(**entry)
