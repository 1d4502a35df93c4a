"""A run that two processes shared, again: by as many, and bit by bit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from several_ranks import TORCHRUN, WORLD
from short_runs import same_ending

from grpo_lab.reproduce.compare import Outcome, compare_runs
from grpo_lab.reproduce.record import check_repeatable, read_record


@pytest.mark.extended
def test_a_run_of_two_processes_comes_out_the_same(tmp_path: Path) -> None:
    runs, words = tmp_path / "runs", [*WORLD, "budget.amount=3", f"runs_dir={tmp_path / 'runs'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*TORCHRUN, "-m", "grpo_lab.train", *words], check=True, capture_output=True, env=environment)
    (folder,) = runs.glob("*/seed=0")
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli", "reproduce", str(folder), "--to", str(tmp_path / "again")],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0 and "\nequal: steps 0 to 3 compared" in done.stdout, done.stdout + done.stderr
    second = tmp_path / "again" / folder.parent.name / "seed=0"
    same_ending(folder, second)
    assert json.loads((second / "run.json").read_text())["ranks"] == [{"from_step": 0, "number": 2}]

    # By one process it is the same run up to rounding, and the table says why.
    alone = tmp_path / "alone"
    subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", *words[:-1], f"runs_dir={alone}"],
        check=True, capture_output=True, env=environment,
    )  # fmt: skip
    compared = compare_runs(folder, next(iter(alone.glob("*/seed=0"))))
    assert ("processes", "2", "1") in compared.elsewhere and compared.outcome is Outcome.rounding, compared.lines()


@pytest.mark.extended
def test_a_run_whose_processes_changed_in_number_is_repeated_up_to_there(tmp_path: Path) -> None:
    words = [*WORLD, "budget.amount=2", "checkpoint_every=1", "keep_checkpoints=9", f"runs_dir={tmp_path}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for start in ([sys.executable], TORCHRUN):
        subprocess.run([*start, "-m", "grpo_lab.train", *words], check=True, capture_output=True, env=environment)
        (folder,) = tmp_path.glob("*/seed=0")
        if start is not TORCHRUN:  # as a kill after the first step would have left it
            (folder / "DONE").unlink()
            shutil.rmtree(folder / "checkpoints" / "step=000002")
    record = read_record(folder)
    with pytest.raises(ValueError, match=r"processes changed from 1 to 2 after step 1.*Remedy: --steps 1"):
        check_repeatable(record, None)
    assert check_repeatable(record, 1) == [] and record.processes(1) == 1
