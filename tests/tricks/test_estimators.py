"""Numbers worked out by hand for estimators of 2025 and 2026: baselines of tokens, scales of components, and others."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import F64, Endings, assert_close, loss_and_gradient, make_graded, make_run, step_of, tiny_model
from torch import Tensor

from grpo_lab.policy.batching import rollout_logprobs
from grpo_lab.tasks.verifiers import Noisy
from grpo_lab.tricks.aggregation import Balanced, PromptMean, SequenceMean, TokenMean
from grpo_lab.tricks.baseline import (
    Credit,
    ForwardCorrection,
    Gae,
    GroupMean,
    LengthAdaptiveGae,
    OptimalToken,
    rewards_by_token,
)
from grpo_lab.tricks.convention import Scope, Singleton
from grpo_lab.tricks.denominator import Original
from grpo_lab.tricks.entropy import Bonus, PositiveNll
from grpo_lab.tricks.kl import AdaptiveK1Reward, AdaptiveK3Loss, K1Reward, K3Loss
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.tricks.reward_shaping import BackwardCorrection
from grpo_lab.tricks.scale import Gdpo, GroupStd
from grpo_lab.tricks.surrogate import Reinforce
from grpo_lab.types import Graded, Microbatching, NoiseKey, Problem, Rollouts

EXACT = 1e-12
FP32 = Fp32(LmHead.same, 1e-3)


# --- baselines of tokens ------------------------------------------------------------------------------------


def rollouts_of(lengths: list[int], group_size: int) -> Rollouts:
    return step_of(lengths, [0.0] * len(lengths), group_size).rollouts


def credit_of(rollouts: Rollouts, graded: Graded, charges: Tensor | None = None, **more: Tensor) -> Credit:
    charges = torch.zeros(rollouts.tokens.shape, dtype=F64) if charges is None else charges
    earned = rewards_by_token(graded.reward, charges, rollouts.sampled_mask)
    return Credit(rollouts, earned, more.pop("values", None), Endings(rollouts), **more)


ROLLOUTS = rollouts_of([1, 2, 3], 3)
# Where a token has probability 1/2 its term 1 - 2 * pi + sum pi^2 is the sum itself.
HALF = torch.full((3, 3), math.log(0.5), dtype=F64)
TERMS = torch.tensor([[0.5, 9, 9], [0.5, 0.3, 9], [0.2, 0.4, 0.1]], dtype=F64)


@pytest.mark.parametrize(("zero_tail", "last"), [(True, 1.0), (False, 0.0)])
def test_a_position_has_its_own_mean_weighted_by_what_was_uncertain_so_far(zero_tail: bool, last: float) -> None:
    """W: .5 | .5, .8 | .2, .6, .7. B_1 = (.5 + .2) / 1.2, B_2 = .6 / 1.4, and only the third row has a third token."""
    graded = make_graded([[1, 0, 1]])
    credit = credit_of(ROLLOUTS, graded, logprobs=HALF, collision=TERMS)
    expected = [[5 / 12, 0, 0], [-7 / 12, -3 / 7, 0], [5 / 12, 4 / 7, last]]
    assert_close(OptimalToken(zero_tail, 1e-13).centre(graded, credit), expected, EXACT, "G - B_t")


def test_a_charge_counts_for_its_own_token_and_earlier_ones_and_a_weight_is_squared() -> None:
    """The second row is charged .3 and .1: G = -.4, -.1. The first row's weight of 2 makes its W 2."""
    charges = torch.zeros(3, 3, dtype=F64)
    charges[1, 0], charges[1, 1] = -0.3, -0.1
    graded = make_graded([[1, -0.4, 1]])
    weights = torch.ones(3, 3, dtype=F64)
    weights[0, 0] = 2
    credit = credit_of(ROLLOUTS, graded, charges, logprobs=HALF, collision=TERMS, weights=weights)
    first, second = (2 - 0.5 * 0.4 + 0.2) / 2.7, (-0.8 * 0.1 + 0.6) / 1.4
    expected = [[1 - first, 0, 0], [-0.4 - first, -0.1 - second, 0], [1 - first, 1 - second, 1]]
    assert_close(OptimalToken(True, 1e-13).centre(graded, credit), expected, EXACT, "rewards to go")


def test_equal_rewards_leave_exact_zeros_and_uncounted_rows_move_no_other() -> None:
    tied = make_graded([[0.7, 0.7, 0.7]])
    credit = credit_of(ROLLOUTS, tied, logprobs=HALF, collision=TERMS)
    found = OptimalToken(False, 0.1).centre(tied, credit)
    assert found.tolist() == [[0.0] * 3] * 3
    for reward in (0.0, 5.0):
        graded = make_graded([[reward, 0, 1]], in_statistics=[[False, True, True]])
        found = OptimalToken(True, 1e-13).centre(graded, credit_of(ROLLOUTS, graded, logprobs=HALF, collision=TERMS))
        expected = [[0, 0, 0], [-0.2 / 0.7, -3 / 7, 0], [0.5 / 0.7, 4 / 7, 1]]
        assert_close(found, expected, EXACT, "two rows are left")


def test_probabilities_that_are_nearly_one_give_no_negative_weight() -> None:
    """In single precision 1 - 2 * pi + sum pi^2 of a sure token may come out below 0."""
    graded = make_graded([[1, 0, 1]])
    sure = torch.full((3, 3), -1e-9, dtype=torch.float32)
    credit = credit_of(ROLLOUTS, graded, logprobs=sure, collision=torch.full((3, 3), 1 - 2e-7))
    found = OptimalToken(True, 1e-8).centre(graded, credit)
    assert bool((found.abs() <= 1).all())


@pytest.mark.parametrize("cut", [Microbatching(10**6, 10**6), Microbatching(60, 5, logits_per_chunk=40)], ids=str)
@pytest.mark.parametrize("fuses", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_term_is_the_squared_slope_of_a_log_prob_in_the_logits(
    cut: Microbatching, fuses: bool, temperature: float
) -> None:
    """The pass over the rollouts against autograd through the softmax of each position, one after another."""
    model, rows = tiny_model(), 4
    rollouts = rollouts_of([3, 1, 4, 2], 2)
    tokens = torch.randint(13, rollouts.tokens.shape, generator=torch.Generator().manual_seed(1))
    rollouts = replace(rollouts, tokens=tokens, prompts=((1, 5), (2,)))
    cut = replace(cut, fuses_head=fuses)
    device = torch.device("cpu")
    logprobs, sums = rollout_logprobs(model, rollouts, temperature, FP32, cut, device, False, collision=True)
    plain, none = rollout_logprobs(model, rollouts, temperature, FP32, cut, device, False)
    assert none is None
    assert_close(logprobs, plain, EXACT, "log-probs as without")
    found = 1 - 2 * logprobs.exp() + sums
    for row, length in zip(range(rows), rollouts.lengths.tolist()):
        prompt = list(rollouts.prompt_of_row(row))
        ids = torch.tensor([prompt + tokens[row, :length].tolist()])
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].detach() / temperature
        for t in range(length):
            leaf = logits[t].clone().requires_grad_()
            (slope,) = torch.autograd.grad(leaf.log_softmax(0)[tokens[row, t]], leaf)
            assert_close(found[row, t], (slope**2).sum(), 1e-10, "squared norm")


# --- VAPO ---------------------------------------------------------------------------------------------------

VALUES = torch.tensor([[0.3, 0.5, 0.2, 0.9]], dtype=F64)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    # deltas .2, -.3, .7, .1; lambda 1 - 1 / 2 = .5 and, of four tokens with alpha .05, 0
    [(0.5, [0.2375, 0.075, 0.75, 0.1]), (0.05, [0.2, -0.3, 0.7, 0.1])],
)
def test_lambda_grows_with_the_response_and_the_critic_learns_the_return(alpha: float, expected: list[float]) -> None:
    rollouts, graded = rollouts_of([4], 1), make_graded([[1.0]])
    credit, baseline = credit_of(rollouts, graded, values=VALUES), LengthAdaptiveGae(1.0, alpha, 1.0)
    centred = baseline.centre(graded, credit)
    assert_close(centred, [expected], EXACT, "advantages")
    assert_close(baseline.value_targets(graded, credit, centred), [[1.0] * 4], EXACT, "the return")
    same = LengthAdaptiveGae(1.0, alpha, 0.5)
    traces = [0.2375, 0.075, 0.75, 0.1]
    assert_close(same.value_targets(graded, credit, centred) - VALUES, [traces], EXACT, "lambda .5")
    plain = Gae(1.0, 0.5)
    assert_close(plain.value_targets(graded, credit, plain.centre(graded, credit)) - VALUES, [traces], EXACT, "Gae")


def test_each_row_has_the_lambda_of_its_own_length() -> None:
    values = torch.tensor([[0.3, 0.5, 0.2, 0.9], [0.3, 0.5, 0.0, 0.0]], dtype=F64)
    graded = make_graded([[1.0, 1.0]])
    credit = credit_of(rollouts_of([4, 2], 2), graded, values=values)
    found = LengthAdaptiveGae(1.0, 0.75, 1.0).centre(graded, credit)
    # lambda 2/3 and 1/3: .1, .7 + .2/3, -.3 + 2/3 * that, ...; and .5, .2 + .5/3
    third = 0.7 + 0.2 / 3
    second = -0.3 + 2 / 3 * third
    expected = [[0.2 + 2 / 3 * second, second, third, 0.1], [0.2 + 0.5 / 3, 0.5, 0, 0]]
    assert_close(found, expected, EXACT, "by length")


def of_right_rows(microbatch_tokens: int, **options: object) -> tuple[Tensor, Tensor]:
    """Four responses without an advantage, of which the first and the third are right."""
    inputs = replace(
        step_of([2, 3, 1, 2], [0.0] * 4, 2), right=torch.tensor([True, False, True, False]), entropy_coef=0.6
    )
    run = make_run(entropy=PositiveNll(0.6), surrogate=Reinforce(), **options)
    logprobs = -torch.arange(1.0, 13.0, dtype=F64).reshape(4, 3)
    return loss_and_gradient(run, inputs, logprobs, microbatch_tokens)


@pytest.mark.parametrize("aggregation", [SequenceMean(0.0), TokenMean(Scope.step)], ids=str)
def test_the_nll_of_right_rows_is_a_mean_over_their_tokens_whatever_the_aggregation(aggregation: object) -> None:
    """Tokens 1, 2 of the first row and 7 of the third: .6 * (1 + 2 + 7) / 3."""
    loss, gradient = of_right_rows(10**9, aggregation=aggregation)
    assert_close(loss, 2.0, EXACT, "mu * mean of -log p")
    assert_close(gradient, [[-0.2, -0.2, 0], [0] * 3, [-0.2, 0, 0], [0] * 3], EXACT, "mu / tokens of right rows")


@pytest.mark.parametrize("microbatch_tokens", [4, 8])
def test_the_nll_of_right_rows_does_not_grow_with_the_number_of_microbatches_as_in_nemo_rl(
    microbatch_tokens: int,
) -> None:
    """There each microbatch divides by its own count: two that hold a right row each would give twice the term."""
    whole, cut = of_right_rows(10**9), of_right_rows(microbatch_tokens)
    assert_close(cut[0], whole[0], EXACT, "loss")
    assert_close(cut[1], whole[1], EXACT, "gradient")


# --- GDPO ---------------------------------------------------------------------------------------------------


def of_parts(*parts: list[list[float]], weights: tuple[float, ...] = (1.0, 1.0), **others: object) -> Graded:
    named = {f"part_{place}": torch.tensor(values, dtype=F64) for place, values in enumerate(parts)}
    graded = make_graded(sum(named.values()).tolist(), **others)
    return replace(graded, components=named, part_weights=dict(zip(named, weights)))


def gdpo(graded: Graded, eps: float = 0.0) -> Tensor:
    return Gdpo(eps)(GroupMean(Singleton.zero)(graded), graded)


def test_each_part_is_normalised_before_it_is_weighed() -> None:
    """Both parts are 1, 1, 0, 0 in some order, with deviation 1 / sqrt(3): +-a and +-a / 10, a = sqrt(3) / 2."""
    graded = of_parts([[1, 1, 0, 0]], [[0.1, 0, 0.1, 0]], weights=(1.0, 0.1))
    a = math.sqrt(3) / 2
    added = [1.1 * a, 0.9 * a, -0.9 * a, -1.1 * a]
    spread = math.sqrt(sum(value**2 for value in added) / 3)
    assert_close(gdpo(graded), [[value / spread for value in added]], EXACT, "whitened sum")
    # with eps: a / (1 / sqrt(3) + eps) in each part, before the weight
    part = 0.5 / (1 / math.sqrt(3) + 0.1)
    added = [1.1 * part, 0.9 * part, -0.9 * part, -1.1 * part]
    spread = math.sqrt(sum(value**2 for value in added) / 3)
    assert_close(gdpo(graded, 0.1), [[value / (spread + 0.1) for value in added]], EXACT, "with eps")


def test_a_factor_inside_a_part_cancels_and_its_sign_stays() -> None:
    for factor in (1e-3, 50.0):
        plain, scaled = (of_parts([[1, 1, 0, 0]], [[k, 0, k, 0]]) for k in (1.0, factor))
        assert_close(gdpo(scaled), gdpo(plain), 1e-10, "not with the factor")
    fined = of_parts([[1, 1, 0, 0]], [[-0.1, 0, -0.1, 0]], weights=(1.0, -0.1))
    paid = of_parts([[1, 1, 0, 0]], [[0.1, 0, 0.1, 0]], weights=(1.0, 0.1))
    assert_close(gdpo(fined), gdpo(paid)[:, [1, 0, 3, 2]], EXACT, "a weight below 0 fines")


def test_a_group_in_which_every_part_is_tied_gets_exactly_zero_where_trl_leaves_a_residue() -> None:
    """The mean over the batch, which TRL subtracts, is only rounding: it would push every row of such a group."""
    tied = [0.7] * 7
    graded = of_parts([tied, [1, 0, 0, 1, 0, 0, 0]], [[0.9] * 7, [0.3, 0.1, 0.1, 0.7, 0.1, 0, 0]])
    found = gdpo(graded, 1e-4)
    assert found[0].tolist() == [0.0] * 7 and bool((found[1] != 0).any())
    assert gdpo(of_parts([tied], [tied])).tolist() == [[0.0] * 7]


def test_a_part_that_is_tied_in_a_group_adds_nothing_there() -> None:
    both = of_parts([[1, 0, 0, 1]], [[0.3] * 4])
    one = make_graded([[1, 0, 0, 1]])
    expected = GroupStd(1, 0.0, False, Singleton.zero)(GroupMean(Singleton.zero)(one), one)
    assert_close(gdpo(both), expected / expected.std(), EXACT, "group_std and the deviation of the batch")


def test_uncounted_rows_neither_count_nor_get_an_advantage() -> None:
    counted = [[True, True, True, False]]
    for last in (0.0, 9.0):
        graded = of_parts([[1, 0, 0, last]], [[0, 0, 1, last]], in_statistics=counted)
        a = [2 / 3, -1 / 3, -1 / 3]
        added = [(one + other) * math.sqrt(3) for one, other in zip(a, [-1 / 3, -1 / 3, 2 / 3])]
        spread = math.sqrt(sum(value**2 for value in added) / 2)
        assert_close(gdpo(graded), [[*(value / spread for value in added), 0]], EXACT, "three rows")


# --- balanced aggregation -----------------------------------------------------------------------------------


def test_both_signs_weigh_by_responses_and_their_tokens_alike() -> None:
    """Group 1: A > 0 on 1 + 3 tokens of two rows, A < 0 on two of one, A = 0 on two of one. Group 2: no signal."""
    lengths, advantages = [1, 2, 3, 2, 1, 1, 1, 1], [1.0, -1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    inputs = step_of(lengths, advantages, 4)
    logprobs = torch.zeros(8, 3, dtype=F64)

    def slopes(aggregation: object, microbatch_tokens: int = 10**9) -> Tensor:
        run = make_run(aggregation=aggregation, surrogate=Reinforce())
        return loss_and_gradient(run, inputs, logprobs, microbatch_tokens)[1]

    expected = torch.zeros(8, 3, dtype=F64)
    expected[0, :1] = expected[2, :3] = -(2 / 4) / 4 / 2
    expected[1, :2] = (1 / 4) / 2 / 2
    assert_close(slopes(Balanced()), expected, EXACT, "k / G / tokens of the sign / groups")
    assert_close(slopes(Balanced(), 6), expected, EXACT, "in microbatches")
    assert_close(slopes(PromptMean())[:3, 0], [-1 / 16, 1 / 16, -1 / 16], EXACT, "of all eight tokens")


def test_every_group_keeps_a_total_weight_of_one_for_other_terms() -> None:
    """Of a term of 1 on each token: minus a coefficient of -1 times an entropy of 1."""
    inputs = step_of([1, 2, 3, 2, 1, 1, 1, 1], [2.0, -1.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0], 4)
    run = make_run(aggregation=Balanced(), surrogate=Reinforce(), entropy=Bonus(1.0))
    logprobs = torch.full((8, 3), -1.0, dtype=F64)
    even = replace(inputs, advantages=inputs.advantages * 1e-9, entropy_coef=-1.0)
    assert_close(loss_and_gradient(run, even, logprobs)[0], 1.0, 1e-8, "the mean over groups of 1")
    left = step_of([1, 1, 1, 1], [1.0, 0.0, -1.0, -1.0], 4, in_loss=[True, True, True, False])
    own = make_run(aggregation=Balanced(), surrogate=Reinforce(), denominator=Original())
    gradient = loss_and_gradient(own, left, torch.zeros(4, 1, dtype=F64))[1]
    assert_close(gradient.flatten(), [-1 / 4, 0, 1 / 4, 0], EXACT, "a row out of the loss is beside those of 0")


# --- KL coefficients that follow a target -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "responses", "factor"),
    [(0.3, 16, 1.1), (0.05, 16, 0.9), (0.11, 16, 1.05), (0.1, 16, 1.0), (0.3, 500, 1.2), (0.0, 32, 0.8)],
)
@pytest.mark.parametrize(
    ("option", "plain"),
    [
        (AdaptiveK1Reward(0.5, 0.0, 0.1, 32), K1Reward(0.5, 0.0)),
        (AdaptiveK3Loss(0.5, 20.0, 0.0, 0.1, 32), K3Loss(0.5, 20.0, 0.0)),
    ],
)
def test_the_coefficient_moves_towards_its_target_by_a_fifth_at_most(option, plain, kl, responses, factor) -> None:
    assert option.start == 0.5
    assert option.next_coef(0.4, kl, responses) == pytest.approx(0.4 * factor, rel=1e-12)
    assert plain.next_coef(0.4, kl, responses) == 0.4 and plain.at(0.4) is plain
    old, ref = (torch.tensor([values], dtype=F64) for values in ([-1.0, -2.0], [-1.5, -1.0]))
    mask = torch.ones(1, 2, dtype=torch.bool)
    for coef in (0.5, 0.4):
        for method, given in (("token_penalties", (old, ref, mask)), ("penalty", (old - ref, old - ref))):
            found, expected = (getattr(one, method)(*given) for one in (option.at(coef), replace(plain, kl_coef=coef)))
            assert_close(found, expected, 0, f"{method} at {coef}")


# --- noise of known rates -----------------------------------------------------------------------------------


def test_the_corrected_reward_is_the_clean_one_on_average() -> None:
    """rho0 .1 and rho1 .2: r^ is 9/7 where called right and -1/7 where called wrong."""
    graded = BackwardCorrection(0.1, 0.2, 1.0, 0.0)(make_graded([[1, 0, 0]]))
    assert_close(graded.reward, [[9 / 7, -1 / 7, -1 / 7]], EXACT, "r^")
    assert_close(graded.components["backward_correction"], [[2 / 7, -1 / 7, -1 / 7]], EXACT, "its own component")
    called_right, called_wrong = graded.reward[0, 0], graded.reward[0, 1]
    assert_close(0.8 * called_right + 0.2 * called_wrong, 1.0, EXACT, "of a right response")
    assert_close(0.1 * called_right + 0.9 * called_wrong, 0.0, EXACT, "of a wrong response")
    signed = BackwardCorrection(0.1, 0.2, 1.0, -1.0)(make_graded([[1, -1]], correctness=[[1, 0]]))
    assert_close(signed.reward, [[1 + 4 / 7, -1 - 2 / 7]], EXACT, "between -1 and 1 the same, twice as wide")
    failed = replace(make_graded([[1, 0]]), failed=torch.tensor([[False, True]]))
    assert BackwardCorrection(0.1, 0.2, 1.0, 0.0)(failed).reward[0, 1] == 0


def test_the_forward_weights_vanish_on_right_responses_on_average() -> None:
    graded = make_graded([[1, 0, 0]], in_statistics=[[True, True, False]])
    found = ForwardCorrection(0.2, 1.0, 0.0)(graded)
    assert_close(found, [[0.2, -0.8, 0]], EXACT, "rho1 and rho1 - 1")
    assert_close(0.8 * found[0, 0] + 0.2 * found[0, 1], 0.0, EXACT, "of a right response")
    assert_close(0.1 * found[0, 0] + 0.9 * found[0, 1], -0.7, EXACT, "of a wrong one -(1 - rho0 - rho1)")
    signed = ForwardCorrection(0.2, 1.0, -1.0)(make_graded([[1, -1]]))
    assert_close(signed, [[0.4, -1.6]], EXACT, "twice as wide")


def test_both_corrections_are_right_about_the_noisy_reward_that_draws_for_each_response() -> None:
    """20,000 judgements of a right and of a wrong text: the mean is within 4 standard errors of the clean one."""
    noisy, number = Noisy(1.0, 0.0, 0.1, 0.2, 0, True), 20_000
    problem = Problem(0, "3+3", "6", 1)
    keys = [NoiseKey(0, "rollout", 0, 0, place) for place in range(number)]
    for text, clean in (("#6", 1.0), ("#7", 0.0)):
        called = noisy.correctness([problem] * number, [text] * number, [True] * number, keys)
        graded = make_graded([called])
        corrected = BackwardCorrection(0.1, 0.2, 1.0, 0.0)(graded).reward
        assert abs(float(corrected.mean()) - clean) < 4 * float(corrected.std()) / math.sqrt(number)
        forward = ForwardCorrection(0.2, 1.0, 0.0)(graded)
        assert abs(float(forward.mean()) - 0.7 * (clean - 1)) < 4 * float(forward.std()) / math.sqrt(number)


def test_a_group_deviation_divides_the_backward_correction_away() -> None:
    """The paper's caveat, and the rule `correction_is_divided_away`."""
    for row in itertools.product([0.0, 1.0], repeat=4):
        plain = make_graded([row])
        corrected = BackwardCorrection(0.1, 0.2, 1.0, 0.0)(plain)
        both = [
            GroupStd(0, 0.0, False, Singleton.zero)(GroupMean(Singleton.zero)(one), one) for one in (plain, corrected)
        ]
        assert_close(both[1], both[0], 1e-9, "nothing is left of it")
