"""Reading what was exported to MLflow: a sqlite database with SQL, any other store through MLflow's client.

A sqlite database is opened read-only. SQL needs no MLflow, is many times faster than its client, and works while runs
write.
"""

from __future__ import annotations

import os
import re
import sqlite3
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
import pandas as pd

from grpo_lab import deferred
from grpo_lab.tracking.metrics import AT_BUDGET, AUC
from grpo_lab.tracking.mlflow_store import check_driver, check_uri, first_line
from grpo_lab.tracking.mlflow_store import load_mlflow as import_mlflow

THREADS = 8
PATIENCE_SECONDS = 20.0  # for a writer's transaction in a database without a write-ahead log
_PATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "60", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
# Stages of the step, the machine, and what the exporter adds at a run's end: readers of run folders do not count them
# among the metrics either.
_BESIDE = ("time/", "system/", AT_BUDGET, AUC)
_INFINITY = float(np.finfo(np.float64).max)  # as MLflow stores it


@dataclass(frozen=True)
class MlflowRun:
    """An MLflow run: its id, its status in MLflow's words, unix times in ms (None: not ended), files and tags."""

    run_id: str
    status: str
    started: int
    ended: int | None
    artifacts: str
    tags: Mapping[str, str]

    @property
    def age(self) -> tuple[int, int]:
        """Sorts runs from old to new; of two that started together, the one that went on for longer is the newer."""
        return self.started, self.ended or 2**63


class Store(ABC):
    """The records that analysis reads from a store; deleted runs and experiments are left out."""

    @abstractmethod
    def tagged(self, name: str, value: str | None = None) -> list[MlflowRun]:
        """Every run with this tag, of this value unless None."""

    @abstractmethod
    def points(self, runs: Sequence[MlflowRun]) -> list[pd.DataFrame]:
        """For each run what it logged: step and, sorted by name, one float column per metric."""

    @abstractmethod
    def artifacts(self, runs: Sequence[MlflowRun], name: str) -> list[bytes | None]:
        """For each run the content of one of its files; None where this machine cannot reach it."""


@contextmanager
def open_store(uri: str) -> Iterator[Store]:
    """The store at `uri` for the length of a block. Raises ValueError, with a remedy, where it cannot be read."""
    check_uri(uri)
    check_driver(uri)
    if urlsplit(uri).scheme.split("+")[0] != "sqlite":
        deferred.load("pandas")  # the client reads in threads
        client = import_mlflow().MlflowClient(tracking_uri=uri)
        try:
            with _patience():
                yield ClientStore(client)
        except import_mlflow().MlflowException as error:
            raise ValueError(
                f"{shown(uri)} cannot be read ({first_line(error)}): start the server, or read the run folders"
            ) from error
        return
    database = Path(re.sub(r"^sqlite(\+\w+)?:///", "", uri).split("?")[0])
    if not database.exists():
        raise ValueError(f"there is no MLflow store {database}: give the path of an mlflow.db, or of a folder of runs")
    try:
        with closing(_connect(database)) as connection:
            yield SqliteStore(database, connection)
    except sqlite3.Error as error:
        raise ValueError(
            f"{database} cannot be read as an MLflow store ({error}): give the path of an mlflow.db, and where its "
            "folder cannot be written, a copy of it and of the files beside it"
        ) from error


@contextmanager
def _patience() -> Iterator[None]:
    """Wait for a server that is busy: what is too long for a run that logs is not for a reader.

    The MLflow package reads its settings at every call, so they are set for the length of the block.
    """
    before = {name: os.environ.get(name) for name in _PATIENT}
    os.environ.update(_PATIENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def shown(uri: str) -> str:
    """A store in words for others to read: no password, no folder of this machine."""
    parts = urlsplit(uri)
    return f"MLflow store {Path(parts.path).name}" if parts.hostname is None else f"MLflow at {parts.hostname}"


def _connect(database: Path) -> sqlite3.Connection:
    address = f"{database.resolve().as_uri()}?mode=ro"
    connection = sqlite3.connect(address, uri=True, timeout=PATIENCE_SECONDS)
    try:
        connection.execute("SELECT name FROM sqlite_master LIMIT 1")
    except sqlite3.OperationalError as error:
        connection.close()
        # Even a reader puts files beside a database with a write-ahead log. Where the folder refuses that and no log
        # with anything in it is there, the database is whole in its one file and nobody writes to it.
        log = database.with_name(f"{database.name}-wal")
        refused = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
        if not refused or (log.exists() and log.stat().st_size > 0):
            raise
        return sqlite3.connect(f"{address}&immutable=1", uri=True)
    return connection


class SqliteStore(Store):
    """A store in a sqlite database, read with SQL."""

    def __init__(self, database: Path, connection: sqlite3.Connection) -> None:
        self._database = database
        self._connection = connection

    def tagged(self, name: str, value: str | None = None) -> list[MlflowRun]:
        """See Store."""
        chosen = "SELECT run_uuid FROM tags WHERE key = ?" + ("" if value is None else " AND value = ?")
        given = [name] if value is None else [name, value]
        rows = self._connection.execute(
            "SELECT run_uuid, r.status, r.start_time, r.end_time, r.artifact_uri FROM runs r "
            "JOIN experiments e ON e.experiment_id = r.experiment_id WHERE r.lifecycle_stage = 'active' "
            f"AND e.lifecycle_stage = 'active' AND run_uuid IN ({chosen})",
            given,
        ).fetchall()
        tags: dict[str, dict[str, str]] = {row[0]: {} for row in rows}
        for run, key, text in self._connection.execute(
            f"SELECT run_uuid, key, value FROM tags WHERE key != 'mlflow.note.content' AND run_uuid IN ({chosen})",
            given,
        ):
            if run in tags:
                tags[run][key] = text
        return [
            MlflowRun(run, status, started or 0, ended, artifacts or "", tags[run])
            for run, status, started, ended, artifacts in rows
        ]

    def points(self, runs: Sequence[MlflowRun]) -> list[pd.DataFrame]:
        """See Store. Each run is one query, so that a writer without a write-ahead log never waits for long."""
        skipped = "".join(f" AND key NOT GLOB '{prefix}*'" for prefix in _BESIDE)
        query = (
            "SELECT key, step, CASE WHEN is_nan THEN NULL ELSE value END FROM metrics "
            f"WHERE run_uuid = ?{skipped} ORDER BY timestamp, rowid"
        )
        return [_wide(self._connection.execute(query, (run.run_id,)).fetchall()) for run in runs]

    def artifacts(self, runs: Sequence[MlflowRun], name: str) -> list[bytes | None]:
        """See Store."""
        return [self._artifact(run, name) for run in runs]

    def _artifact(self, run: MlflowRun, name: str) -> bytes | None:
        parts = urlsplit(run.artifacts)
        places = [Path(unquote(parts.path))] if parts.scheme in ("", "file") else []
        # Where the exporter puts them when it makes the store, which may have been moved together with them since.
        places.append(self._database.parent / "mlflow_artifacts" / run.run_id / "artifacts")
        found = next((place / name for place in places if (place / name).is_file()), None)
        return None if found is None else found.read_bytes()


class ClientStore(Store):
    """A store behind a server, or in another database, read through MLflow's client in several threads."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._metrics: dict[str, list[str]] = {}

    def tagged(self, name: str, value: str | None = None) -> list[MlflowRun]:
        """See Store."""
        experiments = [experiment.experiment_id for experiment in _pages(self._client.search_experiments)]
        if not experiments:
            return []
        # Names with quotes in them are compared here, not there.
        condition = f"= '{value}'" if value is not None and "'" not in value else "LIKE '%'"
        found = []
        for run in _pages(self._client.search_runs, experiments, f"tags.`{name}` {condition}"):
            if value is None or run.data.tags.get(name) == value:
                info = run.info
                self._metrics[info.run_id] = sorted(run.data.metrics)
                found.append(
                    MlflowRun(
                        info.run_id,
                        info.status,
                        info.start_time or 0,
                        info.end_time,
                        info.artifact_uri or "",
                        dict(run.data.tags),
                    )
                )
        return found

    def points(self, runs: Sequence[MlflowRun]) -> list[pd.DataFrame]:
        """See Store."""
        logged = {run.run_id: [key for key in self._metrics[run.run_id] if not key.startswith(_BESIDE)] for run in runs}
        series = [(run_id, key) for run_id, keys in logged.items() for key in keys]
        with ThreadPoolExecutor(THREADS) as pool:
            histories = list(pool.map(lambda one: self._client.get_metric_history(*one), series))
        rows: dict[str, list[tuple[str, int, float]]] = {run.run_id: [] for run in runs}
        for (run_id, key), history in zip(series, histories):
            in_time = sorted(history, key=lambda point: point.timestamp)
            rows[run_id] += [(key, point.step, point.value) for point in in_time]
        return [_wide(rows[run.run_id]) for run in runs]

    def artifacts(self, runs: Sequence[MlflowRun], name: str) -> list[bytes | None]:
        """See Store."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(lambda run: self._artifact(run, name), runs))

    def _artifact(self, run: MlflowRun, name: str) -> bytes | None:
        with tempfile.TemporaryDirectory() as folder:
            try:
                return Path(self._client.download_artifacts(run.run_id, name, folder)).read_bytes()
            except Exception:  # stores of files differ in what they raise for one that is not there
                return None


def _pages(search: Any, *arguments: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*arguments, page_token=token)
        yield from page
        token = page.token
        if not token:
            return


def _wide(rows: Iterable[tuple[str, int, float | None]]) -> pd.DataFrame:
    """One row per step of (metric, step, value) from old to new; of a metric twice at a step the newest counts.

    A value of None is one that was not a number.
    """
    rows = list(rows)
    if not rows:
        return pd.DataFrame()
    names, steps, values = zip(*rows)
    columns = sorted(set(names))
    place = {name: number for number, name in enumerate(columns)}
    at = np.fromiter((place[name] for name in names), dtype=np.intp, count=len(names))
    known, row = np.unique(np.array(steps, dtype=np.int64), return_inverse=True)
    table = np.full((len(columns), len(known)), np.nan)
    table[at, row] = np.array(values, dtype=float)  # of one place set twice, numpy keeps the last
    table = np.where(np.abs(table) == _INFINITY, np.copysign(np.inf, table), table)
    return pd.DataFrame({"step": known, **dict(zip(columns, table))})
