"""Every claim that has been tested, in units of the margin its experiment declared."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import pandas as pd

from grpo_lab.analysis.effects.verdict import VERDICTS
from grpo_lab.analysis.figures.palette import BLACK, BLUE, GREEN, GREY, VERMILLION
from grpo_lab.analysis.figures.style import SMALL, TINY, Drawn, house_style, new_figure, write_footer
from grpo_lab.analysis.metric_names import in_words
from grpo_lab.analysis.table_rows import rows_of
from pages.claims import Answer

NAME = "claims"
BARS = "mark: effect over its declared margin; bar: its 95% t interval over base models, likewise"
_COLOURS = dict(zip(VERDICTS, (GREEN, VERMILLION, BLUE, BLACK)))
_WIDTH, _ROW = 9.4, 0.43  # inches: the figure, one claim
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
                "claim": answer.claim.says,
                "source": answer.claim.source,
                "experiment": answer.design.name,
                "where": " ".join(answer.where),
                "metric": in_words(judgement.prediction.metric),
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
    """The figure `claims`; None where none has been judged."""
    numbers = claim_numbers(found)
    if numbers.empty:
        return None
    heading = "What was measured of claims in the literature"
    caption = (
        f"{BARS[0].upper()}{BARS[1:]}. Grey: equivalent within the margin. Arrow: what the source expects. Hollow: the "
        "interval is not reported. Verdicts are after Holm over the predictions of an experiment"
    )
    with house_style(NAME):
        figure = new_figure(heading, 1.0 + _ROW * len(numbers), _WIDTH)
        axes = figure.subplots()
        axes.axvspan(-1, 1, color=GREY, alpha=0.15, linewidth=0)
        axes.axvline(0, color=GREY, linewidth=1.0)
        for y, row in enumerate(rows_of(numbers)):
            colour = _COLOURS[row.verdict]
            mean, low, high = (value / row.margin for value in (row.effect, row.low, row.high))
            shown = min(max(mean, -_LIMIT), _LIMIT)
            if not math.isnan(low):
                ends = [min(max(end, -_LIMIT), _LIMIT) for end in (low, high)]
                axes.plot(ends, [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
            axes.plot(shown, y, "D", color=colour, markersize=5, markerfacecolor="white" if math.isnan(low) else colour)
            said = f"{row.verdict}: {row.effect:+.3f} of {row.margin:g}"
            side = "center" if abs(shown) < _LIMIT / 2 else "left" if shown < 0 else "right"  # into the picture
            axes.annotate(
                said, (shown, y), xytext=(0, 7), textcoords="offset points", ha=side, fontsize=TINY, color=colour
            )
            if row.expected != "within":
                arrow, shift = ("→", 8) if row.expected == "above" else ("←", -8)
                axes.annotate(
                    arrow,
                    (0, y),
                    xytext=(shift, -6),
                    textcoords="offset points",
                    ha="center",
                    fontsize=SMALL,
                    color=GREY,
                )
        labels = [
            textwrap.fill(f"{row.claim} ({row.source}; {row.metric}, {row.where})", _TEXT, max_lines=3)
            for row in rows_of(numbers)
        ]
        axes.set_yticks(range(len(numbers)), labels, fontsize=TINY)
        axes.set_ylim(len(numbers) - 0.5, -0.6)
        axes.set_xlim(-_LIMIT - 0.5, _LIMIT + 0.5)
        axes.set_xlabel("effect, in declared margins")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="y", visible=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
        write_footer(figure, caption, 4)
    return Drawn(NAME, figure, numbers, BARS, caption=caption)
