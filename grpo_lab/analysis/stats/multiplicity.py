"""p-values when several arms are compared with one control, and what to do about their number.

Confirmatory families, the predictions declared before the first run: `holm` (or `max_t_sign_flip` from 6 seeds on),
which bounds the chance of even one false finding. Screening many tricks for those worth a closer look:
`benjamini_hochberg`, which bounds the expected share of false findings among the findings. In either case the size of
the family belongs beside the p-values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE, Numbers, share_at_least, sign_flip_sums

FEWEST_SEEDS = 6  # 2 / 2^5 = .0625: five seeds cannot reach .05
ALPHA = round(1 - CONFIDENCE, 9)  # what an adjusted p must be below to resolve a sign
_ROUNDING = 1e-9  # of the mean: a standard error below it is that of sums of equal numbers


def paired_t_pvalue(differences: Numbers) -> float:
    """Two-sided p of Student's t for no difference; below .05 exactly where the 95% t interval excludes 0.

    NaN for fewer than 2 differences; 1 where all are 0. Where all are the same other number, t has no scatter to judge
    by and would say 0: the p is then that of the exact sign-flip test, 2 / 2^n, since coarse scores agree by chance.
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n < 2:
        return math.nan
    mean, error = abs(float(values.mean())), float(values.std(ddof=1)) / math.sqrt(n)
    if error <= _ROUNDING * mean:
        return 2.0 ** (1 - n) if mean else 1.0
    return float(2 * stats.t.sf(mean / error, n - 1))


def holm(p_values: Numbers) -> np.ndarray:
    """Adjusted p-values, in the order given, that hold the chance of any false finding (Holm 1979).

    The i-th smallest of m is multiplied by m - i + 1, then never falls below the one before it, and stops at 1. Use it
    for a declared family; it asks nothing of how the tests depend on each other. Raises ValueError for what is no p.
    """
    p = _probabilities(p_values)
    order = np.argsort(p, kind="stable")
    raised = p[order] * np.arange(len(p), 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1)
    return adjusted


def benjamini_hochberg(p_values: Numbers) -> np.ndarray:
    """Adjusted p-values, in the order given, that hold the expected share of false findings among the findings.

    For screening: what passes is a list of candidates, not of results. Holds for independent tests and for tests that
    depend positively on each other, such as arms that share a control. Raises ValueError for what is no p.
    """
    return stats.false_discovery_control(_probabilities(p_values), method="bh")


def dunnett(
    arms: Mapping[str, Numbers],
    control: Numbers,
    rng: np.random.Generator,
    confidence: float = CONFIDENCE,
) -> pd.DataFrame:
    """Every arm against one control, unpaired: Dunnett's p-values and simultaneous intervals, one row per arm.

    Columns: arm, difference, low, high, p, n. The intervals hold together with the given confidence, for normal values
    of equal variance. For arms that do not share seeds with the control: where they do, the pairing is lost, and with
    it power; use `max_t_sign_flip`, or Holm over `paired_t_pvalue`. The p-values are integrals computed with `rng`,
    good to about three digits. Coverage of three intervals together: 95 to 97% with 3, 5 and 10 values (500 experiments
    each). Raises ValueError where an arm or the control has fewer than 2 values.
    """
    sizes = [len(values) for values in (*arms.values(), control)]
    if not arms or min(sizes) < 2:
        raise ValueError(f"arms and control have {sizes} values: give at least one arm, and each 2 values or more")
    # scipy before 1.15 knows the generator under this name only.
    result = stats.dunnett(*arms.values(), control=control, random_state=rng)
    bounds = result.confidence_interval(confidence)
    return pd.DataFrame(
        {
            "arm": list(arms),
            "difference": [float(np.mean(values) - np.mean(control)) for values in arms.values()],
            "low": bounds.low,
            "high": bounds.high,
            "p": result.pvalue,
            "n": sizes[:-1],
        }
    )


def max_t_sign_flip(differences: np.ndarray) -> np.ndarray:
    """Adjusted exact p-values [k] of k arms against one control, from differences [seeds, k] paired by seed.

    Signs are flipped for a whole seed at once, so that what the arms share through the control stays shared; the p of
    an arm is the share of the 2^n patterns in which the greatest |t| over the arms reaches that arm's |t|. Holds the
    chance of any false finding where no arm differs, with less loss than Holm the more the arms have in common.
    Raises ValueError for fewer than 6 seeds, which cannot reach .05, or more than 20.
    """
    n = len(differences)
    if n < FEWEST_SEEDS:
        raise ValueError(
            f"{n} seeds cannot give p < .05 ({2.0 ** (1 - n):.4f} at least): run {FEWEST_SEEDS}, or use holm"
        )
    sums = sign_flip_sums(np.asarray(differences, dtype=float))
    squares = (differences**2).sum(axis=0)
    # sum^2 / sum of squares grows with |t| alike in every arm, and is n, not infinite, where all differences are equal.
    strength = np.divide(sums**2, squares, out=np.zeros_like(sums), where=squares > 0)
    greatest = strength.max(axis=1)
    return np.array([share_at_least(greatest, observed) for observed in strength[0]])


def _probabilities(p_values: Numbers) -> np.ndarray:
    p = np.asarray(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"{p.tolist()} holds what is no p-value: leave out the comparisons that could not be made")
    return p
