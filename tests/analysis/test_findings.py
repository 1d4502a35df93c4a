"""The findings of README.md: the page shows what the saved data say, and other code says the same."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
from declared_experiments import EXPERIMENTS, FOLDERS, saved_points
from pages.findings import FINDINGS, findings_table
from pages.saved_sweeps import saved_sweeps
from scipy import stats


@pytest.fixture(scope="module")
def rows() -> dict[str, list[str]]:
    """The runs of each row, by its sweep."""
    lines = [line.strip("| ").split(" | ") for line in findings_table(saved_sweeps(EXPERIMENTS)).splitlines()[2:]]
    return {cells[-1].partition("]")[0].strip("["): cells for cells in lines}


def numbers(text: str) -> list[float]:
    return [float(one) for one in re.findall(r"[+-]?\d+\.\d+", text)]


@pytest.mark.extended
def test_every_finding_has_a_row_and_its_runs(rows: dict[str, list[str]]) -> None:
    assert set(rows) == {finding.sweep for finding in FINDINGS}
    assert all((FOLDERS[sweep] / "README.md").exists() for sweep in rows)
    assert all(len(cells) == 6 and numbers(cells[2]) for cells in rows.values())


def ends(sweep: str, metric: str, level: str = "") -> pd.DataFrame:
    """The last value of each run, by seed and arm."""
    points = saved_points(sweep).sort_values("step")
    own = points[(points["level"] == level) & points[metric].notna()]
    return own.groupby(["seed", "arm"])[metric].last().unstack()


@pytest.mark.extended
def test_fine_tuning_and_the_penalty_by_other_code(rows: dict[str, list[str]]) -> None:
    """Arm less control of each run, means over two seeds of a base model, Student's t over four base models."""
    cases = (
        ("warm_start", "length", "rejection_sampling", "base", "eval/downstream/accuracy", 0),
        ("interruption_budgets", "tight", "soft_overlong", "score", "eval/downstream/accuracy", 0),
        ("interruption_budgets", "tight", "soft_overlong", "score", "eval/heldout/accuracy", 3),
    )
    for sweep, level, arm, control, metric, place in cases:
        table = ends(sweep, metric, level)
        differences = (table[arm] - table[control]).to_numpy()
        by_base = np.array([differences[base::4].mean() for base in range(4)])
        half = stats.t.ppf(0.975, 3) * by_base.std(ddof=1) / 2
        found = numbers(rows[sweep][2])[place : place + 3]
        expected = [by_base.mean(), by_base.mean() - half, by_base.mean() + half]
        assert found == pytest.approx(expected, abs=6e-4), (sweep, metric)


@pytest.mark.extended
def test_the_fall_of_strict_accuracy_by_other_code(rows: dict[str, list[str]]) -> None:
    points = saved_points("same_reward").sort_values("step")
    points = points[points.groupby(["arm", "seed"])["step"].transform("max") == 150]  # finished
    fallen, ends = {}, {}
    for arm in ("plain", "soft_overlong"):
        own = points[(points["arm"] == arm) & points["eval/heldout/accuracy"].notna()]
        drops = own.groupby("seed")["eval/heldout/accuracy"].apply(
            lambda run: run.rolling(3).mean().max() - run.iloc[-3:].mean()
        )
        fallen[arm] = (drops > 0.1).sum()
        ends[arm] = own.groupby("seed")["eval/heldout/accuracy"].last().mean()
    said = f"it fell on {fallen['plain']} and {fallen['soft_overlong']} of {len(drops)} base models"
    assert said in rows["same_reward"][2]
    said = f"accuracy ends at {ends['plain']:.2f} without and {ends['soft_overlong']:.2f} with the penalty"
    assert said in rows["same_reward"][2]


def test_what_reward_ranks_recipes_by_by_other_code(rows: dict[str, list[str]]) -> None:
    """Spearman's rank correlation over seven recipes on each base model, Student's t over eight base models."""
    points = saved_points("sharpness").sort_values("step")
    points = points[points["arm"] != "scalerl"]  # evaluated by another protocol
    budget = points.groupby(["level", "arm", "seed"])["budget/sampled_tokens"].max().min()
    late = points[points["budget/sampled_tokens"].between(0.8 * budget, budget)]
    said = iter(np.array(numbers(rows["sharpness"][2])).reshape(6, 3))
    for level in ("sums", "search"):
        own = late[late["level"] == level].groupby(["seed", "arm"])[["reward/outcome", "train/entropy"]].mean()
        own["accuracy"] = ends("sharpness", "eval/heldout/accuracy", level).stack()
        for metric in ("train/entropy", "accuracy"):
            ranks = [stats.spearmanr(one["reward/outcome"], one[metric])[0] for _, one in own.groupby("seed")]
            half = stats.t.ppf(0.975, 7) * np.std(ranks, ddof=1) / np.sqrt(8)
            expected = np.clip([np.mean(ranks), np.mean(ranks) - half, np.mean(ranks) + half], -1, 1)
            assert next(said) == pytest.approx(expected, abs=0.02), (level, metric)
        share = next(said)
        assert share[0] > 0.5 if level == "sums" else share[0] < 0.1
