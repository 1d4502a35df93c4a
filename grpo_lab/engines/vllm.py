# pyright: reportMissingImports=false
# vLLM is an installation of its own, and not there where types are checked.
"""The vLLM engine: continuous batching and a paged cache, in this process, on CPU or GPU.

vLLM is imported only when a session opens: it takes seconds to import, is a large optional dependency and changes
global state of the process. Its changes to threads, random numbers and warnings are undone.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from grpo_lab.distributed import ranks
from grpo_lab.engines.base import EngineFailure, EngineSession, already_ended, check_names
from grpo_lab.engines.vllm_common import (
    Growing,
    VllmEngine,
    failure,
    process_kept,
    remedy,
    set_defaults_of_vllm,
    vllm_params,
)
from grpo_lab.policy.model_folder import stop_token_ids, weight_names
from grpo_lab.tracking.activity import sampling
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Completion, OnFinish, Request, StopReason, Tensor

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import RequestOutput


@dataclass(frozen=True)
class Vllm(VllmEngine):
    """vLLM in this process: on the CPU, or on the learner's own GPU.

    With `sleeps`, GPU memory is freed for the learner after every call: weights move to the host, and the cache is
    discarded.
    """

    sleeps: bool

    option: ClassVar[str] = "vllm"
    needs_all_ranks: ClassVar[bool] = True  # vLLM makes its process groups among all processes of the run

    @property
    def ranks_a_model(self) -> int:
        return self.tensor_parallel

    def missing(self) -> str | None:
        if (there := ranks.launched()) % self.tensor_parallel == 0:
            return super().missing()
        return (
            f"engine.tensor_parallel={self.tensor_parallel}, and {there} processes share this run: these hold "
            "one model together, so start a multiple of that with torchrun (in a sweep: hydra.launcher.processes), or "
            "choose engine=vllm_process, which has GPUs of its own"
        )

    def open(self, folder: Path, precision: Precision, device: torch.device) -> VllmSession:
        assert not VllmSession.opened, "one vLLM at a time in a process: close the other session first"
        sleeps = self.sleeps and device.type == "cuda"
        arguments = {"enable_sleep_mode": sleeps, **self.engine_arguments(folder, precision, device)}
        if ranks.number() > 1:  # not measured: vLLM then computes in the processes that torchrun started
            arguments["distributed_executor_backend"] = "external_launcher"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        set_defaults_of_vllm()
        with process_kept():
            model = _load(arguments)
        return VllmSession(model, stop_token_ids(folder), weight_names(folder), sleeps)


def _load(arguments: dict[str, Any]) -> LLM:
    """Build vLLM's model. Raises ValueError with a remedy."""
    try:
        from vllm.entrypoints.llm import LLM

        return LLM(**arguments)
    except Exception as error:
        raise ValueError(f"vLLM cannot open {arguments['model']}: {error}\n{remedy(str(error))}") from error


class VllmSession(EngineSession):
    """vLLM's engine, stepped from here, so that a response can be checked and stopped while others continue."""

    opened: ClassVar[bool] = False  # in this process; closing one session destroys vLLM's state of the whole process

    def __init__(self, model: LLM, stop_ids: frozenset[int], names: frozenset[str], sleeps: bool) -> None:
        self.model, self.engine = model, model.llm_engine
        self.stop_ids, self.names = stop_ids, names
        self.sleeps, self.awake = sleeps, True
        self.version = 0
        VllmSession.opened = True

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if ranks.number() == 1:  # here no tensor is copied; of several ranks each gets one whole tensor at a time
            given = dict(weights)
            check_names(self.names - given.keys())
            weights = given.items()
        sent: set[str] = set()

        def noted() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                sent.add(name)
                yield name, tensor

        self._wake()
        # Send tied weights under each of their names: without the head's name vLLM silently keeps the old head.
        self.model.collective_rpc("reload_weights", kwargs={"weights_iterator": noted(), "is_checkpoint_format": True})
        check_names(self.names - sent)
        # The cached prompts were computed by the old weights.
        if not self.model.reset_prefix_cache():
            raise EngineFailure("vLLM did not clear its cache of prompts after new weights: a request is still running")
        self.version = version

    def close(self) -> None:
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory, destroy_model_parallel

        several = ranks.number() > 1
        if several:  # its shutdown, now or when Python ends, would close the process group of the run
            self.engine.engine_core._finalizer.detach()
        del self.model, self.engine
        gc.collect()
        if several:
            destroy_model_parallel()
        else:
            cleanup_dist_env_and_memory()
        VllmSession.opened = False

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        results = [already_ended(request, self.stop_ids) for request in requests]
        order = [index for index, ended in enumerate(results) if ended is None]
        self._wake()
        with _clear_errors():
            _Call(self, requests, order, on_finish).run(results)
        if self.sleeps:
            self.model.sleep(level=1)
            self.awake = False
        return [result or Completion.unsampled((), StopReason.ABORTED) for result in results]

    def _wake(self) -> None:
        if not self.awake:
            self.model.wake_up()
            self.awake = True


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except (ValueError, AssertionError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise failure(f"{type(error).__name__}: {error}") from error


class _Call:
    """One call of `generate`: its requests with their ids, and the response to each so far."""

    def __init__(
        self, session: VllmSession, requests: Sequence[Request], order: Sequence[int], on_finish: OnFinish | None
    ) -> None:
        self.session, self.requests, self.on_finish = session, requests, on_finish
        self.open: set[int] = set(order)
        self.grown = {index: Growing(requests[index], session.stop_ids) for index in order}

    def run(self, results: list[Completion | None]) -> None:
        """Add all requests and step until none is left, filling `results`."""
        engine = self.session.engine
        try:
            for index in sorted(self.open):
                self._ask(index)
            with sampling([request.params.max_tokens - len(request.prefix) for request in self.requests]) as shown:
                while self.open:
                    for output in engine.step():
                        if (index := int(output.request_id)) in self.open:
                            self._take(index, output, results)
                            if index not in self.open:
                                shown.end(index)
        finally:
            if self.open:  # else the next call would continue them
                engine.abort_request([str(index) for index in self.open])

    def _ask(self, index: int) -> None:
        request = self.requests[index]
        by_token = self.on_finish is not None or request.params.stop_when_sure is not None
        prompt = {"prompt_token_ids": list(request.prompt + request.prefix)}
        self.session.engine.add_request(str(index), prompt, vllm_params(request, self.session.stop_ids, by_token))

    def _take(self, index: int, output: RequestOutput, results: list[Completion | None]) -> None:
        """Append a step's output to its response, and settle the response if it has ended."""
        reason = self.grown[index].grow(output, self.session.version)
        if reason is None:
            return
        if not output.finished:
            self.session.engine.abort_request([str(index)])
        completion = self._settle(index, reason, results)
        if self.on_finish is not None:
            for other in self.on_finish(index, completion):
                if other in self.open:
                    self.session.engine.abort_request([str(other)])
                    self._settle(other, StopReason.ABORTED, results)

    def _settle(self, index: int, reason: StopReason, results: list[Completion | None]) -> Completion:
        self.open.discard(index)
        results[index] = completion = self.grown[index].completion(reason)
        return completion
