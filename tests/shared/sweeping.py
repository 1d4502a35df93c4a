"""A sweep in this process, as `python -m grpo_lab.train` makes it below its argument parser."""

from __future__ import annotations

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from grpo_lab.config.run_config import conf_folder


def multirun(*words: str) -> None:
    """Run the sweep of these overrides; its cells have processes of their own."""
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        GlobalHydra.instance().hydra.multirun("config", None, list(words), with_log_configuration=False)
