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
    results = []
    for one, first, used in zip(query, begins.tolist(), seqused_k.tolist()):
        assert 0 < used <= longest_key and first + used <= len(key)
        parts = (one[None], key[first : first + used], value[first : first + used])
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(0, 1)[None] for part in parts), scale=scale, enable_gqa=enable_gqa
        )
        results.append(mixed[0].transpose(0, 1))
    return torch.cat(results)
