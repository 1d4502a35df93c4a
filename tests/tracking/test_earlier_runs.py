"""A finished run of commit e0a4e51, before options, metrics and keys were renamed and keys were added."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_lab.analysis.sources.run_folders import read_runs
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.run.identity import check_folder, run_identity
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.renames import MEMORY_FIELDS, with_fields
from grpo_lab.tracking.sweep_record import FILE, RunEntry, read_sweep
from grpo_lab.tricks.curriculum import Memory

GOLDEN = Path(__file__).parents[1] / "golden"
COMMAND = ("world=tiny", "budget.amount=2", "evaluation=brief", "evaluation.every=1", "checkpoint_every=1")


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    return shutil.copytree(GOLDEN / "run_of_e0a4e51", tmp_path / "plain" / "seed=0")


def test_it_is_the_run_of_the_same_command_today(earlier: Path) -> None:
    assert check_folder(earlier, run_identity(compose_config([*COMMAND, "tracking=none"]), "cpu"))["run_key"]
    with pytest.raises(ValueError, match=r"another configuration .*convention.k3_limit: 0.0 there, 1.0 now"):
        check_folder(earlier, run_identity(compose_config([*COMMAND, "convention.k3_limit=1.0"]), "cpu"))


def test_a_sweep_of_before_is_read_under_todays_names(tmp_path: Path) -> None:
    run = {"arm": "a", "level": "", "seed": 0, "folder": "a/seed=0"}
    declared = {"fingerprint": "f", "at": "then", "cells_started_before": 2}
    before = {"name": "s", "key": "k", "design": None, "declared": [declared], "command": [], "commit": None}
    write_json(tmp_path / "s" / FILE, {**before, "tracking": None, "cells": [run]})
    record = read_sweep(tmp_path / "s")
    assert record.runs == [RunEntry("a", "", 0, "a/seed=0")] and record.declared[0]["runs_started_before"] == 2
    with pytest.warns(DeprecationWarning, match=r"SweepRecord.cells is now called runs"):
        assert record.cells == record.runs  # pyright: ignore[reportAttributeAccessIssue]


def test_a_curriculums_memory_of_before_is_read_under_todays_names() -> None:
    state = replace(Memory.of(3), drawn_at={1: 4}, repeats={1: 2}).to_state()
    for old, new in MEMORY_FIELDS.items():
        state[old] = state.pop(new)
    memory = Memory(**with_fields(state, MEMORY_FIELDS))
    assert memory.drawn_at == {1: 4} and memory.replayed == 2


def test_its_numbers_are_read_under_todays_names(earlier: Path) -> None:
    runs_dir = earlier.parents[1]
    (run,) = read_runs(runs_dir, [RunEntry("plain", "", 0, "plain/seed=0")], None)
    assert run.row["status"] == "done" and run.row["lost"] == "" and run.row["no_ops"] == ["surrogate"]
    assert run.points["step"].tolist() == [0, 1, 2] and run.points["eval/heldout/accuracy"].tolist()[0] == 0.453125
    assert {"active_fraction/scale", "train/clip_fraction", "rollout/frac_zero_std"} <= set(run.points)
    assert not [name for name in run.points if name.startswith("touched/")]
    assert len(run.answers) > 0
