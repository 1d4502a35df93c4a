"""Aggregation: how the losses of tokens add up to the loss of an optimiser step.

"Token-level loss" means four different things in four frameworks, so the word is not used here: each
option names its own denominator. All divide by `Totals`, counts of the whole optimiser step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from jaxtyping import Bool, Float
from torch import Tensor

from grpo_lab.tricks.base import require_positive
from grpo_lab.types import Totals


@dataclass(frozen=True)
class Aggregation(ABC):
    """Sums the masked token losses of a microbatch into its share of the step's loss."""

    @abstractmethod
    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        """The microbatch's share; shares of all microbatches add up to the step's loss."""


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Average over each response's tokens, then over responses (GRPO, arXiv:2402.03300).

    loss = sum_i (sum_t mask * token_loss / row_tokens_i) / num_rows

    A token of a long response weighs less than one of a short response, so long wrong answers are
    punished less per token.
    """

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        row_sums = (token_loss * loss_mask).sum(dim=1)
        return (row_sums / totals.row_tokens.clamp(min=1)).sum() / max(totals.num_rows, 1)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Average over all tokens of the optimiser step (verl's and Olmo's token mean, TRL's "dapo").

    loss = sum(mask * token_loss) / num_tokens

    Differs from SequenceMean: every token of the step weighs the same, so long responses count more.
    """

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        return (token_loss * loss_mask).sum() / max(totals.num_tokens, 1)


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """Average over the tokens of each group, then over groups (DAPO eq. 8, arXiv:2503.14476; ScaleRL).

    loss = sum_p (sum_{i in p, t} mask * token_loss / problem_tokens_p) / num_problems

    Differs from TokenMean: a prompt with long responses weighs no more than one with short responses.
    """

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        row_sums = (token_loss * loss_mask).sum(dim=1)
        return (row_sums / totals.problem_tokens.clamp(min=1)).sum() / max(totals.num_problems, 1)


@dataclass(frozen=True)
class Constant(Aggregation):
    """Divide each response's summed loss by one constant instead of by its own length.

    loss = sum(mask * token_loss) / (num_rows * max_tokens)          (Dr. GRPO, arXiv:2503.20783)

    Differs from SequenceMean, where a token weighs less the longer its response is. Here a token weighs
    the same everywhere, and a change of mean length is a change of step size. The constant is the
    generation budget, never the width a batch happens to be padded to.
    """

    max_tokens: int  # the run's generation budget, response tokens

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        return (token_loss * loss_mask).sum() / (max(totals.num_rows, 1) * self.max_tokens)


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """Sum over each response's tokens, then average over responses (REINFORCE, RLOO arXiv:2402.14740).

    loss = sum(mask * token_loss) / num_rows

    Differs from Constant by the factor max_tokens: the gradient of the whole response's log-probability,
    in other units of learning rate.
    """

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        return (token_loss * loss_mask).sum() / max(totals.num_rows, 1)
