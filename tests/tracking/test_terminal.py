"""One way to a terminal: no text of a model, an error or a user is taken for markup or a command to the terminal."""

from __future__ import annotations

import ast
import io
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from grpo_lab import cli
from grpo_lab.sweeps.progress_display import ProgressDisplay, WatchedRun
from grpo_lab.tracking.progress import RunProgress
from grpo_lab.tracking.run_log import RunLog
from grpo_lab.tracking.sweep_record import RunEntry, record_sweep
from grpo_lab.tracking.terminal import Terminal, printable, say

PACKAGE = Path(__file__).resolve().parents[2] / "grpo_lab"
# Workers that speak a protocol over their output; nobody reads them.
PROTOCOLS = {"tasks/grader_worker.py", "harness/worker.py"}
CONSTANT = {"tracking/interrupt.py"}  # writes one word of its own, before anything else is imported
DOOR = "tracking/terminal.py"
HOSTILE = "\x1b[2J\x1b]0;title\x07\x9b31m\r\b\x7f\u202e[b]bold[/b] [/b] :smile: \udc80 postgresql://me:secret@host/db"
SHOWN = "\u241b[2J\u241b]0;title\u2407\ufffd31m\u240d\u2408\u2421\ufffd[b]bold[/b] [/b] :smile: \ufffd postgresql://me:***@host/db"


def controls(text: str) -> set[str]:
    """The control characters in a text, but for the ends of lines."""
    return {sign for sign in text if not sign.isprintable() and sign != "\n"}


def test_signs_stand_in_for_control_characters_and_letters_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    every = "".join(map(chr, range(0x300)))
    shown = printable(every)
    assert controls(shown) <= {"\t", "\xa0", "\xad"} and "\n" in shown and len(shown) == len(every)
    assert printable("Größe 語 \N{SNOWMAN} a\tb") == "Größe 語 \N{SNOWMAN} a\tb"


@pytest.mark.parametrize("error", [False, True])
def test_lines_are_printed_as_they_are(capsys: pytest.CaptureFixture[str], error: bool) -> None:
    say("a", HOSTILE, 3, sep="|", error=error)
    assert capsys.readouterr()[error] == f"a|{SHOWN}|3\n"


def test_a_console_prints_as_it_is_whatever_it_is_given() -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=300)
    console.say(HOSTILE, "warning")
    console.print(HOSTILE, soft_wrap=True)
    table = Table.grid()
    table.add_row(HOSTILE)
    for renderable in (table, Panel(HOSTILE, title=Text(HOSTILE))):
        console.print(renderable)
    assert not controls(written.getvalue())
    assert written.getvalue().count("[b]bold[/b] [/b] :smile: \ufffd postgresql://me:***@") >= 4, "a title is cut"
    assert written.getvalue().count("[b]bold[/b] [/b] :smile:") == 5 and "secret" not in written.getvalue()
    styled = io.StringIO()
    Terminal(file=styled, force_terminal=True, legacy_windows=False, color_system="standard").say("line", "warning")
    assert styled.getvalue() == "\x1b[33mwarning \x1b[0mline\n", "what the lab itself colours stays coloured"


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_names_as_they_are(terminal: bool, tmp_path: Path) -> None:
    written = io.StringIO()
    console = Terminal(file=written, width=200, force_terminal=terminal, legacy_windows=False)
    name = "plain,model.families=[sums] a[/b]c"
    with RunProgress(name, console) as progress:
        progress.show(1, 0.5, {"eval/heldout/accuracy": 0.5}, {})
        progress.live.refresh()
    with ProgressDisplay(name, 1, 0, console) as board:
        board.start(WatchedRun(f"{name} seed=0", tmp_path, "steps", 1.0))
        board.refresh()
        board.end(board.running[0], HOSTILE)
    assert "[sums] a[/b]c" in written.getvalue() and f"{name} seed=0" in written.getvalue()
    assert "\u241b[2J" in written.getvalue() and "\x1b[2J" not in written.getvalue()


def test_commands_show_what_a_run_wrote_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "plain,a=[sums]" / "seed=0"
    with RunLog(folder) as log:
        row = {
            "problem_id": 0, "response": 0, "question": HOSTILE[:-40], "answer": "\x1b[31m",
            "outcome": 1.0, "reward": 1.0,
            "advantage": 0.5, "length": 2, "truncated": False, "in_loss": True, "in_statistics": True,
            "tokens": ["\x1b[2J", "\x9b"], "token_advantage": np.array([0.5, 0.5]), "token_in_loss": [True, False],
            "token_clipped": [False, True], "token_sampled": [True, False],
        }  # fmt: skip
        log.write_table("rollouts", 1, pd.DataFrame([row]))
        log.mark_error(ValueError(HOSTILE))
    (folder / "run.json").write_text("{}")
    record_sweep(
        tmp_path, "probe", [RunEntry("[b]x[/b]", "", 0, "plain,a=[sums]/seed=0")], None, None, "", [], None, None
    )
    here = ["--runs", str(tmp_path)]
    commands = (["rollouts", str(folder)], ["rollouts", "probe", *here], ["status", "probe", *here], ["status", *here])
    for command in (*commands, ["rollouts", str(folder), "--against", str(folder)], ["stop", HOSTILE, *here]):
        monkeypatch.setattr(sys, "argv", ["grpo-lab", *command])
        try:
            cli.main()
            said = "".join(capsys.readouterr())
        except SystemExit as end:
            said = str(end.code)
        assert said and not controls(said), command
        if command[:2] == ["status", "probe"]:
            assert "[b]x[/b] seed=0" in said and "ValueError: \u241b[2J" in said and "secret" not in said
        if command[0] == "rollouts":
            assert "\u241b[2J" in said and "plain,a=[sums]/seed=0" in said


OTHER_WAYS = {"print", "Console", "Text.from_markup", "Text.from_ansi", "sys.stdout.write", "sys.stderr.write"}


def test_nothing_is_printed_but_through_the_door() -> None:
    """Whatever prints in some other way would print what a model wrote as it is."""
    found, exits = [], 0
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if name in PROTOCOLS | CONSTANT | {DOOR}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                called, named = ast.unparse(node.func), {one.arg: one.value for one in node.keywords}
                ends = called in ("sys.exit", "SystemExit", "SweepFailed")
                exits += ends
                wrong = called in OTHER_WAYS or (ends and any(map(_unsafe, node.args)))
                wrong |= ast.unparse(named.get("markup", ast.Constant(False))) != "False"
                wrong |= called == "TextColumn" and "markup" not in named  # else it reads markup
                wrong |= called == "Panel" and not isinstance(named.get("title", node), ast.Call)  # a text is read too
                found += [f"{name} line {node.lineno}: {ast.unparse(node)[:60]}"] if wrong else []
    assert not found, "use say, printable and Terminal of tracking/terminal.py"
    assert exits > 5


def _unsafe(argument: ast.AST) -> bool:
    """Whether an argument of `sys.exit` may be a text that is not printable as it is."""
    if isinstance(argument, ast.IfExp):
        return _unsafe(argument.body) or _unsafe(argument.orelse)
    return not isinstance(argument, (ast.Constant, ast.Name)) and not ast.unparse(argument).startswith("printable(")
