"""The run folder, which is the truth about a run: steps, tables, markers and the lock that guards them.

    metrics.jsonl   {"step": 12, "metrics": {...}}, no clock in it, the same bytes for the same run
    timing.jsonl    {"step": 12, "wall": <unix ms>, "timing": {...}}, one line per attempt at a step
    <kind>/step=000100.parquet
    DONE | error.txt | error.<n>.txt   how the run ended, and how earlier attempts ended
    .lock           held by the process that writes the folder; the kernel frees it when that one dies

A process killed at any instant leaves at most one partial last line in each file, cut off at the next
start. Steps increase within metrics.jsonl, one line each.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import logging
import math
import os
import re
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import pandas as pd

FSYNC_SECONDS = 5.0  # at most this much of a run is lost when the machine, not the process, dies
LOCK_PATIENCE_SECONDS = 1.0  # outlasts a look by `is_held`, which takes the lock for microseconds
MAX_NAME_LENGTH = 250  # characters; MLflow's limit, kept here so that every recorded name can be mirrored
NAME = re.compile(r"\w[\w.\- :]*(/\w[\w.\- :]*)*")
NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Status = Literal["new", "partial", "failed", "done"]

logger = logging.getLogger("grpo_lab.tracking")


class RunFolderError(OSError):
    """The run folder cannot be written; the message says why and what to do."""


class RunFolderBusyError(RunFolderError):
    """Another process holds the folder."""


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn an OSError about `path` into a RunFolderError with a remedy."""
    try:
        yield
    except RunFolderError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "free space and start the same command again: it resumes from the last checkpoint"
        elif error.errno in (errno.ENOTDIR, errno.EEXIST, errno.EISDIR):
            remedy = "a file stands where a folder must be, or the reverse: move it, or set another runs_dir"
        elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP):
            remedy = "this file system has no file locks: set runs_dir to one that has them"
        else:
            remedy = "set runs_dir (or GRPO_LAB_RUNS) to a folder this user can write"
        raise RunFolderError(f"{reason}: {path} cannot be written; {remedy}") from error


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` so that a reader, or a kill, sees the old file or the new one whole.

    Creates the parent folder. Text is UTF-8. Raises RunFolderError.
    """
    payload = content.encode() if isinstance(content, str) else content
    _write_whole(path, lambda temporary: temporary.write_bytes(payload))


def write_json(path: Path, value: Any) -> None:
    """`atomic_write` of strict JSON, keys sorted. Raises ValueError on a number that is not finite."""
    atomic_write(path, json.dumps(value, indent=2, sort_keys=True, allow_nan=False) + "\n")


def _write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path` and move it into place, durable on return."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(temporary)
            _fsync_path(temporary)
            os.replace(temporary, path)
            _fsync_path(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def _fsync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def acquire_lock(path: Path, wait_seconds: float) -> int:
    """Take the exclusive lock file `path`, waiting at most `wait_seconds`; close the result to free it.

    Raises RunFolderBusyError naming the process that holds it.
    """
    with _explained(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_seconds
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        holder = os.pread(descriptor, 20, 0).decode().strip() or "unknown"
                        raise RunFolderBusyError(
                            f"{path.parent} is in use by process {holder}: wait until it ends, or stop it"
                        ) from None
                    time.sleep(0.02)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def is_held(folder: Path) -> bool:
    """Whether a living process, this one included, has a RunLog open on `folder`."""
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


def run_status(folder: Path) -> Status:
    """Where the run in `folder` stands, without opening it: "new" means nothing of it is worth keeping."""
    if (folder / "DONE").exists():
        return "done"
    if (folder / "error.txt").exists():
        return "failed"
    metrics = folder / "metrics.jsonl"
    if (folder / "run.json").exists() or (metrics.exists() and metrics.stat().st_size > 0):
        return "partial"
    return "new"


# A forked child shares its parent's lock until it closes it too: without this, a worker that outlives a
# killed run would keep the folder shut.
_open_logs: weakref.WeakSet[RunLog] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for log in list(_open_logs):
        log._close_descriptors()


os.register_at_fork(after_in_child=_let_go_in_child)


class RunLog:
    """The one writer of a run folder.

    Opening creates the folder, proves that it can be written, takes its lock, cuts off partial last lines
    and moves an old error.txt aside. Raises RunFolderError, before anything slow has been loaded.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._descriptors: dict[str, int] = {}
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._descriptors["lock"] = acquire_lock(self.folder / ".lock", LOCK_PATIENCE_SECONDS)
        _open_logs.add(self)
        try:
            atomic_write(self.folder / ".probe", b"\0" * 4096)  # an empty file would fit on a full disk
            with _explained(self.folder):
                (self.folder / ".probe").unlink()
                for leftover in self.folder.glob("**/.step=*.tmp"):
                    leftover.unlink()
                self._keep_old_error()
                self._metrics = self._open("metrics.jsonl")
                self._timing = self._open("timing.jsonl")
            self._last_step = self._read_last_step()
        except BaseException:
            self._close_descriptors()
            raise
        self._synced_at = time.monotonic()

    def _keep_old_error(self) -> None:
        if (self.folder / "error.txt").exists():
            names = (self.folder / f"error.{number}.txt" for number in itertools.count(1))
            (self.folder / "error.txt").rename(next(name for name in names if not name.exists()))

    def _open(self, name: str) -> int:
        """Open for appending, a partial last line cut off."""
        descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._descriptors[name] = descriptor
        content = (self.folder / name).read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(descriptor, whole)
        return descriptor

    def _read_last_step(self) -> int:
        lines = (self.folder / "metrics.jsonl").read_bytes().splitlines()
        return _parse(lines[-1], self.folder / "metrics.jsonl")["step"] if lines else -1

    def write_step(self, step: int, metrics: Mapping[str, float | int], timing: Mapping[str, float | int]) -> None:
        """Append one step: `metrics` are functions of the run alone, `timing` holds everything with a clock.

        One line in each file, each written by one system call. Values that are not finite go beside the
        others, under "nonfinite". Steps must increase, and a name must be one MLflow accepts, else
        ValueError; RunFolderError when the disk refuses, with nothing of the step left in metrics.jsonl.
        """
        if step <= self._last_step:
            raise ValueError(
                f"step {step} follows step {self._last_step} in {self.folder / 'metrics.jsonl'}: log every "
                "step once and in order, and rewind() to a checkpoint's position before repeating steps"
            )
        # Timing first: whoever sees a line of metrics.jsonl then also finds the step's time.
        timing_line = {"step": step, "wall": time.time_ns() // 1_000_000, **_section("timing", timing)}
        metrics_line = {"step": step, **_section("metrics", metrics)}
        self._append(self._timing, timing_line)
        self._append(self._metrics, metrics_line)
        self._last_step = step
        if time.monotonic() - self._synced_at >= FSYNC_SECONDS:
            self._sync()

    def _append(self, descriptor: int, record: Mapping[str, Any]) -> None:
        line = json.dumps(record, allow_nan=False).encode() + b"\n"
        with _explained(self.folder):
            written = 0
            try:
                while written < len(line):
                    written += os.write(descriptor, line[written:])
            except OSError:
                # A disk that fills up takes part of a line: take that part back.
                with suppress(OSError):
                    os.ftruncate(descriptor, os.fstat(descriptor).st_size - written)
                raise

    def _sync(self) -> None:
        with _explained(self.folder):
            os.fsync(self._timing)
            os.fsync(self._metrics)
        self._synced_at = time.monotonic()

    def position(self) -> int:
        """Bytes in metrics.jsonl, all of them on disk when this returns; a checkpoint stores the number."""
        self._sync()
        return os.fstat(self._metrics).st_size

    def rewind(self, position: int) -> None:
        """Forget the steps logged after a checkpoint took `position` (bytes); 0 forgets all.

        timing.jsonl keeps them: the first time at which a step was logged stays its timestamp. Raises
        ValueError when the position is no end of a line, so the checkpoint is of another run.
        """
        size = os.fstat(self._metrics).st_size
        if not 0 <= position <= size or (position and os.pread(self._metrics, 1, position - 1) != b"\n"):
            raise ValueError(
                f"position {position} is no end of a line in {self.folder / 'metrics.jsonl'} ({size} bytes): "
                "the checkpoint belongs to another run; remove it, or start the run afresh with rerun=true"
            )
        with _explained(self.folder):
            os.ftruncate(self._metrics, position)
        self._sync()
        self._last_step = self._read_last_step()

    def write_table(self, kind: str, step: int, frame: pd.DataFrame) -> Path:
        """Write `frame` (its index is dropped) as `<kind>/step=000100.parquet`, whole or not at all.

        Raises RunFolderError.
        """
        path = self.folder / kind / f"step={step:06d}.parquet"
        _write_whole(path, lambda temporary: frame.to_parquet(temporary, compression="zstd", index=False))
        return path

    def mark_done(self, summary: Mapping[str, Any]) -> None:
        """Everything is on disk and the run is over: write DONE with `summary` (JSON values)."""
        self._sync()
        write_json(self.folder / "DONE", dict(summary))

    def mark_error(self, error: BaseException) -> None:
        """Write error.txt: the message, then the traceback. Never raises, as `error` must get through."""
        text = f"{type(error).__name__}: {error}\n\n{''.join(traceback.format_exception(error))}"
        try:
            atomic_write(self.folder / "error.txt", text)
        except OSError as failure:
            logger.warning("error.txt could not be written: %s", failure)

    def status(self) -> Status:
        """See `run_status`; a folder opened again after a failure is "partial"."""
        return run_status(self.folder)

    def close(self) -> None:
        """Put everything on disk and free the folder; a second call does nothing."""
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


def _section(name: str, values: Mapping[str, float | int]) -> dict[str, dict[str, Any]]:
    """{name: finite values} and, only where there are any, {"nonfinite": {...}}; keys sorted."""
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


@dataclass(frozen=True)
class StepRecord:
    """One logged step, with values that are not finite back in their places.

    `wall` is the unix time in ms at which the step was first logged, and `timing` is of that attempt. Where
    a power cut took them, `wall` is the step's before (0 for the first) and `timing` is empty.
    """

    step: int
    wall: int
    metrics: Mapping[str, float | int]
    timing: Mapping[str, float | int]


class StepReader:
    """Reads the steps of a run folder as they are appended, by any process, locked or not."""

    def __init__(self, folder: Path) -> None:
        self._metrics = _Lines(folder / "metrics.jsonl")
        self._timing = _Lines(folder / "timing.jsonl")
        self._first: dict[int, tuple[int, dict[str, float | int]]] = {}
        self._wall = 0

    def poll(self) -> list[StepRecord]:
        """Complete steps since the last poll; all of them again after metrics.jsonl was rewound.

        Raises ValueError with file and line where a line is not what `RunLog` writes.
        """
        # Metrics before timing, the reverse of the writer, so that no step is seen without its time.
        lines = self._metrics.poll()
        for line in self._timing.poll():
            self._first.setdefault(line["step"], (line["wall"], _values(line, "timing")))
        records = []
        for line in lines:
            self._wall, timing = self._first.get(line["step"], (self._wall, {}))
            records.append(StepRecord(line["step"], self._wall, _values(line, "metrics"), timing))
        return records


class _Lines:
    """The complete lines of one growing JSON lines file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._last = b""

    def poll(self) -> list[dict[str, Any]]:
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return []
        with stream:
            # A file that was rewound and has grown again differs before the offset: compare, not measure.
            stream.seek(self._offset - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._offset, self._last = 0, b""
                stream.seek(0)
            content = stream.read()
        lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
        records = [_parse(line, self._path) for line in lines]
        if lines:
            self._offset += sum(map(len, lines))
            self._last = lines[-1]
        return records


def _parse(line: bytes, path: Path) -> dict[str, Any]:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path} has a line that is not JSON, {line[:60]!r}: it was edited, or the disk fails; remove "
            "that line and all below it, then start the run again"
        ) from error


def _values(line: Mapping[str, Any], section: str) -> dict[str, float | int]:
    lost = {name: NONFINITE[value] for name, value in line.get("nonfinite", {}).items()}
    return {**line[section], **lost}


def read_steps(folder: Path) -> Iterator[StepRecord]:
    """The complete steps of a run folder in order; none where nothing was logged yet."""
    yield from StepReader(folder).poll()
