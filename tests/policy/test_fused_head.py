"""The fused output head: its numbers, gradient, memory, reads and compilations against the plain one's."""

from __future__ import annotations

import weakref

import pytest
import torch
from helpers import assert_close, shapes_unchecked
from operations import Operations
from test_fast_step import FP32, Largest, a_model, gradient
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from grpo_lab.policy import fused_head
from grpo_lab.policy.fused_head import can_fuse, fused_logprobs, put_gradient, read_rows
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import Fp32Head
from grpo_lab.policy.output_head import in_chunks
from grpo_lab.policy.packing import PLAIN
from grpo_lab.tricks.precision import Bf16, LmHead
from grpo_lab.types import Microbatching

F64 = torch.float64
PLAIN_MB, FUSED_MB = 6.15, 1.04
POSITIONS, WIDTH, VOCABULARY = 11, 5, 17


def a_head(dtype: torch.dtype = F64) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(3)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=dtype)
    hidden = torch.randn(POSITIONS, WIDTH, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(VOCABULARY, (POSITIONS,))


def gradients(outputs: tuple[Tensor, Tensor | None], *inputs: Tensor) -> list[Tensor]:
    picked, entropy = outputs
    weights = torch.linspace(-1, 2, POSITIONS, dtype=picked.dtype)
    loss = (weights * picked).sum()
    if entropy is not None and entropy.requires_grad:
        loss = loss + (weights.flip(0) * entropy).sum()
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("positions", [1, 4, POSITIONS, 100])
@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_in_float64_it_is_the_plain_head(positions: int, entropy_gradient: bool, temperature: float) -> None:
    head, hidden, targets = a_head()
    plain = in_chunks(head, hidden, targets, temperature, True, entropy_gradient, POSITIONS)
    fused = fused_logprobs(head, hidden, targets, temperature, entropy_gradient, positions)
    assert fused[1].requires_grad == entropy_gradient
    for one, other in zip(plain, fused):
        assert one is not None
        assert_close(other, one, 1e-12, "log-probs and entropies")
    for one, other in zip(gradients(plain, hidden, head.weight), gradients(fused, hidden, head.weight)):
        assert one.abs().max() > 0.1
        assert_close(other, one, 1e-12, "gradients")


def test_what_is_frozen_gets_no_gradient_and_the_other_gets_its_own() -> None:
    head, hidden, targets = a_head()
    both = gradients(fused_logprobs(head, hidden, targets, 1.0, True, 4), hidden, head.weight)
    head.weight.requires_grad_(False)
    assert torch.equal(gradients(fused_logprobs(head, hidden, targets, 1.0, True, 4), hidden)[0], both[0])
    head.weight.requires_grad_(True)
    states = hidden.detach()
    assert torch.equal(gradients(fused_logprobs(head, states, targets, 1.0, True, 4), head.weight)[0], both[1])


def test_a_gradient_that_was_written_over_its_logits_is_not_taken_twice() -> None:
    head, hidden, targets = a_head()
    picked, _ = fused_logprobs(head, hidden, targets, 1.0, False, POSITIONS)
    picked.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        picked.sum().backward()


def test_a_head_that_does_more_than_a_product_is_not_fused() -> None:
    head = nn.Linear(2, 3, bias=False)
    assert can_fuse(head) and not can_fuse(nn.Linear(2, 3)) and not can_fuse(Fp32Head(2, 3, bias=False))


def test_rounded_products_give_the_same_logits_and_nearly_the_same_gradient() -> None:
    precision = Bf16(LmHead.same, 0.1)
    plain = gradient(a_model("Llama"), PLAIN, precision)
    for bound in (None, 2 * 13):
        cut = Microbatching(10**6, 10**6, logits_per_chunk=bound, fuses_head=True)
        logprobs, entropy, slope = gradient(a_model("Llama"), cut, precision)
        assert_close(logprobs, plain[0], 1e-6, "the softmax is in fp32")
        assert_close(entropy, plain[1], 1e-6, "the softmax is in fp32")
        assert float((slope - plain[2]).norm() / plain[2].norm()) < 0.01


def test_a_mask_without_a_token_gives_zeros() -> None:
    cut, mask = Microbatching(100, 4, logits_per_chunk=13, fuses_head=True), torch.zeros(1, 2, dtype=torch.bool)
    logprobs, entropy = token_logprobs(
        a_model("Llama"), [(1, 2)], torch.ones(1, 2).long(), mask, 1.0, FP32, microbatching=cut
    )
    assert entropy is not None and not logprobs.any() and not entropy.any()


def test_no_tensor_is_larger_than_a_chunk_and_nothing_is_read_back() -> None:
    head, hidden, targets = (one.to("meta") for one in a_head(torch.float32))
    hidden = hidden.detach().requires_grad_()
    with Largest() as seen, Operations() as operations:
        picked, entropy = fused_logprobs(head, hidden, targets, 1.0, True, 6)
        (picked.sum() + entropy.sum()).backward()
    assert seen.numbers == 6 * VOCABULARY and operations.reads == 0


def test_the_logits_of_one_chunk_are_freed_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks that exist when another is made, forwards and backwards."""
    chunks, found = list[weakref.ref](), list[int]()

    def product(states: Tensor, weight: Tensor) -> Tensor:
        found.append(sum(chunk() is not None for chunk in chunks))
        made = states @ weight.T
        chunks.append(weakref.ref(made))
        return made

    monkeypatch.setattr(fused_head.F, "linear", product)
    head, hidden, targets = a_head()
    picked, entropy = fused_logprobs(head, hidden, targets, 1.0, True, 3)
    (picked.sum() + entropy.sum()).backward()
    assert found == [0] * 8


def test_bytes_of_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SmolLM2's head in bfloat16. A compiled kernel reads or writes each logit once: that is put in for both."""

    def read(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, ...]:
        compiled.append(logits.nbytes)
        return tuple(torch.empty(len(logits), device="meta") for _ in range(3))

    def put(logits: Tensor, *others: object) -> None:
        compiled.append(2 * logits.nbytes)

    monkeypatch.setattr(fused_head, "_kernels", lambda device, dtype: (read, put))
    tokens, moved = 4096, []
    for fuses in (False, True):
        head = nn.Linear(576, 49152, bias=False, device="meta", dtype=torch.bfloat16)
        hidden = torch.empty(tokens, 576, device="meta", dtype=torch.bfloat16, requires_grad=True)
        targets, compiled = torch.empty(tokens, dtype=torch.long, device="meta"), list[int]()
        with Operations() as seen:
            if fuses:
                picked, _ = fused_logprobs(head, hidden, targets, 1.0, False, 1024)
            else:
                picked, _ = in_chunks(head, hidden, targets, 1.0, True, False, 1024)
            picked.sum().backward()
        moved.append((seen.bytes + sum(compiled)) / tokens / 1e6)
    plain, fused = moved
    assert plain == pytest.approx(PLAIN_MB, abs=0.05) and fused == pytest.approx(FUSED_MB, abs=0.05)


def test_chunks_of_many_sizes_compile_once() -> None:
    counts = CompileCounter(), CompileCounter()
    read = torch.compile(read_rows, dynamic=True, backend=counts[0])
    put = torch.compile(put_gradient, dynamic=True, backend=counts[1])
    with shapes_unchecked():
        for rows in (9, 5, 3, 40, 17, 2):
            logits, targets = torch.randn(rows, VOCABULARY), torch.zeros(rows, dtype=torch.long)
            picked, total, entropy = read(logits, targets, 0.6)
            put(logits, targets, total, entropy, picked, entropy, 0.6)
    assert [count.frame_count for count in counts] == [1, 1]


def test_compiled_it_writes_the_same_gradient() -> None:
    """Traced and functionalised as torch.compile does on a GPU; the kernels themselves are not generated here."""
    compiled = torch.compile(put_gradient, dynamic=True, backend="aot_eager")
    head, hidden, targets = a_head(torch.float32)
    logits = head(hidden).detach().bfloat16()
    copy, (picked, total, entropy) = logits.clone(), read_rows(logits, targets, 0.6)
    put_gradient(logits, targets, total, entropy, picked, entropy, 0.6)
    with shapes_unchecked():
        compiled(copy, targets, total, entropy, picked, entropy, 0.6)
    assert logits.abs().max() > 1
    assert_close(copy.float(), logits.float(), 0.01, "bfloat16")


@pytest.mark.parametrize("fails", [True, False])
def test_where_nothing_compiles_it_says_so_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    """`fails` while it compiles, or gives other numbers."""

    def compiled(function: object, dynamic: bool) -> object:
        def call(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            if fails:
                raise RuntimeError("Cannot find a working triton installation\nand much more")
            return (torch.zeros(7),) * 3

        return call

    probe = fused_head._probe
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(fused_head, "_probe", lambda read, put, device, dtype: probe(read, put, "cpu", dtype))
    assert fused_head._kernels.__wrapped__("cuda", torch.bfloat16) == (read_rows, put_gradient)
    assert ("Cannot find a working triton installation" if fails else "other numbers") in caplog.text
    assert "much more" not in caplog.text
