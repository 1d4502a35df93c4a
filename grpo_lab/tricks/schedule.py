"""Schedule: which weights generate, and how far generation may run ahead of training.

A schedule says how much is generated and when new weights arrive. rollout/queue.py and rollout/stream.py carry it
out: in one process and in simulated time with an engine that is called, overlapping for real with one that has its own
process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.tricks.base import Trick, require_field


@dataclass(frozen=True)
class Schedule(Trick, ABC):
    """How many batches are generated before which step, or how far a stream of responses may run ahead.

    A response's staleness is how many updates the learner has taken since the weights that drew a token. `streams`:
    responses go on growing while the learner trains, and new weights reach them in their middle. `keeps_cache`: what
    such a response has cached of its text under older weights stays.
    """

    streams: ClassVar[bool] = False

    @property
    def keeps_cache(self) -> bool:
        return False

    @property
    @abstractmethod
    def ahead(self) -> int:
        """For how many steps at most a batch may wait, whole or in part, while the learner trains on others."""

    @property
    def keeps_sampler_current(self) -> bool:
        """Whether every token is drawn by the learner's latest weights."""
        return self.ahead == 0

    @property
    def overlaps(self) -> bool:
        """Whether generation goes on while the learner trains."""
        return not self.keeps_sampler_current

    def batches_due(self, ready: int) -> int:
        """Whole batches to generate with the weights of this moment, where `ready` are waiting before a step."""
        return self.ahead + 1 - ready


@dataclass(frozen=True)
class Sync(Schedule):
    """Generate with the weights of the last update, always.

    Sampler and learner differ only in numerics and within the minibatches of one step. One of the two always waits.
    """

    touches_nothing: ClassVar[bool] = True
    formula: ClassVar[str] = "batch s is drawn by the weights after s steps"

    @property
    def ahead(self) -> int:
        return 0


@dataclass(frozen=True)
class OneStepOff(Schedule):
    """Train on a batch while the next is generated (asynchronous RLHF, arXiv:2410.18252; verl's one-step-off).

    batch s is drawn by the weights after step max(0, s - lag)

    Differs from Sync: generation and training overlap, and with `updates: one` every token of a batch is exactly
    `lag` updates old, once the first `lag` steps are over. The name is that of lag 1; a larger one keeps more batches
    waiting, which is how staleness alone is varied. With lag 0 it is Sync.
    """

    lag: int  # steps

    formula: ClassVar[str] = "batch s is drawn by the weights after max(0, s - {lag}) steps"

    def __post_init__(self) -> None:
        require_field(self.lag >= 0, self, "lag", "at least 0")

    @property
    def ahead(self) -> int:
        return self.lag


@dataclass(frozen=True)
class OffPolicyK(Schedule):
    """Generate k batches with one set of weights, then take k steps on them (PPO-off-policy-k of arXiv:2510.13786).

    batch s is drawn by the weights after step k * floor(s / k)

    Differs from OneStepOff: a batch's age goes 0, 1, .. k - 1 and round again, and sampler and learner take turns, so
    nothing overlaps. Differs from `updates` with k minibatches: each step has a whole batch of its own, with its own
    group and batch statistics, and the old policy, where it is recomputed, is the learner before that step; with
    `old_policy: sampler` the ratio is against the weights that generated, as in the paper. With k 1 it is Sync.
    """

    k: int

    formula: ClassVar[str] = "batch s is drawn by the weights after {k} * floor(s / {k}) steps"

    def __post_init__(self) -> None:
        require_field(self.k >= 1, self, "k", "at least 1")

    @property
    def overlaps(self) -> bool:
        return False

    @property
    def ahead(self) -> int:
        return self.k - 1

    def batches_due(self, ready: int) -> int:
        return 0 if ready else self.k


@dataclass(frozen=True)
class Streaming(Schedule, ABC):
    """Responses grow all the time; a batch is the first `problems_per_step` groups to end, and their order decides.

    groups begun and not yet trained on <= problems_per_step * (max_lag + 1)

    The bound is AReaL's (arXiv:2505.24298): a group begun under version i belongs to step i + max_lag at the latest,
    if groups were trained on in the order in which they began. A long response that others overtake gets older.
    With max_lag 0 it is Sync.
    """

    max_lag: int  # steps

    streams: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_field(self.max_lag >= 0, self, "max_lag", "at least 0")

    @property
    @abstractmethod
    def keeps_cache(self) -> bool:
        """Whether the cache of older weights stays."""

    @property
    def ahead(self) -> int:
        return self.max_lag


@dataclass(frozen=True)
class Interruptible(Streaming):
    """New weights interrupt responses, which are read again and go on (AReaL, arXiv:2505.24298).

    token t of a response | text before it ~ the weights of the moment, its cache computed anew under them

    Differs from OneStepOff: one response may hold tokens of several versions, each exactly from the policy of its
    version, at the price of reading what exists once more at every sync.
    """

    formula: ClassVar[str] = "tokens of the latest weights, the cache recomputed; at most {max_lag} batches ahead"

    @property
    def keeps_cache(self) -> bool:
        return False


@dataclass(frozen=True)
class InFlight(Streaming):
    """New weights arrive in the middle of responses, which go on at once (PipelineRL, arXiv:2509.19128).

    token t of a response | text before it ~ the weights of the moment over a cache of older weights

    Differs from Interruptible: nothing is read again, and the distribution of a token is that of no single policy:
    sampler log-probs are of what was really drawn, and the learner's of the whole text under one set of weights.
    """

    formula: ClassVar[str] = "tokens of the latest weights over the cache as it is; at most {max_lag} batches ahead"

    @property
    def keeps_cache(self) -> bool:
        return True
