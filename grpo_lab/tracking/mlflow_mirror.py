"""MLflow as a mirror of run folders: fed by a background thread, or replayed with `grpo-lab sync`.

The folder is all that is read: run.json says what the run is, metrics.jsonl and timing.jsonl what it
logged, DONE or error.txt how it ended, and mirror.json, written here, which step was sent last. A step is
sent once, with the time at which it was first logged; sending it again, after mirror.json was lost, stores
nothing new, because MLflow keeps one of two equal points. (Where a machine does not reproduce bits, a step
repeated after a resume keeps the values of its first attempt in MLflow, and of its last in the folder.)

mlflow takes over a second to import, so it is imported only where it is used, by the thread.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from grpo_lab.tracking.run_log import (
    RunFolderBusyError,
    StepReader,
    StepRecord,
    acquire_lock,
    is_held,
    write_json,
)

POINTS_PER_BATCH = 1000  # MLflow's limit for one log_batch, and by far the cheapest size per point
ENTRIES_PER_BATCH = 100  # params or tags, likewise
PARAM_LENGTH = 500  # characters
TAG_LENGTH = 5000  # characters
ARTIFACT_BYTES = 5_000_000
LONGEST_BACKOFF_SECONDS = 60.0
STORE_LOCK_SECONDS = 120.0  # eight first starts in a row on a slow disk
ARTIFACTS = ("run.json", "config.yaml", "environment.json", "source.diff", "DONE", "error.txt")
THREAD_NAME = "mlflow-mirror"
DATABASES = ("postgresql", "mysql", "mssql")
NETWORK_FILE_SYSTEMS = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "9p", "fuse.sshfs")
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # By default a dead server holds each call for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}

logger = logging.getLogger("grpo_lab.tracking")


@dataclass(frozen=True)
class Tracking(ABC):
    """Where a run is shown besides its own folder."""

    @abstractmethod
    def record(self) -> dict[str, str] | None:
        """What run.json holds under "tracking": {"uri", "experiment"}, or None."""

    @abstractmethod
    def mirror(self, folder: Path) -> Mirror | NoMirror:
        """The mirror of the run in `folder`, not started."""


@dataclass(frozen=True)
class Mlflow(Tracking):
    """Mirror the run to one experiment of an MLflow server or database.

    `uri` is checked when the run is configured, not reached for: a server that is down stops nothing.
    """

    uri: str
    experiment: str
    interval_seconds: float  # between two looks at the folder
    flush_seconds: float  # the longest that `stop` waits

    def __post_init__(self) -> None:
        check_uri(self.uri)
        for name in ("interval_seconds", "flush_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"Mlflow.{name} must be over 0 seconds, got {getattr(self, name)!r}")

    def record(self) -> dict[str, str]:
        return {"uri": self.uri, "experiment": self.experiment}

    def mirror(self, folder: Path) -> Mirror:
        return Mirror(folder, self.interval_seconds, self.flush_seconds)


@dataclass(frozen=True)
class NoTracking(Tracking):
    """No MLflow; the run folder alone holds the run."""

    def record(self) -> None:
        return None

    def mirror(self, folder: Path) -> NoMirror:
        return NoMirror()


def check_uri(uri: str) -> None:
    """Raise ValueError, with the form to use, for a tracking URI that cannot work. Touches no network."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme == "sqlite":
        if not uri.startswith("sqlite:////"):
            raise ValueError(
                f"tracking.uri={uri}: the path of the database must be absolute, or every working folder "
                f"gets its own: write sqlite:////absolute/path/mlflow.db, with four slashes"
            )
    elif scheme in ("http", "https"):
        if not parts.hostname:
            raise ValueError(f"tracking.uri={uri} names no host: write for example http://127.0.0.1:5000")
    elif scheme not in DATABASES:
        raise ValueError(
            f"tracking.uri={uri} is not supported (MLflow 3.13 gave up its file store): write "
            "sqlite:////absolute/path/mlflow.db or http://host:port, or choose tracking=none; an old "
            "file store is converted by `mlflow migrate-filestore`"
        )


def prepare_store(uri: str, experiment: str) -> str:
    """Make the store ready for any number of writers and return the experiment's id, made if missing.

    A new sqlite store gets its tables from one process while the others wait: unguarded, processes that
    open it at the same moment break each other's migration. Raises ValueError for a deleted experiment and
    MLflow's own errors where the store cannot be reached.
    """
    check_uri(uri)
    if not uri.startswith("sqlite:"):
        return _experiment_id(uri, experiment, None)
    database = _database(uri)
    database.parent.mkdir(parents=True, exist_ok=True)
    with _locked(database.with_name(f"{database.name}.lock"), STORE_LOCK_SECONDS):
        _allow_readers_while_writing(database)
        return _experiment_id(uri, experiment, str(database.with_name("mlflow_artifacts")))


def _database(uri: str) -> Path:
    return Path(re.sub(r"^sqlite(\+\w+)?:///", "", uri).split("?")[0])


@contextmanager
def _locked(path: Path, wait_seconds: float) -> Iterator[None]:
    descriptor = acquire_lock(path, wait_seconds)
    try:
        yield
    finally:
        os.close(descriptor)


def _allow_readers_while_writing(database: Path) -> None:
    """Set sqlite's write-ahead log, which stays set; it needs memory shared by all who open the file."""
    kind = _file_system(database.parent)
    if kind.startswith(NETWORK_FILE_SYSTEMS):
        logger.warning(
            "%s lies on %s, where sqlite is slow and unsafe with several machines: start `mlflow server` on "
            "one of them and set tracking.uri to its address",
            database,
            kind,
        )
        return
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def _file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`, or "" where the system does not tell."""
    if not mounts.exists():
        return ""
    found = {fields[1]: fields[2] for fields in map(str.split, mounts.read_text().splitlines())}
    resolved = path.resolve()
    return next((found[str(place)] for place in (resolved, *resolved.parents) if str(place) in found), "")


def _mlflow() -> ModuleType:
    """The mlflow package, imported here and nowhere else: it reads these settings while it is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    return mlflow


def _experiment_id(uri: str, experiment: str, artifact_location: str | None) -> str:
    client = _mlflow().MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        try:
            return client.create_experiment(experiment, artifact_location=artifact_location)
        except _mlflow().MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(experiment)  # another run was faster
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"experiment {experiment} was deleted in MLflow: restore it with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or set another tracking.experiment"
        )
    return found.experiment_id


@dataclass
class _Cursor:
    """mirror.json: which MLflow run this folder is, and how much of the folder that run has."""

    uri: str
    experiment: str
    run_key: str
    mlflow_run_id: str | None = None
    last_step: int = -1
    nonfinite: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)  # name -> hash of what was sent


class _Sender:
    """Sends one folder to its MLflow run, from where the last sending stopped. Every method may raise."""

    FILE: ClassVar[str] = "mirror.json"

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self.folder = folder
        path = folder / "run.json"
        if not path.exists():
            raise ValueError(f"{folder} is no run folder: it has no run.json")
        self.run = json.loads(path.read_text())
        tracking = self.run["tracking"] or {"uri": None, "experiment": "grpo_lab"}
        self.uri, self.experiment = uri or tracking["uri"], tracking["experiment"]
        if self.uri is None:
            raise ValueError(f"{folder} was run with tracking=none: say where to mirror it with a uri")
        check_uri(self.uri)
        self._client: Any = None
        self._reader = StepReader(folder)
        self._waiting: list[StepRecord] = []
        self._cursor = self._new_cursor(None)

    def push(self, live: bool, patience: float, give_up: Callable[[], bool]) -> int:
        """Send what is new and the run's status; returns the number of points that were sent.

        `live` is whether the run goes on. Waits at most `patience` seconds for another process that
        mirrors the same folder, then raises RunFolderBusyError. `give_up` is asked between batches.
        """
        with _locked(self.folder / ".mirror.lock", patience):
            self._load_cursor()
            if self._client is None:
                self._attach(live)
            fresh = self._reader.poll()
            if fresh and self._waiting and fresh[0].step <= self._waiting[-1].step:
                self._waiting.clear()  # the run was rewound: all of it was read again
            self._waiting += fresh
            sent = 0
            for steps in _batches(r for r in self._waiting if r.step > self._cursor.last_step):
                if give_up():
                    return sent
                sent += self._send(steps)
            self._waiting.clear()
            self._send_artifacts()
            self._set_status(live)
            return sent

    @property
    def run_id(self) -> str | None:
        return self._cursor.mlflow_run_id

    def _new_cursor(self, mlflow_run_id: str | None) -> _Cursor:
        return _Cursor(self.uri, self.experiment, self.run["run_key"], mlflow_run_id)

    def _load_cursor(self) -> None:
        path = self.folder / self.FILE
        if path.exists():
            stored = json.loads(path.read_text())
            fresh = asdict(self._new_cursor(None))
            if all(stored.get(name) == fresh[name] for name in ("uri", "experiment", "run_key")):
                self._cursor = _Cursor(**stored)

    def _save_cursor(self) -> None:
        write_json(self.folder / self.FILE, asdict(self._cursor))

    def _attach(self, live: bool) -> None:
        """Find this folder's run by its key, or create it; then params and tags."""
        experiment_id = prepare_store(self.uri, self.experiment)
        client = _mlflow().MlflowClient(tracking_uri=self.uri)
        found = self._find(client, experiment_id)
        if found is None:
            started = (self.folder / "run.json").stat().st_mtime_ns // 1_000_000
            found = client.create_run(
                experiment_id,
                start_time=started,
                run_name=self.run["name"],
                tags={"run_key": self.run["run_key"]},
            )
            self._cursor = self._new_cursor(found.info.run_id)
        elif found.info.run_id != self._cursor.mlflow_run_id:
            self._cursor = self._new_cursor(found.info.run_id)
        elif found.info.lifecycle_stage != "active":
            raise ValueError(
                f"run {found.info.run_id} was deleted in MLflow: restore it with `mlflow runs restore "
                f"--run-id {found.info.run_id}`, or delete {self.folder / self.FILE} to mirror it anew"
            )
        self._save_cursor()
        self._describe(client, found)
        if live and found.info.status != "RUNNING":
            client.update_run(found.info.run_id, status="RUNNING")
        self._client = client

    def _find(self, client: Any, experiment_id: str) -> Any:
        if self._cursor.mlflow_run_id is not None:
            try:
                return client.get_run(self._cursor.mlflow_run_id)
            except _mlflow().MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # else the store is a new one
                    raise
        key = self.run["run_key"]
        runs = client.search_runs([experiment_id], f"tags.run_key = '{key}'", max_results=1)
        return runs[0] if runs else None

    def _describe(self, client: Any, found: Any) -> None:
        entities = _mlflow().entities
        run = self.run
        tags = {
            "recipe": run["recipe"],
            "seed": run["seed"],
            **{f"axis.{axis}": option for axis, option in run["choices"].items()},
            "commit": run["commit"],
            "dirty": None if run["dirty"] is None else str(run["dirty"]).lower(),
            "folder": self.folder.resolve(),
            "mlflow.runName": run["name"],
            "mlflow.source.name": "grpo_lab",
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": run["commit"],
            "mlflow.parentRunId": run["parent_run_id"],
            "mlflow.note.content": f"Recipe {run['recipe']}, seed {run['seed']}. A mirror of the run folder "
            f"`{self.folder.resolve()}`, which holds what MLflow does not: tables, checkpoints, diff.",
            **run["tags"],
        }
        pairs = [entities.RunTag(name, str(value)[:TAG_LENGTH]) for name, value in tags.items() if value is not None]
        for chunk in _chunks(pairs, ENTRIES_PER_BATCH):
            client.log_batch(found.info.run_id, tags=chunk, synchronous=True)
        # A parameter cannot change in MLflow: what a resumed run says differently is in its config.yaml.
        values = {re.sub(r"[^/\w.\- :]", "_", key): str(value) for key, value in run["config"].items()}
        params = [
            entities.Param(key, value if len(value) <= PARAM_LENGTH else value[: PARAM_LENGTH - 3] + "...")
            for key, value in values.items()
            if key not in found.data.params
        ]
        for chunk in _chunks(params, ENTRIES_PER_BATCH):
            client.log_batch(found.info.run_id, params=chunk, synchronous=True)

    def _send(self, steps: list[StepRecord]) -> int:
        """Send whole steps, at most 1000 points a call, and remember the last of them."""
        entities = _mlflow().entities
        metrics = [
            entities.Metric(name, value, record.wall, record.step)
            for record in steps
            for name, value in _points(record).items()
            if math.isfinite(value)
        ]
        for chunk in _chunks(metrics, POINTS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=chunk, synchronous=True)
        self._note_nonfinite(steps)
        self._cursor.last_step = steps[-1].step
        self._save_cursor()
        return len(metrics)

    def _note_nonfinite(self, steps: list[StepRecord]) -> None:
        """MLflow stores infinity as 1.8e308, so such values stay out; a tag names the first of them."""
        lost = (
            f"step {record.step}: {name} = {value}"
            for record in steps
            for name, value in _points(record).items()
            if not math.isfinite(value)
        )
        if not self._cursor.nonfinite and (first := next(lost, "")):
            self._client.set_tag(self.run_id, "nonfinite", first, synchronous=True)
            self._cursor.nonfinite = first

    def _send_artifacts(self) -> None:
        """Copy small files that changed since they were sent; a store that refuses files is no error."""
        for name in ARTIFACTS:
            path = self.folder / name
            if not path.exists() or path.stat().st_size > ARTIFACT_BYTES:
                continue
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if self._cursor.artifacts.get(name) == digest:
                continue
            try:
                self._client.log_artifact(self.run_id, str(path))
            except Exception as error:
                logger.info("%s was not copied to MLflow: %s", path, _first_line(error))
                return
            self._cursor.artifacts[name] = digest
            self._save_cursor()

    def _set_status(self, live: bool) -> None:
        status, ended = _ending(self.folder, live)
        if status == "RUNNING":
            return
        info = self._client.get_run(self.run_id).info
        if (info.status, info.end_time) != (status, ended):
            self._client.set_terminated(self.run_id, status, ended)


def _chunks(items: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _points(record: StepRecord) -> dict[str, float | int]:
    """Everything logged at a step under its MLflow name; times that have no room of their own under time/."""
    timing = {
        name if name.startswith(("time/", "budget/")) else f"time/{name}": value
        for name, value in record.timing.items()
    }
    return {**record.metrics, **timing}


def _batches(records: Iterable[StepRecord]) -> Iterator[list[StepRecord]]:
    """Whole steps, together at most 1000 points unless a single step has more."""
    batch: list[StepRecord] = []
    points = 0
    for record in records:
        size = len(record.metrics) + len(record.timing)
        if batch and points + size > POINTS_PER_BATCH:
            yield batch
            batch, points = [], 0
        batch.append(record)
        points += size
    if batch:
        yield batch


def _ending(folder: Path, live: bool) -> tuple[str, int]:
    """MLflow's word for how the run stands, and the unix time in ms at which it ended (0: it has not)."""
    for name, status in (("DONE", "FINISHED"), ("error.txt", "FAILED")):
        if (folder / name).exists():
            return status, (folder / name).stat().st_mtime_ns // 1_000_000
    if live:
        return "RUNNING", 0
    last = next(path for path in (folder / "timing.jsonl", folder / "run.json") if path.exists())
    return "KILLED", last.stat().st_mtime_ns // 1_000_000


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


def _not_from_a_mirror(record: logging.LogRecord) -> bool:
    return record.threadName != THREAD_NAME


class NoMirror:
    """Stands where a Mirror would and does nothing."""

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""


class Mirror:
    """Feeds MLflow from a run folder in a background thread that neither blocks the run nor raises.

    The folder must hold run.json when `start` is called. Times in seconds.
    """

    def __init__(self, folder: Path, interval_seconds: float, flush_seconds: float) -> None:
        self.folder = Path(folder)
        self.interval_seconds = interval_seconds
        self.flush_seconds = flush_seconds
        self._stopping = threading.Event()
        self._abandoned = threading.Event()
        self._behind = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Begin to mirror; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is left, waiting at most flush_seconds; a second call does nothing.

        Call it after DONE or error.txt was written: that decides the status MLflow shows, and a run that
        stops with neither is KILLED there.
        """
        if self._thread.ident is None or self._stopping.is_set():
            return
        self._stopping.set()
        self._thread.join(self.flush_seconds)
        self._abandoned.set()
        if self._thread.is_alive() or self._behind:
            logger.warning("MLflow lacks a part of this run: send it with `grpo-lab sync %s`", self.folder)

    def _run(self) -> None:
        # urllib3 warns at every attempt to reach a dead server; this thread warns once.
        logging.getLogger("urllib3.connectionpool").addFilter(_not_from_a_mirror)
        sender: _Sender | None = None
        failures = 0
        delay = 0.0
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(delay)
            try:
                sender = sender or _Sender(self.folder)
                patience = self.flush_seconds if stopping else 0.0
                sender.push(not stopping, patience, self._abandoned.is_set)
                failures, delay, self._behind = 0, self.interval_seconds, False
            except RunFolderBusyError:  # a `grpo-lab sync` is doing this very work
                delay, self._behind = self.interval_seconds, True
            except Exception as error:
                # Whatever it is, the run goes on: its folder has everything.
                if failures == 0 and not stopping:
                    logger.warning(
                        "MLflow does not take this run (%s); the run goes on, and `grpo-lab sync %s` sends "
                        "what is missing",
                        _first_line(error),
                        self.folder,
                    )
                failures += 1
                delay = min(self.interval_seconds * 2**failures, LONGEST_BACKOFF_SECONDS)
                self._behind = True


@dataclass(frozen=True)
class SyncReport:
    """What a replay did: `points` were sent now, `status` is MLflow's; `error` says why it failed, if so."""

    folder: Path
    points: int
    run_id: str | None
    status: str
    error: str | None = None


def sync(folder: Path, uri: str | None = None) -> SyncReport:
    """Send to MLflow, in the foreground, whatever it lacks of one run folder; calling again sends nothing.

    `uri` overrides the one in run.json. A run that ended without a marker and that no process holds is
    marked KILLED. Raises ValueError for a folder or URI that cannot be mirrored, RunFolderBusyError where
    the run's own mirror is at work for a minute, RuntimeError where MLflow does not answer or refuses.
    """
    folder = Path(folder)
    sender = _Sender(folder, uri)
    live = is_held(folder)
    try:
        points = sender.push(live, LONGEST_BACKOFF_SECONDS, lambda: False)
    except (ValueError, RunFolderBusyError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"MLflow at {sender.uri} did not take {folder} ({_first_line(error)}): start the server, or mend "
            "the store, and sync again; the folder is complete"
        ) from error
    return SyncReport(folder, points, sender.run_id, _ending(folder, live)[0])


def sync_all(root: Path, uri: str | None = None) -> list[SyncReport]:
    """`sync` every run folder under `root`; a folder that fails is reported in its `error`, not raised.

    Runs with tracking=none are left out unless `uri` is given.
    """
    reports = []
    for folder in sorted(path.parent for path in Path(root).rglob("run.json")):
        try:
            if uri is None and json.loads((folder / "run.json").read_text())["tracking"] is None:
                continue
            reports.append(sync(folder, uri))
        except (OSError, ValueError, RuntimeError) as error:
            reports.append(SyncReport(folder, 0, None, "UNKNOWN", str(error)))
    return reports
