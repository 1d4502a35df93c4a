"""FP8 simulated: numbers rounded to float8_e4m3fn with a scale for each row, and kept in their own type."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from grpo_lab.types import Float, Tensor

_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448
_SMALLEST_SCALE = 1 / (_LARGEST * 512)  # 512 = 1 / the smallest positive number of the type: rows of zeros stay zeros


def rounded(rows: Float[Tensor, "*R N"]) -> Float[Tensor, "*R N"]:
    """Each row over its scale, rounded to the nearest e4m3 number, times its scale."""
    wide = rows.float()
    scale = (wide.abs().amax(dim=-1, keepdim=True) / _LARGEST).clamp(min=_SMALLEST_SCALE)
    return ((wide / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale).to(rows.dtype)


def simulate_fp8(model: PreTrainedModel, activations: bool) -> frozenset[str]:
    """Round the linear layers of a model, but its output head, in place; the names of the rounded weights.

    `activations`: let them round their inputs too, token by token. Raises ValueError for a model without linear layers.
    """
    head = model.get_output_embeddings()
    layers = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}
    if not layers:
        raise ValueError(
            f"sampler_precision=fp8_simulated rounds linear layers, and {type(model).__name__} has none: choose "
            "sampler_precision=bf16 or another model"
        )
    with torch.no_grad():
        for layer in layers.values():
            layer.weight.copy_(rounded(layer.weight))
            if activations:
                layer.register_forward_pre_hook(_with_rounded_input)
    return frozenset(f"{name}.weight" for name in layers)


def _with_rounded_input(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return rounded(inputs[0]), *inputs[1:]
