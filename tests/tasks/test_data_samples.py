"""A grader is tried on three problems of the data before a run, and its faults are found."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.run.state import read_inputs
from grpo_lab.run.training_problems import training_problems
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


@pytest.mark.few(6)
@pytest.mark.parametrize("option", [*sorted(path.stem for path in (conf_folder() / "reward").glob("*.yaml")), "always"])
def test_a_run_on_data_tries_its_graders(
    option: str, function: str, tiny_base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With every reward, before a model loads; a fault is a warning. The verifier is another option than the reward."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"question": f"{a}+{a}=", "answer": str(2 * a)}) + "\n" for a in range(1, 31)))
    given = {"function": f"{function}:good", "always": f"{function}:always"}
    name = "function" if option in given else option
    words = [f"reward={name}", "verifier=math", *([f"reward.path={given[option]}"] if option in given else [])]
    settings = [
        "model=hf", f"model.path={tiny_base}", "task=jsonl", f"task.path={data}", "template=plain", "engine=native",
        "problems_per_step=2", "evaluation=brief", "task.heldout_rows=4", "task.downstream_rows=4",
        "engine.max_tokens=8", "evaluation.max_tokens=8", "evaluation.downstream_max_tokens=8", *words,
    ]  # fmt: skip
    with caplog.at_level(logging.WARNING):
        try:
            run = to_run(compose_config(settings))
            read_inputs(run, training_problems(run, torch.device("cpu"), None))
        except ValueError:
            assert option in ("gym", "gym_last_number", "rubric", "rubric_evolving"), "not for questions of a file"
            return
    assert ("on the data's own samples" in caplog.text) == (option == "always"), caplog.text
