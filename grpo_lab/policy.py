"""Log-probs of given tokens under the learner or the reference.

`token_logprobs` is the only place of the package that shifts by one: everywhere else column t of an
[N, T] tensor is about response token t.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

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
    device = tokens.device
    prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    widths = [len(prompt) + length for prompt, length in zip(prompts, mask_lengths(mask))]
    ids = torch.zeros(len(prompts), max(widths), dtype=torch.long)
    host_tokens = tokens.cpu()
    for row, (prompt, width) in enumerate(zip(prompts, widths)):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        ids[row, len(prompt) : width] = host_tokens[row, : width - len(prompt)]
    first = int(prompt_lengths.min()) - 1  # the first position whose logits any row needs
    autocast = (
        contextlib.nullcontext()
        if precision.dtype is torch.float32
        else torch.autocast(device.type, dtype=precision.dtype)
    )
    with autocast:
        logits = model(input_ids=ids.to(device), use_cache=False, logits_to_keep=max(widths) - first).logits
    rows, columns = mask.nonzero(as_tuple=True)
    # The shift by one: token t of the response is predicted at position prompt + t - 1.
    predicted_at = prompt_lengths[rows] + columns - 1 - first
    scores = widen(logits[rows, predicted_at]) / temperature
    log_softmax = torch.log_softmax(scores, dim=-1)
    picked = log_softmax.gather(1, tokens[rows, columns][:, None]).squeeze(1)
    with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
        spread = -(log_softmax.exp() * log_softmax).sum(dim=-1)
    zeros = torch.zeros(tokens.shape, dtype=scores.dtype, device=device)
    return zeros.index_put((rows, columns), picked), zeros.index_put((rows, columns), spread)


def mask_lengths(mask: Bool[Tensor, "M T"]) -> list[int]:
    """One plus the last True column of each row; 0 for an empty row."""
    columns = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    return (mask * columns).amax(dim=1).tolist()
