"""The kernels of a compiled training microbatch, by what inductor would launch on a GPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from helpers import make_run, shapes_unchecked
from operations import Operations
from test_operation_counts import LAYERS, ONE_BLOCK, a_batch, like_smollm2, read
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from grpo_lab.learner.loss import policy_loss
from grpo_lab.policy import packing
from grpo_lab.policy.output_head import linear_head


def kernels(layers: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What inductor schedules, forward and backward, with concatenations fused as for a GPU; nothing is generated."""
    seen = Counter[str]()

    def count(nodes: list[Any]) -> list[Any]:
        for node in nodes:
            if isinstance(node, ExternKernelSchedulerNode):
                seen["extern"] += type(node.node).__name__ != "MultiOutput"  # one of the results of another
            elif not isinstance(node, NopKernelSchedulerNode):
                seen["generated"] += 1
        return nodes

    for name in ("_varlen_attn", "_varlen_attn_backward"):
        monkeypatch.setitem(getattr(torch_varlen, name)._backend_fns, None, getattr(torch_varlen, f"{name}_fake"))
    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", lambda *_: lambda *_: None)
    torch._dynamo.reset()
    counters.clear()
    model, batch = like_smollm2(layers), a_batch()
    row = packing.pack(batch.prompts, batch.tokens, batch.loss_mask, ONE_BLOCK, varlen=True)
    model.base_model.compile(dynamic=True)
    settings = {"_post_fusion_custom_pass": count, "force_pointwise_cat": True, "fx_graph_cache": False}
    with shapes_unchecked(), inductor.patch(settings):
        with torch.autocast("cpu", torch.bfloat16):
            states = row.states(model.base_model)
        states.sum().backward()
    assert not counters["graph_break"] and counters["stats"]["unique_graphs"] == 1
    return seen


@pytest.mark.extended
@pytest.mark.needs("g++")
@pytest.mark.timeout(900)
def test_kernels_when_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 layers, from those of one and two. Weights are rounded outside: 14 more a layer would be generated here."""
    one, two = (kernels(layers, monkeypatch) for layers in (1, 2))
    generated, extern = (one[kind] + (LAYERS - 1) * (two[kind] - one[kind]) for kind in ("generated", "extern"))
    assert 500 < generated <= 543, "norms, positions, activations, sums and the gradient of copied keys"
    assert 600 < extern <= 690, "21 products a layer, attention and its gradient"
    assert generated + extern + outside_the_layers() <= 1431, "of a whole microbatch, the first of an optimiser step"


def outside_the_layers() -> int:
    """Eager operations of head and loss, forward and backward, and the two copies that round all weights."""
    model, batch = like_smollm2(), a_batch()
    assert linear_head(model) is not None, "it compares numbers, once for each model"
    row = packing.pack(batch.prompts, batch.tokens, batch.loss_mask, ONE_BLOCK)
    with Operations() as body:
        with torch.autocast("cpu", torch.bfloat16):
            states = row.states(model.base_model)
        states.float().sum().backward()
    model.zero_grad()
    with Operations() as whole:
        policy_loss(make_run().loss_tricks, batch, *read(model, batch, ONE_BLOCK)).loss.backward()
    return whole.kernels - body.kernels + 2
