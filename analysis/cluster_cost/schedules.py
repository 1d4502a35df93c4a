"""How long a step of a training run takes on a cluster, and what its GPUs do meanwhile: the schedules, simulated.

The rules are those of rollout/queue.py and rollout/stream.py, on the same clock: when a batch may be generated, when
weights arrive, how far a stream runs ahead. Here responses are lengths alone, drawn from a stated distribution, and
stages take what roofline.py says. All engines of a cluster count as one whose load is spread evenly.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from statistics import NormalDist

import numpy as np

from cluster_cost.roofline import Efficiency, Engine, Gpu, Learner, ModelShape, send
from grpo_lab.budget.cost_model import SimulatedClock
from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.schedule import Schedule
from grpo_lab.types import Float


@dataclass(frozen=True)
class Lengths:
    """Response lengths in tokens: lognormal, cut off at `cap`. `mean` and `sigma` are those before the cut."""

    mean: float
    sigma: float  # standard deviation of the logarithm; 0: all lengths equal
    cap: int

    def __post_init__(self) -> None:
        require_positive(self, "mean", "cap")
        require_field(self.sigma >= 0, self, "sigma", "at least 0")

    @classmethod
    def truncated(cls, mean: float, cap: int, share: float) -> Lengths:
        """Of which this share is cut off at `cap`, by the smaller sigma that gives it.

        log(cap / mean) = z sigma - sigma^2 / 2 with z the normal quantile of 1 - share. Raises ValueError where no
        lognormal of this mean has so many.
        """
        z = NormalDist().inv_cdf(1 - share)
        rest = z * z - 2 * math.log(cap / mean)
        if rest < 0:
            raise ValueError(f"no lognormal of mean {mean:g} exceeds {cap} in {share:.1%}: give a smaller share")
        return cls(mean, z - math.sqrt(rest), cap)

    def draw(self, random: np.random.Generator, count: int) -> list[int]:
        """So many lengths of 1 to `cap` tokens."""
        drawn = self.mean * np.exp(self.sigma * random.standard_normal(count) - self.sigma**2 / 2)
        return np.clip(np.rint(drawn), 1, self.cap).astype(int).tolist()


@dataclass(frozen=True)
class Workload:
    """What a step of a run asks for."""

    problems: int  # groups in a batch
    group_size: int
    prompt: int  # tokens
    lengths: Lengths
    updates: int  # optimiser steps on a batch
    reads: int  # forward passes for log-probs: old policy, reference
    checkpoint_every: int  # steps

    def __post_init__(self) -> None:
        require_positive(self, "problems", "group_size", "updates", "checkpoint_every")

    @property
    def responses(self) -> int:
        return self.problems * self.group_size


@dataclass(frozen=True)
class Cluster:
    """A model on GPUs. `generating` of them generate and the others train; 0: all do both, one after the other."""

    shape: ModelShape
    gpu: Gpu
    efficiency: Efficiency
    gpus: int
    generating: int = 0

    def __post_init__(self) -> None:
        require_field(0 <= self.generating < self.gpus, self, "generating", "at least 0 and below gpus")

    @cached_property
    def engine(self) -> Engine:
        return Engine.of(self.shape, self.gpu, self.efficiency)

    @cached_property
    def engines(self) -> int:
        """How many engines the generating GPUs hold; ValueError for none."""
        count = (self.generating or self.gpus) // self.engine.gpus
        if not count:
            raise ValueError(f"an engine needs {self.engine.gpus} GPUs: let more than {self.generating} generate")
        return count

    @property
    def learner(self) -> Learner:
        return Learner(self.shape, self.gpu, self.efficiency, self.gpus - self.generating)

    def slots(self, work: Workload) -> int:
        """Responses that all engines hold at once: as many as fit, each counted with its mean length while it runs."""
        lengths = work.lengths
        running = min(lengths.cap, lengths.mean * math.exp(lengths.sigma**2)) / 2  # E[L^2] / 2 E[L]
        slots = int(self.engine.cache_tokens // (work.prompt + running))
        if not slots:
            raise ValueError("not one response fits beside the weights: spread an engine over more GPUs")
        return slots * self.engines

    def step(self, rows: float | int, context: float | int) -> float:
        """Seconds of a decoding step, `rows` responses spread evenly; an engine with any has a whole one."""
        busy = min(self.engines, max(rows, 1))
        return self.engine.step(rows / busy, context / busy)

    def decoding(self, lengths: Sequence[int], prompt: int, slots: int) -> float:
        """Seconds to decode these responses, started in order whenever one of `slots` slots is free.

        The loads of all steps at once: who runs in a step, and how long their caches are by then.
        """
        begins, ends = _spans(lengths, slots)
        rows = np.zeros(max(ends) + 1)
        offset = np.zeros_like(rows)  # what a running response's position lacks of the step's number
        np.add.at(rows, begins, 1)
        np.add.at(rows, ends, -1)
        np.add.at(offset, begins, prompt - np.asarray(begins, float))
        np.add.at(offset, ends, np.asarray(begins, float) - prompt)
        rows, offset = np.cumsum(rows)[:-1], np.cumsum(offset)[:-1]
        return float(self._steps(rows, offset + rows * np.arange(len(rows))).sum())

    def even(self, lengths: Sequence[int], prompt: int, slots: int) -> float:
        """Seconds to decode these responses if all slots that are ever in use were so to the end: no stragglers."""
        tokens = sum(lengths)
        rows = min(len(lengths), slots)
        context = sum(length * prompt + length * (length - 1) / 2 for length in lengths) / tokens
        return tokens / rows * self.step(rows, rows * context)

    def _steps(self, rows: Float[np.ndarray, "S"], context: Float[np.ndarray, "S"]) -> Float[np.ndarray, "S"]:
        """`step` for many at once."""
        engine = self.engine
        busy = np.clip(rows, 1, self.engines)
        fixed = engine.step(0, 0)
        flops, use, gpus = self.shape.flops, self.efficiency, engine.gpus
        floor = 2 * flops.weights / (gpus * use.bandwidth * self.gpu.bandwidth)
        read = floor + self.shape.kv_bytes * context / busy / (gpus * use.bandwidth * self.gpu.bandwidth)
        work = (2 * flops.weights * rows + flops.attention * context) / busy
        return np.maximum(read, work / (gpus * use.decode * self.gpu.flops)) + fixed - floor

    def generation(self, lengths: Sequence[int], work: Workload) -> float:
        """Seconds to generate a batch: each prompt read once, then decoding."""
        prefill = self.engine.prefill([work.prompt] * work.problems) / self.engines
        return prefill + self.decoding(lengths, work.prompt, self.slots(work))

    def training(self, lengths: Sequence[int], work: Workload) -> float:
        """Seconds of log-probs and updates on a batch."""
        rows = [work.prompt + length for length in lengths]
        return work.reads * self.learner.read(rows) + self.learner.train(rows, work.updates)

    def sync(self, tree: bool = True) -> float:
        """Seconds until the engines have new weights. GPUs that do both gather them from all shards, and swap."""
        across = self.gpus > self.gpu.per_node
        sent = send(self.shape, self.gpu, self.efficiency, self.engines if self.generating else 1, across, tree)
        return sent + (0 if self.generating else self.learner.swap())


@dataclass(frozen=True)
class StepTime:
    """What the GPUs do in a mean step, in seconds of all GPUs: the parts add up to `seconds`.

    `generation` is decoding a batch as if all slots in use stayed full; `stragglers` is what it takes beyond, while the
    last responses end. A streaming schedule fills a slot again, so all its decoding is `generation`. `waiting` is what
    is left: GPUs that had nothing to do.
    """

    seconds: float
    generation: float
    stragglers: float
    training: float
    moving: float  # sync, swap and checkpoints
    waiting: float

    def shares(self) -> dict[str, float]:
        """Each part as a share of the step."""
        return {part.name: getattr(self, part.name) / self.seconds for part in fields(self)[1:]}


def simulate(
    cluster: Cluster, schedule: Schedule, work: Workload, seed: int = 0, steps: int = 12, skip: int = 4
) -> StepTime:
    """Mean step over `steps` steps after the first `skip`, in which queues fill. Same seed, same lengths in order.

    Raises ValueError where GPUs that do both are asked to overlap.
    """
    if not cluster.generating and (schedule.streams or schedule.ahead):
        raise ValueError("all GPUs generate and train in turn: split them with `generating` for this schedule")
    random = np.random.default_rng(seed)
    batches = iter(lambda: work.lengths.draw(random, work.responses), [])
    run = (_Stream if schedule.streams else _Batches)(cluster, schedule, work, batches)
    begins = _Spent()
    for number in range(steps + skip):
        if number == skip:
            begins = run.spent()
        run.step()
    hidden = schedule.ahead > 0 and schedule.overlaps and not schedule.streams  # from the generating GPUs
    return _mean_step(cluster, work, begins, run.spent(), steps, hidden)


@dataclass(frozen=True)
class _Spent:
    """The clock so far."""

    until: float = 0.0
    generating: float = 0.0
    even: float = 0.0  # of generating, what a batch would take without stragglers
    training: float = 0.0


def _mean_step(cluster: Cluster, work: Workload, begins: _Spent, ends: _Spent, steps: int, hidden: bool) -> StepTime:
    def mean(name: str) -> float:
        return (getattr(ends, name) - getattr(begins, name)) / steps

    on_generators = (cluster.generating or cluster.gpus) / cluster.gpus
    on_learners = (cluster.gpus - cluster.generating) / cluster.gpus
    saving = cluster.learner.checkpoint() / work.checkpoint_every
    seconds = mean("until") + saving
    generation, training = on_generators * mean("even"), on_learners * mean("training")
    stragglers = on_generators * (mean("generating") - mean("even"))
    moving = cluster.sync() * (on_learners if hidden else 1) + saving
    waiting = seconds - generation - stragglers - training - moving
    return StepTime(seconds, generation, stragglers, training, moving, max(waiting, 0.0))


class _Batches:
    """Whole batches, as `BatchQueue` makes them."""

    def __init__(self, cluster: Cluster, schedule: Schedule, work: Workload, batches: Iterator[list[int]]) -> None:
        self.cluster, self.schedule, self.work, self.batches = cluster, schedule, work, batches
        self.clock = SimulatedClock()
        self.ready: deque[tuple[float, list[int]]] = deque()
        self.weights_at = self.even = 0.0

    def step(self) -> None:
        for _ in range(self.schedule.batches_due(len(self.ready))):
            lengths = next(self.batches)
            seconds = self.cluster.generation(lengths, self.work)
            prompt, slots = self.work.prompt, self.cluster.slots(self.work)
            late = self.cluster.decoding(lengths, prompt, slots) - self.cluster.even(lengths, prompt, slots)
            self.even += seconds - max(late, 0.0)
            self.ready.append((self.clock.generate(seconds, self.weights_at), lengths))
        ready_at, lengths = self.ready.popleft()
        self.clock.train(self.cluster.training(lengths, self.work), ready_at)
        self.weights_at = self.clock.learner = self.clock.learner + self.cluster.sync()

    def spent(self) -> _Spent:
        return _Spent(self.clock.learner, self.clock.generating, self.even, self.clock.training)


class _Stream:
    """Responses that go on while the learner trains, as `SimulatedStream` runs them."""

    def __init__(self, cluster: Cluster, schedule: Schedule, work: Workload, batches: Iterator[list[int]]) -> None:
        self.cluster, self.schedule, self.work, self.batches = cluster, schedule, work, batches
        self.clock = SimulatedClock()
        self.slots = cluster.slots(work)
        self.drawn: deque[list[int]] = deque()  # groups that have not begun
        self.pending: deque[tuple[int, int]] = deque()  # group and length of responses that wait for a slot
        self.running: list[tuple[int, int]] = []  # when it ends, in decoding steps, and its group
        self.left: dict[int, int] = {}  # responses of a group that have not ended
        self.tokens: dict[int, list[int]] = {}
        self.ready: list[tuple[float, list[int]]] = []
        self.groups = self.in_training = self.now = 0
        self.context = 0.0  # tokens in all caches
        self.lengths_of: dict[tuple[int, int], list[int]] = {}  # of what runs, by its entry in `running`

    def _admit(self) -> None:
        bound = self.work.problems * (self.schedule.ahead + 1)
        size = self.work.group_size
        while len(self.left) + len(self.ready) + self.in_training < bound:
            if not self.drawn:
                lengths = next(self.batches)
                self.drawn.extend(lengths[start : start + size] for start in range(0, len(lengths), size))
            group = self.drawn.popleft()
            self.left[self.groups], self.tokens[self.groups] = len(group), group
            self.pending.extend((self.groups, length) for length in group)
            self.clock.generate(self.cluster.engine.prefill([self.work.prompt]) / self.cluster.engines)
            self.groups += 1
        while self.pending and len(self.running) < self.slots:
            group, length = self.pending.popleft()
            heapq.heappush(self.running, (self.now + length, group))
            self.lengths_of.setdefault((self.now + length, group), []).append(length)
            self.context += self.work.prompt

    def _advance(self, until: float) -> None:
        """Decode to the end of the next response, or to about `until`."""
        rows, steps = len(self.running), self.running[0][0] - self.now
        one = self.cluster.step(rows, self.context + rows * steps / 2)
        if self.clock.sampler + steps * one > until:
            steps = max(1, min(steps, math.ceil((until - self.clock.sampler) / one)))
        self.clock.generate(steps * one)
        self.now += steps
        self.context += rows * steps
        while self.running and self.running[0][0] <= self.now:
            ended = heapq.heappop(self.running)
            self.context -= self.work.prompt + self.lengths_of[ended].pop()
            if not self.lengths_of[ended]:
                del self.lengths_of[ended]
            self.left[ended[1]] -= 1
            if not self.left[ended[1]]:
                del self.left[ended[1]]
                self.ready.append((self.clock.sampler, self.tokens.pop(ended[1])))
        self._admit()

    def step(self) -> None:
        self._admit()
        while len(self.ready) < self.work.problems:
            self._advance(math.inf)
        batch, self.ready = self.ready[: self.work.problems], self.ready[self.work.problems :]
        self.in_training = len(batch)
        lengths = [length for _, group in batch for length in group]
        ended = self.clock.train(self.cluster.training(lengths, self.work), max(at for at, _ in batch))
        while self.clock.sampler < ended and self.running:
            self._advance(ended)
        self.in_training = 0
        pause = self.cluster.sync()
        self.clock.learner = ended + pause
        self.clock.sampler = max(self.clock.sampler, ended) + pause
        if not self.schedule.keeps_cache:
            again = self.context * 2 * self.cluster.shape.flops.weights
            peak = self.cluster.engines * self.cluster.engine.gpus * self.cluster.gpu.flops
            self.clock.generate(again / (peak * self.cluster.efficiency.train))

    def spent(self) -> _Spent:
        return _Spent(self.clock.learner, self.clock.generating, self.clock.generating, self.clock.training)


def _spans(lengths: Sequence[int], slots: int) -> tuple[list[int], list[int]]:
    """Beginning and end of each response in decoding steps, by the rule of `CostModel.decoding`."""
    free: list[int] = []
    begins, ends = [], []
    for length in lengths:
        begin = 0 if len(free) < slots else heapq.heappop(free)
        heapq.heappush(free, begin + length)
        begins.append(begin)
        ends.append(begin + length)
    return begins, ends
