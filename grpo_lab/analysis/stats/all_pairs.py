"""Which arms of a sweep are distinguishable, over all pairs at once, and what that leaves of their ranks.

With A arms and B bases, let m be the mean over an arm's seeds on one base. In the two-way model

    m = arm + base + rest,   v = sum of rest^2 / ((A - 1)(B - 1))

the rest is how arms differ from base to base, with the noise of their seeds. All arms estimate it together, so there
are 90 degrees of freedom with 31 arms on four bases, where the difference of one pair has 3. Arm i has the bar

    mean +- q / 2 * sqrt(max(v, v_i) / B)

where q is the .05 quantile of Tukey's studentized range of A means, and v_i is v from the rest of arm i alone. Two arms
are distinguishable where their bars do not overlap. With v in place of v_i this is Tukey's test exactly, and no error
in any pair in 95% of sweeps. v_i matters only where an arm scatters more than the others.

The rank of an arm lies between 1 + the number of arms significantly above it and A - the number significantly below,
for all arms at once (Al Mohamad, van Zwet and Goeman; arXiv:1708.02729 compares it with other sets). Rank 1 has the
largest value.

The model asks that all arms scatter alike. So an arm is not reported where

    some of its runs collapsed and others did not, or its runs fall into two groups (`comparison`; the caller says so),
    it lacks a base,
    its scatter is larger than the others': an F test of its rest, and one of its seeds within bases, against all
    other arms; Bonferroni over arms and both tests at .05, the least likely arm first, then again without it.

It is then neither above nor below any arm, and its rank may be any.

Other procedures, in 300 simulated sweeps of 31 arms on four bases of two seeds. Without a true difference, separate
variances (Games and Howell) err in 74%: q is not made for errors of 3 degrees. Of the pairs of arms that spread evenly
over 30 points, Holm over paired t finds 1%, Nemenyi's test 3%, and this one 42%. Benjamini and Hochberg over paired t
finds 49%, but allows false ones among them. Tukey's test alone errs in 33% where one arm scatters 6 times as much, and
in 92% where the runs of one fall into two groups. What is left: where several arms differ 6 times as much from base to
base and not from seed to seed, four bases often do not show it. Two bases of one run show next to nothing.

The tables are of 600 simulated sweeps for each number; `interval_coverage` makes them again. Bases deviate by 10
points; the effect of an arm deviates by 3 points from base to base, and a run by 3 from its base. `6 x` and `3 x`: some
arms have 6 or 3 times both deviations; `bases 6 x`: only that between bases. `one base`: they lose 30 points on one
base. `two groups`: half of their runs do. Several is 4 of 31 arms, 2 of 5 or 7.

Sweeps (%) with a false difference, by number of arms, 4 bases of 2 seeds:

                           31     7     5     3
    alike                 2.0   4.5   2.2   3.3
    one 3 x               4.0   3.7   4.3   4.5
    one 6 x               3.5   2.5   3.8   5.5
    several 6 x           3.2   2.8   4.3     -
    one, bases 6 x        7.7   7.3   6.8   5.5
    several, bases 6 x   18.2  11.3   8.7     -
    one, one base         3.2   3.3   3.5   0.2
    several, one base     3.7   1.3   0.0     -
    one, two groups       3.2   3.8   3.2   5.2
    several, two groups   2.8   3.7   2.7     -
    all, two groups       6.7   3.3   1.2   2.8

Arms (%) not reported there:

                           31     7     5     3
    alike                   2     3     3     2
    one 3 x                 5    14    16    21
    one 6 x                 5    16    21    32
    several 6 x            14    30    33     -
    one, bases 6 x          5    13    13     3
    several, bases 6 x     12    13     6     -
    one, one base           5    15    13     2
    several, one base      14     5     2     -
    one, two groups         5    16    22    32
    several, two groups    15    29    35     -
    all, two groups        54    54    54    52

Pairs (%) distinguishable of arms that spread evenly over 30 points:

             31     7     5     3
    alike    42    60    69    93

Sweeps (%) of 31 arms with a false difference, by bases x seeds:

                  2x1   2x2   3x2   4x1   4x2   4x4
    alike         2.3   4.0   3.7   2.7   2.0   2.2
    one 6 x      18.0   6.3   3.5   6.2   3.5   2.7
    several 6 x  45.3  11.3   5.2  11.8   3.2   2.8
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np
import pandas as pd
from scipy import interpolate, stats

from grpo_lab.analysis.stats.multiplicity import ALPHA, ROUNDING, p_text

FEWEST_ARMS = 3
_NODES = np.linspace(0.0, 15.0, 31)  # of the studentized range, at which its slow tail is computed
_SMALLEST = 1e-9  # p below it are numerical noise


@dataclass(frozen=True)
class Omnibus:
    """Test whether the compared arms differ at all: the F test of the two-way model, with base models as blocks.

    `sd` is the standard deviation of true effects between arms, sqrt(max(0, (MS_arm - v) / B)), and `shrunken` the
    empirical Bayes estimates: each arm's mean pulled to that of all by v / B / (v / B + sd^2).
    """

    f: float
    p: float
    degrees: tuple[int, int]
    sd: float
    shrunken: Mapping[str, float]

    @property
    def text(self) -> str:
        """`F(30, 90) = 7.5, p < 0.001, sd of true effects 0.008`."""
        numerator, denominator = self.degrees
        return f"F({numerator}, {denominator}) = {self.f:.1f}, {p_text(self.p)}, sd of true effects {self.sd:.3f}"


@dataclass(frozen=True, eq=False)
class AllPairs:
    """Every arm against every other on one metric, in its unit; arrays [A] and [A, A] are in the order of `arms`.

    `means` are over bases. `halves` are half of an arm's bar, NaN for an arm that is not reported; `not_reported` says
    why. `by_base` [B, A] are the means on single bases, less what a base adds to the mean of the compared arms, NaN
    where an arm has no run. `quantile` is q, of `freedom` degrees; NaN and 0 where fewer than two arms are compared.
    """

    arms: tuple[str, ...]
    means: np.ndarray
    halves: np.ndarray
    not_reported: Mapping[str, str]
    by_base: np.ndarray
    quantile: float
    freedom: int

    @cached_property
    def omnibus(self) -> Omnibus | None:
        """All compared arms at once; None for fewer than two."""
        compared = ~np.isnan(self.halves)
        if compared.sum() < 2:
            return None
        means, bases = self.by_base[:, compared], len(self.by_base)
        arms, own = int(compared.sum()), means.mean(axis=0)
        rest = float((_rest(means) ** 2).sum()) / self.freedom
        between = bases * float(((own - own.mean()) ** 2).sum()) / (arms - 1)
        variance = max(0.0, (between - rest) / bases)
        kept = variance / (variance + rest / bases)
        names = [arm for arm, here in zip(self.arms, compared) if here]
        shrunken = dict(zip(names, (own.mean() + kept * (own - own.mean())).tolist()))
        degrees = (arms - 1, self.freedom)
        f = between / rest
        return Omnibus(f, float(stats.f.sf(f, *degrees)), degrees, math.sqrt(variance), shrunken)

    @cached_property
    def differences(self) -> np.ndarray:
        """Row less column, [A, A]."""
        return self.means[:, None] - self.means[None, :]

    @cached_property
    def distinguishable(self) -> np.ndarray:
        """-1 or 1 where the row is significantly below or above the column, else 0, [A, A]."""
        reach = self.halves[:, None] + self.halves[None, :]
        return np.where(np.abs(self.differences) > reach, np.sign(self.differences), 0).astype(int)

    @cached_property
    def p(self) -> np.ndarray:
        """Simultaneous two-sided p of no difference, [A, A]; 1 where one of both is not reported.

        Below .05 where the arms are distinguishable. Interpolated between values of the studentized range, to 1% of p
        down to 1e-7.
        """
        found = np.ones_like(self.differences)
        compared = ~np.isnan(self.halves)
        if compared.sum() < 2:
            return found
        both = np.ix_(compared, compared)
        reach = (self.halves[:, None] + self.halves[None, :])[both]
        found[both] = _tail(int(compared.sum()), self.freedom)(self.quantile * np.abs(self.differences[both]) / reach)
        np.fill_diagonal(found, 1.0)
        return found

    def ranks(self, arm: str) -> tuple[int, int]:
        """The best and the worst rank that the arm can have."""
        own = self.distinguishable[self.arms.index(arm)]
        return 1 + int((own < 0).sum()), len(self.arms) - int((own > 0).sum())

    @property
    def number_distinguishable(self) -> int:
        """The number of distinguishable pairs."""
        return int((self.distinguishable > 0).sum())

    @property
    def pairs(self) -> int:
        """The number of pairs."""
        return math.comb(len(self.arms), 2)


def compare_all_pairs(
    values: pd.DataFrame, bases: Mapping[int, int], not_reported: Mapping[str, str] | None = None
) -> AllPairs:
    """Compare all arms: `values` has a row per seed and a column per arm, NaN where there is no run.

    `bases` maps a seed to its base; a base counts once, however many seeds it has. `not_reported` maps arms to leave
    out to the reason. Raises ValueError for fewer than two bases.
    """
    of_base = pd.Series([bases[int(str(seed))] for seed in values.index], index=values.index)
    if of_base.nunique() < 2:
        raise ValueError("all runs are of one base: arms are distinguished by how they differ from base to base")
    arms = tuple(map(str, values.columns))
    by_base = values.groupby(of_base).mean()
    reasons = {arm: why for arm, why in (not_reported or {}).items() if arm in values}
    for arm in arms:
        lacking = [str(base) for base in by_base.index[by_base[arm].isna()]]
        if lacking:
            reasons.setdefault(arm, f"no run on base {', '.join(lacking)}")
    runs = values.to_numpy(float)
    within = (runs - by_base.loc[of_base].to_numpy(float)) ** 2
    free = np.where(np.isnan(runs), 0, 1).sum(axis=0) - by_base.notna().sum().to_numpy()
    compared = [index for index, arm in enumerate(arms) if arm not in reasons]
    means = by_base.to_numpy(float)
    while len(compared) >= FEWEST_ARMS:
        squares = (_rest(means[:, compared]) ** 2).sum(axis=0) * len(compared) / (len(compared) - 1)
        kinds = [
            ("between bases", squares, np.full(len(compared), len(means) - 1)),
            ("between seeds", np.nansum(within[:, compared], axis=0), free[compared]),
        ]
        p, worst, what = min(_most_unlike(*kind) for kind in kinds)
        if p * 2 * len(compared) >= ALPHA:
            break
        reasons[arms[compared.pop(worst)]] = f"scatters more than the others {what}"
    halves = np.full(len(arms), np.nan)
    shift = np.zeros((len(means), 1))
    quantile, freedom = math.nan, 0
    if len(compared) >= 2:
        own = _rest(means[:, compared])
        shift = means[:, compared].mean(axis=1, keepdims=True) - means[:, compared].mean()
        freedom = (len(compared) - 1) * (len(means) - 1)
        pooled = float((own**2).sum()) / freedom
        alone = (own**2).sum(axis=0) * len(compared) / (len(compared) - 1) / (len(means) - 1)
        if pooled > (ROUNDING * float(np.abs(means[:, compared]).max())) ** 2:
            quantile = _quantile(len(compared), freedom)
            halves[compared] = quantile / 2 * np.sqrt(np.maximum(pooled, alone) / len(means))
        else:  # as coarse values are by chance
            reasons |= {arms[index]: "no scatter between bases" for index in compared}
            freedom = 0
    if len(compared) == 1:
        reasons[arms[compared[0]]] = "no other arm is compared"
    ordered = {arm: reasons[arm] for arm in arms if arm in reasons}
    return AllPairs(arms, np.nanmean(means, axis=0), halves, ordered, means - shift, quantile, freedom)


def _rest(means: np.ndarray) -> np.ndarray:
    """What the two-way model leaves of means [B, A]."""
    return means - means.mean(axis=0) - means.mean(axis=1, keepdims=True) + means.mean()


def _most_unlike(what: str, squares: np.ndarray, free: np.ndarray) -> tuple[float, int, str]:
    """p of the arm that scatters most against all others, its place, and `what`; sums of squares and degrees [A]."""
    others, rest = free.sum() - free, squares.sum() - squares
    known = (free > 0) & (others > 0) & (rest > 0)
    ratio = np.full(len(squares), 0.0)
    ratio[known] = (squares[known] / free[known]) / (rest[known] / others[known])
    p = np.where(known, stats.f.sf(ratio, np.maximum(free, 1), np.maximum(others, 1)), 1.0)
    worst = int(np.argmin(p))
    return float(p[worst]), worst, what


@cache
def _quantile(arms: int, freedom: int) -> float:
    return float(stats.studentized_range.isf(ALPHA, arms, freedom))


@cache
def _tail(arms: int, freedom: int) -> Callable[[np.ndarray], np.ndarray]:
    """The tail of the studentized range, which takes a fiftieth of a second for each value."""
    tail = np.maximum(stats.studentized_range.sf(_NODES, arms, freedom), _SMALLEST)
    logarithm = interpolate.PchipInterpolator(_NODES, np.log(tail))
    return lambda q: np.exp(logarithm(np.minimum(q, _NODES[-1])))
