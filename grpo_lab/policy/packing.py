"""Packing: one forward pass without padding, in which a shared prompt is computed once.

The tokens of a microbatch form one long row: each distinct prompt, then its responses. Every operation on single
tokens, which is nearly all the arithmetic, runs on that row. Only attention needs to know which tokens form a
sequence. On a CPU it gathers whole sequences into padded blocks of similar length, in which a prompt's keys and values
appear once for each of its responses, and scatters its results back into the row. On a GPU, in half precision, one
kernel reads sequences of every length (varlen.py).
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_lab.distributed.device import on_device
from grpo_lab.policy.models import uncompiled, with_rounded_weights
from grpo_lab.policy.varlen import Varlen, find_sequences, varlen_attention
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Bool, Float, Int, Microbatching, Tensor

_logger = logging.getLogger(__name__)

NAME = "sdpa_packed"
_LAYERS = {"full_attention", "sliding_attention"}
_PROBE = ((1, 2, 0, 3), (2, 1)), (0, 0, 1), [[1, 3, 0, 2, 1], [2, 0, 1, 1, 3], [3, 1, 2, 2, 0]], [5, 2, 4]
_prepared: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
_varlen: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


PLAIN = Microbatching(microbatch_tokens=2**62, padding_tolerance_tokens=2**62)


@dataclass(frozen=True)
class Blocks:
    """Where attention finds the sequences of a packed row of S tokens.

    `gathers` has one tensor [R, W] for each block: indices into the row for R sequences of at most W tokens. Padding
    points at token 0. `back` [S] is the index of each of the row's tokens in the flattened, concatenated blocks.
    """

    gathers: tuple[Int[Tensor, "_ _"], ...]
    back: Int[Tensor, "S"]


@dataclass(frozen=True)
class PackedRow:
    """A microbatch as one row of S tokens; `before` is the index that predicts each of K masked tokens."""

    ids: Int[Tensor, "1 S"]
    positions: Int[Tensor, "1 S"]
    sequences: Blocks | Varlen
    before: Int[Tensor, "K"]

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the forward of a model whose attention is `NAME`."""
        # transformers passes a 4-D mask on unchanged; without one it would build a mask over all pairs of tokens.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.ids.device)
        return {
            "input_ids": self.ids,
            "position_ids": self.positions,
            "attention_mask": mask,
            "packed": self.sequences,
            "use_cache": False,
        }

    def states(self, body: nn.Module) -> Float[Tensor, "1 S H"]:
        """The last hidden states, by a model without its head."""
        varlen, inputs = isinstance(self.sequences, Varlen), self.inputs()
        return (with_rounded_weights(body, inputs) if varlen else body(**inputs)).last_hidden_state

    def foreseeing(self, states: Float[Tensor, "1 S H"]) -> Float[Tensor, "K H"]:
        """The hidden states that predict the masked tokens."""
        return states.squeeze(0).index_select(0, self.before)

    def logits(self, model: nn.Module) -> Float[Tensor, "K V"]:
        """The logits that predict the masked tokens, by the model's own forward."""
        return model(**self.inputs(), logits_to_keep=self.before).logits[0]


def microbatch_rows(lengths: Sequence[int], microbatching: Microbatching) -> list[list[int]]:
    """Split rows of these total lengths into microbatches of at most `microbatch_tokens` padded tokens.

    A row longer than that gets its own microbatch. Rows are sorted longest first, ties by index.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    groups: list[list[int]] = []
    width = wasted = 0
    for row in order:
        padding = width - lengths[row]
        fits = bool(groups) and (len(groups[-1]) + 1) * width <= microbatching.microbatch_tokens
        if fits and wasted + padding <= microbatching.padding_tolerance_tokens:
            groups[-1].append(row)
            wasted += padding
        else:
            groups.append([row])
            width, wasted = lengths[row], 0
    return groups


def packed_rows(
    prompts: Sequence[tuple[int, ...]], responses: Sequence[int], microbatching: Microbatching
) -> list[list[int]]:
    """Split rows into microbatches of at most `microbatch_tokens` tokens; each counts a shared prompt once.

    Rows keep their order, in which rows with one prompt are neighbours. A microbatch may mix lengths. Each is filled
    before the next one begins; if they are to be balanced, up to the lowest bound that makes no more of them.
    """
    bound = microbatching.microbatch_tokens
    groups = _filled(prompts, responses, bound)
    if not microbatching.balances or len(groups) < 2:
        return groups
    lowest = bisect_left(range(bound), True, key=lambda lower: len(_filled(prompts, responses, lower)) <= len(groups))
    return _filled(prompts, responses, lowest)


def _filled(prompts: Sequence[tuple[int, ...]], responses: Sequence[int], bound: int) -> list[list[int]]:
    groups: list[list[int]] = []
    filled, last = 0, None
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        more = response + (0 if groups and prompt == last else len(prompt))
        if groups and filled + more <= bound:
            groups[-1].append(row)
            filled += more
        else:
            groups.append([row])
            filled = len(prompt) + response
        last = prompt
    return groups


def pack(
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    microbatching: Microbatching,
    varlen: bool = False,
) -> PackedRow:
    """Pack the rows whose `mask` has a True entry, all on the CPU; masked tokens are in the order of `mask.nonzero()`.

    A response's last masked token is not part of the row: it is predicted but predicts nothing. `varlen`: attention
    finds the sequences as its kernel for different lengths wants them, and not in blocks.
    """
    host_tokens, host_mask = tokens.numpy(), mask.numpy()
    ends = np.where(host_mask.any(1), host_mask.shape[1] - host_mask[:, ::-1].argmax(1), 0)
    parts, positions, before, starts = [], [], [], {}
    filled, sequences, own = 0, [], []
    for row, end in enumerate(ends.tolist()):
        if not end:
            continue
        prompt, fresh = prompts[row], prompts[row] not in starts
        if fresh:
            starts[prompt] = filled
            parts.append(np.asarray(prompt))
            positions.append(np.arange(len(prompt)))
            filled += len(prompt)
        parts.append(host_tokens[row, : end - 1])
        positions.append(np.arange(len(prompt), len(prompt) + end - 1))
        shared = np.arange(starts[prompt], starts[prompt] + len(prompt))
        sequences.append(np.concatenate([shared, np.arange(filled, filled + end - 1)]))
        before.append(sequences[-1][len(prompt) - 1 + host_mask[row].nonzero()[0]])
        own.append(0 if fresh else len(prompt))  # first token that takes its result from this sequence
        filled += end - 1
    found = find_sequences(sequences, own, filled) if varlen else _blocks(sequences, own, filled, microbatching)

    def whole(values: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.int64))[None]

    return PackedRow(whole(parts), whole(positions), found, whole(before)[0])


def _blocks(sequences: list[np.ndarray], own: list[int], size: int, microbatching: Microbatching) -> Blocks:
    """Put sequences into blocks of similar length; a shared token takes its result from its first sequence."""
    gathers, back, offset = [], np.zeros(size, dtype=np.int64), 0
    for members in microbatch_rows(
        [len(one) for one in sequences],
        Microbatching(microbatching.microbatch_tokens, microbatching.padding_tolerance_tokens),
    ):
        width = max(len(sequences[member]) for member in members)
        gather = np.zeros((len(members), width), dtype=np.int64)
        for line, member in enumerate(members):
            sequence, first = sequences[member], own[member]
            gather[line, : len(sequence)] = sequence
            back[sequence[first:]] = offset + line * width + np.arange(first, len(sequence))
        gathers.append(torch.from_numpy(gather))
        offset += gather.size
    return Blocks(tuple(gathers), torch.from_numpy(back))


def packed_attention(
    module: nn.Module,
    query: Float[Tensor, "R A S D"],
    key: Float[Tensor, "R B S D"],
    value: Float[Tensor, "R B S E"],
    attention_mask: Tensor | None,
    packed: Blocks | Varlen | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "R S A E"], None]:
    """torch's attention over the sequences of one packed row; without `packed`, plain attention over R rows."""
    if packed is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, sliding_window=sliding_window, **kwargs
        )
    if isinstance(packed, Varlen):
        rows = query.squeeze(0), key.squeeze(0), value.squeeze(0)
        return varlen_attention(*rows, packed, kwargs.get("scaling"), sliding_window)[None], None
    flat = [states.squeeze(0).transpose(0, 1).flatten(1) for states in (query, key, value)]
    results = []
    for gather in packed.gathers:
        lines, width = gather.shape
        queries, keys, values = (
            states.index_select(0, gather.flatten()).view(lines, width, whole.shape[1], -1).transpose(1, 2)
            for states, whole in zip(flat, (query, key, value))
        )
        mask = None
        if sliding_window is not None and width > sliding_window:
            apart = torch.arange(width, device=gather.device)[:, None] - torch.arange(width, device=gather.device)
            mask = ((apart >= 0) & (apart < sliding_window))[None, None]
        attended, _ = sdpa_attention_forward(module, queries, keys, values, mask, **kwargs)
        results.append(attended.reshape(lines * width, -1))
    whole = torch.cat(results) if len(results) > 1 else results[0]
    return whole.index_select(0, packed.back).view(1, query.shape[2], query.shape[1], -1), None


def prepare(model: nn.Module) -> bool:
    """Give the model the attention that packed rows need; False, with the model unchanged, if it cannot pack.

    The configuration does not show whether tokens interact outside attention (a convolution, a recurrence). So the
    hidden states of a few short packed rows are compared with those of the same rows one by one.
    """
    if prepared(model):
        return True
    if not isinstance(model, PreTrainedModel) or not model._supports_attention_backend:
        return False
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if model.config._attn_implementation != "sdpa" or not _LAYERS.issuperset(kinds):
        return False
    model.set_attn_implementation(NAME)
    with uncompiled(model):
        _prepared[model] = _differs(model, False) <= 1e-4
        if not _prepared[model]:
            model.set_attn_implementation("sdpa")
        _varlen[model] = _prepared[model] and next(model.parameters()).is_cuda and _takes_varlen(model)
    return _prepared[model]


def prepared(model: nn.Module) -> bool:
    """True if the model's attention handles packed rows."""
    return _prepared.get(model, False)


def uses_varlen(model: nn.Module, precision: Precision) -> bool:
    """True if the model's packed rows take the kernel for sequences of every length: half precision on a GPU."""
    return precision.rounds and _varlen.get(model, False)


def _takes_varlen(model: PreTrainedModel) -> bool:
    """True if the kernel runs on this GPU with this model's heads and masks correctly: within 0.05 of separate rows."""
    try:
        with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
            return _differs(model, True) <= 0.05
    except (ImportError, RuntimeError, ValueError) as error:  # how it rejects a GPU, a type or a head size
        _logger.warning("torch's varlen attention is not used, padded blocks are (slower): %s", error)
        return False


@torch.no_grad()
def _differs(model: PreTrainedModel, varlen: bool) -> float:
    """The largest difference that packing makes to a hidden state, as a share of the largest; inf if it fails."""
    distinct, owners, responses, lengths = _PROBE
    device = next(model.parameters()).device
    prompts, tokens = [distinct[owner] for owner in owners], torch.tensor(responses)
    mask = torch.arange(tokens.shape[1]) < torch.tensor(lengths)[:, None]
    row = on_device(pack(prompts, tokens, mask, Microbatching(10**6, 1), varlen), device)
    body = model.base_model
    try:
        packed = row.states(body)[0, row.before]
    except TypeError:  # the model does not pass `packed` on to its attention
        return math.inf
    apart, largest, first = 0.0, 0.0, 0
    for prompt, response, length in zip(prompts, responses, lengths):
        alone = torch.tensor([[*prompt, *response[:length]]], device=device)
        states = body(input_ids=alone, use_cache=False).last_hidden_state[0, len(prompt) - 1 : -1]
        apart = max(apart, float((states - packed[first : first + length]).abs().max()))
        largest, first = max(largest, float(states.abs().max())), first + length
    return apart / largest if largest else math.inf


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
