"""The estimate of memory and time, compared with the bytes that real parts hold on the CPU, and with one GPU run."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from grpo_lab import loop
from grpo_lab.budget import device_estimate as budget
from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.budget.device_estimate import GIB, MemoryEstimate, Microbatch
from grpo_lab.config.hydra_setup import compose_config, compose_with_choices
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.engines.native import Native
from grpo_lab.engines.native_cache import BlockLayer, block_cache
from grpo_lab.engines.native_graphs import FixedBatch
from grpo_lab.engines.native_session import open_session
from grpo_lab.policy import packing
from grpo_lab.policy.adapters import add_adapter
from grpo_lab.policy.loading import Lora
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import recompute_layers
from grpo_lab.run.device_estimate import check_memory, estimate, size_of, step_flops, verdict
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead, Precision
from grpo_lab.types import Microbatching

FP32, BF16 = Fp32(LmHead.same, 1.0), Bf16(LmHead.same, 1.0)
SMOLLM2: dict[str, Any] = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True}
TINY: dict[str, Any] = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 2}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
SHAPES = {"tiny": LlamaConfig(**TINY), "SmolLM2-135M": LlamaConfig(**SMOLLM2), "biased": Qwen2Config(**TINY)}
SHAPES["two layers of it"] = LlamaConfig(**SMOLLM2 | {"num_hidden_layers": 2})
LARGE = pytest.param("SmolLM2-135M", marks=pytest.mark.extended)
BY_SHAPE = pytest.mark.parametrize("name", ["tiny", "biased", "two layers of it", LARGE])
PROMPT, RESPONSE, GROUP, PROBLEMS = 24, 40, 4, 2


def folder_of(tmp_path: Path, config: LlamaConfig | Qwen2Config) -> Path:
    """A folder with nothing but a config.json."""
    config.architectures = ["LlamaForCausalLM" if isinstance(config, LlamaConfig) else "Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path)
    return tmp_path


@cache
def built(name: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(SHAPES[name], dtype=torch.float32).eval()


def model_of(name: str) -> PreTrainedModel:
    """Random weights, fp32; a copy to change."""
    return copy.deepcopy(built(name))


def held_bytes(tensors: list[torch.Tensor]) -> int:
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.few(2)
@BY_SHAPE
def test_weights_gradients_and_optimiser_state_are_counted_to_the_byte(name: str, tmp_path: Path) -> None:
    size, model = size_of(folder_of(tmp_path, SHAPES[name])), model_of(name)
    assert not list(tmp_path.glob("*.safetensors"))
    assert 4 * size.weights == held_bytes(list(model.parameters()))
    assert size.flops == ModelFlops.of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    assert 4 * size.trained == held_bytes([one.grad for one in model.parameters() if one.grad is not None])
    assert size.optimizer_bytes(2 * size.trained) == held_bytes(
        [one for state in optimizer.state.values() for one in state.values()]
    )


@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "down_proj"]])
def test_of_an_adapter_only_its_own_weights_are_trained(targets: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    lora, model = Lora(rank=3, alpha=6.0, targets=targets), model_of("tiny")
    size = size_of(folder_of(tmp_path, SHAPES["tiny"]), lora)
    add_adapter(model, lora, 0)
    trained = [one for one in model.parameters() if one.requires_grad]
    assert (size.trained, size.trained_tensors) == (sum(one.numel() for one in trained), len(trained))
    assert size.weights + size.adapter == sum(one.numel() for one in model.parameters())


@pytest.mark.few(1)
@pytest.mark.parametrize("rows, tokens", [(3, 64), (5, 128)])
@pytest.mark.parametrize("name", ["tiny", "two layers of it"])
def test_the_cache_of_the_sampler_is_counted_to_the_byte(name: str, rows: int, tokens: int, tmp_path: Path) -> None:
    size, model = size_of(folder_of(tmp_path, SHAPES[name])), model_of(name)
    cache = block_cache(model.config)
    with torch.inference_mode():
        model(input_ids=torch.ones(rows, tokens - 9, dtype=torch.long), past_key_values=cache)
        for _ in range(8):
            model(input_ids=torch.ones(rows, 1, dtype=torch.long), past_key_values=cache)
    layers = [layer for layer in cache.layers if isinstance(layer, BlockLayer)]
    assert len(layers) == size.shape.layers
    held = held_bytes([store for layer in layers for store in layer.storage])
    assert budget.kv_cache_bytes(size.shape, rows, tokens, 4) == held


@pytest.mark.extended
def test_the_caches_of_cuda_graphs_are_counted_to_the_byte(tiny_run: RunConfig, tmp_path: Path) -> None:
    """The batch that a GPU replays, beside the cache that holds its prompts."""
    size, model = size_of(folder_of(tmp_path, SHAPES["tiny"])), model_of("tiny")
    assert isinstance(tiny_run.engine, Native)
    run = replace(tiny_run, engine=replace(tiny_run.engine, max_rows=5, cuda_graphs=True))
    prompt, tokens = 70, max(run.lengths.responses.values())
    cache = block_cache(model.config)
    with torch.inference_mode():
        model(input_ids=torch.ones(5, prompt, dtype=torch.long), past_key_values=cache)
    batch = FixedBatch(model, None, torch.zeros(1, dtype=torch.long), cache, 5, prompt + tokens, tokens, torch.float32)
    layers = [layer for layer in cache.layers if isinstance(layer, BlockLayer)]
    held = held_bytes([store for layer in layers for store in layer.storage]) + batch.held_bytes
    assert estimate(run, size, prompt).sampling["KV cache"] == held


@pytest.mark.few(1)
@pytest.mark.parametrize("head", LmHead)
@pytest.mark.parametrize("name", ["tiny", "two layers of it"])
def test_the_samplers_weights_are_counted_to_the_byte(
    name: str, head: LmHead, tiny_run: RunConfig, tiny_base: Path, tmp_path: Path
) -> None:
    for file in tiny_base.glob("*token*"):
        shutil.copy(file, tmp_path)
    model_of(name).save_pretrained(tmp_path)
    run = replace(tiny_run, sampler_precision=Bf16(head, 1.0))
    session = open_session(tmp_path, run.sampler_precision, torch.device("cpu"), 4, False)
    held = held_bytes(list(session.model.parameters()))
    assert estimate(run, size_of(tmp_path), 8).held["the sampler's weights"] == held


def saved_bytes(model: PreTrainedModel, precision: Precision, packs: bool, logits_per_chunk: int) -> int:
    """Bytes that autograd keeps for the backward pass of one microbatch, weights left out."""
    parameters = {one.untyped_storage().data_ptr() for one in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    prompts = [tuple(range(2 + problem, 2 + problem + PROMPT)) for problem in range(PROBLEMS) for _ in range(GROUP)]
    tokens = torch.full((PROBLEMS * GROUP, RESPONSE), 3)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        token_logprobs(
            model, prompts, tokens, torch.ones_like(tokens, dtype=torch.bool), 1.0, precision,
            microbatching=Microbatching(10**6, 10**6, logits_per_chunk, packs),
        )  # fmt: skip
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("precision", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny", "biased", LARGE])
def test_activations_are_within_a_tenth_of_what_autograd_keeps(
    name: str, precision: Precision, packs: bool, recomputes: bool, tmp_path: Path
) -> None:
    size, model = size_of(folder_of(tmp_path, SHAPES[name])), model_of(name)
    assert packing.prepare(model) or not packs
    if recomputes:
        recompute_layers(model)
    half = precision is BF16
    tokens = PROBLEMS * (PROMPT + GROUP * RESPONSE) if packs else PROBLEMS * GROUP * (PROMPT + RESPONSE)
    batch = Microbatch.of(tokens, PROMPT, RESPONSE, GROUP, packs)
    assert (batch.scored, batch.attended) == (PROBLEMS * GROUP * RESPONSE, PROBLEMS * GROUP * (PROMPT + RESPONSE))
    estimated = budget.activations(size, batch, half, half, recomputes)
    if recomputes:  # one layer's are there again in the backward pass, which hooks of the forward pass do not see
        estimated -= budget.layer_activations(size.shape, batch, half) + (2 * size.linear if half else 0)
    # Small chunks: what the head keeps is made again in the backward pass.
    assert saved_bytes(model, precision, packs, 8 * size.shape.vocabulary) == pytest.approx(estimated, rel=0.1)


# ---- the run that was measured


@pytest.fixture(scope="module")
def tiny_run(tiny_base: Path) -> RunConfig:
    return to_run(compose_config(["world=tiny", "evaluation=brief"]))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    """The run of `make gpu` with CUDA graphs: 64 x 8 x 256 tokens, bf16, four updates."""
    folder = folder_of(tmp_path_factory.mktemp("shape"), SHAPES["SmolLM2-135M"])
    overrides = [
        "recipe=plain", "world=arithmetic", "model=hf", f"model.path={folder}", "evaluation.max_tokens=2",
        "evaluation.downstream_max_tokens=2", "engine.max_tokens=256", "evaluation.initial_kl=false",
        "problems_per_step=64", "group_size=8", "learner_precision=bf16", "sampler_precision=bf16",
        "engine.max_rows=512", "microbatch_tokens=32768", "logits_per_chunk=268435456",
    ]  # fmt: skip
    return to_run(compose_config(overrides)), folder


@pytest.mark.extended
def test_the_recorded_peak_of_a_gpu_is_within_a_twentieth(recorded: tuple[RunConfig, Path]) -> None:
    """22.4 GiB on an H200, in tests/benchmarks: 128 rows of an update as two passes of half of them."""
    run, folder = recorded
    run = replace(run, microbatch_tokens=16 * (30 + 8 * 256) // 2)
    results = json.loads((Path(__file__).parents[1] / "benchmarks/results/gpu_nvidia_h200.json").read_text())
    (peak,) = [row["value"] for row in found_rows(results) if row.get("check") == "graphs: peak memory"]
    found = estimate(run, size_of(folder), 30)
    assert peak == pytest.approx(22.4, abs=0.1)
    assert found.stages["train"] / GIB == pytest.approx(peak, rel=0.05)
    assert found.stages["train"] == max(found.stages.values())


def found_rows(value: object) -> list[dict]:
    """Every mapping within a JSON value."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return ([value] if isinstance(value, dict) else []) + [row for one in inner for row in found_rows(one)]


def test_the_recorded_time_of_its_stages_is_given_back(recorded: tuple[RunConfig, Path]) -> None:
    run, folder = recorded
    flops = step_flops(run, size_of(folder), 30)
    seconds = flops.seconds(budget.RECORDED_PEAK, **budget.RECORDED_SHARES)
    assert seconds == pytest.approx(1.26 + 0.308 + 1.65, rel=0.1)


# ---- what a run holds by its options


def parts(run: RunConfig, folder: Path, ranks: int = 1) -> MemoryEstimate:
    return estimate(run, size_of(folder, run.model.loading().lora), 30, ranks)


@pytest.mark.extended
def test_each_option_adds_the_models_that_it_needs(recorded: tuple[RunConfig, Path]) -> None:
    run, folder = recorded
    plain, weights = parts(run, folder).held, 4 * size_of(folder).weights
    path = [f"model.path={folder}", "model=hf", "world=arithmetic", "evaluation.initial_kl=false"]

    def added(*overrides: str) -> dict[str, int]:
        held = parts(to_run(compose_config([*path, "sampler_precision=bf16", *overrides])), folder).held
        return {name: number for name, number in held.items() if name not in plain}

    assert added() == {}
    assert added("kl=k3_loss") == {"the reference's weights": weights}
    assert list(added("evaluation.initial_kl=true").values()) == [weights]
    assert list(added("recipe=open_reasoner_zero").values()) == [3 * weights]
    assert added("kl=k3_loss", "model.lora.rank=8") == {}, "the reference is the learner with its adapter off"
    assert added("teacher=on_policy", f"teacher.path={folder}") == {"the teacher's weights": weights}
    away = parts(to_run(compose_config([*path, "teacher=on_policy", "teacher.path=some/where"])), folder)
    assert away.left_out and "some/where" in away.left_out[0]
    half = parts(to_run(compose_config([*path, "model.lora.rank=8", "model.frozen=bf16"])), folder).held
    assert half["the learner's weights, bfloat16"] == weights // 2 + 4 * size_of(folder, run_lora(8)).trained


def run_lora(rank: int) -> Lora:
    return Lora(rank, 32.0, ["all-linear"])


def test_ranks_share_the_learner_and_each_holds_a_sampler(recorded: tuple[RunConfig, Path]) -> None:
    run, folder = recorded
    one, four = parts(run, folder), parts(run, folder, ranks=4)
    assert four.held["the learner's weights, float32"] == one.held["the learner's weights, float32"] // 4
    assert four.training["gradients, float32"] == one.training["gradients, float32"] // 4
    assert four.held["the sampler's weights"] == one.held["the sampler's weights"] and four.sampling == one.sampling


def test_recomputed_layers_and_smaller_passes_need_less(recorded: tuple[RunConfig, Path]) -> None:
    run, folder = recorded
    peaks = [
        parts(changed, folder).stages["train"]
        for changed in (
            run, replace(run, microbatch_tokens=8192), replace(run, gradient_checkpointing=True),
        )
    ]  # fmt: skip
    assert peaks[1] < 0.6 * peaks[0] and peaks[2] < 0.4 * peaks[0]


# ---- what a user is told


def test_the_verdict_says_what_to_lower(recorded: tuple[RunConfig, Path]) -> None:
    run, folder = recorded
    found = parts(run, folder)
    peak = found.needed(80.0 * GIB)
    assert verdict(found, 80.0 * GIB).startswith("fits: ")
    assert "may not fit" in verdict(found, peak) and "does not fit" in verdict(found, peak / 1.3)
    assert "lower microbatch_tokens" in verdict(found, peak / 1.3)
    assert "choose a smaller model" in verdict(found, 1.0 * GIB)
    many = replace(run, engine=replace(run.engine, max_rows=40_000))
    assert "lower engine.max_rows" in verdict(parts(many, folder), 80.0 * GIB)


def test_a_run_beyond_the_gpus_memory_is_refused_before_a_model_loads(
    recorded: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder holds a config.json and no weights. What is free on a GPU is given here, since none is."""
    run, folder = recorded
    device = torch.device("cpu")
    assert check_memory(run, device, folder, 30, 1) == []
    for free, refused in ((80.0 * GIB, False), (10.0 * GIB, True)):
        monkeypatch.setattr("grpo_lab.run.device_estimate.free_memory", lambda device, free=free: free)
        if refused:
            with pytest.raises(ValueError, match=r"does not fit: .* 10\.0 GiB of memory.*lower microbatch_tokens"):
                check_memory(run, device, folder, 30, 1)
        else:
            assert check_memory(run, device, folder, 30, 1) == []
    near = parts(run, folder).needed(80.0 * GIB)
    monkeypatch.setattr("grpo_lab.run.device_estimate.free_memory", lambda device: near)
    assert "may not fit" in check_memory(run, device, folder, 30, 1)[0]


@pytest.mark.extended
def test_the_loop_asks_before_it_loads_a_model(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_lab.run.device_estimate.free_memory", lambda device: 1024.0)
    monkeypatch.setattr(loop, "open_run", lambda *words: pytest.fail("a model was loaded"))
    config, choices = compose_with_choices(["world=tiny", f"runs_dir={tmp_path}", "evaluation=brief"])
    with pytest.raises(ValueError, match="does not fit"):
        loop.start(config, "run", choices, ["test"])
    assert "does not fit" in (tmp_path / "run/seed=0/error.txt").read_text()


@pytest.mark.extended
def test_the_command_on_the_page_estimates_from_a_config_alone(tmp_path: Path) -> None:
    """The line of conf/gpus.md, with a folder that holds a config.json and nothing else."""
    page = (Path(__file__).parents[2] / "conf/gpus.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith("grpo-lab explain") and "--memory-gib" in line]
    folder = folder_of(tmp_path, SHAPES["SmolLM2-135M"])
    words = line.replace("FOLDER", str(folder)).split()[1:]
    code = "import sys; from grpo_lab.cli import main; sys.argv = ['grpo-lab', *sys.argv[1:]]; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for said in (
        "the learner's weights, float32",
        "KV cache",
        "GiB of memory",
        "FLOPs a step",
        "held while training",
    ):
        assert said in done.stdout
    (weights,) = [row.split()[-1] for row in done.stdout.splitlines() if "the learner's weights" in row]
    assert float(weights) == pytest.approx(4 * size_of(folder).weights / GIB, abs=1e-3)
    away = [word if not word.startswith("model.path=") else "model.path=some/where" for word in words]
    done = subprocess.run([sys.executable, "-c", code, *away], capture_output=True, text=True, timeout=300)
    assert "config.json is not on this machine" in done.stdout
