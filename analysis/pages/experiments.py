"""The generated tables of experiments/README.md: claims, and the predictions and quantities of each experiment."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_lab.analysis.divergence.quantities import quantities_head, quantities_table
from grpo_lab.analysis.scaling.fits import compare, fit_sweep
from grpo_lab.config.catalogue import with_tables
from grpo_lab.config.folders import conf_folder
from pages.claims import (
    HEAD,
    Answer,
    answers,
    claims_table,
    predictions_head,
    predictions_table,
)
from pages.saved_sweeps import SavedSweeps, saved_sweeps


def documented_experiments() -> dict[Path, str]:
    """The page with up-to-date tables: the claims that have saved data, and what it shows of predictions.

    A table of predictions or quantities is written for an experiment where the page has one.
    """
    root = conf_folder().parent
    page, data_folder = root / "experiments" / "README.md", root / "analysis" / "data"
    saved = saved_sweeps(root / "experiments", data_folder)
    found = [answer for answer in answers(saved) if answer.word != "not run"]
    written = page.read_text()
    prose = re.sub(r"^\|.*$", "", written, flags=re.M)  # a table's own links are no sign of a figure
    figures = set(re.findall(r"analysis/figures/(\w+)_effects\.png", prose))
    tables = {HEAD: lambda: claims_table(found, figures, [ceiling_text(saved, answer) for answer in found])}
    for design in saved.designs:
        if f"\n{predictions_head(design.name)}" in written:
            tables[predictions_head(design.name)] = lambda design=design: predictions_table(*saved.load(design))
        if f"\n{quantities_head(design.name)}" in written:
            tables[quantities_head(design.name)] = lambda design=design: quantities_table(*saved.load(design))
    return {page: with_tables(page, tables)}


def ceiling_text(saved: SavedSweeps, answer: Answer) -> str:
    """`A +0.012 [0.001, 0.023]`, the difference of the asymptotes of a claim of gain; "" where not identified."""
    metric = answer.design.predictions[answer.claim.prediction].metric
    cell, reference = answer.places
    if not answer.speed or not metric.endswith("/accuracy") or cell[0] != reference[0]:
        return ""
    data, finals = saved.load(answer.design)
    fits = {(fit.level, fit.arm): fit for fit in fit_sweep(data, finals, metric.split("/")[1], only=(cell, reference))}
    found = compare(fits[cell], fits[reference])
    return "" if found.reason else f"A {found.asymptote.text('+')}"
