"""Lazy imports: large packages are loaded on first use, not on import.

`import torch` alone takes longer than all the work of `--help`, `explain` or `tricks`. After `defer("torch")`,
`import torch` gives a module that loads itself on first attribute access. Modules that these commands import
therefore write `import torch`; `from torch import nn` would load it at once.
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
    """A package not yet loaded. On first access it becomes the package, or a proxy if the package replaced itself."""

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
    """A proxy for the module with which a package replaced itself while loading."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.modules[self.__name__], name)


class _Later(Loader):
    """Creates the module without executing it; `own` is the loader that executes it later."""

    def __init__(self, own: Loader) -> None:
        self.own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        del module.__path__  # `import torch.nn` asks for it, and so loads the package first
        _turn_into(_Deferred, module)


class _Finder(MetaPathFinder):
    """Finds deferred packages before Python's own finder does."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _names else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Later(spec.loader)
        return spec


def defer(*names: str) -> None:
    """Make `import <name>` lazy. A package already loaded stays loaded; one not installed still fails."""
    if not _names:
        sys.meta_path.insert(0, _Finder())
    _names.update(names)


def load(*names: str) -> None:
    """Load these deferred packages now, or all of them; packages not installed are skipped.

    Call it before starting another thread that may import one of them. Python's import lock keeps threads from a
    half-loaded package, but it does not cover a package that loads itself on attribute access.
    """
    for name in names or sorted(_names):
        with contextlib.suppress(ModuleNotFoundError):
            _ = importlib.import_module(name).__version__
