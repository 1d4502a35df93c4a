"""Fixtures every test may use: Hydra made ready once, one CPU thread, a bare machine, the tiny base model."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bare_machine

bare_machine.enter()  # before anything looks at what this machine has

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import nullcontext
from pathlib import Path

import pytest
import quick_compose
import torch
from helpers import shapes_unchecked

from grpo_lab.config.hydra_setup import bootstrap, compose_config
from grpo_lab.config.run_config import RunConfig, to_run

pytest.register_assert_rewrite("sampler_contract", "short_runs")
bootstrap()
quick_compose.enter()
torch.set_num_threads(1)
CHECKED = 2  # cases of a test in which shapes are checked; further ones repeat their calls in half the time
_cases: Counter[str] = Counter()


def pytest_configure(config: pytest.Config) -> None:
    """The mark `needs` is read by the module that hides what is not declared."""
    config.pluginmanager.register(bare_machine)


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
    test = item.nodeid.partition("[")[0]
    _cases[test] += 1
    with shapes_unchecked() if _cases[test] > CHECKED else nullcontext():
        return (yield)


@pytest.fixture
def make_run() -> Callable[..., RunConfig]:
    """make_run("scale=none", ...) -> the RunConfig of these overrides, in the tiny world, without MLflow."""

    def make(*overrides: str) -> RunConfig:
        return to_run(compose_config(["world=tiny", "tracking=none", *overrides]))

    return make


@pytest.fixture(scope="session")
def tiny_base() -> Path:
    """The folder of the tiny world's base model; built once and cached."""
    return to_run(compose_config(["world=tiny", "tracking=none"])).model.resolve()
