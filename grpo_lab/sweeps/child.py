"""A cell's process: how it is started, here or by a cluster, and that it ends together with what started it."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

PARENT = "GRPO_LAB_SWEEP_PROCESS"
OUTPUT = "output.log"  # in the run's folder: command and output of every attempt
BUSY = 75  # the exit status of a run whose folder another process holds; EX_TEMPFAIL of sysexits.h
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0  # time for a run to flush its mirror


def cell_command(words: Sequence[str], module: str = "grpo_lab.train") -> list[str]:
    """The command that runs these overrides."""
    return [sys.executable, "-m", module, *words]


def thread_limits(threads: int) -> dict[str, str]:
    """The environment variables that limit the threads of a process's libraries."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def write_command(output: IO[bytes], command: Sequence[str]) -> None:
    """Begin an attempt in a cell's output."""
    output.write(f"$ {shlex.join(command)}\n".encode())
    output.flush()


def open_cell(
    words: Sequence[str],
    folder: Path,
    threads: int,
    further: Mapping[str, str],
    module: str = "grpo_lab.train",
    cwd: Path | None = None,
) -> subprocess.Popen:
    """Start the run of these overrides in a fresh interpreter; its output goes to output.log in its folder.

    `further` are environment variables beside those that limit its threads. Another `module` than the one that trains
    gets its own words. It works in the folder `cwd`, or here.
    """
    command = cell_command(words, module)
    with (folder / OUTPUT).open("ab") as output:
        write_command(output, command)
        return subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only what started it, which interrupts its cells
            env={**os.environ, PARENT: str(os.getpid()), **thread_limits(threads), **further},
        )


def follow_parent() -> None:
    """In a cell's process: end by SIGINT when the sweep sends it, or when the sweep dies."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    # Children of a sweep in a shell's background inherit that SIGINT is ignored, those of Ray's workers that it waits.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(int(parent),), name="sweep-watch", daemon=True).start()


def _end_with(parent: int) -> None:
    """Interrupt this process when its parent is gone, up to three times: Python drops an interrupt in a __del__."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
