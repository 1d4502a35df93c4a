"""Draws faults by chance, with mutmut's operators, and writes them as a list for plant.py.

    pip install -e '.[mutants]'
    coverage run --rcfile=tests/mutants/coverage.ini -m pytest -m "not extended and not vllm"
    python tests/mutants/draw.py                  200 faults of PACKAGES, to build/drawn
    make mutants ARGS="--lists build/drawn"

The first run says which tests cover a line; it takes an hour on two cores, and `pytest tests/run tests/learner` less. A
fault that no test covers is printed and counts as one that survives. mutmut's own way to run mutants is not used: its
trampolines leave out properties and what has decorators, which is much of this code.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import libcst as cst
import yaml
from coverage import CoverageData
from libcst.metadata import MetadataWrapper
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode
from plant import ROOT, file_of, functions_of

PACKAGES = (
    "tasks", "run", "learner", "rollout", "sweeps", "analysis/effects", "policy/adapters.py", "distributed/ranks.py",
)  # fmt: skip
MOST_TESTS = 6  # of one fault: those that cover the least beside it


class Visitor(MutationVisitor):
    """mutmut's, also in properties and other decorated functions; no messages, assertions, imports or docstrings."""

    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            return False
        if isinstance(node, cst.Raise | cst.Assert | cst.Import | cst.ImportFrom):
            return True
        if isinstance(node, cst.SimpleString | cst.ConcatenatedString | cst.FormattedString):
            return " " in cst.Module([]).code_for_node(node)  # prose
        return super()._skip_node_and_children(node)


def mutations(path: Path) -> tuple[cst.Module, list[Any]]:
    """A file's module, and mutmut's mutations of it."""
    visitor = Visitor(mutation_operators, IgnoredCode(set(), set(), set()), None)
    return MetadataWrapper(cst.parse_module(path.read_text())).visit(visitor), visitor.mutations


def files(packages: Sequence[str]) -> list[Path]:
    """The files of the packages, in the order in which they are drawn from."""
    places = [ROOT / "grpo_lab" / name for name in packages]
    folders = [path for place in places for path in place.glob("*.py")]
    return sorted(folders) + [place for place in places if place.is_file()]


def drawn(packages: Sequence[str], number: int, seed: int) -> Iterator[tuple[Path, str]]:
    """Files and what they would hold with one fault, each mutation of all files being as likely as any other."""
    every = [(path, place) for path in files(packages) for place in range(len(mutations(path)[1]))]
    random.Random(seed).shuffle(every)
    for path, place in every:
        if number == 0:
            return
        module, found = mutations(path)
        changed = deep_replace(module, found[place].original_node, found[place].mutated_node)
        assert isinstance(changed, cst.Module)
        if ast.dump(ast.parse(changed.code)) != ast.dump(ast.parse(module.code)):
            number -= 1
            yield path, changed.code


def apart(before: str, after: str) -> tuple[str, str, range]:
    """The lines that differ, with as many before and behind them as make the old ones unique, and their numbers."""
    ours, theirs = before.splitlines(), after.splitlines()
    changes = [
        one for one in difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes() if one[0] != "equal"
    ]
    first, last, new_first, new_last = changes[0][1], changes[-1][2], changes[0][3], changes[-1][4]
    for more in range(len(ours)):
        low, high = min(more, first), min(more, len(ours) - last)
        old = "\n".join(ours[first - low : last + high])
        if before.count(old) == 1:
            break
    return old, "\n".join(theirs[new_first - low : new_last + high]), range(first + 1, last + 1)


def covering(data: CoverageData, path: Path, lines: range, reach: Counter[str]) -> list[str]:
    """The tests that cover one of the lines, as plant.py names them."""
    contexts = data.contexts_by_lineno(str(path))
    names = {name for line in lines for name in contexts.get(line, ()) if name.startswith("test_")}
    pairs = [
        (f"{module}.py", function)
        for module, _, function in (name.partition(".") for name in sorted(names, key=lambda name: reach[name]))
    ]
    return [
        f"{file}::{function}"
        for file, function in pairs
        if (place := file_of(file)) and function in functions_of(place)
    ]


def main() -> None:
    """Write the list, and print what no test covers."""
    parser = argparse.ArgumentParser(description="Draw faults for plant.py by chance.")
    parser.add_argument("packages", nargs="*", default=PACKAGES, help="folders or files below grpo_lab")
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--seed", type=int, default=38)
    parser.add_argument("--covered", type=Path, default=ROOT / "build" / "covered", help="what coverage measured")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "drawn", help="folder of the list")
    options = parser.parse_args()
    if not options.covered.is_file():
        sys.exit(f"no {options.covered}: run the tests under coverage first, as this file's head says")
    data = CoverageData(str(options.covered))
    data.read()
    reach = Counter(
        name for path in data.measured_files() for names in data.contexts_by_lineno(path).values() for name in names
    )
    found, uncovered = [], []
    for place, (path, after) in enumerate(drawn(options.packages, options.number, options.seed)):
        file, (old, new, lines) = str(path.relative_to(ROOT / "grpo_lab")), apart(path.read_text(), after)
        tests = covering(data, path, lines, reach)[:MOST_TESTS]
        fault = {
            "name": f"drawn {place + 1}",
            "file": file,
            "old": old,
            "new": new,
            "does": f"line {lines[0]}",
            "tests": tests,
        }
        (found if tests else uncovered).append(fault)
    options.to.mkdir(parents=True, exist_ok=True)
    (options.to / "drawn.yaml").write_text(yaml.safe_dump(found, sort_keys=False, allow_unicode=True))
    for fault in uncovered:
        print(f"no test covers {fault['file']}, {fault['does']}: {fault['new'].strip()}")
    print(f"{len(found)} faults in {options.to}, {len(uncovered)} more that no test covers")


if __name__ == "__main__":
    main()
