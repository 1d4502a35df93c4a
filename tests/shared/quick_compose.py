"""Hydra reads the files of a choice of options once in a process, and sets the values beside them every time.

Composing takes 150 ms, most of it to read, copy and merge a hundred files; the tests compose thousands of times, with
few choices. A new choice merges what was read before. Folders beyond this repository, which tests write, are read every
time, as are the classes of a plugin.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig
from omegaconf.base import Box

ROOT = Path(__file__).parents[2]
_PATCHED = (
    (config_loader_impl, "create_defaults_list"),
    (ConfigLoaderImpl, "_compose_config_from_defaults_list"),
    (ConfigLoaderImpl, "_load_single_config"),
    (defaults_list, "_create_interpolation_map"),
    (CachingConfigRepository, "__init__"),
    (ConfigRepository, "load_config"),
)
_HYDRA = {name: getattr(place, name) for place, name in _PATCHED}
_lists: dict[Any, Any] = {}
_configs: dict[Any, DictConfig] = {}
_files: dict[Any, Any] = {}


def enter() -> None:
    """Let Hydra remember, from here on in this process."""
    ours = (
        create_defaults_list, compose_from_defaults, load_single_config, interpolation_map, share_sources, load_config
    )  # fmt: skip
    for (place, name), function in zip(_PATCHED, ours, strict=True):
        setattr(place, name, function)


def leave() -> None:
    """Hydra as it is installed."""
    for place, name in _PATCHED:
        setattr(place, name, _HYDRA[name])


def _folders(repo: Any) -> tuple[str, ...] | None:
    """Where configurations are read from; None where a test may write there."""
    sources = [(source.scheme(), source.path) for source in repo.get_sources()]
    if all(scheme in ("pkg", "structured") or Path(path).is_relative_to(ROOT) for scheme, path in sources):
        return tuple(path for _, path in sources)
    return None


def create_defaults_list(repo: Any, config_name: Any, overrides_list: list, **how: bool) -> Any:
    """Hydra's function of this name; what is remembered depends on the overrides that choose an option."""
    if (folders := _folders(repo)) is None:
        return _HYDRA["create_defaults_list"](repo, config_name, overrides_list, **how)
    values = [one for one in overrides_list if not repo.group_exists(one.key_or_group) or isinstance(one.value(), dict)]
    choices = [one for one in overrides_list if one not in values]
    key = folders, config_name, tuple(one.input_line for one in choices), *how.items()
    if key not in _lists:
        _lists[key] = _HYDRA["create_defaults_list"](repo, config_name, choices, **how)
    sets = [one for one in values if not one.is_sweep_override()]
    return replace(_lists[key], defaults=list(_lists[key].defaults), config_overrides=sets)


def compose_from_defaults(loader: ConfigLoaderImpl, defaults: list, repo: Any) -> DictConfig:
    """Hydra's method, of which each caller gets a copy."""
    compose = _HYDRA["_compose_config_from_defaults_list"]
    if (folders := _folders(repo)) is None:
        return compose(loader, defaults, repo)
    key = folders, tuple(map(astuple, defaults))
    if key not in _configs:
        with _without_new_parents():
            _configs[key] = compose(loader, defaults, repo)
        _configs[key]._re_parent()
    return deepcopy(_configs[key])


@contextmanager
def _without_new_parents() -> Iterator[None]:
    """Let merging not correct every node's parent after each of a hundred files; the caller does it once at the end."""
    correct = Box._re_parent
    Box._re_parent = lambda self: None
    try:
        yield
    finally:
        Box._re_parent = correct


def load_config(repo: ConfigRepository, config_path: str) -> Any:
    """Hydra's method; a file of this repository and a class that is still the same are read once."""
    load, folders = _HYDRA["load_config"], _folders(repo)
    source = repo._find_object_source(config_path, ObjectType.CONFIG)
    if folders is None or source is None:
        return load(repo, config_path)
    node = ConfigStore.instance()._load(f"{config_path}.yaml").node if source.scheme() == "structured" else None
    known, result = _files.get((folders, config_path), (None, None))
    if result is None or known is not node:
        result = load(repo, config_path)
        _files[folders, config_path] = node, result
    return result


def load_single_config(loader: ConfigLoaderImpl, default: Any, repo: Any) -> Any:
    """Hydra's method; its caller merges into another config, and takes the nodes of what is in no package with it."""
    result = _HYDRA["_load_single_config"](loader, default, repo)
    if result is not repo.load_config(default.config_path):
        return result
    mine = copy(result)
    mine.config = deepcopy(result.config)
    return mine


def interpolation_map(overrides: Any, defaults: list, self_added: bool) -> Any:
    """Hydra's function, a third of the time of a choice, where one of these defaults will read it."""
    if any(default.is_interpolation() for default in defaults):
        return _HYDRA["_create_interpolation_map"](overrides, defaults, self_added)
    return None


def share_sources(repo: CachingConfigRepository, delegate: ConfigRepository) -> None:
    """Hydra's method without its deep copy of every source: a search path on the command line gives a new list."""
    repo.delegate = copy(delegate)
    repo.cache = {}
