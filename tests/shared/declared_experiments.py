"""The experiments of this repository: their folders, declarations and saved numbers."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pandas as pd

from grpo_lab.analysis.sources.saved_data import load_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.folders import DATA, DESIGN, declared

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FOLDERS = declared(EXPERIMENTS)
DECLARATIONS = [folder / DESIGN for folder in FOLDERS.values()]
SAVED = [name for name, folder in FOLDERS.items() if (folder / DATA / f"{name}.parquet").exists()]


def declaration(name: str) -> Path:
    """The design.yaml of an experiment."""
    return FOLDERS[name] / DESIGN


def saved_data(name: str) -> SweepData:
    """A saved sweep."""
    return load_data(FOLDERS[name] / DATA, name)


def saved_points(name: str) -> pd.DataFrame:
    """The logged numbers of a saved sweep, read without the package."""
    return pd.read_parquet(FOLDERS[name] / DATA / f"{name}.parquet")


def saved_description(name: str) -> dict[str, Any]:
    """The record and runs of a saved sweep, read without the package."""
    return json.loads(lzma.decompress((FOLDERS[name] / DATA / f"{name}.json.xz").read_bytes()))
