"""Writes the run folder, which is the truth about a run: steps, tables, markers and the lock that guards them.

    metrics.jsonl   {"step": 12, "metrics": {...}}, no clock in it, the same bytes for the same run
    timing.jsonl    {"step": 12, "wall": <unix ms>, "timing": {...}}, one line per attempt at a step
    <kind>/step=000100.parquet
    DONE | error.txt | error.<n>.txt   how the run ended, and how earlier attempts ended
    .lock           held by the process that writes the folder; the kernel frees it when that one dies

A process killed at any instant leaves at most one partial last line in each file, which the next start cuts
off. Steps increase within metrics.jsonl, one line each.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import time
import traceback
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from grpo_lab.tracking.files import acquire_lock, atomic_write, explained, keep_previous, write_json
from grpo_lab.tracking.passwords import masked
from grpo_lab.tracking.run_reader import STOP, Status, parse_line, run_status

FSYNC_SECONDS = 5.0  # at most this much of a run is lost when the machine, not the process, dies
LOCK_PATIENCE_SECONDS = 1.0  # longer than `is_held`, which takes the lock for microseconds
MAX_NAME_LENGTH = 250  # characters; MLflow's limit, kept here so that every recorded name can be exported
NAME = re.compile(r"\w[\w.\- :]*(/\w[\w.\- :]*)*")

logger = logging.getLogger("grpo_lab.tracking")


# A forked child shares its parent's lock until it closes its copy. Without this, a worker that outlives a
# killed run would keep the folder locked.
_open_logs: weakref.WeakSet[RunLog] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for log in list(_open_logs):
        log._close_descriptors()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunLog:
    """The only writer of a run folder.

    The constructor creates the folder, tests that it can be written, takes its lock and cuts off partial last lines.
    The last attempt's error.txt stays until `begin`. Raises RunFolderError, before anything slow has been loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._descriptors: dict[str, int] = {}
        with explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptors["lock"] = acquire_lock(self.folder / ".lock", LOCK_PATIENCE_SECONDS)
        _open_logs.add(self)
        try:
            atomic_write(self.folder / ".probe", b"\0" * 4096)  # an empty file would fit on a full disk
            with explained(self.folder):
                (self.folder / ".probe").unlink()
                for leftover in (*self.folder.glob("*/.step=*.tmp"), *self.folder.glob(".*.tmp")):
                    leftover.unlink()
                self._metrics = self._open("metrics.jsonl")
                self._timing = self._open("timing.jsonl")
                self._digest = hashlib.sha256((self.folder / "metrics.jsonl").read_bytes())
        except BaseException:
            self._close_descriptors()
            raise
        self._last_step: int | None = None  # read on first use: `rewind` may first cut off a damaged end
        self._tables: dict[str, str] = {}
        self._synced_at = time.monotonic()

    def begin(self) -> None:
        """Start an attempt at the run, just before its first write; files of earlier attempts are renamed, not lost.

        An old error.txt becomes error.1.txt (or the next free number), and so do environment.json and
        source.diff. A request to stop that attempt is forgotten. Do not call it when refusing to resume, so that a
        failed run stays "failed". Raises RunFolderError.
        """
        for name in ("error.txt", "environment.json", "source.diff"):
            keep_previous(self.folder / name)
        with explained(self.folder):
            (self.folder / STOP).unlink(missing_ok=True)

    def _open(self, name: str) -> int:
        """Open for appending, after cutting off a partial last line."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._descriptors[name] = descriptor
        content = (self.folder / name).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(descriptor, whole)
        return descriptor

    @property
    def last_step(self) -> int:
        """The step that was logged last; -1 before the first."""
        last = self._last_step
        if last is None:
            lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
            last = int(parse_line(lines[-1], self.folder / "metrics.jsonl")["step"]) if lines else -1
            self._last_step = last
        return last

    def write_step(self, step: int, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]) -> None:
        """Append one step: `metrics` depend only on the run, `timing` holds everything read from a clock.

        Each file gets one line, written by one system call. Values that are not finite go under "nonfinite". Raises
        ValueError if steps do not increase or MLflow would not accept a name. Raises RunFolderError if the disk
        refuses; then metrics.jsonl holds nothing of the step.
        """
        if step <= (last := self.last_step):
            raise ValueError(
                f"step {step} follows step {last} in {self.folder / 'metrics.jsonl'}: log every "
                "step once and in order, and rewind() to a checkpoint's position before repeating steps"
            )
        # Timing first: then a reader that sees a line of metrics.jsonl also finds the step's time.
        timing_line = {"step": step, "wall": time.time_ns() // 1_000_000, **_section("timing", timing)}
        metrics_line = {"step": step, **_section("metrics", metrics)}
        self._append("timing.jsonl", timing_line)
        self._digest.update(self._append("metrics.jsonl", metrics_line))
        self._last_step = step
        if time.monotonic() - self._synced_at >= FSYNC_SECONDS:
            self._sync()

    def _append(self, name: str, record: Mapping[str, Any]) -> bytes:
        descriptor, line = self._descriptors[name], json.dumps(record, allow_nan=False).encode() + b"\n"
        with explained(self.folder / name):
            written = 0
            try:
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                # A full disk may have written part of the line: remove that part.
                with suppress(OSError):
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise
        return line

    def _sync(self) -> None:
        with explained(self.folder):
            os.fsync(self._timing)
            os.fsync(self._metrics)
        self._synced_at = time.monotonic()

    @property
    def empty(self) -> bool:
        """True if no step is logged."""
        return os.fstat(self._metrics).st_size == 0

    def stamp(self) -> dict[str, Any]:
        """The log's size and digests, which a checkpoint saves; the log is on disk when this returns.

        `bytes` and `sha256` are of metrics.jsonl, whose last line is of `step`; `tables` has the digest of every table
        so far. All describe what was written, even if a file was changed later.
        """
        self._sync()
        size = os.fstat(self._metrics).st_size
        written = {"bytes": size, "sha256": self._digest.hexdigest(), "step": self.last_step}
        return written | {"tables": dict(self._tables)}

    def differs(self, stamp: Mapping[str, Any]) -> str | None:
        """Why metrics.jsonl does not begin with the log that was stamped; None if it does."""
        path, size = self.folder / "metrics.jsonl", os.fstat(self._metrics).st_size
        if size < stamp["bytes"]:
            return f"{path} has {size} bytes, and the checkpoint was saved at {stamp['bytes']}: it was cut short"
        if hashlib.sha256(os.pread(self._metrics, stamp["bytes"], 0)).hexdigest() != stamp["sha256"]:
            return f"{path} is damaged: its first {stamp['bytes']} bytes are not what was written"
        return None

    def rewind(self, position: int, tables: Mapping[str, str] | None = None) -> None:
        """Cut metrics.jsonl off at `position` bytes, where a checkpoint was saved; 0 removes all steps.

        `tables` are those in the checkpoint's stamp. timing.jsonl stays whole: a step's timestamp is the time at
        which it was first logged. Raises ValueError if the position is not the end of a line.
        """
        size = os.fstat(self._metrics).st_size
        if not 0 <= position <= size or (position and os.pread(self._metrics, 1, position - 1) != b"\n"):
            raise ValueError(
                f"position {position} is no end of a line in {self.folder / 'metrics.jsonl'} ({size} bytes): the file "
                "was cut short or is of another run: restore it, or move this run's folder away and start it afresh"
            )
        with explained(self.folder):
            os.ftruncate(self._metrics, position)
        self._digest = hashlib.sha256((self.folder / "metrics.jsonl").read_bytes())
        self._tables = dict(tables or {})
        self._sync()
        self._last_step = None

    def lost_tables(self) -> list[str]:
        """The tables of this run that no longer exist, as paths in its folder."""
        return sorted(name for name in self._tables if not (self.folder / name).exists())

    def write_table(self, kind: str, step: int, frame: pd.DataFrame) -> Path:
        """Write `frame` (its index is dropped) as `<kind>/step=000100.parquet`, whole or not at all.

        Raises RunFolderError.
        """
        name = f"{kind}/step={step:06d}.parquet"
        content = frame.to_parquet(compression="zstd", index=False)
        atomic_write(self.folder / name, content)
        self._tables[name] = hashlib.sha256(content).hexdigest()
        return self.folder / name

    def mark_done(self, summary: Mapping[str, Any]) -> None:
        """End the run: put everything on disk, then write DONE with `summary` (JSON values)."""
        self._sync()
        write_json(self.folder / "DONE", dict(summary))

    def mark_error(self, error: BaseException) -> None:
        """Write error.txt: the message, then the traceback. Never raises, so that `error` reaches the caller."""
        text = masked(f"{type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}")
        try:
            atomic_write(self.folder / "error.txt", text.encode(errors="replace"))
        except OSError as failure:
            logger.warning("error.txt could not be written: %s", failure)

    def status(self) -> Status:
        """See `run_status`; a run that failed is "partial" again from `begin` on."""
        return run_status(self.folder)

    def close(self) -> None:
        """Put everything on disk and unlock the folder; a second call does nothing."""
        if self._descriptors:
            try:
                self._sync()
            finally:
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class UnwrittenLog:
    """In place of `RunLog` in a process that computes a run whose folder another process writes."""

    last_step = -1

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write_step(self, step: int, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]) -> None:
        """Write nothing."""

    def write_table(self, kind: str, step: int, frame: pd.DataFrame) -> None:
        """Write nothing."""

    def stamp(self) -> dict[str, Any]:
        """Nothing is logged here, and no checkpoint is written from here."""
        return {"bytes": 0, "sha256": "", "tables": {}}


def _section(name: str, values: Mapping[str, float | int]) -> dict[str, dict[str, Any]]:
    """{name: finite values} and, if there are any others, {"nonfinite": {...}}; keys sorted."""
    finite: dict[str, float | int] = {}
    nonfinite: dict[str, str] = {}
    for key in sorted(values):
        if not NAME.fullmatch(key) or len(key) > MAX_NAME_LENGTH:
            raise ValueError(
                f"{key!r} cannot be the name of a metric: use letters, digits, _ - . : and single slashes, "
                f"at most {MAX_NAME_LENGTH} characters (pass_at_8, not pass@8)"
            )
        value = values[key] if type(values[key]) is int else float(values[key])
        if math.isfinite(value):
            finite[key] = value
        else:
            nonfinite[key] = str(value)
    return {name: finite} | ({"nonfinite": nonfinite} if nonfinite else {})
