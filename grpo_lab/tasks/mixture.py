"""Several tables as one task: a batch draws from each in proportion to its weight, which the curriculum keeps."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

from grpo_lab.checks import require
from grpo_lab.tasks.base import SPLITS, ExternalTask
from grpo_lab.tasks.tables import (
    Table,
    TableRow,
    TableTask,
    _chosen,
    _divided,
    _problems,
    also_evaluated,
    by_question,
    fingerprint,
    notes_on_repetition,
    overlaps,
    require_share,
)
from grpo_lab.types import Problem

_IDS_OF_A_SOURCE = 1_000_000_000  # room for its splits, and for the tables that evaluation asks, which come first
_FIRST_ID = {"train": 0, "heldout": 10_000_000, "downstream": 20_000_000}


@dataclass(frozen=True)
class MixtureTask(ExternalTask):
    """Training questions of several named tables; their weights say how often a question of each is drawn.

    An entry of `sources` has a `weight`, the fields of a `Table` (columns are question and answer, the split is train,
    unless it says otherwise), and may have `heldout` and `downstream`: fields that are others there, as in `TableTask`.
    Held-out, downstream and probe questions come from all sources in proportion to their weights. No question is in two
    splits, and one that two sources have is the first one's.
    """

    exact_sizes: ClassVar[bool] = False

    sources: dict[str, Any]
    unreadable_share: float  # of the rows of a table, above which it is refused; fewer are left out
    train_rows: int  # at most, of each source; 0 for all
    probe_rows: int  # of all sources together, as are those below
    heldout_rows: int
    downstream_rows: int

    def __post_init__(self) -> None:
        remedy = "+task.sources.NAME='{path: questions.jsonl, weight: 1}' adds one"
        require(len(self.sources) >= 2, "task.sources", list(self.sources), "two tables or more", remedy)
        for name, fields in self.sources.items():
            rule = "letters, digits and _"
            require(re.fullmatch(r"\w+", name) is not None, "task.sources", repr(name), rule, "rename this source")
            weight = fields.get("weight") if isinstance(fields, Mapping) else None
            right = isinstance(weight, int | float) and 0 < weight < float("inf")
            require(right, f"task.sources.{name}.weight", weight, "a number above 0", "say how often it is drawn")
            for split in ("heldout", "downstream"):
                other = fields.get(split, {})
                remedy = f"write {split}: {{path: test.jsonl}}, or leave it out for questions of the source itself"
                rule = "a mapping of fields of a table"
                require(isinstance(other, Mapping), f"task.sources.{name}.{split}", repr(other), rule, remedy)
        super().__post_init__()
        require_share(self.unreadable_share)
        require(self.train_rows >= 0, "train_rows", self.train_rows, "at least 0", "0 takes all rows")
        for name in ("probe_rows", "heldout_rows", "downstream_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1", "evaluation asks such questions")

    @property
    def mixture(self) -> dict[str, float]:
        whole = sum(fields["weight"] for fields in self.sources.values())
        return {name: fields["weight"] / whole for name, fields in self.sources.items()}

    @property
    def at_hand(self) -> bool:
        return all(_table_task(self, name).at_hand for name in self.sources)

    def problems(self, split: str) -> tuple[Problem, ...]:
        self.require_split(split)
        return _mixed(self._written)[split]

    def notes(self) -> list[str]:
        return list(_notes(self._written))

    def fingerprint(self) -> dict[str, str]:
        with_details = any(problem.details for split in SPLITS for problem in self.problems(split))
        return {split: fingerprint(self.problems(split), with_details) for split in SPLITS}

    @property
    def _written(self) -> str:
        """The task as JSON, in which order matters; a key for what was read."""
        return json.dumps(vars(self), default=str)


def _table_task(task: MixtureTask, name: str) -> TableTask:
    """One source as a task of its own, with its share of the rows of evaluation."""
    given = {"split": "train", "question": "question", "answer": "answer", **task.sources[name]}
    apart = {split: dict(given.pop(split, {})) for split in ("heldout", "downstream")}
    del given["weight"]
    bounds = {name: given.pop(name, most) for name, most in (("lowest_pass_rate", 0.0), ("highest_pass_rate", 1.0))}
    own = Table.of(given, f"task.sources.{name}")
    tables = {
        split: Table.of({**vars(own), **fields}, f"task.sources.{name}.{split}") for split, fields in apart.items()
    }
    share = task.mixture[name]
    keys = ("probe_rows", "heldout_rows", "downstream_rows")
    rows: dict[str, Any] = {key: max(1, round(share * getattr(task, key))) for key in keys}
    return TableTask(
        **vars(own), **tables, **bounds, unreadable_share=task.unreadable_share, train_rows=task.train_rows, **rows,
        response_tokens=task.response_tokens, downstream_response_tokens=task.downstream_response_tokens,
        max_prompt_tokens=task.max_prompt_tokens,
    )  # fmt: skip


@cache
def _parts(written: str) -> tuple[dict[str, dict[str, list[TableRow]]], list[str]]:
    """Split -> source -> rows, no question twice; and what is said about those left out for that."""
    task = MixtureTask(**json.loads(written))
    divided = {name: _divided(_table_task(task, name)) for name in task.sources}
    parts: dict[str, dict[str, list[TableRow]]] = {}
    evaluated, notes = list[TableRow](), list[str]()
    for split in ("heldout", "downstream"):
        parts[split] = {}
        for name in task.sources:
            rows, seen = divided[name][split], {row.loose_key for row in evaluated}
            notes += also_evaluated(
                rows, evaluated, f"{split} questions of the source {name}", "asked elsewhere in evaluation"
            )
            parts[split][name] = [row for row in rows if row.loose_key not in seen]
            evaluated += parts[split][name]
    seen = {row.loose_key for row in evaluated}
    for name in task.sources:
        notes += also_evaluated(
            divided[name]["train"], evaluated, f"training questions of the source {name}", "asked in evaluation"
        )
    free = {name: [row for row in divided[name]["train"] if row.loose_key not in seen] for name in task.sources}
    agreeing, contradictory = by_question(row for rows in free.values() for row in rows)
    notes += notes_on_repetition(agreeing, contradictory, "the sources together")
    first = {id(rows[0]) for rows in agreeing}  # of the first source that has the question
    parts["train"] = {name: [row for row in rows if id(row) in first] for name, rows in free.items()}
    empty = [name for name, rows in parts["train"].items() if not rows]
    if empty:
        raise ValueError(
            f"every question of task.sources.{empty[0]} is also one of another source or of evaluation: leave it out, "
            "or put it first"
        )
    parts["probe"] = {name: _chosen(rows, _table_task(task, name).probe_rows) for name, rows in parts["train"].items()}
    return parts, notes


@cache
def _mixed(written: str) -> dict[str, tuple[Problem, ...]]:
    parts, _ = _parts(written)
    mixed = {}
    for split, by_source in parts.items():
        first = _FIRST_ID["train" if split == "probe" else split]
        found = [
            [replace(one, source=name) for one in _problems(rows, place * _IDS_OF_A_SOURCE + first)]
            for place, (name, rows) in enumerate(by_source.items())
        ]
        mixed[split] = tuple(problem for part in found for problem in part) if split == "train" else _interleaved(found)
    return mixed


def _interleaved(parts: Sequence[Sequence[Problem]]) -> tuple[Problem, ...]:
    """The problems of all parts, so that any beginning holds the same share of each: evaluation asks some first."""
    placed = [
        ((place + 0.5) / len(part), number, problem)
        for number, part in enumerate(parts)
        for place, problem in enumerate(part)
    ]
    return tuple(problem for *_, problem in sorted(placed, key=lambda one: one[:2]))


@cache
def _notes(written: str) -> tuple[str, ...]:
    parts, repeated = _parts(written)
    task, text = MixtureTask(**json.loads(written)), list[str]()
    for name in task.sources:
        source = _table_task(task, name)
        text += [*source.all_notes_on_reading(), *source.notes_on_rates(name)]
    questions = {
        split: [row.question for rows in by_source.values() for row in rows] for split, by_source in parts.items()
    }
    evaluated = {split: questions[split] for split in ("heldout", "downstream")}
    return (*dict.fromkeys(text), *repeated, *overlaps(questions["train"], evaluated))
