"""One problem's responses on their way: asked for, graded together, and written down in plain values between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers

from grpo_lab.config.run_config import RunConfig
from grpo_lab.rollout.grading import (
    decode,
    encode_prompts,
    grade,
    group_requests,
    to_rollouts,
    tools_for,
    with_target_length,
)
from grpo_lab.tasks.base import Reward, Template
from grpo_lab.tricks.curriculum import Curriculum, Memory, Pool
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
    """One problem on its way: what is asked of it, and what exists of each response already; () for nothing."""

    index: int  # of the problem in the training split
    problem: Problem
    prompt: tuple[int, ...]
    number: int  # of the batch for which it was drawn: its noise goes on with that number
    progress: float  # share of the budget that was spent when it was drawn
    done: tuple[Completion, ...]

    def whole(self, further: Sequence[Completion]) -> list[Completion]:
        """What existed of each response and what was drawn after it, as one."""
        if not self.done:
            return list(further)
        return [part.continued(end) for part, end in zip(self.done, further)]


@dataclass
class Spent:
    """One call of the sampler: prompt lengths [P], tokens that existed and tokens that were added of each response
    [P][G], how many of the added were put in by a trick, and how many tokens were thrown away with their group.
    `read_again` are the lengths of texts that were read once more because new weights arrived under them."""

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
    problems_per_step: int
    seed: int

    @classmethod
    def of(cls, run: RunConfig, problems: Sequence[Problem]) -> ProblemSource:
        """The source of `run` over its training split."""
        difficulties = torch.tensor([problem.difficulty for problem in problems])
        return cls(run.curriculum, difficulties, run.problems_per_step, run.seed)

    def draw(self, number: int, memory: Memory, progress: float, taken: frozenset[int]) -> list[int]:
        """Indices of the next problems, none of them in `taken`; moves the memory's place in the stream.

        Raises Exhausted where too few are left.
        """
        pool = Pool(self.difficulties, self.problems_per_step, self.seed, progress, memory, taken)
        return self.curriculum.draw(number, pool)


@dataclass(frozen=True)
class GroupMaker:
    """Stages 2 to 5: asks for the responses to a problem, and grades, shapes and masks them as one group."""

    problems: tuple[Problem, ...]  # of the training split
    tokenizer: transformers.PreTrainedTokenizerBase
    template: Template
    reward: Reward
    reward_shaping: RewardShaping
    truncation: Truncation
    params: SamplingParams
    group_size: int
    seed: int

    @classmethod
    def of(
        cls, run: RunConfig, problems: tuple[Problem, ...], tokenizer: transformers.PreTrainedTokenizerBase
    ) -> GroupMaker:
        """The maker of `run`, whose model reads with `tokenizer`."""
        return cls(
            problems, tokenizer, run.template, run.reward, run.reward_shaping, run.truncation, run.engine.params,
            run.group_size, run.seed,
        )  # fmt: skip

    @property
    def tools(self) -> Tools:
        """What a trick that generates may use beside the sampler."""
        return tools_for(self.tokenizer)

    def start(self, index: int, number: int, progress: float, done: tuple[Completion, ...] = ()) -> StartedGroup:
        """The group of the problem at `index` of the training split, drawn for batch `number`, at `progress`."""
        problem = self.problems[index]
        key = NoiseKey(self.seed, "train", number, problem.id, 0)
        problem = with_target_length(self.reward_shaping, self.template, problem, key)
        (prompt,) = encode_prompts(self.tokenizer, self.template, [problem])
        return StartedGroup(index, problem, prompt, number, progress, done)

    def requests(self, group: StartedGroup) -> list[Request]:
        """One request for each of the group's responses, behind what exists of it."""
        fresh = group_requests(
            [group.problem], [group.prompt], self.group_size, self.params, self.seed, "train", group.number
        )
        if not group.done:
            return fresh
        return [replace(request, prefix=part.tokens) for request, part in zip(fresh, group.done)]

    def generate(
        self, sampler: Sampler, requests: Sequence[Request], on_finish: OnFinish | None = None
    ) -> list[Completion]:
        """One completion per request, drawn in the way in which this run ends responses."""
        return self.truncation.generate(sampler, requests, self.tools, on_finish)

    def grade(self, groups: Sequence[StartedGroup], completions: Sequence[Completion]) -> Groups:
        """Whole responses [P * G] graded, shaped and masked."""
        problems = [group.problem for group in groups]
        rollouts = to_rollouts(problems, [group.prompt for group in groups], self.group_size, completions)
        texts = decode(self.tokenizer, rollouts)
        progress = torch.tensor([[group.progress] * self.group_size for group in groups], dtype=torch.float64)
        graded = replace(grade(rollouts, texts, self.reward), progress=progress)
        shaped = self.reward_shaping(graded)
        indices = tuple(group.index for group in groups)
        return Groups(indices, rollouts, tuple(texts), graded, shaped, self.truncation(shaped))

    def from_state(self, state: dict[str, Any]) -> StartedGroup:
        """The group that `group_to_state` wrote down, to go on with."""
        done = tuple(
            Completion(
                tuple(part["tokens"]),
                tuple(part["logprobs"]),
                tuple(part["versions"]),
                StopReason(part["stop"]),
                tuple(part.get("injected", ())),
            )
            for part in state["responses"]
        )
        return self.start(state["index"], state["step"], state["progress"], done)


def group_to_state(index: int, number: int, progress: float, responses: Sequence[Completion]) -> dict[str, Any]:
    """What exists of the responses of a group, in plain values that a checkpoint can hold."""
    return {
        "index": index,
        "step": number,
        "progress": progress,
        "responses": [
            {
                "tokens": list(part.tokens),
                "logprobs": list(part.logprobs),
                "versions": list(part.weight_versions),
                "stop": part.stop.value,
                "injected": list(part.injected),
            }
            for part in responses
        ],
    }


def completions_of(rollouts: Rollouts) -> list[Completion]:
    """The responses of a record as the engine gave them."""
    found = []
    for row, length in enumerate(rollouts.lengths.tolist()):
        stop = StopReason.EOS if rollouts.finished[row] else StopReason.LENGTH
        injected = ~rollouts.sampled_mask[row, :length]
        found.append(
            Completion(
                tuple(rollouts.tokens[row, :length].tolist()),
                tuple(rollouts.sampler_logprobs[row, :length].tolist()),
                tuple(rollouts.weight_version[row, :length].tolist()),
                StopReason.REPETITION if rollouts.looped[row] else stop,
                tuple(injected.tolist()) if injected.any() else (),
            )
        )
    return found
