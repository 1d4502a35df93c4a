"""How long a stage takes on real GPUs, from the shape of a model and the data sheet of a GPU: a roofline.

Nothing here was measured. A stage takes the longer of two times: its operations at the GPU's peak, or its bytes at
the bandwidth of memory or link, each times the share of the peak that a stated `Efficiency` allows.
Bytes are those of bf16 weights and keys and values; Seconds throughout.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_lab.budget.model_shape import BF16, FP32, ModelShape
from grpo_lab.checks import require_field, require_not_negative, require_positive

STATES = 16  # bytes a weight: bf16 weight and gradient, fp32 master weight and Adam's two moments
ON_HOST = 12  # of these, what may wait in the host's memory: master weight and moments
_CHECKPOINT = BF16 + ON_HOST


@dataclass(frozen=True)
class Gpu:
    """A GPU's data sheet. Links are counted in one direction."""

    flops: float  # dense bf16 operations a second
    bandwidth: float  # bytes a second of its memory
    memory: float  # bytes
    nvlink: float  # bytes a second to the GPUs of its node
    network: float  # bytes a second to other nodes
    host: float  # bytes a second to the host's memory
    per_node: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "flops", "bandwidth", "memory", "nvlink", "network", "host", "per_node")


@dataclass(frozen=True)
class Efficiency:
    """Which share of a peak is reached; an assumption, as every number of it."""

    train: float  # of the GPU's operations, in forward and backward passes and in reading given text
    decode: float  # the same where many responses are decoded at once
    bandwidth: float  # of the memory's bandwidth in decoding
    link: float  # of NVLink and network when weights are sent
    step: float  # seconds of a decoding step that neither operations nor bytes explain
    reduce: float  # seconds of latency of an all-reduce in a tensor-parallel group, two a layer
    reserve: float  # bytes of a training GPU that states cannot use: activations, logits, buffers
    used: float  # share of a generating GPU's memory that weights and KV cache may fill
    disk: float  # bytes a second at which the whole job writes a checkpoint

    def __post_init__(self) -> None:
        require_positive(self, "train", "decode", "bandwidth", "link", "used", "disk")
        require_not_negative(self, "step", "reduce", "reserve")
        for name in ("train", "decode", "bandwidth", "link", "used"):
            require_field(getattr(self, name) <= 1, self, name, "at most 1")


@dataclass(frozen=True)
class Engine:
    """A tensor-parallel group of `gpus` that generates with one copy of the weights."""

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    gpus: int = 1

    @classmethod
    def of(cls, shape: ModelShape, gpu: Gpu, efficiency: Efficiency) -> Engine:
        """The smallest group of 1, 2, 4, .. GPUs of a node whose weights fill at most half of what it may use.

        Raises ValueError where a node is too small.
        """
        gpus = 1
        while BF16 * shape.weights > gpus * efficiency.used * gpu.memory / 2:
            gpus *= 2
        if gpus > gpu.per_node:
            raise ValueError(f"{shape.weights / 1e9:.0f}B weights leave no room for a KV cache in one node: shard more")
        return cls(shape, gpu, efficiency, gpus)

    def step(self, rows: float | int, context: float | int) -> float:
        """Seconds to decode one token of each of `rows` responses, whose caches hold `context` tokens together."""
        flops, use = self.shape.flops, self.efficiency
        read = BF16 * flops.weights + self.shape.kv_bytes * context
        work = 2 * flops.weights * rows + flops.attention * context
        memory = read / (self.gpus * use.bandwidth * self.gpu.bandwidth)
        compute = work / (self.gpus * use.decode * self.gpu.flops)
        return max(memory, compute) + use.step + (2 * self.shape.layers * use.reduce if self.gpus > 1 else 0.0)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        free = self.gpus * self.efficiency.used * self.gpu.memory - BF16 * self.shape.weights
        return max(0, int(free // self.shape.kv_bytes))

    def prefill(self, tokens: Sequence[int]) -> float:
        """Seconds to read prompts of these lengths."""
        work = sum(self.shape.flops.span(0, length) for length in tokens)
        return work / (self.gpus * self.efficiency.train * self.gpu.flops)


@dataclass(frozen=True)
class Learner:
    """`gpus` that train one model, its states sharded over all of them. A node may share one long row at no loss."""

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    gpus: int

    @property
    def fits(self) -> str:
        """Whether the states fit: "yes", "offloaded" (master weights and moments wait in the host's memory) or "no"."""
        free = self.gpus * (self.gpu.memory - self.efficiency.reserve)
        if STATES * self.shape.weights <= free:
            return "yes"
        return "offloaded" if (STATES - ON_HOST) * self.shape.weights <= free else "no"

    def _passes(self, lengths: Sequence[int], forwards: int) -> float:
        """Seconds for so many forwards' worth of work on rows that are dealt to nodes, longest first."""
        unit = min(self.gpus, self.gpu.per_node)
        loads = [0.0] * (self.gpus // unit)
        for length in sorted(lengths, reverse=True):
            heapq.heapreplace(loads, loads[0] + self.shape.flops.span(0, length))
        return forwards * max(loads) / (unit * self.efficiency.train * self.gpu.flops)

    def read(self, lengths: Sequence[int]) -> float:
        """Seconds for log-probs of given rows, prompt and response together: one forward pass."""
        return self._passes(lengths, 1)

    def train(self, lengths: Sequence[int], updates: int) -> float:
        """Seconds for forward and backward over all rows, split in order into `updates` minibatches, with updates."""
        size = -(-len(lengths) // updates)
        minibatches = [lengths[start : start + size] for start in range(0, len(lengths), size)]
        return sum(self._passes(rows, 3) + self.update for rows in minibatches)

    @property
    def update(self) -> float:
        """Seconds of an optimiser step: gradients all-reduced between nodes, states read and written."""
        moved = 2 * ON_HOST * self.shape.weights / self.gpus
        seconds = moved / (self.efficiency.bandwidth * self.gpu.bandwidth)
        if self.fits == "offloaded":
            seconds += moved / self.gpu.host
        nodes = self.gpus / self.gpu.per_node
        if nodes > 1:
            node_link = self.gpu.per_node * self.efficiency.link * self.gpu.network
            seconds += 2 * (nodes - 1) / nodes * FP32 * self.shape.weights / node_link
        return seconds

    def swap(self) -> float:
        """Seconds to move master weights and moments to the host and back, so that the same GPUs can generate."""
        return 2 * ON_HOST * self.shape.weights / self.gpus / self.gpu.host

    def checkpoint(self) -> float:
        """Seconds to write weights, master weights and moments."""
        return _CHECKPOINT * self.shape.weights / self.efficiency.disk


def send(shape: ModelShape, gpu: Gpu, efficiency: Efficiency, engines: int, across: bool, tree: bool = True) -> float:
    """Seconds until `engines` engines have new weights, over the network (`across` nodes) or within a node.

    `tree`: a pipelined broadcast, in which every engine passes on what it gets, so its time hardly grows with their
    number. Otherwise one sender serves them one after another.
    """
    link = efficiency.link * (gpu.network if across else gpu.nvlink)
    return BF16 * shape.weights / link * (1 if tree else engines)
