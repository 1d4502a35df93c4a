"""Registers schemas, user plugins and search paths with Hydra; called before hydra.main and compose().

Hydra reads its plugin namespace and its ConfigStore when it starts, so all of this has to happen first.
User modules come from `plugins=[module,...]` on the command line or from GRPO_LAB_PLUGINS (separated by
commas). Folders with their YAML come from GRPO_LAB_CONFIG_PATH. Child processes inherit both variables.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from grpo_lab.config.folders import conf_folder, experiments_folder
from grpo_lab.config.user_files import check_user_files, import_plugin

# What composing raises where words or files cannot be composed.
REFUSALS = (HydraException, OmegaConfBaseException, YAMLError, RecursionError)


def plugin_modules(arguments: Sequence[str]) -> list[str]:
    """Module names from `plugins=a,b`, `plugins=[a,b]` or `+plugins=...`, and from the environment."""
    names = os.environ.get("GRPO_LAB_PLUGINS", "").split(",")
    for argument in arguments:
        if match := re.fullmatch(r"\+{0,2}plugins=\[?(.*?)\]?", argument):
            names += match.group(1).split(",")
    return list(dict.fromkeys(name.strip().strip("'\"") for name in names if name.strip()))


def _of_adapter(adapter: float, whole: float, *, _root_: DictConfig) -> float:
    """The first number if the run trains an adapter, the second if it trains all weights."""
    return adapter if OmegaConf.select(_root_, "model.lora.rank", default=0) else whole


# What YAML may compute: an absolute path, the cap of CISPO that makes a weight the largest under either form, and a
# number that an adapter needs otherwise.
_RESOLVERS: dict[str, Callable[..., Any]] = {
    "absolute": lambda path: str(Path(path).expanduser().absolute()),
    "cap": lambda largest, form: round(largest - 1, 9) if "one_plus" in str(form) else largest,
    "of_adapter": _of_adapter,
}


def bootstrap(arguments: Sequence[str] = ()) -> None:
    """Prepare this process for Hydra; a second call adds only new modules.

    Raises ValueError for a user's module or file that Hydra could not read.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # Progress bars for one small file would hide the run's own progress.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products on CUDA
    # Hydra accepts plugins only from a namespace package named hydra_plugins, found on sys.path.
    plugins_home = str(Path(__file__).resolve().parent.parent / "_hydra")
    if plugins_home not in sys.path:
        sys.path.append(plugins_home)
    for name, resolver in _RESOLVERS.items():
        OmegaConf.register_new_resolver(name, resolver, replace=True)
    modules = plugin_modules(arguments)
    os.environ["GRPO_LAB_PLUGINS"] = ",".join(modules)
    for name in modules:
        import_plugin(name)
    # Options are found as subclasses, so the modules that define them must be imported.
    for name in ("engines.native", "engines.vllm", "engines.vllm_process", "tracking.trackers"):
        importlib.import_module(f"grpo_lab.{name}")
    for module in iter_modules([str(Path(__file__).resolve().parent.parent / "tasks")]):
        if not module.name.endswith("_worker"):  # these are started as programs of their own
            importlib.import_module(f"grpo_lab.tasks.{module.name}")
    importlib.import_module("grpo_lab.config.run_config").register()
    check_user_files(arguments, experiments_folder())


def compose_config(overrides: Sequence[str] = ()) -> DictConfig:
    """The composed config of these overrides, as `python -m grpo_lab.train` would see it."""
    return compose_with_choices(overrides)[0]


def compose_with_choices(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """The composed config, and slot -> option. Raises ValueError in one line for what cannot be composed."""
    bootstrap(overrides)
    from grpo_lab.config.overrides import in_one_line, misnamed
    from grpo_lab.config.run_config import RunConfig
    from grpo_lab.config.run_name import chosen_options

    if wrong := misnamed(overrides):
        raise ValueError(wrong)
    try:
        with initialize_config_dir(str(conf_folder()), version_base="1.3"):
            config = compose("config", list(overrides), return_hydra_config=True)
    except REFUSALS as error:
        raise ValueError(in_one_line(error, RunConfig.__dataclass_fields__)) from error
    choices = chosen_options(config.hydra.runtime.choices)
    with open_dict(config):
        del config["hydra"]
    return config, choices
