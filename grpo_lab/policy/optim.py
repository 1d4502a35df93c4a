"""The optimisers: configuration, learning-rate warm-up, gradient clipping, and the report of an update."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, ClassVar, Protocol, runtime_checkable

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

    unused = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the schedules want an optimiser, and only give a function
    if decay is Decay.cosine:
        schedule = transformers.get_cosine_with_min_lr_schedule_with_warmup(unused, 0, _TICKS, min_lr_rate=final_share)
    else:
        falls = round(decay_share * _TICKS)
        schedule = transformers.get_wsd_schedule(
            unused, 0, falls, num_stable_steps=_TICKS - falls, min_lr_ratio=final_share
        )
    return schedule.lr_lambdas[0]


@dataclass(frozen=True)
class Optimizer(ABC):
    """How a gradient becomes an update: a linear warm-up over `warmup_updates`, then a rate that stays or falls.

    `learning_rate` is the highest that it reaches. It falls to `final_share` of it at the end of the budget.
    """

    max_grad_norm: float
    learning_rate: float
    warmup_updates: int
    decay: Decay
    decay_share: float  # of the budget, over which warmup_stable_decay falls
    final_share: float

    scale_invariant: ClassVar[bool] = True  # whether a multiple of all gradients gives the same updates, but for eps
    state_label: ClassVar[str] = "the optimiser's state, float32"

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "max_grad_norm")
        require_not_negative(self, "warmup_updates")
        require_field(0 < self.decay_share <= 1, self, "decay_share", "in (0, 1]")
        require_field(0 <= self.final_share <= 1, self, "final_share", "in [0, 1]")

    @abstractmethod
    def build(self, parameters: Iterable[Tensor], model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        """A fresh torch optimiser over `parameters`; `model` says which layer each is of."""

    @abstractmethod
    def state_numbers(self, trained: int, matrices: int) -> int:
        """Numbers of state for `trained` weights, of which `matrices` are of hidden matrices."""

    @abstractmethod
    def _apply(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> list[Tensor]:
        """Make the update; the squared norm of each parameter's change over `rate`, of this rank's part.

        `counts` are the updates that each has had.
        """

    def rate(self, update: int, spent: float = 0.0) -> float:
        """The learning rate of update number `update`, with this share of the budget spent."""
        rate = self.learning_rate * min(1.0, (update + 1) / max(self.warmup_updates, 1))
        if self.decay is Decay.constant:
            return rate
        return rate * _falling(self.decay, self.decay_share, self.final_share)(round(min(spent, 1.0) * _TICKS))

    def step(self, optimizer: torch.optim.Optimizer, update: int, spent: float = 0.0) -> UpdateReport:
        """Clip the gradients, apply update number `update` (0-based) and clear the gradients.

        `spent` is the share of the run's budget that is spent, from 0 to 1. Raises FloatingPointError, before any
        weight changes, if the gradient is not finite.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        total = tensors.full(torch.nn.utils.get_total_norm([p.grad for p in parameters]))
        torch.nn.utils.clip_grads_with_norm_(parameters, self.max_grad_norm, total)
        gradient_norm, *counts = _read(total, [optimizer.state.get(p, {}).get("step") for p in parameters])
        if not math.isfinite(gradient_norm):
            raise FloatingPointError(f"the gradient's norm is {gradient_norm} at update {update}")
        rate = self.rate(update, spent)
        for group in optimizer.param_groups:
            group["lr"] = rate
        squares = _over_ranks(self._apply(optimizer, parameters, counts, rate))
        optimizer.zero_grad(set_to_none=True)
        return UpdateReport(gradient_norm, rate, squares)


@dataclass(frozen=True)
class Adamw(Optimizer):
    """AdamW (arXiv:1711.05101)."""

    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    state_label: ClassVar[str] = "AdamW's two moments, float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "eps")
        require_not_negative(self, "weight_decay")
        for beta in ("beta1", "beta2"):
            require_field(0 <= getattr(self, beta) < 1, self, beta, "in [0, 1)")

    def build(self, parameters: Iterable[Tensor], model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        held = list(parameters)
        return torch.optim.AdamW(held, **self._settings(held))

    def _settings(self, parameters: Sequence[Tensor]) -> dict[str, Any]:
        """The arguments of torch's AdamW."""
        return {
            "lr": self.learning_rate,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
            "fused": True if parameters and all(one.is_cuda for one in parameters) else None,
        }

    def state_numbers(self, trained: int, matrices: int) -> int:
        return 2 * trained

    def _apply(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> list[Tensor]:
        optimizer.step()
        return self._squares(optimizer, parameters, [count + 1 for count in counts], rate)

    def _squares(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> list[Tensor]:
        """The squared norm of each parameter's change over `rate`; it has had `counts` updates.

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
            found += squared(directions)
        return found


@dataclass(frozen=True)
class Sgd(Optimizer):
    """Stochastic gradient descent (arXiv:2602.07729).

        g = clipped gradient + weight_decay * w,  m = momentum * m + g,  w = w - rate * m

    With momentum 0, m = g and there is no state. An update is as large as its gradient: a trick that halves the loss
    halves the step, which AdamW hides. Where every gradient is below max_grad_norm nothing bounds it otherwise.
    """

    momentum: float
    weight_decay: float

    scale_invariant: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "weight_decay")
        require_field(0 <= self.momentum < 1, self, "momentum", "in [0, 1)")

    def build(self, parameters: Iterable[Tensor], model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, self.learning_rate, self.momentum, weight_decay=self.weight_decay)

    def state_numbers(self, trained: int, matrices: int) -> int:
        return trained if self.momentum else 0

    def _apply(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> list[Tensor]:
        if self.momentum:
            optimizer.step()
            return squared([tensors.local(optimizer.state[one]["momentum_buffer"]) for one in parameters])
        found = []
        for part in _portions(parameters):
            gradients = [parameters[place].grad for place in part]
            directions = [tensors.local(one) for one in gradients if one is not None]
            if self.weight_decay:
                weights = [tensors.local(parameters[place].detach()) for place in part]
                directions = _torch._foreach_add(directions, weights, alpha=self.weight_decay)
            found += squared(directions)
        optimizer.step()
        return found


@dataclass(frozen=True)
class Muon(Adamw):
    """Muon (arXiv:2502.16982): the momentum of each hidden matrix with its singular values pushed to 1.

        m = momentum * m + (1 - momentum) * g,  u = momentum * m + (1 - momentum) * g  (Nesterov)
        W = W - rate * weight_decay * W - rate * 0.2 * sqrt(max(rows, columns)) * orthogonal(u)

    `orthogonal` is five Newton-Schulz steps. The factor gives an update the root mean square of AdamW's, so
    AdamW's learning rates hold (`adjust_lr_fn=match_rms_adamw` in torch.optim.Muon). Embeddings, output head, norms and
    biases are AdamW's, with its own numbers. Differs from torch.optim.Muon: Newton-Schulz in fp32 and on whole
    matrices, so that neither microbatches nor ranks change a result by more than rounding.
    """

    momentum: float

    state_label: ClassVar[str] = Optimizer.state_label

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(0 <= self.momentum < 1, self, "momentum", "in [0, 1)")

    def build(self, parameters: Iterable[Tensor], model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        from grpo_lab.policy.muon import MuonAndAdamw  # torch's optimisers are large

        assert model is not None, "hidden matrices are found by the model's layers"
        held, hidden = list(parameters), {id(one) for one in hidden_matrices(model)}
        matrices = [one for one in held if id(one) in hidden]
        rest = [one for one in held if id(one) not in hidden]
        return MuonAndAdamw(matrices, rest, self.momentum, self._settings(held))

    def state_numbers(self, trained: int, matrices: int) -> int:
        return 2 * trained - matrices

    def _apply(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], counts: list[float], rate: float
    ) -> list[Tensor]:
        from grpo_lab.policy.muon import MuonAndAdamw

        assert isinstance(optimizer, MuonAndAdamw), "what build gives"
        optimizer.step()
        rest = {id(one) for one in optimizer.param_groups[1]["params"]}
        places = [place for place, one in enumerate(parameters) if id(one) in rest]
        own = [parameters[place] for place in places]
        return optimizer.squares + (
            self._squares(optimizer, own, [counts[place] + 1 for place in places], rate) if own else []
        )


def hidden_matrices(model: torch.nn.Module) -> list[Tensor]:
    """The 2-D parameters of a model that belong neither to an embedding nor to the output head."""
    outer = [part for part in model.modules() if isinstance(part, torch.nn.Embedding)]
    if isinstance(model, _HasHead) and (head := model.get_output_embeddings()) is not None:
        outer.append(head)
    left_out = {id(one) for part in outer for one in part.parameters()}
    return [one for one in model.parameters() if one.ndim == 2 and id(one) not in left_out]


@runtime_checkable
class _HasHead(Protocol):
    def get_output_embeddings(self) -> Any: ...


def _over_ranks(squares: list[Tensor]) -> Tensor:
    """The squared norms of one update; their sum over the ranks where every rank has a part of every parameter."""
    if ranks.number() == 1:
        return torch.stack(squares)
    return ranks.added_up(torch.tensor([sum(torch.stack(squares).tolist())], dtype=torch.float64))


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


def squared(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The squared norm of each, in float64."""
    if tensors[0].is_cuda:  # one pass without a copy in float64
        return list(_torch._foreach_pow(_torch._foreach_norm(tensors, 2, dtype=torch.float64), 2))
    return [one.double().pow(2).sum() for one in tensors]
