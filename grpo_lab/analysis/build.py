"""Figures, tables, verdict and report of one experiment, from its runs, from MLflow, or from its saved data."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.divergence.leading import leading_text
from grpo_lab.analysis.divergence.quantities import quantities_text
from grpo_lab.analysis.divergence.sharpening import sharpening_text
from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.effects.arms import arms_table
from grpo_lab.analysis.effects.contrasts import effects_markdown, effects_table
from grpo_lab.analysis.effects.speed import speeds_text
from grpo_lab.analysis.effects.spread import spread_text
from grpo_lab.analysis.effects.suites import suites_text
from grpo_lab.analysis.effects.table import effect_table, markdown
from grpo_lab.analysis.effects.verdict import judge, verdict_text
from grpo_lab.analysis.figures.external import draw_external
from grpo_lab.analysis.figures.registry import default_figures, draw_all
from grpo_lab.analysis.figures.style import save
from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.report.microscope_text import microscope_text
from grpo_lab.analysis.report.page import report_html
from grpo_lab.analysis.report.reader_page import collect_responses
from grpo_lab.analysis.scaling import fit_sweep, scaling_table
from grpo_lab.analysis.sources.read import RUNS, read_source
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.resampling import SEED
from grpo_lab.analysis.tables.headline import headline
from grpo_lab.config.folders import data_of, folder_of
from grpo_lab.tracking import provenance
from grpo_lab.tracking.files import atomic_write

REPORTS = Path("analysis/reports")


@dataclass(frozen=True)
class Built:
    """The result of `build`.

    `source` says where the data came from, and `notice`, where not empty, that other runs were asked for. `table` is
    that of the arms, `headline` the verdict in one line ("" where nothing was declared), `verdict` all of its file.
    `paths` are all files; `missing` says by name why this sweep cannot have a figure; `listing` is a file that lists
    both.
    """

    source: str
    notice: str
    table: str
    headline: str
    verdict: str
    paths: list[Path]
    missing: dict[str, str]
    listing: Path


def build(
    name: str,
    source: str,
    data_folder: Path | None,
    output: Path | None,
    command: Sequence[str],
    external: Sequence[str] = (),
    figures: Sequence[str] = (),
) -> Built:
    """Draw and write everything about the sweep `name` into `output`; `command` is the line that asked for it.

    `external` are sweeps of external runs from the same source, which one more figure draws beside it, and nothing
    else. `figures` names the figures to draw (default: `registry.default_figures`, with those of the experiment's
    page).

    `source` is a folder of runs or an MLflow URI. Without `output`, a declared experiment goes to `figures` in its
    folder below ./experiments and any other sweep to `figures` beside its runs. Raises ValueError where neither source
    nor data_folder has the sweep, or none of its runs is finished, or no figure has one of the names.
    """
    data = read_source(source, name, data_folder)
    home = folder_of(name) if data.declaration or "://" in source else Path(source)
    output = output or home / "figures"
    finals = final_values(data)
    sources = describe_sources(data, finals, command)
    page = home / "README.md"
    figures = figures or default_figures(data, page.read_text() if page.exists() else "")
    drawn, missing = draw_all(data, finals, figures)
    if external:
        drawn.append(draw_external(data, [read_source(source, other, None) for other in external]))
    paths = [path for figure in drawn for path in save(figure, output, sources)]
    divergence = divergence_table(data, finals, np.random.default_rng(SEED))
    verdict = "\n".join(filter(None, (verdict_text(data, finals), *_further(data, finals, divergence).values())))
    texts = {
        f"{name}_table.csv": effect_table(data, finals).to_csv(index=False),
        f"{name}_table.md": markdown(data, finals),
        f"{name}_tricks.csv": effects_table(data, finals).to_csv(index=False),
        f"{name}_tricks.md": effects_markdown(data, finals),
        f"{name}_divergence.csv": divergence.to_csv(index=False),
        f"{name}_scaling.csv": scaling_table(fit_sweep(data, finals)).to_csv(index=False),
        f"{name}_verdict.txt": verdict,
    }
    for file, text in texts.items():
        atomic_write(output / file, text)
        paths.append(output / file)
    listing = output / f"{name}_files.txt"
    reasons = [f"no {figure}: {reason}" for figure, reason in missing.items()]
    atomic_write(listing, "\n".join([*map(str, paths), *reasons]) + "\n")
    table = "\n".join(arms_table(data, finals))
    return Built(data.source, data.notice, table, headline(data, finals), verdict, paths, missing, listing)


def build_report(
    name: str, source: str, data_folder: Path | None, output: Path | None, command: Sequence[str]
) -> tuple[Path, str]:
    """Write `<output>/<name>.html`, the whole of a sweep on one page that needs nothing else.

    Returns its path, and a notice where other runs were asked for than it shows. Without `output` it goes to
    analysis/reports. Training responses are in it where `source` is a folder that has them.
    Raises ValueError as `build` does.
    """
    data = read_source(source, name, data_folder)
    finals = final_values(data)
    drawn, missing = draw_all(data, finals)
    divergence = divergence_table(data, finals, np.random.default_rng(SEED))
    runs_dir = None if "://" in source else Path(source)
    responses = collect_responses(data, runs_dir)
    sections = _further(data, finals, divergence) | {"Microscope": microscope_text(data, runs_dir)}
    further = {name: text for name, text in sections.items() if text}
    page = report_html(data, finals, drawn, missing, command, further, divergence, responses)
    path = (output or REPORTS) / f"{name}.html"
    atomic_write(path, page)
    return path, data.notice


def _further(data: SweepData, finals: FinalValues, divergence: pd.DataFrame) -> dict[str, str]:
    """Sections below the verdict, by heading; "" where the sweep has nothing to say there."""
    null = f"those of {data.control} without a loss"
    return {
        "Suites": suites_text(data, finals),
        "Predicted quantities": quantities_text(data, finals),
        "Speed": speeds_text(data, finals),
        "Spread": spread_text(data, finals),
        "Sharpening": sharpening_text(data, finals),
        "Warnings of a loss": leading_text(divergence, null),
    }


def _number(value: float) -> float | None:
    """A number as JSON has it."""
    return None if math.isnan(value) else value


def describe_sources(data: SweepData, finals: FinalValues, command: Sequence[str]) -> dict[str, Any]:
    """The sources of a figure as JSON values: runs, code, declaration, rules and judgements."""
    record = data.record
    runs = data.runs[["level", "arm", "seed", "run_key", "mlflow_run_id", "folder", "status", "commit", "dirty"]]
    return {
        "sweep": {
            "name": record.name,
            "key": record.key,
            "fingerprint": record.declared[-1]["fingerprint"],
            "declared": list(record.declared),
            "command": list(record.command),
            "commit": record.commit,
        },
        "source": data.source,
        "runs": runs.astype(object).where(runs.notna(), None).to_dict("records"),
        "run_commits": sorted({commit for commit in data.finished["commit"] if commit}),
        "drawn_by": {"commit": provenance.commit(), "command": list(command)},
        "final_values": {"rule": finals.rule, "axis": finals.axis, "X": finals.budget},
        "control": data.control,
        "judgements": [
            {
                **asdict(judgement.prediction),
                "direction": judgement.prediction.direction.value,
                "verdict": judgement.verdict,
                "n_pairs": judgement.difference.n,
                "p": _number(judgement.p),
                "p_holm": _number(judgement.holm),
                "family": judgement.family,
            }
            for judgement in judge(data, finals)
        ],
    }


def what_to_open(
    built: Built, name: str, runs: str, data: Path | None, to: Path | None = None, program: str = "grpo-lab"
) -> list[str]:
    """Five lines: the verdict (none where nothing was declared), what to open, and where the list of all files is.

    `runs` is what the figures were asked of, `data` where saved numbers were looked for (None: nowhere), `to` the
    folder that was asked for, `program` how this command is called here.
    """
    pictures = [path for path in built.paths if path.suffix == ".png"]
    figure = str(pictures[0]) if pictures else "none could be drawn"
    missing = f", {len(built.missing)} figure{'s' * (len(built.missing) > 1)} not drawn" if built.missing else ""
    return [
        *([f"verdict  {built.headline}"] if built.headline else []),
        f"figure   {figure}",
        f"report   {_report(name, runs, data, to, program)}",
        f"MLflow   {_mlflow(runs)}",
        f"files    {len(built.paths)}, with caveats and tables{missing}: {built.listing}",
    ]


def _report(name: str, runs: str, data: Path | None, to: Path | None, program: str) -> str:
    """The command that writes the report from the same numbers."""
    if data == data_of(name) and to is None:
        return " ".join(["make report", f"EXP={shlex.quote(name)}", *_chosen(runs)])
    words = [program, "report", name, "--runs", runs]
    words += ["--only-runs"] if data is None else ["--data", str(data)] if data != data_of(name) else []
    return shlex.join([*words, *(["--to", str(to)] if to else [])])


def _chosen(runs: str) -> list[str]:
    return [] if runs == RUNS else [f"RUNS={shlex.quote(runs)}"]


def _mlflow(runs: str) -> str:
    if runs.startswith("http"):
        return runs
    store = Path(runs.removeprefix("sqlite:///")) if "://" in runs else Path(runs) / "mlflow.db"
    if not store.exists():
        return f"nothing to open: there is no {store}"
    if store.name != "mlflow.db":
        return shlex.join(["mlflow", "ui", "--backend-store-uri", runs])
    return " ".join(["make ui", *_chosen(str(store.parent))])
