"""How many operations the learner asks torch for: on a GPU each that is no view is a kernel to launch.

The model has the layers and heads of SmolLM2-135M and is narrow: the counts depend on neither width nor length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import pytest
import torch
from helpers import StepInputs, make_run, make_rollouts
from operations import Operations
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from grpo_lab.learner.loss import policy_loss
from grpo_lab.policy import packing
from grpo_lab.policy.batching import make_minibatch
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.optim import Adamw, Decay
from grpo_lab.tricks.precision import Bf16, LmHead
from grpo_lab.types import Batch, Microbatching

LAYERS = 30
BF16 = Bf16(LmHead.same, 0.1)
ONE_BLOCK = Microbatching(10**6, 10**6, packs=True)
ADAMW = Adamw(1.0, 1e-4, 0.9, 0.95, 1e-8, 0.0, 0, Decay.constant, 0.25, 0.1)


def like_smollm2(layers: int = LAYERS) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=64, hidden_size=72, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    assert packing.prepare(model)
    return model


def a_batch(cut: Microbatching = ONE_BLOCK) -> Batch:
    """Eight responses of many lengths to two prompts, as one microbatch."""
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (8, 9), generator=noise)
    rollouts = make_rollouts([5, 9, 3, 7, 2, 6, 8, 8], 4, prompts=[(1, 2, 3), (4, 5, 6, 7)], tokens=tokens)
    old = -4 - torch.rand(8, 9, generator=noise)
    inputs = StepInputs(rollouts, rollouts.sampled_mask, torch.randn(8, 9, generator=noise), old, None, None)
    (batch,) = make_minibatch(inputs, range(2), make_run().denominator, cut)
    return batch


def read(model: PreTrainedModel, batch: Batch, cut: Microbatching) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_logprobs(
        model, batch.prompts, batch.tokens, batch.loss_mask, 1.0, BF16, microbatching=cut
    )
    assert entropy is not None
    return logprobs, entropy


@dataclass(frozen=True)
class Counts:
    logprobs: Operations
    training: Operations
    step: Operations


@cache
def counts() -> Counts:
    """A pass without gradient, a training microbatch forward and backward, and an optimiser step."""
    model, batch = like_smollm2(), a_batch()
    with Operations() as logprobs, torch.no_grad():
        read(model, batch, ONE_BLOCK)
    with Operations() as training:
        policy_loss(make_run(), batch, *read(model, batch, ONE_BLOCK)).loss.backward()
    optimizer = ADAMW.build(model.parameters())
    with Operations() as step:
        ADAMW.step(optimizer, 0)
    return Counts(logprobs, training, step)


@pytest.mark.parametrize(("what", "kernels"), [("logprobs", 3686), ("training", 4800), ("step", 5730)])
def test_kernels_when_eager(what: str, kernels: int) -> None:
    assert 0.9 * kernels <= getattr(counts(), what).kernels <= kernels


def test_every_way_to_read_a_number_is_seen() -> None:
    mask, values = torch.tensor([True, False]), torch.ones(2)
    ways = [
        lambda: float(values.sum()), lambda: bool(mask.any()), lambda: mask.nonzero(), lambda: values[mask],
        lambda: values[0].item(), lambda: torch.equal(values, values),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        with Operations() as seen:
            way()
        assert seen.reads == 1, number
    with Operations() as seen:
        torch.where(mask, values, 0.0).sum()
    assert seen.reads == 0
