"""Questions of reasoning-gym: how splits are drawn, what is refused, and how answers are judged."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import pytest
from sampling import asked

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.tasks.base import SPLITS
from grpo_lab.tasks.gym import AnswerPosition, GymScore, ReasoningGym, create, score
from grpo_lab.types import Problem

marked = GymScore(1.0, 0.0, AnswerPosition.marked, threshold=1.0, seconds=30.0, workers=2)


def task_of(family: str, *overrides: str) -> ReasoningGym:
    task = to_run(compose_config(["world=tiny", "task=gym", f"task.family={family}", *overrides])).task
    assert isinstance(task, ReasoningGym)
    return task


SMALL = ("task.train_size=60", "task.probe_size=10", "task.heldout_size=20", "task.downstream_size=20")


@pytest.mark.extended
def test_splits_share_no_question_and_downstream_has_its_own_settings() -> None:
    task = task_of("chain_sum", *SMALL, "+task.settings={min_terms: 2, max_terms: 3}",
                   "+task.downstream={min_terms: 5, max_terms: 5}")  # fmt: skip
    parts = {split: task.problems(split) for split in ("train", "heldout", "downstream")}
    assert [len(part) for part in parts.values()] == [60, 20, 20]
    assert task.problems("probe") == parts["train"][:10]
    every = [problem for part in parts.values() for problem in part]
    assert len({problem.question for problem in every}) == len({problem.id for problem in every}) == 100
    terms = {split: {len(p.question.replace("-", "+").split("+")) for p in part} for split, part in parts.items()}
    assert terms == {"train": {2, 3}, "heldout": {2, 3}, "downstream": {5}}
    told = {split: {json.loads(p.details)["settings"]["max_terms"] for p in part} for split, part in parts.items()}
    assert told == {"train": {3}, "heldout": {3}, "downstream": {5}}, "by which an answer is judged"


@pytest.mark.parametrize("downstream", ["{}", "{min_digits: 1, max_terms: 2}"])
def test_questions_of_the_same_settings_are_of_one_kind_where_a_family_repeats_itself(downstream: str) -> None:
    """Sums of one or two digits: of one digit there are few, which whoever chose first would have had for itself."""
    task = task_of("chain_sum", "task.train_size=1200", "task.probe_size=10", "task.heldout_size=400",
                   "task.downstream_size=400", f"+task.downstream={downstream}",
                   "+task.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 2}")  # fmt: skip
    parts = {split: task.problems(split) for split in ("train", "heldout", "downstream")}
    assert [len(part) for part in parts.values()] == [1200, 400, 400]
    every = [problem for part in parts.values() for problem in part]
    assert len({problem.question for problem in every}) == len({problem.id for problem in every}) == 2000
    short = {split: [bool(re.search(r": \d [-+] \d =", one.question)) for one in part] for split, part in parts.items()}
    shares = {split: sum(found) / len(found) for split, found in short.items()}
    assert 0.02 < shares["heldout"] < 0.5, shares
    assert all(abs(shares["train"] - shares[split]) < 0.06 for split in ("heldout", "downstream")), shares
    (said,) = task.notes()
    assert said.startswith("downstream questions have the settings of training questions, so they are not harder")


@pytest.mark.extended
def test_the_questions_of_recorded_runs_stay_the_same() -> None:
    """Of smollm2_sums, whose downstream questions are harder: recorded runs asked these."""
    task = to_run(compose_config(["world=smollm2_sums"])).task
    assert task.notes() == []
    assert task.fingerprint() == {
        "train": "5ed9f139fc58cf60", "probe": "5d26840244dfde85", "heldout": "0579f4dc1efcff3e",
        "downstream": "c33eaa863a7396b1",
    }  # fmt: skip


def test_the_seed_decides_the_questions() -> None:
    task = task_of("chain_sum", *SMALL)
    other = replace(task, seed=1)
    mine, others = ({one.question for name in SPLITS for one in which.problems(name)} for which in (task, other))
    assert len(mine & others) < 0.1 * len(mine), "neighbouring seeds draw other questions"
    every = {name: [one.id for one in task.problems(name)] for name in ("train", "heldout", "downstream")}
    assert len(set().union(*every.values())) == sum(map(len, every.values())), "an id names one problem"
    harder = task_of("chain_sum", *SMALL, "+task.downstream={min_terms: 5, max_terms: 5}")
    places = {name: {one.id // 10_000_000 for one in harder.problems(name)} for name in every}
    assert places == {"train": {0}, "heldout": {1}, "downstream": {2}}, "whatever the size of another split"
    assert replace(task, seed=1).fingerprint() != task.fingerprint() == task_of("chain_sum", *SMALL).fingerprint()


def test_a_family_with_few_questions_gives_what_it_has_and_says_so() -> None:
    task = task_of("chain_sum", *SMALL, "+task.settings={min_terms: 2, max_terms: 2, min_digits: 1, max_digits: 1}")
    task = replace(task, train_size=4000)
    assert 20 < len(task.problems("train")) < 4000
    said, alike = task.notes()
    assert said.startswith("chain_sum with these settings has no more than") and "of 4000 train questions" in said
    assert alike.startswith("downstream questions have the settings of training questions")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"family": "chain_sums"}, "no family 'chain_sums': set task.family to one of its .* chain_sum"),
        ({"settings": {"terms": 2}}, "does not take these settings .*it has min_terms, max_terms"),
        ({"settings": {"min_terms": 0}}, "does not take these settings .*min_terms must be positive"),
        ({"probe_size": 100}, r"probe_size must be at most train_size \(60\), got 100"),
        ({"heldout_size": 0}, "heldout_size must be between 1 and 1666666, got 0"),
        ({"family": "rearc"}, "rearc cannot judge its own answer again"),
    ],
)
def test_mistaken_families_and_settings_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(task_of("chain_sum", *SMALL), **change).problems("train")


@pytest.mark.parametrize(
    ("place", "text", "answer"),
    [
        (AnswerPosition.marked, r"so \boxed{12}", "12"),
        (AnswerPosition.marked, "<answer> 12\n</answer>.", "12"),
        (AnswerPosition.marked, "12", ""),
        (AnswerPosition.last_line, "working\n\n 12 \n", "12"),
        (AnswerPosition.last_line, "\n", ""),
        (AnswerPosition.last_number, "3 and 4 make 1,234.50 apples.", "1234.50"),
        (AnswerPosition.last_number, "minus five is -5.", "-5"),
        (AnswerPosition.last_number, "none", ""),
    ],
)
def test_where_an_answer_stands(place: AnswerPosition, text: str, answer: str) -> None:
    assert replace(marked, place=place).answer(text).strip() == answer


@pytest.mark.extended
def test_the_family_judges_and_the_same_answer_in_other_words_may_be_right() -> None:
    problem = task_of("countdown", *SMALL).problems("train")[0]
    entry = json.loads(problem.details)["entry"]
    other = f"({problem.answer})"
    texts = [rf"\boxed{{{text}}}" for text in (problem.answer, other, str(entry["metadata"]["target"]), "9**9**9**9")]
    first = marked.correctness([problem] * 4, texts, [True] * 4, [])
    assert first[:3] == [1.0, 1.0, 0.0]
    assert marked.correctness([problem] * 2, texts[:2], [False] * 2, []) == [0.0, 0.0], "a response has to end"
    assert marked(problem, "no answer at all", True) == 0.0


@pytest.mark.extended
def test_an_answer_that_takes_too_long_has_failed_and_no_other() -> None:
    problem = task_of("countdown", *SMALL).problems("train")[0]
    quick = replace(marked, seconds=2.0)
    texts = [r"\boxed{9**9**9**9**9}", rf"\boxed{{({problem.answer})}}", r"\boxed{1+1}"]
    failed, right, wrong = quick.correctness([problem] * 3, texts, [True] * 3, [])
    assert (math.isnan(failed) or failed == 0.0) and (right, wrong) == (1.0, 0.0)


@pytest.mark.few(2)
@pytest.mark.parametrize("family", ["gsm_symbolic", "chain_sum", "countdown", "spell_backward", "propositional_logic"])
def test_what_is_kept_of_a_problem_is_enough_to_judge(family: str) -> None:
    problems = task_of(
        family, "task.train_size=8", "task.probe_size=4", "task.heldout_size=4", "task.downstream_size=4"
    )
    for problem in problems.problems("train"):
        if problem.answer:
            assert score(problem.details, problem.answer) == 1.0
            assert score(problem.details, "no such thing") < 1.0
    assert create(family, {}, 0, 1)[0]["question"]


@pytest.mark.parametrize(
    "details",
    ["", "no JSON", "[]", '["x"]', '{"family": "chain_sum"}', '{"family": "chain_sum", "settings": {}, "entry": "7"}'],
)
def test_problems_of_a_table_are_refused_before_a_run_begins(details: str) -> None:
    own = task_of("chain_sum", *SMALL).problems("train")[:2]
    marked.check(own)
    with pytest.raises(ValueError, match=r"'7\+5\?' is none of reasoning-gym: .*Set reward=math and verifier=math"):
        marked.check([*own, replace(asked("12", "7+5?"), details=details)])


def test_a_problem_of_another_task_is_a_failure_and_no_wrong_answer() -> None:
    stranger: Problem = asked("12", "7+5?")
    assert marked.correctness([stranger], [r"\boxed{12}"], [True], []) == [1.0]
    assert math.isnan(marked.correctness([stranger], [r"\boxed{13}"], [True], [])[0])
