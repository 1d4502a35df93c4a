"""What a cell's process does for the sweep that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "GRPO_LAB_SWEEP_PROCESS"


def follow_parent() -> None:
    """In a cell: end by SIGINT when the sweep says so, and on Linux also when it dies without saying so."""
    parent = os.environ.pop(PARENT, None)
    if parent is None:
        return
    # A sweep in the background of a shell hands down that SIGINT is to be ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGINT)
    if os.getppid() != int(parent):
        raise SystemExit("the sweep that started this run is gone")
