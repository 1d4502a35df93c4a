"""Runs forked from one process that has imported torch, transformers and mlflow, so that a sweep imports them once.

A forked run is what a fresh interpreter would be: the server has trained nothing, drawn no random number and touched
no GPU. Where it would not be, because the code has changed on disk since or the run wants another number of threads,
the run starts an interpreter of its own. multiprocessing's fork server forks, and tells how a run ended.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path

from grpo_lab.sweeps.child import OUTPUT, PARENT, run_command, thread_limits, write_command
from grpo_lab.sweeps.jobs import Started

_loaded_for: int | None = None  # the threads of the server's libraries, which are those of the first run
_SERVER_DIED = 255  # multiprocessing's exit status of a process whose server has died


def fork_run(words: Sequence[str], folder: Path, threads: int, further: Mapping[str, str]) -> Started:
    """Start the run of these overrides as `open_run_process` does, forked. Raises OSError if it cannot.

    The server starts with the first run and ends with this process.
    """
    global _loaded_for
    _loaded_for = _loaded_for or threads
    with _environment(thread_limits(_loaded_for)):
        forkserver.set_forkserver_preload(["grpo_lab.sweeps.preload"])
        forkserver.ensure_running()
    environment = {**os.environ, **thread_limits(threads), **further}
    process = multiprocessing.get_context("forkserver").Process(
        target=_be_the_run, args=(tuple(words), folder, environment, threads == _loaded_for)
    )
    try:
        process.start()
    except EOFError as error:
        raise OSError("the process that forks runs has died") from error
    return _Forked(process)


class _Forked(Started):
    def __init__(self, process: BaseProcess) -> None:
        self.process = process

    def poll(self) -> int | None:
        code = self.process.exitcode
        if code == _SERVER_DIED:
            self.message = "the process that forked it has died"
        return code

    def interrupt(self) -> None:
        """Interrupt the process alone, which ends its own children."""
        self._send(os.kill, signal.SIGINT)

    def kill(self) -> None:
        """Kill its whole group, and itself where it has not left the server's group yet."""
        self._send(os.killpg, signal.SIGKILL)
        self._send(os.kill, signal.SIGKILL)
        self.process.join()

    def _send(self, send: Callable[[int, int], None], number: signal.Signals) -> None:
        if self.process.exitcode is None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                send(self.process.pid, number)


@contextlib.contextmanager
def _environment(changed: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(changed)
    try:
        yield
    finally:
        for name in changed:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def _be_the_run(words: tuple[str, ...], folder: Path, environment: dict[str, str], same_threads: bool) -> None:
    """In the forked process: become the run, with its own session, output, environment and command line."""
    command = run_command(words)
    with (folder / OUTPUT).open("ab") as output:  # before anything that can fail, so that it says why
        write_command(output, command)
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    from grpo_lab.sweeps import preload
    from grpo_lab.tracking.provenance import digest_of_sources

    # A server ends when nobody holds this any more: with the sweep, whose end the runs notice by it.
    os.close(forkserver._forkserver._forkserver_alive_fd)  # pyright: ignore[reportAttributeAccessIssue]
    os.setsid()  # Ctrl-C reaches only the sweep, which interrupts its runs
    with contextlib.suppress(ModuleNotFoundError):
        from setproctitle import setproctitle

        setproctitle(" ".join(command))  # what ps shows; first, since it looks for the memory of the old environment
    os.environ.clear()
    os.environ.update(environment)
    os.environ[PARENT] = str(os.getppid())
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=False, write_through=False)  # as where it is a file from the start
    if not same_threads or digest_of_sources() != preload.SOURCES:
        os.execv(command[0], command)
    sys.argv = ["grpo_lab.train", *words]
    try:
        runpy.run_module("grpo_lab.train", run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()  # multiprocessing ends its processes without them
