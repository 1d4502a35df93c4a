"""From a reward to its verdicts on every case: its form of answer, the score it accepts from, the answers it is for."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from grpo_lab.instruments.reward_audit import SETTING
from grpo_lab.instruments.reward_audit.corpus import FORMS, AnswerType, Form, RewardCase, Truth
from grpo_lab.tasks.function_reward import absolute, call_of, new_pool
from grpo_lab.tasks.grader_pool import LIMITS, GraderPool
from grpo_lab.types import Problem

QUESTION = "What is the answer?"
# Right and wrong answers of each type, of the same length, by which form, threshold and served types are found.
PROBES = {
    AnswerType.integer: (("5", "6"), ("42", "24"), ("72", "27")),
    AnswerType.decimal: (("0.5", "0.7"), ("12.25", "21.25"), ("3.14", "2.71")),
    AnswerType.fraction: (("1/2", "1/3"), ("3/4", "4/5"), ("5/8", "7/8")),
    AnswerType.choice: (("A", "B"), ("B", "C"), ("C", "D")),
    AnswerType.measure: (("5 cm", "7 cm"), ("3 hours", "2 hours"), ("50%", "40%")),
    AnswerType.list: (("1, 2", "3, 4"), ("1, 2, 3", "4, 5, 6"), ("(3, 4)", "(5, 6)")),
    AnswerType.text: (("Paris", "Tokyo"), ("seven", "eight"), ("blue whale", "grey shark")),
    AnswerType.other: (("(5", "(6"), ("1+1", "2+2"), ("[", "]")),
}


class Scored(NamedTuple):
    """A score, or NaN and the reason for it."""

    score: float
    why: str


class Response(NamedTuple):
    """Arguments of a reward besides the question."""

    gold: str
    text: str
    finished: bool = True


@dataclass
class Subject:
    """The audited reward in its own processes, each response limited to `seconds` of CPU time and 2 GiB of memory."""

    name: str
    pool: GraderPool
    seconds: float
    workers: int
    accepts_from: float | None = None  # known for an option, whose correctness is 0 or 1

    @classmethod
    def function(cls, function: str, seconds: float, workers: int) -> Subject:
        """FILE.py:FUNCTION or module:function."""
        return cls(function, new_pool((absolute(function),)), seconds, workers)

    @classmethod
    def option(cls, slot: str, overrides: Sequence[str], name: str, seconds: float, workers: int) -> Subject:
        """The reward or verifier that Hydra overrides choose. Its own limits come first where it has some."""
        os.environ[SETTING] = json.dumps([slot, list(overrides)])
        function = "grpo_lab.instruments.reward_audit.option_reward:score"
        return cls(name, new_pool((function,)), 4 * seconds, workers, 1.0)

    def score(self, responses: Sequence[Response]) -> list[Scored]:
        """Its score of each response. Raises ValueError if it cannot be loaded."""
        calls = [call_of(0, Problem(0, QUESTION, one.gold, 1), one.text, one.finished) for one in responses]
        return [Scored(*one) for one in self.pool.judge(calls, self.seconds, self.workers)]


@dataclass(frozen=True)
class RewardForm:
    """How a reward is read: the form in which it finds answers, the score it accepts from, the types it serves.

    `blind`: it scores plain right and plain wrong answers alike.
    """

    form: Form
    accepts_from: float
    types: frozenset[AnswerType]
    blind: bool


class Verdict(NamedTuple):
    """One case, the response as it was judged, and the reward's score or error."""

    case: RewardCase
    text: str
    accepted: bool
    score: float
    why: str

    @property
    def over_limits(self) -> bool:
        return self.why.startswith(LIMITS)


@dataclass(frozen=True)
class Audit:
    """All verdicts on a reward, and the cases left out because they are outside its task."""

    name: str
    reading: RewardForm
    verdicts: list[Verdict]
    left_out: list[RewardCase] = field(default_factory=list)

    @property
    def false_positives(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.case.truth is Truth.wrong and one.accepted]

    @property
    def false_negatives(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.case.truth is Truth.right and not one.accepted and not one.why]

    @property
    def errors(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.why and not one.over_limits]

    @property
    def over_limits(self) -> list[Verdict]:
        return [one for one in self.verdicts if one.over_limits]


def read(subject: Subject, forms: Sequence[Form] = FORMS, accepts_from: float | None = None) -> RewardForm:
    """Find form, threshold and types by plain right and wrong answers.

    The form is the one in which right answers score most above wrong ones. Without a known threshold a response counts
    as accepted from halfway between the mean scores of wrong and of right answers on; where these are equal, from the
    lowest score of a right one on. A type is served if more than half of its plain right answers are accepted. Raises
    ValueError with the reason if no right answer scores above zero or a wrong one.
    """
    rows = [
        (form, kind, right)
        for form in forms
        for kind, pairs in PROBES.items()
        for _ in pairs
        for right in (True, False)
    ]
    responses = [
        Response(pair[0], RewardCase("", "", pair[0], f"I worked it out. [[{answer}]]", Truth.right).text(form) or "")
        for form in forms
        for pairs in PROBES.values()
        for pair in pairs
        for answer in pair
    ]
    scored = subject.score(responses)
    known = subject.accepts_from if accepts_from is None else accepts_from

    def scores(form: Form, kind: AnswerType, right: bool) -> list[float]:
        return [0.0 if one.why else one.score for row, one in zip(rows, scored) if row == (form, kind, right)]

    def margin(form: Form, kind: AnswerType) -> float:
        return statistics.mean(scores(form, kind, True)) - statistics.mean(scores(form, kind, False))

    def worth(form: Form) -> tuple[float, float]:
        total = sum(statistics.mean(scores(form, kind, True)) for kind in PROBES)
        return sum(max(0.0, margin(form, kind)) for kind in PROBES), total

    form = max(forms, key=worth)  # the first of equals
    separated, total = worth(form)
    if separated <= 0 and total <= 0:
        why = next((f": {one.why}" for one in scored if one.why), "")
        names = ", ".join(one.name for one in forms)
        remedy = "name its form with --form, such as '<final>{}</final>', or 'think:<final>{}</final>' after <think>"
        raise ValueError(f"{subject.name} accepts no plain right answer in any form ({names}){why}; {remedy}")
    if known is None and separated <= 0:
        known = min(score for kind in PROBES for score in scores(form, kind, True))
    elif known is None:
        margins = {kind: margin(form, kind) for kind in PROBES}
        best = [kind for kind in PROBES if margins[kind] > max(margins.values()) / 2]
        ends = [statistics.mean(s for kind in best for s in scores(form, kind, right)) for right in (True, False)]
        known = statistics.mean(ends)
    served = {kind for kind in PROBES if sum(one >= known for one in scores(form, kind, True)) > len(PROBES[kind]) / 2}
    return RewardForm(form, known, frozenset(served), separated <= 0)


def audit(subject: Subject, cases: Sequence[RewardCase], reading: RewardForm) -> Audit:
    """Judge every case that the form can express and whose type of answer the reward serves."""
    served = [case for case in cases if case.type in reading.types]
    texts = [(case, case.text(reading.form)) for case in served]
    tried = [(case, text) for case, text in texts if text is not None]
    scored = subject.score([Response(case.gold, text, case.finished) for case, text in tried])
    verdicts = [
        Verdict(case, text, not one.why and one.score >= reading.accepts_from, one.score, one.why)
        for (case, text), one in zip(tried, scored)
    ]
    kept = {id(case) for case, _ in tried}
    return Audit(subject.name, reading, verdicts, [case for case in cases if id(case) not in kept])
