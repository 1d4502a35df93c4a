"""How signals end a command. A command imports this before all else: then Ctrl-C is one line during imports too.

A run that trains finishes its step and saves at the first signal; the second one ends it at once. Before the first step
and in an evaluation the first one does, since nothing that is trained is lost.
"""

import math
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)  # USR2: Slurm's, before a job's time is up
TOGETHER_SECONDS = 1.0  # between signals of one cause, which several processes pass on
_requested = False  # whether a signal has come
_unhurried = False  # whether the step may take as long as it does
_notify: Callable[[str], None] | None = None  # within `finishing`: what is called with the name of the first signal


def _said(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("interrupted\n")
    else:
        sys.__excepthook__(kind, error, trace)


def quietly() -> None:
    """From here on an interrupt that nothing else handles is one line instead of a traceback."""
    sys.excepthook = _said


def hear(together_seconds: float) -> None:
    """In a run's process: Ctrl-C, SIGTERM and Slurm's SIGUSR2 raise KeyboardInterrupt, unless they are ignored.

    Within `finishing` the first one does not. Of signals within `together_seconds` the first counts: Slurm and torchrun
    may signal all processes of a run, and one of them passes it on.
    """
    global _requested, _unhurried
    _requested, _unhurried, last = False, False, -math.inf

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _requested
        nonlocal last
        before, last = last, time.monotonic()
        if last <= before + together_seconds:
            return
        first, _requested = not _requested, True
        if _notify is None or not first:
            raise KeyboardInterrupt
        # In a thread, since what was interrupted may be printing.
        threading.Thread(target=_notify, args=(signal.Signals(number).name,), daemon=True).start()

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)


def requested() -> bool:
    """True if a signal has asked this process to end."""
    return _requested


def take_time() -> None:
    """Lift the time limit on the step that a run finishes after the first signal; may be called from any thread."""
    global _unhurried
    _unhurried = True


def may_take_time() -> bool:
    """True if `take_time` was called."""
    return _unhurried


def insist() -> None:
    """Make the next signal end the run at once, as a second one does; may be called from any thread."""
    global _requested
    _requested = True


@contextmanager
def finishing(notify: Callable[[str], None]) -> Iterator[None]:
    """Within, the first signal only calls `tell` with its name, in a thread, and makes `asked` true."""
    global _notify
    _notify = notify
    try:
        yield
    finally:
        _notify = None


@contextmanager
def at_once() -> Iterator[None]:
    """A part of `finishing` that a signal leaves at once, by KeyboardInterrupt; so does one that came before it."""
    global _notify
    notify, _notify = _notify, None
    try:
        if notify is not None and _requested:
            raise KeyboardInterrupt
        yield
    finally:
        _notify = notify
