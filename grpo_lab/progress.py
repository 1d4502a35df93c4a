"""What a run shows while it works: one live line on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_PLAIN_SECONDS = 10.0  # between lines where the output is no terminal


class RunProgress:
    """Shows the share of the budget spent and the latest reward, accuracy, truncated share and speed."""

    def __init__(self, name: str, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.name = name
        self.latest: dict[str, float | int] = {}
        self.started = self.last_line = time.monotonic()
        self.first_share: float | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.task = self.bar.add_task(name, total=1.0)

    def __enter__(self) -> RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def show(
        self, step: int, share: float, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]
    ) -> None:
        """Report one finished step; `share` is the part of the budget that is spent."""
        self.latest.update(metrics)
        self.latest.update(timing)
        line = self.describe(step)
        self.bar.update(self.task, completed=min(share, 1.0), description=line)
        now = time.monotonic()
        if self.first_share is None:
            self.first_share, self.started = share, now
        evaluated = any(name.startswith("eval/") for name in metrics)
        if not self.console.is_terminal and (evaluated or now - self.last_line > _PLAIN_SECONDS):
            self.last_line = now
            self.console.print(f"{line}  {share:4.0%}  {self._left(share, now)}", highlight=False, soft_wrap=True)

    def _left(self, share: float, now: float) -> str:
        done = share - (self.first_share or 0.0)
        if done <= 0 or share >= 1:
            return ""
        seconds = (now - self.started) * (1 - share) / done
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s left"

    def describe(self, step: int) -> str:
        """One line: step, training reward, held-out accuracy, truncated share, tokens per second."""
        shown = {
            "reward": ("reward/mean", "{:.3f}"),
            "held-out": ("eval/heldout/accuracy", "{:.3f}"),
            "truncated": ("rollout/truncated", "{:.2f}"),
            "tok/s": ("time/tokens_per_second", "{:,.0f}"),
        }
        parts = [
            f"{label} {pattern.format(self.latest[name])}"
            for label, (name, pattern) in shown.items()
            if name in self.latest
        ]
        return f"{self.name}  step {step}  " + "  ".join(parts)
