"""A sweep as three tables: its runs, what they logged at every step, and what they answered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.sources.answers import ADDED, COLUMNS
from grpo_lab.analysis.sources.settings import Condition, Settings, differing
from grpo_lab.config.design import Collapsed, Design, read_design
from grpo_lab.tracking.renames import metric_name, with_done_fields
from grpo_lab.tracking.run_reader import EXHAUSTED
from grpo_lab.tracking.sweep_record import SweepRecord

LABELS = ["level", "arm", "seed"]
NO_BASE = -1  # the base of a run that recorded none
# Columns of `runs` that data saved by earlier versions lack.
_ADDED = {
    "collapsed": False,
    "protocol": None,
    "changed_code": "",
    "lost": "",
    "base": NO_BASE,
    "same_as": "",
    "harness": "",
}


@dataclass(frozen=True, eq=False)
class SweepData:
    """All that analysis knows of a sweep; the tables share the columns level, arm and seed.

    `runs`: one row per recorded run. Its columns, beside run_key, mlflow_run_id, folder, commit and dirty:

        status        done, failed, partial, new or unreadable; `problem` says why
        no_ops        the axes whose option changed nothing in the whole run
        collapsed     whether the run stopped on a loss that was not finite
        protocol      a hash of what the model is asked and of how answers are graded
        changed_code  the steps after which it was resumed with changed code, such as "50, 100"
        lost          the steps whose table of evaluated answers is gone, written likewise
        base          the base model it started from, a value of model.base; NO_BASE where none was recorded
        harness       the suites that harnesses measured, each with a hash of how: see `harness_results.protocols`
        same_as       the label under which the run was made, where two labels are the same run by construction

    `points`: one row per logged step of every readable run, with `step` and the metrics; NaN where one was not logged.

    `answers`: one row per run, evaluation (step), suite and question. Columns are difficulty, n (samples), correct,
    wanted (the target length in the prompt, 0 for none) and tokens (of all n samples). No rows where none were saved.

    `source` says in words where the tables come from. A `notice` that is not empty says that they are of other runs
    than those that were asked for. `settings` maps (level, arm) to the options and numbers in which arms differ; older
    saved data have none. `changed` maps an arm to what it computes otherwise since these runs were declared.
    """

    record: SweepRecord
    design: Design | None
    runs: pd.DataFrame
    points: pd.DataFrame
    answers: pd.DataFrame
    source: str
    settings: Mapping[Condition, Settings] = field(default_factory=dict)
    notice: str = ""
    changed: Mapping[str, str] = field(default_factory=dict)

    @property
    def declaration(self) -> Design | None:
        """The design where it was declared before the runs; None for an ablation from the shell."""
        return None if self.design is None or self.design.exploratory else self.design

    @property
    def finished(self) -> pd.DataFrame:
        """The rows of `runs` that are done."""
        return self.runs[self.runs["status"] == "done"]

    @property
    def finished_points(self) -> pd.DataFrame:
        """The rows of `points` that belong to finished runs."""
        return self.points.merge(self.finished[LABELS], on=LABELS)

    @property
    def exhausted(self) -> pd.Series:
        """Whether each row of `runs` ended before its budget was spent since nothing was left to train on.

        That is how the run turned out, no fault: another attempt would end alike, and the policy stands as it was.
        """
        if "problem" not in self.runs:
            return pd.Series(False, index=self.runs.index)
        return (self.runs["status"] == "failed") & self.runs["problem"].str.startswith(EXHAUSTED)

    @property
    def counted(self) -> pd.DataFrame:
        """The rows of `runs` that final values count: finished, collapsed, and with nothing left to train on."""
        return self.runs[(self.runs["status"] == "done") | self.runs["collapsed"] | self.exhausted]

    @property
    def counted_points(self) -> pd.DataFrame:
        """The rows of `points` that belong to counted runs."""
        return self.points.merge(self.counted[LABELS], on=LABELS)

    def counted_columns(self, names: Iterable[str]) -> pd.DataFrame:
        """`counted_points` with only those of these metrics that were logged. Merging all columns takes far longer."""
        kept = [*LABELS, "step", *(name for name in dict.fromkeys(names) if name in self.points)]
        return self.points[kept].merge(self.counted[LABELS], on=LABELS)

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
    def axis(self) -> str:
        """The entry of budget/* on which arms are compared: the declared one, or sampled tokens."""
        return self.design.axis if self.design else "sampled_tokens"

    @property
    def collapsed_as(self) -> Collapsed:
        """The rule by which collapsed runs count: the declared one, or zero."""
        return self.design.collapsed if self.design else Collapsed.zero

    @property
    def tricks(self) -> list[str]:
        """Every trick that some arm switches on, in the order of the declaration."""
        if self.design and self.design.tricks:
            return list(self.design.tricks)
        twins = self.design.twins.values() if self.design else ()
        own = (arm for arm in self.arms if arm not in twins)
        return list(dict.fromkeys(trick for arm in own for trick in sorted(self.contents(arm))))

    @property
    def run_arms(self) -> list[tuple[str, str]]:
        """(level, arm) of everything with at least one run that counts, in declared order."""
        counted = set(self.counted[["level", "arm"]].itertuples(index=False, name=None))
        return [(level, arm) for level in self.levels for arm in self.arms if (level, arm) in counted]

    def contents(self, arm: str) -> frozenset[str]:
        """The tricks of an arm; without a declaration, the overrides that the first arm does not have."""
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
        design = self.design
        declared = design.seeds if design and arm in design.arms and level in design.levels else ()
        return len(set(here["seed"]) | set(declared))

    def seeds_finished(self, level: str, arm: str) -> int:
        """How many seeds of an arm at a level are done."""
        done = self.finished
        return int(((done["level"] == level) & (done["arm"] == arm)).sum())


def bases_of(data: SweepData) -> dict[int, int]:
    """Seed -> base; empty for a sweep of one initial policy. Seeds are nested in base models, so a seed has one."""
    if "base" not in data.runs:
        return {}
    known = data.runs.loc[data.runs["base"] >= 0, ["seed", "base"]].drop_duplicates("seed")
    return {int(seed): int(base) for seed, base in zip(known["seed"], known["base"])}


def _words(arm: str) -> frozenset[str]:
    """The overrides in the name of an arm that was not declared; a value may hold commas of its own."""
    return frozenset(re.split(r",(?=[\w./@+~]+=)", arm))


@dataclass(frozen=True)
class RunData:
    """One run: its row of `runs`, and its rows of `points` and `answers` without level, arm and seed."""

    row: dict[str, Any]
    points: pd.DataFrame
    answers: pd.DataFrame
    settings: Settings = field(default_factory=dict)


def assemble(record: SweepRecord, runs: Sequence[RunData], source: str) -> SweepData:
    """Join the tables of runs, read from anywhere, to one sweep."""
    points = _joined(runs, [run.points for run in runs])
    answers = _joined(runs, [run.answers for run in runs])
    settings: dict[Condition, Settings] = {}
    for run in runs:
        if run.settings:
            settings.setdefault((run.row["level"], run.row["arm"]), run.settings)
    return sweep_data(record, [run.row for run in runs], points, answers, source, differing(settings))


def _joined(runs: Sequence[RunData], tables: Sequence[pd.DataFrame]) -> pd.DataFrame | None:
    """The tables of all runs as one, with the labels of each row's run; None where no table has rows."""
    counts = [len(table) for table in tables]
    if not any(counts):
        return None
    joined = pd.concat([table for table in tables if len(table)], ignore_index=True)
    labels = pd.DataFrame([[run.row[name] for name in LABELS] for run in runs], columns=LABELS)
    of_row = np.repeat(np.arange(len(runs)), counts)
    return pd.concat([joined, labels.take(of_row).reset_index(drop=True)], axis=1)


def sweep_data(
    record: SweepRecord,
    rows: Sequence[Mapping[str, Any]],
    points: pd.DataFrame | None,
    answers: pd.DataFrame | None,
    source: str,
    settings: Mapping[Condition, Settings],
) -> SweepData:
    design = None if record.design is None else read_design(record.design)
    points = pd.DataFrame(columns=[*LABELS, "step"]) if points is None else _under_todays_names(points)
    answers = pd.DataFrame(columns=[*LABELS, *COLUMNS]) if answers is None else answers
    answers = answers.assign(**{name: 0 for name in ADDED if name not in answers})
    metrics = sorted(set(points.columns) - {*LABELS, "step"})
    points = points[[*LABELS, "step", *metrics]].astype(dict.fromkeys(metrics, float))
    runs = pd.DataFrame([with_done_fields(row) for row in rows])
    runs = runs.assign(**{name: default for name, default in _ADDED.items() if name not in runs})
    runs, answers = runs.astype({"collapsed": bool, "base": int}), answers[[*LABELS, *COLUMNS]]
    return SweepData(record, design, runs, points, answers, source, settings)


def _under_todays_names(points: pd.DataFrame) -> pd.DataFrame:
    """Columns under today's metric names. A store may hold both names of a run that was resumed across a rename."""
    twice = [name for name in points.columns if metric_name(name) != name and metric_name(name) in points]
    merged = {metric_name(name): points[metric_name(name)].combine_first(points[name]) for name in twice}
    return points.drop(columns=twice).rename(columns=metric_name).assign(**merged)
