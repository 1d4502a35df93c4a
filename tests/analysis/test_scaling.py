"""The sigmoid in compute: hand numbers, planted curves, how often its intervals hold, and when it says nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.scaling import (
    OF_CURVE,
    OVER_SEEDS,
    ConditionFit,
    compare,
    fit_condition,
    fit_sweep,
    scaling_table,
)
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.sigmoid import (
    LEAST,
    Sigmoid,
    area,
    compute_to_reach,
    corrected_autocorrelation,
    extrapolate,
    fit_curve,
    last_slope,
    refusal,
)
from grpo_lab.tracking.sweep_record import SweepRecord

TRUE = Sigmoid(0.3, 0.65, 1.0, 1.7)  # compute in units of the midpoint


def evaluations(last: float, number: int = 40) -> np.ndarray:
    """Equally spaced computes up to `last` midpoints."""
    return last * np.arange(1, number + 1) / number


def noise(rng: np.random.Generator, rho: float, *shape: int) -> np.ndarray:
    """AR(1) along the last axis with sd 0.01."""
    steps = rng.standard_normal(shape)
    for at in range(1, shape[-1]):
        steps[..., at] = rho * steps[..., at - 1] + math.sqrt(1 - rho**2) * steps[..., at]
    return 0.01 * steps


def condition(curves: np.ndarray, compute: np.ndarray, **arguments: float | int) -> ConditionFit:
    """Rows of accuracies as the seeds of one arm, each with the start 0.3 at compute 0."""
    seeds = {seed: (np.append(0.0, compute), np.append(0.3, row)) for seed, row in enumerate(curves)}
    return fit_condition("", "arm", seeds, **arguments)


def test_the_formula_by_hand() -> None:
    sigmoid = Sigmoid(start=0.3, asymptote=0.7, midpoint=100.0, exponent=1.0)
    # At C_mid half of the rise: .3 + .4 / 2. At 3 C_mid: .3 + .4 / (1 + 1/3) = .3 + .4 * 3/4.
    assert sigmoid.at(np.array([100.0, 300.0])) == pytest.approx([0.5, 0.6], abs=1e-12)
    # With B = 2: .3 + .4 / (1 + 1/9) = .3 + .36.
    assert Sigmoid(0.3, 0.7, 100.0, 2.0).at(np.array([300.0])) == pytest.approx([0.66], abs=1e-12)


@pytest.mark.parametrize("unit", [1.0, 3e9])
@pytest.mark.parametrize("true", [TRUE, Sigmoid(0.2, 0.9, 0.3, 0.8), Sigmoid(0.3, 0.35, 0.5, 3.0)])
def test_a_curve_without_noise_is_found_again_in_any_unit(true: Sigmoid, unit: float) -> None:
    compute = evaluations(3.0, 12)
    found = fit_curve(compute * unit, true.at(compute), true.start).sigmoid
    assert found.asymptote == pytest.approx(true.asymptote, abs=1e-5)
    assert found.midpoint / unit == pytest.approx(true.midpoint, rel=1e-4)
    assert found.exponent == pytest.approx(true.exponent, rel=1e-4)


def test_given_b_and_c_mid_the_asymptote_is_the_projection() -> None:
    compute = evaluations(3.0, 15)
    accuracy = TRUE.at(compute) + noise(np.random.default_rng(0), 0.0, 15)
    found = fit_curve(compute, accuracy, 0.3).sigmoid
    share = 1 / (1 + (found.midpoint / compute) ** found.exponent)
    assert found.asymptote - 0.3 == pytest.approx(share @ (accuracy - 0.3) / (share @ share), abs=1e-9)


def test_points_below_the_cut_are_left_out() -> None:
    compute = evaluations(4.0, 20)
    accuracy = TRUE.at(compute) + 0.1 * (compute < 1)
    assert fit_curve(compute, accuracy, 0.3, first=1.0).sigmoid.asymptote == pytest.approx(0.65, abs=1e-4)
    assert abs(fit_curve(compute, accuracy, 0.3).sigmoid.asymptote - 0.65) > 0.005
    assert refusal(compute, accuracy, first=3.5) == "3 of the 5 evaluations a fit needs"


def test_autocorrelation_by_hand() -> None:
    # Products of neighbours 1 -1 1 -1 1 -1 1: r = 1/8; of one parameter (8/8 + 1) / (8 - 3) = .4.
    wave = np.array([1.0, 1, -1, -1, 1, 1, -1, -1])
    assert corrected_autocorrelation(wave, 1) == pytest.approx(0.4)
    assert corrected_autocorrelation(np.array([1.0, -1, 1, -1, 1, -1]), 1) == 0.0  # r = -5/6
    assert corrected_autocorrelation(wave[:3], 1) == 0.95  # nothing can be known
    assert corrected_autocorrelation(np.zeros(8), 1) == 0.0


def test_an_end_of_the_profile_is_where_the_sum_of_squares_meets_its_limit() -> None:
    compute = evaluations(3.0)
    fit = fit_curve(compute, TRUE.at(compute) + noise(np.random.default_rng(3), 0.3, 40), 0.3)
    rho, n = fit.autocorrelation, 40
    assert fit.effective_points == pytest.approx(n * (1 - rho) / (1 + rho))
    free = fit.effective_points - 3
    limit = float(fit.residuals @ fit.residuals) * (1 + stats.f.ppf(0.95, 1, free) / free)
    profile = fit.profile
    assert profile.asymptote.low < fit.sigmoid.asymptote < profile.asymptote.high < 1
    for end in (profile.asymptote.low, profile.asymptote.high):
        held = fit_curve(compute, fit.accuracy, 0.3, asymptote=end)
        assert held.sigmoid.asymptote == end
        assert float(held.residuals @ held.residuals) == pytest.approx(limit, rel=0.02)
    low, high = profile.band(np.array([1e6]))  # far out a sigmoid is its asymptote
    assert (low[0], high[0]) == pytest.approx((profile.asymptote.low, profile.asymptote.high), abs=0.01)
    for name in ("midpoint", "exponent"):
        assert getattr(profile, name).low < getattr(fit.sigmoid, name) < getattr(profile, name).high


def test_five_points_leave_one_curve_no_degrees_of_freedom() -> None:
    compute = evaluations(5.0, LEAST)
    fit = fit_curve(compute, TRUE.at(compute) + noise(np.random.default_rng(0), 0.0, LEAST), 0.3)
    assert fit.autocorrelation == 0.95 and (fit.profile.asymptote.low, fit.profile.asymptote.high) == (0.0, 1.0)


@pytest.mark.parametrize("number", [0, 1, LEAST - 1])
def test_too_few_evaluations_are_refused(number: int) -> None:
    compute = np.arange(number + 1.0)  # one of them at 0
    assert refusal(compute, compute / 10) == f"{number} of the 5 evaluations a fit needs"
    with pytest.raises(ValueError, match="evaluate more often"):
        fit_curve(compute, compute / 10, 0.0)


def test_a_curve_that_falls_at_its_end_is_refused() -> None:
    compute = evaluations(5.0, 20)
    fallen = TRUE.at(compute) - 0.05 * np.clip(compute - 3.3, 0, None)
    wobble = noise(np.random.default_rng(1), 0.5, 20)
    assert refusal(compute, fallen + wobble) == "the curve falls at its end"
    with pytest.raises(ValueError, match="falls at its end"):
        fit_curve(compute, fallen + wobble, 0.3)
    assert refusal(compute, TRUE.at(compute) + wobble) == ""
    # Slope by hand: the last three of six points, 1 less per unit of ln C.
    assert last_slope(np.exp(np.arange(6.0)), np.array([0.0, 5, 5, 4, 3, 2])) == pytest.approx(-1.0)


def test_a_fall_that_only_the_seeds_together_show_is_refused() -> None:
    compute = evaluations(5.0, 6)
    fallen = TRUE.at(compute) - 0.03 * np.clip(compute - 2.5, 0, None)
    curves = fallen + noise(np.random.default_rng(4), 0.0, 5, 6)
    assert not any(refusal(compute, curve, of=5) for curve in curves)
    assert condition(curves, compute).refused == "the curve falls at its end, over seeds"
    assert condition(curves[:1], compute).refused == ""


def test_false_alarms_of_falling_on_plateaus_stay_few() -> None:
    rng = np.random.default_rng(2)
    plateaus = 0.6 + noise(rng, 0.7, 200, 20)
    alarms = [bool(refusal(evaluations(5.0, 20), plateau)) for plateau in plateaus]
    assert np.mean(alarms) < 0.1  # 0.044 in 1,000


@pytest.mark.extended
def test_what_the_simulation_says_of_single_curves() -> None:
    """A small version of the table in sigmoid.py."""
    rng = np.random.default_rng(5)
    spread, covered, silent = {}, {}, {}
    for last, rho in ((1.0, 0.0), (5.0, 0.0), (5.0, 0.7)):
        compute = evaluations(last)
        curves = TRUE.at(compute) + noise(rng, rho, 30, 40)
        fits = [fit_curve(compute, curve, 0.3) for curve in curves if not refusal(compute, curve)]
        assert len(fits) >= 27
        profiles = [fit.profile.asymptote for fit in fits]
        spread[last, rho] = np.std([fit.sigmoid.asymptote for fit in fits], ddof=1)
        covered[last, rho] = np.mean([profile.low <= 0.65 <= profile.high for profile in profiles])
        silent[last, rho] = np.mean(
            [p.high >= 1 or last < 2 * fit.sigmoid.midpoint or bool(fit.edges) for p, fit in zip(profiles, fits)]
        )
    # In 1,000 curves: sd .134, .007, .014; coverage .96, .96, .94; silent 1.00, .00, .25.
    assert 0.08 < spread[1.0, 0.0] < 0.2 and spread[5.0, 0.0] < 0.01 < spread[5.0, 0.7] < 0.02
    assert min(covered.values()) >= 0.86
    assert silent[1.0, 0.0] >= 0.95 and silent[5.0, 0.0] == 0.0 and silent[5.0, 0.7] < 0.5


@pytest.mark.parametrize("seeds", [3, 5])
def test_the_interval_over_seeds_covers(seeds: int) -> None:
    rng, compute = np.random.default_rng(seeds), evaluations(5.0, 10)
    held = []
    for _ in range(30):
        fitted = condition(TRUE.at(compute) + noise(rng, 0.7, seeds, 10), compute)
        held.append(fitted.asymptote.low <= 0.65 <= fitted.asymptote.high)
        assert fitted.kind == OVER_SEEDS and fitted.asymptote.n == seeds
    assert np.mean(held) >= 0.86  # .95 in 1,000; two standard errors of 30 are .08


def planted(true: Sigmoid, last: float, seeds: int = 3, number: int = 12, seed: int = 0) -> ConditionFit:
    compute = evaluations(last, number)
    return condition(true.at(compute) + noise(np.random.default_rng(seed), 0.0, seeds, number), compute)


def test_an_asymptote_is_identified_only_with_reason() -> None:
    whole = planted(TRUE, 5.0)
    assert whole.identified and whole.reasons == () and whole.text().startswith("A = 0.6")
    early = planted(TRUE, 1.0)
    assert any("C_mid, before 2 C_mid" in reason for reason in early.reasons)
    assert "not identified" in early.text()
    flat = planted(Sigmoid(0.3, 0.301, 1.0, 1.7), 5.0)
    assert "the interval of A holds the start" in flat.reasons
    # Three curves that only begin to rise: some A reaches 1, and t spreads over it.
    begun = planted(Sigmoid(0.3, 0.9, 6.0, 1.7), 3.0, seed=1)
    assert begun.unbounded and "the interval of A reaches 1" in begun.reasons
    step = planted(Sigmoid(0.3, 0.65, 0.01, 5.0), 5.0)
    assert any("the rise" in reason for reason in step.reasons)  # it was over before the first evaluation
    few = planted(TRUE, 5.0, number=4)
    assert few.refused == "4 of the 5 evaluations a fit needs" and not few.identified and few.asymptote.n == 0


def test_one_or_two_seeds_have_the_interval_of_one_curve() -> None:
    one, two = planted(TRUE, 5.0, seeds=1, number=30), planted(TRUE, 5.0, seeds=2, number=30)
    for fitted in (one, two):
        assert fitted.kind == OF_CURVE and fitted.asymptote.n == 30 and fitted.identified
        assert fitted.asymptote.low < 0.65 < fitted.asymptote.high
    assert one.fits[None].accuracy == pytest.approx(one.curves[0][1][1:])
    both = (two.curves[0][1] + two.curves[1][1])[1:] / 2
    assert two.fits[None].accuracy == pytest.approx(both)


def test_one_seed_that_cannot_be_fitted_refuses_the_run() -> None:
    compute = evaluations(5.0, 20)
    curves = TRUE.at(compute) + noise(np.random.default_rng(0), 0.0, 3, 20)
    curves[1] -= 0.2 * np.clip(compute - 3.3, 0, None)
    assert condition(curves, compute).refused == "the curve falls at its end (1 of 3 seeds)"
    collapsed = condition(curves[[0, 2]], compute, collapsed=1, span=(1.0, 5.0), target=0.5)
    assert collapsed.refused == "1 of 3 runs collapsed"
    assert collapsed.area.n == 0 and collapsed.reach.n == 0 and len(collapsed.reached) == 2


def test_every_seed_has_its_own_start() -> None:
    """A start that seeds shared would move every A alike, and no interval over seeds would see it."""
    compute, starts = evaluations(3.0, 20), [0.28, 0.3, 0.32]
    truths = [Sigmoid(start, 0.65, 1.0, 1.7) for start in starts]
    curves = {
        seed: (np.append(0.0, compute), np.append(true.start, true.at(compute))) for seed, true in enumerate(truths)
    }
    fitted = fit_condition("", "arm", curves)
    assert [fit.sigmoid.start for fit in fitted.fits.values()] == starts and fitted.start == pytest.approx(0.3)
    assert [fit.sigmoid.asymptote for fit in fitted.fits.values()] == pytest.approx([0.65] * 3, abs=1e-5)
    assert fitted.extrapolation[1] < 1e-4


def test_a_run_without_its_start_is_an_error() -> None:
    with pytest.raises(ValueError, match="no evaluation at step 0"):
        fit_condition("", "arm", {0: (evaluations(5.0), TRUE.at(evaluations(5.0)))})


def test_a_run_that_spent_some_before_step_0_has_no_fit_and_says_why() -> None:
    """Fine-tuning on sampled answers: its first evaluation is of another model than the base, at another compute."""
    curve = (evaluations(5.0), TRUE.at(evaluations(5.0)))
    fitted = fit_condition("", "arm", dict.fromkeys(range(3), curve), spent_before=True)
    assert not fitted.fits and not fitted.identified
    assert any("step 0 comes after fine-tuning" in reason for reason in fitted.reasons)


def test_extrapolation_is_checked_on_what_was_held_back() -> None:
    compute = evaluations(4.0, 20)
    check = extrapolate(compute, TRUE.at(compute), 0.3)
    assert check is not None and check.compute.tolist() == compute[10:].tolist()
    assert np.abs(check.error).max() < 1e-4
    assert extrapolate(compute[::3], TRUE.at(compute[::3]), 0.3) is None  # 3 of 7 lie in the first half
    compute = evaluations(4.0)
    wobble = noise(np.random.default_rng(0), 0.0, 40) / 10
    check = extrapolate(compute, TRUE.at(compute) + wobble, 0.3)
    assert check is not None and check.inside.sum() >= 15
    bent = TRUE.at(compute) + wobble + np.where(compute > 2, 0.2, 0.0)
    check = extrapolate(compute, bent, 0.3)
    assert check is not None and check.error.mean() == pytest.approx(0.2, abs=0.02) and not check.inside.any()


def test_extrapolation_of_a_run_averages_its_seeds() -> None:
    compute = evaluations(4.0, 20)
    late = np.where(compute > 2, 1.0, 0.0)
    curves = np.array([TRUE.at(compute) + shift * late for shift in (0.06, 0.06, -0.03)])
    error, absolute, _ = condition(curves, compute).extrapolation
    # (.06 + .06 - .03) / 3 and (.06 + .06 + .03) / 3.
    assert (error.mean, error.n, absolute) == (pytest.approx(0.03, abs=1e-4), 3, pytest.approx(0.05, abs=1e-4))


def test_area_by_hand() -> None:
    e = math.e
    compute, accuracy = np.array([0.0, 1.0, e, e**2]), np.array([0.9, 0.0, 1.0, 1.0])
    # Over ln C from 0 to 2: a triangle of 1/2 and a square of 1, over 2. The point at 0 has no logarithm.
    assert area(compute, accuracy, 1.0, e**2) == pytest.approx(0.75)
    # From 1/2 to 3/2: a trapezoid from .5 to 1 of width 1/2, then 1/2: .375 + .5.
    assert area(compute, accuracy, e**0.5, e**1.5) == pytest.approx(0.875)
    assert math.isnan(area(compute, accuracy, 0.5, e)) and math.isnan(area(compute, accuracy, 1.0, e**3))


def test_compute_to_reach_by_hand() -> None:
    compute = np.array([0.0, 10.0, 1000.0, 2000.0, 4000.0])
    rise = np.array([0.1, 0.2, 0.4, 0.5, 0.6])
    assert compute_to_reach(compute, rise, 0.3) == pytest.approx(100.0)  # halfway in ln C
    assert compute_to_reach(compute, rise, 0.15) == 10.0  # there at the first evaluation
    assert compute_to_reach(compute, rise, 0.55) is None  # the last evaluation alone
    assert compute_to_reach(compute, rise, 0.7) is None
    bump = np.array([0.1, 0.2, 0.4, 0.2, 0.4])
    assert compute_to_reach(compute, bump, 0.3) is None  # not sustained
    assert compute_to_reach(np.append(compute, 8000.0), np.append(bump, 0.5), 0.3) == pytest.approx(
        math.exp((math.log(2000) + math.log(4000)) / 2)
    )


def sweep(
    arms: Mapping[str, Sigmoid], seeds: Sequence[int] = (0, 1, 2), number: int = 20, levels: Sequence[str] = ("",)
) -> SweepData:
    """Runs of up to 4 million tokens, a little more for later seeds, with sd .005 around each arm's sigmoid."""
    runs, points = [], []
    for level in levels:
        for arm, true in arms.items():
            for seed in seeds:
                labels = {"level": level, "arm": arm, "seed": seed}
                runs.append(labels | {"status": "done", "collapsed": False})
                compute = 4e6 * (1 + 0.01 * seed) * np.arange(1, number + 1) / number
                steps = np.random.default_rng([seed, len(arm)]).standard_normal(number)
                values = [true.start, *(true.at(compute) + 0.005 * steps)]
                points += [
                    labels | {"step": step, "budget/sampled_tokens": x, "eval/heldout/accuracy": value}
                    for step, (x, value) in enumerate(zip([0.0, *compute], values))
                ]
    record = SweepRecord("planted", "key", None, [{"fingerprint": ""}], ["sweep"], None, None, [])
    answers = pd.DataFrame(columns=["level", "arm", "seed", "step", "suite", "question", "difficulty", "n", "correct"])
    return SweepData(
        record=record,
        design=None,
        runs=pd.DataFrame(runs),
        points=pd.DataFrame(points),
        answers=answers,
        source="planted",
    )


SLOW, FAST = Sigmoid(0.3, 0.65, 1e6, 1.7), Sigmoid(0.3, 0.65, 5e5, 1.7)
HIGH, STEEP = Sigmoid(0.3, 0.75, 1e6, 1.7), Sigmoid(0.3, 0.65, 1e6, 3.0)


def test_a_sweep_finds_what_was_planted_in_every_arm() -> None:
    data = sweep({"slow": SLOW, "high": HIGH, "fast": FAST})
    conditions = fit_sweep(data, final_values(data))
    table = scaling_table(conditions).set_index("arm")
    assert table["identified"].all() and set(table["kind"]) == {OVER_SEEDS} and set(table["evaluations"]) == {20}
    for arm, true in {"slow": SLOW, "high": HIGH, "fast": FAST}.items():
        row = table.loc[arm]
        assert row["asymptote"] == pytest.approx(true.asymptote, abs=0.01)
        assert row["asymptote_low"] < row["asymptote"] < row["asymptote_high"]
        assert row["midpoint"] == pytest.approx(true.midpoint, rel=0.05)
        assert row["exponent"] == pytest.approx(true.exponent, rel=0.1)
        assert abs(row["extrapolation_error"]) < 0.06 and row["extrapolation_absolute"] < 0.06
        assert row["n"] == row["reached"] == 3 and row["n_collapsed"] == 0
    # Start plus 90% of the gain of the first arm at 4e6 = 4 C_mid: .3 + .9 * .35 / (1 + 4^-1.7) = .5878.
    assert table["target"].tolist() == pytest.approx([0.5878] * 3, abs=0.005)
    # Of 0.8222 of the rise: (C_mid / C)^1.7 = 1 / .8222 - 1 = .2162, so C = C_mid * .2162^(-1 / 1.7) = 2.462 C_mid.
    assert table.loc["slow", "reach"] == pytest.approx(2.462e6, rel=0.06)
    assert table.loc["fast", "reach"] == pytest.approx(1.231e6, rel=0.06)
    assert table.loc["fast", "area_low"] > table.loc["slow", "area_high"]


def test_span_target_and_suite_are_those_of_the_level() -> None:
    data = sweep({"slow": SLOW}, levels=("one", "two"))
    finals = final_values(data)
    conditions = fit_sweep(data, finals, target=0.4, first=5e5)
    assert [(one.level, one.target) for one in conditions] == [("one", 0.4), ("two", 0.4)]
    assert conditions[0].span == pytest.approx((1.02 * 4e6 / 20, 4e6))  # seed 2 starts last, seed 0 ends first
    # 2e5, 4e5 are cut; the model-free numbers keep them.
    assert [len(fit.compute) for fit in conditions[0].fits.values()] == [18] * 3 and conditions[0].evaluations == 20
    assert fit_sweep(data, finals, suite="downstream") == []


def test_runs_that_collapsed_leave_their_arm_unfitted() -> None:
    data = sweep({"slow": SLOW, "high": HIGH})
    bad = (data.runs["arm"] == "high") & (data.runs["seed"] == 1)
    data.runs.loc[bad, ["status", "collapsed"]] = ["failed", True]
    slow, high = fit_sweep(data, final_values(data))
    assert slow.identified and high.refused == "1 of 3 runs collapsed" and high.area.n == 0
    row = scaling_table([high]).iloc[0]
    assert (row["n"], row["n_collapsed"], row["identified"]) == (2, 1, False) and np.isnan(row["asymptote"])


def test_arms_are_compared_by_a_first_and_by_b_where_a_agrees() -> None:
    data = sweep({"slow": SLOW, "high": HIGH, "steep": STEEP})
    slow, high, steep = fit_sweep(data, final_values(data))
    apart = compare(high, slow)
    assert apart.asymptote.low > 0.05 and apart.exponent.n == 0 and "they differ" in apart.text()
    alike = compare(steep, slow)
    assert alike.asymptote.low <= 0 <= alike.asymptote.high and alike.shared == pytest.approx(0.65, abs=0.01)
    assert alike.exponent.mean == pytest.approx(1.3, abs=0.2) and alike.exponent.low > 0
    assert "B differs by +1." in alike.text()
    early = planted(TRUE, 1.0)
    assert "cannot be compared: arm: " in compare(early, slow).text()
    lonely = sweep({"slow": SLOW, "steep": STEEP}, seeds=(0,), number=40)
    assert compare(*fit_sweep(lonely, final_values(lonely))).reason == "they share 0 fitted seeds, 3 are needed"
