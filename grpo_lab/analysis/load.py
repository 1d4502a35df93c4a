"""A sweep as two tables, one row per cell and one row per logged step, from run folders or from a saved copy."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.sweeps.design import Design, read_design
from grpo_lab.tracking.files import write_json, write_whole
from grpo_lab.tracking.run_reader import read_steps, run_status, was_interrupted
from grpo_lab.tracking.sweep_record import FILE, CellRecord, SweepRecord, read_sweep, sweep_folder

LABELS = ["level", "arm", "seed"]


@dataclass(frozen=True)
class SweepData:
    """All that analysis knows of a sweep.

    `runs` has one row per recorded cell: level, arm, seed, folder, status (done, failed, partial, new, or
    unreadable, with the reason in `problem`), run_key, mlflow_run_id, commit, dirty and inert (axes, from DONE).
    `points` has one row per logged step of every readable cell: level, arm, seed, step and the metrics, NaN where
    one was not logged. `source` says in words where both come from.
    """

    record: SweepRecord
    design: Design | None
    runs: pd.DataFrame
    points: pd.DataFrame
    source: str

    @property
    def finished(self) -> pd.DataFrame:
        """The rows of `runs` that are done."""
        return self.runs[self.runs["status"] == "done"]

    @property
    def finished_points(self) -> pd.DataFrame:
        """The rows of `points` that belong to finished runs."""
        return self.points.merge(self.finished[LABELS], on=LABELS)

    @property
    def arms(self) -> list[str]:
        """Every arm: the control, the others as the sweep started them, then those it did not."""
        declared = [self.design.control, *self.runs["arm"], *self.design.arms] if self.design else self.runs["arm"]
        return list(dict.fromkeys(declared))

    @property
    def levels(self) -> list[str]:
        """Every level, as the sweep started them, then those it did not."""
        return list(dict.fromkeys([*self.runs["level"], *(self.design.levels if self.design else ())]))

    @property
    def control(self) -> str:
        """The arm the others are compared with: the declared one, or the first of a sweep that declared none."""
        return self.design.control if self.design else self.arms[0]

    def seeds_planned(self, level: str, arm: str) -> int:
        """How many seeds were declared or recorded for an arm at a level."""
        here = self.runs[(self.runs["level"] == level) & (self.runs["arm"] == arm)]
        declared = self.design is not None and arm in self.design.arms and level in self.design.levels
        return len(set(here["seed"]) | set(self.design.seeds if declared else ()))

    def seeds_finished(self, level: str, arm: str) -> int:
        """How many of them are done."""
        done = self.finished
        return int(((done["level"] == level) & (done["arm"] == arm)).sum())


def load_sweep(runs_dir: Path, name: str) -> SweepData:
    """Read a sweep from its run folders. Raises ValueError where runs_dir holds no such sweep."""
    record = read_sweep(sweep_folder(runs_dir, name))
    cells, points = [], []
    for cell in record.cells:
        row, steps = _read_cell(Path(runs_dir), cell)
        cells.append(row)
        points += steps
    table = pd.DataFrame(points, columns=None if points else [*LABELS, "step"])
    return _sweep_data(record, cells, table, "run folders")


def _read_cell(runs_dir: Path, cell: CellRecord) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    folder = runs_dir / cell.folder
    labels = {"level": cell.level, "arm": cell.arm, "seed": cell.seed}
    row = labels | {"folder": cell.folder, "status": run_status(folder), "problem": ""}
    row |= {"run_key": None, "mlflow_run_id": None, "commit": None, "dirty": None, "inert": []}
    steps = []
    try:
        if row["status"] != "new":
            run = _read_json(folder / "run.json")
            row |= {name: run[name] for name in ("run_key", "commit", "dirty")}
            steps = [
                {**labels, "step": record.step, **record.metrics, **_device_seconds(record.timing)}
                for record in read_steps(folder)
            ]
        if row["status"] == "done":
            row["inert"] = list(_read_json(folder / "DONE")["inert"])
        if row["status"] == "failed":
            row["problem"] = (folder / "error.txt").read_text().partition("\n")[0]
            if was_interrupted(folder):
                row |= {"status": "partial", "problem": "interrupted"}
        if (folder / "mirror.json").exists():
            row["mlflow_run_id"] = _read_json(folder / "mirror.json")["mlflow_run_id"]
    except (OSError, ValueError, KeyError) as error:
        return row | {"status": "unreadable", "problem": f"{type(error).__name__}: {error}"}, []
    return row, steps


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: it was edited, or the disk fails") from error


def _device_seconds(timing: Mapping[str, float | int]) -> dict[str, float | int]:
    return {name: value for name, value in timing.items() if name.startswith("budget/")}


def _sweep_data(
    record: SweepRecord, cells: Sequence[Mapping[str, Any]], points: pd.DataFrame, source: str
) -> SweepData:
    design = None if record.design is None else read_design(record.design)
    metrics = sorted(set(points.columns) - {*LABELS, "step"})
    points = points[[*LABELS, "step", *metrics]].astype(dict.fromkeys(metrics, float))
    return SweepData(record, design, pd.DataFrame(list(cells)), points, source)


def save_data(data: SweepData, folder: Path) -> list[Path]:
    """Write `<name>.parquet` (every logged number) and `<name>.json` (record and cells): enough for every figure.

    Both are replaced whole; the same data give the same bytes. Raises ValueError where that would lose finished
    cells, RunFolderError where it cannot write.
    """
    table, described = _data_files(folder, data.record.name)
    if data.record.name in saved_names(folder):
        saved = len(load_data(folder, data.record.name).finished)
        if saved > len(data.finished):
            raise ValueError(
                f"{table} holds {saved} finished cells, these runs {len(data.finished)}: finish the sweep, or save "
                "to another folder with --to"
            )
    write_whole(table, lambda path: data.points.to_parquet(path, compression="zstd", index=False))
    runs = data.runs.astype(object).where(data.runs.notna(), None)
    # Where this machine keeps its MLflow store means nothing on another.
    record = asdict(replace(data.record, tracking=None))
    write_json(described, {"sweep": record, "runs": runs.to_dict("records")})
    return [table, described]


def load_data(folder: Path, name: str) -> SweepData:
    """What `save_data` wrote. Raises ValueError, naming what is there, where it wrote nothing of this name."""
    table, described = _data_files(folder, name)
    if not (table.exists() and described.exists()):
        known = saved_names(folder)
        there = f"there are: {', '.join(known)}" if known else "no data was saved there yet"
        raise ValueError(f"no data of {name!r} in {folder}; {there}")
    raw = _read_json(described)
    cells = [CellRecord(**cell) for cell in raw["sweep"]["cells"]]
    record = SweepRecord(**{**raw["sweep"], "cells": cells})
    return _sweep_data(record, raw["runs"], pd.read_parquet(table), "saved data")


def saved_names(folder: Path) -> list[str]:
    """The sweeps whose data `save_data` wrote into a folder."""
    return sorted(path.stem for path in folder.glob("*.parquet") if path.with_suffix(".json").exists())


def recorded_names(runs_dir: Path) -> list[str]:
    """The sweeps recorded in a folder of runs."""
    return sorted(path.parent.name for path in (Path(runs_dir) / "sweeps").glob(f"*/{FILE}"))


def _data_files(folder: Path, name: str) -> tuple[Path, Path]:
    # A name may hold dots (budget.amount=10), which with_suffix would take for the suffix.
    return folder / f"{name}.parquet", folder / f"{name}.json"
