"""Progress of a sweep: a live view of every run in progress, and a lasting line for each run that ends."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from grpo_lab.tracking.progress import clock, describe
from grpo_lab.tracking.run_reader import StepReader, activity_of, is_held, saved_spending, was_stopped
from grpo_lab.tracking.terminal import Terminal

_LOOK_SECONDS = 1.0  # between two reads of the runs' logs
_PLAIN_SECONDS = 60.0  # between lines if the output is no terminal


@dataclass(eq=False)
class WatchedRun:
    """A run in progress, followed through its log. `axis` and `amount` are its budget."""

    title: str
    folder: Path
    axis: str
    amount: float
    started: float = field(default_factory=time.monotonic)
    step: int = 0
    latest: dict[str, float | int] = field(default_factory=dict)
    begun: float = 0.0  # share of its budget spent by earlier attempts
    note: str = ""  # what it waits for, before its first step
    activity: str = ""  # what it is doing, where that takes long

    def __post_init__(self) -> None:
        self._reader = StepReader(self.folder)

    def look(self) -> None:
        """Read new steps from the run's log."""
        try:
            records = self._reader.poll()
        except (ValueError, OSError):  # a damaged log: the run itself reports it and fails
            return
        for record in records:
            self.step = record.step
            self.latest.update(record.metrics)
            self.latest.update(record.timing)
        self.activity = activity_of(self.folder)

    @property
    def share(self) -> float:
        """The spent part of its budget, from 0 to 1."""
        return min(1.0, self.latest.get(f"budget/{self.axis}", 0.0) / self.amount)

    @property
    def line(self) -> str:
        """The reason that it waits, else its latest numbers and its activity; "starting" before the first."""
        if self.note:
            return self.note
        numbers = describe(self.latest, self.step) if self.latest else "" if self.activity else "starting"
        return "  ".join(filter(None, (numbers, self.activity)))


class ProgressDisplay:
    """Shows the progress of `total` runs, of which `done` were finished before."""

    def __init__(self, name: str, total: int, done: int, console: Terminal | None = None) -> None:
        self.console = console or Terminal()
        self.name, self.total, self.done, self.failed, self.stopped = name, total, done, 0, 0
        self.running: list[WatchedRun] = []
        self._first_done, self._began = done, time.monotonic()
        self._head_start = 0.0  # spent by earlier attempts at runs done since; unit: runs
        self._looked = self._printed = 0.0
        self.live = Live(Text(""), console=self.console, transient=True, refresh_per_second=4)

    def __enter__(self) -> ProgressDisplay:
        self.say(f"{self.name}: {self.total} runs, {self.done} finished before")
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def say(self, line: str) -> None:
        """Print a lasting line."""
        self.console.say(line)

    def start(self, run: WatchedRun) -> None:
        """Follow a run whose process was started."""
        run.look()
        if is_held(run.folder):  # a job that an earlier sweep left
            run.begun = run.share
        else:
            run.begun = min(1.0, saved_spending(run.folder, run.axis) / run.amount)
        self.running.append(run)

    def leave(self, run: WatchedRun) -> None:
        """Stop following a run, because another process runs it."""
        self.running = [other for other in self.running if other is not run]

    def end(self, run: WatchedRun, failure: str | None) -> None:
        """Report a run whose process ended; `failure` is the reason if it failed, or was stopped."""
        run.look()
        run.note = run.activity = ""
        if all(run is not one for one in self.running):  # another process has run it
            run.begun = run.share
        self.leave(run)
        stopped = failure is not None and was_stopped(run.folder)
        self.stopped += stopped
        self.failed += failure is not None and not stopped
        self.done += failure is None
        if failure is None:
            self._head_start += run.begun
        word = "stopped" if stopped else "failed" if failure else "done  "
        self.say(f"{word} {run.title}: {failure or run.line}  ({clock(time.monotonic() - run.started)})")

    def refresh(self) -> None:
        """Read the running runs' logs, at most once a second, and show their progress."""
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return
        self._looked = now
        for run in self.running:
            run.look()
        if self.console.is_terminal:
            self.live.update(self._picture())
        elif now - self._printed > _PLAIN_SECONDS:
            self._printed = now
            self.say(self.summary())

    def summary(self) -> str:
        """The state in one line, such as `3 of 9 done, 2 running, 1 failed, 4m10s left`."""
        waiting = self.total - self.done - self.failed - self.stopped - len(self.running)
        counts = {
            "running": len(self.running), "waiting": waiting, "stopped": self.stopped, "failed": self.failed
        }  # fmt: skip
        parts = [f"{self.done} of {self.total} done", *(f"{count} {word}" for word, count in counts.items() if count)]
        return ", ".join([*parts, *self._left()])

    def _left(self) -> Sequence[str]:
        head_start = self._head_start + sum(run.begun for run in self.running)
        spent = self.done - self._first_done + sum(run.share for run in self.running) - head_start
        if spent <= 0.05:
            return []
        remaining = self.total - self.failed - self.stopped - self._first_done - head_start - spent
        if remaining <= 0:
            return []
        return [f"{clock((time.monotonic() - self._began) * remaining / spent)} left"]

    def _picture(self) -> Group:
        table = Table.grid(padding=(0, 1))
        for run in self.running:
            name = Text(run.title, overflow="ellipsis", no_wrap=True)
            numbers = Text(run.line, overflow="ellipsis", no_wrap=True)
            table.add_row(ProgressBar(total=1.0, completed=run.share, width=12), name, numbers)
        # Numbers first, so that a narrow terminal cuts only the name.
        return Group(Text(f"{self.summary()}  {self.name}", overflow="ellipsis", no_wrap=True), table)
