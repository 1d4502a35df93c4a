"""Two surrogates that choose tokens by how log-prob and advantage vary together (arXiv:2505.22617).

A token of high covariance is a likely one that was rewarded, or an unlikely one that was punished: what takes
entropy away. They stand apart from `surrogate.py` because they read the whole optimiser step before its loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.shapes import Bool, Float, Tensor
from grpo_lab.tricks.base import require, require_positive
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.surrogate import Ppo, StepTokens, Surrogate, SurrogateInputs, SurrogateLoss, beyond

# Nats. Two fp32 passes over one token differ by far less on average; in the arithmetic world the largest gap was 6e-5,
# so a rare token is still pulled by rounding.
_ROUNDING = 1e-5


def covariance(tokens: StepTokens) -> Float[Tensor, "K"]:
    """(logprob - mean logprob) * (A - mean A) of each token, means over all the tokens given."""
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def number_of(share: float, total: int) -> int:
    """How many tokens a share is: rounded down, and at least one, as in the released code."""
    return min(total, max(1, int(share * total)))


@dataclass(frozen=True)
class ClipCov(Surrogate):
    """PPO that also takes the gradient of a few tokens of high covariance (Clip-Cov, arXiv:2505.22617).

    loss = Ppo's, detached on a random `share` of the step's tokens, drawn among those Ppo leaves alone and
    whose covariance lies in (cov_low, cov_high)

    Acts on-policy too, unlike every clip. The covariance is over the whole optimiser step and the draw is
    counter-based, so microbatches do not move it. Inert while no covariance reaches cov_low.
    """

    clip_low: float
    clip_high: float
    share: float
    cov_low: float
    cov_high: float
    scope: Scope

    needs_drift: ClassVar[bool] = False
    formula: ClassVar[str] = (
        "-min(r * A, clip(r, 1 - {clip_low}, 1 + {clip_high}) * A), detached on a random {share} of the {scope}'s "
        "tokens, among those with cov(logp, A) in ({cov_low}, {cov_high})"
    )

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high", "share")
        require(self.share <= 1, self, "share", "at most 1")
        require(self.cov_low < self.cov_high, self, "cov_low", f"below cov_high ({self.cov_high:g})")

    @property
    def mark_scope(self) -> Scope:
        return self.scope

    def mark(self, tokens: StepTokens) -> Bool[Tensor, "K"]:
        value = covariance(tokens)
        free = ~beyond(tokens.log_ratio.exp(), tokens.advantages, 1 - self.clip_low, 1 + self.clip_high)
        open_to_it = free & (value > self.cov_low) & (value < self.cov_high)
        number = number_of(self.share, len(value))
        drawn = torch.where(open_to_it, tokens.noise, torch.inf).argsort(stable=True)[:number]
        return torch.zeros_like(open_to_it).index_fill(0, drawn, True) & open_to_it

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        assert tokens.marked is not None, "the step's tokens are marked before its loss"
        clipped = Ppo(self.clip_low, self.clip_high)(tokens)
        loss = torch.where(tokens.marked, clipped.token_loss.detach(), clipped.token_loss)
        return SurrogateLoss(loss, clipped.weight * ~tokens.marked, clipped.touched | tokens.marked)


@dataclass(frozen=True)
class KlCov(Surrogate):
    """A penalty on the drift of the tokens of highest covariance (KL-Cov, arXiv:2505.22617).

    loss = -ratio * A, plus coef * |log ratio| on the `share` of the step's tokens of largest covariance

    No clip. With one on-policy update every log-ratio is 0 and the penalty has no gradient: inert there. Differs: a
    log-ratio below 1e-5 nats is taken for rounding and not punished, since the slope of |x| knows no small x.
    """

    share: float
    coef: float
    scope: Scope

    pulls_without_advantage: ClassVar[bool] = True
    formula: ClassVar[str] = "-r * A, + {coef} * |log r| on the {share} of the {scope}'s tokens of largest cov(logp, A)"

    def __post_init__(self) -> None:
        require_positive(self, "share", "coef")
        require(self.share <= 1, self, "share", "at most 1")

    @property
    def mark_scope(self) -> Scope:
        return self.scope

    def mark(self, tokens: StepTokens) -> Bool[Tensor, "K"]:
        largest = covariance(tokens).argsort(descending=True, stable=True)
        chosen = largest[: number_of(self.share, len(largest))]
        return torch.zeros(len(largest), dtype=torch.bool, device=largest.device).index_fill(0, chosen, True)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        assert tokens.marked is not None, "the step's tokens are marked before its loss"
        ratio = tokens.log_ratio.exp()
        touched = tokens.marked & (tokens.log_ratio.abs() > _ROUNDING)
        penalty = torch.where(touched, self.coef * tokens.log_ratio.abs(), 0.0)
        return SurrogateLoss(-ratio * tokens.advantages + penalty, ratio.detach(), touched)
