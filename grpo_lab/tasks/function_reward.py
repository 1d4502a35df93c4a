"""A reward, or a grader of evaluation, that is a plain Python function of the user's.

    def score(prompt, response, answer, **row) -> float

`prompt` is the question, `row` what else its row of the data set holds (`task.details='*'`). A function may leave out
what it does not need, and ask for `finished`, which is False for a truncated response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from grpo_lab.checks import require, require_positive
from grpo_lab.tasks.base import Grader, Grades
from grpo_lab.tasks.endpoint import warn_once
from grpo_lab.tasks.grader_pool import Answer, GraderPool
from grpo_lab.tracking.checksums import digest_of
from grpo_lab.types import NoiseKey, Problem

SAMPLES = 3  # problems on which a function is tried before a model loads
SPELLINGS = ("{}", "\\boxed{{{}}}", "<answer>{}</answer>", "#{}", "#### {}")  # of a right answer
_SCRIPT = Path(__file__).with_name("function_worker.py")


@cache
def pool_of(functions: tuple[str, ...]) -> GraderPool:
    """The workers that have loaded these functions, each file as it is at the first call."""
    return new_pool(functions)


def new_pool(functions: tuple[str, ...]) -> GraderPool:
    """Workers of their own for these functions."""
    arguments = []
    for function in functions:
        file = _file_of(function)
        arguments += [function, digest_of(file) if file else ""]
    return GraderPool(_SCRIPT, arguments, f"see that {' and '.join(functions)} can be imported")


@dataclass(frozen=True)
class FunctionReward(Grader):
    """The weighted sum of what one or several functions give; a response is correct from `correct_at` of the first on.

    A sum of s earns wrong + (correct - wrong) s: with the usual 0 and 1 the number itself is the reward. A function
    runs in processes of its own, within limits of time and memory. Where it raises, gives no finite number or one
    beyond `lowest` and `highest`, the response is not graded, and the reason is shown with it.
    """

    may_fail: ClassVar[bool] = True

    path: str  # FILE.py:FUNCTION or package.module:FUNCTION, several as A+B
    weights: list[float]  # one for each function; none: 1 each
    correct_at: float
    lowest: float  # what a function may give at least
    highest: float  # and at most
    truncated: bool  # whether truncated responses are scored too; else they earn `lowest`
    seconds: float  # of processor time per response
    workers: int  # processes

    def __post_init__(self) -> None:
        super().__post_init__()
        remedy = "write FILE.py:FUNCTION, such as reward.path=my_rewards.py:score; + joins several"
        require(bool(self.functions), "path", repr(self.path), "a function", remedy)
        for one in self.functions:
            place, _, name = one.rpartition(":")
            require(bool(place) and name.isidentifier(), "path", repr(one), "FILE.py:FUNCTION", remedy)
            there = not place.endswith(".py") or Path(place).expanduser().is_file()
            require(there, "path", repr(one), "in a file that exists", f"it is looked for in {Path.cwd()}")
        require(
            len(set(self.names)) == len(self.names), "path", repr(self.path), "different names", "each has a metric"
        )
        right = len(self.weights) in (0, len(self.functions))
        require(right, "weights", self.weights, f"{len(self.functions)} numbers", "give one for each function")
        finite = all(math.isfinite(weight) and weight != 0 for weight in self.weights)
        require(finite, "weights", self.weights, "numbers other than 0", "leave a function out that is worth nothing")
        require(self.lowest < self.highest, "lowest", self.lowest, f"below highest ({self.highest})", "correct either")
        inside = self.lowest < self.correct_at <= self.highest
        remedy = "no response could be correct, or all would be"
        require(inside, "correct_at", self.correct_at, f"above {self.lowest:g} and at most {self.highest:g}", remedy)
        require_positive(self, "seconds")
        require(self.workers >= 1, "workers", self.workers, "at least 1", "workers call the functions")

    @property
    def functions(self) -> tuple[str, ...]:
        """The functions, files by their full path: workers start elsewhere."""
        return tuple(absolute(one.strip()) for one in self.path.split("+") if one.strip())

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the components of the reward."""
        return tuple(one.rpartition(":")[2] for one in self.functions)

    @property
    def has_parts(self) -> bool:
        return len(self.names) > 1

    @property
    def part_weights(self) -> dict[str, float]:
        return dict(zip(self.names, self.weights))

    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        scores = self._scores(problems, texts, finished)
        correctness = [float(first >= self.correct_at) for first in scores[0]]
        failed = [any(map(math.isnan, row)) for row in zip(*scores)]
        scale, weights = self.correct - self.wrong, self.weights or [1.0] * len(scores)
        components = {
            name: [weight * scale * score for score in own] for name, weight, own in zip(self.names, weights, scores)
        }
        if self.wrong:
            components["wrong"] = [self.wrong] * len(texts)
        return Grades([math.nan if lost else correct for lost, correct in zip(failed, correctness)], components)

    def _scores(self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool]) -> list[list[float]]:
        """Every function's score of every response, [functions][N]; NaN and a warning once per kind where it failed."""
        calls = {
            (function, row): call_of(place, problems[row], texts[row], finished[row])
            for place, function in enumerate(self.functions)
            for row in range(len(texts))
            if finished[row] or self.truncated
        }
        once = list(dict.fromkeys(calls.values()))  # the same response to the same question is scored once
        judged = dict(zip(once, pool_of(self.functions).judge(once, self.seconds, self.workers)))
        found = []
        for function in self.functions:
            own = []
            for row, text in enumerate(texts):
                answer = calls.get((function, row))
                score, why = judged[answer] if answer else (self.lowest, "")
                if not why and not self.lowest <= score <= self.highest:
                    why = f"{score:g} is not between lowest={self.lowest:g} and highest={self.highest:g}"
                if why:
                    kind = why.partition(":")[0]
                    warn_once(function, kind, f"{function} did not grade the response {text[:100]!r}: {why}")
                own.append(math.nan if why else score)
            found.append(own)
        return found

    def bounds(self, right: bool) -> tuple[float, float]:
        weights = self.weights or [1.0] * len(self.functions)
        first = (self.correct_at, self.highest) if right else (self.lowest, self.correct_at)
        ends = [first, *[(self.lowest, self.highest)] * (len(weights) - 1)]
        low, high = (
            sum(side(weight * end for end in own) for weight, own in zip(weights, ends)) for side in (min, max)
        )
        scale = self.correct - self.wrong
        return self.wrong + scale * low, self.wrong + scale * high

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of functions that are given by file."""
        return tuple(file for one in self.functions if (file := _file_of(one)))

    def written(self) -> str:
        weights = self.weights or [1.0] * len(self.functions)
        total = " + ".join(f"{weight:g} {name}" if weight != 1 else name for weight, name in zip(weights, self.names))
        scaled = (
            total
            if (self.wrong, self.correct) == (0, 1)
            else f"{self.wrong:g} + {self.correct - self.wrong:g} ({total})"
        )
        return f"{scaled}; correct if {self.names[0]} >= {self.correct_at:g}"

    def check(self, problems: Sequence[Problem]) -> None:
        """Score the right answers of three problems, in usual spellings, and an empty response.

        Raises ValueError with the function's own error where it fails; warns where no right answer is correct.
        """
        tried = problems[:SAMPLES]
        rows = [(problem, spelling.format(problem.answer)) for problem in tried for spelling in (*SPELLINGS, "")]
        for place, function in enumerate(self.functions):
            calls = [call_of(place, problem, text, True) for problem, text in rows]
            judged = pool_of(self.functions).judge(calls, self.seconds, self.workers)
            for (problem, text), (score, why) in zip(rows, judged):
                if not why and not self.lowest <= score <= self.highest:
                    why = f"it gave {score:g}; set reward.lowest and reward.highest to what it may give"
                if why:
                    raise ValueError(
                        f"{function} failed on the response {text!r} to the question {problem.question[:60]!r} (answer "
                        f"{problem.answer!r}): {why}. A function may take prompt, response (TRL's completion, verl's "
                        "solution_str), answer (ground_truth), finished, and with task.details='*' the columns of the "
                        "data set"
                    )
            if place == 0 and tried and not any(score >= self.correct_at for score, _ in judged):
                answers = ", ".join(repr(one.answer) for one in tried)
                message = f"{function} finds none of the right answers {answers} correct (from {self.correct_at:g})"
                message += ", however they are written: see reward.correct_at and the function"
                warn_once(self.path, "nothing correct", message)


def _file_of(function: str) -> Path | None:
    """The file that a function is given by; None for one of an installed module."""
    place = function.rpartition(":")[0]
    return Path(place) if place.endswith(".py") else None


def absolute(function: str) -> str:
    """The function, with the full path of its file: workers start elsewhere."""
    place, colon, name = function.rpartition(":")
    return f"{Path(place).expanduser().absolute()}{colon}{name}" if place.endswith(".py") else function


def call_of(place: int, problem: Problem, text: str, finished: bool) -> Answer:
    """One call, for a worker: which function, and its arguments besides the response."""
    try:
        row = json.loads(problem.details) if problem.details else {}
    except (ValueError, RecursionError):
        row = None
    row = row if isinstance(row, dict) else {"details": problem.details}
    known = {"prompt": problem.question, "answer": problem.answer, "finished": finished}
    return Answer(json.dumps([place, {**row, **known}]), text, anywhere=False)
