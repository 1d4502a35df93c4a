"""Processes that judge answers, with math-verify by default, each within hard limits of time and memory.

An answer such as 9^{9^{9^9}} can take forever, or all memory, in code that no Python signal interrupts. So each answer
is judged in another process. One that takes too long or dies is replaced: its answer has failed, no other has.
The limit is one of processor time, so that a busy machine changes no verdict.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.tracking.activity import doing

MEMORY_BYTES = 2 << 30  # of address space per worker beyond what loading takes; no ordinary answer needs more
START_SECONDS = 120.0  # for loading math-verify, on a machine that does much else
WAITS = 4  # times its processor time an answer may take by the clock, on a machine that does much else
SLACK_SECONDS = 2.0  # a worker ends by itself at its limits; the parent waits so much longer before it ends it
LIMITS = "it took more than"  # how the reason begins where an answer broke a limit, or ended its worker
LONGEST_TEXT = 20_000  # characters; of a longer text its end is read, where the answer is

_SCRIPT = Path(__file__).with_name("grader_worker.py")
_pools: weakref.WeakSet[GraderPool] = weakref.WeakSet()


@dataclass(frozen=True)
class Answer:
    """A text to judge: an answer or, with `anywhere`, a response that contains one."""

    gold: str
    text: str
    anywhere: bool


class GraderPool:
    """Worker processes, started with the first call and kept for the next ones.

    `script` is what a worker runs, with further `arguments`; `remedy` is for one that cannot start. Calls from several
    threads take turns.
    """

    def __init__(
        self, script: Path = _SCRIPT, arguments: Sequence[str] = (), remedy: str = "see that math-verify is installed"
    ) -> None:
        self._script, self._arguments, self._remedy = script, arguments, remedy
        self._workers: list[_Worker] = []
        self._turn = threading.Lock()
        _pools.add(self)

    def grade(self, answers: Sequence[Answer], seconds: float, workers: int) -> list[float]:
        """A worker's result for each answer, in their order: 1.0 for a right one, 0.0 for a wrong one, or a score.

        NaN for an answer that a worker failed on. Each answer may take `seconds` of processor time, and `WAITS` times
        as long by the clock. Raises ValueError if a worker cannot start.
        """
        return [score for score, _ in self.judge(answers, seconds, workers)]

    def judge(self, answers: Sequence[Answer], seconds: float, workers: int) -> list[tuple[float, str]]:
        """As `grade`, with the reason beside each NaN, else ""."""
        with self._turn:
            return self._judge(answers, seconds, min(workers, len(answers)))

    def close(self) -> None:
        """End all workers; the next call starts new ones. Takes no turn: at exit a thread may still have it."""
        for worker in list(self._workers):
            worker.end()

    def forget(self) -> None:
        """In a forked child: the workers are the parent's, and a thread that is not here may have the turn."""
        self._workers, self._turn = [], threading.Lock()

    def _judge(self, answers: Sequence[Answer], seconds: float, number: int) -> list[tuple[float, str]]:
        limits = f"{LIMITS} {seconds:g} s of processor time or {MEMORY_BYTES >> 30} GiB of memory"
        results = [(math.nan, limits)] * len(answers)
        waiting = deque(range(len(answers)))
        self._drop([worker for worker in self._workers if not worker.lives()])
        while len(self._workers) < number:
            self._workers.append(self._worker())
        team = self._workers[:number]
        places: dict[_Worker, int] = {}  # worker -> position of the answer that it judges
        try:
            with doing("grading", len(answers), "answers") as shown:
                while waiting or places:
                    for worker in team:
                        if worker.ready and worker not in places and waiting:
                            places[worker] = waiting.popleft()
                            worker.ask(answers[places[worker]], seconds)
                    for worker in _wait(team):
                        reply = worker.reply()
                        if reply is None and worker not in places:
                            self._drop([worker])
                            raise ValueError(f"a grader cannot start ({worker.fault}): {self._remedy}")
                        if worker in places:
                            place = places.pop(worker)
                            shown.done += 1
                            if reply is not None:
                                right = reply["right"]
                                failed = (math.nan, reply.get("why", "it could not be judged"))
                                results[place] = failed if right is None else (float(right), "")
                        if reply is None or reply.get("spent"):
                            self._drop([worker])
                            team.remove(worker)
                            if len(waiting) > sum(mate not in places for mate in team):
                                self._workers.append(self._worker())
                                team.append(self._workers[-1])
        finally:  # after an error or Ctrl-C a worker must not answer the next call with this call's verdict
            self._drop(list(places))
        return results

    def _worker(self) -> _Worker:
        return _Worker(self._script, self._arguments)

    def _drop(self, workers: Sequence[_Worker]) -> None:
        for worker in list(workers):
            worker.end()
            self._workers.remove(worker)


class _Worker:
    """One process, and what its parent waits for: that it is ready, then one reply to each request."""

    def __init__(self, script: Path, arguments: Sequence[str]) -> None:
        self.ready, self.fault = False, "it ended while starting"
        self.deadline = time.monotonic() + START_SECONDS
        # -P: the script's own folder is no place to import from. A fixed hash seed: sets have one order in every run.
        command = [sys.executable, "-P", str(script), str(os.getpid()), str(MEMORY_BYTES), *arguments]
        # A worker ignores these signals, and must not get one before it has said so.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={**os.environ, "PYTHONHASHSEED": "0"},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        self._requests, self.replies = self._process.stdin, self._process.stdout
        os.set_blocking(self._requests.fileno(), False)

    def lives(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    def ask(self, answer: Answer, seconds: float) -> None:
        """Send one request. A worker that does not take it is ended, which `reply` then sees."""
        request = {**asdict(answer), "seconds": seconds, "waits": WAITS * seconds}
        rest = memoryview(json.dumps(request).encode() + b"\n")  # ASCII: lone surrogates are escaped
        self.deadline = time.monotonic() + WAITS * seconds + SLACK_SECONDS
        try:
            while rest:
                if not _usable(self._requests.fileno(), selectors.EVENT_WRITE, self.deadline):
                    raise BrokenPipeError
                rest = rest[os.write(self._requests.fileno(), rest) :]
        except OSError:
            self._process.kill()

    def reply(self) -> dict[str, Any] | None:
        """Its reply; None if it ended or its time is up. Call it when `_wait` names the worker."""
        if not _usable(self.replies.fileno(), selectors.EVENT_READ, 0.0):
            return None
        line = os.read(self.replies.fileno(), 1 << 12)  # shorter than a pipe's block, so it comes whole
        text = json.loads(line) if line.endswith(b"\n") else {"error": self.fault}
        if "error" in text:
            self.fault = text["error"]
            return None
        self.ready, self.deadline = True, math.inf
        return text

    def end(self) -> None:
        """Kill the process and wait for it."""
        self._process.kill()
        self._process.wait()
        self._requests.close()
        self.replies.close()


def _wait(team: Sequence[_Worker]) -> list[_Worker]:
    """The workers that have something to say or whose time is up; waits until there is one."""
    with selectors.DefaultSelector() as selector:
        for worker in team:
            if worker.deadline < math.inf:
                selector.register(worker.replies, selectors.EVENT_READ, worker)
        first = min(worker.deadline for worker in team)
        heard = {key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))}
    now = time.monotonic()
    return [worker for worker in team if worker in heard or worker.deadline <= now]


def _usable(descriptor: int, event: int, deadline: float) -> bool:
    """True if a pipe can be read or written before the deadline."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, event)
        return bool(selector.select(max(0.0, deadline - time.monotonic())))


_shared = GraderPool()


def shared_pool() -> GraderPool:
    """The pool with math-verify of this process, which all rewards use."""
    return _shared


def close_all() -> None:
    """End the workers of all pools of this process; the next grading starts new ones."""
    for pool in _pools:
        pool.close()


def _forget_all() -> None:
    for pool in _pools:
        pool.forget()


atexit.register(close_all)
os.register_at_fork(after_in_child=_forget_all)
