"""LoRA: low-rank weights that train beside frozen ones (arXiv:2106.09685), through peft.

The model keeps its class and its parts: peft puts each adapted matrix into a layer of its own. So everything that
reads the model works as before, and three things differ: what is trained, what the sampler gets, and that the
reference is the same model with its adapter off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from grpo_lab.distributed import ranks, tensors
from grpo_lab.distributed.tensors import like
from grpo_lab.policy.loading import Lora
from grpo_lab.types import Tensor

_NAME = "default"


def add_adapter(model: PreTrainedModel, lora: Lora, seed: int) -> None:
    """Freeze the model and add an adapter that changes nothing yet: B is 0, A is drawn from `seed`.

    Raises ValueError if peft is not installed, or the model has no such modules.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("lora needs peft: pip install peft, or set model.lora.rank=0") from error
    targets = _linear_layers(model) if lora.targets == ["all-linear"] else lora.targets
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=targets, lora_dropout=0.0, bias="none")  # pyright: ignore[reportArgumentType]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(config, model, adapter_name=_NAME)
        except ValueError as error:
            raise ValueError(
                f"model.lora.targets={lora.targets} fit nothing: this model's linear layers are "
                f"{', '.join(_linear_layers(model))}"
            ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_adapter(name))
        if _is_adapter(name):
            parameter.data = parameter.data.float()


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """The last names of the linear layers without the output head, such as q_proj."""
    head = model.get_output_embeddings()
    parts = model.named_modules()
    return sorted({name.rpartition(".")[2] for name, part in parts if isinstance(part, nn.Linear) and part is not head})


def _is_adapter(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The adapted layers by name; {} for a model without an adapter, whether or not peft is installed."""
    return {name: part for name, part in model.named_modules() if hasattr(part, "lora_A")}


def adapted(model: nn.Module) -> bool:
    """True if the model has an adapter."""
    return bool(_layers(model))


def adapter_weights(model: nn.Module) -> dict[str, Tensor]:
    """The adapter's own weights, for a checkpoint; {} without one."""
    return {name: tensors.full(tensor) for name, tensor in model.state_dict().items() if _is_adapter(name)}


def load_adapter(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Restore what `adapter_weights` returned. Raises ValueError if it is of an adapter of another shape."""
    own = {name: tensor for name, tensor in model.state_dict().items() if _is_adapter(name)}
    differ = [name for name in own.keys() | weights.keys() if name not in own or name not in weights]
    differ += [name for name in own.keys() & weights.keys() if own[name].shape != weights[name].shape]
    if differ:
        raise ValueError(
            f"the checkpoint's adapter is of another shape ({sorted(differ)[0]}): give model.lora the values it had"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(like(weights[name], tensor))


@torch.no_grad()
def whole_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's weights under the names they have without an adapter, with what the adapter adds.

    One merged matrix exists at a time. Without an adapter these are the model's own tensors. If the model is split over
    ranks, all of them must go through the weights, and each gets them whole, one at a time.
    """
    layers = _layers(model)
    for name, tensor in model.state_dict().items():
        if _is_adapter(name):
            continue
        owner, _, last = name.rpartition(".base_layer.")
        if owner in layers and last == "weight":
            layer = layers[owner]
            added = layer.get_delta_weight(_NAME)  # pyright: ignore[reportCallIssue] of peft's LoraLayer
            yield f"{owner}.{last}", tensors.full((tensor.float() + added.float()).to(tensor.dtype))
        else:
            yield name.replace(".base_layer.", "."), tensors.full(tensor)


def save_whole(model: PreTrainedModel, folder: Path) -> None:
    """Write the model as `save_pretrained` does, merged with its adapter: a model that any program loads.

    The first rank writes; all must call it.
    """
    if not adapted(model) and not isinstance(model, FSDPModule):
        model.save_pretrained(folder)
        return
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    weights = ((name, one.cpu() if ranks.is_first() else None) for name, one in whole_weights(model))
    chosen = {name: one for name, one in weights if name not in tied}
    if ranks.is_first():
        model.save_pretrained(folder, state_dict=chosen)


@contextlib.contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The model as it was before it got its adapter."""
    layers = list(_layers(model).values())
    for layer in layers:
        vars(layer)["_disable_adapters"] = True  # peft's enable_adapters changes which weights are trained, too
    try:
        yield
    finally:
        for layer in layers:
            vars(layer)["_disable_adapters"] = False
