"""Parts that several figures share: panels, lines with bands, rows of intervals, and sentences about runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.caveats import levels_alike
from grpo_lab.analysis.figures.palette import GREY, Look
from grpo_lab.analysis.figures.style import SMALL, in_lines
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.analysis.tracks import EVALUATED, KL, TRAINING, Track

# Where a run that collapsed ends.
CROSS: dict[str, Any] = {"linestyle": "", "marker": "X", "markersize": 6, "markeredgecolor": "white"}
MOST = 5  # panels side by side
BARS_OF_FEW = "mark: mean of the differences paired by seed, no interval; dots: single seeds"
BEYOND = "; arrowhead: it goes on beyond the panel"
NO_TRACKS = "no finished run was evaluated up to the common budget"
_LOGGED = TRAINING | EVALUATED | {"kl": KL}


def arranged(arms: Sequence[str]) -> list[list[str]]:
    """Arms in rows of at most `MOST`, as even as they come: 8 as 4 and 4, 10 as 5 and 5."""
    columns = math.ceil(len(arms) / math.ceil(len(arms) / MOST))
    return [list(arms[start : start + columns]) for start in range(0, len(arms), columns)]


def drawn_conditions(data: SweepData, numbers: pd.DataFrame) -> list[Condition]:
    """Every level and arm of a table, in declared order."""
    found = set(zip(numbers["level"], numbers["arm"]))
    return [(level, arm) for level in data.levels for arm in data.arms if (level, arm) in found]


def arm_rows(data: SweepData, conditions: Sequence[Condition]) -> list[tuple[str, list[str]]]:
    """The rows of panels of a figure with one panel per arm and level: a level, and its arms in that row."""
    arms = [arm for arm in data.arms if arm in {arm for _, arm in conditions}]
    return [(level, row) for level in data.levels if level in {at for at, _ in conditions} for row in arranged(arms)]


def arm_panels(
    figure: Figure,
    data: SweepData,
    conditions: Sequence[Condition],
    over: Mapping[Condition, str],
    labels: tuple[str, str],
    titles: Mapping[str, str] | None = None,
) -> dict[Condition, Axes]:
    """A panel for every arm of `conditions` at every level, with its name and what stands `over` it.

    Levels that were evaluated alike share the y axis. `labels` are those of the x axes and the y axes; `titles`
    replace names of arms that say too little.
    """
    rows = arm_rows(data, conditions)
    columns = len(rows[0][1])
    shared = True if levels_alike(data) else "row"
    grid = figure.subplots(len(rows), columns, sharex=True, sharey=shared, squeeze=False)
    panels: dict[Condition, Axes] = {}
    for (level, row), of_row in zip(rows, grid):
        for axes in of_row[len(row) :]:
            axes.set_visible(False)
        for arm, axes in zip(row, of_row):
            panels[level, arm] = axes
            name = in_lines((titles or {}).get(arm, arm), 100 // columns)
            axes.set_title(f"{name}\n{over.get((level, arm), 'no finished run')}", fontsize=SMALL)
        of_row[0].set_ylabel(level_label(data, level, labels[1]))
    for axes in grid[-1]:
        axes.set_xlabel(labels[0] if columns < MOST else labels[0].replace(" (", "\n("))
    return panels


def level_rows(
    figure: Figure, data: SweepData, heights: Mapping[Any, float], columns: int, label: str = "", **shape: Any
) -> np.ndarray:
    """A row of panels for every level, of these relative heights, with the level and a `label` at its left.

    Levels that were evaluated alike share the x axis of a column, unless `shape`, as of `Figure.subplots`, says else.
    """
    shape = {"sharex": "col" if levels_alike(data) else "none", "height_ratios": list(heights.values())} | shape
    grid = figure.subplots(len(heights), columns, squeeze=False, **shape)
    for level, row in zip(heights, grid):
        row[0].set_ylabel(level_label(data, level, label))
    return grid


def level_label(data: SweepData, level: str, label: str = "") -> str:
    """The y label of a row of panels: the level of the design's factor, if any, above the measured quantity."""
    factor = data.design.factor if data.design else ""
    if not factor or not level:
        return label
    return f"{factor} = {level}\n{label}" if label else f"{factor}\n{level}"


def at_level(data: SweepData, level: str) -> str:
    """` at budget = short`, empty for a design without a factor."""
    return f" at {data.design.factor} = {level}" if data.design and data.design.factor else ""


def seeds_text(n: int, planned: int, collapsed: int = 0) -> str:
    """How many seeds a panel shows the mean of."""
    text = f"n = {n}" if n == planned else f"n = {n} of {planned} seeds"
    text += f", {collapsed} collapsed" if collapsed else ""
    return text + (", no interval" if 0 < n < FOR_INTERVAL else "")


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


def draw_rows(axes: Axes, rows: pd.DataFrame, number: int, limit: float = math.inf, shift: float = 0.0) -> None:
    """A number of rows around a line at 0: seeds as dots, `shift` below their `y`, and means as in `draw_estimates`.

    A finite `limit` ends the axis on both sides.
    """
    rows_of_arms(axes, number)
    if limit < math.inf:
        axes.set_xlim(-limit, limit)
    seeds, means = (rows[rows["part"] == part] for part in ("seed", "mean"))
    for colour, own in groups_of(seeds, "colour", sort=False):
        axes.plot(own["value"], own["y"] + shift, "o", color=colour, alpha=0.35, markersize=3.2, markeredgewidth=0)
    draw_estimates(axes, means, limit)


def draw_estimates(axes: Axes, rows: pd.DataFrame, limit: float = math.inf, width: float = 1.7) -> None:
    """A mark per row at `value` and `y`, with a bar from `low` to `high`; arrowheads where that leaves `limit`.

    `name`, `colour`, `marker` and `face`, the colour inside of the mark, are columns too.
    """
    for row in rows_of(rows):
        axes.plot([row.low, row.high], [row.y, row.y], color=row.colour, linewidth=width, solid_capstyle="butt")
        axes.plot(row.value, row.y, row.marker, color=row.colour, markerfacecolor=row.face, ms=4.6, label=row.name)
        for end, arrow in ((row.low, "<"), (row.high, ">")):
            if abs(end) > limit:
                axes.plot(math.copysign(limit, end), row.y, arrow, color=row.colour, markersize=3.5)


def symmetric_limit(table: pd.DataFrame, least: float = 0.0) -> float:
    """Half the width of an axis around 0 for the seeds and means of a table.

    Bars of few seeds can be wider than anything measured, and are cut.
    """
    largest = float(table.loc[table["part"] == "seed", "value"].abs().max())
    ends = table[["low", "high"]].abs().max().max()
    widest = largest if math.isnan(ends) else float(ends)
    return 1.08 * max(min(widest, 1.6 * largest), least) or 1.0


def rows_of_arms(axes: Axes, number: int) -> None:
    """A number of rows from the top, still without labels, around a line at 0."""
    axes.axvline(0, color=GREY, linewidth=1.0)
    axes.set_yticks([])
    axes.set_ylim(max(number, 1) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def not_logged(found: Sequence[Track], names: Sequence[str]) -> str:
    """Which of these metrics no run logged, as a sentence part; empty where each was logged by some run."""
    absent = [_LOGGED[name] for name in names if all(np.isnan(getattr(track, name)).all() for track in found)]
    return f"{' and '.join(absent)} {'was' if len(absent) == 1 else 'were'} not logged" if absent else ""


def collapse_note(data: SweepData, finals: FinalValues) -> str:
    """Which runs are left out because they stopped before the common budget; empty where none did."""
    lost = finals.values[finals.values["stopped"]]
    if lost.empty:
        return ""
    factor = f" at {data.design.factor} = " if data.design and data.design.factor else ""
    counted = groups_of(lost, ["level", "arm"], sort=False)
    named = ", ".join(f"{len(runs)} of {arm}{factor}{level}" for (level, arm), runs in counted)
    return f"Collapsed before that, with no evaluation to compare, and left out: {named}."
