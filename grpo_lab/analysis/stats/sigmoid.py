"""The sigmoid of accuracy in compute, fitted to one curve, and what one curve says without it (arXiv:2510.13786).

R_C = R_0 + (A - R_0) / (1 + (C_mid / C)^B), with R_0 the evaluation before training, which is taken as known. Given
B and C_mid the curve is linear in A, so A - R_0 = sum(f y) / sum(f^2) (variable projection), and a grid in (ln B,
ln C_mid) and a polish do the rest; A stays in [0, 1], as accuracies do. Compute C is in any unit above zero.

The interval of one curve is a profile likelihood: every (A, B, C_mid) whose sum of squares S is at most
S_min (1 + F / (n_eff - 3)), F the 95% point of the F distribution with 1 and n_eff - 3 degrees of freedom,
n_eff = n (1 - rho) / (1 + rho). rho is the lag-1 autocorrelation r of the residuals, corrected for the three fitted
parameters: rho = (n r + 3) / (n - 5), in [0, 0.95].

Differs: the usual limit, S_min + 3.84 s^2 n / n_eff with r as it is, covers too little where evaluations are few or
wander. Measured on 1,000 curves with A = .65, B = 1.7, R_0 = .3 and noise of sd .01 at equally spaced evaluations up
to C_max; in every column white noise / AR(1) noise with .7. "Silent": one curve does not identify A, as its interval
reaches 1, C_max < 2 C_mid as fitted, or the search ended at its edge.

    evaluations  C_max / C_mid  sd of fitted A  covers, usual limit  covers, this limit  reaches 1    silent
    40           0.5            .26  / .28      .97 / .87            .98 / .96           .96 / .95    1.00 / .99
    40           1              .13  / .19      .94 / .88            .96 / .97           .77 / .90    1.00 / .99
    40           2              .027 / .065     .95 / .81            .96 / .95           .00 / .57    .52 / .70
    40           5              .007 / .014     .94 / .81            .96 / .94           .00 / .25    .00 / .25
    12           0.5            .27  / .28      .95 / .83            .98 / .95           .97 / .94    1.00 / .99
    12           1              .18  / .19      .94 / .77            .97 / .93           .91 / .86    1.00 / 1.00
    12           2              .055 / .067     .91 / .72            .96 / .90           .46 / .60    .63 / .76
    12           5              .012 / .016     .92 / .68            .97 / .91           .20 / .55    .20 / .55

R_0 was exact there. Its noise is in no profile: with R_0 off by sd .01, as much as any evaluation, A of 40 white
evaluations up to 5 C_mid is covered in 94% instead of 96% of 200 curves, up to 2 C_mid in 90% instead of 96%; with
sd .04 in 80% and 70%.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy import optimize, special

from grpo_lab.analysis.stats.intervals import CONFIDENCE, Interval

LEAST = 5  # evaluations above zero compute; a sum of squares needs one more than the three parameters, noise another
EXPONENTS = (0.2, 10.0)  # where B is searched
BEYOND = 10.0  # C_mid is searched from the first evaluation over this to the last one times this
FALL_ALARMS = 0.01  # two-sided, of the interval of the last slope
_PARAMETERS = 3
_GRID, _ROUNDS = 61, 3  # points a side, and how often the grid of a profile is drawn closer


@dataclass(frozen=True)
class Sigmoid:
    """R_C with its four numbers; `midpoint` is in the unit of compute."""

    start: float
    asymptote: float
    midpoint: float
    exponent: float

    def at(self, compute: np.ndarray) -> np.ndarray:
        """Accuracy at each compute (> 0)."""
        share = special.expit(self.exponent * (np.log(compute) - math.log(self.midpoint)))
        return self.start + (self.asymptote - self.start) * share


@dataclass(frozen=True)
class Profile:
    """All sigmoids that one curve does not contradict, as 95% intervals; `n` of each counts evaluations."""

    asymptote: Interval
    midpoint: Interval
    exponent: Interval
    start: float
    members: np.ndarray  # rows of ln B, ln C_mid, lowest and highest A - R_0

    def band(self, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Lowest and highest accuracy of these sigmoids at each compute: the profile interval of the prediction."""
        exponents, midpoints, lows, highs = self.members.T
        share = _shares(np.log(compute), exponents, midpoints)
        return self.start + (lows[:, None] * share).min(0), self.start + (highs[:, None] * share).max(0)


@dataclass(frozen=True)
class CurveFit:
    """The best sigmoid of one curve; `compute` and `accuracy` are the points it was fitted to.

    `edges` says in words where the search ended at its edge, and is empty where the best lies inside.
    """

    compute: np.ndarray
    accuracy: np.ndarray
    sigmoid: Sigmoid
    edges: tuple[str, ...]

    @property
    def residuals(self) -> np.ndarray:
        """Observed less fitted."""
        return self.accuracy - self.sigmoid.at(self.compute)

    @property
    def autocorrelation(self) -> float:
        """rho of the module's head: 0.95 for five points, which cannot tell."""
        return corrected_autocorrelation(self.residuals, _PARAMETERS)

    @property
    def effective_points(self) -> float:
        """n_eff: how many independent evaluations these are worth."""
        return len(self.compute) * (1 - self.autocorrelation) / (1 + self.autocorrelation)

    @cached_property
    def profile(self) -> Profile:
        """The profile intervals; A spans [0, 1] where n_eff leaves no degrees of freedom."""
        free = self.effective_points - _PARAMETERS
        squares = float(self.residuals @ self.residuals)
        # An F quantile of hardly any degrees of freedom overflows; the curve then allows any A.
        share = float(special.fdtri(1, free, CONFIDENCE)) / free if free > 0.1 else math.inf
        return _profile(self, squares * (1 + share) if squares else 0.0)


def _shares(ln_compute: np.ndarray, ln_exponents: np.ndarray, ln_midpoints: np.ndarray) -> np.ndarray:
    """f = (R_C - R_0) / (A - R_0) for every pair of parameters (rows) at every point (columns)."""
    return special.expit(np.exp(ln_exponents)[:, None] * (ln_compute - ln_midpoints[:, None]))


def _grid(box: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    exponents, midpoints = np.meshgrid(*(np.linspace(low, high, _GRID) for low, high in box), indexing="ij")
    return exponents.ravel(), midpoints.ravel()


def _box(compute: np.ndarray) -> np.ndarray:
    """Where (ln B, ln C_mid) are searched: two rows of low and high."""
    reach = math.log(BEYOND)
    return np.array([np.log(EXPONENTS), [math.log(compute[0]) - reach, math.log(compute[-1]) + reach]])


def corrected_autocorrelation(residuals: np.ndarray, parameters: int) -> float:
    """Lag-1 autocorrelation of n residuals of a fit of p parameters, in [0, 0.95]: (n r + p) / (n - p - 2).

    Residuals of an AR(1) process around p fitted terms have E[r] = rho - (p (1 + rho) + 2 rho) / n, nearly. Where
    n <= p + 2 nothing can be known of it: 0.95.
    """
    n, squares = len(residuals), float(residuals @ residuals)
    if n <= parameters + 2:
        return 0.95
    if squares == 0:
        return 0.0
    raw = float(residuals[:-1] @ residuals[1:]) / squares
    return min(max((n * raw + parameters) / (n - parameters - 2), 0.0), 0.95)


def refusal(compute: np.ndarray, accuracy: np.ndarray, first: float = 0.0, of: int = 1) -> str:
    """Why no sigmoid can be fitted to the points with compute > 0 and >= first; empty where one can.

    A curve falls at its end where the 99% interval of its last slope lies below 0. Of `of` curves that are judged
    together, the interval of each is at 1 - 1% / of. Measured for one curve of 10 / 40 evaluations of sd .01: false
    alarms on a plateau 0.5% / 0.5% with white noise, 1.4% / 6.9% with AR(1) noise of .7; a fall by .1 over the last
    third is seen in 25% / 100% and 54% / 98%.
    """
    used = (compute > 0) & (compute >= first)
    if used.sum() < LEAST:
        return f"{used.sum()} of the {LEAST} evaluations a fit needs"
    if _falls(compute[used], accuracy[used], 1 - FALL_ALARMS / of):
        return "the curve falls at its end"
    return ""


def last_slope(compute: np.ndarray, accuracy: np.ndarray) -> float:
    """Slope of the straight line through the last third of the points (three at least), per unit of ln compute."""
    return _last_line(compute, accuracy)[0]


def _last_line(compute: np.ndarray, accuracy: np.ndarray) -> tuple[float, np.ndarray, float]:
    """Slope, residuals, and the sum of squares of ln compute around its mean."""
    number = max(3, math.ceil(len(compute) / 3))
    ln_compute, tail = np.log(compute[-number:]), accuracy[-number:]
    from_mean = ln_compute - ln_compute.mean()
    squares = float(from_mean @ from_mean)
    slope = float(from_mean @ tail) / squares
    return slope, tail - tail.mean() - slope * from_mean, squares


def _falls(compute: np.ndarray, accuracy: np.ndarray, confidence: float) -> bool:
    slope, residuals, squares = _last_line(compute, accuracy)
    free, left = len(residuals) - 2, float(residuals @ residuals)
    raw = max(float(residuals[:-1] @ residuals[1:]) / left, 0.0) if left else 0.0
    error = math.sqrt(left / free / squares * (1 + raw) / (1 - raw))
    return slope + float(special.stdtrit(free, (1 + confidence) / 2)) * error < 0


def fit_curve(
    compute: np.ndarray,
    accuracy: np.ndarray,
    start: float,
    first: float = 0.0,
    asymptote: float | None = None,
    of: int = 1,
) -> CurveFit:
    """The least-squares sigmoid through the points with compute > 0 and >= first, sorted by compute.

    `start` is R_0, an accuracy; `asymptote` fixes A instead of fitting it. Raises ValueError with the reason where
    `refusal`, which says what `of` is, has one.
    """
    reason = refusal(compute, accuracy, first, of)
    if reason:
        raise ValueError(f"no sigmoid fits: {reason}; use `refusal` to ask before, or evaluate more often")
    used = (compute > 0) & (compute >= first)
    compute, accuracy = compute[used], accuracy[used]
    ln_compute, rise, box = np.log(compute), accuracy - start, _box(compute)
    gains = (-start, 1.0 - start) if asymptote is None else (asymptote - start, asymptote - start)

    def project(parameters: np.ndarray) -> tuple[np.ndarray, float]:
        share = _shares(ln_compute, parameters[:1], parameters[1:])[0]
        gain = float(np.clip(share @ rise / (share @ share), *gains))
        return rise - gain * share, gain

    shares = _shares(ln_compute, *(grid := _grid(box)))
    products, norms = shares @ rise, (shares**2).sum(1)
    gain = np.clip(products / norms, *gains)
    best = int(np.argmin(gain**2 * norms - 2 * gain * products))
    begin = np.array([grid[0][best], grid[1][best]])
    bounds = (box[:, 0], box[:, 1])
    found = optimize.least_squares(lambda at: project(at)[0], begin, bounds=bounds, x_scale=np.array([0.1, 0.1])).x
    fitted = start + project(found)[1]
    sigmoid = Sigmoid(start, fitted, math.exp(found[1]), math.exp(found[0]))
    return CurveFit(compute, accuracy, sigmoid, _edges(found, box, fitted if asymptote is None else 0.5))


def _edges(found: np.ndarray, box: np.ndarray, asymptote: float) -> tuple[str, ...]:
    near = 0.01 * (box[:, 1] - box[:, 0])
    ends = {
        "the rise is over before it was evaluated": found[1] < box[1, 0] + near[1],
        "C_mid lies far beyond the budget": found[1] > box[1, 1] - near[1],
        "the rise has no bend": found[0] < box[0, 0] + near[0],
        "the rise is a step between two evaluations": found[0] > box[0, 1] - near[0],
        "the best A is 1": asymptote > 1 - 1e-6,
    }
    return tuple(words for words, reached in ends.items() if reached)


def _profile(fit: CurveFit, limit: float) -> Profile:
    """All sigmoids with a sum of squares up to `limit`, on a grid drawn closer and closer around them."""
    start, n = fit.sigmoid.start, len(fit.compute)
    ln_compute, rise, whole = np.log(fit.compute), fit.accuracy - start, _box(fit.compute)
    best = np.log([fit.sigmoid.exponent, fit.sigmoid.midpoint])
    gain = fit.sigmoid.asymptote - start
    box = whole
    for _ in range(_ROUNDS):
        exponents, midpoints = _grid(box)
        shares = _shares(ln_compute, exponents, midpoints)
        products, norms = shares @ rise, (shares**2).sum(1)
        centre = products / norms
        # S(A) = S of the best A here + norms (A - best A)^2: the A below the limit are an interval.
        width = np.sqrt(np.maximum(limit - (rise @ rise - centre * products), 0.0) / norms)
        low, high = np.maximum(centre - width, -start), np.minimum(centre + width, 1 - start)
        inside = (width > 0) & (low <= high)
        members = np.column_stack([exponents, midpoints, low, high])[inside]
        members = np.vstack([members, [*best, gain, gain]])
        step = (box[:, 1] - box[:, 0]) / (_GRID - 1)
        around = np.column_stack([members[:, :2].min(0) - step, members[:, :2].max(0) + step])
        box = np.clip(around, whole[:, :1], whole[:, 1:])

    def interval(value: float, lows: np.ndarray, highs: np.ndarray) -> Interval:
        return Interval(value, float(lows.min()), float(highs.max()), n)

    asymptote = interval(fit.sigmoid.asymptote, start + members[:, 2], start + members[:, 3])
    exponents, midpoints = np.exp(members[:, 0]), np.exp(members[:, 1])
    midpoint = interval(fit.sigmoid.midpoint, midpoints, midpoints)
    return Profile(asymptote, midpoint, interval(fit.sigmoid.exponent, exponents, exponents), start, members)


@dataclass(frozen=True)
class Extrapolation:
    """Prediction of the rest of a curve by a fit to its beginning; arrays over the points held back."""

    compute: np.ndarray
    error: np.ndarray  # observed less predicted
    inside: np.ndarray  # whether the observed lies within the profile band of the prediction


def extrapolate(
    compute: np.ndarray, accuracy: np.ndarray, start: float, share: float = 0.5, first: float = 0.0
) -> Extrapolation | None:
    """Fit up to `share` of the largest compute and predict the evaluations after it; None where that has too few.

    The band is of the sigmoid, not of a noisy evaluation of it: a true sigmoid with white noise leaves it, too.
    """
    early = compute <= share * compute[-1]
    if refusal(compute[early], accuracy[early], first):
        return None
    fit = fit_curve(compute[early], accuracy[early], start, first)
    later, observed = compute[~early], accuracy[~early]
    low, high = fit.profile.band(later)
    return Extrapolation(later, observed - fit.sigmoid.at(later), (low <= observed) & (observed <= high))


def area(compute: np.ndarray, accuracy: np.ndarray, low: float, high: float) -> float:
    """Mean accuracy over ln compute from low to high: trapezoids, straight lines in ln compute between points.

    NaN where the curve does not span [low, high] or that is empty.
    """
    used = compute > 0
    ln_compute, values = np.log(compute[used]), accuracy[used]
    if not 0 < low < high or ln_compute.size == 0 or not compute[used][0] <= low < high <= compute[-1]:
        return math.nan
    ends = np.log([low, high])
    inner = (ln_compute > ends[0]) & (ln_compute < ends[1])
    at = np.concatenate([ends[:1], ln_compute[inner], ends[1:]])
    return float(np.trapezoid(np.interp(at, ln_compute, values), at) / (ends[1] - ends[0]))


def compute_to_reach(compute: np.ndarray, accuracy: np.ndarray, target: float) -> float | None:
    """The compute at which accuracy reaches `target` and still has it at the evaluation after; None where never.

    Straight lines in ln compute between evaluations. A curve that is there at its first evaluation after the start
    counts with that evaluation's compute, which is then an upper bound. The last evaluation alone is no crossing.
    """
    used = compute > 0
    compute, accuracy = compute[used], accuracy[used]
    above = accuracy >= target
    held = np.flatnonzero(above[:-1] & above[1:])
    if held.size == 0:
        return None
    at = int(held[0])
    if at == 0:
        return float(compute[0])
    share = (target - accuracy[at - 1]) / (accuracy[at] - accuracy[at - 1])
    return float(np.exp((1 - share) * np.log(compute[at - 1]) + share * np.log(compute[at])))
