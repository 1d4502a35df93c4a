"""The effect of a trick: hand numbers for every design, planted truths, and the two figures that show them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from planted_sweeps import Planted, synthetic_sweep
from scipy import stats as scipy_stats

from grpo_lab.analysis.effects.contrast_plan import not_run, order_warning, planned_contrasts
from grpo_lab.analysis.effects.contrasts import (
    HOLM,
    SCREENING,
    TRAINING_REWARD,
    TrickEffect,
    disagreements,
    effect_metrics,
    effects_markdown,
    effects_on_axes,
    effects_table,
    sign_flips,
    trick_effects,
)
from grpo_lab.analysis.figures.budgets import LOOKS, draw_budgets
from grpo_lab.analysis.figures.forest import draw_forest
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, FinalValues, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.tables.contrasts import noise_band
from grpo_lab.config.design import read_design
from grpo_lab.tracking.sweep_record import SweepRecord

EXACT = 1e-12
SMALL = {"steps": 20, "every": 10, "questions": 32, "samples": 1}


def sweep(kind: str, tricks: Sequence[str], seeds: Sequence[int] = (0, 1, 2), **changes: Any) -> SweepData:
    """A declared sweep of one level whose runs are all done, without points; `changes` go into the declaration."""
    node: dict[str, Any] = {"name": "planted", "question": "q", "prediction": "p", "primary": DOWNSTREAM}
    node |= {"axis": "sampled_tokens", "seeds": list(seeds), **changes}
    if kind != "arms":
        node |= {"kind": kind, "tricks": {trick: [f"x.{trick}=1"] for trick in tricks}}
    design = read_design(node)
    rows = [
        {"level": level, "arm": arm, "seed": seed, "status": "done", "collapsed": False}
        for level in design.levels
        for arm in design.arms
        for seed in seeds
    ]
    record = SweepRecord("planted", "key", None, [], [], None, None, [])
    return SweepData(record, design, pd.DataFrame(rows), pd.DataFrame(), pd.DataFrame(), "memory")


def outcome_of(
    values: Mapping[str, Sequence[float]], metric: str = DOWNSTREAM, level: str = "", **others: Mapping
) -> FinalValues:
    """Final values by arm, of seeds 0, 1, ...; NaN where a run lacks it. `others` maps a metric to the same."""
    rows = []
    for arm, of_seeds in values.items():
        for seed, value in enumerate(of_seeds):
            more = {name: of_arms[arm][seed] for name, of_arms in others.items()}
            rows.append(
                {"level": level, "arm": arm, "seed": seed, "collapsed": False, "stopped": False, metric: value, **more}
            )
    return FinalValues("sampled_tokens", 1000.0, pd.DataFrame(rows))


def plan(data: SweepData) -> dict[tuple[str, str, str], dict[str, float]]:
    return {(c.trick, c.kind, c.context): dict(c.weights) for c in planned_contrasts(data)}


def by_name(effects: Sequence[TrickEffect]) -> dict[tuple[str, str], TrickEffect]:
    """By trick and kind, where that is unique."""
    return {(effect.contrast.trick, effect.contrast.kind): effect for effect in effects}


# --- which contrasts a design has -----------------------------------------------------------------------------


def test_one_rule_serves_every_kind_of_design() -> None:
    assert plan(sweep("add_one", "ab")) == {
        ("a", "added", "added to base"): {"+a": 1, "base": -1},
        ("b", "added", "added to base"): {"+b": 1, "base": -1},
    }
    # The sign is that of having the trick: full less the arm without it.
    assert plan(sweep("leave_one_out", "ab")) == {
        ("a", "left_out", "inside full"): {"full": 1, "-a": -1},
        ("b", "left_out", "inside full"): {"full": 1, "-b": -1},
    }
    assert plan(sweep("leave_one_out", "a")) == {("a", "left_out", "inside full"): {"full": 1, "-a": -1}}
    assert plan(sweep("ladder", "abc")) == {
        ("a", "given", "after base"): {"+a": 1, "base": -1},
        ("b", "given", "after +a"): {"+a+b": 1, "+a": -1},
        ("c", "given", "after +a+b"): {"+a+b+c": 1, "+a+b": -1},
        ("+a+b+c", "whole", "against base"): {"+a+b+c": 1, "base": -1},
    }
    two_sided = plan(sweep("two_sided", "abcd"))
    assert len(two_sided) == 4 + 4 + 4 + 1
    assert two_sided["b", "left_out", "inside full"] == {"full": 1, "-b": -1}
    assert two_sided["b", "interaction", "inside full less added to base"] == {
        "full": 1,
        "-b": -1,
        "+b": -1,
        "base": 1,
    }
    assert two_sided["full", "whole", "against base"] == {"full": 1, "base": -1}


def test_a_factorial_has_main_effects_and_pairs() -> None:
    found = plan(sweep("factorial", "abc"))
    assert found["a", "main", "average over 4 contexts"] == {
        arm: sign / 4
        for arm, sign in {
            "base": -1,
            "+a": 1,
            "+b": -1,
            "+c": -1,
            "+a+b": 1,
            "+a+c": 1,
            "+b+c": -1,
            "+a+b+c": 1,
        }.items()
    }
    # Over both values of c: half of (ab - a - b + base) and half of (abc - ac - bc + c).
    assert found["a with b", "interaction", "average over 2 contexts"] == {
        arm: sign / 2
        for arm, sign in {
            "+a+b": 1,
            "+a": -1,
            "+b": -1,
            "base": 1,
            "+a+b+c": 1,
            "+a+c": -1,
            "+b+c": -1,
            "+c": 1,
        }.items()
    }
    assert found["a", "given", "given +b"] == {"+a+b": 1, "+b": -1}
    assert found["a", "left_out", "inside +a+b+c"] == {"+a+b+c": 1, "+b+c": -1}
    kinds = [kind for _, kind, _ in found]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "added": 3, "left_out": 3, "given": 6, "main": 3, "interaction": 3, "whole": 1
    }  # fmt: skip


def test_two_sides_of_two_tricks_are_one_square_and_name_their_interaction_once() -> None:
    found = plan(sweep("two_sided", "ab"))
    assert found["a with b", "interaction", "beyond both added to base"] == {"full": 1, "+a": -1, "+b": -1, "base": 1}
    assert [name for name in found if name[1] == "interaction"] == [
        ("a with b", "interaction", "beyond both added to base")
    ]
    assert found["a", "left_out", "inside full"] == {"full": 1, "+b": -1}


HANDMADE = {
    "control": "score",
    "arms": {
        "score": [],
        "after": ["truncation=after"],
        "before": ["truncation=before"],
        "score+soft": ["shaping=soft"],
        "after+soft": ["truncation=after", "shaping=soft"],
        "other": ["surrogate=a", "aggregation=b"],
    },
    "factor": "aggregation",
    "levels": {"one": [], "two": ["x=1"]},
}


def test_arms_by_hand_are_compared_where_one_override_tells_them_apart() -> None:
    data = sweep("arms", (), **HANDMADE)
    assert [contrast.level for contrast in planned_contrasts(data)] == ["one"] * 7 + ["two"] * 7
    found = plan(data)
    assert found == {
        ("truncation=after", "added", "added to score"): {"after": 1, "score": -1},
        ("truncation=after", "given", "given score+soft"): {"after+soft": 1, "score+soft": -1},
        ("truncation=before", "added", "added to score"): {"before": 1, "score": -1},
        ("shaping=soft", "added", "added to score"): {"score+soft": 1, "score": -1},
        ("shaping=soft", "given", "given after"): {"after+soft": 1, "after": -1},
        ("truncation=after with shaping=soft", "interaction", "beyond both added to score"): {
            "after+soft": 1,
            "after": -1,
            "score+soft": -1,
            "score": 1,
        },
        # Two overrides at once: no trick's effect, but an arm's.
        ("other", "whole", "against score"): {"other": 1, "score": -1},
    }


def test_only_a_ladder_warns_of_its_order() -> None:
    assert "(b, a, c)" in order_warning(sweep("ladder", "bac"))
    for kind in ("add_one", "leave_one_out", "two_sided", "factorial"):
        assert order_warning(sweep(kind, "abc")) == ""
    nested = {"control": "x", "arms": {"x": [], "y": ["p=1"], "z": ["p=1", "q=1"]}}
    assert "(p=1, q=1)" in order_warning(sweep("arms", (), **nested))


# --- hand numbers ---------------------------------------------------------------------------------------------


def test_a_square_of_two_tricks_by_hand() -> None:
    """Seeds as columns.

    base      .10 .20 .30
    +a        .30 .50 .40     added a     .20 .30 .10, mean .20
    +b        .05 .20 .35     added b    -.05 .00 .05, mean .00
    +a+b      .35 .60 .55     left out a: +a+b - +b  .30 .40 .20, mean .30
                              main a: half of both   .25 .35 .15, mean .25
                              pair: left out a - added a = .10 .10 .10
    """
    square = {"base": [0.1, 0.2, 0.3], "+a": [0.3, 0.5, 0.4], "+b": [0.05, 0.2, 0.35], "+a+b": [0.35, 0.6, 0.55]}
    found = by_name(trick_effects(sweep("factorial", "ab"), outcome_of(square), [DOWNSTREAM]))
    expected = {
        ("a", "added"): [0.2, 0.3, 0.1],
        ("b", "added"): [-0.05, 0.0, 0.05],
        ("a", "left_out"): [0.3, 0.4, 0.2],
        ("a", "main"): [0.25, 0.35, 0.15],
        ("b", "main"): [0.0, 0.05, 0.1],
        ("a with b", "interaction"): [0.1, 0.1, 0.1],
        ("+a+b", "whole"): [0.25, 0.4, 0.25],
    }
    for name, differences in expected.items():
        assert list(found[name].differences) == [0, 1, 2]
        assert np.allclose(list(found[name].differences.values()), differences, rtol=0, atol=EXACT), name
    # sd of .20 .30 .10 is .1, so the half width is t(2, .975) .1 / sqrt(3) = 4.302653 x .057735 = .248414
    added = found["a", "added"].interval
    assert (round(added.low, 6), round(added.high, 6), added.n) == (-0.048414, 0.448414, 3)
    # t = .2 / (.1 / sqrt 3) = 3.464102 with 2 degrees of freedom: p = 1 - t / sqrt(t^2 + 2) = 1 - .9258201
    assert math.isclose(found["a", "added"].p, 1 - 3.4641016 / math.sqrt(14), abs_tol=1e-7)
    assert found["a", "main"].contrast.having == {"+a", "+a+b"}


def test_both_sides_of_a_trick_and_their_difference_by_hand() -> None:
    """full .9 .8, -a .5 .6: left out .4 .2. base .1 .1, +a .2 .4: added .1 .3. Interaction .3 -.1, mean .1."""
    values = {"base": [0.1, 0.1], "full": [0.9, 0.8], "+a": [0.2, 0.4], "-a": [0.5, 0.6]}
    data = sweep("two_sided", "abcd", seeds=(0, 1))
    finals = outcome_of(values)
    found = by_name(trick_effects(data, finals, [DOWNSTREAM]))
    assert set(found) == {("a", "added"), ("a", "left_out"), ("a", "interaction"), ("full", "whole")}
    for kind, differences in {"added": [0.1, 0.3], "left_out": [0.4, 0.2], "interaction": [0.3, -0.1]}.items():
        assert np.allclose(list(found["a", kind].differences.values()), differences, rtol=0, atol=EXACT)
    # The arms of b, c and d were not run: 3 tricks x (added, left out, interaction).
    assert len(not_run(data, finals)) == 9
    assert not_run(data, finals)[0].name == "b (added to base)"


def test_increments_of_a_ladder_by_hand() -> None:
    values = {"base": [0.1, 0.2], "+a": [0.3, 0.3], "+a+b": [0.2, 0.3]}
    found = by_name(trick_effects(sweep("ladder", "ab", seeds=(0, 1)), outcome_of(values), [DOWNSTREAM]))
    assert np.allclose(list(found["a", "given"].differences.values()), [0.2, 0.1], rtol=0, atol=EXACT)
    assert np.allclose(list(found["b", "given"].differences.values()), [-0.1, 0.0], rtol=0, atol=EXACT)


def test_only_seeds_that_all_arms_have_are_paired() -> None:
    """a shares seeds 1 and 2 with base, b seed 2 only, c none; their t tests have 2, 0 and 0 members in the family."""
    nan = math.nan
    values = {"base": [nan, 0.2, 0.3], "+a": [0.9, 0.3, 0.5], "+b": [0.8, nan, 0.4], "+c": [0.7, nan, nan]}
    data = sweep("add_one", "abc")
    found = by_name(trick_effects(data, outcome_of(values), [DOWNSTREAM]))
    assert set(found) == {("a", "added"), ("b", "added")}
    assert list(found["a", "added"].differences) == [1, 2] and found["a", "added"].n_pairs == 2
    one = found["b", "added"]
    assert list(one.differences) == [2] and math.isclose(one.interval.mean, 0.1, abs_tol=EXACT)
    assert math.isnan(one.interval.low) and math.isnan(one.p) and math.isnan(one.p_adjusted) and math.isnan(one.mde)
    assert (one.family, one.correction, one.significant) == (0, "", False)
    assert found["a", "added"].family == 1
    # c's runs exist; what they lack is the metric. Without its rows, c was not run.
    assert not_run(data, outcome_of(values)) == []
    assert [c.trick for c in not_run(data, outcome_of({arm: values[arm] for arm in ("base", "+a", "+b")}))] == ["c"]


def test_the_smallest_effect_that_could_be_found() -> None:
    """Differences .20 .30 .10 .20, sd .0816497; its power at the reported effect is 80%, by the noncentral t."""
    values = {"base": [0.1, 0.1, 0.1, 0.1], "+a": [0.3, 0.4, 0.2, 0.3]}
    effect = by_name(trick_effects(sweep("add_one", "a", range(4)), outcome_of(values), [DOWNSTREAM]))["a", "added"]
    distance = effect.mde / (math.sqrt(0.02 / 3) / math.sqrt(4))
    critical = scipy_stats.t.ppf(0.975, 3)
    power = scipy_stats.nct.sf(critical, 3, distance) + scipy_stats.nct.sf(critical, 3, -distance)
    assert math.isclose(power, 0.8, abs_tol=1e-6)


def with_p(p: float, seeds: int = 3) -> list[float]:
    """Differences around a mean of which the paired t test's p is as given."""
    around = np.array([-1.0, 0.0, 1.0])[:seeds]
    return list(around + scipy_stats.t.isf(p / 2, seeds - 1) * np.std(around, ddof=1) / math.sqrt(seeds))


def test_families_are_the_effects_of_one_kind_on_one_metric() -> None:
    """p = .01, .02, .04, .5 of four added tricks.

    Holm: .01 x 4, .02 x 3, .04 x 2, .5 x 1 = .04, .06, .08, .5.
    Benjamini-Hochberg: .01 x 4/1, .02 x 4/2, .04 x 4/3, .5 = .04, .04, .0533, .5.
    """
    tricks, ps = "abcd", (0.01, 0.02, 0.04, 0.5)
    same = {"base": [0.0] * 3} | {f"+{trick}": with_p(p) for trick, p in zip(tricks, ps)}
    finals = outcome_of(same, **{HELDOUT: same})
    effects = trick_effects(sweep("add_one", tricks), finals)
    expected = {DOWNSTREAM: (HOLM, [0.04, 0.06, 0.08, 0.5]), HELDOUT: (SCREENING, [0.04, 0.04, 0.16 / 3, 0.5])}
    for metric, (correction, adjusted) in expected.items():
        own = [effect for effect in effects if effect.metric == metric]
        assert np.allclose([effect.p for effect in own], ps, rtol=0, atol=1e-9)
        assert np.allclose([effect.p_adjusted for effect in own], adjusted, rtol=0, atol=1e-9)
        assert {(effect.correction, effect.family) for effect in own} == {(correction, 4)}


def test_levels_share_a_family_and_kinds_do_not() -> None:
    data = sweep("arms", (), **HANDMADE)
    numbers = {arm: list(np.random.default_rng(i).normal(size=3)) for i, arm in enumerate(data.arms)}
    both = [outcome_of(numbers, level=level).values for level in ("one", "two")]
    finals = FinalValues("sampled_tokens", 1.0, pd.concat(both, ignore_index=True))
    sizes = {e.contrast.kind: e.family for e in trick_effects(data, finals, [DOWNSTREAM])}
    assert sizes == {"added": 6, "given": 4, "interaction": 2, "whole": 2}


def test_nothing_is_confirmatory_that_was_not_declared() -> None:
    data = sweep("add_one", "a")
    undeclared = replace(data, design=None, runs=data.runs.replace({"arm": {"base": "p=1", "+a": "p=1,q=1"}}))
    finals = outcome_of({"p=1": [0.1, 0.2, 0.4], "p=1,q=1": [0.2, 0.2, 0.2]})
    (effect,) = trick_effects(undeclared, finals)
    assert (effect.contrast.name, effect.correction) == ("q=1 (added to p=1)", SCREENING)


def test_the_metrics_are_primary_training_reward_evaluations_and_columns() -> None:
    data = sweep("add_one", "a", primary="rollout/length", columns=["train/entropy", TRAINING_REWARD])
    suites = [f"eval/{suite}/accuracy" for suite in ("probe", "heldout_training", "heldout", "downstream")]
    assert effect_metrics(data) == ["rollout/length", TRAINING_REWARD, *suites, "train/entropy"]


# --- planted truths -------------------------------------------------------------------------------------------

DOWN = {"helps": 0.10, "hurts": -0.10, ("helps", "hurts"): 0.08}
UP = {"helps": 0.08, "hurts": 0.10, ("helps", "hurts"): -0.08}


@pytest.fixture(scope="module")
def planted() -> tuple[SweepData, FinalValues]:
    """`hurts` raises training reward and lowers downstream accuracy; alone more than beside `helps`."""
    data = synthetic_sweep(Planted(training=UP, downstream=DOWN, every=20, steps=40, seeds=tuple(range(6))))
    return data, final_values(data)


def test_planted_effects_and_interactions_are_found_and_nulls_are_not(planted: tuple[SweepData, FinalValues]) -> None:
    effects = by_name([e for e in trick_effects(*planted, [DOWNSTREAM]) if e.contrast.kind != "given"])
    truths = {
        ("helps", "added"): 0.10,
        ("hurts", "added"): -0.10,
        ("null", "added"): 0.0,
        ("helps", "left_out"): 0.18,
        ("hurts", "left_out"): -0.02,
        ("null", "left_out"): 0.0,
        ("helps", "interaction"): 0.08,
        ("hurts", "interaction"): 0.08,
        ("null", "interaction"): 0.0,
        ("helps", "main"): 0.14,
        ("hurts", "main"): -0.06,
        ("null", "main"): 0.0,
    }
    for name, truth in truths.items():
        effect = effects[name]
        assert abs(effect.interval.mean - truth) < 0.025, name
        assert effect.significant is (abs(truth) > 0.05) or name == ("hurts", "left_out"), name
    assert all(effects[name].p_adjusted < 0.05 for name in truths if abs(truths[name]) >= 0.08)
    assert all(effects["null", kind].p_adjusted > 0.05 for kind in ("added", "left_out", "interaction", "main"))


def test_reward_and_downstream_disagree_where_it_was_planted(planted: tuple[SweepData, FinalValues]) -> None:
    found = disagreements(trick_effects(*planted))
    sure = [one.downstream.contrast.name for one in found if one.significant]
    assert "hurts (added to base)" in sure and not any(name.startswith(("helps", "null")) for name in sure)
    first = found[0]
    assert first.significant and first.reward.interval.mean > 0 > first.downstream.interval.mean
    assert "changes training reward by +" in first.text and "accuracy by -" in first.text
    assert first.text.endswith("both adjusted p are below .05")


def test_a_disagreement_is_significant_only_if_both_adjusted_p_are_below_the_bound() -> None:
    """Reward +.1 +-, downstream -.1: a surely both, b's downstream is noise, c agrees, d is nothing at all."""
    clear, noisy = [0.09, 0.10, 0.11], [0.5, -0.2, -0.6]
    minus = [-value for value in clear]
    reward = {"base": [0.0] * 3, "+a": clear, "+b": clear, "+c": clear, "+d": [0.0] * 3}
    downstream = {"base": [0.0] * 3, "+a": minus, "+b": noisy, "+c": clear, "+d": minus}
    data = sweep("add_one", "abcd")
    found = disagreements(trick_effects(data, outcome_of(downstream, **{TRAINING_REWARD: reward})))
    assert [(one.reward.contrast.trick, one.significant) for one in found] == [("a", True), ("b", False)]
    assert "within noise" in found[1].text


@pytest.mark.extended
def test_the_null_is_covered_at_the_nominal_rate() -> None:
    """300 sweeps of nothing: arms share a seed's shift; 1,200 intervals, whose families share the control.

    Four arms of one sweep miss together, so 95% coverage has a standard error below 2 x sqrt(.05 x .95 / 1200) = .013;
    a family finds anything in at most 5% of 300 sweeps, standard error .013.
    """
    rng = np.random.default_rng(5)
    data, sweeps = sweep("add_one", "abcd", range(5)), 300
    rows = data.runs[["level", "arm", "seed"]].assign(collapsed=False, stopped=False)
    noise = 0.02 * rng.standard_normal((5, sweeps))[rows["seed"]] + 0.03 * rng.standard_normal((len(rows), sweeps))
    names = [f"null{number}" for number in range(sweeps)]
    values = pd.concat([rows, pd.DataFrame(noise, columns=names)], axis=1)
    effects = trick_effects(data, FinalValues("sampled_tokens", 1.0, values), names)
    covered = np.mean([effect.interval.contains(0) for effect in effects])
    assert 0.93 < covered < 0.97
    found = pd.Series([effect.p_adjusted < 0.05 for effect in effects]).groupby([e.metric for e in effects]).any()
    assert found.mean() < 0.08


def test_a_collapsed_run_counts_and_is_counted() -> None:
    """+helps of seed 1 collapses: accuracy 0 there, so its difference is minus base's accuracy."""
    planted = Planted(tricks=("helps", "null"), kind="add_one", seeds=(0, 1), collapse={("+helps", 1): 0.5}, **SMALL)
    data = synthetic_sweep(planted)
    finals = final_values(data)
    found = by_name(trick_effects(data, finals, [DOWNSTREAM]))
    helps, null = found["helps", "added"], found["null", "added"]
    assert math.isclose(helps.differences[1], -finals.of("", "base", DOWNSTREAM)[1], abs_tol=EXACT)
    assert (helps.collapsed_with, helps.collapsed_without) == (1, 0)
    assert (null.collapsed_with, null.collapsed_without) == (0, 0)
    counts = [numbers.split("   ")[1] for numbers in beside_rows(draw_forest(data, finals).figure)]
    assert counts == ["n = 2, 1 collapsed", "n = 2"]


# --- budget axes ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def costly() -> SweepData:
    """`helps` adds .06 at equal tokens, but spends three times the flops: at equal flops it stops at a third."""
    planted = Planted(
        tricks=("helps", "null"), kind="add_one", downstream={"helps": 0.06}, own_sd=0.005, steps=60, every=5,
        downstream_end=0.6, midpoint=0.5,
    )  # fmt: skip
    data = synthetic_sweep(planted)
    points = data.points.drop(columns="budget/device_seconds")
    points.loc[points["arm"] == "+helps", "budget/flops"] *= 3
    return replace(data, points=points)


def test_an_effect_that_depends_on_the_axis_is_called_so(costly: SweepData) -> None:
    on_axes = effects_on_axes(costly, [DOWNSTREAM])
    assert list(on_axes) == ["steps", "sampled_tokens", "trained_tokens", "flops"]  # seconds were not logged
    # The smallest final budget: 60 steps of 4,000 tokens at 1e7 flops a token, which only the others end with.
    assert on_axes["flops"].finals.budget == 60 * 4000 * 1e7
    effects = {axis: by_name(at.effects)["helps", "added"] for axis, at in on_axes.items()}
    assert math.isclose(effects["steps"].interval.mean, 0.06, abs_tol=0.02)
    # At equal flops +helps is at a third of its way. By the sigmoid of `rise`, 1.5 and .5: .3 + .36 x .4766 there,
    # .6 for the control: -.128.
    third = (1 + 0.5**1.5) / (1 + (0.5 / (1 / 3)) ** 1.5)
    assert math.isclose(effects["flops"].interval.mean, 0.3 + 0.36 * third - 0.6, abs_tol=0.02)
    flips = {flip.contrast.trick: flip for flip in sign_flips(on_axes)}
    assert flips["helps"].significant
    assert (flips["helps"].above, flips["helps"].below) == (("steps", "sampled_tokens", "trained_tokens"), ("flops",))
    assert "above 0 at equal steps, sampled tokens, trained tokens, below 0 at equal flops" in flips["helps"].text
    assert "null" not in flips or not flips["null"].significant


@pytest.mark.extended
def test_what_overlapping_saves_shows_at_equal_simulated_seconds(costly: SweepData) -> None:
    """`null` takes its steps in half the simulated time: at base's half way it is at its end, .6 against .5021."""
    seconds = costly.points["budget/steps"] * np.where(costly.points["arm"] == "+null", 0.5, 1.0)
    data = replace(costly, points=costly.points.assign(**{"budget/simulated_seconds": seconds}))
    on_axes = effects_on_axes(data, [DOWNSTREAM])
    assert list(on_axes)[-1] == "simulated_seconds" and on_axes["simulated_seconds"].finals.budget == 30
    effects = {axis: by_name(at.effects)["null", "added"].interval.mean for axis, at in on_axes.items()}
    half = (1 + 0.5**1.5) / (1 + (0.5 / 0.5) ** 1.5)
    assert math.isclose(effects["simulated_seconds"] - effects["steps"], 0.3 - 0.3 * half, abs_tol=0.02)
    drawn = draw_budgets(data, final_values(data))
    assert "simulated seconds" in words_of(drawn.figure) and "simulated_seconds" in set(drawn.numbers["axis"])


def test_effects_by_the_lean_points_are_those_of_all(costly: SweepData) -> None:
    """Derived quantities and averages over the run too, though only the columns they need are looked at."""
    metrics = ["gap", "overstatement", "average/rollout/truncated", TRAINING_REWARD, "eval/heldout/accuracy"]
    lean = effects_on_axes(costly, metrics, ["sampled_tokens"])["sampled_tokens"].effects
    whole = trick_effects(costly, final_values(costly, "sampled_tokens"), metrics)
    assert [(e.metric, e.differences) for e in lean] == [(e.metric, e.differences) for e in whole]
    assert {e.metric for e in lean} == set(metrics)


def test_the_budget_figure_draws_what_its_numbers_say(costly: SweepData) -> None:
    drawn = draw_budgets(costly, final_values(costly))
    assert drawn.name == "synthetic_budgets"
    numbers = drawn.numbers
    assert len(numbers) == 2 * 4  # two tricks, four axes; downstream is primary, so one panel
    axes = drawn.figure.axes[0]
    tricks = [label.get_text().partition("\n")[0] for label in axes.get_yticklabels()]
    points = [(line.get_marker(), *line.get_xydata()[0]) for line in axes.lines if len(line.get_xdata()) == 1]
    marks = {(tricks[round(y)], marker): x for marker, x, y in points if marker not in "<>"}
    assert len(marks) == len(numbers)
    for row in numbers.itertuples():
        assert math.isclose(marks[row.trick, LOOKS[row.axis].marker], row.value, abs_tol=1e-6)
    assert set(numbers.loc[numbers["trick"] == "helps", "flip"]) == {"resolved"}
    assert "⇄ the sign depends on the axis: bold, adjusted p below .05" in drawn.caption
    assert "⇄" in words_of(drawn.figure) and "at 240,000 sampled tokens (declared)" in words_of(drawn.figure)


def test_one_axis_is_nothing_to_compare(costly: SweepData) -> None:
    only = [name for name in costly.points if not name.startswith("budget/") or name == "budget/sampled_tokens"]
    data = replace(costly, points=costly.points[only])
    assert "only 1 budget axis" in draw_budgets(data, final_values(data))


# --- tables and the forest ------------------------------------------------------------------------------------


def words_of(figure: Any) -> str:
    texts = [text.get_text() for text in figure.texts]
    for legend in figure.legends:
        texts += [text.get_text() for text in legend.get_texts()]
    for axes in figure.axes:
        texts += [text.get_text() for text in axes.texts]
    return "\n".join(texts)


def beside_rows(figure: Any) -> list[str]:
    """The numbers at the right of the first panel of a forest, from the top."""
    (axis,) = figure.axes[0].child_axes
    return [label.get_text() for label in axis.get_yticklabels()]


def test_the_table_has_every_contrast_and_says_its_family(planted: tuple[SweepData, FinalValues]) -> None:
    table = effects_table(*planted)
    assert len(table) == 5 * (3 + 3 + 6 + 3 + 3 + 1)  # five metrics; three tricks two-sided are a whole factorial
    row = table[(table["trick"] == "hurts") & (table["kind"] == "added") & (table["metric"] == DOWNSTREAM)].iloc[0]
    assert (row["correction"], row["family"], row["n_pairs"]) == (HOLM, 3, 6)
    assert row["low"] < row["effect"] < row["high"] < 0 and row["p"] <= row["p_adjusted"] < 0.05
    text = effects_markdown(*planted)
    assert "| hurts | added to base | 6 | 0 / 0 |" in text
    assert (
        f"by Holm on {DOWNSTREAM}" in text and "(added 3, left out 3, given 6, main 3, interaction 3, whole 1)" in text
    )
    assert "disagree in sign: hurts (added to base) changes" in text and "Not run" not in text


def test_the_markdown_says_what_was_not_run_and_that_order_matters() -> None:
    data = sweep("ladder", "abc")
    values = {"base": [0.1, 0.2, 0.1], "+a": [0.3, 0.3, 0.4], "+a+b": [0.2, 0.3, 0.1]}
    text = effects_markdown(data, outcome_of(values))
    assert "Not run: c (after +a+b), +a+b+c (against base)." in text and "Order matters" in text
    alone = effects_markdown(data, outcome_of({"base": [0.1, 0.2, 0.1]}))
    assert alone == "No two arms that ran differ by exactly one trick.\n"


def test_the_forest_draws_what_its_numbers_say(planted: tuple[SweepData, FinalValues]) -> None:
    drawn = draw_forest(*planted)
    assert drawn.name == "synthetic_forest"
    main, second = drawn.figure.axes
    marks = {line.get_label(): float(line.get_xdata()[0]) for line in main.lines if "(" in line.get_label()}
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    downstream = means[(means["metric"] == DOWNSTREAM) & means["kind"].isin(["added", "left_out"])]
    assert len(marks) == len(downstream) == 6
    for row in downstream.itertuples():
        assert math.isclose(marks[f"{row.trick} ({row.context})"], row.value, abs_tol=1e-6)
    # In percentage points: added .10.
    assert abs(downstream.iloc[0]["value"] - 10) < 2.5
    assert (means["metric"] == TRAINING_REWARD).sum() == 6
    crosses = [float(line.get_xdata()[0]) for line in second.lines if line.get_marker() == "P"]
    assert np.allclose(crosses, means.loc[means["kind"] == "interaction", "value"], rtol=0, atol=1e-6)
    hurts = means[(means["trick"] == "hurts") & (means["kind"] == "added") & (means["metric"] == DOWNSTREAM)].iloc[0]
    assert hurts["disagreement"] == "resolved"
    assert "p < .05 after Holm" in drawn.caption and "too small to be found" in words_of(drawn.figure)
    written = zip(beside_rows(drawn.figure), downstream.itertuples(), strict=True)
    assert all(numbers.startswith(f"{row.value:+.1f} [") and f"n = {row.n}" in numbers for numbers, row in written)
    band = drawn.numbers[drawn.numbers["part"] == "band"].iloc[0]
    assert math.isclose(band["high"], 100 * noise_band(*planted, "", 6), abs_tol=1e-6) and band["low"] == -band["high"]


def test_the_noise_band_by_hand() -> None:
    """Control .1 .2 .3: sd .1, so differences of arms that share nothing deviate by .1 sqrt 2; 80% power of 3 pairs."""
    data = sweep("add_one", "a")
    finals = outcome_of({"base": [0.1, 0.2, 0.3], "+a": [0.1, 0.1, 0.1]})
    end = noise_band(data, finals, "", 3)
    distance = end / (0.1 * math.sqrt(2)) * math.sqrt(3)
    critical = scipy_stats.t.ppf(0.975, 2)
    power = scipy_stats.nct.sf(critical, 2, distance) + scipy_stats.nct.sf(critical, 2, -distance)
    assert math.isclose(power, 0.8, abs_tol=1e-6)
    assert math.isnan(noise_band(data, finals, "", 1))


def test_the_caption_says_of_how_many_seeds_the_band_is() -> None:
    values = [0.5 + 0.01 * (seed % 3) for seed in range(12)]
    data, finals = sweep("add_one", "a", seeds=tuple(range(12))), outcome_of({"base": values, "+a": values[::-1]})
    caption = draw_forest(data, finals).caption
    assert "12 pairs would detect with less than 80% power" in caption and "like the 12 seeds of base" in caption


def test_many_tricks_one_pair_and_no_interval() -> None:
    tricks = [f"trick{number}" for number in range(17)]
    values = {"base": [0.2]} | {f"+{trick}": [0.2 + number / 100] for number, trick in enumerate(tricks)}
    drawn = draw_forest(sweep("add_one", tricks, seeds=(0,)), outcome_of(values))
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert list(means["trick"]) == tricks and means[["low", "high", "p_adjusted"]].isna().all(axis=None)
    assert "no interval" in drawn.bands and drawn.numbers["part"].ne("band").all()


def test_a_bar_that_leaves_the_panel_says_so() -> None:
    """Three seeds: t(2, .975) = 4.30, so differences -.3, .3 and .3 have the interval .1 +- .86."""
    drawn = draw_forest(sweep("add_one", "a"), outcome_of({"base": [0.5] * 3, "+a": [0.2, 0.8, 0.8]}))
    assert "arrowhead" in drawn.bands
    assert max(drawn.figure.axes[0].get_xlim()) < 60
    assert [line.get_marker() for line in drawn.figure.axes[0].lines if line.get_marker() in "<>"] == ["<", ">"]
    tight = draw_forest(sweep("add_one", "a"), outcome_of({"base": [0.0] * 3, "+a": [0.1, 0.11, 0.12]}))
    assert "arrowhead" not in tight.bands


def test_a_sweep_that_is_half_done_is_drawn_as_far_as_it_went() -> None:
    """At level one both sides of a, at level two only a added; before that, nothing."""
    levels = {"factor": "x", "levels": {"one": [], "two": ["x=1"]}}
    data = sweep("two_sided", "abc", **levels)
    first = {"base": [0.1, 0.2, 0.3], "+a": [0.1, 0.3, 0.5], "full": [0.4, 0.5, 0.5], "-a": [0.2, 0.1, 0.2]}
    second = {"base": [0.1, 0.2, 0.3], "+a": [0.1, 0.3, 0.5]}
    parts = [outcome_of(first, level="one").values, outcome_of(second, level="two").values]
    finals = FinalValues("sampled_tokens", 1.0, pd.concat(parts, ignore_index=True))
    drawn = draw_forest(data, finals)
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert list(zip(means["level"], means["kind"])) == [
        ("one", "added"), ("one", "left_out"), ("one", "interaction"), ("two", "added")
    ]  # fmt: skip
    assert "Not run: b added to base at x = one" in drawn.caption
    assert "opposite" not in words_of(drawn.figure) + drawn.caption  # nothing was logged of training reward
    alone = outcome_of({"base": [0.1, 0.2, 0.3]}, level="one")
    assert "that ran" in draw_forest(data, alone)


def test_a_factorial_shows_main_effects_then_pairs() -> None:
    rng = np.random.default_rng(0)
    data = sweep("factorial", "abc")
    drawn = draw_forest(data, outcome_of({arm: list(rng.normal(size=3)) for arm in data.arms}))
    means = drawn.numbers[drawn.numbers["part"] == "mean"]
    assert list(means["trick"]) == ["a", "b", "c", "a with b", "a with c", "b with c"]
    assert list(means["kind"]) == ["main"] * 3 + ["interaction"] * 3


def test_arms_that_no_single_trick_tells_apart_have_no_forest() -> None:
    arms = {"control": "x", "arms": {"x": [], "y": ["p=1", "q=1"]}}
    data, finals = sweep("arms", (), **arms), outcome_of({"x": [0.1, 0.2, 0.3], "y": [0.2, 0.2, 0.2]})
    assert draw_forest(data, finals) == "no two of its arms differ by exactly one trick"
    (effect,) = trick_effects(data, finals)
    assert effect.contrast.kind == "whole"


def test_an_effect_falls_into_its_selection_and_its_amount() -> None:
    """By hand: plain .50, clip .60, its twin .53: of .10, .07 is which tokens and .03 how many."""
    arms = {"plain": [], "clip": ["surrogate=ppo_higher"], "token": ["aggregation=token_mean"]}
    data = sweep("arms", (), arms=arms, control="plain", twin=True)
    found = plan(data)
    assert found[("surrogate=ppo_higher", "selection", "its choice, against a random one")] == {
        "clip": 1,
        "clip_twin": -1,
    }
    assert found[("surrogate=ppo_higher", "amount", "a random choice, against plain")] == {"clip_twin": 1, "plain": -1}
    assert not [name for name, weights in found.items() if name[1] == "whole"], "a twin is no arm of many tricks"
    values = {
        "plain": [0.5, 0.51, 0.49],
        "clip": [0.6, 0.62, 0.58],
        "token": [0.5, 0.5, 0.5],
        "clip_twin": [0.53, 0.54, 0.52],
    }
    finals = outcome_of(values)
    by = {e.contrast.kind: e for e in trick_effects(data, finals, [DOWNSTREAM]) if "surrogate" in e.contrast.trick}
    assert by["added"].interval.mean == pytest.approx(0.10, abs=EXACT)
    assert by["selection"].interval.mean == pytest.approx(0.07, abs=EXACT)
    assert by["amount"].interval.mean == pytest.approx(0.03, abs=EXACT)
    assert by["selection"].family == by["amount"].family == 1, "each kind is a family of its own"
