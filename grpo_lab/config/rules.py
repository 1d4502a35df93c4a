"""Incompatible options and options without effect: a table of rules, and the check of a run against it.

A rule reads facts that the classes declare, never their names, so the same table covers options added later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from grpo_lab.config.run_config import RunConfig, snake_case
from grpo_lab.distributed import ranks
from grpo_lab.policy.optim import Decay
from grpo_lab.tasks.base import AnswerForm, Grader
from grpo_lab.tricks.entropy import Entropy
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.tricks.importance import Importance
from grpo_lab.tricks.rejection import Rejection
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.surrogate import Surrogate
from grpo_lab.tricks.truncation import Truncation


@dataclass(frozen=True)
class Rule:
    """A combination to refuse or to warn about; `axes` are the slots that its reason names.

    `no_op`: the option in the first of these slots has no effect, so an arm that changes nothing else is refused.
    """

    name: str
    axes: tuple[str, ...]
    broken_when: Callable[[RunConfig], bool]
    reason: str
    remedy: str
    no_op: bool = False

    def describe(self, run: RunConfig, choices: Mapping[str, str] | None = None) -> str:
        """One line: the slots with their options, the reason and the remedy.

        `choices` is slot -> option; without it an option is described by its class and numbers.
        """
        held = {axis: getattr(run, axis) for axis in self.axes}
        parts = [f"{axis}={(choices or {}).get(axis) or _label(value)}" for axis, value in held.items()]
        return f"{', '.join(parts)}: {self.reason}. Remedy: {self.remedy}."


def _label(value: object) -> str:
    if isinstance(value, int):
        return str(value)
    numbers = ", ".join(f"{name}={getattr(part, 'value', part)}" for name, part in vars(value).items())
    return f"{snake_case(type(value).__name__)}({numbers})"


def _lowest_reward(shaping: RewardShaping, reward: Grader) -> float:
    right, wrong = (reward.bounds(right)[0] for right in (True, False))
    return shaping.lowest(right, wrong)


def _unread(form: AnswerForm, read: frozenset[AnswerForm]) -> bool:
    """True if a grader looks for answers in other places than the template asks for. Of a free form nobody knows."""
    return form is not AnswerForm.free and form not in read


_UNREAD = "the template asks for answers in a form that the grader does not read, so right ones count as wrong"
_ONE_FORM = (
    "choose a template and graders of one form: #NUMBER (template=plain, reward=strict, verifier=exact_answer), "
    "\\boxed{} (template=chat, boxed or none) or <answer> (template=r1), both read by reward=math and verifier=math; "
    "where the questions themselves say how to answer, set template.interruption to the mark that they ask for"
)


def _one_ratio_for_a_response(surrogate: Surrogate, importance: Importance) -> bool:
    return surrogate.uses_ratio and (surrogate.sequence_level or importance.sequence_level)


_SELECTS: Mapping[Selects, Callable[[RunConfig], bool]] = {
    Selects.question_filter: lambda run: not run.question_filter.is_no_op,
    Selects.pass_rate: lambda run: not run.pass_rate.is_no_op,
    Selects.truncation: lambda run: run.truncation.removes_rows,
    Selects.group_filter: lambda run: run.group_filter.removes_rows,
    Selects.correction: lambda run: not run.correction.is_no_op,
    Selects.rejection: lambda run: not run.rejection.is_no_op,
    Selects.entropy: lambda run: run.entropy.selects_tokens,
    Selects.token_credit: lambda run: not run.token_credit.is_no_op,
    Selects.surrogate: lambda run: not run.surrogate.is_no_op and not run.surrogate.pulls_without_advantage,
    Selects.update_mask: lambda run: not run.update_mask.is_no_op,
}


def _has_twin(axis: Selects) -> Callable[[RunConfig], bool]:
    return lambda run: run.twin.of_axis(axis) and _SELECTS[axis](run)


ERRORS: tuple[Rule, ...] = (
    Rule(
        "twin_selects_nothing",
        ("twin", *(axis.value for axis in Selects)),
        lambda run: not run.twin.can_draw({axis for axis, selects in _SELECTS.items() if selects(run)}),
        "the twin is of options that mask, clip, reject or drop nothing",
        "name in twin.of an axis whose option does (grpo_lab/tricks/selects.py lists them), or set twin=none",
    ),
    Rule(
        "twin_of_a_race",
        ("twin", "group_filter", "schedule"),
        lambda run: (
            _has_twin(Selects.group_filter)(run)
            and run.group_filter.refills
            and (run.group_filter.races or run.schedule.streams)
        ),
        "groups are judged one by one as they end, so there is no round from which as many could be drawn",
        "set group_filter=resample, active or drop with a schedule of whole batches, or leave group_filter out of "
        "twin.of",
    ),
    Rule(
        "twin_of_a_penalty",
        ("twin", "surrogate"),
        lambda run: run.twin.of_axis(Selects.surrogate) and run.surrogate.pulls_without_advantage,
        "this surrogate adds a penalty on the drift, which a draw of tokens cannot replace",
        "choose a surrogate that masks, clips or weights (ppo, dppo, cispo, m2po), or name other axes in twin.of",
    ),
    Rule(
        "twin_of_mixed_rows",
        ("twin", "surrogate", "importance", "update_mask", "baseline", "teacher"),
        lambda run: (
            (run.baseline.per_token or run.teacher.needs_model)
            and (
                (_has_twin(Selects.surrogate)(run) and not run.importance.per_token)
                or (_has_twin(Selects.update_mask)(run) and not run.update_mask.divides_rows)
            )
        ),
        "a response has one ratio and its tokens have advantages of both signs, so neither rows nor tokens are clipped",
        "set importance=token and update_mask=none, or a baseline with one advantage per response and teacher=none",
    ),
    Rule(
        "twin_of_a_correction_in_the_updates",
        ("twin", "correction", "old_policy"),
        lambda run: _has_twin(Selects.correction)(run) and run.old_policy.interpolates,
        "an interpolated old policy is corrected in each update, where no twin of the weights is drawn",
        "set old_policy=recomputed, or name other axes in twin.of",
    ),
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
        "a single response has no others of its group to be compared with, so nothing is ever added",
        "set group_size to at least 2, or reward_shaping=none",
    ),
    Rule(
        "teacher_needs_a_group",
        ("teacher", "group_size"),
        lambda run: run.teacher.group_relative and run.group_size < 2,
        "the teacher is shown another response of the group, and there is none",
        "set group_size to at least 2, or choose a teacher that is shown the answer, teacher=opsd",
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
        lambda run: (
            run.correction.needs_old_logprobs
            and run.surrogate.uses_ratio
            and not (run.old_policy.recomputes or run.old_policy.interpolates)
        ),
        "a ratio to the sampler already contains the mismatch, and the weight would apply it a second time",
        "set correction=none, or old_policy=recomputed",
    ),
    Rule(
        "old_policy_exists_in_updates",
        ("old_policy", "kl", "teacher"),
        lambda run: run.old_policy.interpolates and (run.kl.shapes_reward or run.teacher.needs_model),
        "an interpolated old policy has log-probs only within an update, and these are needed before",
        "set old_policy=recomputed, or a kl that is a term of the loss and teacher=none",
    ),
    Rule(
        "advantage_is_scaled_twice",
        ("baseline", "scale"),
        lambda run: run.baseline.scales_itself and not run.scale.is_no_op,
        "this baseline already divides by a deviation, and a second scale would undo its weighting",
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
        "learner_is_not_quantized",
        ("learner_precision",),
        lambda run: run.learner_precision.quantizes,
        "this precision is a sampler's: no gradient passes through its rounding",
        "set learner_precision=bf16, and sampler_precision=fp8_simulated",
    ),
    Rule(
        "engine_does_not_simulate_fp8",
        ("sampler_precision", "engine"),
        lambda run: run.sampler_precision.quantizes and not run.engine.simulates_fp8,
        "only the native engine simulates FP8, and a weight sync to vLLM writes into layers of half precision",
        "set engine=native, or sampler_precision=bf16",
    ),
    Rule(
        "graphs_do_not_round_inputs",
        ("sampler_precision", "engine"),
        lambda run: run.sampler_precision.quantizes_inputs and getattr(run.engine, "cuda_graphs", False),
        "the recorded decoding step joins layers in kernels that do not round their inputs",
        "set engine.cuda_graphs=false, or sampler_precision.activations=false",
    ),
    Rule(
        "critic_has_adams_rate",
        ("baseline", "optimizer"),
        lambda run: run.baseline.needs_critic and not run.optimizer.scale_invariant,
        "the critic is trained by the same optimiser, and critic.learning_rate is AdamW's: with steps as large as the "
        "gradient it means something else",
        "set optimizer=adamw or muon, or a baseline without a critic",
    ),
    Rule(
        "sft_has_adams_rate",
        ("sft", "optimizer"),
        lambda run: not run.sft.is_no_op and not run.optimizer.scale_invariant,
        "fine-tuning uses the same optimiser, and sft.learning_rate is AdamW's: with steps as large as the gradient it "
        "means something else",
        "set optimizer=adamw or muon, or sft=none",
    ),
    Rule(
        "sft_has_no_loss_scale",
        ("sft", "learner_precision"),
        lambda run: not run.sft.is_no_op and run.learner_precision.scales_loss,
        "in float16 small gradients vanish unless the loss is scaled, and that of fine-tuning is not",
        "set learner_precision=bf16 or fp32, or sft=none",
    ),
    Rule(
        "rewards_must_not_be_negative",
        ("scale", "reward", "reward_shaping", "kl"),
        lambda run: (
            run.scale.needs_rewards_from_zero
            and (_lowest_reward(run.reward_shaping, run.reward) < 0 or run.kl.shapes_reward)
        ),
        "divided by a mean that can be negative, right answers are punished and wrong ones rewarded",
        "set reward.wrong=0, no shaping and no kl that take a reward below 0, or another scale",
    ),
    Rule(
        "no_reward_is_negative",
        ("scale", "baseline", "reward", "reward_shaping", "kl"),
        lambda run: (
            run.scale.splits_signs
            and not run.baseline.centres
            and _lowest_reward(run.reward_shaping, run.reward) >= 0
            and not run.kl.shapes_reward
        ),
        "without a baseline and without negative rewards there is no negative advantage to weigh",
        "set reward.wrong=-1, or a baseline that centres",
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
        "signs_are_of_responses",
        ("aggregation", "baseline", "teacher"),
        lambda run: run.aggregation.reads_signs and (run.baseline.per_token or run.teacher.needs_model),
        "this aggregation divides responses by the sign of their advantage, and here each token has its own",
        "set aggregation=prompt_mean, or choose a baseline of one number per response, and no teacher",
    ),
    Rule(
        "correctness_counts_twice",
        ("reward_shaping", "scale"),
        lambda run: run.reward_shaping.maps_correctness and run.scale.reads_components,
        "a scale that normalises each component by itself takes the correction of correctness for a second reward",
        "set scale=none, or reward_shaping=none",
    ),
    Rule(
        "credit_is_of_tokens",
        ("baseline", "importance", "surrogate"),
        lambda run: run.baseline.per_token and _one_ratio_for_a_response(run.surrogate, run.importance),
        "one ratio for a whole response gives all its tokens the mean of their advantages, and the credit is lost",
        "set importance=token or sequence_token, and a surrogate that takes one loss a token",
    ),
    Rule(
        "mask_is_of_tokens",
        ("update_mask", "importance", "surrogate"),
        lambda run: run.update_mask.divides_rows and _one_ratio_for_a_response(run.surrogate, run.importance),
        "one ratio for a whole response moves a masked token through the tokens that are left",
        "set importance=token or sequence_token and a surrogate that takes one loss a token, or update_mask=opsm",
    ),
    Rule(
        "teacher_speaks_of_tokens",
        ("teacher", "importance", "surrogate"),
        lambda run: run.teacher.needs_model and _one_ratio_for_a_response(run.surrogate, run.importance),
        "one ratio for a whole response replaces the teacher's per-token signal by its mean over the response",
        "set importance=token or sequence_token, and a surrogate that takes one loss a token",
    ),
    Rule(
        "token_credit_is_of_tokens",
        ("token_credit", "importance", "surrogate"),
        lambda run: not run.token_credit.is_no_op and _one_ratio_for_a_response(run.surrogate, run.importance),
        "one ratio for a whole response gives all its tokens the mean of their advantages, and the credit is lost",
        "set importance=token or sequence_token, and a surrogate that takes one loss a token, or token_credit=none",
    ),
    Rule(
        "race_has_one_finish",
        ("group_filter", "truncation"),
        lambda run: run.group_filter.races and run.truncation.generates_twice,
        "interrupted responses go on in a second call of the sampler, so the finishing order is undefined",
        "set truncation=score, or group_filter=resample, which waits for all responses",
    ),
    Rule(
        "continuations_know_the_text_alone",
        ("baseline", "group_filter", "truncation"),
        lambda run: (run.baseline.continues or run.group_filter.carries_over) and run.truncation.intervenes,
        "this truncation depends on more than a response's text, and a continuation starts from the text only",
        "set truncation=score or one of the masks, or a baseline and a group_filter without continuations",
    ),
    Rule(
        "continuations_are_not_charged",
        ("baseline", "kl"),
        lambda run: run.baseline.continues and run.kl.shapes_reward,
        "state values estimated by continuations exclude the KL penalty, but the rewards would include it",
        "choose a kl that is a term of the loss, as VinePPO does, or another baseline",
    ),
    Rule(
        "estimates_have_no_group",
        ("baseline", "reward_shaping"),
        lambda run: run.baseline.generates and run.reward_shaping.group_relative,
        "this reward shaping compares responses within a group, and responses sampled for the baseline have none",
        "set reward_shaping=none or one that reads each response on its own, or another baseline",
    ),
    Rule(
        "stream_has_no_race",
        ("schedule", "group_filter"),
        lambda run: run.schedule.streams and run.group_filter.races,
        "a streaming schedule already trains on the first groups to finish, so this filter has nothing to abort",
        "set group_filter=active or resample, or schedule=one_step_off",
    ),
    Rule(
        "estimates_are_of_the_drawing_policy",
        ("baseline", "schedule"),
        lambda run: run.baseline.generates and not run.schedule.keeps_sampler_current,
        "state values are estimated by sampling continuations, and the policy that sampled the response is gone",
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
        "responses generated in another process take real time, and the simulated clock does not advance",
        "set budget=sampled_tokens, or engine=native",
    ),
    Rule(
        "real_streams_keep_their_weights",
        ("evaluation", "engine", "schedule"),
        lambda run: run.evaluation.sampler_weights and run.schedule.streams and run.engine.overlaps,
        "the weights that sampled a batch can be evaluated only while no response is on its way in another process",
        "set evaluation.sampler_weights=false, or engine=native",
    ),
    Rule(
        "guesses_need_a_phrase",
        ("pass_rate", "template"),
        lambda run: run.pass_rate.guesses and not run.template.interruption,
        "a guess begins with the template's interruption, which is empty, and would be a whole answer",
        "set template.interruption to what comes before a final answer, or pass_rate.tries=0",
    ),
    Rule(
        "reward_reads_the_answers",
        ("template", "reward"),
        lambda run: _unread(run.template.answer_form, run.reward.reads),
        _UNREAD,
        _ONE_FORM,
    ),
    Rule(
        "verifier_reads_the_answers",
        ("template", "verifier"),
        lambda run: _unread(run.template.answer_form, run.verifier.reads),
        _UNREAD,
        _ONE_FORM,
    ),
    Rule(
        "suites_need_their_splits",
        ("evaluation", "task"),
        lambda run: not run.evaluation.splits.issubset(run.task.splits),
        "this task has no problems for one of the suites",
        "leave it out of evaluation.suites, or set the field of the task that makes them: withheld_numbers, "
        "other_number_max or other_families",
    ),
)

# What is refused where several processes share the run.
ERRORS_OF_SEVERAL_RANKS: tuple[Rule, ...] = (
    Rule(
        "streams_have_one_rank",
        ("schedule",),
        lambda run: run.schedule.streams,
        "responses that continue across weight syncs are not divided among several processes",
        "set schedule=one_step_off or off_policy_k, or start one process",
    ),
    Rule(
        "races_have_one_rank",
        ("group_filter",),
        lambda run: run.group_filter.races,
        "the finishing order of groups is undefined when several processes sample at their own speed",
        "set group_filter=resample, which waits for all responses, or start one process",
    ),
    Rule(
        "compiled_models_have_one_rank",
        ("model",),
        lambda run: run.model.loading().compiled,
        "a compiled model and weights split over several processes were not tried together",
        "set model.compiled=false, or start one process",
    ),
    Rule(
        "one_rank_asks_the_base",
        ("engine", "pass_rate", "sft"),
        lambda run: run.engine.needs_all_ranks and not (run.pass_rate.is_no_op and run.sft.is_no_op),
        "pass rates and fine-tuning run in one process, but this engine can only start in all processes at once",
        "set pass_rate=none and sft=none, set engine=vllm_process or native, or start one process up to the first "
        "checkpoint",
    ),
)


class IncompatibleRun(ValueError):
    """Every broken rule of a run, one per line."""


def _removes(group_filter: GroupFilter, truncation: Truncation, rejection: Rejection, entropy: Entropy) -> bool:
    """True if some token can leave the loss."""
    filters = group_filter.removes_rows and not group_filter.refills
    return truncation.removes_rows or filters or rejection.removes_rows or entropy.selects_tokens


WARNINGS: tuple[Rule, ...] = (
    Rule(
        "clip_cannot_act",
        ("surrogate", "updates", "old_policy", "correction"),
        lambda run: (
            run.surrogate.needs_drift
            and run.on_policy
            and run.surrogate.weight_at_ratio_one == 1
            and not (run.surrogate.sequence_level and not run.correction.is_no_op)
        ),
        "with one on-policy update every ratio is 1, where no clip, gate or penalty on drift can act",
        "choose updates=two or more where the trust region is what is studied",
        no_op=True,
    ),
    Rule(
        "importance_cannot_act",
        ("importance", "updates", "old_policy", "surrogate", "correction"),
        lambda run: (
            not run.importance.is_no_op
            and run.surrogate.uses_ratio
            and run.on_policy
            and run.correction.is_no_op
            and run.surrogate.mark_scope is None
        ),
        "with one on-policy update the ratio of a token and of its response are both 1",
        "choose updates=two or more where the ratio is what is studied",
        no_op=True,
    ),
    Rule(
        "importance_is_ignored",
        ("importance", "surrogate"),
        lambda run: not run.importance.is_no_op and not run.surrogate.uses_ratio,
        "this surrogate does not read the ratio, neither of tokens nor of responses",
        "choose a surrogate that reads the ratio, or importance=token",
        no_op=True,
    ),
    Rule(
        "rank_is_not_read",
        ("pass_rate", "curriculum"),
        lambda run: run.pass_rate.ranks and not (run.pass_rate.drops or run.curriculum.reads_difficulty),
        "every problem stays, and no curriculum reads the difficulty that pass rates give it",
        "set curriculum=easy_to_hard or kimi, or a pass_rate that drops problems",
        no_op=True,
    ),
    Rule(
        "old_policy_is_ignored",
        ("old_policy", "surrogate", "kl", "teacher"),
        lambda run: (
            not (run.old_policy.recomputes or run.surrogate.uses_ratio or run.kl.reads_old or run.teacher.needs_model)
        ),
        "neither surrogate nor kl nor a teacher reads the old policy",
        "choose a surrogate that reads the ratio, or old_policy=recomputed",
        no_op=True,
    ),
    Rule(
        "sampler_is_the_old_policy",
        ("old_policy", "schedule", "group_filter", "learner_precision", "sampler_precision"),
        lambda run: not run.old_policy.recomputes and run.sampler_is_learner,
        "sampler and learner hold the same weights in the same arithmetic, so both old policies agree up to rounding",
        "let them differ by schedule, precision or group_filter=oversample_abort_partial, or set old_policy=recomputed",
        no_op=True,
    ),
    Rule(
        "interpolation_ends_at_the_sampler",
        ("old_policy", "schedule", "group_filter"),
        lambda run: run.old_policy.interpolates and run.schedule.ahead <= 1 and not run.group_filter.carries_over,
        "no token is more than a step old, and of such the interpolated old policy is the sampler",
        "set old_policy=sampler, or schedule=one_step_off schedule.lag=2 or more",
    ),
    Rule(
        "survivors_are_everyone",
        ("denominator", "truncation", "group_filter", "rejection", "entropy"),
        lambda run: (
            run.denominator.survivors_only
            and not _removes(run.group_filter, run.truncation, run.rejection, run.entropy)
        ),
        "no trick removes rows or tokens here, so survivors and original counts are the same",
        "combine denominator=survivors with a mask, a filter or a rejection",
        no_op=True,
    ),
    Rule(
        "ratio_is_ignored",
        ("surrogate", "updates"),
        lambda run: not run.surrogate.uses_ratio and run.updates.number > 1,
        "later updates are off-policy and this surrogate neither reweights nor clips their tokens",
        "choose updates=one, or a surrogate that reads the ratio",
    ),
    Rule(
        "nothing_to_correct",
        ("correction", "schedule", "group_filter", "learner_precision", "sampler_precision"),
        lambda run: run.correction.needs_old_logprobs and run.sampler_is_learner,
        "sampler and learner hold the same weights in the same arithmetic, so every weight is about 1",
        "let them differ by schedule or precision, or set correction=none",
        no_op=True,
    ),
    Rule(
        "nothing_to_reject",
        ("rejection", "schedule", "group_filter", "learner_precision", "sampler_precision"),
        lambda run: run.rejection.needs_old_logprobs and run.sampler_is_learner,
        "sampler and learner hold the same weights in the same arithmetic, so nothing is beyond any bound",
        "let them differ by schedule or precision, or set rejection=none",
        no_op=True,
    ),
    Rule(
        "nothing_to_mask",
        ("update_mask", "updates", "schedule", "group_filter", "learner_precision", "sampler_precision"),
        lambda run: not run.update_mask.is_no_op and run.updates.number == 1 and run.sampler_is_learner,
        "with one update on responses of the learner's own weights and arithmetic, it has not moved from the sampler",
        "choose updates=two or more, let sampler and learner differ by schedule or precision, or set update_mask=none",
        no_op=True,
    ),
    Rule(
        "filter_hardly_acts",
        (
            "group_filter",
            "baseline",
            "scale",
            "denominator",
            "reward_shaping",
            "kl",
            "entropy",
            "surrogate",
            "aggregation",
            "token_credit",
            "teacher",
        ),
        lambda run: (
            run.group_filter.removes_rows
            and not run.teacher.needs_model
            and not run.group_filter.refills
            and run.baseline.group_relative
            and not run.baseline.handles_singletons
            and run.aggregation.invariant
            and not (run.scale.reads_batch or run.scale.moves_zeros or run.token_credit.reads_batch)
            and not run.denominator.survivors_only
            and run.reward_shaping.is_no_op
            and not run.kl.needs_reference
            and not run.entropy.needs_gradient
            and not run.surrogate.pulls_without_advantage
            and run.surrogate.mark_scope is None
        ),
        "zero-variance groups have advantage 0 anyway, and the original counts leave the step size unchanged; the "
        "filter only skips updates in which every group has zero variance, where Adam would still move on momentum",
        "combine the filter with denominator=survivors",
    ),
    Rule(
        "share_is_one",
        ("scale", "group_filter", "rejection"),
        lambda run: run.scale.pays_for_signal and run.group_filter.removes_rows and run.rejection.is_no_op,
        "the filter takes out the groups without signal, so the share of those with signal is 1",
        "set group_filter=keep, and let the scale make up for such groups",
        no_op=True,
    ),
    Rule(
        "baseline_is_recentred",
        ("baseline", "scale"),
        lambda run: run.scale.recentres and run.baseline.constant_over_batch,
        "the scale subtracts the batch's mean anyway, so any baseline that is one number for the batch cancels",
        "choose a baseline over the group, or a scale that does not recentre",
        no_op=True,
    ),
    Rule(
        "baseline_is_not_read",
        ("baseline", "scale"),
        lambda run: run.scale.reads_components and not (run.baseline.is_group_mean or run.baseline.per_token),
        "the scale subtracts the group's mean from each component of the reward, and reads no baseline",
        "set baseline=group_mean, or another scale such as group_std",
        no_op=True,
    ),
    Rule(
        "reward_has_one_part",
        ("scale", "reward", "reward_shaping", "kl"),
        lambda run: (
            run.scale.reads_components
            and not run.reward.has_parts
            and run.reward_shaping.is_no_op
            and not run.kl.shapes_reward
        ),
        "with a single component nothing is normalised by itself: the advantages are those of group_std, divided by "
        "one number for the batch",
        "choose a reward of several parts such as reward=strict_and_format, a reward_shaping, or scale=group_std",
    ),
    Rule(
        "correction_is_divided_away",
        ("reward_shaping", "baseline", "scale"),
        lambda run: run.reward_shaping.maps_correctness and run.baseline.centres and run.scale.divides_by_deviation,
        "the correction of a two-valued reward is a factor once a baseline is subtracted, and the deviation divides it "
        "away, unless the reward has other parts",
        "set scale=none, as the paper does, or baseline=none",
    ),
    Rule(
        "shift_is_recentred",
        ("baseline", "scale"),
        lambda run: run.baseline.shifts and run.scale.recentres,
        "the scale subtracts the batch's mean, and with it the number by which this baseline differs from group_mean",
        "set scale=none or group_std, or baseline=group_mean",
    ),
    Rule(
        "return_to_go_without_token_penalty",
        ("baseline", "kl"),
        lambda run: run.baseline.reward_to_go and not run.kl.shapes_reward,
        "without a penalty on single tokens the return to go equals the whole reward",
        "set kl=k1_reward, or baseline=none, which is the same here",
        no_op=True,
    ),
    Rule(
        "factor_is_divided_away",
        ("baseline", "scale"),
        lambda run: run.baseline.scales_group_mean and run.scale.divides_by_centred,
        "leaving one out multiplies the centred rewards by n/(n-1), and their own deviation divides that away again",
        "set baseline=group_mean, or another scale",
    ),
    Rule(
        "shaping_is_not_read",
        ("reward_shaping", "baseline", "group_filter"),
        lambda run: (
            run.baseline.reads_correctness and not run.reward_shaping.is_no_op and not run.group_filter.reads_reward
        ),
        "this baseline reads the verifier's correctness, so what is added to the reward never reaches the loss",
        "set reward_shaping=none, or a baseline that reads the reward",
        no_op=True,
    ),
    Rule(
        "kl_is_not_read",
        ("kl", "baseline"),
        lambda run: run.baseline.reads_correctness and run.kl.shapes_reward,
        "this baseline reads the verifier's correctness, so a kl penalty in the reward never reaches the loss",
        "choose a kl that is a term of the loss, or a baseline that reads the reward",
        no_op=True,
    ),
    Rule(
        "reward_is_not_learnt",
        ("teacher", "scale", "reward_shaping", "group_filter"),
        lambda run: (
            run.teacher.replaces_reward
            and not (run.scale.is_no_op and run.reward_shaping.is_no_op and not run.group_filter.removes_rows)
        ),
        "the teacher replaces the reward, so reward shaping and scaling never reach the loss, and a filter by "
        "reward drops groups that the teacher would train on",
        "set scale=none, reward_shaping=none and group_filter=keep, or teacher=with_reward",
    ),
    Rule(
        "token_credit_is_not_learnt",
        ("token_credit", "teacher"),
        lambda run: run.teacher.replaces_reward and not run.token_credit.is_no_op,
        "the teacher replaces the advantages that token credit has changed, so it never reaches the loss",
        "set token_credit=none, or teacher=with_reward",
        no_op=True,
    ),
    Rule(
        "rows_weigh_by_length",
        ("aggregation", "importance", "surrogate"),
        lambda run: (
            not run.aggregation.rows_weigh_alike
            and run.surrogate.uses_ratio
            and (run.surrogate.sequence_level or run.importance.averages)
        ),
        "every token carries its response's ratio, so this aggregation weighs that ratio by the response's length, "
        "which LUSPO means to and GSPO and GMPO do not",
        "set aggregation=sequence_mean, as GSPO and GMPO do, or keep it to study LUSPO's weight",
    ),
    Rule(
        "width_is_for_tokens",
        ("surrogate", "importance"),
        lambda run: (
            run.importance.averages and run.surrogate.clip_width is not None and run.surrogate.clip_width > 0.05
        ),
        "a response's ratio is a mean over its tokens and hardly leaves 1, so a clip this wide practically never binds",
        "set surrogate=ppo_gspo",
    ),
    Rule(
        "square_is_not_summed",
        ("aggregation", "surrogate"),
        lambda run: run.surrogate.squares_rows and not run.aggregation.sums_rows,
        "the square of a response's log-ratio is summed over its tokens, which this aggregation divides by their count",
        "set aggregation=sequence_sum or constant",
    ),
    Rule(
        "loss_is_scaled",
        ("surrogate", "convention"),
        lambda run: run.surrogate.weight_at_ratio_one != 1,
        "on-policy every token has a weight below 1, which lowers the learning rate and does nothing else",
        "raise surrogate.cap to at least 1, or set convention.cispo_cap=one_plus",
    ),
    Rule(
        "microbatches_matter",
        ("aggregation", "surrogate", "convention"),
        lambda run: run.reads_microbatches,
        "under this convention the gradient depends on how the step is split into microbatches",
        "set convention=house unless a past run has to be matched",
    ),
    Rule(
        "filter_drops_gradient",
        ("group_filter", "baseline", "scale"),
        lambda run: run.group_filter.removes_rows and not run.baseline.group_relative and not run.scale.zeroes_tied,
        "this baseline gives zero-variance groups an advantage, so the filter discards gradient",
        "set group_filter=keep, or a baseline over the group",
    ),
    Rule(
        "reward_is_correctness",
        ("group_filter", "reward_shaping"),
        lambda run: run.group_filter.reads_reward and run.reward_shaping.is_no_op,
        "without shaping the reward varies only with correctness, so this filter equals the filter by correctness",
        "choose a reward_shaping, or the filter by correctness",
    ),
    Rule(
        "reference_is_not_read",
        ("reference", "kl", "teacher"),
        lambda run: run.reference.changes and not (run.kl.needs_reference or run.teacher.reads_reference),
        "neither a kl nor a teacher reads the reference, so its changes have no effect",
        "choose a kl or a teacher that reads it, or reference=frozen",
        no_op=True,
    ),
    Rule(
        "stale_and_uncorrected",
        ("schedule", "old_policy", "correction", "rejection"),
        lambda run: (
            not run.schedule.keeps_sampler_current
            and (run.old_policy.recomputes or run.old_policy.interpolates)
            and run.correction.is_no_op
            and run.rejection.is_no_op
        ),
        "the tokens were sampled by older weights, and the loss takes them for the learner's own",
        "set correction=tis_token, or old_policy=sampler, unless that is what is studied",
    ),
    Rule(
        "rate_is_for_small_models",
        ("optimizer", "model"),
        lambda run: run.optimizer.scale_invariant and run.optimizer.learning_rate > run.model.highest_rate,
        "published runs train all weights of a pretrained model at 1e-7 to 1e-5; a higher rate is likely to break it",
        "set optimizer=adamw_pretrained, or optimizer.learning_rate to a rate near 1e-6",
    ),
    Rule(
        "sft_rate_is_for_small_models",
        ("sft", "model"),
        lambda run: run.sft.rate > run.model.highest_rate,
        "supervised fine-tuning of all weights of a pretrained model is published at 1e-6 to 5e-5; a higher rate is "
        "likely to break it",
        "set sft.learning_rate to a rate near 1e-5",
    ),
    Rule(
        "critic_rate_is_for_small_models",
        ("critic", "baseline", "model"),
        lambda run: (
            run.baseline.needs_critic and run.critic.owns_trunk and run.critic.learning_rate > run.model.highest_rate
        ),
        "the critic starts as a copy of a pretrained model, which published runs train at 1e-6 to 1e-5",
        "set critic.learning_rate to five times the policy's, near 5e-6",
    ),
    Rule(
        "length_penalty_is_out_of_proportion",
        ("reward_shaping",),
        lambda run: run.reward_shaping.out_of_proportion,
        "its numbers are for other lengths: a ramp over less than a tenth of the budget, or a length penalty that "
        "no right answer outweighs",
        "set reward_shaping.cache_tokens to a fifth of engine.max_tokens, or reward_shaping.alpha to one over it",
    ),
    Rule(
        "top_p_biases_the_ratio",
        ("engine",),
        lambda run: run.engine.top_p < 1,
        "log-probs are of the full softmax, so the tokens that top-p removed look like sampler-learner mismatch",
        "train with engine.top_p=1 and use top-p in evaluation only",
    ),
)


@dataclass(frozen=True)
class BrokenRules:
    """The rules that a run breaks: those that refuse it, and those that warn, which the run records."""

    errors: list[Rule]
    warnings: list[Rule]

    @property
    def no_op_axes(self) -> set[str]:
        """Axes whose option has no effect in the run."""
        return {rule.axes[0] for rule in self.warnings if rule.no_op}


def broken_rules(run: RunConfig) -> BrokenRules:
    """The rules of this table that the run breaks."""
    errors = ERRORS + ERRORS_OF_SEVERAL_RANKS if ranks.launched() > 1 else ERRORS
    broken, warned = ([rule for rule in rules if rule.broken_when(run)] for rules in (errors, WARNINGS))
    return BrokenRules(broken, warned)


# Dotted key of a slot or a field -> whether this run never reads it, since what would is switched off.
_UNREAD_KEYS: dict[str, Callable[[RunConfig], bool]] = {
    "critic": lambda run: not run.baseline.needs_critic,
    "reference": lambda run: not (run.kl.needs_reference or run.teacher.reads_reference),
    "optimizer.final_share": lambda run: getattr(run.optimizer, "decay", None) is Decay.constant,
    "optimizer.decay_share": lambda run: getattr(run.optimizer, "decay", None) in (Decay.constant, Decay.cosine),
    "model.lora.alpha": lambda run: run.model.loading().lora is None,
    "model.lora.targets": lambda run: run.model.loading().lora is None,
    "evaluation.other_wording": lambda run: "other_wording" not in run.evaluation.suites,
    "evaluation.suite_problems": lambda run: not run.evaluation.suites and not run.evaluation.tables,
    "template.target_length": lambda run: not run.reward_shaping.asks_for,
}


def unread_keys(run: RunConfig) -> list[str]:
    """The slots and fields that nothing in this run reads; where runs are compared by parameters they are left out."""
    return [key for key, unread in _UNREAD_KEYS.items() if unread(run)]


def check_compatible(run: RunConfig, choices: Mapping[str, str] | None = None) -> list[str]:
    """Raise IncompatibleRun with every broken rule; otherwise return the warnings, one line each.

    `choices` is slot -> option, as in `Rule.describe`.
    """
    broken = broken_rules(run)
    if broken.errors:
        lines = "\n".join(f"  - {rule.describe(run, choices)}" for rule in broken.errors)
        raise IncompatibleRun(f"this combination cannot run:\n{lines}")
    return [rule.describe(run, choices) for rule in broken.warnings]
