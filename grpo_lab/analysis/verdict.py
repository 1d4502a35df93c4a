"""What the runs say of the predictions that were declared, in a few plain lines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_lab.analysis.load import SweepData
from grpo_lab.analysis.outcome import BEYOND, MASKED_SHARE, OVERSTATEMENT, Outcome
from grpo_lab.analysis.stats import Interval, paired_difference
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
        reference = (prediction.against, arm) if prediction.against else (level, data.control)
        difference = paired_difference(outcome.of(level, arm, metric), outcome.of(*reference, metric))
        judgements.append(Judgement(prediction, reference, difference, _word(prediction.direction, difference)))
    return judgements


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
    caveats = [*_declaration(data), *_cells(data), *_inert(data), *_code(data)]
    parts = [_predictions(data, outcome), _overstatements(data, outcome), caveats]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _place(data: SweepData, level: str, arm: str) -> str:
    return f"{arm} at {data.design.factor}={level}" if data.design and data.design.factor else arm


def _predictions(data: SweepData, outcome: Outcome) -> list[str]:
    rule = f"  ({outcome.rule}; 95% t intervals of differences paired by seed, not corrected for their number.)"
    if data.design is None:
        return [f"{data.record.name}: nothing was declared, so nothing is judged; {data.control} is the control", rule]
    lines = [data.design.question]
    judgements = judge(data, outcome)
    waiting = [judgement for judgement in judgements if judgement.word == "not run"]
    for judgement in (judgement for judgement in judgements if judgement.word != "not run"):
        prediction, difference = judgement.prediction, judgement.difference
        main = ", the primary metric" if prediction.metric == data.design.primary else ""
        level, arm = judgement.reference
        reference = data.control if level == prediction.level else _place(data, level, arm)
        said = f"{_place(data, prediction.level, prediction.arm)} is {prediction.direction.value} {reference}"
        measured = f"measured {difference.text('+')}, n = {difference.n}"
        if prediction.against:
            net = _net_of_control(data, outcome, judgement)
            measured += f"; net of the same change in {data.control}: {net.text('+')}" if net.n else ""
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
        line = f"  {_place(data, level, arm)}: {measured.text('+')}, n = {measured.n}"
        if outcome.masks(level, arm):
            beyond = outcome.interval(level, arm, BEYOND)
            masking.append(f"{line}; theory q a = {theory.text()}, measured less theory {beyond.text('+')}")
        else:
            others.append(f"{line}; theory 0")
    if not masking:
        return []
    head = (
        "Overstatement, the outcome of the responses kept in the loss less held-out accuracy; arms that mask cut "
        "responses first (the outcome of all responses overstates nothing):"
    )
    return [head, *masking, *others]


def _declaration(data: SweepData) -> list[str]:
    if data.design is None:
        return []
    last = data.record.declared[-1]
    started = last["cells_started_before"]
    when = "before the first run" if started == 0 else f"after {started} of its cells had been started"
    number = len(data.record.declared)
    changed = "" if number == 1 else f"; it is declaration {number} of this sweep"
    return [f"Declared {when} ({last['at']}, fingerprint {last['fingerprint']}){changed}."]


def _cells(data: SweepData) -> list[str]:
    places = [(level, arm) for level in data.levels for arm in data.arms]
    planned = sum(data.seeds_planned(level, arm) for level, arm in places)
    lines = [f"Finished cells: {len(data.finished)} of {planned} planned."]
    for status, word in (("failed", "failed"), ("partial", "unfinished"), ("unreadable", "unreadable")):
        for row in data.runs[data.runs["status"] == status].itertuples():
            reason = f": {row.problem}" if row.problem else ""
            lines.append(f"  {word}: {_place(data, row.level, row.arm)} seed {row.seed}{reason}")
    started = data.runs[data.runs["status"] != "new"].groupby(["level", "arm"]).size()
    for level in data.levels:
        missing = {arm: data.seeds_planned(level, arm) - int(started.get((level, arm), 0)) for arm in data.arms}
        if level not in started.index.get_level_values("level"):
            lines.append(f"  not started: all {sum(missing.values())} of {_place(data, level, 'every arm')}")
        elif any(missing.values()):
            counts = _listed(f"{number} of {arm}" for arm, number in missing.items() if number)
            lines.append(f"  not started: {_place(data, level, counts)}")
    return lines


def _inert(data: SweepData) -> list[str]:
    """Tricks that were switched on and touched nothing in a whole run, and in which arms."""
    lines = []
    done = data.finished.explode("inert").dropna(subset="inert")
    for axis, runs in done.groupby("inert"):
        if len(runs) == len(data.finished):
            where = "every finished run"
        else:
            counts = runs.groupby(["level", "arm"], sort=False).size()
            where = _listed(
                f"{number} of {data.seeds_finished(level, arm)} runs of {_place(data, level, arm)}"
                for (level, arm), number in counts.items()
            )
        lines.append(f"Inert: {axis} was switched on and touched nothing in {where}.")
    return lines


def _code(data: SweepData) -> list[str]:
    commits = sorted({str(commit)[:10] for commit in data.finished["commit"]})
    lines = [] if len(commits) == 1 else [f"The finished runs are of {len(commits)} commits: {_listed(commits)}."]
    changed = int(data.finished["dirty"].eq(True).sum())
    if changed:
        lines.append(f"{changed} finished runs are of code that differs from its commit; source.diff in each says how.")
    return lines


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
