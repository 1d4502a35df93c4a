"""The base models that come with grpo_lab: half-precision weights, found by the key of the recipe that made them.

Every machine starts from the same weights: fp16 numbers become fp32 without rounding. `rebuild.py` makes them again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "bases"
INDEX = FOLDER / "index.json"


@dataclass(frozen=True)
class Shipped:
    """One base model of the index: its file, the recipe that made it, and what its rounded weights answer."""

    key: str
    file: str
    recipe: dict[str, Any]
    report: dict[str, float]

    @property
    def weights(self) -> Path:
        return FOLDER / self.file


def shipped() -> list[Shipped]:
    """The index, in its order. Raises ValueError for weights that it names and that are gone."""
    if not INDEX.exists():
        return []
    found = [Shipped(**entry) for entry in json.loads(INDEX.read_text())]
    if gone := [base.file for base in found if not base.weights.exists()]:
        raise ValueError(f"{FOLDER} lacks {', '.join(gone)}: install grpo_lab again, or restore the files with git")
    return found


def find_shipped(key: str) -> Shipped | None:
    """The base model of a recipe's key, None if it does not come with grpo_lab."""
    return next((base for base in shipped() if base.key == key), None)


def write_index(bases: list[Shipped]) -> None:
    """Replace the index."""
    INDEX.write_text(json.dumps([asdict(base) for base in bases], indent=1) + "\n")
