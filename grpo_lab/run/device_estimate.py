"""Estimate from a model's config.json whether a run fits its device, before the model is loaded."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from grpo_lab.budget import device_estimate as budget
from grpo_lab.budget.compute_account import ModelFlops
from grpo_lab.budget.device_estimate import GIB, MARGIN, MemoryEstimate, Microbatch, ModelSize, StepFlops
from grpo_lab.budget.model_shape import FP32, ModelShape
from grpo_lab.config.run_config import RunConfig
from grpo_lab.config.stages import LearnerSettings
from grpo_lab.engines.base import Engine
from grpo_lab.engines.native import Native
from grpo_lab.engines.native_cache import BLOCK
from grpo_lab.engines.native_graphs import capacity
from grpo_lab.policy.loading import Loading, Lora
from grpo_lab.policy.optim import Optimizer
from grpo_lab.run.memory import REMEDIES
from grpo_lab.tricks.precision import LmHead, Precision
from grpo_lab.tricks.teacher import OnPolicyDistillation, Teacher
from grpo_lab.types import Microbatching, WeightType

_STAGES = {"open": "throughout", "generate": "while sampling", "train": "while training"}


def size_of(folder: Path, lora: Lora | None = None) -> ModelSize:
    """The size of the model in `folder` from its config.json. Raises ValueError for one without attention."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with torch.device("meta"):  # parameters without storage
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    head = model.get_output_embeddings()
    linear = {name: part for name, part in model.named_modules() if isinstance(part, nn.Linear) and part is not head}
    weights = [one.numel() for one in model.parameters()]
    shape = _shape(config.get_text_config(decoder=True), model)
    total, products = sum(weights), sum(part.weight.numel() for part in linear.values())
    if lora is None:
        return ModelSize(shape, ModelFlops.of(model), total, products, total, len(weights))
    every = lora.targets == ["all-linear"]
    adapted = [part for name, part in linear.items() if every or name.rpartition(".")[2] in lora.targets]
    added = sum(lora.rank * (part.in_features + part.out_features) for part in adapted)
    return ModelSize(shape, ModelFlops.of(model), total, products, added, 2 * len(adapted), added)


def _shape(config: PreTrainedConfig, model: PreTrainedModel) -> ModelShape:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:
        raise ValueError(f"{type(model).__name__} has no attention: its memory is not estimated")
    experts, inner = getattr(config, "num_experts_per_tok", None), getattr(config, "moe_intermediate_size", None)
    dense = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    return ModelShape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        mlp=(experts or 1) * (inner or dense),
        vocabulary=config.vocab_size,
        tied=bool(config.tie_word_embeddings),
    )


def estimate(run: RunConfig, size: ModelSize, longest_prompt: int, ranks: int = 1) -> MemoryEstimate:
    """The memory of `run` on each of `ranks` devices, with prompts of at most `longest_prompt` tokens."""
    engine, loading = run.engine, run.model.loading()
    needs_reference = run.kl.needs_reference or run.teacher.reads_reference
    held = _policy_bytes(
        size, loading, run.optimizer, needs_reference, run.reference.changes, run.evaluation.initial_kl
    )
    if run.baseline.needs_critic and run.critic.owns_trunk:
        held["the critic's weights and moments, float32"] = 3 * FP32 * _trunk(size)
    left_out = _add_teacher(run.teacher, held)
    held = {name: number // ranks for name, number in held.items()}
    sampling, share = {}, _share(engine)
    if isinstance(engine, Native):
        held["the sampler's weights"] = _sampler_bytes(run.sampler_precision, size)
        response = max(run.lengths.responses.values())
        sampling["KV cache"] = _cache_bytes(engine, run.sampler_precision, size.shape, longest_prompt, response)
    else:
        left_out += ["what vLLM holds on GPUs of its own"] if share == 0 else []
    problems = max(1, run.problems_per_step // run.updates.minibatches)
    batch = _microbatch(run.microbatching, longest_prompt, engine.max_tokens, run.group_size, problems)
    training = _training(run.learner_settings, size, batch, ranks)
    training["the output head and its logits"] = budget.head_bytes(size, batch, run.logits_per_chunk)
    return MemoryEstimate(held, sampling, training, share, tuple(left_out))


def _policy_bytes(
    size: ModelSize,
    loading: Loading,
    optimizer: Optimizer,
    needs_reference: bool,
    reference_changes: bool,
    initial_kl: bool,
) -> dict[str, int]:
    """Bytes of the learner, of its optimiser state and of the frozen copies of the policy, all in torch."""
    own = size.weights * getattr(torch, loading.frozen.value).itemsize
    held = {f"the learner's weights, {loading.frozen.value}": own + FP32 * size.adapter}
    numbers = optimizer.state_numbers(size.trained, size.trained if size.adapter else size.linear)
    held[optimizer.state_label] = size.optimizer_bytes(numbers)
    references = needs_reference and (loading.lora is None or reference_changes)
    if references:
        held["the reference's weights"] = own
    if initial_kl and loading.lora is None and (reference_changes or not references):
        held["the first weights, for evaluation.initial_kl"] = own
    return held


def _trunk(size: ModelSize) -> int:
    """Weights without an output head of their own."""
    return size.weights - (0 if size.shape.tied else size.head)


def _add_teacher(plan: Teacher, held: dict[str, int]) -> list[str]:
    """Add the weights of a teacher whose folder is here; the message if it is not."""
    if not isinstance(plan, OnPolicyDistillation):
        return []
    folder = Path(plan.path).expanduser()
    if not (folder / "config.json").is_file():
        return [f"the teacher: {plan.path} is no folder with a config.json on this machine"]
    held["the teacher's weights"] = size_of(folder).weights * getattr(torch, plan.weights.value).itemsize
    return []


def _share(engine: Engine) -> float:
    """The share of the learner's own device that vLLM takes; an engine with a `device_index` has another device."""
    return 0.0 if hasattr(engine, "device_index") else getattr(engine, "memory_share", 0.0)


def _sampler_bytes(precision: Precision, size: ModelSize) -> int:
    """The native engine's own copy; an fp32 head has storage of its own, beside a tied table."""
    numbers = precision.dtype.itemsize
    if precision.lm_head is not LmHead.fp32:
        return numbers * size.weights
    return numbers * _trunk(size) + FP32 * size.head


def _cache_bytes(engine: Native, precision: Precision, shape: ModelShape, longest_prompt: int, response: int) -> int:
    """Keys and values of a full batch. With CUDA graphs its prompts have a cache beside the one that is replayed."""
    number, rows = precision.dtype.itemsize, engine.max_rows
    if not engine.cuda_graphs:
        return budget.kv_cache_bytes(shape, rows, _in_blocks(longest_prompt + response), number)
    fixed_rows, room, _ = capacity(rows, longest_prompt + response, response)
    prompts = budget.kv_cache_bytes(shape, rows, _in_blocks(longest_prompt), number)
    return prompts + budget.kv_cache_bytes(shape, fixed_rows, room, number)


def _in_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK


def _training(learning: LearnerSettings, size: ModelSize, batch: Microbatch, ranks: int) -> dict[str, int]:
    half = learning.precision.dtype.itemsize < FP32
    casts = half and learning.loading.frozen is WeightType.fp32
    kept = budget.activations(size, batch, half, casts, learning.gradient_checkpointing)
    return {
        "gradients, float32": FP32 * size.trained // ranks,
        f"activations of {batch.tokens:,} tokens": kept,
    }


def _microbatch(
    microbatching: Microbatching, longest_prompt: int, response: int, group: int, problems: int
) -> Microbatch:
    """The largest training pass; no larger than an optimiser step on `problems` groups."""
    packs = microbatching.packs
    row = (longest_prompt + group * response) if packs else group * (longest_prompt + response)
    tokens = min(microbatching.microbatch_tokens, row * problems)
    return Microbatch.of(tokens, longest_prompt, response, group, packs)


def step_flops(run: RunConfig, size: ModelSize, prompt: int) -> StepFlops:
    """Model FLOPs of a step in which every response has its full length; critic and teacher are not counted."""
    rows, flops, end = run.problems_per_step * run.group_size, size.flops, prompt + run.engine.max_tokens
    read = rows * flops.span(0, end)
    sampled = run.problems_per_step * flops.span(0, prompt) + rows * flops.span(prompt, end)
    return StepFlops(sampled, read * (run.needs_logprobs + run.kl.needs_reference), 3 * read * run.updates.passes)


def verdict(found: MemoryEstimate, memory: float) -> str:
    """One sentence: whether the estimate fits `memory` bytes, and what to change where it may not."""
    too_much = found.too_much(memory)
    text = f"{found.needed(memory) / GIB:.1f} GiB estimated, {memory / GIB:.1f} GiB of memory"
    if too_much is False:
        return f"fits: {text}"
    stages = found.stages
    stage = "open" if stages["open"] > memory else max(stages, key=lambda name: stages[name])
    head = "does not fit" if too_much else f"may not fit (the estimate is good to {MARGIN:.0%})"
    return f"{head}: {text}; the peak is what it holds {_STAGES[stage]}: {REMEDIES[stage]}"


def free_memory(device: torch.device) -> float | None:
    """Bytes that are free on a GPU; None for a CPU, whose memory is not checked."""
    return float(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


def check_memory(run: RunConfig, device: torch.device, folder: Path, longest_prompt: int, ranks: int) -> list[str]:
    """Warnings where a run may exceed its GPU's free memory. Raises ValueError where it does, before a model loads."""
    memory = free_memory(device)
    if memory is None:
        return []
    try:
        size = size_of(folder, run.model.loading().lora)
    except ValueError as error:
        return [str(error)]
    found = estimate(run, size, longest_prompt, ranks)
    text = verdict(found, memory)
    if found.too_much(memory):
        raise ValueError(f"{device}: {text}")
    return [f"{device}: {text}"] if found.too_much(memory) is None else []


def estimate_text(
    found: MemoryEstimate, flops: StepFlops, prompt: int, response: int, memory: float | None, ranks: int
) -> str:
    """A table of the estimate in GiB, what it omits, whether it fits into `memory` bytes, and the time per step.

    `prompt` and `response` are the lengths in tokens for which it was made, on each of `ranks` GPUs.
    """
    each = f" on each of {ranks} GPUs" if ranks > 1 else ""
    prompts = f"prompts of {prompt} tokens" if prompt else "prompts of unknown length, taken as 0,"
    lines = [f"memory{each}, estimated for {prompts} and responses of {response} tokens, in GiB"]
    for stage, parts in (("open", found.held), ("generate", found.sampling), ("train", found.training)):
        lines += [f"  {name:<48}{number / GIB:>9.3f}" for name, number in parts.items()]
        lines += [f"  = {'held ' + _STAGES[stage]:<46}{found.stages[stage] / GIB:>9.3f}"]
    if found.engine_share:
        lines.append(f"  vLLM takes engine.memory_share={found.engine_share:g} of the GPU in addition")
    lines += [f"  not counted: {what}" for what in found.left_out]
    lines += [verdict(found, memory)] if memory is not None else []
    return "\n".join([*lines, _time_text(flops)])


def _time_text(flops: StepFlops) -> str:
    shares = budget.RECORDED_SHARES
    total = flops.sampling + flops.reading + flops.training
    assumed = ", ".join(f"{name} at {share:.1%}" for name, share in shares.items())
    seconds = flops.seconds(budget.RECORDED_PEAK, **shares)
    return (
        f"time: {total:.2e} FLOPs a step at full response length, {seconds:.2g} s on an H200 at the utilisation "
        f"recorded for a 135M model ({assumed} of {budget.RECORDED_PEAK / 1e12:.0f} TFLOP/s); larger models reach more"
    )
