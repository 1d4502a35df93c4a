"""The commands behind `make docs` and `make claims`; in one process they read each saved sweep once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from every_option.results import documented_options
from gap_study.across import saved_pool
from gap_study.figure import draw_gap
from world_profiles.profile import documented_profiles

from grpo_lab.analysis.figures.style import save
from grpo_lab.cli import main as grpo_lab
from grpo_lab.config.catalogue import write_pages
from grpo_lab.config.hydra_setup import bootstrap
from pages.acting import documented_acting
from pages.claims import answers, claims_text
from pages.claims_figure import draw_claims
from pages.saved_sweeps import saved_sweeps
from pages.tables import documented, documented_claims

EXPERIMENTS = Path(__file__).parents[2] / "experiments"


def write_docs() -> None:
    """Update every generated table in the documentation, and print which pages changed."""
    grpo_lab(["docs"])
    print(*write_pages((documented_profiles, documented_acting, documented_options, documented)), sep="\n")


def write_claims() -> None:
    """Print the answer to every claim, write their tables, and draw them and when reward misled in their sweeps."""
    bootstrap()
    saved = saved_sweeps(EXPERIMENTS)
    found = answers(saved)
    print(claims_text(found))
    sources = {"data": "experiments", "command": "make claims"}
    for drawn in (draw_claims(found), draw_gap(saved_pool(saved))):
        if drawn is not None:
            print(*save(drawn, EXPERIMENTS / "figures", sources), sep="\n")
    print(*write_pages((documented_claims,)), sep="\n")


COMMANDS = {"docs": write_docs, "claims": write_claims}


def main(words: Sequence[str]) -> None:
    """Run the named commands."""
    for word in words:
        COMMANDS[word]()
