"""The prompts of a run: hashes that a resume has to match, and the first prompt in full."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from grpo_lab.rollout.grading import beginning, encode_prompts, token_ids
from grpo_lab.tasks.base import Template
from grpo_lab.tasks.templates import Chat
from grpo_lab.types import Problem

_AROUND = 30  # characters shown on each side of where two prompts part


@dataclass(frozen=True)
class Prompts:
    """The prompts of a run: hashes of those of training and evaluation, and the first training prompt.

    `tokens` are the ids that occur in any of them, `longest` the length of the longest in tokens. `dated`: the chat
    template writes the date or the time.
    """

    training: str
    evaluation: str
    text: str
    token_ids: tuple[int, ...]
    begins_with: str  # which special token, and who puts it there
    tokens: frozenset[int]
    longest: int
    dated: bool

    def record(self) -> dict[str, Any]:
        """For run.json."""
        names = ("training", "evaluation", "text", "token_ids", "begins_with")
        return {name: getattr(self, name) for name in names}

    def notes(self) -> list[str]:
        """A warning where the prompts of tomorrow are others."""
        if not self.dated:
            return []
        return [
            "the chat template writes the date into every prompt, so prompts change at midnight, and on another day "
            f"this run cannot be resumed: {_FIXED}"
        ]


_FIXED = (
    "write a fixed date into the chat template of the model's folder, or give it one if it takes one, as that of "
    "Llama 3 does (+template.settings.date_string='26 Jul 2024')"
)


def read_prompts(
    tokenizer: PreTrainedTokenizerBase, template: Template, training: Sequence[Problem], evaluated: Sequence[Problem]
) -> Prompts:
    """The prompts of these problems. Raises ValueError for one without a token."""
    first = training[0].question
    parts = [encode_prompts(tokenizer, template, problems) for problems in (training, evaluated)]
    if not all(prompt for part in parts for prompt in part):
        raise ValueError("a prompt has no tokens: the template must render at least one token")
    text = template.render(first, tokenizer)
    dated = False
    if isinstance(template, Chat):
        timeless = replace(template, settings={**template.settings, "strftime_now": lambda form: "?"})
        dated = timeless.render(first, tokenizer) != text
    return Prompts(
        training=_hash(parts[0]),
        evaluation=_hash(parts[1]),
        text=text,
        token_ids=parts[0][0],
        begins_with=_begins_with(tokenizer, text),
        tokens=frozenset(token for part in parts for prompt in part for token in prompt),
        longest=max(len(prompt) for part in parts for prompt in part),
        dated=dated,
    )


def _hash(prompts: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]


def _begins_with(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """How a prompt with this text begins, in words."""
    (written,), added = token_ids(tokenizer, [text]), beginning(tokenizer, text)
    if added and written[: len(added)] != added:
        return f"{tokenizer.decode(list(added))}, which the tokenizer puts before every text"
    if added or (written and written[0] == tokenizer.bos_token_id):
        return f"{tokenizer.decode(list(added or written[:1]))}, which the template writes itself"
    return "the text itself: the tokenizer puts no BOS before it"


def prompts_text(prompts: Prompts) -> str:
    """The first prompt, for people."""
    lines = [f"  {line}" for line in prompts.text.split("\n")]
    number = f"first prompt, of {len(prompts.token_ids)} tokens; it begins with {prompts.begins_with}"
    return "\n".join([number, *lines, f"token ids {' '.join(map(str, prompts.token_ids))}"])


def check_prompts(before: Mapping[str, Any], now: Prompts, parts: Sequence[str] = ("training", "evaluation")) -> None:
    """Raise ValueError if a run whose run.json is `before` began with other prompts. Early runs kept no hash."""
    known = before.get("prompts")
    changed = [] if known is None else [part for part in parts if known[part] != getattr(now, part)]
    if known is None or not changed:
        return
    there, here = known["text"], now.text
    place = next((n for n, (one, other) in enumerate(zip(there, here)) if one != other), min(len(there), len(here)))
    window = slice(max(0, place - _AROUND), place + _AROUND)
    shown = f" ({there[window]!r} there, {here[window]!r} now)" if there != here else ""
    raise ValueError(
        f"the prompts of {' and '.join(changed)} have changed since this run began{shown}: restore the model's "
        "original tokenizer and chat template, or choose another runs_dir. If the chat template writes the date, "
        "replace it by the run's first day in the template of the model's folder, and re-run the same command"
    )
