"""Colours, and how the lines of arms look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from matplotlib.artist import Artist
from matplotlib.lines import Line2D

# Okabe and Ito's palette, distinct also for the colour-blind.
BLACK, BLUE, GREEN, VERMILLION = "#000000", "#0072B2", "#009E73", "#D55E00"
PURPLE, ORANGE, SKY, BROWN = "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31"
GREY, FAINT = "#606060", "#C4C4C4"

Dashes = Literal["-", "--", ":", "-."]  # of a line
Entry = tuple[Artist, str]  # of a legend


class Look(NamedTuple):
    """How a line looks; only evaluations have a marker."""

    colour: str
    dashes: Dashes = "-"
    marker: str = ""

    def line(self, width: float = 1.7) -> dict[str, Any]:
        """As arguments of `Axes.plot` or of a handle in a legend."""
        look = {"color": self.colour, "linestyle": self.dashes, "marker": self.marker}
        return look | {"linewidth": width, "markersize": 2.6}

    def entry(self, words: str) -> Entry:
        """An entry of a legend."""
        look: dict[str, Any] = self.line() | {"markersize": 4}
        return Line2D([], [], **look), words


def looks(arms: Sequence[str], control: str) -> dict[str, Look]:
    """Colour and dashes of every arm: black for the control, one colour for `+x` and `-x`, then dashes as well."""
    palette = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BROWN)
    dashes: tuple[Dashes, ...] = ("-", "--", ":", "-.")
    colours = list(dict.fromkeys(arm.lstrip("+-") for arm in arms if arm != control))
    found = {control: Look(BLACK)}
    for arm in (arm for arm in arms if arm != control):
        colour = palette[colours.index(arm.lstrip("+-")) % len(palette)]
        before = sum(1 for other in found.values() if other.colour == colour)
        found[arm] = Look(colour, dashes[before % len(dashes)])
    return found
