"""Users' own YAML folders and Python modules: found and checked before Hydra reads them.

A few lines of YAML aliases can expand to billions of entries, which take hours to compose. Here the expanded entries
are counted from the parser's events, without building them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import traceback
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import yaml

from grpo_lab.config.folders import DESIGN, declared, experiments_folder

FOLDERS = "GRPO_LAB_CONFIG_PATH"
LARGEST = 1_000_000  # bytes of one file
DEEPEST = 50  # levels of nested collections
MOST = 20_000  # entries of one file, with every alias expanded
MOST_FILES = 2_000  # files of any kind in one folder, without hidden folders
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def user_folders() -> list[Path]:
    """The folders in GRPO_LAB_CONFIG_PATH, separated by `:`. Raises ValueError if one is missing."""
    folders = [Path(name).expanduser() for name in filter(None, os.environ.get(FOLDERS, "").split(os.pathsep))]
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(
                f"{FOLDERS} names {folder.absolute()}, which is no folder: make it, correct the path, or unset it"
            )
    return folders


def check_user_files(arguments: Sequence[str], experiments: Path) -> None:
    """Raise ValueError, naming the file, if a user's YAML file is not YAML or is larger than any configuration.

    Checks the folders in GRPO_LAB_CONFIG_PATH, those in the arguments `hydra.searchpath=[file://...]` and
    `--config-dir`, and the declarations in the folder `experiments`, which holds figures and data too.
    """
    for folder in declared(experiments).values():
        check_yaml(folder / DESIGN)
    named = [name for word in arguments for name in re.findall(r"file://([^,\]\"']+)", word)]
    named += [word.partition("=")[2] for word in arguments if word.startswith("--config-dir=")]
    named += [after for word, after in pairwise(arguments) if word in ("--config-dir", "-cd")]
    for folder in [*user_folders(), *map(Path, named)]:
        for path in _yaml_files(folder):
            check_yaml(path)
            there = experiments.parent / "conf" / path.relative_to(folder)
            if there.exists() and not there.samefile(path):
                raise ValueError(f"{path} has the name of an option that is there: rename it, or it is never read")


def declares_a_sweep(arguments: Sequence[str]) -> bool:
    """True if `+experiments=<name>` names a file that declares a sweep and does not say so by `hydra.mode`."""
    names = [word.partition("=")[2] for word in arguments if re.match(r"\+{0,2}experiments=", word)]
    if not names or {"-m", "--multirun"} & set(arguments):
        return False
    own = (folder / DESIGN for name, folder in declared(experiments_folder()).items() if name in names)
    paths = (*own, *(folder / "experiments" / f"{name}.yaml" for folder in user_folders() for name in names))
    return any("design" in read and (read.get("hydra") or {}).get("mode") is None for read in map(_read, paths))


def _read(path: Path) -> dict:
    read = yaml.load(path.read_bytes(), Loader=LOADER) if path.is_file() else None
    return read if isinstance(read, dict) else {}


def _yaml_files(folder: Path) -> list[Path]:
    found, seen = [], 0
    for place, below, names in os.walk(folder, followlinks=True):
        below[:] = [name for name in below if not name.startswith((".", "__"))]
        seen += len(names) + len(below)
        if seen > MOST_FILES:
            raise ValueError(
                f"{folder.absolute()} holds more than {MOST_FILES:,} files: name only the folder of your options"
            )
        found += [Path(place, name) for name in names if name.endswith((".yaml", ".yml"))]
    return found


def check_yaml(path: Path) -> None:
    """Raise ValueError, with line and remedy, if a file is not YAML, is too large or deep, or expands too far."""
    try:
        now = path.stat()
        if now.st_size > LARGEST:
            raise ValueError(f"{path} has {now.st_size:,} bytes: a configuration has at most {LARGEST:,}")
        _count(path, now.st_mtime_ns, now.st_size)
    except yaml.YAMLError as error:
        mark, at = getattr(error, "problem_mark", None), getattr(error, "position", None)
        line = f" line {mark.line + 1}" if mark else ""
        if at is not None:  # of a byte that is no character
            line = f" line {path.read_bytes()[:at].count(10) + 1}"
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error).splitlines()[0]
        if "nesting depth" in problem:  # PyYAML's own limit, where it has one
            problem = f"more than {DEEPEST} collections within each other: flatten them"
        raise ValueError(f"{path}{line} is not YAML ({problem}): mend it, or move it out of the folder") from error
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): mend it, or move it out of the folder") from error


@lru_cache(MOST_FILES)
def _count(path: Path, changed: int, size: int) -> None:
    """Count entries from the parser's events; each alias adds the entries of the collection it repeats.

    A file is read again only if its size or its time of change differs.
    """
    sizes: dict[str, int] = {}
    keys: list[list[str | None] | None] = []  # of every mapping that is open, keys and None for their values by turns
    open_: list[tuple[int, str | None]] = [(0, None)]  # entries so far, and the anchor
    for event in yaml.parse(path.read_bytes(), Loader=LOADER):
        size = 0
        if isinstance(event, yaml.NodeEvent):
            _check_tag(path, event)
            if keys and (named := keys[-1]) is not None:
                key = event.value if len(named) % 2 == 0 and isinstance(event, yaml.ScalarEvent) else None
                if key is not None and key != "<<" and key in named:
                    raise ValueError(f"{_at(path, event)}: the key {key!r} is there twice: keep one of the two")
                named.append(key)
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((1, event.anchor))
            keys.append([] if isinstance(event, yaml.MappingStartEvent) else None)
        elif isinstance(event, yaml.CollectionEndEvent):
            size, anchor = open_.pop()
            keys.pop()
            if anchor is not None:
                sizes[anchor] = size
        elif isinstance(event, yaml.ScalarEvent):
            size = 1
            if event.anchor is not None:
                sizes[event.anchor] = size
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for _, anchor in open_):
                raise ValueError(f"{_at(path, event)}: *{event.anchor} stands within what it stands for: write it out")
            if event.anchor not in sizes:
                raise ValueError(f"{_at(path, event)}: there is no &{event.anchor} above: correct *{event.anchor}")
            size = sizes[event.anchor]
        open_[-1] = open_[-1][0] + size, open_[-1][1]
        if len(open_) > DEEPEST:
            raise ValueError(f"{_at(path, event)}: more than {DEEPEST} collections within each other: flatten them")
        if open_[-1][0] > MOST:
            raise ValueError(
                f"{_at(path, event)}: with its aliases written out the file has more than {MOST:,} entries: use fewer "
                "aliases (*name) of what holds aliases itself"
            )


def _check_tag(path: Path, event: yaml.NodeEvent) -> None:
    tag = getattr(event, "tag", None)
    if tag and (not tag.startswith("tag:yaml.org,2002:") or "python" in tag):
        raise ValueError(
            f"{_at(path, event)}: the tag {tag.replace('tag:yaml.org,2002:', '!!')} would make an object, and a "
            "configuration holds plain values: write the value without it"
        )


def _at(path: Path, event: yaml.Event) -> str:
    assert event.start_mark is not None, "an event that was parsed has a place"
    return f"{path} line {event.start_mark.line + 1}"


def import_plugin(name: str) -> None:
    """Import a user's module. Raises ValueError that says where its code fails, or that there is no such module."""
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ValueError(_failure(name, error)) from error
        raise ValueError(
            f"plugin module {name!r} cannot be imported ({error}): install it or add its folder to PYTHONPATH"
        ) from error
    except (Exception, SystemExit) as error:
        raise ValueError(_failure(name, error)) from error


def _failure(name: str, error: BaseException) -> str:
    """Where a plugin's code failed: the last executed line in the plugin's own folder."""
    importers = (__file__, inspect.getfile(importlib.import_module))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename not in importers and not frame.filename.startswith("<")
    ]
    where = ""
    if isinstance(error, SyntaxError) and error.filename:
        where = f" at {error.filename} line {error.lineno}"
    elif frames:
        home = os.path.dirname(frames[0].filename)
        own = [frame for frame in frames if frame.filename.startswith(home)][-1]
        where = f" at {own.filename} line {own.lineno}"
    text = f"{type(error).__name__}: {getattr(error, 'msg', None) or error}".splitlines()[0]
    return f"plugin module {name!r} fails{where} ({text}): mend it, or leave it out of plugins= and GRPO_LAB_PLUGINS"
