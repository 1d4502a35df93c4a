"""The output head on a GPU: log-probs and entropies from logits in half precision, the gradient written over them.

Compiled, a chunk of logits is the only tensor of its size: one kernel reads it, and one puts its gradient in its
place. With several chunks the backward pass computes each again. For logits z, p = softmax(z / T) and its entropy H:
d log p_i / dz_j = (1[i = j] - p_j) / T and dH / dz_j = -p_j (log p_j + H) / T.

liger-kernel 0.8.5 gives the same numbers, but reads its targets back to the CPU in every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from grpo_lab.policy.models import product_dtype, widen
from grpo_lab.types import Float, Int, Tensor

_logger = logging.getLogger(__name__)


def can_fuse(head: nn.Linear) -> bool:
    """True if `fused_logprobs` computes what this head does: the product with its weight and nothing else."""
    return type(head) is nn.Linear and head.bias is None


def fused_logprobs(
    head: nn.Linear,
    hidden: Float[Tensor, "K H"],
    targets: Int[Tensor, "K"],
    temperature: float,
    entropy_gradient: bool,
    positions: int,
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"]]:
    """Log-prob of each target and entropy (nats) at `temperature`, for at most `positions` hidden states at a time.

    The logits have the type of a product under the caller's autocast. The entropy has a gradient if `entropy_gradient`.
    """
    applied: Any = _FusedHead.apply(hidden, head.weight, targets, temperature, entropy_gradient, positions)
    return applied


def read_rows(
    logits: Float[Tensor, "K V"], targets: Int[Tensor, "K"], temperature: float
) -> tuple[Float[Tensor, "K"], Float[Tensor, "K"], Float[Tensor, "K"]]:
    """Log-prob of each target, log-sum-exp and entropy (nats) of the scaled logits."""
    scaled = widen(logits) / temperature
    total = scaled.logsumexp(dim=-1)
    logprobs = scaled - total[:, None]
    picked = logprobs.gather(1, targets[:, None]).squeeze(1)
    return picked, total, -(logprobs.exp() * logprobs).sum(dim=-1)


def put_gradient(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, "K"],
    total: Float[Tensor, "K"],
    entropy: Float[Tensor, "K"],
    to_picked: Float[Tensor, "K"],
    to_entropy: Float[Tensor, "K"],
    temperature: float,
) -> None:
    """Overwrite logits with their gradient, given the gradients of what `read_rows` returned."""
    logprobs = widen(logits) / temperature - total[:, None]
    probs = logprobs.exp()
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = torch.where(is_target, to_picked[:, None], 0.0) - probs * to_picked[:, None]
    gradient = gradient - to_entropy[:, None] * probs * (logprobs + entropy[:, None])
    logits.copy_(gradient / temperature)


class _FusedHead(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, spreads: bool, positions: int
    ) -> tuple[Tensor, Tensor]:
        dtype = product_dtype(hidden)
        states, matrix = hidden.to(dtype), weight.to(dtype)
        read, _ = _kernels(hidden.device.type, dtype)
        kept = F.linear(states, matrix) if len(states) <= positions else None
        rows = [  # each chunk's logits are free again before the next one's are made
            read(F.linear(part, matrix) if kept is None else kept, target, temperature)
            for part, target in zip(states.split(positions), targets.split(positions))
        ]
        picked, total, entropy = (torch.cat(column) for column in zip(*rows))
        if not spreads:
            ctx.mark_non_differentiable(entropy)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, matrix, targets, total, entropy, kept)
        ctx.temperature, ctx.positions, ctx.dtypes = temperature, positions, (hidden.dtype, weight.dtype)
        return picked, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *to_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        states, matrix, targets, total, entropy, kept = ctx.saved_tensors
        _, put = _kernels(states.device.type, states.dtype)
        to_states = torch.empty_like(states, dtype=ctx.dtypes[0]) if ctx.needs_input_grad[0] else None
        to_weight = None
        outputs = [torch.zeros_like(total) if one is None else one for one in to_outputs]
        logits = kept
        for first in range(0, len(states), ctx.positions):
            part = slice(first, first + ctx.positions)
            if kept is None:
                logits = None  # free before the next chunk's are made
                logits = F.linear(states[part], matrix)
            put(logits, targets[part], total[part], entropy[part], *(one[part] for one in outputs), ctx.temperature)
            if to_states is not None:
                to_states[part] = logits @ matrix
            if ctx.needs_input_grad[1]:
                added = (logits.T @ states[part]).to(ctx.dtypes[1])
                to_weight = added if to_weight is None else to_weight.add_(added)
        return to_states, to_weight, None, None, None, None


@cache
def _kernels(device: str, dtype: torch.dtype) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`read_rows` and `put_gradient`, each compiled into one kernel on a GPU if that works there."""
    plain = read_rows, put_gradient
    if device != "cuda":
        return plain
    read, put = (torch.compile(function, dynamic=True) for function in plain)
    try:
        found = [_probe(*pair, device, dtype) for pair in (plain, (read, put))]
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # no compiler, or no Triton for this GPU
        _logger.warning("the output head is not compiled (slower, more memory): %s", str(error).partition("\n")[0])
        return plain
    if not torch.allclose(*found, rtol=0.02, atol=0.02):
        _logger.warning("the output head is not compiled (slower, more memory): compiled, it gives other numbers")
        return plain
    return read, put


def _probe(read: Callable[..., Any], put: Callable[..., Any], device: str, dtype: torch.dtype) -> Tensor:
    """The outputs of both functions for a few rows, as one tensor."""
    logits = torch.linspace(-3, 3, 7 * 300, device=device).cos().mul(4).view(7, 300).to(dtype)
    targets = torch.arange(7, device=device)
    picked, total, entropy = read(logits, targets, 0.7)
    put(logits, targets, total, entropy, torch.ones_like(total), torch.full_like(total, 0.5), 0.7)
    return torch.cat([one.flatten().float() for one in (picked, total, entropy, logits)])
