"""End one run as Ctrl-C does: it finishes its step and saves. A sweep goes on with its other runs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from grpo_lab.sweeps.slurm import interrupt_job
from grpo_lab.tracking.files import atomic_write
from grpo_lab.tracking.run_reader import STOP, holder, is_held


def stop_run(folder: Path, wait_seconds: float) -> bool:
    """Interrupt the run in `folder`, and note that this was asked; returns whether it ends in `wait_seconds`.

    The first call lets it finish its step and save, a second one ends it at once. Raises ValueError if nothing runs
    there, or it runs on another machine.
    """
    if not folder.is_dir():
        raise ValueError(_nothing(folder))
    requested_before = (folder / STOP).exists()
    atomic_write(folder / STOP, "")
    try:
        _interrupt(folder)
    except BaseException:
        if not requested_before:
            (folder / STOP).unlink(missing_ok=True)
        raise
    deadline = time.monotonic() + wait_seconds
    while is_held(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not is_held(folder)


def _nothing(folder: Path) -> str:
    return f"no run is active in {folder}: `grpo-lab status` lists the active ones"


def _interrupt(folder: Path) -> None:
    if interrupt_job(folder):
        return
    if not is_held(folder):
        raise ValueError(_nothing(folder))
    process, _, node = holder(folder).partition(" on ")
    command = Path(f"/proc/{process}/cmdline")
    if node or not command.exists() or b"grpo_lab" not in command.read_bytes():
        raise ValueError(f"the run in {folder} is on {node or 'another machine'}: type `kill -INT {process}` there")
    os.kill(int(process), signal.SIGTERM)  # a script's `&` makes a run ignore SIGINT
