"""Whether prompts and responses fit into the model's context."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from grpo_lab.config.run_config import RunConfig
from grpo_lab.rollout.grading import asking, encode_prompts
from grpo_lab.types import Problem


def check_lengths(run: RunConfig, context: int | None, longest_prompt: int, whose: str = "the model's context") -> None:
    """Raise ValueError that names all token budgets that, with the longest prompt, exceed the context.

    A context of None is no limit.
    """
    budgets = {
        "engine.max_tokens": run.engine.max_tokens,
        "evaluation.max_tokens": run.evaluation.max_tokens,
        "evaluation.downstream_max_tokens": run.evaluation.downstream_max_tokens,
    }
    if context is None:
        return
    longer = {name: budget for name, budget in budgets.items() if longest_prompt + budget > context}
    if longer:
        said = ", ".join(f"{name}={budget}" for name, budget in longer.items())
        raise ValueError(
            f"{said} and a prompt of {longest_prompt} tokens exceed {whose} of {context} tokens: "
            f"lower {', '.join(longer)} to at most {context - longest_prompt}"
        )


def at_their_longest(
    run: RunConfig, tokenizer: PreTrainedTokenizerBase, problems: tuple[Problem, ...]
) -> tuple[Problem, ...]:
    """The problems as training may ask them, each with the target length whose prompt takes the most tokens."""
    lengths = run.reward_shaping.asks_for
    if not lengths:
        return problems
    tried = encode_prompts(tokenizer, run.template, [asking(run.template, problems[0], tokens) for tokens in lengths])
    longest = max(range(len(lengths)), key=lambda place: len(tried[place]))
    return tuple(asking(run.template, problem, lengths[longest]) for problem in problems)
