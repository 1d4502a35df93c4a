"""The tiers of the tests, and the bare machine that a test sees which does not declare what it needs."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import bare_machine
import pytest
import torch

ROOT = Path(__file__).parents[2]
# Planted where the whole machine has them: what this machine has by itself must not matter.
SIGHT = """
import shutil, subprocess, sys
from importlib.util import find_spec

import pytest


def seen():
    python = "import sys, planted_package, shutil; sys.exit(shutil.which('planted_program') is None)"
    there = subprocess.run([sys.executable, "-c", python], stderr=subprocess.DEVNULL).returncode == 0
    return shutil.which("planted_program") is not None, find_spec("planted_package") is not None, there


@pytest.fixture(scope="module")
def once():
    return seen()


@pytest.mark.needs("planted_program", "planted_package")
def test_declared(once):
    assert once == seen() == (True, True, True)


def test_undeclared():
    assert seen() == (False, False, False)
    assert shutil.which("git") and find_spec("torch") and find_spec("hypothesis") and find_spec("pip")


@pytest.mark.needs("planted_program", "not_installed")
def test_missing():
    raise AssertionError("is skipped")
"""
CONFTEST = """
import bare_machine

bare_machine.enter()
bare_machine.PACKAGES["planted_package"] = bare_machine.INSTALL["planted_package"] = "install the package"
bare_machine.INSTALL |= {"planted_program": "install the program", "not_installed": "make it"}


def pytest_configure(config):
    config.pluginmanager.register(bare_machine)
"""


@pytest.fixture
def machine_with_more(tmp_path: Path) -> dict[str, str]:
    """The environment of somebody who has installed a program and a package beyond the bare machine."""
    program = tmp_path / "bin" / "planted_program"
    package, facts = (tmp_path / "packages" / name for name in ("planted_package", "planted-1.dist-info"))
    for folder in (program.parent, package, facts):
        folder.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (package / "__init__.py").touch()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (facts / "RECORD").write_text("planted_package/__init__.py,,\n")
    with bare_machine.whole_machine():
        whole = {name: value for name, value in os.environ.items() if name != bare_machine.WHOLE}
    path = os.pathsep.join([str(program.parent), whole["PATH"]])
    return whole | {"PATH": path, "PYTHONPATH": os.pathsep.join([str(package.parent), str(ROOT / "tests" / "shared")])}


@pytest.mark.extended
@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.extended), 1])
def test_what_a_machine_has_beyond_the_bare_one_is_seen_by_who_declares_it(
    machine_with_more: dict[str, str], tmp_path: Path, workers: int
) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_sight.py").write_text(SIGHT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = needs(name, ...): as in pyproject.toml\n")
    words = ["-rs", "-n", str(workers), "-p", "no:cacheprovider", "--strict-markers", "test_sight.py"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=machine_with_more, capture_output=True, text=True,
        timeout=200,
    )  # fmt: skip
    assert "2 passed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "no not_installed: make it" in done.stdout


def test_this_session_runs_on_the_bare_machine() -> None:
    """Whatever is installed here: no other program is on PATH, and no package that `dev` does not bring is found."""
    here = {path.name for folder in os.environ["PATH"].split(os.pathsep) for path in Path(folder).iterdir()}
    assert here <= set(bare_machine.PROGRAMS)
    assert signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    assert not torch.cuda.is_available()
    assert not {name for name in bare_machine.PACKAGES if find_spec(name)}


def test_tests_in_the_background_hear_ctrl_c() -> None:
    code = "import signal, bare_machine; bare_machine.enter(); print(signal.getsignal(signal.SIGINT))"
    place = os.pathsep.join([str(Path(bare_machine.__file__).parent), os.environ["PYTHONPATH"]])
    ignored = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": place},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        stdout=subprocess.PIPE, text=True, check=True,
    )  # fmt: skip
    assert "default_int_handler" in ignored.stdout


def test_every_program_that_a_test_starts_is_on_the_list_or_can_be_declared() -> None:
    started = {}
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(ast.Attribute(ast.Name("subprocess")), [ast.List([ast.Constant(name), *_]), *_]):
                    started[name] = path.name
    assert {"git", "make", "mount", "squeue"} <= started.keys()
    known = {*bare_machine.PROGRAMS, *bare_machine.INSTALL}
    assert {name: path for name, path in started.items() if name not in known} == {}


def test_no_test_takes_away_the_path_that_hides_packages() -> None:
    replaces = re.compile(r'PYTHONPATH(": |=)str')
    found = [path.name for path in (ROOT / "tests").rglob("test_*.py") if replaces.search(path.read_text())]
    assert found == [], "take python_path of tests/shared/processes.py"


def test_ci_runs_what_a_change_can_wait_for_and_begins_with_what_a_newcomer_types() -> None:
    rules = (ROOT / "Makefile").read_text()
    names = set(re.findall(r"^(test[a-z-]*):", rules, flags=re.M))
    steps = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    assert names == {"test", "test-all", "test-vllm"} and steps == ["test", "check", "site", "test-vllm"]
    assert re.search(r"^test: \$\(STAMP\) ##", rules, flags=re.M), "dev alone"


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("vllm", [False, True])
def test_every_test_is_in_one_tier(extended: bool, vllm: bool) -> None:
    rules = (ROOT / "Makefile").read_text()
    chosen = re.findall(r'^test[a-z-]*:.*(?:\n\t.*)*?-m "?([a-z ]+)"?$', rules, flags=re.M)
    assert len(chosen) == 3
    assert sum(bool(eval(words, {}, {"extended": extended, "vllm": vllm})) for words in chosen) == 1
