"""Attention of one new token per row: two matrix products on a CPU, PyTorch's kernel without copied keys on a GPU.

PyTorch's fused kernel is made for many queries. With one query it took a third of the decoding time (the arithmetic
base, 128 rows), and plain products take 0.7 to 0.8 of its time (experiments/LOG.md). On a GPU the kernel stays. There,
given a mask, transformers repeats keys and values for every head that shares them. That copies the whole cache at each
token, into several times its size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lab.types import Tensor

NAME = "grpo_lab_decode"


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


def use_decode_attention(model: PreTrainedModel) -> None:
    """Switch a model from PyTorch's fused attention to `decode_attention`; other models stay as they are."""
    if model._supports_attention_backend and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
