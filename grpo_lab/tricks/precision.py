"""Precision: numerical precision of the learner and of the sampler, two axes with the same options."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_positive


class LmHead(Enum):
    """Arithmetic of the output head: the same as the rest of the model, or fp32 (MiniMax-M1)."""

    same = "same"
    fp32 = "fp32"


@dataclass(frozen=True)
class Precision(ABC):
    """The data type of matrix products. Master weights and log-probs are fp32 in every option.

    `agreement` is the largest allowed mean difference in log-prob, in nats per token, between sampler and learner with
    the same weights. A run stops beyond it.
    """

    lm_head: LmHead
    agreement: float

    dtype_name: ClassVar[str]  # the torch name
    rounds: ClassVar[bool]  # whether rounding can make sampler and learner differ by an amount that matters
    scales_loss: ClassVar[bool] = False  # whether small gradients underflow in this type unless the loss is scaled up
    quantizes: ClassVar[bool] = False  # whether linear layers round further than their type does: for samplers only

    def __post_init__(self) -> None:
        require_positive(self, "agreement")

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype_name)

    @property
    def quantizes_inputs(self) -> bool:
        """True if linear layers round their inputs too."""
        return False


@dataclass(frozen=True)
class Fp32(Precision):
    """Single precision everywhere: sampler and learner agree to about 1e-6 nats per token."""

    dtype_name: ClassVar[str] = "float32"
    rounds: ClassVar[bool] = False


@dataclass(frozen=True)
class Bf16(Precision):
    """bfloat16: 8 bits of mantissa, the range of fp32.

    As learner precision: fp32 master weights, matrix products under autocast. As sampler precision: the
    weights are rounded to bfloat16, as in inference engines. `lm_head: fp32` keeps the output head in fp32, which
    removed most of the mismatch in MiniMax-M1 (arXiv:2506.13585).
    """

    dtype_name: ClassVar[str] = "bfloat16"
    rounds: ClassVar[bool] = True


@dataclass(frozen=True)
class Fp16(Precision):
    """float16: 11 bits of mantissa, and numbers from 6e-8 to 65,504.

    Eight times finer than bfloat16, so sampler and learner agree better if both use it (arXiv:2510.26788). As learner
    precision: matrix products under autocast, and the loss is scaled up so that small gradients do not underflow
    (torch.amp.GradScaler with its default settings). An update whose gradient overflows is skipped and the scale
    halved. As sampler precision: the weights are rounded to float16.
    """

    dtype_name: ClassVar[str] = "float16"
    rounds: ClassVar[bool] = True
    scales_loss: ClassVar[bool] = True


@dataclass(frozen=True)
class Fp8Simulated(Precision):
    """FP8 sampling on any hardware: linear layers rounded to float8_e4m3fn, products in bfloat16.

        scale = max |w| / 448 of each output channel,  w = scale * e4m3(w / scale)

    With `activations` the inputs of each linear layer are rounded in the same way, with a scale for each token, as W8A8
    engines do. Scales are dynamic: of the weights at every sync, of the inputs at every token. Embedding, output head,
    norms and KV cache stay in bfloat16, as in vLLM. The learner is untouched, so the difference shows as `mismatch/*`
    and is what corrections act on (FP8 rollouts: arXiv:2605.13907). Differs from FP8 hardware: the rounded numbers are
    rounded again to bfloat16, and sums run in the CPU's or GPU's own order. Differs from vLLM's `fp8_per_tensor`: a
    scale for each channel, as in per-channel checkpoints, and not one for the whole matrix. Mixture-of-experts
    weights that are no linear layers are not rounded.
    """

    activations: bool

    dtype_name: ClassVar[str] = "bfloat16"
    rounds: ClassVar[bool] = True
    quantizes: ClassVar[bool] = True

    @property
    def quantizes_inputs(self) -> bool:
        return self.activations
