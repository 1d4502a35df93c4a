"""Correction: importance correction for sampler-learner mismatch.

Below, rho_t = old_t / sampler_t: a token's probability under the learner before the updates (`prox` in the formulas of
`grpo-lab explain`, whatever `old_policy` is), divided by its probability under the sampler. No weight carries gradient.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick, row_mean
from grpo_lab.types import Bool, Float, Tensor

_LOG_LIMIT = 20.0  # nats; far beyond every bound, and exp() overflows in fp32 only beyond 88


@dataclass(frozen=True)
class Correction(Trick, ABC):
    """Weights each token's surrogate loss; the weight carries no gradient.

    An option defines whether the ratio is per token or per row, and what happens to a ratio beyond its bounds.
    """

    needs_old_logprobs: ClassVar[bool] = True

    @abstractmethod
    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        """Learner / sampler, per token or per row. `log_ratio` is 0 where the mask is False."""

    @abstractmethod
    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        """The weight for each ratio."""

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
        redraw: Callable[[Float[Tensor, "N #T"]], Float[Tensor, "N #T"]] | None = None,
    ) -> Float[Tensor, "N T"]:
        """Weights for the surrogate; 1 on tokens outside `sampled_mask`.

        `redraw` replaces the factors by which the bounds change the ratios.
        """
        log_ratio = torch.where(sampled_mask, old_logprobs - sampler_logprobs, 0.0)
        ratios = self.ratios(log_ratio, sampled_mask)
        weights = self.bounded(ratios)
        if redraw is not None:
            weights = ratios * redraw(weights / ratios)
        return torch.where(sampled_mask, weights, 1.0)

    def beyond(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        """Sampled tokens whose ratio is beyond the bounds, so that their weight is not the ratio."""
        ratios = self.ratios(torch.where(sampled_mask, old_logprobs - sampler_logprobs, 0.0), sampled_mask)
        return sampled_mask & (self.bounded(ratios) != ratios)


def ratio(log_ratio: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """exp of a log-ratio that is clamped so that exp is finite."""
    return log_ratio.clamp(-_LOG_LIMIT, _LOG_LIMIT).exp()


def require_bounds(owner: object, low: str, high: str) -> None:
    """Check the bounds on a ratio: 0 <= low <= 1 <= high, high finite. At ratio 1 sampler and learner agree."""
    require_not_negative(owner, low)
    require_positive(owner, high)
    require_field(getattr(owner, low) <= 1, owner, low, "at most 1")
    require_field(getattr(owner, high) >= 1, owner, high, "at least 1")


@dataclass(frozen=True)
class NoCorrection(Correction):
    """Trust the sampler: every weight is 1."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "1"
    needs_old_logprobs: ClassVar[bool] = False

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return torch.ones_like(log_ratio)

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return ratios


@dataclass(frozen=True)
class TisToken(Correction):
    """Truncated importance sampling per token (Yao et al., "off-policy RL"; Olmo 3, arXiv:2512.13961).

    weight_t = clip(rho_t, floor, cap)

    With floor 0 it is one-sided: small ratios stay small, large ones stop at `cap`, so the expected weight is at
    most 1. Differs from NoCorrection only where sampler and learner disagree. With equal weights and numerics every
    weight is 1 up to rounding.
    """

    cap: float
    floor: float

    formula: ClassVar[str] = "clip(exp(prox - sampler), {floor}, {cap})"

    def __post_init__(self) -> None:
        require_bounds(self, "floor", "cap")

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return ratio(log_ratio)

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return ratios.clamp(self.floor, self.cap)


@dataclass(frozen=True)
class TisSequence(Correction):
    """Truncated importance sampling with the product of a response's token ratios (verl and TRL's "sequence").

    weight_i = min(prod_t rho_t, cap), on every token of the row

    This ratio makes the estimate for whole responses unbiased up to `cap`. The product grows with length: a mismatch
    of 1.1 per token is 2.6 after 10 tokens and 13,780 after 100, so long rows sit at the cap or near 0.
    """

    cap: float

    formula: ClassVar[str] = "min(exp(sum_t(prox - sampler)), {cap})"

    def __post_init__(self) -> None:
        require_positive(self, "cap")
        require_field(self.cap >= 1, self, "cap", "at least 1")

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return ratio(log_ratio.sum(dim=1, keepdim=True))

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return ratios.clamp(max=self.cap)


@dataclass(frozen=True)
class TisGeometric(Correction):
    """Truncated importance sampling with the geometric mean of a response's token ratios (ms-swift's "sequence").

    weight_i = min((prod_t rho_t)^(1 / tokens), cap), on every token of the row

    Differs from TisSequence: does not grow with length. It is no importance weight, so a bias remains.
    """

    cap: float

    formula: ClassVar[str] = "min(exp(mean_t(prox - sampler)), {cap})"

    def __post_init__(self) -> None:
        require_positive(self, "cap")
        require_field(self.cap >= 1, self, "cap", "at least 1")

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return ratio(row_mean(log_ratio, sampled_mask))

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return ratios.clamp(max=self.cap)


@dataclass(frozen=True)
class Mis(Correction):
    """Masked importance sampling of whole responses (Liu et al., "When Speed Kills Stability"; TRL "sequence_mask").

    weight_i = prod_t rho_t where it lies in [low, high], otherwise 0, on every token of the row

    Differs from TisSequence: a response beyond the bounds gets weight 0 instead of `cap`. Its tokens still count in
    the denominators and the statistics; to remove them there too, use the rejection axis.
    """

    low: float
    high: float

    formula: ClassVar[str] = "q where {low} <= q <= {high} else 0, q = exp(sum_t(prox - sampler))"

    def __post_init__(self) -> None:
        require_bounds(self, "low", "high")

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return ratio(log_ratio.sum(dim=1, keepdim=True))

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return torch.where((ratios >= self.low) & (ratios <= self.high), ratios, 0.0)


@dataclass(frozen=True)
class Icepop(Correction):
    """Masked importance sampling of tokens (IcePop, arXiv:2510.18855).

    weight_t = rho_t where it lies in [low, high], otherwise 0

    Differs from TisToken: a token beyond either bound gets weight 0 instead of the bound.
    """

    low: float
    high: float

    formula: ClassVar[str] = "q where {low} <= q <= {high} else 0, q = exp(prox - sampler)"

    def __post_init__(self) -> None:
        require_bounds(self, "low", "high")

    def ratios(self, log_ratio: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N #T"]:
        return ratio(log_ratio)

    def bounded(self, ratios: Float[Tensor, "N #T"]) -> Float[Tensor, "N #T"]:
        return torch.where((ratios >= self.low) & (ratios <= self.high), ratios, 0.0)
