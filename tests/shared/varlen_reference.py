"""`torch.nn.attention.varlen.varlen_attn` in plain torch, for CPUs and float64: each sequence on its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def by_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    key_ends: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = True,
    aligned_at_the_end: bool = True,
) -> Tensor:
    """[S, A, D] of queries [S, A, D], keys and values [K, B, D]; both windows count from the query's own position.

    The last query of a sequence is at its last key, as in Flash Attention since 2.1; the first at the first, if not
    `aligned_at_the_end`.
    """
    results = []
    left, right = (torch.inf if size < 0 else size for size in window_size)
    for (start, end), (first, last) in zip(query_ends.unfold(0, 2, 1).tolist(), key_ends.unfold(0, 2, 1).tolist()):
        queries, keys = end - start, last - first
        assert 0 < queries <= longest_query and queries <= keys <= longest_key
        own = torch.arange(queries)[:, None] + (keys - queries if aligned_at_the_end else 0)
        apart = own - torch.arange(keys)
        parts = (query[start:end], key[first:last], value[first:last])
        one = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts),
            attn_mask=(apart <= left) & (apart >= -right), scale=scale, enable_gqa=enable_gqa,
        )  # fmt: skip
        results.append(one[0].transpose(0, 1))
    return torch.cat(results)


def by_filled_keys(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Tensor,
    begins: Tensor,
    longest_query: int,
    longest_key: int,
    *,
    scale: float | None = None,
    seqused_k: Tensor,
    enable_gqa: bool = True,
) -> Tensor:
    """The same with one query a sequence, which attends to `seqused_k` keys from its begin on."""
    assert longest_query == 1 and query_ends.tolist() == list(range(len(query) + 1))
    assert int((begins[: len(query)] + seqused_k).max()) <= len(key) and int(seqused_k.min()) > 0
    read = torch.cat([torch.arange(used) + first for first, used in zip(begins.tolist(), seqused_k.tolist())])
    ends = torch.cat([seqused_k.new_zeros(1), seqused_k.cumsum(0)])
    return by_sequences(query, key[read], value[read], query_ends, ends, 1, longest_key, scale=scale)
