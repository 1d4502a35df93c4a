"""A LoRA adapter as a model of its own: merged into its base once, and kept in the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import transformers

from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tracking.checksums import make_checksummed, read_json

if TYPE_CHECKING:
    from peft import PeftModel

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def merged(adapter: Path, base: Path, key: str) -> Path:
    """The folder of `base` with `adapter` added to its weights, in fp32; made if it is not there.

    An interrupted attempt leaves nothing that could pass for a model. Raises ValueError that names `key` if the adapter
    is no LoRA in safetensors, or is one of another base.
    """
    _check(adapter, key)
    made = hashlib.sha256(fingerprint(base).encode())
    for name in (CONFIG, WEIGHTS):
        made.update((adapter / name).read_bytes())
    folder = cache_root() / "merged" / made.hexdigest()[:16]
    return make_checksummed(folder, lambda place: _merge(adapter, base, key, place))


def _check(adapter: Path, key: str) -> None:
    kind = read_json(adapter / CONFIG, "copy it again").get("peft_type")
    if kind != "LORA":
        raise ValueError(f"{key} must be a model or an adapter of LoRA, got one of {kind} in {adapter}: merge it first")
    if not (adapter / WEIGHTS).is_file():
        raise ValueError(
            f"{key} must hold safetensors, got an adapter without {WEIGHTS} in {adapter}: save it with "
            "save_pretrained(safe_serialization=True)"
        )


def _merge(adapter: Path, base: Path, key: str, to: Path) -> None:
    from grpo_lab.policy.models import read_model  # it loads torch, which a command that only speaks does without

    model = read_model(base, torch.float32)
    _adapted(model, adapter, base, key).merge_and_unload().save_pretrained(to)  # pyright: ignore[reportCallIssue]
    own = (adapter / "tokenizer_config.json").is_file()
    transformers.AutoTokenizer.from_pretrained(adapter if own else base, trust_remote_code=False).save_pretrained(to)


def _adapted(model: transformers.PreTrainedModel, adapter: Path, base: Path, key: str) -> PeftModel:
    try:
        from peft import LoraConfig, PeftModel
    except ImportError as error:
        raise ValueError(f"{key} is an adapter, and that needs peft: pip install peft") from error
    try:
        added = PeftModel(model, LoraConfig.from_pretrained(adapter))  # pyright: ignore[reportArgumentType]
        loaded = added.load_adapter(str(adapter), "default")
        strange = sorted(loaded.unexpected_keys) + [name for name in loaded.missing_keys if ".lora_" in name]
        problem = f"{len(strange)} weights are of only one of them, such as {strange[0]}" if strange else ""
    except (ValueError, RuntimeError) as error:  # peft's for a module, and torch's for a shape
        problem = " ".join(str(error).split())[:200].rstrip("., ")
    if problem:
        raise ValueError(
            f"{key} must be an adapter of the base that it names, got {adapter}, which does not fit {base}: {problem}; "
            f"write the folder or the id of its own base into its {CONFIG}, as base_model_name_or_path"
        )
    return added
