"""Scale: what the centred reward is divided by or weighted with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lab.tricks.base import counted_mean, require, require_not_negative, tied
from grpo_lab.types import Graded


@dataclass(frozen=True)
class Scale(ABC):
    """Turns centred rewards into advantages."""

    group_relative: ClassVar[bool]

    @abstractmethod
    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        """Advantages, float64; an entry of exactly 0 stays exactly 0."""


@dataclass(frozen=True)
class GroupStd(Scale):
    """Divide by the standard deviation of the group's rewards (GRPO, arXiv:2402.03300).

    advantage = centred / (std_g(reward) + eps), over counted rows; 0 when the group is tied

    Weights a prompt of pass rate p by about 1/sqrt(p(1 - p)), bounded by sqrt(G - 1): very easy and very
    hard prompts count more. `ddof` 0 is the population formula, 1 Bessel's, which TRL and verl use.
    """

    ddof: int
    eps: float

    group_relative: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require(self.ddof in (0, 1), self, "ddof", "0 or 1")
        require_not_negative(self, "eps")

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        deviations = (graded.reward - counted_mean(graded.reward, graded.counted)) * graded.counted
        degrees = (graded.counted.sum(dim=1, keepdim=True) - self.ddof).clamp(min=1)
        std = torch.sqrt((deviations**2).sum(dim=1, keepdim=True) / degrees)
        # A tied group has nothing to standardise; leaving it to eps would let rounding decide.
        return torch.where(tied(graded.reward, graded.counted), 0.0, centred / (std + self.eps))


@dataclass(frozen=True)
class NoScale(Scale):
    """Use the centred reward as it is (Dr. GRPO, arXiv:2503.20783): every prompt weighs the same."""

    group_relative: ClassVar[bool] = False

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        return centred
