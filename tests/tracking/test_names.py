"""Names made from values: different values never share one, and each is a folder's, file's or parameter's name."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest
from hydra.core.override_parser.types import Quote, QuotedString

from grpo_lab.analysis.figures.registry import FIGURES
from grpo_lab.config.run_name import run_name
from grpo_lab.harness.command import suites_of
from grpo_lab.sweeps.planned_runs import sweep_name
from grpo_lab.tracking.external import _kept
from grpo_lab.tracking.files import atomic_write
from grpo_lab.tracking.mlflow_view import plain_name
from grpo_lab.tracking.names import folder_name
from grpo_lab.tracking.run_log import MAX_NAME_LENGTH, NAME

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_lab"
# Values that would be one folder if characters were only dropped or replaced.
ALIKE = [
    ["ab", "a b", "a\tb", "a\nb", "'ab'", '"ab"', "a\\b", "{ab}", "$ab", "a\u00a0b", "a\u200bb", "a\x1bb", "a\x00b"],
    ["a_b", "a/b", "b", "/a/b", "./b", "x/b", "/x/b/", "~/b"],
    ["..", ".", "", "..."],
    ["\udc80", "\udc81", "\ufffd"],  # bytes of a command line that are no UTF-8
]
HOSTILE = [value for group in ALIKE for value in group] + ["x" * 300, "語" * 90, "é" * 300, "[b]red[/b]", "a,b", "k=v"]


def quoted(value: str) -> str:
    """The value as Hydra takes any."""
    return QuotedString(value, Quote.single).with_quotes()


# Everything that turns a value into a name, by the function in which characters are dropped.
NAMES: dict[str, Callable[[str], str]] = {
    "tracking/names.py folder_name": lambda value: folder_name(["plain", f"model.path={value}"]),
    "config/run_name.py run_name": lambda value: run_name("plain", [f"model.path={quoted(value)}", "seed=1"]),
    "sweeps/planned_runs.py sweep_name": lambda value: sweep_name(None, [f"model.path={quoted(value)}"]),
    "tracking/mlflow_view.py _cleaned": lambda value: plain_name(f"reward.weights.{value}"),
    "tracking/external.py _kept": lambda value: _kept(f"reward/{value}"),
}
# Where characters are dropped and the result identifies nothing, or is refused if it was taken.
OTHERS = {
    "tracking/names.py _written": "of folder_name",
    "tracking/harness_results.py suite_of": "two tasks of one suite are refused, see below",
    "tracking/external_logs.py our_name": "an evaluation set in a diagnosis, which stores nothing under it",
    "sweeps/slurm.py parameters": "shown in Slurm's queue; a job is found by its number",
    "tasks/grader_worker.py": "reads an answer",
    "config/run_config.py __post_init__": "refuses a folder of runs, and drops nothing",
}


@pytest.mark.parametrize("make", NAMES.values(), ids=NAMES)
def test_values_that_differ_have_names_that_differ(make: Callable[[str], str]) -> None:
    for group in ALIKE:
        for one, other in combinations(group, 2):
            assert make(one) != make(other), (one, other)
    made = [make(value) for value in HOSTILE]
    assert len(set(made)) == len(made)


@pytest.mark.parametrize("name", ["folder_name", "run_name", "sweep_name"])
def test_a_folder_is_one_part_of_a_path_with_room_for_what_is_put_behind_it(name: str, tmp_path: Path) -> None:
    make = next(function for place, function in NAMES.items() if place.endswith(f" {name}"))
    for value in HOSTILE:
        made = make(value)
        assert made.isprintable() and not set("/\\'\"${} ") & set(made) and not made.startswith(".")
        assert len(made) <= 120 and len(made.encode()) <= 180
    assert len({folder_name([name]) for name in ("..", ".", ".hidden", "hidden")}) == 4
    assert not any(folder_name([name]).startswith(".") for name in ("..", ".", ".hidden"))
    longest = max(map(make, HOSTILE), key=lambda made: len(made.encode()))
    behind = [kind.name("") + ".svg" for kind in FIGURES] + ["_divergence.csv", ".answers.parquet", ".json.xz", ".lock"]
    for ending in behind:
        atomic_write(tmp_path / f"{longest}{ending}", "it fits, its temporary file too")
    assert max(len(path.name.encode()) for path in tmp_path.iterdir()) + len(f"..{2**22}.tmp") <= 255
    assert len(f"{longest}{max(behind, key=len)}".encode()) > 190, "the longest name was tried"


def test_a_parameter_and_a_metric_are_what_their_readers_take() -> None:
    for value in HOSTILE:
        assert re.fullmatch(r"[/\w.\- :]{1,250}", plain_name(f"reward.weights.{value}"))
        kept = _kept(f"reward/{value}")
        assert NAME.fullmatch(kept) and len(kept) <= MAX_NAME_LENGTH


def test_a_path_is_its_last_part_and_a_hash() -> None:
    assert run_name("plain", ["model.path=/data/models/qwen"]) == "plain,model.path=qwen-dd5ff64d"
    other = run_name("plain", ["model.path='/my models/qwen'"])
    assert other != run_name("plain", ["model.path=/mymodels/qwen"])
    both = run_name("plain", ["task.files=[/a/one.jsonl,/b/two.jsonl]"])
    assert re.fullmatch(r"plain,task\.files=\[one\.jsonl,two\.jsonl\]-[0-9a-f]{8}", both)
    assert run_name("plain", [r"model.path=/a\ b"]) == run_name("plain", ["model.path='/a b'"]), (
        "one value, typed twice"
    )


def test_a_name_that_loses_nothing_is_what_it_was() -> None:
    """Finished runs are found again by their command; the long name ends in the hash that it always had."""
    assert run_name("dr_grpo", ["truncation=mask_after", "budget.amount=1e3"]) == (
        "dr_grpo,truncation=mask_after,budget.amount=1000.0"
    )
    assert sweep_name(None, ["recipe=plain,dr_grpo", "evaluation.suites=[wording,numbers]"]) == (
        "recipe=plain,dr_grpo,evaluation.suites=[wording,numbers]"
    )
    long = run_name("plain", [f"task.key{number}={number}" for number in range(40)])
    assert long.endswith("-3b296ba6") and len(long) == 120
    assert _kept("rewards/accuracy_reward/mean") == "external/rewards.accuracy_reward.mean"
    assert plain_name("optimizer.learning_rate") == "optimizer.learning_rate"


def test_two_tasks_of_one_suite_are_refused() -> None:
    with pytest.raises(ValueError, match="would both be called lm_eval_arc_easy: evaluate one with --name"):
        suites_of("lm_eval", ["arc-easy", "arc_easy"], None)


def test_everything_that_drops_characters_from_a_name_is_known_here() -> None:
    """A negated character class, `isalnum` or `isprintable` is how a name loses characters."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for outer in ast.walk(tree):
            if isinstance(outer, ast.FunctionDef) and any(map(_drops, ast.walk(outer))):
                found.add(f"{path.relative_to(PACKAGE).as_posix()} {outer.name}")
    known = set(NAMES) | set(OTHERS)
    unknown = [place for place in sorted(found) if place not in known and place.split()[0] not in known]
    assert not unknown, "enter them in NAMES, or in OTHERS with a reason"
    assert len(found) >= 5 and os.sep == "/"


def _drops(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    pattern = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
    replaced = called == "sub" and isinstance(pattern, str) and pattern.startswith("[^")
    return replaced or called in ("isalnum", "isprintable")
