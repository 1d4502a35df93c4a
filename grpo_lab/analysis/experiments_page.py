"""The generated tables of experiments/README.md: claims, and the predictions and quantities of each experiment."""

from __future__ import annotations

import re
from pathlib import Path

from grpo_lab.analysis.divergence.quantities import quantities_head, quantities_table
from grpo_lab.analysis.effects.claims import HEAD, answers, claims_table, predictions_head, predictions_table
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.saved_data import load_data, saved_names
from grpo_lab.config.catalogue import with_tables
from grpo_lab.config.run_config import conf_folder


def documented_experiments() -> dict[Path, str]:
    """The page with up-to-date tables: the claims that have saved data, and what it shows of predictions.

    A table of predictions or quantities is written for an experiment where the page has one.
    """
    root = conf_folder().parent
    page, data_folder = root / "experiments" / "README.md", root / "analysis" / "data"
    found = [answer for answer in answers(root / "experiments", data_folder) if answer.word != "not run"]
    written = page.read_text()
    prose = re.sub(r"^\|.*$", "", written, flags=re.M)  # a table's own links are no sign of a figure
    figures = set(re.findall(r"analysis/figures/(\w+)_effects\.png", prose))
    tables = {HEAD: lambda: claims_table(found, figures)}
    for name in saved_names(data_folder):
        if f"\n{predictions_head(name)}" in written:
            tables[predictions_head(name)] = lambda name=name: predictions_table(load_data(data_folder, name))
        if f"\n{quantities_head(name)}" in written:
            tables[quantities_head(name)] = lambda name=name: _quantities(data_folder, name)
    return {page: with_tables(page, tables)}


def _quantities(data_folder: Path, name: str) -> str:
    data = load_data(data_folder, name)
    return quantities_table(data, final_values(data))
