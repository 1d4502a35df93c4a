"""What a run shows: the five numbers a user watches, on a terminal of any width and in a log."""

from __future__ import annotations

import io
from pathlib import Path

from grpo_lab.run.recorder import verdict
from grpo_lab.tracking.metrics import SUITES
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.terminal import Terminal

METRICS = {"reward/mean": 0.5, "rollout/truncated": 0.25, "eval/heldout/accuracy": 0.75}
TIMING = {"time/tokens_per_second": 12345.6}


def test_a_log_gets_a_line_per_evaluation_with_the_share_and_the_time_left() -> None:
    written = io.StringIO()
    with RunProgress("plain seed 0", Terminal(file=written, width=80)) as progress:
        progress.show(0, 0.0, {"eval/heldout/accuracy": 0.3}, {})
        progress.show(1, 0.1, {"reward/mean": 0.4}, {})  # neither an evaluation nor overdue
        progress.show(2, 0.5, METRICS, TIMING)
    lines = written.getvalue().splitlines()
    assert len(lines) == 3 and lines[0] == "plain seed 0"
    for part in ("step    2", "reward 0.500", "held-out (eval) 0.750", "truncated 0.25", "tok/s 12,346", "50%", "left"):
        assert part in lines[2], part


def test_a_narrow_terminal_cuts_the_name_and_keeps_the_numbers() -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=80, force_terminal=True, legacy_windows=False)
    with RunProgress("a,very=long,name=that,goes=on,and=on,for=ever,and=ever,and=a,day seed 0", console) as progress:
        progress.show(7, 0.5, METRICS, TIMING)
        progress.live.refresh()
        shown = written.getvalue()
    assert "tok/s 12,346" in shown and "50%" in shown and "a,very=long" in shown and "a,day" not in shown


def test_the_end_of_a_run_tells_the_two_held_out_accuracies_apart(tmp_path: Path) -> None:
    first = {f"eval/{suite}/accuracy": 0.25 for suite in SUITES}
    last = {f"eval/{suite}/accuracy": 0.5 + number / 8 for number, suite in enumerate(SUITES)}
    lines = verdict(tmp_path, {"steps": 3, "first": first, "last": last}).splitlines()
    assert "  held-out, training protocol    0.250 -> 0.625  (+0.375)" in lines
    assert "  held-out, evaluation protocol  0.250 -> 0.750  (+0.500)" in lines
    assert len(lines) == 6 and lines[-1] == f"run folder: {tmp_path}"
