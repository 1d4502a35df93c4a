"""The report of a sweep as one HTML file that needs nothing else: verdict, switches, figures, tables, provenance.

The page makes no request of any kind, and its content security policy forbids any. Figures, style and scripts are
inside it. `panel` holds the numbers behind the switches, `templates/panel.js` what they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from grpo_lab.analysis.divergence.table import divergence_table
from grpo_lab.analysis.figures.style import Drawn
from grpo_lab.analysis.final_values import FinalValues
from grpo_lab.analysis.report.page_figures import figures_section
from grpo_lab.analysis.report.page_tables import provenance_section, tables_section
from grpo_lab.analysis.report.page_verdict import verdict_section
from grpo_lab.analysis.report.panel import other_axes, panel_data
from grpo_lab.analysis.report.reader_page import rollouts_section
from grpo_lab.analysis.report.templates import render
from grpo_lab.analysis.sources.sweep_data import SweepData
from grpo_lab.analysis.stats.resampling import SEED


def report_html(
    data: SweepData,
    finals: FinalValues,
    figures: Sequence[Drawn],
    missing: Mapping[str, str],
    command: Sequence[str],
    texts: Mapping[str, str] | None = None,
    divergence: pd.DataFrame | None = None,
    responses: Sequence[Mapping[str, Any]] = (),
) -> str:
    """The whole page; `missing` maps the name of a figure that could not be drawn to the reason.

    `texts` maps the heading of a further section to its lines. `divergence` is the result of `divergence_table`, which
    is computed here where it is not given. `responses` are those of `reader_page.collect_responses`.
    """
    if divergence is None:
        divergence = divergence_table(data, finals, np.random.default_rng(SEED))
    others = other_axes(data, finals)
    name = data.record.name
    page = render(
        "page.html",
        data=data,
        question=data.design.question if data.design else f"What did the arms of {name} do?",
        verdict=verdict_section(data, finals, others, divergence),
        panel=panel_data(data, finals, others),
        figures=figures_section(figures, missing, name),
        tables=tables_section(data, finals, divergence),
        texts=texts or {},
        responses=rollouts_section(responses),
        provenance=provenance_section(data, command),
    )
    return str(page)
