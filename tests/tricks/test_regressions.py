"""Defects that other frameworks had or have, one test each, so that they cannot appear here unnoticed."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from compositions import run_of
from helpers import (
    F64,
    advantages_of,
    assert_close,
    batch_of_rows,
    inputs_of,
    loss_and_gradient,
    make_graded,
    make_rollouts,
    make_run,
    marked,
    random_scene,
    run_scene,
    share_of,
    step_of,
)
from omegaconf import OmegaConf

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.rules import IncompatibleRun, broken_rules, check_compatible
from grpo_lab.config.run_config import to_run
from grpo_lab.policy.batching import expand, make_minibatch, rollout_logprobs
from grpo_lab.rollout.grading import to_rollouts
from grpo_lab.run.evaluate import make_suites, pass_at_k, with_mix
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import BatchMean, GroupMean, LeaveOneOut, LengthWeighted, PassAtK, Weights
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.group_filter import Drop, Signal
from grpo_lab.tricks.importance import Sequence
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.tricks.rejection import SequenceMeanK1, SequenceSumK1, TokenK1
from grpo_lab.tricks.reward_shaping import L1Exact, SoftOverlong
from grpo_lab.tricks.scale import AllWrong, BatchStd, Deviation, GroupStd, InformativeShare, NoScale
from grpo_lab.tricks.scale import GroupMean as MeanScale
from grpo_lab.tricks.surrogate import Cispo, ClipCov, Gmpo, Kimi, KlCov, Ppo, Reinforce, Sapo, StepTokens
from grpo_lab.tricks.truncation import MaskBefore, Score
from grpo_lab.types import Completion, Microbatching, Problem, StopReason, to_groups

EXACT = 1e-12
MEANS = (SequenceMean(0.0), TokenMean(Scope.step), PromptMean())
AGGREGATIONS = (*MEANS, Constant(4, Width.budget), SequenceSum())
by_aggregation = pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)


def flat(rows: int, width: int, value: float = -1.0) -> torch.Tensor:
    return torch.full((rows, width), value, dtype=F64)


# --- advantages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "value"), [(12, 0.7), (8, 0.9)])
@pytest.mark.parametrize("eps", [1e-9, 1e-8, 1e-6])
def test_tied_fp32_groups_push_no_mass(size, value, eps) -> None:
    """OpenRLHF, oat, verl: fp32 mean of equal rewards is not the reward, and a small eps makes it 0.95."""
    rewards = torch.full((1, size), value)
    naive = (rewards - rewards.mean()) / (rewards.std() + eps)
    assert naive.abs().max() > 0, "the trap is not set here"
    graded = make_graded([[value] * size], dtype=torch.float32)
    assert advantages_of(graded, scale=GroupStd(1, eps, False, Singleton.zero)).tolist() == [[0.0] * size]


@pytest.mark.parametrize(
    "baseline",
    [
        LeaveOneOut(Singleton.zero),
        LengthWeighted(Singleton.zero),
        BatchMean(Weights.rows),
        BatchMean(Weights.tokens),
        PassAtK(2),
    ],
    ids=repr,
)
@pytest.mark.parametrize(
    "scale",
    [
        NoScale(),
        BatchStd(Deviation.centred, Weights.rows, recentre=False, ddof=0, eps=1e-9, floor=Floor.added),
        BatchStd(Deviation.raw, Weights.rows, recentre=False, ddof=1, eps=1e-9, floor=Floor.in_variance),
        BatchStd(Deviation.centred, Weights.tokens, recentre=True, ddof=1, eps=1e-9, floor=Floor.in_variance),
        InformativeShare(AlphaForm.informative_groups),
        MeanScale(AllWrong.minus_one),
    ],
    ids=lambda scale: "".join(map(str, [type(scale).__name__, getattr(scale, "of", "")])),
)
def test_tied_fp32_batches_push_no_mass(baseline, scale) -> None:
    """The same trap one level up: a whole batch of equal shaped rewards, whitened with a small eps."""
    lengths = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]] * 2
    graded = make_graded([[0.7] * 12] * 2, lengths=lengths, dtype=torch.float32)
    assert advantages_of(graded, baseline, scale).abs().max() == 0


def test_filters_see_tied_fp32_groups() -> None:
    """Filters on `std == 0`: twelve rewards of 0.7 in fp32 have a deviation above 0 and stay."""
    graded = make_graded([[0.7] * 12, [0.7] * 11 + [0.6]], dtype=torch.float32)
    trained = Drop(signal=Signal.reward)(graded).in_loss
    assert trained.any(dim=1).tolist() == [False, True]


def test_rows_are_not_dropped_before_the_groups_are_formed() -> None:
    """open-instruct #1794: four of eight cut rows were dropped first, then rows of two prompts were grouped."""
    # Microbatching rows are two in each group of four. Dropped first, [1, 0, 1, 1] would look like one group of four.
    graded = make_graded([[1, 0, 0, 0], [1, 1, 0, 0]], truncated=[[False, False, True, True]] * 2)
    expected = [[0.5, -0.5, 0, 0], [0, 0, 0, 0]]
    assert_close(advantages_of(MaskBefore()(graded)), expected, EXACT, "each group by itself")


def test_a_number_of_rows_that_is_no_multiple_of_the_group_is_refused() -> None:
    """open-instruct #1794: with a count that still divided, groups were silently mixed; here none leaves."""
    with pytest.raises(AssertionError, match="dropped"):
        to_groups(torch.zeros(7), 4)


def test_rejected_rows_stay_out_of_the_group_baseline() -> None:
    """verl #6375 and #6452, TRL, NeMo-RL: rows out of the loss still moved the baseline of the others."""
    # mean of the counted 1, 0 is .5; with the two rejected zeros it would be .25
    graded = make_graded([[1, 0, 0, 0]], truncated=[[False, False, True, True]])
    assert_close(advantages_of(MaskBefore()(graded))[0, :2], [0.5, -0.5], EXACT, "counted rows")


def test_excluded_rows_do_not_enter_as_zeros() -> None:
    """AReaL mask_no_eos_with_zero: the reward of an unfinished row became 0 and stayed in the statistics."""
    # Rewards +1, -1 and an excluded row. As a zero it would leave the mean at 0 but the deviation at sqrt(2/3).
    graded = make_graded([[1, -1, 1]], truncated=[[False, False, True]])
    got = advantages_of(MaskBefore()(graded), scale=GroupStd(0, 0.0, False, Singleton.zero))
    assert_close(got, [[1, -1, 0]], EXACT, "deviation 1, not sqrt(2/3)")


@pytest.mark.parametrize("baseline", [GroupMean(Singleton.zero), LeaveOneOut(Singleton.zero)], ids=repr)
@pytest.mark.parametrize(
    "scale", [NoScale(), GroupStd(0, 1e-6, False, Singleton.zero), GroupStd(1, 1e-6, False, Singleton.zero)], ids=repr
)
def test_a_single_row_has_no_advantage(baseline, scale) -> None:
    """verl: the only row of a group got its raw reward in `grpo` and the looped `rloo`, 0 in the vectorised one."""
    assert advantages_of(make_graded([[0.9]]), baseline, scale).tolist() == [[0.0]]


def test_the_rarest_success_is_worth_most() -> None:
    """NeMo-RL: leave-one-out deviation of the only success is 0, so 1 of 8 got 1.0 and 2 of 8 got 2.27."""
    # sqrt(7/1), sqrt(6/2), sqrt(5/3)
    scale = GroupStd(0, 0.0, False, Singleton.zero)
    worth = [advantages_of(make_graded([[1] * c + [0] * (8 - c)]), scale=scale)[0, 0] for c in (1, 2, 3)]
    assert_close(worth, [7**0.5, 3**0.5, (5 / 3) ** 0.5], EXACT, "success of 1, 2, 3 in 8")


def test_leave_one_out_with_a_deviation_is_not_inert() -> None:
    """AReaL: the deviation was taken around the leave-one-out mean, so the option changed nothing."""
    graded, scale = make_graded([[1, 0, 0, 0, 1, 0, 0, 0]]), GroupStd(1, 0.0, False, Singleton.zero)
    centred = advantages_of(graded, GroupMean(Singleton.zero), scale)
    assert_close(advantages_of(graded, LeaveOneOut(Singleton.zero), scale), 8 / 7 * centred, EXACT, "8/7")


def test_response_lengths_do_not_recentre_advantages() -> None:
    """verl reinforce_plus_plus_baseline: [1, 1, 0, 0] of lengths 100, 10, 10, 10 became .42, .42, -2.34, -2.34."""
    graded = make_graded([[1, 1, 0, 0]], lengths=[[100, 10, 10, 10]])
    assert_close(
        advantages_of(graded, scale=GroupStd(0, 0.0, False, Singleton.zero)), [[1, 1, -1, -1]], EXACT, "by rows"
    )


@pytest.mark.parametrize("width", [4, 16])
def test_padding_does_not_enter_advantage_statistics(width) -> None:
    """SkyRL advantage_batch_normalize: the mean ran over padding, so the padded width changed advantages."""
    rollouts = make_rollouts([3, 4, 1, 2], 2, width=width)
    spread = expand(advantages_of(make_graded([[1, 0], [0, 1]])), rollouts.sampled_mask)
    assert_close(spread[:, 0], [0.5, -0.5, -0.5, 0.5], EXACT, "first tokens")
    assert_close(spread.sum(), 1.5 - 2 - 0.5 + 1, EXACT, "3, 4, 1 and 2 tokens, padding 0")


def test_the_same_prompt_drawn_twice_is_two_groups() -> None:
    """NeMo-RL: groups were found by their prompt tokens, so one prompt drawn twice became one group."""
    prompts = [(5, 6), (5, 6)]
    rollouts = make_rollouts([2, 2, 1, 3], 2, prompts=prompts)
    run = make_run(aggregation=PromptMean())
    graded = make_graded([[1, 0], [1, 1]])
    assert_close(advantages_of(graded), [[0.5, -0.5], [0, 0]], EXACT, "two baselines")
    inputs = replace(step_of([2, 2, 1, 3], [0.5, -0.5, 0, 0], 2), rollouts=rollouts)
    totals = make_minibatch(inputs, range(2), run.denominator, Microbatching(10**9, 192))[0].totals
    assert totals.num_problems == 2
    assert sorted(totals.problem_tokens.tolist()) == [4, 4, 4, 4]


def test_dr_grpo_changes_both_the_scale_and_the_aggregation() -> None:
    """OpenRLHF: `dr_grpo` left the aggregation as it was, so half of the method was missing."""
    overrides = {
        key.removeprefix("override /"): value
        for entry in OmegaConf.load(conf_folder() / "recipe" / "dr_grpo.yaml").defaults
        for key, value in entry.items()
    }
    assert overrides["scale"] == "none"
    assert overrides["aggregation"] == "constant"


def test_whitening_over_tokens_is_an_option_and_never_a_side_effect() -> None:
    """verl reinforce_plus_plus_baseline: token weights recentred every row; only batch_std_tokens does so here."""
    # mean (110 - 20) / 2 / 130 = .346, unbiased variance 130/129 * (.25 - .346^2) = .131: .154 / .362, -.846 / .362
    graded = make_graded([[1, 1, 0, 0]], lengths=[[100, 10, 10, 10]])
    tokens = BatchStd(Deviation.centred, Weights.tokens, recentre=True, ddof=1, eps=1e-8, floor=Floor.in_variance)
    assert_close(advantages_of(graded, scale=tokens), [[0.42, 0.42, -2.34, -2.34]], 0.01, "as verl whitens")
    rows = BatchStd(Deviation.centred, Weights.rows, recentre=False, ddof=0, eps=0.0, floor=Floor.added)
    assert_close(advantages_of(graded, scale=rows), [[1, 1, -1, -1]], EXACT, "one response, one weight")


@pytest.mark.parametrize("padding", [0, 12])
def test_padding_does_not_enter_a_whitening_over_tokens(padding) -> None:
    """SkyRL advantage_batch_normalize: width 4 gave -1.65 and width 16 gave -1.16 for the same row."""
    tokens = BatchStd(Deviation.centred, Weights.tokens, recentre=True, ddof=0, eps=0.0, floor=Floor.added)
    scene = random_scene(4, 3, 4, 6, padding=padding, junk=7.0)
    inputs = inputs_of(make_run(scale=tokens), scene)
    spread = inputs.advantages[inputs.loss_mask]
    assert_close([spread.mean(), spread.var(correction=0)], [0, 1], 1e-9, "over tokens")


def test_two_successes_are_paid_for_passing_at_k() -> None:
    """verl grpo_passk: only a lone success was paid, so 2 right answers of 4 gave zeros."""
    # n 4, wrong 2, k 2: fail 1/6, sigma sqrt(5)/6; right (1/6) / sigma, wrong (1/6 - 1/3) / sigma
    got = advantages_of(make_graded([[1, 1, 0, 0]]), PassAtK(2))
    assert_close(got, [[5**-0.5, 5**-0.5, -(5**-0.5), -(5**-0.5)]], EXACT, "both successes")


def test_gpg_alpha_counts_groups_with_signal_and_not_scores_that_are_not_zero() -> None:
    """verl gpg: alpha was 4 for 2 right of 8 and 1 for the same answers scored -1 and 1."""
    outcome = [[1, 1, 0, 0], [0, 0, 0, 0]]
    scored = make_graded(outcome), make_graded([[2 * r - 1 for r in group] for group in outcome])
    for graded, by_rows in zip(scored, (4, 1)):
        centred = advantages_of(graded)
        ours = advantages_of(graded, scale=InformativeShare(AlphaForm.informative_groups))
        assert_close(ours, 2 * centred, EXACT, "2 groups, 1 with signal")
        theirs = advantages_of(graded, scale=InformativeShare(AlphaForm.nonzero_rewards))
        assert_close(theirs, by_rows * centred, EXACT, "only by verl's convention")


def test_a_length_penalty_does_not_grow_with_what_the_group_earns() -> None:
    """prime-rl: the penalty was multiplied by the group's mean reward, so a solved prompt paid most for length."""
    lengths = [[2, 10, 18, 10]] * 2
    graded = make_graded([[0, 0, 0, 1], [1, 0, 1, 1]], lengths=lengths, target_length=[[10] * 4] * 2)
    for shaping in (SoftOverlong(20, 5, 0.5, 1.0, -1.0), L1Exact(0.03, 8, 32)):
        added = shaping(graded).reward - graded.reward
        assert_close(added[0], added[1], EXACT, "the same lengths cost the same")
        assert added.min() < -0.1


@pytest.mark.extended
def test_maxrl_refuses_rewards_below_zero() -> None:
    """SkyRL MaxRL: of rewards 1, -1, -1, -1 the right answer got -3 and the wrong ones 1."""
    rewards = torch.tensor([1.0, -1, -1, -1])
    naive = (rewards - rewards.mean()) / rewards.mean()
    assert_close(naive, [-3, 1, 1, 1], 1e-6, "the trap")
    with pytest.raises(IncompatibleRun, match="right answers are punished"):
        check_compatible(to_run(compose_config(["recipe=maxrl", "reward=strict_plus_minus"])))
    with pytest.raises(AssertionError, match="refuses"):
        MeanScale(AllWrong.zero)(torch.zeros(1, 4, dtype=F64), make_graded([[1, -1, -1, -1]]))


def test_groups_of_unequal_counts_keep_their_own_baselines() -> None:
    """slime #2062: once groups were uneven, one baseline over everything took their place."""
    counted = [[True] * 4, [True, True, False, False]]
    graded = make_graded([[1, 0, 0, 0], [1, 0, 1, 1]], in_statistics=counted)
    for baseline in (GroupMean(Singleton.zero), LengthWeighted(Singleton.zero)):
        got = advantages_of(graded, baseline)
        assert_close(got, [[0.75, -0.25, -0.25, -0.25], [0.5, -0.5, 0, 0]], EXACT, "1/4 and 1/2")


def test_a_baseline_of_the_batch_goes_with_a_deviation_of_the_group() -> None:
    """ROLL: the two shapes did not fit, and its grpo estimator put both back to the group."""
    # mean of the batch 5/8; deviations sqrt(3)/4 and 1/2
    graded = make_graded([[1, 1, 1, 0], [1, 1, 0, 0]])
    got = advantages_of(graded, BatchMean(Weights.rows), GroupStd(0, 0.0, False, Singleton.zero))
    right, wrong = 0.375, -0.625
    expected = [[right, right, right, wrong], [right, right, wrong, wrong]]
    expected = torch.tensor(expected, dtype=F64) / torch.tensor([[3**0.5 / 4], [0.5]], dtype=F64)
    assert_close(got, expected, EXACT, "each axis as chosen")


@pytest.mark.parametrize("bounds", [TokenK1, SequenceSumK1], ids=lambda cls: cls.__name__)
def test_rejected_rows_leave_the_baseline_unless_asked_to_stay(bounds) -> None:
    """verl PR 6452, TRL, NeMo-RL: a rejected row's reward still moved its siblings."""
    # the last two rows of rewards 0 are rejected: mean 1/2 of the others, 1/4 with them
    rollouts = make_rollouts([2] * 4, 4)
    log_rho = torch.tensor([0.0, 0.0, 3.0, -3.0], dtype=F64)[:, None].expand(4, 2)
    for in_statistics, expected in ((False, [0.5, -0.5, 0, 0]), (True, [0.75, -0.25, -0.25, -0.25])):
        rejection = bounds(rejected_in_statistics=in_statistics, low=0.5, high=2.0, bounds=BoundForm.ratio)
        stays = rejection(log_rho, torch.zeros(4, 2, dtype=F64), rollouts.sampled_mask)
        settled = rejection.settle(make_graded([[1, 0, 0, 0]]), stays)
        assert settled.in_loss.tolist() == [[True, True, False, False]]
        assert_close(advantages_of(settled), [expected], EXACT, f"in statistics: {in_statistics}")


# --- denominators -------------------------------------------------------------------------------------------


@by_aggregation
def test_the_loss_does_not_grow_with_the_number_of_microbatches(aggregation) -> None:
    """verl GMPO #7913, TRL bnpo: a mean per microbatch, so 4 microbatches of 2 rows gave 4 times the loss."""
    lengths, run = [1, 4, 2, 3, 4, 1, 2, 2], make_run(aggregation=aggregation, surrogate=Reinforce())
    inputs = step_of(lengths, [1, -0.5, 0.2, 0.7, 1, 1, -1, 0.1], 4)
    whole, rows = (loss_and_gradient(run, inputs, flat(8, 4), budget) for budget in (10**9, 1))
    assert_close(rows[0], whole[0], EXACT, "loss")
    assert_close(rows[1], whole[1], EXACT, "gradient")


def test_a_token_weighs_the_same_in_a_full_and_in_an_almost_empty_microbatch() -> None:
    """TRL bnpo: a token mean per microbatch weighs a token by how few tokens it was computed with."""
    # 9 tokens: every one weighs 1/9, though the row of one token is alone in its microbatch.
    run = make_run(aggregation=TokenMean(Scope.step))
    gradient = loss_and_gradient(run, step_of([8, 1], [1, 1], 2), flat(2, 8), 9)[1]
    assert_close(gradient[gradient != 0], [-1 / 9] * 9, EXACT, "one weight")


@pytest.mark.parametrize("width", [4, 8])
def test_the_padded_width_is_not_the_constant_of_dr_grpo(width) -> None:
    """verl #3741, #5366, #6157: without a set factor the sum was divided by the microbatch's padded width."""
    # (3 + 4) tokens of loss 1 over 2 rows times a budget of 10
    run = make_run(aggregation=Constant(10, Width.budget))
    inputs = step_of([3, 4], [-1, -1], 2, width=width)
    leaf = flat(2, width).requires_grad_()
    share = share_of(run, batch_of_rows(run, inputs, [0, 1]), leaf)
    assert_close(share, 7 / 20, EXACT, "budget, not width")


def test_the_constant_divides_by_the_number_of_rows_too() -> None:
    """ROLL seq-mean-token-sum-norm: divided by the width alone, so 8 sequences gave 8.0."""
    run = make_run(aggregation=Constant(4, Width.budget))
    assert_close(loss_and_gradient(run, step_of([4] * 8, [-1] * 8, 4), flat(8, 4))[0], 1.0, EXACT, "8 full rows")


@by_aggregation
def test_each_optimiser_step_divides_by_its_own_counts(aggregation) -> None:
    """TRL #5619: the token count of the whole generation batch stood under the loss of each of its steps."""
    lengths, advantages = [1, 4, 2, 2, 3, 3, 4, 4], [-1.0] * 8
    run, inputs = make_run(aggregation=aggregation), step_of(lengths, advantages, 2)
    leaf = flat(8, 4)
    for problems in (range(0, 2), range(2, 4)):
        batches = make_minibatch(inputs, problems, run.denominator, Microbatching(3, 192))
        step = sum(share_of(run, batch, leaf) for batch in batches)
        rows = slice(2 * problems.start, 2 * problems.stop)
        alone = loss_and_gradient(run, step_of(lengths[rows], advantages[rows], 2, width=4), flat(4, 4))[0]
        assert_close(step, alone, EXACT, f"problems {problems}")


@by_aggregation
def test_one_rule_of_counting_for_every_aggregation(aggregation) -> None:
    """verl: its sequence means divided by all rows and its token mean by the survivors, in the same run."""
    # Half the rows of each group leave, all rows are 4 tokens of loss 1: originals give half of the survivors.
    inputs = step_of([4] * 4, [-1] * 4, 2, in_loss=[True, False, True, False])
    original, survivors = (
        loss_and_gradient(make_run(aggregation=aggregation, denominator=denominator), inputs, flat(4, 4))[0]
        for denominator in (Original(), Survivors())
    )
    assert_close(original, survivors / 2, EXACT, "half of the rows, tokens and tokens a prompt")
    if aggregation in MEANS:
        assert_close(survivors, 1.0, EXACT, "a mean of ones")


def test_a_masked_row_with_a_huge_loss_is_not_in_the_numerator() -> None:
    """ROLL token-mean, PR #444: the sum above the line was not masked, so a masked loss of 100 gave 101."""
    for aggregation in AGGREGATIONS:
        run = make_run(aggregation=aggregation, surrogate=Reinforce(), kl=K3Loss(1.0, 20.0, 0.0))
        results = []
        for junk in (-1.0, -1e4):
            logprobs = flat(2, 3)
            logprobs[1] = junk
            inputs = step_of([2, 3], [1, 1], 2, in_loss=[True, False], ref_logprobs=flat(2, 3))
            # The advantage of the masked row is put back: the mask alone must keep it out.
            inputs = replace(inputs, advantages=torch.ones(2, 3, dtype=F64))
            leaf = logprobs.clone().requires_grad_()
            share = share_of(run, batch_of_rows(run, inputs, [0, 1]), leaf)
            share.backward()
            results.append((share, leaf.grad))
        assert_close(results[1][0], results[0][0], 0, f"loss of {aggregation}")
        assert_close(results[1][1], results[0][1], 0, f"gradient of {aggregation}")


def test_padding_is_not_counted_and_the_end_of_text_is() -> None:
    """verl #3805 counted padding after a response; TRL's completion mask ends with the first end of text."""
    problems = [Problem(7, "q", "a", 1)]
    completions = [
        Completion.of((4, 2), (-0.1, -0.2), (0, 0), StopReason.EOS),  # 2 is the end of text
        Completion.of((4, 5, 6, 8), (-0.1,) * 4, (0,) * 4, StopReason.LENGTH),
    ]
    rollouts = to_rollouts(problems, [(1,)], 2, completions)
    assert rollouts.lengths.tolist() == [2, 4]
    assert rollouts.sampled_mask[0].tolist() == [True, True, False, False]
    inputs = replace(step_of([2, 4], [1, 1], 2), rollouts=rollouts)
    for denominator in (Original(), Survivors()):
        totals = make_minibatch(inputs, range(1), denominator, Microbatching(10**9, 192))[0].totals
        assert (totals.num_tokens, totals.num_rows) == (6, 2)


def test_padding_is_not_scored() -> None:
    """verl #3805: log-probs of padding entered sums; here they are 0 whatever the model says."""

    class Always(torch.nn.Module):
        def forward(self, input_ids, use_cache, logits_to_keep):
            logits = torch.zeros(*input_ids.shape, 9)[:, -logits_to_keep:]
            return type("Output", (), {"logits": logits})()

    rollouts = make_rollouts([1, 3], 2, tokens=torch.ones(2, 3, dtype=torch.long))
    scored, spread = rollout_logprobs(
        Always(), rollouts, 1.0, Fp32(LmHead.same, 1e-3), Microbatching(100, 192), torch.device("cpu")
    )
    assert_close(scored, [[-math.log(9), 0, 0], [-math.log(9)] * 3], 1e-6, "uniform over nine tokens")
    assert_close(spread, [[math.log(9), 0, 0], [math.log(9)] * 3], 1e-6, "and their entropy")


@by_aggregation
@pytest.mark.parametrize("surrogate", [Gmpo(0.4, 0.4), Sapo(1.0, 1.05), Kimi(0.1)], ids=lambda s: type(s).__name__)
def test_no_surrogate_brings_its_own_mean_over_a_microbatch(surrogate, aggregation) -> None:
    """verl GMPO #7913, #5614, TRL #6095: torch.mean inside the loss gave 4 times the loss for 4 microbatches."""
    scene = random_scene(6, 2, 4, 5)
    whole, rows = (run_scene(scene, budget, surrogate=surrogate, aggregation=aggregation) for budget in (10**9, 1))
    assert_close(rows[0], whole[0], EXACT, "loss")
    assert_close(rows[1], whole[1], EXACT, "gradient")


@pytest.mark.parametrize(
    "options",
    [{"surrogate": Gmpo(0.4, 0.4)}, {"surrogate": Sapo(1.0, 1.05)}, {"importance": Sequence(20.0)}],
    ids=lambda options: next(iter(options)) + type(next(iter(options.values()))).__name__,
)
def test_a_surrogate_does_not_choose_the_aggregation(options) -> None:
    """verl: GSPO and SAPO forced a mean per sequence whatever loss_agg_mode said."""
    scene = random_scene(6, 2, 4, 5)
    means, sums = (run_scene(scene, aggregation=each, **options)[1] for each in (SequenceMean(0.0), SequenceSum()))
    lengths = scene.rollouts.sampled_mask.sum(dim=1, keepdim=True)
    assert_close(lengths * means, sums, 1e-9, "each row by its own length")
    assert (means - sums).abs().max() > 1e-3


@by_aggregation
def test_padding_does_not_enter_a_kl_term_beside_a_ratio_of_responses(aggregation) -> None:
    """TRL LUSPO: with a KL term the loss became one per token and its mean ran over padding."""
    results = [
        run_scene(scene, importance=Sequence(20.0), kl=K3Loss(0.5, 20.0, 0.0), aggregation=aggregation)
        for scene in (random_scene(6, 2, 4, 5), random_scene(6, 2, 4, 5, padding=9, junk=-3.0))
    ]
    assert_close(results[1][0], results[0][0], EXACT, "loss")
    assert_close(results[1][1][:, :5], results[0][1], EXACT, "gradient")


# --- surrogate, correction, kl ------------------------------------------------------------------------------


def test_a_negative_advantage_has_no_second_clip() -> None:
    """verl: its dual clip at 3 cannot be switched off, so `ppo` there is another method."""
    # ratio 10, A = -1: -min(-10, -1.2) = 10
    run, inputs = make_run(), step_of([1], [-1], 1, old_logprobs=flat(1, 1, -4.0))
    loss, gradient = loss_and_gradient(run, inputs, flat(1, 1, -4 + math.log(10)))
    assert_close([loss, gradient], [10.0, 10.0], 1e-9, "loss and gradient of ratio 10")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("gap", [200.0, -200.0])
def test_extreme_ratios_stay_finite_in_fp32(advantage, gap) -> None:
    """Log-ratios without a limit: exp(200) is infinite in fp32 and 0 * inf is NaN in every row's gradient."""
    for surrogate in (Ppo(0.2, 0.2), Ppo(0.2, 0.28)):
        run = make_run(surrogate=surrogate, kl=K3Loss(0.1, 20.0, 0.0))
        old = torch.full((1, 2), -250.0)
        inputs = step_of([2], [advantage], 1, old_logprobs=old, ref_logprobs=old)
        inputs = replace(inputs, advantages=inputs.advantages.float())
        loss, gradient = loss_and_gradient(run, inputs, old + gap)
        assert torch.isfinite(loss)
        assert torch.isfinite(gradient).all()


def test_the_kl_term_is_not_multiplied_by_rollout_weights() -> None:
    """ms-swift: the KL term carried the sampler-correction weight of its token."""
    scene = random_scene(2, 2, 3, 4)
    quiet = replace(scene, graded=replace(scene.graded, reward=torch.ones(2, 3, dtype=F64)))  # advantages 0
    run = make_run(kl=K3Loss(0.1, 20.0, 0.0))
    weighted = make_run(kl=K3Loss(0.1, 20.0, 0.0), correction=TisToken(cap=2.0, floor=0.0))
    assert (inputs_of(weighted, quiet).correction_weights - 1).abs().max() > 0.1
    first, second = (loss_and_gradient(r, inputs_of(r, quiet), quiet.logprobs) for r in (run, weighted))
    assert_close(second[0], first[0], 0, "loss")
    assert_close(second[1], first[1], 0, "gradient")


@by_aggregation
def test_the_kl_term_is_aggregated_like_the_loss(aggregation) -> None:
    """SkyRL: KL was always a mean per sequence and microbatch, 16384 times too strong beside a scaled loss."""
    # advantages 0 and k3 the same number k on every token: the loss is k times what a token loss of 1 gives
    lengths, ref = [1, 4, 2, 3], flat(4, 4, -1 + math.log(2))
    run = make_run(aggregation=aggregation, kl=K3Loss(1.0, 20.0, 0.0))
    penalty = loss_and_gradient(run, step_of(lengths, [0] * 4, 2, ref_logprobs=ref), flat(4, 4))[0]
    ones = loss_and_gradient(make_run(aggregation=aggregation), step_of(lengths, [-1] * 4, 2), flat(4, 4))[0]
    assert_close(penalty, (1 - math.log(2)) * ones, EXACT, "k3 at x = 2")


def test_kl_without_a_reference_is_an_error() -> None:
    """AReaL: a missing reference became log-probs of zero and a penalty towards certainty."""
    run = make_run(kl=K3Loss(0.1, 20.0, 0.0))
    with pytest.raises(AssertionError, match="needs_reference"):
        loss_and_gradient(run, step_of([1, 2], [1, -1], 2), flat(2, 2))


def test_correction_weights_stop_at_the_cap() -> None:
    """OpenRLHF seq-mask-tis: the weights were called truncated and were not."""
    mask = torch.ones(1, 2, dtype=torch.bool)
    weights = TisToken(cap=2.0, floor=0.0)(flat(1, 2, -1.0), flat(1, 2, -2000.0), mask)
    assert weights.tolist() == [[2.0, 2.0]]


def test_correction_weights_are_learner_over_sampler() -> None:
    """verl token_k1: bounds acted on the inverted ratio, so 5.0 passed and 0.5 was rejected."""
    old, sampler = flat(1, 1, math.log(0.2)), flat(1, 1, math.log(0.4))
    weights = TisToken(cap=10.0, floor=0.0)(old, sampler, torch.ones(1, 1, dtype=torch.bool))
    assert_close(weights, [[0.5]], EXACT, ".2 / .4: the sampler drew this token too often")


def gradient_at(surrogate, ratio: float, advantage: float, importance=None) -> float:
    """d loss / d logprob of one token at this ratio."""
    run = make_run(surrogate=surrogate, **({"importance": importance} if importance else {}))
    inputs = step_of([1], [advantage], 1, old_logprobs=flat(1, 1, -4.0))
    return loss_and_gradient(run, inputs, flat(1, 1, -4 + math.log(ratio)))[1].item()


def warned(*overrides: str) -> str:
    return "\n".join(check_compatible(run_of(*overrides)))


@pytest.mark.extended
def test_a_cap_of_a_fifth_is_plain_reinforce_at_a_fifth_and_said_so() -> None:
    """TRL CISPO: the default epsilon_high of 0.2 was an absolute cap, so every weight was 0.2."""
    for ratio in (0.7, 1.0, 3.0):
        assert_close(gradient_at(Cispo(0.2, 1.0, CapForm.absolute), ratio, 1.0), -0.2, EXACT, "every weight")
    assert "loss_is_scaled" in {
        rule.name for rule in broken_rules(run_of("surrogate=cispo", "surrogate.cap=.2")).warnings
    }
    assert "lowers the learning rate" in warned("surrogate=cispo", "surrogate.cap=0.2")
    assert "lowers the learning rate" not in warned("surrogate=cispo")


def test_the_four_readings_of_the_cispo_cap_have_names() -> None:
    """TRL caps at eps, open-instruct at 1 + eps, verl and slime on both sides, SkyRL at 1 + 4 with no lower bound."""
    # ratios .5, 1.1 and 9 under each
    readings = {
        Cispo(5.0, 1.0, CapForm.absolute): (0.5, 1.1, 5.0),
        Cispo(0.272, 1.0, CapForm.one_plus): (0.5, 1.1, 1.272),
        Cispo(1.2, 0.2, CapForm.absolute): (0.8, 1.1, 1.2),
        Cispo(4.0, 1.0, CapForm.one_plus): (0.5, 1.1, 5.0),
    }
    for surrogate, weights in readings.items():
        for ratio, weight in zip((0.5, 1.1, 9.0), weights):
            assert_close(gradient_at(surrogate, ratio, 1.0), -weight, EXACT, f"{surrogate} at {ratio}")
    assert (run_of("surrogate=cispo").surrogate.largest, run_of("surrogate=cispo").surrogate.clip_low) == (5, 1)


def test_clamping_a_weight_is_not_zeroing_it() -> None:
    """SkyRL rollout_is: its words said that zeroing and clamping have the same gradient."""
    assert gradient_at(Ppo(0.2, 0.2), 9.0, 1.0) == 0
    assert_close(gradient_at(Cispo(5.0, 1.0, CapForm.absolute), 9.0, 1.0), -5.0, EXACT, "bounded, not gone")
    mask = torch.ones(1, 1, dtype=torch.bool)
    beyond = flat(1, 1, math.log(9.0)), flat(1, 1, 0.0), mask
    assert (TisToken(5.0, 0.0)(*beyond).item(), Icepop(0.5, 5.0)(*beyond).item()) == (5.0, 0.0)


def test_the_clip_of_a_response_ratio_is_as_narrow_as_that_ratio_moves() -> None:
    """GSPO in verl, TRL and SkyRL: the widths stayed at 0.2, which the mean of many logs never reaches."""
    surrogate = run_of("recipe=gspo").surrogate
    lengths, importance = [100], Sequence(20.0)
    inputs = step_of(lengths, [1.0], 1, old_logprobs=flat(1, 100, -1.0))
    drifted = flat(1, 100, -1.0 + 1e-3)  # each token by a thousandth
    for each, cut in ((surrogate, True), (Ppo(0.2, 0.2), False)):
        gradient = loss_and_gradient(make_run(surrogate=each, importance=importance), inputs, drifted)[1]
        assert bool((gradient == 0).all()) is cut


def test_response_ratios_weighed_by_length_are_warned_of() -> None:
    """TRL: importance_sampling_level=sequence with a sum over tokens weighs each response by its length."""
    assert "weighs that ratio by the response's length" in warned("recipe=gspo", "aggregation=token_mean")
    assert "length" not in warned("recipe=gspo")


def test_sapo_has_slope_one_at_ratio_one_for_both_signs() -> None:
    """SAPO without its factor 4 / tau scales the loss by tau / 4, differently for right and wrong tokens."""
    for advantage in (1.0, -1.0, 0.5):
        assert_close(gradient_at(Sapo(1.0, 1.05), 1.0, advantage), -advantage, 1e-6, "4 / tau * tau / 4")
        assert_close(gradient_at(Sapo(3.0, 0.5), 1.0, advantage), -advantage, 1e-6, "whatever tau")


@pytest.mark.extended
def test_dppo_weighs_a_detached_ratio_and_has_a_cap_of_its_own() -> None:
    """verl DPPO: its large threshold came from clip_ratio_c, 3 by default; SkyRL and prime-rl leave the ratio live."""
    surrogate = run_of("surrogate=dppo").surrogate
    assert surrogate.cap == 20.0 and run_of("surrogate=dual_clip").surrogate.bound == 3.0
    # exp(-4) times 8 is .147, a move of .128 within .2: nothing is cut
    assert_close(gradient_at(surrogate, 8.0, 1.0), -8.0, 1e-9, "beyond 3, below 20")
    # with the ratio live the gradient of r * A * logp would hold r * (1 + logp)
    assert_close(gradient_at(surrogate, 2.0, 1.0), -2.0, 1e-9, "weight times A")


COVARIED = random_scene(7, 4, 4, 8)
COVARIANCE_SURROGATES = (ClipCov(0.2, 0.2, 0.2, -9.0, 9.0, Scope.step), KlCov(0.2, 1.0, Scope.step))
by_covariance = pytest.mark.parametrize("surrogate", COVARIANCE_SURROGATES, ids=lambda s: type(s).__name__)


@by_covariance
def test_covariances_are_of_the_step_and_not_of_a_microbatch(surrogate) -> None:
    """verl clip_cov and kl_cov: means over each microbatch, so its size chose the tokens."""
    whole, rows = (run_scene(COVARIED, budget, surrogate=surrogate)[1] for budget in (10**9, 1))
    assert_close(rows, whole, EXACT, "the same tokens")
    theirs = replace(surrogate, scope=Scope.microbatch)
    split = run_scene(COVARIED, 1, surrogate=theirs)[1]
    assert (split - whole).abs().max() > 1e-3, "verl's convention differs here"


@by_covariance
def test_the_drawn_tokens_leave_the_global_random_state_alone_and_do_not_read_it(surrogate) -> None:
    """verl clip_cov: torch.randperm on the global generator, so any other draw changed the tokens."""
    gradients = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        gradients.append(run_scene(COVARIED, surrogate=surrogate)[1])
        assert torch.equal(torch.get_rng_state(), before)
    assert_close(gradients[0], gradients[1], 0, "counter-based")


@pytest.mark.extended
def test_a_penalty_on_covariance_is_inert_on_policy_and_warned_of() -> None:
    """verl kl_cov: with one on-policy update the gradient is the same for coef 0 and 1, and nothing said so."""
    scene = replace(COVARIED, old_logprobs=COVARIED.logprobs)
    small, large = (run_scene(scene, surrogate=KlCov(0.2, coef, Scope.step))[1] for coef in (1e-9, 1.0))
    assert_close(small, large, EXACT, "|log ratio| is flat at 0")
    assert "no clip, gate or penalty on drift can act" in warned("surrogate=kl_cov", "updates=one")
    assert "no clip, gate or penalty" not in warned("surrogate=kl_cov")
    assert "no clip, gate or penalty" not in warned("surrogate=clip_cov", "updates=one")


@by_aggregation
@by_covariance
def test_no_aggregation_moves_the_tokens_of_high_covariance(surrogate, aggregation) -> None:
    """SkyRL: advantages were divided by the token count first, so that no covariance reached its bounds."""
    run = make_run(surrogate=surrogate, aggregation=aggregation)
    inputs = inputs_of(run, COVARIED)
    batch = make_minibatch(inputs, range(4), run.denominator, Microbatching(10**9, 192))
    plain = make_run(surrogate=surrogate)
    first, second = (marked(each, batch, COVARIED.logprobs, COVARIED.rollouts)[0].marked for each in (run, plain))
    assert torch.equal(first, second) and first.any()


def test_covariances_reach_the_published_bounds_with_the_advantages_as_they_are() -> None:
    """SkyRL clip_cov: with divided advantages its clip fraction was 0 for every loss_reduction."""
    shipped = run_of("surrogate=clip_cov").surrogate
    logprobs, advantages = torch.tensor([-4.0, -0.1] * 50, dtype=F64), torch.tensor([-1.0, 1.0] * 50, dtype=F64)
    # each covariance is 1.95 * 1
    zero = torch.zeros(100, dtype=F64)
    tokens = StepTokens(logprobs, zero, advantages, torch.linspace(0, 1, 100, dtype=F64))
    assert shipped.mark(tokens).sum() == 1, "one token of a hundred, rounded up"
    assert not shipped.mark(replace(tokens, advantages=advantages / 16384)).any()


def test_the_covariance_penalty_is_divided_like_the_loss() -> None:
    """SkyRL kl_cov: the penalty was not divided, 16384 times too strong beside a loss that was."""
    surrogate = KlCov(0.2, 1.0, Scope.step)
    summed, divided = (
        run_scene(COVARIED, surrogate=surrogate, aggregation=each)[1]
        for each in (SequenceSum(), Constant(16384, Width.budget))
    )
    assert_close(16384 * divided, summed, 1e-9, "penalty and policy gradient alike")


def test_kimi_squares_the_log_ratio_of_the_response() -> None:
    """verl dro, ROLL kimi15: the sum of the tokens' squares, .079 where the square of the sum is .827."""
    # 200 tokens that drifted by .005: the square of the sum is 1, the sum of the squares .005
    run = make_run(surrogate=Kimi(0.1), aggregation=SequenceSum())
    inputs = step_of([200], [0.0], 1, old_logprobs=flat(1, 200, -1.0))
    loss, gradient = loss_and_gradient(run, inputs, flat(1, 200, -0.995))
    assert_close(loss, 0.1 / 2 * 1.0, 1e-9, "tau / 2 * 1, and not tau / 2 * .005")
    assert_close(gradient, flat(1, 200, 0.1 * 1.0), 1e-9, "tau * the response's log-ratio, on each token")


def test_ppo_is_not_symmetric_in_the_log_of_the_ratio() -> None:
    """A clip of .2 is often told as symmetric there: ln 1.2 is .182 and ln .8 is -.223."""
    assert gradient_at(Ppo(0.2, 0.2), math.exp(0.2), 1.0) == 0
    assert_close(gradient_at(Ppo(0.2, 0.2), math.exp(-0.2), -1.0), math.exp(-0.2), EXACT, "still inside")


@pytest.mark.extended
def test_the_bounds_of_k1_are_on_the_ratio_they_name() -> None:
    """verl token_k1 and seq_*_k1: "0.1_1.2" kept a ratio of 5 and rejected one of .5."""
    old, sampler = torch.tensor([[0.5, 5.0, 1.0]], dtype=F64).log(), flat(1, 3, 0.0)
    for form, expected in ((BoundForm.ratio, [True, False, True]), (BoundForm.inverse, [False, True, True])):
        rejection = TokenK1(rejected_in_statistics=False, low=0.1, high=1.2, bounds=form)
        assert rejection(old, sampler, torch.ones(1, 3, dtype=torch.bool)).tolist() == [expected], form
    for name in ("token_k1", "sequence_sum_k1", "sequence_mean_k1"):
        assert run_of(f"rejection={name}").rejection.bounds is BoundForm.ratio


def test_a_product_of_ratios_takes_long_responses_out_first_and_a_mean_does_not() -> None:
    """TRL sequence_mask: exp of a sum with a cap of 3, so that long responses left whatever their mismatch."""
    # a mismatch of 1.05 a token: 1.63 after 10 tokens, 131 after 100
    lengths, log_rho = [10, 100], flat(2, 100, math.log(1.05))
    mask = make_rollouts(lengths, 2).sampled_mask
    inputs = log_rho, flat(2, 100, 0.0), mask
    assert (Mis(0.0, 3.0)(*inputs)[:, 0] > 0).tolist() == [True, False]
    assert_close(TisSequence(3.0)(*inputs)[:, 0], [1.05**10, 3.0], 1e-9, "the product, cut")
    assert_close(TisGeometric(3.0)(*inputs)[:, 0], [1.05, 1.05], 1e-9, "free of length")
    bounds = {"rejected_in_statistics": False, "low": 0.0, "high": 3.0, "bounds": BoundForm.ratio}
    assert SequenceSumK1(**bounds)(*inputs).any(dim=1).tolist() == [True, False]
    assert SequenceMeanK1(**bounds)(*inputs).any(dim=1).tolist() == [True, True]


def test_top_p_in_training_is_warned_of() -> None:
    """TRL #6789: top-k of 50 biased the ratio to the sampler by 17%, the mass that had been cut off."""
    assert "look like sampler-learner mismatch" in warned("engine.top_p=0.95")


def test_a_coefficient_that_nothing_reads_is_refused() -> None:
    """slime #397: --kl-coef was parsed and unused for grpo, gspo and cispo."""
    with pytest.raises(Exception, match="kl_coef"):
        compose_config(["recipe=gspo", "kl.kl_coef=0.1"])
    scene = random_scene(2, 2, 3, 4)
    none, some = (run_scene(scene, importance=Sequence(20.0), kl=K3Loss(c, 20.0, 0.0))[1] for c in (1e-9, 0.1))
    assert (none - some).abs().max() > 1e-3


# --- rewards and evaluation ---------------------------------------------------------------------------------


def test_soft_overlong_stops_at_its_factor_beyond_the_cap() -> None:
    """verl: the penalty relies on the engine for its bound and goes on falling where a response is longer."""
    shaped = SoftOverlong(max_tokens=20, cache_tokens=5, factor=0.5, correct=1.0, wrong=-1.0)(
        make_graded([[1, 1]], lengths=[[21, 400]])
    )
    assert_close(shaped.reward, [[0.5, 0.5]], EXACT, "1 - .5")


def test_a_cut_response_is_scored_unless_an_option_says_otherwise() -> None:
    """TRL's preset masks truncated completions: their rows then press on nothing, and lengths grow."""
    graded = make_graded([[1, 0]], truncated=[[False, True]])
    assert Score()(graded).in_loss.all()
    plain = OmegaConf.load(conf_folder() / "config.yaml").defaults
    chosen = {key: value for entry in plain if not isinstance(entry, str) for key, value in entry.items()}
    assert chosen["truncation"] == "score"


def test_pass_at_n_of_one_success_in_n_is_one() -> None:
    """verl best@N #7240: drawn with replacement, one right answer in four gave .687 for four samples."""
    assert pass_at_k(4, 1, 4) == 1.0


def test_pass_at_k_leaves_the_global_random_state_alone() -> None:
    """verl best@N: every call reseeded NumPy's global generator with 42."""
    before = np.random.get_state()[1].tolist()
    pass_at_k(8, 3, 4)
    assert np.random.get_state()[1].tolist() == before


def test_probes_keep_the_training_mix_of_difficulties() -> None:
    """A held-out mix of its own once showed a gap of 0.06 between reward and accuracy where no policy had one."""
    run = to_run(compose_config(["tracking=none", "evaluation=brief"]))
    trained = Counter(problem.difficulty for problem in run.task.problems("train"))
    suites = {suite.name: suite.problems for suite in make_suites(run)}
    for name in ("probe", "heldout_training", "heldout"):
        asked = Counter(problem.difficulty for problem in suites[name])
        for level, count in trained.items():
            assert abs(asked[level] - len(suites[name]) * count / trained.total()) < 1, (name, level)
    assert len(suites["heldout"]) == 128 and suites["heldout"] == suites["heldout_training"]


def test_a_mix_is_rounded_by_largest_remainder_and_filled_where_a_difficulty_runs_out() -> None:
    problems = tuple(Problem(index, "", "", level) for index, level in enumerate([1, 1, 1, 1, 1, 1, 2, 2, 3, 3]))

    def ids(number: int, mix: dict[int, int]) -> list[int]:
        return [problem.id for problem in with_mix(problems, number, Counter(mix))]

    # 5 of 1:1:2 is 1.25, 1.25, 2.5; the largest remainder is that of the third, which has two problems only.
    assert ids(5, {1: 1, 2: 1, 3: 2}) == [0, 1, 6, 8, 9]
    # 7 of 3:2:2 needs no rounding.
    assert ids(7, {1: 3, 2: 2, 3: 2}) == [0, 1, 2, 6, 7, 8, 9]
    assert ids(3, {3: 1}) == [0, 8, 9]
    assert ids(10, {1: 1}) == list(range(10))


def test_an_end_in_time_is_punished_too_once_it_is_on_the_ramp() -> None:
    """The overlong penalty is often told as none for a response that ends: it is by length alone."""
    graded = make_graded([[1, 1]], lengths=[[18, 12]], truncated=[[False, False]])
    shaped = SoftOverlong(max_tokens=20, cache_tokens=5, factor=0.5, correct=1.0, wrong=-1.0)(graded)
    assert_close(shaped.reward, [[1 - 0.5 * 3 / 5, 1]], EXACT, "3 of 5 tokens onto the ramp")


def test_telling_slips_of_secondary_sources_are_not_in_our_text() -> None:
    """mu > 0 for more than one update, a clip symmetric in logs, a quotient of logs for a log of a quotient."""
    slips = (
        r"\bmu\s*>\s*0",
        r"symmetric in (the )?log",
        r"\bln pi\w*\s*/\s*ln\b",
        r"\blog_?probs?\s*/\s*(old|sampler|ref)(_log_?probs?)?\b",
        r"clip_low:?\s*(\.inf|inf)",
    )
    root = conf_folder().parent
    files = [path for folder in ("conf", "grpo_lab", "experiments") for path in (root / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in [*files, root / "README.md"] if path.suffix in (".py", ".yaml", ".md")}
    assert len(texts) > 150
    found = [(path.name, slip) for path, text in texts.items() for slip in slips if re.search(slip, text, re.I)]
    assert found == []
