"""The tiers of the tests: what runs with the dev extras alone, and where the rest runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What the other extras of pyproject.toml install, what comes along with them, and what has an environment of its own.
EXTRAS = {
    "vllm", "jupytext", "nbconvert", "nbclient", "ipykernel", "submitit", "ray", "trl", "math_verify",
    "optuna",
}  # fmt: skip
IMPORTED = """
import importlib, sys

class Without:
    # a finder that finds everything but the extras, as where they are not installed
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {extras!r} else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
sys.path[:0] = {folders!r}
failed = []
for name in ["conftest", *{modules!r}]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed.append(f"{{name}}: {{error}}")
sys.exit("\\n".join(failed) or 0)
"""


def test_every_module_of_the_tests_is_collected_where_no_extra_is_installed() -> None:
    """A module that asks for an extra when it is imported fails `make test` for whoever has followed the README."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    folders = [str(ROOT / "tests"), str(ROOT / "tests" / "shared"), *sorted({str(path.parent) for path in modules})]
    code = IMPORTED.format(extras=EXTRAS, folders=folders, modules=[path.stem for path in modules])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def test_ci_runs_what_a_change_can_wait_for_and_begins_with_what_a_newcomer_types() -> None:
    rules = (ROOT / "Makefile").read_text()
    names = set(re.findall(r"^(test[a-z-]*):", rules, flags=re.M))
    steps = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(), flags=re.M)
    assert names == {"test", "test-all", "test-vllm"} and steps == ["test", "check", "test-vllm"]
    assert re.search(r"^test: \$\(STAMP\) ##", rules, flags=re.M), "dev alone"


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("vllm", [False, True])
def test_every_test_is_in_one_tier(extended: bool, vllm: bool) -> None:
    rules = (ROOT / "Makefile").read_text()
    chosen = re.findall(r'^test[a-z-]*:.*(?:\n\t.*)*?-m "?([a-z ]+)"?$', rules, flags=re.M)
    assert len(chosen) == 3
    assert sum(bool(eval(words, {}, {"extended": extended, "vllm": vllm})) for words in chosen) == 1
