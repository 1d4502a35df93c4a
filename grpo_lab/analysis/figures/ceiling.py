"""Where accuracy would end with more budget, by a fitted sigmoid; one panel per arm and level."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, NullLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    BODY,
    GREY,
    LINE,
    SMALL,
    TINY,
    VERMILLION,
    Drawn,
    broken,
    budget_label,
    heading_height,
    house_style,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.scaling.fits import OF_CURVE, CellFit, fit_sweep
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import mean_line
from grpo_lab.analysis.table_rows import records_of

BEYOND = 4.0  # times the largest budget: how far the sigmoid is drawn
_MARK = 1.45  # times that again: where the asymptote is
_COLUMNS = 6  # panels side by side
_REASONS = 2  # over a panel; the numbers have all
_LEFT, _RIGHT, _LEGEND, _PANEL = 0.68, 0.1, 0.45, 1.9  # inches
_HEADING = "Where would held-out accuracy (evaluation protocol) end? A sigmoid in the budget for every arm"


def ceiling_numbers(cells: Sequence[CellFit]) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "start" (accuracy before training), "seed" (a run's own evaluations), "mean" (over seeds), "fit" and
    "extrapolated" (the sigmoid and its band in low and high, up to the largest budget and beyond) or "asymptote"
    (A with its interval, and in `note` why it is not identified). `n` counts seeds.
    """
    rows = []
    for cell in cells:
        labels = {"level": cell.level, "arm": cell.arm, "n": len(cell.curves)}
        rows.append(labels | {"part": "start", "value": cell.start})
        after = {seed: (x[x > 0], y[x > 0]) for seed, (x, y) in cell.curves.items()}
        for seed, curve in after.items():
            rows += [labels | {"part": "seed", "seed": seed, "x": x, "value": y} for x, y in zip(*curve)]
        if all(len(x) for x, _ in after.values()):
            mean = mean_line(list(after.values()), math.inf, evaluations=True)
            rows += [labels | {"part": "mean", "x": x, "value": value.mean} for x, value in mean]
        if cell.fits:
            first = min(x[0] for x, _ in after.values())
            for part, (low, high) in {
                "fit": (first, cell.largest),
                "extrapolated": (cell.largest, BEYOND * cell.largest),
            }.items():
                grid = np.geomspace(low, high, 41)
                line = cell.predicted(grid).assign(x=grid, part=part, **labels)
                rows += records_of(line)
        found = {"value": cell.asymptote.mean, "low": cell.asymptote.low, "high": cell.asymptote.high}
        rows.append(labels | found | {"part": "asymptote", "note": "; ".join(cell.reasons)})
    names = ["level", "arm", "part", "seed", "x", "value", "low", "high", "n", "note"]
    return pd.DataFrame(rows, columns=names).astype({"seed": "Int64", "n": "Int64"}).round(6)


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no such figure; empty where there is one."""
    evaluated = any(cell.evaluations for cell in fit_sweep(data, finals))
    return "" if evaluated else "no finished run was evaluated on held-out problems after its start"


def draw_ceiling(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_ceiling`; None where no run was evaluated after its start.

    Arms are columns, levels rows, many arms take several rows a level; the axes are shared.
    """
    cells = [cell for cell in fit_sweep(data, finals) if cell.evaluations]
    if not cells:
        return None
    numbers = ceiling_numbers(cells)
    name = f"{data.record.name}_ceiling"
    of = {(cell.level, cell.arm): cell for cell in cells}
    arms = [arm for arm in data.arms if any(arm == other for _, other in of)]
    levels = [level for level in data.levels if any(level == other for other, _ in of)]
    columns = min(len(arms), _COLUMNS)
    rows = [(level, arms[start : start + columns]) for level in levels for start in range(0, len(arms), columns)]
    bands = _bands(cells)
    # In inches, from the top: heading, legend, then titles and panel for every level, then label and footer.
    width = max(8.0, 0.9 + 1.75 * columns)
    room = (width - _LEFT) / columns - 0.15
    footer = wrapped(_footer(data, bands, arms, levels), width - 0.2, TINY)
    names = {arm: broken(arm, room, BODY) for arm in arms}
    notes = {labels: _note(data, cell, room) for labels, cell in of.items()}
    over_panel = (max(map(len, names.values())) * BODY + max(map(len, notes.values())) * SMALL) * LINE + 0.08
    top = heading_height(_HEADING, width) + _LEGEND + over_panel
    bottom = 0.6 + len(footer) * TINY * LINE
    between = over_panel + 0.15
    height = top + bottom + _PANEL * len(rows) + between * (len(rows) - 1)
    with house_style(name):
        figure = Figure(figsize=(width, height))
        write_heading(figure, _HEADING)
        _legend(figure, heading_height(_HEADING, width))
        place = {"left": _LEFT / width, "right": 1 - _RIGHT / width, "top": 1 - top / height, "bottom": bottom / height}
        place |= {"wspace": 0.1, "hspace": between / _PANEL}
        panels = figure.subplots(len(rows), columns, sharex=True, sharey=True, squeeze=False, gridspec_kw=place)
        label = _scale(panels[0, 0], numbers, cells, finals)
        for position, ((level, of_row), row) in enumerate(zip(rows, panels)):
            for column, axes in enumerate(row[len(of_row) :], len(of_row)):
                axes.set_visible(False)
                if position:
                    panels[position - 1, column].tick_params(labelbottom=True)
            for arm, axes in zip(of_row, row):
                if (level, arm) in of:
                    own = numbers[(numbers["level"] == level) & (numbers["arm"] == arm)]
                    _panel(axes, own, of[level, arm])
                _title(axes, names[arm], notes.get((level, arm), ["no finished run"]), of.get((level, arm)))
            factor = data.design.factor if data.design else ""
            row[0].set_ylabel(f"{factor} = {level}\naccuracy" if factor else "held-out accuracy,\nevaluation protocol")
        middle = (_LEFT + width - _RIGHT) / 2 / width
        figure.text(middle, (bottom - 0.36) / height, label, ha="center", va="center", fontsize=BODY)
        write_footer(figure, footer)
    return Drawn(name, figure, numbers, bands)


def _scale(axes: Axes, numbers: pd.DataFrame, cells: Sequence[CellFit], finals: FinalValues) -> str:
    """Limits and ticks of all panels, which share them; returns the label of the budget."""
    seen = numbers[numbers["part"].isin(["start", "seed"])]
    # Upper ends of A are shown whole, up to 1; lower ends below anything measured do not set the axes.
    high = max([seen["value"].max(), *(cell.asymptote.high for cell in cells if cell.fits)])
    axes.set_ylim(seen["value"].min() - 0.04, min(high + 0.04, 1.02))
    first, last = seen["x"].min() / 1.3, BEYOND * max(cell.largest for cell in cells)
    axes.set_xscale("log")
    axes.set_xlim(first, last * _MARK**2)
    label, formatter = budget_label(finals.axis, finals.budget)
    axes.xaxis.set_major_locator(FixedLocator(_ticks(first, last)))
    axes.xaxis.set_major_formatter(formatter)
    axes.xaxis.set_minor_locator(NullLocator())
    return f"{label}, logarithmic"


def _ticks(first: float, last: float) -> list[float]:
    """At most four round numbers between two budgets."""
    decades = range(math.floor(math.log10(first)), math.ceil(math.log10(last)) + 1)
    series = [[digit * 10.0**decade for decade in decades for digit in digits] for digits in ((1, 2, 5), (1, 3), (1,))]
    inside = [[tick for tick in ticks if first <= tick <= last] for ticks in series]
    return next((ticks for ticks in inside if len(ticks) <= 4), inside[-1][:: max(1, math.ceil(len(inside[-1]) / 4))])


def _panel(axes: Axes, numbers: pd.DataFrame, cell: CellFit) -> None:
    part = dict(list(numbers.groupby("part")))
    axes.axhline(cell.start, color=GREY, linewidth=0.8, linestyle=(0, (1, 2)))
    for _, run in part["seed"].groupby("seed"):
        axes.plot(run["x"], run["value"], "-o", color=BLUE, linewidth=0.5, markersize=2, markeredgewidth=0, alpha=0.4)
    if "mean" in part:
        axes.plot(part["mean"]["x"], part["mean"]["value"], "o", color=BLUE, markersize=3.2, label="mean")
    for name, dashes in (("fit", "-"), ("extrapolated", ":")):
        if name in part:
            line = part[name]
            axes.plot(line["x"], line["value"], dashes, color=BLACK, linewidth=1.4, label=name)
            axes.fill_between(line["x"], line["low"], line["high"], color=BLACK, alpha=0.12, linewidth=0)
    if cell.fits:
        _asymptote(axes, cell)
    axes.spines[["top", "right"]].set_visible(False)


def _asymptote(axes: Axes, cell: CellFit) -> None:
    """A and its interval in the right margin, filled where identified; open arrows where it goes on."""
    x, colour = axes.get_xlim()[1] / _MARK, BLACK if cell.identified else VERMILLION
    bottom, top = axes.get_ylim()
    low, high = max(cell.asymptote.low, bottom), min(cell.asymptote.high, 1.0, top)
    axes.plot([x, x], [low, high], color=colour, linewidth=1.4, solid_capstyle="butt", label="interval of A")
    for end, arrow, open_end in ((high, "^", cell.unbounded), (low, "v", low > cell.asymptote.low)):
        if open_end:
            axes.plot(x, end, arrow, color=colour, markersize=5, fillstyle="none", clip_on=False, label="open")
    face = colour if cell.identified else "white"
    axes.plot(x, cell.asymptote.mean, "D", color=colour, markerfacecolor=face, markersize=4, label="A")


def _note(data: SweepData, cell: CellFit, room: float) -> list[str]:
    """The number of seeds and what was found, in lines over a panel."""
    n, planned = len(cell.curves), data.seeds_planned(cell.level, cell.arm)
    count = f"n = {n}" if n == planned else f"n = {n} of {planned} seeds"
    lines = [f"{count}, profile interval" if cell.kind == OF_CURVE else count]
    if cell.identified:
        return [*lines, f"A {cell.asymptote.text()}"]
    more = len(cell.reasons) - _REASONS
    said = "; ".join([*cell.reasons[:_REASONS], *([f"{more} more"] if more > 0 else [])])
    return lines + wrapped(f"{'not identified' if cell.fits else 'no fit'}: {said}", room, SMALL)


def _title(axes: Axes, name: Sequence[str], note: Sequence[str], cell: CellFit | None) -> None:
    axes.set_title("\n".join(name), fontsize=BODY, fontweight="bold", loc="left", pad=5 + len(note) * SMALL * 1.35)
    colour = BLACK if cell is not None and cell.identified else VERMILLION
    place = {"xycoords": "axes fraction", "textcoords": "offset points", "fontsize": SMALL}
    axes.annotate("\n".join(note), (0, 1), xytext=(0, 4), color=colour, **place)


def _legend(figure: Figure, heading: float) -> None:
    handles = {
        "evaluations of single seeds": Line2D([], [], color=BLUE, marker="o", markersize=2, linewidth=0.5, alpha=0.6),
        "mean over seeds": Line2D([], [], color=BLUE, marker="o", markersize=4, linestyle=""),
        "sigmoid where evaluated": Line2D([], [], color=BLACK, linewidth=1.4),
        "extrapolated": Line2D([], [], color=BLACK, linewidth=1.4, linestyle=":"),
        "its band": Patch(color=BLACK, alpha=0.12, linewidth=0),
        "A, identified": Line2D([], [], color=BLACK, marker="D", markersize=4, linewidth=1.4),
        "A, not identified": Line2D([], [], color=VERMILLION, marker="D", markersize=4, markerfacecolor="white"),
        "start": Line2D([], [], color=GREY, linewidth=0.8, linestyle=(0, (1, 2))),
    }
    width, height = figure.get_size_inches()
    place = {"loc": "upper left", "bbox_to_anchor": (0.08 / width, 1 - heading / height), "borderaxespad": 0.0}
    look = {"frameon": False, "fontsize": BODY, "handlelength": 2.4, "borderpad": 0.0, "columnspacing": 2}
    figure.legend(handles.values(), handles.keys(), ncols=4, **place, **look)


def _bands(cells: Sequence[CellFit]) -> str:
    profile = "95% profile band of the one curve, or of the mean of two seeds, which says nothing of other seeds"
    kinds = {cell.kind for cell in cells if cell.kind}
    if not kinds:
        return "no sigmoid was fitted"
    if kinds == {OF_CURVE}:
        return f"band and bar: {profile}"
    over = "band: 95% t interval of the seeds' own sigmoids; bar: that of their A"
    return over + (f"; with fewer than three seeds, {profile}" if OF_CURVE in kinds else "")


def _footer(data: SweepData, bands: str, arms: Sequence[str], levels: Sequence[str]) -> str:
    absent = [arm for arm in data.arms if arm not in arms]
    if data.design:
        absent += [f"{data.design.factor} = {level}" for level in data.levels if level not in levels]
    parts = [
        f"{bands[0].upper()}{bands[1:]}.",
        "R = R_0 + (A - R_0) / (1 + (C_mid / C)^B), R_0 the accuracy before training, A the asymptote, C the budget. "
        "A is identified where its interval stays below 1 and clear of the start and the budget is at least 2 C_mid; "
        "an open arrow marks an interval that reaches 1 or, at the bottom, leaves the panel.",
        f"Not drawn: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "ceiling",
    draw_ceiling,
    missing,
    title="Ceiling and efficiency",
    how_to_read=(
        "Held-out accuracy (evaluation protocol) over the budget, logarithmic, with a fitted sigmoid: solid "
        "where it was observed, dotted where it is extrapolated. An open interval says that the asymptote is "
        "not identified."
    ),
)
