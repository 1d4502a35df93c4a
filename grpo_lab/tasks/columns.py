"""The columns of a data set: JSON and CSV files as they are written, everything else as `datasets` reads it."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from datasets import Dataset

_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet"}
_TEXT = ("json", "csv")  # kinds of file in which numbers and dates are texts
_LONGEST_CELL = 2**31 - 1


@dataclass(frozen=True)
class Columns:
    """A table by its columns.

    `types` are those of the columns that `datasets` took from files of text for numbers, dates or truth values: these
    may no longer be as they were written.
    """

    columns: Mapping[str, Sequence[Any]]
    types: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))


class Number(float):
    """A number with a fraction or an exponent, which is shown as it was written: 0.50, 1e3."""

    written: str

    def __new__(cls, written: str) -> Number:
        number = super().__new__(cls, written)
        number.written = written
        return number

    def __str__(self) -> str:
        return self.written


def as_text(value: Any) -> str:
    """A value of a typed column as people write it: 5 for 5.0, 0.0000001 for 1e-07, a date without a time of 0:00."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not isinstance(value, Number):
        return format(Decimal(str(value)), "f").removesuffix(".0")
    if isinstance(value, Decimal):
        return format(value, "f")
    return str(value).removesuffix(" 00:00:00") if isinstance(value, datetime) else str(value)


def is_file(path: str) -> bool:
    """True if a path names a file that is read here, by its suffix."""
    return _kind(path) is not None


def open_columns(path: str, subset: str, split: str, revision: str) -> Columns:
    """Read a data set by columns. Raises ValueError that names what is missing and how to provide a local copy."""
    import datasets
    from datasets.exceptions import DatasetNotFoundError

    datasets.disable_progress_bars()
    place, none = Path(path).expanduser(), f"{path} has no rows in split {split!r}: choose another split or file"
    if is_file(path) and not place.exists():
        raise ValueError(f"there is no file {path}: give the path of an existing one")
    try:
        if place.is_file():
            columns = _of_file(place)
        elif (place / "dataset_dict.json").exists() or (place / "state.json").exists():
            saved = datasets.load_from_disk(str(place))
            columns = _of_dataset(saved if isinstance(saved, datasets.Dataset) else saved[split])
        elif place.is_dir():
            columns = _of_folder(place, subset, split)
        else:  # a set with several subsets refuses to be loaded without one, and lists them
            columns = _of_dataset(datasets.load_dataset(path, subset or None, split=split, revision=revision or None))
    except KeyError as error:
        raise ValueError(f"{path} has no split {error}: choose one of those it has") from error
    except (ConnectionError, DatasetNotFoundError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("HF_DATASETS_OFFLINE")
        raise ValueError(
            f"the data set {path!r} is no local file or folder, and the hub did not give it"
            f"{' (HF_HUB_OFFLINE is set)' if offline else ''}: {_first_line(error)}. Without a network, copy it on a "
            f"machine with one: `hf download --repo-type dataset {path} --local-dir FOLDER`, and give FOLDER as "
            "path; a data set behind a licence needs `hf auth login` first"
        ) from error
    except _Malformed:
        raise
    except Exception as error:  # damaged files: pyarrow's and datasets' own errors, and decompressors', share no class
        if "corresponds to no data" in str(error):
            raise ValueError(none) from error
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}): check the file, and that "
            "subset, split and revision exist"
        ) from error
    if len(columns) == 0:
        raise ValueError(none)
    return columns


class _Malformed(ValueError):
    """A file that is not what its name says; the message names the line and the remedy."""


def _kind(path: str) -> str | None:
    """The reader for a file name, by its suffix; None for other files."""
    return _KINDS.get(next((suffix for suffix in reversed(Path(path).suffixes) if suffix in _KINDS), ""))


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _of_dataset(data: Dataset) -> Columns:
    """The columns of what `datasets` has read; they are decoded when they are asked for."""
    import datasets

    columns: dict[str, Sequence[Any]] = {name: data[name] for name in data.column_names}
    types = {name: kind.dtype for name, kind in data.features.items() if isinstance(kind, datasets.Value)}
    for name in (name for name, kind in types.items() if kind in ("float16", "float32")):
        digits = np.dtype(types[name]).type  # 0.1 in 32 bits is no 0.10000000149011612
        columns[name] = [None if value is None else float(str(digits(value))) for value in columns[name]]
    if data.info.builder_name not in _TEXT:
        return Columns(columns)
    same = ("string", "large_string", *(("int64",) if data.info.builder_name == "json" else ()))
    return Columns(columns, {name: kind for name, kind in types.items() if kind not in same})


def _of_folder(folder: Path, subset: str, split: str) -> Columns:
    """The rows of a split of a folder: `datasets` finds its files, and those of text are read as they are written."""
    import datasets

    if odd := set("*?[]") & set(str(folder)):
        remedy = "rename it, or give one of its files"
        raise _Malformed(f"`datasets` takes {' '.join(sorted(odd))} in the folder name {folder} for patterns: {remedy}")
    builder = datasets.load_dataset_builder(str(folder), subset or None)
    files: Mapping[Any, Sequence[str]] = builder.config.data_files or {}
    kinds = {_kind(file) for part in files.values() for file in part}
    if not kinds or not kinds <= set(_TEXT):
        return _of_dataset(datasets.load_dataset(str(folder), subset or None, split=split))
    if split in files:
        return _of_rows([row for file in files[split] for row in _rows(Path(file))])
    rows = {str(name): [row for file in part for row in _rows(Path(file))] for name, part in files.items()}
    instruction = datasets.ReadInstruction.from_spec(split).to_absolute(
        {name: len(part) for name, part in rows.items()}
    )
    return _of_rows([row for one in instruction for row in rows[one.splitname][one.from_ : one.to]])


def _of_file(path: Path) -> Columns:
    kind = _kind(path.name)
    if kind is None:
        raise _Malformed(f"{path} must be a file of {', '.join(_KINDS)}: convert it to one of these")
    if kind in _TEXT:
        return _of_rows(list(_rows(path)))
    import datasets
    import pyarrow.parquet as pq

    return _of_dataset(datasets.Dataset(pq.ParquetFile(io.BytesIO(_content(path))).read()))


def _of_rows(rows: Sequence[Mapping[str, Any]]) -> Columns:
    names = dict.fromkeys(name for row in rows for name in row)
    return Columns({name: [row.get(name) for row in rows] for name in names})


def _content(path: Path) -> Any:
    """The bytes of a file, decompressed as its last suffix says."""
    from fsspec.implementations.local import LocalFileSystem

    with LocalFileSystem().open(str(path.absolute()), "rb", compression="infer") as stream:
        return stream.read()


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a JSON or CSV file. Raises _Malformed for a line that cannot be read."""
    content = _content(path)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise _Malformed(
            f"{path}, line {line}: the byte 0x{content[error.start]:02x} is not UTF-8: save it as UTF-8, with "
            "`iconv -f latin1 -t utf-8` for example; the name of a compressed file ends in .gz, .bz2, .xz, .zst or .zip"
        ) from error
    return _json_rows(text, path) if _kind(path.name) == "json" else _csv_rows(text, path)


def _json_rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON file: one a line, or a list of them."""
    whole = text.lstrip().startswith("[")
    parts = [(1, text)] if whole else list(enumerate(text.split("\n"), start=1))
    remedy = "write one JSON object a line, or a list of objects"
    for number, part in ((number, part) for number, part in parts if part.strip()):
        try:
            found = json.loads(part, parse_float=Number, parse_int=_integer, parse_constant=_constant)
        except json.JSONDecodeError as error:
            place = f"{path}, line {number + error.lineno - 1}, column {error.colno}"
            raise _Malformed(f"{place}: no JSON ({error.msg}): {remedy}") from error
        except RecursionError as error:
            raise _Malformed(f"{path}, line {number}: JSON that is nested too deep: {remedy}") from error
        for place, row in enumerate(found if whole else [found]):
            if not isinstance(row, dict):
                where = f"element {place}" if whole else f"line {number}"
                raise _Malformed(f"{path}, {where}: {str(row)[:60]!r} is no object with a question in it: {remedy}")
            yield row


def _integer(written: str) -> int | str:
    """A whole number; as text if it has more digits than Python converts."""
    try:
        return int(written)
    except ValueError:
        return written


def _constant(name: str) -> str | None:
    """`NaN`, with which pandas and numpy write a missing number, is one; `Infinity` stays as it is written."""
    return None if name == "NaN" else name


def _csv_rows(text: str, path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a table of cells separated by commas or tabs; an empty cell is a missing one."""
    csv.field_size_limit(_LONGEST_CELL)
    separator = "\t" if ".tsv" in path.suffixes else ","
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        names = next(lines, [])
        if twice := {name for name in names if names.count(name) > 1}:
            raise _Malformed(f"{path}, line 1: two columns have the name {min(twice)!r}: rename one")
        for cells in lines:
            if len(cells) > len(names):
                raise _Malformed(
                    f"{path}, line {lines.line_num}: {len(cells)} cells under {len(names)} columns: put a text that "
                    f"contains {separator!r} in quotation marks"
                )
            if cells:
                yield {name: cell or None for name, cell in zip_longest(names, cells)}
    except csv.Error as error:
        remedy = 'close every quotation mark, and write "" for one within a text'
        raise _Malformed(f"{path}, line {lines.line_num}: {error}: {remedy}") from error
