"""What a run shows: the five numbers a user watches, on a terminal of any width and in a log."""

from __future__ import annotations

import io

from rich.console import Console

from grpo_lab.progress import RunProgress

METRICS = {"reward/mean": 0.5, "rollout/truncated": 0.25, "eval/heldout/accuracy": 0.75}
TIMING = {"time/tokens_per_second": 12345.6}


def test_a_log_gets_a_line_per_evaluation_with_the_share_and_the_time_left() -> None:
    written = io.StringIO()
    with RunProgress("plain seed 0", Console(file=written, width=80)) as progress:
        progress.show(0, 0.0, {"eval/heldout/accuracy": 0.3}, {})
        progress.show(1, 0.1, {"reward/mean": 0.4}, {})  # neither an evaluation nor overdue
        progress.show(2, 0.5, METRICS, TIMING)
    lines = written.getvalue().splitlines()
    assert len(lines) == 3 and lines[0] == "plain seed 0"
    for part in ("step    2", "reward 0.500", "held-out 0.750", "truncated 0.25", "tok/s 12,346", "50%", "left"):
        assert part in lines[2], part


def test_a_narrow_terminal_cuts_the_name_and_keeps_the_numbers() -> None:
    written = io.StringIO()
    console = Console(file=written, width=80, force_terminal=True, legacy_windows=False)
    with RunProgress("a,very=long,name=that,goes=on,and=on,for=ever,and=ever,and=a,day seed 0", console) as progress:
        progress.show(7, 0.5, METRICS, TIMING)
        progress.live.refresh()
        shown = written.getvalue()
    assert "tok/s 12,346" in shown and "50%" in shown and "a,very=long" in shown and "a,day" not in shown
