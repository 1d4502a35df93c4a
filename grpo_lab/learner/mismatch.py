"""Sampler against learner: how much their log-probs of the same tokens differ, and when that is an error."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_lab.config.stages import SyncSettings
from grpo_lab.engines.base import EngineFailure
from grpo_lab.policy.adapters import whole_weights
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.rollout.grading import encode_prompts, group_requests, to_rollouts
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run.state import RunState
from grpo_lab.tricks.correction import Correction, ratio
from grpo_lab.tricks.rejection import Rejection
from grpo_lab.types import Bool, Float, Rollouts, Tensor

_PROBED_PROBLEMS = 4  # one response each, of at most _PROBED_TOKENS tokens: cheap compared with a step
_PROBED_TOKENS = 16


def mismatch_metrics(
    learner_logprobs: Float[Tensor, "N T"],
    sampler_logprobs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_size: int,
) -> dict[str, float]:
    """Difference of learner (before the updates) and sampler on the tokens in `mask`; {} when there are none.

    With d = learner - sampler, in nats: k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate KL(sampler || learner).
    Three levels: tokens (d), responses (the sum of d over a response) and prompts (the `group_size` responses to one).
    The effective sample size is (sum w)^2 / (n sum w^2), as a share of the n weights: w = exp(d) of all tokens, and
    exp(sum of d) of all responses, or of those to one prompt. Pearson's correlation is between probabilities; it is
    left out when either side is constant.
    """
    if not mask.any():
        return {}
    gap = torch.where(mask, learner_logprobs.double() - sampler_logprobs.double(), 0.0)
    each, of_row, read = gap[mask], gap.sum(dim=1), mask.any(dim=1)
    row, tokens = of_row[read], mask.sum(dim=1)
    # One entry for each prompt of which a token was read.
    groups = [part for part in torch.arange(len(mask)).split(group_size) if read[part].any()]
    metrics = {
        "mismatch/absolute": each.abs().mean(),
        "mismatch/max": each.abs().max(),
        "mismatch/k1": -each.mean(),
        "mismatch/k3": (each.exp() - 1 - each).mean(),
        "mismatch/ess": _effective_share(ratio(each)),
        "mismatch/absolute_responses": row.abs().mean(),
        "mismatch/max_responses": row.abs().max(),
        "mismatch/k1_responses": -row.mean(),
        "mismatch/ess_responses": _effective_share(ratio(row)),
        "mismatch/max_prompts": torch.stack([gap[part].abs().sum() / tokens[part].sum() for part in groups]).max(),
        "mismatch/ess_prompts": torch.stack(
            [_effective_share(ratio(of_row[part][read[part]])) for part in groups]
        ).mean(),
    }
    pair = torch.stack([learner_logprobs[mask], sampler_logprobs[mask]]).double().exp()
    if (pair.std(dim=1, correction=0) > 0).all():
        metrics["mismatch/pearson"] = torch.corrcoef(pair)[0, 1]
    return {name: float(value) for name, value in metrics.items()}


def bound_metrics(
    correction: Correction,
    learner_logprobs: Float[Tensor, "N T"],
    sampler_logprobs: Float[Tensor, "N T"],
    sampled_mask: Bool[Tensor, "N T"],
    accepted_mask: Bool[Tensor, "N T"],
) -> dict[str, float]:
    """Share of tokens whose weight the correction bounded, and share of responses that were rejected entirely."""
    beyond = correction.beyond(learner_logprobs, sampler_logprobs, sampled_mask)
    real = sampled_mask.any(dim=1)
    gone = ~(accepted_mask & sampled_mask).any(dim=1)
    return {
        "mismatch/bounded": float(beyond[sampled_mask].double().mean()) if real.any() else 0.0,
        "mismatch/rejected_responses": float(gone[real].double().mean()) if real.any() else 0.0,
    }


def member_metrics(
    rejection: Rejection,
    learner_logprobs: Float[Tensor, "N T"],
    sampler_logprobs: Float[Tensor, "N T"],
    sampled_mask: Bool[Tensor, "N T"],
) -> dict[str, float]:
    """Share of sampled tokens that each member of a combined rejection would remove on its own."""
    shares = {}
    for name, member in rejection.parts.items() if sampled_mask.any() else ():
        stays = member(learner_logprobs, sampler_logprobs, sampled_mask)
        shares[f"mismatch/removed_by/{name}"] = float((~stays[sampled_mask]).double().mean())
    return shares


def _effective_share(weights: Float[Tensor, "K"]) -> Tensor:
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())


def check_last_sync(
    state: RunState,
    rollouts: Rollouts,
    learner_logprobs: Float[Tensor, "N T"],
    logprob_mask: Bool[Tensor, "N T"],
    version: int,
    allowed: float,
) -> None:
    """Compare sampler and learner on the first tokens sampled after a weight sync.

    `learner_logprobs` are those of the tokens in `logprob_mask`, under the weights of `version`. `allowed` is as in
    `check_agreement`. This catches a sampler that silently keeps an old tensor and so samples from another policy than
    the learner's.
    """
    if state.unproven and (fresh := logprob_mask & (rollouts.weight_version == version)).any():
        check_agreement(learner_logprobs, rollouts.sampler_logprobs, fresh, version, allowed)
        state.unproven = False


def sync_sampler(settings: SyncSettings, state: RunState, queue: RolloutQueue) -> None:
    """Stage 11: give the sampler the learner's weights, and the reference its share of them."""
    queue.sync(whole_weights(state.learner), state.updates)
    state.keep_weights(settings.kept_versions)
    state.unproven = True
    probe_sync(settings, state)
    state.refresh_reference(settings.reference.mixes(state.account.steps - 1))


def probe_sync(settings: SyncSettings, state: RunState) -> None:
    """Sample a few short responses right after a weight sync, and compare sampler and learner on them.

    Only for schedules whose batches are older than the learner. There a comparison after the step would take
    staleness for a failed sync. Other schedules use `check_last_sync`, which costs nothing. The responses enter no
    batch and no account.
    """
    if settings.schedule.keeps_sampler_current:
        return
    problems = state.problems[:_PROBED_PROBLEMS]
    prompts = encode_prompts(state.tokenizer, settings.template, problems)
    params = replace(settings.params, max_tokens=min(_PROBED_TOKENS, settings.params.max_tokens))
    requests = group_requests(problems, prompts, 1, params, settings.seed, "agreement", state.updates)
    rollouts = to_rollouts(problems, prompts, 1, state.session.generate(requests))
    logprobs = rollout_logprobs(
        state.learner,
        rollouts,
        state.temperature,
        state.precision,
        state.microbatching,
        state.device,
        with_entropy=False,
    )[0]
    check_agreement(logprobs, rollouts.sampler_logprobs, rollouts.sampled_mask, state.updates, settings.agreement)
    state.unproven = False


def check_agreement(
    learner_logprobs: Float[Tensor, "N T"],
    sampler_logprobs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    version: int,
    allowed: float,
) -> None:
    """Raise EngineFailure if sampler and learner with the same weights differ by more than rounding explains.

    `mask` are tokens that the sampler generated with weights `version`; the learner's log-probs use the same weights.
    `allowed` is the largest mean difference, in nats per token.
    """
    apart = float((learner_logprobs - sampler_logprobs)[mask].abs().double().mean())
    if not apart <= allowed:  # NaN too
        raise EngineFailure(
            f"sampler and learner hold weights of version {version} and differ by {apart:.3g} nats a token (mean over "
            f"{int(mask.sum())} tokens, at most {allowed:g} for this precision). Either the sampler did not take all "
            "of the weights, or it computes this model otherwise: choose engine=native, or, if the difference is what "
            "you study, raise sampler_precision.agreement"
        )
