"""How many runs of the arithmetic world one device carries at once.

    python tests/gpu/many.py --device cuda

All processes start together and open their model; then windows of time follow in which the first 1, 4, 16 and 32 of
them train and the others wait, so that starting up, which takes longer than a window, is measured apart.
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
COUNTS, SMALL_COUNTS = (1, 4, 16, 32), (1, 2)
WINDOW, SMALL_WINDOW = 7.0, 4.0  # seconds in which steps are counted
SETTLE = 1.5  # seconds between a change of the number and the counting
OPENING = 60.0  # seconds that the processes may take to start; the base is built meanwhile if it must be


def told(folder: Path, number: int) -> None:
    """Let the first `number` processes train; -1 ends all."""
    partial = folder / "turn.new"
    partial.write_text(str(number))
    partial.replace(folder / "turn")


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
    """Bytes taken of the card by everybody, this process's context included."""
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def measure(found: Findings) -> None:
    counts, window = (SMALL_COUNTS, SMALL_WINDOW) if found.small else (COUNTS, WINDOW)
    world = world_of(found.device, found.small)
    before, started = memory_in_use(found.device), time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, processes = Path(name), []
        told(folder, max(counts))
        try:
            for index in range(max(counts)):
                command = [sys.executable, HERE / "one_of_many.py", folder, str(index), *world]
                with (folder / f"{index}.log").open("w") as log:
                    processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT))
            opened = wait_for_steps(found, folder, processes)
            found.add(f"seconds until all {len(processes)} had trained", time.monotonic() - started, "s")
            processes = [process for index, process in enumerate(processes) if index in opened]
            for number in counts:
                if number > len(opened):
                    found.verdict(f"{number} at once", False, f"only {len(opened)} started")
                    continue
                told(folder, number)
                time.sleep(SETTLE)
                begin = time.monotonic()
                time.sleep(window)
                end = time.monotonic()
                steps = sum(rate(stamps(folder, index), begin, end) for index in opened[:number])
                found.add(f"{number} at once: steps of all together", steps, "steps/s", more_than=0)
                found.add(f"{number} at once: runs of {STANDARD} steps", 3600 * steps / STANDARD, "runs/hour")
            if found.device == "cuda":
                used = (memory_in_use(found.device) - before) / len(opened)
                found.add("memory of one run, its CUDA context included", used / 2**20, "MiB")
                found.add(f"memory of {len(opened)} runs", used * len(opened) / 2**30, "GiB")
            told(folder, -1)
            for process in processes:
                process.wait(timeout=15)
        finally:
            for process in processes:
                process.kill()
                process.wait()


def wait_for_steps(found: Findings, folder: Path, processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Which processes have ended two steps, once all have or their time is over. Raises RuntimeError if one fails."""
    ends = time.monotonic() + (OPENING if not found.small else 300)
    while True:
        for index, process in enumerate(processes):
            if process.poll() is not None:
                said = " / ".join(last_lines((folder / f"{index}.log").read_text(errors="replace"), 3))
                raise RuntimeError(f"process {index} ended with {process.returncode}: {said}")
        ready = [index for index in range(len(processes)) if len(stamps(folder, index)) > 2]
        if len(ready) == len(processes) or time.monotonic() > ends:
            return ready
        time.sleep(0.1)


if __name__ == "__main__":
    run_part(measure)
