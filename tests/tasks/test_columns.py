"""Data files: texts and numbers arrive as they are written, names are no patterns, and a bad line is named."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import zipfile
from collections.abc import Callable
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_lab.tasks.columns import open_columns
from grpo_lab.tasks.tables import Table

# What `datasets` takes for a date, a float of 64 bits, a number, nothing, ...
WRITTEN = [
    "2024-01-05", "2024-01-05T10:00:00Z", "10:30", "007", "1.50", "1e3", "0.0000001", "123456789012345678901234567890",
    "12345678901234567.25", "-0", "None", "NA", "nan", "null", "true", "1,000", "#5", '5" pipe',
]  # fmt: skip


def answers(path: Path | str, **fields: str) -> list[str]:
    given = {"path": str(path), "split": "train", "question": "question", "answer": "answer", **fields}
    return [row.answer for row in Table.of(given, "table").rows()]


def jsonl(path: Path, values: list[str], quoted: bool) -> Path:
    rows = enumerate(json.dumps(value) if quoted else value for value in values)
    path.write_text("".join(f'{{"question": "{n}?", "answer": {value}}}\n' for n, value in rows))
    return path


def separated(path: Path, values: list[str], separator: str) -> Path:
    cells = ['"' + value.replace('"', '""') + '"' if separator in value or '"' in value else value for value in values]
    path.write_text(f"question{separator}answer\n" + "".join(f"{n}?{separator}{c}\n" for n, c in enumerate(cells)))
    return path


@pytest.mark.parametrize("kind", ["jsonl", "list.json", "csv", "tsv", "folder", "folder of csv"])
def test_texts_arrive_as_they_are_written(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, WRITTEN, quoted=True)
    elif kind == "list.json":
        path.write_text(json.dumps([{"question": f"{n}?", "answer": value} for n, value in enumerate(WRITTEN)]))
    elif kind in ("csv", "tsv"):
        separated(path, WRITTEN, {"csv": ",", "tsv": "\t"}[kind])
    else:
        path.mkdir()
        if kind == "folder":
            jsonl(path / "train-00000-of-00001.jsonl", WRITTEN, quoted=True)
        else:
            separated(path / "train.csv", WRITTEN, ",")
    assert answers(path) == WRITTEN


def test_numbers_arrive_as_they_are_written(tmp_path: Path) -> None:
    written = ["7", "0.5", "1.50", "1e3", "1E-7", "0.0000001", "12345678901234567.25", "9" * 30, "9" * 5000, "true"]
    assert answers(jsonl(tmp_path / "q.jsonl", written, quoted=False)) == written
    (tmp_path / "q.json").write_text('[{"question": "a?", "answer": 0.50},\n {"question": "b?", "answer": 3}]')
    assert answers(tmp_path / "q.json") == ["0.50", "3"]
    lines = ["NaN", "null", "Infinity", "1"]
    read = Table.of({"path": str(jsonl(tmp_path / "n.jsonl", lines, quoted=False)), "split": "train",
                     "question": "question", "answer": "answer"}, "table")  # fmt: skip
    assert [row.answer for row in read.rows()] == ["Infinity", "1"], "a missing number is no answer"
    assert "2 of 4 rows of" in read.notes_on_reading()[0]


def test_what_a_grader_needs_besides_keeps_its_numbers(tmp_path: Path) -> None:
    """One rubric without a weight, or with a date, does not change the others."""
    rubrics = [{"description": "2024-01-05", "weight": 1}, {"description": "b", "weight": 0.5}, {"description": "c"}]
    rows = [{"question": f"{n}?", "answer": "", "rubrics": rubrics[: n + 1]} for n in range(3)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"split": "train", "question": "question", "answer": "question", "details": "rubrics"}
    read = Table.of({"path": str(tmp_path / "q.jsonl"), **fields}, "table").rows()
    assert [json.loads(row.details) for row in read] == [rubrics[: n + 1] for n in range(3)]


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        (pa.array([datetime(2024, 1, 5), datetime(2024, 1, 5, 9, 30)]), ["2024-01-05", "2024-01-05 09:30:00"]),
        (pa.array([date(2024, 1, 5), date(1999, 12, 31)]), ["2024-01-05", "1999-12-31"]),
        (pa.array([Decimal("1.50"), Decimal("0.00")]), ["1.50", "0.00"]),
        (pa.array([2**53 + 1, -(2**63)]), ["9007199254740993", "-9223372036854775808"]),
        (pa.array([5.0, 0.1]), ["5", "0.1"]),
        (pa.array([1e-7, 1e22]), ["0.0000001", "10000000000000000000000"]),
        (pa.array(np.array([0.1, 2.5], np.float32)), ["0.1", "2.5"]),
        (pa.array([True, False]), ["true", "false"]),
        (pa.array(["007", "None"]).dictionary_encode(), ["007", "None"]),
        (pa.array(["007", "None"], pa.large_string()), ["007", "None"]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "folder", "saved"])
def test_typed_columns_are_shown_as_people_write_them(
    tmp_path: Path, values: pa.Array, shown: list[str], kind: str
) -> None:
    table, path = pa.table({"question": ["a?", "b?"], "answer": values}), tmp_path / "rows.parquet"
    if kind == "saved":
        if pa.types.is_dictionary(values.type):
            pytest.skip("datasets does not save what is encoded so")
        datasets.Dataset(table).save_to_disk(path)
    elif kind == "folder":
        path.mkdir()
        pq.write_table(table, path / "train.parquet")
    else:
        pq.write_table(table, path)
    assert answers(path) == shown


def test_a_missing_number_does_not_make_others_fractions(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a?", "b?"], "answer": [2**60 + 1, None]}), tmp_path / "q.parquet")
    assert answers(tmp_path / "q.parquet") == [str(2**60 + 1)]


def test_bytes_are_no_text(tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a?"], "answer": [b"x"]}), tmp_path / "q.parquet")
    with pytest.raises(ValueError, match=r"row 0 has bytes b'x' as its answer, which must be a text or a number"):
        answers(tmp_path / "q.parquet")


@pytest.mark.parametrize("name", ["q[1]", "star*", "what?", "a{b,c}", "two words", "~", "file:x", "a::b"])
@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_name_is_no_pattern(tmp_path: Path, name: str, kind: str) -> None:
    for other in ("q1", "starry", "whats", "ab"):
        (tmp_path / f"{other}.{kind}").write_bytes(b"another file")
    path = tmp_path / f"{name}.{kind}"
    if kind == "parquet":
        pq.write_table(pa.table({"question": ["a?"], "answer": ["1"]}), path)
    else:
        jsonl(path, ["1"], quoted=False) if kind == "jsonl" else separated(path, ["1"], ",")
    assert answers(path) == ["1"]


def test_a_folder_that_reads_as_a_pattern_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "q[1]").mkdir()
    jsonl(tmp_path / "q[1]" / "train.jsonl", ["1"], quoted=False)
    with pytest.raises(
        ValueError, match=r"takes \[ \] in the folder name .*q\[1\] for patterns: rename it, or give one"
    ):
        answers(tmp_path / "q[1]")
    assert answers(tmp_path / "q[1]" / "train.jsonl") == ["1"]


def test_splits_and_parts_of_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    jsonl(folder / "data" / "train-00000-of-00002.jsonl", ["007", "1"], quoted=True)
    jsonl(folder / "data" / "train-00001-of-00002.jsonl", ["2"], quoted=True)
    jsonl(folder / "data" / "test-00000-of-00001.jsonl", ["2024-01-05"], quoted=True)

    def read(split: str) -> list[Any]:
        return list(open_columns(str(folder), "", split, "").columns["answer"])

    assert read("train") == ["007", "1", "2"] and read("test") == ["2024-01-05"]
    assert read("train[1:]+test") == ["1", "2", "2024-01-05"], "as datasets writes parts of splits"
    with pytest.raises(
        ValueError, match=r'set cannot be read \(ValueError: Unknown split "validation". Should be one of'
    ):
        read("validation")


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
@pytest.mark.parametrize(
    ("suffix", "packed"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zip", None)]
)
def test_compressed_files_are_read(
    tmp_path: Path, kind: str, suffix: str, packed: Callable[[bytes], bytes] | None
) -> None:
    plain, path = tmp_path / f"rows.{kind}", tmp_path / f"rows.{kind}.{suffix}"
    if kind == "parquet":
        pq.write_table(pa.table({"question": ["0?", "1?"], "answer": ["007", "é"]}), plain)
    else:
        jsonl(plain, ["007", "é"], quoted=True) if kind == "jsonl" else separated(plain, ["007", "é"], ",")
    if packed is None:
        with zipfile.ZipFile(path, "w") as archive:
            archive.write(plain, plain.name)
    else:
        path.write_bytes(packed(plain.read_bytes()))
    plain.unlink()
    assert answers(path) == ["007", "é"]


GOOD = b'{"question": "a?", "answer": 1}\n'
BAD = {
    "value.jsonl": (GOOD + b'{"question": "b?", "answer": }\n', "line 2, column 30: no JSON (Expecting value)"),
    "cut.jsonl": (GOOD * 3 + b'{"question": "b', "line 4, column 14: no JSON (Unterminated string starting at)"),
    "latin.jsonl": (GOOD + b'{"question": "\xe9?", "answer": 1}\n', "line 2: the byte 0xe9 is not UTF-8: save it"),
    "utf16.csv": ("question,answer\na?,1\n".encode("utf-16"), "line 1: the byte 0xff is not UTF-8"),
    "packed.jsonl": (gzip.compress(GOOD), "line 1: the byte 0x8b is not UTF-8: "),
    "number.jsonl": (GOOD + b"\n5\n", "line 3: '5' is no object with a question in it: write one JSON object a line"),
    "list.json": (b'[{"question": "a?", "answer": 1},\n {"question": }]', "line 2, column 15: no JSON"),
    "texts.json": (b'["a?", "b?"]', "element 0: 'a?' is no object with a question in it"),
    "pretty.json": (b'{\n  "question": "a?",\n  "answer": 1\n}', "line 1, column 2: no JSON"),
    "deep.jsonl": (GOOD + b'{"question": ' + b"[" * 100_000, "line 2: JSON that is nested too deep"),
    "wide.csv": (b"question,answer\na?,1\nb, c?,2\n", "line 3: 3 cells under 2 columns: put a text that contains ','"),
    "open.csv": (b'question,answer\na?,"1\nb?,2\n', "line 3: unexpected end of data: close every quotation mark"),
    "stray.tsv": (b'question\tanswer\n"a" is?\t1\n', "line 2: '\t' expected after '\"'"),
    "twice.csv": (b"question,answer,answer\na?,1,2\n", "line 1: two columns have the name 'answer': rename one"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("inside", [False, True], ids=["file", "folder"])
def test_a_bad_line_is_named_with_its_file_and_a_remedy(tmp_path: Path, name: str, inside: bool) -> None:
    content, said = BAD[name]
    path = (tmp_path / "set" if inside else tmp_path) / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        answers(path.parent if inside else path)
    message = str(caught.value)
    assert message.startswith(f"{path}, {said}"), message
    assert "\n" not in message and len(message) < len(str(path)) + 300 and message.count(": ") >= 2, "a remedy is named"


@pytest.mark.parametrize("name", ["q.jsonl.gz", "q.csv.bz2", "q.jsonl.xz", "q.jsonl.zip", "q.parquet", "q.parquet.gz"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=rf"{name} cannot be read \(\w+: .*\): check the file"):
        answers(tmp_path / name)


def test_a_mark_of_byte_order_blank_lines_and_long_cells_are_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "q.csv"
    path.write_bytes("\ufeffquestion,answer\r\n\r\na?,1\r\n".encode() + b"b" * 200_000 + b'?,"two\r\nlines"\r\nc?\r\n')
    assert answers(path) == ["1", "two\r\nlines"]
    path = tmp_path / "q.jsonl"
    path.write_bytes("\ufeff".encode() + GOOD + b"\r\n" + '{"question": "b\u2028?", "answer": 2}'.encode())
    assert answers(path) == ["1", "2"]


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_what_datasets_has_changed_already_is_said(tmp_path: Path, kind: str) -> None:
    """A data set of the hub is read by `datasets`, which takes texts for dates and numbers: so is this saved one."""
    path = tmp_path / f"q.{kind}"
    values = ["2024-01-05", "2024-01-06"] if kind == "json" else ["007", "008"]
    jsonl(path, values, quoted=True) if kind == "json" else separated(path, values, ",")
    read = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(read, datasets.Dataset)
    read.save_to_disk(tmp_path / "saved")
    given = {"path": str(tmp_path / "saved"), "split": "train", "question": "question", "answer": "answer"}
    (said,) = Table.of(given, "table").notes_on_reading()
    took = {"csv": "int64", "json": "timestamp[s]"}[kind]
    assert said.startswith(f"datasets took each answer of {tmp_path / 'saved'} for {took}, which may not be as it is")
    assert answers(tmp_path / "saved") == {"csv": ["7", "8"], "json": values}[kind]
