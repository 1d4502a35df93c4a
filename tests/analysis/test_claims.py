"""What the saved sweeps say of claims: the word from the source's point of view, and the table of the index."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import yaml
from declared_experiments import (
    DECLARATIONS,
    EXPERIMENTS,
    FOLDERS,
    SAVED,
    declaration,
    saved_data,
    saved_description,
    saved_points,
)
from gap_study.across import saved_pool
from pages import numbers, tables
from pages.claims import (
    EQUIVALENT,
    Answer,
    answers,
    claim_verdict,
    claims_table,
    claims_text,
)
from pages.claims_figure import claim_numbers, draw_claims
from pages.contrasts import contrast_of, same_contrasts
from pages.saved_sweeps import SavedSweeps, saved_sweeps
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.effects.manipulation_checks import failed_checks, manipulation_checks
from grpo_lab.analysis.effects.speed import ceiling_of, token_ratio
from grpo_lab.analysis.effects.verdict import VERDICTS, Judgement
from grpo_lab.analysis.final_values import final_values, is_rated, is_share, reached
from grpo_lab.analysis.metric_names import title, unit
from grpo_lab.analysis.stats.comparison import compare
from grpo_lab.config.design import Direction, Prediction, load_design, named_design, read_design
from grpo_lab.tracking.metrics import is_known

ROOT = Path(__file__).parents[2]
ABOVE, BELOW, WITHIN = Direction


@pytest.fixture(scope="module", autouse=True)
def forgotten() -> Iterator[None]:
    """The saved sweeps take gigabytes, which other tests do not need."""
    yield
    saved_sweeps(EXPERIMENTS).loaded.clear()


def judgement(predicted: Direction, word: str, mean: float) -> Judgement:
    """A prediction with this verdict, from eight pairs on 4 base models with this mean difference; margin 0.05."""
    pairs = {seed: mean + 0.001 * (seed - 3.5) for seed in range(8)}
    found = compare(pairs, {seed: seed % 4 for seed in pairs})
    prediction = Prediction("arm", "eval/heldout/accuracy", predicted)
    within = found.within(0.05)
    return Judgement(prediction, ("", "base"), found, 0.05, found.p, found.p, within, within, 1, word)


@pytest.mark.parametrize(
    ("expected", "predicted", "word", "mean", "says"),
    [
        (ABOVE, ABOVE, "supported", 0.2, "supported"),
        (ABOVE, ABOVE, "contradicted", -0.2, "contradicted"),
        (ABOVE, ABOVE, "equivalent within the margin", 0.01, EQUIVALENT),
        (ABOVE, ABOVE, "supported", 0.01, EQUIVALENT),
        (ABOVE, BELOW, "supported", -0.01, EQUIVALENT),
        (BELOW, ABOVE, "contradicted", -0.01, EQUIVALENT),
        (ABOVE, BELOW, "supported", -0.2, "contradicted"),
        (ABOVE, BELOW, "contradicted", 0.2, "supported"),
        (ABOVE, BELOW, "equivalent within the margin", 0.01, EQUIVALENT),
        (ABOVE, WITHIN, "supported", 0.01, EQUIVALENT),
        (ABOVE, WITHIN, "contradicted", 0.2, "supported"),
        (ABOVE, WITHIN, "contradicted", -0.2, "contradicted"),
        (BELOW, WITHIN, "contradicted", -0.2, "supported"),
        (WITHIN, WITHIN, "supported", 0.01, "supported"),
        (WITHIN, WITHIN, "contradicted", 0.2, "contradicted"),
        *(
            (ABOVE, direction, word, 0.1, word)
            for direction in Direction
            for word in ("not significant", "manipulation check failed")
        ),
        (BELOW, ABOVE, "not run", 0.0, "not run"),
    ],
)
def test_a_verdict_is_told_from_the_point_of_view_of_the_source(
    expected: Direction, predicted: Direction, word: str, mean: float, says: str
) -> None:
    assert claim_verdict(expected, judgement(predicted, word, mean)) == says


@pytest.mark.extended
def test_saved_sweeps_answer_and_those_without_runs_say_so(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS["overlong_worlds"], tmp_path / "overlong_worlds")
    (tmp_path / "dapo_worlds").mkdir()
    shutil.copy(declaration("dapo_worlds"), tmp_path / "dapo_worlds")
    found = answers(saved_sweeps(tmp_path))
    assert list(found) == sorted(found, key=lambda answer: (answer.trick, VERDICTS.index(answer.verdict)))
    said = [
        ("aggregation", "not run"),
        ("reward_shaping", EQUIVALENT),
        ("truncation", "supported"),
        ("truncation", EQUIVALENT),
    ]
    assert [(answer.trick, answer.verdict) for answer in found] == said
    assert found[0].where == ("world=length", "regime=trust_region")
    assert found[-1].where == ("world=length", "recipe=dr_grpo"), "what both arms set, without budget and evaluation"
    table = claims_table(found)
    assert (
        "| +0.168 [+0.146, +0.189] | +0.087 [+0.077, +0.098] (2 contrasts, 1 sweep, 2 environments, 8 base models) |"
        in table
    )
    assert " | - |  | [supported](overlong_worlds/README.md) | n = 8 on 4 base models |" in table
    assert "n = 8 on 4 base models [figure](overlong_worlds/figures/overlong_worlds_effects.png)" in claims_table(
        found, {"overlong_worlds"}
    )
    assert "[equivalent within the margin](overlong_worlds/README.md)" in table
    assert "[not run](dapo_worlds/README.md) |  |" in table
    assert "downstream accuracy +0.001 [-0.017, +0.019], n = 8 on 4 base models" in claims_text(found)
    numbers = claim_numbers(found)  # the first has no margin and the last no runs
    assert numbers["margin"].tolist() == [0.05, 0.05] and set(numbers["verdict"]) == {EQUIVALENT}
    drawn = draw_claims(found)
    assert drawn is not None and drawn.numbers.equals(numbers) and draw_claims(found[:1]) is None


def test_tokens_to_a_share_of_the_controls_gain_by_hand() -> None:
    x, values = np.array([0.0, 10.0, 20.0, 30.0]), np.array([0.2, 0.4, 0.8, 1.0])
    assert (reached(x, values, 0.6), reached(x, values, 0.2), reached(x, values, 1.1)) == (15.0, 0.0, math.inf)
    made = Planted(
        tricks=("helps",), kind="add_one", training={"helps": 0.0}, seeds=(0, 1, 2, 3), seed_sd=0.0, own_sd=0.0, every=2
    )
    data = synthetic_sweep(made)
    finals, metric = final_values(data), "eval/heldout_training/accuracy"
    alike = token_ratio(data, finals, ("", "+helps"), ("", "base"), metric, 0.5)
    assert alike.n == 4 and alike.mean == pytest.approx(1.0, abs=0.25)
    slower = data.points.copy()
    mine = slower["arm"] == "+helps"
    slower.loc[mine, "budget/sampled_tokens"] *= 2
    late = token_ratio(replace(data, points=slower), finals, ("", "+helps"), ("", "base"), metric, 0.5)
    assert late.mean == pytest.approx(2 * alike.mean) and late.low <= late.mean <= late.high
    never = slower.assign(**{metric: slower[metric].where(~mine, 0.3)})
    none = token_ratio(replace(data, points=never), finals, ("", "+helps"), ("", "base"), metric, 0.5)
    assert none.why == "not reached in 4 of 4" and math.isnan(none.low)
    at_once = slower.assign(**{metric: slower[metric].where(~mine, 0.9)})
    assert token_ratio(replace(data, points=at_once), finals, ("", "+helps"), ("", "base"), metric, 0.5).why == (
        "there at step 0 in 4 of 4"
    )


@pytest.mark.extended
def test_tokens_to_a_share_may_be_predicted() -> None:
    """As the ratio of `token_ratio`, in doublings; a run that never gets there counts with all its tokens."""
    metric = "tokens_to_half/eval/heldout_training/accuracy"
    assert is_known(metric) and not is_known("tokens_to_half/eval/heldout/entropy") and unit(metric) == "doublings"
    assert title(metric) == "sampled tokens to half of the control's gain in held-out accuracy, training protocol, log2"
    assert not is_rated(metric) and not is_share(metric)
    made = Planted(
        tricks=("helps",), kind="add_one", training={"helps": 0.0}, seeds=(0, 1, 2, 3), seed_sd=0.0, own_sd=0.0, every=2
    )
    data = synthetic_sweep(made)
    assert data.design is not None
    data = replace(data, design=replace(data.design, columns=(metric,)))
    slower, mine = data.points.copy(), data.points["arm"] == "+helps"
    slower.loc[mine, "budget/sampled_tokens"] *= 2
    late = replace(data, points=slower)
    plain = {arm: final_values(data).of("", arm, metric) for arm in ("base", "+helps")}
    finals = final_values(late)
    assert (finals.of("", "+helps", metric) - plain["+helps"]).round(9).tolist() == [1.0] * 4
    ratio = token_ratio(late, finals, ("", "+helps"), ("", "base"), metric.removeprefix("tokens_to_half/"), 0.5)
    assert 2 ** finals.difference("", "+helps", "base", metric).mean == pytest.approx(ratio.mean)
    evaluated = "eval/heldout_training/accuracy"
    never = slower.assign(**{evaluated: slower[evaluated].where(~mine, 0.3)})
    most = float(never.loc[mine, "budget/sampled_tokens"].max())
    found = final_values(replace(data, points=never)).of("", "+helps", metric)
    assert found.tolist() == pytest.approx([math.log2(most)] * 4)
    for start, why in ((0.9, "there at step 0"), (0.3, "no gain of the control")):
        at_once = slower.assign(**{evaluated: slower[evaluated].where(~mine if start > 0.5 else mine, start)})
        assert final_values(replace(data, points=at_once)).of("", "+helps", metric).empty, why


def test_every_saved_sweep_holds_what_its_declaration_requires() -> None:
    """A metric that was not saved would read as an arm that could not act."""
    found = {
        (design.name, action.metric): action.arm_mean
        for design in map(load_design, DECLARATIONS)
        if design.requires and design.name in SAVED
        for action in manipulation_checks(saved_data(design.name))
    }
    assert len(found) > 10 and not [place for place, mean in found.items() if math.isnan(mean)]


@pytest.mark.extended
def test_contrasts_that_could_not_act_are_not_pooled() -> None:
    """Clip-higher touched too few tokens in both environments of dapo_worlds, so clipping alone measured it."""
    saved = saved_sweeps(EXPERIMENTS)
    (clip_higher,) = (one for one in answers(saved) if one.claim.says.startswith("a wider upper bound keeps"))
    worlds = next(design for design in saved.designs if design.name == "dapo_worlds")
    pairs = same_contrasts(worlds, contrast_of(clip_higher.design, *clip_higher.places))
    assert {arm for (_, arm), _ in pairs} == {"+clip_higher"} and clip_higher.pooled == ""
    assert {condition for condition, _ in pairs} <= failed_checks(saved.load(worlds)[0]).keys()


@pytest.mark.extended
def test_a_gain_without_headroom_is_said() -> None:
    told = answers(saved_sweeps(EXPERIMENTS))
    found = {answer.claim.says: answer for answer in told}
    (sampling,) = (one for one in told if one.design.name == "zero_signal" and "dynamic" in one.claim.says)
    assert sampling.headroom == "no headroom: the control ends at 0.942, the ceiling is 0.944, the margin 0.03"
    assert sampling.speed.startswith("1.95 [") and sampling.headroom in claims_table([sampling])
    assert found["the KL penalty can go"].headroom == "", "a claim of no effect needs no room"
    assert ceiling_of("eval/heldout/accuracy", "length") == 0.944
    assert ceiling_of("eval/downstream/accuracy", "length") == ceiling_of("eval/heldout/accuracy", "unknown") == 1.0


def test_a_declaration_that_changed_after_its_runs_gets_no_answer(tmp_path: Path) -> None:
    shutil.copytree(FOLDERS["overlong_worlds"], tmp_path / "overlong_worlds")
    declared = yaml.safe_load(declaration("overlong_worlds").read_text())
    declared["design"]["margin"] = 0.1
    (tmp_path / "overlong_worlds" / "design.yaml").write_text(yaml.safe_dump(declared))
    with pytest.raises(ValueError, match="was changed after its runs"):
        answers(saved_sweeps(tmp_path))


def test_claims_decide_nothing() -> None:
    design = named_design("overlong_worlds")
    assert design.claims and replace(design, claims=()).fingerprint() == design.fingerprint()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"says": "x", "source": "y", "prediction": 9, "direction": "above"}, r"no prediction 9; .* 0 to 7"),
        ({"says": "x", "source": "y", "prediction": 0, "direction": "within"}, "is not within a margin"),
        ({"says": "x", "source": "y", "prediction": 0}, "must give says"),
        ({"says": "x", "source": "y", "prediction": True, "direction": "above"}, "must give says"),
        ({"says": "x", "source": "y", "prediction": 0, "direction": "up"}, "must give says"),
        ("x", "must give says"),
    ],
)
def test_a_claim_that_cannot_be_judged_is_refused(entry: object, message: str) -> None:
    node = yaml.safe_load(declaration("overlong_worlds").read_text())["design"]
    with pytest.raises(ValueError, match=message):
        read_design(node | {"claims": [entry]})


@pytest.mark.extended
def test_superseded_experiments_stand_apart() -> None:
    """In a folder of their own, with the experiment that asked again, and without claims."""
    designs = {path.parent.name: load_design(path) for path in DECLARATIONS}
    superseded = {name: design for name, design in designs.items() if design.superseded}
    assert {name for name, folder in FOLDERS.items() if folder.parent.name == "superseded"} == superseded.keys()
    for design in superseded.values():
        assert not design.claims and not designs[design.superseded].superseded


def final(points: pd.DataFrame, metric: str, at: float, axis: str) -> pd.Series:
    """By seed: an evaluation at a run's end or at step 0; a metric of every step near a budget, or its mean so far."""
    if metric.startswith("log_odds/"):
        logged = metric.removeprefix("log_odds/")
        share, of = (final(points, name, at, axis) for name in (logged, logged.replace("accuracy", "responses")))
        return np.log((share * of + 0.5) / ((1 - share) * of + 0.5))
    found = {}
    for seed, run in points.sort_values("step").groupby("seed"):
        budget, values = run[axis].ffill(), run[metric.removeprefix("average/").removeprefix("start/")]
        here = values.notna()
        if metric.startswith("eval/"):
            assert budget.iloc[-2] < at <= budget.iloc[-1], "a run's last step is the one that crosses the budget"
            found[seed] = values[here].iloc[-1]
        elif metric.startswith("start/"):
            found[seed] = values[run["step"] == 0].item()
        else:
            since = 0.0 if metric.startswith("average/") else 0.8 * at
            found[seed] = values[here & (budget > since) & (budget <= at)].mean()
    return pd.Series(found)


@pytest.mark.extended  # as the other comparisons by other code, in test_across.py
@pytest.mark.timeout(900)
def test_every_effect_of_the_table_by_other_code() -> None:
    """From the saved numbers with numpy and scipy alone: the mean over base models, and its t interval."""
    found = [one for one in answers(saved_sweeps(EXPERIMENTS)) if one.judgement]
    for name in dict.fromkeys(one.design.name for one in found):
        points = saved_points(name)
        for _, twin_of, twin in saved_description(name)["twins"]:
            points[twin_of] = points[twin]
        for answer in found:
            if answer.design.name == name:
                by_other_code(answer, points)


def by_other_code(answer: Answer, points: pd.DataFrame) -> None:
    design, judged = answer.design, answer.judgement
    assert judged is not None
    prediction = judged.prediction
    axis = f"budget/{design.axis}"
    at = points.groupby(["level", "arm", "seed"])[axis].max().min()
    conditions = [(prediction.level, prediction.arm), judged.reference]
    arm, reference = (
        final(points[(points["level"] == level) & (points["arm"] == name)], prediction.metric, at, axis)
        for level, name in conditions
    )
    pairs = (arm - reference).dropna()
    by_base = pairs.groupby([design.base_of(seed) for seed in pairs.index]).mean()
    whole = judged.difference
    if (
        answer.verdict == "manipulation check failed" and not (points["arm"] == prediction.arm).any()
    ):  # its pilot said so: no runs
        assert by_base.empty and whole.n == 0
        return
    assert len(by_base) == len(design.bases)
    half = scipy.stats.t.ppf(0.975, len(by_base) - 1) * by_base.std(ddof=1) / math.sqrt(len(by_base))
    assert whole.mean == pytest.approx(by_base.mean(), abs=1e-6)
    if not math.isnan(whole.low):
        assert (whole.low, whole.high) == pytest.approx((by_base.mean() - half, by_base.mean() + half), abs=1e-6)


@pytest.mark.parametrize("begun", [False, True])
def test_a_sweep_underway_answers_nothing(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last seed's runs are not in the data, as parts that have not begun, or in it without a point logged."""
    name = "zero_signal"
    whole, design = saved_data(name), load_design(declaration(name))
    last = whole.runs["seed"] == design.seeds[-1]
    runs = whole.runs.assign(status=whole.runs["status"].mask(last, "new")) if begun else whole.runs[~last]
    data = replace(whole, runs=runs, points=whole.points[whole.points["seed"] != design.seeds[-1]])
    saved = SavedSweeps({name: FOLDERS[name]}, [design], [design], {name: (data, final_values(data))})
    assert saved.underway(design)
    assert {answer.verdict for answer in answers(saved)} == {"not run"}
    assert not saved_pool(saved).sweeps
    ended, declared = len(whole.runs) - last.sum(), len(design.arms) * len(design.levels) * len(design.seeds)
    assert [row[-1] for row in tables.waiting(saved)] == [f"{ended} of {declared}"]

    hours = numbers.measured(numbers.Context(), f"hours {name}").mean
    monkeypatch.setattr(numbers, "saved", lambda _: data)
    assert 0 < numbers.measured(numbers.Context(), f"hours {name}").mean < hours
