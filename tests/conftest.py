"""Fixtures every test may use: Hydra made ready once, one CPU thread, a bare machine, the tiny base model."""

from __future__ import annotations

import ast
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bare_machine

bare_machine.enter()  # before anything looks at what this machine has

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from jaxtyping._import_hook import JaxtypingTransformer

if TYPE_CHECKING:
    from grpo_lab.config.run_config import RunConfig

pytest.register_assert_rewrite("sampler_contract", "short_runs")
CHECKED = 2  # cases of a test in which shapes are checked; further ones repeat their calls in half the time
_cases: Counter[str] = Counter()
_checked = JaxtypingTransformer.visit_FunctionDef


def _checked_unless_inner(hook: JaxtypingTransformer, node: ast.FunctionDef) -> ast.FunctionDef:
    """Leave functions within functions unchecked: their checks are compiled anew at every call of the outer one."""
    return node if any(isinstance(one, ast.FunctionDef) for one in hook._parents) else _checked(hook, node)


JaxtypingTransformer.visit_FunctionDef = _checked_unless_inner


def pytest_configure(config: pytest.Config) -> None:
    """The mark `needs` is read by the module that hides what is not declared."""
    config.pluginmanager.register(bare_machine)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Load what tests use, but in the process that only hands them out to others."""
    if hasattr(session.config, "workerinput") or not session.config.getoption("numprocesses", None):
        import quick_compose
        import torch

        from grpo_lab.config.hydra_setup import bootstrap

        bootstrap()
        quick_compose.enter()
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave `few(n)` cases of a test, evenly spaced, to every change; the others are extended."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("extended"):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for family in families.values():
        (number,) = family[0].get_closest_marker("few").args
        kept = {index * len(family) // number for index in range(number)}
        for index, item in enumerate(family):
            if index not in kept:
                item.add_marker("extended")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Shapes are checked in the first cases of each test."""
    from helpers import shapes_unchecked

    test = item.nodeid.partition("[")[0]
    _cases[test] += 1
    with shapes_unchecked() if _cases[test] > CHECKED else nullcontext():
        return (yield)


@pytest.fixture
def make_run() -> Callable[..., RunConfig]:
    """make_run("scale=none", ...) -> the RunConfig of these overrides, in the tiny world, without MLflow."""
    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.config.run_config import to_run

    def make(*overrides: str) -> RunConfig:
        return to_run(compose_config(["world=tiny", "tracking=none", *overrides]))

    return make


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """The folder of the tiny world's base model; built once and cached."""
    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.config.run_config import to_run

    return to_run(compose_config(["world=tiny", "tracking=none"])).model.resolve()
