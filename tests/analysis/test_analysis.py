"""From run folders to final values, verdicts and figures: planted effects, hand numbers, files and messages."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from declared_experiments import FOLDERS

from grpo_lab.analysis.build import Built, build, what_to_open
from grpo_lab.analysis.caveats import caveats, notes
from grpo_lab.analysis.effects.table import effect_table, markdown
from grpo_lab.analysis.effects.verdict import counted, judge, verdict_text
from grpo_lab.analysis.figures.curves import curve_numbers, draw_curves
from grpo_lab.analysis.figures.effects import draw_effects, effect_numbers
from grpo_lab.analysis.final_values import (
    DOWNSTREAM,
    GAP,
    HELDOUT,
    MASKED_SHARE,
    OVERSTATEMENT,
    final_values,
    interpolate,
    is_rated,
    is_share,
)
from grpo_lab.analysis.report.page_verdict import verdict_section
from grpo_lab.analysis.sources.read import read_source
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data, with_saved
from grpo_lab.analysis.sources.settings import differences
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.collapse import Count
from grpo_lab.analysis.stats.intervals import seed_differences, t_interval
from grpo_lab.analysis.stats.mean_line import mean_line, running_mean
from grpo_lab.analysis.stats.multiplicity import p_text
from grpo_lab.config.design import Part, read_design
from grpo_lab.config.folders import data_of
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep

QUESTION = "Does masking hide from the training reward what it does to the policy?"
ABOVE = {"arm": "mask", "metric": "rollout/truncated", "direction": "above"}
HELDOUT_CUT = "eval/heldout_training/truncated"


def design(predictions: Sequence[Mapping[str, str]] = (ABOVE,), **changes: Any) -> dict[str, Any]:
    declared = {
        "name": "planted",
        "question": QUESTION,
        "prediction": "It does.",
        "control": "score",
        "primary": "rollout/truncated",
        "axis": "sampled_tokens",
        "arms": {"score": [], "mask": ["truncation=mask_before"], "soft": ["reward_shaping=soft_overlong"]},
        "seeds": [0, 1, 2],
        "predictions": [dict(prediction) for prediction in predictions],
    }
    return {**declared, **changes}


def write_run(
    folder: Path,
    rows: Sequence[Mapping[str, float]],
    state: str = "done",
    composed: Mapping[str, Any] | None = None,
    **done: Any,
) -> None:
    """A run folder as the loop leaves it: rows[i] is what step i logged; `composed` are choices and config."""
    described = {"run_key": f"key of {folder.name}", "commit": "c" * 40, "dirty": False, "seed": 0}
    write_json(folder / "run.json", described | dict(composed or {}))
    with RunLog(folder) as log:
        for step, row in enumerate(rows):
            log.write_step(step, dict(row), {"budget/device_seconds": 0.5 * step, "time/train": 0.1})
        if state == "done":
            log.mark_done({"no_ops": [], **done})
        if state == "failed":
            log.mark_error(FloatingPointError("the loss is nan at update 7"))


def rows_at(
    xs: Sequence[int], signs: Mapping[str, Sequence[float]], scores: Mapping[int, Mapping[str, float]]
) -> list[dict[str, float]]:
    """Step 0 logs no signs, step i the i-th of each; `scores` maps a step to its evaluation."""
    rows = [{"budget/sampled_tokens": x} for x in xs]
    for name, values in signs.items():
        for row, value in zip(rows[1:], values, strict=True):
            row[name] = value
    for step, evaluation in scores.items():
        rows[step] |= evaluation
    return rows


def planted_rows(arm: str, seed: int, steps: int = 40, last: int = 40_000, effect: float = 0.1) -> list[dict]:
    """Arms share a seed's noise; `mask` is cut more often by `effect` and sees only what is not cut."""
    noise = np.random.default_rng([seed, 1])
    level = 0.02 * noise.standard_normal()
    xs = np.linspace(0, last, steps + 1).astype(int).tolist()
    cut = 0.2 + level + 0.01 * noise.standard_normal(steps)
    right = 0.7 - level + 0.02 * noise.standard_normal(steps)
    own = 0.002 * np.random.default_rng([seed, len(arm)]).standard_normal()
    signs = {
        "rollout/truncated": cut + own + (effect if arm == "mask" else 0.0),
        "reward/in_loss_mean": right / 0.8 if arm == "mask" else right,
        "reward/in_loss_outcome": right / 0.8 if arm == "mask" else right,
        "rollout/length": 30 + 10 * cut,
        "active_fraction/truncation": cut if arm == "mask" else 0 * cut,
    }
    scores = {
        step: {HELDOUT: 0.4 + 0.3 * step / steps - level + own, DOWNSTREAM: 0.3, HELDOUT_CUT: 0.2 + level}
        for step in {*range(0, steps + 1, 10), steps}
    }
    return rows_at(xs, {name: list(map(float, values)) for name, values in signs.items()}, scores)


def declare(runs_dir: Path, entries: Sequence[RunEntry], node: dict[str, Any] | None, name: str = "planted") -> None:
    fingerprint = read_design(node).fingerprint() if node else ""
    record_sweep(runs_dir, name, entries, None, node, fingerprint, ["train.py"], "a" * 40, None)


def entry(arm: str, seed: int, level: str = "") -> RunEntry:
    return RunEntry(arm, level, seed, f"{level}{arm}/seed={seed}")


@pytest.fixture
def planted(tmp_path: Path) -> Callable[..., SweepData]:
    """planted(arms=, seeds=, node=) -> a sweep of finished runs, loaded from its folders under tmp_path."""

    def make(
        arms: Sequence[str] = ("score", "mask"),
        seeds: Sequence[int] = (0, 1, 2),
        node: dict[str, Any] | None = None,
        **rows: Any,
    ) -> SweepData:
        entries = [entry(arm, seed) for seed in seeds for arm in arms]
        declare(tmp_path, entries, design() if node is None else node)
        for one in entries:
            write_run(tmp_path / one.folder, planted_rows(one.arm, one.seed, **rows))
        return load_sweep(tmp_path, "planted")

    return make


# ---- intervals


def test_differences_are_paired_over_common_seeds_only() -> None:
    treated = pd.Series({0: 1.0, 1: 2.0, 2: 4.0, 5: 100.0})
    control = pd.Series({2: 1.0, 1: 1.0, 0: 1.0, 7: -100.0})
    assert dict(seed_differences(treated, control)) == {0: 0.0, 1: 1.0, 2: 3.0}
    assert seed_differences(treated, pd.Series({9: 1.0})).empty


@pytest.mark.extended
@pytest.mark.parametrize("n", [3, 5])
def test_coverage_is_what_the_docstring_says(n: int) -> None:
    rng = np.random.default_rng(n)
    draws = {
        "normal": (rng.normal(1.0, 1.0, (3000, n)), 1.0, 0.95),
        "shares": (rng.binomial(128, rng.normal(0.7, 0.02, (3000, n))) / 128, 0.7, 0.95),
        "skewed differences": (rng.exponential(size=(3000, n)) - rng.exponential(size=(3000, n)), 0.0, 0.97),
        "skewed": (rng.exponential(size=(3000, n)), 1.0, 0.88),
    }
    for name, (samples, truth, expected) in draws.items():
        intervals = [t_interval(sample.tolist()) for sample in samples]
        coverage = np.mean([interval.low <= truth <= interval.high for interval in intervals])
        assert coverage == pytest.approx(expected, abs=0.02), name


# ---- final values


def test_the_rule_of_final_values_by_hand(tmp_path: Path) -> None:
    long = rows_at(
        list(range(0, 110, 10)),
        {"rollout/truncated": [float(step) for step in range(1, 11)]},
        {0: {HELDOUT: 0.1}, 5: {HELDOUT: 0.5}, 10: {HELDOUT: 0.7}},
    )
    short = rows_at([0, 76, 77, 95], {"rollout/truncated": [9.0, 1.0, 2.0]}, {0: {HELDOUT: 0.0}, 3: {HELDOUT: 0.6}})
    declare(tmp_path, [entry("score", 0), entry("score", 1)], design())
    write_run(tmp_path / "score/seed=0", long)
    write_run(tmp_path / "score/seed=1", short)
    finals = final_values(load_sweep(tmp_path, "planted"))
    assert (finals.budget, finals.axis) == (95.0, "sampled_tokens")
    # 0.8 X = 76 is left out: steps 8 and 9 of the long run, the steps at 77 and 95 of the short one
    assert finals.of("", "score", "rollout/truncated").to_dict() == {0: 8.5, 1: 1.5}
    # 95 lies nine tenths of the way from the evaluation at 50 to that at 100
    assert finals.of("", "score", HELDOUT).to_dict() == pytest.approx({0: 0.5 + 0.9 * 0.2, 1: 0.6})


def test_interpolation_stays_inside() -> None:
    xs, values = np.array([0.0, 10.0, 30.0]), np.array([1.0, 2.0, 0.0])
    assert [interpolate(xs, values, at) for at in (0.0, 5.0, 10.0, 20.0, 30.0)] == [1.0, 1.5, 2.0, 1.0, 0.0]
    assert math.isnan(interpolate(xs, values, 30.1)) and math.isnan(interpolate(xs[:0], values[:0], 1.0))


def test_an_evaluation_that_ends_before_x_counts_for_nothing(tmp_path: Path) -> None:
    rows = rows_at([0, 50, 100], {"rollout/truncated": [0.5, 0.25]}, {0: {HELDOUT: 0.1}, 1: {HELDOUT: 0.9}})
    declare(tmp_path, [entry("score", 0)], design())
    write_run(tmp_path / "score/seed=0", rows)
    finals = final_values(load_sweep(tmp_path, "planted"))
    assert finals.of("", "score", HELDOUT).empty and finals.interval("", "score", HELDOUT).n == 0
    assert finals.of("", "score", "rollout/truncated").to_dict() == {0: 0.25}


def test_overstatement_and_q_a_by_hand_and_masking_from_the_data(tmp_path: Path) -> None:
    scores = {0: {HELDOUT: 0.6, HELDOUT_CUT: 0.25}, 2: {HELDOUT: 0.6, HELDOUT_CUT: 0.25}}
    signs = {"reward/in_loss_mean": [0.7, 0.7], "reward/in_loss_outcome": [0.8, 0.8]}
    declare(tmp_path, [entry("score", 0), entry("mask", 0)], design())
    write_run(
        tmp_path / "score/seed=0", rows_at([0, 50, 100], {**signs, "active_fraction/truncation": [0.0, 0.0]}, scores)
    )
    write_run(
        tmp_path / "mask/seed=0", rows_at([0, 50, 100], {**signs, "active_fraction/truncation": [0.1, 0.0]}, scores)
    )
    finals = final_values(load_sweep(tmp_path, "planted"))
    assert finals.masks("", "mask") and not finals.masks("", "score")
    assert finals.interval("", "mask", GAP).mean == pytest.approx(0.1)
    assert finals.interval("", "mask", OVERSTATEMENT).mean == pytest.approx(0.2)
    # q = 1/4 and (1 - q) a = 0.6: a = 0.8, q a = 0.2
    assert finals.interval("", "mask", MASKED_SHARE).mean == pytest.approx(0.2)


def test_a_planted_effect_is_recovered_and_a_null_is_not(planted: Callable[..., SweepData]) -> None:
    finals = final_values(planted(("score", "mask", "soft")))
    found = finals.difference("", "mask", "score", "rollout/truncated")
    assert found.n == 3 and found.low > 0 and found.mean == pytest.approx(0.1, abs=0.005)
    null = finals.difference("", "soft", "score", "rollout/truncated")
    assert null.low < 0 < null.high
    # Pairing removes the noise that a seed gives to both arms.
    alone = finals.interval("", "mask", "rollout/truncated")
    assert found.high - found.low < 0.5 * (alone.high - alone.low)


def test_device_seconds_can_be_the_axis(planted: Callable[..., SweepData]) -> None:
    data = planted(node=design(axis="device_seconds"))
    assert final_values(data).budget == 20.0
    assert {axes.get_xlabel() for axes in draw_curves(data, final_values(data)).figure.axes} == {"device seconds"}


# ---- runs that are missing, failed, unfinished or unreadable


@pytest.fixture
def ragged(tmp_path: Path) -> SweepData:
    states = {0: "done", 1: "done", 2: "failed", 3: "partial", 4: "new", 5: "edited"}
    entries = [entry(arm, seed) for seed in states for arm in ("score", "mask")]
    declare(tmp_path, entries, design(seeds=[0, 1, 2, 3, 4, 5, 6]))
    for one in entries:
        state = "done" if one.arm == "score" and one.seed < 5 else states[one.seed]
        if state != "new":
            write_run(tmp_path / one.folder, planted_rows(one.arm, one.seed), state, no_ops=["surrogate"])
        if state == "edited":
            with (tmp_path / one.folder / "metrics.jsonl").open("a") as stream:
                stream.write("{oops}\n")
    return load_sweep(tmp_path, "planted")


def test_runs_that_reached_x_count_and_all_others_are_named(ragged: SweepData) -> None:
    finals = final_values(ragged)
    table = effect_table(ragged, finals).set_index(["arm", "metric"])
    score, mask = (table.loc[(arm, "rollout/truncated")] for arm in ("score", "mask"))
    assert (score["n"], score["n_finished"], score["n_planned"]) == (5, 5, 7)
    # The run that failed on its last step had reached X: what it logged by then counts.
    assert (mask["n"], mask["n_finished"], mask["n_planned"], mask["n_pairs"]) == (3, 2, 7, 3)
    assert pd.isna(score["difference"]) and mask["difference"] == pytest.approx(0.1, abs=0.01)
    text = verdict_text(ragged, finals)
    assert "Finished runs: 7 of 21 planned." in text  # 7 seeds of 3 declared arms
    assert "failed: mask seed 2: FloatingPointError: the loss is nan at update 7" in text
    assert "unfinished: mask seed 3" in text
    assert "unreadable: mask seed 5: ValueError" in text and "has a line that is not JSON" in text
    assert "not started: 1 of score, 2 of mask, 7 of soft" in text
    assert "No-op: surrogate changed nothing of the loss in every finished run." in text
    assert "Not run: soft." in draw_curves(ragged, finals).caption


def test_seeds_that_were_not_declared_are_planned_too(planted: Callable[..., SweepData]) -> None:
    data = planted(seeds=(2, 100))
    assert (data.seeds_finished("", "mask"), data.seeds_planned("", "mask")) == (2, 4)


# ---- predictions


def test_the_words_of_a_verdict(planted: Callable[..., SweepData]) -> None:
    predictions = [
        ABOVE,
        {**ABOVE, "direction": "below"},
        {**ABOVE, "metric": DOWNSTREAM},
        {**ABOVE, "arm": "soft"},
        {**ABOVE, "metric": OVERSTATEMENT},
        {**ABOVE, "metric": "rollout/truncatd"},
    ]
    data = planted(node=design(predictions))
    finals = final_values(data)
    words = [judgement.verdict for judgement in judge(data, finals)]
    assert words == ["supported", "contradicted", "not significant", "not run", "supported", "not run"]
    text = verdict_text(data, finals)
    assert text.startswith(QUESTION)
    found = finals.difference("", "mask", "score", "rollout/truncated").text("+")
    said = "supported: mask is above score on truncated share, training (the metric that decides)"
    # Five of the six are of arms that could run, and count; the arm `soft` has no run, but was asked for.
    adjusted = judge(data, finals)[0].holm
    assert f"{said}\n    difference {found}, n = 3, Holm {p_text(adjusted)}\n" in text
    assert "adjusted by Holm for 6 predictions, is below 0.05" in text
    assert "not run: 2 of 6 predictions" in text and "truncatd" not in text
    assert "Declared before the first run (" in text
    assert "mask: +0." in text and "; predicted 0.1" in text and "score: " in text and "predicted 0" in text


def test_the_family_is_what_was_asked_for(planted: Callable[..., SweepData]) -> None:
    """Three predictions were declared, and `soft` has no run: it counts with p = 1, or not at all in a part without it.

    So what `soft` brings one day can only lower the others' p, and takes back no word.
    """
    predictions = [ABOVE, {**ABOVE, "metric": DOWNSTREAM}, {**ABOVE, "arm": "soft"}]
    whole = planted(node=design(predictions))
    parts = {"parts": {"demo": {"arms": ["score", "mask"]}}, "part": "demo"}
    part = replace(whole, design=read_design(design(predictions, **parts)))
    first, flat, soft = judge(whole, final_values(whole))
    assert flat.p == 1 and math.isnan(soft.p) and math.isnan(soft.holm) and soft.verdict == "not run"
    assert (first.family, first.holm) == (3, pytest.approx(3 * first.p)) and first.verdict == "supported"
    first, flat, soft = judge(part, final_values(part))
    assert (first.family, first.holm, soft.verdict) == (2, pytest.approx(2 * first.p), "not run")
    # Runs of another part count as soon as they are there.
    score_only = replace(part, design=replace(part.design, parts={"demo": Part(arms=("score",))}))
    assert [one.family for one in judge(score_only, final_values(score_only))] == [2, 2, 2]


def test_counts_of_base_models_and_what_is_derived_from_all_evaluations(tmp_path: Path) -> None:
    """By hand: the best mean of three in a row less the last one, log-odds with half an answer, means over a base."""
    heldout = {
        ("score", 0): (0.5, 0.8, 0.9, 0.7, 0.6, 0.5),  # best 0.8, last 0.6
        ("score", 1): (0.5, 0.5, 0.5, 0.8, 0.8, 0.8),  # 0
        ("mask", 0): (0.9, 0.9, 0.9, 0.5, 0.5, 0.5),  # 0.4
        ("mask", 1): (0.5, 0.6, 0.7, 0.8, 0.9, 1.0),  # 0
    }
    for (arm, seed), values in heldout.items():
        scores = {
            step: {"eval/heldout/accuracy": value, "eval/heldout/responses": 10.0} for step, value in enumerate(values)
        }
        write_run(tmp_path / f"{arm}/seed={seed}", rows_at([0, 10, 20, 30, 40, 50], {}, scores))
    metric = "below_best/eval/heldout/accuracy"
    counts = [
        {"arm": "score", "metric": metric, "above": 0.1, "at_least": 1},
        {"arm": "mask", "metric": metric, "above": 0.1, "at_most": 0},
        {"arm": "soft", "metric": metric, "above": 0.1, "at_most": 0},
    ]
    odds = {"arm": "mask", "metric": "log_odds/eval/heldout/accuracy", "direction": "above"}
    declare(
        tmp_path, [entry(arm, seed) for arm, seed in heldout], design([odds], seeds=[0, 1], bases=2, counts=counts),
        "counted",
    )  # fmt: skip
    data = load_sweep(tmp_path, "counted")
    finals = final_values(data)
    assert finals.of("", "score", metric).round(9).to_dict() == {0: 0.2, 1: 0.0}
    assert finals.of("", "mask", metric).round(9).to_dict() == {0: 0.4, 1: 0.0}
    logits = finals.of("", "mask", "log_odds/eval/heldout/accuracy").to_dict()
    assert logits == {0: 0.0, 1: pytest.approx(math.log(10.5 / 0.5))}
    assert is_rated("eval/heldout/accuracy") and not is_rated(metric) and not is_share("log_odds/eval/heldout/accuracy")
    text = verdict_text(data, finals)
    said = "held-out accuracy, evaluation protocol, best less last of three evaluations in a row"
    assert f"  as predicted: score has {said} above 0.1 in 1 of 2 runs; predicted at least 1" in text
    assert "  not as predicted: mask has" in text and "  not run: soft has" in text
    first = data.design.counts[1] if data.design else None
    assert first is not None and counted(replace(finals, bases={0: 7, 1: 7}), first) == Count(1, 1), "their mean is 0.2"
    few = final_values(replace(data, points=data.points[data.points["step"] < 2], runs=data.runs))
    assert few.of("", "mask", metric).empty, "two evaluations have no mean of three"


def test_one_pair_is_not_a_result(planted: Callable[..., SweepData]) -> None:
    data = planted(seeds=(1,))
    (judgement,) = judge(data, final_values(data))
    assert (judgement.verdict, judgement.difference.n) == ("not run", 1)


def test_a_prediction_may_compare_an_arm_with_itself_at_another_level(tmp_path: Path) -> None:
    factor = {"factor": "aggregation", "levels": {"constant": [], "sequence_mean": ["aggregation=sequence_mean"]}}
    against = {**ABOVE, "level": "sequence_mean", "against": "constant"}
    node = design([against, {**ABOVE, "level": "constant"}], **factor)
    effects = {"constant": 0.1, "sequence_mean": 0.25}
    entries = [entry("mask", seed, level) for seed in (0, 1, 2) for level in effects]
    declare(tmp_path, entries, node)
    for one in entries:
        write_run(tmp_path / one.folder, planted_rows("mask", one.seed, effect=effects[one.level]))
    data = load_sweep(tmp_path, "planted")
    finals = final_values(data)
    across, within = judge(data, finals)
    # Equal differences have no scatter for t: three of them cannot be told from chance, p = 2 / 2^3.
    assert (across.verdict, across.p, across.difference.mean) == (
        "not significant",
        0.25,
        pytest.approx(0.15, abs=1e-9),
    )
    assert within.verdict == "not run"  # the control never ran
    said = "mask at aggregation=sequence_mean is above mask at aggregation=constant on truncated share, training"
    assert said in verdict_text(data, finals)
    assert draw_effects(data, finals) == f"no arm shares a seed with {data.control}"


def test_a_late_declaration_is_called_late(tmp_path: Path) -> None:
    entries = [entry("score", 0), entry("mask", 0)]
    for one in entries:
        write_run(tmp_path / one.folder, planted_rows(one.arm, one.seed))
    declare(tmp_path, entries, design())
    declare(tmp_path, entries, design(seeds=[0, 1]))
    data = load_sweep(tmp_path, "planted")
    text = verdict_text(data, final_values(data))
    assert "Declared after 2 of its runs had been started" in text and "declaration 2 of this sweep" in text


# ---- what tells arms apart


def composed(choices: Mapping[str, str] | None = None, **config: Any) -> dict[str, Any]:
    """Choices and config of run.json, with the numbers of updates=four unless others are given."""
    steps = {"updates.minibatches": 4, "updates.passes": 1}
    return {"choices": {"recipe": "plain", "updates": "four", **(choices or {})}, "config": steps | config}


def sweep_of(folder: Path, node: dict[str, Any] | None = None, **arms: Mapping[str, Any]) -> SweepData:
    """A sweep of two seeds of these arms, each of what it was composed of, loaded from its folders."""
    entries = [entry(arm, seed) for arm in arms for seed in (0, 1)]
    declare(folder, entries, node)
    for one in entries:
        write_run(folder / one.folder, planted_rows(one.arm, one.seed), composed=arms[one.arm])
    return load_sweep(folder, "planted")


def test_arms_of_a_sweep_that_declared_nothing_are_tabled_with_what_tells_them_apart(tmp_path: Path) -> None:
    one_step = {"updates.minibatches": 1, "updates.passes": 1}
    data = sweep_of(
        tmp_path,
        score=composed({"recipe": "plain", "scale": "group_std"}, **{"optimizer.learning_rate": 1e-4, "seed": 0}),
        mask=composed(
            {"recipe": "x", "scale": "none", "updates": "one"}, **{"optimizer.learning_rate": 1e-4} | one_step
        ),
        rate=composed({"scale": "group_std"}, **{"optimizer.learning_rate": 2e-4}),
    )
    finals = final_values(data)
    text = verdict_text(data, finals)
    control, mask = (finals.interval("", arm, HELDOUT).text() for arm in ("score", "mask"))
    apart = finals.difference("", "mask", "score", HELDOUT).text("+")
    rows = {line.strip().split("  ")[0]: line.split() for line in text.splitlines() if " and 0." in line}
    assert " ".join(rows["score"]).startswith(f"score 2 {control} ")
    assert " ".join(rows["mask"]).startswith(f"mask 2 {mask} ")
    assert f"  minus score  2  {apart}" in text
    head = next(line for line in text.splitlines() if line.startswith("  arm"))
    assert head.split("  ")[-2:] == ["downstream", "divergence, pp"] and "held-out, training protocol" in head
    assert "Settings in which the arms differ: 3.\n" in text
    assert "  scale: group_std in score, rate; none in mask\n  updates: four in score, rate; one in mask\n" in text
    assert "  optimizer.learning_rate: 0.0001 in score, mask; 0.0002 in rate\n" in text
    assert "differ from score in more than one setting" in text and "mask in 2 (scale, updates).\n" in text
    assert "WARNING: optimiser steps on a batch differ: 4 in score, rate; 1 in mask." in text
    section = verdict_section(data, finals, {}, None)
    assert "Settings in which the arms differ: 3.<ul><li>scale: group_std in score, rate; none in mask</li>" in section
    save_data(data, tmp_path / "data")
    assert load_data(tmp_path / "data", "planted").settings == data.settings


def test_arms_that_differ_in_one_setting_get_no_warning(tmp_path: Path) -> None:
    """A length and what is derived from it are one setting, and so is an option with the numbers of its own."""
    long = {"engine.max_tokens": 56, "aggregation.max_tokens": 56}
    data = sweep_of(
        tmp_path,
        score=composed({"kl": "none"}, **{"engine.max_tokens": 40, "aggregation.max_tokens": 40}),
        long=composed({"kl": "none"}, **long),
    )
    text = verdict_text(data, final_values(data))
    both = "aggregation.max_tokens = engine.max_tokens"
    assert f"Settings in which the arms differ: 1.\n  {both}: 40 in score; 56 in long\n" in text
    assert "WARNING" not in text
    kl = {"kl": "none"}, {"kl": "k3_loss", "kl.coef": 0.1}
    assert differences(kl[1], kl[0]) == ["kl"]


def test_a_design_is_warned_of_optimiser_steps_that_it_did_not_declare(tmp_path: Path) -> None:
    one = {"updates": "one"}, {"updates.minibatches": 1, "updates.passes": 1}
    arms = {"score": composed(), "mask": composed(one[0], **one[1]), "soft": composed()}
    data = sweep_of(tmp_path / "a", design(), **arms)
    said = "WARNING: optimiser steps on a batch differ: 1 in mask; 4 in score."
    assert said in verdict_text(data, final_values(data))
    named = design(arms={"score": [], "mask": ["updates=one"], "soft": []})
    data = sweep_of(tmp_path / "b", named, **arms)
    assert "WARNING" not in verdict_text(data, final_values(data))


# ---- saved data


@pytest.mark.extended
def test_figures_from_saved_data_are_those_from_runs(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    data = planted()
    paths = save_data(data, tmp_path / "data")
    first = [path.read_bytes() for path in paths]
    again = load_data(tmp_path / "data", "planted")
    pd.testing.assert_frame_equal(again.points, data.points)
    assert again.runs.to_dict("records") == data.runs.to_dict("records") and again.record == data.record
    save_data(again, tmp_path / "data")
    assert [path.read_bytes() for path in paths] == first
    direct = build("planted", str(tmp_path), tmp_path / "data", tmp_path / "a", ["figures"])
    saved = build("planted", str(tmp_path / "nowhere"), tmp_path / "data", tmp_path / "b", ["figures"])
    assert direct.source == "run folders, 6 finished runs, saved data have 6"
    assert saved.source == "saved data, 6 finished runs"
    names = [path.name for path in direct.paths]
    assert names == [path.name for path in saved.paths]
    for name in (name for name in names if not name.endswith(".json")):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


# ---- figures


def test_the_csv_holds_exactly_what_is_drawn(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    data = planted()
    built = build("planted", str(tmp_path), tmp_path, tmp_path / "out", ["figures"])
    assert built.paths[0] == tmp_path / "out/planted.svg" and all(path.stat().st_size for path in built.paths)
    finals = final_values(data)
    csv = pd.read_csv(tmp_path / "out/planted.csv", keep_default_na=False, na_values=[""])
    figure = draw_curves(data, finals).figure
    # These runs logged no outcomes, so there is no gap.
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["score\nn = 3\ngap -", "mask\nn = 3\ngap -"]
    for arm, axes in zip(("score", "mask"), figure.axes):
        lines = {line.get_label(): line for line in axes.lines}
        for metric in ("reward/in_loss_mean", HELDOUT, DOWNSTREAM):
            mean = csv[(csv["arm"] == arm) & (csv["series"] == metric) & (csv["part"] == "mean")]
            assert lines[metric].get_xydata().tolist() == mean[["x", "value"]].to_numpy().tolist()
            assert set(mean["n"]) == {3}
        raw = csv[(csv["arm"] == arm) & (csv["part"] == "seed")]
        assert sum(len(line.get_xdata()) for line in axes.lines if line.get_label() == "seed") == len(raw)
    effects = pd.read_csv(tmp_path / "out/planted_effects.csv")
    drawn = draw_effects(data, finals).figure
    marks = [line.get_xdata()[0] for axes in drawn.axes for line in axes.lines if line.get_label() == "mask"]
    assert marks == effects[effects["part"] == "mean"]["value"].tolist()


@pytest.mark.extended
def test_a_rebuild_gives_the_same_svg_and_says_its_sources(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    planted()
    for place in ("a", "b"):
        build("planted", str(tmp_path), tmp_path, tmp_path / place, ["grpo-lab", "figures", "planted"])
    for name in ("planted.svg", "planted_effects.svg"):
        svg = (tmp_path / "a" / name).read_bytes()
        assert svg == (tmp_path / "b" / name).read_bytes()
        assert b"<dc:date>" not in svg
    for name in ("planted", "planted_effects"):
        sources = json.loads((tmp_path / "a" / f"{name}.json").read_text())
        assert sources["drawn_by"]["command"] == ["grpo-lab", "figures", "planted"] and "commit" in sources["drawn_by"]
        assert sources["run_commits"] == ["c" * 40] and sources["sweep"]["commit"] == "a" * 40
        assert sources["sweep"]["fingerprint"] == read_design(design()).fingerprint()
        assert sources["sweep"]["declared"][0]["runs_started_before"] == 0 and len(sources["sweep"]["key"]) == 32
        assert len(sources["runs"]) == 6
        first = {"arm": "score", "level": "", "seed": 0, "folder": "score/seed=0", "status": "done"}
        assert sources["runs"][0].items() >= {**first, "run_key": "key of seed=0", "mlflow_run_id": None}.items()
        assert (
            sources["final_values"]["X"] == 40_000 and "averaged over its last 20%" in sources["final_values"]["rule"]
        )
        assert "95% t interval" in sources["bands"]


def test_means_end_where_the_shortest_seed_does() -> None:
    seeds = [(np.array([0.0, 10.0, 20.0]), np.array([0.0, 1.0, 2.0])), (np.array([5.0, 15.0]), np.array([1.0, 3.0]))]
    line = mean_line(seeds, 100.0, evaluations=True)
    assert [at for at, _ in line] == [5.0, 12.5, 15.0]
    assert [mean.mean for _, mean in line] == pytest.approx([(0.5 + 1) / 2, (1.25 + 2.5) / 2, (1.5 + 3) / 2])
    assert mean_line(seeds, 12.0, evaluations=False)[-1][0] == 12.0


def test_the_running_mean_by_hand() -> None:
    xs, values = np.array([0.0, 1.0, 2.0, 3.0, 10.0]), np.array([0.0, 3.0, 6.0, 0.0, 5.0])
    assert running_mean(xs, values, 2.0).tolist() == [1.5, 3.0, 3.0, 3.0, 5.0]


def test_one_level_two_arms_one_seed(planted: Callable[..., SweepData]) -> None:
    data = planted(seeds=(0,))
    finals = final_values(data)
    curves, effects = draw_curves(data, finals), draw_effects(data, finals)
    assert not any(axes.collections for axes in curves.figure.axes)  # no band
    assert "too few for an interval" in curves.bands and "no interval" in effects.bands
    assert "n = 1 of 3 seeds, no interval" in curves.figure.axes[0].get_title(loc="left")
    means = curve_numbers(data, finals).query("part == 'mean'")
    assert means["low"].isna().all() and effect_numbers(data, finals)["low"].isna().all()


def test_a_plain_sweep_is_drawn_against_its_first_arm(tmp_path: Path) -> None:
    entries = [entry(arm, seed) for arm in ("score", "mask") for seed in (0, 1)]
    declare(tmp_path, entries, None, "truncation=score,mask")
    for one in entries:
        write_run(tmp_path / one.folder, planted_rows(one.arm, one.seed))
    data = load_sweep(tmp_path, "truncation=score,mask")
    finals = final_values(data)
    assert "nothing was declared, so nothing is judged; score is the control" in verdict_text(data, finals)
    effects = draw_effects(data, finals)
    assert (effects.name, set(effects.numbers["arm"])) == ("truncation=score,mask_effects", {"mask"})
    assert "score is the sweep's first arm" in effects.caption


def test_a_run_that_never_trained_on_anything_is_counted_out(tmp_path: Path) -> None:
    rows = planted_rows("mask", 0)
    for row in rows:
        row.pop("reward/in_loss_mean", None)
    declare(tmp_path, [entry("mask", 0), entry("mask", 1)], design())
    write_run(tmp_path / "mask/seed=0", rows)
    write_run(tmp_path / "mask/seed=1", planted_rows("mask", 1))
    data = load_sweep(tmp_path, "planted")
    finals = final_values(data)
    table = effect_table(data, finals).set_index("metric")
    assert (table.loc["reward/in_loss_mean", "n"], table.loc[HELDOUT, "n"]) == (1, 2)
    means = curve_numbers(data, finals).query("part == 'mean'")
    assert means.groupby("series")["n"].max().to_dict()["reward/in_loss_mean"] == 1


def test_the_markdown_table(planted: Callable[..., SweepData]) -> None:
    data = planted()
    finals = final_values(data)
    text = markdown(data, finals)
    cut = finals.interval("", "mask", "rollout/truncated")
    assert f"| mask | 3 / 3 | {finals.interval('', 'mask', 'reward/in_loss_mean').text()} |" in text
    assert f"{cut.mean:.3f} [{cut.low:.3f}, {cut.high:.3f}]" in text
    assert finals.difference("", "mask", "score", "rollout/truncated").text("+") in text
    assert text.count("| score |") == 1 and "paired by seed" in text
    head, rule = next(pair for pair in zip(text.splitlines(), text.splitlines()[1:]) if pair[0].startswith("| arm |"))
    assert rule == "|" + " --- |" * (head.count("|") - 1)


def test_an_experiment_may_name_the_columns_of_its_table(planted: Callable[..., SweepData]) -> None:
    node = design(columns=["rollout/length", "active_fraction/truncation"])
    data = planted(node=node)
    finals = final_values(data)
    text = markdown(data, finals)
    assert "| arm | n finished / planned | response length, tokens | active_fraction/truncation |" in text
    assert "active_fraction/truncation" in set(effect_table(data, finals)["metric"])
    plain = replace(data, design=read_design(design()))
    assert "active_fraction/truncation" not in set(effect_table(plain, finals)["metric"])
    assert read_design(node).fingerprint() == read_design(design()).fingerprint(), "columns decide nothing"


@pytest.mark.extended
def test_arms_that_mean_something_else_by_now_are_marked(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    """By the experiment's own file beside the saved data, until the sweep has been declared and run anew."""
    data, folder = planted(), tmp_path / "planted" / "data"
    folder.mkdir(parents=True)
    save_data(data, folder)

    def read(**change: object) -> SweepData:
        entry = {"arms": ["mask"], "since": "2999-01-01T00:00:00Z", "what": "it masks more"} | change
        (tmp_path / "planted" / "design.yaml").write_text(json.dumps({"design": design(changes=[entry])}))
        return read_source(str(tmp_path / "nowhere"), "planted", folder)

    marked = read()
    text, finals = markdown(marked, final_values(marked)), final_values(marked)
    said = "Changed since these runs, and not run again (marked \u2020 in tables): mask (it masks more)."
    assert text.count("| mask \u2020 |") == 2 and "| score |" in text and said in text
    assert said in caveats(marked, finals) and said in notes(marked, finals)
    anew = read(since="2001-01-01T00:00:00Z")  # declared after the change
    assert not anew.changed and "\u2020" not in markdown(anew, finals)
    assert marked.design.fingerprint() == read_design(design(changes=[])).fingerprint(), "a mark declares nothing"


def test_the_recorded_recipes_that_changed_are_marked() -> None:
    changed = read_source("nowhere", "recipes", FOLDERS["recipes"] / "data").changed
    assert set(changed) == {"deepseek_r1", "reinforce_pp", "open_r1", "dapo", "cispo", "kimi_k15"}


@pytest.mark.extended
def test_many_arms_stand_in_even_rows_of_five_at_most(planted: Callable[..., SweepData]) -> None:
    arms = [f"arm{number}" for number in range(8)]
    node = design(predictions=(), control="arm0", arms={arm: [f"seed={number}"] for number, arm in enumerate(arms)})
    data = planted(arms=arms, seeds=(0, 1), node=node)
    drawn = draw_curves(data, final_values(data)).figure
    titles = [axes.get_title(loc="left") for axes in drawn.axes if axes.get_visible()]
    assert titles == [f"{arm}\nn = 2 of 3 seeds, no interval\ngap -" for arm in arms]
    first, fifth = drawn.axes[0].get_position(), drawn.axes[4].get_position()
    assert fifth.y1 < first.y0 and fifth.x0 == pytest.approx(first.x0)


# ---- the commands


BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mlflow", "transformers", "datasets"):
            raise ImportError(name + " was imported")
sys.meta_path.insert(0, Refuse())
from grpo_lab.cli import main
main()
"""


def command(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """`grpo-lab` in a process where torch, MLflow, transformers and datasets cannot be imported."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = [sys.executable, "-c", BLOCKED, *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, env=environment)


@pytest.mark.extended
def test_the_commands_need_neither_torch_nor_mlflow(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    planted()
    saved = command(tmp_path, "data", "planted", "--runs", ".")
    assert saved.returncode == 0, saved.stderr
    assert saved.stdout.startswith("experiments/planted/data/planted.parquet")
    drawn = command(tmp_path, "figures", "planted")  # there is no folder `runs`: the saved data serve
    assert drawn.returncode == 0, drawn.stderr
    notice = "There is no folder runs: these are the 6 runs saved in experiments/planted/data."
    assert drawn.stdout.startswith(f"{notice}\nplanted, from saved data, 6 finished runs\n\nplanted: 6 of ")
    assert QUESTION not in drawn.stdout, "the verdict is in its file"
    assert drawn.stderr == ""
    *_, blank, verdict, figure, page, store, files = drawn.stdout.splitlines()
    assert (blank, figure) == ("", "figure   experiments/planted/figures/planted.png")
    assert verdict.startswith("verdict  ") and "(predictions: " in verdict
    assert page == "report   make report EXP=planted"
    assert store == "MLflow   nothing to open: there is no runs/mlflow.db"
    listed = (tmp_path / "experiments/planted/figures/planted_files.txt").read_text().splitlines()
    paths = [line for line in listed if not line.startswith("no ")]
    assert (
        all((tmp_path / path).exists() for path in paths) and "experiments/planted/figures/planted_verdict.txt" in paths
    )
    assert listed[-1] == "no planted_ranks: reward/outcome was not logged"
    assert len(listed) == len(paths) + 1
    more = f"files    {len(paths)}, with caveats and tables, 1 figure not drawn"
    assert files == f"{more}: experiments/planted/figures/planted_files.txt"
    report = command(tmp_path, "report", "planted")
    assert report.returncode == 0, report.stderr
    assert report.stdout == f"{notice}\nanalysis/reports/planted.html\n"
    text = (tmp_path / "analysis/reports/planted.html").read_text()
    assert QUESTION in text and f'<header>\n<p class="warning">{notice}</p>' in text


@pytest.mark.few(1)
@pytest.mark.parametrize("words", ["figures planted", "report planted", "data planted", "rollouts planted"])
def test_a_folder_of_runs_that_is_not_there_is_refused(
    planted: Callable[..., SweepData], tmp_path: Path, words: str
) -> None:
    save_data(planted(), tmp_path / "experiments/planted/data")
    wrong = command(tmp_path, *words.split(), "--runs", "elsewhere")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: there is no folder elsewhere: ") and "--runs" in wrong.stderr


def test_what_to_open_follows_what_was_asked_for(tmp_path: Path) -> None:
    paths = [tmp_path / f"a.{kind}" for kind in ("svg", "png", "csv")]
    built = Built("saved data", "", "", "", "", paths, {"a_dose_response": "no dose"}, tmp_path / "a_files.txt")
    (tmp_path / "mlflow.db").touch()
    runs, data = str(tmp_path), data_of("a")
    figure, report, mlflow, files = what_to_open(built, "a=1,2", runs, data_of("a=1,2"))
    assert figure == f"figure   {tmp_path}/a.png" and report == f"report   make report EXP=a=1,2 RUNS={runs}"
    assert mlflow == f"MLflow   make ui RUNS={runs}"
    assert files == f"files    3, with caveats and tables, 1 figure not drawn: {tmp_path}/a_files.txt"
    demo = what_to_open(built, "a", runs, None, tmp_path / "out", ".venv/bin/grpo-lab")[1]
    assert demo == f"report   .venv/bin/grpo-lab report a --runs {runs} --only-runs --to {tmp_path}/out"
    assert what_to_open(built, "a", f"sqlite:///{runs}/mlflow.db", data)[2] == f"MLflow   make ui RUNS={runs}"
    assert what_to_open(built, "a", "http://h:5000", data)[2] == "MLflow   http://h:5000"
    assert what_to_open(replace(built, paths=[]), "a", runs, data)[0] == "figure   none could be drawn"


@pytest.mark.extended
def test_the_messages_name_what_is_there(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    planted()
    wrong = command(tmp_path, "figures", "plantd", "--runs", ".")
    assert wrong.returncode == 1
    assert "there is no sweep 'plantd': . has planted; saved data in experiments/plantd/data has none" in wrong.stderr
    with pytest.raises(ValueError, match="there are: planted"):
        load_sweep(tmp_path, "plantd")
    with pytest.raises(ValueError, match="no data was saved there yet"):
        load_data(tmp_path / "data", "planted")


def test_a_sweep_without_a_finished_run_says_so(tmp_path: Path) -> None:
    declare(tmp_path, [entry("score", 0), entry("mask", 0)], design())
    write_run(tmp_path / "score/seed=0", planted_rows("score", 0), "partial")
    data = load_sweep(tmp_path, "planted")
    with pytest.raises(ValueError, match=r"no run of planted is finished \(1 partial, 1 new\)"):
        final_values(data)


def test_a_part_does_not_replace_the_whole(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    """A demonstration shares the experiment's name: its few runs must not overwrite the published figure or data."""
    whole = planted()
    save_data(whole, tmp_path / "data")
    part = replace(whole, runs=whole.runs.iloc[:2])
    with pytest.raises(ValueError, match="holds 6 finished runs, these runs 2: finish the sweep, or save to another"):
        save_data(part, tmp_path / "data")
    for row in whole.runs.iloc[2:].itertuples():
        (tmp_path / row.folder / "DONE").unlink()
    chosen = read_source(str(tmp_path), "planted", tmp_path / "data")
    assert chosen.source == "saved data, 6 finished runs, run folders have 2"
    assert (
        chosen.notice
        == f"{tmp_path} has 2 finished runs of planted: these are the 6 runs saved in {tmp_path / 'data'}."
    )
    assert read_source(str(tmp_path), "planted", None).notice == ""
    elsewhere = read_source(str(tmp_path / "data"), "planted", tmp_path / "data")
    assert elsewhere.notice.startswith(f"{tmp_path / 'data'} has no runs of planted: these are the 6 runs saved in ")
    assert len(read_source(str(tmp_path), "planted", None).finished) == 2


def test_a_sweep_is_saved_in_parts(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    """Each part adds its runs to what is saved; what is there at last is what one sweep would have saved."""
    whole = planted()
    save_data(whole, tmp_path / "at_once")

    def part(seeds: tuple[int, ...]) -> SweepData:
        tables = {name: getattr(whole, name) for name in ("runs", "points", "answers")}
        entries = [one for one in whole.record.runs if one.seed in seeds]
        kept = {name: table[table["seed"].isin(seeds)] for name, table in tables.items()}
        pilot = [{"level": "", "arm": "mask", "metric": f"active_fraction/{seeds[0]}"}]
        declared = [{**one, "at": f"2026-01-0{1 + seeds[0]}T00:00:00Z"} for one in whole.record.declared]
        record = replace(whole.record, runs=entries, pilot=pilot, declared=declared)
        return replace(whole, record=record, **kept)

    for seeds in ((2,), (0, 1)):
        save_data(with_saved(part(seeds), tmp_path / "parts"), tmp_path / "parts")
    once, parts = (load_data(tmp_path / name, "planted") for name in ("at_once", "parts"))
    assert len(parts.finished) == len(once.finished) == 6
    for name in ("runs", "points", "answers"):
        by = ["level", "seed", "arm", *(["step"] if "step" in getattr(once, name) else [])]
        one, other = (getattr(data, name).sort_values(by).reset_index(drop=True) for data in (once, parts))
        pd.testing.assert_frame_equal(one, other[one.columns])
    assert sorted(parts.record.runs, key=str) == sorted(once.record.runs, key=str)
    assert [one["metric"] for one in parts.record.pilot] == ["active_fraction/2", "active_fraction/0"]
    assert [one["at"] for one in parts.record.declared] == ["2026-01-01T00:00:00Z"], "declared once, run in two places"
    # A run that both hold is the one that was run again; another declaration keeps nothing of before.
    again = part((0,))
    again = replace(again, points=again.points.assign(**{"reward/mean": 7.0}))
    joined = with_saved(again, tmp_path / "parts")
    assert joined.points.groupby("seed")["reward/mean"].max()[0] == 7.0 and len(joined.finished) == 6
    assert whole.design is not None
    other = replace(again, design=replace(whole.design, axis="steps"))
    assert len(with_saved(other, tmp_path / "parts").finished) == 2


def test_what_an_aggregation_does_to_everybody_is_not_the_trick(tmp_path: Path) -> None:
    factor = {"factor": "aggregation", "levels": {"constant": [], "sequence_mean": ["aggregation=sequence_mean"]}}
    against = {**ABOVE, "level": "sequence_mean", "against": "constant"}
    entries = [entry(arm, seed, level) for seed in (0, 1, 2) for level in factor["levels"] for arm in ("score", "mask")]
    declare(tmp_path, entries, design([against], **factor))
    # Both arms rise by 0.1 with the level, the mask by 0.05 more.
    rises = {("score", "constant"): 0.0, ("score", "sequence_mean"): 0.1}
    rises |= {("mask", "constant"): 0.2, ("mask", "sequence_mean"): 0.35}
    for one in entries:
        rows = planted_rows("mask", one.seed, effect=rises[one.arm, one.level])
        write_run(tmp_path / one.folder, rows)
    data = load_sweep(tmp_path, "planted")
    text = verdict_text(data, final_values(data))
    net = "net of the same change in score: +0.050"
    # Three equal differences have no scatter for t; of the eight patterns of their signs two are as extreme: p = .25.
    assert f"difference +0.150, n = 3, Holm p = 0.250; {net}" in text


def test_an_interrupted_run_is_unfinished_and_not_failed(planted: Callable[..., SweepData], tmp_path: Path) -> None:
    folder = tmp_path / planted().runs.iloc[0]["folder"]
    (folder / "DONE").unlink()
    (folder / "error.txt").write_text("KeyboardInterrupt: \n\nTraceback ...\n")
    row = load_sweep(tmp_path, "planted").runs.iloc[0]
    assert (row["status"], row["problem"]) == ("partial", "interrupted")
    (folder / "error.txt").write_text("ValueError: KeyboardInterrupt\n")
    assert load_sweep(tmp_path, "planted").runs.iloc[0]["status"] == "failed"
