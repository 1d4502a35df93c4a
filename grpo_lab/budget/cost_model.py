"""Simulated time: how long generation, training and a sync would take, and what overlaps with what.

A schedule that overlaps generation with training saves time that a single process cannot save. So every run keeps a
second clock that is no clock: a function of the lengths of its responses and of six numbers that can be measured. It
tells what a schedule is worth in time beside what its staleness costs in learning, and in streaming schedules it
decides under which weights a token is drawn.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

from grpo_lab.tracking.run_reader import read_steps
from grpo_lab.tricks.base import require_not_negative, require_positive
from grpo_lab.types import Float

_SHORTEST = 1e-9  # seconds: a fit may find that something costs nothing


@dataclass(frozen=True)
class CostModel:
    """Seconds that things take on a sampler and on a learner which do not share a device."""

    decode_step: float  # one step of decoding, however many responses take part in it
    decode_token: float  # and for each of them
    read_token: float  # a token that is read and not drawn: prompts, caches computed anew, log-probs of given text
    train_token: float  # a token of a forward and backward pass
    update: float  # an optimiser step
    sync: float  # the weights from learner to sampler, during which both wait

    def __post_init__(self) -> None:
        require_not_negative(self, "decode_token", "read_token", "update", "sync")
        require_positive(self, "decode_step", "train_token")

    def decoding(self, lengths: Sequence[int], slots: int) -> float:
        """Responses of these lengths, started in this order as soon as one of `slots` places is free."""
        ends: list[int] = []
        for length in lengths:
            begins = 0 if len(ends) < slots else heapq.heappop(ends)
            heapq.heappush(ends, begins + length)
        return self.decode_step * max(ends, default=0) + self.decode_token * sum(lengths)

    def reading(self, tokens: int) -> float:
        """Tokens that are read once."""
        return self.read_token * tokens

    def training(self, tokens: int, updates: int) -> float:
        """Tokens of forward and backward passes, and the optimiser steps they end in."""
        return self.train_token * tokens + self.update * updates


@dataclass
class SimulatedClock:
    """Until when sampler and learner are busy, and for how long each of them was; checkpointed with the run."""

    sampler: float = 0.0
    learner: float = 0.0
    generating: float = 0.0
    training: float = 0.0

    def generate(self, seconds: float, not_before: float = 0.0) -> float:
        """The sampler works for so long, from the moment on at which it may; returns when it has ended."""
        self.sampler = max(self.sampler, not_before) + seconds
        self.generating += seconds
        return self.sampler

    def train(self, seconds: float, not_before: float) -> float:
        """The same for the learner."""
        self.learner = max(self.learner, not_before) + seconds
        self.training += seconds
        return self.learner

    def metrics(self) -> dict[str, float]:
        """Shares of all time so far that the sampler generated and the learner trained; {} before anything."""
        total = max(self.sampler, self.learner)
        if total == 0:
            return {}
        return {"simulated/generating": self.generating / total, "simulated/training": self.training / total}

    def to_state(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Measured:
    """A cost model fitted to runs, and how far it is from their own times: mean |error| of a step, as a share."""

    cost_model: CostModel
    steps: int
    generate_error: float
    train_error: float


def measure(folders: Sequence[Path]) -> Measured:
    """The cost model of finished or running runs whose sampler kept current, from the times of their steps.

    Non-negative least squares, in shares of what was seen, of the time a step generated over its decoding steps and
    tokens, and of the time it trained over its tokens and updates. What a step costs and what a response in it costs
    are told apart where batches differ in size: give runs of several `problems_per_step`. Generation and training are
    each taken as they were, on whatever they shared; a token that is read is taken to cost a third of one that is
    trained on, as forward passes do. Raises ValueError where a run has fewer than 10 steps with times, or where its
    generation ran ahead of training.
    """
    table = np.concatenate([_times(folder) for folder in folders])
    generated, took = table[:, 4], table[:, 5]
    step, token = _fit(table[:, :2], generated)
    trained, update = _fit(table[:, 2:4], took)
    cost_model = CostModel(
        max(step, _SHORTEST), token, trained / 3, max(trained, _SHORTEST), update, float(np.median(table[:, 6]))
    )
    generate = cost_model.decode_step * table[:, 0] + cost_model.decode_token * table[:, 1]
    train = cost_model.train_token * table[:, 2] + cost_model.update * table[:, 3]
    errors = [float(np.abs(fit / seen - 1).mean()) for fit, seen in ((generate, generated), (train, took))]
    return Measured(cost_model, len(table), *errors)


def _fit(what: Float[np.ndarray, "S C"], seconds: Float[np.ndarray, "S"]) -> list[float]:
    """What one unit of each column costs, none less than nothing; a step that took long has no more say than others."""
    from scipy.optimize import nnls

    return nnls(what / seconds[:, None], np.ones_like(seconds))[0].tolist()


def _times(folder: Path) -> Float[np.ndarray, "S 7"]:
    """Of each step: decoding steps, tokens drawn, tokens trained on, updates, and seconds to generate, train, sync."""
    config, rows, before = OmegaConf.load(folder / "config.yaml"), [], 0
    for record in read_steps(folder):
        numbers, times = record.metrics, record.timing
        sampled, before = numbers["budget/sampled_tokens"] - before, numbers["budget/sampled_tokens"]
        if "time/generate" not in times:
            continue
        responses = numbers["rollout/groups"] * config.group_size
        drawn = responses * numbers["rollout/length"]
        in_loss = numbers["rollout/trained"] * (drawn + (sampled - drawn) * config.group_size)
        rows.append(
            [numbers["rollout/longest"], drawn, in_loss * config.updates.passes, numbers["train/updates"]]
            + [times["time/generate"], times["time/train"], times["time/sync"]]
        )
        if numbers["rollout/staleness"] > 0:
            raise ValueError(f"{folder} generated ahead, and not in the step that is timed: give one of schedule=sync")
    if len(rows) < 10:
        raise ValueError(f"{folder} has {len(rows)} steps with times, and 10 are needed: train it for longer")
    return np.array(rows[2:])  # the first steps warm caches up
