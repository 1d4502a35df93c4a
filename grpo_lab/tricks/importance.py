"""Importance: the ratio of what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.tricks.base import require_positive


@dataclass(frozen=True)
class Importance(ABC):
    """Turns log-probs of learner and old policy into the log-ratio the surrogate reads."""

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        """log(pi / pi_old) with gradient through `logprobs`."""


@dataclass(frozen=True)
class Token(Importance):
    """One ratio per token (PPO, arXiv:1707.06347).

    log_ratio_t = clip(logprob_t - old_logprob_t, -limit, limit)

    Differs: the log-ratio is limited, since exp() of it overflows in fp32 beyond 88; at the limit of 20
    every trust region has long cut the token off.
    """

    log_ratio_limit: float  # nats

    def __post_init__(self) -> None:
        require_positive(self, "log_ratio_limit")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        return (logprobs - old_logprobs).clamp(-self.log_ratio_limit, self.log_ratio_limit)
