"""Importance: which ratio of learner to old policy the surrogate reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_positive
from grpo_lab.tricks.base import Trick, row_mean
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Importance(Trick, ABC):
    """Turns log-probs of learner and old policy into the log-ratio the surrogate reads.

    Differs from the papers: every option limits the log-ratio, since exp() of it overflows in fp32 beyond 88. A limit
    of 20 is far outside every trust region. `per_token`: each token has its own ratio. `averages`: the log-ratio is a
    mean over the response's tokens. `sequence_level`: the ratio has a gradient through every token of the row.
    """

    log_ratio_limit: float  # nats

    per_token: ClassVar[bool] = False
    averages: ClassVar[bool] = False
    sequence_level: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_positive(self, "log_ratio_limit")

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
    """

    is_no_op: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    formula: ClassVar[str] = "exp(logp - old)"

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        return (logprobs - old_logprobs).clamp(-self.log_ratio_limit, self.log_ratio_limit)


@dataclass(frozen=True)
class Sequence(Importance):
    """One ratio per response, the geometric mean of its tokens' ratios (GSPO, arXiv:2507.18071).

    log_ratio_t = mean over the row's loss tokens of (logprob - old_logprob), the same for all t

    Differs from Token: a response is clipped as a whole, and a mean of many log-ratios changes little, so clip widths
    are near 4e-4. An aggregation that weights rows by length (token_mean, constant) weights this ratio by length too;
    GSPO uses sequence_mean. A row with one token has Token's ratio.
    """

    averages: ClassVar[bool] = True
    sequence_level: ClassVar[bool] = True
    formula: ClassVar[str] = "exp(mean_t(logp - old))"

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        mean = row_mean(logprobs - old_logprobs, loss_mask)
        return mean.clamp(-self.log_ratio_limit, self.log_ratio_limit).expand_as(logprobs)


@dataclass(frozen=True)
class SequenceToken(Importance):
    """The value of Sequence's ratio, with each token's own gradient (GSPO-token, arXiv:2507.18071).

    log_ratio_t = sg(mean over the row's loss tokens of (logprob - old_logprob)) + logprob_t - sg(logprob_t)

    Equal to Sequence in value and gradient if advantage and loss mask are the same for every token of a row. Made for
    advantages that differ within a response. verl's "gspo" is this form.
    """

    averages: ClassVar[bool] = True
    formula: ClassVar[str] = "sg(exp(mean_t(logp - old))) * exp(logp - sg(logp))"

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        mean = row_mean(logprobs - old_logprobs, loss_mask).detach()
        return mean.clamp(-self.log_ratio_limit, self.log_ratio_limit) + logprobs - logprobs.detach()


@dataclass(frozen=True)
class SequenceProduct(Importance):
    """The value of the product of a response's ratios, with each token's own gradient (TOPR, arXiv:2503.14286).

    log_ratio_t = sg(sum over the row's loss tokens of (logprob - old_logprob)) + logprob_t - sg(logprob_t)

    The unbiased weight of a response, pi(o) / pi_old(o); with sequence_sum the gradient is that of the product itself.
    Differs from Sequence: without the mean, a small drift per token grows with the length. With ratio 1.1 per token the
    product is 2.6 over 10 tokens and 13,780 over 100, so a bound on it also bounds the length. ScaleRL
    (arXiv:2510.13786) writes GSPO's ratio this way. A row with one token has Token's ratio.
    """

    formula: ClassVar[str] = "sg(exp(sum_t(logp - old))) * exp(logp - sg(logp))"

    def __call__(
        self,
        logprobs: Float[Tensor, "M T"],
        old_logprobs: Float[Tensor, "M T"],
        loss_mask: Bool[Tensor, "M T"],
    ) -> Float[Tensor, "M T"]:
        whole = torch.where(loss_mask, logprobs - old_logprobs, 0.0).sum(dim=1, keepdim=True).detach()
        return whole.clamp(-self.log_ratio_limit, self.log_ratio_limit) + logprobs - logprobs.detach()
