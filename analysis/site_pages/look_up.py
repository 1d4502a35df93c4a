"""Pages to look things up in, made when the site is built: options, metrics and commands."""

from __future__ import annotations

import argparse
import html
from functools import partial

import yaml

from grpo_lab.cli import command_line
from grpo_lab.config.catalogue import axes, option_text
from grpo_lab.tracking.metrics import DERIVED, DIVERGENCE, PEERS, REGISTRY, SENT


def generated_pages() -> dict[str, str]:
    """Path in the navigation -> the page's Markdown."""
    return {
        "generated/options.md": _options(),
        "generated/metrics.md": _metrics(),
        "generated/commands.md": _commands(),
    }


def _table(head: str, rows: list[list[str]]) -> str:
    cells = [f"| {' | '.join(map(_cell, row))} |" for row in rows]
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *cells])


def _cell(text: str) -> str:
    """The text of a table's cell: code as it is, and < and | as characters outside of it."""
    parts = text.split("`")
    parts[::2] = [html.escape(part, quote=False).replace("|", "&#124;") for part in parts[::2]]
    return "`".join(part.replace("|", "\\|") if at % 2 else part for at, part in enumerate(parts))


def _options() -> str:
    """Every option of every axis, with what its file says and the numbers it sets."""
    sections = ["# Options", "`axis=option` on the command line selects one; `axis.number=value` sets a number of it."]
    for axis in axes():
        rows = [[f"`{one.name}`", one.text, _numbers(axis.name, one.name)] for one in axis.options]
        sections += [f"## {axis.name}", f"{axis.question[:1].upper()}{axis.question[1:]}. The first is the default."]
        sections.append(_table("| option | what it does | numbers |", rows))
    return "\n\n".join(sections) + "\n"


def _numbers(axis: str, option: str) -> str:
    values = yaml.safe_load(option_text(axis, option))
    return ", ".join(f"`{name}={_typed(value)}`" for name, value in values.items() if name != "defaults")


def _typed(value: object) -> str:
    """A value as it is typed on the command line."""
    return yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("...\n").strip()


def _metrics() -> str:
    groups: dict[str, list[list[str]]] = {}
    for metric in REGISTRY + SENT + DERIVED + DIVERGENCE:
        row = [f"`{metric.name}`", metric.meaning, metric.unit, metric.reduction, PEERS.get(metric.name, "")]
        groups.setdefault(metric.name.split("/")[0], []).append(row)
    sections = [
        "# Metrics",
        "`*` stands for a name, of an axis, a suite or a source. `grpo-lab metrics` prints them.",
    ]
    for name, rows in groups.items():
        sections += [f"## {name}", _table("| metric | what it is | unit | over | in TRL, verl |", rows)]
    return "\n\n".join(sections) + "\n"


def _commands() -> str:
    """The help of every command; that of `train` and `sweep` is Hydra's, which `--help` prints."""
    top, commands = command_line()
    sections = ["# Commands", _block(top)]
    for name, command in commands.items():
        sections += [f"## grpo-lab {name}", _block(command)]
        for further, one in _subcommands(command):
            sections += [f"### grpo-lab {name} {further}", _block(one)]
    return "\n\n".join(sections) + "\n"


def _block(command: argparse.ArgumentParser) -> str:
    command.formatter_class = partial(command.formatter_class, width=100)
    return f"```text\n{command.format_help().rstrip()}\n```"


def _subcommands(command: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    """The commands below one, such as `grpo-lab import trl`; none for most."""
    nested = [action.choices for action in command._actions if isinstance(action, argparse._SubParsersAction)]
    return [pair for choices in nested for pair in choices.items()]
