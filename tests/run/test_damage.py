"""Run folders that were damaged, mixed or made with other code: never taken for whole, always named."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import grimp
import pytest
from damage import GOOD, Prepared, choose, compare, files_in, outcome, run
from helpers import PACKAGE, shapes_unchecked
from processes import python_path

from grpo_lab.analysis.caveats import caveats, notes
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.tracking import provenance
from grpo_lab.tracking.checksums import CHECKSUM, check_manifest, read_checksummed, with_checksum
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> dict[str, Path]:
    return Prepared(tmp_path_factory.mktemp("prepared"))


@pytest.fixture
def copy_of(folders: dict[str, Path], tmp_path: Path):
    """copy_of(stage): a copy of the run at that stage, in a folder of runs of its own."""

    def copy(stage: str) -> Path:
        with shapes_unchecked():
            made = folders[stage]
        return Path(shutil.copytree(made, tmp_path / "runs" / "run" / "seed=0"))

    return copy


def start_again(folder: Path, *overrides: str) -> str:
    with shapes_unchecked():
        return run(folder.parent.parent, "seed=0", *overrides)


def flip(path: Path) -> None:
    """Sixty-four bytes in the middle, as a bad disk or a bad copy leaves them; no length changes."""
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    for place in range(middle, min(middle + 64, len(content))):
        content[place] ^= 0x5A
    path.write_bytes(content)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


@pytest.mark.extended
def test_seeded_damages_end_in_the_undisturbed_bits_or_in_words_that_name_the_file(folders: dict[str, Path]) -> None:
    """A short form of `python tests/shared/damage.py`: every kind of damage at every stage."""
    with shapes_unchecked():
        came = {str(damage): outcome(damage, folders, 0) for damage in choose(folders, random.Random(0), 24)}
    assert {said: what for said, what in came.items() if what not in GOOD} == {}
    assert set(came.values()) >= {"same", "refused"}


# ---- checkpoints


OTHERS = [pytest.param(name, marks=pytest.mark.extended) for name in ("model.safetensors", "manifest.json")]


@pytest.mark.extended
@pytest.mark.parametrize("name", ["state.pt", *OTHERS])
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(copy_of, folders: dict[str, Path], name: str) -> None:
    folder = copy_of("between")
    path = folder / "checkpoints" / "step=000004" / name
    flip(path)
    said = start_again(folder)
    assert f"{path} " in said and "an older checkpoint, step=000002, is used" in said
    assert compare(folder, folders["whole"], said) == "same"


@pytest.mark.extended
def test_where_no_checkpoint_is_whole_the_run_refuses_and_names_what_is_wrong(copy_of) -> None:
    folder = copy_of("between")
    (folder / "checkpoints" / "step=000004" / "state.pt").unlink()
    short = folder / "checkpoints" / "step=000002" / "model.safetensors"
    short.write_bytes(short.read_bytes()[:1000])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(ValueError, match="no checkpoint of this run can be used") as refused:
        start_again(folder)
    assert f"{folder}/checkpoints/step=000004/state.pt is missing" in str(refused.value)
    assert f"{short} is damaged" in str(refused.value) and "restore it from a copy" in str(refused.value)
    assert {path: path.read_bytes() for path in before} == before, "what refuses changes nothing"


@pytest.mark.extended
def test_a_checkpoint_of_another_run_or_step_is_not_this_runs(copy_of, folders: dict[str, Path]) -> None:
    folder = copy_of("between")
    newest = folder / "checkpoints" / "step=000004"
    shutil.rmtree(newest)
    shutil.copytree(folders["other"] / "checkpoints" / "step=000004", newest)
    assert f"{newest}/manifest.json is of step 4 of the run" in (said := start_again(folder))
    assert compare(folder, folders["whole"], said) == "same"
    key = read(folder / "run.json")["run_key"]
    shutil.copytree(folder / "checkpoints" / "step=000004", folder / "checkpoints" / "step=000009")
    with pytest.raises(ValueError, match=r"step=000009/manifest.json is of step 4 of the run"):
        check_manifest(folder / "checkpoints" / "step=000009", key)


@pytest.mark.extended
def test_a_failures_state_has_digests_too(folders: dict[str, Path]) -> None:
    (saved,) = (folders["failure"] / "failure").iterdir()
    manifest = check_manifest(saved, read(folders["failure"] / "run.json")["run_key"])
    assert {"model.safetensors", "state.pt", "config.json"} <= manifest["files"].keys()


# ---- a finished run


def test_what_a_finished_run_began_with_is_inside_its_digests(copy_of) -> None:
    """And a run of an earlier version, whose DONE knows nothing of it, stays valid."""
    folder = copy_of("done")
    base, done = folder / "base.json", folder / "DONE"
    content = base.read_text()
    base.write_text(json.dumps(read(base) | {"fingerprint": "0" * 16}))
    with pytest.raises(ValueError, match=f"this run is finished, but {base} is damaged"):
        start_again(folder)
    base.unlink()
    assert f"{base} is missing" in start_again(folder)
    base.write_text(content.replace("{", "{ "))
    older = read(done)
    del older["files"]["base.json"]
    done.write_text(json.dumps(with_checksum(older)))
    assert "this run is finished" in start_again(folder)


def test_every_file_of_a_finished_run_has_a_digest(folders: dict[str, Path]) -> None:
    folder = folders["done"]
    known = set(read(folder / "DONE")["files"]) | {"DONE", "system.jsonl", "mlflow.json"}
    for manifest in folder.glob("*/step=*/manifest.json"):
        known |= {(manifest.parent / name).relative_to(folder).as_posix() for name in read(manifest)["files"]}
    assert set(files_in(folder)) <= known


@pytest.mark.extended
def test_files_of_a_run_follow_the_umask(folders: dict[str, Path], copy_of) -> None:
    """A group that shares a runs folder reads each other's weights, and a user who hides files hides all of them."""
    folder = copy_of("before")
    before = os.umask(0o002)
    try:
        start_again(folder)
    finally:
        os.umask(before)
    fresh = [path for path in (folder / "checkpoints").rglob("*") if path.is_file()]
    assert any(path.name == "model.safetensors" for path in fresh)
    assert {path.stat().st_mode & 0o777 for path in [*fresh, folder / "DONE"]} == {0o664}
    usual = folders["done"]
    mode = (usual / "DONE").stat().st_mode
    assert {path: path.stat().st_mode for path in usual.rglob("*") if path.is_file()} == {
        path: mode for path in usual.rglob("*") if path.is_file()
    }


# ---- the log


@pytest.mark.extended
def test_a_log_cut_short_is_called_that_and_the_checkpoint_that_fits_is_used(copy_of, folders: dict[str, Path]) -> None:
    folder = copy_of("between")
    log = folder / "metrics.jsonl"
    stamps = [read(path / "manifest.json")["log"] for path in sorted((folder / "checkpoints").iterdir())]
    log.write_bytes(log.read_bytes()[: stamps[1]["bytes"] - 10])
    lines = b"".join(log.read_bytes().splitlines(keepends=True)[:-1])
    said = start_again(folder)
    assert (
        f"{log} has {len(lines)} bytes, and the checkpoint was saved at {stamps[1]['bytes']}: it was cut short" in said
    )
    assert compare(folder, folders["whole"], said) == "same"


def test_a_log_shorter_than_every_checkpoint_or_of_other_bytes_is_refused(copy_of) -> None:
    folder = copy_of("between")
    log = folder / "metrics.jsonl"
    content = log.read_bytes()
    log.write_bytes(content.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match=rf"{log} has \d+ bytes, .* it was cut short; {log} has"):
        start_again(folder)
    log.write_bytes(content.replace(b'"reward/mean": 0', b'"reward/mean": 1', 1))
    with pytest.raises(ValueError, match=f"{log} is damaged: its first"):
        start_again(folder)


def test_a_damaged_end_that_is_rewound_anyway_is_no_trouble(copy_of, folders: dict[str, Path]) -> None:
    folder = copy_of("between")
    with (folder / "metrics.jsonl").open("ab") as log:
        log.write(b"garbage\n")
    assert compare(folder, folders["whole"], start_again(folder)) == "same"


@pytest.mark.parametrize("line", [b"garbage", b"{}", b"3"])
def test_a_line_that_is_no_step_is_named(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(line + b"\n")
    with RunLog(tmp_path) as log, pytest.raises(ValueError, match=f"{tmp_path}/metrics.jsonl has a line .* remove"):
        log.write_step(0, {}, {})


# ---- run.json and DONE


@pytest.mark.parametrize("stage", ["between", "done"])
@pytest.mark.parametrize("content", [None, b"", b"garbage", b"[]", b'{"identity": {}}'], ids=repr)
def test_a_run_json_that_is_lost_or_damaged_is_named_and_nothing_written(
    copy_of, stage: str, content: bytes | None
) -> None:
    folder = copy_of(stage)
    path = folder / "run.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    config = (folder / "config.yaml").read_bytes()
    with pytest.raises(ValueError, match=f"{path} .*restore it from a copy, or move"):
        start_again(folder, "optimizer.learning_rate=2e-3")
    assert (folder / "config.yaml").read_bytes() == config and path.exists() == (content is not None)


@pytest.mark.few(2)
@pytest.mark.parametrize("content", [b"", b"garbage", b"{}"], ids=repr)
def test_a_damaged_done_is_named_and_without_it_the_run_ends_as_it_did(
    copy_of, folders: dict[str, Path], content: bytes
) -> None:
    folder = copy_of("done")
    (folder / "DONE").write_bytes(content)
    with pytest.raises(ValueError, match=f"{folder}/DONE .*remove it and start the same command again"):
        start_again(folder)
    (folder / "DONE").unlink()
    assert compare(folder, folders["whole"], start_again(folder)) == "same"
    assert read(folder / "DONE")["last"] == read(folders["whole"] / "DONE")["last"]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "eval/step=000002.parquet", "checkpoints/step=000006/model.safetensors", "DONE"]
)
def test_a_finished_run_whose_result_is_damaged_is_not_shown_as_finished(copy_of, name: str) -> None:
    folder = copy_of("done")
    path = folder / name
    if name == "DONE":
        path.write_text(path.read_text().replace('"steps": 6', '"steps": 7'))
    else:
        path.write_bytes(path.read_bytes().replace(b"1", b"2"))
    with pytest.raises(ValueError, match=f"{path} is damaged: it is not what was written; restore it"):
        start_again(folder)


def test_what_stands_beside_a_finished_result_is_named_when_it_is_gone(copy_of) -> None:
    folder = copy_of("done")
    shutil.rmtree(folder / "checkpoints")  # to make room, as people do
    (folder / "rollouts" / "step=000003.parquet").write_bytes(b"")
    said = start_again(folder)
    assert f"{folder}/checkpoints/step=000006/manifest.json is missing" in said
    assert f"{folder}/rollouts/step=000003.parquet is damaged" in said and "this run is finished" in said


def test_a_run_that_an_earlier_version_finished_is_taken_with_a_word(copy_of) -> None:
    """Such a run has no digests anywhere; one of today's that has lost its own is damaged."""
    folder = copy_of("done")
    done, described = read(folder / "DONE"), read(folder / "run.json")
    old = {name: done[name] for name in ("steps", "first", "last", "budget", "no_ops", "warnings")}
    (folder / "DONE").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="DONE has no digest"):
        start_again(folder)
    (folder / "run.json").write_text(json.dumps({key: value for key, value in described.items() if key != CHECKSUM}))
    assert "an earlier version of grpo_lab finished this run" in start_again(folder)
    (folder / "DONE").unlink()
    with pytest.raises(ValueError, match=r"run\.json has no digest"):
        start_again(folder)


# ---- tables


def sweep_of_one(folder: Path) -> Path:
    """The runs_dir of a folder, in which a sweep `one` has it as its only run."""
    runs = folder.parent.parent
    entries = [RunEntry("plain", "", 0, folder.relative_to(runs).as_posix())]
    record_sweep(runs, "one", entries, None, None, "", [], None, None)
    return runs


def said_of(runs: Path) -> tuple[list[str], list[str]]:
    data = load_sweep(runs, "one")
    outcome_ = final_values(data)
    return caveats(data, outcome_), notes(data, outcome_)


@pytest.mark.extended
def test_a_lost_evaluation_is_named_at_resume_in_done_and_in_figures(
    copy_of, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = copy_of("between")
    (folder / "eval" / "step=000002.parquet").unlink()
    said = start_again(folder)
    assert f"{folder}/eval/step=000002.parquet is missing" in said
    assert "lost while it ran: eval/step=000002.parquet" in said
    assert read(folder / "DONE")["lost"] == ["eval/step=000002.parquet"]
    assert compare(folder, folders["whole"], said) == "same but for a table"
    (folder / "eval" / "step=000006.parquet").unlink()  # and one after the end
    for lines in said_of(sweep_of_one(folder)):
        assert any(line.startswith("1 runs have lost evaluation tables: plain seed 0 (step 2, 6)") for line in lines)
    whole = Path(shutil.copytree(folders["whole"], tmp_path / "whole" / "run" / "seed=0"))
    assert not any("lost evaluation" in line for lines in said_of(sweep_of_one(whole)) for line in lines)


def test_a_damaged_evaluation_that_would_be_kept_is_refused(copy_of) -> None:
    folder = copy_of("between")
    path = folder / "eval" / "step=000002.parquet"
    flip(path)
    with pytest.raises(ValueError, match=f"{path} is damaged: .* restore it from a copy, or delete it"):
        start_again(folder)


def test_figures_do_not_draw_numbers_that_the_finished_run_did_not_write(copy_of) -> None:
    folder = copy_of("done")
    runs = sweep_of_one(folder)
    assert list(load_sweep(runs, "one").runs["status"]) == ["done"]
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"reward/mean": 0', b'"reward/mean": 1', 1))
    (row,) = load_sweep(runs, "one").runs.to_dict("records")
    assert row["status"] == "unreadable" and f"{log} is damaged" in row["problem"]


# ---- code


@pytest.fixture
def plugin(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of the user's, as bootstrap imports it; a fresh name, so that no other test knows it."""
    with shapes_unchecked():  # runs that were made without it
        assert all(folders[stage].exists() for stage in ("before", "between", "whole"))
    path = tmp_path / f"plugin_of_{tmp_path.name}.py"
    path.write_text("NUMBER = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("GRPO_LAB_PLUGINS", path.stem)
    return path


def test_other_code_is_refused_or_recorded_wherever_the_run_is_shown(copy_of, plugin: Path) -> None:
    """The run was made without the plugin, which could have changed anything."""
    folder = copy_of("between")
    with pytest.raises(ValueError, match=r"two versions from step 4 on .*resume_with_changed_code=true"):
        start_again(folder)
    said = start_again(folder, "resume_with_changed_code=true")
    assert "the code is not the one this run was made with up to step 4: sources of grpo_lab or of plugins" in said
    assert "resumed with changed code after step 4" in said
    for name in ("run.json", "DONE"):
        first, second = read(folder / name)["stretches"]
        assert (first["from_step"], second["from_step"]) == (0, 4) and first["sources"] != second["sources"]
        assert second["packages"]["torch"] and {"commit", "dirty", "diff_sha256"} <= second.keys()
    for lines in said_of(sweep_of_one(folder)):
        assert (
            "1 runs were resumed with changed code, so they mix two versions or more: plain seed 0 (after step 4)."
            in lines
        )


@pytest.mark.extended
def test_code_is_compared_with_what_made_the_steps_that_are_kept(
    copy_of, folders: dict[str, Path], plugin: Path
) -> None:
    """A run begun anew, or that goes on from before a change, has nothing of the other code in it."""
    folder = copy_of("before")
    said = start_again(folder)
    assert "the run begins again, at step 0" in said and compare(folder, folders["whole"], said) == "same"
    assert len(read(folder / "DONE")["stretches"]) == 1
    (folder / "DONE").unlink()
    plugin.write_text("NUMBER = 2\n")
    start_again(folder, "resume_with_changed_code=true")
    assert [part["from_step"] for part in read(folder / "DONE")["stretches"]] == [0, 6]
    (folder / "DONE").unlink()
    plugin.write_text("NUMBER = 1\n")
    assert "changed code" not in start_again(folder), "what changed at step 6 made nothing"
    assert [part["from_step"] for part in read(folder / "DONE")["stretches"]] == [0]


def test_a_change_of_version_is_a_change_of_code(copy_of, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy_of("between")
    monkeypatch.setattr(provenance, "_packages", lambda: {"torch": "9.9", "pandas": "9.9"})
    with pytest.raises(ValueError, match=r"torch: 2\.[^ ]* there, 9\.9 now"):
        start_again(folder)


def test_code_is_what_a_run_reads_and_nothing_else(tmp_path: Path) -> None:
    """Without git, in an installed package: a copy stands for one."""
    package = tmp_path / "grpo_lab"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))

    def sources() -> str:
        command = [sys.executable, "-c", "from grpo_lab.tracking import provenance as p; print(p.code()['sources'])"]
        environment = {**os.environ, "PYTHONPATH": python_path(tmp_path), "GRPO_LAB_PLUGINS": ""}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return done.stdout

    before = sources()
    for name in ("cli.py", "README.md", "analysis/build.py", "config/design.py", "sweeps/progress_display.py"):
        (package / name).write_text((package / name).read_text() + "\n# changed\n")
    (tmp_path / "test_it.py").write_text("")
    assert sources() == before
    text = (package / "tricks" / "baseline.py").read_text()
    (package / "tricks" / "baseline.py").write_text(text.replace(" - ", " + ", 1))
    assert sources() != before


def test_the_loop_reads_nothing_that_does_not_count_as_code() -> None:
    graph = grimp.build_graph("grpo_lab", exclude_type_checking_imports=True, cache_dir=None)
    # What a launcher is told is read from the folder, when the run has ended.
    graph.remove_import(importer="grpo_lab.train", imported="grpo_lab.sweeps.objective")
    read = graph.find_upstream_modules("grpo_lab.loop") | graph.find_upstream_modules("grpo_lab.train")
    seen = {name.removeprefix("grpo_lab.") for name in read}
    left_out = tuple(name.removesuffix(".py").rstrip("/").replace("/", ".") for name in provenance._NOT_OF_A_RUN)
    assert {name for name in seen if name.startswith(left_out)} <= {"sweeps.child"}, "which watches a parent process"
    assert {"learner.loss", "tricks.baseline", "tracking.run_log"} <= seen


def test_a_sealed_object_shows_every_change(tmp_path: Path) -> None:
    text = json.dumps(with_checksum({"seed": 0, "ranks": [{"from_step": 0, "number": 1}]}))
    path = tmp_path / "run.json"
    path.write_text(text)
    assert read_checksummed(path, "mend it") == json.loads(text)
    for old, new in (('"seed": 0', '"seed": 1'), (CHECKSUM, "sha255"), ('"from_step"', '"from_stop"')):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ValueError, match=f"{path} .*; mend it"):
            read_checksummed(path, "mend it")
