"""Baseline: what is subtracted from the reward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lab.tricks.base import counted_mean, tied
from grpo_lab.types import Graded


@dataclass(frozen=True)
class Baseline(ABC):
    """Centres rewards; rows that are not counted come out as 0 and move no other row."""

    group_relative: ClassVar[bool]

    @abstractmethod
    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        """Reward minus baseline, float64."""


@dataclass(frozen=True)
class GroupMean(Baseline):
    """Subtract the mean reward of the group (GRPO, arXiv:2402.03300).

    centred = reward - mean_g(reward), over counted rows; exactly 0 when the group is tied

    The mean holds the row itself, which scales the expected gradient by (G - 1)/G. A group with one
    counted row gets 0.
    """

    group_relative: ClassVar[bool] = True

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        centred = graded.reward - counted_mean(graded.reward, graded.counted)
        return torch.where(graded.counted & ~tied(graded.reward, graded.counted), centred, 0.0)


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """Subtract the mean reward of the other rows of the group (RLOO, arXiv:2402.14740).

    centred_i = reward_i - sum_{j != i} reward_j / (n - 1) = n/(n - 1) * (reward_i - mean_g(reward))

    Differs from GroupMean by the factor n/(n - 1), n being the counted rows: the row no longer stands in
    its own baseline, so the estimate is unbiased. A group with one counted row gets 0.
    """

    group_relative: ClassVar[bool] = True

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        number = graded.counted.sum(dim=1, keepdim=True).to(graded.reward.dtype)
        factor = number / (number - 1).clamp(min=1)
        centred = factor * (graded.reward - counted_mean(graded.reward, graded.counted))
        return torch.where(graded.counted & ~tied(graded.reward, graded.counted), centred, 0.0)


@dataclass(frozen=True)
class NoBaseline(Baseline):
    """Subtract nothing: the advantage is the reward itself (REINFORCE, Williams 1992).

    Unbiased and of high variance: with rewards of 0 and 1 only right answers push. Groups without
    signal still carry gradient here.
    """

    group_relative: ClassVar[bool] = False

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        return torch.where(graded.counted, graded.reward, 0.0)
