"""Options that must agree, exactly or up to a stated factor, and the condition under which they do."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product

import loss_options
import pytest
import torch
from helpers import (
    F64,
    Scene,
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
from loss_options import AGGREGATIONS, CORRECTIONS
from omegaconf import OmegaConf
from torch import Tensor

from grpo_lab.config.folders import conf_folder
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import BatchMean, GroupMean, LeaveOneOut, LengthWeighted, NoBaseline, Weights
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, NoCorrection, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import Adaptive, Bonus, HighEntropyTokens, NoEntropy
from grpo_lab.tricks.group_filter import Drop, Keep, Signal
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken, Token
from grpo_lab.tricks.kl import K1Reward, K2Loss, K3Loss, K3Unbiased
from grpo_lab.tricks.old_policy import Recomputed, Sampler
from grpo_lab.tricks.rejection import (
    NoRejection,
    SequenceMaxK2,
    SequenceMaxK3,
    SequenceMeanK1,
    SequenceMeanK2,
    SequenceMeanK3,
    SequenceSumK1,
    SequenceSumK2,
    SequenceSumK3,
    TokenK1,
    TokenK2,
    TokenK3,
)
from grpo_lab.tricks.reward_shaping import KimiLength, L1Exact, L1Max, NoShaping, SoftOverlong, SoftOverlongCorrectOnly
from grpo_lab.tricks.scale import AllWrong, BatchStd, Deviation, GroupStd, InformativeShare, NoScale, SignWeighted
from grpo_lab.tricks.scale import GroupMean as MaxRl
from grpo_lab.tricks.surrogate import (
    Cispo,
    ClipCov,
    Divergence,
    Dppo,
    DualClip,
    Gmpo,
    Kimi,
    KlCov,
    Ppo,
    Reinforce,
    Sapo,
    Topr,
)
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score

EXACT = 1e-12
SURROGATES = (Ppo(0.2, 0.2), Ppo(0.2, 0.28), Reinforce())
EVERY_SURROGATE = (Ppo(0.2, 0.2), *loss_options.SURROGATES)
by_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
by_surrogate = pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
SCENE = random_scene(0, 3, 4, 6)
RATIO = (SCENE.logprobs - SCENE.old_logprobs).exp()
UNCLIPPED = Ppo(1 - 1e-9, 1e6)
HUGE = 1e9


def at_ratio_one(scene: Scene) -> Scene:
    """The same step before its first update."""
    return replace(scene, old_logprobs=scene.logprobs)


def one_token_scene() -> Scene:
    """Every response is one token long, the off-policy ratios are SCENE's."""
    return random_scene(5, 3, 4, 1)


def step_advantages(scene: Scene, **options) -> Tensor:
    """[N, T]; the advantages that a run under these options gives the loss."""
    return inputs_of(make_run(**options), scene).advantages


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
    graded = make_graded([[1, 0, 0.7, 0], [0, 1, 1, 0.3], [1, 0, 1, 1]], in_statistics=counted)
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


def a_graded(*, binary: bool = False, lengths=((1, 2, 3, 4), (5, 1, 1, 2), (2, 2, 6, 3))):
    """Three groups of four; shaped rewards, or right and wrong alone."""
    shaped = [[1, 0, 0.7, 0], [0, 1, 1, 0.3], [1, 0, 1, 1]]
    return make_graded([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 1]] if binary else shaped, lengths=lengths)


@pytest.mark.parametrize("by", list(Weights), ids=lambda by: by.value)
def test_the_batch_is_the_group_when_there_is_one(by) -> None:
    graded = make_graded([[1, 0, 0.7, 0]], lengths=[[3, 3, 3, 3]])
    group = advantages_of(graded, scale=GroupStd(1, 1e-3, False, Singleton.zero))
    batch = advantages_of(graded, BatchMean(by), BatchStd(Deviation.centred, Weights.rows, False, 1, 1e-3, Floor.added))
    assert_close(batch, group, EXACT, "one group of equal lengths")
    more = make_graded([[1, 0, 0.7, 0], [1, 1, 1, 0]], lengths=[[3, 3, 3, 3]] * 2)
    other = advantages_of(more, BatchMean(by), BatchStd(Deviation.centred, Weights.rows, False, 1, 1e-3, Floor.added))
    assert (other[:1] - group).abs().max() > 1e-2


def test_centred_and_raw_deviation_are_one_where_all_groups_have_one_mean() -> None:
    # Row by row the centred reward is then the raw one less a constant.
    level = make_graded([[1, 0, 0.6, 0.4], [0.5, 0.5, 1, 0]])
    centred, raw = (BatchStd(of, Weights.rows, False, 0, 1e-3, Floor.added) for of in Deviation)
    assert_close(advantages_of(level, scale=centred), advantages_of(level, scale=raw), EXACT, "every mean is .5")
    apart = a_graded()
    assert (advantages_of(apart, scale=centred) - advantages_of(apart, scale=raw)).abs().max() > 1e-2


def test_whitening_rows_of_group_centred_rewards_moves_no_mean() -> None:
    graded = a_graded()
    plain, whitened = (
        BatchStd(Deviation.centred, Weights.rows, shift, 0, 1e-3, Floor.added) for shift in (False, True)
    )
    assert_close(advantages_of(graded, scale=whitened), advantages_of(graded, scale=plain), EXACT, "mean 0 already")
    by_tokens = (BatchStd(Deviation.centred, Weights.tokens, shift, 0, 1e-3, Floor.added) for shift in (False, True))
    one, other = (advantages_of(graded, scale=scale) for scale in by_tokens)
    assert (one - other).abs().max() > 1e-2, "weighted by tokens, it does"


def test_leaving_one_out_is_divided_away_by_the_deviation_of_what_it_left() -> None:
    graded, whole = make_graded([[1, 0, 0.7, 0], [0, 1, 1, 0.3]]), BatchStd(
        Deviation.centred, Weights.rows, False, 0, 0.0, Floor.added
    )  # fmt: skip
    one, other = (advantages_of(graded, b(Singleton.zero), whole) for b in (GroupMean, LeaveOneOut))
    assert_close(other, one, EXACT, "4/3 above and below the line")
    raw = replace(whole, of=Deviation.raw)
    one, other = (advantages_of(graded, b(Singleton.zero), raw) for b in (GroupMean, LeaveOneOut))
    assert_close(other, 4 / 3 * one, EXACT, "a deviation of the raw rewards keeps it")


def test_an_eps_of_zero_is_the_same_wherever_it_stands() -> None:
    for eps, same in ((0.0, True), (1.5, False)):
        first, *others = (
            advantages_of(a_graded(), scale=BatchStd(Deviation.centred, Weights.rows, False, 0, eps, floor))
            for floor in Floor
        )
        assert all(torch.allclose(first, other, rtol=0, atol=EXACT) is same for other in others)


@pytest.mark.parametrize(
    ("weighted", "plain"),
    [
        (LengthWeighted(Singleton.zero), GroupMean(Singleton.zero)),
        (BatchMean(Weights.tokens), BatchMean(Weights.rows)),
    ],
    ids=repr,
)
def test_equal_lengths_make_weights_by_length_no_weights(weighted, plain) -> None:
    level = a_graded(lengths=((3,) * 4,) * 3)
    assert_close(advantages_of(level, weighted), advantages_of(level, plain), EXACT, "3 tokens a row")
    assert (advantages_of(a_graded(), weighted) - advantages_of(a_graded(), plain)).abs().max() > 1e-2


@pytest.mark.parametrize("baseline", [GroupMean, LeaveOneOut])
def test_singletons_matter_in_singleton_groups_alone(baseline) -> None:
    zero, raw = (baseline(singleton) for singleton in (Singleton.zero, Singleton.raw))
    assert_close(advantages_of(a_graded(), raw), advantages_of(a_graded(), zero), 0, "four rows a group")
    lone = make_graded([[0.7, 0, 0], [1, 0, 0]], in_statistics=[[True, False, False], [True] * 3])
    one, other = advantages_of(lone, zero), advantages_of(lone, raw)
    assert_close(other - one, [[0.7, 0, 0], [0, 0, 0]], EXACT, "the raw reward")


def test_maxrl_is_the_centred_reward_over_the_mean_and_its_two_orders_differ_in_lost_groups() -> None:
    graded = make_graded([[1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    low, high = (advantages_of(graded, scale=MaxRl(all_wrong)) for all_wrong in AllWrong)
    # mean .5, 0 and 1: (1 - .5) / .5, nothing and nothing
    assert_close(low, [[1, -1, 1, -1], [0, 0, 0, 0], [0, 0, 0, 0]], EXACT, "centred over mean")
    assert_close(high - low, [[0] * 4, [-1] * 4, [0] * 4], EXACT, "an all-wrong group")


@pytest.mark.parametrize("alpha", list(AlphaForm), ids=lambda alpha: alpha.value)
def test_a_batch_of_signal_alone_needs_no_rescaling(alpha) -> None:
    full = make_graded([[1, 0.5, 1, 0.2], [0.1, 1, 0.3, 1]])
    half = make_graded([[1, 0, 1, 0], [0, 0, 0, 0]])
    assert_close(advantages_of(full, scale=InformativeShare(alpha)), advantages_of(full), EXACT, "alpha is 1")
    # 2 groups over 1 with signal; 8 rows over 2 that are not 0
    factor = 2 if alpha is AlphaForm.informative_groups else 4
    assert_close(advantages_of(half, scale=InformativeShare(alpha)), factor * advantages_of(half), EXACT, "alpha")


def test_equal_weights_of_the_signs_are_one_factor() -> None:
    graded = a_graded()
    assert_close(advantages_of(graded, scale=SignWeighted(1.0, 1.0)), advantages_of(graded), EXACT, "weights of 1")
    halves = [advantages_of(graded, scale=SignWeighted(*pair)) for pair in ((1.0, 0.0), (0.0, 1.0))]
    assert_close(sum(halves), advantages_of(graded), EXACT, "right answers and wrong ones")
    assert (halves[0] >= 0).all() and (halves[1] <= 0).all()


def test_weights_of_the_signs_are_factors_in_float64() -> None:
    centred = advantages_of(a_graded())
    expected = 0.1 * centred.clamp(min=0) + 0.7 * centred.clamp(max=0)
    assert_close(advantages_of(a_graded(), scale=SignWeighted(0.1, 0.7)), expected, EXACT, ".1 and .7")


def test_the_deviation_of_the_others_is_that_of_the_group_without_the_row() -> None:
    values = [1, 0.25, 0.7, -0.1, 0]
    got = advantages_of(make_graded([values]), NoBaseline(), GroupStd(1, 0.1, True, Singleton.zero))[0]
    for place, value in enumerate(values):
        others = torch.tensor(values[:place] + values[place + 1 :], dtype=F64)
        assert_close(got[place], value / (others.std(correction=1) + 0.1), EXACT, "by its words")


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


@cache
def plain_gradient(aggregation) -> Tensor:
    """REINFORCE's, at ratio one."""
    return run_scene(at_ratio_one(SCENE), surrogate=Reinforce(), aggregation=aggregation)[1]


@pytest.mark.parametrize("surrogate", [option for option in EVERY_SURROGATE if option.needs_drift], ids=repr)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(surrogate) -> None:
    for aggregation in AGGREGATIONS:
        gradient = run_scene(at_ratio_one(SCENE), surrogate=surrogate, aggregation=aggregation)[1]
        assert_close(gradient, plain_gradient(aggregation), EXACT, f"ratio 1, {aggregation}")
        assert gradient.abs().max() > 1e-3, aggregation


@by_aggregation
def test_wide_clips_leave_the_importance_weighted_gradient(aggregation) -> None:
    # d(-r A) = -r A d logprob, REINFORCE's gradient times the ratio, token by token
    wide = run_scene(SCENE, surrogate=Ppo(1 - 1e-9, 1e6), aggregation=aggregation)[1]
    plain = run_scene(SCENE, surrogate=Reinforce(), aggregation=aggregation)[1]
    ratio = (SCENE.logprobs - SCENE.old_logprobs).exp()
    assert_close(wide, ratio * plain, EXACT, "ratio times REINFORCE")


@pytest.mark.parametrize("surrogate", [s for s in EVERY_SURROGATE if s.needs_drift and s.uses_ratio], ids=repr)
def test_away_from_ratio_one_the_gradient_is_not_that_of_reinforce(surrogate) -> None:
    gradient, plain = (run_scene(SCENE, surrogate=option)[1] for option in (surrogate, Reinforce()))
    assert (gradient - plain).abs().max() > 1e-3


def test_clip_cov_detaches_tokens_at_ratio_one_and_is_reinforce_on_the_others() -> None:
    scene = at_ratio_one(SCENE)
    surrogate = ClipCov(0.2, 0.2, 0.3, 0.02, 5.0, Scope.step)
    gradient, plain = (run_scene(scene, surrogate=option)[1] for option in (surrogate, Reinforce()))
    detached = (gradient == 0) & (plain != 0)
    assert detached.any() and not detached.all()
    assert_close(gradient[~detached], plain[~detached], EXACT, "tokens that keep their gradient")


@by_aggregation
@pytest.mark.parametrize(
    ("surrogate", "limit"),
    [
        (DualClip(0.2, 0.28, HUGE), Ppo(0.2, 0.28)),
        (ClipCov(0.2, 0.28, 0.5, 100.0, 200.0, Scope.step), Ppo(0.2, 0.28)),  # no covariance is that large
        (Cispo(HUGE, 1.0, CapForm.absolute), UNCLIPPED),
        (Dppo(Divergence.tv, 1.0, HUGE), UNCLIPPED),  # no probability moves by more than 1
        (KlCov(0.5, 1e-13, Scope.step), UNCLIPPED),
        (Kimi(0.0), Reinforce()),
    ],
    ids=repr,
)
def test_a_bound_no_token_reaches_leaves_the_gradient_without_it(surrogate, limit, aggregation) -> None:
    # The loss itself may be another: logp in the place of the ratio.
    gradient, expected = (run_scene(SCENE, surrogate=s, aggregation=aggregation)[1] for s in (surrogate, limit))
    assert_close(gradient, expected, EXACT, "out of reach")
    assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("surrogate", "limit"),
    [
        (DualClip(0.2, 0.28, 1.3), Ppo(0.2, 0.28)),
        (ClipCov(0.2, 0.28, 0.5, 0.02, 200.0, Scope.step), Ppo(0.2, 0.28)),
        (Cispo(1.2, 1.0, CapForm.absolute), UNCLIPPED),
        (Dppo(Divergence.tv, 0.05, HUGE), UNCLIPPED),
        (KlCov(0.5, 0.1, Scope.step), UNCLIPPED),
        (Kimi(0.1), Reinforce()),
    ],
    ids=repr,
)
def test_a_bound_within_reach_does_not(surrogate, limit) -> None:
    gradient, expected = (run_scene(SCENE, surrogate=option)[1] for option in (surrogate, limit))
    assert (gradient - expected).abs().max() > 1e-3


@by_aggregation
def test_the_two_forms_of_the_cap_are_one_apart(aggregation) -> None:
    absolute, one_plus = Cispo(1.25, 0.2, CapForm.absolute), Cispo(0.25, 0.2, CapForm.one_plus)
    results = [run_scene(SCENE, surrogate=option, aggregation=aggregation) for option in (absolute, one_plus)]
    assert_same(*results, "1.25 = 1 + .25")


def test_ppo_and_cispo_agree_on_the_tokens_no_bound_cuts_off() -> None:
    ppo, cispo = (run_scene(SCENE, surrogate=s)[1] for s in (Ppo(0.2, 0.2), Cispo(1.2, 0.2, CapForm.absolute)))
    cut = ppo == 0
    within = ~cut & (RATIO >= 0.8) & (RATIO <= 1.2)
    assert_close(cispo[within], ppo[within], EXACT, "ratios within the bounds")
    assert (cispo[cut & (step_advantages(SCENE) != 0) & SCENE.rollouts.sampled_mask] != 0).all()


@by_aggregation
def test_topr_is_reinforce_on_right_answers_and_a_bounded_weight_on_wrong_ones(aggregation) -> None:
    topr, plain = (run_scene(SCENE, surrogate=s, aggregation=aggregation)[1] for s in (Topr(), Reinforce()))
    positive = step_advantages(SCENE) > 0
    assert_close(topr[positive], plain[positive], EXACT, "A > 0")
    assert_close(topr[~positive], (RATIO.clamp(max=1) * plain)[~positive], EXACT, "A < 0")
    assert (RATIO[~positive & SCENE.rollouts.sampled_mask] < 0.9).any()


def test_topr_without_wrong_answers_is_reinforce() -> None:
    scene = replace(SCENE, graded=replace(SCENE.graded, reward=SCENE.graded.reward.abs() + 0.1))
    options = {"baseline": NoBaseline(), "scale": NoScale()}
    assert_same(*(run_scene(scene, surrogate=s, **options) for s in (Topr(), Reinforce())), "every A > 0")


@pytest.mark.parametrize("taus", [(1.0, 3.0), (1.0, 1.05)])
def test_sapo_fades_by_the_slope_of_its_gate(taus) -> None:
    # d/dr of (4 / tau) sigmoid(tau (r - 1)) = 4 p (1 - p), p = sigmoid(tau (r - 1)); at ratio 1 it is 4 / 4
    sapo, unclipped = (run_scene(SCENE, surrogate=s)[1] for s in (Sapo(*taus), UNCLIPPED))
    right, wrong = torch.tensor(taus, dtype=F64)
    tau = torch.where(step_advantages(SCENE) > 0, right, wrong)
    gate = torch.sigmoid(tau * (RATIO - 1))
    assert_close(sapo, 4 * gate * (1 - gate) * unclipped, EXACT, "slope of the gate")


def test_a_flat_gate_of_sapo_is_no_gate() -> None:
    sapo, unclipped = (run_scene(SCENE, surrogate=s)[1] for s in (Sapo(1e-7, 1e-7), UNCLIPPED))
    assert_close(sapo, unclipped, 1e-12, "tau near 0")


def test_gmpo_at_one_token_is_ppo_with_its_clip_in_log_space() -> None:
    # 1 - .2 = exp(ln .8), 1 + .25 = exp(ln 1.25)
    scene, gmpo = one_token_scene(), Gmpo(-math.log(0.8), math.log(1.25))
    assert_same(*(run_scene(scene, surrogate=s) for s in (gmpo, Ppo(0.2, 0.25))), "one token")
    longer = [run_scene(SCENE, surrogate=s)[1] for s in (gmpo, Ppo(0.2, 0.25))]
    assert (longer[0] - longer[1]).abs().max() > 1e-3


def test_gmpo_without_its_clip_is_the_ratio_of_the_sequence() -> None:
    geometric = run_scene(SCENE, surrogate=Gmpo(15.0, 15.0))
    sequence = run_scene(SCENE, surrogate=UNCLIPPED, importance=Sequence(20.0))
    assert_same(geometric, sequence, "geometric mean of the ratios")


def test_kimi_adds_the_square_of_each_response_to_reinforce() -> None:
    kimi, plain = (run_scene(SCENE, surrogate=s, aggregation=SequenceSum()) for s in (Kimi(0.3), Reinforce()))
    mask = SCENE.rollouts.sampled_mask
    drift = torch.where(mask, SCENE.logprobs - SCENE.old_logprobs, 0.0).sum(dim=1, keepdim=True)
    # tau/2 * S^2 over 12 rows; its gradient tau * S on every token of the row
    assert_close(kimi[0] - plain[0], (0.15 * drift**2).sum() / 12, EXACT, "value")
    assert_close(kimi[1] - plain[1], torch.where(mask, 0.3 * drift / 12, 0.0), EXACT, "gradient")


def test_dppo_by_total_variation_and_by_kl_stop_tokens_that_move_on_alone() -> None:
    unclipped = run_scene(SCENE, surrogate=UNCLIPPED)[1]
    now, before = SCENE.logprobs.exp(), SCENE.old_logprobs.exp()
    onwards = step_advantages(SCENE) * (now - before) > 0
    kl = before * (before / now).log() + (1 - before) * ((1 - before) / (1 - now)).log()
    for divergence, delta, moved in ((Divergence.tv, 0.1, (now - before).abs()), (Divergence.kl, 0.02, kl)):
        gradient = run_scene(SCENE, surrogate=Dppo(divergence, delta, HUGE))[1]
        stopped = onwards & (moved > delta)
        assert stopped.any() and (gradient[stopped] == 0).all()
        assert_close(gradient[~stopped], unclipped[~stopped], EXACT, divergence.value)


def test_kl_cov_pulls_the_marked_tokens_back_and_no_others() -> None:
    unclipped = run_scene(SCENE, surrogate=UNCLIPPED, aggregation=SequenceSum())[1]
    pulled = run_scene(SCENE, surrogate=KlCov(0.3, 0.6, Scope.step), aggregation=SequenceSum())[1] - unclipped
    mask = SCENE.rollouts.sampled_mask
    moved = pulled.abs() > EXACT
    assert moved.sum() == int(0.3 * mask.sum())
    # coef * sign(log ratio) over 12 rows
    assert_close(pulled[moved], (0.05 * (RATIO - 1).sign())[moved], EXACT, "coef * |log ratio|")


@pytest.mark.parametrize("surrogate", EVERY_SURROGATE, ids=repr)
def test_scopes_are_one_where_the_step_is_one_microbatch(surrogate) -> None:
    if surrogate.mark_scope is None:
        results = [run_scene(SCENE, surrogate=surrogate, aggregation=TokenMean(scope)) for scope in Scope]
        assert_same(*results, "one microbatch")
        return
    assert_same(*(run_scene(SCENE, surrogate=replace(surrogate, scope=scope)) for scope in Scope), "one microbatch")


@by_surrogate
def test_no_old_log_probs_means_the_learner_detached(surrogate) -> None:
    run = make_run(surrogate=surrogate, kl=K3Loss(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0))
    inputs = inputs_of(run, SCENE)
    results = [
        loss_and_gradient(run, replace(inputs, old_logprobs=old), SCENE.logprobs) for old in (None, SCENE.logprobs)
    ]
    assert_same(*results, "old_logprobs=None")


def test_a_log_ratio_within_its_limit_is_not_changed() -> None:
    results = [run_scene(SCENE, importance=Token(log_ratio_limit=limit)) for limit in (1.0, 20.0)]
    assert_same(*results, "differences here are below .5")


# --- importance, old policy ---------------------------------------------------------------------------------


of_responses = pytest.mark.parametrize(
    "surrogate", [s for s in EVERY_SURROGATE if s.uses_ratio and not s.needs_token_ratio], ids=repr
)


@of_responses
def test_sequence_token_is_sequence_where_a_row_has_one_advantage_and_one_mask(surrogate) -> None:
    for aggregation in AGGREGATIONS:
        results = [
            run_scene(SCENE, surrogate=surrogate, aggregation=aggregation, importance=importance)
            for importance in (Sequence(20.0), SequenceToken(20.0))
        ]
        if surrogate.mark_scope is not None:  # what is on the marked tokens of a row is not on its others
            assert_close(results[0][0], results[1][0], EXACT, f"value, {aggregation}")
            assert (results[0][1] - results[1][1]).abs().max() > 1e-3, aggregation
        else:
            assert_same(*results, f"constant over the row, {aggregation}")


@pytest.mark.parametrize("varied", ["advantages", "weights"])
def test_sequence_token_is_not_sequence_where_they_vary_within_a_row(varied) -> None:
    inputs = inputs_of(make_run(), SCENE)
    slope = torch.linspace(0.5, 1.5, 6, dtype=F64).expand(12, 6)
    if varied == "advantages":
        inputs = replace(inputs, advantages=inputs.advantages * slope)
    else:
        inputs = replace(inputs, correction_weights=slope)
    one, other = (
        loss_and_gradient(make_run(surrogate=UNCLIPPED, importance=option), inputs, SCENE.logprobs)
        for option in (Sequence(20.0), SequenceToken(20.0))
    )
    assert_close(one[0], other[0], EXACT, "the value is one")
    assert (one[1] - other[1]).abs().max() > 1e-3


@pytest.mark.parametrize("surrogate", EVERY_SURROGATE, ids=repr)
def test_one_token_responses_make_all_importances_equal(surrogate) -> None:
    scene = one_token_scene()
    first, *others = (
        run_scene(scene, surrogate=surrogate, importance=option)
        for option in (Token(20.0), Sequence(20.0), SequenceToken(20.0))
    )
    for other in others:
        assert_same(first, other, "one token a row")


@by_aggregation
def test_the_sampler_below_the_ratio_is_the_recomputed_policy_with_the_mismatch_as_a_weight(aggregation) -> None:
    # pi / sampler = (pi / old) * (old / sampler), as long as nothing is cut off
    folded = run_scene(SCENE, surrogate=UNCLIPPED, old_policy=Sampler(), aggregation=aggregation)
    apart = run_scene(SCENE, surrogate=UNCLIPPED, correction=TisToken(HUGE, 0.0), aggregation=aggregation)
    assert_same(folded, apart, "two factors of one ratio")
    clipped = run_scene(SCENE, surrogate=Ppo(0.2, 0.2), old_policy=Sampler(), aggregation=aggregation)[1]
    weighted = run_scene(SCENE, surrogate=Ppo(0.2, 0.2), correction=TisToken(HUGE, 0.0), aggregation=aggregation)[1]
    assert (clipped - weighted).abs().max() > 1e-3, "a clip does tell them apart"


@pytest.mark.parametrize("surrogate", EVERY_SURROGATE, ids=repr)
def test_the_old_policies_are_one_where_the_sampler_is_the_learner(surrogate) -> None:
    scene = replace(SCENE, rollouts=replace(SCENE.rollouts, sampler_logprobs=SCENE.old_logprobs))
    results = [run_scene(scene, surrogate=surrogate, old_policy=option) for option in (Recomputed(), Sampler())]
    assert_same(*results, "same log-probs")


# --- kl, entropy --------------------------------------------------------------------------------------------


def test_unbiased_k3_is_k3_in_value_at_ratio_one_and_not_in_gradient() -> None:
    scene = at_ratio_one(SCENE)
    biased, unbiased = (run_scene(scene, kl=option) for option in (K3Loss(0.1, 20.0, 0.0), K3Unbiased(0.1, 20.0, 0.0)))
    assert_close(unbiased[0], biased[0], EXACT, "value")
    # d[r k3] - d[k3] = k3 at r = 1, times coef / (12 rows * tokens)
    log_x = scene.ref_logprobs - scene.logprobs
    mask = scene.rollouts.sampled_mask
    each = 0.1 * (log_x.exp() - 1 - log_x) / mask.sum(dim=1, keepdim=True) / 12
    assert_close(unbiased[1] - biased[1], torch.where(mask, each, 0.0), EXACT, "k3 itself")


def test_unbiased_k3_at_ratio_one_has_the_gradient_of_k2() -> None:
    # d[r (x - 1 - log x)] = k3 + (1 - x) = -log x = d[(log x)^2 / 2]
    scene = at_ratio_one(SCENE)
    assert_close(
        run_scene(scene, kl=K3Unbiased(0.1, 20.0, 0.0))[1],
        run_scene(scene, kl=K2Loss(0.1, 0.0))[1],
        EXACT,
        "reverse KL",
    )
    off_policy = [run_scene(SCENE, kl=option)[1] for option in (K3Unbiased(0.1, 20.0, 0.0), K2Loss(0.1, 0.0))]
    assert (off_policy[0] - off_policy[1]).abs().max() > 1e-4


@pytest.mark.parametrize(
    "kl", [K1Reward(0.1, 0.0), K2Loss(0.1, 0.0), K3Loss(0.1, 20.0, 0.0), K3Unbiased(0.1, 20.0, 0.0)], ids=repr
)
def test_a_tie_to_a_reference_that_is_the_learner_pulls_nowhere(kl) -> None:
    scene = replace(at_ratio_one(SCENE), ref_logprobs=SCENE.logprobs)
    assert_same(run_scene(scene, kl=kl), run_scene(scene), "reference, old policy and learner are one")


def test_k1_in_the_reward_is_that_reward() -> None:
    mask = SCENE.rollouts.sampled_mask
    drift = torch.where(mask, SCENE.old_logprobs - SCENE.ref_logprobs, 0.0).sum(dim=1).reshape(3, 4)
    charged = replace(SCENE, graded=replace(SCENE.graded, reward=SCENE.graded.reward - 0.2 * drift))
    assert_same(run_scene(SCENE, kl=K1Reward(0.2, 0.0)), run_scene(charged), "charged by hand")


def test_a_bonus_is_a_loss_of_its_coefficient() -> None:
    # an entropy here is minus the log-prob, so that the bonus pays coef on the aggregated log-prob
    bonus, plain = (run_scene(SCENE, entropy=option, aggregation=SequenceSum()) for option in (Bonus(0.3), NoEntropy()))
    mask = SCENE.rollouts.sampled_mask
    assert_close(bonus[1] - plain[1], mask.to(F64) * 0.3 / 12, EXACT, "0.3 over 12 rows")


def test_adaptive_entropy_is_a_bonus_while_entropy_is_low_and_nothing_while_it_is_high() -> None:
    adaptive = Adaptive(target=1.0, delta=0.02, largest=0.05)
    coefs = [adaptive.start]
    for entropy in (0.5, 1.0, 0.9, 1.1, 1.2, 0.2):
        coefs.append(adaptive.next_coef(coefs[-1], entropy))
    # up while at or below the target and not beyond .05; the sign waits above it
    assert_close(coefs, [0, 0.02, 0.04, 0.05, -0.03, -0.01, 0.03], EXACT, "coefficients")
    for coef, same_as in ((0.04, Bonus(0.04)), (-0.03, NoEntropy())):
        inputs = replace(inputs_of(make_run(entropy=adaptive), SCENE), entropy_coef=coef)
        moved = loss_and_gradient(make_run(entropy=adaptive), inputs, SCENE.logprobs)
        assert_same(moved, run_scene(SCENE, entropy=same_as), f"coefficient {coef}")


@by_surrogate
def test_all_tokens_are_the_share_of_one(surrogate) -> None:
    whole, half, plain = (
        run_scene(SCENE, surrogate=surrogate, entropy=option)
        for option in (HighEntropyTokens(1.0), HighEntropyTokens(0.5), NoEntropy())
    )
    assert_same(whole, plain, "every token stays")
    # Under original counts the tokens that stay keep their gradient.
    kept = half[1] != 0
    assert kept.any() and ((plain[1] != 0) & ~kept).any()
    assert_close(half[1][kept], plain[1][kept], EXACT, "the undecided tokens")


# --- aggregation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", EVERY_SURROGATE, ids=repr)
def test_one_token_responses_make_the_means_and_the_sum_equal(surrogate) -> None:
    # every row has 1 token: 1/(N * 1) = 1/N tokens = 1/(P * G) = 1/N
    scene = one_token_scene()
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


@pytest.mark.parametrize("surrogate", EVERY_SURROGATE, ids=repr)
def test_constant_is_the_sequence_sum_over_the_budget(surrogate) -> None:
    total = run_scene(SCENE, surrogate=surrogate, aggregation=SequenceSum())
    divided = run_scene(SCENE, surrogate=surrogate, aggregation=Constant(40, Width.budget))
    assert_same(total, divided, "40 tokens", factor=40)


def test_constant_over_the_padded_width_is_constant_over_that_budget() -> None:
    results = [
        run_scene(SCENE, aggregation=option) for option in (Constant(40, Width.padded), Constant(6, Width.budget))
    ]
    assert_same(*results, "six columns")


def test_sequence_mean_counts_eps_tokens_more() -> None:
    added, plain = (run_scene(SCENE, aggregation=SequenceMean(eps))[1] for eps in (0.5, 0.0))
    tokens = SCENE.rollouts.sampled_mask.sum(dim=1, keepdim=True)
    assert_close(added * (tokens + 0.5) / tokens, plain, EXACT, "half a token more")


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
        for option in (NoShaping(), SoftOverlong(20, 10, 1.0, 1.0, -1.0), SoftOverlong(6, 4, 1.0, 1.0, -1.0))
    ]
    assert_same(results[0], results[1], "no response is long")
    assert (results[0][1] - results[2][1]).abs().max() > 1e-3


# --- correction and rejection -------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", CORRECTIONS[1:], ids=repr)
def test_no_correction_weighs_where_the_sampler_is_the_learner(correction) -> None:
    scene = replace(SCENE, rollouts=replace(SCENE.rollouts, sampler_logprobs=SCENE.old_logprobs))
    assert_same(run_scene(scene, correction=correction), run_scene(scene), "sampler is the old policy")
    apart = [run_scene(SCENE, correction=option)[1] for option in (correction, NoCorrection())]
    assert (apart[0] - apart[1]).abs().max() > 1e-3, "elsewhere it does"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Icepop(0.0, HUGE), TisToken(HUGE, 0.0)),
        (Mis(0.0, HUGE), TisSequence(HUGE)),
    ],
    ids=repr,
)
def test_bounds_out_of_reach_leave_plain_importance_sampling(first, second) -> None:
    assert_same(*(run_scene(SCENE, correction=option) for option in (first, second)), "nothing is masked or capped")


@pytest.mark.parametrize("cap", [1.1, HUGE])
def test_one_token_responses_make_token_product_and_geometric_mean_equal(cap) -> None:
    scene = one_token_scene()
    first, *others = (
        run_scene(scene, correction=option) for option in (TisToken(cap, 0.0), TisSequence(cap), TisGeometric(cap))
    )
    for other in others:
        assert_same(first, other, "one token a row")
    assert_same(*(run_scene(scene, correction=option(0.8, 1.2)) for option in (Mis, Icepop)), "masks of one token")


def test_the_product_is_the_geometric_mean_to_the_power_of_the_length() -> None:
    mask = SCENE.rollouts.sampled_mask
    product_, mean = (
        option(SCENE.old_logprobs, SCENE.rollouts.sampler_logprobs, mask)
        for option in (TisSequence(HUGE), TisGeometric(HUGE))
    )
    assert_close(product_[mask], (mean ** mask.sum(dim=1, keepdim=True))[mask], EXACT, "power of the length")


def test_masking_and_truncating_agree_within_the_bounds() -> None:
    masked, capped = (run_scene(SCENE, correction=option)[1] for option in (Icepop(0.8, 1.25), TisToken(1.25, 0.8)))
    rho = (SCENE.old_logprobs - SCENE.rollouts.sampler_logprobs).exp()
    within = (rho >= 0.8) & (rho <= 1.25)
    assert_close(masked[within], capped[within], EXACT, "within the bounds")
    assert (masked[~within] == 0).all() and (capped[~within] != 0).any()


@by_surrogate
def test_token_k1_takes_the_gradient_of_the_tokens_icepop_takes_it_of(surrogate) -> None:
    # in the statistics, so that no row that left moves an advantage; originals counted, so that none moves a weight
    rejected = run_scene(SCENE, surrogate=surrogate, rejection=TokenK1(True, 0.8, 1.25, BoundForm.ratio))[1]
    masked = run_scene(SCENE, surrogate=surrogate, correction=Icepop(0.8, 1.25))[1]
    plain = run_scene(SCENE, surrogate=surrogate)[1]
    assert torch.equal(rejected == 0, masked == 0) and ((rejected == 0) & (plain != 0)).any()
    assert_close(rejected[rejected != 0], plain[rejected != 0], EXACT, "what stays is as it was, unweighted")


def kept_by(rejection, scene: Scene = SCENE) -> Tensor:
    """[N, T]; the sampled tokens that stay."""
    mask = scene.rollouts.sampled_mask
    return mask & rejection(scene.old_logprobs, scene.rollouts.sampler_logprobs, mask)


@pytest.mark.parametrize(
    ("token", "others"),
    [
        (TokenK2, (SequenceSumK2, SequenceMeanK2, SequenceMaxK2)),
        (TokenK3, (SequenceSumK3, SequenceMeanK3, SequenceMaxK3)),
    ],
    ids=["k2", "k3"],
)
def test_one_token_responses_make_sum_mean_and_largest_equal(token, others) -> None:
    scene = one_token_scene()
    expected = kept_by(token(False, 0.06), scene)
    assert expected.any() and not expected.all()
    for option in others:
        assert torch.equal(kept_by(option(False, 0.06), scene), expected)
    # Longer rows: the mean is at most the largest is at most the sum, so each keeps what the next keeps.
    by_sum, by_mean, by_largest = (kept_by(option(False, 0.06)) for option in others)
    assert not (by_sum & ~by_largest).any() and not (by_largest & ~by_mean).any()
    assert (by_mean & ~by_sum).any()


def test_a_row_whose_largest_token_stays_keeps_all_its_tokens() -> None:
    mask = SCENE.rollouts.sampled_mask
    for token, row in (
        (TokenK2(False, 0.1), SequenceMaxK2(False, 0.1)),
        (TokenK3(False, 0.1), SequenceMaxK3(False, 0.1)),
    ):
        whole = (kept_by(token) | ~mask).all(dim=1, keepdim=True)
        assert torch.equal(kept_by(row), whole & mask)


@pytest.mark.parametrize("option", [TokenK1, SequenceSumK1, SequenceMeanK1])
def test_symmetric_bounds_have_one_sense(option) -> None:
    for high, low, same in ((1.2, 1 / 1.2, True), (1.6, 0.9, False)):
        ratio, inverse = (kept_by(option(False, low, high, bounds)) for bounds in BoundForm)
        assert torch.equal(ratio, inverse) is same
        swapped = kept_by(option(False, 1 / high, 1 / low, BoundForm.inverse))
        assert torch.equal(swapped, ratio), "the inverse ratio within the inverse bounds"


def test_bounds_on_k1_of_a_sum_and_of_a_mean_are_bounds_on_the_weights() -> None:
    mask = SCENE.rollouts.sampled_mask
    for rejection, correction in (
        (SequenceSumK1(False, 0.8, 1.25, BoundForm.ratio), TisSequence(HUGE)),
        (SequenceMeanK1(False, 0.8, 1.25, BoundForm.ratio), TisGeometric(HUGE)),
        (TokenK1(False, 0.8, 1.25, BoundForm.ratio), TisToken(HUGE, 0.0)),
    ):
        weights = correction(SCENE.old_logprobs, SCENE.rollouts.sampler_logprobs, mask)
        kept = kept_by(rejection)
        assert kept.any() and torch.equal(kept, mask & (weights >= 0.8) & (weights <= 1.25))


REJECTIONS = (
    TokenK1(False, 0.7, 1.4, BoundForm.ratio),
    TokenK2(False, 0.1),
    SequenceMeanK1(False, 0.8, 1.2, BoundForm.ratio),
    SequenceSumK3(False, 0.1),
)


@pytest.mark.parametrize("rejection", REJECTIONS, ids=repr)
def test_no_rejection_acts_where_the_sampler_is_the_learner(rejection) -> None:
    scene = replace(SCENE, rollouts=replace(SCENE.rollouts, sampler_logprobs=SCENE.old_logprobs))
    results = [run_scene(scene, rejection=option, denominator=Survivors()) for option in (rejection, NoRejection())]
    assert_same(*results, "sampler is the old policy")


@pytest.mark.parametrize("rejection", REJECTIONS[2:], ids=repr)
def test_rejecting_is_masking_before_the_statistics_or_after_them(rejection) -> None:
    # A rejected row treated as a cut row: out of the loss, and of the statistics unless told otherwise.
    left = ~kept_by(rejection).any(dim=1).reshape(3, 4)
    assert left.any() and not left.all()
    scene = replace(SCENE, graded=replace(SCENE.graded, truncated=left))
    for in_statistics, truncation in ((False, MaskBefore()), (True, MaskAfter())):
        option = replace(rejection, rejected_in_statistics=in_statistics)
        assert_same(run_scene(SCENE, rejection=option), run_scene(scene, truncation=truncation), str(in_statistics))


def test_a_product_of_ratios_summed_over_a_response_is_the_clipped_objective_of_whole_responses() -> None:
    """d/dlogp of -(1/N) sum_i min(R_i A_i, clip(R_i, .8, 1.28) A_i), R_i = pi(o_i) / pi_old(o_i), by autograd."""
    run = make_run(importance=SequenceProduct(20.0), surrogate=Ppo(0.2, 0.28), aggregation=SequenceSum())
    inputs, leaf = inputs_of(run, SCENE), SCENE.logprobs.clone().requires_grad_()
    mask, advantages = inputs.loss_mask, inputs.advantages[:, 0]
    ratio = torch.where(mask, leaf - SCENE.old_logprobs, 0.0).sum(dim=1).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    (-objective.sum() / len(advantages)).backward()
    assert 0 < int((objective != ratio * advantages).sum()) < int((advantages != 0).sum()), "some are cut"
    assert_close(loss_and_gradient(run, inputs, SCENE.logprobs)[1], leaf.grad, EXACT, "gradient")


# --- shaping ------------------------------------------------------------------------------------------------


def test_the_ramp_on_right_answers_is_the_ramp_where_every_answer_is_right() -> None:
    ramps = [shape(6, 4, 1.0, 1.0, -1.0) for shape in (SoftOverlong, SoftOverlongCorrectOnly)]
    right = replace(SCENE, graded=replace(SCENE.graded, correctness=torch.ones(3, 4, dtype=F64)))
    assert_same(*(run_scene(right, reward_shaping=option) for option in ramps), "all right")
    mixed = [run_scene(SCENE, reward_shaping=option)[1] for option in ramps]
    assert (mixed[0] - mixed[1]).abs().max() > 1e-3


def test_l1_max_is_l1_exact_beyond_the_target_for_right_answers_up_to_a_constant() -> None:
    # right: clip(alpha (target - n) + delta, 0, 1) - 1 = -alpha |target - n| + delta - 1 for n >= target, unclipped
    lengths = [[4, 5, 7, 9], [3, 3, 3, 6]]
    graded = make_graded([[1, 1, 1, 1], [1, 1, 1, 1]], lengths=lengths, target_length=[[3] * 4] * 2)
    shapes = L1Exact(0.05, 1, 9), L1Max(0.05, 1, 9, 0.5)
    exact, largest = (shape(graded).reward for shape in shapes)
    assert_close(largest - exact, torch.full((2, 4), -0.5, dtype=F64), EXACT, "delta - 1")
    assert_close(*(advantages_of(shape(graded)) for shape in shapes), EXACT, "centred")


def test_l1_max_is_the_product_of_outcome_and_clip() -> None:
    graded = make_graded([[1, 0, 1, 1]], lengths=[[1, 50, 20, 100]], target_length=[[20] * 4])
    # .1 (20 - n) + .5: 2.4 -> 1; wrong -> 0; .5; -7.5 -> 0
    assert_close(L1Max(0.1, 1, 40, 0.5)(graded).reward, [[1, 0, 0.5, 0]], EXACT, "right * clip")


def test_equal_lengths_leave_a_group_as_it_was() -> None:
    level = make_graded([[1, 0, 1, 0]], lengths=[[5, 5, 5, 5]])
    assert_close(KimiLength(0.5, 0.0)(level).reward, level.reward, 0, "no shortest and no longest")
    for shape in (L1Exact(0.05, 1, 9), L1Max(0.05, 1, 9, 1.0), SoftOverlong(6, 4, 1.0, 1.0, -1.0)):
        right = make_graded([[1, 1, 1, 1]], lengths=[[5, 5, 5, 5]], target_length=[[3] * 4])
        assert (shape(right).reward != right.reward).all()
        assert (advantages_of(shape(right)) == 0).all(), "a tie of shaped rewards"
