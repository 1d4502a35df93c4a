"""The MLflow run of a sweep, parent of the runs of its cells. Like them it mirrors a folder."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path
from typing import Any

from grpo_lab.tracking.files import locked, write_json
from grpo_lab.tracking.mlflow_store import first_line, load_mlflow, prepare_store
from grpo_lab.tracking.passwords import masked, without_mask
from grpo_lab.tracking.sweep_record import FILE, SweepRecord, read_sweep, sweep_status
from grpo_lab.tracking.whole import read_json

_PATIENCE_SECONDS = 60.0  # wait for another process that creates the same parent
_CURSOR = "mirror.json"
_TAG_LENGTH = 5000  # characters

logger = logging.getLogger("grpo_lab.tracking")


def announce_sweep(folder: Path, running: bool, uri: str | None = None) -> None:
    """Send the sweep's current state to MLflow; a store that does not answer is a warning, never an error.

    `uri` is where, with its password; without it what the sweep's record says.
    """
    record = read_sweep(folder)
    if record.tracking is None:
        return
    try:
        sync_sweep(folder, uri or record.tracking["uri"], record.tracking["experiment"], "RUNNING" if running else None)
    except Exception as error:
        # No error here may stop the cells: their folders have everything.
        logger.warning(
            "MLflow does not take the sweep (%s); it goes on, and `grpo-lab sync %s` sends what is missing",
            first_line(error),
            shlex.quote(str(folder.parent.parent)),
        )


def sync_sweep(folder: Path, uri: str, experiment: str, status: str | None = None) -> str:
    """Create or update the MLflow run of the sweep in `folder` and return its id.

    `status` None: the status follows from the runs' folders.
    """
    uri = without_mask(uri)
    experiment_id = prepare_store(uri, experiment)  # before the first client: `prepare_store` says why
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    record = read_sweep(folder)
    run_id = parent_of(folder, client, uri, experiment_id)
    for name, value in _tags(folder, record).items():
        client.set_tag(run_id, name, value[:_TAG_LENGTH])
    try:
        client.log_artifact(run_id, str(folder / FILE))
    except Exception as error:
        logger.info("%s was not copied to MLflow: %s", folder / FILE, first_line(error))
    status = status or sweep_status(folder, record)
    if status == "RUNNING":
        client.update_run(run_id, status=status)
    else:
        client.set_terminated(run_id, status)
    return run_id


def parent_of(folder: Path, client: Any, uri: str, experiment_id: str) -> str:
    """The id of the sweep's MLflow run, created if missing; concurrent processes get the same id."""
    record = read_sweep(folder)
    with locked(folder / ".mirror.lock", _PATIENCE_SECONDS):
        cursor = {"uri": masked(uri), "experiment_id": experiment_id, "key": record.key}
        path = folder / _CURSOR
        stored = read_json(path, "remove it, and sync again") if path.exists() else {}
        if cursor.items() <= stored.items() and _is_there(client, stored["mlflow_run_id"]):
            return stored["mlflow_run_id"]
        found = client.search_runs([experiment_id], f"tags.run_key = '{record.key}'", max_results=1)
        run = found[0] if found else client.create_run(
            experiment_id, run_name=record.name, tags={"run_key": record.key, "kind": "sweep"}
        )  # fmt: skip
        write_json(path, {**cursor, "mlflow_run_id": run.info.run_id})
        return run.info.run_id


def _is_there(client: Any, run_id: str) -> bool:
    try:
        return client.get_run(run_id).info.lifecycle_stage == "active"
    except load_mlflow().MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # which means that the store is a new one
            raise
        return False


def _tags(folder: Path, record: SweepRecord) -> dict[str, str]:
    design = dict(record.design or {})
    if "tricks" in design:  # the control follows from the kind, unless it has a name of its own
        design.setdefault("control", "full" if design["kind"] == "leave_one_out" else "base")
    said = [f"**{name.capitalize()}.** {' '.join(str(design[name]).split())}" for name in _TOLD if name in design]
    arms = list(dict.fromkeys(cell.arm for cell in record.cells))
    said += [f"**Arms.** {', '.join(f'`{arm}`' for arm in arms)}; {len(record.cells)} cells."]
    said += [f"**Command.** `{shlex.join(record.command)}`", f"Recorded in `{folder.resolve()}`."]
    tags = {name: " ".join(str(design[name]).split()) for name in ("question", "control", "primary") if name in design}
    return (
        tags
        | {
            "sweep": record.name,
            "folder": str(folder.resolve()),
            "declared": json.dumps(record.declared[-1]),
            "mlflow.runName": record.name,
            "mlflow.source.name": "grpo_lab",
            "mlflow.source.type": "LOCAL",
            "mlflow.note.content": "\n\n".join(said),
        }
        | ({"commit": record.commit, "mlflow.source.git.commit": record.commit} if record.commit else {})
    )


_TOLD = ("question", "prediction", "primary", "control")
