"""How many operations the learner asks torch for: on a GPU each that is no view is a kernel to launch.

The model has the layers and heads of SmolLM2-135M and is narrow: the counts depend on neither width nor length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from helpers import StepInputs, inputs_of, make_rollouts, make_run, random_scene
from operations import Operations
from torch import Tensor
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, masking_utils

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.distributed import device as device_module
from grpo_lab.distributed.device import on_cpu, on_device
from grpo_lab.learner import update as update_module
from grpo_lab.learner.loss import policy_loss
from grpo_lab.learner.update import UpdateAccumulator
from grpo_lab.policy import critic as critic_module
from grpo_lab.policy import optim, packing
from grpo_lab.policy.batching import make_minibatch
from grpo_lab.policy.critic import LiveCritic
from grpo_lab.policy.logprobs import forward_inputs, logprobs_of, token_logprobs
from grpo_lab.policy.optim import Adamw, Decay
from grpo_lab.policy.output_head import linear_head
from grpo_lab.run.state import RunState
from grpo_lab.tricks.critic import SeparateModel
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead
from grpo_lab.types import Batch, Microbatching

LAYERS = 30
BF16 = Bf16(LmHead.same, 0.1)
FP32 = Fp32(LmHead.same, 1e-3)
META = torch.device("meta")  # its tensors have no numbers, so whatever would wait for a GPU's raises
ONE_BLOCK = Microbatching(10**6, 10**6, packs=True)
ADAMW = Adamw(
    max_grad_norm=1.0, learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, warmup_updates=0,
    decay=Decay.constant, decay_share=0.25, final_share=0.1,
)  # fmt: skip


def like_smollm2(layers: int = LAYERS, **sizes: int) -> PreTrainedModel:
    config = LlamaConfig(
        **{"hidden_size": 72, "intermediate_size": 96} | sizes, vocab_size=64, num_hidden_layers=layers,
        num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True, bos_token_id=None, eos_token_id=1,
        pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config).eval()
    assert packing.prepare(model)
    return model


def a_batch(cut: Microbatching = ONE_BLOCK) -> Batch:
    """Eight responses of many lengths to two prompts, as one microbatch."""
    noise = torch.Generator().manual_seed(0)
    tokens = torch.randint(64, (8, 9), generator=noise)
    rollouts = make_rollouts([5, 9, 3, 7, 2, 6, 8, 8], 4, prompts=[(1, 2, 3), (4, 5, 6, 7)], tokens=tokens)
    old = -4 - torch.rand(8, 9, generator=noise)
    inputs = StepInputs(rollouts, rollouts.sampled_mask, torch.randn(8, 9, generator=noise), old, None, None)
    (batch,) = make_minibatch(inputs, range(2), make_run().denominator, cut)
    return batch


def read(model: PreTrainedModel, batch: Batch, cut: Microbatching) -> tuple[Tensor, Tensor]:
    logprobs, entropy = token_logprobs(
        model, batch.prompts, batch.tokens, batch.loss_mask, 1.0, BF16, microbatching=cut
    )
    assert entropy is not None
    return logprobs, entropy


@dataclass(frozen=True)
class Counts:
    logprobs: Operations
    training: Operations
    step: Operations


@cache
def counts() -> Counts:
    """A pass without gradient, a training microbatch forward and backward, and an optimiser step."""
    model, batch = like_smollm2(), a_batch()
    with Operations() as logprobs, torch.no_grad():
        read(model, batch, ONE_BLOCK)
    with Operations() as training:
        policy_loss(make_run().loss_tricks, batch, *read(model, batch, ONE_BLOCK)).loss.backward()
    optimizer = ADAMW.build(model.parameters())
    with Operations() as step:
        ADAMW.step(optimizer, 0)
    return Counts(logprobs, training, step)


@pytest.mark.few(2)
@pytest.mark.parametrize(("what", "kernels"), [("logprobs", 3686), ("training", 4761), ("step", 4099)])
def test_kernels_when_eager(what: str, kernels: int) -> None:
    assert 0.9 * kernels <= getattr(counts(), what).kernels <= kernels


def test_an_optimiser_step_on_a_gpu_is_one_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that say that they are on a GPU and hold nothing.

    Norm and clip are one kernel for all real tensors; of such ones torch takes each by itself.
    """
    monkeypatch.setattr(optim, "_read", lambda norm, steps: [1.0] * (1 + len(steps)))
    shapes = [tuple(one.shape) for one in like_smollm2().parameters()]
    with FakeTensorMode():
        parameters = [torch.nn.Parameter(torch.empty(shape, device="cuda")) for shape in shapes]
        optimizer = ADAMW.build(parameters)
        for update in range(2):  # the first also makes Adam's moments
            for one in parameters:
                one.grad = torch.empty_like(one)
            with Operations() as seen:
                ADAMW.step(optimizer, update)
    assert seen.names["_fused_adamw_"] == 1 and seen.reads == 0
    assert seen.names["_foreach_norm"] == 1, "of the update"
    assert seen.names["linalg_vector_norm"] == len(shapes) + 1 and seen.names["mul_"] == len(shapes)
    assert seen.kernels - 2 * len(shapes) <= 16


@pytest.mark.few(1)
@pytest.mark.parametrize(("varlen", "kernels"), [(False, 4202), (True, 3452)])
def test_kernels_of_the_layers_in_single_precision(varlen: bool, kernels: int) -> None:
    """Forward and backward, with blocks and with torch's kernel for sequences of every length."""
    model, batch = like_smollm2().to("meta"), a_batch()
    row = packing.pack(batch.prompts, batch.tokens, batch.loss_mask, ONE_BLOCK, varlen)
    row = on_device(row, META)
    with Operations() as seen:
        model.base_model(**row.inputs()).last_hidden_state.sum().backward()
    assert 0.9 * kernels <= seen.kernels <= kernels
    assert (seen.names["index_add"] == 0) == varlen, "which sorts, where results have to repeat"


def bytes_of_the_layers(layers: int, width: int, varlen: bool) -> int:
    """What a forward and a backward pass of eager layers in bfloat16 and SmolLM2's sizes read and write."""
    model = like_smollm2(layers, hidden_size=576, intermediate_size=1536).to("meta", torch.bfloat16)
    rollouts = make_rollouts([width] * 8, 4, prompts=[(1, 2, 3), (4, 5, 6, 7)])
    prompts = [rollouts.prompt_of_row(row) for row in range(8)]
    row = on_device(packing.pack(prompts, rollouts.tokens, rollouts.sampled_mask, ONE_BLOCK, varlen), META)
    with Operations() as seen:
        row.states(model.base_model).sum().backward()
    return seen.bytes


@pytest.mark.few(1)
@pytest.mark.parametrize(("varlen", "kilobytes"), [(True, 341), (False, 643)])
def test_bytes_of_a_token_in_a_layer(varlen: bool, kilobytes: int) -> None:
    """The second layer's, of 128 further tokens in each of eight rows: weights and the other layer cancel."""
    short, long = (
        bytes_of_the_layers(2, width, varlen) - bytes_of_the_layers(1, width, varlen) for width in (128, 256)
    )
    assert 0.95 * kilobytes <= (long - short) / (8 * 128) / 1e3 <= kilobytes


def test_every_way_to_read_a_number_is_seen() -> None:
    mask, values = torch.tensor([True, False]), torch.ones(2)
    ways = [
        lambda: float(values.sum()), lambda: bool(mask.any()), lambda: mask.nonzero(), lambda: values[mask],
        lambda: values[0].item(), lambda: torch.equal(values, values),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        with Operations() as seen:
            way()
        assert seen.reads == 1, number
    with Operations() as seen:
        torch.where(mask, values, 0.0).sum()
    assert seen.reads == 0


# --- nothing is read back ------------------------------------------------------------------------------------


def on_meta(run: RunConfig, cut: Microbatching) -> RunState:
    """The part of a run's state that an update reads, with its learner on the meta device."""
    model = like_smollm2(2)
    assert linear_head(model) is not None, "it compares numbers, once for each model"
    state = object.__new__(RunState)
    state.device, state.learner, state.microbatching, state.critic = META, model.to("meta"), cut, None
    state.optimizer, state.model_flops = run.optimizer.build(model.parameters()), ModelFlops.of(model)
    state.account, state.updates = ComputeAccount(), 0
    state.precision, state.temperature = run.learner_precision, run.engine.temperature
    state.loss_scale = torch.amp.GradScaler("cpu", enabled=False)
    return state


def options(axis: str) -> list[str]:
    return [f"{axis}={path.stem}" for path in sorted((conf_folder() / axis).glob("*.yaml"))]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "option", [one for axis in ("surrogate", "importance", "aggregation", "kl", "entropy") for one in options(axis)]
)
def test_no_trick_reads_a_number_within_a_microbatch(option: str) -> None:
    axis = option.partition("=")[0]
    run = make_run(**{axis: getattr(to_run(compose_config(["world=tiny", "tracking=none", option])), axis)})
    batch, state = a_batch(), on_meta(to_run(compose_config(["world=tiny", "tracking=none"])), ONE_BLOCK)
    batch = replace(batch, ref_logprobs=batch.old_logprobs, correction_weights=torch.ones(batch.tokens.shape))
    batch = replace(batch, marked=None if run.surrogate.mark_scope is None else batch.loss_mask)
    inputs = forward_inputs(state.learner, batch.prompts, batch.tokens, batch.loss_mask, ONE_BLOCK, FP32)
    with Operations() as upload:
        batch, inputs = on_device((batch, inputs), META)
    assert upload.names["_to_copy"] == 1, "one transfer"
    needs = run.entropy.needs_gradient
    logprobs, entropy = logprobs_of(state.learner, inputs, 1.0, FP32, True, needs, ONE_BLOCK)
    assert entropy is not None
    policy_loss(run.loss_tricks, batch, logprobs, entropy).loss.backward()
    assert all(one.grad is not None for one in state.learner.parameters())


def test_an_update_reads_its_device_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What all microbatches gave, after the last; then the gradient's norm, before the weights change."""
    run = to_run(compose_config(["world=tiny", "tracking=none"]))
    state, read = on_meta(run, Microbatching(20, 8, packs=True)), []
    inputs = inputs_of(run, random_scene(0, 2, 4, 9))
    batches = make_minibatch(inputs, range(2), run.denominator, state.microbatching)

    def back(record: object) -> object:
        assert all(one.grad is not None for one in state.learner.parameters())
        read.append("outputs")
        return device_module._swapped(record, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))

    def norm(total: Tensor, steps: list[Tensor | None]) -> list[float]:
        assert total.is_meta
        read.append("norm")
        return [1.0] * (1 + len(steps))

    monkeypatch.setattr(update_module, "on_cpu", back)
    monkeypatch.setattr(optim, "_read", norm)
    tally = UpdateAccumulator.of(inputs, 0)
    update_module.update(run.update_settings, state, batches, 5, tally)
    assert len(batches) > 2 and read == ["outputs", "norm"] and state.updates == 1
    assert tally.reports[0].squares.is_meta, "read after the last update, with those of the others"


def test_a_critic_reads_its_device_twice_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """And once for the values of a batch. Each microbatch goes there in one transfer.

    transformers itself reads one number in each pass, to see whether padded rows are packed; that is left out.
    """
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)
    trunk, head, read = like_smollm2(2).base_model.to("meta"), torch.nn.Linear(72, 1, device="meta"), []
    plan = SeparateModel(1e-2, 0, 1, 1, 0.2, 0.5, 0)
    critic = LiveCritic(plan, trunk, head, ADAMW, FP32, Microbatching(20, 8, packs=True))
    rollouts = random_scene(0, 2, 4, 9).rollouts

    def back(record: object) -> object:
        read.append("outputs")
        return device_module._swapped(record, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))

    monkeypatch.setattr(critic_module, "on_cpu", back)
    monkeypatch.setattr(optim, "_read", lambda norm, steps: read.append("norm") or [1.0] * (1 + len(steps)))
    with Operations() as values:
        old = critic.values(rollouts, ComputeAccount())
    groups = critic._microbatches(rollouts, rollouts.sampled_mask, range(rollouts.num_rows))
    assert read == ["outputs"] and len(groups) > 2 and values.names["_to_copy"] >= len(groups)
    critic.learn(rollouts, rollouts.sampled_mask, old, old, ComputeAccount())
    assert read == ["outputs"] * 2 + ["norm"] and critic.updates == 1


def test_one_buffer_carries_tensors_of_every_type() -> None:
    tensors = [
        torch.tensor(True), torch.arange(3), torch.rand(2, 5).T, torch.zeros(0), torch.tensor([False, True, True]),
        torch.rand(7, dtype=torch.float64), torch.rand(3).bfloat16(), torch.tensor(2.5),
        torch.arange(3, dtype=torch.int32),
    ]  # fmt: skip
    for sent, arrived in zip(tensors, device_module._transferred(tensors, torch.device("cpu")), strict=True):
        assert sent.dtype is arrived.dtype and torch.equal(sent, arrived)


def test_a_record_keeps_what_is_no_tensor() -> None:
    batch = a_batch()
    assert on_cpu(batch) is batch
    moved = on_device({"two": [(batch, None)]}, META)["two"][0]
    assert moved[1] is None and moved[0].prompts == batch.prompts and moved[0].totals.num_rows == 8
    assert moved[0].loss_mask.is_meta and moved[0].totals.row_tokens.is_meta and moved[0].tokens.shape == (8, 9)
