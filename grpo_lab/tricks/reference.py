"""Reference: which policy the KL penalty compares the learner with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import Trick


@dataclass(frozen=True)
class Reference(Trick, ABC):
    """Decides when the reference policy takes in the learner's weights, and how much of them."""

    changes: ClassVar[bool] = True  # whether the reference ever changes, so that checkpoints must save it

    @abstractmethod
    def mixes(self, step: int) -> float:
        """The learner's share in the reference's new weights after step `step` (from 0).

        reference = (1 - share) * reference + share * learner; 0 changes nothing, 1 copies the learner
        """


@dataclass(frozen=True)
class Frozen(Reference):
    """The policy at step 0, unchanged for the whole run."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "the policy at step 0"
    changes: ClassVar[bool] = False

    def mixes(self, step: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Reset(Reference):
    """Copy the learner into the reference every `every` steps (TR-DPO's hard update, arXiv:2404.09656).

    Differs from Frozen: the KL penalty limits how far the policy moves within a period, not over the whole run. So it
    slows learning down but does not stop it. ProRL (arXiv:2505.24864) resets when the validation metric stalls.
    """

    every: int  # steps

    formula: ClassVar[str] = "the learner of {every} or fewer steps ago"

    def __post_init__(self) -> None:
        require_positive(self, "every")

    def mixes(self, step: int) -> float:
        return float((step + 1) % self.every == 0)


@dataclass(frozen=True)
class Ema(Reference):
    """The reference is an exponential moving average of the learner (TR-DPO's soft update, arXiv:2404.09656).

    reference = decay * reference + (1 - decay) * learner, after each step

    Lags 1 / (1 - decay) steps behind. At decay 0 it is the learner, at decay 1 it is Frozen; both are refused.
    """

    decay: float

    formula: ClassVar[str] = "{decay} * reference + (1 - {decay}) * learner after each step"

    def __post_init__(self) -> None:
        require_field(0 < self.decay < 1, self, "decay", "in (0, 1)")

    def mixes(self, step: int) -> float:
        return 1 - self.decay
