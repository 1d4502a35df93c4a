"""The number that a run is worth to a search over settings: of this lab's tuning, or of another Hydra sweeper."""

from __future__ import annotations

import math
from pathlib import Path

from grpo_lab.tracking.run_reader import has_ended, read_steps, run_status


def has_settled(folder: Path) -> bool:
    """True if another attempt at a run would end alike: it has ended, or stopped on a loss that was not finite."""
    return has_ended(folder) or _said(folder).startswith("FloatingPointError")


def objective(folder: Path, metric: str, axis: str) -> float:
    """The final value of `metric` in the run of this folder, on the budget `axis`; NaN where it logged none.

    A run that stopped before its budget was spent is worth 0 on a metric of which more is better, whatever it had.
    """
    import pandas as pd

    from grpo_lab.analysis.final_values import is_rated, own_final

    if run_status(folder) != "done" and has_settled(folder):
        return 0.0 if is_rated(metric) else math.nan
    steps = pd.DataFrame([{"step": record.step, **record.metrics} for record in read_steps(folder)])
    return own_final(steps, metric, axis)


def _said(folder: Path) -> str:
    note = folder / "error.txt"
    return note.read_text(errors="replace") if note.exists() and not (folder / "DONE").exists() else ""
