"""Rows of tidy tables: single seeds beside the mean over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from grpo_lab.analysis.stats.intervals import Interval


def as_columns(interval: Interval) -> dict[str, float | int]:
    """An interval as columns of a table."""
    return {"value": interval.mean, "low": interval.low, "high": interval.high, "n": interval.n}


def seeds_and_mean(
    labels: Mapping[str, Any], values: Mapping[int, float] | pd.Series, mean: Interval, scale: float = 1.0
) -> Iterator[dict[str, Any]]:
    """A row with part "seed" for every value by seed, then one with part "mean"; numbers are times `scale`."""
    for seed, value in values.items():
        yield {**labels, "part": "seed", "seed": seed, "value": scale * value}
    yield {**labels, "part": "mean", **as_columns(mean.scaled(scale))}


def table_of(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Rows as a table with these columns, rounded to six decimals."""
    table = pd.DataFrame(rows, columns=list(names))
    whole = [name for name in ("seed", "n") if name in table]
    return table.astype(dict.fromkeys(whole, "Int64")).round(6)
