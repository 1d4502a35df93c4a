"""Large packages that are loaded when they are first used, and not when a module names them.

`import torch` alone takes longer than all that `--help`, `explain` or `tricks` do. Once `defer("torch")` was called,
`import torch` gives a module that loads itself when it is first asked for something. A module that a command reads
therefore writes `import torch`, since `from torch import nn` asks at once.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_names: set[str] = set()


class _Deferred(ModuleType):
    """A package that is not loaded yet; afterwards itself, or a way to what the package put in its own place."""

    def __getattr__(self, name: str) -> Any:
        spec = self.__spec__
        assert spec is not None and isinstance(spec.loader, _Later)
        if sys.modules.get(spec.name) is self:
            _turn_into(ModuleType, self)
            vars(self)["__path__"] = spec.submodule_search_locations
            self.__loader__ = spec.loader = spec.loader.own
            spec.loader.exec_module(self)
            if sys.modules[spec.name] is not self:  # transformers replaces itself while it loads
                _turn_into(_Replaced, self)
        return getattr(sys.modules[spec.name], name)


def _turn_into(kind: type[ModuleType], module: ModuleType) -> None:
    """Make a module that exists one of another kind, which Python allows of modules."""
    module.__class__ = kind


class _Replaced(ModuleType):
    """What `import` gave before a package put another module in its place: a way to that one."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[self.__name__], name)


class _Later(Loader):
    """Makes the module and leaves it empty; `own` is the loader that can fill it."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        del module.__path__  # `import torch.nn` asks for it, and so loads the package first
        _turn_into(_Deferred, module)


class _Finder(MetaPathFinder):
    """Finds the packages that were deferred, before Python's own finder does."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


def defer(*names: str) -> None:
    """Let `import <name>` load nothing yet. One that is loaded stays so; one that is not installed still fails."""
    if not _names:
        sys.meta_path.insert(0, _Finder())
    _names.update(names)


def load(*names: str) -> None:
    """Load these deferred packages now, or all of them; one that is not installed is left out.

    To be called before another thread is started that may import one of them: Python lets no thread have a package
    that another is loading, but what loads itself when it is asked for something stands outside of that lock.
    """
    for name in names or sorted(_names):
        with contextlib.suppress(ModuleNotFoundError):
            _ = importlib.import_module(name).__version__
