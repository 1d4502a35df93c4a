"""Sampler against learner: how far their log-probs of the same tokens are apart, and whether they may be."""

from __future__ import annotations

from dataclasses import replace

import torch

from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.base import EngineFailure
from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.rollout.grading import encode_prompts, group_requests, to_rollouts
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run.state import RunState
from grpo_lab.tricks.correction import Correction, ratio
from grpo_lab.types import Bool, Float, Rollouts, Tensor

_PROBED_PROBLEMS = 4  # a response each, of at most so many tokens: little beside a step
_PROBED_TOKENS = 16


def mismatch_metrics(
    learner_logprobs: Float[Tensor, "N T"], sampler_logprobs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]
) -> dict[str, float]:
    """What the learner before the updates and the sampler say of the masked tokens; {} where there are none.

    With d = learner - sampler, in nats: k1 = mean(-d) and k3 = mean(exp(d) - 1 - d) estimate KL(sampler || learner).
    The effective sample size is (sum w)^2 / (n sum w^2), as a share of the n weights: w = exp(d) of tokens, and exp of
    the sum over a response. Pearson's correlation is of probabilities, and left out where either side has only one.
    """
    if not mask.any():
        return {}
    gap = torch.where(mask, learner_logprobs.double() - sampler_logprobs.double(), 0.0)
    each = gap[mask]
    metrics = {
        "mismatch/absolute": each.abs().mean(),
        "mismatch/max": each.abs().max(),
        "mismatch/k1": -each.mean(),
        "mismatch/k3": (each.exp() - 1 - each).mean(),
        "mismatch/ess": _effective_share(ratio(each)),
        "mismatch/ess_responses": _effective_share(ratio(gap[mask.any(dim=1)].sum(dim=1))),
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
    """Shares of tokens whose weight the correction bounded, and of responses that the rejection took out whole."""
    beyond = correction.beyond(learner_logprobs, sampler_logprobs, sampled_mask)
    real = sampled_mask.any(dim=1)
    gone = ~(accepted_mask & sampled_mask).any(dim=1)
    return {
        "mismatch/bounded": float(beyond[sampled_mask].double().mean()) if real.any() else 0.0,
        "mismatch/rejected_responses": float(gone[real].double().mean()) if real.any() else 0.0,
    }


def _effective_share(weights: Float[Tensor, "K"]) -> Tensor:
    return weights.sum() ** 2 / (weights.numel() * (weights**2).sum())


def check_last_sync(
    run: RunConfig,
    state: RunState,
    rollouts: Rollouts,
    learner_logprobs: Float[Tensor, "N T"],
    read_mask: Bool[Tensor, "N T"],
    version: int,
) -> None:
    """Compare the first tokens since a sync with the learner they were copied from.

    `learner_logprobs` are of the tokens in `read_mask`, under weights of that version. A sampler that silently keeps
    an old tensor draws from a policy that nobody trains.
    """
    if state.unproven and (fresh := read_mask & (rollouts.weight_version == version)).any():
        check_agreement(run, learner_logprobs, rollouts.sampler_logprobs, fresh, version)
        state.unproven = False


def sync_sampler(run: RunConfig, state: RunState, queue: RolloutQueue) -> None:
    """Stage 11: give the sampler the learner's weights, and the reference its share of them."""
    queue.sync(state.learner.state_dict().items(), state.updates)
    state.unproven = True
    probe_sync(run, state)
    state.refresh_reference(run.reference.mixes(state.ledger.steps - 1))


def probe_sync(run: RunConfig, state: RunState) -> None:
    """Draw a few short responses under weights that were just copied, and compare them with the learner at once.

    For schedules whose batches are older than the learner that reads them: there the comparison after a step would
    find staleness and call it a failed sync. Other schedules are compared by `check_last_sync`, which costs nothing.
    The responses enter no batch and no ledger.
    """
    if run.schedule.keeps_sampler_current:
        return
    problems = state.problems[:_PROBED_PROBLEMS]
    prompts = encode_prompts(state.tokenizer, run.template, problems)
    params = replace(run.engine.params, max_tokens=min(_PROBED_TOKENS, run.engine.max_tokens))
    requests = group_requests(problems, prompts, 1, params, run.seed, "agreement", state.updates)
    rollouts = to_rollouts(problems, prompts, 1, state.session.generate(requests))
    logprobs = rollout_logprobs(
        state.learner,
        rollouts,
        run.engine.temperature,
        run.learner_precision,
        state.microbatching,
        state.device,
        with_entropy=False,
    )[0]
    check_agreement(run, logprobs, rollouts.sampler_logprobs, rollouts.sampled_mask, state.updates)
    state.unproven = False


def check_agreement(
    run: RunConfig,
    learner_logprobs: Float[Tensor, "N T"],
    sampler_logprobs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    version: int,
) -> None:
    """Raise EngineFailure where two copies of the same weights disagree by more than their arithmetic explains.

    `mask` are tokens that the sampler drew with weights of that version, under which the learner read them too.
    """
    apart = float((learner_logprobs - sampler_logprobs)[mask].abs().double().mean())
    allowed = max(run.learner_precision.agreement, run.sampler_precision.agreement)
    if not apart <= allowed:  # NaN too
        raise EngineFailure(
            f"sampler and learner hold weights of version {version} and differ by {apart:.3g} nats a token (mean over "
            f"{int(mask.sum())} tokens, at most {allowed:g} for this precision). Either the sampler did not take all "
            "of the weights, or it computes this model otherwise: choose engine=native, or, if the difference is what "
            "you study, raise sampler_precision.agreement"
        )
