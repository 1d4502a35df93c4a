"""Does training reward rank arms by entropy, or by accuracy? Deviations and rank correlations within base models.

Every value is an arm's deviation from the mean of all arms on the same base model, so that base models do not add to
the correlation. Rank correlations are within a base model, averaged over base models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import Interval

FEWEST = 6  # arms that a rank correlation is of
REWARD = "reward/outcome"
AGAINST = ("train/entropy", "eval/heldout/accuracy", DOWNSTREAM)  # what reward is held against


@dataclass(frozen=True)
class RankedLevel:
    """The arms of one level that were evaluated alike: [base model and arm, metric] deviations, and correlations."""

    values: pd.DataFrame
    correlations: Mapping[str, Interval]
    left_out: Sequence[str]


def ranked_levels(data: SweepData, finals: FinalValues) -> dict[str, RankedLevel]:
    """The levels with FEWEST arms or more that have all metrics."""
    found = {}
    metrics = [REWARD, *AGAINST]
    if not set(metrics) <= set(finals.values):
        return {}
    protocols = data.counted.groupby(["level", "arm"])["protocol"].first()
    for level in data.levels:
        own = finals.values[finals.values["level"] == level].dropna(subset=metrics)
        control = protocols.get((level, data.control))
        alike = [arm for arm in dict.fromkeys(own["arm"]) if protocols.get((level, arm)) == control]
        rows = own[own["arm"].isin(alike)]
        rows = rows.assign(base=[finals.bases.get(int(seed), -1) for seed in rows["seed"]])
        means = rows.groupby(["base", "arm"])[metrics].mean()
        if len(alike) < FEWEST or means.empty:
            continue
        correlations = {}
        for metric in AGAINST:
            by_base = [one[REWARD].corr(one[metric], method="spearman") for _, one in means.groupby(level="base")]
            correlations[metric] = mean_of_runs(by_base, list(range(len(by_base)))).within(-1.0, 1.0)
        deviations = means - means.groupby(level="base").transform("mean")
        left_out = [arm for arm in dict.fromkeys(own["arm"]) if arm not in alike]
        found[level] = RankedLevel(deviations.groupby(level="arm").mean(), correlations, left_out)
    return found


def correlations(data: SweepData, finals: FinalValues) -> Mapping[str, Interval]:
    """The rank correlation of training reward with each metric of AGAINST, of the first level that has them."""
    return next(iter(ranked_levels(data, finals).values())).correlations
