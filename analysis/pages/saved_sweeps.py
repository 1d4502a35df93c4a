"""The saved sweeps of a folder of declared experiments, each read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.saved_data import load_data, saved_names
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import Design, load_design


@dataclass(frozen=True, eq=False)
class SavedSweeps:
    """All `declared` experiments, and those of them that have saved data, `designs`."""

    folder: Path
    declared: Sequence[Design]
    designs: Sequence[Design]
    loaded: dict[str, tuple[SweepData, FinalValues]] = field(default_factory=dict)

    def load(self, design: Design) -> tuple[SweepData, FinalValues]:
        """Its data and final values. Raises ValueError where they are of another declaration."""
        if design.name not in self.loaded:
            data = load_data(self.folder, design.name)
            if data.design is None or data.design.fingerprint() != design.fingerprint():
                path = f"experiments/{design.name}.yaml"
                raise ValueError(f"{path} was changed after its runs: its saved data are of another declaration")
            self.loaded[design.name] = data, final_values(data)
        return self.loaded[design.name]

    def named(self, name: str) -> tuple[SweepData, FinalValues]:
        """Data and final values of one sweep. Raises KeyError where it has no saved data."""
        return self.load({design.name: design for design in self.designs}[name])


def saved_sweeps(experiments: Path, data_folder: Path) -> SavedSweeps:
    """The experiments of a folder of declarations, with data from another folder.

    The last result is kept, and returned again while no file of either folder changes.
    """
    experiments, data_folder = experiments.resolve(), data_folder.resolve()
    files = [*experiments.glob("*.yaml"), *(path for path in data_folder.glob("*") if path.is_file())]
    state = tuple((path, *_state(path)) for path in sorted(files))
    return _saved_sweeps(experiments, data_folder, state)


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=1)
def _saved_sweeps(experiments: Path, data_folder: Path, state: tuple[tuple[Path, int, int], ...]) -> SavedSweeps:
    declared = [load_design(path) for path in sorted(experiments.glob("*.yaml"))]
    names = saved_names(data_folder)
    return SavedSweeps(data_folder, declared, [design for design in declared if design.name in names])
