"""What sweeps and single runs are doing, from another shell; and runs that are stopped from there."""

from __future__ import annotations

import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_until
from short_runs import SMALL, run_in_process, same_ending, train_command
from sweep_processes import finished, folder_of, lines_in, started, sweep

from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.sweeps import status
from grpo_lab.sweeps.status import find_run, runs_of_sweep, status_lines, status_of_run, summary, sweep_names
from grpo_lab.sweeps.stop import stop_run
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.mlflow_sender import ending
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import ACTIVITY, STOP
from grpo_lab.tracking.sweep_record import RunEntry, read_sweep, record_sweep, sweep_status
from grpo_lab.types import Exhausted


def logged(folder: Path, steps: int, end: str = "", seconds: float = 10.0, amount: float = 10.0) -> RunLog:
    """A run that has logged so many steps, one every `seconds`, with an evaluation at every fourth."""
    log = RunLog(folder)
    write_json(folder / "run.json", {"config": {"budget.axis": "steps", "budget.amount": amount}})
    for step in range(steps):
        metrics = {"budget/steps": step} | ({"reward/mean": step / 10} if step else {})
        metrics |= {"eval/heldout/accuracy": step / 20} if step % 4 == 0 else {}
        log.write_step(step, metrics, {"time/generate": seconds * 0.9, "time/train": seconds * 0.1})
    path = folder / "timing.jsonl"
    now = time.time() * 1000
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for back, line in enumerate(reversed(lines)):
        line["wall"] = int(now - back * seconds * 1000)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if end == "done":
        log.mark_done({})
    elif end:
        errors = {"failed": ValueError("no good"), "exhausted": Exhausted("no token")}
        log.mark_error(errors.get(end, KeyboardInterrupt("step 4 is finished and saved")))
    if end == "stopped":
        (folder / STOP).touch()
    return log


def test_every_state_of_a_run_is_told(tmp_path: Path) -> None:
    ends = ("done", "failed", "stopped", "interrupted", "exhausted")
    for end in ends:
        logged(tmp_path / end / "seed=0", 6, end).close()
    (tmp_path / "stopped" / "seed=0" / "checkpoints" / "step=000004").mkdir(parents=True)
    logged(tmp_path / "killed" / "seed=0", 3).close()
    runs = [RunEntry(end, "", 0, f"{end}/seed=0") for end in (*ends, "killed", "running", "new")]
    record_sweep(tmp_path, "probe", runs, None, None, "", ["x"], None, None)
    running = logged(tmp_path / "running" / "seed=0", 6)
    try:
        found = {run.title.partition(" ")[0]: run for run in runs_of_sweep(tmp_path, "probe")}
    finally:
        running.close()
    assert {name: run.state for name, run in found.items()} == {
        "done": "done", "failed": "failed", "stopped": "stopped", "interrupted": "interrupted", "exhausted": "done",
        "killed": "interrupted", "running": "running", "new": "waiting",
    }  # fmt: skip
    assert found["stopped"].reason == "resumes from step 4" and found["interrupted"].reason == ""
    assert found["failed"].reason == "ValueError: no good" and "no token" in found["exhausted"].reason
    now = found["running"]
    assert (now.step, now.share, now.reward, now.heldout) == (5, 0.5, 0.5, 0.2), "the latest evaluation was at step 4"
    assert now.seconds_left == pytest.approx(50, abs=2), "five steps took fifty seconds, and five are left"
    assert found["killed"].step == 2 and found["killed"].seconds_left is None and found["new"].step is None
    line = "running running seed=0 step 5 50% reward 0.500 held-out 0.200"
    assert " ".join(now.line.split()).startswith(line) and now.line.endswith("s left")
    told = "probe: 2 of 8 done, 1 running, 1 waiting, 2 interrupted, 1 stopped, 1 failed"
    assert summary("probe", list(found.values())) == told and sweep_names(tmp_path) == ["probe"]


def test_logs_are_read_from_their_end_whatever_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    for text in (b"", b"half", b"one\n", b"one\nhalf", b"one\ntwo\n", b"one\ntwo, longer\nthree\nfo"):
        path.write_bytes(text)
        for chunk in (1, 2, 5, 64):
            monkeypatch.setattr(status, "_CHUNK", chunk)
            assert list(status._from_the_end(path)) == text.split(b"\n")[:-1][::-1], (text, chunk)


def test_a_damaged_log_is_a_reason_and_no_error(tmp_path: Path) -> None:
    logged(tmp_path, 3).close()
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write("{not json\n")
    told = status_of_run(tmp_path, "a")
    assert told.state == "interrupted" and "that is not JSON" in told.reason


@pytest.mark.extended
def test_a_thousand_runs_are_listed_in_two_seconds_of_a_processor(tmp_path: Path) -> None:
    """The whole command, imports included, where every run has files of its own."""
    runs = [RunEntry("arm", "", seed, f"arm/seed={seed}") for seed in range(1000)]
    record_sweep(tmp_path, "many", runs, None, None, "", ["x"], None, None)
    one = tmp_path / "arm" / "seed=0"
    logged(one, 400, "done").close()
    for seed in range(1, 1000):
        shutil.copytree(one, tmp_path / "arm" / f"seed={seed}")
    command = [sys.executable, "-m", "grpo_lab.cli", "status", "many", "--runs", str(tmp_path)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "many: 1000 of 1000 done" and len(lines) == 1001
    assert sum(line.startswith("  done ") for line in lines) == 1000
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2


def test_what_cannot_be_shown_or_stopped_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no run is recorded in .*: start one"):
        status_lines(tmp_path)
    record_sweep(tmp_path, "probe", [RunEntry("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    with pytest.raises(ValueError, match=r"there is no run 'b seed=0' in the sweep probe.*running are: none"):
        find_run("b seed=0", tmp_path, None, running=True)
    with pytest.raises(ValueError, match="no run is active in"):
        stop_run(find_run("a seed=0", tmp_path, "probe"), 1.0)
    assert not (tmp_path / "a").exists()
    log = logged(tmp_path / "a" / "seed=0", 2)
    (tmp_path / "a" / "seed=0" / ".lock").write_text("999999999\n")
    with pytest.raises(ValueError, match="is on another machine: type `kill -INT 999999999` there"):
        stop_run(tmp_path / "a" / "seed=0", 1.0)
    assert not (tmp_path / "a" / "seed=0" / STOP).exists(), "what was refused was not asked for"
    log.close()


def command_of_lab(*words: str) -> subprocess.CompletedProcess[str]:
    """What `grpo-lab` does with these words."""
    typed = [sys.executable, "-m", "grpo_lab.cli", *words]
    return subprocess.run(typed, capture_output=True, text=True, timeout=120)


def test_time_left_is_that_of_steps_that_count_whatever_lies_between_attempts(tmp_path: Path) -> None:
    """A day between two attempts, two steps computed again, and a long first evaluation, which the end repeats."""
    record_sweep(tmp_path, "probe", [RunEntry("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    with logged(tmp_path / "a" / "seed=0", 6, seconds=10.0) as log:
        path, now, day = log.folder / "timing.jsonl", time.time() * 1000, 86_400_000
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[0]["timing"]["time/evaluate"] = 120.0
        first = [{**line, "wall": int(now - day), "timing": {"time/train": 900.0}} for line in lines[4:]]
        written = [*lines[:4], *first, *lines[4:]]
        path.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"step": 6, "wa')
        (run,) = runs_of_sweep(tmp_path, "probe")
        assert run.seconds_left == pytest.approx(50 + 120, abs=2), "five steps of ten seconds are left, and the end"
        with log.folder.joinpath("metrics.jsonl").open("w") as stream:  # only the evaluation before the first step
            stream.write(json.dumps({"step": 0, "metrics": {"budget/steps": 0}}) + "\n")
        (run,) = runs_of_sweep(tmp_path, "probe")
        assert run.step == 0 and run.seconds_left is None


def test_an_attempt_that_has_just_begun_does_not_count_the_pause_before_it(tmp_path: Path) -> None:
    record_sweep(tmp_path, "probe", [RunEntry("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    with logged(tmp_path / "a" / "seed=0", 6, seconds=10.0) as log:
        path, day = log.folder / "timing.jsonl", 86_400_000
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps({**line, "wall": line["wall"] - day}) + "\n" for line in lines))
        (run,) = runs_of_sweep(tmp_path, "probe")
    assert run.seconds_left == pytest.approx(50, abs=2)


def test_a_sweep_and_a_run_of_one_name_are_both_shown(tmp_path: Path) -> None:
    record_sweep(tmp_path, "dapo", [RunEntry("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    for folder in ("a/seed=0", "dapo/seed=3"):
        logged(tmp_path / folder, 11, "done").close()
    lines = [" ".join(line.split()) for line in status_lines(tmp_path, "dapo")]
    assert lines[0].startswith("done dapo seed=3") and lines[1] == "dapo: 1 of 1 done" and len(lines) == 3


def test_single_runs_are_listed_beside_sweeps(tmp_path: Path) -> None:
    record_sweep(tmp_path, "probe", [RunEntry("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    logged(tmp_path / "a" / "seed=0", 11, "done").close()
    for end in ("done", "stopped", "failed"):
        logged(tmp_path / f"plain,{end}" / "seed=1", 6, end).close()
    with logged(tmp_path / "plain,now" / "seed=1", 6) as log:
        (log.folder / ACTIVITY).write_text("step 6: evaluating, heldout: question 3 of 8, 9 of 24 in all, 0m20s left")
        lines = status_lines(tmp_path)
        one = status_lines(tmp_path, "plain,now seed=1")
    assert lines[:2] == ["probe: 1 of 1 done", "single runs: 1 of 4 done, 1 running, 1 stopped, 1 failed"]
    shown = {line.split()[1]: " ".join(line.split()) for line in lines[2:]}
    assert shown.keys() == {"plain,stopped", "plain,failed", "plain,now"}, "done ones are only counted"
    assert shown["plain,failed"].endswith("step 5 50% reward 0.500 held-out 0.200 ValueError: no good")
    assert shown["plain,now"].startswith("running plain,now seed=1 step 5 50% reward 0.500 held-out 0.200 0m")
    assert shown["plain,now"].endswith("left step 6: evaluating, heldout: question 3 of 8, 9 of 24 in all, 0m20s left")
    assert one == [line.removeprefix("  ") for line in lines if "plain,now" in line]
    for name in ("plain,done", "plain,done seed=1", str(tmp_path / "plain,done" / "seed=1")):
        (line,) = status_lines(tmp_path, name)
        assert line.startswith("done ") and find_run(name, tmp_path, None) == tmp_path / "plain,done" / "seed=1"
    with pytest.raises(ValueError, match=r"there is no sweep or run 'nothing' in .*; there are: probe, plain,"):
        status_lines(tmp_path, "nothing")


@pytest.mark.extended
def test_a_run_is_stopped_from_another_shell_and_its_sweep_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    words = ("truncation=score,mask_after", "budget.amount=40", "hydra.launcher.workers=2")
    runs = ["--runs", str(tmp_path)]
    with started(tmp_path, *words) as (process, _):
        logs = "*/seed=0/metrics.jsonl"
        wait_until(lambda: [lines_in(path) > 1 for path in tmp_path.glob(logs)] == [True, True], process)
        assert "0 of 2 done, 2 running" in command_of_lab("status", *runs).stdout
        stopped = command_of_lab("stop", "truncation=score seed=0", *runs)
        assert stopped.returncode == 0, stopped.stderr
        folder = folder_of(tmp_path, "score", 0)
        last = lines_in(folder / "metrics.jsonl") - 1
        told = f"stopped by grpo-lab stop: step {last} is finished and saved in {folder}/checkpoints/step={last:06d}"
        assert f"{told}; to resume, re-run the command that started it" in stopped.stdout
        assert (folder / "error.txt").read_text().startswith(f"KeyboardInterrupt: {told}\n")
        _, said = process.communicate(timeout=200)
    name = sweep_names(tmp_path)[0]
    assert process.returncode == 1 and "1 of 2 done, 1 stopped after" in said and "error:" not in said
    assert (
        f"stopped truncation=score seed=0: {told}; re-run the same command to resume (see {folder}/output.log)" in said
    )
    (report,) = re.findall(r"^1 of 2 runs of .* were stopped; the same command resumes them:\n.*", said, re.M)
    assert f"  truncation=score seed=0: {told}" in report
    assert f"{name}: 1 of 2 done, 1 stopped" in command_of_lab("status", *runs).stdout
    shown = command_of_lab("status", name, *runs).stdout
    assert re.search(rf"^  stopped +truncation=score seed=0 .*resumes from step {last}$", shown, re.M), shown
    record = tmp_path / "sweeps" / name
    assert sweep_status(record, read_sweep(record)) == "KILLED" == ending(folder, live=False)[0]
    assert load_sweep(tmp_path, name).runs.set_index("arm").loc["truncation=score", "problem"] == "stopped"
    assert finished(tmp_path) == 1 and (folder_of(tmp_path, "mask_after", 0) / "DONE").exists()
    again = sweep(tmp_path, *words)
    assert again.returncode == 0 and finished(tmp_path) == 2, again.stderr
    assert f"resuming after step {last}" in (folder / "output.log").read_text() and not (folder / STOP).exists()


@pytest.mark.extended
def test_a_single_run_is_stopped_and_the_same_command_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    typed = train_command(tmp_path, *SMALL, "budget.amount=60", "checkpoint_every=1000")
    runs = ["--runs", str(tmp_path)]
    # As a script's `&` starts it: SIGINT is ignored.
    in_background = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *typed]
    process = subprocess.Popen(in_background, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: any(lines_in(path) > 2 for path in tmp_path.glob("*/seed=0/metrics.jsonl")), process)
        (folder,) = tmp_path.glob("*/seed=0")
        title = f"{folder.parent.name} seed=0"
        shown = command_of_lab("status", *runs).stdout
        assert shown.startswith("single runs: 0 of 1 done, 1 running\n  running ") and title in shown
        stopped = command_of_lab("stop", title, *runs)
        assert stopped.returncode == 0, stopped.stderr
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    last = lines_in(folder / "metrics.jsonl") - 1
    told = f"stopped by grpo-lab stop: step {last} is finished and saved in {folder}/checkpoints/step={last:06d}"
    assert process.returncode == 1 and told in stopped.stdout
    (goes_on,) = re.findall(rf"^{re.escape(told)}; resume with: python (-m grpo_lab.train .*)$", said, re.M)
    assert f"resumes from step {last}" in command_of_lab("status", *runs).stdout
    assert status_of_run(folder, "x").state == "stopped" and ending(folder, live=False)[0] == "KILLED"
    again = command_of_lab("stop", title, *runs)
    assert (
        again.returncode == 1
        and "no run is active in" in again.stderr
        and status_of_run(folder, "x").state == "stopped"
    )
    subprocess.run([sys.executable, *shlex.split(goes_on)], check=True, capture_output=True, timeout=200)
    assert (folder / "DONE").exists() and status_of_run(folder, "x").state == "done"
    same_ending(run_in_process(tmp_path / "whole", *SMALL, "budget.amount=60", "checkpoint_every=1000"), folder)


@pytest.mark.extended
def test_a_stop_that_is_asked_twice_ends_a_step_at_once(tmp_path: Path, tiny_base: Path) -> None:
    """The first waits for a step that takes for ever, as a judge that does not answer makes it."""
    (tmp_path / "waits.py").write_text(WAITS)
    slow = ("reward=function", f"reward.path={tmp_path}/waits.py:score", "reward.seconds=1000", "reward.workers=1")
    typed = train_command(tmp_path / "runs", *SMALL, *slow, "budget.amount=60")
    runs = ["--runs", str(tmp_path / "runs")]
    process = subprocess.Popen(typed, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(
            lambda: any(lines_in(path) > 1 for path in (tmp_path / "runs").glob("*/seed=0/metrics.jsonl")), process
        )
        (folder,) = (tmp_path / "runs").glob("*/seed=0")
        (tmp_path / "wait").touch()
        first = command_of_lab("stop", str(folder), *runs, "--wait", "8")
        assert first.returncode == 1 and "still running after 8 s (step " in first.stderr, first.stderr
        assert "run this command again to stop it at once" in first.stderr and process.poll() is None
        second = command_of_lab("stop", str(folder), *runs)
        assert second.returncode == 0, second.stderr
        process.communicate(timeout=60)
    finally:
        process.kill()
    last = lines_in(folder / "metrics.jsonl") - 1
    steps = "step 1" if last == 1 else f"steps 1 to {last}"
    told = f"no checkpoint yet: it recomputes {steps} and the unfinished step {last + 1}, starting from step 0"
    assert f"stopped by grpo-lab stop: {told}" in second.stdout and not list(folder.glob("checkpoints/step=*"))
    assert status_of_run(folder, "x").state == "stopped"


WAITS = """
import time
from pathlib import Path


def score(response, answer, **row):
    while (Path(__file__).parent / "wait").exists():
        time.sleep(0.1)
    return float(response.endswith("#" + answer))
"""
