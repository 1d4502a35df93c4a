"""One loop that starts runs, follows them and ends them, wherever they run: here, in Slurm's queue, on Ray's nodes."""

from __future__ import annotations

import contextlib
import math
import re
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.sweeps.child import BUSY, OUTPUT
from grpo_lab.sweeps.progress_display import ProgressDisplay, WatchedRun
from grpo_lab.tracking.files import explained
from grpo_lab.tracking.interrupt import TOGETHER_SECONDS
from grpo_lab.tracking.run_reader import (
    STOP,
    has_ended,
    holder,
    interruption_message,
    is_held,
    saved_step,
    was_stopped,
)

_POLL_SECONDS = 0.1
_LISTEN_SECONDS = 5.0  # between two looks at what a run has written
_AT_ONCE_SECONDS = 10.0  # at most, of the grace: for runs that a second interrupt ends in the middle of a step
_ELSEWHERE_SECONDS = 2.0  # between two looks at a folder that another process holds
_REST_SECONDS = 30.0  # before a backend that took no run is asked again
_END_SECONDS = 60.0  # for a backend to end runs that were killed
_LAST_BYTES = 20_000  # of the output, searched for the error; torchrun says much after it
# What threads beside a run write: it goes on where the run hangs. What they note of its work does not.
_BESIDE = re.compile(rf"system\.jsonl|\.?mirror.*|{re.escape(OUTPUT)}")


@dataclass(frozen=True)
class Job:
    """A run to start: its overrides, and the facts needed to follow it."""

    title: str
    words: tuple[str, ...]
    folder: Path
    axis: str
    amount: float
    threads: int
    forks: bool = True  # whether it may be forked from a process that has imported what it needs
    processes: int = 1  # that share the run, started by torchrun

    def watched(self) -> WatchedRun:
        """The run as a display follows it, with its clock started now."""
        return WatchedRun(self.title, self.folder, self.axis, self.amount)


class TryLater(Exception):
    """A backend takes no run for now; the message says why."""


class Started(ABC):
    """A run that was started on a backend, until it has ended there."""

    message: str = ""  # why the backend ended it, where the run's own output cannot tell
    note: str = ""  # what it waits for, before its run has begun

    @abstractmethod
    def poll(self) -> int | None:
        """The exit status of its process, minus the number of the signal that killed it; None until it has ended."""

    @abstractmethod
    def interrupt(self) -> None:
        """Ask the process to end, as Ctrl-C does; nothing if it has ended."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once; `gone` says when it has ended."""

    def gone(self) -> bool:
        """True once every process of the run has exited."""
        return self.poll() is not None


class Backend(ABC):
    """The backend that executes runs. `workers` is how many at once."""

    workers: int
    late_seconds: float = 0.0  # until a file that a run has written is visible here

    @abstractmethod
    def start(self, job: Job, slot: int) -> Started:
        """Start a run; `slot` is from 0 to workers - 1, and no other run has it.

        Raises OSError if it cannot, TryLater if it cannot now.
        """

    def widen(self) -> str:
        """Look whether more runs fit by now, and raise `workers` if so; returns what to say of it, or nothing."""
        return ""

    def known(self, job: Job) -> Started | None:
        """The run as an earlier sweep left it on the backend, which runs it or is going to; None if it does not."""
        return None

    def interrupt(self, runs: Sequence[Started]) -> None:
        """Ask several runs to end."""
        for run in runs:
            run.interrupt()

    def kill(self, runs: Sequence[Started]) -> None:
        """End several runs at once."""
        for run in runs:
            run.kill()

    def close(self) -> None:
        """Let go of the backend; no run of it runs any more."""
        return


@dataclass
class _Running:
    index: int
    job: Job
    slot: int
    run: Started
    watched: WatchedRun
    started: float  # unix time in s
    wrote: object = None  # what its folder looked like when it last changed
    heard: float = -math.inf  # when that was; this and what follows on the monotonic clock, in s
    listened: float = -math.inf
    interrupted_at: float | None = None  # when it was interrupted for its silence; infinite once it was killed
    interrupted_again: bool = False  # the first interrupt lets it finish its step, which it may hang in
    done: float | None = None  # when its process was first seen to have ended


def run_jobs(
    jobs: Sequence[Job],
    backend: Backend,
    grace_seconds: float,
    display: ProgressDisplay,
    silent_seconds: float = math.inf,
) -> list[str | None]:
    """Run all jobs on the backend. Returns None or the reason of failure for each; a failure stops no other job.

    A run that runs and writes nothing for `silent_seconds` hangs: it is interrupted, and killed after `grace_seconds`.
    What it prints, and what its exporter and its look at the machine write, does not count.

    A job whose folder another process holds, such as a run of another sweep, waits while others start. It is done
    when that process finishes it, and starts here if that process leaves it unfinished. Where the backend takes no more
    for now, what is left waits. A job that `grpo-lab stop` ended is not started again. On Ctrl-C every job finishes its
    step and saves, for which it has `grace_seconds`; then KeyboardInterrupt is raised.
    """
    failures: list[str | None] = [None] * len(jobs)
    waiting = list(enumerate(jobs))
    running: list[_Running] = []
    elsewhere: dict[int, WatchedRun] = {}
    free = list(range(backend.workers))
    looked: dict[int, float] = {}  # when a folder that another process holds was last looked at
    rests, why = -math.inf, ""  # the time before which the backend is not asked again, and its last error

    def wait_for(index: int, job: Job, watched: WatchedRun) -> None:
        if index not in elsewhere:
            elsewhere[index] = watched
            display.say(f"waiting for {job.title}: process {holder(job.folder)} runs it in {job.folder}")

    try:
        while waiting or running:
            before = backend.workers
            if change := backend.widen():
                display.say(change)
            free += range(before, backend.workers)
            for index, job in list(waiting):
                now = time.monotonic()
                if not free or now < rests:
                    break
                if index in elsewhere and now < looked.get(index, -math.inf) + _ELSEWHERE_SECONDS:
                    continue
                looked[index] = now
                watched = elsewhere.get(index) or job.watched()
                try:
                    with explained(job.folder):
                        done = has_ended(job.folder)
                        known = None if done else backend.known(job)
                        held = not done and known is None and is_held(job.folder)
                    if done:  # another process finished it in the meantime
                        display.end(watched, None)
                    elif held:
                        wait_for(index, job, watched)
                        continue
                    elif index in elsewhere and was_stopped(job.folder):
                        failures[index] = "it was stopped where it ran"
                        display.end(watched, failures[index])
                    else:
                        if elsewhere.pop(index, None):
                            display.say(f"{job.title} was left unfinished: it goes on here")
                        running.append(_start(index, job, free[0], backend, known, display))
                        free.pop(0)
                except TryLater as error:
                    if why != (why := str(error)):
                        display.say(f"{job.title} and what follows wait: {why}")
                    rests = time.monotonic() + _REST_SECONDS
                    break
                except (OSError, ValueError) as error:  # trouble with one folder does not stop the other jobs
                    failures[index] = str(error)
                    display.end(watched, failures[index])
                waiting.remove((index, job))
            ended = [(entry, code) for entry in running if (code := _ended(entry, backend.late_seconds)) is not None]
            for entry in running:
                entry.watched.note = entry.run.note
                if not any(entry is one for one, _ in ended):
                    _end_if_silent(entry, silent_seconds, grace_seconds)
            for entry, code in ended:
                running.remove(entry)
                free.append(entry.slot)
                rests = -math.inf
                # Another process locked the folder while this one loaded; torchrun does not pass on the exit status.
                if code == BUSY or (code and entry.job.processes > 1 and is_held(entry.job.folder)):
                    display.leave(entry.watched)
                    wait_for(entry.index, entry.job, entry.watched)
                    waiting.append((entry.index, entry.job))
                else:
                    failures[entry.index] = failure = _failure(entry, code)
                    display.end(entry.watched, failure)
            display.refresh()
            time.sleep(_POLL_SECONDS)
    finally:
        if running:
            _stop(running, backend, grace_seconds, display)
    return failures


def _start(
    index: int, job: Job, slot: int, backend: Backend, known: Started | None, display: ProgressDisplay
) -> _Running:
    started = time.time()
    with explained(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        if known is None:  # an attempt that is refused leaves no other word
            (job.folder / STOP).unlink(missing_ok=True)
        run = known or backend.start(job, slot)
    watched = job.watched()
    display.start(watched)
    return _Running(index, job, slot, run, watched, started)


def _ended(entry: _Running, late_seconds: float) -> int | None:
    """The exit status of a run, once its folder shows that it is finished if it says so."""
    code, now = entry.run.poll(), time.monotonic()
    if code is not None:
        entry.done = entry.done or now
        if code == 0 and now < entry.done + late_seconds and not has_ended(entry.job.folder):
            return None
    return code


def _end_if_silent(entry: _Running, silent_seconds: float, grace_seconds: float) -> None:
    now = time.monotonic()
    if entry.interrupted_at is not None:
        if not entry.interrupted_again and now > entry.interrupted_at + grace_seconds / 2:
            entry.interrupted_again = True
            entry.run.interrupt()
        if now > entry.interrupted_at + grace_seconds:
            entry.run.kill()
            entry.interrupted_at = math.inf
        return
    if now < entry.listened + _LISTEN_SECONDS:
        return
    entry.listened = now
    with contextlib.suppress(OSError):  # a file that was replaced, a folder that is away for a moment
        files = (path for path in entry.job.folder.iterdir() if not _BESIDE.fullmatch(path.name))
        wrote = {(path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files}
        if entry.run.note or wrote != entry.wrote:  # one that waits for its turn has nothing to write
            entry.wrote, entry.heard = wrote, now
    if now > entry.heard + silent_seconds:
        entry.run.message = f"it hung: it wrote nothing for {silent_seconds / 60:g} minutes, and was ended"
        entry.run.interrupt()
        entry.interrupted_at = now


def _failure(entry: _Running, code: int) -> str | None:
    """Why the run failed, in one line with the path of its output; None if its run needs no further attempt."""
    folder = entry.job.folder
    if code in (0, 1) and has_ended(folder):
        return None
    output = folder / OUTPUT
    text = output.read_bytes()[-_LAST_BYTES:].decode(errors="replace") if output.exists() else ""
    last_attempt = f"\n{text}".rpartition("\n$ ")[2]  # output of this attempt
    lines = [line for line in last_attempt.splitlines()[1:] if line]
    errors = [line for line in lines if line.startswith("error:")] or lines[-1:] or ["it said nothing"]
    reason = f"killed by {signal.Signals(-code).name}" if code < 0 else errors[-1].removeprefix("error: ")
    return f"{entry.run.message or reason} (see {output})"


def _stop(running: Sequence[_Running], backend: Backend, grace_seconds: float, display: ProgressDisplay) -> None:
    """Let every job finish its step and save; end at once what has not ended near the end of `grace_seconds`.

    A second Ctrl-C ends the steps at once, a third kills. Prints what is left of each job.
    """
    at_once = min(_AT_ONCE_SECONDS, grace_seconds / 3)
    patience = grace_seconds - at_once
    display.say(
        f"stopping {len(running)} runs: each has up to {patience:g} s to finish its step and save "
        "(hydra.launcher.grace_seconds); Ctrl-C again interrupts them at once"
    )

    def left() -> list[_Running]:
        return [entry for entry in running if entry.run.poll() is None]

    def interrupt(seconds: float) -> None:
        backend.interrupt([entry.run for entry in left()])
        deadline = time.monotonic() + seconds
        while left() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    heard = time.monotonic() + 2 * TOGETHER_SECONDS  # from when on a second signal counts as one
    with contextlib.suppress(KeyboardInterrupt):
        interrupt(patience)
    if in_a_step := left():
        display.say(f"interrupting {len(in_a_step)} runs mid-step; Ctrl-C again kills them")
        with contextlib.suppress(KeyboardInterrupt):
            time.sleep(max(0.0, heard - time.monotonic()))
            interrupt(at_once)
    killed = [entry.run for entry in left()]
    backend.kill(killed)
    deadline = time.monotonic() + _END_SECONDS
    while any(not run.gone() for run in killed) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    for entry in running:
        display.say(f"{entry.job.title}: {_what_is_left(entry)}")


def _what_is_left(entry: _Running) -> str:
    """The last words of a run that was ended in this attempt, or its state by its folder."""
    if has_ended(entry.job.folder):
        return "finished"
    if message := interruption_message(entry.job.folder, entry.started):
        return message
    saved = saved_step(entry.job.folder)
    return "killed; " + ("it restarts from step 0" if saved is None else f"it resumes from step {saved}")
