"""Log-probs of given tokens under the learner or the reference, and a critic's values of the states before them.

`_lay_out` is the only place of the package that shifts by one: everywhere else column t of an [N, T] tensor is
about response token t.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo_lab.models import widen
from grpo_lab.tricks.precision import Precision


def token_logprobs(
    model: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    temperature: float,
    precision: Precision,
    entropy_gradient: bool = False,
) -> tuple[Float[Tensor, "M T"], Float[Tensor, "M T"]]:
    """Log-prob and entropy (nats) of each masked response token; 0 where the mask is False.

    Both are of the whole softmax at `temperature`, the distribution the sampler drew from. `mask` must
    cover response tokens only. Rows are padded on the right, where a causal model cannot see it, so no
    attention mask is needed and every row counts its positions from its own prompt.
    """
    layout = _lay_out(prompts, tokens, mask)
    with _arithmetic(tokens.device, precision):
        output = model(input_ids=layout.ids, use_cache=False, logits_to_keep=layout.ids.shape[1] - layout.first)
    scores = widen(output.logits[layout.rows, layout.before - layout.first]) / temperature
    log_softmax = torch.log_softmax(scores, dim=-1)
    picked = log_softmax.gather(1, tokens[layout.rows, layout.columns][:, None]).squeeze(1)
    with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
        spread = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    zeros = torch.zeros(tokens.shape, dtype=scores.dtype, device=tokens.device)
    place = (layout.rows, layout.columns)
    return zeros.index_put(place, picked), zeros.index_put(place, spread)


def token_values(
    features: Callable[[Int[Tensor, "M W"]], Float[Tensor, "M W H"]],
    head: nn.Module,
    prompts: Sequence[tuple[int, ...]],
    tokens: Int[Tensor, "M T"],
    mask: Bool[Tensor, "M T"],
    precision: Precision,
) -> Float[Tensor, "M T"]:
    """A critic's value of the state before each masked response token; 0 where the mask is False.

    `features` gives a hidden state for each position of the padded sequences, `head` one number for each of them.
    """
    layout = _lay_out(prompts, tokens, mask)
    with _arithmetic(tokens.device, precision):
        hidden = features(layout.ids)[layout.rows, layout.before]
    values = head(widen(hidden)).squeeze(-1)
    zeros = torch.zeros(tokens.shape, dtype=values.dtype, device=tokens.device)
    return zeros.index_put((layout.rows, layout.columns), values)


@dataclass(frozen=True)
class _Layout:
    """Prompts and responses as one padded batch of W positions, and where in it each masked token is foreseen."""

    ids: Int[Tensor, "M W"]
    rows: Int[Tensor, "K"]
    columns: Int[Tensor, "K"]
    before: Int[Tensor, "K"]  # the position whose output is about the token: one before its own
    first: int  # the first such position of any row


def _lay_out(prompts: Sequence[tuple[int, ...]], tokens: Int[Tensor, "M T"], mask: Bool[Tensor, "M T"]) -> _Layout:
    device = tokens.device
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    widths = [len(prompt) + length for prompt, length in zip(prompts, mask_lengths(mask))]
    ids = torch.zeros(len(prompts), max(widths), dtype=torch.long)
    host_tokens = tokens.cpu()
    for row, (prompt, width) in enumerate(zip(prompts, widths)):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : width] = host_tokens[row, : width - len(prompt)]
    rows, columns = mask.nonzero(as_tuple=True)
    # The shift by one: token t of the response is foreseen at position prompt + t - 1.
    before = prompt_lengths[rows] + columns - 1
    return _Layout(ids.to(device), rows, columns, before, int(prompt_lengths.min()) - 1)


def _arithmetic(device: torch.device, precision: Precision) -> contextlib.AbstractContextManager:
    if precision.dtype is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=precision.dtype)


def mask_lengths(mask: Bool[Tensor, "M T"]) -> list[int]:
    """One plus the last True column of each row; 0 for an empty row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(dim=1).tolist()
