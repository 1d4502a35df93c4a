"""Statistics of the noise floor: intervals over seeds and questions, and how many of either an effect needs.

A deviation from 3 or 5 pilot seeds is itself rough: `sd_interval` says how rough, and planning with its upper bound is
the careful choice. How coverage was measured stands in `grpo_lab.analysis.stats.intervals`.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE, FOR_INTERVAL, Interval, Numbers, seeds_by_questions
from grpo_lab.analysis.stats.power import ALPHA, MOST_SEEDS, POWER, fewest, power_of_t


def crossed_t_interval(values: np.ndarray) -> Interval:
    """The mean over other seeds and other questions, from `values` [S, Q]: one number per seed and question.

    In a two-way table without replication, with the mean squares of seeds, of questions and of what is left,

        variance of the mean = (MS_seeds + MS_questions - MS_rest) / (S Q)

    and Satterthwaite's degrees of freedom. Works on accuracies and on their paired differences. Coverage for 3, 5 and
    10 seeds: 92 to 97% of an arm's accuracy, 94 to 99% of a difference. Raises ValueError for fewer than 2 questions or
    a missing one; the bounds are NaN for fewer than FOR_INTERVAL seeds.
    """
    seeds, questions = seeds_by_questions(values)
    mean = float(np.mean(values))
    if seeds < FOR_INTERVAL:
        return Interval(mean, math.nan, math.nan, seeds, points=tuple(map(float, values.mean(axis=1))))
    of_seeds, of_questions = values.mean(axis=1), values.mean(axis=0)
    rest = values - of_seeds[:, None] - of_questions + mean
    freedom = np.array([seeds - 1, questions - 1, (seeds - 1) * (questions - 1)])
    squares = [questions * of_seeds.var() * seeds, seeds * of_questions.var() * questions, (rest**2).sum()]
    mean_squares = np.array(squares) / freedom
    # By chance the difference may fall below its parts, and Satterthwaite's number below the fewest degrees.
    variance = max(mean_squares[0] + mean_squares[1] - mean_squares[2], *mean_squares)
    if variance == 0:
        return Interval(mean, mean, mean, seeds)
    degrees = max(variance**2 / (mean_squares**2 / freedom).sum(), freedom.min())
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees) * math.sqrt(variance / (seeds * questions)))
    return Interval(mean, mean - half, mean + half, seeds)


def standard_error(values: Numbers) -> float:
    """Of the mean of one run over questions, in the values' unit; each value is a question's mean over its samples.

    sqrt(sum_q (x_q - mean)^2 / (n (n - 1)))          (arXiv:2411.00640)

    It holds both the choice of questions and the sampling of answers, not the training seed. Mean +- 1.96 of it covers
    94 to 95% from 32 questions on; where only one answer in ten is right, or wrong, 93 to 94% with 128 questions, 92
    to 93% with 64 and 89% with 32. NaN for fewer than 2 questions.
    """
    n = len(values)
    return float(np.std(np.asarray(values), ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def sd_interval(sd: float | int, n: int) -> Interval:
    """Chi-square interval of a standard deviation estimated from n normal values; no bounds for n = 1.

    Covers 95% with n = 3, 5 and 10 for normal values (20,000 experiments), 91, 88 and 84% for heavy tails (Laplace).
    """
    if n < 2:
        return Interval(float(sd), math.nan, math.nan, n)
    tail, freedom = (1 - CONFIDENCE) / 2, n - 1
    low, high = (sd * math.sqrt(freedom / stats.chi2.ppf(share, freedom)) for share in (1 - tail, tail))
    return Interval(float(sd), float(low), float(high), n)


def seeds_needed(effect: float | int, sd: float | int, paired: bool = True) -> int:
    """The fewest seeds (per arm) with which a test finds a true effect with 80% power; at least 2.

    Raises ValueError for an effect of 0 or one that needs more than 100,000 seeds, and as `power_of_t`.
    """
    enough = fewest(lambda n: power_of_t(effect, sd, n, paired))
    if enough is None:
        raise ValueError(f"an effect of {effect} at sd {sd} needs over {MOST_SEEDS:,} seeds: look for a larger one")
    return enough


def questions_needed(effect: float | int, variance: float | int) -> int:
    """Questions on which the difference of two checkpoints is found with 80% power, both asked the same ones.

    n = (z_{alpha/2} + z_beta)^2 variance / effect^2          (arXiv:2411.00640)

    `variance` is that over questions of the measured difference, the noise of sampling answers included. Normal
    quantiles: for tens of questions or more. Raises ValueError for an effect of 0.
    """
    if effect == 0:
        raise ValueError("no number of questions finds an effect of 0: give the smallest effect that matters")
    quantiles = stats.norm.isf(ALPHA / 2) + stats.norm.isf(1 - POWER)
    return math.ceil(quantiles**2 * variance / effect**2)
