"""The table of rules: each alone, over all its facts, for every pair of options, and against gradients."""

from __future__ import annotations

import ast
import itertools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compositions import CHOICES, class_of, listed, run_of, samples
from helpers import (
    F64,
    Endings,
    Scene,
    assert_close,
    collision_of,
    critic_values,
    make_graded,
    make_rollouts,
    random_scene,
    run_scene,
    shapes_unchecked,
)
from hydra import compose, initialize_config_dir

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.rules import ERRORS, WARNINGS, IncompatibleRun, broken_rules, check_compatible
from grpo_lab.config.run_config import AXES, RunConfig, slot_types, to_run
from grpo_lab.tasks.base import AnswerForm
from grpo_lab.tricks.aggregation import Constant, TokenMean
from grpo_lab.tricks.baseline import Credit, GroupMean, LeaveOneOut, PassAtK, rewards_by_token
from grpo_lab.tricks.convention import AlphaForm, Scope, Singleton, Width
from grpo_lab.tricks.group_filter import Drop, Signal
from grpo_lab.tricks.reward_shaping import SoftOverlong
from grpo_lab.tricks.scale import GroupStd, InformativeShare, NoScale
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.surrogate import Reinforce
from grpo_lab.tricks.twin import NoTwin, RandomTwin

RULES = {rule.name: rule for rule in ERRORS + WARNINGS}
SLOTS = slot_types()


def broken(run: RunConfig) -> set[str]:
    return {rule.name for rule in [*broken_rules(run).errors, *broken_rules(run).warnings]}


# --- each rule by itself ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run that breaks one rule (`beside`: and cannot but break these), and the ways its remedy names to mend it."""

    rule: str
    overrides: str
    remedies: tuple[str, ...]
    beside: frozenset[str] = frozenset()


PASS_AT_K = "baseline=pass_at_k scale=none"
ALONE = "group_size=1 baseline=none scale=none"
CASES = (
    Case("twin_selects_nothing", "twin=random surrogate=reinforce updates=one", ("twin=none", "surrogate=ppo")),
    Case(
        "twin_selects_nothing",
        "twin=random twin.of=[surrogate,rejection]",
        ("twin.of=[surrogate]", "rejection=token_k2 sampler_precision=bf16"),
    ),
    Case(
        "twin_of_a_race",
        "twin=random group_filter=oversample_abort",
        ("group_filter=resample", "group_filter=active", "group_filter=drop", "twin.of=[surrogate]"),
    ),
    Case(
        "twin_of_a_race",
        "twin=random group_filter=resample schedule=in_flight correction=tis_token",
        ("schedule=one_step_off", "group_filter=drop", "twin.of=[surrogate]"),
    ),
    Case(
        "twin_of_a_penalty",
        "twin=random surrogate=kimi aggregation=sequence_sum rejection=token_k2 sampler_precision=bf16",
        ("surrogate=ppo", "twin.of=[rejection]"),
    ),
    Case(
        "twin_of_mixed_rows",
        "twin=random update_mask=opsm baseline=gae scale=none",
        ("importance=token update_mask=none", "baseline=greedy", "twin.of=[surrogate]"),
    ),
    Case(
        "twin_of_mixed_rows",
        "twin=random importance=sequence surrogate=ppo_gspo baseline=gae scale=none",
        ("importance=token update_mask=none", "baseline=greedy"),
        beside=frozenset({"credit_is_of_tokens"}),
    ),
    Case(
        "twin_of_mixed_rows",
        "twin=random update_mask=opsm teacher=opsd scale=none",
        ("importance=token update_mask=none", "teacher=none", "twin.of=[surrogate]"),
    ),
    Case(
        "twin_of_a_correction_in_the_updates",
        "twin=random correction=tis_token old_policy=log_linear schedule=one_step_off schedule.lag=2",
        ("old_policy=recomputed", "twin.of=[surrogate]"),
    ),
    Case("baseline_needs_a_group", "group_size=1 scale=none", ("group_size=2", "baseline=none")),
    Case("baseline_needs_a_group", f"group_size=3 {PASS_AT_K}", ("group_size=8", "baseline=none")),
    Case("scale_needs_a_group", "group_size=1 baseline=none", ("group_size=2", "scale=none")),
    Case(
        "filter_needs_a_group",
        f"{ALONE} group_filter=drop",
        ("group_size=2", "group_filter=keep"),
        beside=frozenset({"filter_drops_gradient"}),
    ),
    Case("shaping_needs_a_group", f"{ALONE} reward_shaping=kimi_length", ("group_size=2", "reward_shaping=none")),
    Case("updates_divide_the_problems", "problems_per_step=6", ("problems_per_step=8",)),
    Case(
        "mismatch_counts_twice",
        "old_policy=sampler correction=tis_token sampler_precision=bf16",
        ("correction=none", "old_policy=recomputed"),
    ),
    Case(
        "old_policy_exists_in_updates",
        "old_policy=log_linear kl=k1_reward correction=tis_token schedule=one_step_off schedule.lag=2",
        ("old_policy=recomputed", "kl=k3_loss teacher=none"),
    ),
    Case(
        "interpolation_ends_at_the_sampler",
        "old_policy=log_linear correction=tis_token schedule=one_step_off",
        ("old_policy=sampler correction=none", "schedule=one_step_off schedule.lag=2"),
    ),
    Case("advantage_is_scaled_twice", "baseline=pass_at_k", ("scale=none",)),
    Case("rewards_must_not_be_negative", "scale=group_mean reward=strict_plus_minus", ("reward.wrong=0", "scale=none")),
    Case("rewards_must_not_be_negative", "scale=group_mean kl=k1_reward", ("kl=none", "kl=k2_loss", "scale=none")),
    Case(
        "rewards_must_not_be_negative",
        "scale=group_mean reward_shaping=soft_overlong",
        ("reward_shaping=none", "reward_shaping=soft_overlong_correct_only", "reward_shaping=l1_max", "scale=none"),
    ),
    Case(
        "no_reward_is_negative",
        "baseline=none scale=sign_weighted_nsr",
        ("reward.wrong=-1", "baseline=group_mean", "baseline=batch_mean"),
    ),
    Case("ratio_must_be_of_tokens", "surrogate=gmpo importance=sequence", ("importance=token",)),
    Case("critic_divides_the_problems", "baseline=gae scale=none critic.minibatches=3", ("critic.minibatches=8",)),
    Case(
        "credit_is_of_tokens",
        "baseline=gae scale=none importance=sequence surrogate=ppo_gspo",
        ("importance=token", "importance=sequence_token", "surrogate=reinforce updates=one", "baseline=greedy"),
    ),
    Case(
        "credit_is_of_tokens",
        "baseline=monte_carlo scale=none surrogate=gmpo",
        ("surrogate=ppo", "surrogate=cispo", "baseline=greedy"),
    ),
    Case(
        "critic_has_no_loss_scale",
        "baseline=gae scale=none learner_precision=fp16",
        ("learner_precision=bf16", "baseline=greedy"),
    ),
    Case(
        "learner_is_not_quantized",
        "learner_precision=fp8_simulated",
        ("learner_precision=bf16", "learner_precision=bf16 sampler_precision=fp8_simulated"),
    ),
    Case(
        "engine_does_not_simulate_fp8",
        "engine=vllm sampler_precision=fp8_simulated",
        ("engine=native", "sampler_precision=bf16"),
    ),
    Case(
        "graphs_do_not_round_inputs",
        "engine.cuda_graphs=true sampler_precision=fp8_simulated",
        ("engine.cuda_graphs=false", "sampler_precision.activations=false"),
    ),
    Case(
        "critic_has_adams_rate",
        "baseline=gae scale=none optimizer=sgd",
        ("optimizer=adamw", "optimizer=muon", "baseline=greedy"),
    ),
    Case("sft_has_adams_rate", "sft=demonstrations optimizer=sgd", ("optimizer=adamw", "optimizer=muon", "sft=none")),
    Case(
        "sft_has_no_loss_scale",
        "sft=demonstrations learner_precision=fp16",
        ("learner_precision=bf16", "learner_precision=fp32", "sft=none"),
    ),
    Case(
        "teacher_needs_a_group", "teacher=sdpo scale=none baseline=none group_size=1", ("group_size=2", "teacher=opsd")
    ),
    Case(
        "teacher_speaks_of_tokens",
        "teacher=on_policy teacher.path=there scale=none importance=sequence surrogate=ppo_gspo",
        ("importance=token", "importance=sequence_token", "surrogate=reinforce updates=one"),
    ),
    Case(
        "token_credit_is_of_tokens",
        "token_credit=gtpo_weight importance=sequence surrogate=ppo_gspo",
        ("importance=token", "importance=sequence_token", "surrogate=reinforce updates=one", "token_credit=none"),
    ),
    Case("token_credit_is_of_tokens", "token_credit=clip_b surrogate=gmpo", ("surrogate=ppo", "token_credit=none")),
    Case(
        "token_credit_is_not_learnt",
        "teacher=on_policy teacher.path=there scale=none token_credit=clip_b",
        ("token_credit=none", "teacher=with_reward"),
    ),
    Case(
        "reward_is_not_learnt",
        "teacher=on_policy teacher.path=there reward_shaping=soft_overlong",
        ("scale=none reward_shaping=none", "teacher=with_reward"),
    ),
    Case(
        "reward_is_not_learnt",
        "teacher=on_policy teacher.path=there scale=none group_filter=drop denominator=survivors",
        ("group_filter=keep denominator=original", "teacher=with_reward"),
    ),
    Case(
        "signs_are_of_responses",
        "aggregation=balanced baseline=gae scale=none",
        ("aggregation=prompt_mean", "baseline=group_mean"),
    ),
    Case(
        "signs_are_of_responses",
        "aggregation=balanced teacher=on_policy teacher.path=there scale=none",
        ("aggregation=prompt_mean",),
    ),
    Case(
        "correctness_counts_twice",
        "reward_shaping=backward_correction scale=gdpo",
        ("scale=none", "reward_shaping=none"),
        beside=frozenset({"correction_is_divided_away"}),
    ),
    Case("scale_is_of_responses", "baseline=gae", ("scale=none", "scale=batch_std_tokens")),
    Case("scale_is_of_responses", "baseline=monte_carlo scale=informative_share", ("scale=none",)),
    Case(
        "race_has_one_finish",
        "group_filter=oversample_abort truncation=interrupt",
        ("truncation=score", "truncation=repetition_stop", "group_filter=resample", "group_filter=active"),
    ),
    Case(
        "continuations_know_the_text_alone",
        "baseline=monte_carlo scale=none truncation=interrupt",
        ("truncation=score", "truncation=mask_after", "truncation=mask_before", "baseline=greedy"),
    ),
    Case(
        "continuations_know_the_text_alone",
        "group_filter=oversample_abort_partial truncation=repetition_stop",
        ("truncation=score", "truncation=mask_after", "truncation=mask_before", "group_filter=oversample_abort"),
    ),
    Case(
        "continuations_are_not_charged",
        "baseline=monte_carlo scale=none kl=k1_reward",
        ("kl=k3_loss_vineppo", "baseline=greedy"),
    ),
    Case(
        "estimates_have_no_group",
        "baseline=greedy scale=none reward_shaping=kimi_length",
        ("reward_shaping=none", "reward_shaping=soft_overlong", "reward_shaping=l1_exact", "baseline=group_mean"),
    ),
    Case(
        "stream_has_no_race",
        "schedule=in_flight group_filter=oversample_abort correction=tis_token",
        ("group_filter=active", "group_filter=resample", "schedule=one_step_off"),
    ),
    Case(
        "estimates_are_of_the_drawing_policy",
        "schedule=one_step_off baseline=greedy scale=none correction=tis_token",
        ("schedule=sync", "baseline=leave_one_out"),
    ),
    Case(
        "engine_does_not_stream",
        "engine=vllm schedule=in_flight correction=tis_token",
        ("engine=native", "engine=vllm_process", "schedule=one_step_off"),
    ),
    Case(
        "real_streams_have_no_simulated_time",
        "engine=vllm_process schedule=in_flight correction=tis_token budget=simulated_seconds",
        ("budget=sampled_tokens", "engine=native"),
    ),
    Case(
        "real_streams_keep_their_weights",
        "engine=vllm_process schedule=in_flight correction=tis_token evaluation.sampler_weights=true",
        ("engine=native", "schedule=one_step_off", "evaluation.sampler_weights=false"),
    ),
    Case(
        "suites_need_their_splits",
        "evaluation.suites=[other_family]",
        ("task.other_families=[differences]", "evaluation.suites=[other_wording]"),
    ),
    Case(
        "reward_reads_the_answers",
        "template=chat verifier=math",
        (
            "template=plain reward=strict verifier=exact_answer",
            "template=chat reward=math verifier=math",
            "template=r1 reward=math verifier=math",
        ),
    ),
    Case(
        "verifier_reads_the_answers",
        "template=boxed reward=math",
        (
            "template=plain reward=strict verifier=exact_answer",
            "template=chat reward=math verifier=math",
            "template=r1 reward=math verifier=math",
        ),
    ),
    Case("stale_and_uncorrected", "schedule=one_step_off", ("correction=tis_token", "old_policy=sampler")),
    Case("clip_cannot_act", "updates=one", ("updates=two", "updates=sixteen")),
    Case(
        "importance_cannot_act",
        "importance=sequence surrogate=ppo_gspo updates=one",
        ("updates=two", "updates=four"),
        beside=frozenset({"clip_cannot_act"}),
    ),
    Case(
        "importance_is_ignored",
        "importance=sequence surrogate=reinforce updates=one",
        ("surrogate=ppo updates=two", "importance=token"),
    ),
    Case(
        "old_policy_is_ignored",
        "old_policy=sampler surrogate=reinforce updates=one sampler_precision=bf16",
        ("surrogate=ppo", "old_policy=recomputed"),
    ),
    Case(
        "sampler_is_the_old_policy",
        "old_policy=sampler",
        (
            "learner_precision=bf16",
            "sampler_precision=bf16",
            "group_filter=oversample_abort_partial",
            "old_policy=recomputed",
        ),
    ),
    Case(
        "survivors_are_everyone",
        "denominator=survivors",
        tuple(
            f"denominator=survivors {more}"
            for more in ("truncation=mask_after", "group_filter=drop", "rejection=token_k2 sampler_precision=bf16")
        ),
    ),
    Case("ratio_is_ignored", "surrogate=reinforce", ("updates=one", "surrogate=cispo")),
    Case(
        "survivors_are_everyone",
        "denominator=survivors group_filter=resample",  # a batch that is filled up has lost nobody
        ("truncation=mask_after", "group_filter=drop"),
    ),
    Case(
        "nothing_to_correct",
        "correction=tis_token",
        ("sampler_precision=bf16", "group_filter=oversample_abort_partial", "correction=none"),
    ),
    Case(
        "nothing_to_reject",
        "rejection=token_k2",
        ("learner_precision=bf16", "group_filter=oversample_abort_partial", "rejection=none"),
    ),
    Case(
        "nothing_to_mask",
        "update_mask=opsm updates=one surrogate=reinforce",
        ("updates=two", "sampler_precision=bf16", "schedule=one_step_off correction=tis_token", "update_mask=none"),
        beside=frozenset(),
    ),
    Case(
        "mask_is_of_tokens",
        "update_mask=vaco importance=sequence surrogate=ppo_gspo",
        ("importance=token", "importance=sequence_token", "surrogate=reinforce updates=one", "update_mask=opsm"),
    ),
    Case(
        "mask_is_of_tokens",
        "update_mask=cppo surrogate=gmpo",
        ("surrogate=ppo", "surrogate=cispo", "update_mask=opsm"),
    ),
    Case("filter_hardly_acts", "group_filter=drop", ("denominator=survivors", "group_filter=resample")),
    Case(
        "filter_drops_gradient",
        "baseline=greedy scale=none group_filter=resample",
        ("group_filter=keep", "baseline=leave_one_out"),
    ),
    Case(
        "reward_is_correctness",
        "group_filter=resample_reward",
        ("reward_shaping=soft_overlong", "group_filter=resample"),
    ),
    Case("share_is_one", "scale=informative_share group_filter=drop", ("group_filter=keep",)),
    Case("share_is_one", "scale=informative_share group_filter=resample", ("group_filter=keep",)),
    Case(
        "baseline_is_recentred",
        "scale=batch_std_tokens baseline=batch_mean",
        ("baseline=group_mean", "baseline=greedy", "baseline=gae", "scale=batch_std"),
    ),
    Case(
        "baseline_is_not_read",
        "scale=gdpo reward=strict_and_format baseline=leave_one_out",
        ("baseline=group_mean", "scale=group_std"),
    ),
    Case(
        "reward_has_one_part",
        "scale=gdpo",
        ("reward=strict_and_format", "reward_shaping=soft_overlong", "kl=k1_reward", "scale=group_std"),
    ),
    Case("correction_is_divided_away", "reward_shaping=backward_correction", ("scale=none", "baseline=none")),
    Case(
        "shift_is_recentred",
        "baseline=asymmetric scale=batch_std_tokens",
        ("scale=none", "scale=group_std", "baseline=group_mean"),
    ),
    Case("return_to_go_without_token_penalty", "baseline=return_to_go scale=none", ("kl=k1_reward", "baseline=none")),
    Case(
        "factor_is_divided_away",
        "scale=batch_std baseline=leave_one_out",
        ("baseline=group_mean", "scale=none"),
    ),
    Case(
        "shaping_is_not_read",
        f"{PASS_AT_K} reward_shaping=soft_overlong",
        ("reward_shaping=none", "baseline=leave_one_out"),
    ),
    Case("kl_is_not_read", f"{PASS_AT_K} kl=k1_reward", ("kl=k3_loss", "baseline=leave_one_out")),
    Case(
        "rows_weigh_by_length",
        "importance=sequence surrogate=ppo_gspo aggregation=token_mean",
        ("aggregation=sequence_mean",),
    ),
    Case("rows_weigh_by_length", "surrogate=gmpo aggregation=constant", ("aggregation=sequence_mean",)),
    Case("rows_weigh_by_length", "recipe=luspo", ("aggregation=sequence_mean",)),
    Case("width_is_for_tokens", "importance=sequence", ("surrogate=ppo_gspo",)),
    Case("width_is_for_tokens", "importance=sequence_token surrogate=dual_clip", ("surrogate=ppo_gspo",)),
    Case("square_is_not_summed", "surrogate=kimi", ("aggregation=sequence_sum", "aggregation=constant")),
    Case(
        "loss_is_scaled",
        "surrogate=cispo surrogate.cap=0.2",
        ("surrogate.cap=1", "convention.cispo_cap=one_plus"),
    ),
    Case("microbatches_matter", "aggregation=token_mean convention=trl_bnpo", ("convention=house",)),
    Case("microbatches_matter", "aggregation=constant convention=verl", ("convention=house",)),
    Case("microbatches_matter", "surrogate=clip_cov convention=verl", ("convention=house",)),
    Case(
        "guesses_need_a_phrase",
        "pass_rate=kimi template.interruption=''",
        ("template.interruption='='", "pass_rate.tries=0 curriculum=kimi"),
    ),
    Case(
        "rank_is_not_read",
        "pass_rate=difficulty",
        ("curriculum=easy_to_hard", "curriculum=kimi", "pass_rate=kimi"),
    ),
    Case(
        "reference_is_not_read",
        "reference=ema",
        ("kl=k3_loss", "kl=k1_reward", "reference=frozen", "teacher=opsd scale=none"),
    ),
    Case(
        "rate_is_for_small_models",
        "model=hf model.path=there optimizer=adamw",
        ("optimizer=adamw_pretrained", "model.lora.rank=8", "optimizer.learning_rate=1e-6"),
    ),
    Case(
        "sft_rate_is_for_small_models",
        "model=hf model.path=there sft=rejection_sampling",
        ("sft.learning_rate=1e-5", "model.lora.rank=8", "sft=none"),
    ),
    Case(
        "critic_rate_is_for_small_models",
        "model=hf model.path=there baseline=gae critic=separate_model scale=none",
        ("critic.learning_rate=5e-6", "critic=value_head", "baseline=group_mean"),
    ),
    Case(
        "length_penalty_is_out_of_proportion",
        "reward_shaping=soft_overlong engine.max_tokens=400",
        ("reward_shaping.cache_tokens=80", "reward_shaping=none"),
    ),
    Case(
        "length_penalty_is_out_of_proportion",
        "reward_shaping=l1_exact engine.max_tokens=400",
        ("reward_shaping.alpha=0.003",),
    ),
    Case("top_p_biases_the_ratio", "engine.top_p=0.9", ("engine.top_p=1",)),
)


def mended(case: Case, remedy: str = "") -> RunConfig:
    """The case with the overrides of the remedy in their places; composed only where live objects cannot tell."""
    chosen = dict(entry.split("=", 1) for entry in f"{case.overrides} {remedy}".split())
    if all(key in AXES or (value.isdigit() and "." not in key) for key, value in chosen.items()):
        # a file of one's own can give the learner a precision that is only a sampler's
        options = samples() | {"learner_precision": samples()["sampler_precision"] | samples()["learner_precision"]}
        return replace(run_of(), **{key: options[key][v] if key in AXES else int(v) for key, v in chosen.items()})
    return run_of(*(f"{key}={value}" for key, value in chosen.items()))


@pytest.mark.few(10)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}:{case.overrides}")
def test_each_rule_breaks_alone_and_says_axes_reason_and_remedy(case: Case) -> None:
    run, rule = mended(case), RULES[case.rule]
    assert broken(run) == {case.rule} | case.beside
    if rule in ERRORS:
        with pytest.raises(IncompatibleRun) as refusal:
            check_compatible(run)
        said = str(refusal.value)
    else:
        said = next(line for line in check_compatible(run) if rule.reason in line)
    assert all(f"{axis}=" in said for axis in rule.axes)
    assert rule.reason in said and f"Remedy: {rule.remedy}." in said


@pytest.mark.few(29)
@pytest.mark.parametrize(
    "case,remedy",
    [(case, remedy) for case in CASES for remedy in case.remedies],
    ids=lambda part: part if isinstance(part, str) else part.overrides,
)
def test_following_a_remedy_clears_its_rule(case: Case, remedy: str) -> None:
    run = mended(case, remedy)
    assert case.rule not in broken(run)
    check_compatible(run)


def test_every_rule_has_a_case_and_every_override_its_remedy_names_is_followed() -> None:
    """A rule added without a case above fails here."""
    assert {case.rule for case in CASES} == set(RULES) and len(RULES) == len(ERRORS) + len(WARNINGS)
    assert all(set(rule.axes) <= {field.name for field in fields(RunConfig)} for rule in RULES.values())
    for name, rule in RULES.items():
        named = set(re.findall(r"[a-z_.]+=[a-z0-9_]+", rule.remedy))
        followed = {part for case in CASES if case.rule == name for way in case.remedies for part in way.split()}
        assert named <= followed, name


def test_the_plain_run_breaks_no_rule() -> None:
    assert broken(run_of()) == set()


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(IncompatibleRun) as refusal:
        check_compatible(run_of("group_size=1", "group_filter=drop", "problems_per_step=6"))
    assert str(refusal.value).count("Remedy:") == 4


# --- every rule over the full product of the facts it reads -------------------------------------------------

# Options that numbers and conventions make, beside those that have a file.
VARIANTS: dict[str, dict[str, Any]] = {
    "baseline": {
        "group_mean raw": GroupMean(Singleton.raw),
        "leave_one_out raw": LeaveOneOut(Singleton.raw),
        "pass_at_2": PassAtK(2),
    },
    "scale": {"group_std raw": GroupStd(1, 1e-6, False, Singleton.raw)},
    "aggregation": {
        "token_mean per microbatch": TokenMean(Scope.microbatch),
        "constant of padding": Constant(6, Width.padded),
    },
    "group_filter": {"drop by reward": Drop(Signal.reward)},
}


@cache
def objects() -> dict[str, dict[str, Any]]:
    """Options and variants, with numbers under which each acts on a scene of responses of up to 6 tokens."""
    found = {axis: dict(options) | VARIANTS.get(axis, {}) for axis, options in samples().items()}
    numbers = {
        "surrogate": {
            "clip_cov": {"share": 0.3, "cov_low": 0.01, "cov_high": 9.0},
            "kl_cov": {"share": 0.3},
        },
        "token_credit": {"clip_b": {"mu": 0.9}},  # the tied groups decide whether a token is beyond it
        "rejection": {
            "sequence_mean_k1": {"low": 0.75, "high": 1.3},
            "sequence_mean_k2": {"bound": 0.04},
            "sequence_mean_k3": {"bound": 0.04},
            "sequence_outlier": {"low": 0.6, "high": 1.6},
            "sequence_mean_tv": {"bound": 0.1},
            "sequence_mean_binary_kl": {"bound": 0.04},
            "sequence_mean_binary_kl_flash": {"bound": 0.05},
            "token_kpop": {"bound": 0.04},
        },
        "update_mask": {
            "opsm": {"delta": 0.02},
            "cppo": {"delta": 0.1},
        },
        "reward_shaping": {
            "soft_overlong": {"max_tokens": 6, "cache_tokens": 4},
            "soft_overlong_magistral": {"max_tokens": 6, "cache_tokens": 4},
            "soft_overlong_correct_only": {"max_tokens": 6, "cache_tokens": 4},
        },
    }
    for axis, options in numbers.items():
        for name, values in options.items():
            found[axis][name] = replace(found[axis][name], **values)
    found["surrogate"]["clip_cov per microbatch"] = replace(found["surrogate"]["clip_cov"], scope=Scope.microbatch)
    return found


TWINS = (
    NoTwin(),
    RandomTwin([]),
    RandomTwin([Selects.surrogate, Selects.correction]),
    RandomTwin([Selects.update_mask, Selects.group_filter]),
)


@cache
def values_of(fact: str) -> list[Any]:
    """What a fact can be: over all options and variants, both for a yes or no, a few for a number of the run."""
    slot, _, name = fact.partition(".")
    given = {
        "group_size": [1, 2, 3, 4, 8],
        "problems_per_step": [6, 16],
        "teacher.needs_model": [False, True],
        "pass_rate.drops": [False, True],
        "pass_rate.guesses": [False, True],
        "pass_rate.ranks": [False, True],
        "template.interruption": ["", "#"],
        "teacher.replaces_reward": [False, True],
        "teacher.group_relative": [False, True],
        "teacher.reads_reference": [False, True],
        "engine.top_p": [0.9, 1.0],
        "twin.of_axis": [twin.of_axis for twin in TWINS],
        "twin.can_draw": [twin.can_draw for twin in TWINS],
        "question_filter.is_no_op": [False, True],
        "pass_rate.is_no_op": [False, True],
        "engine.simulates_fp8": [False, True],
        "engine.cuda_graphs": [False, True],
        "optimizer.scale_invariant": [False, True],
        "optimizer.learning_rate": [1e-6, 1e-4],
        "model.highest_rate": [5e-5, math.inf],
        "engine.streams": [False, True],
        "engine.overlaps": [False, True],
        "budget.is_simulated": [False, True],
        "reward.bounds": [
            {True: (right, right), False: (wrong, wrong)}.__getitem__ for right in (0.25, 1.0) for wrong in (0.0, -1.0)
        ],
        "reward.has_parts": [False, True],
        "critic.minibatches": [1, 4, 8],
        "critic.owns_trunk": [False, True],
        "critic.learning_rate": [5e-6, 5e-4],
        "evaluation.sampler_weights": [False, True],
        "evaluation.splits": [frozenset(), frozenset({"heldout_rule"})],
        "task.splits": [("heldout",), ("heldout", "heldout_rule")],
        "template.answer_form": list(AnswerForm),
        "reward.reads": [frozenset(AnswerForm), frozenset({AnswerForm.box}), frozenset({AnswerForm.number})],
        "verifier.reads": [frozenset(AnswerForm), frozenset({AnswerForm.box, AnswerForm.tag})],
    }
    if fact in given:
        return given[fact]
    if fact == "surrogate.weight_at_ratio_one":
        return [1.0, 0.2]
    seen: list[Any] = []
    for option in objects()[slot].values():
        value = getattr(option, name)
        if value not in seen:
            seen.append(value)
    return [False, True] if all(isinstance(value, bool) for value in seen) else seen


class Slot:
    """One slot of a stand-in: hands every fact on."""

    def __init__(self, name: str, fact: Callable[[str], Any]) -> None:
        self.name, self.fact = name, fact

    def __getattr__(self, name: str) -> Any:
        return self.fact(f"{self.name}.{name}")


class StandIn(RunConfig):
    """A run that is nothing but facts, and remembers which of them were asked for."""

    def __init__(self, facts: dict[str, Any]) -> None:
        vars(self).update(facts=facts, asked=set())

    def __getattr__(self, slot: str) -> Any:
        return Slot(slot, self.fact) if slot in SLOTS else self.fact(slot)

    def fact(self, name: str) -> Any:
        """The value of a fact, the first it can have where none was given."""
        self.asked.add(name)
        return self.facts[name] if name in self.facts else values_of(name)[0]


@cache
def over_all_facts(name: str) -> list[tuple[dict[str, Any], bool]]:
    """Every combination of the facts that the rule of this name ever reads, with its verdict."""
    rule = RULES[name]
    known: list[str] = []
    while True:
        asked: set[str] = set()
        verdicts = []
        for values in itertools.product(*(values_of(fact) for fact in known)):
            facts = dict(zip(known, values))
            stand_in = StandIn(facts)
            verdicts.append((facts, bool(rule.broken_when(stand_in))))
            asked |= stand_in.asked
        if asked <= set(known):
            return verdicts
        known = sorted(asked | set(known))


Facts = dict[str, Any]


def _sampler_differs(f: Facts) -> bool:
    weights = f["group_filter.carries_over"] or not f["schedule.keeps_sampler_current"]
    return weights or f["learner_precision.rounds"] or f["sampler_precision.rounds"]


def _every_ratio_is_one(f: Facts) -> bool:
    if f["updates.number"] > 1:
        return False
    return f["old_policy.recomputes"] or not _sampler_differs(f)


def _can_be_negative(f: Facts) -> bool:
    lowest = f["reward_shaping.lowest"](*(f["reward.bounds"](right)[0] for right in (True, False)))
    return lowest < 0 or f["kl.shapes_reward"]


def _filtered_group_is_noticed(f: Facts) -> bool:
    return any(
        (
            not f["baseline.group_relative"],  # it would have had an advantage
            f["teacher.needs_model"],  # which has a word on every token
            f["scale.reads_batch"],
            f["scale.moves_zeros"],
            f["token_credit.reads_batch"],
            f["denominator.survivors_only"],
            not f["reward_shaping.is_no_op"],
            f["kl.needs_reference"],
            f["entropy.needs_gradient"],
            f["surrogate.pulls_without_advantage"],
            f["surrogate.mark_scope"] is not None,
            f["baseline.handles_singletons"],
            not f["aggregation.invariant"],  # a group that leaves changes how the step is cut
        )
    )


def _selecting(f: Facts) -> set[Selects]:
    acts = {axis for axis in Selects if not f.get(f"{axis.value}.is_no_op", True)}
    acts |= {Selects.truncation} if f["truncation.removes_rows"] else set()
    acts |= {Selects.group_filter} if f["group_filter.removes_rows"] else set()
    acts |= {Selects.entropy} if f["entropy.selects_tokens"] else set()
    return acts - {Selects.surrogate} if f["surrogate.pulls_without_advantage"] else acts


def _twin_of_the_surrogate(f: Facts) -> bool:
    selects = not (f["surrogate.is_no_op"] or f["surrogate.pulls_without_advantage"])
    return selects and f["twin.of_axis"](Selects.surrogate)


TRUTH: dict[str, Callable[[Facts], bool]] = {
    "twin_selects_nothing": lambda f: not f["twin.can_draw"](_selecting(f)),
    "twin_of_a_race": lambda f: (
        f["twin.of_axis"](Selects.group_filter)
        and all((f["group_filter.removes_rows"], f["group_filter.refills"]))
        and any((f["group_filter.races"], f["schedule.streams"]))
    ),
    "twin_of_a_penalty": lambda f: f["surrogate.pulls_without_advantage"] and f["twin.of_axis"](Selects.surrogate),
    "twin_of_mixed_rows": lambda f: (
        any((f["baseline.per_token"], f["teacher.needs_model"]))
        and any(
            (
                _twin_of_the_surrogate(f) and not f["importance.per_token"],
                f["twin.of_axis"](Selects.update_mask)
                and not (f["update_mask.is_no_op"] or f["update_mask.divides_rows"]),
            )
        )
    ),
    "twin_of_a_correction_in_the_updates": lambda f: (
        f["old_policy.interpolates"] and not f["correction.is_no_op"] and f["twin.of_axis"](Selects.correction)
    ),
    "learner_is_not_quantized": lambda f: f["learner_precision.quantizes"],
    "engine_does_not_simulate_fp8": lambda f: not f["engine.simulates_fp8"] and f["sampler_precision.quantizes"],
    "graphs_do_not_round_inputs": lambda f: f["engine.cuda_graphs"] and f["sampler_precision.quantizes_inputs"],
    "critic_has_adams_rate": lambda f: f["baseline.needs_critic"] and not f["optimizer.scale_invariant"],
    "sft_has_adams_rate": lambda f: not (f["sft.is_no_op"] or f["optimizer.scale_invariant"]),
    "baseline_needs_a_group": lambda f: f["baseline.smallest_group"] > f["group_size"],
    "scale_needs_a_group": lambda f: f["group_size"] == 1 and f["scale.group_relative"],
    "filter_needs_a_group": lambda f: f["group_size"] == 1 and f["group_filter.removes_rows"],
    "shaping_needs_a_group": lambda f: f["group_size"] == 1 and f["reward_shaping.group_relative"],
    "teacher_needs_a_group": lambda f: f["teacher.group_relative"] and f["group_size"] == 1,
    "updates_divide_the_problems": lambda f: f["problems_per_step"] % f["updates.minibatches"] > 0,
    "critic_divides_the_problems": lambda f: (
        f["baseline.needs_critic"] and f["problems_per_step"] % f["critic.minibatches"] > 0
    ),
    "critic_has_no_loss_scale": lambda f: f["learner_precision.scales_loss"] and f["baseline.needs_critic"],
    "sft_has_no_loss_scale": lambda f: f["learner_precision.scales_loss"] and not f["sft.is_no_op"],
    "credit_is_of_tokens": lambda f: (
        f["baseline.per_token"]
        and f["surrogate.uses_ratio"]
        and any((f["importance.sequence_level"], f["surrogate.sequence_level"]))
    ),
    "teacher_speaks_of_tokens": lambda f: (
        f["surrogate.uses_ratio"]
        and f["teacher.needs_model"]
        and any((f["importance.sequence_level"], f["surrogate.sequence_level"]))
    ),
    "token_credit_is_of_tokens": lambda f: (
        f["surrogate.uses_ratio"]
        and not f["token_credit.is_no_op"]
        and any((f["importance.sequence_level"], f["surrogate.sequence_level"]))
    ),
    "token_credit_is_not_learnt": lambda f: f["teacher.replaces_reward"] and not f["token_credit.is_no_op"],
    "reward_is_not_learnt": lambda f: (
        f["teacher.replaces_reward"]
        and any(
            (
                not f["scale.is_no_op"],
                not f["reward_shaping.is_no_op"],
                f["group_filter.removes_rows"],
            )
        )
    ),
    "guesses_need_a_phrase": lambda f: f["template.interruption"] == "" and f["pass_rate.guesses"],
    "rank_is_not_read": lambda f: (
        f["pass_rate.ranks"] and not f["curriculum.reads_difficulty"] and not f["pass_rate.drops"]
    ),
    "signs_are_of_responses": lambda f: (
        f["aggregation.reads_signs"] and any((f["baseline.per_token"], f["teacher.needs_model"]))
    ),
    "correctness_counts_twice": lambda f: f["scale.reads_components"] and f["reward_shaping.maps_correctness"],
    "baseline_is_not_read": lambda f: (
        f["scale.reads_components"] and not any((f["baseline.is_group_mean"], f["baseline.per_token"]))
    ),
    "reward_has_one_part": lambda f: (
        f["scale.reads_components"]
        and f["reward_shaping.is_no_op"]
        and not any((f["reward.has_parts"], f["kl.shapes_reward"]))
    ),
    "correction_is_divided_away": lambda f: (
        f["scale.divides_by_deviation"] and f["baseline.centres"] and f["reward_shaping.maps_correctness"]
    ),
    "scale_is_of_responses": lambda f: not f["scale.scales_tokens"] and f["baseline.per_token"],
    "race_has_one_finish": lambda f: f["truncation.generates_twice"] and f["group_filter.races"],
    "continuations_know_the_text_alone": lambda f: (
        f["truncation.intervenes"] and any((f["baseline.continues"], f["group_filter.carries_over"]))
    ),
    "continuations_are_not_charged": lambda f: f["kl.shapes_reward"] and f["baseline.continues"],
    "estimates_have_no_group": lambda f: f["reward_shaping.group_relative"] and f["baseline.generates"],
    "stream_has_no_race": lambda f: f["group_filter.races"] and f["schedule.streams"],
    "estimates_are_of_the_drawing_policy": lambda f: (
        f["baseline.generates"] and not f["schedule.keeps_sampler_current"]
    ),
    "engine_does_not_stream": lambda f: not f["engine.streams"] and f["schedule.streams"],
    "real_streams_have_no_simulated_time": lambda f: (
        f["engine.overlaps"] and f["schedule.streams"] and f["budget.is_simulated"]
    ),
    "real_streams_keep_their_weights": lambda f: (
        f["engine.overlaps"] and f["schedule.streams"] and f["evaluation.sampler_weights"]
    ),
    "reward_reads_the_answers": lambda f: f["template.answer_form"] not in {*f["reward.reads"], AnswerForm.free},
    "verifier_reads_the_answers": lambda f: f["template.answer_form"] not in {*f["verifier.reads"], AnswerForm.free},
    "suites_need_their_splits": lambda f: any(split not in f["task.splits"] for split in f["evaluation.splits"]),
    "stale_and_uncorrected": lambda f: (
        (f["old_policy.recomputes"] or f["old_policy.interpolates"])
        and not f["schedule.keeps_sampler_current"]
        and f["correction.is_no_op"]
        and f["rejection.is_no_op"]
    ),
    "mismatch_counts_twice": lambda f: (
        not any((f["old_policy.recomputes"], f["old_policy.interpolates"]))
        and f["correction.needs_old_logprobs"]
        and f["surrogate.uses_ratio"]
    ),
    "old_policy_exists_in_updates": lambda f: (
        f["old_policy.interpolates"] and any((f["kl.shapes_reward"], f["teacher.needs_model"]))
    ),
    "interpolation_ends_at_the_sampler": lambda f: (
        f["old_policy.interpolates"] and f["schedule.ahead"] < 2 and not f["group_filter.carries_over"]
    ),
    "advantage_is_scaled_twice": lambda f: f["baseline.scales_itself"] and not f["scale.is_no_op"],
    "rewards_must_not_be_negative": lambda f: f["scale.needs_rewards_from_zero"] and _can_be_negative(f),
    "no_reward_is_negative": lambda f: f["scale.splits_signs"] and not (f["baseline.centres"] or _can_be_negative(f)),
    "ratio_must_be_of_tokens": lambda f: f["surrogate.needs_token_ratio"] and not f["importance.per_token"],
    "clip_cannot_act": lambda f: (
        f["surrogate.needs_drift"]
        and _every_ratio_is_one(f)
        and f["surrogate.weight_at_ratio_one"] == 1
        and (f["correction.is_no_op"] or not f["surrogate.sequence_level"])
    ),
    "importance_cannot_act": lambda f: (
        f["surrogate.uses_ratio"]
        and not f["importance.is_no_op"]
        and _every_ratio_is_one(f)
        # a response's ratio hands a token's weight, or its mark, to the whole row
        and f["correction.is_no_op"]
        and f["surrogate.mark_scope"] is None
    ),
    "importance_is_ignored": lambda f: not (f["importance.is_no_op"] or f["surrogate.uses_ratio"]),
    "old_policy_is_ignored": lambda f: (
        not f["old_policy.recomputes"]
        and not f["surrogate.uses_ratio"]
        and not f["kl.reads_old"]
        and not f["teacher.needs_model"]
    ),
    "sampler_is_the_old_policy": lambda f: not (f["old_policy.recomputes"] or _sampler_differs(f)),
    "survivors_are_everyone": lambda f: (
        f["denominator.survivors_only"]
        and not f["truncation.removes_rows"]
        and (f["group_filter.refills"] or not f["group_filter.removes_rows"])
        and not f["rejection.removes_rows"]
        and not f["entropy.selects_tokens"]
    ),
    "ratio_is_ignored": lambda f: f["updates.number"] > 1 and not f["surrogate.uses_ratio"],
    "nothing_to_correct": lambda f: f["correction.needs_old_logprobs"] and not _sampler_differs(f),
    "nothing_to_reject": lambda f: f["rejection.needs_old_logprobs"] and not _sampler_differs(f),
    "nothing_to_mask": lambda f: not f["update_mask.is_no_op"] and f["updates.number"] <= 1 and not _sampler_differs(f),
    "mask_is_of_tokens": lambda f: (
        f["surrogate.uses_ratio"]
        and f["update_mask.divides_rows"]
        and any((f["importance.sequence_level"], f["surrogate.sequence_level"]))
    ),
    "filter_hardly_acts": lambda f: (
        f["group_filter.removes_rows"] and not f["group_filter.refills"] and not _filtered_group_is_noticed(f)
    ),
    "filter_drops_gradient": lambda f: (
        not (f["baseline.group_relative"] or f["scale.zeroes_tied"]) and f["group_filter.removes_rows"]
    ),
    "reward_is_correctness": lambda f: f["reward_shaping.is_no_op"] and f["group_filter.reads_reward"],
    "share_is_one": lambda f: f["group_filter.removes_rows"] and f["scale.pays_for_signal"] and f["rejection.is_no_op"],
    "shift_is_recentred": lambda f: f["scale.recentres"] and f["baseline.shifts"],
    "baseline_is_recentred": lambda f: f["baseline.constant_over_batch"] and f["scale.recentres"],
    "return_to_go_without_token_penalty": lambda f: f["baseline.reward_to_go"] and not f["kl.shapes_reward"],
    "factor_is_divided_away": lambda f: f["baseline.scales_group_mean"] and f["scale.divides_by_centred"],
    "shaping_is_not_read": lambda f: (
        not f["reward_shaping.is_no_op"] and f["baseline.reads_correctness"] and not f["group_filter.reads_reward"]
    ),
    "kl_is_not_read": lambda f: f["kl.shapes_reward"] and f["baseline.reads_correctness"],
    "rows_weigh_by_length": lambda f: (
        f["surrogate.uses_ratio"]
        and not f["aggregation.rows_weigh_alike"]
        and any((f["importance.averages"], f["surrogate.sequence_level"]))
    ),
    "width_is_for_tokens": lambda f: f["importance.averages"] and (f["surrogate.clip_width"] or 0) > 0.05,
    "square_is_not_summed": lambda f: f["surrogate.squares_rows"] and not f["aggregation.sums_rows"],
    "loss_is_scaled": lambda f: f["surrogate.weight_at_ratio_one"] < 1,
    "microbatches_matter": lambda f: (
        not f["aggregation.invariant"] or f["surrogate.mark_scope"] not in (None, Scope.step)
    ),
    "reference_is_not_read": lambda f: (
        f["reference.changes"] and not f["kl.needs_reference"] and not f["teacher.reads_reference"]
    ),
    "top_p_biases_the_ratio": lambda f: f["engine.top_p"] != 1,
    "rate_is_for_small_models": lambda f: (
        f["optimizer.learning_rate"] > f["model.highest_rate"] and f["optimizer.scale_invariant"]
    ),
    "sft_rate_is_for_small_models": lambda f: f["sft.rate"] > f["model.highest_rate"],
    "critic_rate_is_for_small_models": lambda f: (
        all((f["baseline.needs_critic"], f["critic.owns_trunk"]))
        and f["critic.learning_rate"] > f["model.highest_rate"]
    ),
    "length_penalty_is_out_of_proportion": lambda f: f["reward_shaping.out_of_proportion"],
}


@pytest.mark.parametrize("name", list(RULES))
def test_a_rule_is_what_its_words_say_over_the_full_product_of_its_facts(name: str) -> None:
    """Against the rules written out once more; a fact the rule reads and the words do not is a KeyError or a gap.

    Every fact decides somewhere, and belongs to an axis that the rule names.
    """
    verdicts = over_all_facts(name)
    assert {verdict for _, verdict in verdicts} == {False, True}, "a rule that always or never breaks"
    wrong = [facts for facts, verdict in verdicts if verdict is not bool(TRUTH[name](facts))]
    assert wrong == []
    named = set(RULES[name].axes)
    if "old_policy" in named:  # whether the sampler's log-probs are the learner's
        named |= {"schedule", "group_filter", "learner_precision", "sampler_precision"}
    for fact in verdicts[0][0]:
        assert decides(fact, verdicts), f"{fact} decides nothing"
        assert fact.partition(".")[0] in named, fact


def decides(fact: str, verdicts: list[tuple[Facts, bool]]) -> bool:
    """Whether two combinations that differ in this fact only get different verdicts."""
    seen: dict[tuple[Any, ...], bool] = {}
    others = [name for name in verdicts[0][0] if name != fact]
    keys = ((tuple(facts[name] for name in others), verdict) for facts, verdict in verdicts)
    return any(seen.setdefault(key, verdict) is not verdict for key, verdict in keys)


# --- facts --------------------------------------------------------------------------------------------------

PACKAGE = Path(__file__).parents[2] / "grpo_lab"


def declared_facts(base: type) -> set[str]:
    """What the base of an axis declares for others to read: its ClassVars but for words, and its properties."""
    kinds = {name: str(kind) for name, kind in vars(base).get("__annotations__", {}).items()}
    annotated = {name for name, kind in kinds.items() if "ClassVar" in kind and "[str]" not in kind}
    return annotated | {name for name, value in vars(base).items() if isinstance(value, property)}


@cache
def reads() -> dict[str, set[tuple[str, str]]]:
    """Module -> the (slot, fact) pairs read in it as `run.slot.fact` or `slot.fact`."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        pairs = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute | ast.Name):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else node.value.id
                pairs.add((owner, node.attr))
        found[path.relative_to(PACKAGE).as_posix()] = pairs
    return found


def test_every_fact_an_axis_declares_is_read_outside_its_module() -> None:
    declared = 0
    for axis in AXES:
        base = SLOTS[axis]
        home = base.__module__.removeprefix("grpo_lab.").replace(".", "/") + ".py"
        for fact in declared_facts(base):
            sharing = {other for other in AXES if SLOTS[other] is base}  # both precisions have the same facts
            names = sharing | {home.removeprefix("tricks/").removesuffix(".py")}
            readers = [module for module, pairs in reads().items() for name in names if (name, fact) in pairs]
            assert [module for module in readers if module != home], f"no one reads {axis}.{fact}"
            declared += 1
    assert declared > 30


# --- every pair ---------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_every_pair_of_options_runs_or_is_refused_with_its_axes_reason_and_remedy() -> None:
    """A pair is judged on live objects, where the rules read their facts; that it composes is the next test."""
    base, refused = run_of(), set()
    alone = {
        (axis, name): {rule.name for rule in broken_rules(replace(base, **{axis: option})).errors}
        for axis, options in samples().items()
        for name, option in options.items()
    }
    for (axis_a, firsts), (axis_b, seconds) in itertools.combinations(samples().items(), 2):
        for (name_a, a), (name_b, b) in itertools.product(firsts.items(), seconds.items()):
            run = replace(base, **{axis_a: a, axis_b: b})
            rules = broken_rules(run).errors
            try:
                assert all("Remedy:" in line for line in check_compatible(run))
                assert not rules
            except IncompatibleRun as refusal:
                lines = str(refusal).splitlines()[1:]
                assert len(lines) == len(rules) > 0
                for rule, line in zip(rules, lines):
                    blamed = alone[axis_a, name_a] | alone[axis_b, name_b]
                    if rule.name in blamed:  # one of the two with what stands elsewhere, or with a number of the run
                        assert {axis_a, axis_b} & set(rule.axes) and len(rule.axes) > 1
                    else:
                        assert {axis_a, axis_b} <= set(rule.axes), (rule.name, name_a, name_b)
                        refused.add((axis_a, axis_b))
                    assert all(f"{axis}=" in line for axis in rule.axes)
                    assert rule.reason in line and "Remedy:" in line
    assert refused >= {
        ("baseline", "scale"),
        ("old_policy", "correction"),
        ("importance", "surrogate"),
        ("reward_shaping", "scale"),
        ("scale", "kl"),
        ("truncation", "baseline"),
        ("truncation", "group_filter"),
        ("baseline", "kl"),
        ("baseline", "importance"),
        ("baseline", "surrogate"),
        ("reward_shaping", "baseline"),
        ("baseline", "learner_precision"),
        ("schedule", "group_filter"),
        ("schedule", "baseline"),
    }


def rows_that_cover_every_pair(choices: dict[str, list[str]]) -> list[dict[str, str]]:
    """One option per axis in each row, few rows, in which every pair of options of two axes occurs.

    Greedy: a row starts from the option that misses most partners and takes, axis by axis, the one that meets most
    of what is missing.
    """
    places = [(axis, option) for axis, options in choices.items() for option in options]
    of_axis = {axis: [i for i, (name, _) in enumerate(places) if name == axis] for axis in choices}
    missing = np.array([[a[0] != b[0] for b in places] for a in places])
    widest_first = sorted(choices, key=lambda axis: -len(choices[axis]))
    rows: list[dict[str, str]] = []
    while missing.any():
        first = int(missing.sum(axis=1).argmax())
        row = [first, int((missing[first] * missing.sum(axis=1)).argmax())]
        for axis in widest_first:
            if axis not in {places[i][0] for i in row}:
                own = of_axis[axis]
                row.append(own[int(missing[np.ix_(own, row)].sum(axis=1).argmax())])
        missing[np.ix_(row, row)] = False
        rows.append(dict(places[i] for i in row))
    return rows


@cache
def covering_rows() -> list[dict[str, str]]:
    return rows_that_cover_every_pair(CHOICES)


def test_the_rows_that_are_composed_hold_every_pair_of_options_of_different_axes() -> None:
    wanted = {
        frozenset(pair)
        for first, second in itertools.combinations(CHOICES, 2)
        for pair in itertools.product([(first, a) for a in CHOICES[first]], [(second, b) for b in CHOICES[second]])
    }
    assert wanted == {frozenset(pair) for row in covering_rows() for pair in itertools.combinations(row.items(), 2)}


PARTS = 16  # of the rows, of which each change composes one


@pytest.mark.extended
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.extended) for part in range(1, PARTS))])
def test_every_pair_of_options_of_different_axes_composes(part: int) -> None:
    rows, expected = covering_rows()[part::PARTS], samples()  # both compose by themselves, before Hydra is held open
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        for row in rows:
            run = to_run(compose("config", [f"{axis}={option}" for axis, option in row.items()]))
            for axis, option in row.items():
                assert getattr(run, axis) == expected[axis][option], (axis, option, row)


# --- what is said to be idle is, and what is not acts -------------------------------------------------------

LOSS_AXES = (
    "truncation", "reward_shaping", "group_filter", "old_policy", "correction", "rejection", "baseline", "scale",
    "token_credit", "importance", "surrogate", "update_mask", "aggregation", "denominator", "kl", "entropy",
)  # fmt: skip
MICROBATCH = 40  # tokens; a scene is cut in three
IDLE = 1e-6  # SAPO's factor is in single precision


@cache
def scene_of(updates: str, sampler_precision: str) -> Scene:
    """Four groups, two of them tied; the learner has moved unless `one`, the sampler differs if it rounds."""
    scene = random_scene(3, 4, 4, 6)
    outcome = torch.tensor([[1, 0, 0, 1], [0, 0, 0, 0], [1, 1, 1, 1], [0, 0, 1, 0]], dtype=F64)
    truncated = torch.tensor([[0, 1, 0, 0], [0, 0, 1, 0], [0, 1, 1, 1], [0, 1, 0, 1]], dtype=torch.bool)
    graded = replace(scene.graded, correctness=outcome, reward=outcome.clone(), truncated=truncated)
    old = scene.logprobs if updates == "one" else scene.old_logprobs
    sampler = old if sampler_precision == "fp32" else scene.rollouts.sampler_logprobs
    return replace(scene, graded=graded, old_logprobs=old, rollouts=replace(scene.rollouts, sampler_logprobs=sampler))


@dataclass(frozen=True)
class Setting:
    """A run as the rules see it and, on a small scene of the same kind, as its gradient shows it."""

    updates: str = "four"
    sampler_precision: str = "bf16"
    others: tuple[tuple[str, str], ...] = ()

    def options(self, **changed: Any) -> dict[str, Any]:
        base = run_of()
        chosen = {axis: objects()[axis][name] for axis, name in self.others}
        return {axis: getattr(base, axis) for axis in LOSS_AXES} | chosen | changed

    def run(self, **changed: Any) -> RunConfig:
        system = {axis: samples()[axis][getattr(self, axis)] for axis in ("updates", "sampler_precision")}
        return replace(run_of(), **system, **self.options(**changed))

    def gradient(self, **changed: Any) -> torch.Tensor:
        scene = scene_of(self.updates, self.sampler_precision)
        return run_scene(scene, MICROBATCH, **self.options(**changed))[1]


def off_option(axis: str) -> Any:
    """The option of an axis that does nothing, or the plain one."""
    options = samples()[axis].values()
    return next((o for o in options if getattr(o, "is_no_op", False)), getattr(run_of(), axis))


WITH_PASS_AT_2 = (("baseline", "pass_at_2"), ("scale", "none"))
IDLE_SETTINGS = {
    "clip_cannot_act": Setting(updates="one"),
    "importance_cannot_act": Setting(updates="one"),
    "importance_is_ignored": Setting(others=(("surrogate", "reinforce"),)),
    "old_policy_is_ignored": Setting(others=(("surrogate", "reinforce"),)),
    "sampler_is_the_old_policy": Setting(sampler_precision="fp32"),
    "survivors_are_everyone": Setting(),
    "nothing_to_correct": Setting(sampler_precision="fp32"),
    "nothing_to_reject": Setting(sampler_precision="fp32"),
    "nothing_to_mask": Setting(updates="one", sampler_precision="fp32"),
    "filter_hardly_acts": Setting(),
    "share_is_one": Setting(others=(("group_filter", "drop"),)),
    "baseline_is_recentred": Setting(others=(("scale", "batch_std_tokens"),)),
    "baseline_is_not_read": Setting(others=(("scale", "gdpo"),)),
    "return_to_go_without_token_penalty": Setting(others=(("scale", "none"),)),
    "shaping_is_not_read": Setting(others=WITH_PASS_AT_2),
    "kl_is_not_read": Setting(others=WITH_PASS_AT_2),
}


def test_every_rule_that_says_idle_is_tried_against_gradients() -> None:
    idle = {rule.name for rule in WARNINGS if rule.no_op} | {"filter_hardly_acts"}
    # what a run's reference becomes takes a run to see: tests/tricks/test_options_differ.py; which problems come
    # next is no part of the loss: tests/run/test_training_problems.py; a teacher: tests/tricks/test_token_credit.py
    assert set(IDLE_SETTINGS) == idle - {"reference_is_not_read", "rank_is_not_read", "token_credit_is_not_learnt"}


@pytest.mark.parametrize("name", IDLE_SETTINGS)
def test_what_is_said_to_be_a_no_op_moves_no_gradient(name: str) -> None:
    """Each such option of the rule's first axis, against the one that does nothing."""
    setting, axis = IDLE_SETTINGS[name], RULES[name].axes[0]
    options = [option for option in objects()[axis].values() if option != off_option(axis)]
    runs = [(option, setting.run(**{axis: option})) for option in options]
    no_ops = [option for option, run in runs if not broken_rules(run).errors and name in broken(run)]
    assert no_ops
    expected = setting.gradient(**{axis: off_option(axis)})
    for option in no_ops:
        assert (setting.gradient(**{axis: option}) - expected).abs().max() <= IDLE, option


MANY = 4  # idle options, each of which is tried beside a quarter of the others
WITH_MANY = [name for name in IDLE_SETTINGS if len(CHOICES[RULES[name].axes[0]]) > MANY]


@pytest.mark.extended  # without other options: the test above
@pytest.mark.parametrize(
    "name,every",
    [(name, False) for name in IDLE_SETTINGS]
    + [pytest.param(name, True, marks=pytest.mark.extended) for name in WITH_MANY],
)
def test_what_is_said_to_be_idle_moves_no_gradient_whatever_one_other_axis_holds(name: str, every: bool) -> None:
    """The idle option against the one that does nothing, beside every option of every other axis of the loss.

    Of many idle options each is tried beside another quarter of the others, or beside all where `every` says so.
    """
    setting, idle_axis = IDLE_SETTINGS[name], RULES[name].axes[0]
    off, judged, wrong = off_option(idle_axis), 0, []
    idle_options = [item for item in objects()[idle_axis].items() if item[1] != off]
    stride = 1 if every or name not in WITH_MANY else MANY
    others = [(axis, other) for axis in LOSS_AXES if axis != idle_axis for other in objects()[axis]]
    with shapes_unchecked():  # they are those of the tests below, a thousand times
        for place, (axis, other) in enumerate(others):
            more, expected = {axis: objects()[axis][other]}, None
            for option, idle in idle_options[place % stride :: stride]:
                run = setting.run(**{idle_axis: idle} | more)
                if broken_rules(run).errors or name not in broken(run):
                    continue
                expected = setting.gradient(**{idle_axis: off} | more) if expected is None else expected
                gap = (setting.gradient(**{idle_axis: idle} | more) - expected).abs().max().item()
                judged += 1
                if not gap <= IDLE:
                    wrong.append(f"{idle_axis}={option} beside {axis}={other}: {gap:.1e}")
    assert judged >= 15
    assert not wrong, "\n".join(wrong)


# Options whose numbers act on the scene: those of `objects`, and not what came later with a test of its own.
KNOWN = {axis: [name for name in CHOICES[axis] if class_of(axis, name) in listed(axis)] for axis in LOSS_AXES}
ACTS = (
    *(("clip_cannot_act", name, Setting()) for name in KNOWN["surrogate"] if name != "reinforce"),
    ("clip_cannot_act", "clip_cov", Setting(updates="one")),
    ("clip_cannot_act", "ppo", Setting(updates="one", others=(("old_policy", "sampler"),))),
    ("importance_cannot_act", "sequence", Setting()),
    ("importance_cannot_act", "sequence_token", Setting()),
    ("importance_cannot_act", "sequence_product", Setting()),
    ("importance_cannot_act", "sequence", Setting(updates="one", others=(("old_policy", "sampler"),))),
    ("importance_is_ignored", "sequence", Setting(others=(("surrogate", "topr"),))),
    ("old_policy_is_ignored", "sampler", Setting()),
    ("old_policy_is_ignored", "sampler", Setting(others=(("surrogate", "reinforce"), ("kl", "k3_unbiased")))),
    ("old_policy_is_ignored", "sampler", Setting(others=(("surrogate", "reinforce"), ("kl", "k1_reward")))),
    ("sampler_is_the_old_policy", "sampler", Setting()),
    ("survivors_are_everyone", "survivors", Setting(others=(("truncation", "mask_after"),))),
    ("survivors_are_everyone", "survivors", Setting(others=(("truncation", "mask_before"),))),
    ("survivors_are_everyone", "survivors", Setting(others=(("group_filter", "drop"),))),
    ("survivors_are_everyone", "survivors", Setting(others=(("entropy", "high_entropy_tokens"),))),
    *(
        ("survivors_are_everyone", "survivors", Setting(others=(("rejection", name),)))
        for name in KNOWN["rejection"]
        if name != "none"
    ),
    *(("nothing_to_correct", name, Setting()) for name in KNOWN["correction"] if name != "none"),
    *(("nothing_to_reject", name, Setting()) for name in KNOWN["rejection"] if name != "none"),
    *(("nothing_to_mask", name, Setting()) for name in ("opsm", "vaco", "cppo")),
    *(("nothing_to_mask", name, Setting(updates="one")) for name in ("opsm", "vaco", "cppo")),
    *(("nothing_to_mask", name, Setting(sampler_precision="fp32")) for name in ("opsm", "vaco", "cppo")),
    # each clause of the filter's rule, taken away by itself
    *(
        ("filter_hardly_acts", "drop", Setting(others=(("baseline", name), ("scale", "none"))))
        for name in ("none", "greedy", "gae", "monte_carlo", "return_to_go")
    ),
    *(
        ("filter_hardly_acts", "drop", Setting(others=((axis, option),)))
        for axis, options in {
            "baseline": ("batch_mean", "batch_mean_tokens"),
            "scale": ("batch_std", "batch_std_raw", "batch_std_tokens", "informative_share", "group_mean_order_g"),
            "token_credit": ("clip_b",),
            "denominator": ("survivors",),
            "reward_shaping": ("soft_overlong", "soft_overlong_correct_only", "kimi_length", "l1_exact", "l1_max"),
            "kl": ("k1_reward", "k2_loss", "k3_loss", "k3_unbiased"),
            "entropy": ("bonus",),
            "surrogate": ("kimi", "kl_cov", "clip_cov"),
        }.items()
        for option in options
    ),
    ("share_is_one", "informative_share", Setting()),
    ("baseline_is_recentred", "batch_mean", Setting(others=(("scale", "batch_std"),))),
    *(
        ("baseline_is_recentred", name, Setting(others=(("scale", "batch_std_tokens"),)))
        for name in ("group_mean", "greedy", "gae", "gae_orz", "monte_carlo")
    ),
    ("baseline_is_recentred", "return_to_go", Setting(others=(("scale", "batch_std_tokens"), ("kl", "k1_reward")))),
    ("return_to_go_without_token_penalty", "return_to_go", Setting(others=(("scale", "none"), ("kl", "k1_reward")))),
    *(
        ("shaping_is_not_read", name, Setting())
        for name in KNOWN["reward_shaping"]
        if name not in ("none", "backward_correction")
    ),
    # a factor on centred rewards, which the plain run's scale divides away
    ("shaping_is_not_read", "backward_correction", Setting(others=(("scale", "none"),))),
    ("kl_is_not_read", "k1_reward", Setting()),
)


@pytest.mark.parametrize(
    "name,option,setting",
    ACTS,
    ids=lambda part: part if isinstance(part, str) else "+".join([part.updates, *(o for _, o in part.others)]),
)
def test_where_a_rule_is_silent_the_option_acts(name: str, option: str, setting: Setting) -> None:
    axis = RULES[name].axes[0]
    changed = {axis: objects()[axis][option]}
    run = setting.run(**changed)
    assert not broken_rules(run).errors and name not in broken(run)
    gap = setting.gradient(**changed) - setting.gradient(**{axis: off_option(axis)})
    assert gap.abs().max() > 1e-5


@pytest.mark.parametrize("name", CHOICES["surrogate"])
def test_at_ratio_one_a_surrogate_that_needs_drift_is_the_plain_policy_gradient(name: str) -> None:
    on_policy, surrogate = Setting(updates="one"), objects()["surrogate"][name]
    gap = on_policy.gradient(surrogate=surrogate) - on_policy.gradient(surrogate=Reinforce())
    assert bool(gap.abs().max() <= IDLE) is (surrogate.needs_drift or name == "reinforce")


@pytest.mark.parametrize("name", [name for name in CHOICES["surrogate"] if name != "clip_cov"])
def test_rounding_between_two_passes_moves_no_surrogate(name: str) -> None:
    """Sampler and learner of the same weights differ by about 1e-7 nats a token, which the rules call no difference."""
    scene, surrogate = scene_of("one", "fp32"), objects()["surrogate"][name]
    noise = 1e-7 * torch.sin(torch.arange(scene.logprobs.numel(), dtype=F64)).reshape(scene.logprobs.shape)
    rounded = replace(scene, old_logprobs=scene.logprobs + noise)
    gradients = [run_scene(each, surrogate=surrogate)[1] for each in (scene, rounded)]
    assert_close(gradients[1], gradients[0], 1e-5, "rounding")


@pytest.mark.parametrize(
    "name,numbers", [("cispo", {}), ("cispo", {"cap": 0.2}), ("ppo", {}), ("dppo", {}), ("dppo", {"cap": 0.5})]
)
def test_the_declared_weight_at_ratio_one_is_the_weight_of_the_loss(name: str, numbers: dict[str, float]) -> None:
    on_policy, surrogate = Setting(updates="one"), replace(samples()["surrogate"][name], **numbers)
    expected = surrogate.weight_at_ratio_one * on_policy.gradient(surrogate=Reinforce())
    assert_close(on_policy.gradient(surrogate=surrogate), expected, IDLE, "declared weight times REINFORCE")


def test_a_cap_below_one_acts_on_policy_too() -> None:
    """It scales the loss, so that an arm of it differs from its control; `loss_is_scaled` says so."""
    setting, capped = Setting(updates="one"), replace(samples()["surrogate"]["cispo"], cap=0.2)
    assert (setting.gradient(surrogate=capped) - setting.gradient(surrogate=Reinforce())).abs().max() > 1e-2
    assert "loss_is_scaled" in broken(setting.run(surrogate=capped))
    assert "clip_cannot_act" not in broken(setting.run(surrogate=capped))


def test_a_share_of_rows_is_not_one_after_the_filter() -> None:
    """verl's alpha counts rewards that are not zero, of which a group with signal has some and not all."""
    setting = Setting(others=(("group_filter", "drop"),))
    rows = InformativeShare(AlphaForm.nonzero_rewards)
    assert (setting.gradient(scale=rows) - setting.gradient(scale=NoScale())).abs().max() > 1e-2
    assert "share_is_one" not in broken(setting.run(scale=rows))


def test_a_row_that_keeps_its_raw_reward_lets_the_filter_act() -> None:
    """With singleton=raw a group of which one row is counted carries a gradient, which the filter takes away."""
    setting = Setting()
    changed = {"truncation": samples()["truncation"]["mask_before"], "baseline": GroupMean(Singleton.raw)}
    changed["scale"] = GroupStd(1, 1e-6, False, Singleton.raw)
    drop = samples()["group_filter"]["drop"]
    gap = setting.gradient(group_filter=drop, **changed) - setting.gradient(**changed)
    assert gap.abs().max() > 1e-3, "the third group of the scene counts one row"
    assert "filter_hardly_acts" not in broken(setting.run(group_filter=drop, **changed))


def test_a_shaped_reward_that_the_filter_reads_reaches_the_loss() -> None:
    setting = Setting(others=(*WITH_PASS_AT_2, ("group_filter", "drop by reward"), ("denominator", "survivors")))
    shaping = SoftOverlong(6, 4, 1.0, 1.0, -1.0)
    assert (setting.gradient(reward_shaping=shaping) - setting.gradient()).abs().max() > 1e-3
    assert "shaping_is_not_read" not in broken(setting.run(reward_shaping=shaping))


def test_the_mismatch_would_count_twice_where_it_is_refused() -> None:
    # r = pi / old, rho = old / sampler: the surrogate's ratio is r * rho and the weight rho once more
    scene, wide = scene_of("four", "bf16"), replace(samples()["surrogate"]["ppo"], clip_low=1 - 1e-9, clip_high=1e6)
    weights = replace(samples()["correction"]["tis_token"], cap=1e9)
    options = {"old_policy": samples()["old_policy"]["sampler"], "correction": weights, "surrogate": wide}
    gradient = run_scene(scene, **options)[1]
    ratio = (scene.logprobs - scene.old_logprobs).exp()
    rho = (scene.old_logprobs - scene.rollouts.sampler_logprobs).exp()
    assert_close(gradient, ratio * rho**2 * run_scene(scene, surrogate=Reinforce())[1], 1e-9, "rho squared")
    assert {rule.name for rule in broken_rules(Setting().run(**options)).errors} == {"mismatch_counts_twice"}


@pytest.mark.parametrize("option", [*CHOICES["baseline"], "pass_at_2"])
def test_the_smallest_group_is_the_smallest_that_carries_a_signal(option: str) -> None:
    """Over every pattern of right and wrong answers of a group of that size, and of one response less."""
    baseline = objects()["baseline"][option]

    def pushes(size: int) -> bool:
        patterns = [list(pattern) for pattern in itertools.product([0.0, 1.0], repeat=size)]
        graded = make_graded(patterns)
        rollouts = make_rollouts([1] * graded.reward.numel(), size)
        earned = rewards_by_token(graded.reward, torch.zeros(rollouts.tokens.shape, dtype=F64), rollouts.sampled_mask)
        even = torch.full(rollouts.tokens.shape, -1.0, dtype=F64)
        credit = Credit(
            rollouts, earned, critic_values(rollouts), Endings(rollouts), even, collision_of(even),
            memory=baseline.first_memory({}),
        )  # fmt: skip
        return bool((baseline.centre(graded, credit) != 0).any())

    assert pushes(baseline.smallest_group)
    if baseline.smallest_group > 1:
        assert not pushes(baseline.smallest_group - 1)


@pytest.mark.parametrize("option", CHOICES["reward_shaping"])
@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_the_lowest_reward_is_declared(option: str, wrong: float) -> None:
    shaping = samples()["reward_shaping"][option]
    lengths = [1, 7, 20, 24, 32, 64, 72]
    rows = [(outcome, length) for outcome in (0.0, 1.0) for length in lengths]
    pairs = [(a, b) for a in rows for b in rows]
    outcome = [[row[0] for row in pair] for pair in pairs]
    reward = [[1.0 if right else wrong for right in pair] for pair in outcome]
    graded = make_graded(
        reward, correctness=outcome, lengths=[[row[1] for row in pair] for pair in pairs],
        target_length=[[20, 20]] * len(pairs),
        progress=[1.0] * len(pairs), logprob=[[-1.0, -2.0]] * len(pairs),
    )  # fmt: skip
    lowest, found = shaping.lowest(1.0, wrong), shaping(graded).reward.min().item()
    if math.isfinite(lowest):
        assert_close(found, lowest, 1e-12, "attained")
    else:
        assert found < wrong - 0.4, "falls with the length"
