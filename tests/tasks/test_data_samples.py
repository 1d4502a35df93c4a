"""A grader is tried on three problems of the data before a run, and its faults are found."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from grpo_lab.tasks.base import Grader
from grpo_lab.tasks.data_samples import problems_with, sample_problems, warn_of_samples
from grpo_lab.tasks.function_reward import FunctionReward
from grpo_lab.tasks.math_answers import BoxedOnly, PlainMath
from grpo_lab.tasks.weighted import Weighted
from grpo_lab.types import Problem

PROBLEMS = [Problem(number, f"What is {number}+{number}?", str(2 * number), 1) for number in range(30)]


@pytest.fixture
def function(tmp_path: Path) -> str:
    (tmp_path / "rewards.py").write_text(
        "def good(response, answer):\n    return float(response == '#' + answer)\n"
        "def any_number(response):\n    return float(any(sign.isdigit() for sign in response))\n"
        "def always(response):\n    return 1.0\n"
        "def never(response):\n    return 0.0\n"
    )
    return f"{tmp_path}/rewards.py"


def reward(path: str) -> FunctionReward:
    return FunctionReward(
        correct=1.0, wrong=0.0, path=path, weights=[], correct_at=1.0, lowest=0.0, highest=1.0, truncated=False,
        seconds=2.0, workers=1,
    )  # fmt: skip


def test_samples_come_from_all_of_the_data_and_have_different_answers() -> None:
    assert [one.id for one in sample_problems(PROBLEMS)] == [0, 10, 20]
    same = [Problem(number, "?", "Yes" if number < 29 else "no", 1) for number in range(30)]
    assert [one.answer for one in sample_problems(same)] == ["Yes", "no"]
    assert sample_problems([]) == [] and len(sample_problems(PROBLEMS[:1])) == 1


def test_a_right_grader_has_no_problem_and_others_are_named(function: str) -> None:
    assert problems_with(PlainMath(1.0, 0.0), PROBLEMS) == {}
    assert problems_with(reward(f"{function}:good"), PROBLEMS) == {}
    found = problems_with(reward(f"{function}:never"), PROBLEMS)
    assert (
        list(found) == ["nothing correct"] and "none of the right answers '0', '20', '40'" in found["nothing correct"]
    )
    found = problems_with(reward(f"{function}:any_number"), PROBLEMS)
    assert list(found) == ["another answer"] and "whose answer is" in found["another answer"]
    assert set(problems_with(reward(f"{function}:always"), PROBLEMS)) == {"another answer", "empty response"}
    assert problems_with(reward(f"{function}:always"), []) == {}


def test_graders_that_compare_nothing_are_not_tried(function: str, caplog: pytest.LogCaptureFixture) -> None:
    boxed, never = BoxedOnly(1.0, 0.0), reward(f"{function}:never")
    both: Grader = Weighted(1.0, 0.0, {"form": boxed, "right": never}, {"form": 0.5, "right": 1.0}, "right")
    assert boxed.compared == () and both.compared == (never,)
    with caplog.at_level(logging.WARNING):
        warn_of_samples(boxed, PROBLEMS)
        assert not caplog.text
        warn_of_samples(both, PROBLEMS)
    assert "on the data's own samples: none of the right answers" in caplog.text
