"""Runs that stop on a loss that is not finite are results: what they count for, and where a reader is told."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.build import build, build_report
from grpo_lab.analysis.caveats import _lacking, _protocols, caveats
from grpo_lab.analysis.effects.all_pairs import all_pairs
from grpo_lab.analysis.effects.verdict import verdict_text
from grpo_lab.analysis.final_values import DOWNSTREAM, HELDOUT, final_values
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.config.design import Collapsed

STOPPED = Planted(tricks=("trick",), seeds=(0, 1, 2), steps=40, every=10, collapse={("+trick", 1): 0.5})


@pytest.fixture(scope="module")
def stopped() -> SweepData:
    return synthetic_sweep(STOPPED)


def with_rule(data: SweepData, rule: Collapsed) -> SweepData:
    assert data.design is not None
    return replace(data, design=replace(data.design, collapsed=rule))


def points_of(data: SweepData, arm: str, seed: int) -> pd.DataFrame:
    return data.points[(data.points["arm"] == arm) & (data.points["seed"] == seed)]


def test_zero_counts_nothing_from_the_end_on(stopped: SweepData) -> None:
    finals = final_values(stopped)
    assert finals.budget == 160_000  # of the finished runs: the stopped one does not cut the others short
    for metric in (HELDOUT, DOWNSTREAM, "reward/outcome", "eval/heldout/accuracy"):
        values = finals.of("", "+trick", metric)
        assert values[1] == 0.0 and values[0] > 0.2 and values[2] > 0.2, metric
    assert set(finals.of("", "+trick", "train/entropy").index) == {0, 2}  # no accuracy: not known, and not zero
    # Half of the run had its own average, the other half counts 0.
    lived = points_of(stopped, "+trick", 1).query("step > 0")["reward/outcome"].mean()
    assert finals.of("", "+trick", "average/reward/outcome")[1] == pytest.approx(0.5 * lived)
    own = points_of(stopped, "+trick", 1).query("step > 0")["train/entropy"].mean()
    assert finals.of("", "+trick", "average/train/entropy")[1] == pytest.approx(own)
    assert finals.collapsed("", "+trick") == 1 and finals.collapsed("", "base") == 0
    assert "1 runs that stopped earlier count with accuracy and reward 0" in finals.rule


def test_last_carries_what_there_was(stopped: SweepData) -> None:
    finals = final_values(with_rule(stopped, Collapsed.last))
    run = points_of(stopped, "+trick", 1)
    assert finals.of("", "+trick", DOWNSTREAM)[1] == run[DOWNSTREAM].dropna().iloc[-1]
    # 20 steps of 4,000 tokens: the last fifth of what it lived is steps 17 to 20
    last = run[run["step"] > 16]["train/entropy"].mean()
    assert finals.of("", "+trick", "train/entropy")[1] == pytest.approx(last)
    own = run.query("step > 0")["train/entropy"].mean()
    assert finals.of("", "+trick", "average/train/entropy")[1] == pytest.approx(0.5 * own + 0.5 * last)
    assert "count with their last values" in finals.rule


def test_leaving_the_collapsed_run_out_would_flatter_its_arm(stopped: SweepData) -> None:
    survivors = replace(stopped, runs=stopped.runs.assign(collapsed=False))
    kept, dropped = final_values(stopped), final_values(survivors)
    assert kept.interval("", "+trick", DOWNSTREAM).n == 3 and dropped.interval("", "+trick", DOWNSTREAM).n == 2
    assert kept.interval("", "+trick", DOWNSTREAM).mean < dropped.interval("", "+trick", DOWNSTREAM).mean - 0.1


def test_an_arm_that_collapsed_in_some_runs_only_is_not_compared() -> None:
    """One run of eight stops early: its arm has no mean to compare. Where all stop, their mean is what it is."""
    some, every = {("+some", 3): 0.5}, {("+every", seed): 0.5 for seed in range(8)}
    data = synthetic_sweep(
        Planted(
            tricks=("some", "every", "none"), kind="add_one", seeds=tuple(range(8)), bases=4, steps=40, every=10,
            collapse=some | every,
        )
    )  # fmt: skip
    finals = final_values(data)
    found = all_pairs(data, finals, "", DOWNSTREAM)
    assert found is not None and list(found.not_reported) == ["+some"]
    assert "1 of 8" in found.not_reported["+some"]
    halves = dict(zip(found.arms, found.halves))
    assert {arm for arm, half in halves.items() if math.isnan(half)} == {"+some"}
    place = found.arms.index("+every")
    others = np.delete(found.distinguishable[place], [place, found.arms.index("+some")])
    assert found.means[place] == 0.0 and (others == -1).all()


def test_a_run_that_stopped_beyond_x_counts_as_it_was(stopped: SweepData) -> None:
    cut = stopped.points[(stopped.points["step"] <= 20) | (stopped.points["arm"] != "base")]
    finals = final_values(replace(stopped, points=cut))
    assert finals.budget == 80_000 and not finals.values["collapsed"].any()
    assert finals.of("", "+trick", DOWNSTREAM)[1] > 0.2


def test_a_run_that_never_made_a_step_still_counts(stopped: SweepData) -> None:
    run = (stopped.points["arm"] == "+trick") & (stopped.points["seed"] == 1)
    points = stopped.points[~run | (stopped.points["step"] == 0)]
    values = final_values(replace(stopped, points=points)).of("", "+trick", "average/reward/outcome")
    assert values[1] == 0.0
    kept = final_values(with_rule(replace(stopped, points=points), Collapsed.last))
    assert kept.of("", "+trick", DOWNSTREAM)[1] == stopped.points[run][DOWNSTREAM].iloc[0]
    assert "reward/outcome" not in kept.values or 1 not in kept.of("", "+trick", "reward/outcome").index


def test_a_reader_is_told(stopped: SweepData) -> None:
    lines = caveats(stopped, final_values(stopped))
    assert (
        "Collapsed before the common budget: 1 of 9 runs, counted with accuracy and reward 0 from there on."
        not in lines
    )
    assert "Collapsed before the common budget: 1 of 6 runs, counted with accuracy and reward 0 from there on." in lines
    assert "  +trick: 1 of 3 (0.01 to 0.91), seed 1" in lines
    assert "  failed: +trick seed 1: FloatingPointError: SYNTHETIC collapse" in lines


def test_saved_data_remember_it(stopped: SweepData, tmp_path: Path) -> None:
    save_data(stopped, tmp_path)
    again = load_data(tmp_path, "synthetic")
    assert again.collapsed("", "+trick") == 1 and len(again.answers) == len(stopped.answers)
    kept, before = final_values(again), final_values(stopped)
    pd.testing.assert_frame_equal(kept.values, before.values, check_dtype=False)


# ---- other input that must be said and never silently averaged


def test_runs_of_other_lengths_protocols_and_code_are_named(stopped: SweepData) -> None:
    runs = stopped.runs.assign(protocol="a", commit="c" * 40, dirty=False)
    runs.loc[runs["arm"] == "base", "commit"] = "d" * 40
    runs.loc[(runs["arm"] == "base") & (runs["seed"] == 2), "protocol"] = "b"
    short = (stopped.points["arm"] == "base") & (stopped.points["seed"] == 0) & (stopped.points["step"] > 30)
    changed = replace(stopped, runs=runs, points=stopped.points[~short])
    lines = "\n".join(caveats(changed, final_values(changed)))
    assert (
        "Unequal lengths: 4 of 5 finished runs went beyond 120,000 sampled tokens, the longest to 1.33 times" in lines
    )
    assert "differ for 1 of 6 runs from the control of their level (base seed 2)" in lines
    assert "The finished runs are of 2 commits" in lines


def test_nan_infinity_and_missing_metrics_are_named(stopped: SweepData) -> None:
    points = stopped.points.copy()
    points.loc[(points["arm"] == "base") & (points["step"] == 7), "train/entropy"] = math.nan
    points.loc[(points["arm"] == "base") & (points["step"] == 9), "mismatch/k3"] = np.inf
    points.loc[points["arm"] == "+trick", DOWNSTREAM] = math.nan
    for of in ("component", "in_loss_component"):  # a part of the reward that only one arm has is no lack of the others
        points[f"reward/{of}/bonus"] = np.where(points["arm"] == "+trick", 0.1, math.nan)
    changed = replace(stopped, points=points)
    finals = final_values(changed)
    lines = caveats(changed, finals)
    assert "Infinite values: mismatch/k3 (3); a mean over them is infinite, and no interval is given." in lines
    assert any("left out of means there: train/entropy (3 steps: " in line for line in lines)
    assert f"No {DOWNSTREAM}: +trick; left out of these comparisons." in lines and not any(
        "bonus" in line for line in lines
    )
    assert finals.difference("", "+trick", "base", DOWNSTREAM).n == 0


@pytest.mark.extended
def test_every_figure_and_the_report_say_so(stopped: SweepData, tmp_path: Path) -> None:
    """What is not alike stands under each figure, not only in the verdict."""
    runs = stopped.runs.assign(commit="c" * 40, dirty=False, protocol="a")
    runs.loc[(runs["arm"] == "base") & (runs["seed"] == 2), ["protocol", "commit"]] = ["b", "d" * 40]
    changed = replace(stopped, runs=runs[~((runs["arm"] == "+trick") & (runs["seed"] == 2))])
    save_data(changed, tmp_path)
    built = build("synthetic", str(tmp_path / "none"), tmp_path, tmp_path / "out", ["test"])
    figures = [path for path in built.paths if path.suffix == ".svg"]
    assert len(figures) > 4
    page = build_report("synthetic", str(tmp_path / "none"), tmp_path, tmp_path / "out", ["test"])[0].read_text()
    for said in (
        "4 of 6 planned",
        "Collapsed before the common budget: 1 of 5 runs",
        "Not evaluated alike",
        "The finished runs are of 2 commits",
    ):
        assert said in page or html.escape(said) in page
        about = said.partition(":")[0].lower()
        for path in figures:
            text = " ".join(re.sub(r"<[^>]*>", " ", path.read_text()).split()).lower()
            assert about in text or "(more in the table)" in text, (path.name, said)
    alike = build("synthetic", str(tmp_path / "none"), tmp_path, tmp_path / "out", ["test"])
    assert [path.read_bytes() for path in figures] == [
        path.read_bytes() for path in alike.paths if path.suffix == ".svg"
    ]


def infinite(data: SweepData) -> SweepData:
    last = (data.points["arm"] == "+trick") & (data.points["seed"] == 0) & (data.points["step"] == 40)
    return replace(
        data, points=data.points.assign(**{"reward/outcome": data.points["reward/outcome"].mask(last, np.inf)})
    )


def unended(data: SweepData) -> SweepData:
    last = (data.points["arm"] == "+trick") & (data.points["seed"] == 0) & (data.points["step"] == 40)
    return replace(data, points=data.points.assign(**{DOWNSTREAM: data.points[DOWNSTREAM].mask(last)}))


@pytest.mark.extended
@pytest.mark.parametrize(
    ("changes", "spoil", "said"),
    [
        (
            {"every": 40},
            None,
            "needs an evaluation between the first and the last one",
        ),  # a single one, at 160,000 tokens
        ({}, infinite, "Infinite values: reward/outcome (1)"),
        (
            {"collapse": {("+trick", seed): 0.4 for seed in (0, 1, 2)}},
            None,
            "Collapsed before the common budget: 3 of 6 runs",
        ),
        ({}, unended, "eval/downstream/accuracy (1 runs, at their end: "),
        ({"questions": 1}, None, "one question has no halves"),
        ({"seeds": (0,)}, None, "n = 1"),
    ],
)
def test_awkward_sweeps_are_built_and_say_so(
    tmp_path: Path, changes: dict[str, object], spoil: Callable[[SweepData], SweepData] | None, said: str
) -> None:
    data = synthetic_sweep(replace(STOPPED, **{"collapse": {}, "samples": 1, **changes}))
    save_data(data if spoil is None else spoil(data), tmp_path)
    built = build("synthetic", str(tmp_path / "none"), tmp_path, tmp_path / "out", ["test"])
    texts = [path.read_text() for path in built.paths if path.suffix in (".svg", ".txt", ".md", ".csv")]
    assert any(said in " ".join(re.sub(r"<[^>]*>", " ", text).split()) for text in texts)
    table = pd.read_csv(tmp_path / "out/synthetic_table.csv")
    assert set(table["arm"]) == {"base", "+trick"}  # also an arm of which nothing is left
    page = build_report("synthetic", str(tmp_path / "none"), tmp_path, tmp_path / "out", ["test"])[0].read_text()
    assert page.rstrip().endswith("</html>")


def test_levels_that_are_evaluated_otherwise_are_named_and_not_their_runs(stopped: SweepData) -> None:
    levels = ["low" if seed == 0 else "high" for seed in stopped.runs["seed"]]
    runs = stopped.runs.assign(level=levels, protocol=["a" if level == "low" else "b" for level in levels])
    (line,) = _protocols(replace(stopped, runs=runs))
    assert line.startswith("Not evaluated alike: the levels of") and "seed" not in line
    runs.loc[runs.index[-1], "protocol"] = "c"
    (line,) = _protocols(replace(stopped, runs=runs))
    assert f"seed {runs['seed'].iloc[-1]}" in line and "differ for 1 of 6 runs" in line and "Levels differ" in line


def test_an_arm_that_is_evaluated_otherwise_is_named_once(stopped: SweepData) -> None:
    runs = stopped.runs.assign(protocol=["b" if arm == "+trick" else "a" for arm in stopped.runs["arm"]])
    for left_out in ("base", "+trick"):  # the control is what others are compared with, also where it has fewer runs
        few = runs[(runs["arm"] != left_out) | (runs["seed"] < 2)]
        (line,) = _protocols(replace(stopped, runs=few))
        assert "(+trick)" in line and "seed" not in line and "Levels differ" not in line


def test_a_suite_that_an_arm_was_not_asked_is_one_word(stopped: SweepData) -> None:
    arm = stopped.points["arm"] == "base"
    suite = [name for name in stopped.points.columns if name.startswith("eval/downstream/")]
    assert len(suite) > 1
    points = stopped.points.assign(**{name: stopped.points[name].mask(arm) for name in suite})
    lines = [line for line in _lacking(replace(stopped, points=points)) if line.startswith("No ")]
    assert any("eval/downstream/*: base" in line and "eval/downstream/accuracy" not in line for line in lines)


def test_a_run_of_unknown_protocol_is_no_equal(stopped: SweepData) -> None:
    runs = stopped.runs.assign(protocol=["a"] * 5 + [None])
    lines = "\n".join(caveats(replace(stopped, runs=runs), final_values(stopped)))
    assert "Evaluation protocol unknown for 1 of 6 runs" in lines


# --- what took rows and groups out --------------------------------------------------------------------------


def test_a_forced_answer_is_no_mask_and_nothing_is_predicted_of_a_filter() -> None:
    """`active_fraction/truncation` counts interrupted and stopped rows too; only what is beyond them left the loss."""
    tricks = ("interrupt", "mask", "filter")
    data = synthetic_sweep(Planted(tricks=tricks, kind="add_one", steps=10, every=5, questions=8, seeds=(0, 1)))
    arm = data.points["arm"]
    points = data.points.assign(
        **{
            "active_fraction/truncation": arm.isin(["+interrupt", "+mask"]) * 0.3,
            "rollout/interrupted": (arm == "+interrupt") * 0.2,
            "rollout/stopped": (arm == "+interrupt") * 0.1,
            "active_fraction/group_filter": (arm == "+filter") * 0.4,
        }
    )
    finals = final_values(replace(data, points=points))
    assert [finals.masks("", f"+{name}") for name in tricks] == [False, True, False]
    assert [finals.filters("", f"+{name}") for name in tricks] == [False, False, True]
    text = verdict_text(data, finals)
    lines = text.partition("Overstatement of held-out")[2].splitlines()
    predicted = {line.split(":")[0].strip(): line.partition(";")[2] for line in lines if "; " in line}
    assert predicted["+mask"].startswith(" predicted 0.") and predicted["+interrupt"] == " predicted 0"
    assert predicted["+filter"] == " only of groups with reward variance, so no prediction"


# ---- runs that had nothing left to train on

DRY = "Exhausted: 6 steps in a row left no token to train on. The run ends after step 20, saved in somewhere"


@pytest.fixture(scope="module")
def dry(stopped: SweepData) -> SweepData:
    """The same sweep, but its short run ended since nothing was left to train on."""
    return replace(stopped, runs=stopped.runs.assign(collapsed=False, problem=stopped.runs["problem"].where(
        stopped.runs["problem"] == "", DRY
    )))  # fmt: skip


def test_a_run_with_nothing_left_to_train_on_keeps_its_last_values_under_either_rule(dry: SweepData) -> None:
    run = points_of(dry, "+trick", 1)
    for rule in Collapsed:
        finals = final_values(with_rule(dry, rule))
        assert finals.budget == 160_000, "it does not cut the others short"
        assert finals.of("", "+trick", DOWNSTREAM)[1] == run[DOWNSTREAM].dropna().iloc[-1] > 0.2
        last = run[run["step"] > 16]["train/entropy"].mean()
        assert finals.of("", "+trick", "train/entropy")[1] == pytest.approx(last)
        assert finals.collapsed("", "+trick") == finals.stopped("", "+trick") == 0
        assert finals.values["exhausted"].sum() == 1
        assert "1 runs that ended earlier, with nothing left to train on, count with their last values" in finals.rule
        assert not math.isnan(finals.interval("", "+trick", DOWNSTREAM).low), "no collapse, so no interval is withheld"


def test_its_last_evaluation_may_be_older_than_its_end(dry: SweepData) -> None:
    late = (dry.points["arm"] == "+trick") & (dry.points["seed"] == 1) & (dry.points["step"] == 20)
    evaluated = [name for name in dry.points if name.startswith("eval/")]
    points = dry.points.copy()
    points.loc[late, evaluated] = math.nan
    before = points_of(dry, "+trick", 1).set_index("step")[DOWNSTREAM][10]
    assert final_values(replace(dry, points=points)).of("", "+trick", DOWNSTREAM)[1] == before


def test_a_run_that_lost_what_it_could_and_then_ran_dry_has_collapsed(dry: SweepData) -> None:
    fell = (dry.points["arm"] == "+trick") & (dry.points["seed"] == 1) & (dry.points["step"] > 0)
    points = dry.points.assign(**{HELDOUT: dry.points[HELDOUT].mask(fell & dry.points[HELDOUT].notna(), 0.05)})
    finals = final_values(replace(dry, points=points))
    assert finals.collapsed("", "+trick") == 1 and finals.stopped("", "+trick") == 0


def test_a_reader_is_told_that_it_ran_dry_and_not_that_it_failed(dry: SweepData, tmp_path: Path) -> None:
    save_data(dry, tmp_path)
    for data in (dry, load_data(tmp_path, "synthetic")):
        lines = caveats(data, final_values(data))
        said = "Nothing left to train on before the common budget: 1 of 6 runs, counted with their last values"
        assert any(line.startswith(said) for line in lines)
        assert f"  ended: +trick seed 1: {DRY}" in lines and "  +trick: seed 1" in lines
        assert not any("failed" in line or line.startswith("Collapsed") for line in lines)
