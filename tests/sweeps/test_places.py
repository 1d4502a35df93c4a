"""One sweep at three places: this machine, Slurm's queue and Ray's nodes give the same bytes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import ray_cluster
import slurm_node
from short_runs import same_ending
from sweep_processes import command, finished

WORDS = ("truncation=score,mask_after,mask_before", "baseline=group_mean,leave_one_out", "seed=0,1", "budget.amount=3")


def run_at(runs: Path, *launcher: str) -> Path:
    said = subprocess.run(command(runs, *WORDS, *launcher), capture_output=True, text=True, timeout=1200)
    assert said.returncode == 0 and finished(runs) == 12, said.stderr
    return runs


@pytest.mark.extended
@pytest.mark.timeout(3000)
@pytest.mark.needs(*slurm_node.PROGRAMS, "root")
def test_twelve_runs_by_local_slurm_and_ray_are_the_same_runs(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = run_at(tmp_path / "local")
    with slurm_node.slurm_node(tmp_path / "node") as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        in_slurm = run_at(tmp_path / "slurm", "hydra/launcher=slurm")
    with ray_cluster.ray_cluster(2) as cluster:
        on_ray = run_at(tmp_path / "ray", "hydra/launcher=ray", f"hydra.launcher.address={cluster.address}")
    for log in here.glob("*/seed=*/metrics.jsonl"):
        folder = log.parent.relative_to(here)
        for other in (in_slurm, on_ray):
            same_ending(log.parent, other / folder)
