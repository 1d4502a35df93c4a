"""The loss of one microbatch: importance -> surrogate -> correction -> kl, entropy -> aggregation."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lab.config import RunConfig
from grpo_lab.types import Batch, LossOutput


def policy_loss(
    run: RunConfig,
    batch: Batch,
    logprobs: Float[Tensor, "M T"],
    entropy: Float[Tensor, "M T"],
) -> LossOutput:
    """Compose the run's tricks into the microbatch's share of the step's loss.

    The correction weights multiply the surrogate only: a KL or entropy term is not an estimate under the
    sampler, so weighting it would change its meaning.
    """
    current = logprobs.detach()
    old = current if batch.old_logprobs is None else batch.old_logprobs
    log_ratio = run.importance(logprobs, old, batch.loss_mask)
    surrogate = run.surrogate(logprobs, log_ratio, batch.advantages)
    token_loss = surrogate.token_loss
    if batch.correction_weights is not None:
        token_loss = token_loss * batch.correction_weights
    kl_term = run.kl(logprobs, batch.ref_logprobs)
    entropy_term = run.entropy(entropy)
    loss = run.aggregation(token_loss + kl_term + entropy_term, batch.loss_mask, batch.totals)
    with torch.no_grad():
        mask = batch.loss_mask
        moved = current - old  # learner now against learner before the updates
        mismatch = old - batch.sampler_logprobs  # learner before the updates against the sampler

        def total(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(torch.float64), 0.0).sum()

        sums = {
            "tokens": mask.sum().to(torch.float64),
            "entropy": total(entropy),
            "ratio": total(moved.exp()),
            "k3_old": total(moved.exp() - 1 - moved),
            "surrogate_touched": total(surrogate.touched),
            "kl_term": total(kl_term),
            "kl_touched": total(kl_term != 0),
            "entropy_touched": total(entropy_term != 0),
            "mismatch_absolute": total(mismatch.abs()),
            "mismatch_k3": total(mismatch.exp() - 1 - mismatch),
        }
        if batch.ref_logprobs is not None:
            from_ref = batch.ref_logprobs - current
            sums["k3_ref"] = total(from_ref.exp() - 1 - from_ref)
        maxima = {"mismatch_max": torch.where(mask, mismatch.abs(), 0.0).max()}
    return LossOutput(loss, sums, maxima)
