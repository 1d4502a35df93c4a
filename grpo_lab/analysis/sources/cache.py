"""Parsed tables of runs, so that the files of a run are parsed again only after they changed.

One file holds the points and the answers of all runs of a sweep, because one large parquet is read about eight times
as fast as sixty small ones. With it, a sweep of sixty runs of 1,000 steps, 60 metrics and ten evaluations is loaded in
a tenth of the time that parsing takes, or less. Deleting it costs that time, and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources import answers as answers_module
from grpo_lab.analysis.sources.answers import COLUMNS, read_answers
from grpo_lab.tracking import harness_results, run_reader
from grpo_lab.tracking.checksums import check_logged
from grpo_lab.tracking.files import atomic_write
from grpo_lab.tracking.harness_results import FOLDER, current_results
from grpo_lab.tracking.run_reader import read_steps

FILE = "tables"
_WATCHED = ("metrics.jsonl", "timing.jsonl", "run.json", "DONE", "error.txt")

_RESTORE = "restore it from a copy, or start the run again in another folder"

logger = logging.getLogger("grpo_lab.analysis")


@dataclass(frozen=True)
class RunTables:
    """The metrics of a run (step and one float column per metric) and its answers (`answers.COLUMNS`)."""

    points: pd.DataFrame
    answers: pd.DataFrame


NOTHING = RunTables(pd.DataFrame(), pd.DataFrame(columns=COLUMNS))


def read_tables(folder: Path) -> RunTables:
    """The tables of the run in `folder`, parsed. Raises ValueError, naming the file, where one is damaged."""
    check_logged(folder)
    rows = []
    for record in read_steps(folder):
        seconds = {name: value for name, value in record.timing.items() if name.startswith("budget/")}
        rows.append({"step": record.step, **record.metrics, **seconds})
    path = folder / "metrics.jsonl"
    for number, row in enumerate(rows):
        if row["step"] != number:
            before = f"follows step {number - 1}" if number else "comes first"
            raise ValueError(f"{path}: step {row['step']} {before}, so lines were lost or doubled; {_RESTORE}")
    points = pd.DataFrame(rows)
    metrics = [name for name in points.columns if name != "step"]
    try:
        points = points.astype(dict.fromkeys(metrics, float))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} has a value that is no number ({str(error).splitlines()[0]}); {_RESTORE}") from error
    return RunTables(pd.concat([points, _measured(folder, len(points))], axis=1), read_answers(folder))


def _measured(folder: Path, rows: int) -> pd.DataFrame:
    """Results of evaluation harnesses for a run, a row per logged step; a current result is of one of them."""
    columns: dict[str, list[float]] = {}
    for result in current_results(folder):
        for name, value in result.logged().items():
            columns.setdefault(name, [math.nan] * rows)[result.step] = float(value)
    return pd.DataFrame(columns, index=range(rows))


def look_of(folder: Path) -> dict[str, list[int]]:
    """Size and modification time of the files a run's tables come from, to see whether any has changed.

    Of the evaluations, its own and those of harnesses: their number, their bytes and the newest of their times.
    """
    seen = {}
    for name in _WATCHED:
        if (folder / name).exists():
            status = (folder / name).stat()
            seen[name] = [status.st_size, status.st_mtime_ns]
    for name, pattern in (("eval", "step=*.parquet"), (FOLDER, "*/step=*.json")):
        files = [path.stat() for path in (folder / name).glob(pattern)]
        sizes, times = [file.st_size for file in files], [file.st_mtime_ns for file in files]
        seen[name] = [len(files), sum(sizes), max(times, default=0)]
    return seen


class Cache:
    """The tables of a sweep's runs, saved in `folder`; None saves nothing.

    A file that is damaged, or that other code wrote, is ignored. Any number of processes may read and write it at once:
    it is replaced whole, and each process that parsed something writes all that it read.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / FILE
        self._saved = {} if self._path is None else _load(self._path)
        self._read: dict[str, tuple[dict[str, list[int]], RunTables]] = {}
        self._news = False

    def tables(self, name: str, folder: Path) -> RunTables:
        """The tables of the run in `folder`, which is saved under `name`. Raises what `read_tables` raises."""
        look = look_of(folder)  # first: what is written while the run is parsed makes it look new the next time
        before = self._saved.get(name)
        if before is not None and before[0] == look:
            found = before[1]
        else:
            found, self._news = read_tables(folder), True
        self._read[name] = look, found
        return found

    def save(self) -> None:
        """Save all that was read, if any of it was parsed; nothing where the folder cannot be written."""
        if self._path is None or not self._news:
            return
        try:
            atomic_write(self._path, _packed(self._read))
        except (OSError, ValueError, TypeError) as error:
            # A folder of somebody else, a full disk, or runs whose ids of questions are of two kinds.
            logger.info("nothing was saved in %s: %s", self._path, error)


def _packed(read: dict[str, tuple[dict[str, list[int]], RunTables]]) -> bytes:
    """A digest of everything below it, the index as one line of JSON, and two parquets."""
    points = _joined([tables.points for _, tables in read.values()])
    answers = _joined([tables.answers for _, tables in read.values()])
    index = {
        "reader": _reader(),
        "points_bytes": len(points),
        "runs": [
            {
                "name": name,
                "look": look,
                "points": len(tables.points),
                "metrics": list(tables.points.columns),
                "answers": len(tables.answers),
            }
            for name, (look, tables) in read.items()
        ],
    }
    content = json.dumps(index).encode() + b"\n" + points + answers
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content


def _joined(tables: Sequence[pd.DataFrame]) -> bytes:
    filled = [table for table in tables if len(table)]
    joined = pd.concat(filled, ignore_index=True) if filled else pd.DataFrame()
    return joined.to_parquet(compression="snappy", index=False)


def _load(path: Path) -> dict[str, tuple[dict[str, list[int]], RunTables]]:
    """What `_packed` packed, by name; nothing where the file is not exactly that."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return {}
    if hashlib.sha256(content).hexdigest().encode() != digest:
        return {}
    line, _, body = content.partition(b"\n")
    index: dict[str, Any] = json.loads(line)
    if index["reader"] != _reader():
        return {}
    points = pd.read_parquet(io.BytesIO(body[: index["points_bytes"]]))
    answers = pd.read_parquet(io.BytesIO(body[index["points_bytes"] :]))
    at = {name: position for position, name in enumerate(points.columns)}
    found, point, answer = {}, 0, 0
    for run in index["runs"]:
        own = NOTHING
        if run["points"]:
            columns = [at[name] for name in run["metrics"]]
            own = replace(own, points=_rows(points, point, run["points"]).take(columns, axis="columns"))
        if run["answers"]:
            own = replace(own, answers=_rows(answers, answer, run["answers"]))
        found[run["name"]] = run["look"], own
        point, answer = point + run["points"], answer + run["answers"]
    return found


def _rows(table: pd.DataFrame, first: int, number: int) -> pd.DataFrame:
    return table.iloc[first : first + number].reset_index(drop=True)


@cache
def _reader() -> str:
    """A digest of the code that decides what is in the tables: with other code, all is parsed again."""
    files = [Path(__file__), Path(answers_module.__file__), Path(run_reader.__file__), Path(harness_results.__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
