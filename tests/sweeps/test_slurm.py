"""Runs in Slurm's queue, on a real Slurm of one node: the same runs, whatever becomes of their jobs."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until
from short_runs import same_ending
from slurm_node import PROGRAMS, SETTINGS, slurm_node
from sweep_processes import attempts, finished, folder_of, lines_in, quiet_board, started, sweep

from grpo_lab.sweeps.child import open_run_process
from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.launching import RunLauncher
from grpo_lab.sweeps.slurm import RECORD, RunJob, SlurmBackend, SlurmRunLauncher, SlurmSettings
from grpo_lab.sweeps.status import sweep_names
from grpo_lab.sweeps.stop import stop_run
from grpo_lab.tracking.run_reader import holder

SLURM = ("hydra/launcher=slurm", "hydra.launcher.minutes=30")
ONE_MINUTE = ("hydra/launcher=slurm", "hydra.launcher.minutes=1", "hydra.launcher.warning_seconds=10")
THREE = ("truncation=score,mask_after,mask_before", "budget.amount=60")
LONG = ("truncation=score", "budget.amount=40", "checkpoint_every=1")
SLOW = """
import time

from grpo_lab.tracking.run_log import RunLog

write = RunLog.write_step
RunLog.write_step = lambda *arguments, **named: (time.sleep(1), write(*arguments, **named))[1]
"""
real = pytest.mark.needs(*PROGRAMS, "pgrep", "root")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A Slurm of two processors, which every command of the module finds."""
    before = os.environ.get("SLURM_CONF")
    with slurm_node(tmp_path_factory.mktemp("slurm") / "node") as config:
        os.environ["SLURM_CONF"] = str(config)
        yield
    if before is None:
        del os.environ["SLURM_CONF"]
    else:
        os.environ["SLURM_CONF"] = before


@pytest.fixture
def slow_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `plugins=[slow]` a line of the log takes a second."""
    (tmp_path / "slow.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)


def jobs() -> dict[str, str]:
    """State of every job by its number, those that ended a while ago included."""
    said = subprocess.run(
        ["squeue", "--noheader", "--states=all", "--format=%i %T"], capture_output=True, text=True, check=True
    ).stdout
    return dict(line.split() for line in said.splitlines())


def job_of(folder: Path) -> str:
    return json.loads((folder / RECORD).read_text())["job"]


def soon(job: str) -> None:
    """Start a job soon that was put back into the queue, where it would wait for two minutes.

    Slurm refuses one that starts in the second in which it was put back: "Job credential revoked".
    """
    wait_until(lambda: jobs()[job] == "PENDING")
    subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], check=True)


def environment_of(pid: int) -> dict[str, str]:
    """The environment that a process was started with."""
    lines = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return dict(line.split("=", 1) for line in lines if "=" in line)


def two_at_work_and_one_that_waits(runs: Path, process: subprocess.Popen) -> dict[Path, str]:
    """Folder -> job of the runs of THREE, once two of them log steps; there are two processors."""
    logs = "*/seed=0/metrics.jsonl"
    wait_until(lambda: [lines_in(path) > 0 for path in runs.glob(logs)] == [True, True], process)
    mine = {path.parent: job_of(path.parent) for path in runs.glob(f"*/seed=0/{RECORD}")}
    assert sorted(jobs()[job] for job in mine.values()) == ["PENDING", "RUNNING", "RUNNING"]
    return mine


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_sweep_in_slurm_is_the_sweep_on_this_machine(slurm: None, tmp_path: Path, tiny_base: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score,mask_after", "budget.amount=2")
    said = sweep(there, *words, *SLURM)
    assert said.returncode == 0, said.stderr
    assert sweep(here, *words).returncode == 0
    for truncation in ("score", "mask_after"):
        one, other = folder_of(here, truncation, 0), folder_of(there, truncation, 0)
        same_ending(one, other)
        assert jobs()[job_of(other)] == "COMPLETED" and attempts(other) == 1
    before = jobs()
    again = sweep(there, *words, *SLURM)
    assert again.returncode == 0 and "all 2 runs are finished" in again.stderr and jobs() == before


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["preempted", "its time is up"])
def test_a_job_that_goes_back_into_the_queue_goes_on_from_its_checkpoint(
    slurm: None, tmp_path: Path, tiny_base: Path, how: str
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score", "budget.amount=12", "checkpoint_every=1")
    with started(there, *words, *SLURM) as (process, _):
        folder = saved_once(there, process)
        job = job_of(folder)
        if how == "preempted":
            subprocess.run(
                ["sbatch", "--partition=urgent", "--cpus-per-task=2", "--output=/dev/null", "--wrap=sleep 1"],
                check=True, capture_output=True,
            )  # fmt: skip
        else:  # what Slurm sends before the limit
            subprocess.run(["scancel", "--signal=USR2", job], check=True)
        soon(job)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert attempts(folder) == 2 and "resuming after step" in (folder / "output.log").read_text()
    assert jobs()[job] == "COMPLETED" and job_of(folder) == job
    assert sweep(here, *words).returncode == 0
    same_ending(folder_of(here, "score", 0), folder)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("gpus", "shown"), [(1, ["0", "1"]), (2, ["0,1"])])
def test_jobs_share_the_gpus_of_their_node(
    slurm: None, tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, shown: list[str]
) -> None:
    """The node has two: each job sees its own, and who finds none left waits, though a processor is free.

    The sweep is in a job itself, as far as its environment says; nothing of that reaches its runs.
    """
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    words = ("truncation=score,mask_after,mask_before", "budget.amount=20", "+hydra.launcher.further.requeue=false")
    with started(tmp_path, *words, *SLURM, "hydra.launcher.cpus=1", f"hydra.launcher.gpus={gpus}") as (process, _):
        logs = "*/seed=0/metrics.jsonl"
        wait_until(lambda: sum(lines_in(path) > 0 for path in tmp_path.glob(logs)) == len(shown), process)
        at_work = [path.parent for path in tmp_path.glob(logs)]
        states = [jobs()[job_of(path.parent)] for path in tmp_path.glob(f"*/seed=0/{RECORD}")]
        assert sorted(states) == ["PENDING"] * (3 - len(shown)) + ["RUNNING"] * len(shown)
        seen = [environment_of(int(holder(folder))) for folder in at_work]
        assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in seen) == shown
        assert all("SLURM_JOB_ID" in one and "SLURM_RESTART_COUNT" not in one for one in seen)
        told = subprocess.run(["scontrol", "show", "job", job_of(at_work[0])], capture_output=True, text=True).stdout
        assert "Requeue=0" in told
        _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and finished(tmp_path) == 3, said


@real
@pytest.mark.extended
@pytest.mark.timeout(900)
def test_a_run_that_takes_longer_than_its_job_may_comes_to_its_end(
    slurm: None, slow_steps: None, tmp_path: Path, tiny_base: Path
) -> None:
    """Slurm itself sends the signal, up to half a minute earlier than asked."""
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score", "budget.amount=50", "checkpoint_every=1")
    with started(there, *words, *ONE_MINUTE, "plugins=[slow]") as (process, _):
        folder = saved_once(there, process)
        job = job_of(folder)
        while process.poll() is None:
            wait_until(lambda: jobs()[job] == "PENDING" or process.poll() is not None)
            if process.poll() is None:
                soon(job)
                wait_until(lambda: jobs()[job] != "PENDING", process)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0 and jobs()[job] == "COMPLETED" and job_of(folder) == job, said
    output = (folder / "output.log").read_text()
    assert attempts(folder) >= 2 and output.count("resuming after step") == attempts(folder) - 1
    told = "".join(path.read_text() for path in (folder / "slurm").glob(f"{job}_*_log.out"))
    assert "Caught signal SIGUSR2" in told and "this job is timed-out" in told
    assert sweep(here, *words).returncode == 0
    same_ending(folder_of(here, "score", 0), folder)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_run_whose_jobs_leave_no_checkpoint_is_given_up(
    slurm: None, slow_steps: None, tmp_path: Path, tiny_base: Path
) -> None:
    """It would begin again for ever."""
    words = ("truncation=score", "budget.amount=500", "checkpoint_every=500", "plugins=[slow]", *ONE_MINUTE)
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: len(list(tmp_path.glob(f"*/seed=0/{RECORD}"))) > 0, process)
        folder = folder_of(tmp_path, "score", 0)
        wait_until(lambda: (folder / "error.txt").exists() and jobs()[job_of(folder)] == "PENDING", process)
        soon(job_of(folder))
        _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and attempts(folder) == 2
    assert "2 jobs reached their time limit without saving a checkpoint: raise hydra.launcher" in said
    assert "KeyboardInterrupt" in (folder / "error.txt").read_text()


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_where_slurm_tells_the_first_process_alone_a_run_hears_of_it_all_the_same(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, words = tmp_path / "runs", (*THREE, *SLURM)
    with slurm_node(tmp_path / "node", tracking="pgid") as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        with started(runs, *words) as (process, _):
            mine = two_at_work_and_one_that_waits(runs, process)
            states = jobs()
            at_work = [path for path, job in mine.items() if states[job] == "RUNNING"]
            stop = [sys.executable, "-m", "grpo_lab.cli", "stop", str(at_work[0]), "--runs", str(runs)]
            said = subprocess.run(stop, capture_output=True, text=True, timeout=120)
            assert "it has ended" in said.stdout, said.stderr
            wait_until(lambda: jobs()[mine[at_work[0]]] == "COMPLETED")
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=90)
        assert process.returncode == 130, told
        assert not [job for job, state in jobs().items() if state in ("RUNNING", "PENDING")]
        for folder in at_work:
            assert "KeyboardInterrupt" in (folder / "error.txt").read_text(), "interrupted, not killed"


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_running_and_a_waiting_job_are_stopped_from_another_shell(
    slurm: None, tmp_path: Path, tiny_base: Path
) -> None:
    program, runs = [sys.executable, "-m", "grpo_lab.cli"], ["--runs", str(tmp_path)]

    def say(*words: str) -> str:
        done = subprocess.run([*program, *words, *runs], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with started(tmp_path, *THREE, *SLURM) as (process, _):
        mine = two_at_work_and_one_that_waits(tmp_path, process)
        name = sweep_names(tmp_path)[0]
        assert "0 of 3 done, 2 running, 1 waiting" in say("status", name)
        states = jobs()
        by_state = {states[job]: path for path, job in mine.items()}
        for state, end in (("PENDING", "CANCELLED"), ("RUNNING", "COMPLETED")):
            (option,) = re.findall("truncation=([a-z_]+)", str(by_state[state]))
            assert "it has ended" in say("stop", f"truncation={option} seed=0")
            wait_until(lambda job=mine[by_state[state]], end=end: jobs()[job] == end, process)
        assert "KeyboardInterrupt" in (by_state["RUNNING"] / "error.txt").read_text(), "interrupted, not killed"
        assert not (by_state["PENDING"] / "output.log").exists(), "never started"
        _, said = process.communicate(timeout=300)
    assert process.returncode == 1 and finished(tmp_path) == 1, said


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_ctrl_c_ends_running_and_waiting_jobs_and_no_other(slurm: None, tmp_path: Path, tiny_base: Path) -> None:
    words = (*THREE, *SLURM)
    asked = ["sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "--wrap=sleep 1"]
    foreign = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    with started(tmp_path, *words) as (process, _):
        mine = two_at_work_and_one_that_waits(tmp_path, process).values()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=90)
    assert process.returncode == 130 and "stopping 3 runs" in said and "Traceback" not in said
    states = jobs()
    assert sorted(states[job] for job in mine) == ["CANCELLED", "COMPLETED", "COMPLETED"], "interrupted, not killed"
    assert finished(tmp_path) == 0
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: sum(state == "RUNNING" for state in jobs().values()) == 2, process)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=90)
    assert [job for job, state in jobs().items() if state in ("RUNNING", "PENDING")] == [foreign]
    subprocess.run(["scancel", foreign], check=True)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_jobs_outlive_their_sweep_and_the_same_command_finds_them_again(
    slurm: None, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score", "budget.amount=8", *SLURM)
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: any(lines_in(path) > 0 for path in tmp_path.glob("*/seed=0/metrics.jsonl")), process)
        process.kill()
        process.wait()
    folder = folder_of(tmp_path, "score", 0)
    job = job_of(folder)
    assert jobs()[job] == "RUNNING"
    again = sweep(tmp_path, *words)
    assert again.returncode == 0 and finished(tmp_path) == 1
    assert job_of(folder) == job and attempts(folder) == 1


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_job_that_fails_or_is_taken_away_is_told_with_its_reason(
    slurm: None, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("truncation=score", "budget.amount=200", *SLURM)
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: any(lines_in(path) > 0 for path in tmp_path.glob("*/seed=0/metrics.jsonl")), process)
        job = job_of(folder_of(tmp_path, "score", 0))
        subprocess.run(["scancel", "--signal=KILL", job], check=True)
        _, said = process.communicate(timeout=180)
    assert process.returncode == 1 and f"Slurm ended job {job}: CANCELLED" in said, said
    failing = sweep(tmp_path, "truncation=score", "model=hf", "model.path=/nowhere", *SLURM)
    assert failing.returncode == 1 and "model.path must be an existing folder, got /nowhere" in failing.stderr
    refused = sweep(tmp_path, "truncation=mask_after", "budget.amount=1", *SLURM, "hydra.launcher.partition=none_such")
    assert refused.returncode == 1 and "Slurm did not take the job of" in refused.stderr


def daemon(name: str) -> int:
    """The process of this module's Slurm; another worker of the tests may have one as well."""
    own = f"^{name} .*{os.environ['SLURM_CONF']}"
    return int(subprocess.run(["pgrep", "-f", own], capture_output=True, text=True, check=True).stdout)


@pytest.fixture
def own_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Slurm for one test alone, whose daemons it may kill."""
    with slurm_node(tmp_path / "node") as config:
        monkeypatch.setenv("SLURM_CONF", str(config))
        yield


def saved_once(runs: Path, process: subprocess.Popen) -> Path:
    """The folder of the only run, once its run has left a checkpoint."""
    wait_until(lambda: len(list(runs.glob("*/seed=0/checkpoints/step=*"))) > 0, process)
    return folder_of(runs, "score", 0)


@contextmanager
def the_node_again() -> Iterator[None]:
    """Within, a daemon in the place of one that was killed."""
    again = subprocess.Popen(
        ["slurmd", "-D", "-f", os.environ["SLURM_CONF"]],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        yield
    finally:
        again.send_signal(signal.SIGTERM)
        again.wait(30)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_a_job_outlives_the_daemon_of_its_node(own_node: None, tmp_path: Path, tiny_base: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with started(there, *LONG, *SLURM) as (process, _):
        folder = saved_once(there, process)
        os.kill(daemon("slurmd"), signal.SIGKILL)
        with the_node_again():
            _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and attempts(folder) == 1, said
    assert sweep(here, *LONG).returncode == 0
    same_ending(folder_of(here, "score", 0), folder)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_jobs_that_die_with_their_node_go_back_into_the_queue_and_on_from_their_checkpoints(
    own_node: None, tmp_path: Path, tiny_base: Path
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with started(there, *LONG, *SLURM) as (process, _):
        folder = saved_once(there, process)
        job = job_of(folder)
        steps = subprocess.run(["pgrep", "-f", f"slurmstepd: .{job}[.]"], capture_output=True, text=True).stdout
        for pid in (daemon("slurmd"), *map(int, steps.split()), int(holder(folder))):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: jobs()[job] == "PENDING", process)  # Slurm gives it up after a while
        with the_node_again():
            soon(job)
            _, said = process.communicate(timeout=300)
    assert process.returncode == 0 and attempts(folder) == 2, said
    assert sweep(here, *LONG).returncode == 0
    same_ending(folder_of(here, "score", 0), folder)


@real
@pytest.mark.extended
@pytest.mark.timeout(600)
def test_while_the_controller_does_not_answer_a_sweep_waits(slurm: None, tmp_path: Path, tiny_base: Path) -> None:
    controller = daemon("slurmctld")
    words = ("truncation=score", "budget.amount=4", *SLURM)
    with started(tmp_path, *words) as (process, _):
        wait_until(lambda: any(lines_in(path) > 0 for path in tmp_path.glob("*/seed=0/metrics.jsonl")), process)
        os.kill(controller, signal.SIGSTOP)
        try:
            time.sleep(12)
            assert process.poll() is None
        finally:
            os.kill(controller, signal.SIGCONT)
        _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert attempts(folder_of(tmp_path, "score", 0)) == 1


# --- what needs no Slurm ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minutes": 0}, r"hydra\.launcher\.minutes must be at least 1, got 0"),
        ({"cpus": 0}, r"hydra\.launcher\.cpus must be at least 1, got 0: null asks"),
        ({"gpus": -1}, r"hydra\.launcher\.gpus must be at least 0, got -1"),
        ({"further": {"clusters": "b"}}, r"hydra\.launcher\.further\.clusters is not supported: start the sweep where"),
        ({"minutes": 1}, r"hydra\.launcher\.warning_seconds must lie between 0 and the 60 seconds of a job, got 90"),
    ],
)
def test_settings_that_cannot_be_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlurmSettings(**{**SETTINGS, **change})


def test_a_job_asks_slurm_for_what_its_settings_say() -> None:
    job = Job("an arm/a level seed=0", (), Path("x"), "steps", 1.0, 2)
    plain = {
        "job_name": "an_arm_a_level_seed=0", "time": 30, "signal_delay_s": 90, "cpus_per_task": 2,
        "stderr_to_stdout": True, "additional_parameters": {"requeue": True},
    }  # fmt: skip
    assert SlurmSettings(**SETTINGS).parameters(job) == plain
    asked = {
        "partition": "cards", "account": "lab", "qos": "high", "constraint": "a100", "minutes": 60,
        "warning_seconds": 120, "gpus": 4, "cpus": 8, "memory_gb": 1.5, "setup": ("module load cuda",),
        "further": {"exclude": "node7", "requeue": False},
    }  # fmt: skip
    assert SlurmSettings(**asked).parameters(job) == {
        "partition": "cards", "account": "lab", "qos": "high", "constraint": "a100", "gpus_per_node": 4,
        "mem": "1536MB", "setup": ["module load cuda"], "job_name": "an_arm_a_level_seed=0", "time": 60,
        "signal_delay_s": 120, "cpus_per_task": 8, "stderr_to_stdout": True,
        "additional_parameters": {"no-requeue": True, "exclude": "node7"},
    }  # fmt: skip


def test_a_job_that_an_earlier_version_left_in_the_queue_is_read() -> None:
    assert pickle.loads(b"cgrpo_lab.sweeps.slurm\nCellJob\n.") is RunJob


def test_a_job_starts_all_processes_of_its_run_and_ends_as_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the node, where Slurm calls it; what would train is a script that says how it was called."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "called with $*"\nexit 7\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for processes in (1, 2):
            assert RunJob(("seed=1",), tmp_path, 1, processes, 60)() == 7
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    one, two = (line for line in (tmp_path / "output.log").read_text().splitlines() if line.startswith("called with"))
    assert one == "called with -m grpo_lab.train seed=1"
    assert "--nproc-per-node=2" in two and two.endswith("-m grpo_lab.train seed=1")


STUBBORN = f"""#!{sys.executable}
import signal, sys, time

told = []


def hear(number, frame):
    told.append(number)
    if len(told) > 1:
        sys.exit(3)


signal.signal(signal.SIGINT, hear)
print("begun", flush=True)
time.sleep(1000)
"""


def test_a_step_that_outlasts_the_warning_is_ended_so_that_the_job_can_be_put_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that ends at the second interrupt, as a run within a long step does."""
    program = tmp_path / "python"
    program.write_text(STUBBORN)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    job = RunJob(("seed=1",), tmp_path, 1, 1, 60, patience=1.0)
    job.process = open_run_process(job.words, tmp_path, 1, {})
    wait_until(lambda: "begun" in (tmp_path / "output.log").read_text())
    began = time.monotonic()
    again = job.checkpoint().function
    assert time.monotonic() - began >= 1.0 and job.process.wait(10) == 3, "at the second one"
    assert (again.words, again.patience) == (job.words, 1.0)


def test_a_machine_without_slurm_is_told_where_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    launcher: RunLauncher = SlurmRunLauncher(None, 60.0, None, **SETTINGS)
    with pytest.raises(ValueError, match=r"needs sbatch, srun, squeue, scancel, which .* lacks: start the sweep on a"):
        launcher.backend("jobs", [], [])
    with pytest.raises(ValueError, match=r"hydra\.launcher\.at_once must be at least 1"):
        SlurmRunLauncher(0, 60.0, None, **SETTINGS).backend("jobs", [], [])


def test_what_slurm_takes_later_waits_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit of jobs is no failure, a wrong partition is; these are Slurm's own words, from a script."""
    programs = tmp_path / "bin"
    programs.mkdir()
    tried = tmp_path / "tried"
    (programs / "sbatch").write_text(f"""#!/bin/sh
echo once >> {tried}
if [ "$(wc -l < {tried})" -lt 3 ]; then
    echo "sbatch: error: QOSMaxSubmitJobPerUserLimit"
    echo "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy (job submit limit)"
else
    echo "sbatch: error: invalid partition specified: gpu"
    echo "sbatch: error: Batch job submission failed: Invalid partition name specified"
fi >&2
exit 1
""")
    for name in ("srun", "squeue", "scancel"):  # asked for before a job is submitted
        (programs / name).write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    monkeypatch.setattr("grpo_lab.sweeps.jobs._REST_SECONDS", 0.5)
    place, said = SlurmBackend(SlurmSettings(**SETTINGS), 2), []
    new = [Job(name, ("no_such_key=1",), tmp_path / name, "steps", 1.0, 1) for name in ("one", "other")]
    with quiet_board(2) as display:
        monkeypatch.setattr(display, "say", said.append)
        failures = run_jobs(new, place, 1.0, display)
    assert lines_in(tried) == 4, "twice in vain, and then each once"
    for failure in failures:
        assert "invalid partition specified: gpu: Batch job submission failed" in str(failure)
    (told,) = (line for line in said if "follows wait" in line)
    assert "one and what follows wait: Slurm takes no job for now: QOSMaxSubmitJobPerUserLimit" in told
    assert capsys.readouterr().err == "", "said once, and not by submitit at every try"


def test_where_no_run_is_left_to_end_scancel_is_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a job's number it would cancel every waiting job of this user."""
    (tmp_path / "scancel").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\n')
    (tmp_path / "scancel").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    place = SlurmBackend(SlurmSettings(**SETTINGS), 2)
    place.interrupt([])
    place.kill([])
    assert not (tmp_path / "asked").exists()


def test_a_job_that_slurm_no_longer_has_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is then stopped as any process is, and where none runs that is said."""
    (tmp_path / "squeue").write_text("#!/bin/sh\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / RECORD).write_text('{"job": 7}')
    with pytest.raises(ValueError, match="no run is active in"):
        stop_run(tmp_path, 1.0)


def test_a_damaged_record_of_a_job_fails_its_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run, whose job Slurm is not asked for, ends as it does without."""
    monkeypatch.setenv("PATH", "/nowhere")  # no squeue and no sbatch
    place = SlurmBackend(SlurmSettings(**SETTINGS), 2)
    damaged, new = (Job(name, ("no_such_key=1",), tmp_path / name, "steps", 1.0, 1) for name in ("damaged", "new"))
    damaged.folder.mkdir()
    (damaged.folder / RECORD).write_text("{not json")
    with quiet_board(2) as display:
        failures = run_jobs([damaged, new], place, 1.0, display)
    assert "slurm.json" in str(failures[0]) and "Slurm did not take the job of new" in str(failures[1])
    assert display.failed == 2
