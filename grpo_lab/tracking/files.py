"""Files that survive a kill: replaced whole or not at all, and locks that the kernel frees when the holder dies."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import math
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class RunFolderError(OSError):
    """The run folder cannot be written; the message says why and what to do."""


class RunFolderBusyError(RunFolderError):
    """Another process holds the folder."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
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
        elif error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            remedy = "this file system has no file locks: set runs_dir to one that has them"
        else:
            remedy = "set runs_dir (or GRPO_LAB_RUNS) to a folder this user can write"
        raise RunFolderError(f"{reason}: {path} cannot be written; {remedy}") from error


def atomic_write(path: Path, content: bytes | str) -> None:
    """Replace `path` by `content` so that readers find the old file or the new one whole, even after a kill.

    Creates the parent folder. Text is UTF-8. Raises RunFolderError.
    """
    payload = content.encode() if isinstance(content, str) else content
    write_atomically(path, lambda temporary: temporary.write_bytes(payload))


def write_json(path: Path, value: Any, sort: bool = True, indent: int | None = 2) -> None:
    """`atomic_write` of strict JSON; `sort=False` keeps the order of keys, `indent=None` writes one line.

    Raises ValueError for a number that is not finite.
    """
    separators = (",", ":") if indent is None else None
    atomic_write(path, json.dumps(value, indent=indent, sort_keys=sort, allow_nan=False, separators=separators) + "\n")


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary file beside `path`, then move it into place; it is on disk on return."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with explained(path):
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
    """Take the exclusive lock file `path`, waiting at most `wait_seconds`. Close the returned descriptor to free it.

    Raises RunFolderBusyError with the process that holds it.
    """
    with explained(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        deadline = time.monotonic() + wait_seconds
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise RunFolderBusyError(
                            f"{path.parent} is in use by process {lock_holder(path)}: wait until it ends, or stop it"
                        ) from None
                    time.sleep(0.02)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()} {os.uname().nodename}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor


def lock_holder(path: Path) -> str:
    """Who holds a lock, or held it last: `1234`, `1234 on node7` for another machine, or `unknown`."""
    try:
        process, _, node = path.read_text().strip().partition(" ")
    except OSError:
        return "unknown"
    return f"{process} on {node}" if node not in ("", os.uname().nodename) else process or "unknown"


@contextmanager
def locked(path: Path, wait_seconds: float) -> Iterator[None]:
    """Hold the lock of `acquire_lock` during a with block."""
    descriptor = acquire_lock(path, wait_seconds)
    try:
        yield
    finally:
        os.close(descriptor)


def make_once(folder: Path, make: Callable[[Path], None], is_whole: Callable[[Path], bool]) -> Path:
    """The folder, filled by `make` if it is not there or not whole; other processes wait for the one that makes it.

    `make` is given an empty folder beside it, so that an interrupted attempt leaves nothing that could pass for it.
    """
    if is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(f"{folder.name}.lock"), math.inf):
        if not is_whole(folder):
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a killed attempt
            partial.mkdir()
            try:
                make(partial)
                shutil.rmtree(folder, ignore_errors=True)  # not whole
                os.replace(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def follow_umask(folder: Path) -> None:
    """Give every file in the folder the mode of one opened here: safetensors writes some for their owner only."""
    probe = folder / ".probe"
    probe.touch()
    mode = stat.S_IMODE(probe.stat().st_mode)
    probe.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def keep_previous(path: Path) -> None:
    """Rename a file of an earlier attempt to the next free number: error.txt -> error.1.txt. Raises RunFolderError."""
    if path.exists():
        names = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
        with explained(path):
            path.rename(next(name for name in names if not name.exists()))
