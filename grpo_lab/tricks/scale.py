"""Scale: what the centred reward is divided by or weighted with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick, group_mean, tied
from grpo_lab.tricks.baseline import Weights
from grpo_lab.tricks.convention import AlphaForm, Floor, Singleton
from grpo_lab.types import Bool, Float, Graded, Tensor


class Deviation(Enum):
    """Standard deviation over the batch of the centred rewards (ScaleRL), or of the raw ones (TRL, Lite PPO)."""

    centred = "centred"
    raw = "raw"


class AllWrong(Enum):
    """The advantage that MaxRL gives a response of an all-wrong group: nothing, or -1."""

    zero = "zero"
    minus_one = "minus_one"


@dataclass(frozen=True)
class Scale(Trick, ABC):
    """Turns centred rewards into advantages.

    `group_relative`: needs other rows of the group. `needs_rewards_from_zero`: a negative reward would flip signs of
    advantages. `splits_signs`: made for centred rewards of both signs. `reads_batch`: removing a group changes the
    advantages of others. `pays_for_signal`: compensates for groups without signal. `recentres`: subtracts one number
    for the whole batch. `divides_by_centred`: divides by the deviation of the centred rewards. `moves_zeros`: a row
    with centred reward 0 may get an advantage. `scales_tokens`: implements `of_tokens`. `zeroes_tied`: gives a group
    of equal rewards advantage 0, whatever the baseline. `divides_by_deviation`: the same where all rewards are
    multiplied by one number. `reads_components`: centres and scales each component of the reward by itself, and reads
    no baseline.
    """

    needs_rewards_from_zero: ClassVar[bool] = False
    splits_signs: ClassVar[bool] = False
    reads_batch: ClassVar[bool] = False
    scales_tokens: ClassVar[bool] = False
    zeroes_tied: ClassVar[bool] = False
    divides_by_deviation: ClassVar[bool] = False
    reads_components: ClassVar[bool] = False

    @property
    def group_relative(self) -> bool:
        return False

    @property
    def pays_for_signal(self) -> bool:
        return False

    @property
    def recentres(self) -> bool:
        return False

    @property
    def divides_by_centred(self) -> bool:
        return False

    @property
    def moves_zeros(self) -> bool:
        return self.recentres

    @abstractmethod
    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        """Advantages, float64; rows out of the statistics stay exactly 0."""

    def of_tokens(
        self, centred: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], graded: Graded
    ) -> Float[Tensor, "N T"]:
        """Advantages from per-token centred rewards; 0 outside `mask`."""
        raise TypeError(f"{type(self).__name__} scales one number a response; a rule refuses it for tokens")


@dataclass(frozen=True)
class GroupStd(Scale):
    """Divide by the standard deviation of the group's rewards (GRPO, arXiv:2402.03300).

    advantage = centred / (std_g(reward) + eps), over rows in the statistics; 0 when the group is tied

    Weights a prompt of pass rate p by about 1/sqrt(p(1 - p)), bounded by sqrt(G - 1): very easy and very hard prompts
    count more. `ddof` 0 is the population formula; 1 is Bessel's, as in TRL and verl. `leave_one_out` is NeMo-RL's:
    divide by the deviation of the other rows, and not at all where it is 0, so a group's only right answer stays
    small. A lone row's `raw` reward (verl) is divided by 1 + eps.
    """

    ddof: int
    eps: float
    leave_one_out: bool
    singleton: Singleton

    zeroes_tied: ClassVar[bool] = True
    divides_by_deviation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_field(self.ddof in (0, 1), self, "ddof", "0 or 1")
        require_not_negative(self, "eps")

    @property
    def group_relative(self) -> bool:
        return True

    @property
    def formula(self) -> str:
        group = "{{g without i}}" if self.leave_one_out else "g"
        kept = ", C where that std is 0" if self.leave_one_out else ""
        return f"C / (std_{group}(R; ddof {{ddof}}) + {{eps}}){kept}"

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        reward, in_statistics = graded.reward, graded.in_statistics
        number = in_statistics.sum(dim=1, keepdim=True)
        deviations = (reward - group_mean(reward, in_statistics)) * in_statistics
        squares = (deviations**2).sum(dim=1, keepdim=True)
        if self.leave_one_out:
            # Without row i, the squares around the mean of the others lose i's own and the shift it caused.
            others = squares - deviations**2 * number / (number - 1).clamp(min=1)
            squares = torch.where(others > 1e-12 * squares, others, 0.0)  # for equal rewards the rest is only rounding
            number = number - 1
        std = torch.sqrt(squares / (number - self.ddof).clamp(min=1))
        scaled = torch.where(std > 0, centred / (std + self.eps), centred)
        if self.singleton is Singleton.raw:
            alone = in_statistics.sum(dim=1, keepdim=True) == 1
            return torch.where(alone, centred / (1 + self.eps), torch.where(tied(reward, in_statistics), 0.0, scaled))
        # In a tied group rounding and eps would decide the result.
        return torch.where(tied(reward, in_statistics), 0.0, scaled)


@dataclass(frozen=True)
class Focal(GroupStd):
    """Divide by the group's standard deviation, and weight hard prompts more (F-GRPO, arXiv:2602.06717).

    advantage = (1 - p)^gamma * centred / (std_g(reward) + eps),  p the share of right rows in the statistics

    Easy prompts reinforce the answers that are likely already and take probability from rare right ones, so they count
    less. Differs from GroupStd: only that factor; from GroupMean: it stays bounded as p falls to 0. A tied group gets
    0, and so does an all-right group whose rewards differ.
    """

    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "gamma")

    @property
    def formula(self) -> str:
        return f"(1 - mean_g(right))^{{gamma}} * {super().formula}"

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        rate = group_mean((graded.correctness > 0.5).to(centred.dtype), graded.in_statistics)
        return (1 - rate) ** self.gamma * super().__call__(centred, graded)


@dataclass(frozen=True)
class NoScale(Scale):
    """Use the centred reward unchanged (Dr. GRPO, arXiv:2503.20783): every prompt weighs the same."""

    is_no_op: ClassVar[bool] = True
    scales_tokens: ClassVar[bool] = True
    formula: ClassVar[str] = "C"

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        return centred

    def of_tokens(
        self, centred: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], graded: Graded
    ) -> Float[Tensor, "N T"]:
        return torch.where(mask, centred, 0.0)


_FLOORED = {
    Floor.added: lambda variance, eps: torch.sqrt(variance) + eps,
    Floor.in_variance: lambda variance, eps: torch.sqrt(variance + eps),
    Floor.least_variance: lambda variance, eps: torch.sqrt(variance.clamp(min=eps)),
}
_WRITTEN = {
    Floor.added: "({} + {{eps}})",
    Floor.in_variance: "sqrt({}^2 + {{eps}})",
    Floor.least_variance: "sqrt(max({}^2, {{eps}}))",
}


@dataclass(frozen=True)
class BatchStd(Scale):
    """Divide by one standard deviation over the rows of the batch in the statistics (REINFORCE++, Lite PPO, ScaleRL).

    advantage = centred / (std_batch(x) + eps)      x = centred or raw rewards, each row or token counting once

    Differs from GroupStd: every prompt keeps its share of signal, and only the step size is normalised. `recentre`
    subtracts the batch mean first, as in verl's whitening. With token weights that mean is not 0 even for
    group-centred rewards, so rows of tied groups get an advantage too. A batch whose values are all equal gets 0.
    REINFORCE++ is arXiv:2501.03262, Lite PPO 2508.08221, ScaleRL 2510.13786.
    """

    of: Deviation
    by: Weights
    recentre: bool
    ddof: int
    eps: float
    floor: Floor

    reads_batch: ClassVar[bool] = True
    scales_tokens: ClassVar[bool] = True
    divides_by_deviation: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_field(self.ddof in (0, 1), self, "ddof", "0 or 1")
        require_not_negative(self, "eps")
        require_field(not (self.recentre and self.of is Deviation.raw), self, "recentre", "false where `of` is raw")

    @property
    def recentres(self) -> bool:
        return self.recentre

    @property
    def divides_by_centred(self) -> bool:
        return self.of is Deviation.centred

    @property
    def formula(self) -> str:
        values, top = "R" if self.of is Deviation.raw else "C", "(C - mean_batch(C))" if self.recentre else "C"
        spread = f"std_batch({values}; each of the {{by}} counts once, ddof {{ddof}})"
        return f"{top} / {_WRITTEN[self.floor].format(spread)}"

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        values = graded.reward if self.of is Deviation.raw else centred
        return _divided(self, centred, values, self.by.of(graded), graded.in_statistics)

    def of_tokens(
        self, centred: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], graded: Graded
    ) -> Float[Tensor, "N T"]:
        weights = mask.to(centred.dtype)
        if self.by is Weights.rows:
            weights = weights / mask.sum(dim=1, keepdim=True).clamp(min=1)
        values = graded.reward.reshape(-1, 1).expand_as(centred) if self.of is Deviation.raw else centred
        return _divided(self, centred, values, weights, mask)


def _divided(scale: BatchStd, centred: Tensor, values: Tensor, weights: Tensor, in_statistics: Tensor) -> Tensor:
    """`centred` divided by the weighted deviation of `values`; 0 out of the statistics, or if all values are equal."""
    mean = (weights * values).sum() / weights.sum().clamp(min=1)
    variance = (weights * (values - mean) ** 2).sum() / (weights.sum() - scale.ddof).clamp(min=1)
    divisor = _FLOORED[scale.floor](variance, scale.eps)
    flat = tied(values.reshape(1, -1), in_statistics.reshape(1, -1))
    shifted = centred - mean if scale.recentre else centred
    return torch.where(in_statistics & ~flat, shifted / divisor, 0.0)


@dataclass(frozen=True)
class Gdpo(Scale):
    """Normalise each component of the reward within the group, then add them up (GDPO, arXiv:2601.05242).

    S = sum_k w_k (R_k - mean_g(R_k)) / (std_g(R_k) + eps);  advantage = S / (std_batch(S) + eps), both with ddof 1

    R_k is component k before its weight w_k: a part of a reward in parts, a reward shaping, or the KL penalty, the
    latter two with w_k 1. Differs from GroupStd, which adds the components up first: there a component that varies more
    outweighs the others, and responses of equal sum get equal advantages whatever their components are. A factor
    inside a component, such as that of a length penalty, cancels. A component that is the same for the whole group adds
    exactly 0. S has mean 0 in every group, so the batch mean that the paper and TRL subtract is only rounding, and is
    left out: a group in which every component is tied gets exactly 0 here, and a residue there. verl whitens over
    tokens, where the mean is not 0.
    """

    eps: float

    reads_batch: ClassVar[bool] = True
    divides_by_deviation: ClassVar[bool] = True
    reads_components: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "S / (std_batch(S) + {eps}), S = sum_k w_k (R_k - mean_g(R_k)) / (std_g(R_k) + {eps}), R_k the components of R"
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "eps")

    @property
    def group_relative(self) -> bool:
        return True

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        in_statistics, added = graded.in_statistics, torch.zeros_like(graded.reward)
        for name, values in graded.components.items():
            weight = graded.part_weights.get(name, 1.0)
            part = values / weight
            above = (part - group_mean(part, in_statistics)) * in_statistics
            normalised = above / (_deviation(above, in_statistics, 1) + self.eps)
            added = added + torch.where(tied(part, in_statistics), 0.0, weight * normalised)
        flat, rows = added.reshape(1, -1), in_statistics.reshape(1, -1)
        if tied(flat, rows):
            return torch.zeros_like(added)
        return added / (_deviation(flat, rows, 1) + self.eps)


def _deviation(above: Float[Tensor, "P G"], in_statistics: Bool[Tensor, "P G"], ddof: int) -> Float[Tensor, "P 1"]:
    """The deviation of each group's values, of which the mean was subtracted; 0 for a group of one row."""
    number = in_statistics.sum(dim=1, keepdim=True)
    return torch.sqrt((above**2).sum(dim=1, keepdim=True) / (number - ddof).clamp(min=1))


@dataclass(frozen=True)
class GroupMean(Scale):
    """Divide by the group's mean reward (MaxRL, arXiv:2602.02710).

    advantage = centred / mean_g(reward), over rows in the statistics; 0 when the group's mean is 0

    With rewards 0 and 1 the expected gradient of a prompt of pass rate p has weight (1 - (1 - p)^(G - 1)) / p. This
    approaches the 1/p of maximum likelihood: hard prompts count more, easy ones do not. `all_wrong: minus_one` gives
    -1 to the rows of an all-wrong group, which raises the order to G. Negative rewards are refused, because a right
    answer in a mostly wrong group would be punished.
    """

    all_wrong: AllWrong

    needs_rewards_from_zero: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        return f"C / mean_g(R), {'-1' if self.moves_zeros else '0'} in an all-wrong group"

    @property
    def group_relative(self) -> bool:
        return True

    @property
    def moves_zeros(self) -> bool:
        return self.all_wrong is AllWrong.minus_one

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        assert bool((graded.reward[graded.in_statistics] >= 0).all()), "a rule refuses rewards that can be negative"
        mean = group_mean(graded.reward, graded.in_statistics)
        lost = -1.0 if self.all_wrong is AllWrong.minus_one else 0.0
        scaled = torch.where(mean > 0, centred / torch.where(mean > 0, mean, 1.0), lost)
        return torch.where(graded.in_statistics, scaled, 0.0)


@dataclass(frozen=True)
class InformativeShare(Scale):
    """Multiply by the inverse share of groups that carry signal (GPG, arXiv:2504.02546).

    advantage = alpha * centred;  alpha = groups / groups whose rewards in the statistics differ

    Compensates for the smaller step that groups without signal cause: the factor grows as prompts become all right or
    all wrong. In a batch without any signal alpha is 1. `nonzero_rewards` is verl's alpha, rows / rows whose reward is
    not 0. It follows accuracy instead of signal, and is always 1 with rewards of -1 and 1.
    """

    alpha: AlphaForm

    reads_batch: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        share = "groups / groups with signal" if self.pays_for_signal else "rows / rows whose reward is not 0"
        return f"C * {share}"

    @property
    def pays_for_signal(self) -> bool:
        return self.alpha is AlphaForm.informative_groups

    @property
    def group_relative(self) -> bool:
        return self.pays_for_signal

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        if self.alpha is AlphaForm.nonzero_rewards:
            all_of_them = graded.in_statistics.sum()
            some = (graded.in_statistics & (graded.reward != 0)).sum()
        else:
            all_of_them = graded.in_statistics.any(dim=1).sum()
            some = (~tied(graded.reward, graded.in_statistics)).sum()
        return centred * torch.where(some > 0, all_of_them.to(centred.dtype) / some.clamp(min=1), 1.0)


@dataclass(frozen=True)
class SignWeighted(Scale):
    """Weight positive and negative rewards separately (PSR, NSR and W-REINFORCE, arXiv:2506.01347).

    advantage = centred * (positive if centred > 0 else negative)

    Made for rewards of -1 and 1 without a baseline. (positive, negative) = (1, 0) learns from right answers only and
    narrows the policy; (0, 1) learns from wrong answers only and keeps pass@k; (0.1, 1) is the paper's mixture.
    """

    positive: float
    negative: float

    splits_signs: ClassVar[bool] = True
    formula: ClassVar[str] = "C * ({positive} if C > 0 else {negative})"

    def __post_init__(self) -> None:
        require_not_negative(self, "positive", "negative")
        require_field(self.positive + self.negative > 0, self, "positive", "greater than 0 where `negative` is 0")

    def __call__(self, centred: Float[Tensor, "P G"], graded: Graded) -> Float[Tensor, "P G"]:
        return torch.where(centred > 0, self.positive * centred, self.negative * centred)
