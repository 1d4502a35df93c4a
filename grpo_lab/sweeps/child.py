"""What a cell's process does for the sweep that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "GRPO_LAB_SWEEP_PROCESS"


def follow_parent() -> None:
    """In a cell: end, as if by Ctrl-C, when the sweep that started it dies without saying so (Linux)."""
    parent = os.environ.pop(PARENT, None)
    if parent is None or not sys.platform.startswith("linux"):
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of linux/prctl.h
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGINT)
    if os.getppid() != int(parent):
        raise SystemExit("the sweep that started this run is gone")
