"""What the runs say of the predictions that were declared, in a few plain lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from grpo_lab.analysis.caveats import caveats, place
from grpo_lab.analysis.load import SweepData
from grpo_lab.analysis.multiplicity import holm, paired_t_pvalue
from grpo_lab.analysis.outcome import BEYOND, MASKED_SHARE, OVERSTATEMENT, Outcome
from grpo_lab.analysis.stats import Interval, paired_difference, seed_differences
from grpo_lab.analysis.table import run_arms
from grpo_lab.sweeps.design import Direction, Prediction


@dataclass(frozen=True)
class Judgement:
    """A prediction beside the difference, paired by seed, to its reference (level and arm)."""

    prediction: Prediction
    reference: tuple[str, str]
    difference: Interval
    word: str  # supported, contradicted, not resolved, not run


def judge(data: SweepData, outcome: Outcome) -> list[Judgement]:
    """Every declared prediction: the word follows from where its 95% interval lies, and from nothing else."""
    judgements = []
    for prediction in data.design.predictions if data.design else ():
        level, arm, metric = prediction.level, prediction.arm, prediction.metric
        reference = (prediction.against, arm) if prediction.against else (level, prediction.reference or data.control)
        difference = paired_difference(outcome.of(level, arm, metric), outcome.of(*reference, metric))
        judgements.append(Judgement(prediction, reference, difference, _word(prediction.direction, difference)))
    return judgements


def seeds_of(outcome: Outcome, judgement: Judgement) -> pd.Series:
    """The difference of each seed that a judgement's arm and reference share."""
    prediction = judgement.prediction
    own = outcome.of(prediction.level, prediction.arm, prediction.metric)
    return seed_differences(own, outcome.of(*judgement.reference, prediction.metric))


def family(outcome: Outcome, judgements: Sequence[Judgement]) -> list[tuple[float, float] | None]:
    """p and Holm-adjusted p of every declared prediction, over those that could be judged; None for the others."""
    plain = [paired_t_pvalue(seeds_of(outcome, judgement).to_numpy()) for judgement in judgements]
    known = [index for index, p in enumerate(plain) if not math.isnan(p)]
    found: list[tuple[float, float] | None] = [None] * len(judgements)
    for index, adjusted in zip(known, holm([plain[index] for index in known]) if known else ()):
        found[index] = (plain[index], float(adjusted))
    return found


def _net_of_control(data: SweepData, outcome: Outcome, judgement: Judgement) -> Interval:
    """How much more an arm changes between two levels than the control does, paired by seed."""
    metric, level, (other, arm) = judgement.prediction.metric, judgement.prediction.level, judgement.reference
    return paired_difference(
        outcome.differences(level, arm, data.control, metric), outcome.differences(other, arm, data.control, metric)
    )


def _word(direction: Direction, difference: Interval) -> str:
    if difference.n < 2:
        return "not run"
    predicted, opposite = difference.low > 0, difference.high < 0
    if direction is Direction.below:
        predicted, opposite = opposite, predicted
    return "supported" if predicted else "contradicted" if opposite else "not resolved"


def verdict_text(data: SweepData, outcome: Outcome) -> str:
    """Question, predictions, overstatement beside theory, and what a reader must know before believing it."""
    parts = [_predictions(data, outcome), _overstatements(data, outcome), caveats(data, outcome)]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _predictions(data: SweepData, outcome: Outcome) -> list[str]:
    rule = (
        f"  ({outcome.rule}; 95% t intervals of differences paired by seed, each on its own, which decide the word; p "
        "is adjusted by Holm for the number of judged predictions.)"
    )
    if data.design is None:
        return [f"{data.record.name}: nothing was declared, so nothing is judged; {data.control} is the control", rule]
    lines = [data.design.question]
    judgements = judge(data, outcome)
    waiting = [judgement for judgement in judgements if judgement.word == "not run"]
    for judgement, p in zip(judgements, family(outcome, judgements)):
        if judgement.word == "not run":
            continue
        prediction, difference = judgement.prediction, judgement.difference
        main = ", the primary metric" if prediction.metric == data.design.primary else ""
        level, arm = judgement.reference
        reference = arm if level == prediction.level else place(data, level, arm)
        said = f"{place(data, prediction.level, prediction.arm)} is {prediction.direction.value} {reference}"
        measured = f"measured {difference.text('+')}, n = {difference.n}"
        if prediction.against:
            net = _net_of_control(data, outcome, judgement)
            measured += f"; net of the same change in {data.control}: {net.text('+')}" if net.n else ""
        measured += "" if p is None else "; Holm p < 0.001" if p[1] < 0.001 else f"; Holm p = {p[1]:.3f}"
        lines.append(f"  {judgement.word}: {said} on {prediction.metric}{main}; {measured}")
    if waiting:
        lines.append(
            f"  not run: {len(waiting)} of {len(judgements)} predictions, which need more cells than are finished"
        )
    return [*lines, rule]


def _overstatements(data: SweepData, outcome: Outcome) -> list[str]:
    """Arms that mask cut responses beside q a; the others, for which theory says 0, show what else differs."""
    masking, others = [], []
    for level, arm in run_arms(data):
        measured, theory = (outcome.interval(level, arm, name) for name in (OVERSTATEMENT, MASKED_SHARE))
        line = f"  {place(data, level, arm)}: {measured.text('+')}, n = {measured.n}"
        if outcome.masks(level, arm):
            beyond = outcome.interval(level, arm, BEYOND)
            masking.append(f"{line}; theory q a = {theory.text()}, measured less theory {beyond.text('+')}")
        else:
            filtered = outcome.filters(level, arm)
            others.append(f"{line}; {'of groups with signal alone, so no theory' if filtered else 'theory 0'}")
    if not masking:
        return []
    head = (
        "Overstatement, the outcome of the responses kept in the loss less held-out accuracy; arms that mask cut "
        "responses first (the outcome of all responses overstates nothing):"
    )
    return [head, *masking, *others]
