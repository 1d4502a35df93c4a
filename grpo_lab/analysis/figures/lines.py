"""Lines over the budget: single seeds, their mean and its band, as a table of drawn numbers and on axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes

from grpo_lab.analysis.figures.panels import CROSS
from grpo_lab.analysis.figures.style import Look
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import LABELS
from grpo_lab.analysis.stats.mean_line import GRID
from grpo_lab.analysis.tables.curves import means_of

LINE = ["level", "arm", "series"]  # what a line is of
_NUMBERS = [*LINE, "part", "seed", "x", "value", "low", "high", "n"]


def line_numbers(
    curves: pd.DataFrame, finals: FinalValues, shown: pd.DataFrame | None = None, points: int = GRID
) -> pd.DataFrame:
    """The lines of a table of curves as drawn numbers; `shown` holds the points of single seeds (default: all).

    `part` is "seed" (a run's own points), "stop" (the last point of a run that collapsed) or "mean" (over n seeds,
    with the t interval in low and high, of a metric of every step at `points` points).
    """
    shown = curves if shown is None else shown
    stops = shown[shown["collapsed"]].groupby([*LABELS, "metric"], sort=False).tail(1)
    parts = {"seed": shown, "stop": stops, "mean": means_of(curves, finals, points)}
    return pd.concat([own.assign(part=part, series=own["metric"]) for part, own in parts.items() if len(own)])


def numbers_table(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Tables of drawn numbers as one, by level, arm and series; budgets with six decimals."""
    rows = pd.concat([part for part in parts if len(part)]).reindex(columns=_NUMBERS)
    rows = rows.sort_values(LINE, kind="stable", ignore_index=True)
    return rows.astype({"seed": "Int64", "n": "Int64"}).round({"x": 6})


def draw_line(axes: Axes, numbers: pd.DataFrame, look: Look, name: str, faint: float = 0.2, width: float = 1.7) -> None:
    """One series of an arm: single seeds thin, a cross where one collapsed, their mean bold in its band."""
    labels = {"xlabel": axes.get_xlabel(), "ylabel": axes.get_ylabel()}  # seaborn writes names of columns
    seeds, stops, mean = (numbers[numbers["part"] == part] for part in ("seed", "stop", "mean"))
    stopped = seeds["seed"].isin(stops["seed"])
    thin: dict[str, Any] = {"estimator": None, "linewidth": 0.6, "color": look.colour, "legend": False, "ax": axes}
    for runs, alpha in ((seeds[~stopped], faint), (seeds[stopped], 0.9)):
        if len(runs):
            sns.lineplot(runs, x="x", y="value", units="seed", alpha=alpha, label="seed", **thin)
    if len(stops):
        axes.plot(stops["x"], stops["value"], color=look.colour, zorder=4, clip_on=False, **CROSS)
    axes.plot(mean["x"], mean["value"], label=name, **look.line(width))
    if mean["low"].notna().any():
        axes.fill_between(mean["x"], mean["low"], mean["high"], color=look.colour, alpha=0.13, linewidth=0)
    axes.set(**labels)
