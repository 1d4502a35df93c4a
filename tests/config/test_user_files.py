"""What users bring, YAML and modules of their own: found, bounded before it is composed, explained where it fails."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from processes import python_path
from short_runs import command_line

from grpo_lab.config import hydra_setup, run_config
from grpo_lab.config.catalogue import option_text
from grpo_lab.config.design import load_design
from grpo_lab.config.folders import conf_folder, declared, experiments_folder
from grpo_lab.config.help import answer
from grpo_lab.config.hydra_setup import bootstrap, compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.config.user_files import DEEPEST, LARGEST, MOST_FILES, check_user_files, check_yaml, import_plugin
from grpo_lab.tricks.base import Trick, formula_fault

# Nine of nine of nine ...: 9 ** 12 entries in 12 lines
BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)


@pytest.mark.parametrize(
    "text,said",
    [
        (BOMB, "line 5: with its aliases written out the file has more than 20,000 entries: use fewer"),
        ("a: &a\n  - [*a]", r"line 2: \*a stands within what it stands for"),
        ("a: *nothing", "line 1: there is no &nothing above"),
        ("[" * 10_000, f"line 1.*more than {DEEPEST} collections within each other: flatten them"),
        ("".join(f"{' ' * depth}a:\n" for depth in range(60)), "line 50: more than 50 collections"),
        ("a: 1\n b: 2", r"line 2 is not YAML \(mapping values are not allowed in this context\): mend it, or move it"),
        ("a: \x00", r"is not YAML \(.*\): mend it"),
        ("a: " + "x" * LARGEST, "has 1,000,003 bytes: a configuration has at most 1,000,000"),
    ],
)
def test_yaml_that_nobody_means_is_refused_at_once(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ValueError, match=said) as refused:
        check_yaml(path)
    assert str(path) in str(refused.value)
    assert time.process_time() - began < 1.0


def test_yaml_that_somebody_means_passes_and_costs_little(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: {b: &c {d: 1}}\ne: {<<: *c}\nf: [*c, *c]\n")
    check_yaml(tmp_path / "mine.yaml")
    began = time.process_time()
    check_user_files([f"hydra.searchpath=[file://{conf_folder()}]"], experiments_folder())
    assert time.process_time() - began < 0.3, "two hundred files of options, on a busy core too"


@pytest.mark.parametrize("way", ["environment", "search path", "--config-dir", "--config-dir="])
def test_every_way_to_a_folder_of_ones_own_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "bomb.yaml").write_text(BOMB)
    if way == "environment":
        monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", f"{conf_folder()}{os.pathsep}{tmp_path}")
    words = {
        "search path": [f"hydra.searchpath=[file://{conf_folder()},file://{tmp_path}]"],
        "--config-dir": ["--config-dir", str(tmp_path)],
        "--config-dir=": [f"--config-dir={tmp_path}"],
    }
    with pytest.raises(ValueError, match=r"bomb\.yaml line 5"):
        check_user_files(words.get(way, []), tmp_path / "no experiments")
    with pytest.raises(ValueError, match=r"bomb\.yaml line 5"):
        load_design(tmp_path / "recipe" / "bomb.yaml")


def test_the_experiments_beside_conf_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "overlong" in declared(experiments_folder())
    (tmp_path / "experiments" / "bomb").mkdir(parents=True)
    (tmp_path / "experiments" / "bomb" / "design.yaml").write_text(BOMB)
    monkeypatch.setattr(hydra_setup, "experiments_folder", lambda: tmp_path / "experiments")
    with pytest.raises(ValueError, match=r"experiments/bomb/design\.yaml line 5"):
        bootstrap()


def test_an_experiment_may_have_any_number_of_figures(tmp_path: Path) -> None:
    """Drawing all experiments leaves thousands of files beside their declarations, which are all that is read."""
    (tmp_path / "mine" / "figures").mkdir(parents=True)
    (tmp_path / "mine" / "design.yaml").write_text("design: {name: mine}\n")
    for number in range(MOST_FILES + 1):
        (tmp_path / "mine" / "figures" / f"{number}.png").touch()
    check_user_files([], tmp_path)


def test_a_folder_that_is_no_folder_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(MOST_FILES + 1):
        (tmp_path / f"{number}.txt").touch()
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    with pytest.raises(ValueError, match="more than 2,000 files: name only the folder of your options"):
        bootstrap()
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path / "0.txt"))
    with pytest.raises(ValueError, match=r"0\.txt, which is no folder: make it, correct the path, or unset it"):
        bootstrap()


def test_options_are_found_in_each_of_several_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "truncation").mkdir(parents=True)
        (tmp_path / name / "truncation" / f"{name}.yaml").write_text(f"# {name}\n")
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", os.pathsep.join(str(tmp_path / name) for name in ("one", "two")))
    assert [option_text("truncation", name) for name in ("one", "two")] == ["# one\n", "# two\n"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words,environment,said",
    [
        (["--help"], {"GRPO_LAB_CONFIG_PATH": "{here}/nowhere"}, "error: GRPO_LAB_CONFIG_PATH names {here}/nowhere, "),
        (["seed=1"], {"GRPO_LAB_CONFIG_PATH": "{here}/bomb"}, "{here}/bomb/recipe/mine.yaml line 5: with its aliases"),
        (["plugins=[broken]"], {}, "module 'broken' fails at {here}/broken.py line 2 (NameError"),
        (
            ["seed=${group_size}", "group_size=${seed}"],
            {},
            "refers to itself (seed -> group_size -> seed): give one of",
        ),
    ],
    ids=["no folder", "bomb", "plugin", "loop"],
)
def test_the_command_says_it_in_one_line(
    tmp_path: Path, words: list[str], environment: dict[str, str], said: str
) -> None:
    (tmp_path / "bomb" / "recipe").mkdir(parents=True)
    (tmp_path / "bomb" / "recipe" / "mine.yaml").write_text(BOMB)
    (tmp_path / "broken.py").write_text("import math\nmath.cos(nothing)\n")
    env = {name: value.format(here=tmp_path) for name, value in environment.items()}
    env |= {"PYTHONPATH": python_path(tmp_path)}
    done = command_line("world=tiny", f"runs_dir={tmp_path / 'runs'}", *words, env=env)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert said.format(here=tmp_path) in done.stderr
    assert not (tmp_path / "runs").exists()


def test_references_that_lead_nowhere_or_round_are_named_by_their_key() -> None:
    with pytest.raises(
        ValueError, match=r"problems_per_step has no value: .*'nothing' not found; correct the reference"
    ):
        to_run(compose_config(["world=tiny", "problems_per_step=${nothing}"]))
    circle = ["engine.max_tokens=${evaluation.max_tokens}", "evaluation.max_tokens=${engine.max_tokens}"]
    with pytest.raises(ValueError, match=r"max_tokens -> \w+\.max_tokens -> \w+\.max_tokens\): give one of these"):
        to_run(compose_config(["world=tiny", *circle]))
    with pytest.raises(ValueError, match=r"max_tokens refers to itself"):
        answer(["world=tiny", *circle, "--cfg", "job", "--resolve"])
    with pytest.raises(ValueError, match=r"\(seed -> seed\)"):
        to_run(compose_config(["world=tiny", "seed=${seed}"]))


@pytest.mark.parametrize(
    "files,said",
    [
        (
            {"mine.py": "x = 1\n\nraise RuntimeError('no\\nway')\n"},
            r"fails at {here}/mine.py line 3 \(RuntimeError: no\)",
        ),
        ({"mine.py": "def f(:\n  pass\n"}, r"fails at {here}/mine.py line 1 \(SyntaxError: invalid syntax\)"),
        ({"mine.py": "import mine_too\n", "mine_too.py": "\n\n1 / 0\n"}, r"{here}/mine_too.py line 3 \(ZeroDivision"),
        ({"mine.py": "import json\njson.loads('')\n"}, r"{here}/mine.py line 2 \(JSONDecodeError"),
        ({"mine.py": "import no_such_package\n"}, r"fails at {here}/mine.py line 1 \(ModuleNotFoundError: No module"),
        ({"mine.py": "from torch import no_such_name\n"}, r"fails at {here}/mine.py line 1 \(ImportError: cannot"),
        ({"mine.py": "import sys\nsys.exit()\n"}, r"fails at {here}/mine.py line 2 \(SystemExit"),
        ({}, r"'mine' cannot be imported \(No module named 'mine'\): install it or add its folder to PYTHONPATH"),
    ],
)
def test_a_plugin_that_fails_is_named_with_file_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], said: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ValueError, match=said.format(here=tmp_path)):
            import_plugin("mine")
    finally:
        for name in ("mine", "mine_too"):
            sys.modules.pop(name, None)


@dataclass(frozen=True)
class Mine:
    by: complex


def test_a_class_that_can_be_no_option_is_named_with_file_and_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_config, "options", lambda base: {"mine": Mine})
    with pytest.raises(
        ValueError, match=rf"Mine at {__file__} line \d+ cannot be an option \(Unexpected type.*complex"
    ):
        run_config.register()


PLUGIN = """
from dataclasses import dataclass
from grpo_lab.tricks.baseline import Baseline

@dataclass(frozen=True)
class HalfMark(Baseline):
    mark: float
    group_relative = False
    def __call__(self, graded):
        return graded.reward - self.mark
"""


@pytest.mark.extended
def test_a_plugin_whose_trick_has_no_formula_is_refused_before_a_model_loads(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLUGIN)
    done = command_line("plugins=[mine]", "world=tiny", env={"PYTHONPATH": python_path(tmp_path)})
    assert done.returncode == 1 and done.stderr.startswith(
        f"error: HalfMark at {tmp_path}/mine.py line 5 has no formula: write `formula: ClassVar[str] = "
    ), done.stderr


@pytest.mark.parametrize(
    "formula,said",
    [
        ("", "has no formula: write"),
        ("R - {half}", "has {half} in its formula, which is no field of it (its fields are mark): correct the name"),
        ("R - mean_{g without i}(R)", "has {g without i} in its formula, which is no field of it"),
        ("R - {mark", "has a formula that cannot be printed (expected '}' before end of string): write a brace"),
    ],
)
def test_a_formula_that_cannot_be_printed_is_refused_with_a_remedy(formula: str, said: str) -> None:
    @dataclass(frozen=True)
    class Half(Trick):
        mark: float

    Half.formula = formula
    assert formula_fault(Half).startswith(said)


def test_braces_that_are_printed_are_no_fields() -> None:
    @dataclass(frozen=True)
    class Half(Trick):
        mark: float
        formula: ClassVar[str] = "R - {mark} * mean_{{g without i}}(R)"

    assert formula_fault(Half) == "" and Half(0.5).written() == "R - 0.5 * mean_{g without i}(R)"
