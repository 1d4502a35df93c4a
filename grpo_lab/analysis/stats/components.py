"""How far base models and seeds differ, and which effect a design of given base models and seeds can find."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE, Interval
from grpo_lab.analysis.table_rows import groups_of

DRAWS = 10_000  # of what the deviations may be, behind an interval


def components(values: pd.DataFrame) -> tuple[Interval, Interval]:
    """The standard deviations between base models and between seeds of one, from columns base, seed and value.

    One-way analysis of variance, with the harmonic mean of the seeds per base model where base models have unequal
    numbers. Between seeds the interval is chi-square's, between base models that of Williams and Tukey. What seeds
    alone explain is 0 between base models. n counts the runs. Raises ValueError for fewer than two base models, or no
    base with two seeds.
    """
    by_base = [group["value"].to_numpy(float) for _, group in groups_of(values, "base")]
    bases, runs = len(by_base), sum(map(len, by_base))
    if bases < 2 or runs == bases:
        raise ValueError(
            f"{runs} runs on {bases} base models: give two base models or more, and two seeds on some base"
        )
    freedom, within_freedom = bases - 1, runs - bases
    within = sum(float(((own - own.mean()) ** 2).sum()) for own in by_base)
    seeds = bases / sum(1 / len(own) for own in by_base)
    between = seeds * float(np.var([own.mean() for own in by_base])) * bases
    mean_between, mean_within = between / freedom, within / within_freedom
    tail = (1 - CONFIDENCE) / 2
    low, high = (mean_within * within_freedom / stats.chi2.isf(share, within_freedom) for share in (tail, 1 - tail))
    of_seeds = Interval(math.sqrt(mean_within), math.sqrt(low), math.sqrt(high), runs, bases)
    ends = []
    for share in (tail, 1 - tail):
        beyond = between - mean_within * freedom * stats.f.isf(share, freedom, within_freedom)
        ends.append(math.sqrt(max(0.0, beyond / (seeds * stats.chi2.isf(share, freedom)))))
    middle = math.sqrt(max(0.0, (mean_between - mean_within) / seeds))
    return Interval(middle, ends[0], ends[1], runs, bases), of_seeds


@dataclass(frozen=True)
class Scatter:
    """How far paired differences deviate between base models and between seeds of one, and how well that is known.

    `between` is the mean square of base means times the `seeds` that each has (the harmonic mean), `within` the mean
    square of seeds about their base's mean, each with its degrees of freedom. With one base model `between` is NaN.
    With one seed a base `within` is NaN: what seeds add is then in `between`, and more seeds are not assumed to help.
    """

    between: float
    between_freedom: float
    within: float
    within_freedom: float
    seeds: float

    @property
    def of_bases(self) -> float:
        """The standard deviation of effects between base models; NaN with one base model."""
        if math.isnan(self.within):
            return math.sqrt(self.between)
        return math.sqrt(max(0.0, self.between - self.within) / self.seeds)

    @property
    def of_seeds(self) -> float:
        """The standard deviation between seeds of one base model; NaN where each base model has one."""
        return math.sqrt(self.within)

    def of_mean(self, seeds: int) -> Interval:
        """The deviation of one observation of the t test: a base model's mean over `seeds` seeds, or with one a seed.

        The interval is by the fiducial distribution of both variances: a mean square m with f degrees stands for
        variances m f / chi2(f). n is the degrees of freedom between observations, rounded.
        """
        rng = np.random.default_rng(0)
        squares = []
        for mean, freedom in ((self.between, self.between_freedom), (self.within, self.within_freedom)):
            drawn = mean * freedom / rng.chisquare(freedom, DRAWS) if freedom else np.full(DRAWS, math.nan)
            squares.append(np.append(mean, drawn))  # the first is the estimate
        between, within = squares
        if math.isnan(self.between):
            variances, freedom = within, self.within_freedom
        elif math.isnan(self.within):
            variances, freedom = between, self.between_freedom
        else:
            variances, freedom = np.maximum(0, between - within) / self.seeds + within / seeds, self.between_freedom
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(np.sqrt(variances[1:]), (tail, 1 - tail))
        return Interval(math.sqrt(variances[0]), float(low), float(high), round(freedom))


def pooled_scatter(differences: pd.DataFrame, bases: Mapping[int, int]) -> Scatter:
    """The scatter that contrasts share: a column of `differences` each, a row for each seed, NaN where one has none.

    `bases` maps a seed to its base; empty for one base model. Contrasts with the same control are not independent, so k
    of them with the mean squared correlation r2 count as k / (1 + (k - 1) r2) times one. Raises ValueError where no
    contrast has two observations.
    """
    of = pd.Series([bases.get(int(seed), -1) for seed in differences.index], index=differences.index)
    means = differences.groupby(of).mean()
    rest = differences - means.loc[of].set_index(differences.index)
    numbers = differences.groupby(of).count()
    between, within, seeds, free_between, free_within = 0.0, 0.0, [], 0, 0
    for name in differences:
        own = numbers[name][numbers[name] > 0]
        if len(own) == 0:
            continue
        harmonic = len(own) / float((1 / own).sum())
        seeds.append(harmonic)
        between += harmonic * float(((means[name] - means[name].mean()) ** 2).sum())
        within += float((rest[name] ** 2).sum())
        free_between += len(own) - 1
        free_within += int(own.sum()) - len(own)
    if not free_between and not free_within:
        raise ValueError(
            "no contrast has two paired differences, so nothing says how far they deviate: run a pilot with more seeds"
        )
    return Scatter(
        between / free_between if free_between else math.nan,
        _as_one(means, free_between),
        within / free_within if free_within else math.nan,
        _as_one(rest, free_within),
        float(np.mean(seeds)),
    )


def _as_one(values: pd.DataFrame, freedom: int) -> float:
    """Degrees of freedom, summed over the columns, as those of independent ones."""
    known = values.loc[:, values.notna().any()]
    columns = known.shape[1]
    if columns < 2 or not freedom:
        return float(freedom)
    squared = known.corr().to_numpy() ** 2
    others = squared[~np.eye(columns, dtype=bool)]
    shared = float(np.nan_to_num(others, nan=1.0).mean())  # what is not known counts as the same number again
    return freedom / (1 + (columns - 1) * shared)
