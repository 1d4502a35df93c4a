"""Which modules of the package a file of it imports."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "grpo_lab"


def imports_of(path: Path) -> set[str]:
    """Modules of this package that a file imports at run time, dotted, `grpo_lab` itself left off."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    guarded = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.unparse(block.test)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("grpo_lab"):
            inner = node.module.removeprefix("grpo_lab").lstrip(".")
            found |= {inner} if inner else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("grpo_lab.") for a in node.names if a.name.startswith("grpo_lab")}
    return found
