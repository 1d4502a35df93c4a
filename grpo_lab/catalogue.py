"""What can be chosen: axes and their options, read from the classes and the YAML files that define them."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass

import yaml

from grpo_lab.config import AXES, conf_folder, slot_types


@dataclass(frozen=True)
class Option:
    """One option of an axis: its name, what its YAML file says of it, and the papers named there."""

    name: str
    text: str
    papers: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One trick axis: what it decides, and its options, the plain one first."""

    name: str
    question: str
    options: tuple[Option, ...]


def axes() -> list[Axis]:
    """Every trick axis, in the order in which a batch meets them."""
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text())["defaults"]
    plain = {axis: option for entry in defaults if isinstance(entry, dict) for axis, option in entry.items()}
    found = []
    for axis in AXES:
        question = (sys.modules[slot_types()[axis].__module__].__doc__ or "").splitlines()[0].partition(": ")[2]
        files = sorted((conf_folder() / axis).glob("*.yaml"), key=lambda path: (path.stem != plain[axis], path.stem))
        options = []
        for path in files:
            text = path.read_text().splitlines()[0].removeprefix("# ")
            options.append(Option(path.stem, text, tuple(re.findall(r"\b\d{4}\.\d{5}\b", text))))
        found.append(Axis(axis, question.rstrip("."), tuple(options)))
    return found


def tricks_table() -> str:
    """The axes as a markdown table; an option is followed by the arXiv ids its file names."""
    lines = ["| axis | what it decides | options, the plain one first |", "|---|---|---|"]
    for axis in axes():
        options = ", ".join(
            f"{option.name} ({', '.join(option.papers)})" if option.papers else option.name for option in axis.options
        )
        lines.append(f"| {axis.name} | {axis.question} | {options} |")
    return "\n".join(lines)
