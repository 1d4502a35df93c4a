"""Progress of a run: two live lines on a terminal; without one, a plain line now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from grpo_lab.tracking.terminal import Terminal

_PLAIN_SECONDS = 10.0  # between lines if the output is no terminal


class RunProgress:
    """Shows the share of the budget spent and the latest reward, accuracy, truncated share and speed.

    Every evaluation prints a lasting line. The live lines start with the numbers, so that a narrow terminal
    cuts only the run's name.
    """

    def __init__(self, name: str, console: Terminal | None = None) -> None:
        self.console = console or Terminal()
        self.name = name
        self.latest: dict[str, float | int] = {}
        self.started = self.last_line = time.monotonic()
        self.first_share: float | None = None
        self.bar = Progress(
            BarColumn(bar_width=20, table_column=Column(min_width=20)),
            TextColumn("{task.percentage:>3.0f}%", markup=False, table_column=Column(min_width=4)),
            TimeRemainingColumn(table_column=Column(min_width=7)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self.console,
        )
        self.task = self.bar.add_task(name, total=1.0)
        self.numbers = Text(no_wrap=True, overflow="ellipsis")
        self.live = Live(Group(self.bar, self.numbers), console=self.console, transient=True)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self.live.start()
        else:
            self.console.say(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def show(
        self, step: int, share: float, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]
    ) -> None:
        """Show one finished step; `share` is the spent part of the budget."""
        self.latest.update(metrics)
        self.latest.update(timing)
        line = describe(self.latest, step)
        self.bar.update(self.task, completed=min(share, 1.0))
        self.numbers.plain = line
        now = time.monotonic()
        if self.first_share is None:
            self.first_share, self.started = share, now
        evaluated = any(name.startswith("eval/") for name in metrics)
        overdue = not self.console.is_terminal and now - self.last_line > _PLAIN_SECONDS
        if evaluated or overdue:
            self.last_line = now
            spent = "" if self.console.is_terminal else f"  {share:4.0%}  {self._left(share, now)}"
            self.console.say(line + spent)

    def _left(self, share: float, now: float) -> str:
        done = share - (self.first_share or 0.0)
        if done <= 0 or share >= 1:
            return ""
        seconds = (now - self.started) * (1 - share) / done
        return f"{clock(seconds)} left"


class Unshown:
    """In place of `RunProgress` where another process of the run shows it."""

    def show(
        self, step: int, share: float, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]
    ) -> None:
        """Show nothing."""


def describe(latest: Mapping[str, float | int], step: int) -> str:
    """One line of a run's latest numbers: step, training reward, held-out accuracy, truncated share, tokens/s.

    Held-out accuracy is that of the evaluation protocol, not of the training protocol.
    """
    shown = {
        "reward": ("reward/mean", "{:.3f}"),
        "held-out (eval)": ("eval/heldout/accuracy", "{:.3f}"),
        "truncated": ("rollout/truncated", "{:.2f}"),
        "tok/s": ("time/tokens_per_second", "{:,.0f}"),
    }
    parts = [f"{label} {pattern.format(latest[name])}" for label, (name, pattern) in shown.items() if name in latest]
    return f"step {step:>4}  " + "  ".join(parts)


def clock(seconds: float) -> str:
    """A duration as text, such as `3m07s`."""
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
