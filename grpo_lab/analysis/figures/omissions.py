"""Why a figure cannot be drawn, and which runs one leaves out, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tracks import EVALUATED, KL, TRAINING, Track

BARS_OF_FEW = "mark: mean of the differences paired by seed, no interval; dots: single seeds"
BEYOND = "; arrowhead: it goes on beyond the panel"
NO_TRACKS = "no finished run was evaluated up to the common budget"
_LOGGED = TRAINING | EVALUATED | {"kl": KL}


def not_logged(found: Sequence[Track], names: Sequence[str]) -> str:
    """Which of these metrics no run logged, as a sentence part; empty where each was logged by some run."""
    absent = [_LOGGED[name] for name in names if all(np.isnan(getattr(track, name)).all() for track in found)]
    return f"{' and '.join(absent)} {'was' if len(absent) == 1 else 'were'} not logged" if absent else ""


def collapse_note(data: SweepData, finals: FinalValues) -> str:
    """Which runs are left out because they stopped before the common budget; empty where none did."""
    lost = finals.values[finals.values["stopped"]]
    if lost.empty:
        return ""
    factor = f" at {data.design.factor} = " if data.design and data.design.factor else ""
    counted = groups_of(lost, ["level", "arm"], sort=False)
    named = ", ".join(f"{len(runs)} of {arm}{factor}{level}" for (level, arm), runs in counted)
    return f"Collapsed before that, with no evaluation to compare, and left out: {named}."
