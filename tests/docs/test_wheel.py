"""The wheel holds code, configuration, declarations and base models, and works without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from declared_experiments import FOLDERS
from processes import python_path

ROOT = Path(__file__).parents[2]
BESIDES_BASES = 1.5  # MB of everything but the base models


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.mark.extended
def test_it_takes_declarations_and_neither_data_nor_figures(wheel: Path) -> None:
    entries = zipfile.ZipFile(wheel).infolist()
    names = {entry.filename for entry in entries}
    declarations = {f"grpo_lab/{(folder / 'design.yaml').relative_to(ROOT).as_posix()}" for folder in FOLDERS.values()}
    assert {name for name in names if name.startswith("grpo_lab/experiments/")} == declarations
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"grpo_lab"}
    assert "grpo_lab/conf/config.yaml" in names
    report = {name.removeprefix("grpo_lab/analysis/report/") for name in names}
    assert {"templates/page.html", "templates/panel.js", "uPlot-1.6.32.zip"} <= report
    size = sum(entry.compress_size for entry in entries if not entry.filename.startswith("grpo_lab/bases/"))
    assert size < BESIDES_BASES * 1e6


@pytest.mark.extended
def test_an_experiment_is_found_in_it(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path / "site", [name for name in opened.namelist() if "/bases/" not in name])
    command = [
        sys.executable,
        "-m",
        "grpo_lab.train",
        "+experiments=overlong",
        "hydra.sweeper.dry_run=true",
        "tracking=none",
    ]
    own = {"PYTHONPATH": python_path(tmp_path / "site"), "GRPO_LAB_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, **own})
    assert done.returncode == 0 and "50 runs" in done.stdout + done.stderr, done.stdout + done.stderr
