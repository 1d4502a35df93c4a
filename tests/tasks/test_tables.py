"""Tasks from data sets: what is read, how it is divided, what is said about it, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import helpers
import pytest
from damage import cut_short
from processes import python_path
from short_runs import SMALL, run_in_process

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.run.evaluate import make_suites
from grpo_lab.run.identity import check_data, data_fingerprint, notes_on_data
from grpo_lab.tasks.mixture import MixtureTask
from grpo_lab.tasks.tables import Table, TableTask, _divided, _read, fingerprint, overlaps
from grpo_lab.tracking.mlflow_sender import _inputs

Rows = Sequence[dict[str, Any]]


def sums(number: int, first: int = 0) -> list[dict[str, Any]]:
    return [{"question": f"What is {n} plus {n + 1}?", "answer": n + n + 1} for n in range(first, first + number)]


def jsonl(path: Path, rows: Rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run_of(*overrides: str) -> RunConfig:
    return to_run(compose_config(["world=tiny", "task=jsonl", *overrides]))


def task_of(*overrides: str) -> TableTask:
    task = run_of(*overrides).task
    assert isinstance(task, TableTask)
    return task


def table(path: str, **fields: str) -> Table:
    return Table.of({"path": path, "split": "train", "question": "question", "answer": "answer", **fields}, "table")


# --- pass rates that come with a data set ---------------------------------------------------------------------

RATES = [0.0, 0.1, 0.25, 0.5, 0.75, 1.0, None]


def rated(path: Path, number: int = 70) -> str:
    return jsonl(path, [row | {"solved": RATES[n % len(RATES)]} for n, row in enumerate(sums(number))])


@pytest.mark.extended
def test_a_column_of_pass_rates_bounds_what_is_trained_on_and_is_the_difficulty(tmp_path: Path) -> None:
    """Rows of another table, or of the same one held out, are asked whatever their rate."""
    words = [f"task.path={rated(tmp_path / 'rated.jsonl')}", "task.pass_rate=solved"]
    whole = task_of(*words)
    rates = {row.question: row.pass_rate for row in whole.rows()}
    assert set(rates.values()) == set(RATES)
    levels = {rates[problem.question]: problem.difficulty for problem in whole.problems("train")}
    assert levels == {0.0: 101, 0.1: 91, 0.25: 76, 0.5: 51, 0.75: 26, 1.0: 1, None: 101}
    middle = task_of(*words, "task.lowest_pass_rate=0.1", "task.highest_pass_rate=0.75")
    trained = [problem.question for problem in middle.problems("train")]
    assert {rates[question] for question in trained} == {0.1, 0.25, 0.5, 0.75}
    assert trained == [one.question for one in whole.problems("train") if 0.1 <= (rates[one.question] or 0) <= 0.75]
    for split in ("heldout", "downstream"):
        assert middle.problems(split) == whole.problems(split)
    assert "30 of 70 questions of" in middle.notes()[0] and "have no solved in [0.1, 0.75]" in middle.notes()[0]
    assert middle.fingerprint()["train"] != whole.fingerprint()["train"]
    assert task_of(*words, "task.difficulty=answer").rows()[3].difficulty == 7, "a column of levels comes first"


def test_numbers_with_a_fraction_are_ordered_by_size_as_levels(tmp_path: Path) -> None:
    rows = [row | {"level": level} for row, level in zip(sums(4), (10.5, 2.5, 0.25, 2.5))]
    assert [row.difficulty for row in table(jsonl(tmp_path / "q.jsonl", rows), difficulty="level").rows()] == [
        3,
        2,
        1,
        2,
    ]


@pytest.mark.parametrize(
    "words,message",
    [
        (["task.probe_rows=0"], "probe_rows must be at least 1, got 0: evaluation asks such questions"),
        (["task.lowest_pass_rate=0.2"], "must be 0 and 1 without rates, got 0.2, 1: name the column of the rates"),
        (["task.pass_rate=solved", "task.lowest_pass_rate=2"], r"lowest_pass_rate must be in \[0, 1\], got 2"),
        (
            ["task.pass_rate=solved", "task.lowest_pass_rate=0.5", "task.highest_pass_rate=0.4"],
            r"highest_pass_rate must be between lowest_pass_rate \(0.5\) and 1, got 0.4: mend either",
        ),
        (["task.pass_rate=solved", "task.lowest_pass_rate=0.3", "task.highest_pass_rate=0.4"], r"solved in \[0.3, 0.4"),
        (
            ["task.pass_rate=answer"],
            r"69 of 70 rows of .*: row 1 has the pass rate '3': it must be a share from 0 to 1, or empty",
        ),
        (["task.pass_rate=rate"], "no column 'rate' for the pass_rate"),
    ],
)
def test_pass_rates_that_are_refused(tmp_path: Path, words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        task_of(f"task.path={rated(tmp_path / 'rated.jsonl')}", *words).problems("train")


# --- reading --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet", "folder", "saved", "saved_splits"])
def test_every_kind_of_local_copy_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    made = datasets.Dataset.from_list(sums(30))
    path = tmp_path / f"rows.{kind}"
    if kind == "jsonl":
        jsonl(path, sums(30))
    elif kind == "json":
        path.write_text(json.dumps(sums(30)))
    elif kind == "csv":
        made.to_csv(path, index=False)
    elif kind == "parquet":
        made.to_parquet(path)
    elif kind == "folder":
        path.mkdir()
        made.to_parquet(path / "train.parquet")
    elif kind == "saved":
        made.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(path)
    rows = table(str(path)).rows()
    assert [(row.number, row.question, row.answer, row.difficulty) for row in rows] == [
        (n, f"What is {n} plus {n + 1}?", str(2 * n + 1), 1) for n in range(30)
    ]


def test_parts_of_columns_patterns_and_levels(tmp_path: Path) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"Solve this. Task {n} is here. Thanks"}],
            "reward_model": {"ground_truth": f"so we get {n}\n#### {n}"},
            "level": f"Level {n % 3}",
        }
        for n in range(6)
    ]
    read = table(
        jsonl(tmp_path / "verl.jsonl", rows), question="prompt.0.content", answer="reward_model.ground_truth",
        question_pattern=r"this\. (.*) Thanks", answer_pattern=r"####\s*(.+)", difficulty="level",
    ).rows()  # fmt: skip
    assert [(row.question, row.answer, row.difficulty) for row in read] == [
        (f"Task {n} is here.", str(n), n % 3) for n in range(6)
    ]


def test_a_boxed_answer_is_read_from_the_last_box(tmp_path: Path) -> None:
    rows = [{"question": "q?", "answer": r"\boxed{1}, no, \boxed{ \frac{1}{2} }."}]
    (row,) = table(jsonl(tmp_path / "q.jsonl", rows), answer_pattern="boxed").rows()
    assert row.answer == r"\frac{1}{2}"
    open_box = jsonl(tmp_path / "open.jsonl", [{"question": "q?", "answer": r"\boxed{7"}])
    with pytest.raises(ValueError, match=r"no row of .* can be used: row 0 holds no answer by answer_pattern='boxed'"):
        table(open_box, answer_pattern="boxed").rows()


def test_levels_without_numbers_are_in_the_order_of_their_names(tmp_path: Path) -> None:
    rows = [row | {"level": name} for row, name in zip(sums(4), ("hard", "easy", "hard", "medium"))]
    read = table(jsonl(tmp_path / "q.jsonl", rows), difficulty="level").rows()
    assert [row.difficulty for row in read] == [2, 1, 2, 3]


# --- rows that are not asked ----------------------------------------------------------------------------------


def test_a_question_that_stands_twice_is_asked_once_and_that_is_said(tmp_path: Path) -> None:
    rows = [*sums(5), {"question": " What is 1 plus 2? ", "answer": "3"}, *sums(1, first=7)]
    read = table(jsonl(tmp_path / "q.jsonl", rows))
    assert [row.number for row in read.rows()] == [0, 1, 2, 3, 4, 6]
    (said,) = read.notes_on_reading()
    assert said.endswith("q.jsonl repeat a question and its answer, such as 'What is 1 plus 2?'; each is asked once")
    assert said.startswith("1 rows of ")
    read.require_usable(0.0, "task.unreadable_share")


def test_case_blanks_and_symbols_carry_meaning(tmp_path: Path) -> None:
    """Each of these pairs is two questions, with answers of their own, and neither is lost."""
    pairs = [("Solve X=2x", "Solve x=2x"), ("2 < 3?", "2 > 3?"), ("f(n)=2 n", "f(n)=2n"), ("1 2\n3 4", "1 2 3 4")]
    rows = [{"question": one, "answer": n} for n, one in enumerate(one for pair in pairs for one in pair)]
    read = table(jsonl(tmp_path / "q.jsonl", rows))
    assert [(row.question, row.answer) for row in read.rows()] == [
        (row["question"], str(row["answer"])) for row in rows
    ]
    assert read.notes_on_reading() == []


def test_a_question_with_two_answers_is_left_out_and_counted_apart(tmp_path: Path) -> None:
    rows = [*sums(40), {"question": "What is 3 plus 4?", "answer": 8}, *sums(2)]
    read = table(jsonl(tmp_path / "q.jsonl", rows))
    assert [row.number for row in read.rows()] == [*range(3), *range(4, 40)]
    contrary, repeated = read.notes_on_reading()
    assert contrary.startswith("2 rows of ") and "contradict each other and were left out" in contrary
    assert "'What is 3 plus 4?' has the answers '7' and '8'" in contrary and repeated.startswith("2 rows of ")
    with pytest.raises(
        ValueError, match=r"2 of 43 rows of .* cannot be used, more than task\.unreadable_share=0\.01 all"
    ):
        read.require_usable(0.01, "task.unreadable_share")


def test_a_question_in_two_columns(tmp_path: Path) -> None:
    """As SVAMP and ASDiv have it. Without its body every question has two answers, which is refused with the remedy."""
    rows = [{"Body": f"Ann has {n} pens.", "Question": f"How many are {n % 5} more?", "answer": n} for n in range(30)]
    path = jsonl(tmp_path / "svamp.jsonl", rows)
    whole = table(path, question="Body+Question")
    assert whole.rows()[7].question == "Ann has 7 pens. How many are 2 more?" and len(whole.rows()) == 30
    assert whole.notes_on_reading() == []
    with pytest.raises(
        ValueError, match=r"'How many are 0 more\?' has the answers '0' and '5' .*question=Body\+Question"
    ):
        table(path, question="Question").rows()
    with pytest.raises(ValueError, match="no column 'Text' for the question"):
        table(path, question="Body+Text").rows()
    rows[3]["Body"] = None
    assert table(jsonl(tmp_path / "no_body.jsonl", rows), question="Body+Question").rows()[3].question == (
        "How many are 3 more?"
    )
    named = jsonl(tmp_path / "named.jsonl", [{"a+b": "whole?", "a": "x", "b": "y", "answer": 1}])
    assert table(named, question="a+b").rows()[0].question == "whole?", "a column of that name comes first"


MATH = [
    {"problem": f"What is {i}+1?", "solution": f"We add, and get $\\boxed{{{i + 1}}}$."} for i in range(60)
]  # fmt: skip


def test_rows_without_an_answer_are_left_out_up_to_a_share(tmp_path: Path) -> None:
    """The forms of MATH's training split: a box without braces is read, an empty or missing one is left out."""
    ends = [r"so it is $\boxed 2$.", r"it is \boxed 9$", r"so $\boxed{}$.", "so it is 2."]
    rows = [*MATH, *({"problem": f"And {n}?", "solution": end} for n, end in enumerate(ends))]
    path = jsonl(tmp_path / "math.jsonl", rows)
    words = [f"task.path={path}", "task.question=problem", "task.answer=solution", "task.answer_pattern=boxed"]
    task = task_of(*words)
    assert [row.answer for row in task.rows()[60:]] == ["2", "9"] and len(task.rows()) == 62
    asked = [
        problem.id % 10_000_000 for split in ("train", "heldout", "downstream") for problem in task.problems(split)
    ]
    assert sorted(asked) == list(range(62)), "numbers of rows do not move"
    said = task.notes()[0]
    assert said.startswith(
        f"2 of 64 rows of {path} cannot be read and were left out: row 62 holds no answer by answer_"
    )
    assert sum("cannot be read" in note for note in task.notes()) == 1, "one table is spoken of once"
    strict = task_of(*words, "task.unreadable_share=0.03")
    with pytest.raises(
        ValueError, match=r"2 of 64 rows .* more than task\.unreadable_share=0\.03 allows: row 62 holds no"
    ):
        strict.problems("train")
    with pytest.raises(ValueError, match=r"unreadable_share must be in \[0, 1\], got 2"):
        task_of(*words, "task.unreadable_share=2")


@pytest.mark.extended
def test_what_is_left_out_reaches_the_notes_of_a_mixture_and_of_tables_of_evaluation(tmp_path: Path) -> None:
    rows = [*sums(40), {"question": "no answer?"}]
    path, fine = jsonl(tmp_path / "q.jsonl", rows), jsonl(tmp_path / "fine.jsonl", sums(40, first=100))
    named = f"{{path: {path}, weight: 1}}"
    mixture = to_run(
        compose_config(
            ["world=tiny", "task=mixture", f"+task.sources.a={named}", f"+task.sources.b={{path: {fine}, weight: 1}}"]
        )
    )
    assert [
        note
        for note in notes_on_data(mixture.task, mixture.evaluation)
        if note.startswith(f"1 of 41 rows of {path} cannot be read")
    ]
    with pytest.raises(
        ValueError, match=r"more than task\.unreadable_share=0 allows: row 40 has nothing as its answer"
    ):
        MixtureTask(**{**vars(mixture.task), "unreadable_share": 0.0}).problems("train")
    entry = f"+evaluation.tables.more={{path: {path}, split: train, question: question, answer: answer}}"
    run = run_of(f"task.path={fine}", entry)
    assert [
        note
        for note in notes_on_data(run.task, run.evaluation)
        if note.startswith(f"1 of 41 rows of {path} cannot be read")
    ]
    with pytest.raises(ValueError, match=r"more than evaluation\.unreadable_share=0 allows"):
        make_suites(run_of(f"task.path={fine}", entry, "evaluation.unreadable_share=0"))


# --- chat messages --------------------------------------------------------------------------------------------


def chat(number: int, system: str = "", **more: Any) -> dict[str, Any]:
    said = [{"role": "system", "content": system}] if system else []
    return {"prompt": [*said, {"role": "user", "content": f"What is {number}+1?"}], "answer": number + 1, **more}


def test_a_list_of_messages_is_a_conversation_whose_user_asks(tmp_path: Path) -> None:
    rows = [chat(n, "Be brief." if n % 2 else "") for n in range(40)]
    path = jsonl(tmp_path / "chat.jsonl", rows)
    read = table(path, question="prompt")
    assert [(row.question, row.answer) for row in read.rows()] == [(f"What is {n}+1?", str(n + 1)) for n in range(40)]
    (said,) = read.notes_on_reading()
    assert said.startswith(f"20 of 40 rows of {path} have a system message, such as 'Be brief.', which is not asked")
    by_place = table(path, question="prompt.0.content")
    assert {row.question for row in by_place.rows()} == {f"What is {n}+1?" for n in range(0, 40, 2)}
    message = (
        r"20 of 40 rows .* row 1 has at 'prompt\.0\.content' a message of the role system, .*set question to prompt,"
    )
    with pytest.raises(ValueError, match=message):
        by_place.require_usable(0.05, "task.unreadable_share")


def test_messages_of_other_words_and_answers_in_a_conversation(tmp_path: Path) -> None:
    said = [{"from": "system", "value": "Think."}, {"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]
    path = jsonl(tmp_path / "share.jsonl", [{"conversations": said}])
    (row,) = table(path, question="conversations", answer="conversations.-1.value").rows()
    assert (row.question, row.answer) == ("1+1?", "2")
    with pytest.raises(
        ValueError, match=r"a message of the role human, which is no answer: set answer to the message that"
    ):
        table(path, question="conversations", answer="conversations.1.value").rows()


@pytest.mark.parametrize(
    "roles", [["user", "assistant", "user"], ["assistant", "user"], ["system"], ["user", "user"], ["tool", "user"]]
)
def test_a_question_that_needs_what_was_said_before_is_not_asked_alone(tmp_path: Path, roles: list[str]) -> None:
    said = [{"role": role, "content": f"word {n}"} for n, role in enumerate(roles)]
    path = jsonl(tmp_path / "turns.jsonl", [{"prompt": said, "answer": 1}])
    with pytest.raises(ValueError, match=f"a conversation of {', '.join(roles)}, and a question is one user message"):
        table(path, question="prompt").rows()
    if roles[-1] == "user":
        assert table(path, question="prompt.-1.content").rows()[0].question == f"word {len(roles) - 1}"


# --- dividing -------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_one_file_is_divided_by_questions_and_every_split_is_stable(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "q.jsonl", sums(1000))
    task = task_of(f"task.path={path}")
    parts = {split: task.problems(split) for split in ("train", "heldout", "downstream", "probe")}
    assert {split: len(part) for split, part in parts.items()} == {
        "train": 1000 - 200 - 200, "heldout": 200, "downstream": 200, "probe": 128,
    }  # fmt: skip
    questions = {split: {problem.question for problem in part} for split, part in parts.items()}
    assert questions["probe"] < questions["train"]
    assert len(questions["train"] | questions["heldout"] | questions["downstream"]) == 1000
    ids = [problem.id for split in ("train", "heldout", "downstream") for problem in parts[split]]
    assert len(set(ids)) == 1000 and {problem.id for problem in parts["probe"]} <= set(ids)
    again = task_of(f"task.path={jsonl(tmp_path / 'other.jsonl', list(reversed(sums(1000))))}")
    assert {problem.question for problem in again.problems("heldout")} == questions["heldout"], "order does not matter"


def test_tables_of_their_own_give_all_they_have_and_leave_training(tmp_path: Path) -> None:
    train = jsonl(tmp_path / "train.jsonl", sums(100))
    other = jsonl(tmp_path / "other.jsonl", sums(40, first=90))
    task = task_of(f"task.path={train}", f"task.heldout.path={other}", f"task.downstream.path={other}")
    parts = {
        split: {problem.question for problem in task.problems(split)} for split in ("train", "heldout", "downstream")
    }
    assert len(parts["heldout"]) == 20 and len(parts["downstream"]) == 20, "one table for both is halved"
    assert parts["heldout"].isdisjoint(parts["downstream"])
    assert len(parts["train"]) == 90
    left_out = [note for note in task.notes() if "and were left out" in note]
    assert len(left_out) == 2 and sum(int(note.split()[0]) for note in left_out) == 10


def test_evaluation_asks_as_many_as_there_are(tmp_path: Path) -> None:
    run = run_of(f"task.path={jsonl(tmp_path / 'q.jsonl', sums(60))}", "evaluation=standard")
    assert {suite.name: len(suite.problems) for suite in make_suites(run)} == {
        "probe": 36, "heldout_training": 12, "heldout": 12, "downstream": 12,
    }  # fmt: skip
    assert {suite.name: len(suite.problems) for suite in make_suites(run, ends=False)}["heldout"] == 12
    fewer = [f"12 {split} questions were found for task.{split}_rows=256" for split in ("heldout", "downstream")]
    assert run.task.notes() == fewer
    assert run_of(f"task.path={run.task.path}", "task.heldout_rows=9", "task.downstream_rows=9").task.notes() == []  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.extended
def test_levels_of_heldout_questions_are_mixed_as_they_are_where_training_has_none(tmp_path: Path) -> None:
    levelled = [row | {"level": n % 5 + 1} for n, row in enumerate(sums(500, first=1000))]
    other = jsonl(tmp_path / "levels.jsonl", levelled)
    run = run_of(
        f"task.path={jsonl(tmp_path / 'q.jsonl', sums(300))}", f"task.heldout.path={other}",
        "task.heldout.difficulty=level", "evaluation.heldout_problems=50",
    )  # fmt: skip
    (heldout,) = (suite for suite in make_suites(run, ends=False) if suite.name == "heldout")
    levels = [problem.difficulty for problem in heldout.problems]
    assert {level: levels.count(level) for level in range(1, 6)} == pytest.approx(dict.fromkeys(range(1, 6), 10), abs=4)


@pytest.mark.parametrize("apart", [False, True], ids=["one table", "two tables"])
def test_questions_that_differ_in_case_or_blanks_are_never_in_two_splits(tmp_path: Path, apart: bool) -> None:
    loud = [{"question": row["question"].upper().replace(" ", "  "), "answer": row["answer"]} for row in sums(200)]
    if apart:
        train = jsonl(tmp_path / "q.jsonl", sums(200))
        other = f"task.heldout.path={jsonl(tmp_path / 'loud.jsonl', loud[:50])}"
    else:
        train, other = jsonl(tmp_path / "q.jsonl", [*sums(200), *loud]), "task.heldout_rows=41"
    task = task_of(f"task.path={train}", other, "task.downstream_rows=20")
    parts = {split: [one.question for one in task.problems(split)] for split in ("train", "heldout", "downstream")}
    loose = {split: {" ".join(one.lower().split()) for one in part} for split, part in parts.items()}
    assert not loose["train"] & (loose["heldout"] | loose["downstream"]) and not loose["heldout"] & loose["downstream"]
    said = [note for note in task.notes() if "heldout questions and were left out" in note]
    number, first, second = (50, "What is 0 plus 1?", "WHAT  IS  0  PLUS  1?") if apart else (1, "", "")
    assert len(said) == 1 and said[0].startswith(
        f"{number} training questions of {train} are also heldout questions and were left out; {number} of them are "
        f"the same but for case and blanks, such as {(repr(first) + ' and ' + repr(second)) if apart else ''}"
    )


def test_an_answer_that_is_another_one_where_it_is_held_out_is_counted(tmp_path: Path) -> None:
    train, wrong = jsonl(tmp_path / "q.jsonl", sums(100)), [row | {"answer": 0} for row in sums(3)]
    other = jsonl(tmp_path / "other.jsonl", [*wrong, *sums(3, first=3)])
    said = task_of(f"task.path={train}", f"task.heldout.path={other}", "task.downstream_rows=1").notes()
    assert [note for note in said if "6 training questions of" in note and note.endswith(
        "were left out; 3 of them have another answer there, such as '1' and '0'"
    )]  # fmt: skip


# --- what is said ---------------------------------------------------------------------------------------------


def test_overlap_is_told_and_only_where_there_is_some() -> None:
    long = "a farmer has three fields and sows wheat on two of them in the early spring"
    asked = {"heldout": [f"Once more: {long} of 1999.", "a farmer has three fields"], "downstream": ["nothing alike"]}
    (said,) = overlaps([f"{long.upper()}, so how many are left?"], asked)
    assert said.startswith("1 of 2 heldout questions share 13 words in a row with a training question")
    assert overlaps(["nothing alike at all"], asked) == []


def test_the_fingerprint_is_of_what_is_asked(tmp_path: Path) -> None:
    run = run_of(f"task.path={jsonl(tmp_path / 'q.jsonl', sums(60))}")
    same = run_of(f"task.path={jsonl(tmp_path / 'copy.jsonl', sums(60))}")
    changed = [row | ({"answer": 0} if n == 7 else {}) for n, row in enumerate(sums(60))]
    other = run_of(f"task.path={jsonl(tmp_path / 'changed.jsonl', changed)}")
    prints = [data_fingerprint(one.task, one.evaluation) for one in (run, same, other)]
    assert prints[0] == prints[1] != prints[2] and prints[0] is not None
    assert sum(prints[0][split] != prints[2][split] for split in ("train", "heldout", "downstream")) == 1
    assert data_fingerprint((one := to_run(compose_config(["world=tiny"]))).task, one.evaluation) is None
    check_data({}, prints[0])
    check_data({"data": prints[0]}, prints[1])
    check_data({"run_key": "of an earlier version"}, prints[0])
    with pytest.raises(ValueError, match=r"the questions of .* have changed since this run began"):
        check_data({"data": prints[0]}, prints[2])


def test_tables_of_evaluation_are_suites_of_their_own(tmp_path: Path) -> None:
    words = "one two three four five six seven eight nine ten eleven twelve thirteen"
    train = jsonl(tmp_path / "q.jsonl", [*sums(100), *({"question": f"{words} {n}", "answer": n} for n in range(20))])
    more = jsonl(tmp_path / "more.jsonl", [{"q": f"{words}!", "a": "4"}, {"q": "two and two?", "a": "4"}])
    run = run_of(
        f"task.path={train}", "evaluation.suite_problems=5",
        f"+evaluation.tables.more={{path: {more}, split: train, question: q, answer: a}}",
    )  # fmt: skip
    *_, suite = make_suites(run)
    assert suite.name == "more" and [problem.answer for problem in suite.problems] == ["4", "4"]
    assert suite.params.max_tokens == run.evaluation.downstream_max_tokens
    assert "more" not in {suite.name for suite in make_suites(run, ends=False)}
    every = [problem.id for one in ("train", "heldout", "downstream") for problem in run.task.problems(one)]
    assert not {problem.id for problem in suite.problems} & set(every)
    assert [
        note
        for note in notes_on_data(run.task, run.evaluation)
        if note.startswith("1 of 2 more questions share 13 words")
    ]
    assert data_fingerprint(run.task, run.evaluation)["more"] == fingerprint(suite.problems)  # pyright: ignore[reportOptionalSubscript]


# --- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"question": "prompt"}, "no column 'prompt' for the question: set its question to one of question, answer"),
        ({"answer": "answer.0"}, "no row of .* can be used: row 0 has nothing at 'answer.0'"),
        ({"answer_pattern": "####(.*)"}, "no row of .* can be used: row 0 holds no answer by answer_pattern='####"),
        ({"answer_pattern": "####("}, "answer_pattern is no regular expression"),
        ({"answer_pattern": "####"}, "answer_pattern must be a pattern with a group"),
        ({"difficulty": "level"}, "no column 'level' for the difficulty"),
        ({"path": "/no/such/file.jsonl"}, "there is no file /no/such/file.jsonl"),
        ({"split": ""}, "split must be a text"),
    ],
)
def test_a_mistaken_description_is_refused(tmp_path: Path, change: dict[str, str], message: str) -> None:
    path = jsonl(tmp_path / "q.jsonl", sums(20))
    with pytest.raises(ValueError, match=message):
        table(**{"path": path} | change).rows()


def test_files_that_hold_nothing_usable_are_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty.csv"
    empty.write_text("question,answer\n")
    with pytest.raises(ValueError, match="has no rows in split 'train'"):
        table(str(empty)).rows()
    with pytest.raises(ValueError, match=r"none.jsonl has no rows in split 'train': choose another split or file"):
        table(jsonl(tmp_path / "none.jsonl", [])).rows()
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"torn\.parquet cannot be read"):
        table(str(torn)).rows()
    nested = jsonl(tmp_path / "nested.jsonl", [{"question": {"text": "1+1?"}, "answer": "2"}])
    with pytest.raises(
        ValueError, match=r"a number: correct the row, or set question to a place .* such as question\.text"
    ):
        table(nested).rows()
    blank = jsonl(tmp_path / "blank.jsonl", [{"question": "1+2?", "answer": ""}])
    with pytest.raises(ValueError, match=r"row 0 holds no answer: its answer is empty"):
        table(blank).rows()
    few = jsonl(tmp_path / "few.jsonl", sums(3))
    with pytest.raises(ValueError, match="no rows are left for the split heldout"):
        task_of(f"task.path={few}").problems("train")


def test_the_hub_out_of_reach_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*arguments: object, **named: object) -> None:
        raise ConnectionError("Couldn't reach 'openai/gsm8k' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(ValueError, match=r"no local file or folder.*`hf download --repo-type dataset openai/gsm8k"):
        table("openai/gsm8k", split="test").rows()


def test_a_set_of_the_hub_is_asked_for_by_all_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no hub here: what it is asked for counts."""
    asked = []

    def gives(*place: object, **named: object) -> datasets.Dataset:
        asked.append((*place, named))
        return datasets.Dataset.from_list(sums(2))

    monkeypatch.setattr(datasets, "load_dataset", gives)
    assert len(table("a/set", split="test", subset="main", revision="abc").rows()) == 2
    assert len(table("a/set").rows()) == 2
    assert asked == [
        ("a/set", "main", {"split": "test", "revision": "abc"}), ("a/set", None, {"split": "train", "revision": None}),
    ]  # fmt: skip


def test_fields_of_a_table_are_checked_by_name() -> None:
    with pytest.raises(ValueError, match=r"evaluation\.tables\.x must be made of path"):
        Table.of({"path": "a/b", "columns": "q"}, "evaluation.tables.x")
    with pytest.raises(ValueError, match=r"x must be complete, got nothing for split, question: add what is missing"):
        Table.of({"path": "a/b", "answer": "a"}, "evaluation.tables.x")


READ_AND_PROMPT = """
import sys, time
from helpers import byte_tokenizer
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.rollout.grading import encode_prompts

for path in sys.argv[1:]:
    overrides = ["world=tiny", "task=jsonl", "template=boxed", f"task.path={path}", "task.answer_pattern='#### (.*)'"]
    config = compose_config(overrides)
    tokenizer, started = byte_tokenizer(), time.process_time()
    run = to_run(config)
    problems, notes = run.task.problems("train"), run.task.notes()
    prompts = encode_prompts(tokenizer, run.template, problems)
    print(len(problems), len(notes), min(map(len, prompts)), time.process_time() - started)
"""


@pytest.mark.extended
def test_a_set_twice_as_large_as_gsm8k_is_read_divided_and_prompted_in_linear_time(tmp_path: Path) -> None:
    """Eight times the rows take 8 to 16 times the processor time, where a comparison of all pairs would take 64 times.

    In a process of its own: the types that tests check at every call would be most of the time.
    """
    words = "Sam buys some apples at the market and gives a few of them to his two friends before lunch"
    sizes = (1875, 1875, 15000)  # the first one imports
    for count in sizes:
        rows = [{"question": f"{words} {n} times {n % 97}?", "answer": f"#### {n}"} for n in range(count)]
        jsonl(tmp_path / f"{count}.jsonl", rows)
    paths = [str(tmp_path / f"{count}.jsonl") for count in sizes]
    environment = os.environ | {"PYTHONPATH": python_path(Path(helpers.__file__).parent)}
    said = subprocess.run(
        [sys.executable, "-c", READ_AND_PROMPT, *paths], capture_output=True, text=True, env=environment, check=True
    ).stdout
    rows_read = [line.split() for line in said.splitlines()]
    assert [int(train) for train, *_ in rows_read] == [count - 512 for count in sizes]
    assert all(int(notes) > 0 and int(shortest) > len(words) for _, notes, shortest, _ in rows_read)
    _, few, many = (float(seconds) for *_, seconds in rows_read)
    print(f"1,875 rows in {few:.2f} s of processor time, 15,000 in {many:.2f} s")
    assert many < 32 * few


def test_a_run_records_its_questions_and_refuses_to_go_on_with_others(tmp_path: Path) -> None:
    rows = [{"question": f"{n % 9 + 1}+{n // 9}?", "answer": n % 9 + 1 + n // 9} for n in range(60)]
    path = jsonl(tmp_path / "q.jsonl", rows)
    settings = (
        *SMALL, "task=jsonl", f"task.path={path}", "template=plain", "reward=strict", "verifier=exact_answer",
        "task.response_tokens=12", "task.downstream_response_tokens=12", "budget.amount=2", "checkpoint_every=1",
    )  # fmt: skip
    with cut_short(1):
        run_in_process(tmp_path / "runs", *settings)
    folder = next((tmp_path / "runs").glob("*/seed=0"))
    described = json.loads((folder / "run.json").read_text())
    assert described["data"] == data_fingerprint((one := run_of(f"task.path={path}")).task, one.evaluation)
    inputs = {one.tags[0].value: one.dataset for one in _inputs(described)}
    assert {split: one.digest for split, one in inputs.items()} == described["data"]
    assert inputs["train"].name == f"{path}:train" and json.loads(inputs["train"].source)["task.path"] == path
    jsonl(tmp_path / "q.jsonl", [*rows[:-1], {"question": "8+8?", "answer": 16}])
    _read.cache_clear()
    _divided.cache_clear()
    with pytest.raises(ValueError, match=r"the questions of .* have changed since this run began"):
        run_in_process(tmp_path / "runs", *settings)
