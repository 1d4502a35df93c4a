"""One trick in depth, as tables: its effects, what it touched, and what more seeds could find."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from grpo_lab.analysis.effects.contrast_plan import CONDITIONAL
from grpo_lab.analysis.effects.contrasts import TRAINING_REWARD, TrickEffect, effects_on_axes, sign_flips, trick_effects
from grpo_lab.analysis.figures.step_metrics import STEP_METRICS, draw_step_metrics
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import AVERAGE, DOWNSTREAM, FinalValues
from grpo_lab.analysis.metric_names import change_text, level_text, title
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.stats.multiplicity import p_text
from grpo_lab.analysis.stats.power import minimum_detectable_effect
from grpo_lab.analysis.tables.step_curves import own_axes

SEEDS = (3, 5, 10, 20, 40)


def chosen_trick(data: SweepData, name: str) -> str:
    """The trick of this name; the first one for an empty name. Raises ValueError, with what there is, for others."""
    if not data.tricks:
        raise ValueError(f"{data.record.name} has one arm and no trick: choose another sweep with EXP=...")
    if name and name not in data.tricks:
        raise ValueError(f"{data.record.name} has no trick {name!r}: set TRICK to one of {', '.join(data.tricks)}")
    return name or data.tricks[0]


def effects_of(
    data: SweepData, finals: FinalValues, trick: str, metrics: Iterable[str] | None = None
) -> list[TrickEffect]:
    """The trick's contrasts; p-values are adjusted for the whole family they belong to, other tricks included."""
    return _of(trick, trick_effects(data, finals, metrics))


def _of(trick: str, effects: Iterable[TrickEffect]) -> list[TrickEffect]:
    """The contrasts of the trick, alone or in a pair."""
    return [effect for effect in effects if trick in effect.contrast.trick.split(" with ")]


def on_axes(data: SweepData, trick: str, metric: str) -> tuple[pd.DataFrame, list[str]]:
    """The trick's contrasts on one metric, a column for each axis on which arms were compared, and the sign flips."""
    at = effects_on_axes(data, [metric])
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for axis, compared in at.items():
        for effect in _of(trick, compared.effects):
            row = rows.setdefault((effect.contrast.level, effect.contrast.name), _labels(effect))
            row[f"at equal {axis.replace('_', ' ')}"] = change_text(effect.interval, metric)
    named = {(level, name) for level, name in rows}
    flips = [flip for flip in sign_flips(at) if (flip.contrast.level, flip.contrast.name) in named]
    return pd.DataFrame(rows.values()), [flip.text for flip in flips]


def effect_rows(effects: Iterable[TrickEffect]) -> pd.DataFrame:
    """One row per metric, a column for each contrast: the effect with its interval, and p adjusted for its family."""
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for effect in effects:
        level, contrast = _labels(effect).values()
        row = rows.setdefault((level, effect.metric), {"level": level, "metric": title(effect.metric)})
        row[contrast] = _effect(effect)
        known = {*filter(None, row.pop("pairs", "").split(", ")), str(effect.n_pairs)}
        row["pairs"] = ", ".join(sorted(known))
    return pd.DataFrame(rows.values())


def _effect(effect: TrickEffect) -> str:
    text = change_text(effect.interval, effect.metric)
    if not math.isnan(effect.p_adjusted):
        text += f", {p_text(effect.p_adjusted, ' ')}"
    if effect.collapsed_with or effect.collapsed_without:
        text += f"; {effect.collapsed_with} collapsed with it, {effect.collapsed_without} without"
    return text


def by_seed(effects: Sequence[TrickEffect]) -> pd.DataFrame:
    """One row per contrast and metric, a column for each seed: its own difference, in words."""
    seeds = sorted({seed for effect in effects for seed in effect.differences})
    return pd.DataFrame(
        {
            **_labels(effect),
            "metric": title(effect.metric),
            **{f"seed {seed}": _single(effect, seed) for seed in seeds},
        }
        for effect in effects
    )


def _labels(effect: TrickEffect) -> dict[str, str]:
    contrast = effect.contrast
    pair = f"{contrast.trick}, " if " with " in contrast.trick else ""
    kind = "" if contrast.kind in CONDITIONAL else f"{contrast.kind}: "
    return {"level": contrast.level, "contrast": f"{kind}{pair}{contrast.context}"}


def _single(effect: TrickEffect, seed: int) -> str:
    if seed not in effect.differences:
        return ""
    return change_text(Interval(effect.differences[seed], math.nan, math.nan, 1), effect.metric)


def logged_step_metrics(data: SweepData) -> list[str]:
    """The step metrics that were logged and are not 0 throughout."""
    logged = [shown.metric for shown in STEP_METRICS if shown.metric in data.points]
    return [name for name in logged if np.nansum(np.abs(data.finished_points[name])) > 0]


def step_metrics_of(data: SweepData, finals: FinalValues, trick: str) -> Drawn | str:
    """The figure of step metrics with the control and the arms that the trick's contrasts compare, or why not."""
    compared = _of(trick, trick_effects(data, finals, [DOWNSTREAM, TRAINING_REWARD]))
    arms = {data.control, *(arm for effect in compared for arm in effect.contrast.weights)}
    tables = {name: getattr(data, name) for name in ("runs", "points", "answers")}
    few = replace(data, **{name: table[table["arm"].isin(arms)] for name, table in tables.items()})
    return draw_step_metrics(few, finals)


def touched(data: SweepData, finals: FinalValues, trick: str) -> pd.DataFrame:
    """The share that the tricks of an arm touched, mean over the run, of every arm that has this trick.

    No row where no metric counts what its tricks touch.
    """
    rows, own = [], own_axes(data)
    for level, arm in data.run_arms:
        for name in own[arm] if trick in data.contents(arm) else ():
            share = finals.interval(level, arm, f"{AVERAGE}{name}")
            row = {"level": level, "arm": arm, "metric": name, "share touched": level_text(share, name)}
            rows.append(row | {"runs": share.n})
    return pd.DataFrame(rows)


def seeds_would_find(effects: Iterable[TrickEffect], seeds: Sequence[int] = SEEDS) -> pd.DataFrame:
    """The smallest true effect that so many pairs of this scatter find with 80% power, beside the effect measured.

    Of contrasts with two pairs or more; the scatter of few pairs is itself rough.
    """
    rows = []
    for effect in (effect for effect in effects if effect.n_pairs > 1):
        sd = float(np.std(list(effect.differences.values()), ddof=1))
        row = {**_labels(effect), "metric": title(effect.metric)}
        row |= {"effect": change_text(effect.interval, effect.metric), "pairs": effect.n_pairs}
        row |= {"finds now": _size(effect.mde, effect.metric)}
        rows.append(row | {f"{n} seeds": _size(minimum_detectable_effect(sd, n), effect.metric) for n in seeds})
    return pd.DataFrame(rows)


def _size(value: float, metric: str) -> str:
    return change_text(Interval(value, math.nan, math.nan, 1), metric).removeprefix("+")
