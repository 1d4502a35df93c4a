"""Log-probs of given tokens under the learner or the reference, and a critic's values of the states before them.

A pass is laid out on the CPU and goes to the model's device in one transfer. Nothing there is read back.

Only `lay_out`, and `pack` for rows without padding, shift by one. Everywhere else in the package, column t of an
[N, T] tensor is about response token t.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_lab.distributed.device import on_device
from grpo_lab.policy.fused_head import can_fuse, fused_logprobs
from grpo_lab.policy.models import widen
from grpo_lab.policy.output_head import LogProbs, in_chunks, linear_head, of_logits
from grpo_lab.policy.packing import PLAIN, PackedRow, pack, prepared, uses_varlen
from grpo_lab.policy.sharding import within
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Bool, Float, Int, Microbatching, Tensor


def token_logprobs(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    temperature: float,
    precision: Precision,
    entropy_gradient: bool = False,
    *,
    with_entropy: bool = True,
    microbatching: Microbatching = PLAIN,
) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"] | None]:
    """Log-prob and entropy (nats) of each masked response token; 0 where the mask is False.

    Both are of the full softmax at `temperature`, the distribution the sampler used. Without `with_entropy` the
    entropy is None. `mask` may be True at response tokens only, and only those positions reach the output head.
    Rows are padded on the right, which a causal model cannot see: no attention mask is needed, and positions start
    at each row's prompt. Rows are packed instead if `microbatching` says so and the model was prepared for it.
    """
    laid_out = forward_inputs(model, prompts, tokens.cpu(), mask.cpu(), microbatching, precision)
    inputs = on_device(laid_out, tokens.device)
    return logprobs_of(model, inputs, temperature, precision, with_entropy, entropy_gradient, microbatching)


@dataclass(frozen=True)
class ForwardInputs:
    """Inputs of a forward pass to compute the log-probs of K masked tokens among M responses of T tokens.

    `rows` and `columns` are the tokens' places in the mask, `targets` the tokens.
    """

    layout: PackedRow | PaddedRows
    rows: Int[Tensor, "K"]
    columns: Int[Tensor, "K"]
    targets: Int[Tensor, "K"]
    shape: tuple[int, int]


def forward_inputs(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    microbatching: Microbatching,
    precision: Precision,
) -> ForwardInputs:
    """Lay out the rows of a microbatch for `model`; everything is on the CPU."""
    rows, columns = mask.nonzero(as_tuple=True)
    packs = microbatching.packs and prepared(model) and len(rows) > 0
    if packs:
        layout = pack(prompts, tokens, mask, microbatching, uses_varlen(model, precision))
    else:
        layout = lay_out(prompts, tokens, mask)
    return ForwardInputs(layout, rows, columns, tokens[rows, columns], (mask.shape[0], mask.shape[1]))


def logprobs_of(
    model: nn.Module,
    inputs: ForwardInputs,
    temperature: float,
    precision: Precision,
    with_entropy: bool,
    entropy_gradient: bool,
    microbatching: Microbatching,
    collision: bool = False,
) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"] | None]:
    """`token_logprobs` of rows that are laid out and on the model's device.

    With `collision` the second is not the entropy but the sum of the squared probabilities, as in `of_logits`. The
    fused head does not compute it, so such a pass has its logits in chunks.
    """
    layout, targets, options = inputs.layout, inputs.targets, (temperature, with_entropy, entropy_gradient)
    head = linear_head(model)
    if head is None:
        with _arithmetic(targets.device, precision):
            logits = layout.logits(model)
        picked, spread = of_logits(logits, targets, *options, collision)
    else:
        assert isinstance(model, PreTrainedModel), "linear_head knows the heads of no others"

        def logits_of(states: Tensor) -> Tensor:
            with _arithmetic(targets.device, precision):
                return head(states)

        def read() -> LogProbs:
            with _arithmetic(targets.device, precision):
                hidden = layout.foreseeing(layout.states(model.base_model))
            bound = microbatching.logits_per_chunk
            positions = max(1, len(hidden) if bound is None else bound // head.weight.shape[0])
            if microbatching.fuses_head and can_fuse(head) and not collision:
                with _arithmetic(targets.device, precision):
                    picked, spread = fused_logprobs(head, hidden, targets, temperature, entropy_gradient, positions)
                return picked, spread if with_entropy else None
            return in_chunks(logits_of, hidden, targets, *options, positions, collision)

        picked, spread = within(model, read)
    zeros, place = torch.zeros(inputs.shape, dtype=picked.dtype, device=targets.device), (inputs.rows, inputs.columns)
    return zeros.index_put(place, picked), None if spread is None else zeros.index_put(place, spread)


def token_values(
    features: Callable[[Int[Tensor, "M W"]], Float[Tensor, "M W H"]],
    head: nn.Module,
    layout: PaddedRows,
    shape: tuple[int, int],
    precision: Precision,
) -> Float[Tensor, "M T"]:
    """A critic's value of the state before each masked response token; 0 where the mask is False.

    `layout` is what `lay_out` made of prompts, tokens and mask of `shape` (M, T), on the model's device. `features`
    gives a hidden state for each position of the padded sequences; `head` turns each into one number.
    """
    with _arithmetic(layout.ids.device, precision):
        hidden = layout.foreseeing(features(layout.ids))
    values = head(widen(hidden)).squeeze(-1)
    zeros = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return zeros.index_put((layout.rows, layout.columns), values)


@dataclass(frozen=True)
class PaddedRows:
    """Prompts and responses as one padded batch of width W, and the position that predicts each masked token."""

    ids: Int[Tensor, "M W"]
    rows: Int[Tensor, "K"]
    columns: Int[Tensor, "K"]
    before: Int[Tensor, "K"]  # the position that predicts each token: one before the token's own
    first: int  # the first such position of any row

    def inputs(self) -> dict[str, Any]:
        """Keyword arguments for the model's forward."""
        return {"input_ids": self.ids, "use_cache": False}

    def states(self, body: nn.Module) -> Float[Tensor, "M W H"]:
        """The last hidden states, by a model without its head."""
        return body(**self.inputs()).last_hidden_state

    def foreseeing(self, states: Float[Tensor, "M W H"]) -> Float[Tensor, "K H"]:
        """The hidden states that predict the masked tokens."""
        return states[self.rows, self.before]

    def logits(self, model: nn.Module) -> Float[Tensor, "K V"]:
        """The logits that predict the masked tokens, by the model's own forward."""
        output = model(**self.inputs(), logits_to_keep=self.ids.shape[1] - self.first)
        return output.logits[self.rows, self.before - self.first]


def lay_out(prompts: Sequence[tuple[int, ...]], tokens: Int[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> PaddedRows:
    """Prompts, each followed by its response up to the last token in `mask`, on the CPU."""
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts])
    widths = [len(prompt) + length for prompt, length in zip(prompts, mask_lengths(mask))]
    ids = torch.zeros(len(prompts), max(widths), dtype=torch.long)
    for row, (prompt, width) in enumerate(zip(prompts, widths)):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : width] = tokens[row, : width - len(prompt)]
    rows, columns = mask.nonzero(as_tuple=True)
    # The shift by one: token t of the response is predicted at position prompt + t - 1.
    before = prompt_lengths[rows] + columns - 1
    return PaddedRows(ids, rows, columns, before, int(prompt_lengths.min()) - 1)


def _arithmetic(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager:
    if precision.dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)


def mask_lengths(mask: Bool[Tensor, "M T"]) -> list[int]:
    """One plus the last True column of each row; 0 for an empty row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(dim=1).tolist()
