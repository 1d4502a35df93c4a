"""Kernel launches and host syncs of a decoding step, counted without a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from operations import Operations
from transformers import LlamaConfig, LlamaForCausalLM

from grpo_lab.engines.native_attention import use_decode_attention
from grpo_lab.engines.native_cache import block_cache
from grpo_lab.engines.native_fused import fused
from grpo_lab.engines.native_graphs import CANDIDATES, FixedBatch
from grpo_lab.engines.native_sampling import draw
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.types import NoiseKey, Request, SamplingParams

META = torch.device("meta")  # takes every branch that a GPU takes, and raises where a value would be read
ROWS, PROMPT, TOKENS, LOOK = 8, 16, 64, 8
LIKE_SMOLLM2 = LlamaConfig(
    vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
    pad_token_id=0,
)  # fmt: skip
SMALL = LlamaConfig(
    vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, eos_token_id=1, pad_token_id=0, bos_token_id=None,
)  # fmt: skip


def per_token(fixed: bool, top_p: float) -> tuple[Counter[str], Counter[str]]:
    """Launches and syncs outside the model, of TOKENS tokens, while no row ends."""
    model = LlamaForCausalLM(SMALL).eval()
    session = NativeSession(model, frozenset({99}), ROWS, fixed_shapes=fixed)  # an end that is never drawn
    session.shares_rows, session.draws_by_blocks, session.look_every = False, True, LOOK  # as on a GPU
    session.fused = None  # `leave_out` knows the model's forward only
    counted = []
    for budget in (TOKENS, 2 * TOKENS):
        params = SamplingParams(budget, 1.0, top_p)
        requests = [Request((2, 3, 4), NoiseKey(0, "count", 0, 0, row), params) for row in range(ROWS)]
        with Operations(without=model) as counts:
            session.generate(requests)
        counted.append(counts)
    return counted[1].launches - counted[0].launches, counted[1].syncs - counted[0].syncs


@pytest.fixture(scope="module")
def batch() -> FixedBatch:
    """The batch that a GPU records, of 30 layers in the sizes of SmolLM2-135M in bf16, with prompts in its cache."""
    with torch.inference_mode(), META:
        model = LlamaForCausalLM(LIKE_SMOLLM2).bfloat16().eval()
        use_decode_attention(model)
        cache = block_cache(model.config, ROWS)
        model(input_ids=torch.zeros(ROWS, PROMPT, dtype=torch.long), past_key_values=cache, use_cache=True)
        stops = torch.zeros(1, dtype=torch.long)
        made = FixedBatch(model, fused(model), stops, cache, ROWS, PROMPT + TOKENS, TOKENS, torch.float32)
        made.filled, made.active = PROMPT, ROWS
        return made


@pytest.mark.few(1)
@pytest.mark.parametrize(("candidates", "launches"), [(0, 51), (CANDIDATES, 95)])
def test_the_launches_of_a_decoding_step(batch: FixedBatch, candidates: int, launches: int) -> None:
    """Eager: model, draw and bookkeeping; in a CUDA graph, each is a node or more. Nothing is read by the host.

    With top-p, whatever the vocabulary, one operation more passes over it: `topk`.
    """
    batch.candidates.count, batch.before = candidates, [batch.hidden]
    with torch.inference_mode():
        with Operations() as model:
            logits = batch._feed(ROWS, 64)
        with Operations() as around:
            batch._sample(logits, ROWS)
        with Operations() as whole:
            batch.step()
    assert not whole.syncs and not whole.uploads
    assert model.launches["scaled_dot_product_attention"] == 30
    assert model.launches.total() <= 383
    assert around.launches.total() <= launches
    assert around.launches["topk"] == (candidates > 0) and around.elements[torch.float64] <= 0.2 * logits.numel()
    assert whole.launches == model.launches + around.launches


def test_the_launches_of_a_draw() -> None:
    """Many, but of a few numbers a row: five pass over the vocabulary, and none of them makes a float64 of it."""
    logits = torch.zeros(ROWS, 49152, dtype=torch.bfloat16, device=META)
    noise, ones = torch.zeros(ROWS, dtype=torch.float64, device=META), torch.ones(ROWS, device=META)
    with Operations() as counts:
        draw(logits, noise, ones, None)
    assert not counts.syncs and counts.launches.total() <= 33
    assert counts.elements[torch.float32] <= 3.1 * logits.numel()  # scaled logits, log-probs, probabilities
    assert counts.elements[torch.float64] <= 0.05 * logits.numel()


@pytest.mark.few(1)
@pytest.mark.parametrize(("fixed", "top_p", "most"), [(False, 1.0, 68), (True, 1.0, 58), (True, 0.9, 99)])
def test_the_launches_and_syncs_around_the_model(fixed: bool, top_p: float, most: int) -> None:
    """The draw and the bookkeeping of one token; the host waits only where it looks for rows that have ended."""
    launches, syncs = per_token(fixed, top_p)
    assert launches.total() / TOKENS <= most
    assert syncs.total() == TOKENS / LOOK


@pytest.mark.extended
def test_without_fixed_shapes_top_p_waits_twice_a_token() -> None:
    """For the candidates and for how many the widest row has."""
    _, syncs = per_token(False, 0.9)
    assert syncs.total() == TOKENS / LOOK + 2 * TOKENS
