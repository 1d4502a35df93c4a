"""Attention for sequences of every length: its indices, its gradient, and what torch's kernel is asked."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import assert_close, shapes_unchecked, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import Operations
from test_fast_step import FAMILIES, FAST, a_microbatch, a_model, gradient
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from varlen_reference import by_sequences

from grpo_lab.distributed.device import on_device
from grpo_lab.policy import packing, varlen
from grpo_lab.policy.loading import Loading
from grpo_lab.policy.models import load_model, product_dtype, recompute_layers
from grpo_lab.policy.output_head import linear_head
from grpo_lab.policy.packing import PLAIN
from grpo_lab.policy.varlen import _Gather, find_sequences
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead

quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
F64 = torch.float64


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arithmetic on a CPU, and every prepared model asks for it."""
    monkeypatch.setattr(varlen, "kernel", by_sequences)
    monkeypatch.setattr(packing, "uses_varlen", lambda model, precision: packing.prepared(model))
    monkeypatch.setattr("grpo_lab.policy.logprobs.uses_varlen", lambda model, precision: packing.prepared(model))


def test_in_float64_gradients_are_those_of_packed_and_padded_rows(reference: None) -> None:
    plain, packed, kernel = tiny_model(), tiny_model(), tiny_model()
    assert packing.prepare(packed) and packing.prepare(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("grpo_lab.policy.logprobs.uses_varlen", lambda model, precision: False)
        expected = gradient(plain, PLAIN), gradient(packed, FAST["packed"])
    for one, blocks, found in zip(*expected, gradient(kernel, FAST["packed"])):
        assert one.abs().max() > 1e-2
        assert_close(found, one, 1e-12, "padded")
        assert_close(found, blocks, 1e-12, "packed in blocks")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Mistral", "GPTNeoX"])
def test_every_family_that_packs_takes_the_kernel(family: str, reference: None) -> None:
    """Heads of keys in common, a scale of its own, a sliding window."""
    plain, fast = (a_model(family, **FAMILIES[family]) for _ in range(2))
    assert packing.prepare(fast)
    for one, other in zip(gradient(plain, PLAIN), gradient(fast, FAST["packed"])):
        assert_close(other / one.abs().max(), one / one.abs().max(), 5e-5, family)


def test_a_kernel_with_another_mask_is_found_and_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model("Llama")
    assert packing.prepare(model)
    monkeypatch.setattr(varlen, "kernel", by_sequences)
    assert packing._takes_varlen(model)
    monkeypatch.setattr(varlen, "kernel", partial(by_sequences, aligned_at_the_end=False))
    assert not packing._takes_varlen(model)


def test_a_cpu_and_single_precision_keep_their_blocks() -> None:
    model = a_model("Llama")
    assert packing.prepare(model)
    bf16, fp32 = Bf16(LmHead.same, 0.1), Fp32(LmHead.same, 1e-3)
    assert not packing.uses_varlen(model, bf16)
    packing._varlen[model] = True
    assert packing.uses_varlen(model, bf16) and not packing.uses_varlen(model, fp32)


def test_queries_keep_their_order_and_a_prompt_is_read_by_each_response() -> None:
    prompts, tokens, mask = a_microbatch()
    row = packing.pack(prompts, tokens, mask, FAST["packed"], varlen=True)
    found = row.sequences
    assert isinstance(found, varlen.Varlen)
    # prompt of 3 and responses of 5, 1 and 7; of 1 and 3; of 6 and 2: less their last tokens, without the empty ones
    assert found.query_ends.diff().tolist() == [3 + 4, 6, 1 + 2, 6 + 1]
    assert found.key_ends.diff().tolist() == [3 + 4, 3 + 6, 1 + 2, 6 + 1]
    assert found.gather.tolist() == [*range(7), 0, 1, 2, *range(7, 13), *range(13, 23)]
    assert (found.longest_query, found.longest_key) == (7, 9) and found.query_ends[-1] == row.ids.shape[1]


@quick
@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(0, 4), min_size=1, max_size=5)), min_size=1, max_size=4)
)
def test_the_gradient_of_copies_is_that_of_an_index(groups: list[tuple[int, list[int]]]) -> None:
    """Prompts of these lengths with responses of those."""
    sequences, own, size = [], [], 0
    for prompt, responses in groups:
        shared = np.arange(size, size + prompt)
        size += prompt
        for place, length in enumerate(responses):
            sequences.append(np.concatenate([shared, np.arange(size, size + length)]))
            own.append(prompt if place else 0)
            size += length
    at = find_sequences(sequences, own, size)
    rows = torch.randn(size, 3, dtype=F64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    weights = torch.randn(len(at.gather), 3, dtype=F64, generator=torch.Generator().manual_seed(1))
    (expected,) = torch.autograd.grad((rows[at.gather] * weights).sum(), rows)
    copies = _Gather.apply(rows, at.gather, at.first, at.again, at.valid, at.slot)
    assert torch.equal(copies, rows[at.gather])
    (found,) = torch.autograd.grad((copies * weights).sum(), rows)
    assert_close(found, expected, 1e-14, "added in another order")


@pytest.mark.parametrize("recomputes", [False, True])
def test_weights_rounded_together_give_the_same_bits(recomputes: bool, reference: None) -> None:
    """As those that autocast rounds one by one, forward, and their gradients; one that is not trained is left to it."""
    found, kernels = [], []
    for together in (True, False):
        model = a_model("Qwen3")
        model.model.layers[0].mlp.up_proj.requires_grad_(False)
        assert packing.prepare(model)
        if recomputes:
            recompute_layers(model)
        with pytest.MonkeyPatch.context() as patch, Operations() as seen:
            if not together:
                patch.setattr(packing, "with_rounded_weights", lambda body, inputs: body(**inputs))
            found.append(gradient(model, FAST["packed"], Bf16(LmHead.same, 0.1)))
        assert seen.names["_foreach_copy_"] == 2 * together
        kernels.append(seen.kernels)
    for one, other in zip(*found):
        assert torch.equal(one, other)
    assert recomputes or kernels[1] - kernels[0] == 2 * (14 - 1) - 2, "of two layers"


def test_torch_has_the_kernel_and_takes_what_it_is_given() -> None:
    """On the meta device it checks shapes and types, forward and backward, and computes nothing."""
    at = find_sequences([np.arange(5), np.array([0, 1, 5, 6])], [0, 2], 7)
    at = replace(at, **{name: one.to("meta") for name, one in vars(at).items() if isinstance(one, Tensor)})
    states = [torch.empty(heads, 7, 16, device="meta", dtype=torch.bfloat16, requires_grad=True) for heads in (4, 2, 2)]
    result = varlen.varlen_attention(*states, at, 0.25, None)
    assert result.shape == (7, 4, 16)
    result.sum().backward()
    assert all(one.grad is not None and one.grad.shape == one.shape for one in states)


def test_the_type_of_a_product_is_traced_without_asking_for_autocasts_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 cannot trace that function, which each layer's attention would call."""
    monkeypatch.setattr(torch.amp, "is_autocast_available", torch.compiler.disable(lambda kind: True))
    cast = torch.compile(lambda states: states.to(product_dtype(states)), backend="eager", fullgraph=True)
    for device, dtype in (("cpu", torch.bfloat16), ("meta", torch.float32)):
        with torch.autocast("cpu", torch.bfloat16):
            assert cast(torch.zeros(2, device=device)).dtype is dtype


@pytest.mark.extended
def test_a_compiled_learner_compiles_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a pass without gradient and for twenty ragged microbatches: what finds out its attention and head is eager.

    On the meta device, which traces what a GPU would compute. Before, each number of blocks was another graph.
    """
    a_model("Llama").save_pretrained(tmp_path)
    compiled, compile_ = CompileCounter(), nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda body, dynamic: compile_(body, dynamic=dynamic, backend=compiled))
    torch._dynamo.reset()
    model = load_model(tmp_path, LmHead.same, Loading(compiled=True))
    assert packing.prepare(model) and linear_head(model) is not None and compiled.frame_count == 0
    model = model.to("meta")
    generator = torch.Generator().manual_seed(0)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    with shapes_unchecked():
        for step in range(20):
            rows, width = number(1, 9), number(2, 30)
            lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
            tokens = torch.randint(13, (rows, width), generator=generator)
            prompts = [tuple(range(1, 3 + step % 5)) if row < rows // 2 else (7, 8, 9) for row in range(rows)]
            row = packing.pack(prompts, tokens, torch.arange(width) < lengths, PLAIN, varlen=True)
            row = on_device(row, torch.device("meta"))
            with torch.no_grad():
                row.states(model.base_model)
            row.states(model.base_model).sum().backward()
    assert compiled.frame_count == 2
