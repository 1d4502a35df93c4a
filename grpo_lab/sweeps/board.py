"""What a sweep shows while it works: every running cell live, and one lasting line for each that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_lab.tracking.progress import clock, describe
from grpo_lab.tracking.run_reader import StepReader

_LOOK_SECONDS = 1.0  # between two looks at the cells' logs
_PLAIN_SECONDS = 60.0  # between lines where the output is no terminal


@dataclass(eq=False)
class WatchedCell:
    """A running cell as its log shows it. `axis` and `amount` are its budget."""

    title: str
    folder: Path
    axis: str
    amount: float
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    latest: dict[str, float | int] = field(default_factory=dict)
    begun: float = 0.0  # the share of its budget that earlier attempts had spent

    def __post_init__(self) -> None:
        self._reader = StepReader(self.folder)

    def look(self) -> None:
        """Read what the run has logged since."""
        try:
            records = self._reader.poll()
        except (ValueError, OSError):  # a damaged log: the run itself says so, and fails
            return
        for record in records:
            self.step = record.step
            self.latest.update(record.metrics)
            self.latest.update(record.timing)

    @property
    def share(self) -> float:
        """The part of its budget that is spent."""
        return min(1.0, self.latest.get(f"budget/{self.axis}", 0.0) / self.amount)

    @property
    def line(self) -> str:
        """Its latest numbers, or that there are none yet."""
        return describe(self.latest, self.step) if self.latest else "starting"


class Board:
    """Follows `total` cells, of which `done` were finished before."""

    def __init__(self, name: str, total: int, done: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.name, self.total, self.done, self.failed = name, total, done, 0
        self.running: list[WatchedCell] = []
        self._first_done, self._began = done, time.monotonic()
        self._head_start = 0.0  # what earlier attempts at cells that are done by now had spent, in cells
        self._looked = self._printed = 0.0
        self.live = Live(Text(""), console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> Board:
        self.say(f"{self.name}: {self.total} cells, {self.done} finished before")
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def say(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def start(self, cell: WatchedCell) -> None:
        """A cell's process was started."""
        cell.look()
        cell.begun = cell.share
        self.running.append(cell)

    def leave(self, cell: WatchedCell) -> None:
        """A cell's process ended because another one runs the cell: follow it no longer."""
        self.running = [other for other in self.running if other is not cell]

    def end(self, cell: WatchedCell, failure: str | None) -> None:
        """A cell's process ended; `failure` says why, where it failed."""
        cell.look()
        self.leave(cell)
        self.failed += failure is not None
        self.done += failure is None
        if failure is None:
            self._head_start += cell.begun
        word = "failed" if failure else "done  "
        self.say(f"{word} {cell.title}: {failure or cell.line}  ({clock(time.monotonic() - cell.started)})")

    def refresh(self) -> None:
        """Look at the running cells, at most once a second, and show them."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for cell in self.running:
            cell.look()
        if self.console.is_terminal:
            self.live.update(self._picture())
        elif now - self._printed > _PLAIN_SECONDS:
            self._printed = now
            self.say(self.summary())

    def summary(self) -> str:
        """`3 of 9 done, 2 running, 1 failed, 4m10s left`."""
        waiting = self.total - self.done - self.failed - len(self.running)
        counts = {"running": len(self.running), "waiting": waiting, "failed": self.failed}
        parts = [f"{self.done} of {self.total} done", *(f"{count} {word}" for word, count in counts.items() if count)]
        return ", ".join([*parts, *self._left()])

    def _left(self) -> Sequence[str]:
        head_start = self._head_start + sum(cell.begun for cell in self.running)
        spent = self.done - self._first_done + sum(cell.share for cell in self.running) - head_start
        if spent <= 0.05:
            return []
        remaining = self.total - self.failed - self._first_done - head_start - spent
        if remaining <= 0:
            return []
        return [f"{clock((time.monotonic() - self._began) * remaining / spent)} left"]

    def _picture(self) -> Group:
        table = Table.grid(padding=(0, 1))
        for cell in self.running:
            name = Text(cell.title, overflow="ellipsis", no_wrap=True)
            numbers = Text(cell.line, overflow="ellipsis", no_wrap=True)
            table.add_row(ProgressBar(total=1.0, completed=cell.share, width=12), name, numbers)
        # Numbers first, so that a narrow terminal cuts the name and nothing else.
        return Group(Text(f"{self.summary()}  {self.name}", overflow="ellipsis", no_wrap=True), table)
