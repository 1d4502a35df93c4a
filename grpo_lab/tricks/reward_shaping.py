"""Reward shaping: what is added to the outcome's reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick, require, require_positive
from grpo_lab.types import Graded


@dataclass(frozen=True)
class RewardShaping(Trick, ABC):
    """Adds named components to the reward and leaves the outcome alone."""

    @abstractmethod
    def __call__(self, graded: Graded) -> Graded:
        """The record with its reward components added."""


@dataclass(frozen=True)
class NoShaping(RewardShaping):
    """The reward is the outcome's reward and nothing else."""

    touches_nothing: ClassVar[bool] = True

    def __call__(self, graded: Graded) -> Graded:
        return graded


@dataclass(frozen=True)
class SoftOverlong(RewardShaping):
    """Punish long responses on a ramp before the budget (DAPO, arXiv:2503.14476, eq. 13).

    start   = max_tokens - cache_tokens
    penalty = -factor * clip((length - start) / cache_tokens, 0, 1)

    Every response is punished, right or wrong, so a truncated wrong one ends below a short wrong one.
    Inert when no response is longer than `start`.
    """

    max_tokens: int  # the run's generation budget, response tokens
    cache_tokens: int  # width of the ramp, response tokens
    factor: float  # the largest penalty, in reward units

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "cache_tokens", "factor")
        require(self.cache_tokens <= self.max_tokens, self, "cache_tokens", f"at most the budget {self.max_tokens}")

    def __call__(self, graded: Graded) -> Graded:
        start = self.max_tokens - self.cache_tokens
        ramp = (graded.lengths.to(graded.reward.dtype) - start) / self.cache_tokens
        return graded.with_component("soft_overlong", -self.factor * ramp.clamp(0, 1))
