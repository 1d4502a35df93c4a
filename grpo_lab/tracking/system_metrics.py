"""How busy the machine is while a run runs: system.jsonl in its folder, filled by a thread beside the run.

    system.jsonl    {"sample": 17, "wall": <unix ms>, "system": {"cpu_utilization_percentage": 98.5, ...}}

Names and units are those of MLflow's own monitor, so that its page of system metrics shows them. Of GPUs,
those that NVIDIA's library counts are sampled. Samples are of the whole machine, and no part of the result: the file
is not in metrics.jsonl, nor is a resumed run the same in it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

FILE = "system.jsonl"
SYSTEM = "system/"  # before a name, in a tracker

logger = logging.getLogger("grpo_lab.tracking")


@dataclass(frozen=True)
class Sample:
    """One look at the machine: its number in the file, the unix time in ms, what was measured, and its line's end."""

    number: int
    wall: int
    values: Mapping[str, float]
    end: int  # bytes of the file up to there


class SystemMonitor:
    """Appends a sample to `<folder>/system.jsonl` every `seconds`, in a thread that never raises."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.path = Path(folder) / FILE
        self.seconds = seconds
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, before the last look at the folder; a second call does nothing."""
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            with _gpus() as gpus:
                number = _cut_partial(self.path)
                _machine(self.path.parent)  # psutil's first share of busy time is of no interval
                while not self._ended.wait(self.seconds):
                    values = _machine(self.path.parent) | gpus()
                    line = {"sample": number, "wall": time.time_ns() // 1_000_000, "system": values}
                    with self.path.open("ab") as file:
                        file.write(json.dumps(line).encode() + b"\n")
                    number += 1
        except Exception as error:
            # How busy the machine is decides nothing: the run goes on.
            logger.warning("system metrics end here (%s: %s); the run goes on", type(error).__name__, error)


def read_samples(folder: Path, start: int = 0) -> list[Sample]:
    """The whole lines of system.jsonl from byte `start` on; none where there is no file."""
    path = folder / FILE
    if not path.exists():
        return []
    content = path.read_bytes()
    end = start if start <= len(content) else 0
    found = []
    for line in content[end:].splitlines(keepends=True):
        if line.endswith(b"\n"):
            end += len(line)
            read = json.loads(line)
            found.append(Sample(read["sample"], read["wall"], read["system"], end))
    return found


def _cut_partial(path: Path) -> int:
    """Cut off a partial last line, as a kill leaves it; returns the number of whole ones, 0 where there is no file."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
    return content.count(b"\n")


def _machine(folder: Path) -> dict[str, float]:
    import psutil  # not before a run samples

    memory, disk = psutil.virtual_memory(), psutil.disk_usage(str(folder))
    return {
        "cpu_utilization_percentage": psutil.cpu_percent(),
        "system_memory_usage_megabytes": memory.used / 1e6,
        "system_memory_usage_percentage": memory.percent,
        "disk_usage_percentage": disk.percent,
        "disk_usage_megabytes": disk.used / 1e6,
        "disk_available_megabytes": disk.free / 1e6,
    }


@contextmanager
def _gpus() -> Iterator[Callable[[], dict[str, float]]]:
    """The sampler of NVIDIA's GPUs; it samples nothing without a GPU, a driver or nvidia-ml-py."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, or no driver
        yield dict
        return
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]

    def sample() -> dict[str, float]:
        found: dict[str, float] = {}
        for index, handle in enumerate(handles):
            with suppress(pynvml.NVMLError):  # some GPUs, and parts of a GPU, do not report it
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                found[f"gpu_{index}_memory_usage_megabytes"] = int(memory.used) / 1e6
                found[f"gpu_{index}_memory_usage_percentage"] = round(int(memory.used) / int(memory.total) * 100, 1)
            with suppress(pynvml.NVMLError):
                found[f"gpu_{index}_utilization_percentage"] = float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)
            with suppress(pynvml.NVMLError):
                found[f"gpu_{index}_power_usage_watts"] = pynvml.nvmlDeviceGetPowerUsage(handle) / 1000
        return found

    try:
        yield sample
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
