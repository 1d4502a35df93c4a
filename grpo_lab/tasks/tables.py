"""Tasks from data sets: of the hub, or a local file or folder, read by `datasets`."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_lab.tasks.base import SPLITS, Task
from grpo_lab.tasks.math_answers import last_box
from grpo_lab.tricks.base import require
from grpo_lab.tricks.question_filter import word_runs
from grpo_lab.types import Problem

if TYPE_CHECKING:
    from datasets import Dataset

BOXED = "boxed"
_FILES = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
_SPLIT_IDS = 10_000_000  # the ids that a split has room for
_FIRST_ID = {name: index * _SPLIT_IDS for index, name in enumerate(("train", "heldout", "downstream"))}
_FIRST_SUITE_ID = 100_000_000
OVERLAP_WORDS = 13  # in a row, as in the overlap checks of GPT-3 (arXiv:2005.14165) and Qwen2.5-Math (arXiv:2409.12122)
_NUMBER = r"-?\d+(\.\d*)?([eE][-+]?\d+)?"
_LARGEST_SHARE = 5  # a split that is kept apart takes at most one row in so many


@dataclass(frozen=True)
class Row:
    """A question and its right answer, as a table has them; `number` is the row's place there, from 0."""

    number: int
    question: str
    answer: str
    difficulty: int
    details: str = ""
    pass_rate: float | None = None  # in [0, 1]; None where the table has none

    @property
    def key(self) -> str:
        """The question without case and spacing: rows of one key are the same question."""
        return " ".join(self.question.casefold().split())


@dataclass(frozen=True)
class Table:
    """Rows of a data set: where they are, and where in a row question and answer are.

    `path` is an id on the hub, a local file (.jsonl, .json, .csv, .parquet, also compressed), or a folder: of such
    files, or written by `save_to_disk`. `question`, `answer` and `difficulty` are columns, or places within one, such
    as `reward_model.ground_truth` or `prompt.0.content`. The patterns are regular expressions, whose last match's first
    group is what is meant; `boxed` stands for what the last `\\boxed{}` holds. Empty texts: no subset, the newest
    revision, the whole column, no difficulty, no details, no pass rates. `details` is what else a grader needs, such as
    rubrics. `pass_rate` is a column with the share of some model's answers that were right, in [0, 1] or empty;
    without a column of difficulty that is 1 + round(100 (1 - rate)), and 101 where the rate is not known.
    """

    path: str
    subset: str
    split: str
    revision: str
    question: str
    answer: str
    question_pattern: str
    answer_pattern: str
    difficulty: str
    details: str
    pass_rate: str

    def __post_init__(self) -> None:
        for name in ("path", "split", "question", "answer"):
            require(bool(getattr(self, name)), name, "''", "a text", "say where the rows are and what they hold")
        remedy = r"write for example '####\s*(.+)', or boxed"
        for name in ("question_pattern", "answer_pattern"):
            pattern = getattr(self, name)
            try:
                groups = re.compile(pattern).groups
            except re.error as error:
                raise ValueError(f"{name} is no regular expression ({error}): {remedy}") from error
            require(pattern in ("", BOXED) or groups >= 1, name, repr(pattern), "a pattern with a group", remedy)

    @classmethod
    def of(cls, fields: Mapping[str, Any], whose: str) -> Table:
        """A table from its fields, empty texts left out. Raises ValueError that names a wrong or missing one."""
        optional = (
            "subset", "revision", "question_pattern", "answer_pattern", "difficulty", "details", "pass_rate",
        )  # fmt: skip
        empty = dict.fromkeys(optional, "")
        wrong = [name for name in fields if name not in Table.__dataclass_fields__]
        missing = [name for name in Table.__dataclass_fields__ if name not in {**empty, **fields}]
        require(not wrong, whose, wrong, f"made of {', '.join(Table.__dataclass_fields__)}", "correct the name")
        require(not missing, whose, f"nothing for {', '.join(missing)}", "complete", "add what is missing")
        return Table(**{**empty, **fields})

    @property
    def at_hand(self) -> bool:
        """Whether its rows are on this machine."""
        return Path(self.path).expanduser().exists()

    @property
    def source(self) -> tuple[str, str, str, str]:
        """What tells rows of two tables apart; how they are read does not. A file has one split."""
        file = _kind(Path(self.path)) is not None
        return (self.path, "", "", "") if file else (self.path, self.subset, self.split, self.revision)

    def rows(self) -> tuple[Row, ...]:
        """The rows in their order, each question once. Raises ValueError with a remedy for rows it cannot read."""
        return _rows(Table(**{name: getattr(self, name) for name in Table.__dataclass_fields__}))


@cache
def _rows(table: Table) -> tuple[Row, ...]:
    data = _open(table)
    if len(data) == 0:
        raise ValueError(_no_rows(table))
    questions = list(_parts(table, data, "question"))
    answers = list(_parts(table, data, "answer"))
    rates = _rates(table, data) if table.pass_rate else [None] * len(data)
    if table.difficulty:
        levels = _levels(_texts(table, data, table.difficulty, "difficulty"))
    else:
        levels = [1 + round(100 * (1 - (rate or 0.0))) if table.pass_rate else 1 for rate in rates]
    rows: dict[str, Row] = {}
    more = _texts(table, data, table.details, "details") if table.details else [""] * len(data)
    for number, (question, answer, level, details, rate) in enumerate(zip(questions, answers, levels, more, rates)):
        row = Row(number, question, answer, level, details, rate)
        rows.setdefault(row.key, row)
    return tuple(rows.values())


def _open(table: Table) -> Dataset:
    """The rows of a table. Raises ValueError that says what is missing and how to give a local copy."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    datasets.disable_progress_bars()
    place = Path(table.path).expanduser()
    kind = _kind(place)
    if kind is not None and place.is_file() and not place.stat().st_size:
        raise ValueError(_no_rows(table))
    if kind is not None and not place.exists():
        raise ValueError(f"there is no file {table.path}: give the path of an existing one")
    try:
        if place.is_file():
            if kind is None:
                raise ValueError(f"{table.path} must be a file of {', '.join(_FILES)}: convert it to one of these")
            return datasets.load_dataset(kind, data_files=str(place), split="train")
        if (place / "dataset_dict.json").exists() or (place / "state.json").exists():
            saved = datasets.load_from_disk(str(place))
            return saved if isinstance(saved, datasets.Dataset) else saved[table.split]
        # A set with several subsets refuses to be loaded without one, and lists them.
        where = str(place) if place.is_dir() else table.path
        revision = table.revision or None
        return datasets.load_dataset(where, table.subset or None, split=table.split, revision=revision)
    except KeyError as error:
        raise ValueError(f"{table.path} has no split {error}: choose one of those it has") from error
    except (ConnectionError, DatasetNotFoundError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
        raise ValueError(
            f"the data set {table.path!r} is no local file or folder, and the hub did not give it"
            f"{' (HF_HUB_OFFLINE is set)' if offline else ''}: {_first_line(error)}. Without a network, copy it on a "
            f"machine with one: `hf download --repo-type dataset {table.path} --local-dir FOLDER`, and give FOLDER as "
            "path; a data set behind a licence needs `hf auth login` first"
        ) from error
    except ValueError as error:
        if "corresponds to no data" in str(error):
            raise ValueError(_no_rows(table)) from error
        raise ValueError(f"{table.path} cannot be read: {_first_line(error)}") from error
    except Exception as error:  # damaged files: pyarrow's, pandas' and datasets' own errors share no class
        raise ValueError(
            f"{table.path} cannot be read ({type(error).__name__}: {_first_line(error)}): check the file, and that "
            "subset, split and revision exist"
        ) from error


def _no_rows(table: Table) -> str:
    return f"{table.path} has no rows in split {table.split!r}: choose another split or file"


def _kind(place: Path) -> str | None:
    """The reader of a file by its name, None for what is no file of a kind that is read."""
    return _FILES.get(next((suffix for suffix in reversed(place.suffixes) if suffix in _FILES), ""))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _texts(table: Table, data: Dataset, place: str, what: str) -> list[str]:
    """What stands in each row at `place`, as text."""
    column, *path = place.split(".")
    if place in data.column_names:  # a column whose name has a dot in it
        column, path = place, []
    if column not in data.column_names:
        known = ", ".join(data.column_names)
        raise ValueError(f"{table.path} has no column {column!r} for the {what}: set its {what} to one of {known}")
    found = []
    for number, value in enumerate(data[column]):
        try:
            value = _within(value, path)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            said = f"row {number} of {table.path} has nothing at {place!r} ({error})"
            raise ValueError(f"{said}: correct {what}, or the row") from error
        if what == "pass_rate" and value is None:
            value = ""
        if what == "details" and not isinstance(value, str):
            value = "" if value is None else json.dumps(value, ensure_ascii=False, default=str)
        if value is None or isinstance(value, Mapping | list):
            shown = "nothing" if value is None else f"{type(value).__name__} {str(value)[:80]}"
            raise ValueError(
                f"row {number} of {table.path} has {shown} as its {what}, which must be a text or a number: correct "
                f"the row, or set {what} to a place within it, such as {place}.0"
            )
        found.append(str(value).strip() if what != "question" else str(value))
    return found


def _within(value: Any, path: Sequence[str]) -> Any:
    for part in path:
        value = value[int(part)] if isinstance(value, list) else value[part]
    return value


def _parts(table: Table, data: Dataset, what: str) -> Iterator[str]:
    """The question or the answer of each row: the part of its column that the pattern names."""
    place, pattern = getattr(table, what), getattr(table, f"{what}_pattern")
    for number, text in enumerate(_texts(table, data, place, what)):
        if pattern == BOXED:
            part = (last_box(text) or "").strip()
        elif pattern:
            matches = list(re.finditer(pattern, text))
            part = matches[-1].group(1).strip() if matches else None
        else:
            part = text
        if not part:
            raise ValueError(
                f"row {number} of {table.path} holds no {what} by {what}_pattern={pattern!r}: its {place} ends "
                f"{text[-80:]!r}; correct the pattern or the row"
            )
        yield part


def _levels(texts: Sequence[str]) -> list[int]:
    """Levels of difficulty as whole numbers.

    The number in each text (Level 3); else the place among the sorted values, by size where all are numbers (0.25).
    """
    if any("." in text for text in texts) and all(re.fullmatch(_NUMBER, text) for text in texts):
        places = {value: place for place, value in enumerate(sorted({float(text) for text in texts}), start=1)}
        return [places[float(text)] for text in texts]
    numbers = [re.search(r"-?\d+", text) for text in texts]
    if all(numbers):
        return [int(number.group()) for number in numbers if number is not None]
    order = {text: place for place, text in enumerate(sorted(set(texts)), start=1)}
    return [order[text] for text in texts]


def _rates(table: Table, data: Dataset) -> list[float | None]:
    """The pass rate of each row; None for an empty one."""
    found: list[float | None] = []
    for number, text in enumerate(_texts(table, data, table.pass_rate, "pass_rate")):
        rate = float(text) if re.fullmatch(_NUMBER, text) else math.nan
        if text not in ("", "nan", "None") and not 0 <= rate <= 1:
            raise ValueError(
                f"row {number} of {table.path} has the pass rate {text!r}: it must be a share from 0 to 1, or empty"
            )
        found.append(None if math.isnan(rate) else rate)
    return found


@dataclass(frozen=True)
class TableTask(Table, Task):
    """A table of questions for training, and where held-out and downstream questions come from.

    `heldout` and `downstream` may name the training table again: then its rows are divided by a hash of the
    question, so many to each and at most a fifth. A training question that another table asks too is left out.

    With bounds other than 0 and 1, training questions whose `pass_rate` lies outside them or is not known are left out.
    """

    exact_sizes: ClassVar[bool] = False

    heldout: Table
    downstream: Table
    lowest_pass_rate: float
    highest_pass_rate: float
    train_rows: int  # at most; 0 for all
    probe_rows: int
    heldout_rows: int
    downstream_rows: int

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.lowest_pass_rate, self.highest_pass_rate
        require(0 <= low <= 1, "lowest_pass_rate", low, "in [0, 1]", "it is a share of answers")
        require(low <= high <= 1, "highest_pass_rate", high, f"between lowest_pass_rate ({low:g}) and 1", "mend either")
        remedy = "name the column of the rates, task.pass_rate=...; pass_rate=solvable measures your model's own"
        bounded = self.pass_rate != "" or not self._bounded
        require(bounded, "lowest_pass_rate, highest_pass_rate", f"{low:g}, {high:g}", "0 and 1 without rates", remedy)
        require(self.train_rows >= 0, "train_rows", self.train_rows, "at least 0", "0 takes all rows")
        for name in ("probe_rows", "heldout_rows", "downstream_rows"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1", "evaluation asks such questions")

    @property
    def _bounded(self) -> bool:
        return (self.lowest_pass_rate, self.highest_pass_rate) != (0, 1)

    @property
    def _wanted_rate(self) -> str:
        return f"{self.pass_rate} in [{self.lowest_pass_rate:g}, {self.highest_pass_rate:g}]"

    @property
    def at_hand(self) -> bool:
        return super().at_hand and self.heldout.at_hand and self.downstream.at_hand

    def within_bounds(self, row: Row) -> bool:
        """Whether the row may be trained on by its pass rate."""
        if not self._bounded:
            return True
        return row.pass_rate is not None and self.lowest_pass_rate <= row.pass_rate <= self.highest_pass_rate

    def notes_on_rates(self, name: str) -> list[str]:
        """How many rows of the table, called `name`, are not trained on for their pass rates; [] if none."""
        outside = sum(not self.within_bounds(row) for row in self.rows())
        return [f"{outside} of {len(self.rows())} questions of {name} have no {self._wanted_rate}"] if outside else []

    def problems(self, split: str) -> tuple[Problem, ...]:
        self.require_split(split)
        parts = _divided(self)
        if split == "probe":
            return _problems(_chosen(parts["train"], self.probe_rows), _FIRST_ID["train"])
        return _problems(parts[split], _FIRST_ID[split])

    def notes(self) -> list[str]:
        """What a reader of the results has to know: questions left out, and overlap that stays."""
        return list(_notes(self))

    def fingerprint(self) -> dict[str, str]:
        return {split: fingerprint(self.problems(split), bool(self.details)) for split in SPLITS}


def _hash(row: Row) -> bytes:
    return hashlib.sha256(row.key.encode("utf-8", "surrogatepass")).digest()


def _chosen(rows: Sequence[Row], number: int) -> list[Row]:
    """`number` of the rows, by their hash and so at random, in their own order."""
    chosen = {row.key for row in sorted(rows, key=_hash)[:number]}
    return [row for row in rows if row.key in chosen]


@cache
def _divided(task: TableTask) -> dict[str, list[Row]]:
    """The rows of train, heldout and downstream: no question in two of them."""
    tables = {"train": task, "heldout": task.heldout, "downstream": task.downstream}
    wanted = {"heldout": task.heldout_rows, "downstream": task.downstream_rows}
    parts: dict[str, list[Row]] = {}
    for split, number in wanted.items():
        taken = {row.key for part in parts.values() for row in part}
        rows = [row for row in tables[split].rows() if row.key not in taken]
        shares = [name for name, table in tables.items() if table.source == tables[split].source]
        if "train" in shares:
            most = len(task.rows()) // _LARGEST_SHARE
        elif len(shares) > 1 and split == "heldout":
            most = len(rows) // 2  # the other half is for downstream questions
        else:
            most = len(rows)
        parts[split] = _chosen(rows, min(number, most))
        if not parts[split]:
            raise ValueError(
                f"no rows are left for the split {split}: {tables[split].path} has {len(tables[split].rows())} "
                f"different questions; give a larger table, or set task.{split}.path to another one"
            )
    asked = {row.key for part in parts.values() for row in part}
    train = [row for row in task.rows() if row.key not in asked]
    if not train:
        raise ValueError(f"every question of {task.path} is also a held-out or downstream question: give another table")
    train = [row for row in train if task.within_bounds(row)]
    if not train:
        raise ValueError(f"no training question of {task.path} has a {task._wanted_rate}: widen the bounds")
    parts["train"] = _chosen(train, task.train_rows) if task.train_rows else train
    return parts


def _problems(rows: Sequence[Row], first: int) -> tuple[Problem, ...]:
    return tuple(
        Problem(first + row.number, row.question, row.answer, row.difficulty, details=row.details) for row in rows
    )


def suite_problems(tables: Mapping[str, Table], number: int) -> dict[str, tuple[Problem, ...]]:
    """At most `number` problems of each named table, with ids that no split of a task has."""
    first = itertools.count(_FIRST_SUITE_ID, _SPLIT_IDS)
    return {name: _problems(_chosen(table.rows(), number), next(first)) for name, table in tables.items()}


@cache
def _notes(task: TableTask) -> tuple[str, ...]:
    parts, said = _divided(task), []
    for split, table in (("heldout", task.heldout), ("downstream", task.downstream)):
        if table.source != task.source:
            also = len({row.key for row in task.rows()} & {row.key for row in parts[split]})
            if also:
                said.append(f"{also} questions of {task.path} are also {split} questions and were left out of training")
    said += task.notes_on_rates(task.path)
    for split, wanted in (("heldout", task.heldout_rows), ("downstream", task.downstream_rows)):
        if len(parts[split]) < wanted:
            said.append(f"{len(parts[split])} {split} questions were found for task.{split}_rows={wanted}")
    asked = {split: [row.question for row in parts[split]] for split in ("heldout", "downstream")}
    return (*said, *overlaps([row.question for row in parts["train"]], asked))


def overlaps(trained: Sequence[str], asked: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence for each named set in which some questions share OVERLAP_WORDS words in a row with a trained one."""
    known = {run for question in trained for run in word_runs(question, OVERLAP_WORDS)}
    said = []
    for name, questions in asked.items():
        alike = [question for question in questions if not known.isdisjoint(word_runs(question, OVERLAP_WORDS))]
        if alike:
            said.append(
                f"{len(alike)} of {len(questions)} {name} questions share {OVERLAP_WORDS} words in a row with a "
                f"training question, such as {alike[0][:60]!r}: their accuracy may be memory"
            )
    return said


def fingerprint(problems: Sequence[Problem], with_details: bool = False) -> str:
    """Sixteen hexadecimal digits of a hash of all questions and answers in their order."""
    whole = hashlib.sha256()
    for problem in problems:
        details = f"\0{problem.details}" if with_details else ""
        text = f"{problem.id}\0{problem.question}\0{problem.answer}\0{problem.difficulty}{details}\n{problem.source}"
        whole.update(text.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()[:16]
