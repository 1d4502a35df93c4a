"""Which arms are distinguishable, one row per arm and one pair of panels per metric.

Left, every arm's mean with a bar; arms are distinguishable exactly if their bars do not overlap. Right, the ranks
that an arm can have. Arms stand in the order of the primary metric; `stats.all_pairs` says how they are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.effects.all_pairs import ranked_metrics, why_not
from grpo_lab.analysis.figures.palette import BLACK, GREEN, GREY, VERMILLION, Entry
from grpo_lab.analysis.figures.panels import draw_estimates, level_rows
from grpo_lab.analysis.figures.style import SMALL, TINY, Drawn, FigureKind, drawing, in_lines, sentences
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import title, unit
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.analysis.tables.pairs import all_pairs_table

BARS = (
    "mark: mean over base models; bar: two arms are distinguishable exactly if their bars do not overlap, for all "
    "pairs at once in 95% of sweeps; dots: single base models, less what a base model adds to all arms"
)
SHORT = (
    "bar: arms are distinguishable if their bars do not overlap; light bar: possible ranks; dots: single base models"
)
COLOURS = {"control": BLACK, "above": GREEN, "below": VERMILLION, "": GREY}  # by the side of the control


def draw_all_pairs(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_all_pairs`, or why there is none."""
    if reason := why_not(data, finals, ranked_metrics(data)[0]):
        return reason
    numbers = all_pairs_table(data, finals)
    means = numbers[numbers["part"] == "mean"]
    name, metrics = f"{data.record.name}_all_pairs", list(dict.fromkeys(numbers["metric"]))
    first = means[means["metric"] == metrics[0]]
    arms = {level: own["arm"].tolist() for level, own in groups_of(first, "level", sort=False)}
    sizes = {level: max(1.2, 0.18 * len(own)) for level, own in arms.items()}
    heading = f"{data.record.name}: which arms are distinguishable?"
    height = 1.2 + sum(sizes.values()) + 0.9 * len(sizes)
    with drawing(name, heading, height, SHORT, _legend(means, data), 3) as figure:
        widths = [2, 1] * len(metrics)
        grid = level_rows(figure, data, sizes, len(widths), sharex="none", width_ratios=widths)
        for (level, names), row in zip(arms.items(), grid):
            for metric, left, right in zip(metrics, row[::2], row[1::2]):
                own = numbers[(numbers["level"] == level) & (numbers["metric"] == metric)]
                _metric(left, right, own, names, 60 // len(metrics))
            row[0].set_yticks(range(len(names)), names)
            for label, side in zip(row[0].get_yticklabels(), first[first["level"] == level]["side"]):
                label.set_color(COLOURS[side])
    return Drawn(name, figure, numbers, BARS, caption=_caption(data, finals, numbers))


def _metric(left: Axes, right: Axes, numbers: pd.DataFrame, arms: Sequence[str], width: int) -> None:
    """Means and ranks on one metric at one level, arms in the order of the first metric."""
    for axes in (left, right):
        axes.set_visible(len(numbers) > 0)
        axes.set(ylim=(len(arms) - 0.5, -0.5))
        axes.set_yticks(range(len(arms)), [""] * len(arms))
        axes.tick_params(axis="y", length=0, labelsize=SMALL)
        axes.spines["left"].set_visible(False)
    if numbers.empty:
        return
    metric = str(numbers["metric"].iloc[0])
    share = unit(metric) == "share"
    rows = numbers[numbers["arm"].isin(arms)].copy()
    rows[["value", "low", "high"]] *= 100.0 if share else 1.0
    sides = rows[rows["part"] == "mean"].set_index("arm")["side"].map(COLOURS)
    rows = rows.assign(y=rows["arm"].map(arms.index), colour=rows["arm"].map(sides))
    _means(left, rows)
    _ranks(right, rows[rows["part"] == "mean"])
    left.set_xlabel("percent" if share else unit(metric))
    left.set_title(f"{in_lines(title(metric), width)}\n{_statement(numbers)}", fontsize=SMALL)


def _statement(numbers: pd.DataFrame) -> str:
    """The number of distinguishable pairs."""
    pairs, number = numbers[numbers["part"] == "pair"], int((numbers["not_reported"].fillna("") != "").sum())
    rest = f"; {number} arm{'s' if number > 1 else ''} not reported" if number else ""
    return f"{pairs['distinguishable'].sum()} of {len(pairs)} pairs distinguishable{rest}"


def _means(axes: Axes, rows: pd.DataFrame) -> None:
    """Means with their bars and, faintly, the single base models.

    The axis is that of the arms with a bar: an arm without one that lies beyond is an arrow at the edge with its mean.
    """
    means, bases = (rows[rows["part"] == part] for part in ("mean", "base"))
    low, high = _ends(rows)
    margin = 0.05 * (high - low)
    axes.set_xlim(low - margin, high + margin)
    axes.scatter(bases["value"], bases["y"], 7, bases["colour"], alpha=0.3, linewidths=0)
    face = np.where(means["low"].isna(), "white", means["colour"])
    inside = means["value"].between(low, high)
    draw_estimates(axes, means.assign(name=means["arm"], marker="o", face=face)[inside])
    for row in rows_of(means[~inside]):
        edge, mark, side = (low, "<", 1) if row.value < low else (high, ">", -1)
        axes.plot(edge, row.y, mark, color=row.colour, markerfacecolor="white", markersize=4.6, label=row.arm)
        look: dict[str, Any] = {"textcoords": "offset points", "va": "center", "fontsize": TINY, "color": row.colour}
        axes.annotate(f"{row.value:.3g}", (edge, row.y), (6 * side, 0), ha="left" if side > 0 else "right", **look)
    axes.xaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))


def _ends(rows: pd.DataFrame) -> tuple[float, float]:
    """Between which values the bars and base models of the reported arms lie; those of all where none is reported."""
    shown = rows[rows["part"] != "pair"]
    reported = shown["arm"].isin(shown.loc[shown["low"].notna(), "arm"])
    ends = shown.loc[reported if reported.any() else ~reported, ["value", "low", "high"]]
    return float(ends.min().min()), float(ends.max().max())


def _ranks(axes: Axes, means: pd.DataFrame) -> None:
    """The ranks that an arm can have, and the one of its mean."""
    light: dict[bool, dict[str, Any]] = {True: {"linewidth": 5.0, "alpha": 0.4}, False: {"lw": 0.8, "ls": ":"}}
    for reported, look in light.items():
        own = means[means["low"].notna() == reported]
        axes.hlines(own["y"], own["best"] - 0.4, own["worst"] + 0.4, colors=own["colour"].tolist(), **look)
    axes.scatter(means["rank"], means["y"], 30, means["colour"], marker="|", linewidths=1.3)
    number = len(means)
    axes.set_xlim(0.3, number + 0.7)
    middle = range(10, number - 4, 10) if number > 10 else range(2, number)
    axes.set_xticks([1, *middle, number])
    axes.set_xlabel("rank")


def _legend(means: pd.DataFrame, data: SweepData) -> list[Entry]:
    """Legend entries of the colours and the hollow mark that occur."""
    used, control = set(means["side"]), data.control
    words = {
        "control": control if data.design else f"{control}, the sweep's first arm",
        "above": f"significantly above {control}",
        "below": f"significantly below {control}",
        "": f"not distinguishable from {control}" if "control" in used else "other arms",
    }
    look: dict[str, Any] = {"marker": "o", "markersize": 4.2}
    lines = {side: Line2D([], [], color=colour, linewidth=2.0, **look) for side, colour in COLOURS.items()}
    entries: list[Entry] = [(lines[side], text) for side, text in words.items() if side in used]
    if (means["not_reported"] != "").any():
        hollow = Line2D([], [], color=GREY, linewidth=0.8, linestyle=":", markerfacecolor="white", **look)
        entries.append((hollow, "not reported"))
    return entries


def _caption(data: SweepData, finals: FinalValues, numbers: pd.DataFrame) -> str:
    means, bases, first = numbers[numbers["part"] == "mean"], len(set(finals.bases.values())), numbers["metric"].iloc[0]
    reasons: dict[str, list[str]] = {}
    declared = means.sort_values("arm", key=lambda arms: arms.map(data.arms.index), kind="stable")
    for (level, metric), own in groups_of(declared[declared["not_reported"] != ""], ["level", "metric"], sort=False):
        for row in rows_of(own):
            where = f"{row.arm} at {level}" if level else row.arm
            reasons.setdefault(row.not_reported, []).append(where + ("" if metric == first else " (downstream)"))
    named = "; ".join(f"{', '.join(arms)}: {why}" for why, arms in reasons.items())
    absent = [level for level in data.levels if level not in set(means["level"])]
    beyond = [
        not own.loc[own["part"] == "mean", "value"].between(*_ends(own)).all()
        for _, own in groups_of(numbers, ["level", "metric"])
    ]
    return sentences({
        "Light bars: the ranks an arm can have, 1 the largest, for all arms at once in "
        "95% of sweeps; tick: that of its mean. Tukey's studentized range in the model arm + base, "
        f"{bases} base models, the scatter of all reported arms together. Final values at {finals.at}.": True,
        f"Not reported: {named}.": named,
        "Arrow: such an arm's mean lies beyond the axis, which is that of the reported arms.": any(beyond),
        f"Not drawn, with fewer than three arms on two base models: {', '.join(absent)}.": absent,
    })  # fmt: skip


FIGURE = FigureKind(
    "all_pairs",
    draw_all_pairs,
    title="Which arms are distinguishable?",
    order=9,
    how_to_read=(
        "Two arms are distinguishable if their bars do not overlap, and an arm's rank lies within its light bar. Both "
        "hold for all pairs at once. No bar is reported for a hollow arm, whose runs scatter unlike the others'."
    ),
)
