"""Group filter: what happens to groups without signal."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from grpo_lab.tricks.base import Trick, tied
from grpo_lab.types import Graded


class Signal(Enum):
    """Which quantity must vary within a group for the group to carry signal."""

    outcome = "outcome"
    reward = "reward"


def without_signal(graded: Graded, signal: Signal) -> Bool[Tensor, "P 1"]:
    """Groups whose counted rows all have the same outcome (or the same shaped reward)."""
    values = graded.outcome if signal is Signal.outcome else graded.reward
    return tied(values, graded.counted)


@dataclass(frozen=True)
class GroupFilter(Trick, ABC):
    """Decides whether groups without signal stay in the batch."""

    removes_rows: ClassVar[bool]

    @property
    def reads_reward(self) -> bool:
        """Whether the shaped reward decides."""
        return False

    @abstractmethod
    def __call__(self, graded: Graded) -> Graded:
        """The record with the rows of filtered groups masked."""


@dataclass(frozen=True)
class Keep(GroupFilter):
    """Train on every group; one without signal gives no gradient but stays in the denominators."""

    touches_nothing: ClassVar[bool] = True
    removes_rows: ClassVar[bool] = False

    def __call__(self, graded: Graded) -> Graded:
        return graded


@dataclass(frozen=True)
class Drop(GroupFilter):
    """Take groups without signal out of the batch (ScaleRL, arXiv:2510.13786).

    counted = counted & has_signal;  trained = trained & has_signal

    Differs from Keep only in batch-wide statistics and, with `denominator: survivors`, in the step size,
    which grows by 1 / (share with signal). With `signal: reward` a shaped reward keeps all-wrong groups
    alive, and a group standard deviation blows their differences up to unit size.
    """

    signal: Signal

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "groups of one and the same {signal}: m = 0, and not counted in the statistics"

    @property
    def reads_reward(self) -> bool:
        return self.signal is Signal.reward

    def __call__(self, graded: Graded) -> Graded:
        kept = ~without_signal(graded, self.signal)
        return replace(graded, counted=graded.counted & kept, trained=graded.trained & kept)
