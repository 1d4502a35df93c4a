"""A run that begins with an adapter: what is merged, kept and refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from helpers import assert_close
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from short_runs import SMALL, metrics_of, run_in_process
from transformers import AutoModelForCausalLM

from grpo_lab.tasks.hub import find_model

TOKENS = torch.tensor([[3, 4, 5, 6, 7]])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRPO_LAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def adapter(tiny_base: Path, tmp_path: Path) -> Path:
    """What peft saves of an adapter that has learnt."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32),
        LoraConfig(r=4, lora_alpha=8.0, target_modules=["q_proj", "up_proj"], init_lora_weights=False),
    )
    model.save_pretrained(str(tmp_path / "adapter"))
    return tmp_path / "adapter"


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_the_merged_model_answers_as_base_and_adapter_do(tiny_base: Path, adapter: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_base, dtype=torch.float32)
    before = logits(base)
    expected = logits(PeftModel.from_pretrained(base, str(adapter)))
    folder = find_model(str(adapter), "", "model.path")
    actual = logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    assert_close(actual, expected, 1e-5, "logits")
    assert (actual - before).abs().max() > 0.01, "the adapter changes something"


def test_an_adapter_is_merged_once_and_again_where_it_or_its_base_changes(
    tiny_base: Path, adapter: Path, own_cache: Path
) -> None:
    first = find_model(str(adapter), "", "model.path")
    at = (first / "model.safetensors").stat().st_mtime_ns
    assert find_model(str(adapter), "", "model.path") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == at
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: one * 2 for name, one in weights.items()}, adapter / "adapter_model.safetensors")
    second = find_model(str(adapter), "", "model.path")
    other = Path(shutil.copytree(tiny_base, own_cache / "other"))
    weights = load_file(other / "model.safetensors")
    save_file({name: one * 2 for name, one in weights.items()}, other / "model.safetensors", {"format": "pt"})
    change(adapter / "adapter_config.json", base_model_name_or_path=str(other))
    assert len({first, second, find_model(str(adapter), "", "model.path")}) == 3


def test_an_interrupted_merge_leaves_no_model(adapter: Path, own_cache: Path, monkeypatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(peft.PeftModel, "load_adapter", interrupted)
        with pytest.raises(KeyboardInterrupt):
            find_model(str(adapter), "", "model.path")
    assert not [one for one in (own_cache / "merged").iterdir() if one.is_dir() and one.suffix != ".partial"]
    (own_cache / "merged" / "left.partial").mkdir()
    assert (find_model(str(adapter), "", "model.path") / "model.safetensors").is_file()


def other_shape(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    save_file({name: torch.cat([one, one], -1) for name, one in weights.items()}, adapter / "adapter_model.safetensors")


def other_layers(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace("layers.0.", "layers.77."): one for name, one in weights.items()}
    save_file(renamed, adapter / "adapter_model.safetensors")


def fewer_layers(adapter: Path) -> None:
    weights = load_file(adapter / "adapter_model.safetensors")
    kept = {name: one for name, one in weights.items() if "layers.0." not in name}
    save_file(kept, adapter / "adapter_model.safetensors")


def other_modules(adapter: Path) -> None:
    change(adapter / "adapter_config.json", target_modules=["c_attn"])


@pytest.mark.parametrize("damage", [other_shape, other_layers, fewer_layers, other_modules])
def test_an_adapter_of_another_base_is_refused(adapter: Path, own_cache: Path, damage) -> None:
    damage(adapter)
    with pytest.raises(
        ValueError, match=r"(?s)model\.path must be an adapter of the base.* does not fit .*; write"
    ) as said:
        find_model(str(adapter), "", "model.path")
    assert "base_model_name_or_path" in str(said.value)
    assert not [one for one in (own_cache / "merged").iterdir() if one.is_dir()]


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (None, r"base_model_name_or_path in the adapter_config\.json of .* must be the base of the adapter, got None"),
        ("/gone", r"base_model_name_or_path in the adapter_config\.json of .* must be an existing folder, got /gone"),
    ],
)
def test_a_base_that_is_not_there_is_named_with_the_file_that_names_it(adapter: Path, named, message) -> None:
    change(adapter / "adapter_config.json", base_model_name_or_path=named)
    with pytest.raises(ValueError, match=message):
        find_model(str(adapter), "", "model.path")


def test_what_is_no_lora_or_no_safetensors_is_refused(adapter: Path) -> None:
    change(adapter / "adapter_config.json", peft_type="IA3")
    with pytest.raises(ValueError, match=r"must be a model or an adapter of LoRA, got one of IA3"):
        find_model(str(adapter), "", "model.path")
    change(adapter / "adapter_config.json", peft_type="LORA")
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ValueError, match=r"must hold safetensors, got an adapter without adapter_model\.safetensors"):
        find_model(str(adapter), "", "model.path")


@pytest.mark.extended
def test_a_run_begins_with_an_adapter_and_its_reference_is_the_merged_model(adapter: Path, tmp_path: Path) -> None:
    folder = run_in_process(
        tmp_path, *SMALL, "model=hf", f"model.path={adapter}", "model.lora.rank=2", "budget.amount=2", "kl=k3_loss"
    )
    first = next(row["metrics"] for row in metrics_of(folder) if row["step"] == 1)
    assert 0 < first["train/k3_ref"] < 0.002, "a reference without the given adapter is about 0.25 away"
