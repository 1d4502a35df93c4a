"""What sweeps are doing, from another shell; and a cell that is stopped from there."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import wait_until
from sweep_processes import finished, folder_of, lines_in, started, sweep

from grpo_lab.sweeps import status
from grpo_lab.sweeps.status import cell_status, cells_of_sweep, summary, sweep_names
from grpo_lab.sweeps.stop import find_cell, stop_cell
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import CellRecord, record_sweep
from grpo_lab.types import Exhausted


def logged(folder: Path, steps: int, end: str = "", seconds: float = 10.0, amount: float = 10.0) -> RunLog:
    """A run that has logged so many steps, one every `seconds`, with an evaluation at every fourth."""
    log = RunLog(folder)
    write_json(folder / "run.json", {"config": {"budget.axis": "steps", "budget.amount": amount}})
    for step in range(steps):
        metrics = {"budget/steps": step} | ({"reward/mean": step / 10} if step else {})
        metrics |= {"eval/heldout/accuracy": step / 20} if step % 4 == 0 else {}
        log.write_step(step, metrics, {"generate": 0.1})
    path = folder / "timing.jsonl"
    now = time.time() * 1000
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for back, line in enumerate(reversed(lines)):
        line["wall"] = int(now - back * seconds * 1000)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if end == "done":
        log.mark_done({})
    elif end:
        log.mark_error(
            {"failed": ValueError("no good"), "stopped": KeyboardInterrupt()}.get(end, Exhausted("no token"))
        )
    return log


def test_every_state_of_a_cell_is_told(tmp_path: Path) -> None:
    ends = ("done", "failed", "stopped", "exhausted")
    for end in ends:
        logged(tmp_path / end / "seed=0", 6, end).close()
    logged(tmp_path / "killed" / "seed=0", 3).close()
    cells = [CellRecord(end, "", 0, f"{end}/seed=0") for end in (*ends, "killed", "running", "new")]
    record_sweep(tmp_path, "probe", cells, None, None, "", ["x"], None, None)
    running = logged(tmp_path / "running" / "seed=0", 6)
    try:
        found = {cell.title.partition(" ")[0]: cell for cell in cells_of_sweep(tmp_path, "probe")}
    finally:
        running.close()
    assert {name: cell.state for name, cell in found.items()} == {
        "done": "done", "failed": "failed", "stopped": "interrupted", "exhausted": "done", "killed": "interrupted",
        "running": "running", "new": "waiting",
    }  # fmt: skip
    assert found["failed"].reason == "ValueError: no good" and "no token" in found["exhausted"].reason
    now = found["running"]
    assert (now.step, now.share, now.reward, now.heldout) == (5, 0.5, 0.5, 0.2), "the latest evaluation was at step 4"
    assert now.seconds_left == pytest.approx(50, abs=2), "five steps took fifty seconds, and five are left"
    assert found["killed"].step == 2 and found["killed"].seconds_left is None and found["new"].step is None
    line = "running running seed=0 step 5 50% reward 0.500 held-out 0.200"
    assert " ".join(now.line.split()).startswith(line) and now.line.endswith("s left")
    told = "probe: 2 of 7 done, 1 running, 1 waiting, 2 interrupted, 1 failed"
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
    told = cell_status(tmp_path, "a")
    assert told.state == "interrupted" and "that is not JSON" in told.reason


def test_a_thousand_cells_are_listed_in_two_seconds_of_a_processor(tmp_path: Path) -> None:
    """The whole command, imports included, where every run has files of its own."""
    cells = [CellRecord("arm", "", seed, f"arm/seed={seed}") for seed in range(1000)]
    record_sweep(tmp_path, "many", cells, None, None, "", ["x"], None, None)
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
    with pytest.raises(ValueError, match=r"no sweep is recorded in .*: start one with make sweep"):
        sweep_names(tmp_path)
    record_sweep(tmp_path, "probe", [CellRecord("a", "", 0, "a/seed=0")], None, None, "", ["x"], None, None)
    with pytest.raises(ValueError, match=r"probe has no cell 'b seed=0'.*running are: none"):
        find_cell("b seed=0", tmp_path, None)
    with pytest.raises(ValueError, match="nothing runs in"):
        stop_cell(find_cell("a seed=0", tmp_path, "probe"), 1.0)
    log = logged(tmp_path / "a" / "seed=0", 2)
    (tmp_path / "a" / "seed=0" / ".lock").write_text("999999999\n")
    with pytest.raises(ValueError, match="is held on another machine: there, kill -INT 999999999"):
        stop_cell(tmp_path / "a" / "seed=0", 1.0)
    log.close()


@pytest.mark.extended
def test_a_cell_is_stopped_from_another_shell_and_its_sweep_goes_on(tmp_path: Path, tiny_base: Path) -> None:
    words = ("truncation=score,mask_after", "budget.amount=40", "hydra.launcher.workers=2")
    with started(tmp_path, *words) as (process, _):
        logs = "*/seed=0/metrics.jsonl"
        wait_until(lambda: [lines_in(path) > 0 for path in tmp_path.glob(logs)] == [True, True], process)
        program = [sys.executable, "-m", "grpo_lab.cli"]
        runs = ["--runs", str(tmp_path)]
        shown = subprocess.run([*program, "status", *runs], capture_output=True, text=True, timeout=60).stdout
        assert "0 of 2 done, 2 running" in shown
        stop = [*program, "stop", "truncation=score seed=0", *runs]
        stopped = subprocess.run(stop, capture_output=True, text=True, timeout=90)
        assert stopped.returncode == 0 and "it has ended" in stopped.stdout, stopped.stderr
        _, said = process.communicate(timeout=200)
    assert process.returncode == 1 and "interrupted: the same command goes on" in said
    assert finished(tmp_path) == 1 and (folder_of(tmp_path, "mask_after", 0) / "DONE").exists()
    assert sweep(tmp_path, *words).returncode == 0 and finished(tmp_path) == 2
