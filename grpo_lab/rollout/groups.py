"""One problem's group of responses: requested, graded together, and saved as plain values while unfinished."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from grpo_lab.distributed import ranks
from grpo_lab.rollout.grading import (
    decode,
    encode_prompts,
    grade,
    group_requests,
    to_rollouts,
    tools_for,
    with_target_length,
)
from grpo_lab.tasks.base import Grader, Template
from grpo_lab.tricks.curriculum import UNBOUNDED, Curriculum, Memory, Pool
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.tricks.truncation import Truncation
from grpo_lab.types import (
    Completion,
    Groups,
    Int,
    NoiseKey,
    OnFinish,
    Problem,
    Request,
    Rollouts,
    Sampler,
    SamplingParams,
    StopReason,
    Tensor,
    Tools,
)


@dataclass(frozen=True)
class StartedGroup:
    """One problem whose responses are being generated; `done` holds the partial responses, () if there are none."""

    index: int  # of the problem in the training split
    problem: Problem
    prompt: tuple[int, ...]
    number: int  # of the batch for which the problem was drawn; it stays in the noise key when generation continues
    progress: float  # share of the budget spent when the problem was drawn
    done: tuple[Completion, ...]

    def whole(self, further: Sequence[Completion]) -> list[Completion]:
        """Each partial response followed by its completion in `further`."""
        if not self.done:
            return list(further)
        return [part.continued(end) for part, end in zip(self.done, further)]


@dataclass
class Spent:
    """Token counts of one call of the sampler, for the account and the cost model.

    `prompts` are prompt lengths [P]. `before` and `added` are response tokens that existed before the call and that
    the call added [P][G]; `injected` of the added ones were injected by a trick. `discarded` tokens were thrown away
    with their group. `read_again` are the lengths of texts that were prefilled again after a weight sync."""

    prompts: list[int]
    before: list[list[int]]
    added: list[list[int]]
    injected: int
    discarded: int = 0
    read_again: tuple[int, ...] = ()


@dataclass(frozen=True)
class ProblemSource:
    """Stage 1: where a run's training problems come from."""

    curriculum: Curriculum
    difficulties: Int[Tensor, "S"]
    possible_answers: Int[Tensor, "S"]
    sources: Int[Tensor, "S"]
    shares: Mapping[str, float]
    problems_per_step: int
    seed: int

    @classmethod
    def of(
        cls,
        curriculum: Curriculum,
        mixture: Mapping[str, float],
        problems: Sequence[Problem],
        problems_per_step: int,
        seed: int,
    ) -> ProblemSource:
        """The source of the training problems `problems`; `mixture` is the task's share of each source, {} for one."""
        difficulties = torch.tensor([problem.difficulty for problem in problems])
        possible = torch.tensor([problem.possible_answers or UNBOUNDED for problem in problems])
        shares = mixture or {"": 1.0}
        sources = torch.tensor([list(shares).index(problem.source) for problem in problems])
        return cls(curriculum, difficulties, possible, sources, shares, problems_per_step, seed)

    def draw(self, number: int, memory: Memory, progress: float, taken: frozenset[int]) -> list[int]:
        """Indices of the next `number` problems, none of them in `taken`. Advances the memory's stream position.

        Raises Exhausted when too few are left.
        """
        about = (self.difficulties, self.possible_answers)
        whose = (self.sources, self.shares)
        pool = Pool(*about, self.problems_per_step, self.seed, progress, memory, taken, *whose)
        return self.curriculum.draw(number, pool)


@dataclass(frozen=True)
class GroupMaker:
    """Stages 2 to 5: generates the responses to a problem, and grades, shapes and masks them as one group."""

    problems: tuple[Problem, ...]  # of the training split
    tokenizer: transformers.PreTrainedTokenizerBase
    template: Template
    reward: Grader
    reward_shaping: RewardShaping
    truncation: Truncation
    params: SamplingParams
    group_size: int
    seed: int

    @property
    def tools(self) -> Tools:
        """Functions for tricks that generate."""
        return tools_for(self.tokenizer)

    def start(self, index: int, number: int, progress: float, done: tuple[Completion, ...] = ()) -> StartedGroup:
        """The group of problem `index` of the training split, drawn for batch `number` at `progress` of the budget."""
        problem = self.problems[index]
        key = NoiseKey(self.seed, "train", number, problem.id, 0)
        problem = with_target_length(self.reward_shaping, self.template, problem, key)
        (prompt,) = encode_prompts(self.tokenizer, self.template, [problem])
        return StartedGroup(index, problem, prompt, number, progress, done)

    def requests(self, group: StartedGroup) -> list[Request]:
        """One request for each response of the group, with its partial response as the prefix."""
        fresh = group_requests(
            [group.problem], [group.prompt], self.group_size, self.params, self.seed, "train", group.number
        )
        if not group.done:
            return fresh
        return [replace(request, prefix=part.ids) for request, part in zip(fresh, group.done)]

    def generate(
        self, sampler: Sampler, requests: Sequence[Request], on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """One completion per request, generated under the run's truncation option."""
        return self.truncation.generate(sampler, requests, self.tools, on_finish)

    def grade(
        self, groups: Sequence[StartedGroup], completions: Sequence[Completion], memory: Memory | None = None
    ) -> Groups:
        """Grade, shape and mask whole responses [P * G].

        `memory` has the rubrics that the reward gathered, for a reward that does; without it, groups keep their own.
        """
        problems = [group.problem for group in groups]
        rollouts = to_rollouts(problems, [group.prompt for group in groups], self.group_size, completions)
        texts = decode(self.tokenizer, rollouts)
        if memory is not None and self.reward.gathers:
            held = [replace(group.problem, rubrics=memory.rubrics.get(group.index, ())) for group in groups]
            problems = ranks.on_first(lambda: self.reward.contrasted(held, self._by_group(texts)))
            rollouts = replace(rollouts, problems=tuple(problems))
        keys = [request.noise for group in groups for request in self.requests(group)]
        progress = torch.tensor([[group.progress] * self.group_size for group in groups], dtype=torch.float64)
        graded = replace(grade(rollouts, texts, self.reward, keys), progress=progress)
        shaped = self.reward_shaping(graded)
        indices = tuple(group.index for group in groups)
        return Groups(indices, rollouts, tuple(texts), graded, shaped, self.truncation(shaped))

    def note(self, made: Groups, memory: Memory) -> None:
        """Add the results of graded groups to the run's memory."""
        memory.note(torch.tensor(made.indices), made.graded.correctness, made.shaped.reward, made.graded.in_statistics)
        if self.reward.gathers:
            left = ranks.on_first(lambda: self.reward.learnt(made.rollouts.problems, self._by_group(made.texts)))
            memory.rubrics.update(zip(made.indices, left))

    def _by_group(self, texts: Sequence[str]) -> list[Sequence[str]]:
        return [texts[row : row + self.group_size] for row in range(0, len(texts), self.group_size)]

    def from_state(self, state: dict[str, Any]) -> StartedGroup:
        """The group that `group_to_state` saved, to continue generating."""
        done = tuple(
            Completion.of(
                part["tokens"],
                part["logprobs"],
                part["versions"],
                StopReason(part["stop"]),
                part.get("injected", ()),
            )
            for part in state["responses"]
        )
        started = self.start(state["index"], state["step"], state["progress"], done)
        return replace(started, problem=replace(started.problem, rubrics=state.get("rubrics", ())))


def group_to_state(
    index: int,
    number: int,
    progress: float,
    responses: Sequence[Completion],
    rubrics: tuple[tuple[str, float], ...] = (),
) -> dict[str, Any]:
    """A group's responses so far, and the rubrics they were graded by if they were, as plain values."""
    return {
        "rubrics": rubrics,
        "index": index,
        "step": number,
        "progress": progress,
        "responses": [
            {
                "tokens": part.tokens.tolist(),
                "logprobs": part.logprobs.tolist(),
                "versions": part.weight_versions.tolist(),
                "stop": part.stop.value,
                "injected": part.injected.tolist() if part.injected.any() else [],
            }
            for part in responses
        ],
    }


def completions_of(rollouts: Rollouts) -> list[Completion]:
    """The responses of `rollouts`, one completion per row."""
    found = []
    for row, length in enumerate(rollouts.lengths.tolist()):
        stop = StopReason.EOS if rollouts.finished[row] else StopReason.LENGTH
        found.append(
            Completion(
                rollouts.tokens[row, :length],
                rollouts.sampler_logprobs[row, :length],
                rollouts.weight_version[row, :length],
                StopReason.REPETITION if rollouts.looped[row] else stop,
                ~rollouts.sampled_mask[row, :length],
            )
        )
    return found
