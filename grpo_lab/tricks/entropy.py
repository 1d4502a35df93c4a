"""Entropy: exploration pressure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_lab.tricks.base import Trick


@dataclass(frozen=True)
class Entropy(Trick, ABC):
    """A term per token, added to the token's loss and aggregated with it."""

    needs_gradient: ClassVar[bool]

    @abstractmethod
    def __call__(self, entropy: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        """The term from the token's entropy in nats; with gradient where `needs_gradient`."""


@dataclass(frozen=True)
class NoEntropy(Entropy):
    """No pressure: entropy is logged as a vital sign and left alone."""

    touches_nothing: ClassVar[bool] = True
    needs_gradient: ClassVar[bool] = False

    def __call__(self, entropy: Float[Tensor, "M T"]) -> Float[Tensor, "M T"]:
        return torch.zeros_like(entropy)
