"""How many seeds and base models a design needs: the predicted power is what the lab's own decision finds."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from notebook_tables.noise_statistics import seeds_needed
from planted_sweeps import Planted, synthetic_sweep
from scipy import stats

from grpo_lab.analysis.effects.planning import (
    Question,
    cheapest,
    measure_pilot,
    needed,
    power_text,
    simulated_power,
    sizes,
    with_predictions,
)
from grpo_lab.analysis.final_values import DOWNSTREAM, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.components import Scatter, components, pooled_scatter
from grpo_lab.analysis.stats.multiplicity import ALPHA
from grpo_lab.analysis.stats.power import fewest, power_of_t, power_within
from grpo_lab.config.design import Design, named_design, read_design

NODE = {
    "name": "planned",
    "question": "Does it?",
    "prediction": "It does.",
    "control": "plain",
    "primary": DOWNSTREAM,
    "axis": "steps",
    "arms": {"plain": [], "one": ["updates=one"], "two": ["updates=two"], "mask": ["truncation=mask_after"]},
    "seeds": 2,
    "bases": 4,
    "predictions": [{"arm": arm, "metric": DOWNSTREAM, "direction": "above"} for arm in ("one", "two", "mask")],
}
NESTED = Scatter(between=0.03**2 + 2 * 0.02**2, between_freedom=3.0, within=0.03**2, within_freedom=4.0, seeds=2.0)
NESTED_RUNS = Planted(steps=20, every=4, questions=64, bases=4, seeds=tuple(range(8)), base_effect_sd=0.03)


ONE_SEED = Scatter(between=0.03**2, between_freedom=3.0, within=math.nan, within_freedom=0.0, seeds=1.0)


def declare(**changes: Any) -> Design:
    return read_design({**NODE, **changes})


@pytest.fixture(scope="module")
def nested() -> SweepData:
    """A synthetic sweep of four base models with two seeds each."""
    return synthetic_sweep(NESTED_RUNS, 0)


def one_arm(data: SweepData) -> SweepData:
    """The runs of its control alone."""
    runs, points = (table[table["arm"] == "base"] for table in (data.runs, data.points))
    return replace(data, runs=runs, points=points)


# ---- statistics


@pytest.mark.parametrize("n,margin", [(4, 2.0), (6, 1.0), (12, 1.0)])
def test_the_power_of_equivalence_is_what_two_one_sided_tests_find(n: int, margin: float) -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((40_000, n))
    error = values.std(axis=1, ddof=1) / math.sqrt(n)
    found = (np.abs(values.mean(axis=1)) + stats.t.isf(0.02, n - 1) * error < margin).mean()
    assert power_within(margin, 1.0, n, 0.02) == pytest.approx(float(found), abs=0.01)


def test_the_fewest_is_the_first_with_the_power() -> None:
    enough = fewest(lambda n: power_within(1.0, 2.0, n))
    assert enough is not None and power_within(1.0, 2.0, enough) >= 0.8 > power_within(1.0, 2.0, enough - 1)
    assert fewest(lambda n: 0.5) is None
    assert fewest(lambda n: 1.0, least=3) == 3
    assert seeds_needed(1.0, 2.0) == fewest(lambda n: power_of_t(1.0, 2.0, n))


def test_one_contrast_has_the_components_of_an_analysis_of_variance() -> None:
    rng = np.random.default_rng(1)
    values = pd.Series(rng.standard_normal(8), index=range(8))
    bases = {seed: seed % 4 for seed in range(8)}
    of_bases, of_seeds = components(pd.DataFrame({"base": values.index % 4, "value": values}))
    scatter = pooled_scatter(values.to_frame("one"), bases)
    assert (scatter.of_bases, scatter.of_seeds) == pytest.approx((of_bases.mean, of_seeds.mean))
    assert (scatter.between_freedom, scatter.within_freedom) == (3, 4)


def test_without_bases_or_without_seeds_one_part_is_not_known() -> None:
    values = pd.Series([0.1, 0.2, 0.4, 0.0]).to_frame("one")
    alone = pooled_scatter(values, {})
    assert math.isnan(alone.between) and alone.of_mean(1).mean == pytest.approx(values["one"].std())
    single = pooled_scatter(values, {0: 0, 1: 1, 2: 2, 3: 3})
    assert math.isnan(single.within) and single.of_mean(1).mean == single.of_mean(8).mean == pytest.approx(
        values["one"].std()
    )
    with pytest.raises(ValueError, match="no contrast has two paired differences"):
        pooled_scatter(values.head(1), {})


def test_the_same_contrast_twice_counts_once() -> None:
    rng = np.random.default_rng(2)
    one, other = rng.standard_normal((2, 400))
    equal = pooled_scatter(pd.DataFrame({"a": one, "b": one}), {})
    assert equal.within_freedom == pytest.approx(399)
    independent = pooled_scatter(pd.DataFrame({"a": one, "b": other}), {})
    assert independent.within_freedom == pytest.approx(798, rel=0.01)


@pytest.mark.extended
@pytest.mark.parametrize("seeds", [1, 4])
def test_the_interval_of_the_deviation_holds_it_as_often_as_it_says(seeds: int) -> None:
    """Pilots of four base models and two seeds, three contrasts with one control; 95% is nominal."""
    rng = np.random.default_rng(3)
    bases = {seed: seed % 4 for seed in range(8)}
    of, truth, held, number = np.arange(8) % 4, math.sqrt(0.02**2 + 0.03**2 / seeds), 0, 300
    for _ in range(number):
        arms = [(0.02 * rng.standard_normal(4)[of] + 0.03 * rng.standard_normal(8)) / math.sqrt(2) for _ in range(4)]
        columns = pd.DataFrame({str(arm): arms[arm] - arms[0] for arm in (1, 2, 3)})
        held += pooled_scatter(columns, bases).of_mean(seeds).contains(truth)
    assert 0.92 <= held / number <= 1.0


# ---- the decision


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "changes,scatter",
    [
        ({}, NESTED),
        ({"bases": 6, "seeds": 1}, NESTED),
        ({"bases": None, "seeds": list(range(6))}, replace(NESTED, between=math.nan)),
        ({"predictions": NODE["predictions"][:1]}, NESTED),
        ({"bases": None, "seeds": list(range(6))}, ONE_SEED),
        ({}, ONE_SEED),
    ],
    ids=[
        "4 base models x 2",
        "6 base models x 1",
        "6 seeds",
        "one prediction",
        "6 seeds, one a base known",
        "one a base known",
    ],
)
def test_the_predicted_power_is_that_of_the_labs_own_decision(changes: dict[str, Any], scatter: Scatter) -> None:
    """`decide` over `compare` and Holm, 400 sweeps: a standard error of 2 points at 80%."""
    design = declare(**changes)
    observations, seeds = sizes(design)
    family = len(design.predictions)
    sd = scatter.of_mean(seeds).mean
    effect = next(
        size * sd
        for size in np.arange(0.5, 20, 0.05)
        if power_of_t(size, 1.0, observations, alpha=ALPHA / family) > 0.8
    )
    question = Question(float(effect), False, family)
    predicted = question.power(sd, observations)
    assert 0.8 < predicted < 0.82
    found = simulated_power(design, {DOWNSTREAM: scatter}, question, 0, trials=400)
    assert found == pytest.approx(predicted, abs=0.055)


@pytest.mark.extended
def test_a_prediction_within_a_margin_is_found_as_often_as_predicted() -> None:
    predictions = [{**one, "direction": "within"} for one in NODE["predictions"]]
    design = declare(predictions=predictions, margin=0.075, bases=5)
    question = Question(0.075, True, 3)
    predicted = question.power(NESTED.of_mean(2).mean, 5)
    assert 0.5 < predicted < 0.95
    assert simulated_power(design, {DOWNSTREAM: NESTED}, question, 1, trials=400) == pytest.approx(predicted, abs=0.06)


def test_an_effect_on_what_is_predicted_within_a_margin_is_one_above() -> None:
    within = declare(predictions=[{**one, "direction": "within"} for one in NODE["predictions"]], margin=0.075)
    question = Question(0.15, False, 3)
    found = [simulated_power(one, {DOWNSTREAM: NESTED}, question, 0, trials=20) for one in (declare(), within)]
    assert found[0] == found[1] > 0.5


@pytest.mark.extended
def test_what_has_no_effect_is_hardly_ever_found() -> None:
    found = simulated_power(declare(), {DOWNSTREAM: NESTED}, Question(1e-9, False, 3), 0, trials=400)
    assert found <= 0.03


# ---- the plan


def test_more_bases_are_needed_with_fewer_seeds_and_the_fewest_runs_are_named(nested: SweepData) -> None:
    design = named_design("dapo_worlds")
    pilot = measure_pilot(design, nested, DOWNSTREAM)
    rows = needed(Question(0.05, False, 8), pilot, True)
    numbers = [row.number for row in rows]
    assert numbers == sorted(numbers, reverse=True) and numbers[-1] >= 3
    assert all(row.low <= row.number <= row.high for row in rows)
    best = cheapest(rows)
    assert best is not None and best.runs == min(row.runs for row in rows)
    question = Question(0.05, False, 8)
    assert question.power(best.sd.mean, best.number) >= 0.8 > question.power(best.sd.mean, best.number - 1)


@pytest.mark.extended
def test_planted_deviations_are_found_in_a_pilot() -> None:
    """Over ten pilots: effects of base models by 0.04, a pair's difference by the noise of its two arms."""
    squares = {"bases": 0.0, "seeds": 0.0}
    planted = Planted(
        steps=20, every=4, questions=256, samples=4, bases=4, seeds=tuple(range(16)), base_effect_sd=0.04, own_sd=0.03
    )
    for seed in range(10):
        data = synthetic_sweep(planted, seed)
        assert data.design is not None
        pilot = measure_pilot(with_predictions(data.design), data, DOWNSTREAM)
        squares["bases"] += max(0.0, pilot.scatter.between - pilot.scatter.within) / pilot.scatter.seeds / 10
        squares["seeds"] += pilot.scatter.within / 10
    assert math.sqrt(squares["bases"]) == pytest.approx(0.04, rel=0.4)
    least = math.sqrt(2) * 0.03  # and the noise of the answers
    assert least < math.sqrt(squares["seeds"]) < 1.6 * least


def test_a_pilot_of_another_sweep_and_one_of_a_single_arm_serve_and_say_so(nested: SweepData) -> None:
    assert "each arm less base" in measure_pilot(declare(), nested, DOWNSTREAM).how
    alone = measure_pilot(declare(), one_arm(nested), DOWNSTREAM)
    assert "runs of only one arm" in alone.how and alone.contrasts == 1 and alone.pairs == 8


@pytest.mark.extended
def test_the_margin_is_what_is_planned_for_and_an_effect_replaces_it(nested: SweepData) -> None:
    def said(design: Design, *effects: float) -> str:
        return "\n".join(power_text(design, nested, effects, trials=0))

    assert "no margin is declared" in said(declare())
    assert "to find an effect of 0.03:" in said(declare(margin=0.03))
    named = said(declare(margin=0.03), 0.1, 0.2)
    assert "effect of 0.1:" in named and "effect of 0.2:" in named and "0.03:" not in named
    assert "p below 0.05 / 3 = 0.0167" in named and "as declared, 4 base models x 2 seeds" in named
    with pytest.raises(ValueError, match="--effect -1: give a size above 0"):
        said(declare(), -1.0)


def test_a_pilot_of_one_base_says_that_it_knows_nothing_of_others() -> None:
    data = synthetic_sweep(Planted(tricks=("helps",), kind="add_one", steps=20, every=4, questions=64), 0)
    lines = "\n".join(power_text(declare(), data, [0.1], trials=0))
    assert "the pilot has one base model, so the SD of effects between base models is unknown" in lines
    alone = "\n".join(power_text(declare(bases=None, seeds=[0, 1, 2]), data, [0.1], trials=0))
    assert "seeds needed: " in alone and "as declared, 3 seeds" in alone
    single = one_arm(data)
    scatter = measure_pilot(declare(), single, DOWNSTREAM).scatter
    values = final_values(single).of("", "base", DOWNSTREAM)
    assert math.isnan(scatter.between) and scatter.of_seeds == pytest.approx(math.sqrt(2) * values.std())


def test_one_arm_with_a_run_a_base_deviates_less_than_its_pairs_may() -> None:
    """A run by base models and seeds, a difference by base models and twice by seeds: at most twice the variance."""
    data = one_arm(synthetic_sweep(replace(NESTED_RUNS, seeds=tuple(range(4))), 0))
    pilot = measure_pilot(declare(), data, DOWNSTREAM)
    values = final_values(data).of("", "base", DOWNSTREAM)
    assert math.isnan(pilot.scatter.within) and pilot.scatter.of_bases == pytest.approx(math.sqrt(2) * values.std())
    assert pilot.alone == pytest.approx((pilot.scatter.of_bases,) * 2) and "runs of several base models" in pilot.how


def test_the_smallest_effect_of_a_design_of_one_base_is_that_of_the_table(nested: SweepData) -> None:
    """The pilot has four base models: how far these differ is not asked."""
    lines = power_text(declare(bases=None, seeds=list(range(6))), nested, trials=0)
    seeds, effects = (
        next(line.split() for line in lines if line.startswith(f"  {head} ")) for head in ("seeds", "effect")
    )
    said = f"as declared, 6 seeds: the smallest effect found with 80% power is {dict(zip(seeds, effects))['6']} ["
    assert any(said in line for line in lines)


@pytest.mark.parametrize(("seeds", "what"), [(3, "2 base models x 3 seeds"), (1, "2 base models x 1 seed")])
def test_two_bases_decide_nothing(nested: SweepData, seeds: int, what: str) -> None:
    """`compare` withholds the interval, so the chance to find an effect is none, however large it is."""
    lines = "\n".join(power_text(declare(bases=2, seeds=seeds), nested, [10.0], trials=20))
    assert f"as declared, {what}: no interval, so no effect can be found: 3 base models are needed" in lines
    assert "as declared: power 0% [0%, 0%]" in lines and "with no other effect: 0%" in lines
    assert "fewest runs: 3 base models with one seed each" in lines


def test_one_seed_decides_nothing(nested: SweepData) -> None:
    lines = "\n".join(power_text(declare(bases=None, seeds=[0]), nested, [0.1], trials=20))
    assert "as declared, 1 seed: no interval, so no effect can be found: 3 seeds are needed" in lines


@pytest.mark.extended
def test_predictions_of_the_chosen_part_alone_count(nested: SweepData) -> None:
    """One of three, so that Holm asks for no less than 5%; the simulation agrees within 3 standard errors."""
    part = {"parts": {"some": {"arms": ["plain", "one"], "bases": [0, 1, 2]}}, "part": "some"}
    design = with_predictions(declare(**part))
    assert [one.arm for one in design.predictions] == ["one"] and sizes(design) == (3, 2)
    lines = "\n".join(power_text(declare(**part), nested, [0.12], trials=400))
    assert "1 prediction; planned for 80% power at the strictest Holm threshold, p < 0.05 / 1 = 0.05" in lines
    assert "as declared, 3 base models x 2 seeds: the smallest effect found with 80% power is" in lines, (
        "three are enough"
    )
    (stated,), (found,) = (
        re.findall(said, lines) for said in (r"as declared: power (\d+)%", r"with no other effect: (\d+)%")
    )
    assert 50 < int(stated) < 90 and int(found) == pytest.approx(int(stated), abs=8)
    once = "\n".join(power_text(declare(**part), nested, [0.12], trials=1))
    assert re.search(r"1 simulated sweeps, judged like real ones, with no other effect: (0|100)%", once), once


def test_a_part_has_the_bases_of_its_seeds() -> None:
    """Its first three seeds start from three of the four base models."""
    few = {"parts": {"few": {"seeds": [0, 1, 2]}}, "part": "few"}
    assert sizes(declare(**few)) == (3, 1) and sizes(declare()) == (4, 2)


def test_a_design_without_anything_to_compare_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"part two of planned runs no predicted arm together .* choose another design.part"
    ):
        with_predictions(declare(parts={"two": {"arms": ["one", "two"]}}, part="two"))
    with pytest.raises(ValueError, match="has one arm and compares nothing"):
        with_predictions(declare(arms={"plain": []}, predictions=[]))
    assert len(with_predictions(declare(predictions=[])).predictions) == 3
