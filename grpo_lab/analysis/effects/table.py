"""Final values of every arm and their differences to the control, as CSV rows and as Markdown."""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.effects.suites import further_accuracies
from grpo_lab.analysis.final_values import (
    AVERAGE,
    DOWNSTREAM,
    GAP,
    HELDOUT,
    MASKED_SHARE,
    OVERSTATEMENT,
    QUANTITIES,
    REWARD,
    TRUNCATED,
    FinalValues,
)
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL

# The columns of the Markdown tables, unless the experiment names its own; the CSV has all quantities.
_WHOLE = f"{AVERAGE}{TRUNCATED}"
COLUMNS = (REWARD, HELDOUT, GAP, OVERSTATEMENT, MASKED_SHARE, DOWNSTREAM, _WHOLE, TRUNCATED, "reward/mean")


def columns(data: SweepData) -> tuple[str, ...]:
    """The metrics of the Markdown table."""
    return (data.design.columns if data.design else ()) or COLUMNS


def effect_table(data: SweepData, finals: FinalValues) -> pd.DataFrame:
    """One row per level, arm and quantity: mean and paired difference to the control, each with its interval.

    `n` counts the runs that have the quantity, `n_finished` all finished ones, `n_collapsed` those that collapsed
    before X and count by the declared rule, `n_planned` the seeds declared or recorded, `n_pairs` the seeds that arm
    and control share. The control's own difference is empty.
    """
    rows = []
    for level, arm in data.run_arms:
        for metric in dict.fromkeys([*QUANTITIES, *columns(data), *further_accuracies(finals)]):
            own = finals.interval(level, arm, metric)
            row = {"level": level, "arm": arm, "metric": metric, "n": own.n}
            row |= {"n_finished": data.seeds_finished(level, arm), "n_collapsed": finals.collapsed(level, arm)}
            row |= {"n_planned": data.seeds_planned(level, arm)}
            row |= {"mean": own.mean, "low": own.low, "high": own.high}
            if arm != data.control:
                gap = finals.difference(level, arm, data.control, metric)
                row |= {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
                row |= {"n_pairs": gap.n}
            rows.append(row)
    names = ["level", "arm", "metric", "n", "n_finished", "n_planned", "mean", "low", "high"]
    names += ["difference", "difference_low", "difference_high", "n_pairs"]
    return pd.DataFrame(rows, columns=names).astype({"n_pairs": "Int64"})


def markdown(data: SweepData, finals: FinalValues) -> str:
    """Final values and differences as two Markdown tables, with what the brackets mean."""
    control = data.control

    def final(level: str, arm: str, metric: str) -> str:
        return finals.interval(level, arm, metric).text()

    def difference(level: str, arm: str, metric: str) -> str:
        return finals.difference(level, arm, control, metric).text("+")

    arms = data.run_arms
    others = [(level, arm) for level, arm in arms if arm != control]
    first = f"{finals.rule}. Brackets: {finals.brackets}; none for fewer than {FOR_INTERVAL} runs."
    parts = [" ".join([first, *notes(data, finals)]), _grid(data, finals, arms, final)]
    if others:
        parts += [f"Differences to `{control}`, paired by seed:", _grid(data, finals, others, difference)]
    return "\n\n".join(parts) + "\n"


def _grid(
    data: SweepData, finals: FinalValues, arms: list[tuple[str, str]], cell: Callable[[str, str, str], str]
) -> str:
    factor = data.design.factor if data.design else ""
    shown = columns(data)
    named = [QUANTITIES.get(metric, metric) for metric in shown]
    collapsed = {place: finals.collapsed(*place) for place in arms}
    any_collapsed = any(collapsed.values())
    counts = ["n finished / planned", *(["n collapsed"] if any_collapsed else [])]
    head = [*([factor] if factor else []), "arm", *counts, *named]
    lines = [head, ["---"] * len(head)]
    for level, arm in arms:
        count = f"{data.seeds_finished(level, arm)} / {data.seeds_planned(level, arm)}"
        named_arm = f"{arm} \u2020" if arm in data.changed else arm
        labels = [
            *([level] if factor else []),
            named_arm,
            count,
            *([str(collapsed[level, arm])] if any_collapsed else []),
        ]
        lines.append([*labels, *(cell(level, arm, metric) for metric in shown)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
