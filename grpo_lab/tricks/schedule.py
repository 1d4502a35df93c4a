"""Schedule: which weights generate, and how far generation may run ahead of training.

A schedule decides how much is generated and when new weights arrive. rollout/queue.py and rollout/stream.py carry it
out. With an in-process engine overlap exists only in simulated time; with an engine in its own process it is real.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from grpo_lab.checks import require_field
from grpo_lab.tricks.base import Trick


@dataclass(frozen=True)
class Schedule(Trick, ABC):
    """How many batches are generated before which step, or how far a stream of responses may run ahead.

    A token's staleness is the number of learner updates since the weights that sampled it. `streams`: responses
    continue while the learner trains, and new weights arrive in mid-response. `keeps_cache`: such a response keeps
    its KV cache from older weights.
    """

    streams: ClassVar[bool] = False

    @property
    def keeps_cache(self) -> bool:
        return False

    @property
    @abstractmethod
    def ahead(self) -> int:
        """The largest number of steps that a whole or partial batch may wait while the learner trains on others."""

    @property
    def keeps_sampler_current(self) -> bool:
        """True if every token is sampled by the learner's latest weights."""
        return self.ahead == 0

    @property
    def overlaps(self) -> bool:
        """True if generation runs while the learner trains."""
        return not self.keeps_sampler_current

    def batches_due(self, ready: int) -> int:
        """How many whole batches to generate with the current weights when `ready` batches are waiting."""
        return self.ahead + 1 - ready


@dataclass(frozen=True)
class Sync(Schedule):
    """Always generate with the weights of the last update.

    Sampler and learner differ only in numerics and within the minibatches of one step. One of the two always waits.
    """

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "batch s is drawn by the weights after s steps"

    @property
    def ahead(self) -> int:
        return 0


@dataclass(frozen=True)
class OneStepOff(Schedule):
    """Train on a batch while the next is generated (asynchronous RLHF, arXiv:2410.18252; verl's one-step-off).

    batch s is drawn by the weights after step max(0, s - lag)

    Differs from Sync: generation and training overlap. With `updates: one` every token is exactly `lag` updates old
    after the first `lag` steps. The name is for lag 1. A larger lag keeps more batches waiting, which varies only the
    staleness. With lag 0 it is Sync.
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

    Differs from OneStepOff: a batch's age cycles through 0, 1, .. k - 1, and sampler and learner take turns, so nothing
    overlaps. Differs from `updates` with k minibatches: each step has its own whole batch with its own statistics. A
    recomputed old policy is the learner before that step. With `old_policy: sampler` the ratio is against the weights
    that generated, as in the paper. With k 1 it is Sync.
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
    """Responses continue while the learner trains; a batch is the first `problems_per_step` groups to finish.

    groups begun and not yet trained on <= problems_per_step * (max_lag + 1)

    The bound is AReaL's (arXiv:2505.24298). If groups were trained on in the order in which they began, a group begun
    under version i would belong to step i + max_lag at the latest. A long response that others overtake gets older.
    With max_lag 0 it is Sync.
    """

    max_lag: int  # steps

    streams: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_field(self.max_lag >= 0, self, "max_lag", "at least 0")

    @property
    @abstractmethod
    def keeps_cache(self) -> bool:
        """True if responses keep their KV cache from older weights."""

    @property
    def ahead(self) -> int:
        return self.max_lag


@dataclass(frozen=True)
class Interruptible(Streaming):
    """New weights interrupt responses, which are prefilled again and continue (AReaL, arXiv:2505.24298).

    token t of a response | text before it ~ the weights of the moment, its cache computed anew under them

    Differs from OneStepOff: one response may contain tokens of several versions, each sampled exactly from the policy
    of its version. Every sync costs one more prefill of the unfinished responses.
    """

    formula: ClassVar[str] = "tokens of the latest weights, the cache recomputed; at most {max_lag} batches ahead"

    @property
    def keeps_cache(self) -> bool:
        return False


@dataclass(frozen=True)
class InFlight(Streaming):
    """New weights arrive in mid-response, and responses continue at once (PipelineRL, arXiv:2509.19128).

    token t of a response | text before it ~ the weights of the moment over a cache of older weights

    Differs from Interruptible: nothing is prefilled again, so a token's distribution belongs to no single policy. The
    sampler's log-probs are those of the actual sampling; the learner's are of the whole text under one set of weights.
    """

    formula: ClassVar[str] = "tokens of the latest weights over the cache as it is; at most {max_lag} batches ahead"

    @property
    def keeps_cache(self) -> bool:
        return True
