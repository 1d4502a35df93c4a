"""Wheel and source distribution hold code, configuration, declarations and base models, and need no repository."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from declared_experiments import FOLDERS
from processes import python_path
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
VERSION = version("grpo-lab")
BESIDES_BASES = 1.7  # MB of everything but the base models


def ran(*words: object, cwd: Path, **environment: str) -> str:
    """The output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(target: str, folder: Path) -> Path:
    """The one file that hatchling makes for a target, "wheel" or "sdist"."""
    ran(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", folder, cwd=ROOT)
    (made,) = (path for path in folder.iterdir() if path.suffix in (".whl", ".gz"))
    return made


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist: Path) -> Path:
    """The wheel that pip builds to install the source distribution."""
    offline = ("--no-deps", "--no-index", "--no-build-isolation")
    ran(sys.executable, "-m", "pip", "wheel", *offline, "-w", sdist.parent, sdist, cwd=sdist.parent)
    (built,) = sdist.parent.glob("*.whl")
    return built


def fresh_environment(folder: Path, wheel: Path) -> Path:
    """The programs of a new environment with this wheel. Other packages come from the running one."""
    ran(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    ran(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    # A folder that a .pth names has its own .pth files ignored, such as that of grpo_lab's editable install.
    (site / "others.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return python.parent


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


@pytest.mark.extended
def test_the_source_distribution_builds_the_same_wheel(wheel: Path, sdist: Path, wheel_of_sdist: Path) -> None:
    """It leaves out tests, and data and figures of experiments."""
    with tarfile.open(sdist) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert {name.partition("/")[0] for name in names} == {
        "grpo_lab", "conf", "experiments", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "pyproject.toml",
        "constraints.txt", ".gitignore", "PKG-INFO",
    }  # fmt: skip
    assert {Path(name).name for name in names if name.startswith("experiments/")} == {"design.yaml"}
    assert sdist.stat().st_size < wheel.stat().st_size + BESIDES_BASES * 1e6
    of_checkout, of_sdist = (
        {entry.filename: entry.CRC for entry in zipfile.ZipFile(path).infolist()} for path in (wheel, wheel_of_sdist)
    )
    assert of_sdist == of_checkout and "grpo_lab/py.typed" in of_checkout


@pytest.mark.extended
@pytest.mark.parametrize("source", ["wheel", "wheel_of_sdist"])
def test_it_works_in_a_fresh_environment(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It trains from an empty folder: configuration and base model are those that were installed."""
    programs = fresh_environment(tmp_path / "fresh", request.getfixturevalue(source))
    work = tmp_path / "work"
    work.mkdir()
    cache = {"GRPO_LAB_CACHE": str(tmp_path / "cache")}
    code = (
        "from grpo_lab import api, config; from grpo_lab.config.folders import conf_folder, experiments_folder;"
        "print(api.__file__, config.__file__, conf_folder(), experiments_folder(), sep='\\n')"
    )
    places = ran(programs / "python", "-c", code, cwd=work, **cache).splitlines()
    assert len(places) == 4 and all(Path(place).is_relative_to(tmp_path / "fresh") for place in places), places
    command = programs / "grpo-lab"
    assert ran(command, "--version", cwd=work) == f"grpo-lab {VERSION}\n"
    assert "leave_one_out" in ran(command, "tricks", cwd=work, **cache)
    assert "this is recipe dr_grpo" in ran(command, "explain", "recipe=dr_grpo", cwd=work, **cache)
    ran(command, "train", "world=tiny", "budget.amount=2", "tracking=none", cwd=work, **cache)
    assert [path.name for path in work.iterdir()] == ["runs"] and len(list(work.rglob("DONE"))) == 1
    unpacked = list((tmp_path / "cache" / "bases").glob("*/model.safetensors"))
    assert len(unpacked) == 2  # of `explain`, and of the run
    for path in unpacked:  # shipped weights are half-precision numbers; those of a base model built here are not
        assert all(torch.equal(weight, weight.half().float()) for weight in load_file(path).values())
