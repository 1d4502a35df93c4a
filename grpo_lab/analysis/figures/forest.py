"""The effect of every trick on downstream accuracy, beside its effect on training reward: one row per trick."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from grpo_lab.analysis.effects.contrast_plan import is_ladder, not_run, order_warning, planned_contrasts
from grpo_lab.analysis.effects.contrasts import SCREENING, TRAINING_REWARD
from grpo_lab.analysis.figures.palette import BLACK, GREEN, GREY, VERMILLION, Entry
from grpo_lab.analysis.figures.panels import (
    BARS_OF_FEW,
    BEYOND,
    at_level,
    draw_estimates,
    draw_rows,
    level_rows,
    symmetric_limit,
)
from grpo_lab.analysis.figures.style import SMALL, TINY, Drawn, FigureKind, drawing, sentences
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.multiplicity import ALPHA
from grpo_lab.analysis.table_rows import groups_of, rows_of
from grpo_lab.analysis.tables.contrasts import forest_table, noise_bands, shown_kinds

# Mark and words of each kind of contrast.
KINDS = {
    "added": ("D", "added"),
    "left_out": ("s", "left out (what having it adds)"),
    "given": ("^", "in another context"),
    "main": ("o", "average over all contexts"),
    "interaction": ("P", "beyond the sum of both"),
    "selection": (">", "its choice, against a random one"),
    "amount": ("<", "a random choice of as many"),
}
BARS = "mark and bar: mean of the differences paired by seed and its 95% t interval; dots: single seeds"
_TINT, _EDGE = 0.25, 0.02  # how opaque an effect is coloured whose signs disagree; how far, within noise
_COLUMNS = ["level", "trick", "kind", "context", "metric", "part", "seed", "value", "low", "high", "n"]
_COLUMNS += ["p_adjusted", "family", "n_collapsed", "disagreement"]


def draw_forest(data: SweepData, finals: FinalValues) -> Drawn | str:
    """The figure `<sweep>_forest`, or why there is none."""
    if all(contrast.kind == "whole" for contrast in planned_contrasts(data)):
        return "no two of its arms differ by exactly one trick"
    table = forest_table(data, finals)
    if table.empty:
        return "no two arms that ran and share a seed differ by exactly one trick"
    table = _laid_out(table)
    effects = table[table["role"] == "effect"]
    heights, limit = effects.groupby("level", sort=False)["end"].max(), symmetric_limit(effects, 0.5)
    bands = noise_bands(data, finals, effects)
    ends = dict(zip(bands["level"], bands["high"]))
    second = (table["role"] == "beside").any()
    bars = BARS if table["low"].notna().any() else BARS_OF_FEW
    bars += BEYOND if (effects[["low", "high"]].abs() > limit).any(axis=None) else ""
    name, heading = f"{data.record.name}_forest", "What each trick does to downstream accuracy and to training reward"
    height, entries = 1.7 + 0.3 * heights.sum() + 0.3 * len(heights), _entries(effects, bool(ends), is_ladder(data))
    with drawing(name, heading, height, bars, entries, 3) as figure:
        widths = [2.2, 1] if second else [1]
        grid = level_rows(figure, data, heights.to_dict(), len(widths), width_ratios=widths)
        for (level, top), row in zip(heights.items(), grid):
            own = table[table["level"] == level]
            _panel(row[0], own[own["role"] == "effect"], ends.get(level, 0.0), limit)
            if second:
                _interactions(row[1], own[own["role"] == "beside"])
            for axes in row:
                axes.set_ylim(top - 0.5, -0.5)
        grid[-1, 0].set_xlabel("difference, percentage points")
    drawn = table[(table["part"] == "mean") | (table["metric"] == DOWNSTREAM)]
    numbers = pd.concat([bands.reindex(columns=_COLUMNS), drawn])[_COLUMNS].astype(drawn.dtypes[_COLUMNS])
    return Drawn(name, figure, numbers, bars, caption=_caption(data, finals, table, bool(ends)))


def _laid_out(table: pd.DataFrame) -> pd.DataFrame:
    """The table with the height `y` of every contrast in its panel and the `end` of its trick's rows.

    A trick takes a line per effect, and room for a name in two lines.
    """
    places = {}
    main = table[(table["role"] == "effect") & (table["metric"] == DOWNSTREAM) & (table["part"] == "mean")]
    for level, here in groups_of(main, "level", sort=False):
        top = 0
        for trick, own in groups_of(here, "trick", sort=False):
            lines = max(len(own), _name(trick).count("\n") + 1)
            for at, name in enumerate(own["name"]):
                places[level, name] = (top + (at + 0.5) * lines / len(own) - 0.5, top + lines)
            places[level, trick] = (top + lines / 2 - 0.5, top + lines)  # of what stands beside all of them
            top += lines
    named = table["name"].where(table["role"] == "effect", table["trick"])
    found = [places[key] for key in zip(table["level"], named)]
    return table.assign(y=[y for y, _ in found], end=[end for _, end in found])


def _name(trick: str) -> str:
    """The trick as it is written beside its row."""
    return trick.replace(" with ", "\nwith ")


def _panel(axes: Axes, effects: pd.DataFrame, band: float, limit: float) -> None:
    """One level: of every effect downstream accuracy above, training reward below, and its numbers at the right."""
    axes.axvspan(-band, band, color=GREY, alpha=0.10, linewidth=0)
    above = _marked(effects[effects["metric"] == DOWNSTREAM], GREEN)
    draw_rows(axes, above.assign(y=above["y"] - 0.15), 0, limit)
    means = effects[effects["part"] == "mean"]
    downstream, reward = (means[means["metric"] == metric] for metric in (DOWNSTREAM, TRAINING_REWARD))
    for row in rows_of(downstream[downstream["disagreement"] != ""]):
        # Estimates of nothing go opposite ways half of the time: those get a mark at the edge only.
        right = 1.0 if row.disagreement == "resolved" else _EDGE
        axes.axhspan(row.y - 0.5, row.y + 0.5, xmax=right, color=VERMILLION, alpha=_TINT, linewidth=0)
    below = {"colour": VERMILLION, "face": VERMILLION, "marker": "|", "name": "training reward"}
    draw_estimates(axes, reward.assign(y=reward["y"] + 0.25, **below), limit, 0.9)
    for end in downstream["end"].unique():
        axes.axhline(end - 0.5, color="#E4E4E4", linewidth=0.5)
    contexts = effects["context"].nunique() > effects["kind"].nunique()  # else the kind says it
    names = downstream["trick"].map(_name).where(~downstream["trick"].duplicated(), "")
    axes.set_yticks(downstream["y"], (names + "  " + downstream["context"]).str.strip() if contexts else names)
    beside = axes.secondary_yaxis("right")
    beside.set_yticks(downstream["y"], [_numbers(row) for row in rows_of(downstream)])
    beside.tick_params(length=0, labelsize=TINY)
    beside.spines[:].set_visible(False)


def _marked(effects: pd.DataFrame, colour: str) -> pd.DataFrame:
    """Effects with the marks of their kinds; hollow where the trick was left out."""
    face = np.where(effects["kind"] == "left_out", "white", colour)
    marks = effects["kind"].map({kind: mark for kind, (mark, _) in KINDS.items()})
    return effects.assign(colour=colour, face=face, marker=marks)


def _interactions(axes: Axes, effects: pd.DataFrame) -> None:
    """What a trick gives inside the whole beyond what it gives alone."""
    draw_rows(axes, _marked(effects, BLACK), 0, symmetric_limit(effects, 0.5) if len(effects) else math.inf)
    for row in rows_of(effects[effects["part"] == "mean"]):
        words = f"{row.text}{_star(row)}"
        axes.annotate(words, (0, row.y), (0, 6), textcoords="offset points", ha="center", fontsize=TINY)
    axes.set_title("in the full set less on its own", fontsize=SMALL)
    axes.set_xlabel("pp, downstream")


def _star(row: Any) -> str:
    return "*" if row.p_adjusted < ALPHA else ""


def _numbers(row: Any) -> str:
    """The text at the right of a row: the effect and its number of pairs."""
    count = f"n = {row.n}" + (f", {row.n_collapsed} collapsed" if row.n_collapsed else "")
    return f"{row.text}{_star(row)}   {count}"


def _entries(effects: pd.DataFrame, band: bool, ladder: bool) -> list[Entry]:
    """The legend, as handles and words."""
    entries: list[Entry] = []
    for kind in (kind for kind in KINDS if (effects["kind"] == kind).any()):
        look = {"color": GREEN, "markerfacecolor": "white" if kind == "left_out" else GREEN, "markersize": 5}
        marker, words = KINDS[kind]
        line = Line2D([], [], marker=marker, linewidth=1.8, **look)
        entries.append((line, f"downstream, {'increment' if ladder else words}"))
    if (effects["metric"] == TRAINING_REWARD).any():
        line = Line2D([], [], marker="|", color=VERMILLION, linewidth=0.9, alpha=0.7)
        entries.append((line, "training reward (correctness)"))
    if band:
        entries.append((Patch(color=GREY, alpha=0.15, linewidth=0), "too small to be found"))
    signs = set(effects["disagreement"])
    if "resolved" in signs:
        entries.append((Patch(color=VERMILLION, alpha=_TINT, linewidth=0), "opposite signs, each interval excludes 0"))
    if "within noise" in signs:
        mark = Line2D([], [], marker="s", linestyle="", color=VERMILLION, alpha=_TINT, markeredgewidth=0)
        entries.append((mark, "opposite signs, within noise"))
    return entries


def _caption(data: SweepData, finals: FinalValues, table: pd.DataFrame, band: bool) -> str:
    means, kinds = table[table["part"] == "mean"], (*shown_kinds(data), "interaction")
    absent = [contrast for contrast in not_run(data, finals) if contrast.kind in kinds]
    named = dict.fromkeys(f"{one.trick} {one.context}{at_level(data, one.level)}" for one in absent)
    effects = means[means["role"] == "effect"]
    seeds = sorted({len(finals.of(level, data.control, DOWNSTREAM)) for level in effects["level"]})
    return sentences({
        f"Final values at {finals.at}.{finals.over_bases}": True,
        "Numbers: downstream accuracy, percentage points, with pairs of runs.": True,
        _stars(means[means["metric"] == DOWNSTREAM]): True,
        f"Grey: true effects that {effects['n'].max()} pairs would detect with less than 80% power, if arms varied "
        f"like the {' or '.join(map(str, seeds))} seeds of {data.control} and pairing removed none of that variance; "
        "a rough guide.": band,
        order_warning(data): True,
        f"Not run: {', '.join(named)}.": named,
    })  # fmt: skip


def _stars(means: pd.DataFrame) -> str:
    """What a star means, and over how many tests."""
    tested = means[means["correction"].fillna("") != ""].drop_duplicates("kind", keep="last")
    if tested.empty:
        return ""
    how = tested["correction"].iloc[0]
    screening = ", a screening" if how == SCREENING else ""
    families = ", ".join(f"{row.family} {row.kind.replace('_', ' ')}" for row in rows_of(tested))
    return f"*: p < .05 after {how}{screening} over all effects of the kind ({families})."


FIGURE = FigureKind(
    "forest",
    draw_forest,
    title="Effect of every trick",
    order=5,
    how_to_read=(
        "One row per trick and context, percentage points, paired by seed. Inside the shaded band an effect "
        "is too small for these seeds to detect; rows where reward and downstream accuracy disagree in sign "
        "are marked."
    ),
)
