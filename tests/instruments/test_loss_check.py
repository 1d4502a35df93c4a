"""The loss check names every planted fault, and passes the loss without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_lab.instruments.loss_check.command import report_on
from grpo_lab.instruments.loss_check.report import Report

LOW, HIGH, KL = 0.2, 0.28, 0.05


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    return (logprobs - old_logprobs).clamp(-20, 20).exp()


def ppo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, low: float = LOW, high: float = HIGH) -> Tensor:
    """[N, T]: the surrogate without a fault."""
    ratio, a = ratio_of(logprobs, old_logprobs), advantages[:, None]
    return -torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def over_tokens(token_loss: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
    return torch.where(mask, token_loss, 0.0).sum() / max(num_tokens, 1)


def over_rows(token_loss: Tensor, mask: Tensor, num_rows: int) -> Tensor:
    return (torch.where(mask, token_loss, 0.0).sum(1) / mask.sum(1).clamp(min=1)).sum() / num_rows


def token_mean(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages), mask, num_tokens)


def sequence_mean(logprobs, old_logprobs, advantages, mask, num_rows):
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


def gspo(logprobs, old_logprobs, advantages, mask, num_rows):
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    ratio = log_ratio.clamp(-20, 20).exp()[:, None].expand_as(logprobs)
    a = advantages[:, None]
    return over_rows(-torch.minimum(ratio * a, ratio.clamp(1 - 3e-4, 1 + 4e-4) * a), mask, num_rows)


def reinforce_icepop(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (old_logprobs - sampler_logprobs).exp()
    weight = torch.where((weight >= 0.5) & (weight <= 5), weight, 0.0)
    return over_tokens(-weight * advantages[:, None] * logprobs, mask, num_tokens)


def of_sampler(logprobs, sampler_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, sampler_logprobs, advantages), mask, num_tokens)


def with_kl(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = ref_logprobs - logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (above.exp() - above - 1), mask, num_tokens)


SOUND = {
    token_mean: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none aggregation=token_mean",
    sequence_mean: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none "
    "aggregation=sequence_mean",
    gspo: "surrogate=ppo_gspo importance=sequence old_policy=recomputed correction=none aggregation=sequence_mean",
    reinforce_icepop: "surrogate=reinforce correction=icepop aggregation=token_mean denominator=survivors",
    of_sampler: "surrogate=ppo_higher importance=token old_policy=sampler correction=none aggregation=token_mean",
    with_kl: "surrogate=ppo_higher importance=token old_policy=recomputed correction=none aggregation=token_mean "
    "denominator=survivors kl=k3_loss",
}  # fmt: skip


def checked(function: Callable[..., Any], **more: Any) -> Report:
    return report_on(function.__name__, function, **more)


@pytest.mark.parametrize("function", SOUND, ids=lambda one: one.__name__)
def test_a_loss_without_a_fault_passes(function: Callable[..., Any]) -> None:
    report = checked(function)
    assert report.ok, report.text()
    assert report.equals[0].startswith(SOUND[function]), report.text()
    assert report.factor == pytest.approx(1, abs=1e-5) or function is with_kl


# --- planted faults -------------------------------------------------------------------------------------------


def padded_mean(logprobs, old_logprobs, advantages, mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).mean()


def plain_sum(logprobs, old_logprobs, advantages, mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).sum()


def prompts_in_denominator(logprobs, old_logprobs, advantages, mask, attention_mask):
    return (ppo(logprobs, old_logprobs, advantages) * mask).sum() / attention_mask.sum()


def prompts_in_loss(logprobs, old_logprobs, advantages, attention_mask):
    return (ppo(logprobs, old_logprobs, advantages) * attention_mask).sum() / attention_mask.sum()


def mask_too_early(logprobs, old_logprobs, advantages, mask):
    early = torch.cat([mask[:, 1:], torch.zeros_like(mask[:, :1])], dim=1)
    return (ppo(logprobs, old_logprobs, advantages) * early).sum() / early.sum()


def mask_too_late(logprobs, old_logprobs, advantages, mask):
    late = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return (ppo(logprobs, old_logprobs, advantages) * late).sum() / late.sum()


def last_token_lost(logprobs, old_logprobs, advantages, mask):
    kept = mask & (mask.flip(1).cumsum(1).flip(1) > 1)
    return (ppo(logprobs, old_logprobs, advantages) * kept).sum() / kept.sum()


def no_mask(logprobs, old_logprobs, advantages):
    return ppo(logprobs, old_logprobs, advantages).mean()


def length_plus_one(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / (mask.sum(1) + 1)).mean()


def longest_length(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1).max()).mean()


def rows_summed(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1).clamp(min=1)).sum()


def sign_flipped(logprobs, old_logprobs, advantages, mask, num_tokens):
    return -token_mean(logprobs, old_logprobs, advantages, mask, num_tokens)


def inverted_ratio(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(old_logprobs, logprobs, advantages), mask, num_tokens)


def no_exp(logprobs, old_logprobs, advantages, mask, num_tokens):
    ratio, a = logprobs - old_logprobs, advantages[:, None]
    return over_tokens(-torch.minimum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a), mask, num_tokens)


def max_for_min(logprobs, old_logprobs, advantages, mask, num_tokens):
    ratio, a = ratio_of(logprobs, old_logprobs), advantages[:, None]
    return over_tokens(-torch.maximum(ratio * a, ratio.clamp(1 - LOW, 1 + HIGH) * a), mask, num_tokens)


def bounds_exchanged(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages, HIGH, LOW), mask, num_tokens)


def clip_only(logprobs, old_logprobs, advantages, mask, num_tokens):
    clipped = ratio_of(logprobs, old_logprobs).clamp(1 - LOW, 1 + HIGH)
    return over_tokens(-clipped * advantages[:, None], mask, num_tokens)


def log_clip(logprobs, old_logprobs, advantages, mask, num_tokens):
    log_ratio, a = logprobs - old_logprobs, advantages[:, None]
    return over_tokens(
        -torch.minimum(log_ratio.exp() * a, log_ratio.clamp(-LOW, HIGH).exp() * a), mask, num_tokens
    )


def old_is_current(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, logprobs.detach(), advantages), mask, num_tokens)


def weight_not_detached(logprobs, old_logprobs, advantages, mask, num_tokens):
    weight = ratio_of(logprobs, old_logprobs).clamp(1 - LOW, 1 + HIGH)
    return over_tokens(-weight * advantages[:, None] * logprobs, mask, num_tokens)


def all_detached(logprobs, old_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs.detach(), old_logprobs, advantages), mask, num_tokens)


def correction_inverted(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (sampler_logprobs - old_logprobs).exp().clamp(max=2)
    return over_tokens(ppo(logprobs, old_logprobs, advantages) * weight, mask, num_tokens)


def correction_of_current(logprobs, old_logprobs, sampler_logprobs, advantages, mask, num_tokens):
    weight = (logprobs.detach() - sampler_logprobs).exp().clamp(max=2)
    return over_tokens(ppo(logprobs, old_logprobs, advantages) * weight, mask, num_tokens)


def kl_inverted(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = logprobs - ref_logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (above.exp() - above - 1), mask, num_tokens)


def kl_of_k1(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    return over_tokens(ppo(logprobs, old_logprobs, advantages) + KL * (logprobs - ref_logprobs), mask, num_tokens)


def kl_subtracted(logprobs, old_logprobs, ref_logprobs, advantages, mask, num_tokens):
    above = ref_logprobs - logprobs
    return over_tokens(ppo(logprobs, old_logprobs, advantages) - KL * (above.exp() - above - 1), mask, num_tokens)


def own_tokens(logprobs, old_logprobs, advantages, mask):
    return over_tokens(ppo(logprobs, old_logprobs, advantages), mask, int(mask.sum()))


def own_rows(logprobs, old_logprobs, advantages, mask):
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, len(mask))


def not_scaled(logprobs, old_logprobs, advantages, mask, num_tokens, num_microbatches):
    return token_mean(logprobs, old_logprobs, advantages, mask, num_tokens) * num_microbatches


def empty_mask_nan(logprobs, old_logprobs, advantages, mask):
    return ((ppo(logprobs, old_logprobs, advantages) * mask).sum(1) / mask.sum(1)).mean()


def tie_noise(logprobs, old_logprobs, rewards, group_ids, mask, num_rows):
    groups = rewards.view(-1, 4)
    centred = groups - groups.sum(1, keepdim=True).float().double() / 4  # a mean in single precision
    advantages = (centred / (groups.std(1, correction=0, keepdim=True) + 1e-12)).view(-1)
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


def single_nan(logprobs, old_logprobs, rewards, group_ids, mask, num_rows):
    advantages = torch.empty_like(rewards)
    for group in group_ids.unique():
        own = group_ids == group
        advantages[own] = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-6)
    return over_rows(ppo(logprobs, old_logprobs, advantages), mask, num_rows)


def bf16_counts(logprobs, old_logprobs, advantages, mask, num_tokens):
    """Sums in the dtype of its inputs, one token after the other."""
    token_loss, total = torch.where(mask, ppo(logprobs, old_logprobs, advantages), 0.0), 0.0
    for value in (token_loss * 64).flatten():
        total = total + value
    return total / 64 / num_tokens


def far_ratio_overflows(logprobs, old_logprobs, advantages, mask, num_tokens):
    ratio, a = (20 * (logprobs - old_logprobs)).exp() ** 2, advantages[:, None]
    shaped = ppo(logprobs, old_logprobs, advantages) + 0 * ratio.clamp(max=1) * a
    return over_tokens(shaped + 0 * ratio, mask, num_tokens)


FAULTS = {
    padded_mean: "the mean is over all rows x columns",
    plain_sum: "there is no denominator",
    prompts_in_denominator: "the denominator also counts prompt tokens",
    prompts_in_loss: "prompt tokens are in the loss",
    mask_too_early: "the mask is one token too early",
    mask_too_late: "the mask is one token too late",
    last_token_lost: "the last token of each response is left out",
    no_mask: "the mask is not applied",
    length_plus_one: "the length of a response is counted one too large",
    longest_length: "divided by the length of the longest",
    rows_summed: "summed over rows, not averaged",
    sign_flipped: "sign flipped",
    inverted_ratio: "the ratio is old / new",
    no_exp: "exp is missing",
    max_for_min: "max and min are exchanged",
    bounds_exchanged: "clip_low and clip_high are exchanged",
    clip_only: "only the clipped ratio is used",
    log_clip: "the clip is on the log-ratio",
    old_is_current: "the ratio is 1",
    weight_not_detached: "the weight of log-prob is not detached",
    all_detached: "the gradient is 0",
    correction_inverted: "the weight is sampler / old",
    correction_of_current: "the weight is current / sampler",
    kl_inverted: "k3 of pi / ref",
    kl_of_k1: "its expected gradient is 0",
    kl_subtracted: "the KL penalty has the wrong sign",
    own_tokens: "each is divided by its own tokens",
    own_rows: "each is divided by its own rows",
    not_scaled: "the losses are summed and not divided by their number",
    empty_mask_nan: "empty mask: the loss is nan",
    tie_noise: "rows with equal rewards",
    single_nan: "groups of one: the loss is nan",
}  # fmt: skip


@pytest.mark.parametrize("function", FAULTS, ids=lambda one: one.__name__)
def test_a_planted_fault_is_named(function: Callable[..., Any]) -> None:
    report = checked(function)
    assert not report.ok
    assert any(FAULTS[function] in one for one in report.departures), report.text()


def test_there_are_more_than_twenty_faults() -> None:
    assert len(FAULTS) >= 20
