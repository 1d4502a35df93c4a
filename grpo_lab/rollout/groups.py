"""One problem's responses on their way: drawn, asked for, graded together, and laid down in plain values between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from grpo_lab.config.run_config import RunConfig
from grpo_lab.rollout.grading import decode, encode_prompts, grade, group_requests, to_rollouts, with_target_length
from grpo_lab.types import Completion, Groups, NoiseKey, Problem, Request, Rollouts, StopReason

if TYPE_CHECKING:
    from grpo_lab.run.state import RunState


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


def start_group(
    run: RunConfig, bench: RunState, index: int, number: int, progress: float, done: tuple[Completion, ...] = ()
) -> StartedGroup:
    """The group of the problem at `index` of the training split, drawn for batch `number`, at `progress`."""
    problem = bench.problems[index]
    key = NoiseKey(run.seed, "train", number, problem.id, 0)
    problem = with_target_length(run.reward_shaping, run.template, problem, key)
    (prompt,) = encode_prompts(bench.tokenizer, run.template, [problem])
    return StartedGroup(index, problem, prompt, number, progress, done)


def requests_of(run: RunConfig, group: StartedGroup) -> list[Request]:
    """One request for each of the group's responses, behind what exists of it."""
    fresh = group_requests(
        [group.problem], [group.prompt], run.group_size, run.engine.params, run.seed, "train", group.number
    )
    return [replace(request, prefix=part.tokens) for request, part in zip(fresh, group.done)] if group.done else fresh


def graded(
    run: RunConfig, bench: RunState, groups: Sequence[StartedGroup], completions: Sequence[Completion]
) -> Groups:
    """Stages 3 to 5: whole responses [P * G] graded, shaped and cut."""
    problems = [group.problem for group in groups]
    rollouts = to_rollouts(problems, [group.prompt for group in groups], run.group_size, completions)
    texts = decode(bench.tokenizer, rollouts)
    progress = torch.tensor([[group.progress] * run.group_size for group in groups], dtype=torch.float64)
    judged = replace(grade(rollouts, texts, run.reward), progress=progress)
    shaped = run.reward_shaping(judged)
    indices = tuple(group.index for group in groups)
    return Groups(indices, rollouts, tuple(texts), judged, shaped, run.truncation(shaped))


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


def group_from_state(run: RunConfig, bench: RunState, left: dict[str, Any]) -> StartedGroup:
    """The group that was laid down, to go on with."""
    done = tuple(
        Completion(
            tuple(part["tokens"]),
            tuple(part["logprobs"]),
            tuple(part["versions"]),
            StopReason(part["stop"]),
            tuple(part.get("injected", ())),
        )
        for part in left["responses"]
    )
    return start_group(run, bench, left["index"], left["step"], left["progress"], done)
