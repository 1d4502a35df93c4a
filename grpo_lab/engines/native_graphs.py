"""Decoding with tensors of fixed shape and address, so that a GPU can replay a step as one CUDA graph.

A small model's decoding step is hundreds of kernels of a few microseconds, and launching them one by one takes longer
than running them. The price: attention covers the cache's full width, and ended rows are decoded in vain until half of
all rows have ended. The recording itself has not been run on a GPU; the recorded step is tested on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_lab.engines.native_cache import BlockLayer, block_cache, keys_and_values, whole_text_layers
from grpo_lab.types import Bool, Float, Int, Tensor

_WARM_UP = 2  # steps that kernels need to choose their algorithms before they are recorded


class FixedLayer(DynamicLayer):
    """Keys and values [R, A, C, D] of one layer with room for C tokens; the write position is a tensor."""

    keys: Tensor
    values: Tensor

    def __init__(self, held: DynamicLayer, room: int, column: Int[Tensor, "1"]) -> None:
        super().__init__()
        self.column = column
        keys, values = keys_and_values(held)
        self.lazy_initialization(keys, values)
        self.keys, self.values = self._with_room(keys, room), self._with_room(values, room)

    @staticmethod
    def _with_room(states: Tensor, room: int) -> Tensor:
        rows, heads, length, width = states.shape
        store = states.new_zeros(rows, heads, room, width)
        store[:, :, :length] = states
        return store

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states [R, A, 1, D] of the next token; return the whole storage [R, A, C, D]."""
        self.keys.index_copy_(2, self.column, key_states)
        self.values.index_copy_(2, self.column, value_states)
        return self.keys, self.values


class FixedStep:
    """A decoding step of one token for each of R rows.

    `cache` holds S tokens per row; `visible` is False at padding.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: DynamicCache,
        visible: Bool[Tensor, "R S"],
        positions: Int[Tensor, "R 1"],
        last_position: int,
        further: int,
    ) -> None:
        (rows, length), device = visible.shape, positions.device
        room = length + further + _WARM_UP
        self.model, self.last_position = model, last_position
        self.column = torch.tensor([length], device=device)
        self.cache = block_cache(model.config)
        self.cache.layers[:] = [FixedLayer(layer, room, self.column) for layer in whole_text_layers(cache)]
        self.visible = torch.zeros(rows, 1, 1, room, dtype=torch.bool, device=device)
        self.visible[:, 0, 0, :length] = visible
        self.positions = positions.clone()
        self.ids = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        if device.type == "cuda":
            self._record()

    def __call__(self, drawn: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
        """Feed one token per row and return the next token's logits. The next call overwrites them."""
        self.ids.copy_(drawn[:, None])
        if self.graph is None:
            return self._step()
        self.graph.replay()
        return self.logits

    def keep(self, rows: Int[Tensor, "K"], further: int) -> FixedStep:
        """A step for these rows alone, with room for `further` more tokens."""
        length = int(self.column)
        held = block_cache(self.model.config)
        for own, layer in zip(whole_text_layers(held), whole_text_layers(self.cache)):
            keys, values = keys_and_values(layer)
            own.update(keys[rows, :, :length], values[rows, :, :length])
        visible = self.visible[rows, 0, 0, :length]
        return FixedStep(self.model, held, visible, self.positions[rows], self.last_position, further)

    def _step(self) -> Float[Tensor, "R V"]:
        self.visible.index_fill_(3, self.column, True)
        output = self.model(
            input_ids=self.ids,
            attention_mask=self.visible,
            position_ids=self.positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        self.column += 1
        self.positions.copy_((self.positions + 1).clamp(max=self.last_position))
        return output.logits[:, -1]

    def _record(self) -> None:
        """Run the step until it is warm, record it, and restore the state before it.

        What it wrote to the cache may stay, because columns beyond the last are masked. Deterministic algorithms are
        off meanwhile: they would sort the write positions, and here each position is written once.
        """
        strict = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            self._warm_up_and_capture()
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=only_warns)

    def _warm_up_and_capture(self) -> None:
        state = (self.visible, self.column, self.positions)
        before = [tensor.clone() for tensor in state]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._step()
        torch.cuda.current_stream().wait_stream(aside)
        for tensor, value in zip(state, before):
            tensor.copy_(value)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._step()


def check_graphs(config: PreTrainedConfig, device: torch.device) -> None:
    """Raise ValueError if decoding of this model on this device cannot be recorded."""
    if device.type != "cuda":
        raise ValueError(f"engine.cuda_graphs=true needs a GPU, the run is on {device}: set engine.cuda_graphs=false")
    if not all(isinstance(layer, BlockLayer) for layer in block_cache(config).layers):
        raise ValueError(
            "engine.cuda_graphs=true needs a model whose layers all attend to the whole context, this one has sliding "
            "windows or recurrences: set engine.cuda_graphs=false"
        )
