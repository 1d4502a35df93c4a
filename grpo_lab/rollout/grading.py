"""Builds requests from problems, and graded rollouts from completions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
import transformers

from grpo_lab.distributed import ranks
from grpo_lab.seeding import uniform
from grpo_lab.tasks.base import Grader, Template
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.types import (
    Completion,
    Float,
    Graded,
    NoiseKey,
    Problem,
    Request,
    Rollouts,
    SamplingParams,
    StopReason,
    Tensor,
    Tools,
    to_groups,
)


def encode_prompts(
    tokenizer: transformers.PreTrainedTokenizerBase, template: Template, problems: Sequence[Problem]
) -> tuple[tuple[int, ...], ...]:
    """Token ids of each problem's rendered prompt. All that the model ever reads as a prompt comes from here.

    A prompt begins as the tokenizer begins a text, such as with BOS, unless the template writes that itself.
    """
    texts = [template.render(problem.question, tokenizer) for problem in problems]
    prompts = token_ids(tokenizer, texts)
    begins = beginning(tokenizer, texts[0]) if texts else ()
    return tuple(ids if ids[: len(begins)] == begins else begins + ids for ids in prompts)


def beginning(tokenizer: transformers.PreTrainedTokenizerBase, text: str) -> tuple[int, ...]:
    """The ids that the tokenizer puts before a text; what some put behind it, such as EOS, would end a prompt."""
    (bare,), whole = token_ids(tokenizer, [text]), tuple(tokenizer(text)["input_ids"])
    places = range(len(whole) - len(bare) + 1)
    return whole[: next((place for place in places if whole[place : place + len(bare)] == bare), 0)]


def token_ids(tokenizer: transformers.PreTrainedTokenizerBase, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each text, without special tokens. Raises ValueError for a text the tokenizer cannot encode."""
    try:
        return tuple(tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises nothing narrower
        shown = max(texts, key=len)
        raise ValueError(
            f"the tokenizer cannot write {shown!r} ({error}): use a template whose words the model's vocabulary has"
        ) from error


def group_requests(
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    group_size: int,
    params: SamplingParams,
    seed: int,
    stream: str,
    step: int,
) -> list[Request]:
    """`group_size` requests per problem, problem-major, each with its own noise."""
    return [
        Request(prompt, NoiseKey(seed, stream, step, problem.id, response), params)
        for problem, prompt in zip(problems, prompts)
        for response in range(group_size)
    ]


def to_rollouts(
    problems: Sequence[Problem],
    prompts: Sequence[tuple[int, ...]],
    group_size: int,
    completions: Sequence[Completion],
) -> Rollouts:
    """Completions as one record on the CPU, padded on the right."""
    assert len(completions) == len(problems) * group_size, "one completion per problem and group member"
    lengths = torch.tensor([len(completion.tokens) for completion in completions])
    mask = torch.arange(max(1, int(lengths.max()))) < lengths[:, None]

    def padded(parts: Iterable[Tensor], dtype: torch.dtype) -> Tensor:
        return torch.zeros(mask.shape, dtype=dtype).masked_scatter_(mask, torch.cat(list(parts)).to(dtype))

    return Rollouts(
        problems=tuple(problems),
        prompts=tuple(prompts),
        group_size=group_size,
        tokens=padded((c.tokens for c in completions), torch.long),
        response_mask=mask,
        sampled_mask=padded((~c.injected for c in completions), torch.bool),
        sampler_logprobs=padded((c.logprobs for c in completions), torch.get_default_dtype()),
        weight_version=padded((c.weight_versions for c in completions), torch.long),
        finished=torch.tensor([c.stop is StopReason.EOS for c in completions]),
        looped=torch.tensor([c.stop is StopReason.REPETITION for c in completions]),
    )


def decode(tokenizer: transformers.PreTrainedTokenizerBase, rollouts: Rollouts) -> list[str]:
    """The text of each row without the stop token that ended it.

    Other special tokens stay in the text, so that a padding token sampled in mid-response remains visible.
    """
    ends = (rollouts.lengths - rollouts.finished.long()).clamp(min=0).tolist()
    ids = [row[:end] for row, end in zip(rollouts.tokens.tolist(), ends)]
    return tokenizer.batch_decode(ids, skip_special_tokens=False)


def text_of(tokenizer: transformers.PreTrainedTokenizerBase, ids: list[int]) -> str:
    """The text of one list of token ids, special tokens included."""
    text = tokenizer.decode(ids)
    assert isinstance(text, str), "a list of lists would give a list"
    return text


def token_texts(tokenizer: transformers.PreTrainedTokenizerBase, rollouts: Rollouts) -> list[list[str]]:
    """The text of every response token of each row, including the stop token."""
    seen = {token: text_of(tokenizer, [token]) for token in set(rollouts.tokens[rollouts.response_mask].tolist())}
    ends = rollouts.lengths.tolist()
    return [[seen[token] for token in row[:end]] for row, end in zip(rollouts.tokens.tolist(), ends)]


def grade(rollouts: Rollouts, texts: Sequence[str], reward: Grader, keys: Sequence[NoiseKey]) -> Graded:
    """The correctness of each row and its reward; a row that was graded is in the statistics and the loss.

    `keys` are those that the rows were sampled with. A grader that failed says nothing about the response: such a row
    has correctness and reward 0, and is in neither.
    """
    finished = rollouts.finished.tolist()
    problems = [problem for problem in rollouts.problems for _ in range(rollouts.group_size)]

    def by_group(values: list[float]) -> Float[Tensor, "P G"]:
        return to_groups(torch.tensor(values, dtype=torch.float64), rollouts.group_size)

    # A judge or a time limit may answer otherwise when asked again: all ranks take what one of them was told.
    grades = ranks.on_first(lambda: reward.checked_grades(problems, texts, finished, keys))
    judged = by_group(grades.correctness)
    graded = ~judged.isnan()
    components = {name: torch.where(graded, by_group(values), 0.0) for name, values in grades.components.items()}
    target_lengths = [problem.target_length for problem in rollouts.problems]
    return Graded(
        correctness=judged.nan_to_num(0.0),
        reward=torch.stack(list(components.values())).sum(dim=0),
        components=components,
        lengths=to_groups(rollouts.lengths, rollouts.group_size),
        sampled_lengths=to_groups(rollouts.sampled_mask.sum(dim=1), rollouts.group_size),
        truncated=to_groups(~rollouts.finished, rollouts.group_size),
        in_statistics=graded,
        in_loss=graded,
        failed=~graded if reward.may_fail else None,
        part_weights=reward.part_weights,
        logprob=to_groups(
            torch.where(rollouts.sampled_mask, rollouts.sampler_logprobs.double(), 0.0).sum(dim=1), rollouts.group_size
        ),
        target_length=None
        if None in target_lengths
        else torch.tensor(target_lengths)[:, None].expand(-1, rollouts.group_size),
    )


def tools_for(tokenizer: transformers.PreTrainedTokenizerBase) -> Tools:
    """The run's tokenizer and its counter-based noise, for tricks that generate."""

    def encode(text: str) -> tuple[int, ...]:
        return token_ids(tokenizer, [text])[0]

    return Tools(encode, uniform)


def with_target_length(shaping: RewardShaping, template: Template, problem: Problem, key: NoiseKey) -> Problem:
    """The problem, with a target length in its question if the reward shaping draws one."""
    tokens = shaping.draw_target_length(uniform(replace(key, stream=f"{key.stream}/wish")))
    return problem if tokens is None else asking(template, problem, tokens)


def asking(template: Template, problem: Problem, tokens: int) -> Problem:
    """The problem, with a question that asks for a response of `tokens` tokens."""
    return replace(problem, question=template.asking_for(problem.question, tokens), target_length=tokens)
