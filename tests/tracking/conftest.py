"""A store of MLflow for each test."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from grpo_lab.tracking.mlflow_store import prepare_store


@pytest.fixture(scope="session")
def ready_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sqlite store made once: making it costs seconds, copying it nothing."""
    database = tmp_path_factory.mktemp("store") / "mlflow.db"
    prepare_store(f"sqlite:///{database}", "unused")
    with closing(sqlite3.connect(database)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return database


@pytest.fixture
def store(ready_store: Path, tmp_path: Path) -> Path:
    (tmp_path / "mlflow.db").write_bytes(ready_store.read_bytes())
    return tmp_path / "mlflow.db"
