"""Facts read from a model's folder without loading weights: stop tokens, weight names, context length."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
import transformers


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS and those of the generation config."""
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    if generation.exists():
        listed = json.loads(generation.read_text()).get("eos_token_id")
        ids.update(listed if isinstance(listed, list) else [] if listed is None else [listed])
    eos = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).eos_token_id
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
