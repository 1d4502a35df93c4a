"""KL: the penalty for moving away from the reference policy.

With x = ref / pi, Schulman's estimates of KL(pi || ref) are k1 = -log x, k2 = (log x)^2 / 2 and k3 = x - log x - 1. As
values k1 and k3 are unbiased. The gradient of an estimate is in general not that of KL(pi || ref), so each option
states its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from grpo_lab.checks import require_not_negative, require_positive
from grpo_lab.renamed import renamed_facts
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Float, Graded, Tensor, to_groups


@dataclass(frozen=True)
class Kl(Trick, ABC):
    """A penalty added to each token's loss and aggregated with it, or a component of the reward.

    `needs_reference`: needs the reference's log-probs of the rollouts. `shapes_reward`: acts through `shape`, before
    the group statistics, and needs the old policy's log-probs there. `reads_old`: depends on the old policy.
    `adapts`: the coefficient is state, which starts at `start`; `next_coef` updates it once per step, and checkpoints
    save it.
    """

    needs_reference: ClassVar[bool] = True
    shapes_reward: ClassVar[bool] = False
    reads_old: ClassVar[bool] = False
    adapts: ClassVar[bool] = False

    @property
    def start(self) -> float:
        """The coefficient of the first step, if it adapts."""
        return 0.0

    def at(self, coef: float) -> Kl:
        """This option with the coefficient of a step; unchanged unless it adapts."""
        return self

    def next_coef(self, coef: float, kl: float, responses: int) -> float:
        """The coefficient after a step on `responses`, whose KL from the reference was `kl` nats per token."""
        return coef

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        renamed_facts(cls, charges="token_penalties")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        ref_logprobs: Float[Tensor, "M T"] | None,
    ) -> Float[Tensor, "M T"]:
        """Each token's term of the loss, with gradient through `logprobs`; 0 if the penalty is in the reward."""
        if not self.needs_reference:
            return torch.zeros_like(logprobs)
        assert ref_logprobs is not None, "needs_reference makes the loop compute them"
        return self.penalty(logprobs - old_logprobs, logprobs - ref_logprobs)

    @abstractmethod
    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        """Coefficient times estimate, given log-prob minus old log-prob and log-prob minus reference log-prob."""

    def token_penalties(
        self,
        old_logprobs: Float[Tensor, "N T"] | None,
        ref_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        """Each token's KL penalty in the reward, negative on average, float64; 0 unless `shapes_reward`."""
        return torch.zeros(sampled_mask.shape, dtype=torch.float64)

    def shape(self, graded: Graded, penalties: Float[Tensor, "N T"]) -> Graded:
        """The record with each response's penalties added to its reward; unchanged unless `shapes_reward`."""
        return graded


def k3(above_ref: Float[Tensor, "*n"], log_ratio_limit: float) -> Float[Tensor, "*n"]:
    """Schulman's k3 of each token, its log-ratio within +-log_ratio_limit."""
    log_x = (-above_ref).clamp(-log_ratio_limit, log_ratio_limit)
    return log_x.exp() - log_x - 1


def bounded(estimate: Float[Tensor, "*n"], limit: float) -> Float[Tensor, "*n"]:
    """The estimate within +-limit nats, without gradient beyond; as it is where `limit` is 0."""
    return estimate.clamp(-limit, limit) if limit else estimate


def _written(estimate: str, limit: float) -> str:
    """An estimate as a formula, with its bound."""
    return f"clip({estimate}, -{{limit}}, {{limit}})" if limit else estimate


@dataclass(frozen=True)
class NoKl(Kl):
    """No KL penalty. The reference is never loaded."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "0"
    needs_reference: ClassVar[bool] = False

    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return torch.zeros_like(above_ref)


@dataclass(frozen=True)
class K1Reward(Kl):
    """Schulman's k1 as a component of the reward (RLHF; RLOO, arXiv:2402.14740; REINFORCE++, arXiv:2501.03262).

    reward_i = reward_i - kl_coef * sum_t (old_logprob_t - ref_logprob_t), before any group statistic

    The policy gradient of this reward is the gradient of the reverse KL(pi || ref). As a loss, k1 has an expected
    gradient of 0. A response is penalised for every token, and all its tokens share the sum, as in RLOO. A per-token
    baseline instead penalises each token for itself and later ones: gae, and return_to_go as in REINFORCE++.
    """

    kl_coef: float
    limit: float  # nats of a token's k1; 0 sets none

    shapes_reward: ClassVar[bool] = True
    reads_old: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"{{kl_coef}} * sum_t({_written('old - ref', self.limit)})"

    def __post_init__(self) -> None:
        require_positive(self, "kl_coef")
        require_not_negative(self, "limit")

    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return torch.zeros_like(above_ref)

    def token_penalties(
        self,
        old_logprobs: Float[Tensor, "N T"] | None,
        ref_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        assert old_logprobs is not None and ref_logprobs is not None, "shapes_reward makes the loop compute both"
        drift = (old_logprobs - ref_logprobs).to(torch.float64)
        return torch.where(sampled_mask, -self.kl_coef * bounded(drift, self.limit), 0.0)

    def shape(self, graded: Graded, penalties: Float[Tensor, "N T"]) -> Graded:
        return graded.with_component("k1", to_groups(penalties.sum(dim=1), graded.reward.shape[1]))


@dataclass(frozen=True)
class K2Loss(Kl):
    """Schulman's k2 estimate as a loss term (REINFORCE++-baseline, arXiv:2501.03262).

    penalty = kl_coef * (logprob - ref_logprob)^2 / 2

    Biased as a value, but its expected on-policy gradient is that of the reverse KL(pi || ref).
    """

    kl_coef: float
    limit: float  # nats of a token's k2; 0 sets none

    @property
    def formula(self) -> str:
        return f"{{kl_coef}} * {_written('(logp - ref)^2 / 2', self.limit)}"

    def __post_init__(self) -> None:
        require_positive(self, "kl_coef")
        require_not_negative(self, "limit")

    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return self.kl_coef * bounded(above_ref**2 / 2, self.limit)


@dataclass(frozen=True)
class K3Loss(Kl):
    """Schulman's k3 estimate as a loss term (GRPO, arXiv:2402.03300, eq. 4).

    x = ref / pi;  penalty = kl_coef * (x - log x - 1)

    Never negative. As a value on the learner's own samples it is unbiased for KL(pi || ref). As a loss its expected
    gradient is that of the forward KL(ref || pi), not of the reverse one.
    Differs: the log-ratio is limited to +-log_ratio_limit, since exp() of it overflows in fp32 beyond 88.
    """

    kl_coef: float
    log_ratio_limit: float  # nats
    limit: float  # nats of a token's k3; 0 sets none

    @property
    def formula(self) -> str:
        estimate = "min(x - log x - 1, {limit})" if self.limit else "(x - log x - 1)"
        return f"{{kl_coef}} * {estimate}, x = exp(ref - logp)"

    def __post_init__(self) -> None:
        require_positive(self, "kl_coef", "log_ratio_limit")
        require_not_negative(self, "limit")

    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return self.kl_coef * bounded(k3(above_ref, self.log_ratio_limit), self.limit)


@dataclass(frozen=True)
class K3Unbiased(Kl):
    """k3 weighted by the token's importance ratio, with gradient through both (DeepSeek-V3.2).

    penalty = kl_coef * (pi / old) * (x - log x - 1),  x = ref / pi

    Differs from K3Loss: the ratio turns an expectation over the old policy's samples into one over the learner's. So
    value and gradient are those of the reverse KL(pi || ref), off-policy too. The ratio is always per token, whatever
    the importance axis is.
    """

    kl_coef: float
    log_ratio_limit: float  # nats
    limit: float  # nats of a token's weighted k3; 0 sets none

    reads_old: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"{{kl_coef}} * {_written('exp(logp - old) * (x - log x - 1)', self.limit)}, x = exp(ref - logp)"

    def __post_init__(self) -> None:
        require_positive(self, "kl_coef", "log_ratio_limit")
        require_not_negative(self, "limit")

    def penalty(self, above_old: Float[Tensor, "M T"], above_ref: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        ratio = above_old.clamp(-self.log_ratio_limit, self.log_ratio_limit).exp()
        return bounded(ratio * (self.kl_coef * k3(above_ref, self.log_ratio_limit)), self.kl_coef * self.limit)


@dataclass(frozen=True)
class AdaptiveKl(Kl, ABC):
    """A coefficient that follows a target (Ziegler et al., arXiv:1909.08593, sec. 2.2).

    coef_{k+1} = coef_k * (1 + clip(kl / target - 1, -0.2, 0.2) * min(responses / horizon, 1))

    `kl` is the step's mean k3 estimate of KL(learner || reference) over all its updates, in nats per token of the loss.
    The coefficient rises while the policy is further from the reference than `target` and falls while it is nearer, by
    at most 20% per `horizon` responses. Differs from verl, which measures before the updates and by the estimate of the
    penalty. A step without an update leaves the coefficient as it is.
    """

    kl_coef: float  # of the first step
    target: float  # nats per token
    horizon: int  # responses

    adapts: ClassVar[bool] = True

    @property
    def start(self) -> float:
        return self.kl_coef

    def at(self, coef: float) -> Kl:
        return replace(self, kl_coef=coef)

    def next_coef(self, coef: float, kl: float, responses: int) -> float:
        off = min(max(kl / self.target - 1, -0.2), 0.2)
        return coef * (1 + off * min(responses / self.horizon, 1.0))


_MOVES = "; kl_coef moves to a KL of {target}, by at most 20% per {horizon} responses"


@dataclass(frozen=True)
class AdaptiveK1Reward(AdaptiveKl, K1Reward):
    """K1Reward with a coefficient that follows a target (arXiv:1909.08593); see AdaptiveKl.

    The penalty of a step and its group statistics use the coefficient that the steps before it left.
    """

    @property
    def formula(self) -> str:
        return super().formula + _MOVES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "target", "horizon")


@dataclass(frozen=True)
class AdaptiveK3Loss(AdaptiveKl, K3Loss):
    """K3Loss with a coefficient that follows a target (arXiv:1909.08593); see AdaptiveKl.

    All updates of a step use the coefficient that the steps before it left.
    """

    @property
    def formula(self) -> str:
        return super().formula + _MOVES

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "target", "horizon")
