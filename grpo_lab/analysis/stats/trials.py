"""Simulated sweeps that hold `comparison` and `collapse` to what they say, and the tables of what came out.

`analysis/interval_coverage.py` makes the tables again; these are of 4,000 simulated sweeps for each number in the first
six, of 1,000 in the others. A world has b bases of s seeds (`4x2`: four bases, two seeds each). Runs of the control
deviate by 3 points of accuracy from their level, and the difference of a pair by 3 points from the base's effect;
effects deviate between bases by 0, 1, 2 or 6 times that. Laws of both deviations: normal; heavy (Student's t with 2.5
degrees); skewed (lognormal, a long tail on one side). Where a table names no law it is normal; bases deviate by 1 times
that in the tables on collapses and on P(harm), and not at all in the others.

Two things no handful of values shows, so their intervals are not withheld. Effects with a long tail on one side: a
sample without the tail looks like a tight normal one. And a fate that no run met: where one run in ten ends 30 points
lower and is no collapse, sweeps without such a run show an interval, which holds the mean of the other runs alone.

Coverage (%) of the intervals shown, no collapse; law, deviation of bases:

                3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    normal, 0  94.8  94.5  94.7  94.7  94.7  94.8  94.8  95.0  94.9  94.9  95.3  95.2
    normal, 1  95.3  94.9  94.7  94.9  94.6  95.6  94.8  94.7  94.8  94.6  95.0  95.3
    normal, 2  95.1  94.8  95.0  94.2  94.4  95.1  94.2  95.5  94.7  94.3  95.0  95.5
    heavy, 0   95.7  96.7  95.5  96.6  96.6  95.9  96.2  96.5  95.3  96.6  96.4  95.5
    heavy, 1   96.0  96.4  95.7  96.1  96.6  96.0  96.4  96.4  95.8  96.0  96.2  95.3
    heavy, 2   96.6  96.1  96.1  95.8  96.8  96.0  95.8  96.1  96.3  96.0  96.3  96.0
    skewed, 0  84.0  87.2  90.0  81.3  85.4  89.3  81.8  84.9  88.8  81.5  85.6  87.8
    skewed, 1  89.0  89.3  89.4  85.8  87.4  87.5  84.4  86.7  86.8  85.4  86.8  87.2
    skewed, 2  88.5  86.3  86.7  83.7  84.4  85.1  82.6  83.8  83.8  82.3  84.3  84.0

Withheld (%), since the runs looked like two groups:

                3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    normal, 0     0     0     0     0     0     0     0     0     0     0     0     0
    normal, 1     0     1     0     3     0     0     2     0     0     1     0     0
    normal, 2     0     8     2    14     3     1     9     2     0     6     1     0
    heavy, 0      0     3     5     2     3     6     3     5     7     3     5     8
    heavy, 1      0     4     5     4     5     5     5     5     6     5     6     7
    heavy, 2      0     8     7     9     9     7    10     8     7    10     8     8
    skewed, 0     0     5     7     5     7    10     5     7    10     6     8    11
    skewed, 1     0     7     8     8     8    10     9     8    10     9    10    10
    skewed, 2     0    13    12    16    12    12    17    13    12    17    14    13

Coverage (%) of the intervals shown where one arm collapses so often:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%  95.3  95.1  94.9  95.0  95.1  95.5  94.7  95.1  94.8  94.2  95.1  95.3
    20%  94.7  95.0  94.8  95.0  95.4  95.6  94.7  95.0  94.6  94.7  94.9  94.8
    40%  94.1  94.3  94.8  95.3  95.3  95.6  94.8  95.1  94.9  94.8  94.7  95.6

Withheld (%) there, since too few pairs are left:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%    27     5     0     7     1     0     3     0     0     2     0     0
    20%    48    13     1    20     2     0     8     1     0     3     0     0
    40%    71    39     8    50    13     1    32     4     0    19     1     0

Coverage (%) there of t over all pairs, of the mean over all:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%    82    65    75    75    65    81    69    69    87    68    74    89
    20%    69    73    92    65    83    91    67    89    92    75    92    92
    40%    72    92    95    84    95    95    91    94    94    93    95    95

p below .05 (%) where both arms collapse so often and nothing else differs:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%   3.4   3.9   4.2   3.6   2.8   3.4   3.4   3.2   4.3   3.6   3.3   4.0
    20%   3.3   5.0   5.1   2.6   2.9   4.1   3.1   4.2   5.1   3.1   4.0   4.4
    40%   3.9   4.5   5.4   1.8   3.0   5.0   3.5   4.7   4.5   3.4   4.4   4.6

Coverage (%) of the mean over all runs where so many end so much lower:

                     3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    15 points, 10%    94    91    92    91    90    92    88    89    91    87    88    92
    15 points, 20%    90    87    91    82    87    93    78    88    95    79    90    94
    15 points, 40%    85    90    95    79    94    95    83    95    95    90    96    94
    30 points, 10%    87    71    55    72    56    32    54    36    14    47    22     3
    30 points, 20%    76    30    21    25    10    20     9     8    43    11    17    58
    30 points, 40%    74    21    79    13    57    94    16    70    93    39    88    93

Withheld (%) there:

                     3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    15 points, 10%     0    22    20    19    23    17    21    21    14    20    19    10
    15 points, 20%     0    34    19    32    31    12    36    24     8    33    21     4
    15 points, 40%     0    39    17    49    31     9    46    20     3    40    15     1
    30 points, 10%     0    47    70    33    55    79    39    62    87    46    70    91
    30 points, 20%     0    72    91    57    80    94    67    88    97    73    92    99
    30 points, 40%     0    93    98    84    96    98    89    97    98    93    97    99

Found to be within 5 points (%), by the true effect:

                 3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    0 points    39.0  71.4  94.0  66.1  93.6  99.9  84.3  99.0 100.0  93.3  99.8 100.0
    2.5 points  23.8  41.1  59.9  34.9  58.7  81.0  44.8  68.6  89.9  53.8  78.2  98.1
    5 points     4.7   7.0   4.9   5.5   5.1   5.1   4.7   4.7   6.0   5.2   5.7   4.7

Other bases (%) below the value that P(harm) puts such a chance below:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%  10.5  10.3  10.1  10.0  10.2   9.5   8.7  11.3   9.4  11.1  10.5  10.0
    50%  46.4  50.9  49.4  49.4  47.5  50.2  47.4  48.1  49.8  50.6  50.2  49.7
    90%  87.8  89.7  90.2  90.1  89.1  92.4  89.1  89.5  90.0  91.6  89.3  88.6

Coverage (%) of Clopper and Pearson's interval, by runs and true share (exact):

            3     5     8    12    16
    10%  99.9  99.1  99.5  99.6  98.3
    20%  99.2  99.3  99.0  98.1  99.3
    40% 100.0  99.0  97.5  96.5  96.3

p below .05 (%) by Barnard where both arms collapse so often (exact), by runs of each:

            3     5     8    12    16
    10%   0.1   0.1   0.4   1.5   2.8
    20%   0.8   0.5   2.0   3.8   4.5
    40%   2.8   1.9   2.7   4.2   4.2

Smallest gain (points) found in 80%, bases and seeds deviating by 3 points:

                   4x2   4x4   6x2   6x4
    0% collapse    7.7   7.2   5.2   4.9
    10% collapse  13.9  11.6  10.5   9.4
    20% collapse  25.5  20.5  20.7  19.4
    formula        7.8   7.1   5.3   4.8

Found (%) where one arm collapses at 20% (10 points on average) and nothing else differs:

                   4x2   4x4   6x2   6x4
    simulated        2     7     4    14
    formula of t    23    46    35    65
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from grpo_lab.analysis.stats.collapse import Count, barnard
from grpo_lab.analysis.stats.comparison import Comparison, compare
from grpo_lab.analysis.stats.components import smallest_effect, smallest_effect_with_collapse
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.analysis.stats.multiplicity import ALPHA
from grpo_lab.analysis.stats.power import power_of_t

SIZES = tuple(itertools.product((3, 4, 5, 6), (1, 2, 4)))
LAWS: Mapping[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "normal": lambda rng, number: rng.standard_normal(number),
    "heavy": lambda rng, number: rng.standard_t(2.5, number) / math.sqrt(5),
    "skewed": lambda rng, number: (
        (np.exp(rng.standard_normal(number)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
    ),
}
RATIOS = (0, 1, 2, 6)
SHARES = (0.1, 0.2, 0.4)  # of runs that collapse
MARGIN = 0.05
LEVEL = 0.5  # accuracy of the control
SD = 0.03


@dataclass(frozen=True)
class World:
    """What is planted; `effect` holds in the runs that do not collapse.

    `collapse` is the chance of a treated run to end at 0, `control_collapse` that of a control. `lower` is the chance
    of a treated run to end `drop` lower, which is no collapse by any rule.
    """

    bases: int
    seeds: int
    law: str = "normal"
    ratio: float | int = 0
    sd: float | int = SD
    effect: float | int = 0
    collapse: float | int = 0
    control_collapse: float | int = 0
    lower: float | int = 0
    drop: float | int = 0

    def experiments(self, number: int, seed: int = 0) -> Iterator[tuple[Comparison, dict[int, float], float]]:
        """So many comparisons, each with its differences by seed and the truth its interval is about.

        The truth is the mean difference of the pairs it names: pairs without a collapse, or pairs like those there are.
        """
        rng, draw = np.random.default_rng([seed, self.bases, self.seeds]), LAWS[self.law]
        runs = self.bases * self.seeds
        base = {run: run % self.bases for run in range(runs)}
        place = np.arange(runs) % self.bases
        for _ in range(number):
            control = LEVEL + self.sd * draw(rng, runs)
            change = self.effect + self.ratio * self.sd * draw(rng, self.bases)[place] + self.sd * draw(rng, runs)
            treated = control + change - self.drop * (rng.random(runs) < self.lower)
            fallen, lost = rng.random(runs) < self.collapse, rng.random(runs) < self.control_collapse
            difference = np.where(fallen, 0.0, treated) - np.where(lost, 0.0, control)
            values = dict(enumerate(difference.tolist()))
            status = {run: (bool(fallen[run]), bool(lost[run])) for run in range(runs) if fallen[run] or lost[run]}
            result = compare(values, base, status)
            alike = {(True, False): -LEVEL, (False, True): LEVEL + self.effect, (True, True): 0.0}
            truth = alike[status[0]] if status and not result.mixed else self.effect
            yield result, values, truth


def _shown(result: Comparison) -> Interval:
    """The interval that is shown: over all pairs or, where that is withheld for collapses, over the others."""
    return result.alive if result.mixed else result.whole


@dataclass(frozen=True)
class Rates:
    """Shares of the experiments of a world: with a shown interval, that holds its truth, and with p below .05.

    `plain` is how often Student's t over all pairs as they are holds the mean over all of them.
    """

    shown: float
    covers: float
    found: float
    plain: float


def rates(world: World, number: int, seed: int = 0) -> Rates:
    """Simulate a world."""
    shown = covers = found = plain = 0
    mean = (1 - world.collapse) * (LEVEL + world.effect - world.lower * world.drop) - LEVEL
    for result, values, truth in world.experiments(number, seed):
        interval = _shown(result)
        has = not math.isnan(interval.low)
        shown += has
        covers += has and interval.contains(truth)
        found += result.p < ALPHA
        plain += t_interval(list(values.values())).contains(mean)
    return Rates(shown / number, covers / shown if shown else math.nan, found / number, plain / number)


Row = tuple[str, list[float]]


@dataclass(frozen=True)
class Table:
    """A table of percentages: a title, columns, and rows of numbers; `number` experiments stand behind each."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Row]
    number: int
    decimals: int = 0

    @property
    def text(self) -> str:
        """As it stands in the docstring."""
        wide = max(len(label) for label, _ in self.rows)
        head = f"    {'':{wide}}" + "".join(f"{name:>6}" for name in self.columns)
        lines = [
            f"    {label:{wide}}" + "".join(f"{_cell(value, self.decimals):>6}" for value in values)
            for label, values in self.rows
        ]
        return "\n".join([self.title, "", head, *lines])


def _cell(value: float, decimals: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{decimals}f}"


def _named(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def coverage(number: int) -> list[Table]:
    """How often a shown interval holds, by law and size, and how often none is shown."""
    covers, hidden = [], []
    for law, ratio in itertools.product(LAWS, RATIOS):
        found = [rates(World(*size, law=law, ratio=ratio), number) for size in SIZES]
        covers.append((f"{law}, {ratio}", [100 * one.covers for one in found]))
        hidden.append((f"{law}, {ratio}", [100 * (1 - one.shown) for one in found]))
    names = list(map(_named, SIZES))
    return [
        Table("Coverage (%) of the intervals shown, no collapse; law, deviation of bases:", names, covers, number, 1),
        Table("Withheld (%), since the runs looked like two groups:", names, hidden, number),
    ]


def collapses(number: int) -> list[Table]:
    """The same where runs of one arm collapse, beside what Student's t over all pairs would do."""
    covers, hidden, plain, errors = [], [], [], []
    for share in SHARES:
        found = [rates(World(*size, ratio=1, collapse=share), number) for size in SIZES]
        label = f"{share:.0%}"
        covers.append((label, [100 * one.covers for one in found]))
        hidden.append((label, [100 * (1 - one.shown) for one in found]))
        plain.append((label, [100 * one.plain for one in found]))
        both = [rates(World(*size, ratio=1, collapse=share, control_collapse=share), number) for size in SIZES]
        errors.append((label, [100 * one.found for one in both]))
    names = list(map(_named, SIZES))
    return [
        Table("Coverage (%) of the intervals shown where one arm collapses so often:", names, covers, number, 1),
        Table("Withheld (%) there, since too few pairs are left:", names, hidden, number),
        Table("Coverage (%) there of t over all pairs, of the mean over all:", names, plain, number),
        Table("p below .05 (%) where both arms collapse so often and nothing else differs:", names, errors, number, 1),
    ]


def second_groups(number: int) -> list[Table]:
    """Runs that end 15 or 30 points lower and are no collapse by the rule: how often that is seen."""
    rows, hold = [], []
    for drop, share in itertools.product((0.15, 0.3), SHARES):
        found = [_covers_mean(World(*size, lower=share, drop=drop), number) for size in SIZES]
        label = f"{100 * drop:.0f} points, {share:.0%}"
        rows.append((label, [100 * (1 - shown) for shown, _ in found]))
        hold.append((label, [100 * covers for _, covers in found]))
    names = list(map(_named, SIZES))
    return [
        Table("Coverage (%) of the mean over all runs where so many end so much lower:", names, hold, number),
        Table("Withheld (%) there:", names, rows, number),
    ]


def _covers_mean(world: World, number: int) -> tuple[float, float]:
    """The share of experiments with an interval, and the share of those that hold the mean over all runs."""
    mean = world.effect - world.lower * world.drop
    shown = [result.whole for result, _, _ in world.experiments(number) if not math.isnan(result.whole.low)]
    covers = float(np.mean([interval.contains(mean) for interval in shown])) if shown else math.nan
    return len(shown) / number, covers


def equivalence(number: int) -> list[Table]:
    """How often an effect is found to be within 5 points, by the size of the effect."""
    rows = []
    for effect in (0.0, 0.025, MARGIN):
        found = []
        for size in SIZES:
            results = World(*size, effect=effect).experiments(number)
            found.append(100 * float(np.mean([result.within(MARGIN) < ALPHA for result, _, _ in results])))
        rows.append((f"{100 * effect:g} points", found))
    return [Table("Found to be within 5 points (%), by the true effect:", list(map(_named, SIZES)), rows, number, 1)]


def harms(number: int) -> list[Table]:
    """How often another base comes out below what it was said to fall below with a chance of 10, 50 and 90%."""
    rows: dict[float, list[float]] = {0.1: [], 0.5: [], 0.9: []}
    for size in SIZES:
        rng = np.random.default_rng([1, *size])
        spread = SD * math.hypot(1, 1 / math.sqrt(size[1]))
        chances = [
            result.harm(-spread * float(rng.standard_normal()))
            for result, _, _ in World(*size, ratio=1).experiments(number)
        ]
        known = np.array([chance for chance in chances if not math.isnan(chance)])
        for share, below in rows.items():
            below.append(100 * float(np.mean(known < share)))
    named = [(f"{share:.0%}", below) for share, below in rows.items()]
    title = "Other bases (%) below the value that P(harm) puts such a chance below:"
    return [Table(title, list(map(_named, SIZES)), named, number, 1)]


def counts() -> list[Table]:
    """Exact: the coverage of the interval of a share of collapses, and the size of Barnard's test, by runs per arm."""
    runs = (3, 5, 8, 12, 16)
    covers, sizes = [], []
    for share in SHARES:
        held, wrong = [], []
        for of in runs:
            chances = stats.binom.pmf(np.arange(of + 1), of, share)
            every = [Count(number, of) for number in range(of + 1)]
            held.append(100 * sum(p for p, one in zip(chances, every) if one.bounds[0] <= share <= one.bounds[1]))
            pairs = itertools.product(zip(chances, every), repeat=2)
            wrong.append(100 * sum(p * q for (p, one), (q, other) in pairs if barnard(one, other) < ALPHA))
        covers.append((f"{share:.0%}", held))
        sizes.append((f"{share:.0%}", wrong))
    names = [str(of) for of in runs]
    return [
        Table("Coverage (%) of Clopper and Pearson's interval, by runs and true share (exact):", names, covers, 0, 1),
        Table(
            "p below .05 (%) by Barnard where both arms collapse so often (exact), by runs of each:", names, sizes, 0, 1
        ),
    ]


def detectable(number: int) -> list[Table]:
    """The smallest gain that is found in 80% of sweeps, and what collapses do to power."""
    sizes = ((4, 2), (4, 4), (6, 2), (6, 4))
    rows: list[Row] = []
    for share in (0.0, 0.1, 0.2):
        found = [
            smallest_effect_with_collapse(SD, SD, *size, collapse=share, level=LEVEL, trials=number) for size in sizes
        ]
        rows.append((f"{share:.0%} collapse", [100 * one for one in found]))
    rows.append(("formula", [100 * smallest_effect(SD, SD, *size) for size in sizes]))
    gains = Table(
        "Smallest gain (points) found in 80%, bases and seeds deviating by 3 points:",
        list(map(_named, sizes)), rows, number, 1,
    )  # fmt: skip
    by_chance, formula = [], []
    for size in sizes:
        runs, share = size[0] * size[1], 0.2
        world = World(*size, collapse=share)
        found = [result.p < ALPHA and result.sign < 0 for result, _, _ in world.experiments(number)]
        by_chance.append(100 * float(np.mean(found)))
        formula.append(100 * power_of_t(-share * LEVEL, math.sqrt(share * (1 - share)) * LEVEL, runs))
    ruined = Table(
        "Found (%) where one arm collapses at 20% (10 points on average) and nothing else differs:",
        list(map(_named, sizes)), [("simulated", by_chance), ("formula of t", formula)], number,
    )  # fmt: skip
    return [gains, ruined]


def tables(number: int) -> Iterator[Table]:
    """Every table of this docstring, from so many simulated sweeps for each number."""
    for made in (coverage, collapses, second_groups, equivalence, harms):
        yield from made(number)
    yield from counts()
    yield from detectable(number)


def docstring_tables() -> dict[str, list[list[float]]]:
    """The tables as they stand in this docstring: title -> rows of numbers, NaN for a dash."""
    found: dict[str, list[list[float]]] = {}
    blocks = (__doc__ or "").split("\n\n")
    for title, table in itertools.pairwise(blocks):
        lines = table.splitlines()
        if title.endswith(":") and all(line.startswith("    ") for line in lines):
            columns = len(lines[0].split())
            cells = [line.split()[-columns:] for line in lines[1:]]
            found[title] = [[math.nan if cell == "-" else float(cell) for cell in row] for row in cells]
    return found
