"""Intervals, resampling, multiplicity and power: hand numbers, other people's numbers, and measured coverage."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from notebook_tables.noise_statistics import (
    crossed_t_interval,
    questions_needed,
    sd_interval,
    seeds_needed,
    standard_error,
)
from scipy import integrate, stats

from grpo_lab.analysis.stats.intervals import (
    Interval,
    seed_differences,
    t_interval,
)
from grpo_lab.analysis.stats.multiplicity import benjamini_hochberg, holm, paired_t_pvalue
from grpo_lab.analysis.stats.power import (
    difference_sd,
    minimum_detectable_effect,
    power_of_t,
)
from grpo_lab.analysis.stats.resampling import (
    crossed_bootstrap,
    crossed_indices,
    percentile_interval,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "statistics.json").read_text())
SAME = 1e-10
CHANCE = 1e-6  # of a noncentral t


def rng_of(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def answers(rng: np.random.Generator, experiments: int, seeds: int, questions: int) -> tuple[np.ndarray, np.ndarray]:
    """Right or wrong [experiments, seeds, questions] and each question's difficulty [experiments, questions].

    Difficulties are uniform in .2 to .8, so the population's mean is .5; seeds deviate by 2 pp, and by as much again
    on each question; so no rate leaves 0 to 1.
    """
    difficulty = rng.uniform(0.2, 0.8, (experiments, questions))
    luck = 0.02 * rng.standard_normal((experiments, seeds, 1))
    rates = difficulty[:, None] + luck + 0.02 * rng.standard_normal((experiments, seeds, questions))
    return (rng.random(rates.shape) < rates).astype(float), difficulty


def assert_covers(hits: list[bool], low: float, high: float) -> None:
    """The share lies in [low, high], which the caller sets four binomial deviations wide or more."""
    share = float(np.mean(hits))
    assert low <= share <= high, f"covers {share:.1%} of {len(hits)}, expected {low:.0%} to {high:.0%}"


# --- intervals over seeds -----------------------------------------------------------------------------------


def test_the_t_interval_by_hand() -> None:
    # .5, .6, .7: mean .6, deviation .1, error .1 / sqrt 3 = .057735; t of 2 degrees at .975 is 4.302653
    interval = t_interval([0.5, 0.6, 0.7])
    assert interval.mean == pytest.approx(0.6, abs=SAME)
    half = 4.302653 * 0.057735
    assert (interval.low, interval.high) == pytest.approx((0.6 - half, 0.6 + half), abs=1e-6)
    assert (interval.n, interval.contains(0.5), interval.contains(0.9)) == (3, True, False)


def test_nothing_is_excluded_without_bounds() -> None:
    one, none = t_interval([0.5]), t_interval([])
    assert (one.mean, one.n, one.text()) == (0.5, 1, "0.500") and math.isnan(one.low) and math.isnan(one.high)
    assert none.n == 0 and math.isnan(none.mean) and none.text() == "-"
    assert t_interval([0.5]).contains(7.0)
    assert t_interval([]).contains(0.0)
    bounded = Interval(1.0, 0.0, 2.0, 3)
    assert [bounded.contains(value) for value in (-0.001, 0, 2, 2.001)] == [False, True, True, False]


def test_the_interval_of_a_share_stays_within_0_and_1() -> None:
    wide = t_interval([0.1, 0.9, 0.9])
    assert wide.low < 0 and wide.high > 1
    assert wide.within(0.0, 1.0) == Interval(wide.mean, 0.0, 1.0, 3)
    assert t_interval([0.4, 0.5, 0.6]).within(0.0, 1.0) == t_interval([0.4, 0.5, 0.6])
    assert math.isnan(t_interval([0.5]).within(0.0, 1.0).low)


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_t_interval_over_seeds_covers(seeds: int) -> None:
    """Of an arm and of a difference paired by seed, on the same questions: 93% to 97% of 6,000 experiments.

    The binomial deviation at 95% is sqrt(.95 * .05 / 6000) = .28 pp, so the band is seven of them on each side.
    """
    rng = rng_of(1, seeds)
    control, difficulty = answers(rng, 6000, seeds, 64)
    treated = (rng.random(control.shape) < difficulty[:, None] + 0.05).astype(float)
    truths = {"arm": difficulty.mean(axis=1) + 0.05, "difference": np.full(6000, 0.05)}
    values = {"arm": treated.mean(axis=2), "difference": treated.mean(axis=2) - control.mean(axis=2)}
    for name, rows in values.items():
        half = stats.t.ppf(0.975, seeds - 1) * rows.std(axis=1, ddof=1) / math.sqrt(seeds)
        hits = np.abs(rows.mean(axis=1) - truths[name]) <= half
        assert_covers(hits.tolist(), 0.93, 0.97)
        for row, truth, hit in zip(rows[:50].tolist(), truths[name], hits):  # the same intervals, by the package
            assert t_interval(row).contains(float(truth)) == hit


def test_a_difference_is_paired_by_seed() -> None:
    # seeds 1 to 3 are in both: .7 - .5, .5 - .4, .9 - .6, in whatever order; mean .2, deviation .1, error .1 / sqrt 3
    treated, control = pd.Series({2: 0.5, 1: 0.7, 3: 0.9}), pd.Series({0: 0.1, 1: 0.5, 2: 0.4, 3: 0.6})
    interval = t_interval(seed_differences(treated, control).tolist())
    assert (interval.mean, interval.n) == (pytest.approx(0.2, abs=SAME), 3)
    assert interval.high - 0.2 == pytest.approx(0.1 / math.sqrt(3) * 4.302653, abs=1e-5)
    assert seed_differences(treated, control).index.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("seeds", "about"), [(3, 0.76), (5, 0.84)])
def test_a_percentile_bootstrap_over_few_seeds_does_not_cover(seeds: int, about: float) -> None:
    """Why seeds get a t interval. Five binomial deviations of 800 are 7.5 pp at 76%, 6.5 pp at 84%."""
    values, rng, hits = rng_of(2, seeds).standard_normal((800, seeds)), rng_of(3), []
    for row in values:
        means = row[rng.integers(0, seeds, (400, seeds))].mean(axis=1)
        hits.append(percentile_interval(float(row.mean()), means, seeds).contains(0.0))
    assert_covers(hits, about - 0.075, about + 0.075)


# --- other seeds and other questions ------------------------------------------------------------------------


def test_the_crossed_t_interval_by_hand() -> None:
    # mean 3; seeds' means 1, 5, 3: MS = 3 * (4 + 4) / 2 = 12; questions' means 2, 3, 4: MS = 3 * (1 + 0 + 1) / 2 = 3;
    # rest = values - seed - question + mean: +1, 0, -1 and -1, 0, 1 and 0: MS = 4 / 4 = 1. Variance (12 + 3 - 1) / 9;
    # degrees 14^2 / (12^2 / 2 + 3^2 / 2 + 1^2 / 4) = 196 / 76.75
    interval = crossed_t_interval(np.array([[1.0, 1.0, 1.0], [3.0, 5.0, 7.0], [2.0, 3.0, 4.0]]))
    assert (interval.mean, interval.n) == (3.0, 3)
    assert interval.high - 3 == pytest.approx(stats.t.ppf(0.975, 196 / 76.75) * math.sqrt(14 / 9), abs=1e-9)
    assert interval.high + interval.low == pytest.approx(6, abs=SAME)


def test_the_crossed_variance_never_falls_below_its_parts() -> None:
    # means of seeds and of questions are all .5, rest 0 or +-.5: MS 0, 0 and 1.5 / 4, whose sum 0 + 0 - .375 is no
    # variance: .375 / 9 instead, 4 degrees, t = 2.776445
    interval = crossed_t_interval(np.array([[0.0, 0.5, 1.0], [0.5, 1.0, 0.0], [1.0, 0.0, 0.5]]))
    assert interval.high - 0.5 == pytest.approx(math.sqrt(0.375 / 9) * 2.776445, abs=1e-5)
    assert crossed_t_interval(np.ones((3, 4))) == Interval(1.0, 1.0, 1.0, 3)


@pytest.mark.parametrize("case", GOLDEN["crossed"], ids=["3 seeds", "5 seeds"])
def test_the_crossed_t_interval_against_an_analysis_of_variance(case) -> None:
    values = np.array(case["values"])
    squares, (seeds, questions) = np.array(case["mean_squares"]), values.shape
    freedom = np.array([seeds - 1, questions - 1, (seeds - 1) * (questions - 1)])
    variance = squares[0] + squares[1] - squares[2]
    degrees = variance**2 / (squares**2 / freedom).sum()
    half = stats.t.ppf(0.975, degrees) * math.sqrt(variance / values.size)
    interval = crossed_t_interval(values)
    assert interval.high - interval.mean == pytest.approx(half, abs=SAME)


def test_one_seed_says_nothing_of_other_seeds() -> None:
    values = rng_of(4).random((1, 30))
    for interval in (crossed_t_interval(values), crossed_bootstrap(values, rng_of(4), 10)):
        assert interval.n == 1 and math.isnan(interval.low) and math.isnan(interval.high)


@pytest.mark.parametrize("shape", [(3,), (0, 5), (3, 1)])
def test_what_is_no_table_of_seeds_and_questions_is_refused(shape: tuple[int, ...]) -> None:
    for make in (crossed_t_interval, lambda values: crossed_bootstrap(values, rng_of(0))):
        with pytest.raises(ValueError, match="one row per seed, at least two questions"):
            make(np.zeros(shape))


def test_a_question_that_a_seed_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="keep the questions that every seed answered"):
        crossed_t_interval(np.array([[1.0, 0.0], [np.nan, 1.0]]))


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_crossed_t_interval_covers_other_seeds_and_questions(seeds: int) -> None:
    """95% less four binomial deviations of 800 (.8 pp) or more; the seeds' own t interval is about these questions."""
    values, _ = answers(rng_of(5, seeds), 800, seeds, 64)
    assert_covers([crossed_t_interval(table).contains(0.5) for table in values], 0.92, 0.99)
    if seeds == 10:
        assert_covers([t_interval(table.mean(axis=1).tolist()).contains(0.5) for table in values], 0.6, 0.85)


def test_crossed_resamples_give_every_seed_the_same_questions() -> None:
    seeds, questions = crossed_indices(4, 30, rng_of(6), 50)
    assert seeds.shape == (50, 4) and questions.shape == (50, 30)
    assert {seeds.min(), seeds.max(), questions.min(), questions.max()} == {0, 3, 29}
    values = rng_of(7).random((4, 30))
    direct = [values[np.ix_(drawn, asked)].mean() for drawn, asked in zip(seeds, questions)]
    expected = percentile_interval(float(values.mean()), np.array(direct), 4)
    got = crossed_bootstrap(values, rng_of(6), 50)
    assert got.n == 4 and got.mean == expected.mean
    assert [got.low, got.high] == pytest.approx([expected.low, expected.high], abs=SAME)


def test_blocks_of_repetitions_change_nothing() -> None:
    values = rng_of(8).random((3, 7))
    seeds, questions = crossed_indices(3, 7, rng_of(9), 2300)
    direct = np.array([values[np.ix_(drawn, asked)].mean() for drawn, asked in zip(seeds, questions)])
    got = crossed_bootstrap(values, rng_of(9), 2300)
    assert [got.low, got.high] == pytest.approx(np.quantile(direct, [0.025, 0.975]).tolist(), abs=SAME)


def test_the_crossed_bootstrap_covers_no_less_than_nominal_with_few_questions() -> None:
    """It counts the noise of single answers three times, which outweighs too few seeds (measured: 97%)."""
    values, _ = answers(rng_of(10), 400, 5, 64)
    assert_covers(
        [crossed_bootstrap(table, rng_of(11, i), 400).contains(0.5) for i, table in enumerate(values)], 0.92, 1
    )


# --- questions ----------------------------------------------------------------------------------------------


def test_the_same_generator_gives_the_same_bits() -> None:
    values = rng_of(15).random((5, 40))
    first, again, other = (crossed_bootstrap(values, rng_of(seed), 300) for seed in (16, 16, 17))
    assert first == again != other


def test_standard_errors_by_hand() -> None:
    # 0, 0, 1, 1: deviations +-.5, sum of squares 1; 1 / (4 * 3) = 1/12
    assert standard_error([0.0, 0.0, 1.0, 1.0]) == pytest.approx(math.sqrt(1 / 12), abs=SAME)
    assert math.isnan(standard_error([1.0]))


@pytest.mark.parametrize("case", GOLDEN["clustered"], ids=["equal clusters", "unequal clusters"])
def test_the_standard_error_is_that_of_a_regression_on_a_constant(case) -> None:
    assert standard_error(case["values"]) == pytest.approx(case["standard_error"], abs=SAME)


def test_an_undefined_replicate_leaves_no_bounds() -> None:
    interval = percentile_interval(0.5, np.array([0.4, np.nan, 0.6]), 3)
    assert interval.mean == 0.5 and math.isnan(interval.low) and math.isnan(interval.high)


# --- many comparisons --------------------------------------------------------------------------------------


def test_the_paired_p_agrees_with_the_interval_and_with_scipy() -> None:
    for i in range(40):
        differences = rng_of(24, i).normal(0.8, 1, 5)
        p = paired_t_pvalue(differences)
        assert p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue, abs=SAME)
        assert (p < 0.05) == (not t_interval(differences.tolist()).contains(0))
    assert paired_t_pvalue([0.0, 0.0]) == 1.0
    # Without scatter t would say 0; of the signs of n equal differences, 2 of 2^n patterns are as far from 0.
    assert [paired_t_pvalue([0.5] * n) for n in (2, 3, 6)] == [0.5, 0.25, 0.03125]
    assert paired_t_pvalue([0.1 + 0.2, 0.3, 0.3]) == 0.25  # 0.30000000000000004 is rounding, not scatter
    assert math.isnan(paired_t_pvalue([0.3]))


@pytest.mark.parametrize("case", GOLDEN["adjusted"], ids=lambda case: f"{len(case['p'])} tests")
def test_adjusted_p_values_are_those_of_statsmodels(case) -> None:
    assert holm(case["p"]).tolist() == pytest.approx(case["holm"], abs=SAME)
    assert benjamini_hochberg(case["p"]).tolist() == pytest.approx(case["benjamini_hochberg"], abs=SAME)


def test_adjusted_p_values_by_hand() -> None:
    # sorted .01, .02, .03, .04 times 4, 3, 2, 1 = .04, .06, .06, .04, the last raised to the one before
    assert holm([0.04, 0.01, 0.03, 0.02]).tolist() == pytest.approx([0.06, 0.04, 0.06, 0.06], abs=SAME)
    # times 4/1, 4/2, 4/3, 4/4 = .04 each
    assert benjamini_hochberg([0.04, 0.01, 0.03, 0.02]).tolist() == pytest.approx([0.04] * 4, abs=SAME)
    # two predictions with two hypotheses each, of which one is false: no more than 2 are true together
    assert holm([0.01, 0.02, 0.03, 0.04], 2).tolist() == pytest.approx([0.02, 0.04, 0.06, 0.06], abs=SAME)
    assert holm([]).size == benjamini_hochberg([]).size == 0
    for adjust, wrong in product((holm, benjamini_hochberg), ([0.1, 1.2], [math.nan], [-0.1])):
        with pytest.raises(ValueError, match="no p-value"):
            adjust(wrong)


def test_what_is_declared_against_a_shared_control_is_rarely_found_by_chance() -> None:
    """Four arms that do nothing: one or more findings in 5% of sweeps or fewer; 600 sweeps, deviation .9 pp."""
    found: dict[str, list[bool]] = {"none": [], "holm": []}
    for i in range(600):
        scores = rng_of(33, i).standard_normal((7, 5))
        differences = scores[:, 1:] - scores[:, :1]
        p = [paired_t_pvalue(column) for column in differences.T]
        found["none"].append(min(p) < 0.05)
        found["holm"].append(holm(p).min() < 0.05)
    assert np.mean(found["none"]) > 0.1
    assert np.mean(found["holm"]) < 0.08


# --- power --------------------------------------------------------------------------------------------------


def power_by_integration(effect: float, n: int, paired: bool, alpha: float) -> float:
    """P(|T| > critical) by integrating the normal's tails over the chi distribution of the estimated deviation."""
    freedom = n - 1 if paired else 2 * n - 2
    distance, critical = effect * math.sqrt(n if paired else n / 2), stats.t.ppf(1 - alpha / 2, freedom)

    def tails(deviation: float) -> float:
        ratio = critical * deviation / math.sqrt(freedom)
        found = stats.norm.sf(ratio - distance) + stats.norm.cdf(-ratio - distance)
        return found * stats.chi.pdf(deviation, freedom)

    return integrate.quad(tails, 0, math.inf, epsabs=1e-11, limit=200)[0]


def test_power_is_that_of_statsmodels() -> None:
    for case in GOLDEN["power"]:
        got = power_of_t(case["effect"], 1.0, case["n"], case["paired"], case["alpha"])
        assert got == pytest.approx(case["power"], abs=CHANCE), case


@pytest.mark.parametrize(
    ("effect", "n", "paired", "alpha"),
    [(1.0, 3, True, 0.05), (2.0, 5, False, 0.01), (2.0, 30, True, 0.05), (2.0, 30, False, 0.01), (0.0, 4, True, 0.05)],
)
def test_power_against_an_integral(effect: float, n: int, paired: bool, alpha: float) -> None:
    """Two of these are NaN in statsmodels."""
    assert power_of_t(effect, 1.0, n, paired, alpha) == pytest.approx(
        power_by_integration(effect, n, paired, alpha), abs=CHANCE
    )


def test_power_of_any_sign_scale_and_size() -> None:
    assert power_of_t(0, 1.0, 7) == pytest.approx(0.05, abs=CHANCE)
    assert power_of_t(-0.02, 0.01, 5) == pytest.approx(power_of_t(2, 1, 5), abs=SAME)
    chances = [power_of_t(0.1 * effect, 1.0, n) for n in (2, 5, 30) for effect in range(0, 400, 7)]
    assert all(0 < chance <= 1 for chance in chances)
    for n, sd in ((1, 1.0), (5, 0.0)):
        with pytest.raises(ValueError, match="2 seeds or more, and a deviation above 0"):
            power_of_t(1.0, sd, n)


def test_sizes_and_effects_are_those_of_statsmodels() -> None:
    for case in GOLDEN["sizes"]:
        assert seeds_needed(case["effect"], 1.0, paired=case["paired"]) == math.ceil(case["n"]), case
    for case in GOLDEN["detectable"]:
        got = minimum_detectable_effect(1.0, case["n"], paired=case["paired"])
        assert got == pytest.approx(case["effect"], abs=1e-5), case


def test_a_detectable_effect_has_the_power_asked_for() -> None:
    for n, power, paired in product((2, 5, 10), (0.5, 0.8, 0.95), (True, False)):
        effect = minimum_detectable_effect(0.02, n, power, 0.05, paired)
        assert power_of_t(effect, 0.02, n, paired) == pytest.approx(power, abs=CHANCE)


def test_the_simulated_power_of_the_interval_that_is_reported() -> None:
    """5 seeds, effect 2, deviation sqrt 2: the 95% t interval excludes 0 as often as planned; deviation 1.5 pp."""
    values = rng_of(34).normal(2, math.sqrt(2), (1000, 5))
    found = np.mean([not t_interval(row.tolist()).contains(0) for row in values])
    assert found == pytest.approx(power_of_t(2, math.sqrt(2), 5), abs=0.06)


def test_pairing_by_hand() -> None:
    assert difference_sd(1, 0.5) == pytest.approx(1, abs=SAME)
    assert difference_sd(2.0, 0) == pytest.approx(2 * math.sqrt(2), abs=SAME)
    with pytest.raises(ValueError, match="below 1"):
        difference_sd(1.0, 1)


def test_questions_for_two_points() -> None:
    """Difficulty uniform: rates have the variance 1/12, an answer 1/6; two runs whose rates correlate .8 over
    questions differ by omega^2 = 2/12 (1 - .8) = 1/30. (1.959964 + .841621)^2 = 7.848880.
    """
    # 7.84888 (1/30 + 2/6/4) / .0004 = 2289.3; with 16 answers 1062.9; unpaired, one answer: 7.84888 / 2 / .0004
    # = 9811.1
    assert questions_needed(0.02, 1 / 30 + 2 / 24) == 2290
    assert questions_needed(0.02, 1 / 30 + 2 / 96) == 1063
    assert questions_needed(0.03, 1 / 30 + 2 / 24) == 1018
    assert questions_needed(0.02, 1 / 6 + 2 / 6) == 9812
    # the two runs enter alike, each with its own number of answers: 7.84888 (1/6 + 1/12) / .01 = 196.2
    assert questions_needed(-0.1, 1 / 6 + 1 / 12) == questions_needed(0.1, 1 / 6 + 1 / 12) == 197


@pytest.mark.parametrize(
    ("ask", "remedy"),
    [
        (lambda: questions_needed(0, 0.1), "smallest effect that matters"),
        (lambda: seeds_needed(0, 1.0), "look for a larger one"),
        (lambda: minimum_detectable_effect(1.0, 5, power=0.01), "0 < alpha < power < 1"),
    ],
)
def test_what_cannot_be_planned_is_refused(ask: Callable[[], object], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        ask()


def test_how_little_a_pilot_of_three_seeds_says() -> None:
    # chi-square of 2 degrees is -2 ln(1 - p): quantiles .050636 and 7.377759; 1 sqrt(2 / q) = .5207 and 6.2847
    interval = sd_interval(1, 3)
    assert [interval.low, interval.high] == pytest.approx([0.52066, 6.28476], abs=1e-4)
    assert math.isnan(sd_interval(1.0, 1).high)
    deviations = rng_of(35).standard_normal((1500, 5)).std(axis=1, ddof=1)
    assert_covers([sd_interval(float(sd), 5).contains(1) for sd in deviations], 0.925, 0.975)


def test_intervals_of_small_numbers_keep_their_digits() -> None:
    assert Interval(0.001234, -0.00005, 0.0015, 5).text("+") == "+0.0012 [-5e-05, +0.0015]"
    assert Interval(0.0012, -0.01, 0.0124, 5).text() == "0.001 [-0.010, 0.012]"
    assert Interval(0.0, 0.0, 0.0, 5).text() == "0.000", "an interval without width says no more"
