"""Fixtures every test may use: Hydra made ready once, one CPU thread, and the tiny base model."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_lab.bootstrap import bootstrap
from grpo_lab.cli import compose_config
from grpo_lab.config import RunConfig, to_run

pytest.register_assert_rewrite("sampler_contract")
bootstrap()
torch.set_num_threads(1)


# Files that take longest, the longest first, so that no core waits at the end for one that began last.
LONGEST = ("test_loop", "test_sweep_faults", "test_vllm_runs", "test_compat", "test_sweeps", "test_bad_input")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; `make test` hands files to cores in this order."""
    first = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: first.get(item.path.stem, len(first)))


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
