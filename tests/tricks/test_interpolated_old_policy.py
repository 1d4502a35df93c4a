"""The interpolated old policy: its shares, its ratio and weight in an update, and the pass that it saves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from compositions import run_of
from helpers import F64, assert_close, make_run, share_of, step_of

from grpo_lab.policy.batching import make_minibatch
from grpo_lab.tricks.aggregation import SequenceSum
from grpo_lab.tricks.correction import NoCorrection, TisToken
from grpo_lab.tricks.denominator import Original
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.old_policy import LogLinear, Recomputed, Sampler
from grpo_lab.tricks.surrogate import Ppo
from grpo_lab.types import Microbatching


@pytest.mark.parametrize(
    ("updates", "shares"),
    [
        # versions 8, 7, 6, 4, 0 under a learner of version 8: ages 0, 1, 2, 4, 8 with one update a step
        (1, [0, 0, 1 / 2, 3 / 4, 7 / 8]),
        # and 0, 1/2, 1, 2, 4 with two
        (2, [0, 0, 0, 1 / 2, 3 / 4]),
    ],
)
def test_the_share_of_the_learner_grows_with_a_tokens_age(updates: int, shares: list[float]) -> None:
    found = LogLinear().learner_share(torch.tensor([[8, 7, 6, 4, 0]]), 8, updates)
    assert_close(found, [shares], 1e-12, "1 - 1 / age")


def test_the_others_have_no_share_and_this_one_no_log_probs_before_the_updates() -> None:
    version, logs = torch.zeros(1, 2, dtype=torch.long), torch.zeros(1, 2, dtype=F64)
    assert Recomputed().learner_share(version, 3, 1) is None and Sampler().learner_share(version, 3, 1) is None
    assert LogLinear()(logs, logs) is None


def gradient(share: float, correction, now: list[float], width: float = 0.9) -> list[float]:
    """Of the sum of the loss of one row with advantage 2, whose sampler's log-probs are -3."""
    inputs = step_of([2], [2.0], 1)
    rollouts = replace(inputs.rollouts, sampler_logprobs=torch.full((1, 2), -3.0, dtype=F64))
    inputs = replace(inputs, rollouts=rollouts, learner_share=torch.full((1, 2), share, dtype=F64))
    run = make_run(
        old_policy=LogLinear(), correction=correction, surrogate=Ppo(width, width), importance=Token(20.0),
        aggregation=SequenceSum(),
    )  # fmt: skip
    (batch,) = make_minibatch(inputs, range(1), Original(), Microbatching(10_000, 192))
    leaf = torch.tensor([now], dtype=F64, requires_grad=True)
    share_of(run, batch, leaf).backward()
    assert leaf.grad is not None
    return leaf.grad[0].tolist()


def test_the_ratio_is_a_root_of_the_whole_one_and_its_gradient_is_not() -> None:
    # age 3: log r = .3 / 3, and the slope of r is r, since old passes no gradient
    assert_close(gradient(2 / 3, NoCorrection(), [-2.7, -3.3]), [-2 * math.exp(0.1), -2 * math.exp(-0.1)], 1e-12, "r A")
    assert_close(gradient(0.0, NoCorrection(), [-2.7, -3.3]), [-2 * math.exp(0.3), -2 * math.exp(-0.3)], 1e-12, "pi/mu")


def test_ratio_times_weight_is_the_whole_ratio_up_to_the_cap() -> None:
    # old / sampler is e^.2 and e^-.2
    whole = gradient(2 / 3, TisToken(cap=2.0, floor=0.0), [-2.7, -3.3])
    assert_close(whole, [-2 * math.exp(0.3), -2 * math.exp(-0.3)], 1e-12, "pi / sampler")
    capped = gradient(2 / 3, TisToken(cap=1.1, floor=0.0), [-2.7, -3.3])
    assert_close(capped, [-2 * 1.1 * math.exp(0.1), -2 * math.exp(-0.3)], 1e-12, "e^.2 is cut to 1.1")


def test_the_clip_is_on_the_root() -> None:
    now = [-2.7, -3.3]
    assert gradient(2 / 3, NoCorrection(), now, width=0.11)[0] != 0
    assert gradient(2 / 3, NoCorrection(), now, width=0.10)[0] == 0, "e^.1 = 1.105"
    assert gradient(0.0, NoCorrection(), now, width=0.34)[0] == 0, "e^.3 = 1.35 without it"


def test_it_saves_the_forward_pass_unless_something_else_needs_it() -> None:
    stale = ("old_policy=log_linear", "correction=tis_token", "schedule=one_step_off", "schedule.lag=2")
    assert not run_of(*stale).needs_logprobs and run_of(*stale).training_passes.forward == 0
    assert run_of(*stale[1:]).needs_logprobs
    assert run_of(*stale, "rejection=token_k2").needs_logprobs
