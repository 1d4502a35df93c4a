"""The engine protocol: token ids in, token ids and log-probs out.

An `Engine` is configuration; `open` turns it into a live `EngineSession` that holds the sampler's own
copy of the weights. Only token ids pass through this interface, so no text is tokenised twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Completion, OnFinish, Request, SamplingParams, StopReason, Tensor


class EngineFailure(RuntimeError):
    """The sampler cannot continue: it died, or its weights are not those it was sent. The run can be resumed."""


class Stream(ABC):
    """Generation that stays open: requests may be added, and weights swapped, while responses are in flight.

    Call it from one thread. `generate` of the same session may be called in between. Every method raises
    EngineFailure once the engine cannot continue.
    """

    @abstractmethod
    def add(self, key: int, request: Request) -> None:
        """Request a response under an unused key. Responses start in the order in which they were added."""

    @abstractmethod
    def take(self, wait: bool) -> list[tuple[int, Completion]]:
        """The responses that ended since the last call, in the order in which they ended; their keys become free.

        With `wait`, block until at least one response has ended, or raise ValueError if none is in flight.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keeps_cache: bool) -> None:
        """Swap the weights while responses are in flight. They continue, and each token records its weight version.

        With `keeps_cache` their KV cache stays as the old weights computed it (PipelineRL, arXiv:2509.19128).
        Without it, the new weights recompute the cache (AReaL, arXiv:2505.24298). A response that starts later uses
        no cache entry of older weights. Raises ValueError as `EngineSession.update_weights` does.
        """

    @abstractmethod
    def partial(self) -> dict[int, Completion]:
        """Every response not yet taken, as it is now; an unfinished one is marked ABORTED. Generation continues."""

    @abstractmethod
    def drain(self) -> dict[int, Completion]:
        """Stop generating, empty the stream and return every response not yet taken, as `partial` does.

        To continue a response later, add a request with its tokens as prefix.
        """


class EngineSession(ABC):
    """A sampler that is loaded and ready; satisfies `types.Sampler`."""

    version: int  # of the weights that sample the next token

    @abstractmethod
    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """One completion per request, in the order of the requests.

        Each request has its own settings and may continue from a prefix. `on_finish(i, completion)` is
        called when request i ends and returns the indices of requests to abort. Aborted requests return
        the tokens they have, with StopReason.ABORTED. An engine reports what has ended to `activity.sampling`, for the
        line that shows a long call.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the learner's named weights and set the version. Tied weights appear under each of their names.

        Raises ValueError when names or shapes do not match the sampler's model.
        """

    def open_stream(self) -> Stream:
        """Open a `Stream`. Raises ValueError if this engine can only `generate` whole responses."""
        raise ValueError(
            f"{type(self).__name__} answers whole calls, and this schedule changes weights in the middle of responses: "
            "choose engine=native (in simulated time), engine=vllm_process (for real), or another schedule"
        )

    @abstractmethod
    def close(self) -> None:
        """Free the weights; the session cannot be used afterwards."""


@dataclass(frozen=True)
class Engine(ABC):
    """How responses are generated during training."""

    max_tokens: int  # token budget of a response, end-of-text token included
    temperature: float
    top_p: float
    max_rows: int  # responses that decode together

    streams: ClassVar[bool] = False  # whether its sessions open streams
    forks: ClassVar[bool] = True  # whether it works in a forked process
    overlaps: ClassVar[bool] = False  # whether it generates in a separate process while this one trains
    simulates_fp8: ClassVar[bool] = False  # whether its sampler can round linear layers to FP8 numbers
    needs_all_ranks: ClassVar[bool] = False  # whether it opens in all processes of a run at once, or in none

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "temperature")
        require_field(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        require_positive(self, "max_rows")

    @property
    def params(self) -> SamplingParams:
        """The sampling settings of training."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p)

    @property
    def longest(self) -> int | None:
        """The longest prompt plus response this engine accepts, in tokens; None for the model's own limit."""
        return None

    @property
    def ranks_a_model(self) -> int:
        """How many neighbouring ranks of a run hold one model together; every other engine is one rank's own."""
        return 1

    def missing(self) -> str | None:
        """An error message with a remedy if something this engine needs is not installed, else None."""
        return None

    def refusal(self, folder: Path, streams: bool) -> str | None:
        """Return an error message with a remedy if this engine cannot sample the model in `folder`, else None.

        Only config.json is read. `streams`: whether the schedule updates weights in the middle of responses.
        """
        return None

    @abstractmethod
    def open(self, folder: Path, precision: Precision, device: torch.device) -> EngineSession:
        """Load the model of `folder` for sampling, as weight version 0.

        Raises ValueError with a remedy if the model cannot be opened.
        """


def already_ended(request: Request, stop_ids: Collection[int]) -> Completion | None:
    """An empty completion if the request's prefix has ended or has used up the token budget, else None."""
    if request.prefix and request.prefix[-1] in stop_ids:
        return Completion.unsampled((), StopReason.EOS)
    if len(request.prefix) >= request.params.max_tokens:
        return Completion.unsampled((), StopReason.LENGTH)
    return None


def all_ended(results: Sequence[Completion | None]) -> list[Completion]:
    """The completions of a call once every request has one."""
    ended = [completion for completion in results if completion is not None]
    assert len(ended) == len(results), "a request was left without an end"
    return ended


def check_names(unlike: Collection[str]) -> None:
    """Raise ValueError if any weight names differ between learner and sampler; `unlike` holds those names."""
    if unlike:
        raise ValueError(f"weights of learner and sampler differ in {sorted(unlike)[:4]}: load both from one folder")
