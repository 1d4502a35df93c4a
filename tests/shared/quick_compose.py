"""Hydra reads the files of a choice of options once in a process, and sets the values beside them every time.

Composing takes 150 ms, most of it to read and merge a hundred files; the tests compose thousands of times, with few
choices. Folders beyond this repository, which tests write, are read every time.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

ROOT = Path(__file__).parents[2]
CREATE, COMPOSE = config_loader_impl.create_defaults_list, ConfigLoaderImpl._compose_config_from_defaults_list
_lists: dict[Any, Any] = {}
_configs: dict[Any, DictConfig] = {}


def enter() -> None:
    """Let Hydra remember, from here on in this process."""
    config_loader_impl.create_defaults_list = create_defaults_list
    ConfigLoaderImpl._compose_config_from_defaults_list = compose_from_defaults


def leave() -> None:
    """Hydra as it is installed."""
    config_loader_impl.create_defaults_list = CREATE
    ConfigLoaderImpl._compose_config_from_defaults_list = COMPOSE


def _folders(repo: Any) -> tuple[str, ...] | None:
    """Where configurations are read from; None where a test may write there."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    if all(scheme in ("pkg", "structured") or Path(path).is_relative_to(ROOT) for scheme, path in sources):
        return tuple(path for _, path in sources)
    return None


def create_defaults_list(repo: Any, config_name: Any, overrides_list: list, **how: bool) -> Any:
    """Hydra's function of this name; what is remembered depends on the overrides that choose an option."""
    if (folders := _folders(repo)) is None:
        return CREATE(repo, config_name, overrides_list, **how)
    values = [one for one in overrides_list if not repo.group_exists(one.key_or_group) or isinstance(one.value(), dict)]
    choices = [one for one in overrides_list if one not in values]
    key = folders, config_name, tuple(one.input_line for one in choices), *how.items()
    if key not in _lists:
        _lists[key] = CREATE(repo, config_name, choices, **how)
    sets = [one for one in values if not one.is_sweep_override()]
    return replace(_lists[key], defaults=list(_lists[key].defaults), config_overrides=sets)


def compose_from_defaults(loader: ConfigLoaderImpl, defaults: list, repo: Any) -> DictConfig:
    """Hydra's method, of which each caller gets a copy."""
    if (folders := _folders(repo)) is None:
        return COMPOSE(loader, defaults, repo)
    key = folders, tuple(map(astuple, defaults))
    if key not in _configs:
        _configs[key] = COMPOSE(loader, defaults, repo)
    return deepcopy(_configs[key])
