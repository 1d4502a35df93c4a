"""Token credit: how a response's advantage is divided among its tokens, by their probability and entropy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import Trick, row_mean
from grpo_lab.types import Bool, Float, Tensor

CERTAIN = 1e-7  # nats; a response of a smaller mean has no token that stands out
EQUAL = 1e-12  # a smaller deviation over the batch is rounding


@dataclass(frozen=True)
class TokenCredit(Trick, ABC):
    """A change of each token's advantage after the scale and before the teacher.

    Log-probs and entropies are the learner's, from before the updates, so that all updates on a batch share them, and
    no gradient flows through them. A token whose advantage is 0 keeps it. `reads_batch`: its statistics are over the
    tokens of the whole rollout batch.
    """

    reads_batch: ClassVar[bool] = False

    @property
    def reads_entropy(self) -> bool:
        """True if the entropies of the rollouts are needed."""
        return False

    @abstractmethod
    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        """The tokens' new advantages; all statistics are over `loss_mask`, outside of which entries mean nothing.

        `logprobs` and `entropy` are in nats; each is None if the option does not read it.
        """


@dataclass(frozen=True)
class NoTokenCredit(TokenCredit):
    """Every token answers for its response alike."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "A_S"

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        return advantages


class Uncertainty(Enum):
    """A token's uncertainty: its negative log-prob, or the entropy of the distribution that it was drawn from."""

    surprisal = "surprisal"
    entropy = "entropy"


@dataclass(frozen=True)
class GtpoWeight(TokenCredit):
    """A larger advantage for a response's uncertain tokens: retrain's form of GTPO (Tan et al., arXiv:2508.04349).

    A_t = A * max(0, 1 + beta * (h_t / mean_i h - 1)), the mean over the response's tokens in the loss

    For beta <= 1 the weights of a response have mean 1, so that its advantages keep their sum. All are 1 in a response
    of one token, and in one whose mean is below 1e-7 nats.
    Differs from the paper, which shapes the rewards by a token's share of the entropy at its position, over the right
    and over the wrong responses, and standardises both kinds apart. Unrelated: the GTPO of arXiv:2508.03772, which
    skips negative updates of tokens that right and wrong responses share.
    """

    beta: float
    by: Uncertainty

    @property
    def formula(self) -> str:
        measure = "-logp" if self.by is Uncertainty.surprisal else "H"
        return (
            f"A_S * max(0, 1 + {{beta}} * (h / mean_i(h) - 1)), h = {measure} before the updates, its mean over the "
            "response's tokens in the loss"
        )

    def __post_init__(self) -> None:
        require_positive(self, "beta")

    @property
    def reads_entropy(self) -> bool:
        return self.by is Uncertainty.entropy

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        uncertainty = _read(entropy).double() if self.reads_entropy else -_read(logprobs).double()
        mean = row_mean(uncertainty, loss_mask)
        relative = torch.where(mean > CERTAIN, uncertainty / mean.clamp(min=CERTAIN), 1.0)
        return advantages * (1 + self.beta * (relative - 1)).clamp(min=0)


@dataclass(frozen=True)
class ProbabilityWeight(TokenCredit):
    """A smaller advantage for improbable tokens: Advantage Reweighting (Yang et al., arXiv:2505.12929).

    A_t = A * (alpha * p_t + 1 - alpha)

    The gradient of a token's log-prob grows with 1 - p, so improbable tokens dominate an update. Differs from
    GtpoWeight, which raises them. The mean weight is below 1, which lowers the step size; AdamW undoes most of that.
    """

    alpha: float

    formula: ClassVar[str] = "A_S * ({alpha} * exp(logp) + 1 - {alpha}), logp before the updates"

    def __post_init__(self) -> None:
        require_field(0 < self.alpha <= 1, self, "alpha", "in (0, 1]")

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        return advantages * (self.alpha * _read(logprobs).double().exp() + 1 - self.alpha)


@dataclass(frozen=True)
class EntropyAdvantage(TokenCredit):
    """An addition for tokens of high entropy, right or wrong (Cheng et al., arXiv:2506.14758).

    A_t = A + min(alpha * H_t, |A| / kappa), no gradient through H

    Tokens of right responses gain more and those of wrong ones lose less. The bound keeps the advantage's sign, and 0
    at 0. Differs from entropy=bonus: no gradient raises the entropy itself.
    """

    alpha: float
    kappa: float

    formula: ClassVar[str] = "A_S + min({alpha} * H, |A_S| / {kappa}), H before the updates"

    def __post_init__(self) -> None:
        require_positive(self, "alpha")
        require_field(self.kappa > 1, self, "kappa", "greater than 1, or an advantage could lose its sign")

    @property
    def reads_entropy(self) -> bool:
        return True

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        own = advantages.double()
        return own + torch.minimum(self.alpha * _read(entropy).double(), own.abs() / self.kappa)


@dataclass(frozen=True)
class ClipB(TokenCredit):
    """Advantage 0 for the tokens of wrong responses that would lower the entropy most (Clip_B, arXiv:2602.03392).

    A_t = 0 where A < 0 and D_t - mean D < -mu * std D,  D_t = p_t * (H_t + log p_t)

    To first order a step on a token's logit changes the entropy by -D times the step: D is negative for improbable
    tokens, and pushing these down makes the policy surer. Mean and deviation (ddof 0) are over all tokens in the loss
    of the rollout batch. Nothing happens where D is the same everywhere.
    Differs from Trinity-RFT, from which it is taken: the tokens leave the policy gradient only. They still count in the
    denominator and keep their KL and entropy terms, and log-probs are the learner's, not the sampler's.
    """

    mu: float

    reads_batch: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "0 where A_S < 0 and D - mean(D) < -{mu} * std(D), else A_S; D = exp(logp) * (H + logp) before the updates, "
        "mean and std over the batch's tokens in the loss"
    )

    def __post_init__(self) -> None:
        require_positive(self, "mu")

    @property
    def reads_entropy(self) -> bool:
        return True

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        logprobs: Float[Tensor, "N T"] | None,
        entropy: Float[Tensor, "N T"] | None,
        loss_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        if not loss_mask.any():
            return advantages
        own = _read(logprobs).double()
        slope = own.exp() * (_read(entropy).double() + own)
        off_mean = slope - slope[loss_mask].mean()
        deviation = off_mean[loss_mask].square().mean().sqrt()
        lowers = (advantages < 0) & (off_mean < -self.mu * deviation) & (deviation > EQUAL)
        return torch.where(lowers & loss_mask, 0.0, advantages)


def _read(values: Float[Tensor, "N T"] | None) -> Float[Tensor, "N T"]:
    assert values is not None, "the loop computes what an option reads"
    return values
