"""How a cell's process ends together with the sweep that started it."""

from __future__ import annotations

import os
import signal
import threading
import time

PARENT = "GRPO_LAB_SWEEP_PROCESS"
BUSY = 75  # the exit status of a run whose folder another process holds; EX_TEMPFAIL of sysexits.h
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 10.0  # time for a run to flush its mirror


def follow_parent() -> None:
    """In a cell's process: end by SIGINT when the sweep sends it, or when the sweep dies."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    # Children of a sweep in a shell's background inherit that SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with, args=(int(parent),), name="sweep-watch", daemon=True).start()


def _end_with(parent: int) -> None:
    """Interrupt this process when its parent is gone, up to three times: Python drops an interrupt in a __del__."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(_PATIENCE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)
