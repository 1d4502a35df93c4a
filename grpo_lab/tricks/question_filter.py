"""Question filter: which training problems stay, by what their question and answer say.

It is applied once, when a run opens, to the training split only. What is evaluated stays as it is.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

from grpo_lab.checks import require_field, require_not_negative
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Problem

if TYPE_CHECKING:
    from datasketch import MinHash

# The languages that are distinguished: a list of its own, since a short question is as near to Scots as to English.
LANGUAGES = (
    "ar", "bg", "bn", "cs", "da", "de", "el", "en", "es", "fa", "fi", "fr", "he", "hi", "hu", "id", "it", "ja", "ko",
    "nl", "no", "pl", "pt", "ro", "ru", "sv", "th", "tr", "uk", "vi", "zh",
)  # fmt: skip
_FORMULAS = re.compile(r"\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[A-Za-z]+|[\d_]+", re.DOTALL)
_FEWEST_LETTERS = 12  # of a text whose language can be detected; one sign of Chinese or Japanese counts as three
_PERMUTATIONS = 128  # of a MinHash
_SEARCHED_BELOW = 0.1  # candidates are of a similarity so much lower, as MinHash misses pairs near its own threshold
_LOWEST_SEARCHED = 0.1
_MISSES_WEIGH = (0.1, 0.9)  # a false candidate costs a comparison, a miss leaves a duplicate in


class Form(Enum):
    """Kinds of question that a grader of final answers cannot judge, or that a guess often answers.

    multiple_choice  it lists (A), (B) and (C), as A) or A. too, or asks "which of the following"
    proof            it says prove, disprove, show that, demonstrate that or verify that
    yes_no           its answer is yes or no
    true_false       its answer is true or false, or it asks "true or false"
    """

    multiple_choice = "multiple_choice"
    proof = "proof"
    yes_no = "yes_no"
    true_false = "true_false"


def _label(letter: str) -> str:
    return rf"(?:^|[\s{{$])(?:\({letter}\)|{letter}\)|{letter}\.(?=\s))"


_CHOICES = re.compile(rf"{_label('A')}.*?{_label('B')}.*?{_label('C')}|(?i:\bwhich of the following\b)", re.DOTALL)
_PROOF = re.compile(r"\b(?:dis)?prove\b|\b(?:show|demonstrate|verify)\s+that\b", re.IGNORECASE)
_TRUE_OR_FALSE = re.compile(r"\btrue\s+or\s+false\b", re.IGNORECASE)


def _bare(answer: str) -> str:
    r"""An answer in small letters, without \text{} around it and a full stop behind it."""
    return re.sub(r"\\(?:text|mathrm|textbf)\{([^{}]*)\}", r"\1", answer).strip(" .$").casefold()


_RULES: dict[Form, Callable[[Problem], bool]] = {
    Form.multiple_choice: lambda one: _CHOICES.search(one.question) is not None,
    Form.proof: lambda one: _PROOF.search(one.question) is not None,
    Form.yes_no: lambda one: _bare(one.answer) in ("yes", "no"),
    Form.true_false: lambda one: (
        _bare(one.answer) in ("true", "false") or _TRUE_OR_FALSE.search(one.question) is not None
    ),
}


@dataclass(frozen=True)
class QuestionFilter(Trick, ABC):
    """Chooses training problems by their texts."""

    @abstractmethod
    def reasons(self, problems: Sequence[Problem], evaluated: Sequence[str]) -> list[str]:
        """Why each problem leaves training; "" for one that stays. `evaluated` are the questions of evaluation.

        Raises ValueError with a remedy if a package that it needs is missing.
        """


@dataclass(frozen=True)
class AllQuestions(QuestionFilter):
    """Train on every problem of the training split."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "every question"

    def reasons(self, problems: Sequence[Problem], evaluated: Sequence[str]) -> list[str]:
        return [""] * len(problems)


@dataclass(frozen=True)
class ByText(QuestionFilter):
    """Leave out questions of some forms, of other languages, and near-duplicates (Big-Math, arXiv:2502.17387).

    A question leaves for the first of these reasons that holds, in this order:

        forms            it has one of these forms; `Form` says by which rules
        language         it is in none of `languages` (ISO 639-1) by py3langid, with more than `certainty`
        overlap          it shares `overlap_words` words in a row with a question of evaluation (GPT-3, 2005.14165)
        near_evaluation  its Jaccard similarity with a question of evaluation is at least `similarity`
        near_duplicate   the same with an earlier training question that stays

    Languages are detected without formulas; a text of too few letters stays. Similarity is that of the sets of all
    `run_words` words or signs in a row. MinHash (datasketch) finds candidates, which are compared exactly: a few
    pairs may be missed, and none leaves below it. Differs from AllQuestions: fewer questions, each asked more often.
    """

    forms: list[Form]  # that leave; none with []
    languages: list[str]  # that stay; all with []
    certainty: float
    overlap_words: int  # 0 does not look
    similarity: float  # 0 does not look
    run_words: int

    formula: ClassVar[str] = (
        "without forms {forms}; in {languages}; no {overlap_words} words in a row with evaluation; none alike by "
        "{similarity}"
    )

    def __post_init__(self) -> None:
        require_field(set(self.languages) <= set(LANGUAGES), self, "languages", f"a list of {', '.join(LANGUAGES)}")
        require_field(0 < self.certainty < 1, self, "certainty", "between 0 and 1")
        require_not_negative(self, "overlap_words")
        require_field(0 <= self.similarity <= 1, self, "similarity", "in [0, 1]")
        require_field(self.run_words >= 1, self, "run_words", "at least 1")

    def written(self) -> str:
        parts = [f"no {', '.join(form.value for form in self.forms)}"] if self.forms else []
        parts += [f"in {' or '.join(self.languages)}"] if self.languages else []
        parts += [f"no {self.overlap_words} words in a row with evaluation"] if self.overlap_words else []
        parts += [f"no two alike by {self.similarity:g}, nor one like evaluation"] if self.similarity else []
        return f"questions: {', '.join(parts)}" if parts else AllQuestions.formula

    def reasons(self, problems: Sequence[Problem], evaluated: Sequence[str]) -> list[str]:
        found = [next((form.value for form in self.forms if _RULES[form](one)), "") for one in problems]
        _mark_other_languages(self, problems, found)
        _mark_overlap(self, problems, evaluated, found)
        _mark_alike(self, problems, evaluated, found)
        return found


def _mark_other_languages(rule: ByText, problems: Sequence[Problem], found: list[str]) -> None:
    """Write into `found` what is in another language."""
    if not rule.languages:
        return
    language_of = _language_teller()
    for place, problem in enumerate(problems):
        language = None if found[place] else language_of(problem.question)
        if language is not None and language[0] not in rule.languages and language[1] > rule.certainty:
            found[place] = "language"


def _mark_overlap(rule: ByText, problems: Sequence[Problem], evaluated: Sequence[str], found: list[str]) -> None:
    """Write into `found` what shares many words in a row with a question of evaluation."""
    if not rule.overlap_words:
        return
    evaluated_runs = {run for question in evaluated for run in word_runs(question, rule.overlap_words)}
    for place, problem in enumerate(problems):
        if not found[place] and not evaluated_runs.isdisjoint(word_runs(problem.question, rule.overlap_words)):
            found[place] = "overlap"


def _mark_alike(rule: ByText, problems: Sequence[Problem], evaluated: Sequence[str], found: list[str]) -> None:
    """Write into `found` what is like a question of evaluation, or like an earlier one that stays."""
    if not rule.similarity:
        return
    try:
        from datasketch import MinHashLSH
    except ImportError as error:
        raise ValueError("question_filter.similarity needs datasketch: pip install datasketch") from error
    threshold = max(rule.similarity - _SEARCHED_BELOW, _LOWEST_SEARCHED)
    near = MinHashLSH(threshold=threshold, num_perm=_PERMUTATIONS, weights=_MISSES_WEIGH)
    known = [sign_runs(question, rule.run_words) for question in evaluated]
    for place, runs in enumerate(known):
        near.insert(place, _min_hash(runs), check_duplication=False)
    for place, problem in enumerate(problems):
        if found[place]:
            continue
        runs = sign_runs(problem.question, rule.run_words)
        hashed = _min_hash(runs)
        candidates: list[Any] = near.query(hashed)  # of the numbers that were inserted
        alike = [number for number in candidates if jaccard(runs, known[number]) >= rule.similarity]
        if alike:
            found[place] = "near_evaluation" if min(alike) < len(evaluated) else "near_duplicate"
            continue
        near.insert(len(known), hashed, check_duplication=False)
        known.append(runs)


def sign_runs(question: str, length: int) -> frozenset[str]:
    """All `length` words or signs in a row of a question; the whole of a shorter one."""
    words = re.findall(r"\w+|[^\w\s]", question.casefold())
    last = max(1, len(words) - length + 1)
    return frozenset(" ".join(words[start : start + length]) for start in range(last))


def word_runs(question: str, length: int) -> Iterator[int]:
    """A number for every `length` words in a row of a question, the same for the same words within a process."""
    words = re.findall(r"\w+", question.casefold())
    for start in range(len(words) - length + 1):
        yield hash(tuple(words[start : start + length]))


def jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    """The share of both sets' members that both have."""
    return len(one & other) / len(one | other)


def _min_hash(runs: frozenset[str]) -> MinHash:
    from datasketch import MinHash

    hashed = MinHash(num_perm=_PERMUTATIONS)
    hashed.update_batch([run.encode("utf-8", "surrogatepass") for run in runs])
    return hashed


@cache
def _language_teller() -> Callable[[str], tuple[str, float] | None]:
    """A function that gives a text's likeliest language and its probability; None for a text that says too little."""
    try:
        from py3langid import langid
    except ImportError as error:
        raise ValueError("question_filter.languages needs py3langid: pip install py3langid") from error
    identifier: Any = langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)
    identifier.set_languages(list(LANGUAGES))

    def tell(question: str) -> tuple[str, float] | None:
        text = " ".join(_FORMULAS.sub(" ", question).split())
        letters = sum(3 if ord(sign) >= 0x2E80 else 1 for sign in text if sign.isalpha())
        return identifier.classify(text) if letters >= _FEWEST_LETTERS else None

    return tell
