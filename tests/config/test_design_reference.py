"""The reference of a declaration's keys: all that are read are in it, with their values, on the page and in errors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import yaml
from declared_experiments import DECLARATIONS

from grpo_lab.config.design import (
    Change,
    Claim,
    Collapsed,
    CountPrediction,
    Design,
    Direction,
    Kind,
    Part,
    Prediction,
    QuantityPrediction,
    read_design,
)
from grpo_lab.config.design_reference import documented_keys, entries, reference_table, reference_text
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.tuning import Range, Tuning

ROOT = conf_folder().parent
HELD = {
    "predictions[].": Prediction,
    "counts[].": CountPrediction,
    "quantities[].": QuantityPrediction,
    "claims[].": Claim,
    "changes[].": Change,
    "parts.NAME.": Part,
    "tuning.": Tuning,
    "tuning.ranges.NAME.": Range,
}
# Under these every key is a name of the user's own.
NAMED = ("arms", "levels", "tricks", "requires", "parts", "tuning.ranges", "tuning.arms")


def whole(**changes: Any) -> dict[str, Any]:
    node = {
        "name": "probe", "question": "?", "prediction": "!", "control": "a", "primary": "reward/mean", "axis": "steps",
        "arms": {"a": [], "b": ["kl=k3_loss"]}, "seeds": [0, 1],
    }  # fmt: skip
    return node | changes


def test_every_field_that_a_declaration_may_have_is_in_it_once() -> None:
    paths = [entry.path for entry in entries()]
    expected = [field.name for field in fields(Design)]
    expected += [f"{where}{field.name}" for where, cls in HELD.items() for field in fields(cls)]
    assert sorted(paths) == sorted(expected) and len(set(paths)) == len(paths)
    assert all(entry.what and entry.allowed and entry.default for entry in entries())


def keys_of(node: Any, path: str = "") -> Iterator[str]:
    """The paths of an experiment's YAML as the reference writes them."""
    if isinstance(node, list):
        for one in node:
            yield from keys_of(one, f"{path}[]") if isinstance(one, dict) else ()
    for key, value in node.items() if isinstance(node, dict) else ():
        named = path in NAMED
        here = f"{path}.{'NAME' if named else key}".lstrip(".")
        yield here
        yield from keys_of(value, here)


@pytest.mark.parametrize("path", DECLARATIONS, ids=lambda path: path.parent.name)
def test_every_key_of_every_experiment_is_in_it(path: Path) -> None:
    known = {entry.path for entry in entries()}
    typed = set(keys_of(yaml.safe_load(path.read_text())["design"]))
    inside = ("arms.", "levels.", "tricks.", "requires.", "tuning.arms.")
    own = {
        key for key in typed if not key.startswith(inside) and not re.fullmatch(r"(parts|tuning\.ranges)\.NAME", key)
    }
    assert own and own <= known


@pytest.mark.parametrize("choices", [Kind, Direction, Collapsed])
def test_it_lists_every_choice(choices: type[Enum]) -> None:
    listed = [entry.allowed for entry in entries() if entry.allowed == ", ".join(one.value for one in choices)]
    assert listed, choices
    assert "sampled_tokens" in next(entry.allowed for entry in entries() if entry.path == "axis")


@pytest.mark.parametrize("entry", [one for one in entries() if "." not in one.path], ids=lambda entry: entry.path)
def test_what_it_calls_required_is_and_a_default_is_what_it_says(entry: Any) -> None:
    node = whole()
    if entry.default.startswith("required"):
        with pytest.raises(ValueError, match=f"design.{entry.path} is missing"):
            read_design({name: value for name, value in node.items() if name != entry.path})
        return
    value = getattr(read_design(node), entry.path)
    if isinstance(value, Enum | bool):
        assert entry.default == (value.value if isinstance(value, Enum) else str(value).lower())
    else:
        assert not value or value == {"": ()}, entry.path


@pytest.mark.parametrize(
    "changes,said",
    [
        ({"quesiton": "?"}, "design.quesiton: unknown key; did you mean question? valid keys: arms, axis, "),
        (
            {"predictions": [{"arm": "b", "metrik": "reward/mean", "direction": "above"}]},
            "design.predictions.metrik: unknown key; did you mean metric? valid keys: against, arm",
        ),
        ({"counts": [{"arm": "b", "metric": "reward/mean", "above": 1, "atleast": 2}]}, "did you mean at_least?"),
        ({"quantities": [{"quantity": "sharpening_share", "over": 1}]}, "design.quantities.over: unknown key"),
        ({"claims": [{"text": "x"}]}, "design.claims.text: unknown key; valid keys: direction, prediction"),
        ({"changes": [{"arm": ["b"]}]}, "design.changes.arm: unknown key; did you mean arms?"),
        ({"parts": {"demo": {"budget": 3}}}, "design.parts.demo.budget: unknown key"),
        (
            {
                "tuning": {
                    "trials": 1,
                    "batch": 1,
                    "seeds": [9],
                    "ranges": {"kl.kl_coef": {"low": 0, "high": 1, "lg": 1}},
                }
            },
            "design.tuning.ranges.kl.kl_coef.lg: unknown key; did you mean log? valid keys: high, integer",
        ),
        ({"exploratory": "yes"}, "design.exploratory is true or false, got 'yes'"),
    ],
)
def test_an_unknown_key_is_named_with_what_there_is_and_where_it_is_explained(changes: dict, said: str) -> None:
    with pytest.raises(ValueError) as refusal:
        read_design(whole(**changes))
    assert said in str(refusal.value)
    assert "exploratory" in changes or "`grpo-lab design` explains each" in str(refusal.value)


def test_the_page_shows_it_as_make_docs_writes_it() -> None:
    ((page, text),) = documented_keys().items()
    assert page == ROOT / "experiments" / "keys.md" and page.read_text() == text, "run `make docs`"
    assert reference_table() in text and "| `predictions[].direction` |" in text


@pytest.mark.extended
def test_a_command_prints_it() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli", "design"], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout == f"{reference_text()}\n"
    lines = done.stdout.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("collapsed: "))
    assert lines[at + 1] == "    zero, last; default: zero" and max(map(len, lines)) <= 120
