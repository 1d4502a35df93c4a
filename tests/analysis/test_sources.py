"""A sweep read from run folders, from what was kept of them, and from MLflow: always the same numbers."""

from __future__ import annotations

import cProfile
import json
import lzma
import math
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers import free_port, mlflow_server
from planted_sweeps import Planted, describe_runs, write_synthetic

from grpo_lab.analysis.sources import cache
from grpo_lab.analysis.sources.mlflow_runs import load_mlflow
from grpo_lab.analysis.sources.mlflow_stores import shown
from grpo_lab.analysis.sources.read import read_source
from grpo_lab.analysis.sources.run_folders import load_sweep, protocol_of
from grpo_lab.analysis.sources.saved_data import load_data, save_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.mlflow_exporter import sync_all
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import read_sweep, record_sweep

PLANTED = Planted(
    tricks=("helps",),
    kind="add_one",
    seeds=(0, 1),
    downstream={"helps": 0.1},
    collapse={("+helps", 1): 0.5},
    steps=12,
    every=6,
    questions=6,
    name="small",
)


def assert_equal(found: SweepData, expected: SweepData, *tables: str) -> None:
    """To the last bit, the order of rows and columns and their dtypes included."""
    for table in tables or ("runs", "points", "answers"):
        pd.testing.assert_frame_equal(getattr(found, table), getattr(expected, table), check_exact=True)


# ---- what is kept of run folders


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folders of a small sweep with a collapsed run, a run without answers, and one that logs more."""
    home = tmp_path_factory.mktemp("written")
    write_synthetic(PLANTED, home)
    shutil.rmtree(home / "small/base/seed=1/eval")
    with RunLog(home / "small/base/seed=0") as log:
        log.write_step(13, {"train/loss": math.inf, "train/ratio": math.nan, "budget/steps": 13}, {})
        log.mark_done({"no_ops": []})  # which says no number of steps: tests let it log more
    return home


@pytest.fixture
def runs(written: Path, tmp_path: Path) -> Path:
    """A copy of them to change."""
    return shutil.copytree(written, tmp_path / "runs")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs whose files were parsed so far, as arm/seed."""
    names: list[str] = []
    read = cache.read_tables

    def counted(folder: Path) -> cache.RunTables:
        names.append("/".join(folder.parts[-2:]))
        return read(folder)

    monkeypatch.setattr(cache, "read_tables", counted)
    return names


def kept_file(runs: Path) -> Path:
    return runs / "sweeps" / PLANTED.name / "cache" / cache.FILE


def test_what_was_kept_equals_what_was_parsed(runs: Path, parsed: list[str]) -> None:
    record = read_sweep(runs / "sweeps/small")
    entries = [*record.runs, type(record.runs[0])("base", "", 7, "small/base/seed=7")]
    (runs / "small/+helps/seed=0/metrics.jsonl").write_bytes(b"")
    (runs / "small/+helps/seed=0/DONE").unlink()
    record_sweep(runs, "small", entries, None, record.design, "x", ["x"], None, None)
    expected = load_sweep(runs, "small", cache=False)
    assert not kept_file(runs).exists()
    assert expected.runs["status"].tolist() == ["done", "partial", "done", "failed", "new"]
    assert expected.points["train/ratio"].isna().all() and np.isposinf(expected.points["train/loss"]).sum() == 1
    cold = load_sweep(runs, "small")
    parsed.clear()
    warm = load_sweep(runs, "small")
    assert parsed == []
    assert_equal(cold, expected)
    assert_equal(warm, expected)
    # Base seed 0: 13 steps and the one added; base seed 1: 13; +helps seed 1 stopped after 6 of 12, step 0 logs too.
    assert warm.points.groupby(["arm", "seed"]).size().to_dict() == {("base", 0): 14, ("base", 1): 13, ("+helps", 1): 7}
    assert set(warm.answers[["arm", "seed"]].itertuples(index=False, name=None)) == {
        ("base", 0),
        ("+helps", 0),
        ("+helps", 1),
    }


def log_more(folder: Path) -> None:
    with RunLog(folder) as log:
        log.write_step(14, {"budget/steps": 14}, {})


def log_time(folder: Path) -> None:
    path = folder / "timing.jsonl"
    *lines, _ = path.read_text().splitlines()
    last = {"step": 13, "wall": 1, "timing": {"budget/device_seconds": 9.0}}
    path.write_text("\n".join([*lines, json.dumps(last)]) + "\n")


def answer_more(folder: Path) -> None:
    table = pd.read_parquet(folder / "eval/step=000012.parquet")
    table.assign(step=13).to_parquet(folder / "eval/step=000013.parquet")


def answer_otherwise(folder: Path) -> None:
    table = pd.read_parquet(folder / "eval/step=000012.parquet")
    table.assign(outcome=1.0 - table["outcome"]).to_parquet(folder / "eval/step=000012.parquet")


def rewrite(folder: Path) -> None:
    """The same size, other numbers."""
    path = folder / "metrics.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"budget/steps": 13', b'"budget/steps": 31'))
    assert path.stat().st_size == len(content)


def go_back(folder: Path) -> None:
    """The step with the two metrics that no other run logs is gone, and so are their columns."""
    path = folder / "metrics.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.mark.few(4)
@pytest.mark.parametrize("change", [log_more, log_time, answer_more, answer_otherwise, rewrite, go_back])
def test_only_a_run_whose_files_changed_is_parsed_again(
    change: Callable[[Path], None], runs: Path, parsed: list[str]
) -> None:
    before = load_sweep(runs, "small")
    assert len(parsed) == 4
    change(runs / "small/base/seed=0")
    parsed.clear()
    after = load_sweep(runs, "small")
    assert parsed == ["base/seed=0"]
    assert_equal(after, load_sweep(runs, "small", cache=False))
    assert not (after.points.equals(before.points) and after.answers.equals(before.answers))
    parsed.clear()
    assert_equal(load_sweep(runs, "small"), after)
    assert parsed == []


def test_a_run_that_goes_on_while_it_is_parsed_is_parsed_again(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache.read_tables

    def overtaken(folder: Path) -> cache.RunTables:
        tables = read(folder)
        if folder.parts[-2:] == ("base", "seed=0"):
            log_more(folder)
        return tables

    monkeypatch.setattr(cache, "read_tables", overtaken)
    load_sweep(runs, "small")
    monkeypatch.setattr(cache, "read_tables", read)
    assert load_sweep(runs, "small").points["budget/steps"].max() == 14


def test_other_code_parses_all_again(runs: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load_sweep(runs, "small")
    parsed.clear()
    monkeypatch.setattr(cache, "_reader", lambda: "other code")
    load_sweep(runs, "small")
    assert len(parsed) == 4


def spoil_byte(share: float) -> Callable[[bytes], bytes]:
    def spoil(content: bytes) -> bytes:
        at = int(share * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :]

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [*map(spoil_byte, (0.0, 0.1, 0.5, 0.9, 1.0)), lambda content: content[: len(content) // 2], lambda content: b""],
    ids=["digest", "index", "middle", "late", "last byte", "half", "empty"],
)
def test_a_damaged_file_is_neither_trusted_nor_fatal(
    spoil: Callable[[bytes], bytes], runs: Path, parsed: list[str]
) -> None:
    expected = load_sweep(runs, "small")
    whole = kept_file(runs).read_bytes()
    kept_file(runs).write_bytes(spoil(whole))
    parsed.clear()
    assert_equal(load_sweep(runs, "small"), expected)
    assert len(parsed) == 4 and kept_file(runs).read_bytes() == whole


def test_a_file_of_something_else_is_replaced(runs: Path) -> None:
    expected = load_sweep(runs, "small")
    whole = kept_file(runs).read_bytes()
    expected.points.to_parquet(kept_file(runs))
    assert_equal(load_sweep(runs, "small"), expected)
    assert kept_file(runs).read_bytes() == whole


def test_runs_that_cannot_be_written_are_read_all_the_same(runs: Path, parsed: list[str]) -> None:
    (runs / "sweeps/small/cache").write_text("a file where the folder would be")
    expected = load_sweep(runs, "small", cache=False)
    for _ in range(2):
        parsed.clear()
        assert_equal(load_sweep(runs, "small"), expected)
        assert len(parsed) == 4


def test_readers_at_once_do_not_disturb_each_other(runs: Path, parsed: list[str]) -> None:
    expected = load_sweep(runs, "small", cache=False)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: load_sweep(runs, "small"), range(6)))
    for data in found:
        assert_equal(data, expected)
    assert_equal(load_sweep(runs, "small"), expected)
    assert [path.name for path in kept_file(runs).parent.iterdir()] == [cache.FILE], "no leftovers"


def test_a_damaged_run_does_not_keep_the_others_from_being_kept(runs: Path, parsed: list[str]) -> None:
    with (runs / "small/base/seed=1/metrics.jsonl").open("a") as stream:
        stream.write("not JSON\n")
    assert load_sweep(runs, "small").runs["status"].tolist() == ["done", "done", "unreadable", "failed"]
    parsed.clear()
    again = load_sweep(runs, "small")
    assert again.runs["status"].tolist() == ["done", "done", "unreadable", "failed"] and parsed == ["base/seed=1"]


def log_further(folder: Path, number: int) -> None:
    """`number` further metrics at every step of a finished run, which DONE names as it does the run's own."""
    further = {f"eval/further_{n}/accuracy": n / number for n in range(number)}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({**line, "metrics": line["metrics"] | further}) + "\n" for line in lines]
    (folder / "metrics.jsonl").write_text("".join(lines))
    done = json.loads((folder / "DONE").read_text())
    (folder / "DONE").write_text(json.dumps(done | {"last": done["last"] | further}))


def calls_of_loading(runs: Path) -> int:
    """Calls within pandas of loading the sweep once more, with its tables saved."""
    load_sweep(runs, PLANTED.name)
    with cProfile.Profile() as profile:
        load_sweep(runs, PLANTED.name)
    return sum(one.callcount for one in profile.getstats() if "pandas" in getattr(one.code, "co_filename", ""))


@pytest.mark.extended
def test_what_a_run_logs_is_compared_with_its_end_in_one_pass(tmp_path: Path) -> None:
    """A further metric costs about 20 calls a run, those of the whole sweep included; a pass of its own about 200."""
    write_synthetic(replace(PLANTED, seeds=tuple(range(10))), tmp_path)
    few = calls_of_loading(tmp_path)
    done = sorted(path.parent for path in tmp_path.glob("small/*/*/DONE"))
    for folder in done:
        log_further(folder, 100)
    assert (calls_of_loading(tmp_path) - few) / (100 * len(done)) < 60
    data = load_sweep(tmp_path, PLANTED.name)
    assert len(data.finished) == len(done) == 19 and "eval/further_99/accuracy" in data.points


# ---- the MLflow store


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a small sweep and the store they were exported to."""
    home = tmp_path_factory.mktemp("mirrored")
    write_synthetic(PLANTED, home / "runs")
    describe_runs(home / "runs", PLANTED.name)
    reports = sync_all(home / "runs", f"sqlite:///{home}/mlflow.db")
    assert [report.error for report in reports] == [None] * 5
    return home


@pytest.fixture(scope="module")
def from_folders(mirrored: Path) -> SweepData:
    return load_sweep(mirrored / "runs", "small", cache=False)


@pytest.fixture
def store(mirrored: Path, tmp_path: Path) -> Path:
    """A copy of the store to change; the runs' files stay where they were sent."""
    path = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(mirrored / "mlflow.db")) as source, closing(sqlite3.connect(path)) as copy:
        source.backup(copy)
    return path


def change(store: Path, *statements: str) -> None:
    with closing(sqlite3.connect(store)) as connection, connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0, statement


def run_of(arm: str, seed: int) -> str:
    """SQL for the id of a run's MLflow run."""
    return (
        f"(SELECT a.run_uuid FROM tags a JOIN tags s ON s.run_uuid = a.run_uuid AND s.key = 'seed' "
        f"WHERE a.key = 'arm' AND a.value = '{arm}' AND s.value = '{seed}')"
    )


MOVED = "UPDATE tags SET value = replace(value, '{}', '{}') WHERE key = 'folder'"
PARENT = "(SELECT run_uuid FROM tags WHERE key = 'kind' AND value = 'sweep')"


def row_of(data: SweepData, arm: str, seed: int) -> pd.Series:
    return data.runs[(data.runs["arm"] == arm) & (data.runs["seed"] == seed)].iloc[0]


def value_of(data: SweepData, arm: str, seed: int, step: int, metric: str) -> float:
    points = data.points
    return points[(points["arm"] == arm) & (points["seed"] == seed) & (points["step"] == step)][metric].item()


def test_the_store_gives_what_the_folders_give(mirrored: Path, from_folders: SweepData) -> None:
    data = load_mlflow(f"sqlite:///{mirrored}/mlflow.db", "small")
    assert_equal(data, from_folders)
    assert data.record == from_folders.record and data.design == from_folders.design
    collapsed = row_of(data, "+helps", 1)
    assert collapsed["collapsed"] and collapsed["problem"] == "FloatingPointError: SYNTHETIC collapse"
    assert row_of(data, "base", 0)["protocol"] is not None and not row_of(data, "base", 0)["dirty"]
    assert data.source == "MLflow store mlflow.db, answers from 4 run folders"


WITHOUT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "mlflow", "transformers", "datasets"):
            raise ImportError(name + " was imported")
sys.meta_path.insert(0, Refuse())
from grpo_lab.analysis.figures.effects import draw_effects
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.read import read_source
data = read_source(sys.argv[1], "small", None)
drawn = draw_effects(data, final_values(data))
drawn.figure.savefig(sys.argv[2])
print(data.source)
"""


@pytest.mark.extended
def test_a_figure_from_the_store_needs_neither_mlflow_nor_torch(mirrored: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-c", WITHOUT, f"sqlite:///{mirrored}/mlflow.db", str(tmp_path / "figure.png")]
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "MLflow store mlflow.db, answers from 4 run folders, 3 finished runs\n"
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_a_store_is_read_while_a_run_writes_and_never_written(store: Path, from_folders: SweepData) -> None:
    before = store.read_bytes()
    with closing(sqlite3.connect(store, isolation_level=None)) as writer:
        writer.execute("PRAGMA journal_mode=WAL")
        writer.execute("BEGIN IMMEDIATE")
        writer.execute(f"UPDATE metrics SET value = 0.5 WHERE run_uuid = {run_of('base', 0)}")
        assert_equal(load_mlflow(f"sqlite:///{store}", "small"), from_folders)
        writer.execute("ROLLBACK")
    assert store.read_bytes()[100:] == before[100:], "beyond the header, which knows of the write-ahead log"


def test_of_a_step_sent_twice_the_newest_values_count(store: Path, from_folders: SweepData) -> None:
    run, key = run_of("base", 0), "eval/probe/accuracy"
    points = f"FROM metrics WHERE run_uuid = {run} AND key = '{key}' AND step"
    change(
        store,
        # Later, earlier, and at the same moment but stored later.
        f"INSERT INTO metrics SELECT key, 0.11, timestamp + 5, run_uuid, step, 0 {points} = 0",
        f"INSERT INTO metrics SELECT key, 0.22, timestamp - 5, run_uuid, step, 0 {points} = 6",
        f"INSERT INTO metrics SELECT key, 0.77, timestamp, run_uuid, step, 0 {points} = 12",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert [value_of(data, "base", 0, step, key) for step in (0, 12)] == [0.11, 0.77]
    assert value_of(data, "base", 0, 6, key) == value_of(from_folders, "base", 0, 6, key)
    assert len(data.points) == len(from_folders.points)


def test_values_that_are_not_finite_come_back(store: Path) -> None:
    run = run_of("base", 0)
    points = f"WHERE run_uuid = {run} AND key"
    change(
        store,
        f"UPDATE metrics SET value = 0, is_nan = 1 {points} = 'train/entropy' AND step = 1",
        f"UPDATE metrics SET value = 1.7976931348623157e308 {points} = 'reward/mean' AND step = 1",
        f"UPDATE metrics SET value = -1.7976931348623157e308 {points} = 'reward/mean' AND step = 2",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert math.isnan(value_of(data, "base", 0, 1, "train/entropy"))
    assert value_of(data, "base", 0, 1, "reward/mean") == math.inf
    assert value_of(data, "base", 0, 2, "reward/mean") == -math.inf


def test_how_a_run_ended_and_what_is_not_known_of_it(store: Path, tmp_path: Path) -> None:
    change(
        store,
        f"UPDATE runs SET status = 'RUNNING', end_time = NULL WHERE run_uuid = {run_of('base', 0)}",
        f"UPDATE runs SET status = 'KILLED' WHERE run_uuid = {run_of('base', 1)}",
        # Neither its files nor its folder can be reached.
        f"UPDATE runs SET artifact_uri = 's3://elsewhere' WHERE run_uuid = {run_of('+helps', 1)}",
        f"UPDATE tags SET value = '/elsewhere' || value WHERE key = 'folder' AND run_uuid = {run_of('+helps', 1)}",
        f"DELETE FROM tags WHERE key = 'dirty' AND run_uuid = {run_of('+helps', 0)}",
        f"UPDATE tags SET value = 'truncation, kl' WHERE key = 'no_ops' AND run_uuid = {run_of('+helps', 0)}",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert [row_of(data, "base", seed)["status"] for seed in (0, 1)] == ["partial", "partial"]
    failed = row_of(data, "+helps", 1)
    assert (failed["status"], failed["collapsed"], pd.isna(failed["protocol"])) == ("failed", False, True)
    assert failed["problem"] == "MLflow does not say why: the run's error.txt is not among its files"
    assert len(data.points[(data.points["arm"] == "+helps") & (data.points["seed"] == 1)]) == 7
    assert data.answers[(data.answers["arm"] == "+helps") & (data.answers["seed"] == 1)].empty
    done = row_of(data, "+helps", 0)
    assert (done["status"], done["dirty"], done["no_ops"]) == ("done", None, ["truncation", "kl"])


def test_deleted_runs_are_left_out(store: Path) -> None:
    change(store, f"UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = {run_of('base', 1)}")
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert row_of(data, "base", 1)["status"] == "new" and pd.isna(row_of(data, "base", 1)["run_key"])
    assert data.points[(data.points["arm"] == "base")]["seed"].unique().tolist() == [0]
    change(store, "UPDATE experiments SET lifecycle_stage = 'deleted' WHERE name = 'grpo_lab'")
    with pytest.raises(ValueError, match=r"no sweep 'small' in .*; no sweep was exported there yet"):
        load_mlflow(f"sqlite:///{store}", "small")


def test_without_the_sweeps_own_run_its_runs_tell_what_they_can(store: Path, from_folders: SweepData) -> None:
    change(store, f"UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = {PARENT}")
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert data.design is None and data.source.startswith("MLflow store mlflow.db, without what was declared")
    assert data.record.declared[-1]["fingerprint"] == "unknown"
    order = ["arm", "seed", "step"]
    expected = from_folders.points.sort_values(order, ignore_index=True)
    pd.testing.assert_frame_equal(data.points.sort_values(order, ignore_index=True), expected, check_exact=True)
    assert row_of(data, "base", 0)["folder"].endswith("/runs/small/base/seed=0")


def test_a_sweep_whose_record_was_not_sent_begins_with_its_control(store: Path) -> None:
    change(
        store,
        f"UPDATE runs SET artifact_uri = '/nowhere' WHERE run_uuid = {PARENT}",
        f"UPDATE tags SET value = '/nowhere' WHERE key = 'folder' AND run_uuid = {PARENT}",
        # The control's runs began last.
        f"UPDATE runs SET start_time = start_time + 1000000 WHERE run_uuid = {run_of('base', 0)}",
        f"UPDATE runs SET start_time = start_time + 1000000 WHERE run_uuid = {run_of('base', 1)}",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert data.control == "base" and data.arms == ["base", "+helps"] and data.design is None
    assert data.record.declared[-1]["fingerprint"] == PLANTED.design.fingerprint()


def copied_run(run: str, name: str, later: int) -> str:
    """SQL that adds a run begun `later` ms after another, without tags and points."""
    columns = "status, end_time, lifecycle_stage, artifact_uri, experiment_id, name, source_type, user_id"
    return (
        f"INSERT INTO runs (run_uuid, start_time, {columns}) "
        f"SELECT '{name}', start_time + {later}, {columns} FROM runs WHERE run_uuid = {run}"
    )


def second_copy(run: str, name: str, later: int) -> list[str]:
    """SQL that puts a run into the store once more, begun `later` ms after, with half the values."""
    return [
        copied_run(run, name, later),
        f"INSERT INTO metrics SELECT key, value / 2, timestamp, '{name}', step, is_nan FROM metrics "
        f"WHERE run_uuid = {run}",
        f"INSERT INTO tags SELECT key, value, '{name}' FROM tags WHERE run_uuid = {run}",
    ]


@pytest.mark.parametrize("later,factor", [(1000, 0.5), (-1000, 1.0)], ids=["newer", "older"])
def test_of_a_run_that_is_there_twice_the_newest_counts(
    later: int, factor: float, store: Path, from_folders: SweepData
) -> None:
    change(store, *second_copy(run_of("base", 0), "copy", later))
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert "runs that are in MLflow more than once: 1 (the newest counts)" in data.source
    assert value_of(data, "base", 0, 12, "budget/steps") == 12 * factor
    assert (row_of(data, "base", 0)["mlflow_run_id"] == "copy") == (factor == 0.5)
    assert len(data.runs) == 4 and len(data.points) == len(from_folders.points)


def test_runs_the_declaration_no_longer_has_are_counted_out(store: Path) -> None:
    change(
        store,
        *second_copy(run_of("base", 0), "other", 0),
        "UPDATE tags SET value = 'gone' WHERE key = 'arm' AND run_uuid = 'other'",
        "UPDATE tags SET value = '/runs/gone/seed=0' WHERE key = 'folder' AND run_uuid = 'other'",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert "runs that today's declaration does not name: 1" in data.source
    assert data.arms == ["base", "+helps"] and row_of(data, "base", 0)["mlflow_run_id"] != "other"


def test_a_run_whose_folder_was_renamed_is_known_by_its_labels(store: Path, from_folders: SweepData) -> None:
    change(store, f"UPDATE tags SET value = '/renamed' WHERE key = 'folder' AND run_uuid = {run_of('base', 0)}")
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert_equal(data, from_folders, "runs", "points")
    assert data.source == "MLflow store mlflow.db, answers from 3 run folders"


def test_of_two_sweeps_of_one_name_the_newest_counts(store: Path) -> None:
    change(
        store,
        copied_run(PARENT, "later", 1000),
        "INSERT INTO tags VALUES ('sweep', 'small', 'later'), ('kind', 'sweep', 'later')",
        "INSERT INTO tags VALUES ('run_key', 'another', 'later')",
        *second_copy(run_of("+helps", 0), "child", 0),
        "UPDATE tags SET value = 'later' WHERE key = 'mlflow.parentRunId' AND run_uuid = 'child'",
    )
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert "the newest of several sweeps of this name" in data.source and data.record.key == "another"
    assert data.runs["mlflow_run_id"].tolist() == ["child"]


def test_a_store_and_runs_that_were_moved(mirrored: Path, from_folders: SweepData, tmp_path: Path) -> None:
    """Answers come from the runs' new place, and never from a folder that holds another run."""
    with (
        closing(sqlite3.connect(mirrored / "mlflow.db")) as source,
        closing(sqlite3.connect(tmp_path / "mlflow.db")) as copy,
    ):
        source.backup(copy)
    shutil.copytree(mirrored / "mlflow_artifacts", tmp_path / "mlflow_artifacts")
    shutil.copytree(mirrored / "runs", tmp_path / "runs")
    change(
        tmp_path / "mlflow.db",
        "UPDATE tags SET value = '/gone' || value WHERE key = 'folder'",
        "UPDATE runs SET artifact_uri = '/gone' || artifact_uri",
    )
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    data = load_mlflow(uri, "small")
    assert_equal(data, from_folders, "runs", "points")
    assert data.answers.empty and data.answers.columns.tolist() == from_folders.answers.columns.tolist()
    assert data.source == "MLflow store mlflow.db"
    change(tmp_path / "mlflow.db", MOVED.format(f"/gone{mirrored}", tmp_path))
    assert_equal(load_mlflow(uri, "small"), from_folders)
    path = tmp_path / "runs/small/base/seed=0/run.json"
    write_json(path, json.loads(path.read_text()) | {"run_key": "of another run"})
    others = load_mlflow(uri, "small").answers
    assert set(others[["arm", "seed"]].itertuples(index=False, name=None)) == {
        ("base", 1),
        ("+helps", 0),
        ("+helps", 1),
    }


def test_a_damaged_table_of_answers_makes_the_run_unreadable_as_from_its_folder(
    mirrored: Path, store: Path, tmp_path: Path
) -> None:
    change(store, MOVED.format(mirrored, tmp_path))
    shutil.copytree(mirrored / "runs", tmp_path / "runs")
    (tmp_path / "runs/small/base/seed=0/eval/step=000006.parquet").write_bytes(b"PAR1 no more")
    data = load_mlflow(f"sqlite:///{store}", "small")
    assert row_of(data, "base", 0)["status"] == "unreadable"
    assert "step=000006.parquet is no table of answers" in row_of(data, "base", 0)["problem"]
    assert_equal(data, load_sweep(tmp_path / "runs", "small", cache=False), "points", "answers")


def test_messages_name_what_is_there_and_what_to_do(mirrored: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no sweep 'smal' in MLflow store mlflow\.db; there are: small"):
        load_mlflow(f"sqlite:///{mirrored}/mlflow.db", "smal")
    with pytest.raises(ValueError, match=r"there is no MLflow store .*none.db: give the path"):
        load_mlflow(f"sqlite:///{tmp_path}/none.db", "small")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text.db").write_text("no database at all, but long enough to be looked at as one")
    with pytest.raises(ValueError, match=r"text.db cannot be read as an MLflow store \(file is not a database\)"):
        load_mlflow(f"sqlite:///{tmp_path}/text.db", "small")
    with pytest.raises(ValueError, match=r"no such table: runs"):
        (tmp_path / "empty.db").touch()
        load_mlflow(f"sqlite:///{tmp_path}/empty.db", "small")
    with pytest.raises(ValueError, match="with four slashes"):
        load_mlflow("sqlite:///relative.db", "small")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_in_a_folder_that_cannot_be_written_is_read(store: Path, from_folders: SweepData) -> None:
    with closing(sqlite3.connect(store)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
    store.parent.chmod(0o555)
    try:
        assert_equal(load_mlflow(f"sqlite:///{store}", "small"), from_folders)
    finally:
        store.parent.chmod(0o755)


def test_no_password_and_no_path_gets_into_the_words_about_a_source() -> None:
    assert shown("https://me:secret@tracking.example.org:5000") == "MLflow at tracking.example.org"
    assert shown("postgresql+psycopg2://me:secret@db/mlflow") == "MLflow at db"
    assert shown("sqlite:////home/me/mlflow.db") == "MLflow store mlflow.db"


@pytest.mark.extended
def test_a_server_gives_what_the_folders_give(store: Path, from_folders: SweepData, tmp_path: Path) -> None:
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    with pytest.raises(ValueError, match=r"MLflow at 127.0.0.1 cannot be read \(.*start the server"):
        load_mlflow(uri, "small")
    change(store, *second_copy(run_of("base", 0), "older", -1000))
    with mlflow_server(store, tmp_path, port):
        settings = dict(os.environ)
        data = load_mlflow(uri, "small")
        assert os.environ == settings
        assert_equal(data, from_folders)
        twice = "runs that are in MLflow more than once: 1 (the newest counts)"
        assert data.record == from_folders.record
        assert data.source == f"MLflow at 127.0.0.1, {twice}, answers from 4 run folders"
        with pytest.raises(ValueError, match=r"no sweep \"a'b\" in MLflow at 127.0.0.1; there are: small"):
            load_mlflow(uri, "a'b")


# ---- one way in, one frame out


def test_runs_are_compared_where_they_are_asked_the_same_questions() -> None:
    """The path of a file says nothing of what is in it, and how often a suite is asked nothing of how."""
    config = {"task.path": "q.jsonl", "evaluation.every": 10, "optimizer.learning_rate": 1e-3, "scale": "std"}
    data = {"train": "a" * 16, "heldout": "b" * 16}
    same = protocol_of(config, data)
    assert same == protocol_of(config | {"evaluation.every": 5, "optimizer.learning_rate": 1e-4}, dict(data))
    others = [
        protocol_of(config),
        protocol_of(config, data | {"heldout": "c" * 16}),
        protocol_of(config | {"task.path": "p.jsonl"}, data),
        protocol_of(config | {"verifier.tolerance": 1e-3}, data),
    ]
    assert len({same, *others}) == 5
    assert protocol_of({}, data) is None


def test_one_way_in(mirrored: Path, from_folders: SweepData, tmp_path: Path) -> None:
    shutil.copytree(mirrored / "runs", tmp_path / "runs")
    folder, uri = str(tmp_path / "runs"), f"sqlite:///{mirrored}/mlflow.db"
    for source, words in ((folder, "run folders"), (uri, "MLflow store mlflow.db, answers from 4 run folders")):
        data = read_source(source, "small", None)
        assert_equal(data, from_folders)
        assert data.source == f"{words}, 3 finished runs"
    save_data(from_folders, tmp_path / "data")
    assert read_source(folder, "small", tmp_path / "data").source == ("run folders, 3 finished runs, saved data have 3")
    (tmp_path / "runs/small/base/seed=0/DONE").unlink()
    richer = read_source(folder, "small", tmp_path / "data")
    assert richer.source == "saved data, 3 finished runs, run folders have 2"
    assert read_source(str(tmp_path), "small", tmp_path / "data").source == "saved data, 3 finished runs"
    with pytest.raises(ValueError, match=r"there is no sweep 'x': .*runs has small; saved data in .*data has small"):
        read_source(folder, "x", tmp_path / "data")
    with pytest.raises(ValueError, match="there are: small"):
        read_source(uri, "x", tmp_path / "data")


def test_saved_in_less_room_with_six_digits(from_folders: SweepData, tmp_path: Path) -> None:
    points, near_one = from_folders.points, 1 - 1e-9
    data = replace(from_folders, points=points.assign(**{"mismatch/ess": near_one, "train/third": 1 / 3, "count": 3e9}))
    whole, compact = save_data(data, tmp_path / "whole"), save_data(data, tmp_path / "compact", compact=True)
    assert compact[0].stat().st_size < whole[0].stat().st_size
    assert compact[1].read_bytes() == whole[1].read_bytes()
    read = load_data(tmp_path / "compact", "small").points
    pd.testing.assert_frame_equal(read, load_data(tmp_path / "whole", "small").points, rtol=2**-20, atol=0)
    exact = [name for name in points.columns if name.startswith("budget/")]
    pd.testing.assert_frame_equal(read[exact], points[exact], check_exact=True)
    assert set(read["mismatch/ess"]) == {near_one} and set(read["count"]) == {3e9}
    assert set(read["train/third"]) == {round(2**21 / 3) / 2**21}  # 1/3 = 2/3 * 2^-1, and 2/3 to 20 bits


def test_a_column_that_repeats_another_is_saved_once(from_folders: SweepData, tmp_path: Path) -> None:
    own = from_folders.points.assign(**{"train/one": 1 / 3, "reward/again": 1 / 3, "train/other": 1 / 7})
    points = own[["train/one", *own.columns.drop(["train/one", "train/other"]), "train/other"]]
    table, _, described = save_data(replace(from_folders, points=points), tmp_path)
    stored = pd.read_parquet(table).columns
    assert "reward/again" not in stored and {"train/one", "train/other"} <= set(stored)
    place = list(points.columns).index("reward/again")
    assert [place, "reward/again", "train/one"] in json.loads(lzma.decompress(described.read_bytes()))["twins"]
    loaded = load_data(tmp_path, "small").points
    pd.testing.assert_frame_equal(loaded[points.columns], points, check_exact=True, check_dtype=False)
    save_data(load_data(tmp_path, "small"), tmp_path / "again")
    pd.testing.assert_frame_equal(load_data(tmp_path / "again", "small").points, loaded, check_exact=True)
