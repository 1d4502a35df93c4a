"""The effect of every trick on downstream accuracy, beside its effect on training reward: one row per trick."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from grpo_lab.analysis.effects.contrast_plan import Contrast, is_ladder, not_run, order_warning, planned_contrasts
from grpo_lab.analysis.effects.contrasts import SCREENING, Disagreement, TrickEffect
from grpo_lab.analysis.figures.forest_rows import BEYOND, PP, Row, forest_numbers, forest_rows, noise_band, shown_kinds
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import BARS_OF_FEW
from grpo_lab.analysis.figures.panels import at_level, level_label, rows_of_arms, symmetric_limit
from grpo_lab.analysis.figures.style import (
    BLACK,
    GREEN,
    GREY,
    SMALL,
    TINY,
    VERMILLION,
    Drawn,
    Entry,
    house_style,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval

MARKERS = {"added": "D", "left_out": "s", "given": "^", "main": "o", "interaction": "P"}
TITLES = {
    "added": "added",
    "left_out": "left out (what having it adds)",
    "given": "in another context",
    "main": "average over all contexts",
    "interaction": "beyond the sum of both",
}
BARS = "mark and bar: mean of the differences paired by seed and its 95% t interval; dots: single seeds"
_TINT, _EDGE = 0.25, 0.02  # how opaque an effect is coloured whose signs disagree; how far, within noise


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no such figure; empty where there is one."""
    if not any(contrast.kind != "whole" for contrast in planned_contrasts(data)):
        return "no two of its arms differ by exactly one trick"
    return "" if forest_rows(data, finals) else "no two arms that ran and share a seed differ by exactly one trick"


def draw_forest(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_forest`; None where `missing` says why."""
    rows = forest_rows(data, finals)
    if not rows:
        return None
    name = f"{data.record.name}_forest"
    levels = [level for level in data.levels if any(row.level == level for row in rows)]
    effects = [effect for row in rows for effect in row.effects]
    pairs = max(effect.n_pairs for effect in effects)
    ends = {level: noise_band(data, finals, level, pairs) for level in levels}
    numbers = forest_numbers(rows, {level: end for level, end in ends.items() if not math.isnan(end)})
    second = any(row.beside for row in rows)
    heights = [sum(_height(row) for row in rows if row.level == level) for level in levels]
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    bars += BEYOND if _leaves_axis([*effects, *(e for row in rows for e in row.rewards.values())]) else ""
    with house_style(name):
        heading = "What every trick does to downstream accuracy, and to training reward"
        figure = new_figure(heading, 1.7 + 0.3 * sum(heights) + 0.3 * len(levels))
        shape: dict[str, Any] = {"height_ratios": heights, "width_ratios": [2.2, 1] if second else [1]}
        grid = figure.subplots(len(levels), 2 if second else 1, sharex="col", squeeze=False, **shape)
        for level, row in zip(levels, grid):
            here = [one for one in rows if one.level == level]
            _panel(row[0], here, ends[level], _limit(rows), _contexts(effects))
            row[0].set_ylabel(level_label(data, level))
            if second:
                _interactions(row[1], here)
        grid[-1, 0].set_xlabel("difference, percentage points")
        write_legend(figure, _entries(rows, effects, bool(numbers["part"].eq("band").any()), is_ladder(data)), 3)
        write_footer(figure, bars)
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals, rows, ends))


def _height(row: Row) -> int:
    """Lines that a trick takes: one per effect, and room for a name in two lines."""
    return max(len(row.effects), len(row.lines))


def _contexts(effects: Sequence[TrickEffect]) -> bool:
    """Whether the contexts must be written beside the tricks: they differ within a kind."""
    return len({effect.contrast.context for effect in effects}) > len({effect.contrast.kind for effect in effects})


def _limit(rows: Sequence[Row]) -> float:
    """Half the width of the axis in percentage points."""
    return _limit_of([effect for row in rows for effect in (*row.effects, *row.rewards.values())])


def _limit_of(effects: Sequence[TrickEffect]) -> float:
    measured = pd.Series([PP * value for effect in effects for value in effect.differences.values()], dtype=float)
    ends = pd.Series([PP * end for e in effects for end in (e.interval.low, e.interval.high)], dtype=float)
    return symmetric_limit(measured, ends, 0.5)


def _leaves_axis(effects: Sequence[TrickEffect]) -> bool:
    limit = _limit_of(effects) / PP
    return any(-effect.interval.low > limit or effect.interval.high > limit for effect in effects)


def _panel(axes: Axes, rows: Sequence[Row], band: float, limit: float, contexts: bool) -> None:
    labels, numbers, places = [], [], []
    if not math.isnan(band):
        axes.axvspan(-band * PP, band * PP, color=GREY, alpha=0.10, linewidth=0)
    top = 0.0
    for row in rows:
        for at, effect in enumerate(row.effects):
            y = top + (at + 0.5) * _height(row) / len(row.effects) - 0.5
            _effect(axes, row, effect, y, limit)
            name = "\n".join(row.lines) if at == 0 else ""
            labels.append(f"{name}  {effect.contrast.context}".strip() if contexts else name)
            numbers.append(_numbers_of(effect))
            places.append(y)
        top += _height(row)
        axes.axhline(top - 0.5, color="#E4E4E4", linewidth=0.5)
    _tidy(axes, top, limit)
    axes.set_yticks(places, labels)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(places, numbers)
    beside.tick_params(length=0, labelsize=TINY)
    beside.spines[:].set_visible(False)


def _effect(axes: Axes, row: Row, effect: TrickEffect, y: float, limit: float) -> None:
    """One context of a trick: downstream accuracy above, training reward below."""
    name, kind = effect.contrast.name, effect.contrast.kind
    if found := row.disagreements.get(name):
        # Estimates of nothing go opposite ways half of the time: those get a mark at the edge only.
        right = 1.0 if found.resolved else _EDGE
        axes.axhspan(y - 0.5, y + 0.5, xmax=right, color=VERMILLION, alpha=_TINT, linewidth=0)
    for value in effect.differences.values():
        axes.plot(value * PP, y - 0.15, "o", color=GREEN, alpha=0.28, markersize=3, markeredgewidth=0)
    _bar(axes, effect.interval, y - 0.15, GREEN, 1.8, limit)
    look: dict[str, Any] = {"color": GREEN, "markersize": 4.8, "markerfacecolor": _face(kind), "markeredgewidth": 1.2}
    axes.plot(effect.interval.mean * PP, y - 0.15, MARKERS[kind], label=name, **look)
    if reward := row.rewards.get(name):
        _bar(axes, reward.interval, y + 0.25, VERMILLION, 0.9, limit)
        axes.plot(reward.interval.mean * PP, y + 0.25, "|", color=VERMILLION, markersize=5)


def _face(kind: str) -> str:
    return "white" if kind == "left_out" else GREEN


def _bar(axes: Axes, interval: Interval, y: float, colour: str, width: float, limit: float) -> None:
    """The interval; an arrowhead where it leaves the axis."""
    low, high = interval.low * PP, interval.high * PP
    axes.plot([low, high], [y, y], color=colour, linewidth=width, solid_capstyle="butt")
    for end, mark in ((low, "<"), (high, ">")):
        if abs(end) > limit:
            axes.plot(math.copysign(limit, end), y, mark, color=colour, markersize=3.5)


def _interactions(axes: Axes, rows: Sequence[Row]) -> None:
    """What a trick gives inside the whole beyond what it gives alone."""
    limit, top = _limit_of([row.beside for row in rows if row.beside]), 0.0
    for row in rows:
        if row.beside:
            y = top + _height(row) / 2 - 0.5
            for value in row.beside.differences.values():
                axes.plot(value * PP, y, "o", color=BLACK, alpha=0.25, markersize=3, markeredgewidth=0)
            _bar(axes, row.beside.interval, y, BLACK, 1.6, limit)
            axes.plot(row.beside.interval.mean * PP, y, "P", color=BLACK, markersize=4.8)
            words = _estimate(row.beside.interval) + _star(row.beside)
            axes.annotate(words, (0, y), (0, 6), textcoords="offset points", ha="center", fontsize=TINY)
        top += _height(row)
    _tidy(axes, top, limit)
    axes.set_yticks([])
    axes.set_title("with all others, less alone", fontsize=SMALL)
    axes.set_xlabel("pp, downstream")


def _tidy(axes: Axes, rows: float, limit: float) -> None:
    rows_of_arms(axes, [])
    axes.set(xlim=(-limit, limit), ylim=(rows - 0.5, -0.5))


def _estimate(interval: Interval) -> str:
    return interval.scaled(PP).written("{:+.1f}".format)


def _star(effect: TrickEffect) -> str:
    return "*" if effect.p_adjusted < 0.05 else ""


def _numbers_of(effect: TrickEffect) -> str:
    collapsed = effect.collapsed_with + effect.collapsed_without
    count = f"n = {effect.n_pairs}" + (f", {collapsed} collapsed" if collapsed else "")
    return f"{_estimate(effect.interval)}{_star(effect)}   {count}"


def _entries(rows: Sequence[Row], effects: Sequence[TrickEffect], band: bool, ladder: bool) -> list[Entry]:
    """The legend, as handles and words."""
    entries: list[Entry] = []
    for kind in (kind for kind in MARKERS if kind in {effect.contrast.kind for effect in effects}):
        look = {"color": GREEN, "markerfacecolor": _face(kind), "markersize": 5}
        title = "increment" if ladder else TITLES[kind]
        entries.append((Line2D([], [], marker=MARKERS[kind], linewidth=1.8, **look), f"downstream, {title}"))
    if any(row.rewards for row in rows):
        line = Line2D([], [], marker="|", color=VERMILLION, linewidth=0.9, alpha=0.7)
        entries.append((line, "training reward (correctness)"))
    if band:
        entries.append((Patch(color=GREY, alpha=0.15, linewidth=0), "too small to be found"))
    apart = [found for row in rows for found in row.disagreements.values()]
    if any(found.resolved for found in apart):
        entries.append((Patch(color=VERMILLION, alpha=_TINT, linewidth=0), "opposite signs, each interval excludes 0"))
    if not all(found.resolved for found in apart):
        mark = Line2D([], [], marker="s", linestyle="", color=VERMILLION, alpha=_TINT, markeredgewidth=0)
        entries.append((mark, "opposite signs, within noise"))
    return entries


def _caption(data: SweepData, finals: FinalValues, rows: Sequence[Row], ends: dict[str, float]) -> str:
    kinds = (*shown_kinds(data), "interaction")
    absent = dict.fromkeys(_place(data, contrast) for contrast in not_run(data, finals) if contrast.kind in kinds)
    parts = [
        f"Final values at {finals.at}.{finals.over_bases}",
        "Numbers: downstream accuracy, percentage points, with pairs of runs.",
        _stars(rows),
        _band(data, finals, rows, ends),
        _apart(data, rows),
        order_warning(data),
        f"Not run: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))


def _stars(rows: Sequence[Row]) -> str:
    """What a star means, and over how many tests."""
    shown = [effect for row in rows for effect in (*row.effects, row.beside) if effect]
    sizes = {effect.contrast.kind: effect.family for effect in shown if effect.correction}
    if not sizes:
        return ""
    how = next(effect.correction for effect in shown if effect.correction)
    screening = ", a screening" if how == SCREENING else ""
    families = ", ".join(f"{size} {kind.replace('_', ' ')}" for kind, size in sizes.items())
    return f"*: p < .05 after {how}{screening} over all effects of the kind ({families})."


def _band(data: SweepData, finals: FinalValues, rows: Sequence[Row], ends: dict[str, float]) -> str:
    if all(math.isnan(end) for end in ends.values()):
        return ""
    pairs = max(effect.n_pairs for row in rows for effect in row.effects)
    seeds = " or ".join(map(str, sorted({len(finals.of(level, data.control, DOWNSTREAM)) for level in ends})))
    return (
        f"Grey: true effects that {pairs} pairs would miss more than one time in five, if arms scattered as the "
        f"{seeds} seeds of {data.control} do and pairing took nothing of it; a rough guide."
    )


def _apart(data: SweepData, rows: Sequence[Row]) -> str:
    """In words: which tricks reward and downstream disagree about."""
    if not any(row.rewards for row in rows):
        return ""
    found = [apart for row in rows for apart in row.disagreements.values()]
    short = not _contexts([effect for row in rows for effect in row.effects]) and all(len(r.effects) == 1 for r in rows)
    names = {id(apart): _place(data, apart.reward.contrast, short) for apart in found}
    sure = [f"{names[id(apart)]} ({_both(apart)})" for apart in found if apart.resolved]
    unsure = [names[id(apart)] for apart in found if not apart.resolved]
    parts = [
        f"Training reward and downstream accuracy go opposite ways, both adjusted p below .05: {'; '.join(sure)}."
        if sure
        else "For no trick are both effects significant (adjusted p below .05) and of opposite sign.",
        f"Opposite estimates, within noise: {', '.join(unsure)}." if unsure else "",
    ]
    return " ".join(filter(None, parts))


def _both(found: Disagreement) -> str:
    reward, downstream = (_estimate(effect.interval) for effect in (found.reward, found.downstream))
    return f"reward {reward}, downstream {downstream}"


def _place(data: SweepData, contrast: Contrast, short: bool = False) -> str:
    return f"{contrast.trick}{'' if short else ' ' + contrast.context}{at_level(data, contrast.level)}"


FIGURE = FigureKind(
    "forest",
    draw_forest,
    missing,
    title="Effect of every trick",
    how_to_read=(
        "One row per trick and context, percentage points, paired by seed. Inside the shaded band an effect "
        "is smaller than so many seeds can find; rows where reward and downstream accuracy disagree in sign "
        "are marked."
    ),
)
