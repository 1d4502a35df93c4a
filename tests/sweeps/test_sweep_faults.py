"""Sweeps as processes: runs started, refused, failing, killed, interrupted, resumed, and mirrored to MLflow."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from mlflow import MlflowClient
from processes import PATIENCE, alive, wait_until
from sweep_processes import (
    WORLD,
    command,
    finished,
    folder_of,
    lines_in,
    quiet_board,
    runs_of,
    started,
    sweep,
    sweep_from_here,
)

from grpo_lab.analysis.effects.arms import arms_table
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.loop import start
from grpo_lab.sweeps.child import THREAD_VARIABLES
from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.launching import LocalRunLauncher
from grpo_lab.sweeps.local import LocalBackend
from grpo_lab.tracking import interrupt
from grpo_lab.tracking.mlflow_exporter import sync_all

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests follow processes in /proc")


# ---- a sweep that nothing happens to


@dataclass(frozen=True)
class Watched:
    """A finished sweep of four runs on two workers, and what was seen of its processes."""

    runs: Path
    words: tuple[str, ...]
    said: str
    most: int
    children: set[int]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Watched:
    runs = tmp_path_factory.mktemp("watched") / "my runs"
    words = ("truncation=score,mask_after", "seed=0,1", "budget.amount=2", "hydra.launcher.workers=2")
    most, seen = 0, set()
    with started(runs, *words) as (process, _):
        while process.poll() is None:
            at_once = runs_of(process.pid)
            most = max(most, len(at_once))
            seen |= set(at_once)
            time.sleep(0.05)
        assert process.returncode == 0
        said = process.stderr.read()
    return Watched(runs, words, said, most, seen)


@pytest.mark.extended
def test_a_sweep_finishes_every_run_in_its_own_process_and_folder(watched: Watched) -> None:
    assert finished(watched.runs) == 4 == len(watched.children)
    for truncation in ("score", "mask_after"):
        for seed in (0, 1):
            output = (folder_of(watched.runs, truncation, seed) / "output.log").read_text()
            assert output.startswith(f"$ {sys.executable} -m grpo_lab.train ")
            assert f" truncation={truncation} " in output.splitlines()[0] and "finished after 2 steps" in output
            assert f"done   truncation={truncation} seed={seed}: step    2" in watched.said
    assert re.search(r"4 of 4 done after \d+m\d\ds$", watched.said, re.MULTILINE)


@pytest.mark.extended
def test_the_commands_that_a_sweep_prints_can_be_pasted_where_a_path_has_a_blank(watched: Watched) -> None:
    (draw,) = (line for line in watched.said.splitlines() if line.startswith("draw it: "))
    (name,) = (folder.name for folder in (watched.runs / "sweeps").iterdir())
    assert shlex.split(draw)[2:] == ["grpo-lab", "figures", name, "--runs", str(watched.runs)]
    for path in watched.runs.glob("*/seed=*/output.log"):
        typed = shlex.split(path.read_text().splitlines()[0])
        assert typed[:4] == ["$", sys.executable, "-m", "grpo_lab.train"]
        assert typed[4:] == json.loads((path.parent / "environment.json").read_text())["command"][1:]


@pytest.mark.extended
def test_no_more_runs_than_workers_run_at_once_each_on_the_threads_of_its_run(watched: Watched) -> None:
    assert watched.most == 2
    for path in watched.runs.glob("*/seed=*/environment.json"):
        threads = json.loads(path.read_text())["threads"]
        assert threads["torch.get_num_threads"] == 1
        assert {threads[name] for name in set(THREAD_VARIABLES) & set(threads)} == {"1"}


@pytest.mark.extended
def test_the_same_command_again_runs_nothing(watched: Watched) -> None:
    def written() -> dict[Path, int]:
        files = [path for path in watched.runs.rglob("seed=*/**/*") if path.is_file() and path.name != ".lock"]
        return {path: path.stat().st_mtime_ns for path in files}

    before = written()
    again = sweep(watched.runs, *watched.words)
    assert again.returncode == 0 and "all 4 runs are finished" in again.stderr
    assert written() == before and len(before) > 40
    # It declared nothing, so it ends with its arms in numbers and with what tells them apart.
    data = load_sweep(watched.runs, next((watched.runs / "sweeps").iterdir()).name)
    assert again.stdout.splitlines() == ["", *arms_table(data, final_values(data)), ""]
    apart = ["Settings in which the arms differ: 1."]
    apart.append("  truncation: score in truncation=score; mask_after in truncation=mask_after")
    assert again.stdout.splitlines()[-3:-1] == apart


@pytest.mark.extended
def test_a_bad_run_among_good_ones_stops_the_sweep_before_it_starts(tmp_path: Path) -> None:
    done = sweep(tmp_path / "runs", "truncation=score,mask_aftr", "group_size=4,1")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "error: no run was started, because these cannot run:" in done.stderr
    assert "truncation=mask_aftr,group_size=4 seed=0: " in done.stderr, "the typo, by its run"
    assert "truncation=score,group_size=1 seed=0: this combination cannot run" in done.stderr
    assert not (tmp_path / "runs").exists()


# ---- runs that fail


@pytest.mark.extended
def test_runs_that_fail_or_are_killed_stop_no_other_and_the_same_command_finishes_them(
    tmp_path: Path, tiny_base: Path
) -> None:
    """One finds a file where a folder must be, which only the run itself can see; one is killed; one is fine."""
    runs, numbers = tmp_path / "runs", ["budget.amount=16", "checkpoint_every=3"]
    words = ("truncation=score,mask_after,mask_before", *numbers, "hydra.launcher.workers=3")
    blocked, killed, fine = (
        runs / f"plain,truncation={option},budget.amount=16,checkpoint_every=3,evaluation=brief,world=tiny" / "seed=0"
        for option in ("score", "mask_after", "mask_before")
    )
    blocked.mkdir(parents=True)
    (blocked / "eval").write_text("in the way")
    with started(runs, *words) as (process, _):
        wait_until(lambda: lines_in(killed / "metrics.jsonl") > 5, process)
        (pid,) = [pid for pid, words in runs_of(process.pid).items() if "truncation=mask_after" in words]
        os.kill(pid, signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1 and "Traceback" not in said
    assert (fine / "DONE").exists() and finished(runs) == 1
    summary = said[said.index("error: 2 of 3 runs") :]
    assert "the same command retries them:\n  truncation=score seed=0: " in summary
    assert f"a file stands where a folder must be, or the reverse: move it, or set another runs_dir (see {blocked}" in (
        summary
    )
    assert f"  truncation=mask_after seed=0: killed by SIGKILL (see {killed / 'output.log'})" in summary
    (blocked / "eval").unlink()
    again = sweep(runs, *words)
    assert again.returncode == 0 and "3 runs, 1 finished before" in again.stderr and finished(runs) == 3
    assert "resuming after step" in (killed / "output.log").read_text()
    config = compose_config([*WORLD, "truncation=mask_after", *numbers, f"runs_dir={tmp_path / 'whole'}"])
    whole = start(config, "x", {}, ["test"])
    assert (killed / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_folder_that_cannot_be_made_fails_its_run_alone(tmp_path: Path, tiny_base: Path) -> None:
    blocked, fine = tmp_path / "blocked" / "seed=0", tmp_path / "plain,budget.amount=1,evaluation=brief,world=tiny"
    blocked.parent.mkdir()
    blocked.write_text("in the way")
    words = (*WORLD, "budget.amount=1", f"runs_dir={tmp_path}", "seed=0")
    jobs = [Job(folder.parent.name, words, folder, "steps", 1.0, 1) for folder in (blocked, fine / "seed=0")]
    with quiet_board(2) as display:
        failed, done = run_jobs(jobs, LocalBackend(1, []), 30.0, display)
    assert str(blocked) in failed and done is None
    assert (fine / "seed=0" / "DONE").exists() and (display.done, display.failed) == (1, 1)


@pytest.mark.extended
def test_a_failure_is_told_in_the_words_of_its_last_attempt_and_devices_are_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "says_devices.py").write_text('import os\nprint("sees", os.environ["CUDA_VISIBLE_DEVICES"])\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("plugins=[says_devices]", "no_such_key=1")
    jobs = [Job(f"job {n}", words, tmp_path / str(n), "steps", 1.0, 1) for n in range(2)]
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "output.log").write_text("$ python -m grpo_lab.train\nerror: an old trouble\n")
    with quiet_board(2) as display:
        for failure in run_jobs(jobs, LocalBackend(2, ["3", "5"]), 30.0, display):
            assert "an old trouble" not in failure and "no_such_key" in failure
    for job, device in zip(jobs, "35"):
        assert f"\nsees {device}\n" in (job.folder / "output.log").read_text()


@pytest.mark.extended
def test_a_run_that_hangs_is_ended_and_another_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One hears Ctrl-C while it hangs, one is deaf to it; a third has the time to load and to say what is wrong.

    What a run prints is no sign that it works: a run says now and then what it is doing.
    """
    hangs = "import signal, sys, time\nif 'deaf=1' in sys.argv:\n    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    hangs += "while 'wrong=1' not in sys.argv:\n    time.sleep(1)\n    print('loading, as before', flush=True)\n"
    (tmp_path / "hangs.py").write_text(hangs)
    monkeypatch.syspath_prepend(str(tmp_path))
    jobs = [
        Job(word, ("plugins=[hangs]", word), tmp_path / word, "steps", 1.0, 1)
        for word in ("hears=1", "deaf=1", "wrong=1")
    ]
    with quiet_board(3) as display:
        hears, deaf, wrong = run_jobs(jobs, LocalBackend(2, []), 2.0, display, silent_seconds=30.0)
    for failure in (hears, deaf):
        assert failure.startswith("it hung: it wrote nothing for 0.5 minutes, and was ended (see ")
    assert "wrong" in wrong and "it hung" not in wrong
    with pytest.raises(ValueError, match=r"silent_minutes must be above 0, got 0\.0: null waits for ever"):
        LocalRunLauncher(1, 30.0, 0.0)


def test_signals_that_come_together_are_one_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Slurm tells every process of a job and the first passes it on; a second Ctrl-C is another."""
    heard = interrupt.SIGNALS
    before = {number: signal.getsignal(number) for number in heard}
    monkeypatch.setattr(interrupt, "_requested", False)  # as it is again afterwards
    interrupt.hear(1.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        for number in heard:
            signal.raise_signal(number)
        time.sleep(1.1)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# ---- sweeps that end early


@pytest.mark.extended
def test_ctrl_c_ends_every_run_within_the_grace_and_the_same_command_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    words = ("truncation=score,mask_after", "budget.amount=60", "hydra.launcher.workers=2")
    with started(tmp_path, *words) as (process, children):
        logs = "*/seed=0/metrics.jsonl"
        # Soon after the first line Python frees what its imports left, and drops a Ctrl-C that hits a __del__.
        wait_until(lambda: [lines_in(path) > 0 for path in tmp_path.glob(logs)] == [True, True], process)
        children |= set(runs_of(process.pid))
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - began < 25, "within the grace of 30 seconds"
    assert process.returncode == 130 and len(children) == 2 and not any(map(alive, children))
    told = "stopping 2 runs: each has up to 110 s to finish its step and save (hydra.launcher.grace_seconds); Ctrl-C"
    assert told in said and "interrupted: re-run the same command to resume" in said and "Traceback" not in said
    assert finished(tmp_path) == 0 and "mid-step" not in said
    for option in ("score", "mask_after"):
        path = folder_of(tmp_path, option, 0)
        step = lines_in(path / "metrics.jsonl") - 1
        told = f"interrupted: step {step} is finished and saved in {path}/checkpoints/step={step:06d}"
        assert (path / "error.txt").read_text().startswith(f"KeyboardInterrupt: {told}\n")
        assert f"\ntruncation={option} seed=0: {told}\n" in said
    again = sweep(tmp_path, *words)
    assert again.returncode == 0 and finished(tmp_path) == 2


LONG_STEPS = """
import time

from grpo_lab.policy.optim import Adamw

Adamw.step = lambda *given: time.sleep(1000)
"""


@pytest.mark.extended
@pytest.mark.parametrize("grace", [120, 15])
def test_a_step_that_takes_too_long_is_ended_by_a_second_ctrl_c_or_near_the_end_of_the_grace(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch, grace: int
) -> None:
    (tmp_path / "long_steps.py").write_text(LONG_STEPS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("seed=0", "budget.amount=60", "plugins=[long_steps]", f"hydra.launcher.grace_seconds={grace}")
    with started(tmp_path / "runs", *words) as (process, children):
        logs = "runs/*/seed=0/metrics.jsonl"
        wait_until(lambda: any(lines_in(path) for path in tmp_path.glob(logs)), process)
        children |= set(runs_of(process.pid))
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        (output,) = tmp_path.glob("runs/*/seed=0/output.log")
        wait_until(lambda: "Ctrl-C: finishing this step" in output.read_text(), process)
        if grace == 120:
            time.sleep(1.1)  # signals within a second are taken for one
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=100)
        assert time.monotonic() - began < 60 and not any(map(alive, children))
    told = "interrupted: no checkpoint yet: it recomputes the unfinished step 1, starting from step 0"
    assert process.returncode == 130 and "interrupting 1 runs mid-step" in said
    assert f" seed=0: {told}\n" in said and told in (output.parent / "error.txt").read_text()


# In runs, not in their sweep: the first interrupt is lost, as when it hits a __del__.
HARD_OF_HEARING = """
import signal, sys

def first(number, frame):
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "-m" not in sys.argv:
    signal.signal(signal.SIGINT, first)
"""


@pytest.mark.extended
def test_the_runs_of_a_sweep_that_is_killed_end_by_themselves(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell starts what its scripts put in the background with Ctrl-C ignored, and children inherit that."""
    (tmp_path / "hard_of_hearing.py").write_text(HARD_OF_HEARING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    words = ("truncation=score,mask_after", "budget.amount=4000", "hydra.launcher.workers=2")
    words += ("plugins=[hard_of_hearing]",)
    with started(tmp_path, *words, in_background=True) as (process, children):
        logs = "*/seed=0/metrics.jsonl"
        wait_until(lambda: [lines_in(path) > 0 for path in tmp_path.glob(logs)] == [True, True], process)
        children |= set(runs_of(process.pid))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        deadline = time.monotonic() + 35
        while any(map(alive, children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(children) == 2 and not any(map(alive, children))
    for path in tmp_path.glob("*/seed=0"):
        assert "KeyboardInterrupt" in (path / "error.txt").read_text(), "interrupted, not killed"


# ---- MLflow


@pytest.mark.extended
def test_eight_runs_that_start_at_once_on_a_fresh_store_are_nested_under_one_run(
    tmp_path: Path, tiny_base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = ("seed=range(0,4)", "truncation=score,mask_after", "budget.amount=1", "hydra.launcher.workers=8")
    words += ("tracking=mlflow", "tracking.interval_seconds=1", "tracking.flush_seconds=60")
    sweep_from_here(tmp_path, *words)
    assert finished(tmp_path) == 8
    assert not [record for record in caplog.records if record.name.startswith("grpo_lab")], "MLflow took the sweep"
    assert not any("MLflow" in path.read_text() for path in tmp_path.glob("*/seed=*/output.log"))
    client = MlflowClient(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("grpo_lab").experiment_id

    def by_kind() -> tuple[list, list]:
        runs = client.search_runs([experiment])
        return [r for r in runs if "kind" in r.data.tags], [r for r in runs if "kind" not in r.data.tags]

    (parent,), children = by_kind()
    (name,) = (folder.name for folder in (tmp_path / "sweeps").iterdir())
    assert (parent.info.run_name, parent.info.status, parent.data.tags["kind"]) == (name, "FINISHED", "sweep")
    assert len(children) == 8 and {run.info.status for run in children} == {"FINISHED"}
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {run.data.tags["sweep"] for run in children} == {name}
    labels = sorted((run.data.tags["arm"], run.data.tags["axis.truncation"], run.data.tags["seed"]) for run in children)
    assert labels == [
        (f"truncation={option}", option, str(seed)) for option in ("mask_after", "score") for seed in range(4)
    ]
    assert {"axis.kl", "axis.baseline", "axis.updates"} <= children[0].data.tags.keys()
    assert {"training reward/mask_after", "held-out accuracy/score"} <= parent.data.metrics.keys()
    assert (parent.data.params["arms"], parent.data.params["seeds"]) == (
        "truncation=score, truncation=mask_after",
        "0, 1, 2, 3",
    )
    assert "nothing was declared, so nothing is judged" in parent.data.tags["mlflow.note.content"]
    assert {"verdict.txt", "arms.csv", "figures"} <= {one.path for one in client.list_artifacts(parent.info.run_id)}
    assert [report.points for report in sync_all(tmp_path)] == [0] * 9, "nothing was missing"
    sweep_from_here(tmp_path, *words)
    (same,), children = by_kind()
    assert (same.info.run_id, same.info.status, len(children)) == (parent.info.run_id, "FINISHED", 8)


@pytest.mark.extended
def test_a_server_that_is_down_stops_no_run_and_sync_brings_the_whole_sweep(
    tmp_path: Path, tiny_base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    runs, store = tmp_path / "runs", f"sqlite:///{tmp_path}/later.db"
    words = ("seed=0,1", "budget.amount=2", "tracking=mlflow", f"tracking.uri=http://127.0.0.1:{port}")
    sweep_from_here(runs, *words, "tracking.flush_seconds=3")
    assert finished(runs) == 2
    assert "MLflow does not take the sweep" in caplog.text and f"grpo-lab sync {runs}" in caplog.text
    reports = sync_all(runs, uri=store)
    assert [(report.status, report.error) for report in reports] == [("FINISHED", None)] * 3
    client = MlflowClient(tracking_uri=store)
    *children, parent = (client.get_run(report.run_id) for report in reports)
    assert (parent.data.tags["kind"], parent.info.status) == ("sweep", "FINISHED")
    for child, report in zip(children, reports):
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id and report.points > 100
        points = sum(len(client.get_metric_history(child.info.run_id, key)) for key in child.data.metrics)
        assert points == report.points
        assert len(client.get_metric_history(child.info.run_id, "budget/steps")) == 3
    again = sync_all(runs, uri=store)
    assert [(report.points, report.run_id) for report in again] == [(0, report.run_id) for report in reports]


# ---- the parts of others


MINE = """# @package _global_
hydra: {mode: MULTIRUN}
design:
  {name: mine, question: Why, prediction: So, control: plain, primary: reward/mean, axis: steps, seeds: [0],
   base: [budget.amount=1], arms: {plain: [], mask: [truncation=mask_after]}}
"""


@pytest.mark.extended
@pytest.mark.parametrize(
    "flag,words",
    [
        pytest.param("-m", ["seed=0,1", "budget.amount=1"], id="typed", marks=pytest.mark.extended),
        pytest.param("", ["+experiments=mine"], id="declared"),
    ],
)
def test_the_basic_launcher_runs_our_runs_and_reports_the_one_that_fails(
    flag: str, words: list[str], tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All runs in one process, as Hydra does without plugins, of a list or of an experiment of the user's own."""
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "mine"))
    (tmp_path / "mine" / "experiments").mkdir(parents=True)
    (tmp_path / "mine" / "experiments" / "mine.yaml").write_text(MINE)
    runs = tmp_path / "runs"
    blocked = runs / "plain,budget.amount=1,evaluation=brief,world=tiny" / "seed=0" / "eval"
    blocked.parent.mkdir(parents=True)
    blocked.write_text("in the way")
    typed = command(runs, *words, "hydra/launcher=basic", flag=flag)
    done = subprocess.run(typed, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 1 and "error: 1 of 2 runs" in done.stderr and "a file stands where" in done.stderr
    assert not (blocked.parent / "DONE").exists() and finished(runs) == 1, "the other one was run"


@pytest.mark.extended
def test_the_basic_sweeper_uses_our_launcher_which_hands_on_where_options_are_found(
    tmp_path: Path, tiny_base: Path, capfd: pytest.CaptureFixture
) -> None:
    option = tmp_path / "mine" / "truncation" / "own.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("defaults:\n  - /schema/truncation/mask_after@_here_\n")
    words = ("truncation=score,own", "seed=3", "budget.amount=1", f"hydra.searchpath=[file://{tmp_path / 'mine'}]")
    sweep_from_here(tmp_path / "runs", *words, "hydra/sweeper=basic")
    assert finished(tmp_path / "runs") == 2 and "2 of 2 done" in capfd.readouterr().err
    assert (folder_of(tmp_path / "runs", "own", 3) / "output.log").exists()
