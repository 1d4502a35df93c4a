"""Sampler against learner by hand, among rows that have no token to compare."""

from __future__ import annotations

import math

import torch
from helpers import F64, assert_close

from grpo_lab.learner.mismatch import mismatch_metrics


def test_a_row_without_a_token_is_no_response_of_the_effective_sample_size() -> None:
    """Weights of 4 and 1 per response: (4 + 1)^2 / (2 (16 + 1)) = 25/34. The empty row would make it 36/54."""
    gap = torch.tensor([[math.log(2.0), math.log(2.0)], [0.0, 0.0], [5.0, 7.0]], dtype=F64)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    metrics = mismatch_metrics(gap - 1, torch.full_like(gap, -1.0), mask)
    assert_close(metrics["mismatch/ess_responses"], 25 / 34, 1e-12, "of responses")
    # per token: weights 2, 2 and 1, so 5^2 / (3 * 9)
    assert_close(metrics["mismatch/ess"], 25 / 27, 1e-12, "of tokens")
    assert_close(metrics["mismatch/absolute"], 2 * math.log(2) / 3, 1e-12, "of the three tokens alone")
    assert_close(metrics["mismatch/max"], math.log(2), 1e-12, "what is not sampled differs more")
    assert mismatch_metrics(gap, gap, torch.zeros_like(mask)) == {}
