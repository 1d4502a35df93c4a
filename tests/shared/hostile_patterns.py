"""Every regular expression of grpo_lab that may see model output, on hostile text of 100,000 characters.

Run as a script: it prints the name of each pattern before it is tried, so that the last line names one that hangs.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _constants as codes
from re import _parser as parser
from typing import NamedTuple

from grpo_lab.tasks.math_answers import BoxedOnly, PlainMath, marked_answer
from grpo_lab.tasks.rubrics import filled, read_proposal, read_score
from grpo_lab.tasks.verifiers import ExactAnswer, FormatOnly, Lenient, Strict
from grpo_lab.types import Problem

PACKAGE = Path(__file__).parents[2] / "grpo_lab"
LENGTH = 100_000
MOST = 40  # texts of a pattern
METHODS = ("match", "fullmatch", "search", "sub", "subn", "findall", "finditer", "split")
# Packages whose text is configuration, a log or a name of ours. What is in no list may see what a model wrote.
OURS = ("config", "sweeps", "harness", "tracking", "policy", "engines", "run", "reproduce", "_hydra")
OUR_FILES = {
    "tricks/question_filter.py": "questions of data sets",
    "tasks/tables.py": "rows of data sets",
    "tasks/smollm2.py": "names of weights",
    "analysis/effects/suites.py": "names of metrics",
    "analysis/figures/style.py": "names of arms",
    "analysis/report/reader.py": "names of files",
    "analysis/sources/mlflow_stores.py": "addresses",
    "analysis/sources/sweep_data.py": "names of arms",
}


class Found(NamedTuple):
    """A pattern, where it is, and by which methods it is used."""

    where: str
    pattern: re.Pattern[str]
    methods: tuple[str, ...]


def trees() -> Iterator[tuple[Path, ast.Module]]:
    """The modules that may see model output and use regular expressions."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE)
        if place.parts[0] not in OURS and place.as_posix() not in OUR_FILES and "import re\n" in path.read_text():
            yield place, ast.parse(path.read_text())


def patterns() -> Iterator[Found]:
    """The patterns of all modules but those above: compiled ones as the module holds them, inline ones by its code."""
    for place, tree in trees():
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        methods = [
            (node.func.value.id, node.func.attr, node)
            for node in calls
            if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)
        ]
        module = importlib.import_module(".".join(("grpo_lab", *place.with_suffix("").parts)).removesuffix(".__init__"))
        for name, value in vars(module).items():
            used = tuple(dict.fromkeys(method for owner, method, _ in methods if owner == name and method in METHODS))
            for number, one in enumerate(held(value)):
                # One in a list or tuple is used by the name of a loop: as such lists are, to replace.
                yield Found(f"{place} {name} {number}", one, used or ("search", "sub"))
        for owner, method, node in methods:
            constant = node.args[0] if node.args and isinstance(node.args[0], ast.Constant) else None
            if owner == "re" and method in METHODS and constant is not None:
                yield Found(f"{place}:{node.lineno}", re.compile(constant.value, re.DOTALL), (method,))


def held(value: object) -> Iterator[re.Pattern[str]]:
    """The patterns that a module's variable holds, in lists, tuples and dictionaries too."""
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset)):
        for one in value:
            yield from held(one)
    elif isinstance(value, dict):
        yield from held([*value, *value.values()])


class Part(NamedTuple):
    """A text that a part of a pattern matches, and whether the pattern may repeat it."""

    text: str
    repeated: bool


def samples(parsed: object, repeated: bool = False) -> list[list[Part]]:
    """Texts that the parts of a pattern match, one list for each way through its branches."""
    ways: list[list[Part]] = [[]]
    for code, value in parsed:
        part: list[list[Part]] = [[]]
        if code is codes.LITERAL:
            part = [[Part(chr(value), repeated)]]
        elif code is codes.NOT_LITERAL:
            part = [[Part("a" if value != ord("a") else "b", repeated)]]
        elif code is codes.ANY:
            part = [[Part("x", repeated)]]
        elif code is codes.IN:
            part = [[Part(one_of(value), repeated)]]
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT, codes.POSSESSIVE_REPEAT):
            part = samples(value[2], repeated or value[1] > 1)
        elif code is codes.SUBPATTERN:
            part = samples(value[3], repeated)
        elif code is codes.ATOMIC_GROUP:
            part = samples(value, repeated)
        elif code is codes.BRANCH:
            part = [way for branch in value[1] for way in samples(branch, repeated)]
        ways = [way + more for way in ways for more in part][:12]
    return ways


def one_of(members: list) -> str:
    """A sign of a class."""
    kinds = {codes.CATEGORY_SPACE: " ", codes.CATEGORY_DIGIT: "1", codes.CATEGORY_WORD: "a"}
    code, value = members[0]
    if code is codes.NEGATE:
        barred = {one for code, one in members if code is codes.LITERAL}
        return next(sign for sign in "a1 .;" if ord(sign) not in barred)
    if code is codes.RANGE:
        return chr(value[0])
    return kinds.get(value, "a") if code is codes.CATEGORY else chr(value)


def hostile(pattern: re.Pattern[str]) -> list[str]:
    """What a pattern nearly matches, with a wrong end.

    Each part that may repeat, without end behind what comes before it; and each beginning of a match again and again.
    """
    found: dict[tuple[str, str], None] = dict.fromkeys((("", "a"), ("", " "), ("", "1")))
    for way in samples(parser.parse(pattern.pattern, pattern.flags & ~re.UNICODE)):
        before = ""
        for text, repeated in way:
            if repeated:
                found |= dict.fromkeys([(before, text), ("", text), ("", before + text), (before, text + " ")])
            before += text
        found[("", before or "a")] = found[(before, before or "a")] = None
    return [begin + unit * (LENGTH // len(unit)) + "\x00" for begin, unit in list(found)[:MOST]]


# What is made while a text is read is tried by the function that makes it, below.
MADE_INSIDE = {"tasks/rubrics.py filled"}


def made_inside() -> set[str]:
    """The functions, of those modules, that make a pattern when they are called: `patterns` cannot see it."""
    found = set()
    for place, tree in trees():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.Call) and ast.unparse(node.func) == "re.compile":
                        found.add(f"{place.as_posix()} {function.name}")
    return found


def readers() -> dict[str, Callable[[str], object]]:
    """The functions that read model output without a process of limits around them."""
    verifiers = {
        name: type_(1.0, 0.0) for name, type_ in [("strict", Strict), ("lenient", Lenient), ("exact", ExactAnswer),
                                                  ("plain", PlainMath), ("boxed", BoxedOnly), ("format", FormatOnly)]
    }  # fmt: skip
    problem = Problem(0, "", "12", 1)
    frames = "<response>{response}</response><rubric>{rubric}</rubric>"
    return {
        **{name: lambda text, one=one: one(problem, text, True) for name, one in verifiers.items()},
        "marked_answer": marked_answer,
        "read_score": read_score,
        "read_proposal": lambda text: read_proposal(text, 3),
        "filled": lambda text: filled(frames, response=text, rubric=text),
    }


UNITS = ("\\boxed{", "\\boxed ", "#", "1", "0.", ",", "{", "[", "<", "< ", "</response>", "<answer>", "answer is ", "$",
         "```", "```json ", "</think>", "-", "\\frac", "^{", " ", "\n", "\u221a(", "1,000", "{\"score\": ")  # fmt: skip


if __name__ == "__main__":
    assert made_inside() == MADE_INSIDE, made_inside()
    for place, pattern, methods in patterns():
        print(place, pattern.pattern, flush=True)
        for text in hostile(pattern):
            for method in methods:
                if method in ("sub", "subn"):
                    getattr(pattern, method)("", text)
                elif method == "finditer":
                    deque(pattern.finditer(text), maxlen=0)
                else:
                    getattr(pattern, method)(text)
    for name, read in readers().items():
        print(name, flush=True)
        for unit in UNITS:
            for text in (unit * (LENGTH // len(unit)), "```json\n" + unit * (LENGTH // len(unit)) + "x"):
                read(text)
    print("all tried")
