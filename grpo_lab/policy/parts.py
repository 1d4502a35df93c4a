"""Loading a model of which each rank keeps its rows only, so that no rank ever holds it whole.

transformers reads the files, with its own rules of renamed, fused and tied weights, and its own report of what is
missing. Each weight is whole for the moment in which it arrives. A stand-in of the same shape, which has no memory of
that size, takes its place until `sharding.shard` gives FSDP2 the rows. With one rank nothing is split.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lab.distributed import ranks
from grpo_lab.distributed.tensors import own_rows, split
from grpo_lab.policy.models import moved
from grpo_lab.types import Tensor

_PART = "_grpo_lab_part"
_LOADED = "_is_hf_initialized"  # by which transformers marks a weight that it has read
_ONE_BY_ONE = "HF_DEACTIVATE_ASYNC_LOAD"  # else transformers reads ahead, all of the model in the end


@dataclass
class _Part:
    """This rank's rows of a weight, split as `torch.chunk` does, and the placeholder that the parameter holds."""

    rows: Tensor
    stand_in: Tensor


@contextmanager
def in_parts() -> Iterator[None]:
    """Within, each of several ranks keeps its rows only of the models that it loads; all must load the same.

    Such a model goes through `placed` and then `sharding.shard`; before that it computes within `layer_by_layer` only.
    """
    if ranks.number() == 1:
        yield
        return
    before = os.environ.get(_ONE_BY_ONE)
    os.environ[_ONE_BY_ONE] = "1"
    hook = register_module_parameter_registration_hook(_keep_rows)  # pyright: ignore[reportArgumentType] its own docstring
    try:
        yield
    finally:
        hook.remove()
        if before is None:
            del os.environ[_ONE_BY_ONE]
        else:
            os.environ[_ONE_BY_ONE] = before


def _keep_rows(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    """A stand-in for a weight that was read, which torch registers instead; None leaves it as it is."""
    if parameter is None or parameter.is_meta or parameter.ndim == 0 or _part(parameter) is not None:
        return None
    if not getattr(parameter, _LOADED, False):  # missing in the files: the model is going to be refused
        return None
    whole = parameter.detach()
    # transformers compares weights that are tied, and unties those which differ: then these sums differ too.
    stand_in = whole.sum(0, keepdim=True, dtype=whole.dtype).expand(whole.shape)
    standing = nn.Parameter(stand_in, parameter.requires_grad)
    setattr(standing, _LOADED, True)
    setattr(standing, _PART, _Part(own_rows(whole).clone(), stand_in))
    return standing


def _part(parameter: nn.Parameter) -> _Part | None:
    return getattr(parameter, _PART, None)


def own_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The names of a loaded model's weights, and what this rank has of each."""
    for name, parameter in model.named_parameters():
        part = _part(parameter)
        yield name, parameter if part is None else part.rows


def placed(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model itself, with all that this rank has of it on that device."""
    parts = [part for parameter in model.parameters() if (part := _part(parameter)) is not None]
    if not parts:
        return moved(model, device)
    for part in parts:
        part.rows = part.rows.to(device)
    for tensor in chain(model.parameters(), model.buffers()):
        if not (isinstance(tensor, nn.Parameter) and _part(tensor)):
            tensor.data = tensor.data.to(device)
    return model


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers that the model declares: what FSDP2 gathers at once."""
    return [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]


@contextmanager
def layer_by_layer(model: nn.Module) -> Iterator[None]:
    """Within, a model in parts computes as a whole one, if all ranks do: each layer is whole while it runs.

    What is outside of the layers (embedding, norm, head) is whole throughout.
    """
    if not any(map(_part, model.parameters())):
        yield
        return
    layers = layers_of(model)
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    outside = [parameter for parameter in model.parameters() if parameter not in inside]
    hooks = [layer.register_forward_pre_hook(lambda layer, _: _gather(layer.parameters())) for layer in layers]
    hooks += [
        layer.register_forward_hook(lambda layer, *_: _release(layer.parameters()), always_call=True)
        for layer in layers
    ]
    try:
        _gather(outside)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        _release(outside)


def _gather(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if (part := _part(parameter)) is not None:
            parameter.data = split(part.rows, parameter.shape).full_tensor()


def _release(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        if (part := _part(parameter)) is not None:
            parameter.data = part.stand_in


def taken(model: nn.Module) -> dict[str, Tensor]:
    """This rank's rows by the names of their weights, which leaves those on the meta device; {} for a whole model."""
    rows, empty = dict[str, Tensor](), dict[nn.Parameter, nn.Parameter]()
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if (part := _part(parameter)) is not None:
            owner, _, last = name.rpartition(".")
            meta = nn.Parameter(torch.empty_like(part.stand_in, device="meta").contiguous(), parameter.requires_grad)
            setattr(model.get_submodule(owner), last, empty.setdefault(parameter, meta))
            rows[name] = part.rows
    return rows


def give_back(model: nn.Module, rows: Mapping[str, Tensor]) -> None:
    """Fill a model that FSDP2 has split on the meta device with what `taken` took; tied weights stay tied."""
    filled, weights = dict[str, nn.Parameter](), dict[nn.Parameter, nn.Parameter]()
    for name, empty in model.named_parameters(remove_duplicate=False):
        if name in rows:
            filled[name] = weights.setdefault(empty, nn.Parameter(split(rows[name], empty.shape), empty.requires_grad))
    model.load_state_dict(filled, strict=False, assign=True)
