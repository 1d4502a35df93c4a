"""Filters by text: rules on forms, languages, overlap and near-duplicates by hand, and their order."""

from __future__ import annotations

import pytest
from compositions import run_of

from grpo_lab.tricks.question_filter import AllQuestions, ByText, Form, _language_teller, jaccard, sign_runs
from grpo_lab.types import Problem

EVERY_FORM = [Form.multiple_choice, Form.proof, Form.yes_no, Form.true_false]


def by_text(**fields: object) -> ByText:
    off = {"forms": [], "languages": [], "certainty": 0.7, "overlap_words": 0, "similarity": 0.0, "run_words": 3}
    return ByText(**{**off, **fields})


def problems(*questions: str, answer: str = "7") -> list[Problem]:
    return [Problem(number, question, answer, 1) for number, question in enumerate(questions)]


@pytest.mark.parametrize(
    ("question", "answer", "reason"),
    [
        ("What is x? (A) 1 (B) 2 (C) 3 (D) 4", "B", "multiple_choice"),
        (r"What is x? $\textbf{(A)}\ 1 \qquad\textbf{(B)}\ 2 \qquad\textbf{(C)}\ 3$", "2", "multiple_choice"),
        ("What is x?\nA) 1\nB) 2\nC) 3", "2", "multiple_choice"),
        ("What is x?\nA. 1\nB. 2\nC. 3", "2", "multiple_choice"),
        ("Which of the following is prime: 4, 5 or 6?", "5", "multiple_choice"),
        ("Let f(A) = 1, f(B) = 2 and f(C) = 3. Find f(A) + f(B).", "3", ""),
        ("A triangle has corners A, B and C. Find the angle at A.", "60", ""),
        ("(a) Find x. (b) Find y. (c) Find z.", "1, 2, 3", ""),
        ("Prove that 2 is prime.", "", "proof"),
        ("Show that the sum is even, and find it.", "4", "proof"),
        ("The proven reserves are 3 tons, improved by 1. How many now?", "4", ""),
        ("Is 7 prime?", "Yes", "yes_no"),
        ("Is 7 prime?", r"\text{No}.", "yes_no"),
        ("How many noes are there?", "no one", ""),
        ("Is it so?", "True", "true_false"),
        ("True or false: 7 is prime.", "1", "true_false"),
        ("How many statements are true?", "2", ""),
    ],
)
def test_forms_by_hand(question: str, answer: str, reason: str) -> None:
    problem = Problem(0, question, answer, 1)
    assert by_text(forms=EVERY_FORM).reasons([problem], []) == [reason]
    others = [form for form in EVERY_FORM if form.value != reason]
    assert by_text(forms=others).reasons([problem], []) == [""]
    assert AllQuestions().reasons([problem], [question]) == [""]


QUESTIONS = {
    "en": ["How many primes are below 100?", "Find the sum of all positive integers n such that n^2 divides 100."],
    "de": ["Wie viele Primzahlen gibt es unter 100?", "Berechne die Summe der ersten hundert natürlichen Zahlen."],
    "fr": ["Combien y a-t-il de nombres premiers inférieurs à 100 ?", "Calculer la somme des cent premiers entiers."],
    "es": ["¿Cuántos números primos hay menores que 100?", "Halla el valor de $x$ si $2x+3=7$."],
    "ru": ["Найдите сумму всех натуральных чисел, меньших 100."],
    "zh": ["求所有正整数n使得n的平方整除100。", "小明有3个苹果,又买了4个,一共有多少个苹果?"],
}


@pytest.mark.parametrize("language", QUESTIONS)
def test_questions_of_a_language_stay_alone(language: str) -> None:
    asked = [(question, name) for name, some in QUESTIONS.items() for question in some]
    found = by_text(languages=[language]).reasons(problems(*(question for question, _ in asked)), [])
    assert found == ["" if name == language else "language" for _, name in asked]
    both = by_text(languages=[language, "en"]).reasons(problems(*(question for question, _ in asked)), [])
    assert both == ["" if name in (language, "en") else "language" for _, name in asked]


def test_formulas_are_in_no_language() -> None:
    for question in ("3+4?", r"Solve $x^2+1=0$.", r"Simplify $\frac{3}{4} \div \frac{7}{8}$.", r"\[\sin x = 0\]"):
        assert _language_teller()(question) is None, question
    assert by_text(languages=["zh"]).reasons(problems(r"Solve $x^2+1=0$."), []) == [""], "too little to tell"


def test_words_in_a_row_with_evaluation() -> None:
    asked = ["Tom has three red apples and two green pears"]
    ours = problems(
        "Now Tom has three red apples, and more", "tom HAS three: red", "Tom has 3 red apples and two green pears"
    )
    # six words of the first (a comma is none: Tom has three red apples and), four of the second, six of the third
    assert by_text(overlap_words=7).reasons(ours, asked) == ["", "", ""]
    assert by_text(overlap_words=6).reasons(ours, asked) == ["overlap", "", "overlap"]
    assert by_text(overlap_words=4).reasons(ours, asked) == ["overlap"] * 3
    assert by_text(overlap_words=5).reasons(ours, []) == ["", "", ""]


def test_similarity_by_hand() -> None:
    """Of 3 words or signs in a row: a b c, b c d, c d e against a b c, b c d, c d f; two of four."""
    one, other = sign_runs("a b c d e", 3), sign_runs("A  b c d f", 3)
    assert one == {"a b c", "b c d", "c d e"} and jaccard(one, other) == 0.5
    assert sign_runs("3+4?", 3) == {"3 + 4", "+ 4 ?"} != sign_runs("3-4?", 3), "signs count"
    assert sign_runs("so", 3) == {"so"} and sign_runs("", 3) == {""}


def test_of_near_duplicates_the_first_stays_and_none_that_evaluation_asks() -> None:
    words = [f"w{number}" for number in range(40)]
    base, changed, far = " ".join(words), " ".join([*words[:39], "x"]), " ".join([*words[:20], *words[:20]])
    # 38 runs of 3 words; the last word stands in one of them: 37 of 39 are shared, 0.949
    assert jaccard(sign_runs(base, 3), sign_runs(changed, 3)) == 37 / 39
    ours = problems(base, changed, far, base.upper())
    assert by_text(similarity=0.94).reasons(ours, []) == ["", "near_duplicate", "", "near_duplicate"]
    assert by_text(similarity=0.96).reasons(ours, []) == ["", "", "", "near_duplicate"], "exact above the threshold"
    assert by_text(similarity=0.94).reasons(ours, [changed]) == ["near_evaluation"] * 2 + ["", "near_evaluation"]
    assert by_text(similarity=1.0).reasons(problems("so", "so", "no"), []) == ["", "near_duplicate", ""]


def test_nothing_near_is_missed_among_many() -> None:
    """All pairs of 300 questions, exactly, against what MinHash finds: two in 150 may be missed."""
    words = [[f"w{(start * 7 + step) % 5000}" for step in range(30)] for start in range(150)]
    near = [[*some[:29], "x"] for some in words]
    ours = problems(*(" ".join(some) for some in words + near))
    found = by_text(similarity=0.9).reasons(ours, [])
    kept, expected = [], []
    for problem in ours:
        runs = sign_runs(problem.question, 3)
        alike = any(jaccard(runs, other) >= 0.9 for other in kept)
        expected.append("near_duplicate" if alike else "")
        kept += [] if alike else [runs]
    assert expected.count("near_duplicate") == 150
    assert 148 <= found.count("near_duplicate") <= 150


def test_the_first_reason_is_the_one_that_is_counted() -> None:
    rule = by_text(forms=[Form.proof], languages=["en"], overlap_words=3, similarity=0.9)
    ours = problems(
        "Prove that one and one is two", "Wie viele Primzahlen gibt es unter hundert?", "one and one is two"
    )
    asked = [problem.question for problem in ours]
    assert rule.reasons(ours, asked) == ["proof", "language", "overlap"]
    assert rule.reasons(ours, asked[:2]) == ["proof", "language", "overlap"]
    assert rule.reasons(ours, asked[1:2]) == ["proof", "language", ""]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"languages": ["english"]}, r"ByText\.languages must be a list of ar, bg, .*, got \['english'\]"),
        ({"certainty": 1.0}, r"ByText\.certainty must be between 0 and 1"),
        ({"similarity": 1.5}, r"ByText\.similarity must be in \[0, 1\]"),
        ({"overlap_words": -1}, r"ByText\.overlap_words must be at least 0"),
        ({"run_words": 0}, r"ByText\.run_words must be at least 1"),
    ],
)
def test_wrong_numbers_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        by_text(**fields)


@pytest.mark.extended
def test_options_are_the_published_ones_and_combine() -> None:
    forms = {name: run_of(f"question_filter={name}").question_filter.forms for name in ("kimi", "open_reasoner_zero")}
    assert set(forms["kimi"]) == {Form.multiple_choice, Form.true_false, Form.proof}
    assert set(forms["open_reasoner_zero"]) == {Form.multiple_choice, Form.proof}
    both = run_of("question_filter=kimi", "question_filter.languages=[en]", "question_filter.similarity=0.8")
    said = "questions: no multiple_choice, true_false, proof, in en, no two alike by 0.8, nor one like evaluation"
    assert both.question_filter.written() == said
    assert run_of("question_filter=kimi", "question_filter.forms=[]").question_filter.written() == "every question"
