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
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.panels import at_level, level_label
from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    TINY,
    VERMILLION,
    Drawn,
    Entry,
    house_style,
    in_lines,
    new_figure,
    place_names,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import row_at, rows_of

AXES = {"reward": "training reward", "downstream": "downstream accuracy"}
MARKS = "mark: mean over the seeds that every arm has; cross: its 95% t intervals, cut at the edge; dots: seeds"
MARKS_OF_FEW = "mark: mean over the seeds that every arm has, too few for an interval; dots: seeds"
_NAMED = 12  # arms, up to which all have their names in the scatter


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    found, reasons = rankable(data, finals)
    return "" if found else "; ".join(dict.fromkeys(reasons.values()))


def rank_numbers(found: Mapping[str, RankedArms]) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "seed" (of an arm: final training reward and downstream accuracy, both in percent), "mean" (over n
    seeds, with t intervals and the arm's ranks), and, for a level, "regret" and "tau" (in `value`; the
    regret in percentage points, with `low` and `high`), as `rank_agreement.arm_agreement` gives them.
    """
    rows = []
    for level, here in found.items():
        ranks = {name: here.ranks(name) for name in AXES}
        for index, arm in enumerate(here.arms):
            labels = {"level": level, "arm": arm}
            own = {name: 100 * getattr(here, name)[:, index] for name in AXES}
            rows += [
                labels | {"part": "seed", "seed": seed} | {name: values[at] for name, values in own.items()}
                for at, seed in enumerate(here.seeds)
            ]
            mean = labels | {"part": "mean", "n": len(here.seeds)}
            for name, values in own.items():
                interval = mean_of_runs(values.tolist(), here.bases)
                mean |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
                mean |= {f"{name}_rank": ranks[name][index]}
            rows.append(mean)
        both = arm_agreement(here.reward, here.downstream, here.bases)
        regret, every = both.regret, {"level": level, "arm": "", "n": both.regret.n}
        ends = {"value": 100 * regret.mean, "low": 100 * regret.low, "high": 100 * regret.high}
        rows += [every | {"part": "regret"} | ends, every | {"part": "tau", "value": both.tau}]
    names = ["level", "arm", "part", "seed"]
    names += [f"{name}{end}" for name in AXES for end in ("", "_low", "_high", "_rank")]
    table = pd.DataFrame(rows, columns=[*names, "value", "low", "high", "n"])
    return table.astype({"seed": "Int64", "n": "Int64", "reward_rank": "Int64", "downstream_rank": "Int64"}).round(6)


def draw_ranks(data: SweepData, finals: FinalValues) -> Drawn | None:
    """The figure `<sweep>_ranks`; None, for the reason that `missing` gives, where arms cannot be ranked."""
    found, reasons = rankable(data, finals)
    if not found:
        return None
    numbers = rank_numbers(found)
    name = f"{data.record.name}_ranks"
    marks = MARKS if max(len(here.seeds) for here in found.values()) >= FOR_INTERVAL else MARKS_OF_FEW
    colours = {level: _colours(numbers[numbers["level"] == level], data.control) for level in found}
    most = max(len(here.arms) for here in found.values())
    with house_style(name):
        heading = f"{data.record.name}: does training reward rank the arms as downstream accuracy does?"
        figure = new_figure(heading, 1.0 + len(found) * (0.7 + max(2.6, 0.22 * most)))
        grid = figure.subplots(len(found), 2, squeeze=False, width_ratios=[2.2, 1])
        for (level, here), (scatter, slopes) in zip(found.items(), grid):
            own = numbers[numbers["level"] == level]
            _scatter(scatter, own, colours[level])
            _slopes(slopes, own, colours[level])
            same = arm_agreement(here.reward, here.downstream, here.bases).same
            scatter.set_title(_title(own, len(here.seeds), same))
            scatter.set_ylabel(level_label(data, level, f"{AXES['downstream']} (%)"))
        write_legend(figure, _legend({colour for own in colours.values() for colour in own.values()}, data), 4)
        write_footer(figure, marks)
        for level, (scatter, _) in zip(found, grid):
            _name_marks(scatter, numbers[numbers["level"] == level], colours[level])
    return Drawn(name, figure, numbers, marks, caption=_caption(data, finals, found, reasons))


def _colours(numbers: pd.DataFrame, control: str) -> dict[str, str]:
    """Arm -> its colour: the first by reward, the first by accuracy, both at once, the control, the others."""
    means = numbers[numbers["part"] == "mean"]
    colours = {}
    for row in rows_of(means):
        first = (row.reward_rank == 1, row.downstream_rank == 1)
        named = {(True, True): BLUE, (True, False): VERMILLION, (False, True): GREEN}
        colours[row.arm] = named.get(first, BLACK if row.arm == control else GREY)
    return colours


def _title(numbers: pd.DataFrame, seeds: int, same: bool) -> str:
    """Seeds, regret and tau; `same`: one arm is best by both, whichever seed is left out."""
    own = numbers[numbers["part"].isin(["regret", "tau"])].set_index("part")
    regret, tau = row_at(own, "regret"), row_at(own, "tau")
    words = "top-1 regret: needs two seeds"
    if not np.isnan(regret["value"]):
        ends = bounds(regret["low"], regret["high"], "+.1f")
        words = f"top-1 regret {regret['value']:+.1f}{ends} pp{', one arm is best by both' if same else ''}"
    agreement = "undefined, all arms are equal" if np.isnan(tau["value"]) else f"{tau['value']:+.2f}"
    return f"{words}\nn = {seeds} seed{'s' if seeds > 1 else ''}, Kendall's tau_b {agreement}"


def _scatter(axes: Axes, numbers: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Arms by both, with their seeds."""
    seeds, means = (numbers[numbers["part"] == part] for part in ("seed", "mean"))
    axes.scatter(
        seeds["reward"], seeds["downstream"], 5, [colours[arm] for arm in seeds["arm"]], alpha=0.35, linewidths=0
    )
    limits = axes.get_xlim(), axes.get_ylim()
    for row in rows_of(means):
        colour = colours[row.arm]
        look = {"color": FAINT, "linewidth": 0.6} if colour == GREY else {"color": colour, "linewidth": 0.8}
        axes.plot([row.reward_low, row.reward_high], [row.downstream] * 2, **look)
        axes.plot([row.reward] * 2, [row.downstream_low, row.downstream_high], **look)
        axes.plot(row.reward, row.downstream, "o", color=colour, markersize=4.6, label=row.arm, zorder=4)
    axes.set(xlim=limits[0], ylim=limits[1], xlabel=f"{AXES['reward']} (% of responses right)")


def _name_marks(axes: Axes, numbers: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Names beside the marks: of many arms, those of the colours of the legend and of the highest and lowest two."""
    means = numbers[numbers["part"] == "mean"]
    ends = means["downstream_rank"].isin([2, means["downstream_rank"].max()])
    named = means[(len(means) <= _NAMED) | means["arm"].map(colours).ne(GREY) | ends]
    texts = [(row.reward, row.downstream, in_lines(row.arm, 18), colours[row.arm]) for row in rows_of(named)]
    place_names(axes, texts, means[list(AXES)])


def _slopes(axes: Axes, numbers: pd.DataFrame, colours: Mapping[str, str]) -> None:
    """Every arm's rank by reward, joined to its rank by accuracy; equals are drawn in the order of the arms."""
    means = numbers[numbers["part"] == "mean"].reset_index(drop=True)
    places = {name: means[f"{name}_rank"].astype(int).argsort(kind="stable").argsort() for name in AXES}
    for index, (_, row) in enumerate(means.iterrows()):
        colour = colours[row["arm"]]
        ys = [int(places[name][index]) for name in AXES]
        axes.plot([0, 1], ys, label=row["arm"], color=colour, linewidth=0.9 if colour == GREY else 2.0)
    left, right = ([_ranked(means, name, int(at)) for at in places[name].argsort()] for name in AXES)
    axes.set_yticks(range(len(means)), left)
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.set_xlim(0, 1)
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
    parts = [
        "Top-1 regret: downstream accuracy lost by taking the arm with the highest training reward, arms chosen on the "
        "other seeds and measured on the one left out, 95% t interval; tau_b: of the means over runs. "
        "Training reward: share of all responses that were right, before any filter, over the last fifth of the "
        f"budget. Both at {finals.at}.{finals.over_bases}",
        *(f"{here.note[0].upper()}{here.note[1:]}." for here in found.values() if here.note),
        f"Not drawn: {', '.join(absent)} ({'; '.join(dict.fromkeys(reasons.values()))})." if any(absent) else "",
    ]
    return " ".join(filter(None, parts))


FIGURE = FigureKind(
    "ranks",
    draw_ranks,
    missing,
    title="Do reward and downstream accuracy rank arms alike?",
    how_to_read=(
        "Arms by their final training reward against their final downstream accuracy. Crossing lines are arms "
        "that the reward would have chosen wrongly."
    ),
)
