"""Range checks of settings: errors that name the value, the rule it breaks and the remedy."""

from __future__ import annotations

import math


def require(holds: bool, name: str, value: object, rule: str, remedy: str) -> None:
    """Unless `holds`, raise ValueError that names the value, the rule it breaks and the remedy."""
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}: {remedy}")


def require_field(holds: bool, owner: object, field: str, rule: str) -> None:
    """`require` for a field of an option; the message names its class."""
    name, value = f"{type(owner).__name__}.{field}", getattr(owner, field)
    require(holds, name, repr(value), rule, "change this value in the config or on the command line")


def require_positive(owner: object, *fields: str) -> None:
    """Every named field must be a finite number greater than zero."""
    for field in fields:
        value = getattr(owner, field)
        require_field(math.isfinite(value) and value > 0, owner, field, "greater than 0")


def require_not_negative(owner: object, *fields: str) -> None:
    """Every named field must be a finite number of at least zero."""
    for field in fields:
        value = getattr(owner, field)
        require_field(math.isfinite(value) and value >= 0, owner, field, "at least 0")
