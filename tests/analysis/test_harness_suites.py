"""What other harnesses measured of a sweep's runs, from files in their folders to final values, verdict and report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from planted_harness import SUITE, plant_result
from planted_sweeps import Planted, write_synthetic

from grpo_lab.analysis.build import build_report
from grpo_lab.analysis.caveats import caveats
from grpo_lab.analysis.effects.suites import suites_text
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.metric_names import title
from grpo_lab.analysis.report.panel import panel_metrics
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.analysis.sources.saved_data import load_data, save_data

ACCURACY = f"eval/{SUITE}/accuracy"
END = 20
PLANTED = Planted(tricks=("helps",), seeds=(0, 1, 2), steps=END, every=4, questions=16, samples=1)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs that were evaluated at both ends by a harness, read before that."""
    folder = tmp_path / "runs"
    write_synthetic(PLANTED, folder)
    assert ACCURACY not in load_sweep(folder, "synthetic").points  # and now there is a cache
    for arm, end in (("base", 0.3), ("+helps", 0.4)):
        for seed in PLANTED.seeds:
            plant_result(folder_of(folder, arm, seed), 0, 0.2)
            plant_result(folder_of(folder, arm, seed), END, round(end + seed / 100, 2))
    return folder


def folder_of(runs: Path, arm: str, seed: int) -> Path:
    return runs / "synthetic" / arm / f"seed={seed}"


@pytest.mark.extended
def test_readers_join_a_result_to_its_step_and_final_values_take_that_of_the_last(runs: Path) -> None:
    for _ in range(2):  # parsed, and from the cache
        data = load_sweep(runs, "synthetic")
        own = data.points.query("arm == '+helps' and seed == 2").set_index("step")
        assert own[ACCURACY].dropna().to_dict() == {0: 0.2, END: 0.42}
        assert own.loc[END, f"eval/{SUITE}/responses"] == 80
        finals = final_values(data)
        assert finals.of("", "+helps", ACCURACY).to_dict() == {0: 0.4, 1: 0.41, 2: 0.42}
        assert np.allclose(finals.differences("", "+helps", "base", ACCURACY), 0.1)
    plant_result(folder_of(runs, "+helps", 2), END, 0.5)
    assert final_values(load_sweep(runs, "synthetic")).of("", "+helps", ACCURACY)[2] == 0.5


@pytest.mark.extended
def test_evaluations_of_steps_that_the_run_did_not_evaluate_are_no_loss(runs: Path) -> None:
    """The run evaluates itself every four steps, and step 2 has no table of answers."""
    before = caveats(load_sweep(runs, "synthetic"), final_values(load_sweep(runs, "synthetic")))
    for arm in ("base", "+helps"):
        for seed in PLANTED.seeds:
            plant_result(folder_of(runs, arm, seed), 2, 0.25)
    data = load_sweep(runs, "synthetic")
    assert set(data.runs["lost"]) == {""} and caveats(data, final_values(data)) == before


@pytest.mark.extended
def test_verdict_report_and_saved_data_hold_it(runs: Path, tmp_path: Path) -> None:
    assert title(ACCURACY) == "sums, by lm-evaluation-harness: accuracy"
    data = load_sweep(runs, "synthetic")
    assert ACCURACY in panel_metrics(data)
    text = suites_text(data, final_values(data))
    assert "sums, by lm-evaluation-harness: accuracy" in text and "+helps: 0.200 -> 0.410" in text
    page, _ = build_report("synthetic", str(runs), None, tmp_path / "reports", ["test"])
    assert ACCURACY in page.read_text() and "sums, by lm-evaluation-harness: accuracy\n" in page.read_text()
    save_data(data, tmp_path / "data")
    kept = load_data(tmp_path / "data", "synthetic")
    assert final_values(kept).of("", "base", ACCURACY).to_dict() == {0: 0.3, 1: 0.31, 2: 0.32}
    assert set(kept.runs["harness"]) == set(data.runs["harness"]) != {""}


@pytest.mark.extended
def test_runs_that_were_not_asked_alike_are_named(runs: Path) -> None:
    data = load_sweep(runs, "synthetic")
    assert not any("asked in" in line for line in caveats(data, final_values(data)))
    for seed in PLANTED.seeds:
        for step in (0, END):
            plant_result(folder_of(runs, "+helps", seed), step, 0.3, settings={"limit": 10})
    data = load_sweep(runs, "synthetic")
    (line,) = (line for line in caveats(data, final_values(data)) if "asked in" in line)
    assert line.startswith(f"Not evaluated alike: {SUITE} was evaluated in 2 ways")
    assert "(base; +helps)" in line or "(+helps; base)" in line


def test_a_run_with_a_result_of_other_weights_is_not_read(runs: Path) -> None:
    plant_result(folder_of(runs, "base", 0), END, 0.9, history="0" * 64)
    data = load_sweep(runs, "synthetic")
    (row,) = data.runs[data.runs["status"] == "unreadable"].to_dict("records")
    assert (row["arm"], row["seed"]) == ("base", 0) and "of weights that this run does not have" in row["problem"]
