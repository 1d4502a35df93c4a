"""Training reward against what it should measure: a verifier's accuracy, and over arms entropy and accuracy."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
from planted_sweeps import Planted, synthetic_sweep
from scipy import stats

from grpo_lab.analysis.divergence.quantities import judge_quantities, quantities_table, quantities_text
from grpo_lab.analysis.divergence.sharpening import ENTROPY, sharpening, sharpening_of_level, sharpening_text
from grpo_lab.analysis.figures import proxy, sharpness
from grpo_lab.analysis.final_values import HELDOUT, final_values
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import QuantityPrediction

MANY = Planted(
    tricks=tuple("abcdefg"), kind="add_one", seeds=(0, 1, 2, 3), bases=4, steps=20, every=4, questions=8,
    training={trick: 0.02 * place for place, trick in enumerate("abcdefg")},
)  # fmt: skip


@pytest.fixture(scope="module")
def many() -> SweepData:
    return synthetic_sweep(MANY)


def test_a_gamed_grader_is_seen_and_an_honest_one_needs_no_figure(many: SweepData) -> None:
    finals = final_values(many)
    assert proxy.draw_proxy(many, finals) == f"{proxy.VERIFIED} not logged"
    gap = many.points["arm"].map({"+a": 0.5}).fillna(0.0)
    gamed = replace(many, points=many.points.assign(**{proxy.VERIFIED: many.points[HELDOUT] - gap}))
    drawn = proxy.draw_proxy(gamed, finals, arms=["base", "+a"], heading="One reward, two truths", name="picture")
    assert drawn is not None and drawn.name == "picture" and set(drawn.numbers["arm"]) == {"base", "+a"}
    means = drawn.numbers[(drawn.numbers["part"] == "mean") & (drawn.numbers["series"] == HELDOUT)]
    ends = {arm: rows["value"].iloc[-1] for arm, rows in means.groupby("arm")}
    assert ends == {arm: pytest.approx(finals.interval("", arm, HELDOUT).mean, abs=1e-3) for arm in ends}
    assert not set(drawn.numbers.loc[drawn.numbers["part"] == "seed", "series"]) & {HELDOUT}, "one line, no runs"
    honest = replace(many, points=many.points.assign(**{proxy.VERIFIED: many.points[HELDOUT]}))
    assert "agree on held-out answers" in proxy.draw_proxy(honest, finals)


def test_reward_that_follows_entropy_is_seen_within_base_models(many: SweepData) -> None:
    """Entropy is planted as what reward is not; base models differ by more than arms do."""
    lacking = replace(many, points=many.points.drop(columns="train/entropy"))
    assert sharpness.draw_sharpness(lacking, final_values(lacking)) == "train/entropy not logged"
    entropy = 2.0 - many.points["reward/outcome"] + many.points["seed"]
    data = replace(many, points=many.points.assign(**{"train/entropy": entropy}))
    finals = final_values(data)
    drawn = sharpness.draw_sharpness(data, finals)
    assert drawn is not None
    found = drawn.numbers[drawn.numbers["metric"] == "rank correlation with train/entropy"].iloc[0]
    assert found["value"] == pytest.approx(-1) and found["n"] == 4
    dots = drawn.numbers[drawn.numbers["metric"] == "reward/outcome"]
    assert len(dots) == 8 and dots["value"].sum() == pytest.approx(0, abs=1e-5)
    few = replace(data, points=data.points[data.points["arm"].isin(["base", "+a", "+b"])])
    assert sharpness.draw_sharpness(few, final_values(few)) == "no level has 6 arms that were evaluated alike"


def sharpened(data: SweepData, ends: float) -> SweepData:
    """Accuracy 0.3, 0.4 and 0.5 at entropies 0.3, 0.2 and 0.1 of the initial policy; runs end at entropy `ends`."""
    first, last = data.points["step"] == 0, data.points["step"] == data.points["step"].max()
    planted = {ENTROPY: 0.3 * first + ends * last, "eval/sharpened_80/entropy": 0.2, "eval/sharpened_80/accuracy": 0.4}
    planted |= {"eval/sharpened_60/entropy": 0.1, "eval/sharpened_60/accuracy": 0.5}
    points = data.points.assign(**planted)
    points.loc[first, HELDOUT] = 0.3
    points.loc[~(first | last), ENTROPY] = float("nan")
    return replace(data, points=points)


def test_the_sharpening_share_by_hand(many: SweepData) -> None:
    data = sharpened(many, 0.15)  # between the temperatures: 0.45
    finals = final_values(data)
    share = sharpening(data, finals)["", "base"]
    gained = finals.interval("", "base", HELDOUT).mean - 0.3
    assert share.sharpened == pytest.approx(0.15) and share.gained == pytest.approx(gained)
    assert share.share.mean == pytest.approx(0.15 / gained) and share.share.low < share.share.mean < share.share.high
    assert f"base: {share.share.text()}, +0.150 of" in sharpening_text(data, finals)


def test_a_sharpening_share_that_is_unknown_says_why(many: SweepData) -> None:
    none = sharpening_text(many, final_values(many))
    assert none.startswith("Sharpening share of the reward gain: not available, the initial policy was not sampled")
    for ends, side in ((0.35, "above"), (0.05, "below")):
        data = sharpened(many, ends)
        assert f"ends {side} that of the initial policy" in sharpening(data, final_values(data))["", "base"].note
    flat = sharpened(many, 0.15)
    flat.points.loc[flat.points["step"] > 0, HELDOUT] = 0.3
    found = sharpening(flat, final_values(flat))["", "base"]
    assert found.note == "the reward gain is less than twice its standard error" and found.sharpened == pytest.approx(
        0.15
    )


def test_runs_of_one_base_model_are_one_observation(many: SweepData) -> None:
    """Where one of four base models is finished so far, the runs of all arms on it prove nothing about another."""
    data = sharpened(many, 0.15)
    first = [seed for seed, base in final_values(data).bases.items() if base == 0]
    runs, points = (table[table["seed"].isin(first)] for table in (data.runs, data.points))
    rest = data.runs[
        (data.runs["arm"] == "base") & ~data.runs["seed"].isin(first)
    ]  # the other base models have no share yet
    later = data.points[(data.points["arm"] == "base") & ~data.points["seed"].isin(first)]
    later = later.assign(**{name: math.nan for name in later if "sharpened" in str(name)})
    partly = replace(data, runs=pd.concat([runs, rest]), points=pd.concat([points, later]))
    finals = final_values(partly)
    assert len(set(finals.bases.values())) == 4
    whole = sharpening_of_level(partly, finals, "").share
    assert (whole.bases, whole.n) == (1, 8) and math.isnan(whole.low) and whole.mean > 0
    (judged,) = judge_quantities(predicted(partly, QuantityPrediction("sharpening_share", above=-5.0)), finals)
    assert judged.verdict == "not significant" and math.isnan(judged.holm)
    assert sharpening(partly, finals)["", "+a"].share.bases == 1


def predicted(data: SweepData, *quantities: QuantityPrediction) -> SweepData:
    assert data.design is not None
    return replace(data, design=replace(data.design, quantities=quantities))


@pytest.mark.extended
def test_predicted_quantities_by_hand(many: SweepData) -> None:
    """Shares of 0.15 in the mean, rank correlations of -1 without scatter, which four base models cannot prove."""
    entropy = 2.0 - many.points["reward/outcome"] + many.points["seed"]
    data = sharpened(many, 0.15)
    data = replace(data, points=data.points.assign(**{"train/entropy": entropy}))
    rank, level, one = "rank/train/entropy", "sharpening_share", "sharpening_share/base"
    data = predicted(
        data,
        QuantityPrediction(rank, below=-0.5),
        QuantityPrediction(level, above=-5.0),
        QuantityPrediction(one, above=5.0),
        QuantityPrediction(one, above=0.3),
        QuantityPrediction("rank/eval/heldout_greedy/accuracy", above=0.0),
    )
    finals = final_values(data)
    judged = judge_quantities(data, finals)
    assert [found.verdict for found in judged] == [
        "not significant",
        "supported",
        "contradicted",
        "not significant",
        "not run",
    ]
    assert judged[0].measured.mean == -1 and judged[0].holm == pytest.approx(3 * 2.0**-3)
    share, whole = sharpening(data, finals)["", "base"].share, sharpening_of_level(data, finals, "").share
    assert judged[2].measured == share and judged[1].measured == whole
    gains = [finals.interval("", arm, HELDOUT).mean - 0.3 for arm in data.arms]
    assert whole.mean == pytest.approx(0.15 * len(gains) / sum(gains)) and (whole.n, whole.bases) == (32, 4)
    error = (share.high - share.low) / 2 / stats.t.ppf(0.975, 3)
    assert judged[2].holm == pytest.approx(4 * 2 * stats.t.sf((5 - share.mean) / error, 3))
    text = quantities_text(data, finals)
    assert "contradicted: sharpening share of base is above 5" in text and "of all arms is above -5" in text
    table = quantities_table(data, finals).splitlines()
    assert len(table) == 7 and table[2].startswith("| rank correlation of training reward with policy entropy")
    assert quantities_text(many, final_values(many)) == ""
