"""The difference of every arm to the control, paired by seed; one panel per metric and level."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import BARS_OF_FEW
from grpo_lab.analysis.figures.panels import level_label, rows_of_arms
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    BODY,
    GREEN,
    GREY,
    SMALL,
    TINY,
    VERMILLION,
    Drawn,
    house_style,
    in_lines,
    new_figure,
    write_footer,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, OVERSTATEMENT, TRUNCATED, FinalValues
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.config.design import Direction

PANELS = {TRUNCATED: BLACK, HELDOUT: BLUE, DOWNSTREAM: GREEN, OVERSTATEMENT: VERMILLION}
BARS = "mark: mean of the differences paired by seed; bar: its 95% t interval; dots: single seeds"


def shown_metrics(data: SweepData) -> dict[str, str]:
    """Metric -> colour of its panels, the primary metric first."""
    primary = data.design.primary if data.design else TRUNCATED
    return {primary: PANELS.get(primary, BLACK)} | PANELS


def effect_numbers(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows, six decimals; no row where no arm shares a seed with its control.

    `part` is "seed" or "mean", the latter with the t interval in low and high and the number of pairs in n.
    `predicted` is "above" or "below" where the design predicts that of arm and control, else empty.
    """
    predictions = {
        (prediction.level, prediction.arm, prediction.metric): prediction.direction.value
        for prediction in (data.design.predictions if data.design else ())
        if not prediction.against and prediction.direction is not Direction.within
    }
    rows = []
    for level, arm in data.run_arms:
        for metric in shown_metrics(data) if arm != data.control else ():
            mean = finals.difference(level, arm, data.control, metric)
            if mean.n == 0:
                continue
            row = {"level": level, "arm": arm, "metric": metric, "predicted": predictions.get((level, arm, metric), "")}
            seeds = finals.differences(level, arm, data.control, metric)
            rows += [row | {"part": "seed", "seed": seed, "value": value} for seed, value in seeds.items()]
            ends = {"value": mean.mean, "low": mean.low, "high": mean.high, "n": mean.n}
            rows.append(row | {"part": "mean"} | ends)
    names = ["level", "arm", "metric", "part", "seed", "value", "low", "high", "n", "predicted"]
    return pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round(6)


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no such figure; empty where there is one."""
    return f"no arm shares a seed with {data.control}" if effect_numbers(data, finals).empty else ""


def draw_effects(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_effects`; None where no arm shares a seed with the control."""
    numbers = effect_numbers(data, finals)
    if numbers.empty:
        return None
    name = f"{data.record.name}_effects"
    colours = {metric: colour for metric, colour in shown_metrics(data).items() if metric in set(numbers["metric"])}
    levels = [level for level in data.levels if level in set(numbers["level"])]
    arms = [arm for arm in data.arms if arm in set(numbers["arm"])]
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    with house_style(name):
        figure = new_figure(
            f"Difference to {data.control}, paired by seed", 1.1 + (0.44 * len(arms) + 0.3) * len(levels)
        )
        grid = figure.subplots(len(levels), len(colours), sharex="col", squeeze=False)
        for level, row in zip(levels, grid):
            here = numbers[numbers["level"] == level]
            pairs = here.groupby("arm")["n"].max()
            for (metric, colour), axes in zip(colours.items(), row):
                _panel(axes, here[here["metric"] == metric], arms, pairs, colour)
            row[0].set_yticks(range(len(arms)), [f"{in_lines(arm, 30)}\nn = {pairs.get(arm, 0)}" for arm in arms])
            row[0].set_ylabel(level_label(data, level))
        for metric, axes in zip(colours, grid[0]):
            axes.set_title(in_lines(title(metric), 92 // len(colours)), fontsize=SMALL)
        write_footer(figure, bars)
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals, numbers))


def _panel(axes: Axes, numbers: pd.DataFrame, arms: Sequence[str], pairs: pd.Series, colour: str) -> None:
    rows_of_arms(axes, [""] * len(arms))
    seeds = numbers[numbers["part"] == "seed"]
    axes.plot(seeds["value"], [arms.index(arm) + 0.22 for arm in seeds["arm"]], "o", color=colour, alpha=0.3, ms=2.6)
    aside: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "color": GREY}
    for row in rows_of(numbers[numbers["part"] == "mean"]):
        y = arms.index(row.arm)
        axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
        inside = "white" if row.n >= FOR_INTERVAL and math.isnan(row.low) else colour
        axes.plot(row.value, y, "D", color=colour, markersize=4.6, label=row.arm, markerfacecolor=inside)
        if row.predicted:
            arrow, shift = ("→", 8) if row.predicted == "above" else ("←", -8)
            axes.annotate(arrow, (0, y), xytext=(shift, 8), fontsize=BODY, **aside)
        if row.n < pairs[row.arm]:
            axes.annotate(f"n = {row.n}", (row.value, y), xytext=(0, 8), fontsize=TINY, **aside)
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))


def _caption(data: SweepData, finals: FinalValues, numbers: pd.DataFrame) -> str:
    means = numbers[numbers["part"] == "mean"]
    withheld = (means["low"].isna() & (means["n"] >= FOR_INTERVAL)).any()
    parts = [
        f"Final values at {finals.at}.{finals.over_bases}",
        "Hollow: the interval is not reported." if withheld else "",
        "Arrow: the predicted direction." if numbers["predicted"].any() else "",
        "" if data.design else f"Nothing was declared: {data.control} is the sweep's first arm.",
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "effects",
    draw_effects,
    missing,
    title="Difference of every arm to the control",
    how_to_read=(
        "One row per arm, one column per metric; right of the line the arm has more of it. An interval that "
        "crosses the line leaves the sign open."
    ),
)
