"""Training reward (the proxy) beside accuracy by the evaluation verifier (the truth), one panel per arm and level.

Drawn where the training grader accepts held-out answers that the evaluation verifier calls wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import pandas as pd
from matplotlib.ticker import MaxNLocator

from grpo_lab.analysis.figures.palette import BLACK, BLUE, VERMILLION, Look
from grpo_lab.analysis.figures.panels import arm_panels, arm_rows, draw_line, drawn_conditions, seeds_text
from grpo_lab.analysis.figures.style import Drawn, FigureKind, budget_label, drawing
from grpo_lab.analysis.final_values import HELDOUT, FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.mean_line import SMOOTHING
from grpo_lab.analysis.tables.curves import curves_of, line_numbers, numbers_table, shortfalls, smoothed

VERIFIED = "eval/heldout_training/verified_accuracy"
APART = 0.02  # share of held-out answers on which the two graders must differ somewhere
CORRECTNESS, TRUTH = "reward/outcome", "eval/heldout/accuracy"
SERIES = {
    CORRECTNESS: (Look(VERMILLION), "training reward, by the training grader"),
    TRUTH: (Look(BLUE), "held-out accuracy by the evaluation verifier: the truth"),
    HELDOUT: (Look(BLACK, ":"), "held-out accuracy by the training grader"),
}


def missing(data: SweepData) -> str:
    """Why there is no figure; empty where there is one."""
    points = data.counted_points
    if lacking := [name for name in (*SERIES, VERIFIED) if name not in points]:
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
) -> Drawn | str:
    """The figure `<sweep>_proxy`, of some `arms` (default: all) under a `heading` (default: the question).

    `titles` are those of panels whose arm's name says too little. A text says why there is no figure.
    """
    if reason := missing(data):
        return reason
    name = name or f"{data.record.name}_proxy"
    heading = heading or (data.design.question if data.design else "Does training reward track accuracy?")
    curves = curves_of(data, finals, list(SERIES))
    curves = curves[curves["arm"].isin(arms or data.arms)]
    numbers, places = _numbers(curves, finals), drawn_conditions(data, curves)
    label, formatter = budget_label(finals.axis, finals.budget)
    several = len(set(finals.bases.values())) > 1
    bands = f"thin: single runs; bold: mean over {'base models' if several else 'seeds'}"
    entries = [look.entry(words) for look, words in SERIES.values()]
    with drawing(name, heading, 1.6 + 2.4 * len(arm_rows(data, places)), bands, entries) as figure:
        over = {place: _over(data, finals, curves, place) for place in places}
        panels = arm_panels(figure, data, places, over, (label, "share marked correct"), titles)
        for (level, arm), axes in panels.items():
            own = numbers[(numbers["level"] == level) & (numbers["arm"] == arm)]
            for metric, (look, _) in SERIES.items():
                draw_line(axes, own[own["series"] == metric].assign(low=math.nan), look, metric, 0.35, 2.2)
        first = next(iter(panels.values()))
        first.set(ylim=(-0.02, 1.02), xlim=(0, finals.budget))
        first.xaxis.set_major_formatter(formatter)
        first.xaxis.set_major_locator(MaxNLocator(4, prune="upper"))  # panels stand close to each other
    smooth = f"Training reward: before any penalty, a running mean over {SMOOTHING:.0%} of the budget."
    caption = " ".join([smooth, *shortfalls(data, finals, list(SERIES))])
    return Drawn(name, figure, numbers, bands, caption=caption)


def _over(data: SweepData, finals: FinalValues, curves: pd.DataFrame, place: Condition) -> str:
    """Over a panel: how many runs, and where reward and accuracy end."""
    reward, accuracy = (finals.interval(*place, metric).mean for metric in (CORRECTNESS, TRUTH))
    here = (curves["level"] == place[0]) & (curves["arm"] == place[1]) & (curves["metric"] == CORRECTNESS)
    bases = len({finals.bases[seed] for seed in curves.loc[here, "seed"] if seed in finals.bases})
    number = curves.loc[here & curves["reached"], "seed"].nunique()
    runs = seeds_text(number, data.seeds_planned(*place)).partition(",")[0]
    runs = f"{runs} runs on {bases} base models" if bases > 1 else runs
    return f"{runs}\nends: reward {reward:.2f},\naccuracy {accuracy:.2f}"


def _numbers(curves: pd.DataFrame, finals: FinalValues) -> pd.DataFrame:
    """Every number the figure shows: `part` is "seed" (a run, smoothed where it was logged at every step) or "mean"."""
    shown = smoothed(curves, CORRECTNESS, SMOOTHING * finals.budget).assign(
        collapsed=False
    )  # without marks of collapses
    rows = line_numbers(curves, finals, shown)
    return numbers_table([rows[(rows["part"] == "mean") | (rows["series"] != HELDOUT)]]).round(6)


FIGURE = FigureKind(
    "proxy",
    draw_proxy,
    title="Training reward against accuracy by an independent verifier",
    order=1,
    how_to_read=(
        "Where the red lines stay up and the blue ones fall, the policy earns reward for answers that are wrong: the "
        "training grader is being gamed."
    ),
)
