"""Old policy: whose log-probs stand below the importance ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.types import Float, Tensor


@dataclass(frozen=True)
class OldPolicy(Trick, ABC):
    """Chooses the denominator of the ratio the surrogate reads."""

    recomputes: ClassVar[bool]

    @abstractmethod
    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        """Log-probs of the old policy; None where it is the learner at the very update.

        `recomputed` are the learner's own from before the first update, None where no one needs them.
        """


@dataclass(frozen=True)
class Recomputed(OldPolicy):
    """The learner itself, before the first update on these rollouts (decoupled PPO, arXiv:2505.24298).

    Needs one forward pass without gradient per rollout batch. The loop leaves that pass out where its
    result is known: with one on-policy update, and nothing else that reads them, the old policy is the learner
    and the ratio is exactly 1.
    """

    touches_nothing: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True
    formula: ClassVar[str] = "the learner's log-probs before the first update on these rollouts"

    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        return recomputed


@dataclass(frozen=True)
class Sampler(OldPolicy):
    """The policy that generated, with its own numerics and weights (verl's bypass mode; ScaleRL, arXiv:2510.13786).

    Differs from Recomputed: no forward pass, two policies instead of three, and one ratio that holds both how far
    the learner has moved and how far the sampler was from it. A correction would count the latter twice.
    """

    recomputes: ClassVar[bool] = False
    formula: ClassVar[str] = "the sampler's log-probs"

    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        return sampler_logprobs
