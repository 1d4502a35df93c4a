"""`grpo-lab diff`: what differs between two runs, and from which step on, on real runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from short_runs import SMALL, run_in_process

from grpo_lab import cli
from grpo_lab.reproduce.difference import differences
from grpo_lab.tracking import provenance
from grpo_lab.tracking.checksums import with_checksum

WORDS = (*SMALL, "budget.amount=3", "problems_per_step=4")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_in_process(tmp_path_factory.mktemp("plain"), *WORDS)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another surrogate and one step less: the first update is the first to differ."""
    return run_in_process(tmp_path_factory.mktemp("other"), *WORDS, "surrogate=cispo", "budget.amount=2", "seed=0")


def changed(run: Path, **record: object) -> None:
    """Write these entries into the run's record."""
    described = json.loads((run / "run.json").read_text()) | record
    described.pop("seal", None)
    (run / "run.json").write_text(json.dumps(with_checksum(described)))


def part(lines: list[str], title: str) -> list[str]:
    """The lines of one part, without its title."""
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{title}:"))
    after = next((number for number in range(at, len(lines)) if not lines[number]), len(lines))
    return lines[at:after]


@pytest.mark.extended
def test_a_run_and_its_copy_do_not_differ(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    lines = differences(plain, copy)
    for title in ("configuration", "code", "data and model", "machine"):
        assert part(lines, title) == [f"{title}: the same"]
    assert lines[-1] == "numbers: bit-identical, steps 0 to 3"


@pytest.mark.extended
def test_what_was_chosen_otherwise_and_since_when(
    plain: Path, other: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = differences(plain, other)
    assert lines[:2] == [f"A  {plain}: 3 steps", f"B  {other}: 2 steps"]
    rows = [line.split() for line in part(lines, "configuration")[2:]]
    assert ["surrogate", "ppo", "cispo"] in rows and ["budget.amount", "3.0", "2.0"] in rows
    assert not any("runs_dir" in line for line in lines), "where a run lies is no difference of it"
    (numbers,) = (line for line in lines if line.startswith("numbers:"))
    assert numbers.startswith("numbers: bit-identical before step 1. Metrics and columns that differ: ")
    assert any(line.split()[:2] == ["train/loss", "1"] for line in lines)
    monkeypatch.setattr("sys.argv", ["grpo-lab", "diff", str(plain), str(other), "--all"])
    cli.main()
    everything = capsys.readouterr().out.splitlines()
    assert len(everything) > len(lines) and not any("--all lists them" in line for line in everything)
    assert any("--all lists them" in line for line in lines)


def test_of_which_steps_responses_are_kept_is_no_difference_of_numbers(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    kept = sorted((copy / "rollouts").glob("step=*.parquet"))
    assert len(kept) > 1
    kept[1].unlink()
    assert differences(plain, copy)[-1] == "numbers: bit-identical, steps 0 to 3"
    shutil.rmtree(copy / "checkpoints")
    *_, numbers, said = differences(copy, plain)
    assert numbers == "numbers: bit-identical, steps 0 to 3" and said.endswith("no weights are compared.")
    (copy / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="has logged no step yet"):
        differences(plain, copy)


def test_code_data_and_machine(plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    described = json.loads((copy / "run.json").read_text())
    stretches = [{**described["stretches"][0], "sources": "0" * 64, "commit": "f" * 40}]
    changed(copy, stretches=stretches, data={"train": "1234"}, training={"of": 9})
    (copy / "base.json").write_text(json.dumps({"fingerprint": "another"}))
    environment = json.loads((copy / "environment.json").read_text())
    environment["packages"]["torch"] = "1.0"
    environment["cpu"]["model"] = "abacus"
    (copy / "environment.json").write_text(json.dumps(environment))
    lines = differences(plain, copy)
    assert {line.split()[0] for line in part(lines, "code")[2:]} >= {"sources", "commit", "torch"}
    assert any("lacks one of the two commits" in line for line in lines)
    assert any(line.split()[-1] == "abacus" for line in part(lines, "machine"))
    inputs = part(lines, "data and model")
    assert any(line.split() == ["data", "train", "-", "1234"] for line in inputs)
    assert any(line.split() == ["training:", "of", "-", "9"] for line in inputs)
    assert any("weights: fingerprint" in line and "another" in line for line in inputs)


def test_files_between_two_commits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that a run reads."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    names = ("grpo_lab/loop.py", "grpo_lab/cli.py", "conf/config.yaml", "tests/test_a.py", "README.md", "grpo_lab/a.py")
    commits = []
    for text in ("one", "two"):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("same" if name.endswith("a.py") and "tests" not in name else text)
        git("add", ".")
        git("commit", "-qm", text)
        commits.append(git("rev-parse", "HEAD").strip())
    monkeypatch.setattr(provenance, "_source_folder", lambda: tmp_path)
    assert provenance.changed_files(*commits) == ["conf/config.yaml", "grpo_lab/loop.py"]
    with pytest.raises(subprocess.CalledProcessError):
        provenance.changed_files(commits[0], "f" * 40)


def test_what_is_no_run_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no run: give a run's folder"):
        differences(plain, tmp_path)
    copy = Path(shutil.copytree(plain, tmp_path / "copy"))
    (copy / "run.json").write_text(json.dumps({"external": "trl"}))
    with pytest.raises(ValueError, match="is an imported run, or one of an early version"):
        differences(plain, copy)


@pytest.mark.extended
def test_a_run_is_named_by_its_title_as_well(plain: Path, other: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    for run, name in ((plain, "one"), (other, "two")):
        shutil.copytree(run, tmp_path / name / "seed=0")
    first, second = "one seed=0", "two seed=0"
    monkeypatch.setattr("sys.argv", ["grpo-lab", "diff", first, second, "--runs", str(tmp_path)])
    cli.main()
    assert capsys.readouterr().out.startswith(f"A  {tmp_path}/{first.replace(' ', '/')}: ")
    monkeypatch.setattr("sys.argv", ["grpo-lab", "diff", first, "plain", "--runs", str(tmp_path)])
    with pytest.raises(SystemExit) as refusal:
        cli.main()
    assert (
        f"there is no run 'plain' in {tmp_path}; there are: {first}, {second}"
        in str(refusal.value) + capsys.readouterr().err
    )
