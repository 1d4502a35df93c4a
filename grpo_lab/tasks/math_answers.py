"""Rewards for mathematical answers: math-verify's verdict, the format alone, and a plain reading for evaluation."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from grpo_lab.checks import require, require_positive
from grpo_lab.tasks.base import AnswerForm, Reward
from grpo_lab.tasks.grader_pool import LONGEST_TEXT, Answer, GraderPool, shared_pool
from grpo_lab.tasks.plain_math import same_answer
from grpo_lab.types import NoiseKey, Problem

# A box holds what its braces enclose. Without braces it holds what begins as a number, a command or a lone letter does.
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
    r"(?:(?P<brace>\{)|(?=[-+]?(?:\.?[0-9]|\\(?!boxed|fbox)[a-zA-Z])|[a-zA-Z]\s?(?:\$|\\[)\]])))"
)
_BARE = re.compile(r"[^$\n]{1,100}?(?=\$|\\[)\]])|[^\s<$]{1,100}")  # to the end of the formula, or else one word
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, `\\boxed 5` or `\\fbox{...}`; None without one or if it is open."""
    box = _last_opening(text)
    if box is None:
        return None
    if not box["brace"]:
        bare = _BARE.match(text, box.end())
        return None if bare is None else bare.group()
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()]
    return None


MARKED = frozenset({AnswerForm.box, AnswerForm.tag})  # what `marked_answer` reads


def marked_answer(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `<answer>...</answer>`, whichever opens later; None if it is open."""
    tag, box = text.rfind("<answer>"), _last_opening(text)
    if box is not None and tag < box.start():
        return last_box(text)
    end = text.find("</answer>", tag)
    return None if tag < 0 or end < 0 else text[tag + len("<answer>") : end]


def _last_opening(text: str) -> re.Match[str] | None:
    """The opening of the last box, up to its content."""
    box = None
    for opening in _BOX.finditer(text):
        box = opening
    return box


class Reading(Enum):
    """Which part of a response math-verify judges.

    strict   the marked answer of a response that ended, in the last `\\boxed{...}` or the last `<answer>...</answer>`
    lenient  what math-verify finds anywhere in the text, in its own order: after `final answer is`, in a box, as LaTeX,
             or the last expression. It reads one place, but takes boxes close to each other, or with a comma, `and` or
             `or` between them, for one set.
    """

    strict = "strict"
    lenient = "lenient"


@dataclass(frozen=True)
class JudgedApart(Reward):
    """A reward whose answers are judged in processes of their own, within limits of time and memory.

    An answer that takes too much of either has failed (NaN). Of a long text the end is read.
    """

    may_fail: ClassVar[bool] = True
    pool: ClassVar[GraderPool] = shared_pool()

    seconds: float = field(kw_only=True)  # of processor time per answer
    workers: int = field(kw_only=True)  # processes

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "seconds")
        require(self.workers >= 1, "workers", self.workers, "at least 1", "workers judge the answers")

    @abstractmethod
    def known_or_pending(self, problem: Problem, text: str, finished: bool) -> float | Answer:
        """Correctness where it needs no worker, else what to ask one; arguments as in `__call__`."""

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return self.correctness([problem], [text], [finished], [])[0]

    def correctness(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        ends = [text[-LONGEST_TEXT:] for text in texts]
        each = [self.known_or_pending(*response) for response in zip(problems, ends, finished)]
        # The same answer to the same question is judged once.
        pending = list(dict.fromkeys(answer for answer in each if isinstance(answer, Answer)))
        judged = dict(zip(pending, self.pool.grade(pending, self.seconds, self.workers)))
        return [judged[answer] if isinstance(answer, Answer) else answer for answer in each]


@dataclass(frozen=True)
class MathVerify(JudgedApart):
    """1 if the answer equals the right one as mathematics, in the verdict of math-verify.

    An answer to a question whose right answer cannot be read has failed too (NaN).

    A sum or product left undone is equal to its value, so `37 \\cdot 43` is right for 1591. A policy can learn to leave
    the work; PlainMath does not fall for it.
    """

    reading: Reading

    @property
    def reads(self) -> frozenset[AnswerForm]:
        """Math-verify finds no number right behind a `#`."""
        return MARKED if self.reading is Reading.strict else super().reads - {AnswerForm.number}

    def known_or_pending(self, problem: Problem, text: str, finished: bool) -> float | Answer:
        strict = self.reading is Reading.strict
        if strict and not finished:
            return 0.0
        answer = marked_answer(text) if strict else text
        if answer is None or not answer.strip():
            return 0.0
        if answer.strip() == problem.answer.strip():
            return 1.0
        return Answer(problem.answer, answer, anywhere=not strict)


@dataclass(frozen=True)
class BoxedOnly(Reward):
    """1 if the response ended and its last `\\boxed{...}` has balanced braces and is not empty, right or wrong."""

    compares: ClassVar[bool] = False

    @property
    def reads(self) -> frozenset[AnswerForm]:
        return frozenset({AnswerForm.box})

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return float(finished and bool((last_box(text) or "").strip()))


@dataclass(frozen=True)
class PlainMath(Reward):
    """The verifier for evaluation: 1 if the response ended and its answer means what the right one means.

    It reads the last `\\boxed{...}`, else what follows the last `####`, else what follows the last `answer is` or
    `answer:`, else the last number of a clause that denies nothing. What it compares how is said in `plain_math.py`.
    Where the right answer is a number the answer has to be one too: `37 \\cdot 43` is not 1591. It shares no code with
    MathVerify, so a bug in one of them shows as a gap between training accuracy and evaluation.
    """

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        answer = _stated(text).strip() if finished else ""
        return float(bool(answer) and (answer == problem.answer.strip() or same_answer(problem.answer, answer)))


# Where PlainMath finds an answer, linear in the text. What the answer means is read in plain_math.py.
_OPENS = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_FORMULA_ENDS = re.compile(r"\$|\\[)\]]")
_ANNOUNCED = re.compile(r"answer is|answer:", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"[-\u2212]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")
_GOES_ON = re.compile(r"[\^_!}]|[a-zA-Z](?![a-zA-Z])")
_CLAUSE_ENDS = re.compile(r"[.,;:!?](?:\s|\Z)|\n")
_DENIED = re.compile(r"\b(?:not|never|no|nor|neither|cannot|wrong|incorrect)\b|n['\u2019]t\b", re.IGNORECASE)


def _stated(text: str) -> str:
    """The answer that a response states; "" if it states none, or opens a last box that it does not close."""
    if (marked := _marked(text)) is not None:
        return marked
    if (place := text.rfind("####")) >= 0:
        return text[place + 4 :].strip().split("\n", 1)[0]
    if announced := [found.end() for found in _ANNOUNCED.finditer(text)]:
        line = text[announced[-1] :].lstrip(" \t\r\n:*").split("\n", 1)[0]
        return line.split(". ", 1)[0].strip(" *")
    number = None
    for found in _NUMBER_IN_TEXT.finditer(text):
        number = found
    if number is None or _is_part(text, number) or _DENIED.search(_clause(text, number)):
        return ""
    return number.group()


def _is_part(text: str, number: re.Match[str]) -> bool:
    """True for a number inside an expression, such as in `\\sqrt{2}`, `x^4` or `5x`."""
    before = text[max(0, number.start() - 1) : number.start()]
    return bool((before and (before.isalpha() or before in "^_{")) or _GOES_ON.match(text, number.end()))


def _clause(text: str, number: re.Match[str]) -> str:
    """The part of a sentence around a number: `It is certainly not 42, though.` does not state 42."""
    before, after = text[max(0, number.start() - 200) : number.start()], text[number.end() : number.end() + 200]
    return _CLAUSE_ENDS.split(before)[-1] + " " + _CLAUSE_ENDS.split(after, maxsplit=1)[0]


def _marked(text: str) -> str | None:
    """Content of the last box or the last `<answer>`, whichever opens later, "" if it is open; None without both."""
    _, tag, after = text.rpartition("<answer>")
    box = _boxed(after)
    if not tag or box is not None:
        return box
    answer, closed, _ = after.partition("</answer>")
    return answer if closed else ""


def _boxed(text: str) -> str | None:
    """The content of the last box, "" if it is open; None without a box. `\\boxed 5` needs no braces."""
    for box in reversed(list(_OPENS.finditer(text))):
        start = box.end()
        if text.startswith("{", start):
            return _inside(text, start)
        begins = text[start : start + 2].lstrip("+-.")
        if begins[:1].isdigit() or (begins[:1] == "\\" and not _OPENS.match(text, start)):
            line = text[start : start + 100].split("\n", 1)[0]
            formula = _FORMULA_ENDS.split(line, maxsplit=1)
            return formula[0] if len(formula) > 1 else line.replace("<", " ").split(maxsplit=1)[0]
        if begins[:1].isalpha() and _FORMULA_ENDS.match(text[start + 1 : start + 4].lstrip()):
            return begins[0]
    return None


def _inside(text: str, opening: int) -> str:
    """The text between the brace at `opening` and its partner; "" without a partner."""
    open_braces, place = 0, opening
    while place < len(text):
        sign = text[place]
        if sign == "\\":
            place += 1
        elif sign == "{":
            open_braces += 1
        elif sign == "}":
            open_braces -= 1
            if open_braces == 0:
                return text[opening + 1 : place]
        place += 1
    return ""
