"""Entropy: exploration pressure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Entropy(Trick, ABC):
    """A term added to each token's loss and aggregated with it, or a selection of tokens by entropy.

    The term's coefficient is state: it starts at `start`, `next_coef` updates it once per step, and checkpoints save
    it. `needs_gradient`: the term has a gradient of its own, through the entropy unless `imitates`. `selects_tokens`:
    acts through `keeps`, and needs the entropies of the rollouts. `imitates`: acts through `imitation`.
    """

    needs_gradient: ClassVar[bool] = False
    selects_tokens: ClassVar[bool] = False
    imitates: ClassVar[bool] = False

    @property
    def start(self) -> float:
        """The coefficient of the first step."""
        return 0.0

    def next_coef(self, coef: float, entropy: float) -> float:
        """The coefficient after a step whose mean entropy was `entropy` nats."""
        return coef

    def keeps(self, entropy: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        """True on tokens that stay in the loss."""
        return torch.ones_like(sampled_mask)

    def imitation(
        self, logprobs: Float[Tensor, "M T"], right: Bool[Tensor, "M"] | None, coef: float
    ) -> Float[Tensor, "M T"]:
        """Each token's term of a mean over the tokens of right responses, whatever the aggregation is."""
        return torch.zeros_like(logprobs)

    @abstractmethod
    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        """The loss term from each token's entropy in nats; with gradient where `needs_gradient`."""


@dataclass(frozen=True)
class NoEntropy(Entropy):
    """No entropy term; entropy is only logged."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "0"

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return torch.zeros_like(entropy)


@dataclass(frozen=True)
class Bonus(Entropy):
    """Reward entropy with a constant coefficient (A3C, arXiv:1602.01783).

    term = -coef * entropy
    """

    coef: float

    needs_gradient: ClassVar[bool] = True
    formula: ClassVar[str] = "-{coef} * H"

    def __post_init__(self) -> None:
        require_positive(self, "coef")

    @property
    def start(self) -> float:
        return self.coef

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return -coef * entropy


@dataclass(frozen=True)
class Adaptive(Entropy):
    """A bonus that grows while entropy is at most a target and shrinks above it (Skywork-OR1, arXiv:2505.22312).

    coef_{k+1} = clip(coef_k +- delta, 0, largest), + where the step's mean entropy was at or below target
    term       = -coef * entropy where the last step's entropy was at or below target, otherwise 0

    Differs from Bonus: entropy above the target earns nothing. A no-op as long as entropy stays above it. Differs from
    TRL: the coefficient changes once per rollout batch, not once per update. The stored coefficient is negative while
    the term is switched off.
    """

    target: float  # nats
    delta: float
    largest: float

    needs_gradient: ClassVar[bool] = True
    formula: ClassVar[str] = "-coef * H while mean H <= {target}; coef moves by {delta} a step within [0, {largest}]"

    def __post_init__(self) -> None:
        require_positive(self, "target", "delta", "largest")
        require_field(self.delta <= self.largest, self, "delta", f"at most `largest` ({self.largest:g})")

    def next_coef(self, coef: float, entropy: float) -> float:
        if entropy <= self.target:
            return min(abs(coef) + self.delta, self.largest)
        return -max(abs(coef) - self.delta, 0.0)

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return -max(coef, 0.0) * entropy


@dataclass(frozen=True)
class HighEntropyTokens(Entropy):
    """Train only on the tokens of highest entropy ("80/20", arXiv:2506.01939).

    keep_t = entropy_t >= the (1 - share) quantile of the entropies of the rollout batch's sampled tokens

    Under `denominator: original` the removed tokens still count in the denominator, as in the paper. Differs: the
    entropies are those of the policy before the updates, so all minibatches share one threshold.
    """

    share: float

    selects_tokens: ClassVar[bool] = True
    formula: ClassVar[str] = "m = 0 but on the {share} of the tokens of highest entropy"

    def __post_init__(self) -> None:
        require_not_negative(self, "share")
        require_field(0 < self.share <= 1, self, "share", "in (0, 1]")

    def keeps(self, entropy: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        sampled = entropy[sampled_mask]
        number = max(1, round(self.share * sampled.numel()))
        return entropy >= sampled.topk(number).values[-1]

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return torch.zeros_like(entropy)


@dataclass(frozen=True)
class PositiveNll(Entropy):
    """Add the negative log-likelihood of right responses (VAPO, arXiv:2504.05118, eq. 10).

    loss += coef * sum over the tokens of right responses of -logprob / their number

    The mean is over the tokens in the loss of the whole optimiser step, and is added beside the aggregation. In NeMo-RL
    each microbatch divides by its own count, so the term grows with the number of microbatches. Right are the responses
    that the training grader calls right, whatever their reward. The term narrows the policy to what it already solves,
    so entropy falls, and it also acts on groups without signal. An optimiser step without a right response adds 0.
    """

    coef: float

    needs_gradient: ClassVar[bool] = True
    imitates: ClassVar[bool] = True
    formula: ClassVar[str] = "{coef} * mean of -logp over the tokens of right responses, outside the aggregation"

    def __post_init__(self) -> None:
        require_positive(self, "coef")

    @property
    def start(self) -> float:
        return self.coef

    def imitation(
        self, logprobs: Float[Tensor, "M T"], right: Bool[Tensor, "M"] | None, coef: float
    ) -> Float[Tensor, "M T"]:
        assert right is not None, "the loop gives the loss the right responses"
        return torch.where(right[:, None], -coef * logprobs, 0.0)

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return torch.zeros_like(entropy)
