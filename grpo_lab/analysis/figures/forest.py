"""The effect of every trick on downstream accuracy, beside its effect on training reward: one row per trick."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.effects.contrast_plan import Contrast, is_ladder, not_run, order_warning, planned_contrasts
from grpo_lab.analysis.effects.contrasts import SCREENING, Disagreement, TrickEffect
from grpo_lab.analysis.figures.forest_rows import BEYOND, PP, Row, forest_numbers, forest_rows, noise_band, shown_kinds
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.omissions import BARS_OF_FEW
from grpo_lab.analysis.figures.style import (
    BLACK,
    BODY,
    GREEN,
    GREY,
    LINE,
    SMALL,
    TINY,
    VERMILLION,
    Drawn,
    heading_height,
    house_style,
    text_width,
    wrapped,
    write_footer,
    write_heading,
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
_EFFECT, _GAP = 0.27, 0.11  # inches: the two lines of an effect, and between two tricks
_BETWEEN, _ENTRY = 0.3, 2.6  # between two levels, an entry of the legend
_MAIN, _SECOND = 3.4, 1.5  # inches: the panel of the effects, the one of the interactions
_TINT, _EDGE = 0.25, 0.02  # how opaque an effect is coloured whose signs disagree; how far, within noise
_UPPER, _LOWER = 0.66, 0.22  # where its two lines are, from its foot


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
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    second = any(row.beside for row in rows)
    contexts = _contexts(effects)
    # In inches, from the left: tricks, their contexts, effects, effects as numbers, interactions.
    left = 0.45 + max(text_width(line, BODY) for row in rows for line in row.lines)
    left += 0.3 if data.design and data.design.factor else 0.0
    left += max(text_width(effect.contrast.context, TINY) for effect in effects) + 0.15 if contexts else 0.0
    column = max(text_width(_numbers_of(effect), TINY) for effect in effects) + 0.25
    width = max(8.0, left + _MAIN + column + (_SECOND + 0.2 if second else 0.0))
    main = width - left - column - (_SECOND + 0.2 if second else 0.0)
    heading = "What every trick does to downstream accuracy, and to training reward"
    drawn = [effect for row in rows for effect in (*row.effects, *row.rewards.values())]
    limit, beside = _limit(drawn), [row.beside for row in rows if row.beside]
    bars += BEYOND if _leaves_axis(drawn) or (beside and _leaves_axis(beside)) else ""
    footer = wrapped(_footer(data, finals, rows, ends, bars), width - 0.2, TINY)
    heights = {level: sum(_height(row) for row in rows if row.level == level) for level in levels}
    entries = _entries(rows, effects, bool(numbers["part"].eq("band").any()), is_ladder(data))
    columns = max(1, int(width / _ENTRY))
    legend = math.ceil(len(entries) / columns) * SMALL * LINE + 0.1
    top, bottom = heading_height(heading, width) + legend + (0.4 if second else 0.1), 0.5 + len(footer) * TINY * LINE
    height = top + bottom + sum(heights.values()) + _BETWEEN * (len(levels) - 1)
    with house_style(name):
        figure = Figure(figsize=(width, height))
        write_heading(figure, heading)
        _legend(figure, heading_height(heading, width), entries, columns)
        y = height - top
        for level in levels:
            y -= heights[level]
            here = [row for row in rows if row.level == level]
            axes = figure.add_axes((left / width, y / height, main / width, heights[level] / height))
            _panel(axes, here, ends[level], limit, contexts, left)
            if data.design and data.design.factor:
                at = (0.12 / width, (y + heights[level] / 2) / height)
                words = f"{data.design.factor} = {level}"
                figure.text(*at, words, rotation=90, va="center", ha="left", fontsize=SMALL, fontweight="bold")
            if second:
                place = ((left + main + column) / width, y / height, _SECOND / width, heights[level] / height)
                _interactions(figure.add_axes(place), here, last=level == levels[-1], first=level == levels[0])
            axes.tick_params(labelbottom=level == levels[-1])
            y -= _BETWEEN
        axes.set_xlabel("difference, percentage points")
        write_footer(figure, footer)
    return Drawn(name, figure, numbers, bars)


def _height(row: Row) -> float:
    return _EFFECT * len(row.effects) + _GAP


def _contexts(effects: Sequence[TrickEffect]) -> bool:
    """Whether the contexts must be written beside the tricks: they differ within a kind."""
    return len({effect.contrast.context for effect in effects}) > len({effect.contrast.kind for effect in effects})


def _limit(effects: Sequence[TrickEffect]) -> float:
    """Half the width of the axis: bars of few seeds can be wider than anything measured, and are cut."""
    measured = max((abs(value) for effect in effects for value in effect.differences.values()), default=0.0)
    bounds = [abs(end) for e in effects for end in (e.interval.low, e.interval.high) if not math.isnan(end)]
    return PP * 1.08 * max(min(max(bounds, default=measured), 1.6 * measured), 0.005)


def _leaves_axis(effects: Sequence[TrickEffect]) -> bool:
    limit = _limit(effects) / PP
    return any(-effect.interval.low > limit or effect.interval.high > limit for effect in effects)


def _panel(axes: Axes, rows: Sequence[Row], band: float, limit: float, contexts: bool, left: float) -> None:
    y = sum(map(_height, rows))
    axes.set_xlim(-limit, limit)
    axes.set_ylim(0, y)
    if not math.isnan(band):
        axes.axvspan(-band * PP, band * PP, color=GREY, alpha=0.10, linewidth=0)
    axes.axvline(0, color=GREY, linewidth=1.0)
    aside = {"va": "center", "annotation_clip": False, "xycoords": ("axes fraction", "data")}
    aside |= {"textcoords": "offset points"}
    for row in rows:
        y -= _height(row)
        middle, shift = y + _height(row) / 2, -(left - 0.3) * 72
        axes.annotate("\n".join(row.lines), (0, middle), xytext=(shift, 0), ha="left", fontsize=BODY, **aside)
        at = y + _height(row) - _GAP / 2
        for effect in row.effects:
            at -= _EFFECT
            _effect(axes, row, effect, at, limit)
            upper, small = at + _UPPER * _EFFECT, {"fontsize": TINY, **aside}
            axes.annotate(_numbers_of(effect), (1, upper), xytext=(6, 0), ha="left", **small)
            if contexts:
                axes.annotate(effect.contrast.context, (0, upper), xytext=(-6, 0), ha="right", color=GREY, **small)
    _tidy(axes)


def _effect(axes: Axes, row: Row, effect: TrickEffect, at: float, limit: float) -> None:
    """One context of a trick: downstream above, training reward below."""
    name, kind = effect.contrast.name, effect.contrast.kind
    upper, lower = at + _UPPER * _EFFECT, at + _LOWER * _EFFECT
    if found := row.disagreements.get(name):
        # Estimates of nothing go opposite ways half of the time: those get a mark at the edge only.
        right = 1.0 if found.resolved else _EDGE
        axes.axhspan(at, at + _EFFECT, xmax=right, color=VERMILLION, alpha=_TINT, linewidth=0)
    for value in effect.differences.values():
        axes.plot(value * PP, upper, "o", color=GREEN, alpha=0.28, markersize=3, markeredgewidth=0)
    _bar(axes, effect.interval, upper, GREEN, 1.8, limit)
    look = {"color": GREEN, "markersize": 4.8, "markerfacecolor": _face(kind), "markeredgewidth": 1.2}
    axes.plot(effect.interval.mean * PP, upper, MARKERS[kind], label=name, **look)
    if reward := row.rewards.get(name):
        _bar(axes, reward.interval, lower, VERMILLION, 0.9, limit, alpha=0.6)
        axes.plot(reward.interval.mean * PP, lower, "|", color=VERMILLION, markersize=5, alpha=0.8)


def _face(kind: str) -> str:
    return "white" if kind == "left_out" else GREEN


def _bar(axes: Axes, interval: Interval, y: float, colour: str, width: float, limit: float, alpha: float = 1.0) -> None:
    """The interval; an arrowhead where it leaves the axis."""
    if math.isnan(interval.low):
        return
    low, high = interval.low * PP, interval.high * PP
    axes.plot([low, high], [y, y], color=colour, linewidth=width, alpha=alpha, solid_capstyle="butt")
    for end, mark in ((low, "<"), (high, ">")):
        if abs(end) > limit:
            axes.plot(math.copysign(limit, end), y, mark, color=colour, markersize=3.5, alpha=alpha)


def _interactions(axes: Axes, rows: Sequence[Row], first: bool, last: bool) -> None:
    """What a trick gives inside the whole beyond what it gives alone."""
    found = [row.beside for row in rows if row.beside]
    limit = _limit(found)
    axes.set_xlim(-limit, limit)
    axes.set_ylim(0, sum(map(_height, rows)))
    axes.axvline(0, color=GREY, linewidth=1.0)
    y = sum(map(_height, rows))
    for row in rows:
        y -= _height(row)
        if row.beside:
            middle = y + _height(row) / 2
            for value in row.beside.differences.values():
                axes.plot(value * PP, middle, "o", color=BLACK, alpha=0.25, markersize=3, markeredgewidth=0)
            _bar(axes, row.beside.interval, middle, BLACK, 1.6, limit)
            axes.plot(row.beside.interval.mean * PP, middle, "P", color=BLACK, markersize=4.8)
            words = _estimate(row.beside.interval) + _star(row.beside)
            shift = {"xytext": (0, 7), "textcoords": "offset points", "ha": "center", "fontsize": TINY}
            axes.annotate(words, (0, middle), **shift)
    _tidy(axes)
    axes.tick_params(labelbottom=last)
    if first:
        axes.set_title("in the whole\nless alone", fontsize=SMALL, loc="center")
    if last:
        axes.set_xlabel("pp, downstream")


def _tidy(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _estimate(interval: Interval) -> str:
    return interval.scaled(PP).written("{:+.1f}".format)


def _star(effect: TrickEffect) -> str:
    return "*" if effect.p_adjusted < 0.05 else ""


def _numbers_of(effect: TrickEffect) -> str:
    collapsed = effect.collapsed_with + effect.collapsed_without
    count = f"n = {effect.n_pairs}" + (f", {collapsed} collapsed" if collapsed else "")
    return f"{_estimate(effect.interval)}{_star(effect)}   {count}"


def _entries(rows: Sequence[Row], effects: Sequence[TrickEffect], band: bool, ladder: bool) -> list[tuple[Artist, str]]:
    """The legend, as handles and words."""
    entries: list[tuple[Artist, str]] = []
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


def _legend(figure: Figure, heading: float, entries: Sequence[tuple[Artist, str]], columns: int) -> None:
    width, height = figure.get_size_inches()
    place = {"loc": "upper left", "bbox_to_anchor": (0.08 / width, 1 - heading / height), "borderaxespad": 0.0}
    look = {"frameon": False, "fontsize": SMALL, "handlelength": 2.2, "borderpad": 0.0, "columnspacing": 2}
    figure.legend(*zip(*entries), ncols=columns, **place, **look)


def _footer(data: SweepData, finals: FinalValues, rows: Sequence[Row], ends: dict[str, float], bars: str) -> str:
    parts = [
        f"{bars[0].upper()}{bars[1:]}. Final values at {finals.at}.{finals.over_bases}",
        "Numbers: downstream, percentage points, with pairs of runs.",
        _stars(rows),
        _band(data, finals, rows, ends),
        _apart(data, rows),
        order_warning(data),
    ]
    kinds = (*shown_kinds(data), "interaction")
    absent = dict.fromkeys(_place(data, contrast) for contrast in not_run(data, finals) if contrast.kind in kinds)
    parts.append(f"Not run: {', '.join(absent)}." if absent else "")
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
        else "For no trick are both effects sure (adjusted p below .05) and of opposite sign.",
        f"Opposite estimates, within noise: {', '.join(unsure)}." if unsure else "",
    ]
    return " ".join(filter(None, parts))


def _both(found: Disagreement) -> str:
    reward, downstream = (_estimate(effect.interval) for effect in (found.reward, found.downstream))
    return f"reward {reward}, downstream {downstream}"


def _place(data: SweepData, contrast: Contrast, short: bool = False) -> str:
    level = f" at {data.design.factor} = {contrast.level}" if data.design and data.design.factor else ""
    return f"{contrast.trick}{'' if short else ' ' + contrast.context}{level}"


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
