"""What tricks that generate use beside the sampler: token ids of a text, single uniform numbers, wishes in a prompt."""

from __future__ import annotations

from dataclasses import replace

import transformers

from grpo_lab.rollouts import token_ids
from grpo_lab.seeding import token_uniforms
from grpo_lab.tasks.base import Template
from grpo_lab.tricks.reward_shaping import RewardShaping
from grpo_lab.types import NoiseKey, Problem, Tools


def tools_for(tokenizer: transformers.PreTrainedTokenizerBase) -> Tools:
    """What a trick that generates may use: the run's tokenizer and its counter-based noise."""

    def encode(text: str) -> tuple[int, ...]:
        return token_ids(tokenizer, [text])[0]

    return Tools(encode, uniform)


def uniform(key: NoiseKey) -> float:
    """The first uniform number of a key."""
    return float(token_uniforms(key, 0, 1)[0])


def with_wish(shaping: RewardShaping, template: Template, problem: Problem, key: NoiseKey) -> Problem:
    """The problem as it is asked: with a wanted length in its question where the reward shaping draws one."""
    tokens = shaping.wish(uniform(replace(key, stream=f"{key.stream}/wish")))
    return problem if tokens is None else asking(template, problem, tokens)


def asking(template: Template, problem: Problem, tokens: int) -> Problem:
    """The problem with a wish for that many tokens in its question."""
    return replace(problem, question=template.wishing(problem.question, tokens), wanted_tokens=tokens)
