"""Surrogate: the trust region around the old policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.renamed import renamed_fields
from grpo_lab.tricks.base import NEGLIGIBLE, Trick, row_mean
from grpo_lab.tricks.convention import CapForm, Scope
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class SurrogateInputs:
    """Inputs of a surrogate for a microbatch; entries outside `loss_mask` are meaningless.

    `logprobs` and `log_ratio` carry gradient; the importance axis computes `log_ratio`. `marked` are the tokens that
    `Surrogate.mark` chose.
    """

    logprobs: Float[Tensor, "M T"]
    log_ratio: Float[Tensor, "M T"]
    advantages: Float[Tensor, "M T"]
    loss_mask: Bool[Tensor, "M T"]
    marked: Bool[Tensor, "M T"] | None = None


@renamed_fields(touched="affected")
@dataclass(frozen=True)
class SurrogateLoss:
    """`token_loss` per token; `weight` multiplies -A * grad logprob in it; `affected`: changed by the trust region."""

    token_loss: Float[Tensor, "M T"]
    weight: Float[Tensor, "M T"]
    affected: Bool[Tensor, "M T"]


@dataclass(frozen=True)
class StepTokens:
    """All tokens in the loss of one optimiser step, flattened, for statistics over the step.

    `noise` is one uniform number per token, a function of seed, step, problem, response and position only.
    """

    logprobs: Float[Tensor, "K"]
    log_ratio: Float[Tensor, "K"]
    advantages: Float[Tensor, "K"]
    noise: Float[Tensor, "K"]


@dataclass(frozen=True)
class Surrogate(Trick, ABC):
    """The policy loss per token, to be minimised.

    `uses_ratio`: reads the ratio. `needs_drift`: is the plain policy gradient where every ratio is 1.
    `needs_token_ratio`: only valid with per-token ratios. `sequence_level`: every token of a row carries the row's
    loss. `squares_rows`: its terms must be summed over a row. `pulls_without_advantage`: moves tokens with advantage
    0 too. `mark_scope`: the tokens among which `mark` chooses; None if it chooses none.
    """

    uses_ratio: ClassVar[bool] = True
    needs_drift: ClassVar[bool] = True
    needs_token_ratio: ClassVar[bool] = False
    sequence_level: ClassVar[bool] = False
    squares_rows: ClassVar[bool] = False
    pulls_without_advantage: ClassVar[bool] = False

    @property
    def mark_scope(self) -> Scope | None:
        return None

    @property
    def weight_at_ratio_one(self) -> float:
        """The weight of every token when all ratios are 1; 1 too where tokens differ in it."""
        return 1.0

    @property
    def clip_width(self) -> float | None:
        """The narrower side of the clip on the ratio; None without a clip."""
        return None

    @abstractmethod
    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        """Per-token loss before any weight, penalty or aggregation."""

    def mark(self, tokens: StepTokens) -> Bool[Tensor, "K"]:
        """Choose the tokens for `marked`. Called without gradient, once per optimiser step (or microbatch)."""
        raise TypeError(f"{type(self).__name__} chooses no tokens: its mark_scope is None")

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        """The weight of a token inside the trust region, without gradient."""
        return tokens.log_ratio.detach().exp() if self.uses_ratio else torch.ones_like(tokens.advantages)

    def with_factors(self, tokens: SurrogateInputs, factors: Float[Tensor, "M T"]) -> SurrogateLoss:
        """-sg(open weight * factor) * A * logprob: the loss of a trust region whose factors are given."""
        weight = self.open_weight(tokens) * factors
        loss = -weight * tokens.advantages * tokens.logprobs
        return SurrogateLoss(loss, weight, (factors - 1).abs() > NEGLIGIBLE)


def beyond(ratio: Float[Tensor, "*n"], advantages: Float[Tensor, "*n"], low: float, high: float) -> Bool[Tensor, "*n"]:
    """Tokens outside [low, high] on the side their advantage pushes them to. PPO removes their gradient."""
    return ((advantages > 0) & (ratio > high)) | ((advantages < 0) & (ratio < low))


@dataclass(frozen=True)
class Ppo(Surrogate):
    """The clipped surrogate of PPO (arXiv:1707.06347). With clip_high > clip_low it is DAPO's clip-higher.

    loss = -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    A token loses its whole gradient once its ratio is beyond the bound on the side its advantage pushes it to. DAPO
    (arXiv:2503.14476) raises the upper bound because 1 + clip_high limits how much a rare token can gain per step.
    A no-op with one on-policy update: every ratio is 1.
    """

    clip_low: float
    clip_high: float

    formula: ClassVar[str] = "-min(r * A, clip(r, 1 - {clip_low}, 1 + {clip_high}) * A)"

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high")

    @property
    def clip_width(self) -> float:
        return min(self.clip_low, self.clip_high)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        outside = beyond(ratio, advantages, 1 - self.clip_low, 1 + self.clip_high)
        loss = -torch.minimum(ratio * advantages, clipped * advantages)
        return SurrogateLoss(loss, ratio.detach() * ~outside, outside)


@dataclass(frozen=True)
class DualClip(Surrogate):
    """PPO with a second clip for negative advantages (Ye et al., arXiv:1912.09729); verl's default.

    loss = Ppo's, and for A < 0 at most -bound * A

    Differs from Ppo: a token with A < 0 loses its gradient once its ratio exceeds `bound`. In Ppo its loss grows
    without limit.
    """

    clip_low: float
    clip_high: float
    bound: float

    formula: ClassVar[str] = "-min(r * A, clip(r, 1 - {clip_low}, 1 + {clip_high}) * A), for A < 0 at most -{bound} * A"

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high", "bound")
        require_field(
            self.bound > 1 + self.clip_high, self, "bound", f"greater than 1 + clip_high ({1 + self.clip_high:g})"
        )

    @property
    def clip_width(self) -> float:
        return min(self.clip_low, self.clip_high)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        single = Ppo(self.clip_low, self.clip_high)(tokens)
        advantages = tokens.advantages
        loss = torch.where(
            advantages < 0, torch.minimum(single.token_loss, -self.bound * advantages), single.token_loss
        )
        outside = single.affected | ((advantages < 0) & (tokens.log_ratio.exp() > self.bound))
        return SurrogateLoss(loss, single.weight * ~outside, outside)


@dataclass(frozen=True)
class Cispo(Surrogate):
    """A bounded weight on the policy gradient that zeroes no token's gradient (MiniMax-M1, arXiv:2506.13585, eq. 4).

    loss = -sg(clip(ratio, 1 - clip_low, cap)) * A * logprob

    Differs from Ppo: a token beyond the bound keeps its gradient, at the bounded weight. `cap` bounds the
    weight itself; with `cap_form: one_plus` the bound is 1 + cap. `clip_low: 1` means no lower bound. A cap below 1
    scales the whole loss: what is left is REINFORCE at a lower rate, as with TRL's default of 0.2. ScaleRL takes the
    ratio against the sampler: old_policy=sampler.
    """

    cap: float
    clip_low: float
    cap_form: CapForm

    @property
    def formula(self) -> str:
        top = "{cap}" if self.cap_form is CapForm.absolute else "1 + {cap}"
        return f"-sg(clip(r, 1 - {{clip_low}}, {top})) * A * logp"

    def __post_init__(self) -> None:
        require_positive(self, "cap")
        require_field(0 <= self.clip_low <= 1, self, "clip_low", "in [0, 1]; 1 is no lower bound")
        require_field(self.largest > 1 - self.clip_low, self, "cap", "above the lower bound of the weight")

    @property
    def largest(self) -> float:
        """The largest weight a token can have."""
        return self.cap if self.cap_form is CapForm.absolute else 1 + self.cap

    @property
    def weight_at_ratio_one(self) -> float:
        return min(1.0, self.largest)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio = tokens.log_ratio.detach().exp()
        weight = ratio.clamp(1 - self.clip_low, self.largest)
        return SurrogateLoss(-weight * tokens.advantages * tokens.logprobs, weight, weight != ratio)


@dataclass(frozen=True)
class Reinforce(Surrogate):
    """The plain policy gradient, no ratio and no trust region (Williams 1992).

    loss = -A * logprob

    Differs from Ppo: off-policy tokens are neither reweighted nor clipped. On-policy the gradients agree.
    """

    is_no_op: ClassVar[bool] = True
    uses_ratio: ClassVar[bool] = False
    needs_drift: ClassVar[bool] = False
    formula: ClassVar[str] = "-A * logp"

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        nothing = torch.zeros_like(tokens.loss_mask)
        return SurrogateLoss(-tokens.advantages * tokens.logprobs, torch.ones_like(tokens.advantages), nothing)


@dataclass(frozen=True)
class Delight(Surrogate):
    """The policy gradient times a gate of advantage and surprisal (Delightful Policy Gradient, arXiv:2603.14608).

    loss = -sg(sigmoid(A * -logprob / eta)) * A * logprob

    Rare tokens of right responses keep nearly their whole gradient and those of wrong ones nearly none; a certain token
    has half of it. Differs from Reinforce by the gate, whose mean near 1/2 also halves the step. Differs from
    token_credit, whose weights are of the policy before the updates: the log-prob is the learner's now.
    """

    eta: float

    uses_ratio: ClassVar[bool] = False
    needs_drift: ClassVar[bool] = False
    formula: ClassVar[str] = "-sg(sigmoid(A * -logp / {eta})) * A * logp"

    def __post_init__(self) -> None:
        require_positive(self, "eta")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        advantages, logprobs = tokens.advantages, tokens.logprobs
        gate = torch.sigmoid(-advantages * logprobs.detach() / self.eta)
        affected = ((1 - gate) > NEGLIGIBLE) & (advantages != 0)
        return SurrogateLoss(-gate * advantages * logprobs, gate, affected)


@dataclass(frozen=True)
class Sapo(Surrogate):
    """A smooth gate instead of the clip (SAPO, arXiv:2511.20347).

    loss = -(4 / tau) * sigmoid(tau * (ratio - 1)) * A,  tau by the sign of A

    Differs from Ppo: the gradient fades as the ratio leaves 1 instead of ending at a bound. The factor 4/tau
    makes the slope at ratio 1 exactly 1. The paper uses sequence_mean.
    """

    tau_positive: float
    tau_negative: float

    formula: ClassVar[str] = (
        "-(4 / tau) * sigmoid(tau * (r - 1)) * A, tau = {tau_positive} if A > 0 else {tau_negative}"
    )

    def __post_init__(self) -> None:
        require_positive(self, "tau_positive", "tau_negative")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio, advantages = tokens.log_ratio.exp(), tokens.advantages
        tau = torch.full_like(advantages, self.tau_negative).masked_fill(advantages > 0, self.tau_positive)
        gate = torch.sigmoid(tau * (ratio - 1))
        with torch.no_grad():
            weight = 4 * gate * (1 - gate) * ratio
            affected = (weight - ratio).abs() > NEGLIGIBLE * ratio
        return SurrogateLoss(-4 / tau * gate * advantages, weight, affected)


@dataclass(frozen=True)
class Gmpo(Surrogate):
    """PPO's clip on each token, then the geometric mean of the response's ratios (GMPO, arXiv:2507.20673).

    loss_i = -A_i * exp(mean_t(log of the clipped ratio_t))         clip in log space, +-clip

    Every token carries its row's loss, so sequence_mean gives the paper's average over responses. Differs from Ppo:
    one extreme ratio changes the response's weight only by its share. Differs from GSPO: the clip is per token.
    """

    clip_low: float  # nats
    clip_high: float  # nats

    needs_token_ratio: ClassVar[bool] = True
    sequence_level: ClassVar[bool] = True
    formula: ClassVar[str] = "-A * exp(mean_t(log r, cut where A pushes it out of [-{clip_low}, {clip_high}]))"

    def __post_init__(self) -> None:
        require_positive(self, "clip_low", "clip_high")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        advantages = tokens.advantages
        clipped = tokens.log_ratio.clamp(-self.clip_low, self.clip_high)
        outside = beyond(tokens.log_ratio, advantages, -self.clip_low, self.clip_high)
        mean = row_mean(torch.where(outside, clipped, tokens.log_ratio), tokens.loss_mask)
        row_ratio = mean.exp().expand_as(advantages)
        return SurrogateLoss(-row_ratio * advantages, row_ratio.detach() * ~outside, outside)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return row_mean(tokens.log_ratio.detach(), tokens.loss_mask).exp().expand_as(tokens.advantages)


class Divergence(Enum):
    """How the change of a token's probability p is measured: total variation or KL of (p, 1 - p)."""

    tv = "tv"
    kl = "kl"


@dataclass(frozen=True)
class Dppo(Surrogate):
    """A trust region on probabilities instead of ratios (DPPO, arXiv:2602.04879).

    loss = -sg(min(ratio, cap) * keep) * A * logprob
    keep = False where A pushes on and divergence(old, pi) > delta;  tv: |pi - old|, kl: KL of two Bernoullis

    Differs from Ppo: a rare token may multiply its probability as long as it gains little probability mass, and a
    frequent token is stopped at a small ratio. The paper's old policy is the sampler: old_policy=sampler.
    """

    divergence: Divergence
    delta: float  # probability, or nats
    cap: float

    needs_token_ratio: ClassVar[bool] = True
    formula: ClassVar[str] = "-sg(min(r, {cap})) * A * logp, 0 where A pushes on and {divergence}(old, pi) > {delta}"

    def __post_init__(self) -> None:
        require_positive(self, "delta", "cap")

    @property
    def weight_at_ratio_one(self) -> float:
        return min(1.0, self.cap)

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        log_ratio, logprobs = tokens.log_ratio.detach(), tokens.logprobs.detach()
        now, before = logprobs.exp(), (logprobs - log_ratio).exp()
        moved = (now - before).abs()
        if self.divergence is Divergence.kl:
            rest_now, rest_before = (1 - now).clamp(min=1e-12), (1 - before).clamp(min=1e-12)
            moved = -before * log_ratio + rest_before * (rest_before / rest_now).log()
        outside = (moved > self.delta) & (tokens.advantages * (now - before) > 0)
        weight = self.open_weight(tokens) * ~outside
        return SurrogateLoss(-weight * tokens.advantages * tokens.logprobs, weight, outside)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return tokens.log_ratio.detach().exp().clamp(max=self.cap)


@dataclass(frozen=True)
class Kimi(Surrogate):
    """Online mirror descent (Kimi k1.5, arXiv:2501.12599, eq. 3).

    loss_i = -A_i * logprob(response) + tau / 2 * (log-ratio of the response)^2

    The response's summed log-ratio is squared. A sum of squared token log-ratios would be smaller by orders of
    magnitude on long responses with small drift. Each token carries its own log-ratio times the response's, so
    sequence_sum adds up to the formula. The old policy is the paper's pi_i.
    """

    tau: float

    needs_token_ratio: ClassVar[bool] = True
    squares_rows: ClassVar[bool] = True
    pulls_without_advantage: ClassVar[bool] = True
    formula: ClassVar[str] = "-A * logp + {tau} / 2 * log r * sum_t(log r)"

    def __post_init__(self) -> None:
        require_not_negative(self, "tau")

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        drift = torch.where(tokens.loss_mask, tokens.log_ratio, 0.0)
        whole = drift.sum(dim=1, keepdim=True)
        loss = -tokens.advantages * tokens.logprobs + self.tau / 2 * drift * whole
        affected = (self.tau * whole.detach().abs() > NEGLIGIBLE).expand_as(tokens.loss_mask)
        return SurrogateLoss(loss, torch.ones_like(loss), affected)


@dataclass(frozen=True)
class Topr(Surrogate):
    """Weight 1 for right answers, and the ratio, at most 1, for wrong ones (TOPR, arXiv:2503.14286).

    loss = -sg(weight) * A * logprob;  weight = 1 if A > 0 else clip(ratio, 0, 1)

    Differs from Ppo: off-policy right answers are learned like demonstrations, and a wrong answer loses weight as the
    policy makes it less likely. The importance axis defines the ratio; the paper uses the whole response's,
    importance=sequence_product. Right and wrong mean A > 0 and A < 0.
    """

    formula: ClassVar[str] = "-sg(1 if A > 0 else min(r, 1)) * A * logp"

    def __call__(self, tokens: SurrogateInputs) -> SurrogateLoss:
        ratio = tokens.log_ratio.detach().exp()
        weight = torch.where(tokens.advantages < 0, ratio.clamp(max=1.0), 1.0)
        affected = (weight - 1).abs() > NEGLIGIBLE
        return SurrogateLoss(-weight * tokens.advantages * tokens.logprobs, weight, affected)

    def open_weight(self, tokens: SurrogateInputs) -> Float[Tensor, "M T"]:
        return torch.ones_like(tokens.advantages)


# Nats. Two fp32 passes over one token differ by far less on average. The largest gap in the arithmetic world was 6e-5,
# so a few tokens still get a penalty that is only rounding.
_COVARIANCE_ROUNDING = 1e-5


def covariance(tokens: StepTokens) -> Float[Tensor, "K"]:
    """(logprob - mean logprob) * (A - mean A) of each token, with means over all given tokens."""
    return (tokens.logprobs - tokens.logprobs.mean()) * (tokens.advantages - tokens.advantages.mean())


def number_of(share: float, total: int) -> int:
    """The number of tokens in a share: rounded down, at least one, as in the released code."""
    return min(total, max(1, int(share * total)))


@dataclass(frozen=True)
class ClipCov(Surrogate):
    """PPO that also removes the gradient of a few tokens with high covariance (Clip-Cov, arXiv:2505.22617).

    loss = Ppo's, detached on a random `share` of the step's tokens, drawn among those Ppo leaves alone and
    whose covariance lies in (cov_low, cov_high)

    Acts on-policy too, unlike a clip. The covariance is over the whole optimiser step and the draw is
    counter-based, so microbatching does not change it. A no-op while no covariance exceeds cov_low.
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
        require_field(self.share <= 1, self, "share", "at most 1")
        require_field(self.cov_low < self.cov_high, self, "cov_low", f"below cov_high ({self.cov_high:g})")

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
        return SurrogateLoss(loss, clipped.weight * ~tokens.marked, clipped.affected | tokens.marked)


@dataclass(frozen=True)
class KlCov(Surrogate):
    """A penalty on the drift of the tokens of highest covariance (KL-Cov, arXiv:2505.22617).

    loss = -ratio * A, plus coef * |log ratio| on the `share` of the step's tokens of largest covariance

    No clip. A no-op with one on-policy update: every log-ratio is 0 and the penalty has no gradient. Differs: a
    log-ratio below 1e-5 nats is taken for rounding and not penalised, since |x| has the same slope for every small x.
    """

    share: float
    coef: float
    scope: Scope

    pulls_without_advantage: ClassVar[bool] = True
    formula: ClassVar[str] = "-r * A, + {coef} * |log r| on the {share} of the {scope}'s tokens of largest cov(logp, A)"

    def __post_init__(self) -> None:
        require_positive(self, "share", "coef")
        require_field(self.share <= 1, self, "share", "at most 1")

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
        affected = tokens.marked & (tokens.log_ratio.abs() > _COVARIANCE_ROUNDING)
        penalty = torch.where(affected, self.coef * tokens.log_ratio.abs(), 0.0)
        return SurrogateLoss(-ratio * tokens.advantages + penalty, ratio.detach(), affected)
