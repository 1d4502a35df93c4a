"""Figures, tables, verdict and report of one experiment, from its runs, from MLflow, or from its saved data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from grpo_lab.analysis.caveats import notes
from grpo_lab.analysis.contrasts import effects_markdown, effects_table
from grpo_lab.analysis.divergence_table import divergence_table
from grpo_lab.analysis.figures import (
    budgets,
    ceiling,
    coverage,
    curves,
    doses,
    effects,
    forest,
    frontier,
    phase,
    ranks,
    signs,
    waterfall,
    wishes,
)
from grpo_lab.analysis.figures.style import Drawn, save, with_notes
from grpo_lab.analysis.load import SweepData
from grpo_lab.analysis.outcome import Outcome, final_values
from grpo_lab.analysis.report.page import report_html
from grpo_lab.analysis.report.reader_page import rollouts_section
from grpo_lab.analysis.scaling import fit_sweep, scaling_table
from grpo_lab.analysis.sources import read_source
from grpo_lab.analysis.table import effect_table, markdown
from grpo_lab.analysis.verdict import judge, verdict_text
from grpo_lab.tracking import provenance
from grpo_lab.tracking.files import atomic_write

FIGURES = Path("analysis/figures")
REPORTS = Path("analysis/reports")
SEED = 0  # of every resampling, so that the same data give the same bytes


def _seeded(draw: Callable[..., Drawn | None]) -> Callable[[SweepData, Outcome], Drawn | None]:
    return lambda data, outcome: draw(data, outcome, np.random.default_rng(SEED))


# What follows the sweep's name in a figure's -> how it is drawn, and why it could not be; in the order of reading.
_ALL = {
    "": (curves.draw_curves, curves.missing),
    "signs": (signs.draw_step_metrics, signs.missing),
    "phase": (phase.draw_phase, phase.missing),
    "forest": (forest.draw_forest, forest.missing),
    "effects": (effects.draw_effects, effects.missing),
    "doses": (doses.draw_doses, doses.missing),
    "ranks": (_seeded(ranks.draw_ranks), ranks.missing),
    "waterfall": (waterfall.draw_waterfall, waterfall.missing),
    "frontier": (frontier.draw_frontier, frontier.missing),
    "ceiling": (ceiling.draw_ceiling, ceiling.missing),
    "budgets": (budgets.draw_budgets, budgets.missing),
    "wishes": (wishes.draw_wishes, wishes.missing),
    "coverage": (_seeded(coverage.draw_coverage), coverage.missing),
}


@dataclass(frozen=True)
class Built:
    """What `build` made: where the data came from, the verdict in words, every file, and the figures that this sweep
    cannot have with the reason. `listing` is a file that lists both; `notice` says that other runs were asked for."""

    source: str
    notice: str
    verdict: str
    paths: list[Path]
    missing: dict[str, str]
    listing: Path


def draw_all(data: SweepData, outcome: Outcome) -> tuple[list[Drawn], dict[str, str]]:
    """Every figure of a sweep, with what must be known of all of them; and by name, why it cannot have the others."""
    drawn, missing = [], {}
    said = notes(data, outcome)
    for name, (draw, why_not) in _ALL.items():
        figure = draw(data, outcome)
        if figure is None:
            missing["_".join(filter(None, (data.record.name, name)))] = why_not(data, outcome)
        else:
            drawn.append(with_notes(figure, said))
    return drawn, missing


def build(name: str, source: str, data_folder: Path | None, output: Path | None, command: Sequence[str]) -> Built:
    """Draw and write everything about the sweep `name` into `output`; `command` is the line that asked for it.

    `source` is a folder of runs or an MLflow URI. Without `output`, a declared experiment goes to analysis/figures and
    any other sweep to `figures` beside its runs. Raises ValueError where neither source nor data_folder has the
    sweep, or none of its cells is finished.
    """
    data = read_source(source, name, data_folder)
    output = output or (FIGURES if data.design or "://" in source else Path(source) / "figures")
    outcome = final_values(data)
    sources = describe_sources(data, outcome, command)
    drawn, missing = draw_all(data, outcome)
    paths = [path for figure in drawn for path in save(figure, output, sources)]
    verdict = verdict_text(data, outcome)
    divergence = divergence_table(data, outcome, np.random.default_rng(SEED))
    texts = {
        f"{name}_table.csv": effect_table(data, outcome).to_csv(index=False),
        f"{name}_table.md": markdown(data, outcome),
        f"{name}_tricks.csv": effects_table(data, outcome).to_csv(index=False),
        f"{name}_tricks.md": effects_markdown(data, outcome),
        f"{name}_divergence.csv": divergence.to_csv(index=False),
        f"{name}_scaling.csv": scaling_table(fit_sweep(data, outcome)).to_csv(index=False),
        f"{name}_verdict.txt": verdict,
    }
    for file, text in texts.items():
        atomic_write(output / file, text)
        paths.append(output / file)
    listing = output / f"{name}_files.txt"
    reasons = [f"no {figure}: {reason}" for figure, reason in missing.items()]
    atomic_write(listing, "\n".join([*map(str, paths), *reasons]) + "\n")
    return Built(data.source, data.notice, verdict, paths, missing, listing)


def build_report(
    name: str, source: str, data_folder: Path | None, output: Path | None, command: Sequence[str]
) -> tuple[Path, str]:
    """Write `<output>/<name>.html`, the whole of a sweep on one page that needs nothing else.

    Returns its path, and a notice where other runs were asked for than it shows. Without `output` it goes to
    analysis/reports. Training responses are in it where `source` is a folder that has them.
    Raises ValueError as `build` does.
    """
    data = read_source(source, name, data_folder)
    outcome = final_values(data)
    drawn, missing = draw_all(data, outcome)
    divergence = divergence_table(data, outcome, np.random.default_rng(SEED))
    responses = rollouts_section(data, None if "://" in source else Path(source))
    page = report_html(data, outcome, drawn, missing, command, {"Training responses": responses}, divergence)
    path = (output or REPORTS) / f"{name}.html"
    atomic_write(path, page)
    return path, data.notice


def _number(value: float) -> float | None:
    """A number as JSON has it."""
    return None if math.isnan(value) else value


def describe_sources(data: SweepData, outcome: Outcome, command: Sequence[str]) -> dict[str, Any]:
    """What a figure was made from, as JSON values: runs, code, declaration, rules and judgements."""
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
        "final_values": {"rule": outcome.rule, "axis": outcome.axis, "X": outcome.budget},
        "control": data.control,
        "judgements": [
            {
                **asdict(judgement.prediction),
                "direction": judgement.prediction.direction.value,
                "word": judgement.word,
                "n_pairs": judgement.difference.n,
                "p": _number(judgement.p),
                "p_holm": _number(judgement.holm),
                "family": judgement.family,
            }
            for judgement in judge(data, outcome)
        ],
    }
