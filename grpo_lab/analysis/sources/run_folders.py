"""A sweep from its run folders, which are the record of what was run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.sources.cache import NOTHING, Cache
from grpo_lab.analysis.sources.settings import settings_of
from grpo_lab.analysis.sources.sweep_data import NO_BASE, RunData, SweepData, assemble
from grpo_lab.tracking.checksums import read_json
from grpo_lab.tracking.harness_results import protocols
from grpo_lab.tracking.metrics import harness_of
from grpo_lab.tracking.renames import with_done_fields
from grpo_lab.tracking.run_reader import run_status, was_interrupted, was_stopped
from grpo_lab.tracking.sweep_record import FILE, RunEntry, read_sweep, sweep_folder

# What decides how often is asked, not what; and budgets that evaluations have under names of their own.
_HOW_OFTEN = ("evaluation.every", "evaluation.initial_kl", "task.response_tokens", "task.downstream_response_tokens")
_ACCURACY = re.compile("eval/.*/accuracy")


def load_sweep(runs_dir: Path, name: str, cache: bool = True) -> SweepData:
    """Read a sweep from its run folders. Raises ValueError where runs_dir holds no such sweep.

    The parsed tables are saved beside the sweep's record; a run is parsed again only where its files changed.
    `cache=False` neither reads nor writes them.
    """
    folder = sweep_folder(runs_dir, name)
    record = read_sweep(folder)
    if not record.runs:
        raise ValueError(f"{name} has no runs yet: its arms are being tuned; `grpo-lab status {name}` shows how far")
    found = read_runs(Path(runs_dir), record.runs, folder / "cache" if cache else None)
    try:
        return assemble(record, found, "run folders")
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from error


def read_runs(runs_dir: Path, entries: Sequence[RunEntry], cache: Path | None) -> list[RunData]:
    """Every run, from its run folder, or from the folder `cache` where nothing changed; None caches nothing."""
    cached = Cache(cache)
    found = [_read_run(runs_dir, entry, cached) for entry in entries]
    cached.save()
    return found


def _read_run(runs_dir: Path, entry: RunEntry, cached: Cache) -> RunData:
    folder = runs_dir / entry.folder
    labels = {"level": entry.level, "arm": entry.arm, "seed": entry.seed}
    row = labels | {"folder": entry.folder, "status": run_status(folder), "problem": "", "collapsed": False}
    row |= {"run_key": None, "mlflow_run_id": None, "commit": None, "dirty": None, "no_ops": [], "protocol": None}
    row |= {"changed_code": "", "lost": "", "base": NO_BASE, "same_as": entry.same_as, "harness": ""}
    points, answers, settings = NOTHING.points, NOTHING.answers, {}
    try:
        if row["status"] != "new":
            run = _read_json(folder / "run.json")
            row |= {name: run[name] for name in ("run_key", "commit", "dirty")}
            row["base"] = run.get("tags", {}).get("base", NO_BASE)
            row["protocol"] = protocol_of(run.get("config", {}), run.get("data"))
            settings = settings_of(run)
            row["changed_code"] = changes_of_code(run)
            tables = cached.tables(entry.folder, folder)
            points, answers = tables.points, tables.answers
            row["lost"] = lost_evaluations(folder, points)
            row["harness"] = protocols(folder)
        if row["status"] == "done":
            done = with_done_fields(_read_json(folder / "DONE"))
            row["no_ops"] = list(done["no_ops"])
            _require_whole(folder / "metrics.jsonl", points, done)
        if row["status"] == "failed":
            row["problem"] = (folder / "error.txt").read_text(errors="replace").partition("\n")[0]
            row["collapsed"] = row["problem"].startswith("FloatingPointError")
            if was_interrupted(folder):
                row |= {"status": "partial", "problem": "stopped" if was_stopped(folder) else "interrupted"}
        if (folder / "mirror.json").exists():
            row["mlflow_run_id"] = _read_json(folder / "mirror.json").get("mlflow_run_id")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        text = str(error)
        if isinstance(error, OSError) and error.filename:
            text = f"{error.filename} ({error.strerror}): restore it from a copy"
        elif str(folder) not in text:
            text = f"a file of {folder} was edited ({text}): restore it from a copy"
        row |= {"status": "unreadable", "problem": f"{type(error).__name__}: {text}", "collapsed": False}
        return RunData(row, NOTHING.points, NOTHING.answers)
    return RunData(row, points, answers, settings)


def _require_whole(path: Path, points: pd.DataFrame, done: Mapping[str, Any]) -> None:
    """Raise ValueError where the metrics of a finished run do not end as DONE says: lines were lost, or exchanged."""
    last = int(points["step"].max()) if len(points) else None
    remedy = "restore it from a copy, or start the run again in another folder"
    if last is None or last != done.get("steps", last):
        ends = "has no step" if last is None else f"ends at step {last}"
        raise ValueError(f"{path} {ends}, and the run has finished after {done.get('steps', 'some')}; {remedy}")
    logged = _last_values(points)
    for name, value in done.get("last", {}).items():
        if name not in logged or (logged[name] != value and value is not None):
            raise ValueError(f"{path} does not end with the {name} of {value} that DONE says; {remedy}")


def _last_values(points: pd.DataFrame) -> dict[str, float]:
    """Column -> its last value that is not NaN; a column of nothing else is left out. One pass over the table."""
    values = points.to_numpy(dtype=float)
    there = ~np.isnan(values)
    rows = len(values) - 1 - there[::-1].argmax(axis=0)
    last = values[rows, np.arange(values.shape[1])].tolist()
    return {name: value for name, value in zip(points.columns.to_numpy(), last) if not math.isnan(value)}


def changes_of_code(described: Mapping[str, Any]) -> str:
    """The steps after which a run was resumed with changed code, from its run.json."""
    return ", ".join(str(segment["from_step"]) for segment in described.get("stretches", ())[1:])


def lost_evaluations(folder: Path, points: pd.DataFrame) -> str:
    """The steps at which a run logged accuracies and whose table of answers is not there; "" where none was saved.

    What harnesses measured is no part of the run's log.
    """
    tables = {path.name for path in (folder / "eval").glob("*.parquet")}
    if not tables and not (folder / "eval").is_dir() and not _has_checksums(folder):
        return ""
    own = [
        at
        for at, name in enumerate(points.columns.to_numpy())
        if _ACCURACY.fullmatch(name) and harness_of(name) is None
    ]
    logged = ~np.isnan(points.to_numpy(dtype=float)[:, own]).all(axis=1)
    evaluated = points["step"].to_numpy()[logged].tolist() if own else []
    return ", ".join(str(step) for step in evaluated if f"step={step:06d}.parquet" not in tables)


def _has_checksums(folder: Path) -> bool:
    """True if DONE of the run in `folder` holds digests of its tables."""
    return (folder / "DONE").exists() and "files" in _read_json(folder / "DONE")


def protocol_of(config: Mapping[str, Any], data: Mapping[str, str] | None = None) -> str | None:
    """Twelve hexadecimal digits of what a run is asked and how its evaluations are graded; None for an empty config.

    `data` are the fingerprints of the splits, for a task whose questions lie in files. Two runs that differ here were
    not evaluated alike, and are not to be compared.
    """
    if not config:
        return None
    # The last three are options that end responses in their own way, or write a wanted length into the questions.
    prefixes = ("task.", "template.", "evaluation.", "verifier.", "truncation.", "reward_shaping.shortest")
    prefixes += ("reward_shaping.longest",)
    protocol = {key: value for key, value in config.items() if key.startswith(prefixes) and key not in _HOW_OFTEN}
    if data:
        protocol = {**protocol, "data": data}
    return hashlib.sha256(json.dumps(protocol, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, "restore it from a copy")


def recorded_names(runs_dir: Path) -> list[str]:
    """The sweeps recorded in a folder of runs."""
    return sorted(path.parent.name for path in (Path(runs_dir) / "sweeps").glob(f"*/{FILE}"))
