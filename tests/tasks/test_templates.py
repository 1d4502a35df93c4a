"""Templates: what a model reads, from its own chat template or from a pattern, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.policy.model_folder import stop_token_ids
from grpo_lab.tasks.arithmetic import build_tokenizer
from grpo_lab.tasks.base import Template
from grpo_lab.tasks.templates import Chat

MARKS = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if thinks is defined %}<think={{ thinks }}>{% endif %}"
)


def template_of(name: str) -> Template:
    return to_run(compose_config([f"template={name}"])).template


def chatting(marks: str | None) -> transformers.PreTrainedTokenizerBase:
    tokenizer = build_tokenizer(64)
    tokenizer.chat_template = marks
    return tokenizer


def test_the_chat_template_is_the_models_own_and_ends_where_the_assistant_begins() -> None:
    chat = template_of("chat_plain")
    assert isinstance(chat, Chat)
    assert chat.render("1+1?", chatting(MARKS)) == "<|user|>1+1?<end><|assistant|>"
    told = replace(chat, system="Be short.", pattern="Q: {question}", settings={"thinks": False})
    assert (
        told.render("{x}?", chatting(MARKS)) == "<|system|>Be short.<end><|user|>Q: {x}?<end><|assistant|><think=False>"
    )


def test_the_default_chat_asks_for_a_boxed_answer() -> None:
    assert r"\boxed{}" in template_of("chat").render("1+1?", chatting(MARKS))


def test_a_tokenizer_without_a_chat_template_is_refused_with_what_to_choose() -> None:
    with pytest.raises(ValueError, match=r"this model's has none.*choose template=r1, boxed or none"):
        template_of("chat").render("1+1?", chatting(None))


def test_a_response_ends_where_the_chat_template_ends_a_message(tmp_path: Path) -> None:
    """A base model's EOS is another token than the one that ends a message, and its generation config has but that."""

    def stops(marks: str | None, special: bool = True) -> set[str]:
        tokenizer = chatting(marks)
        if special:
            tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<|user|>"]})  # pyright: ignore[reportArgumentType]
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        tokenizer.save_pretrained(folder)
        return {str(tokenizer.convert_ids_to_tokens(one)) for one in stop_token_ids(folder)}

    eos = str(chatting(None).eos_token)
    assert stops(MARKS) == {eos, "<end>"}
    assert stops(MARKS.replace("<end>", "<end>\n")) == {eos, "<end>"}
    assert stops(None) == {eos}
    assert stops(MARKS, special=False) == {eos}, "no token of its own"
    assert stops(MARKS.replace("<end>", "")) == {eos}, "the template ends nothing"
    assert stops("{{ raise_exception('never') }}") == {eos}


def test_a_chat_template_that_refuses_says_why() -> None:
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system message') }}{% endif %}x"
    chat = template_of("chat")
    assert isinstance(chat, Chat)
    assert chat.render("1+1?", chatting(strict)) == "x"
    with pytest.raises(ValueError, match=r"cannot write this prompt .*no system message.*template\.system to an empty"):
        replace(chat, system="s").render("1+1?", chatting(strict))
    with pytest.raises(ValueError, match="pattern must be a text with"):
        replace(chat, pattern="no question")


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("r1", "A conversation between User and Assistant.", "User: 1+1?\nAssistant: <think>"),
        ("boxed", "<|im_start|>system\nPlease reason", "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"),
        ("none", "1+1?", "1+1?"),
        ("chat_mismatched", "[INST] 1+1?", "[/INST]"),
    ],
)
def test_patterns_for_base_models(name: str, begins: str, ends: str) -> None:
    text = template_of(name).render("1+1?", chatting(None))
    assert text.startswith(begins) and text.endswith(ends)


@pytest.mark.parametrize("name", ["chat", "chat_plain", "r1", "boxed", "none", "chat_mismatched"])
def test_texts_that_tricks_add_are_words_and_not_the_sums_marks(name: str) -> None:
    template = template_of(name)
    assert "#" not in template.interruption and "answer" in template.interruption
    assert template.asking_for("1+1?", 200).startswith("1+1?") and "200 tokens" in template.asking_for("1+1?", 200)
