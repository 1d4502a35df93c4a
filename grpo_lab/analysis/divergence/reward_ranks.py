"""Does training reward rank arms by entropy, or by accuracy? Deviations and rank correlations within base models.

Every value is an arm's deviation from the mean of all arms on the same base model, so that base models do not add to
the correlation. Rank correlations are within a base model, averaged over base models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.config.design import ALSO_RANKED, RANKED

FEWEST = 6  # arms that a rank correlation is of
REWARD = "reward/outcome"


@dataclass(frozen=True)
class RankedLevel:
    """The arms of one level that were evaluated alike: [arm, metric] deviations, and correlations by metric.

    The interval of a correlation is Student's t over base models, and may reach beyond -1 and 1.
    """

    values: pd.DataFrame
    correlations: Mapping[str, Interval]
    left_out: Sequence[str]


def ranked_levels(data: SweepData, finals: FinalValues) -> dict[str, RankedLevel]:
    """The levels with FEWEST arms or more that have all metrics."""
    found = {}
    metrics = [REWARD, *RANKED]
    if not set(metrics) <= set(finals.values):
        return {}
    protocols = data.counted.groupby(["level", "arm"])["protocol"].first()
    for level in data.levels:
        own = finals.values[finals.values["level"] == level].dropna(subset=metrics)
        control = protocols.get((level, data.control))
        alike = [arm for arm in dict.fromkeys(own["arm"]) if protocols.get((level, arm)) == control]
        rows = own[own["arm"].isin(alike)]
        rows = rows.assign(base=[finals.bases.get(int(seed), -1) for seed in rows["seed"]])
        also = [metric for metric in ALSO_RANKED if metric in rows and rows[metric].notna().all()]
        means = rows.groupby(["base", "arm"])[[*metrics, *also]].mean()
        if len(alike) < FEWEST or means.empty:
            continue
        correlations = {}
        for metric in (*RANKED, *also):
            by_base = [_spearman(one[REWARD], one[metric]) for _, one in means.groupby(level="base")]
            correlations[metric] = mean_of_runs(by_base, list(range(len(by_base))))
        deviations = means - means.groupby(level="base").transform("mean")
        left_out = [arm for arm in dict.fromkeys(own["arm"]) if arm not in alike]
        found[level] = RankedLevel(deviations.groupby(level="arm").mean(), correlations, left_out)
    return found


def _spearman(reward: pd.Series, metric: pd.Series) -> float:
    """NaN where one of them is the same in all arms."""
    return reward.corr(metric, method="spearman") if min(reward.nunique(), metric.nunique()) > 1 else math.nan
