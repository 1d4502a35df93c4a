"""Verifiers of the arithmetic world: one to train on, a proxy that can be gamed, one to evaluate with."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_lab.tasks.base import Reward

_FINAL_NUMBER = re.compile(r"#([0-9]+)\Z")
_WHOLE_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Strict(Reward):
    """1 if the response ended by itself and the number after its last `#` is the answer.

    The number must run to the end of the text and be spelled like the answer: `#33;` and `#033` are
    wrong when the answer is 33.
    """

    def __call__(self, answer: str, text: str, finished: bool) -> float:
        final = _FINAL_NUMBER.search(text)
        return float(finished and final is not None and final.group(1) == answer)


@dataclass(frozen=True)
class Lenient(Reward):
    """1 if the answer stands anywhere in the text as a whole number, finished or not.

    Differs from Strict, which reads one number: here a response may name as many as it likes, and a
    response cut by the budget still counts. A policy trained on this proxy can raise its reward while
    its strict accuracy falls.
    """

    def __call__(self, answer: str, text: str, finished: bool) -> float:
        return float(answer in _WHOLE_NUMBER.findall(text))


@dataclass(frozen=True)
class ExactAnswer(Reward):
    """The evaluation's verifier: reads the last clause of the grammar backwards, digit by digit.

    Agrees with Strict on every text, by another road: no pattern, and none of Strict's code. A fault
    in one of them therefore shows as a gap between the training outcome and the evaluation.
    """

    def __call__(self, answer: str, text: str, finished: bool) -> float:
        if not finished:
            return 0.0
        position = len(text)
        while position > 0 and text[position - 1] in "0123456789":
            position -= 1
        digits = text[position:]
        marked = position > 0 and text[position - 1] == "#"
        return 1.0 if marked and digits and digits == answer else 0.0
