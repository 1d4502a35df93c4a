"""engine=vllm, for real: what it draws the learner agrees with, new weights arrive whole, and failures say what to do.

What is marked `vllm` needs it (`make test-vllm`). Opening a session takes seconds, so one serves most tests.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sampler_contract import (
    SMALL,
    check_agreement,
    check_headless_weights,
    check_neighbours,
    check_new_weights,
    check_other_weights,
    check_prefixes,
    check_sure_stop,
    check_watcher,
    engine,
)
from sampling import CPU, FP32, requests_of

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.engines.base import EngineFailure
from grpo_lab.engines.vllm import Vllm, VllmSession
from grpo_lab.engines.vllm_common import remedy
from grpo_lab.policy.model_folder import weight_names
from grpo_lab.policy.models import load_model
from grpo_lab.run.state import open_state
from grpo_lab.seeding import request_seed
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import NoiseKey


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


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_it_draws_the_learner_agrees_with(session: VllmSession, tiny_base: Path, temperature: float) -> None:
    check_agreement(session, tiny_base, temperature)


@pytest.mark.vllm
def test_a_request_says_the_same_whatever_stands_around_it(session: VllmSession, tiny_base: Path) -> None:
    check_neighbours(session, tiny_base)


@pytest.mark.vllm
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


@pytest.mark.vllm
def test_greedy_is_the_argmax_and_a_prefix_is_continued(session: VllmSession, tiny_base: Path) -> None:
    check_prefixes(session, tiny_base)


@pytest.mark.vllm
def test_new_weights_arrive_whole_tied_head_included(restored: VllmSession, tiny_base: Path) -> None:
    check_new_weights(restored, tiny_base)


@pytest.mark.vllm
def test_weights_without_the_tied_head_would_leave_it_old(restored: VllmSession, tiny_base: Path) -> None:
    check_headless_weights(restored, tiny_base)


@pytest.mark.vllm
def test_weights_of_another_model_are_refused(restored: VllmSession, tiny_base: Path) -> None:
    names = weight_names(tiny_base)
    assert names and names <= load_model(tiny_base, LmHead.same).state_dict().keys()
    check_other_weights(restored, tiny_base)


@pytest.mark.vllm
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


@pytest.mark.vllm
def test_a_watcher_stops_the_others(session: VllmSession, tiny_base: Path) -> None:
    check_watcher(session, tiny_base)
    assert not session.engine.has_unfinished_requests()


@pytest.mark.vllm
def test_a_response_that_is_sure_for_too_long_is_stopped(session: VllmSession, tiny_base: Path) -> None:
    check_sure_stop(session, tiny_base)


@pytest.mark.vllm
def test_an_engine_that_dies_says_how_to_go_on(session: VllmSession, tiny_base: Path, monkeypatch) -> None:
    requests, calls, take = requests_of(tiny_base, rows=8), [], session.engine.step

    def dies():
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the worker is gone")
        return take()

    monkeypatch.setattr(session.engine, "step", dies)
    with pytest.raises(EngineFailure, match=r"the worker is gone.*resume from the last checkpoint"):
        session.generate(requests)
    monkeypatch.undo()
    assert not session.engine.has_unfinished_requests(), "what it had begun is not drawn by the next call"
    assert all(completion.ids for completion in session.generate(requests))


@pytest.mark.vllm
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


@pytest.mark.few(7)
@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("vllm", ["engine.top_p=0.9"], "log-probs of what top-p left"),
        ("vllm", ["+engine.arguments.seed=3"], "which the run sets itself"),
        ("vllm", ["engine.memory_share=1.5"], "in \\(0, 1\\]"),
        ("vllm", ["engine.cache_gib=-1"], "0 or more"),
        ("vllm", ["engine.context=1"], "at least 2"),
        ("vllm_process", ["engine.top_p=0.9"], "log-probs of what top-p left"),
        ("vllm_process", ["+engine.arguments.worker_extension_cls=x"], "which the run sets itself"),
        ("vllm_process", ["engine.threads=0"], "greater than 0"),
        ("vllm_process", ["engine.port=80"], "1024 to 65535"),
        ("vllm_process", ["engine.device_index=-1"], "0 or more"),
    ],
)
def test_bad_settings_are_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        to_run(compose_with_choices(["world=tiny", "tracking=none", f"engine={name}", *overrides])[0])


def test_a_missing_installation_is_said_before_anything_is_loaded(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm"])[0])
    with pytest.raises(ValueError, match="make setup-vllm"):
        open_state(run, CPU, None)


def test_a_context_too_short_is_said_before_anything_is_loaded(monkeypatch, tiny_base: Path) -> None:
    monkeypatch.setattr(Vllm, "missing", lambda self: None)
    monkeypatch.setattr(Vllm, "open", lambda *arguments: pytest.fail("opened"))
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm", "engine.context=20"])[0])
    with pytest.raises(ValueError, match=r"exceed engine\.context of 20 tokens"):
        open_state(run, CPU, None)
