"""Runs as tasks of Ray, on a real cluster of two nodes: the same runs, whatever becomes of nodes and sweep."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from processes import alive, wait_until
from ray_cluster import NODE, ray_cluster
from short_runs import same_ending
from sweep_processes import attempts, finished, folder_of, lines_in, started, sweep

from grpo_lab.sweeps.jobs import Job
from grpo_lab.sweeps.ray import RayRunLauncher, RaySettings
from grpo_lab.tracking.run_reader import holder

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

SETTINGS = {"cpus": None, "gpus": 0.0, "memory_gb": None, "resources": {}, "retries": 10}
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests follow processes in /proc")


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
    assert again.returncode == 0 and "all 3 runs are finished" in again.stderr


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_runs_of_a_killed_node_start_again_elsewhere_from_their_checkpoints(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score,mask_after", "budget.amount=60", "checkpoint_every=1")
    with started(there, *words, *on(cluster)) as (process, _):
        wait_until(lambda: len({path.parent for path in there.glob("*/seed=0/checkpoints/step=*")}) == 2, process)
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
def test_ctrl_c_ends_running_and_waiting_runs(cluster: Cluster, tmp_path: Path, tiny_base: Path) -> None:
    words = ("truncation=score,mask_after,mask_before", "budget.amount=200", *on(cluster))
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: len(logs(tmp_path)) == 2 and min(logs(tmp_path)) > 1, process)
        children = [int(holder(path.parent)) for path in tmp_path.glob("*/seed=0/metrics.jsonl")]
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130 and "stopping 3 runs" in said and "Traceback" not in said
    assert finished(tmp_path) == 0 and not any(map(alive, children))
    notes = [path.read_text() for path in tmp_path.glob("*/seed=0/error.txt")]
    assert len(notes) == 2 and all("KeyboardInterrupt" in note for note in notes), "interrupted, not killed"
    place = RayRunLauncher(cluster.address, None, 30.0, None, **SETTINGS).backend("x", [], [])
    try:
        import ray

        wait_until(lambda: ray.available_resources().get("CPU") == 2)  # nothing runs, and nothing waits
    finally:
        place.close()
    assert len(list(tmp_path.glob("*/seed=0/output.log"))) == 2, "the third was never started"


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_the_runs_of_a_sweep_that_is_killed_end_with_it_and_the_same_command_continues_them(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score,mask_after", "budget.amount=100", "checkpoint_every=2", *on(cluster))
    with started(tmp_path, *words) as (process, children):
        wait_until(lambda: len({path.parent for path in tmp_path.glob("*/seed=0/checkpoints/step=*")}) == 2, process)
        children |= {int(holder(path.parent)) for path in tmp_path.glob("*/seed=0/metrics.jsonl")}
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(alive, children)))
    assert len(children) == 2 and finished(tmp_path) == 0
    again = sweep(tmp_path, *words)
    assert again.returncode == 0 and finished(tmp_path) == 2, again.stderr
    assert all("resuming after step" in path.read_text() for path in tmp_path.glob("*/seed=0/output.log"))


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_runs_that_fail_or_are_killed_stop_no_other_and_are_told(
    cluster: Cluster, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score,mask_after", "budget.amount=60", *on(cluster))
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: len(logs(tmp_path)) == 2 and min(logs(tmp_path)) > 1, process)
        os.kill(int(holder(folder_of(tmp_path, "score", 0))), signal.SIGKILL)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1 and finished(tmp_path) == 1
    assert "truncation=score seed=0: killed by SIGKILL" in said


SAYS_WHERE = """
import atexit, os, time

print(*map(os.environ.get, ("NODE_NUMBER", "CUDA_VISIBLE_DEVICES")), "from", time.time(), flush=True)
atexit.register(lambda: print("until", time.time(), flush=True))
"""


def spans_by_node(runs: Path) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """Number of a node and GPUs that its runs saw -> from when until when each of them ran, in s of unix time."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for path in runs.glob("*/seed=*/output.log"):
        (told,) = re.findall(r"^(\d+) (\S+) from ([\d.]+)$.*^until ([\d.]+)$", path.read_text(), re.M | re.S)
        node, gpus, began, ended = told
        found.setdefault((node, gpus), []).append((float(began), float(ended)))
    return found


def most_at_once(spans: list[tuple[float, float]]) -> int:
    return max(sum(began <= at < ended for began, ended in spans) for at, _ in spans)


@pytest.mark.extended
@pytest.mark.timeout(600)
def test_runs_share_the_gpus_of_their_nodes_as_the_launcher_is_told(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes with room for two runs each, and one GPU, of which Ray only keeps count."""
    (tmp_path / "says_where.py").write_text(SAYS_WHERE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("seed=0,1,2,3", "budget.amount=1", "device=cpu", "plugins=[says_where]")
    with ray_cluster(2, num_cpus=2, num_gpus=1) as cluster:
        for gpus, at_once in ((1, 1), (0.5, 2)):
            runs = tmp_path / str(gpus)
            said = sweep(runs, *words, *on(cluster), f"hydra.launcher.gpus={gpus}")
            assert said.returncode == 0 and finished(runs) == 4, said.stderr
            spans = spans_by_node(runs)
            assert sorted(spans) == [("0", "0"), ("1", "0")], "both nodes, and each run the GPU of its node"
            assert [most_at_once(own) for own in spans.values()] == [at_once, at_once]
            for path in runs.glob("*/seed=*/environment.json"):
                assert json.loads(path.read_text())["threads"]["CUDA_VISIBLE_DEVICES"] == "0"
        runs = tmp_path / "none"
        assert sweep(runs, *words, *on(cluster)).returncode == 0
        for path in runs.glob("*/seed=*/environment.json"):
            assert json.loads(path.read_text())["threads"]["CUDA_VISIBLE_DEVICES"] == "", "a run sees what it asks for"


@pytest.mark.extended
def test_a_run_that_no_node_can_take_says_what_it_waits_for(cluster: Cluster, tmp_path: Path) -> None:
    place = RayRunLauncher(cluster.address, None, 30.0, None, **{**SETTINGS, "gpus": 2.0}).backend("x", [], [])
    try:
        job = Job("cell", ("no_such_key=1",), tmp_path, "steps", 1.0, 1)
        run = place.start(job, 0)
        assert run.poll() is None and run.note == "waits for a node with 1 CPU, 2 GPU: Ray has none now"
        run.interrupt()
        wait_until(lambda: run.poll() is not None)
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
        RayRunLauncher("", 0, 30.0, None, **SETTINGS).backend("x", [], [])


def test_a_job_asks_ray_for_what_its_settings_say() -> None:
    job = Job("arm seed=0", (), Path("x"), "steps", 1.0, 2)
    plain = RaySettings(**SETTINGS).options(job)
    assert plain == {"num_cpus": 2, "num_gpus": 0, "resources": {}, "max_retries": 10, "name": "arm seed=0"}
    whole = RaySettings(cpus=4.0, gpus=0.5, memory_gb=1.5, resources={"disk": 1.0}, retries=0).options(job)
    assert whole["num_cpus"] == 4 and whole["num_gpus"] == 0.5 and whole["memory"] == 3 * 2**29
    assert whole["resources"] == {"disk": 1} and whole["max_retries"] == 0
