"""Runs of the tiny world one after another, in this process or in each of several that torchrun starts.

    torchrun --nproc-per-node=2 several_ranks.py <folder> <runs.json>

`runs.json` maps the name of each run to its overrides. Beside its folder, `<name>.pt` gets the gradients of every
update, whole, as they were before they were clipped.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from processes import descendants_of, forked

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.rules import check_compatible
from grpo_lab.config.run_config import to_run
from grpo_lab.distributed import ranks, tensors
from grpo_lab.loop import start
from grpo_lab.policy.optim import Optimizer

WORLD = [
    "world=tiny", "tracking=none", "evaluation=brief", "evaluation.initial_kl=false", "evaluation.every=1000",
    "evaluation.probe_problems=8", "evaluation.heldout_problems=8", "evaluation.downstream_problems=8",
    "optimizer.learning_rate=1e-3", "problems_per_step=4", "group_size=4", "device=cpu",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
Runs = Mapping[str, Sequence[str]]


def on_two(folder: Path, runs: Runs) -> None:
    """All `runs` on two processes; their folders are `folder/<name>/seed=0`.

    What torchrun does, in a copy of this process: its agent forks both.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said = folder / "torchrun-0.txt"
    process = forked(lambda: _agent(folder, runs), said)
    try:
        process.join(280)
        assert process.exitcode == 0, said.read_text()[-4000:]
        assert "Warning" not in said.read_text()
    finally:
        for pid in descendants_of(process.pid or 0) if process.is_alive() else ():
            os.kill(pid, signal.SIGKILL)
        process.kill()


def _agent(folder: Path, runs: Runs) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    meeting = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": folder.name}
    elastic_launch(LaunchConfig(1, 1, 2, start_method="fork", max_restarts=0, **meeting), _share)(folder, runs)


def _share(folder: Path, runs: Runs) -> None:
    """All `runs` as one of the processes of torchrun."""
    with ranks.opened(lambda: torch.device("cpu")):
        on_one(folder, runs)


def two_machines() -> list[list[str]]:
    """What would start one process on each of two machines, which meet; here both are on this one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = ["--rdzv-backend=c10d", "--rdzv-id=test", f"--rdzv-endpoint=127.0.0.1:{port}"]
    return [[*TORCHRUN[:3], "--nnodes=2", "--nproc-per-node=1", *meeting]] * 2


def on_two_machines(folder: Path, runs: Runs) -> None:
    """All `runs` on two processes, each started by a torchrun of its own."""
    _run_all(folder, runs, two_machines())


def _run_all(folder: Path, runs: Runs, commands: Sequence[Sequence[str]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "runs.json"
    plan.write_text(json.dumps(runs))
    said = [folder / f"torchrun-{place}.txt" for place in range(len(commands))]
    processes = []
    try:
        for command, path in zip(commands, said, strict=True):
            with path.open("wb") as file:
                processes.append(
                    subprocess.Popen(
                        [*command, __file__, str(folder), str(plan)],
                        stdout=subprocess.DEVNULL, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"},
                    )
                )  # fmt: skip
        for process, path in zip(processes, said, strict=True):
            assert process.wait(280) == 0, path.read_text()[-4000:]
            assert "Warning" not in path.read_text()
    finally:
        for process in processes:
            process.kill()


def on_one(folder: Path, runs: Runs) -> None:
    """All `runs` here, and a record of their gradients."""
    folder.mkdir(parents=True, exist_ok=True)
    gradients: list[dict[int, torch.Tensor]] = []
    plain_step = Optimizer.step

    def noted(self, optimizer, update, spent=0.0):
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        found = {place: one.grad for place, one in enumerate(weights) if one.grad is not None}
        gradients.append({place: tensors.full(one).clone() for place, one in found.items()})
        return plain_step(self, optimizer, update, spent)

    Optimizer.step = noted
    try:
        for name, overrides in runs.items():
            gradients.clear()
            config, choices = compose_with_choices([*WORLD, f"runs_dir={folder}", *overrides])
            check_compatible(to_run(config), choices)
            start(config, name, choices, ["test"])
            if ranks.is_first():
                torch.save(list(gradients), folder / f"{name}.pt")
    finally:
        Optimizer.step = plain_step


if __name__ == "__main__":
    _share(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
