"""Tasks from data sets: of the hub, or a local file or folder."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.checks import require
from grpo_lab.tasks.base import SPLITS, ExternalTask
from grpo_lab.tasks.columns import Columns, as_text, is_file, open_columns
from grpo_lab.tasks.math_answers import last_box
from grpo_lab.tricks.question_filter import word_runs
from grpo_lab.types import Problem

BOXED = "boxed"
_FIELDS = ("question", "answer", "difficulty", "details", "pass_rate")  # of a table: what stands in a row
_USER, _SYSTEM = ("user", "human"), ("system", "developer")  # roles of chat messages
_SPLIT_IDS = 10_000_000  # the ids that a split has room for
_FIRST_ID = {name: index * _SPLIT_IDS for index, name in enumerate(("train", "heldout", "downstream"))}
_FIRST_SUITE_ID = 100_000_000
OVERLAP_WORDS = 13  # in a row, as in the overlap checks of GPT-3 (arXiv:2005.14165) and Qwen2.5-Math (arXiv:2409.12122)
_NUMBER = r"-?\d+(\.\d*)?([eE][-+]?\d+)?"
ALL = "*"  # as `details`: all columns
_LARGEST_SHARE = 5  # a split that is kept apart takes at most one row in so many


@dataclass(frozen=True)
class TableRow:
    """A question and its right answer, as a table has them; `number` is the row's place there, from 0."""

    number: int
    question: str
    answer: str
    difficulty: int
    details: str = ""
    pass_rate: float | None = None  # in [0, 1]; None where the table has none

    @property
    def key(self) -> str:
        """The question without blanks around it: rows of one key are the same question."""
        return self.question.strip()

    @property
    def loose_key(self) -> str:
        """The question without case and spacing: rows that agree in it are never in two splits."""
        return " ".join(self.question.casefold().split())


@dataclass(frozen=True)
class Table:
    """Rows of a data set: where they are, and where in a row question and answer are.

    `path` is an id on the hub, a local file (.jsonl, .json, .csv, .tsv, .parquet, also compressed), or a folder: of
    such files, or written by `save_to_disk`. `question`, `answer` and `difficulty` are columns, or places within one,
    such as `reward_model.ground_truth`. A question may stand in several columns, `Body+Question`, or in a list of chat
    messages, whose only user message it is. The patterns are regular expressions, whose last match's first group is
    what is meant; `boxed` stands for what the last `\\boxed{}` holds. Empty texts: no subset, the newest revision, the
    whole column, no difficulty, no details, no pass rates. `details` is what else a grader needs, such as rubrics: a
    column, several (`level+topic`), or `*` for all.
    `pass_rate` is a column with the share of some model's answers that were right, in [0, 1] or empty; without a
    column of difficulty that is 1 + round(100 (1 - rate)), and 101 where the rate is not known.
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
        """True if its rows are on this machine."""
        return Path(self.path).expanduser().exists()

    @property
    def source(self) -> tuple[str, str, str, str]:
        """The key that distinguishes rows of two tables, whichever way they are read. A file has one split."""
        return (self.path, "", "", "") if is_file(self.path) else (self.path, self.subset, self.split, self.revision)

    def rows(self) -> tuple[TableRow, ...]:
        """The usable rows in their order, each question once. Raises ValueError with a remedy if there are none."""
        return self._reading.rows

    def notes_on_reading(self) -> list[str]:
        """A sentence for each reason for which rows, or messages in them, are not asked; with an example."""
        return list(self._reading.notes)

    def require_usable(self, share: float, key: str) -> None:
        """Raise ValueError if more of the rows are unusable than `share`, the value of the setting `key`, allows."""
        reading = self._reading
        if reading.unusable > share * reading.number:
            raise ValueError(
                f"{reading.unusable} of {reading.number} rows of {self.path} cannot be used, more than {key}={share:g} "
                f"allows: {reading.why}. Correct the rows or where they are read, or raise {key} to leave them out"
            )

    @property
    def _reading(self) -> TableContents:
        return _read(Table(**{name: getattr(self, name) for name in Table.__dataclass_fields__}))


@dataclass(frozen=True)
class TableContents:
    """The result of reading a table: usable rows, each question once, and notes on the rows left out."""

    rows: tuple[TableRow, ...]
    number: int  # of all rows
    unusable: int  # rows that cannot be read, and those of a question with several answers
    why: str  # some of them are unusable; "" where none is
    notes: tuple[str, ...]


class _Unusable(ValueError):
    """The reason a row is unusable."""


@dataclass(frozen=True)
class _ColumnPath:
    """Where in a row something stands: a column, and the steps from there into what it holds."""

    written: str
    column: str
    steps: tuple[str, ...]


@cache
def _read(table: Table) -> TableContents:
    data = open_columns(table.path, table.subset, table.split, table.revision)
    places = {name: _places(table, data.columns, name) for name in _FIELDS if getattr(table, name)}
    columns = {place.column: data.columns[place.column] for found in places.values() for place in found}
    read: list[tuple[TableRow, str]] = []  # with the text of its level
    unreadable, systems = list[str](), list[str]()
    for number, values in enumerate(zip(*columns.values())):
        try:
            row, level, system = _row(table, places, number, dict(zip(columns, values)))
        except _Unusable as error:
            unreadable.append(f"row {number} {error}")
            continue
        read.append((row, level))
        systems += [system] if system else []
    levels = _levels([level for _, level in read]) if table.difficulty else [row.difficulty for row, _ in read]
    agreeing, contradictory = by_question(replace(row, difficulty=level) for (row, _), level in zip(read, levels))
    why = "; ".join([*unreadable[:2], *(_two_answers(rows) for rows in contradictory[:1])])
    if not agreeing:
        raise ValueError(f"no row of {table.path} can be used: {why}")
    return TableContents(
        rows=tuple(rows[0] for rows in agreeing),
        number=len(data),
        unusable=len(unreadable) + sum(map(len, contradictory)),
        why=why,
        notes=tuple(_said(table, data, places, unreadable, systems, contradictory, agreeing)),
    )


def _said(
    table: Table,
    data: Columns,
    places: Mapping[str, Sequence[_ColumnPath]],
    unreadable: Sequence[str],
    systems: Sequence[str],
    contradictory: Sequence[Sequence[TableRow]],
    agreeing: Sequence[Sequence[TableRow]],
) -> Iterator[str]:
    """Notes on how a table was read, for readers of the results."""
    if unreadable:
        yield f"{len(unreadable)} of {len(data)} rows of {table.path} cannot be read and were left out: {unreadable[0]}"
    yield from notes_on_repetition(agreeing, contradictory, table.path)
    if systems:
        yield (
            f"{len(systems)} of {len(data)} rows of {table.path} have a system message, such as {systems[0][:60]!r}, "
            "which is not asked: template.system writes one for all questions"
        )
    for name in ("question", "answer"):
        if kinds := {data.types[place.column] for place in places[name] if place.column in data.types}:
            yield (
                f"datasets took each {name} of {table.path} for {', '.join(sorted(kinds))}, which may not be as it is "
                "written: download the files and give their folder as path, where texts and numbers stay as they are"
            )


def by_question(rows: Iterable[TableRow]) -> tuple[list[list[TableRow]], list[list[TableRow]]]:
    """The rows of each question: first of those whose rows agree on the answer, then of those whose rows do not."""
    found: dict[str, list[TableRow]] = {}
    for row in rows:
        found.setdefault(row.key, []).append(row)
    answers = [(rows, len({row.answer for row in rows})) for rows in found.values()]
    return [rows for rows, number in answers if number == 1], [rows for rows, number in answers if number > 1]


def notes_on_repetition(
    agreeing: Sequence[Sequence[TableRow]], contradictory: Sequence[Sequence[TableRow]], of: str
) -> Iterator[str]:
    """A sentence on questions that stand several times, and one on those of them with several answers."""
    if contradictory:
        number, example = sum(map(len, contradictory)), _two_answers(contradictory[0])
        yield f"{number} rows of {of} contradict each other and were left out: {example}"
    if again := [row for rows in agreeing for row in rows[1:]]:
        shown = repr(again[0].question.strip()[:60])
        yield f"{len(again)} rows of {of} repeat a question and its answer, such as {shown}; each is asked once"


def _two_answers(rows: Sequence[TableRow]) -> str:
    """A question with several answers, for people."""
    first, other = list(dict.fromkeys(row.answer for row in rows))[:2]
    return (
        f"{rows[0].question.strip()[-60:]!r} has the answers {first[:40]!r} and {other[:40]!r} (if its first half "
        "stands in a column of its own, name both, such as question=Body+Question)"
    )


def _places(table: Table, columns: Mapping[str, Any], what: str) -> list[_ColumnPath]:
    """Where in a row the question, or something else, stands. Raises ValueError for an unknown column."""
    written = getattr(table, what)
    if what == "details" and written == ALL and written not in columns:
        return [_ColumnPath(column, column, ()) for column in columns]
    found = []
    for one in [written] if what not in ("question", "details") or written in columns else written.split("+"):
        column, *steps = (one,) if one in columns else one.split(".")  # the name of a column may have a dot in it
        if column not in columns:
            known = ", ".join(columns)
            raise ValueError(f"{table.path} has no column {column!r} for the {what}: set its {what} to one of {known}")
        found.append(_ColumnPath(one, column, tuple(steps)))
    return found


def _row(
    table: Table, places: Mapping[str, Sequence[_ColumnPath]], number: int, values: Mapping[str, Any]
) -> tuple[TableRow, str, str]:
    """A row, the text of its level, and the system message beside its question. Raises _Unusable."""

    def text(what: str) -> str:
        (place,) = places[what]
        return _text(_at(place, values[place.column], what)[0], place, what).strip()

    parts = [(place, *_at(place, values[place.column], "question")) for place in places["question"]]
    if len(parts) == 1:
        (place, value, _) = parts[0]
        question = _text(value, place, "question")
    else:  # one of several parts may be empty
        question = " ".join(_text(value, place, "question").strip() for place, value, _ in parts if value is not None)
    rate = _rate(places["pass_rate"][0], values) if table.pass_rate else None
    row = TableRow(
        number,
        _part(question, "question", table.question, table.question_pattern),
        _part(text("answer"), "answer", table.answer, table.answer_pattern),
        1 + round(100 * (1 - (rate or 0.0))) if table.pass_rate else 1,
        _details(places["details"], values) if table.details else "",
        rate,
    )
    return row, text("difficulty") if table.difficulty else "", next((message for *_, message in parts if message), "")


def _at(place: _ColumnPath, value: Any, what: str) -> tuple[Any, str]:
    """The value at a place of a row, and the system message of the conversation that it is from.

    Of a conversation the question is the user's message. Raises _Unusable if there is none, or more to read than that.
    """
    system = ""
    for step in (*place.steps, None):
        if messages := _messages(value):
            system = next((str(content) for role, content in messages if role in _SYSTEM), system)
            if step is None and what == "question":
                return _user_message(messages, place), system
        elif step in ("content", "value") and (message := _message(value)):
            _require_role(message[0], place, what)
        if step is not None:
            try:
                value = value[int(step)] if isinstance(value, list) else value[step]
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise _Unusable(f"has nothing at {place.written!r} ({error})") from error
    return value, system


def _message(value: Any) -> tuple[str, Any] | None:
    """Role and content of a chat message, in the words of OpenAI or ShareGPT; None for what is no message."""
    for role, content in (("role", "content"), ("from", "value")):
        if isinstance(value, Mapping) and role in value and content in value:
            return str(value[role]).lower(), value[content]
    return None


def _messages(value: Any) -> list[tuple[str, Any]]:
    """Role and content of each message of a conversation; [] for what is none."""
    found = [_message(one) for one in value] if isinstance(value, list) else []
    return [message for message in found if message] if all(found) else []


def _user_message(messages: Sequence[tuple[str, Any]], place: _ColumnPath) -> Any:
    """The user's message of a conversation. Raises _Unusable if others precede it, or there is none."""
    roles = [role for role, _ in messages]
    before = next((number for number, role in enumerate(roles) if role in _USER), len(roles))
    users = sum(role in _USER for role in roles)
    if users != 1 or any(role not in _SYSTEM for role in roles[:before]):
        raise _Unusable(
            f"has at {place.written!r} a conversation of {', '.join(roles)}, and a question is one user message with "
            f"nothing but a system message before it: to ask one without the others, set {place.written}.-1.content"
        )
    return messages[before][1]


def _require_role(role: str, place: _ColumnPath, what: str) -> None:
    """Raise _Unusable for a message that is no question, or no answer, by its role."""
    conversation = ".".join((place.column, *place.steps[:-2]))
    if what == "question" and role not in _USER:
        remedy = f"set question to {conversation}, of which the user's message is taken"
        raise _Unusable(f"has at {place.written!r} a message of the role {role}, which is no question: {remedy}")
    if what == "answer" and role in (*_USER, *_SYSTEM):
        remedy = f"set answer to the message that answers, such as {conversation}.-1.{place.steps[-1]}"
        raise _Unusable(f"has at {place.written!r} a message of the role {role}, which is no answer: {remedy}")


def _text(value: Any, place: _ColumnPath, what: str) -> str:
    """A text or a number as it is written. Raises _Unusable for anything else."""
    if value is None or value != value:
        raise _Unusable(f"has nothing as its {what}")
    if isinstance(value, Mapping | list | bytes):
        inner = "0" if isinstance(value, list) else next(iter(value), "") if isinstance(value, Mapping) else ""
        within = f"set {what} to a place within it, such as {place.written}.{inner}" if inner else "write it as a text"
        raise _Unusable(
            f"has {type(value).__name__} {str(value)[:80]} as its {what}, which must be a text or a number: "
            f"correct the row, or {within}"
        )
    return as_text(value)


def _part(text: str, what: str, place: str, pattern: str) -> str:
    """The part of a text that the pattern means. Raises _Unusable if there is none."""
    part = text
    if pattern == BOXED:
        part = (last_box(text) or "").strip()
    elif pattern:
        matches = list(re.finditer(pattern, text))
        part = (matches[-1].group(1) or "").strip() if matches else ""
    if part.strip():
        return part
    if not text.strip():
        raise _Unusable(f"holds no {what}: its {place} is empty")
    raise _Unusable(
        f"holds no {what} by {what}_pattern={pattern!r}: its {place} ends {text[-80:]!r}; correct the pattern or "
        "the row"
    )


def _details(places: Sequence[_ColumnPath], values: Mapping[str, Any]) -> str:
    """More input of a grader: a text as it is, anything else as JSON; several columns as an object of their names."""
    found = {place.written: _at(place, values[place.column], "details")[0] for place in places}
    value = found if len(places) > 1 else next(iter(found.values()))
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, ensure_ascii=False, default=str)


def _rate(place: _ColumnPath, values: Mapping[str, Any]) -> float | None:
    """The pass rate of a row; None for an empty one. Raises _Unusable unless it is a share."""
    value, _ = _at(place, values[place.column], "pass_rate")
    text = "" if value is None else as_text(value).strip()
    if text.lower() in ("", "nan", "none"):
        return None
    if not re.fullmatch(_NUMBER, text) or not 0 <= float(text) <= 1:
        raise _Unusable(f"has the pass rate {text!r}: it must be a share from 0 to 1, or empty")
    return float(text)


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


@dataclass(frozen=True)
class TableTask(Table, ExternalTask):
    """A table of questions for training, and where held-out and downstream questions come from.

    `heldout` and `downstream` may name the training table again: then its rows are divided by a hash of the question,
    an equal number to each and at most a fifth. A training question that is asked there too is left out, also if it
    differs in case or blanks.

    With bounds other than 0 and 1, training questions whose `pass_rate` lies outside them or is not known are left out.
    """

    exact_sizes: ClassVar[bool] = False

    heldout: Table
    downstream: Table
    lowest_pass_rate: float
    highest_pass_rate: float
    unreadable_share: float  # of the rows of a table, above which it is refused; fewer are left out
    train_rows: int  # at most; 0 for all
    probe_rows: int
    heldout_rows: int
    downstream_rows: int

    def __post_init__(self) -> None:
        Table.__post_init__(self)
        ExternalTask.__post_init__(self)
        require_share(self.unreadable_share)
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
    def _rate_in_bounds(self) -> str:
        return f"{self.pass_rate} in [{self.lowest_pass_rate:g}, {self.highest_pass_rate:g}]"

    @property
    def at_hand(self) -> bool:
        return super().at_hand and self.heldout.at_hand and self.downstream.at_hand

    def within_bounds(self, row: TableRow) -> bool:
        """True if the row may be trained on by its pass rate."""
        if not self._bounded:
            return True
        return row.pass_rate is not None and self.lowest_pass_rate <= row.pass_rate <= self.highest_pass_rate

    def all_notes_on_reading(self) -> list[str]:
        """Notes on how the tables of all splits were read, without duplicates."""
        tables = (self, self.heldout, self.downstream)
        return list(dict.fromkeys(note for table in tables for note in table.notes_on_reading()))

    def notes_on_rates(self, name: str) -> list[str]:
        """How many rows of the table, called `name`, are not trained on for their pass rates; [] if none."""
        outside = sum(not self.within_bounds(row) for row in self.rows())
        return (
            [f"{outside} of {len(self.rows())} questions of {name} have no {self._rate_in_bounds}"] if outside else []
        )

    def problems(self, split: str) -> tuple[Problem, ...]:
        self.require_split(split)
        parts = _divided(self)
        if split == "probe":
            return _problems(_chosen(parts["train"], self.probe_rows), _FIRST_ID["train"])
        return _problems(parts[split], _FIRST_ID[split])

    def notes(self) -> list[str]:
        """Notes for readers of the results: questions left out, and remaining overlap."""
        return list(_notes(self))

    def fingerprint(self) -> dict[str, str]:
        return {split: fingerprint(self.problems(split), bool(self.details)) for split in SPLITS}


def require_share(share: float) -> None:
    """Raise ValueError unless `unreadable_share` is a share."""
    require(0 <= share <= 1, "unreadable_share", share, "in [0, 1]", "it is a share of the rows of a table")


def _hash(row: TableRow) -> tuple[bytes, str]:
    return hashlib.sha256(row.loose_key.encode("utf-8", "surrogatepass")).digest(), row.question


def _chosen(rows: Sequence[TableRow], number: int) -> list[TableRow]:
    """`number` of the rows of a table, by their hash and so at random, in their own order."""
    chosen = {row.number for row in sorted(rows, key=_hash)[:number]}
    return [row for row in rows if row.number in chosen]


@cache
def _divided(task: TableTask) -> dict[str, list[TableRow]]:
    """The rows of train, heldout and downstream: no question in two of them, however it is spaced or capitalised."""
    tables = {"train": task, "heldout": task.heldout, "downstream": task.downstream}
    for table in tables.values():
        table.require_usable(task.unreadable_share, "task.unreadable_share")
    sizes = {"heldout": task.heldout_rows, "downstream": task.downstream_rows}
    parts: dict[str, list[TableRow]] = {}
    for split, number in sizes.items():
        taken = {row.loose_key for part in parts.values() for row in part}
        rows = [row for row in tables[split].rows() if row.loose_key not in taken]
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
    evaluated = {row.loose_key for part in parts.values() for row in part}
    train = [row for row in task.rows() if row.loose_key not in evaluated]
    if not train:
        raise ValueError(f"every question of {task.path} is also a held-out or downstream question: give another table")
    train = [row for row in train if task.within_bounds(row)]
    if not train:
        raise ValueError(f"no training question of {task.path} has a {task._rate_in_bounds}: widen the bounds")
    parts["train"] = _chosen(train, task.train_rows) if task.train_rows else train
    return parts


def _problems(rows: Sequence[TableRow], first: int) -> tuple[Problem, ...]:
    return tuple(
        Problem(first + row.number, row.question, row.answer, row.difficulty, details=row.details) for row in rows
    )


def suite_problems(tables: Mapping[str, Table], number: int, share: float) -> dict[str, tuple[Problem, ...]]:
    """At most `number` problems of each named table, with ids that no split of a task has.

    Raises ValueError for a table with more unusable rows than `share`.
    """
    for table in tables.values():
        table.require_usable(share, "evaluation.unreadable_share")
    first = itertools.count(_FIRST_SUITE_ID, _SPLIT_IDS)
    return {name: _problems(_chosen(table.rows(), number), next(first)) for name, table in tables.items()}


def also_evaluated(rows: Iterable[TableRow], evaluated: Iterable[TableRow], of: str, where: str) -> list[str]:
    """A sentence on those rows that are also asked somewhere else, and so left out; [] for none."""
    others = {row.loose_key: row for row in evaluated}
    pairs = [(row, others[row.loose_key]) for row in rows if row.loose_key in others]
    if not pairs:
        return []
    text = f"{len(pairs)} {of} are also {where} and were left out"
    if looser := [(row, other) for row, other in pairs if row.key != other.key]:
        shown = " and ".join(repr(one.question.strip()[:60]) for one in looser[0])
        text += f"; {len(looser)} of them are the same but for case and blanks, such as {shown}"
    if contrary := [(row, other) for row, other in pairs if row.key == other.key and row.answer != other.answer]:
        shown = f"{contrary[0][0].answer[:40]!r} and {contrary[0][1].answer[:40]!r}"
        text += f"; {len(contrary)} of them have another answer there, such as {shown}"
    return [text]


@cache
def _notes(task: TableTask) -> tuple[str, ...]:
    parts, notes = _divided(task), []
    tables = {"train": task, "heldout": task.heldout, "downstream": task.downstream}
    notes += task.all_notes_on_reading()
    for split in ("heldout", "downstream"):
        # Of one table the rows that are asked are no training rows to begin with.
        same = tables[split].source == task.source
        evaluated = {row.number for row in parts[split]} if same else set()
        rows = [row for row in task.rows() if row.number not in evaluated]
        notes += also_evaluated(rows, parts[split], f"training questions of {task.path}", f"{split} questions")
    notes += task.notes_on_rates(task.path)
    for split, size in (("heldout", task.heldout_rows), ("downstream", task.downstream_rows)):
        if len(parts[split]) < size:
            notes.append(f"{len(parts[split])} {split} questions were found for task.{split}_rows={size}")
    evaluated = {split: [row.question for row in parts[split]] for split in ("heldout", "downstream")}
    return (*notes, *overlaps([row.question for row in parts["train"]], evaluated))


def overlaps(trained: Sequence[str], evaluated: Mapping[str, Sequence[str]]) -> list[str]:
    """A sentence for each named set in which some questions share OVERLAP_WORDS words in a row with a trained one."""
    known = {run for question in trained for run in word_runs(question, OVERLAP_WORDS)}
    notes = []
    for name, questions in evaluated.items():
        alike = [question for question in questions if not known.isdisjoint(word_runs(question, OVERLAP_WORDS))]
        if alike:
            notes.append(
                f"{len(alike)} of {len(questions)} {name} questions share {OVERLAP_WORDS} words in a row with a "
                f"training question, such as {alike[0][:60]!r}: their accuracy may be memory"
            )
    return notes


def fingerprint(problems: Sequence[Problem], with_details: bool = False) -> str:
    """Sixteen hexadecimal digits of a hash of all questions and answers in their order."""
    whole = hashlib.sha256()
    for problem in problems:
        details = f"\0{problem.details}" if with_details else ""
        text = f"{problem.id}\0{problem.question}\0{problem.answer}\0{problem.difficulty}{details}\n{problem.source}"
        whole.update(text.encode("utf-8", "surrogatepass"))
    return whole.hexdigest()[:16]
