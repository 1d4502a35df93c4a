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
    metrics = mismatch_metrics(gap - 1, torch.full_like(gap, -1.0), mask, group_size=3)
    assert_close(metrics["mismatch/ess_responses"], 25 / 34, 1e-12, "of responses")
    # per token: weights 2, 2 and 1, so 5^2 / (3 * 9)
    assert_close(metrics["mismatch/ess"], 25 / 27, 1e-12, "of tokens")
    assert_close(metrics["mismatch/absolute"], 2 * math.log(2) / 3, 1e-12, "of the three tokens alone")
    assert_close(metrics["mismatch/max"], math.log(2), 1e-12, "what is not sampled differs more")
    assert mismatch_metrics(gap, gap, torch.zeros_like(mask), group_size=3) == {}


def test_three_levels_tokens_responses_and_prompts() -> None:
    """Two prompts of two responses, d in units of ln 2: (1, 1) and (0, -); (-1, 1) and nothing sampled.

    Log-ratios of the responses: 2, 0 and 0, so weights 4, 1 and 1. The first prompt's two have an effective sample size
    of 25/34, the second's one of 1. Per token |d| is 2/3 in the first prompt and 1 in the second.
    """
    ln = math.log(2.0)
    gap = torch.tensor([[ln, ln], [0.0, 9.0], [-ln, ln], [7.0, 7.0]], dtype=F64)
    mask = torch.tensor([[True, True], [True, False], [True, True], [False, False]])
    found = mismatch_metrics(gap - 1, torch.full_like(gap, -1.0), mask, group_size=2)
    assert_close(found["mismatch/absolute"], 4 * ln / 5, 1e-12, "tokens")
    assert_close(found["mismatch/absolute_responses"], 2 * ln / 3, 1e-12, "responses; signs cancel within one")
    assert_close(found["mismatch/max_responses"], 2 * ln, 1e-12, "the first")
    assert_close(found["mismatch/k1_responses"], -2 * ln / 3, 1e-12, "signed")
    assert_close(found["mismatch/ess_responses"], 36 / (3 * 18), 1e-12, "weights 4, 1, 1")
    assert_close(found["mismatch/max_prompts"], ln, 1e-12, "the second prompt's, whose responses cancel")
    assert_close(found["mismatch/ess_prompts"], (25 / 34 + 1) / 2, 1e-12, "a prompt at a time")
    nothing = mismatch_metrics(gap[2:] - 1, torch.full_like(gap[2:], -1.0), mask[2:] & False, group_size=2)
    assert nothing == {}, "no token, no number"
