"""Rewards for mathematical answers: math-verify's verdict, the format alone, and a plain reading for evaluation."""

from __future__ import annotations

import re
import unicodedata
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from typing import ClassVar

from grpo_lab.tasks.base import Reward
from grpo_lab.tasks.grader_pool import LONGEST_TEXT, Answer, GraderPool, shared_pool
from grpo_lab.tricks.base import require, require_positive
from grpo_lab.types import NoiseKey, Problem

# A box holds what its braces enclose. Without braces it holds what begins as a number, a command or a lone letter does.
_BOX = re.compile(
    r"\\(?:boxed|fbox)(?![a-zA-Z])\s*"
    r"(?:(?P<brace>\{)|(?=[-+]?(?:\.?[0-9]|\\(?!boxed|fbox)[a-zA-Z])|[a-zA-Z]\s?(?:\$|\\[)\]])))"
)
_BARE = re.compile(r"[^$\n]{1,100}?(?=\$|\\[)\]])|[^\s<$]{1,100}")  # to the end of the formula, or else one word
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is no brace


def last_box(text: str) -> str | None:
    """The content of the last `\\boxed{...}`, `\\boxed 5` or `\\fbox{...}`; None without one or if it is open."""
    box = _last_opening(text)
    if box is None:
        return None
    if not box["brace"]:
        bare = _BARE.match(text, box.end())
        return None if bare is None else bare.group()
    depth = 1
    for brace in _BRACE.finditer(text, box.end()):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return text[box.end() : brace.start()]
    return None


def marked_answer(text: str) -> str | None:
    """What stands in the last `\\boxed{...}` or `<answer>...</answer>`, whichever opens later; None if it is open."""
    tag, box = text.rfind("<answer>"), _last_opening(text)
    if box is not None and tag < box.start():
        return last_box(text)
    end = text.find("</answer>", tag)
    return None if tag < 0 or end < 0 else text[tag + len("<answer>") : end]


def _last_opening(text: str) -> re.Match[str] | None:
    """The opening of the last box, up to its content."""
    box = None
    for opening in _BOX.finditer(text):
        box = opening
    return box


class Reading(Enum):
    """Which part of a response math-verify judges.

    strict   the marked answer of a response that ended, in the last `\\boxed{...}` or the last `<answer>...</answer>`
    lenient  what math-verify finds anywhere in the text, in its own order: after `final answer is`, in a box, as LaTeX,
             or the last expression. It reads one place, but takes boxes close to each other, or with a comma, `and` or
             `or` between them, for one set.
    """

    strict = "strict"
    lenient = "lenient"


@dataclass(frozen=True)
class JudgedApart(Reward):
    """A reward whose answers are judged in processes of their own, within limits of time and memory.

    An answer that takes too much of either has failed (NaN). Of a long text the end is read.
    """

    may_fail: ClassVar[bool] = True
    pool: ClassVar[GraderPool] = shared_pool()

    seconds: float = field(kw_only=True)  # of processor time per answer
    workers: int = field(kw_only=True)  # processes

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "seconds")
        require(self.workers >= 1, "workers", self.workers, "at least 1", "workers judge the answers")

    @abstractmethod
    def known_or_asked(self, problem: Problem, text: str, finished: bool) -> float | Answer:
        """The outcome where it needs no worker, else what to ask one; arguments as in `__call__`."""

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return self.outcomes([problem], [text], [finished], [])[0]

    def outcomes(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> list[float]:
        ends = [text[-LONGEST_TEXT:] for text in texts]
        each = [self.known_or_asked(*response) for response in zip(problems, ends, finished)]
        # The same answer to the same question is judged once.
        asked = list(dict.fromkeys(answer for answer in each if isinstance(answer, Answer)))
        judged = dict(zip(asked, self.pool.grade(asked, self.seconds, self.workers)))
        return [judged[answer] if isinstance(answer, Answer) else answer for answer in each]


@dataclass(frozen=True)
class MathVerify(JudgedApart):
    """1 if the answer equals the right one as mathematics, in the verdict of math-verify.

    An answer to a question whose right answer cannot be read has failed too (NaN).

    A sum or product left undone is equal to its value, so `37 \\cdot 43` is right for 1591. A policy can learn to leave
    the work; PlainMath does not fall for it.
    """

    reading: Reading

    def known_or_asked(self, problem: Problem, text: str, finished: bool) -> float | Answer:
        strict = self.reading is Reading.strict
        if strict and not finished:
            return 0.0
        answer = marked_answer(text) if strict else text
        if answer is None or not answer.strip():
            return 0.0
        if answer.strip() == problem.answer.strip():
            return 1.0
        return Answer(problem.answer, answer, anywhere=not strict)


@dataclass(frozen=True)
class BoxedOnly(Reward):
    """1 if the response ended and its last `\\boxed{...}` has balanced braces and is not empty, right or wrong."""

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        return float(finished and bool((last_box(text) or "").strip()))


@dataclass(frozen=True)
class PlainMath(Reward):
    """The verifier for evaluation: 1 if the response ended and its answer equals the right one as text or number.

    It reads the last `\\boxed{...}`, else what follows the last `####`, else what follows the last `answer is` or
    `answer:`, else the last number. It compares texts without LaTeX's dress, exact fractions, and lists element by
    element. It knows no algebra: `x+1` is not `1+x`, and `2^3` not 8. It shares no code with MathVerify, so a bug in
    one of them shows as a gap between training outcome and evaluation.
    """

    def __call__(self, problem: Problem, text: str, finished: bool) -> float:
        answer = _stated(text) if finished else ""
        if not answer.strip():
            return 0.0
        if answer.strip() == problem.answer.strip():
            return 1.0
        return float(len(answer) <= _LONGEST_ANSWER and _same(_dressed_down(problem.answer), _dressed_down(answer)))


# What follows is PlainMath's alone. Every step is linear in the text; an answer that is read further is short.
_LONGEST_ANSWER = 1_000  # characters
_MOST_DIGITS = 200  # of a number; a longer one is text

_Value = Fraction | str | tuple[str, tuple | frozenset]

_OPENS = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_FORMULA_ENDS = re.compile(r"\$|\\[)\]]")
_ANNOUNCED = re.compile(r"answer is|answer:", re.IGNORECASE)
_NUMBER_IN_TEXT = re.compile(r"[-\u2212]?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?")
_SIGNS = "−–×÷·π∞≤≥≠∪∩√"  # noqa: RUF001
_COMMANDS = r"- - \times \div \cdot \pi \infty \le \ge \ne \cup \cap \sqrt"
_LOOKS = {**dict(zip(_SIGNS, _COMMANDS.split())), **dict.fromkeys("°€£", "")}
_SIZES = re.compile(r"\\(?:left|right|[bB]ig{1,2}[lr]?|displaystyle|limits)(?![a-zA-Z])")
_GAPS = re.compile(r"(\\\\)|\\[,;:! ]|~|\\q?quad(?![a-zA-Z])")
_WORDS = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mbox|math(?:rm|bf|it)|operatorname)\s*\{([^{}]*)\}")
_SAME_SIGNS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])|\\?%|\\?\$"), ""),
    (re.compile(r"\\([lg])eq(?:slant)?(?![a-zA-Z])"), r"\\\1e"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\s(?:and|or)\s"), ","),
    (re.compile(r"\\neq(?![a-zA-Z])"), r"\\ne"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"([_^])\s*\{\s*([0-9a-zA-Z])\s*\}"), r"\1\2"),
    (re.compile(r"\\sqrt\s*([0-9a-zA-Z])"), r"\\sqrt{\1}"),
)
_NAMED = re.compile(r"([a-zA-Z](?:_[0-9a-zA-Z])?(?:\([a-z]\))?)\s*(?:=|\\in(?![a-zA-Z]))([^=<>]+)")
_DECIMAL = re.compile(r"[-+]?(?:[0-9]{1,3}(?:[, ][0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|[-+]?\.[0-9]+")
_BRACED = re.compile(r"\A\{([^{}]*)\}\Z")
_SIGN = re.compile(r"\A([-+])\s+")
_OVER = re.compile(r"([-+]?)(?:([0-9]+)\s+)?([0-9.]+)\s*/\s*([0-9.]+)")
_FRAC = re.compile(r"([-+]?)([0-9]*)\s*\\frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_SHORT_UNITS = "m g s h L l N J W V A K C F cm mm km kg mg ml mL ft in mi lb oz mph kmh hr min sec"
_NO_UNITS = "pi e i sqrt sin cos tan log ln exp mod and or to infinity inf x y z times plus minus"


def _stated(text: str) -> str:
    """The answer that a response states; "" if it states none, or opens a last box that it does not close."""
    if (box := _boxed(text)) is not None:
        return box
    if (place := text.rfind("####")) >= 0:
        return text[place + 4 :].strip().split("\n", 1)[0]
    if announced := [found.end() for found in _ANNOUNCED.finditer(text)]:
        line = text[announced[-1] :].lstrip(" \t\r\n:*").split("\n", 1)[0]
        return line.split(". ", 1)[0].strip(" *")
    numbers = _NUMBER_IN_TEXT.findall(text)
    return numbers[-1] if numbers else ""


def _boxed(text: str) -> str | None:
    """What the last box holds, "" if it is open; None without a box. `\\boxed 5` needs no braces."""
    for box in reversed(list(_OPENS.finditer(text))):
        start = box.end()
        if text.startswith("{", start):
            return _inside(text, start)
        begins = text[start : start + 2].lstrip("+-.")
        if begins[:1].isdigit() or (begins[:1] == "\\" and not _OPENS.match(text, start)):
            line = text[start : start + 100].split("\n", 1)[0]
            formula = _FORMULA_ENDS.split(line, maxsplit=1)
            return formula[0] if len(formula) > 1 else line.replace("<", " ").split(maxsplit=1)[0]
        if begins[:1].isalpha() and _FORMULA_ENDS.match(text[start + 1 : start + 4].lstrip()):
            return begins[0]
    return None


def _inside(text: str, opening: int) -> str:
    """What stands between the brace at `opening` and its partner; "" without a partner."""
    open_braces, place = 0, opening
    while place < len(text):
        sign = text[place]
        if sign == "\\":
            place += 1
        elif sign == "{":
            open_braces += 1
        elif sign == "}":
            open_braces -= 1
            if open_braces == 0:
                return text[opening + 1 : place]
        place += 1
    return ""


def _dressed_down(text: str) -> tuple[str, _Value]:
    """The name before an equals sign, "" without one, and the value."""
    signs = []
    for sign in text:
        plain = unicodedata.normalize("NFKC", sign)
        if sign in _LOOKS:
            signs.append(_LOOKS[sign])
        elif "\u2044" in plain:  # ½ becomes 1, a fraction slash and 2
            signs.append(" " + plain.replace("\u2044", "/"))
        elif unicodedata.decomposition(sign).startswith("<super>"):
            signs.append("^" + plain)
        elif unicodedata.category(sign) != "Cf":  # marks of direction and width zero show nothing
            signs.append(plain)
    text = _WORDS.sub(r" \1 ", _SIZES.sub("", _GAPS.sub(lambda gap: gap[1] or " ", "".join(signs))))
    for pattern, sign in _SAME_SIGNS:
        text = pattern.sub(sign, text)
    text = text.strip().rstrip(".,;:").strip()
    named = _NAMED.fullmatch(text)
    return ("".join(named[1].split()), _value(named[2])) if named else ("", _value(text))


def _same(gold: tuple[str, _Value], answer: tuple[str, _Value]) -> bool:
    """Whether two values are equal, and their names where both have one."""
    return gold[1] == answer[1] and (gold[0] == answer[0] or "" in (gold[0], answer[0]))


def _value(text: str) -> _Value:
    """A number as a fraction, a list with its brackets, or else the text without blanks."""
    text = _BRACED.sub(r"\1", text.strip().strip("*").strip())
    opening, inner, closing = _unbracketed(text)
    while opening + closing == "()" and len(_split(inner)) == 1:
        text = inner.strip()
        opening, inner, closing = _unbracketed(text)
    if (number := _number(text)) is not None:
        return number
    parts = _split(inner)
    if opening:
        values = tuple(_element(part) for part in parts)
        return (opening + closing, frozenset(values) if opening == "\\{" else values)
    if len(parts) > 1:
        return ("\\{\\}", frozenset(_element(part) for part in parts))
    quantity = _without_unit(text)
    if quantity is not None:
        return quantity
    bare = "".join(text.split())
    return bare.casefold() if len(bare) > 1 and bare.isalpha() else bare


def _element(text: str) -> _Value:
    number = _number(text.strip())
    return "".join(text.split()) if number is None else number


def _unbracketed(text: str) -> tuple[str, str, str]:
    """The brackets around the whole text and what is in them; no brackets where they do not enclose all of it."""
    for opening in ("\\{", "(", "["):
        for closing in ("\\}",) if opening == "\\{" else (")", "]"):
            inner = text[len(opening) : len(text) - len(closing)]
            if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
                depth = lowest = 0
                for sign in inner:
                    depth += (sign in "([{") - (sign in ")]}")
                    lowest = min(lowest, depth)
                if lowest == 0 == depth:
                    return opening, inner, closing
    return "", text, ""


def _split(text: str) -> list[str]:
    """The parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return parts


def _number(text: str) -> Fraction | None:
    """The exact value of a decimal, a fraction or a mixed number; None for anything else, and for very long ones."""
    text = _SIGN.sub(r"\1", text)
    if len(text) > _MOST_DIGITS:
        return None
    if _DECIMAL.fullmatch(text):
        return _fraction(text)
    if over := _OVER.fullmatch(text):
        sign, whole, above, below = over.groups()
    elif frac := _FRAC.fullmatch(text):
        sign, whole = frac[1], frac[2]
        above, below = frac[3] or frac[4] or "", frac[5] or frac[6] or ""
    else:
        return None
    if not (_DECIMAL.fullmatch(above.strip()) and _DECIMAL.fullmatch(below.strip())):
        return None
    numerator, denominator = (_fraction(part.strip()) for part in (above, below))
    if denominator == 0:
        return None
    value = Fraction(whole or 0) + numerator / denominator
    return -value if sign == "-" else value


def _fraction(decimal: str) -> Fraction:
    return Fraction(decimal.replace(",", "").replace(" ", ""))


def _without_unit(text: str) -> Fraction | None:
    """The number before a unit such as `cm^2`, `km/h` or `square feet`; None if that is not what the text is."""
    end = len(text) - 2 if text.endswith(("^2", "^3")) else len(text)
    start = end
    while start > 0 and (text[start - 1] in " /" or text[start - 1].isalpha()):
        start -= 1
    while start < end and text[start] == "/":
        start += 1
    words = text[start:end].replace("/", " ").split()
    apart = text[start:end].startswith(" ")
    if not words or any(word.lower() in _NO_UNITS.split() for word in words):
        return None
    if not all(word in _SHORT_UNITS.split() or (apart and len(word) > 2) for word in words):
        return None
    return _number(text[:start].strip())
