"""The reference of a declaration's keys, made from the dataclasses that hold one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from grpo_lab.config.catalogue import with_tables
from grpo_lab.config.design import Design
from grpo_lab.config.design_keys import Key
from grpo_lab.config.folders import conf_folder

_HEAD = ("key of `design`", "what it is", "allowed values", "default")
_WIDTH = 118


@dataclass(frozen=True)
class Entry:
    """A key by its path, such as `predictions[].arm`, with what the reference says of it."""

    path: str
    what: str
    allowed: str
    default: str


def entries(cls: type = Design, path: str = "", seen: set[type] | None = None) -> Iterator[Entry]:
    """Every key of a declaration, one that holds entries followed by theirs, unless those were `said` before."""
    seen = set() if seen is None else seen
    hints = get_type_hints(cls, include_extras=True)
    for one in fields(cls):
        kind, key = get_args(hints[one.name])
        assert isinstance(key, Key), f"{cls.__name__}.{one.name} says what it is"
        yield Entry(path + one.name, key.what, key.allowed or _allowed(kind), key.default or _default(one))
        for inner, where in _inside(kind):
            if inner not in seen:
                seen.add(inner)
                yield from entries(inner, f"{path}{one.name}{where}.", seen)


def _inside(kind: Any, where: str = "") -> Iterator[tuple[type, str]]:
    """The dataclasses that a field holds, and where: `[]` in a list, `.NAME` under names of the user's own."""
    if get_origin(kind) is Annotated:
        kind = get_args(kind)[0]
    if isinstance(kind, type) and is_dataclass(kind):
        yield kind, where
        return
    within = {tuple: "[]", Mapping: ".NAME"}.get(get_origin(kind), "")
    for inner in get_args(kind):
        yield from _inside(inner, where + within)


def _allowed(kind: Any) -> str:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(choice.value for choice in kind)
    assert kind is bool, f"{kind} does not say what it may be"
    return "true, false"


def _default(one: Field) -> str:
    value = one.default
    if value is MISSING:
        return "required"
    return str(value.value) if isinstance(value, Enum) else str(value).lower()


def reference_table() -> str:
    """The reference as a markdown table."""
    lines = [_HEAD, ["---"] * len(_HEAD), *([f"`{e.path}`", e.what, e.allowed, e.default] for e in entries())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reference_text() -> str:
    """The reference for a terminal: a line for each key, and below it what it may be."""
    lines = []
    for one in entries():
        default = one.default if one.default.startswith("required") else f"default: {one.default}"
        lines += textwrap.wrap(f"{one.path}: {one.what}", _WIDTH, subsequent_indent="    ")
        lines += textwrap.wrap(f"{one.allowed}; {default}", _WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines).replace("`", "")


def documented_keys() -> dict[Path, str]:
    """experiments/keys.md with the table as it is now. Raises ValueError where it has none."""
    page = conf_folder().parent / "experiments" / "keys.md"
    return {page: with_tables(page, {f"| {_HEAD[0]} ": reference_table})}
