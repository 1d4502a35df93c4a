"""engine=vllm_process, for real: vLLM in its own process draws what the learner agrees with, also while weights change.

What is marked `vllm` needs it (`make test-vllm`). Opening a session takes some twenty seconds, so one serves most
tests, and what is killed is opened again for the next.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import alive, children_of, descendants_of, name_of
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
)
from sampling import CPU, FP32, learner_logprobs, requests_of

from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.run_config import to_run
from grpo_lab.engines.base import EngineFailure
from grpo_lab.engines.native import Native
from grpo_lab.engines.vllm_process import VllmProcess, interrupts_heard, main_left_alone, sigint_blocked
from grpo_lab.engines.vllm_session import VllmProcessSession, VllmStream
from grpo_lab.engines.vllm_weights import NcclTransfer, SyncClient, roomy_folder, taken_port, weight_source
from grpo_lab.policy.model_folder import stop_token_ids
from grpo_lab.policy.models import load_model
from grpo_lab.run.state import open_state
from grpo_lab.tricks.precision import LmHead
from grpo_lab.types import Completion, Request, StopReason

ROWS = 16  # that decode together


def engine(**changed: object) -> VllmProcess:
    choices = ["world=tiny", "tracking=none", "engine=vllm_process", "engine.cache_gib=0.25"]
    run = to_run(compose_with_choices(choices)[0])
    return replace(run.engine, max_tokens=24, context=128, max_rows=ROWS, arguments=SMALL, **changed)


class Shared:
    """The session of this file, and what this process was before and after opening it."""

    session: VllmProcessSession | None = None
    before = after = ()

    def get(self, folder: Path) -> VllmProcessSession:
        if self.session is not None and self.session.broken:
            self.session.close()
            self.session = None
        if self.session is None:
            self.before = self._state()
            self.session = engine().open(folder, FP32, CPU)
            self.after = self._state()
        return self.session

    @staticmethod
    def _state() -> tuple[object, ...]:
        return torch.get_num_threads(), torch.set_num_threads, torch.get_rng_state().tolist(), dict(os.environ)


@pytest.fixture(scope="module")
def shared() -> Iterator[Shared]:
    one = Shared()
    yield one
    if one.session is not None:
        one.session.close()


@pytest.fixture
def session(shared: Shared, tiny_base: Path) -> Iterator[VllmProcessSession]:
    """The shared session with the base's weights."""
    opened = shared.get(tiny_base)
    if opened.version != 0:
        opened.update_weights(load_model(tiny_base, LmHead.same).state_dict().items(), 0)
    yield opened
    assert opened.broken or not opened.rows, "a test left responses behind"


@pytest.fixture
def policies(tiny_base: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Two policies that are clearly apart, and of which neither ends a response early."""
    made, noise = [], torch.Generator().manual_seed(3)
    for apart in (0.0, 0.05):
        policy = load_model(tiny_base, LmHead.same)
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.mul_(1.2).add_(torch.randn(parameter.shape, generator=noise), alpha=apart)
            policy.get_input_embeddings().weight[sorted(stop_token_ids(tiny_base))] = 0
        made.append(policy)
    return made[0], made[1]


def long_requests(folder: Path, rows: int, prompt_tokens: int) -> list[Request]:
    """Requests of one prompt that fills whole blocks of the cache, with as many tokens to draw as the context has."""
    requests = requests_of(folder, rows=rows)
    prompt = (requests[0].prompt * prompt_tokens)[:prompt_tokens]
    params = replace(requests[0].params, max_tokens=126 - prompt_tokens)
    return [
        replace(request, prompt=prompt, params=params, noise=replace(request.noise, response=row))
        for row, request in enumerate(requests)
    ]


def gaps(
    policy: torch.nn.Module, requests: list[Request], completions: list[Completion], which: Callable[[int], bool]
) -> torch.Tensor:
    """|learner - sampler| of the tokens whose version is one of `which`, in nats."""
    scored, sampled = learner_logprobs(policy, requests, completions)
    picked = torch.zeros_like(sampled, dtype=torch.bool)
    for row, completion in enumerate(completions):
        for place, version in enumerate(completion.weight_versions.tolist()):
            picked[row, place] = which(version)
    assert picked.any()
    return (scored - sampled).detach().abs()[picked]


def take_all(stream: VllmStream) -> list[tuple[int, Completion]]:
    taken = []
    while stream.rows:
        taken += stream.take(wait=True)
    return taken


def in_order(taken: list[tuple[int, Completion]]) -> list[Completion]:
    return [completion for _, completion in sorted(taken, key=lambda one: one[0])]


def wait_for_tokens(stream: VllmStream, rows: int, tokens: int) -> dict[int, Completion]:
    """Until that many responses have that many tokens."""
    while True:
        partial = stream.partial()
        if sum(len(completion.tokens) >= tokens for completion in partial.values()) >= rows:
            return partial


def swapped_midway(
    session: VllmProcessSession,
    policies: tuple[torch.nn.Module, torch.nn.Module],
    requests: list[Request],
    tokens: int,
    keeps_cache: bool,
) -> tuple[dict[int, Completion], list[Completion]]:
    """The second policy's weights under the first `ROWS` requests; what these had before, and what all came to.

    They have `tokens` tokens then. vLLM does not wait for this process, and where it has ended one of them by the time
    that the weights come, as on a machine that is busy with other things, all is asked again.
    """
    old, new = policies
    for _ in range(10):
        session.update_weights(old.state_dict().items(), 1)
        stream = session.open_stream()
        for key, request in enumerate(requests):
            stream.add(key, request)
        begun = wait_for_tokens(stream, ROWS, tokens)
        stream.update_weights(new.state_dict().items(), 2, keeps_cache)
        completions = in_order(take_all(stream))
        if all(2 in completion.weight_versions for completion in completions[:ROWS]):
            return begun, completions
    pytest.fail("ten times responses had ended before the weights came")


@pytest.mark.vllm
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_what_it_draws_the_learner_agrees_with(
    session: VllmProcessSession, tiny_base: Path, temperature: float
) -> None:
    check_agreement(session, tiny_base, temperature)


@pytest.mark.vllm
def test_this_process_keeps_its_threads_random_numbers_and_environment(
    session: VllmProcessSession, shared: Shared
) -> None:
    assert shared.before == shared.after
    assert session.process.pid in children_of(os.getpid())
    assert not children_of(session.process.pid), "the model is in the engine's process itself"


@pytest.mark.vllm
def test_new_weights_arrive_whole_tied_head_included(session: VllmProcessSession, tiny_base: Path) -> None:
    check_new_weights(session, tiny_base)
    assert [file.name for file in session.shared.iterdir()] == ["engine.log"], "no weights are left in memory"


@pytest.mark.vllm
def test_weights_without_the_tied_head_would_leave_it_old(session: VllmProcessSession, tiny_base: Path) -> None:
    check_headless_weights(session, tiny_base)


@pytest.mark.vllm
def test_weights_of_another_model_are_refused_and_change_nothing(session: VllmProcessSession, tiny_base: Path) -> None:
    check_other_weights(session, tiny_base)


@pytest.mark.vllm
def test_a_request_says_the_same_whatever_stands_around_it(session: VllmProcessSession, tiny_base: Path) -> None:
    together, requests = check_neighbours(session, tiny_base), requests_of(tiny_base, rows=48)
    stream = session.open_stream()
    for key, request in enumerate(requests):
        stream.add(key, request)
    assert [c.ids for c in in_order(take_all(stream))] == [c.ids for c in together]


@pytest.mark.vllm
def test_greedy_is_the_argmax_and_a_prefix_is_continued(session: VllmProcessSession, tiny_base: Path) -> None:
    check_prefixes(session, tiny_base)
    requests = requests_of(tiny_base, rows=16)
    greedy = [replace(r, params=replace(r.params, temperature=0.0)) for r in requests]
    whole = session.generate(greedy)
    native = Native(24, 1.0, 1.0, max_rows=64).open(tiny_base, FP32, CPU)
    assert [c.ids for c in native.generate(greedy)] == [c.ids for c in whole]
    stream = session.open_stream()
    stream.add(3, replace(requests[0], prefix=(*whole[0].ids, *[sorted(session.stop_ids)[0]])))
    assert stream.partial()[3].stop is StopReason.EOS
    assert stream.take(wait=True) == [(3, Completion.unsampled((), StopReason.EOS))]


@pytest.mark.vllm
def test_a_watcher_stops_the_others(session: VllmProcessSession, tiny_base: Path) -> None:
    check_watcher(session, tiny_base)


@pytest.mark.vllm
def test_a_response_that_is_sure_for_too_long_is_stopped(session: VllmProcessSession, tiny_base: Path) -> None:
    check_sure_stop(session, tiny_base)


@pytest.mark.vllm
def test_an_interrupted_call_takes_its_requests_back(session: VllmProcessSession, tiny_base: Path) -> None:
    """Ctrl-C in the middle: nothing goes on being drawn beside the next call, which says what it always says."""
    requests = requests_of(tiny_base, rows=24)
    alone = session.generate(requests)

    def interrupted(index: int, completion: Completion) -> list[int]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.generate(requests, interrupted)
    assert not session.rows and not session.broken
    assert [c.ids for c in session.generate(requests)] == [c.ids for c in alone]


@pytest.mark.vllm
def test_a_stream_starts_in_the_order_of_asking(
    session: VllmProcessSession, tiny_base: Path, policies: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    """With three times as many requests as decode together, all of one length: they end in that order too."""
    session.update_weights(policies[0].state_dict().items(), 1)
    requests = long_requests(tiny_base, 3 * ROWS, 96)
    stream = session.open_stream()
    for key, request in enumerate(requests):
        stream.add(key, request)
    assert stream.take(wait=False) == [], "it does not wait"
    taken = take_all(stream)
    thirds = [sorted(key for key, _ in taken[at : at + ROWS]) for at in range(0, 3 * ROWS, ROWS)]
    assert thirds == [list(range(at, at + ROWS)) for at in range(0, 3 * ROWS, ROWS)]
    with pytest.raises(ValueError, match="nothing is being drawn"):
        stream.take(wait=True)


@pytest.mark.vllm
@pytest.mark.parametrize("keeps_cache", [True, False])
def test_weights_are_swapped_under_what_is_in_flight(
    session: VllmProcessSession,
    tiny_base: Path,
    policies: tuple[torch.nn.Module, torch.nn.Module],
    keeps_cache: bool,
) -> None:
    old, new = policies
    requests = long_requests(tiny_base, ROWS, 66)
    begun, completions = swapped_midway(session, policies, requests, 5, keeps_cache)
    for key, completion in enumerate(completions):
        versions = completion.weight_versions.tolist()
        assert versions == sorted(versions) and set(versions) == {1, 2}
        assert versions.count(1) >= len(begun[key].tokens)
        assert completion.ids[: len(begun[key].tokens)] == begun[key].ids
    assert float(gaps(old, requests, completions, lambda version: version == 1).max()) < 1e-4
    assert float(gaps(old, requests, completions, lambda version: version == 2).mean()) > 1e-2
    after = gaps(new, requests, completions, lambda version: version == 2)
    if keeps_cache:
        assert float(after.mean()) > 1e-3, "they still read what the old weights had computed"
    else:
        assert float(after.max()) < 1e-4, "everything was computed anew"
    # What is asked now shares their prompt, of two blocks, and nothing that the old weights computed of it.
    later = [replace(request, noise=replace(request.noise, step=7)) for request in requests]
    assert float(gaps(new, later, session.generate(later), lambda _: True).max()) < 1e-4


@pytest.mark.vllm
def test_what_had_no_token_at_a_swap_is_all_of_the_new_weights(
    session: VllmProcessSession, tiny_base: Path, policies: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    """Twice as many as decode together: the second half waits, and shares its prompt with the first."""
    requests = long_requests(tiny_base, 2 * ROWS, 66)
    _, completions = swapped_midway(session, policies, requests, 2, keeps_cache=True)
    assert all({1, 2} == set(completion.weight_versions.tolist()) for completion in completions[:ROWS])
    assert all({2} == set(completion.weight_versions.tolist()) for completion in completions[ROWS:])
    assert float(gaps(policies[1], requests[ROWS:], completions[ROWS:], lambda _: True).max()) < 1e-4


@pytest.mark.vllm
def test_evaluation_shares_the_engine_with_an_open_stream(
    session: VllmProcessSession, tiny_base: Path, policies: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    session.update_weights(policies[0].state_dict().items(), 1)
    requests, asked = long_requests(tiny_base, ROWS, 66), requests_of(tiny_base, rows=8)
    alone = session.generate(requests), session.generate(asked)
    stream = session.open_stream()
    for key, request in enumerate(requests[: ROWS // 2]):
        stream.add(key, request)
    wait_for_tokens(stream, 1, 1)
    assert [c.ids for c in session.generate(asked)] == [c.ids for c in alone[1]]
    assert [c.ids for c in in_order(take_all(stream))] == [c.ids for c in alone[0][: ROWS // 2]]


@pytest.mark.vllm
def test_a_stream_is_drained_and_another_goes_on(
    session: VllmProcessSession, tiny_base: Path, policies: tuple[torch.nn.Module, torch.nn.Module]
) -> None:
    session.update_weights(policies[0].state_dict().items(), 1)
    requests = long_requests(tiny_base, ROWS, 66)
    for _ in range(10):  # vLLM does not wait: on a busy machine it may have ended some before they are drained
        stream = session.open_stream()
        for key, request in enumerate(requests):
            stream.add(key, request)
        seen = wait_for_tokens(stream, ROWS, 3)
        kept = stream.drain()
        if {completion.stop for completion in kept.values()} == {StopReason.ABORTED}:
            break
    assert not stream.rows and not session.rows and kept.keys() == seen.keys()
    assert {completion.stop for completion in kept.values()} == {StopReason.ABORTED}
    assert all(kept[key].ids[: len(seen[key].tokens)] == seen[key].ids for key in kept)
    session.update_weights(policies[1].state_dict().items(), 2)
    further = session.open_stream()
    for key, request in enumerate(requests):
        further.add(key, replace(request, prefix=kept[key].ids))
    whole = [kept[key].continued(completion) for key, completion in enumerate(in_order(take_all(further)))]
    assert all(len(one.tokens) == 60 or one.ids[-1] in session.stop_ids for one in whole)
    assert float(gaps(policies[0], requests, whole, lambda version: version == 1).max()) < 1e-4
    assert float(gaps(policies[1], requests, whole, lambda version: version == 2).max()) < 1e-4


@pytest.mark.vllm
def test_a_prompt_beyond_the_context_leaves_nothing_behind(session: VllmProcessSession, tiny_base: Path) -> None:
    first, last = requests_of(tiny_base, rows=2)
    with pytest.raises(EngineFailure, match="128"):
        session.generate([first, replace(last, prompt=last.prompt * 100)])
    assert not session.rows and session.generate([first])[0].ids


@pytest.mark.vllm
def test_an_engine_that_is_killed_is_noticed_at_once(session: VllmProcessSession, tiny_base: Path) -> None:
    requests = long_requests(tiny_base, 3 * ROWS, 66)
    stream = session.open_stream()
    for key, request in enumerate(requests):
        stream.add(key, request)
    wait_for_tokens(stream, 1, 1)
    os.kill(session.process.pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(EngineFailure, match=r"ended by signal 9.*engine\.cache_gib.*resume from the last checkpoint"):
        take_all(stream)
    calls = (
        lambda: session.generate(requests[:1]),
        lambda: stream.add(99, requests[0]),
        lambda: session.update_weights(load_model(tiny_base, LmHead.same).state_dict().items(), 9),
        stream.drain,
    )
    for one in calls:
        with pytest.raises(EngineFailure, match="signal 9"):
            one()
    assert time.monotonic() - start < 10
    folder = session.shared
    session.close()
    assert not folder.exists()


_TRAINER = """
import time
from pathlib import Path
import torch
from grpo_lab.engines.vllm_process import VllmProcess
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.types import NoiseKey, Request, SamplingParams
session = {engine!r}.open(Path({base!r}), Fp32(LmHead.same, 1e-3), torch.device("cpu"))
stream = session.open_stream()
for key in range(16):
    stream.add(key, Request((5, 12, 6), NoiseKey(0, "test", 0, 0, key), SamplingParams(100, 1.0, 1.0)))
print(session.process.pid, session.shared, flush=True)
time.sleep(600)
"""


@pytest.mark.vllm
def test_the_engine_ends_with_a_trainer_that_is_killed(tmp_path: Path, tiny_base: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(_TRAINER.format(engine=engine(), base=str(tiny_base)))
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        said = trainer.stdout.readline().split()
        assert len(said) == 2, "the trainer opened its engine"
        child, folder = int(said[0]), Path(said[1])
        assert alive(child) and folder.exists()
        trainer.kill()
        deadline = time.monotonic() + 10
        while alive(child) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not alive(child), "it is gone, also while the trainer is a zombie"
        assert not folder.exists()


@pytest.mark.vllm
def test_what_goes_wrong_in_the_other_process_is_said_in_this_one(monkeypatch, tiny_base: Path) -> None:
    """A cache that does not hold one response is found by the engine's process, when it has loaded the model."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    before = descendants_of(os.getpid())
    with pytest.raises(ValueError, match=r"memory for the cache blocks(.|\n)*Remedy: lower engine"):
        engine(cache_gib=1e-6).open(tiny_base, FP32, CPU)
    left = descendants_of(os.getpid()) - before
    assert all("EngineCor" not in name_of(pid) for pid in left), "its name is cut to 15 characters"


def test_an_interrupt_while_the_engine_starts_is_not_lost(request: pytest.FixtureRequest) -> None:
    """Where the caller waits in a call that swallows it: the engine ends, and the wait with it."""
    starting = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,), name="EngineCore")
    reached = []
    # A test run that a shell put into the background has inherited that SIGINT is ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with pytest.raises(KeyboardInterrupt), interrupts_heard(), main_left_alone():
        starting.start()
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        starting.join(timeout=20)
        reached.append(starting.exitcode)
    assert reached == [-signal.SIGKILL]
    with pytest.raises(KeyboardInterrupt), interrupts_heard():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("without an engine it comes at once")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_a_terminal_does_not_reach_the_engine() -> None:
    """Its process never hears the signal that a terminal sends to every process of the run."""
    with sigint_blocked():
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        child.start()
    other = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    other.start()
    try:
        for process in (child, other):
            assert process.pid is not None
            time.sleep(1.0)  # it may not have begun to sleep: then the signal ends it as well
            os.kill(process.pid, signal.SIGINT)
        other.join(timeout=60)
        assert other.exitcode not in (0, None) and child.is_alive()
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, set())
    finally:
        child.terminate()
        child.join(timeout=60)
    assert child.exitcode == -signal.SIGTERM, "and it still ends when it is told to"


@pytest.mark.vllm
def test_the_engine_answers_after_a_ctrl_c(session: VllmProcessSession, tiny_base: Path) -> None:
    os.kill(session.process.pid, signal.SIGINT)
    time.sleep(1.0)
    assert session.process.is_alive()
    assert all(completion.ids for completion in session.generate(requests_of(tiny_base)))


def test_a_port_that_is_taken_and_a_gpu_that_is_not_there_are_said_before_anything_is_loaded(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run = to_run(
            compose_with_choices(["world=tiny", "tracking=none", "engine=vllm_process", f"engine.port={port}"])[0]
        )
        with pytest.raises(ValueError, match=rf"engine\.port={port}.*choose a free one"):
            open_state(run, CPU, None)
    assert taken_port(port) is None and run.engine.missing() is None
    assert "torch sees 2 CUDA devices" in replace(run.engine, device_index=2).missing()
    with pytest.raises(ValueError, match="is the learner's GPU"):
        run.engine.open(Path("nowhere"), FP32, torch.device("cuda", 1))


def test_files_of_weights_pass_through_memory_where_there_is_room(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    assert roomy_folder(1, tmp_path, memory) == tmp_path, "there is none"
    memory.mkdir()
    assert roomy_folder(1, tmp_path, memory) == memory and roomy_folder(2**60, tmp_path, memory) == tmp_path


def test_weights_are_sent_once_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU this holds the order of the calls."""
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    transfer = NcclTransfer.__new__(NcclTransfer)
    transfer.device, transfer.source = torch.device("cuda", 0), SimpleNamespace()
    transfer.engine = SimpleNamespace(send_weights=lambda: done.append("sent"))
    transfer.send({"embed": torch.ones(2, 3)})
    assert done == ["waited", "sent"]


@pytest.mark.vllm
def test_what_is_sent_between_gpus_is_what_vllm_asks_for() -> None:
    """Without NCCL, which needs two GPUs: vLLM's own check of the names, types and shapes that are sent."""
    from vllm.distributed.weight_transfer.base import VLLMWeightSyncClient, WeightTransferInitRequest
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

    asked = []
    client = SyncClient(lambda method, arguments: asked.append((method, arguments)))
    assert isinstance(client, VLLMWeightSyncClient) and WeightTransferInitRequest
    assert NCCLTrainerInitInfo(rank=0, master_address="127.0.0.1", master_port=29600, world_size=2).is_sender
    source = weight_source(torch.device("meta"))
    source.weights = {"embed": torch.ones(2, 3), "lm_head": torch.ones(2, 3)}
    sent = NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata())
    seen = [(name, tuple(tensor.shape), tensor.device.type) for name, tensor in sent]
    assert seen == [("embed", (2, 3), "meta"), ("lm_head", (2, 3), "meta")], "weights kept on the CPU are moved"
    client.start_weight_update()
    client.update_weights({"names": ["embed"]})
    client.finish_weight_update()
    assert [method for method, _ in asked] == ["start_weight_update", "update_weights", "finish_weight_update"]
    assert asked[1][1] == {"update_info": {"names": ["embed"]}}
