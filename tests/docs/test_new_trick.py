"""Adding a trick is one class, one YAML file and one test: nothing else of the tree has to be edited.

Each trick is added to a copy of the tree. There the pages are written as `make docs` does, and the tests that list
options, or are tried with every one, pass.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import python_path

ROOT = Path(__file__).parents[2]
PARTS = ("grpo_lab", "conf", "tests", "experiments", ".ci", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md",
         "CITATION.cff", "LICENSE", "pyproject.toml")  # fmt: skip
# What lists options or counts them; the extended test runs these files whole.
LISTINGS = (
    "tests/docs/test_structure.py", "tests/docs/test_readme.py", "tests/config/test_config.py",
    "tests/config/test_explain.py", "tests/tricks/test_golden.py", "tests/tricks/test_options_differ.py",
    "tests/learner/test_reference_loop.py",
)  # fmt: skip
CHOSEN = (
    "{option} or make_docs or links or every_yaml or every_class or concrete_classes or writes_a_formula or "
    "has_a_number or option_of_the_loss or not_listed or without_a_case or commands_print or every_surrogate"
)


@dataclass(frozen=True)
class Trick:
    """What somebody writes who adds a baseline: a class, a YAML file and a test."""

    option: str
    code: str
    yaml: str
    test: str


def of_the_guide() -> Trick:
    """The one that CONTRIBUTING.md shows, word by word; its imports stand at the top of the axis's module already."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    code, test = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.S)
    return Trick("group_median", code[code.index("@dataclass") :], yaml, test)


TRIMMED = Trick(
    "trimmed_mean",
    '''@dataclass(frozen=True)
class TrimmedMean(Baseline):
    """Subtract the mean of a group's rewards in the statistics without the lowest and the highest share of them.

    b = mean of the sorted rewards from place floor(share * n) to n - floor(share * n)
    """

    share: float  # of the rewards, at each end

    group_relative: ClassVar[bool] = True
    formula: ClassVar[str] = "R - mean_g(R without the lowest and the highest {share})"

    def __post_init__(self) -> None:
        require_field(0 <= self.share < 0.5, self, "share", "at least 0 and below 0.5")

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        number = graded.in_statistics.sum(dim=1, keepdim=True)
        dropped = (self.share * number).long()
        ordered = torch.where(graded.in_statistics, graded.reward, torch.inf).sort(dim=1).values
        place = torch.arange(ordered.shape[1])[None, :]
        inner = (place >= dropped) & (place < number - dropped)
        mean = torch.where(inner, ordered, 0.0).sum(dim=1, keepdim=True) / inner.sum(dim=1, keepdim=True).clamp(min=1)
        centred = torch.where(graded.in_statistics, graded.reward - mean, 0.0)
        return torch.where(tied(graded.reward, graded.in_statistics), 0.0, centred)
''',
    "# Mean of the group without its extremes (trimmed mean): one odd reward moves it little.\n"
    "defaults:\n  - /schema/baseline/trimmed_mean@_here_\n  - _self_\nshare: 0.25\n",
    """from helpers import make_graded

from grpo_lab.tricks.baseline import TrimmedMean


def test_the_mean_of_the_inner_rewards_is_subtracted() -> None:
    # 0 and 9 leave; the mean of 1 and 2 is 1.5
    assert TrimmedMean(0.25)(make_graded([[0, 1, 2, 9]])).tolist() == [[-1.5, -0.5, 0.5, 7.5]]
""",
)


def copy_with(trick: Trick, folder: Path) -> None:
    """The tree with the trick in it, its pages written."""
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)
    (folder / "analysis").symlink_to(ROOT / "analysis")
    with (folder / "grpo_lab" / "tricks" / "baseline.py").open("a") as module:
        module.write(f"\n\n{trick.code}")
    (folder / "conf" / "baseline" / f"{trick.option}.yaml").write_text(trick.yaml)
    (folder / "tests" / "tricks" / f"test_{trick.option}.py").write_text(trick.test)
    told = there(folder, "grpo_lab.cli", "docs").stdout
    assert told.count(": written") == 2 and trick.option in (folder / "conf" / "README.md").read_text()


def there(folder: Path, *words: str, seconds: float = 280) -> subprocess.CompletedProcess[str]:
    """What a module does in the folder, where its package is the one that is imported."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, capture_output=True, text=True, timeout=seconds,
        env={**os.environ, "PYTHONPATH": python_path(folder), "GRPO_LAB_PLUGINS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done


@pytest.mark.extended
def test_the_trick_of_the_readme_asks_for_no_other_edit(tmp_path: Path) -> None:
    trick = of_the_guide()
    copy_with(trick, tmp_path)
    said = there(tmp_path, "grpo_lab.cli", "explain", f"baseline={trick.option}").stdout
    assert "C = R - median_g(R)\n" in said
    chosen = ["-k", CHOSEN.format(option=trick.option), "-m", "not extended and not vllm"]
    own = f"tests/tricks/test_{trick.option}.py"
    there(tmp_path, "pytest", "-p", "no:cacheprovider", "-n", "0", own, *LISTINGS, *chosen)
    there(tmp_path, "ruff", "check", "grpo_lab/tricks", "tests/tricks")
    there(tmp_path, "ruff", "format", "--check", "grpo_lab/tricks", "tests/tricks")


@pytest.mark.extended
@pytest.mark.timeout(1000)
def test_another_trick_passes_the_files_that_list_options(tmp_path: Path) -> None:
    copy_with(TRIMMED, tmp_path)
    chosen = ["-k", "not every_training_command", "-m", "not extended and not vllm"]
    there(tmp_path, "pytest", "-p", "no:cacheprovider", "-n", "0", *LISTINGS, *chosen, seconds=900)
