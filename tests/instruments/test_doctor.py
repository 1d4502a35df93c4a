"""The doctor: ten planted pathologies and ten healthy runs, onsets, thresholds, outputs and exit codes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from doctor_thresholds.derive import rules_table, state_of, threshold, thresholds_of

from grpo_lab.cli import main
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.instruments.doctor.command import as_html, as_json, as_text, exit_code, together_text
from grpo_lab.instruments.doctor.diagnosis import Diagnosis, diagnose, read_signal
from grpo_lab.instruments.doctor.rules import CLIP_NO_OP, RULES, THRESHOLDS, thresholds
from grpo_lab.instruments.doctor.signals import OnsetSpan, lost_accuracy, onset, reading

LOGS = Path(__file__).parent / "doctor_logs"
PLANTED = sorted(path.stem for path in LOGS.glob("*.jsonl") if not path.stem.startswith("healthy"))
HEALTHY = sorted(path.stem for path in LOGS.glob("healthy*.jsonl"))


def found_in(diagnosis: Diagnosis) -> dict[str, Any]:
    return {one.rule.name: one for one in diagnosis.findings}


def test_there_are_ten_of_each_and_all_are_small() -> None:
    assert len(PLANTED) == len(HEALTHY) == 10
    assert all(path.stat().st_size < 30_000 for path in LOGS.glob("*.jsonl"))
    assert {*PLANTED, "non_finite"} == {rule.name for rule in RULES}, "every rule has its fault"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_pathology_is_found(name: str) -> None:
    diagnosis = diagnose(LOGS / f"{name}.jsonl")
    found = found_in(diagnosis)[name]
    first, last = diagnosis.steps
    assert first <= found.onset.low <= found.onset.step <= found.onset.high <= last
    assert found.value > found.threshold and name not in diagnosis.unchecked


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_error_and_no_warning(name: str) -> None:
    diagnosis = diagnose(LOGS / f"{name}.jsonl")
    assert exit_code(diagnosis.worst(), "warning") == 0
    assert set(found_in(diagnosis)) <= {CLIP_NO_OP}, "a note: one update per batch"


def log_of(folder: Path, **columns: Any) -> Path:
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows)))
    return path


def test_numbers_that_are_not_finite_are_the_worst_and_single_gradients_are_not(tmp_path: Path) -> None:
    loss = [0.1] * 6 + [math.nan] * 4
    worst = diagnose(log_of(tmp_path, **{"train/loss": loss, "reward/mean": [0.5] * 10})).findings[0]
    assert worst.rule.name == "non_finite" and worst.severity == "error" and worst.onset == OnsetSpan(6, 6, 6)
    one = [0.1] * 5 + [math.inf] + [0.1] * 14  # a loss scaler skips a step
    assert not diagnose(log_of(tmp_path, **{"train/gradient_norm": one})).findings


def test_a_single_spike_is_no_finding_and_few_values_are_not_checked(tmp_path: Path) -> None:
    spike = [0.0] * 10 + [1.0] + [0.0] * 10
    assert "truncation" not in found_in(diagnose(log_of(tmp_path, **{"rollout/truncated": spike})))
    few = diagnose(log_of(tmp_path, **{"rollout/truncated": [1.0] * 4}))
    assert not few.findings and "fewer than 5" in few.unchecked["truncation"]


def test_zero_variance_groups_that_are_all_wrong_are_told_from_solved_ones(tmp_path: Path) -> None:
    def evidence(reward: float) -> str:
        columns = {"rollout/frac_zero_std": [1.0] * 8, "reward/mean": [reward] * 8}
        return found_in(diagnose(log_of(tmp_path, **columns)))["zero_variance"].evidence

    assert "at least 90% of groups are all wrong" in evidence(0.1)
    assert "all right" in evidence(1.0)


def test_accuracy_is_lost_only_while_reward_is_not_lower_and_two_evaluations_agree() -> None:
    steps = [0, 10, 20, 30]
    table = pd.DataFrame({"eval/heldout/accuracy": [0.2, 0.8, 0.3, 0.4]}, index=steps)
    rising, falling = pd.Series([0.1, 0.5, 0.6, 0.7], index=steps), pd.Series([0.1, 0.5, 0.3, 0.2], index=steps)
    # below the best by 0.5 and 0.4: two in a row lost 0.4
    assert lost_accuracy(table, "eval/heldout/accuracy", rising).tolist() == pytest.approx([0, 0, 0.4])
    assert lost_accuracy(table, "eval/heldout/accuracy", falling).tolist() == [0, 0, 0]


def test_a_relative_reading_is_the_log_of_the_ratio_to_the_start() -> None:
    table = pd.DataFrame({"train/entropy": [1.0] * 6 + [0.5] * 6})
    fall = next(signal for rule in RULES for signal in rule.signals if signal.key == "train/entropy fall")
    ((_, _, found),) = read_signal(fall, table)
    assert found.value == pytest.approx(math.log(2))
    table["train/entropy"] = 0.0  # no ratio to a start of zero
    assert not list(read_signal(fall, table))


def test_an_onset_is_dated_and_its_interval_covers_it() -> None:
    clean = pd.Series([0.0] * 20 + [1.0] * 20)
    assert onset(clean, 0.5) == OnsetSpan(20, 20, 20)
    assert onset(pd.Series([1.0] * 20), 0.5) == OnsetSpan(0, 0, 0), "it always was"
    rng = np.random.default_rng(0)
    covered, n = 0, 100
    for _ in range(n):
        noise = rng.normal(size=60)
        for place in range(1, 60):  # autocorrelated, as metrics are
            noise[place] += 0.4 * noise[place - 1]
        found = onset(pd.Series(noise + 3.0 * (np.arange(60) >= 25)), 1.5)
        covered += found.low <= 25 <= found.high
    assert covered >= 85


def test_a_threshold_is_the_highest_quantile_over_experiments_with_eight_runs() -> None:
    experiments = pd.Series(["a"] * 8 + ["b"] * 8 + ["c"] * 7)
    values = pd.Series([0.0] * 8 + [float(n) for n in range(8)] + [100.0] * 7)
    assert threshold(values, experiments) == pytest.approx(6.65)  # of 0 to 7; c has seven runs


def test_false_alarms_are_counted_with_the_thresholds_of_other_experiments() -> None:
    keys = {signal.key: 0.0 for rule in RULES for signal in rule.signals}
    base = {"state": "healthy", "change": 5.0, "several_updates": True, CLIP_NO_OP: 0.1, **keys}
    key = "rollout/truncated level"
    rows = [
        base | {"experiment": name, key: value}
        for name, value in (("a", 0.1), ("b", 0.2), ("c", 0.3))
        for _ in range(8)
    ]
    rows += [base | {"experiment": "a", "state": "harmed", "change": -15.0, key: 0.9, CLIP_NO_OP: 0.0}]
    found = thresholds_of(pd.DataFrame(rows))
    signal = found["signals"][key]
    assert signal["threshold"] == 0.3 and signal["experiments"] == 3
    # c is above the 0.2 of the others; a and b are below the 0.3 of the others
    assert (signal["false_alarms"], signal["healthy"], signal["found"], signal["harmed"]) == (8, 24, 1, 1)
    rule = found["rules"]["truncation"]
    assert rule["fired"] == 9 and rule["harm_points"] == pytest.approx(20 / 9, rel=1e-3)
    assert found["rules"][CLIP_NO_OP]["false_alarms"] == 0


def test_a_run_is_healthy_harmed_or_neither_by_its_evaluations() -> None:
    def state(training: list[float], downstream: list[float], collapsed: bool = False) -> str:
        table = pd.DataFrame({"eval/heldout_training/accuracy": training, "eval/downstream/accuracy": downstream})
        return state_of(table, collapsed)[0]

    assert state([0.1, 0.3], [0.2, 0.25]) == "healthy"
    assert state([0.1, 0.15], [0.2, 0.25]) == state([0.1, 0.3], [0.2, 0.15]) == "neither"
    assert state([0.1, 0.3], [0.2, 0.05]) == state([0.1, 0.3], [0.2, 0.25], collapsed=True) == "harmed"


def test_the_kept_thresholds_are_of_the_rules_that_there_are() -> None:
    known = json.loads(THRESHOLDS.read_text())
    assert set(known["signals"]) == {signal.key for rule in RULES for signal in rule.signals}
    assert known["runs"]["healthy"] > 1000 and known["together"]["false_alarms"] < 0.1 * known["runs"]["healthy"]
    for counts in known["signals"].values():
        assert counts["healthy"] >= counts["false_alarms"] and counts["experiments"] >= 3


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_to_try_is_an_override_that_composes(rule: Any) -> None:
    for override in rule.ours:
        compose_config([override, *(["schedule=sync"] if override == "correction=tis_token" else [])])


def test_the_command_writes_json_and_a_page_and_exits_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def code(*words: str) -> int:
        try:
            main(["doctor", *words])
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    sick, well = str(LOGS / "mismatch.jsonl"), str(LOGS / "healthy_dapo.jsonl")
    assert code(sick, "--json", str(tmp_path / "d.json"), "--html", str(tmp_path / "d.html")) == 1
    printed = capsys.readouterr().out
    assert "Sampler-learner mismatch [error], since step" in printed and "verl:" in printed
    content = json.loads((tmp_path / "d.json").read_text())
    assert {one["rule"] for one in content["findings"]} >= {"mismatch"}
    assert content["findings"][0]["onset"].keys() == {"step", "low", "high"}
    page = (tmp_path / "d.html").read_text()
    assert "Sampler-learner mismatch" in page and "<polyline" in page and "http" not in page.split("<body>")[1]
    assert code(sick, "--fail-on", "never") == 0 and code(well) == 0
    capsys.readouterr()
    assert code(well, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["findings"] == []
    assert code(str(LOGS / "clip_no_op.jsonl")) == 0, "a note is no failure"
    assert code(str(LOGS / "clip_no_op.jsonl"), "--fail-on", "note") == 1
    assert code(str(tmp_path / "away.log")) == 2
    assert "there is no" in capsys.readouterr().err


def test_a_page_escapes_and_every_diagnosis_is_json(tmp_path: Path) -> None:
    folder = tmp_path / "<script>"
    folder.mkdir()
    path = log_of(folder, **{"rollout/truncated": [1.0] * 8, "train/loss": [math.nan] * 8})
    diagnosis = diagnose(path)
    assert "<script>" not in as_html(diagnosis)
    json.dumps(as_json(diagnosis), allow_nan=False)


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from grpo_lab.instruments.doctor.diagnosis import diagnose; "
        f"diagnose({str(LOGS / 'mismatch.jsonl')!r}); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_rule_of_a_reading_has_a_number_in_its_words() -> None:
    for rule in RULES:
        for signal in rule.signals:
            assert "{" in signal.description and thresholds()["signals"][signal.key]["threshold"] > 0
    assert reading(pd.Series([1.0, 2.0])) is None


def test_the_page_has_the_rates_and_the_example_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(LOGS.parents[2])
    page = Path("analysis/doctor.md").read_text()
    assert rules_table(dict(thresholds())) in page
    assert together_text()[1:] in page
    example = LOGS.relative_to(Path.cwd()) / "reward_up_evaluation_down.jsonl"
    assert as_text(diagnose(example)) in page
