"""HTML of the report: tables, lists and paragraphs of escaped text."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Sequence

_ONE_LINE = 48  # characters


class Html(str):
    """Text that is HTML already, and is not escaped again."""


def escaped(text: object) -> str:
    """Text as HTML; `Html` stays what it is."""
    return text if isinstance(text, Html) else html.escape(str(text))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], caption: str) -> Html:
    """A table that scrolls sideways, its first column standing still; cells are escaped."""
    heads = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in head)
    body = "".join(f'<tr><th scope="row">{escaped(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>\n' for row in rows)
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(caption)}"><table>'
        f"<caption><span>{html.escape(caption)}</span></caption><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(content: object) -> str:
    """A number with its interval stays on one line; words may be broken."""
    whole = bool(re.match(r"[-+]?\d", str(content))) and len(str(content)) < _ONE_LINE
    return f"<td{' class=number' if whole else ''}>{escaped(content)}</td>"


def paragraph(text: str, kind: str = "") -> Html:
    """One paragraph of plain text."""
    attribute = f' class="{kind}"' if kind else ""
    return Html(f"<p{attribute}>{escaped(text)}</p>")


def items(lines: Iterable[object]) -> Html:
    """A list; lines that begin with two spaces are a list of their own, under the line before them."""
    parts: list[tuple[object, list[str]]] = []
    for line in lines:
        if parts and not isinstance(line, Html) and str(line).startswith("  "):
            parts[-1][1].append(f"<li>{escaped(str(line).strip())}</li>")
        else:
            parts.append((line, []))
    under = [f"<ul>{''.join(deeper)}</ul>" if deeper else "" for _, deeper in parts]
    return Html(f"<ul>{''.join(f'<li>{escaped(line)}{more}</li>' for (line, _), more in zip(parts, under))}</ul>")


def folded(summary: str, content: str) -> Html:
    """Content that opens on a click."""
    return Html(f"<details><summary>{html.escape(summary)}</summary>{content}</details>")


def embedded_json(value: object) -> str:
    """JSON that can stand inside a script element: no `<` in it can end that or open another."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
