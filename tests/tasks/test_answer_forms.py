"""Templates and graders speak of one form of answer: what is declared is what is read, and what is not read is refused.

All templates x rewards x verifiers of conf/ are held to it, so a new one is too.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache

import pytest
from compositions import option_names, run_of

from grpo_lab.config.rules import IncompatibleRun, broken_rules, check_compatible
from grpo_lab.tasks.base import AnswerForm, Grader
from grpo_lab.tasks.templates import Chat, Plain
from grpo_lab.types import NoiseKey, Problem

GRADERS = [(slot, option) for slot in ("reward", "verifier") for option in option_names(slot)]
# What judges otherwise than by the answer, on purpose.
CONTROLS = {"boxed_only", "format_only", "function", "inverted", "noisy", "random", "rubric", "rubric_evolving"}
# What takes a number for the answer wherever it stands.
ANYWHERE = {"lenient", "gym_last_number"}
RIGHT = ("2", "4", "33")
WRONG = {"2": ("3", "12"), "4": ("5",), "33": ("34", "3")}
EMBEDDED = {"2": r"\sqrt{2}", "4": "x^4"}  # a wrong answer with the right number in it
CLOSES = {AnswerForm.box: "}", AnswerForm.tag: " </answer>", AnswerForm.number: ""}
WRITTEN = {
    AnswerForm.box: r"First \boxed{{7}}, no. So the result is $\boxed{{{}}}$.",
    AnswerForm.tag: "First <answer>7</answer>, no. </think> <answer> {} </answer>",
    AnswerForm.number: "1+6=7;#7;#{}",
    AnswerForm.hashes: "First #### 7, no.\n#### {}",
}


@cache
def template_forms() -> dict[str, AnswerForm]:
    return {name: run_of(f"template={name}").template.answer_form for name in option_names("template")}


@cache
def grader_of(slot: str, option: str) -> Grader:
    needed = {"rubric": "judge.model=none", "function": "path=math:fsum"}.get(option.partition("_")[0])
    return getattr(run_of(f"{slot}={option}", *([f"{slot}.{needed}"] if needed else [])), slot)


def graded(grader: Grader, pairs: list[tuple[str, str]]) -> tuple[list[float], list[bool]]:
    """The outcome of each response to a question whose right answer stands before it, and whether it earns all."""
    entries = [{"question": "?", "answer": gold, "metadata": {}} for gold, _ in pairs]
    details = [json.dumps({"family": "chain_sum", "settings": {}, "entry": entry}) for entry in entries]
    problems = [Problem(place, "?", gold, 1, details=details[place]) for place, (gold, _) in enumerate(pairs)]
    grader.check(problems)
    keys = [NoiseKey(0, "test", 0, place, 0) for place in range(len(pairs))]
    grades = grader.checked_grades(problems, [text for _, text in pairs], [True] * len(pairs), keys)
    _, most = grader.bounds(True)
    return grades.correctness, [sum(parts) == pytest.approx(most) for parts in zip(*grades.components.values())]


@pytest.mark.extended
def test_every_template_asks_for_a_form_that_is_tested_here() -> None:
    """The two controls keep the form of what they distort: only the words around the question are others."""
    forms = template_forms()
    assert forms["mismatched"] is forms["plain"] is AnswerForm.number
    assert forms["chat_mismatched"] is forms["chat"] is forms["boxed"] is AnswerForm.box
    assert forms["r1"] is AnswerForm.tag
    assert set(forms.values()) <= CLOSES.keys() and WRITTEN.keys() == set(AnswerForm) - {AnswerForm.free}


@pytest.mark.few(4)
@pytest.mark.parametrize(("slot", "option"), GRADERS)
def test_a_grader_reads_the_forms_that_it_declares_and_no_others(slot: str, option: str) -> None:
    grader = grader_of(slot, option)
    if option in CONTROLS:
        return
    for form, pattern in WRITTEN.items():
        _, all_earned = graded(grader, [(gold, pattern.format(gold)) for gold in RIGHT])
        assert all_earned == [form in grader.reads] * len(RIGHT), form
        wrong = [(gold, pattern.format(other)) for gold in RIGHT for other in WRONG[gold]]
        if option not in ANYWHERE and form is not AnswerForm.number:
            wrong += [(gold, pattern.format(other)) for gold, other in EMBEDDED.items()]
        assert graded(grader, wrong)[0] == [0] * len(wrong), form


@pytest.mark.few(10)
@pytest.mark.parametrize(("slot", "option"), GRADERS)
def test_what_a_template_forces_is_read_or_the_pair_is_refused(slot: str, option: str) -> None:
    """A response that the template's own interruption ended is an answer in the template's own form."""
    grader, plain = grader_of(slot, option), run_of()
    rule = f"{slot}_reads_the_answers"
    for name, form in template_forms().items():
        template = run_of(f"template={name}").template
        run = replace(plain, **{"template": template, slot: grader})
        reads = form in grader.reads
        assert (rule in {one.name for one in broken_rules(run).errors}) == (not reads), name
        if option not in CONTROLS:
            forced = [(gold, f"I see.{template.interruption}{gold}{CLOSES[form]}") for gold in RIGHT]
            assert graded(grader, forced)[1] == [reads] * len(RIGHT), name


def test_a_refusal_names_both_options_the_reason_and_what_to_choose() -> None:
    with pytest.raises(IncompatibleRun) as refusal:
        check_compatible(run_of("template=r1"), {"template": "r1", "reward": "strict", "verifier": "exact_answer"})
    for pair in ("template=r1, reward=strict", "template=r1, verifier=exact_answer"):
        assert f"{pair}: the template asks for answers in a form that the grader does not read" in str(refusal.value)
    assert "<answer> (template=r1), both read by reward=math and verifier=math" in str(refusal.value)


def test_the_form_follows_from_what_the_template_says() -> None:
    """Of a pattern of one's own too; where neither pattern nor interruption names a form, nothing is refused."""
    none, chat = (run_of(f"template={name}").template for name in ("none", "chat_plain"))
    assert isinstance(none, Plain) and isinstance(chat, Chat)
    assert replace(none, pattern="{question} Answer in <answer></answer>.").answer_form is AnswerForm.tag
    assert replace(none, pattern="{question} End with #### and a number.").answer_form is AnswerForm.hashes
    assert replace(chat, system=r"Answer in <answer>\boxed{}</answer>.").answer_form is AnswerForm.box
    free = replace(chat, interruption="The number is ")
    assert free.answer_form is AnswerForm.free and not broken_rules(replace(run_of(), template=free)).errors
    sums = replace(chat, interruption="#")
    assert sums.answer_form is AnswerForm.number and not broken_rules(replace(run_of(), template=sums)).errors
