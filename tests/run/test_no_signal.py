"""A run in which no group has signal says so once, with the likely cause first."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import cut_short
from short_runs import SMALL, metrics_of, run_in_process

from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.response_metrics import unanswered
from grpo_lab.run.no_signal import has_signal, no_signal_text
from grpo_lab.run.recorder import Recorder
from grpo_lab.tasks.base import AnswerForm
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.run_log import UnwrittenLog
from grpo_lab.tracking.terminal import Terminal

OVERRIDES = (*SMALL, "budget.amount=5", "no_signal_steps=3")
LIKELY = re.compile(r"Likely cause: (.*?)(?:\. Otherwise: (.*))?$")


def warnings_in(said: str) -> list[str]:
    return [line for line in said.splitlines() if line.startswith("warning no learning signal")]


@pytest.mark.extended
def test_responses_that_all_reach_the_token_limit_are_told_to_get_more_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two tokens have no room for `#` and a digit and the end of the text, so all are wrong and truncated."""
    folder = run_in_process(tmp_path, *OVERRIDES, "task.response_tokens=2")
    (warning,) = warnings_in(capsys.readouterr().err)
    assert warning.startswith("warning no learning signal for 3 consecutive steps: ") and " 0% correct, " in warning
    likely = LIKELY.search(warning)
    assert likely is not None
    assert likely[1] == "most responses reach the token limit before they answer: raise task.response_tokens (now 2)"
    assert all(row["metrics"]["rollout/truncated"] > 0.9 for row in metrics_of(folder)[1:])
    done = json.loads((folder / "DONE").read_text())
    assert done["warnings"] == [f"step 3: {warning.removeprefix('warning ')}"], "also for who reads it later"


@pytest.mark.extended
def test_questions_that_are_all_right_are_called_too_easy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "always.py").write_text("def score(response):\n    return 1.0\n")
    function = ("reward=function", f"reward.path={tmp_path}/always.py:score", "reward.truncated=true")
    run_in_process(tmp_path / "runs", *OVERRIDES, *function)
    (warning,) = warnings_in(capsys.readouterr().err)
    likely = LIKELY.search(warning)
    assert " 100% correct, " in warning and likely is not None and likely[2] is None
    assert likely[1] == "the questions are too easy: choose harder ones, such as another task or pass_rate=band"


@pytest.mark.extended
def test_answers_that_are_not_found_point_to_template_and_grader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Random characters end in the mark of an answer by chance alone, and most end by themselves."""
    folder = run_in_process(tmp_path, *OVERRIDES, "engine.temperature=50", "engine.max_tokens=48")
    (warning,) = warnings_in(capsys.readouterr().err)
    last = metrics_of(folder)[3]["metrics"]
    assert last["rollout/unanswered"] > 0.7 and last["rollout/truncated"] < 0.3 and last["reward/outcome"] == 0
    assert f"{last['rollout/unanswered']:.0%} without a parseable answer" in warning
    likely = LIKELY.search(warning)
    assert likely is not None and likely[1].startswith("the grader finds no answer in most responses: read some with")
    assert likely[2].startswith("the questions are too hard: choose easier ones")


@pytest.mark.extended
def test_a_run_that_learns_is_not_warned_and_0_turns_it_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_in_process(tmp_path / "learns", *OVERRIDES)
    assert all(has_signal(row["metrics"]) for row in metrics_of(folder)[1:])
    run_in_process(tmp_path / "off", *OVERRIDES, "no_signal_steps=0", "task.response_tokens=2")
    assert not warnings_in(capsys.readouterr().err)


@pytest.mark.extended
def test_steps_before_a_kill_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*OVERRIDES, "task.response_tokens=2", "checkpoint_every=2")
    with cut_short(2):
        run_in_process(tmp_path, *words)
    assert not warnings_in(capsys.readouterr().err), "two of three steps"
    with cut_short(3):  # after its last checkpoint
        run_in_process(tmp_path, *words)
    run_in_process(tmp_path, *words)
    said = capsys.readouterr().err
    assert said.count("resuming after step 2") == 1 and len(warnings_in(said)) == 2, "each attempt at step 3 says it"
    (folder,) = tmp_path.glob("*/seed=0")
    assert len(json.loads((folder / "DONE").read_text())["warnings"]) == 1


def test_it_warns_again_only_after_signal_came_back_and_vanished(
    make_run: Callable[..., RunConfig], tmp_path: Path
) -> None:
    said = io.StringIO()
    with RunProgress("probe", Terminal(file=said)) as progress:
        recorder = Recorder(make_run("no_signal_steps=2").record_settings, UnwrittenLog(tmp_path), progress, "key")
        without = {"advantage/absolute": 0.0, "reward/outcome": 0.0}
        signals = [0, 0, 0, 0, 1, 0, 1, 0, 0, 0]
        warned = []
        for step, signal in enumerate(signals, 1):
            recorder._warn_without_signal(step, {**without, "advantage/absolute": 0.5 * signal})
            warned.append(len(recorder.warnings))
    assert warned == [0, 1, 1, 1, 1, 1, 1, 1, 2, 2]
    assert len(warnings_in(said.getvalue())) == 2


def test_what_gives_a_gradient_is_signal() -> None:
    assert not has_signal({}), "no row is in the loss"
    assert not has_signal({"advantage/absolute": 0.0}) and has_signal({"advantage/absolute": 1e-9})
    assert has_signal({"advantage/absolute": 0.0, "active_fraction/teacher": 0.5}), "a teacher teaches without rewards"


@pytest.mark.parametrize(
    "seen, first",
    [
        ({"rollout/ungraded": 0.9, "rollout/truncated": 0.9}, "the grader fails on most responses"),
        ({"reward/outcome": 0.95, "rollout/truncated": 0.9}, "the questions are too easy"),
        ({"reward/outcome": 0.4, "rollout/truncated": 0.6}, "every question is always or never solved"),
        (
            {"reward/outcome": 0.05, "rollout/truncated": 0.6, "rollout/unanswered": 0.9},
            "most responses reach the token",
        ),
        ({"reward/outcome": 0.05, "rollout/truncated": 0.4, "rollout/unanswered": 0.9}, "the grader finds no answer"),
        ({"reward/outcome": 0.0, "rollout/truncated": 0.4, "rollout/unanswered": 0.1}, "the questions are too hard"),
        ({}, "the questions are too hard"),
    ],
)
def test_the_likely_cause_comes_first(seen: dict[str, float], first: str) -> None:
    likely = LIKELY.search(no_signal_text(10, seen, 24))
    assert likely is not None and likely[1].startswith(first)


@pytest.mark.extended
def test_an_answer_is_looked_for_where_the_grader_reads(
    make_run: Callable[..., RunConfig],
) -> None:
    texts = ["7+1=8;#8", "7+1=8;#8;", "#", "\\boxed{8}", "<answer>8</answer>"]
    assert unanswered(texts, make_run("reward=strict").reward) == {"rollout/unanswered": 4 / 5}
    assert unanswered(texts, make_run("reward=math", "template=boxed").reward) == {"rollout/unanswered": 3 / 5}
    for words in (("reward=lenient",), ("reward=math_lenient", "template=boxed")):
        assert unanswered(["so it is 8"], make_run(*words).reward) == {}, "any text may be an answer"
    assert (
        AnswerForm.free.occurs_in("8")
        and not AnswerForm.hashes.occurs_in("#8")
        and AnswerForm.hashes.occurs_in("#### 8")
    )
