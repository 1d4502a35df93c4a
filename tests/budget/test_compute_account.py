"""The account and FLOP counts, each against a slow count."""

from __future__ import annotations

import pytest
from helpers import tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.budget.compute_account import Budget, BudgetAxis, ComputeAccount, ModelFlops

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


COST = ModelFlops(weights=11, attention=5)


def token_by_token(start: int, stop: int) -> int:
    """Each token: 2 operations a weight, and attention to itself and all before it."""
    return sum(2 * 11 + 5 * (position + 1) for position in range(start, stop))


@pytest.mark.extended
@quick
@given(st.integers(0, 30), st.integers(0, 30))
def test_a_span_costs_what_its_tokens_cost(start, length) -> None:
    assert COST.span(start, start + length) == token_by_token(start, start + length)
    assert COST.forward(start, length) == token_by_token(0, start + length)


def test_the_account_of_one_step_counted_by_hand() -> None:
    account = ComputeAccount()
    # two prompts of 3 and 5 tokens, two responses each
    account.generated(COST, [3, 5], [[2, 4], [1, 6]], [[0, 0], [0, 0]])
    assert (account.prompts, account.completions, account.sampled_tokens) == (2, 4, 3 + 5 + 13)
    # the prompt is prefilled once, each response goes on from it
    spans = [(0, 3), (3, 5), (3, 7), (0, 5), (5, 6), (5, 11)]
    flops = sum(token_by_token(*span) for span in spans)
    assert account.flops == flops
    account.forwarded(COST, [3, 5], [2, 6])
    flops += token_by_token(0, 5) + token_by_token(0, 11)
    assert account.flops == flops
    # forward once, backward twice
    account.trained(COST, [3], [4], tokens=4)
    assert account.flops == flops + 3 * token_by_token(0, 7)
    assert account.trained_tokens == 4


def test_the_cost_of_a_model_is_read_off_its_shapes() -> None:
    # width 16, mlp 24, 2 heads of 8, 1 key-value head, 2 layers, 13 tokens; the embedding is looked up
    layer = 16 * 16 + 2 * 8 * 16 + 16 * 16 + 3 * 16 * 24
    assert ModelFlops.of(tiny_model()) == ModelFlops(weights=2 * layer + 13 * 16, attention=4 * 2 * 16)


def test_a_tied_head_is_multiplied_all_the_same() -> None:
    model = tiny_model()
    model.lm_head.weight = model.model.embed_tokens.weight
    assert ModelFlops.of(model) == ModelFlops.of(tiny_model())


@pytest.mark.parametrize("axis", list(BudgetAxis), ids=lambda axis: axis.value)
def test_every_budget_axis_is_a_counter(axis) -> None:
    account = ComputeAccount(**{axis.value: 30.0 if axis.value.endswith("seconds") else 30})
    assert account.spent(Budget(axis, 40.0)) == 0.75
    assert ComputeAccount().spent(Budget(axis, 40.0)) == 0


def test_times_are_not_among_the_counters() -> None:
    names = ComputeAccount(steps=2, device_seconds=1.5).metrics()
    assert names["budget/steps"] == 2
    assert "budget/device_seconds" not in names
    assert len(names) == 9
