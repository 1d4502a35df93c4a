"""One contrast that several sweeps measured, pooled over base models, sweeps and environments.

Sweeps of one environment share its base models, so their effects are no independent draws: they are averaged on each
base model, and base models are the observations, as within a sweep. Environments share nothing. The effect on another
environment needs three or more, by random effects: Paule and Mandel's variance between environments and Student's t
(statsmodels). Of two, the interval is about these two: the mean of both, with Satterthwaite's degrees of freedom.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from grpo_lab.analysis.stats.comparison import FEWEST_BASES
from grpo_lab.analysis.stats.intervals import CONFIDENCE, Interval, t_interval

RANDOM = 3  # environments from which on the interval is about another one


@dataclass(frozen=True)
class Effect:
    """What one sweep measured in one environment: the mean difference on each base model.

    `why` says why it has no interval of its own, such as collapses.
    """

    environment: str
    by_base: Mapping[int, float]
    why: str = ""


def pool(effects: Sequence[Effect]) -> Interval:
    """The pooled effect; `n` counts environments, `bases` base models. Without bounds where one has too few of them."""
    means, errors, freedom, number = [], [], [], 0
    for environment in dict.fromkeys(one.environment for one in effects):
        sweeps = [one.by_base for one in effects if one.environment == environment]
        bases = sorted({base for sweep in sweeps for base in sweep})
        by_base = [float(np.mean([sweep[base] for sweep in sweeps if base in sweep])) for base in bases]
        number += len(bases)
        means.append(float(np.mean(by_base)))
        errors.append(float(np.var(by_base, ddof=1)) / len(by_base) if len(by_base) >= FEWEST_BASES else math.nan)
        freedom.append(len(by_base) - 1)
    mean, why = float(np.mean(means)), next((one.why for one in effects if one.why), "")
    if any(math.isnan(error) for error in errors):
        why = f"an environment with fewer than {FEWEST_BASES} base models"
    if why:
        return Interval(mean, math.nan, math.nan, len(means), number, why)
    if len(means) == 1:
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom[0])) * math.sqrt(errors[0])
        return Interval(mean, mean - half, mean + half, 1, number)
    if len(means) < RANDOM:
        variance = sum(errors) / len(means) ** 2
        parts = sum((error / len(means) ** 2) ** 2 / f for error, f in zip(errors, freedom))
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, variance**2 / parts)) * math.sqrt(variance) if variance else 0.0
        return Interval(mean, mean - half, mean + half, len(means), number)
    if max(errors) == 0:
        of_environments = t_interval(means)
        return Interval(mean, of_environments.low, of_environments.high, len(means), number)
    return _random_effects(np.array(means), np.array(errors), number)


def _random_effects(means: np.ndarray, variances: np.ndarray, bases: int) -> Interval:
    """Paule and Mandel's random effects with Student's t over environments."""
    from statsmodels.stats.meta_analysis import combine_effects  # takes a second and a half to load

    found = combine_effects(means, np.maximum(variances, variances.max() * 1e-9), method_re="iterated", use_t=True)
    low, high = map(float, found.conf_int(alpha=1 - CONFIDENCE)[1])
    return Interval((low + high) / 2, low, high, len(means), bases)
