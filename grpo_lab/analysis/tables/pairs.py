"""Every arm against every other on the primary metric and downstream accuracy, as a tidy table."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.effects.all_pairs import all_pairs, ranked_metrics
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.all_pairs import AllPairs

_COLUMNS = ["level", "metric", "arm", "part", "other", "value", "low", "high", "rank", "best", "worst", "not_reported"]
_SIDES = {1: "above", -1: "below", 0: ""}


def all_pairs_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Means, ranks and pairs of arms, six decimals, in the metric's unit; arms from the largest mean to the smallest.

    `part` is "base" (in `value` the mean on a base, less what it adds to all arms), "mean" (with the bar in low and
    high, the arm's rank and the best and worst it can have; `not_reported` says why there is no bar; `side` is
    "control", or "above" or "below" the control where significant), or "pair" (arm less `other`, its simultaneous p,
    and whether they are distinguishable). Levels on whose primary metric fewer than three arms on two base models are
    compared have no row.
    """
    rows: list[dict[str, Any]] = []
    first, *others = ranked_metrics(data)
    for level in data.levels:
        if all_pairs(data, finals, level, first):
            for metric in (first, *others):
                found = all_pairs(data, finals, level, metric)
                rows += (
                    [{"level": level, "metric": metric, **row} for row in _rows(found, data.control)] if found else []
                )
    table = pd.DataFrame(rows, columns=[*_COLUMNS, "p", "distinguishable", "side"])
    return table.astype(dict.fromkeys(("rank", "best", "worst"), "Int64") | {"distinguishable": "boolean"}).round(6)


def _rows(pairs: AllPairs, control: str) -> Iterator[dict[str, Any]]:
    order = np.argsort(-pairs.means, kind="stable")
    against = pairs.distinguishable[:, pairs.arms.index(control)] if control in pairs.arms else np.zeros(len(order))
    for rank, index in enumerate(order, start=1):
        arm, mean, half = pairs.arms[index], float(pairs.means[index]), float(pairs.halves[index])
        own = pairs.by_base[:, index]
        yield from ({"arm": arm, "part": "base", "value": value} for value in own if not math.isnan(value))
        best, worst = pairs.ranks(arm)
        row = {"arm": arm, "part": "mean", "value": mean, "low": mean - half, "high": mean + half}
        row |= {"rank": rank, "best": best, "worst": worst, "not_reported": pairs.not_reported.get(arm, "")}
        yield row | {"side": "control" if arm == control else _SIDES[int(against[index])]}
    for place, index in enumerate(order):
        for other in order[place + 1 :]:
            row = {"arm": pairs.arms[index], "part": "pair", "other": pairs.arms[other]}
            row |= {"value": pairs.differences[index, other], "p": pairs.p[index, other]}
            yield row | {"distinguishable": bool(pairs.distinguishable[index, other])}
