"""A run's process: how it is started, here or by a cluster, and that it ends together with what started it."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from grpo_lab.distributed import ranks
from grpo_lab.engines.base import EngineFailure
from grpo_lab.tracking import interrupt
from grpo_lab.tracking.files import RunFolderBusyError
from grpo_lab.tracking.passwords import masked
from grpo_lab.tracking.provenance import typed
from grpo_lab.tracking.terminal import printable, say

PARENT = "GRPO_LAB_SWEEP_PROCESS"
OUTPUT = "output.log"  # in the run's folder: command and output of every attempt
BUSY = 75  # the exit status of a run whose folder another process holds; EX_TEMPFAIL of sysexits.h
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
# torchrun does not know Slurm's signal, and would die of it alone.
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0  # time for a run to finish its step, then to flush its exporter
_of_a_sweep = False


def run_command(words: Sequence[str], processes: int = 1, module: str = "grpo_lab.train") -> list[str]:
    """The command that runs these overrides, in that number of processes, which share the run."""
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    shared = [*torchrun, f"--signals-to-handle={_SIGNALS}", "-m"] if processes > 1 else []
    return [sys.executable, "-m", *shared, module, *words]


def thread_limits(threads: int) -> dict[str, str]:
    """The environment variables that limit the threads of a process's libraries."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


def write_command(output: IO[bytes], command: Sequence[str]) -> None:
    """Begin an attempt in a run's output."""
    output.write(f"$ {shlex.join(masked(command))}\n".encode(errors="surrogateescape"))
    output.flush()


def open_run_process(
    words: Sequence[str],
    folder: Path,
    threads: int,
    further: Mapping[str, str],
    processes: int = 1,
    module: str = "grpo_lab.train",
    cwd: Path | None = None,
) -> subprocess.Popen:
    """Start the run of these overrides in a fresh interpreter; its output goes to output.log in its folder.

    `further` are environment variables beside those that limit the threads of each of its `processes`. Another `module`
    than the one that trains gets its own words. It works in the folder `cwd`, or here.
    """
    command = run_command(words, processes, module)
    with (folder / OUTPUT).open("ab") as output:
        write_command(output, command)
        return subprocess.Popen(
            command,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only what started it, which interrupts its runs
            env={**os.environ, PARENT: str(os.getpid()), **thread_limits(threads), **further},
        )


def hear_signals() -> None:
    """In a run's process, after `follow_parent`: see `interrupt.hear`."""
    passed_on = _of_a_sweep or ranks.launched() > 1 or "SLURM_JOB_ID" in os.environ
    interrupt.hear(interrupt.TOGETHER_SECONDS if passed_on else 0.0)


def follow_parent() -> None:
    """In a run's process: end by SIGINT when the sweep sends it, or when the sweep dies."""
    global _of_a_sweep
    parent = os.environ.pop(PARENT, None)
    _of_a_sweep = parent is not None
    if parent is None:
        return
    # Children of a sweep in a shell's background inherit that SIGINT is ignored, those of Ray's workers that it waits.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(int(parent),), name="sweep-watch", daemon=True).start()


@contextlib.contextmanager
def errors_reported(raised: bool = False) -> Iterator[None]:
    """In a run's process: end with a message and an exit status for what this block raises, a traceback for a bug.

    `raised`: what a user can mend is raised too. Of several ranks one says what the run ended by.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        cause = ranks.cause_of(error)
        if cause is not error and not ranks.is_first():
            sys.exit(1)  # the first rank, and the one that failed, say why
        if isinstance(cause, KeyboardInterrupt):
            text = str(error if isinstance(error, KeyboardInterrupt) else cause)
            sys.exit(printable(f"{text or 'interrupted before anything started'}; {_go_on()}"))
        if cause is not error:
            # What all ranks refuse, the one that was quickest has said.
            sys.exit(1 if str(error) in str(cause) else printable(f"error: {cause}"))
        if raised or not isinstance(error, (ValueError, OSError, FloatingPointError, EngineFailure)):
            raise
        say(f"error: {error}", error=True)
        sys.exit(BUSY if isinstance(error, RunFolderBusyError) else 1)


def _go_on() -> str:
    """Which command goes on with an interrupted run."""
    if _of_a_sweep or ranks.launched() > 1:
        return "re-run the same command to resume"
    return f"resume with: {shlex.join(typed())}"


def _starter() -> int:
    """The process that started this one, or that started torchrun, whose process this is; 0 if that is gone."""
    parent = os.getppid()
    return parent if ranks.launched() == 1 else _parent_of(parent)


def _parent_of(process: int) -> int:
    """The process that started another one; 0 if that other one is gone."""
    if sys.platform == "linux":
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        return 0
    import psutil  # where there is no /proc

    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(process).ppid()
    return 0


def _end_with(parent: int) -> None:
    """Interrupt this process when its parent is gone: the first time it finishes its step, the next times it does not.

    Up to three times, since Python drops an interrupt that is raised in a __del__.
    """
    while _starter() == parent:
        time.sleep(_LOOK_SECONDS)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
