"""Results of `grpo-lab microscope` in the folders of a sweep's runs, as a section of the report."""

from __future__ import annotations

from pathlib import Path

from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.table_rows import rows_of
from grpo_lab.tracking.checksums import read_json

_AGAIN = "delete it, and run grpo-lab microscope again"


def microscope_text(data: SweepData, runs_dir: Path | None) -> str:
    """The tables of every step that was looked at, by run; "" without any, or without run folders."""
    if runs_dir is None:
        return ""
    parts = []
    for row in rows_of(data.finished):
        for path in sorted((runs_dir / row.folder / "microscope").glob("step=*.json")):
            lines = read_json(path, _AGAIN)["lines"]
            parts.append("\n".join([f"{row.arm}{f' at {row.level}' if row.level else ''}, seed {row.seed}", *lines]))
    return "\n\n".join(parts)
