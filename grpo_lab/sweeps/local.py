"""Cells as processes of this machine: one fresh interpreter per run, a few at a time, on fixed slots.

A fresh process makes a cell the same run as one started by hand: no random state, CUDA context or engine is left
over from an earlier cell.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.sweeps.board import Board, WatchedCell
from grpo_lab.sweeps.child import BUSY, PARENT
from grpo_lab.tracking.files import explained
from grpo_lab.tracking.run_reader import has_ended, holder, is_held

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_POLL_SECONDS = 0.1
_REPEAT_SECONDS = 3.0  # between two interrupts of a cell that did not react to the first
_ADVICE = "Set the environment variable HYDRA_FULL_ERROR"
_LAST_BYTES = 2000  # of the output, searched for the error


@dataclass(frozen=True)
class Job:
    """A run to start: its overrides, and the facts needed to follow it."""

    title: str
    words: tuple[str, ...]
    folder: Path
    axis: str
    amount: float
    threads: int

    def watched(self) -> WatchedCell:
        """The run as a board follows it, with its clock started now."""
        return WatchedCell(self.title, self.folder, self.axis, self.amount)


@dataclass
class _Running:
    index: int
    job: Job
    slot: int
    process: subprocess.Popen
    watched: WatchedCell
    started: float  # unix time in s


def run_jobs(
    jobs: Sequence[Job], workers: int, devices: Sequence[str], grace_seconds: float, board: Board
) -> list[str | None]:
    """Run all jobs, `workers` at a time. Returns None or the reason of failure for each; a failure stops no other job.

    A job whose folder another process holds, such as a cell of another sweep, waits while others start. It is done
    when that process finishes it, and starts here if that process leaves it unfinished. `devices` are CUDA device ids
    shared among the slots; none for CPU. On Ctrl-C every job is interrupted and has `grace_seconds` to end; then
    KeyboardInterrupt is raised.
    """
    failures: list[str | None] = [None] * len(jobs)
    waiting = list(enumerate(jobs))
    running: list[_Running] = []
    elsewhere: dict[int, WatchedCell] = {}
    free = list(range(workers))

    def wait_for(index: int, job: Job, watched: WatchedCell) -> None:
        if index not in elsewhere:
            elsewhere[index] = watched
            board.say(f"waiting for {job.title}: process {holder(job.folder)} runs it in {job.folder}")

    try:
        while waiting or running:
            for index, job in list(waiting):
                if not free:
                    break
                watched = elsewhere.get(index) or job.watched()
                try:
                    with explained(job.folder):
                        done, held = has_ended(job.folder), is_held(job.folder)
                    if done:  # another process finished it in the meantime
                        board.end(watched, None)
                    elif held:
                        wait_for(index, job, watched)
                        continue
                    else:
                        if elsewhere.pop(index, None):
                            board.say(f"{job.title} was left unfinished: it goes on here")
                        running.append(_start(index, job, free[0], devices, board))
                        free.pop(0)
                except OSError as error:  # trouble with one folder does not stop the other jobs
                    failures[index] = str(error)
                    board.end(watched, failures[index])
                waiting.remove((index, job))
            for entry in [entry for entry in running if entry.process.poll() is not None]:
                running.remove(entry)
                free.append(entry.slot)
                if entry.process.returncode == BUSY:  # another process locked the folder while this one loaded
                    board.leave(entry.watched)
                    wait_for(entry.index, entry.job, entry.watched)
                    waiting.append((entry.index, entry.job))
                else:
                    failures[entry.index] = failure = _failure(entry)
                    board.end(entry.watched, failure)
            board.refresh()
            time.sleep(_POLL_SECONDS)
    finally:
        if running:
            _stop(running, grace_seconds, board)
    return failures


def _start(index: int, job: Job, slot: int, devices: Sequence[str], board: Board) -> _Running:
    with explained(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        output = (job.folder / "output.log").open("ab")
    command = [sys.executable, "-m", "grpo_lab.train", *job.words]
    started = time.time()
    with output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches only the sweep, which interrupts its jobs
            env=_environment(job, slot, devices),
        )
    watched = job.watched()
    board.start(watched)
    return _Running(index, job, slot, process, watched, started)


def _environment(job: Job, slot: int, devices: Sequence[str]) -> Mapping[str, str]:
    environment = {**os.environ, PARENT: str(os.getpid())}
    environment |= {name: str(job.threads) for name in THREAD_VARIABLES}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    return environment


def _failure(entry: _Running) -> str | None:
    """Why the process failed, in one line with the path of its output; None if its run needs no further attempt."""
    code, folder = entry.process.returncode, entry.job.folder
    if code in (0, 1) and has_ended(folder):
        return None
    text = (folder / "output.log").read_bytes()[-_LAST_BYTES:].decode(errors="replace")
    said = f"\n{text}".rpartition("\n$ ")[2]  # output of this attempt
    lines = [line for line in said.splitlines()[1:] if line and not line.startswith(_ADVICE)]
    if _ADVICE in said and "Traceback" not in said:
        lines = lines[:1]  # of Hydra's many lines the first names the error
    errors = [line for line in lines if line.startswith("error:")] or lines[-1:] or ["it said nothing"]
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else errors[-1].removeprefix("error: ")
    return f"{reason} (see {folder / 'output.log'})"


def _stop(running: Sequence[_Running], grace_seconds: float, board: Board) -> None:
    """Interrupt every job and wait for all. A second Ctrl-C, or the end of `grace_seconds`, kills them."""
    board.say(f"stopping {len(running)} cells; Ctrl-C again kills them")
    for entry in running:
        _signal(entry, signal.SIGINT)
    deadline = time.monotonic() + grace_seconds
    try:
        again = time.monotonic() + _REPEAT_SECONDS
        while any(entry.process.poll() is None for entry in running) and time.monotonic() < deadline:
            if time.monotonic() > again:  # Python drops an interrupt in a __del__
                again += _REPEAT_SECONDS
                for entry in running:
                    if entry.process.poll() is None and not _heard(entry):
                        _signal(entry, signal.SIGINT)
            time.sleep(_POLL_SECONDS)
    except KeyboardInterrupt:
        pass
    for entry in running:
        if entry.process.poll() is None:
            _signal(entry, signal.SIGKILL)
        entry.process.wait()


def _heard(entry: _Running) -> bool:
    """Whether this attempt has written error.txt; that of an earlier attempt is older."""
    note = entry.job.folder / "error.txt"
    return note.exists() and note.stat().st_mtime >= entry.started


def _signal(entry: _Running, number: signal.Signals) -> None:
    """Send a signal to the job's process alone, which ends its own children; SIGKILL goes to its whole group."""
    try:
        if number == signal.SIGKILL:
            os.killpg(entry.process.pid, number)
        else:
            entry.process.send_signal(number)
    except ProcessLookupError:
        pass


def slots(workers: int | None, threads: int, on_cuda: bool) -> tuple[int, list[str]]:
    """How many jobs run at once, and the CUDA devices they share.

    Without `workers`: one job per device, or on CPU one per `threads` cores that this process may use.
    """
    devices: list[str] = []
    if on_cuda:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return workers or len(devices) or max(1, usable_cores() // threads), devices


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use, by its affinity and, in a container, its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores
