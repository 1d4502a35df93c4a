"""Facts read from a model's folder without loading weights: stop tokens, weight names, context length."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import transformers


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS, those of the generation config, and the chat template's own.

    A base model often comes with the chat template of its instruct model and an EOS that the template never writes.
    """
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    if generation.exists():
        listed = json.loads(generation.read_text()).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {folder} has no end-of-text token: set tokenizer.eos_token and save it")
    return frozenset({*ids, tokenizer.eos_token_id, *_end_of_message(tokenizer)})


def _end_of_message(tokenizer: transformers.PreTrainedTokenizerBase) -> set[int]:
    """The special token that the chat template writes right after what the assistant says, if it writes one."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    said = "answer"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # jinja2's and whatever the template raises: a run with template=chat will say so
        return set()
    assert isinstance(text, str), "not tokenised"
    _, found, after = text.rpartition(said)
    added = tokenizer.added_tokens_decoder.items() if found else ()
    return {number for number, token in added if token.special and after.lstrip().startswith(token.content)}


def weight_names(folder: Path) -> frozenset[str]:
    """Names of the weights in the files of `folder`; tied weights appear once."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return frozenset(names)


def fingerprint(folder: Path) -> str:
    """Sixteen hexadecimal digits of a hash of all weights: names, types, shapes and numbers, however they are filed."""
    from safetensors import safe_open

    hashed: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                tensor = opened.get_tensor(name).contiguous()
                digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.view(-1).view(torch.uint8).numpy())
                hashed[name] = digest.digest()
    whole = hashlib.sha256()
    for name, digest in sorted(hashed.items()):
        whole.update(name.encode() + digest)
    return whole.hexdigest()[:16]


def context_length(folder: Path) -> int | None:
    """The longest prompt plus response the model was built for, in tokens; None if it has no limit."""
    return getattr(
        transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False), "max_position_embeddings", None
    )
