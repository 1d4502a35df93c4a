"""Training reward (the proxy) beside accuracy by the evaluation verifier (the truth), one panel per arm and level.

Drawn where the training grader accepts held-out answers that the evaluation verifier calls wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.seed_lines import Cell, Line, Lines, as_columns, as_table, seed_lines
from grpo_lab.analysis.figures.small_multiples import legend_height, seeds_text, small_multiples, write_legend
from grpo_lab.analysis.figures.style import BLUE, VERMILLION, Dashes, Drawn, budget_label, house_style
from grpo_lab.analysis.final_values import HELDOUT, FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING, mean_line, running_mean

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
    entries: list[tuple[Artist, str]] = [
        (Line2D([], [], color=series.colour, linestyle=series.dashes, linewidth=1.8), series.title) for series in SERIES
    ]
    label, formatter = budget_label(finals.axis, finals.budget)
    with house_style(name):
        grid = small_multiples(
            data, found, heading, legend_height(len(entries)), _over(data, finals, lines, found), panel=2.2,
            labels=(label, "share marked correct"), footer=_footer(finals, lines.shortfalls), titles=titles,
        )  # fmt: skip
        write_legend(grid.figure, heading, entries)
        for (level, arm), axes in grid.panels.items():
            _panel(axes, numbers[(numbers["level"] == level) & (numbers["arm"] == arm)])
        first = next(iter(grid.panels.values()))
        first.set_ylim(-0.02, 1.02)
        first.set_xlim(0, finals.budget)
        first.xaxis.set_major_formatter(formatter)
        first.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))  # panels stand close to each other
    return Drawn(name, grid.figure, numbers, "thin: single runs; bold: mean over base models")


def _over(data: SweepData, finals: FinalValues, lines: Lines, found: Sequence[Cell]) -> Mapping[Cell, Sequence[str]]:
    """Over a panel: how many runs, and where reward and accuracy end."""
    texts = {}
    for cell in found:
        ends = [finals.interval(*cell, series.metric).mean for series in (SERIES[0], TRUTH)]
        reached = sum(line.reached for line in lines.of(SERIES[0].metric, cell))
        written = "ends: reward {:.2f}, accuracy {:.2f}".format(*ends)
        bases = len({finals.bases[line.seed] for line in lines.of(SERIES[0].metric, cell) if line.seed in finals.bases})
        number = seeds_text(reached, data.seeds_planned(*cell)).partition(",")[0]
        texts[cell] = [f"{number} runs on {bases} base models" if bases > 1 else number, written]
    return texts


def _numbers(lines: Lines, found: Sequence[Cell], budget: float) -> pd.DataFrame:
    """Every number the figure shows: `part` is "seed" (a run, smoothed where it was logged at every step) or "mean"."""
    rows: list[dict[str, Any]] = []
    for level, arm in found:
        for series in SERIES:
            labels = {"level": level, "arm": arm, "series": series.metric}
            own = lines.of(series.metric, (level, arm))
            for line in own if series.runs else ():
                xs, values = _smooth(line, budget) if series.of_steps else (line.x, line.value)
                rows += [{**labels, "part": "seed", "seed": line.seed, "x": x, "value": y} for x, y in zip(xs, values)]
            whole = [line for line in own if line.reached]
            mean = mean_line(
                [(line.x, line.value) for line in whole], budget, not series.of_steps,
                bases=[line.base for line in whole],
            )  # fmt: skip
            rows += [{**labels, "part": "mean", "x": x} | as_columns(interval) for x, interval in mean]
    return as_table(rows, ["level", "arm", "series", "part", "seed", "x", "value", "low", "high", "n"])


def _smooth(line: Line, budget: float) -> tuple[Any, Any]:
    return line.x, running_mean(line.x, line.value, SMOOTHING * budget)


def _panel(axes: Axes, numbers: pd.DataFrame) -> None:
    for series in SERIES:
        own = numbers[numbers["series"] == series.metric]
        for _, run in own[own["part"] == "seed"].groupby("seed"):
            axes.plot(run["x"], run["value"], color=series.colour, linewidth=0.6, alpha=0.35, label="seed")
        mean = own[own["part"] == "mean"]
        axes.plot(mean["x"], mean["value"], series.dashes, color=series.colour, linewidth=2.2, label=series.metric)


def _footer(finals: FinalValues, shortfalls: Sequence[str]) -> str:
    over = " over base models" if len(set(finals.bases.values())) > 1 else ""
    smooth = f"Training reward: before any penalty, a running mean over {SMOOTHING:.0%} of the budget."
    return " ".join([f"Thin: single runs; bold: mean{over}.", smooth, *shortfalls])


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
