"""All pairs of arms at once: by hand, by scipy's studentized range, and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from interval_coverage.all_pairs import Sweep, rates, tables
from interval_coverage.differences import docstring_tables
from scipy import stats

from grpo_lab.analysis.stats import all_pairs as module
from grpo_lab.analysis.stats.all_pairs import AllPairs, compare_all_pairs

# The rest of the two-way model, e = .01: every arm and every base has 0 on average, every arm the same squares.
LATIN = 0.01 * np.array([[1, -1, 0], [-1, 0, 1], [0, 1, -1]])
BASES = {0: 7, 1: 8, 2: 9}


def latin(*arms: float) -> pd.DataFrame:
    """Three arms on three bases, one run each; bases add .1, .2 and .6."""
    values = np.array(arms) + np.array([[0.1], [0.2], [0.6]]) + LATIN
    return pd.DataFrame(values, columns=list("abc"), index=list(BASES))


def noise(arms: int, seed: int = 1) -> pd.DataFrame:
    """Eight runs on four bases of so many arms that are alike."""
    values = np.random.default_rng(seed).normal(0.5, 0.03, (8, arms))
    return pd.DataFrame(values, columns=[f"arm{index}" for index in range(arms)])


FOUR = {seed: seed % 4 for seed in range(8)}


def test_bars_by_hand() -> None:
    # v = 6 e^2 / 4 = 1.5e-4, and 2 e^2 * 3 / 2 / 2 of each arm alone; q(3, 4) = 5.0402: half = q / 2 sqrt(v / 3)
    found = compare_all_pairs(latin(0.0, 0.03, 0.1), BASES)
    assert (found.freedom, found.not_reported) == (4, {})
    assert found.quantile == pytest.approx(5.0402, abs=1e-4)
    assert found.halves == pytest.approx([5.0402 / 2 * math.sqrt(0.5e-4)] * 3, abs=1e-6)
    assert found.means == pytest.approx([0.3, 0.33, 0.4])
    # a bar is .0178 to either side: .03 is within two of them, .07 is not
    assert found.distinguishable.tolist() == [[0, 0, -1], [0, 0, -1], [1, 1, 0]]
    assert (found.number_distinguishable, found.pairs) == (2, 3)
    assert [found.ranks(arm) for arm in "abc"] == [(2, 3), (2, 3), (1, 1)]
    assert found.by_base == pytest.approx(found.means + LATIN)


def test_p_is_that_of_the_studentized_range() -> None:
    found = compare_all_pairs(latin(0.0, 0.03, 0.1), BASES)
    errors = math.sqrt(0.5e-4)
    for (row, column), difference in {(0, 1): 0.03, (0, 2): 0.1, (1, 2): 0.07}.items():
        exact = stats.studentized_range.sf(difference / errors, 3, 4)
        assert found.p[row, column] == found.p[column, row] == pytest.approx(exact, rel=0.01)
    assert np.diag(found.p).tolist() == [1, 1, 1]
    assert ((found.p < 0.05) == (found.distinguishable != 0)).all()


def test_a_base_counts_once_and_what_it_adds_to_all_arms_does_not() -> None:
    once = compare_all_pairs(latin(0.0, 0.03, 0.1), BASES)
    table = latin(0.0, 0.03, 0.1)
    twice = pd.concat([table, table.loc[[0]].set_axis([3])])
    again = compare_all_pairs(twice + 0.0, BASES | {3: 7})
    moved = compare_all_pairs(table.add(pd.Series({0: 0.3, 1: -0.1, 2: 0.0}), axis=0), BASES)
    for other in (again, moved):
        assert other.halves == pytest.approx(once.halves) and other.differences == pytest.approx(once.differences)


def test_an_arm_that_scatters_more_than_the_others_is_neither_above_nor_below() -> None:
    values = noise(10) + np.linspace(0, 0.5, 10)
    wide = np.repeat([[0.3, -0.3, 0.2, -0.2]], 2, axis=0).ravel()
    found = compare_all_pairs(values.assign(arm4=values["arm4"] + wide), FOUR)
    assert found.not_reported == {"arm4": "scatters more than the others between bases"}
    assert found.ranks("arm4") == (1, 10) and math.isnan(found.halves[4]) and (found.p[4] == 1).all()
    assert found.distinguishable[9, 0] == 1 and found.freedom == 8 * 3
    # nothing above it is surely above, so that the best of the others may have a rank more
    assert found.ranks("arm9")[0] == 1 and found.ranks("arm0")[1] == 10
    seeds = np.repeat([0.3, -0.3], 4)
    assert compare_all_pairs(values.assign(arm4=values["arm4"] + seeds), FOUR).not_reported == {
        "arm4": "scatters more than the others between seeds"
    }


def test_an_arm_has_a_wider_bar_where_it_scatters_a_little_more() -> None:
    values = noise(10)
    wide = 0.05 * np.repeat([[1, -1, 1, -1]], 2, axis=0).ravel()
    found = compare_all_pairs(values.assign(arm4=values["arm4"] + wide), FOUR)
    assert not found.not_reported and found.halves[4] == found.halves.max() > 1.3 * found.halves.min()


def test_what_the_caller_does_not_report_and_what_lacks_a_base_is_not_compared() -> None:
    values = noise(6)
    values.loc[[1, 5], "arm2"] = math.nan
    found = compare_all_pairs(values, FOUR, {"arm3": "collapsed runs in 1 of 8"})
    assert found.not_reported == {"arm2": "no run on base 1", "arm3": "collapsed runs in 1 of 8"}
    assert found.means[2] == pytest.approx(values.groupby(FOUR)["arm2"].mean().mean())
    alone = compare_all_pairs(values[["arm0", "arm1"]], FOUR, {"arm0": "x"})
    assert alone.not_reported == {"arm0": "x", "arm1": "no other arm is compared"} and alone.number_distinguishable == 0
    with pytest.raises(ValueError, match="one base"):
        compare_all_pairs(values, dict.fromkeys(FOUR, 0))


def test_equal_differences_on_all_bases_are_no_certainty() -> None:
    values = pd.DataFrame({"a": [0.1, 0.2], "b": [0.2, 0.3], "c": [0.4, 0.5]})
    found = compare_all_pairs(values, {0: 0, 1: 1})
    assert found.number_distinguishable == 0 and set(found.not_reported.values()) == {"no scatter between bases"}


def wrong(sweep: Sweep, number: int) -> float:
    return rates(sweep, number).wrong


@pytest.mark.extended
def test_few_sweeps_err_also_where_one_arm_is_unlike_the_others() -> None:
    """Of 60 sweeps 8 is what an error of .05 gives once in 100. Without the check 20 and 55 of 60 err."""
    assert wrong(Sweep(arms=31), 60) <= 8 / 60
    assert wrong(Sweep(arms=31, unlike=1, times=6), 60) <= 8 / 60
    assert wrong(Sweep(arms=31, unlike=1, half=True), 60) <= 8 / 60


def test_what_is_there_is_found() -> None:
    assert rates(Sweep(arms=31, spread=0.3), 20).found > 0.35
    result: AllPairs = next(iter(Sweep(arms=31, spread=0.3).experiments(1)))[0]
    assert max(best for best, _ in map(result.ranks, result.arms)) > 20


@pytest.mark.extended
def test_the_docstring_has_the_tables_of_the_trials() -> None:
    """Few sweeps each: a number agrees within five deviations of a share of so many, and half of its last digit."""
    number = 40
    written, made = docstring_tables(module.__doc__), list(tables(number))
    assert list(written) == [table.title for table in made]
    for table in made:
        for row, (label, values) in zip(written[table.title], table.rows, strict=True):
            for stands, found in zip(row, values, strict=True):
                share = min(max(stands / 100, 0.03), 0.97)
                room = 500 * math.sqrt(share * (1 - share) / number) + 0.5
                assert math.isnan(stands) == math.isnan(found), (table.title, label)
                assert math.isnan(found) or abs(stands - found) <= room, (table.title, label, stands, found)


def test_the_omnibus_test_is_that_of_two_nested_linear_models() -> None:
    """By least squares: with and without a column per arm, base models as blocks; effects shrunk towards their mean."""
    rng = np.random.default_rng(3)
    arms, bases, seeds = 7, 5, 2
    base = [number % bases for number in range(bases * seeds)]
    values = pd.DataFrame(
        {
            f"arm{arm}": [0.02 * arm + 0.1 * base[run] + 0.03 * rng.standard_normal() for run in range(bases * seeds)]
            for arm in range(arms)
        }
    )
    found = compare_all_pairs(values, dict(enumerate(base))).omnibus
    assert found is not None
    means = values.groupby(base).mean().to_numpy()
    y = means.ravel()
    blocks = np.kron(np.eye(bases), np.ones((arms, 1)))
    whole = np.hstack([blocks, np.kron(np.ones((bases, 1)), np.eye(arms)[:, 1:])])
    rss = [float(((y - x @ np.linalg.lstsq(x, y)[0]) ** 2).sum()) for x in (blocks, whole)]
    degrees = (arms - 1, (arms - 1) * (bases - 1))
    f = (rss[0] - rss[1]) / degrees[0] / (rss[1] / degrees[1])
    assert (found.f, found.degrees) == (pytest.approx(f), degrees)
    assert found.p == pytest.approx(float(stats.f.sf(f, *degrees))) and found.p < 0.01
    raw = means.mean(axis=0)
    shrunken = np.array(list(found.shrunken.values()))
    assert shrunken.mean() == pytest.approx(raw.mean()) and 0 < np.ptp(shrunken) < np.ptp(raw)
    # Without a true difference the estimates are one number.
    flat = compare_all_pairs(values.apply(lambda column: column - column.mean()), dict(enumerate(base))).omnibus
    assert flat is not None and flat.sd == 0.0 and np.ptp(list(flat.shrunken.values())) == pytest.approx(0)
