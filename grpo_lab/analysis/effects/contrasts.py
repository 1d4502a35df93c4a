"""The effect of every trick on every metric, paired by seed, at one budget or at several; tables of them.

`contrast_plan` says which contrasts a sweep has. An effect is a contrast over the seeds that all of its arms have, for
a new base model where they are of several (`stats.comparison`). Contrasts that share an arm share its noise: where the
control's seeds were good, every trick added to it looks worse.

A family of tests is all effects of one kind on one metric, over all levels. On the declared primary metric p is
adjusted by Holm (confirmatory), on every other by Benjamini and Hochberg (screening). Intervals are not adjusted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from grpo_lab.analysis.effects.contrast_plan import KINDS, Contrast, not_run, order_warning, planned_contrasts
from grpo_lab.analysis.final_values import (
    DOWNSTREAM,
    HELDOUT,
    QUANTITIES,
    REWARD,
    FinalValues,
    final_values,
    is_rated,
)
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.stats.comparison import Comparison
from grpo_lab.analysis.stats.intervals import NOT_REPORTED_MEANS, Interval
from grpo_lab.analysis.stats.multiplicity import ALPHA, benjamini_hochberg, holm, p_text
from grpo_lab.analysis.stats.power import minimum_detectable_effect
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tracks import EVALUATED, TRAINING
from grpo_lab.tracking.metrics import SUITES, logged_name

AXES = ("steps", "sampled_tokens", "trained_tokens", "flops", "simulated_seconds", "device_seconds")
TRAINING_REWARD = TRAINING["reward"]
HOLM, SCREENING = "Holm", "Benjamini-Hochberg"
# What the derived quantities are made of.
_PARTS = (REWARD, HELDOUT, "reward/in_loss_outcome", "eval/heldout_training/truncated", "active_fraction/truncation")


@dataclass(frozen=True)
class TrickEffect:
    """A contrast on one metric, in the metric's unit, over n seeds that all of its arms have.

    `p` is that of the comparison, NaN for one pair; `p_adjusted` is p adjusted by `correction` over `family` tests.
    `mde` is the smallest true effect that such a design with this scatter finds with 80% power, NaN where the interval
    is not reported. `harm` is the chance to lose more than 2 points on a new base model, of an accuracy or a reward.
    `collapsed_with` counts the collapsed runs in arms that have the trick, `collapsed_without` those in the other arms.
    """

    contrast: Contrast
    metric: str
    differences: Mapping[int, float]  # by seed
    comparison: Comparison
    p_adjusted: float
    correction: str
    family: int
    mde: float
    harm: float
    collapsed_with: int
    collapsed_without: int

    @property
    def interval(self) -> Interval:
        """Over all pairs; without bounds, and with the reason, where it is not reported."""
        return self.comparison.whole

    @property
    def p(self) -> float:
        """Two-sided, of no effect, before it is adjusted."""
        return self.comparison.p

    @property
    def n_pairs(self) -> int:
        """Seeds that all arms of the contrast have."""
        return self.interval.n

    @property
    def significant(self) -> bool:
        """True if the effect is significant: the adjusted p is below .05."""
        return self.p_adjusted < ALPHA and self.comparison.sign != 0


@dataclass(frozen=True)
class Disagreement:
    """A trick that raises training reward and lowers downstream accuracy, or the reverse.

    `significant` says that both adjusted p are below .05. Otherwise only the estimates have opposite signs.
    """

    reward: TrickEffect
    downstream: TrickEffect
    significant: bool

    @property
    def text(self) -> str:
        """The disagreement in one sentence part, shares."""
        sure = "both adjusted p are below .05" if self.significant else "within noise"
        return (
            f"{self.reward.contrast.name} changes training reward by {self.reward.interval.text('+')} and downstream "
            f"accuracy by {self.downstream.interval.text('+')}: {sure}"
        )


def effect_metrics(data: SweepData) -> list[str]:
    """The metrics reported of every contrast: the primary one, training reward, evaluations, then the columns."""
    declared = [data.design.primary] if data.design else []
    columns = data.design.columns if data.design else ()
    return list(dict.fromkeys([*declared, TRAINING_REWARD, *EVALUATED.values(), *columns]))


def trick_effects(data: SweepData, finals: FinalValues, metrics: Iterable[str] | None = None) -> list[TrickEffect]:
    """Every contrast on every metric (those of `effect_metrics` unless named) for which at least one seed has values.

    p-values are adjusted within their family.
    """
    primary = data.declaration.primary if data.declaration else None
    planned = planned_contrasts(data)
    collapsed = {
        condition: int(runs["collapsed"].sum()) for condition, runs in groups_of(finals.values, ["level", "arm"])
    }
    found = []
    for metric in dict.fromkeys(effect_metrics(data) if metrics is None else metrics):
        final = _by_seed(finals, metric)
        effects = [_effect(contrast, metric, final, collapsed, finals) for contrast in planned]
        for kind in KINDS:
            family = [effect for effect in effects if effect.contrast.kind == kind and effect.n_pairs]
            found += _adjusted(family, HOLM if metric == primary else SCREENING)
    return found


def _by_seed(finals: FinalValues, metric: str) -> dict[tuple[str, str], dict[int, float]]:
    """(level, arm) -> seed -> final value, of the runs that have one."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    if metric in finals.values:
        for level, arm, seed, value in zip(*(finals.values[name] for name in (*LABELS, metric))):
            if not math.isnan(value):
                found.setdefault((level, arm), {})[int(seed)] = float(value)
    return found


def _effect(
    contrast: Contrast,
    metric: str,
    final: Mapping[tuple[str, str], Mapping[int, float]],
    of_arms: Mapping[tuple[str, str], int],
    finals: FinalValues,
) -> TrickEffect:
    arms = [(final.get((contrast.level, arm), {}), weight) for arm, weight in contrast.weights.items()]
    seeds = sorted(set.intersection(*(set(by_seed) for by_seed, _ in arms)))
    values = [sum(weight * by_seed[seed] for by_seed, weight in arms) for seed in seeds]
    differences = dict(zip(seeds, values))
    comparison = finals.compared(differences, metric, *((contrast.level, arm) for arm in contrast.weights))
    bounded, n = not math.isnan(comparison.whole.low), len(comparison.observed)
    mde = float(np.std(comparison.observed, ddof=1)) * _unit_mde(n) if bounded else math.nan
    collapsed = {arm: of_arms.get((contrast.level, arm), 0) for arm in contrast.weights}
    having = sum(number for arm, number in collapsed.items() if arm in contrast.having)
    return TrickEffect(
        contrast=contrast,
        metric=metric,
        differences=differences,
        comparison=comparison,
        p_adjusted=math.nan,
        correction="",
        family=0,
        mde=mde,
        harm=comparison.harm() if is_rated(metric) else math.nan,
        collapsed_with=having,
        collapsed_without=sum(collapsed.values()) - having,
    )


@cache
def _unit_mde(n: int) -> float:
    return minimum_detectable_effect(1, n)


def _adjusted(effects: Sequence[TrickEffect], correction: str) -> list[TrickEffect]:
    """One family; what has no p, a single pair of runs or an infinite difference, is no test of it."""
    tested = [effect.p for effect in effects if not math.isnan(effect.p)]
    adjusted = iter((holm if correction == HOLM else benjamini_hochberg)(tested) if tested else ())
    return [
        replace(effect, p_adjusted=float(next(adjusted)), correction=correction, family=len(tested))
        if not math.isnan(effect.p)
        else effect
        for effect in effects
    ]


def disagreements(effects: Iterable[TrickEffect]) -> list[Disagreement]:
    """The tricks whose effects on training reward and on downstream accuracy have opposite signs.

    Significant ones come first. Interactions are not effects of one trick and are left out.
    """
    found = []
    by_metric: dict[str, list[TrickEffect]] = {TRAINING_REWARD: [], DOWNSTREAM: []}
    for effect in effects:
        if effect.metric in by_metric and effect.contrast.kind != "interaction":
            by_metric[effect.metric].append(effect)
    downstream = {(effect.contrast.level, effect.contrast.name): effect for effect in by_metric[DOWNSTREAM]}
    for effect in by_metric[TRAINING_REWARD]:
        other = downstream.get((effect.contrast.level, effect.contrast.name))
        if other and effect.interval.mean * other.interval.mean < 0:
            found.append(Disagreement(effect, other, effect.significant and other.significant))
    return sorted(found, key=lambda disagreement: not disagreement.significant)


# --- at other budgets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AtBudget:
    """The final values at one equal budget, and the effects computed from them."""

    finals: FinalValues
    effects: list[TrickEffect]


@dataclass(frozen=True)
class AxisFlip:
    """A contrast whose estimate is above 0 at some equal budgets and below 0 at others.

    `significant` says that the adjusted p is below .05 on some axis of either side. Otherwise the flip is within noise.
    """

    contrast: Contrast
    metric: str
    above: tuple[str, ...]  # axes
    below: tuple[str, ...]
    significant: bool

    @property
    def text(self) -> str:
        """The flip in one sentence part."""
        above, below = (", ".join(axes).replace("_", " ") for axes in (self.above, self.below))
        sure = "adjusted p below .05 on both sides" if self.significant else "within noise"
        return f"{self.contrast.name} is above 0 at equal {above}, below 0 at equal {below}: {sure}"


def logged_axes(data: SweepData, axes: Iterable[str] = AXES) -> list[str]:
    """Those of the axes that finished runs logged."""
    points = data.finished_points
    return [axis for axis in axes if f"budget/{axis}" in points and points[f"budget/{axis}"].notna().any()]


def effects_on_axes(data: SweepData, metrics: Sequence[str], axes: Iterable[str] = AXES) -> dict[str, AtBudget]:
    """The same contrasts at equal steps, tokens, operations and seconds, by axis, for the axes that were logged.

    On each axis the budget is the smallest final one over the finished runs, so nothing is extrapolated. Where arms
    spend a budget at different speeds, equal budgets on two axes are different moments of a run.
    """
    named = {f"budget/{axis}" for axis in axes} | {logged_name(metric) for metric in metrics}
    needed = [name for name in data.points if name in named or name in (*LABELS, "step", *_PARTS)]
    lean = replace(data, points=data.points[needed])
    by_axis = {axis: final_values(lean, axis) for axis in logged_axes(lean, axes)}
    return {axis: AtBudget(finals, trick_effects(data, finals, metrics)) for axis, finals in by_axis.items()}


def sign_flips(on_axes: Mapping[str, AtBudget]) -> list[AxisFlip]:
    """The contrasts whose sign depends on the budget axis, significant ones first."""
    grouped: dict[tuple[str, str, str], dict[str, TrickEffect]] = {}
    for axis, at in on_axes.items():
        for effect in at.effects:
            key = (effect.metric, effect.contrast.level, effect.contrast.name)
            grouped.setdefault(key, {})[axis] = effect
    found = []
    for by_axis in grouped.values():
        above = tuple(axis for axis, effect in by_axis.items() if effect.interval.mean > 0)
        below = tuple(axis for axis, effect in by_axis.items() if effect.interval.mean < 0)
        if above and below:
            sure = any(by_axis[axis].significant for axis in above) and any(by_axis[axis].significant for axis in below)
            any_effect = by_axis[above[0]]
            found.append(AxisFlip(any_effect.contrast, any_effect.metric, above, below, sure))
    return sorted(found, key=lambda flip: not flip.significant)


# --- tables ---------------------------------------------------------------------------------------------------


def effects_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """One row per contrast and metric, in the metric's unit; contrasts that were not run have no row.

    `family` is the number of tests that `p_adjusted` accounts for. `minimum_detectable` is the effect that `n_pairs`
    pairs with this scatter find with 80% power. `harm` is the chance to lose more than 2 points on a new base model.
    `not_reported` is the reason why there is no interval; `alive` is then the effect in the pairs without a collapse,
    with its own. `n_collapsed_with` and `n_collapsed_without` count the collapsed runs of arms that have the trick and
    of arms that do not.
    """
    rows = []
    for effect in trick_effects(data, finals):
        contrast, mean = effect.contrast, effect.interval
        row = {"level": contrast.level, "trick": contrast.trick, "kind": contrast.kind, "context": contrast.context}
        row |= {"metric": effect.metric, "n_pairs": mean.n, "effect": mean.mean, "low": mean.low, "high": mean.high}
        row |= {"p": effect.p, "p_adjusted": effect.p_adjusted, "correction": effect.correction}
        row |= {
            "family": effect.family,
            "minimum_detectable": effect.mde,
            "harm": effect.harm,
            "not_reported": mean.why,
        }
        alive = effect.comparison.alive
        if effect.comparison.mixed:
            row |= {"alive": alive.mean, "alive_low": alive.low, "alive_high": alive.high, "n_alive": alive.n}
        rows.append(row | {"n_collapsed_with": effect.collapsed_with, "n_collapsed_without": effect.collapsed_without})
    names = ["level", "trick", "kind", "context", "metric", "n_pairs", "effect", "low", "high", "p", "p_adjusted"]
    names += ["correction", "family", "minimum_detectable", "harm", "not_reported", "alive", "alive_low", "alive_high"]
    names += ["n_alive", "n_collapsed_with", "n_collapsed_without"]
    return pd.DataFrame(rows, columns=names).astype({"n_alive": "Int64"})


def effects_markdown(data: SweepData, finals: FinalValues) -> str:
    """The effects on the primary metric, training reward and downstream accuracy, and what to know beside them."""
    shown = list(dict.fromkeys([*effect_metrics(data)[:1], TRAINING_REWARD, HELDOUT, DOWNSTREAM]))
    effects = trick_effects(data, finals, shown)
    if not effects:
        return "No two arms that ran differ by exactly one trick.\n"
    factor = data.design.factor if data.design else ""
    head = [*([factor] if factor else []), "trick", "context", "pairs", "collapsed with / without"]
    harmed = shown[0] if is_rated(shown[0]) else DOWNSTREAM
    head.append(f"P(harm > 2 points), {SUITES.get(harmed.split('/')[1], harmed)}")
    named = QUANTITIES | {TRAINING_REWARD: "training reward, correctness"}
    lines = [[*head, *(named.get(metric, metric) for metric in shown)]]
    lines.append(["---"] * len(lines[0]))
    rows: dict[tuple[str, str], dict[str, TrickEffect]] = {}
    for effect in effects:
        rows.setdefault((effect.contrast.level, effect.contrast.name), {})[effect.metric] = effect
    for (level, _), by_metric in rows.items():
        first = next(iter(by_metric.values()))
        labels = [*([level] if factor else []), first.contrast.trick, first.contrast.context]
        labels += [str(first.n_pairs), f"{first.collapsed_with} / {first.collapsed_without}"]
        labels.append(harm_text(by_metric.get(harmed)))
        lines.append([*labels, *(_cell(by_metric.get(metric)) for metric in shown)])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([_key(effects, finals), table, *_remarks(data, finals, effects)]) + "\n"


def harm_text(effect: TrickEffect | None) -> str:
    """The chance of harm on a new base model, in percent; `-` where it is not known."""
    return "-" if effect is None or math.isnan(effect.harm) else f"{effect.harm:.0%}"


def _cell(effect: TrickEffect | None) -> str:
    if effect is None:
        return "-"
    text = effect.interval.text("+")
    if effect.comparison.mixed and effect.comparison.alive.n:
        text += f"; without collapses {effect.comparison.alive.text('+')}"
    return text if math.isnan(effect.p_adjusted) else f"{text}, {p_text(effect.p_adjusted, ' ')}"


def _key(effects: Sequence[TrickEffect], finals: FinalValues) -> str:
    head = f"Effect of each trick, paired by seed; brackets: {finals.brackets}, unadjusted."
    head += " P(harm): probability of measuring a loss above 2 points on a new base model (new seed if only one)."
    not_reported = any(effect.interval.not_reported for effect in effects)
    head += f" {NOT_REPORTED_MEANS}" if not_reported else ""
    sizes: dict[str, set[int]] = {}
    for effect in effects:
        if effect.correction:
            sizes.setdefault(effect.contrast.kind, set()).add(effect.family)
    if not sizes:
        return head
    tests = ", ".join(f"{kind.replace('_', ' ')} {' or '.join(map(str, sorted(n)))}" for kind, n in sizes.items())
    declared = ", ".join(dict.fromkeys(effect.metric for effect in effects if effect.correction == HOLM))
    by = f"by {HOLM} on {declared}, which was declared primary, and elsewhere " if declared else ""
    return f"{head} p is adjusted {by}by {SCREENING}, within the contrasts of one kind on one metric ({tests})."


def _remarks(data: SweepData, finals: FinalValues, effects: Sequence[TrickEffect]) -> list[str]:
    where = [
        (f"{data.design.factor} = {disagreement.reward.contrast.level}: " if data.design and data.design.factor else "")
        + disagreement.text
        for disagreement in disagreements(effects)
    ]
    absent = [contrast.name for contrast in not_run(data, finals)]
    parts = [
        order_warning(data),
        f"Training reward and downstream accuracy disagree in sign: {'; '.join(where)}." if where else "",
        f"Not run: {', '.join(dict.fromkeys(absent))}." if absent else "",
    ]
    return list(filter(None, parts))
