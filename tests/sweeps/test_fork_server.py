"""Runs forked from one server: what a fresh interpreter would be, for a fraction of its start."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest
import yaml
from processes import alive, children_of, command_of, descendants_of, processor_seconds, wait_until
from short_runs import same_ending
from sweep_processes import WORLD, command, lines_in, runs_of, started

import grpo_lab
from grpo_lab.sweeps.child import OUTPUT, THREAD_VARIABLES, open_run_process
from grpo_lab.sweeps.fork_server import _Forked, fork_run
from grpo_lab.sweeps.jobs import Started

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="runs are forked on Linux alone")
NAME = "plain,budget.amount=2,evaluation=brief,world=tiny"


def words(runs: Path, *more: str) -> tuple[str, ...]:
    return (*WORLD, "budget.amount=2", f"runs_dir={runs}", "seed=0", *more)


def made(runs: Path, name: str = NAME) -> Path:
    folder = runs / name / "seed=0"
    folder.mkdir(parents=True)
    return folder


def ended(run: Started) -> int:
    wait_until(lambda: run.poll() is not None)
    code = run.poll()
    assert code is not None
    return code


@pytest.mark.extended
def test_a_forked_run_is_the_run_of_a_fresh_interpreter(tmp_path: Path, tiny_base: Path) -> None:
    forked, fresh = made(tmp_path / "forked"), made(tmp_path / "fresh")
    assert ended(fork_run(words(tmp_path / "forked"), forked, 1, {})) == 0
    assert open_run_process(words(tmp_path / "fresh"), fresh, 1, {}).wait() == 0
    same_ending(forked, fresh)
    one, other = (yaml.safe_load((folder / "config.yaml").read_text()) for folder in (forked, fresh))
    assert one | {"runs_dir": ""} == other | {"runs_dir": ""}
    one, other = (json.loads((folder / "environment.json").read_text()) for folder in (forked, fresh))
    assert one.pop("command")[0] == other.pop("command")[0] and one == other
    one, other = ((folder / OUTPUT).read_text().splitlines() for folder in (forked, fresh))
    assert len(one) == len(other) and one[0].replace("/forked", "/fresh") == other[0]


@pytest.mark.extended
def test_a_run_of_another_number_of_threads_has_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """Libraries make their threads when they load."""
    (tmp_path / "one").mkdir()
    assert ended(fork_run(("no_such_key=1",), tmp_path / "one", 1, {})) == 1
    folder = made(tmp_path, NAME.replace("world", "threads=2,world"))
    run = fork_run(words(tmp_path, "threads=2"), folder, 2, {})
    assert isinstance(run, _Forked)
    at_its_start = Path(f"/proc/{run.process.pid}/environ")  # a forked process has the server's
    wait_until(lambda: "OMP_NUM_THREADS=2" in at_its_start.read_text(errors="replace").split("\0"))
    assert ended(run) == 0
    threads = json.loads((folder / "environment.json").read_text())["threads"]
    assert threads["torch.get_num_threads"] == 2
    assert {threads[name] for name in set(THREAD_VARIABLES) & set(threads)} == {"2"}


@pytest.mark.extended
def test_a_run_whose_server_has_died_says_so_and_the_next_has_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text('import time\nprint("at work", flush=True)\ntime.sleep(1e6)\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "long").mkdir()
    (tmp_path / "short").mkdir()
    run = fork_run(("plugins=[hangs]",), tmp_path / "long", 1, {})
    assert isinstance(run, _Forked) and run.process.pid is not None
    output = tmp_path / "long" / OUTPUT
    try:
        wait_until(lambda: output.exists() and "at work" in output.read_text())
        (server,) = (pid for pid in children_of(os.getpid()) if "multiprocessing.forkserver" in command_of(pid))
        os.kill(server, signal.SIGKILL)
        assert ended(run) == 255 and run.message == "the process that forked it has died"
        wait_until(lambda: not alive(run.process.pid))  # by itself
    finally:
        run.kill()  # this process waits for its children when it ends
    assert ended(fork_run(("no_such_key=1",), tmp_path / "short", 1, {})) == 1
    assert "no_such_key" in (tmp_path / "short" / OUTPUT).read_text()


@pytest.mark.extended
def test_what_ends_a_run_before_it_trains_is_in_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "setproctitle.py").write_text('raise RuntimeError("this package is broken")\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    forkserver._forkserver._stop()  # the next one has this path
    try:
        assert ended(fork_run(("no_such_key=1",), tmp_path, 1, {})) == 1
    finally:
        forkserver._forkserver._stop()
    assert (tmp_path / OUTPUT).read_text().endswith("RuntimeError: this package is broken\n")


@pytest.mark.extended
def test_code_that_changes_during_a_sweep_is_the_code_of_the_runs_that_start_after_it(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run records the code that it finds on disk, so that has to be the code that it runs."""
    package = tmp_path / "grpo_lab"
    shutil.copytree(Path(grpo_lab.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    for beside in ("conf", "experiments"):
        (tmp_path / beside).symlink_to(Path(grpo_lab.__file__).parents[1] / beside)
    runs = tmp_path / "runs"
    typed = command(runs, "seed=0,1", "budget.amount=40", "hydra.launcher.workers=1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = subprocess.Popen(typed, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: any(map(lines_in, runs.glob("*/seed=0/metrics.jsonl"))), process)
        with (package / "loop.py").open("a") as loop:
            loop.write('\nprint("changed code")\n')
        _, said = process.communicate(timeout=200)
    finally:
        process.kill()  # its runs end with it
        process.wait()
    assert process.returncode == 0, said
    first, second = (next(runs.glob(f"*/seed={seed}/{OUTPUT}")).read_text() for seed in (0, 1))
    assert "changed code" not in first and "changed code" in second


@pytest.mark.extended
def test_a_forked_run_is_ready_for_under_three_seconds_of_a_processor_and_half_of_a_fresh_one(
    tmp_path: Path, tiny_base: Path
) -> None:
    """To the first line of its log, with MLflow's mirror: 2 s and 8 s on an idle machine."""
    logs = "*/seed=0/metrics.jsonl"
    typed = ("budget.amount=2000", "seed=0,1", "tracking=mlflow", "hydra.launcher.workers=1")
    with started(tmp_path, *typed) as (sweep, _):
        wait_until(lambda: any(map(lines_in, tmp_path.glob(logs))), sweep)
        (pid,) = runs_of(sweep.pid)
        forked = processor_seconds(pid)
        (output,) = tmp_path.glob(f"*/seed=0/{OUTPUT}")
        typed_by_hand = output.read_text().splitlines()[0].replace(str(tmp_path), str(tmp_path / "by_hand"))
        run = subprocess.Popen(shlex.split(typed_by_hand)[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: any(map(lines_in, (tmp_path / "by_hand").glob(logs))), run)
            fresh = processor_seconds(run.pid)
        finally:
            run.kill()
            run.wait()
    assert forked < 3.0 and forked < fresh / 2, (forked, fresh)


@pytest.mark.extended
def test_nothing_is_left_of_a_sweep_and_its_server(tmp_path: Path, tiny_base: Path) -> None:
    with started(tmp_path, "budget.amount=400", "seed=0,1", "hydra.launcher.workers=2") as (process, children):
        logs = "*/seed=*/metrics.jsonl"
        wait_until(lambda: [lines_in(path) > 0 for path in tmp_path.glob(logs)] == [True, True], process)
        everything = descendants_of(process.pid)
        assert len(runs_of(process.pid)) == 2 and len(everything) > 2, "the server as well"
        children |= everything
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        wait_until(lambda: not any(map(alive, everything)))
