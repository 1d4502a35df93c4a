"""Cells as tasks of Ray, on a real cluster of two nodes: the same runs, whatever becomes of nodes and sweep."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import alive, wait_until
from ray_cluster import NODE, ray_cluster, why_not
from short_runs import same_ending
from sweep_processes import attempts, finished, folder_of, lines_in, started, sweep

from grpo_lab.sweeps.jobs import Job
from grpo_lab.sweeps.ray import RayCells, RaySettings
from grpo_lab.tracking.run_reader import holder, is_held

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

SETTINGS = {"cpus": None, "gpus": 0.0, "memory_gb": None, "resources": {}, "retries": 10}
pytestmark = pytest.mark.skipif(why_not() != "", reason=f"no Ray here: {why_not()}")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_cluster(2) as cluster:
        yield cluster


def on(cluster: Cluster) -> tuple[str, ...]:
    return ("hydra/launcher=ray", f"hydra.launcher.address={cluster.address}")


def logs(runs: Path) -> list[int]:
    return [lines_in(path) for path in runs.glob("*/seed=0/metrics.jsonl")]


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_sweep_on_ray_is_the_sweep_on_this_machine(cluster: Cluster, tmp_path: Path, tiny_base: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score,mask_after,mask_before", "budget.amount=2")
    said = sweep(there, *words, *on(cluster))
    assert said.returncode == 0, said.stderr
    assert "3 of 3 done" in said.stderr
    assert sweep(here, *words).returncode == 0
    for truncation in ("score", "mask_after", "mask_before"):
        one, other = folder_of(here, truncation, 0), folder_of(there, truncation, 0)
        same_ending(one, other)
        assert attempts(other) == 1
    again = sweep(there, *words, *on(cluster))
    assert again.returncode == 0 and "all 3 cells are finished" in again.stderr


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_cells_of_a_killed_node_start_again_elsewhere_from_their_checkpoints(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score,mask_after", "budget.amount=60", "checkpoint_every=1")
    with started(there, *words, *on(cluster)) as (process, _):
        wait_until(lambda: len(list(there.glob("*/seed=0/checkpoints/step=*"))) >= 2 and len(logs(there)) == 2, process)
        cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
        cluster.add_node(**NODE)
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said
    folders = [folder_of(there, truncation, 0) for truncation in ("score", "mask_after")]
    assert sorted(map(attempts, folders)) == [1, 2], "the other node went on"
    (again,) = (folder for folder in folders if attempts(folder) == 2)
    assert "resuming after step" in (again / "output.log").read_text()
    assert sweep(here, *words).returncode == 0
    for truncation in ("score", "mask_after"):
        same_ending(folder_of(here, truncation, 0), folder_of(there, truncation, 0))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_ctrl_c_ends_running_and_waiting_cells(cluster: Cluster, tmp_path: Path, tiny_base: Path) -> None:
    words = ("truncation=score,mask_after,mask_before", "budget.amount=200", *on(cluster))
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: len(logs(tmp_path)) == 2 and min(logs(tmp_path)) > 1, process)
        cells = [int(holder(path.parent)) for path in tmp_path.glob("*/seed=0/metrics.jsonl")]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130 and "stopping 3 cells" in said and "Traceback" not in said
    assert finished(tmp_path) == 0 and not any(map(alive, cells))
    notes = [path.read_text() for path in tmp_path.glob("*/seed=0/error.txt")]
    assert len(notes) == 2 and all("KeyboardInterrupt" in note for note in notes), "interrupted, not killed"
    time.sleep(2)
    assert not any(is_held(path) for path in tmp_path.glob("*/seed=0")), "the third was never started"


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_cells_of_a_sweep_that_is_killed_end_with_it_and_the_same_command_continues_them(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score,mask_after", "budget.amount=100", "checkpoint_every=2", *on(cluster))
    with started(tmp_path, *words) as (process, cells):
        wait_until(lambda: len(list(tmp_path.glob("*/seed=0/checkpoints/step=*"))) >= 2 and len(logs(tmp_path)) == 2)
        cells |= {int(holder(path.parent)) for path in tmp_path.glob("*/seed=0/metrics.jsonl")}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(alive, cells)))
    assert len(cells) == 2 and finished(tmp_path) == 0
    again = sweep(tmp_path, *words)
    assert again.returncode == 0 and finished(tmp_path) == 2, again.stderr
    assert all("resuming after step" in path.read_text() for path in tmp_path.glob("*/seed=0/output.log"))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_cells_that_fail_or_are_killed_stop_no_other_and_are_told(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score,mask_after", "budget.amount=60", *on(cluster))
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: len(logs(tmp_path)) == 2 and min(logs(tmp_path)) > 1, process)
        os.kill(int(holder(folder_of(tmp_path, "score", 0))), signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1 and finished(tmp_path) == 1
    assert "truncation=score seed=0: killed by SIGKILL" in said


@pytest.mark.extended
def test_a_cell_that_no_node_can_take_says_what_it_waits_for(cluster: Cluster, tmp_path: Path) -> None:
    place = RayCells(cluster.address, None, 30.0, None, **{**SETTINGS, "gpus": 2.0}).place("x", [], [])
    try:
        job = Job("cell", ("no_such_key=1",), tmp_path, "steps", 1.0, 1)
        cell = place.start(job, 0)
        assert cell.poll() is None and cell.note == "waits for a node with 1 CPU, 2 GPU: Ray has none now"
        cell.interrupt()
        wait_until(lambda: cell.poll() is not None)
    finally:
        place.close()


def test_settings_that_cannot_be_and_clusters_that_do_not_answer_are_refused() -> None:
    for wrong, said in (
        ({"gpus": -1.0}, "gpus must be at least 0"), ({"gpus": 1.5}, "a whole number or below 1"),
        ({"retries": -1}, "retries must be at least 0"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            RaySettings(**{**SETTINGS, **wrong})
    with pytest.raises(ValueError, match="at_once must be at least 1"):
        RayCells("", 0, 30.0, None, **SETTINGS).place("x", [], [])


def test_a_job_asks_ray_for_what_its_settings_say() -> None:
    job = Job("arm seed=0", (), Path("x"), "steps", 1.0, 2)
    plain = RaySettings(**SETTINGS).options(job)
    assert plain == {"num_cpus": 2, "num_gpus": 0, "resources": {}, "max_retries": 10, "name": "arm seed=0"}
    whole = RaySettings(cpus=4.0, gpus=0.5, memory_gb=1.5, resources={"disk": 1.0}, retries=0).options(job)
    assert whole["num_cpus"] == 4 and whole["num_gpus"] == 0.5 and whole["memory"] == 3 * 2**29
    assert whole["resources"] == {"disk": 1} and whole["max_retries"] == 0
