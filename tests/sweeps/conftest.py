"""Composing, for tests of what a sweep plans."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from grpo_lab.config.folders import conf_folder


@pytest.fixture(scope="module")
def compose() -> Callable:
    """Overrides to a composed run, as the sweeper plugin does it."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        sweep = hydra.compose_config("config", [], run_mode=RunMode.MULTIRUN, with_log_configuration=False)
        composed = cache(lambda words: hydra.config_loader.load_sweep_config(sweep, list(words)))
        return lambda words: composed(tuple(words)).copy()
