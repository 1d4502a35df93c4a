"""Every way to make a step faster or smaller gives what the plain one gives: packing, chunks, recomputed layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from helpers import assert_close, inputs_of, make_run, random_scene, tiny_model
from hypothesis import given, settings
from hypothesis import strategies as st
from short_runs import final_weights, metrics_of, run_in_process
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.learner.update import UpdateAccumulator
from grpo_lab.policy import packing
from grpo_lab.policy.batching import make_minibatch
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.policy.models import load_model, recompute_layers, round_weights
from grpo_lab.policy.output_head import linear_head
from grpo_lab.policy.packing import PLAIN, packed_rows
from grpo_lab.tricks.aggregation import TokenMean
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.entropy import Bonus
from grpo_lab.tricks.kl import K1Reward, K3Loss
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead, Precision
from grpo_lab.tricks.surrogate import Kimi
from grpo_lab.types import Microbatching

FP32 = Fp32(LmHead.same, 1e-3)
quick = settings(max_examples=60, deadline=None, derandomize=True, database=None)
# Two prompts of several responses each, one of them a token long; a hole in a mask; a row with nothing to read.
PROMPTS = ((1, 2, 3), (1, 2, 3), (1, 2, 3), (4,), (4,), (5, 6, 7, 8, 9, 10))
LENGTHS = (5, 1, 7, 3, 0, 2)
FAST = {
    "packed": Microbatching(10**6, 4, packs=True),
    "packed in one block": Microbatching(10**6, 10**6, packs=True),
    "chunks of two": Microbatching(10**6, 4, logits_per_chunk=2 * 13),
    "packed, chunks of one": Microbatching(10**6, 4, logits_per_chunk=1, packs=True),
    "fused head": Microbatching(10**6, 4, fuses_head=True),
    "packed, fused head, chunks of two": Microbatching(10**6, 4, logits_per_chunk=2 * 13, packs=True, fuses_head=True),
}


def a_microbatch(vocabulary: int = 13) -> tuple[tuple[tuple[int, ...], ...], Tensor, Tensor]:
    tokens = torch.randint(vocabulary, (6, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor(LENGTHS)[:, None]
    mask[2, 1] = False
    return PROMPTS, tokens, mask


def gradient(
    model: nn.Module, cut: Microbatching, precision: Precision = FP32, temperature: float = 0.7, entropy: float = 0.3
):
    """Log-probs, entropies and the parameters' gradient of a weighted sum of both."""
    prompts, tokens, mask = a_microbatch()
    model.zero_grad()
    logprobs, spread = token_logprobs(model, prompts, tokens, mask, temperature, precision, True, microbatching=cut)
    weights = torch.linspace(-1, 2, tokens.numel(), dtype=logprobs.dtype).view(tokens.shape)
    ((weights * logprobs).sum() + entropy * (weights * spread).sum()).backward()
    return (
        logprobs.detach(),
        spread.detach(),
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
    )


def a_model(kind: str, **more) -> nn.Module:
    """A random two-layer model of a family of transformers, fp32, in eval mode."""
    sizes = {
        "vocab_size": 13, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "eos_token_id": 1,
        "bos_token_id": None, "initializer_range": 0.3,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**sizes | more)
        kernel = "sdpa" if getattr(transformers, f"{kind}ForCausalLM")._supports_sdpa else "eager"
        return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=kernel).eval()


@pytest.mark.parametrize("cut", FAST.values(), ids=FAST.keys())
def test_in_float64_log_probs_entropies_and_gradients_are_those_of_the_plain_path(cut) -> None:
    plain, fast = tiny_model(), tiny_model()
    assert packing.prepare(fast) and linear_head(fast) is not None
    for one, other in zip(gradient(plain, PLAIN), gradient(fast, cut)):
        assert one.abs().max() > 1e-2
        assert_close(other, one, 1e-12, "float64")


FAMILIES = {
    "Llama": {},
    "Llama tied": {"tie_word_embeddings": True},
    "Qwen3": {},
    "Mistral": {"sliding_window": 4},
    "GPTNeoX": {"num_key_value_heads": 2},
    "Gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2},
    "Granite": {"logits_scaling": 4.0},
    "Cohere": {"logit_scale": 0.25},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_packed_in_chunks_or_asked_for_its_own_scores(family) -> None:
    plain, fast = (a_model(family.split()[0], **FAMILIES[family]) for _ in range(2))
    assert packing.prepare(fast) == fast._supports_sdpa  # Gemma2 does not since transformers 5.24
    assert (linear_head(fast) is None) == (family in ("Gemma2", "Granite", "Cohere"))
    for cut in FAST.values():
        for one, other in zip(gradient(plain, PLAIN), gradient(fast, cut)):
            assert_close(other / one.abs().max(), one / one.abs().max(), 5e-5, family)


def test_a_head_that_does_more_is_found_whatever_its_configuration_says() -> None:
    """Scores are compared bit for bit: a cap that no list of names knows is a head of its own."""

    class Capped(transformers.LlamaForCausalLM):
        def forward(self, *inputs, **named):
            output = super().forward(*inputs, **named)
            output.logits = 3 * torch.tanh(output.logits / 3)
            return output

    model = a_model("Llama")
    assert linear_head(model) is model.get_output_embeddings()
    model = a_model("Llama")
    model.__class__ = Capped
    assert linear_head(model) is None
    prompts, tokens, mask = a_microbatch()
    scores = model(torch.tensor([[1, 2, 3]])).logits[0, -1].log_softmax(-1)
    logprobs, _ = token_logprobs(model, prompts, tokens, mask, 1.0, FP32, microbatching=FAST["chunks of two"])
    assert_close(logprobs[0, 0], scores[tokens[0, 0]], 1e-5, "of the capped scores")
    named = a_model("Gemma2", final_logit_softcapping=3.0)
    nn.init.zeros_(named.get_output_embeddings().weight)
    assert linear_head(named) is None, "scores of 0 look the same with a cap and without"


def test_a_model_that_mixes_tokens_otherwise_is_not_packed() -> None:
    class Shifting(nn.Linear):
        """A convolution over positions, which attention's mask knows nothing of."""

        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input + 0.5 * input.roll(1, dims=1))

    model = a_model("Llama")
    model.model.layers[0].mlp.up_proj.__class__ = Shifting
    assert not packing.prepare(model) and model.config._attn_implementation == "sdpa"
    assert not packing.prepare(nn.Linear(2, 2))
    before = gradient(model, PLAIN)
    for one, other in zip(before, gradient(model, FAST["packed"])):
        assert torch.equal(one, other), "the padded layout"


def test_a_prepared_model_reads_padded_rows_as_before() -> None:
    for family in ("Llama", "Mistral"):
        plain, fast = (a_model(family, **FAMILIES[family]) for _ in range(2))
        assert packing.prepare(fast)
        for one, other in zip(gradient(plain, PLAIN), gradient(fast, PLAIN)):
            assert torch.equal(one, other), family


@pytest.mark.parametrize("head", LmHead)
def test_half_precision_is_the_same_arithmetic_in_chunks(tmp_path: Path, head) -> None:
    a_model("Llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    model, precision = load_model(tmp_path, head), Bf16(head, 0.1)
    whole, chunks = (gradient(model, cut, precision) for cut in (PLAIN, FAST["chunks of two"]))
    # Half-precision products of a head in bf16 are summed chunk by chunk: 8 bits each. Behind a head in fp32 a sum in
    # another order may round one hidden number the other way, by processor.
    tolerance = 1e-3 if head is LmHead.fp32 else 2e-2
    for one, other in zip(whole[:2], chunks[:2]):
        assert_close(other, one, 1e-6, "log-probs and entropies")
    assert_close(chunks[2] / whole[2].abs().max(), whole[2] / whole[2].abs().max(), tolerance, "gradient")


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        made = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.numbers = max(self.numbers, *made, 0)
        return result


def test_no_tensor_is_as_large_as_rows_times_vocabulary() -> None:
    """Forwards and backwards; what is left over is the head's own weight and its gradient."""
    vocabulary, rows, length = 5000, 32, 8
    model = a_model("Llama", vocab_size=vocabulary)
    tokens = torch.randint(vocabulary, (rows, length), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)

    def largest(cut: Microbatching) -> int:
        with Largest() as seen:
            logprobs, entropy = token_logprobs(model, [(1, 2)] * rows, tokens, mask, 1.0, FP32, True, microbatching=cut)
            (logprobs.sum() + entropy.sum()).backward()
        return seen.numbers

    scores, head = rows * length * vocabulary, 32 * vocabulary
    assert largest(PLAIN) >= scores
    assert largest(Microbatching(10**6, 10**6, logits_per_chunk=16 * vocabulary)) == head < scores / 7


def peak_memory(model: nn.Module, cut: Microbatching, rows: int) -> int:
    """The most bytes a step holds at a time beyond what there was before it."""
    tokens = torch.randint(5000, (rows, 8), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    model.zero_grad()
    with torch.profiler.profile(profile_memory=True) as profiled:
        logprobs, _ = token_logprobs(
            model, [(1, 2)] * rows, tokens, mask, 1.0, FP32, with_entropy=False, microbatching=cut
        )
        logprobs.sum().backward()
    held = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def test_the_memory_of_a_step_grows_with_rows_and_not_with_rows_times_vocabulary() -> None:
    model = a_model("Llama", vocab_size=5000)
    chunked = Microbatching(10**6, 10**6, logits_per_chunk=16 * 5000)
    plain, fast = ([peak_memory(model, cut, rows) for rows in (32, 96)] for cut in (PLAIN, chunked))
    scores_of_64_rows = 64 * 8 * 5000 * 4
    assert plain[1] - plain[0] > 2 * scores_of_64_rows, "scores and their log-softmax at the least"
    assert 0 < fast[1] - fast[0] < 0.5 * scores_of_64_rows, "hidden states of a two-layer model"


def test_packing_reads_each_token_once() -> None:
    model = tiny_model()
    assert packing.prepare(model)
    prompts, tokens, mask = a_microbatch()
    row = packing.pack(prompts, tokens, mask, FAST["packed"])
    # prompts of 3, 1 and 6 tokens once; of each response all but its last
    assert row.ids.shape == (1, 3 + 1 + 6 + 4 + 0 + 6 + 2 + 0 + 1)
    assert row.positions[0, :7].tolist() == [0, 1, 2, 3, 4, 5, 6] and len(row.before) == int(mask.sum())
    assert [len(gather) for gather in row.sequences.gathers] == [3, 2], "longest first, at most 4 of padding each"


def test_packed_rows_fill_the_budget_and_count_a_shared_prompt_once() -> None:
    a, b = (1,) * 5, (2,) * 3
    assert packed_rows([a, a, a, b], [2, 2, 2, 4], Microbatching(11, 0)) == [[0, 1, 2], [3]]
    assert packed_rows([a, a, a, b], [2, 2, 2, 4], Microbatching(10, 0)) == [[0, 1], [2], [3]]
    assert packed_rows([a, a], [20, 20], Microbatching(10, 0)) == [[0], [1]], "longer than the budget: one of its own"
    assert packed_rows([], [], Microbatching(10, 0)) == []


def test_packed_microbatches_are_balanced_and_no_more_of_them() -> None:
    """128 responses of 256 tokens to 16 prompts of 20 do not fit into 32,768 tokens."""
    prompts = [(row // 8,) * 20 for row in range(128)]
    filled = Microbatching(32768, 0, packs=True)
    assert [len(one) for one in packed_rows(prompts, [256] * 128, filled)] == [126, 2]
    assert [len(one) for one in packed_rows(prompts, [256] * 128, replace(filled, balances=True))] == [64, 64]


@quick
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 60)), min_size=1, max_size=30), st.integers(1, 300))
def test_balanced_microbatches_keep_rows_and_bound_and_the_largest_is_least(rows, bound) -> None:
    prompts, responses = [(owner,) * 5 for owner, _ in rows], [length for _, length in rows]

    def sizes(groups: list[list[int]]) -> list[int]:
        return [
            sum(responses[row] + 5 * (row == group[0] or prompts[row] != prompts[row - 1]) for row in group)
            for group in groups
        ]

    cut = Microbatching(bound, 0, packs=True)
    filled, balanced = (packed_rows(prompts, responses, replace(cut, balances=one)) for one in (False, True))
    assert len(balanced) == len(filled) and max(sizes(balanced)) <= max(sizes(filled))
    assert [row for group in balanced for row in group] == list(range(len(rows)))
    # with a bound below the largest one there would be more of them, unless that is a single row
    lower = packed_rows(prompts, responses, replace(cut, microbatch_tokens=max(sizes(balanced)) - 1))
    assert len(balanced) == 1 or len(lower) > len(balanced) or max(sizes(lower)) == max(sizes(balanced))


def test_recomputed_layers_give_the_same_gradient_bits_and_keep_less() -> None:
    kept = {}
    for name in ("kept", "recomputed"):
        model, bytes_kept = a_model("Llama", num_hidden_layers=6), []
        if name == "recomputed":
            recompute_layers(model)
        prompts, tokens, mask = a_microbatch()

        def note(tensor: Tensor, sizes: list[int] = bytes_kept) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            token_logprobs(model, prompts, tokens, mask, 1.0, FP32)
        for cut in (PLAIN, FAST["packed"]):
            assert packing.prepare(model)
            kept[name, cut] = gradient(model, cut)[2]
        kept[name] = sum(bytes_kept)
        assert not any(module.training for module in model.modules())
    for cut in (PLAIN, FAST["packed"]):
        assert torch.equal(kept["kept", cut], kept["recomputed", cut])
    assert kept["recomputed"] < kept["kept"] / 4
    with pytest.raises(ValueError, match="gradient_checkpointing=false"):
        recompute_layers(nn.Linear(2, 2))


def test_rounded_weights_are_packed_too() -> None:
    model = a_model("Llama")
    round_weights(model, torch.bfloat16)
    plain = gradient(model, PLAIN)
    if packing.prepare(model):
        for one, other in zip(plain, gradient(model, FAST["packed"])):
            assert_close((other - one).abs().max() / one.abs().max(), 0.0, 5e-2, "8 bits")


# --- rows without signal -------------------------------------------------------------------------------------


def test_rows_without_signal_leave_and_every_count_stays() -> None:
    run, scene = make_run(), random_scene(0, 3, 4, 6)
    inputs = inputs_of(run, scene)
    flat = inputs.advantages.clone()
    flat[[0, 5, 6]] = 0
    inputs = replace(inputs, advantages=flat)
    whole, fewer = (
        make_minibatch(inputs, range(3), run.denominator, Microbatching(10**9, 10**9), skips) for skips in (False, True)
    )
    rows = [set(batch[0].rows.tolist()) for batch in (whole, fewer)]
    gone = rows[0] - rows[1]
    assert gone and gone == {row for row in rows[0] if not flat[row][inputs.loss_mask[row]].any()}
    assert fewer[0].totals.num_tokens == whole[0].totals.num_tokens and fewer[0].totals.num_rows == len(rows[0])
    none = replace(inputs, advantages=torch.zeros_like(flat))
    [last] = make_minibatch(none, range(3), run.denominator, Microbatching(10**9, 10**9), True)
    assert last.rows.numel() == 1 and last.totals.num_tokens == whole[0].totals.num_tokens
    empty = replace(inputs, loss_mask=torch.zeros_like(inputs.loss_mask))
    assert make_minibatch(empty, range(3), run.denominator, Microbatching(10**9, 10**9), True) == []


def test_means_for_the_log_are_over_the_tokens_that_were_read() -> None:
    nothing = torch.zeros(1, 1, dtype=torch.bool)
    tally = UpdateAccumulator(0, torch.zeros(1, 1), nothing, nothing, sums={"tokens": 4.0, "entropy": 6.0}, in_loss=12)
    assert tally.mean("entropy") == 1.5


def test_who_reads_rows_without_signal() -> None:
    free = to_run(compose_config(["world=tiny", "tracking=none", "skip_rows_without_signal=true"]))
    assert free.skips_rows and not replace(free, skip_rows_without_signal=False).skips_rows
    for reader in (
        {"kl": K3Loss(0.1, 20.0, 0.0)},
        {"entropy": Bonus(0.1)},
        {"surrogate": Kimi(0.1)},
        {"aggregation": TokenMean(Scope.microbatch)},
    ):
        assert not replace(free, **reader).skips_rows, reader
    assert replace(free, kl=K1Reward(0.1, 0.0)).skips_rows, "its charge is in the advantages"


@pytest.mark.extended
def test_a_run_that_leaves_them_out_learns_the_same_and_reads_less(tmp_path: Path, tiny_base: Path) -> None:
    """Also in updates where no row has signal: Adam moves on its momentum there."""
    quick = ["budget.amount=4", "problems_per_step=8", "group_size=4", "optimizer.learning_rate=1e-3", "updates=four"]
    plain, fast = (
        run_in_process(tmp_path / str(skips), *quick, f"skip_rows_without_signal={skips}") for skips in (False, True)
    )
    shares = []
    for one, other in zip(metrics_of(plain)[1:], metrics_of(fast)[1:]):
        one, other = one["metrics"], other["metrics"]
        shares.append(other["train/scored_share"])
        assert one["train/scored_share"] == 1
        for name in ("reward/mean", "train/updates", "train/skipped_updates", "budget/trained_tokens"):
            assert one[name] == other[name], name
        for name in ("train/loss", "train/gradient_norm", "train/update_norm"):
            assert one[name] == pytest.approx(other[name], abs=2e-5), name
    assert min(shares) < 0.9
    for name, weight in final_weights(plain).items():
        assert_close(final_weights(fast)[name], weight, 1e-4, name)


@pytest.mark.extended
def test_packing_chunks_and_recomputed_layers_change_no_metric_beyond_rounding(tmp_path: Path, tiny_base: Path) -> None:
    quick = ["budget.amount=2", "kl=k3_loss", "entropy=bonus"]
    arms = {
        "plain": ["packing=false"],
        "fast": ["logits_per_chunk=400", "gradient_checkpointing=true", "microbatch_tokens=600"],
    }
    plain, fast = (metrics_of(run_in_process(tmp_path / arm, *quick, *more)) for arm, more in arms.items())
    for one, other in zip(plain, fast):
        for name, value in one["metrics"].items():
            if name.startswith(("train/", "reward/", "mismatch/absolute")):
                assert other["metrics"][name] == pytest.approx(value, rel=1e-3, abs=2e-4), name
