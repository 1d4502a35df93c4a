"""The foot of the report: every final value, every measure of divergence, and where all of it comes from."""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import pandas as pd

from grpo_lab.analysis.caveats import place
from grpo_lab.analysis.effects.table import columns
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.metric_names import change_text, level_text, title
from grpo_lab.analysis.report.page_words import Html, escaped, folded, paragraph, table
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import bounds, few
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.tracking import provenance

PACKAGES = ("grpo-lab", "numpy", "scipy", "pandas", "matplotlib", "seaborn")


def tables_section(data: SweepData, finals: FinalValues, divergence: pd.DataFrame | None) -> Html:
    """Final values, their differences to the control, and the whole divergence table."""
    name = data.record.name
    parts = [paragraph(f"{finals.rule}."), _finals(data, finals), _differences(data, finals)]
    if divergence is not None and not divergence.empty:
        parts.append(folded("Every measure of divergence", _divergence(data, divergence, finals.brackets)))
    files = ", ".join(f"{name}_{what}" for what in ("table.csv", "tricks.csv", "divergence.csv", "verdict.txt"))
    parts.append(paragraph(f"The same as files, by make figures EXP={shlex.quote(name)}: {files}.", "small"))
    return Html("\n".join(parts))


def _shown(data: SweepData, finals: FinalValues) -> list[str]:
    named = [data.design.primary, *(one.metric for one in data.design.predictions)] if data.design else []
    return [metric for metric in dict.fromkeys([*named, *columns(data)]) if metric in finals.values]


def _counted(data: SweepData, finals: FinalValues, level: str, arm: str) -> str:
    collapsed = finals.collapsed(level, arm)
    fallen = f", {collapsed} collapsed" if collapsed else ""
    return f"{data.seeds_finished(level, arm)} / {data.seeds_planned(level, arm)}{fallen}"


def _finals(data: SweepData, finals: FinalValues) -> Html:
    shown = _shown(data, finals)
    lines = [
        [
            place(data, level, arm),
            _counted(data, finals, level, arm),
            *(level_text(finals.interval(level, arm, metric), metric) for metric in shown),
        ]
        for level, arm in data.run_arms
    ]
    head = ["arm", "n finished / planned", *map(title, shown)]
    return table(head, lines, f"Final values at {finals.at}; brackets: {finals.brackets}")


def _differences(data: SweepData, finals: FinalValues) -> Html:
    shown = _shown(data, finals)
    lines = []
    for level, arm in data.run_arms:
        if arm == data.control:
            continue
        found = [finals.difference(level, arm, data.control, metric) for metric in shown]
        pairs = ", ".join(dict.fromkeys(str(one.n) for one in found))
        lines.append([place(data, level, arm), pairs, *map(change_text, found, shown)])
    if not lines:
        return Html("")
    head = ["arm", "pairs", *map(title, shown)]
    return table(head, lines, f"Differences to {data.control} at {finals.at}, paired by seed")


def _divergence(data: SweepData, divergence: pd.DataFrame, brackets: str) -> Html:
    """Measures as rows, arms as columns; where there is no number, the reason."""
    arms = list(dict.fromkeys(divergence[["level", "arm"]].itertuples(index=False, name=None)))
    of = {(row.level, row.arm, row.metric): row for row in rows_of(divergence)}
    measures = dict(divergence[["metric", "unit"]].drop_duplicates("metric").itertuples(index=False, name=None))
    lines = [
        [
            f"{measure.rpartition('/')[2].replace('_', ' ')}, {unit}",
            *(_measure(of.get((*arm, measure))) for arm in arms),
        ]
        for measure, unit in measures.items()
    ]
    names = [place(data, level, arm) if arm else f"all arms{f' at {level}' if level else ''}" for level, arm in arms]
    caption = f"Divergence; brackets: {brackets}, n runs; braces: percentiles over runs and questions"
    return table(["measure", *names], lines, caption)


def _measure(row: Any) -> str:
    if row is None:
        return ""
    note = f" ({row.note})" if row.note else ""
    if math.isnan(row.value):
        return row.note or "-"
    decimals = 0 if abs(row.value) >= 1000 else 2
    both = bounds(row.low, row.high, f",.{decimals}f")
    crossed = "" if math.isnan(row.crossed_low) else f" {{{row.crossed_low:.2f}, {row.crossed_high:.2f}}}"
    return f"{row.value:,.{decimals}f}{both}{crossed}, {few(row.n) or f'n = {row.n}'}{note}"


# --- provenance ---------------------------------------------------------------------------------------------


def provenance_section(data: SweepData, command: Sequence[str]) -> Html:
    """Declaration, code, data source, versions, the commands that make all of it again, and every run."""
    record = data.record
    facts: Mapping[str, object] = {
        "numbers read from": data.source,
        "declarations": Html("<br>".join(escaped(_declared(one)) for one in record.declared)),
        "sweep": f"{record.name} (key {record.key})",
        "started by": Html(f"<code>{escaped(shlex.join(record.command))}</code>"),
        "code of the sweep": record.commit or "not known",
        "code of the finished runs": ", ".join(sorted({str(one) for one in data.finished["commit"] if one}))
        or "not known",
        "code of this page": provenance.commit() or "not known",
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions()]),
    }
    listed = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in facts.items())
    again = escaped("\n".join(_again(data, command)))
    return Html(
        f"<dl>{listed}</dl>\n<h3>Make it again</h3>\n<pre><code>{again}</code></pre>\n"
        f"{folded(f'All {len(data.runs)} runs', _runs(data))}"
    )


def _declared(one: Mapping[str, object]) -> str:
    started = one["cells_started_before"]
    when = "before the first run" if started == 0 else f"after {started} cells had been started"
    return f"fingerprint {one['fingerprint'] or 'none'}, {one['at']}, {when}"


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            found.append(f"{name} (not installed as a package)")
    return found


def _again(data: SweepData, command: Sequence[str]) -> list[str]:
    name = shlex.quote(data.record.name)
    if data.declaration is None:
        return [shlex.join(data.record.command), f"make figures EXP={name}", shlex.join(command)]
    return [f"make sweep EXP={name}", f"make data EXP={name}", f"make figures EXP={name}", shlex.join(command)]


def _runs(data: SweepData) -> Html:
    """Every cell: where it stands, its keys, and the code it ran."""
    lines = [
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
    return table(head, lines, f"Runs of {data.record.name}")
