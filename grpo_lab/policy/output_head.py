"""From hidden states to log-probs of given tokens, with a bounded number of logits in memory.

Logits of 4,096 positions over a vocabulary of 152,000 tokens take 2.5 GB in fp32, and their log-softmax and its
gradient as much again. Here logits are computed in chunks of positions and discarded. The backward pass computes
each chunk again from its hidden states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from grpo_lab.policy.models import uncompiled, widen
from grpo_lab.types import Float, Int, Tensor

# Names in transformers configurations of changes to the logits after the head; each does nothing at None, 0 or 1.
_SCORE_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier", "logits_soft_cap")
_linear: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
LogProbs = tuple[Float[Tensor, "K"], Float[Tensor, "K"] | None]


def of_logits(
    logits: Float[Tensor, "K V"],
    targets: Int[Tensor, "K"],
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
    collision: bool = False,
) -> LogProbs:
    """Log-prob of each target and, with `with_entropy`, the entropy (nats) of the full softmax at `temperature`.

    With `collision` the second is instead the sum of the squared probabilities of that softmax, without gradient: the
    probability that two tokens drawn from it are the same.
    """
    log_softmax = torch.log_softmax(widen(logits) / temperature, dim=-1)
    picked = log_softmax.gather(1, targets[:, None]).squeeze(1)
    if collision:
        with torch.no_grad():
            return picked, (2 * log_softmax).exp().sum(dim=-1)
    if not with_entropy:
        return picked, None
    with contextlib.nullcontext() if entropy_gradient else torch.no_grad():
        return picked, -(log_softmax.exp() * log_softmax).sum(dim=-1)


def in_chunks(
    logits_of: Callable[[Float[Tensor, "C H"]], Float[Tensor, "C V"]],
    hidden: Float[Tensor, "K H"],
    targets: Int[Tensor, "K"],
    temperature: float,
    with_entropy: bool,
    entropy_gradient: bool,
    positions: int,
    collision: bool = False,
) -> LogProbs:
    """`of_logits` of the head's logits, for at most `positions` hidden states at a time, forward and backward."""

    def part(states: Tensor, target: Tensor) -> LogProbs:
        return of_logits(logits_of(states), target, temperature, with_entropy, entropy_gradient, collision)

    if len(hidden) <= positions:
        return part(hidden, targets)
    parts = [
        checkpoint(part, states, target, use_reentrant=False, preserve_rng_state=False)
        for states, target in zip(hidden.split(positions), targets.split(positions))
    ]
    picked = torch.cat([one[0] for one in parts])
    return picked, torch.cat([one[1] for one in parts]) if with_entropy or collision else None


def linear_head(model: nn.Module) -> nn.Linear | None:
    """The output head, if the model's logits are exactly this head applied to the body's last hidden states.

    None if the model changes its logits further (soft caps, scales) or has no such parts: then call its own forward.
    Checked in the configuration and, once for each model, by comparing logits of a few tokens bit for bit.
    """
    if not isinstance(model, PreTrainedModel) or model.base_model is model:
        return None
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return None
    if model not in _linear:
        config = model.config.get_text_config(decoder=True)
        changed = any(getattr(config, name, None) not in (None, 0, 1) for name in _SCORE_CHANGES)
        with uncompiled(model):
            _linear[model] = not changed and _is_whole(model, head)
    return head if _linear[model] else None


@torch.no_grad()
def _is_whole(model: PreTrainedModel, head: nn.Linear) -> bool:
    ids = torch.arange(min(4, head.weight.shape[0]), device=head.weight.device)[None]
    states = model.base_model(input_ids=ids, use_cache=False)
    return torch.equal(head(states.last_hidden_state), model(input_ids=ids, use_cache=False).logits)
