"""Two processes that each load their rows of a model only hold the same bits as of one loaded whole and then split."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_in_parts import on_two
from safetensors.torch import load_file, save_file
from test_whole_models import LACKS
from transformers import AutoModelForCausalLM

from grpo_lab.policy.models import load_model
from grpo_lab.policy.parts import in_parts, own_weights, placed, taken
from grpo_lab.tricks.precision import LmHead

pytestmark = pytest.mark.extended  # at every change tests/run/test_several_ranks.py loads in parts, and trains
Found = list[dict[str, Any]]  # by process, then by case
Damage = Callable[[Path], str]
SIZES: dict[str, Any] = {
    "vocab_size": 13, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "untied, in files": ("Llama", {"tie_word_embeddings": False}),
    "biases": ("Qwen2", {"tie_word_embeddings": False}),
    "fewer rows than processes": ("Llama", {"num_key_value_heads": 1, "head_dim": 2, "intermediate_size": 1}),
    "fused experts": ("Qwen3Moe", {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "scaled embedding": ("Gemma2", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}),
    "long frequencies": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4,
                             "original_max_position_embeddings": 16}},
    ),
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "fp32 head": {"family": "tied", "head": "fp32"},
    "frozen in bf16": {"family": "untied, in files", "frozen": "bf16"},
    "rounded": {"family": "biases", "bf16": True},
    "adapter": {"family": "tied", "lora": True},
    "critic": {"family": "tied", "trunk": True},
}


def saved(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> Path:
    """A model of this family with random weights, in the folder."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**SIZES | sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.to(dtype).save_pretrained(folder, max_shard_size="4KB" if folder.name.endswith("files") else "5GB")
    return folder


def with_a_head_of_its_own(folder: Path) -> Path:
    """Tied by its configuration, with a head in the file that differs from the embedding: transformers unties them."""
    weights = load_file(saved(folder, *FAMILIES["tied"][:1], tie_word_embeddings=True) / "model.safetensors")
    head = weights["model.embed_tokens.weight"].clone()
    head[3, 5] += 1
    save_file(weights | {"lm_head.weight": head}, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory, tiny_base: Path) -> Found:
    """What two processes found, by case."""
    root = tmp_path_factory.mktemp("parts")
    folders = {name: saved(root / name, family, **sizes) for name, (family, sizes) in FAMILIES.items()}
    large = saved(
        root / "large", "Llama", hidden_size=384, intermediate_size=1536, num_hidden_layers=16, num_attention_heads=6,
        num_key_value_heads=6, head_dim=64, vocab_size=1000,
    )  # fmt: skip
    cases: dict[str, dict[str, Any]] = {"memory": {"kind": "measured", "folder": str(large)}}
    cases |= {name: {"kind": "compared", "folder": str(folder)} for name, folder in folders.items()}
    for name, variant in VARIANTS.items():
        cases[name] = {"kind": "compared", "folder": str(folders[variant["family"]]), **variant}
    own_head = with_a_head_of_its_own(root / "own head")
    cases["a head of its own"] = {"kind": "compared", "folder": str(own_head)}
    run = [
        "recipe=ppo", "updates=one", "critic.minibatches=1", "budget.amount=1", "kl=k3_loss", "reference=ema",
        "evaluation.initial_kl=true", "teacher=with_reward", f"teacher.path={tiny_base}",
    ]  # fmt: skip
    cases["run"] = {"kind": "run", "folder": str(root / "runs"), "overrides": run}
    cases["training"] = {"kind": "trained", "folder": str(folders["tied"])}
    cases["fused head"] = {"kind": "fused", "folder": str(folders["tied"])}
    cases["fused head, rounded"] = {"kind": "fused", "folder": str(folders["untied, in files"]), "bf16": True}
    for damage in LACKS:
        folder = root / damage.__name__
        shutil.copytree(tiny_base, folder)
        damage(folder)
        cases[damage.__name__] = {"kind": "refused", "folder": str(folder)}
    return on_two(root / "found", cases)


@pytest.mark.parametrize("name", [*FAMILIES, *VARIANTS, "a head of its own"])
def test_a_model_in_parts_is_the_same_as_one_split_when_it_was_whole(found: Found, name: str) -> None:
    for rank in found:
        whole, parts = rank[name]["whole"], rank[name]["parts"]
        assert whole == parts and parts["finite"] and not parts["training"]
        assert any(one != own for one, own in parts["shapes"].values()), "nothing is split"
        assert len(set(rank[name]["marks"])) == 2, "the fingerprint is of this rank's rows"
    first, second = (rank[name]["parts"] for rank in found)
    assert first["computed"] == second["computed"] and first["whole"] == second["whole"]
    assert first["own"] != second["own"]


def test_the_cases_are_what_their_names_say(found: Found) -> None:
    parts = {name: case["parts"] for name, case in found[1].items() if "marks" in case}
    assert parts["tied"]["tied"]["lm_head.weight"] == "model.embed_tokens.weight"
    for name in ("untied, in files", "a head of its own"):
        assert parts[name]["tied"]["lm_head.weight"] == "lm_head.weight"
    assert any(name.endswith("bias") for name in parts["biases"]["own"])
    assert any(own[0] == 0 for _, own in parts["fewer rows than processes"]["shapes"].values())
    assert any(name.endswith("experts.gate_up_proj") for name in parts["fused experts"]["own"])
    assert any(name.endswith("embed_scale") for name in parts["scaled embedding"]["buffers"])
    assert parts["tied"]["buffers"] != parts["long frequencies"]["buffers"]
    assert parts["tied"]["linear"] and not parts["scaled embedding"]["linear"]
    assert parts["adapter"]["trains"] and all("lora_" in name for name in parts["adapter"]["trains"])
    assert "lm_head.weight" not in parts["critic"]["own"]
    assert len({parts[name]["computed"] for name in ("untied, in files", "frozen in bf16")}) == 2


def test_an_update_is_the_same(found: Found) -> None:
    for rank in found:
        assert rank["training"]["whole"] == rank["training"]["parts"]


@pytest.mark.parametrize(("name", "bound"), [("fused head", 1e-5), ("fused head, rounded", 0.02)])
def test_a_split_model_has_the_same_gradient_with_a_fused_head(found: Found, name: str, bound: float) -> None:
    for rank in found:
        assert rank[name]["difference"] <= bound * rank[name]["largest"] != 0


def test_no_process_holds_the_whole_model(found: Found) -> None:
    """It holds half, one weight that arrives and one layer that runs; the same measure sees a whole model."""
    for rank in found:
        memory = rank["memory"]
        assert memory["size"] / 2 < memory["parts"] < 0.7 * memory["size"] < 0.95 * memory["size"] < memory["whole"]


@pytest.mark.parametrize("damage", LACKS)
def test_a_model_that_lacks_weights_is_refused_as_by_one_process(
    found: Found, tiny_base: Path, tmp_path: Path, damage: Damage
) -> None:
    folder = Path(shutil.copytree(tiny_base, tmp_path / "model"))
    damage(folder)
    with pytest.raises(ValueError) as by_one:
        load_model(folder, LmHead.same)
    for rank in found:
        said = rank[damage.__name__]["said"]
        assert said and said.partition(" are not ")[2] == str(by_one.value).partition(" are not ")[2]


def test_every_model_of_a_run_is_loaded_in_parts(found: Found) -> None:
    """Learner, reference, initial policy, teacher and the critic's trunk; its head is made and not loaded."""
    for rank in found:
        models = rank["run"]["models"]
        assert [kind for kind, _, _ in models] == [*["LlamaForCausalLM"] * 4, "LlamaModel", "Linear"]
        assert all(in_parts == of for kind, in_parts, of in models if kind != "Linear")


def test_one_process_loads_as_it_always_did(tiny_base: Path) -> None:
    with in_parts():
        model = load_model(tiny_base, LmHead.same)
    assert not taken(model) and placed(model, torch.device("cpu")) is model
    assert all(torch.equal(one, own) for one, (_, own) in zip(model.parameters(), own_weights(model), strict=True))
