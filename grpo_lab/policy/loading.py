"""How a model is loaded for training: types, attention, and the shape of an adapter. Loads no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from grpo_lab.checks import require
from grpo_lab.types import WeightType

PRETRAINED_RATE = 5e-5  # published runs train all weights of a pretrained model at 1e-7 to 1e-5


@dataclass(frozen=True)
class Lora:
    """The shape of an adapter: W + alpha / rank * B A for each matrix W whose module's name ends as `targets` say.

    `targets: [all-linear]` stands for every linear layer but the output head.
    """

    rank: int  # 0 for none: all weights are trained
    alpha: float
    targets: list[str]

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "at least 0", "0 trains all weights")
        require(self.alpha > 0, "lora.alpha", self.alpha, "above 0", "the adapter is scaled by alpha / rank")
        require(len(self.targets) > 0, "lora.targets", "[]", "at least one name", "write [all-linear]")

    @property
    def highest_rate(self) -> float:
        """The learning rate beyond which RL is likely to break a pretrained model; inf for an adapter."""
        return math.inf if self.rank else PRETRAINED_RATE

    def note(self, learning_rate: float) -> str:
        """A note on the adapter's learning rate for readers of the run."""
        return (
            f"LoRA of rank {self.rank} at a learning rate of {learning_rate:g}: the best rate for LoRA is about "
            'ten times that for full fine-tuning ("LoRA Without Regret", 2025), so tune it separately for each'
        )


class Attention(Enum):
    """The attention that transformers computes where rows are not packed; `auto` leaves the choice to it."""

    auto = "auto"
    eager = "eager"
    sdpa = "sdpa"
    flash_attention_2 = "flash_attention_2"


@dataclass(frozen=True)
class Loading:
    """How a model is loaded for training; without an adapter all its weights are trained."""

    frozen: WeightType = WeightType.fp32
    attention: Attention = Attention.auto
    compiled: bool = False
    lora: Lora | None = None
