"""Whatever happens to a sweep, its folders and its machines: after the same command again every run has ended once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from processes import alive, command_of, descendants_of, wait_until
from short_runs import metrics_of, same_ending
from sweep_processes import command, finished, folder_of, lines_in, runs_of, started, sweep

from grpo_lab.tracking.mlflow_exporter import sync_all

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="these tests follow processes in /proc"),
    pytest.mark.extended,
    pytest.mark.timeout(900),
]
ARMS = ("score", "mask_after", "mask_before")


def steps_are_whole(folder: Path, steps: int) -> None:
    assert [line["step"] for line in metrics_of(folder)] == list(range(steps + 1)), "no step twice, none missing"


def logged_in(runs: Path) -> int:
    """The lines of all logs together."""
    return sum(map(lines_in, runs.glob("*/seed=*/metrics.jsonl")))


def at_a_random_moment(chance: random.Random, runs: Path, process: subprocess.Popen) -> None:
    """Return once two runs are there and up to ten more steps are logged, anywhere within a step."""
    enough = logged_in(runs) + chance.randint(0, 10)
    wait_until(lambda: logged_in(runs) >= enough and len(runs_of(process.pid)) == 2, process)
    time.sleep(chance.uniform(0, 0.3))


def test_runs_launchers_and_their_server_killed_at_random_times_end_with_the_bits_of_an_undisturbed_sweep(
    tmp_path: Path, tiny_base: Path
) -> None:
    """The sweep starts other runs in the place of those that die, and is started again once it is killed itself.

    Moments are counted in logged steps, of which there are several times as many as five kills wait for.
    """
    chance = random.Random(21)
    here, there = tmp_path / "here", tmp_path / "there"
    words = (f"truncation={','.join(ARMS)}", "seed=0,1", "budget.amount=30", "checkpoint_every=3")
    words += ("hydra.launcher.workers=2",)
    killed = []
    for victims in (("a run", "the server", "the sweep"), ("a run", "the sweep")):
        with started(there, *words) as (process, children):
            everything: set[int] = set()
            for victim in victims:
                at_a_random_moment(chance, there, process)
                children |= set(runs_of(process.pid))
                everything |= descendants_of(process.pid) | {process.pid}
                server = [pid for pid in descendants_of(process.pid) if "grpo_lab.sweeps.preload" in command_of(pid)]
                chosen = {"a run": sorted(runs_of(process.pid)), "the sweep": [process.pid], "the server": server}
                os.kill(chance.choice(chosen[victim]), signal.SIGKILL)
                killed.append(victim)
            wait_until(lambda everything=everything: not any(map(alive, everything)))
    assert len(killed) == 5 and finished(there) < 6
    assert sweep(there, *words).returncode == 0 and finished(there) == 6
    assert sweep(here, *words).returncode == 0
    for truncation, seed in product(ARMS, (0, 1)):
        one, other = folder_of(here, truncation, seed), folder_of(there, truncation, seed)
        same_ending(one, other)
        steps_are_whole(other, 30)


def on_another_machine(*words: str) -> list[str]:
    """A command where processes have other numbers and the machine another name, over the same files."""
    start = 'hostname elsewhere && exec "$@"'
    return ["unshare", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc", "sh", "-c", start, "sh", *words]


@pytest.fixture
def another_machine() -> None:
    if subprocess.run(on_another_machine("true"), capture_output=True).returncode:
        pytest.skip("this user may not give processes another machine's name")


@pytest.mark.needs("unshare", "hostname")
def test_sweeps_on_two_machines_that_share_a_folder_share_its_runs(
    another_machine: None, tmp_path: Path, tiny_base: Path
) -> None:
    words = ("seed=0,1,2,3,4,5,6,7", "budget.amount=30", "hydra.launcher.workers=1")  # enough for one that starts late
    typed = command(tmp_path, *words)
    other = subprocess.Popen(on_another_machine(*typed), stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: list(tmp_path.glob("*/seed=0/metrics.jsonl")), other)
        mine = subprocess.run(typed, stderr=subprocess.PIPE, text=True, timeout=400)
        said = other.communicate(timeout=400)[1]
    finally:
        other.kill()
        other.communicate()
    assert (mine.returncode, other.returncode) == (0, 0), (mine.stderr, said)
    assert " on elsewhere runs it in " in mine.stderr.replace("\n", " ")
    assert finished(tmp_path) == 8
    for path in tmp_path.glob("*/seed=*/metrics.jsonl"):
        steps_are_whole(path.parent, 30)
    hosts = {json.loads(path.read_text())["host"] for path in tmp_path.glob("*/seed=*/environment.json")}
    assert len(hosts) == 2, "both did some of the work"


CLOCK = """
import itertools, time

calls = itertools.count()
real, real_ns = time.time, time.time_ns
time.time = lambda: real() - 60 * next(calls)  # every look at the clock is a minute before the last
time.time_ns = lambda: real_ns() - 60 * 10**9 * next(calls)
"""


def test_a_clock_that_goes_backwards_changes_nothing(
    tmp_path: Path, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "backwards.py").write_text(CLOCK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    here, there = tmp_path / "here", tmp_path / "there"
    words = ("truncation=score", "budget.amount=30", "checkpoint_every=2")
    plugin = "plugins=[backwards]"
    with started(there, *words, plugin) as (process, children):
        wait_until(lambda: len(list(there.glob("*/seed=0/checkpoints/step=*"))) > 0, process)
        children |= set(runs_of(process.pid))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_until(lambda: not any(map(alive, children)))
    assert sweep(there, *words, plugin).returncode == 0
    assert sweep(here, *words).returncode == 0
    one, other = (next(runs.glob("*/seed=0")) for runs in (here, there))
    same_ending(one, other)
    walls = [json.loads(line)["wall"] for line in (other / "timing.jsonl").read_text().splitlines()]
    assert walls != sorted(walls), "the run saw it"
    report, _ = sync_all(there, uri=f"sqlite:///{tmp_path}/later.db")  # the run, and its sweep
    assert report.status == "FINISHED" and report.points > 100
