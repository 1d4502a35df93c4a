"""Every number that README, index and log state as a result is what the saved data say."""

from __future__ import annotations

import re
from functools import cache

import pytest
from stated_numbers import NOT_KEPT, NUMBER, ROOT, Entry, disagreements, entries

# How the tables begin that are written from the data.
GENERATED = r"trick that acts|trick \| claim|finding|predictions of|quantities of|indicator"
PAGES = ("README.md", "experiments/README.md", "experiments/LOG.md")
# A paragraph that opens with this remark, or has it behind its first words in bold, tells of nothing that was saved.
OPENS_NOT_KEPT = re.compile(rf"(?:\*\*[^*]+\*\*,? )?{NOT_KEPT.pattern}", flags=re.I)
# What looks like a result: a decimal, a per cent, a power of ten, a sign.
RESULT = re.compile(rf"(?<![\w.*])(?:\+-)?(?=[-+.\d])(?:{NUMBER})%?(?![\w]|\.\d)")
# What stands in code, in the target of a link, in a date or in the name of a version is none.
NO_RESULT = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\d{4}-\d{2}-\d{2}|\d+(?:\.\d+){2,}|95% t interval"
    r"|(?:Python|vLLM|TRL|transformers|PyTorch|CUDA) \d[\d.]*(?:, \d[\d.]*)*(?: or \d[\d.]*)?"
)


@cache
def paragraphs(page: str) -> list[str]:
    """The paragraphs of a page, each on one line; a table belongs to what stands above it."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    # `grpo-lab docs` writes these tables; tests of each compare them with the saved data.
    text = re.sub(rf"^\| (?:{GENERATED}) .*?(?:\n(?!\|)|\Z)", "", text, flags=re.S | re.M)
    parts: list[str] = []
    for part in re.split(r"\n\s*\n", text):
        if part.lstrip().startswith("|") and parts and not parts[-1].startswith("#"):
            parts[-1] += " " + " ".join(part.split())
        else:
            parts.append(" ".join(part.split()))
    return parts


def places(entry: Entry) -> list[tuple[int, int]]:
    """(paragraph, offset) of each occurrence of a sentence on its page."""
    found = []
    for number, paragraph in enumerate(paragraphs(entry.page)):
        found += [(number, place.start()) for place in re.finditer(re.escape(entry.text), paragraph)]
    return found


def groups() -> list[tuple[str, str]]:
    """Page and sweep of each block; few sweeps are kept in memory, so blocks of one follow each other."""
    return sorted({(entry.page, entry.sweep) for entry in entries()}, key=lambda group: (group[1], group[0]))


@pytest.mark.parametrize(("page", "sweep"), groups())
def test_what_is_stated_is_what_the_saved_data_say(page: str, sweep: str) -> None:
    wrong = {
        entry.text: found
        for entry in entries()
        if (entry.page, entry.sweep) == (page, sweep) and (found := disagreements(entry))
    }
    assert wrong == {}


def test_every_sentence_stands_on_its_page_once() -> None:
    assert {entry.text: len(places(entry)) for entry in entries() if len(places(entry)) != 1} == {}


def results_in(paragraph: str) -> list[re.Match[str]]:
    """The numbers of a paragraph that look like results: with a point, a sign, a per cent or a power of ten."""
    plain = NO_RESULT.sub(lambda found: "~" * len(found[0]), paragraph)
    return [found for found in RESULT.finditer(plain) if re.search(r"^[-+]|[.%e]", found[0])]


def unexplained(page: str) -> list[str]:
    """The results on a page that no entry explains and that stand in no paragraph that opens with `(runs not kept)`."""
    explained: set[tuple[int, int]] = set()
    for entry in entries():
        if entry.page == page:
            for number, offset in places(entry):
                for _, start, end in entry.numbers():
                    explained |= {(number, offset + place) for place in range(start, end)}
    return [
        f"{found[0]} in: ...{paragraph[max(0, found.start() - 60) : found.end() + 30]}..."
        for number, paragraph in enumerate(paragraphs(page))
        if not OPENS_NOT_KEPT.match(paragraph)
        for found in results_in(paragraph)
        if (number, found.end() - 1) not in explained
    ]


@pytest.mark.parametrize("page", PAGES)
def test_every_result_on_a_page_is_explained(page: str) -> None:
    assert unexplained(page) == []


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("falls by 0.24 to .05, see 2026-11-23", ["0.24", ".05"]),
        ("+3 points, -0.1 [-0.2, 0.1], 12% and 4e-4", ["+3", "-0.1", "-0.2", "0.1", "12%", "4e-4"]),
        ("within +-0.05; 0.93-0.96 of five", ["+-0.05", "0.93", "0.96"]),
        ("`0.5` with vLLM 0.32 and torch 2.13.0: five seeds, 250,000 tokens, 3-5 steps, [0](a/0.5.png)", []),
    ],
)
def test_what_looks_like_a_result(text: str, results: list[str]) -> None:
    assert [found[0] for found in results_in(text)] == results


@pytest.mark.parametrize(
    ("sentence", "wrong"),
    [
        ("0.365{no_cost} and 0.048 [0.015, 0.082]{cost}", 0),
        ("0.366{no_cost} and 0.048 [0.015, 0.083]{cost}", 2),
        ("-0.316{cost - no_cost} as four{judged supported} of six{predictions} say", 1),
        ("at most 0.3{<= size cost - no_cost}", 1),
        ("of 0.4{another_arm}", 1),
        ("within 0.1{margin supported cost @length}", 1),
        ("a pilot had 0.52{unkept}", 1),
        ("a pilot (run not kept) had 0.52{unkept}", 0),
    ],
)
def test_a_number_that_is_not_so_is_seen(sentence: str, wrong: int) -> None:
    assert len(disagreements(Entry("README.md", "phantom", "", "downstream", sentence))) == wrong
