"""Simulated outcomes that hold `spread`, `ratio` and `pages.pooled` to what they say, and the tables of what came out.

`PYTHONPATH=analysis python -m interval_coverage` prints the tables again. These are of 4,000 simulated experiments for
each number. Laws are those of `differences`: normal, heavy (Student's t with 2.5 degrees) and skewed (lognormal). A
column `8x1` has eight base models of one run each; in the second table `3x8` has three environments of eight base
models.

Coverage (%) of the ratio of two standard deviations; law and true ratio:

                4x2   8x1   8x2  16x1
    normal, 1    92    95    93    95
    normal, 3    92    95    93    95
    heavy, 1     92    93    92    93
    heavy, 3     92    93    92    93
    skewed, 1    92    91    92    91
    skewed, 3    92    91    92    91

Coverage (%) of an effect pooled over two sweeps in each environment; deviation between environments:

          1x4   1x8   2x4   2x8   3x4   3x8   5x4   5x8
    0      95    95    96    96    98   100    96    98
    0.5    95    95    96    96    98    99    94    96
    1      95    95    96    96    97    96    94    95

Coverage (%) of a ratio of means, such as a sharpening share; true ratio, base models:

            4     8    16
    0.1    95    95    95
    0.5    95    95    95
    0.9    95    95    95
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from pages.pooled import Effect, pool

from grpo_lab.analysis.stats.ratio import jackknife_ratio
from grpo_lab.analysis.stats.spread import spread_ratio
from interval_coverage.differences import LAWS, Table

SIZES = ((4, 2), (8, 1), (8, 2), (16, 1))  # base models and runs of each
RATIOS = (1.0, 3.0)  # true ratios of standard deviations
TOGETHER = 0.5  # correlation of paired deviations
ENVIRONMENTS = ((1, 4), (1, 8), (2, 4), (2, 8), (3, 4), (3, 8), (5, 4), (5, 8))  # and base models of each
BETWEEN = (0.0, 0.5, 1.0)  # deviation of effects between environments, in that between base models
SHARES = (0.1, 0.5, 0.9)  # true ratios of means
BASES = (4, 8, 16)
GAIN, GAIN_SD, SHARE_SD = 0.4, 0.1, 0.05  # of the denominator, and of the numerator beside it


def spread_coverage(number: int, seed: int = 0) -> Table:
    """How often the interval of a ratio of standard deviations holds the true one."""
    rows = []
    for law, draw in LAWS.items():
        for ratio in RATIOS:
            held = []
            for bases, seeds in SIZES:
                rng = np.random.default_rng([seed, bases, seeds, len(law)])
                of = {run: run % bases for run in range(bases * seeds)}
                hits = 0
                for _ in range(number):
                    own, shared = draw(rng, (2, bases * seeds)), draw(rng, (bases * seeds,))
                    one, other = math.sqrt(1 - TOGETHER) * own + math.sqrt(TOGETHER) * shared
                    level = rng.standard_normal(bases)[[of[run] for run in range(bases * seeds)]] if seeds > 1 else 0.0
                    found = spread_ratio(pd.Series(level + ratio * one), pd.Series(level + other), of)
                    hits += found.contains(ratio)
                held.append(100 * hits / number)
            rows.append((f"{law}, {ratio:g}", held))
    return Table(
        "Coverage (%) of the ratio of two standard deviations; law and true ratio:", _sizes(SIZES), rows, number
    )


def pooled_coverage(number: int, seed: int = 0) -> Table:
    """How often a pooled effect's interval holds the effect of other environments, or with two of them of these."""
    rows = []
    for between in BETWEEN:
        held = []
        for environments, bases in ENVIRONMENTS:
            rng = np.random.default_rng([seed, environments, bases])
            hits = 0
            for _ in range(number):
                truth = between * rng.standard_normal(environments)
                effects = [
                    Effect(str(place), dict(enumerate(truth[place] + base + 0.5 * rng.standard_normal(bases))))
                    for place in range(environments)
                    for base in [rng.standard_normal(bases)]
                    for _ in range(2)
                ]
                found = pool(effects)
                hits += found.contains(0.0 if environments > 2 else float(truth.mean()))
            held.append(100 * hits / number)
        rows.append((f"{between:g}", held))
    title = "Coverage (%) of an effect pooled over two sweeps in each environment; deviation between environments:"
    return Table(title, _sizes(ENVIRONMENTS), rows, number)


def ratio_coverage(number: int, seed: int = 0) -> Table:
    """How often the jackknife's interval holds a true ratio of means, as of a sharpening share."""
    rows = []
    for share in SHARES:
        held = []
        for bases in BASES:
            rng = np.random.default_rng([seed, bases])
            hits = 0
            for _ in range(number):
                gained = GAIN + GAIN_SD * rng.standard_normal(bases)
                pairs = np.column_stack([share * gained + SHARE_SD * rng.standard_normal(bases), gained])
                hits += jackknife_ratio(pairs).contains(share)
            held.append(100 * hits / number)
        rows.append((f"{share:g}", held))
    return Table("Coverage (%) of a ratio of means, such as a sharpening share; true ratio, base models:",
                 [str(bases) for bases in BASES], rows, number)  # fmt: skip


def tables(number: int) -> list[Table]:
    """All tables of the docstring."""
    return [spread_coverage(number), pooled_coverage(number), ratio_coverage(number)]


def _sizes(sizes: tuple[tuple[int, int], ...]) -> list[str]:
    return [f"{one}x{other}" for one, other in sizes]
