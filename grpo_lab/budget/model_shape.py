"""The shape of a decoder, and what follows from it: weights, operations, and bytes of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.checks import require_field, require_positive

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True)
class ModelShape:
    """A dense decoder with grouped keys and values, gated MLP and biases on q, k, v: Qwen2.5 and its like."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    vocabulary: int
    tied: bool  # whether the output head is the embedding table

    def __post_init__(self) -> None:
        require_positive(self, "layers", "width", "heads", "kv_heads", "head_dim", "mlp", "vocabulary")
        require_field(self.heads % self.kv_heads == 0, self, "heads", "a multiple of kv_heads")

    @cached_property
    def weights(self) -> int:
        """All weights, embeddings included."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = 2 * self.width * queries + 2 * self.width * keys + queries + 2 * keys
        layer = attention + 3 * self.width * self.mlp + 2 * self.width
        tables = 1 if self.tied else 2
        return self.layers * layer + tables * self.vocabulary * self.width + self.width

    @cached_property
    def flops(self) -> ModelFlops:
        """Operations as the account counts them: the table is looked up, the head is multiplied."""
        looked_up = 0 if self.tied else self.vocabulary * self.width
        return ModelFlops(self.weights - looked_up, 4 * self.layers * self.heads * self.head_dim)

    @cached_property
    def kv_bytes(self) -> int:
        """Bytes of keys and values for each token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BF16
