"""Whether an effect depends on what is held equal: the same contrasts at equal steps, tokens, operations, seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

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
from grpo_lab.analysis.figures.panels import draw_intervals, level_label, rows_of_arms, symmetric_limit
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Drawn,
    Entry,
    house_style,
    in_lines,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, QUANTITIES, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.metrics import find, is_known, logged_name

# Colour and mark of every axis.
LOOKS = {
    "steps": (BLACK, "o"),
    "sampled_tokens": (BLUE, "s"),
    "trained_tokens": (SKY, "D"),
    "flops": (GREEN, "^"),
    "simulated_seconds": (PURPLE, "P"),
    "device_seconds": (ORANGE, "v"),
}
BARS = "mark and bar: mean of the differences paired by seed and its 95% t interval"
BARS_OF_FEW = "mark: mean of the differences paired by seed, no interval"


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
    limits = {metric: _limit(shown, metric) for metric in shown.metrics}
    ends = numbers["metric"].map(limits)
    bars += BEYOND if ((numbers["high"] > ends) | (-numbers["low"] > ends)).any() else ""
    heights = [len(here) for here in shown.rows.values()]
    row = max(0.4, 0.105 * len(shown.on_axes) + 0.13)
    with house_style(name):
        heading = "What every trick does at equal steps, tokens, operations and seconds"
        figure = new_figure(heading, 1.9 + row * sum(heights) + 0.3 * len(heights))
        shape: dict[str, Any] = {"height_ratios": heights, "sharex": "col", "squeeze": False}
        grid = figure.subplots(len(heights), len(shown.metrics), **shape)
        for (level, contrasts), of_row in zip(shown.rows.items(), grid):
            for axes, metric in zip(of_row, shown.metrics):
                _panel(axes, shown, metric, contrasts, limits[metric])
            of_row[0].set_yticks(range(len(contrasts)), [_label(shown, contrast) for contrast in contrasts])
            of_row[0].set_ylabel(level_label(data, level))
        for first, last, metric in zip(grid[0], grid[-1], shown.metrics):
            first.set_title(in_lines(QUANTITIES.get(metric, metric), 45))
            last.set_xlabel(f"difference, {unit_of(metric)}")
        entries = [_entry(axis, at.finals, axis == finals.axis) for axis, at in shown.on_axes.items()]
        write_legend(figure, entries, 3)
        write_footer(figure, bars)
    return Drawn(name, figure, numbers, bars, caption=_caption(data, shown))


def _label(shown: Shown, contrast: Contrast) -> str:
    pairs = {effect.n_pairs for metric in shown.metrics for effect in shown.of(metric, contrast).values()}
    return f"{in_lines(contrast.trick, 26)}\n{contrast.context}, n = {' or '.join(map(str, sorted(pairs)))}"


def _panel(axes: Axes, shown: Shown, metric: str, contrasts: Sequence[Contrast], limit: float) -> None:
    rows_of_arms(axes, [""] * len(contrasts))
    axes.set_xlim(-limit, limit)
    scale, apart = scale_of(metric), 0.8 / len(shown.on_axes)
    for number, contrast in enumerate(contrasts):
        for place, (axis, effect) in enumerate(shown.of(metric, contrast).items()):
            y, (colour, mark) = number - 0.4 + (place + 0.5) * apart, LOOKS[axis]
            mean = effect.interval.scaled(scale)
            ends = pd.DataFrame([{"value": mean.mean, "low": mean.low, "high": mean.high}])
            draw_intervals(axes, ends, [y], colour, mark, limit)
        if flip := shown.flips.get((metric, contrast.level, contrast.name)):
            look: dict[str, Any] = {
                "color": VERMILLION if flip.resolved else GREY,
                "fontweight": "bold" if flip.resolved else "normal",
            }
            axes.annotate("⇄", (1, number), xycoords=("axes fraction", "data"), va="center", fontsize=10, **look)


def _limit(shown: Shown, metric: str) -> float:
    """Half the width of the axis, in the unit shown."""
    contrasts = [contrast for here in shown.rows.values() for contrast in here]
    effects = [effect for contrast in contrasts for effect in shown.of(metric, contrast).values()]
    scale = scale_of(metric)
    measured = pd.Series([scale * value for effect in effects for value in effect.differences.values()], dtype=float)
    ends = pd.Series([scale * end for e in effects for end in (e.interval.low, e.interval.high)], dtype=float)
    return symmetric_limit(measured, ends)


def _entry(axis: str, finals: FinalValues, declared: bool) -> Entry:
    colour, mark = LOOKS[axis]
    exact = 1000 <= finals.budget < 1e9
    amount = finals.at if exact else f"{finals.budget:.4g} {axis.replace('_', ' ')}"
    line = Line2D([], [], color=colour, marker=mark, linewidth=1.4, markersize=4)
    return line, f"at {amount}" + (" (declared)" if declared else "")


def _caption(data: SweepData, shown: Shown) -> str:
    sure, unsure = (_flipped(data, shown, resolved) for resolved in (True, False))
    parts = [
        "Every budget is the smallest that any finished run ended with on its axis, so arms that spend it faster are "
        "read earlier in their runs; device seconds are those of the machines it ran on.",
        f"⇄ the sign depends on the axis, adjusted p below .05 on both sides: {sure}."
        if sure
        else "No sign significantly depends on the axis.",
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
