"""Templates: how a question becomes the text that the model reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import transformers

from grpo_lab.checks import require
from grpo_lab.tasks.base import AnswerForm, Template


@dataclass(frozen=True)
class Plain(Template):
    """The pattern with `{question}` replaced by the question."""

    pattern: str

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.pattern.count("{question}") == 1,
            "pattern",
            repr(self.pattern),
            "a text with {question} in it once",
            "write '{question}' to pass the question on as it is",
        )

    @property
    def answer_form(self) -> AnswerForm:
        return AnswerForm.requested_by(self.pattern, self.interruption)

    def render(self, question: str, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        return self.pattern.replace("{question}", question)


@dataclass(frozen=True)
class Chat(Template):
    """The model's own chat template, with the question as the user's message, ready for the assistant's.

    `settings` go to the chat template by name, such as `enable_thinking` of Qwen3. Many templates put in a system
    message of their own where there is none; `system: ""` leaves that to them.
    """

    pattern: str  # of the user's message, with {question} in it
    system: str  # the system message; "" for none
    settings: dict[str, Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        rule, remedy = "a text with {question} in it once", "write '{question}' to pass the question on as it is"
        require(self.pattern.count("{question}") == 1, "pattern", repr(self.pattern), rule, remedy)

    @property
    def answer_form(self) -> AnswerForm:
        return AnswerForm.requested_by(self.pattern, self.system, self.interruption)

    def render(self, question: str, tokenizer: transformers.PreTrainedTokenizerBase) -> str:
        """The prompt as text. Raises ValueError where the tokenizer has no chat template, or it fails."""
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "template=chat needs a tokenizer with a chat template, and this model's has none, as base models "
                "often have: choose template=r1, boxed or none, or save one into the model's folder "
                "(tokenizer.chat_template = ...; tokenizer.save_pretrained(folder))"
            )
        messages = [{"role": "user", "content": self.pattern.replace("{question}", question)}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **self.settings)
        except Exception as error:  # jinja2's and whatever the template raises
            raise ValueError(
                f"the model's chat template cannot write this prompt ({type(error).__name__}: {error}): set "
                "template.system to an empty text if it knows no system message, or choose another template"
            ) from error
        assert isinstance(text, str), "not tokenised"
        return text
