"""What a run shows: the five numbers a user watches, and what takes long, on a terminal of any width and in a log."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import python_path, wait_until
from short_runs import SMALL, train_command

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.run.recorder import verdict
from grpo_lab.tasks.base import Grader
from grpo_lab.tracking import progress
from grpo_lab.tracking.activity import current, doing, sampling
from grpo_lab.tracking.metrics import SUITES
from grpo_lab.tracking.progress import RunProgress, describe, describe_stages, without_times
from grpo_lab.tracking.run_reader import ACTIVITY, activity_of
from grpo_lab.tracking.terminal import Terminal
from grpo_lab.types import Problem

METRICS = {"reward/mean": 0.5, "rollout/truncated": 0.25, "eval/heldout/accuracy": 0.75}
TIMING = {"time/tokens_per_second": 12345.6}


def test_a_log_gets_a_line_per_evaluation_with_the_share_and_the_time_left() -> None:
    written = io.StringIO()
    with RunProgress("plain seed 0", Terminal(file=written, width=80)) as shown:
        shown.show(0, 0.0, {"eval/heldout/accuracy": 0.3}, {})
        shown.show(1, 0.1, {"reward/mean": 0.4}, {})  # neither an evaluation nor overdue
        shown.show(2, 0.5, METRICS, TIMING)
    lines = written.getvalue().splitlines()
    assert len(lines) == 3 and lines[0] == "plain seed 0"
    for part in ("step    2", "reward 0.500", "held-out (eval) 0.750", "truncated 0.25", "tok/s 12,346", "50%", "left"):
        assert part in lines[2], part


def test_a_narrow_terminal_cuts_the_name_and_keeps_the_numbers() -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=80, force_terminal=True, legacy_windows=False)
    with RunProgress("a,very=long,name=that,goes=on,and=on,for=ever,and=ever,and=a,day seed 0", console) as shown:
        shown.show(7, 0.5, METRICS, TIMING)
        shown.live.refresh()
        text = written.getvalue()
    assert "tok/s 12,346" in text and "50%" in text and "a,very=long" in text and "a,day" not in text


def test_the_end_of_a_run_tells_the_two_held_out_accuracies_apart(tmp_path: Path) -> None:
    first = {f"eval/{suite}/accuracy": 0.25 for suite in SUITES}
    last = {f"eval/{suite}/accuracy": 0.5 + number / 8 for number, suite in enumerate(SUITES)}
    lines = verdict(tmp_path, {"steps": 3, "first": first, "last": last}).splitlines()
    assert "  held-out, training protocol    0.250 -> 0.625  (+0.375)" in lines
    assert "  held-out, evaluation protocol  0.250 -> 0.750  (+0.500)" in lines
    assert len(lines) == 6 and lines[-1] == f"run folder: {tmp_path}"


# ---- what takes long


def lines_of(written: io.StringIO) -> list[str]:
    return written.getvalue().splitlines()


def test_a_log_gets_a_line_after_a_silence_and_then_one_per_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing can be counted, such as a model that loads."""
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_SILENT_SECONDS", 0.3)
    written = io.StringIO()
    with RunProgress("plain seed 0", Terminal(file=written, width=80)) as shown:
        began = time.monotonic()
        with doing("loading the model"):
            wait_until(lambda: len(lines_of(written)) == 4)
        assert time.monotonic() - began >= 0.9 and lines_of(written)[0] == "plain seed 0"
        assert all(re.fullmatch(r"loading the model, 0m\d\ds so far", line) for line in lines_of(written)[1:])
        with doing("fine-tuning", 8, "updates") as stage:
            stage.done = 2
            shown.say("something else")  # which is no silence
            began = time.monotonic()
            wait_until(lambda: len(lines_of(written)) == 6)
            assert time.monotonic() - began >= 0.28
        said, line = lines_of(written)[4:]
        assert said == "something else" and re.fullmatch(r"fine-tuning, 2 of 8 updates, 0m\d\ds left", line)
        time.sleep(0.6)  # nothing is being done
        assert len(lines_of(written)) == 6


def test_the_time_left_counts_an_inner_stage_as_a_part_of_the_outer_one() -> None:
    with doing("training", 4, "updates") as outer, doing("", 10, "microbatches") as inner:
        outer.done, inner.done = 1, 5
        stages, now = current(), outer.began + 30.0
        assert describe_stages(stages, now) == "training, 1 of 4 updates, 5 of 10 microbatches, 0m50s left"
    assert not current()


def test_questions_are_counted_by_suite_and_time_by_tokens() -> None:
    """Two questions of two answers each and one question of a longer answer; the first suite's answers end first."""
    parts = [("heldout", 7), ("heldout", 7), ("heldout", 8), ("heldout", 8), ("downstream", 7)]
    with doing("step 0: evaluating"), doing("", parts=parts), sampling([10, 10, 10, 10, 40]) as shown:
        stage = current()[-1]
        shown.grow(20)
        assert without_times(current()) == "step 0: evaluating, 0 of 3 questions" and stage.share == 20 / 80
        shown.end(0)
        assert stage.done == 0 and stage.share == 10 / 80
        shown.end(1)
        assert without_times(current()) == "step 0: evaluating, heldout: question 1 of 2, 1 of 3 in all"
        shown.grow(30)
        assert stage.share == 50 / 80
        shown.end(4)
        assert without_times(current()) == "step 0: evaluating, downstream: question 1 of 1, 2 of 3 in all"
        stage.began -= 60
        assert describe_stages(current(), time.monotonic()).endswith("0m20s left"), "60 of 80 tokens in a minute"
    with doing("step 1: generating"), sampling([10, 10]) as shown:
        shown.end(1)
        assert without_times(current()) == "step 1: generating, 1 of 2 responses"


def test_ungraded_responses_are_shown_once_there_are_any() -> None:
    assert "ungraded" not in describe(METRICS | {"rollout/ungraded": 0.0}, 3)
    assert "truncated 0.25  ungraded 0.18" in describe(METRICS | {"rollout/ungraded": 0.18}, 3)
    assert "truncated 0.00" in describe(METRICS | {"rollout/truncated": 0.0}, 3)


def test_what_another_thread_does_is_not_shown() -> None:
    """As generation beside training."""
    seen: list[str] = []

    def beside() -> None:
        with doing("generating", 8, "responses") as stage:
            stage.done += 1
            seen.append(without_times(current()))

    with doing("step 3: training"):
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert seen == ["step 3: training"]


@pytest.mark.extended
@pytest.mark.parametrize("terminal", [pytest.param(False, marks=pytest.mark.extended), True])
def test_an_evaluation_shows_its_suite_its_questions_and_the_time_left(
    terminal: bool, tmp_path: Path, tiny_base: Path
) -> None:
    """A run as a user starts it, on a terminal and with its output in a file, where every silence is short."""
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    words = (*SMALL, "evaluation.heldout_problems=64", "budget.amount=2", "plugins=[impatient]")
    said = output_of(train_command(tmp_path / "runs", *words), terminal, PYTHONPATH=python_path(tmp_path))
    assert "finished after 2 steps" in said, said
    pattern = r"step (\d): evaluating, heldout: question (\d+) of 64, (\d+) of 160 in all"
    if terminal:
        found = re.findall(r"0m0\ds left +" + pattern, said)
    else:
        found = re.findall("^" + pattern + r", 0m0\ds left$", said, re.MULTILINE)
    at_start = [(int(one), int(every)) for step, one, every in found if step == "0"]
    assert len(at_start) > 2 and at_start == sorted(at_start) and {step for step, *_ in found} == {"0", "2"}
    assert re.search(r"step 1: training, \d of 4 updates", said), "so do the other stages"
    assert not list((tmp_path / "runs").glob("*/seed=0/.activity*"))


IMPATIENT = """
from grpo_lab.tracking import progress

progress._LOOK_SECONDS, progress._SILENT_SECONDS, progress._SHOWN_SECONDS = 0.001, 0.0, 0.0
real = progress.Live


class Live(real):
    def __init__(self, **settings):
        super().__init__(**settings, refresh_per_second=200)


progress.Live = Live
"""


def output_of(command: list[str], terminal: bool, **further: str) -> str:
    """What a command prints to standard error, which is a terminal or a pipe; control sequences are left out."""
    environment = {**os.environ, **further, "TERM": "xterm", "COLUMNS": "120"}
    if not terminal:
        return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=200, env=environment).stderr
    ours, theirs = pty.openpty()
    process = subprocess.Popen(command, stderr=theirs, stdin=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    parts: list[bytes] = []
    with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as stream:  # EIO: the other end is closed
        while part := stream.read(1 << 16):
            parts.append(part)
    assert process.wait(200) == 0
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", b"".join(parts).decode().replace("\r", ""))


@pytest.mark.extended
def test_grading_in_a_pool_shows_how_many_answers_are_judged(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\n\n\ndef score(response):\n    time.sleep(0.2)\n    return 1.0\n")
    reward = compose_reward(tmp_path / "slow.py", "reward.workers=1")  # several may answer at one moment
    problems = [Problem(number, "2+2?", "4", 0) for number in range(8)]
    texts = [f"answer {number}" for number in range(8)]
    seen = watched(lambda: reward.checked_grades(problems, texts, [True] * 8, []))
    counts = [int(match[1]) for line in seen if (match := re.fullmatch(r"grading, (\d) of 8 answers", line))]
    assert counts == list(range(8))


def compose_reward(file: Path, *words: str) -> Grader:
    return to_run(compose_config(["world=tiny", "reward=function", f"reward.path={file}:score", *words])).reward


def watched(work: Callable[[], object]) -> list[str]:
    """What was shown of a piece of work, looked at all the time; every line once."""
    seen: dict[str, None] = {}
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.002):
            seen[without_times(current())] = None

    thread = threading.Thread(target=look)
    thread.start()
    try:
        work()
    finally:
        ended.set()
        thread.join()
    return list(seen)


def test_other_shells_see_what_takes_long_and_only_while_it_advances(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hangs leaves the note as it is: so a sweep that looks at the folder notices."""
    monkeypatch.setattr(progress, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(progress, "_NOTED_SECONDS", 0.2)
    note = tmp_path / ACTIVITY
    note.write_text("of an attempt that was killed")
    with RunProgress("plain seed 0", Terminal(file=io.StringIO())) as shown, shown.noting(tmp_path):
        assert activity_of(tmp_path) == ""
        with doing("evaluating", 8, "questions") as stage:
            time.sleep(0.1)
            assert not note.exists(), "it takes no time yet"
            stage.done = 1
            wait_until(note.exists)
            first = note.stat()
            assert re.fullmatch(r"evaluating, 1 of 8 questions, 0m0\ds left", activity_of(tmp_path))
            time.sleep(0.3)
            assert note.stat().st_mtime_ns == first.st_mtime_ns and note.stat().st_ino == first.st_ino
            stage.done = 2
            wait_until(lambda: "2 of 8" in activity_of(tmp_path))
        wait_until(lambda: not note.exists())
        with doing("evaluating"):
            wait_until(note.exists)
            time.sleep(0.05)
    assert not note.exists()


def test_the_time_left_of_a_resumed_run_is_that_of_its_own_steps() -> None:
    """It goes on at 90 %: a tenth of the budget at 1 % in a tenth of a second takes another second, not a minute."""
    written = io.StringIO()
    with RunProgress("plain seed 0", Terminal(file=written, width=80)) as shown:
        shown.show(90, 0.90, {}, {})
        time.sleep(0.2)
        shown.show(92, 0.92, {"eval/heldout/accuracy": 0.5}, {})
        assert shown.ends_at is not None and 0.5 < shown.ends_at - time.monotonic() < 3
        shown.last_evaluation = 300.0  # as the log has it
        shown.show(93, 0.93, {}, {})
        assert 300 < shown.ends_at - time.monotonic() < 303
        shown.show(100, 1.0, {}, {})
        assert shown.ends_at is None
    assert lines_of(written)[-1].split()[-2:] == ["0m00s", "left"]
