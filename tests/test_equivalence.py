"""Options that must agree, exactly or up to a stated factor, and the condition under which they do."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import (
    F64,
    advantages_of,
    assert_close,
    inputs_of,
    loss_and_gradient,
    make_graded,
    make_run,
    random_scene,
    run_scene,
    step_of,
)
from omegaconf import OmegaConf

from grpo_lab.config import conf_folder
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import GroupMean, LeaveOneOut
from grpo_lab.tricks.convention import Scope, Singleton, Width
from grpo_lab.tricks.correction import NoCorrection, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.group_filter import Drop, Keep, Signal
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.reward_shaping import NoShaping, SoftOverlong
from grpo_lab.tricks.scale import GroupStd, NoScale
from grpo_lab.tricks.surrogate import Ppo, Reinforce
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score

EXACT = 1e-12
SURROGATES = (Ppo(0.2, 0.2), Ppo(0.2, 0.28), Reinforce())
AGGREGATIONS = (SequenceMean(0.0), TokenMean(Scope.step), PromptMean(), Constant(6, Width.budget), SequenceSum())
by_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
by_surrogate = pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
SCENE = random_scene(0, 3, 4, 6)


def assert_same(first, second, why: str, factor: float = 1.0) -> None:
    """Two (loss, gradient) pairs agree once the second is multiplied by `factor`."""
    assert_close(first[0], factor * second[0], EXACT, f"loss: {why}")
    assert_close(first[1], factor * second[1], EXACT, f"gradient: {why}")
    assert first[1].abs().max() > 1e-4, "a comparison of zeros"


# --- baseline and scale -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [NoScale(), GroupStd(0, 0.0, False, Singleton.zero), GroupStd(1, 1e-6, False, Singleton.zero)], ids=repr
)
def test_leave_one_out_is_the_group_mean_times_n_over_n_minus_one(scale) -> None:
    # 4, 3 and 2 rows are counted: factors 4/3, 3/2, 2
    counted = [[True] * 4, [True, True, False, True], [False, True, True, False]]
    graded = make_graded([[1, 0, 0.7, 0], [0, 1, 1, 0.3], [1, 0, 1, 1]], counted=counted)
    factor = torch.tensor([[4 / 3], [3 / 2], [2.0]], dtype=F64)
    expected = factor * advantages_of(graded, GroupMean(Singleton.zero), scale)
    assert_close(advantages_of(graded, LeaveOneOut(Singleton.zero), scale), expected, EXACT, "factor")


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    values = torch.tensor([1, 0.25, 0.7, -0.1, 0], dtype=F64)
    expected = [values[i] - (values.sum() - values[i]) / 4 for i in range(5)]
    assert_close(
        advantages_of(make_graded([values.tolist()]), LeaveOneOut(Singleton.zero))[0], expected, EXACT, "by its words"
    )


def test_the_two_deviations_differ_by_the_root_of_n_over_n_minus_one() -> None:
    graded = make_graded([[1, 0, 0.7, 0, 0.2]])
    population, bessel = (advantages_of(graded, scale=GroupStd(ddof, 0.0, False, Singleton.zero)) for ddof in (0, 1))
    assert_close(population, bessel * (5 / 4) ** 0.5, EXACT, "sqrt(5/4)")


# --- surrogate ----------------------------------------------------------------------------------------------


@by_aggregation
def test_ppo_is_ppo_higher_with_equal_widths(aggregation) -> None:
    shipped = OmegaConf.load(conf_folder() / "surrogate" / "ppo.yaml")
    higher = OmegaConf.load(conf_folder() / "surrogate" / "ppo_higher.yaml")
    assert shipped.clip_high == shipped.clip_low == higher.clip_low < higher.clip_high
    levelled = Ppo(higher.clip_low, higher.clip_low)
    first = run_scene(SCENE, surrogate=Ppo(shipped.clip_low, shipped.clip_high), aggregation=aggregation)
    assert_same(first, run_scene(SCENE, surrogate=levelled, aggregation=aggregation), "equal widths")
    raised = run_scene(SCENE, surrogate=Ppo(higher.clip_low, higher.clip_high), aggregation=aggregation)
    assert (raised[1] - first[1]).abs().max() > 1e-4, "the raised bound must act here"


@by_aggregation
@pytest.mark.parametrize("surrogate", SURROGATES[:2], ids=repr)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(surrogate, aggregation) -> None:
    scene = replace(SCENE, old_logprobs=SCENE.logprobs)
    gradient = run_scene(scene, surrogate=surrogate, aggregation=aggregation)[1]
    expected = run_scene(scene, surrogate=Reinforce(), aggregation=aggregation)[1]
    assert_close(gradient, expected, EXACT, "ratio 1")
    assert gradient.abs().max() > 1e-3


@by_aggregation
def test_wide_clips_leave_the_importance_weighted_gradient(aggregation) -> None:
    # d(-r A) = -r A d logprob, REINFORCE's gradient times the ratio, token by token
    wide = run_scene(SCENE, surrogate=Ppo(1 - 1e-9, 1e6), aggregation=aggregation)[1]
    plain = run_scene(SCENE, surrogate=Reinforce(), aggregation=aggregation)[1]
    ratio = (SCENE.logprobs - SCENE.old_logprobs).exp()
    assert_close(wide, ratio * plain, EXACT, "ratio times REINFORCE")


@by_surrogate
def test_no_old_log_probs_means_the_learner_detached(surrogate) -> None:
    run = make_run(surrogate=surrogate, kl=K3Loss(kl_coef=0.1, log_ratio_limit=20.0))
    inputs = inputs_of(run, SCENE)
    results = [
        loss_and_gradient(run, replace(inputs, old_logprobs=old), SCENE.logprobs) for old in (None, SCENE.logprobs)
    ]
    assert_same(*results, "old_logprobs=None")


def test_a_log_ratio_within_its_limit_is_not_changed() -> None:
    results = [run_scene(SCENE, importance=Token(log_ratio_limit=limit)) for limit in (1.0, 20.0)]
    assert_same(*results, "differences here are below .5")


# --- aggregation --------------------------------------------------------------------------------------------


@by_surrogate
def test_one_token_responses_make_the_means_and_the_sum_equal(surrogate) -> None:
    # every row has 1 token: 1/(N * 1) = 1/N tokens = 1/(P * G) = 1/N
    scene = random_scene(5, 3, 4, 1)
    first, *others = (
        run_scene(scene, surrogate=surrogate, aggregation=aggregation)
        for aggregation in (
            SequenceMean(0.0),
            TokenMean(Scope.step),
            PromptMean(),
            SequenceSum(),
            Constant(1, Width.budget),
        )
    )
    for other in others:
        assert_same(first, other, "one token a row")


@by_surrogate
def test_constant_is_the_sequence_sum_over_the_budget(surrogate) -> None:
    total = run_scene(SCENE, surrogate=surrogate, aggregation=SequenceSum())
    divided = run_scene(SCENE, surrogate=surrogate, aggregation=Constant(40, Width.budget))
    assert_same(total, divided, "40 tokens", factor=40)


@by_surrogate
def test_equal_lengths_make_the_three_means_equal(surrogate) -> None:
    scene = random_scene(5, 3, 4, 6)
    everywhere = torch.ones(12, 6, dtype=torch.bool)
    scene = replace(scene, rollouts=replace(scene.rollouts, response_mask=everywhere, sampled_mask=everywhere))
    scene = replace(scene, logprobs=torch.where(scene.logprobs == 0, -1.0, scene.logprobs))
    first, *others = (
        run_scene(scene, surrogate=surrogate, aggregation=aggregation)
        for aggregation in (SequenceMean(0.0), TokenMean(Scope.step), PromptMean(), Constant(6, Width.budget))
    )
    for other in others:
        assert_same(first, other, "6 tokens a row")


@by_surrogate
def test_groups_of_equal_token_counts_make_prompt_mean_the_token_mean(surrogate) -> None:
    # 2 + 6, 3 + 5, 4 + 4: rows differ, groups do not
    lengths, rows = [2, 6, 3, 5, 4, 4], [1, -0.5, 0.3, 0.2, -1, 2]
    logprobs = torch.full((6, 6), -1.0, dtype=F64)
    inputs = step_of(lengths, rows, 2, old_logprobs=logprobs - 0.1)
    results = [
        loss_and_gradient(make_run(surrogate=surrogate, aggregation=aggregation), inputs, logprobs)
        for aggregation in (PromptMean(), TokenMean(Scope.step), SequenceMean(0.0))
    ]
    assert_same(results[0], results[1], "8 tokens a group")
    assert (results[0][1] - results[2][1]).abs().max() > 1e-3


# --- denominator, truncation, filter, correction, shaping ---------------------------------------------------


@pytest.mark.parametrize(
    ("surrogate", "aggregation"), list(product(SURROGATES, AGGREGATIONS)), ids=lambda option: repr(option)
)
def test_survivors_are_everyone_when_nothing_is_masked(surrogate, aggregation) -> None:
    results = [
        run_scene(SCENE, surrogate=surrogate, aggregation=aggregation, denominator=denominator)
        for denominator in (Original(), Survivors())
    ]
    assert_same(*results, "nothing masked")


def test_truncation_options_agree_when_nothing_is_truncated() -> None:
    nothing = torch.zeros(3, 4, dtype=torch.bool)
    scene = replace(SCENE, graded=replace(SCENE.graded, truncated=nothing))
    first, *others = (run_scene(scene, truncation=option) for option in (Score(), MaskAfter(), MaskBefore()))
    for other in others:
        assert_same(first, other, "nothing truncated")


def test_dropping_groups_without_reward_signal_changes_no_gradient_under_original_counts() -> None:
    # A tied group has advantage 0 anyway; only a denominator of survivors sees that it left.
    reward = torch.tensor([[1, 0, 0, 1], [0.7] * 4, [0, 0, 1, 0]], dtype=F64)
    scene = replace(SCENE, graded=replace(SCENE.graded, reward=reward))
    for denominator, same in ((Original(), True), (Survivors(), False)):
        kept, dropped = (
            run_scene(scene, group_filter=option, aggregation=TokenMean(Scope.step), denominator=denominator)[1]
            for option in (Keep(), Drop(signal=Signal.reward))
        )
        assert torch.allclose(kept, dropped, rtol=0, atol=EXACT) is same


@pytest.mark.parametrize("cap", [1.5, 1e9])
def test_weights_of_equal_policies_correct_nothing(cap) -> None:
    rollouts = replace(SCENE.rollouts, sampler_logprobs=SCENE.old_logprobs)
    scene = replace(SCENE, rollouts=rollouts)
    results = [run_scene(scene, correction=option) for option in (TisToken(cap=cap, floor=0.0), NoCorrection())]
    assert_same(*results, "sampler is the old policy")


def test_a_huge_cap_is_plain_importance_sampling_of_the_sampler() -> None:
    # old/sampler times REINFORCE's gradient
    weighted = run_scene(SCENE, correction=TisToken(cap=1e9, floor=0.0), surrogate=Reinforce())[1]
    plain = run_scene(SCENE, surrogate=Reinforce())[1]
    weight = (SCENE.old_logprobs - SCENE.rollouts.sampler_logprobs).exp()
    assert_close(weighted, weight * plain, EXACT, "weight times REINFORCE")


def test_overlong_shaping_is_none_below_its_start() -> None:
    # lengths are at most 6; the ramp of the first starts at 10, of the second at 2
    results = [
        run_scene(SCENE, reward_shaping=option)
        for option in (NoShaping(), SoftOverlong(20, 10, 1.0), SoftOverlong(6, 4, 1.0))
    ]
    assert_same(results[0], results[1], "no response is long")
    assert (results[0][1] - results[2][1]).abs().max() > 1e-3
