"""Sigmoids of a whole sweep: asymptote, midpoint and exponent of every arm, or why they cannot be had.

Every seed is fitted on its own, and the interval of A (and of ln C_mid and B) is Student's t over seeds. With fewer
than three seeds it is the profile of the one curve, or of the mean of two (sigmoid.py), and says nothing of others. The
asymptote is called identified only where its interval stays below 1 and clear of the start, the largest compute is at
least twice the midpoint, and no fit ended at the edge of the search. A curve that falls at its end is not fitted.

Each number of the table is of 600 simulated arms with noise as in sigmoid.py, the same truth in every seed, and 3 / 5
seeds. "Covers" is how often the interval holds A, "width" its mean width with white noise, "silent" how often A is not
identified:

    evaluations  C_max / C_mid  covers, white  covers, AR(1) .7  width         silent, white  silent, AR(1) .7
    40           0.5            .84 / .92      .83 / .92         1.14 / .63    1.00 / 1.00    1.00 / 1.00
    40           1              .95 / .95      .93 / .92         .56 / .31     1.00 / 1.00    1.00 / 1.00
    40           2              .95 / .96      .94 / .95         .11 / .060    .58 / .58      .56 / .60
    40           5              .96 / .94      .96 / .95         .030 / .016   .00 / .00      .01 / .01
    10           0.5            .81 / .93      .79 / .92         1.23 / .67    1.00 / 1.00    1.00 / 1.00
    10           1              .92 / .93      .92 / .92         .81 / .43     1.00 / 1.00    1.00 / 1.00
    10           2              .96 / .96      .95 / .94         .25 / .13     .62 / .61      .55 / .64
    10           5              .95 / .95      .95 / .95         .058 / .032   .00 / .00      .00 / .00

Of the arms at 2 C_mid that are called identified 89% to 95% are covered. There R_0 was exact. With noise of sd .02 /
.04 in every seed's own, twice and four times that of an evaluation (300 arms), the intervals cover 94% to 97% / 92% to
96%, but of arms at 2 C_mid called identified 83% to 94% / 73% to 86%: budgets of a few C_mid are what A asks for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.intervals import FOR_INTERVAL, Interval, t_interval
from grpo_lab.analysis.stats.mean_line import mean_line
from grpo_lab.analysis.stats.sigmoid import (
    CurveFit,
    area,
    compute_to_reach,
    extrapolate,
    fit_curve,
    last_slope,
    refusal,
)
from grpo_lab.analysis.table_rows import groups_of

SEEDS = 3  # from which on the interval is over seeds
SHARE = 0.9  # of the control's gain: the level whose compute is reported
MARGIN = 0.02  # by which ScaleRL's repeats of one arm differ in A
NONE = Interval(math.nan, math.nan, math.nan, 0)
OVER_SEEDS, OF_CURVE = "t over seeds", "profile of one curve"

Curve = tuple[np.ndarray, np.ndarray]  # compute, ascending and with the start at 0, and accuracy


@dataclass(frozen=True)
class ConditionFit:
    """The sigmoid of one arm at one level.

    `curves` holds every run's evaluations by seed, `start` the mean of their starts. `fits` holds one sigmoid per seed;
    with fewer than three seeds, one sigmoid of their mean under None. It is empty where `refused` gives a reason.
    `span` holds the two computes between which the area is taken. `target` is the accuracy whose compute is reported,
    NaN for none. `collapsed` counts the arm's collapsed runs, which have no curve. Where there are any, nothing is
    estimated, since the others alone would be a selection.
    """

    level: str
    arm: str
    start: float
    curves: Mapping[int, Curve]
    fits: Mapping[int | None, CurveFit]
    refused: str
    span: tuple[float, float]
    target: float
    collapsed: int

    @property
    def kind(self) -> str:
        """The method of the intervals; empty without a fit."""
        return "" if not self.fits else OF_CURVE if None in self.fits else OVER_SEEDS

    @property
    def evaluations(self) -> int:
        """The number of evaluations after the start, of the run that has fewest."""
        return min(int((compute > 0).sum()) for compute, _ in self.curves.values())

    @property
    def largest(self) -> float:
        """The largest compute that every seed reached."""
        return min(float(compute[-1]) for compute, _ in self.curves.values())

    @cached_property
    def asymptote(self) -> Interval:
        """A; `n` counts seeds, or evaluations where the interval is a profile, here and in the next two."""
        if self.kind == OF_CURVE:
            return self.fits[None].profile.asymptote
        return t_interval([fit.sigmoid.asymptote for fit in self.fits.values()])

    @cached_property
    def midpoint(self) -> Interval:
        """C_mid, in the axis's unit: the interval is of ln C_mid."""
        if self.kind == OF_CURVE:
            return self.fits[None].profile.midpoint
        return _geometric([fit.sigmoid.midpoint for fit in self.fits.values()])

    @cached_property
    def exponent(self) -> Interval:
        """B."""
        if self.kind == OF_CURVE:
            return self.fits[None].profile.exponent
        return t_interval([fit.sigmoid.exponent for fit in self.fits.values()])

    @property
    def unbounded(self) -> bool:
        """True if the interval of A reaches 1, the largest accuracy there is."""
        return bool(self.fits) and self.asymptote.high >= 1

    @cached_property
    def reasons(self) -> tuple[str, ...]:
        """Why the asymptote is not identified, in words; empty where it is."""
        if self.refused:
            return (self.refused,)
        reasons = ["the interval of A reaches 1"] if self.unbounded else []
        if self.asymptote.low <= self.start <= self.asymptote.high:
            reasons.append("the interval of A holds the start")
        ratio = self.largest / self.midpoint.mean
        if ratio < 2:
            reasons.append(f"the budget ends at {ratio:.2g} C_mid, before 2 C_mid")
        edges = Counter(words for fit in self.fits.values() for words in fit.edges)
        reasons += [f"{words}{_of(number, len(self.fits))}" for words, number in edges.items()]
        return tuple(reasons)

    @property
    def identified(self) -> bool:
        """True if the asymptote can be read off these runs."""
        return not self.reasons

    @cached_property
    def extrapolation(self) -> tuple[Interval, float, float]:
        """How well fits to the first half of the compute predict the second, over seeds.

        Mean error (observed less predicted) with its t interval, mean absolute error, and the share of evaluations
        within the profile bands; NaN (n = 0) where a seed has too few evaluations in the first half.
        """
        if self.refused:
            return NONE, math.nan, math.nan
        tried = [extrapolate(*curve, float(curve[1][0])) for curve in self.curves.values()]
        checks = [check for check in tried if check is not None]
        if len(checks) < len(tried):
            return NONE, math.nan, math.nan
        absolute = float(np.mean([np.abs(check.error).mean() for check in checks]))
        inside = float(np.mean([check.inside.mean() for check in checks]))
        return t_interval([float(check.error.mean()) for check in checks]), absolute, inside

    @cached_property
    def area(self) -> Interval:
        """Mean accuracy over ln compute within `span`; it needs no sigmoid."""
        areas = [area(*curve, *self.span) for curve in self.curves.values()]
        return NONE if self.collapsed or np.isnan(areas).any() else t_interval(areas)

    @cached_property
    def reached(self) -> list[float]:
        """The compute at which each seed that reaches `target` does so; it needs no sigmoid."""
        found = [compute_to_reach(*curve, self.target) for curve in self.curves.values()]
        return [compute for compute in found if compute is not None]

    @property
    def reach(self) -> Interval:
        """Geometric mean of the compute to reach `target`; n = 0 unless every run reaches it."""
        return NONE if len(self.reached) < len(self.curves) + self.collapsed else _geometric(self.reached)

    def text(self) -> str:
        """One sentence on the asymptote."""
        if self.refused:
            return f"no fit: {self.refused}"
        found = f"A = {self.asymptote.text()} ({self.kind})"
        return found if self.identified else f"asymptote not identified: {'; '.join(self.reasons)}; {found}"


def _of(number: int, seeds: int) -> str:
    return "" if number == seeds else f" ({number} of {seeds} seeds)"


def _geometric(values: Sequence[float]) -> Interval:
    mean = t_interval([math.log(value) for value in values])
    points = tuple(map(math.exp, mean.points))
    return Interval(math.exp(mean.mean), math.exp(mean.low), math.exp(mean.high), mean.n, points=points)


def fit_condition(
    level: str,
    arm: str,
    curves: Mapping[int, Curve],
    first: float = 0.0,
    span: tuple[float, float] = (math.nan, math.nan),
    target: float = math.nan,
    collapsed: int = 0,
    spent_before: bool = False,
) -> ConditionFit:
    """Fit the runs of one arm (seed -> compute and accuracy, the start at compute 0 included).

    R_0 of a run is its own evaluation before training, though all runs evaluate the same model there. The noise of one
    shared R_0 would be in every A alike, and the interval over seeds would miss it. Only the fits leave out points
    below the compute `first`. Where `spent_before`, step 0 came after compute was spent, as in fine-tuning on sampled
    answers, and there is no fit. Raises ValueError where a run was not evaluated before training.
    """
    if not spent_before and not all(compute[0] == 0 for compute, _ in curves.values()):
        raise ValueError(
            f"a run of {arm!r} has no evaluation at step 0, which is R_0: evaluate the model it starts from"
        )
    start = float(np.mean([accuracy[0] for _, accuracy in curves.values()]))
    fitted: dict[int | None, Curve] = {**curves} if len(curves) >= SEEDS else {None: _mean_curve(list(curves.values()))}
    late = "step 0 comes after fine-tuning, which spent some of the budget" if spent_before else ""
    fell = f"{collapsed} of {len(curves) + collapsed} runs collapsed" if collapsed else ""
    refused = late or fell or _refused(fitted, first)
    fits = (
        {}
        if refused
        else {seed: fit_curve(*curve, float(curve[1][0]), first, of=len(fitted)) for seed, curve in fitted.items()}
    )
    return ConditionFit(level, arm, start, dict(curves), fits, refused, span, target, collapsed)


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    if len(curves) == 1:
        return curves[0]
    line = mean_line(curves, math.inf, evaluations=True)
    return np.array([at for at, _ in line]), np.array([mean.mean for _, mean in line])


def _refused(curves: Mapping[int | None, Curve], first: float) -> str:
    """Why there is no sigmoid for these; one seed's reason is the arm's, as leaving it out would be selection."""
    found = Counter(filter(None, (refusal(*curve, first, of=len(curves)) for curve in curves.values())))
    if found:
        return "; ".join(f"{words}{_of(number, len(curves))}" for words, number in found.items())
    if len(curves) < SEEDS:
        return ""
    used = [(compute >= first) & (compute > 0) for compute, _ in curves.values()]
    slopes = t_interval([last_slope(x[on], y[on]) for (x, y), on in zip(curves.values(), used)])
    return "the curve falls at its end, over seeds" if slopes.high < 0 else ""


def fit_sweep(
    data: SweepData,
    finals: FinalValues,
    suite: str = "heldout",
    target: float | None = None,
    first: float = 0.0,
    only: Sequence[tuple[str, str]] = (),
) -> list[ConditionFit]:
    """Fit `eval/<suite>/accuracy` over the budget for every (level, arm) whose finished runs have it.

    The area of a level is taken from the latest first evaluation of its runs to the earliest last one. The default
    `target` is the start plus 90% of the control's gain by X. Only the fits leave out points below the compute `first`.
    With `only`, these (level, arm) are fitted and no others.
    Raises ValueError where a run was not evaluated before training.
    """
    points = data.finished_points
    selected = [labels for labels in data.run_arms if not only or labels in only]
    conditions = {labels: _curves(points, *labels, suite, finals.axis) for labels in selected}
    conditions = {labels: curves for labels, curves in conditions.items() if curves}
    fitted = []
    for (level, arm), curves in conditions.items():
        runs = [curve for (other, _), seeds in conditions.items() if other == level for curve in seeds.values()]
        span = _span([compute for compute, _ in runs])
        aim = _target(conditions.get((level, data.control), {}), finals.budget) if target is None else target
        begun = points[(points["level"] == level) & (points["arm"] == arm) & (points["step"] == 0)]
        late = bool((begun[f"budget/{finals.axis}"] > 0).any())
        fitted.append(fit_condition(level, arm, curves, first, span, aim, data.collapsed(level, arm), late))
    return fitted


def _curves(points: pd.DataFrame, level: str, arm: str, suite: str, axis: str) -> dict[int, Curve]:
    metric, x = f"eval/{suite}/accuracy", f"budget/{axis}"
    if metric not in points:
        return {}
    here = points[(points["level"] == level) & (points["arm"] == arm) & points[metric].notna()].sort_values(x)
    return {int(seed): (run[x].to_numpy(), run[metric].to_numpy()) for seed, run in groups_of(here, "seed")}


def _span(computes: Sequence[np.ndarray]) -> tuple[float, float]:
    after = [compute[compute > 0] for compute in computes]
    if not all(map(len, after)):
        return math.nan, math.nan
    return float(max(compute[0] for compute in after)), float(min(compute[-1] for compute in after))


def _target(control: Mapping[int, Curve], budget: float) -> float:
    """Start plus 90% of the gain of these curves by `budget`; NaN where there are none or they gain nothing."""
    gains = [(accuracy[0], np.interp(budget, compute, accuracy)) for compute, accuracy in control.values()]
    start, final = np.mean(gains, axis=0) if gains else (math.nan, math.nan)
    return float(start + SHARE * (final - start)) if final > start else math.nan


def scaling_table(conditions: Sequence[ConditionFit]) -> pd.DataFrame:
    """One row per arm: counts, A, C_mid and B, `identified` with `reasons`, extrapolation, area, compute to reach.

    Columns that end in `_low` and `_high` are 95% intervals: of the three parameters by the method in `kind`, of all
    others t over seeds.
    """
    rows = []
    for condition in conditions:
        row = {
            "level": condition.level,
            "arm": condition.arm,
            "n": len(condition.curves),
            "n_collapsed": condition.collapsed,
        }
        row["evaluations"] = condition.evaluations
        row |= {"identified": condition.identified, "reasons": "; ".join(condition.reasons), "kind": condition.kind}
        error, absolute, inside = condition.extrapolation
        intervals = {"asymptote": condition.asymptote, "midpoint": condition.midpoint, "exponent": condition.exponent}
        intervals |= {"extrapolation_error": error, "area": condition.area, "reach": condition.reach}
        for name, interval in intervals.items():
            row |= {name: interval.mean, f"{name}_low": interval.low, f"{name}_high": interval.high}
        row |= {"extrapolation_absolute": absolute, "extrapolation_inside": inside}
        rows.append(row | {"target": condition.target, "reached": len(condition.reached)})
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class FitComparison:
    """Two arms as ScaleRL compares them: A first, and B only where A agrees.

    `asymptote` and `exponent` are differences (arm less control) paired by seed. For the exponents both arms are fitted
    again with one common A, `shared`. Where the As differ, or `reason` forbids a comparison, `shared` is NaN and
    `exponent` is empty.
    """

    level: str
    arm: str
    control: str
    asymptote: Interval
    shared: float
    exponent: Interval
    reason: str

    def text(self) -> str:
        """One sentence."""
        if self.reason:
            return f"{self.arm} and {self.control} cannot be compared: {self.reason}"
        apart = f"A of {self.arm} less that of {self.control}: {self.asymptote.text('+')}"
        if self.exponent.n == 0:
            return f"{apart}, they differ; B is not compared"
        within = self.asymptote.low >= -MARGIN and self.asymptote.high <= MARGIN
        how = (
            f"they agree to {MARGIN}"
            if within
            else f"not distinguishable, but not within {MARGIN} of each other either"
        )
        caution = "" if within else "; a difference of A too small to be seen here would show in B, too"
        differ = f"with A = {self.shared:.3f} for both, B differs by {self.exponent.text('+')}"
        return f"{apart}, {how}; {differ}{caution}"


def compare(condition: ConditionFit, control: ConditionFit) -> FitComparison:
    """Compare two arms of one level, paired by seed. As agree where the interval of their difference contains 0."""
    labels = (condition.level, condition.arm, control.arm)
    for one in (condition, control):
        if not one.identified:
            return FitComparison(*labels, NONE, math.nan, NONE, f"{one.arm}: {'; '.join(one.reasons)}")
    pairs = [seed for seed in condition.fits if seed is not None and seed in control.fits]
    if len(pairs) < FOR_INTERVAL:
        few = f"they share {len(pairs)} fitted seeds, {FOR_INTERVAL} are needed"
        return FitComparison(*labels, NONE, math.nan, NONE, few)
    apart = t_interval(
        [condition.fits[seed].sigmoid.asymptote - control.fits[seed].sigmoid.asymptote for seed in pairs]
    )
    if not apart.low <= 0 <= apart.high:
        return FitComparison(*labels, apart, math.nan, NONE, "")
    shared = (condition.asymptote.mean + control.asymptote.mean) / 2
    exponents = [[_refit(one, seed, shared).sigmoid.exponent for seed in pairs] for one in (condition, control)]
    return FitComparison(*labels, apart, shared, t_interval([b - a for b, a in zip(*exponents)]), "")


def _refit(condition: ConditionFit, seed: int, asymptote: float) -> CurveFit:
    fit = condition.fits[seed]
    return fit_curve(fit.compute, fit.accuracy, fit.sigmoid.start, asymptote=asymptote, of=len(condition.fits))
