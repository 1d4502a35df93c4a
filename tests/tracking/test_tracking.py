"""The run folder, its provenance and its MLflow mirror, against real processes, disks and stores."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import requests
from helpers import free_port, mlflow_server
from hydra import compose, initialize_config_dir
from mirrored_runs import log_steps, query, write_run_json
from mlflow import MlflowClient
from omegaconf import OmegaConf
from processes import wait_until

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import bootstrap
from grpo_lab.tracking import mlflow_store, provenance
from grpo_lab.tracking.files import RunFolderBusyError, RunFolderError, atomic_write
from grpo_lab.tracking.mlflow_exporter import Exporter, Mlflow, NoTracking, sync, sync_all
from grpo_lab.tracking.mlflow_store import check_uri, file_system, prepare_store
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.run_reader import is_held, read_steps, run_status

# ---- the run folder


def test_metrics_are_the_same_bytes_for_the_same_run(tmp_path: Path) -> None:
    for name, order in (("a", 1), ("b", -1)):
        with RunLog(tmp_path / name) as log:
            values = {"reward/mean": 0.1 + 0.2, "budget/steps": 7, "eval/pass_at_8": 1e-300}
            log.write_step(12, dict(list(values.items())[::order]), {"generate": time.time()})
    written = (tmp_path / "a/metrics.jsonl").read_bytes()
    assert written == (tmp_path / "b/metrics.jsonl").read_bytes()
    assert written == (
        b'{"step": 12, "metrics": {"budget/steps": 7, "eval/pass_at_8": 1e-300, "reward/mean": 0.30000000000000004}}\n'
    )


def test_values_that_are_not_finite_keep_the_file_strict_json(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write_step(0, {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.0}, {"t": 1.0})
    line = (tmp_path / "metrics.jsonl").read_text()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    assert json.loads(line, parse_constant=refuse) == {
        "step": 0,
        "metrics": {"d": 1.0},
        "nonfinite": {"a": "nan", "b": "inf", "c": "-inf"},
    }
    (record,) = read_steps(tmp_path)
    assert math.isnan(record.metrics["a"])
    assert (record.metrics["b"], record.metrics["c"], record.metrics["d"]) == (math.inf, -math.inf, 1.0)


@pytest.mark.parametrize("name", ["pass@8", "/a", "a//b", "a/../b", "", "a" * 251])
def test_a_name_mlflow_would_refuse_is_refused_when_logged(tmp_path: Path, name: str) -> None:
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="cannot be the name of a metric"):
        log.write_step(0, {name: 1.0}, {})
    assert (tmp_path / "metrics.jsonl").read_bytes() == b""


def test_steps_increase(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log_steps(log, range(3))
        with pytest.raises(ValueError, match="step 2 follows step 2"):
            log_steps(log, range(2, 3))
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match="step 0 follows step 2"):
        log_steps(log, range(1))


def test_partial_last_lines_are_cut_off(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log_steps(log, range(3))
    whole = {name: (tmp_path / name).read_bytes() for name in ("metrics.jsonl", "timing.jsonl")}
    for name, content in whole.items():
        (tmp_path / name).write_bytes(content + content[: len(content) // 4 - 5])
    assert [record.step for record in read_steps(tmp_path)] == [0, 1, 2]
    with RunLog(tmp_path) as log:
        assert {name: (tmp_path / name).read_bytes() for name in whole} == whole
        log_steps(log, range(3, 4))
    assert [record.step for record in read_steps(tmp_path)] == [0, 1, 2, 3]


def test_rewind_repeats_the_same_bytes_and_keeps_the_first_times(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log_steps(log, range(5))
        position = log.stamp()["bytes"]
        log_steps(log, range(5, 9))
    uninterrupted = (tmp_path / "metrics.jsonl").read_bytes()
    first = {record.step: record.wall for record in read_steps(tmp_path)}
    assert position == len(b"".join(uninterrupted.splitlines(keepends=True)[:5]))
    time.sleep(0.01)
    with RunLog(tmp_path) as log:
        log.rewind(position)
        assert [record.step for record in read_steps(tmp_path)] == [0, 1, 2, 3, 4]
        log_steps(log, range(5, 9))
    assert (tmp_path / "metrics.jsonl").read_bytes() == uninterrupted
    assert {record.step: record.wall for record in read_steps(tmp_path)} == first
    assert len((tmp_path / "timing.jsonl").read_text().splitlines()) == 9 + 4
    with RunLog(tmp_path) as log:
        for wrong in (position - 1, 10**6, -1):
            with pytest.raises(ValueError, match=r"is no end of a line in .*cut short or is of another run"):
                log.rewind(wrong)
        log.rewind(0)
        log_steps(log, range(1))


def test_tables_appear_whole_or_not_at_all(tmp_path: Path) -> None:
    frame = pd.DataFrame({"problem": [1, 2], "reward": [0.5, 1.0]}, index=[7, 8])
    with RunLog(tmp_path) as log:
        path = log.write_table("rollouts", 100, frame)
        assert path == tmp_path / "rollouts/step=000100.parquet"
        pd.testing.assert_frame_equal(pd.read_parquet(path), frame.reset_index(drop=True))
        before = path.read_bytes()
        with pytest.raises(Exception, match=r"Conversion failed|Could not convert"):
            log.write_table("rollouts", 100, pd.DataFrame({"mixed": [1, "one"]}))
        assert path.read_bytes() == before
        assert [child.name for child in path.parent.iterdir()] == [path.name]
    (path.parent / ".step=000101.parquet.77.tmp").write_bytes(b"half")  # what a kill leaves
    with RunLog(tmp_path):
        assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_markers_say_how_the_run_stands(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run_status(folder) == "new"
    for attempt in (1, 2):
        with RunLog(folder) as log:
            assert log.status() == ("new" if attempt == 1 else "failed")
            log.begin()
            assert log.status() == ("new" if attempt == 1 else "partial")
            log_steps(log, range(attempt, attempt + 1))
            assert log.status() == "partial"
            try:
                raise RuntimeError(f"attempt {attempt}")
            except RuntimeError as error:
                log.mark_error(error)
            assert run_status(folder) == "failed"
    text = (folder / "error.txt").read_text()
    assert text.startswith("RuntimeError: attempt 2\n") and "test_tracking.py" in text
    with RunLog(folder) as log:
        log.begin()
        assert log.status() == "partial"
        log.mark_done({"reward": 0.5})
        assert log.status() == "done"
    assert json.loads((folder / "DONE").read_text()) == {"reward": 0.5}
    assert "attempt 1" in (folder / "error.1.txt").read_text()
    assert "attempt 2" in (folder / "error.2.txt").read_text()


def test_a_folder_that_is_opened_and_refused_still_says_that_the_run_failed(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log_steps(log, range(2))
        log.mark_error(RuntimeError("out of memory"))
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with RunLog(tmp_path):
        pass
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert run_status(tmp_path) == "failed"


WRITER = """
import sys, time
from pathlib import Path
from grpo_lab.tracking.run_log import RunLog
log = RunLog(Path(sys.argv[1]))
step = 0
while True:
    log.write_step(step, {f"train/m{i}": step / 7 + i for i in range(60)}, {"generate": 0.1})
    step += 1
    if step == 3:
        print("ready", flush=True)
"""


def test_one_process_at_a_time_and_a_kill_frees_the_folder(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "ready\n"
        assert is_held(tmp_path)
        with pytest.raises(RunFolderBusyError, match=f"in use by process {writer.pid}"):
            RunLog(tmp_path)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    assert not is_held(tmp_path)
    steps = [record.step for record in read_steps(tmp_path)]
    assert steps == list(range(len(steps))) and len(steps) >= 3
    with RunLog(tmp_path) as log:
        log_steps(log, range(len(steps), len(steps) + 1))
    assert len(list(read_steps(tmp_path))) == len(steps) + 1


FORKER = """
import os, sys, time
from pathlib import Path
from grpo_lab.tracking.run_log import RunLog
log = RunLog(Path(sys.argv[1]))
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(60)
os._exit(0)
"""


def test_a_forked_worker_that_outlives_its_run_does_not_hold_the_folder(tmp_path: Path) -> None:
    forker = subprocess.Popen([sys.executable, "-c", FORKER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(forker.stdout.readline())
    try:
        forker.wait()
        RunLog(tmp_path).close()
    finally:
        os.kill(worker, signal.SIGKILL)
        forker.stdout.close()


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="move it, or set another runs_dir"):
        RunLog(tmp_path / "file")
    with pytest.raises(RunFolderError, match="move it, or set another runs_dir"):
        RunLog(tmp_path / "file/below")
    with pytest.raises(RunFolderError, match="set runs_dir"):
        RunLog(Path("/proc/runs"))


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Path:
    """A file system of 64 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tiny tmpfs is not permitted here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.needs("mount", "umount")
def test_a_full_disk_says_so_and_the_run_goes_on_once_there_is_room(tiny_disk: Path) -> None:
    ballast = tiny_disk / "ballast"
    ballast.write_bytes(b"\0" * 30_000)
    with RunLog(tiny_disk / "run") as log:
        wide = {f"train/m{i}": i / 7 for i in range(100)}
        with pytest.raises(RunFolderError, match=r"No space left.*resumes from the last checkpoint"):
            for step in range(100):
                log.write_step(step, wide, {})
        steps = [record.step for record in read_steps(log.folder)]
        assert (log.folder / "metrics.jsonl").read_bytes().endswith(b"}}\n")
        with pytest.raises(RunFolderError, match="No space left"):
            atomic_write(log.folder / "config.yaml", "x" * 40_000)
        assert not list(log.folder.glob("*.tmp")) and not list(log.folder.glob(".config*"))
        log.mark_error(RuntimeError("the disk is full"))  # must not raise
        ballast.unlink()
        log.write_step(len(steps), wide, {})
        assert [record.step for record in read_steps(log.folder)] == [*steps, len(steps)]
    (tiny_disk / "fill").write_bytes(b"\0" * (os.statvfs(tiny_disk).f_bavail * 4096))
    with pytest.raises(RunFolderError, match="No space left"):
        RunLog(tiny_disk / "other")


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "metrics": {}}\ngarbage\n')
    with pytest.raises(ValueError, match="not JSON, b'garbage"):
        list(read_steps(tmp_path))


# ---- provenance


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org", "-c", "init.defaultBranch=trunk"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True, text=True
    ).stdout


def test_provenance_holds_commit_diff_and_untracked_files(tmp_path: Path) -> None:
    assert provenance._git(tmp_path) is None
    git(tmp_path, "init")
    (tmp_path / "a.py").write_text("one = 1\n")
    git(tmp_path, "add", "a.py")
    unborn = provenance._git(tmp_path)
    assert unborn["commit"] is None and unborn["branch"] == "trunk" and "+one = 1" in unborn["diff"]
    git(tmp_path, "commit", "-m", "first")
    clean = provenance._git(tmp_path)
    assert clean == {
        "commit": git(tmp_path, "rev-parse", "HEAD").strip(),
        "branch": "trunk",
        "dirty": False,
        "untracked": [],
        "diff": "",
    }
    (tmp_path / "a.py").write_text("one = 2\n")
    (tmp_path / "new file.py").write_text("")
    dirty = provenance._git(tmp_path)
    assert dirty["dirty"] and dirty["untracked"] == ["new file.py"]
    git(tmp_path, "checkout", "a.py")
    subprocess.run(["git", "-C", str(tmp_path), "apply"], input=dirty["diff"].encode(), check=True)
    assert (tmp_path / "a.py").read_text() == "one = 2\n"


@pytest.mark.parametrize(
    ("path", "counts"),
    [
        ("experiments/mine.yaml", False),
        ("README.md", False),
        ("tests/test_mine.py", False),
        ("experiments/mine/figures/a.png", False),
        ("conf/reward/mine.yaml", True),
        ("my_rewards.py", True),
        ("grpo_lab/loop.py", True),
    ],
)
def test_only_files_that_a_run_may_read_make_the_code_differ(tmp_path: Path, path: str, counts: bool) -> None:
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "first")
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text("new\n")
    found = provenance._git(tmp_path)
    assert found is not None and found["dirty"] == counts and found["untracked"] == [path]
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "second")
    (tmp_path / path).write_text("changed\n")
    assert provenance._git(tmp_path)["dirty"] == counts


def test_provenance_starts_four_processes_and_names_no_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = [], subprocess.Popen

    def counted(command: list[str], *arguments: Any, **options: Any) -> Any:
        started.append(command[0])
        return real(command, *arguments, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    environment = provenance.write(tmp_path, ["grpo-lab", "seed=1"])
    monkeypatch.undo()
    assert sorted(started) == ["git", "git", "git", "nvidia-smi"], "what it costs: nothing heavy is imported, see below"
    text = (tmp_path / "environment.json").read_text()
    assert json.loads(text) == environment
    assert environment["command"] == ["grpo-lab", "seed=1"] and environment["packages"]["torch"]
    assert (tmp_path / "source.diff").exists()
    if len(socket.gethostname()) > 6:
        assert socket.gethostname() not in text


def test_provenance_without_git_or_heavy_imports(tmp_path: Path) -> None:
    code = (
        "import sys; from grpo_lab.tracking import mlflow_exporter, provenance;"
        f"from pathlib import Path; print(provenance.write(Path({str(tmp_path)!r}), [])['git']);"
        "print([name for name in ('torch', 'mlflow', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PATH": ""}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("None\n[]\n", "")


# ---- configuration


@pytest.mark.parametrize("name, schema", [("mlflow", Mlflow), ("none", NoTracking)])
def test_the_yaml_fills_its_class(tmp_path: Path, name: str, schema: type) -> None:
    bootstrap()
    with initialize_config_dir(str(conf_folder()), version_base="1.3"):
        config = compose("config", overrides=[f"tracking={name}", f"runs_dir={tmp_path}"])
    tracking = OmegaConf.to_object(config.tracking)
    assert type(tracking) is schema
    if schema is Mlflow:
        assert tracking.record() == {"uri": f"sqlite:///{tmp_path}/mlflow.db", "experiment": "grpo_lab"}
    else:
        assert tracking.record() is None
        mirror = tracking.exporter(tmp_path)
        mirror.start()
        mirror.stop()


def test_only_a_uri_that_can_work_is_accepted() -> None:
    for uri in ("sqlite:////runs/mlflow.db", "http://127.0.0.1:5000", "https://host", "postgresql://h/db"):
        check_uri(uri)
    for uri, remedy in (
        ("file:///runs/mlruns", "mlflow migrate-filestore"),
        ("/runs/mlruns", "sqlite:////absolute"),
        ("sqlite:///mlflow.db", "four slashes"),
        ("sqlite://", "four slashes"),
        ("http://", "names no host"),
        ("mlflow.db", "sqlite:////absolute"),
    ):
        with pytest.raises(ValueError, match=remedy):
            check_uri(uri)
        with pytest.raises(ValueError, match=remedy):
            Mlflow(1.0, 1.0, 0.0, uri, "grpo_lab", "")
    with pytest.raises(ValueError, match="interval_seconds"):
        Mlflow(0.0, 1.0, 0.0, "http://h", "grpo_lab", "")
    with pytest.raises(ValueError, match=r"tracking\.system_metrics=-1"):
        Mlflow(1.0, 1.0, -1.0, "http://h", "grpo_lab", "")
    with pytest.raises(ValueError, match=r"tracking\.register=a/b"):
        Mlflow(1.0, 1.0, 0.0, "http://h", "grpo_lab", "a/b")


def test_the_file_system_of_a_path_is_that_of_its_deepest_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/a / ext4 rw 0 0\nserver:/x /home nfs4 rw 0 0\n")
    assert file_system(Path("/home/me/runs"), mounts) == "nfs4"
    assert file_system(Path("/homes/me"), mounts) == "ext4"
    assert file_system(Path("/x"), tmp_path / "missing") == ""


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "mode"), [("ext4", "wal"), ("nfs4", "delete"), ("virtiofs", "delete"), ("", "wal")])
def test_a_write_ahead_log_is_for_file_systems_of_one_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, mode: str
) -> None:
    """Its processes share memory, which those of several machines cannot."""
    monkeypatch.setattr(mlflow_store, "file_system", lambda path: kind)
    prepare_store(f"sqlite:///{tmp_path}/mlflow.db", "probe")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == (mode,)
    assert ("unsafe with several machines" in caplog.text) is (mode == "delete")


# ---- the exporter


def test_mirror_end_to_end(store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        (folder / "config.yaml").write_text("seed: 3\n")
        mirror = Exporter(folder, 0.1, 60.0)
        mirror.start()
        log_steps(log, range(30))
        wait_until(lambda: query(store, "select * from metrics"))
        assert query(store, "select name, status from runs") == [("grpo-a", "RUNNING")]
        log_steps(log, range(30, 60))
        log.write_step(60, {"train/loss": math.inf, "train/kl": math.nan}, {})
        log.mark_done({})
        mirror.stop()
        mirror.stop()
    assert not caplog.records
    assert query(store, "select count(*) from metrics") == [(60 * 4,)]
    walls = {record.step: record.wall for record in read_steps(folder)}
    rows = query(store, "select step, timestamp, value from metrics where key = 'train/loss'")
    assert sorted(rows) == [(step, walls[step], 1 / (step + 1)) for step in range(60)]
    assert query(store, "select distinct key from metrics order by key") == [
        ("budget/device_seconds",), ("budget/sampled_tokens",), ("time/generate",), ("train/loss",),
    ]  # fmt: skip
    params = dict(query(store, "select key, value from params"))
    assert len(params) == 124 and params["optimizer.lr"] == "0.001" and len(params["note"]) == 500
    assert params["baseline"] == "group_mean"
    tags = dict(query(store, "select key, value from tags"))
    assert tags.items() >= {
        "recipe": "grpo", "seed": "3", "axis.baseline": "group_mean", "axis.kl": "none", "sweep": "s1",
        "dirty": "false", "folder": str(folder), "run_key": "key-a",
        "nonfinite": "step 60: train/kl = nan",
    }.items()  # fmt: skip
    ((status, ended),) = query(store, "select status, end_time from runs")
    assert status == "FINISHED" and ended == (folder / "DONE").stat().st_mtime_ns // 1_000_000
    copied = {path.name for path in store.with_name("mlflow_artifacts").rglob("*") if path.is_file()}
    assert copied == {"run.json", "config.yaml", "DONE"}
    assert query(store, "pragma journal_mode") == [("wal",)]


@pytest.mark.extended
def test_replay_adds_nothing_twice_and_finds_its_run_again(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        log_steps(log, range(400))
        log.mark_done({})
    first = sync(folder)
    assert (first.points, first.status, first.error) == (1600, "FINISHED", None)
    assert sync(folder) == sync(folder) == type(first)(folder, 0, first.run_id, "FINISHED")
    everything = "select key, value, timestamp, step from metrics order by key, step"
    points = query(store, everything)
    assert len(points) == 1600
    (folder / "mirror.json").unlink()
    again = sync(folder)
    assert (again.points, again.run_id) == (1600, first.run_id)
    assert query(store, everything) == points
    assert query(store, "select count(*) from runs") == [(1,)]


def test_the_data_of_a_run_are_its_inputs_in_mlflow_however_often_it_is_sent(store: Path, tmp_path: Path) -> None:
    folder, data = tmp_path / "runs" / "a", {"train": "0123456789abcdef", "heldout": "fedcba9876543210"}
    with RunLog(folder) as log:
        write_run_json(
            folder, f"sqlite:///{store}", data=data, config={"task.path": "sums.jsonl", "task.split": "train"}
        )
        log_steps(log, range(2))
        log.mark_done({})
    report = sync(folder)
    (folder / "mirror.json").unlink()
    sync(folder)
    assert report.run_id is not None
    sent = MlflowClient(f"sqlite:///{store}").get_run(report.run_id).inputs.dataset_inputs
    assert {one.dataset.name: one.dataset.digest for one in sent} == {f"sums.jsonl:{name}": data[name] for name in data}
    assert {one.tags[0].key: one.dataset.source_type for one in sent} == {"mlflow.data.context": "grpo_lab"}
    assert {one.tags[0].value for one in sent} == data.keys() and len(sent) == len(data)


@pytest.mark.extended
def test_a_new_store_receives_everything(store: Path, ready_store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        log_steps(log, range(5))
        log.mark_done({})
    sync(folder)
    for leftover in tmp_path.glob("mlflow.db*"):
        leftover.unlink()
    # The engine of the deleted file lives on in this process; a later process has a new one.
    code = "import sys; from pathlib import Path; from grpo_lab.tracking.mlflow_exporter import sync;"
    code += "print(sync(Path(sys.argv[1])).points)"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("20\n", "")
    other = tmp_path / "other.db"
    other.write_bytes(ready_store.read_bytes())
    assert sync(folder, f"sqlite:///{other}").points == 20
    assert query(other, "select count(*) from metrics") == query(store, "select count(*) from metrics")


def test_steps_repeated_after_a_rewind_stay_single_points(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}", config={"device": "cpu"})
        mirror = Exporter(folder, 0.05, 60.0)
        mirror.start()
        log_steps(log, range(10))
        position = log.stamp()["bytes"]
        log_steps(log, range(10, 20))
        log.mark_error(RuntimeError("out of memory"))
        mirror.stop()
    assert query(store, "select status from runs") == [("FAILED",)]
    first = query(store, "select step, timestamp from metrics where key = 'train/loss' order by step")
    assert len(first) == 20
    time.sleep(0.01)
    with RunLog(folder) as log:
        # A resumed run may differ in a parameter, and here even in its values, as on a GPU.
        log.begin()
        write_run_json(folder, f"sqlite:///{store}", config={"device": "cuda", "added": 1})
        log.rewind(position)
        mirror = Exporter(folder, 0.05, 60.0)
        mirror.start()
        log_steps(log, range(10, 25), factor=2.0)
        log.mark_done({})
        mirror.stop()
    rows = query(store, "select step, timestamp from metrics where key = 'train/loss' order by step")
    assert rows[:20] == first and [step for step, _ in rows] == list(range(25))
    assert query(store, "select name, status from runs") == [("grpo-a", "FINISHED")]
    params = dict(query(store, "select key, value from params"))
    assert params == {"device": "cpu", "added": "1", "baseline": "group_mean", "kl": "none"}


def test_a_run_outside_git_has_no_commit_tags(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder):
        write_run_json(folder, f"sqlite:///{store}", commit=None, dirty=None)
    sync(folder)
    tags = dict(query(store, "select key, value from tags"))
    assert not {"commit", "dirty", "mlflow.source.git.commit", "mlflow.parentRunId"} & set(tags)


def test_status_follows_the_folder(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        log_steps(log, range(2))
        assert sync(folder).status == "RUNNING"
    assert sync(folder).status == "KILLED"
    ended = query(store, "select status, end_time from runs")
    assert sync(folder).status == "KILLED" and query(store, "select status, end_time from runs") == ended
    with RunLog(folder) as log:
        log_steps(log, range(2, 5))
        report = sync(folder)
        assert (report.status, report.points) == ("RUNNING", 12), "of what it logged since, all and nothing else"
        assert query(store, "select status from runs") == [("RUNNING",)]
        log.mark_error(RuntimeError("x"))
    assert sync(folder).status == "FAILED"
    assert query(store, "select status from runs") == [("FAILED",)]


def test_a_deleted_run_or_experiment_is_not_made_again_behind_the_users_back(store: Path, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        log_steps(log, range(2))
    report = sync(folder)
    client = MlflowClient(tracking_uri=f"sqlite:///{store}")
    client.delete_run(report.run_id)
    with pytest.raises(ValueError, match="mlflow runs restore"):
        sync(folder)
    client.delete_experiment(client.get_experiment_by_name("grpo_lab").experiment_id)
    with pytest.raises(ValueError, match="mlflow experiments restore"):
        sync(folder)


def test_sync_all_reports_each_folder(store: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for name, uri in (("a", f"sqlite:///{store}"), ("b", None), ("c", "file:///old")):
        with RunLog(runs / name) as log:
            write_run_json(runs / name, uri)
            log_steps(log, range(2))
            log.mark_done({})
    fine, broken = sync_all(runs)
    assert (fine.folder, fine.points, fine.error) == (runs / "a", 8, None)
    assert broken.folder == runs / "c" and "migrate-filestore" in broken.error
    assert [report.points for report in sync_all(runs, f"sqlite:///{store}")] == [0, 8, 8]
    with pytest.raises(ValueError, match="tracking=none"):
        sync(runs / "b")
    with pytest.raises(ValueError, match="no run folder"):
        sync(runs)


@pytest.fixture(params=["refuses", "is silent"])
def dead_server(request: pytest.FixtureRequest) -> str:
    """The address of a port where nobody listens, or of one that accepts and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "is silent":
            listener.listen(16)
        port = listener.getsockname()[1]
        if request.param == "refuses":
            listener.close()
        yield f"http://127.0.0.1:{port}"


def test_a_dead_server_stops_nothing(
    dead_server: str,
    store: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow  # noqa: F401  (so that the time below is the server's and not the import's)

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")  # over stop's patience; sync waits for it below
    asked, send = set(), requests.Session.send
    monkeypatch.setattr(
        requests.Session, "send", lambda *of, **how: asked.add(threading.get_ident()) or send(*of, **how)
    )
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, dead_server)
        mirror = Exporter(folder, 0.05, 1.0)
        mirror.start()
        for step in range(100):
            log.write_step(step, {f"train/m{i}": i / 7 for i in range(40)}, {"generate": 0.1})
            time.sleep(0.01)
        log.mark_done({})
        started = time.perf_counter()
        mirror.stop()
        assert time.perf_counter() - started < 8, "patience of one second; all tries of a call take over ten"
    assert asked and threading.get_ident() not in asked, "only the exporter's thread talks to the server"
    assert caplog.records[-1].message == (f"MLflow lacks a part of this run: send it with `grpo-lab sync {folder}`")
    assert len(caplog.records) <= 2
    assert sync(folder, f"sqlite:///{store}").points == 100 * 41
    if dead_server.startswith("refuses"):
        with pytest.raises(RuntimeError, match="the folder is complete"):
            sync(folder)


@pytest.mark.extended
def test_mirror_through_a_server(tmp_path: Path, store: Path) -> None:
    port = free_port()
    folder = tmp_path / "runs" / "a"
    uri = f"http://127.0.0.1:{port}"
    log = RunLog(folder)
    write_run_json(folder, uri)
    log_steps(log, range(300))
    with pytest.raises(RuntimeError, match="the folder is complete"):
        sync(folder)
    with mlflow_server(store, tmp_path, port):
        mirror = Exporter(folder, 0.1, 60.0)
        mirror.start()
        log.mark_done({})
        log.close()
        mirror.stop()
        assert query(store, "select count(*) from metrics") == [(1200,)]
        assert sync(folder).points == 0
        (folder / "mirror.json").unlink()
        assert sync(folder).points == 1200
        assert query(store, "select count(*) from metrics") == [(1200,)]
        assert query(store, "select name, status from runs") == [("grpo-a", "FINISHED")]
        assert list((tmp_path / "artifacts").rglob("DONE"))


MIRRORED = """
import sys
from pathlib import Path
from grpo_lab.tracking.mlflow_exporter import Exporter
from grpo_lab.tracking.run_log import RunLog
folder = Path(sys.argv[1])
with RunLog(folder) as log:
    mirror = Exporter(folder, 0.2, 200.0)
    mirror.start()
    for step in range(50):
        log.write_step(step, {f"train/m{i}": step + i / 7 for i in range(20)}, {"generate": 0.1})
    log.mark_done({})
    mirror.stop()
"""


@pytest.mark.extended
def test_eight_runs_that_start_at_once_on_a_fresh_store_all_live(tmp_path: Path) -> None:
    store = tmp_path / "fresh" / "mlflow.db"
    started = []
    for index in range(8):
        folder = tmp_path / "runs" / str(index)
        write_run_json(folder, f"sqlite:///{store}")
        command = [sys.executable, "-c", MIRRORED, str(folder)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    outputs = [process.communicate(timeout=250)[0] for process in started]
    assert outputs == [""] * 8 and [process.returncode for process in started] == [0] * 8
    assert query(store, "select status, count(*) from runs group by status") == [("FINISHED", 8)]
    assert query(store, "select count(*) from experiments where name = 'grpo_lab'") == [(1,)]
    assert query(store, "select count(*) from metrics") == [(8 * 50 * 21,)]


def test_the_mirror_leaves_no_thread_behind(store: Path, tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    with RunLog(folder) as log:
        write_run_json(folder, f"sqlite:///{store}")
        mirror = Exporter(folder, 600.0, 60.0)
        mirror.start()
        log_steps(log, range(3))
        mirror.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "mlflow-exporter"]
    assert query(store, "select status from runs") == [("KILLED",)]
