"""Step metrics with numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from grpo_lab.learner.step_metrics import reweighted_tokens
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, TokenMean
from grpo_lab.tricks.convention import Scope, Width


def mask_of(*lengths: int) -> torch.Tensor:
    return torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]


def test_the_mean_over_sequences_reweights_nothing() -> None:
    assert reweighted_tokens(SequenceMean(eps=0.0), mask_of(1, 3, 2, 4), 2) == 0.0


@pytest.mark.parametrize("lengths", [(3, 3, 3, 3), (1, 1)])
def test_rows_of_one_length_weigh_the_same_in_every_aggregation(lengths: tuple[int, ...]) -> None:
    for aggregation in (TokenMean(Scope.step), Constant(8, Width.budget), PromptMean()):
        assert reweighted_tokens(aggregation, mask_of(*lengths), 2) == 0.0


def test_tokens_of_rows_of_another_length_are_counted() -> None:
    """Rows of 1, 3, 2 and 2 tokens. Over sequences a token of each weighs 1/1, 1/3, 1/2 and 1/2 of a quarter. Over
    tokens each weighs 1/8, which is what those of the two rows of 2 already weigh: 4 of 8 tokens are reweighted. Over
    prompts all tokens of both prompts weigh 1/4 of a half, the same."""
    mask = mask_of(1, 3, 2, 2)
    assert reweighted_tokens(TokenMean(Scope.step), mask, 2) == pytest.approx(4 / 8)
    assert reweighted_tokens(PromptMean(), mask, 2) == pytest.approx(4 / 8)
    assert reweighted_tokens(Constant(8, Width.budget), mask, 2) == pytest.approx(4 / 8)
    assert reweighted_tokens(TokenMean(Scope.step), mask_of(1, 3, 5, 7), 2) == 1.0


def test_no_token_in_the_loss_is_no_share() -> None:
    assert reweighted_tokens(TokenMean(Scope.step), torch.zeros(2, 3, dtype=torch.bool), 2) == 0.0
