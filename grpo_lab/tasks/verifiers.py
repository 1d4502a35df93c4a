"""Verifiers of the arithmetic world: one for training, a proxy that can be gamed, one for evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_lab.tasks.base import Reward

_FINAL_NUMBER = re.compile(r"#([0-9]+)\Z")
_WHOLE_NUMBER = re.compile(r"[0-9]+")


@dataclass(frozen=True)
class Strict(Reward):
    """1 if the response is not truncated and the number after its last `#` is the answer.

    The number must extend to the end of the text and be spelled like the answer: `#33;` and `#033` are
    wrong when the answer is 33.
    """

    def __call__(self, answer: str, text: str, finished: bool) -> float:
        final = _FINAL_NUMBER.search(text)
        return float(finished and final is not None and final.group(1) == answer)


@dataclass(frozen=True)
class Lenient(Reward):
    """1 if the answer occurs anywhere in the text as a whole number, truncated or not.

    Differs from Strict, which reads one number: here a response may contain many numbers, and a truncated response
    may be right. A policy trained on this proxy can raise its reward while its strict accuracy falls.
    """

    def __call__(self, answer: str, text: str, finished: bool) -> float:
        return float(answer in _WHOLE_NUMBER.findall(text))


@dataclass(frozen=True)
class ExactAnswer(Reward):
    """The verifier for evaluation. It reads the final number backwards, digit by digit.

    Agrees with Strict on every text, but shares no code with it and uses no regular expression. So a bug in one of
    them shows as a gap between training outcome and evaluation.
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
