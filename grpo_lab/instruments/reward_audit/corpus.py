"""The adversarial cases of `tasks/grader_attacks.yaml`, written in the form of answer that a reward reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path

import yaml

from grpo_lab.tasks import grader_errors

ATTACKS = Path(grader_errors.__file__).with_name("grader_attacks.yaml")
_MARK = re.compile(r"\[\[(.*?)\]\](?!\])", re.DOTALL)
_REPEATED = re.compile(r"<<\*([0-9]+):(.*?)>>(?!>)", re.DOTALL)
_CUT = "|cut"


class Truth(Enum):
    """Whether a response is right. `open`: tasks or careful readers differ, so neither verdict is an error."""

    right = "right"
    wrong = "wrong"
    open = "open"


class AnswerType(Enum):
    """Type of a gold answer. A reward that refuses plain right answers of a type is not meant for it."""

    integer = r"[-+]?[0-9]+|[0-9]{1,3}(,[0-9]{3})+"
    decimal = r"[-+]?[0-9]*\.[0-9]+"
    fraction = r"[-+]?[0-9]+/[0-9]+"
    choice = r"[A-E]"
    measure = r"[0-9.]+ ?(%|cm|hours|km/h)"
    list = r".*,.*"
    text = r"[A-Za-z ]+"
    other = r".*"

    @classmethod
    def of(cls, gold: str) -> AnswerType:
        """The first type whose pattern is the whole gold answer."""
        return next(one for one in cls if re.fullmatch(one.value, gold, re.DOTALL))


@dataclass(frozen=True)
class Form:
    """How a response marks its answer: between `opening` and `closing`.

    With `ends`, nothing may follow the answer. With `thinks`, the text before the first answer stands in <think>.
    """

    name: str
    opening: str
    closing: str = ""
    ends: bool = False
    thinks: bool = False

    @classmethod
    def parse(cls, template: str) -> Form:
        """A form from text with {} for the answer, after `think:` if reasoning stands in <think>. Raises ValueError."""
        text = template.removeprefix("think:")
        if text.count("{}") != 1:
            raise ValueError(f"--form {template}: write {{}} once, where the answer stands, as in <final>{{}}</final>")
        opening, closing = text.split("{}")
        return cls(template, opening, closing, thinks=text != template)

    def marked(self, answer: str) -> str:
        """The answer with its mark; without the closing where the token limit cut it."""
        cut = answer.endswith(_CUT)
        return f"{self.opening}{answer.removesuffix(_CUT)}{'' if cut else self.closing}"


FORMS = (
    Form(r"\boxed{}", r"\boxed{", "}"),
    Form("<answer></answer>", "<answer>", "</answer>"),
    Form("####", "\n#### ", ends=True),
    Form("<think></think><answer></answer>", "<answer>\n", "\n</answer>", thinks=True),
    Form("#NUMBER", "#", ends=True),
    Form(r"<think></think>\boxed{}", r"\boxed{", "}", thinks=True),
    Form("Answer:", "\nAnswer: ", ends=True),
    Form("The answer is", "The answer is ", ends=True),
    Form("free", "", ends=True),
)


@dataclass(frozen=True)
class RewardCase:
    """A gold answer, a response to its question, and the truth about it; `template` writes answers as [[5]]."""

    kind: str
    attack: str
    gold: str
    template: str
    truth: Truth
    finished: bool = True

    @property
    def type(self) -> AnswerType:
        return AnswerType.of(self.gold)

    def text(self, form: Form) -> str | None:
        """The response in this form; None where the form has no such response."""
        if _CUT in self.template and not form.closing.strip():
            return None  # a mark without a closing cannot be left open
        pieces = _MARK.split(self.template)  # text, answer, text, answer, ..., text
        if form.ends and self.truth is not Truth.wrong and pieces[-1].strip(" .") and len(pieces) > 1:
            return None
        if form.ends:  # the answer ends its line
            pieces[2::2] = [f"\n{text.strip()}" if text.strip(" .") else text for text in pieces[2::2]]
        answers = [form.marked(answer) for answer in pieces[1::2]]
        before, after = pieces[0], [part for pair in zip(answers, pieces[2::2]) for part in pair]
        if form.thinks and after:
            before = f"<think>\n{before.replace('<think>', '').replace('</think>', '').strip()}\n</think>\n"
        if form.ends and after:
            after[-1] = after[-1].removesuffix(".")
        return _repeated(before + "".join(after))


def _repeated(text: str) -> str:
    return _REPEATED.sub(lambda found: found[2] * int(found[1]), text)


@lru_cache(maxsize=1)
def attacks() -> tuple[RewardCase, ...]:
    """The adversarial cases that come with grpo_lab."""
    kinds = yaml.safe_load(ATTACKS.read_text(encoding="utf-8"))
    return tuple(
        RewardCase(kind, attack, gold, text, Truth(truth), "unfinished" not in rest)
        for kind, named in kinds.items()
        for attack, rows in named.items()
        for gold, text, truth, *rest in rows
    )


def notations() -> Iterator[RewardCase]:
    """The pairs of `grpo-lab graders` with a marked answer, as cases: other notations of the gold, and wrong ones."""
    boxed = re.compile(r"The answer is \\boxed\{(.*)\}\.", re.DOTALL)
    for pair in grader_errors.pairs():
        if found := boxed.fullmatch(pair.response):
            truth = Truth.right if pair.right else Truth.wrong
            yield RewardCase("notation", pair.kind, pair.gold, f"The answer is [[{found[1]}]]", truth)
