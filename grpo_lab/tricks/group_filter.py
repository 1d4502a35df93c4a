"""Group filter: what happens to zero-variance groups."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import ClassVar

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.base import Trick, tied
from grpo_lab.types import Bool, Exhausted, Graded, Groups, GroupSource, Tensor


class Signal(Enum):
    """Which quantity must vary within a group for the group to carry signal."""

    outcome = "outcome"
    reward = "reward"


def without_signal(graded: Graded, signal: Signal) -> Bool[Tensor, "P 1"]:
    """True for groups whose rows in the statistics all have the same correctness (or the same shaped reward)."""
    values = graded.correctness if signal is Signal.outcome else graded.reward
    return tied(values, graded.in_statistics)


def has_signal(graded: Graded, signal: Signal) -> list[int]:
    """Positions of the groups that carry signal."""
    return (~without_signal(graded, signal)).flatten().nonzero().flatten().tolist()


def groups_with_signal(made: Groups, signal: Signal) -> list[int]:
    """Positions of the groups of a round that may enter the batch."""
    return has_signal(made.masked, signal)


Choice = Callable[[Groups, Signal], list[int]]


@dataclass(frozen=True)
class Collected:
    """All whole groups that a step generated, and the positions of those that form its batch."""

    made: Groups
    chosen: tuple[int, ...]


@dataclass(frozen=True)
class GroupFilter(Trick, ABC):
    """Decides whether groups without signal stay in the batch, and whether others are generated to replace them.

    `removes_rows`: groups may leave the batch or never enter it. `refills`: others replace them, so every group of the
    batch carries signal. `races`: the groups that finish first are trained on. `carries_over`: a response may contain
    tokens sampled by older weights.
    """

    removes_rows: ClassVar[bool]
    refills: ClassVar[bool] = False

    @property
    def reads_reward(self) -> bool:
        """True if the shaped reward decides."""
        return False

    @property
    def races(self) -> bool:
        return False

    @property
    def carries_over(self) -> bool:
        return False

    def at_once(self, number: int) -> int:
        """The largest number of problems that one round for a batch of `number` groups draws."""
        return number

    def collect(self, source: GroupSource, number: int, chosen_of: Choice = groups_with_signal) -> Collected:
        """Generate `number` groups to train on; the result also holds other groups generated on the way.

        `chosen_of` gives the positions of a round's groups that a filter which refills takes.
        """
        return Collected(source.groups(number), tuple(range(number)))

    def accepts(self, group: Graded) -> bool:
        """True if a group [1, G] may take a place in the batch."""
        return True

    def check_thrown(self, made: Sequence[Groups], thrown: int, number: int) -> None:
        """Raise Exhausted if `thrown` of the groups `made` for a batch of `number` groups exceed the allowed number."""

    def __call__(self, graded: Graded) -> Graded:
        """The record with the rows of removed groups masked."""
        return graded


@dataclass(frozen=True)
class Keep(GroupFilter):
    """Train on every group. A group without signal gives no gradient but stays in the denominators."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "every group stays"
    removes_rows: ClassVar[bool] = False


@dataclass(frozen=True)
class Drop(GroupFilter):
    """Remove groups without signal from the batch (ScaleRL, arXiv:2510.13786).

    in_statistics = in_statistics & has_signal;  in_loss = in_loss & has_signal

    Differs from Keep only in batch-wide statistics and, with `denominator: survivors`, in the step size,
    which grows by 1 / (share with signal). With `signal: reward` a shaped reward can keep all-wrong groups in the
    batch, and a group standard deviation scales their small differences up to unit size.
    """

    signal: Signal

    removes_rows: ClassVar[bool] = True
    formula: ClassVar[str] = "groups of one and the same {signal}: m = 0, and not in the statistics"

    @property
    def reads_reward(self) -> bool:
        return self.signal is Signal.reward

    def __call__(self, graded: Graded) -> Graded:
        varied = ~without_signal(graded, self.signal)
        return replace(graded, in_statistics=graded.in_statistics & varied, in_loss=graded.in_loss & varied)


@dataclass(frozen=True)
class Refill(GroupFilter, ABC):
    """Generate until the batch is full of groups that carry signal.

    The batch size stays the same, and a step generates 1 / (share with signal) times as much. The batch is conditioned
    on having signal, which pulls its accuracy towards 1/2. So read the reward of all generated responses. Raises
    Exhausted when `max_rounds` rounds were not enough.
    """

    signal: Signal
    max_rounds: int

    removes_rows: ClassVar[bool] = True
    refills: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "max_rounds")

    @property
    def reads_reward(self) -> bool:
        return self.signal is Signal.reward

    def accepts(self, group: Graded) -> bool:
        return bool(has_signal(group, self.signal))

    def check_thrown(self, made: Sequence[Groups], thrown: int, number: int) -> None:
        if thrown > self.max_rounds * self.at_once(number):
            everything = Groups.join(made)
            raise self._never_fills(everything, everything.number - thrown, number)

    def collect(self, source: GroupSource, number: int, chosen_of: Choice = groups_with_signal) -> Collected:
        rounds: list[Groups] = []
        chosen: list[int] = []
        while len(chosen) < number:
            if len(rounds) == self.max_rounds:
                raise self._never_fills(Groups.join(rounds), len(chosen), number)
            made = self.round(source, number, number - len(chosen))
            before = sum(part.number for part in rounds)
            chosen += [before + place for place in chosen_of(made, self.signal)]
            rounds.append(made)
        return Collected(Groups.join(rounds), tuple(chosen[:number]))

    @abstractmethod
    def round(self, source: GroupSource, number: int, missing: int) -> Groups:
        """One more round of generation for a batch of `number` groups, of which `missing` are still missing."""

    def _never_fills(self, made: Groups, found: int, number: int) -> Exhausted:
        """The error to raise when the groups `made`, `found` of them with signal, were not enough."""
        rate = made.graded.correctness.mean(dim=1)
        right, wrong = int((rate == 1).sum()), int((rate == 0).sum())
        return Exhausted(
            f"after {self.max_rounds} rounds of generation {found} of the {number} groups of a batch carry signal "
            f"({self.signal.value}): of {made.number} problems {right} were always answered right and {wrong} always "
            "wrong. The policy has solved or lost this task, or the groups are too small: raise group_size or "
            "group_filter.max_rounds, choose another task, or use group_filter=drop"
        )


@dataclass(frozen=True)
class Resample(Refill):
    """Draw whole batches until enough groups carry signal (dynamic sampling of DAPO, arXiv:2503.14476).

    each round: oversample * problems_per_step further problems;  batch = the first problems_per_step with signal

    Differs from Drop: the batch never shrinks, and more is generated. Surplus groups of the last round are thrown
    away. verl draws three times the batch at once; larger rounds mean fewer rounds and more groups thrown away.
    """

    oversample: float

    formula: ClassVar[str] = "groups of one and the same {signal} are replaced, in rounds of {oversample} batches"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "oversample")

    def round(self, source: GroupSource, number: int, missing: int) -> Groups:
        return source.groups(self.at_once(number))

    def at_once(self, number: int) -> int:
        return max(1, round(self.oversample * number))


@dataclass(frozen=True)
class Active(Refill):
    """Replace each group without signal by one further problem (active sampling of Olmo 3, arXiv:2512.13961).

    each round: as many further problems as the batch still lacks

    Differs from Resample: only groups without signal are thrown away, and there are more and smaller rounds. Differs
    from the paper: there a queue replaces each group as it ends. Here the replacements of a round start together,
    which trains on the same groups and decodes them in smaller batches.
    """

    formula: ClassVar[str] = "each group of one and the same {signal} is replaced by a further problem"

    def round(self, source: GroupSource, number: int, missing: int) -> Groups:
        return source.groups(missing)


@dataclass(frozen=True)
class OversampleAbort(Refill):
    """Start more problems than needed and stop when enough groups with signal have finished (slime).

    each round: start oversample * problems_per_step problems; abort what is unfinished once the batch is full

    Differs from Resample: the groups that finish first are taken, so the batch's responses are shorter than the
    policy's. `keeps_partial` continues aborted responses in the next step instead of throwing them away. That removes
    the bias, but a response may then contain tokens sampled by older weights. Only responses decoded together race: an
    `engine.max_rows` below oversample * problems_per_step * group_size removes the race and its bias. Differs from
    slime: a further round starts when the last one has ended, not while it still runs.
    """

    oversample: float
    keeps_partial: bool

    formula: ClassVar[str] = (
        "of {oversample} batches the first groups to end that are not of one and the same {signal}; cut ones go on "
        "in the next step: {keeps_partial}"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_field(self.oversample >= 1, self, "oversample", "at least 1")

    @property
    def races(self) -> bool:
        return True

    @property
    def carries_over(self) -> bool:
        return self.keeps_partial

    def round(self, source: GroupSource, number: int, missing: int) -> Groups:
        return source.race(self.at_once(number), missing, self.accepts, self.keeps_partial)

    def at_once(self, number: int) -> int:
        return round(self.oversample * number)
