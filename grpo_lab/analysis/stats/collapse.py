"""Collapse as a result of its own: how many runs of an arm, of how many, and against how many of another.

Runs count as independent of each other. Bases that collapse more often than others widen the first interval's true
error, and pairs by base make the second test careful; neither is estimated from a handful of collapses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from scipy import stats

from grpo_lab.analysis.stats.intervals import CONFIDENCE, FOR_INTERVAL


@dataclass(frozen=True)
class Count:
    """`number` of `of` runs collapsed."""

    number: int
    of: int

    @property
    def bounds(self) -> tuple[float, float]:
        """The Clopper-Pearson interval of the share: exact, so it covers 95% or more; (0, 1) for no run."""
        if not self.of:
            return 0.0, 1.0
        found = stats.binomtest(self.number, self.of).proportion_ci(CONFIDENCE, "exact")
        return float(found.low), float(found.high)

    @property
    def text(self) -> str:
        """`3 of 8 (0.09 to 0.76)`; of too few runs for an interval `1 of 2`."""
        low, high = self.bounds
        return f"{self.number} of {self.of}" + (f" ({low:.2f} to {high:.2f})" if self.of >= FOR_INTERVAL else "")


@cache
def barnard(one: Count, other: Count) -> float:
    """Two-sided p of Barnard's exact test that two arms collapse equally often; 1 where all or none of both did.

    It asks less than Fisher's, which fixes the number of collapses of both arms together: of 8 runs each Fisher's is
    below .05 in less than 2% of sweeps without a difference, and finds less for it.
    """
    if one.number + other.number in (0, one.of + other.of):
        return 1.0
    table = [[one.number, other.number], [one.of - one.number, other.of - other.number]]
    return min(1.0, float(stats.barnard_exact(table).pvalue))
