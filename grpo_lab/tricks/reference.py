"""Reference: what the KL tie is tied to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick, require_field, require_positive


@dataclass(frozen=True)
class Reference(Trick, ABC):
    """Decides how much of the learner the reference policy takes in, and when."""

    changes: ClassVar[bool] = True  # whether it ever does, so that a checkpoint has to hold it

    @abstractmethod
    def mixes(self, step: int) -> float:
        """The share of the learner's weights in the reference's new ones once step `step` (from 0) is trained.

        reference = (1 - share) * reference + share * learner; 0 leaves it, 1 makes it a copy
        """


@dataclass(frozen=True)
class Frozen(Reference):
    """The policy at step 0, for ever."""

    touches_nothing: ClassVar[bool] = True
    formula: ClassVar[str] = "the policy at step 0"
    changes: ClassVar[bool] = False

    def mixes(self, step: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Reset(Reference):
    """Make the reference a copy of the learner every so many steps (TR-DPO's hard update, arXiv:2404.09656).

    Differs from Frozen: the tie bounds how far the policy goes within a period, not over the run, so that a KL penalty
    slows learning down without holding it back. ProRL (arXiv:2505.24864) does it when the validation score stalls.
    """

    every: int  # steps

    formula: ClassVar[str] = "the learner of {every} or fewer steps ago"

    def __post_init__(self) -> None:
        require_positive(self, "every")

    def mixes(self, step: int) -> float:
        return float((step + 1) % self.every == 0)


@dataclass(frozen=True)
class Ema(Reference):
    """Let the reference follow the learner as an exponential moving average (TR-DPO's soft update, arXiv:2404.09656).

    reference = decay * reference + (1 - decay) * learner, after each step

    Lags 1 / (1 - decay) steps behind. At 0 it is the learner, at 1 it is Frozen; both are refused.
    """

    decay: float

    formula: ClassVar[str] = "{decay} * reference + (1 - {decay}) * learner after each step"

    def __post_init__(self) -> None:
        require_field(0 < self.decay < 1, self, "decay", "in (0, 1)")

    def mixes(self, step: int) -> float:
        return 1 - self.decay
