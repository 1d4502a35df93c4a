"""End one cell of a running sweep as Ctrl-C does; its sweep goes on with the others."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from grpo_lab.sweeps.slurm import interrupt_job
from grpo_lab.sweeps.status import cells_of_sweep, sweep_names
from grpo_lab.tracking.run_reader import holder, is_held


def find_cell(wanted: str, runs_dir: Path, sweep: str | None) -> Path:
    """The folder of a cell: `wanted` itself, or the one with this title in a sweep (default: the latest).

    Raises ValueError that lists the titles there are.
    """
    if (Path(wanted) / "run.json").is_file():
        return Path(wanted)
    name = sweep or sweep_names(runs_dir)[-1]
    cells = cells_of_sweep(runs_dir, name)
    found = [cell.folder for cell in cells if cell.title == wanted]
    if not found:
        running = ", ".join(cell.title for cell in cells if cell.state == "running") or "none"
        raise ValueError(f"{name} has no cell {wanted!r}, and there is no such run folder; running are: {running}")
    return found[0]


def stop_cell(folder: Path, wait_seconds: float) -> bool:
    """Interrupt the run in `folder`; returns whether it has ended after `wait_seconds` at most.

    Raises ValueError if nothing runs there, or it runs on another machine.
    """
    if not interrupt_job(folder):
        if not is_held(folder):
            raise ValueError(f"nothing runs in {folder}: grpo-lab status shows what does")
        process, _, node = holder(folder).partition(" on ")
        command = Path(f"/proc/{process}/cmdline")
        if node or not command.exists() or b"grpo_lab" not in command.read_bytes():
            raise ValueError(f"{folder} is held on {node or 'another machine'}: there, kill -INT {process}")
        os.kill(int(process), signal.SIGINT)
    deadline = time.monotonic() + wait_seconds
    while is_held(folder) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not is_held(folder)
