"""What a figure says of itself: how it is drawn, why it may be missing, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure; `registry.FIGURES` lists all kinds.

    `draw` returns None where this sweep cannot have the figure. `missing` then says why in one sentence part without a
    full stop, and is empty otherwise. `title` and `how_to_read` stand over the figure in the report.
    """

    suffix: str  # files are called <sweep>_<suffix>; the first figure has none
    draw: Callable[[SweepData, FinalValues], Drawn | None]
    missing: Callable[[SweepData, FinalValues], str]
    title: str
    how_to_read: str

    def name(self, sweep: str) -> str:
        """What the figure of this sweep is called."""
        return f"{sweep}_{self.suffix}" if self.suffix else sweep
