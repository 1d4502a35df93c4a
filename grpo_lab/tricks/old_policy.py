"""Old policy: which policy's log-probs are the denominator of the importance ratio."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick
from grpo_lab.types import Float, Int, Tensor


@dataclass(frozen=True)
class OldPolicy(Trick, ABC):
    """Chooses the denominator of the ratio that the surrogate reads.

    `recomputes`: it is the learner before the first update. `interpolates`: it lies between the sampler and the learner
    at each update, so its log-probs exist only within an update, and the correction is computed there.
    """

    recomputes: ClassVar[bool]
    interpolates: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        """Log-probs of the old policy; None when the old policy is the learner at the same update.

        `recomputed` are the learner's log-probs before the first update, None when nothing needs them.
        """

    def learner_share(
        self, weight_version: Int[Tensor, "N T"], version: int, updates: int
    ) -> Float[Tensor, "N T"] | None:
        """The learner's share in each token's old log-prob, the rest being the sampler's; None unless `interpolates`.

        `weight_version` and `version` count the updates of the weights that sampled a token and of the learner before
        this step; a step takes `updates`.
        """
        return None


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


@dataclass(frozen=True)
class LogLinear(OldPolicy):
    """Interpolate between sampler and learner by the age of each token (A-3PO, arXiv:2512.06547; AReaL's "loglinear").

    log old = log sampler + a * (log pi - log sampler),  a = 1 - 1 / age for an age above 1 step, else 0

    The learner one step ago is estimated without its forward pass: age - 1 of age steps of the way from the sampler to
    the learner at this update. So log ratio = (log pi - log sampler) / age, without gradient through old. A correction
    weighs by old / sampler in each update, over the tokens in the loss, and ratio times weight is pi / sampler up to
    bounds. As in AReaL's code, the age counts from the learner before this batch, and old is one step behind it.
    Recomputed takes that learner itself, whose ratio is 1 in the first update: this is another policy, not only an
    approximation of that one. Differs from AReaL: a step may take several updates, by whose number ages are divided.
    """

    recomputes: ClassVar[bool] = False
    interpolates: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "sampler + a * (sg(logp) - sampler), a = 1 - 1 / age where a token is more than 1 step old, else 0"
    )

    def __call__(
        self, recomputed: Float[Tensor, "N T"] | None, sampler_logprobs: Float[Tensor, "N T"]
    ) -> Float[Tensor, "N T"] | None:
        return None

    def learner_share(
        self, weight_version: Int[Tensor, "N T"], version: int, updates: int
    ) -> Float[Tensor, "N T"] | None:
        age = (version - weight_version).double() / updates
        return 1 - 1 / age.clamp(min=1.0)
