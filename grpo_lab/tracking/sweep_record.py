"""A sweep's own folder, `<runs_dir>/sweeps/<name>/`: the declaration, its time, and the runs that belong to it.

Analysis finds the runs through sweep.json only; the runs' folders hold everything else.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.renamed import renamed_fields
from grpo_lab.tracking.checksums import read_json
from grpo_lab.tracking.files import explained, locked, write_json
from grpo_lab.tracking.passwords import masked
from grpo_lab.tracking.renames import DECLARED_FIELDS, SWEEP_FIELDS, with_fields
from grpo_lab.tracking.run_reader import Status, has_ended, is_held, run_status, was_interrupted

FILE = "sweep.json"


@dataclass(frozen=True)
class RunEntry:
    """One run of a sweep; `folder` is relative to runs_dir.

    `same_as` is the title of the label under which the run was made, where two labels are the same run by construction.
    """

    arm: str
    level: str
    seed: int
    folder: str
    same_as: str = ""


@renamed_fields(cells="runs")
@dataclass(frozen=True)
class SweepRecord:
    """The content of sweep.json. `declared` lists every declaration so far, the valid one last.

    `pilot` holds what pilots measured of `design.requires`, one entry for each level, arm and metric. `tuning` holds
    the trials of every level and arm, and which of them was chosen. `matching` holds the learning rate of every arm
    with a matched update norm, and the norms.
    """

    name: str
    key: str
    design: Mapping[str, Any] | None
    declared: Sequence[Mapping[str, Any]]
    command: Sequence[str]
    commit: str | None
    tracking: Mapping[str, str] | None
    runs: Sequence[RunEntry]
    pilot: Sequence[Mapping[str, Any]] = ()
    tuning: Sequence[Mapping[str, Any]] = ()
    matching: Sequence[Mapping[str, Any]] = ()

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> SweepRecord:
        """The record from the content of sweep.json, of any version. Raises KeyError or TypeError if it is none."""
        fields = with_fields(raw, SWEEP_FIELDS)
        runs = [RunEntry(**entry) for entry in fields.pop("runs")]
        declared = [with_fields(one, DECLARED_FIELDS) for one in fields.pop("declared")]
        return cls(**fields, runs=runs, declared=declared)


def sweep_folder(runs_dir: Path, name: str) -> Path:
    """The folder in which the sweep of this name is recorded."""
    return Path(runs_dir) / "sweeps" / name


def sweep_of(folder: Path, runs_dir: str, sweep: str) -> str | None:
    """The sweep's folder, relative to the run in `folder`; None for a run without a sweep."""
    if not sweep:
        return None
    return os.path.relpath(sweep_folder(Path(runs_dir).expanduser().absolute(), sweep), folder)


def read_sweep(folder: Path) -> SweepRecord:
    """Read sweep.json in `folder`. Raises ValueError if it is missing or cannot be read."""
    path = folder / FILE
    if not path.exists():
        known = sorted(place.parent.name for place in folder.parent.glob(f"*/{FILE}"))
        there = f"there are: {', '.join(known)}" if known else "none was run there yet, `make sweep` does"
        raise ValueError(f"no sweep {folder.name!r} in {folder.parent}; {there}")
    remedy = (
        "restore it from a copy, or move it away and start the sweep's command again, which writes a new one and runs "
        "nothing that is finished"
    )
    raw = read_json(path, remedy)
    try:
        return SweepRecord.of(raw)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is no record of a sweep ({error!r}): it was edited, or the disk fails; {remedy}"
        ) from error


def record_sweep(
    runs_dir: Path,
    name: str,
    entries: Sequence[RunEntry],
    valid: frozenset[str] | None,
    design: Mapping[str, Any] | None,
    fingerprint: str,
    command: Sequence[str],
    commit: str | None,
    tracking: Mapping[str, str] | None,
    starts: bool = True,
    pilot: Sequence[Mapping[str, Any]] = (),
    tuning: Sequence[Mapping[str, Any]] = (),
    matching: Sequence[Mapping[str, Any]] = (),
) -> Path:
    """Write or extend a sweep's record before its first run starts, and return the sweep's folder.

    Runs of earlier commands stay if `valid` contains their folder without the seed, that is, if today's declaration
    can still reach them. With `valid` None all stay. A declaration that differs from the last one is added with its
    time and the number of runs started by then. `starts` is whether this command has anything left to run; if not,
    the recorded command and commit stay. `pilot`, `tuning` and `matching` replace what was recorded for the same levels
    and arms.
    Raises RunFolderError.
    """
    folder = sweep_folder(runs_dir, name)
    with explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with locked(folder / ".lock", 10.0):
        before = read_sweep(folder) if (folder / FILE).exists() else None
        declared = list(before.declared) if before else []
        # One run per arm, level and seed: a new folder replaces the old one.
        merged = {(entry.level, entry.arm, entry.seed): entry for entry in (*(before.runs if before else ()), *entries)}
        if not declared or declared[-1]["fingerprint"] != fingerprint:
            known = {entry.folder for entry in (*(before.runs if before else ()), *entries)}
            started = sum(run_status(Path(runs_dir) / name) != "new" for name in known)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            declared.append({"fingerprint": fingerprint, "at": now, "runs_started_before": started})
        kept = [entry for entry in merged.values() if valid is None or entry.folder.rpartition("/")[0] in valid]
        record = SweepRecord(
            name=name,
            key=before.key if before else uuid.uuid4().hex,
            design=design,
            declared=declared,
            command=masked(command if starts or before is None else before.command),
            commit=commit if starts or before is None else before.commit,
            tracking=masked(dict(tracking)) if tracking else before and before.tracking,
            runs=kept,
            pilot=_replacing(before.pilot if before else (), pilot),
            tuning=_replacing(before.tuning if before else (), tuning),
            matching=_replacing(before.matching if before else (), matching),
        )
        # Unsorted, because a ladder adds its tricks in the order in which they were declared.
        write_json(folder / FILE, asdict(record), sort=False)
    return folder


def _replacing(earlier: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The entries of `now`, after those of `earlier` for other levels and arms."""
    places = {(entry["level"], entry["arm"]) for entry in now}
    return [*(entry for entry in earlier if (entry["level"], entry["arm"]) not in places), *now]


def run_states(folder: Path, record: SweepRecord) -> dict[str, Status]:
    """Run folder (relative to runs_dir) -> that run's status."""
    return {entry.folder: run_status(folder.parent.parent / entry.folder) for entry in record.runs}


def sweep_status(folder: Path, record: SweepRecord) -> str:
    """The sweep's status in MLflow's words: FINISHED, RUNNING while a process holds a run, FAILED or KILLED.

    A run with nothing left to train on has not failed.
    """
    runs_dir = folder.parent.parent
    states = {name: state for name, state in run_states(folder, record).items() if not has_ended(runs_dir / name)}
    if not states:
        return "FINISHED"
    if any(is_held(runs_dir / name) for name in states):
        return "RUNNING"
    failed = [name for name, state in states.items() if state == "failed"]
    return "FAILED" if any(not was_interrupted(runs_dir / name) for name in failed) else "KILLED"
