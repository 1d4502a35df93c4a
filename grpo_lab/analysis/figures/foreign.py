"""Runs of other frameworks beside a sweep's arms: reward and held-out accuracy over the budget, and one by the other.

Budgets of two frameworks have no common unit, so each run's curve is over the share of its own. A training reward at an
evaluation is its mean over the last 5% of that budget, as in `tracks`; before the first step it is that of the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D

from grpo_lab.analysis.figures.style import (
    BLACK,
    BLUE,
    FAINT,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Drawn,
    house_style,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import HELDOUT
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tracks import TRAILING, TRAINING
from grpo_lab.tracking.external import EXTERNAL

REWARD = TRAINING["reward"]
_COLOURS = (BLUE, GREEN, VERMILLION, PURPLE, ORANGE, SKY)
_FOREIGN = (BLACK, GREY, "#A0A0A0")
_MARK = {False: {"marker": "o"}, True: {"marker": "D", "markerfacecolor": "white", "linestyle": "--"}}
_CAPTION = (
    "Hollow diamonds and dashes: foreign runs, as their framework logged them, with its own model, questions and "
    "protocol; no verdict counts them. Left: solid or dashed held-out accuracy, dotted training reward. Right: above "
    "the diagonal held-out accuracy is higher than reward."
)


def foreign_numbers(data: SweepData, others: Sequence[SweepData]) -> pd.DataFrame:
    """Every number of the figure: one row per evaluation of a finished run.

    `share` is of the run's own budget, `reward` the training reward by then, `heldout` the accuracy; `foreign` says
    whose run it is, `name` what it is called: an arm of ours, or the sweep and the arm of a foreign run.
    """
    rows = [row for source in (data, *others) for row in _rows(source, "" if source is data else source.record.name)]
    columns = ["name", "foreign", "level", "seed", "share", "reward", "heldout"]
    return pd.DataFrame(rows, columns=columns).round(6)


def _rows(data: SweepData, sweep: str) -> Iterator[dict[str, Any]]:
    axis = next((name for name in (f"budget/{data.axis}", "budget/steps") if name in data.points), "")
    if not axis or not {REWARD, HELDOUT} <= set(data.points.columns):
        return
    for (level, arm, seed), run in groups_of(data.finished_points.sort_values("step"), LABELS, sort=False):
        share = run[axis].to_numpy() / run[axis].max()
        reward, heldout = run[REWARD].to_numpy(), run[HELDOUT].to_numpy()
        logged = np.isfinite(reward) & (run["step"].to_numpy() > 0)
        for at in np.flatnonzero(np.isfinite(heldout) & np.isfinite(share)):
            recent = logged & (share <= share[at]) & (share > share[at] - TRAILING)
            before = np.flatnonzero(logged & (share <= share[at]))
            chosen = recent if recent.any() else before[-1:] if len(before) else np.flatnonzero(logged)[:1]
            if np.size(reward[chosen]):
                yield {
                    "name": f"{sweep} {arm}".strip(),
                    "foreign": bool(sweep),
                    "level": level,
                    "seed": seed,
                    "share": share[at],
                    "reward": reward[chosen].mean(),
                    "heldout": heldout[at],
                }


def draw_foreign(data: SweepData, others: Sequence[SweepData]) -> Drawn:
    """The figure `<sweep>_foreign` of a sweep and foreign ones.

    Raises ValueError for a sweep among `others` that is not foreign, and where nothing of either could be drawn.
    """
    for other in others:
        if not all(arm.startswith(EXTERNAL) for arm in other.arms):
            raise ValueError(f"{other.record.name} is no foreign sweep: --foreign takes names given to grpo-lab import")
    numbers = foreign_numbers(data, others)
    for source, found in ((data, numbers[~numbers["foreign"]]), (others, numbers[numbers["foreign"]])):
        if found.empty:
            named = data.record.name if source is data else ", ".join(other.record.name for other in others)
            raise ValueError(f"no finished run of {named} has {REWARD} and {HELDOUT}, which the figure compares")
    name = f"{data.record.name}_foreign"
    looks = _looks(numbers)
    bands = "lines: single runs; hollow diamonds and dashes: runs of other frameworks; dotted: training reward"
    with house_style(name):
        figure = new_figure(f"{data.record.name} beside runs of other frameworks", 4.2 + 0.1 * len(looks), 10.0)
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
        write_legend(figure, [(Line2D([], [], **look), label) for label, look in looks.items()])
        write_footer(figure, bands)
    return Drawn(name, figure, numbers, bands, caption=_CAPTION)


def _looks(numbers: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """What each arm, and each foreign run, looks like; a foreign one is called so in the legend too."""
    looks: dict[str, dict[str, Any]] = {}
    for foreign, colours in ((False, _COLOURS), (True, _FOREIGN)):
        for index, label in enumerate(dict.fromkeys(numbers.loc[numbers["foreign"] == foreign, "name"])):
            base: dict[str, Any] = {"color": colours[index % len(colours)], "markersize": 4, "linewidth": 1.3}
            looks[label] = base | _MARK[foreign]
    return looks
