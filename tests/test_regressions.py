"""Defects that other frameworks had or have, one test each, so that they cannot appear here unnoticed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
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
    random_scene,
    share_of,
    step_of,
)
from omegaconf import OmegaConf

from grpo_lab.batching import Cut, expand, make_minibatch, score_rollouts
from grpo_lab.cli import compose_config
from grpo_lab.config import conf_folder, to_run
from grpo_lab.evaluate import pass_at_k
from grpo_lab.rollouts import to_rollouts
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import GroupMean, LeaveOneOut
from grpo_lab.tricks.convention import Scope, Singleton, Width
from grpo_lab.tricks.correction import TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.group_filter import Drop, Signal
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.tricks.reward_shaping import SoftOverlong
from grpo_lab.tricks.scale import GroupStd, NoScale
from grpo_lab.tricks.surrogate import Ppo, Reinforce
from grpo_lab.tricks.truncation import MaskBefore, Score
from grpo_lab.types import Completion, Problem, StopReason, to_groups
from grpo_lab.workbench import make_suites, with_mix

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


def test_filters_see_tied_fp32_groups() -> None:
    """Filters on `std == 0`: twelve rewards of 0.7 in fp32 have a deviation above 0 and stay."""
    graded = make_graded([[0.7] * 12, [0.7] * 11 + [0.6]], dtype=torch.float32)
    trained = Drop(signal=Signal.reward)(graded).trained
    assert trained.any(dim=1).tolist() == [False, True]


def test_rows_are_not_dropped_before_the_groups_are_formed() -> None:
    """open-instruct #1794: four of eight cut rows were dropped first, then rows of two prompts were grouped."""
    # Cut rows are two in each group of four. Dropped first, [1, 0, 1, 1] would look like one group of four.
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
    totals = make_minibatch(inputs, range(2), run.denominator, Cut(10**9, 192))[0].totals
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
        batches = make_minibatch(inputs, problems, run.denominator, Cut(3, 192))
        step = sum(share_of(run, batch, leaf) for batch in batches)
        rows = slice(2 * problems.start, 2 * problems.stop)
        alone = loss_and_gradient(run, step_of(lengths[rows], advantages[rows], 2, width=4), flat(4, 4))[0]
        assert_close(step, alone, EXACT, f"problems {problems}")


@by_aggregation
def test_one_rule_of_counting_for_every_aggregation(aggregation) -> None:
    """verl: its sequence means divided by all rows and its token mean by the survivors, in the same run."""
    # Half the rows of each group leave, all rows are 4 tokens of loss 1: originals give half of the survivors.
    inputs = step_of([4] * 4, [-1] * 4, 2, trained=[True, False, True, False])
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
        run = make_run(aggregation=aggregation, surrogate=Reinforce(), kl=K3Loss(1.0, 20.0))
        results = []
        for junk in (-1.0, -1e4):
            logprobs = flat(2, 3)
            logprobs[1] = junk
            inputs = step_of([2, 3], [1, 1], 2, trained=[True, False], ref_logprobs=flat(2, 3))
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
        Completion((4, 2), (-0.1, -0.2), (0, 0), StopReason.EOS),  # 2 is the end of text
        Completion((4, 5, 6, 8), (-0.1,) * 4, (0,) * 4, StopReason.LENGTH),
    ]
    rollouts = to_rollouts(problems, [(1,)], 2, completions)
    assert rollouts.lengths.tolist() == [2, 4]
    assert rollouts.sampled_mask[0].tolist() == [True, True, False, False]
    inputs = replace(step_of([2, 4], [1, 1], 2), rollouts=rollouts)
    for denominator in (Original(), Survivors()):
        totals = make_minibatch(inputs, range(1), denominator, Cut(10**9, 192))[0].totals
        assert (totals.num_tokens, totals.num_rows) == (6, 2)


def test_padding_is_not_scored() -> None:
    """verl #3805: log-probs of padding entered sums; here they are 0 whatever the model says."""

    class Always(torch.nn.Module):
        def forward(self, input_ids, use_cache, logits_to_keep):
            logits = torch.zeros(*input_ids.shape, 9)[:, -logits_to_keep:]
            return type("Output", (), {"logits": logits})()

    rollouts = make_rollouts([1, 3], 2, tokens=torch.ones(2, 3, dtype=torch.long))
    scored, spread = score_rollouts(Always(), rollouts, 1.0, Fp32(LmHead.same), Cut(100, 192), torch.device("cpu"))
    assert_close(scored, [[-math.log(9), 0, 0], [-math.log(9)] * 3], 1e-6, "uniform over nine tokens")
    assert_close(spread, [[math.log(9), 0, 0], [math.log(9)] * 3], 1e-6, "and their entropy")


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
        run = make_run(surrogate=surrogate, kl=K3Loss(0.1, 20.0))
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
    run = make_run(kl=K3Loss(0.1, 20.0))
    weighted = make_run(kl=K3Loss(0.1, 20.0), correction=TisToken(cap=2.0, floor=0.0))
    assert (inputs_of(weighted, quiet).correction_weights - 1).abs().max() > 0.1
    first, second = (loss_and_gradient(r, inputs_of(r, quiet), quiet.logprobs) for r in (run, weighted))
    assert_close(second[0], first[0], 0, "loss")
    assert_close(second[1], first[1], 0, "gradient")


@by_aggregation
def test_the_kl_term_is_aggregated_like_the_loss(aggregation) -> None:
    """SkyRL: KL was always a mean per sequence and microbatch, 16384 times too strong beside a scaled loss."""
    # advantages 0 and k3 the same number k on every token: the loss is k times what a token loss of 1 gives
    lengths, ref = [1, 4, 2, 3], flat(4, 4, -1 + math.log(2))
    run = make_run(aggregation=aggregation, kl=K3Loss(1.0, 20.0))
    penalty = loss_and_gradient(run, step_of(lengths, [0] * 4, 2, ref_logprobs=ref), flat(4, 4))[0]
    ones = loss_and_gradient(make_run(aggregation=aggregation), step_of(lengths, [-1] * 4, 2), flat(4, 4))[0]
    assert_close(penalty, (1 - math.log(2)) * ones, EXACT, "k3 at x = 2")


def test_kl_without_a_reference_is_an_error() -> None:
    """AReaL: a missing reference became log-probs of zero and a penalty towards certainty."""
    run = make_run(kl=K3Loss(0.1, 20.0))
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


# --- rewards and evaluation ---------------------------------------------------------------------------------


def test_soft_overlong_stops_at_its_factor_beyond_the_cap() -> None:
    """verl: the penalty relies on the engine for its bound and goes on falling where a response is longer."""
    shaped = SoftOverlong(max_tokens=20, cache_tokens=5, factor=0.5)(make_graded([[1, 1]], lengths=[[21, 400]]))
    assert_close(shaped.reward, [[0.5, 0.5]], EXACT, "1 - .5")


def test_a_cut_response_is_scored_unless_an_option_says_otherwise() -> None:
    """TRL's preset masks truncated completions: their rows then press on nothing, and lengths grow."""
    graded = make_graded([[1, 0]], truncated=[[False, True]])
    assert Score()(graded).trained.all()
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
