"""Model folders as bad copies, edits and other programs leave them: refused in words that name what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import shapes_unchecked
from safetensors.torch import load_file, save_file
from short_runs import SMALL, run_in_process
from transformers import AutoTokenizer

from grpo_lab.policy.model_folder import check_tokens, stop_token_ids
from grpo_lab.policy.models import load_model
from grpo_lab.tasks import hub
from grpo_lab.tasks.hub import find_model
from grpo_lab.tricks.precision import LmHead

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def garbage(path: Path) -> None:
    path.write_bytes(bytes(range(128, 256)) * 3)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


# What can befall any file.
BEFALLS: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "truncated": truncated,
    "garbage": garbage,
    "a list": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "a folder": as_folder,
}
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS, INDEX]
# Without it a model is whole: transformers has defaults for it.
LEGITIMATE = {("generation_config.json", "missing"), ("generation_config.json", "a folder")}


def put(name: str, **values: object) -> Callable[[Path], object]:
    """Change keys of a JSON file."""
    return lambda folder: (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | values))


def config(**values: object) -> Callable[[Path], object]:
    return put("config.json", **values)


def first_tensor(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], object]:
    def changed(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        name = sorted(weights)[0]
        save_file(weights | {name: change(weights[name]).contiguous()}, folder / WEIGHTS, {"format": "pt"})

    return changed


def end_outside(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<the end>"})
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def grown(folder: Path) -> None:
    """As a file whose end is of an older, longer one."""
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"\0" * 64)


def header_too_long(folder: Path) -> None:
    content = bytearray((folder / WEIGHTS).read_bytes())
    content[:8] = (2**62).to_bytes(8, "little")
    (folder / WEIGHTS).write_bytes(content)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def with_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)})
    )


def adapter_of_itself(folder: Path) -> None:
    with_adapter(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_model.safetensors").write_bytes((folder / WEIGHTS).read_bytes())


def adapter_without_base(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": 3}')


def adapter_of_a_list(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text("[]")


def template(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


# Particular damages, each with a part of what is said.
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "more layers": (config(num_hidden_layers=9), "missing"),
    "fewer layers": (config(num_hidden_layers=1), "unknown"),
    "no layers": (config(num_hidden_layers=0), "unknown"),
    "layers as text": (config(num_hidden_layers="two"), "config.json describes"),
    "negative layers": (config(num_hidden_layers=-1), "unknown|config.json describes"),
    "another width": (config(hidden_size=40), "of another shape|config.json describes"),
    "no width": (config(hidden_size=0), "of another shape|config.json describes"),
    "width of null": (config(hidden_size=None), "config.json describes"),
    "more tokens": (config(vocab_size=4096), "of another shape"),
    "fewer tokens": (config(vocab_size=3), "of another shape"),
    "more heads": (config(num_attention_heads=64), "of another shape|config.json describes"),
    "another MLP": (config(intermediate_size=7), "of another shape"),
    "an unknown activation": (config(hidden_act="no_such"), "config.json describes"),
    "an unknown kind": (config(model_type="no_such"), "config.json describes"),
    "another kind": (config(model_type="gpt2"), "config.json describes|not those of its config"),
    "no kind": (config(model_type=None), "config.json describes"),
    "an untied head": (config(tie_word_embeddings=False), "missing .lm_head"),
    "architectures as a number": (config(architectures=3), "causal language model"),
    "no architectures": (config(architectures=None), "causal language model"),
    "a classifier": (config(architectures=["LlamaForSequenceClassification"]), "causal language model"),
    "code of its own": (config(architectures=["Own"], auto_map={"AutoModelForCausalLM": "own.Own"}), "never run"),
    "an end of text": (put("generation_config.json", eos_token_id="</s>"), "generation_config.json.*eos_token_id"),
    "no end at all": (put("tokenizer_config.json", eos_token=None), "end-of-text token"),
    "an end outside the embeddings": (end_outside, "'<the end>'.*embeddings for"),
    "longer than its header says": (grown, "damaged or truncated"),
    "a header without end": (header_too_long, "damaged or truncated"),
    "a longer weight": (first_tensor(lambda one: torch.cat([one, one])), "of another shape"),
    "a flattened weight": (first_tensor(torch.flatten), "of another shape"),
    "pickles": (pickled, "can run code"),
    "a model and an adapter": (with_adapter, "holds both"),
    "an adapter of itself": (adapter_of_itself, "this is an adapter too"),
    "an adapter of a number": (adapter_without_base, "the base of the adapter"),
    "an adapter that is a list": (adapter_of_a_list, "adapter_config.json holds no JSON object"),
    "a template without end": (template(ENDLESS), "chat template that did not render"),
}  # fmt: skip
# What looks odd and is none: such folders run.
ODD: dict[str, Callable[[Path], object]] = {
    "more embeddings than tokens": lambda folder: widen(folder, 5),
    "padding outside the embeddings": lambda folder: add_token(folder, "pad_token"),
    "an unused token outside the embeddings": lambda folder: add_token(folder, "unk_token"),
    "a broken template": template("{% for"),
    "files beside": lambda folder: (folder / "notes.txt").write_text("?"),
}


def add_token(folder: Path, kind: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({kind: "<another>"})
    tokenizer.save_pretrained(folder)


def widen(folder: Path, more: int) -> None:
    model = load_model(folder, LmHead.same)
    model.resize_token_embeddings(model.config.vocab_size + more)
    model.save_pretrained(folder)


@pytest.fixture
def whole(tiny_base: Path, tmp_path: Path) -> Path:
    """A model of the tiny world as somebody's own folder, with nothing in it but what `save_pretrained` writes."""
    names = shutil.ignore_patterns("recipe.json", "report.json", "manifest.json")
    return Path(shutil.copytree(tiny_base, tmp_path / "whole", ignore=names))


@pytest.fixture
def in_shards(whole: Path) -> Path:
    """The same in two files with an index."""
    weights = load_file(whole / WEIGHTS)
    (whole / WEIGHTS).unlink()
    files = {name: f"model-0000{1 + number % 2}-of-00002.safetensors" for number, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: one for name, one in weights.items() if files[name] == file}, whole / file, {"format": "pt"})
    (whole / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return whole


def loads(folder: Path) -> None:
    """A folder that is not refused is a whole model: it loads and knows how a response ends."""
    assert find_model(str(folder), "", "model.path") == folder and stop_token_ids(folder)
    load_model(folder, LmHead.same)(input_ids=torch.tensor([[1, 2]]))


@pytest.mark.parametrize("befalls", BEFALLS)
@pytest.mark.parametrize("name", FILES)
def test_whatever_befalls_a_file_is_refused_by_its_name(request, name: str, befalls: str) -> None:
    folder: Path = request.getfixturevalue("in_shards" if name == INDEX else "whole")
    BEFALLS[befalls](folder / name)
    if (name, befalls) in LEGITIMATE:
        loads(folder)
        return
    with pytest.raises(ValueError, match=f"{name}|tokenizer" if "tokenizer" in name else name) as refused:
        find_model(str(folder), "", "model.path")
    assert str(folder) in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_model_is_refused_in_words_that_name_it(
    whole: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_TEMPLATE_SECONDS", 0.2)
    change, said = DAMAGES[damage]
    change(whole)
    with pytest.raises(ValueError, match=said) as refused:
        find_model(str(whole), "", "model.path")
    assert str(whole) in str(refused.value) and len(str(refused.value)) < 1000


@pytest.mark.parametrize("odd", ODD)
def test_what_only_looks_damaged_runs(whole: Path, odd: str) -> None:
    ODD[odd](whole)
    loads(whole)


@pytest.mark.parametrize("lost", ["one file", "an entry", "a file of a number", "one file cut"])
def test_shards_that_are_not_those_of_the_index_are_named(in_shards: Path, lost: str) -> None:
    loads(in_shards)
    file, index = "model-00002-of-00002.safetensors", json.loads((in_shards / INDEX).read_text())
    if lost == "one file":
        (in_shards / file).unlink()
    elif lost == "one file cut":
        truncated(in_shards / file)
    elif lost == "an entry":
        index["weight_map"] = {name: at for name, at in index["weight_map"].items() if at != file}
    else:
        index["weight_map"]["model.norm.weight"] = 2
    (in_shards / INDEX).write_text(json.dumps(index))
    said = {"an entry": "missing", "a file of a number": f"{INDEX} has no weight_map"}.get(lost, file)
    with pytest.raises(ValueError, match=said):
        find_model(str(in_shards), "", "model.path")


@pytest.mark.extended
def test_a_template_with_a_token_outside_the_embeddings_is_refused_before_the_run_has_a_folder(
    whole: Path, tmp_path: Path
) -> None:
    """Another template uses the same folder."""
    add_token(whole, "unk_token")
    (whole / "chat_template.jinja").write_text("{{ messages[0]['content'] }}<another>")
    loads(whole)
    words = ["model=hf", f"model.path={whole}", *SMALL]
    with pytest.raises(ValueError, match=r"a prompt has the token '<another>'.*embeddings for \d+ tokens"):
        asked = ["template=chat", "template.pattern='{question}'", "template.interruption='#'"]
        run_in_process(tmp_path / "runs", *words, *asked)
    assert not (tmp_path / "runs").exists()
    tokenizer = AutoTokenizer.from_pretrained(whole)
    check_tokens(whole, tokenizer, [tokenizer("3+4=")["input_ids"]])


def test_a_damaged_teacher_leaves_no_folder_either(whole: Path, tmp_path: Path) -> None:
    (whole / "config.json").write_text("[]")
    words = ["teacher=on_policy", f"teacher.path={whole}", *SMALL]
    with shapes_unchecked(), pytest.raises(ValueError, match=r"config\.json holds no JSON object"):
        run_in_process(tmp_path / "runs", *words)
    assert not (tmp_path / "runs").exists()
