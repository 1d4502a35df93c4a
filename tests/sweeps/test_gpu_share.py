"""How many runs share a GPU: one until it has measured what a run takes, then as many as fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sweep_processes import quiet_board

from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.local import GpuShare, LocalBackend
from grpo_lab.tracking.metrics import GPU_PEAK
from grpo_lab.tracking.run_reader import gpu_peak


def log(folder: Path, *peaks: float) -> Path:
    """A run's log with these peaks in GiB, from step 0 on."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in (("metrics", [{}] * len(peaks)), ("timing", [{GPU_PEAK: peak} for peak in peaks])):
        lines = [json.dumps({"step": step, name: value}) for step, value in enumerate(values)]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_the_peak_of_a_run_is_that_of_a_step(tmp_path: Path) -> None:
    """An evaluation before the first step takes less than training."""
    assert gpu_peak(tmp_path) == gpu_peak(log(tmp_path / "evaluated", 7.0)) == 0
    assert gpu_peak(log(tmp_path / "trained", 7.0, 20.0, 24.1)) == 24.1


@pytest.mark.parametrize(("peak", "runs"), [(1.0, 8), (20.0, 3), (24.1, 2), (34.0, 2), (36.0, 1), (100.0, 1)])
def test_as_many_fit_as_leave_a_tenth_of_the_memory(peak: float, runs: int) -> None:
    """Each with 0.9 GiB outside of torch; no more than there are cores for."""
    assert GpuShare((), 79.2, 8).fitting(peak) == runs


def test_runs_join_once_the_first_one_is_measured(tmp_path: Path) -> None:
    place = LocalBackend(2, ["0", "1"], GpuShare([tmp_path / "first", tmp_path / "second"], 79.2, 8))
    assert place.widen() == "" and place.workers == 2
    log(tmp_path / "second", 3.0, 24.1)
    assert place.widen() == "", "it does not look all the time"
    place.looks = 0.0
    assert place.widen() == (
        "runs at a time on each GPU: 2, since one took 24.1 GiB and up to 0.9 GiB outside of torch, of 79 GiB; "
        "hydra.launcher.workers=N sets another number"
    )
    assert place.workers == 4 and place.widen() == ""


@pytest.mark.extended
def test_those_that_join_get_the_slots_of_their_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs wait for each other on two GPUs: they end only where all four run at once."""
    (tmp_path / "meets.py").write_text(
        "import os, pathlib, time\n"
        "here = pathlib.Path(__file__).parent / 'met'\n"
        "(here / str(os.getpid())).write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
        "while len(list(here.iterdir())) < 4:\n"
        "    time.sleep(0.1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "met").mkdir()
    share = GpuShare([log(tmp_path / "measured", 3.0, 30.0)], 79.2, 8)
    jobs = [Job(f"job {n}", ("plugins=[meets]", "no_such_key=1"), tmp_path / str(n), "steps", 1.0, 1) for n in range(4)]
    with quiet_board(4) as display:
        assert all(
            "no_such_key" in failure for failure in run_jobs(jobs, LocalBackend(2, ["3", "5"], share), 30.0, display)
        )
    assert sorted(path.read_text() for path in (tmp_path / "met").iterdir()) == ["3", "3", "5", "5"]
