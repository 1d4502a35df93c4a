"""How figures look, and how they are written: a picture, its numbers and their sources in four files."""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import matplotlib
import pandas as pd
import seaborn as sns
from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox
from PIL import Image

from grpo_lab.tracking.files import write_json, write_whole
from grpo_lab.tracking.metrics import find

# Okabe and Ito's palette, which the colour-blind tell apart.
BLACK, BLUE, GREEN, VERMILLION = "#000000", "#0072B2", "#009E73", "#D55E00"
GREY = "#606060"
DPI, TALL_DPI, TALL = 110, 80, 15.0  # the second is the DPI of figures taller than TALL inches
COLOURS, TALL_COLOURS = 128, 64  # of a PNG: a quarter of the bytes, and nobody sees it
HEADING, BODY, SMALL, TINY = 10.0, 8.5, 7.5, 7.0  # points; a figure is 8 inches wide and more
LINE = 1.45 / 72  # inches a line of text takes, for each point of its size
_CHARACTER = 0.0077  # inches a character takes on average, for each point of its size
_BOLD = 1.12  # times as much, when bold
_SPARE = 0.05  # inches that a line may be wider than asked for: every text has more room than that beside it

Dashes = Literal["-", "--", ":", "-."]  # of a line

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": BODY,
    "axes.titlesize": BODY,
    "axes.labelsize": BODY,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.5,
    "grid.color": "#E4E4E4",
    "axes.grid": True,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Drawn:
    """A figure, all numbers in it, and what its bands or bars mean in words; notes take `below` inches under it."""

    name: str
    figure: Figure
    numbers: pd.DataFrame
    bands: str
    below: float = 0.0

    @property
    def size(self) -> tuple[float, float]:
        """Width and height in inches, notes included."""
        width, height = self.figure.get_size_inches()
        return float(width), float(height) + self.below

    def write(self, place: Path | BytesIO, kind: str, dpi: int) -> None:
        """Write it as "svg" or "png"; the same data give the same bytes."""
        with house_style(self.name):
            width, height = self.figure.get_size_inches()
            # Without a date, and with ids from the name.
            only: dict[str, Any] = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": dpi}
            if self.below:
                only["bbox_inches"] = Bbox([[0.0, -self.below], [width, height]])
            self.figure.savefig(place, format=kind, **only)


def with_notes(drawn: Drawn, notes: Sequence[str]) -> Drawn:
    """The figure with sentences under it, in a colour that is not overlooked; as it was where there are none."""
    if not notes:
        return drawn
    width = float(drawn.figure.get_figwidth())
    lines = wrapped(" ".join(notes), width - 0.2, TINY, bold=True)
    with house_style(drawn.name):
        text = "\n".join(lines)
        drawn.figure.text(0.1 / width, 0.0, text, va="top", fontsize=TINY, color=VERMILLION, fontweight="bold")
    return replace(drawn, below=len(lines) * TINY * LINE + 0.08)


@contextlib.contextmanager
def house_style(name: str) -> Iterator[None]:
    """Draw and save inside of this. `name` seeds the ids in SVG files, so that a rebuild gives the same bytes."""
    # Any: the stubs of matplotlib list every key that rc may have.
    settings: dict[Any, Any] = {**sns.axes_style("ticks"), **_SETTINGS, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        yield


def wrapped(text: str, inches: float, size: float, bold: bool = False) -> list[str]:
    """The text in lines that fit a width, at least one line; a word that is too long stays whole."""
    most = int(inches / (_CHARACTER * size * (_BOLD if bold else 1.0)))
    lines = textwrap.wrap(text, most)
    while most > 1 and any(" " in line and _measured(line, size, bold) > inches + _SPARE for line in lines):
        most -= 1  # its characters are wider than the average
        lines = textwrap.wrap(text, most)
    return lines or [""]


@cache
def _measured(line: str, size: float, bold: bool) -> float:
    """How many inches a line takes in a PNG, where characters stand on whole pixels."""
    font = FontProperties(family="DejaVu Sans", size=size, weight="bold" if bold else "normal")
    return RendererAgg(1, 1, DPI).get_text_width_height_descent(line, font, False)[0] / DPI


def broken(name: str, inches: float, size: float) -> list[str]:
    """A bold name in lines that fit a width, broken only before a `+` and after a comma."""
    lines = [""]
    for part in re.split(r"(?<=,)|(?=\+)", name):
        if lines[-1] and len(wrapped(lines[-1] + part, inches, size, bold=True)) > 1:
            lines.append("")
        lines[-1] += part
    return lines


def text_width(text: str, size: float) -> float:
    """About how many inches a line of text takes."""
    return _CHARACTER * size * len(text)


def heading_height(text: str, width: float) -> float:
    """Inches that `write_heading` takes at the top of a figure of this width (inches)."""
    return 0.14 + len(wrapped(text, width - 0.2, HEADING, bold=True)) * HEADING * LINE


def write_heading(figure: Figure, text: str) -> None:
    """The question, bold, over the whole width of the figure."""
    width, height = figure.get_size_inches()
    lines = "\n".join(wrapped(text, width - 0.2, HEADING, bold=True))
    figure.text(0.1 / width, 1 - 0.08 / height, lines, va="top", fontsize=HEADING, fontweight="bold")


def write_footer(figure: Figure, lines: Sequence[str]) -> None:
    """What a reader must know beside the panels, at the foot of the figure."""
    width, height = figure.get_size_inches()
    figure.text(0.1 / width, 0.06 / height, "\n".join(lines), va="bottom", fontsize=TINY, color=GREY)


def budget_label(axis: str, largest: float) -> tuple[str, FuncFormatter]:
    """The label of a budget axis, with its unit and scale, and the formatter that applies the scale."""
    scales = [(1e12, "10$^{12}$"), (1e9, "billions"), (1e6, "millions"), (1e3, "thousands")]
    scale, word = next(((size, word) for size, word in scales if largest >= 10 * size), (1.0, ""))
    unit = find(f"budget/{axis}").unit
    words = axis.replace("_", " ")
    inside = ", ".join(filter(None, (word, "" if unit in words else unit)))
    return f"{words} ({inside})" if inside else words, FuncFormatter(lambda value, _: f"{value / scale:g}")


def write_png(drawn: Drawn, path: Path | BytesIO) -> None:
    """Write the figure as a small PNG: few colours, and fewer points an inch where it is tall."""
    whole = BytesIO()
    dpi, colours = (TALL_DPI, TALL_COLOURS) if drawn.figure.get_figheight() > TALL else (DPI, COLOURS)
    drawn.write(whole, "png", dpi)
    with Image.open(whole) as picture:
        # The default, median cut, makes one teal of a few green and a few blue pixels.
        reduced = picture.convert("RGB").quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        reduced.save(path, format="PNG", optimize=True)


def save(drawn: Drawn, folder: Path, sources: Mapping[str, Any]) -> list[Path]:
    """Write `<name>.svg`, `.png`, `.csv` (the numbers drawn) and `.json` (`sources` and the bands)."""
    svg, png, csv, described = (folder / f"{drawn.name}.{suffix}" for suffix in ("svg", "png", "csv", "json"))
    write_whole(svg, lambda path: drawn.write(path, "svg", DPI))
    write_whole(png, lambda path: write_png(drawn, path))
    write_whole(csv, lambda path: drawn.numbers.to_csv(path, index=False))
    write_json(described, {"figure": drawn.name, "bands": drawn.bands, **sources})
    return [svg, png, csv, described]
