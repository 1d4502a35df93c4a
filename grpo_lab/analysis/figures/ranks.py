"""Whether training reward ranks the arms as downstream accuracy does, one row per level.

Left, final training reward against final downstream accuracy, arm by arm; right, the rank of every arm by either.
Only seeds that every arm has enter, so that no arm is ahead by its seeds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from grpo_lab.analysis.divergence.rank_agreement import RankedArms, arm_agreement, rankable
from grpo_lab.analysis.figures.palette import BLACK, BLUE, FAINT, GREEN, GREY, VERMILLION, Entry
from grpo_lab.analysis.figures.panels import at_level, level_rows
from grpo_lab.analysis.figures.style import (
    TINY,
    Drawn,
    FigureKind,
    drawing,
    house_style,
    in_lines,
    place_names,
    sentences,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import groups_of, row_at, rows_of
from grpo_lab.analysis.tables.ranks import rank_table

AXES = {"reward": "training reward", "downstream": "downstream accuracy"}
MARKS = "mark: mean over the seeds that every arm has; cross: its 95% t intervals, cut at the edge; dots: seeds"
MARKS_OF_FEW = "mark: mean over the seeds that every arm has, too few for an interval; dots: seeds"
_NAMED = 12  # arms, up to which all have their names in the scatter


def draw_ranks(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_ranks`, or why arms cannot be ranked."""
    found, reasons = rankable(data, finals)
    if not found:
        return "; ".join(dict.fromkeys(reasons.values()))
    numbers, name = rank_table(found), f"{data.record.name}_ranks"
    marks = MARKS if max(len(here.seeds) for here in found.values()) >= FOR_INTERVAL else MARKS_OF_FEW
    shown = {level: _coloured(own, data.control) for level, own in groups_of(numbers, "level", sort=False)}
    most, used = max(len(here.arms) for here in found.values()), {c for own in shown.values() for c in own["colour"]}
    heading = f"{data.record.name}: does training reward rank the arms as downstream accuracy does?"
    height = 1.0 + len(found) * (0.7 + max(2.6, 0.22 * most))
    with drawing(name, heading, height, marks, _legend(used, data), 4) as figure:
        label = f"{AXES['downstream']} (%)"
        grid = level_rows(figure, data, dict.fromkeys(shown, 1), 2, label, sharex="none", width_ratios=[2.2, 1])
        for (level, own), (scatter, slopes) in zip(shown.items(), grid):
            _scatter(scatter, own)
            _slopes(slopes, own[own["part"] == "mean"].reset_index(drop=True))
            scatter.set_title(_title(own, found[level]))
    with house_style(name):
        for own, (scatter, _) in zip(shown.values(), grid):
            _name_marks(scatter, own[own["part"] == "mean"])
    return Drawn(name, figure, numbers, marks, caption=_caption(data, finals, found, reasons))


def _coloured(numbers: pd.DataFrame, control: str) -> pd.DataFrame:
    """The rows with the colour of their arm: the first by reward, the first by accuracy, both, the control, others."""
    means = numbers[numbers["part"] == "mean"]
    reward, downstream = (set(means.loc[means[f"{name}_rank"] == 1, "arm"]) for name in AXES)
    colours = dict.fromkeys(reward & downstream, BLUE)
    colours |= dict.fromkeys(reward - downstream, VERMILLION) | dict.fromkeys(downstream - reward, GREEN)
    colours = {control: BLACK} | colours
    return numbers.assign(colour=numbers["arm"].map(colours).fillna(GREY))


def _title(numbers: pd.DataFrame, here: RankedArms) -> str:
    """Seeds, regret and tau; and whether one arm is best by both, whichever seed is left out."""
    own, seeds = numbers[numbers["part"].isin(["regret", "tau"])].set_index("part"), len(here.seeds)
    regret, tau = row_at(own, "regret"), row_at(own, "tau")
    words = "top-1 regret: needs two seeds"
    if not np.isnan(regret["value"]):
        same = arm_agreement(here.reward, here.downstream, here.bases).same
        ends = bounds(regret["low"], regret["high"], "+.1f")
        words = f"top-1 regret {regret['value']:+.1f}{ends} pp{', one arm is best by both' if same else ''}"
    agreement = "undefined, all arms are equal" if np.isnan(tau["value"]) else f"{tau['value']:+.2f}"
    return f"{words}\nn = {seeds} seed{'s' if seeds > 1 else ''}, Kendall's tau_b {agreement}"


def _scatter(axes: Axes, numbers: pd.DataFrame) -> None:
    """Arms by both, with their seeds."""
    seeds, means = (numbers[numbers["part"] == part] for part in ("seed", "mean"))
    axes.scatter(seeds["reward"], seeds["downstream"], 5, seeds["colour"], alpha=0.35, linewidths=0)
    limits = axes.get_xlim(), axes.get_ylim()
    crosses: dict[str, Any] = {"colors": means["colour"].replace(GREY, FAINT), "linewidth": 0.7}
    axes.hlines(means["downstream"], means["reward_low"], means["reward_high"], **crosses)
    axes.vlines(means["reward"], means["downstream_low"], means["downstream_high"], **crosses)
    for row in rows_of(means):
        axes.plot(row.reward, row.downstream, "o", color=row.colour, markersize=4.6, label=row.arm, zorder=4)
    axes.set(xlim=limits[0], ylim=limits[1], xlabel=f"{AXES['reward']} (% of responses right)")


def _name_marks(axes: Axes, means: pd.DataFrame) -> None:
    """Names beside the marks: of many arms, those of the colours of the legend and of the highest and lowest two."""
    ends = means["downstream_rank"].isin([2, means["downstream_rank"].max()])
    named = means[(len(means) <= _NAMED) | means["colour"].ne(GREY) | ends]
    texts = [(row.reward, row.downstream, in_lines(row.arm, 18), row.colour) for row in rows_of(named)]
    place_names(axes, texts, means[list(AXES)])


def _slopes(axes: Axes, means: pd.DataFrame) -> None:
    """Every arm's rank by reward, joined to its rank by accuracy; equals are drawn in the order of the arms."""
    places = {name: means[f"{name}_rank"].astype(int).argsort(kind="stable").argsort() for name in AXES}
    for row, *ys in zip(rows_of(means), *places.values()):
        axes.plot([0, 1], ys, label=row.arm, color=row.colour, linewidth=0.9 if row.colour == GREY else 2.0)
    left, right = ([_ranked(means, name, int(at)) for at in places[name].argsort()] for name in AXES)
    axes.set_yticks(range(len(means)), left)
    axes.set(xlim=(0, 1), ylim=(len(means) - 0.5, -0.5))
    axes.set_xticks([0, 1], [f"rank by\n{label} (%)" for label in AXES.values()])
    other = axes.secondary_yaxis("right")
    other.set_yticks(range(len(means)), right)
    for side in (axes, other):
        side.tick_params(axis="y", length=0, labelsize=TINY)
        side.spines[:].set_visible(False)
    axes.grid(visible=False)


def _ranked(means: pd.DataFrame, name: str, index: int) -> str:
    """An arm beside its rank and value, with `=` where another has the same rank."""
    row = means.iloc[index]
    equal = "=" if (means[f"{name}_rank"] == row[f"{name}_rank"]).sum() > 1 else ""
    return f"{row[f'{name}_rank']}{equal}  {row[name]:.1f}  {in_lines(row['arm'], 26)}"


def _legend(used: set[str], data: SweepData) -> list[Entry]:
    words = {
        VERMILLION: "top by training reward",
        GREEN: "top by downstream accuracy",
        BLUE: "top by both",
        BLACK: "control" if data.design else "the sweep's first arm",
    }
    look: dict[str, Any] = {"marker": "o", "markersize": 4.6, "linewidth": 2.0}
    return [(Line2D([], [], color=colour, **look), text) for colour, text in words.items() if colour in used]


def _caption(data: SweepData, finals: FinalValues, found: Mapping[str, RankedArms], reasons: Mapping[str, str]) -> str:
    absent = [at_level(data, level) for level in data.levels if level not in found]
    named = [f"{here.note[0].upper()}{here.note[1:]}." for here in found.values() if here.note]
    return sentences({
        "Top-1 regret: downstream accuracy lost by taking the arm with the highest training reward, arms chosen on the "
        "other seeds and measured on the one left out, 95% t interval; tau_b: of the means over runs. "
        "Training reward: share of all responses that were right, before any filter, over the last fifth of the "
        f"budget. Both at {finals.at}.{finals.over_bases}": True,
        **dict.fromkeys(named, True),
        f"Not drawn: {', '.join(absent)} ({'; '.join(dict.fromkeys(reasons.values()))}).": any(absent),
    })  # fmt: skip


FIGURE = FigureKind(
    "ranks",
    draw_ranks,
    title="Do reward and downstream accuracy rank arms alike?",
    order=6,
    how_to_read=(
        "Arms by their final training reward against their final downstream accuracy. Crossing lines are arms "
        "that the reward would have chosen wrongly."
    ),
)
