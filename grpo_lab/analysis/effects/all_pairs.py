"""Which arms of a level are distinguishable on a metric: `stats.all_pairs` of final values."""

from __future__ import annotations

import pandas as pd

from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues, is_rated
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.all_pairs import FEWEST_ARMS, AllPairs, compare_all_pairs
from grpo_lab.analysis.stats.comparison import two_groups


def ranked_metrics(data: SweepData) -> list[str]:
    """The metrics on which all pairs of arms are compared: the declared primary one, and downstream accuracy."""
    return list(dict.fromkeys([*([data.design.primary] if data.design else []), DOWNSTREAM]))


def all_pairs(data: SweepData, finals: FinalValues, level: str, metric: str) -> AllPairs | None:
    """Every arm of a level against every other; None for fewer than three arms or two base models.

    An arm is not reported where `comparison` gives its mean no interval: some of its runs collapsed and others did not,
    or they fall into two groups. `stats.all_pairs` says where else.
    """
    values = {arm: finals.of(level, arm, metric) for arm in data.arms}
    values = {arm: own for arm, own in values.items() if len(own)}
    seeds = {int(str(seed)) for own in values.values() for seed in own.index}
    bases = {seed: base for seed, base in finals.bases.items() if seed in seeds}
    if len(values) < FEWEST_ARMS or len(set(bases.values())) < 2:
        return None
    not_reported: dict[str, str] = {}
    for arm, own in values.items():
        comparison = finals.compared(own, metric, (level, arm))
        groups = two_groups({int(str(seed)): float(one) for seed, one in own.items()}, bases)
        not_reported[arm] = comparison.whole.why if comparison.mixed else groups if is_rated(metric) else ""
    table = pd.DataFrame(values).loc[sorted(bases)]
    return compare_all_pairs(table, bases, {arm: why for arm, why in not_reported.items() if why})


def why_not(data: SweepData, finals: FinalValues, metric: str) -> str:
    """Why arms cannot be compared on a metric at any level, in one sentence part; empty where they can."""
    if metric not in finals.values or finals.values[metric].isna().all():
        return f"{metric} was not logged"
    if len(set(finals.bases.values())) < 2:
        return "all runs are of one base model, and arms are distinguished by how they differ from base to base"
    if all(all_pairs(data, finals, level, metric) is None for level in data.levels):
        return "no level has three arms on two base models"
    return ""
