"""Curves of step metrics, with the share that an arm's own tricks touch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import row_at
from grpo_lab.analysis.tables.curves import curves_of, means_of
from grpo_lab.tracking.metrics import fraction_metric, is_active_fraction

OWN = "active_fraction/own"  # the largest share that an arm's own tricks touch


def own_axes(data: SweepData) -> dict[str, list[str]]:
    """For every arm the active_fraction/* that belong to its own tricks.

    Those its overrides name; where they name none, as a recipe's name does, those that it touches and the control
    never does.
    """
    tricks = data.design.tricks if data.design else {}
    fractions = [name for name in data.points.columns if is_active_fraction(name)]
    most = data.counted_points.groupby("arm")[fractions].max().reindex(data.arms).fillna(0.0)
    found = {}
    for arm in data.arms:
        words = [word for trick in sorted(data.contents(arm)) for word in tricks.get(trick, (trick,))]
        named = {fraction_metric(word.lstrip("+").partition("=")[0].partition(".")[0]) for word in words}
        if words and not named & set(fractions):
            here, plain = row_at(most, arm), row_at(most, data.control)
            named = {name for name in fractions if here[name] > 0 and not plain[name] > 0}
        found[arm] = [name for name in fractions if name in named]
    return found


def step_curves(data: SweepData, finals: FinalValues, metrics: Sequence[str]) -> pd.DataFrame:
    """The columns of `curves_of` for these metrics, of which OWN may be one."""
    own = pd.Series(math.nan, index=data.points.index)
    for arm, names in own_axes(data).items():
        here = data.points["arm"] == arm
        own[here] = data.points.loc[here, names].max(axis=1) if names else math.nan
    with_own = replace(data, points=data.points.copy().assign(**{OWN: own}))  # in one piece, or pandas warns
    return curves_of(with_own, finals, metrics)


def with_control(curves: pd.DataFrame, data: SweepData, finals: FinalValues, most: int, furthest: int) -> pd.DataFrame:
    """The curves of one metric at one level of at most `most` arms: of more, the control and the `furthest` from it.

    The distance is that of the ends of means. An arm of which every run collapsed has no mean, and is as far as can be.
    """
    arms = [arm for arm in data.arms if arm in set(curves["arm"])]
    if len(arms) <= most:
        return curves
    ends = means_of(curves, finals).groupby("arm")["value"].last().reindex(arms)
    middle = ends.get(data.control, math.nan)
    distance = (ends - (ends.median() if math.isnan(middle) else middle)).abs().fillna(math.inf)
    far = distance.drop(data.control, errors="ignore").sort_values(ascending=False, kind="stable").index[:furthest]
    return curves[curves["arm"].isin([data.control, *far])]
