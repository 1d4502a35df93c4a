"""Whether training reward ranks the arms as downstream accuracy does, one row per level.

Left, final training reward against final downstream accuracy, arm by arm; right, the rank of every arm by either.
Only seeds that every arm has enter, so that no arm is ahead by its seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.divergence.rank_agreement import RankedArms, arm_agreement, rankable
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.scatter_labels import Box, place_labels
from grpo_lab.analysis.figures.small_multiples import WIDTH, legend_height, name_lines, write_legend
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
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, bounds
from grpo_lab.analysis.table_rows import row_at, rows_of

AXES = {"reward": "training reward", "downstream": "downstream accuracy"}
MARKS = "mark: mean over the seeds that every arm has; cross: its 95% t intervals, cut at the edge; dots: seeds"
MARKS_OF_FEW = "mark: mean over the seeds that every arm has, too few for an interval; dots: seeds"
_FAINT = "#BDBDBD"  # of what lies behind the marks
_LEFT, _GAP, _RIGHT = 0.62, 0.12, 0.08  # inches
_LEAST, _LINE, _OVER, _UNDER = 2.7, 0.125, 0.42, 0.42  # inches: a level's panels, a line in them, above and below
_SLOPE, _NAME = 0.75, 1.42  # inches that the lines between ranks take, and a line of a name
_LINES = 2  # of a name, at most, in the scatter
_RANK, _VALUE, _ASIDE = 0.19, 0.5, 0.56  # inches from such a line to the ends of a rank and of a value, and to a name


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why the figure cannot be drawn, in one sentence; empty where it can."""
    found, reasons = rankable(data, finals)
    return "" if found else "; ".join(dict.fromkeys(reasons.values()))


def rank_numbers(found: Mapping[str, RankedArms]) -> pd.DataFrame:
    """Every number the figure shows, six decimals.

    `part` is "seed" (of an arm: final training reward Pc and downstream accuracy E, both in percent), "mean" (over n
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
    heading = f"{data.record.name}: does training reward rank the arms as downstream accuracy does?"
    marks = MARKS if max(len(here.seeds) for here in found.values()) >= FOR_INTERVAL else MARKS_OF_FEW
    names = {arm: name_lines(arm, _NAME, TINY) for here in found.values() for arm in here.arms}
    colours = {level: _colours(numbers[numbers["level"] == level], data.control) for level in found}
    legend = _legend({colour for own in colours.values() for colour in own.values()}, data.design is not None)
    # In inches, from the top: heading, legend, then titles, panels and labels of every level, then the footer.
    footer = wrapped(_footer(data, finals, marks, found, reasons), WIDTH - 0.2, TINY)
    lines = max(sum(len(names[arm]) + 0.5 for arm in here.arms) for here in found.values())
    panel = max(_LEAST, _LINE * lines)
    row = _OVER + panel + _UNDER
    top = heading_height(heading, WIDTH) + legend_height(len(legend), len(legend))
    bottom = 0.15 + len(footer) * TINY * LINE
    height = top + row * len(found) + bottom
    longest = max(text_width(line, TINY) for words in names.values() for line in words)
    slopes = _SLOPE + 2 * max(_ASIDE + longest, 1.1 * text_width(f"{AXES['downstream']} (%)", SMALL))
    scatter = WIDTH - _LEFT - _GAP - slopes - _RIGHT
    with house_style(name):
        figure = Figure(figsize=(WIDTH, height))
        write_heading(figure, heading)
        write_legend(figure, heading, legend, len(legend))
        for index, (level, here) in enumerate(found.items()):
            own, foot = numbers[numbers["level"] == level], height - top - index * row - _OVER - panel
            places = (_LEFT, scatter), (_LEFT + scatter + _GAP, slopes)
            first, second = (
                figure.add_axes((left / WIDTH, foot / height, wide / WIDTH, panel / height)) for left, wide in places
            )
            _scatter(first, own, (scatter, panel), colours[level], _short(own, names))
            _slopes(second, own, slopes, colours[level], names)
            _title(first, own, len(here.seeds), arm_agreement(here.reward, here.downstream, here.bases).same)
            factor = f"{data.design.factor} = {level}\n" if data.design and data.design.factor else ""
            first.set_ylabel(f"{factor}{AXES['downstream']} (%)")
        write_footer(figure, footer)
    return Drawn(name, figure, numbers, marks)


def _colours(numbers: pd.DataFrame, control: str) -> dict[str, str]:
    """Arm -> its colour: the first by reward, the first by accuracy, both at once, the control, the others."""
    means = numbers[numbers["part"] == "mean"]
    colours = {}
    for row in rows_of(means):
        first = (row.reward_rank == 1, row.downstream_rank == 1)
        named = {(True, True): BLUE, (True, False): VERMILLION, (False, True): GREEN}
        colours[row.arm] = named.get(first, BLACK if row.arm == control else GREY)
    return colours


def _title(axes: Axes, numbers: pd.DataFrame, seeds: int, same: bool) -> None:
    """Seeds, regret and tau, over the scatter; `same`: one arm is best by both, whichever seed is left out."""
    own = numbers[numbers["part"].isin(["regret", "tau"])].set_index("part")
    regret, tau = row_at(own, "regret"), row_at(own, "tau")
    words = "top-1 regret: needs two seeds"
    if not np.isnan(regret["value"]):
        ends = bounds(regret["low"], regret["high"], "+.1f")
        words = f"top-1 regret {regret['value']:+.1f}{ends} pp{', one arm is best by both' if same else ''}"
    agreement = "undefined, all arms are equal" if np.isnan(tau["value"]) else f"{tau['value']:+.2f}"
    second = f"n = {seeds} seed{'s' if seeds > 1 else ''}, Kendall's tau_b {agreement}"
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
    axes.annotate(words, (0, 1), xytext=(0, 4 + SMALL * 1.45), fontsize=BODY, fontweight="bold", **place)
    axes.annotate(second, (0, 1), xytext=(0, 4), fontsize=SMALL, **place)


def _scatter(
    axes: Axes,
    numbers: pd.DataFrame,
    inches: tuple[float, float],
    colours: Mapping[str, str],
    names: Mapping[str, Sequence[str]],
) -> None:
    """Arms by both, their names put where they cover neither marks nor each other."""
    seeds, means = (numbers[numbers["part"] == part] for part in ("seed", "mean"))
    limits = [_limits(numbers[name].dropna(), 0.08) for name in AXES]
    axes.set_xlim(limits[0])
    axes.set_ylim(limits[1])
    for row in rows_of(seeds):
        look: dict[str, Any] = {"markersize": 2.4, "alpha": 0.35, "markeredgewidth": 0}
        axes.plot(row.reward, row.downstream, "o", color=colours[row.arm], **look)
    for row in rows_of(means):
        colour = colours[row.arm]
        look = {"color": _FAINT, "linewidth": 0.6} if colour == GREY else {"color": colour, "linewidth": 0.8}
        axes.plot([row.reward_low, row.reward_high], [row.downstream] * 2, **look)
        axes.plot([row.reward] * 2, [row.downstream_low, row.downstream_high], **look)
        axes.plot(row.reward, row.downstream, "o", color=colour, markersize=4.6, label=row.arm, zorder=4)
    scale = np.array([size / (high - low) for size, (low, high) in zip(inches, limits)])
    origin = np.array([low for low, _ in limits])
    points, dots = (((part[list(AXES)].to_numpy(float) - origin) * scale).tolist() for part in (means, seeds))
    sizes = [
        (1.08 * max(text_width(line, TINY) for line in names[arm]), len(names[arm]) * TINY * 1.2 / 72)
        for arm in means["arm"]
    ]
    for arm, point, box in zip(means["arm"], points, place_labels(points, sizes, inches, dots)):
        _name(axes, "\n".join(names[arm]), point, box, inches, colours[arm])
    axes.set_xlabel(f"{AXES['reward']} (% of responses right)")
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)


def _short(numbers: pd.DataFrame, names: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[str]]:
    """What to call the arms in the scatter: their names or, where those would fill it, their ranks by reward."""
    if max(map(len, names.values())) <= _LINES:
        return names
    means = numbers[numbers["part"] == "mean"]
    return {arm: [str(rank)] for arm, rank in zip(means["arm"], means["reward_rank"])}


def _limits(values: pd.Series, margin: float) -> tuple[float, float]:
    room = margin * max(float(values.max() - values.min()), 1.0)
    return float(values.min()) - room, float(values.max()) + room


def _name(axes: Axes, words: str, point: Sequence[float], box: Box, inches: tuple[float, float], colour: str) -> None:
    """An arm's name in its box, with a thin line from its mark where that is not beside it."""
    near = box.nearest(point)
    if math.dist(near, point) > 0.1:
        ends = np.array([point, near]) / inches
        axes.plot(*ends.T, color=colour, linewidth=0.6, transform=axes.transAxes, zorder=3)
    centre = (box.x + box.width / 2) / inches[0], (box.y + box.height / 2) / inches[1]
    look = {"fontsize": TINY, "color": colour, "linespacing": 1.0, "zorder": 5}
    look |= {"bbox": {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "pad": 0.4}}
    axes.annotate(words, centre, xycoords="axes fraction", ha="center", va="center", **look)


def _slopes(
    axes: Axes, numbers: pd.DataFrame, inches: float, colours: Mapping[str, str], names: Mapping[str, Sequence[str]]
) -> None:
    """Every arm's rank by reward, joined to its rank by accuracy; equals are drawn in the order of the arms."""
    means = numbers[numbers["part"] == "mean"].reset_index(drop=True)
    half = _SLOPE / inches / 2
    places = {name: means[f"{name}_rank"].astype(int).argsort(kind="stable").argsort() for name in AXES}
    for index, (_, row) in enumerate(means.iterrows()):
        colour = colours[row["arm"]]
        ys = [int(places[name][index]) for name in AXES]
        look = {"color": colour, "linewidth": 2.0} if colour != GREY else {"color": GREY, "linewidth": 0.9}
        axes.plot([0.5 - half, 0.5 + half], ys, label=row["arm"], **look)
        for name, y, sign in zip(AXES, ys, (-1, 1)):
            equal = "=" if (means[f"{name}_rank"] == row[f"{name}_rank"]).sum() > 1 else ""
            rank, value = f"{row[f'{name}_rank']}{equal}", f"{row[name]:.1f}"
            # Figures are set flush right, names flush with the column of figures.
            rank_at, value_at = (0.06, _VALUE - 0.25) if sign < 0 else (_RANK, _VALUE)
            words = [(rank, rank_at, "right"), (value, value_at, "right")]
            words.append(("\n".join(names[row["arm"]]), _ASIDE, "right" if sign < 0 else "left"))
            for text, at, side in words:
                look = {"ha": side, "va": "center", "color": colour, "fontsize": TINY, "linespacing": 1.0}
                axes.text(0.5 + sign * (half + at / inches), y, text, **look)
    for name, sign, side in zip(AXES, (-1, 1), ("right", "left")):
        place = (0.5 + sign * (half + 0.06 / inches), 1)
        look = {"xytext": (0, 4), "textcoords": "offset points", "xycoords": "axes fraction", "va": "bottom"}
        axes.annotate(f"rank by\n{AXES[name]} (%)", place, ha=side, fontsize=SMALL, **look)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(means) - 0.5, -0.5)
    axes.axis("off")


def _legend(used: set[str], declared: bool) -> list[tuple[Line2D, str]]:
    words = {
        VERMILLION: "top by training reward",
        GREEN: "top by downstream accuracy",
        BLUE: "top by both",
        BLACK: "control" if declared else "the sweep's first arm",
    }
    look = {"marker": "o", "markersize": 4.6, "linewidth": 2.0}
    return [(Line2D([], [], color=colour, **look), text) for colour, text in words.items() if colour in used]


def _footer(
    data: SweepData, finals: FinalValues, marks: str, found: Mapping[str, RankedArms], reasons: Mapping[str, str]
) -> str:
    long = any(len(name_lines(arm, _NAME, TINY)) > _LINES for here in found.values() for arm in here.arms)
    parts = [
        f"{marks[0].upper()}{marks[1:]}.",
        "Numbers beside the marks: rank by training reward." if long else "",
        "Top-1 regret: downstream accuracy lost by taking the arm with the highest training reward, arms chosen on the "
        "other seeds and measured on the one left out, 95% t interval; tau_b: of the means over runs. "
        "Training reward: share of all responses that were right, before any filter, over the last fifth of the "
        "budget. "
        f"Both at {finals.at}.{finals.over_bases}",
        *(f"{here.note[0].upper()}{here.note[1:]}." for here in found.values() if here.note),
    ]
    absent = [level for level in data.levels if level not in found]
    if absent and data.design and data.design.factor:
        parts.append(
            f"Not drawn: {data.design.factor} = {', '.join(absent)} ({'; '.join(dict.fromkeys(reasons.values()))})."
        )
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
