"""Estimated use of a device by a run: bytes of memory and seconds of a step, from the shape of its model.

Weights, gradients, AdamW's state and the KV cache are counted to the byte. Activations are those of a decoder with RMS
norms and a gated MLP (Llama, Qwen): the tensors that autograd keeps for the backward pass of one microbatch. Not
counted: CUDA's context, what the allocator cannot use, and temporary results of kernels other than the output head's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.budget.model_shape import BF16, FP32, ModelShape

GIB = 2**30
MARGIN = 0.2  # how far a total may be off: it is rejected beyond the memory by this share, and a warning within
# fp32 copies of a chunk of logits that exist at once: logits, scaled, log-softmax, its exponential, their product.
_LOGITS_COPIES = 5
_INT64 = 8


@dataclass(frozen=True)
class ModelSize:
    """A model's shape and operations, and how many numbers its parameters hold; tied ones count once.

    `linear` counts those of linear layers without the output head, which autocast copies into half precision.
    `trained` and `trained_tensors` are those that the optimiser moves: all, or an adapter's (`adapter` of them).
    """

    shape: ModelShape
    flops: ModelFlops
    weights: int
    linear: int
    trained: int
    trained_tensors: int
    adapter: int = 0

    @property
    def head(self) -> int:
        """Numbers of the output head."""
        return self.shape.vocabulary * self.shape.width

    def optimizer_bytes(self, numbers: int) -> int:
        """The bytes of `numbers` fp32 numbers of an optimiser's state, and of an fp32 counter for each tensor."""
        return FP32 * (numbers + self.trained_tensors) if numbers else 0


@dataclass(frozen=True)
class Microbatch:
    """Tokens of one training pass: `tokens` in the model, `attended` in the sequences of its attention, `scored`.

    Where responses share their prompt in a packed row, each attends to a copy of it; only responses are scored.
    """

    tokens: int
    attended: int
    scored: int

    @classmethod
    def of(cls, limit: int, prompt: int, response: int, group: int, packs: bool) -> Microbatch:
        """The largest pass of at most `limit` tokens, or of one row, with prompts and responses of these lengths."""
        tokens = max(limit, prompt + response)
        own = prompt + group * response if packs else group * (prompt + response)
        group_size = group * (prompt + response)
        return cls(tokens, round(tokens * group_size / own), round(tokens * group * response / own))


def layer_activations(shape: ModelShape, batch: Microbatch, half: bool) -> int:
    """Bytes that one layer keeps for its backward pass. `half`: products run in half precision, under autocast."""
    heads, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    width = BF16 if half else FP32
    norms = 2 * (2 * shape.width + 1) * FP32  # input, normed input and the root of each
    inputs = (5 if half else 2) * shape.width + heads  # autocast casts the input of each of q, k, v, gate and up anew
    attention = (2 * heads + 2 * keys) * width + shape.heads * FP32  # q, k, v, result, and its log-sum-exp
    return batch.tokens * (norms + (inputs + 4 * shape.mlp) * width) + batch.attended * attention


def activations(size: ModelSize, batch: Microbatch, half: bool, casts: bool, recomputes: bool) -> int:
    """Bytes that all layers keep for the backward pass. `casts`: weights are kept in half precision beside their own.

    `recomputes`: each layer keeps its input only, and one at a time is computed again. All share the rotary angles and
    the indices of tokens.
    """
    shape, layer = size.shape, layer_activations(size.shape, batch, half)
    states = batch.tokens * shape.width * FP32
    shared = batch.tokens * (2 * shape.head_dim * FP32 + 4 * _INT64) + batch.attended * _INT64
    layers = shape.layers * states + layer if recomputes else shape.layers * layer
    return layers + 2 * states + shared + (BF16 * size.linear if casts else 0)


def head_bytes(size: ModelSize, batch: Microbatch, logits_per_chunk: int) -> int:
    """Bytes of the output head: its input hidden states, and one chunk of logits with its temporaries."""
    logits = min(logits_per_chunk, batch.scored * size.shape.vocabulary)
    return batch.scored * size.shape.width * FP32 + _LOGITS_COPIES * FP32 * logits


def kv_cache_bytes(shape: ModelShape, rows: int, tokens: int, width: int) -> int:
    """Bytes of the keys and values of `rows` responses with room for `tokens` tokens, in numbers of `width` bytes."""
    return rows * tokens * shape.kv_bytes // BF16 * width


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes by what they hold: throughout the run, and in addition while it samples and while it trains.

    `engine_share`: share of the device that an engine takes for itself (vLLM). `left_out`: what is not counted.
    """

    held: Mapping[str, int]
    sampling: Mapping[str, int]
    training: Mapping[str, int]
    engine_share: float = 0.0
    left_out: tuple[str, ...] = field(default=())

    @property
    def stages(self) -> dict[str, int]:
        """Peak bytes of each stage; `open` is what the whole run holds."""
        held = sum(self.held.values())
        extra = {"generate": self.sampling, "train": self.training}
        return {"open": held} | {stage: held + sum(parts.values()) for stage, parts in extra.items()}

    def needed(self, memory: float) -> float:
        """Bytes at the peak, on a device with `memory` bytes."""
        return max(self.stages.values()) + self.engine_share * memory

    def too_much(self, memory: float) -> bool | None:
        """True if it exceeds `memory` bytes; None where it is within MARGIN of it."""
        share = self.needed(memory) / memory
        return None if abs(share - 1) <= MARGIN else share > 1


@dataclass(frozen=True)
class StepFlops:
    """Model FLOPs of one step: drawing responses, reading them without gradient, and training."""

    sampling: int
    reading: int
    training: int

    def seconds(self, peak: float, sampled: float, read: float, trained: float) -> float:
        """Seconds at these shares of `peak` operations a second."""
        return (self.sampling / sampled + self.reading / read + self.training / trained) / peak


# Measured in one run: an H200, a Llama of 135M weights, 64 x 8 x 256 tokens, bf16 (tests/benchmarks). Larger models
# reach more. The peak is that of a bf16 matmul, operations a second.
RECORDED_PEAK = 806e12
RECORDED_SHARES = {"sampled": 0.0362, "read": 0.154, "trained": 0.086}
