"""Statistics of runs over base models and seeds: differences, equivalence and risk, with collapses kept apart.

A sweep trains every arm from several base models and with several seeds on each. A claim is about a new base model,
so a base model is one observation: the mean over its seeds. With b base models of s seeds each and a random effect of
the base model,

    value = mu + base + seed,   interval = mean of base means +- t(b - 1) * sd(base means) / sqrt(b)

is exact for normal effects whatever the two variances are. Where pairs are missing, base models still weigh alike: the
means of fewer seeds scatter more, and the interval stays near its nominal coverage. With one base model the seeds are
the observations, and the interval is about other seeds of that base model. With two base models, or two seeds of one,
there is none, and nothing is judged.

A run that collapsed (`FinalValues` says which) is no draw from the same bell as the others. Where some pairs hold one
and others do not, the mean over all gets no interval. The mean over the pairs without a collapse has one, which is
about runs that do not collapse; how often they do is a quantity of its own (`collapse`). Where all pairs are alike
(none collapsed, or every one in the same arms) the interval is about pairs like these.

`analysis/interval_coverage` simulates all of it; its tables, and how to make them again, stand there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from scipy import special

from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, critical_t
from grpo_lab.analysis.stats.multiplicity import ROUNDING, paired_t_pvalue

FEWEST_BASES = FOR_INTERVAL  # for an interval about a new base model
HARM = 0.02  # of an accuracy or a reward: losing more than this in a new base model is harm
APART, TIMES = 0.1, 4  # two groups lie this far apart, and this many standard deviations within groups
CHANCE = 0.98  # of two normal runs of a base to lie nearer than what makes them groups
FEWEST_RUNS = 4  # in which two groups can be told from one


@dataclass(frozen=True)
class Comparison:
    """Values of runs, or differences of pairs of runs, of these seeds.

    `whole` is over all of them, `alive` over those without a collapse; they are equal where none collapsed. An interval
    that is not reported has no bounds; its `why` is the reason. `observed` are the independent values that `whole`
    rests on, one per base model (or per seed, with one); `mixed` says that some pairs have a collapse that others do
    not have.

    `p` is two-sided, of no effect at all: of `whole`, and 1 where `whole` has no interval. Where pairs are
    mixed it is twice the smaller one of all pairs and of `alive`. There it holds no statement about the mean, since an
    arm that collapses has no symmetric distribution.
    """

    seeds: tuple[int, ...]
    whole: Interval
    alive: Interval
    observed: tuple[float, ...]
    mixed: bool
    p: float

    @property
    def sign(self) -> int:
        """-1, 0 or 1: the side of 0 on which the means over all pairs and over those without a collapse agree."""
        signs = {int(np.sign(one.mean)) for one in (self.whole, self.alive) if one.n}
        return signs.pop() if len(signs) == 1 else 0

    def within(self, margin: float | int) -> float:
        """p of two one-sided t tests (TOST): that the effect is as large as the margin or larger, on either side.

        Below .05 exactly where the 90% interval lies inside +-margin. 1 where the interval is not reported, NaN for
        fewer than two values.
        """
        return self._one_sided(margin, inside=True)

    def beyond(self, margin: float | int) -> float:
        """Two-sided p of an effect no larger than the margin; 1 where the interval is not reported."""
        p = self._one_sided(margin, inside=False)
        return min(1.0, 2 * p) if not math.isnan(p) else p

    def _one_sided(self, margin: float | int, inside: bool) -> float:
        """p that the effect lies on the other side of the margin than where it is looked for."""
        n = len(self.observed)
        if n < 2:
            return math.nan
        if math.isnan(self.whole.low):
            return 1.0
        distance = margin - abs(float(np.mean(self.observed)))
        far = distance if inside else -distance
        error = float(np.std(self.observed, ddof=1)) / math.sqrt(n)
        if error <= ROUNDING * abs(float(np.mean(self.observed))):  # no scatter, by chance: the p of n signs
            return 2.0**-n if far > 0 else 1.0
        return float(special.stdtr(n - 1, -far / error))

    def harm(self, points: float | int = HARM) -> float:
        """The chance that the same comparison on a new base model (or seed) comes out more than `points` below 0.

        Measured with as many seeds: the scatter of seeds is in it.

        By the predictive distribution of one more observation x, (x - mean) / (sd sqrt(1 + 1/n)) ~ t(n - 1). NaN where
        the interval is not reported: what a collapse costs is counted, not averaged.
        """
        n = len(self.observed)
        if n < 2 or math.isnan(self.whole.low):
            return math.nan
        mean, spread = float(np.mean(self.observed)), float(np.std(self.observed, ddof=1))
        if spread == 0:
            return float(mean < -points)
        return float(special.stdtr(n - 1, (-points - mean) / (spread * math.sqrt(1 + 1 / n))))


def compare(
    values: pd.Series | Mapping[int, float],
    bases: Mapping[int, int] | None = None,
    collapsed: Mapping[int, tuple[bool, ...]] | None = None,
    grouped: bool = True,
) -> Comparison:
    """Compare by seed: `bases` maps a seed to its base (empty for one base model).

    `collapsed` maps a seed to what collapsed of its pair, such as (True, False); seeds that it lacks have no collapse.
    `grouped=False` does not look for two groups, for numbers that are no accuracies.
    """
    own = {int(seed): float(value) for seed, value in dict(values).items()}
    status = {seed: (collapsed or {}).get(seed, ()) for seed in own}
    fallen = {seed for seed, kind in status.items() if any(kind)}
    mixed = len({status[seed] if seed in fallen else () for seed in own}) > 1
    whole, observed = _over_bases(own, bases or {})
    left = {seed: value for seed, value in own.items() if seed not in fallen}
    alive, seen = _over_bases(left, bases or {}) if fallen else (whole, observed)
    if grouped:
        whole, alive = (_without_bounds(one, two_groups(of, bases)) for one, of in ((whole, own), (alive, left)))
    p = _pvalue(whole, observed)
    if mixed:
        parts = [one for one in (_pvalue(None, observed), _pvalue(alive, seen)) if not math.isnan(one)]
        p = min(1.0, 2 * min(parts)) if parts else math.nan
        whole = _without_bounds(whole, f"collapsed runs in {len(fallen)} of {len(own)}")
    return Comparison(tuple(sorted(own)), whole, alive, observed, mixed, p)


def mean_of_runs(values: Sequence[float], bases: Sequence[int]) -> Interval:
    """The mean of one number per run, for a new base model where these are of several; NaN values are left out.

    `bases` holds the base of each value. For numbers that are no accuracies, so groups of runs are not looked for.
    """
    known = {run: float(value) for run, value in enumerate(values) if not math.isnan(value)}
    return compare(known, dict(enumerate(bases)), grouped=False).whole


def _pvalue(interval: Interval | None, observed: Sequence[float]) -> float:
    """Of no effect; 1 where these values are too few for an interval, or have none, so that no word rests on it."""
    p = paired_t_pvalue(observed)
    none = len(observed) < FOR_INTERVAL or (interval is not None and bool(interval.why))
    return 1.0 if none and not math.isnan(p) else p


def _without_bounds(interval: Interval, why: str) -> Interval:
    """Without its bounds where there is a reason."""
    if not why:
        return interval
    return replace(interval, low=math.nan, high=math.nan, why=why)


def _over_bases(values: Mapping[int, float], bases: Mapping[int, int]) -> tuple[Interval, tuple[float, ...]]:
    """The mean of base means, and those; with one base model the mean of the seeds' values."""
    means = base_means(values, bases)
    if len(means) < 2:
        observed, number, why = tuple(values.values()), 0, ""
    else:
        number = len(means)
        observed = tuple(means)
        why = "" if number >= FEWEST_BASES else f"{number} base models: an interval needs {FEWEST_BASES}"
    n = len(observed)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0), ()
    mean = float(np.mean(observed))
    if n < FOR_INTERVAL:
        points = tuple(values.values()) if len(values) < FOR_INTERVAL else ()
        return Interval(mean, math.nan, math.nan, len(values), number, why, points), observed
    half = critical_t(n - 1) * float(np.std(observed, ddof=1)) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, len(values), number), observed


def base_means(values: Mapping[int, float], bases: Mapping[int, int]) -> list[float]:
    """The mean over the seeds of each base model, in the order of the base models; seeds without one share one."""
    by_base: dict[int, list[float]] = {}
    for seed, value in values.items():
        by_base.setdefault(bases.get(seed, -1), []).append(value)
    return [float(np.mean(by_base[base])) for base in sorted(by_base)]


def two_groups(values: Mapping[int, float], bases: Mapping[int, int] | None = None) -> str:
    """How runs fall into two groups, in words; empty where they do not, or are too few to tell.

    Sorted values are divided at their largest gap. They are two groups where the gap is more than 10 points of accuracy
    and more than 4 times the standard deviation within the groups. With fewer than four values there is no telling.

    With two runs or more on every base model, a gap between whole base models is not one between runs: the interval
    over base models has it. There the runs of each base model are divided too, at a gap of more than 10 points, and the
    largest gap must be one that two normal runs have in fewer than 1 of 50 pairs, by t and the deviation within all the
    parts. With one run a base, a base that lies apart is not told from a run that does.
    """
    if len(values) < FEWEST_RUNS:
        return ""
    of_base: dict[int, list[float]] = {}
    for seed, value in values.items():
        of_base.setdefault((bases or {}).get(seed, -1), []).append(value)
    low, high, gap = _divided(values.values())
    apart = APART < gap < math.inf and gap > TIMES * _deviation([low, high])
    nested = len(of_base) > 1 and min(map(len, of_base.values())) > 1
    if apart and (not nested or any(min(own) < high[0] <= max(own) for own in of_base.values())):
        what = "bases" if len(of_base) == len(values) else "runs"
        return f"two groups of {what}, {len(low)} and {len(high)}, {gap:.2f} apart"
    if not nested:
        return ""
    divided = [(own, *_divided(own)) for own in of_base.values()]
    gap = max(within for *_, within in divided)
    parts = [part for own, *two, within in divided for part in (two if within > APART else [own])]
    free = len(values) - len(parts)
    if free < 2 or not APART < gap < math.inf:
        return ""
    by_chance = math.sqrt(2) * critical_t(free, CHANCE) * _deviation(parts)
    return f"two groups of runs within a base, {gap:.2f} apart" if gap > by_chance else ""


def _divided(values: Iterable[float]) -> tuple[list[float], list[float], float]:
    """Two or more values below and above their largest gap, in order, and that gap."""
    ordered = sorted(values)
    gaps = np.diff(ordered)
    at = int(np.argmax(gaps)) + 1
    return ordered[:at], ordered[at:], float(gaps[at - 1])


def _deviation(parts: Sequence[Sequence[float]]) -> float:
    """The standard deviation of values within their parts."""
    squares = sum(float(np.var(part)) * len(part) for part in parts)
    return math.sqrt(squares / (sum(map(len, parts)) - len(parts)))
