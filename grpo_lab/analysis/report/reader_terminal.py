"""Responses on a terminal: one run's, or two runs' side by side on the same prompt and noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_lab.analysis.report.reader import (
    LEGEND,
    Filter,
    facts,
    paired,
    read_rollouts,
    response_text,
    rollout_steps,
    scale_of,
    seed_of,
)
from grpo_lab.analysis.table_rows import records_of
from grpo_lab.tracking.terminal import Terminal


def show_run(console: Terminal, folder: Path, step: int | None, chosen: Filter, limit: int) -> int:
    """Print responses of one run that pass the filter, at most `limit`; returns how many passed."""
    table = read_rollouts(folder, step)
    passed = chosen(table)
    _head(console, folder, table)
    scale = scale_of(table)
    for row in records_of(passed.head(limit)):
        console.print(Panel(_body(row, scale), title=_title(row), title_align="left"))
    _foot(console, len(passed), len(table), limit)
    return len(passed)


def show_pair(console: Terminal, left: Path, right: Path, step: int | None, chosen: Filter, limit: int) -> int:
    """Print responses of two runs side by side where either passes; returns the number of pairs that passed.

    Without a step, the last that both saved. Raises ValueError where they share none, or no prompt at that step.
    """
    common = sorted(set(rollout_steps(left)) & set(rollout_steps(right)))
    if step is None and not common:
        raise ValueError(f"{left} and {right} saved no step in common")
    tables = [read_rollouts(folder, common[-1] if step is None else step) for folder in (left, right)]
    passed = [set(map(tuple, chosen(table)[["problem_id", "response"]].to_numpy())) for table in tables]
    pairs = [
        pair for pair in paired(*tables) if any((pair[0]["problem_id"], pair[0]["response"]) in keys for keys in passed)
    ]
    for side, folder, table in (("left", left, tables[0]), ("right", right, tables[1])):
        console.print(Text(f"{side}:  ", style="bold"), end="")
        _head(console, folder, table, legend=side == "right")
    if seed_of(left) != seed_of(right):
        console.print(
            f"seeds differ ({seed_of(left)}, {seed_of(right)}): same prompts by chance, other noise", style="yellow"
        )
    scale = max(map(scale_of, tables))
    for pair in pairs[:limit]:
        grid = Table.grid(expand=True, padding=(0, 1))
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(ratio=1, overflow="fold")
        grid.add_row(*(_body(row, scale) for row in pair))
        console.print(Panel(grid, title=_title(pair[0]), title_align="left"))
    _foot(console, len(pairs), len(tables[0]), limit)
    return len(pairs)


def _head(console: Terminal, folder: Path, table: pd.DataFrame, legend: bool = True) -> None:
    steps = ", ".join(map(str, rollout_steps(folder)))
    console.print(f"{folder}  step {table['step'].iloc[0]} (saved: {steps})", soft_wrap=True)
    if legend:
        note = LEGEND if "tokens" in table else f"{LEGEND}. This run saved no tokens: whole responses are coloured"
        console.print(note, style="dim")


def _foot(console: Terminal, passed: int, number: int, limit: int) -> None:
    more = f"; {passed - limit} more with --limit {passed}" if passed > limit else ""
    console.print(f"{passed} of {number} responses of this step pass the filter{more}")


def _title(row: Mapping[str, Any]) -> Text:
    return Text(f"problem {row['problem_id']}, response {row['response']}: {row['question']}  (answer {row['answer']})")


def _body(row: Mapping[str, Any], scale: float) -> Group:
    return Group(response_text(row, scale), Columns([Text(facts(row), style="dim")]))
