"""Configs composed without running anything."""

from __future__ import annotations

from collections.abc import Sequence

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from grpo_lab.bootstrap import bootstrap


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """The composed config of these overrides, as `python -m grpo_lab.train` would see it."""
    return compose_with_choices(overrides)[0]


def compose_with_choices(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """The composed config, and which option stands in each slot."""
    bootstrap(overrides)
    from grpo_lab.config import conf_folder
    from grpo_lab.identity import chosen_options
    from grpo_lab.overrides import misnamed

    if wrong := misnamed(overrides):
        raise ValueError(wrong)
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", list(overrides), return_hydra_config=True)
    choices = chosen_options(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices
