"""The saved results of every option."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Option -> version and commit of the code, and its runs; {} before the first."""
    return json.loads(path.read_text()) if path.exists() else {}
