"""Facts read from a model's folder without loading weights: stop tokens, weight names, context length."""

from __future__ import annotations

import json
from pathlib import Path

import transformers


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS and those of the generation config."""
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    if generation.exists():
        listed = json.loads(generation.read_text()).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    eos = transformers.AutoTokenizer.from_pretrained(folder).eos_token_id
    if eos is None:
        raise ValueError(f"the tokenizer of {folder} has no end-of-text token: set tokenizer.eos_token and save it")
    return frozenset(ids | {eos})


def weight_names(folder: Path) -> frozenset[str]:
    """Names of the weights in the files of `folder`; tied weights appear once."""
    from safetensors import safe_open

    names: set[str] = set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names.update(opened.keys())
    return frozenset(names)


def context_length(folder: Path) -> int | None:
    """The longest prompt plus response the model was built for, in tokens; None if it has no limit."""
    return getattr(transformers.AutoConfig.from_pretrained(folder), "max_position_embeddings", None)
