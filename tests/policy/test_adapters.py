"""LoRA: what is trained, what a sampler and a checkpoint get, and the reference with the adapter off."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compositions import run_of
from damage import cut_short
from helpers import assert_close
from pretrained import LORA, trained
from sampling import CPU, FP32, hf_model, learner_logprobs, requests_of
from short_runs import SMALL, metrics_of, run_in_process, same_ending
from transformers import AutoModelForCausalLM

from grpo_lab.engines.native_session import open_session
from grpo_lab.policy import packing
from grpo_lab.policy.adapters import (
    adapted,
    adapter_off,
    adapter_weights,
    add_adapter,
    load_adapter,
    save_whole,
    whole_weights,
)  # fmt: skip
from grpo_lab.policy.loading import Attention, Loading
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import WeightType


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[3, 4, 5, 6, 7]])).logits


def test_a_new_adapter_changes_nothing_and_alone_is_trained(tiny_base: Path) -> None:
    plain, model = load_model(tiny_base, LmHead.same), load_model(tiny_base, LmHead.same)
    add_adapter(model, LORA, 0)
    assert torch.equal(logits(plain), logits(model))
    learnt = {name for name, one in model.named_parameters() if one.requires_grad}
    assert learnt == set(adapter_weights(model)) and len(learnt) == 2 * 7 * model.config.num_hidden_layers
    assert not any("lm_head" in name or "embed" in name for name in learnt)
    logits_with = model(input_ids=torch.tensor([[3, 4, 5]])).logits.sum()
    logits_with.backward()
    assert all(one.grad is None for name, one in model.named_parameters() if name not in learnt)
    assert type(model) is type(plain), "the model keeps its class"


def test_the_seed_of_the_run_decides_the_adapter_and_nothing_else(tiny_base: Path) -> None:
    def drawn(seed: int) -> list[torch.Tensor]:
        model = load_model(tiny_base, LmHead.same)
        add_adapter(model, LORA, seed)
        return [one.clone() for one in adapter_weights(model).values()]

    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = drawn(0), drawn(0), drawn(1)
    assert torch.equal(torch.rand(1), before), "the caller's random state stays"
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert not all(torch.equal(a, b) for a, b in zip(first, other))


def test_merged_weights_are_the_formula_and_have_the_names_of_the_plain_model(tiny_base: Path) -> None:
    plain, model = load_model(tiny_base, LmHead.same), trained(tiny_base)
    whole = {name: tensor.clone() for name, tensor in whole_weights(model)}
    assert whole.keys() == plain.state_dict().keys()
    parts = model.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    down, up = parts[f"{name}.lora_A.default.weight"], parts[f"{name}.lora_B.default.weight"]
    formula = plain.state_dict()[f"{name}.weight"] + 8.0 / 4 * up @ down
    assert_close(whole[f"{name}.weight"], formula, 1e-6, "W + alpha / rank * B A")
    plain.load_state_dict(whole)
    assert_close(logits(plain), logits(model), 1e-5, "merged")
    assert not torch.equal(logits(load_model(tiny_base, LmHead.same)), logits(model))


def test_with_the_adapter_off_the_model_is_the_one_it_was(tiny_base: Path) -> None:
    model = trained(tiny_base)
    on = logits(model)
    with pytest.raises(KeyError), adapter_off(model):
        assert torch.equal(logits(model), logits(load_model(tiny_base, LmHead.same)))
        raise KeyError
    assert torch.equal(logits(model), on), "it is on again, even after an error"
    assert all(one.requires_grad for name, one in model.named_parameters() if "lora_" in name)


def test_a_saved_model_is_merged_and_any_program_loads_it(tiny_base: Path, tmp_path: Path) -> None:
    model = trained(tiny_base)
    save_whole(model, tmp_path / "saved")
    assert not list((tmp_path / "saved").glob("adapter*"))
    assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), logits(model), 1e-5, "loaded")
    assert adapted(model) and not adapted(load_model(tmp_path / "saved", LmHead.same))


def test_packed_rows_and_the_sampler_agree_with_the_adapted_learner(tiny_base: Path) -> None:
    model = trained(tiny_base)
    session = open_session(tiny_base, FP32, CPU, 64, False)
    session.update_weights(whole_weights(model), 1)
    requests = requests_of(tiny_base, rows=16)
    completions = session.generate(requests)
    ours, theirs = learner_logprobs(model, requests, completions)
    assert (ours - theirs).abs().max() < 1e-4
    assert packing.prepare(model)
    packed, _ = learner_logprobs(model, requests, completions)
    assert (packed - theirs).abs().max() < 1e-4
    session.close()


def test_an_adapter_of_another_shape_is_refused(tiny_base: Path) -> None:
    weights = {name: one.clone() for name, one in adapter_weights(trained(tiny_base)).items()}
    other = load_model(tiny_base, LmHead.same)
    with pytest.raises(ValueError, match="the checkpoint's adapter is of another shape"):
        load_adapter(other, weights)
    add_adapter(other, replace(LORA, rank=2), 0)
    with pytest.raises(ValueError, match=r"of another shape \(model\.layers.*give model\.lora the values it had"):
        load_adapter(other, weights)
    with pytest.raises(ValueError, match=r"fit nothing: this model's linear layers are down_proj, gate_proj"):
        add_adapter(load_model(tiny_base, LmHead.same), replace(LORA, targets=["qkv"]), 0)


@pytest.mark.parametrize("frozen", [WeightType.fp32, WeightType.bf16])
def test_a_merged_weight_is_summed_in_fp32_and_rounded_once(tiny_base: Path, frozen: WeightType) -> None:
    """A sum of halves would lose most of what an adapter that has learnt little adds."""
    loading = Loading(frozen, Attention.auto, False, LORA)
    plain, model = load_model(tiny_base, LmHead.same, loading).state_dict(), load_model(tiny_base, LmHead.same, loading)
    add_adapter(model, LORA, 0)
    generator = torch.Generator().manual_seed(1)
    for tensor in adapter_weights(model).values():
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.02)
    parts, apart = model.state_dict(), 0
    for name, tensor in whole_weights(model):
        place = name.removesuffix(".weight")
        if f"{place}.lora_A.default.weight" not in parts:
            assert torch.equal(tensor, plain[name])
            continue
        down, up = (parts[f"{place}.lora_{part}.default.weight"].double() for part in "AB")
        delta = 8.0 / 4 * up @ down
        exact = (plain[name].double() + delta).float().to(tensor.dtype)
        half = (plain[name].bfloat16() + delta.bfloat16()).to(tensor.dtype)
        assert tensor.dtype is plain[name].dtype
        near = torch.isclose(tensor.double(), exact.double(), rtol=0, atol=1e-6)
        assert near.double().mean() > 0.999, f"{name}: a tie of the one rounding at most"
        apart += int((half != exact).sum())
    assert apart > 100, "halves give other numbers, so the above sees them"


def test_frozen_weights_may_be_bf16_where_an_adapter_trains(tiny_base: Path) -> None:
    loading = Loading(WeightType.bf16, Attention.eager, False, LORA)
    model = load_model(tiny_base, LmHead.same, loading)
    add_adapter(model, LORA, 0)
    types = {one.dtype for name, one in model.named_parameters() if not one.requires_grad}
    assert types == {torch.bfloat16}
    assert {one.dtype for one in adapter_weights(model).values()} == {torch.float32}
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="frozen must be fp32 where all weights train, got bf16"):
        replace(hf_model(tiny_base), frozen=WeightType.bf16)


@pytest.mark.extended
@pytest.mark.parametrize("kl", ["k3_loss", pytest.param("none", marks=pytest.mark.extended)])
def test_a_run_with_an_adapter_learns_resumes_to_the_same_bits_and_keeps_its_reference(
    tiny_base: Path, tmp_path: Path, kl: str
) -> None:
    settings = (
        "world=tiny", "model=hf", f"model.path={tiny_base}", "model.lora.rank=4", "optimizer.learning_rate=1e-3",
        "optimizer.warmup_updates=1", f"kl={kl}", "evaluation=brief", "checkpoint_every=2", "budget.amount=4",
        "updates=one",
    )  # fmt: skip
    whole = run_in_process(tmp_path / "whole", *settings)
    with cut_short(3):  # one step after the checkpoint
        run_in_process(tmp_path / "parts", *settings)
    again = run_in_process(tmp_path / "parts", *settings)
    same_ending(whole, again)
    last = metrics_of(whole)[-1]["metrics"]
    assert last["eval/heldout_training/kl_initial"] != 0
    if kl == "k3_loss":
        assert metrics_of(whole)[1]["metrics"]["train/k3_ref"] == pytest.approx(0, abs=1e-6) != last["train/k3_ref"]
    merged = AutoModelForCausalLM.from_pretrained(max((whole / "checkpoints").glob("step=*")))
    base = AutoModelForCausalLM.from_pretrained(tiny_base)
    assert not torch.equal(logits(merged), logits(base))


@pytest.mark.few(1)
@pytest.mark.parametrize("model", [["model=hf", "model.path=somewhere"], ["model=smollm2"]], ids=["hf", "smollm2"])
@pytest.mark.parametrize("optimizer", ["adamw_pretrained", "adamw_cosine", "adamw_wsd"])
def test_an_adapter_has_a_rate_of_its_own_and_a_note(model: list[str], optimizer: str) -> None:
    whole = run_of(*model, f"optimizer={optimizer}")
    lora = run_of(*model, f"optimizer={optimizer}", "model.lora.rank=8")
    assert_close(whole.optimizer.learning_rate, 1e-6, 1e-12, "all weights")
    assert_close(lora.optimizer.learning_rate, 1e-5, 1e-12, "an adapter")
    assert whole.model.notes(1e-6) == []
    (note,) = lora.model.notes(lora.optimizer.learning_rate)
    assert note.startswith("LoRA of rank 8 at a learning rate of 1e-05: the best rate for LoRA is about ten times")
    assert whole.model.highest_rate < lora.model.highest_rate == float("inf")
    assert lora.model.loading().lora is not None and whole.model.loading().lora is None
    chosen = run_of(*model, f"optimizer={optimizer}", "model.lora.rank=8", "optimizer.learning_rate=3e-6")
    assert_close(chosen.optimizer.learning_rate, 3e-6, 1e-12, "what is typed wins")


def test_a_rate_for_all_weights_without_a_model_that_has_adapters() -> None:
    assert_close(run_of("world=tiny", "optimizer=adamw_pretrained").optimizer.learning_rate, 1e-6, 1e-12, "none here")


@pytest.mark.extended
def test_the_note_stands_in_the_record_of_the_run(tiny_base: Path, tmp_path: Path) -> None:
    words = ["model=hf", f"model.path={tiny_base}", "model.lora.rank=4", "optimizer.learning_rate=2e-3"]
    folder = run_in_process(tmp_path, *SMALL, *words, "budget.amount=1")
    warnings = json.loads((folder / "run.json").read_text())["warnings"]
    assert any(one.startswith("LoRA of rank 4 at a learning rate of 0.002") for one in warnings)
