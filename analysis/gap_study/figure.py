"""When training reward misled, over all sweeps that test claims: contrasts, what announces a loss, where to stop."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from gap_study.across import (
    MISLED,
    OTHERWISE_MISLED,
    POOLED_INDICATORS,
    RULES,
    Contrast,
    Counted,
    Pool,
    announcements,
    regrets,
)
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, VERMILLION
from grpo_lab.analysis.figures.style import TINY, Drawn, house_style, new_figure, place_names, write_footer
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.table_rows import rows_of

NAME = "gap"
BARS = (
    "bars: 95% intervals, Student's t over base models; areas under the curve: base models resampled; alarms: "
    "Clopper-Pearson over runs"
)
_WIDTH, _HEIGHT = 10.0, 5.8  # inches
_RULES = {"last": "the last", "train_reward": "highest training reward", "heldout": "highest held-out accuracy"}
_SHORT = {
    "kl": "KL from the start rises",
    "entropy": "entropy falls",
    "truncation": "truncated share falls",
    "ess": "effective sample size falls",
    "correctness": "training correctness rises",
    "shaped": "shaped reward rises",
    "disagreement": "graders disagree more",
}


def gap_numbers(pooled: Pool) -> pd.DataFrame:
    """Every number of the figure: a row per contrast and axis, per indicator and quantity, per rule and conditions.

    Effects and regrets are in points, areas and shares are shares; `runs` counts runs, `bases` their base models.
    """
    rows = []
    for contrast in pooled.contrasts:
        for axis, found in (("training reward", contrast.reward), ("downstream", contrast.downstream)):
            rows.append(_row("contrast", contrast.name, axis, _points(found.whole), contrast.apart or contrast.kind))
    for name, found in announcements(pooled).items():
        for axis, area in (("area", found.auc), ("area within a base", found.within)):
            rows.append(_row("indicator", name, axis, area, found.note))
        for axis, counted in (("caught", found.caught), ("false", found.false)):
            rows.append(_row("indicator", name, axis, _share(counted), ""))
    for rule in RULES:
        rows.append(_row("regret", rule, "all", regrets(pooled.runs, rule), ""))
        for where, title in pooled.titles.items():
            own = [run for run in pooled.runs if run.track.level == where]
            if own:
                rows.append(_row("regret", rule, title, regrets(own, rule), ""))
    return pd.DataFrame(rows).round(6)


def _row(panel: str, name: str, axis: str, found: Interval, note: str) -> dict[str, object]:
    numbers = {"value": found.mean, "low": found.low, "high": found.high, "runs": found.n, "bases": found.bases}
    return {"panel": panel, "name": name, "axis": axis, **numbers, "note": note}


def _points(found: Interval) -> Interval:
    return Interval(100 * found.mean, 100 * found.low, 100 * found.high, found.n, found.bases)


def _share(counted: Counted) -> Interval:
    found = counted.runs.interval
    return Interval(found.mean, found.low, found.high, found.n, counted.bases.n)


def draw_gap(pooled: Pool) -> Drawn | None:
    """The figure `gap`; None without a contrast."""
    if not pooled.contrasts:
        return None
    numbers = gap_numbers(pooled)
    comparable = pooled.comparable
    heading = "When did training reward mislead?"
    one = next(iter(announcements(pooled).values()))
    pool = f"{len(pooled.runs)} runs of {len(pooled.sweeps)} sweeps"
    caption = (
        f"{pool} on {len(set(pooled.units))} base models. Left: {len(comparable)} arms less their controls, and "
        f"{len(pooled.contrasts) - len(comparable)} crosses, whose training grader, questions or protocol are not the "
        "control's. Filled: both intervals exclude 0. Hollow: not. Named: significantly opposite, before a correction. "
        "Warnings: a loss is 10 points of downstream accuracy since step 0; "
        f"{one.losses} losses came after a reading, {one.at_once} before any. Dark: pairs of runs under the same "
        "conditions; pale: of the same base model. Checkpoints: points given away against the best one, chosen on "
        f"other questions; dots: single conditions. {BARS[0].upper()}{BARS[1:]}"
    )
    shown = (
        f"{pool}. Hollow: an interval includes 0; cross: other grader, questions or protocol; named: significantly "
        "opposite. Bars: 95% intervals. A loss is 10 points since step 0"
    )
    with house_style(NAME):
        figure = new_figure(heading, _HEIGHT, _WIDTH)
        grid = figure.add_gridspec(2, 3, width_ratios=[2.2, 1, 1], height_ratios=[2, 1])
        contrasts = figure.add_subplot(grid[:, 0])
        _draw_contrasts(contrasts, pooled)
        _draw_indicators(figure.add_subplot(grid[0, 1]), figure.add_subplot(grid[0, 2]), pooled)
        _draw_regrets(figure.add_subplot(grid[1, 1:]), numbers)
        write_footer(figure, shown)
        _name_contrasts(contrasts, pooled)
    return Drawn(NAME, figure, numbers, BARS, caption=caption)


def _draw_contrasts(axes: Axes, pooled: Pool) -> None:
    xs = np.array([100 * contrast.reward.whole.mean for contrast in pooled.contrasts])
    ys = np.array([100 * contrast.downstream.whole.mean for contrast in pooled.contrasts])
    left, right = min(-75.0, xs.min() - 5), max(85.0, xs.max() + 5)
    low, high = min(-60.0, ys.min() - 5), max(26.0, ys.max() + 5)
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)
    axes.fill_between([0, right], low, 0, color=VERMILLION, alpha=0.08, linewidth=0)
    axes.fill_between([left, 0], 0, high, color=BLUE, alpha=0.08, linewidth=0)
    axes.axhline(0, color=GREY, linewidth=0.8)
    axes.axvline(0, color=GREY, linewidth=0.8)
    named = [contrast for contrast in pooled.contrasts if contrast.kind in (MISLED, OTHERWISE_MISLED)]
    for contrast, x, y in zip(pooled.contrasts, xs, ys):
        sure = contrast.kind != "not significant"
        colour = VERMILLION if contrast.kind == MISLED else BLUE if contrast.kind == OTHERWISE_MISLED else BLACK
        marker = "X" if contrast.apart else "o"
        if contrast in named:
            _whiskers(axes, contrast, colour)
        face = colour if sure else "white"
        edge = colour if sure else GREY
        axes.plot(x, y, marker, markersize=5, color=edge, markerfacecolor=face, markeredgewidth=0.8, zorder=3)
    axes.text(right - 2, high - 1.5, "both up", ha="right", va="top", fontsize=TINY, color=GREY)
    axes.text(left + 2, low + 1.5, "both down", ha="left", va="bottom", fontsize=TINY, color=GREY)
    for x, y, side, words, colour in (
        (right - 2, low + 1.5, "right", MISLED, VERMILLION),
        (left + 2, high - 1.5, "left", OTHERWISE_MISLED, BLUE),
    ):
        edge = "bottom" if colour == VERMILLION else "top"
        axes.text(x, y, words, ha=side, va=edge, fontsize=TINY, color=colour)
    axes.set_xlabel("effect on training correctness, percentage points")
    axes.set_ylabel("effect on downstream accuracy, percentage points")
    axes.set_title("Every arm against its control", loc="left", fontweight="bold")


def _name_contrasts(axes: Axes, pooled: Pool) -> None:
    """Names of the significantly opposite contrasts, away from the marks and from their own bars."""
    named = [contrast for contrast in pooled.contrasts if contrast.kind in (MISLED, OTHERWISE_MISLED)]
    at = [(100 * one.reward.whole.mean, 100 * one.downstream.whole.mean, one.name, BLACK) for one in named]
    others = [(100 * one.reward.whole.mean, 100 * one.downstream.whole.mean) for one in pooled.contrasts]
    for one, (x, y, _, _) in zip(named, at):
        reward, downstream = _points(one.reward.whole), _points(one.downstream.whole)
        others += [(float(along), y) for along in np.linspace(reward.low, reward.high, 20)]
        others += [(x, float(along)) for along in np.linspace(downstream.low, downstream.high, 40)]
    place_names(axes, at, pd.DataFrame(others))


def _whiskers(axes: Axes, contrast: Contrast, colour: str) -> None:
    reward, downstream = _points(contrast.reward.whole), _points(contrast.downstream.whole)
    axes.plot([reward.low, reward.high], [downstream.mean] * 2, color=colour, linewidth=0.9, zorder=2)
    axes.plot([reward.mean] * 2, [downstream.low, downstream.high], color=colour, linewidth=0.9, zorder=2)


def _draw_indicators(areas: Axes, alarms: Axes, pooled: Pool) -> None:
    names = list(POOLED_INDICATORS)
    areas.axvline(0.5, color=GREY, linewidth=0.8)
    for y, found in enumerate(announcements(pooled).values()):
        _bar(areas, found.auc, y - 0.14, BLUE)
        _bar(areas, found.within, y + 0.18, BLUE, alpha=0.4)
        _bar(alarms, _share(found.caught), y - 0.14, GREEN)
        _bar(alarms, _share(found.false), y + 0.18, VERMILLION)
    areas.set_yticks(range(len(names)), [_SHORT[name] for name in names])
    alarms.set_yticks(range(len(names)), [""] * len(names))
    alarms.axvline(0.05, color=GREY, linewidth=0.8, linestyle=":")
    for axes, title, label in (
        (areas, "What warns of a loss", "area under the curve"),
        (alarms, "", "share with an alarm"),
    ):
        axes.set_ylim(len(names) - 0.5, -0.6)
        axes.set_xlim(0, 1)
        axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0", "0.25", "0.5", "0.75", "1"])
        axes.set_xlabel(label)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.set_title(title, loc="left", fontweight="bold")
    alarms.text(0.0, 1.02, "losses", transform=alarms.transAxes, fontsize=TINY, color=GREEN, va="bottom")
    alarms.text(
        0.28, 1.02, "controls, falsely", transform=alarms.transAxes, fontsize=TINY, color=VERMILLION, va="bottom"
    )


def _draw_regrets(axes: Axes, numbers: pd.DataFrame) -> None:
    own = numbers[numbers["panel"] == "regret"]
    for y, rule in enumerate(RULES):
        single = own[(own["name"] == rule) & (own["axis"] != "all")]
        axes.plot(single["value"], [y] * len(single), "o", color=GREY, markersize=3.5, alpha=0.5, markeredgewidth=0)
        (row,) = rows_of(own[(own["name"] == rule) & (own["axis"] == "all")])
        _bar(axes, Interval(row.value, row.low, row.high, row.runs), float(y), BLACK)
    axes.axvline(0, color=GREY, linewidth=0.8)
    axes.set_yticks(range(len(RULES)), [_RULES[rule] for rule in RULES])
    axes.set_ylim(len(RULES) - 0.5, -0.5)
    axes.set_xlabel("downstream accuracy given away, percentage points")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="y", visible=False)
    axes.set_title("Which checkpoint to take", loc="left", fontweight="bold")


def _bar(axes: Axes, found: Interval, y: float, colour: str, alpha: float = 1.0) -> None:
    if math.isnan(found.mean):
        return
    if not math.isnan(found.low):
        axes.plot([found.low, found.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt", alpha=alpha)
    axes.plot(found.mean, y, "D", color=colour, markersize=4.5, alpha=alpha)
