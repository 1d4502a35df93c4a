"""Correction: a weight for the sampler not being the learner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.tricks.base import Trick, require_positive


@dataclass(frozen=True)
class Correction(Trick, ABC):
    """Weights each token's surrogate loss; the weight carries no gradient."""

    needs_old_logprobs: ClassVar[bool]

    @abstractmethod
    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        """Weights of the surrogate, 1 where nothing is corrected."""


@dataclass(frozen=True)
class NoCorrection(Correction):
    """Trust the sampler: every weight is 1."""

    touches_nothing: ClassVar[bool] = True
    needs_old_logprobs: ClassVar[bool] = False

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        return torch.ones_like(old_logprobs)


@dataclass(frozen=True)
class TisToken(Correction):
    """Truncated importance sampling per token (Yao et al., "off-policy RL"; Olmo 3, arXiv:2512.13961).

    weight_t = min(old_t / sampler_t, cap)          (probabilities; old = learner before the updates)

    One-sided: small ratios stay small, large ones stop at `cap`, so the expected weight is at most 1.
    Differs from NoCorrection only where sampler and learner disagree; with equal weights and numerics it
    is 1 up to rounding.
    """

    cap: float

    needs_old_logprobs: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "cap")

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        ratio = torch.exp(old_logprobs - sampler_logprobs)
        return torch.where(sampled_mask, ratio.clamp(max=self.cap), 1.0)
