"""Loading models with transformers, and the precision of their weights and output head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_lab.policy.loading import Attention, Loading
from grpo_lab.policy.model_folder import require_complete
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import Tensor


class Fp32Head(nn.Linear):
    """An output head that multiplies in fp32, whatever dtype the rest of the model uses."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(input.float(), self.weight.float(), bias)


PLAIN = Loading()


def read_model(folder: Path, dtype: torch.dtype, **chosen: Any) -> PreTrainedModel:
    """The causal LM of `folder`, on the CPU: the only place of the package that reads a model's weights.

    Raises ValueError that names the weights if the files are not those of config.json: transformers would make random
    numbers of missing ones.
    """
    read: Any = AutoModelForCausalLM.from_pretrained(  # two values for one, which its declaration does not say
        folder, dtype=dtype, use_safetensors=True, trust_remote_code=False,
        output_loading_info=True, ignore_mismatched_sizes=True, **chosen,
    )  # fmt: skip
    model, loaded = read
    require_complete(folder, loaded)
    return model


def load_model(folder: Path, lm_head: LmHead, loading: Loading = PLAIN) -> PreTrainedModel:
    """The causal LM of `folder`: fp32 weights, unless `loading` says otherwise, on the CPU, in eval mode.

    It stays in eval mode for training too: dropout would make learner and sampler different policies.
    The model's own sampling settings are dropped: the run has its own, and transformers refuses to save
    some that it loads.
    """
    chosen = {} if loading.attention is Attention.auto else {"attn_implementation": loading.attention.value}
    try:
        model = read_model(folder, getattr(torch, loading.frozen.value), **chosen)
    except ImportError as error:
        raise ValueError(f"model.attention={loading.attention.value}: {str(error).splitlines()[0]}") from error
    loaded = model.generation_config
    model.generation_config = GenerationConfig(
        bos_token_id=loaded.bos_token_id, eos_token_id=loaded.eos_token_id, pad_token_id=loaded.pad_token_id
    )
    head = model.get_output_embeddings()
    if lm_head is LmHead.fp32 and type(head) is nn.Linear:
        # Changing the class keeps the parameter, its name and its tie to the embedding.
        head.__class__ = Fp32Head
    if loading.compiled:
        model.base_model.compile(dynamic=True)  # in place: names and class stay
    return model.eval()


def uncompiled(model: PreTrainedModel) -> contextlib.AbstractContextManager:
    """Within it a compiled model runs eagerly: a probe of a few tokens would compile a graph of its own."""
    compiled = model.base_model._compiled_call_impl is not None
    return torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext()


def moved(model: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """The model itself, its weights and buffers on that device."""
    return model.to(device)  # pyright: ignore[reportArgumentType] transformers wraps `to` in a way that hides its self


def recompute_layers(model: nn.Module) -> None:
    """Gradient checkpointing: keep only each layer's input and compute the layer again in the backward pass.

    transformers does this in train mode only, where dropout would act too. Raises ValueError for a model that does
    not declare its layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no layers to recompute: set gradient_checkpointing=false")
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **named)


def round_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters in place and leave the buffers alone.

    A rotary embedding's frequencies are a buffer. Rounded to bfloat16, 0.7001 becomes 0.6992: at position 1000
    that is a rotation error of almost a radian. Inference engines keep the frequencies exact.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class _Rounded(Function):
    """Weights in another type, and their gradients in fp32: on a GPU a few launches each."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _copies(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        wide = iter(_copies([one for one in gradients if one is not None], torch.float32))
        return None, *(None if one is None else next(wide) for one in gradients)


def _copies(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    copies = [torch.empty_like(one, dtype=dtype) for one in tensors]
    torch._foreach_copy_(copies, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
    return tuple(copies)


def with_rounded_weights(body: nn.Module, inputs: dict[str, Any]) -> Any:
    """The output of `body` under autocast, its linear layers' weights rounded together before, and not one by one."""
    weights = {
        f"{name}.{key}": weight
        for name, module in body.named_modules() if type(module) is nn.Linear
        for key, weight in module.named_parameters(recurse=False)
        if weight.requires_grad and weight.dtype is torch.float32 and not isinstance(weight, DTensor)
    }  # fmt: skip
    if not weights:
        return body(**inputs)
    rounded: Any = _Rounded.apply(product_dtype(next(iter(weights.values()))), *weights.values())
    if body._compiled_call_impl is not None:
        for one in rounded:  # their sizes never change
            torch._dynamo.mark_static(one)
    return functional_call(body, dict(zip(weights, rounded)), (), inputs, tie_weights=False)


def widen(logits: Tensor) -> Tensor:
    """Cast logits to fp32, so that a softmax never runs in half precision; float64 stays float64."""
    return logits if logits.dtype is torch.float64 else logits.float()


def product_dtype(states: Tensor) -> torch.dtype:
    """The type in which a matrix product of these states runs: autocast's where it is on, else their own."""
    kind = states.device.type
    # Not torch.amp.is_autocast_available: torch 2.11 cannot trace it, and a compiled model would be two graphs a layer.
    half = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if half else states.dtype
