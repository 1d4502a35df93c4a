"""The rows of the forest figure, its band of effects too small to be found, and its numbers as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from grpo_lab.analysis.effects.contrast_plan import CONDITIONAL, planned_contrasts
from grpo_lab.analysis.effects.contrasts import TRAINING_REWARD, Disagreement, TrickEffect, disagreements, trick_effects
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL
from grpo_lab.analysis.stats.power import difference_sd, minimum_detectable_effect
from grpo_lab.config.design import Kind

PP = 100  # percentage points in one
BEYOND = "; arrowhead: it goes on beyond the panel"


@dataclass(frozen=True)
class Row:
    """The effects of one trick at one level on downstream accuracy and, by context, on training reward."""

    level: str
    trick: str
    effects: tuple[TrickEffect, ...]
    rewards: dict[str, TrickEffect]
    beside: TrickEffect | None  # what the trick gives in the whole beyond what it gives alone
    disagreements: dict[str, Disagreement]

    @property
    def lines(self) -> list[str]:
        """The trick as it is written beside its row."""
        return self.trick.replace(" with ", "\nwith ").split("\n")


def shown_kinds(data: SweepData) -> tuple[str, ...]:
    """Kinds of contrasts shown: both sides of a two-sided design, main effects of a full one, else every context."""
    if data.design is not None and data.design.kind is Kind.two_sided:
        return "added", "left_out"
    main = any(contrast.kind == "main" for contrast in planned_contrasts(data))
    return ("main",) if main else CONDITIONAL


def forest_rows(data: SweepData, finals: FinalValues) -> list[Row]:
    """What the figure shows, from the top: tricks in the kinds of `shown_kinds`, then pairs of tricks."""
    effects = trick_effects(data, finals, [DOWNSTREAM, TRAINING_REWARD])
    on = {metric: [e for e in effects if e.metric == metric] for metric in (DOWNSTREAM, TRAINING_REWARD)}
    kinds = shown_kinds(data)
    split = {(d.reward.contrast.level, d.reward.contrast.name): d for d in disagreements(effects)}
    rewards = {(e.contrast.level, e.contrast.name): e for e in on[TRAINING_REWARD]}
    rows = []
    for level in data.levels:
        here = [effect for effect in on[DOWNSTREAM] if effect.contrast.level == level]
        pairs = [effect for effect in here if effect.contrast.kind == "interaction"]
        for trick in [*data.tricks, *(e.contrast.trick for e in pairs if e.contrast.trick not in data.tricks)]:
            single = trick in data.tricks
            own = [e for e in here if e.contrast.trick == trick]
            shown = tuple(e for e in own if e.contrast.kind in (kinds if single else ("interaction",)))
            if not shown:
                continue
            names = [(level, effect.contrast.name) for effect in shown]
            beside = next((e for e in own if e.contrast.kind == "interaction"), None) if single else None
            seen = {name[1]: rewards[name] for name in names if name in rewards}
            apart = {name[1]: split[name] for name in names if name in split}
            rows.append(Row(level, trick, shown, seen, beside, apart))
    return rows


def noise_band(data: SweepData, finals: FinalValues, level: str, pairs: int) -> float:
    """The smallest true effect on downstream accuracy that `pairs` pairs find with 80% power, share; NaN for too few.

    It takes the scatter of the control's seeds, and no correlation with the seeds of another arm: what the sweep could
    have found, before anything is known of a trick.
    """
    control = finals.of(level, data.control, DOWNSTREAM)
    if len(control) < FOR_INTERVAL or pairs < FOR_INTERVAL:
        return math.nan
    return minimum_detectable_effect(difference_sd(float(control.std()), 0), pairs)


def forest_numbers(rows: Sequence[Row], bands: dict[str, float]) -> pd.DataFrame:
    """Every number drawn, percentage points, six decimals.

    `part` is "seed", "mean" (with the t interval, the pairs in n, and p_adjusted), or "band" (the ends in low and
    high). `disagreement` says whether reward and downstream go opposite ways: "resolved" or "within noise".
    """
    table = [{"level": level, "part": "band", "low": -end, "high": end} for level, end in bands.items()]
    for row in rows:
        for effect in (*row.effects, *row.rewards.values(), *([row.beside] if row.beside else [])):
            contrast, mean = effect.contrast, effect.interval
            labels = {"level": row.level, "trick": row.trick, "kind": contrast.kind, "context": contrast.context}
            labels |= {"metric": effect.metric, "disagreement": _word(row.disagreements.get(contrast.name))}
            if effect.metric == DOWNSTREAM:
                table += [labels | {"part": "seed", "seed": s, "value": v} for s, v in effect.differences.items()]
            ends = {"value": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n}
            counts = {"p_adjusted": effect.p_adjusted, "family": effect.family}
            counts["n_collapsed"] = effect.collapsed_with + effect.collapsed_without
            table.append(labels | {"part": "mean"} | ends | counts)
    names = ["level", "trick", "kind", "context", "metric", "part", "seed", "value", "low", "high", "n"]
    names += ["p_adjusted", "family", "n_collapsed", "disagreement"]
    frame = pd.DataFrame(table, columns=names)
    frame[["value", "low", "high"]] *= PP
    return frame.astype(dict.fromkeys(("seed", "n", "family", "n_collapsed"), "Int64")).round(6)


def _word(found: Disagreement | None) -> str:
    return "" if found is None else "resolved" if found.resolved else "within noise"
