"""Stages 1 to 5 of a step, as often as the group filter asks for more groups.

`Rounds` works on a copy of what the run remembers, and the loop takes the copy over once the batch is full. So a
step that cannot be filled leaves the run as it was after the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from grpo_lab.config import RunConfig
from grpo_lab.rollouts import decode, encode_prompts, grade, group_requests, to_rollouts
from grpo_lab.tools import tools_for, with_wish
from grpo_lab.tricks.curriculum import Pool
from grpo_lab.types import Completion, Graded, Groups, NoiseKey, Problem, Request, StopReason

if TYPE_CHECKING:
    from grpo_lab.workbench import Workbench


@dataclass
class Spent:
    """One call of the sampler: prompt lengths [P], tokens that existed and tokens that were added of each response
    [P][G], how many of the added were put in by a trick, and how many tokens were thrown away with their group."""

    prompts: list[int]
    before: list[list[int]]
    added: list[list[int]]
    injected: int
    discarded: int = 0


@dataclass(frozen=True)
class _Group:
    """One problem on its way: what was asked of it, and what exists of each response already."""

    index: int
    problem: Problem
    prompt: tuple[int, ...]
    step: int  # at which it was drawn: its noise goes on with that number
    done: tuple[Completion, ...]


class Rounds:
    """The groups of one step; satisfies `types.GroupSource`."""

    def __init__(self, run: RunConfig, bench: Workbench) -> None:
        self.run, self.bench, self.step = run, bench, bench.ledger.steps
        self.memory = bench.memory.copy()
        self.passed_before = self.memory.passed
        self.taken: frozenset[int] = frozenset()
        self.drawn = 0
        self.put_aside = 0  # groups whose generation was cut off
        self.spent: list[Spent] = []
        self.tools = tools_for(bench.tokenizer)

    def groups(self, number: int) -> Groups:
        """Draw, generate, grade, shape and cut that many further problems."""
        fresh = self._fresh(self._draw(number))
        requests = self._requests(fresh)
        completions = self.run.truncation.generate(self.bench.session, requests, self.tools)
        self._count(fresh, completions)
        return self._graded(fresh, completions)

    def race(self, number: int, wanted: int, accepts: Callable[[Graded], bool], keeps_partial: bool) -> Groups:
        """See `types.GroupSource.race`; what an earlier race left comes first, and only the rest is drawn."""
        size = self.run.group_size
        started = [self._revived(left) for left in self.memory.leftovers[:number]]
        self.taken |= {group.index for group in started}
        self.memory.leftovers = self.memory.leftovers[number:]
        started += self._fresh(self._draw(number - len(started)))
        requests = self._requests(started)
        found = self._ended_before(started)
        finished: list[int] = []  # places of groups in the order in which they ended
        accepted = 0

        def settle(place: int) -> None:
            """Take a group into account if its last response has ended."""
            nonlocal accepted
            rows = range(place * size, (place + 1) * size)
            if accepted < wanted and place not in finished and all(row in found for row in rows):
                finished.append(place)
                whole = self._whole(started[place], [found[row] for row in rows])
                accepted += accepts(self._graded([started[place]], whole).cut)

        def on_finish(row: int, completion: Completion) -> Sequence[int]:
            if accepted == wanted:  # ended in the very moment in which the race was over
                return ()
            found[row] = completion
            settle(row // size)
            return [row for row in range(len(requests)) if row not in found] if accepted == wanted else ()

        for place in range(len(started)):
            settle(place)
        if accepted < wanted:
            completions = self.run.truncation.generate(self.bench.session, requests, self.tools, on_finish)
        else:
            nothing = Completion((), (), (), StopReason.ABORTED)
            completions = [found.get(row, nothing) for row in range(len(requests))]
        self._count(started, completions)
        whole = [self._whole(group, completions[p * size : (p + 1) * size]) for p, group in enumerate(started)]
        for place, group in enumerate(started):
            if place not in finished:
                self._put_aside(group, whole[place], keeps_partial)
        return self._graded([started[place] for place in finished], [c for place in finished for c in whole[place]])

    def _ended_before(self, started: Sequence[_Group]) -> dict[int, Completion]:
        """Rows of responses that had ended before their siblings were cut off: nothing is left to generate of them."""
        size = self.run.group_size
        return {
            place * size + member: Completion((), (), (), part.stop)
            for place, group in enumerate(started)
            for member, part in enumerate(group.done)
            if part.stop is not StopReason.ABORTED
        }

    def settle(self, made: Groups, chosen: Sequence[int]) -> None:
        """Take the step's groups into the run's memory and its ledger, once the batch is full."""
        memory, ledger = self.memory, self.bench.ledger
        memory.note(torch.tensor(made.indices), made.graded.outcome, made.shaped.reward)
        self.bench.memory = memory
        for spent in self.spent:
            ledger.generated(self.bench.cost, spent.prompts, spent.added, spent.before, spent.injected)
            ledger.discarded_tokens += spent.discarded
        ledger.discarded_tokens += int(made.rollouts.sampled_mask.sum())
        ledger.discarded_tokens -= int(made.rollouts.choose(chosen).sampled_mask.sum())

    @property
    def passed_over(self) -> float:
        """Share of the problems whose turn came that the curriculum did not take."""
        passed = self.memory.passed - self.passed_before
        return passed / (self.drawn + passed) if passed else 0.0

    def started(self, made: Groups) -> int:
        """Groups whose generation began or went on in this step: those that were made, and those that were cut off."""
        return made.number + self.put_aside

    def _draw(self, number: int) -> list[int]:
        if not number:
            return []
        run, bench = self.run, self.bench
        pool = Pool(
            bench.difficulties, run.problems_per_step, run.seed, bench.ledger.spent(run.budget), self.memory, self.taken
        )
        drawn = run.curriculum.draw(number, pool)
        self.taken |= set(drawn)
        self.drawn += number
        return drawn

    def _fresh(self, indices: Sequence[int]) -> list[_Group]:
        return [self._asked(index, self.step, ()) for index in indices]

    def _asked(self, index: int, step: int, done: tuple[Completion, ...]) -> _Group:
        run, problem = self.run, self.bench.problems[index]
        problem = with_wish(run.reward_shaping, run.template, problem, NoiseKey(run.seed, "train", step, problem.id, 0))
        (prompt,) = encode_prompts(self.bench.tokenizer, run.template, [problem])
        return _Group(index, problem, prompt, step, done)

    def _requests(self, groups: Sequence[_Group]) -> list[Request]:
        requests = []
        for group in groups:
            own = group_requests(
                [group.problem], [group.prompt], self.run.group_size, self.run.engine.params, self.run.seed, "train",
                group.step,
            )  # fmt: skip
            if group.done:
                own = [replace(request, prefix=part.tokens) for request, part in zip(own, group.done)]
            requests += own
        return requests

    def _whole(self, group: _Group, completions: Sequence[Completion]) -> list[Completion]:
        """What existed of each response and what was drawn after it, as one."""
        if not group.done:
            return list(completions)
        return [part.continued(further) for part, further in zip(group.done, completions)]

    def _graded(self, groups: Sequence[_Group], completions: Sequence[Completion]) -> Groups:
        run = self.run
        problems = [group.problem for group in groups]
        rollouts = to_rollouts(problems, [group.prompt for group in groups], run.group_size, completions)
        texts = decode(self.bench.tokenizer, rollouts)
        graded = grade(rollouts, texts, run.reward)
        shaped = run.reward_shaping(graded)
        indices = tuple(group.index for group in groups)
        return Groups(indices, rollouts, tuple(texts), graded, shaped, run.truncation(shaped))

    def _count(self, groups: Sequence[_Group], completions: Sequence[Completion]) -> None:
        """Note what was generated."""
        size = self.run.group_size
        lengths = [len(completion.tokens) for completion in completions]
        self.spent.append(
            Spent(
                [len(group.prompt) for group in groups],
                [[len(part.tokens) for part in group.done] or [0] * size for group in groups],
                [lengths[place * size : (place + 1) * size] for place in range(len(groups))],
                sum(sum(completion.injected) for completion in completions),
            )
        )

    def _put_aside(self, group: _Group, whole: Sequence[Completion], keeps_partial: bool) -> None:
        self.put_aside += 1
        if keeps_partial:
            self.memory.leftovers.append(_laid_down(group, whole))
        else:
            self.spent[-1].discarded += sum(len(completion.tokens) for completion in whole)

    def _revived(self, left: dict[str, Any]) -> _Group:
        done = tuple(
            Completion(
                tuple(part["tokens"]), tuple(part["logprobs"]), tuple(part["versions"]), StopReason(part["stop"])
            )
            for part in left["responses"]
        )
        return self._asked(left["index"], left["step"], done)


def _laid_down(group: _Group, whole: Sequence[Completion]) -> dict[str, Any]:
    """A group that was cut off, in plain values that a checkpoint can hold."""
    responses = [
        {
            "tokens": list(part.tokens),
            "logprobs": list(part.logprobs),
            "versions": list(part.weight_versions),
            "stop": part.stop.value,
        }
        for part in whole
    ]
    return {"index": group.index, "step": group.step, "responses": responses}
