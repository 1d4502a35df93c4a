"""Weights, gradients and optimiser state split over the ranks of a run, by torch's FSDP2 (`fully_shard`).

With one rank nothing is split, and every function here gives back what it got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from grpo_lab.distributed import ranks
from grpo_lab.distributed.tensors import like
from grpo_lab.policy.output_head import linear_head
from grpo_lab.policy.parts import give_back, layer_by_layer, layers_of, taken
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Tensor

T = TypeVar("T")
_WITHIN = "_grpo_lab_within"


def shard(model: nn.Module, precision: Precision) -> None:
    """Split the model over the ranks in place: each layer on its own, and the rest of it together.

    Each rank's loss is its part of the optimiser step's, so gradients are summed over ranks and not averaged. In half
    precision the linear layers of each layer are gathered in that type, as autocast casts them. All else (norms,
    embedding, head) is gathered in fp32, where autocast leaves it. So the arithmetic is that of one process.
    A model that was loaded `in_parts` is never whole; another is on its device before.
    """
    if ranks.number() == 1 or isinstance(model, FSDPModule):
        return
    with layer_by_layer(model):
        linear_head(model)  # it compares whole tensors, once for each model
    rows = taken(model)
    mesh = ranks.mesh()
    exact = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    rounded = MixedPrecisionPolicy(precision.dtype, torch.float32, cast_forward_inputs=False)
    # With its adapter off, some of a layer's products do not run, and a group waits for all of its parts.
    rounds = precision.rounds and not any(hasattr(part, "lora_A") for part in model.modules())
    for layer in layers_of(model):
        products: list[nn.Module] = [part for part in layer.modules() if type(part) is nn.Linear]
        if rounds and products:
            fully_shard(products, mesh=mesh, mp_policy=rounded, reshard_after_forward=True)
        fully_shard(layer, mesh=mesh, mp_policy=exact, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=exact, reshard_after_forward=True)
    give_back(model, rows)
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    setattr(model, _WITHIN, MethodType(_call, model))
    register_fsdp_forward_method(model, _WITHIN)


def _call(model: nn.Module, work: Callable[[], T]) -> T:
    # A view would lose its hook for the backward pass if it was changed in place, so torch warns of it.
    return tree_map_only(torch.Tensor, torch.clone, work())


def within(model: nn.Module, work: Callable[[], T]) -> T:
    """`work()`, which may use parts of the model outside of its own forward: embedding, norm and head are whole there.

    It must return tensors, alone or in tuples, so that the backward pass finds them whole too.
    """
    return getattr(model, _WITHIN)(work) if isinstance(model, FSDPModule) else work()


def load_whole(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load whole weights into a module that may be split."""
    own = module.state_dict()
    module.load_state_dict({name: like(one, own[name]) if name in own else one for name, one in weights.items()})


@dataclass(frozen=True)
class Trained:
    """A module and the optimiser of those of its weights that train: what a checkpoint of several ranks splits."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def begun(self) -> bool:
        """True if the optimiser has made an update, and so has a state."""
        return bool(self.optimizer.state)

    def to_state(self) -> dict[str, Any]:
        """The optimiser's state by names of weights; each rank has its part. A fresh one is filled with zeros."""
        return get_optimizer_state_dict(self.module, self.optimizer)

    def from_state(self, state: dict[str, Any]) -> None:
        """Restore what `to_state` returned, on any number of ranks."""
        set_optimizer_state_dict(self.module, self.optimizer, state)


def load_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module, state: dict[str, Any]) -> None:
    """Load an optimiser's whole `state_dict`; its parameters are those of `module` that train, and may be split."""
    if not isinstance(next(iter(optimizer.param_groups[0]["params"])), DTensor) or not state["state"]:
        optimizer.load_state_dict(state)
        return
    trained = {parameter: name for name, parameter in module.named_parameters()}
    names = [trained[one] for group in optimizer.param_groups for one in group["params"]]
    named = {
        "state": {names[place]: moments for place, moments in state["state"].items()},
        "param_groups": [{**group, "params": [names[p] for p in group["params"]]} for group in state["param_groups"]],
    }
    set_optimizer_state_dict(module, optimizer, named, options=StateDictOptions(full_state_dict=True))
