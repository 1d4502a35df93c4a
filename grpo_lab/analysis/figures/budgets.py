"""Whether an effect depends on what is held equal: the same contrasts at equal steps, tokens, operations, seconds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.effects.contrast_plan import Contrast, order_warning
from grpo_lab.analysis.effects.contrasts import (
    AtBudget,
    AxisFlip,
    TrickEffect,
    effects_on_axes,
    logged_axes,
    sign_flips,
)
from grpo_lab.analysis.figures.forest_rows import BEYOND, PP, shown_kinds
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
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
from grpo_lab.analysis.final_values import DOWNSTREAM, QUANTITIES, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.metrics import find, is_known, logged_name

# Colour and mark of every axis; the three that style.py has no name for are of the same palette.
LOOKS = {
    "steps": (BLACK, "o"),
    "sampled_tokens": (BLUE, "s"),
    "trained_tokens": ("#56B4E9", "D"),
    "flops": (GREEN, "^"),
    "simulated_seconds": ("#CC79A7", "P"),
    "device_seconds": ("#E69F00", "v"),
}
BARS = "mark and bar: mean of the differences paired by seed and its 95% t interval"
BARS_OF_FEW = "mark: mean of the differences paired by seed, no interval"
_BAR, _GAP, _BETWEEN = 0.105, 0.13, 0.3  # inches: an interval, between two contrasts, between two levels
_PANEL, _RIGHT, _ENTRY = 3.0, 0.3, 2.9  # a panel, the room of its marks, an entry of the legend


@dataclass(frozen=True)
class Shown:
    """What is drawn: the effects by axis, the axes in order, and the contrasts of every level from the top."""

    on_axes: Mapping[str, AtBudget]
    metrics: tuple[str, ...]
    rows: Mapping[str, list[Contrast]]
    flips: Mapping[tuple[str, str, str], AxisFlip]  # by metric, level and name of the contrast

    def of(self, metric: str, contrast: Contrast) -> dict[str, TrickEffect]:
        """One contrast on one metric by axis."""
        return {
            axis: effect
            for axis, at in self.on_axes.items()
            for effect in at.effects
            if effect.metric == metric
            and (effect.contrast.level, effect.contrast.name) == (contrast.level, contrast.name)
        }


def shown_on_axes(data: SweepData) -> Shown:
    """Tricks in the kinds of the forest figure and whole arms, on the primary metric and downstream accuracy."""
    metrics = tuple(dict.fromkeys([data.design.primary if data.design else DOWNSTREAM, DOWNSTREAM]))
    on_axes = effects_on_axes(data, metrics, LOOKS)
    kinds = (*shown_kinds(data), "whole")
    rows: dict[str, list[Contrast]] = {}
    seen = set()
    for at in on_axes.values():
        for contrast in (effect.contrast for effect in at.effects if effect.contrast.kind in kinds):
            if (contrast.level, contrast.name) not in seen:
                seen.add((contrast.level, contrast.name))
                rows.setdefault(contrast.level, []).append(contrast)
    flips = {
        (flip.metric, flip.contrast.level, flip.contrast.name): flip
        for flip in sign_flips(on_axes)
        if (flip.contrast.level, flip.contrast.name) in seen
    }
    ordered = {level: sorted(rows[level], key=lambda it: _order(data, it)) for level in data.levels if level in rows}
    return Shown(on_axes, metrics, ordered, flips)


def _order(data: SweepData, contrast: Contrast) -> int:
    return data.tricks.index(contrast.trick) if contrast.trick in data.tricks else len(data.tricks)


def budget_numbers(shown: Shown) -> pd.DataFrame:
    """Every number drawn, six decimals: one row per contrast, metric and axis, shares in percentage points.

    `budget` is the matched budget in the axis's unit; `flip` says whether the contrast's sign depends on the axis:
    "resolved" or "within noise".
    """
    table = []
    for contrast in (contrast for contrasts in shown.rows.values() for contrast in contrasts):
        for metric in shown.metrics:
            flip = shown.flips.get((metric, contrast.level, contrast.name))
            for axis, effect in shown.of(metric, contrast).items():
                mean, scale = effect.interval, scale_of(metric)
                row = {"level": contrast.level, "trick": contrast.trick, "kind": contrast.kind}
                row |= {"context": contrast.context, "metric": metric, "axis": axis}
                row |= {"budget": shown.on_axes[axis].finals.budget, "value": scale * mean.mean}
                row |= {"low": scale * mean.low, "high": scale * mean.high, "n": mean.n}
                table.append(row | {"flip": "" if flip is None else "resolved" if flip.resolved else "within noise"})
    names = ["level", "trick", "kind", "context", "metric", "axis", "budget", "value", "low", "high", "n", "flip"]
    return pd.DataFrame(table, columns=names).round(6)


def scale_of(metric: str) -> int:
    """What a metric is multiplied by to be shown: shares as percentage points."""
    return PP if unit_of(metric) == "percentage points" else 1


def unit_of(metric: str) -> str:
    """The unit in which a difference of the metric is shown."""
    name = logged_name(metric)
    unit = find(name).unit if is_known(name) and "/" in name else "share"  # what is derived is a share
    return "percentage points" if unit == "share" else unit


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no such figure; empty where there is one."""
    axes = logged_axes(data, LOOKS)
    if len(axes) < 2:
        return f"only {len(axes)} budget axis was logged, and one has nothing to be compared with"
    return "" if shown_on_axes(data).rows else "no two arms that ran share a level and a seed"


def draw_budgets(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_budgets`; None where `missing` says why. `finals` are those on the declared axis."""
    if len(logged_axes(data, LOOKS)) < 2:
        return None
    shown = shown_on_axes(data)
    if not shown.rows:
        return None
    name, numbers = f"{data.record.name}_budgets", budget_numbers(shown)
    bars = BARS if numbers["low"].notna().any() else BARS_OF_FEW
    contrasts = [contrast for of_level in shown.rows.values() for contrast in of_level]
    factor = data.design.factor if data.design else ""
    # In inches: tricks and contexts on the left, a panel per metric with room for marks of flips.
    left = 0.35 + max(max(text_width(c.trick, BODY), text_width(_aside(shown, c), TINY)) for c in contrasts)
    left += 0.3 if factor else 0.0
    width = max(8.0, left + (_PANEL + _RIGHT) * len(shown.metrics))
    panel = (width - left) / len(shown.metrics) - _RIGHT
    heading = "What every trick does at equal steps, tokens, operations and seconds"
    limits = {metric: _limit(shown, metric, contrasts) for metric in shown.metrics}
    ends = numbers["metric"].map(limits)
    bars += BEYOND if ((numbers["high"] > ends) | (-numbers["low"] > ends)).any() else ""
    footer = wrapped(_footer(data, shown, bars), width - 0.2, TINY)
    entries = [_entry(axis, at.finals, axis == finals.axis) for axis, at in shown.on_axes.items()]
    columns = max(1, int(width / _ENTRY))
    row_height = _BAR * len(shown.on_axes) + _GAP
    titles = {metric: wrapped(f"{QUANTITIES.get(metric, metric)}", panel, BODY) for metric in shown.metrics}
    top = heading_height(heading, width) + math.ceil(len(entries) / columns) * SMALL * LINE + 0.15
    top += max(map(len, titles.values())) * BODY * LINE
    bottom = 0.5 + len(footer) * TINY * LINE
    height = top + bottom + row_height * len(contrasts) + _BETWEEN * (len(shown.rows) - 1)
    with house_style(name):
        figure = Figure(figsize=(width, height))
        write_heading(figure, heading)
        place = {"loc": "upper left", "bbox_to_anchor": (0.08 / width, 1 - heading_height(heading, width) / height)}
        place |= {"borderaxespad": 0.0, "borderpad": 0.0, "frameon": False, "fontsize": SMALL, "ncols": columns}
        figure.legend(*zip(*entries), handlelength=2.2, columnspacing=2, **place)
        y = height - top
        for level, here in shown.rows.items():
            y -= row_height * len(here)
            for number, metric in enumerate(shown.metrics):
                x = left + number * (panel + _RIGHT)
                size = (panel / width, row_height * len(here) / height)
                axes = figure.add_axes((x / width, y / height, *size))
                _panel(axes, shown, metric, here, row_height, limits[metric])
                if number == 0:
                    _labels(axes, shown, here, row_height, (left - (0.35 if factor else 0.1)) * 72)
                if level == next(iter(shown.rows)):
                    axes.set_title("\n".join(titles[metric]), fontsize=BODY, loc="left")
                last = level == list(shown.rows)[-1]
                axes.tick_params(labelbottom=last)
                if last:
                    axes.set_xlabel(f"difference, {unit_of(metric)}")
            if factor:
                at = (0.12 / width, (y + row_height * len(here) / 2) / height)
                figure.text(*at, f"{factor} = {level}", rotation=90, va="center", fontsize=SMALL, fontweight="bold")
            y -= _BETWEEN
        write_footer(figure, footer)
    return Drawn(name, figure, numbers, bars)


def _aside(shown: Shown, contrast: Contrast) -> str:
    pairs = {effect.n_pairs for metric in shown.metrics for effect in shown.of(metric, contrast).values()}
    return f"{contrast.context}, n = {' or '.join(map(str, sorted(pairs)))}"


def _labels(axes: Axes, shown: Shown, contrasts: Sequence[Contrast], row: float, shift: float) -> None:
    place = {"annotation_clip": False, "xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    for number, contrast in enumerate(reversed(contrasts)):
        middle = (number + 0.5) * row
        axes.annotate(contrast.trick, (0, middle), xytext=(-shift, 1), va="bottom", fontsize=BODY, **place)
        words = _aside(shown, contrast)
        axes.annotate(words, (0, middle), xytext=(-shift, -2), va="top", fontsize=TINY, color=GREY, **place)


def _panel(axes: Axes, shown: Shown, metric: str, contrasts: Sequence[Contrast], row: float, limit: float) -> None:
    axes.set_xlim(-limit, limit)
    axes.set_ylim(0, row * len(contrasts))
    axes.axvline(0, color=GREY, linewidth=1.0)
    scale = scale_of(metric)
    for number, contrast in enumerate(reversed(contrasts)):
        top = (number + 1) * row - _GAP / 2
        if number:
            axes.axhline(number * row, color="#E4E4E4", linewidth=0.5)
        for place, (axis, effect) in enumerate(shown.of(metric, contrast).items()):
            y, (colour, mark) = top - (place + 0.5) * _BAR, LOOKS[axis]
            mean, low, high = (scale * end for end in (effect.interval.mean, effect.interval.low, effect.interval.high))
            axes.plot([low, high], [y, y], color=colour, linewidth=1.4, solid_capstyle="butt")
            for end, arrow in ((low, "<"), (high, ">")):
                if abs(end) > limit:
                    axes.plot(math.copysign(limit, end), y, arrow, color=colour, markersize=3)
            axes.plot(mean, y, mark, color=colour, markersize=3.6, label=f"{contrast.name} {axis}")
        if flip := shown.flips.get((metric, contrast.level, contrast.name)):
            look = {"color": VERMILLION if flip.resolved else GREY, "fontweight": "bold" if flip.resolved else "normal"}
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "annotation_clip": False}
            axes.annotate("⇄", (1, (number + 0.5) * row), xytext=(4, 0), va="center", fontsize=10, **look, **place)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.set_yticks([])
    axes.grid(axis="y", visible=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _limit(shown: Shown, metric: str, contrasts: Sequence[Contrast]) -> float:
    """Half the width of the axis: bars of few seeds can be wider than anything measured, and are cut."""
    effects = [effect for contrast in contrasts for effect in shown.of(metric, contrast).values()]
    measured = max((abs(value) for effect in effects for value in effect.differences.values()), default=0.0)
    bounds = [abs(end) for e in effects for end in (e.interval.low, e.interval.high) if not math.isnan(end)]
    return 1.08 * scale_of(metric) * (min(max(bounds, default=measured), 1.6 * measured) or 1 / scale_of(metric))


def _entry(axis: str, finals: FinalValues, declared: bool) -> tuple[Line2D, str]:
    colour, mark = LOOKS[axis]
    exact = 1000 <= finals.budget < 1e9
    amount = finals.at if exact else f"{finals.budget:.4g} {axis.replace('_', ' ')}"
    line = Line2D([], [], color=colour, marker=mark, linewidth=1.4, markersize=4)
    return line, f"at {amount}" + (" (declared)" if declared else "")


def _footer(data: SweepData, shown: Shown, bars: str) -> str:
    sure, unsure = (_flipped(data, shown, resolved) for resolved in (True, False))
    parts = [
        f"{bars[0].upper()}{bars[1:]}. Every budget is the smallest that any finished run ended with on its axis, so "
        "arms that spend it faster are read earlier in their runs; device seconds are those of the machines it ran on.",
        f"⇄ the sign depends on the axis, adjusted p below .05 on both sides: {sure}."
        if sure
        else "No sign surely depends on the axis.",
        f"⇄ (grey) other estimates have both signs, within noise: {unsure}." if unsure else "",
        order_warning(data),
    ]
    return " ".join(filter(None, parts))


def _flipped(data: SweepData, shown: Shown, resolved: bool) -> str:
    """In words, by metric: the contrasts whose sign depends on the axis."""
    factor = data.design.factor if data.design else ""
    contrasts = [contrast for of_level in shown.rows.values() for contrast in of_level]
    alike = len({contrast.context for contrast in contrasts}) == 1
    by_metric: dict[str, list[str]] = {}
    for (metric, level, _), flip in shown.flips.items():
        if flip.resolved is resolved:
            where = f" at {factor} = {level}" if factor else ""
            by_metric.setdefault(metric, []).append((flip.contrast.trick if alike else flip.contrast.name) + where)
    return "; ".join(f"on {QUANTITIES.get(metric, metric)} {', '.join(names)}" for metric, names in by_metric.items())


FIGURE = FigureKind(
    "budgets",
    draw_budgets,
    missing,
    title="The same comparison at other equal budgets",
    how_to_read=(
        "Each contrast at equal steps, tokens, operations and seconds. Where intervals lie on both sides of "
        "the line, the answer depends on what is held equal."
    ),
)
