"""The arms of a sweep in one table, printed at its end in the shell, in `grpo-lab figures` and in trackers."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import pandas as pd

from grpo_lab.analysis.caveats import comparison, name_of
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, FinalValues
from grpo_lab.analysis.metric_names import CORRECTNESS, metric_text
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.comparison import mean_of_runs
from grpo_lab.analysis.stats.intervals import (
    FOR_INTERVAL,
    NOT_REPORTED,
    NOT_REPORTED_MEANS,
    Interval,
    few,
    seed_differences,
)
from grpo_lab.analysis.table_rows import aligned
from grpo_lab.analysis.tracks import gap, tracks

_EVALUATED = "eval/heldout/accuracy"
_SHOWN = {
    CORRECTNESS: "training reward",
    _EVALUATED: "held-out",
    HELDOUT: "held-out, training protocol",  # where the other was not logged, as in runs of other frameworks
    DOWNSTREAM: "downstream",
}
_WIDTH = 118
_NONE = pd.Series(dtype=float)


def arms_table(data: SweepData, finals: FinalValues) -> list[str]:
    """Every arm that ran and its difference to the control, paired by seed, as lines.

    The columns are the declared primary metric, training reward (the share of responses that its grader accepts),
    held-out and downstream accuracy, and the divergence: the gain in training reward since step 0 minus that in
    downstream accuracy. Of a sweep without a design the settings follow in which its arms differ.
    """
    primary = data.declaration.primary if data.declaration else ""
    twice = HELDOUT if _EVALUATED in finals.values and primary != HELDOUT else ""
    metrics = [name for name in dict.fromkeys([primary, *_SHOWN]) if name in finals.values and name != twice]
    names = [f"{_SHOWN.get(name) or metric_text(name)}{' (primary)' if name == primary else ''}" for name in metrics]
    gaps = _gaps(data, finals)
    rows, most = [["arm", "n", *names, "divergence, pp"]], 0
    for level, arm in data.run_arms:
        own = [finals.interval(level, arm, name) for name in metrics]
        gained = gaps.get((level, arm), _NONE)
        rows.append(_row(name_of((level, arm)), own, _over_runs(gained, finals)))
        most = max([most, *(one.n for one in own)])
        if arm != data.control:
            apart = [finals.difference(level, arm, data.control, name) for name in metrics]
            more = seed_differences(gained, gaps.get((level, data.control), _NONE))
            rows.append(_row(f"  minus {data.control}", apart, _over_runs(more, finals), "+"))
    further = comparison(data) if data.design is None else []
    explained = NOT_REPORTED_MEANS if any(NOT_REPORTED in cell for row in rows for cell in row) else ""
    below = " ".join(filter(None, [explained, f"{finals.rule}."]))
    return [
        *_head(data, finals, most),
        *aligned(rows, "  "),
        *textwrap.wrap(below, _WIDTH, initial_indent="  ", subsequent_indent="  "),
        *(["", *further] if further else []),
    ]


def _head(data: SweepData, finals: FinalValues, most: int) -> list[str]:
    """The heading of the table and how to read it; `most` is the largest number of runs of an arm."""
    planned = sum(data.seeds_planned(level, arm) for level in data.levels for arm in data.arms)
    done = f"{len(data.finished)} of {planned} planned runs are finished"
    summary = f"{data.record.name}: {done}; the control is {data.control}"
    if data.design is None:
        summary = f"{data.record.name}: nothing was declared, so nothing is judged; {data.control} is the control"
    elif data.declaration is None:
        summary += "; exploratory: nothing was declared, so nothing is judged"
    brackets = f"Brackets: {finals.brackets}, n runs"
    if most < FOR_INTERVAL:
        brackets = f"{few(most)}; parentheses show the two values" if most == 2 else few(most)
    explained = (
        f"Final values of every arm, and differences to the control, paired by seed. {brackets}. Training reward: the "
        "share of responses that the training grader accepts. Divergence: its gain since step 0 minus the gain in "
        "downstream accuracy, in percentage points."
    )
    return [summary, "", *textwrap.wrap(explained, _WIDTH)]


def _gaps(data: SweepData, finals: FinalValues) -> dict[tuple[str, str], pd.Series]:
    """(level, arm) -> how far each run's training reward and downstream accuracy parted by X, percentage points."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    for track in tracks(data, finals):
        found.setdefault((track.level, track.arm), {})[track.seed] = 100 * float(gap(track)[-1])
    return {place: pd.Series(by_seed).dropna() for place, by_seed in found.items()}


def _over_runs(values: pd.Series, finals: FinalValues) -> Interval:
    return mean_of_runs(values.tolist(), [finals.bases.get(int(seed), -1) for seed in values.index])


def _row(name: str, found: Sequence[Interval], divergence: Interval, sign: str = "") -> list[str]:
    counts = ", ".join(dict.fromkeys(str(one.n) for one in found)) or "0"
    parted = divergence.written("{:+.1f}".format) if divergence.n else "-"
    return [name, counts, *(one.text(sign) for one in found), parted]
