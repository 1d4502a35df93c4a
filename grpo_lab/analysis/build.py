"""Figures, tables and verdict of one experiment, from its run folders or, without them, from its saved data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from grpo_lab.analysis.curves import draw_curves
from grpo_lab.analysis.effects import draw_effects
from grpo_lab.analysis.load import SweepData, load_data, load_sweep, recorded_names, saved_names
from grpo_lab.analysis.outcome import Outcome, final_values
from grpo_lab.analysis.style import save
from grpo_lab.analysis.table import effect_table, markdown
from grpo_lab.analysis.verdict import judge, verdict_text
from grpo_lab.tracking import provenance
from grpo_lab.tracking.files import atomic_write

FIGURES = Path("analysis/figures")


@dataclass(frozen=True)
class Built:
    """What `build` made: where the data came from, the verdict in words, and every file."""

    source: str
    verdict: str
    paths: list[Path]


def build(name: str, runs_dir: Path, data_folder: Path | None, output: Path | None, command: Sequence[str]) -> Built:
    """Draw and write everything about the sweep `name` into `output`; `command` is the line that asked for it.

    Without `output`, a declared experiment goes to analysis/figures and any other sweep to `figures` beside its
    runs. Raises ValueError where neither folder has the sweep or none of its cells is finished.
    """
    data = read_anywhere(name, runs_dir, data_folder)
    output = output or (FIGURES if data.design else Path(runs_dir) / "figures")
    outcome = final_values(data)
    sources = describe_sources(data, outcome, command)
    paths = []
    for drawn in (draw_curves(data, outcome), draw_effects(data, outcome)):
        if drawn is not None:
            paths += save(drawn, output, sources)
    verdict = verdict_text(data, outcome)
    texts = {
        f"{name}_table.csv": effect_table(data, outcome).to_csv(index=False),
        f"{name}_table.md": markdown(data, outcome),
        f"{name}_verdict.txt": verdict,
    }
    for file, text in texts.items():
        atomic_write(output / file, text)
        paths.append(output / file)
    return Built(data.source, verdict, paths)


def read_anywhere(name: str, runs_dir: Path, data_folder: Path | None) -> SweepData:
    """The sweep from its run folders, or from its saved data (None: never) where those hold more finished cells.

    A demonstration of a part must not replace the figures of the whole. Raises ValueError that lists what both have.
    """
    recorded, saved = recorded_names(runs_dir), saved_names(data_folder) if data_folder else []
    found = [load_sweep(runs_dir, name)] if name in recorded else []
    found += [load_data(data_folder, name)] if name in saved else []
    if found:
        chosen = max(found, key=lambda data: len(data.finished))  # the first of equals
        others = [f"{data.source} have {len(data.finished)}" for data in found if data is not chosen]
        source = f"{chosen.source}, {len(chosen.finished)} finished cells"
        return replace(chosen, source=", ".join([source, *others]))
    raise ValueError(
        f"there is no sweep {name!r}: {runs_dir} has {', '.join(recorded) or 'none'}; "
        f"saved data in {data_folder} has {', '.join(saved) or 'none'}"
    )


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
            }
            for judgement in judge(data, outcome)
        ],
    }
