"""What any session of vLLM keeps to, whichever process it is in: each function checks one promise of a session."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sampling import learner_logprobs, requests_of

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.engines.base import EngineSession
from grpo_lab.engines.vllm import Vllm
from grpo_lab.policy.models import load_model
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import Completion, StopReason, SureRun

# the smallest block of the cache on a CPU, and as few tokens a step as rows
SMALL = {"block_size": 32, "max_num_batched_tokens": 512}


def engine(**changed: object) -> Vllm:
    run = to_run(compose_with_choices(["world=tiny", "tracking=none", "engine=vllm", "engine.cache_gib=0.25"])[0])
    return replace(run.engine, max_tokens=24, context=128, **changed)


def check_agreement(session: EngineSession, base: Path, temperature: float) -> None:
    """What it draws the learner agrees with."""
    requests = requests_of(base, rows=64)
    requests = [replace(r, params=replace(r.params, temperature=temperature)) for r in requests]
    completions = session.generate(requests)
    scored, sampled = learner_logprobs(base, requests, completions, temperature)
    assert float((scored - sampled).detach().abs().max()) < 1e-4
    assert {completion.stop for completion in completions} <= {StopReason.EOS, StopReason.LENGTH}
    for completion in completions:
        assert (completion.ids[-1] in session.stop_ids) == (completion.stop is StopReason.EOS)
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.weight_versions) <= 24


def check_neighbours(session: EngineSession, base: Path) -> list[Completion]:
    """A request says the same whatever stands around it; returns what 48 of them say."""
    requests = requests_of(base, rows=48)
    together = session.generate(requests)
    assert [c.ids for c in session.generate(requests[::-1])][::-1] == [c.ids for c in together]
    assert session.generate(requests[5:6])[0].ids == together[5].ids
    assert len({c.ids for c in together}) > 10, "seeds differ"
    return together


def check_prefixes(session: EngineSession, base: Path) -> None:
    """Greedy is repeatable, a prefix is continued as if it had never stopped, and one that has ended gets nothing."""
    requests = requests_of(base, rows=16)
    greedy = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests]
    whole = session.generate(greedy)
    cut = [replace(r, prefix=c.ids[:3]) for r, c in zip(greedy, whole) if len(c.tokens) > 3]
    ends = session.generate(cut)
    assert [r.prefix + c.ids for r, c in zip(cut, ends)] == [c.ids for c in whole if len(c.tokens) > 3]
    over = replace(requests[0], prefix=(*whole[0].ids, *[sorted(session.stop_ids)[0]]))
    spent = replace(requests[0], prefix=whole[0].ids[:2], params=replace(requests[0].params, max_tokens=2))
    assert [c.stop for c in session.generate([over, spent])] == [StopReason.EOS, StopReason.LENGTH]


def check_new_weights(session: EngineSession, base: Path) -> None:
    """They arrive whole, tied head included; also twice in a row, over a cache full of what the old ones computed."""
    requests = requests_of(base, rows=48)
    before = session.generate(requests)
    learner = load_model(base, LmHead.same)
    for version in (1, 2):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.mul_(1.1)
        session.update_weights(learner.state_dict().items(), version)
        completions = session.generate(requests)
        assert set(completions[0].weight_versions.tolist()) == {version}
        scored, sampled = learner_logprobs(learner, requests, completions)
        assert float((scored - sampled).detach().abs().max()) < 1e-4
        assert [c.ids for c in completions] != [c.ids for c in before]


def check_headless_weights(session: EngineSession, base: Path) -> None:
    """The trap that `update_weights` avoids: without the tied head the old one stays, silently; comparing finds it."""
    learner, requests = load_model(base, LmHead.same), requests_of(base, rows=48)
    with torch.no_grad():
        learner.get_input_embeddings().weight.mul_(1.5)
    headless = [(name, tensor) for name, tensor in learner.state_dict().items() if name != "lm_head.weight"]
    session.update_weights(headless, 1)
    scored, sampled = learner_logprobs(learner, requests, session.generate(requests))
    assert float((scored - sampled).detach().abs().mean()) > 1e-2


def check_other_weights(session: EngineSession, base: Path) -> None:
    """Weights of another model are refused and change nothing."""
    with pytest.raises(ValueError, match="load both from one folder"):
        session.update_weights([("nothing.weight", torch.zeros(1))], 1)
    assert {v for c in session.generate(requests_of(base, rows=8)) for v in c.weight_versions.tolist()} == {0}


def check_watcher(session: EngineSession, base: Path) -> None:
    """Who is told of an end stops the others, which come back with what they had."""
    requests = requests_of(base, rows=24)
    alone, ended = session.generate(requests), []

    def on_finish(index: int, completion: Completion) -> list[int]:
        ended.append(index)
        return [row for row in range(24) if row not in ended] if len(ended) == 5 else []

    raced = session.generate(requests, on_finish)
    aborted = [row for row, c in enumerate(raced) if c.stop is StopReason.ABORTED]
    assert sorted(ended + aborted) == list(range(24)) and len(ended) == 5
    assert any(raced[row].ids for row in aborted)
    for row, completion in enumerate(raced):
        assert completion.ids == alone[row].ids[: len(completion.tokens)]
        assert len(completion.logprobs) == len(completion.tokens)


def check_sure_stop(session: EngineSession, base: Path) -> None:
    """A response that is sure for too long is stopped, the others are left alone."""
    requests = requests_of(base, rows=32)
    free, limit = session.generate(requests), SureRun(4, 0.6)
    held = session.generate([replace(r, params=replace(r.params, stop_when_sure=limit)) for r in requests])
    stopped = 0
    for one, other in zip(held, free):
        sure = [logprob > torch.tensor(limit.probability).log() for logprob in other.logprobs]
        runs = [end for end in range(4, len(sure) + 1) if all(sure[end - 4 : end])]
        if runs and runs[0] < len(sure):
            stopped += 1
            assert one.stop is StopReason.REPETITION and one.ids == other.ids[: runs[0]]
        elif not runs:
            assert one.ids == other.ids and one.stop is other.stop
    assert stopped > 3
