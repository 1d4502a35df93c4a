"""What can be chosen: axes and their options, read from the classes and the YAML files that define them."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from grpo_lab.config.run_config import AXES, ROOMS, conf_folder, slot_types
from grpo_lab.config.user_files import user_folders

# What the lists show: the axes, and the room that baselines with a critic read.
_SHOWN = (*AXES, "critic")

# An arXiv id with the word or two before it that name the method, the first of them capital or a number.
_PAPER = re.compile(r"(?:[A-Z0-9][\w.@+/-]*(?: [\w][\w.@+/-]*)? )?\b\d{4}\.\d{5}\b")


@dataclass(frozen=True)
class Option:
    """One option of an axis: its name, and what its YAML file says of it."""

    name: str
    text: str


@dataclass(frozen=True)
class Gaps:
    """What a recipe's file says of published ingredients that it does not bring, each with the reason, and of what
    nobody could verify; empty where it says `nothing`."""

    left_out: tuple[str, ...]
    unverified: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One trick axis: what it decides, and its options, the plain one first."""

    name: str
    question: str
    options: tuple[Option, ...]


@cache
def plain_options() -> dict[str, str]:
    """Slot -> the option that stands in it unless another is chosen."""
    defaults = yaml.safe_load((conf_folder() / "config.yaml").read_text())["defaults"]
    return {
        slot: option
        for entry in defaults
        if isinstance(entry, dict)
        for slot, option in entry.items()
        if not slot.startswith("override ")
    }


def _folders() -> list[Path]:
    """Where options are found: the configuration folder, and the user's own where there are some."""
    return [conf_folder(), *user_folders()]


def option_text(slot: str, option: str) -> str:
    """The YAML file of an option, the user's own folder included; "" where there is none."""
    for folder in _folders():
        path = folder / slot / f"{option}.yaml"
        if path.exists():
            return path.read_text()
    return ""


def axes(folders: Sequence[Path] | None = None) -> list[Axis]:
    """Every trick axis, in the order in which a batch meets them, and the critic; with the user's own options, unless
    `folders` names where to look."""
    plain = plain_options()
    found = []
    for axis in _SHOWN:
        question = (sys.modules[slot_types()[axis].__module__].__doc__ or "").splitlines()[0].partition(": ")[2]
        files = [path for folder in folders or _folders() for path in (folder / axis).glob("*.yaml")]
        files.sort(key=lambda path: (path.stem != plain[axis], path.stem))
        options = []
        for path in files:
            options.append(Option(path.stem, path.read_text().splitlines()[0].removeprefix("# ")))
        found.append(Axis(axis, question.rstrip("."), tuple(options)))
    return found


def tricks_list() -> str:
    """Axes and their options, one line each, for reading in a terminal."""
    lines = []
    for axis in axes():
        lines.append(f"{axis.name}: {axis.question}")
        width = max(len(option.name) for option in axis.options)
        lines += [f"  {option.name:<{width}}  {option.text}" for option in axis.options]
    return "\n".join(lines)


def tricks_table() -> str:
    """The axes and their options as a markdown table, without the user's own."""
    lines = ["| axis | what it decides | options, the plain one first |", "|---|---|---|"]
    for axis in axes([conf_folder()]):
        lines.append(f"| {axis.name} | {axis.question} | {', '.join(option.name for option in axis.options)} |")
    return "\n".join(lines)


def papers_table() -> str:
    """What each paper brought, as a markdown table: methods and arXiv id, and the options and recipes that name it."""
    names: dict[str, list[str]] = {}
    options: dict[str, list[str]] = {}
    for slot in (*_SHOWN, "optimizer", "recipe"):
        for path in sorted((conf_folder() / slot).glob("*.yaml")):
            text = " ".join(line for line in path.read_text().splitlines() if line.startswith("# "))
            for found in _PAPER.findall(text):
                name, paper = found[:-10].strip(), found[-10:]
                options.setdefault(paper, []).append(f"{slot}={path.stem}")
                if name and name not in names.setdefault(paper, []):
                    names[paper].append(name)
    lines = ["| trick or recipe | arXiv | options |", "|---|---|---|"]
    rows = sorted((", ".join(names.get(paper, ["-"])), paper, found) for paper, found in options.items())
    lines += [f"| {name} | {paper} | {', '.join(dict.fromkeys(found))} |" for name, paper, found in rows]
    return "\n".join(lines)


def recipes_table() -> str:
    """The recipes as a markdown table: what each selects, by axis; `-` where it leaves the plain option."""
    recipes = recipe_overrides()
    slots = [slot for slot in (*AXES, *ROOMS) if any(slot in chosen for chosen in recipes.values())]
    lines = [f"| recipe | {' | '.join(slots)} |", "|---" * (len(slots) + 1) + "|"]
    for name, chosen in recipes.items():
        lines.append(f"| {name} | {' | '.join(chosen.get(slot, '-') for slot in slots)} |")
    return "\n".join(lines)


def recipe_overrides() -> dict[str, dict[str, str]]:
    """Recipe -> slot -> the option it selects, plain first, the others by name."""
    found = {}
    for path in sorted((conf_folder() / "recipe").glob("*.yaml"), key=lambda path: (path.stem != "plain", path.stem)):
        entries = yaml.safe_load(path.read_text())["defaults"]
        found[path.stem] = {
            key.removeprefix("override /"): option for entry in entries for key, option in entry.items()
        }
    return found


def recipe_gaps(recipe: str) -> Gaps:
    """What the lines `# left out: ...` and `# unverified: ...` of a recipe's file say."""
    lines = option_text("recipe", recipe).splitlines()

    def said(kind: str) -> tuple[str, ...]:
        found = (line.removeprefix(f"# {kind}: ") for line in lines if line.startswith(f"# {kind}: "))
        return tuple(item for item in found if item != "nothing")

    return Gaps(said("left out"), said("unverified"))


def ingredients_table() -> str:
    """The ingredients of each recipe's source as a markdown table: there, left out and why, unverified."""
    lines = ["| recipe | there | left out, why | unverified |", "|---|---|---|---|"]
    for name, chosen in recipe_overrides().items():
        gaps = recipe_gaps(name)
        there = ", ".join(f"{slot}={option}" for slot, option in chosen.items())
        cells = (name, there, "; ".join(gaps.left_out), "; ".join(gaps.unverified))
        lines.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join(lines)


# What README.md says of how much there is; the words between the numbers may be wrapped.
_COUNTED = re.compile(r"\d+(\s+options\s+on\s+)\d+(\s+axes,\s+and\s+)\d+(\s+papers'\s+methods)")


def documented() -> dict[Path, str]:
    """Each page with tables that the code makes, or numbers of options: its path, and its text as it should be now.

    A table stands where the beginning of its first line is. Raises ValueError for a page that is missing,
    or has no such line.
    """
    root = conf_folder().parent
    pages = {root / "README.md": _with_counts, root / "conf" / "README.md": _with_tables}
    for path in pages:
        if not path.is_file():
            raise ValueError(f"there is no {path}: the pages are written in a checkout of the repository")
    return {path: written(path) for path, written in pages.items()}


def _with_counts(path: Path) -> str:
    found = axes([conf_folder()])
    counts = sum(len(axis.options) for axis in found), len(found), len(recipe_overrides())
    text, places = _COUNTED.subn("{}\\g<1>{}\\g<2>{}\\g<3>".format(*counts), path.read_text())
    if not places:
        raise ValueError(
            f"{path} does not count what there is: write `1 options on 1 axes, and 1 papers' methods` into it"
        )
    return text


def _with_tables(path: Path) -> str:
    lines = path.read_text().splitlines()
    tables = {
        "| axis | what ": tricks_table,
        "| trick or recipe | ": papers_table,
        "| recipe | there ": ingredients_table,
        "| recipe | curriculum ": recipes_table,
    }
    for beginning, table in tables.items():
        start = next((number for number, line in enumerate(lines) if line.startswith(beginning)), None)
        if start is None:
            raise ValueError(f"{path} has no table that begins with `{beginning}`: write this where it should stand")
        end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
        lines[start:end] = table().splitlines()
    return "\n".join(lines) + "\n"
