"""Several rewards in one: sums by hand, whose outcome it is, what fails, bounds, refusals, and a run that logs them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pandas as pd
import pytest
import torch
from helpers import make_rollouts
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.config.explain import formula
from grpo_lab.config.rules import IncompatibleRun, check_compatible
from grpo_lab.rollout.grading import grade
from grpo_lab.tasks.math_answers import BoxedOnly, MathVerify
from grpo_lab.tasks.verifiers import FormatOnly, Near, Strict
from grpo_lab.tasks.weighted import Weighted
from grpo_lab.types import Problem

STRICT, FORMAT = Strict(correct=1.0, wrong=-1.0), FormatOnly(correct=1.0, wrong=0.0)
NEAR = Near(correct=1.0, wrong=0.0, near=0.5, within=3)
BOTH = Weighted(1.0, -1.0, {"strict": STRICT, "format": FORMAT}, {"strict": 2.0, "format": 0.25}, "strict")
SIX = Problem(0, "1+5=", "6", 1)
TEXTS = ["1+5=#6", "#7", "6"]  # right; a number in the right place; neither


@dataclass(frozen=True)
class FailsOnShort(Strict):
    """Strict, with a grader that fails on texts of one character."""

    may_fail: ClassVar[bool] = True

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return math.nan if len(text) == 1 else super().__call__(problem, text, finished)


def test_the_reward_is_the_weighted_sum_and_the_outcome_that_of_one_part() -> None:
    grades = BOTH.grades([SIX] * 3, TEXTS, [True] * 3, [])
    assert grades.correctness == [1.0, 0.0, 0.0]
    assert grades.components == {"strict": [2.0, -2.0, -2.0], "format": [0.25, 0.25, 0.0]}
    other = replace(BOTH, outcome_of="format", wrong=0.0).grades([SIX] * 3, TEXTS, [True] * 3, [])
    assert other.correctness == [1.0, 1.0, 0.0] and other.components == grades.components
    # Near has two components of its own: 1 for what is right, and 0.5 for 7, which is one off.
    of_near = Weighted(1.0, 0.0, {"near": NEAR, "strict": STRICT}, {"near": 4.0, "strict": 1.0}, "near")
    assert of_near.grades([SIX] * 3, TEXTS, [True] * 3, []).components["near"] == [4.0, 2.0, 0.0]


# The format earns a tenth; the third fixed rubric costs a third of the others' weights.
@pytest.mark.parametrize(
    "reward,lowest,highest",
    [(["reward=strict_and_format"], -1, 1.1), (["reward=rubric", "reward.judge.model=judge"], -1 - 2 / 3, 1)],
)
def test_a_recipe_with_rewards_of_minus_one_and_one_means_them_of_every_reward(
    make_run, reward: list[str], lowest: float, highest: float
) -> None:
    run = make_run("recipe=dapo", *reward)
    assert (run.reward.correct, run.reward.wrong) == (1.0, -1.0)
    assert (run.reward_shaping.correct, run.reward_shaping.wrong) == (1.0, -1.0)
    check_compatible(run)
    assert run.reward.bounds(right=False)[0] == pytest.approx(lowest)
    assert run.reward.bounds(right=True)[1] == pytest.approx(highest)


def test_a_part_with_the_name_of_a_length_penalty_is_refused_with_a_remedy() -> None:
    named = Weighted(1.0, -1.0, {"soft_overlong": STRICT}, {"soft_overlong": 1.0}, "soft_overlong")
    graded = grade(replace(make_rollouts([3, 2, 1], 3), problems=(SIX,)), TEXTS, named, [])
    with pytest.raises(ValueError, match="two components of the reward are named soft_overlong: rename the part"):
        graded.with_component("soft_overlong", graded.reward)


def test_graded_rollouts_hold_the_parts_and_their_sum() -> None:
    rollouts = replace(make_rollouts([3, 2, 1], 3), problems=(SIX,))
    graded = grade(rollouts, TEXTS, BOTH, [])
    assert graded.reward.tolist() == [[2.25, -1.75, -2.0]] and graded.correctness.tolist() == [[1.0, 0.0, 0.0]]
    assert list(graded.components) == ["strict", "format"]
    assert graded.failed is not None and not graded.failed.any()


@pytest.mark.parametrize("outcome_of", ["strict", "frail"])
def test_a_response_that_one_part_failed_on_is_in_no_statistic(outcome_of: str) -> None:
    """Whichever part is the outcome: the third text is wrong for strict, and still no wrong answer."""
    frail = FailsOnShort(correct=1.0, wrong=0.0)
    wrong = {"strict": STRICT, "frail": frail}[outcome_of].wrong
    both = Weighted(1.0, wrong, {"strict": STRICT, "frail": frail}, {"strict": 1.0, "frail": 1.0}, outcome_of)
    graded = grade(replace(make_rollouts([3, 2, 1], 3), problems=(SIX,)), TEXTS, both, [])
    assert graded.in_statistics.tolist() == graded.in_loss.tolist() == [[True, True, False]]
    assert graded.failed is not None and graded.failed.tolist() == [[False, False, True]]
    assert graded.reward.tolist() == [[2.0, -1.0, 0.0]] and graded.verdict.isnan().tolist() == [[False, False, True]]
    assert all(torch.equal(part[0, 2], torch.tensor(0.0).double()) for part in graded.components.values())


def test_bounds_know_that_the_outcome_decides_one_part_alone() -> None:
    assert BOTH.bounds(right=True) == (2.0, 2.25) and BOTH.bounds(right=False) == (-2.0, -1.75)
    charged = Weighted(1.0, 0.0, {"near": NEAR, "format": FORMAT}, {"near": 1.0, "format": -0.5}, "near")
    assert charged.bounds(right=True) == (0.5, 1.0) and charged.bounds(right=False) == (-0.5, 0.5)
    assert Weighted(1.0, 0.0, {"whole": charged}, {"whole": 2.0}, "whole").bounds(right=True) == (1.0, 2.0), (
        "one within another"
    )


@pytest.mark.extended
def test_options_hold_options_and_the_command_line_changes_each(make_run) -> None:
    math_reward = make_run("reward=math_and_format").reward
    assert isinstance(math_reward.parts["math"], MathVerify) and math_reward.parts["format"] == BoxedOnly(1.0, 0.0)
    assert math_reward.weights == {"math": 1.0, "format": 0.1} and math_reward.outcome_of == "math"
    changed = ["reward=strict_and_format", "reward.weights.format=0.5", "reward.wrong=-1"]
    run = make_run(*changed, "+reward@reward.parts.near=near", "+reward.weights.near=-0.2")
    assert run.reward == Weighted(
        1.0,
        -1.0,
        {"strict": STRICT, "format": FORMAT, "near": replace(NEAR, near=0.3)},
        {"strict": 1.0, "format": 0.5, "near": -0.2},
        "strict",
    )
    assert dict(formula(run))["R"] == (
        "1 * strict (1 if right else -1) + 0.5 * format (1 if right else 0) + -0.2 * near (1 if right else 0)"
    )
    other = make_run("reward=math_and_format", "reward@reward.parts.math=math_lenient").reward
    assert other.parts["math"] == make_run("reward=math_lenient").reward
    check_compatible(make_run("reward=strict_and_format", "scale=group_mean"))
    with pytest.raises(IncompatibleRun, match="a mean that can be negative"):
        check_compatible(make_run("reward=strict_and_format", "scale=group_mean", "reward.weights.format=-1"))


@pytest.mark.parametrize(
    "words,message",
    [
        (["reward.weights.format=nan"], r"weights.format must be a number other than 0, got nan: a part that is worth"),
        (["reward.weights.format=0"], r"weights.format must be a number other than 0, got 0"),
        (["reward.weights.strict=-1"], "weights.strict must be above 0, got -1.0: a right answer has to earn more"),
        (["+reward.weights.extra=1"], r"weights must be those of strict, format, got \['strict', 'format', 'extra'\]"),
        (["reward.outcome_of=math"], "outcome_of must be one of strict, format, got 'math': accuracy is the mean"),
        (["+reward.parts.judge=0.5", "+reward.weights.judge=1"], r"judge must be a reward, got 0.5: write `- /reward@"),
    ],
)
def test_what_is_refused(make_run, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_run("reward=strict_and_format", *words)


def test_no_parts_and_a_name_that_no_metric_may_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"parts must be one part or more, got \{\}: conf/reward"):
        Weighted(1.0, 0.0, {}, {}, "strict")
    with pytest.raises(
        ValueError, match=r"parts.strict.wrong must be reward.wrong \(0.0\), got -1.0: set reward.wrong"
    ):
        replace(BOTH, wrong=0.0)
    with pytest.raises(ValueError, match="parts must be named by small letters, digits and _, got 'My part'"):
        Weighted(1.0, 0.0, {"My part": STRICT}, {"My part": 1.0}, "My part")


@pytest.mark.extended
def test_a_run_logs_each_part_and_tables_show_them(tmp_path: Path) -> None:
    words = ["reward=strict_and_format", "budget.amount=3", "rollouts_every=1", "reward.weights.format=0.5"]
    folder = run_in_process(tmp_path, *SMALL, *words, name="parts")
    steps = [line["metrics"] for line in metrics_of(folder)[1:]]
    assert len(steps) == 3
    for step in steps:
        parts = {part: step[f"reward/component/{part}"] for part in ("strict", "format")}
        assert step["reward/mean"] == pytest.approx(sum(parts.values()))
        assert parts["strict"] == pytest.approx(step["reward/outcome"]), "weight 1, rewards 1 and 0"
        assert 0 < parts["format"] <= 0.5 and step["rollout/ungraded"] == 0
    for table in sorted((folder / "rollouts").glob("*.parquet")):
        rows = pd.read_parquet(table)
        assert set(rows["component_format"]) <= {0.0, 0.5} and set(rows["component_strict"]) == {0.0, 1.0}
        assert (rows["reward"] == rows["component_strict"] + rows["component_format"]).all()
