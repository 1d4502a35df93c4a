"""Baselines over a group that leave its mean: a filtered mean, a shifted one, and a soft maximum.

The plain ones are in baseline.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import group_mean
from grpo_lab.tricks.baseline import Baseline, _centre
from grpo_lab.tricks.convention import Singleton
from grpo_lab.types import Float, Graded, Tensor


@dataclass(frozen=True)
class Kalman(Baseline):
    """Subtract a Kalman filter's estimate of the group's reward, and divide by its deviation (KRPO, arXiv:2505.07527).

    for the rows of a group in order, from x = mean and P = variance:
        P <- P + drift;  K = P / (P + noise);  x <- x + K (reward - x);  P <- (1 - K) P
        advantage = (reward - x) / (sqrt(P) + eps)

    As the authors' code has it: the estimate already contains the row's own reward, and the first row of a group starts
    from `mean`, so its advantage is about 0.1 of its reward with the published numbers. Differs from GroupMean with
    GroupStd: the order of the rows matters, P does not depend on the rewards, and a group of equal rewards keeps an
    advantage, which falls as 1/sqrt(rows). Rows out of the statistics are passed over.
    """

    drift: float  # variance that the group's reward gains from row to row, Q
    noise: float  # variance of one reward around it, R
    mean: float  # the estimate before the first row
    variance: float  # its variance
    eps: float

    group_relative: ClassVar[bool] = False
    scales_itself: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "(R - x) / (sqrt(P) + {eps}), x and P after i of a Kalman filter over g from {mean} and {variance}, "
        "Q {drift}, R {noise}"
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "drift", "eps")
        require_positive(self, "noise", "variance")
        require_field(isfinite(self.mean), self, "mean", "a finite number")

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        advantages = torch.zeros_like(graded.reward)
        x = torch.full_like(graded.reward[:, 0], self.mean)
        variance = torch.full_like(x, self.variance)
        for row, here in enumerate(graded.in_statistics.unbind(dim=1)):
            predicted = variance + self.drift
            gain = predicted / (predicted + self.noise)
            reward = graded.reward[:, row]
            x = torch.where(here, x + gain * (reward - x), x)
            variance = torch.where(here, (1 - gain) * predicted, variance)
            advantages[:, row] = torch.where(here, (reward - x) / (variance.sqrt() + self.eps), 0.0)
        return advantages


@dataclass(frozen=True)
class Asymmetric(Baseline):
    """Subtract the group's mean plus a number (AsymRE, arXiv:2506.20520).

    centred = reward - (mean_g(reward) + shift), over rows in the statistics

    With a shift below 0 right answers are pushed up more than wrong ones down. Where the responses are of another
    policy, the paper guarantees an improvement below the mean reward and sees the policy collapse above it. Differs
    from GroupMean: all rows gain -shift, those of a group of equal rewards too. A group with one row in the statistics
    gets 0.
    """

    shift: float  # reward
    singleton: Singleton

    group_relative: ClassVar[bool] = False
    shifts: ClassVar[bool] = True
    formula: ClassVar[str] = "R - (mean_g(R) + {shift})"

    def __post_init__(self) -> None:
        require_field(isfinite(self.shift), self, "shift", "a finite number")

    @property
    def smallest_group(self) -> int:
        return 2

    @property
    def handles_singletons(self) -> bool:
        return self.singleton is Singleton.raw

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        centred = graded.reward - (group_mean(graded.reward, graded.in_statistics) + self.shift)
        single = graded.in_statistics.sum(dim=1, keepdim=True) == 1
        lone = graded.reward if self.singleton is Singleton.raw else torch.zeros_like(centred)
        return torch.where(graded.in_statistics, torch.where(single, lone, centred), 0.0)


@dataclass(frozen=True)
class Opmd(Baseline):
    """Subtract the soft maximum of the group's rewards (OPMD, arXiv:2505.17826, after Kimi k1.5, 2501.12599).

    centred = (reward - tau * ln mean_g(exp(reward / tau))) / (1 + tau), over rows in the statistics

    The soft maximum is the log-partition function of the policy that maximises reward - tau * KL. It lies between the
    group's mean (tau large) and its largest reward (tau small), so wrong answers weigh more than under GroupMean. OPMD
    divides its loss by 1 + tau, for the pull towards the policy itself; here that factor is part of the baseline, so a
    KL term or an entropy bonus beside it is not divided. `scale=batch_std` divides it away. A tied group gets 0, and
    so does a group with one row in the statistics.
    """

    tau: float  # reward
    singleton: Singleton

    group_relative: ClassVar[bool] = True
    formula: ClassVar[str] = "(R - {tau} * ln mean_g(exp(R / {tau}))) / (1 + {tau})"

    def __post_init__(self) -> None:
        require_positive(self, "tau")

    @property
    def handles_singletons(self) -> bool:
        return self.singleton is Singleton.raw

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        exponents = torch.where(graded.in_statistics, graded.reward / self.tau, -torch.inf)
        number = graded.in_statistics.sum(dim=1, keepdim=True).clamp(min=1)
        soft_maximum = self.tau * (exponents.logsumexp(dim=1, keepdim=True) - number.to(exponents.dtype).log())
        return _centre((graded.reward - soft_maximum) / (1 + self.tau), graded, self.singleton)
