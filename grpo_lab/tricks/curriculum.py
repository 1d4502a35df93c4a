"""Curriculum: which prompts come next, and what a run remembers of its training problems.

Every option walks the same endless stream: passes over the training split, each shuffled by (seed, pass). An option
sets the probability that a problem is taken when its turn comes; taking all of them is uniform sampling. So runs
with the same seed meet the problems in the same order, whatever they skip. A resumed run only needs its position in
the stream.

Where a task mixes sources, each has a stream of its own, and the next problem is of the source that is furthest behind
its share of those drawn. So shares hold whatever the curriculum passes over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import torch

from grpo_lab.checks import require_field
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Exhausted, Float, Int, Tensor

UNBOUNDED = 2**63 - 1  # possible answers of a question that sets them no number: the largest int64
_MOST_PASSES = 10_000  # over the split in one draw; needing more is treated as a mistake in the weights


@dataclass
class Memory:
    """Results of each training problem so far. Mutable, and saved in checkpoints.

    `looked` is the position in the stream, of all sources together, and `passed` how many problems the curriculum
    skipped there. `places` are the positions in the streams of all sources but the first, `drawn` the problems of each.
    Before a problem's first group `last` is NaN and `best` is -inf. `leftovers` are aborted groups, as plain values.
    A curriculum that asks again keeps in `drawn_at`, for each problem, how many problems had been drawn before it was
    last, in `repeats` how often it was asked again, and in `again_now` the batch and how many of it were that.
    """

    attempts: Int[Tensor, "S"]  # number of graded responses
    right: Float[Tensor, "S"]  # number of right responses
    last: Float[Tensor, "S"]  # pass rate of the latest group
    best: Float[Tensor, "S"]  # highest reward of any response so far
    looked: int = 0
    passed: int = 0
    leftovers: list[dict[str, Any]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    drawn: list[int] = field(default_factory=list)
    rubrics: dict[int, tuple[tuple[str, float], ...]] = field(default_factory=dict)  # that a reward gathered, by index
    drawn_at: dict[int, int] = field(default_factory=dict)
    repeats: dict[int, int] = field(default_factory=dict)
    again_now: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, size: int) -> Memory:
        """An empty memory for a training split of `size` problems."""
        nothing = torch.zeros(size, dtype=torch.float64)
        return cls(torch.zeros(size, dtype=torch.long), nothing, nothing + torch.nan, nothing - torch.inf)

    @property
    def pass_rate(self) -> Float[Tensor, "S"]:
        """Share of right responses so far; 0 for a problem that was never asked."""
        return self.right / self.attempts.clamp(min=1)

    @property
    def replayed(self) -> int:
        """How many of the problems drawn so far were asked again out of their turn."""
        return sum(self.repeats.values())

    def copy(self) -> Memory:
        """A copy; `note` on the copy does not change the original."""
        own = {name: value.clone() for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        kept = {name: value.copy() for name, value in vars(self).items() if isinstance(value, list | dict)}
        return replace(self, **kept, **own)

    def note(
        self,
        problems: Int[Tensor, "P"],
        correctness: Float[Tensor, "P G"],
        reward: Float[Tensor, "P G"],
        graded: Bool[Tensor, "P G"],
    ) -> None:
        """Add the results of groups; responses that are not `graded` do not count. No problem may appear twice."""
        number, right = graded.sum(dim=1), (correctness * graded).sum(dim=1)
        self.attempts[problems] += number
        self.right[problems] += right
        self.last[problems] = torch.where(number > 0, right / number, self.last[problems])
        best = torch.where(graded, reward, -torch.inf).amax(dim=1)
        self.best[problems] = torch.maximum(self.best[problems], best)

    def to_state(self) -> dict[str, Any]:
        """Tensors and plain values only, for the checkpoint."""
        return {part.name: getattr(self, part.name) for part in fields(self)}


@dataclass(frozen=True)
class Pool:
    """The inputs of a draw: the training split, the run's progress and its memory."""

    difficulties: Int[Tensor, "S"]
    possible_answers: Int[Tensor, "S"]  # UNBOUNDED where a question sets them no number
    batch: int  # problems per step; each pass over the split covers whole batches only
    seed: int
    progress: float  # share of the budget spent
    memory: Memory
    taken: frozenset[int]  # problems already drawn in this step
    sources: Int[Tensor, "S"] | None = None  # the source of each as a place in `shares`; None where all are of one
    shares: Mapping[str, float] = field(default_factory=lambda: {"": 1.0})  # source -> its share of the problems drawn

    @property
    def size(self) -> int:
        return len(self.difficulties)

    def of_source(self, source: int) -> list[int]:
        """The problems of a source, as indices into the training split."""
        if self.sources is None or len(self.shares) == 1:
            return list(range(self.size))
        return (self.sources == source).nonzero().flatten().tolist()


@dataclass(frozen=True)
class Curriculum(Trick, ABC):
    """Chooses the problems of a step from the training split."""

    remedy: ClassVar[str] = "enlarge the task's training split or lower problems_per_step"
    reads_difficulty: ClassVar[bool] = False  # whether problems' difficulties decide which come next

    @abstractmethod
    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        """Relative probability that each problem is taken when its turn comes; 0 for never."""

    def draw(self, number: int, pool: Pool) -> list[int]:
        """The next `number` problems as indices into the training split, without those already drawn in this step.

        Advances the memory's position in the stream. A problem is taken with probability weight / largest weight of its
        source; the uniform number for this belongs to its position in the stream. With one source, problems beyond the
        last whole batch of a pass are left out of that pass. Raises Exhausted if fewer than `number` problems can be
        taken, and ValueError for weights that are negative or not finite.
        """
        streams = [_Stream(pool, source, pool.of_source(source)) for source in range(len(pool.shares))]
        coming = _next_sources(number, pool)
        chances = _chances(self, coming, pool, streams)
        found: list[int] = []
        for place, source in enumerate(coming):
            again = self.again(pool, streams[source].members, found)
            found.append(streams[source].next(chances, found, number) if again is None else again)
            self.drew(pool, sum(_given(pool)) + place, found[-1], again is not None)
        pool.memory.drawn = [given + coming.count(source) for source, given in enumerate(_given(pool))]
        return found

    def again(self, pool: Pool, members: Sequence[int], found: Sequence[int]) -> int | None:
        """A problem of `members` to ask again, out of its turn; None to go on in the stream.

        `found` are those of this draw so far.
        """
        return None

    def drew(self, pool: Pool, before: int, problem: int, again: bool) -> None:
        """Note in the memory that `problem` was drawn, `before` others before it."""


def _given(pool: Pool) -> list[int]:
    """How many problems each source has given so far."""
    return pool.memory.drawn or [0] * len(pool.shares)


def _next_sources(number: int, pool: Pool) -> list[int]:
    """The sources of the next problems: each time the one furthest behind its share, the first of equals."""
    given, found = _given(pool), []
    for _ in range(number):
        whole = sum(given) + 1
        behind = [share * whole - so_far for share, so_far in zip(pool.shares.values(), given)]
        found.append(behind.index(max(behind)))
        given = [so_far + (source == found[-1]) for source, so_far in enumerate(given)]
    return found


@dataclass
class _Stream:
    """The endless stream of one source: passes over its problems `members`, each shuffled by (seed, source, pass)."""

    pool: Pool
    source: int
    members: list[int]
    looked: int = 0  # in this draw
    order: list[int] = field(default_factory=list)
    thresholds: list[float] = field(default_factory=list)

    def next(self, chances: Sequence[float], found: Sequence[int], number: int) -> int:
        """The next problem that is taken, of a draw of `number` with `found` so far. Advances the memory's position."""
        batch, memory = self.pool.batch if len(self.pool.shares) == 1 else 1, self.pool.memory
        usable = len(self.members) // batch * batch or len(self.members)
        while self.looked < _MOST_PASSES * usable:
            round_, place = divmod(self._position(), usable)
            if not self.order or place == 0:
                self.order, self.thresholds = _shuffled(self.pool.seed, self.source, round_, len(self.members))
            index = self.members[self.order[place]]
            self.looked += 1
            memory.looked += 1
            if self.source:
                memory.places[self.source - 1] += 1
            if index in found or index in self.pool.taken:
                continue
            if self.thresholds[place] < chances[index]:
                return index
            memory.passed += 1
        raise Exhausted(
            f"the curriculum found {len(found)} of {number} problems in {_MOST_PASSES} passes: all other weights are "
            "too small beside the largest"
        )

    def _position(self) -> int:
        """How far the stream was read."""
        memory = self.pool.memory
        memory.places = memory.places or [0] * (len(self.pool.shares) - 1)
        return memory.places[self.source - 1] if self.source else memory.looked - sum(memory.places)


def _chances(curriculum: Curriculum, coming: Sequence[int], pool: Pool, streams: Sequence[_Stream]) -> list[float]:
    """Probability that each problem is taken when its turn comes. Raises Exhausted if a source has too few left."""
    weights = curriculum.weights(pool).clone()
    if not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(
            f"{type(curriculum).__name__}.weights must be finite and at least 0: a problem without a group yet has "
            "memory.last NaN and memory.best -inf"
        )
    weights[list(pool.taken)] = 0
    for source, (name, stream) in enumerate(zip(pool.shares, streams)):
        members, needed = stream.members, coming.count(source)
        left = int((weights[members] > 0).sum())
        if left < needed:
            whose = f"the source {name}" if name else "the training split"
            raise Exhausted(
                f"the curriculum has run dry: a draw needs {needed} problems, and of the {len(members)} of {whose} "
                f"{left} can be taken: {curriculum.remedy}{_refilling(pool)}"
            )
        if left:
            weights[members] /= weights[members].max()
    return weights.tolist()


def _refilling(pool: Pool) -> str:
    if not pool.taken:
        return ""
    return f". {len(pool.taken)} were in this step already: a group_filter that refills needs a larger split"


def _shuffled(seed: int, source: int, round_: int, size: int) -> tuple[list[int], list[float]]:
    """One pass over a source: its order, and a uniform number for each position."""
    key, counter = np.array([seed, round_], dtype=np.uint64), np.array([0, 0, 0, source], dtype=np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key, counter=counter))
    return generator.permutation(size).tolist(), generator.random(size).tolist()


@dataclass(frozen=True)
class Uniform(Curriculum):
    """Go through the training split in a new random order each pass."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "each problem once a pass, in a random order"

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return torch.ones(pool.size, dtype=torch.float64)


class DecidingResponses(Enum):
    """Which responses to a problem decide: all so far, or those of its latest group."""

    history = "history"
    last_group = "last_group"


@dataclass(frozen=True)
class NoPositiveResampling(Curriculum):
    """Stop asking problems that the policy solves (ScaleRL, arXiv:2510.13786).

    taken when its turn comes unless pass rate >= threshold

    A removed problem is never asked again, even if the policy forgets it. `by: history` counts all its responses so
    far (ScaleRL, 0.9). `last_group` counts only its latest group (open-instruct, 0.875), which is noisy: at a pass
    rate of 0.8 half of all groups of 8 have 7 or 8 right.
    """

    threshold: float
    by: DecidingResponses

    formula: ClassVar[str] = "problems whose pass rate ({by}) is at least {threshold} are not asked again"
    remedy: ClassVar[str] = (
        "the policy has solved the others, so choose a larger or harder task, or raise curriculum.threshold"
    )

    def __post_init__(self) -> None:
        require_field(0 < self.threshold <= 1, self, "threshold", "in (0, 1]")

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        memory = pool.memory
        rate = memory.pass_rate if self.by is DecidingResponses.history else memory.last.nan_to_num(nan=0.0)
        return (rate < self.threshold).to(torch.float64)


@dataclass(frozen=True)
class Unguessable(Curriculum):
    """Never ask questions that a guess often answers right: those with few possible answers.

    taken when its turn comes unless possible answers < fewest_answers

    Kimi k1.5 (arXiv:2501.12599) leaves out multiple-choice and true-or-false questions, since a wrong way to a right
    answer earns the reward of a right way. Differs: the paper also leaves out questions that a model answers right
    without reasoning in one of 8 attempts; here only the question decides, by what the task says of it.
    """

    fewest_answers: int

    formula: ClassVar[str] = "questions with fewer than {fewest_answers} possible answers are not asked"
    remedy: ClassVar[str] = (
        "every question has too few possible answers, so lower curriculum.fewest_answers or choose another task"
    )

    def __post_init__(self) -> None:
        require_field(self.fewest_answers >= 2, self, "fewest_answers", "at least 2")

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return (pool.possible_answers >= self.fewest_answers).to(torch.float64)


def _easiest(pool: Pool, start_share: float, ramp: float) -> Bool[Tensor, "S"]:
    """True for the easiest share of the split by difficulty label, ties by index. It grows from `start_share` to 1."""
    share = min(1.0, start_share + (1 - start_share) * pool.progress / ramp)
    easiest = torch.argsort(pool.difficulties, stable=True)[: max(pool.batch, round(share * pool.size))]
    return torch.zeros(pool.size, dtype=torch.bool).index_fill(0, easiest, True)


def _unsolved(memory: Memory) -> Float[Tensor, "S"]:
    """1 - pass rate over all responses so far; 1 for a problem that was never asked."""
    return 1 - memory.pass_rate


@dataclass(frozen=True)
class EasyToHard(Curriculum):
    """Start with the easiest problems and add harder ones (Kimi k1.5, arXiv:2501.12599).

    pool = the easiest  start_share + (1 - start_share) * min(1, progress / ramp)  of the split

    Difficulty is the task's label; within the pool it samples like Uniform. `progress` is the share of the budget
    spent, so the option works on every budget axis. From `ramp` on it is Uniform.
    """

    reads_difficulty: ClassVar[bool] = True
    remedy: ClassVar[str] = "raise curriculum.start_share, enlarge the task's training split or lower problems_per_step"

    start_share: float
    ramp: float  # share of the budget after which all problems are in

    formula: ClassVar[str] = "the easiest {start_share} of the problems, growing to all of them at {ramp} of the budget"

    def __post_init__(self) -> None:
        require_field(0 < self.start_share <= 1, self, "start_share", "in (0, 1]")
        require_field(0 < self.ramp <= 1, self, "ramp", "in (0, 1]")

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return _easiest(pool, self.start_share, self.ramp).to(torch.float64)


@dataclass(frozen=True)
class Prioritized(Curriculum):
    """Ask problems with a low pass rate more often (Kimi k1.5, arXiv:2501.12599).

    P(i) proportional to 1 - s_i, with s_i the share of right responses so far

    Differs: the paper samples from that distribution. Here the shuffled stream skips a problem with probability
    1 - (1 - s_i) / max_j (1 - s_j). Frequencies over a pass are the same, and no problem comes twice within a pass.
    """

    formula: ClassVar[str] = "P(i) proportional to 1 - s_i, s_i the share of right responses so far"
    remedy: ClassVar[str] = "every other problem was answered right each time, so choose a larger or harder task"

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return _unsolved(pool.memory)


@dataclass(frozen=True)
class Kimi(EasyToHard):
    """Both curricula of Kimi k1.5 (arXiv:2501.12599): easy problems first, and among them those of low pass rate.

    P(i) proportional to 1 - s_i within EasyToHard's pool
    """

    formula: ClassVar[str] = f"{EasyToHard.formula}; within them P(i) proportional to 1 - s_i"
    remedy: ClassVar[str] = f"{Prioritized.remedy}; or, at the start, {EasyToHard.remedy}"

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return _unsolved(pool.memory) * super().weights(pool)


@dataclass(frozen=True)
class PromptReplay(Curriculum):
    """Ask problems of medium difficulty again after a pause (Prompt Replay, arXiv:2603.21177).

    up to `fraction` of each batch: the problems whose latest group has lowest <= pass rate <= highest, asked at least
    `cooldown` batches ago and asked again fewer than `most` times; nearest to a pass rate of 0.5 first. The rest of the
    batch goes on in the stream.

    Of equally near ones the lower pass rate, then the one asked again less often, then the lower index comes first, as
    in the authors' code. Only prompts come again: responses are new, so training stays on-policy. A problem that comes
    in its turn is no replay, but its pause begins anew. A batch is problems_per_step problems of the stream, whether
    they are drawn at once, one at a time or for a filter that refills. Differs: the authors' code adds a random fifth
    to each pause, and an option lengthens it with the distance from 0.5.
    """

    fraction: float
    cooldown: int  # in batches
    most: int
    lowest: float
    highest: float

    formula: ClassVar[str] = (
        "up to {fraction} of a batch: problems with {lowest} <= pass rate <= {highest} again, nearest to 0.5 first, "
        "{cooldown} steps later and {most} times at most"
    )

    def __post_init__(self) -> None:
        require_field(0 < self.fraction <= 1, self, "fraction", "in (0, 1]")
        require_field(self.cooldown >= 1, self, "cooldown", "at least 1")
        require_field(self.most >= 1, self, "most", "at least 1")
        require_field(0 <= self.lowest < self.highest <= 1, self, "lowest", "from 0 and below curriculum.highest")

    def weights(self, pool: Pool) -> Float[Tensor, "S"]:
        return torch.ones(pool.size, dtype=torch.float64)

    def again(self, pool: Pool, members: Sequence[int], found: Sequence[int]) -> int | None:
        memory, drawn = pool.memory, sum(_given(pool)) + len(found)
        batch, number = memory.again_now
        if batch == drawn // pool.batch and number >= int(self.fraction * pool.batch):
            return None
        here, ready = frozenset(members), list[tuple[float, float, int, int]]()
        for problem, before in memory.drawn_at.items():
            rate, times = float(memory.last[problem]), memory.repeats.get(problem, 0)
            rested = drawn // pool.batch - before // pool.batch >= self.cooldown
            free = problem in here and problem not in found and problem not in pool.taken
            if rested and free and self.lowest <= rate <= self.highest and times < self.most:
                ready.append((abs(rate - 0.5), rate, times, problem))
        return min(ready)[-1] if ready and int(self.fraction * pool.batch) else None

    def drew(self, pool: Pool, before: int, problem: int, again: bool) -> None:
        memory, batch = pool.memory, before // pool.batch
        memory.drawn_at[problem] = before
        if again:
            memory.repeats[problem] = memory.repeats.get(problem, 0) + 1
            memory.again_now = batch, (memory.again_now[1] if memory.again_now[0] == batch else 0) + 1
