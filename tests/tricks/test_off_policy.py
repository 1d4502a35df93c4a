"""Numbers worked out by hand for the surrogates made for stale data, and for masks on probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from helpers import F64, assert_close
from test_golden import EXACT, LEARNER_LOGS, SAMPLED, SAMPLER_LOGS, surrogate_of

from grpo_lab.tricks.convention import BoundForm, Scope
from grpo_lab.tricks.rejection import (
    Direction,
    SequenceMeanBinaryKl,
    SequenceMeanTv,
    SequenceOutlier,
    TokenBinaryKl,
    TokenTv,
)
from grpo_lab.tricks.surrogate import StepTokens
from grpo_lab.tricks.surrogate_off_policy import (
    Dro,
    Fipo,
    Ipo,
    KimiToken,
    M2po,
    RatioMask,
    RecOneSide,
    RecRing,
    Sppo,
    TokenWeight,
    Vespo,
    discounted_rest,
)


def logs(*numbers: float) -> list[float]:
    return [math.log(number) for number in numbers]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_ipo_drops_what_moved_far_whatever_its_sign_and_penalises_all(advantage: float) -> None:
    # (old, now): .25 up, .25 down, .19 up, .24 up; the ratio of the third is 20
    old, now = [0.5, 0.5, 0.01, 0.01], [0.75, 0.25, 0.2, 0.25]
    log_ratio = logs(*(after / before for after, before in zip(now, old)))
    result, slopes = surrogate_of(Ipo(0.2, 0.5), log_ratio, advantage, logs(*now))
    penalties = [0.5 * drift**2 for drift in log_ratio]
    losses = [kept * -20 * advantage + penalty for kept, penalty in zip([0, 0, 1, 0], penalties)]
    assert_close(result.token_loss, [losses], 1e-11, "-keep * r * A + tau (log r)^2")
    expected = [kept * -20 * advantage + drift for kept, drift in zip([0, 0, 1, 0], log_ratio)]
    assert_close(slopes, expected, 1e-11, "the ratio carries gradient, and the slope of the penalty is 2 * .5 * log r")
    assert result.affected.tolist() == [[True, True, False, True]]
    assert Ipo(0.2, 0.5).pulls_without_advantage and not Ipo(0.2, 0.0).pulls_without_advantage


RATIOS = (0.5, 0.7, 0.9, 1.1, 1.3, 1.5)
ONE, RATIO = TokenWeight.one, TokenWeight.ratio


@pytest.mark.parametrize(
    ("surrogate", "advantage", "weights"),
    [
        (RatioMask(0.2, 0.4), 2.0, [0, 0, 0.9, 1.1, 1.3, 0]),
        (RatioMask(0.2, 0.4), -2.0, [0, 0, 0.9, 1.1, 1.3, 0]),
        # one side: what the advantage pushes further away leaves
        (RecOneSide(0.2, ONE), 2.0, [1, 1, 1, 1, 0, 0]),
        (RecOneSide(0.2, ONE), -2.0, [0, 0, 1, 1, 1, 1]),
        (RecOneSide(0.2, RATIO), -2.0, [0, 0, 0.9, 1.1, 1.3, 1.5]),
        # the ring keeps .5 where it rises again, and 1.5 where it falls again; .7 and 1.3 are in between
        (RecRing(0.2, 0.4, ONE), 2.0, [1, 0, 1, 1, 0, 0]),
        (RecRing(0.2, 0.4, ONE), -2.0, [0, 0, 1, 1, 0, 1]),
    ],
    ids=repr,
)
def test_tokens_that_stay_and_their_weights(surrogate, advantage: float, weights: list[float]) -> None:
    logprobs = logs(*(ratio / 10 for ratio in RATIOS))
    result, slopes = surrogate_of(surrogate, logs(*RATIOS), advantage, logprobs)
    assert_close(result.token_loss, [[-w * advantage * lp for w, lp in zip(weights, logprobs)]], EXACT, "-w * A * logp")
    assert_close(slopes, [-w * advantage for w in weights], EXACT, "gradient")
    assert result.affected.tolist() == [[weight == 0 for weight in weights]]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_kimi_token_masks_by_the_ratio_whatever_its_sign_and_penalises_all(advantage: float) -> None:
    ratios, kept = (0.5, 0.9, 1.3, 1.5), (0, 0.9, 1.3, 0)
    log_ratio, logprobs = logs(*ratios), logs(*(ratio / 10 for ratio in ratios))
    result, slopes = surrogate_of(KimiToken(0.2, 0.4, 0.5), log_ratio, advantage, logprobs)
    losses = [-w * advantage * lp + 0.5 * drift**2 for w, lp, drift in zip(kept, logprobs, log_ratio)]
    assert_close(result.token_loss, [losses], EXACT, "-w * A * logp + tau (log r)^2")
    expected = [-w * advantage + drift for w, drift in zip(kept, log_ratio)]
    assert_close(slopes, expected, EXACT, "the slope of the penalty is 2 * .5 * log r, on masked tokens too")
    assert result.affected.tolist() == [[True, False, False, True]]
    assert KimiToken(0.2, 0.4, 0.5).pulls_without_advantage


def test_sppo_takes_the_log_ratio_within_a_symmetric_band() -> None:
    log_ratio = logs(0.75, 0.9, 1, 1.2, 1.5)  # the band is [.8, 1.25]
    result, slopes = surrogate_of(Sppo(0.25), log_ratio, -2.0)
    assert_close(result.token_loss, [[0, 2 * math.log(0.9), 0, 2 * math.log(1.2), 0]], EXACT, "-A * log r")
    assert_close(slopes, [0, 2, 2, 2, 0], EXACT, "no token is weighted by its ratio")


@pytest.mark.parametrize(
    ("advantage", "weights"),
    [
        # exp(3 + 2 ln w - 3 w): of w = .5 e^1.5 / 4, of 2 4 e^-3
        (2.0, [math.exp(1.5) / 4, 1, 4 * math.exp(-3)]),
        # exp(2 + 3 ln w - 2 w): e / 8 and 8 e^-2
        (-2.0, [math.e / 8, 1, 8 * math.exp(-2)]),
    ],
)
def test_vespo_weighs_by_a_gamma_of_the_ratio(advantage: float, weights: list[float]) -> None:
    vespo, logprobs = Vespo(2.0, 3.0, 3.0, 2.0), [-1.0, -2.0, -3.0]
    result, slopes = surrogate_of(vespo, logs(0.5, 1, 2), advantage, logprobs)
    assert_close(slopes, [-w * advantage for w in weights], EXACT, "gradient")
    assert_close(result.token_loss, [[-w * advantage * lp for w, lp in zip(weights, logprobs)]], EXACT, "-w * A * logp")
    assert result.affected.tolist() == [[True, False, True]]
    far, _ = surrogate_of(vespo, [-50.0, 50.0], advantage)
    assert_close(far.weight[0, 0], far.weight[0, 0].new_tensor(1e-8) ** (2 if advantage > 0 else 3) * math.exp(
        (3 if advantage > 0 else 2) * (1 - 1e-8)), EXACT, "ln w is at least ln 1e-8")  # fmt: skip
    assert far.weight[0, 1] == 0


def test_dro_squares_each_tokens_log_ratio() -> None:
    # .25 * (.04, .16); slopes -2 + .5 * (.2, -.4)
    result, slopes = surrogate_of(Dro(0.5), [0.2, -0.4], 2.0, [-1.0, -2.0])
    assert_close(result.token_loss, [[2.01, 4.04]], EXACT, "-A * logp + beta/2 (log r)^2")
    assert_close(slopes, [-1.9, -2.2], EXACT, "gradient")


def test_fipo_weighs_by_the_rest_of_the_response() -> None:
    fipo = Fipo(0.2, 0.5, 1.0, 0.1, 0.2, 4.0, 0.2)
    # with half-life 1: .1, then .08 + .05, then .04 + .065; the fourth is not sampled
    result, slopes = surrogate_of(fipo, [0.04, 0.08, 0.1, 9.0], 2.0, sampled=3)
    rest = [0.105, 0.13, 0.1]
    expected = [-2 * math.exp(ahead + own) for ahead, own in zip(rest, [0.04, 0.08, 0.1])]
    assert_close(result.token_loss[0, :3], expected, EXACT, "w * -r * A")
    assert_close(slopes[:3], expected, EXACT, "w carries no gradient")
    # exp(.3) and exp(-.3) are cut to 1.2 and .9; PPO takes the gradient of the first row's token above 1.5
    for drift, weight in ((0.3, 1.2), (-0.3, 0.9)):
        result, _ = surrogate_of(fipo, [drift], 2.0)
        assert_close(result.token_loss, [[-2 * weight * math.exp(drift)]], EXACT, "bounds of w")
    # A < 0 and r = 5: w within [.8, 1]
    result, _ = surrogate_of(fipo, logs(5), -2.0)
    assert_close(result.token_loss, [[2 * 1.0 * 5]], EXACT, "no more than PPO's")
    # followed by a token of -9: exp(log 5 - 4.5) = .06 is cut to 1 - low, and only then to [.8, 1]
    for low, weight in ((0.1, 0.9), (0.0, 1.0)):
        result, _ = surrogate_of(Fipo(0.2, 0.5, 1.0, low, 0.2, 4.0, 0.2), [math.log(5), -9.0], -2.0)
        assert_close(result.token_loss[0, 0], 2 * weight * 5, EXACT, "the first bounds hold before the second")


@pytest.mark.parametrize("width", [1, 95, 96, 97, 400])
def test_the_rest_of_a_long_response_is_that_of_a_loop(width: int) -> None:
    values = torch.randn(3, width, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected, ahead = torch.zeros_like(values), torch.zeros(3, dtype=F64)
    for place in reversed(range(width)):
        ahead = expected[:, place] = values[:, place] + ahead * 2 ** (-1 / 3)
    assert_close(discounted_rest(values, 3.0), expected, EXACT, "blocks of 96 tokens")


# (A, log r): pushed further away are the first, third, fourth and fifth, with squares .01, .09, .25 and .01
MOVED = [(2, 0.1), (2, -0.3), (-2, -0.3), (2, 0.5), (-2, -0.1)]


@pytest.mark.parametrize(
    ("bound", "dropped"),
    [
        (0.1, [0, 0, 0, 0, 0]),  # the mean of four is .09
        (0.04, [0, 0, 0, 1, 0]),  # of three .0367
        (0.03, [0, 0, 1, 1, 0]),  # of two .01
        (0.005, [1, 0, 1, 1, 1]),
    ],
)
def test_m2po_drops_the_largest_until_the_mean_of_the_rest_is_small(bound: float, dropped: list[int]) -> None:
    advantages, log_ratio = (torch.tensor(column, dtype=F64) for column in zip(*MOVED))
    tokens = StepTokens(torch.full((5,), -1.0, dtype=F64), log_ratio, advantages, torch.zeros(5, dtype=F64))
    m2po = M2po(bound, Scope.step)
    assert m2po.mark(tokens).tolist() == [bool(bit) for bit in dropped]
    marked = [bool(bit) for bit in dropped]
    result, slopes = surrogate_of(m2po, log_ratio.tolist(), 2.0, marked=marked)
    assert_close(slopes, [0 if gone else -2 * math.exp(own) for gone, own in zip(marked, log_ratio)], EXACT, "-r * A")
    assert result.affected.tolist() == [marked]


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        # ratios 1.2, 3, .5; for verl's sign the bounds are on .83, .33, 2
        (SequenceOutlier(False, 0.4, 3.1, BoundForm.ratio), [1, 1, 1]),
        (SequenceOutlier(False, 0.6, 3.1, BoundForm.ratio), [0, 0, 0]),
        (SequenceOutlier(False, 0.4, 2.9, BoundForm.ratio), [0, 0, 0]),
        (SequenceOutlier(False, 0.3, 2.1, BoundForm.inverse), [1, 1, 1]),
        (SequenceOutlier(False, 0.4, 2.1, BoundForm.inverse), [0, 0, 0]),
        # the sampler's probability is e^-3 = .0497871: differences .0099574, .0995741, .0248935, mean .0448083
        (TokenTv(False, 0.0996), [1, 1, 1]),
        (TokenTv(False, 0.0995), [1, 0, 1]),
        (TokenTv(False, 0.0248), [1, 0, 0]),
        (SequenceMeanTv(False, 0.0449), [1, 1, 1]),
        (SequenceMeanTv(False, 0.0448), [0, 0, 0]),
        # .0497871 ln(1/ratio) + .9502129 ln(.9502129 / (1 - .0497871 ratio)): .00093, .05049, .00994, mean .02045
        (TokenBinaryKl(False, 0.0506, Direction.sampler_to_old), [1, 1, 1]),
        (TokenBinaryKl(False, 0.0504, Direction.sampler_to_old), [1, 0, 1]),
        (TokenBinaryKl(False, 0.0099, Direction.sampler_to_old), [1, 0, 0]),
        (SequenceMeanBinaryKl(False, 0.0205, Direction.sampler_to_old), [1, 1, 1]),
        (SequenceMeanBinaryKl(False, 0.0204, Direction.sampler_to_old), [0, 0, 0]),
        # KPop's other direction: p ln(p / .0497871) + (1 - p) ln((1 - p) / .9502129), p = ratio * .0497871:
        # .00099, .06993, .00796, mean .02629
        (TokenBinaryKl(False, 0.0700, Direction.old_to_sampler), [1, 1, 1]),
        (TokenBinaryKl(False, 0.0699, Direction.old_to_sampler), [1, 0, 1]),
        (TokenBinaryKl(False, 0.0079, Direction.old_to_sampler), [1, 0, 0]),
        (SequenceMeanBinaryKl(False, 0.0263, Direction.old_to_sampler), [1, 1, 1]),
        (SequenceMeanBinaryKl(False, 0.0262, Direction.old_to_sampler), [0, 0, 0]),
        # the larger of the two of each token: .00099, .06993, .00994, mean .02695
        (TokenBinaryKl(False, 0.0099, Direction.either), [1, 0, 0]),
        (TokenBinaryKl(False, 0.0100, Direction.either), [1, 0, 1]),
        (TokenBinaryKl(False, 0.0700, Direction.either), [1, 1, 1]),
        (SequenceMeanBinaryKl(False, 0.0270, Direction.either), [1, 1, 1]),
        (SequenceMeanBinaryKl(False, 0.0269, Direction.either), [0, 0, 0]),
    ],
    ids=repr,
)
def test_tokens_that_stay_by_outliers_and_by_probabilities(rejection, kept: list[int]) -> None:
    stays = rejection(LEARNER_LOGS, SAMPLER_LOGS, SAMPLED)
    assert stays[0].tolist() == [bool(bit) for bit in kept] + [False], "never a token that was not sampled"
    assert stays[1].tolist() == [True, True, True, False], "ratios of 1"
