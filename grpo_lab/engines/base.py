"""The engine protocol: token ids in, token ids and log-probs out.

An `Engine` is configuration; `open` turns it into a live `EngineSession` that holds the sampler's own
copy of the weights. Text never crosses this border, so nothing is tokenised twice.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from grpo_lab.tricks.base import require, require_positive
from grpo_lab.tricks.precision import Precision
from grpo_lab.types import Completion, OnFinish, Request, SamplingParams


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

    @abstractmethod
    def close(self) -> None:
        """Free the weights; the session cannot be used afterwards."""


@dataclass(frozen=True)
class Engine(ABC):
    """How responses are generated during training."""

    max_tokens: int  # the generation budget: response tokens, end of text included
    temperature: float
    top_p: float

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "temperature")
        require(0 < self.top_p <= 1, self, "top_p", "in (0, 1]")

    @property
    def params(self) -> SamplingParams:
        """The training protocol's sampling settings."""
        return SamplingParams(self.max_tokens, self.temperature, self.top_p)

    @abstractmethod
    def open(self, folder: Path, precision: Precision, device: torch.device) -> EngineSession:
        """Load the model of `folder` for sampling, as weight version 0."""
