"""Loss functions of other frameworks, called as they are, through the signature of the check.

Nothing of a framework is kept here. Each module names the functions it calls and the arguments it passes; the framework
is imported only when it is checked, from an installed package or from `--path`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_lab.instruments.loss_check.report import Report

FRAMEWORKS = ("trl", "verl", "openrlhf", "areal", "trinity", "prime_rl", "open_instruct")


@dataclass(frozen=True)
class Case:
    """One function of a framework with its settings.

    `reads` are the arguments of `function`, which has those of the check by name. `accumulate` is how its trainer joins
    the losses of microbatches, as read in its code. `expected` are the options that its settings name.
    """

    name: str
    function: Callable[..., Any]
    reads: tuple[str, ...]
    accumulate: str = "sum"
    expected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Framework:
    """The cases of an installed framework; `version` is that of the package, or the commit."""

    version: str
    cases: Sequence[Case]


def check_framework(name: str, path: Path | None, only: Sequence[str] | None = None) -> list[Report]:
    """The reports on a framework's functions. Raises ValueError where it is not known or not found."""
    from grpo_lab.instruments.loss_check.command import report_on

    name = name.replace("-", "_")
    if name not in FRAMEWORKS:
        raise ValueError(f"no adapter for {name}: there are {', '.join(FRAMEWORKS)}; or write FILE.py:FUNCTION")
    try:
        found = importlib.import_module(f"{__name__}.{name}").framework(path)
    except (ImportError, OSError) as error:
        raise ValueError(f"{name} is not found ({error}): give its folder by --path") from error
    names = [one.name for one in found.cases]
    if unknown := [one for one in only or () if one not in names]:
        raise ValueError(f"{name} has no case {unknown[0]}: there are {', '.join(names)}")
    return [
        report_on(f"{name} {found.version}: {one.name}", one.function, one.accumulate, one.reads, expected=one.expected)
        for one in found.cases
        if not only or one.name in only
    ]
