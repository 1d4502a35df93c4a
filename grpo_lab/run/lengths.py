"""Whether prompts and responses fit into the model's context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from grpo_lab.config.stages import LengthLimits
from grpo_lab.policy.model_folder import context_length
from grpo_lab.rollout.grading import asking, encode_prompts
from grpo_lab.tasks.base import Template
from grpo_lab.types import Problem

TRAINING = "training questions"


def check_lengths(
    limits: LengthLimits, context: int | None, longest_prompt: int, whose: str = "the model's context"
) -> None:
    """Raise ValueError that names all token budgets that, with the longest prompt, exceed the context.

    A context of None is no limit.
    """
    if context is None:
        return
    longer = {name: budget for name, budget in limits.responses.items() if longest_prompt + budget > context}
    if longer:
        limits_text = ", ".join(f"{name}={budget}" for name, budget in longer.items())
        raise ValueError(
            f"{limits_text} and a prompt of {longest_prompt} tokens exceed {whose} of {context} tokens: "
            + (
                f"lower {', '.join(longer)} to at most {context - longest_prompt}"
                if longest_prompt < context
                else "set task.max_prompt_tokens to leave out long questions, or choose a model with a longer context"
            )
        )


@dataclass(frozen=True)
class Fitting:
    """Which questions are asked, by the length of their prompts; `notes` say which are left out."""

    problems: tuple[Problem, ...]
    notes: tuple[str, ...]


def fitting(
    limits: LengthLimits,
    template: Template,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    of: str,
) -> Fitting:
    """The problems whose prompts are no longer than `task.max_prompt_tokens`, and fit the context beside a response.

    `folder` is the model's, `of` says which problems these are. Where the context is too short for most of them all
    stay, as it is then the response length that does not fit: `check_lengths` refuses it. Raises ValueError if none is
    short enough.
    """
    problems, given = tuple(problems), limits.prompt
    contexts = [size for size in (context_length(folder), limits.context) if size is not None]
    room = min(contexts, default=math.inf) - max(limits.responses.values())
    candidates = at_their_longest(limits, template, tokenizer, problems) if of == TRAINING else problems
    lengths = [len(prompt) for prompt in encode_prompts(tokenizer, template, candidates)]
    if 2 * sum(length > room for length in lengths) > len(lengths):
        room = math.inf
    limit = min(room, math.inf if given is None else given)
    kept = tuple(problem for problem, length in zip(problems, lengths) if length <= limit)
    if len(kept) == len(problems):
        return Fitting(problems, ())
    longest, example = max(zip(lengths, (problem.question for problem in problems)))
    by = f"task.max_prompt_tokens={given}" if limit == given else "the model's context beside a response"
    gone = len(problems) - len(kept)
    shown = f"{example[:60]!r} with {longest}"
    left_out = f"{gone} of {len(problems)} {of} have prompts of more than {limit:g} tokens ({by}), such as {shown}"
    if not kept:
        raise ValueError(f"{left_out}: raise task.max_prompt_tokens, or give shorter questions")
    return Fitting(kept, (f"{left_out}; they are left out",))


def at_their_longest(
    limits: LengthLimits, template: Template, tokenizer: PreTrainedTokenizerBase, problems: tuple[Problem, ...]
) -> tuple[Problem, ...]:
    """The problems as training may ask them, each with the target length whose prompt takes the most tokens."""
    lengths = limits.targets
    if not lengths:
        return problems
    tried = encode_prompts(tokenizer, template, [asking(template, problems[0], tokens) for tokens in lengths])
    longest = max(range(len(lengths)), key=lambda place: len(tried[place]))
    return tuple(asking(template, problem, lengths[longest]) for problem in problems)
