"""Decoding with tensors of fixed shape and address, so that a GPU can replay a step as one CUDA graph.

A small model's decoding step is hundreds of kernels of a few microseconds, and launching them one by one takes longer
than running them. One graph holds the model, the draw and the bookkeeping. It is recorded once for each size, a number
of rows and a number of cached tokens that attention covers, and stays valid when the weights change in place. The
price: a step covers the next larger size, ended rows are decoded in vain until half of all rows have ended, and the
cache is held between two calls. Top-p sorts a fixed number of tokens; where a nucleus has more, the steps since the
host last looked are taken again with more. Recording needs a GPU; what is recorded is tested on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_lab.engines.native_attention import FilledKeys
from grpo_lab.engines.native_cache import BlockLayer, block_cache, keys_and_values, whole_text_layers
from grpo_lab.engines.native_fused import FusedDecoder
from grpo_lab.engines.native_sampling import BatchState, Candidates, draw
from grpo_lab.types import Bool, Float, Int, Tensor

_WARM_UP = 2  # steps that kernels need to choose their algorithms before they are recorded
_LEAST_ROWS, _LEAST_LENGTH = 8, 64
CANDIDATES = 1024  # tokens that top-p sorts at first, and eight times as many where they are too few
KEPT = 1 / 8  # the share of a GPU's memory that batches may hold between two calls of `generate`


def bucket(needed: int, least: int) -> int:
    """The smallest of `least` times 1, 1.5, 2, 3, 4, 6, 8 ... that is at least `needed`; `least` is a power of two."""
    size = least
    while size < needed:
        size *= 2
    return size * 3 // 4 if size > least and size * 3 // 4 >= needed else size


class FixedLayer(DynamicLayer):
    """Keys and values [R, A, C, D] of one layer with room for C tokens; the write position is a tensor.

    A step of fewer rows writes the first ones, and attention covers the first `length` tokens. In memory they are
    [R, C, A, D], so that all tokens of all rows are one sequence.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, like: DynamicLayer, rows: int, room: int, column: Int[Tensor, "1"]) -> None:
        super().__init__()
        keys, values = keys_and_values(like)
        self.lazy_initialization(keys, values)
        self.column, self.length = column, room
        self.keys, self.values = (
            one.new_zeros(rows, room, one.shape[1], one.shape[3]).transpose(1, 2) for one in (keys, values)
        )

    def load(self, held: DynamicLayer, order: Int[Tensor, "K"]) -> None:
        """Hold the tokens of rows `order` of another layer, and nothing else."""
        for store, states in zip((self.keys, self.values), keys_and_values(held)):
            store.zero_()
            store[: len(order), :, : states.shape[2]] = states[order]

    def keep(self, order: Int[Tensor, "K"], filled: int) -> None:
        """Make row i what row order[i] was."""
        for store in (self.keys, self.values):
            store[: len(order), :, :filled] = store[order, :, :filled]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the states [K, A, 1, D] of the next token; return the keys and values [K, A, length, D]."""
        keys, values = (store[: len(key_states)] for store in (self.keys, self.values))
        keys.index_copy_(2, self.column, key_states)
        values.index_copy_(2, self.column, value_states)
        return keys[:, :, : self.length], values[:, :, : self.length]


class FixedBatch:
    """Room for R rows of C cached tokens, of which T are sampled, and the steps recorded for it.

    Load one wave of requests after the other. `state` holds what was sampled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        fused: FusedDecoder | None,
        stop_ids: Int[Tensor, "K"],
        like: DynamicCache,
        rows: int,
        room: int,
        tokens: int,
        logprob_dtype: torch.dtype,
    ) -> None:
        self.model, self.fused, self.stop_ids, self.device = model, fused, stop_ids, stop_ids.device
        self.rows, self.room, self.width = capacity(rows, room, tokens)
        self.column, self.position, self.last_position = (self._zeros(1) for _ in range(3))
        self.cache = block_cache(model.config)
        self.layers = [FixedLayer(one, self.rows, self.room, self.column) for one in whole_text_layers(like)]
        self.cache.layers[:] = self.layers
        self.hidden = self.layers[0].keys.new_zeros(self.rows, 1, 1, self.room)  # added to attention scores
        self.ids, self.positions = self._zeros(self.rows, 1), self._zeros(self.rows, 1)
        # Where attention finds the tokens of each row, for a kernel that reads no others.
        self.padding, self.counts = (self._zeros(self.rows).int() for _ in range(2))
        self.numbers = torch.arange(self.rows + 1, dtype=torch.int32, device=self.device)
        self.begins = self.numbers * self.room
        self.state = self._empty_state(logprob_dtype)
        self.candidates = Candidates(0, self._zeros(1).bool())  # 0 if no row has a top-p
        self.before = list[Tensor]()  # what steps change, as it was when the host last looked
        self.steps: dict[tuple[int, int, int], Callable[[], None]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _zeros(self, *shape: int) -> Int[Tensor, "..."]:
        return torch.zeros(*shape, dtype=torch.long, device=self.device)

    def _empty_state(self, logprob_dtype: torch.dtype) -> BatchState:
        def floats(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.ones(self.rows, *shape, dtype=dtype, device=self.device)

        whole = {name: self._zeros(self.rows) for name in ("budgets", "patience", "sure_for", "lengths")}
        return BatchState(
            noise=floats(torch.float64, self.width), temperatures=floats(torch.float32), top_ps=floats(torch.float32),
            sure=floats(torch.float64), looped=floats(torch.bool), tokens=self._zeros(self.rows, self.width),
            logprobs=floats(logprob_dtype, self.width), **whole,
        )  # fmt: skip

    def fits(self, rows: int, room: int, tokens: int) -> bool:
        """Whether a wave of `rows` requests, `room` cached and `tokens` sampled tokens has room here."""
        needed = capacity(rows, room, tokens)
        return all(one <= own for one, own in zip(needed, (self.rows, self.room, self.width)))

    @property
    def reads_filled(self) -> bool:
        """Whether attention takes the kernel that reads no padding."""
        return self.fused is not None and self.fused.reads_filled

    @property
    def held_bytes(self) -> int:
        """Memory of the cache, by far the largest part."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def load(
        self,
        state: BatchState,
        cache: DynamicCache,
        visible: Bool[Tensor, "R S"],
        positions: Int[Tensor, "R 1"],
        last_position: int,
        logits: Float[Tensor, "R V"],
        cuts: bool,
    ) -> None:
        """Begin with rows whose prompts were prefilled, and draw their first token.

        `cache` holds S tokens per row; `visible` is False at padding. `cuts`: whether some row has a top-p below 1.
        """
        self.filled, self.before, self.vocabulary = cache.get_seq_length(), [], logits.shape[1]
        self.candidates.count = min(CANDIDATES, self.vocabulary) if cuts else 0
        order = self._take_rows(list(range(len(logits))))
        for name, held in vars(state).items():
            own = vars(self.state)[name][: self.active]
            (own[:, : state.width] if own.ndim == 2 else own).copy_(held[order])
        for layer, held in zip(self.layers, whole_text_layers(cache)):
            layer.load(held, order)
        self.hidden.fill_(-torch.inf)
        self.hidden[: self.active, 0, 0, : self.filled].masked_fill_(visible[order], 0.0)
        self.positions[: self.active] = positions[order]
        self.padding[: self.active] = (~visible[order]).sum(dim=1)
        self.counts[: self.active] = self.filled - self.padding[: self.active]
        self._place_rows()
        for tensor, value in ((self.column, self.filled), (self.position, 0), (self.last_position, last_position)):
            tensor.fill_(value)
        self._sample(logits[order], self.active, exact=True)

    def _take_rows(self, rows: list[int]) -> Int[Tensor, "K"]:
        """These rows and, up to the next size, the last of them again: what copies sample is never read."""
        self.active = bucket(len(rows), _LEAST_ROWS)
        return torch.tensor(rows + rows[-1:] * (self.active - len(rows)), device=self.device)

    def _place_rows(self) -> None:
        """Note where each row's first token that is no padding stands, of the rows laid end to end."""
        self.begins.copy_(self.numbers * self.room)
        self.begins[: self.active] += self.padding[: self.active]

    def keep(self, rows: list[int]) -> None:
        """Continue with only these rows, renumbered from 0 in this order."""
        order = self._take_rows(rows)
        for tensor in (*vars(self.state).values(), self.ids, self.positions, self.hidden, self.padding, self.counts):
            tensor[: self.active] = tensor[order]
        self._place_rows()
        for layer in self.layers:
            layer.keep(order, self.filled)

    def lengths(self, rows: int) -> list[int]:
        """The length of each of the first rows, 0 until it has ended. The host waits for the GPU."""
        while True:
            *lengths, too_few = torch.cat([self.state.lengths[:rows], self.candidates.too_few]).tolist()
            if not too_few:
                self.before = []
                return lengths
            self.candidates.count = min(8 * self.candidates.count, self.vocabulary)
            for tensor, value in zip(self._changing, self.before):
                tensor.copy_(value)
            steps, self.filled = self.filled - self.seen, self.seen
            for _ in range(steps):
                self.step()

    @property
    def _changing(self) -> tuple[Tensor, ...]:
        """What a step changes and the next one reads, without what is masked until it is written again."""
        state = self.state
        return (
            self.hidden, self.counts, self.column, self.position, self.positions, self.ids, self.candidates.too_few,
            state.sure_for, state.lengths, state.looped,
        )  # fmt: skip

    def step(self) -> None:
        """Feed the last token of every row and draw the next."""
        if self.candidates.count and not self.before:
            self.before, self.seen = [tensor.clone() for tensor in self._changing], self.filled
        size = (self.active, bucket(self.filled + 1, _LEAST_LENGTH), self.candidates.count)
        if size not in self.steps:
            run = partial(self._step, *size)
            self.steps[size] = self._recorded(run) if self.device.type == "cuda" else run
        self.steps[size]()
        self.filled += 1

    def _step(self, rows: int, length: int, _: int) -> None:
        """What is recorded."""
        self._sample(self._feed(rows, length), rows)

    def _feed(self, rows: int, length: int) -> Float[Tensor, "R V"]:
        for layer in self.layers:
            layer.length = length
        hidden, positions = self.hidden[:rows], self.positions[:rows]
        if self.reads_filled:
            self.counts[:rows].add_(1)
        else:
            hidden.index_fill_(3, self.column, 0.0)
        logits = self._forward(self.ids[:rows], positions, hidden[..., :length])
        self.column += 1
        positions.copy_(torch.minimum(positions + 1, self.last_position))
        return logits

    def _forward(
        self, ids: Int[Tensor, "R 1"], positions: Int[Tensor, "R 1"], mask: Float[Tensor, "R 1 1 S"]
    ) -> Float[Tensor, "R V"]:
        if self.fused is not None:
            rows, filled = len(ids), None
            if self.reads_filled:
                ends, longest = slice(rows + 1), mask.shape[-1]
                filled = FilledKeys(self.begins[ends], self.counts[:rows], self.numbers[ends], longest)
            return self.fused(ids, positions, mask, self.layers, filled)
        output = self.model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache, use_cache=True
        )
        return output.logits[:, -1]

    def _sample(self, logits: Float[Tensor, "R V"], rows: int, exact: bool = False) -> None:
        """Draw one token per row and note it, and which rows it ends. `exact`: top-p waits for the GPU."""
        state = self.state.first(rows)
        noise = state.noise.index_select(1, self.position).squeeze(1)
        top_ps, candidates = state.top_ps if self.candidates.count else None, None if exact else self.candidates
        drawn, logprobs = draw(logits, noise, state.temperatures, top_ps, by_blocks=True, candidates=candidates)
        state.tokens.index_copy_(1, self.position, drawn[:, None])
        state.logprobs.index_copy_(1, self.position, logprobs[:, None])
        self.ids[:rows] = drawn[:, None]
        self.position += 1
        state.sure_for.copy_((state.sure_for + 1) * (logprobs > state.sure))
        looped = state.sure_for >= state.patience
        ends = (drawn[:, None] == self.stop_ids).any(dim=1) | looped | (self.position >= state.budgets)
        ends &= state.lengths == 0
        state.lengths.copy_(torch.where(ends, self.position, state.lengths))
        state.looped.logical_or_(ends & looped)

    def _recorded(self, run: Callable[[], None]) -> Callable[[], None]:
        """Run a step until it is warm, restore the state before it, and record it.

        What it wrote to the cache, tokens and log-probs may stay: it is masked or overwritten. Deterministic algorithms
        are off meanwhile: they would sort the write positions, and here each position is written once.
        """
        strict = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        torch.use_deterministic_algorithms(False)
        try:
            return self._warm_up_and_capture(run)
        finally:
            torch.use_deterministic_algorithms(strict, warn_only=only_warns)

    def _warm_up_and_capture(self, run: Callable[[], None]) -> Callable[[], None]:
        before = [tensor.clone() for tensor in self._changing]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(aside)
        for tensor, value in zip(self._changing, before):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            run()
        return graph.replay


def capacity(rows: int, room: int, tokens: int) -> tuple[int, int, int]:
    """The sizes of a batch; warming up writes beyond the last token."""
    room, tokens = (bucket(size + _WARM_UP, _LEAST_LENGTH) for size in (room, tokens))
    return bucket(rows, _LEAST_ROWS), room, tokens


def worth_keeping(batches: list[FixedBatch], limit: float) -> list[FixedBatch]:
    """The batches themselves, or none if together they hold more than `limit` bytes, which training may need."""
    return batches if sum(batch.held_bytes for batch in batches) <= limit else []


def most_bytes(device: torch.device) -> float:
    """How many bytes batches may hold between two calls of `generate`."""
    return KEPT * torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else math.inf


def check_graphs(config: PreTrainedConfig, device: torch.device) -> None:
    """Raise ValueError if decoding of this model on this device cannot be recorded."""
    if device.type != "cuda":
        raise ValueError(f"engine.cuda_graphs=true needs a GPU, the run is on {device}: set engine.cuda_graphs=false")
    if not all(isinstance(layer, BlockLayer) for layer in block_cache(config).layers):
        raise ValueError(
            "engine.cuda_graphs=true needs a model whose layers all attend to the whole context, this one has sliding "
            "windows or recurrences: set engine.cuda_graphs=false"
        )
