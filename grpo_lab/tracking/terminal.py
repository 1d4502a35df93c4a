"""The one way to a terminal: texts as they are, without markup, control sequences or passwords.

What a model writes, an error quotes and a user names is printed in full. A control character is shown as a sign of its
own, so that no text moves the cursor or changes the terminal.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from grpo_lab.tracking.passwords import masked

_SIGNS = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    # C1 controls, what reverses the direction of a line, and halves of characters
    | dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], "\ufffd")
    | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
)


def printable(text: str) -> str:
    """The text with signs in place of control characters and masks in place of passwords."""
    return masked(text).translate(_SIGNS)


def say(*texts: object, sep: str = " ", end: str = "\n", error: bool = False, flush: bool = False) -> None:
    """`print` of printable texts, to standard error if `error`."""
    texts = tuple(printable(str(text)) for text in texts)
    print(*texts, sep=sep, end=end, file=sys.stderr if error else None, flush=flush)


class Terminal(Console):
    """A console of rich that takes texts as they are."""

    def __init__(self, stderr: bool = True, **settings: Any) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False, **settings)
        self.printed_at = -math.inf  # when the last line was printed, on the monotonic clock, in s

    def say(self, line: str, word: str = "") -> None:
        """Print a line that the reader's terminal wraps, after a coloured `word`."""
        self.printed_at = time.monotonic()
        start = (f"{word} ", "yellow") if word else ""
        self.print(Text.assemble(start, printable(line)), soft_wrap=True)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
