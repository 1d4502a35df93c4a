"""A KV cache that is written in place.

transformers' own cache grows by concatenation, which copies the whole cache at every token. It drops finished rows by
copying all others. Here storage grows by a block of tokens at a time, and only rows that change place are copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionCacheLayerMixin
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from grpo_lab.types import Int, Tensor

# Layers of caches whose rows can be selected; some versions of transformers lack some of them.
_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer"}
_LAYERS |= {f"LinearAttentionAnd{kind}Layer" for kind in ("FullAttention", "SlidingWindowAttention")}
# Models with recurrent states whose sampled log-probs are those of a plain forward: tests/engines/test_families.py.
RECURRENT = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling_text", "jamba", "kimi_linear", "lfm2",
        "lfm2_moe", "mamba", "mamba2", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zaya",
    }
)  # fmt: skip
BLOCK = 64  # tokens; a larger block leaves more memory unused, a smaller one copies the cache more often


class BlockLayer(DynamicLayer):
    """Keys and values of one layer: views [R, A, S, D] of storage that has room for more tokens and rows.

    `rows`: how many it has room for from the start.
    """

    def __init__(self, rows: int = 0, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows, self.storage = rows, list[Tensor]()

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

    def _room(self, states: Tensor, held: Tensor, length: int, end: int) -> Tensor:
        rows, heads, _, width = states.shape
        store = states.new_empty(max(rows, self.rows), heads, -(-end // BLOCK) * BLOCK, width)
        if length:
            store[:rows, :, :length] = held
        return store

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select the rows `indices` into new storage; an index may repeat."""
        super().batch_select_indices(indices)
        self.storage = []

    def arrange(self, order: Int[Tensor, "K"]) -> None:
        """Make row i what row order[i] was. Rows that stay in place are not copied, if there is room for all."""
        rows, length = len(order), self.get_seq_length()
        if not self.storage or rows > self.storage[0].shape[0]:
            self.batch_select_indices(order)
            return
        moved = (order != torch.arange(rows, device=order.device)).nonzero().squeeze(1)
        if len(moved):
            for store in self.storage:
                store[moved, :, :length] = store[order[moved], :, :length]
        self.keys, self.values = (store[:rows, :, :length] for store in self.storage)


def recurrent(config: PreTrainedConfig) -> bool:
    """Whether some layer of the model holds a state, which takes in every token, padding too."""
    return _has_state(DynamicCache(config=config).layers)


def _has_state(layers: Sequence[object]) -> bool:
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in layers)


@cache
def cache_name(kind: type[PreTrainedModel]) -> str:
    """Name of the cache argument of the model's forward: `cache_params` for Mamba, else `past_key_values`."""
    return "cache_params" if "cache_params" in signature(kind.forward).parameters else "past_key_values"


def refusal(folder: Path, streams: bool) -> str | None:
    """A message with a remedy for a model whose sampled log-probs are not those of a plain forward, else None.

    Some models keep states outside the cache that transformers gives them, or decode otherwise than they read.
    `streams`: also for one with other layers than attention to the whole text.
    """
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind, name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type], config.get_text_config(decoder=True).model_type
    text = f"engine=native cannot sample {name} ({kind}), the model in {folder}"
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, KeyError):
        layers = []
    known = bool(layers) and {type(layer).__name__ for layer in layers} <= _LAYERS
    stateful = getattr(transformers, kind)._is_stateful or _has_state(layers)
    if not known or (stateful and name not in RECURRENT):
        return (
            f"{text}: its log-probs have not been verified against a plain forward. Choose engine=vllm, if vLLM "
            f"supports it, or an attention-only model, or one of {', '.join(sorted(RECURRENT))}"
        )
    if streams and any(type(layer) is not DynamicLayer for layer in layers):
        return (
            f"{text}, under a schedule that changes weights in the middle of responses, since it has sliding windows "
            "or recurrent states: choose schedule=sync or one_step_off, or engine=vllm_process"
        )
    return None


def block_cache(config: PreTrainedConfig, rows: int = 0) -> DynamicCache:
    """An empty cache with room for `rows` rows; sliding-window and recurrent layers are transformers' own."""
    empty = DynamicCache(config=config)
    empty.layers = [BlockLayer(rows) if type(layer) is DynamicLayer else layer for layer in empty.layers]
    return empty


def whole_text_layers(cache: Cache) -> list[DynamicLayer]:
    """The layers of a cache that all attend to the whole text; its caller has turned others away."""
    layers = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
    assert len(layers) == len(cache.layers), "layers that forget were let in"
    return layers


def keys_and_values(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    """What a layer holds, [R, A, S, D] each; transformers gives None for a layer that was not written to."""
    assert layer.keys is not None and layer.values is not None, "nothing was written to the layer yet"
    return layer.keys, layer.values


def select_rows(cache: Cache, rows: Int[Tensor, "K"]) -> None:
    """Select these rows of the cache; one may repeat."""
    for layer in cache.layers:
        _select(layer, rows)


def _select(layer: Any, rows: Int[Tensor, "K"]) -> None:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        # Its states too, which batch_select_indices leaves as they are.
        layer.reorder_cache(rows)  # pyright: ignore[reportArgumentType] any integers do
    else:
        layer.batch_select_indices(rows)


def arrange_rows(cache: Cache, order: Int[Tensor, "K"]) -> None:
    """Make row i of the cache what row order[i] was; a row may go, move or repeat."""
    for layer in cache.layers:
        if isinstance(layer, BlockLayer):
            layer.arrange(order)
        else:
            _select(layer, order)


def placed(parents: Int[Tensor, "K"]) -> tuple[Int[Tensor, "K"], Int[Tensor, "K"]]:
    """Where new rows go in a cache, so that as few as possible are copied.

    `parents` holds, in ascending order, the present row that each new row continues. Returns the order for
    `arrange_rows`, and the row in which each new row ends up.
    """
    rows, device = len(parents), parents.device
    first = torch.ones(rows, dtype=torch.bool, device=device)
    first[1:] = parents[1:] != parents[:-1]
    stays = first & (parents < rows)
    free = torch.ones(rows, dtype=torch.bool, device=device)
    free[parents[stays]] = False
    places = torch.where(stays, parents, 0)
    places[~stays] = free.nonzero().squeeze(1)
    order = torch.empty_like(parents)
    order[places] = parents
    return order, places
