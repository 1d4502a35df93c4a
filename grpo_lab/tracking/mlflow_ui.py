"""MLflow's pages over the runs of a folder, on this machine, and the addresses at which they show each sweep."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from grpo_lab.tracking.mlflow_parent import Analyse, exported_to, sync_sweep
from grpo_lab.tracking.mlflow_store import ENVIRONMENT, first_line
from grpo_lab.tracking.mlflow_view import runs_path, view_path
from grpo_lab.tracking.sweep_record import FILE, read_sweep

HOST = "127.0.0.1"
_SQLITE = "sqlite:///"
# One process serves one user, without the processes of MLflow's own jobs, which look after traces of agents.
_OPTIONS = ("--host", HOST, "--workers", "1", "--uvicorn-opts", "--log-level warning")
_QUIET = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "PYTHONWARNINGS": "ignore"}


def open_ui(runs: Path, port: int, analyse: Analyse, say: Callable[[str], None]) -> None:
    """Print where MLflow shows each sweep of the folder `runs`, and become MLflow's server over its store, if any.

    A sweep that an earlier version sent has no page of its own yet, and is sent again first. Raises ValueError where
    nothing of the folder is in MLflow, or the port is taken.
    """
    database = runs.resolve() / "mlflow.db"
    here, local = f"http://{HOST}:{port}", f"{_SQLITE}{database}"
    pages = list(_pages(runs.resolve(), database, here, analyse, say))
    if not database.exists():
        if not pages:
            raise ValueError(
                f"no sweep in {runs} is in MLflow: run make demo first, name another folder with --runs, or upload "
                f"runs of tracking=none with `{shlex.join(['grpo-lab', 'sync', str(runs), f'tracking.uri={local}'])}`"
            )
        say("\n".join(["MLflow is on a server:", *pages]))
        return
    _require_free(port)
    experiments = list(dict.fromkeys(re.findall(rf"{here}/#/experiments/(\d+)", "\n".join(pages)))) or ["1"]
    pages += [f"  all runs\n    {here}{runs_path(experiment)}" for experiment in experiments]
    say("\n".join([f"starting MLflow at {here} (takes a few seconds; Ctrl-C stops it)", *pages]))
    command = ["mlflow", "ui", *_OPTIONS, "--port", str(port), "--backend-store-uri", local]
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, "-m", *command], {**ENVIRONMENT, **_QUIET, **os.environ})


def _pages(runs: Path, database: Path, here: str, analyse: Analyse, say: Callable[[str], None]) -> Iterator[str]:
    """A line for each sweep that was sent, with the address of its page; the newest first."""
    folders = [path.parent for path in runs.glob(f"sweeps/*/{FILE}")]
    for folder in sorted(folders, key=lambda folder: (folder / FILE).stat().st_mtime, reverse=True):
        record, place = read_sweep(folder), exported_to(folder)
        if place is None:
            continue
        if not place.has_view:
            experiment = (record.tracking or {}).get("experiment", "grpo_lab")
            try:
                sync_sweep(folder, place.uri, experiment, None, analyse)
            except Exception as error:
                say(f"{record.name} has no page in MLflow yet, and cannot be sent ({first_line(error)})")
                continue
        base = here if _is_file(place.uri, database) else place.uri.rstrip("/")
        if base.startswith("http"):
            yield f"  {record.name}\n    {base}{view_path(place.experiment_id, record.key)}"
        else:
            again = shlex.join(["grpo-lab", "sync", str(runs), f"tracking.uri={_SQLITE}{database}"])
            say(f"{record.name} was sent to {place.uri}: `{again}` sends it here too")


def _is_file(uri: str, database: Path) -> bool:
    """True if the URI is that of this SQLite file, whatever links lead there."""
    return uri.startswith(_SQLITE) and Path(uri.removeprefix(_SQLITE)).resolve() == database


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ValueError(
                f"port {port} is in use ({error.strerror}), perhaps by another MLflow that shows these runs; "
                f"stop that one, or choose another port with --port {port + 1} (make ui PORT={port + 1})"
            ) from error
