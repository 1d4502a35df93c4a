"""What this machine has for the proof, found without importing anything heavy."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib import metadata, util
from typing import Any

# Import name -> distribution and the oldest version that is known to work.
NEEDED = {
    "torch": ("torch", "2.11"),
    "transformers": ("transformers", "5.17"),
    "pandas": ("pandas", "2.0"),
    "pyarrow": ("pyarrow", "15.0"),
    "scipy": ("scipy", "1.13"),
    "hydra": ("hydra-core", "1.3"),
}
# What runs without: import name -> what is then left out.
OPTIONAL = {
    "vllm": "vLLM's generation (speed)",
    "trl": "TRL's GRPOTrainer on the same work (speed)",
    "mlflow": "nothing here: runs are not mirrored (tracking=none)",
    "datasets": "nothing here: only tables of a user's own need it",
}
_ASK = """
import json, torch
found = torch.cuda.is_available()
gpu = torch.cuda.get_device_properties(0) if found else None
print(json.dumps({
    "cuda": torch.version.cuda,
    "cards": torch.cuda.device_count() if found else 0,
    "name": gpu.name if found else None,
    "memory_bytes": gpu.total_memory if found else None,
    "multiprocessors": gpu.multi_processor_count if found else None,
}))
"""


def version_of(distribution: str) -> str | None:
    """The installed version, None where there is none."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def numbers(version: str) -> tuple[int, ...]:
    """`2.11.0+cu130` -> (2, 11, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def versions() -> dict[str, str | None]:
    """Python and every package that the proof needs or can use."""
    named = [distribution for distribution, _ in NEEDED.values()] + list(OPTIONAL)
    return {"python": platform.python_version()} | {name: version_of(name) for name in named}


def complaint() -> str | None:
    """One sentence that says what is missing or too old, with the remedy; None where nothing is."""
    if not (3, 11) <= sys.version_info < (3, 14):
        return f"Python 3.11, 3.12 or 3.13 is needed, this is {platform.python_version()}: make gpu PYTHON=python3.12"
    wanting = []
    for module, (distribution, oldest) in NEEDED.items():
        there = version_of(distribution)
        if util.find_spec(module) is None:
            wanting.append(f"{distribution}>={oldest} (missing)")
        elif there is not None and numbers(there) < numbers(oldest):
            wanting.append(f"{distribution}>={oldest} (this is {there})")
    if not wanting:
        return None
    words = " ".join(f"'{one.split(' ')[0]}'" for one in wanting)
    return f"{sys.executable} lacks {', '.join(wanting)}: {sys.executable} -m pip install {words}"


def absent() -> dict[str, str]:
    """Optional packages that are not installed, and what is left out for it."""
    return {name: lost for name, lost in OPTIONAL.items() if util.find_spec(name) is None}


def ask_torch() -> dict[str, Any]:
    """The first GPU as torch sees it; asked in a process of its own, so that none of its memory stays taken."""
    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=180)
    if done.returncode:
        raise RuntimeError(f"torch cannot be imported: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def processor() -> str:
    """The processor's name as Linux gives it."""
    try:
        with open("/proc/cpuinfo") as file:
            named = re.search(r"model name\s*:\s*(.+)", file.read())
    except OSError:
        named = None
    return named.group(1).strip() if named else platform.processor() or platform.machine()
