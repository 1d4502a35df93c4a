"""What a run is called, and whether a folder holds this run or another one."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo_lab.config import VOLATILE, flat

_LONGEST_NAME = 120


def run_name(recipe: str, overrides: Sequence[str]) -> str:
    """`dr_grpo,truncation=mask_after` from what the command line chose; the seed has its own folder level.

    The order of the overrides does not matter, and a name too long for a folder ends in a hash.
    """
    chosen = []
    for override in overrides:
        key, _, value = override.lstrip("+~").partition("=")
        if key.split(".")[0].split("@")[0] not in VOLATILE | {"seed", "recipe", "plugins", "hydra"}:
            chosen.append(f"{key}={value}".replace("/", "_").replace(" ", ""))
    name = ",".join([recipe, *sorted(chosen)])
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name


def run_identity(config: DictConfig, device: str) -> dict[str, Any]:
    """The resolved values that make a run what it is: all but the volatile ones, and the kind of device."""
    return {"device": device} | {
        key: value for key, value in flat(config).items() if key.split(".")[0] not in VOLATILE | {"hydra", "plugins"}
    }


def check_folder(folder: Path, identity: Mapping[str, Any]) -> str:
    """The key of the run in `folder`, a new one for a new run.

    Raises ValueError when the folder holds a run whose identity differs, naming what differs.
    """
    path = folder / "run.json"
    if not path.exists():
        return uuid.uuid4().hex
    before = json.loads(path.read_text())
    there, now = before["identity"], json.loads(json.dumps(identity))
    different = sorted(key for key in there.keys() | now.keys() if there.get(key) != now.get(key))
    if different:
        shown = ", ".join(f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in different[:4])
        raise ValueError(
            f"{folder} holds a run with another configuration ({shown}): "
            "move that folder away or choose another runs_dir"
        )
    return before["run_key"]


def describe_run(
    key: str,
    name: str,
    config: DictConfig,
    identity: Mapping[str, Any],
    tracking: Mapping[str, str] | None,
    choices: Mapping[str, str],
    warnings: Sequence[str],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of run.json: who this run is, for the mirror and for every reader of the folder."""
    git = environment["git"] or {}
    recipe, _, rest = name.partition(",")
    return {
        "name": f"{recipe} seed={config.seed} {rest}".strip(),  # lists cut names short: what differs goes first
        "run_key": key,
        "recipe": choices.get("recipe", "plain"),
        "seed": config.seed,
        "choices": dict(choices),
        "config": flat(config),
        "identity": dict(identity),
        "tracking": tracking,
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "parent_run_id": None,
        "warnings": list(warnings),
        "tags": {},
    }
