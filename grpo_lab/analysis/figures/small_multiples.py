"""The layout of figures with one panel per arm and level on shared axes, eight inches wide."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.analysis.figures.seed_lines import Cell
from grpo_lab.analysis.figures.style import (
    BODY,
    LINE,
    SMALL,
    TINY,
    broken,
    heading_height,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL

# Where a run that collapsed ends.
CROSS: dict[str, Any] = {
    "linestyle": "",
    "marker": "X",
    "markersize": 6.5,
    "markeredgecolor": "white",
    "markeredgewidth": 0.6,
}
WIDTH = 8.0  # inches, as wide as a page
MOST = 5  # panels side by side
_LEFT, _RIGHT, _GAP = 0.74, 0.1, 0.13  # inches; the last between two panels of a row


@dataclass(frozen=True)
class Grid:
    """A figure with its panels."""

    figure: Figure
    panels: Mapping[Cell, Axes]
    label: float  # inches of the x label from the bottom


def arranged(arms: Sequence[str]) -> list[list[str]]:
    """Arms in rows of at most `MOST`, as even as they come: 8 as 4 and 4, 10 as 5 and 5."""
    columns = math.ceil(len(arms) / math.ceil(len(arms) / MOST))
    return [list(arms[start : start + columns]) for start in range(0, len(arms), columns)]


def panel_width(arms: Sequence[str]) -> float:
    """Inches that a panel and the text over it have."""
    columns = len(arranged(arms)[0])
    return (WIDTH - _LEFT - _RIGHT - _GAP * (columns - 1)) / columns


def name_lines(name: str, inches: float, size: float) -> list[str]:
    """A bold name in lines that fit a width: broken before a `+` and after a comma, else after an underscore."""
    lines = []
    for line in broken(name, inches, size):
        pieces = wrapped(line.replace("_", "_ "), inches, size, bold=True)
        lines += [piece.replace("_ ", "_") for piece in pieces] if len(pieces) > 1 else [line]
    return lines


def small_multiples(
    data: SweepData,
    cells: Sequence[Cell],
    heading: str,
    legend: float,
    over: Mapping[Cell, Sequence[str]],
    panel: float,
    labels: tuple[str, str],
    footer: str,
    foot: float = 0.0,
    titles: Mapping[str, str] = MappingProxyType({}),
) -> Grid:
    """An empty figure with a panel for every arm of `cells` at every level of them.

    `legend` and `foot` are inches left free under the heading and over the footer, `panel` a panel's height. `over`
    holds the lines written over a panel, under the arm's name or its title; `labels` are those of the x axes and the y
    axes.
    """
    arms = [arm for arm in data.arms if arm in {arm for _, arm in cells}]
    levels = [level for level in data.levels if level in {level for level, _ in cells}]
    rows = [(level, row) for level in levels for row in arranged(arms)]
    columns, inches = len(rows[0][1]), panel_width(arms)
    names = {arm: name_lines(titles.get(arm, arm), inches, BODY) for arm in arms}
    lines = max((len(over[cell]) for cell in cells), default=0)
    above = (max(map(len, names.values())) * BODY + lines * SMALL) * LINE + 0.06
    below = wrapped(footer, WIDTH - 0.2, TINY)
    top = heading_height(heading, WIDTH) + legend + above
    bottom = 0.6 + foot + len(below) * TINY * LINE
    between = above + 0.15
    height = top + bottom + panel * len(rows) + between * (len(rows) - 1)
    figure = Figure(figsize=(WIDTH, height))
    write_heading(figure, heading)
    middle, label = (_LEFT + WIDTH - _RIGHT) / 2 / WIDTH, bottom - 0.36
    figure.text(middle, label / height, labels[0], ha="center", va="center", fontsize=BODY)
    write_footer(figure, below)
    place = {"left": _LEFT / WIDTH, "right": 1 - _RIGHT / WIDTH, "top": 1 - top / height, "bottom": bottom / height}
    place |= {"wspace": _GAP / inches, "hspace": between / panel}
    axes = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=place)
    panels: dict[Cell, Axes] = {}
    for (level, row), of_row in zip(rows, axes):
        for here in of_row[len(row) :]:
            here.set_visible(False)
        for arm, here in zip(row, of_row):
            panels[level, arm] = here
            _write_over(here, names[arm], over.get((level, arm), ["no finished run"]), lines)
        factor = data.design.factor if data.design else ""
        of_row[0].set_ylabel(f"{factor} = {level}\n{labels[1]}" if factor else labels[1])
    for last, here in enumerate(axes[-1]):
        if not here.get_visible():
            axes[-2][last].tick_params(labelbottom=True)
    return Grid(figure, panels, label)


def _write_over(axes: Axes, name: Sequence[str], lines: Sequence[str], most: int) -> None:
    axes.set_title("\n".join(name), fontsize=BODY, fontweight="bold", loc="left", pad=5 + most * SMALL * 1.35)
    place = {"xytext": (0, 4), "xycoords": "axes fraction", "textcoords": "offset points"}
    padded = [*lines, *[""] * (most - len(lines))]
    axes.annotate("\n".join(padded), (0, 1), fontsize=SMALL, **place)
    axes.spines[["top", "right"]].set_visible(False)


def legend_height(entries: int, columns: int = 2) -> float:
    """Inches that `write_legend` takes for so many entries."""
    return 0.08 + math.ceil(entries / columns) * BODY * LINE * 1.15


def write_legend(figure: Figure, heading: str, entries: Sequence[tuple[Artist, str]], columns: int = 2) -> None:
    """Handles with their words, under the heading."""
    width, height = figure.get_size_inches()
    place = {"loc": "upper left", "borderaxespad": 0.0}
    place["bbox_to_anchor"] = (0.08 / width, 1 - heading_height(heading, width) / height)
    look = {"frameon": False, "fontsize": BODY, "handlelength": 3.2, "borderpad": 0.0, "columnspacing": 2.5}
    figure.legend([handle for handle, _ in entries], [words for _, words in entries], ncols=columns, **place, **look)


def seeds_text(n: int, planned: int, collapsed: int = 0) -> str:
    """How many seeds a panel shows the mean of."""
    text = f"n = {n}" if n == planned else f"n = {n} of {planned} seeds"
    text += f", {collapsed} collapsed" if collapsed else ""
    return text + (", no interval" if 0 < n < FOR_INTERVAL else "")
