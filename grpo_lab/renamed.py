"""Deprecated names of record fields and class facts, which plugins of the version before still use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

Record = TypeVar("Record", bound=type)


def renamed_fields(**today: str) -> Callable[[Record], Record]:
    """Class decorator for dataclasses: old field names, each with today's, are read and set with a DeprecationWarning.

    `dataclasses.replace(record, old=value)` sets today's field too.
    """

    def with_old_names(record: Record) -> Record:
        for old, new in today.items():
            setattr(record, old, property(functools.partial(_read, old=old, new=new)))
        record.__init__ = _accepting(record.__init__, record.__name__, today)
        return record

    return with_old_names


def _read(record: Any, old: str, new: str) -> Any:
    _warn(f"{type(record).__name__}.{old}", new)
    return getattr(record, new)


def _accepting(init: Callable[..., None], record: str, today: dict[str, str]) -> Callable[..., None]:
    # Without functools.wraps: what checks shapes would bind the names to the signature of `init`.
    def accepting(self: Any, *values: Any, **named: Any) -> None:
        for old in today.keys() & named.keys():
            _warn(f"{record}.{old}", today[old])
            named[today[old]] = named.pop(old)
        init(self, *values, **named)

    return accepting


def renamed_facts(plugin: type, **today: str) -> None:
    """Give today's name to class facts that `plugin` sets under an old one, with a DeprecationWarning."""
    for old, new in today.items():
        if old in vars(plugin):
            _warn(f"{plugin.__name__}.{old}", new)
            setattr(plugin, new, vars(plugin)[old])


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now called {new}: write {new}; the old name goes with the next version",
                  DeprecationWarning, stacklevel=4)  # fmt: skip
