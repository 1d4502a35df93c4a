"""Submissions: packed from run folders, checked, added to a checkout, and each fault of one is named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_lab import cli
from grpo_lab.config.folders import experiments_folder
from grpo_lab.instruments.submission import FILE, add, check, pack
from grpo_lab.tracking.checksums import digest_of, with_checksum

EXAMPLE = experiments_folder() / "external" / "example_tiny_scale"
NAME = EXAMPLE.name


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the example."""
    return shutil.copytree(EXAMPLE, tmp_path / "submitted")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The experiments of another checkout, with one of its own."""
    (tmp_path / "checkout" / "length_bias").mkdir(parents=True)
    shutil.copy(experiments_folder() / "length_bias" / "design.yaml", tmp_path / "checkout" / "length_bias")
    return tmp_path / "checkout"


def resealed(folder: Path, change: Callable[[dict[str, Any]], object] = lambda described: None) -> None:
    """Write submission.json anew, as somebody would who changes files and digests together."""
    described = json.loads((folder / FILE).read_text())
    described["files"] = {name: digest_of(folder / name) for name in described["files"]}
    change(described)
    (folder / FILE).write_text(json.dumps(with_checksum(described)))


def test_the_example_is_small_labelled_and_whole() -> None:
    design, data, described = check(EXAMPLE, experiments_folder())
    assert design.name == NAME and described["example"] is True and len(data.finished) == 8
    assert sum(path.stat().st_size for path in EXAMPLE.rglob("*") if path.is_file()) < 100_000
    text = (EXAMPLE / FILE).read_text()
    assert not any(word in text for word in ("/tmp", "/home", "root", "user")), "nothing personal"
    assert "no evidence" in (EXAMPLE / "README.md").read_text()


def test_it_is_added_and_added_once(folder: Path, checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["claims", "--add", str(folder), "--experiments", str(checkout)])
    told = capsys.readouterr().out
    assert "supported: none within group_std" in told and "declared 2026" in told
    assert check(checkout / "external" / NAME, checkout)[0].name == NAME
    with pytest.raises(ValueError, match="exists: remove it first"):
        add(folder, checkout)
    with pytest.raises(SystemExit, match="give --pack NAME"):
        cli.main(["claims"])


def test_the_table_shows_it_apart(folder: Path, checkout: Path) -> None:
    from pages.external import EXTERNAL_HEAD, external_table

    assert external_table(checkout).splitlines()[0] == EXTERNAL_HEAD and "none yet" in external_table(checkout)
    add(folder, checkout)
    (row,) = external_table(checkout).splitlines()[2:]
    assert row.startswith(f"| [{NAME}](external/{NAME}/README.md) (example, no evidence) |")
    assert "leaving the deviation out raises accuracy" in row and "equivalent within the margin" in row
    (checkout / "external" / NAME / "README.md").write_text("edited")
    with pytest.raises(ValueError, match=r"README\.md is not what was packed"):
        external_table(checkout)


def test_no_experiment_of_ours_reads_it() -> None:
    from pages.saved_sweeps import saved_sweeps

    assert NAME not in saved_sweeps(experiments_folder()).folders


def _of_files(folder: Path) -> None:
    (folder / "data" / f"{NAME}.parquet").write_bytes(b"x")


def _missing(folder: Path) -> None:
    (folder / "data" / f"{NAME}.answers.parquet").unlink()


def _unlisted(folder: Path) -> None:
    (folder / "data" / "more.py").write_text("print()")


def _template(folder: Path) -> None:
    (folder / "README.md").write_text("# short\n<!-- -->")
    resealed(folder)


def _other_prediction(folder: Path) -> None:
    path = folder / "design.yaml"
    path.write_text(path.read_text().replace("direction: within", "direction: above"))
    resealed(folder)


def _more_seeds(folder: Path) -> None:
    path = folder / "design.yaml"
    path.write_text(path.read_text().replace("7004]", "7004, 7005, 7006, 7007, 7008]"))
    resealed(folder)


def _fewer_seeds(folder: Path) -> None:
    path = folder / "design.yaml"
    path.write_text(path.read_text().replace(", 7004]", "]").replace("bases: 4", "bases: 3"))
    resealed(folder)


def _runs(**changes: object) -> Callable[[Path], None]:
    return lambda folder: resealed(folder, lambda described: described["runs"][3].update(changes))


def _without_a_run(folder: Path) -> None:
    resealed(folder, lambda described: described["runs"].pop())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (_of_files, r"parquet is not what was packed"),
        (_missing, r"answers\.parquet is missing"),
        (_unlisted, r"more\.py is not listed"),
        (_template, r"README\.md is not written"),
        (_other_prediction, r"the data are of another declaration"),
        (_more_seeds, r"8 declared runs have not ended, such as group_std seed 7005"),
        (_fewer_seeds, r"2 runs were not declared, such as group_std seed 7004"),
        (_runs(first_step="2026-01-01T00:00:00Z"), r"1 runs made their first step \(2026-01-01T00:00:00Z\) before"),
        (_runs(first_step=""), r"at an unknown time"),
        (_runs(dirty=True), r"1 runs had changes of the code that no commit holds"),
        (_runs(commit="0" * 40), r"the runs are of several commits"),
        (_runs(segments=[{"from_step": 0, "sources": "x", "packages": {}}]), r"code or versions of packages changed"),
        (_runs(run_key="0" * 32), r"the runs in submission\.json are not those of the data"),
        (_without_a_run, r"the runs in submission\.json are not those of the data"),
    ],
)
def test_every_fault_is_named(folder: Path, checkout: Path, fault: Callable[[Path], None], message: str) -> None:
    fault(folder)
    with pytest.raises(ValueError, match=message):
        check(folder, checkout)
    with pytest.raises(SystemExit, match=message):
        cli.main(["claims", "--add", str(folder), "--experiments", str(checkout)])
    assert not (checkout / "external").exists()


def test_an_edited_description_and_a_name_of_ours_are_refused(folder: Path, checkout: Path) -> None:
    text = (folder / FILE).read_text()
    (folder / FILE).write_text(text.replace('"example": true', '"example": false'))
    with pytest.raises(ValueError, match="is damaged"):
        check(folder, checkout)
    (folder / FILE).write_text(text)
    shutil.copytree(checkout / "length_bias", checkout / NAME)
    with pytest.raises(ValueError, match="example_tiny_scale is another experiment here"):
        check(folder, checkout)
    shutil.rmtree(checkout / NAME)
    shutil.copytree(EXAMPLE, checkout / NAME)
    with pytest.raises(ValueError, match="these runs are those of"):
        check(folder, checkout)


@pytest.mark.extended
def test_a_sweep_from_outside_is_packed_and_added(tmp_path: Path, checkout: Path) -> None:
    """A user's declaration in a folder of theirs, run, packed, and added to another checkout."""
    import os
    import subprocess
    import sys

    mine = tmp_path / "mine" / "experiments"
    mine.mkdir(parents=True)
    text = (EXAMPLE / "design.yaml").read_text().replace(NAME, "outside").replace("budget.amount=24", "budget.amount=2")
    text = text.replace("bases: 4", "bases: 2").replace("[7001, 7002, 7003, 7004]", "[1, 2]")
    (mine / "outside.yaml").write_text(text)
    runs = tmp_path / "runs"
    command = [sys.executable, "-m", "grpo_lab.train", "+experiments=outside", "tracking=none", f"runs_dir={runs}"]
    environment = {**os.environ, "GRPO_LAB_CONFIG_PATH": str(mine.parent)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    to = pack("outside", runs, mine / "outside.yaml", tmp_path / "packed", False)
    with pytest.raises(ValueError, match=r"README\.md is not written"):
        check(to, checkout)
    (to / "README.md").write_text("# outside\n\n" + "Run on one machine, and nothing had been seen before. " * 5)
    pack("outside", runs, mine / "outside.yaml", to, False)
    described = json.loads((to / FILE).read_text())
    assert len(described["runs"]) == 4 and all(one["first_step"] <= one["last_step"] for one in described["runs"])
    if any(one["dirty"] for one in described["runs"]):  # a checkout that is worked on
        with pytest.raises(ValueError, match=r"4 runs had changes of the code that no commit holds"):
            check(to, checkout)
    else:
        assert add(to, checkout) == checkout / "external" / "outside"
