"""p-values of paired differences, and their correction for how many there are.

Predictions that were declared before the first run are confirmatory: `holm` bounds the chance of even one false
finding. A look through many tricks is a screening: `benjamini_hochberg` bounds the expected share of false findings
among the findings. Say the size of the family beside the p-values in both cases.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special, stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE, Numbers

ALPHA = round(1 - CONFIDENCE, 9)  # what an adjusted p must be below to resolve a sign
ROUNDING = 1e-9  # of the mean: a standard error below it is that of sums of equal numbers


def paired_t_pvalue(differences: Numbers) -> float:
    """Two-sided p of Student's paired t test; below .05 exactly where the 95% t interval excludes 0.

    NaN for fewer than 2 differences, 1 where all are 0. Where all are the same other number, t would say 0 for lack of
    scatter, though coarse accuracies agree by chance: p is then 2 / 2^n, that of the exact sign-flip test.
    """
    values = np.asarray(differences, dtype=float)
    n = len(values)
    if n < 2:
        return math.nan
    mean, error = abs(float(values.mean())), float(values.std(ddof=1)) / math.sqrt(n)
    if error <= ROUNDING * mean:
        return 2.0 ** (1 - n) if mean else 1.0
    return float(2 * special.stdtr(n - 1, -mean / error))


def holm(p_values: Numbers, true_at_most: int | None = None) -> np.ndarray:
    """Adjusted p-values, in the order given, that hold the chance of any false finding (Holm 1979).

    The i-th smallest of m is multiplied by m - i + 1, then never falls below the one before it, and stops at 1. Use it
    for a declared family; it asks nothing of how the tests depend on each other. Where no more than `true_at_most` of
    the hypotheses can be true together, no factor is larger than that (Shaffer 1986): a difference that is 0 and one
    that is as large as the margin exclude each other. Raises ValueError for what is no p.
    """
    p = _probabilities(p_values)
    order = np.argsort(p, kind="stable")
    factors = np.arange(len(p), 0, -1)
    raised = p[order] * (factors if true_at_most is None else np.minimum(factors, true_at_most))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(raised), 1)
    return adjusted


def benjamini_hochberg(p_values: Numbers) -> np.ndarray:
    """Adjusted p-values, in the order given, that hold the expected share of false findings among the findings.

    For screening: what passes is a list of candidates, not of results. Holds for independent tests and for tests that
    depend positively on each other, such as arms that share a control. Raises ValueError for what is no p.
    """
    return stats.false_discovery_control(_probabilities(p_values), method="bh")


def p_text(p: float, equals: str = " = ") -> str:
    """`p < 0.001` or `p = 0.013`."""
    return "p < 0.001" if p < 0.001 else f"p{equals}{p:.3f}"


def _probabilities(p_values: Numbers) -> np.ndarray:
    p = np.asarray(p_values, dtype=float)
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError(f"{p.tolist()} holds what is no p-value: leave out the comparisons that could not be made")
    return p
