"""A pretrained model in three programs: vLLM, the native engine and transformers say the same of the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pretrained import LORA, smollm2_folder, trained
from sampler_contract import SMALL, engine
from sampling import CPU, FP32, learner_logprobs
from transformers import AutoTokenizer

from grpo_lab.engines.base import EngineSession
from grpo_lab.engines.native_session import open_session
from grpo_lab.engines.vllm import VllmSession
from grpo_lab.policy.adapters import whole_weights
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import Completion, NoiseKey, Request, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
QUESTIONS = ["What is 17 + 25?", "Name three colours.", "Why is the sky blue?", "Spell the word lamp backwards."]
NATS = 1e-4


@pytest.fixture(scope="module")
def folder() -> Path:
    return smollm2_folder()


@pytest.fixture(scope="module")
def session(folder: Path) -> Iterator[VllmSession]:
    opened = engine(arguments=SMALL).open(folder, FP32, CPU)
    yield opened
    opened.close()


def chats(folder: Path, temperature: float) -> list[Request]:
    """Four questions by the model's chat template, two responses each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    params = SamplingParams(max_tokens=24, temperature=temperature, top_p=1.0)
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True)
        for said in QUESTIONS
    ]
    return [
        Request(tuple(tokenizer(text, add_special_tokens=False)["input_ids"]), NoiseKey(0, "test", 0, n, m), params)
        for n, text in enumerate(prompts)
        for m in range(2)
    ]


def apart(model: torch.nn.Module, requests: Sequence[Request], completions: Sequence[Completion]) -> float:
    """The largest difference between what a sampler says of its tokens and what transformers says, in nats."""
    scored, sampled = learner_logprobs(model, requests, completions)
    return float((scored - sampled).detach().abs().max())


def drawn(session: EngineSession, requests: Sequence[Request]) -> list[Completion]:
    completions = session.generate(requests)
    assert sum(len(one.tokens) for one in completions) > 60
    return completions


def test_three_programs_agree_on_log_probabilities(session: VllmSession, folder: Path) -> None:
    model, native = load_model(folder, LmHead.same), open_session(folder, FP32, CPU, 64, False)
    for requests in (chats(folder, 1.0), chats(folder, 0.0)):
        of_vllm, of_native = drawn(session, requests), drawn(native, requests)
        if requests[0].params.temperature:
            assert apart(model, requests, of_vllm) < NATS and apart(model, requests, of_native) < NATS
        else:
            assert [one.ids for one in of_vllm] == [one.ids for one in of_native]
    native.close()


def test_an_adapter_reaches_vllm_with_each_sync(session: VllmSession, folder: Path) -> None:
    """What is synced is the whole model with what the adapter adds; a second adapter replaces the first."""
    base, requests = load_model(folder, LmHead.same), chats(folder, 1.0)
    for version, seed in ((1, 0), (2, 5)):
        model = trained(folder, replace(LORA, rank=16), seed)
        session.update_weights(whole_weights(model), version)
        completions = drawn(session, requests)
        assert apart(model, requests, completions) < NATS
        assert apart(base, requests, completions) > 100 * NATS, "the adapter says something else"
        assert {int(one.weight_versions[0]) for one in completions} == {version}
