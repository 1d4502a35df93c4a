"""Schedule: which weights generate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Schedule(ABC):
    """Decides when the sampler receives the learner's weights."""

    keeps_sampler_current: ClassVar[bool]

    @abstractmethod
    def syncs_after(self, step: int) -> bool:
        """Whether the sampler takes the learner's weights once step `step` is trained."""


@dataclass(frozen=True)
class Sync(Schedule):
    """Generate with the weights of the last update, always.

    Sampler and learner differ only in numerics and within the minibatches of one step.
    """

    keeps_sampler_current: ClassVar[bool] = True

    def syncs_after(self, step: int) -> bool:
        return True
