"""Critic: a learned value of each state, with its own optimiser, minibatches and warm-up."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.updates import Updates


@dataclass(frozen=True)
class Critic(ABC):
    """How the value function is built and trained. Used when the baseline needs one."""

    learning_rate: float
    warmup_updates: int  # linear warm-up of its learning rate
    minibatches: int  # optimiser steps for each rollout batch
    passes: int  # over each rollout batch
    value_clip: float  # how far a value may move from its old value in one batch, reward units; 0 for no limit
    head_range: float  # the head's weights start uniform in +-this; at 0 every value starts at 0
    pretrain_steps: int  # number of first steps in which only the critic is trained

    owns_trunk: ClassVar[bool]  # whether its gradient trains the model that computes its hidden states

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
        """True if step `step` (from 0) trains only the critic."""
        return step < self.pretrain_steps


@dataclass(frozen=True)
class SeparateModel(Critic):
    """A separate model that starts as a copy of the policy (PPO for language models; Open-Reasoner-Zero)."""

    owns_trunk: ClassVar[bool] = True


@dataclass(frozen=True)
class ValueHead(Critic):
    """One linear layer on the policy's hidden states, without gradient into them.

    Differs from SeparateModel: no second model in memory and one forward pass less. In return the critic cannot train
    its features, and they change with every policy update.
    """

    owns_trunk: ClassVar[bool] = False
