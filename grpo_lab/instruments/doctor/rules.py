"""The rules: what each looks at, what its numbers cannot say, and what to try in three trainers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

THRESHOLDS = Path(__file__).parent / "thresholds.json"
SEVERITIES = ("note", "warning", "error")
ERROR_POINTS = 10.0  # a rule is an error where runs with it ended this much lower in downstream accuracy
LOST = "evaluation/lost"  # the derived series of `signals.lost_accuracy`
NON_FINITE = "non_finite"
CLIP_NO_OP = "clip_no_op"
SHARPENING = "sharpening"


@dataclass(frozen=True)
class Signal:
    """A metric, and the transform of `signals.TRANSFORMS` under which a high value is bad."""

    metric: str
    transform: str
    description: str  # of the reading, with its number and the threshold

    @property
    def key(self) -> str:
        return f"{self.metric} {self.transform}"


@dataclass(frozen=True)
class LogRule:
    """One pathology. `ours` are overrides of grpo_lab, `trl` arguments of GRPOConfig, `verl` overrides."""

    name: str
    title: str
    signals: tuple[Signal, ...]
    cannot_say: str
    ours: tuple[str, ...]
    trl: str
    verl: str


RULES = (
    LogRule(
        NON_FINITE,
        "Non-finite numbers",
        (),
        "Which operation overflowed first: the log has one number per step.",
        ("optimizer.learning_rate=2e-4", "learner_precision=fp32"),
        "lower learning_rate, bf16 instead of fp16; max_grad_norm does not help once a gradient is NaN",
        "lower actor_rollout_ref.actor.optim.lr; check the attention kernel and the precision of the log-probs",
    ),
    LogRule(
        "reward_up_evaluation_down",
        "Training reward rises or holds while evaluation falls",
        (Signal(LOST, "level", "accuracy {value:.3f} below its earlier best while reward was not lower"),),
        "Whether the reward is gamed, the policy sharpens, or the evaluation asks something else (tokens, template).",
        ("reward=strict", "kl=k3_loss", "evaluation.every=10"),
        "a stricter reward function, beta=0.04, evaluation on held-out prompts with the same max_completion_length",
        "a stricter reward function, actor.use_kl_loss=True, trainer.test_freq smaller, keep the best checkpoint",
    ),
    LogRule(
        "zero_variance",
        "Zero-variance groups",
        (Signal("rollout/frac_zero_std", "level", "zero-variance groups are {value:.0%} of a batch"),),
        "Whether groups are all right or all wrong, unless correctness is logged too.",
        ("group_filter=resample", "pass_rate=difficulty", "engine.temperature=1.0"),
        "num_generations larger, an easier or harder data mix; loss_type='dapo' does not resample by itself",
        "algorithm.filter_groups.enable=True (the dapo recipe), rollout.n larger, prompts filtered by pass rate",
    ),
    LogRule(
        "truncation",
        "Truncated responses",
        (Signal("rollout/truncated", "level", "{value:.0%} of responses end at the token limit"),),
        "Whether truncated responses would have been right; a reward of 0 for them teaches brevity.",
        ("engine.max_tokens=64", "truncation=mask_after", "reward_shaping=soft_overlong"),
        "max_completion_length larger, mask_truncated_completions=True",
        "data.max_response_length larger, reward_model.overlong_buffer.enable=True with the reward manager dapo",
    ),
    LogRule(
        "kl_blow_up",
        "KL blow-up",
        (
            Signal("train/k3_ref", "size", "KL from the reference reaches {value:.3g} nats per token"),
            Signal("train/approx_kl", "size", "KL of one batch's updates reaches {value:.3g} nats per token"),
        ),
        "Whether the policy moved to better answers: KL has no direction. Estimators differ between trainers.",
        ("optimizer.learning_rate=2e-4", "kl=k3_loss", "updates=one"),
        "lower learning_rate, beta=0.04, num_iterations=1",
        "lower actor.optim.lr, actor.use_kl_loss=True, actor.kl_loss_coef larger, actor.ppo_epochs=1",
    ),
    LogRule(
        "mismatch",
        "Sampler-learner mismatch",
        (
            Signal("mismatch/k3", "size", "KL between sampler and learner reaches {value:.3g} nats per token"),
            Signal("mismatch/absolute", "size", "sampler and learner differ by {value:.3g} nats per token"),
            Signal("mismatch/ess", "shortfall", "the effective sample size falls by {value:.0%}"),
        ),
        "Whether precision, kernels, another template or stale weights cause it. verl logs a difference of "
        "probabilities, a lower bound of that of log-probs.",
        ("correction=tis_token", "schedule=sync", "sampler_precision=fp32"),
        "vllm_importance_sampling_correction=True, steps_per_generation smaller",
        "algorithm.rollout_correction.rollout_is=token, rollout.dtype as the actor's",
    ),
    LogRule(
        "entropy_collapse",
        "Entropy collapse",
        (Signal("train/entropy", "fall", "entropy falls to {of_start:.1%} of its start"),),
        "Whether exploration is still needed: in healthy runs entropy falls too.",
        ("surrogate=ppo_higher", "entropy=adaptive", "kl=k3_loss"),
        "epsilon_high=0.28, top_entropy_quantile=0.2, temperature=1.0",
        "actor.clip_ratio_high=0.28, actor.entropy_coeff=0.001",
    ),
    LogRule(
        "entropy_rise",
        "Entropy rises",
        (Signal("train/entropy", "rise", "entropy rises to {of_start:.2f} times its start"),),
        "Whether the policy explores or falls apart: look at reward and at responses.",
        ("optimizer.learning_rate=2e-4", "entropy=none", "correction=tis_token"),
        "lower learning_rate, epsilon_high=0.2, no entropy bonus",
        "lower actor.optim.lr, actor.entropy_coeff=0, actor.clip_ratio_high=0.2",
    ),
    LogRule(
        "length_drift",
        "Length drift",
        (
            Signal("rollout/length", "fall", "responses shrink to {of_start:.0%} of their length at the start"),
            Signal("rollout/length", "rise", "responses grow to {of_start:.1f} times their length at the start"),
        ),
        "Whether the length serves the answer: compare the length of right and wrong responses.",
        ("aggregation=token_mean", "scale=none", "reward_shaping=soft_overlong"),
        "loss_type='dr_grpo', scale_rewards='none'",
        "actor.loss_agg_mode=token-mean, algorithm.norm_adv_by_std_in_grpo=False",
    ),
    LogRule(
        CLIP_NO_OP,
        "The clip is a no-op",
        (),
        "Whether it should: with one update per batch the ratio is 1 and no clip can act.",
        ("updates=four", "surrogate=reinforce"),
        "num_iterations or steps_per_generation larger; otherwise epsilon is without effect",
        "actor.ppo_mini_batch_size below data.train_batch_size; otherwise clip_ratio is without effect",
    ),
    LogRule(
        SHARPENING,
        "The gain is sharpening",
        (),
        "Whether the policy also learned: the share is of reward under the training protocol only.",
        ("evaluation.pass_at=[1,8]", "engine.temperature=1.0"),
        "evaluate at several temperatures, and pass@k",
        "actor_rollout_ref.rollout.val_kwargs.temperature, val_kwargs.n for pass@k",
    ),
)


@cache
def thresholds() -> Mapping[str, Any]:
    """Thresholds and rates from the recorded runs: `signals` by `Signal.key`, `rules` by name, `together`, `runs`."""
    return json.loads(THRESHOLDS.read_text())


def severity(rule: str) -> str:
    """error, warning or note, from how much lower recorded runs with this finding ended; see `thresholds.json`."""
    if rule == NON_FINITE:
        return "error"
    if rule in (CLIP_NO_OP, SHARPENING):
        return "note"
    harm = thresholds()["rules"][rule]["harm_points"]
    return "error" if harm >= ERROR_POINTS else "warning" if harm > 0 else "note"
