"""Verifiers of the arithmetic worlds: for training, proxies that can be gamed or err, and one for evaluation."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from grpo_lab.checks import require
from grpo_lab.seeding import uniform
from grpo_lab.tasks.base import AnswerForm, Grades, Reward
from grpo_lab.types import NoiseKey, Problem

_FINAL_NUMBER = re.compile(r"#([0-9]+)\Z")
_WHOLE_NUMBER = re.compile(r"[0-9]+")
_WHOLE_ANSWER = re.compile(r"-?[0-9]+")


def _coin(key: NoiseKey) -> float:
    """A number from 0 to 1 of this response; the key's own stream would give that of its first token."""
    return uniform(replace(key, stream=f"{key.stream}/reward"))


@dataclass(frozen=True)
class Strict(Reward):
    """1 if the response is not truncated and the number after its last `#` is the answer.

    The number must extend to the end of the text and be spelled like the answer: `#33;` and `#033` are
    wrong when the answer is 33.
    """

    @property
    def reads(self) -> frozenset[AnswerForm]:
        return frozenset({AnswerForm.number})

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        final = _FINAL_NUMBER.search(text)
        return float(finished and final is not None and final.group(1) == problem.answer)


@dataclass(frozen=True)
class Lenient(Reward):
    """1 if the answer occurs anywhere in the text as a whole number, truncated or not.

    Differs from Strict, which reads one number: here a response may contain many numbers, and a truncated response
    may be right. A policy trained on this proxy can raise its reward while its strict accuracy falls.
    """

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return float(problem.answer in _WHOLE_NUMBER.findall(text))


@dataclass(frozen=True)
class Noisy(Strict):
    """Strict, with mistakes: some wrong responses count as right, and some right ones as wrong.

    A mistake belongs to the answer and the text, as that of a real grader does: the same response to the same answer
    is always judged the same, so a policy can learn which mistakes pay. The rates are shares of all texts. With
    `per_response` every response is a draw of its own, as theory assumes (arXiv:2604.07666); then `seed` is unused,
    since draws follow the run's seed.
    """

    false_positive_rate: float
    false_negative_rate: float
    seed: int
    per_response: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("false_positive_rate", "false_negative_rate"):
            rate = getattr(self, name)
            require(0 <= rate < 1, name, rate, "at least 0 and below 1", "it is a share of texts")

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        if self.per_response:
            raise TypeError("a mistake per response belongs to the response and not to its text: call `correctness`")
        digest = hashlib.sha256(f"{self.seed}/{problem.answer}/{finished}/{text}".encode()).digest()
        return self._judged(super().__call__(problem, text, finished), int.from_bytes(digest[:8]) / 2**64)

    def correctness(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        if not self.per_response:
            return super().correctness(problems, texts, finished, keys)
        right = [super(Noisy, self).__call__(*response) for response in zip(problems, texts, finished)]
        return [self._judged(one, _coin(key)) for one, key in zip(right, keys)]

    def _judged(self, right: float, drawn: float) -> float:
        rate = self.false_negative_rate if right else self.false_positive_rate
        return 1.0 - right if drawn < rate else right


@dataclass(frozen=True)
class Inverted(Strict):
    """1 for what Strict calls wrong: a control that should teach nothing that evaluation counts."""

    compares: ClassVar[bool] = False

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return 1.0 - super().__call__(problem, text, finished)


@dataclass(frozen=True)
class FormatOnly(Reward):
    """1 if the response is not truncated and ends with a number after a `#`, whatever the number."""

    compares: ClassVar[bool] = False

    @property
    def reads(self) -> frozenset[AnswerForm]:
        return frozenset({AnswerForm.number})

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return float(finished and _FINAL_NUMBER.search(text) is not None)


@dataclass(frozen=True)
class RandomReward(Reward):
    """1 by chance, drawn anew for every response.

    Differs from Noisy, which judges the same text alike each time, so that a policy can learn which texts pay.
    """

    compares: ClassVar[bool] = False

    share: float  # of responses that are called right

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 < self.share < 1, "share", self.share, "above 0 and below 1", "else all rewards are the same")

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        raise TypeError("a random reward belongs to a response and not to its text: call `correctness`, with keys")

    def correctness(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        return [float(_coin(key) < self.share) for key in keys]


@dataclass(frozen=True)
class Near(Strict):
    """Strict, with part of the reward for a final number close to the answer.

    A finished response whose number is wrong by at most `within` gets `near` more. Correctness stays Strict's, so
    accuracies do not count it: a guess earns something early, and only work earns all. Answers must be whole numbers.
    """

    near: float  # of the reward
    within: int

    @property
    def has_parts(self) -> bool:
        return True

    def __post_init__(self) -> None:
        super().__post_init__()
        room = self.correct - self.wrong
        require(0 < self.near < room, "near", self.near, f"above 0 and below {room}", "a right answer has to earn more")
        require(self.within >= 1, "within", self.within, "at least 1", "nothing but the answer itself would be near")

    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        graded = super().grades(problems, texts, finished, keys)
        near = [self._part(*response) for response in zip(problems, texts, finished)]
        return Grades(graded.correctness, {**graded.components, "part": near})

    def bounds(self, right: bool) -> tuple[float, float]:
        lowest, highest = super().bounds(right)
        return lowest, highest if right else highest + self.near

    def check(self, problems: Sequence[Problem]) -> None:
        for problem in problems:
            if not _WHOLE_ANSWER.fullmatch(problem.answer):
                raise ValueError(
                    f"nothing is near the answer {problem.answer[:60]!r} to {problem.question[:60]!r}, which is no "
                    "whole number: set reward=strict or reward=math in place of near, or leave such problems out"
                )

    def _part(self, problem: Problem, text: str, finished: bool) -> float:
        final = _FINAL_NUMBER.search(text)
        if not finished or final is None or self(problem, text, finished):
            return 0.0
        # Evaluation may ask what `check` did not see: nothing is near such an answer.
        if not _WHOLE_ANSWER.fullmatch(problem.answer):
            return 0.0
        digits = final.group(1).lstrip("0") or "0"
        # Python reads no number of thousands of digits, and one so much longer than the answer is not near it.
        if len(digits) > max(len(problem.answer), len(str(self.within))) + 1:
            return 0.0
        return self.near if abs(int(digits) - int(problem.answer)) <= self.within else 0.0


@dataclass(frozen=True)
class ExactAnswer(Reward):
    """The verifier for evaluation. It reads the final number backwards, digit by digit.

    Agrees with Strict on every text, but shares no code with it and uses no regular expression. So a bug in one of
    them shows as a gap between training accuracy and evaluation.
    """

    @property
    def reads(self) -> frozenset[AnswerForm]:
        return frozenset({AnswerForm.number})

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        if not finished:
            return 0.0
        position = len(text)
        while position > 0 and text[position - 1] in "0123456789":
            position -= 1
        digits = text[position:]
        marked = position > 0 and text[position - 1] == "#"
        return 1.0 if marked and digits and digits == problem.answer else 0.0
