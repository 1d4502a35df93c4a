"""The gap between training reward and downstream accuracy: its change, its onset and its parts, as tidy tables."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from grpo_lab.analysis.divergence.measures import DECOMPOSITION, decomposition, gap, onsets
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.settings import Condition
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import Interval
from grpo_lab.analysis.tables.rows import as_columns, table_of
from grpo_lab.analysis.tracks import Track, by_condition, mean_of_tracks, tracks

GAP_CHANGE, OPENS, FALLS = "divergence/gap_change", "divergence/onset", "divergence/onset_after_peak"
TOTAL = "total"
PROBES = tuple(dict.fromkeys(name for ends in DECOMPOSITION.values() for name in ends))


def gap_changes(data: SweepData, finals: FinalValues, places: Sequence[Condition]) -> dict[Condition, Interval]:
    """By how much more training reward than downstream accuracy was gained from step 0 to X, percentage points."""
    runs = by_condition(tracks(data, finals))
    ends = {condition: [100 * float(gap(track)[-1]) for track in runs.get(condition, [])] for condition in places}
    return {condition: mean_of_tracks(runs.get(condition, []), own) for condition, own in ends.items()}


def divergence_of(data: SweepData, finals: FinalValues, places: Sequence[Condition]) -> pd.DataFrame:
    """The onsets and the gap change at X of every arm: level, arm, series, part, x, value, low, high, n, note.

    `part` is "onset" (at the budget x, of which low and high are the range; without one x is NaN and `note` says why)
    or "final" (the gap change in `value`, percentage points, with its 95% interval).
    """
    runs, rows = by_condition(tracks(data, finals)), []
    for (level, arm), change in gap_changes(data, finals, places).items():
        labels = {"level": level, "arm": arm}
        for name, found in onsets(runs.get((level, arm), [])).items():
            onset = {"x": found.x, "low": found.low, "high": found.high, "n": found.n, "note": found.note}
            rows.append(labels | {"series": f"divergence/{name}", "part": "onset"} | onset)
        final = {"series": GAP_CHANGE, "part": "final", "x": finals.budget, "note": ""}
        rows.append(labels | final | as_columns(change))
    return table_of(rows, ["level", "arm", "series", "part", "x", "value", "low", "high", "n", "note"])


def decomposition_of(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """The parts of the gap, percentage points: level, arm, part, start, value, low, high, n.

    One row per arm and part, and one for their total, the gap: `value` is its change from step 0 to X, mean over n
    runs with the t interval in low and high; its bar goes from `start` to `start + value`.
    """
    whole = [track for track in tracks(data, finals) if _has_all_probes(track)]
    rows = []
    for (level, arm), runs in by_condition(whole).items():
        parts = [decomposition(track) for track in runs]
        sizes = {name: [100 * float(part[name][-1]) for part in parts] for name in DECOMPOSITION}
        start = 0.0
        for name, values in (sizes | {TOTAL: [100 * float(gap(track)[-1]) for track in runs]}).items():
            mean = mean_of_tracks(runs, values)
            row = {"level": level, "arm": arm, "part": name, "start": 0.0 if name == TOTAL else start}
            rows.append(row | as_columns(mean))
            start += mean.mean
    return table_of(rows, ["level", "arm", "part", "start", "value", "low", "high", "n"])


def _has_all_probes(track: Track) -> bool:
    """True if the run has every probe at step 0 and at X."""
    return not any(pd.isna(getattr(track, name)[[0, -1]]).any() for name in PROBES)
