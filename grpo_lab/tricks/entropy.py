"""Entropy: exploration pressure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.tricks.base import Trick, require_field, require_not_negative, require_positive
from grpo_lab.types import Bool, Float, Tensor


@dataclass(frozen=True)
class Entropy(Trick, ABC):
    """A term per token, added to the token's loss and aggregated with it, or a choice of tokens by entropy.

    The coefficient of the term is state: it begins at `start`, `next_coef` moves it once a step, and the checkpoint
    keeps it. `needs_gradient`: the term's gradient goes through the entropy. `selects_tokens`: acts through
    `keeps`, and needs the entropies of the rollouts.
    """

    needs_gradient: ClassVar[bool] = False
    selects_tokens: ClassVar[bool] = False

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

    @abstractmethod
    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        """The term from the token's entropy in nats; with gradient where `needs_gradient`."""


@dataclass(frozen=True)
class NoEntropy(Entropy):
    """No pressure: entropy is logged and left alone."""

    touches_nothing: ClassVar[bool] = True
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
    """A bonus that grows while entropy is at or below a target and shrinks above it (Skywork-OR1, arXiv:2505.22312).

    coef_{k+1} = clip(coef_k +- delta, 0, largest), + where the step's mean entropy was at or below target
    term       = -coef * entropy where the last step's entropy was at or below target, otherwise 0

    Differs from Bonus: nothing is paid for entropy that is there anyway. Inert as long as it stays above target.
    Differs from TRL: the coefficient moves once a rollout batch, not once an update. What is stored between steps is
    the coefficient with a minus sign while the gate is shut.
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
    """Learn only from the tokens at which the policy was undecided ("80/20", arXiv:2506.01939).

    keep_t = entropy_t >= the (1 - share) quantile of the entropies of the rollout batch's sampled tokens

    Under `denominator: original` the tokens that left still count below the fraction line, as in the paper. Differs:
    the entropies are those of the policy before the updates, so that all minibatches share one threshold.
    """

    share: float

    selects_tokens: ClassVar[bool] = True
    formula: ClassVar[str] = "m = 0 but on the {share} of the tokens of highest entropy"

    def __post_init__(self) -> None:
        require_not_negative(self, "share")
        require_field(0 < self.share <= 1, self, "share", "in (0, 1]")

    def keeps(self, entropy: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]) -> Bool[Tensor, "N T"]:
        sampled = entropy[sampled_mask]
        kept = max(1, round(self.share * sampled.numel()))
        return entropy >= sampled.topk(kept).values[-1]

    def __call__(self, entropy: Float[Tensor, "M T"], coef: float) -> Float[Tensor, "M T"]:
        return torch.zeros_like(entropy)
