"""Other processes as tests see them: state, command, parents and children, read from Linux's /proc."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkProcess
from pathlib import Path

PATIENCE = 200.0  # seconds; other processes may share the cores


def python_path(*folders: Path) -> str:
    """PYTHONPATH with these folders first; the rest hides what a bare machine lacks."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def forked(target: Callable[[], object], output: Path | None = None) -> ForkProcess:
    """A process started as a copy of this one, which spares it the seconds that imports take.

    It has what the test has patched, and checks no shapes. `output` gets what it prints and says of errors.
    """

    def work() -> None:
        import jaxtyping

        jaxtyping.config.update("jaxtyping_disable", True)
        place = os.open(output or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(place, 1)
        os.dup2(place, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
        target()

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def forked_command(
    words: Sequence[str], output: Path | None = None, environment: Mapping[str, str] | None = None
) -> ForkProcess:
    """`python -m` with these words, by `forked`: for tests that are not of how a fresh interpreter starts."""

    def work() -> None:
        os.environ.update(environment or {})
        sys.argv = list(words)
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)

    return forked(work, output)


def wait_until(condition: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    """Look until it holds; fails after PATIENCE, and at once where `process` has ended and it does not hold."""
    deadline = time.monotonic() + PATIENCE
    while True:
        ended = process is not None and process.poll() is not None
        if condition():
            return
        assert not ended, f"the process ended before, with {process and process.returncode}"
        assert time.monotonic() < deadline, f"not within {PATIENCE:g} seconds"
        time.sleep(0.02)


def stat_of(pid: int) -> list[str]:
    """State, parent and what follows of a process; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def command_of(pid: int) -> str:
    """The command line of a process, words apart by blanks; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def name_of(pid: int) -> str:
    """The name a process has given itself, at most 15 characters of it; empty where there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not yet waited for does not."""
    return stat_of(pid)[:1] not in ([], ["Z"])


def children_of(parent: int) -> set[int]:
    """The processes that a process has started itself and that still run."""
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    return {pid for pid in pids if stat_of(pid)[1:2] == [str(parent)] and alive(pid)}


def descendants_of(parent: int) -> set[int]:
    """The children of a process, their children, and so on."""
    children = children_of(parent)
    return children.union(*(descendants_of(child) for child in children))


def with_word(word: str) -> set[int]:
    """The processes that have this word in their command and run, whoever has started them."""
    pids = {int(path.name) for path in Path("/proc").glob("[0-9]*")}
    return {pid for pid in pids if f" {word} " in command_of(pid) and alive(pid)}


def processor_seconds(pid: int) -> float:
    """CPU seconds that a process has used itself; 0 where there is none."""
    return sum(map(int, stat_of(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def processor_seconds_at_rest() -> float:
    """CPU seconds of this process and of all that it has started, once the others have nothing left to do."""
    while True:
        before = sum(map(processor_seconds, descendants_of(os.getpid())))
        time.sleep(0.5)
        others = sum(map(processor_seconds, descendants_of(os.getpid())))
        if others - before < 0.02:  # two ticks of their clocks
            return sum(os.times()[:4]) + others
