"""MLflow as groups run it: a server on PostgreSQL, artefacts on its disk, and a run read back from there."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from helpers import free_port, mlflow_server
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
from postgres_server import postgres_server
from short_runs import SMALL, run_in_process

from grpo_lab.analysis.sources.mlflow_runs import load_mlflow
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.tracking import mlflow_store
from grpo_lab.tracking.mlflow_exporter import Mlflow, sync_all
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep


@pytest.mark.extended
@pytest.mark.needs("initdb", "postgres")
def test_a_run_on_postgresql_reads_back_as_its_folder_and_its_model_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "100")  # a server of its own on cores that others use too
    runs, port = tmp_path / "runs", free_port()
    address = f"http://127.0.0.1:{port}"
    with postgres_server() as database, mlflow_server(database, tmp_path, port):
        run = run_in_process(
            runs, *SMALL, "budget.amount=3", "tracking=mlflow", f"tracking.uri={address}", "tracking.register=tiny",
            "tracking.interval_seconds=0.2", "tracking.flush_seconds=100", "tracking.system_metrics=0.1",
            "label.sweep=one", "label.arm=base",
        )  # fmt: skip
        entry = RunEntry("base", "", 0, str(run.relative_to(runs)))
        record_sweep(runs, "one", [entry], None, None, "", ["test"], None, None)
        (report,) = [report for report in sync_all(runs) if report.folder == run]
        assert (report.error, report.points, report.status) == (None, 0, "FINISHED"), "all was sent during the run"
        sync_all(runs, address)
        for uri in (address, database):
            there, here = load_mlflow(uri, "one"), load_sweep(runs, "one")
            for table in ("runs", "points", "answers"):
                pd.testing.assert_frame_equal(getattr(there, table), getattr(here, table), check_exact=True)
        client = MlflowClient(address)
        (version,) = client.search_model_versions("name='tiny'")
        assert (version.run_id, version.tags["step"]) == (report.run_id, "000003")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        model = Path(download_artifacts(f"models:/tiny/{version.version}"))
        kept = run / "checkpoints/step=000003"
        assert (model / "model.safetensors").read_bytes() == (kept / "model.safetensors").read_bytes()
        assert not (model / "state.pt").exists()
        metrics = client.get_run(report.run_id).data.metrics
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["metrics"]
        assert metrics["at_budget/eval/heldout/accuracy"] == last["eval/heldout/accuracy"]
        assert 0 < metrics["system/system_memory_usage_percentage"] < 100
        assert list((tmp_path / "artifacts").rglob("config.yaml")), "the server keeps artefacts on its disk"
        sync_all(runs, address)
        assert len(client.search_model_versions("name='tiny'")) == 1


def test_a_missing_driver_is_told_before_anything_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlflow_store, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"psycopg2 would reach, .*pip install 'grpo-lab\[postgres\]'"):
        Mlflow(10.0, 30.0, 0.0, "postgresql+psycopg2://host/db", "grpo_lab", "")
