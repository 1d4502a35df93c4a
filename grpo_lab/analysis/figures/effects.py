"""The difference of every arm to the control, paired by seed; one panel per metric and level."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.effects.verdict import finding
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, VERMILLION
from grpo_lab.analysis.figures.panels import BARS_OF_FEW, draw_rows, level_rows
from grpo_lab.analysis.figures.style import BODY, SMALL, TINY, Drawn, FigureKind, drawing, in_lines, sentences
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, OVERSTATEMENT, TRUNCATED, FinalValues
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tables.final import finals_of
from grpo_lab.config.design import Direction

PANELS = {TRUNCATED: BLACK, HELDOUT: BLUE, DOWNSTREAM: GREEN, OVERSTATEMENT: VERMILLION}
_SHORT = {OVERSTATEMENT: "overstatement"}  # the caption of its table says of what
BARS = "mark: mean difference to the control, paired by seed; bar: its 95% t interval; dots: single seeds"


def shown_metrics(data: SweepData) -> dict[str, str]:
    """Metric -> colour of its panels, the primary metric first."""
    primary = data.design.primary if data.design else TRUNCATED
    return {primary: PANELS.get(primary, BLACK)} | PANELS


def effect_numbers(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows: `tables.final.finals_of`, six decimals.

    `predicted` is "above" or "below" where the design predicts that of arm and control, else empty.
    """
    predictions = {
        (prediction.level, prediction.arm, prediction.metric): prediction.direction.value
        for prediction in (data.design.predictions if data.design else ())
        if not prediction.against and prediction.direction is not Direction.within
    }
    table = finals_of(data, finals, list(shown_metrics(data)), less=data.control)
    places = zip(table["level"], table["arm"], table["metric"])
    return table.assign(predicted=[predictions.get(place, "") for place in places])


def draw_effects(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_effects`, or why there is none."""
    numbers = effect_numbers(data, finals)
    if numbers.empty:
        return f"no arm shares a seed with {data.control}"
    name = f"{data.record.name}_effects"
    colours = {metric: colour for metric, colour in shown_metrics(data).items() if metric in set(numbers["metric"])}
    levels = [level for level in data.levels if level in set(numbers["level"])]
    arms = [arm for arm in data.arms if arm in set(numbers["arm"])]
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    height = 1.1 + (0.44 * len(arms) + 0.3) * len(levels)
    heading = finding(data, finals) or f"How do the arms differ from {data.control}?"
    with drawing(name, heading[:1].upper() + heading[1:], height, bars) as figure:
        grid = level_rows(figure, data, dict.fromkeys(levels, len(arms)), len(colours))
        for level, row in zip(levels, grid):
            here = numbers[numbers["level"] == level]
            pairs = here.groupby("arm")["n"].max()
            for (metric, colour), axes in zip(colours.items(), row):
                own = here[here["metric"] == metric]
                _panel(axes, own.assign(y=own["arm"].map(arms.index), pairs=own["arm"].map(pairs)), len(arms), colour)
            row[0].set_yticks(range(len(arms)), [f"{in_lines(arm, 30)}\nn = {pairs.get(arm, 0)}" for arm in arms])
        for metric, axes in zip(colours, grid[0]):
            axes.set_title(in_lines(_SHORT.get(metric, title(metric)), 92 // len(colours)), fontsize=SMALL)
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals, numbers))


def _panel(axes: Axes, numbers: pd.DataFrame, arms: int, colour: str) -> None:
    """Differences on one metric at the heights `y`; `pairs` is the largest number of pairs of the arm."""
    hollow = (numbers["n"].fillna(0) >= FOR_INTERVAL) & numbers["low"].isna()
    look = {"name": numbers["arm"], "colour": colour, "marker": "D", "face": np.where(hollow, "white", colour)}
    draw_rows(axes, numbers.assign(**look), arms, shift=0.22)
    means = numbers[numbers["part"] == "mean"]
    aside: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "color": GREY}
    for row in rows_of(means[means["predicted"] != ""]):
        arrow, shift = ("→", 8) if row.predicted == "above" else ("←", -8)
        axes.annotate(arrow, (0, row.y), xytext=(shift, 8), fontsize=BODY, **aside)
    for row in rows_of(means[means["n"] < means["pairs"]]):
        axes.annotate(f"n = {row.n}", (row.value, row.y), xytext=(0, 8), fontsize=TINY, **aside)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _caption(data: SweepData, finals: FinalValues, numbers: pd.DataFrame) -> str:
    means = numbers[numbers["part"] == "mean"]
    hollow = (means["low"].isna() & (means["n"] >= FOR_INTERVAL)).any()
    return sentences({
        f"Final values at {finals.at}.{finals.over_bases}": True,
        "Hollow: the interval is not reported.": hollow,
        "Arrow: the predicted direction.": numbers["predicted"].any(),
        f"Nothing was declared: {data.control} is the sweep's first arm.": data.design is None,
    })  # fmt: skip


FIGURE = FigureKind(
    "effects",
    draw_effects,
    title="Difference of every arm to the control",
    order=4,
    how_to_read=(
        "One row per arm, one column per metric; right of the line the arm has more of it. An interval that "
        "crosses the line leaves the sign open."
    ),
)
