"""Updates: how many optimiser steps one batch of rollouts is cut into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from grpo_lab.tricks.base import require


@dataclass(frozen=True)
class Updates:
    """Cut the problems of a rollout batch into `minibatches` optimiser steps, groups kept whole.

    With one minibatch the learner is the old policy, every ratio is 1 and no clip can act; with more, the
    later minibatches are trained off-policy and a trust region has work to do.
    """

    minibatches: int

    def __post_init__(self) -> None:
        require(self.minibatches >= 1, self, "minibatches", "at least 1")

    def split(self, num_problems: int) -> Iterator[range]:
        """Ranges of problem indices, one per optimiser step, equal in size."""
        assert num_problems % self.minibatches == 0, "checked by compat.py before the run"
        size = num_problems // self.minibatches
        for start in range(0, num_problems, size):
            yield range(start, start + size)
