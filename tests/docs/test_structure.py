"""The house keeps its shape: the loop stays short and every YAML names one class; `make check` holds the imports."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml
from helpers import PACKAGE

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import AXES, options, slot_types
from grpo_lab.learner import step_metrics as step_metrics
from grpo_lab.tracking.metrics import REGISTRY, find, is_known


def files_under(folder: str) -> list[Path]:
    return sorted((PACKAGE / folder).rglob("*.py"))


def test_the_loop_can_be_read_on_a_few_screens() -> None:
    assert len((PACKAGE / "loop.py").read_text().splitlines()) <= 300


def test_benchmarks_measure_stages_that_the_loop_has() -> None:
    """A stage by another name would be left out of what they print."""
    stages = set(re.findall(r'clock\("(\w+)"\)', (PACKAGE / "loop.py").read_text()))
    for path in ("benchmarks/bench.py", "gpu/speed.py"):
        (named,) = re.findall(r"^STAGES = \((.*?)\)", (PACKAGE.parent / "tests" / path).read_text(), flags=re.M)
        measured = set(re.findall(r'"(\w+)"', named))
        assert {"generate", "train"} <= measured <= stages, path


def test_tricks_stay_small_enough_to_read() -> None:
    for path in files_under("tricks"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno - node.lineno < 65, f"{path.name}: {node.name}"


def test_the_loop_names_no_option() -> None:
    """loop.py reads slots and facts; the name of an option in it would be a hidden branch."""
    text = (PACKAGE / "loop.py").read_text()
    for axis in AXES:
        for cls in options(slot_types()[axis]).values():
            assert not re.search(rf"\b{cls.__name__}\b", text), cls


def option_files() -> list[tuple[str, Path]]:
    return [
        (group.name, path)
        for group in sorted(conf_folder().iterdir())
        if group.is_dir() and group.name in slot_types()
        for path in sorted(group.glob("*.yaml"))
    ]


def schema_of(path: Path, group: str) -> str:
    """The class that an option names, or the option that it extends does."""
    entries = yaml.safe_load(path.read_text())["defaults"]
    # One that stands before the class is an option that it takes numbers from.
    *_, last = (entry for entry in entries if isinstance(entry, str) and entry != "_self_")
    if named := re.fullmatch(rf"/schema/{group}/(\w+)@_here_", last):
        return named.group(1)
    return schema_of(path.with_name(f"{last}.yaml"), group)


@pytest.mark.parametrize("slot", list(slot_types()))
def test_every_yaml_opens_with_a_comment_and_names_one_class_and_every_class_has_a_yaml(slot: str) -> None:
    """Of its own snake_case name; `none` for a class that begins with No; a number's name for Updates."""
    for group, path in option_files():
        if group == slot:
            text = path.read_text()
            assert text.startswith("# ") and len(text.splitlines()[0]) > 20, path
            assert schema_of(path, group) in options(slot_types()[group]), path
    named = {schema_of(path, group): path.stem for group, path in option_files() if group == slot}
    classes = options(slot_types()[slot])
    of_evaluation = {"exact_answer", "plain_math"}
    if slot == "verifier":
        classes = {name: classes[name] for name in of_evaluation}
    if slot == "learner_precision":  # quantised weights only sample
        classes = {name: cls for name, cls in classes.items() if not cls.quantizes}
    if slot == "reward":
        classes = {name: cls for name, cls in classes.items() if name not in of_evaluation}
    for name, cls in classes.items():
        if cls.__module__.startswith("grpo_lab"):
            assert name in named, f"{cls.__name__} has no YAML in conf/{slot}"


def test_every_touching_axis_has_an_option_that_touches_nothing() -> None:
    """Inertness is only meaningful for an axis that can be switched off."""
    for axis in step_metrics.MEASURED_AXES:
        assert [cls.__name__ for cls in options(slot_types()[axis]).values() if cls.is_no_op], axis


def test_metric_names_are_unique_and_mlflow_accepts_them() -> None:
    names = [metric.name for metric in REGISTRY]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9_/*]+", name) for name in names)


def test_only_an_evaluation_has_a_value_before_the_first_step() -> None:
    assert is_known("start/eval/heldout/truncated") and not is_known("start/train/loss")
    assert is_known("average/train/loss") and not is_known("average/eval/heldout/accuracy")


def test_an_unknown_metric_raises_and_stars_stand_for_one_segment() -> None:
    assert find("eval/heldout/pass_at_8").name == "eval/*/pass_at_*"
    assert find("active_fraction/kl").name == "active_fraction/*"
    for wrong in ("eval/heldout", "eval/a/b/accuracy", "reward/meen", "pass@1"):
        with pytest.raises(KeyError, match="has no entry"):
            find(wrong)


def test_a_class_has_a_name_of_its_own() -> None:
    """Options may share one with an option of another axis or a class elsewhere: their axis tells them apart."""
    places: dict[str, list[str]] = {}
    for path in files_under("."):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and path.parent.name != "tricks":
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert not {name: found for name, found in places.items() if len(found) > 1}
