"""The loss of one microbatch: importance -> surrogate -> update mask, correction -> kl, entropy -> aggregation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from grpo_lab.config.stages import LossTricks
from grpo_lab.tricks.base import NEGLIGIBLE
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.surrogate import Ppo, StepTokens, SurrogateInputs
from grpo_lab.types import Batch, Float, LossOutput, Tensor

PPO = Ppo(clip_low=0.2, clip_high=0.2)  # what a surrogate is measured against, with the ratios of tokens


def policy_loss(
    tricks: LossTricks,
    batch: Batch,
    logprobs: Float[Tensor, "M T"],
    entropy: Float[Tensor, "M T"],
) -> LossOutput:
    """Compose the tricks into the microbatch's share of the step's loss.

    The correction weights multiply the surrogate only. A KL or entropy term is not an estimate under the
    sampler, so a weight would change its meaning. The update mask removes the surrogate only, and no denominator
    knows of it.
    """
    mask, current = batch.loss_mask, logprobs.detach()
    old = old_logprobs(batch, current)
    log_ratio = tricks.importance(logprobs, old, mask)
    inputs = SurrogateInputs(logprobs, log_ratio, batch.advantages, mask, batch.marked)
    if batch.twin_factors is None:
        surrogate = tricks.surrogate(inputs)
    else:
        surrogate = tricks.surrogate.with_factors(inputs, batch.twin_factors)
    weights = torch.ones_like(current) if batch.correction_weights is None else batch.correction_weights
    if batch.learner_share is not None:  # an interpolated old policy, which had no log-probs before
        weights = tricks.correction(old, batch.sampler_logprobs, mask)
    stays = batch.twin_stays
    if stays is None:
        stays = tricks.update_mask(current, batch.sampler_logprobs, batch.advantages, mask)
    token_loss = torch.where(stays, surrogate.token_loss * weights, 0.0)
    kl_term = tricks.kl(logprobs, old, batch.ref_logprobs)
    entropy_term = tricks.entropy(entropy, batch.entropy_coef)
    loss = tricks.aggregation(token_loss + kl_term + entropy_term, mask, batch.totals)
    if tricks.entropy.imitates:  # a mean of its own, over the right responses of the optimiser step
        entropy_term = tricks.entropy.imitation(logprobs, batch.right, batch.entropy_coef)
        loss = loss + (entropy_term * mask).sum() / max(batch.right_tokens, 1)
    with torch.no_grad():
        moved = current - old  # log-ratio of the learner now to the old policy
        total = partial(_total, mask)
        each = torch.ones_like(current)
        plain = PPO(SurrogateInputs(current, moved, batch.advantages, mask)).weight
        unlike = (surrogate.weight - plain).abs() > NEGLIGIBLE * plain.clamp(min=1)
        sums = {
            "tokens": mask.sum().to(torch.float64),
            "entropy": total(entropy),
            "ratio": total(moved.exp()),
            "k3_old": total(moved.exp() - 1 - moved),
            "surrogate_active": total(surrogate.affected),
            "surrogate_weight": total(surrogate.weight),
            "unlike_ppo": total(unlike & (batch.advantages != 0)),
            "masked": total(~stays),
            "correction_weight": total(weights),
            "importance_active": total(tricks.surrogate.uses_ratio & ((log_ratio - moved).abs() > NEGLIGIBLE)),
            "drifted": total(moved.abs() > NEGLIGIBLE),
            "kl_term": total(kl_term),
            "kl_active": total(kl_term != 0),
            "entropy_term": total(entropy_term),
            "entropy_active": total(entropy_term != 0),
            "weight": tricks.aggregation(each, mask, batch.totals).to(torch.float64),
            "weight_of_original": tricks.aggregation(each, mask, batch.original_totals).to(torch.float64),
        }
        if batch.learner_share is not None:
            sums["correction_active"] = total((weights - 1).abs() > NEGLIGIBLE)
        if batch.ref_logprobs is not None:
            from_ref = batch.ref_logprobs - current
            sums["k3_ref"] = total(from_ref.exp() - 1 - from_ref)
    return LossOutput(loss, sums, surrogate.affected.detach() & mask)


def old_logprobs(batch: Batch, current: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
    """Log-probs of the old policy in an update in which the learner's are `current`, without gradient."""
    if batch.learner_share is not None:
        return batch.sampler_logprobs + batch.learner_share * (current - batch.sampler_logprobs)
    return current if batch.old_logprobs is None else batch.old_logprobs


def _total(mask: Tensor, values: Tensor) -> Tensor:
    return torch.where(mask, values.to(torch.float64), 0.0).sum()


@torch.no_grad()
def mark_tokens(
    tricks: LossTricks,
    batches: Sequence[Batch],
    logprobs: Sequence[Tensor],
    noise: Float[Tensor, "N T"],
) -> list[Batch]:
    """The microbatches of one optimiser step, with `marked` set to the tokens that the surrogate chooses.

    `logprobs` are the learner's at this update, [M, T] each. `noise` is one uniform number per token of the rollout
    batch. The surrogate gets the tokens in the order of the rollouts, so microbatching decides no tie.
    """
    scope = tricks.surrogate.mark_scope
    if scope is None or not batches:
        return list(batches)
    if scope is Scope.microbatch and len(batches) > 1:
        return [mark_tokens(tricks, [batch], [values], noise)[0] for batch, values in zip(batches, logprobs)]
    parts = []
    for batch, values in zip(batches, logprobs):
        log_ratio = _log_ratio(tricks, batch, values)
        parts.append(
            torch.stack([part[batch.loss_mask] for part in (values, log_ratio, batch.advantages.to(values.dtype))])
        )
    address = _addresses(batches, noise.shape[1])
    order = torch.argsort(address)
    values, log_ratio, advantages = torch.cat(parts, dim=1)[:, order]
    drawn = noise.to(address.device).flatten()[address[order]]
    chosen = torch.empty_like(order, dtype=torch.bool)
    chosen[order] = tricks.surrogate.mark(StepTokens(values, log_ratio, advantages, drawn.to(values.dtype)))
    marked = []
    for batch, part in zip(batches, chosen.split([part.shape[1] for part in parts])):
        marks = torch.zeros_like(batch.loss_mask)
        marks[batch.loss_mask] = part
        marked.append(replace(batch, marked=marks))
    return marked


@torch.no_grad()
def draw_twins(
    tricks: LossTricks,
    batches: Sequence[Batch],
    logprobs: Sequence[Tensor],
    noise: Mapping[Selects, Float[Tensor, "N T"]],
) -> list[Batch]:
    """The microbatches of one optimiser step, with what surrogate and update mask do to a token dealt out again.

    `noise` has the axes of which the run has a random twin. The tokens in the loss with an advantage exchange their
    surrogate's factors (the weight divided by the weight without the trust region), and whether the update mask keeps
    them. Where a response is judged as a whole, whole rows do. `logprobs` and each noise are as in `mark_tokens`;
    microbatching decides nothing.
    """
    drawn = list(batches)
    eligible = [batch.loss_mask & (batch.advantages != 0) for batch in batches]
    for axis, numbers in noise.items() if batches else ():
        if axis is Selects.surrogate:
            own = [_factors(tricks, batch, values) for batch, values in zip(batches, logprobs)]
            dealt = _dealt_out(batches, own, eligible, not tricks.importance.per_token, numbers)
            drawn = [replace(batch, twin_factors=part) for batch, part in zip(drawn, dealt)]
        else:
            own = [
                tricks.update_mask(values, batch.sampler_logprobs, batch.advantages, batch.loss_mask)
                for batch, values in zip(batches, logprobs)
            ]
            dealt = _dealt_out(batches, own, eligible, not tricks.update_mask.divides_rows, numbers)
            drawn = [replace(batch, twin_stays=part) for batch, part in zip(drawn, dealt)]
    return drawn


def _factors(tricks: LossTricks, batch: Batch, logprobs: Tensor) -> Tensor:
    log_ratio = _log_ratio(tricks, batch, logprobs)
    inputs = SurrogateInputs(logprobs, log_ratio, batch.advantages, batch.loss_mask, batch.marked)
    opened = tricks.surrogate.open_weight(inputs)
    return torch.where(opened > 0, tricks.surrogate(inputs).weight / opened, 1.0)


def _dealt_out(
    batches: Sequence[Batch], own: Sequence[Tensor], eligible: Sequence[Tensor], by_row: bool, noise: Tensor
) -> list[Tensor]:
    """Each microbatch's values [M T], exchanged by `noise` among the eligible tokens of all; 1 on the other tokens.

    `by_row`: whole rows exchange the value of their first eligible token.
    """
    units = [mask & (mask.cumsum(dim=1) == 1) if by_row else mask for mask in eligible]
    address = _addresses([replace(batch, loss_mask=unit) for batch, unit in zip(batches, units)], noise.shape[1])
    order = torch.argsort(address)
    values = torch.cat([part[unit] for part, unit in zip(own, units)])
    drawn = noise.to(address.device).flatten()[address[order]]
    dealt = torch.empty_like(values)
    dealt[order] = values[order][drawn.argsort(stable=True)]
    found = []
    for unit, mask, part in zip(units, eligible, dealt.split([int(unit.sum()) for unit in units])):
        given = torch.ones_like(mask, dtype=values.dtype)
        given[unit] = part
        if by_row:
            rows = torch.where(unit, given, 0).sum(dim=1, keepdim=True).to(values.dtype)
            given = torch.where(mask, rows, torch.ones_like(rows))
        found.append(given)
    return found


def _log_ratio(tricks: LossTricks, batch: Batch, logprobs: Tensor) -> Tensor:
    return tricks.importance(logprobs, old_logprobs(batch, logprobs), batch.loss_mask)


def _addresses(batches: Sequence[Batch], width: int) -> Tensor:
    """Row * width + column, in the rollouts, of each token in the loss of the microbatches, in their order."""
    found = []
    for batch in batches:
        rows, columns = batch.loss_mask.nonzero(as_tuple=True)
        found.append(batch.rows.to(rows.device)[rows] * width + columns)
    return torch.cat(found)
