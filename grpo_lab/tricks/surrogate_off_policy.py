"""Surrogates made for stale data: masks and weights by how far the policy has moved. More are in surrogate.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import NEGLIGIBLE
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.surrogate import Ppo, StepTokens, Surrogate, SurrogateInputs, SurrogateLoss
from grpo_lab.types import Bool, Float, Tensor


def _weighted(tokens: SurrogateInputs, weight: Tensor, affected: Tensor) -> SurrogateLoss:
    """-sg(weight) * A * logprob."""
    weight = weight.detach()
    return SurrogateLoss(-weight * tokens.advantages * tokens.logprobs, weight, affected)


@dataclass(frozen=True)
class Ipo(Surrogate):
    """A trust region on probabilities that ignores the advantage's sign (prime-rl's IPO).

    loss = -keep * ratio * A + kl_tau * (log ratio)^2,  keep = |pi - old| <= eps

    Differs from Dppo (arXiv:2602.04879): a token leaves whichever way its advantage pushes, its ratio carries gradient
    and has no cap, and Kimi K2.5's penalty (arXiv:2602.02276) acts on every token, masked ones too. The old policy is
    the sampler: old_policy=sampler. prime-rl's defaults changed from eps 0.1 with kl_tau 0.001 to eps 0.3 without a
    penalty.
    """

    eps: float  # probability
    kl_tau: float

    needs_token_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = "-r * A where |pi - old| <= {eps} else 0, + {kl_tau} * (log r)^2"

    def __post_init__(self) -> None:
        require_positive(self, "eps")
        require_not_negative(self, "kl_tau")

    @property
    def pulls_without_advantage(self) -> bool:
        return self.kl_tau > 0

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        now, log_ratio = tokens.logprobs.detach(), tokens.log_ratio
        outside = (now.exp() - (now - log_ratio.detach()).exp()).abs() > self.eps
        ratio = torch.where(outside, 0.0, log_ratio.exp())
        loss = -ratio * tokens.advantages + self.kl_tau * log_ratio**2
        return SurrogateLoss(loss, ratio.detach(), outside)


@dataclass(frozen=True)
class RatioMask(Surrogate):
    """The importance-weighted policy gradient of the tokens whose ratio is near 1 (GLM-5, arXiv:2602.15763).

    loss = -sg(ratio * keep) * A * logprob,  keep = 1 - clip_low <= ratio <= 1 + clip_high

    Differs from Ppo: a token outside leaves whichever way its advantage pushes. Differs from Cispo: it leaves, instead
    of keeping the bound as its weight. GLM-5 takes the ratio against the sampler: old_policy=sampler.
    """

    clip_low: float
    clip_high: float

    formula: ClassVar[str] = "-sg(r) * A * logp where 1 - {clip_low} <= r <= 1 + {clip_high} else 0"

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio = tokens.log_ratio.detach().exp()
        outside = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        return _weighted(tokens, torch.where(outside, 0.0, ratio), outside)


@dataclass(frozen=True)
class KimiToken(RatioMask):
    """RatioMask with a penalty on every token's drift (Kimi K2.5, arXiv:2602.02276, eq. 1).

    loss = -sg(ratio * keep) * A * logprob + kl_tau * (log ratio)^2,  keep = 1 - clip_low <= ratio <= 1 + clip_high

    Masked tokens pay the penalty too, so it pulls them back. The paper bounds the log-ratio, which is the same band.
    Differs from Kimi: one term per token instead of the square of the response's sum. Differs from Ipo: the band is on
    the ratio instead of the probability. The old policy is the one that sampled: old_policy=sampler.
    """

    kl_tau: float

    needs_token_ratio: ClassVar[bool] = True
    pulls_without_advantage: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "-sg(r) * A * logp where 1 - {clip_low} <= r <= 1 + {clip_high} else 0, + {kl_tau} * (log r)^2"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "kl_tau")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        masked = super().__call__(tokens)
        return replace(masked, token_loss=masked.token_loss + self.kl_tau * tokens.log_ratio**2)


@dataclass(frozen=True)
class Sppo(Surrogate):
    """The log-ratio in place of the ratio, inside a symmetric band (softmax PPO, arXiv:2108.05828; Trinity-RFT).

    loss = -A * log ratio * keep,  keep = 1 / (1 + clip) <= ratio <= 1 + clip

    The gradient is the plain policy gradient of the tokens within the band. Differs from Ppo: no token is weighted by
    its ratio, and one outside leaves whichever way its advantage pushes.
    """

    clip: float

    needs_token_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = "-A * log r where 1 / (1 + {clip}) <= r <= 1 + {clip} else 0"

    def __post_init__(self) -> None:
        require_positive(self, "clip")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio = tokens.log_ratio.detach().exp()
        outside = (ratio < 1 / (1 + self.clip)) | (ratio > 1 + self.clip)
        keep = (~outside).to(ratio.dtype)
        return SurrogateLoss(-keep * tokens.advantages * tokens.log_ratio, keep, outside)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return torch.ones_like(tokens.advantages)


class TokenWeight(Enum):
    """The weight of a kept token: 1, or its ratio."""

    one = "one"
    ratio = "ratio"

    def of(self, ratio: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return ratio if self is TokenWeight.ratio else torch.ones_like(ratio)

    @property
    def factor(self) -> str:
        """The factor before the advantage in a formula."""
        return "sg(r) * " if self is TokenWeight.ratio else ""


@dataclass(frozen=True)
class RecOneSide(Surrogate):
    """REINFORCE without the tokens that moved too far the way their advantage pushes (REC, arXiv:2509.24203).

    loss = -sg(w) * A * logprob * keep,  keep = ratio <= 1 + clip where A >= 0, ratio >= 1 - clip where A <= 0

    `weight: ratio` has Ppo's gradient. With weight 1 there is no importance weight, and only the band limits off-policy
    tokens.
    """

    clip: float
    weight: TokenWeight

    @property
    def formula(self) -> str:
        bounds = "r <= 1 + {clip} if A >= 0, r >= 1 - {clip} if A <= 0"
        return f"-{self.weight.factor}A * logp where {bounds}, else 0"

    def __post_init__(self) -> None:
        require_positive(self, "clip")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages = tokens.log_ratio.detach().exp(), tokens.advantages
        outside = ((ratio > 1 + self.clip) & (advantages >= 0)) | ((ratio < 1 - self.clip) & (advantages <= 0))
        return _weighted(tokens, torch.where(outside, 0.0, self.weight.of(ratio)), outside)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return self.weight.of(tokens.log_ratio.detach().exp())


@dataclass(frozen=True)
class RecRing(Surrogate):
    """REINFORCE of the tokens near ratio 1, and of those far away that their advantage pulls back (arXiv:2509.24203).

    loss = -sg(w) * A * logprob * keep
    keep = 1 - clip <= ratio <= 1 + clip, or ratio <= 1 - far where A >= 0, or ratio >= 1 + far where A <= 0

    Differs from RecOneSide: tokens between `clip` and `far` leave whichever way their advantage pushes.
    """

    clip: float
    far: float
    weight: TokenWeight

    @property
    def formula(self) -> str:
        ring = "r <= 1 - {far} if A >= 0, or r >= 1 + {far} if A <= 0"
        inside = "1 - {clip} <= r <= 1 + {clip}"
        return f"-{self.weight.factor}A * logp where {inside}, or {ring}, else 0"

    def __post_init__(self) -> None:
        require_positive(self, "clip", "far")
        require_field(self.far >= self.clip, self, "far", f"at least clip ({self.clip:g})")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages = tokens.log_ratio.detach().exp(), tokens.advantages
        inside = (ratio >= 1 - self.clip) & (ratio <= 1 + self.clip)
        returns = ((advantages >= 0) & (ratio <= 1 - self.far)) | ((advantages <= 0) & (ratio >= 1 + self.far))
        outside = ~(inside | returns)
        return _weighted(tokens, torch.where(outside, 0.0, self.weight.of(ratio)), outside)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return self.weight.of(tokens.log_ratio.detach().exp())


@dataclass(frozen=True)
class Vespo(Surrogate):
    """A smooth weight that peaks near ratio 1 and vanishes on both sides (VESPO, arXiv:2602.10693).

    loss = -sg(phi) * A * logprob,  phi = exp(lam + k * ln w - lam * w)

    w is the ratio of the importance axis, ln w within [ln 1e-8, 20]; the paper's is the whole response's,
    importance=sequence_product. phi is 1 at w = 1 and largest at w = k / lam. Differs from Sapo: it multiplies the
    log-prob and carries no gradient.
    """

    k_positive: float
    lam_positive: float
    k_negative: float
    lam_negative: float

    formula: ClassVar[str] = (
        "-sg(phi) * A * logp, phi = exp(lam + k * log r - lam * r), "
        "(k, lam) = ({k_positive}, {lam_positive}) if A >= 0 else ({k_negative}, {lam_negative})"
    )

    def __post_init__(self) -> None:
        require_positive(self, "k_positive", "lam_positive", "k_negative", "lam_negative")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        rises = tokens.advantages >= 0
        log_w = tokens.log_ratio.detach().clamp(math.log(1e-8), 20.0)
        k = torch.full_like(log_w, self.k_negative).masked_fill(rises, self.k_positive)
        lam = torch.full_like(log_w, self.lam_negative).masked_fill(rises, self.lam_positive)
        weight = (lam + k * log_w - lam * log_w.exp()).exp()
        return _weighted(tokens, weight, (weight - 1).abs() > NEGLIGIBLE)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return torch.ones_like(tokens.advantages)


@dataclass(frozen=True)
class Dro(Surrogate):
    """The policy gradient with a quadratic penalty on each token's log-ratio (DRO, arXiv:2405.19107; verl's "dro").

    loss = -A * logprob + beta / 2 * (log ratio)^2

    Differs from Kimi: the log-ratio of each token is squared, and not that of the response.
    """

    beta: float

    needs_token_ratio: ClassVar[bool] = True
    pulls_without_advantage: ClassVar[bool] = True
    formula: ClassVar[str] = "-A * logp + {beta} / 2 * (log r)^2"

    def __post_init__(self) -> None:
        require_positive(self, "beta")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        loss = -tokens.advantages * tokens.logprobs + self.beta / 2 * tokens.log_ratio**2
        affected = self.beta * tokens.log_ratio.detach().abs() > NEGLIGIBLE
        return SurrogateLoss(loss, torch.ones_like(loss), affected)


@dataclass(frozen=True)
class Fipo(Surrogate):
    """PPO's term weighted by how far the rest of the response has moved (FIPO, arXiv:2603.19835; ms-swift).

    loss = sg(w_t) * Ppo's,  w_t = clip(exp(sum_{u >= t} 2^(-(u - t) / half_life) * log ratio_u), 1 - low, 1 + high)

    Tokens before a part that became more likely count more. Where A < 0 and the ratio exceeds `safe_ratio`, w_t is
    then clipped to [1 - safe_low, 1], as in the released code: with low = 0 it is 1 there. With one on-policy update
    every w_t is 1. Differs from the released code: no dual clip, and tokens of a large ratio stay in the sum.
    """

    clip_low: float
    clip_high: float
    half_life: float  # tokens
    low: float
    high: float
    safe_ratio: float
    safe_low: float

    needs_token_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "-w * min(r * A, clip(r, 1 - {clip_low}, 1 + {clip_high}) * A), w = clip(exp(sum_u>=t 2^(-(u - t) / "
        "{half_life}) * log r_u), 1 - {low}, 1 + {high}), then to [1 - {safe_low}, 1] where A < 0 and r > {safe_ratio}"
    )

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high", "half_life", "safe_ratio")
        require_not_negative(self, "high")
        for name in ("low", "safe_low"):
            require_field(0 <= getattr(self, name) < 1, self, name, "in [0, 1)")

    @property
    def clip_width(self) -> float:
        return min(self.clip_low, self.clip_high)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        clipped = Ppo(self.clip_low, self.clip_high)(tokens)
        log_ratio = tokens.log_ratio.detach()
        ahead = discounted_rest(torch.where(tokens.loss_mask, log_ratio, 0.0), self.half_life).exp()
        weight = ahead.clamp(1 - self.low, 1 + self.high)
        wary = (tokens.advantages < 0) & (log_ratio.exp() > self.safe_ratio)
        weight = torch.where(wary, weight.clamp(1 - self.safe_low, 1.0), weight)
        affected = clipped.affected | ((weight - 1).abs() > NEGLIGIBLE)
        return SurrogateLoss(weight * clipped.token_loss, weight * clipped.weight, affected)


def discounted_rest(values: Float[Tensor, "M T"], half_life: float) -> Float[Tensor, "M T"]:
    """sum_{u >= t} 2^(-(u - t) / half_life) * values_u at each t.

    Blocks of 32 half-lives are summed at once in float64: a power of 2^(-1/half_life) over a whole response underflows.
    """
    width, block = values.shape[1], max(1, int(32 * half_life))
    found, following = torch.zeros_like(values), values.new_zeros(values.shape[0], 1, dtype=torch.float64)
    for start in reversed(range(0, width, block)):
        part = values[:, start : start + block].double()
        powers = torch.arange(part.shape[1], device=values.device, dtype=torch.float64) / -half_life
        decayed = torch.exp2(powers)
        inside = (part * decayed).flip(1).cumsum(1).flip(1) / decayed
        rest = inside + following * torch.exp2(powers.flip(0) - 1 / half_life)
        found[:, start : start + block], following = rest.to(values.dtype), rest[:, :1]
    return found


@dataclass(frozen=True)
class M2po(Surrogate):
    """Drops the tokens that moved most, until the second moment of the rest is small (M2PO, arXiv:2510.01161).

    loss = -ratio * A, detached on the tokens of largest (log ratio)^2, as many as bring the mean over the rest to
    `bound`; among the tokens of the step whose advantage pushes them further away (A > 0 with ratio > 1, A < 0 with
    ratio < 1)

    Differs from Ppo: no bound on a single token, so rare large ratios stay while most tokens are near 1. Dropped tokens
    still count in the denominator. The paper takes the ratio against the sampler: old_policy=sampler.
    """

    bound: float
    scope: Scope

    needs_token_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "-r * A, detached on the tokens of the {scope} of largest (log r)^2, until its mean over the rest is at most "
        "{bound}; among those that A pushes further from r = 1"
    )

    def __post_init__(self) -> None:
        require_positive(self, "bound")

    @property
    def mark_scope(self) -> Scope:
        return self.scope

    def mark(self, tokens: StepTokens) -> Bool[Tensor, "K"]:
        pushed = tokens.advantages * tokens.log_ratio > 0
        squares = torch.where(pushed, tokens.log_ratio.double() ** 2, torch.inf)
        order = squares.argsort(stable=True)  # tokens that are not pushed come last
        number = torch.arange(1, len(order) + 1, device=order.device)
        stays = (squares[order].cumsum(0) / number <= self.bound) | torch.isinf(squares[order])
        return torch.empty_like(pushed).index_copy(0, order, ~stays)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        assert tokens.marked is not None, "the step's tokens are marked before its loss"
        ratio = tokens.log_ratio.exp()
        loss = -ratio * tokens.advantages
        return SurrogateLoss(
            torch.where(tokens.marked, loss.detach(), loss), ratio.detach() * ~tokens.marked, tokens.marked
        )
