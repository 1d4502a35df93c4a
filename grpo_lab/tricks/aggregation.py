"""Aggregation: how the losses of tokens add up to the loss of an optimiser step.

"Token-level loss" means four different things in four frameworks, so the word is not used here: each option names
its own denominator. All divide by `Totals`, the counts of the whole optimiser step, unless a convention of another
framework asks for the counts of a microbatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.checks import require_not_negative, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.tricks.convention import Scope, Width
from grpo_lab.types import Bool, Float, Tensor, Totals


@dataclass(frozen=True)
class Aggregation(Trick, ABC):
    """Sums the masked token losses of a microbatch into its share of the step's loss.

    `rows_weigh_alike`: a response's weight does not grow with its length. `sums_rows`: a response's token losses are
    summed and not divided by its length. `invariant`: microbatching and padding do not change the loss.
    `reads_signs`: depends on the signs of the responses' advantages.
    """

    rows_weigh_alike: ClassVar[bool] = False
    sums_rows: ClassVar[bool] = False
    reads_signs: ClassVar[bool] = False

    @property
    def invariant(self) -> bool:
        return True

    @abstractmethod
    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        """The microbatch's share of the loss; the shares of all microbatches add up to the step's loss."""


@dataclass(frozen=True)
class SequenceMean(Aggregation):
    """Average over each response's tokens, then over responses (GRPO, arXiv:2402.03300).

    loss = sum_i (sum_t mask * token_loss / (row_tokens_i + eps)) / num_rows

    A token of a long response weighs less than one of a short response, so long wrong answers are
    punished less per token. `eps` is 0 except to match verl, which adds 1e-8 to the count.
    """

    eps: float  # tokens

    rows_weigh_alike: ClassVar[bool] = True
    is_no_op: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"sum_i( sum_t(m * L) / {'(n_i + {eps})' if self.eps else 'n_i'} ) / N"

    def __post_init__(self) -> None:
        require_not_negative(self, "eps")

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        row_sums = (token_loss * loss_mask).sum(dim=1)
        lengths = totals.row_tokens.clamp(min=1).to(token_loss.dtype) + self.eps
        return (row_sums / lengths).sum() / max(totals.num_rows, 1)


@dataclass(frozen=True)
class TokenMean(Aggregation):
    """Average over all tokens of the optimiser step (verl's and Olmo's token mean, TRL's "dapo").

    loss = sum(mask * token_loss) / num_tokens

    Differs from SequenceMean: every token of the step weighs the same, so long responses count more. With
    `scope: microbatch` each microbatch divides by its own count, and the microbatches are averaged. A token's weight
    then depends on the microbatching; use it only to match TRL's "bnpo".
    """

    scope: Scope

    @property
    def invariant(self) -> bool:
        return self.scope is Scope.step

    @property
    def formula(self) -> str:
        return "sum_{{i,t}}(m * L) / n" + (", per microbatch" if self.scope is Scope.microbatch else "")

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        if self.scope is Scope.microbatch:
            return (token_loss * loss_mask).sum() / loss_mask.sum().clamp(min=1) / totals.num_microbatches
        return (token_loss * loss_mask).sum() / max(totals.num_tokens, 1)


@dataclass(frozen=True)
class PromptMean(Aggregation):
    """Average over the tokens of each group, then over groups (DAPO eq. 8, arXiv:2503.14476; ScaleRL).

    loss = sum_p (sum_{i in p, t} mask * token_loss / problem_tokens_p) / num_problems

    Differs from TokenMean: a prompt with long responses weighs no more than one with short responses.
    """

    formula: ClassVar[str] = "sum_p( sum_{{i in p, t}}(m * L) / n_p ) / P"

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        row_sums = (token_loss * loss_mask).sum(dim=1)
        return (row_sums / totals.problem_tokens.clamp(min=1)).sum() / max(totals.num_problems, 1)


@dataclass(frozen=True)
class Balanced(Aggregation):
    """Average over tokens among responses of one sign, and weigh both signs by responses (arXiv:2605.04077).

    loss = mean_p (k_p / G_p * token mean where A > 0 + (G_p - k_p) / G_p * token mean where A < 0)

    k_p of the group's G_p responses have a positive advantage. In PromptMean each sign weighs by its tokens, so longer
    wrong responses push harder than right ones although their advantages cancel; in SequenceMean a token of a longer
    response weighs less. Here both signs weigh as in SequenceMean, and the tokens within a sign alike. The paper treats
    rewards of two values, where either all advantages of a group are 0 or none is. Responses with A = 0 are a third
    side here, with their own share of the group and mean: they thin out no other side, a group without signal is that
    side only, as in PromptMean, and a KL or entropy term keeps its total weight. Under `denominator: original`,
    responses that left the loss are on that side too.
    """

    reads_signs: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "sum_p( sum_s G_ps / G_p * sum_{{i in p with sign(A_i) = s, t}}(m * L) / n_ps ) / P, s of -1, 0 and 1"
    )

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        row_sums = (token_loss * loss_mask).sum(dim=1)
        shares = totals.side_rows.to(row_sums.dtype) / totals.problem_rows.clamp(min=1)
        return (row_sums * shares / totals.side_tokens.clamp(min=1)).sum() / max(totals.num_problems, 1)


@dataclass(frozen=True)
class Constant(Aggregation):
    """Divide each response's summed loss by one constant instead of by its own length.

    loss = sum(mask * token_loss) / (num_rows * max_tokens)          (Dr. GRPO, arXiv:2503.20783)

    Differs from SequenceMean, where a token weighs less the longer its response is. Here all tokens weigh the
    same, and the step size grows with the mean length. The constant is the generation budget, not the padded
    width of the batch. `width: padded` is verl's fallback: the same data padded to twice the width has half the loss.
    """

    max_tokens: int  # the run's generation budget, response tokens
    width: Width

    sums_rows: ClassVar[bool] = True

    @property
    def invariant(self) -> bool:
        return self.width is Width.budget

    @property
    def formula(self) -> str:
        width = "{max_tokens}" if self.width is Width.budget else "padded width"
        return f"sum_{{{{i,t}}}}(m * L) / (N * {width})"

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens")

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        width = self.max_tokens if self.width is Width.budget else token_loss.shape[1]
        return (token_loss * loss_mask).sum() / (max(totals.num_rows, 1) * width)


@dataclass(frozen=True)
class SequenceSum(Aggregation):
    """Sum over each response's tokens, then average over responses (REINFORCE, RLOO arXiv:2402.14740).

    loss = sum(mask * token_loss) / num_rows

    Differs from Constant by the factor max_tokens: the gradient is that of the whole response's log-prob, and
    learning rates are not comparable.
    """

    sums_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "sum_{{i,t}}(m * L) / N"

    def __call__(
        self, token_loss: Float[Tensor, "M T"], loss_mask: Bool[Tensor, "M T"], totals: Totals
    ) -> Float[Tensor, ""]:
        return (token_loss * loss_mask).sum() / max(totals.num_rows, 1)
