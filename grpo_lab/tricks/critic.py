"""The critic: a learned value of each state, with an optimiser, minibatches and a warm-up of its own."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import require_field, require_not_negative, require_positive
from grpo_lab.tricks.updates import Updates


@dataclass(frozen=True)
class Critic(ABC):
    """How the value function is made and trained; used where the baseline needs one."""

    learning_rate: float
    warmup_updates: int  # of its learning rate, linear
    minibatches: int  # optimiser steps for each rollout batch
    passes: int  # over each rollout batch
    value_clip: float  # how far from its old value a value may be drawn in one batch, reward units; 0 for any
    head_range: float  # the head's weights begin uniform in +-this; 0 begins with the value 0 everywhere
    pretrain_steps: int  # first steps in which the critic learns and the policy does not

    owns_trunk: ClassVar[bool]  # whether its gradient goes into what makes its hidden states

    def __post_init__(self) -> None:
        require_positive(self, "learning_rate", "minibatches", "passes")
        require_not_negative(self, "warmup_updates", "value_clip", "head_range", "pretrain_steps")
        require_field(
            self.pretrain_steps < 100, self, "pretrain_steps", "below 100: the policy would stand still for long"
        )

    @property
    def updates(self) -> Updates:
        return Updates(self.minibatches, self.passes, fresh_optimizer=False)

    def policy_waits(self, step: int) -> bool:
        """Whether step `step` (from 0) trains the critic alone."""
        return step < self.pretrain_steps


@dataclass(frozen=True)
class SeparateModel(Critic):
    """A model of its own, beginning as a copy of the policy (PPO for language models; Open-Reasoner-Zero)."""

    owns_trunk: ClassVar[bool] = True


@dataclass(frozen=True)
class ValueHead(Critic):
    """One linear layer on the policy's hidden states, which feel no gradient of it.

    Differs from SeparateModel: no second model in memory and a forward pass less, for a critic that can only read what
    the policy's states happen to say, and whose inputs move with every policy update.
    """

    owns_trunk: ClassVar[bool] = False
