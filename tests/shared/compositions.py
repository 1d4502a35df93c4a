"""What the YAML files compose into: every option of every axis as a live object, each composed once in a process."""

from __future__ import annotations

from functools import cache
from typing import Any

from helpers import composed

from grpo_lab.config.run_config import AXES, RunConfig, conf_folder, to_run


def option_names(group: str) -> list[str]:
    """The options of a group of conf/, by name."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


RECIPES = option_names("recipe")
CHOICES = {axis: option_names(axis) for axis in AXES}


@cache
def run_of(*overrides: str) -> RunConfig:
    """The run of these overrides, made once; not to be changed."""
    return to_run(composed(*overrides)[0])


@cache
def samples() -> dict[str, dict[str, Any]]:
    """The live object of every option of every axis, composed as many at a time as there are axes."""
    found: dict[str, dict[str, Any]] = {axis: {} for axis in AXES}
    for number in range(max(map(len, CHOICES.values()))):
        row = {axis: names[number % len(names)] for axis, names in CHOICES.items()}
        run = run_of(*(f"{axis}={option}" for axis, option in row.items()))
        for axis, option in row.items():
            found[axis][option] = getattr(run, axis)
    return found
