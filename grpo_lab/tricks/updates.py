"""Updates: how many optimiser steps are taken on one batch of rollouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from grpo_lab.checks import require_field


@dataclass(frozen=True)
class Updates:
    """Make `passes` passes over a rollout batch, each in `minibatches` optimiser steps. Groups are never split.

    With one update the learner is the old policy, every ratio is 1 and no clip can act. With more, later updates are
    off-policy and the trust region acts. `passes` is the mu of GRPO and TRL's `num_iterations`. `fresh_optimizer`
    resets the optimiser's moments before each rollout batch, as Kimi k1.5 (arXiv:2501.12599) does; there each batch
    starts a new optimisation problem with the old policy as reference. The learning rate warm-up does not restart.
    """

    minibatches: int
    passes: int
    fresh_optimizer: bool

    def __post_init__(self) -> None:
        require_field(self.minibatches >= 1, self, "minibatches", "at least 1")
        require_field(self.passes >= 1, self, "passes", "at least 1")

    @property
    def number(self) -> int:
        """Optimiser steps per rollout batch."""
        return self.minibatches * self.passes

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepare the optimiser for a rollout batch."""
        if self.fresh_optimizer:
            optimizer.state.clear()

    def split(self, num_problems: int) -> Iterator[range]:
        """Ranges of problem indices, one per optimiser step, equal in size; each pass covers all problems."""
        assert num_problems % self.minibatches == 0, "a rule checks it before the run"
        size = num_problems // self.minibatches
        for _ in range(self.passes):
            for start in range(0, num_problems, size):
                yield range(start, start + size)
