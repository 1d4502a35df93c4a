"""The optimiser: configuration, learning-rate warm-up, gradient clipping, and the report of an update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.distributed import ranks, tensors
from grpo_lab.types import Tensor


@dataclass(frozen=True)
class UpdateReport:
    """Norms of one update over all parameters, and the learning rate it used.

    A trick that scales the loss changes `gradient_norm` (before clipping), even if Adam cancels it in
    `update_norm` (the norm of the change of the weights). `squares` [parameters] are the squared norms of their changes
    over the learning rate, on their device: a GPU is waited for only when `update_norm` is read.
    """

    gradient_norm: float
    learning_rate: float
    squares: Tensor

    @property
    def update_norm(self) -> float:
        return self.learning_rate * sum(self.squares.tolist()) ** 0.5


@dataclass(frozen=True)
class Optimizer(ABC):
    """How a gradient becomes an update; `learning_rate` is the highest that it reaches."""

    max_grad_norm: float
    learning_rate: float

    @abstractmethod
    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        """A fresh torch optimiser over `parameters`."""

    @abstractmethod
    def step(self, optimizer: torch.optim.Optimizer, update: int, spent: float = 0.0) -> UpdateReport:
        """Clip the gradients, apply update number `update` (0-based) and clear the gradients.

        `spent` is the share of the run's budget that is spent, from 0 to 1. Raises FloatingPointError, before any
        weight changes, if the gradient is not finite.
        """


class Decay(Enum):
    """How the learning rate falls with the share of the budget that is spent; the forms are transformers'.

    constant             it stays
    cosine               half a cosine, from the beginning
    warmup_stable_decay  it stays until `decay_share` of the budget is left, then half a cosine (arXiv:2404.06395)
    """

    constant = "constant"
    cosine = "cosine"
    warmup_stable_decay = "warmup_stable_decay"


_torch: Any = torch  # its operations on lists of tensors have no public name
_AT_ONCE = 2**25  # numbers of which the norm of an update is computed together: 128 MB of fp32 in each of two lists
_TICKS = 1_000_000  # of a budget, which may be counted in tokens: transformers' schedules count steps


@cache
def _falling(decay: Decay, decay_share: float, final_share: float) -> Callable[[int], float]:
    """The factor of the learning rate at each of the budget's ticks."""
    import transformers

    idle = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the schedules want an optimiser, and only give a function
    if decay is Decay.cosine:
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(idle, 0, _TICKS, min_lr_rate=final_share)
    else:
        falls = round(decay_share * _TICKS)
        schedule = transformers.get_wsd_schedule(
            idle, 0, falls, num_stable_steps=_TICKS - falls, min_lr_ratio=final_share
        )
    return schedule.lr_lambdas[0]


@dataclass(frozen=True)
class Adamw(Optimizer):
    """AdamW (arXiv:1711.05101): a linear warm-up over `warmup_updates`, then a rate that stays or falls.

    It falls to `final_share` of the rate at the end of the budget.
    """

    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    warmup_updates: int
    decay: Decay
    decay_share: float  # of the budget, over which warmup_stable_decay falls
    final_share: float

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "eps", "max_grad_norm")
        require_not_negative(self, "weight_decay", "warmup_updates")
        for beta in ("beta1", "beta2"):
            require_field(0 <= getattr(self, beta) < 1, self, beta, "in [0, 1)")
        require_field(0 < self.decay_share <= 1, self, "decay_share", "in (0, 1]")
        require_field(0 <= self.final_share <= 1, self, "final_share", "in [0, 1]")

    def build(self, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        held = list(parameters)
        return torch.optim.AdamW(
            held,
            lr=self.learning_rate,
            betas=(self.beta1, self.beta2),
            eps=self.eps,
            weight_decay=self.weight_decay,
            fused=True if held and all(one.is_cuda for one in held) else None,
        )

    def rate(self, update: int, spent: float = 0.0) -> float:
        """The learning rate of update number `update`, with this share of the budget spent."""
        rate = self.learning_rate * min(1.0, (update + 1) / max(self.warmup_updates, 1))
        if self.decay is Decay.constant:
            return rate
        return rate * _falling(self.decay, self.decay_share, self.final_share)(round(min(spent, 1.0) * _TICKS))

    def step(self, optimizer: torch.optim.Optimizer, update: int, spent: float = 0.0) -> UpdateReport:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = tensors.full(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, total)
        gradient_norm, *counts = _read(total, [optimizer.state.get(p, {}).get("step") for p in parameters])
        if not math.isfinite(gradient_norm):
            raise FloatingPointError(f"the gradient's norm is {gradient_norm} at update {update}")
        rate = self.rate(update, spent)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        squares = self._squares(optimizer, parameters, [count + 1 for count in counts], rate)
        optimizer.zero_grad(set_to_none=True)
        return UpdateReport(gradient_norm, rate, squares)

    def _squares(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> Tensor:
        """The squared norm of each parameter's change over `rate` [parameters]; it has had `counts` updates.

        Recomputed from Adam's moments so that no copy of the weights is needed.
        """
        found = []
        for part in _portions(parameters):
            states = [optimizer.state[parameters[place]] for place in part]
            firsts, seconds = ([tensors.local(one[name]) for one in states] for name in ("exp_avg", "exp_avg_sq"))
            directions = _torch._foreach_div(firsts, [1 - self.beta1 ** counts[place] for place in part])
            roots = _torch._foreach_div(seconds, [1 - self.beta2 ** counts[place] for place in part])
            _torch._foreach_sqrt_(roots)
            _torch._foreach_add_(roots, self.eps)
            _torch._foreach_div_(directions, roots)
            if self.weight_decay:
                before = _torch._foreach_mul(directions, rate)
                _torch._foreach_add_(before, [tensors.local(parameters[place].detach()) for place in part])
                _torch._foreach_div_(before, 1 - rate * self.weight_decay)
                _torch._foreach_mul_(before, self.weight_decay)
                _torch._foreach_add_(directions, before)
            found += _squared(directions)
        if ranks.number() == 1:
            return torch.stack(found)
        # every rank holds a part of every parameter
        return ranks.added_up(torch.tensor([sum(torch.stack(found).tolist())], dtype=torch.float64))


def _read(norm: Tensor, steps: list[Tensor | None]) -> list[float]:
    """The gradient's norm and each parameter's number of updates so far, in one transfer."""
    return torch.stack([norm, *(norm.new_zeros(()) if one is None else one.to(norm) for one in steps)]).tolist()


def _portions(parameters: list[Tensor]) -> Iterator[list[int]]:
    """The places of the parameters in turn, about `_AT_ONCE` numbers at a time: copies of more would fill a GPU."""
    part, numbers = [], 0
    for place, parameter in enumerate(parameters):
        if part and numbers + parameter.numel() > _AT_ONCE:
            yield part
            part, numbers = [], 0
        part.append(place)
        numbers += parameter.numel()
    yield part


def _squared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The squared norm of each, in float64."""
    if tensors[0].is_cuda:  # one pass without a copy in float64
        return list(_torch._foreach_pow(_torch._foreach_norm(tensors, 2, dtype=torch.float64), 2))
    return [one.double().pow(2).sum() for one in tensors]
