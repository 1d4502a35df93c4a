"""A sweep as tables of runs, logged steps and answers, from run folders or from a saved copy."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.answers import ADDED, COLUMNS
from grpo_lab.analysis.sources.settings import Place, Settings, differing
from grpo_lab.config.design import Collapsed, Design, read_design
from grpo_lab.tracking.renames import metric_name
from grpo_lab.tracking.sweep_record import SweepRecord

LABELS = ["level", "arm", "seed"]
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
    question asked for, 0 for none) and tokens (of all samples); none where they were not saved. `source` says in words
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

    @property
    def run_arms(self) -> list[tuple[str, str]]:
        """(level, arm) of everything with at least one run that counts, finished or collapsed, in declared order."""
        counted = set(self.counted[["level", "arm"]].itertuples(index=False, name=None))
        return [(level, arm) for level in self.levels for arm in self.arms if (level, arm) in counted]

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
    return sweep_data(record, [cell.row for cell in cells], points, answers, source, differing(settings))


def sweep_data(
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
