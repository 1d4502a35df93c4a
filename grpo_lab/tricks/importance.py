"""Importance: the ratio of what."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.tricks.base import Trick, require_positive, row_mean
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Importance(Trick, ABC):
    """Turns log-probs of learner and old policy into the log-ratio the surrogate reads.

    Differs from the papers: every option limits the log-ratio, since exp() of it overflows in fp32 beyond 88; at
    a limit of 20 every trust region has long cut the token off. `per_token`: the ratio is each token's own.
    `averages`: it is a mean over the response's tokens. `sequence_level`: it moves with every token of the row.
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

    touches_nothing: ClassVar[bool] = True
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

    Differs from Token: a response is cut or kept whole, and a mean of many logs moves little, so clip widths
    are near 4e-4. Weighing rows by length (token_mean, constant) would weigh this ratio by length too; GSPO
    uses sequence_mean. A row with one token has Token's ratio.
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
    """The response's ratio as a value, each token's own gradient (GSPO-token, arXiv:2507.18071).

    log_ratio_t = sg(mean over the row's loss tokens of (logprob - old_logprob)) + logprob_t - sg(logprob_t)

    Equal to Sequence, value and gradient, where the advantage and the loss mask are the same for every token
    of a row; made for advantages that differ within a response. verl's "gspo" is this form.
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
    """The product of a response's ratios as a value, each token's own gradient (TOPR, arXiv:2503.14286).

    log_ratio_t = sg(sum over the row's loss tokens of (logprob - old_logprob)) + logprob_t - sg(logprob_t)

    The unbiased weight of a response, pi(o) / pi_old(o); with sequence_sum the gradient is that of the product itself.
    Differs from Sequence: without the mean a small drift of every token grows with the length, to 2.6 over 10 tokens of
    ratio 1.1 and to 13,780 over 100, so a bound on it is a bound on length too. ScaleRL (arXiv:2510.13786) writes
    GSPO's ratio this way. A row with one token has Token's ratio.
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
