"""A run's identity: its values, its run.json, and whether a folder holds this run or another one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from grpo_lab.config.evaluation import Evaluation
from grpo_lab.config.run_config import flat, is_volatile
from grpo_lab.tasks.base import Task
from grpo_lab.tasks.tables import fingerprint, overlaps
from grpo_lab.tracking.checksums import AFRESH, CHECKSUM, read_checksummed, read_json
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.passwords import masked
from grpo_lab.tracking.renames import ADDED_KEYS, with_config_keys

CLASS = "class"


def run_identity(config: DictConfig, device: str | None) -> dict[str, Any]:
    """The resolved values that identify a run: all except the volatile ones, plus the kind of device if it is known.

    `<slot>.class` tells options apart whose numbers are alike, such as two graders.
    """
    classes = {f"{place}.{CLASS}": name for place, name in _classes(config) if place}
    return ({} if device is None else {"device": device}) | {
        key: value
        for key, value in (flat(config) | classes).items()
        if not is_volatile(key) and key.split(".")[0] not in ("hydra", "plugins")
    }


def _classes(node: DictConfig, place: str = "") -> Iterator[tuple[str, str]]:
    """The place of every option within the configuration, and the name of its class."""
    kind = OmegaConf.get_type(node)
    if is_dataclass(kind):
        yield place, kind.__name__
    for name in node:
        if not OmegaConf.is_missing(node, name) and isinstance(child := node[name], DictConfig):
            yield from _classes(child, f"{place}.{name}" if place else str(name))


def recorded_identity(described: Mapping[str, Any]) -> dict[str, Any]:
    """The identity in a run.json under today's key names, without keys that are volatile by now."""
    there = with_config_keys(described["identity"])
    # The kind of device is part of it still.
    return {key: value for key, value in there.items() if key == "device" or not is_volatile(key)}


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
    if CHECKSUM in before or not (folder / "DONE").exists():  # earlier versions of grpo_lab wrote no digests
        before = read_checksummed(path, AFRESH)
    if not {"identity", "run_key"} <= before.keys():
        raise ValueError(f"{path} does not say which run this is: it was edited, or the disk fails; {AFRESH}")
    there, now = recorded_identity(before), json.loads(json.dumps(masked(dict(identity))))
    if not any(
        key.endswith(f".{CLASS}") for key in before["identity"]
    ):  # earlier versions of grpo_lab wrote no classes
        now = {key: value for key, value in now.items() if not key.endswith(f".{CLASS}")}
    there |= {key: value for key, value in ADDED_KEYS.items() if key in now and key not in there}
    if "device" not in now:  # the machine that goes on with the run will tell
        there.pop("device", None)
    different = sorted(key for key in there.keys() | now.keys() if there.get(key) != now.get(key))
    if different:
        shown = ", ".join(f"{key}: {there.get(key)!r} there, {now.get(key)!r} now" for key in different[:4])
        raise ValueError(
            f"{folder} holds a run with another configuration by its run.json ({shown}): "
            "move that folder away or choose another runs_dir"
        )
    return before


def check_models(folder: Path, weights: str, teacher: str | None) -> None:
    """Record the fingerprints of the weights that the run began with and of its teacher's, in base.json.

    Raises ValueError if a run in this folder began with others: its reference and its step 0 would be of another
    model, or its teacher would change in mid-run.
    """
    path, now = folder / "base.json", {"fingerprint": weights} | ({} if teacher is None else {"teacher": teacher})
    if not path.exists():
        write_json(path, now)
        return
    before = read_json(path, AFRESH)
    for name, of_what in (("fingerprint", "the model"), ("teacher", "its teacher")):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{folder} began with {of_what}'s weights {before.get(name)}, but now they are {now.get(name)}: "
                "restore the original weights, or move that folder away"
            )


def data_fingerprint(task: Task, evaluation: Evaluation) -> dict[str, str] | None:
    """A hash of each split's problems and of each table that evaluation asks; None where configuration decides them."""
    own = task.fingerprint() or {}
    return own | {name: fingerprint(problems) for name, problems in evaluation.table_problems.items()} or None


def notes_on_data(task: Task, evaluation: Evaluation) -> list[str]:
    """Notes on the data for readers of the results: from the task, the evaluation tables, and their overlap."""
    tables = evaluation.table_problems
    if not tables:
        return task.notes()
    evaluated = {name: [problem.question for problem in problems] for name, problems in tables.items()}
    trained = [problem.question for problem in task.problems("train")]
    return [*task.notes(), *evaluation.notes_on_tables(), *overlaps(trained, evaluated)]


def check_data(before: Mapping[str, Any], data: Mapping[str, str] | None) -> None:
    """Raise ValueError if a run whose run.json is `before` began with other questions than `data` is a hash of."""
    known = before.get("data")
    if before and known is not None and known != data:
        changed = [split for split, digest in known.items() if (data or {}).get(split) != digest]
        raise ValueError(
            f"the questions of {', '.join(changed)} have changed since this run began: restore the original file or "
            "revision, or choose another runs_dir"
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
    data: Mapping[str, str] | None,
    trained_on: Mapping[str, Any] | None,
    prompts: Mapping[str, Any],
    environment: Mapping[str, Any],
    sweep: str | None,
    segments: Sequence[Mapping[str, Any]],
    ranks: Sequence[Mapping[str, int]],
    unread: Sequence[str],
) -> dict[str, Any]:
    """The content of run.json: the run's identity and description, for the exporter and all readers of the folder.

    `data` is what `data_fingerprint` gives, `trained_on` what filters left of the training split, `prompts` what the
    model reads. `sweep` is the folder of this run's sweep, relative to the run's folder.
    `segments` record which code computed the run, one entry for each change of code. `ranks` record how many processes
    computed it, one entry for each change of their number. `unread` are the keys of `config` and `choices` that the run
    never reads.
    """
    git = environment["git"] or {}
    recipe, _, rest = name.partition(",")
    base = config.model.get("base")
    # User interfaces shorten long names, so the parts that differ go first.
    title = [recipe, f"seed={config.seed}", rest]
    if sweep is not None:
        title = [f"s{config.seed}", config.label.arm, config.label.level]
    return {
        "name": " ".join(filter(None, title)),
        "run_key": key,
        "recipe": choices.get("recipe", "plain"),
        "seed": config.seed,
        "choices": dict(choices),
        "config": {key: value for key, value in flat(config).items() if key.split(".")[0] != "design"},
        "unread": list(unread),
        "identity": dict(identity),
        "tracking": tracking,
        "commit": git.get("commit"),
        "dirty": git.get("dirty"),
        "stretches": list(segments),
        "ranks": list(ranks),
        "sweep_folder": sweep,
        "warnings": list(warnings),
        "data": data,
        "trained_on": trained_on,
        "prompts": prompts,
        "tags": {name: label for name, label in config.label.items() if label}
        | ({} if base is None else {"base": base}),
    }
