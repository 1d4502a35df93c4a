"""The saved sweeps of a folder of declared experiments, each read once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from grpo_lab.analysis.final_values import FinalValues, final_values
from grpo_lab.analysis.sources.saved_data import load_data, saved_names
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import Design, load_design
from grpo_lab.config.folders import DATA, DESIGN, declared


@dataclass(frozen=True, eq=False)
class SavedSweeps:
    """All `declared` experiments, those of them that have saved data, `designs`, and the folder of each by name."""

    folders: Mapping[str, Path]
    declared: Sequence[Design]
    designs: Sequence[Design]
    loaded: dict[str, tuple[SweepData, FinalValues]] = field(default_factory=dict)

    def load(self, design: Design) -> tuple[SweepData, FinalValues]:
        """Its data and final values. Raises ValueError where they are of another declaration."""
        if design.name not in self.loaded:
            data = load_data(self.folders[design.name] / DATA, design.name)
            if data.design is None or data.design.fingerprint() != design.fingerprint():
                path = self.folders[design.name] / DESIGN
                raise ValueError(f"{path} was changed after its runs: its saved data are of another declaration")
            self.loaded[design.name] = data, final_values(data)
        return self.loaded[design.name]

    def underway(self, design: Design) -> bool:
        """True for a sweep with saved data some of whose declared runs have not begun or have not ended.

        Its runs so far are no answer: effects on a few base models change while the rest runs.
        """
        if design not in self.designs:
            return False
        runs = self.load(design)[0].runs
        return bool(runs["status"].isin(["new", "partial"]).any()) or not set(design.seeds) <= set(runs["seed"])

    def named(self, name: str) -> tuple[SweepData, FinalValues]:
        """Data and final values of one sweep. Raises KeyError where it has no saved data."""
        return self.load({design.name: design for design in self.designs}[name])


def saved_sweeps(experiments: Path) -> SavedSweeps:
    """The experiments that a folder declares, with the data beside each declaration.

    The last result is kept, and returned again while none of their files changes.
    """
    folders = declared(experiments.resolve())
    files = [path for folder in folders.values() for path in (folder / DESIGN, *folder.glob(f"{DATA}/*"))]
    return _saved_sweeps(tuple(folders.items()), tuple((path, *_state(path)) for path in sorted(files)))


def _state(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=1)
def _saved_sweeps(folders: tuple[tuple[str, Path], ...], state: tuple[tuple[Path, int, int], ...]) -> SavedSweeps:
    designs = [load_design(folder / DESIGN) for _, folder in folders]
    saved = [name for name, folder in folders if name in saved_names(folder / DATA)]
    return SavedSweeps(dict(folders), designs, [design for design in designs if design.name in saved])
