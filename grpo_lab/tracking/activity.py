"""The current activity of this process and its progress; `progress.py` shows it.

Stages report where they work, and a report costs an addition. Only the main thread's work is kept: a user waits for no
other.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")
Part = tuple[str, Hashable]  # a suite and one of its questions


@dataclass(eq=False)
class Activity:
    """One stage: `done` of `total` units; `total` 0 where the number is not known.

    `share` is the finished part of the work where it is not done / total. `parts` say, for every request of a call of
    the sampler, which suite and question it belongs to.
    """

    name: str
    total: int = 0
    unit: str = ""
    parts: Sequence[Part] = ()
    done: int = 0
    note: str = ""
    share: float | None = None
    began: float = field(default_factory=time.monotonic)

    @property
    def text(self) -> str:
        """Its name and counts, without times: `heldout: question 12 of 40, 30 of 96 in all`."""
        counts = f"{self.done} of {self.total} {self.unit}".rstrip() if self.total else ""
        return ", ".join(filter(None, (self.name, self.note, counts)))

    def each(self, items: Iterable[T]) -> Iterator[T]:
        """The items, counted as they are asked for again."""
        for item in items:
            yield item
            self.done += 1


_stack: list[Activity] = []  # the innermost last


def current() -> list[Activity]:
    """The main thread's stages, the innermost last; may be asked from any thread."""
    return list(_stack)


@contextmanager
def doing(name: str, total: int = 0, unit: str = "", parts: Sequence[Part] = ()) -> Iterator[Activity]:
    """Report a stage for as long as the block runs."""
    here = Activity(name, total, unit, parts)
    if threading.current_thread() is not threading.main_thread():
        yield here
        return
    _stack.append(here)
    try:
        yield here
    finally:
        _stack.remove(here)


class Sampling:
    """The responses of one call of the sampler: which have ended, and how many tokens the others have."""

    def __init__(self, here: Activity, limits: Sequence[int], parts: Sequence[Part]) -> None:
        self._here, self._limits, self._parts = here, limits, parts
        self._all, self._ended = max(1, sum(limits)), 0
        self._waiting = Counter(parts)  # responses to each question that have not ended
        self._questions, self._answered = Counter(name for name, _ in self._waiting), Counter[str]()

    def end(self, request: int) -> None:
        """Count the response to the request at this position as ended."""
        self._ended += self._limits[request]
        self._here.share = self._ended / self._all
        if not self._parts:
            self._here.done += 1
            return
        suite, question = self._parts[request]
        self._waiting[suite, question] -= 1
        if self._waiting[suite, question] == 0:
            self._here.done += 1
            self._answered[suite] += 1
            self._here.note = f"{suite}: question {self._answered[suite]} of {self._questions[suite]}"
            self._here.unit = "in all"

    def grow(self, tokens: int) -> None:
        """Set how many tokens the responses in flight have, those that wait left out."""
        self._here.share = min(1.0, (self._ended + tokens) / self._all)


@contextmanager
def sampling(limits: Sequence[int]) -> Iterator[Sampling]:
    """Report one call of the sampler; `limits` are the most tokens that each response may still get.

    The stage that calls it may name the suite and question of every request by its `parts`.
    """
    parts = _stack[-1].parts if _stack and len(_stack[-1].parts) == len(limits) else ()
    questions = len(set(parts))
    with doing("", questions or len(limits), "questions" if questions else "responses") as here:
        yield Sampling(here, limits, parts)
