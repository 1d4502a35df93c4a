"""Facts read from a model's folder without loading weights: stop tokens, weight names, context length, completeness."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from grpo_lab.tracking.checksums import read_json
from grpo_lab.types import Tensor

_SHOWN = 4  # weights that a message names


def stop_token_ids(folder: Path) -> frozenset[int]:
    """Ids that end a response: the tokenizer's EOS, those of the generation config, and the chat template's own.

    A base model often comes with the chat template of its instruct model and an EOS that the template never writes.
    """
    ids: set[int] = set()
    generation = folder / "generation_config.json"
    if generation.is_file():
        listed = read_json(generation, "copy it again, or delete it").get("eos_token_id")
        listed = listed if isinstance(listed, list) else [] if listed is None else [listed]
        if not all(type(one) is int for one in listed):
            raise ValueError(f"{generation} has the eos_token_id {listed}: write one token id, or a list of them")
        ids.update(listed)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {folder} has no end-of-text token: set tokenizer.eos_token and save it")
    return frozenset({*ids, tokenizer.eos_token_id, *_end_of_message(tokenizer)})


def _end_of_message(tokenizer: transformers.PreTrainedTokenizerBase) -> set[int]:
    """The special token that the chat template writes right after what the assistant says, if it writes one."""
    if not getattr(tokenizer, "chat_template", None):
        return set()
    answer = "answer"
    messages = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
    except Exception:  # jinja2's and whatever the template raises: a run with template=chat will say so
        return set()
    assert isinstance(text, str), "not tokenised"
    _, found, after = text.rpartition(answer)
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
    """`fingerprint_of` all weights in the files of `folder`, however they are filed."""
    return fingerprint_of(_stored(folder))


def _stored(folder: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 it is no mapping
                yield name, opened.get_tensor(name)


def fingerprint_of(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Sixteen hexadecimal digits of a hash of weights on the CPU: names, types, shapes and numbers, in any order."""
    hashed: dict[str, bytes] = {}
    for name, tensor in weights:
        digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        hashed[name] = digest.digest()
    whole = hashlib.sha256()
    for name, digest in sorted(hashed.items()):
        whole.update(name.encode() + digest)
    return whole.hexdigest()[:16]


def require_complete(folder: Path, loaded: Mapping[str, Any]) -> None:
    """Raise ValueError that names the weights if the files of `folder` are not those of the model of its config.json.

    `loaded` is what transformers reports with `output_loading_info`. Tied weights and buffers that a model computes
    itself may be absent; transformers counts neither as missing. Any other missing weight would be random.
    """
    shapes = sorted(f"{name} {list(there)} instead of {list(due)}" for name, there, due in loaded["mismatched_keys"])
    kinds = {"missing": sorted(loaded["missing_keys"]), "unknown": sorted(loaded["unexpected_keys"])}
    kinds |= {"of another shape": shapes}
    problems = [f"{len(names)} {kind} ({_listed(names)})" for kind, names in kinds.items() if names]
    if problems:
        raise ValueError(
            f"the weights in {folder} are not those of its config.json: {'; '.join(problems)}. Copy the whole folder "
            "again, or give config.json the sizes (num_hidden_layers, vocab_size, ...) that the model was saved with"
        )


def number_of_tokens(folder: Path) -> int:
    """How many tokens the model has embeddings for; its tokenizer may know more, or fewer."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config.get_text_config(decoder=True).vocab_size


def check_tokens(
    folder: Path,
    tokenizer: transformers.PreTrainedTokenizerBase,
    texts: Iterable[Sequence[int]],
    what: str = "a prompt",
) -> None:
    """Raise ValueError that names the token if a text has one that the model has no embedding for."""
    rows, highest = number_of_tokens(folder), max(map(max, filter(None, texts)), default=0)
    if highest >= rows:
        raise ValueError(
            f"{what} has the token {tokenizer.convert_ids_to_tokens(highest)!r}, the tokenizer's number {highest}, and "
            f"the model in {folder} has embeddings for {rows} tokens: choose another template, give the tokenizer that "
            "the model was saved with, or enlarge the model (resize_token_embeddings) and save it"
        )


def check_weights(folder: Path) -> None:
    """`require_complete` from the headers of the files, without their numbers.

    transformers loads zeros of the same names and shapes, which need no memory, so that its own rules of renamed, fused
    and tied weights hold. Raises ValueError that names what is wrong, also for a file that is damaged or truncated and
    for a config.json that describes no model.
    """
    from safetensors import SafetensorError, safe_open

    zero, zeros = torch.zeros((), dtype=torch.float16), dict[str, Tensor]()
    for file in _weight_files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                zeros |= {name: zero.expand(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is damaged or truncated ({error}): copy it again") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            empty = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        with _quiet_transformers():
            loaded = type(empty).from_pretrained(
                None, config=empty.config, state_dict=zeros, dtype=zero.dtype,
                output_loading_info=True, ignore_mismatched_sizes=True,
            )[1]  # fmt: skip
    except Exception as error:  # the values of config.json reach code of every kind
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(
            f"transformers cannot build the model that {folder / 'config.json'} describes: {text}"
        ) from error
    require_complete(folder, loaded)


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: model.safetensors, else those that the index lists."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    remedy = "copy the whole folder again"
    if not index.is_file():
        raise ValueError(f"{folder} holds neither {whole.name} nor {index.name}: {remedy}, with its weights")
    listed = read_json(index, remedy).get("weight_map")
    if not isinstance(listed, dict) or not listed or not all(isinstance(name, str) for name in listed.values()):
        raise ValueError(f"{index} has no weight_map of names to files: {remedy}")
    files = [folder / name for name in sorted(set(listed.values()))]
    if gone := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{index} lists {_listed(gone)}, not in the folder: {remedy}")
    return files


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence the weight report and progress bar of transformers: problems are raised as errors instead."""
    from transformers.utils import logging  # here, since it would load transformers before it is needed

    level, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bar:
            logging.enable_progress_bar()


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def context_length(folder: Path) -> int | None:
    """The longest prompt plus response the model was built for, in tokens; None if it has no limit.

    longrope has other frequencies for texts beyond `original_max_position_embeddings`, for all their positions. A
    token's log-prob would then depend on what follows it, and on the other texts of its batch: they end the context.
    """
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    longest, text = getattr(config, "max_position_embeddings", None), config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return longest
    original = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return original or longest
