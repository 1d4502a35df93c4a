"""What is sent of a checkpoint, and where the tracker of a replayed run lies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mirrored_runs import log_steps, write_run_json
from mlflow import MlflowClient

from grpo_lab.cli import _runs_dir_of
from grpo_lab.tracking.mlflow_exporter import sync
from grpo_lab.tracking.run_log import RunLog


@pytest.mark.extended
def test_a_registered_model_has_no_optimiser_of_one_process_or_of_several(tmp_path: Path) -> None:
    folder, uri = tmp_path / "run", f"sqlite:///{tmp_path}/mlflow.db"
    write_run_json(folder, None, tracking={"uri": uri, "experiment": "grpo_lab", "register": "tiny"})
    with RunLog(folder) as log:
        log_steps(log, range(2))
        log.mark_done({"no_ops": [], "steps": 1})
    saved = folder / "checkpoints" / "step=000001"
    for name in ("model.safetensors", "config.json", "state.pt", "manifest.json", "shards/__0_0.distcp"):
        (saved / name).parent.mkdir(parents=True, exist_ok=True)
        (saved / name).write_bytes(b"{}")
    report = sync(folder)
    assert (report.error, report.status) == (None, "FINISHED")
    client = MlflowClient(uri)
    (version,) = client.search_model_versions("name='tiny'")
    assert version.tags["step"] == "000001"
    sent = [entry.path for entry in client.list_artifacts(report.run_id, "model")]
    assert sorted(sent) == ["model/config.json", "model/model.safetensors"]


@pytest.mark.parametrize("below", [".", "plain", "plain/seed=0", "external/theirs/trl/seed=1"])
def test_a_tracker_lies_in_the_folder_of_runs_whatever_part_of_it_is_sent(below: str, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, described in (("plain/seed=0", {}), ("external/theirs/trl/seed=1", {"external": {}})):
        (runs / name).mkdir(parents=True)
        (runs / name / "run.json").write_text(json.dumps(described))
    assert _runs_dir_of(runs / below) == runs
    assert _runs_dir_of(tmp_path) == tmp_path, "a folder above several"
    assert _runs_dir_of(runs / "empty") == runs / "empty"
