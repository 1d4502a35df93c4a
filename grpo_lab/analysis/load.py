"""A sweep as tables of runs, logged steps and answers, from run folders or from a saved copy."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
from pyarrow import parquet

from grpo_lab.analysis.answers import ADDED, COLUMNS
from grpo_lab.analysis.cache import Cache
from grpo_lab.analysis.settings import Place, Settings, differing, settings_of
from grpo_lab.config.design import Collapsed, Design, read_design
from grpo_lab.tracking.files import write_json, write_whole
from grpo_lab.tracking.renames import metric_name, with_config_keys
from grpo_lab.tracking.run_reader import run_status, was_interrupted
from grpo_lab.tracking.sweep_record import FILE, CellRecord, SweepRecord, read_sweep, sweep_folder
from grpo_lab.tracking.whole import read_json

LABELS = ["level", "arm", "seed"]
# What decides how often is asked, not what.
_HOW_OFTEN = ("evaluation.every", "evaluation.initial_kl")
_SAVE_AGAIN = "restore it from a copy, or save the data again with `grpo-lab data`"
# Columns of `runs` that data saved by earlier versions lack.
_ADDED = {"collapsed": False, "protocol": None, "changed_code": "", "lost": ""}


@dataclass(frozen=True, eq=False)
class SweepData:
    """All that analysis knows of a sweep.

    `runs` has one row per recorded cell: level, arm, seed, folder, status (done, failed, partial, new, or unreadable,
    with the reason in `problem`), run_key, mlflow_run_id, commit, dirty, inert (axes, from DONE), collapsed (whether
    it stopped on a loss that was not finite), protocol (a hash of what is asked of the model and how it is graded),
    changed_code (the steps after which it was resumed with changed code, "50, 100") and lost (the steps whose
    evaluation table is gone, likewise). `points` has one row per logged step of every readable cell: level, arm,
    seed, step and the metrics, NaN where one was not logged. `answers` has one row per cell, evaluation, suite and
    question: level, arm, seed, step, suite, question, difficulty, n (samples), correct, wanted (the length that the
    question asked for, 0 for none) and tokens (of all samples); none where they were not kept. `source` says in words
    where all come from, and `notice`, where it is not empty, that these are not the runs that were asked for.
    `settings` holds by (level, arm) the options and numbers in which arms differ; it is empty for data that were
    saved without. `changed` says of arms what they compute otherwise since these runs were declared.
    """

    record: SweepRecord
    design: Design | None
    runs: pd.DataFrame
    points: pd.DataFrame
    answers: pd.DataFrame
    source: str
    settings: Mapping[Place, Settings] = field(default_factory=dict)
    notice: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def finished(self) -> pd.DataFrame:
        """The rows of `runs` that are done."""
        return self.runs[self.runs["status"] == "done"]

    @property
    def finished_points(self) -> pd.DataFrame:
        """The rows of `points` that belong to finished runs."""
        return self.points.merge(self.finished[LABELS], on=LABELS)

    @property
    def counted(self) -> pd.DataFrame:
        """The rows of `runs` that final values count: finished ones, and those that collapsed."""
        return self.runs[(self.runs["status"] == "done") | self.runs["collapsed"]]

    @property
    def counted_points(self) -> pd.DataFrame:
        """The rows of `points` that belong to them."""
        return self.points.merge(self.counted[LABELS], on=LABELS)

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

    @property
    def collapsed_as(self) -> Collapsed:
        """The rule by which collapsed runs count: the declared one, or zero."""
        return self.design.collapsed if self.design else Collapsed.zero

    @property
    def tricks(self) -> list[str]:
        """Every trick that some arm switches on, in the order of the declaration."""
        if self.design and self.design.tricks:
            return list(self.design.tricks)
        return list(dict.fromkeys(trick for arm in self.arms for trick in sorted(self.contents(arm))))

    def contents(self, arm: str) -> frozenset[str]:
        """The tricks an arm switches on; without a declaration, the overrides that the first arm does not have."""
        if self.design is not None:
            return self.design.contents(arm) if arm in self.design.arms else frozenset({arm})
        return _words(arm) - _words(self.control)

    def collapsed(self, level: str, arm: str) -> int:
        """How many of an arm's runs stopped on a loss that was not finite."""
        here = (self.runs["level"] == level) & (self.runs["arm"] == arm)
        return int(self.runs.loc[here, "collapsed"].sum())

    def seeds_planned(self, level: str, arm: str) -> int:
        """How many seeds were declared or recorded for an arm at a level."""
        here = self.runs[(self.runs["level"] == level) & (self.runs["arm"] == arm)]
        declared = self.design is not None and arm in self.design.arms and level in self.design.levels
        return len(set(here["seed"]) | set(self.design.seeds if declared else ()))

    def seeds_finished(self, level: str, arm: str) -> int:
        """How many of them are done."""
        done = self.finished
        return int(((done["level"] == level) & (done["arm"] == arm)).sum())


def _words(arm: str) -> frozenset[str]:
    """The overrides in the name of an arm that was not declared; a value may hold commas of its own."""
    return frozenset(re.split(r",(?=[\w./@+~]+=)", arm))


@dataclass(frozen=True)
class CellData:
    """One cell as it was read: its row of `runs`, its rows of `points` and of `answers`, without labels."""

    row: dict[str, Any]
    points: pd.DataFrame
    answers: pd.DataFrame
    settings: Settings = field(default_factory=dict)


def load_sweep(runs_dir: Path, name: str, cache: bool = True) -> SweepData:
    """Read a sweep from its run folders. Raises ValueError where runs_dir holds no such sweep.

    What was read is kept beside the sweep's record and read again only for runs whose files changed since;
    `cache=False` neither reads nor writes that.
    """
    folder = sweep_folder(runs_dir, name)
    record = read_sweep(folder)
    cells = read_cells(Path(runs_dir), record.cells, folder / "cache" if cache else None)
    try:
        return assemble(record, cells, "run folders")
    except ValueError as error:
        raise ValueError(f"{folder / FILE}: {error}") from error


def read_cells(runs_dir: Path, cells: Sequence[CellRecord], cache: Path | None) -> list[CellData]:
    """Every cell, from its run folder or, where that did not change, from the folder `cache`; None keeps nothing."""
    kept = Cache(cache)
    found = [_read_cell(runs_dir, cell, kept) for cell in cells]
    kept.save()
    return found


def assemble(record: SweepRecord, cells: Sequence[CellData], source: str) -> SweepData:
    """One sweep of cells that were read from anywhere."""
    tables: dict[str, list[pd.DataFrame]] = {"points": [], "answers": []}
    for cell in cells:
        labels = {name: cell.row[name] for name in LABELS}
        for name, parts in tables.items():
            table = getattr(cell, name)
            if len(table):
                parts.append(table.copy().assign(**labels))  # a copy in one piece: columns come cheaply to it
    points = pd.concat(tables["points"], ignore_index=True) if tables["points"] else None
    answers = pd.concat(tables["answers"], ignore_index=True) if tables["answers"] else None
    settings: dict[Place, Settings] = {}
    for cell in cells:
        if cell.settings:
            settings.setdefault((cell.row["level"], cell.row["arm"]), cell.settings)
    return _sweep_data(record, [cell.row for cell in cells], points, answers, source, differing(settings))


def _read_cell(runs_dir: Path, cell: CellRecord, kept: Cache) -> CellData:
    folder = runs_dir / cell.folder
    labels = {"level": cell.level, "arm": cell.arm, "seed": cell.seed}
    row = labels | {"folder": cell.folder, "status": run_status(folder), "problem": "", "collapsed": False}
    row |= {"run_key": None, "mlflow_run_id": None, "commit": None, "dirty": None, "inert": [], "protocol": None}
    row |= {"changed_code": "", "lost": ""}
    points, answers, settings = pd.DataFrame(), pd.DataFrame(columns=COLUMNS), {}
    try:
        if row["status"] != "new":
            run = _read_json(folder / "run.json")
            row |= {name: run[name] for name in ("run_key", "commit", "dirty")}
            row["protocol"], settings = protocol_of(run.get("config", {})), settings_of(run)
            row["changed_code"] = changes_of_code(run)
            tables = kept.tables(cell.folder, folder)
            points, answers = tables.points, tables.answers
            row["lost"] = lost_evaluations(folder, points)
        if row["status"] == "done":
            done = _read_json(folder / "DONE")
            row["inert"] = list(done["inert"])
            _require_whole(folder / "metrics.jsonl", points, done)
        if row["status"] == "failed":
            row["problem"] = (folder / "error.txt").read_text(errors="replace").partition("\n")[0]
            row["collapsed"] = row["problem"].startswith("FloatingPointError")
            if was_interrupted(folder):
                row |= {"status": "partial", "problem": "interrupted"}
        if (folder / "mirror.json").exists():
            row["mlflow_run_id"] = _read_json(folder / "mirror.json").get("mlflow_run_id")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.filename:
            said = f"{error.filename} ({error.strerror}): restore it from a copy"
        elif str(folder) not in said:
            said = f"a file of {folder} was edited ({said}): restore it from a copy"
        row |= {"status": "unreadable", "problem": f"{type(error).__name__}: {said}", "collapsed": False}
        return CellData(row, pd.DataFrame(), pd.DataFrame(columns=COLUMNS))
    return CellData(row, points, answers, settings)


def _require_whole(path: Path, points: pd.DataFrame, done: Mapping[str, Any]) -> None:
    """Raise ValueError where the metrics of a finished run do not end as DONE says: lines were lost, or exchanged."""
    last = int(points["step"].max()) if len(points) else None
    remedy = "restore it from a copy, or run the cell again in another folder"
    if last is None or last != done.get("steps", last):
        ends = "has no step" if last is None else f"ends at step {last}"
        raise ValueError(f"{path} {ends}, and the run has finished after {done.get('steps', 'some')}; {remedy}")
    for name, value in done.get("last", {}).items():
        logged = points[name].dropna() if name in points else points["step"].head(0)
        if logged.empty or (logged.iloc[-1] != value and value is not None):
            raise ValueError(f"{path} does not end with the {name} of {value} that DONE says; {remedy}")


def changes_of_code(described: Mapping[str, Any]) -> str:
    """The steps after which a run was resumed with changed code, from its run.json."""
    return ", ".join(str(stretch["from_step"]) for stretch in described.get("stretches", ())[1:])


def lost_evaluations(folder: Path, points: pd.DataFrame) -> str:
    """The steps at which a run logged accuracies and whose table of answers is not there; "" where none was kept."""
    done = _read_json(folder / "DONE") if (folder / "DONE").exists() else {}
    if not (folder / "eval").is_dir() and "files" not in done:
        return ""
    scores = [name for name in points.columns if name.startswith("eval/") and name.endswith("/accuracy")]
    evaluated = points.loc[points[scores].notna().any(axis=1), "step"] if scores else []
    return ", ".join(str(step) for step in evaluated if not (folder / "eval" / f"step={step:06d}.parquet").exists())


def protocol_of(config: Mapping[str, Any]) -> str | None:
    """Twelve hexadecimal digits of what a run is asked and how its evaluations are graded; None for an empty config.

    Two runs that differ here were not evaluated alike, and are not to be compared.
    """
    if not config:
        return None
    # The last three are options that end responses in their own way, or write a wanted length into the questions.
    rooms = ("task.", "template.", "evaluation.", "verifier.", "truncation.", "reward_shaping.shortest")
    rooms += ("reward_shaping.longest",)
    asked = {key: value for key, value in config.items() if key.startswith(rooms) and key not in _HOW_OFTEN}
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()[:12]


def _read_json(path: Path) -> dict[str, Any]:
    return read_json(path, "restore it from a copy")


def _sweep_data(
    record: SweepRecord,
    cells: Sequence[Mapping[str, Any]],
    points: pd.DataFrame | None,
    answers: pd.DataFrame | None,
    source: str,
    settings: Mapping[Place, Settings],
) -> SweepData:
    design = None if record.design is None else read_design(record.design)
    points = pd.DataFrame(columns=[*LABELS, "step"]) if points is None else points.rename(columns=metric_name)
    answers = pd.DataFrame(columns=[*LABELS, *COLUMNS]) if answers is None else answers
    answers = answers.assign(**{name: 0 for name in ADDED if name not in answers})
    metrics = sorted(set(points.columns) - {*LABELS, "step"})
    points = points[[*LABELS, "step", *metrics]].astype(dict.fromkeys(metrics, float))
    runs = pd.DataFrame(list(cells))
    runs = runs.assign(**{name: default for name, default in _ADDED.items() if name not in runs})
    runs, answers = runs.astype({"collapsed": bool}), answers[[*LABELS, *COLUMNS]]
    return SweepData(record, design, runs, points, answers, source, settings)


def save_data(data: SweepData, folder: Path) -> list[Path]:
    """Write `<name>.parquet` (every logged number), `<name>.answers.parquet` (every evaluated question) and
    `<name>.json` (record and cells): enough for every figure.

    All are replaced whole; the same data give the same bytes. Raises ValueError where that would lose finished
    cells, RunFolderError where it cannot write.
    """
    table, answers, described = _data_files(folder, data.record.name)
    if data.record.name in saved_names(folder):
        saved = len(load_data(folder, data.record.name).finished)
        if saved > len(data.finished):
            raise ValueError(
                f"{table} holds {saved} finished cells, these runs {len(data.finished)}: finish the sweep, or save "
                "to another folder with --to"
            )
    write_whole(table, lambda path: _to_parquet(data.points, path))
    write_whole(answers, lambda path: _to_parquet(data.answers, path))
    runs = data.runs.astype(object).where(data.runs.notna(), None)
    # Where this machine keeps its MLflow store means nothing on another.
    record = asdict(replace(data.record, tracking=None))
    settings = [{"level": level, "arm": arm, "settings": own} for (level, arm), own in data.settings.items()]
    content = {"sweep": record, "runs": runs.to_dict("records"), "settings": settings}
    content["sha256"] = {path.name: _digest(path) for path in (table, answers)}
    write_json(described, content, sort=False)
    return [table, answers, described]


def _to_parquet(table: pd.DataFrame, path: Path) -> None:
    """As small as it gets without losing a bit: the bytes of floats apart by their place, everything else once.

    Statistics of columns and pandas' own description of them would be a tenth of a file; nothing here reads them.
    """
    floats = [str(name) for name in table.select_dtypes("float").columns]
    parquet.write_table(
        pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None),
        path,
        compression="zstd",
        compression_level=19,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT"),
        use_dictionary=[str(name) for name in table.columns if name not in floats],
        write_statistics=False,
        store_schema=False,
    )


def load_data(folder: Path, name: str) -> SweepData:
    """What `save_data` wrote. Raises ValueError, naming what is there, where it wrote nothing of this name."""
    table, answers, described = _data_files(folder, name)
    if not (table.exists() and described.exists()):
        known = saved_names(folder)
        there = f"there are: {', '.join(known)}" if known else "no data was saved there yet"
        raise ValueError(f"no data of {name!r} in {folder}; {there}")
    raw = _read_json(described)
    for path in (table, answers):
        written = raw.get("sha256", {}).get(path.name)  # earlier versions kept none
        if written is not None and not (path.exists() and _digest(path) == written):
            what = "is not what was saved" if path.exists() else "is missing"
            raise ValueError(f"{path} {what}: {_SAVE_AGAIN}")
    try:
        cells = [CellRecord(**cell) for cell in raw["sweep"]["cells"]]
        record = SweepRecord(**{**raw["sweep"], "cells": cells})
        kept = pd.read_parquet(answers) if answers.exists() else None
        settings = {
            (entry["level"], entry["arm"]): with_config_keys(entry["settings"]) for entry in raw.get("settings", ())
        }
        return _sweep_data(record, raw["runs"], pd.read_parquet(table), kept, "saved data", settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{described} and the tables beside it cannot be read ({error!r}): {_SAVE_AGAIN}") from error


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def saved_names(folder: Path) -> list[str]:
    """The sweeps whose data `save_data` wrote into a folder."""
    return sorted(path.stem for path in folder.glob("*.parquet") if path.with_suffix(".json").exists())


def recorded_names(runs_dir: Path) -> list[str]:
    """The sweeps recorded in a folder of runs."""
    return sorted(path.parent.name for path in (Path(runs_dir) / "sweeps").glob(f"*/{FILE}"))


def _data_files(folder: Path, name: str) -> tuple[Path, Path, Path]:
    # A name may hold dots (budget.amount=10), which with_suffix would take for the suffix.
    return folder / f"{name}.parquet", folder / f"{name}.answers.parquet", folder / f"{name}.json"
