"""The native engine: noise that ignores the neighbours, log-probs the learner agrees with, and its protocol."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
import torch
from helpers import assert_close
from sampling import CPU, FP32, asked, learner_logprobs, requests_of
from transformers import AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from grpo_lab.engines.native import Native
from grpo_lab.engines.native_attention import NAME as decode_attention_name
from grpo_lab.engines.native_attention import decode_attention, shared_keys_attention
from grpo_lab.engines.native_cache import BLOCK, BlockLayer, arrange_rows, block_cache, placed
from grpo_lab.engines.native_graphs import check_graphs
from grpo_lab.engines.native_sampling import draw
from grpo_lab.engines.native_session import SHARED, NativeSession
from grpo_lab.policy.model_folder import stop_token_ids
from grpo_lab.policy.models import load_model
from grpo_lab.rollout.grading import decode, to_rollouts
from grpo_lab.tasks.verifiers import ExactAnswer, Strict
from grpo_lab.tricks.precision import Bf16, LmHead
from grpo_lab.types import Completion, NoiseKey, Problem, Request, SamplingParams, StopReason, SureRun


@pytest.fixture
def session(tiny_base: Path) -> NativeSession:
    return Native(24, 1.0, 1.0, max_rows=512).open(tiny_base, FP32, CPU)


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
    together = [c.ids for c in wide.generate(requests)]
    assert [c.ids for c in narrow.generate(requests)] == together
    assert [c.ids for c in wide.generate(requests[::-1])][::-1] == together
    assert [wide.generate([request])[0].ids for request in requests[:6]] == together[:6]


@pytest.mark.extended
def test_in_fp32_at_least_999_of_1000_responses_ignore_their_neighbours(tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=3000)
    wide = Native(24, 1.0, 1.0, max_rows=3000).open(tiny_base, FP32, CPU).generate(requests)
    narrow = Native(24, 1.0, 1.0, max_rows=61).open(tiny_base, FP32, CPU).generate(requests[::-1])[::-1]
    same = sum(a.ids == b.ids for a, b in zip(wide, narrow))
    assert same >= 0.999 * len(requests)


@pytest.mark.extended
def test_in_float64_neighbours_move_no_logprob_beyond_rounding(tiny_base: Path) -> None:
    model = load_model(tiny_base, LmHead.same).double()
    session = NativeSession(model, stop_token_ids(tiny_base), 512)
    requests = requests_of(tiny_base, rows=24)
    together = session.generate(requests)
    alone = [session.generate([request])[0] for request in requests]
    assert [c.ids for c in together] == [c.ids for c in alone]
    for a, b in zip(together, alone):
        assert_close(a.logprobs, b.logprobs, 1e-5, "RMSNorm rounds to fp32 inside, the rest is float64")


@pytest.mark.extended
def test_responses_that_are_the_same_so_far_are_one_row_of_the_model(tiny_base: Path, session: NativeSession) -> None:
    """Of other temperatures, budgets and prefixes too; each is what it is alone, and costs no row until it differs."""
    prompts = [request.prompt for request in requests_of(tiny_base, rows=6)]
    kinds = [SamplingParams(24, 1.0, 1.0), SamplingParams(24, 0.0, 1.0), SamplingParams(9, 0.6, 0.9)]
    kinds.append(SamplingParams(24, 1.0, 1.0, SureRun(4, 0.9)))
    requests = [
        Request(prompt, NoiseKey(0, "p", 0, place, sample), kinds[sample % 4])
        for sample in range(16)
        for place, prompt in enumerate(prompts)
    ]
    rows: list[int] = []
    session.model.register_forward_pre_hook(lambda *said: rows.append(len(said[2]["input_ids"])), with_kwargs=True)
    together = session.generate(requests)
    fed, sampled = sum(rows), sum(len(c.tokens) for c in together)
    texts = {request.prompt + c.ids[:end] for request, c in zip(requests, together) for end in range(len(c.tokens))}
    assert fed == len(texts) < sampled / 2, "each distinct beginning once"
    rows.clear()
    greedy = session.generate([request for request in requests if request.params.temperature == 0])
    assert sum(rows) == sum(len(tokens) for tokens in {c.ids for c in greedy})
    alone = [session.generate([request])[0] for request in requests]
    assert [(c.ids, c.stop) for c in together] == [(c.ids, c.stop) for c in alone]
    for one, other in zip(together, alone):
        assert_close(one.logprobs, other.logprobs, 2e-5, "rows beside it")


def test_a_wave_has_a_bounded_number_of_contexts_and_of_responses(tiny_base: Path) -> None:
    session = Native(24, 1.0, 1.0, max_rows=3).open(tiny_base, FP32, CPU)
    one, *others = requests_of(tiny_base, rows=8)
    many = [Request(one.prompt, NoiseKey(0, "p", 0, 0, sample), one.params) for sample in range(30)]
    started: list[int] = []
    session.model.register_forward_pre_hook(lambda *said: started.append(len(said[2]["input_ids"])), with_kwargs=True)
    session.generate(many + others)
    assert max(started) <= SHARED * 3
    waves = list(session._waves(many + others, range(37), SHARED))
    assert [len(wave) for wave in waves] == [12, 12, 6 + 2, 3, 2] and [*chain(*waves)] == [*range(37)]
    waves = list(session._waves(many, range(30), 1))
    assert {len(wave) for wave in waves} == {3}, "where rows are not shared, or ends are heard"


def test_different_noise_gives_different_text_and_the_same_noise_the_same(
    tiny_base: Path, session: NativeSession
) -> None:
    first = [c.ids for c in session.generate(requests_of(tiny_base))]
    assert [c.ids for c in session.generate(requests_of(tiny_base))] == first
    assert [c.ids for c in session.generate(requests_of(tiny_base, step=1))] != first
    assert len(set(first)) > 10


def test_finished_means_the_end_of_text_was_drawn_and_length_that_the_budget_was_met(
    tiny_base: Path, session: NativeSession
) -> None:
    (end,) = stop_token_ids(tiny_base)
    completions = session.generate(requests_of(tiny_base, rows=96))
    reasons = {c.stop for c in completions}
    assert reasons == {StopReason.EOS, StopReason.LENGTH}
    for c in completions:
        assert (c.stop is StopReason.EOS) == (c.ids[-1] == end)
        assert end not in c.ids[:-1]
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
    assert session.generate([other_noise])[0].ids == mixed[1].ids, "greedy reads no noise"
    assert session.generate([plain])[0].ids == mixed[0].ids


def test_a_prefix_is_continued_as_if_the_response_had_never_stopped(tiny_base: Path, session: NativeSession) -> None:
    requests = requests_of(tiny_base)
    whole = session.generate(requests)
    long = [i for i, c in enumerate(whole) if len(c.tokens) > 8]
    continued = session.generate(
        [Request(requests[i].prompt, requests[i].noise, requests[i].params, whole[i].ids[:5]) for i in long]
    )
    assert [c.ids for c in continued] == [whole[i].ids[5:] for i in long]
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
        assert kept.ids == full.ids[: len(kept.tokens)]
        assert kept.stop in (full.stop, StopReason.ABORTED)
    assert any(c.ids for c in aborted) and any(not c.ids for c in aborted)


def test_updated_weights_are_used_and_their_version_is_on_every_token(tiny_base: Path, session: NativeSession) -> None:
    requests = requests_of(tiny_base, rows=16)
    before = session.generate(requests)
    other = load_model(tiny_base, LmHead.same)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    session.update_weights(other.state_dict().items(), 7)
    after = session.generate(requests)
    assert {v for c in before for v in c.weight_versions.tolist()} == {0}
    assert {v for c in after for v in c.weight_versions.tolist()} == {7}
    assert [c.ids for c in after] != [c.ids for c in before]
    for name, tensor in session.model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_weights_of_another_model_are_refused(session: NativeSession) -> None:
    with pytest.raises(ValueError, match="load both from one folder"):
        session.update_weights([("nothing.weight", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match="load both from one folder"):
        session.update_weights(list(session.model.state_dict().items())[:-1], 1)
    assert session.version == 0


def test_new_weights_are_not_held_together(session: NativeSession) -> None:
    """Of several ranks each gets one whole tensor at a time; together they would be a second model on the GPU."""
    made: list[weakref.ref[torch.Tensor]] = []
    together = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in session.model.state_dict().items():
            whole = tensor.clone()
            made.append(weakref.ref(whole))
            together.append(sum(one() is not None for one in made))
            yield name, whole

    session.update_weights(weights(), 1)
    assert len(made) > 10 and max(together) <= 2


def test_bf16_sampling_disagrees_with_the_fp32_learner_by_its_rounding(tiny_base: Path) -> None:
    gaps = {}
    for name, precision in {
        "fp32": FP32,
        "bf16, head fp32": Bf16(LmHead.fp32, 0.1),
        "bf16": Bf16(LmHead.same, 0.1),
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
    session = Native(24, 1.0, 1.0, 512).open(tiny_base, Bf16(LmHead.fp32, 0.1), CPU)
    other = load_model(tiny_base, LmHead.same)
    with torch.no_grad():
        other.get_input_embeddings().weight.mul_(1.5)
    session.update_weights(other.state_dict().items(), 1)
    head = session.model.get_output_embeddings().weight
    assert head.dtype is torch.float32 and torch.equal(head, other.get_output_embeddings().weight)


def test_rounding_the_weights_leaves_the_rotary_frequencies_alone(tiny_base: Path) -> None:
    """In bfloat16 a frequency of 0.7001 becomes 0.6992: half a radian off after 600 tokens."""
    session = Native(24, 1.0, 1.0, 512).open(tiny_base, Bf16(LmHead.same, 0.1), CPU)
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
    nothing = Completion.unsampled((), StopReason.LENGTH)
    assert completions[0] == completions[2] == nothing
    assert completions[3] == Completion.unsampled((), StopReason.EOS)
    assert completions[1] == session.generate([base])[0]
    assert session.generate([]) == [] and session.generate([full]) == [nothing]


def test_padding_drawn_within_a_response_stays_visible_to_the_verifier(tiny_base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_base)
    (end,) = stop_token_ids(tiny_base)
    ids = tokenizer("#33")["input_ids"]
    hidden = (ids[0], ids[1], tokenizer.pad_token_id, ids[2], end)
    row = Completion.unsampled(hidden, StopReason.EOS)
    rollouts = to_rollouts((Problem(0, "", "33", 2),), ((2,),), 1, [row])
    (text,) = decode(tokenizer, rollouts)
    graders = (Strict(1.0, 0.0), ExactAnswer(1.0, 0.0))
    assert text != "#33" and [grader(asked("33"), text, True) for grader in graders] == [0.0, 0.0]


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
    drawn = torch.stack([c.tokens[0] for c in session.generate(requests)])
    with torch.no_grad():
        expected = session.model(torch.tensor([base.prompt])).logits[0, -1].softmax(-1)
    observed = torch.bincount(drawn, minlength=len(expected)) / len(drawn)
    error = (expected * (1 - expected) / len(drawn)).sqrt()
    assert ((observed - expected).abs() <= 5 * error + 1e-3).all()


@pytest.mark.extended
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
        together = [c.ids for c in session.generate(requests)]
        assert [session.generate([r])[0].ids for r in requests] == together
        completions = session.generate(requests)
        for request, completion in zip(requests, completions):
            ids = torch.tensor([request.prompt + completion.ids])
            with torch.no_grad():
                whole = model(ids, use_cache=False).logits.log_softmax(-1)[0, len(request.prompt) - 1 : -1]
            picked = whole.gather(1, completion.tokens[:, None]).squeeze(1)
            assert_close(completion.logprobs, picked, 1e-4, type(model).__name__)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_attention_of_one_query_is_pytorchs(kv_heads: int, dtype: torch.dtype) -> None:
    """Groups of heads that share keys, masked rows, a cache that is a view of larger storage; bfloat16 to the bit."""
    torch.manual_seed(0)
    query = torch.randn(5, 1, 6, 8, dtype=dtype).transpose(1, 2)
    key, value = (torch.randn(7, kv_heads, 32, 8, dtype=dtype)[:5, :, :20] for _ in range(2))
    mask = torch.arange(20) >= torch.tensor([0, 3, 19, 7, 0])[:, None, None, None]
    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 6 // kv_heads, True
    bound = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.0}[dtype]
    for attention_mask in (None, mask):
        ours, _ = decode_attention(module, query, key, value, attention_mask, scaling=0.3)
        theirs, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=0.3)
        assert ours.shape == theirs.shape == (5, 1, 6, 8)
        assert float((ours - theirs).abs().max()) <= bound
    shared = shared_keys_attention(query, key, value, mask, scaling=0.3)  # what a GPU takes
    assert float((shared - theirs).abs().max()) <= max(bound, 0.02 * (dtype is torch.bfloat16))


def test_a_row_without_a_token_yet_is_read_beside_one_that_has_one(tiny_base: Path) -> None:
    """Prompts of one and two tokens in one stream: nothing is cached of the first, and it may look at nothing."""
    params = SamplingParams(6, 1.0, 1.0)
    requests = [Request(tuple(range(2, 3 + n)), NoiseKey(0, "short", 0, n, 0), params) for n in range(2)]
    session = Native(6, 1.0, 1.0, max_rows=8).open(tiny_base, FP32, CPU)
    assert session.model.config._attn_implementation == decode_attention_name
    stream = session.open_stream()
    for key, request in enumerate(requests):
        stream.add(key, request)
    taken = {}
    while len(taken) < 2:
        taken |= dict(stream.take(wait=True))
    alone = [session.generate([request])[0] for request in requests]
    assert [taken[key].ids for key in range(2)] == [one.ids for one in alone]


@pytest.mark.parametrize("look_every", [5, 1000])
def test_rows_that_end_unseen_say_what_they_said(tiny_base: Path, session: NativeSession, look_every: int) -> None:
    """A GPU looks for ends every few tokens: what a row draws after its own is thrown away."""
    kinds = [SamplingParams(24, 1.0, 1.0), SamplingParams(9, 0.7, 0.8), SamplingParams(24, 1.0, 1.0, SureRun(2, 0.6))]
    requests = [requests_of(tiny_base, 48, params)[row] for row, params in enumerate(kinds * 16)]
    at_once = session.generate(requests)
    session.look_every = look_every
    later = session.generate(requests)
    assert {c.stop for c in at_once} == {StopReason.EOS, StopReason.LENGTH, StopReason.REPETITION}
    assert [(c.ids, c.stop) for c in later] == [(c.ids, c.stop) for c in at_once]
    for one, other in zip(at_once, later):
        assert_close(other.logprobs, one.logprobs, 1e-5, "other neighbours")


def test_positions_end_where_the_context_does(tmp_path: Path) -> None:
    """A model with a table of positions has none for a token after the last; rows that end unseen stay at theirs."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=11, n_embd=16, n_layer=2, n_head=2, n_positions=12, eos_token_id=1, bos_token_id=1)
    session = NativeSession(GPT2LMHeadModel(config).eval(), frozenset({1}), 64)
    session.look_every = 100
    requests = [
        Request((2, 3, 4, 5, 6)[:length], NoiseKey(0, "p", 0, length, 0), SamplingParams(12 - length, 1.0, 1.0))
        for length in (2, 5)
    ]
    together = session.generate(requests)
    assert [c.ids for c in together] == [session.generate([request])[0].ids for request in requests]


def test_the_cache_in_blocks_holds_what_a_growing_one_does() -> None:
    """Over several blocks, with rows repeated after the first tokens, rows that split and rows that leave."""
    config = LlamaConfig(num_hidden_layers=1, num_attention_heads=2, hidden_size=8)
    blocks, growing = block_cache(config, 8), DynamicCache(config=config)
    generator = torch.Generator().manual_seed(0)

    def both(rows: int, new: int) -> None:
        states = torch.randn(2, rows, 2, new, 4, generator=generator)
        ours, theirs = (cache.update(states[0], states[1], 0) for cache in (blocks, growing))
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs))

    def go_on(parents: list[int]) -> None:
        """Each new row continues one of the present rows."""
        order, places = placed(torch.tensor(parents))
        assert order[places].tolist() == parents and sorted(places.tolist()) == list(range(len(parents)))
        for parent in {parent for parent in parents if parent < len(parents)}:
            assert order[parent] == parent, "a row that goes on where it is"
        arrange_rows(blocks, order)
        growing.batch_select_indices(order)
        both(len(order), 1)

    both(2, 7)
    storage = blocks.layers[0].storage[0].data_ptr()
    go_on([0, 0, 0, 1, 1, 1])
    for _ in range(BLOCK - 10):
        both(6, 1)
    go_on([0, 1, 1, 4, 4, 4, 5, 5])
    assert blocks.layers[0].storage[0].data_ptr() == storage, "room for eight rows from the start"
    for _ in range(3):
        both(8, 1)
    storage = blocks.layers[0].storage[0].data_ptr()
    for parents in ([1, 2, 4, 5], [0, 1, 2, 3], [0, 2, 2], [2], [0, 0, 0, 0, 0, 0, 0, 0]):
        go_on(parents)
    assert blocks.layers[0].storage[0].data_ptr() == storage, "rows that leave or split move no others"
    go_on([0, 1, 2, 3, 4, 5, 6, 7, 7])
    assert blocks.get_seq_length() == growing.get_seq_length() == 7 + 1 + BLOCK - 10 + 1 + 3 + 5 + 1


def test_a_layer_that_forgets_keeps_its_own_cache() -> None:
    from transformers import MistralConfig

    config = MistralConfig(num_hidden_layers=2, sliding_window=4)
    assert not any(isinstance(layer, BlockLayer) for layer in block_cache(config).layers)


@pytest.mark.few(1)
@pytest.mark.parametrize("look_every", [1, 7])
def test_decoding_in_tensors_of_fixed_shapes_says_the_same(tiny_base: Path, look_every: int) -> None:
    """What a GPU records; prompts of different lengths, rows that leave by halves, budgets of their own."""
    model, ends = load_model(tiny_base, LmHead.same).requires_grad_(False), stop_token_ids(tiny_base)
    plain, fixed = NativeSession(model, ends, 64), NativeSession(model, ends, 64, fixed_shapes=True)
    fixed.look_every = look_every
    kinds = [SamplingParams(24, 1.0, 1.0), SamplingParams(9, 0.7, 0.8), SamplingParams(1, 1.0, 1.0)]
    requests = [requests_of(tiny_base, 48, params)[row] for row, params in enumerate(kinds * 16)]
    one, other = plain.generate(requests), fixed.generate(requests)
    assert [(c.ids, c.stop) for c in other] == [(c.ids, c.stop) for c in one]
    for ours, theirs in zip(other, one):
        assert_close(ours.logprobs, theirs.logprobs, 1e-5, "a mask instead of a shorter cache")
    heard: list[int] = []
    fixed.generate(requests, lambda index, _: heard.append(index) or [])
    assert sorted(heard) == list(range(48)), "who listens is told at once, without fixed shapes"


def test_cuda_graphs_are_refused_where_they_cannot_be(tiny_base: Path) -> None:
    from transformers import MistralConfig

    with pytest.raises(ValueError, match=r"needs a GPU, the run is on cpu: set engine\.cuda_graphs=false"):
        Native(24, 1.0, 1.0, 512, cuda_graphs=True).open(tiny_base, FP32, CPU)
    with pytest.raises(ValueError, match=r"sliding windows or recurrences: set engine\.cuda_graphs=false"):
        check_graphs(MistralConfig(num_hidden_layers=1, sliding_window=4), torch.device("cuda"))
    check_graphs(LlamaConfig(num_hidden_layers=1), torch.device("cuda"))
