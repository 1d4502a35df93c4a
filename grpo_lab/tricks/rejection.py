"""Rejection: which rows or tokens leave because the sampler is not the learner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.tricks.base import Trick


@dataclass(frozen=True)
class Rejection(Trick, ABC):
    """Chooses the tokens that stay in the loss."""

    needs_old_logprobs: ClassVar[bool]
    removes_rows: ClassVar[bool]

    @abstractmethod
    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        """True on the tokens that stay."""


@dataclass(frozen=True)
class NoRejection(Rejection):
    """Every sampled token stays."""

    touches_nothing: ClassVar[bool] = True
    needs_old_logprobs: ClassVar[bool] = False
    removes_rows: ClassVar[bool] = False

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        return torch.ones_like(sampled_mask)
