"""The HTML of the report: Jinja2 templates, which escape every text once, and the records that they show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
VENDOR = Path(__file__).parent / "vendor"
_ONE_LINE = 48  # characters


class Table(NamedTuple):
    """A table: its caption, its column headings, and its rows of plain text, the first cell of which heads the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]


class Item(NamedTuple):
    """An entry of a list, and the entries of the list under it."""

    text: str
    under: list[str]


def render(template: str, **values: object) -> Markup:
    """HTML of a file in `templates`. Raises UndefinedError where it names a value that is not given."""
    return Markup(environment().get_template(template).render(values))


def nested(lines: Iterable[str]) -> list[Item]:
    """Lines as a list; lines that begin with two spaces go under the line before them."""
    entries: list[Item] = []
    for line in lines:
        if entries and line.startswith("  "):
            entries[-1].under.append(line.strip())
        else:
            entries.append(Item(line, []))
    return entries


@cache
def environment() -> Environment:
    """The templates with autoescape, in which a value that is not given is an error."""
    made = Environment(
        loader=FileSystemLoader([TEMPLATES, VENDOR]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=False,
    )
    # The filter tojson escapes <, > and &, so no text can end the script element that it stands in.
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.tests["short_number"] = _is_short_number
    made.globals["file"] = _file
    return made


def _is_short_number(cell: object) -> bool:
    """True for a number with its interval, which stays on one line; words may be broken."""
    text = str(cell)
    return text.lstrip("+-")[:1].isdigit() and len(text) < _ONE_LINE


def _file(name: str) -> Markup:
    """The text of our own style or script, or of a vendored one, as it is."""
    folder = VENDOR if (VENDOR / name).exists() else TEMPLATES
    return Markup((folder / name).read_text(encoding="utf-8"))
