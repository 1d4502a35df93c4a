"""The commands behind `make docs` and `make claims`; in one process they read each saved sweep once."""

from __future__ import annotations

from collections.abc import Sequence

from world_profiles.profile import documented_cards

from grpo_lab.analysis.experiments_page import documented_experiments
from grpo_lab.cli import main as grpo_lab
from grpo_lab.config.catalogue import write_pages
from pages.acting import documented_acting


def write_docs() -> None:
    """Update every generated table in the documentation, and print which pages changed."""
    grpo_lab(["docs"])
    for line in write_pages((documented_cards, documented_acting, documented_experiments)):
        print(line)


COMMANDS = {"docs": write_docs, "claims": lambda: grpo_lab(["claims"])}


def main(words: Sequence[str]) -> None:
    """Run the named commands."""
    for word in words:
        COMMANDS[word]()
