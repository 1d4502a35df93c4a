"""Effects of tricks by single seed and on the mean, at the common budget and at other equal budgets, as tidy tables.

Shares are in percentage points here. The columns of both tables begin with

    level, trick, kind, context   what is contrasted; `name` is trick and context in words
    metric                        what is measured
    part, seed                    "seed" (the difference of one pair of runs) or "mean" (over n pairs)
    value, low, high, n           with the 95% t interval of the mean; `text` is the mean with its interval in words
    p_adjusted, family, correction
    n_collapsed                   collapsed runs in the arms of the contrast
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pandas as pd

from grpo_lab.analysis.effects.contrast_plan import CONDITIONAL, TWINS, planned_contrasts
from grpo_lab.analysis.effects.contrasts import (
    TRAINING_REWARD,
    TrickEffect,
    disagreements,
    effects_on_axes,
    sign_flips,
    trick_effects,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL
from grpo_lab.analysis.stats.power import difference_sd, minimum_detectable_effect
from grpo_lab.analysis.tables.rows import seeds_and_mean
from grpo_lab.config.design import Kind
from grpo_lab.tracking.metrics import find, is_known, logged_name

PP = 100  # percentage points in one
_COLUMNS = ["level", "trick", "kind", "context", "metric", "part", "seed", "value", "low", "high", "n"]
_COLUMNS += ["p_adjusted", "family", "n_collapsed", "name", "text", "correction"]


def shown_kinds(data: SweepData) -> tuple[str, ...]:
    """Kinds of contrasts shown: both sides of a two-sided design, main effects of a full one, else every context."""
    if data.design is not None and data.design.kind is Kind.two_sided:
        return ("added", "left_out", *TWINS)
    main = any(contrast.kind == "main" for contrast in planned_contrasts(data))
    return ("main", *TWINS) if main else (*CONDITIONAL, *TWINS)


def forest_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Effects on downstream accuracy and training reward: of tricks in the kinds of `shown_kinds`, and of pairs.

    `role` is "effect", or "beside" for what a trick gives in the whole beyond what it gives alone. `disagreement` says
    whether reward and downstream go opposite ways: "resolved" or "within noise". Rows are in declared order.
    """
    effects = trick_effects(data, finals, [DOWNSTREAM, TRAINING_REWARD])
    roles = {(e.contrast.level, e.contrast.name): _role(data, e) for e in effects if e.metric == DOWNSTREAM}
    shown = {(e.contrast.level, e.contrast.trick) for e in effects if _key(e) in roles and roles[_key(e)] == "effect"}
    split = {_key(found.reward): _word(found.significant) for found in disagreements(effects)}
    rows: list[dict[str, Any]] = []
    for effect in effects:
        role = roles.get(_key(effect), "")
        if not role or (effect.contrast.level, effect.contrast.trick) not in shown:
            continue
        if role == "effect" or effect.metric == DOWNSTREAM:
            more = {"role": role, "disagreement": split.get(_key(effect), "")}
            rows += [row | more for row in _rows(effect, PP)]
    return _in_order(data, pd.DataFrame(rows, columns=[*_COLUMNS, "role", "disagreement"]))


def _role(data: SweepData, effect: TrickEffect) -> str:
    single, kind = effect.contrast.trick in data.tricks, effect.contrast.kind
    if kind in (shown_kinds(data) if single else ("interaction",)):
        return "effect"
    return "beside" if kind == "interaction" else ""


def effects_at_budgets(data: SweepData, metrics: Iterable[str], axes: Iterable[str]) -> pd.DataFrame:
    """The same contrasts at equal steps, tokens, operations and seconds, of tricks and of whole arms.

    `axis` and `budget` say what is equal. `flip` says whether the contrast's sign depends on the axis: "resolved" or
    "within noise".
    """
    on_axes = effects_on_axes(data, tuple(metrics), axes)
    kinds = (*shown_kinds(data), "whole")
    found = sign_flips(on_axes)
    flips = {(flip.metric, flip.contrast.level, flip.contrast.name): _word(flip.significant) for flip in found}
    rows: list[dict[str, Any]] = []
    for axis, at in on_axes.items():
        for effect in (effect for effect in at.effects if effect.contrast.kind in kinds):
            more = {"axis": axis, "budget": at.finals.budget, "flip": flips.get((effect.metric, *_key(effect)), "")}
            rows += [row | more for row in _rows(effect, scale_of(effect.metric))]
    return _in_order(data, pd.DataFrame(rows, columns=[*_COLUMNS, "axis", "budget", "flip"]))


def noise_bands(data: SweepData, finals: FinalValues, effects: pd.DataFrame) -> pd.DataFrame:
    """The `noise_band` of levels that have one, for the most pairs of any effect: level, part "band", low, high."""
    ends = {level: PP * noise_band(data, finals, level, int(effects["n"].max())) for level in effects["level"].unique()}
    rows = [{"level": level, "part": "band", "low": -end, "high": end} for level, end in ends.items()]
    return pd.DataFrame(rows).dropna().round(6)


def noise_band(data: SweepData, finals: FinalValues, level: str, pairs: int) -> float:
    """The smallest true effect on downstream accuracy that `pairs` pairs find with 80% power, share; NaN for too few.

    It takes the scatter of the control's seeds, and no correlation with the seeds of another arm: what the sweep could
    have found, before anything is known of a trick.
    """
    control = finals.of(level, data.control, DOWNSTREAM)
    if len(control) < FOR_INTERVAL or pairs < FOR_INTERVAL:
        return math.nan
    return minimum_detectable_effect(difference_sd(float(control.std()), 0), pairs)


def scale_of(metric: str) -> int:
    """The factor by which a metric is shown: 100 for shares, as percentage points."""
    return PP if shown_unit(metric) == "percentage points" else 1


def shown_unit(metric: str) -> str:
    """The unit in which a difference of the metric is shown."""
    name = logged_name(metric)
    unit = find(name).unit if is_known(name) and "/" in name else "share"  # what is derived is a share
    return "percentage points" if unit == "share" else unit


def _rows(effect: TrickEffect, scale: int) -> Iterator[dict[str, Any]]:
    contrast, text = effect.contrast, effect.interval.scaled(scale).written("{:+.1f}".format)
    labels = {"level": contrast.level, "trick": contrast.trick, "kind": contrast.kind, "context": contrast.context}
    labels |= {"metric": effect.metric, "name": contrast.name}
    more = {"p_adjusted": effect.p_adjusted, "family": effect.family, "correction": effect.correction, "text": text}
    more["n_collapsed"] = effect.collapsed_with + effect.collapsed_without
    for row in seeds_and_mean(labels, effect.differences, effect.interval, scale):
        yield row | more if row["part"] == "mean" else row


def _in_order(data: SweepData, table: pd.DataFrame) -> pd.DataFrame:
    """By level, then tricks as declared, then pairs of tricks."""
    tricks = list(dict.fromkeys([*data.tricks, *table["trick"]]))
    places: Mapping[str, Any] = {"level": data.levels.index, "trick": tricks.index}
    ordered = table.sort_values(["level", "trick"], kind="stable", key=lambda own: own.map(places[str(own.name)]))
    whole = dict.fromkeys(("seed", "n", "family", "n_collapsed"), "Int64")
    return ordered.astype(whole).round(6).reset_index(drop=True)


def _key(effect: TrickEffect) -> tuple[str, str]:
    return effect.contrast.level, effect.contrast.name


def _word(significant: bool) -> str:
    return "resolved" if significant else "within noise"
