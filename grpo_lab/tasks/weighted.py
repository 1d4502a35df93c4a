"""Several rewards in one: the weighted sum of what named graders give."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.checks import require
from grpo_lab.tasks.base import AnswerForm, Grader, Grades
from grpo_lab.types import NoiseKey, Problem


@dataclass(frozen=True)
class Weighted(Grader):
    """The sum of the rewards of several graders, each times its weight.

    Correctness, which accuracy counts, is that of the part `outcome_of`, and `correct` and `wrong` are that
    part's, before its weight. Each part is a component of the reward.
    A response that one part failed on has failed as a whole: without that part its reward is not known.
    """

    may_fail: ClassVar[bool] = True  # some part may

    parts: dict[str, Any]  # name -> Grader; OmegaConf keeps frozen classes in no typed dict
    weights: dict[str, float]
    outcome_of: str

    def __post_init__(self) -> None:
        super().__post_init__()
        parts, weights = self.parts, self.weights
        require(
            bool(parts), "parts", "{}", "one part or more", "conf/reward/math_and_format.yaml shows how to write them"
        )
        for name, part in parts.items():
            named = re.fullmatch("[a-z0-9_]+", name) is not None
            require(named, "parts", repr(name), "named by small letters, digits and _", "a metric will have the name")
            remedy = f"write `- /reward@parts.{name}: <option>` among the defaults"
            require(isinstance(part, Grader), f"parts.{name}", repr(part), "a reward", remedy)
        remedy = "name the same parts in both"
        require(parts.keys() == weights.keys(), "weights", list(weights), f"those of {', '.join(parts)}", remedy)
        for name, weight in weights.items():
            remedy = "a part that is worth nothing is none: leave it out"
            require(math.isfinite(weight) and weight != 0, f"weights.{name}", weight, "a number other than 0", remedy)
        remedy = "accuracy is the mean of that part's correctness"
        require(self.outcome_of in parts, "outcome_of", repr(self.outcome_of), f"one of {', '.join(parts)}", remedy)
        gathering = [name for name, part in parts.items() if part.gathers]
        remedy = "rubrics of a problem belong to one part"
        require(len(gathering) <= 1, "parts", ", ".join(gathering), "one at most whose rubrics evolve", remedy)
        weight, remedy = weights[self.outcome_of], "a right answer has to earn more than a wrong one"
        require(weight > 0, f"weights.{self.outcome_of}", weight, "above 0", remedy)
        for name in ("correct", "wrong"):
            own, place = getattr(parts[self.outcome_of], name), f"parts.{self.outcome_of}.{name}"
            remedy = f"set reward.{name}, and in the YAML of this reward {place}: ${{...{name}}}"
            require(own == getattr(self, name), place, own, f"reward.{name} ({getattr(self, name)})", remedy)

    @property
    def has_parts(self) -> bool:
        return len(self.parts) > 1

    @property
    def part_weights(self) -> dict[str, float]:
        return dict(self.weights)

    def grades(
        self, problems: Sequence[Problem], texts: Sequence[str], finished: Sequence[bool], keys: Sequence[NoiseKey]
    ) -> Grades:
        each = {name: part.checked_grades(problems, texts, finished, keys) for name, part in self.parts.items()}
        correctness = each[self.outcome_of].correctness
        failed = [any(map(math.isnan, row)) for row in zip(*(graded.correctness for graded in each.values()))]
        return Grades(
            [math.nan if lost else correct for lost, correct in zip(failed, correctness)],
            {
                name: [self.weights[name] * sum(row) for row in zip(*graded.components.values())]
                for name, graded in each.items()
            },
        )

    def bounds(self, right: bool) -> tuple[float, float]:
        lowest = highest = 0.0
        for name, part in self.parts.items():
            either = (right,) if name == self.outcome_of else (True, False)
            ends = [self.weights[name] * end for is_right in either for end in part.bounds(is_right)]
            lowest, highest = lowest + min(ends), highest + max(ends)
        return lowest, highest

    def written(self) -> str:
        return " + ".join(f"{self.weights[name]:g} * {name} ({part.written()})" for name, part in self.parts.items())

    def check(self, problems: Sequence[Problem]) -> None:
        for part in self.parts.values():
            part.check(problems)

    @property
    def reads(self) -> frozenset[AnswerForm]:
        return frozenset.intersection(*(part.reads for part in self.parts.values()))

    @property
    def compared(self) -> tuple[Grader, ...]:
        """Those of the part that defines correctness."""
        return self.parts[self.outcome_of].compared

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(file for part in self.parts.values() for file in part.files)

    @property
    def gathers(self) -> bool:
        return any(part.gathers for part in self.parts.values())

    def contrasted(self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]) -> list[Problem]:
        return self._gathering().contrasted(problems, groups)

    def learnt(
        self, problems: Sequence[Problem], groups: Sequence[Sequence[str]]
    ) -> list[tuple[tuple[str, float], ...]]:
        return self._gathering().learnt(problems, groups)

    def _gathering(self) -> Grader:
        """The part whose rubrics evolve, or any if none do."""
        return next((part for part in self.parts.values() if part.gathers), self.parts[self.outcome_of])
