"""Curriculum: which prompts come next."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Curriculum(ABC):
    """Chooses the problems of a step from the training split."""

    @abstractmethod
    def draw(self, step: int, num_problems: int, size: int, seed: int) -> list[int]:
        """Indices into a training split of `size` problems, `num_problems` of them, without repeats."""


@dataclass(frozen=True)
class Uniform(Curriculum):
    """Walk through the training split in a fresh random order each epoch.

    Each epoch is one permutation drawn from (seed, epoch) and cut into whole batches; the few problems
    left over at its end wait for the next permutation, so no batch holds a problem twice. The draw is a
    function of (seed, step) alone: every arm of a seed sees the same problems, and a resumed run needs
    no state.
    """

    def draw(self, step: int, num_problems: int, size: int, seed: int) -> list[int]:
        batches = size // num_problems
        if batches == 0:
            raise ValueError(
                f"a batch of {num_problems} problems cannot be drawn from a training split of {size}: "
                "lower problems_per_step or choose a larger task"
            )
        epoch, batch = divmod(step, batches)
        order = np.random.Generator(np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))).permutation(size)
        return order[batch * num_problems : (batch + 1) * num_problems].tolist()
