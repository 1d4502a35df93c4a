"""The answers of a run: one row per evaluation, suite and question, from the tables in its folder."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ["step", "suite", "question", "difficulty", "n", "correct", "wanted", "tokens"]
ADDED = ("wanted", "tokens")  # of them, those that earlier versions did not save; 0 there
_READ = ["step", "suite", "problem_id", "difficulty", "outcome"]
_READ_WHERE_SAVED = ["wanted", "length"]


def read_answers(folder: Path) -> pd.DataFrame:
    """Every evaluated question of the run in `folder`: `n` samples, of which `correct` were right.

    Columns are step, suite, question (its id within the split), difficulty, n, correct, wanted (the length that the
    question asked for, 0 for none) and tokens (of all n samples together). No row where the run saved no answers.
    Raises ValueError, naming the file, where one is not a table of answers.
    """
    parts = []
    for path in sorted((folder / "eval").glob("step=*.parquet")):
        try:
            # ParquetFile leaves out a column that is not there; select names it.
            table = pq.ParquetFile(path).read(columns=[*_READ, *_READ_WHERE_SAVED])
            also = [name for name in _READ_WHERE_SAVED if name in table.column_names]
            parts.append(table.select([*_READ, *also]))
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path} is no table of answers ({error}): it was edited, or the disk fails; restore it from a copy, "
                "or start the run again in another folder"
            ) from error
    if not parts:
        return pd.DataFrame(columns=COLUMNS)
    table = pa.concat_tables(parts, promote_options="permissive").to_pandas()
    table = table.assign(**{name: 0 for name in _READ_WHERE_SAVED if name not in table}).fillna(
        {"wanted": 0, "length": 0}
    )
    of_question = table.groupby(_READ[:-1], sort=False)
    answers = of_question.agg(
        n=("outcome", "count"), correct=("outcome", "sum"), wanted=("wanted", "first"), tokens=("length", "sum")
    ).reset_index()
    answers = answers.rename(columns={"problem_id": "question"})
    return answers.astype(dict.fromkeys(["n", "correct", *ADDED], "int32"))[COLUMNS]
