"""Two sweeps over one folder of runs: a run that another process runs is waited for, or taken over where that dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from processes import alive, wait_until
from sweep_processes import WORLD, lines_in, quiet_board, runs_of, started, sweep_from_here

from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.local import LocalBackend
from grpo_lab.sweeps.progress_display import ProgressDisplay
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import STOP, run_status, was_stopped
from grpo_lab.tracking.sweep_record import record_sweep

NAME = "plain,budget.amount=1,evaluation=brief,world=tiny"


def job_in(runs: Path) -> Job:
    words = (*WORLD, "budget.amount=1", f"runs_dir={runs}", "seed=0")
    return Job("the run", words, runs / NAME / "seed=0", "steps", 1.0, 1)


def said_by(display: ProgressDisplay) -> str:
    return display.console.file.getvalue()


def run_beside(job: Job, other: Callable[[ProgressDisplay], None]) -> ProgressDisplay:
    """The display of a sweep of this one job, while `other` does what another process would."""
    with quiet_board(1) as display:
        thread = threading.Thread(target=other, args=(display,))
        thread.start()
        failures = run_jobs([job], LocalBackend(1, []), 30.0, display)
        thread.join()
    assert failures == [None] and (display.done, display.failed) == (1, 0)
    return display


def test_a_run_that_another_process_finishes_is_waited_for_and_counts_as_done(tmp_path: Path) -> None:
    """The test itself is the other process: it holds the folder, and writes DONE once the sweep says that it waits."""
    job = job_in(tmp_path)
    log = RunLog(job.folder)

    def other(display: ProgressDisplay) -> None:
        wait_until(lambda: "waiting for" in said_by(display))
        time.sleep(0.5)  # a few looks of the sweep, which say nothing more
        log.mark_done({})
        log.close()

    display = run_beside(job, other)
    line = f"waiting for the run: process {os.getpid()} runs it in {job.folder}"
    assert said_by(display).count("waiting for") == 1 and line in said_by(display).replace("\n", "")
    assert not (job.folder / "output.log").exists(), "it was not started here as well"


@pytest.mark.extended
def test_a_run_that_is_refused_after_a_stop_has_failed(tmp_path: Path) -> None:
    """The request to stop was of the attempt before: a configuration that cannot run is no run that was stopped."""
    job = replace(job_in(tmp_path), words=(*WORLD, f"runs_dir={tmp_path}", "group_size=1"), forks=False)
    job.folder.mkdir(parents=True)
    (job.folder / STOP).touch()
    with quiet_board(1) as display:
        (failure,) = run_jobs([job], LocalBackend(1, []), 30.0, display)
    assert failure and display.failed == 1 and not was_stopped(job.folder)


@pytest.mark.extended
def test_a_run_that_another_process_takes_while_ours_loads_and_then_leaves_is_started_again(
    tmp_path: Path, tiny_base: Path
) -> None:
    job = job_in(tmp_path)

    def other(display: ProgressDisplay) -> None:
        wait_until(lambda: runs_of(os.getpid()))
        log = RunLog(job.folder)  # before it: a process loads for seconds until it takes its folder
        wait_until(lambda: "waiting for" in said_by(display))
        log.close()

    display = run_beside(job, other)
    assert "the run was left unfinished: it goes on here" in said_by(display)
    assert "is in use by process" in (job.folder / "output.log").read_text()
    assert run_status(job.folder) == "done"


@pytest.mark.extended
def test_a_sweep_that_waits_hears_ctrl_c_and_takes_over_what_a_killed_one_leaves(
    tmp_path: Path, tiny_base: Path
) -> None:
    words = ("seed=0", "budget.amount=1500", "checkpoint_every=10", "hydra.launcher.workers=1")
    with started(tmp_path, *words) as (one, children):
        wait_until(lambda: [lines_in(path) > 20 for path in tmp_path.glob("*/seed=0/metrics.jsonl")] == [True], one)
        children |= set(runs_of(one.pid))
        for ends in ("interrupted", "takes over"):
            with started(tmp_path, *words) as (other, _):
                line = next(line for line in other.stderr if "waiting for" in line)
                assert f"waiting for run seed=0: process {next(iter(children))} runs it in {tmp_path}" in line
                if ends == "takes over":
                    for pid in (one.pid, *children):
                        os.kill(pid, signal.SIGKILL)
                    assert next(line for line in other.stderr if "run seed=0 was left unfinished: it goes on" in line)
                    (output,) = tmp_path.glob("*/seed=0/output.log")
                    wait_until(lambda output=output: "resuming after step" in output.read_text(), other)
                other.send_signal(signal.SIGINT)
                assert "interrupted: re-run the same command to resume" in other.communicate(timeout=60)[1]
                assert other.returncode == 130 and [*map(alive, children)] == [ends == "interrupted"]


# ---- folders and commands


def test_a_folder_of_sweeps_that_cannot_be_written_is_named_with_a_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    (tmp_path / "sweeps").write_text("in the way")
    with pytest.raises(OSError, match="sweeps/x cannot be written; a file stands where a folder must be"):
        record_sweep(tmp_path, "x", [], None, None, "", [], None, None)
    with pytest.raises(OSError, match="/sys/sweeps/x cannot be written; set runs_dir"):
        record_sweep(Path("/sys"), "x", [], None, None, "", [], None, None)
    with pytest.raises(SystemExit, match=r"^error: .*/sys/sweeps/[^ ]+ cannot be written; set runs_dir"):
        sweep_from_here(Path("/sys"), "seed=0,1")
    with quiet_board(1) as display:
        (failed,) = run_jobs([job_in(Path("/sys"))], LocalBackend(1, []), 30.0, display)
    assert f"/sys/{NAME}/seed=0 cannot be written; set runs_dir (or GRPO_LAB_RUNS) to a folder this user can" in failed
