"""Runs as processes of this machine: one per run, or several that share it, a few runs at a time, on fixed slots.

A process of its own makes a run the same run as one started by hand: no random state, CUDA context or engine is left
over from an earlier run.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.sweeps.child import open_run_process
from grpo_lab.sweeps.fork_server import fork_run
from grpo_lab.sweeps.jobs import Backend, Job, Started
from grpo_lab.tracking.run_reader import gpu_peak

_LOOK_SECONDS = 5.0  # between two looks for the first run's measured memory
_USABLE = 0.9  # of a GPU's memory: the rest is for what a longer response takes
# Of a process outside torch's allocator, at most: all that a run of a small model took on an H100 (make gpu, many).
_BESIDE_GIB = 0.9


@dataclass(frozen=True)
class GpuShare:
    """How many runs may share a GPU of `total_gib`, once one of `folders` has measured its peak; `most` at most."""

    folders: Sequence[Path]
    total_gib: float
    most: int

    def measured(self) -> tuple[int, float] | None:
        """How many runs fit, and the peak in GiB that says so; None before a run has logged its first step."""
        peak = 0.0
        for folder in self.folders:
            with contextlib.suppress(OSError, ValueError):  # a damaged log measures nothing; its run says so
                peak = max(peak, gpu_peak(folder))
        return (self.fitting(peak), peak) if peak else None

    def fitting(self, peak: float) -> int:
        """How many runs with this peak in GiB fit, at least one."""
        return max(1, min(self.most, int(_USABLE * self.total_gib / (peak + _BESIDE_GIB))))


class LocalBackend(Backend):
    """Processes of this machine. `devices` are CUDA device ids for one run each, shared by slots; none for CPU.

    With a `share`, `workers` grows once the memory of a run is measured.
    """

    def __init__(self, workers: int, devices: Sequence[str], share: GpuShare | None = None) -> None:
        self.workers, self.devices, self.share = workers, devices, share
        self.looks = -math.inf  # when it looks for a measurement again, on the monotonic clock

    def widen(self) -> str:
        if self.share is None or time.monotonic() < self.looks:
            return ""
        self.looks = time.monotonic() + _LOOK_SECONDS
        if (measured := self.share.measured()) is None:
            return ""
        (runs, peak), total, self.share = measured, self.share.total_gib, None
        self.workers = runs * len(self.devices)
        return (
            f"runs at a time on each GPU: {runs}, since one took {peak:.1f} GiB and up to {_BESIDE_GIB} GiB outside of "
            f"torch, of {total:.0f} GiB; hydra.launcher.workers=N sets another number"
        )

    def start(self, job: Job, slot: int) -> Started:
        devices = {"CUDA_VISIBLE_DEVICES": self.devices[slot % len(self.devices)]} if self.devices else {}
        if job.forks and sys.platform == "linux":  # elsewhere system libraries do not outlive a fork
            return fork_run(job.words, job.folder, job.threads, devices)
        return LocalProcess(open_run_process(job.words, job.folder, job.threads, devices, job.processes))


class LocalProcess(Started):
    """A run's process here."""

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

    Without `workers`: one job per such device, which `gpu_share` may raise; on a CPU, as many jobs as the usable cores
    give `threads` to each process. Raises ValueError for fewer devices than one job
    needs.
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


def gpu_share(folders: Sequence[Path], devices: Sequence[str], threads: int) -> GpuShare:
    """How many runs of these folders may share each CUDA device here, each with `threads` CPU threads."""
    import torch

    total = min(torch.cuda.get_device_properties(index).total_memory for index in range(len(devices)))
    return GpuShare(folders, total / 2**30, max(1, usable_cores() // (threads * len(devices))))


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """How many cores this process may use, by its affinity and, in a container, its CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if quota.exists():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores
