"""Runs of other frameworks beside a sweep's arms: reward and held-out accuracy over the budget, and one by the other.

Budgets of two frameworks have no common unit, so each run's curve is over the share of its own. A training reward at an
evaluation is its mean over the last 5% of that budget, as in `tracks`; before the first step it is that of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.lines import Line2D

from grpo_lab.analysis.figures.palette import BLACK, BLUE, FAINT, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from grpo_lab.analysis.figures.style import Drawn, drawing
from grpo_lab.analysis.final_values import HELDOUT
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tables.external import REWARD, external_numbers
from grpo_lab.tracking.external import EXTERNAL

_COLOURS = (BLUE, GREEN, VERMILLION, PURPLE, ORANGE, SKY)
_OTHERS = (BLACK, GREY, "#A0A0A0")
_MARK = {False: {"marker": "o"}, True: {"marker": "D", "markerfacecolor": "white", "linestyle": "--"}}
_CAPTION = (
    "Hollow diamonds and dashes: external runs, as their framework logged them, with its own model, questions and "
    "protocol; no verdict counts them. Left: solid or dashed held-out accuracy, dotted training reward. Right: above "
    "the diagonal held-out accuracy is higher than reward."
)


def draw_external(data: SweepData, others: Sequence[SweepData]) -> Drawn:
    """The figure `<sweep>_external` of a sweep and external ones.

    Raises ValueError for a sweep among `others` that is not external, and where nothing of either could be drawn.
    """
    for other in others:
        if not all(arm.startswith(EXTERNAL) for arm in other.arms):
            raise ValueError(
                f"{other.record.name} is no external sweep: --external takes names given to grpo-lab import"
            )
    numbers = external_numbers(data, others)
    for source, found in ((data, numbers[~numbers["external"]]), (others, numbers[numbers["external"]])):
        if found.empty:
            named = data.record.name if source is data else ", ".join(other.record.name for other in others)
            raise ValueError(f"no finished run of {named} has {REWARD} and {HELDOUT}, which the figure compares")
    name = f"{data.record.name}_external"
    looks = _looks(numbers)
    bands = "lines: single runs; hollow diamonds and dashes: runs of other frameworks; dotted: training reward"
    heading, entries = (
        f"{data.record.name} beside runs of other frameworks",
        [(Line2D([], [], **look), label) for label, look in looks.items()],
    )
    with drawing(name, heading, 4.2 + 0.1 * len(looks), bands, entries, width=10.0) as figure:
        left, right = figure.subplots(1, 2)
        for (label, _, _), run in groups_of(numbers, ["name", "level", "seed"], sort=False):
            look = looks[label]
            left.plot(run["share"], run["heldout"], label=label, **look)
            left.plot(run["share"], run["reward"], label="reward", color=look["color"], linestyle=":", linewidth=1.2)
            right.plot(run["reward"], run["heldout"], label=label, **look)
        right.plot([0, 1], [0, 1], color=FAINT, linewidth=0.8, zorder=0)
        left.set(xlabel="share of the run's own budget", ylabel="share of answers or responses", xlim=(0, 1.02))
        right.set(xlabel="training reward, right of all responses", ylabel="held-out accuracy", xlim=(-0.02, 1.02))
        for axes in (left, right):
            axes.set_ylim(-0.02, 1.02)
    return Drawn(name, figure, numbers, bands, caption=_CAPTION)


def _looks(numbers: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Line style by arm and by external run; the legend names external ones as such."""
    looks: dict[str, dict[str, Any]] = {}
    for external, colours in ((False, _COLOURS), (True, _OTHERS)):
        for index, label in enumerate(dict.fromkeys(numbers.loc[numbers["external"] == external, "name"])):
            base: dict[str, Any] = {"color": colours[index % len(colours)], "markersize": 4, "linewidth": 1.3}
            looks[label] = base | _MARK[external]
    return looks
