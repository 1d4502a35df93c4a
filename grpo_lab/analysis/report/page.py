"""The report of a sweep as one HTML file that needs nothing else: verdict, switches, figures, tables, provenance.

The page makes no request of any kind, and its content security policy forbids any. Figures, style and script are inside
it. `panel` holds the numbers behind the switches, `assets/panel.js` what they do.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template

import numpy as np
import pandas as pd

from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.report.page_figures import figures_section
from grpo_lab.analysis.report.page_tables import provenance_section, tables_section
from grpo_lab.analysis.report.page_verdict import verdict_section
from grpo_lab.analysis.report.page_words import embedded_json
from grpo_lab.analysis.report.panel import other_axes, panel_data
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.resampling import SEED

ASSETS = Path(__file__).parent / "assets"


def report_html(
    data: SweepData,
    finals: FinalValues,
    figures: Sequence[Drawn],
    missing: Mapping[str, str],
    command: Sequence[str],
    sections: Mapping[str, str] | None = None,
    divergence: pd.DataFrame | None = None,
) -> str:
    """The whole page; `missing` maps the name of a figure that could not be drawn to the reason.

    `sections` maps the heading of a further section to its HTML, which is trusted. `divergence` is the result of
    `divergence_table`, which is computed here where it is not given.
    """
    if divergence is None:
        divergence = divergence_table(data, finals, np.random.default_rng(SEED))
    others = other_axes(data, finals)
    name = data.record.name
    question = data.design.question if data.design else f"What did the arms of {name} do?"
    more = {heading: f"section-{number}" for number, heading in enumerate(sections or {}, start=1)}
    parts = {
        "title": html.escape(f"{name}: {question}"),
        "sweep": html.escape(name),
        "notice": f'<p class="warning">{html.escape(data.notice)}</p>\n' if data.notice else "",
        "source": html.escape(data.source),
        "question": html.escape(question),
        "navigation": _navigation(more),
        "verdict": verdict_section(data, finals, others, divergence),
        "figures": figures_section(figures, missing, name),
        "tables": tables_section(data, finals, divergence),
        "sections": "\n".join(_section(heading, more[heading], text) for heading, text in (sections or {}).items()),
        "provenance": provenance_section(data, command),
        "data": embedded_json(panel_data(data, finals, others)),
        "style": (ASSETS / "page.css").read_text(encoding="utf-8"),
        "script": (ASSETS / "panel.js").read_text(encoding="utf-8"),
    }
    return Template((ASSETS / "template.html").read_text(encoding="utf-8")).substitute(parts)


def _navigation(more: Mapping[str, str]) -> str:
    places = {"Verdict": "verdict", "Switches": "panel", "Figures": "figures", "Tables": "tables"}
    places |= dict(more) | {"Provenance": "provenance"}
    return "".join(f'<a href="#{place}">{html.escape(heading)}</a>' for heading, place in places.items())


def _section(heading: str, place: str, text: str) -> str:
    return (
        f'<section id="{place}" aria-labelledby="{place}-head">\n<h2 id="{place}-head">{html.escape(heading)}</h2>\n'
        f"{text}\n</section>"
    )
