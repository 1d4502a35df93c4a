"""The catalogue of axes and their options, read from the classes and YAML files that define them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import yaml

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import AXES, CONFIG_GROUPS, TRICK_SLOTS, slot_types
from grpo_lab.config.user_files import LOADER, user_folders

# An arXiv id and the one or two words before it that name the method; the first starts with a capital or a digit.
_PAPER = re.compile(r"(?:[A-Z0-9][\w.@+/-]*(?: [\w][\w.@+/-]*)? )?\b\d{4}\.\d{5}\b")


@dataclass(frozen=True)
class Option:
    """One option of an axis: its name, and the first comment line of its YAML file."""

    name: str
    text: str


@dataclass(frozen=True)
class Gaps:
    """Ingredients that a recipe lacks, by its file: published ones left out, with reasons, and facts not verified.

    Empty for the entry `nothing`.
    """

    left_out: tuple[str, ...]
    unverified: tuple[str, ...]


@dataclass(frozen=True)
class Axis:
    """One trick axis: the question it decides, and its options, the plain one first."""

    name: str
    question: str
    options: tuple[Option, ...]


WRONG = "reward.wrong"  # what a wrong answer earns, which a recipe may set whatever grader a task has


@cache
def plain_options() -> dict[str, str]:
    """Slot -> its default option, as in config.yaml."""
    defaults = yaml.load((conf_folder() / "config.yaml").read_text(), LOADER)["defaults"]
    return {
        slot: option
        for entry in defaults
        if isinstance(entry, dict)
        for slot, option in entry.items()
        if not slot.startswith("override ")
    }


def _folders() -> list[Path]:
    """Folders that hold options: the configuration folder, then the user's own."""
    return [conf_folder(), *user_folders()]


def option_text(slot: str, option: str) -> str:
    """The text of an option's YAML file, also from the user's own folders; "" if there is no such file."""
    for folder in _folders():
        path = folder / slot / f"{option}.yaml"
        if path.exists():
            return path.read_text()
    return ""


def axes(folders: Sequence[Path] | None = None) -> list[Axis]:
    """Every trick axis, in the order in which a batch meets them, and the critic.

    Options come from `folders`, or else from the configuration folder and the user's own.
    """
    plain = plain_options()
    found = []
    for axis in TRICK_SLOTS:
        question = (sys.modules[slot_types()[axis].__module__].__doc__ or "").splitlines()[0].partition(": ")[2]
        files = [path for folder in folders or _folders() for path in (folder / axis).glob("*.yaml")]
        files.sort(key=lambda path: (path.stem != plain[axis], path.stem))
        options = []
        for path in files:
            options.append(Option(path.stem, path.read_text().splitlines()[0].removeprefix("# ")))
        found.append(Axis(axis, question.rstrip("."), tuple(options)))
    return found


def tricks_list() -> str:
    """Axes and their options, one line each, for a terminal."""
    lines = []
    for axis in axes():
        lines.append(f"{axis.name}: {axis.question}")
        width = max(len(option.name) for option in axis.options)
        lines += [f"  {option.name:<{width}}  {option.text}" for option in axis.options]
    return "\n".join(lines)


def tricks_table() -> str:
    """The axes and their options as a markdown table, without the user's own."""
    lines = ["| axis | what it decides | options, the default first |", "|---|---|---|"]
    for axis in axes([conf_folder()]):
        lines.append(f"| {axis.name} | {axis.question} | {', '.join(option.name for option in axis.options)} |")
    return "\n".join(lines)


def papers_table() -> str:
    """The papers as a markdown table: methods, arXiv id, and the options and recipes that name the paper."""
    names: dict[str, list[str]] = {}
    options: dict[str, list[str]] = {}
    for slot in (*TRICK_SLOTS, "optimizer", "recipe"):
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


def left_out_table() -> str:
    """Published tricks that are not implemented as a markdown table: name, arXiv id and the reason."""
    found = yaml.safe_load((conf_folder() / "left_out.yaml").read_text())
    lines = ["| not implemented | arXiv | why |", "|---|---|---|"]
    named = sorted(found.items(), key=lambda entry: entry[0].lower())
    lines += [f"| {name} | {entry['arxiv'] or '-'} | {entry['why']} |" for name, entry in named]
    return "\n".join(lines)


def recipes_table() -> str:
    """The recipes as a markdown table: the option each selects on each axis; `-` for the plain option."""
    recipes = recipe_overrides()
    numbers = sorted({slot for chosen in recipes.values() for slot in chosen if "." in slot})
    slots = [slot for slot in (*AXES, *CONFIG_GROUPS, *numbers) if any(slot in chosen for chosen in recipes.values())]
    lines = [f"| recipe | {' | '.join(slots)} |", "|---" * (len(slots) + 1) + "|"]
    for name, chosen in recipes.items():
        lines.append(f"| {name} | {' | '.join(chosen.get(slot, '-') for slot in slots)} |")
    return "\n".join(lines)


def recipe_overrides() -> dict[str, dict[str, str]]:
    """Recipe -> slot -> the option it selects, and the few numbers it sets, as `reward.wrong` -> -1. `plain` is first.

    A number is one of the reward or the optimiser, whose other numbers are those of the task and the model.
    """
    found = {}
    for path in sorted((conf_folder() / "recipe").glob("*.yaml"), key=lambda path: (path.stem != "plain", path.stem)):
        written = yaml.load(path.read_text(), LOADER)
        found[path.stem] = {
            key.removeprefix("override /"): option for entry in written["defaults"] for key, option in entry.items()
        }
        for slot in ("reward", "optimizer"):
            found[path.stem] |= {f"{slot}.{name}": f"{value:g}" for name, value in written.get(slot, {}).items()}
    return found


def recipe_gaps(recipe: str) -> Gaps:
    """The gaps stated in a recipe's file, in its lines `# left out: ...` and `# unverified: ...`."""
    lines = option_text("recipe", recipe).splitlines()

    def of_kind(kind: str) -> tuple[str, ...]:
        found = (line.removeprefix(f"# {kind}: ") for line in lines if line.startswith(f"# {kind}: "))
        return tuple(item for item in found if item != "nothing")

    return Gaps(of_kind("left out"), of_kind("unverified"))


def ingredients_table() -> str:
    """The ingredients of each recipe's source as a markdown table: present, left out with the reason, unverified."""
    lines = ["| recipe | there | left out, why | unverified |", "|---|---|---|---|"]
    for name, chosen in recipe_overrides().items():
        gaps = recipe_gaps(name)
        there = ", ".join(f"{slot}={option}" for slot, option in chosen.items())
        cells = (name, there, "; ".join(gaps.left_out), "; ".join(gaps.unverified))
        lines.append(f"| {' | '.join(cell or '-' for cell in cells)} |")
    return "\n".join(lines)


# README.md's sentence with the numbers of options, axes and recipes; line breaks may fall between its words.
_COUNTED = re.compile(r"\d+(\s+options\s+on\s+)\d+(\s+axes,\s+and\s+)\d+(\s+recipes)")


def documented() -> dict[Path, str]:
    """Path -> up-to-date text of each page with generated tables or counts.

    The beginning of a table's first line marks where the table goes. Raises ValueError for a missing page, or a page
    without such a line.
    """
    root = conf_folder().parent
    pages = {
        root / "README.md": _with_counts,
        root / "conf" / "README.md": partial(with_tables, tables=_OPTIONS),
        root / "conf" / "recipes.md": partial(with_tables, tables=_RECIPES),
        root / "conf" / "left_out.md": partial(with_tables, tables=_LEFT_OUT),
    }
    for path in pages:
        if not path.is_file():
            raise ValueError(f"there is no {path}: the pages are written in a checkout of the repository")
    return {path: written(path) for path, written in pages.items()}


def _with_counts(path: Path) -> str:
    found = axes([conf_folder()])
    counts = sum(len(axis.options) for axis in found), len(found), len(recipe_overrides())
    text, places = _COUNTED.subn("{}\\g<1>{}\\g<2>{}\\g<3>".format(*counts), path.read_text())
    if not places:
        raise ValueError(f"{path} does not count what there is: write `1 options on 1 axes, and 1 recipes` into it")
    return text


_OPTIONS = {"| axis | what ": tricks_table, "| trick or recipe | ": papers_table}
_RECIPES = {
    "| recipe | there ": ingredients_table,
    "| recipe | curriculum ": recipes_table,
}
_LEFT_OUT = {"| not implemented | ": left_out_table}


def with_tables(path: Path, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with its tables written anew: the beginning of a table's first line -> what makes the table."""
    lines = path.read_text().splitlines()
    for beginning, table in tables.items():
        start = next((number for number, line in enumerate(lines) if line.startswith(beginning)), None)
        if start is None:
            raise ValueError(f"{path} has no table that begins with `{beginning}`: write this where it should stand")
        end = next((number for number in range(start, len(lines)) if not lines[number].startswith("|")), len(lines))
        lines[start:end] = table().splitlines()
    return "\n".join(lines) + "\n"


def write_pages(documented: Iterable[Callable[[], Mapping[Path, str]]]) -> list[str]:
    """Write the pages whose text has changed, and return a line for each page; one page may be of several functions."""
    changed: dict[Path, bool] = {}
    for tables in documented:
        for path, text in tables().items():
            new = path.read_text() != text
            if new:
                path.write_text(text)
            changed[path] = new or changed.get(path, False)
    return [f"{path}: {'written' if new else 'up to date'}" for path, new in changed.items()]
