"""A real run whose MLflow server dies under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import free_port, mlflow_server
from mirrored_runs import query
from processes import wait_until
from short_runs import WORLD

from grpo_lab.tracking.mlflow_exporter import sync

POINTS = "select key, step, value from metrics where key not like 'system/%' order by key, step"


@pytest.mark.extended
def test_a_run_goes_on_without_its_server_and_a_sync_sends_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, runs, port = tmp_path / "store" / "mlflow.db", tmp_path / "runs", free_port()
    store.parent.mkdir()
    address = f"tracking.uri=http://127.0.0.1:{port}"
    words = [word for word in WORLD if not word.startswith("tracking")]
    quick = ["tracking.interval_seconds=0.3", "tracking.flush_seconds=3", "budget.amount=150"]
    command = [sys.executable, "-m", "grpo_lab.train", *words, f"runs_dir={runs}", "tracking=mlflow", address, *quick]
    process = None
    try:
        with mlflow_server(store, tmp_path, port):
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            wait_until(lambda: query(store, "select max(step) from metrics")[0][0] is not None, process)
        (folder,) = runs.glob("*/seed=0")
        assert not (folder / "DONE").exists(), "the server is gone while it runs"
        _, said = process.communicate(timeout=200)
    finally:
        if process is not None:
            process.kill()
    assert process.returncode == 0 and "grpo-lab sync" in said and (folder / "DONE").exists(), said
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "120")  # a server on a busy machine may be slow
    with mlflow_server(store, tmp_path, port):
        report = sync(folder)
        assert report.error is None and report.points > 0 and report.status == "FINISHED"
    whole = tmp_path / "whole.db"
    sync(folder, uri=f"sqlite:///{whole}")
    assert query(store, POINTS) == query(whole, POINTS), "as if it had never been away"
