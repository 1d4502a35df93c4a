"""How rows are divided into microbatches."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_lab.policy.batching import microbatch_rows
from grpo_lab.types import Microbatching

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)


@quick
@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 1000), st.integers(0, 400))
def test_microbatches_hold_every_row_once_within_the_budget(lengths, budget, split) -> None:
    groups = microbatch_rows(lengths, Microbatching(budget, split))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        width = max(lengths[row] for row in group)
        assert len(group) == 1 or len(group) * width <= budget
        assert sum(width - lengths[row] for row in group) <= split


@quick
@given(st.lists(st.integers(1, 300), min_size=2, max_size=40), st.integers(1, 1000), st.integers(0, 400))
def test_microbatches_are_cut_only_where_they_must_be(lengths, budget, split) -> None:
    # The first row of a microbatch would have broken the budget or the padding limit of the one before.
    groups = microbatch_rows(lengths, Microbatching(budget, split))
    for before, after in pairwise(groups):
        width = lengths[before[0]]
        padding = sum(width - lengths[row] for row in [*before, after[0]])
        assert (len(before) + 1) * width > budget or padding > split


def test_microbatches_are_sorted_by_length_then_by_index() -> None:
    assert microbatch_rows([2, 5, 2, 5], Microbatching(10, 192)) == [[1, 3], [0, 2]]
    assert microbatch_rows([7, 1], Microbatching(3, 192)) == [[0], [1]]
