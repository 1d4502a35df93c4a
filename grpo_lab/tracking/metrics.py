"""The registry of everything a run may log: one entry per metric, and no metric without an entry.

Names are `<stage>/<quantity>`; a `*` in an entry stands for one path segment (a suite, a trick, a reward
component). `budget/device_seconds` and `time/*` are times and go to timing.jsonl. All others go to
metrics.jsonl, which holds no clock, so it is bit for bit the same however often a run is interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

# The four suites of an evaluation in words; `evaluate.py` defines them.
SUITES = {
    "probe": "training questions",
    "heldout_training": "held-out, training protocol",
    "heldout": "held-out, evaluation protocol",
    "downstream": "downstream",
}
# Suites that an evaluation may ask besides, at the ends of a run: each differs from one of the four in one thing.
FURTHER_SUITES = {
    "downstream_short": "downstream, training budget",
    "other_numbers": "numbers outside the training range",
    "other_wording": "held-out, other wording",
    "heldout_rule": "held out by a rule",
    "other_family": "family not trained on",
    "heldout_greedy": "held-out, greedy",
}
# Prefix of a temperature in hundredths: the initial policy, evaluated as `heldout_training` but at that temperature.
SHARPENED = "sharpened_"
# Of a run whose sampler lags behind its learner: the same questions to the weights that sampled the step's batch.
SAMPLER_SUITES = {
    "sampler_heldout": "held-out, weights that sampled the batch",
    "sampler_downstream": "downstream, weights that sampled the batch",
}
# Evaluation by code that is not ours: each names its suites `<harness>_<task>`; `harness_results.py` keeps the results.
HARNESSES = {"lm_eval": "lm-evaluation-harness", "inspect": "Inspect"}


@dataclass(frozen=True)
class Metric:
    """The description of a logged number: unit, reduction and meaning."""

    name: str
    unit: str
    reduction: str
    meaning: str


CLIP_FRACTION = "train/clip_fraction"
UNLIKE_PPO = "train/unlike_ppo"

GPU_PEAK = "memory/gpu_peak"
REGISTRY: tuple[Metric, ...] = (
    # Rewards of all responses, and of those in the loss after filters and masks.
    Metric(
        "reward/mean",
        "reward",
        "mean over graded responses",
        "shaped training reward of every finished group, before any filter, without a kl penalty",
    ),
    Metric(
        "reward/outcome",
        "share",
        "mean over graded responses",
        "correctness by the training verifier of every finished group, before any filter",
    ),
    Metric("reward/component/*", "reward", "mean over graded responses", "one named part of the reward"),
    Metric("reward/source/*", "reward", "mean over responses of a source", "reward/mean, of one part of a mixture"),
    Metric("rollout/source/*", "share", "mean over groups", "whole groups whose problem is of one part of a mixture"),
    Metric(
        "reward/in_loss_mean",
        "reward",
        "mean over trained responses",
        "reward of the responses in the loss, without a kl penalty",
    ),
    Metric(
        "reward/in_loss_outcome", "share", "mean over trained responses", "correctness of the responses in the loss"
    ),
    Metric("reward/in_loss_component/*", "reward", "mean over trained responses", "one named part of that reward"),
    Metric("reward/evolving_rubrics", "rubrics", "mean over groups", "evolving rubrics a group was graded by"),
    Metric("reward/group_std", "reward", "mean over groups", "standard deviation of rewards within a group, ddof 0"),
    Metric("rollout/length", "tokens", "mean over all responses", "response length, end-of-text token included"),
    Metric("rollout/length_correct", "tokens", "mean over right responses", "their length; absent if there are none"),
    Metric("rollout/length_wrong", "tokens", "mean over wrong responses", "their length; absent if there are none"),
    Metric(
        "rollout/length_std_within", "tokens", "mean over groups", "deviation of lengths among answers to one problem"
    ),
    Metric("rollout/length_std_across", "tokens", "over groups", "deviation of the mean lengths of problems"),
    Metric("rollout/truncated", "share", "mean over all responses", "responses that the token budget ended"),
    Metric(
        "rollout/truncated_correct",
        "share",
        "mean over correct responses",
        "responses that the training verifier calls right and the token limit ended; absent if none is right",
    ),
    Metric("rollout/frac_zero_std", "share", "mean over groups", "zero-variance groups: all right or all wrong"),
    Metric(
        "rollout/trained",
        "share",
        "mean over all responses",
        "of all responses of finished groups, those in the loss",
    ),
    Metric(
        "rollout/ungraded",
        "share",
        "mean over all responses",
        "neither right nor wrong: the grader failed on them",
    ),
    Metric(
        "rollout/unanswered",
        "share",
        "mean over all responses",
        "without an answer in a form that the training verifier reads; not logged of one that reads any text",
    ),
    Metric("rollout/groups", "groups", "of the step", "whole groups generated, also those a filter discarded"),
    Metric(
        "rollout/repetition",
        "share",
        "mean over all responses",
        "runs of 6 tokens that occurred before in the response",
    ),
    Metric("rollout/check_again", "share", "mean over all responses", "responses that go back over what they wrote"),
    Metric("rollout/interrupted", "share", "mean over all responses", "responses that were forced to an answer"),
    Metric("rollout/stopped", "share", "mean over all responses", "responses stopped for high certainty for too long"),
    Metric("rollout/pass_at_*", "share", "mean over groups", "unbiased chance that one of k responses is right"),
    Metric(
        "rollout/best_gap",
        "reward",
        "mean over groups",
        "best reward a problem ever had - mean reward of its group: found by exploration, not yet by the policy",
    ),
    Metric("target_length/mean", "tokens", "mean over all responses", "length that the prompts asked for"),
    Metric("target_length/error", "tokens", "mean over all responses", "|length - length asked for|"),
    Metric(
        "target_length/slope",
        "tokens/token",
        "least squares over responses",
        "length per length asked for; 1 follows it",
    ),
    Metric(
        "rollout/staleness", "updates", "mean over sampled tokens", "learner's updates since the weights that drew it"
    ),
    Metric("rollout/staleness_max", "updates", "max over sampled tokens", "staleness of the oldest token"),
    Metric("staleness/*", "share", "mean over sampled tokens", "tokens by age in updates: a histogram"),
    Metric("rollout/longest", "tokens", "max over all responses", "decoding steps that the step's responses took"),
    Metric("advantage/mean", "advantage", "mean over trained responses", "mean advantage in the loss"),
    Metric("advantage/absolute", "advantage", "mean over trained responses", "mean |advantage| in the loss"),
    # Filters of the training problems, at step 0 of a run that has one.
    Metric("problems/trained", "problems", "of the run", "training problems that its filters left"),
    Metric("problems/dropped/*/*", "problems", "of the run", "those that left for one reason: axis and reason"),
    Metric("pass_rate/mean", "share", "mean over measured problems", "right answers of the base model, before RL"),
    Metric("pass_rate/unsolved", "share", "mean over measured problems", "none of the base model's answers is right"),
    Metric("pass_rate/solved", "share", "mean over measured problems", "all of the base model's answers are right"),
    # Supervised fine-tuning, at step 0 of a run that has it.
    Metric("sft/answers", "answers", "sum", "answers that were learnt from"),
    Metric("sft/length", "tokens", "mean over these answers", "their length, end-of-text token included"),
    Metric("sft/right", "share", "mean over sampled answers", "right answers of the base model that ended in time"),
    Metric("sft/loss", "nats", "mean over tokens of the last epoch", "negative log-likelihood of the answers"),
    Metric("sft/updates", "updates", "sum", "optimiser steps of fine-tuning"),
    # The learner.
    Metric("train/loss", "loss", "mean over updates", "the loss that was optimised"),
    Metric("train/gradient_norm", "1", "mean over updates", "gradient norm before clipping"),
    Metric("train/update_norm", "1", "mean over updates", "norm of the change of the weights"),
    Metric("train/learning_rate", "1", "last update", "learning rate"),
    Metric("train/updates", "updates", "sum", "optimiser steps taken"),
    Metric("train/skipped_updates", "updates", "sum", "optimiser steps left out: no token was in the loss"),
    Metric(
        "train/scored_share",
        "share",
        "mean over tokens of the loss",
        "tokens in the training passes, over which all means go",
    ),
    Metric("train/entropy", "nats", "mean over tokens of the loss", "entropy of the learner's next token"),
    Metric("train/ratio", "1", "mean over tokens of the loss", "learner over old policy"),
    Metric("train/approx_kl", "nats", "mean over tokens of the loss", "k3 estimate of KL(old || learner)"),
    Metric("train/k3_ref", "nats", "mean over tokens of the loss", "k3 estimate of KL(learner || reference)"),
    Metric("train/kl_term", "loss", "mean over tokens of the loss", "what the kl trick added per token"),
    Metric("train/entropy_term", "loss", "mean over tokens of the loss", "what the entropy trick added per token"),
    Metric("train/entropy_coef", "1", "of the step", "coefficient of the entropy term; negative while it waits"),
    Metric("train/kl_coef", "1", "of the step", "coefficient of a KL penalty that follows a target"),
    Metric("train/overflowed_updates", "updates", "sum", "optimiser steps left out: a scaled gradient overflowed"),
    Metric("train/loss_scale", "1", "of the step", "factor on the loss, if half precision needs one"),
    # Learner before the updates against sampler, over sampled tokens. If nothing needs the log-probs of all sampled
    # tokens, over those of the first update.
    Metric("mismatch/absolute", "nats", "mean over sampled tokens", "|log-prob of learner - of sampler|"),
    Metric("mismatch/max", "nats", "max over sampled tokens", "largest |log-prob of learner - of sampler|"),
    Metric("mismatch/k1", "nats", "mean over sampled tokens", "k1 estimate of KL(sampler || learner)"),
    Metric("mismatch/k3", "nats", "mean over sampled tokens", "k3 estimate of KL(sampler || learner)"),
    Metric("mismatch/pearson", "1", "over sampled tokens", "correlation of the two probabilities"),
    Metric("mismatch/ess", "share", "over sampled tokens", "effective sample size of token ratios"),
    Metric("mismatch/absolute_responses", "nats", "mean over responses", "|log-prob of a response, learner - sampler|"),
    Metric("mismatch/max_responses", "nats", "max over responses", "the same, of the response where it is largest"),
    Metric(
        "mismatch/k1_responses", "nats", "mean over responses", "k1 estimate of the responses' KL(sampler || learner)"
    ),
    Metric("mismatch/ess_responses", "share", "over responses", "effective sample size of whole responses' ratios"),
    Metric("mismatch/max_prompts", "nats", "max over prompts", "mismatch/absolute of the prompt where it is largest"),
    Metric(
        "mismatch/ess_prompts", "share", "mean over prompts", "effective sample size of one prompt's response ratios"
    ),
    Metric("mismatch/bounded", "share", "mean over sampled tokens", "weights that the correction's bounds changed"),
    Metric("mismatch/rejected_responses", "share", "mean over responses", "responses that the rejection removes whole"),
    Metric(
        "mismatch/removed_by/*",
        "share",
        "mean over sampled tokens",
        "tokens that one member of rejection=all_of would remove on its own",
    ),
    Metric(
        CLIP_FRACTION,
        "share",
        "mean over tokens of the loss",
        "tokens whose gradient the surrogate changed: clipped, capped, gated or detached",
    ),
    Metric(
        UNLIKE_PPO,
        "share",
        "mean over tokens of the loss",
        "tokens with another gradient than PPO's clip at 0.2 would give them in the same update",
    ),
    Metric(
        "active_fraction/*",
        "share",
        "mean over rows or tokens",
        "active fraction: rows or tokens that the trick on this axis changed",
    ),
    # Factors by which tricks scale the loss: a hidden change of learning rate, which Adam undoes in part.
    Metric("factor/scale", "1", "sum over trained responses", "|advantages| over |centred rewards|"),
    Metric("factor/surrogate", "1", "mean over tokens of the loss", "weight on -advantage times grad log-prob"),
    Metric(
        "factor/correction", "1", "mean over tokens of the loss", "importance correction for sampler-learner mismatch"
    ),
    Metric("factor/aggregation", "1", "mean over updates", "the loss if every token's loss were 1"),
    Metric("factor/denominator", "1", "sum over updates", "the loss / the loss with original counts"),
    Metric(
        "teacher/reverse_kl",
        "nats",
        "mean over sampled tokens",
        "old log-prob - teacher's: the KL of a token from the teacher, before the updates",
    ),
    # The critic, if the baseline has one.
    Metric("critic/loss", "reward^2", "mean over tokens and updates", "half the squared error, clipped as configured"),
    Metric("critic/clip_fraction", "share", "mean over tokens and updates", "tokens whose loss the value clip decides"),
    Metric("critic/gradient_norm", "1", "mean over updates", "the critic's gradient norm before clipping"),
    Metric("critic/value", "reward", "mean over tokens", "value before the step's updates"),
    Metric("critic/target", "reward", "mean over tokens", "what it is fitted to: advantage + value"),
    Metric("critic/explained_variance", "1", "one step", "1 - mean squared error / variance of the target"),
    # Evaluation.
    Metric("eval/*/accuracy", "share", "mean over questions and samples", "right answers"),
    Metric("eval/*/agreement", "share", "mean over samples", "answers that the training verifier judges alike"),
    Metric(
        "eval/heldout_training/verified_accuracy",
        "share",
        "mean over questions and samples",
        "the same answers by the evaluation verifier: accuracy under the training protocol's sampling",
    ),
    Metric(
        "eval/*/entropy",
        "nats",
        "mean over sampled tokens",
        "entropy of the policy under the training protocol, from the log-probs of its own tokens",
    ),
    Metric("eval/*/ungraded", "share", "mean over samples", "answers that the grader failed on, left out of accuracy"),
    Metric("eval/*/responses", "responses", "sum", "answers that the accuracy is a mean of"),
    Metric("eval/*/accuracy_easiest", "share", "mean over samples", "right answers, lowest difficulty label"),
    Metric("eval/*/accuracy_hardest", "share", "mean over samples", "right answers, highest difficulty label"),
    Metric("eval/*/source/*", "share", "mean over questions of a source", "right answers to one part of a mixture"),
    Metric("eval/*/accuracy_se", "share", "standard error over questions", "uncertainty of accuracy, one run"),
    Metric("eval/*/pass_at_*", "share", "mean over questions", "unbiased chance that one of k samples is right"),
    Metric("eval/probe/best_gap", "share", "mean over questions", "best result a question ever had - its accuracy now"),
    Metric("eval/*/length", "tokens", "mean over questions and samples", "response length"),
    Metric(
        "eval/heldout_training/kl_initial",
        "nats",
        "mean over responses",
        "log-prob of the response under the policy - under the initial policy: the KL between them",
    ),
    Metric(
        "eval/*/truncated", "share", "mean over questions and samples", "responses that the suite's token budget ended"
    ),
    # Budget spent, cumulative.
    Metric("budget/steps", "steps", "sum", "rollout batches trained"),
    Metric("budget/prompts", "prompts", "sum", "prompts sampled from, before filtering"),
    Metric("budget/completions", "responses", "sum", "responses generated, before filtering"),
    Metric("budget/sampled_tokens", "tokens", "sum", "prompt and generated tokens, discarded ones included"),
    Metric("budget/trained_tokens", "tokens", "sum", "tokens in the loss, once per update"),
    Metric("budget/discarded_tokens", "tokens", "sum", "tokens of responses that never entered a loss"),
    Metric("budget/estimation_tokens", "tokens", "sum", "generated only to estimate a value or a baseline"),
    Metric("budget/flops", "flop", "sum", "generation, scoring and training, from the model's shape"),
    Metric(
        "budget/simulated_seconds", "s", "sum", "simulated time up to the end of the step's training (cost_model.py)"
    ),
    Metric("simulated/generating", "share", "of all simulated time", "how long the sampler was busy"),
    Metric("simulated/training", "share", "of all simulated time", "how long the learner was busy"),
    Metric("budget/device_seconds", "s", "sum", "wall time times devices, without evaluation and checkpoints"),
    Metric("external/*", "of the framework", "as logged", "a number of an external run without a name here"),
    Metric("time/log", "s", "sum over the step", "writing the line before this one, a due checkpoint included"),
    Metric("time/*", "s", "sum over the step", "wall time of one stage of the step"),
    Metric("time/tokens_per_second", "tokens/s", "one step", "generated tokens over the whole step's wall time"),
    Metric(GPU_PEAK, "GiB", "max since the process began", "GPU memory that torch had reserved; on a GPU only"),
)


# The nearest metrics of TRL and verl; brackets say how theirs differs.
PEERS = {
    "reward/mean": "TRL reward, verl critic/score/mean",
    "reward/component/*": "TRL rewards/<function>/mean (times its weight)",
    "rollout/length": "TRL completions/mean_length, verl response_length/mean",
    "rollout/longest": "TRL completions/max_length, verl response_length/max",
    "rollout/truncated": "TRL completions/clipped_ratio, verl response_length/clip_ratio",
    "rollout/frac_zero_std": "TRL frac_reward_zero_std (of rewards, not of correctness)",
    "train/loss": "TRL loss, verl actor/pg_loss (without kl and entropy)",
    "train/gradient_norm": "TRL grad_norm, verl actor/grad_norm",
    "train/learning_rate": "TRL learning_rate, verl actor/lr",
    "train/entropy": "TRL entropy, verl actor/entropy",
    "train/clip_fraction": "TRL clip_ratio/region_mean, verl actor/pg_clipfrac",
    "train/approx_kl": "verl actor/ppo_kl (k1, not k3)",
    "train/k3_ref": "TRL kl, verl actor/kl_loss",
    "critic/loss": "verl critic/vf_loss",
    "critic/clip_fraction": "verl critic/vf_clipfrac",
    "critic/gradient_norm": "verl critic/grad_norm",
    "critic/value": "verl critic/values/mean",
    "critic/target": "verl critic/returns/mean",
    "critic/explained_variance": "verl critic/vf_explained_var",
    "mismatch/absolute": "TRL sampling/sampling_logp_difference/mean, verl training/rollout_probs_diff_mean (probs)",
    "mismatch/max": "TRL sampling/sampling_logp_difference/max, verl training/rollout_probs_diff_max (probs)",
    "mismatch/k1": "verl rollout_corr/kl",
    "mismatch/k3": "verl rollout_corr/k3_kl, prime-rl mismatch_kl/all/mean",
    "mismatch/ess": "verl rollout_corr/rollout_is_eff_sample_size (of bounded weights)",
    "mismatch/rejected_responses": "verl rollout_corr/rollout_rs_seq_masked_fraction (with one token or more)",
    "budget/sampled_tokens": "TRL num_tokens",
}

# Before an evaluation's metric: what analysis derives from all evaluations of a run.
START, BELOW_BEST, LOG_ODDS, TO_HALF, TO_NINE_TENTHS = OF_EVALUATIONS = (
    "start/",
    "below_best/",
    "log_odds/",
    "tokens_to_half/",
    "tokens_to_90/",
)
# Metrics that analysis derives from a run's final values; a prediction may name these too.
DERIVED: tuple[Metric, ...] = (
    Metric("average/*/*", "of the metric", "mean over all steps", "a metric of every step over the whole budget"),
    Metric("start/eval/*/*", "of the metric", "at step 0", "an evaluation before the first step of RL"),
    Metric(
        "below_best/eval/*/*",
        "of the metric",
        "best mean of three evaluations in a row - mean of the last three",
        "how far an evaluation ends below its best",
    ),
    Metric(
        "log_odds/eval/*/accuracy",
        "logits",
        "final value",
        "log of right over wrong answers, half an answer added to either",
    ),
    *(
        Metric(
            f"{name}eval/*/accuracy", "doublings", "log2 of tokens", f"sampled tokens to {share} of the control's gain"
        )
        for name, share in ((TO_HALF, "half"), (TO_NINE_TENTHS, "nine tenths"))
    ),
    Metric("gap", "reward", "final value", "reward/in_loss_mean - eval/heldout_training/accuracy"),
    Metric("overstatement", "share", "final value", "reward/in_loss_outcome - eval/heldout_training/accuracy"),
    Metric("beyond_q_times_a", "share", "final value", "overstatement - q_times_a"),
    Metric("q_times_a", "share", "final value", "held-out truncated share times accuracy of what finished"),
)

# What trackers are sent beside what a run logs, and no log holds: see `final_metrics.py` and `system_metrics.py`.
AT_BUDGET, AUC = "at_budget/", "auc/"
SENT: tuple[Metric, ...] = (
    Metric(f"{AT_BUDGET}*/*", "of the metric", "final value", "reward or accuracy at the run's own full budget"),
    Metric(f"{AUC}*/*", "of the metric", "mean over the budget", "area under its curve over the share of that budget"),
    Metric("system/*", "as it says", "one sample", "the machine beside the run: CPU, memory, disk, GPUs"),
)

# Metrics that analysis derives from whole curves, per arm or per level; no prediction can name these.
DIVERGENCE: tuple[Metric, ...] = (
    Metric(
        "divergence/gap_change",
        "pp",
        "final value",
        "gain of reward/outcome less gain of downstream accuracy, from step 0",
    ),
    Metric(
        "divergence/gap_change_sampler",
        "pp",
        "final value",
        "the same with the downstream accuracy of the weights that sampled the responses",
    ),
    Metric(
        "divergence/transfer_slope",
        "pp/pp",
        "median over pairs of evaluations",
        "downstream accuracy per reward/outcome",
    ),
    Metric(
        "divergence/transfer_slope_early",
        "pp/pp",
        "median over pairs of evaluations",
        "the same, first half of the budget",
    ),
    Metric(
        "divergence/transfer_slope_late",
        "pp/pp",
        "median over pairs of evaluations",
        "the same, second half of the budget",
    ),
    Metric(
        "divergence/onset", "budget", "first of three evaluations", "budget from which the gap is significantly above 0"
    ),
    Metric(
        "divergence/onset_after_peak",
        "budget",
        "first of a run of evaluations",
        "budget from which downstream accuracy is significantly below its peak",
    ),
    Metric(
        "divergence/post_peak_drop",
        "pp",
        "mean over halves of questions",
        "best checkpoint less the last, where reward did not fall",
    ),
    Metric("divergence/selection_regret_last", "pp", "mean over halves of questions", "best checkpoint less the last"),
    Metric(
        "divergence/selection_regret_train_reward",
        "pp",
        "mean over halves of questions",
        "best checkpoint less that of the highest reward/outcome",
    ),
    Metric(
        "divergence/selection_regret_heldout",
        "pp",
        "mean over halves of questions",
        "best checkpoint less that of the highest held-out accuracy",
    ),
    Metric(
        "divergence/selection_optimism",
        "pp",
        "mean over halves of questions",
        "best checkpoint on the questions that chose it less on the others",
    ),
    Metric(
        "divergence/kl_a",
        "pp/sqrt(nat)",
        "least squares over evaluations",
        "a of downstream gain = d (a - b ln d), d = sqrt(KL)",
    ),
    Metric(
        "divergence/kl_b", "pp/sqrt(nat)", "least squares over evaluations", "b of the same; above 0 the curve turns"
    ),
    Metric(
        "divergence/kl_peak", "sqrt(nat)", "from the fit", "distance at the top of that curve, if every run passed it"
    ),
    Metric("divergence/kl_peak_gain", "pp", "from the fit", "downstream gain there"),
    Metric(
        "divergence/waterfall_prompt_mix",
        "pp",
        "final value",
        "part of the gap: training responses less fixed training questions",
    ),
    Metric(
        "divergence/waterfall_memorisation", "pp", "final value", "part of the gap: training less held-out questions"
    ),
    Metric("divergence/waterfall_protocol", "pp", "final value", "part of the gap: training less evaluation protocol"),
    Metric("divergence/waterfall_shift", "pp", "final value", "part of the gap: held-out less downstream questions"),
    Metric("divergence/coverage_at_*", "pp", "final value", "change of downstream pass@k from step 0, k = all samples"),
    Metric(
        "divergence/coverage_crossover",
        "samples",
        "from the mean over seeds",
        "smallest k at which the run is no better than step 0",
    ),
    Metric(
        "divergence/leading_auc_*",
        "1",
        "over runs and evaluations",
        "chance that the indicator is further from its start before a downstream loss than without one",
    ),
    Metric(
        "divergence/leading_caught_*",
        "share",
        "of runs with a loss",
        "runs with an alarm before their downstream loss",
    ),
    Metric("divergence/leading_time_*", "share of X", "median over caught runs", "budget between alarm and loss"),
    Metric("divergence/leading_false_*", "share", "of null runs", "null runs with an alarm set by the other ones"),
    Metric(
        "divergence/arm_regret",
        "pp",
        "mean over seeds left out",
        "best arm less the arm of the highest reward/outcome, one level",
    ),
    Metric(
        "divergence/arm_tau",
        "1",
        "over means of arms",
        "Kendall's tau_b of reward/outcome and downstream accuracy, one level",
    ),
)


@cache
def find(name: str) -> Metric:
    """The entry of a metric name; an exact entry wins over one with a star. KeyError if there is none."""
    parts = name.split("/")
    matches = [
        entry
        for entry in REGISTRY
        if len(pattern := entry.name.split("/")) == len(parts)
        and all(_fits(want, have) for want, have in zip(pattern, parts))
    ]
    if not matches:
        raise KeyError(f"metric {name!r} has no entry in grpo_lab/tracking/metrics.py: add one with unit and meaning")
    return min(matches, key=lambda entry: entry.name.count("*"))


def _fits(pattern: str, part: str) -> bool:
    if pattern.endswith("_*"):
        return part.startswith(pattern[:-1]) and len(part) >= len(pattern)
    return pattern in ("*", part)


def is_known(name: str) -> bool:
    """True if a run logs such a metric or analysis derives it."""
    if name.startswith("average/eval/"):  # evaluations are too few for an average over the run
        return False
    if name.startswith(OF_EVALUATIONS) and not logged_name(name).startswith("eval/"):
        return False
    if name.startswith((LOG_ODDS, TO_HALF, TO_NINE_TENTHS)) and not name.endswith("accuracy"):
        return False
    try:
        find(logged_name(name))
    except KeyError:
        return name in [metric.name for metric in DERIVED]
    return True


def is_evaluated(name: str) -> bool:
    """True if a run or a harness has the suite of an evaluation metric; True for all other metrics."""
    first, _, rest = logged_name(name).partition("/")
    suite = rest.partition("/")[0]
    suites = SUITES.keys() | FURTHER_SUITES.keys() | SAMPLER_SUITES.keys()
    return first != "eval" or suite in suites or suite.startswith(SHARPENED) or harness_of(name) is not None


def logged_name(metric: str) -> str:
    """The metric that a run logs, of one that analysis derives from it, such as its average over the run."""
    for prefix in ("average/", *OF_EVALUATIONS):
        metric = metric.removeprefix(prefix)
    return metric


def harness_of(metric: str) -> str | None:
    """The harness that measured an evaluation, by the name of its suite; None for the run's own."""
    name = logged_name(metric)
    return next((harness for harness in HARNESSES if name.startswith(f"eval/{harness}_")), None)


def fraction_metric(axis: str) -> str:
    """The metric for the share of rows or tokens that the trick on this axis changed."""
    return CLIP_FRACTION if axis == "surrogate" else f"active_fraction/{axis}"


def axis_of_fraction(name: str) -> str:
    """The axis of a metric for which `is_active_fraction` holds; undoes `fraction_metric`."""
    return "surrogate" if name == CLIP_FRACTION else name.removeprefix("active_fraction/")


def is_active_fraction(name: str) -> bool:
    """True if `fraction_metric` returns this name for some axis."""
    return name == CLIP_FRACTION or name.startswith("active_fraction/")


def check(metrics: Mapping[str, float | int]) -> Mapping[str, float | int]:
    """Return the mapping unchanged. Raises KeyError if a name is not registered."""
    for name in metrics:
        find(name)
    return metrics


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that at least one of k samples is right (Chen et al., arXiv:2107.03374).

    1 - C(samples - correct, k) / C(samples, k), for k <= samples.
    """
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)
