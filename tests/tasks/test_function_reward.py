"""A Python function as reward or verifier: its numbers, weights, failures and limits, and the page's example."""

from __future__ import annotations

import json
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.config.folders import conf_folder
from grpo_lab.run.recorder import verdict
from grpo_lab.sweeps.status import status_of_run
from grpo_lab.tasks.function_reward import FunctionReward, pool_of
from grpo_lab.tasks.tables import Table
from grpo_lab.tracking import provenance
from grpo_lab.types import Problem

FUNCTIONS = """
import time

def score(prompt, response, answer, level=0, **row):
    if response == "fails":
        raise ValueError(f"no {level}")
    return 1.0 if response == answer else 0.25 * int(level)

def brief(response):
    return float(len(response) < 3)

def finished_only(response, finished):
    return 1.0 if finished else 0.5

def slow(response):
    while response == "slow":
        time.sleep(0)
    return 1.0

def large(response):
    return 7.0 if response == "large" else float("nan") if response == "nan" else 1.0

def needs(response, topic):
    return 1.0
"""
PROBLEMS = [Problem(number, f"{number}+1?", str(number + 1), 1, details='{"level": 2}') for number in range(4)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path / "rewards.py"


def reward(file: Path, *names: str, **changes: object) -> FunctionReward:
    numbers = {
        "correct": 1.0,
        "wrong": 0.0,
        "correct_at": 1.0,
        "lowest": 0.0,
        "highest": 1.0,
        "seconds": 2.0,
        "workers": 1,
    }
    fields = {"path": "+".join(f"{file}:{name}" for name in names), "weights": [], "truncated": False, **numbers}
    return FunctionReward(**{**fields, **changes})  # pyright: ignore[reportArgumentType]


def graded(one: FunctionReward, texts: list[str], finished: bool = True) -> tuple[list[float], list[float]]:
    grades = one.checked_grades(PROBLEMS[: len(texts)], texts, [finished] * len(texts), [])
    return grades.correctness, [sum(row) for row in zip(*grades.components.values())]


def test_the_number_is_the_reward_and_from_correct_at_on_it_is_correct(path: Path) -> None:
    assert graded(reward(path, "score"), ["1", "x", "3"]) == ([1.0, 0.0, 1.0], [1.0, 0.5, 1.0])
    assert graded(reward(path, "score", correct_at=0.5), ["1", "x"]) == ([1.0, 1.0], [1.0, 0.5])
    assert graded(reward(path, "score", correct=1.0, wrong=-1.0), ["1", "x"])[1] == [1.0, 0.0], "wrong + 2 s"
    assert graded(reward(path, "score"), ["1"], finished=False) == ([0.0], [0.0])
    assert graded(reward(path, "finished_only", truncated=True), ["1"], finished=False) == ([0.0], [0.5])


def test_several_functions_and_their_weights(path: Path) -> None:
    both = reward(path, "score", "brief", weights=[1.0, 0.2])
    grades = both.checked_grades(PROBLEMS[:2], ["1", "xyz"], [True, True], [])
    assert grades.correctness == [1.0, 0.0] and grades.components == {"score": [1.0, 0.5], "brief": [0.2, 0.0]}
    assert (both.bounds(True), both.bounds(False)) == ((1.0, 1.2), (0.0, 1.2))
    assert both.written() == "score + 0.2 brief; correct if score >= 1"
    scaled = replace(both, correct=1.0, wrong=-1.0)
    assert scaled.bounds(True) == (1.0, pytest.approx(1.4)) and scaled.written().startswith(
        "-1 + 2 (score + 0.2 brief)"
    )


def test_what_fails_is_not_graded_and_shown(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        outcomes, _ = graded(reward(path, "score"), ["1", "fails", "3"])
        assert math.isnan(outcomes[1]) and (outcomes[0], outcomes[2]) == (1.0, 1.0)
        assert f"{path}:score did not grade the response 'fails': ValueError: no 2 (rewards.py, line 6)" in caplog.text
        assert math.isnan(graded(reward(path, "slow", seconds=0.2), ["slow"])[0][0])
        assert "it took more than 0.2 s of processor time or 2 GiB of memory" in caplog.text
        assert [math.isnan(one) for one in graded(reward(path, "large"), ["large", "nan", "x"])[0]] == [
            True,
            True,
            False,
        ]
        assert "7 is not between lowest=0 and highest=1" in caplog.text and "no finite number" in caplog.text


@pytest.mark.extended
def test_a_run_says_how_many_responses_its_function_failed_on(tmp_path: Path) -> None:
    (tmp_path / "frail.py").write_text(
        "def score(response, answer):\n"
        "    if '=' in response and len(response) % 3 == 0:\n"
        "        raise IndexError(response)\n"
        "    return float(answer in response)\n"
    )
    folder = run_in_process(tmp_path, *SMALL, "reward=function", f"reward.path={tmp_path}/frail.py:score")
    shares = [line["metrics"]["rollout/ungraded"] for line in metrics_of(folder)[1:]]
    done = json.loads((folder / "DONE").read_text())
    assert 0.1 < shares[-1] < 1 and done["ungraded"] >= max(shares)
    assert f"warning: the grader failed on up to {done['ungraded']:.0%} of the responses" in verdict(folder, done)
    assert f"ungraded {shares[-1]:.3f}" in status_of_run(folder, "frail").line


def test_a_file_that_is_edited_while_a_run_goes_on_stops_it(path: Path) -> None:
    """The workers keep what they loaded; one that replaces another refuses the edited file."""
    one = reward(path, "score", seconds=0.2)
    assert graded(one, ["1"]) == ([1.0], [1.0])
    path.write_text(FUNCTIONS.replace("return 1.0 if response == answer", "return 0.0 if response == answer"))
    assert graded(one, ["1"]) == ([1.0], [1.0])
    pool_of(one.functions).close()
    with pytest.raises(ValueError, match="was edited while the run goes on"):
        graded(one, ["1"])


def test_a_function_is_tried_before_a_model_loads(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reward(path, "score").check(PROBLEMS)
    with pytest.raises(ValueError, match=r"missing 1 required .* 'topic'.*TRL's completion.*task.details='\*'"):
        reward(path, "needs").check(PROBLEMS)
    with pytest.raises(ValueError, match=r"has no function nothing.*can be imported"):
        reward(path, "nothing").check(PROBLEMS)
    with pytest.raises(ValueError, match=r"set reward\.lowest and reward\.highest"):
        reward(path, "brief", lowest=0.5, highest=0.75, correct_at=0.6).check(PROBLEMS)
    with caplog.at_level(logging.WARNING):
        reward(path, "finished_only", "score", highest=2.0, correct_at=1.5).check(PROBLEMS)
    assert "finds none of the right answers '1', '2', '3' correct (from 1.5)" in caplog.text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"path": ""}, "path must be a function"),
        ({"path": "rewards.py"}, "path must be FILE.py:FUNCTION"),
        ({"path": "missing.py:score"}, "path must be in a file that exists"),
        ({"weights": [1.0, 2.0]}, "weights must be 1 numbers"),
        ({"weights": [0.0]}, "weights must be numbers other than 0"),
        ({"lowest": 1.0}, "lowest must be below highest"),
        ({"correct_at": 0.0}, "correct_at must be above 0 and at most 1"),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_what_is_refused(path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        reward(path, "score", **changes)


def test_functions_written_for_verl_and_trl_are_called_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str == ground_truth), 'acc': 0.0}\n"
        "def trl(completions, solution, level, **kwargs):\n"
        "    (text,), (right,), (own,) = [chat[0]['content'] for chat in completions], solution, level\n"
        "    assert kwargs['prompts'][0][0] == {'role': 'user', 'content': kwargs['question'][0]} and own == 2\n"
        "    return [float(text == right)]\n"
        "def nothing(completion, **kwargs):\n"
        "    return None\n"
    )
    problems = [replace(one, details=json.dumps({"level": 2, "question": one.question})) for one in PROBLEMS]
    for name in ("verl", "trl"):
        one = reward(tmp_path / "theirs.py", name)
        grades = one.checked_grades(problems[:2], ["1", "x"], [True, True], [])
        assert grades.correctness == [1.0, 0.0], name
    none = reward(tmp_path / "theirs.py", "nothing").checked_grades(problems[:1], ["1"], [True], [])
    assert math.isnan(none.correctness[0]), "TRL skips such a response"


def test_what_ends_a_process_or_takes_its_memory_is_a_failure(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("def score(response):\n    return exit(3) if response == 'x' else float(len(bytearray(3 << 30)))\n")
    with caplog.at_level(logging.WARNING):
        assert all(map(math.isnan, graded(reward(path, "score"), ["x", "y"])[0]))
    assert "SystemExit: 3" in caplog.text and "it took more than 2 GiB of memory" in caplog.text


def test_columns_of_the_data_set_come_by_name(tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text('{"question": "1+1?", "answer": "2", "level": 3, "topic": "sums"}\n')
    fields = {"path": str(tmp_path / "q.jsonl"), "split": "train", "question": "question", "answer": "answer"}

    def details(written: str) -> str:
        (row,) = Table.of({**fields, "details": written}, "table").rows()
        return row.details

    assert details("*") == '{"question": "1+1?", "answer": "2", "level": 3, "topic": "sums"}'
    assert details("level+topic") == '{"level": 3, "topic": "sums"}' and details("topic") == "sums"


def test_the_file_is_part_of_the_code(path: Path) -> None:
    one = reward(path, "score", "brief")
    before = provenance.code(one.files)["sources"]
    assert one.files == (path, path) and before != provenance.code()["sources"]
    path.write_text(FUNCTIONS + "x = 1\n")
    assert provenance.code(one.files)["sources"] != before


def test_a_function_of_an_installed_module_is_no_file_of_the_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(path.parent))  # as an installed package is found
    one = replace(reward(path, "score"), path="rewards:score")
    assert one.files == () and one.names == ("score",)
    assert graded(one, ["1", "0"]) == ([1.0, 0.0], [1.0, 0.5])
    missing = replace(one, path="rewards:absent")
    with pytest.raises(ValueError, match="rewards:absent"):
        missing.check(PROBLEMS)


@pytest.mark.extended
def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (conf_folder() / "models.md").read_text().split("## A reward of your own")[1]
    (code,) = re.findall(r"```python\n(.*?)```", page, flags=re.S)[:1]
    (commands,) = re.findall(r"```bash\n(.*?)```", page, flags=re.S)[:1]
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    lines = commands.replace("\\\n", " ").strip().splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines):
        words = line.removeprefix("python -m grpo_lab.train ").split()
        short = [word for word in words if not word.startswith("budget.amount")]
        folder = run_in_process(tmp_path / f"run{number}", *SMALL, *short, "budget.amount=2")
        metrics = [line["metrics"] for line in metrics_of(folder)[1:]]
        assert all("reward/component/score" in line for line in metrics)
    for line in metrics:
        assert line["reward/component/score"] + line["reward/component/brief"] == pytest.approx(line["reward/mean"])
