"""Correctness is 0, 1 or NaN, whoever gives it: training, evaluation and weighted rewards share one check."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
from helpers import PACKAGE, make_rollouts

from grpo_lab.rollout.grading import grade
from grpo_lab.tasks.base import Grader, Grades, Reward
from grpo_lab.tasks.grader_pool import Answer, GraderPool
from grpo_lab.tasks.gym import AnswerPosition, GymScore
from grpo_lab.tasks.math_answers import JudgedApart
from grpo_lab.tasks.verifiers import Strict
from grpo_lab.tasks.weighted import Weighted
from grpo_lab.types import Problem

SIX = Problem(0, "1+5=", "6", 1)
TEXTS = ["right", "half", "wrong"]


@dataclass(frozen=True)
class Own(Reward):
    """A reward of one's own that gives the three texts this correctness."""

    given: tuple

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return self.given[TEXTS.index(text)]


@dataclass(frozen=True)
class MayFail(Own):
    """The same, with responses that it cannot grade."""

    may_fail: ClassVar[bool] = True


@dataclass(frozen=True)
class Whole(Grader):
    """A grader that is no Reward, as judges are: it gives these grades."""

    given: Grades

    def grades(self, problems, texts, finished, keys) -> Grades:
        return self.given

    def bounds(self, right: bool) -> tuple[float, float]:
        return 0.0, 1.0

    def written(self) -> str:
        return "given"


@dataclass(frozen=True)
class Pooled(JudgedApart):
    """A reward whose worker says 0.3 of every answer."""

    pool: ClassVar[GraderPool] = GraderPool(Path(__file__).with_name("gives_part.py"))

    def known_or_pending(self, problem: Problem, text: str, finished: bool) -> Answer:
        return Answer(problem.answer, text, anywhere=False)


def graded(reward: Grader):
    """What the loop and the evaluation make of three responses to one problem."""
    return grade(make_rollouts([1, 1, 1], 3), TEXTS, reward, [])


ONE = Own(1.0, 0.0, (1.0, 0.0, 0.0))


@pytest.mark.parametrize("partial", [0.3, 0.51, 2.0, -1.0, math.inf])
@pytest.mark.parametrize(
    "door",
    [
        lambda partial: Own(1.0, 0.0, (1.0, partial, 0.0)),
        lambda partial: MayFail(1.0, 0.0, (1.0, partial, 0.0)),
        lambda partial: Whole(1.0, 0.0, Grades([1.0, partial, 0.0], {"all": [1.0, 0.0, 0.0]})),
        # a part that does not decide correctness, within a weighted reward
        lambda partial: Weighted(
            1.0, 0.0, {"main": ONE, "part": Own(1.0, 0.0, (1.0, partial, 0.0))}, {"main": 1.0, "part": 0.5}, "main"
        ),
    ],
    ids=["reward", "may_fail", "grader", "weighted"],
)
def test_any_other_correctness_is_an_error_that_says_what_to_return(door, partial: object) -> None:
    with pytest.raises(ValueError, match=r"gave correctness .* to the response 'half'.*float\(score >= threshold\)"):
        graded(door(partial))


def test_the_error_names_the_reward() -> None:
    with pytest.raises(ValueError, match=r"^Own gave correctness 0.3 "):
        graded(Own(1.0, 0.0, (1.0, 0.3, 0.0)))


def test_a_worker_that_gives_a_part_is_refused_too() -> None:
    with pytest.raises(ValueError, match=r"^Pooled gave correctness 0.3 to the response 'right'"):
        graded(Pooled(1.0, 0.0, seconds=5.0, workers=1))


OF_ANY_TYPE = """
import math
import subprocess
import sys
from dataclasses import dataclass
import numpy, torch
from grpo_lab.tasks.base import Reward
from grpo_lab.types import Problem

@dataclass(frozen=True)
class Own(Reward):
    def __call__(self, problem, text, finished):
        return {"right": right, "wrong": wrong}[text]

def outcomes():
    return Own(2.0, -1.0).checked_grades([Problem(0, "1+5=", "6", 1)] * 2, ["right", "wrong"], [True] * 2, [])

for right, wrong in [(True, False), (1, 0), (numpy.float64(1), numpy.float32(0)), (numpy.bool_(True), numpy.int8(0)),
                     (torch.tensor(1.0), torch.tensor(False))]:
    found = outcomes()
    assert [type(one) for one in found.correctness] == [float, float], found
    assert found.correctness == [1.0, 0.0] and found.components == {"outcome": [2.0, -1.0]}, found
right = 1
for wrong in ["0", "1", None, numpy.float32(0.5), torch.tensor(0.7), (), 2]:
    try:
        raise AssertionError(outcomes())
    except ValueError as error:
        assert str(error).startswith(f"Own gave correctness {wrong!r} to the response 'wrong'"), error
print("all seen")
"""


@pytest.mark.extended
def test_numbers_of_any_type_that_equal_0_or_1_are_correctness_and_nothing_else_is() -> None:
    """In a process of its own: under pytest the package's type checks would see them first."""
    done = subprocess.run([sys.executable, "-c", OF_ANY_TYPE], capture_output=True, text=True)
    assert done.stdout == "all seen\n", done.stderr


def test_a_response_that_cannot_be_graded_is_neither_right_nor_wrong() -> None:
    given = (1.0, math.nan, 0.0)
    found = graded(MayFail(1.0, 0.0, given))
    assert found.in_statistics.tolist() == [[True, False, True]] and math.isnan(found.verdict[0, 1])
    with pytest.raises(ValueError, match=r"^Own could not grade the response 'half' \(NaN\).*may_fail: ClassVar"):
        graded(Own(1.0, 0.0, given))


@pytest.mark.parametrize(
    ("grades", "message"),
    [
        (Grades([1.0, 0.0], {"all": [1.0, 0.0, 0.0]}), "gave 2 values of correctness for 3 responses"),
        (Grades([1.0, 0.0, 0.0], {"all": [1.0]}), "gave 1 all for 3 responses"),
        (Grades([1.0, 0.0, 0.0], {"all": [1.0, math.nan, 0.0]}), "gave nan as all to the response 'half'"),
        (Grades([1.0, 0.0, 0.0], {"all": [1.0, math.inf, 0.0]}), "gave inf as all to the response 'half'"),
    ],
)
def test_grades_that_are_no_numbers_of_these_responses_are_refused(grades: Grades, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graded(Whole(1.0, 0.0, grades))


def test_nothing_takes_grades_past_the_check() -> None:
    """Only `checked_grades` calls `grades`; a grader built on another may call that one's by `super()`."""
    calls = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "grades":
                calls.append((path.relative_to(PACKAGE).as_posix(), ast.unparse(node.func.value)))
    assert sorted(calls) == [("tasks/base.py", "self"), ("tasks/verifiers.py", "super()")]


def test_a_score_of_reasoning_gym_is_right_from_the_threshold_on() -> None:
    pytest.importorskip("reasoning_gym")
    problem = Problem(
        0, "7+5?", "12", 1, details='{"family": "chain_sum", "settings": {}, "entry": {"question": "", "answer": "12"}}'
    )
    whole = GymScore(1.0, 0.0, AnswerPosition.marked, threshold=1.0, seconds=30.0, workers=1)
    texts = [r"\boxed{12}", r"\boxed{12 or so}", r"\boxed{13}"]  # the second scores 2 of its 8 characters
    for threshold, outcomes in ((1.0, [1.0, 0.0, 0.0]), (0.25, [1.0, 1.0, 0.0]), (0.26, [1.0, 0.0, 0.0])):
        grades = replace(whole, threshold=threshold).checked_grades([problem] * 3, texts, [True] * 3, [])
        assert grades.correctness == outcomes and grades.components == {"outcome": outcomes}
    for threshold in (0.0, 1.5):
        with pytest.raises(ValueError, match="threshold must be above 0 and at most 1"):
            replace(whole, threshold=threshold)


def test_the_shipped_verifier_is_unchanged() -> None:
    assert Strict(1.0, -1.0).checked_grades([SIX] * 2, ["#6", "#7"], [True] * 2, []) == Grades(
        [1.0, 0.0], {"outcome": [1.0, -1.0]}
    )
