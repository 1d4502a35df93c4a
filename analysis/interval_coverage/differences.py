"""Simulated sweeps that hold `comparison` and `collapse` to what they say, and the tables of what came out.

`PYTHONPATH=analysis python -m interval_coverage` prints the tables again. These are of 4,000 simulated sweeps for each
number in the first six, of 1,000 in the others. A world has b bases of s seeds (`4x2`: four bases, two seeds each).
Runs of the control deviate by 3 points of accuracy from their level, and the difference of a pair by 3 points from the
base's effect; effects deviate between bases by 0, 1, 2 or 6 times that. Laws of both deviations: normal; heavy
(Student's t with 2.5 degrees); skewed (lognormal, a long tail on one side). Where a table names no law it is normal;
bases deviate by 1 times that in the tables on collapses and on P(harm), and not at all in the others.

Two things no handful of values shows, so their intervals are not withheld. Effects with a long tail on one side: a
sample without the tail looks like a tight normal one (the saved sweeps together show no tail: `skewness`). And a
fate that no run met: where one run in ten ends 30 points lower and is no collapse, sweeps without such a run show an
interval, which holds the mean of the other runs alone. So does one whose runs all met it on the same base. With one run
a base, bases that lie apart look like two groups.

Coverage (%) of the intervals shown, no collapse; law, deviation of bases:

                3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    normal, 0  94.8  94.5  94.7  94.7  94.7  94.8  94.8  94.9  94.9  94.9  95.3  95.2
    normal, 1  95.3  94.9  94.7  94.9  94.6  95.6  94.8  94.7  94.8  94.6  95.1  95.3
    normal, 2  95.1  95.2  95.2  94.2  94.6  95.1  94.2  95.5  94.7  94.3  95.1  95.5
    normal, 6  95.2  94.8  95.4  94.6  95.1  95.1  93.5  95.8  94.7  94.8  95.2  95.4
    heavy, 0   95.7  96.7  95.4  96.6  96.6  95.8  96.2  96.3  95.1  96.6  96.2  95.4
    heavy, 1   96.0  96.5  95.8  96.1  96.7  96.0  96.4  96.4  95.9  96.0  96.1  95.5
    heavy, 2   96.6  96.3  96.3  95.8  97.0  96.2  95.8  96.2  96.4  96.0  96.4  96.2
    heavy, 6   96.5  96.0  96.4  95.0  96.9  96.4  96.1  96.4  96.7  96.6  96.1  96.5
    skewed, 0  84.0  87.1  89.6  81.3  85.0  88.4  81.8  83.9  87.4  81.5  84.3  85.8
    skewed, 1  89.0  89.4  89.2  85.8  87.2  86.5  84.4  85.9  85.4  85.4  86.0  85.4
    skewed, 2  88.5  87.3  87.0  83.7  84.9  84.6  82.6  83.9  83.1  82.3  84.3  83.1
    skewed, 6  85.9  84.8  84.0  75.6  81.6  83.0  75.3  82.3  82.1  76.5  83.3  82.4

Withheld (%), since the runs looked like two groups:

                3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    normal, 0     0     1     0     0     1     1     0     3     1     0     4     1
    normal, 1     0     1     0     3     1     1     2     3     1     1     4     1
    normal, 2     0     1     0    14     1     1     9     3     1     6     4     1
    normal, 6     0     1     0    29     1     1    19     3     1    11     4     1
    heavy, 0      0     4     7     2     6     9     3     8    13     3    10    15
    heavy, 1      0     4     7     4     6     9     5     8    13     5    10    15
    heavy, 2      0     3     7     9     6     9    10     8    13    10    10    15
    heavy, 6      0     3     7    27     5     9    22     8    13    18    10    15
    skewed, 0     0     6    11     5     9    18     5    13    21     6    16    25
    skewed, 1     0     6    11     8    10    18     9    13    21     9    16    25
    skewed, 2     0     6    11    16    10    18    17    13    21    17    16    25
    skewed, 6     0     6    11    36     9    18    34    13    21    33    16    25

Coverage (%) of the intervals shown where one arm collapses so often:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%  95.3  95.1  94.9  95.0  95.1  95.5  94.7  95.2  94.8  94.2  95.2  95.3
    20%  94.7  95.0  94.8  95.0  95.4  95.6  94.7  95.0  94.6  94.7  94.8  94.7
    40%  94.1  94.3  94.9  95.3  95.3  95.6  94.8  95.1  94.9  94.8  94.7  95.7

Withheld (%) there, since too few pairs are left:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%    27     5     1     7     1     1     3     1     1     2     2     2
    20%    48    13     2    20     2     1     8     1     2     3     1     2
    40%    71    39     9    50    13     1    32     4     1    19     1     1

Coverage (%) there of t over all pairs, of the mean over all:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%    82    65    75    75    65    81    69    69    87    68    74    89
    20%    69    73    92    65    83    91    67    89    92    75    92    92
    40%    72    92    95    84    95    95    91    94    94    93    95    95

p below .05 (%) where both arms collapse so often and nothing else differs:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%   2.5   3.5   4.2   3.3   2.8   3.4   3.3   3.2   4.3   3.6   3.2   3.9
    20%   2.3   4.1   5.0   1.6   2.8   4.1   2.5   4.0   5.0   2.8   4.0   4.3
    40%   3.2   3.6   4.6   1.1   2.3   4.6   2.2   3.8   4.5   2.5   4.1   4.6

Coverage (%) of the mean over all runs where so many end so much lower:

                     3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    15 points, 10%    94    91    91    91    90    90    88    87    87    87    84    85
    15 points, 20%    90    87    90    82    86    89    78    85    92    79    85    93
    15 points, 40%    85    90    95    79    94    94    83    94    96    90    95    95
    30 points, 10%    87    72    54    72    58    30    54    39    11    47    25     0
    30 points, 20%    76    40    12    25    26     2     9    31     0    11    29     0
    30 points, 40%    74    61    43    13    82     0    16    88     -    39    94     -

Withheld (%) there:

                     3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    15 points, 10%     0    23    37    19    28    46    21    34    54    20    43    63
    15 points, 20%     0    34    42    32    39    52    36    42    58    33    53    66
    15 points, 40%     0    38    41    49    39    48    46    36    51    40    48    55
    30 points, 10%     0    45    71    33    53    80    39    61    88    46    70    91
    30 points, 20%     0    68    92    57    76    95    67    84    98    73    90   100
    30 points, 40%     0    85    99    84    90   100    89    94   100    93    97   100

Found to be within 5 points (%), by the true effect:

                 3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    0 points    39.0  70.8  93.6  66.1  92.2  99.5  84.3  96.2  99.3  93.3  95.9  98.7
    2.5 points  23.8  40.8  59.6  34.9  57.7  80.6  44.8  66.6  89.2  53.8  75.3  96.8
    5 points     4.7   6.8   4.9   5.5   5.0   5.0   4.7   4.7   5.8   5.2   5.6   4.6

Other bases (%) below the value that P(harm) puts such a chance below:

          3x1   3x2   3x4   4x1   4x2   4x4   5x1   5x2   5x4   6x1   6x2   6x4
    10%  10.5  10.3  10.2  10.0   9.9   9.5   8.7  11.3   9.4  11.1  10.5   9.9
    50%  46.4  50.9  49.3  49.4  47.5  50.3  47.4  48.3  49.9  50.6  50.1  49.8
    90%  87.8  89.8  90.2  90.1  89.0  92.5  89.1  89.5  90.0  91.6  89.3  88.7

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
    0% collapse    7.8   7.2   5.6   5.0
    10% collapse  14.2  11.8  10.7   9.8
    20% collapse  26.2  20.9  22.2  19.8
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
from grpo_lab.analysis.stats.intervals import Interval, t_interval
from grpo_lab.analysis.stats.multiplicity import ALPHA
from grpo_lab.analysis.stats.power import power_of_t
from interval_coverage.detectable import smallest_effect, smallest_effect_with_collapse

SIZES = tuple(itertools.product((3, 4, 5, 6), (1, 2, 4)))
LAWS: Mapping[str, Callable[[np.random.Generator, int | tuple[int, ...]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "heavy": lambda rng, shape: rng.standard_t(2.5, shape) / math.sqrt(5),
    "skewed": lambda rng, shape: (
        (np.exp(rng.standard_normal(shape)) - math.exp(0.5)) / math.sqrt((math.e - 1) * math.e)
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


def docstring_tables(text: str | None = __doc__) -> dict[str, list[list[float]]]:
    """The tables as they stand in a docstring, this one without another: title -> rows of numbers, NaN for a dash."""
    found: dict[str, list[list[float]]] = {}
    blocks = (text or "").strip().split("\n\n")
    for title, table in itertools.pairwise(blocks):
        lines = table.splitlines()
        if title.endswith(":") and all(line.startswith("    ") for line in lines):
            columns = len(lines[0].split())
            cells = [line.split()[-columns:] for line in lines[1:]]
            found[title] = [[math.nan if cell == "-" else float(cell) for cell in row] for row in cells]
    return found
