"""What every axis shares: range checks that name the field, the value and the remedy, and the tie rule."""

from __future__ import annotations

import math
from typing import ClassVar

import torch

from grpo_lab.types import Bool, Float, Tensor

# Two numbers closer than this are one number computed in two ways.
NEGLIGIBLE = 1e-4


class Trick:
    """An option on an axis.

    `touches_nothing` marks the option that by its definition changes no row and no token: no mask, no penalty,
    no clip. `formula` is what the option computes, in the symbols of `explain.py`, with its fields in braces.
    """

    touches_nothing: ClassVar[bool] = False
    formula: ClassVar[str] = ""

    def written(self) -> str:
        """The formula with this object's numbers in it; of a class that has none, its name and what it says it does."""
        if not self.formula:
            named, said = type(self).__name__, (type(self).__doc__ or "").partition("\n")[0]
            # A dataclass without a docstring has its signature for one.
            known = "" if said.startswith(f"{named}(") else said
            return ", ".join(filter(None, [f"written by no formula: {named}", known]))
        return self.formula.format(**{name: _number(value) for name, value in vars(self).items()})


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def require(holds: bool, name: str, value: object, rule: str, remedy: str) -> None:
    """Raise ValueError that says which value broke which rule and what to do about it."""
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}: {remedy}")


def require_field(holds: bool, owner: object, field: str, rule: str) -> None:
    """`require` of a field of an option, named after its class."""
    name, value = f"{type(owner).__name__}.{field}", getattr(owner, field)
    require(holds, name, repr(value), rule, "change this number in the config or on the command line")


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


def tied(values: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Bool[Tensor, "P 1"]:
    """True for groups whose counted values are all equal, or that count no row at all.

    Comparing the largest with the smallest value is exact, where a standard deviation of equal numbers
    is not: in fp32 eight rewards of 0.9 have a deviation near 6e-8, which an eps of 1e-9 turns into
    advantages of 0.9.
    """
    largest = torch.where(counted, values, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(counted, values, torch.inf).amin(dim=1, keepdim=True)
    return largest <= smallest


def counted_mean(values: Float[Tensor, "P G"], counted: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Mean over the counted rows of each group; 0 for a group that counts none."""
    number = counted.sum(dim=1, keepdim=True)
    return (values * counted).sum(dim=1, keepdim=True) / number.clamp(min=1)


def row_mean(values: Float[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> Float[Tensor, "M 1"]:
    """Mean over the masked tokens of each row; 0 for a row without any."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
