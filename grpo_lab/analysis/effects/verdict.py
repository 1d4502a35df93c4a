"""Verdicts on declared predictions, and the text that reports them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from grpo_lab.analysis.caveats import caveats, place
from grpo_lab.analysis.effects.all_pairs import all_pairs, ranked_metrics
from grpo_lab.analysis.effects.arms import arms_table
from grpo_lab.analysis.effects.manipulation_checks import failed_checks
from grpo_lab.analysis.effects.tuned import numbers_table
from grpo_lab.analysis.final_values import BEYOND, MASKED_SHARE, OVERSTATEMENT, FinalValues, is_rated
from grpo_lab.analysis.metric_names import metric_text, title
from grpo_lab.analysis.sources.chosen_numbers import chosen_numbers
from grpo_lab.analysis.sources.matched_norms import matched_norms, norms_table
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.collapse import Count, barnard
from grpo_lab.analysis.stats.comparison import HARM, Comparison
from grpo_lab.analysis.stats.intervals import NOT_REPORTED_MEANS, Interval, seed_differences
from grpo_lab.analysis.stats.multiplicity import ALPHA, holm, p_text
from grpo_lab.config.design import CountPrediction, Design, Direction, Prediction

VERDICTS = (
    "supported",
    "contradicted",
    "equivalent within the margin",
    "not significant",
    "manipulation check failed",
    "not run",
)
MANY = 6  # arms from which an omnibus test is reported


@dataclass(frozen=True)
class Judgement:
    """A prediction, and the comparison with its reference (level and arm), paired by seed.

    `p` is of no effect, for a prediction within a margin of an effect no larger
    than that. `equivalence` is p of an effect as large as `margin` (NaN without one). `holm` and `equivalent` are these
    adjusted together over `family` predictions. All are NaN for fewer than two seeds. `verdict` is one of VERDICTS;
    `reason` says why a manipulation check failed.
    """

    prediction: Prediction
    reference: tuple[str, str]
    comparison: Comparison
    margin: float | None
    p: float
    holm: float
    equivalence: float
    equivalent: float
    family: int
    verdict: str
    reason: str = ""

    @property
    def difference(self) -> Interval:
        """Over all pairs; without bounds, and with the reason, where it is not reported."""
        return self.comparison.whole

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that both have."""
        return self.comparison.seeds


def judge(data: SweepData, finals: FinalValues) -> list[Judgement]:
    """Judge every declared prediction by the sign of its difference, its margin, and p after Holm's correction.

    The family holds the predictions of the part of the design that was asked for, and all others that have data. One
    without data yet counts with p = 1, so that its data never take back a verdict that was given before. A prediction
    with a margin brings two hypotheses, no effect and an effect as large as the margin, of which one at most is true.
    Predictions about an arm that fails a manipulation check of the design are not judged.
    """
    if data.design is None:
        return []
    compared = []
    for prediction in data.design.predictions:
        place, reference = places_of(data.design, prediction)
        compared.append((reference, finals.comparison(place, reference, prediction.metric)))
    return decide(data.design, compared, failed_checks(data))


def places_of(design: Design, prediction: Prediction) -> tuple[tuple[str, str], tuple[str, str]]:
    """The level and arm of which something is predicted, and those that it is compared with."""
    if prediction.against:
        return (prediction.level, prediction.arm), (prediction.against, prediction.arm)
    return (prediction.level, prediction.arm), (prediction.level, prediction.reference or design.control)


def decide(
    design: Design,
    compared: Sequence[tuple[tuple[str, str], Comparison]],
    reasons: Mapping[tuple[str, str], str],
) -> list[Judgement]:
    """Judge every prediction of a design by its comparison, which stands beside its reference (level and arm).

    `reasons` maps a level and arm whose manipulation check failed to the reason.
    """
    predictions = design.predictions
    margins = [design.margin_of(prediction) for prediction in predictions]
    tests = [
        _tests(prediction.direction, found, margin)
        for prediction, (_, found), margin in zip(predictions, compared, margins)
    ]
    counted = [
        not math.isnan(p) or is_in_part(design, prediction)
        for prediction, (p, _) in zip(predictions, tests, strict=True)
    ]
    adjusted, family = _adjusted(tests, counted), sum(counted)
    judgements = []
    for prediction, (reference, found), margin, plain, (holm_p, equivalent) in zip(
        predictions, compared, margins, tests, adjusted
    ):
        reason = reasons.get((prediction.level, prediction.arm), "")
        failed = "manipulation check failed" if reason else ""
        verdict = failed or _verdict(prediction.direction, found, holm_p, equivalent)
        numbers = {"p": plain[0], "holm": holm_p, "equivalence": plain[1], "equivalent": equivalent}
        judgements.append(
            Judgement(prediction, reference, found, margin, **numbers, family=family, verdict=verdict, reason=reason)
        )
    return judgements


def _tests(direction: Direction, found: Comparison, margin: float | None) -> tuple[float, float]:
    """p of no effect (or, predicted within a margin, of none beyond it), and p of an effect as large as the margin."""
    if margin is None:
        return found.p, math.nan
    return found.beyond(margin) if direction is Direction.within else found.p, found.within(margin)


def _adjusted(tests: Sequence[tuple[float, float]], counted: Sequence[bool]) -> list[tuple[float, float]]:
    """Both p of every prediction, adjusted by Holm over those that count; NaN where there is none."""
    flat = [(at, kind) for at, pair in enumerate(tests) for kind, p in enumerate(pair) if counted[at]]
    flat = [(at, kind) for at, kind in flat if kind == 0 or not math.isnan(tests[at][1])]
    family = [1.0 if math.isnan(tests[at][kind]) else tests[at][kind] for at, kind in flat]
    raised = dict(zip(flat, holm(family, sum(counted)).tolist()))
    found = [
        [math.nan if math.isnan(p) else raised.get((at, kind), math.nan) for kind, p in enumerate(pair)]
        for at, pair in enumerate(tests)
    ]
    return [(apart, within) for apart, within in found]


def is_in_part(design: Design, prediction: Prediction) -> bool:
    """True if the chosen part of the design runs both arms that the prediction compares."""
    part = design.chosen()
    return all(level in part.levels and arm in part.arms for level, arm in places_of(design, prediction))


def _verdict(direction: Direction, found: Comparison, adjusted: float, equivalent: float) -> str:
    if found.whole.n < 2:
        return "not run"
    if direction is Direction.within:
        if equivalent < ALPHA:
            return "supported"
        return "contradicted" if adjusted < ALPHA else "not significant"
    if adjusted < ALPHA and found.sign:
        return "supported" if (found.sign > 0) == (direction is Direction.above) else "contradicted"
    return "equivalent within the margin" if equivalent < ALPHA else "not significant"


def counted(finals: FinalValues, count: CountPrediction) -> Count:
    """The number of base models (runs, for a sweep of one) on which the arm ends above the declared number."""
    values = finals.of(count.level, count.arm, count.metric)
    by_base = values.groupby([finals.bases.get(int(seed), int(seed)) for seed in values.index]).mean()
    return Count(int((by_base > count.above).sum()), len(by_base))


def count_verdict(data: SweepData, finals: FinalValues, count: CountPrediction) -> str:
    """Verdict on a predicted number of base models: as predicted, not as predicted, so far, or not run."""
    found = counted(finals, count)
    if not found.of:
        return "not run"
    planned = len(data.design.bases or data.design.seeds) if data.design else found.of
    if found.of < planned and not count.sure(found.number, planned - found.of):
        return f"so far, with {found.of} of {planned}"
    return "as predicted" if count.holds(found.number) else "not as predicted"


def count_limit(count: CountPrediction) -> str:
    """`at least 12`."""
    return f"at most {count.at_most}" if count.at_least is None else f"at least {count.at_least}"


def count_text(data: SweepData, finals: FinalValues, count: CountPrediction) -> str:
    """Verdict and measured number of base models, with the exact 95% CI of the share."""
    found, unit = counted(finals, count), "base models" if len(set(finals.bases.values())) > 1 else "runs"
    where = f"{place(data, count.level, count.arm)} has {metric_text(count.metric)} above {count.above:g}"
    measured = (
        f"in {found.text} {unit}; predicted {count_limit(count)}" if found.of else f"in {count_limit(count)} {unit}"
    )
    return f"{count_verdict(data, finals, count)}: {where} {measured}"


def _net_of_control(data: SweepData, finals: FinalValues, judgement: Judgement) -> Interval:
    """How much more an arm changes between two levels than the control does, paired by seed."""
    metric, level, (other, arm) = judgement.prediction.metric, judgement.prediction.level, judgement.reference
    net = seed_differences(
        finals.differences(level, arm, data.control, metric), finals.differences(other, arm, data.control, metric)
    )
    return finals.compared(net, metric, *((at, one) for at in (level, other) for one in (arm, data.control))).whole


def meaning(judgements: Sequence[Judgement]) -> str:
    """The verdicts explained to readers."""
    if not judgements:
        return "No single prediction was declared, so nothing is judged."
    family = judgements[0].family
    adjusted = f", adjusted by Holm for {family} predictions," if family > 1 else ""
    text = (
        f"Supported: the difference has the predicted sign and its p{adjusted} is below {ALPHA:g}. "
        "Contradicted: the same with the opposite sign. "
    )
    if any(judgement.margin is not None for judgement in judgements):
        text += (
            "Equivalent within the margin: two one-sided tests (TOST) rule out a larger effect, at the same p level. "
            "This supports a prediction of equivalence; an effect significantly beyond the margin contradicts it. "
        )
    if any(judgement.verdict == "manipulation check failed" for judgement in judgements):
        text += "Manipulation check failed: the trick was a no-op in these runs, so its effect is not judged. "
    return f"{text}Not significant: none of these."


def claim(data: SweepData, judgement: Judgement) -> str:
    """The prediction as a sentence part: `mask_after at aggregation=constant is above score`."""
    prediction, (level, arm) = judgement.prediction, judgement.reference
    reference = arm if level == prediction.level else place(data, level, arm)
    where = prediction.direction.value
    if prediction.direction is Direction.within:
        where = f"within {judgement.margin:g} of"
    return f"{place(data, prediction.level, prediction.arm)} is {where} {reference}"


def finding(data: SweepData, finals: FinalValues) -> str:
    """The predictions on the metric that decides in one line; "" where none was judged against the control.

    Such as `supported: mask_after is below score on downstream accuracy, -0.019 [-0.037, -0.001], n = 8`. Of several
    their number that is supported; where one is, which.
    """
    if data.declaration is None:
        return ""
    primary = data.declaration.primary
    judged = [
        one
        for one in judge(data, finals)
        if one.prediction.metric == primary and one.verdict != "not run"
        if not one.prediction.against and one.reference[1] == data.control
    ]
    if not judged:
        return ""
    on = title(judged[0].prediction.metric)
    if len(judged) == 1:
        return _one_finding(data, judged[0], on)
    supported = [claim(data, one) for one in judged if one.verdict == "supported"]
    which = f": {supported[0]}" if len(supported) == 1 else ""
    return f"{len(supported)} of {len(judged)} predictions supported on {on}{which}"


def _one_finding(data: SweepData, judgement: Judgement, on: str) -> str:
    measured = f"{judgement.difference.text('+')}, {judgement.difference.runs()}"
    if judgement.verdict == "manipulation check failed":
        return f"{judgement.verdict}: {judgement.reason}"
    if judgement.verdict == "supported":
        return f"supported: {claim(data, judgement)} on {on}, {measured}"
    return f"{judgement.verdict}, though predicted: {claim(data, judgement)} on {on}, {measured}"


def verdict_text(data: SweepData, finals: FinalValues) -> str:
    """The question, each prediction with its verdict, tuned numbers, overstatement, and caveats."""
    known, chosen, matched = caveats(data, finals), chosen_numbers(data.record), matched_norms(data.record)
    parts = [
        _predictions(data, data.declaration, finals) if data.declaration else arms_table(data, finals),
        ["Tuned values; ! marks a number near an end of its range", *numbers_table(chosen)] if chosen else [],
        ["Matched update norms, in the pilot", *norms_table(matched)] if matched else [],
        _omnibus(data, finals),
        _overstatements(data, finals),
        ["Caveats", *(f"  {line}" for line in known)] if known else [],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _predictions(data: SweepData, design: Design, finals: FinalValues) -> list[str]:
    judgements = judge(data, finals)
    lines = [design.question, "", f"Predictions and verdicts. The control is {data.control}."]
    for judgement in judgements:
        if judgement.verdict == "not run":
            continue
        prediction, difference = judgement.prediction, judgement.difference
        main = " (the metric that decides)" if prediction.metric == design.primary else ""
        lines.append(f"  {judgement.verdict}: {claim(data, judgement)} on {metric_text(prediction.metric)}{main}")
        if judgement.verdict == "manipulation check failed":
            lines.append(f"    {judgement.reason}")
            continue
        measured = f"difference {difference.text('+')}, {difference.runs()}, Holm {p_text(judgement.holm)}"
        if prediction.against:
            net = _net_of_control(data, finals, judgement)
            measured += f"; net of the same change in {data.control}: {net.text('+')}" if net.n else ""
        lines += [f"    {line}" for line in (measured, *beside(data, finals, judgement))]
    lines += [f"  {count_text(data, finals, one)}" for one in design.counts]
    if waiting := sum(judgement.verdict == "not run" for judgement in judgements):
        lines.append(f"  not run: {waiting} of {len(judgements)} predictions, which need more runs than are finished")
    return [
        *lines,
        "",
        "Reading guide",
        f"  {meaning(judgements)}",
        f"  A difference is arm less reference, paired by seed, over n seeds. Brackets: {finals.brackets}, unadjusted.",
        *([f"  {NOT_REPORTED_MEANS}"] if any(judgement.difference.not_reported for judgement in judgements) else []),
        f"  {finals.rule}.",
    ]


def beside(data: SweepData, finals: FinalValues, judgement: Judgement) -> list[str]:
    """Notes on a difference: why its interval is not reported, collapses, the margin, the chance of harm."""
    prediction, found = judgement.prediction, judgement.comparison
    compared = ((prediction.level, prediction.arm), judgement.reference)
    lines = [f"no interval: {found.whole.why}"] if found.whole.not_reported else []
    if found.mixed and found.alive.n:
        lines.append(f"in the pairs without a collapse {found.alive.text('+')}, {found.alive.runs()}")
    counts = [finals.collapses(*condition) for condition in compared]
    if any(count.number for count in counts):
        named = " against ".join(
            f"{count.text} of {place(data, *condition)}" for count, condition in zip(counts, compared)
        )
        lines.append(f"collapsed: {named}; Barnard {p_text(barnard(*counts))}")
    if judgement.margin is not None and not math.isnan(judgement.equivalent):
        lines.append(f"equivalence within {judgement.margin:g} (TOST): Holm {p_text(judgement.equivalent)}")
    if is_rated(prediction.metric) and not math.isnan(chance := found.harm()):
        unit = "base model" if found.whole.bases else "seed of this base model"
        lines.append(f"probability of measuring a loss above {100 * HARM:g} points on another {unit}: {chance:.0%}")
    return lines


def _omnibus(data: SweepData, finals: FinalValues) -> list[str]:
    """Omnibus test that the arms of a level differ at all, for sweeps of MANY arms and more."""
    lines = []
    for metric in ranked_metrics(data):
        for level in data.levels:
            found = all_pairs(data, finals, level, metric)
            if found is None or found.omnibus is None or len(found.omnibus.shrunken) < MANY:
                continue
            ends = found.omnibus.shrunken
            low, high = min(ends, key=ends.__getitem__), max(ends, key=ends.__getitem__)
            lines.append(f"  {place(data, level, metric_text(metric))}: {found.omnibus.text}")
            lines.append(f"    shrunken means from {ends[low]:.3f} ({low}) to {ends[high]:.3f} ({high})")
    return ["Do the arms differ at all? Omnibus F test, base models as blocks", *lines] if lines else []


def _overstatements(data: SweepData, finals: FinalValues) -> list[str]:
    """Measured overstatement beside what masking predicts: of arms that mask, and of the others, where that is 0."""
    masking, others = [], []
    for level, arm in data.run_arms:
        measured, theory = (finals.interval(level, arm, name) for name in (OVERSTATEMENT, MASKED_SHARE))
        line = f"  {place(data, level, arm)}: {measured.text('+')}, n = {measured.n}"
        if finals.masks(level, arm):
            beyond = finals.interval(level, arm, BEYOND)
            masking.append(f"{line}; predicted {theory.text()}, measured less predicted {beyond.text('+')}")
        else:
            why = "only of groups with reward variance, so no prediction"
            others.append(f"{line}; {why if finals.filters(level, arm) else 'predicted 0'}")
    if not masking:
        return []
    return [
        "Overstatement of held-out accuracy by training correctness",
        "  Measured: the share of right answers among the responses in the loss, less held-out accuracy, both under",
        "  the training protocol. Masking takes truncated responses out of the loss. The predicted overstatement is",
        "  their share times the accuracy of the others; in arms without a mask it is 0.",
        *masking,
        *others,
    ]
