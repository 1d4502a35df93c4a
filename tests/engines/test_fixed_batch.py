"""Steps of fixed shapes, as a GPU records them: sizes, reuse, and the same responses as plain decoding.

On a CPU the very function that a GPU records runs eagerly. The recording itself is checked by tests/gpu/equal.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_close
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from varlen_reference import by_filled_keys

from grpo_lab.engines import native_attention, native_fused, native_graphs
from grpo_lab.engines.native_attention import FilledKeys, filled_keys_attention, takes_filled_keys
from grpo_lab.engines.native_graphs import FixedBatch, bucket, worth_keeping
from grpo_lab.engines.native_session import NativeSession
from grpo_lab.policy import varlen
from grpo_lab.types import NoiseKey, Request, SamplingParams, StopReason, SureRun

TOKENS = 150
KINDS = (
    SamplingParams(TOKENS, 1.0, 1.0), SamplingParams(90, 0.7, 1.0), SamplingParams(1, 1.0, 1.0),
    SamplingParams(TOKENS, 0.0, 1.0), SamplingParams(TOKENS, 0.8, 1.0, SureRun(2, 0.5)),
)  # fmt: skip


def small_model(dtype: torch.dtype, seed: int = 0) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=150, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def sessions(dtype: torch.dtype, look_every: int, max_rows: int = 64) -> tuple[NativeSession, NativeSession]:
    """Plain and fixed, of the same weights."""
    plain, fixed = (
        NativeSession(small_model(dtype), frozenset({1, 7}), max_rows, fixed_shapes=shapes) for shapes in (False, True)
    )
    fixed.look_every = look_every
    return plain, fixed


def requests_of(rows: int, tokens: Callable[[SamplingParams], SamplingParams] = lambda kind: kind) -> list[Request]:
    """Prompts of different lengths, and every kind of settings."""
    return [
        Request(tuple(range(2, 4 + row % 9)), NoiseKey(0, "fixed", 0, row % 9, row), tokens(KINDS[row % len(KINDS)]))
        for row in range(rows)
    ]


def with_top_p(kind: SamplingParams) -> SamplingParams:
    return SamplingParams(kind.max_tokens, kind.temperature, 0.9, kind.stop_when_sure)


def recorded(session: NativeSession) -> list[dict[tuple[int, int, int], Callable[[], None]]]:
    return [dict(batch.steps) for batch in session.fixed_batches]


def test_sizes_grow_by_a_third_or_a_half() -> None:
    assert [bucket(rows, 8) for rows in (1, 8, 9, 12, 13, 16, 17, 25, 48, 49, 500)] == [
        8, 8, 12, 12, 16, 16, 24, 32, 48, 64, 512,
    ]  # fmt: skip
    for needed in range(1, 3000):
        size = bucket(needed, 64)
        assert needed <= size <= max(64, 1.5 * needed)
        assert size % 32 == 0, "a mask in rows of whole kernels' alignment"
        assert bucket(size, 64) == size


@pytest.mark.few(1)
@pytest.mark.parametrize("look_every", [1, 8, 1000])
@pytest.mark.parametrize("top_p", [False, True])
@pytest.mark.parametrize("fuses", [False, True])
def test_fixed_steps_draw_what_plain_decoding_draws(
    look_every: int, top_p: bool, fuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several waves, lengths in several sizes, rows that leave by halves; in float64 token for token.

    Four candidates of top-p are often too few.
    """
    monkeypatch.setattr(native_graphs, "CANDIDATES", 4)
    plain, fixed = sessions(torch.float64, look_every, max_rows=40)
    fixed.fused = fixed.fused if fuses else None
    requests = requests_of(60, with_top_p if top_p else lambda kind: kind)
    expected, drawn = plain.generate(requests), fixed.generate(requests)
    assert [(one.ids, one.stop) for one in drawn] == [(one.ids, one.stop) for one in expected]
    for one, other in zip(drawn, expected):
        bound = 5e-5 if fuses else 1e-5  # transformers' RMSNorm rounds to fp32, the fused one does not
        assert_close(one.logprobs, other.logprobs, bound, "log-probs")
    ends = {StopReason.EOS, StopReason.LENGTH} | (set() if top_p else {StopReason.REPETITION})
    assert {one.stop for one in drawn} >= ends
    sizes = {size for steps in recorded(fixed) for size in steps}
    assert {length for _, length, _ in sizes} >= {64, 96, 128, 192}, "attention covers what is filled"
    assert {candidates for *_, candidates in sizes} == ({4, 32, 150} if top_p else {0})
    rows = {rows for rows, *_ in sizes}
    assert max(rows) == 48 and (look_every == 1000 or min(rows) == 8), "rows that have ended leave"


@pytest.mark.extended
@pytest.mark.parametrize("look_every", [1, 8])
def test_attention_to_what_is_filled_draws_the_same(monkeypatch: pytest.MonkeyPatch, look_every: int) -> None:
    """Prompts of many lengths are padded on the left, and rows leave: the kernel gets each row's tokens, no others."""
    monkeypatch.setattr(varlen, "filled_kernel", by_filled_keys)
    plain, fixed = sessions(torch.float64, look_every, max_rows=40)
    assert fixed.fused is not None and not fixed.fused.reads_filled, "a CPU has no such kernel"
    fixed.fused.reads_filled = True
    requests = requests_of(60)
    monkeypatch.setattr(native_fused, "shared_keys_attention", None)
    expected, drawn = plain.generate(requests), fixed.generate(requests)
    assert [(one.ids, one.stop) for one in drawn] == [(one.ids, one.stop) for one in expected]
    for one, other in zip(drawn, expected):
        assert_close(one.logprobs, other.logprobs, 5e-5, "log-probs")


@pytest.mark.parametrize(("offset", "message"), [(0.0, ""), (0.2, "off by 0.2"), (None, "head dim 7")])
def test_a_kernel_is_used_if_it_runs_and_is_right(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, offset: float | None, message: str
) -> None:
    def kernel(query: Tensor, *others: Any, seqused_k: Tensor, **named: Any) -> Tensor:
        if offset is None:
            raise RuntimeError("head dim 7 is not supported\nmore")
        return by_filled_keys(query, *others, seqused_k=seqused_k, **named) + offset

    monkeypatch.setattr(varlen, "filled_kernel", kernel)
    like = torch.empty(16, dtype=torch.bfloat16)
    assert not takes_filled_keys(4, 2, like), "a CPU takes the mask"
    monkeypatch.setattr(native_attention, "_may_take_filled_keys", lambda like: True)
    assert takes_filled_keys(4, 2, like) == (offset == 0.0)
    assert message in caplog.text and bool(caplog.text) == bool(message) and "more" not in caplog.text


@pytest.mark.parametrize("kernel", [varlen.filled_kernel, varlen._operator])
def test_torch_takes_what_the_kernel_is_given(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., Tensor]) -> None:
    """On the meta device; torch 2.11 has the second only."""
    monkeypatch.setattr(varlen, "filled_kernel", kernel)
    with torch.device("meta"), torch.inference_mode():
        keys, numbers = torch.empty(2, 64, 2, 16, dtype=torch.bfloat16), torch.arange(3, dtype=torch.int32)
        at = FilledKeys(numbers, numbers[:2], numbers, 64)
        mixed = filled_keys_attention(torch.empty(2, 4, 1, 16, dtype=torch.bfloat16), keys, keys, at, 0.25)
    assert mixed.shape == (2, 1, 4, 16) and mixed.dtype is torch.bfloat16


@pytest.mark.extended
def test_half_precision_masks_and_scores_agree_in_dtype() -> None:
    """With transformers' layers; test_fused.py measures the rounding of fused ones."""
    plain, fixed = sessions(torch.bfloat16, 8)
    fixed.fused = None
    requests = requests_of(40)
    pairs = list(zip(plain.generate(requests), fixed.generate(requests)))
    assert sum(one.ids == other.ids for one, other in pairs) >= 20, "others round a number across a boundary"
    gaps = [
        abs(left - right)
        for one, other in pairs
        for token, drawn, left, right in zip(one.ids[:3], other.ids[:3], one.logprobs, other.logprobs)
        if token == drawn
    ]
    assert len(gaps) > 80 and sum(gaps) / len(gaps) < 0.01


@pytest.mark.extended
def test_steps_are_recorded_once_and_read_new_weights() -> None:
    """By later waves and calls, smaller ones too; a larger one gets room of its own, and two are held at most."""
    plain, fixed = sessions(torch.float64, 8)
    requests = requests_of(30)
    fixed.generate(requests)
    (batch,), (steps,) = fixed.fixed_batches, recorded(fixed)
    other = small_model(torch.float64, seed=1).state_dict()
    for session in (plain, fixed):
        session.update_weights(other.items(), 1)
    for some in (requests, requests[:30:2], requests[::-1]):
        assert [one.ids for one in fixed.generate(some)] == [one.ids for one in plain.generate(some)]
    assert fixed.fixed_batches == [batch]
    assert all(batch.steps[size] is step for size, step in steps.items())
    for rows in (50, 60, 64):
        fixed.generate(requests_of(rows))
    assert [one.rows for one in fixed.fixed_batches] == [32, 64]
    longer = [Request((2,) * 200, one.noise, one.params) for one in requests]
    assert [one.ids for one in fixed.generate(longer)] == [one.ids for one in plain.generate(longer)]
    assert [(one.rows, one.room) for one in fixed.fixed_batches] == [(64, 192), (32, 384)]
    fixed.close()
    assert not fixed.fixed_batches


def test_a_batch_that_training_has_no_room_for_is_not_kept() -> None:
    _, fixed = sessions(torch.float32, 8)
    fixed.generate(requests_of(10))
    batches: list[FixedBatch] = fixed.fixed_batches
    held = 2 * 2 * 12 * 2 * 192 * 8 * 4  # keys and values, layers, rows, heads, tokens, width, bytes
    assert batches[0].held_bytes == held
    assert worth_keeping(batches, float(held)) == batches and worth_keeping(batches, held - 1.0) == []
