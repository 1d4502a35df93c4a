"""Numbers computed by hand for every option of every axis that exists; test_conventions has those of verl."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from statistics import fmean, pstdev

import pytest
import torch
from compositions import TESTS, built_in, listed
from helpers import (
    F64,
    ONE_MICROBATCH,
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
from loss_options import IMPORTANCES, SURROGATES
from torch import Tensor, nn

from grpo_lab.config.run_config import AXES, snake_case
from grpo_lab.learner.loss import policy_loss
from grpo_lab.learner.mismatch import mismatch_metrics
from grpo_lab.policy.batching import StepInputs
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import Fp32Head
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import (
    BatchMean,
    GroupMean,
    LeaveOneOut,
    LengthWeighted,
    NoBaseline,
    PassAtK,
    Weights,
)
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import Icepop, Mis, NoCorrection, TisGeometric, TisSequence, TisToken
from grpo_lab.tricks.curriculum import Memory, Pool, Uniform
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.entropy import Adaptive, Bonus, HighEntropyTokens, NoEntropy
from grpo_lab.tricks.group_filter import Drop, Keep, Signal, without_signal
from grpo_lab.tricks.importance import Sequence, SequenceProduct, SequenceToken, Token
from grpo_lab.tricks.kl import K1Reward, K2Loss, K3Loss, K3Unbiased, NoKl
from grpo_lab.tricks.old_policy import Recomputed, Sampler
from grpo_lab.tricks.precision import Bf16, Fp16, Fp32, LmHead
from grpo_lab.tricks.reference import Frozen
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
from grpo_lab.tricks.reward_shaping import (
    KimiLength,
    L1Exact,
    L1Max,
    NoShaping,
    SoftOverlong,
    SoftOverlongCorrectOnly,
)
from grpo_lab.tricks.scale import AllWrong, BatchStd, Deviation, GroupStd, InformativeShare, NoScale, SignWeighted
from grpo_lab.tricks.scale import GroupMean as DivideByMean
from grpo_lab.tricks.schedule import Sync
from grpo_lab.tricks.surrogate import (
    Cispo,
    ClipCov,
    Delight,
    Divergence,
    Dppo,
    DualClip,
    Gmpo,
    Kimi,
    KlCov,
    Ppo,
    Reinforce,
    Sapo,
    StepTokens,
    Surrogate,
    SurrogateInputs,
    SurrogateLoss,
    Topr,
)
from grpo_lab.tricks.surrogate_off_policy import Dro, Ipo, KimiToken, Vespo
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore, Score
from grpo_lab.tricks.updates import Updates

EXACT = 1e-12
TWO_OF_EIGHT = [[1, 0, 0, 0, 1, 0, 0, 0]]


# Where the numbers of what generates, remembers or learns are.
BESIDE = (
    "test_golden",
    "test_baselines",
    "test_credit",
    "test_curricula",
    "test_estimators",
    "test_filters",
    "test_fp8",
    "test_interventions",
    "test_off_policy",
    "test_update_mask",
    "test_interpolated_old_policy",
    "test_schedules",
    "test_sft",
    "test_token_credit",
)


@pytest.mark.parametrize("axis", AXES)
def test_every_option_has_a_number_in_this_file_or_beside_it_or_in_one_of_its_own(axis: str) -> None:
    files = [next(TESTS.rglob(f"{name}.py")) for name in BESIDE]
    found = set.union(*map(built_in, files))
    missing = {kind.__name__: f"tests/tricks/test_{snake_case(kind.__name__)}.py" for kind in listed(axis) - found}
    assert not missing, f"{axis}: write a test with numbers worked out by hand: {missing}"


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


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        # rewards 1, 0 | 1, 1 average 3/4, whatever the group
        (Weights.rows, [[0.25, -0.75], [0.25, 0.25]]),
        # of 1, 3 | 2, 4 tokens: (1 + 2 + 4) / 10 = .7
        (Weights.tokens, [[0.3, -0.7], [0.3, 0.3]]),
    ],
)
def test_batch_mean_knows_no_groups(by, expected) -> None:
    graded = make_graded([[1, 0], [1, 1]], lengths=[[1, 3], [2, 4]])
    assert_close(BatchMean(by)(graded), expected, EXACT, "centred")


def test_batch_mean_leaves_out_what_is_not_counted_and_is_zero_where_all_are_equal() -> None:
    # counted: 1, 0, 1 with 1, 3, 2 tokens: means 2/3 and 3/6
    graded = make_graded([[1, 0], [1, 7]], lengths=[[1, 3], [2, 4]], in_statistics=[[True, True], [True, False]])
    assert_close(BatchMean(Weights.rows)(graded), [[1 / 3, -2 / 3], [1 / 3, 0]], EXACT, "rows")
    assert_close(BatchMean(Weights.tokens)(graded), [[0.5, -0.5], [0.5, 0]], EXACT, "tokens")
    flat = make_graded([[0.9] * 4, [0.9] * 4], lengths=[[1, 2, 3, 4], [5, 6, 7, 8]])
    assert_close(BatchMean(Weights.tokens)(flat), [[0.0] * 4] * 2, 0, "equal rewards")


def test_length_weighted_mean_of_a_group() -> None:
    # (10 + 40) / 100 = .5; (10 * 1) / 100 = .1
    lengths = [[10, 20, 30, 40]] * 2
    graded = make_graded([[1, 0, 0, 1], [1, 0, 0, 0]], lengths=lengths)
    centred = LengthWeighted(Singleton.zero)(graded)
    assert_close(centred, [[0.5, -0.5, -0.5, 0.5], [0.9, -0.1, -0.1, -0.1]], EXACT, "reward minus .5 and .1")
    assert_close((centred * graded.lengths).sum(dim=1), [0, 0], EXACT, "zero once weighted by length")
    # without the last row: 10 / 60; ties and a lone row are 0
    left = make_graded(
        [[1, 0, 0, 1], [0.9] * 4], lengths=lengths, in_statistics=[[True, True, True, False], [True] * 4]
    )
    assert_close(
        LengthWeighted(Singleton.zero)(left), [[5 / 6, -1 / 6, -1 / 6, 0], [0] * 4], EXACT, "counted rows alone"
    )
    lone = make_graded([[1, 0]], in_statistics=[[True, False]])
    assert_close(LengthWeighted(Singleton.zero)(lone), [[0, 0]], 0, "nothing to compare with")


@pytest.mark.parametrize(
    ("k", "right", "wrong", "printed"),
    [
        # fail = C(6,2)/C(8,2) = 15/28, sigma = sqrt(13 * 15)/28: right fail/sigma = 15/sqrt(195),
        # wrong (15/28 - C(5,1)/C(7,1))/sigma = (15 - 20)/sqrt(195)
        (2, 15 / math.sqrt(195), -5 / math.sqrt(195), (1.074172, -0.358057)),
        # fail = C(6,4)/C(8,4) = 3/14, sigma = sqrt(11 * 3)/14: 3/sqrt(33);
        # wrong (3/14 - C(5,3)/C(7,3))/sigma = (3 - 4)/sqrt(33)
        (4, 3 / math.sqrt(33), -1 / math.sqrt(33), (0.522233, -0.174078)),
    ],
)
def test_pass_at_k_of_two_right_answers_in_eight(k, right, wrong, printed) -> None:
    advantages = advantages_of(make_graded(TWO_OF_EIGHT), PassAtK(k))
    expected = [[right, wrong, wrong, wrong, right, wrong, wrong, wrong]]
    assert_close(advantages, expected, EXACT, "advantages")
    assert_close(advantages[0, :2], printed, 5e-7, "six printed decimals")


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("right", range(7))
def test_pass_at_k_is_the_mean_over_all_subsets_that_hold_the_response(right: int, k: int) -> None:
    """Each subset of k of the six is worth its best outcome, standardised over all subsets."""
    outcomes = [1.0] * right + [0.0] * (6 - right)
    subsets = list(combinations(range(6), k))
    best = [max(outcomes[row] for row in subset) for subset in subsets]
    mean, deviation = fmean(best), pstdev(best)
    expected = [
        fmean((value - mean) / deviation if deviation else 0.0 for subset, value in zip(subsets, best) if row in subset)
        for row in range(6)
    ]
    assert_close(PassAtK(k)(make_graded([outcomes])), [expected], EXACT, f"{right} of 6 right, k = {k}")


def test_pass_at_one_is_the_group_mean_over_the_group_deviation() -> None:
    graded = make_graded([[1, 0, 0, 0, 1], [1, 1, 1, 1, 0], [1] * 5, [0] * 5])
    expected = advantages_of(graded, GroupMean(Singleton.zero), GroupStd(0, 0.0, False, Singleton.zero))
    assert_close(PassAtK(1)(graded), expected, EXACT, "k = 1")


def test_pass_at_k_is_zero_on_easy_prompts_and_in_groups_with_fewer_than_k_counted() -> None:
    first, all_but_last = [1, 0, 0, 0], [True, True, True, False]
    easy = make_graded([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    assert_close(PassAtK(3)(easy), [[0.0] * 4] * 4, 0, "every three hold a right answer, or none does")
    few = make_graded([first, first], in_statistics=[all_but_last, [True, True, False, False]])
    # of 1, 0, 0: C(2,2)/C(3,2) = 1/3 fail, sigma = sqrt(2)/3: right 1/sqrt(2),
    # wrong (1/3 - C(1,1)/C(2,1))/sigma = -1/(2 sqrt(2))
    root = math.sqrt(2)
    assert_close(PassAtK(2)(few)[0], [1 / root, -1 / (2 * root), -1 / (2 * root), 0], EXACT, "three counted, k = 2")
    assert_close(PassAtK(3)(few)[1], [0, 0, 0, 0], 0, "two counted, k = 3")
    assert [PassAtK(k).smallest_group for k in (1, 2, 4)] == [2, 3, 5]


def test_pass_at_k_reads_the_outcome_and_not_the_shaped_reward() -> None:
    shaped = make_graded([[0.2, 0.9, -1, 0.9]], correctness=[[1, 0, 0, 0]])
    assert_close(PassAtK(2)(shaped), PassAtK(2)(make_graded([[1, 0, 0, 0]])), 0, "outcomes 1, 0, 0, 0")


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        # rewards 1, 0 | 0, 0, less their group's mean: .5, -.5 | 0, 0. Mean 0, variance .5/4 = 1/8
        (
            BatchStd(Deviation.centred, Weights.rows, False, 0, 0.0, Floor.added),
            [[math.sqrt(2), -math.sqrt(2)], [0, 0]],
        ),
        # ddof 1: variance .5/3 = 1/6
        (
            BatchStd(Deviation.centred, Weights.rows, False, 1, 0.0, Floor.added),
            [[math.sqrt(6) / 2, -math.sqrt(6) / 2], [0, 0]],
        ),
        # eps beside the deviation and below the root
        (
            BatchStd(Deviation.centred, Weights.rows, False, 0, 0.25, Floor.added),
            [[0.5 / (math.sqrt(1 / 8) + 0.25), -0.5 / (math.sqrt(1 / 8) + 0.25)], [0, 0]],
        ),
        (
            BatchStd(Deviation.centred, Weights.rows, False, 0, 1 / 8, Floor.in_variance),
            [[1, -1], [0, 0]],  # .5 / sqrt(1/8 + 1/8)
        ),
        # raw rewards 1, 0, 0, 0: mean 1/4, variance 3/16
        (
            BatchStd(Deviation.raw, Weights.rows, False, 0, 0.0, Floor.added),
            [[2 / math.sqrt(3), -2 / math.sqrt(3)], [0, 0]],
        ),
        # raw by tokens, of 1, 3 | 2, 4 tokens: mean 1/10, variance 9/100
        (BatchStd(Deviation.raw, Weights.tokens, False, 0, 0.0, Floor.added), [[5 / 3, -5 / 3], [0, 0]]),
        # centred by tokens: mean (.5 - 1.5)/10 = -.1, variance (.36 * 1 + .16 * 3 + .01 * 6)/10 = .09
        (BatchStd(Deviation.centred, Weights.tokens, False, 0, 0.0, Floor.added), [[5 / 3, -5 / 3], [0, 0]]),
        # recentred: (.5 + .1)/.3, (-.5 + .1)/.3, .1/.3: a tied group is no longer 0
        (BatchStd(Deviation.centred, Weights.tokens, True, 0, 0.0, Floor.added), [[2, -4 / 3], [1 / 3, 1 / 3]]),
        # ddof 1 over tokens: variance .9/9 = .1
        (
            BatchStd(Deviation.centred, Weights.tokens, True, 1, 0.0, Floor.added),
            [[0.6 / math.sqrt(0.1), -0.4 / math.sqrt(0.1)], [0.1 / math.sqrt(0.1)] * 2],
        ),
    ],
    ids=repr,
)
def test_deviations_of_the_batch(scale, expected) -> None:
    graded = make_graded([[1, 0], [0, 0]], lengths=[[1, 3], [2, 4]])
    assert_close(advantages_of(graded, scale=scale), expected, EXACT, "advantages")
    assert scale.moves_zeros == (expected[1][0] != 0)


def test_batch_std_whitens_raw_rewards_leaves_out_uncounted_rows_and_ties() -> None:
    plain = BatchStd(Deviation.centred, Weights.rows, True, 0, 0.0, Floor.added)
    # 1, 0, 0, 0 less 1/4 over sqrt(3)/4
    root = math.sqrt(3)
    whitened = advantages_of(make_graded([[1, 0], [0, 0]]), NoBaseline(), plain)
    assert_close(whitened, [[root, -1 / root], [-1 / root, -1 / root]], EXACT, "whitened rewards")
    # 1, 0 and the counted 0: mean 1/3, variance 2/9
    left = make_graded([[1, 0], [0, 9]], in_statistics=[[True, True], [True, False]])
    root = math.sqrt(2)
    expected = [[root, -1 / root], [-1 / root, 0]]
    assert_close(advantages_of(left, NoBaseline(), plain), expected, EXACT, "the row of 9 is not counted")
    flat = make_graded([[0.7] * 4] * 3)
    for of in Deviation:
        tiny = BatchStd(of, Weights.rows, False, 0, 0.0, Floor.added)
        assert_close(advantages_of(flat, NoBaseline(), tiny), [[0.0] * 4] * 3, 0, f"equal {of.value} values")


def test_division_by_the_mean_of_the_group() -> None:
    # .75/.25 = 3 and -.25/.25 = -1; all wrong; all right; rewards 2, 1 of mean 1.5
    zero, minus_one = DivideByMean(AllWrong.zero), DivideByMean(AllWrong.minus_one)
    right, wrong = 3.0, -1.0
    for scale in (zero, minus_one):
        got = advantages_of(make_graded(TWO_OF_EIGHT), scale=scale)
        assert_close(got, [[right, wrong, wrong, wrong, right, wrong, wrong, wrong]], EXACT, "two of eight")
    graded = make_graded([[0, 0], [1, 1], [2, 1]])
    assert_close(advantages_of(graded, scale=zero), [[0, 0], [0, 0], [1 / 3, -1 / 3]], EXACT, "0 where all are wrong")
    got = advantages_of(graded, scale=minus_one)
    assert_close(got, [[-1, -1], [0, 0], [1 / 3, -1 / 3]], EXACT, "-1 where all are wrong")
    left = make_graded([[0, 1]], in_statistics=[[True, False]])
    assert_close(advantages_of(left, scale=minus_one), [[-1, 0]], EXACT, "the right answer is not counted")
    assert (zero.moves_zeros, minus_one.moves_zeros) == (False, True)


def test_the_share_of_groups_with_signal() -> None:
    # one group in four has signal: alpha 4; three rewards of eight are not 0: alpha 8/3
    graded = make_graded([[1, 0], [0, 0], [1, 1], [0, 0]])
    for alpha, worth in ((AlphaForm.informative_groups, 2.0), (AlphaForm.nonzero_rewards, 4 / 3)):
        expected = [[worth, -worth], [0, 0], [0, 0], [0, 0]]
        assert_close(advantages_of(graded, scale=InformativeShare(alpha)), expected, EXACT, alpha.value)
    # a group that counts no row is no group: 1 of 2, and 1 reward of 4
    left = make_graded([[1, 0], [0, 0], [1, 0]], in_statistics=[[True] * 2, [True] * 2, [False] * 2])
    for alpha, worth in ((AlphaForm.informative_groups, 1.0), (AlphaForm.nonzero_rewards, 2.0)):
        expected = [[worth, -worth], [0, 0], [0, 0]]
        assert_close(advantages_of(left, scale=InformativeShare(alpha)), expected, EXACT, alpha.value)
    # one that counts a single row is a group without signal: 1 of 2, and 1 reward of 3
    alone = make_graded([[1, 0], [0, 0]], in_statistics=[[True, True], [True, False]])
    for alpha, worth in ((AlphaForm.informative_groups, 1.0), (AlphaForm.nonzero_rewards, 1.5)):
        expected = [[worth, -worth], [0, 0]]
        assert_close(advantages_of(alone, scale=InformativeShare(alpha)), expected, EXACT, alpha.value)
    nothing = make_graded([[0, 0], [0, 0]])
    for alpha in AlphaForm:
        assert_close(advantages_of(nothing, scale=InformativeShare(alpha)), [[0, 0]] * 2, 0, "no signal")


@pytest.mark.parametrize(
    ("positive", "negative", "expected"), [(1.0, 0.0, [1, 0, 0]), (0.0, 1.0, [0, -1, -1]), (0.1, 1.0, [0.1, -1, -1])]
)
def test_weights_of_right_and_wrong_answers(positive, negative, expected) -> None:
    graded = make_graded([[1, -1, -1]])
    got = advantages_of(graded, NoBaseline(), SignWeighted(positive, negative))
    assert_close(got, [expected], EXACT, "rewards 1, -1, -1 without a baseline")


def test_deviation_of_the_other_rows() -> None:
    """NeMo-RL's: the only right answer of eight has a deviation of 0 beside it and is not divided at all."""
    scale = GroupStd(1, 0.0, True, Singleton.zero)
    # the seven others of the right answer are all wrong; those of a wrong one hold 1 of 7: variance 1/7, C = -1/7
    one = advantages_of(make_graded([[1] + [0] * 7]), LeaveOneOut(Singleton.zero), scale)
    assert_close(one, [[1.0] + [-1 / math.sqrt(7)] * 7], EXACT, "one of eight")
    # right: others 1 of 7, C = 6/7: 6/sqrt(7) = 2.27; wrong: others 2 of 7, C = -2/7, variance 10/42
    two = advantages_of(make_graded([[1, 1] + [0] * 6]), LeaveOneOut(Singleton.zero), scale)
    wrong = -2 / 7 / math.sqrt(10 / 42)
    assert_close(two, [[6 / math.sqrt(7)] * 2 + [wrong] * 6], EXACT, "two of eight")


def test_a_lone_row_keeps_its_raw_reward_where_it_is_asked_to() -> None:
    lone = make_graded([[0.5, 1, 1]], in_statistics=[[True, False, False]])
    # .5, and .5 / (1 + .25)
    for baseline in (GroupMean(Singleton.raw), LeaveOneOut(Singleton.raw)):
        assert_close(advantages_of(lone, baseline), [[0.5, 0, 0]], EXACT, "not centred")
        divided = advantages_of(lone, baseline, GroupStd(1, 0.25, False, Singleton.raw))
        assert_close(divided, [[0.4, 0, 0]], EXACT, "divided by 1 + eps")


def test_the_deviation_of_the_others_knows_no_unit_of_reward() -> None:
    scale = GroupStd(1, 0.0, True, Singleton.zero)
    whole = advantages_of(make_graded(TWO_OF_EIGHT), LeaveOneOut(Singleton.zero), scale)
    tiny = [[1e-7 * reward for reward in TWO_OF_EIGHT[0]]]
    got = advantages_of(make_graded(tiny), LeaveOneOut(Singleton.zero), scale)
    # right: the others hold one right answer in seven, 6/7 over sqrt(1/7) = 2.2678; wrong: two in seven
    assert_close(whole[0, 0], 6 / 7 * math.sqrt(7), EXACT, "6/7 over sqrt(7 * 1/7 * 6/7 / 6)")
    assert_close(got, whole, 1e-9, "rewards of a ten-millionth")


# --- reward shaping -----------------------------------------------------------------------------------------


def test_soft_overlong_of_the_published_budget() -> None:
    # start = 20480 - 4096 = 16384; (16385 - 16384)/4096 = 2.4414e-4; (18432 - 16384)/4096 = .5; cap at 1
    lengths = [[16384, 16385, 18432, 20480, 20481]]
    graded = make_graded([[1, 1, 0, 0, 0]], lengths=lengths)
    shaped = SoftOverlong(max_tokens=20480, cache_tokens=4096, factor=1.0, correct=1.0, wrong=-1.0)(graded)
    assert_close(shaped.components["soft_overlong"], [[0, -1 / 4096, -0.5, -1, -1]], EXACT, "penalty")
    assert_close(shaped.reward, [[1, 1 - 1 / 4096, -0.5, -1, -1]], EXACT, "outcome's reward plus penalty")
    assert_close(shaped.correctness, [[1, 1, 0, 0, 0]], 0, "the outcome is never shaped")


def test_factor_scales_the_overlong_penalty() -> None:
    shaped = SoftOverlong(max_tokens=40, cache_tokens=10, factor=0.2, correct=1.0, wrong=-1.0)(
        make_graded([[1, 1]], lengths=[[35, 40]])
    )
    assert_close(shaped.reward, [[0.9, 0.8]], EXACT, "1 - .2 * 5/10 and 1 - .2 * 10/10")


def test_equal_factors_are_equal_strengths_under_both_kinds_of_rewards() -> None:
    # a ramp of 10 tokens, half of it and all of it used, by right and wrong answers; the published penalty costs half
    # of what parts right from wrong: 1 of 2 under DAPO's rewards of -1 and 1, .5 of 1 under rewards of 0 and 1
    lengths = [[35, 40, 35, 40, 30]]
    right = [1, 1, 0, 0, 1]
    for low, ramp, of_right in ((0.0, [0.75, 0.5, -0.25, -0.5, 1], [0.75, 0.5, 0, 0, 1]),
                                (-1.0, [0.5, 0, -1.5, -2, 1], [0.5, 0, -1, -1, 1])):  # fmt: skip
        graded = make_graded([[1.0 if bit else low for bit in right]], correctness=[right], lengths=lengths)
        everywhere = SoftOverlong(40, 10, 1.0, correct=1.0, wrong=low)
        assert_close(everywhere(graded).reward, [ramp], EXACT, f"all responses, {low}")
        on_right = SoftOverlongCorrectOnly(40, 10, 1.0, correct=1.0, wrong=low)
        assert_close(on_right(graded).reward, [of_right], EXACT, f"right answers, {low}")
        assert everywhere.largest == on_right.largest == (1.0 - low) / 2
    standardised = []
    for low in (0.0, -1.0):
        graded = make_graded([[1.0 if bit else low for bit in right]], correctness=[right], lengths=lengths)
        shaped = SoftOverlong(40, 10, 0.7, correct=1.0, wrong=low)(graded)
        standardised.append(advantages_of(shaped, scale=GroupStd(0, 0.0, False, Singleton.zero)))
    assert_close(*standardised, EXACT, "the same advantages once the group's deviation takes the unit out")


def test_no_shaping_adds_no_component() -> None:
    graded = make_graded([[1, 0]], lengths=[[3, 50]])
    assert NoShaping()(graded) is graded


def test_correct_only_ramp_of_the_published_budget() -> None:
    # (14000 - 12000)/2000 - 1 = 0; (14000 - 13000)/2000 - 1 = -.5; at and above the budget -1; wrong ones nothing
    lengths = [[12000, 13000, 14000, 15000, 13000, 15000]]
    graded = make_graded([[1, 1, 1, 1, 0, 0]], lengths=lengths)
    shaped = SoftOverlongCorrectOnly(max_tokens=14000, cache_tokens=2000, factor=0.5, correct=1.0, wrong=-1.0)(graded)
    assert_close(shaped.reward, [[1, 0.75, 0.5, 0.5, 0, 0]], EXACT, "half a point for the whole ramp")
    outcome = make_graded([[0.1, 0.1]], correctness=[[1, 0]], lengths=[[14000, 14000]])
    shaped = SoftOverlongCorrectOnly(14000, 2000, 1.0, 1.0, -1.0)(outcome)
    assert_close(shaped.components["soft_overlong"], [[-1, 0]], EXACT, "right is what the verifier says")


def test_kimi_length_of_five_responses() -> None:
    # .5 - (length - 100)/400 = .5, .25, 0, -.25, -.5; wrong ones keep what is below 0
    lengths = [[100, 200, 300, 400, 500]] * 2
    graded = make_graded([[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]], lengths=lengths)
    shaped = KimiLength(coef=1.0, begins_at=0.0)(graded)
    expected = [[0.5, 0.25, 0, -0.25, -0.5], [0, 0, 0, -0.25, -0.5]]
    assert_close(shaped.components["kimi_length"], expected, EXACT, "lambda")
    assert_close(
        KimiLength(coef=0.2, begins_at=0.0)(graded).reward[0], [1.1, 1.05, 0, -0.05, -0.1], EXACT, "a fifth of it added"
    )
    same = make_graded([[1, 0]], lengths=[[7, 7]])
    assert_close(KimiLength(coef=1.0, begins_at=0.0)(same).reward, [[1, 0]], 0, "equal lengths")


def test_kimi_length_waits_for_its_share_of_the_budget() -> None:
    # three groups drawn at .49, .5 and .9 of the budget: nothing is added to the first, all of it to the others
    graded = make_graded([[1, 1, 0]] * 3, lengths=[[100, 300, 300]] * 3, progress=[0.49, 0.5, 0.9])
    shaped = KimiLength(coef=0.2, begins_at=0.5)(graded)
    assert_close(shaped.components["kimi_length"], [[0, 0, 0], [0.1, -0.1, -0.1], [0.1, -0.1, -0.1]], EXACT, "late")
    always = KimiLength(coef=0.2, begins_at=0.0)
    assert_close(always(graded).components["kimi_length"], [[0.1, -0.1, -0.1]] * 3, EXACT, "from the start")
    without = make_graded([[1, 1, 0]], lengths=[[100, 300, 300]])
    assert_close(always(without).reward, [[1.1, 0.9, -0.1]], EXACT, "needs no progress")


def test_l1_of_the_published_numbers() -> None:
    # exact: 1 - .0003 * 500 = .85, right or wrong, too short or too long
    graded = make_graded([[1, 0, 1, 1]], lengths=[[1000, 1000, 100, 500]], target_length=[[500] * 4])
    exact = L1Exact(alpha=0.0003, shortest=100, longest=4000)(graded)
    assert_close(exact.reward, [[0.85, -0.15, 0.88, 1]], EXACT, "a right answer of 1000 tokens is worth .85")
    # at most: .0003 * (500 - n) + .5 within [0, 1]
    lengths = [[100, 500, 1000, 2000, 2200, 100, 5000]]
    asked = make_graded([[1, 1, 1, 1, 1, 0, 0]], lengths=lengths, target_length=[[500] * 7])
    most = L1Max(alpha=0.0003, shortest=100, longest=4000, delta=0.5)(asked)
    assert_close(most.reward, [[0.62, 0.5, 0.35, 0.05, 0, 0, 0]], EXACT, "wrong answers feel no pressure")
    short = make_graded([[1]], lengths=[[100]], target_length=[[500]])
    steep = L1Max(alpha=0.01, shortest=100, longest=4000, delta=0.5)
    assert_close(steep(short).reward, [[1]], EXACT, ".01 * 400 + .5 stops at 1")


@pytest.mark.parametrize(
    ("shaping", "of_zero_and_one", "of_plus_and_minus"),
    [
        (NoShaping(), 0, -1),
        (SoftOverlong(40, 10, 0.5, 1.0, -1.0), -0.5, -1.5),
        # a right answer falls to .5 or to -.2
        (SoftOverlongCorrectOnly(40, 10, 0.5, 1.0, -1.0), 0, -1),
        (SoftOverlongCorrectOnly(40, 10, 1.2, 1.0, -1.0), -0.2, -1),
        (KimiLength(0.5, 0.0), -0.25, -1.25),
        (L1Exact(0.03, 8, 24), -math.inf, -math.inf),
        (L1Max(0.03, 8, 24, 0.5), 0, -1),
    ],
    ids=repr,
)
def test_the_lowest_reward_a_shaping_can_give(shaping, of_zero_and_one: float, of_plus_and_minus: float) -> None:
    assert shaping.lowest(1.0, 0.0) == pytest.approx(of_zero_and_one)
    assert shaping.lowest(1.0, -1.0) == pytest.approx(of_plus_and_minus)


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
    assert cut.in_statistics.tolist() == [[bool(bit) for bit in counted]]
    assert cut.in_loss.tolist() == [[bool(bit) for bit in trained]]
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
    graded = make_graded([[1, 0], [-0.1, -0.2], [1, 1]], correctness=[[1, 0], [0, 0], [1, 1]])
    filtered = group_filter(graded)
    expected = [[bit, bit] for bit in kept]
    assert filtered.in_loss.tolist() == expected
    assert filtered.in_statistics.tolist() == expected


def test_share_of_groups_without_signal_at_a_pass_rate_of_nine_in_ten() -> None:
    # .9^4 + .1^4 = .6562, by every group of four that can come up
    outcomes = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=F64)] * 4)
    chances = (0.1 + 0.8 * outcomes).prod(dim=1)
    flat = without_signal(make_graded(outcomes.tolist()), Signal.outcome)[:, 0]
    assert_close(chances[flat].sum(), 0.6562, EXACT, "share")


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


# Learner over sampler, token by token: 1.2, 3, .5, and a token that was not sampled; then three of ratio 1.
RHO = [[1.2, 3.0, 0.5, 7.0], [1.0, 1.0, 1.0, 7.0]]
SAMPLED = torch.tensor([[True, True, True, False]] * 2)
LEARNER_LOGS, SAMPLER_LOGS = torch.tensor(RHO, dtype=F64).log() - 3, torch.full((2, 4), -3.0, dtype=F64)


@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (TisToken(cap=2.0, floor=0.0), [1.2, 2, 0.5]),
        (TisToken(cap=2.0, floor=0.8), [1.2, 2, 0.8]),
        # the product is 1.2 * 3 * .5 = 1.8
        (TisSequence(cap=2.0), [1.8] * 3),
        (TisSequence(cap=1.5), [1.5] * 3),
        (TisGeometric(cap=2.0), [1.8 ** (1 / 3)] * 3),
        (TisGeometric(cap=1.1), [1.1] * 3),
        (Mis(low=0.5, high=2.0), [1.8] * 3),
        (Mis(low=0.5, high=1.5), [0] * 3),
        (Icepop(low=0.4, high=2.0), [1.2, 0, 0.5]),
        (Icepop(low=0.6, high=5.0), [1.2, 3, 0]),
    ],
    ids=repr,
)
def test_weights_of_ratios_of_one_and_a_fifth_three_and_a_half(correction, weights) -> None:
    got = correction(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
    assert_close(got[0], [*weights, 1], EXACT, "weights, 1 where nothing was sampled")
    lowest = getattr(correction, "low", 0.0)
    assert_close(got[1], [float(lowest <= 1)] * 3 + [1], EXACT, "ratios of 1")


def test_masked_sampling_of_responses_has_a_lower_bound_too() -> None:
    # .5 * .9 = .45 and .9 * .9 = .81
    logs = torch.tensor([[0.5, 0.9], [0.9, 0.9]], dtype=F64).log()
    weights = Mis(low=0.6, high=2.0)(logs - 1, torch.full((2, 2), -1.0, dtype=F64), torch.ones(2, 2, dtype=torch.bool))
    assert_close(weights, [[0, 0], [0.81, 0.81]], EXACT, "a product below the bound weighs nothing")


def test_a_product_of_ratios_grows_with_length_and_a_geometric_mean_does_not() -> None:
    for tokens, product in ((10, 2.5937424601), (100, 13780.6123398)):
        old, sampler = torch.full((1, tokens), math.log(1.1), dtype=F64), torch.zeros(1, tokens, dtype=F64)
        mask = torch.ones(1, tokens, dtype=torch.bool)
        assert_close(TisSequence(cap=1e6)(old, sampler, mask)[0, 0], product, 1e-6, f"1.1^{tokens}")
        assert_close(TisGeometric(cap=1e6)(old, sampler, mask)[0, 0], 1.1, EXACT, f"{tokens} tokens of 1.1")
        # the mask of a product of at most 3 lets 11 tokens of 1.1 through
        assert_close(Mis(0.0, 3.0)(old, sampler, mask)[0, 0], product if product < 3 else 0, 1e-6, "masked")
    far = torch.tensor([[30.0, -30.0]], dtype=F64)
    both = torch.ones(1, 2, dtype=torch.bool)
    got = TisToken(cap=1e9, floor=0.0)(far, torch.zeros_like(far), both)
    assert_close(got[0] / torch.tensor([math.exp(20), math.exp(-20)]), [1, 1], 1e-6, "exp stops at 20 nats")


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        # ratios 1.2, 3, .5; for verl's sign the bounds are on .83, .33, 2
        (TokenK1(False, 0.6, 2.0, BoundForm.ratio), [1, 0, 0]),
        (TokenK1(False, 0.4, 2.0, BoundForm.ratio), [1, 0, 1]),
        (TokenK1(False, 0.6, 2.5, BoundForm.inverse), [1, 0, 1]),
        (TokenK1(False, 0.3, 1.0, BoundForm.inverse), [1, 1, 0]),
        # k2: ln(1.2)^2/2 = .0166, ln(3)^2/2 = .6035, ln(.5)^2/2 = .2402
        (TokenK2(False, 0.61), [1, 1, 1]),
        (TokenK2(False, 0.6), [1, 0, 1]),
        (TokenK2(False, 0.24), [1, 0, 0]),
        (TokenK2(False, 0.0166), [0, 0, 0]),
        # k3: .2 - ln 1.2 = .0177, 2 - ln 3 = .9014, ln 2 - .5 = .1931
        (TokenK3(False, 0.91), [1, 1, 1]),
        (TokenK3(False, 0.9), [1, 0, 1]),
        (TokenK3(False, 0.19), [1, 0, 0]),
        (TokenK3(False, 0.0176), [0, 0, 0]),
        # product 1.8, geometric mean 1.2164
        (SequenceSumK1(False, 0.9, 1.81, BoundForm.ratio), [1, 1, 1]),
        (SequenceSumK1(False, 0.9, 1.79, BoundForm.ratio), [0, 0, 0]),
        (SequenceSumK1(False, 0.56, 1.1, BoundForm.inverse), [0, 0, 0]),  # 1/1.8 = .5556
        (SequenceSumK1(False, 0.55, 1.1, BoundForm.inverse), [1, 1, 1]),
        (SequenceMeanK1(False, 0.9, 1.217, BoundForm.ratio), [1, 1, 1]),
        (SequenceMeanK1(False, 0.9, 1.216, BoundForm.ratio), [0, 0, 0]),
        (SequenceMeanK1(False, 0.83, 1.1, BoundForm.inverse), [0, 0, 0]),  # 1/1.2164 = .8221
        (SequenceMeanK1(False, 0.82, 1.1, BoundForm.inverse), [1, 1, 1]),
        # k2 adds up to .8603, a mean of .2868, a largest of .6035
        (SequenceSumK2(False, 0.861), [1, 1, 1]),
        (SequenceSumK2(False, 0.86), [0, 0, 0]),
        (SequenceMeanK2(False, 0.287), [1, 1, 1]),
        (SequenceMeanK2(False, 0.286), [0, 0, 0]),
        (SequenceMaxK2(False, 0.604), [1, 1, 1]),
        (SequenceMaxK2(False, 0.603), [0, 0, 0]),
        # k3 adds up to 1.1122, a mean of .3707, a largest of .9014
        (SequenceSumK3(False, 1.113), [1, 1, 1]),
        (SequenceSumK3(False, 1.112), [0, 0, 0]),
        (SequenceMeanK3(False, 0.371), [1, 1, 1]),
        (SequenceMeanK3(False, 0.37), [0, 0, 0]),
        (SequenceMaxK3(False, 0.902), [1, 1, 1]),
        (SequenceMaxK3(False, 0.901), [0, 0, 0]),
    ],
    ids=repr,
)
def test_tokens_that_stay_of_ratios_of_one_and_a_fifth_three_and_a_half(rejection, kept) -> None:
    stays = rejection(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
    assert stays[0].tolist() == [bool(bit) for bit in kept] + [False], "never a token that was not sampled"
    assert stays[1].tolist() == [True, True, True, False], "ratios of 1"


@pytest.mark.parametrize(
    ("rejection", "counted", "advantages"),
    [
        # mean of 1, 0, 0 is 1/3: the rejected reward of 1 moves no sibling
        (SequenceSumK1(False, 0.5, 2.0, BoundForm.ratio), [1, 1, 0, 1], [2 / 3, -1 / 3, 0, -1 / 3]),
        (SequenceMaxK3(False, 0.31), [1, 1, 0, 1], [2 / 3, -1 / 3, 0, -1 / 3]),
        # mean of 1, 0, 1, 0 is 1/2
        (SequenceSumK1(True, 0.5, 2.0, BoundForm.ratio), [1, 1, 1, 1], [0.5, -0.5, 0.5, -0.5]),
        (SequenceMaxK3(True, 0.31), [1, 1, 1, 1], [0.5, -0.5, 0.5, -0.5]),
        # a row that keeps a token stays
        (TokenK1(False, 0.5, 2.0, BoundForm.ratio), [1, 1, 1, 1], [0.5, -0.5, 0.5, -0.5]),
    ],
    ids=repr,
)
def test_whether_a_rejected_row_is_counted(rejection, counted, advantages) -> None:
    # the third row has a token of ratio 3; where rows leave whole, it leaves
    old = torch.zeros(4, 2, dtype=F64)
    old[2, 0] = math.log(3)
    mask = torch.ones(4, 2, dtype=torch.bool)
    stays = rejection(old, torch.zeros_like(old), mask)
    settled = rejection.settle(make_graded([[1, 0, 1, 0]]), stays)
    left = not stays[2].any()
    assert settled.in_statistics.tolist() == [[bool(bit) for bit in counted]]
    assert settled.in_loss.tolist() == [[True, True, not left, True]]
    assert_close(advantages_of(settled), [advantages], EXACT, "advantages")
    assert left == (not isinstance(rejection, TokenK1))


def test_no_rejection_settles_nothing() -> None:
    graded = make_graded([[1, 0]], in_loss=[[True, False]])
    assert NoRejection().settle(graded, torch.zeros(2, 3, dtype=torch.bool)) is graded


def test_old_policy_is_the_learner_before_or_the_sampler() -> None:
    # learner now .3, before .25, sampler .2; A = 1: a loss of -.3/.25 = -1.2 or -.3/.2 = -1.5
    now, before, sampler = (torch.full((1, 1), math.log(chance), dtype=F64) for chance in (0.3, 0.25, 0.2))
    rollouts = make_rollouts([1], 1, sampler=sampler)
    scene = Scene(rollouts, make_graded([[1.0]]), now, before, before)
    for old_policy, loss in ((Recomputed(), -1.2), (Sampler(), -1.5)):
        run = make_run(baseline=NoBaseline(), scale=NoScale(), old_policy=old_policy, surrogate=Ppo(0.9, 0.9))
        assert_close(loss_and_gradient(run, inputs_of(run, scene), now)[0], loss, EXACT, type(old_policy).__name__)
    assert (Recomputed().recomputes, Sampler().recomputes) == (True, False)
    assert Sampler()(None, sampler) is sampler
    assert Recomputed()(None, sampler) is None


@pytest.mark.parametrize(
    ("importance", "values", "slopes"),
    [
        # .3, -.1, .4 are of the row, -2 is not: mean .2. What the first token's log-ratio says of each log-prob
        (Token(20.0), [0.3, -0.1, 0.4], [1, 0, 0]),
        (Sequence(20.0), [0.2] * 3, [1 / 3] * 3),
        (SequenceToken(20.0), [0.2] * 3, [1, 0, 0]),
        (SequenceProduct(20.0), [0.6] * 3, [1, 0, 0]),
        # limited to .15: values stop there, and those whose value has a gradient lose it
        (Token(0.15), [0.15, -0.1, 0.15], [0, 0, 0]),
        (Sequence(0.15), [0.15] * 3, [0, 0, 0]),
        (SequenceToken(0.15), [0.15] * 3, [1, 0, 0]),
        (SequenceProduct(0.15), [0.15] * 3, [1, 0, 0]),
    ],
    ids=repr,
)
def test_ratio_of_a_token_and_of_a_response(importance, values, slopes) -> None:
    logprobs = torch.tensor([[-0.7, -1.1, -0.6, -3.0]], dtype=F64, requires_grad=True)
    old = torch.full((1, 4), -1.0, dtype=F64)
    log_ratio = importance(logprobs, old, torch.tensor([[True, True, True, False]]))
    assert_close(log_ratio[0, :3], values, EXACT, "log-ratios")
    log_ratio[0, 0].backward()
    assert_close(logprobs.grad[0], [*slopes, 0], EXACT, "gradient of the first")


def test_the_ratio_of_a_response_is_over_its_tokens_in_the_loss() -> None:
    """Log-ratios .1, .2 and .9, the third of a token that was thrown out: -2 * exp(.15) for an advantage of 1."""
    old = torch.tensor([[-1.1, -1.2, -1.9]], dtype=F64)
    inputs = step_of([3], [1.0], 1, old_logprobs=old)
    inputs = replace(inputs, loss_mask=torch.tensor([[True, True, False]]))
    run = make_run(importance=Sequence(20.0), surrogate=Ppo(0.9, 0.9), aggregation=SequenceSum())
    output = policy_loss(run.loss_tricks, batch_of_rows(run, inputs, [0]), torch.full((1, 3), -1.0, dtype=F64), -old)
    assert_close(output.loss, -2 * math.exp(0.15), EXACT, "the third token is no part of the mean")


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
    assert_close(result.affected.to(F64), [cut], 0, "touched is where the gradient was cut")


def surrogate_of(
    surrogate: Surrogate,
    log_ratio: list[float],
    advantage: float,
    logprobs: list[float] | None = None,
    sampled: int | None = None,
    marked: list[bool] | None = None,
) -> tuple[SurrogateLoss, list[float]]:
    """The loss of one row of tokens, and the gradient of its sum over the first `sampled` of them."""
    leaf = torch.tensor([logprobs or log_ratio], dtype=F64, requires_grad=True)
    ratio = leaf - leaf.detach() + torch.tensor([log_ratio], dtype=F64)
    mask = torch.arange(len(log_ratio))[None, :] < (len(log_ratio) if sampled is None else sampled)
    marks = None if marked is None else torch.tensor([marked])
    tokens = SurrogateInputs(leaf, ratio, torch.full(mask.shape, advantage, dtype=F64), mask, marks)
    result = surrogate(tokens)
    result.token_loss[mask].sum().backward()
    return result, [] if leaf.grad is None else leaf.grad[0].tolist()


SIGMOID_AT_LN3 = 1 + math.log(3)  # the ratio at which the gate of tau 1 is 3/4 and its slope 3/16


@pytest.mark.parametrize(
    ("surrogate", "advantage", "ratios", "loss", "gradient", "touched"),
    [
        # A < 0: 2 * max(r, .8), at most 3 * 2; beyond either no gradient
        (DualClip(0.2, 0.2, 3.0), -2.0, [0.5, 1, 2.9, 3.5], [1.6, 2, 5.8, 6], [0, 2, 5.8, 0], [1, 0, 0, 1]),
        # A > 0: PPO's own bound alone
        (DualClip(0.2, 0.2, 3.0), 2.0, [0.5, 1, 2.9, 3.5], [-1, -2, -2.4, -2.4], [-1, -2, 0, 0], [0, 0, 1, 1]),
        # gate 3/4: 4 * .75 * 2 = 6, weight 4 * 3/16 * r; at ratio 1: 4 * .5 * 2 and 1
        (Sapo(1.0, 1.05), 2.0, [1, SIGMOID_AT_LN3], [-4, -6], [-2, -1.5 * SIGMOID_AT_LN3], [0, 1]),
        # tau 2 where A < 0: gate 3/4 at r = 1 + ln(3)/2, 2 * .75 * 2 = 3; at ratio 1: 2 * .5 * 2 = 2 and slope 1
        (Sapo(1.0, 2.0), -2.0, [1, 1 + math.log(3) / 2], [2, 3], [2, 1.5 + 0.75 * math.log(3)], [0, 1]),
    ],
    ids=repr,
)
def test_token_losses_of_bounds_and_gates(surrogate, advantage, ratios, loss, gradient, touched) -> None:
    result, slopes = surrogate_of(surrogate, [math.log(ratio) for ratio in ratios], advantage)
    assert_close(result.token_loss, [loss], EXACT, "token losses")
    assert_close(slopes, gradient, EXACT, "gradient")
    assert result.affected.tolist() == [[bool(bit) for bit in touched]]


@pytest.mark.parametrize(
    ("surrogate", "advantage", "weights", "touched"),
    [
        # ratios .25, .9, 1, 2, 8
        (Cispo(5.0, 1.0, CapForm.absolute), 2.0, [0.25, 0.9, 1, 2, 5], [0, 0, 0, 0, 1]),
        (Cispo(4.0, 1.0, CapForm.one_plus), -2.0, [0.25, 0.9, 1, 2, 5], [0, 0, 0, 0, 1]),
        (Cispo(1.28, 0.2, CapForm.absolute), -2.0, [0.8, 0.9, 1, 1.28, 1.28], [1, 0, 0, 1, 1]),
        (Cispo(0.28, 0.2, CapForm.one_plus), 2.0, [0.8, 0.9, 1, 1.28, 1.28], [1, 0, 0, 1, 1]),
        # a cap of .2 is REINFORCE at a fifth
        (Cispo(0.2, 1.0, CapForm.absolute), 2.0, [0.2] * 5, [1] * 5),
        # right answers at 1, wrong ones at most at 1
        (Topr(), 2.0, [1] * 5, [0] * 5),
        (Topr(), -2.0, [0.25, 0.9, 1, 1, 1], [1, 1, 0, 0, 0]),
    ],
    ids=repr,
)
def test_bounded_weights_of_the_plain_gradient(surrogate, advantage, weights, touched) -> None:
    ratios = [0.25, 0.9, 1, 2, 8]
    logprobs = [math.log(ratio / 10) for ratio in ratios]
    result, slopes = surrogate_of(surrogate, [math.log(ratio) for ratio in ratios], advantage, logprobs)
    assert_close(result.token_loss, [[-w * advantage * lp for w, lp in zip(weights, logprobs)]], EXACT, "-w * A * logp")
    assert_close(slopes, [-w * advantage for w in weights], EXACT, "every token keeps a gradient")
    assert result.affected.tolist() == [[bool(bit) for bit in touched]]
    assert surrogate.weight_at_ratio_one == pytest.approx(weights[2])


def test_topr_weighs_a_wrong_response_by_the_product_of_its_ratios() -> None:
    """-(1/4) sum_i w_i A_i sum_t logp; w = 1 where A > 0, else the product, at most 1; old log-probs are all -1."""
    # sums of log-ratios -.4, .5, 1.0 and -2; the last row is right, and learned from whatever the policy thinks of it
    logprobs = torch.tensor([[-0.7, -1.1, -1.6], [-0.9, -0.6, 0], [-1.5, 0.5, 0], [-3, 0, 0]], dtype=F64)
    inputs = step_of([3, 2, 2, 1], [-1.0, -1.0, 0.5, 2.0], 4, old_logprobs=torch.full((4, 3), -1.0, dtype=F64))
    run = make_run(importance=SequenceProduct(20.0), surrogate=Topr(), aggregation=SequenceSum())
    loss, gradient = loss_and_gradient(run, inputs, logprobs)
    fall = math.exp(-0.4)
    assert_close(loss, -(fall * 3.4 + 1.5 + 0.5 * -1.0 + 2 * -3) / 4, EXACT, "loss")
    expected = [[fall] * 3, [1, 1, 0], [-0.5, -0.5, 0], [-2, 0, 0]]
    assert_close(gradient, torch.tensor(expected, dtype=F64) / 4, EXACT, "every token of a response the same")


@pytest.mark.parametrize(
    ("advantage", "log_ratios", "weights"),
    [
        # A > 0: .6 stops at .4; (.4 - .2 + .1)/3 = .1; the last token is not sampled
        (2.0, [0.6, -0.2, 0.1, 5.0], [0, math.exp(0.1), math.exp(0.1)]),
        # A < 0: -.6 stops at -.4, .6 stays; (.6 - .4 + .1)/3 = .1
        (-2.0, [0.6, -0.6, 0.1, 5.0], [math.exp(0.1), 0, math.exp(0.1)]),
        # A > 0 does not cut what falls: (.3 - .6 + 0)/3 = -.1
        (2.0, [0.3, -0.6, 0.0, 5.0], [math.exp(-0.1)] * 3),
    ],
)
def test_geometric_mean_of_clipped_ratios(advantage, log_ratios, weights) -> None:
    result, slopes = surrogate_of(Gmpo(0.4, 0.4), log_ratios, advantage, sampled=3)
    row = max(weights)
    assert_close(result.token_loss[0, :3], [-advantage * row] * 3, EXACT, "every token carries its row's loss")
    # three equal losses, each with a third of the gradient to each token
    assert_close(slopes, [-advantage * weight for weight in weights] + [0], EXACT, "gradient of their sum")
    assert result.affected[0, :3].tolist() == [weight == 0 for weight in weights]


@pytest.mark.parametrize(
    ("divergence", "delta", "advantage", "weights"),
    [
        # (old, now): (.5, .75) moved up by .25, (.5, .25) down by .25, (.01, .2) up by .19, (.01, .25) up by .24
        (Divergence.tv, 0.2, 2.0, [0, 0.5, 20, 0]),
        (Divergence.tv, 0.2, -2.0, [1.5, 0, 20, 20]),  # 25 stops at 20
        (Divergence.tv, 0.26, 2.0, [1.5, 0.5, 20, 20]),
        # KL of .5 against .75: .5 ln(.5/.75) + .5 ln(.5/.25) = ln(4/3)/2 = .14384, and the same of .25;
        # of .01 against .2: .01 ln(.05) + .99 ln(.99/.8) = .18100; against .25: .01 ln(.04) + .99 ln(1.32) = .24267
        (Divergence.kl, 0.143, 2.0, [0, 0.5, 0, 0]),
        (Divergence.kl, 0.144, 2.0, [1.5, 0.5, 0, 0]),
        (Divergence.kl, 0.182, 2.0, [1.5, 0.5, 20, 0]),
        (Divergence.kl, 0.243, 2.0, [1.5, 0.5, 20, 20]),
        (Divergence.kl, 0.143, -2.0, [1.5, 0, 20, 20]),
        (Divergence.kl, 0.144, -2.0, [1.5, 0.5, 20, 20]),
    ],
)
def test_trust_region_on_probabilities(divergence, delta, advantage, weights) -> None:
    old, now = [0.5, 0.5, 0.01, 0.01], [0.75, 0.25, 0.2, 0.25]
    log_ratio = [math.log(after / before) for after, before in zip(now, old)]
    logprobs = [math.log(after) for after in now]
    result, slopes = surrogate_of(Dppo(divergence, delta, 20.0), log_ratio, advantage, logprobs)
    assert_close(slopes, [-weight * advantage for weight in weights], 1e-11, "gradient")
    assert_close(result.token_loss, [[-w * advantage * lp for w, lp in zip(weights, logprobs)]], 1e-10, "-w * A * logp")
    assert result.affected.tolist() == [[weight == 0 for weight in weights]]


def test_kimi_squares_the_log_ratio_of_the_response() -> None:
    # (.3 - .1 + .2)^2 = .16, times tau/2 = .25; the sum of squares would be .14. Slope -A + tau * .4
    result, slopes = surrogate_of(Kimi(0.5), [0.3, -0.1, 0.2, 9.0], 2.0, [-1, -2, -3, -4], sampled=3)
    assert_close(result.token_loss[0, :3].sum(), 2 * 6 + 0.25 * 0.16, EXACT, "-A * logp + tau/2 * square")
    assert_close(slopes, [-2 + 0.2] * 3 + [0], EXACT, "gradient")
    assert result.affected.all()
    # 200 tokens of drift .01: (2)^2 and not 200 * .0001 = .02
    result, _ = surrogate_of(Kimi(2.0), [0.01] * 200, 0.0)
    assert_close(result.token_loss.sum(), 4.0, EXACT, "square of the sum")
    result, _ = surrogate_of(Kimi(0.5), [0.3, -0.3], 2.0)
    assert not result.affected.any(), "drifts that cancel pull nowhere"


# Tokens of log-probs -1, -3, -1, -3 and advantages 2, -2, -2, 2: means -2 and 0, so the covariances are 2, 2, -2, -2.
def four_tokens(noise: list[float], ratio_of_second: float = 1.0, more_advantage: float = 0.0) -> StepTokens:
    advantages = [value + more_advantage for value in (2.0, -2, -2, 2)]
    columns = [[-1.0, -3, -1, -3], [0, math.log(ratio_of_second), 0, 0], advantages, noise]
    return StepTokens(*(torch.tensor(column, dtype=F64) for column in columns))


def clip_cov(share: float, low: float = 1.0, high: float = 5.0) -> ClipCov:
    return ClipCov(0.2, 0.2, share, low, high, Scope.step)


@pytest.mark.parametrize(
    ("surrogate", "tokens", "chosen"),
    [
        # one of the two of covariance 2, by the smaller number drawn; two; one even of a share of nothing
        (clip_cov(0.25), four_tokens([0.1, 0.9, 0, 0]), [1, 0, 0, 0]),
        (clip_cov(0.25), four_tokens([0.9, 0.1, 0, 0]), [0, 1, 0, 0]),
        (clip_cov(0.5), four_tokens([0.9, 0.1, 0, 0]), [1, 1, 0, 0]),
        (clip_cov(1e-6), four_tokens([0.9, 0.1, 0, 0]), [0, 1, 0, 0]),
        (clip_cov(1.0), four_tokens([0.9, 0.1, 0, 0]), [1, 1, 0, 0]),
        # PPO has cut the second (A < 0, ratio .5), or no covariance lies within
        (clip_cov(0.25), four_tokens([0.9, 0.1, 0, 0], ratio_of_second=0.5), [1, 0, 0, 0]),
        (clip_cov(0.25, 2.0), four_tokens([0.1, 0.9, 0, 0]), [0, 0, 0, 0]),
        (clip_cov(0.25, 1.0, 2.0), four_tokens([0.1, 0.9, 0, 0]), [0, 0, 0, 0]),
        (clip_cov(0.5, -3.0, -1.0), four_tokens([0, 0, 0.9, 0.1]), [0, 0, 1, 1]),
        # the largest, whatever was drawn; PPO's bounds do not enter
        (KlCov(0.5, 1.0, Scope.step), four_tokens([0.9, 0.1, 0, 0], ratio_of_second=0.5), [1, 1, 0, 0]),
        (KlCov(1e-6, 1.0, Scope.step), four_tokens([0.9, 0.1, 0, 0]), [1, 0, 0, 0]),
        # advantages are centred: 5 more for each token changes no covariance
        (KlCov(0.5, 1.0, Scope.step), four_tokens([0.9, 0.1, 0, 0], more_advantage=5.0), [1, 1, 0, 0]),
    ],
)
def test_tokens_chosen_by_covariance(surrogate, tokens, chosen) -> None:
    assert surrogate.mark(tokens).tolist() == [bool(bit) for bit in chosen]


def test_what_is_done_to_the_tokens_chosen_by_covariance() -> None:
    log_ratio, marks = [math.log(ratio) for ratio in (1.1, 1.1, 1.5, 0.9, 0.9)], [True, False, False, True, False]
    # Clip-Cov: PPO's losses, no gradient where marked or above 1.2
    result, slopes = surrogate_of(clip_cov(0.5), log_ratio, 2.0, marked=marks)
    assert_close(result.token_loss, [[-2.2, -2.2, -2.4, -1.8, -1.8]], EXACT, "Clip-Cov's losses")
    assert_close(slopes, [0, -2.2, 0, 0, -1.8], EXACT, "Clip-Cov's gradient")
    assert result.affected.tolist() == [[True, False, True, True, False]]
    # KL-Cov: -r A, plus .5 |log r| where marked; slope -r A + .5 sign(log r)
    result, slopes = surrogate_of(KlCov(0.5, 0.5, Scope.step), log_ratio, 2.0, marked=marks)
    extra = [0.5 * math.log(1.1), 0, 0, -0.5 * math.log(0.9), 0]
    losses = [loss + more for loss, more in zip([-2.2, -2.2, -3, -1.8, -1.8], extra)]
    assert_close(result.token_loss, [losses], EXACT, "KL-Cov's losses")
    assert_close(slopes, [-2.2 + 0.5, -2.2, -3, -1.8 - 0.5, -1.8], EXACT, "KL-Cov's gradient")
    assert result.affected.tolist() == [marks]


@pytest.mark.parametrize(
    ("scope", "microbatch_tokens", "penalised"),
    [
        # log-probs -1, -3 of A = 2 and -2.5, -1.5 of A = -2: means -2 and 0, covariances 2, -2 and 1, -1
        (Scope.step, ONE_MICROBATCH, [[1, 0], [0, 0]]),
        (Scope.step, 3, [[1, 0], [0, 0]]),
        # in a microbatch of one row every advantage is the mean, every covariance 0, and the first token is taken
        (Scope.microbatch, ONE_MICROBATCH, [[1, 0], [0, 0]]),
        (Scope.microbatch, 3, [[1, 0], [1, 0]]),
    ],
)
def test_covariance_is_over_the_whole_step(scope, microbatch_tokens, penalised) -> None:
    logprobs = torch.tensor([[-1.0, -3.0], [-2.5, -1.5]], dtype=F64)
    inputs = step_of([2, 2], [2.0, -2.0], 2, old_logprobs=logprobs - math.log(1.5))
    run = make_run(surrogate=KlCov(0.25, 0.7, scope), aggregation=SequenceSum())
    _, gradient = loss_and_gradient(run, inputs, logprobs, microbatch_tokens)
    # -1.5 * A plus .7 where penalised, over two rows
    plain = torch.tensor([[-1.5, -1.5], [1.5, 1.5]], dtype=F64)
    assert_close(gradient, plain + 0.35 * torch.tensor(penalised, dtype=F64), EXACT, "gradient")


def test_every_surrogate_is_in_the_list_of_the_tests_below() -> None:
    assert {type(surrogate) for surrogate in SURROGATES} == listed("surrogate")


WITH_RATIO = [
    (surrogate, importance)
    for surrogate in SURROGATES
    for importance in (Token(20.0), *IMPORTANCES)
    if importance.per_token or not (surrogate.needs_token_ratio or surrogate.mark_scope is not None)
]


@pytest.mark.parametrize(("surrogate", "importance"), WITH_RATIO, ids=repr)
def test_the_reported_weight_is_that_of_autograd(surrogate: Surrogate, importance) -> None:
    """d(sum of a row's losses)/d(log-prob) = -weight * A; for those that penalise drift, plus the penalty's slope."""
    generator = torch.Generator().manual_seed(4)
    old = -0.1 - 2 * torch.rand(12, 6, dtype=F64, generator=generator)
    drift = 0.5 * torch.randn(12, 1, dtype=F64, generator=generator) + 0.4 * torch.randn(
        12, 6, dtype=F64, generator=generator
    )
    logprobs = (old + drift).clamp(max=-0.01).requires_grad_()
    mask = torch.arange(6)[None, :] < torch.randint(1, 7, (12, 1), generator=generator)
    advantages = torch.tensor([2.0, -1.0, 0.5, -0.7], dtype=F64).repeat(3)[:, None].expand(12, 6)
    log_ratio = importance(logprobs, old, mask)
    marked = torch.rand(12, 6, generator=generator) < 0.3 if surrogate.mark_scope is not None else None
    result = surrogate(SurrogateInputs(logprobs, log_ratio, advantages, mask, marked))
    result.token_loss[mask].sum().backward()
    penalty = torch.zeros_like(old)
    if isinstance(surrogate, Kimi):
        penalty = surrogate.tau * torch.where(mask, log_ratio.detach(), 0.0).sum(dim=1, keepdim=True).expand(12, 6)
    if isinstance(surrogate, KlCov):
        penalty = surrogate.coef * log_ratio.detach().sign() * marked
    if isinstance(surrogate, Ipo | KimiToken | Dro):
        penalty = (surrogate.beta if isinstance(surrogate, Dro) else 2 * surrogate.kl_tau) * log_ratio.detach()
    assert_close(logprobs.grad[mask], (penalty - result.weight * advantages)[mask], EXACT, "gradient")
    assert not result.weight.requires_grad
    acts = result.affected[mask]
    assert acts.any() != isinstance(surrogate, Reinforce), "the scene is off-policy enough"
    smooth = isinstance(surrogate, Delight | Kimi | Sapo | Vespo | Dro)
    assert smooth or not acts.all(), "and leaves some tokens alone"


def test_the_printed_logarithms_of_the_clip_bounds() -> None:
    # ln 1.2 = .1823, ln .8 = -.2231, ln 1.28 = .2469: gradient until there and not beyond
    bounds = [
        (Ppo(0.2, 0.2), 1.0, 0.18225, 0.18235),
        (Ppo(0.2, 0.2), -1.0, -0.2231, -0.2232),
        (Ppo(0.2, 0.28), 1.0, 0.2468, 0.2469),
    ]
    for surrogate, advantage, inside, outside in bounds:
        _, slopes = surrogate_of(surrogate, [inside, outside], advantage)
        assert slopes[0] != 0 and slopes[1] == 0, surrogate


def test_k1_is_charged_to_the_reward_of_the_whole_response() -> None:
    # x = ref / pi of .5, 2, .5 and a token that was not sampled: k1 = ln 2, -ln 2, ln 2, charged at .1; then x = 2, 2
    old = torch.tensor([[0.4, 0.2, 0.4, 0.9], [0.2, 0.2, 0.9, 0.9]], dtype=F64).log()
    ref = torch.tensor([[0.2, 0.4, 0.2, 0.1], [0.4, 0.4, 0.1, 0.1]], dtype=F64).log()
    mask = torch.arange(4)[None, :] < torch.tensor([[3], [2]])
    kl = K1Reward(kl_coef=0.1, limit=0.0)
    charges = kl.token_penalties(old, ref, mask)
    # each token bears its own: -.1 ln 2, +.1 ln 2, -.1 ln 2, and one that was not sampled nothing
    expected = [[-0.1 * math.log(2), 0.1 * math.log(2), -0.1 * math.log(2), 0], [0.1 * math.log(2)] * 2 + [0, 0]]
    assert_close(charges, expected, EXACT, "charges")
    charged = kl.shape(make_graded([[1, 0]]), charges)
    assert_close(charged.components["k1"], [[-0.1 * math.log(2), 0.2 * math.log(2)]], EXACT, "component")
    assert_close(charged.reward, [[1 - 0.1 * math.log(2), 0.2 * math.log(2)]], EXACT, "reward")
    assert_close(charged.correctness, [[1, 0]], 0, "the outcome is never shaped")
    assert_close(math.log(2), 0.6931, 5e-5, "the printed decimals of k1")
    assert_close(kl(old, old, ref), torch.zeros(2, 4), 0, "no term in the loss")


def test_k2_at_a_half_and_at_two() -> None:
    # ln(2)^2/2 = .2402 on both sides; slope kl_coef * (logp - ref)
    logprobs = torch.tensor([[math.log(0.4), math.log(0.2)]], dtype=F64, requires_grad=True)
    ref = torch.tensor([[math.log(0.2), math.log(0.4)]], dtype=F64)
    penalty = K2Loss(kl_coef=0.1, limit=0.0)(logprobs, logprobs, ref)
    penalty.sum().backward()
    k2 = math.log(2) ** 2 / 2
    assert_close(k2, 0.2402, 5e-5, "the printed decimals")
    assert_close(penalty, [[0.1 * k2] * 2], EXACT, "coefficient times k2")
    assert_close(
        logprobs.grad, [[0.1 * math.log(2), -0.1 * math.log(2)]], EXACT, "gradient pulls towards the reference"
    )


def test_k3_weighted_by_the_ratio() -> None:
    # r = 1.5 on k3(.5) = ln 2 - .5 and k3(2) = 1 - ln 2; slope r * k3 + r * (1 - x) = -r ln x
    logprobs = torch.tensor([[math.log(0.4), math.log(0.2)]], dtype=F64, requires_grad=True)
    old, ref = logprobs.detach() - math.log(1.5), torch.tensor([[math.log(0.2), math.log(0.4)]], dtype=F64)
    penalty = K3Unbiased(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0)(logprobs, old, ref)
    penalty.sum().backward()
    assert_close(penalty, [[0.15 * (math.log(2) - 0.5), 0.15 * (1 - math.log(2))]], EXACT, "coefficient, ratio, k3")
    assert_close(logprobs.grad, [[0.15 * math.log(2), -0.15 * math.log(2)]], EXACT, "gradient through both")


def test_k3_at_a_half_and_at_two() -> None:
    # x - ln x - 1: .5 + .6931 - 1 = .1931; 2 - .6931 - 1 = .3069. d/d logp = kl_coef * (1 - x)
    logprobs = torch.tensor([[math.log(0.4), math.log(0.2)]], dtype=F64, requires_grad=True)
    ref = torch.tensor([[math.log(0.2), math.log(0.4)]], dtype=F64)
    penalty = K3Loss(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0)(logprobs, logprobs, ref)
    penalty.sum().backward()
    half, two = math.log(2) - 0.5, 1 - math.log(2)
    assert_close([half, two], [0.1931, 0.3069], 5e-5, "the printed decimals")
    assert_close(penalty, [[0.1 * half, 0.1 * two]], EXACT, "coefficient times k3")
    assert_close(logprobs.grad, [[0.05, -0.1]], EXACT, "gradient pulls towards the reference")


def test_k3_is_flat_beyond_its_limit() -> None:
    logprobs = torch.tensor([[-30.0]], dtype=F64, requires_grad=True)
    penalty = K3Loss(kl_coef=1.0, log_ratio_limit=2.0, limit=0.0)(logprobs, logprobs, torch.zeros(1, 1, dtype=F64))
    penalty.sum().backward()
    assert_close(penalty, [[math.exp(2) - 2 - 1]], EXACT, "k3 at the limit")
    assert_close(logprobs.grad, [[0.0]], 0, "no gradient beyond it")


def test_options_that_add_nothing_add_zero() -> None:
    values = torch.tensor([[-1.0, -2.0]], dtype=F64)
    assert_close(NoKl()(values, values, None), [[0, 0]], 0, "kl")
    assert_close(NoEntropy()(values, 0.0), [[0, 0]], 0, "entropy")


def test_entropy_bonus_pulls_at_every_token() -> None:
    # two tokens of A = 2 at ratio 1; the helper's entropy is -logp = 1 and 3. (-2 - .1 * 1 - 2 - .1 * 3)/2
    run = make_run(entropy=Bonus(coef=0.1))
    assert run.entropy.start == 0.1
    inputs = replace(step_of([2], [2.0], 1), entropy_coef=run.entropy.start)
    loss, gradient = loss_and_gradient(run, inputs, torch.tensor([[-1.0, -3.0]], dtype=F64))
    assert_close(loss, -2.2, EXACT, "loss")
    assert_close(gradient, [[(-2 + 0.1) / 2] * 2], EXACT, "gradient through the entropy")
    assert Bonus(coef=0.1).next_coef(0.1, 5.0) == 0.1


def test_adaptive_bonus_follows_its_target() -> None:
    # up by .25 at or below a target of .5 nats, down above it; it waits where it stood, and never leaves [0, 1]
    entropy = Adaptive(target=0.5, delta=0.25, largest=1.0)
    coefs = [entropy.start]
    for nats in (0.4, 0.5, 0.6, 0.6, 0.6, 0.1, 0.1, 0.1, 0.1, 0.1, 0.6, 0.1):
        coefs.append(entropy.next_coef(coefs[-1], nats))
    assert [abs(coef) for coef in coefs] == [0, 0.25, 0.5, 0.25, 0, 0, 0.25, 0.5, 0.75, 1, 1, 0.75, 1]
    paid = [-float(entropy(torch.tensor([[2.0]], dtype=F64), coef)[0, 0]) for coef in coefs]
    assert paid == [0, 0.5, 1, 0, 0, 0, 0.5, 1, 1.5, 2, 2, 0, 2], "nothing after a step above the target"


def test_only_tokens_of_high_entropy_stay() -> None:
    # ten sampled tokens, the padding is not counted: a fifth of ten is two, a tie with the last one stays too
    entropy = torch.tensor([[0.1, 0.9, 0.3, 0.2, 0.5, 7.0], [0.8, 0.7, 0.05, 0.6, 0.4, 7.0]], dtype=F64)
    sampled = torch.tensor([[True] * 5 + [False]] * 2)
    kept = HighEntropyTokens(share=0.2).keeps(entropy, sampled) & sampled
    assert kept.nonzero().tolist() == [[0, 1], [1, 0]]
    tie = entropy.clone()
    tie[1, 1] = 0.8
    assert (HighEntropyTokens(share=0.2).keeps(tie, sampled) & sampled).nonzero().tolist() == [[0, 1], [1, 0], [1, 1]]
    assert (HighEntropyTokens(share=0.01).keeps(entropy, sampled) & sampled).nonzero().tolist() == [[0, 1]]
    assert torch.equal(HighEntropyTokens(share=1.0).keeps(entropy, sampled) & sampled, sampled)
    assert_close(HighEntropyTokens(share=0.2)(entropy, 0.0), torch.zeros(2, 6), 0, "no term")


# --- kl gradients, by enumeration ---------------------------------------------------------------------------

LOGITS = torch.tensor([0.3, -1.1, 0.8, 0.0], dtype=F64)
OLD_CHANCES = torch.tensor([0.1, 0.5, 0.15, 0.25], dtype=F64)
REF_CHANCES = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=F64)


def kl_step(kl, old: Tensor) -> tuple[Tensor, Tensor]:
    """Expected loss and its gradient by the logits, over one-token responses drawn from `old`: every one of them.

    The outcome's reward is 0, so that all there is comes from the KL, with REINFORCE for what is in the reward.
    """
    logits = LOGITS.clone().requires_grad_()
    logprobs = logits.log_softmax(0)[:, None]
    rollouts = make_rollouts([1] * 4, 1)
    run = make_run(kl=kl, baseline=NoBaseline(), scale=NoScale(), surrogate=Reinforce())
    scene = Scene(rollouts, make_graded([[0.0]] * 4), logprobs.detach(), old.log()[:, None], REF_CHANCES.log()[:, None])
    inputs = inputs_of(run, scene)
    parts = []
    for row in range(4):
        output = policy_loss(
            run.loss_tricks, batch_of_rows(run, inputs, [row]), logprobs[[row]], torch.zeros(1, 1, dtype=F64)
        )
        parts.append(4 * output.loss)  # the loss is a mean over four rows
    expected = (old * torch.stack(parts)).sum()
    expected.backward()
    return expected.detach(), logits.grad


@pytest.mark.parametrize(
    ("kl", "on_policy", "direction"),
    [
        (K1Reward(kl_coef=0.7, limit=0.0), True, "reverse"),
        (K2Loss(kl_coef=0.7, limit=0.0), True, "reverse"),
        (K3Unbiased(kl_coef=0.7, log_ratio_limit=20.0, limit=0.0), True, "reverse"),
        (K3Unbiased(kl_coef=0.7, log_ratio_limit=20.0, limit=0.0), False, "reverse"),
        (K3Loss(kl_coef=0.7, log_ratio_limit=20.0, limit=0.0), True, "forward"),
    ],
    ids=repr,
)
def test_expected_gradient_is_that_of_a_divergence(kl, on_policy: bool, direction: str) -> None:
    """d KL(pi || ref) = pi * (ln(pi / ref) - KL) by the logits, and d KL(ref || pi) = pi - ref."""
    pi = LOGITS.softmax(0)
    reverse = (pi * (pi / REF_CHANCES).log()).sum()
    slopes = {"reverse": pi * ((pi / REF_CHANCES).log() - reverse), "forward": pi - REF_CHANCES}
    _, gradient = kl_step(kl, pi if on_policy else OLD_CHANCES)
    assert_close(gradient, 0.7 * slopes[direction], 1e-10, f"gradient of the {direction} KL")
    other = slopes["forward" if direction == "reverse" else "reverse"]
    assert (gradient - 0.7 * other).abs().max() > 0.01, "the two divergences differ here"


def test_expected_value_of_the_estimates() -> None:
    pi = LOGITS.softmax(0)
    divergence = (pi * (pi / REF_CHANCES).log()).sum()
    for kl, old in (
        (K3Loss(kl_coef=1.0, log_ratio_limit=20.0, limit=0.0), pi),
        (K3Unbiased(kl_coef=1.0, log_ratio_limit=20.0, limit=0.0), pi),
        (K3Unbiased(kl_coef=1.0, log_ratio_limit=20.0, limit=0.0), OLD_CHANCES),
    ):
        assert_close(kl_step(kl, old)[0], divergence, 1e-10, f"{kl} is unbiased as a value")
    half_square = (pi * (pi / REF_CHANCES).log() ** 2 / 2).sum()
    assert_close(kl_step(K2Loss(kl_coef=1.0, limit=0.0), pi)[0], half_square, 1e-10, "k2 is not")
    assert abs(half_square - divergence) > 0.01
    everywhere = torch.ones(4, 1, dtype=torch.bool)
    nothing = make_graded([[0.0]] * 4)
    k1 = K1Reward(kl_coef=1.0, limit=0.0)
    charged = k1.shape(nothing, k1.token_penalties(pi.log()[:, None], REF_CHANCES.log()[:, None], everywhere))
    assert_close((pi * charged.reward[:, 0]).sum(), -divergence, 1e-10, "k1 is")


def test_k1_in_the_reward_has_the_gradient_of_the_divergence_of_whole_responses() -> None:
    """Two tokens of three, the second by a row of its own for each first: nine responses, sequence_sum, REINFORCE."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(*size, dtype=F64, generator=generator).requires_grad_() for size in ((3,), (3, 3)))
    ref_first, ref_second = (
        torch.randn(3, dtype=F64, generator=generator),
        torch.randn(3, 3, dtype=F64, generator=generator),
    )

    def tokens_of(start: Tensor, rest: Tensor) -> Tensor:
        rows = [[start.log_softmax(0)[a], rest.log_softmax(1)[a, b]] for a in range(3) for b in range(3)]
        return torch.stack([torch.stack(row) for row in rows])

    logprobs, ref = tokens_of(first, second), tokens_of(ref_first, ref_second)
    chances = logprobs.sum(dim=1).exp()
    exact = torch.autograd.grad((chances * (logprobs - ref).sum(dim=1)).sum(), (first, second), retain_graph=True)
    run = make_run(kl=K1Reward(kl_coef=0.3, limit=0.0), baseline=NoBaseline(), scale=NoScale(), surrogate=Reinforce(),
                   aggregation=SequenceSum())  # fmt: skip
    now = logprobs.detach()
    inputs = inputs_of(run, Scene(make_rollouts([2] * 9, 1), make_graded([[0.0]] * 9), now, now, ref))
    _, slopes = loss_and_gradient(run, inputs, now)
    got = torch.autograd.grad((9 * slopes * chances.detach()[:, None] * logprobs).sum(), (first, second))
    for ours, theirs in zip(got, exact):
        assert_close(ours, 0.3 * theirs, 1e-10, "gradient of the reverse KL of responses")
        assert theirs.abs().max() > 0.01


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
    inputs = step_of([2, 8, 4, 2], [-1] * 4, group_size=2, in_loss=[True, False, True, False])
    logprobs = torch.full((4, 8), -1.0, dtype=F64)
    for denominator, expected in ((Original(), original), (Survivors(), survivors)):
        run = make_run(aggregation=aggregation, denominator=denominator)
        assert_close(loss_and_gradient(run, inputs, logprobs)[0], expected, EXACT, type(denominator).__name__)


def test_survivors_do_not_count_a_prompt_that_left_whole() -> None:
    # only the first of two prompts is in the loss: mean over 1 prompt, not 2
    inputs = step_of([2, 2, 3, 3], [-1] * 4, group_size=2, in_loss=[True, True, False, False])
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
    run = make_run(kl=K3Loss(kl_coef=1.0, log_ratio_limit=20.0, limit=0.0))
    assert_close(loss_and_gradient(run, inputs, one)[0], -1 + 1 - math.log(2), EXACT, "loss")


def test_what_the_loss_reports_for_the_log() -> None:
    # Two tokens and one of padding. Learner .3, .5; old .2, .5; sampler .5, .25; reference .6, .5.
    def logs(*chances: float) -> Tensor:
        return torch.tensor([[*chances, 0.1]], dtype=F64).log()

    inputs = step_of([2], [1.0], 1, width=3, old_logprobs=logs(0.2, 0.5), ref_logprobs=logs(0.6, 0.5))
    inputs = replace(inputs, rollouts=replace(inputs.rollouts, sampler_logprobs=logs(0.5, 0.25)))
    run = make_run(kl=K3Loss(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0))
    entropy = torch.tensor([[0.4, 0.6, 9.0]], dtype=F64)
    output = policy_loss(run.loss_tricks, batch_of_rows(run, inputs, [0]), logs(0.3, 0.5), entropy)
    ln = math.log
    expected = {
        "tokens": 2,
        "entropy": 1.0,
        "ratio": 1.5 + 1,
        "k3_old": 0.5 - ln(1.5),
        "masked": 0,
        "surrogate_active": 1,  # 1.5 is above 1.2
        "surrogate_weight": 1,  # the cut token weighs nothing, the other its ratio of 1
        "unlike_ppo": 0,  # it is PPO
        "correction_weight": 2,
        "importance_active": 0,
        "kl_term": 0.1 * (1 - ln(2)),  # x = 2 and x = 1
        "kl_active": 1,
        "entropy_term": 0,
        "entropy_active": 0,
        "drifted": 1,
        "k3_ref": 1 - ln(2),
        "weight": 1,
        "weight_of_original": 1,
    }
    assert output.sums.keys() == expected.keys()
    for name, value in expected.items():
        assert output.sums[name].is_floating_point(), name
        assert_close(output.sums[name], value, EXACT, name)


def test_how_far_sampler_and_learner_are_apart() -> None:
    # Learner .2, .5 and .4; sampler .5, .25 and .4, in responses of two tokens and of one; padding is not read.
    learner = torch.tensor([[0.2, 0.5], [0.4, 9.0]], dtype=F64).log()
    sampler = torch.tensor([[0.5, 0.25], [0.4, 0.1]], dtype=F64).log()
    mask = torch.tensor([[True, True], [True, False]])
    signs, ln = mismatch_metrics(learner, sampler, mask, group_size=2), math.log
    assert_close(signs["mismatch/absolute"], (ln(2.5) + ln(2)) / 3, EXACT, "mean")
    assert_close(signs["mismatch/max"], ln(2.5), EXACT, "largest")
    assert_close(signs["mismatch/k1"], (ln(2.5) - ln(2)) / 3, EXACT, "k1")
    assert_close(signs["mismatch/k3"], (0.4 - 1 - ln(0.4) + 2 - 1 - ln(2)) / 3, EXACT, "k3")
    # weights .4, 2 and 1: 3.4^2 / (3 * (.16 + 4 + 1)); of responses .8 and 1: 1.8^2 / (2 * 1.64)
    assert_close(signs["mismatch/ess"], 3.4**2 / (3 * 5.16), EXACT, "tokens")
    assert_close(signs["mismatch/ess_responses"], 1.8**2 / (2 * 1.64), EXACT, "responses")
    # deviations of .2, .5, .4 from 11/30 and of .5, .25, .4 from 23/60, in sixtieths: -10, 8, 2 and 7, -8, 1
    assert_close(signs["mismatch/pearson"], (-70 - 64 + 2) / math.sqrt(168 * 114), EXACT, "correlation")
    assert mismatch_metrics(learner, sampler, torch.zeros_like(mask), group_size=2) == {}
    same = mismatch_metrics(learner[:1, :1], learner[:1, :1], mask[:1, :1], group_size=1)
    assert "mismatch/pearson" not in same and same["mismatch/k3"] == 0 and same["mismatch/ess"] == 1


@pytest.mark.parametrize(
    ("correction", "beyond"),
    [
        (NoCorrection(), [False] * 3),
        (TisToken(cap=2.0, floor=0.8), [False, True, True]),
        (TisSequence(cap=1.5), [True] * 3),
        (TisSequence(cap=2.0), [False] * 3),
        (TisGeometric(cap=1.1), [True] * 3),
        (Mis(low=0.5, high=1.5), [True] * 3),
        (Icepop(low=0.4, high=2.0), [False, True, False]),
    ],
    ids=repr,
)
def test_which_weights_the_bounds_decide(correction, beyond) -> None:
    """Ratios of 1.2, 3 and .5 in a row, and nothing sampled behind them."""
    assert correction.beyond(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)[0].tolist() == [*beyond, False]


# --- truncation pressure, by enumeration --------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A kind of response: how likely, the derivative of its log-probability by the parameter asked about, its worth."""

    chance: float
    slope: float
    worth: float
    length: int = 1
    truncated: bool = False


def expected_ascent(kinds, truncation, aggregation, denominator, size: int = 8, **advantage) -> float:
    """Expected ascent along one parameter of the policy, over every composition of a group of eight."""
    total = 0.0
    run = make_run(truncation=truncation, surrogate=Reinforce(), aggregation=aggregation, denominator=denominator,
                   **{"scale": NoScale()} | advantage)  # fmt: skip
    for bars in combinations(range(size + len(kinds) - 1), len(kinds) - 1):  # stars and bars
        edges = (-1, *bars, size + len(kinds) - 1)
        counts = [right - left - 1 for left, right in pairwise(edges)]
        rows = [kind for kind, count in zip(kinds, counts) for _ in range(count)]
        graded = make_graded(
            [[kind.worth for kind in rows]],
            lengths=[[kind.length for kind in rows]],
            truncated=[[kind.truncated for kind in rows]],
        )
        rollouts = make_rollouts([kind.length for kind in rows], size)
        cut = run.truncation(graded)
        mask = rollouts.sampled_mask & cut.in_loss.flatten()[:, None]
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
        Kind(q, 1 / q, cut_reward, lengths["cut"], truncated=True),
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


@pytest.mark.few(2)
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
        Kind((1 - g) * (1 - f), -1 / (1 - f), 0.0, truncated=True),
    )
    return expected_ascent(kinds, truncation, SequenceSum(), Original())


@pytest.mark.extended
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
        Kind(1 - finished, 0, 0, truncated=True),
    )
    pressure_on_a = expected_ascent(kinds, MaskBefore(), SequenceSum(), Original())
    assert_close(ascent_of_finishing(MaskBefore(), g), pressure_on_a * raises, 1e-12, "through accuracy alone")
    for truncation, ascent in ((Score(), 0.594), (MaskAfter(), 0.234), (MaskBefore(), 0.171)):
        assert_close(ascent_of_finishing(truncation, g), ascent, 5e-4, f"{truncation}, three printed decimals")
    assert_close(ascent_of_finishing(MaskBefore(), 0.0), 0.0, 1e-12, "no guesses, no pressure")
    # When cut responses are scored, stopping in time pays in itself: 0.97 * 7/8 without any guess.
    assert_close(ascent_of_finishing(Score(), 0.0), 0.97 * 7 / 8, 1e-12, "no guesses, full pressure")
    assert_close(ascent_of_finishing(MaskAfter(), 0.0), 0.2 * 0.97 * 7 / 8, 1e-12, "no guesses, a factor q weaker")


# --- prompt weights, by enumeration -------------------------------------------------------------------------


def prompt_weight(
    baseline, scale, p: float, size: int = 8, wrong: float = 0.0, lengths: tuple[int, int] = (1, 1)
) -> float:
    """w in: expected ascent = w * grad p. A response is right with p, so its log-prob's slope is 1/p or -1/(1 - p)."""
    kinds = (Kind(p, 1 / p, 1.0, lengths[0]), Kind(1 - p, -1 / (1 - p), wrong, lengths[1]))
    return expected_ascent(kinds, Score(), SequenceSum(), Original(), size, baseline=baseline, scale=scale)


def binomial_mean(function, p: float, size: int) -> float:
    """Expectation of `function(right answers)` over groups of `size`."""
    chances = (math.comb(size, c) * p**c * (1 - p) ** (size - c) for c in range(size + 1))
    return sum(chance * function(c) for c, chance in enumerate(chances))


ZERO = Singleton.zero
GROUP_MEAN, PLAIN_STD = GroupMean(ZERO), GroupStd(0, 0.0, False, ZERO)


@pytest.mark.parametrize(
    ("p", "mean", "others", "std", "max_rl"),
    [
        (0.02, 0.875, 1, 2.573, 6.594),
        (0.10, 0.875, 1, 2.328, 5.217),
        (0.30, 0.875, 1, 1.963, 3.059),
        (0.50, 0.875, 1, 1.856, 1.984),
        (0.90, 0.875, 1, 2.328, 1.111),
        (0.98, 0.875, 1, 2.573, 1.020),
    ],
)
def test_weights_of_a_prompt_in_groups_of_eight(p, mean, others, std, max_rl) -> None:
    for baseline, scale, printed in (
        (GROUP_MEAN, NoScale(), mean),
        (LeaveOneOut(ZERO), NoScale(), others),
        (GROUP_MEAN, PLAIN_STD, std),
        (GROUP_MEAN, DivideByMean(AllWrong.zero), max_rl),
    ):
        assert_close(prompt_weight(baseline, scale, p), printed, 5.1e-4, f"{baseline} {scale}, three decimals")


def std_weight(p: float, size: int) -> float:
    """E[deviation of the group] / (p (1 - p))."""
    return binomial_mean(lambda c: math.sqrt(c / size * (1 - c / size)), p, size) / (p * (1 - p))


def pass_at_k_weight(p: float, size: int, k: int) -> float:
    """E[c/G * sqrt(fail/(1 - fail))] / (p (1 - p)): a right answer is worth fail/sigma, and a group adds up to 0."""

    def worth(c: int) -> float:
        fail = math.comb(size - c, k) / math.comb(size, k)
        return c / size * math.sqrt(fail / (1 - fail)) if c else 0.0

    return binomial_mean(worth, p, size) / (p * (1 - p))


def length_weighted_weight(p: float, size: int, right: int, wrong: int) -> float:
    """A right answer gets the share of the group's tokens that is in wrong ones, a wrong one minus the rest."""

    def ascent(c: int) -> float:
        share = c * right / (c * right + (size - c) * wrong)
        return (c * (1 - share) / p + (size - c) * share / (1 - p)) / size

    return binomial_mean(ascent, p, size)


@pytest.mark.few(4)
@pytest.mark.parametrize("size", [2, 5, 8])
@pytest.mark.parametrize("p", [0.02, 0.3, 0.5, 0.9])
def test_prompt_weights_are_their_closed_forms(p: float, size: int) -> None:
    q = 1 - p
    forms = [
        (NoBaseline(), NoScale(), 1.0),
        (GROUP_MEAN, NoScale(), (size - 1) / size),
        (LeaveOneOut(ZERO), NoScale(), 1.0),
        (GROUP_MEAN, PLAIN_STD, std_weight(p, size)),
        (GROUP_MEAN, GroupStd(1, 0.0, False, ZERO), std_weight(p, size) * math.sqrt((size - 1) / size)),
        # all wrong gives nothing: the order is G - 1; with -1 there it is G
        (GROUP_MEAN, DivideByMean(AllWrong.zero), (1 - q ** (size - 1)) / p),
        (GROUP_MEAN, DivideByMean(AllWrong.minus_one), (1 - q**size) / p),
        (PassAtK(1), NoScale(), std_weight(p, size)),
        (PassAtK(2), NoScale(), pass_at_k_weight(p, size, 2)),
        (LengthWeighted(Singleton.zero), NoScale(), (size - 1) / size),  # all of one length
        # a batch of one prompt
        (BatchMean(Weights.rows), NoScale(), (size - 1) / size),
        (GROUP_MEAN, BatchStd(Deviation.raw, Weights.rows, False, 0, 0.0, Floor.added), std_weight(p, size)),
        (GROUP_MEAN, InformativeShare(AlphaForm.informative_groups), (size - 1) / size),
    ]
    for baseline, scale, weight in forms:
        assert_close(prompt_weight(baseline, scale, p, size), weight, 1e-10, f"{baseline} {scale}")
    # rewards 1 and -1: twice the difference, half of it from each side
    for positive, negative in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.5, 1.0)):
        got = prompt_weight(NoBaseline(), SignWeighted(positive, negative), p, size, wrong=-1.0)
        assert_close(got, positive + negative, 1e-10, f"right answers at {positive}, wrong ones at {negative}")
    got = prompt_weight(LengthWeighted(Singleton.zero), NoScale(), p, size, lengths=(3, 5))
    assert_close(got, length_weighted_weight(p, size, 3, 5), 1e-10, "right answers of 3 tokens, wrong ones of 5")


@pytest.mark.parametrize("p", [0.02, 0.5, 0.9])
def test_rows_over_nonzero_rewards_in_a_batch_of_one_prompt_are_the_division_by_the_mean(p: float) -> None:
    # alpha = 8/c is one over the mean reward; a group of no right answer has nothing to scale
    got = prompt_weight(GROUP_MEAN, InformativeShare(AlphaForm.nonzero_rewards), p)
    assert_close(got, (1 - (1 - p) ** 7) / p, 1e-10, "MaxRL of order G - 1")


@pytest.mark.parametrize("k", [2, 3, 4])
def test_pass_at_k_leaves_easy_prompts_to_others(k: int) -> None:
    for p in (0.1, 0.5, 0.9):
        got = prompt_weight(PassAtK(k), NoScale(), p)
        assert_close(got, pass_at_k_weight(p, 8, k), 1e-10, f"k = {k}")
    easy, hard = (prompt_weight(PassAtK(k), NoScale(), p) for p in (0.9, 0.1))
    assert easy < hard / 2
    assert easy < prompt_weight(PassAtK(k - 1), NoScale(), 0.9) / 2


def test_a_deviation_raises_no_prompt_beyond_the_root_of_g_minus_one() -> None:
    for p in (1e-6, 1 - 1e-6):
        assert_close(prompt_weight(GROUP_MEAN, PLAIN_STD, p), math.sqrt(7), 1e-4, "8 responses")


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
    logprobs, entropy = token_logprobs(model, prompts, tokens, mask, 0.5, Fp32(LmHead.same, 1e-3))
    # row 1: p(1 | 0) = 9/10, p(0 | 1) = 1/2; row 2: p(0 | 1) = 1/2, then masked
    assert_close(logprobs, [[math.log(0.9), math.log(0.5)], [math.log(0.5), 0]], EXACT, "log-probs")
    spread = -0.9 * math.log(0.9) - 0.1 * math.log(0.1)
    assert_close(entropy, [[spread, math.log(2)], [math.log(2), 0]], EXACT, "entropy in nats")


@pytest.mark.parametrize(
    ("precision", "head", "score"),
    [
        # 1 + 2^-9 is an fp32 number; bfloat16 holds 8 bits of mantissa and rounds it to 1
        (Fp32(LmHead.same, 1e-3), nn.Linear, 1 + 2**-9),
        (Bf16(LmHead.same, 0.1), nn.Linear, 1.0),
        (Bf16(LmHead.fp32, 0.1), Fp32Head, 1 + 2**-9),
        # float16 holds 11 bits: 1 + 2^-9 stays, 1 + 2^-12 is rounded to 1
        (Fp16(LmHead.same, 0.03), nn.Linear, 1 + 2**-9),
    ],
)
def test_arithmetic_of_the_output_head(precision, head, score: float) -> None:
    weight = 1 + 2**-9
    model = NextTokenTable(torch.tensor([[0.0, 1.0], [0.0, 0.0]]), linear(weight, head))
    logprobs, _ = token_logprobs(model, [(0,)], torch.tensor([[1]]), torch.tensor([[True]]), 1.0, precision)
    assert_close(logprobs, [[-math.log1p(math.exp(-score))]], 1e-6, "fp32 softmax of the score")


# --- what stands around the loss ----------------------------------------------------------------------------


def test_plain_options_of_the_system_axes() -> None:
    assert [Sync().batches_due(ready) for ready in (0, 1)] == [1, 0] and Sync().keeps_sampler_current
    assert [Frozen().mixes(step) for step in (0, 1, 7)] == [0.0] * 3
    assert Recomputed().recomputes


def test_updates_cut_a_batch_into_minibatches_and_go_over_it_again() -> None:
    def parts(minibatches: int, passes: int, problems: int) -> list[list[int]]:
        return [list(part) for part in Updates(minibatches, passes, fresh_optimizer=False).split(problems)]

    assert parts(2, 1, 6) == [[0, 1, 2], [3, 4, 5]]
    assert parts(16, 1, 32) == [[2 * n, 2 * n + 1] for n in range(16)]
    assert parts(1, 2, 3) == [[0, 1, 2], [0, 1, 2]] and parts(2, 2, 2) == [[0], [1], [0], [1]]
    assert Updates(2, 3, False).number == 6


def test_a_fresh_optimiser_moves_each_weight_by_the_whole_rate_again() -> None:
    """Adam's first step is lr * g / |g|; its second, with moments of opposite gradients 1 and -0.5, is much shorter."""

    def second_step(fresh: bool) -> float:
        weight = torch.nn.Parameter(torch.zeros(1, dtype=F64))
        optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.9), eps=0.0, weight_decay=0.0)
        for gradient in (1.0, -0.5):
            Updates(1, 1, fresh).begin(optimizer)
            before, weight.grad = weight.item(), torch.tensor([gradient], dtype=F64)
            optimizer.step()
        return weight.item() - before

    assert_close(second_step(fresh=True), 0.1, 1e-12, "moments of one gradient: its sign times the rate")
    # m = (.9 * .1 - .05) / .19, v = (.9 * .1 + .1 * .25) / .19
    assert_close(second_step(fresh=False), -0.1 * (0.04 / 0.19) / (0.115 / 0.19) ** 0.5, 1e-12, "both gradients")


def test_uniform_walks_through_seven_problems_three_at_a_time() -> None:
    # 7 // 3 = 2 batches a pass; the seventh problem waits
    def walk(seed: int) -> list[list[int]]:
        memory, alike = Memory.of(7), torch.ones(7, dtype=torch.long)
        return [Uniform().draw(3, Pool(alike, alike, 3, seed, 0.0, memory, frozenset())) for _ in range(4)]

    draws = walk(seed=5)
    for first in (0, 2):
        seen = draws[first] + draws[first + 1]
        assert len(set(seen)) == 6 and set(seen) <= set(range(7))
    assert draws[:2] != draws[2:]
    assert walk(seed=5) == draws and walk(seed=6) != draws


# --- all stages ---------------------------------------------------------------------------------------------


def test_the_stages_in_order_give_the_step_made_by_hand() -> None:
    # [1, 0] centred and divided by its deviation .5 is [1, -1]
    zeros = torch.zeros(2, 8, dtype=F64)
    rollouts = make_rollouts([2, 8], 2)
    scene = Scene(rollouts, make_graded([[1, 0]]), zeros - 1, zeros - 1, zeros - 1)
    run = make_run(scale=GroupStd(0, 0.0, False, Singleton.zero))
    assert_close(inputs_of(run, scene).advantages, SHORT_RIGHT_LONG_WRONG.advantages, EXACT, "advantages")
