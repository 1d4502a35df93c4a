"""engine=vllm, for real: what it draws the learner agrees with, new weights arrive whole, and failures say what to do.

Skipped where vLLM is not installed (`make setup-vllm`). Opening a session takes seconds, so one serves most tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_engine import CPU, FP32, learner_logprobs, requests_of

from grpo_lab.cli import compose_with_choices
from grpo_lab.config import to_run
from grpo_lab.engines.base import EngineFailure
from grpo_lab.engines.vllm import Vllm, VllmSession
from grpo_lab.engines.vllm_common import remedy
from grpo_lab.models import load_model, weight_names
from grpo_lab.seeding import request_seed
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import NoiseKey, StopReason, SureRun
from grpo_lab.workbench import open_workbench

installed = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
# the smallest block of the cache on a CPU, and as few tokens a step as rows
SMALL = {"block_size": 32, "max_num_batched_tokens": 512}


def engine(**changed: object) -> Vllm:
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm", "engine.cache_gib=0.25"])[0])
    return replace(run.engine, max_tokens=24, context=128, **changed)


@pytest.fixture(scope="module")
def session(tiny_base: Path) -> Iterator[VllmSession]:
    opened = engine(arguments=SMALL).open(tiny_base, FP32, CPU)
    yield opened
    opened.close()


@pytest.fixture
def restored(session: VllmSession, tiny_base: Path) -> Iterator[VllmSession]:
    """The shared session, given the base's weights again afterwards."""
    yield session
    session.update_weights(load_model(tiny_base, LmHead.same).state_dict().items(), 0)


@installed
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_it_draws_the_learner_agrees_with(session: VllmSession, tiny_base: Path, temperature: float) -> None:
    requests = requests_of(tiny_base, rows=64)
    requests = [replace(r, params=replace(r.params, temperature=temperature)) for r in requests]
    completions = session.generate(requests)
    scored, sampled = learner_logprobs(tiny_base, requests, completions, temperature)
    assert float((scored - sampled).detach().abs().max()) < 1e-4
    assert {completion.stop for completion in completions} <= {StopReason.EOS, StopReason.LENGTH}
    for completion in completions:
        assert (completion.tokens[-1] in session.stop_ids) == (completion.stop is StopReason.EOS)
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.weight_versions) <= 24


@installed
def test_a_request_says_the_same_whatever_stands_around_it(session: VllmSession, tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=48)
    together = session.generate(requests)
    assert [c.tokens for c in session.generate(requests[::-1])][::-1] == [c.tokens for c in together]
    assert session.generate(requests[5:6])[0].tokens == together[5].tokens
    assert len({c.tokens for c in together}) > 10, "seeds differ"


@installed
def test_more_prompts_than_one_step_can_read(session: VllmSession, tiny_base: Path) -> None:
    """On the CPU vLLM dies where it reads a part of a text whose request has a seed, so it must read them whole."""
    requests = requests_of(tiny_base, rows=256)
    assert sum(len(request.prompt) for request in requests) > 2 * SMALL["max_num_batched_tokens"]
    assert session.generate(requests)[:8] == session.generate(requests[:8])


def test_a_seed_is_of_every_part_of_the_key() -> None:
    key = NoiseKey(1, "train", 2, 3, 4)
    others = [replace(key, **{name: "eval" if name == "stream" else 9}) for name in vars(key)]
    seeds = {request_seed(one, start) for one in (key, *others) for start in (0, 7)}
    assert len(seeds) == 12 and all(0 <= seed < 2**63 for seed in seeds)


@installed
def test_greedy_is_the_argmax_and_a_prefix_is_continued(session: VllmSession, tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=16)
    greedy = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests]
    whole = session.generate(greedy)
    cut = [replace(r, prefix=c.tokens[:3]) for r, c in zip(greedy, whole) if len(c.tokens) > 3]
    ends = session.generate(cut)
    assert [r.prefix + c.tokens for r, c in zip(cut, ends)] == [c.tokens for c in whole if len(c.tokens) > 3]
    over = replace(requests[0], prefix=(*whole[0].tokens, *[sorted(session.stop_ids)[0]]))
    spent = replace(requests[0], prefix=whole[0].tokens[:2], params=replace(requests[0].params, max_tokens=2))
    assert [c.stop for c in session.generate([over, spent])] == [StopReason.EOS, StopReason.LENGTH]


@installed
def test_new_weights_arrive_whole_tied_head_included(restored: VllmSession, tiny_base: Path) -> None:
    """Also twice in a row, and with a cache full of what the old weights computed."""
    requests = requests_of(tiny_base, rows=48)
    before = restored.generate(requests)
    learner = load_model(tiny_base, LmHead.same)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.mul_(1.1)
        restored.update_weights(learner.state_dict().items(), version)
        completions = restored.generate(requests)
        assert set(completions[0].weight_versions) == {version}
        scored, sampled = learner_logprobs(learner, requests, completions)
        assert float((scored - sampled).detach().abs().max()) < 1e-4
        assert [c.tokens for c in completions] != [c.tokens for c in before]


@installed
def test_weights_without_the_tied_head_would_leave_it_old(restored: VllmSession, tiny_base: Path) -> None:
    """The trap that `update_weights` avoids: it is silent, so the comparison after a sync has to find it."""
    learner, requests = load_model(tiny_base, LmHead.same), requests_of(tiny_base, rows=48)
    with torch.no_grad():
        learner.get_input_embeddings().weight.mul_(1.5)
    headless = [(name, tensor) for name, tensor in learner.state_dict().items() if name != "lm_head.weight"]
    restored.update_weights(headless, 1)
    scored, sampled = learner_logprobs(learner, requests, restored.generate(requests))
    assert float((scored - sampled).detach().abs().mean()) > 1e-2


@installed
def test_weights_of_another_model_are_refused(session: VllmSession, tiny_base: Path) -> None:
    names = weight_names(tiny_base)
    assert names and names <= load_model(tiny_base, LmHead.same).state_dict().keys()
    with pytest.raises(ValueError, match="load both from one folder"):
        session.update_weights([("nothing.weight", torch.zeros(1))], 1)


@installed
def test_a_groups_shared_prompt_is_read_once(session: VllmSession, tiny_base: Path) -> None:
    """Of eight requests with one prompt of 70 tokens, seven find its two full blocks in the cache."""
    (request,) = requests_of(tiny_base, rows=1)
    prompt = (request.prompt * 70)[:70]
    eight = [replace(request, prompt=prompt, noise=replace(request.noise, response=one)) for one in range(8)]
    read = []
    take = session.engine.step

    def step():
        outputs = take()
        read.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    session.engine.step = step
    try:
        session.generate(eight)
    finally:
        del session.engine.step
    assert sorted(read) == [0] + [64] * 7


@installed
def test_a_watcher_stops_the_others(session: VllmSession, tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=24)
    alone, ended = session.generate(requests), []

    def on_finish(index: int, completion) -> list[int]:
        ended.append(index)
        return [row for row in range(24) if row not in ended] if len(ended) == 5 else []

    raced = session.generate(requests, on_finish)
    aborted = [row for row, c in enumerate(raced) if c.stop is StopReason.ABORTED]
    assert sorted(ended + aborted) == list(range(24)) and len(ended) == 5
    for row, completion in enumerate(raced):
        assert completion.tokens == alone[row].tokens[: len(completion.tokens)]
        assert len(completion.logprobs) == len(completion.tokens)
    assert not session.engine.has_unfinished_requests()


@installed
def test_a_response_that_is_sure_for_too_long_is_stopped(session: VllmSession, tiny_base: Path) -> None:
    requests = requests_of(tiny_base, rows=32)
    free, limit = session.generate(requests), SureRun(4, 0.6)
    held = session.generate([replace(r, params=replace(r.params, stop_when_sure=limit)) for r in requests])
    stopped = 0
    for one, other in zip(held, free):
        sure = [logprob > torch.tensor(limit.probability).log() for logprob in other.logprobs]
        runs = [end for end in range(4, len(sure) + 1) if all(sure[end - 4 : end])]
        if runs and runs[0] < len(sure):
            stopped += 1
            assert one.stop is StopReason.REPETITION and one.tokens == other.tokens[: runs[0]]
        elif not runs:
            assert one.tokens == other.tokens and one.stop is other.stop
    assert stopped > 3


@installed
def test_an_engine_that_dies_says_how_to_go_on(session: VllmSession, tiny_base: Path, monkeypatch) -> None:
    requests, calls, take = requests_of(tiny_base, rows=8), [], session.engine.step

    def dies():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the worker is gone")
        return take()

    monkeypatch.setattr(session.engine, "step", dies)
    with pytest.raises(EngineFailure, match=r"the worker is gone.*goes on from the last checkpoint"):
        session.generate(requests)
    monkeypatch.undo()
    assert not session.engine.has_unfinished_requests(), "what it had begun is not drawn by the next call"
    assert all(completion.tokens for completion in session.generate(requests))


@installed
def test_a_prompt_beyond_the_context_leaves_nothing_behind(session: VllmSession, tiny_base: Path) -> None:
    first, last = requests_of(tiny_base, rows=2)
    with pytest.raises(EngineFailure, match="128 tokens"):
        session.generate([first, replace(last, prompt=last.prompt * 100)])
    assert not session.engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Model architectures ['X'] are not supported for now", "engine=native"),
        ("The model's max seq len (131072) is larger than the maximum number of tokens", "lower engine.context"),
        ("[Errno 98] Address already in use", "VLLM_PORT"),
        ("CUDA out of memory", "engine.max_rows"),
        ("operator torchvision::nms does not exist", "make setup-vllm"),
        ("something else", "VLLM_LOGGING_LEVEL=INFO"),
    ],
)
def test_remedies(said: str, wanted: str) -> None:
    assert wanted in remedy(said)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine.top_p=0.9"], "log-probs of what top-p left"),
        (["+engine.arguments.seed=3"], "which the run sets itself"),
        (["engine.memory_share=1.5"], "in \\(0, 1\\]"),
        (["engine.cache_gib=-1"], "0 or more"),
        (["engine.context=1"], "at least 2"),
    ],
)
def test_bad_settings_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm", *overrides])[0])


def test_a_missing_installation_is_said_before_anything_is_loaded(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm"])[0])
    with pytest.raises(ValueError, match="make setup-vllm"):
        open_workbench(run, CPU, None)


def test_a_context_too_short_is_said_before_anything_is_loaded(monkeypatch, tiny_base: Path) -> None:
    monkeypatch.setattr(Vllm, "missing", lambda self: None)
    monkeypatch.setattr(Vllm, "open", lambda *arguments: pytest.fail("opened"))
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm", "engine.context=20"])[0])
    with pytest.raises(ValueError, match=r"exceed engine\.context of 20 tokens"):
        open_workbench(run, CPU, None)
