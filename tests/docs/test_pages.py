"""README.md and the pages of experiments/ are what the saved data say, and every result on them says how."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages.numbers import NUMBER, ROOT, filled
from pages.tables import documented

# How the tables begin that are written from the data.
GENERATED = "|".join(
    (r"experiment \|", "declared, not", "superseded", "trick that acts", r"trick \| claim", "finding", "predictions of",
     "quantities of", "indicator", r"external \|")
)  # fmt: skip
EXTERNAL = ROOT / "experiments" / "external"  # pages of others, whose words are theirs
OURS = [page for page in sorted(ROOT.glob("experiments/**/README.md"))[1:] if EXTERNAL not in page.parents]
PAGES = [ROOT / "README.md", ROOT / "experiments" / "README.md", *OURS]
# What looks like a result: a decimal, a per cent, a power of ten, a sign.
RESULT = re.compile(rf"(?<![\w.*])(?:\+-)?(?=[-+.\d])(?:{NUMBER})%?(?![\w]|\.\d)")
EXPLAINED = re.compile(rf"(?:(?:{NUMBER})%?)?(?: ?\[(?:{NUMBER}), (?:{NUMBER})\])?<!--(?! ).*?-->")
# What stands in code, in the target of a link, in a date or in the name of a version is none.
NO_RESULT = re.compile(
    r"```.*?```|`[^`]*`|\]\([^)]*\)|\d{4}-\d{2}-\d{2}|\d+(?:\.\d+){2,}|95% t interval"
    r"|(?:Python|vLLM|TRL|transformers|PyTorch|CUDA) \d[\d.]*(?:, \d[\d.]*)*(?: or \d[\d.]*)?",
    flags=re.S,
)


@pytest.mark.extended
def test_every_page_is_up_to_date() -> None:
    assert [path for path, text in documented().items() if path.read_text() != text] == [], "run `make docs`"


def unexplained(text: str) -> list[str]:
    """The results in a text that no comment follows and no generated table holds."""
    text = re.sub(r"\A# [^\n]*\n\n[^\n]*", "", text)  # the question
    text = re.sub(rf"^\| (?:{GENERATED}) .*?(?:\n(?!\|)|\Z)", "", text, flags=re.S | re.M)
    rest = NO_RESULT.sub("~", EXPLAINED.sub("~", text))
    return [found[0] for found in RESULT.finditer(rest) if re.search(r"^[-+]|[.%e]", found[0])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_result_on_a_page_says_how_the_data_give_it(page: Path) -> None:
    assert unexplained(page.read_text()) == []


@pytest.mark.parametrize(
    ("text", "results"),
    [
        ("falls by 0.24 to .05, see 2026-11-23", ["0.24", ".05"]),
        ("+3 points, -0.1 [-0.2, 0.1], 12% and 4e-4", ["+3", "-0.1", "-0.2", "0.1", "12%", "4e-4"]),
        ("within +-0.05; 0.93-0.96 of five", ["+-0.05", "0.93", "0.96"]),
        ("`0.5` with vLLM 0.32 and torch 2.13.0: five seeds, 250,000 tokens, 3-5 steps, [0](a/0.5.png)", []),
        ("0.2 [0.1, 0.3]<!--a - b--> and 12%<!--x100 a--> of 0.7", ["0.7"]),
    ],
)
def test_what_looks_like_a_result(text: str, results: list[str]) -> None:
    assert unexplained(text) == results


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("0.365<!--no_cost--> and 0.048 [0.015, 0.082]<!--cost-->", None),
        ("0.366<!--no_cost--> .05 [0.015, 0.083]<!--cost-->", "0.365<!--no_cost--> .05 [0.015, 0.082]<!--cost-->"),
        ("0.316<!--cost - no_cost-->", "-0.316<!--cost - no_cost-->"),
        ("+30%<!--x100 no_cost-->", "+36%<!--x100 no_cost-->"),
        ("Three<!--judged supported-->, two<!--predictions-->", "Four<!--judged supported-->, five<!--predictions-->"),
        ("0.1<!--cost of=phantom - no_cost @downstream-->", "-0.3<!--cost of=phantom - no_cost @downstream-->"),
    ],
)  # fmt: skip
def test_a_number_is_filled_at_the_precision_it_was_written_in(before: str, after: str | None) -> None:
    page = "<!-- numbers: @downstream -->\n"
    assert filled(page + before, "phantom") == page + (after or before)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("of 0.4<!--another_arm-->", "phantom has no arm"),
        ("within 0.1<!--margin-->", "phantom declares no margin"),
    ],
)
def test_a_number_that_cannot_be_filled_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(f"<!-- numbers: @downstream -->\n{text}", "phantom")
