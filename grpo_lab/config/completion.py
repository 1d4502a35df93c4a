"""Shell completion of `grpo-lab`: argcomplete knows commands and flags; experiments and overrides come from file names.

Nothing is composed and no class is imported, so an answer takes a fraction of a second.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import argcomplete
import yaml
from argcomplete.io import warn
from argcomplete.shell_integration import shellcode

from grpo_lab.config.folders import conf_folder, declared, experiments_folder
from grpo_lab.config.user_files import LOADER, check_yaml, user_folders

_EXPERIMENTS = "experiments"  # the group of declared experiments, which are not in conf/
_NOT_TYPED = ("defaults", "hydra", "label", "design")  # keys of files that Hydra, a sweep or a declaration sets
_OF_SWEEPS = {
    "add=": "an ablation: a control, and an arm for each addition",
    "leave_one_out=": "an ablation: all additions, and an arm without each",
    "hydra.sweeper.dry_run=true": "list the runs and start none",
    "hydra.launcher.workers=": "runs at a time",
    "hydra/launcher=slurm": "one Slurm job per run",
    "hydra/launcher=ray": "one Ray task per run",
}

Texts = Mapping[str, str]  # what could be typed -> its description, which zsh and fish show


def script(shell: str) -> str:
    """The code that a shell evaluates to complete `grpo-lab`."""
    return shellcode(["grpo-lab"], shell=shell)


def complete(parser: argparse.ArgumentParser, commands: Mapping[str, argparse.ArgumentParser]) -> None:
    """Answer a shell that has set _ARGCOMPLETE, and exit; without it, do nothing."""
    for name, completer in _COMPLETERS.items():
        for action in commands[name]._actions:
            if action.dest in ("overrides", "name", "run_name") and not action.option_strings:
                action.completer = completer  # pyright: ignore[reportAttributeAccessIssue]
    argcomplete.autocomplete(parser, always_complete_options=False)


def overrides(prefix: str, **_: object) -> Texts:
    """The Hydra overrides that begin with `prefix`: `sur` -> `surrogate=`, `surrogate=pp` -> its options.

    Of a list of values, `recipe=plain,dr`, the last one is completed.
    """
    key, assigned, values = prefix.partition("=")
    if assigned:
        start = f"{key}={values[: values.rfind(',') + 1]}"
        return {start + option: text for option, text in _options(key.lstrip("+")).items()}
    if key.startswith("+"):
        return {f"+{_EXPERIMENTS}=": "a declared experiment"}
    return dict.fromkeys(_dotted(key.split(".")[0]) if "." in key else _keys(), "")


def _training(prefix: str, **_: object) -> Texts:
    return {**overrides(prefix), **_OF_SWEEPS}


def _sweep(prefix: str, parsed_args: argparse.Namespace, **_: object) -> Texts:
    """The overrides, or as the first word an experiment."""
    first = not getattr(parsed_args, "overrides", None)
    return {**(_options(_EXPERIMENTS) if first else {}), **_training(prefix)}


def _experiments(**_: object) -> Texts:
    return _options(_EXPERIMENTS)


def _sweeps(parsed_args: argparse.Namespace, **_: object) -> Texts:
    """Declared experiments, and the sweeps in the folder of runs."""
    ran = Path(getattr(parsed_args, "runs", "runs"), "sweeps").glob("*/")
    return {**_options(_EXPERIMENTS), **{path.name: "" for path in ran}}


def _of_tracker(**_: object) -> Texts:
    return {key: text for key, text in overrides("tracking.").items() if key.startswith("tracking.")}


_COMPLETERS: Mapping[str, Callable[..., Texts]] = {
    "train": _training,
    "sweep": _sweep,
    "sync": _of_tracker,
    "power": _experiments,
    **dict.fromkeys(("base", "explain", "graders", "pass-rates"), overrides),
    **dict.fromkeys(("figures", "report", "tuned", "data", "status", "rollouts"), _sweeps),
}


def _folders() -> list[Path]:
    """The folders that hold options; a missing folder of the user's is reported beside the command line."""
    try:
        return [conf_folder(), *user_folders()]
    except ValueError as error:
        warn(str(error))
        return [conf_folder()]


def _files(group: str) -> list[Path]:
    return sorted(path for folder in _folders() for path in (folder / group).glob("*.yaml"))


def _options(group: str) -> Texts:
    """The options of a group, with the comment that each file opens with."""
    found = dict.fromkeys(declared(experiments_folder()), "") if group == _EXPERIMENTS else {}
    return found | {path.stem: _comment(path) for path in _files(group)}


def _comment(path: Path) -> str:
    head = path.read_text(errors="replace").splitlines()[:2]  # the first may be `# @package _global_`
    return next((line[2:] for line in head if line.startswith("# ") and "@package" not in line), "")


def _keys() -> Iterator[str]:
    """Every group, and every number of config.yaml."""
    for folder in _folders():
        yield from (f"{path.parent.name}=" for path in folder.glob("*/*.yaml") if path.parent.name != _EXPERIMENTS)
    yield from _flat(_read(conf_folder() / "config.yaml"))


def _dotted(slot: str) -> Iterator[str]:
    """The keys of a slot's options, such as `surrogate.clip_low=`, and of config.yaml, such as `checkpoint.best=`."""
    for path in _files(slot):
        if "@package _global_" not in path.read_text(errors="replace"):  # else its keys are those of other slots
            yield from _flat(_read(path), f"{slot}.")
    yield from _flat(_read(conf_folder() / "config.yaml"))


def _read(path: Path) -> dict[str, Any]:
    """The keys of a file that a command line may set; none of a file that is no YAML, which a run reports."""
    try:
        check_yaml(path)  # aliases could expand to billions of entries
        read = yaml.load(path.read_bytes(), Loader=LOADER)
    except (yaml.YAMLError, OSError, ValueError):
        return {}
    return {key: value for key, value in read.items() if key not in _NOT_TYPED} if isinstance(read, dict) else {}


def _flat(written: Mapping[str, Any], start: str = "") -> Iterator[str]:
    for key, value in written.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{start}{key}.")
        else:
            yield f"{start}{key}="
