"""TensorBoard, Weights & Biases and trackio from the run folder, each with its package, read back from its files."""

from __future__ import annotations

import math
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from mirrored_runs import log_steps, query, write_run_json
from omegaconf import OmegaConf
from processes import command_of, descendants_of, processor_seconds_at_rest, wait_until
from short_runs import run_in_process

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.tracking import trackers
from grpo_lab.tracking.final_metrics import final_metrics
from grpo_lab.tracking.mlflow_exporter import Exporter, sync
from grpo_lab.tracking.mlflow_sender import FolderSender, Sender
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import read_steps
from grpo_lab.tracking.system_metrics import SystemMonitor, read_samples
from grpo_lab.tracking.trackers import Packaged, TensorBoard, Trackio, Wandb, replay

TRACKERS = ("tensorboard", "wandb", "trackio")
INSTALLED = ("tensorboard", "wandb", pytest.param("trackio", marks=pytest.mark.needs("trackio")))


def configured(option: str, runs: Path) -> Packaged:
    """The tracker of `tracking=<option>`."""
    made = OmegaConf.to_object(compose_config([f"tracking={option}", f"runs_dir='{runs}'"]).tracking)
    assert isinstance(made, Packaged)
    return made


def shown(tracking: Packaged, runs: Path) -> dict[str, list[tuple[int, float, float]]]:
    """What a tracker's own files hold: metric -> (step, unix time in s, value), in the order of the files."""
    return {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio}[tracking.option](Path(tracking.folder))


def _tensorboard(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (place,) = {path.parent for path in folder.rglob("events.out.*")}
    events = EventAccumulator(str(place), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(event.step, event.wall_time, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def _wandb(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    found: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in _wandb_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "history":
                row = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                for name, value in row.items():
                    if not name.startswith("_"):
                        found.setdefault(name, []).append((int(row["_step"]), float(row["_timestamp"]), float(value)))
            elif kind == "summary":
                for item in record.summary.update:
                    name = item.key or "/".join(item.nested_key)
                    if name.startswith(("at_budget/", "auc/")) and name not in found:
                        found[name] = [(-1, 0.0, float(item.value_json))]
    return found


def _wandb_records(path: Path) -> Iterator:
    """The records of an offline run: LevelDB's log format, with a header of seven bytes."""
    from wandb.proto import wandb_internal_pb2

    content, at, payload = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        payload += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def _trackio(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    from datetime import datetime

    from trackio.sqlite_storage import SQLiteStorage

    found: dict[str, list[tuple[int, float, float]]] = {}
    for row in SQLiteStorage.get_logs("grpo_lab", SQLiteStorage.get_runs("grpo_lab")[0]):
        for name, value in row.items():
            if name not in ("step", "timestamp"):
                at = datetime.fromisoformat(row["timestamp"]).timestamp()
                found.setdefault(name, []).append((row["step"], at, value))
    assert list(folder.rglob("*.db")) or list(folder.iterdir()), "trackio's files lie where the option says"
    return found


def another_second() -> None:
    """Event files are named after the second."""
    now = int(time.time())
    wait_until(lambda: int(time.time()) > now)


@pytest.mark.few(1)
@pytest.mark.parametrize("option", INSTALLED)
def test_a_resumed_run_is_shown_whole_and_no_step_twice(
    option: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "runs"
    folder = runs / "a" / "seed=0"
    tracking = configured(option, runs)
    if option == "trackio" and os.environ.get("TRACKIO_DIR", tracking.folder) != tracking.folder:
        pytest.skip("this process has trackio elsewhere")

    def mirror() -> Exporter:
        return Exporter(folder, 0.05, 60.0, tracking.sender, tracking.name, tracking.option)

    with RunLog(folder) as log:
        write_run_json(folder, None, config={"runs_dir": str(runs), "budget.axis": "sampled_tokens"})
        started = mirror()
        started.start()
        log_steps(log, range(10))
        position = log.stamp()["bytes"]
        log_steps(log, range(10, 20))
        log.mark_error(RuntimeError("out of memory"))
        started.stop()
    another_second()
    with RunLog(folder) as log:
        log.begin()
        log.rewind(position)
        resumed = mirror()
        resumed.start()
        for step in range(10, 26):
            logged = {"train/loss": math.nan if step == 25 else 1 / (step + 1), "budget/sampled_tokens": 10 + step}
            log.write_step(step, logged | {"reward/mean": step / 25}, {"generate": 0.25})
        log.mark_done({"steps": 25})
        resumed.stop()
    assert not caplog.records
    found = shown(tracking, runs)
    walls = {record.step: record.wall / 1000 for record in read_steps(folder)}
    assert [step for step, _, _ in found["train/loss"]] == list(range(25)), "25 was not finite; none is there twice"
    for step, wall, value in found["train/loss"]:
        assert wall == pytest.approx(walls[step], abs=0.01) and value == pytest.approx(1 / (step + 1), rel=1e-6)
    assert {step for step, _, _ in found["time/generate"]} == set(range(26))
    final = final_metrics(list(read_steps(folder)), {"config": {"budget.axis": "sampled_tokens"}})
    for name, value in final.items():
        assert [shown_value for _, _, shown_value in found[name]] == pytest.approx([value], rel=1e-6)
    assert {"at_budget/reward/mean", "auc/reward/mean"} <= set(found)
    # A replay by hand finds nothing to send, also of a run that another process sent.
    assert [(report.points, report.status, report.error) for report in replay(runs, tracking)] == [
        (0, "FINISHED", None)
    ]
    assert shown(tracking, runs) == found


def test_tensorboard_shows_a_step_once_that_was_sent_before_a_kill(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    folder, tracking = runs / "a" / "seed=0", configured("tensorboard", runs)
    with RunLog(folder) as log:
        write_run_json(folder, None, config={"runs_dir": str(runs)})
        log_steps(log, range(4))
        tracking.sender(folder).push(True, 1.0, lambda: False)
        cursor = (folder / "mirror-tensorboard.json").read_bytes()
        log_steps(log, range(4, 8))
        tracking.sender(folder).push(True, 1.0, lambda: False)
        (folder / "mirror-tensorboard.json").write_bytes(cursor)  # the kill came before it was saved
        another_second()
        log.mark_done({})
    (report,) = replay(runs, tracking)
    assert report.points == 4 * 4
    assert [step for step, _, _ in shown(tracking, runs)["train/loss"]] == list(range(8))


def test_a_tracker_that_fails_costs_the_run_a_warning_and_a_replay_sends_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = tmp_path / "runs"
    folder, tracking = runs / "a" / "seed=0", configured("tensorboard", runs)
    Path(tracking.folder).parent.mkdir(parents=True)
    Path(tracking.folder).write_text("a file where a folder must be")
    with RunLog(folder) as log:
        write_run_json(folder, None, config={"runs_dir": str(runs)})
        started = Exporter(folder, 0.05, 60.0, tracking.sender, tracking.name, tracking.option)
        started.start()
        log_steps(log, range(5))
        wait_until(lambda: caplog.records)
        log.mark_done({})
        started.stop()
    assert "TensorBoard does not take this run" in caplog.records[0].message
    assert f"grpo-lab sync {folder} --to tensorboard" in caplog.records[-1].getMessage()
    Path(tracking.folder).unlink()
    assert [report.points for report in replay(runs, tracking)] == [20]


@pytest.mark.parametrize("option", TRACKERS)
def test_a_missing_package_is_told_before_a_model_loads(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    made = {
        "tensorboard": lambda: TensorBoard(1.0, 1.0, 0.0, str(tmp_path)),
        "wandb": lambda: Wandb(1.0, 1.0, 0.0, str(tmp_path), "p", "offline"),
        "trackio": lambda: Trackio(1.0, 1.0, 0.0, str(tmp_path), "p"),
    }
    with pytest.raises(ValueError, match=rf"pip install 'grpo-lab\[{option}\]', or choose tracking=mlflow"):
        made[option]()


def test_a_wrong_mode_or_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tracking\.mode=cloud: choose one of offline, online"):
        Wandb(1.0, 1.0, 0.0, str(tmp_path), "p", "cloud")
    with pytest.raises(ValueError, match=r"tracking\.folder=here: give an absolute path"):
        TensorBoard(1.0, 1.0, 0.0, "here")


@pytest.mark.extended
def test_the_command_replays_into_another_tracker(tmp_path: Path) -> None:
    runs = tmp_path / "my runs"
    folder = runs / "a" / "seed=0"
    configured("tensorboard", runs)
    with RunLog(folder) as log:
        write_run_json(folder, None, config={"runs_dir": str(runs)})
        log_steps(log, range(3))
        log.mark_done({})
    command = [sys.executable, "-m", "grpo_lab.cli", "sync", str(folder), "--to", "tensorboard"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{folder}: 12 points sent, FINISHED\n", "")
    assert list((runs / "tensorboard/a/seed=0").glob("events.out.*"))


# ---- the machine


def test_samples_of_the_machine_go_beside_the_log_and_into_mlflow(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        mirror = Exporter(folder, 0.1, 60.0, system_metrics=0.05)
        mirror.start()
        wait_until(lambda: len(read_samples(folder)) >= 3)
        log_steps(log, range(4))
        log.mark_done({})
        mirror.stop()
    with RunLog(tmp_path / "runs" / "b") as log:
        log_steps(log, range(4))
    assert (folder / "metrics.jsonl").read_bytes() == (tmp_path / "runs/b/metrics.jsonl").read_bytes()
    samples = read_samples(folder)
    rows = query(store, "select step, timestamp, value from metrics where key = 'system/cpu_utilization_percentage'")
    values = [(one.number, one.wall, one.values["cpu_utilization_percentage"]) for one in samples]
    assert sorted(rows) == values and [one.number for one in samples] == list(range(len(samples)))
    assert 0 < samples[0].values["system_memory_usage_percentage"] <= 100
    assert 0 < samples[0].values["disk_usage_percentage"] <= 100
    assert sync(folder).points == 0


def test_a_killed_sampler_leaves_a_part_of_a_line_that_the_next_one_cuts_off(tmp_path: Path) -> None:
    (tmp_path / "system.jsonl").write_text('{"sample": 0, "wall": 5, "system": {"a": 1.0}}\n{"sample": 1, "wa')
    assert [one.number for one in read_samples(tmp_path)] == [0]
    sampler = SystemMonitor(tmp_path, 0.01)
    sampler.start()
    wait_until(lambda: len(read_samples(tmp_path)) >= 3)
    sampler.stop()
    found = read_samples(tmp_path)
    assert [one.number for one in found] == list(range(len(found)))
    assert read_samples(tmp_path, found[1].end) == found[2:]


def test_a_sampler_that_cannot_write_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler = SystemMonitor(tmp_path / "missing", 0.01)
    sampler.start()
    sampler.stop()
    assert "system metrics end here (FileNotFoundError" in caplog.text


# ---- what compare pages plot


def test_values_at_the_budget_and_areas_by_hand(tmp_path: Path) -> None:
    rows = [
        {"budget/sampled_tokens": 0, "eval/heldout/accuracy": 0.2},
        {"budget/sampled_tokens": 50, "reward/mean": 0.4},
        {"budget/sampled_tokens": 90, "reward/mean": 0.6, "eval/heldout/accuracy": 0.5},
        {"budget/sampled_tokens": 100, "reward/mean": 0.8, "eval/heldout/accuracy": 0.6, "eval/downstream/accuracy": 1},
    ]
    with RunLog(tmp_path) as log:
        for step, row in enumerate(rows):
            log.write_step(step, row, {})
    found = final_metrics(list(read_steps(tmp_path)), {"config": {"budget.axis": "sampled_tokens"}})
    assert found == pytest.approx(
        {
            "at_budget/reward/mean": 0.7,  # the last fifth holds 0.6 and 0.8
            "auc/reward/mean": 0.5 * 0.4 + 0.4 * 0.5 + 0.1 * 0.7,
            "at_budget/eval/heldout/accuracy": 0.6,
            "auc/eval/heldout/accuracy": 0.9 * 0.35 + 0.1 * 0.55,
            "at_budget/eval/downstream/accuracy": 1.0,
            "auc/eval/downstream/accuracy": 1.0,
        }
    )
    assert final_metrics(list(read_steps(tmp_path)), {"config": {"budget.axis": "flops"}}) == {}


@pytest.mark.extended
def test_tracking_costs_under_two_percent_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU seconds of sending a step, and of a sample every ten seconds, against those of a step of world=sums.

    CPU time, since other processes share the cores; that of processes which a tracker starts counts too. Packages are
    imported and stores made before, once a run.
    """
    ends: list[float] = []
    write = RunLog.write_step

    def stamped(log: RunLog, step: int, *arguments: Any, **named: Any) -> None:
        ends.append(time.process_time())
        write(log, step, *arguments, **named)

    monkeypatch.setattr(RunLog, "write_step", stamped)
    runs = tmp_path / "runs"
    folder = run_in_process(runs, "world=sums", "evaluation=brief", "evaluation.every=1000", "budget.amount=16")
    monkeypatch.undo()
    step = median(after - before for before, after in pairwise(ends[4:-1]))

    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    costs = {}
    for option in ("mlflow", "tensorboard", "wandb"):
        if option == "mlflow":
            sender: FolderSender = Sender(folder, f"sqlite:///{tmp_path}/mlflow.db")
        else:
            sender = configured(option, runs).sender(folder)
        (folder / "metrics.jsonl").write_bytes(b"".join(lines[:2]))
        sender.push(True, 1.0, lambda: False)
        (folder / "metrics.jsonl").write_bytes(b"".join(lines))
        before = processor_seconds_at_rest()
        sender.push(True, 1.0, lambda: False)
        costs[option] = (processor_seconds_at_rest() - before) / (len(lines) - 2)
        if option == "wandb":
            assert any("wandb-core" in command_of(pid) for pid in descendants_of(os.getpid())), "it was counted"
    sampler = SystemMonitor(tmp_path, 0.01)
    before = time.process_time()
    sampler.start()
    time.sleep(2.0)
    sampler.stop()
    sample = (time.process_time() - before) / len(read_samples(tmp_path))
    said = ", ".join(f"{option} {1e3 * cost:.2f} ms" for option, cost in costs.items())
    print(f"a step {1e3 * step:.0f} ms; sending it to {said}; a sample {1e3 * sample:.2f} ms")
    for option, cost in costs.items():
        assert cost / step + sample / 10 < 0.02, option


def test_a_sender_of_no_run_is_refused(tmp_path: Path) -> None:
    tracking = configured("tensorboard", tmp_path)
    with pytest.raises(ValueError, match="is no run folder"):
        tracking.sender(tmp_path)
