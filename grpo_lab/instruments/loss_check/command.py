"""`grpo-lab check-loss`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_lab.tracking.terminal import say

if TYPE_CHECKING:
    from grpo_lab.instruments.loss_check.published import PublishedTables
    from grpo_lab.instruments.loss_check.report import Report


def check_loss(arguments: argparse.Namespace) -> None:
    """Print which published loss a function computes and where it departs; exit 1 unless it passes everywhere."""
    if arguments.write is not None:
        from grpo_lab.instruments.loss_check.files import write_files

        say(*write_files(arguments.write), sep="\n")
        if arguments.target is None and arguments.answers is None and arguments.framework is None:
            return
    if arguments.answers is not None:
        from grpo_lab.instruments.loss_check.files import judge_file

        reports = [judge_file(arguments.answers)]
    elif arguments.framework is not None:
        from grpo_lab.instruments.loss_check.adapters import check_framework

        reports = check_framework(arguments.framework, arguments.path, arguments.case)
    elif arguments.target is not None:
        reports = [
            check_function(arguments.target, arguments.overrides, arguments.accumulate, _pairs(arguments.expect))
        ]
    else:
        raise ValueError(
            "nothing to check: give FILE.py:FUNCTION or MODULE:FUNCTION, --answers FILE, --framework NAME, "
            "or --write FOLDER"
        )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([one.as_json() for one in reports], indent=1) + "\n")
    say(*(one.text() for one in reports), sep="\n\n")
    if not all(one.ok for one in reports):
        sys.exit(1)


def check_function(
    target: str, overrides: Sequence[str] = (), accumulate: str = "", expected: Mapping[str, str] | None = None
) -> Report:
    """The report on MODULE:FUNCTION; `overrides` configure one more surrogate to compare it with."""
    from grpo_lab.instruments.loss_check.ask import load

    return report_on(target, load(target), accumulate, overrides=overrides, expected=expected)


def _pairs(words: Sequence[str]) -> dict[str, str]:
    """AXIS=OPTION as a dict. Raises ValueError for a word without an equals sign."""
    if wrong := [word for word in words if "=" not in word]:
        raise ValueError(f"--expect {wrong[0]}: write AXIS=OPTION, such as aggregation=token_mean")
    return dict(word.split("=", 1) for word in words)


def report_on(
    name: str,
    function: Callable[..., Any],
    accumulate: str = "",
    reads: Sequence[str] = (),
    overrides: Sequence[str] = (),
    expected: Mapping[str, str] | None = None,
) -> Report:
    """The report on a function; `reads` are its arguments, by default those of its signature."""
    from grpo_lab.instruments.loss_check.ask import arguments_of, ask
    from grpo_lab.instruments.loss_check.inputs import calls, plain
    from grpo_lab.instruments.loss_check.report import judge

    known = list(plain().arguments())
    reads = list(reads) or arguments_of(function, known)
    answers, errors = ask(function, calls(), reads)
    return judge(name, answers, errors, reads, accumulate, _configured(overrides), expected=expected)


def _configured(overrides: Sequence[str]) -> PublishedTables | None:
    """PublishedTables of the surrogate of these overrides; None without."""
    if not overrides:
        return None
    from grpo_lab.config.hydra_setup import compose_config
    from grpo_lab.config.run_config import to_run
    from grpo_lab.instruments.loss_check.published import make_tables

    named = " ".join(word.partition("=")[2] if word.startswith("surrogate=") else word for word in overrides)
    return make_tables({named: to_run(compose_config(overrides)).surrogate})
