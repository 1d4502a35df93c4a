"""Every figure of a sweep, in the order of reading: a new one is a module with a `FIGURE`, and its line here."""

from __future__ import annotations

from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.figures import (
    budgets,
    ceiling,
    coverage,
    curves,
    doses,
    effects,
    forest,
    frontier,
    phase,
    proxy,
    ranks,
    sharpness,
    step_metrics,
    target_lengths,
    told_apart,
    waterfall,
)
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.style import Drawn, with_notes
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData

FIGURES: tuple[FigureKind, ...] = (
    proxy.FIGURE,
    curves.FIGURE,
    step_metrics.FIGURE,
    phase.FIGURE,
    forest.FIGURE,
    effects.FIGURE,
    doses.FIGURE,
    ranks.FIGURE,
    sharpness.FIGURE,
    told_apart.FIGURE,
    waterfall.FIGURE,
    frontier.FIGURE,
    ceiling.FIGURE,
    budgets.FIGURE,
    target_lengths.FIGURE,
    coverage.FIGURE,
)


def draw_all(data: SweepData, finals: FinalValues) -> tuple[list[Drawn], dict[str, str]]:
    """Every figure this sweep can have, with the caveats under it; and by name, why it cannot have the others."""
    drawn, missing = [], {}
    said = notes(data, finals)
    for kind in FIGURES:
        figure = kind.draw(data, finals)
        if figure is None:
            missing[kind.name(data.record.name)] = kind.missing(data, finals)
        else:
            drawn.append(with_notes(figure, said))
    return drawn, missing
