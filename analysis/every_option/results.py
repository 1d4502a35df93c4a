"""The saved results of every option: whether it learns and acts, and the table of them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from every_option.runs import HERE, axis_of, is_default, options, settings
from grpo_lab.config.catalogue import with_tables

RESULTS = HERE / "results.json"
COMMAND = "PYTHONPATH=analysis python -m every_option"
LEARNT = 0.1  # rise of held-out accuracy over 128 answers, whose standard error is about 0.04


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Option -> version and commit of the code, and its runs; {} before the first."""
    return json.loads(path.read_text()) if path.exists() else {}


def rise(runs: Sequence[Mapping[str, Any]]) -> float:
    """The rise of held-out accuracy, as a mean over the seeds of the first setting."""
    first = [run["after"] - run["before"] for run in runs if run["setting"] == runs[0]["setting"]]
    return sum(first) / len(first)


def learns(runs: Sequence[Mapping[str, Any]]) -> bool:
    """True if held-out accuracy rose by more than chance moves it."""
    return rise(runs) >= LEARNT


def acting(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The run in which the option changed the updates; None if it did in none."""
    return next((run for run in runs if run["apart"] is not None), None)


def reason(reasons: Mapping[str, str], option: str) -> str | None:
    """Why this option or its whole axis is an exception; None if it is none."""
    return reasons.get(option, reasons.get(axis_of(option)))


def _acts(option: str, runs: Sequence[Mapping[str, Any]]) -> str:
    found = acting(runs)
    if is_default(option):
        return "the default"
    if found is None:
        return f"no-op here: {reason(settings().no_op, option)}"
    share = ""
    if found["share"] is not None:
        share = f"{found['counted']} {found['share']:.3g}"
        share += f" (default {found['beside']:.3g})" if found["beside"] else ""
    return "; ".join(part for part in (share, f"other updates from step {found['apart']}") if part)


def options_table(path: Path = RESULTS) -> str:
    """A row per option as a markdown table: whether it learns, where it acts, and in which setting."""
    lines = ["| option | held-out accuracy | what it changes | setting |", "|---|---|---|---|"]
    results = read_results(path)
    for option in options():
        if option in settings().left_out:
            lines.append(f"| `{option}` | not run | {settings().left_out[option]} | |")
        elif option in results:
            runs = results[option]["runs"]
            first = [run for run in runs if run["setting"] == runs[0]["setting"]]
            accuracy = ", ".join(f"{run['before']:.2f} -> {run['after']:.2f}" for run in first)
            where = (acting(runs) or runs[-1])["setting"]
            words = " ".join(f"`{word}`" for word in where)
            why = f"; no gain: {settings().no_gain[option]}" if option in settings().no_gain else ""
            lines.append(f"| `{option}` | {accuracy}{why} | {_acts(option, runs)} | {words} |")
    return "\n".join(lines)


def documented_options() -> dict[Path, str]:
    """The page of every option with its up-to-date table, from the saved results."""
    page = HERE / "README.md"
    return {page: with_tables(page, {"| option | held-out accuracy ": options_table})}
