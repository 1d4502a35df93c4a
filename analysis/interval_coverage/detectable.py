"""The smallest effect that a design of bases and seeds finds, also where runs of the treated arm collapse."""

from __future__ import annotations

import math

import numpy as np
from scipy import optimize

from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.analysis.stats.power import ALPHA, POWER, minimum_detectable_effect

TRIALS = 2000  # simulated experiments behind a power where runs collapse


def smallest_effect(
    sd_base: float | int,
    sd_seed: float | int,
    bases: int,
    seeds: int,
    power: float | int = POWER,
    alpha: float | int = ALPHA,
) -> float:
    """The smallest true effect that a design finds with the given power, in the unit of the deviations.

    The deviations are those of paired differences: of the effect between bases, and of one pair's difference about its
    base's effect (sqrt(2) of one run's where pairing gains nothing). Bases are what counts: with b of them t has b - 1
    degrees of freedom, and more seeds shrink only the second deviation. Raises ValueError as `power_of_t`.
    """
    return minimum_detectable_effect(math.hypot(sd_base, sd_seed / math.sqrt(seeds)), bases, power, alpha)


def power_with_collapse(
    effect: float | int,
    sd_base: float | int,
    sd_seed: float | int,
    bases: int,
    seeds: int,
    collapse: float | int,
    level: float | int,
    rng: np.random.Generator,
    trials: int = TRIALS,
    alpha: float | int = ALPHA,
) -> float:
    """The chance to find an effect where the treated arm's runs collapse with the chance `collapse`.

    Simulated: a collapsed run ends at 0, its control at about `level`. Found is p below alpha, and both the mean over
    all pairs and that over the pairs without a collapse on the effect's side.
    """
    of = {seed: seed % bases for seed in range(bases * seeds)}
    found = 0
    for _ in range(trials):
        own = effect + sd_base * rng.standard_normal(bases)
        fallen = rng.random(len(of)) < collapse
        noise = sd_seed * rng.standard_normal(len(of))
        values = {seed: -level + noise[seed] if fallen[seed] else own[of[seed]] + noise[seed] for seed in of}
        result = compare(values, of, {seed: (bool(fallen[seed]), False) for seed in of})
        found += result.p < alpha and result.sign == np.sign(effect)
    return found / trials


def smallest_effect_with_collapse(
    sd_base: float | int,
    sd_seed: float | int,
    bases: int,
    seeds: int,
    collapse: float | int,
    level: float | int,
    seed: int = 0,
    power: float | int = POWER,
    trials: int = TRIALS,
) -> float:
    """The smallest gain in the runs that do not collapse that is found with the given power, by simulation.

    A gain is the hard case: collapses pull the mean the other way. NaN where no gain up to `level` is found so often.
    """

    def lacking(effect: float | int) -> float:
        rng = np.random.default_rng(seed)  # the same noise for every effect, so that the chance rises with it
        return power_with_collapse(effect, sd_base, sd_seed, bases, seeds, collapse, level, rng, trials) - power

    if lacking(level) < 0:
        return math.nan
    root = optimize.brentq(lacking, 0.0, level, xtol=1e-3 * level)
    assert isinstance(root, float), "a tuple is for full_output"
    return root
