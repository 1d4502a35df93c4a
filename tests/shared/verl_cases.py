"""Two random batches with the advantages, losses and gradients of verl's own code: golden/verl_reference.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers import (
    F64,
    make_graded,
    make_rollouts,
)
from torch import Tensor

from grpo_lab.policy.batching import StepInputs
from grpo_lab.types import Graded

CASES = json.loads((Path(__file__).parents[1] / "golden" / "verl_reference.json").read_text())
both_cases = pytest.mark.parametrize("case", CASES, ids=[f"seed{case['seed']}" for case in CASES])
LOSSES = "policy_losses (advantages = group_mean / none)"


def tensor(case: dict, name: str) -> Tensor:
    """A table of a case, in float64."""
    return torch.tensor(case[name], dtype=F64)


def graded_of(case: dict) -> Graded:
    """The rewards and lengths of a case."""
    groups = case["problems"], case["group_size"]
    lengths = tensor(case, "response_mask").sum(dim=1).long()
    return make_graded(tensor(case, "rewards").reshape(groups).tolist(), lengths=lengths.reshape(groups).tolist())


def verl_inputs(case: dict) -> StepInputs:
    """The step of a case, with verl's advantages of a group mean."""
    lengths = tensor(case, "response_mask").sum(dim=1).long().tolist()
    sampler = tensor(case, "sampler_logprobs")
    rollouts = make_rollouts(lengths, case["group_size"], width=case["tokens"], sampler=sampler)
    assert torch.equal(rollouts.sampled_mask, tensor(case, "response_mask").bool())
    advantages = torch.tensor(case["advantages"]["group_mean / none"], dtype=F64)[:, None]
    spread = torch.where(rollouts.sampled_mask, advantages, 0.0)
    return StepInputs(rollouts, rollouts.sampled_mask, spread, tensor(case, "old_logprobs"), None, None)
