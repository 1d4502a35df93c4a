"""Muon over hidden matrices and AdamW over the rest, as one torch optimiser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from grpo_lab.distributed import tensors
from grpo_lab.policy.optim import squared
from grpo_lab.types import Tensor

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # coefficients of its quintic
_STEPS = 5


def orthogonal(matrix: Tensor) -> Tensor:
    """The matrix with its singular values pushed towards 1 (to about 0.7 to 1.2); 0 for a matrix of zeros."""
    first, third, fifth = _NEWTON_SCHULZ
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = wide @ wide.T
        wide = first * wide + (third * gram + fifth * gram @ gram) @ wide
    return wide.T if matrix.shape[0] > matrix.shape[1] else wide


class MuonAndAdamw(torch.optim.AdamW):
    """torch's AdamW over the second of its two groups, and Muon over the first, the matrices.

    `squares` are, of the latest update, the squared norms of the matrices' changes over the learning rate; where a
    matrix is split over the ranks, of this rank's part.
    """

    def __init__(
        self, matrices: list[Tensor], rest: list[Tensor], momentum: float, settings: Mapping[str, Any]
    ) -> None:
        super().__init__([{"params": matrices}, {"params": rest}], **settings)
        self.momentum, self.squares = momentum, list[Tensor]()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        matrices, *rest = self.param_groups
        moved = [one for one in matrices["params"] if one.grad is not None]
        self.squares = [self._turn(one, matrices["lr"], matrices["weight_decay"]) for one in moved]
        self.param_groups = rest
        try:
            super().step()
        finally:
            self.param_groups = [matrices, *rest]

    def _turn(self, weight: Tensor, rate: float, weight_decay: float) -> Tensor:
        """Update one matrix; the squared norm of its change over the rate."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None, "the caller asks"
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # AdamW's loading looks for one in every state
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["step"] += 1
        state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        whole = orthogonal(tensors.full(gradient.lerp(state["momentum_buffer"], self.momentum)))
        part = tensors.own_rows(whole) if whole.shape != tensors.local(weight).shape else whole
        own, factor = tensors.local(weight), 0.2 * max(weight.shape) ** 0.5
        direction = factor * part + weight_decay * own
        own.sub_(direction, alpha=rate)
        return squared([direction])[0]
