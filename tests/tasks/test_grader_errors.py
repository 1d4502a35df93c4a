"""The pairs of right answers and responses that come with grpo_lab, and what graders say of them."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from processes import python_path
from sampling import asked

from grpo_lab import cli
from grpo_lab.tasks.base import Grader
from grpo_lab.tasks.grader_errors import Pair, correctness_of, errors_text, pairs
from grpo_lab.tasks.math_answers import BoxedOnly, MathVerify, PlainMath, Reading

PAIRS = pairs()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("grader", "known"),
    [
        (
            MathVerify(1.0, 0.0, Reading.strict, seconds=60.0, workers=2),
            {(r"\begin{pmatrix}1\\2\end{pmatrix}", "(1,2)")},
        ),
        (PlainMath(1.0, 0.0), set()),
    ],
    ids=["reward=math", "verifier=math"],
)
def test_no_wrong_answer_passes_and_hardly_a_right_one_fails(grader: Grader, known: set[tuple[str, str]]) -> None:
    said = correctness_of(grader, PAIRS)
    wrong = [(pair, verdict) for pair, verdict in zip(PAIRS, said) if verdict != pair.right]
    assert not [pair for pair, verdict in wrong if verdict == 1]
    assert len(wrong) <= 0.02 * len(PAIRS)
    refused = {(pair.gold, pair.response) for pair, verdict in wrong if verdict == 0}
    assert refused == {(gold, rf"The answer is \boxed{{{answer}}}.") for gold, answer in known}


def test_the_pairs_are_many_and_different() -> None:
    assert len(PAIRS) >= 300 and len({(pair.gold, pair.response) for pair in PAIRS}) == len(PAIRS)
    assert all(pair.gold.strip() and pair.response.strip() for pair in PAIRS)
    assert 0.3 < sum(pair.right for pair in PAIRS) / len(PAIRS) < 0.7
    kinds = {pair.kind for pair in PAIRS}
    assert {"grade school", "competitions", "multiple choice", "dates and times", "units of measure", "texts"} <= kinds
    dressed = [pair for pair in PAIRS if pair.kind == "LaTeX dress" and pair.right]
    assert len(dressed) >= 80


def test_the_table_counts_both_errors_and_missing_verdicts_by_kind() -> None:
    judged = [
        Pair("sums", "3", r"\boxed{3}", True),
        Pair("sums", "3", r"\boxed{4}", False),
        Pair("dates", "May 5", r"\boxed{May 6}", False),
        Pair("dates", "May 5", r"\boxed{5 May}", True),
    ]
    lines = errors_text(judged, {"a": [1.0, 1.0, 0.0, 0.0], "b": [1.0, 0.0, math.nan, 1.0]}, listed=True).splitlines()
    assert lines[0] == "4 pairs, 2 right and 2 wrong."
    table = {line.split("  ")[0]: line.split()[1:] for line in lines[3:7]}
    assert table["kind"] == ["pairs", "a", "b"]
    assert table["sums"] == ["2", "1", "/", "0", "0", "/", "0"]
    assert table["dates"] == ["2", "0", "/", "1", "0", "/", "0", "+", "1"]
    assert table["all"] == ["4", "1", "/", "1", "0", "/", "0", "+", "1"]
    assert lines[7:] == [
        "",
        "a:",
        r"  takes '\\boxed{4}' for '3'",
        r"  refuses '\\boxed{5 May}' for 'May 5'",
        "",
        "b:",
        r"  no verdict on '\\boxed{May 6}' for 'May 5'",
    ]


OWN = """
from dataclasses import dataclass
from grpo_lab.tasks.base import Reward


@dataclass(frozen=True)
class Mentions(Reward):
    \"\"\"1 if the right answer stands anywhere in the response.\"\"\"

    def __call__(self, problem, text, finished):
        return float(problem.answer in text)
"""
OPTION = """# Mentions the answer.
defaults:
  - /schema/reward/mentions@_here_
  - _self_
correct: 1.0
wrong: 0.0
"""


def command(*words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["grpo-lab", "graders", *words])
    cli.main()


@pytest.mark.extended
def test_the_command_takes_any_grader(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    command("verifier=math", monkeypatch=monkeypatch)
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["kind", "pairs", "verifier=math"]
    assert lines[-1].split()[:3] == ["all", str(len(PAIRS)), "0"]
    command("reward=boxed_only", "--pairs", monkeypatch=monkeypatch)
    told = capsys.readouterr().out
    boxes = [pair for pair in PAIRS if BoxedOnly(1.0, 0.0)(asked(pair.gold), pair.response, True)]
    taken, right = sum(not pair.right for pair in boxes), sum(pair.right for pair in PAIRS)
    assert f"{taken} / {right - sum(pair.right for pair in boxes)}" in told
    assert told.count("  takes ") == taken
    with pytest.raises(SystemExit, match="no grader is named: write reward=NAME"):
        command("world=sums", monkeypatch=monkeypatch)


def test_without_a_name_the_shipped_graders_are_those() -> None:
    from grpo_lab.config.hydra_setup import compose_with_choices
    from grpo_lab.config.run_config import to_run

    for name in (*cli.SHIPPED_GRADERS, cli.GYM_GRADER):
        config, choices = compose_with_choices([name])
        slot, option = name.split("=")
        assert choices[slot] == option and isinstance(getattr(to_run(config), slot), Grader)


@pytest.mark.extended
def test_a_reward_of_ones_own_is_counted_too(tmp_path: Path) -> None:
    (tmp_path / "own_reward.py").write_text(OWN)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "mentions.yaml").write_text(OPTION)
    told = subprocess.run(
        [sys.executable, "-m", "grpo_lab.cli", "graders", "plugins=[own_reward]", "reward=mentions"],
        env={**os.environ, "PYTHONPATH": python_path(tmp_path), "GRPO_LAB_CONFIG_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    taken = [pair for pair in PAIRS if pair.gold in pair.response]
    positives, right = sum(not pair.right for pair in taken), sum(pair.right for pair in PAIRS)
    assert told[3].split() == ["kind", "pairs", "reward=mentions"]
    negatives = right - sum(pair.right for pair in taken)
    assert told[-1].split() == ["all", str(len(PAIRS)), str(positives), "/", str(negatives)]
