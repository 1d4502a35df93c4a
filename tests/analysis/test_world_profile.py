"""A world's profile: its numbers by hand, its page, and the command that measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from world_profiles.__main__ import worlds
from world_profiles.profile import (
    SAVED,
    Fit,
    documented_profiles,
    measure_profile,
    profile_text,
    profiles_table,
    read_profiles,
)

from grpo_lab.analysis.sources.answers import COLUMNS
from grpo_lab.analysis.sources.sweep_data import RunData, SweepData, assemble
from grpo_lab.tracking.sweep_record import RunEntry, SweepRecord

STEPS = 20
ROOT = Path(__file__).parents[2]


def sweep(name: str, arms: dict[str, float]) -> SweepData:
    """Two base models with two seeds each. Base b gains (b + 1) / 10 in a straight line up to step 10, from 0.2."""
    runs = []
    for arm, clipped in arms.items():
        for seed in range(4):
            base = seed % 2
            step = np.arange(STEPS + 1)
            gained = 0.1 * (base + 1) * np.minimum(step / 10, 1)
            ends = np.where((step == 0) | (step == STEPS), 1.0, np.nan)
            points = pd.DataFrame({"step": step, "reward/outcome": 0.2 + gained})
            for suite in ("heldout_training", "heldout", "downstream"):
                points[f"eval/{suite}/accuracy"] = ends * (0.2 + gained + 0.01 * (seed >= 2))
            points["rollout/frac_zero_std"] = step / STEPS
            points["train/entropy"] = 1 - step / STEPS
            points["train/clip_fraction"] = clipped + 0.001 * base
            for metric in ("rollout/truncated", "rollout/length_std_within", "rollout/length_std_across"):
                points[metric] = float(base)
            asked = {"step": STEPS, "difficulty": 1, "n": 4, "correct": 2, "wanted": 0, "tokens": 9}
            answers = pd.DataFrame(
                [asked | {"suite": suite, "question": q} for suite in ("heldout", "downstream") for q in range(16)]
            )
            row = {"level": "", "arm": arm, "seed": seed, "folder": f"{name}/{arm}/{seed}", "problem": "", "base": base}
            row |= {"status": "done", "collapsed": False, "run_key": "", "mlflow_run_id": None, "no_ops": []}
            row |= {"commit": None, "dirty": None, "protocol": None}
            runs.append(RunData(row, points, answers[COLUMNS]))
    records = [RunEntry(run.row["arm"], "", run.row["seed"], run.row["folder"]) for run in runs]
    return assemble(SweepRecord(name, name, None, [], [], None, None, records), runs, "made by hand")


def test_every_quantity_of_a_profile_by_hand() -> None:
    runs, updates = sweep("profile", {"plain": 0.0}), sweep("profile_updates", {"four": 0.0, "trust_region": 0.02})
    profile = measure_profile("made", runs, updates, Fit(budget=40, share=0.95, needed_95=38.0))
    rows = dict(profile["rows"])
    assert (profile["world"], profile["bases"], profile["runs"]) == ("made", 2, 4)
    # Bases start at 0.205, the mean of two seeds, and end at 0.305 and 0.405: two are too few for an interval.
    assert rows["held-out, step 0"] == "0.205" and rows["held-out, last step"] == "0.355 (0.305 and 0.405)"
    assert rows["headroom, held-out"].startswith("0.795")
    # The running mean of five steps runs from step 3, 30% of the way, to step 18 at 100%. Of that nine tenths is 93%,
    # which it has first at step 10: (80 + 90 + 3 x 100) / 5 = 94.
    assert rows["steps to 90% of the gain, of 20"] == "10"
    assert rows["groups without signal, first 5 steps"].startswith("0.150")  # steps 1 to 5 of 20
    assert rows["groups without signal, last 5 steps"].startswith("0.900")
    assert rows["entropy, nats, first 5 steps"].startswith("0.850")
    assert rows["problems that fit into it"] == "0.950" and rows["tokens that 95% of the problems need"] == "38"
    assert rows["sd of length among answers to one problem, tokens"].startswith("0.500")
    assert rows["tokens clipped, updates=four"].startswith("0.05%")
    assert rows["tokens clipped, in regime=trust_region"].startswith("2.05%")
    # Seeds differ by 0.01 on both base models: sd 0.01 / sqrt(2). Bases differ by 0.1: variance 0.005 less half of
    # 0.00005.
    assert rows["held-out: sd between seeds"].startswith("0.007")
    assert rows["held-out: sd between base models"].startswith("0.071")
    # Half of four samples right on 16 questions: sqrt(16 * (1/4) / 3) / 16.
    assert rows["held-out: sampling sd of the evaluation"] == f"{(16 / 12) ** 0.5 / 16:.3f}"
    text = profile_text(profile)
    assert text.startswith("world=made: 4 runs on 2 base models") and all(name in text for name in rows)


def test_a_profile_of_unfinished_runs_is_refused() -> None:
    runs, updates = sweep("profile", {"plain": 0.0}), sweep("profile_updates", {"four": 0.0})
    runs.runs.loc[0, "status"] = "partial"
    with pytest.raises(ValueError, match="profile has unfinished runs: give the same command again"):
        measure_profile("made", runs, updates, Fit(40, 1.0, 38.0))


def test_profiles_stand_side_by_side(tmp_path: Path) -> None:
    for world, rows in (("a", [["x", "1"], ["y", "2"]]), ("b", [["x", "3"]])):
        (tmp_path / f"{world}.json").write_text(json.dumps({"world": world, "rows": rows}))
    table = profiles_table(read_profiles(tmp_path)).splitlines()
    assert table == ["| measured | a | b |", "|---|---|---|", "| x | 1 | 3 |", "| y | 2 | - |"]


@pytest.mark.extended
def test_every_world_of_a_tiny_model_has_a_profile() -> None:
    assert worlds() == [path.stem for path in sorted(SAVED.glob("*.json"))]


def test_the_page_of_worlds_shows_the_saved_profiles() -> None:
    assert [path for path, text in documented_profiles().items() if path.read_text() != text] == [], "run `make docs`"


@pytest.mark.extended
@pytest.mark.timeout(900)
def test_the_command_measures_a_world(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "world_profiles", "tiny", "evaluation=standard", "budget.amount=8"]
    words += ["design.seeds=2", "design.bases=2", "--runs", str(tmp_path / "runs"), "--to", str(tmp_path / "profiles")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "analysis")))}
    done = subprocess.run(words, capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr
    (profile,) = read_profiles(tmp_path / "profiles")
    assert profile["world"] == "tiny" and profile["bases"] == 2 and profile["runs"] == 4
    assert profile_text(profile) in done.stdout
