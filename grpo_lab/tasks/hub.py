"""Causal language models of the hub, or in a folder of your own."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import transformers

from grpo_lab.checks import require
from grpo_lab.policy.loading import Attention, Loading, Lora
from grpo_lab.policy.model_folder import check_tokens, check_weights, stop_token_ids
from grpo_lab.tasks.base import Model
from grpo_lab.tasks.merged_adapter import CONFIG, merged
from grpo_lab.tracking.checksums import read_json
from grpo_lab.types import WeightType

_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.model", "*.txt", "*.jinja")
_TEMPLATE_SECONDS = 10.0  # for one short message; ordinary templates take milliseconds
_REMEDY = "give the folder that save_pretrained wrote, or an id of the hub"


@dataclass(frozen=True)
class HfModel(Model):
    """A causal language model with its tokenizer: an id on the hub, or a folder that `save_pretrained` wrote.

    An adapter of LoRA is merged into the base that it names, and the run begins with the whole: `lora` then trains a
    new adapter, and the reference is the merged model. Only safetensors are read, and no code of a model is run.
    """

    path: str
    revision: str  # of the hub; "" for the newest, which may be another one tomorrow
    frozen: WeightType  # the type of weights that do not train; only with lora
    attention: Attention
    compiled: bool  # torch.compile for the learner: slow to begin, faster after
    lora: Lora

    def __post_init__(self) -> None:
        rule, remedy = "fp32 where all weights train", "set model.lora.rank, or model.frozen=fp32"
        require(self.lora.rank > 0 or self.frozen is WeightType.fp32, "frozen", self.frozen.name, rule, remedy)

    @property
    def highest_rate(self) -> float:
        return self.lora.highest_rate

    def loading(self) -> Loading:
        return Loading(self.frozen, self.attention, self.compiled, self.lora if self.lora.rank else None)

    def at_hand(self) -> Path | None:
        """The local folder or the hub's cached copy; None for adapters, which have to be merged first."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            try:
                folder = Path(snapshot_download(self.path, revision=self.revision or None, local_files_only=True))
            except (LocalEntryNotFoundError, ValueError):  # the second for what is no id of the hub
                return None
        there = any((folder / name).is_file() for name in ("config.json", "run.json"))
        return find_model(str(folder), "", "model.path") if there else None

    def resolve(self) -> Path:
        """The model's folder, downloaded first if it is not there. Raises ValueError that says what is missing.

        Weights are read only for an adapter, which is merged into its base.
        """
        return find_model(self.path, self.revision, "model.path")


def find_model(path: str, revision: str, key: str) -> Path:
    """The folder of a model, downloaded first if it is not there.

    A run's folder stands for its last checkpoint, and an adapter's for its base with the adapter merged into it, for
    which only weights are read. Raises ValueError that names `key`, says what is wrong, and how to mend it.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        looks_like_a_path = path.startswith(("/", ".", "~")) or path.count("/") != 1
        require(not looks_like_a_path, key, path, "an existing folder", _REMEDY)
        folder = _download(path, revision, key)
    elif (folder / "run.json").is_file():
        saved = sorted(folder.glob("checkpoints/step=*"))
        remedy = "give a run that saved one, or the folder of a model"
        require(bool(saved), key, path, "a run with a checkpoint, and this one has none", remedy)
        folder = saved[-1]
    if (folder / CONFIG).is_file():
        both = (folder / "config.json").is_file()
        remedy = f"move {CONFIG} away to begin with the model, or config.json to begin with the adapter"
        require(not both, key, path, "a model or an adapter, and this folder holds both", remedy)
        folder = _merged(folder, path, key)
    _check(folder, path, key)
    return folder


def _merged(adapter: Path, path: str, key: str) -> Path:
    """The base that an adapter names, with the adapter in it."""
    text = read_json(adapter / CONFIG, "copy it again")
    base, revision = text.get("base_model_name_or_path"), text.get("revision")
    named = f"base_model_name_or_path in the {CONFIG} of {path}"
    remedy = "write its folder or its id on the hub there"
    require(isinstance(base, str) and bool(base), named, repr(base), "the base of the adapter", remedy)
    assert isinstance(base, str), "it was required"
    chain = (Path(base).expanduser() / CONFIG).is_file()
    require(not chain, named, repr(base), "the base of the adapter, and this is an adapter too", remedy)
    return merged(adapter, find_model(base, revision or "", named), key)


def _download(path: str, revision: str, key: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(path, revision=revision or None, allow_patterns=list(_FILES))
    except Exception as error:  # the hub's, httpx's and the system's errors share no class
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise ValueError(
            f"the model {path!r} is no local folder, and the hub did not give it{offline}: {text}. Without a "
            f"network, copy it on a machine with one: `hf download {path} --local-dir FOLDER`, and give "
            f"FOLDER as {key}; a model behind a licence needs `hf auth login` first"
        ) from error
    return Path(found)


def _check(folder: Path, path: str, key: str) -> None:
    config_file = folder / "config.json"
    require(config_file.is_file(), key, path, "a folder with a config.json", _REMEDY)
    config = read_json(config_file, "copy it again")
    listed = config.get("architectures")
    architectures = listed if isinstance(listed, list) else [listed]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    rule = f"a causal language model, and its config.json names {architectures}"
    remedy = "choose a model that AutoModelForCausalLM loads"
    if config.get("auto_map"):
        remedy += "; this one brings code of its own, which is never run (trust_remote_code)"
    require(any(name in known for name in architectures), key, path, rule, remedy)
    others = [file.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for file in folder.glob(pattern)]
    if others and not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{key} must hold safetensors, got {others[0]} in {path}: files of that kind can run code when "
            "they are opened; convert it on a machine you can lose, with save_pretrained(safe_serialization=True)"
        )
    check_weights(folder)
    tokenizer = _load_tokenizer(folder, path, key)
    remedy = "set eos_token in tokenizer_config.json, since a response has to be able to end"
    has_end = tokenizer.eos_token_id is not None
    require(has_end, key, path, "a model whose tokenizer has an end-of-text token", remedy)
    _check_template(tokenizer, path, key)
    check_tokens(folder, tokenizer, [[min(stop_token_ids(folder))]], "the end of a response")


def _check_template(tokenizer: transformers.PreTrainedTokenizerBase, path: str, key: str) -> None:
    """Raise ValueError if the chat template takes longer than _TEMPLATE_SECONDS for one short message.

    Other faults are reported where the template is used. Only the main thread can be interrupted.
    """
    if not getattr(tokenizer, "chat_template", None) or threading.current_thread() is not threading.main_thread():
        return

    def late(*_: object) -> None:
        raise TimeoutError

    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, _TEMPLATE_SECONDS)
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except TimeoutError as error:
        raise ValueError(
            f"{key} has a chat template that did not render one short message in {_TEMPLATE_SECONDS:g} s, in {path}: "
            "correct the template, or delete it and choose template=boxed"
        ) from error
    except Exception:  # jinja2's and whatever the template raises
        return
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def _load_tokenizer(folder: Path, path: str, key: str) -> transformers.PreTrainedTokenizerBase:
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # The exception of a broken tokenizer depends on its kind; all mean the same here.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{key} must be a model whose tokenizer transformers has itself, got {path}: its tokenizer is code of "
                "its own, which is never run (trust_remote_code); choose another model, or save a tokenizer.json into "
                "the folder, and take auto_map out of its tokenizer_config.json"
            ) from error
        raise ValueError(
            f"{key} must be a model with a tokenizer, got {path}: "
            f"save the tokenizer into the same folder ({type(error).__name__}: {error})"
        ) from error
