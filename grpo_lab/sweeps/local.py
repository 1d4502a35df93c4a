"""Cells as processes of this machine: one per run, or several that share it, a few runs at a time, on fixed slots.

A process of its own makes a cell the same run as one started by hand: no random state, CUDA context or engine is left
over from an earlier cell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_lab.sweeps.child import open_cell
from grpo_lab.sweeps.fork_server import fork_cell
from grpo_lab.sweeps.jobs import Job, Place, Started


class LocalPlace(Place):
    """Processes of this machine. `devices` are CUDA device ids for one run each, shared by slots; none for CPU."""

    def __init__(self, workers: int, devices: Sequence[str]) -> None:
        self.workers, self.devices = workers, devices

    def start(self, job: Job, slot: int) -> Started:
        devices = {"CUDA_VISIBLE_DEVICES": self.devices[slot % len(self.devices)]} if self.devices else {}
        if job.forks and sys.platform == "linux":  # elsewhere system libraries do not outlive a fork
            return fork_cell(job.words, job.folder, job.threads, devices)
        return LocalProcess(open_cell(job.words, job.folder, job.threads, devices, job.processes))


class LocalProcess(Started):
    """A cell's process here."""

    def __init__(self, process: subprocess.Popen) -> None:
        self.process = process

    def poll(self) -> int | None:
        return self.process.poll()

    def interrupt(self) -> None:
        """Interrupt the process alone, which ends its own children."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill its whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def slots(workers: int | None, threads: int, on_cuda: bool, processes: int = 1) -> tuple[int, list[str]]:
    """How many jobs run at once, and the CUDA devices of one job each, as many as it has `processes`.

    Without `workers`: as many jobs as there are such devices, or on CPU so many cores that this process may use, of
    which each of its processes has `threads`. Raises ValueError for fewer devices than one job needs.
    """
    devices: list[str] = []
    if on_cuda:
        import torch

        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
        if len(devices) < processes:
            raise ValueError(
                f"hydra.launcher.processes={processes}, and there are {len(devices)} CUDA devices here: lower it, or "
                "set device=cpu"
            )
        places = range(0, len(devices) - processes + 1, processes)
        devices = [",".join(devices[place : place + processes]) for place in places]
    return workers or len(devices) or max(1, usable_cores() // (threads * processes)), devices


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use, by its affinity and, in a container, its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores
