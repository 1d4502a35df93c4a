"""A grader on three problems of the data: it should accept the right answer, and neither another one nor nothing."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_lab.tasks.base import Grader
from grpo_lab.tasks.endpoint import warn_once
from grpo_lab.tasks.function_reward import SAMPLES, SPELLINGS
from grpo_lab.types import NoiseKey, Problem


def sample_problems(problems: Sequence[Problem]) -> list[Problem]:
    """Up to three problems from beginning, middle and end, with different answers where there are some."""
    chosen: dict[str, Problem] = {}
    step = max(1, len(problems) // SAMPLES)
    for problem in (*problems[::step], *problems[:100]):
        chosen.setdefault(problem.answer.strip().casefold(), problem)
        if len(chosen) == SAMPLES:
            break
    return list(chosen.values())


def problems_with(grader: Grader, problems: Sequence[Problem]) -> dict[str, str]:
    """Kind of problem -> message, from up to three problems of the data; {} if the verdicts are as they should be.

    The right answer is written in several usual forms, and one accepted form is enough. The answer of another problem
    and an empty response should not be accepted.
    """
    own = sample_problems(problems)
    others = [*own[1:], *own[:1]]
    rows = [
        (problem, answer, spelling.format(answer), answer is problem.answer)
        for problem, other in zip(own, others)
        for answer in dict.fromkeys((problem.answer, other.answer))
        for spelling in SPELLINGS
    ]
    rows += [(problem, "", "", False) for problem in own]
    keys = [NoiseKey(0, "graders", 0, place, 0) for place in range(len(rows))]
    graded = grader.checked_grades([row[0] for row in rows], [row[2] for row in rows], [True] * len(rows), keys)
    accepted = [row for row, correct in zip(rows, graded.correctness) if correct == 1]
    found = {}
    refused = [one for one in own if not any(row[0] is one and row[3] for row in accepted)]
    if own and len(refused) == len(own):
        answers = ", ".join(repr(one.answer[:60]) for one in own)
        found["nothing correct"] = f"none of the right answers {answers} is correct, however it is written"
    for problem, answer, text, right in accepted:
        if not right and answer:
            found["another answer"] = (
                f"the response {text[:60]!r} is correct for {problem.question[:60]!r}, whose answer is "
                f"{problem.answer[:60]!r}"
            )
        if not text:
            found["empty response"] = f"an empty response is correct for {problem.question[:60]!r}"
    return found


def warn_of_samples(grader: Grader, problems: Sequence[Problem]) -> None:
    """Log a grader's faults on samples of the data, once; `grader.compared` are tried."""
    for one in grader.compared:
        name = getattr(one, "path", type(one).__name__)
        for kind, message in problems_with(one, problems).items():
            warn_once(name, kind, f"the grader {name} on the data's own samples: {message}")
