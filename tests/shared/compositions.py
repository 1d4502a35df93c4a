"""The options that there are, as live objects with the numbers of their files, and what the tests ask of a new one.

A new option is asked for one test: a file of its own, `test_<option>.py` in some folder of the tests, where its class
is built and gives numbers worked out by hand. Lists of options leave such options out.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from helpers import composed

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import AXES, RunConfig, options, slot_types, to_run


def option_names(group: str) -> list[str]:
    """The options of a group of conf/, by name."""
    return sorted(path.stem for path in (conf_folder() / group).glob("*.yaml"))


TESTS = Path(__file__).parents[1]
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


@cache
def built_in(path: Path) -> set[type]:
    """The classes of tricks that a test file imports and builds; by object, as two classes are called GroupMean."""
    source, found = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("grpo_lab.tricks."):
            for name in node.names:
                kind = getattr(import_module(str(node.module)), name.name)
                if inspect.isclass(kind) and f"{name.asname or name.name}(" in source:
                    found.add(kind)
    return found


@cache
def options_of_the_package(axis: str) -> dict[str, type]:
    """Name -> class of every option of an axis; classes of tests, imported beside this file, are left out."""
    return {n: kind for n, kind in options(slot_types()[axis]).items() if kind.__module__.startswith("grpo_lab.")}


def class_of(axis: str, option: str) -> type:
    """The class that an option's file names."""
    text = (conf_folder() / axis / f"{option}.yaml").read_text()
    (schema,) = re.findall(rf"/schema/{axis}/(\w+)@_here_", text)
    return options_of_the_package(axis)[schema]


@cache
def with_own_test(axis: str) -> frozenset[type]:
    """The options of an axis that have a test file of their own, in which they are built."""
    files = {name: next(TESTS.rglob(f"test_{name}.py"), None) for name in options_of_the_package(axis)}
    return frozenset(
        kind for name, kind in options_of_the_package(axis).items() if files[name] and kind in built_in(files[name])
    )


def listed(axis: str) -> set[type]:
    """The options of an axis of which a list must hold every one: all but those with a test file of their own."""
    return set(options_of_the_package(axis).values()) - with_own_test(axis)
