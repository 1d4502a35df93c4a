"""Progress of a run: live lines on a terminal; without one, a plain line now and then.

What a run does in a stage that takes long is shown in both, and in the file ACTIVITY of its folder for other shells.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column
from rich.text import Text

from grpo_lab.tracking.activity import Activity, current
from grpo_lab.tracking.run_reader import ACTIVITY, first_evaluation_seconds
from grpo_lab.tracking.terminal import Terminal

_PLAIN_SECONDS = 10.0  # between lines of finished steps if the output is no terminal
_SILENT_SECONDS = 30.0  # after which a plain line says what a stage is doing
_SHOWN_SECONDS = 1.0  # a shorter stage gets no live line
_NOTED_SECONDS = 5.0  # a shorter stage is not noted for other shells
_LOOK_SECONDS = 1.0  # between two looks at what the run does


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
        self.last_evaluation = 0.0  # expected seconds of the one at the end
        self.ends_at: float | None = None  # when the budget is spent, at the speed so far
        self.bar = Progress(
            BarColumn(bar_width=20, table_column=Column(min_width=20)),
            TextColumn("{task.percentage:>3.0f}%", markup=False, table_column=Column(min_width=4)),
            TextColumn("{task.fields[left]}", markup=False, table_column=Column(min_width=7)),
            TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self.console,
        )
        self.task = self.bar.add_task(name, total=1.0, left="")
        self.numbers = Text(no_wrap=True, overflow="ellipsis")
        self.live = Live(console=self.console, transient=True, get_renderable=self._picture)
        self._named = self.console.is_terminal  # whether what is printed is known to be of this run
        self._note: Path | None = None
        self._noted, self._writing = "", threading.Lock()
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._look, name="progress", daemon=True)

    def __enter__(self) -> RunProgress:
        if self.console.is_terminal:
            self.live.start()
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watch.join()
        self.live.stop()

    @contextlib.contextmanager
    def noting(self, folder: Path) -> Iterator[None]:
        """Within, note in the run's folder what it does: this process holds the folder's lock."""
        (folder / ACTIVITY).unlink(missing_ok=True)  # of an attempt that was killed
        self.last_evaluation = first_evaluation_seconds(folder)
        with self._writing:
            self._note = folder / ACTIVITY
        try:
            yield
        finally:
            self._write_note("")
            with self._writing:
                self._note = None

    def say(self, line: str, word: str = "") -> None:
        """Print a lasting line after a coloured `word`; the run's name is the first one where there is no terminal."""
        if not self._named:
            self._named = True
            self.console.say(self.name)
        self.last_line = time.monotonic()
        self.console.say(line, word)

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
        if step == 0:
            self.last_evaluation = float(timing.get("time/evaluate", 0.0))
        self.ends_at = self._expected_end(share, now)
        evaluated = any(name.startswith("eval/") for name in metrics)
        overdue = not self.console.is_terminal and now - self.last_line > _PLAIN_SECONDS
        if evaluated or overdue:
            self.say(line if self.console.is_terminal else f"{line}  {share:4.0%}  {self._left(now)}")

    def _expected_end(self, share: float, now: float) -> float | None:
        """From the steps of this process: what earlier attempts spent took another time."""
        done = share - (self.first_share or 0.0)
        if done <= 0 or share >= 1:
            return None
        return now + (now - self.started) * (1 - share) / done + self.last_evaluation

    def _left(self, now: float) -> str:
        return "" if self.ends_at is None else f"{clock(max(0.0, self.ends_at - now))} left"

    def _picture(self) -> Group:
        now, stages = time.monotonic(), current()
        self.bar.update(self.task, left=self._left(now))
        lines: list[RenderableType] = [self.bar, self.numbers] if self.numbers.plain else [self.bar]
        if stages and now - stages[0].began > _SHOWN_SECONDS:
            line = f"{_time_of(stages, now):<13}  {without_times(stages)}"
            lines.append(Text(line, no_wrap=True, overflow="ellipsis"))
        return Group(*lines)

    def _look(self) -> None:
        """In a thread: print a line after a silence, and note for other shells what takes long."""
        while not self._ended.wait(_LOOK_SECONDS):
            now, stages = time.monotonic(), current()
            lasted = now - stages[0].began if stages else 0.0
            self._write_note(describe_stages(stages, now) if lasted > _NOTED_SECONDS else "", without_times(stages))
            quiet_since = max(self.last_line, self.console.printed_at)
            if stages and not self.console.is_terminal and now - quiet_since >= _SILENT_SECONDS:
                self.say(describe_stages(stages, now))

    def _write_note(self, line: str, state: str = "") -> None:
        """Replace the note when the work has advanced: a run that hangs leaves it as it is."""
        state = state if line else ""
        with self._writing, contextlib.suppress(OSError):  # a full disk stops what is part of the run
            if self._note is None or state == self._noted:
                return
            self._noted = state
            if not line:
                self._note.unlink(missing_ok=True)
                return
            temporary = self._note.with_name(f"{ACTIVITY}.tmp")
            temporary.write_text(line)
            os.replace(temporary, self._note)


class Unshown:
    """In place of `RunProgress` where another process of the run shows it."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def __enter__(self) -> Unshown:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is shown."""

    def say(self, line: str, word: str = "") -> None:
        """Print nothing."""

    def show(
        self, step: int, share: float, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]
    ) -> None:
        """Show nothing."""


def describe(latest: Mapping[str, float | int], step: int) -> str:
    """One line of a run's latest numbers: step, training reward, held-out accuracy, truncated share, tokens/s.

    Held-out accuracy is that of the evaluation protocol, not of the training protocol. The share of
    ungraded responses is shown unless it is 0.
    """
    shown = {
        "reward": ("reward/mean", "{:.3f}"),
        "held-out (eval)": ("eval/heldout/accuracy", "{:.3f}"),
        "truncated": ("rollout/truncated", "{:.2f}"),
        "ungraded": ("rollout/ungraded", "{:.2f}"),
        "tok/s": ("time/tokens_per_second", "{:,.0f}"),
    }
    parts = [
        f"{label} {pattern.format(latest[name])}"
        for label, (name, pattern) in shown.items()
        if name in latest and (label != "ungraded" or latest[name])
    ]
    return f"step {step:>4}  " + "  ".join(parts)


def describe_stages(stages: Sequence[Activity], now: float) -> str:
    """The activity of a run in words: `step 0: evaluating, heldout: question 12 of 40, 30 of 96 in all, 1m05s left`."""
    return f"{without_times(stages)}, {_time_of(stages, now)}"


def without_times(stages: Sequence[Activity]) -> str:
    """The same while the work does not advance."""
    return ", ".join(filter(None, (stage.text for stage in stages)))


def _time_of(stages: Sequence[Activity], now: float) -> str:
    """The time left at the speed so far; without a count, the time that the outermost stage has taken."""
    share, began = 0.0, None
    for stage in reversed(stages):  # the whole of an inner stage is one unit of the one around it
        if stage.share is not None:
            share, began = stage.share, stage.began
        elif stage.total:
            share, began = (stage.done + share) / stage.total, stage.began
    if began is not None and share > 0:
        return f"{clock((now - began) * (1 - min(share, 1.0)) / share)} left"
    return f"{clock(now - stages[0].began)} so far"


def clock(seconds: float) -> str:
    """A duration as text, such as `3m07s`."""
    return f"{int(seconds // 60)}m{int(seconds % 60):02d}s"
