"""What the runs say of the predictions that were declared, in a few plain lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.analysis.caveats import caveats, comparison, name_of, place
from grpo_lab.analysis.final_values import BEYOND, EVALUATED, MASKED_SHARE, OVERSTATEMENT, FinalValues
from grpo_lab.analysis.metric_names import in_words
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, paired_difference, seed_differences, t_interval
from grpo_lab.analysis.stats.multiplicity import ALPHA, holm, p_text, paired_t_pvalue
from grpo_lab.config.design import Design, Direction, Prediction
from grpo_lab.tracking.metrics import SUITES


@dataclass(frozen=True)
class Judgement:
    """A prediction, and the measured difference to its reference (level and arm), paired by seed.

    `seeds` are the seeds that both have. `p` is of the paired t test, `holm` is p adjusted over `family` predictions;
    both are NaN for fewer than two seeds. `word` is supported, contradicted, not resolved or not run.
    """

    prediction: Prediction
    reference: tuple[str, str]
    difference: Interval
    seeds: tuple[int, ...]
    p: float
    holm: float
    family: int
    word: str


def judge(data: SweepData, finals: FinalValues) -> list[Judgement]:
    """Judge every declared prediction by the sign of its difference and by p after Holm's correction.

    The family holds the predictions of the part of the design that was asked for, and all others that have data. One
    without data yet counts with p = 1, so that its data never take back a word that was given before.
    """
    if data.design is None:
        return []
    predictions = data.design.predictions
    compared = []
    for prediction in predictions:
        level, arm, metric = prediction.level, prediction.arm, prediction.metric
        reference = (prediction.against, arm) if prediction.against else (level, prediction.reference or data.control)
        compared.append((reference, seed_differences(finals.of(level, arm, metric), finals.of(*reference, metric))))
    plain = [paired_t_pvalue(differences.to_numpy()) for _, differences in compared]
    counted = [
        not math.isnan(p) or _asked_for(data.design, prediction, reference)
        for prediction, p, (reference, _) in zip(predictions, plain, compared)
    ]
    family = [1.0 if math.isnan(p) else p for p, counts in zip(plain, counted) if counts]
    adjusted = iter(holm(family).tolist() if family else ())
    judgements = []
    for prediction, p, counts, (reference, differences) in zip(predictions, plain, counted, compared):
        raised = next(adjusted) if counts else math.nan
        raised = math.nan if math.isnan(p) else raised
        difference, seeds = t_interval(differences.tolist()), tuple(map(int, differences.index))
        word = _word(prediction.direction, difference, raised)
        judgements.append(Judgement(prediction, reference, difference, seeds, p, raised, len(family), word))
    return judgements


def _asked_for(design: Design, prediction: Prediction, reference: tuple[str, str]) -> bool:
    part = design.chosen()
    cells = ((prediction.level, prediction.arm), reference)
    return all(level in part.levels and arm in part.arms for level, arm in cells)


def _word(direction: Direction, difference: Interval, adjusted: float) -> str:
    if difference.n < 2:
        return "not run"
    if not adjusted < ALPHA:
        return "not resolved"
    return "supported" if (difference.mean > 0) == (direction is Direction.above) else "contradicted"


def _net_of_control(data: SweepData, finals: FinalValues, judgement: Judgement) -> Interval:
    """How much more an arm changes between two levels than the control does, paired by seed."""
    metric, level, (other, arm) = judgement.prediction.metric, judgement.prediction.level, judgement.reference
    return paired_difference(
        finals.differences(level, arm, data.control, metric), finals.differences(other, arm, data.control, metric)
    )


def meaning(judgements: Sequence[Judgement]) -> str:
    """What supported, contradicted and not resolved mean, in words for readers."""
    if not judgements:
        return "No single prediction was declared, so nothing is judged."
    family = judgements[0].family
    adjusted = f", adjusted by Holm for {family} predictions," if family > 1 else ""
    return (
        f"Supported: the difference has the predicted sign and its p{adjusted} is below {ALPHA:g}. "
        "Contradicted: the same with the opposite sign. Not resolved: neither."
    )


def claim(data: SweepData, judgement: Judgement) -> str:
    """The prediction as a sentence part: `mask_after at aggregation=constant is above score`."""
    prediction, (level, arm) = judgement.prediction, judgement.reference
    reference = arm if level == prediction.level else place(data, level, arm)
    return f"{place(data, prediction.level, prediction.arm)} is {prediction.direction.value} {reference}"


def verdict_text(data: SweepData, finals: FinalValues) -> str:
    """The question, each prediction with its word, overstatement beside theory, and the caveats."""
    known = caveats(data, finals)
    parts = [
        _predictions(data, data.design, finals) if data.design else compared_arms(data, finals),
        _overstatements(data, finals),
        ["What to know before believing this", *(f"  {line}" for line in known)] if known else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _predictions(data: SweepData, design: Design, finals: FinalValues) -> list[str]:
    judgements = judge(data, finals)
    lines = [design.question, "", f"What was predicted, and what came out. The control is {data.control}."]
    for judgement in judgements:
        if judgement.word == "not run":
            continue
        prediction, difference = judgement.prediction, judgement.difference
        main = " (the metric that decides)" if prediction.metric == design.primary else ""
        lines.append(f"  {judgement.word}: {claim(data, judgement)} on {in_words(prediction.metric)}{main}")
        measured = f"difference {difference.text('+')}, n = {difference.n}, Holm {p_text(judgement.holm)}"
        if prediction.against:
            net = _net_of_control(data, finals, judgement)
            measured += f"; net of the same change in {data.control}: {net.text('+')}" if net.n else ""
        lines.append(f"    {measured}")
    if waiting := sum(judgement.word == "not run" for judgement in judgements):
        lines.append(f"  not run: {waiting} of {len(judgements)} predictions, which need more cells than are finished")
    return [
        *lines,
        "",
        "How to read this",
        f"  {meaning(judgements)}",
        "  A difference is arm less reference, paired by seed, over n seeds. Brackets: 95% t interval, one by one.",
        f"  {finals.rule}.",
    ]


def compared_arms(data: SweepData, finals: FinalValues) -> list[str]:
    """For a sweep that declared nothing: a table of its arms, and the settings in which they differ."""
    metrics = [metric for metric in EVALUATED if metric in finals.values]
    rows = [["arm", "n", *(SUITES[metric.split("/")[1]] for metric in metrics)]]
    for level, arm in data.run_arms:
        found = [finals.interval(level, arm, metric) for metric in metrics]
        rows.append([name_of((level, arm)), _counts(found), *(one.text() for one in found)])
        if arm != data.control:
            found = [finals.difference(level, arm, data.control, metric) for metric in metrics]
            rows.append([f"  less {data.control}", _counts(found), *(one.text("+") for one in found)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [
        f"{data.record.name}: nothing was declared, so nothing is judged; {data.control} is the control",
        "",
        "Accuracy of every arm, and its difference to the control, paired by seed. Brackets: 95% t interval, n seeds.",
        *(f"  {line}" for line in table),
        f"  {finals.rule}.",
        *(["", *comparison(data)] if comparison(data) else []),
    ]


def _counts(found: Sequence[Interval]) -> str:
    return ", ".join(dict.fromkeys(str(one.n) for one in found)) or "0"


def _overstatements(data: SweepData, finals: FinalValues) -> list[str]:
    """Arms that mask truncated responses beside q a; the others, for which theory says 0, show what else differs."""
    masking, others = [], []
    for level, arm in data.run_arms:
        measured, theory = (finals.interval(level, arm, name) for name in (OVERSTATEMENT, MASKED_SHARE))
        line = f"  {place(data, level, arm)}: {measured.text('+')}, n = {measured.n}"
        if finals.masks(level, arm):
            beyond = finals.interval(level, arm, BEYOND)
            masking.append(f"{line}; theory q a = {theory.text()}, measured less theory {beyond.text('+')}")
        else:
            filtered = finals.filters(level, arm)
            others.append(f"{line}; {'of groups with signal alone, so no theory' if filtered else 'theory 0'}")
    if not masking:
        return []
    return [
        "How far the training outcome overstates held-out accuracy",
        "  Measured: the share of right answers among the responses in the loss, less held-out accuracy, both under",
        "  the training protocol. Masking takes truncated responses out of the loss: with a share q of them and an",
        "  accuracy a of the others, it should be q a too high; in arms without a mask, not at all (0).",
        *masking,
        *others,
    ]
