"""A sweep from the MLflow store it was exported to; the same numbers as from its run folders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.answers import COLUMNS, read_answers
from grpo_lab.analysis.sources.mlflow_stores import MlflowRun, Store, open_store, shown
from grpo_lab.analysis.sources.run_folders import changes_of_code, lost_evaluations, protocol_of
from grpo_lab.analysis.sources.settings import settings_of
from grpo_lab.analysis.sources.sweep_data import NO_BASE, RunData, SweepData, assemble
from grpo_lab.tracking.mlflow_sender import HARNESS_TAG
from grpo_lab.tracking.mlflow_view import sweep_tag
from grpo_lab.tracking.renames import DECLARED_FIELDS, with_done_fields, with_fields
from grpo_lab.tracking.run_reader import STOPPED
from grpo_lab.tracking.sweep_record import FILE, RunEntry, SweepRecord

_STATUS = {"FINISHED": "done", "FAILED": "failed", "KILLED": "partial"}
_UNTOLD = "MLflow does not say why: the run's error.txt is not among its files"
_UNDECLARED = {"fingerprint": "unknown", "at": "unknown", "runs_started_before": 0}


def load_mlflow(uri: str, name: str) -> SweepData:
    """The sweep `name` from the MLflow store it was exported to; the same numbers as from its run folders.

    `uri` is http://host:port or sqlite:////path/mlflow.db; a sqlite file is read without the MLflow package, also while
    runs write to it. MLflow holds no answers to single questions: they are read from the folder that a run was
    written to, if this machine has it, else left out. MLflow holds no value that is not finite either. Of a run or
    sweep that is there twice the newest counts, and `source` says so. Raises ValueError for a store that cannot be
    read, and for one without this sweep, listing those it has.
    """
    with open_store(uri) as store:
        parents, runs = _find(store, uri, name)
        record = _record(store, name, parents, runs)
        chosen, notes = _chosen(record, runs)
        there = [run for run in chosen if run is not None]
        read = _Read(
            points=dict(zip([run.run_id for run in there], store.points(there))),
            described=_files(store, there, "run.json"),
            errors=_files(store, [run for run in there if run.status in ("FAILED", "KILLED")], "error.txt"),
        )
    found = [_run_data(entry, run, read) for entry, run in zip(record.runs, chosen)]
    if len({parent.tags.get("run_key") for parent in parents}) > 1:
        notes.append("the newest of several sweeps of this name")
    if record.design is None:
        notes.append("without what was declared")
    if answered := sum(len(run.answers) > 0 for run in found):
        notes.append(f"answers from {answered} run folders")
    return assemble(record, found, ", ".join([shown(uri), *notes]))


@dataclass(frozen=True)
class _Read:
    """Files read of the runs, by MLflow's id: points, run.json, and error.txt of those that did not finish."""

    points: Mapping[str, pd.DataFrame]
    described: Mapping[str, bytes | None]
    errors: Mapping[str, bytes | None]


def _files(store: Store, runs: Sequence[MlflowRun], name: str) -> dict[str, bytes | None]:
    return dict(zip([run.run_id for run in runs], store.artifacts(runs, name)))


def _find(store: Store, uri: str, name: str) -> tuple[list[MlflowRun], list[MlflowRun]]:
    """The MLflow runs of every sweep of this name, the newest first, and the runs of the newest one's arms."""
    everything = store.tagged("kind", "sweep")
    parents = [parent for parent in everything if parent.tags.get("sweep", parent.tags.get("mlflow.runName")) == name]
    parents.sort(key=lambda parent: parent.age, reverse=True)
    # Exported from two machines at once, a sweep can have two runs of its one key, each with some of its runs.
    same = [parent for parent in parents if parent.tags.get("run_key") == parents[0].tags.get("run_key")]
    below = [run for parent in same for run in store.tagged("mlflow.parentRunId", parent.run_id)]
    # A run that another sweep made has that one as its parent, and this one in a tag.
    reused = store.tagged(sweep_tag(name, parents[0].tags["run_key"])) if parents else []
    runs = list({run.run_id: run for run in (*below, *reused)}.values())
    if not parents:
        # Runs that were exported where the sweep's own folder was not.
        runs = store.tagged("sweep", name)
    if not parents and not runs:
        known = {run.tags["sweep"] for run in store.tagged("sweep")} | {
            parent.tags.get("mlflow.runName", "") for parent in everything
        }
        there = f"there are: {', '.join(sorted(known - {''}))}" if known - {""} else "no sweep was exported there yet"
        raise ValueError(f"no sweep {name!r} in {shown(uri)}; {there}")
    return parents, sorted(runs, key=lambda run: run.age)


def _record(store: Store, name: str, parents: Sequence[MlflowRun], runs: Sequence[MlflowRun]) -> SweepRecord:
    """The sweep's record: a file of its MLflow run, or of its folder on this machine, or what its runs' tags tell."""
    parent = parents[0] if parents else None
    if parent is not None:
        (sent,) = store.artifacts([parent], FILE)
        here = _content(Path(parent.tags["folder"]), FILE) if "folder" in parent.tags else None
        for raw in (_json(sent), _json(here)):
            if raw.get("key") == parent.tags["run_key"]:
                return SweepRecord.of(raw)
    tags = parent.tags if parent else {}
    entries = {
        _labels(run): RunEntry(*_labels(run), folder=run.tags.get("folder", run.run_id))
        for run in sorted(runs, key=lambda run: (run.tags.get("arm") != tags.get("control"), run.age))
    }
    return SweepRecord(
        name=name,
        key=tags.get("run_key", ""),
        design=None,
        declared=[with_fields(json.loads(tags["declared"]), DECLARED_FIELDS) if "declared" in tags else _UNDECLARED],
        command=[],
        commit=tags.get("commit"),
        tracking=None,
        runs=list(entries.values()),
    )


def _labels(run: MlflowRun) -> tuple[str, str, int]:
    """Arm, level and seed, as a RunEntry begins with; a label that was empty has no tag."""
    return run.tags.get("arm", ""), run.tags.get("level", ""), int(run.tags.get("seed", -1))


def _chosen(record: SweepRecord, runs: Sequence[MlflowRun]) -> tuple[list[MlflowRun | None], list[str]]:
    """For each planned run the newest of its MLflow runs, which are sorted from old to new, and notes on that."""
    chosen: list[MlflowRun | None] = []
    by_folder = [[run for run in runs if _is_in(run, entry.folder)] for entry in record.runs]
    belong, twice = {run.run_id for own in by_folder for run in own}, 0
    for entry, own in zip(record.runs, by_folder):
        # A run whose folder has another name by now is known by its labels.
        own = own or [
            run for run in runs if run.run_id not in belong and _labels(run) == (entry.arm, entry.level, entry.seed)
        ]
        chosen.append(own[-1] if own else None)
        belong |= {run.run_id for run in own}
        twice += len(own) > 1
    notes = [f"runs that are in MLflow more than once: {twice} (the newest counts)"] if twice else []
    if others := len(runs) - len(belong):
        notes.append(f"runs that today's declaration does not name: {others}")
    return chosen, notes


def _is_in(run: MlflowRun, folder: str) -> bool:
    here = run.tags.get("folder", "")
    return here == folder or here.endswith(f"/{folder}")


def _run_data(entry: RunEntry, run: MlflowRun | None, read: _Read) -> RunData:
    row: dict[str, Any] = {"level": entry.level, "arm": entry.arm, "seed": entry.seed, "folder": entry.folder}
    row |= {"status": "new", "problem": "", "collapsed": False, "run_key": None, "mlflow_run_id": None}
    row |= {"commit": None, "dirty": None, "no_ops": [], "protocol": None, "changed_code": "", "lost": ""}
    row |= {"base": NO_BASE, "same_as": entry.same_as, "harness": ""}
    empty = pd.DataFrame(columns=COLUMNS)
    if run is None:
        return RunData(row, pd.DataFrame(), empty)
    tags = with_done_fields(run.tags)
    row |= {"status": _STATUS.get(run.status, "partial"), "run_key": tags.get("run_key"), "mlflow_run_id": run.run_id}
    row["base"] = int(tags.get("base", NO_BASE))
    row["harness"] = tags.get(HARNESS_TAG, "")
    row |= {"commit": tags.get("commit"), "dirty": {"true": True, "false": False}.get(tags.get("dirty", ""))}
    folder = _folder_here(run)
    described = _json(read.described[run.run_id]) or _json(_content(folder, "run.json"))
    row["protocol"] = protocol_of(described.get("config", {}), described.get("data"))
    row["changed_code"] = changes_of_code(described)
    if row["status"] == "done":
        row["no_ops"] = [] if tags.get("no_ops", "nothing") == "nothing" else tags["no_ops"].split(", ")
    elif run.status in ("FAILED", "KILLED"):
        error = read.errors[run.run_id] or _content(folder, "error.txt") or b""
        row |= _ending(run.status, error.decode(errors="replace").partition("\n")[0])
    try:
        answers = empty if folder is None else read_answers(folder)
        row["lost"] = "" if folder is None else lost_evaluations(folder, read.points[run.run_id])
    except ValueError as error:
        row |= {"status": "unreadable", "problem": f"{type(error).__name__}: {error}", "collapsed": False}
        return RunData(row, pd.DataFrame(), empty)
    return RunData(row, read.points[run.run_id], answers, settings_of(described))


def _ending(status: str, problem: str) -> dict[str, Any]:
    """Problem and collapse of a run that did not finish, from the first line of its error.txt ("" if unknown)."""
    if status == "KILLED":
        kind, _, message = problem.partition(": ")
        word = "stopped" if message.startswith(STOPPED) else "interrupted"
        return {"problem": word if kind.startswith("KeyboardInterrupt") else ""}
    return {"problem": problem or _UNTOLD, "collapsed": problem.startswith("FloatingPointError")}


def _folder_here(run: MlflowRun) -> Path | None:
    """The folder of the very run an MLflow run copies, where this machine has it."""
    folder = Path(run.tags["folder"]) if "folder" in run.tags else None
    same = _json(_content(folder, "run.json")).get("run_key", "") == run.tags.get("run_key")
    return folder if same else None


def _content(folder: Path | None, name: str) -> bytes | None:
    path = None if folder is None else folder / name
    return path.read_bytes() if path is not None and path.is_file() else None


def _json(content: bytes | None) -> dict[str, Any]:
    """A file's object; an empty one where the file is not there, or is being written at this moment."""
    try:
        return json.loads(content or b"{}")
    except ValueError:
        return {}
