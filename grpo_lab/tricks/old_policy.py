"""Old policy: whose log-probs stand below the importance ratio."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class OldPolicy(ABC):
    """Names the denominator of the ratio the surrogate reads."""

    recomputes: ClassVar[bool]


@dataclass(frozen=True)
class Recomputed(OldPolicy):
    """The learner itself, before the first update on these rollouts (decoupled PPO, arXiv:2505.24298).

    Needs one forward pass without gradient per rollout batch. The loop leaves that pass out where its
    result is known: with one on-policy update and no correction the old policy is the learner, and the
    ratio is exactly 1.
    """

    recomputes: ClassVar[bool] = True
