"""Figures: their declaration, their look, and their files: a picture, its numbers and their sources.

Matplotlib's constrained layout makes room for headings, legends and labels. A figure carries at most two lines of
explanation; everything else that a reader must know is its caption, which stands in its JSON file and on the page.
"""

from __future__ import annotations

import contextlib
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import pandas as pd
import seaborn as sns
from adjustText import adjust_text
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox
from PIL import Image

from grpo_lab.analysis.figures.palette import GREY, VERMILLION, Entry
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.tracking.files import write_atomically, write_json
from grpo_lab.tracking.metrics import find

WIDTH = 8.0  # inches, as wide as a page
DPI, TALL_DPI, TALL = 110, 80, 15.0  # the second is the DPI of figures taller than TALL inches
COLOURS, TALL_COLOURS = 128, 64  # of a PNG: a quarter of the bytes, and nobody sees it
HEADING, BODY, SMALL, TINY = 10.0, 8.5, 7.5, 7.0  # points
_PER_INCH = {HEADING: 11.0, TINY: 18.0}  # characters of that size
FOOTER_LINES = 2
_PASSES = 2  # of constrained layout, until labels of secondary axes have their room
_STEPS = 300  # of adjustText, which would stop by the clock otherwise

_SETTINGS = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": BODY,
    "axes.titlesize": BODY,
    "axes.titlelocation": "left",
    "axes.labelsize": BODY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "axes.linewidth": 0.8,
    "grid.linewidth": 0.5,
    "grid.color": "#E4E4E4",
    "axes.grid": True,
    "legend.fontsize": SMALL,
    "legend.frameon": False,
    "svg.fonttype": "none",
}


@dataclass(frozen=True)
class Drawn:
    """A figure and all numbers in it.

    `bands` says in a sentence part what its marks, bars and bands mean. `caption` is what a page prints under the
    figure: how the numbers were made, what is missing, and caveats. Notes take `below` inches under the panels.
    """

    name: str
    figure: Figure
    numbers: pd.DataFrame
    bands: str
    below: float = 0.0
    caption: str = ""

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


@dataclass(frozen=True)
class FigureKind:
    """One kind of figure; `registry` finds it as the `FIGURE` of a module.

    `draw` returns the figure or, in one sentence part without a full stop, why this sweep cannot have it. `title` and
    `how_to_read` stand over the figure in the report, and `order` is its place among the others.
    """

    suffix: str  # files are called <sweep>_<suffix>; the first figure has none
    draw: Callable[[SweepData, FinalValues], Drawn | str]
    title: str
    how_to_read: str
    order: int = 100

    def name(self, sweep: str) -> str:
        """The figure's name in this sweep."""
        return f"{sweep}_{self.suffix}" if self.suffix else sweep


def with_notes(drawn: Drawn, notes: Sequence[str]) -> Drawn:
    """The figure with caveats: all in its caption, what each is about in one line under it; unchanged without any."""
    if not notes:
        return drawn
    width = float(drawn.figure.get_figwidth())
    about = "; ".join(dict.fromkeys(_about(note) for note in notes))
    lines = shortened(f"Caveats (in the verdict): {about}.", width * 0.9, 1)
    with house_style(drawn.name):
        look: dict[str, Any] = {"va": "top", "fontsize": TINY, "color": VERMILLION, "fontweight": "bold"}
        drawn.figure.text(0.01, 0.0, lines, in_layout=False, **look)
    caption = " ".join(filter(None, [drawn.caption, *notes]))
    return replace(drawn, below=0.08 + 0.15 * (lines.count("\n") + 1), caption=caption)


def _about(note: str) -> str:
    """The subject of a caveat: its words before the first punctuation."""
    words = re.split(r"[:;,(]|\.(?: |$)", note)[0].strip()
    return words[:1].lower() + words[1:] if words[1:2].islower() else words


@contextlib.contextmanager
def house_style(name: str) -> Iterator[None]:
    """Draw and save inside of this. `name` seeds the ids in SVG files, so that a rebuild gives the same bytes."""
    # Any: the stubs of matplotlib list every key that rc may have.
    settings: dict[Any, Any] = {**sns.axes_style("ticks"), **_SETTINGS, "svg.hashsalt": name}
    with matplotlib.rc_context(settings):
        yield


def new_figure(heading: str, height: float, width: float = WIDTH) -> Figure:
    """An empty figure under its heading, the question that it answers; width and height are in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", dpi=DPI)
    FigureCanvasAgg(figure)
    words = textwrap.fill(heading, int(width * _PER_INCH[HEADING]))
    figure.suptitle(words, x=0.01, ha="left", fontsize=HEADING, fontweight="bold")
    return figure


@contextlib.contextmanager
def drawing(
    name: str,
    heading: str,
    height: float,
    footer: str,
    entries: Sequence[Entry] = (),
    columns: int = 2,
    width: float = WIDTH,
) -> Iterator[Figure]:
    """A figure in the house style, with its heading and legend above the panels that its block draws, and its footer.

    After the block the layout is fixed.
    """
    with house_style(name):
        figure = new_figure(heading, height, width)
        yield figure
        write_legend(figure, entries, columns)
        write_footer(figure, footer)


def write_legend(figure: Figure, entries: Sequence[Entry], columns: int = 2) -> None:
    """Handles with their words, between the heading and the panels."""
    if not entries:
        return
    # Constrained layout puts a legend over the heading, unless the heading is the legend's title.
    heading = figure.get_suptitle()
    figure.suptitle("").set_in_layout(False)
    legend = figure.legend(
        [artist for artist, _ in entries], [words for _, words in entries], loc="outside upper left", title=heading,
        ncols=columns, alignment="left", borderpad=0.2, borderaxespad=0.3, handlelength=2.4, columnspacing=1.6,
    )  # fmt: skip
    legend.get_title().set(fontsize=HEADING, fontweight="bold")


def write_footer(figure: Figure, text: str, lines: int = FOOTER_LINES) -> None:
    """What the marks mean, at the foot of the figure; more than two lines where no page prints the caption.

    The layout is then fixed.
    """
    words = shortened(f"{text[:1].upper()}{text[1:]}.", float(figure.get_figwidth()), lines)
    figure.supxlabel(words, x=0.01, ha="left", fontsize=TINY, color=GREY)
    for _ in range(_PASSES):
        figure.draw_without_rendering()
    figure.set_layout_engine("none")  # every file of a figure has the same layout


def shortened(text: str, width: float, lines: int = FOOTER_LINES) -> str:
    """The text in lines of TINY size that fit a width in inches; the caption and the table have the rest."""
    rest = " ... (more in the table)"
    return "\n".join(textwrap.wrap(text, int(width * _PER_INCH[TINY]), max_lines=lines, placeholder=rest))


def sentences(parts: Mapping[str, object]) -> str:
    """A caption: the sentences whose value is true, one after the other."""
    return " ".join(sentence for sentence, holds in parts.items() if sentence and holds)


def in_lines(name: str, width: int = 20) -> str:
    """Wrap a name at about `width` characters: after a comma, an underscore or a space, or before a plus."""
    lines = [""]
    for part in re.split(r"(?<=[,_ ])|(?=\+)", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.strip() for line in lines)


def place_names(axes: Axes, named: Sequence[tuple[float, float, str, str]], others: pd.DataFrame) -> None:
    """Write names beside their points, each as x, y, text and colour, away from each other and from the other points.

    `others` holds x and y of those in its first two columns. Call it last, when the layout is fixed.
    """
    texts = [axes.text(x, y, text, color=colour, fontsize=TINY) for x, y, text, colour in named]
    xs, ys = (others.iloc[:, place].to_numpy(float) for place in (0, 1))
    arrows = {"arrowstyle": "-", "color": GREY, "linewidth": 0.5}
    adjust_text(texts, x=xs, y=ys, ax=axes, iter_lim=_STEPS, expand=(1.1, 1.25), arrowprops=arrows)


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
    """Write `<name>.svg`, `.png`, `.csv` (the numbers drawn) and `.json` (`sources`, the bands and the caption)."""
    svg, png, csv, described = (folder / f"{drawn.name}.{suffix}" for suffix in ("svg", "png", "csv", "json"))
    write_atomically(svg, lambda path: drawn.write(path, "svg", DPI))
    write_atomically(png, lambda path: write_png(drawn, path))
    write_atomically(csv, lambda path: drawn.numbers.to_csv(path, index=False))
    write_json(described, {"figure": drawn.name, "bands": drawn.bands, "caption": drawn.caption, **sources})
    return [svg, png, csv, described]
