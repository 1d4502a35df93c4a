"""One entry for every source of a sweep: a folder of runs, saved data, or the MLflow store it was exported to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_lab.analysis.sources.mlflow_runs import load_mlflow
from grpo_lab.analysis.sources.mlflow_stores import shown
from grpo_lab.analysis.sources.run_folders import load_sweep, recorded_names
from grpo_lab.analysis.sources.saved_data import load_data, saved_names
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import load_design
from grpo_lab.config.folders import DESIGN

RUNS = "runs"  # the folder of runs unless another is named


def read_source(source: str, name: str, data_folder: Path | None) -> SweepData:
    """The sweep `name` from `source`, or from saved data where those hold more finished runs.

    `source` is a folder of runs, or sqlite:////path/mlflow.db, or http://host:port. `data_folder` is where `save_data`
    wrote; None looks at no saved data. The one with more finished runs is read, and of equals the source, so that a
    demonstration of a few runs never replaces the figures of all. `SweepData.source` names both; `notice` says so
    where saved data stand in. Raises ValueError that lists the sweeps which are there.
    """
    saved = saved_names(data_folder) if data_folder else []
    if "://" in source:
        found = [load_mlflow(source, name)]
    else:
        recorded = recorded_names(Path(source))
        found = [load_sweep(Path(source), name)] if name in recorded else []
    if data_folder and name in saved:
        found.append(load_data(data_folder, name))
    if not found:
        raise ValueError(
            f"there is no sweep {name!r}: {source} has {', '.join(recorded) or 'none'}"
            + (f"; saved data in {data_folder} has {', '.join(saved) or 'none'}" if data_folder else "")
        )
    chosen = max(found, key=lambda data: len(data.finished))  # the first of equals
    others = [f"{data.source} have {len(data.finished)}" for data in found if data is not chosen]
    named = ", ".join([f"{chosen.source}, {len(chosen.finished)} finished runs", *others])
    notice = ""
    if data_folder and name in saved and chosen is found[-1]:
        here = [len(data.finished) for data in found[:-1]]
        notice = f"{_why_not(source, name, here)}: these are the {len(chosen.finished)} runs saved in {data_folder}."
    return replace(chosen, source=named, notice=notice, changed=_changed_since(chosen, data_folder))


def _changed_since(data: SweepData, data_folder: Path | None) -> dict[str, str]:
    """Arm -> what it computes otherwise since the runs were declared, as the experiment's own file says."""
    if data.design is None or data_folder is None:
        return {}
    path = Path(data_folder).resolve().parent / DESIGN
    made = data.record.declared[-1]["at"]
    changes = load_design(path).changes if path.exists() else ()
    return {arm: change.what for change in changes if made < change.since for arm in change.arms}


def _why_not(source: str, name: str, finished: Sequence[int]) -> str:
    """Why saved numbers stand in for a source, of which `finished` says how many runs it has, if it has the sweep."""
    location = shown(source) if "://" in source else source
    if finished:
        return f"{location} has {finished[0]} finished runs of {name}"
    if "://" not in source and not Path(source).is_dir():
        return f"There is no folder {source}"
    return f"{location} has no runs of {name}"
