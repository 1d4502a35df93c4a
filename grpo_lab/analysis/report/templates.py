"""The HTML of the report: Jinja2 templates, which escape every text once, and the records that they show."""

from __future__ import annotations

import base64
import gzip
import json
import zipfile
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"
UPLOT = Path(__file__).parent / "uPlot-1.6.32.zip"
_ONE_LINE = 48  # characters


class HtmlTable(NamedTuple):
    """A table: its caption, its column headings, and its rows of plain text, the first cell of which heads the row."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[object]]


def render(template: str, **values: object) -> Markup:
    """HTML of a file in `templates`. Raises UndefinedError where it names a value that is not given."""
    return Markup(environment().get_template(template).render(values))


def nested(lines: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Lines, each with those under it: the lines after it that begin with two spaces, without these."""
    entries: list[tuple[str, list[str]]] = []
    for line in lines:
        if entries and line.startswith("  "):
            entries[-1][1].append(line.strip())
        else:
            entries.append((line, []))
    return entries


@cache
def environment() -> Environment:
    """The templates with autoescape, in which a value that is not given is an error."""
    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # The filter tojson escapes <, > and &, so no text can end the script element that it stands in.
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    made.filters["packed"] = packed
    made.tests["short_number"] = _is_short_number
    made.globals |= {"file": _file, "uplot": uplot}
    return made


def packed(value: object) -> str:
    """A JSON value as compressed base64, about a quarter of its length; `unpacked` in panel.js reads it."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _is_short_number(cell: object) -> bool:
    """True for a number with its interval, which stays on one line; words may be broken."""
    text = str(cell)
    return text.lstrip("+-")[:1].isdigit() and len(text) < _ONE_LINE


def _file(name: str) -> Markup:
    """The text of a style or script beside the templates, as it is."""
    return Markup((TEMPLATES / name).read_text(encoding="utf-8"))


def uplot(name: str) -> Markup:
    """The text of a file of the chart library, as it is."""
    with zipfile.ZipFile(UPLOT) as archive:
        return Markup(archive.read(name).decode())
