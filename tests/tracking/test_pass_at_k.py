"""pass@k against a count of all subsets."""

from __future__ import annotations

from itertools import combinations

import pytest
from helpers import assert_close

from grpo_lab.run.evaluate import pass_at_k


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer(samples) -> None:
    for correct in range(samples + 1):
        rows = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            subsets = list(combinations(rows, k))
            share = sum(map(max, subsets)) / len(subsets)
            assert_close(pass_at_k(samples, correct, k), share, 1e-12, f"{correct} of {samples}, k = {k}")
