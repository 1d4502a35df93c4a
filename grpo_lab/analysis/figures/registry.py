"""Every figure of a sweep: the modules of this folder that have a `FIGURE`, in its order of reading."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence

from grpo_lab.analysis import figures
from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.figures import proxy
from grpo_lab.analysis.figures.style import Drawn, FigureKind, with_notes
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData


def discovered() -> tuple[FigureKind, ...]:
    """The `FIGURE` of every module in this folder."""
    names = (f"{figures.__name__}.{module.name}" for module in pkgutil.iter_modules(figures.__path__))
    modules = [importlib.import_module(name) for name in names if name != __name__]
    kinds = [module.FIGURE for module in modules if hasattr(module, "FIGURE")]
    return tuple(sorted(kinds, key=lambda kind: (kind.order, kind.suffix)))


FIGURES = discovered()
ALL = tuple(kind.suffix or "curves" for kind in FIGURES)


def default_figures(data: SweepData, page: str = "") -> list[str]:
    """The five figures that are drawn unless others are named, and those that `page`, the experiment's text, shows.

    Reward is held against accuracy run by run where the training grader can be gamed, and arm by arm where it cannot.
    """
    agreement = "ranks" if proxy.missing(data) else "proxy"
    shown = [name for name in ALL if f"figures/{data.record.name}_{name}.png" in page]
    return list(dict.fromkeys(["curves", "effects", "forest", agreement, "step_metrics", *shown]))


def draw_all(data: SweepData, finals: FinalValues, names: Sequence[str] = ()) -> tuple[list[Drawn], dict[str, str]]:
    """The named figures (default: `default_figures`) that this sweep can have; and by name, why it cannot have others.

    Raises ValueError, with all names, for one that is no figure.
    """
    if unknown := [name for name in names if name not in ALL]:
        raise ValueError(f"no figure is called {', '.join(unknown)}: choose from {', '.join(ALL)}")
    names = names or default_figures(data)
    drawn, missing = [], {}
    caveats = notes(data, finals)
    for kind in (kind for kind in FIGURES if (kind.suffix or "curves") in names):
        figure = kind.draw(data, finals)
        if isinstance(figure, str):
            missing[kind.name(data.record.name)] = figure
        else:
            drawn.append(with_notes(figure, caveats))
    return drawn, missing
