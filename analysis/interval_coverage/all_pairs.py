"""Simulated sweeps that hold `all_pairs` to what it says; the tables stand in its docstring.

`PYTHONPATH=analysis python -m interval_coverage` prints them again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from grpo_lab.analysis.stats.all_pairs import AllPairs, compare_all_pairs
from grpo_lab.analysis.stats.comparison import two_groups
from interval_coverage.differences import LEVEL, SD, Table

BASE_SD, LOST, SPREAD = 0.1, 0.3, 0.3  # between bases; what a base or half of the runs lose; from worst arm to best
ARMS: Mapping[int, int] = {31: 4, 7: 2, 5: 2, 3: 0}  # number of arms -> how many of them are several
SIZES = ((2, 1), (2, 2), (3, 2), (4, 1), (4, 2), (4, 4))


@dataclass(frozen=True)
class Sweep:
    """What is planted: `unlike` of the arms scatter `times` as much, or lose on one base or in half of their runs.

    With `between` only the deviation between bases is so much larger. `spread` is the distance of the worst arm to the
    best, all steps alike, in an order drawn for each sweep.
    """

    arms: int = 31
    bases: int = 4
    seeds: int = 2
    unlike: int = 0
    times: float | int = 1
    between: bool = False
    one_base: bool = False
    half: bool = False
    spread: float | int = 0

    def experiments(self, number: int, seed: int = 0) -> Iterator[tuple[AllPairs, np.ndarray]]:
        """So many sweeps as `all_pairs` reads them, each with the true means of its arms [A]."""
        rng = np.random.default_rng([seed, self.arms, self.bases, self.seeds, self.unlike])
        odd = np.arange(self.arms) < self.unlike
        of_bases = SD * np.where(odd, self.times, 1.0)
        of_runs = SD if self.between else of_bases
        of = {run: run % self.bases for run in range(self.bases * self.seeds)}
        names = [str(arm) for arm in range(self.arms)]
        for _ in range(number):
            truth = LEVEL + self.spread * rng.permutation(np.linspace(0, 1, self.arms))
            level = BASE_SD * rng.standard_normal((self.bases, 1))
            means = truth + level + of_bases * rng.standard_normal((self.bases, self.arms))
            runs = np.tile(means, (self.seeds, 1))
            runs += of_runs * rng.standard_normal(runs.shape)
            if self.one_base:
                base = rng.integers(self.bases, size=self.arms)
                runs -= LOST * (odd & (np.arange(len(runs))[:, None] % self.bases == base))
                truth = truth - odd * LOST / self.bases
            if self.half:
                runs -= LOST * (odd & (rng.random(runs.shape) < 0.5))
                truth = truth - odd * LOST / 2
            values = pd.DataFrame(runs, columns=names)
            groups = {name: two_groups(dict(enumerate(values[name].tolist())), of) for name in names}
            yield compare_all_pairs(values, of, {name: why for name, why in groups.items() if why}), truth


@dataclass(frozen=True)
class Rates:
    """Shares: of sweeps with a difference that is not there or has the other sign, of arms, and of pairs."""

    wrong: float
    not_reported: float
    found: float


def rates(sweep: Sweep, number: int, seed: int = 0) -> Rates:
    """Simulate a sweep."""
    wrong, not_reported, found = 0, 0.0, 0.0
    for result, truth in sweep.experiments(number, seed):
        true = np.sign(np.round(truth[:, None] - truth[None, :], 9))
        wrong += bool(((result.distinguishable != 0) & (result.distinguishable != true)).any())
        not_reported += len(result.not_reported) / sweep.arms
        found += result.number_distinguishable / result.pairs
    return Rates(wrong / number, not_reported / number, found / number)


def _settings(arms: int) -> dict[str, Sweep | None]:
    """The rows of the tables; None where so few arms have no several."""
    several = ARMS[arms]

    def planted(unlike: int, **other: float | int | bool) -> Sweep | None:
        return Sweep(arms=arms, unlike=unlike, **other) if unlike else None  # pyright: ignore[reportArgumentType]

    return {
        "alike": Sweep(arms=arms),
        "one 3 x": planted(1, times=3),
        "one 6 x": planted(1, times=6),
        "several 6 x": planted(several, times=6),
        "one, bases 6 x": planted(1, times=6, between=True),
        "several, bases 6 x": planted(several, times=6, between=True),
        "one, one base": planted(1, one_base=True),
        "several, one base": planted(several, one_base=True),
        "one, two groups": planted(1, half=True),
        "several, two groups": planted(several, half=True),
        "all, two groups": planted(arms, half=True),
    }


def tables(number: int) -> Iterator[Table]:
    """Every table of the docstring of `all_pairs`, from so many simulated sweeps for each number."""
    names = [str(arms) for arms in ARMS]
    nothing = Rates(math.nan, math.nan, math.nan)
    found = {
        arms: {label: rates(sweep, number) if sweep else nothing for label, sweep in _settings(arms).items()}
        for arms in ARMS
    }
    rows = {label: [by_label[label] for by_label in found.values()] for label in _settings(31)}
    title = "Sweeps (%) with a false difference, by number of arms, 4 bases of 2 seeds:"
    yield Table(title, names, [(label, [100 * one.wrong for one in own]) for label, own in rows.items()], number, 1)
    not_reported = [(label, [100 * one.not_reported for one in own]) for label, own in rows.items()]
    yield Table("Arms (%) not reported there:", names, not_reported, number)
    spread = [100 * rates(Sweep(arms=arms, spread=SPREAD), number).found for arms in ARMS]
    title = "Pairs (%) distinguishable of arms that spread evenly over 30 points:"
    yield Table(title, names, [("alike", spread)], number)
    wrong = {"alike": Sweep(), "one 6 x": Sweep(unlike=1, times=6), "several 6 x": Sweep(unlike=4, times=6)}
    by_size = [
        (
            label,
            [
                100 * rates(Sweep(31, *size, unlike=sweep.unlike, times=sweep.times), number).wrong
                for size in SIZES
            ],
        )
        for label, sweep in wrong.items()
    ]  # fmt: skip
    names = [f"{bases}x{seeds}" for bases, seeds in SIZES]
    yield Table("Sweeps (%) of 31 arms with a false difference, by bases x seeds:", names, by_size, number, 1)
