"""Stages 1 to 6 over time: which batch a step trains on, and under which weights its responses were drawn.

A `RolloutQueue` carries a schedule out. `BatchQueue` holds whole batches, each drawn by one set of weights; stream.py
lets responses grow across syncs. What waits here has been generated and is not in the ledger yet: it is counted when a
step takes it, so runs of different schedules at one budget have trained on equally much.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import transformers

from grpo_lab.budget.cost_model import SimulatedClock
from grpo_lab.budget.ledger import Ledger, ModelFlops
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.base import EngineSession
from grpo_lab.rollout.groups import GroupMaker, ProblemSource, Spent, completions_of, group_to_state
from grpo_lab.rollout.rounds import Rounds
from grpo_lab.tricks.curriculum import Memory
from grpo_lab.tricks.group_filter import GroupFilter
from grpo_lab.types import Exhausted, Graded, Groups, Problem, Rollouts, Tensor


@dataclass(frozen=True)
class RolloutBatch:
    """What a step trains on and what it took to get it.

    `made` are all whole groups that were generated for it, `groups` those of them that it goes on with, at the places
    `chosen`, and `filtered` is what the group filter says of these. `started` counts groups whose generation was cut
    off too, `passed_over` is the share of problems the curriculum did not take. `ready_at` is when the last of its
    responses ended, in simulated seconds.
    """

    made: Groups
    chosen: tuple[int, ...]
    groups: Groups
    filtered: Graded
    numbers: tuple[int, ...]  # of the batch for which each of the groups was drawn
    spent: tuple[Spent, ...]
    passed_over: float
    started: int
    ready_at: float

    @classmethod
    def of(cls, group_filter: GroupFilter, made: Groups, chosen: tuple[int, ...], **rest: Any) -> RolloutBatch:
        """The batch of the groups at `chosen`, which takes stage 6, the filter, to its end; `rest` are other fields."""
        groups = made.choose(chosen)
        return cls(made=made, chosen=chosen, groups=groups, filtered=group_filter(groups.masked), **rest)

    @property
    def rollouts(self) -> Rollouts:
        """The responses that the step goes on with."""
        return self.groups.rollouts

    def count(self, ledger: Ledger, model_flops: ModelFlops) -> None:
        """Enter what was generated into the ledger."""
        for spent in self.spent:
            ledger.generated(model_flops, spent.prompts, spent.added, spent.before, spent.injected)
            ledger.flops += sum(model_flops.span(0, length) for length in spent.read_again)
            ledger.discarded_tokens += spent.discarded
        ledger.discarded_tokens += int(self.made.rollouts.sampled_mask.sum()) - int(self.rollouts.sampled_mask.sum())

    def to_state(self) -> dict[str, Any]:
        """Plain values for a checkpoint: the texts, from which all the rest follows."""
        made, size = self.made, self.made.rollouts.group_size
        assert made.graded.progress is not None, "what is drawn for training has a progress"
        responses, progress = completions_of(made.rollouts), made.graded.progress[:, 0].tolist()
        groups = [
            group_to_state(index, number, progress[place], responses[place * size : (place + 1) * size])
            for place, (index, number) in enumerate(zip(made.indices, self.numbers))
        ]
        plain = {name: getattr(self, name) for name in ("chosen", "passed_over", "started", "ready_at")}
        return plain | {"groups": groups, "spent": [asdict(spent) for spent in self.spent]}

    @classmethod
    def from_state(cls, state: dict[str, Any], maker: GroupMaker, group_filter: GroupFilter) -> RolloutBatch:
        """The batch that `to_state` wrote down."""
        rest = {name: state[name] for name in ("passed_over", "started", "ready_at")}
        groups = [maker.from_state(group) for group in state["groups"]]
        made = maker.grade(groups, [part for group in groups for part in group.done])
        return cls.of(
            group_filter,
            made,
            state["chosen"],
            numbers=tuple(group.number for group in groups),
            spent=tuple(Spent(**one) for one in state["spent"]),
            **rest,
        )


class RolloutQueue(ABC):
    """Generates for a run what its steps train on, and hands new weights to the sampler when their time has come.

    `memory` is what is remembered of each training problem, which the curriculum reads.
    """

    def __init__(
        self,
        run: RunConfig,
        session: EngineSession,
        tokenizer: transformers.PreTrainedTokenizerBase,
        problems: tuple[Problem, ...],
        ledger: Ledger,
        model_flops: ModelFlops,
    ) -> None:
        self.run, self.session, self.ledger, self.model_flops = run, session, ledger, model_flops
        self.source = ProblemSource.of(run, problems)
        self.maker = GroupMaker.of(run, problems, tokenizer)
        self.memory = Memory.of(len(problems))
        self.clock = SimulatedClock()

    @abstractmethod
    def take(self) -> RolloutBatch:
        """The batch of the next step. Raises Exhausted where none can be made."""

    @abstractmethod
    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give the sampler the learner's named weights after a step; `version` counts the updates behind them."""

    def to_state(self) -> dict[str, Any]:
        """What is remembered, what waits and what grows, in plain values and tensors."""
        return {"memory": self.memory.to_state(), "clock": self.clock.to_state()}

    def from_state(self, state: dict[str, Any]) -> None:
        """Go on from what `to_state` gave, once the sampler has the learner's weights."""
        self.memory = Memory(**state["memory"])
        self.clock = SimulatedClock(**state["clock"])

    @abstractmethod
    def close(self) -> None:
        """Stop whatever still runs."""

    def metrics(self) -> dict[str, float]:
        """Numbers of simulated time, for the log."""
        return self.clock.metrics()

    def _trained(self, batch: RolloutBatch) -> float:
        """Let the learner train on a batch in simulated time; returns when it has ended."""
        ended = self.clock.train(training_seconds(self.run, batch), batch.ready_at)
        self.ledger.simulated_seconds = ended
        return ended


class BatchQueue(RolloutQueue):
    """Whole batches one after another, each under the weights that the sampler has when its turn comes.

    With an engine that has a process of its own, batches beyond the one that is needed at once are generated by a
    thread that waits for it while the learner trains; new weights wait until it has ended. What is drawn by which
    weights is the same either way.
    """

    def __init__(self, run: RunConfig, *parts: Any) -> None:
        super().__init__(run, *parts)
        self.number = 0  # batches begun
        self.ready: deque[RolloutBatch] = deque()
        self.weights_at = 0.0  # when the sampler's weights arrived, in simulated time
        self.thread = ThreadPoolExecutor(1) if run.engine.overlaps and run.schedule.overlaps else None
        self.behind: Future[None] | None = None
        self.ran_dry: Exhausted | None = None

    def take(self) -> RolloutBatch:
        due = 0 if self.ran_dry is not None else self.run.schedule.batches_due(len(self.ready))
        at_once = due if self.thread is None else min(due, 0 if self.ready else 1)
        progress = self.ledger.spent(self.run.budget)  # read here: the ledger goes on beside the thread
        self._generate(at_once, progress)
        if not self.ready:
            assert self.ran_dry is not None, "a schedule with nothing ready asks for a batch"
            raise self.ran_dry
        batch = self.ready.popleft()
        if self.thread is not None and due > at_once:
            self.behind = self.thread.submit(self._generate, due - at_once, progress)
        batch.count(self.ledger, self.model_flops)
        self._trained(batch)
        return batch

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        behind, self.behind = self.behind, None
        if behind is not None:
            behind.result()
        self.session.update_weights(weights, version)
        self.weights_at = self.clock.learner = self.clock.learner + self.run.cost_model.sync

    def _generate(self, batches: int, progress: float) -> None:
        """Put further batches behind those that wait; where no more can be made, those are trained on first."""
        try:
            for _ in range(batches):
                self.ready.append(self._one(progress))
        except Exhausted as error:
            self.ran_dry = error

    def _one(self, progress: float) -> RolloutBatch:
        run = self.run
        rounds = Rounds(self.source, self.maker, self.session, self.memory, self.number, progress)
        collected = run.group_filter.collect(rounds, run.problems_per_step)
        self.memory = rounds.remember(collected.made)
        self.number += 1
        seconds = sum(generation_seconds(run, spent) for spent in rounds.spent)
        return RolloutBatch.of(
            run.group_filter,
            collected.made,
            collected.chosen,
            numbers=tuple(rounds.numbers[index] for index in collected.made.indices),
            spent=tuple(rounds.spent),
            passed_over=rounds.passed_over,
            started=rounds.started(collected.made),
            ready_at=self.clock.generate(seconds, self.weights_at),
        )

    def to_state(self) -> dict[str, Any]:
        return super().to_state() | {
            "number": self.number,
            "weights_at": self.weights_at,
            "ready": [batch.to_state() for batch in self.ready],
        }

    def from_state(self, state: dict[str, Any]) -> None:
        super().from_state(state)
        self.number, self.weights_at = state["number"], state["weights_at"]
        self.ready = deque(
            RolloutBatch.from_state(waiting, self.maker, self.run.group_filter) for waiting in state["ready"]
        )

    def close(self) -> None:
        if self.thread is not None:
            self.thread.shutdown(wait=True, cancel_futures=True)


def generation_seconds(run: RunConfig, spent: Spent) -> float:
    """Simulated time of one call of the sampler."""
    lengths = [length for group in spent.added for length in group]
    read = sum(spent.prompts) + sum(
        part for parts, group in zip(spent.before, spent.added) for part, new in zip(parts, group) if new
    )
    return run.cost_model.reading(read) + run.cost_model.decoding(lengths, run.engine.max_rows)


def training_seconds(run: RunConfig, batch: RolloutBatch) -> float:
    """Simulated time that a step spends on a batch, from its lengths: log-probs, updates, and a critic as large."""
    rollouts, trained = batch.rollouts, batch.filtered.trained.flatten().tolist()
    lengths = [len(rollouts.prompt_of_row(row)) + length for row, length in enumerate(rollouts.lengths.tolist())]
    passes = run.needs_logprobs + run.kl.needs_reference
    in_loss = sum(length for length, stays in zip(lengths, trained) if stays)
    seconds = run.cost_model.reading(passes * sum(lengths))
    seconds += run.cost_model.training(run.updates.passes * in_loss, run.updates.number)
    if run.baseline.needs_critic:
        seconds += run.cost_model.reading(sum(lengths)) + run.cost_model.training(sum(lengths), run.critic.minibatches)
    return seconds
