"""The engine protocol: token ids in, token ids and log-probs out.

An `Engine` is configuration; `open` turns it into a live `EngineSession` that holds the sampler's own
copy of the weights. Text never crosses this border, so nothing is tokenised twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from grpo_lab.tricks.base import require_field, require_positive
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Completion, OnFinish, Request, SamplingParams, StopReason, Tensor


class EngineFailure(RuntimeError):
    """The sampler cannot go on: it died, or holds other weights than it was given. The run can be resumed."""


class Stream(ABC):
    """Responses that grow while others are asked for and the weights change under them.

    All of it is called from one thread, and `generate` of the same session may be called between its calls. Every call
    raises EngineFailure once the engine cannot go on.
    """

    @abstractmethod
    def add(self, key: int, request: Request) -> None:
        """Ask for a response under a key that is not in use; they start in the order of asking."""

    @abstractmethod
    def take(self, wait: bool) -> list[tuple[int, Completion]]:
        """What has ended since the last call, in the order of ending; its keys are free again.

        With `wait` it blocks until at least one has. Raises ValueError where there is nothing to wait for.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int, keeps_cache: bool) -> None:
        """Swap the weights under the responses in flight; each goes on, and each token tells which weights made it.

        With `keeps_cache` what they have computed stays as the old weights left it (PipelineRL, arXiv:2509.19128);
        without, it is computed anew by the new weights (AReaL, arXiv:2505.24298). What starts later reads nothing that
        older weights computed. Raises ValueError as `EngineSession.update_weights` does.
        """

    @abstractmethod
    def partial(self) -> dict[int, Completion]:
        """What exists of every response that was not taken yet, drawing on; an unfinished one is marked ABORTED."""

    @abstractmethod
    def drain(self) -> dict[int, Completion]:
        """Stop drawing and give back what exists of every response that was not taken, as `partial` does.

        The stream is empty then. A response goes on where it was when its tokens are added as a request's prefix.
        """


class EngineSession(ABC):
    """A sampler that is loaded and ready; satisfies `types.Sampler`."""

    version: int  # of the weights that make the next token

    @abstractmethod
    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        """One completion per request, in the order of the requests.

        Each request has its own settings and may continue from a prefix. `on_finish(i, completion)` is
        called whenever request i ends and returns indices of requests to abort; those come back with
        the tokens they had and StopReason.ABORTED.
        """

    @abstractmethod
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copy the learner's named weights, tied ones under each of their names, and set the version.

        Raises ValueError when names or shapes do not match the sampler's model.
        """

    def open_stream(self) -> Stream:
        """Responses that grow between calls. Raises ValueError in an engine that answers whole calls only."""
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

    max_tokens: int  # the generation budget: response tokens, end of text included
    temperature: float
    top_p: float
    max_rows: int  # responses that decode together

    streams: ClassVar[bool] = False  # whether its sessions open streams
    overlaps: ClassVar[bool] = False  # whether it generates in a process of its own, while this one trains

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "temperature")
        require_field(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")
        require_positive(self, "max_rows")

    @property
    def params(self) -> SamplingParams:
        """The training protocol's sampling settings."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p)

    @property
    def longest(self) -> int | None:
        """The longest prompt and response this engine takes, in tokens, where that is not the model's own limit."""
        return None

    def missing(self) -> str | None:
        """What this engine needs and is not installed, with a remedy; None where nothing is missing."""
        return None

    @abstractmethod
    def open(self, folder: Path, precision: Precision, device: torch.device) -> EngineSession:
        """Load the model of `folder` for sampling, as weight version 0.

        Raises ValueError with a remedy where the model cannot be opened.
        """


def already_ended(request: Request, stop_ids: Collection[int]) -> Completion | None:
    """The empty completion of a request whose prefix has ended or has used up the budget."""
    if request.prefix and request.prefix[-1] in stop_ids:
        return Completion((), (), (), StopReason.EOS)
    if len(request.prefix) >= request.params.max_tokens:
        return Completion((), (), (), StopReason.LENGTH)
    return None


def all_ended(results: Sequence[Completion | None]) -> list[Completion]:
    """The completions of a call once every request has one."""
    ended = [completion for completion in results if completion is not None]
    assert len(ended) == len(results), "a request was left without an end"
    return ended


def check_names(unlike: Collection[str]) -> None:
    """Raise ValueError where learner and sampler do not have the same named weights."""
    if unlike:
        raise ValueError(f"weights of learner and sampler differ in {sorted(unlike)[:4]}: load both from one folder")
