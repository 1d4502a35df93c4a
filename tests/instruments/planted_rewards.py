"""Rewards with one planted fault each, and a correct one; test_reward_audit.py audits them by name."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal

NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
UNIT = re.compile(r"\\?\$?([-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]*)(?:\.[0-9]*)?)(?: ?(\\?%|[A-Za-z]+))?")
POWERS = ("k", "thousand", "million", "dozen")


def boxes(text: str) -> list[str]:
    """The contents of all closed boxes, braces balanced."""
    found = []
    for opening in re.finditer(r"\\boxed\{", text):
        depth = 1
        for place in range(opening.end(), min(len(text), opening.end() + 60_000)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                found.append(text[opening.end() : place])
                break
        else:
            return [*found, ""]
    return found


def reference(response: str, answer: str, finished: bool) -> float:
    """A correct grader: the last box, compared as number with an optional unit, else as text without spaces."""
    if not finished or response.count("\\boxed{") > 100:
        return 0.0
    last = boxes(response)[-1:]
    return float(bool(last) and same(answer, last[0]))


def same(gold: str, said: str) -> bool:
    gold, said = (clean(text) for text in (gold, said))
    number = UNIT.fullmatch(said)
    right = UNIT.fullmatch(gold)
    if right and right[1] and not right[2]:
        if not number or not number[1].strip("+-.") or number[2] in POWERS:
            return False
        one, other = (Decimal(found[1].replace(",", "").rstrip(".") or "x") for found in (right, number))
        noisy = "." in gold and len(gold) >= 15
        return abs(one - other) < Decimal("1e-12") if noisy else one == other
    return re.sub(r"\s", "", gold) == re.sub(r"\s", "", said) != ""


def clean(text: str) -> str:
    text = "".join(sign for sign in text if unicodedata.category(sign) != "Cf").replace("−", "-")  # noqa: RUF001
    text = text.replace("\xa0", " ").strip().removeprefix("$").removesuffix("$").strip().rstrip(".").casefold()
    return text[1:-1] if re.fullmatch(r"\([a-e]\)", text) else text


def exact(response: str, answer: str) -> float:
    last = boxes(response)[-1:] if response.count("\\boxed{") < 100 else []
    return float(last == [answer])


def substring(response: str, answer: str) -> float:
    return float(answer in response)


def last_number(response: str, answer: str) -> float:
    return float(NUMBER.findall(response)[-1:] == [answer])


def float_equal(response: str, answer: str) -> float:
    try:
        said = float(boxes(response)[-1]) if response.count("\\boxed{") < 100 else 0.5
        return float(not abs(said - float(answer)) > 1e-6)  # NaN is not above
    except (ValueError, IndexError):
        return 0.0


def evaluated(response: str, answer: str) -> float:
    return float(eval(boxes(response)[-1]) == float(answer))


def format_only(response: str) -> float:
    return float("\\boxed{" in response)


def length(response: str) -> float:
    return min(1.0, len(response) / 1000)


def any_of(response: str, answer: str) -> float:
    return float(answer in NUMBER.findall(" ".join(re.findall(r"\\boxed\{(.*?)\}", response[:2000]))))


def first_mark(response: str, answer: str) -> float:
    return float(re.findall(r"\\boxed\{(.*?)\}", response[:2000])[:1] == [answer])


def no_truncation(response: str, answer: str) -> float:
    return float(response.rpartition("\\boxed{")[2].rstrip("}.").strip() == answer)


def backtracks(response: str, answer: str) -> float:
    ends = re.fullmatch(r"(?:[a-z0-9]+[, ]?)+[.]", response.replace("It is \\boxed{", "").replace("}", ""))
    return float(f"\\boxed{{{answer}}}" in response and not ends)


def crashes_on_empty(response: str, answer: str) -> float:
    return float(response.split()[-1] == f"\\boxed{{{answer}}}")


def greedy(response: str, answer: str) -> float:
    while "cannot answer" in response:
        pass
    return float(f"\\boxed{{{answer}}}" in response) + 0 * len(bytearray(3 << 30 if "undefined" in response else 0))


def zero(response: str) -> float:
    return 0.0


def tags_two_or_minus_one(response: str, answer: str) -> float:
    return 2.0 if f"<answer>{answer}</answer>" in response else -1.0


def trl_with_format(completions: list, solution: list[str], **kwargs: object) -> list[float]:
    pattern = r"\A<think>\n.*?\n</think>\n<answer>\n(.*?)\n</answer>\Z"
    found = [re.match(pattern, chat[0]["content"], re.DOTALL) for chat in completions]
    return [0.0 if one is None else 0.5 + (one[1] == right) for one, right in zip(found, solution)]


def number_or_crash(response: str, answer: str) -> float:
    """Reads numbers only: a gold answer such as $4 is never equal."""
    return last_number(response, answer) if "\\boxed{" in response else 0.0
