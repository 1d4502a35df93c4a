"""One new token per row through a Llama-shaped decoder, in as few kernels as plain PyTorch has for it.

transformers' layers are 41 small kernels each, and a GPU decodes a small model no faster than it begins them. Here a
layer is 12: one product for queries, keys and values, one that turns them by their position, one for gate and up, norms
and residuals inside other kernels. Rounding in half precision differs from transformers' as two kernels' does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_lab.engines.native_attention import (
    FilledKeys,
    filled_keys_attention,
    shared_keys_attention,
    takes_filled_keys,
)
from grpo_lab.engines.native_cache import keys_and_values
from grpo_lab.types import Float, Int, Tensor

# Decoders of norm, attention with rotary positions, norm and gated MLP; tests/engines/test_fused.py compares each.
FUSED = frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})


class FusedDecoder:
    """The decoding step of a model of `FUSED`, with the model's own weights.

    Weights that are multiplied together become neighbours in memory. The model's parameters stay, as views of them.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, [_FusedLayer(layer) for layer in model.model.layers]
        first = self.layers[0]
        self.reads_filled = takes_filled_keys(first.heads[0], first.heads[1], first.projected[0].new_empty(first.width))

    def __call__(
        self,
        ids: Int[Tensor, "R 1"],
        positions: Int[Tensor, "R 1"],
        mask: Float[Tensor, "R 1 1 S"],
        cache: Sequence[DynamicLayer],
        filled: FilledKeys | None = None,
    ) -> Float[Tensor, "R V"]:
        """Feed one token per row, write it to the cache, and return the next token's logits.

        Attention is to the `filled` part of the cache; without that, `mask` is added to the scores of its S tokens.
        """
        states = self.model.model.embed_tokens(ids)
        rotations = rotation_matrices(*self.model.model.rotary_emb(states, positions))
        states = states.squeeze(1)
        for layer, held in zip(self.layers, cache):
            states = layer(states, rotations, mask, held, filled)
        return self.model.lm_head(_normed(self.model.model.norm, states))


class _FusedLayer:
    def __init__(self, layer: Any) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.width = self.attention.head_dim
        self.projected = _joined(self.attention.q_proj, self.attention.k_proj, self.attention.v_proj)
        self.gate_and_up = _joined(self.mlp.gate_proj, self.mlp.up_proj)
        self.heads = [self.attention.q_proj.out_features // self.width]
        self.heads += 2 * [self.attention.k_proj.out_features // self.width]

    def __call__(
        self,
        states: Float[Tensor, "R H"],
        rotations: Float[Tensor, "R D D"],
        mask: Float[Tensor, "R 1 1 S"],
        held: DynamicLayer,
        filled: FilledKeys | None,
    ) -> Float[Tensor, "R H"]:
        heads = F.linear(_normed(self.before, states), *self.projected).unflatten(1, (-1, self.width))
        turned = torch.bmm(self._scaled(heads[:, : -self.heads[2]]), rotations)
        query, key = turned[:, :, None].split(self.heads[:2], dim=1)
        keys, values = held.update(key, heads[:, -self.heads[2] :, None])
        if filled is None:
            mixed = shared_keys_attention(query, keys, values, mask, self.attention.scaling)
        else:
            keys, values = keys_and_values(held)
            keys, values = (one[: len(query)].transpose(1, 2) for one in (keys, values))
            mixed = filled_keys_attention(query, keys, values, filled, self.attention.scaling)
        states = _added(states, mixed.flatten(1), self.attention.o_proj)
        gate, up = F.linear(_normed(self.between, states), *self.gate_and_up).chunk(2, dim=1)
        return _added(states, self.mlp.act_fn(gate) * up, self.mlp.down_proj)

    def _scaled(self, heads: Float[Tensor, "R A D"]) -> Float[Tensor, "R A D"]:
        """Queries and keys, normed by head where the model does that."""
        if not hasattr(self.attention, "q_norm"):
            return heads
        query, key = heads.split(self.heads[:2], dim=1)
        return torch.cat([_normed(self.attention.q_norm, query), _normed(self.attention.k_norm, key)], dim=1)


def rotation_matrices(cosines: Float[Tensor, "R 1 D"], sines: Float[Tensor, "R 1 D"]) -> Float[Tensor, "R D D"]:
    """The matrix of each row that a head is multiplied with to turn it by its position, each half against the other.

    Component j of a turned head x is x_j cos_j - x_(j + D/2) sin_j in the first half, x_j cos_j + x_(j - D/2) sin_j in
    the second. All other entries are zero and add nothing.
    """
    first, second = sines.squeeze(1).chunk(2, dim=-1)
    half = first.shape[1]
    return cosines.squeeze(1).diag_embed() + second.diag_embed(half) - first.diag_embed(-half)


def _normed(norm: Any, states: Tensor) -> Tensor:
    return F.rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _added(states: Float[Tensor, "R H"], inner: Float[Tensor, "R I"], last: nn.Linear) -> Float[Tensor, "R H"]:
    """`states` plus the last product of a block, without a kernel of its own for the sum."""
    product = torch.addmm(states, inner, last.weight.t())
    return product if last.bias is None else product + last.bias


def _joined(*parts: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of several products of one input as one; the parts' own become views, so updates reach both."""
    biases = [part.bias for part in parts if part.bias is not None]
    return _neighbours([part.weight for part in parts]), _neighbours(biases) if biases else None


def _neighbours(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, view in zip(parameters, whole.split([len(parameter) for parameter in parameters])):
        parameter.data = view
    return whole


def fused(model: PreTrainedModel) -> FusedDecoder | None:
    """The model's fused decoding step, or None if it has none."""
    return FusedDecoder(model) if type(model).__name__ in FUSED else None
