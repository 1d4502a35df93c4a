"""Rows and groups of a table, their values typed as Any, and rows of words as aligned lines.

The stubs of pandas let a cell be a date or a complex number, and the key of a group anything hashable. What the columns
hold is documented where a table is made; readers of the table need no proof of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pandas as pd


def rows_of(table: pd.DataFrame) -> Iterator[Any]:
    """Every row as a tuple with the columns as its names."""
    return iter(table.itertuples())


def records_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Every row as a mapping from column to value."""
    return cast(list[dict[str, Any]], table.to_dict("records"))  # columns are named by strings everywhere here


def groups_of(table: pd.DataFrame, by: str | list[str], sort: bool = True) -> Iterator[tuple[Any, pd.DataFrame]]:
    """The rows for each value of a column; for a list of columns the value is a tuple."""
    return iter(table.groupby(by, sort=sort))


def row_at(table: pd.DataFrame, label: str | int) -> pd.Series:
    """The one row with this label."""
    row = table.loc[label]
    assert isinstance(row, pd.Series), f"several rows are labelled {label!r}"
    return row


def aligned(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Each row as a line whose cells begin where those of the other rows do."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
