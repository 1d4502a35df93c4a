"""Simulated time: how long generation, training and a sync would take, and which of them overlap.

A schedule that overlaps generation with training saves time that a single process cannot save. So every run also
keeps simulated time, a function of its response lengths and of six measurable numbers. It shows how much time a
schedule saves, to compare with what its staleness costs in learning. In streaming schedules it decides which weights
sample a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from grpo_lab.checks import require_not_negative, require_positive
from grpo_lab.tracking.checksums import AFRESH, read_yaml
from grpo_lab.tracking.run_reader import read_steps
from grpo_lab.types import Float

_SHORTEST = 1e-9  # seconds: a fit may find that something costs nothing


@dataclass(frozen=True)
class CostModel:
    """Seconds per operation of a sampler and a learner that do not share a device."""

    decode_step: float  # one decoding step, whatever the number of responses in it
    decode_token: float  # each response in a decoding step
    read_token: float  # a token that is read and not sampled: prompts, recomputed KV caches, log-probs of given text
    train_token: float  # a token in a forward and backward pass
    update: float  # an optimiser step
    sync: float  # copying the weights from learner to sampler, while both wait

    def __post_init__(self) -> None:
        require_not_negative(self, "decode_token", "read_token", "update", "sync")
        require_positive(self, "decode_step", "train_token")

    def decoding(self, lengths: Sequence[int], slots: int) -> float:
        """Seconds to decode responses of these lengths, started in this order whenever one of `slots` slots is free."""
        ends: list[int] = []
        for length in lengths:
            begins = 0 if len(ends) < slots else heapq.heappop(ends)
            heapq.heappush(ends, begins + length)
        return self.decode_step * max(ends, default=0) + self.decode_token * sum(lengths)

    def reading(self, tokens: int) -> float:
        """Seconds to read this many tokens once."""
        return self.read_token * tokens

    def training(self, tokens: int, updates: int) -> float:
        """Seconds for forward and backward passes over `tokens` tokens and for `updates` optimiser steps."""
        return self.train_token * tokens + self.update * updates


@dataclass
class SimulatedClock:
    """When sampler and learner become free, and how long each has worked, in seconds. Saved in checkpoints."""

    sampler: float = 0.0
    learner: float = 0.0
    generating: float = 0.0
    training: float = 0.0

    def generate(self, seconds: float, not_before: float = 0.0) -> float:
        """Let the sampler work for `seconds`, starting no earlier than `not_before`; returns when it ends."""
        self.sampler = max(self.sampler, not_before) + seconds
        self.generating += seconds
        return self.sampler

    def train(self, seconds: float, not_before: float) -> float:
        """Let the learner work for `seconds`, starting no earlier than `not_before`; returns when it ends."""
        self.learner = max(self.learner, not_before) + seconds
        self.training += seconds
        return self.learner

    def metrics(self) -> dict[str, float]:
        """Shares of the time so far in which the sampler generated and the learner trained; {} at time 0."""
        total = max(self.sampler, self.learner)
        if total == 0:
            return {}
        return {"simulated/generating": self.generating / total, "simulated/training": self.training / total}

    def to_state(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class FittedCostModel:
    """A cost model fitted to runs. The errors are the mean |relative error| of a step's fitted time."""

    cost_model: CostModel
    steps: int
    generate_error: float
    train_error: float


def measure(folders: Sequence[Path]) -> FittedCostModel:
    """Fit the cost model to the step times of runs, finished or not, whose sampler always had the latest weights.

    Non-negative least squares on relative errors. Generation time is fitted by decoding steps and tokens, training
    time by tokens and updates. `decode_step` and `decode_token` can only be separated if batches differ in size, so
    give runs of several `problems_per_step`. Generation and training times are used as measured, even if both shared a
    device. A read token is assumed to cost a third of a trained one, as a forward pass does. Raises ValueError if a run
    has fewer than 10 steps with times, or if its generation ran ahead of training.
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
    return FittedCostModel(cost_model, len(table), *errors)


def _fit(what: Float[np.ndarray, "S C"], seconds: Float[np.ndarray, "S"]) -> list[float]:
    """Seconds per unit of each column, none negative. Relative errors, so long steps weigh as much as short ones."""
    from scipy.optimize import nnls

    return nnls(what / seconds[:, None], np.ones_like(seconds))[0].tolist()


def _times(folder: Path) -> Float[np.ndarray, "S 7"]:
    """Per step: decoding steps, sampled tokens, trained tokens, updates, and seconds to generate, train and sync."""
    config, rows, before = read_yaml(folder / "config.yaml", AFRESH), [], 0
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
    return np.array(rows[2:])  # the first two steps only warm caches up
