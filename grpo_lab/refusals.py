"""What cannot be combined: the rules that refuse a run, and what a rule is.

A rule reads facts that the classes declare, never their names, so an option added later is judged by the
same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_lab.config import RunConfig, snake_case


@dataclass(frozen=True)
class Rule:
    """A combination to refuse or to warn of; `axes` are the slots its reason is about.

    `idles`: what stands on the first of them cannot act, so that an arm which changes nothing else is no arm.
    """

    name: str
    axes: tuple[str, ...]
    broken_when: Callable[[RunConfig], bool]
    reason: str
    remedy: str
    idles: bool = False

    def describe(self, run: RunConfig, choices: Mapping[str, str] | None = None) -> str:
        """One line: the slots with what stands in them, the reason and the remedy.

        `choices`, slot -> option, are what was composed; without them a slot is named by its class and its numbers.
        """
        held = {axis: getattr(run, axis) for axis in self.axes}
        parts = [f"{axis}={(choices or {}).get(axis) or _label(value)}" for axis, value in held.items()]
        return f"{', '.join(parts)}: {self.reason}. Remedy: {self.remedy}."


def _label(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    numbers = ", ".join(f"{name}={getattr(part, 'value', part)}" for name, part in vars(value).items())
    return f"{snake_case(type(value).__name__)}({numbers})"


def _lowest_reward(run: RunConfig) -> float:
    return run.reward_shaping.lowest(run.reward.correct, run.reward.wrong)


ERRORS: tuple[Rule, ...] = (
    Rule(
        "baseline_needs_a_group",
        ("baseline", "group_size"),
        lambda run: run.group_size < run.baseline.smallest_group,
        "the baseline has too few responses of a group to compare one with, so every advantage is 0",
        "raise group_size (to 2, or to k + 1 for pass_at_k), or set baseline=none",
    ),
    Rule(
        "scale_needs_a_group",
        ("scale", "group_size"),
        lambda run: run.scale.group_relative and run.group_size < 2,
        "a single response has no statistic within its group, so every advantage is 0 or its own reward",
        "set group_size to at least 2, or scale=none",
    ),
    Rule(
        "filter_needs_a_group",
        ("group_filter", "group_size"),
        lambda run: run.group_filter.removes_rows and run.group_size < 2,
        "a group of one response never carries signal, so every group is filtered",
        "set group_size to at least 2, or group_filter=keep",
    ),
    Rule(
        "shaping_needs_a_group",
        ("reward_shaping", "group_size"),
        lambda run: run.reward_shaping.group_relative and run.group_size < 2,
        "a single response is the shortest and the longest of its group, so nothing is ever added",
        "set group_size to at least 2, or reward_shaping=none",
    ),
    Rule(
        "updates_divide_the_problems",
        ("updates", "problems_per_step"),
        lambda run: run.problems_per_step % run.updates.minibatches != 0,
        "groups stay whole within an optimiser step, so the problems must divide evenly among the updates",
        "make problems_per_step a multiple of the number of updates",
    ),
    Rule(
        "critic_divides_the_problems",
        ("baseline", "critic", "problems_per_step"),
        lambda run: run.baseline.needs_critic and run.problems_per_step % run.critic.minibatches != 0,
        "the critic too is trained on whole groups, so the problems must divide evenly among its updates",
        "make problems_per_step a multiple of critic.minibatches",
    ),
    Rule(
        "mismatch_counts_twice",
        ("correction", "old_policy", "surrogate"),
        lambda run: run.correction.needs_old_logprobs and run.surrogate.uses_ratio and not run.old_policy.recomputes,
        "a ratio to the sampler holds the mismatch already, and the weight would put it in once more",
        "set correction=none, or old_policy=recomputed",
    ),
    Rule(
        "advantage_is_scaled_twice",
        ("baseline", "scale"),
        lambda run: run.baseline.scales_itself and not run.scale.touches_nothing,
        "this baseline brings its own deviation, and a second scale would undo what it weighs",
        "set scale=none",
    ),
    Rule(
        "critic_has_no_loss_scale",
        ("baseline", "learner_precision"),
        lambda run: run.baseline.needs_critic and run.learner_precision.scales_loss,
        "in float16 small gradients vanish unless the loss is scaled, and the critic's is not",
        "set learner_precision=bf16 or fp32, or a baseline without a critic",
    ),
    Rule(
        "rewards_must_not_be_negative",
        ("scale", "reward", "reward_shaping", "kl"),
        lambda run: run.scale.needs_rewards_from_zero and (_lowest_reward(run) < 0 or run.kl.shapes_reward),
        "divided by a mean that can be negative, right answers are punished and wrong ones rewarded",
        "use reward=strict (0 and 1), no shaping and no kl that take a reward below 0, or another scale",
    ),
    Rule(
        "no_reward_is_negative",
        ("scale", "baseline", "reward", "reward_shaping", "kl"),
        lambda run: (
            run.scale.splits_signs
            and not run.baseline.centres
            and _lowest_reward(run) >= 0
            and not run.kl.shapes_reward
        ),
        "without a baseline and without negative rewards there is no negative advantage to weigh",
        "set reward=strict_plus_minus, or a baseline that centres",
    ),
    Rule(
        "ratio_must_be_of_tokens",
        ("surrogate", "importance"),
        lambda run: run.surrogate.needs_token_ratio and not run.importance.per_token,
        "this surrogate reads each token's own ratio, and a response's ratio in its place means nothing",
        "set importance=token",
    ),
    Rule(
        "scale_is_of_responses",
        ("baseline", "scale"),
        lambda run: run.baseline.per_token and not run.scale.scales_tokens,
        "the baseline gives each token an advantage of its own, and this scale takes one number a response",
        "set scale=none or scale=batch_std_tokens",
    ),
    Rule(
        "credit_is_of_tokens",
        ("baseline", "importance", "surrogate"),
        lambda run: (
            run.baseline.per_token
            and run.surrogate.uses_ratio
            and (run.surrogate.one_loss_a_row or run.importance.one_gradient_a_row)
        ),
        "one ratio for a whole response gives all its tokens the mean of their advantages, and the credit is lost",
        "set importance=token or sequence_token, and a surrogate that takes one loss a token",
    ),
    Rule(
        "race_has_one_finish",
        ("group_filter", "truncation"),
        lambda run: run.group_filter.races and run.truncation.generates_twice,
        "interrupted responses go on in a second call of the sampler, so who ends first cannot be told",
        "set truncation=score, or group_filter=resample, which waits for all responses",
    ),
    Rule(
        "continuations_know_the_text_alone",
        ("baseline", "group_filter", "truncation"),
        lambda run: (run.baseline.continues or run.group_filter.carries_over) and run.truncation.intervenes,
        "a continuation does not know for how long its response was sure, nor when it would have been interrupted",
        "set truncation=score or one of the masks, or a baseline and a group_filter without continuations",
    ),
    Rule(
        "continuations_are_not_charged",
        ("baseline", "kl"),
        lambda run: run.baseline.continues and run.kl.shapes_reward,
        "the values of states hold no kl penalty, while the rewards they are compared with would",
        "choose a kl that is a term of the loss, as VinePPO does, or another baseline",
    ),
    Rule(
        "estimates_have_no_group",
        ("baseline", "reward_shaping"),
        lambda run: run.baseline.generates and run.reward_shaping.group_relative,
        "what is added to a reward is relative to the group, which the responses of an estimate do not have",
        "set reward_shaping=none or one that looks at each response alone, or another baseline",
    ),
    Rule(
        "stream_has_no_race",
        ("schedule", "group_filter"),
        lambda run: run.schedule.streams and run.group_filter.races,
        "in a stream the groups that end first are taken anyway and the rest goes on, so there is nothing to abort",
        "set group_filter=active or resample, or schedule=one_step_off",
    ),
    Rule(
        "estimates_are_of_the_drawing_policy",
        ("baseline", "schedule"),
        lambda run: run.baseline.generates and not run.schedule.keeps_sampler_current,
        "the value of a state is estimated by drawing its ends, and the policy that drew the response is gone by then",
        "set schedule=sync, or a baseline that generates nothing",
    ),
    Rule(
        "engine_does_not_stream",
        ("engine", "schedule"),
        lambda run: run.schedule.streams and not run.engine.streams,
        "this engine answers whole calls, and cannot take new weights in the middle of one",
        "set engine=native (in simulated time) or engine=vllm_process (for real), or schedule=one_step_off",
    ),
    Rule(
        "real_streams_have_no_simulated_time",
        ("budget", "engine", "schedule"),
        lambda run: run.budget.is_simulated and run.schedule.streams and run.engine.overlaps,
        "responses that grow in a process of their own take real time, and the simulated clock stands still",
        "set budget=sampled_tokens, or engine=native",
    ),
)
