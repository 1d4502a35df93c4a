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
from grpo_lab.engines import native_session
from grpo_lab.policy.critic import LiveCritic
from grpo_lab.policy.optim import Adamw
from grpo_lab.rollout.continuations import Ends
from grpo_lab.rollout.queue import RolloutQueue
from grpo_lab.run import state as workbench
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
    estimates: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)
    updates: list[Update] = field(default_factory=list)
    critic_updates: list[Update] = field(default_factory=list)


@dataclass(repr=False)
class Recording:
    """A run of the real loop. `versions` are the weights that the sampler was given, by their number."""

    run: RunConfig | None = None
    bench: RunState | None = None
    steps: list[Step] = field(default_factory=list)
    versions: dict[int, Weights] = field(default_factory=dict)

    def note_sync(self) -> None:
        self.versions[self.bench.updates] = copy_of(self.bench.learner)

    def begin_step(self, batch: Groups) -> None:
        bench, critic = self.bench, self.bench.critic
        values = None if critic is None else copy_of(critic.trunk, critic.head)
        self.steps.append(Step(bench.ledger.steps, batch, copy_of(bench.learner), values, bench.entropy_coef))

    def note_gradient(self, optimizer: torch.optim.Optimizer) -> None:
        bench, step, critic = self.bench, self.steps[-1], self.bench.critic
        if optimizer is bench.optimizer:
            step.updates[-1].gradient = gradient_of(bench.learner)
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
    load, rounded, opened = workbench.load_model, native_session.round_weights, workbench.open_critic

    def rounding(model: nn.Module, dtype: torch.dtype) -> None:
        rounded(model, torch.float64 if dtype is torch.float32 else dtype)

    def opening(*asked: Any) -> LiveCritic:
        critic = opened(*asked)
        critic.trunk.double()
        critic.head.double()
        return critic

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workbench, "load_model", lambda *asked: load(*asked).double())
        patch.setattr(workbench, "open_critic", opening)
        patch.setattr(native_session, "round_weights", rounding)
        yield


@contextlib.contextmanager
def recorded() -> Iterator[Recording]:
    """Within, the real loop notes what it does; the first run alone may be in it."""
    recording = Recording()
    train, update, optimizer_step, rewards = loop.train, loop.update, Adamw.step, Ends.rewards
    open_queue = RunState.open_queue

    def training(run: RunConfig, bench: RunState, recorder: Any) -> None:
        recording.run, recording.bench = run, bench
        recording.note_sync()
        train(run, bench, recorder)

    def supplying(bench: RunState, run: RunConfig) -> RolloutQueue:
        supply = open_queue(bench, run)
        take, sync = supply.take, supply.sync

        def taking() -> Any:
            delivery = take()
            recording.begin_step(delivery.batch)
            return delivery

        def syncing() -> None:
            sync()
            recording.note_sync()

        supply.take, supply.sync = taking, syncing
        return supply

    def updating(run: RunConfig, bench: RunState, batches: list[Batch], *rest: Any) -> None:
        rows = sum(len(batch.rows) for batch in batches)
        recording.steps[-1].updates.append(Update(copy_of(bench.learner), rows))
        update(run, bench, batches, *rest)

    def stepping(self: Adamw, optimizer: torch.optim.Optimizer, number: int) -> Any:
        recording.note_gradient(optimizer)
        return optimizer_step(self, optimizer, number)

    def estimating(self: Ends, states: Any, samples: int, greedy: bool = False) -> Tensor:
        found = rewards(self, states, samples, greedy)
        worth = {(state.place, state.prefix): float(value) for state, value in zip(states, found.mean(dim=1))}
        recording.steps[-1].estimates |= worth
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "train", training)
        patch.setattr(loop, "update", updating)
        patch.setattr(RunState, "open_queue", supplying)
        patch.setattr(Adamw, "step", stepping)
        patch.setattr(Ends, "rewards", estimating)
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
