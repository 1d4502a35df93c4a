"""The figures of the report: embedded as data URIs, each with how to read it and where its numbers are."""

from __future__ import annotations

import base64
import io
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from grpo_lab.analysis.figures.registry import FIGURES
from grpo_lab.analysis.figures.style import DPI, Drawn, write_png
from grpo_lab.analysis.report.templates import render

LARGEST_SVG = 100_000  # bytes; a larger figure is embedded as PNG where that is smaller
_PIXELS = 96  # an inch, as CSS has it


def figures_section(figures: Sequence[Drawn], missing: Mapping[str, str], name: str) -> Markup:
    """Every figure with how to read it and where its numbers are; then the figures that could not be drawn."""
    absent = [(_read(key, name)[0], key, reason) for key, reason in missing.items()]
    shown = [_figure(drawn, name) for drawn in figures]
    return render("figures.html", figures=shown, absent=absent, name=shlex.quote(name))


def _read(figure: str, sweep: str) -> tuple[str, str]:
    """Title and how to read it; a figure that is not registered has its name as its title."""
    known = {kind.name(sweep): (kind.title, kind.how_to_read) for kind in FIGURES}
    plain = figure.removeprefix(f"{sweep}_").replace("_", " ")
    return known.get(figure, (plain, ""))


def _figure(drawn: Drawn, name: str) -> dict[str, Any]:
    heading, reading = _read(drawn.name, name)
    width, height = (round(_PIXELS * inches) for inches in drawn.size)
    bands = f"{drawn.bands[:1].upper()}{drawn.bands[1:]}."
    described = {"name": drawn.name, "title": heading, "reading": reading, "bands": bands}
    described["caption"] = drawn.caption
    return described | {"width": width, "height": height, "source": image_uri(drawn)}


def image_uri(drawn: Drawn) -> str:
    """The figure as a data URI: SVG, or PNG where the SVG is large and the PNG is not."""
    svg, png = io.BytesIO(), io.BytesIO()
    drawn.write(svg, "svg", DPI)
    if svg.tell() > LARGEST_SVG:
        write_png(drawn, png)
    kind, image = ("png", png) if 0 < png.tell() < svg.tell() else ("svg+xml", svg)
    return f"data:image/{kind};base64,{base64.b64encode(image.getvalue()).decode()}"
