"""Surrogate: the trust region around the old policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.tricks.base import Trick, require_positive


@dataclass(frozen=True)
class SurrogateLoss:
    """The loss of each token, and the tokens whose gradient the trust region changed."""

    token_loss: Float[Tensor, "M T"]
    touched: Bool[Tensor, "M T"]


@dataclass(frozen=True)
class Surrogate(Trick, ABC):
    """The policy loss of one token; minimised."""

    uses_ratio: ClassVar[bool]
    clips: ClassVar[bool]

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        log_ratio: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
    ) -> SurrogateLoss:
        """Per-token loss before any weight, penalty or aggregation."""


@dataclass(frozen=True)
class Ppo(Surrogate):
    """The clipped surrogate of PPO (arXiv:1707.06347); with clip_high > clip_low DAPO's clip-higher.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    A token beyond the bound its advantage pushes it towards loses its whole gradient. DAPO
    (arXiv:2503.14476) raises the upper bound, since 1 + clip_high is also the most a rare token can gain
    in one step. Inert with one on-policy update: every ratio is 1.
    """

    clip_low: float
    clip_high: float

    uses_ratio: ClassVar[bool] = True
    clips: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        log_ratio: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
    ) -> SurrogateLoss:
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        too_high = (advantages > 0) & (ratio > 1 + self.clip_high)
        too_low = (advantages < 0) & (ratio < 1 - self.clip_low)
        return SurrogateLoss(-torch.minimum(ratio * advantages, clipped * advantages), too_high | too_low)


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """The plain policy gradient, no ratio and no trust region (Williams 1992).

    loss = -A * logprob

    Differs from Ppo: off-policy tokens are neither reweighted nor cut. On-policy the gradients agree.
    """

    touches_nothing: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = False
    clips: ClassVar[bool] = False

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        log_ratio: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
    ) -> SurrogateLoss:
        return SurrogateLoss(-advantages * logprobs, torch.zeros_like(advantages, dtype=torch.bool))
