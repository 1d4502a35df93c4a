"""Denominator: whether rows and tokens that left the loss still count below the fraction line."""

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
    """Count every sampled token, also of rows that left: a masked batch takes a smaller step.

    NeMo-RL and OpenRLHF divide so. Only this choice keeps each remaining row's weight what it was.
    """

    touches_nothing: ClassVar[bool] = True
    survivors_only: ClassVar[bool] = False
    formula: ClassVar[str] = "all sampled tokens, of rows that left too"

    def counted_tokens(self, sampled_mask: Bool[Tensor, "N T"], loss_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        return sampled_mask


@dataclass(frozen=True)
class Survivors(Denominator):
    """Count only what is in the loss: removing rows makes each remaining row weigh more (ScaleRL).

    Differs from Original by the factor 1 / (share that survived), a hidden change of step size that
    AdamW partly undoes; the log's gradient norm and update norm show it.
    """

    survivors_only: ClassVar[bool] = True
    formula: ClassVar[str] = "only what is in the loss (m = 1)"

    def counted_tokens(self, sampled_mask: Bool[Tensor, "N T"], loss_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        return loss_mask
