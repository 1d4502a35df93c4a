"""The foot of the report: every final value, every measure of divergence, and where all of it comes from."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import pandas as pd
from markupsafe import Markup

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.effects.table import columns
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import change_text, level_text, title
from grpo_lab.analysis.report.templates import HtmlTable, render
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import bounds, few
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.tracking import provenance

PACKAGES = ("grpo-lab", "numpy", "scipy", "pandas", "matplotlib", "seaborn")
MEASURES = ("table.csv", "tricks.csv", "divergence.csv", "verdict.txt")  # the same numbers as files


def tables_section(data: SweepData, finals: FinalValues, divergence: pd.DataFrame) -> Markup:
    """Final values, their differences to the control, and the whole divergence table."""
    named = [data.design.primary, *(one.metric for one in data.design.predictions)] if data.design else []
    shown = [metric for metric in dict.fromkeys([*named, *columns(data)]) if metric in finals.values]
    return render(
        "tables.html",
        rule=finals.rule,
        finals=_finals(data, finals, shown),
        differences=_differences(data, finals, shown),
        divergence=None if divergence.empty else _divergence(data, divergence, finals.brackets),
        name=shlex.quote(data.record.name),
        files=[f"{data.record.name}_{measure}" for measure in MEASURES],
    )


def _finals(data: SweepData, finals: FinalValues, shown: Sequence[str]) -> HtmlTable:
    rows = []
    for level, arm in data.run_arms:
        values = [level_text(finals.interval(level, arm, metric), metric) for metric in shown]
        rows.append([place(data, level, arm), _seeds(data, finals, level, arm), *values])
    head = ["arm", "n finished / planned", *map(title, shown)]
    return HtmlTable(f"Final values at {finals.at}; brackets: {finals.brackets}", head, rows)


def _seeds(data: SweepData, finals: FinalValues, level: str, arm: str) -> str:
    collapsed = finals.collapsed(level, arm)
    stopped = f", {collapsed} collapsed" if collapsed else ""
    return f"{data.seeds_finished(level, arm)} / {data.seeds_planned(level, arm)}{stopped}"


def _differences(data: SweepData, finals: FinalValues, shown: Sequence[str]) -> HtmlTable:
    rows = []
    for level, arm in data.run_arms:
        if arm != data.control:
            found = [finals.difference(level, arm, data.control, metric) for metric in shown]
            pairs = ", ".join(dict.fromkeys(str(one.n) for one in found))
            rows.append([place(data, level, arm), pairs, *map(change_text, found, shown)])
    caption = f"Differences to {data.control} at {finals.at}, paired by seed"
    return HtmlTable(caption, ["arm", "pairs", *map(title, shown)], rows)


def _divergence(data: SweepData, divergence: pd.DataFrame, brackets: str) -> HtmlTable:
    """Measures as rows, arms as columns; where there is no number, the reason."""
    found = {(row.level, row.arm, row.metric): _measure(row) for row in rows_of(divergence)}
    arms = list(dict.fromkeys((level, arm) for level, arm, _ in found))
    units = dict(zip(divergence["metric"], divergence["unit"]))
    rows = [
        [f"{measure.rpartition('/')[2].replace('_', ' ')}, {unit}", *(found.get((*arm, measure), "") for arm in arms)]
        for measure, unit in units.items()
    ]
    names = [place(data, level, arm) if arm else f"all arms{f' at {level}' if level else ''}" for level, arm in arms]
    caption = f"Divergence; brackets: {brackets}, n runs; braces: percentiles over runs and questions"
    return HtmlTable(caption, ["measure", *names], rows)


def _measure(row: Any) -> str:
    if math.isnan(row.value):
        return row.note or "-"
    decimals = 0 if abs(row.value) >= 1000 else 2
    ends = bounds(row.low, row.high, f",.{decimals}f")
    crossed = "" if math.isnan(row.crossed_low) else f" {{{row.crossed_low:.2f}, {row.crossed_high:.2f}}}"
    note = f" ({row.note})" if row.note else ""
    return f"{row.value:,.{decimals}f}{ends}{crossed}, {few(row.n) or f'n = {row.n}'}{note}"


# --- provenance ---------------------------------------------------------------------------------------------


def provenance_section(data: SweepData, command: Sequence[str]) -> Markup:
    """Declaration, code, data source, versions, the commands that make all of it again, and every run."""
    return render(
        "provenance.html",
        source=data.source,
        record=data.record,
        started_by=shlex.join(data.record.command),
        run_commits=sorted({str(commit) for commit in data.finished["commit"] if commit}),
        page_commit=provenance.commit(),
        python=platform.python_version(),
        versions=[(name, _version(name)) for name in PACKAGES],
        again=_again(data, command),
        runs=_runs(data),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def _again(data: SweepData, command: Sequence[str]) -> list[str]:
    """The commands that make the report again, from the runs on."""
    name = shlex.quote(data.record.name)
    declared = [f"make sweep EXP={name}", f"make data EXP={name}"]
    runs = [shlex.join(data.record.command)] if data.declaration is None else declared
    return [*runs, f"make figures EXP={name}", shlex.join(command)]


def _runs(data: SweepData) -> HtmlTable:
    """Every run: its status, its keys, and the code it ran."""
    rows = [
        [
            f"{place(data, row.level, row.arm)}, seed {row.seed}",
            f"{row.status}{f': {row.problem}' if row.problem else ''}",
            row.run_key or "-",
            row.mlflow_run_id or "-",
            (str(row.commit)[:10] if row.commit else "-") + (" (changed)" if row.dirty else ""),
            row.protocol or "-",
            row.folder,
        ]
        for row in rows_of(data.runs.astype(object).where(data.runs.notna(), None))
    ]
    head = ["run", "status", "run key", "MLflow run", "commit", "evaluation protocol", "folder"]
    return HtmlTable(f"Runs of {data.record.name}", head, rows)
