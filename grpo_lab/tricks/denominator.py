"""Denominator: whether rows and tokens that left the loss still count in its denominator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Tensor


@dataclass(frozen=True)
class Denominator(Trick, ABC):
    """Chooses the tokens whose counts the aggregations divide by."""

    survivors_only: ClassVar[bool]

    @abstractmethod
    def counted_tokens(self, sampled_mask: Bool[Tensor, "N T"], loss_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        """True on tokens that count; a row or a problem counts when one of its tokens does."""


@dataclass(frozen=True)
class Original(Denominator):
    """Count every sampled token, including rows that left the loss, so a masked batch takes a smaller step.

    As in NeMo-RL and OpenRLHF. Only this option keeps the weight of each remaining row unchanged.
    """

    is_no_op: ClassVar[bool] = True
    survivors_only: ClassVar[bool] = False
    formula: ClassVar[str] = "all sampled tokens, of rows that left too"

    def counted_tokens(self, sampled_mask: Bool[Tensor, "N T"], loss_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        return sampled_mask


@dataclass(frozen=True)
class Survivors(Denominator):
    """Count only tokens in the loss, so each remaining row weighs more when rows are removed (ScaleRL).

    Differs from Original by the factor 1 / (share left in the loss). This hidden change of step size is partly undone
    by AdamW; the logged gradient norm and update norm show it.
    """

    survivors_only: ClassVar[bool] = True
    formula: ClassVar[str] = "only what is in the loss (m = 1)"

    def counted_tokens(self, sampled_mask: Bool[Tensor, "N T"], loss_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        return loss_mask
