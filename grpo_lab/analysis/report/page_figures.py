"""The figures of the report: embedded as data URIs, each with how to read it and where its numbers are."""

from __future__ import annotations

import base64
import html
import io
import shlex
from collections.abc import Mapping, Sequence

from grpo_lab.analysis.figures.registry import FIGURES
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.report.page_words import Html, escaped, items, paragraph

LARGEST_SVG = 400_000  # bytes; a larger figure is embedded as PNG where that is smaller
PNG_DPI = 130


def figures_section(figures: Sequence[Drawn], missing: Mapping[str, str], name: str) -> Html:
    """Every figure with how to read it and where its numbers are; then the figures that could not be drawn."""
    shown = [_figure(drawn, name) for drawn in figures]
    again = f"make figures EXP={shlex.quote(name)}"
    where = f"The files named under a figure hold its numbers and their sources; {again} writes them."
    parts = [paragraph(where, "small"), *shown]
    if missing:
        parts.append("<h3>Not drawn</h3>")
        parts.append(items(f"{_read(key, name)[0]} ({key}): {reason}" for key, reason in missing.items()))
    return Html("\n".join(parts))


def _read(figure: str, sweep: str) -> tuple[str, str]:
    """Title and how to read it; a figure that is not registered has its name as its title."""
    known = {kind.name(sweep): (kind.title, kind.how_to_read) for kind in FIGURES}
    plain = figure.removeprefix(f"{sweep}_").replace("_", " ")
    return known.get(figure, (plain, ""))


def _figure(drawn: Drawn, name: str) -> str:
    heading, reading = _read(drawn.name, name)
    bands = f"{drawn.bands[:1].upper()}{drawn.bands[1:]}."
    width, height = (round(96 * inches) for inches in drawn.size)
    files = ", ".join(f"<code>{html.escape(drawn.name)}.{kind}</code>" for kind in ("csv", "json"))
    return (
        f'<figure class="figure" id="figure-{html.escape(drawn.name)}">\n<h3>{escaped(heading)}</h3>\n'
        f"<figcaption>{paragraph(f'{reading} {bands}'.strip())}</figcaption>\n"
        f'<div class="paper" tabindex="0" role="region" aria-label="{html.escape(heading)}, figure">'
        f'<img alt="{html.escape(f"{heading}. {bands}")}" width="{width}" height="{height}" '
        f'src="{image_uri(drawn)}"></div>\n'
        f'<p class="small">Numbers and sources: {files}</p>\n</figure>'
    )


def image_uri(drawn: Drawn) -> str:
    """The figure as a data URI: SVG, or PNG where the SVG is large and the PNG is not."""
    svg = _saved(drawn, "svg")
    if len(svg) > LARGEST_SVG:
        png = _saved(drawn, "png")
        if len(png) < len(svg):
            return f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"


def _saved(drawn: Drawn, kind: str) -> bytes:
    buffer = io.BytesIO()
    drawn.write(buffer, kind, PNG_DPI)
    return buffer.getvalue()
