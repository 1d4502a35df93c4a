"""Which arms are distinguishable, one row per arm and one pair of panels per metric.

Left, every arm's mean with a bar; arms are distinguishable exactly if their bars do not overlap. Right, the ranks
that an arm can have. Arms stand in the order of the primary metric; `stats.all_pairs` says how they are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.effects.all_pairs import all_pairs, ranked_metrics, why_not
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.panels import level_label
from grpo_lab.analysis.figures.style import (
    BLACK,
    GREEN,
    GREY,
    SMALL,
    VERMILLION,
    Drawn,
    Entry,
    house_style,
    in_lines,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import title, unit
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.all_pairs import AllPairs
from grpo_lab.analysis.table_rows import rows_of

BARS = (
    "mark: mean over base models; bar: two arms are distinguishable exactly if their bars do not overlap, for all "
    "pairs at once in 95% of sweeps; dots: single base models, less what a base model adds to all arms"
)
SHORT = (
    "bar: arms are distinguishable if their bars do not overlap; light bar: possible ranks; dots: single base models"
)


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence part; empty where it can."""
    return why_not(data, finals, ranked_metrics(data)[0])


def _found(data: SweepData, finals: FinalValues) -> dict[str, dict[str, AllPairs]]:
    """Level -> metric -> its arms, the primary metric first, for the levels that have the primary metric."""
    first, *others = ranked_metrics(data)
    found = {}
    for level in data.levels:
        if primary := all_pairs(data, finals, level, first):
            more = {metric: all_pairs(data, finals, level, metric) for metric in others}
            found[level] = {first: primary} | {metric: pairs for metric, pairs in more.items() if pairs}
    return found


def all_pairs_numbers(found: Mapping[str, Mapping[str, AllPairs]]) -> pd.DataFrame:
    """Every number the figure shows, six decimals, in the metric's unit; arms from the largest mean to the smallest.

    `part` is "base" (in `value` the mean on a base, less what it adds to all arms), "mean" (with the bar in low and
    high, the arm's rank and the best and worst it can have; `not_reported` says why there is no bar), or "pair" (arm
    less `other`, its simultaneous p, and whether they are distinguishable).
    """
    rows: list[dict[str, Any]] = []
    for level, by_metric in found.items():
        for metric, pairs in by_metric.items():
            order = np.argsort(-pairs.means, kind="stable")
            for rank, index in enumerate(order, start=1):
                labels = {"level": level, "metric": metric, "arm": pairs.arms[index]}
                own = pairs.by_base[:, index]
                rows += [labels | {"part": "base", "value": value} for value in own if not math.isnan(value)]
                mean, half = float(pairs.means[index]), float(pairs.halves[index])
                best, worst = pairs.ranks(pairs.arms[index])
                place = {"rank": rank, "best": best, "worst": worst, "low": mean - half, "high": mean + half}
                why = pairs.not_reported.get(pairs.arms[index], "")
                rows.append(labels | {"part": "mean", "value": mean, **place, "not_reported": why})
            for place, index in enumerate(order):
                for other in order[place + 1 :]:
                    labels = {"level": level, "metric": metric, "arm": pairs.arms[index], "other": pairs.arms[other]}
                    labels |= {"part": "pair", "value": pairs.differences[index, other], "p": pairs.p[index, other]}
                    rows.append(labels | {"distinguishable": bool(pairs.distinguishable[index, other])})
    names = ["level", "metric", "arm", "part", "other", "value", "low", "high", "rank", "best", "worst", "not_reported"]
    table = pd.DataFrame(rows, columns=[*names, "p", "distinguishable"])
    return table.astype(dict.fromkeys(("rank", "best", "worst"), "Int64") | {"distinguishable": "boolean"}).round(6)


def draw_all_pairs(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_all_pairs`; None for the reason that `missing` gives."""
    if missing(data, finals):
        return None
    found = _found(data, finals)
    numbers = all_pairs_numbers(found)
    name = f"{data.record.name}_all_pairs"
    metrics = list(dict.fromkeys(metric for by_metric in found.values() for metric in by_metric))
    sizes = [max(1.2, 0.18 * len(next(iter(own.values())).arms)) for own in found.values()]
    with house_style(name):
        figure = new_figure(f"{data.record.name}: which arms are distinguishable?", 1.2 + sum(sizes) + 0.9 * len(sizes))
        shape: dict[str, Any] = {"height_ratios": sizes, "width_ratios": [2, 1] * len(metrics)}
        grid = figure.subplots(len(found), 2 * len(metrics), squeeze=False, **shape)
        for (level, by_metric), row in zip(found.items(), grid):
            _level(row.tolist(), numbers[numbers["level"] == level], by_metric, data.control)
            row[0].set_ylabel(level_label(data, level))
        write_legend(figure, _legend(found, data), 3)
        write_footer(figure, SHORT)
    return Drawn(name, figure, numbers, BARS, caption=_caption(data, finals, found))


def _level(row: Sequence[Axes], numbers: pd.DataFrame, by_metric: Mapping[str, AllPairs], control: str) -> None:
    """Means and ranks of every metric at one level, arms in the order of the first metric."""
    first = next(iter(by_metric))
    arms = numbers[(numbers["metric"] == first) & (numbers["part"] == "mean")]["arm"].tolist()
    for axes in row[2 * len(by_metric) :]:
        axes.set_visible(False)
    for (metric, pairs), means, ranks in zip(by_metric.items(), row[::2], row[1::2]):
        own, colours = numbers[numbers["metric"] == metric], _colours(pairs, control)
        _means(means, own, arms, colours)
        _ranks(ranks, own, arms, colours)
        means.set_xlabel(_unit(metric))
        means.set_title(f"{in_lines(title(metric), 60 // len(by_metric))}\n{_statement(pairs)}", fontsize=SMALL)
        if metric == first:
            means.set_yticks(range(len(arms)), arms)
            for label in means.get_yticklabels():
                label.set_color(colours[label.get_text()])


def _statement(pairs: AllPairs) -> str:
    """The number of distinguishable pairs."""
    number = len(pairs.not_reported)
    left_out = f"; {number} arm{'s' if number > 1 else ''} not reported" if number else ""
    return f"{pairs.number_distinguishable} of {pairs.pairs} pairs distinguishable{left_out}"


def _unit(metric: str) -> str:
    return "percent" if unit(metric) == "share" else unit(metric)


def _scale(metric: str) -> float:
    return 100.0 if unit(metric) == "share" else 1.0


def _colours(pairs: AllPairs, control: str) -> dict[str, str]:
    """Arm -> its colour, by the side of the control on which it significantly is."""
    if control not in pairs.arms:
        return dict.fromkeys(pairs.arms, GREY)
    sides = pairs.distinguishable[:, pairs.arms.index(control)]
    colours = {arm: {1: GREEN, -1: VERMILLION, 0: GREY}[int(side)] for arm, side in zip(pairs.arms, sides)}
    return colours | {control: BLACK}


def _means(axes: Axes, numbers: pd.DataFrame, arms: Sequence[str], colours: Mapping[str, str]) -> None:
    """Means with their bars and, faintly, the single bases."""
    scale = _scale(str(numbers["metric"].iloc[0]))
    for row in rows_of(numbers[numbers["part"] == "base"]):
        if row.arm in arms:
            look: dict[str, Any] = {"color": colours[row.arm], "alpha": 0.3, "markersize": 2.6, "markeredgewidth": 0}
            axes.plot(scale * row.value, arms.index(row.arm), "o", **look)
    for row in rows_of(numbers[numbers["part"] == "mean"]):
        if row.arm in arms:
            y, colour = arms.index(row.arm), colours[row.arm]
            inside = "white" if row.not_reported else colour
            if not row.not_reported:
                ends = [scale * row.low, scale * row.high]
                axes.plot(ends, [y, y], color=colour, linewidth=2.0, alpha=0.75, solid_capstyle="butt")
            look = {"color": colour, "markersize": 4.2, "markerfacecolor": inside, "label": row.arm, "zorder": 4}
            axes.plot(scale * row.value, y, "o", **look)
    axes.margins(x=0.05)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    _rows(axes, len(arms))


def _ranks(axes: Axes, numbers: pd.DataFrame, arms: Sequence[str], colours: Mapping[str, str]) -> None:
    """The ranks that an arm can have, and the one of its mean."""
    means = numbers[numbers["part"] == "mean"]
    for row in rows_of(means):
        if row.arm in arms:
            y, ends = arms.index(row.arm), [row.best - 0.4, row.worst + 0.4]
            look: dict[str, Any] = {"color": colours[row.arm], "solid_capstyle": "butt"}
            look |= {"linewidth": 0.8, "linestyle": ":"} if row.not_reported else {"linewidth": 5.0, "alpha": 0.4}
            axes.plot(ends, [y, y], label=row.arm, **look)
            axes.plot(row.rank, y, "|", color=colours[row.arm], markersize=5.5, markeredgewidth=1.3)
    axes.set_xlim(0.3, len(means) + 0.7)
    ends = [1, len(means)]
    middle = list(range(10, len(means) - 4, 10)) if len(means) > 10 else list(range(2, len(means)))
    axes.set_xticks([ends[0], *middle, ends[1]])
    axes.set_xlabel("rank")
    _rows(axes, len(arms))


def _rows(axes: Axes, number: int) -> None:
    axes.set_ylim(number - 0.5, -0.5)
    axes.set_yticks(range(number), [""] * number)
    axes.tick_params(axis="y", length=0, labelsize=SMALL)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(found: Mapping[str, Mapping[str, AllPairs]], data: SweepData) -> list[Entry]:
    """What the colours and a hollow mark mean, of those that occur."""
    every = [pairs for by_metric in found.values() for pairs in by_metric.values()]
    used = {colour for pairs in every for colour in _colours(pairs, data.control).values()}
    words = {
        BLACK: data.control if data.design else f"{data.control}, the sweep's first arm",
        GREEN: f"significantly above {data.control}",
        VERMILLION: f"significantly below {data.control}",
        GREY: f"not distinguishable from {data.control}" if BLACK in used else "other arms",
    }
    look: dict[str, Any] = {"marker": "o", "markersize": 4.2}
    entries: list[Entry] = [
        (Line2D([], [], color=colour, linewidth=2.0, **look), text) for colour, text in words.items() if colour in used
    ]
    if any(pairs.not_reported for pairs in every):
        hollow = Line2D([], [], color=GREY, linewidth=0.8, linestyle=":", markerfacecolor="white", **look)
        entries.append((hollow, "not reported"))
    return entries


def _caption(data: SweepData, finals: FinalValues, found: Mapping[str, Mapping[str, AllPairs]]) -> str:
    bases = len(set(finals.bases.values()))
    left_out: dict[str, list[str]] = {}
    for level, by_metric in found.items():
        for metric, pairs in by_metric.items():
            for arm, why in pairs.not_reported.items():
                where = f"{arm} at {level}" if level else arm
                short = "downstream" if metric != next(iter(by_metric)) else ""
                left_out.setdefault(why, []).append(f"{where} ({short})" if short else where)
    reasons = "; ".join(f"{', '.join(arms)}: {why}" for why, arms in left_out.items())
    absent = [level for level in data.levels if level not in found]
    parts = [
        "Light bars: the ranks an arm can have, 1 the largest, for all arms at once in "
        f"95% of sweeps; tick: that of its mean. Tukey's studentized range in the model arm + base, "
        f"{bases} base models, the scatter of all reported arms together. "
        f"Final values at {finals.at}.",
        f"Not reported: {reasons}." if reasons else "",
        f"Not drawn, with fewer than three arms on two base models: {', '.join(absent)}." if absent else "",
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "all_pairs",
    draw_all_pairs,
    missing,
    title="Which arms are distinguishable?",
    how_to_read=(
        "Two arms are distinguishable if their bars do not overlap, and an arm's rank lies within its light bar. Both "
        "hold for all pairs at once. No bar is reported for a hollow arm, whose runs scatter unlike the others'."
    ),
)
