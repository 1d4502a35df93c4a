"""Where the configuration lies; figures and pages ask too, so this module loads nothing large."""

from __future__ import annotations

from pathlib import Path


def conf_folder() -> Path:
    """The configuration folder: the repository's, or the copy inside an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    beside = package.parent / "conf"
    return beside if (beside / "config.yaml").exists() else package / "conf"
