"""Reads a run folder from any process, during the run or long after it; `run_log` describes the files."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_lab.tracking.files import lock_holder
from grpo_lab.tracking.metrics import GPU_PEAK
from grpo_lab.tracking.renames import with_metric_names

NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

EXHAUSTED = "Exhausted"  # what error.txt opens with where nothing was left to train on
ACTIVITY = ".activity"  # while a run's stage takes long: what it is doing, in one line
STOPPED = "stopped by grpo-lab stop"  # what such a run says of its end in error.txt, after KeyboardInterrupt
STOP = ".stop"  # there once `grpo-lab stop` was asked to end the run, until it goes on
_SPEED = "time/tokens_per_second"  # among the times of a step, and none
_CHECKPOINT = re.compile(r"step=(\d+)")

Status = Literal["new", "partial", "failed", "done"]


def is_held(folder: Path) -> bool:
    """True if a living process, this one included, has a RunLog open on `folder`."""
    try:
        descriptor = os.open(folder / ".lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(folder: Path) -> str:
    """The process that holds `folder`, or held it last, as `lock_holder` names it."""
    return lock_holder(folder / ".lock")


def run_status(folder: Path) -> Status:
    """The status of the run in `folder`, without locking it; "new" means that it has recorded nothing."""
    if (folder / "DONE").exists():
        return "done"
    if (folder / "error.txt").exists():
        return "failed"
    metrics = folder / "metrics.jsonl"
    if (folder / "run.json").exists() or (metrics.exists() and metrics.stat().st_size > 0):
        return "partial"
    return "new"


def was_interrupted(folder: Path) -> bool:
    """True if Ctrl-C or the end of its sweep ended the last attempt at a run, and not an error."""
    return interruption_message(folder) is not None


def interruption_message(folder: Path, since: float = 0.0) -> str | None:
    """The last words of an interrupted run, on what is saved and lost; None if none ended it since that unix time."""
    path = folder / "error.txt"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    kind, _, text = path.read_text(errors="replace").partition("\n")[0].partition(":")
    return text.strip() if kind == "KeyboardInterrupt" else None


def was_stopped(folder: Path) -> bool:
    """True if `grpo-lab stop` ended the last attempt at a run, and no error did first."""
    return (folder / STOP).exists() and (run_status(folder) in ("new", "partial") or was_interrupted(folder))


def activity_of(folder: Path) -> str:
    """The current activity of the run in `folder`; "" where it notes none."""
    try:
        return (folder / ACTIVITY).read_text()
    except OSError:
        return ""


def saved_step(folder: Path) -> int | None:
    """The step of the last checkpoint, from which the run goes on; None without one."""
    names = (_CHECKPOINT.fullmatch(path.name) for path in (folder / "checkpoints").glob("step=*"))
    return max((int(name[1]) for name in names if name), default=None)


def saved_spending(folder: Path, axis: str) -> float:
    """The budget spent at a run's last checkpoint, from which it goes on; 0 without one."""
    saved, spent = saved_step(folder), 0.0
    if saved is None:
        return spent
    with suppress(ValueError, OSError):  # a damaged log: the run itself reports it
        for record in read_steps(folder):
            if record.step <= saved:
                spent = float({**record.metrics, **record.timing}.get(f"budget/{axis}", spent))
    return spent


def stage_seconds(timing: Mapping[str, float | int]) -> float:
    """The seconds that a step's stages took."""
    return sum(value for name, value in timing.items() if name.startswith("time/") and name != _SPEED)


def first_evaluation_seconds(folder: Path) -> float:
    """How long the evaluation before the first step took, which that at the end repeats; 0 where it is not logged."""
    path = folder / "timing.jsonl"
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged log costs a guess alone
        with path.open("rb") as stream:
            first = parse_line(stream.readline(), path)
        if first["step"] == 0:
            return float(first["timing"].get("time/evaluate", 0.0))
    return 0.0


def gpu_peak(folder: Path) -> float:
    """The most GPU memory in GiB that a run had reserved, once it has trained a step; 0 where that is not logged.

    Raises ValueError for a damaged log.
    """
    return max((float(one.timing.get(GPU_PEAK, 0.0)) for one in read_steps(folder) if one.step), default=0.0)


def was_exhausted(folder: Path) -> bool:
    """True if the last attempt at a run ended since nothing was left to train on; another would end alike."""
    path = folder / "error.txt"
    return path.exists() and not (folder / "DONE").exists() and path.read_bytes().startswith(EXHAUSTED.encode())


def has_ended(folder: Path) -> bool:
    """True if a run needs no further attempt: it is done, or nothing was left to train on."""
    return run_status(folder) == "done" or was_exhausted(folder)


@dataclass(frozen=True)
class StepRecord:
    """One logged step; values that are not finite are among the others again.

    `wall` is the unix time in ms at which the step was first logged, and `timing` is of that attempt. If a
    power cut destroyed them, `wall` is that of the previous step (0 for the first) and `timing` is empty.
    """

    step: int
    wall: int
    metrics: Mapping[str, float | int]
    timing: Mapping[str, float | int]


class StepReader:
    """Reads the steps of a run folder as they are appended; needs no lock."""

    def __init__(self, folder: Path) -> None:
        self._metrics = _Lines(folder / "metrics.jsonl", "metrics")
        self._timing = _Lines(folder / "timing.jsonl", "timing")
        self._first: dict[int, tuple[int, dict[str, float | int]]] = {}
        self._wall = 0

    def poll(self) -> list[StepRecord]:
        """The complete steps since the last poll; all steps again after metrics.jsonl was rewound.

        Raises ValueError with file and line if a line is not what `RunLog` writes.
        """
        # Metrics before timing, the reverse of the writer, so that no step is seen without its time.
        lines = self._metrics.poll()
        for line in self._timing.poll():
            self._first.setdefault(line["step"], (line.get("wall", 0), _values(line, "timing")))
        records = []
        for line in lines:
            self._wall, timing = self._first.get(line["step"], (self._wall, {}))
            records.append(StepRecord(line["step"], self._wall, _values(line, "metrics"), timing))
        return records


class _Lines:
    """The complete lines of one growing JSON lines file, each with its step and a `section` of numbers."""

    def __init__(self, path: Path, section: str) -> None:
        self._path, self._section = path, section
        self._offset = 0
        self._last = b""

    def poll(self) -> list[dict[str, Any]]:
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return []
        with stream:
            # A file that was rewound may have grown past the offset again: compare content, not size.
            stream.seek(self._offset - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._offset, self._last = 0, b""
                stream.seek(0)
            content = stream.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        records = [parse_line(line, self._path) for line in lines]
        for record in records:
            values, lost = record.get(self._section), record.get("nonfinite", {})
            if not (isinstance(values, dict) and isinstance(lost, dict) and set(lost.values()) <= NONFINITE.keys()):
                raise ValueError(
                    f"{self._path} has a line of step {record['step']} that no run writes: it was edited, or the disk "
                    "fails; restore it from a copy, or start the run again in another folder"
                )
        if lines:
            self._offset += sum(map(len, lines))
            self._last = lines[-1]
        return records


def parse_line(line: bytes, path: Path) -> dict[str, Any]:
    """Parse one line of the file `path`. Raises ValueError with a remedy if `RunLog` would not write it."""
    try:
        record = json.loads(line)
        what = None if isinstance(record, dict) and isinstance(record.get("step"), int) else "of no step"
    except ValueError:
        what = "that is not JSON"
    if what is not None:
        raise ValueError(
            f"{path} has a line {what}, {line[:60]!r}: it was edited, or the disk fails; remove "
            "that line and all below it, then start the run again"
        )
    return record


def _values(line: Mapping[str, Any], section: str) -> dict[str, float | int]:
    lost = {name: NONFINITE[value] for name, value in line.get("nonfinite", {}).items()}
    return with_metric_names({**line[section], **lost})


def read_steps(folder: Path) -> Iterator[StepRecord]:
    """The complete steps of a run folder in order; none if nothing was logged yet."""
    yield from StepReader(folder).poll()
