"""Differences over base models and seeds, collapses apart, equivalence and harm: by hand, scipy and simulation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from interval_coverage.detectable import power_with_collapse, smallest_effect
from interval_coverage.differences import Table, World, docstring_tables, rates, tables
from planted_sweeps import Planted, synthetic_sweep, write_synthetic
from scipy import stats

from grpo_lab.analysis.caveats import caveats
from grpo_lab.analysis.effects.contrasts import effects_table
from grpo_lab.analysis.effects.verdict import judge, verdict_text
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.analysis.sources.sweep_data import SweepData, bases_of
from grpo_lab.analysis.stats.collapse import Count, barnard
from grpo_lab.analysis.stats.comparison import compare, two_groups
from grpo_lab.analysis.stats.components import components
from grpo_lab.analysis.stats.mean_line import mean_line, over_bases
from grpo_lab.analysis.stats.multiplicity import paired_t_pvalue
from grpo_lab.analysis.stats.power import power_of_t
from grpo_lab.config.design import Direction, Prediction, read_design

SAME = 1e-10
SIX = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.3, 4: 0.4, 5: 0.5}  # seeds 0 to 5
BASES = {seed: seed % 3 for seed in SIX}


# --- by hand --------------------------------------------------------------------------------------------------


def test_a_base_is_one_observation() -> None:
    # base means (.1 + .3) / 2, (.2 + .4) / 2, (.3 + .5) / 2 = .2, .3, .4: mean .3, error .1 / sqrt 3, t(2) = 4.302653
    found = compare(SIX, BASES)
    assert found.observed == pytest.approx((0.2, 0.3, 0.4))
    assert found.whole.high - 0.3 == pytest.approx(4.302653 * 0.057735, abs=1e-6)
    assert (found.whole.n, found.whole.bases, found.whole.runs()) == (6, 3, "n = 6 on 3 base models")
    assert found.p == pytest.approx(paired_t_pvalue([0.2, 0.3, 0.4]), abs=SAME)
    # Without base models the seeds are: mean .3, deviation sqrt(.1 / 5), t(5) = 2.570582
    seeds = compare(SIX)
    assert seeds.whole.high - 0.3 == pytest.approx(2.570582 * math.sqrt(0.1 / 5 / 6), abs=1e-6)
    assert (seeds.whole.bases, seeds.whole.runs()) == (0, "n = 6")


def test_a_base_with_fewer_seeds_weighs_as_much() -> None:
    found = compare({seed: value for seed, value in SIX.items() if seed != 5}, BASES)
    assert found.observed == pytest.approx((0.2, 0.3, 0.3)) and found.whole.n == 5


def test_two_bases_have_no_interval_and_one_base_is_its_seeds() -> None:
    two = compare(SIX, {seed: seed % 2 for seed in SIX}).whole
    assert math.isnan(two.low) and two.why == "2 base models: an interval needs 3"
    assert two.text("+") == "+0.300 [not reported]"
    assert compare(SIX, dict.fromkeys(SIX, 7)).whole == compare(SIX).whole


def test_where_some_pairs_hold_a_collapse_only_the_others_have_an_interval() -> None:
    values = SIX | {5: -0.6}
    found = compare(values, {}, {5: (True, False)})
    assert found.mixed and math.isnan(found.whole.low) and found.whole.why == "collapsed runs in 1 of 6"
    alive = compare({seed: value for seed, value in values.items() if seed != 5})
    assert found.alive == alive.whole and found.alive.n == 5
    assert found.p == pytest.approx(2 * min(alive.p, paired_t_pvalue(list(values.values()))), abs=SAME)
    assert found.sign == 1 and math.isnan(found.harm()) and found.within(0.5) == 1.0
    # where the collapses turn the mean, no sign is sure
    assert compare(SIX | {4: -3.0, 5: -3.0}, {}, {4: (True, False), 5: (True, False)}).sign == 0


def test_where_every_pair_holds_the_same_collapse_there_is_an_interval() -> None:
    every = compare(SIX, {}, dict.fromkeys(SIX, (True, False)))
    assert not every.mixed and every.whole == compare(SIX).whole and every.alive.n == 0
    assert compare(SIX, {}, {seed: (seed < 3, seed >= 3) for seed in SIX}).mixed


def test_two_groups_by_hand() -> None:
    # the largest gap is .28; within: (.5, .52) and (.8, .82): squares 2 * 2 * .01^2, deviation sqrt(4e-4 / 2) = .0141
    two = dict(enumerate([0.52, 0.8, 0.5, 0.82]))
    assert two_groups(two) == "two groups of runs, 2 and 2, 0.28 apart"
    assert two_groups(dict(enumerate([0.5, 0.52, 0.8]))) == ""  # three cannot tell
    assert two_groups(dict(enumerate([0.5, 0.509, 0.59, 0.599]))) == ""  # 8 points are near enough
    assert two_groups(dict(enumerate([0.3, 0.5, 0.7, 0.9, 1.1]))) == ""  # 20 points apart, all of them
    grouped = compare(two)
    assert math.isnan(grouped.whole.low) and not grouped.mixed
    assert not math.isnan(compare(two, grouped=False).whole.low)


def test_bases_that_lie_apart_are_no_groups_of_runs() -> None:
    values = dict(enumerate([0.5, 0.52, 0.8, 0.51, 0.5, 0.82]))
    of_base = {seed: seed % 3 for seed in values}  # seeds 2 and 5 are base 2
    assert two_groups(values) == "two groups of runs, 4 and 2, 0.28 apart"
    assert two_groups(values, of_base) == ""
    # the interval over three base models holds both: means .505, .51, .81, t(2) = 4.302653
    whole = compare(values, of_base).whole
    assert whole.high - whole.mean == pytest.approx(4.302653 * np.std([0.505, 0.51, 0.81], ddof=1) / math.sqrt(3))
    # a gap through a base is one between runs, and so is one that parts a base of a single run
    assert two_groups(values, {seed: seed // 2 for seed in values}) != ""
    assert two_groups(values, dict(enumerate([0, 0, 1, 0, 0, 2]))) != ""


def test_a_run_that_lies_apart_is_seen_where_bases_lie_further_apart() -> None:
    of_base = {seed: seed % 4 for seed in range(8)}
    apart = [0.3, 0.5, 0.7, 0.9]
    values = {seed: apart[base] + 0.01 * (seed > 3) for seed, base in of_base.items()}
    assert two_groups(values, of_base) == ""
    # base 3 is .9 and .75; the others deviate by .007: two runs lie within 1.414 * 4.541 * .007 = .045 by chance
    assert two_groups(values | {7: 0.75}, of_base) == "two groups of runs within a base, 0.15 apart"
    assert (
        two_groups(values | {4: 0.42, 5: 0.62, 7: 0.75}, of_base) == ""
    )  # one base model is left to tell what is usual


def test_what_is_withheld_gives_no_p_and_no_word() -> None:
    two = dict(enumerate([0.52, 0.8, 0.5, 0.82]))
    assert compare(two).p == compare(two).within(0.9) == 1.0 and compare(two, grouped=False).p < 0.05
    assert compare(SIX, {seed: seed % 2 for seed in SIX}).p == 1.0  # two base models
    planted = [result for result, *_ in World(5, 1, lower=0.2, drop=0.3, effect=0.06).experiments(200, seed=3)]
    withheld = [result for result in planted if result.whole.why]
    assert 50 < len(withheld) < 200 and {result.p for result in withheld} == {1.0}


def test_equal_differences_are_no_certain_equivalence() -> None:
    rounded = compare({0: 0.3 - 0.1, 1: 0.4 - 0.2, 2: 0.5 - 0.3})
    assert rounded.within(0.5) == 1 / 8 and rounded.p == pytest.approx(0.25)


def test_equivalence_is_the_90_percent_interval_inside_the_margin() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = dict(enumerate(rng.normal(0.005, 0.01, 5).tolist()))
        found, own = compare(values), np.array(list(values.values()))
        low, high = stats.t.interval(0.9, 4, own.mean(), own.std(ddof=1) / math.sqrt(5))
        assert (found.within(0.02) < 0.05) == (low > -0.02 and high < 0.02)
        low, high = (stats.ttest_1samp(list(values.values()), end).statistic for end in (-0.02, 0.02))
        assert found.within(0.02) == pytest.approx(max(stats.t.sf(low, 4), stats.t.cdf(high, 4)), abs=SAME)
    # surely beyond .02 where the 95% interval is
    far = compare(SIX)
    assert far.beyond(0.02) < 0.05 and far.within(0.02) > 0.9 and math.isnan(compare({0: 0.1}).within(0.02))
    assert compare(dict(enumerate([0.01] * 4))).within(0.02) == 1 / 16  # no scatter, by chance


def test_harm_is_the_chance_of_one_more_base() -> None:
    # base means .2, .3, .4: t = (-.02 - .3) / (.1 sqrt(1 + 1/3)) = -2.771, two degrees
    assert compare(SIX, BASES).harm() == pytest.approx(stats.t.cdf(-0.32 / (0.1 * math.sqrt(4 / 3)), 2), abs=SAME)


def test_counts_are_those_of_scipy() -> None:
    for number, of in ((0, 8), (3, 8), (8, 8)):
        wanted = stats.binomtest(number, of).proportion_ci(method="exact")
        assert Count(number, of).bounds == pytest.approx((wanted.low, wanted.high), abs=SAME)
    assert Count(3, 8).text == "3 of 8 (0.09 to 0.76)" and Count(0, 0).bounds == (0.0, 1.0)
    wanted = stats.barnard_exact([[5, 0], [3, 8]]).pvalue
    assert barnard(Count(5, 8), Count(0, 8)) == pytest.approx(wanted) and wanted < 0.05
    assert barnard(Count(0, 8), Count(0, 8)) == barnard(Count(8, 8), Count(8, 8)) == 1.0


def test_components_by_hand() -> None:
    # base means 1, 3, 5, every seed 1 beside: MS within 2 * 3 / 3 = 2, between 2 * 8 / 2 = 8; (8 - 2) / 2 = 3
    values = pd.DataFrame({"base": [0, 0, 1, 1, 2, 2], "seed": range(6), "value": [0.0, 2, 2, 4, 4, 6]})
    of_bases, of_seeds = components(values)
    assert (of_bases.mean, of_seeds.mean) == (pytest.approx(math.sqrt(3)), pytest.approx(math.sqrt(2)))
    assert of_bases.low == 0 and of_bases.high > 3 and of_seeds.low < math.sqrt(2) < of_seeds.high
    with pytest.raises(ValueError, match="two seeds on some base"):
        components(values.iloc[::2])


def test_components_cover() -> None:
    """300 tables of 4 base models x 2 seeds: 95% or more, less four binomial deviations (5 pp)."""
    rng, hits = np.random.default_rng(1), []
    for _ in range(300):
        base = np.repeat(np.arange(4), 2)
        value = rng.standard_normal(4)[base] + rng.standard_normal(8)
        of_bases, of_seeds = components(pd.DataFrame({"base": base, "seed": range(8), "value": value}))
        hits.append((of_bases.contains(1), of_seeds.contains(1)))
    assert (np.mean(hits, axis=0) > 0.9).all()


@pytest.mark.extended
def test_the_smallest_effect_has_the_power_asked_for() -> None:
    effect = smallest_effect(0.03, 0.04, 4, 4)  # deviation of a base mean: sqrt(.03^2 + .04^2 / 4) = .0361
    assert power_of_t(effect, math.hypot(0.03, 0.02), 4) == pytest.approx(0.8, abs=1e-6)
    found = power_with_collapse(effect, 0.03, 0.04, 4, 4, 0.0, 0.5, np.random.default_rng(2), 600)
    assert found == pytest.approx(0.8, abs=0.07)
    assert power_with_collapse(effect, 0.03, 0.04, 4, 4, 0.2, 0.5, np.random.default_rng(2), 300) < 0.5


def test_bands_of_curves_are_over_bases_too() -> None:
    runs = [(np.array([0.0, 1.0]), np.array([0.0, value])) for value in SIX.values()]
    band = mean_line(runs, 1.0, evaluations=True, bases=list(BASES.values()))[-1][1]
    whole = compare(SIX, BASES).whole
    assert (band.low, band.high, band.n, band.bases) == (pytest.approx(whole.low), pytest.approx(whole.high), 6, 3)
    holed = over_bases(np.array([[1.0], [math.nan], [3.0]]), [0, 0, 1])
    assert holed.tolist() == [[1.0], [3.0]]


# --- simulated ------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "world",
    [
        World(4, 2, ratio=1),
        World(3, 1, law="heavy", ratio=1),
        World(6, 1, law="heavy"),
        World(4, 2, ratio=1, collapse=0.2),
        World(5, 1, collapse=0.4),
    ],
)
def test_what_is_shown_covers(world: World) -> None:
    """1,500 experiments: 95% with four binomial deviations (2.3 pp) beyond the .93 to .97 that is asked."""
    found = rates(world, 1500, seed=7)
    assert 0.93 - 0.012 < found.covers < 0.97 + 0.012 and found.shown > 0.5


@pytest.mark.extended
def test_the_docstring_has_the_tables_that_the_script_makes() -> None:
    """Few sweeps each: a number agrees within five deviations of a share of so many, and half of its last digit."""
    written, made = docstring_tables(), list(tables(40))
    assert list(written) == [table.title for table in made]
    for table, following in zip(made, [*made[1:], made[0]]):
        hidden = following.rows if following.title.startswith("Withheld") else [(label, []) for label, _ in table.rows]
        for row, (label, values), (_, withheld) in zip(written[table.title], table.rows, hidden, strict=True):
            shown = [1 - share / 100 for share in withheld] or [1.0] * len(values)
            for stands, found, part in zip(row, values, shown, strict=True):
                assert agrees(table, stands, found, part), (table.title, label, stands, found)


def agrees(table: Table, stands: float, found: float, shown: float) -> bool:
    """Whether a percentage in the docstring and one of few experiments, of which a part counts, can be the same."""
    if math.isnan(stands) or math.isnan(found):
        return True  # no interval was shown in any of so few
    digit = 0.5 * 10**-table.decimals + SAME
    if not table.number:
        return abs(stands - found) <= digit
    if "points) found" in table.title:
        return abs(stands - found) <= 0.4 * stands
    share = min(max(stands / 100, 0.03), 0.97)
    return abs(stands - found) <= digit + 500 * math.sqrt(share * (1 - share) / (table.number * shown))


# --- planted sweeps -------------------------------------------------------------------------------------------

PLANTED = Planted(
    tricks=("helps", "null"),
    kind="add_one",
    steps=10,
    every=5,
    questions=64,
    samples=1,
    seeds=tuple(range(8)),
    bases=4,
    base_sd=0.05,
    base_effect_sd=0.02,
    downstream={"helps": 0.12},
)


def with_design(data: SweepData, **changes: object) -> SweepData:
    assert data.design is not None
    return replace(data, design=replace(data.design, **changes))


def falling(data: SweepData, arm: str, *seeds: int) -> SweepData:
    """These runs of an arm end at an accuracy of .05, held out and downstream, without stopping."""
    last = (data.points["arm"] == arm) & data.points["seed"].isin(seeds) & (data.points["step"] > 0)
    changed = {name: data.points[name].mask(last & data.points[name].notna(), 0.05) for name in (HELDOUT, DOWNSTREAM)}
    return replace(data, points=data.points.assign(**changed))


@pytest.mark.extended
def test_bases_are_read_from_runs_and_from_saved_data(tmp_path: Path) -> None:
    write_synthetic(PLANTED, tmp_path / "runs")
    data = load_sweep(tmp_path / "runs", "synthetic")
    assert bases_of(data) == {seed: seed % 4 for seed in range(8)}
    save_data(data, tmp_path)
    assert bases_of(load_data(tmp_path, "synthetic")) == bases_of(data)
    assert bases_of(synthetic_sweep(replace(PLANTED, bases=0))) == {}


@pytest.mark.extended
def test_planted_effects_are_held_for_another_base_at_the_nominal_rate() -> None:
    """120 sweeps of 4 base models x 2 seeds: 95% less three binomial deviations (6 pp); seeds as base models: fewer."""
    hits, naive = [], []
    for seed in range(120):
        finals = final_values(synthetic_sweep(replace(PLANTED, base_effect_sd=0.06), seed))
        for arm, truth in (("+helps", 0.12), ("+null", 0.0)):
            found = finals.comparison(("", arm), ("", "base"), DOWNSTREAM)
            hits.append(found.whole.contains(truth))
            naive.append(compare(finals.differences("", arm, "base", DOWNSTREAM)).whole.contains(truth))
    assert 0.89 < np.mean(hits) <= 0.99
    assert np.mean(naive) < np.mean(hits) - 0.03


def test_a_run_that_loses_what_it_could_has_collapsed() -> None:
    data = falling(synthetic_sweep(PLANTED), "+null", 2, 3)
    finals = final_values(data)
    assert (finals.collapsed("", "+null"), finals.stopped("", "+null"), finals.collapsed("", "base")) == (2, 0, 0)
    effect = finals.comparison(("", "+null"), ("", "base"), DOWNSTREAM)
    assert effect.mixed and effect.alive.n == 6 and effect.alive.bases == 4 and not math.isnan(effect.alive.low)
    assert math.isnan(finals.difference("", "+null", "base", DOWNSTREAM).low)
    lines = caveats(data, finals)
    assert "Collapsed: 2 of 24 runs ended below half of the held-out accuracy they began with." in lines
    assert "  +null: 2 of 8 (0.03 to 0.65), seed 2, 3" in lines
    rows = effects_table(data, finals).set_index(["trick", "metric"])
    row = rows.loc[("null", DOWNSTREAM)]
    assert (row["not_reported"], row["n_alive"]) == ("collapsed runs in 2 of 8", 6) and math.isnan(row["harm"])
    assert 0 < rows.loc[("helps", DOWNSTREAM), "harm"] < 0.2


def prediction(direction: str, arm: str = "+helps", **changes: object) -> Prediction:
    return Prediction(arm, DOWNSTREAM, Direction(direction), **changes)


@pytest.mark.extended
def test_the_words_of_a_verdict_with_a_margin() -> None:
    quiet = replace(PLANTED, base_effect_sd=0.0, own_sd=0.005, questions=256)
    predictions = (
        prediction("above"),
        prediction("above", "+null"),
        prediction("within", "+null"),
        prediction("within", margin=0.01),
        prediction("below"),
    )
    data = with_design(synthetic_sweep(quiet), predictions=predictions, margin=0.05)
    finals = final_values(data)
    judgements = judge(data, finals)
    words = ["supported", "equivalent within the margin", "supported", "contradicted", "contradicted"]
    assert [one.verdict for one in judgements] == words
    # Without a margin there is one p each: the same family, and no second verdict.
    plain = judge(with_design(data, margin=None, predictions=predictions[:2]), finals)
    assert [one.verdict for one in plain] == ["supported", "not significant"] and math.isnan(plain[1].equivalent)
    text = verdict_text(data, finals)
    assert "supported: +null is within 0.05 of base" in text and "within the margin: +null is above base" in text
    assert "equivalence within 0.05 (TOST): Holm p" in text and "n = 8 on 4 base models" in text
    assert (
        "95% t interval over 4 base models, for a new base model" in text
        and "4 base models: intervals generalise to a new one" in text
    )
    idle = with_design(data, requires={"+helps": {"active_fraction/kl": 0.1}})  # which no planted run logs
    assert [one.verdict for one in judge(idle, finals)].count("manipulation check failed") == 3
    assert "active_fraction/kl is not in the data; required" in verdict_text(idle, finals)


def test_the_smallest_p_is_multiplied_by_the_predictions_not_by_the_hypotheses() -> None:
    data = with_design(
        synthetic_sweep(PLANTED), predictions=(prediction("above"), prediction("above", "+null")), margin=0.05
    )
    helps, null = judge(data, final_values(data))
    assert helps.family == 2 and helps.holm == pytest.approx(2 * helps.p)
    assert null.equivalent >= null.equivalence


@pytest.mark.extended
def test_a_collapse_is_told_beside_the_difference() -> None:
    data = with_design(falling(synthetic_sweep(PLANTED), "+null", 2, 3), predictions=(prediction("below", "+null"),))
    text = verdict_text(data, final_values(data))
    assert "no interval: collapsed runs in 2 of 8" in text and "in the pairs without a collapse" in text
    assert "collapsed: 2 of 8 (0.03 to 0.65) of +null against 0 of 8 (0.00 to 0.37) of base; Barnard p" in text
    assert "Not reported: some runs collapsed" in text


def test_a_margin_is_part_of_a_declaration_and_none_changes_nothing() -> None:
    node = PLANTED.node()
    plain, margin = read_design(node), read_design(node | {"margin": 0.02})
    assert plain.margin is None and margin.margin == 0.02 and plain.fingerprint() != margin.fingerprint()
    own = [{"arm": "+helps", "metric": HELDOUT, "direction": "within", "margin": 0.03}]
    found = read_design(node | {"margin": 0.02, "predictions": own})
    assert found.margin_of(found.predictions[0]) == 0.03
