"""The scripts of analysis/ as modules: they belong to pages of this repository and not to the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "analysis"


def loaded(name: str) -> ModuleType:
    """`analysis/<name>.py` as a module."""
    spec = importlib.util.spec_from_file_location(f"analysis_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module
