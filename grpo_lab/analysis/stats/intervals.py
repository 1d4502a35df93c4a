"""Intervals, standard errors and summaries in closed form; `resampling` holds the bootstraps.

Which uncertainty is which: other seeds on the same questions is a Student t interval over one number per seed
(`t_interval`, `paired_difference`), the default everywhere; other seeds and other questions is `crossed_t_interval`;
one run on other questions is a standard error over questions, or `resampling.question_bootstrap`.

Every docstring says how often its nominal 95% held the truth. Unless it says otherwise, in 500 to 3,000 simulated
experiments per setting (so +-.4 to 1 pp) with 3, 5 and 10 seeds and 64, 128 and 500 questions: 1 to 16 right-or-wrong
answers a question; difficulty uniform, or mostly near 0 and 1 (beta .5, .5); seeds that deviate by 1 to 3 pp, by .5
logits more on every single question, and correlate .8 between arms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

CONFIDENCE = 0.95
SMALL = 0.002  # below it three decimals would leave one digit, and two significant ones are shown
Numbers = Sequence[float | int] | np.ndarray | pd.Series
MOST_SIGNS = 20  # differences whose 2^n signs are still enumerated


@dataclass(frozen=True)
class Interval:
    """An estimate from n seeds (or questions) with a confidence interval.

    low and high are NaN for n = 1, all three numbers are for n = 0.
    """

    mean: float
    low: float
    high: float
    n: int

    def text(self, sign: str = "") -> str:
        """`0.693 [0.681, 0.705]`; `sign="+"` writes the sign of positive numbers too."""
        if self.n == 0:
            return "-"
        if self.n == 1:
            return f"{self.mean:{sign}.3f}"
        numbers = (self.mean, self.low, self.high)
        form = ".2g" if 0 < max(map(abs, numbers)) < SMALL else ".3f"
        mean, low, high = (format(number, sign + form) for number in numbers)
        return f"{mean} [{low}, {high}]"

    def contains(self, value: float | int) -> bool:
        """Whether the data leave the value possible; without bounds (n < 2) nothing is excluded."""
        return not (value < self.low or value > self.high)


def t_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Student's t interval of the mean of independent values.

    Coverage for n = 3, 5 and 10 seeds, on the questions asked: 94 to 96% of an arm's accuracy and of a difference
    paired by seed. In 200,000 experiments of n = 3 and n = 5 bare numbers: 95% for normal values and for shares of 128
    answers whose rate itself varies between seeds, 97% for differences of two skewed (exponential) values, 88% for
    strongly skewed values on their own. It is not about other questions: of what an arm would score on those it covers
    36 to 93%, the less the more seeds there are; a paired difference, in which most of a question's luck cancels, 92
    to 96%.
    """
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(np.mean(values))
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1) * np.std(values, ddof=1) / math.sqrt(n))
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(treated: pd.Series, control: pd.Series) -> Interval:
    """Treated less control, paired by seed (the index of both), over the seeds for which both have a value."""
    return t_interval(seed_differences(treated, control).tolist())


def seed_differences(treated: pd.Series, control: pd.Series) -> pd.Series:
    """Treated less control for each seed that has both, in the order of the seeds."""
    return (treated - control).dropna().sort_index()


def crossed_t_interval(values: np.ndarray, confidence: float = CONFIDENCE) -> Interval:
    """The mean over other seeds and other questions, from `values` [S, Q]: one number per seed and question.

    In a two-way table without replication, with the mean squares of seeds, of questions and of what is left,

        variance of the mean = (MS_seeds + MS_questions - MS_rest) / (S Q)

    and Satterthwaite's degrees of freedom. Works on paired differences [S, Q] as on scores. Coverage for 3, 5 and 10
    seeds: 92 to 97% of an arm's accuracy, 94 to 99% of a difference. Raises ValueError for fewer than 2 questions or
    a missing one; the bounds are NaN for one seed.
    """
    seeds, questions = seeds_by_questions(values)
    mean = float(np.mean(values))
    if seeds == 1:
        return Interval(mean, math.nan, math.nan, 1)
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
    half = float(stats.t.ppf((1 + confidence) / 2, degrees) * math.sqrt(variance / (seeds * questions)))
    return Interval(mean, mean - half, mean + half, seeds)


def seeds_by_questions(values: np.ndarray) -> tuple[int, int]:
    """The shape of a table [S, Q] without holes. Raises ValueError for any other."""
    if values.ndim != 2 or values.shape[0] < 1 or values.shape[1] < 2:
        raise ValueError(f"values have the shape {values.shape}: give one row per seed, at least two questions a row")
    if np.isnan(values).any():
        raise ValueError("some seed lacks some question: keep the questions that every seed answered")
    return values.shape


# --- standard errors over questions -------------------------------------------------------------------------


def standard_error(values: Numbers) -> float:
    """Of the mean of one run over questions, in the values' unit; each value is a question's mean over its samples.

    sqrt(sum_q (x_q - mean)^2 / (n (n - 1)))          (arXiv:2411.00640)

    It holds both the choice of questions and the sampling of answers, not the training seed. Mean +- 1.96 of it covers
    94 to 95% from 32 questions on; where only one answer in ten is right, or wrong, 93 to 94% with 128 questions, 92
    to 93% with 64 and 89% with 32. NaN for fewer than 2 questions.
    """
    n = len(values)
    return float(np.std(np.asarray(values), ddof=1) / math.sqrt(n)) if n > 1 else math.nan


def clustered_standard_error(values: Numbers, clusters: Sequence | np.ndarray | pd.Series) -> float:
    """Of the mean over questions that come in clusters: templates, shared passages, near duplicates.

    sqrt(SE^2 + n^-2 sum_c sum_{i != j in c} (x_i - mean)(x_j - mean))          (arXiv:2411.00640)

    `clusters` names the cluster of each value. Clusters of one question give `standard_error`. The robust variance of
    a regression on a constant, without its small-sample factor, is smaller by sum (x - mean)^2 / (n^2 (n - 1)), since
    it divides squares by n where SE^2 divides by n - 1. Mean +- 1.96 of it covers 91 to 92% with 16 clusters of 1 to 8
    questions, 93% with 32, 94 to 95% with 125, where `standard_error` covers 79 to 84%; with the t of C - 1 degrees
    instead of 1.96, 93, 94 and 95%. Raises ValueError for fewer than 2 clusters.
    """
    _, member = np.unique(np.asarray(clusters), return_inverse=True)
    n, number = len(values), int(member.max(initial=-1)) + 1
    if len(member) != n or number < 2:
        raise ValueError(
            f"{n} values, {len(member)} labels, {number} clusters: label every value, in 2 clusters or more"
        )
    residuals = np.asarray(values, dtype=float) - np.mean(values)
    sums = np.bincount(member, weights=residuals)
    pairs = (sums**2).sum() - (residuals**2).sum()  # of i != j, over all clusters
    return math.sqrt(standard_error(values) ** 2 + pairs / n**2)


def paired_standard_error(treated: Numbers, control: Numbers) -> float:
    """Of the difference of two runs' means over the same questions, in the same order.

    sd_q(x_treated - x_control) / sqrt(n)          (arXiv:2411.00640)

    Of these two checkpoints, not of the recipes that trained them. Difference +- 1.96 of it covers 94 to 96% from 32
    questions on. Raises ValueError where the numbers of questions differ.
    """
    if len(treated) != len(control):
        raise ValueError(f"{len(treated)} and {len(control)} questions: keep those that both runs answered")
    return standard_error(np.asarray(treated, dtype=float) - np.asarray(control, dtype=float))


# --- summaries over runs and tasks --------------------------------------------------------------------------


def iqm(values: np.ndarray) -> float:
    """Interquartile mean: the mean of the middle half of all values, whatever their shape (arXiv:2108.13264).

    A quarter is cut off at each end, rounded down to whole values: of 3 values nothing is cut, of 5 one at each end.
    """
    return float(stats.trim_mean(values, 0.25, axis=None))


def probability_of_improvement(treated: np.ndarray, control: np.ndarray) -> float:
    """The chance that a run of one arm beats a run of the other on a task, ties counting one half (arXiv:2108.13264).

    Both are [runs] or [runs, tasks]; every run is compared with every run of the other arm on the same task, and
    tasks weigh the same. .5 says that neither is better; pairing by seed is not used. Raises ValueError where the
    tasks differ or an arm has no run.
    """
    if treated.shape[1:] != control.shape[1:] or not (treated.size and control.size):
        raise ValueError(f"shapes {treated.shape} and {control.shape}: give both arms a run and the same tasks")
    margins = treated[:, None] - control[None]
    return float(np.mean(margins > 0) + np.mean(margins == 0) / 2)


# --- an exact test ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignFlip:
    """A sign-flip test of n paired differences; no data of this size can give less than `smallest`."""

    p: float
    smallest: float
    n: int


def sign_flip_test(differences: Numbers) -> SignFlip:
    """Exact two-sided paired permutation test of no difference, over all 2^n signs.

    p is the share of sign patterns whose mean is at least as far from zero as the one observed. It assumes that the
    differences are symmetric around zero where there is no effect, and no more. `smallest` = 2 / 2^n: with 5 seeds
    .0625, so 6 seeds are the fewest that can reach p < .05. Raises ValueError for n > 20, or without differences.
    """
    column = np.asarray(differences, dtype=float)[:, None]
    sums = np.abs(sign_flip_sums(column)[:, 0])
    return SignFlip(share_at_least(sums, sums[0]), 2.0 ** (1 - len(column)), len(column))


def sign_flip_sums(differences: np.ndarray) -> np.ndarray:
    """The sums of `differences` [n, k] over n under every pattern of signs: [2^(n-1), k], as observed first.

    The first sign stays plus, since the other half of the patterns are these turned over. A pattern is common to the
    k columns. Raises ValueError for n = 0, n > 20, or a missing difference.
    """
    n = len(differences)
    if not 0 < n <= MOST_SIGNS:
        raise ValueError(f"{n} differences: all signs of 1 to {MOST_SIGNS} can be tried; use paired_t_pvalue for more")
    if np.isnan(differences).any():
        raise ValueError("a difference is missing: keep the seeds for which every arm has a value")
    sums = differences[:1]
    for row in differences[1:]:
        sums = np.concatenate([sums + row, sums - row])
    return sums


def share_at_least(values: np.ndarray, observed: float) -> float:
    """The share of values that reach the observed one; those equal to it but for rounding do."""
    return float(np.mean(values >= observed - 1e-12 * np.abs(values).max()))
