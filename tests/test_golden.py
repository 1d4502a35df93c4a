"""Numbers computed by hand, or by verl, for every option of every axis that exists."""

from __future__ import annotations

import inspect
import json
import math
import sys
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from helpers import (
    F64,
    Scene,
    advantages_of,
    assert_close,
    batch_of_rows,
    inputs_of,
    loss_and_gradient,
    make_graded,
    make_rollouts,
    make_run,
    step_of,
)
from torch import Tensor, nn

from grpo_lab.batching import StepInputs
from grpo_lab.config import AXES, options, slot_types
from grpo_lab.loss import policy_loss
from grpo_lab.models import Fp32Head
from grpo_lab.policy import token_logprobs
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import GroupMean, LeaveOneOut, NoBaseline
from grpo_lab.tricks.convention import Scope, Singleton, Width
from grpo_lab.tricks.correction import NoCorrection, TisToken
from grpo_lab.tricks.curriculum import Uniform
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import NoEntropy
from grpo_lab.tricks.group_filter import Drop, Keep, Signal
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.kl import K3Loss, NoKl
from grpo_lab.tricks.old_policy import Recomputed
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead
from grpo_lab.tricks.reference import Frozen
from grpo_lab.tricks.rejection import NoRejection
from grpo_lab.tricks.reward_shaping import NoShaping, SoftOverlong
from grpo_lab.tricks.scale import GroupStd, NoScale
from grpo_lab.tricks.schedule import Sync
from grpo_lab.tricks.surrogate import Ppo, Reinforce, SurrogateInputs
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score
from grpo_lab.tricks.updates import Updates

EXACT = 1e-12
VERL = 1e-8  # verl adds 1e-8 to the token count in its sequence mean
TWO_OF_EIGHT = [[1, 0, 0, 0, 1, 0, 0, 0]]


def test_every_option_of_every_axis_has_a_number_in_this_file() -> None:
    source = inspect.getsource(sys.modules[__name__])
    missing = {
        f"{axis}: {cls.__name__}"
        for axis in AXES
        for cls in options(slot_types()[axis]).values()
        if f"{cls.__name__}(" not in source
    }
    assert not missing


# --- baseline and scale -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("baseline", "scale", "right", "wrong"),
    [
        # mean 2/8 = .25, variance .25 * .75 = .1875, deviation sqrt(3)/4: .75 / (sqrt(3)/4) = sqrt(3)
        (GroupMean(Singleton.zero), GroupStd(0, 0.0, False, Singleton.zero), math.sqrt(3), -1 / math.sqrt(3)),
        # ddof 1: the variance grows by 8/7, so the advantages shrink by sqrt(7/8): 1.62019, -.54006
        (GroupMean(Singleton.zero), GroupStd(1, 0.0, False, Singleton.zero), math.sqrt(21 / 8), -math.sqrt(7 / 24)),
        # eps is added to the deviation: .75 / (.4330127 + .25)
        (
            GroupMean(Singleton.zero),
            GroupStd(0, 0.25, False, Singleton.zero),
            0.75 / (math.sqrt(3) / 4 + 0.25),
            -0.25 / (math.sqrt(3) / 4 + 0.25),
        ),
        # Dr. GRPO
        (GroupMean(Singleton.zero), NoScale(), 0.75, -0.25),
        # right: the other seven average 1/7, 1 - 1/7 = 6/7; wrong: they average 2/7
        (LeaveOneOut(Singleton.zero), NoScale(), 6 / 7, -2 / 7),
        (NoBaseline(), NoScale(), 1.0, 0.0),
        # 1 / (sqrt(3)/4)
        (NoBaseline(), GroupStd(0, 0.0, False, Singleton.zero), 4 / math.sqrt(3), 0.0),
    ],
)
def test_advantages_of_two_right_answers_in_eight(baseline, scale, right: float, wrong: float) -> None:
    expected = [[right, wrong, wrong, wrong, right, wrong, wrong, wrong]]
    assert_close(advantages_of(make_graded(TWO_OF_EIGHT), baseline, scale), expected, EXACT, "advantages")


def test_literals_of_the_two_deviations() -> None:
    graded = make_graded(TWO_OF_EIGHT)
    for ddof, right, wrong in ((0, 1.73205, -0.57735), (1, 1.62019, -0.54006)):
        advantages = advantages_of(graded, GroupMean(Singleton.zero), GroupStd(ddof, 1e-9, False, Singleton.zero))[0]
        assert_close(advantages[:2], [right, wrong], 5e-6, f"ddof {ddof}, five printed decimals")


# --- reward shaping -----------------------------------------------------------------------------------------


def test_soft_overlong_of_the_published_budget() -> None:
    # start = 20480 - 4096 = 16384; (16385 - 16384)/4096 = 2.4414e-4; (18432 - 16384)/4096 = .5; cap at 1
    lengths = [[16384, 16385, 18432, 20480, 20481]]
    graded = make_graded([[1, 1, 0, 0, 0]], lengths=lengths)
    shaped = SoftOverlong(max_tokens=20480, cache_tokens=4096, factor=1.0)(graded)
    assert_close(shaped.components["soft_overlong"], [[0, -1 / 4096, -0.5, -1, -1]], EXACT, "penalty")
    assert_close(shaped.reward, [[1, 1 - 1 / 4096, -0.5, -1, -1]], EXACT, "outcome's reward plus penalty")
    assert_close(shaped.outcome, [[1, 1, 0, 0, 0]], 0, "the outcome is never shaped")


def test_factor_scales_the_overlong_penalty() -> None:
    shaped = SoftOverlong(max_tokens=40, cache_tokens=10, factor=0.2)(make_graded([[1, 1]], lengths=[[35, 40]]))
    assert_close(shaped.reward, [[0.9, 0.8]], EXACT, "1 - .2 * 5/10 and 1 - .2 * 10/10")


def test_no_shaping_adds_no_component() -> None:
    graded = make_graded([[1, 0]], lengths=[[3, 50]])
    assert NoShaping()(graded) is graded


# --- truncation and filter ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("truncation", "counted", "trained", "advantages"),
    [
        # mean of 1, 0, 0, 0 is 1/4
        (Score(), [1, 1, 1, 1], [1, 1, 1, 1], [0.75, -0.25, -0.25, -0.25]),
        # the two cut rows still lower the mean
        (MaskAfter(), [1, 1, 1, 1], [1, 1, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        # mean of 1, 0 is 1/2
        (MaskBefore(), [1, 1, 0, 0], [1, 1, 0, 0], [0.5, -0.5, 0, 0]),
    ],
)
def test_what_two_cut_rows_of_four_count_for(truncation, counted, trained, advantages) -> None:
    cut = truncation(make_graded([[1, 0, 0, 0]], truncated=[[False, False, True, True]]))
    assert cut.counted.tolist() == [[bool(bit) for bit in counted]]
    assert cut.trained.tolist() == [[bool(bit) for bit in trained]]
    assert_close(advantages_of(cut), [advantages], EXACT, "advantages")


@pytest.mark.parametrize(
    ("group_filter", "kept"),
    [
        (Keep(), [True, True, True]),
        (Drop(signal=Signal.outcome), [True, False, False]),
        (Drop(signal=Signal.reward), [True, True, False]),
    ],
)
def test_which_groups_stay(group_filter, kept) -> None:
    # Mixed outcomes; all wrong but of different length, so different shaped reward; all right and equal.
    graded = make_graded([[1, 0], [-0.1, -0.2], [1, 1]], outcome=[[1, 0], [0, 0], [1, 1]])
    filtered = group_filter(graded)
    expected = [[bit, bit] for bit in kept]
    assert filtered.trained.tolist() == expected
    assert filtered.counted.tolist() == expected


# --- correction, rejection, importance ----------------------------------------------------------------------


def test_weights_and_kept_tokens_of_a_sampler_that_is_not_the_learner() -> None:
    old = torch.tensor([[0.6, 0.9, 0.1, 0.5]], dtype=F64).log()
    sampler = torch.tensor([[0.5, 0.3, 0.2, 0.1]], dtype=F64).log()
    mask = torch.tensor([[True, True, True, False]])
    # .6/.5 = 1.2; .9/.3 = 3 stops at the cap; .1/.2 = .5 has no floor; not sampled: 1
    assert_close(TisToken(cap=2.0, floor=0.0)(old, sampler, mask), [[1.2, 2.0, 0.5, 1.0]], EXACT, "capped weights")
    assert_close(NoCorrection()(old, sampler, mask), [[1, 1, 1, 1]], 0, "no weights")
    assert NoRejection()(old, sampler, mask).tolist() == [[True] * 4]


def test_log_ratio_is_the_difference_up_to_its_limit() -> None:
    logprobs, old = (torch.tensor([row], dtype=F64) for row in ([-1.0, -0.5, -30.0], [-1.5, -0.25, -1.0]))
    log_ratio = Token(log_ratio_limit=20.0)(logprobs, old, torch.ones(1, 3, dtype=torch.bool))
    assert_close(log_ratio, [[0.5, -0.25, -20.0]], EXACT, "log ratio")


# --- surrogate, kl, entropy ---------------------------------------------------------------------------------

# Ratios of one token each and what PPO (.2, .2), PPO (.2, .28) and REINFORCE make of them. Advantage 2, then -2.
RATIOS = [0.5, 0.9, 1.0, 1.1, 1.25, 1.5]


@pytest.mark.parametrize(
    ("surrogate", "advantage", "loss", "gradient"),
    [
        # A > 0: -2 * min(ratio, 1.2); above 1.2 no gradient. d(-2 r)/d logprob = -2 r
        (Ppo(0.2, 0.2), 2.0, [-1, -1.8, -2, -2.2, -2.4, -2.4], [-1, -1.8, -2, -2.2, 0, 0]),
        # A < 0: 2 * max(ratio, .8); below .8 no gradient
        (Ppo(0.2, 0.2), -2.0, [1.6, 1.8, 2, 2.2, 2.5, 3], [0, 1.8, 2, 2.2, 2.5, 3]),
        # the upper bound is 1.28, so 1.25 keeps its gradient
        (Ppo(0.2, 0.28), 2.0, [-1, -1.8, -2, -2.2, -2.5, -2.56], [-1, -1.8, -2, -2.2, -2.5, 0]),
        # -A * logprob; the log-probs are the logs of ratio / 4, and the ratio does not enter
        (Reinforce(), 2.0, [-2 * math.log(r / 4) for r in RATIOS], [-2] * 6),
    ],
)
def test_token_losses_inside_and_outside_the_clip(surrogate, advantage, loss, gradient) -> None:
    logprobs = torch.tensor([[math.log(r / 4) for r in RATIOS]], dtype=F64, requires_grad=True)
    log_ratio = logprobs - math.log(1 / 4)
    everywhere = torch.ones(1, 6, dtype=torch.bool)
    result = surrogate(SurrogateInputs(logprobs, log_ratio, torch.full((1, 6), advantage, dtype=F64), everywhere))
    result.token_loss.sum().backward()
    assert_close(result.token_loss, [loss], EXACT, "token losses")
    assert_close(logprobs.grad, [gradient], EXACT, "gradient")
    cut = [float(g == 0) for g in gradient]
    assert_close(result.touched.to(F64), [cut], 0, "touched is where the gradient was cut")


def test_k3_at_a_half_and_at_two() -> None:
    # x - ln x - 1: .5 + .6931 - 1 = .1931; 2 - .6931 - 1 = .3069. d/d logp = kl_coef * (1 - x)
    logprobs = torch.tensor([[math.log(0.4), math.log(0.2)]], dtype=F64, requires_grad=True)
    ref = torch.tensor([[math.log(0.2), math.log(0.4)]], dtype=F64)
    penalty = K3Loss(kl_coef=0.1, log_ratio_limit=20.0)(logprobs, logprobs, ref)
    penalty.sum().backward()
    half, two = math.log(2) - 0.5, 1 - math.log(2)
    assert_close([half, two], [0.1931, 0.3069], 5e-5, "the printed decimals")
    assert_close(penalty, [[0.1 * half, 0.1 * two]], EXACT, "coefficient times k3")
    assert_close(logprobs.grad, [[0.05, -0.1]], EXACT, "gradient pulls towards the reference")


def test_k3_is_flat_beyond_its_limit() -> None:
    logprobs = torch.tensor([[-30.0]], dtype=F64, requires_grad=True)
    penalty = K3Loss(kl_coef=1.0, log_ratio_limit=2.0)(logprobs, logprobs, torch.zeros(1, 1, dtype=F64))
    penalty.sum().backward()
    assert_close(penalty, [[math.exp(2) - 2 - 1]], EXACT, "k3 at the limit")
    assert_close(logprobs.grad, [[0.0]], 0, "no gradient beyond it")


def test_options_that_add_nothing_add_zero() -> None:
    values = torch.tensor([[-1.0, -2.0]], dtype=F64)
    assert_close(NoKl()(values, values, None), [[0, 0]], 0, "kl")
    assert_close(NoEntropy()(values, 0.0), [[0, 0]], 0, "entropy")


# --- aggregation and denominator ----------------------------------------------------------------------------

# Two responses, 2 tokens with advantage +1 and 8 with -1, at ratio 1, so each token's loss is -A.
SHORT_RIGHT_LONG_WRONG = step_of([2, 8], [1.0, -1.0], group_size=2)


@pytest.mark.parametrize(
    ("aggregation", "loss", "gradient"),
    [
        # (-2/2 + 8/8) / 2 = 0
        (SequenceMean(0.0), 0.0, (-1 / 4, 1 / 16)),
        # (-2 + 8) / 10 = .6
        (TokenMean(Scope.step), 0.6, (-1 / 10, 1 / 10)),
        # one prompt of 10 tokens: the same
        (PromptMean(), 0.6, (-1 / 10, 1 / 10)),
        # (-2 + 8) / (2 * 10) = .3
        (Constant(10, Width.budget), 0.3, (-1 / 20, 1 / 20)),
        # (-2 + 8) / 2 = 3
        (SequenceSum(), 3.0, (-1 / 2, 1 / 2)),
    ],
)
def test_aggregations_of_a_short_right_and_a_long_wrong_response(aggregation, loss, gradient) -> None:
    run = make_run(aggregation=aggregation)
    got, slope = loss_and_gradient(run, SHORT_RIGHT_LONG_WRONG, torch.full((2, 8), -1.0, dtype=F64))
    assert_close(got, loss, EXACT, "loss")
    assert_close(slope[:, :2], [[gradient[0]] * 2, [gradient[1]] * 2], EXACT, "gradient per token")
    assert_close(slope[0, 2:], [0.0] * 6, 0, "padding")


def test_prompt_mean_weighs_two_prompts_alike() -> None:
    # prompt 1: tokens 1 + 3, losses -1 and +1: (-1 + 3)/4 = .5; prompt 2: 2 + 6: (-2 + 6)/8 = .5; mean .5
    run = make_run(aggregation=PromptMean())
    loss, slope = loss_and_gradient(
        run, step_of([1, 3, 2, 6], [1, -1, 1, -1], group_size=2), torch.full((4, 6), -1.0, dtype=F64)
    )
    assert_close(loss, 0.5, EXACT, "loss")
    assert_close(slope[:, 0], [-1 / 8, 1 / 8, -1 / 16, 1 / 16], EXACT, "1 / (2 prompts * tokens of the prompt)")


@pytest.mark.parametrize(
    ("aggregation", "original", "survivors"),
    [
        # rows of 2 (in), 8 (out), 4 (in), 2 (out) tokens in two groups of two; A = -1, so each loss is +1
        (SequenceMean(0.0), 2 / 4, 2 / 2),
        (TokenMean(Scope.step), 6 / 16, 6 / 6),
        (PromptMean(), (2 / 10 + 4 / 6) / 2, (2 / 2 + 4 / 4) / 2),
        (Constant(8, Width.budget), 6 / (4 * 8), 6 / (2 * 8)),
        (SequenceSum(), 6 / 4, 6 / 2),
    ],
)
def test_denominators_after_two_rows_left(aggregation, original: float, survivors: float) -> None:
    inputs = step_of([2, 8, 4, 2], [-1] * 4, group_size=2, trained=[True, False, True, False])
    logprobs = torch.full((4, 8), -1.0, dtype=F64)
    for denominator, expected in ((Original(), original), (Survivors(), survivors)):
        run = make_run(aggregation=aggregation, denominator=denominator)
        assert_close(loss_and_gradient(run, inputs, logprobs)[0], expected, EXACT, type(denominator).__name__)


def test_survivors_do_not_count_a_prompt_that_left_whole() -> None:
    # only the first of two prompts is in the loss: mean over 1 prompt, not 2
    inputs = step_of([2, 2, 3, 3], [-1] * 4, group_size=2, trained=[True, True, False, False])
    logprobs = torch.full((4, 3), -1.0, dtype=F64)
    for denominator, expected in ((Original(), 0.5), (Survivors(), 1.0)):
        run = make_run(aggregation=PromptMean(), denominator=denominator)
        assert_close(loss_and_gradient(run, inputs, logprobs)[0], expected, EXACT, type(denominator).__name__)


@pytest.mark.parametrize(
    ("aggregation", "original", "survivors"),
    [
        # rows of 4 and 2 tokens, each token's loss 1; two tokens of the first row left
        (SequenceMean(0.0), (2 / 4 + 2 / 2) / 2, (2 / 2 + 2 / 2) / 2),
        (TokenMean(Scope.step), 4 / 6, 4 / 4),
        (PromptMean(), 4 / 6, 4 / 4),
        (Constant(4, Width.budget), 4 / 8, 4 / 8),
        (SequenceSum(), 4 / 2, 4 / 2),
    ],
)
def test_denominators_after_two_tokens_of_a_row_left(aggregation, original: float, survivors: float) -> None:
    inputs = step_of([4, 2], [-1, -1], group_size=2)
    mask = torch.tensor([[True, False, False, True], [True, True, False, False]])
    inputs = replace(inputs, loss_mask=mask)
    for denominator, expected in ((Original(), original), (Survivors(), survivors)):
        run = make_run(aggregation=aggregation, denominator=denominator)
        loss, gradient = loss_and_gradient(run, inputs, torch.full((2, 4), -1.0, dtype=F64))
        assert_close(loss, expected, EXACT, type(denominator).__name__)
        assert torch.equal(gradient != 0, mask)


def test_weights_multiply_the_surrogate_and_not_the_kl_term() -> None:
    # one token: ratio 1, A = 2, weight .5, k3 at x = 2 with coefficient 1: -2 * .5 + (1 - ln 2)
    one = torch.full((1, 1), math.log(0.2), dtype=F64)
    inputs = step_of([1], [2.0], 1, ref_logprobs=one + math.log(2), weights=torch.full((1, 1), 0.5, dtype=F64))
    run = make_run(kl=K3Loss(kl_coef=1.0, log_ratio_limit=20.0))
    assert_close(loss_and_gradient(run, inputs, one)[0], -1 + 1 - math.log(2), EXACT, "loss")


def test_what_the_loss_reports_for_the_log() -> None:
    # Two tokens and one of padding. Learner .3, .5; old .2, .5; sampler .5, .25; reference .6, .5.
    def logs(*chances: float) -> Tensor:
        return torch.tensor([[*chances, 0.1]], dtype=F64).log()

    inputs = step_of([2], [1.0], 1, width=3, old_logprobs=logs(0.2, 0.5), ref_logprobs=logs(0.6, 0.5))
    inputs = replace(inputs, rollouts=replace(inputs.rollouts, sampler_logprobs=logs(0.5, 0.25)))
    run = make_run(kl=K3Loss(kl_coef=0.1, log_ratio_limit=20.0))
    entropy = torch.tensor([[0.4, 0.6, 9.0]], dtype=F64)
    output = policy_loss(run, batch_of_rows(run, inputs, [0]), logs(0.3, 0.5), entropy)
    ln = math.log
    expected = {
        "tokens": 2,
        "entropy": 1.0,
        "ratio": 1.5 + 1,
        "k3_old": 0.5 - ln(1.5),
        "surrogate_touched": 1,  # 1.5 is above 1.2
        "surrogate_weight": 1,  # the cut token weighs nothing, the other its ratio of 1
        "correction_weight": 2,
        "importance_touched": 0,
        "kl_term": 0.1 * (1 - ln(2)),  # x = 2 and x = 1
        "kl_touched": 1,
        "entropy_touched": 0,
        "mismatch_absolute": ln(2.5) + ln(2),
        "mismatch_k3": (0.4 - 1 - ln(0.4)) + (2 - 1 - ln(2)),
        "k3_ref": 1 - ln(2),
        "weight": 1,
        "weight_of_original": 1,
    }
    assert output.sums.keys() == expected.keys()
    for name, value in expected.items():
        assert output.sums[name].is_floating_point(), name
        assert_close(output.sums[name], value, EXACT, name)
    assert_close(output.maxima["mismatch_max"], ln(2.5), EXACT, "largest mismatch")


# --- truncation pressure, by enumeration --------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of response: how likely, the derivative of its log-probability by the parameter asked about, its worth."""

    chance: float
    slope: float
    worth: float
    length: int = 1
    cut: bool = False


def expected_ascent(kinds, truncation, aggregation, denominator, size: int = 8) -> float:
    """Expected ascent along one parameter of the policy, over every composition of a group of eight."""
    total = 0.0
    run = make_run(truncation=truncation, scale=NoScale(), surrogate=Reinforce(), aggregation=aggregation,
                   denominator=denominator)  # fmt: skip
    for bars in combinations(range(size + len(kinds) - 1), len(kinds) - 1):  # stars and bars
        edges = (-1, *bars, size + len(kinds) - 1)
        counts = [right - left - 1 for left, right in pairwise(edges)]
        rows = [kind for kind, count in zip(kinds, counts) for _ in range(count)]
        graded = make_graded([[kind.worth for kind in rows]], truncated=[[kind.cut for kind in rows]])
        rollouts = make_rollouts([kind.length for kind in rows], size)
        cut = run.truncation(graded)
        mask = rollouts.sampled_mask & cut.trained.flatten()[:, None]
        advantages = run.scale(run.baseline(cut), cut).reshape(-1, 1)
        inputs = StepInputs(rollouts, mask, torch.where(mask, advantages, 0.0), None, None, None)
        ascent = -loss_and_gradient(run, inputs, torch.full(mask.shape, -1.0, dtype=F64))[1][:, 0]
        ways = math.factorial(size) / math.prod(math.factorial(c) for c in counts)
        probability = ways * math.prod(kind.chance**c for kind, c in zip(kinds, counts))
        total += probability * sum(float(a) * kind.slope for a, kind in zip(ascent, rows))
    return total


def truncation_pressure(
    truncation, share: float, accuracy: float, cut_reward: float, aggregation, denominator, lengths
) -> float:
    """Coefficient of grad q in the expected ascent direction.

    A response is right with probability (1 - q) a, wrong with (1 - q)(1 - a), cut with q, so the derivative of
    its log-probability by q is -1/(1 - q), -1/(1 - q), 1/q.
    """
    q, a = share, accuracy
    kinds = (
        Kind((1 - q) * a, -1 / (1 - q), 1.0, lengths["right"]),
        Kind((1 - q) * (1 - a), -1 / (1 - q), 0.0, lengths["wrong"]),
        Kind(q, 1 / q, cut_reward, lengths["cut"], cut=True),
    )
    return expected_ascent(kinds, truncation, aggregation, denominator)


ONE_TOKEN = {"right": 1, "wrong": 1, "cut": 1}


@pytest.mark.parametrize(
    ("truncation", "cut_reward", "pressure"),
    [
        # -(a - r_T)(G - 1)/G = -.5 * 7/8
        (Score(), 0.0, -0.4375),
        # times q = .2
        (MaskAfter(), 0.0, -0.0875),
        (MaskBefore(), 0.0, 0.0),
        # -.2 * (.5 + 1) * 7/8
        (MaskAfter(), -1.0, -0.2625),
    ],
)
def test_pressure_on_truncation_where_tokens_weigh_the_same(truncation, cut_reward, pressure) -> None:
    got = truncation_pressure(truncation, 0.2, 0.5, cut_reward, SequenceSum(), Original(), ONE_TOKEN)
    assert_close(got, pressure, 1e-12, "coefficient of grad q")


@pytest.mark.parametrize(
    ("aggregation", "denominator", "lengths", "score", "after", "before"),
    [
        # constant: the numbers above over 40 tokens, whatever the lengths
        (Constant(40, Width.budget), Original(), (20, 12, 40), -10.94, -2.19, 0.0),
        (TokenMean(Scope.step), Survivors(), (20, 12, 40), -19.3, -7.5, 0.0),
        (SequenceMean(0.0), Original(), (20, 12, 40), -7.3, 1.5, 7.0),
        (SequenceMean(0.0), Original(), (30, 10, 40), 0.0, 8.8, 14.1),
    ],
)
def test_thousandths_of_pressure_where_length_enters(aggregation, denominator, lengths, score, after, before) -> None:
    by_kind = dict(zip(("right", "wrong", "cut"), lengths))
    for truncation, expected in ((Score(), score), (MaskAfter(), after), (MaskBefore(), before)):
        got = truncation_pressure(truncation, 0.2, 0.5, 0.0, aggregation, denominator, by_kind)
        assert_close(1000 * got, expected, 0.06, f"{type(truncation).__name__}, one printed decimal")


def ascent_of_finishing(truncation, guesses: float) -> float:
    """Expected ascent along f, in a policy that guesses with probability g and else works out steps and, with
    probability f, stops before the budget does. Steps are right in 97% of cases, guesses in 15%."""
    g, f, right, lucky = guesses, 0.8, 0.97, 0.15
    kinds = (
        Kind(g * lucky, 0.0, 1.0),
        Kind(g * (1 - lucky), 0.0, 0.0),
        Kind((1 - g) * f * right, 1 / f, 1.0),
        Kind((1 - g) * f * (1 - right), 1 / f, 0.0),
        Kind((1 - g) * (1 - f), -1 / (1 - f), 0.0, cut=True),
    )
    return expected_ascent(kinds, truncation, SequenceSum(), Original())


def test_masking_before_teaches_to_finish_only_as_far_as_that_raises_accuracy() -> None:
    """No pressure on q does not mean that q stays: in a policy whose guesses are wrong, finishing the steps raises
    the accuracy a of what finishes, and a is what is pressed on. Once the guesses are gone nothing is left of it."""
    g, f, right, lucky = 0.3, 0.8, 0.97, 0.15
    finished = g + (1 - g) * f
    a = (g * lucky + (1 - g) * f * right) / finished
    raises = (1 - g) * g * (right - lucky) / finished**2  # da/df
    kinds = (
        Kind(finished * a, 1 / a, 1.0),
        Kind(finished * (1 - a), -1 / (1 - a), 0.0),
        Kind(1 - finished, 0, 0, cut=True),
    )
    pressure_on_a = expected_ascent(kinds, MaskBefore(), SequenceSum(), Original())
    assert_close(ascent_of_finishing(MaskBefore(), g), pressure_on_a * raises, 1e-12, "through accuracy alone")
    for truncation, ascent in ((Score(), 0.594), (MaskAfter(), 0.234), (MaskBefore(), 0.171)):
        assert_close(ascent_of_finishing(truncation, g), ascent, 5e-4, f"{truncation}, three printed decimals")
    assert_close(ascent_of_finishing(MaskBefore(), 0.0), 0.0, 1e-12, "no guesses, no pressure")
    # When cut responses are scored, stopping in time pays in itself: 0.97 * 7/8 without any guess.
    assert_close(ascent_of_finishing(Score(), 0.0), 0.97 * 7 / 8, 1e-12, "no guesses, full pressure")
    assert_close(ascent_of_finishing(MaskAfter(), 0.0), 0.2 * 0.97 * 7 / 8, 1e-12, "no guesses, a factor q weaker")


# --- policy -------------------------------------------------------------------------------------------------


class NextTokenTable(nn.Module):
    """A causal LM whose next-token scores are a table looked up by the current token, times the head's weight."""

    def __init__(self, table: Tensor, head: nn.Linear) -> None:
        super().__init__()
        self.table, self.head = table, head

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int):
        scores = self.head(self.table[input_ids][..., None])  # [M, S, V, 1] -> [M, S, V, 1]
        return type("Output", (), {"logits": scores.squeeze(-1)[:, -logits_to_keep:]})()


def linear(weight: float, kind: type[nn.Linear] = nn.Linear, dtype: torch.dtype = torch.float32) -> nn.Linear:
    head = kind(1, 1, bias=False, dtype=dtype)
    nn.init.constant_(head.weight, weight)
    return head


def test_log_probs_entropy_and_temperature_of_a_table() -> None:
    # After token 0 the odds are 1 : 3, after token 1 they are 1 : 1. At temperature .5 odds are squared, 1 : 9.
    model = NextTokenTable(torch.tensor([[0.0, math.log(3)], [0.0, 0.0]], dtype=F64), linear(1.0, dtype=F64))
    # Prompts of length 1 and 3, ending in 0 and 1: rows read the scores of different positions.
    prompts, tokens = [(0,), (1, 0, 1)], torch.tensor([[1, 0], [0, 1]])
    mask = torch.tensor([[True, True], [True, False]])
    logprobs, entropy = token_logprobs(model, prompts, tokens, mask, 0.5, Fp32(LmHead.same))
    # row 1: p(1 | 0) = 9/10, p(0 | 1) = 1/2; row 2: p(0 | 1) = 1/2, then masked
    assert_close(logprobs, [[math.log(0.9), math.log(0.5)], [math.log(0.5), 0]], EXACT, "log-probs")
    spread = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert_close(entropy, [[spread, math.log(2)], [math.log(2), 0]], EXACT, "entropy in nats")


@pytest.mark.parametrize(
    ("precision", "head", "score"),
    [
        # 1 + 2^-9 is an fp32 number; bfloat16 holds 8 bits of mantissa and rounds it to 1
        (Fp32(LmHead.same), nn.Linear, 1 + 2**-9),
        (Bf16(LmHead.same), nn.Linear, 1.0),
        (Bf16(LmHead.fp32), Fp32Head, 1 + 2**-9),
    ],
)
def test_arithmetic_of_the_output_head(precision, head, score: float) -> None:
    model = NextTokenTable(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), linear(1 + 2**-9, head))
    logprobs, _ = token_logprobs(model, [(0,)], torch.tensor([[1]]), torch.tensor([[True]]), 1.0, precision)
    assert_close(logprobs, [[-math.log1p(math.exp(-score))]], 1e-6, "fp32 softmax of the score")


# --- what stands around the loss ----------------------------------------------------------------------------


def test_plain_options_of_the_system_axes() -> None:
    assert [Sync().syncs_after(step) for step in (0, 1, 7)] == [True] * 3
    assert [Frozen().refreshes_after(step) for step in (0, 1, 7)] == [False] * 3
    assert Recomputed().recomputes
    assert [list(part) for part in Updates(minibatches=2).split(6)] == [[0, 1, 2], [3, 4, 5]]


def test_uniform_walks_through_seven_problems_three_at_a_time() -> None:
    # 7 // 3 = 2 batches an epoch; the seventh problem waits
    draws = [Uniform().draw(step, 3, 7, seed=5) for step in range(4)]
    for epoch in (0, 1):
        seen = draws[2 * epoch] + draws[2 * epoch + 1]
        assert len(set(seen)) == 6
        assert set(seen) <= set(range(7))
    assert draws[:2] != draws[2:]
    assert Uniform().draw(3, 3, 7, seed=5) == draws[3]
    assert Uniform().draw(3, 3, 7, seed=6) != draws[3]


# --- verl ---------------------------------------------------------------------------------------------------

CASES = json.loads((Path(__file__).parent / "golden" / "verl_reference.json").read_text())
both_cases = pytest.mark.parametrize("case", CASES, ids=[f"seed{case['seed']}" for case in CASES])
LOSSES = "policy_losses (advantages = group_mean / none)"


def tensor(case: dict, name: str) -> Tensor:
    return torch.tensor(case[name], dtype=F64)


def graded_of(case: dict):
    groups = case["problems"], case["group_size"]
    return make_graded(tensor(case, "rewards").reshape(groups).tolist())


def verl_inputs(case: dict) -> StepInputs:
    lengths = tensor(case, "response_mask").sum(dim=1).long().tolist()
    sampler = tensor(case, "sampler_logprobs")
    rollouts = make_rollouts(lengths, case["group_size"], width=case["tokens"], sampler=sampler)
    assert torch.equal(rollouts.sampled_mask, tensor(case, "response_mask").bool())
    advantages = advantages_of(graded_of(case)).reshape(-1, 1)
    spread = torch.where(rollouts.sampled_mask, advantages, 0.0)
    return StepInputs(rollouts, rollouts.sampled_mask, spread, tensor(case, "old_logprobs"), None, None)


@both_cases
@pytest.mark.parametrize(
    ("name", "baseline", "scale"),
    [
        ("group_mean / group_std ddof=1 eps=1e-6", GroupMean(Singleton.zero), GroupStd(1, 1e-6, False, Singleton.zero)),
        ("group_mean / none", GroupMean(Singleton.zero), NoScale()),
        ("leave_one_out / none", LeaveOneOut(Singleton.zero), NoScale()),
    ],
)
def test_advantages_are_those_of_verl(case, name, baseline, scale) -> None:
    got = advantages_of(graded_of(case), baseline, scale).flatten()
    assert_close(got, case["advantages"][name], VERL, name)


@both_cases
@pytest.mark.parametrize(
    ("name", "surrogate", "aggregation"),
    [
        ("ppo low=.2 high=.28 dual=3 | token_mean", Ppo(0.2, 0.28), TokenMean(Scope.step)),
        ("ppo low=.2 high=.2 dual=3 | sequence_mean", Ppo(0.2, 0.2), SequenceMean(0.0)),
        ("ppo low=.2 high=.2 dual=3 | constant L=7", Ppo(0.2, 0.2), Constant(7, Width.budget)),
    ],
)
def test_losses_and_gradients_are_those_of_verl(case, name, surrogate, aggregation) -> None:
    inputs, expected = verl_inputs(case), case[LOSSES][name]
    ratio = (tensor(case, "logprobs") - inputs.old_logprobs).exp()
    assert ratio[inputs.loss_mask & (inputs.advantages < 0)].max() < 3, "verl's dual clip would act"
    run = make_run(surrogate=surrogate, aggregation=aggregation)
    loss, gradient = loss_and_gradient(run, inputs, tensor(case, "logprobs"))
    assert_close(loss, expected["loss"], VERL, f"loss of {name}")
    assert_close(gradient, expected["grad"], VERL, f"gradient of {name}")


@both_cases
def test_k3_is_that_of_verl(case) -> None:
    logprobs = tensor(case, "logprobs")
    penalty = K3Loss(kl_coef=1.0, log_ratio_limit=20.0)(logprobs, logprobs, tensor(case, "ref_logprobs"))
    got = penalty * tensor(case, "response_mask")
    assert_close(got, case["kl elementwise"]["k3"], VERL, "k3 on every token")


def test_the_stages_in_order_give_the_step_made_by_hand() -> None:
    # [1, 0] centred and divided by its deviation .5 is [1, -1]
    zeros = torch.zeros(2, 8, dtype=F64)
    rollouts = make_rollouts([2, 8], 2)
    scene = Scene(rollouts, make_graded([[1, 0]]), zeros - 1, zeros - 1, zeros - 1)
    run = make_run(scale=GroupStd(0, 0.0, False, Singleton.zero))
    assert_close(inputs_of(run, scene).advantages, SHORT_RIGHT_LONG_WRONG.advantages, EXACT, "advantages")
