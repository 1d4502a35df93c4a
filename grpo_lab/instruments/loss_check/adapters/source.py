"""Import a framework without the packages it does not need for its losses, or take functions from its files."""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from grpo_lab.deferred import load


def package(path: Path | None, own: str, distribution: str, *modules: str) -> tuple[str, list[Any]]:
    """Version and modules of a package. Imports in its files of packages that are not installed get empty modules."""
    load()  # before an empty module can stand where torch looks for an optional one
    if path is not None:
        sys.path.append(str(path))
    absent = _Absent(own)
    try:
        found = [importlib.import_module(name) for name in modules]
    except ImportError:
        sys.meta_path.append(absent)  # stays, for what a function imports when it is called
        found = [importlib.import_module(name) for name in modules]
    return version(distribution), found


class _Empty(types.ModuleType):
    """A module in which every name is an empty class, which as a decorator returns its function."""

    __path__: Any = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(
            name, (), {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)}
        )
        made.__call__ = lambda self, *given, **_: given[0] if given else None  # pyright: ignore
        setattr(self, name, made)
        return made


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds, after all other finders, modules that files of `own` import."""

    def __init__(self, own: str) -> None:
        self.own = own
        self.made: set[str] = set()

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        top = fullname.split(".")[0]
        if top == self.own:
            return None
        if top not in self.made:
            frame = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is None or frame.f_globals.get("__name__", "").split(".")[0] != self.own:
                return None
            self.made.add(top)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def file_text(clone: Path | None, commit: str, path: str) -> tuple[str, str]:
    """Commit and text of a file: of a work tree as it is, or of a bare repository at `commit`."""
    if clone is None:
        raise ImportError("it is no package")
    if (clone / path).is_file():
        head = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], capture_output=True, text=True)
        return head.stdout.strip()[:9] or "work tree", (clone / path).read_text()
    show = ["git", "--git-dir", str(clone), "show", f"{commit}:{path}"]
    found = subprocess.run(show, capture_output=True, text=True)
    if found.returncode:
        raise OSError(found.stderr.strip())
    return commit[:9], found.stdout


def functions(text: str, space: dict[str, Any], names: Sequence[str], decorated: Sequence[str] = ()) -> dict[str, Any]:
    """These top-level functions and classes of a file, run in a namespace; decorators only of `decorated`."""
    nodes = {getattr(one, "name", ""): one for one in ast.parse(text).body}
    future = ast.parse("from __future__ import annotations").body
    for name in names:
        node: Any = nodes[name]
        if name not in decorated:
            node.decorator_list = []
        exec(compile(ast.fix_missing_locations(ast.Module([*future, node], [])), name, "exec"), space)
    return space
