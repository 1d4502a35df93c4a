"""Stages 1 to 6 with continuous generation: a batch is the first groups to finish, and syncs interrupt the others.

`StreamQueue` tracks which groups are growing or finished and how far generation may run ahead. `SimulatedStream` runs
an in-process engine step by step in simulated time, so weights change at reproducible tokens. `LiveStream` takes what
an engine in another process generated in real time.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import transformers

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.config.run_config import RunConfig
from grpo_lab.config.stages import QueueSettings
from grpo_lab.engines.base import EngineSession, Stream, all_ended
from grpo_lab.engines.native_stream import NativeStream
from grpo_lab.rollout.groups import GroupMaker, ProblemSource, Spent, StartedGroup, completions_of, group_to_state
from grpo_lab.rollout.queue import BatchQueue, RolloutBatch, RolloutQueue
from grpo_lab.tracking.activity import doing
from grpo_lab.types import Completion, Exhausted, Groups, Problem, Request, Tensor


@dataclass
class _Growing:
    """An unfinished group. `parts` holds each response so far, without the tokens that are still in the stream."""

    group: StartedGroup
    parts: list[Completion | None]
    ended: list[bool]


@dataclass(frozen=True)
class _Whole:
    """A finished group; `at` is when its last response ended, in simulated seconds."""

    group: StartedGroup
    made: Groups
    at: float


class StreamQueue(RolloutQueue):
    """The shared part of both streaming queues: the groups and the limit on running ahead."""

    stream: Stream

    def __init__(self, settings: QueueSettings, *parts: Any) -> None:
        super().__init__(settings, *parts)
        self.stream = self.session.open_stream()
        self.tools = self.maker.tools
        self.growing: dict[int, _Growing] = {}  # by ticket; a response's key is ticket * group_size + its number
        self.ready: list[_Whole] = []
        self.thrown: list[_Whole] = []  # by the group filter, for the next batch
        self.tickets = 0
        self.in_training = 0  # groups
        self.drawn = self.passed = self.replayed = 0  # problems, for the next batch
        self.read_again: list[int] = []
        self.ran_dry: Exhausted | None = None

    @property
    def groups_per_batch(self) -> int:
        """Groups per batch."""
        return self.settings.problems_per_step

    def take(self) -> RolloutBatch:
        self._admit()
        with doing("", self.groups_per_batch, "groups") as shown:
            while (done := len(self.ready)) < self.groups_per_batch:
                shown.done = done
                self._refuse_to_throw_on()
                if self.ran_dry is not None and not self.growing:
                    raise self.ran_dry
                self._advance()
        batch, self.ready = self.ready[: self.groups_per_batch], self.ready[self.groups_per_batch :]
        whole = self.thrown + batch
        self.in_training = len(batch)
        taken = RolloutBatch.of(
            self.settings,
            Groups.join([one.made for one in whole]),
            tuple(range(len(self.thrown), len(whole))),
            numbers=tuple(one.group.number for one in whole),
            spent=(self._spent(whole),),
            passed_over=(self.passed + self.replayed) / max(self.drawn + self.passed, 1),
            started=len(whole),
            ready_at=max(one.at for one in batch),
        )
        self.thrown, self.drawn, self.passed, self.replayed, self.read_again = [], 0, 0, 0, []
        taken.count(self.account, self.model_flops)
        self._while_training(taken)
        return taken

    @abstractmethod
    def _advance(self) -> None:
        """Run the stream until it reports something, and settle the responses that ended."""

    @abstractmethod
    def _while_training(self, batch: RolloutBatch) -> None:
        """Run the stream while the learner trains."""

    def _admit(self) -> None:
        """Start further groups, as far ahead as the schedule allows and while problems can be drawn."""
        self.ran_dry = None
        bound = self.groups_per_batch * (self.settings.schedule.ahead + 1)
        progress = self.account.spent(self.settings.budget)
        while len(self.growing) + len(self.ready) + self.in_training < bound:
            try:
                index = self._draw(progress)
            except Exhausted as error:
                self.ran_dry = error  # results of growing groups may still change the curriculum's choice
                return
            group = self.maker.start(index, self.tickets // self.groups_per_batch, progress)
            size = self.maker.group_size
            self.growing[self.tickets] = _Growing(group, [None] * size, [False] * size)
            for member in range(size):
                key = self.tickets * size + member
                self.stream.add(key, self.request(key))
            self.tickets += 1

    def _draw(self, progress: float) -> int:
        held = [one.group.index for one in (*self.growing.values(), *self.ready, *self.thrown)]
        before, replayed = self.memory.passed, self.memory.replayed
        (index,) = self.source.draw(1, self.memory, progress, frozenset(held))
        self.drawn += 1
        self.passed += self.memory.passed - before
        self.replayed += self.memory.replayed - replayed
        return index

    def request(self, key: int) -> Request:
        """The request for response `key`, with its partial response as the prefix."""
        ticket, member = divmod(key, self.maker.group_size)
        growing = self.growing[ticket]
        request, part = self.maker.requests(growing.group)[member], growing.parts[member]
        if part is None:
            return self.maker.truncation.begins(request, self.tools)
        if not part.injected.any():
            request = self.maker.truncation.begins(request, self.tools)
        return replace(request, prefix=part.ids)

    def _settle(self, key: int, completion: Completion) -> None:
        """Record that a response ended, or continue it after the text that the truncation option injects."""
        ticket, member = divmod(key, self.maker.group_size)
        growing = self.growing[ticket]
        part = growing.parts[member]
        so_far = completion if part is None else part.continued(completion)
        growing.parts[member] = so_far
        request = self.maker.requests(growing.group)[member]
        put_in = None if so_far.injected.any() else self.maker.truncation.puts_in(request, so_far, self.tools)
        if put_in is not None:
            growing.parts[member] = so_far.continued(put_in)
            self.stream.add(key, self.request(key))
            return
        growing.ended[member] = True
        if all(growing.ended):
            del self.growing[ticket]
            self._judge(growing)

    def _judge(self, growing: _Growing) -> None:
        """Grade a whole group, note it in memory, and keep it for a batch or throw it away."""
        made = self.maker.grade([growing.group], all_ended(growing.parts), self.memory)
        self.maker.note(made, self.memory)
        chosen = self.settings.group_filter
        whole = _Whole(growing.group, made, self.clock.sampler)
        (self.ready if chosen.accepts(made.masked) else self.thrown).append(whole)

    def _refuse_to_throw_on(self) -> None:
        """Raise Exhausted once the group filter has thrown away more groups for one batch than it may."""
        everything = [one.made for one in (*self.thrown, *self.ready)]
        self.settings.group_filter.check_thrown(everything, len(self.thrown), self.groups_per_batch)

    def _spent(self, whole: list[_Whole]) -> Spent:
        size = self.maker.group_size
        added = [one.made.rollouts.lengths.tolist() for one in whole]
        injected = sum(int((one.made.rollouts.response_mask & ~one.made.rollouts.sampled_mask).sum()) for one in whole)
        prompts = [len(one.group.prompt) for one in whole]
        return Spent(prompts, [[0] * size for _ in whole], added, injected, 0, tuple(self.read_again))

    def part(self, key: int) -> Completion | None:
        """The tokens of a response so far, for a checkpoint; None if there are none."""
        ticket, member = divmod(key, self.maker.group_size)
        return self.growing[ticket].parts[member]

    def to_state(self) -> dict[str, Any]:
        return super().to_state() | {
            "tickets": self.tickets,
            "counts": (self.drawn, self.passed, self.replayed),
            "read_again": list(self.read_again),
            "growing": {ticket: self._state_of(ticket) for ticket in self.growing},
            "ready": [_whole_state(one) for one in self.ready],
            "thrown": [_whole_state(one) for one in self.thrown],
        }

    def _state_of(self, ticket: int) -> dict[str, Any]:
        one, size = self.growing[ticket], self.maker.group_size
        parts = [self.part(ticket * size + member) for member in range(size)]
        existing = [part for part in parts if part is not None]
        return {
            "group": group_to_state(one.group.index, one.group.number, one.group.progress, existing),
            "begun": [part is not None for part in parts],
            "ended": list(one.ended),
        }

    def from_state(self, state: dict[str, Any]) -> None:
        super().from_state(state)
        self.tickets, self.read_again = state["tickets"], list(state["read_again"])
        self.drawn, self.passed, self.replayed = (*state["counts"], 0)[:3]  # two in older checkpoints
        for ticket, saved in state["growing"].items():
            left = self.maker.from_state(saved["group"])
            parts = iter(left.done)
            self.growing[ticket] = _Growing(
                replace(left, done=()),
                [next(parts) if begun else None for begun in saved["begun"]],
                list(saved["ended"]),
            )
        self.ready = [self._whole_of(saved) for saved in state["ready"]]
        self.thrown = [self._whole_of(saved) for saved in state["thrown"]]

    def _whole_of(self, saved: dict[str, Any]) -> _Whole:
        group = self.maker.from_state(saved["group"])
        return _Whole(replace(group, done=()), self.maker.grade([group], group.done), saved["at"])

    def open_keys(self) -> list[int]:
        """Keys of the unfinished responses."""
        size = self.maker.group_size
        return [t * size + m for t, one in self.growing.items() for m, ended in enumerate(one.ended) if not ended]

    def close(self) -> None:
        """Do nothing: unfinished responses end with the session, which may be dead already."""


def _whole_state(whole: _Whole) -> dict[str, Any]:
    held, rollouts = whole.group, whole.made.rollouts
    graded_by = rollouts.problems[0].rubrics
    group = group_to_state(held.index, held.number, held.progress, completions_of(rollouts), graded_by)
    return {"group": group, "at": whole.at}


class SimulatedStream(StreamQueue):
    """The stream of an in-process engine, run step by step in simulated time."""

    stream: NativeStream

    def _advance(self) -> None:
        work = self.stream.step()
        cost_model = self.settings.cost_model
        seconds = cost_model.decode_step + cost_model.decode_token * work.drawn + cost_model.reading(work.read)
        self.clock.generate(seconds)
        for key, completion in self.stream.take(wait=False):
            self._settle(key, completion)
        self._admit()

    def _while_training(self, batch: RolloutBatch) -> None:
        ended = self._trained(batch)
        while self.clock.sampler < ended and self.stream.busy:
            self._advance()

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.in_training = 0
        keeps = self.settings.schedule.keeps_cache
        if not keeps:
            # Read again in the next step, which counts the time. The account counts each text, shared or not.
            self.read_again += self.stream.read_by_recomputing
        self.stream.update_weights(weights, version, keeps)
        began, pause = self.clock.learner, self.settings.cost_model.sync
        self.clock.learner = began + pause
        self.clock.sampler = max(self.clock.sampler, began) + pause

    def to_state(self) -> dict[str, Any]:
        return super().to_state() | {"stream": self.stream.to_state(self.settings.schedule.keeps_cache)}

    def from_state(self, state: dict[str, Any]) -> None:
        super().from_state(state)
        self.stream.from_state(state["stream"], {key: self.request(key) for key in self.open_keys()})


class LiveStream(StreamQueue):
    """The stream of an engine in its own process. It runs in real time, so runs are not reproducible."""

    def __init__(self, settings: QueueSettings, *parts: Any) -> None:
        super().__init__(settings, *parts)
        self.partial: dict[int, Completion] = {}

    def _advance(self) -> None:
        for key, completion in self.stream.take(wait=True):
            self._settle(key, completion)
        self._admit()

    def _while_training(self, batch: RolloutBatch) -> None:
        """Do nothing: the engine's process generates by itself."""

    def sync(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        for key, completion in self.stream.take(wait=False):
            self._settle(key, completion)
        self.in_training = 0
        keeps = self.settings.schedule.keeps_cache
        self.stream.update_weights(weights, version, keeps)
        self._admit()

    def to_state(self) -> dict[str, Any]:
        self.partial = self.stream.partial()
        return super().to_state()

    def part(self, key: int) -> Completion | None:
        held, drawn = super().part(key), self.partial.get(key)
        if drawn is None or not len(drawn.tokens):
            return held
        return drawn if held is None else held.continued(drawn)

    def from_state(self, state: dict[str, Any]) -> None:
        super().from_state(state)
        for key in self.open_keys():
            self.stream.add(key, self.request(key))


def open_queue(
    run: RunConfig,
    session: EngineSession,
    tokenizer: transformers.PreTrainedTokenizerBase,
    problems: tuple[Problem, ...],
    account: ComputeAccount,
    model_flops: ModelFlops,
) -> RolloutQueue:
    """The queue for the run's schedule and engine, over its training problems."""
    source = ProblemSource.of(run.curriculum, run.task.mixture, problems, run.problems_per_step, run.seed)
    maker = GroupMaker(
        problems, tokenizer, run.template, run.reward, run.reward_shaping, run.truncation, run.engine.params,
        run.group_size, run.seed,
    )  # fmt: skip
    streaming = LiveStream if run.engine.overlaps else SimulatedStream
    kind = streaming if run.schedule.streams else BatchQueue
    return kind(run.queue_settings, source, maker, session, account, model_flops)
