"""Rejection: which responses or tokens leave for a large sampler-learner mismatch.

Below, rho = old / sampler per token: the learner before the updates over the sampler. Three estimates of their
divergence are k1 = -log rho, k2 = (log rho)^2 / 2 and k3 = rho - 1 - log rho. Two more read only the probability of
the sampled token: tv = |old - sampler|, and the KL between (sampler, 1 - sampler) and (old, 1 - old). An option's name
says how an estimate is reduced (each token, or the sum, mean or largest of a response) and which estimate it is. For k1
the bounds are on the ratio itself: `sequence_mean_k1` keeps responses whose geometric mean ratio lies in [low, high].
`all_of` combines several.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch

from grpo_lab.checks import require, require_positive
from grpo_lab.tricks.base import Trick, row_mean
from grpo_lab.tricks.convention import BoundForm
from grpo_lab.tricks.correction import ratio, require_bounds
from grpo_lab.types import Bool, Float, Graded, Tensor, to_groups


def each_token(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """The values unchanged."""
    return values


def row_sum(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """The sum over a row's tokens, at each of them."""
    return torch.where(mask, values, 0.0).sum(dim=1, keepdim=True).expand_as(values)


def whole_mean(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """The mean over a row's tokens, at each of them."""
    return row_mean(values, mask).expand_as(values)


def row_largest(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """The largest value of a row's tokens, at each of them."""
    return torch.where(mask, values, -torch.inf).amax(dim=1, keepdim=True).expand_as(values)


@dataclass(frozen=True)
class Rejection(Trick, ABC):
    """Chooses the tokens that stay in the loss. `per_token`: tokens of a row are judged one by one."""

    needs_old_logprobs: ClassVar[bool] = True
    removes_rows: ClassVar[bool] = True
    per_token: ClassVar[bool] = False

    @abstractmethod
    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        """True on the tokens that stay in the loss."""

    def settle(self, graded: Graded, stays: Bool[Tensor, "N T"]) -> Graded:
        """The record without rejected tokens, and without rows whose tokens are all rejected."""
        return graded

    @property
    def parts(self) -> Mapping[str, Rejection]:
        """The rejections that this option combines, by name; empty for a single one."""
        return {}


@dataclass(frozen=True)
class NoRejection(Rejection):
    """Every sampled token stays."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "every sampled token stays"
    needs_old_logprobs: ClassVar[bool] = False
    removes_rows: ClassVar[bool] = False

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        return torch.ones_like(sampled_mask)


@dataclass(frozen=True)
class Bounded(Rejection, ABC):
    """Base of the options: a statistic of log rho, a bound on it, and whether rejected rows stay in the statistics.

    `rejected_in_statistics`: false also removes a rejected row from group and batch statistics, so its reward does not
    affect other rows. True leaves it there, as verl, TRL and NeMo-RL do. In statistics weighted by tokens a rejected
    token never counts.
    """

    rejected_in_statistics: bool

    @staticmethod
    @abstractmethod
    def reduce(values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """Each token's value, or one value for its whole row."""

    def settle(self, graded: Graded, stays: Bool[Tensor, "N T"]) -> Graded:
        left = ~to_groups(stays.any(dim=1), graded.reward.shape[1])
        in_statistics = graded.in_statistics if self.rejected_in_statistics else graded.in_statistics & ~left
        lengths = to_groups(stays.sum(dim=1), graded.reward.shape[1])
        return replace(graded, sampled_lengths=lengths, in_statistics=in_statistics, in_loss=graded.in_loss & ~left)


@dataclass(frozen=True)
class AllOf(Rejection):
    """Keep tokens that every one of several rejections keeps (verl's list of rejections; SkyRL's and ROLL's masks).

    Each member sees all sampled tokens, so their order does not matter. A row leaves when no token of it is kept by all
    members, even if each member keeps some: statistics and loss follow the joint mask. Members have names, under which
    `mismatch/removed_by/NAME` logs the share of tokens that each would remove on its own.

    Raises ValueError for no member, for one that rejects nothing or is itself such a list, for two equal members, and
    unless all have the same `rejected_in_statistics`.
    """

    members: dict[str, Any]  # name -> Bounded; OmegaConf keeps frozen classes in no typed dict

    def __post_init__(self) -> None:
        example = "conf/rejection/all_of.yaml shows how to write them"
        require(bool(self.members), "rejection.members", "{}", "one rejection or more", example)
        first, known = next(iter(self.members)), list[Bounded]()
        for name, member in self.members.items():
            place, kind = f"rejection.members.{name}", type(member).__name__
            named = re.fullmatch("[a-z0-9_]+", name) is not None
            remedy = "a metric will have the name"
            require(named, "rejection.members", repr(name), "named by small letters, digits and _", remedy)
            remedy = f"choose one by rejection@{place}=OPTION, leave none out, and name the members of a list here"
            require(isinstance(member, Bounded), place, kind, "a single rejection with a bound", remedy)
            require(member not in known, place, member.written(), "another rejection than those before it", "drop it")
            known.append(member)
            own, rule = member.rejected_in_statistics, f"as in {first} ({self.rejected_in_statistics})"
            remedy = "rows leave by all members together, so set the same in each"
            require(own == self.rejected_in_statistics, f"{place}.rejected_in_statistics", own, rule, remedy)

    @property
    def parts(self) -> Mapping[str, Rejection]:
        return self.members

    @property
    def per_token(self) -> bool:
        return any(member.per_token for member in self.members.values())

    @property
    def rejected_in_statistics(self) -> bool:
        """Whether rejected rows stay in the statistics: that of every member."""
        return next(iter(self.members.values())).rejected_in_statistics

    @property
    def formula(self) -> str:
        each = (f"({member.written()})" for member in self.members.values())
        return " and ".join(each).replace("{", "{{").replace("}", "}}")

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        stays = sampled_mask
        for member in self.members.values():
            stays = stays & member(old_logprobs, sampler_logprobs, sampled_mask)
        return stays

    def settle(self, graded: Graded, stays: Bool[Tensor, "N T"]) -> Graded:
        return next(iter(self.members.values())).settle(graded, stays)  # all settle alike


@dataclass(frozen=True)
class RatioBounds(Bounded, ABC):
    """Options on k1: keep low <= exp(reduced log rho) <= high. A low of 0 or a very large high switches that bound off.

    `bounds: inverse` applies the bounds to the inverse ratio, as verl's code does: 0.1 and 1.2 then keep a ratio of 5
    and reject one of 0.5. With low = 1 / high both forms are the same.
    """

    low: float
    high: float
    bounds: BoundForm

    of_log_rho: ClassVar[str]

    @property
    def formula(self) -> str:
        log_rho = "prox - sampler" if self.bounds is BoundForm.ratio else "sampler - prox"
        return f"exp({self.of_log_rho.format(log_rho)}) in [{{low}}, {{high}}]"

    def __post_init__(self) -> None:
        require_bounds(self, "low", "high")

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        sign = 1 if self.bounds is BoundForm.ratio else -1
        value = ratio(sign * self.reduce(old_logprobs - sampler_logprobs, sampled_mask))
        return sampled_mask & (value >= self.low) & (value <= self.high)


@dataclass(frozen=True)
class UpperBound(Bounded, ABC):
    """Options on estimates that are never negative: keep a reduced one of at most `bound`, in nats or probability."""

    bound: float

    def __post_init__(self) -> None:
        require_positive(self, "bound")

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        estimate = self.estimate(old_logprobs, sampler_logprobs)
        return sampled_mask & (self.reduce(estimate, sampled_mask) <= self.bound)

    @abstractmethod
    def estimate(self, old: Float[Tensor, "N T"], sampler: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        """The estimate of each token, from its log-probs."""


@dataclass(frozen=True)
class K2Bound(UpperBound, ABC):
    """k2 = (log rho)^2 / 2."""

    def estimate(self, old: Float[Tensor, "N T"], sampler: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        return (old - sampler) ** 2 / 2


@dataclass(frozen=True)
class K3Bound(UpperBound, ABC):
    """k3 = rho - 1 - log rho."""

    def estimate(self, old: Float[Tensor, "N T"], sampler: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        return ratio(old - sampler) - 1 - (old - sampler)


@dataclass(frozen=True)
class TvBound(UpperBound, ABC):
    """Total variation of the sampled token's probability: |old - sampler|."""

    def estimate(self, old: Float[Tensor, "N T"], sampler: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        return (old.exp() - sampler.exp()).abs()


class Direction(Enum):
    """Which KL is taken: of the sampler's distribution to the old policy's, the reverse, or the larger of both."""

    sampler_to_old = "sampler_to_old"
    old_to_sampler = "old_to_sampler"
    either = "either"

    @property
    def written(self) -> str:
        """The KL in the symbols of a formula."""
        forward, back = "binary_kl(sampler, prox)", "binary_kl(prox, sampler)"
        return {"sampler_to_old": forward, "old_to_sampler": back}.get(self.value, f"max({forward}, {back})")


def binary_kl(p: Float[Tensor, "N T"], q: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """KL of (p, 1 - p) to (q, 1 - q)."""
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


@dataclass(frozen=True)
class BinaryKlBound(UpperBound, ABC):
    """KL between the sampled token's (sampler, 1 - sampler) and (old, 1 - old), probabilities within [1e-6, 1 - 1e-6].

    `direction: sampler_to_old` weighs the log-ratios by the sampler's probabilities, and `old_to_sampler` by the old
    policy's: for a token that goes from 0.01 to 0.5 they are 0.64 and 1.61 nats. KPop rejects a token if `either`
    exceeds the bound.
    """

    direction: Direction

    def estimate(self, old: Float[Tensor, "N T"], sampler: Float[Tensor, "N T"]) -> Float[Tensor, "N T"]:
        q, p = (one.exp().clamp(1e-6, 1 - 1e-6) for one in (old, sampler))
        if self.direction is Direction.sampler_to_old:
            return binary_kl(p, q)
        if self.direction is Direction.old_to_sampler:
            return binary_kl(q, p)
        return torch.maximum(binary_kl(p, q), binary_kl(q, p))


@dataclass(frozen=True)
class TokenK1(RatioBounds):
    """Keep tokens whose ratio is within the bounds (verl "token_k1")."""

    of_log_rho: ClassVar[str] = "{}"
    per_token: ClassVar[bool] = True
    reduce = staticmethod(each_token)


@dataclass(frozen=True)
class TokenK2(K2Bound):
    """Keep tokens whose squared log-ratio is small (verl "token_k2")."""

    formula: ClassVar[str] = "(prox - sampler)^2 / 2 <= {bound}"
    per_token: ClassVar[bool] = True
    reduce = staticmethod(each_token)


@dataclass(frozen=True)
class TokenK3(K3Bound):
    """Keep tokens whose k3 is small (verl "token_k3"); k3 grows faster for ratios above 1."""

    formula: ClassVar[str] = "k3(prox, sampler) <= {bound}"
    per_token: ClassVar[bool] = True
    reduce = staticmethod(each_token)


@dataclass(frozen=True)
class SequenceSumK1(RatioBounds):
    """Keep responses whose product of ratios is within the bounds (verl "seq_sum_k1"); long ones leave first."""

    of_log_rho: ClassVar[str] = "sum_t({})"
    reduce = staticmethod(row_sum)


@dataclass(frozen=True)
class SequenceSumK2(K2Bound):
    """Keep responses whose sum of squared log-ratios is small (verl "seq_sum_k2")."""

    formula: ClassVar[str] = "sum_t((prox - sampler)^2 / 2) <= {bound}"
    reduce = staticmethod(row_sum)


@dataclass(frozen=True)
class SequenceSumK3(K3Bound):
    """Keep responses whose summed k3 is small (verl "seq_sum_k3")."""

    formula: ClassVar[str] = "sum_t(k3(prox, sampler)) <= {bound}"
    reduce = staticmethod(row_sum)


@dataclass(frozen=True)
class SequenceMeanK1(RatioBounds):
    """Keep responses whose geometric mean ratio is within the bounds ("geometric" in verl, OpenRLHF, SkyRL)."""

    of_log_rho: ClassVar[str] = "mean_t({})"
    reduce = staticmethod(whole_mean)


@dataclass(frozen=True)
class SequenceMeanK2(K2Bound):
    """Keep responses whose mean squared log-ratio is small (verl "seq_mean_k2")."""

    formula: ClassVar[str] = "mean_t((prox - sampler)^2 / 2) <= {bound}"
    reduce = staticmethod(whole_mean)


@dataclass(frozen=True)
class SequenceMeanK3(K3Bound):
    """Keep responses whose mean k3 is small (verl "seq_mean_k3"); unlike in k1, opposite signs do not cancel."""

    formula: ClassVar[str] = "mean_t(k3(prox, sampler)) <= {bound}"
    reduce = staticmethod(whole_mean)


@dataclass(frozen=True)
class SequenceMaxK2(K2Bound):
    """Keep responses without any token of large squared log-ratio (verl "seq_max_k2")."""

    formula: ClassVar[str] = "max_t((prox - sampler)^2 / 2) <= {bound}"
    reduce = staticmethod(row_largest)


@dataclass(frozen=True)
class SequenceMaxK3(K3Bound):
    """Keep responses without any token of large k3 (verl "seq_max_k3")."""

    formula: ClassVar[str] = "max_t(k3(prox, sampler)) <= {bound}"
    reduce = staticmethod(row_largest)


@dataclass(frozen=True)
class SequenceOutlier(RatioBounds):
    """Keep responses without any token whose ratio is outside the bounds (SkyRL's outlier mask)."""

    of_log_rho: ClassVar[str] = "{}"
    reduce = staticmethod(each_token)

    @property
    def formula(self) -> str:
        return f"{super().formula} for every t"

    def __call__(
        self,
        old_logprobs: Float[Tensor, "N T"],
        sampler_logprobs: Float[Tensor, "N T"],
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Bool[Tensor, "N T"]:
        within = super().__call__(old_logprobs, sampler_logprobs, sampled_mask)
        return sampled_mask & ~(sampled_mask & ~within).any(dim=1, keepdim=True)


@dataclass(frozen=True)
class TokenTv(TvBound):
    """Keep tokens whose probability differs little (OpenRLHF's "tv" gate; ROLL's probability difference)."""

    formula: ClassVar[str] = "|exp(prox) - exp(sampler)| <= {bound}"
    per_token: ClassVar[bool] = True
    reduce = staticmethod(each_token)


@dataclass(frozen=True)
class SequenceMeanTv(TvBound):
    """Keep responses whose tokens' probabilities differ little on average (OpenRLHF's "tv" gate of sequences)."""

    formula: ClassVar[str] = "mean_t(|exp(prox) - exp(sampler)|) <= {bound}"
    reduce = staticmethod(whole_mean)


@dataclass(frozen=True)
class TokenBinaryKl(BinaryKlBound):
    """Keep tokens whose binary KL is small (OpenRLHF's "binary_kl" gate; KPop in AReaL, with `direction: either`)."""

    per_token: ClassVar[bool] = True
    reduce = staticmethod(each_token)

    @property
    def formula(self) -> str:
        return f"{self.direction.written} <= {{bound}}"


@dataclass(frozen=True)
class SequenceMeanBinaryKl(BinaryKlBound):
    """Keep responses whose mean binary KL is small (FlashREINFORCE in OpenRLHF)."""

    reduce = staticmethod(whole_mean)

    @property
    def formula(self) -> str:
        return f"mean_t({self.direction.written}) <= {{bound}}"
