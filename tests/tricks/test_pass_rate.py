"""Filters by pass rate: who stays and how hard a problem counts, by hand."""

from __future__ import annotations

import pytest
from compositions import run_of

from grpo_lab.tricks.pass_rate import Measured, NotMeasured, difficulty_of, reason_to_drop


def plan(name: str, *overrides: str) -> Measured:
    found = run_of(f"pass_rate={name}", *overrides).pass_rate
    assert isinstance(found, Measured)
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("skywork_or1", {0: "unsolved", 1: "", 8: "", 15: "", 16: "solved"}),
        ("solvable", {0: "unsolved", 1: "", 8: ""}),
        ("open", {0: "", 7: "", 8: "solved"}),
        ("difficulty", {0: "", 5: "", 10: ""}),
        # of 8 answers 1 is 0.125 and 2 is 0.25; 6 is 0.75 and 7 is 0.875
        ("band", {0: "unsolved", 1: "too_hard", 2: "", 6: "", 7: "too_easy", 8: "solved"}),
    ],
)
def test_who_stays(name: str, expected: dict[int, str]) -> None:
    chosen = plan(name)
    assert {right: reason_to_drop(chosen, right, chosen.samples) for right in expected} == expected
    assert reason_to_drop(chosen, 0, 0) == "ungraded"


def test_bounds_are_inside_and_ungraded_answers_do_not_count() -> None:
    band = plan("band", "pass_rate.samples=10")
    assert [reason_to_drop(band, right, 10) for right in (1, 2, 8, 9)] == ["too_hard", "", "", "too_easy"]
    assert reason_to_drop(band, 1, 5) == "", "one of five that were graded is 0.2"
    thirds = plan("band", "pass_rate.low=0.3", "pass_rate.high=0.6", "pass_rate.samples=10")
    assert [reason_to_drop(thirds, right, 10) for right in (3, 6)] == ["", ""], "3 / 10 is 0.3 up to rounding"


def test_difficulty_counts_wrong_answers() -> None:
    ranked = plan("difficulty")
    assert [difficulty_of(ranked, right, 10) for right in (10, 9, 5, 0)] == [1, 2, 6, 11]
    assert difficulty_of(ranked, 4, 8) == 6, "half of those graded"


@pytest.mark.extended
def test_what_an_option_does_is_what_it_says() -> None:
    facts = {
        name: (plan(name).drops, plan(name).ranks, plan(name).guesses)
        for name in ("skywork_or1", "open", "difficulty", "kimi")
    }
    assert facts == {
        "skywork_or1": (True, False, False), "open": (True, False, False), "difficulty": (False, True, False),
        "kimi": (True, True, True),
    }  # fmt: skip
    nothing = NotMeasured()
    assert (nothing.drops, nothing.ranks, nothing.guesses) == (False, False, False)
    assert plan("skywork_or1").written() == "problems of a pass rate in (0, 1) over 16 answers of the base"
    assert plan("solvable").written() == "problems of a pass rate in (0, 1] over 8 answers of the base"
    assert plan("band").written() == "problems of a pass rate in [0.2, 0.8] over 8 answers of the base"
    assert plan("difficulty").written() == "problems ranked over 10 answers of the base"


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ("pass_rate.samples=0", r"Measured\.samples must be greater than 0"),
        ("pass_rate.low=-0.1", r"Measured\.low must be in \[0, 1\]"),
        ("pass_rate.high=0.1", r"Measured\.high must be between low \(0\.2\) and 1"),
        ("pass_rate.tries=-1", r"Measured\.tries must be at least 0"),
        ("pass_rate.guess_tokens=0", r"Measured\.guess_tokens must be greater than 0"),
    ],
)
def test_wrong_numbers_are_refused(overrides: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        plan("band", overrides)
