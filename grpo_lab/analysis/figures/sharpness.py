"""Training reward of many arms against their entropy and their accuracies: does reward rank them by sharpness?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from grpo_lab.analysis.divergence.reward_ranks import FEWEST, REWARD, RankedLevel, ranked_levels
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.scatter_labels import place_labels
from grpo_lab.analysis.figures.seed_lines import as_columns
from grpo_lab.analysis.figures.style import (
    BLUE,
    BODY,
    GREY,
    LINE,
    TINY,
    Drawn,
    heading_height,
    house_style,
    text_width,
    wrapped,
    write_footer,
    write_heading,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import bounds
from grpo_lab.config.design import RANKED

# Labels of differences from the mean of all arms, and the factor to points where a value is a share.
_LABELS = {
    "train/entropy": ("policy entropy (left: sharper), nats", 1.0),
    "eval/heldout/accuracy": ("held-out accuracy, percentage points", 100.0),
    DOWNSTREAM: ("downstream accuracy, percentage points", 100.0),
}
_WIDTH, _PANEL, _LEFT = 9.0, 2.3, 0.85  # inches
_NAMED = 4  # arms furthest from the others that are named


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no figure; empty where there is one."""
    if ranked_levels(data, finals):
        return ""
    lacking = [metric for metric in (REWARD, *RANKED) if metric not in finals.values]
    return f"{', '.join(lacking)} not logged" if lacking else f"no level has {FEWEST} arms that were evaluated alike"


def draw_sharpness(data: SweepData, finals: FinalValues, heading: str = "", name: str = "") -> Drawn | None:
    """The figure `<sweep>_sharpness`, a row of three panels per level; None where `missing` says why."""
    levels = ranked_levels(data, finals)
    if not levels:
        return None
    name = name or f"{data.record.name}_sharpness"
    number = max(len(level.values) for level in levels.values())
    heading = heading or f"Does training reward rank {number} arms by accuracy, or by how sharp their policies are?"
    below = wrapped(_footer(levels), _WIDTH - 0.2, TINY)
    top, bottom, gap = heading_height(heading, _WIDTH) + 0.3, 0.55 + len(below) * TINY * LINE, 0.8
    height = top + bottom + len(levels) * _PANEL + (len(levels) - 1) * gap
    with house_style(name):
        figure = Figure(figsize=(_WIDTH, height))
        write_heading(figure, heading)
        write_footer(figure, below)
        place = {"left": _LEFT / _WIDTH, "right": 0.985, "top": 1 - top / height, "bottom": bottom / height}
        place |= {"wspace": 0.12, "hspace": gap / _PANEL}
        axes = figure.subplots(len(levels), len(RANKED), sharey="row", squeeze=False, gridspec_kw=place)
        for (level, here), row in zip(levels.items(), axes):
            factor = f"{data.design.factor} = {level}\n" if data.design and data.design.factor else ""
            row[0].set_ylabel(f"{factor}training reward, points")
            named = _furthest(here)
            for panel, (metric, (label, scale)) in zip(row, _LABELS.items()):
                _panel(panel, here, metric, scale, named)
                panel.set_xlabel(label)
    bands = "one dot per arm: mean deviation from the mean of all arms on its base model"
    return Drawn(name, figure, _numbers(levels), bands)


def _furthest(here: RankedLevel) -> list[str]:
    """The arms furthest from the others over all panels, whose names stand in each."""
    scaled = (here.values - here.values.mean()) / here.values.std()
    return list(map(str, scaled[[REWARD, *RANKED]].abs().sum(axis=1).nlargest(_NAMED).index))


def _panel(axes: Axes, here: RankedLevel, metric: str, scale: float, named: Sequence[str]) -> None:
    x, y = scale * here.values[metric], 100 * here.values[REWARD]
    for draw in (axes.axhline, axes.axvline):
        draw(0, color=GREY, linewidth=0.6, zorder=0)
    axes.plot(x, y, "o", color=BLUE, markersize=4, markeredgewidth=0)
    found = here.correlations[metric].within(-1.0, 1.0)
    ends = bounds(found.low, found.high, ".2f")
    axes.set_title(f"rank correlation {found.mean:+.2f}{ends}", fontsize=BODY, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(0.1)
    figure = axes.get_figure()
    assert isinstance(figure, Figure)
    width, height = axes.get_position().size * figure.get_size_inches()
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    to_inches = [((x - left) / (right - left) * width).to_dict(), ((y - low) / (high - low) * height).to_dict()]
    points = [(to_inches[0][arm], to_inches[1][arm]) for arm in named]
    others = [(to_inches[0][arm], to_inches[1][arm]) for arm in x.index if arm not in named]
    boxes = place_labels(points, [(text_width(arm, TINY), TINY * LINE) for arm in named], (width, height), others)
    for arm, point, box in zip(named, points, boxes):
        place = ((box.x + box.width / 2) / width, (box.y + box.height / 2) / height)
        axes.text(*place, arm, transform=axes.transAxes, ha="center", va="center", fontsize=TINY, color=GREY)
        ends_at = [(at[0] / width, at[1] / height) for at in (point, box.nearest(point))]
        axes.plot(*zip(*ends_at), transform=axes.transAxes, color=GREY, linewidth=0.6, zorder=1)


def _numbers(levels: Mapping[str, RankedLevel]) -> pd.DataFrame:
    rows: list[dict[str, Any]] = []
    for level, here in levels.items():
        for arm, values in here.values.iterrows():
            rows += [{"level": level, "arm": arm, "metric": name, "value": value} for name, value in values.items()]
        for metric, found in here.correlations.items():
            row = {"level": level, "arm": "", "metric": f"rank correlation with {metric}"}
            rows.append(row | as_columns(found.within(-1.0, 1.0)))
    return pd.DataFrame(rows, columns=["level", "arm", "metric", "value", "low", "high", "n"]).round(6)


def _footer(levels: Mapping[str, RankedLevel]) -> str:
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
    missing,
    title="Training reward, entropy and accuracy of all arms",
    how_to_read=(
        "A steep fall in the first panel beside scatter in the others says that training reward ranks the arms by how "
        "sharp their policies are, and not by how good."
    ),
)
