"""Both GPU commands run with few packages besides torch and transformers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bare_environment as bare
import pytest
import run as driver
from bare_machine import beyond


def hiding(*packages: str) -> dict[str, str]:
    """The environment of processes that find these packages, what they bring, and no others."""
    return {**os.environ, "HIDDEN_PACKAGES": " ".join(sorted(beyond(*packages)))}


@pytest.mark.extended
def test_a_sweep_and_its_data_need_no_other_package(tmp_path: Path, tiny_base: Path) -> None:
    bare.rehearse(bare.sweep_commands(sys.executable, tmp_path), hiding(*bare.PACKAGES))
    assert len(list(tmp_path.glob("runs/*/seed=*/DONE"))) == 2 and list((tmp_path / "data").iterdir())


@pytest.mark.extended
def test_the_study_of_a_pretrained_model_needs_no_other_package(tmp_path: Path) -> None:
    commands = bare.study_commands(sys.executable, tmp_path, "--only", "gpu_real")
    bare.rehearse(commands, hiding(*bare.PACKAGES, *bare.STUDY))
    assert len(list(tmp_path.glob("study/*/seed=0/DONE"))) == 3 and list((tmp_path / "data").iterdir())


@pytest.mark.extended
def test_the_parts_of_make_gpu_import_no_other_package() -> None:
    scripts = [part.file.stem for part in driver.PARTS.values()]
    code = f"import findings, {', '.join([*scripts, 'one_of_many'])}"
    bare.rehearse(iter([[sys.executable, "-c", code]]), hiding(*bare.PACKAGES))


@pytest.mark.extended
def test_the_shortest_part_of_make_gpu_needs_no_other_package(tmp_path: Path) -> None:
    """With the process that runs it."""
    bare.rehearse(bare.part_commands(sys.executable, tmp_path, ["profile"]), hiding(*bare.PACKAGES))


@pytest.mark.extended
def test_what_a_bare_machine_lacks_is_hidden() -> None:
    """Else the tests here could not fail."""
    names = {"setproctitle", "psutil", "jaxtyping", "mlflow", "datasets", "pytest"}
    code = f"from importlib.util import find_spec; print(*filter(find_spec, {sorted(names)} + ['torch']))"
    done = subprocess.run([sys.executable, "-c", code], env=hiding(*bare.PACKAGES), capture_output=True, text=True)
    assert done.stdout.split() == ["torch"], done.stderr


@pytest.mark.extended
@pytest.mark.timeout(3000)
def test_the_rehearsal_in_an_environment_of_its_own(tmp_path: Path) -> None:
    """Of pip, minutes; then all commands, with every part of `make gpu`."""
    script = [sys.executable, str(Path(bare.__file__)), str(tmp_path / "environment")]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("all ended well") == 3
