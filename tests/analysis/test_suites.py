"""What further suites say of a sweep, from their columns to the files of `grpo-lab figures`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from planted_sweeps import Planted, synthetic_sweep

from grpo_lab.analysis.build import build, build_report
from grpo_lab.analysis.effects.suites import suites_text
from grpo_lab.analysis.effects.table import effect_table
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import save_data
from grpo_lab.analysis.sources.sweep_data import SweepData

WORDING = "eval/other_wording/accuracy"
PLANTED = Planted(tricks=("helps",), seeds=(0, 1, 2), steps=20, every=4, questions=16, samples=1, falls={"+helps": 0.3})


@pytest.fixture(scope="module")
def data() -> SweepData:
    """A sweep whose runs asked a further suite at their ends: 0.2 before, 0.3 after, 0.4 in the other arm."""
    made = synthetic_sweep(PLANTED)
    end = made.points["arm"].map({"base": 0.3, "+helps": 0.4}).where(made.points["step"] == made.points["step"].max())
    return replace(made, points=made.points.assign(**{WORDING: end.where(made.points["step"] > 0, 0.2)}))


def test_a_further_suite_is_shown_from_start_to_end_and_against_the_control(data: SweepData) -> None:
    finals = final_values(data)
    lines = suites_text(data, finals).splitlines()
    assert lines[0].startswith("Further suites") and lines[1].strip() == "held-out, other wording: accuracy"
    assert lines[2].strip().startswith("base: 0.200 -> 0.300") and "difference" not in lines[2]
    assert lines[3].strip().startswith("+helps: 0.200 -> 0.400") and "difference +0.100" in lines[3]
    assert WORDING in set(effect_table(data, finals)["metric"])


def test_a_sweep_without_further_suites_says_nothing_of_them() -> None:
    plain = synthetic_sweep(PLANTED)
    assert suites_text(plain, final_values(plain)) == ""
    assert WORDING not in set(effect_table(plain, final_values(plain))["metric"])


@pytest.mark.extended
def test_verdict_file_and_report_hold_suites_and_warnings_of_a_loss(data: SweepData, tmp_path: Path) -> None:
    save_data(data, tmp_path / "data")
    build(data.record.name, str(tmp_path / "runs"), tmp_path / "data", tmp_path / "figures", ["test"])
    verdict = (tmp_path / "figures" / "synthetic_verdict.txt").read_text()
    assert "Further suites" in verdict and "Early-warning indicators of a 10-point drop" in verdict
    table = pd.read_csv(tmp_path / "figures" / "synthetic_divergence.csv")
    areas = table[table["metric"].str.startswith("divergence/leading_auc_")]
    assert len(areas) == 6 and areas["arm"].isna().all()
    page, _ = build_report(data.record.name, str(tmp_path / "runs"), tmp_path / "data", tmp_path / "reports", ["test"])
    text = page.read_text()
    assert "held-out, other wording" in text and "Warnings of a loss" in text
