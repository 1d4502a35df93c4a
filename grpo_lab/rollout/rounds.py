"""Stages 1 to 5 of a batch, repeated while the group filter asks for more groups.

`Rounds` works on a copy of the run's memory, and the queue adopts the copy once the batch is full. So a batch that
cannot be filled leaves the run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grpo_lab.rollout.groups import GroupMaker, ProblemSource, Spent, StartedGroup, group_to_state
from grpo_lab.tricks.curriculum import Memory
from grpo_lab.types import Completion, Graded, Groups, Request, Sampler, StopReason


class Rounds:
    """Generates the groups of batch `number`, drawn at `progress` of the budget; implements `types.GroupSource`."""

    def __init__(
        self, source: ProblemSource, maker: GroupMaker, sampler: Sampler, memory: Memory, number: int, progress: float
    ) -> None:
        self.source, self.maker, self.sampler = source, maker, sampler
        self.number, self.progress = number, progress
        self.memory = memory.copy()
        self.passed_before, self.replayed_before = self.memory.passed, self.memory.replayed
        self.taken: frozenset[int] = frozenset()
        self.numbers: dict[int, int] = {}  # index of a problem -> the batch for which it was drawn
        self.drawn = 0
        self.put_aside = 0  # groups whose generation was aborted
        self.spent: list[Spent] = []

    def groups(self, number: int) -> Groups:
        """Draw `number` further problems and generate, grade, shape and mask their groups."""
        fresh = self._fresh(self._draw(number))
        requests = self._requests(fresh)
        completions = self.maker.generate(self.sampler, requests)
        self._count(fresh, completions)
        return self.maker.grade(fresh, completions, self.memory)

    def race(self, number: int, target: int, accepts: Callable[[Graded], bool], keeps_partial: bool) -> Groups:
        """See `types.GroupSource.race`. Leftovers of earlier races come first; the remaining problems are drawn."""
        size = self.maker.group_size
        started = [self.maker.from_state(left) for left in self.memory.leftovers[:number]]
        self.taken |= {group.index for group in started}
        self.numbers |= {group.index: group.number for group in started}
        self.memory.leftovers = self.memory.leftovers[number:]
        started += self._fresh(self._draw(number - len(started)))
        requests = self._requests(started)
        found = self._ended_before(started)
        finished: list[int] = []  # positions of groups, in the order in which they finished
        accepted = 0

        def settle(place: int) -> None:
            """Grade a group if its last response has ended, and count it if it is accepted."""
            nonlocal accepted
            rows = range(place * size, (place + 1) * size)
            if accepted < target and place not in finished and all(row in found for row in rows):
                finished.append(place)
                whole = started[place].whole([found[row] for row in rows])
                accepted += accepts(self.maker.grade([started[place]], whole, self.memory).masked)

        def on_finish(row: int, completion: Completion) -> Sequence[int]:
            if accepted == target:  # ended in the same decoding step in which the race was decided
                return ()
            found[row] = completion
            settle(row // size)
            return [row for row in range(len(requests)) if row not in found] if accepted == target else ()

        for place in range(len(started)):
            settle(place)
        if accepted < target:
            completions = self.maker.generate(self.sampler, requests, on_finish)
        else:
            nothing = Completion.unsampled((), StopReason.ABORTED)
            completions = [found.get(row, nothing) for row in range(len(requests))]
        self._count(started, completions)
        whole = [group.whole(completions[p * size : (p + 1) * size]) for p, group in enumerate(started)]
        for place, group in enumerate(started):
            if place not in finished:
                self._put_aside(group, whole[place], keeps_partial)
        ended = [started[place] for place in finished]
        return self.maker.grade(ended, [c for place in finished for c in whole[place]], self.memory)

    def _ended_before(self, started: Sequence[StartedGroup]) -> dict[int, Completion]:
        """Rows of leftover groups whose response had ended before the group was aborted; they need no generation."""
        size = self.maker.group_size
        return {
            place * size + member: Completion.unsampled((), part.stop)
            for place, group in enumerate(started)
            for member, part in enumerate(group.done)
            if part.stop is not StopReason.ABORTED
        }

    def remember(self, made: Groups) -> Memory:
        """The run's memory after this full batch."""
        self.maker.note(made, self.memory)
        return self.memory

    @property
    def passed_over(self) -> float:
        """Share of the problems considered that the curriculum skipped in the stream, or asked out of their turn."""
        passed = self.memory.passed - self.passed_before
        changed = passed + self.memory.replayed - self.replayed_before
        return changed / (self.drawn + passed) if changed else 0.0

    def started(self, made: Groups) -> int:
        """Groups whose generation was started or continued: the finished and the aborted ones."""
        return made.number + self.put_aside

    def _draw(self, number: int) -> list[int]:
        if not number:
            return []
        drawn = self.source.draw(number, self.memory, self.progress, self.taken)
        self.taken |= set(drawn)
        self.numbers |= dict.fromkeys(drawn, self.number)
        self.drawn += number
        return drawn

    def _fresh(self, indices: Sequence[int]) -> list[StartedGroup]:
        return [self.maker.start(index, self.number, self.progress) for index in indices]

    def _requests(self, groups: Sequence[StartedGroup]) -> list[Request]:
        return [request for group in groups for request in self.maker.requests(group)]

    def _count(self, groups: Sequence[StartedGroup], completions: Sequence[Completion]) -> None:
        """Record the token counts of one call of the sampler."""
        size = self.maker.group_size
        lengths = [len(completion.tokens) for completion in completions]
        self.spent.append(
            Spent(
                [len(group.prompt) for group in groups],
                [[len(part.tokens) for part in group.done] or [0] * size for group in groups],
                [lengths[place * size : (place + 1) * size] for place in range(len(groups))],
                sum(int(completion.injected.sum()) for completion in completions),
            )
        )

    def _put_aside(self, group: StartedGroup, whole: Sequence[Completion], keeps_partial: bool) -> None:
        self.put_aside += 1
        if keeps_partial:
            self.memory.leftovers.append(group_to_state(group.index, group.number, group.progress, whole))
        else:
            self.spent[-1].discarded += sum(len(completion.tokens) for completion in whole)
