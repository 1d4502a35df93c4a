"""Generated parts of the pages: claims, the index, and each experiment's question, tables and numbers."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

from grpo_lab.analysis.divergence.quantities import quantities_head, quantities_table
from grpo_lab.analysis.scaling import compare, fit_sweep
from grpo_lab.analysis.tables.headline import supported_text
from grpo_lab.config.catalogue import with_tables
from grpo_lab.config.design import Design
from pages.claims import (
    HEAD,
    Answer,
    answers,
    claims_table,
    predictions_head,
    predictions_table,
)
from pages.external import EXTERNAL_HEAD, external_table
from pages.findings import FINDINGS_HEAD, findings_table
from pages.numbers import EXPERIMENTS, ROOT, data_of, filled
from pages.saved_sweeps import SavedSweeps, saved_sweeps

README, INDEX = ROOT / "README.md", EXPERIMENTS / "README.md"
ANSWERED = "| experiment | question | predictions supported |"
WAITING = "| declared, not run to the end | question | runs |"
SUPERSEDED = "| superseded | question | predictions supported | asked again in |"

Tables = Mapping[str, Callable[[], str]]


def documented_claims() -> dict[Path, str]:
    """README.md and the index with up-to-date findings and claims."""
    saved = saved_sweeps(EXPERIMENTS)
    return {
        README: with_tables(README, {FINDINGS_HEAD: lambda: findings_table(saved)}),
        INDEX: with_tables(INDEX, {HEAD: lambda: _claims(saved), EXTERNAL_HEAD: lambda: external_table(EXPERIMENTS)}),
    }


def documented() -> dict[Path, str]:
    """Page -> its up-to-date text."""
    saved, pages = saved_sweeps(EXPERIMENTS), dict[Path, str]()
    pages[README] = filled(with_tables(README, {FINDINGS_HEAD: lambda: findings_table(saved)}))
    pages[INDEX] = filled(with_tables(INDEX, _index_tables(saved)))
    for design in saved.declared:
        if (page := saved.folders[design.name] / "README.md").exists():
            pages[page] = filled(_with_question(with_tables(page, _page_tables(saved, design)), design), design.name)
    return pages


def _claims(saved: SavedSweeps) -> str:
    found = [answer for answer in answers(saved) if answer.verdict != "not run"]
    pages = {name: folder / "README.md" for name, folder in saved.folders.items()}
    figures = {name for name, page in pages.items() if page.exists() and f"({_effects(name)})" in page.read_text()}
    return claims_table(found, figures, [ceiling_text(saved, answer) for answer in found])


def _index_tables(saved: SavedSweeps) -> Tables:
    return {
        HEAD: lambda: _claims(saved),
        EXTERNAL_HEAD: lambda: external_table(EXPERIMENTS),
        ANSWERED: lambda: _table(ANSWERED, [_answered(saved, one) for one in _shown(saved) if not one.superseded]),
        WAITING: lambda: _table(WAITING, waiting(saved)),
        SUPERSEDED: lambda: _table(
            SUPERSEDED,
            [
                [*_answered(saved, one), f"[{one.superseded}]({one.superseded}/README.md)"]
                for one in _shown(saved)
                if one.superseded
            ],
        ),
    }


def _effects(name: str) -> str:
    return f"figures/{name}_effects.png"


def _shown(saved: SavedSweeps) -> list[Design]:
    """The experiments with data and a page."""
    return [one for one in saved.designs if (saved.folders[one.name] / "README.md").exists()]


def _table(head: str, rows: list[list[str]]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *(f"| {' | '.join(row)} |" for row in rows)])


def _answered(saved: SavedSweeps, design: Design) -> list[str]:
    page = (saved.folders[design.name] / "README.md").relative_to(EXPERIMENTS).as_posix()
    data, finals = data_of(design.name)
    counted = supported_text(data, finals).replace(" predictions supported", "", 1)
    return [f"[{design.name}]({page})", design.question, counted or "0 of 0"]


def waiting(saved: SavedSweeps) -> list[list[str]]:
    """A row for each experiment without saved data, and for each with claims that is underway."""
    rows = []
    for design in saved.declared:
        runs = str(len(design.arms) * len(design.levels) * len(design.seeds))
        if design.claims and saved.underway(design):
            runs = f"{(saved.load(design)[0].runs['status'] == 'done').sum()} of {runs}"
        elif design in saved.designs:
            continue
        rows.append([f"[{design.name}]({design.name}/design.yaml)", design.question, runs])
    return rows


def _page_tables(saved: SavedSweeps, design: Design) -> Tables:
    """A page's tables of predictions and quantities, where it has them, and those of the experiment's own code."""
    folder, tables = saved.folders[design.name], dict[str, Callable[[], str]]()
    written = (folder / "README.md").read_text()
    for head, table in ((predictions_head, predictions_table), (quantities_head, quantities_table)):
        if f"\n{head(design.name)}" in written:
            tables[head(design.name)] = lambda table=table: table(*data_of(design.name))
    if (code := folder / "page.py").exists() and (own := getattr(own_code(code), "tables", None)):
        tables |= own(*data_of(design.name))
    return tables


def own_code(path: Path) -> ModuleType:
    """An experiment's own module, loaded from its file."""
    name = f"experiment_{path.parent.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None, "a Python file"
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _with_question(text: str, design: Design) -> str:
    """The page with the question that was declared below its title."""
    return re.sub(r"\A(# [^\n]*\n\n)[^\n]*", lambda found: found[1] + design.question, text)


def ceiling_text(saved: SavedSweeps, answer: Answer) -> str:
    """`A +0.012 [0.001, 0.023]`, the difference of the asymptotes of a claim of gain; "" where not identified."""
    metric = answer.design.predictions[answer.claim.prediction].metric
    condition, reference = answer.places
    if not answer.speed or not metric.endswith("/accuracy") or condition[0] != reference[0]:
        return ""
    data, finals = saved.load(answer.design)
    fits = {
        (fit.level, fit.arm): fit for fit in fit_sweep(data, finals, metric.split("/")[1], only=(condition, reference))
    }
    found = compare(fits[condition], fits[reference])
    return "" if found.reason else f"A {found.asymptote.text('+')}"
