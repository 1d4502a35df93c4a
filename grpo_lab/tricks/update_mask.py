"""Update mask: which tokens lose their surrogate loss in an update, by how far the learner now is from the sampler.

Decided anew in every update, from the learner's current log-probs and the advantages. The rejection axis decides once,
before the updates and without advantages. A masked token keeps its KL and entropy terms, counts in every denominator
and stays in the statistics, as in DeepSeek-V3.2's objective, TRL and slime: masking lowers the loss, and
denominator=survivors does not see it. The masks multiply the loss of any surrogate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import Trick, row_mean
from grpo_lab.tricks.correction import ratio
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class UpdateMask(Trick, ABC):
    """Chooses the tokens whose surrogate loss stays.

    `divides_rows`: can mask some tokens of a response and not others.
    """

    divides_rows: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        sampler_logprobs: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Bool[Tensor, "M T"]:
        """True on tokens whose surrogate loss stays. `logprobs` are the learner's at this update, without gradient.

        Means and sums over a response are over its tokens in `loss_mask`; other entries are meaningless.
        """


@dataclass(frozen=True)
class NoUpdateMask(UpdateMask):
    """Every token in the loss keeps its surrogate loss."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "1"

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        sampler_logprobs: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Bool[Tensor, "M T"]:
        return torch.ones_like(loss_mask)


@dataclass(frozen=True)
class Opsm(UpdateMask):
    """Drop negative responses that the learner has left behind (OPSM of DeepSeek-V3.2, arXiv:2512.02556).

    keep = A >= 0, or mean_t(log sampler - log pi) <= delta

    The mean estimates the KL from the sampler to the learner over the response. It is signed: a response that became
    more likely always stays. Differs from rejection=sequence_mean_k1: it reads the advantage and the current learner,
    has one bound, and rejected rows leave the denominators. Where advantages are per token, so is their sign.
    """

    delta: float  # nats per token

    formula: ClassVar[str] = "0 where A < 0 and mean_t(sampler - logp) > {delta}, else 1"

    def __post_init__(self) -> None:
        require_positive(self, "delta")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        sampler_logprobs: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Bool[Tensor, "M T"]:
        drift = row_mean(sampler_logprobs - logprobs, loss_mask)
        return ~((advantages < 0) & (drift > self.delta))


@dataclass(frozen=True)
class Vaco(UpdateMask):
    """Drop tokens that move further away, in responses that are far from the sampler (VACO, arXiv:2603.01365).

    keep = mean_t |rho - 1| <= delta, or A * log rho <= 0          rho = pi / sampler

    This is the form for responses of open-instruct ("rho_mask_tv_divergence"), of which half the mean estimates the
    total variation. There rho is of the learner before the updates, here of the current one, as VACO filters gradients;
    with one update they are the same. VACO's advantage realignment (V-trace) is no part of it. Differs from Opsm:
    unsigned, both signs of A, and tokens that come back stay.
    """

    delta: float

    divides_rows: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "0 where mean_t(|rho - 1|) > {delta} and A * log rho > 0, else 1; rho = exp(logp - sampler)"
    )

    def __post_init__(self) -> None:
        require_positive(self, "delta")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        sampler_logprobs: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Bool[Tensor, "M T"]:
        moved = logprobs - sampler_logprobs
        far = row_mean((ratio(moved) - 1).abs(), loss_mask) > self.delta
        return ~(far & (advantages * moved > 0))


@dataclass(frozen=True)
class Cppo(UpdateMask):
    """A trust region that is tighter early in a response, and tightens as its prefix drifts (CPPO, arXiv:2606.10968).

    keep = A * log rho <= 0, or Z_t <= min(delta, delta + delta_b * W_(t-1) - S_(t-1))
    Z_t = w_t * |pi - sampler|,  S_t = sum_(u <= t) Z_u,  W_t = sum_(u <= t) w_u

    w_t falls linearly from 1 at the first token of a response to `floor` at its last. The budget delta_b, the mean that
    a prefix may reach, is the 90th percentile of |pi - sampler| in the response, within [budget, largest_budget]; equal
    numbers fix it. The paper measures distance by the 20 likeliest tokens, and finds the sampled token's probability,
    which is used here, to do as well. Its loss is -r * A against the sampler. Differs from the mask of
    surrogate=dppo: this one depends on the position and on the tokens before.
    """

    delta: float  # probability
    budget: float  # probability
    largest_budget: float  # probability
    floor: float

    divides_rows: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "0 where A * (logp - sampler) > 0 and c_t * d_t > min({delta}, {delta} + sum_s<t(c_s * (b - d_s))), else 1; "
        "d = |exp(logp) - exp(sampler)|, c from 1 down to {floor} along the response, b the response's 90th percentile "
        "of d in [{budget}, {largest_budget}]"
    )

    def __post_init__(self) -> None:
        require_positive(self, "delta", "budget", "floor")
        require_field(self.floor <= 1, self, "floor", "at most 1")
        require_field(self.largest_budget >= self.budget, self, "largest_budget", f"at least budget ({self.budget:g})")

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        sampler_logprobs: Float[Tensor, "M T"],
        advantages: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Bool[Tensor, "M T"]:
        distance = torch.where(loss_mask, (logprobs.double().exp() - sampler_logprobs.double().exp()).abs(), torch.nan)
        budget = distance.nanquantile(0.9, dim=1, keepdim=True).clamp(self.budget, self.largest_budget)
        place, last = loss_mask.cumsum(dim=1) - 1, (loss_mask.sum(dim=1, keepdim=True) - 1).clamp(min=1)
        weight = torch.where(loss_mask, 1 - (1 - self.floor) * place / last, 0.0)
        spent = torch.where(loss_mask, weight * distance, 0.0)
        before = budget * (weight.cumsum(dim=1) - weight) - (spent.cumsum(dim=1) - spent)
        return (advantages * (logprobs - sampler_logprobs) <= 0) | (spent <= self.delta + before.clamp(max=0.0))
