"""Training reward of many arms against their entropy and their accuracies: does reward rank them by sharpness?"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.divergence.reward_ranks import FEWEST, REWARD, RankedLevel, ranked_levels
from grpo_lab.analysis.figures.palette import BLUE, GREY
from grpo_lab.analysis.figures.panels import level_rows
from grpo_lab.analysis.figures.style import Drawn, FigureKind, drawing, house_style, place_names
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval, bounds
from grpo_lab.analysis.tables.ranks import sharpness_table
from grpo_lab.config.design import RANKED

# Labels of differences from the mean of all arms, and the factor to points where a value is a share.
_LABELS = {
    "train/entropy": ("policy entropy (left: sharper), nats", 1.0),
    "eval/heldout/accuracy": ("held-out accuracy, percentage points", 100.0),
    DOWNSTREAM: ("downstream accuracy, percentage points", 100.0),
}
_WIDTH = 9.0  # inches
_NAMED = 4  # arms furthest from the others that are named


def draw_sharpness(data: SweepData, finals: FinalValues, heading: str = "", name: str = "") -> Drawn | str:
    """The figure `<sweep>_sharpness`, a row of three panels per level, or why there is none."""
    levels = ranked_levels(data, finals)
    lacking = [metric for metric in (REWARD, *RANKED) if metric not in finals.values]
    if not levels:
        none = f"no level has {FEWEST} arms that were evaluated alike"
        return f"{', '.join(lacking)} not logged" if lacking else none
    name = name or f"{data.record.name}_sharpness"
    number = max(len(level.values) for level in levels.values())
    heading = heading or f"Does training reward rank {number} arms by accuracy, or by how sharp their policies are?"
    bands = "one dot per arm: mean deviation from the mean of all arms on its base model"
    labels = {metric: label for metric, (label, _) in _LABELS.items()}
    with drawing(name, heading, 1.0 + 2.8 * len(levels), bands, width=_WIDTH) as figure:
        heights, shared = dict.fromkeys(levels, 1), {"sharex": "none", "sharey": "row"}
        grid = level_rows(figure, data, heights, len(RANKED), "training reward, points", **shared)
        for here, row in zip(levels.values(), grid):
            for axes, metric in zip(row, labels):
                _panel(axes, _points(here, metric), here.correlations[metric].within(-1.0, 1.0))
                axes.set_xlabel(labels[metric])
    with house_style(name):
        for here, row in zip(levels.values(), grid):
            for axes, metric in zip(row, labels):
                points = _points(here, metric)
                named = points.loc[_furthest(here)]
                place_names(axes, list(zip(named["x"], named["y"], named.index, [GREY] * len(named))), points)
    return Drawn(name, figure, sharpness_table(levels), bands, caption=_caption(levels))


def _points(here: RankedLevel, metric: str) -> pd.DataFrame:
    """Every arm's deviation on a metric as x and in training reward as y."""
    return pd.DataFrame({"x": _LABELS[metric][1] * here.values[metric], "y": 100 * here.values[REWARD]})


def _furthest(here: RankedLevel) -> list[str]:
    """The arms furthest from the others over all panels, whose names stand in each."""
    scaled = (here.values - here.values.mean()) / here.values.std()
    return list(map(str, scaled[[REWARD, *RANKED]].abs().sum(axis=1).nlargest(_NAMED).index))


def _panel(axes: Axes, points: pd.DataFrame, correlation: Interval) -> None:
    for draw in (axes.axhline, axes.axvline):
        draw(0, color=GREY, linewidth=0.6, zorder=0)
    axes.plot(points["x"], points["y"], "o", color=BLUE, ms=4, markeredgewidth=0)
    axes.set_title(f"rank correlation {correlation.mean:+.2f}{bounds(correlation.low, correlation.high, '.2f')}")
    axes.margins(0.1)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _caption(levels: Mapping[str, RankedLevel]) -> str:
    left_out = sorted({arm for here in levels.values() for arm in here.left_out})
    bases = next(iter(next(iter(levels.values())).correlations.values())).n
    text = (
        "One dot per arm (recipe); each axis is its difference from the mean of all arms on the same base model, "
        f"averaged over {bases} base models. Rank correlation with training reward: Spearman's within a base model, "
        "mean and 95% CI over base models."
    )
    return text + (f" Not shown, since evaluated by another protocol: {', '.join(left_out)}." if left_out else "")


FIGURE = FigureKind(
    "sharpness",
    draw_sharpness,
    title="Training reward, entropy and accuracy of all arms",
    order=7,
    how_to_read=(
        "A steep fall in the first panel beside scatter in the others says that training reward ranks the arms by how "
        "sharp their policies are, and not by how good."
    ),
)
