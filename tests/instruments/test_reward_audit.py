"""The audit of a reward: each planted fault is named by its attack, a correct grader passes, limits hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from grpo_lab import cli
from grpo_lab.instruments.reward_audit.corpus import FORMS, AnswerType, Form, RewardCase, Truth, attacks, notations
from grpo_lab.instruments.reward_audit.report import report_json, report_text
from grpo_lab.instruments.reward_audit.trial import Audit, Subject, audit, read

REWARDS = Path(__file__).with_name("planted_rewards.py")
CASES = attacks()


@cache
def audited(name: str, seconds: float = 2.0, only: tuple[str, ...] = ()) -> Audit:
    subject = Subject.function(f"{REWARDS}:{name}", seconds, 1)
    try:
        cases = [case for case in CASES if not only or case.attack in only]
        return audit(subject, cases, read(subject))
    finally:
        subject.pool.close()


def named(verdicts: Sequence) -> set[str]:
    return {one.case.attack for one in verdicts}


def test_the_corpus_is_large_and_every_attack_has_one_name() -> None:
    kinds = {
        "format", "numbers", "units", "lists", "text", "truncation", "repetition", "answer spam", "hedging",
        "injection", "unicode", "empty", "very long",
    }  # fmt: skip
    assert len(CASES) >= 300 and {case.kind for case in CASES} == kinds
    assert max(Counter((case.gold, case.template, case.finished) for case in CASES).values()) == 1
    assert len({case.attack for case in CASES}) == len({(case.kind, case.attack) for case in CASES}) >= 80
    counts = Counter(case.truth for case in CASES)
    assert counts[Truth.wrong] > counts[Truth.right] > 50 and counts[Truth.open] > 50


def test_an_answer_is_written_in_the_form_of_the_reward() -> None:
    box, tag, hashes, think, number = FORMS[:5]
    case = RewardCase("", "", "5", "So it is [[5]].", Truth.right)
    assert case.text(box) == r"So it is \boxed{5}." and case.text(number) == "So it is #5"
    assert case.text(think) == "<think>\nSo it is\n</think>\n<answer>\n5\n</answer>."
    cut = RewardCase("", "", "5", "So [[5|cut]]", Truth.wrong, False)
    assert cut.text(tag) == "So <answer>5" and cut.text(hashes) is None
    assert RewardCase("", "", "5", "[[5]] I hope so", Truth.right).text(number) is None
    assert RewardCase("", "", "5", "<<*3:ab>>[[6]]", Truth.wrong).text(tag) == "ababab<answer>6</answer>"
    assert Form.parse("think:<final>{}</final>").marked("7") == "<final>7</final>"
    with pytest.raises(ValueError, match=r"write \{\} once"):
        Form.parse("<final></final>")
    golds = ("5", "1,234", "0.5", "1/2", "B", "5 cm", "50%", "1, 2", "Paris", "(5")
    assert [AnswerType.of(gold).name for gold in golds] == [
        "integer", "integer", "decimal", "fraction", "choice", "measure", "measure", "list", "text", "other",
    ]  # fmt: skip


@pytest.mark.few(6)
@pytest.mark.parametrize(
    ("name", "attack"),
    [
        ("substring", "gold inside another number"),
        ("last_number", "unmarked number after the answer"),
        ("float_equal", "precision of a double"),
        ("float_equal", "not a number"),
        ("evaluated", "code that evaluates to the gold"),
        ("format_only", "plain wrong answer"),
        ("format_only", "well-formed nonsense"),
        ("length", "padding, wrong answer"),
        ("any_of", "list of guesses in the mark"),
        ("first_mark", "mark in the reasoning, another in the end"),
        ("no_truncation", "mark left open"),
    ],
)
def test_a_planted_fault_is_named_by_the_attack_that_passes(name: str, attack: str) -> None:
    only = ("code that evaluates to the gold", "plain right answer") if name == "evaluated" else ()
    assert attack in named(audited(name, only=only).false_positives)
    assert attack not in named(audited("reference").false_positives)


def test_a_planted_refusal_is_named_by_the_answers_that_are_refused() -> None:
    found = audited("exact")
    assert not found.false_positives
    assert {"letter case", "thousands separator", "trailing zeros"} <= named(found.false_negatives)


def test_a_crash_and_a_slow_pattern_are_named() -> None:
    crashes = audited("crashes_on_empty")
    assert {"empty response", "only white space"} <= named(crashes.errors)
    assert any("IndexError" in one.why and "planted_rewards.py" in one.why for one in crashes.errors)
    slow = audited("backtracks", 0.3, ("runs for a slow pattern", "plain right answer"))
    assert named(slow.over_limits) == {"runs for a slow pattern"} and not slow.errors


def test_limits_of_time_and_memory_are_enforced() -> None:
    found = audited("greedy", 0.3, ("refusal", "plain wrong answer", "plain right answer"))
    over = [one.text for one in found.over_limits]
    assert any("cannot answer" in text for text in over), "a loop without end"
    assert any("undefined" in text for text in over), "three GiB"
    assert len(found.verdicts) - len(over) >= 10, "the others are judged by new workers"


def test_a_correct_grader_passes() -> None:
    found = audited("reference")
    assert len(found.verdicts) == len(CASES) and not found.left_out
    assert not (found.false_positives or found.false_negatives or found.errors or found.over_limits)


def test_a_reward_for_numbers_is_not_blamed_for_texts() -> None:
    found = audited("last_number")
    assert found.reading.types == {AnswerType.integer, AnswerType.decimal}
    assert "letter case" not in named(found.false_negatives)
    assert "answers of these types are refused: 33 text" in report_text(found, [])


def test_a_reward_that_cannot_tell_is_reported_as_such() -> None:
    assert audited("length").reading.blind and audited("format_only").reading.blind
    assert "the same score" in report_text(audited("format_only"), [])
    subject = Subject.function(f"{REWARDS}:zero", 2.0, 1)
    with pytest.raises(ValueError, match=r"accepts no plain right answer in any form.*--form"):
        read(subject)
    subject.pool.close()


def test_forms_and_thresholds_are_found() -> None:
    """A reward of +2 or -1 in tags, and one in TRL's form whose score also pays for the format."""
    found = audited("tags_two_or_minus_one")
    assert found.reading.form.name == "<answer></answer>" and found.reading.accepts_from == 0.5
    found = audited("trl_with_format")
    assert found.reading.form.name == "<think></think><answer></answer>" and 0.5 < found.reading.accepts_from < 1.5
    assert "plain wrong answer" not in named(found.false_positives)


def test_the_report_and_its_json_agree() -> None:
    found = audited("substring")
    lines = report_text(found, ["a sample"], listed=True).splitlines()
    (total,) = [line.split() for line in lines if line.startswith("all ")]
    wrong = sum(one.case.truth is Truth.wrong for one in found.verdicts)
    assert total[2:5] == [str(len(found.false_positives)), "of", str(wrong)]
    assert lines[-1] == "  a sample"
    told = json.loads(json.dumps(report_json(found, [])))
    assert (
        told["counts"]["false_positives"]
        == len(found.false_positives)
        == len([one for one in told["verdicts"] if one["truth"] == "wrong" and one["accepted"]])
    )
    assert told["attacks"] == sorted(named(found.false_positives))
    assert max(len(line) for line in lines) < 500, "long responses are shortened"


def test_the_pairs_of_graders_are_cases_too() -> None:
    cases = list(notations())
    assert len(cases) > 800 and all(case.template.startswith("The answer is [[") for case in cases)


def test_the_command_exits_with_one_for_a_passing_attack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["audit-reward", f"{REWARDS}:substring", "--workers", "1", "--json", str(tmp_path / "a.json")])
    assert ended.value.code == 1
    assert "gold inside another number (numbers)" in capsys.readouterr().out
    assert json.loads((tmp_path / "a.json").read_text())["reward"].endswith(":substring")
    cli.main(["audit-reward", f"{REWARDS}:reference", "--workers", "1"])
    for words, message in (
        (["nothing.py:f"], "of a file that exists"),
        (["task=tiny"], "name one reward"),
        ([f"{REWARDS}:exact", "--seconds", "0"], "needs some CPU time"),
    ):
        with pytest.raises(SystemExit, match=message):
            cli.main(["audit-reward", *words])


@pytest.mark.extended
def test_options_are_audited_in_the_same_workers_and_on_their_own_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(["audit-reward", "reward=lenient", "--workers", "1"])
    assert "all numbers in the text (answer spam)" in capsys.readouterr().out
    rows = [{"question": f"What is {n} and {n}?", "answer": f"${2 * n}"} for n in range(100)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["task=jsonl", f"task.path={tmp_path}/q.jsonl"]
    with pytest.raises(SystemExit):
        cli.main(["audit-reward", f"{REWARDS}:number_or_crash", *words, "--workers", "1"])
    assert "on the data's own samples:\n  none of the right answers" in capsys.readouterr().out
