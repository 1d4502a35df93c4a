"""A KV cache that is written in place.

transformers' own cache grows by concatenation, which copies the whole cache at every token. It drops finished rows by
copying all others. Here storage grows by a block of tokens at a time, and the last rows move into the gaps.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from grpo_lab.types import Bool, Int, Tensor

BLOCK = 64  # tokens; a larger block leaves more memory unused, a smaller one copies the cache more often


class BlockLayer(DynamicLayer):
    """Keys and values of one layer: views [R, A, S, D] of storage that has room for more tokens and dropped rows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.storage: list[Tensor] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append states [R, A, new, D] of the next tokens; return the keys and values of all tokens."""
        length = self.get_seq_length()
        end = length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if not self.storage or end > self.storage[0].shape[-2]:
            self.storage = [
                self._room(states, held, length, end)
                for states, held in zip((key_states, value_states), keys_and_values(self))
            ]
        rows = key_states.shape[0]
        for store, states in zip(self.storage, (key_states, value_states)):
            store[:rows, :, length:end] = states
        self.keys, self.values = (store[:rows, :, :end] for store in self.storage)
        return self.keys, self.values

    @staticmethod
    def _room(states: Tensor, held: Tensor, length: int, end: int) -> Tensor:
        rows, heads, _, width = states.shape
        store = states.new_empty(rows, heads, -(-end // BLOCK) * BLOCK, width)
        if length:
            store[:, :, :length] = held
        return store

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select the rows `indices` into new storage; an index may repeat."""
        super().batch_select_indices(indices)
        self.storage = []

    def fill_gaps(self, gaps: Int[Tensor, "K"], movers: Int[Tensor, "K"], rows: int) -> None:
        """Move row movers[i] to row gaps[i], then keep the first `rows` rows."""
        keys, values = keys_and_values(self)
        keys[gaps], values[gaps] = keys[movers], values[movers]
        self.keys, self.values = keys[:rows], values[:rows]


def block_cache(config: PreTrainedConfig) -> DynamicCache:
    """An empty cache for this model; sliding-window and recurrent layers are transformers' own."""
    cache = DynamicCache(config=config)
    cache.layers = [BlockLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def whole_text_layers(cache: Cache) -> list[DynamicLayer]:
    """The layers of a cache that all attend to the whole text; its caller has turned others away."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    assert len(layers) == len(cache.layers), "layers that forget were let in"
    return layers


def keys_and_values(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """What a layer holds, [R, A, S, D] each; transformers gives None for a layer that was not written to."""
    assert layer.keys is not None and layer.values is not None, "nothing was written to the layer yet"
    return layer.keys, layer.values


def keep_rows(cache: Cache, keep: Bool[Tensor, "R"]) -> Int[Tensor, "K"]:
    """Keep only these rows of the cache. Returns, for each new row i, which old row it was."""
    rows = int(keep.sum())
    order = torch.arange(rows, device=keep.device)
    gaps, movers = (~keep[:rows]).nonzero().squeeze(1), rows + keep[rows:].nonzero().squeeze(1)
    order[gaps] = movers
    for layer in cache.layers:
        if isinstance(layer, BlockLayer):
            layer.fill_gaps(gaps, movers, rows)
        else:
            layer.batch_select_indices(order)  # pyright: ignore[reportAttributeAccessIssue] its mixins do not declare it
    return order
