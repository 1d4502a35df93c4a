"""How many runs of the arithmetic world one device carries at once.

    python tests/gpu/many.py --device cuda

Processes are added until 1, 4 and 8 of them train, and the steps of a window of time are counted each time. Starting
up, which takes longer than a window, is waited for and not counted.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from findings import HERE, ROOT, Findings, last_lines, run_part
from learn import world_of

STANDARD = 45  # steps of a run of the demo
COUNTS, SMALL_COUNTS = (1, 4, 8), (1, 2)
WINDOW, SMALL_WINDOW = 7.0, 4.0  # seconds in which steps are counted
KEEP = 10.0  # seconds of the part's time that are kept for the last counting


def stamps(folder: Path, index: int) -> list[float]:
    """When process `index` ended its steps, on the clock that all processes share."""
    file = folder / f"{index}.steps"
    text = file.read_text() if file.exists() else ""
    return [float(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def rate(times: list[float], begin: float, end: float) -> float:
    """Steps per second between the first and the last step that ended in the window."""
    inside = [one for one in times if begin <= one <= end]
    if len(inside) > 1:
        return (len(inside) - 1) / (inside[-1] - inside[0])
    return len(inside) / (end - begin)


def memory_in_use(device: str) -> int:
    """Bytes taken of the GPU by everybody, this process's context included."""
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(found: Findings) -> None:
    counts, window = (SMALL_COUNTS, SMALL_WINDOW) if found.small else (COUNTS, WINDOW)
    world = world_of(found.device, found.small)
    before = memory_in_use(found.device)
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        try:
            for number in counts:
                started = time.monotonic()
                for index in range(len(processes), number):
                    command = [sys.executable, HERE / "one_of_many.py", folder, str(index), *world]
                    with (folder / f"{index}.log").open("w") as log:
                        processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
                if not all_train(found, folder, processes):
                    found.leave_out(f"{number} at once", "not all had started in time: give --patience 2")
                    break
                found.add(f"{number} at once: seconds until all trained", time.monotonic() - started, "s")
                begin = time.monotonic()
                time.sleep(window)
                end = time.monotonic()
                steps = sum(rate(stamps(folder, index), begin, end) for index in range(number))
                found.add(f"{number} at once: steps of all together", steps, "steps/s", more_than=0)
                found.add(f"{number} at once: runs of {STANDARD} steps", 3600 * steps / STANDARD, "runs/hour")
                if found.device == "cuda":
                    used = memory_in_use(found.device) - before
                    found.add(f"{number} at once: memory, CUDA contexts included", used / 2**30, "GiB")
        finally:
            for process in processes:
                process.kill()
                process.wait()


def all_train(found: Findings, folder: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    """Wait until every process has ended two steps; False when time is over. Raises RuntimeError if one fails."""
    while not all(len(stamps(folder, index)) > 2 for index in range(len(processes))):
        for index, process in enumerate(processes):
            if process.poll() is not None:
                said = " / ".join(last_lines((folder / f"{index}.log").read_text(errors="replace"), 3))
                raise RuntimeError(f"process {index} ended with {process.returncode}: {said}")
        if found.seconds_left < KEEP:
            return False
        time.sleep(0.1)
    return True


if __name__ == "__main__":
    run_part(measure)
