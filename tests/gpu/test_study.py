"""`make gpu-real` without a GPU: its slices, and the parts in which a model's file travels."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import bare_environment as bare
import parts
import pytest
import study

from grpo_lab.config.design import named_design

ROOT = Path(__file__).parents[2]


def test_a_file_travels_in_parts(tmp_path: Path) -> None:
    """The last part is shorter; a missing and a damaged one are named, and nothing is written."""
    file = tmp_path / "model.whl"
    file.write_bytes(random.Random(0).randbytes(2500))
    index = parts.split(file, tmp_path / "there", size=1000)
    there = sorted(path.name for path in index.parent.iterdir())
    assert there == ["model.whl.000", "model.whl.001", "model.whl.002", "model.whl.json"]
    second, third = (index.parent / name for name in there[1:3])
    content = third.read_bytes()
    third.unlink()
    second.write_bytes(second.read_bytes()[::-1])
    with pytest.raises(
        ValueError, match=r"of 3 parts of model\.whl .* copy them again: model\.whl\.001, model\.whl\.002"
    ):
        parts.join(index)
    assert not (index.parent / "model.whl").exists()
    second.write_bytes(second.read_bytes()[::-1])
    third.write_bytes(content)
    assert parts.join(index).read_bytes() == file.read_bytes()
    known = json.loads(index.read_text())
    known["parts"] = known["parts"][:2]
    index.write_text(json.dumps(known))
    with pytest.raises(ValueError, match="is not of these parts"):
        parts.join(index)


def test_a_part_and_the_repository_travel_in_64_mib() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    assert sum(file.stat().st_size for file in files if file.is_file()) + parts.PART_BYTES < 64 * 2**20


def test_parts_of_the_size_that_travels(tmp_path: Path) -> None:
    """From the command line."""
    file = tmp_path / "large"
    file.write_bytes(bytes(parts.PART_BYTES + 1))
    for words in (["split", str(file), str(tmp_path / "there")], ["join", str(tmp_path / "there" / "large.json")]):
        subprocess.run([sys.executable, parts.__file__, *words], check=True, capture_output=True)
    assert (tmp_path / "there" / "large.000").stat().st_size == parts.PART_BYTES
    with (tmp_path / "there" / "large").open("rb") as whole, file.open("rb") as source:
        assert hashlib.file_digest(whole, "sha256").digest() == hashlib.file_digest(source, "sha256").digest()


def test_the_study_asks_what_it_is_for() -> None:
    proxy, recipes = map(named_design, study.EXPERIMENTS)
    assert set(proxy.arms) == {"lenient", "soft_overlong", "strict"} and len(recipes.arms) == 8
    assert {word for arm in recipes.arms.values() for word in arm} == {f"recipe={name}" for name in recipes.arms}


@pytest.mark.extended
@pytest.mark.timeout(1200)
def test_the_same_command_goes_on_after_a_slice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted while its first runs train; then to its end, with the data of both sweeps."""
    model = tmp_path / "model"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(bare.HERE), os.environ["PYTHONPATH"]])}
    subprocess.run([sys.executable, "-c", bare.MODEL, str(model)], env=environment, check=True)
    own = {"budget.amount": "20", "task.response_tokens": "80"}  # which override what the rehearsal sets
    size = [word for word in bare.SMALL_STUDY if word.partition("=")[0] not in own]
    size += [f"{key}={value}" for key, value in own.items()]
    words = ["study.py", "--runs", str(tmp_path / "runs"), "--only", "gpu_real", "--to", str(tmp_path / "data")]
    words += [*size, f"model.path={model}"]
    monkeypatch.setenv("PYTHONPATH", environment["PYTHONPATH"])
    for slice in ("100", "1100"):
        monkeypatch.setattr(sys, "argv", [*words, "--slice", slice])
        study.main()
        if slice == "100":
            left = [path for path in tmp_path.glob("runs/*/seed=0") if not (path / "DONE").exists()]
            assert left and not (tmp_path / "data").exists(), "the slice was long enough for all"
    assert list((tmp_path / "data").iterdir()) and len(list(tmp_path.glob("runs/*/seed=0/DONE"))) == 3
