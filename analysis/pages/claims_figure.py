"""Every claim that has been tested, in units of the margin its experiment declared."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from grpo_lab.analysis.effects.verdict import VERDICTS
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, VERMILLION
from grpo_lab.analysis.figures.style import SMALL, TINY, Drawn, house_style, new_figure, write_footer, write_legend
from grpo_lab.analysis.metric_names import metric_text
from grpo_lab.analysis.table_rows import rows_of
from pages.claims import Answer

NAME = "claims"
BARS = "mark: effect divided by its declared margin; bar: its 95% t interval over base models, likewise"
_COLOURS = dict(zip(VERDICTS, (GREEN, VERMILLION, BLUE, BLACK)))
_WIDTH, _ROW = 10.0, 0.3  # inches: the figure, one claim
_TEXT = 84  # characters of a line of a claim
_LIMIT = 8.0  # margins; what lies further out stands at the edge, with its number


def claim_numbers(found: Sequence[Answer]) -> pd.DataFrame:
    """One row per claim that was judged on a metric with a margin; effect and interval in the metric's own unit."""
    rows = []
    for answer in found:
        judgement = answer.judgement
        if (
            judgement is None
            or judgement.margin is None
            or answer.verdict not in _COLOURS
            or not judgement.difference.n
        ):
            continue
        rows.append(
            {
                "trick": answer.trick,
                "claim": answer.claim.says,
                "source": answer.claim.source,
                "experiment": answer.design.name,
                "where": " ".join(answer.where),
                "metric": metric_text(judgement.prediction.metric),
                "expected": answer.claim.direction.value,
                "verdict": answer.verdict,
                "effect": judgement.difference.mean,
                "low": judgement.difference.low,
                "high": judgement.difference.high,
                "margin": judgement.margin,
            }
        )
    return pd.DataFrame(rows).round(6)


def draw_claims(found: Sequence[Answer]) -> Drawn | None:
    """The figure `claims`, by trick; None where none has been judged."""
    numbers = claim_numbers(found)
    if numbers.empty:
        return None
    counts = numbers["verdict"].value_counts()
    verdicts = ", ".join(f"{counts[one]} {one}" for one in _COLOURS if one in counts)
    heading = f"{len(numbers)} claims of the literature that have a margin: {verdicts}"
    caption = (
        f"{BARS[:1].upper()}{BARS[1:]}. Grey: within the margin. Arrow: what the source expects. Hollow: no interval. "
        "Verdicts are after Holm"
    )
    tops = numbers["trick"] != numbers["trick"].shift()
    heights = np.arange(len(numbers)) + 0.9 * tops.cumsum()
    with house_style(NAME):
        figure = new_figure(heading, 1.1 + _ROW * float(heights.iloc[-1] + 1), _WIDTH)
        axes = figure.subplots()
        axes.axvspan(-1, 1, color=GREY, alpha=0.15, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1.0)
        for y, row in zip(heights, rows_of(numbers)):
            _draw_claim(axes, float(y), row)
        for y, trick in zip(heights[tops], numbers["trick"][tops]):
            axes.text(-_LIMIT - 0.5, y - 0.8, f"{trick} ", ha="right", va="center", fontsize=SMALL, fontweight="bold")
        labels = [
            "\n".join(
                textwrap.shorten(words, _TEXT, placeholder=" ...")
                for words in (row.claim, f"{row.metric}; {row.where}")
            )
            for row in rows_of(numbers)
        ]
        axes.set_yticks(heights, labels, fontsize=TINY - 1)
        axes.set_ylim(float(heights.iloc[-1]) + 0.6, -0.5)
        axes.set_xlim(-_LIMIT - 0.5, _LIMIT + 0.5)
        axes.set_xlabel("effect, as a multiple of the declared margin")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        shown = [(Line2D([], [], color=colour, marker="D", lw=1.8, ms=4), one) for one, colour in _COLOURS.items()]
        write_legend(figure, [entry for entry in shown if entry[1] in counts], 4)
        write_footer(figure, caption)
    return Drawn(NAME, figure, numbers, BARS, caption=caption)


def _draw_claim(axes: Axes, y: float, row: Any) -> None:
    """Effect and interval of a row of `claim_numbers` at the height y, and the effect in numbers at the right."""
    colour = _COLOURS[row.verdict]
    mean, low, high = (min(max(value / row.margin, -_LIMIT), _LIMIT) for value in (row.effect, row.low, row.high))
    open_ended = math.isnan(row.low)
    if not open_ended:
        axes.plot([low, high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
    axes.plot(mean, y, "D", color=colour, markersize=4, markerfacecolor="white" if open_ended else colour)
    text = f"{row.effect:+.3f} of {row.margin:g}"
    axes.text(_LIMIT + 0.7, y, text, va="center", fontsize=TINY - 1, color=colour)
    if row.expected != "within":
        arrow, shift = ("→", 7) if row.expected == "above" else ("←", -7)
        place: dict[str, Any] = {"xytext": (shift, -4), "textcoords": "offset points", "ha": "center"}
        axes.annotate(arrow, (0, y), fontsize=TINY, color=GREY, **place)
