"""Training reward (the proxy) beside accuracy by the evaluation verifier (the truth), one panel per arm and level.

Drawn where the training grader accepts held-out answers that the evaluation verifier calls wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.panels import Cell, arm_panels, arm_rows, seeds_text
from grpo_lab.analysis.figures.seed_lines import Lines, as_table, mean_rows, seed_lines, seed_rows
from grpo_lab.analysis.figures.style import (
    BLUE,
    VERMILLION,
    Dashes,
    Drawn,
    Entry,
    budget_label,
    house_style,
    new_figure,
    write_footer,
    write_legend,
)
from grpo_lab.analysis.final_values import HELDOUT, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING, running_mean

VERIFIED = "eval/heldout_training/verified_accuracy"
APART = 0.02  # share of held-out answers on which the two graders must differ somewhere


@dataclass(frozen=True)
class _Series:
    metric: str
    title: str
    colour: str
    dashes: Dashes
    of_steps: bool = False  # logged at every step: smoothed
    runs: bool = True  # whether single runs are drawn


SERIES = (
    _Series("reward/outcome", "training reward, by the training grader", VERMILLION, "-", of_steps=True),
    _Series("eval/heldout/accuracy", "held-out accuracy by the evaluation verifier: the truth", BLUE, "-"),
    _Series(HELDOUT, "held-out accuracy by the training grader", "black", ":", runs=False),
)
TRUTH = SERIES[1]


def missing(data: SweepData, finals: FinalValues) -> str:
    """Why there is no figure; empty where there is one."""
    points = data.counted_points
    if lacking := [name for name in (*(series.metric for series in SERIES), VERIFIED) if name not in points]:
        return f"{', '.join(lacking)} not logged"
    gap = (points[HELDOUT] - points[VERIFIED]).max()
    return "" if gap > APART else "the training grader and the evaluation verifier agree on held-out answers"


def draw_proxy(
    data: SweepData,
    finals: FinalValues,
    arms: Sequence[str] = (),
    heading: str = "",
    name: str = "",
    titles: Mapping[str, str] = MappingProxyType({}),
) -> Drawn | None:
    """The figure `<sweep>_proxy`, of some `arms` (default: all) under a `heading` (default: the question).

    `titles` are those of panels whose arm's name says too little.

    None where `missing` says why.
    """
    if missing(data, finals):
        return None
    name = name or f"{data.record.name}_proxy"
    heading = heading or (data.design.question if data.design else "Does training reward track accuracy?")
    lines = seed_lines(data, finals, [series.metric for series in SERIES])
    found = [(level, arm) for level in data.levels for arm in arms or data.arms if (level, arm) in lines.cells]
    numbers = _numbers(lines, found, finals.budget)
    label, formatter = budget_label(finals.axis, finals.budget)
    bands = "thin: single runs; bold: mean over base models"
    rows = len(arm_rows(data, found))
    with house_style(name):
        figure = new_figure(heading, 1.6 + 2.4 * rows)
        over = _over(data, finals, lines, found)
        panels = arm_panels(figure, data, found, over, (label, "share marked correct"), titles)
        for (level, arm), axes in panels.items():
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)])
        first = next(iter(panels.values()))
        first.set(ylim=(-0.02, 1.02), xlim=(0, finals.budget))
        first.xaxis.set_major_formatter(formatter)
        first.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))  # panels stand close to each other
        write_legend(figure, _legend())
        write_footer(figure, bands)
    smooth = f"Training reward: before any penalty, a running mean over {SMOOTHING:.0%} of the budget."
    return Drawn(name, figure, numbers, bands, caption=" ".join([smooth, *lines.shortfalls]))


def _legend() -> list[Entry]:
    return [
        (Line2D([], [], color=series.colour, linestyle=series.dashes, linewidth=1.8), series.title) for series in SERIES
    ]


def _over(data: SweepData, finals: FinalValues, lines: Lines, found: Sequence[Cell]) -> Mapping[Cell, str]:
    """Over a panel: how many runs, and where reward and accuracy end."""
    texts = {}
    for cell in found:
        ends = [finals.interval(*cell, series.metric).mean for series in (SERIES[0], TRUTH)]
        own = lines.of(SERIES[0].metric, cell)
        bases = len({finals.bases[line.seed] for line in own if line.seed in finals.bases})
        number = seeds_text(sum(line.reached for line in own), data.seeds_planned(*cell)).partition(",")[0]
        number = f"{number} runs on {bases} base models" if bases > 1 else number
        texts[cell] = f"{number}\nends: reward {ends[0]:.2f},\naccuracy {ends[1]:.2f}"
    return texts


def _numbers(lines: Lines, found: Sequence[Cell], budget: float) -> pd.DataFrame:
    """Every number the figure shows: `part` is "seed" (a run, smoothed where it was logged at every step) or "mean"."""
    rows: list[dict[str, Any]] = []
    for level, arm in found:
        for series in SERIES:
            labels = {"level": level, "arm": arm, "series": series.metric}
            own = lines.of(series.metric, (level, arm))
            for line in own if series.runs else ():
                smooth = running_mean(line.x, line.value, SMOOTHING * budget) if series.of_steps else line.value
                rows += seed_rows(labels, replace(line, value=smooth, stopped=False), len(line.x))
            rows += mean_rows(labels, own, budget, not series.of_steps)
    return as_table(rows, ["level", "arm", "series", "part", "seed", "x", "value", "low", "high", "n"])


def _panel(axes: Axes, numbers: pd.DataFrame) -> None:
    for series in SERIES:
        own = numbers[numbers["series"] == series.metric]
        for _, run in own[own["part"] == "seed"].groupby("seed"):
            axes.plot(run["x"], run["value"], color=series.colour, linewidth=0.6, alpha=0.35, label="seed")
        mean = own[own["part"] == "mean"]
        axes.plot(mean["x"], mean["value"], series.dashes, color=series.colour, linewidth=2.2, label=series.metric)


FIGURE = FigureKind(
    "proxy",
    draw_proxy,
    missing,
    title="Training reward against accuracy by an independent verifier",
    how_to_read=(
        "Where the red lines stay up and the blue ones fall, the policy earns reward for answers that are wrong: the "
        "training grader is being gamed."
    ),
)
