"""Whether it learns: the arithmetic world with a base made on the GPU, three seeds at once.

python tests/gpu/learn.py --device cuda
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean
from typing import Any

from findings import ROOT, Findings, last_lines, run_part

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run

SEEDS = (0, 1, 2)
SHOWN = 5  # steps at either end of a run, whose truncated share and reward are reported
RISE = 0.1  # of held-out accuracy, mean over seeds; chance alone moves it by about 0.03


def world_of(device: str, small: bool) -> list[str]:
    """The world as overrides: its base is built where the run computes."""
    if small:
        return ["world=tiny", f"device={device}"]
    return ["world=arithmetic", "model=arithmetic_large", f"model.device={device}", f"device={device}"]


def length_of(small: bool) -> list[str]:
    """How long a run is, and how it is judged."""
    steps = 30 if small else 60
    return [
        f"budget.amount={steps}", "tracking=none", "evaluation=brief",
        f"evaluation.every={steps}", "evaluation.samples=4", "evaluation.pass_at=[1]", "evaluation.probe_problems=32",
        f"evaluation.heldout_problems={64 if small else 256}", f"evaluation.downstream_problems={64 if small else 128}",
        f"checkpoint_every={steps}",
    ]  # fmt: skip


def measure(found: Findings) -> None:
    world = [*world_of(found.device, found.small), *length_of(found.small)]
    base, started = to_run(compose_config(world)).model, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        runs, processes = Path(name), {}
        try:
            for seed in SEEDS[: 1 if found.small else None]:
                command = [sys.executable, "-m", "grpo_lab.train", *world, f"seed={seed}", f"runs_dir={runs}"]
                with (runs / f"{seed}.log").open("w") as log:
                    processes[seed] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
            # The first of them builds the base, the others wait for it.
            folder = base.resolve()
            found.add("seconds until the base was there", time.monotonic() - started, "s")
            report = json.loads((folder / "report.json").read_text())
            found.add("the base: weights", report["parameters"], "weights")
            rises = [rise(found, runs, seed, process) for seed, process in processes.items()]
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    found.add("held-out accuracy rises, mean over seeds", mean(rises), "", more_than=RISE)
    found.add("held-out accuracy rises in every seed", min(rises), "", at_least=0.0)
    found.add("seconds from start to the last run's end", time.monotonic() - started, "s")


def rise(found: Findings, runs: Path, seed: int, process: subprocess.Popen[bytes]) -> float:
    """How much held-out accuracy rose in the run of this seed. Raises RuntimeError where it failed."""
    if process.wait() != 0:
        said = " / ".join(last_lines((runs / f"{seed}.log").read_text(errors="replace"), 3))
        raise RuntimeError(f"the run of seed {seed} ended with {process.returncode}: {said}")
    (ended,) = runs.glob(f"*/seed={seed}/DONE")
    done: dict[str, Any] = json.loads(ended.read_text())
    before, after = (done[when]["eval/heldout/accuracy"] for when in ("first", "last"))
    for when, accuracy in (("before", before), ("after", after)):
        found.add(f"seed {seed}: held-out accuracy {when}", accuracy)
    for name in ("rollout/truncated", "reward/mean"):
        for when, value in zip(("first", "last"), at_both_ends(ended.parent, name)):
            found.add(f"seed {seed}: {name}, {when} {SHOWN} steps", value)
    return after - before


def at_both_ends(folder: Path, name: str) -> tuple[float, float]:
    """The mean of a metric over a run's first and last steps, which say why it did not learn."""
    lines = [json.loads(line)["metrics"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [line[name] for line in lines[1:]]
    return mean(values[:SHOWN]), mean(values[-SHOWN:])


if __name__ == "__main__":
    run_part(measure)
