"""Pass rate: which training problems stay, by how often the base model answers them right.

It is measured before the first step, only on the training split, and kept on disk. What is evaluated stays as it is.
"""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick


@dataclass(frozen=True)
class PassRate(Trick, ABC):
    """Pass rate of the base model on a training problem before RL, and what follows from it."""

    @property
    def ranks(self) -> bool:
        """True if the pass rate becomes the problem's difficulty."""
        return False

    @property
    def drops(self) -> bool:
        """True if a pass rate or a guess can make a problem leave."""
        return False

    @property
    def guesses(self) -> bool:
        """True if answers without reasoning are tried."""
        return False


@dataclass(frozen=True)
class NotMeasured(PassRate):
    """Train on every problem, however hard."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "problems of every pass rate"


@dataclass(frozen=True)
class Measured(PassRate):
    """Drop training problems by the share of right answers among `samples` of the base model (arXiv:2505.22312).

    stays if  low <= rate <= high, and rate > 0 unless `unsolved`, and rate < 1 unless `solved`

    The base model, before any fine-tuning, answers as in training, but for the run's seed: all seeds of an arm train on
    the same problems. Responses that the grader failed on do not count; a problem without any other leaves.

    With `tries`, problems that one of that number of answers without reasoning solves leave first (Kimi k1.5,
    2501.12599): a response begins with the template's interruption, and `guess_tokens` tokens follow. With
    `ranks_problems` difficulty is 1 + round((1 - rate) * samples) in place of the task's label.

    All tokens sampled for this open the budget, as those of sft do, whether they were sampled now or by an earlier run.
    """

    samples: int
    low: float
    high: float
    unsolved: bool  # problems that no answer solves stay
    solved: bool  # problems that all answers solve stay
    ranks_problems: bool
    tries: int  # 0 tries no guess
    guess_tokens: int
    seed: int  # of the sampling noise

    formula: ClassVar[str] = "problems of a pass rate in [{low}, {high}] over {samples} answers of the base model"

    def __post_init__(self) -> None:
        require_positive(self, "samples", "guess_tokens")
        require_not_negative(self, "tries", "seed")
        require_field(0 <= self.low <= 1, self, "low", "in [0, 1]")
        require_field(self.low <= self.high <= 1, self, "high", f"between low ({self.low:g}) and 1")

    @property
    def ranks(self) -> bool:
        return self.ranks_problems

    @property
    def drops(self) -> bool:
        return not (self.low == 0 and self.high == 1 and self.unsolved and self.solved) or self.guesses

    @property
    def guesses(self) -> bool:
        return self.tries > 0

    def written(self) -> str:
        ends = ("[" if self.unsolved or self.low > 0 else "(", "]" if self.solved or self.high < 1 else ")")
        text = (
            f"of a pass rate in {ends[0]}{self.low:g}, {self.high:g}{ends[1]} over {self.samples} answers of the base"
        )
        text = text if self.drops else f"ranked over {self.samples} answers of the base"
        guessed = f", none guessed right in {self.tries} tries" if self.tries else ""
        return f"problems {text}{guessed}{', difficulty by the rate' if self.ranks and self.drops else ''}"


def reason_to_drop(plan: Measured, right: int, graded: int) -> str:
    """Reason why a problem with this many right of its graded answers leaves; "" if it stays."""
    if graded == 0:
        return "ungraded"
    if right == 0 and not plan.unsolved:
        return "unsolved"
    if right == graded and not plan.solved:
        return "solved"
    rate = right / graded
    if rate < plan.low and not math.isclose(rate, plan.low):
        return "too_hard"
    return "too_easy" if rate > plan.high and not math.isclose(rate, plan.high) else ""


def difficulty_of(plan: Measured, right: int, graded: int) -> int:
    """1 for a problem that every answer solves, samples + 1 for one that none does."""
    return 1 + round((1 - right / max(graded, 1)) * plan.samples)
