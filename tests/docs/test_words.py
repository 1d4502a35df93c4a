"""The package speaks the field's words: names, messages, metrics and options without the terms they replaced."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from helpers import PACKAGE

from grpo_lab.config.folders import conf_folder
from grpo_lab.tracking.metrics import REGISTRY

# Words of public names, each replaced by a term of the field.
NAMES = frozenset(
    (
        "acted", "asked", "board", "card", "cards", "cell", "cells", "charges", "foreign", "inert", "ledger", "mirror",
        "mirrored", "outcome", "outcomes", "said", "says", "sealed", "stretch", "stretches", "surely", "tally", "tell",
        "told", "touched", "trouble", "troubles", "wanted", "wish", "withheld",
    )
)  # fmt: skip
# Phrases of messages, docstrings and descriptions.
PHRASES = re.compile(
    r"\b(not resolved|could not act|told apart|surely|inert|withheld"
    r"|so many|cells (?:is|are|was|were)|graphics cards?|which alone|cannot be told|unless told)\b",
    re.IGNORECASE,
)
# Names that are right where they stand, with the reason.
ALLOWED = {
    "withheld": "numbers that a task withholds from training, a key of saved configurations",
    "withheld_numbers": "the same",
    "run_inert": "the option's name before, read for one more version",
    "outcomes": "the same, of a grader's correctness",
    "CellJob": "the same, of a job that an earlier version submitted",
    "outcome": "of a comparison; and group_filter.signal=outcome, a value of saved configurations",
    "outcome_of": "a key of saved configurations",
    "Outcome": "of a comparison of two runs",
    "says": "a key of claims in declarations",
    "tell": "Optuna's word",
    "TensorBoard": "a product",
    "TensorBoardSender": "the same",
}
OLD_NAMES = ("tracking/renames.py", "tracking/external.py", "renamed.py")  # they hold old names to read them


def modules() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith(OLD_NAMES):
            yield name, ast.parse(path.read_text())


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def public_names(module: ast.Module) -> Iterator[str]:
    """Functions, classes, and fields and constants of modules and classes, without those that begin with _."""
    for node in ast.walk(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for part in node.body:
                targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def texts(module: ast.Module) -> Iterator[str]:
    """Every text with a blank in it: messages, docstrings and descriptions."""
    for node in ast.walk(module):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.value


def test_no_public_name_holds_a_replaced_word() -> None:
    found = [
        f"{file}: {name}"
        for file, module in modules()
        for name in public_names(module)
        if not name.startswith("_") and words_of(name) & NAMES and name not in ALLOWED
    ]
    found += [file for file, _ in modules() if words_of(Path(file).stem) & NAMES]
    assert not found


def test_no_message_or_docstring_holds_a_replaced_phrase() -> None:
    found = [
        f"{file}: {hit.group()} in {text[max(0, hit.start() - 30) : hit.end() + 30]!r}"
        for file, module in modules()
        for text in texts(module)
        for hit in PHRASES.finditer(text)
        if file not in ("tasks/arithmetic.py", "tasks/warm_start.py")  # numbers withheld from training
    ]
    assert not found


def test_no_metric_and_no_option_is_described_by_a_replaced_phrase() -> None:
    described = {metric.name: f"{metric.name} {metric.meaning}" for metric in REGISTRY}
    described |= {str(path.relative_to(conf_folder())): path.read_text() for path in conf_folder().rglob("*.yaml")}
    assert len(described) > 200
    assert not {name: hit.group() for name, text in described.items() if (hit := PHRASES.search(text))}
    names = {metric.name for metric in REGISTRY if words_of(metric.name) & NAMES}
    assert names == {"reward/outcome", "reward/in_loss_outcome"}, "the outcome reward, which charts of users name"
