"""Attention of one new token per row: two matrix products on a CPU, PyTorch's kernels without copied keys on a GPU.

PyTorch's fused kernel is made for many queries. With one query it took a third of the decoding time (the arithmetic
base, 128 rows), and plain products take 0.7 to 0.8 of its time (experiments/LOG.md). On a GPU the kernel stays. There,
given a mask, transformers repeats keys and values for every head that shares them. That copies the whole cache at each
token, into several times its size. In half precision, steps of fixed shapes take the kernel for sequences of every
length, which reads no padding. Its gain is not measured.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lab.policy import varlen
from grpo_lab.types import Float, Int, Tensor

NAME = "grpo_lab_decode"
_logger = logging.getLogger(__name__)


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: queries [R, H, 1, D] over keys and values [R, KV, S, D] give [R, 1, H, D].

    `attention_mask` [R, 1, 1, S] is True at positions a row may attend to, or is added to the scores. Three cases use
    transformers' own function: more than one query; on a CPU, dtypes whose softmax PyTorch's kernel computes in a wider
    type; and the first token of a text, where a row that is all padding has nothing to attend to.
    """
    rows, heads, queries, width = query.shape
    first, plain = key.shape[2] == 1, query.device.type == "cpu" and query.dtype.itemsize >= 4
    if queries == 1 and not first and query.device.type != "cpu" and attention_mask is not None:
        return shared_keys_attention(query, key, value, attention_mask, scaling), None
    if queries > 1 or first or not plain:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)  # group the heads that share keys
    scores = torch.matmul(grouped, key.transpose(2, 3)) * (width**-0.5 if scaling is None else scaling)
    if attention_mask is not None:
        added = attention_mask.is_floating_point()
        scores = scores + attention_mask if added else scores.masked_fill(~attention_mask, -torch.inf)
    mixed = torch.matmul(scores.softmax(dim=-1), value)
    return mixed.reshape(rows, 1, heads, -1), None


def shared_keys_attention(
    query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float | None
) -> Tensor:
    """Attention by PyTorch's kernel, with heads that share keys passed as several queries at one position.

    Returns [R, 1, H, D].
    """
    rows, heads, _, width = query.shape
    grouped = query.view(rows, key.shape[1], heads // key.shape[1], width)
    mixed = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return mixed.reshape(rows, 1, heads, -1)


@dataclass(frozen=True)
class FilledKeys:
    """The part of keys and values [R, C, A, D] that one query per row attends to, with the rows laid end to end.

    Row i reads `counts[i]` tokens, `longest` at most, from place `begins[i]` on. `numbers` [R + 1] are 0, 1, 2 ...
    """

    begins: Int[Tensor, "..."]
    counts: Int[Tensor, "R"]
    numbers: Int[Tensor, "..."]
    longest: int


def filled_keys_attention(
    query: Float[Tensor, "R H 1 D"],
    keys: Float[Tensor, "R C A D"],
    values: Float[Tensor, "R C A D"],
    at: FilledKeys,
    scaling: float | None,
) -> Float[Tensor, "R 1 H D"]:
    """Attention by torch's kernel for sequences of every length, which reads no token that a row does not have."""
    mixed = varlen.filled_kernel(
        query.squeeze(2), keys.flatten(0, 1), values.flatten(0, 1), at.numbers, at.begins, 1, at.longest, scale=scaling,
        seqused_k=at.counts,
    )  # fmt: skip
    return mixed[:, None]


def takes_filled_keys(heads: int, key_heads: int, like: Tensor) -> bool:
    """Whether `filled_keys_attention` runs on this GPU, in the type of `like` [..., D], and gives the right numbers."""
    if not _may_take_filled_keys(like):
        return False
    try:
        differs = filled_keys_difference(heads, key_heads, like)
    except (ImportError, RuntimeError, ValueError) as error:  # how it rejects a GPU, a type or a head size
        _logger.warning("decoding attends to padding too (slower): %s", str(error).partition("\n")[0])
        return False
    if differs > 0.05:
        _logger.warning("decoding attends to padding too (slower): torch's varlen attention is off by %.2g", differs)
    return differs <= 0.05


def _may_take_filled_keys(like: Tensor) -> bool:
    return like.device.type == "cuda" and like.itemsize == 2


def filled_keys_difference(heads: int, key_heads: int, like: Tensor) -> float:
    """The largest difference from attention with a mask, of numbers around 1: two rows, one padded on the left."""
    width, room, padding, counts = like.shape[-1], 64, torch.tensor([3, 0]), torch.tensor([5, 40])
    query, keys, values = (
        torch.linspace(-3, 3, 2 * shape * width, device=like.device).mul(7).sin().mul(1.5).to(like.dtype)
        for shape in (heads, room * key_heads, room * key_heads)
    )
    query, keys = query.view(2, heads, 1, width), keys.view(2, room, key_heads, width)
    values = values.flip(0).view_as(keys)
    places = torch.arange(room)
    seen = (places >= padding[:, None]) & (places < (padding + counts)[:, None])
    begins = torch.cat([torch.arange(2) * room + padding, torch.tensor([2 * room])])
    begins, counts, numbers = (one.to(like.device, torch.int32) for one in (begins, counts, torch.arange(3)))
    found = filled_keys_attention(query, keys, values, FilledKeys(begins, counts, numbers, room), None)
    mask = seen[:, None, None].to(like.device)
    plain = shared_keys_attention(query, keys.transpose(1, 2), values.transpose(1, 2), mask, None)
    return float((found - plain).abs().max())


def use_decode_attention(model: PreTrainedModel) -> None:
    """Switch a model from PyTorch's fused attention to `decode_attention`; other models stay as they are."""
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
