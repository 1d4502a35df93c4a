"""Every figure of a sweep, in the order of reading: a new one is a module with a `FIGURE`, and its line here."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.figures import (
    all_pairs,
    budgets,
    curves,
    decomposition,
    dose_response,
    effects,
    forest,
    proxy,
    ranks,
    sharpness,
    step_metrics,
    target_lengths,
)
from grpo_lab.analysis.figures.kind import FigureKind
from grpo_lab.analysis.figures.style import Drawn, with_notes
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData

FIGURES: tuple[FigureKind, ...] = (
    proxy.FIGURE,
    curves.FIGURE,
    step_metrics.FIGURE,
    effects.FIGURE,
    forest.FIGURE,
    ranks.FIGURE,
    sharpness.FIGURE,
    dose_response.FIGURE,
    all_pairs.FIGURE,
    decomposition.FIGURE,
    budgets.FIGURE,
    target_lengths.FIGURE,
)
ALL = tuple(kind.suffix or "curves" for kind in FIGURES)


def default_figures(data: SweepData, finals: FinalValues, page: str = "") -> list[str]:
    """The five figures that are drawn unless others are named, and those that `page`, the experiment's text, shows.

    Reward is held against accuracy run by run where the training grader can be gamed, and arm by arm where it cannot.
    """
    agreement = "ranks" if proxy.missing(data, finals) else "proxy"
    shown = [name for name in ALL if f"figures/{data.record.name}_{name}.png" in page]
    return list(dict.fromkeys(["curves", "effects", "forest", agreement, "step_metrics", *shown]))


def draw_all(data: SweepData, finals: FinalValues, names: Sequence[str] = ()) -> tuple[list[Drawn], dict[str, str]]:
    """The named figures (default: `default_figures`) that this sweep can have; and by name, why it cannot have others.

    Raises ValueError, with all names, for one that is no figure.
    """
    if unknown := [name for name in names if name not in ALL]:
        raise ValueError(f"no figure is called {', '.join(unknown)}: choose from {', '.join(ALL)}")
    names = names or default_figures(data, finals)
    drawn, missing = [], {}
    caveats = notes(data, finals)
    for kind in (kind for kind in FIGURES if (kind.suffix or "curves") in names):
        figure = kind.draw(data, finals)
        if figure is None:
            missing[kind.name(data.record.name)] = kind.missing(data, finals)
        else:
            drawn.append(with_notes(figure, caveats))
    return drawn, missing
