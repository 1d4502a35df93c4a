"""The MLflow store's first moment: many processes at once on a fresh one, and a migration that was killed."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.tracking.mlflow_store import check_uri, load_mlflow, prepare_store

# Each announces a sweep; MLflow is imported before they part, so that they meet at the store.
EIGHT_AT_ONCE = """
import os, sys
from pathlib import Path

from grpo_lab.tracking.mlflow_parent import announce_sweep
from grpo_lab.tracking.mlflow_store import load_mlflow
from grpo_lab.tracking.sweep_record import record_sweep

load_mlflow()
import mlflow.store.tracking.sqlalchemy_store
for runs in map(Path, sys.argv[1:]):
    tracking = {"uri": f"sqlite:///{runs}/mlflow.db", "experiment": "grpo_lab"}
    folders = [record_sweep(runs, f"s{n}", [], None, None, "", [], None, tracking) for n in range(8)]
    ready, go = os.pipe()
    children = []
    for folder in folders:
        children.append(os.fork())
        if children[-1] == 0:
            os.close(go)
            os.read(ready, 1)  # until all are there
            announce_sweep(folder, running=True)
            os._exit(0)
    os.close(go)
    for child in children:
        os.waitpid(child, 0)
"""


@pytest.mark.extended
@pytest.mark.parametrize("stores", [1, pytest.param(5, marks=pytest.mark.extended)])
def test_eight_processes_at_once_on_a_fresh_store_make_it_once(tmp_path: Path, stores: int) -> None:
    folders = [tmp_path / f"runs {number}" for number in range(stores)]
    command = [sys.executable, "-c", EIGHT_AT_ONCE, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert (done.returncode, done.stderr) == (0, ""), "no warning that MLflow does not take the sweep"
    for folder in folders:
        with closing(sqlite3.connect(folder / "mlflow.db")) as connection:
            names = connection.execute("SELECT name FROM runs ORDER BY name").fetchall()
            assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert names == [(f"s{number}",) for number in range(8)]
        left = {path.name for path in folder.iterdir() if not path.name.startswith("mlflow.db-")}
        assert left <= {"mlflow.db", "mlflow.db.lock", "mlflow_artifacts", "sweeps"}


@pytest.mark.extended
def test_what_killed_processes_left_is_replaced_or_named(tmp_path: Path) -> None:
    """A store takes its place when it is whole; one that was made in its place, as before, may be half made."""
    store = tmp_path / "my store.db"
    leftover = tmp_path / f".{store.name}.{os.getpid()}.tmp"
    leftover.write_bytes(b"half a database")
    assert prepare_store(f"sqlite:///{store}", "grpo_lab") == "1"
    assert not leftover.exists()
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("CREATE TABLE _alembic_tmp_latest_metrics (key TEXT)")
    with pytest.raises(ValueError, match=r"my store\.db is half made \(_alembic_tmp_latest_metrics is left") as refused:
        prepare_store(f"sqlite:///{store}", "grpo_lab")
    assert f"move it away, and `grpo-lab sync {tmp_path}` fills a new one" in str(refused.value)


@pytest.mark.extended
def test_a_store_lies_in_the_folder_that_it_is_given(tmp_path: Path) -> None:
    name = "a b#c%d&e=f;[x]:@ü日本"
    folder = tmp_path / name
    experiment = prepare_store(f"sqlite:///{folder}/mlflow.db", "e")
    client = load_mlflow().MlflowClient(tracking_uri=f"sqlite:///{folder}/mlflow.db")
    run = client.create_run(experiment).info.run_id
    (tmp_path / "file.txt").write_text("content")
    client.log_artifact(run, str(tmp_path / "file.txt"))
    assert [path.read_text() for path in folder.rglob("file.txt")] == ["content"]
    assert {path.name for path in tmp_path.iterdir()} == {name, "file.txt"} and (folder / "mlflow.db").exists()


@pytest.mark.few(2)
@pytest.mark.parametrize("name", ["a?b", "a%25b", "a%20b", "?"])
def test_a_folder_that_mlflow_would_read_as_another_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="into another folder: choose another runs_dir, or tracking=none, or"):
        compose = compose_config(["world=tiny", f"runs_dir='{tmp_path / name}'"])
        to_run(compose)
    assert to_run(compose_config(["world=tiny", f"runs_dir='{tmp_path / name}'", "tracking=none"]))
    assert not list(tmp_path.iterdir())
    check_uri("sqlite:////runs/mlflow.db?timeout=30")
