"""Whether an effect depends on what is held equal: the same contrasts at equal steps, tokens, operations, seconds."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from grpo_lab.analysis.effects.contrast_plan import order_warning
from grpo_lab.analysis.effects.contrasts import logged_axes
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION, Look
from grpo_lab.analysis.figures.panels import BEYOND, draw_rows, level_rows, symmetric_limit
from grpo_lab.analysis.figures.style import Drawn, FigureKind, drawing, in_lines, sentences
from grpo_lab.analysis.final_values import DOWNSTREAM, QUANTITIES, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.analysis.tables.contrasts import effects_at_budgets, shown_unit

LOOKS = {
    "steps": Look(BLACK, "-", "o"),
    "sampled_tokens": Look(BLUE, "-", "s"),
    "trained_tokens": Look(SKY, "-", "D"),
    "flops": Look(GREEN, "-", "^"),
    "simulated_seconds": Look(PURPLE, "-", "P"),
    "device_seconds": Look(ORANGE, "-", "v"),
}
BARS = "mark and bar: mean of the differences paired by seed and its 95% t interval"
BARS_OF_FEW = "mark: mean of the differences paired by seed, no interval"
_COLUMNS = ["level", "trick", "kind", "context", "metric", "axis", "budget", "value", "low", "high", "n", "flip"]


def draw_budgets(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_budgets`, or why there is none. `finals` are those on the declared axis."""
    if (logged := len(logged_axes(data, LOOKS))) < 2:
        return f"only {logged} budget axis was logged, and one has nothing to be compared with"
    metrics = dict.fromkeys([data.design.primary if data.design else DOWNSTREAM, DOWNSTREAM])
    table = effects_at_budgets(data, metrics, LOOKS)
    if table.empty:
        return "no two arms that ran share a level and a seed"
    name, means = f"{data.record.name}_budgets", _laid_out(table[table["part"] == "mean"])
    limits = {str(metric): symmetric_limit(own) for metric, own in table.groupby("metric", sort=False)}
    ends = means["metric"].map(limits)
    bars = BARS if means["low"].notna().any() else BARS_OF_FEW
    bars += BEYOND if ((means["high"] > ends) | (-means["low"] > ends)).any() else ""
    heights = means.groupby("level", sort=False)["row"].max() + 1
    axes_of = means.drop_duplicates("axis").set_index("axis")["budget"]
    entries = [LOOKS[axis].entry(_equal(axis, axes_of[axis], finals)) for axis in LOOKS if axis in axes_of]
    height = 1.9 + max(0.4, 0.105 * len(axes_of) + 0.13) * heights.sum() + 0.3 * len(heights)
    heading = "What each trick does at equal steps, tokens, FLOPs and simulated seconds"
    with drawing(name, heading, height, bars, entries, 3) as figure:
        grid = level_rows(figure, data, heights.to_dict(), len(limits))
        for level, of_row in zip(heights.index, grid):
            own = means[means["level"] == level]
            for axes, (metric, limit) in zip(of_row, limits.items()):
                _panel(axes, own[own["metric"] == metric], heights[level], limit)
            of_row[0].set_yticks(range(heights[level]), [_label(here) for _, here in own.groupby("row")])
        for first, last, metric in zip(grid[0], grid[-1], limits):
            first.set_title(in_lines(QUANTITIES.get(metric, metric), 45))
            last.set_xlabel(f"difference, {shown_unit(metric)}")
    numbers = means[_COLUMNS]
    return Drawn(name, figure, numbers, bars, caption=_caption(data, means))


def _laid_out(means: pd.DataFrame) -> pd.DataFrame:
    """The means with the `row` of their contrast within its level, and the height of their axis there."""
    names = means.groupby("level", sort=False)["name"].transform(lambda own: pd.factorize(own)[0])
    axes = [axis for axis in LOOKS if axis in set(means["axis"])]
    lane = means["axis"].map(axes.index)
    return means.assign(row=names, y=names - 0.4 + (lane + 0.5) * 0.8 / len(axes))


def _label(means: pd.DataFrame) -> str:
    """One contrast in words, with its pairs."""
    first, pairs = means.iloc[0], sorted(set(means["n"]))
    return f"{in_lines(first['trick'], 26)}\n{first['context']}, n = {' or '.join(map(str, pairs))}"


def _panel(axes: Axes, means: pd.DataFrame, rows: int, limit: float) -> None:
    colours, markers = (means["axis"].map({axis: look[at] for axis, look in LOOKS.items()}) for at in (0, 2))
    draw_rows(axes, means.assign(colour=colours, face=colours, marker=markers), rows, limit)
    for row in rows_of(means[means["flip"] != ""].drop_duplicates("row")):
        sure = row.flip == "resolved"
        look: dict[str, Any] = {"color": VERMILLION, "fontweight": "bold"} if sure else {"color": GREY}
        axes.annotate("⇄", (1, row.row), xycoords=("axes fraction", "data"), va="center", fontsize=10, **look)


def _equal(axis: str, budget: float, finals: FinalValues) -> str:
    amount = f"{budget:,.0f}" if 1000 <= budget < 1e9 else f"{budget:.4g}"
    return f"at {amount} {axis.replace('_', ' ')}" + (" (declared)" if axis == finals.axis else "")


def _caption(data: SweepData, means: pd.DataFrame) -> str:
    return sentences({
        "Every budget is the smallest that any finished run ended with on its axis, so arms that spend it faster are "
        "read earlier in their runs; device seconds are those of the machines it ran on.": True,
        "⇄ the sign depends on the axis: bold, adjusted p below .05 on both sides; grey, within noise.":
            (means["flip"] != "").any(),
        order_warning(data): True,
    })  # fmt: skip


FIGURE = FigureKind(
    "budgets",
    draw_budgets,
    title="The same comparison at other equal budgets",
    order=11,
    how_to_read=(
        "Each contrast at equal steps, tokens, operations and seconds. Where intervals lie on both sides of "
        "the line, the answer depends on what is held equal."
    ),
)
