"""What the real training loop does, noted at its seams while it runs.

For each step what it trains on, the weights before it, and the gradient that each optimiser step got.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_lab import loop
from grpo_lab.config.run_config import RunConfig
from grpo_lab.config.stages import UpdateSettings
from grpo_lab.engines import native_session
from grpo_lab.learner import update as learner
from grpo_lab.policy.critic import LiveCritic
from grpo_lab.policy.optim import Adamw
from grpo_lab.rollout.continuations import PrefixRollouts
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run import state as run_state
from grpo_lab.run.state import RunState
from grpo_lab.types import Batch, Groups

Weights = dict[str, Tensor]


def copy_of(*modules: nn.Module) -> Weights:
    """The modules' weights as they are now, under their names; a critic's head is given behind its trunk."""
    return {
        f"{'head.' if place else ''}{name}": value.detach().clone()
        for place, module in enumerate(modules)
        for name, value in module.state_dict().items()
    }


@dataclass(repr=False)
class Update:
    """Weights before an optimiser step on so many responses, and its gradient before clipping; None if left out."""

    weights: Weights
    rows: int
    gradient: Weights | None = None


@dataclass(repr=False)
class Step:
    """What one step of the real loop had to begin with, and the updates it took."""

    number: int
    batch: Groups
    learner: Weights
    critic: Weights | None
    entropy_coef: float
    kl_coef: float
    estimates: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)


@dataclass(repr=False)
class Recording:
    """A run of the real loop. `versions` are the weights that the sampler was given, by their number."""

    run: RunConfig | None = None
    state: RunState | None = None
    steps: list[Step] = field(default_factory=list)
    versions: dict[int, Weights] = field(default_factory=dict)

    def note_sync(self) -> None:
        self.versions[self.state.updates] = copy_of(self.state.learner)

    def begin_step(self, batch: Groups) -> None:
        state, critic = self.state, self.state.critic
        values = None if critic is None else copy_of(critic.trunk, critic.head)
        self.steps.append(
            Step(state.account.steps, batch, copy_of(state.learner), values, state.entropy_coef, state.kl_coef)
        )

    def note_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        state, step, critic = self.state, self.steps[-1], self.state.critic
        if optimizer is state.optimizer:
            step.updates[-1].gradient = gradient_of(state.learner)
        else:
            modules = (critic.trunk, critic.head)
            step.critic_updates.append(Update(copy_of(*modules), 0, gradient_of(*modules)))


def gradient_of(*modules: nn.Module) -> Weights:
    """The gradient of each parameter, 0 for one that has none."""
    return {
        f"{'head.' if place else ''}{name}": torch.zeros_like(value) if value.grad is None else value.grad.clone()
        for place, module in enumerate(modules)
        for name, value in module.named_parameters()
    }


@contextlib.contextmanager
def in_double_precision() -> Iterator[None]:
    """Within, fp32 models are opened in float64: what then differs from the reference is no matter of rounding."""
    load, rounded, opened = run_state.load_model, native_session.round_weights, run_state.open_critic

    def rounding(model: nn.Module, dtype: torch.dtype) -> None:
        rounded(model, torch.float64 if dtype is torch.float32 else dtype)

    def opening(*asked: Any) -> LiveCritic:
        critic = opened(*asked)
        critic.trunk.double()
        critic.head.double()
        return critic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_state, "load_model", lambda *asked: load(*asked).double())
        patch.setattr(run_state, "open_critic", opening)
        patch.setattr(native_session, "round_weights", rounding)
        yield


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Within, the real loop notes what it does; the first run alone may be in it."""
    recording = Recording()
    train, update, optimizer_step, rewards = loop.train, learner.update, Adamw.step, PrefixRollouts.rewards
    open_queue = loop.open_queue

    def training(run: RunConfig, state: RunState, queue: RolloutQueue, recorder: Any) -> None:
        recording.run, recording.state = run, state
        recording.note_sync()
        train(run, state, queue, recorder)

    def queueing(*parts: Any) -> RolloutQueue:
        queue = open_queue(*parts)
        take, sync = queue.take, queue.sync

        def taking() -> Any:
            batch = take()
            recording.begin_step(batch.groups)
            return batch

        def syncing(*weights: Any) -> None:
            sync(*weights)
            recording.note_sync()

        queue.take, queue.sync = taking, syncing
        return queue

    def updating(settings: UpdateSettings, state: RunState, batches: list[Batch], *rest: Any) -> None:
        rows = sum(len(batch.rows) for batch in batches)
        recording.steps[-1].updates.append(Update(copy_of(state.learner), rows))
        update(settings, state, batches, *rest)

    def stepping(self: Adamw, optimizer: torch.optim.Optimizer, number: int, spent: float = 0.0) -> Any:
        recording.note_gradient(optimizer)
        return optimizer_step(self, optimizer, number, spent)

    def estimating(self: PrefixRollouts, states: Any, samples: int, greedy: bool = False) -> Tensor:
        found = rewards(self, states, samples, greedy)
        worth = {(asked.place, asked.prefix): float(value) for asked, value in zip(states, found.mean(dim=1))}
        recording.steps[-1].estimates |= worth
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", training)
        patch.setattr(learner, "update", updating)
        patch.setattr(loop, "open_queue", queueing)
        patch.setattr(Adamw, "step", stepping)
        patch.setattr(PrefixRollouts, "rewards", estimating)
        yield recording


def norm(gradient: Weights) -> float:
    """Over all parameters."""
    return sum(float(value.double().pow(2).sum()) for value in gradient.values()) ** 0.5


def furthest(found: Sequence[Weights | None], expected: Sequence[Weights | None]) -> float:
    """Norm of the difference over the norm of what is expected, the largest of all gradients.

    One that all but cancels counts as a hundredth of the largest. Infinite where only one of the two is there.
    """
    assert len(found) == len(expected)
    largest, worst = max((norm(gradient) for gradient in expected if gradient is not None), default=0.0), 0.0
    for have, want in zip(found, expected):
        if have is None or want is None:
            worst = max(worst, 0.0 if have is want else float("inf"))
            continue
        assert have.keys() == want.keys()
        gap = norm({name: have[name].double() - value for name, value in want.items()})
        worst = max(worst, gap / max(norm(want), largest / 100))
    return worst
