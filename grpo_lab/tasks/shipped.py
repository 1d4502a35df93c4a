"""The base models that come with grpo_lab: half-precision weights, found by the key of the recipe that made them.

Every machine starts from the same weights: fp16 numbers become fp32 without rounding.
`analysis/base_models` makes them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.tracking.checksums import damage_of, read_checksummed

FOLDER = Path(__file__).parents[1] / "bases"
INDEX = FOLDER / "index.json"
_REMEDY = "install grpo_lab again, or restore the files with git"


@dataclass(frozen=True)
class Shipped:
    """One base model of the index: its file, the recipe that made it, and what its rounded weights answer."""

    key: str
    file: str
    sha256: str  # of the file
    recipe: dict[str, Any]
    report: dict[str, float]

    @property
    def weights(self) -> Path:
        """The file. Raises ValueError if it is not the one that came with grpo_lab."""
        if damage := damage_of(FOLDER / self.file, self.sha256):
            raise ValueError(f"{damage}; {_REMEDY}")
        return FOLDER / self.file


def shipped() -> list[Shipped]:
    """The index, in its order. Raises ValueError if it was changed, or if it or weights that it names are gone."""
    if not INDEX.is_file():
        raise ValueError(f"{INDEX} is missing; {_REMEDY}")
    found = [Shipped(**entry) for entry in read_checksummed(INDEX, _REMEDY)["bases"]]
    if gone := [base.file for base in found if not (FOLDER / base.file).exists()]:
        raise ValueError(f"{FOLDER} lacks {', '.join(gone)}: {_REMEDY}")
    return found


def find_shipped(key: str) -> Shipped | None:
    """The base model of a recipe's key, None if it does not come with grpo_lab."""
    return next((base for base in shipped() if base.key == key), None)
