"""The native engine's sampler: batched decoding with torch and transformers, on CPU or GPU.

A prompt that several responses share is prefilled once, and finished rows leave the batch at once. On a CPU, responses
that are the same so far are one row of the model, which splits where their tokens differ. Each token is the inverse CDF
of one counter-based uniform number, so a response does not depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, PreTrainedModel

from grpo_lab.engines.base import EngineSession, all_ended, already_ended, check_names
from grpo_lab.engines.native_attention import use_decode_attention
from grpo_lab.engines.native_cache import arrange_rows, block_cache, cache_name, placed, recurrent
from grpo_lab.engines.native_fp8 import rounded, simulate_fp8
from grpo_lab.engines.native_fused import fused
from grpo_lab.engines.native_graphs import FixedBatch, check_graphs, most_bytes, worth_keeping
from grpo_lab.engines.native_sampling import BatchState, draw, read_texts, remaining
from grpo_lab.engines.native_stream import NativeStream
from grpo_lab.policy.model_folder import stop_token_ids
from grpo_lab.policy.models import load_model, moved, round_weights, widen
from grpo_lab.tracking.activity import Sampling, sampling
from grpo_lab.tricks.precision import Fp8Simulated, LmHead, Precision
from grpo_lab.types import Completion, Float, Int, OnFinish, Request, StopReason, Tensor

# How many tokens a GPU decodes between two checks for ended rows. Each check makes the host wait for the GPU; between
# checks, ended rows are decoded in vain. Not measured on a GPU.
LOOK_EVERY = 8
SHARED = 4  # how many responses a row of `max_rows` may hold where responses share rows


def open_session(
    folder: Path, precision: Precision, device: torch.device, max_rows: int, cuda_graphs: bool
) -> NativeSession:
    """Load the model of `folder` for sampling, as weight version 0."""
    model = load_model(folder, precision.lm_head).requires_grad_(False)
    if cuda_graphs:
        check_graphs(model.config, device)
    if precision.lm_head is LmHead.fp32:
        head = model.get_output_embeddings()
        assert head is not None, "a causal LM has an output head"
        # A tied head shares the embedding's tensor; its fp32 twin needs storage of its own.
        exact = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        round_weights(model, precision.dtype)
        head.weight = exact
    else:
        round_weights(model, precision.dtype)
    fp8 = simulate_fp8(model, precision.activations) if isinstance(precision, Fp8Simulated) else frozenset[str]()
    return NativeSession(moved(model, device), stop_token_ids(folder), max_rows, cuda_graphs, fp8)


class NativeSession(EngineSession):
    """The sampler's copy of the model, and one call of `generate` at a time.

    `fp8` are the names of the weights that are rounded to FP8 numbers at every sync.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        stop_ids: frozenset[int],
        max_rows: int,
        fixed_shapes: bool = False,
        fp8: frozenset[str] = frozenset(),
    ) -> None:
        self.model, self.fixed_shapes, self.fp8 = model, fixed_shapes, fp8
        use_decode_attention(model)
        self.device = next(model.parameters()).device
        self.stop_set, self.stop_ids = stop_ids, torch.tensor(sorted(stop_ids), device=self.device)
        self.max_rows = max_rows
        self.look_every = 1 if self.device.type == "cpu" else LOOK_EVERY
        # To find the responses that still agree takes a look at every token, for which a GPU would have to wait.
        self.shares_rows = self.device.type == "cpu" and not fixed_shapes
        self.draws_by_blocks = self.device.type != "cpu"
        self.fused = fused(model) if fixed_shapes else None
        self.fixed_batches = list[FixedBatch]()
        self.version = 0
        self.recurrent = recurrent(model.config)
        self.logprob_dtype = widen(next(model.parameters())[:0]).dtype

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = self.model.state_dict()
        missing = set(own)
        with torch.no_grad():
            for name, tensor in weights:  # which may be made whole, or merged, one at a time
                check_names({name} - own.keys())
                own[name].copy_(tensor)
                if name in self.fp8:
                    own[name].copy_(rounded(own[name]))
                missing.discard(name)
        check_names(missing)
        self.version = version

    def open_stream(self) -> NativeStream:
        return NativeStream(self)

    def close(self) -> None:
        self.fixed_batches.clear()
        del self.model, self.fused

    @torch.inference_mode()
    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        results = [already_ended(request, self.stop_set) for request in requests]
        aborted: set[int] = set()
        order = [index for index, ended in enumerate(results) if ended is None]
        if on_finish is None:
            # Waves of similar budget and context length leave few rows over and need little padding; those of one
            # context share rows. The order cannot change any response. With `on_finish` the given order stays: it
            # decides who starts first, and continued responses must not wait behind new ones.
            order.sort(key=lambda i: (remaining(requests[i]), _context(requests[i]), _text(requests[i])))
        with sampling([remaining(request) for request in requests]) as shown:
            for index in set(range(len(requests))).difference(order):
                shown.end(index)
            for wave in self._waves(requests, order, 1 if on_finish or not self.shares_rows else SHARED):
                wave = [i for i in wave if i not in aborted]
                if wave:
                    _Wave(self, [requests[i] for i in wave], wave).run(results, aborted, on_finish, shown)
        self.fixed_batches = worth_keeping(self.fixed_batches, most_bytes(self.device))
        for index in aborted:
            results[index] = results[index] or Completion.unsampled((), StopReason.ABORTED)
        return all_ended(results)

    def fixed_batch(self, cache: DynamicCache, rows: int, tokens: int) -> FixedBatch:
        """A batch with room for `rows` rows of `tokens` more tokens; recorded steps go on from one call to the next."""
        room = cache.get_seq_length() + tokens
        for batch in self.fixed_batches:
            if batch.fits(rows, room, tokens):
                return batch
        # The oldest goes before its successor is made: both might not fit into a GPU.
        self.fixed_batches = self.fixed_batches[-1:]
        batch = FixedBatch(self.model, self.fused, self.stop_ids, cache, rows, room, tokens, self.logprob_dtype)
        self.fixed_batches.append(batch)
        return batch

    def _waves(self, requests: Sequence[Request], order: Sequence[int], shared: int) -> Iterator[list[int]]:
        """Parts of `order` that decode together: up to `max_rows` contexts, and `shared` times as many requests.

        A recurrent state would take in padding: its rows share one length.
        """
        wave, contexts = list[int](), set[tuple[int, ...]]()
        for index in order:
            text = _text(requests[index])
            full = len(wave) == shared * self.max_rows or (len(contexts) == self.max_rows and text not in contexts)
            if wave and (full or (self.recurrent and len(text) != _context(requests[wave[-1]]))):
                yield wave
                wave, contexts = [], set()
            wave.append(index)
            contexts.add(text)
        if wave:
            yield wave


def _text(request: Request) -> tuple[int, ...]:
    return request.prompt + request.prefix


def _context(request: Request) -> int:
    return len(request.prompt) + len(request.prefix)


class _Wave:
    """Requests that decode together.

    `alive` holds the requests that have not ended, and `rows` the row of the model that each of them continues.
    """

    def __init__(self, session: NativeSession, requests: list[Request], indices: list[int]) -> None:
        self.session, self.requests, self.indices = session, requests, indices
        self.state = BatchState.of(requests, session.device, session.logprob_dtype)
        self.cuts = any(r.params.top_p < 1 for r in requests)

    def run(
        self, results: list[Completion | None], aborted: set[int], on_finish: OnFinish | None, shown: Sampling
    ) -> None:
        """Decode until every row has ended, filling `results` at the wave's indices."""
        if self.session.fixed_shapes and on_finish is None:
            self._run_fixed(results, shown)
            return
        logits, rows = self._prefill()
        # `on_finish` may abort other rows as soon as one ends, so then every step checks.
        look_every = self.session.look_every if on_finish is None else 1
        alive = torch.arange(len(self.requests), device=self.session.device)
        state, position = self.state, 0
        while alive.numel():
            top_ps = state.top_ps[alive] if self.cuts else None
            noise, by_blocks = state.noise[alive, position], self.session.draws_by_blocks
            drawn, logprobs = draw(logits[rows], noise, state.temperatures[alive], top_ps, by_blocks)
            state.tokens[alive, position], state.logprobs[alive, position] = drawn, logprobs
            position += 1
            shown.grow(position * len(alive))
            state.sure_for[alive] = torch.where(logprobs > state.sure[alive], state.sure_for[alive] + 1, 0)
            stopped = torch.isin(drawn, self.session.stop_ids)
            looped = state.sure_for[alive] >= state.patience[alive]
            going = state.lengths[alive] == 0
            ends = going & (stopped | looped | (position >= state.budgets[alive]))
            state.lengths[alive] += ends * position
            state.looped[alive] |= ends & looped
            ended = state.lengths[alive] > 0
            looks = position % look_every == 0 or position == state.width
            leave = False
            if looks and ended.any():
                for index, completion in self._ended(state, alive[ended].tolist(), alive[ended].tolist()):
                    results[index] = completion
                    shown.end(index)
                    if on_finish is not None:
                        aborted.update(on_finish(index, completion))
                keep = ~ended
                if aborted:
                    keep &= self._drop_aborted(alive, ended, position, results, aborted)
                if not keep.any():
                    return
                leave, alive, rows, drawn = True, alive[keep], rows[keep], drawn[keep]
            if self.session.shares_rows or leave:
                rows = self._arrange(rows, drawn)
            fed = drawn.new_zeros(len(self.next_positions))
            fed[rows] = drawn
            logits = self._decode(fed)

    def _run_fixed(self, results: list[Completion | None], shown: Sampling) -> None:
        """`run` by steps that a GPU replays; ended rows leave once half of all have ended."""
        logits, _ = self._prefill()
        visible = self.next_positions.new_ones(len(logits), 1) if self.mask is None else self.mask
        batch = self.session.fixed_batch(self.cache, len(logits), self.state.width)
        batch.load(self.state, self.cache, visible.bool(), self.next_positions, self.last_position, logits, self.cuts)
        alive, position = list(range(len(logits))), 1
        while True:
            shown.grow(position * len(alive))
            if position % self.session.look_every == 0 or position == self.state.width:
                lengths = batch.lengths(len(alive))
                ended = [row for row, length in enumerate(lengths) if length]
                if 2 * len(ended) >= len(alive):
                    for index, completion in self._ended(batch.state, ended, [alive[row] for row in ended]):
                        results[index] = completion
                        shown.end(index)
                    kept = [row for row, length in enumerate(lengths) if not length]
                    if not kept:
                        return
                    alive = [alive[row] for row in kept]
                    batch.keep(kept)
            batch.step()
            position += 1

    def _ended(self, state: BatchState, rows: list[int], places: list[int]) -> Iterator[tuple[int, Completion]]:
        """The index and completion of each ended row of `state`; `places`: which request of the wave it is."""
        lengths, looped = state.lengths[rows].cpu(), state.looped[rows].tolist()
        longest = int(lengths.max())
        drawn = torch.arange(longest) < lengths[:, None]
        tokens, logprobs = (values[rows, :longest].cpu()[drawn] for values in (state.tokens, state.logprobs))
        versions, last = torch.full(tokens.shape, self.session.version), tokens[lengths.cumsum(0) - 1].tolist()
        columns = [values.split(lengths.tolist()) for values in (tokens, logprobs, versions)]
        for row, (place, ids, scores, stamps) in enumerate(zip(places, *columns)):
            reason = StopReason.LENGTH
            if last[row] in self.session.stop_set:
                reason = StopReason.EOS
            elif looped[row]:
                reason = StopReason.REPETITION
            yield self.indices[place], Completion(ids, scores, stamps, reason)

    def _arrange(self, rows: Int[Tensor, "R"], drawn: Int[Tensor, "R"]) -> Int[Tensor, "R"]:
        """Drop rows that no request continues, and split those whose requests drew different tokens.

        Returns the row of each request from here on.
        """
        tokens = self.vocabulary if self.session.shares_rows else 1
        children, which = torch.unique(rows * tokens + (drawn if tokens > 1 else 0), return_inverse=True)
        order, places = placed(children // tokens)
        if not torch.equal(order, torch.arange(len(self.next_positions), device=order.device)):
            arrange_rows(self.cache, order)
            self.mask = None if self.mask is None else self.mask[order]
            self.next_positions = self.next_positions[order]
        return places[which]

    def _drop_aborted(
        self,
        alive: Int[Tensor, "R"],
        ended: Tensor,
        position: int,
        results: list[Completion | None],
        aborted: set[int],
    ) -> Tensor:
        keep = torch.ones_like(ended)
        for place, (row, is_ended) in enumerate(zip(alive.tolist(), ended.tolist())):
            if not is_ended and self.indices[row] in aborted:
                tokens, logprobs = self.state.tokens[row, :position], self.state.logprobs[row, :position]
                versions = torch.full((position,), self.session.version)
                results[self.indices[row]] = Completion(tokens.clone(), logprobs.clone(), versions, StopReason.ABORTED)
                keep[place] = False
        return keep

    def _prefill(self) -> tuple[Float[Tensor, "B V"], Int[Tensor, "R"]]:
        """Prefill each distinct context once, left-padded. Returns logits by row, and the row of each request."""
        model = self.session.model
        self.cache = block_cache(model.config, len(self.requests))
        logits, mask, rows = read_texts(model, [_text(request) for request in self.requests], self.cache)
        if not self.session.shares_rows:
            arrange_rows(self.cache, rows)
            logits, mask = logits[rows], mask[rows]
            rows = torch.arange(len(rows), device=rows.device)
        self.vocabulary = logits.shape[1]
        # Without padding there is nothing to mask, and attention takes its faster path.
        self.mask = mask if (mask == 0).any() else None
        self.next_positions = mask.sum(dim=1, keepdim=True)
        # An ended row that was not yet noticed must not advance beyond the model's last position.
        self.last_position = max(_context(request) + remaining(request) for request in self.requests) - 1
        return logits, rows

    def _decode(self, drawn: Int[Tensor, "R"]) -> Float[Tensor, "R V"]:
        """Feed one token per row and return the next token's logits."""
        if self.mask is not None:
            self.mask = torch.cat([self.mask, self.mask.new_ones(self.mask.shape[0], 1)], dim=1)
        output = self.session.model(
            input_ids=drawn[:, None],
            attention_mask=self.mask,
            position_ids=self.next_positions,
            use_cache=True,
            **{cache_name(type(self.session.model)): self.cache},
        )
        self.next_positions = (self.next_positions + 1).clamp(max=self.last_position)
        return output.logits[:, -1]
