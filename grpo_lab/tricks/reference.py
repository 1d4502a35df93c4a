"""Reference: what the KL tie is tied to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Reference(ABC):
    """Decides when the reference policy takes the learner's weights."""

    changes: ClassVar[bool]  # whether it ever does, so that a checkpoint has to hold it

    @abstractmethod
    def refreshes_after(self, step: int) -> bool:
        """Whether the reference becomes a copy of the learner once step `step` is trained."""


@dataclass(frozen=True)
class Frozen(Reference):
    """The policy at step 0, for ever."""

    changes: ClassVar[bool] = False

    def refreshes_after(self, step: int) -> bool:
        return False
