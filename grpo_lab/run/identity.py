"""A run's identity: its values, its run.json, and whether a folder holds this run or another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from grpo_lab.config.run_config import VOLATILE, flat
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.renames import with_config_keys
from grpo_lab.tracking.whole import AFRESH, SEAL, read_json, read_sealed


def run_identity(config: DictConfig, device: str) -> dict[str, Any]:
    """The resolved values that identify a run: all except the volatile ones, plus the kind of device."""
    return {"device": device} | {
        key: value for key, value in flat(config).items() if key.split(".")[0] not in VOLATILE | {"hydra", "plugins"}
    }


def check_folder(folder: Path, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The content of run.json in `folder`; {} for a new run.

    Raises ValueError if the file is damaged, if it is missing while other files of a run exist, or if its run has
    another identity; the message names what differs.
    """
    path = folder / "run.json"
    if not path.exists():
        if left := _left_behind(folder):
            raise ValueError(f"{path} is missing beside {left}: nothing says which run they are of; {AFRESH}")
        return {}
    before = read_json(path, AFRESH)
    if SEAL in before or not (folder / "DONE").exists():  # earlier versions of grpo_lab wrote no digests
        before = read_sealed(path, AFRESH)
    if not {"identity", "run_key"} <= before.keys():
        raise ValueError(f"{path} does not say which run this is: it was edited, or the disk fails; {AFRESH}")
    there, now = with_config_keys(before["identity"]), json.loads(json.dumps(identity))
    different = sorted(key for key in there.keys() | now.keys() if there.get(key) != now.get(key))
    if different:
        shown = ", ".join(f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in different[:4])
        raise ValueError(
            f"{folder} holds a run with another configuration by its run.json ({shown}): "
            "move that folder away or choose another runs_dir"
        )
    return before


def check_base(folder: Path, weights: str) -> None:
    """Record the fingerprint of the weights that the run began with, in base.json.

    Raises ValueError if a run in this folder began with others: its reference and its step 0 would be of another model.
    """
    path = folder / "base.json"
    if not path.exists():
        write_json(path, {"fingerprint": weights})
    elif (before := read_json(path, AFRESH)["fingerprint"]) != weights:
        raise ValueError(
            f"{folder} began with the weights {before}, and the model has {weights} now: give back the model it had, "
            "or move that folder away"
        )


def _left_behind(folder: Path) -> str | None:
    """The first file found that a run writes only after run.json; None if there is none."""
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size > 0:
        return metrics.name
    patterns = ("DONE", "checkpoints/step=*", "eval/step=*.parquet")
    found = (path for pattern in patterns for path in sorted(folder.glob(pattern)))
    return next((str(path.relative_to(folder)) for path in found), None)


def describe_run(
    key: str,
    name: str,
    config: DictConfig,
    identity: Mapping[str, Any],
    tracking: Mapping[str, str] | None,
    choices: Mapping[str, str],
    warnings: Sequence[str],
    environment: Mapping[str, Any],
    sweep: str | None,
    stretches: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of run.json: the run's identity and description, for the mirror and all readers of the folder.

    `sweep` is the folder of this run's sweep, relative to the run's folder. `stretches` record which code computed
    the run, one entry for each change of code.
    """
    git = environment["git"] or {}
    recipe, _, rest = name.partition(",")
    base = config.model.get("base")
    # User interfaces shorten long names, so the parts that differ go first.
    title = [recipe, f"seed={config.seed}", rest]
    if sweep is not None:
        title = [f"s{config.seed}", config.cell.arm, config.cell.level]
    return {
        "name": " ".join(filter(None, title)),
        "run_key": key,
        "recipe": choices.get("recipe", "plain"),
        "seed": config.seed,
        "choices": dict(choices),
        "config": {key: value for key, value in flat(config).items() if key.split(".")[0] != "design"},
        "identity": dict(identity),
        "tracking": tracking,
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "stretches": list(stretches),
        "sweep_folder": sweep,
        "warnings": list(warnings),
        "tags": {name: label for name, label in config.cell.items() if label}
        | ({} if base is None else {"base": base}),
    }
