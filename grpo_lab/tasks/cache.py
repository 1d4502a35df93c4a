"""The cache folder: models and data that are built or downloaded once and shared by runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """GRPO_LAB_CACHE, else XDG_CACHE_HOME/grpo_lab, else ~/.cache/grpo_lab; made where it is missing.

    Raises ValueError if this user cannot write there.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    root = Path(os.environ.get("GRPO_LAB_CACHE") or home / "grpo_lab")
    try:
        root.mkdir(parents=True, exist_ok=True)
        writable = os.access(root, os.W_OK)
    except OSError:
        writable = False
    if not writable:
        raise ValueError(f"{root} cannot be written: set GRPO_LAB_CACHE to a folder that this user can write")
    return root
