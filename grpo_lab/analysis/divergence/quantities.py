"""Verdicts on predicted quantities of a whole level: rank correlations and sharpening shares.

A prediction is supported where the quantity lies on the predicted side of its bound and contradicted where it lies on
the other, if the two-sided t test of "it equals the bound" has p below 0.05 after Holm over the quantities of its
design. The observations are base models; with one base model they are runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy import special

from grpo_lab.analysis.divergence.reward_ranks import ranked_levels
from grpo_lab.analysis.divergence.sharpening import sharpening, sharpening_of_level
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, critical_t
from grpo_lab.analysis.stats.multiplicity import ALPHA, holm, p_text
from grpo_lab.config.design import RANK, SHARE, QuantityPrediction


@dataclass(frozen=True)
class JudgedQuantity:
    """A predicted quantity with what was measured; `holm` is NaN without an interval, `note` says why there is none."""

    prediction: QuantityPrediction
    measured: Interval
    holm: float
    verdict: str
    note: str = ""


def judge_quantities(data: SweepData, finals: FinalValues) -> list[JudgedQuantity]:
    """Judge every declared quantity of a sweep; one that was not measured counts in Holm's family with p = 1."""
    predictions = data.design.quantities if data.design else ()
    measured = [_measured(data, finals, one) for one in predictions]
    plain = [_pvalue(found, one.bound) for one, (found, _) in zip(predictions, measured)]
    adjusted = holm([1.0 if math.isnan(p) else p for p in plain])
    judged = []
    for one, (found, note), p, raised in zip(predictions, measured, plain, adjusted.tolist()):
        verdict = "not run" if math.isnan(found.mean) else "not significant"
        if not math.isnan(p) and raised < ALPHA:
            verdict = "supported" if (found.mean > one.bound) == (one.above is not None) else "contradicted"
        judged.append(JudgedQuantity(one, found, math.nan if math.isnan(p) else raised, verdict, note))
    return judged


def _measured(data: SweepData, finals: FinalValues, one: QuantityPrediction) -> tuple[Interval, str]:
    """The quantity with its interval, and why it is unknown or not of all runs."""
    if one.quantity.startswith(RANK):
        level = ranked_levels(data, finals).get(one.level)
        found = level.correlations.get(one.quantity.removeprefix(RANK)) if level else None
        none = Interval(math.nan, math.nan, math.nan, 0)
        return (found, "") if found else (none, "too few arms, or the metric was not evaluated in all of them")
    arm = one.quantity.removeprefix(SHARE).removeprefix("/")
    share = sharpening(data, finals).get((one.level, arm)) if arm else sharpening_of_level(data, finals, one.level)
    return (share.share, share.note) if share else (Interval(math.nan, math.nan, math.nan, 0), "no finished run")


def _pvalue(found: Interval, bound: float) -> float:
    """Two-sided p of the quantity being equal to the bound; NaN without an interval."""
    n = found.bases or found.n
    if n < 2 or math.isnan(found.low):
        return math.nan
    error = (found.high - found.low) / 2 / critical_t(n - 1)
    distance = abs(found.mean - bound)
    if error == 0:
        return 2.0 ** (1 - n) if distance else 1.0  # no scatter, by chance: the p of n signs
    return float(2 * special.stdtr(n - 1, -distance / error))


def quantity_text(one: QuantityPrediction) -> str:
    """`rank correlation of training reward with policy entropy is below -0.5`."""
    if one.quantity.startswith(RANK):
        name = f"rank correlation of training reward with {metric_text(one.quantity.removeprefix(RANK))}"
    else:
        arm = one.quantity.removeprefix(SHARE).removeprefix("/")
        name = f"sharpening share of {arm or 'all arms'}"
    return f"{name} is {'above' if one.above is not None else 'below'} {one.bound:g}"


def measured_text(one: JudgedQuantity) -> str:
    """`-0.812 [-0.950, -0.674]`; a correlation's interval ends at -1 and 1."""
    found = one.measured.within(-1.0, 1.0) if one.prediction.quantity.startswith(RANK) else one.measured
    return found.text("+")


def quantities_text(data: SweepData, finals: FinalValues) -> str:
    """The verdict on every declared quantity; "" without any."""
    judged = judge_quantities(data, finals)
    if not judged:
        return ""
    lines = ["Predictions about whole levels; base models are the observations"]
    for one in judged:
        where = f" at {data.design.factor}={one.prediction.level}" if data.design and one.prediction.level else ""
        lines.append(f"  {one.verdict}: {quantity_text(one.prediction)}{where}")
        p = f", Holm {p_text(one.holm)}" if not math.isnan(one.holm) else ""
        note = f" ({one.note})" if one.note else ""
        lines.append(f"    {measured_text(one)}, {one.measured.runs()}{p}{note}")
    return "\n".join(lines) + "\n"


def quantities_head(name: str) -> str:
    """How the table of a sweep's quantities begins, on a page that has one."""
    return f"| quantities of {name} |"


def quantities_table(data: SweepData, finals: FinalValues) -> str:
    """One row per declared quantity, as a markdown table."""
    lines = [f"{quantities_head(data.record.name)} level | measured | p | verdict |", "|---" * 5 + "|"]
    for one in judge_quantities(data, finals):
        p = "" if math.isnan(one.holm) else p_text(one.holm).removeprefix("p ").removeprefix("= ")
        cells = (quantity_text(one.prediction), one.prediction.level, measured_text(one), p, one.verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
