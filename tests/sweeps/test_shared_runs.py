"""Runs that several processes share: torchrun within a sweep. And a run that hangs while its mirror goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import alive, descendants_of, wait_until
from several_ranks import WORLD
from short_runs import final_weights, metrics_of
from sweep_processes import multirun, quiet_board

from grpo_lab.config.run_name import run_name
from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.launching import LocalRunLauncher
from grpo_lab.sweeps.local import LocalBackend, slots
from grpo_lab.sweeps.ray import RayRunLauncher
from grpo_lab.sweeps.slurm import SlurmSettings
from grpo_lab.tracking.system_metrics import read_samples

TWO = ("hydra.launcher.processes=2", "hydra.launcher.workers=1")


def sweep(runs: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "grpo_lab.train", "-m", *WORLD, f"runs_dir={runs}", *TWO, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.extended
def test_two_processes_share_each_run_and_their_sweep_goes_on_after_a_kill(tmp_path: Path) -> None:
    """Killed are the sweep, then by Ctrl-C all that a second one started; a third one ends both runs."""
    words = ("truncation=score,mask_after", "budget.amount=12", "checkpoint_every=2", "keep_checkpoints=9")
    for number in (signal.SIGKILL, signal.SIGINT):
        steps = len(list(tmp_path.glob("*/seed=0/checkpoints/step=*")))
        process = sweep(tmp_path, *words)
        try:
            wait_until(lambda steps=steps: len(list(tmp_path.glob("*/seed=0/checkpoints/step=*"))) > steps)
            everything = descendants_of(process.pid)
            assert len(everything) >= 3, "torchrun and its two"
            process.send_signal(number)
            _, said = process.communicate(timeout=100)
            wait_until(lambda everything=everything: not any(map(alive, everything)))
        finally:
            process.kill()
        if number == signal.SIGINT:
            assert process.returncode == 130 and "stopping 1 runs" in said and "Traceback" not in said, said
    multirun(*WORLD, f"runs_dir={tmp_path}", *TWO, *words)
    folders = sorted(tmp_path.glob("*/seed=0"))
    assert len(folders) == 2
    for folder in folders:
        assert json.loads((folder / "run.json").read_text())["ranks"] == [{"from_step": 0, "number": 2}]
        assert [line["step"] for line in metrics_of(folder)] == list(range(13))
        assert (folder / "DONE").exists() and final_weights(folder)


@pytest.mark.extended
def test_a_failure_of_two_processes_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("optimizer.learning_rate=1e30", "budget.amount=4", "tracking=none")
    with pytest.raises(SystemExit):
        multirun(*WORLD, f"runs_dir={tmp_path}", *TWO, *words)
    (folder,) = tmp_path.glob("*/seed=0")
    said = capsys.readouterr().err
    assert "FloatingPointError" in (folder / "error.txt").read_text()
    assert "failed run seed=0: the gradient's norm is" in said and "ChildFailedError" not in said, said
    assert "ChildFailedError" in (folder / "output.log").read_text(), "torchrun's own words come after it"


def test_what_several_processes_cannot_do_is_refused_before_a_run_starts(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="responses that continue across weight syncs"):
        multirun(*WORLD, f"runs_dir={tmp_path}", *TWO, "schedule=in_flight", "correction=tis_token")
    assert not list(tmp_path.glob("*/seed=0"))


def test_each_run_has_as_many_cards_as_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    assert slots(None, 1, True, processes=2) == (2, ["0,1", "2,3"])
    assert slots(3, 1, True, processes=2) == (3, ["0,1", "2,3"])
    with pytest.raises(ValueError, match=r"processes=8, and there are 5 CUDA devices"):
        slots(None, 1, True, processes=8)
    with pytest.raises(ValueError, match="processes must be at least 1"):
        LocalRunLauncher(1, 30.0, None, 0)


def test_clusters_are_asked_for_the_room_of_all_processes(tmp_path: Path) -> None:
    job = Job("one", (), tmp_path, "steps", 1.0, 3, False, 4)
    slurm = {"partition": "", "account": "", "qos": "", "constraint": "", "minutes": 60, "warning_seconds": 90}
    asked = SlurmSettings(**slurm, gpus=4, cpus=None, memory_gb=None, setup=(), further={}).parameters(job)
    assert (asked["cpus_per_task"], asked["gpus_per_node"]) == (12, 4)
    ray = {"cpus": None, "gpus": 4.0, "memory_gb": None, "resources": {}, "retries": 1}
    launcher = RayRunLauncher("", None, 30.0, None, 4, **ray)
    assert launcher.settings.needs(job) == {"CPU": 12.0, "GPU": 4.0}
    with pytest.raises(ValueError, match=r"gpus=2 is less than hydra\.launcher\.processes=4"):
        RayRunLauncher("", None, 30.0, None, 4, **{**ray, "gpus": 2.0})


HANGS = """
import time
from grpo_lab.tracking.run_log import RunLog

write_step = RunLog.write_step

def hang(self, step, *numbers):
    write_step(self, step, *numbers)
    if step == 1:
        time.sleep(1e6)

RunLog.write_step = hang
"""


@pytest.mark.extended
def test_a_run_hangs_although_its_mirror_and_its_look_at_the_machine_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs_later.py").write_text(HANGS)
    monkeypatch.syspath_prepend(str(tmp_path))
    runs = tmp_path / "runs"
    words = [word for word in WORLD if word != "tracking=none"]
    words += ["tracking.interval_seconds=1", "tracking.system_metrics=1", "tracking.flush_seconds=5"]
    words += ["plugins=[hangs_later]", "budget.amount=3", f"runs_dir={runs}", "seed=0"]
    folder = runs / run_name("plain", words) / "seed=0"
    job = Job("hangs", tuple(words), folder, "steps", 3.0, 1)
    with quiet_board(1) as display:
        (failure,) = run_jobs([job], LocalBackend(1, []), 30.0, display, silent_seconds=20.0)
    assert failure is not None and failure.startswith("it hung: it wrote nothing for 0.333333 minutes, and was ended")
    samples = read_samples(folder)
    assert samples[-1].wall - samples[0].wall > 20_000, "the hung process wrote on"
    assert [line["step"] for line in metrics_of(folder)] == [0, 1]
