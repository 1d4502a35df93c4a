"""The power of t tests: how likely an effect is found, and which effect a sweep of a given size could have found.

Two-sided t tests throughout, effects and deviations in one unit (say, points of accuracy). `sd` is the deviation of the
numbers that enter the test: of one arm's values over seeds for an unpaired comparison, of the differences by seed for
a paired one; `difference_sd` gives the second from the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, stats

POWER = 0.8
ALPHA = 0.05
MOST_SEEDS = 100_000
_NODES = 512  # deviations, of equal chance, over which a power is averaged


def difference_sd(sd: float | int, correlation: float | int) -> float:
    """The deviation of differences paired by seed, of two arms that each deviate by `sd` and correlate over seeds."""
    if not -1 <= correlation < 1:
        raise ValueError(f"a correlation of {correlation} leaves nothing to plan for: give one from -1 to below 1")
    return sd * math.sqrt(2 * (1 - correlation))


def power_of_t(effect: float | int, sd: float | int, n: int, paired: bool = True, alpha: float = ALPHA) -> float:
    """The chance that a two-sided t test with n seeds (per arm) finds a true effect, in either direction.

    Paired: n differences of deviation `sd`. Unpaired: two arms of n seeds, each of deviation `sd`. Noncentral t.
    Raises ValueError for fewer than 2 seeds or a deviation that is not above 0.
    """
    if n < 2 or sd <= 0:
        raise ValueError(f"n = {n}, sd = {sd}: a test needs 2 seeds or more, and a deviation above 0")
    freedom = n - 1 if paired else 2 * n - 2
    distance = effect / sd * math.sqrt(n if paired else n / 2)
    critical = stats.t.isf(alpha / 2, freedom)
    # The far tail is asked for as the near tail of the mirrored effect: scipy's nct.cdf gives NaN there.
    right, wrong = (float(stats.nct.sf(critical, freedom, side)) for side in (distance, -distance))
    return right + wrong


def minimum_detectable_effect(
    sd: float | int, n: int, power: float = POWER, alpha: float = ALPHA, paired: bool = True
) -> float:
    """The smallest true effect that a test with n seeds (per arm) finds with the given power, in sd's unit.

    Raises ValueError for a power that is not between alpha and 1, and as `power_of_t`.
    """
    check_power(power, alpha)

    def lacking(effect: float) -> float:
        return power_of_t(effect, 1, n, paired, alpha) - power

    beyond = 1.0
    while lacking(beyond) < 0:
        beyond *= 2
    root = optimize.brentq(lacking, 0, beyond, xtol=1e-12)
    assert isinstance(root, float), "a tuple is for full_output"
    return float(sd) * root


def fewest(chance: Callable[[int], float], power: float = POWER, least: int = 2) -> int | None:
    """The smallest n from `least` on at which a chance that rises with n reaches the power; None beyond 100,000."""
    few, enough = least - 1, least
    while chance(enough) < power:
        if enough == MOST_SEEDS:
            return None
        few, enough = enough, min(2 * enough, MOST_SEEDS)
    while enough - few > 1:
        middle = (few + enough) // 2
        if chance(middle) < power:
            few = middle
        else:
            enough = middle
    return enough


def power_within(margin: float | int, sd: float | int, n: int, alpha: float | int = ALPHA) -> float:
    """The chance that two one-sided t tests find an effect of exactly 0 to be smaller than the margin, paired.

    With s the deviation that n differences show, both tests pass where |mean| < margin - t(alpha, n - 1) s / sqrt(n);
    averaged over the law of s. Raises ValueError as `power_of_t`.
    """
    if n < 2 or sd <= 0:
        raise ValueError(f"n = {n}, sd = {sd}: a test needs 2 seeds or more, and a deviation above 0")
    shares = (np.arange(_NODES) + 0.5) / _NODES
    seen = sd * np.sqrt(stats.chi2.ppf(shares, n - 1) / (n - 1))
    room = margin - stats.t.isf(alpha, n - 1) * seen / math.sqrt(n)
    inside = 2 * stats.norm.cdf(room * math.sqrt(n) / sd) - 1
    return float(np.maximum(inside, 0).mean())


def check_power(power: float, alpha: float) -> None:
    """Raise ValueError for a power that is not between alpha and 1."""
    if not 0 < alpha < power < 1:
        raise ValueError(f"power {power}, alpha {alpha}: give 0 < alpha < power < 1")
