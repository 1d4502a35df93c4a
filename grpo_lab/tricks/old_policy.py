"""Old policy: which policy's log-probs are the denominator of the importance ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.types import Float, Tensor


@dataclass(frozen=True)
class OldPolicy(Trick, ABC):
    """Chooses the denominator of the ratio that the surrogate reads."""

    recomputes: ClassVar[bool]

    @abstractmethod
    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        """Log-probs of the old policy; None when the old policy is the learner at the same update.

        `recomputed` are the learner's log-probs before the first update, None when nothing needs them.
        """


@dataclass(frozen=True)
class Recomputed(OldPolicy):
    """The learner itself, before the first update on these rollouts (decoupled PPO, arXiv:2505.24298).

    Needs one forward pass without gradient per rollout batch. The loop skips that pass with one on-policy update if
    nothing else needs these log-probs: the old policy is then the learner, and the ratio is exactly 1.
    """

    is_no_op: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    formula: ClassVar[str] = "the learner's log-probs before the first update on these rollouts"

    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        return recomputed


@dataclass(frozen=True)
class Sampler(OldPolicy):
    """The sampler, with its own numerics and weights (verl's bypass mode; ScaleRL, arXiv:2510.13786).

    Differs from Recomputed: no forward pass, and two policies instead of three. One ratio contains both the learner's
    updates and the mismatch of sampler and learner. A correction would count the mismatch twice.
    """

    recomputes: ClassVar[bool] = False
    formula: ClassVar[str] = "the sampler's log-probs"

    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        return sampler_logprobs
