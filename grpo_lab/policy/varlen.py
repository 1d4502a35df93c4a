"""Attention over sequences of different lengths in one kernel, without padding: torch's `varlen_attn`, on GPUs.

Queries stay in the order of the packed row. Keys and values are copied once per sequence, so a prompt's stand before
each of its responses. The kernel aligns the causal mask at the sequences' ends: a response's first query sees its
whole prompt (https://docs.pytorch.org/docs/stable/nn.attention.varlen.html).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.autograd import Function
from torch.nn.attention.varlen import varlen_attn

from grpo_lab.policy.models import product_dtype
from grpo_lab.types import Bool, Float, Int, Tensor

_TAKES = inspect.signature(varlen_attn).parameters
# torch 2.11 takes fewer heads of keys than of queries unasked.
kernel: Callable[..., Any] = partial(varlen_attn, enable_gqa=True) if "enable_gqa" in _TAKES else varlen_attn


def _operator(
    query: Tensor, keys: Tensor, values: Tensor, query_ends: Tensor, begins: Tensor, *longest: int, **named: Any
) -> Tensor:
    """The operator that `varlen_attn` calls, without gradient. In torch 2.11 only this takes `seqused_k`."""
    operator = torch.ops.aten._flash_attention_forward
    return operator(query, keys, values, query_ends, begins, *longest, 0.0, False, False, **named)[0]


filled_kernel: Callable[..., Any] = kernel if "seqused_k" in _TAKES else _operator


@dataclass(frozen=True)
class Varlen:
    """Where attention finds the L sequences of a packed row of S tokens that have queries of their own.

    `gather` [K] are the tokens whose keys and values each sequence reads, sequence after sequence. `query_ends` and
    `key_ends` [L + 1] are the lengths added up. For the backward pass: `first` is the first place of each token in
    `gather`, `again` [A, C] are the further places of those that have some, filled up where `valid` is False, and
    `slot` is 0, or one more than a token's row in `again`.
    """

    gather: Int[Tensor, "K"]
    query_ends: Int[Tensor, "..."]
    key_ends: Int[Tensor, "..."]
    longest_query: int
    longest_key: int
    first: Int[Tensor, "S"]
    again: Int[Tensor, "A C"]
    valid: Bool[Tensor, "A C"]
    slot: Int[Tensor, "S"]


def find_sequences(sequences: Sequence[np.ndarray], own: Sequence[int], size: int) -> Varlen:
    """The sequences of a row of `size` tokens; `own` is where in each its own queries begin. They fill the row."""
    asking = [(tokens, start) for tokens, start in zip(sequences, own) if start < len(tokens)]
    queries = [len(tokens) - start for tokens, start in asking]
    keys = [len(tokens) for tokens, _ in asking]
    gather = np.concatenate([tokens for tokens, _ in asking]).astype(np.int64)
    order = np.argsort(gather, kind="stable")
    counts = np.bincount(gather, minlength=size)
    begins = np.cumsum(counts) - counts  # of each token's places, in `order`
    repeated = np.flatnonzero(counts > 1)
    further = np.arange(1, max(3, counts.max()))
    valid = further < counts[repeated, None]
    again = order[np.where(valid, begins[repeated, None] + further, 0)]
    # Two rows and columns at least: torch.compile makes another graph for a size of 0 or 1.
    again, valid = (np.pad(one, ((0, max(0, 2 - len(repeated))), (0, 0))) for one in (again, valid))
    slot = np.zeros(size, dtype=np.int64)
    slot[repeated] = np.arange(1, len(repeated) + 1)
    arrays = (order[begins], again, valid, slot)
    first, again, valid, slot = (torch.from_numpy(one) for one in arrays)
    query_ends, key_ends = (torch.tensor([0, *np.cumsum(one).tolist()], dtype=torch.int32) for one in (queries, keys))
    longest = max(queries), max(keys)
    return Varlen(torch.from_numpy(gather), query_ends, key_ends, *longest, first, again, valid, slot)


class _Gather(Function):
    """Copies of rows [S, F] -> [K, F]. Its gradient adds each row's copies in a fixed order, without a sort."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, *backwards: Tensor) -> Tensor:
        ctx.save_for_backward(*backwards)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,), (first, again, valid, slot) = gradients, ctx.saved_tensors
        further = gradient.index_select(0, again.flatten()).view(*again.shape, gradient.shape[1])
        added = torch.bmm(valid[:, None].to(gradient.dtype), further).squeeze(1)
        added = torch.cat([added.new_zeros(1, added.shape[1]), added])
        return gradient.index_select(0, first) + added.index_select(0, slot), None, None, None, None, None


def varlen_attention(
    query: Float[Tensor, "A S D"],
    key: Float[Tensor, "B S D"],
    value: Float[Tensor, "B S D"],
    at: Varlen,
    scale: float | None,
    window: int | None,
) -> Float[Tensor, "S A D"]:
    """Causal attention of one packed row; with `window`, each query sees that many tokens, its own included."""
    dtype = product_dtype(query)  # autocast does not know the kernel
    queries, keys, values = (states.transpose(0, 1).to(dtype) for states in (query, key, value))
    rows = torch.stack([keys, values], dim=1).flatten(1)
    copies: Any = _Gather.apply(rows, at.gather, at.first, at.again, at.valid, at.slot)
    keys, values = copies.view(-1, 2, *keys.shape[1:]).unbind(1)
    left = -1 if window is None else window - 1
    return kernel(
        queries, keys, values, at.query_ends, at.key_ends, at.longest_query, at.longest_key, scale=scale,
        window_size=(left, 0),
    )  # fmt: skip
