"""The native engine's stream: continuous batching in steps; weights may change between any two steps.

Each row has one token that was sampled but not yet fed to the model. A step feeds these tokens, samples the next ones
and removes ended rows. All earlier tokens are in the KV cache. So a weight swap that keeps the cache and one that
recomputes it differ in nothing else.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from grpo_lab.engines.base import Stream, already_ended
from grpo_lab.engines.native_cache import keys_and_values, select_rows, whole_text_layers
from grpo_lab.engines.native_sampling import draw, read_texts
from grpo_lab.seeding import token_uniforms
from grpo_lab.types import Completion, Float, Request, StopReason, Tensor


@dataclass
class _Decoding:
    """One response in flight."""

    key: int
    request: Request
    noise: np.ndarray
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    sure_for: int = 0

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and the response so far."""
        return (*self.request.prompt, *self.request.prefix, *self.tokens)

    def completion(self, stop: StopReason) -> Completion:
        return Completion.of(self.tokens, self.logprobs, self.versions, stop)


@dataclass(frozen=True)
class Work:
    """What one step did: how many responses got a token, and how many tokens were prefilled for it."""

    drawn: int
    read: int


@runtime_checkable
class Owner(Protocol):
    """The session of a stream: its model, and what both obey."""

    model: PreTrainedModel
    device: torch.device
    stop_set: frozenset[int]
    max_rows: int
    version: int

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...


class NativeStream(Stream):
    """One batch of up to `session.max_rows` responses; a waiting response enters when another leaves."""

    def __init__(self, session: Owner) -> None:
        self.session = session
        layers = DynamicCache(config=session.model.config).layers
        assert all(type(layer) is DynamicLayer for layer in layers), "Native.refusal turns others away"
        self.waiting: deque[_Decoding] = deque()
        self.rows: list[_Decoding] = []
        self.ended: list[tuple[int, Completion]] = []
        self.cache: DynamicCache | None = None
        self.mask = torch.zeros(0, 0, dtype=torch.long, device=session.device)  # [cached rows, width of the cache]

    @property
    def busy(self) -> bool:
        """Whether any response is in flight."""
        return bool(self.rows or self.waiting)

    def add(self, key: int, request: Request) -> None:
        if (nothing := already_ended(request, self.session.stop_set)) is not None:
            self.ended.append((key, nothing))
        else:
            noise = token_uniforms(request.noise, len(request.prefix), request.params.max_tokens)
            self.waiting.append(_Decoding(key, request, noise))

    def take(self, wait: bool) -> list[tuple[int, Completion]]:
        if wait and not self.ended and not self.busy:
            raise ValueError("nothing is being drawn: add a request before waiting for one")
        while wait and not self.ended and self.busy:
            self.step()
        taken, self.ended = self.ended, []
        return taken

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keeps_cache: bool) -> None:
        self.session.update_weights(weights, version)
        if not keeps_cache:
            self._forget()

    def partial(self) -> dict[int, Completion]:
        growing = {row.key: row.completion(StopReason.ABORTED) for row in (*self.rows, *self.waiting)}
        return dict(self.ended) | growing

    def drain(self) -> dict[int, Completion]:
        parts = self.partial()
        self.rows, self.ended = [], []
        self.waiting.clear()
        self._forget()
        return parts

    @property
    def read_by_recomputing(self) -> tuple[int, ...]:
        """The length of each text that a recomputed cache would hold."""
        return tuple(len(row.text) - 1 for row in self.rows)

    @torch.inference_mode()
    def step(self) -> Work:
        """Sample one token for every response in the batch, then remove the responses that have ended."""
        while self.waiting and len(self.rows) < self.session.max_rows:
            self.rows.append(self.waiting.popleft())
        read = self._fill_cache()
        logits = self._feed()
        self._draw(logits)
        drawn = len(self.rows)
        self._let_go()
        return Work(drawn, read)

    def _forget(self) -> None:
        self.cache, self.mask = None, self.mask.new_zeros(0, 0)

    def _fill_cache(self) -> int:
        """Prefill all but the last token of each new row. Returns how many tokens were prefilled."""
        fresh = [row.text[:-1] for row in self.rows[len(self.mask) :]]
        if not fresh:
            return 0
        own = DynamicCache(config=self.session.model.config)
        if not any(fresh):  # prompts of one token
            self._join(own, self.mask.new_zeros(len(fresh), 0))
            return 0
        _, mask, rows = read_texts(self.session.model, fresh, own)
        select_rows(own, rows)
        self._join(own, mask[rows])
        return int(mask.sum())

    def _join(self, own: DynamicCache, mask: Tensor) -> None:
        """Append the rows of `own` to the cache, with both left-padded to one width."""
        if self.cache is None or not len(self.mask):
            self.cache, self.mask = own, mask
            return
        width = max(self.mask.shape[1], mask.shape[1])
        for layer, new in zip(whole_text_layers(self.cache), whole_text_layers(own)):
            if layer.get_seq_length() == 0 and new.get_seq_length() > 0:
                layer.lazy_initialization(*keys_and_values(new))
            filled = new if new.get_seq_length() > 0 else layer
            for name in ("keys", "values") if width else ():
                like = getattr(filled, name)
                parts = [
                    _widened(getattr(one, name), len(m), like, width) for one, m in ((layer, self.mask), (new, mask))
                ]
                setattr(layer, name, torch.cat(parts))
        self.mask = torch.cat([F.pad(part, (width - part.shape[1], 0)) for part in (self.mask, mask)])

    def _feed(self) -> Float[Tensor, "R V"]:
        """Feed each row's last token and return the logits of its next token."""
        device = self.session.device
        ids = torch.tensor([[row.text[-1]] for row in self.rows], device=device)
        positions = self.mask.sum(dim=1, keepdim=True)
        self.mask = F.pad(self.mask, (0, 1), value=1)
        output = self.session.model(
            input_ids=ids,
            attention_mask=None if self.mask.all() else self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
        )
        return output.logits[:, -1]

    def _draw(self, logits: Float[Tensor, "R V"]) -> None:
        """Sample the next token of each row."""
        device = self.session.device
        params = [row.request.params for row in self.rows]
        noise = torch.tensor([row.noise[len(row.tokens)] for row in self.rows], dtype=torch.float64, device=device)
        temperatures = torch.tensor([one.temperature for one in params], device=device)
        top_ps = torch.tensor([one.top_p for one in params], device=device)
        tokens, logprobs = draw(logits, noise, temperatures, top_ps)
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist()):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.versions.append(self.session.version)
            limit = row.request.params.stop_when_sure
            if limit is not None:
                row.sure_for = row.sure_for + 1 if logprob > math.log(limit.probability) else 0

    def _let_go(self) -> None:
        """Remove ended rows, and the cache columns that only they used."""
        reasons = [self._reason(row) for row in self.rows]
        if not any(reasons):
            return
        self.ended += [(row.key, row.completion(reason)) for row, reason in zip(self.rows, reasons) if reason]
        kept = [place for place, reason in enumerate(reasons) if not reason]
        self.rows = [self.rows[place] for place in kept]
        if not kept:
            self._forget()
            return
        places = torch.tensor(kept, device=self.session.device)
        assert self.cache is not None, "rows that have drawn a token have a cache"
        self.cache.batch_select_indices(places)
        self.mask = self.mask[places]
        unused = int((self.mask.sum(dim=0) > 0).int().argmax())
        if unused:
            self.mask = self.mask[:, unused:]
            for layer in whole_text_layers(self.cache):
                keys, values = keys_and_values(layer)
                layer.keys, layer.values = keys[:, :, unused:], values[:, :, unused:]

    def _reason(self, row: _Decoding) -> StopReason | None:
        """Why this row has ended; None while it is in flight."""
        if row.tokens[-1] in self.session.stop_set:
            return StopReason.EOS
        limit = row.request.params.stop_when_sure
        if limit is not None and row.sure_for >= limit.tokens:
            return StopReason.REPETITION
        if len(row.request.prefix) + len(row.tokens) >= row.request.params.max_tokens:
            return StopReason.LENGTH
        return None

    def to_state(self, with_cache: bool) -> dict[str, Any]:
        """The responses in flight, as plain values without their requests.

        `with_cache` includes the KV cache, for the case that it cannot be recomputed.
        """
        cached = self.cache if with_cache and len(self.mask) > 0 else None
        return {
            "rows": [
                {name: getattr(row, name) for name in ("key", "tokens", "logprobs", "versions", "sure_for")}
                for row in (*self.rows, *self.waiting)
            ],
            "placed": len(self.rows),
            "mask": None if cached is None else self.mask.cpu().clone(),
            "cache": None if cached is None else [_on_cpu(layer) for layer in whole_text_layers(cached)],
        }

    def from_state(self, state: dict[str, Any], requests: Mapping[int, Request]) -> None:
        """Continue from what `to_state` returned; `requests` holds each key's request."""
        for row in state["rows"]:
            self.add(row["key"], requests[row["key"]])
            vars(self.waiting[-1]).update(row)
        for key in requests.keys() - {row["key"] for row in state["rows"]}:
            self.add(key, requests[key])  # ended before its first token
        for _ in range(state["placed"]):
            self.rows.append(self.waiting.popleft())
        if state["mask"] is not None:
            device = self.session.device
            self.mask = state["mask"].to(device)
            self.cache = DynamicCache(config=self.session.model.config)
            for layer, (keys, values) in zip(whole_text_layers(self.cache), state["cache"]):
                layer.lazy_initialization(keys.to(device), values.to(device))
                layer.keys, layer.values = keys.to(device), values.to(device)


def _on_cpu(layer: DynamicLayer) -> tuple[Tensor, Tensor]:
    keys, values = keys_and_values(layer)
    return keys.cpu(), values.cpu()


def _widened(part: Tensor | None, rows: int, like: Float[Tensor, "_ H _ D"], width: int) -> Float[Tensor, "R H W D"]:
    """Cached keys or values of `rows` rows, left-padded to `width`; zeros if nothing is cached."""
    if part is None or part.numel() == 0:
        return like.new_zeros(rows, like.shape[1], width, like.shape[3])
    return F.pad(part, (0, 0, width - part.shape[2], 0))
