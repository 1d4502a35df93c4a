"""The native engine: noise that ignores the neighbours, log-probs the learner agrees with, and its protocol."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from grpo_lab.engines.native import Native, NativeSession, draw
from grpo_lab.models import load_model, stop_token_ids
from grpo_lab.policy import token_logprobs
from grpo_lab.rollouts import decode, to_rollouts
from grpo_lab.tasks.grading import ExactAnswer, Strict
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead
from grpo_lab.types import Completion, NoiseKey, Problem, Request, SamplingParams, StopReason

CPU = torch.device("cpu")
FP32 = Fp32(LmHead.same)


def requests_of(folder: Path, rows: int = 48, params: SamplingParams | None = None, step: int = 0) -> list[Request]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = ["3+4?", "9+8+7?", "1+1+1?", "5+6?"]
    params = params or SamplingParams(max_tokens=24, temperature=1.0, top_p=1.0)
    return [
        Request(
            tuple(tokenizer(questions[row % 4], add_special_tokens=False)["input_ids"]),
            NoiseKey(0, "test", step, row % 4, row // 4),
            params,
        )
        for row in range(rows)
    ]


@pytest.fixture
def session(tiny_base: Path) -> NativeSession:
    return Native(24, 1.0, 1.0, max_rows=512).open(tiny_base, FP32, CPU)


def learner_logprobs(
    folder: Path, requests: Sequence[Request], completions: Sequence[Completion], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Learner's and sampler's log-probs of the same tokens, [N, T] each."""
    problems = tuple(Problem(i, "", "", 1) for i in range(len(requests)))
    rollouts = to_rollouts(problems, tuple(r.prompt + r.prefix for r in requests), 1, completions)
    scored, _ = token_logprobs(
        load_model(folder, LmHead.same), rollouts.prompts, rollouts.tokens, rollouts.sampled_mask, temperature, FP32
    )
    return scored, rollouts.sampler_logprobs


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_learner_and_sampler_give_the_same_tokens_the_same_logprobs(
    tiny_base: Path, session: NativeSession, temperature: float
) -> None:
    requests = requests_of(tiny_base, params=SamplingParams(24, temperature, 1.0))
    scored, sampled = learner_logprobs(tiny_base, requests, session.generate(requests), temperature)
    assert_close(scored, sampled, 2e-5, "one shift by one, one temperature, two ways to compute")


def test_a_response_does_not_depend_on_its_neighbours_order_or_wave(tiny_base: Path) -> None:
    requests = requests_of(tiny_base)
    wide = Native(24, 1.0, 1.0, max_rows=512).open(tiny_base, FP32, CPU)
    narrow = Native(24, 1.0, 1.0, max_rows=7).open(tiny_base, FP32, CPU)
    together = [c.tokens for c in wide.generate(requests)]
    assert [c.tokens for c in narrow.generate(requests)] == together
    assert [c.tokens for c in wide.generate(requests[::-1])][::-1] == together
    assert [wide.generate([request])[0].tokens for request in requests[:6]] == together[:6]


def test_in_fp32_at_least_999_of_1000_responses_ignore_their_neighbours(tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=3000)
    wide = Native(24, 1.0, 1.0, max_rows=3000).open(tiny_base, FP32, CPU).generate(requests)
    narrow = Native(24, 1.0, 1.0, max_rows=61).open(tiny_base, FP32, CPU).generate(requests[::-1])[::-1]
    same = sum(a.tokens == b.tokens for a, b in zip(wide, narrow))
    assert same >= 0.999 * len(requests)


def test_in_float64_neighbours_move_no_logprob_beyond_rounding(tiny_base: Path) -> None:
    model = load_model(tiny_base, LmHead.same).double()
    session = NativeSession(model, stop_token_ids(tiny_base), 512)
    requests = requests_of(tiny_base, rows=24)
    together = session.generate(requests)
    alone = [session.generate([request])[0] for request in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    for a, b in zip(together, alone):
        assert_close(a.logprobs, b.logprobs, 1e-5, "RMSNorm rounds to fp32 inside, the rest is float64")


def test_different_noise_gives_different_text_and_the_same_noise_the_same(
    tiny_base: Path, session: NativeSession
) -> None:
    first = [c.tokens for c in session.generate(requests_of(tiny_base))]
    assert [c.tokens for c in session.generate(requests_of(tiny_base))] == first
    assert [c.tokens for c in session.generate(requests_of(tiny_base, step=1))] != first
    assert len(set(first)) > 10


def test_finished_means_the_end_of_text_was_drawn_and_length_that_the_budget_was_met(
    tiny_base: Path, session: NativeSession
) -> None:
    (end,) = stop_token_ids(tiny_base)
    completions = session.generate(requests_of(tiny_base, rows=96))
    reasons = {c.stop for c in completions}
    assert reasons == {StopReason.EOS, StopReason.LENGTH}
    for c in completions:
        assert (c.stop is StopReason.EOS) == (c.tokens[-1] == end)
        assert end not in c.tokens[:-1]
        assert c.stop is StopReason.EOS or len(c.tokens) == 24
        assert len(c.tokens) == len(c.logprobs) == len(c.weight_versions)


def test_each_request_has_its_own_settings(tiny_base: Path, session: NativeSession) -> None:
    greedy = SamplingParams(24, 0.0, 1.0)
    short = SamplingParams(3, 1.0, 1.0)
    plain, cold, brief = (
        requests_of(tiny_base, 1)[0],
        *(
            Request(requests_of(tiny_base, 1)[0].prompt, NoiseKey(0, "x", 0, 0, n), params)
            for n, params in enumerate((greedy, short))
        ),
    )
    mixed = session.generate([plain, cold, brief])
    assert len(mixed[2].tokens) <= 3
    other_noise = Request(cold.prompt, NoiseKey(9, "y", 9, 9, 9), greedy)
    assert session.generate([other_noise])[0].tokens == mixed[1].tokens, "greedy reads no noise"
    assert session.generate([plain])[0].tokens == mixed[0].tokens


def test_a_prefix_is_continued_as_if_the_response_had_never_stopped(tiny_base: Path, session: NativeSession) -> None:
    requests = requests_of(tiny_base)
    whole = session.generate(requests)
    long = [i for i, c in enumerate(whole) if len(c.tokens) > 8]
    continued = session.generate(
        [Request(requests[i].prompt, requests[i].noise, requests[i].params, whole[i].tokens[:5]) for i in long]
    )
    assert [c.tokens for c in continued] == [whole[i].tokens[5:] for i in long]
    assert [c.stop for c in continued] == [whole[i].stop for i in long]


def test_an_abort_keeps_the_partial_response(tiny_base: Path) -> None:
    session = Native(24, 1.0, 1.0, max_rows=32).open(tiny_base, FP32, CPU)
    requests = requests_of(tiny_base, rows=48)  # two waves: the second never starts
    whole = session.generate(requests)
    finished: list[int] = []

    def abort_the_rest_after_five(index: int, _: Completion) -> list[int]:
        finished.append(index)
        return list(set(range(48)) - set(finished)) if len(finished) == 5 else []

    partial = session.generate(requests, abort_the_rest_after_five)
    aborted = [c for c in partial if c.stop is StopReason.ABORTED]
    assert len(partial) == 48 and len(aborted) >= 40
    for kept, full in zip(partial, whole):
        assert kept.tokens == full.tokens[: len(kept.tokens)]
        assert kept.stop in (full.stop, StopReason.ABORTED)
    assert any(c.tokens for c in aborted) and any(not c.tokens for c in aborted)


def test_updated_weights_are_used_and_their_version_is_on_every_token(tiny_base: Path, session: NativeSession) -> None:
    requests = requests_of(tiny_base, rows=16)
    before = session.generate(requests)
    other = load_model(tiny_base, LmHead.same)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    session.update_weights(other.state_dict().items(), 7)
    after = session.generate(requests)
    assert {v for c in before for v in c.weight_versions} == {0}
    assert {v for c in after for v in c.weight_versions} == {7}
    assert [c.tokens for c in after] != [c.tokens for c in before]
    for name, tensor in session.model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_of_another_model_are_refused(session: NativeSession) -> None:
    with pytest.raises(ValueError, match="load both from one folder"):
        session.update_weights([("nothing.weight", torch.zeros(1))], 1)


def test_bf16_sampling_disagrees_with_the_fp32_learner_by_its_rounding(tiny_base: Path) -> None:
    gaps = {}
    for name, precision in {
        "fp32": FP32,
        "bf16, head fp32": Bf16(LmHead.fp32),
        "bf16": Bf16(LmHead.same),
    }.items():
        session = Native(24, 1.0, 1.0, 512).open(tiny_base, precision, CPU)
        assert next(session.model.parameters()).dtype is precision.dtype
        requests = requests_of(tiny_base, rows=96)
        scored, sampled = learner_logprobs(tiny_base, requests, session.generate(requests))
        gaps[name] = float((scored - sampled).detach().abs().mean())
    # bfloat16 has 8 bits: relative steps of 1/256. On this base the head's share of the gap is too small to see.
    assert gaps["fp32"] < 1e-5 < 1e-4 < gaps["bf16, head fp32"] < 0.02
    assert 1e-4 < gaps["bf16"] < 0.02


def test_the_fp32_head_follows_the_learners_weights(tiny_base: Path) -> None:
    """A tied head that was untied for fp32 must be fed too, or it keeps the old policy's output layer."""
    session = Native(24, 1.0, 1.0, 512).open(tiny_base, Bf16(LmHead.fp32), CPU)
    other = load_model(tiny_base, LmHead.same)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    session.update_weights(other.state_dict().items(), 1)
    head = session.model.get_output_embeddings().weight
    assert head.dtype is torch.float32 and torch.equal(head, other.get_output_embeddings().weight)


def test_rounding_the_weights_leaves_the_rotary_frequencies_alone(tiny_base: Path) -> None:
    """In bfloat16 a frequency of 0.7001 becomes 0.6992: half a radian off after 600 tokens."""
    session = Native(24, 1.0, 1.0, 512).open(tiny_base, Bf16(LmHead.same), CPU)
    exact = dict(load_model(tiny_base, LmHead.same).named_buffers())
    assert exact, "a Llama has frequencies"
    for name, buffer in session.model.named_buffers():
        assert torch.equal(buffer, exact[name]), name


def test_a_prefix_that_has_ended_gets_nothing_more(tiny_base: Path, session: NativeSession) -> None:
    (end,) = stop_token_ids(tiny_base)
    base = requests_of(tiny_base, 1, SamplingParams(4, 1.0, 1.0))[0]
    full = Request(base.prompt, base.noise, base.params, prefix=(5, 6, 7, 8))
    over = Request(base.prompt, base.noise, base.params, prefix=(5, 6, 7, 8, 9))
    ended = Request(base.prompt, base.noise, base.params, prefix=(5, end))
    completions = session.generate([full, base, over, ended])
    nothing = Completion((), (), (), StopReason.LENGTH)
    assert completions[0] == completions[2] == nothing
    assert completions[3] == Completion((), (), (), StopReason.EOS)
    assert completions[1] == session.generate([base])[0]
    assert session.generate([]) == [] and session.generate([full]) == [nothing]


def test_padding_drawn_within_a_response_stays_visible_to_the_verifier(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    (end,) = stop_token_ids(tiny_base)
    ids = tokenizer("#33")["input_ids"]
    hidden = (ids[0], ids[1], tokenizer.pad_token_id, ids[2], end)
    row = Completion(hidden, (0.0,) * 5, (0,) * 5, StopReason.EOS)
    rollouts = to_rollouts((Problem(0, "", "33", 2),), ((2,),), 1, [row])
    (text,) = decode(tokenizer, rollouts)
    assert text != "#33" and Strict(1.0, 0.0)("33", text, True) == ExactAnswer(1.0, 0.0)("33", text, True) == 0.0


def test_draw_is_the_inverse_cdf() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)).repeat(6, 1)
    uniforms = torch.tensor([0.0, 0.1999, 0.2001, 0.4999, 0.5001, 1 - 1e-12], dtype=torch.float64)
    tokens, logprobs = draw(logits, uniforms, torch.ones(6), torch.ones(6))
    assert tokens.tolist() == [0, 0, 1, 1, 2, 2]
    assert_close(logprobs.exp(), [0.2, 0.2, 0.3, 0.3, 0.5, 0.5], 1e-12, "of the whole softmax")


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_leaves_the_logprob_whole() -> None:
    logits = torch.log(torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)).repeat(4, 1)
    uniforms = torch.tensor([0.01, 0.374, 0.376, 0.99], dtype=torch.float64)
    # 0.5 + 0.3 reaches 0.7, so token 0 is out and 0.3/0.8 = 0.375 divides tokens 1 and 2.
    tokens, logprobs = draw(logits, uniforms, torch.ones(4), torch.full((4,), 0.7))
    assert tokens.tolist() == [1, 1, 2, 2]
    assert_close(logprobs.exp(), [0.3, 0.3, 0.5, 0.5], 1e-12, "not renormalised")
    tokens, _ = draw(logits, uniforms, torch.ones(4), torch.full((4,), 0.5))
    assert tokens.tolist() == [2, 2, 2, 2], "0.5 alone reaches 0.5"


def test_drawn_frequencies_follow_the_softmax(tiny_base: Path, session: NativeSession) -> None:
    """First tokens over 4096 keys against the model's own distribution, within five standard errors."""
    base = requests_of(tiny_base, 1)[0]
    one = SamplingParams(1, 1.0, 1.0)
    requests = [Request(base.prompt, NoiseKey(3, "frequency", 0, 0, n), one) for n in range(4096)]
    drawn = torch.tensor([c.tokens[0] for c in session.generate(requests)])
    with torch.no_grad():
        expected = session.model(torch.tensor([base.prompt])).logits[0, -1].softmax(-1)
    observed = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    error = (expected * (1 - expected) / len(drawn)).sqrt()
    assert ((observed - expected).abs() <= 5 * error + 1e-3).all()


def test_left_padding_and_a_sliding_window_change_nothing(tmp_path: Path) -> None:
    """Another architecture, prompts of different lengths: a batch and single requests say the same."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    small = {
        "vocab_size": 11, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 64, "eos_token_id": 1, "pad_token_id": 0,
        "initializer_range": 0.4,
    }  # fmt: skip
    for model in (
        LlamaForCausalLM(LlamaConfig(**small)),
        MistralForCausalLM(MistralConfig(**small, sliding_window=6)),
    ):
        session = NativeSession(model.eval(), frozenset({1}), 64)
        params = SamplingParams(16, 1.0, 1.0)
        requests = [Request(tuple(range(2, 4 + n % 5)), NoiseKey(0, "w", 0, n, 0), params) for n in range(20)]
        together = [c.tokens for c in session.generate(requests)]
        assert [session.generate([r])[0].tokens for r in requests] == together
        completions = session.generate(requests)
        for request, completion in zip(requests, completions):
            ids = torch.tensor([request.prompt + completion.tokens])
            with torch.no_grad():
                whole = model(ids, use_cache=False).logits.log_softmax(-1)[0, len(request.prompt) - 1 : -1]
            picked = whole.gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
            assert_close(completion.logprobs, picked, 1e-4, type(model).__name__)
