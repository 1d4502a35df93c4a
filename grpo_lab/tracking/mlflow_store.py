"""The MLflow store: which URIs can work, and how to prepare a store for any number of writers.

mlflow takes over a second to import, so it is imported only where it is used, by `load_mlflow`.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sqlite3
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from urllib.parse import urlsplit

from grpo_lab.tracking.files import locked, write_atomically
from grpo_lab.tracking.passwords import masked

STORE_LOCK_SECONDS = 120.0  # enough for eight processes that open a new store one after another on a slow disk
DATABASES = ("postgresql", "mysql", "mssql")
# The others may be shared by machines. "" is of a system that does not tell, such as macOS.
LOCAL_FILE_SYSTEMS = ("", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs", "overlay")
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # By default a dead server holds each call for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
}

_KIND = {"mlflow.experimentKind": "custom_model_development"}  # else MLflow's pages open on traces of agents

logger = logging.getLogger("grpo_lab.tracking")


def check_uri(uri: str) -> None:
    """Raise ValueError, with the form to use, for a tracking URI that cannot work. Uses no network."""
    parts = urlsplit(uri)
    scheme = parts.scheme.split("+")[0]
    if scheme == "sqlite":
        if not uri.startswith("sqlite:////"):
            raise ValueError(
                f"tracking.uri={uri}: the path of the database must be absolute, or every working folder "
                f"gets its own: write sqlite:////absolute/path/mlflow.db, with four slashes"
            )
        if re.search(r"\?.*/|%[0-9A-Fa-f]{2}", uri):
            raise ValueError(
                f"tracking.uri={uri}: MLflow would read ? and % with two digits in the path as something else, and put "
                "its store into another folder: choose another runs_dir, or tracking=none, or a tracking.uri without"
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


def check_driver(uri: str) -> None:
    """Raise ValueError where a PostgreSQL database is named and the package that reaches one is missing."""
    if urlsplit(uri).scheme.split("+")[0] != "postgresql":
        return
    from sqlalchemy.engine import make_url  # of MLflow; what reaches a plain postgresql:// depends on its version

    driver = make_url(uri).get_driver_name()
    if find_spec(driver) is None:
        raise ValueError(
            f"tracking.uri names a PostgreSQL database, which {driver} would reach, and it is not installed: "
            "pip install 'grpo-lab[postgres]' and write postgresql+psycopg2://user@host/database, or start `mlflow "
            "server` on the database and set tracking.uri to http://host:port"
        )


def prepare_store(uri: str, experiment: str) -> str:
    """Prepare the store for any number of writers and return the experiment's id, created if missing.

    Call it before creating any MlflowClient of a sqlite store. A client creates the tables of an empty database, and
    processes that do so at the same moment break each other's migration. Here one process creates the tables in
    another file, which is then moved into place, while the others wait. Raises ValueError for a deleted experiment or
    a half-made database, and MLflow's own errors if the store cannot be reached.
    """
    check_uri(uri)
    load_mlflow()  # takes seconds, so before taking the lock
    if not uri.startswith("sqlite:"):
        return _experiment_id(uri, experiment, None)
    database = _database(uri)
    artifacts = str(database.with_name("mlflow_artifacts"))
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(database.with_name(f"{database.name}.lock"), STORE_LOCK_SECONDS):
        if not database.exists():
            for leftover in database.parent.glob(f".{database.name}.*.tmp*"):  # from a killed process
                leftover.unlink()
            write_atomically(database, lambda path: _make_tables(path, artifacts))
        _refuse_half_made(database)
        _allow_readers_while_writing(database)
        return _experiment_id(uri, experiment, artifacts)


def _database(uri: str) -> Path:
    return Path(re.sub(r"^sqlite(\+\w+)?:///", "", uri).split("?")[0])


def _make_tables(database: Path, artifacts: str) -> None:
    """Let MLflow create a store in the file `database`, and close it."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    SqlAlchemyStore(f"sqlite:///{database}", artifacts).engine.dispose()


def _refuse_half_made(database: Path) -> None:
    """Raise ValueError if a migration was killed, or broken by two processes at once."""
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        left = connection.execute("SELECT name FROM sqlite_master WHERE name GLOB '_alembic_tmp_*'").fetchone()
    if left is not None:
        raise ValueError(
            f"{database} is half made ({left[0]} is left of a migration that did not end): move it away, and "
            f"`grpo-lab sync {shlex.quote(str(database.parent))}` fills a new one from the run folders"
        )


def _allow_readers_while_writing(database: Path) -> None:
    """Set sqlite's write-ahead log, a lasting setting; all processes that open the file must share memory."""
    kind = file_system(database.parent)
    if kind not in LOCAL_FILE_SYSTEMS:
        logger.warning(
            "%s lies on %s, where sqlite may be slow, and unsafe with several machines: start `mlflow server` on "
            "one of them and set tracking.uri to its address",
            database,
            kind,
        )
        return
    with closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def file_system(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that holds `path`, or "" if the system does not tell."""
    if not mounts.exists():
        return ""
    found = {fields[1]: fields[2] for fields in map(str.split, mounts.read_text().splitlines())}
    resolved = path.resolve()
    return next((found[str(place)] for place in (resolved, *resolved.parents) if str(place) in found), "")


def load_mlflow() -> ModuleType:
    """The mlflow package. Import it only here: it reads the environment variables set here at import."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow

    return mlflow


def _experiment_id(uri: str, experiment: str, artifact_location: str | None) -> str:
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    if found is None:
        try:
            return client.create_experiment(experiment, artifact_location=artifact_location, tags=_KIND)
        except load_mlflow().MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(experiment)  # another run created it first
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"experiment {experiment} was deleted in MLflow: restore it with `mlflow experiments restore "
            f"--experiment-id {found.experiment_id}`, or set another tracking.experiment"
        )
    return found.experiment_id


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message; MLflow's messages have many lines."""
    return masked(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")[:250]
