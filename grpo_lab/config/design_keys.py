"""Metadata on the fields of a declaration, from which the reference of its keys is made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

METRIC = "a metric: `grpo-lab metrics`"
OVERRIDES = "a list of overrides"
LISTED = "a list of different whole numbers"


@dataclass(frozen=True)
class Key:
    """The meaning of a key, its allowed values, and its default.

    Without `allowed` they follow from the field's type, and without `default` from the field's default.
    """

    what: str
    allowed: str = ""
    default: str = ""


def require_keys(where: str, entry: Any, cls: type) -> None:
    """Raise ValueError, with the nearest one that is, for a key of an entry that is no field of its dataclass.

    An entry that is no mapping passes: the caller refuses it.
    """
    if not isinstance(entry, Mapping):
        return
    known = sorted(field.name for field in fields(cls))
    unknown = next((str(key) for key in entry if key not in known), None)
    if unknown is not None:
        near = get_close_matches(unknown, known, 1, cutoff=0.7)
        guess = f"did you mean {near[0]}? " if near else ""
        raise ValueError(
            f"{where}.{unknown}: unknown key; {guess}valid keys: {', '.join(known)}; `grpo-lab design` explains each"
        )
