"""Functions name what they read of a run: few take the whole of it, and only the loop beside its state."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grpo_lab

ROOT = Path(grpo_lab.__file__).parent
WHOLE_RUN = 20


def parameters() -> Iterator[tuple[str, dict[str, str]]]:
    """Every function of the package, as file and name, with its parameters' annotations."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                annotated = {one.arg: ast.unparse(one.annotation) for one in given if one.annotation is not None}
                yield f"{path.relative_to(ROOT)}:{node.name}", annotated


def test_few_functions_take_a_whole_run_and_only_the_loop_takes_its_state_too() -> None:
    found = dict(parameters())
    whole = {name: types.values() for name, types in found.items() if "RunConfig" in types.values()}
    assert "loop.py:train" in whole and len(whole) <= WHOLE_RUN, sorted(whole)
    assert [name for name, types in whole.items() if "RunState" in types] == ["loop.py:train"]
