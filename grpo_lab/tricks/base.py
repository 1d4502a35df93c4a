"""Shared by all axes: the base class of options, and statistics over masked rows."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from string import Formatter
from typing import Any, ClassVar

import torch

from grpo_lab.renamed import renamed_facts
from grpo_lab.types import Bool, Float, Tensor

# A smaller difference between two numbers is taken for rounding.
NEGLIGIBLE = 1e-4


class Trick:
    """An option on an axis.

    `is_no_op` marks the option that by definition changes no row and no token: no mask, no penalty, no clip.
    `formula` is what the option computes, in the symbols that `grpo-lab explain` prints. Every option has one. A
    field's name in braces is replaced by its number; write a brace twice to print it.

    An option is frozen. One that remembers something from step to step overrides `first_memory`; the run keeps that
    dict in `RunState.memories` under the name of the axis, hands it to the option with the inputs of its stage, and
    saves it in every checkpoint. The option changes it in place, once a step. All ranks hold the same memory, so it
    must follow from what all ranks know.
    """

    is_no_op: ClassVar[bool] = False
    formula: ClassVar[str]

    def __init_subclass__(cls) -> None:
        renamed_facts(cls, touches_nothing="is_no_op")

    def first_memory(self, measured: dict[int, tuple[int, int]]) -> dict[str, Any]:
        """The memory before the first step, tensors and plain values only; {} for an option that remembers nothing.

        `measured`: right and graded responses of the base model by problem id, {} if no pass_rate measured them.
        """
        return {}

    def written(self) -> str:
        """The formula with this object's numbers filled in."""
        return self.formula.format(**{name: _number(value) for name, value in vars(self).items()})


def formula_fault(cls: type[Trick]) -> str:
    """The fault of an option's formula and its fix; "" when it can be printed."""
    text = getattr(cls, "formula", "")
    if not text:
        return (
            'has no formula: write `formula: ClassVar[str] = "..."` in the class, what it computes in the symbols of '
            "`grpo-lab explain`, with its fields in braces"
        )
    if not isinstance(text, str):  # a property, which needs an object to be read
        return ""
    try:
        named = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        return f"has a formula that cannot be printed ({error}): write a brace that is to be printed twice"
    known = [field.name for field in fields(cls)] if is_dataclass(cls) else []
    if unknown := sorted(named - set(known)):
        there = f"its fields are {', '.join(known)}" if known else "it has no fields"
        return (
            f"has {{{unknown[0]}}} in its formula, which is no field of it ({there}): correct the name, or write a "
            "brace that is to be printed twice"
        )
    return ""


def _number(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(getattr(value, "value", value))


def tied(values: Float[Tensor, "P G"], in_statistics: Bool[Tensor, "P G"]) -> Bool[Tensor, "P 1"]:
    """True for groups whose values in the statistics are all equal, or that have no row in them.

    The largest value is compared with the smallest, which is exact. A standard deviation of equal numbers is not:
    in fp32 eight rewards of 0.9 have a deviation near 6e-8, and an eps of 1e-9 turns that into advantages of 0.9.
    """
    largest = torch.where(in_statistics, values, -torch.inf).amax(dim=1, keepdim=True)
    smallest = torch.where(in_statistics, values, torch.inf).amin(dim=1, keepdim=True)
    return largest <= smallest


def group_mean(values: Float[Tensor, "P G"], in_statistics: Bool[Tensor, "P G"]) -> Float[Tensor, "P 1"]:
    """Mean over the rows of each group that are in the statistics; 0 for a group without any."""
    number = in_statistics.sum(dim=1, keepdim=True)
    return (values * in_statistics).sum(dim=1, keepdim=True) / number.clamp(min=1)


def row_mean(values: Float[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> Float[Tensor, "M 1"]:
    """Mean over the tokens where `mask` is True, per row; 0 for a row without such tokens."""
    return torch.where(mask, values, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
