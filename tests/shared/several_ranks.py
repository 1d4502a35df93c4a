"""Runs of the tiny world one after another, in this process or in each of several that torchrun starts.

    torchrun --nproc-per-node=2 several_ranks.py <folder> <runs.json>

`runs.json` maps the name of each run to its overrides. Beside its folder, `<name>.pt` gets the gradients of every
update, whole, as they were before they were clipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.rules import check_compatible
from grpo_lab.config.run_config import to_run
from grpo_lab.loop import start
from grpo_lab.policy import ranks
from grpo_lab.policy.optim import Adamw

WORLD = [
    "world=tiny", "tracking=none", "evaluation=brief", "evaluation.initial_kl=false", "evaluation.every=1000",
    "evaluation.probe_problems=8", "evaluation.heldout_problems=8", "evaluation.downstream_problems=8",
    "optimizer.learning_rate=1e-3", "problems_per_step=4", "group_size=4", "device=cpu",
]  # fmt: skip
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
Runs = Mapping[str, Sequence[str]]


def on_two(folder: Path, runs: Runs) -> None:
    """All `runs` on two processes; their folders are `folder/<name>/seed=0`."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / "runs.json"
    plan.write_text(json.dumps(runs))
    ended = subprocess.run(
        [*TORCHRUN, __file__, str(folder), str(plan)],
        capture_output=True, text=True, timeout=280, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert "Warning" not in ended.stderr, ended.stderr


def on_one(folder: Path, runs: Runs) -> None:
    """All `runs` here, and a record of their gradients."""
    folder.mkdir(parents=True, exist_ok=True)
    gradients: list[dict[int, torch.Tensor]] = []
    plain_step = Adamw.step

    def noted(self, optimizer, update, spent=0.0):
        weights = [one for group in optimizer.param_groups for one in group["params"]]
        found = {place: one.grad for place, one in enumerate(weights) if one.grad is not None}
        gradients.append({place: ranks.whole(one).clone() for place, one in found.items()})
        return plain_step(self, optimizer, update, spent)

    Adamw.step = noted
    try:
        for name, overrides in runs.items():
            gradients.clear()
            config, choices = compose_with_choices([*WORLD, f"runs_dir={folder}", *overrides])
            check_compatible(to_run(config), choices)
            start(config, name, choices, ["test"])
            if ranks.is_first():
                torch.save(list(gradients), folder / f"{name}.pt")
    finally:
        Adamw.step = plain_step


if __name__ == "__main__":
    with ranks.opened(lambda: torch.device("cpu")):
        on_one(Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text()))
