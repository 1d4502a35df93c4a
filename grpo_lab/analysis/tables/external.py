"""Runs of other frameworks beside a sweep's arms, over the share of each run's own budget, as a tidy table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import HELDOUT
from grpo_lab.analysis.sources.sweep_data import LABELS, SweepData
from grpo_lab.analysis.table_rows import groups_of
from grpo_lab.analysis.tracks import TRAILING, TRAINING

REWARD = TRAINING["reward"]


def external_numbers(data: SweepData, others: Sequence[SweepData]) -> pd.DataFrame:
    """Every number of the figure: one row per evaluation of a finished run.

    `share` is of the run's own budget, `reward` the training reward by then, `heldout` the accuracy; `external` says
    whose run it is, `name` what it is called: an arm of ours, or the sweep and the arm of an external run.
    """
    rows = [row for source in (data, *others) for row in _rows(source, "" if source is data else source.record.name)]
    columns = ["name", "external", "level", "seed", "share", "reward", "heldout"]
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
                    "external": bool(sweep),
                    "level": level,
                    "seed": seed,
                    "share": share[at],
                    "reward": reward[chosen].mean(),
                    "heldout": heldout[at],
                }
