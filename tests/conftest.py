"""Fixtures every test may use: Hydra made ready once, one CPU thread, a bare machine, the tiny base model."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import bare_machine

bare_machine.enter()  # before anything looks at what this machine has

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_lab.config.hydra_setup import bootstrap, compose_config
from grpo_lab.config.run_config import RunConfig, to_run

pytest.register_assert_rewrite("sampler_contract", "short_runs")
bootstrap()
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    """The mark `needs` is read by the module that hides what is not declared."""
    config.pluginmanager.register(bare_machine)


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
