"""The tricks that are left out: each has a reason, none is implemented, and the page shows them all."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from grpo_lab.config import catalogue
from grpo_lab.config.catalogue import left_out_table, papers_table
from grpo_lab.config.folders import conf_folder

ENTRIES = yaml.safe_load((conf_folder() / "left_out.yaml").read_text())
ARXIV = re.compile(r"\b\d{4}\.\d{5}\b")


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_has_a_paper_or_none_and_a_reason(name: str) -> None:
    entry = ENTRIES[name]
    assert entry.keys() == {"arxiv", "why"}
    assert entry["arxiv"] is None or ARXIV.fullmatch(entry["arxiv"])
    assert len(entry["why"].split()) >= 5 and not entry["why"].endswith("."), "one sentence that says what is missing"


def test_no_implemented_paper_is_left_out_and_none_twice() -> None:
    left_out = [entry["arxiv"] for entry in ENTRIES.values() if entry["arxiv"]]
    assert len(left_out) == len(set(left_out))
    implemented = set(ARXIV.findall(papers_table()))
    assert "2402.03300" in implemented, "GRPO, so that ids are found"
    assert not implemented & set(left_out)


def test_the_table_has_a_row_for_each_in_the_order_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_out.yaml").write_text("b: {arxiv: null, why: one}\nA: {arxiv: '2401.00001', why: two}\n")
    monkeypatch.setattr(catalogue, "conf_folder", lambda: tmp_path)
    assert left_out_table().splitlines()[2:] == ["| A | 2401.00001 | two |", "| b | - | one |"]


def test_the_page_is_what_make_docs_writes() -> None:
    assert left_out_table() in (conf_folder() / "left_out.md").read_text()
