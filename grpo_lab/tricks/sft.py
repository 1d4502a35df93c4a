"""Supervised fine-tuning: from which right answers the model learns before RL begins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Int, Tensor


@dataclass(frozen=True)
class Sft(Trick, ABC):
    """Training on given answers before the first step of RL; the policy of step 0 is the model after it.

    The reference, the initial policy of `kl_initial` and a critic's own model start from the fine-tuned model too.
    """

    @property
    def rate(self) -> float:
        """The learning rate, 0 where nothing is learnt."""
        return 0.0


@dataclass(frozen=True)
class NoSft(Sft):
    """RL begins with the base model."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "the base model"


@dataclass(frozen=True)
class FineTuning(Sft):
    """Minimise the negative log-likelihood of right answers to `problems` random training problems.

    loss = -sum(logp of the answers' tokens) / (number of their tokens), over `batch_size` answers an update

    The end-of-text token is one of them. The optimiser is the run's, with this learning rate and warm-up; its state is
    dropped when RL begins. An answer longer than engine.max_tokens is left out.
    """

    problems: int
    epochs: int  # passes over the answers, each in another order
    batch_size: int
    learning_rate: float
    warmup_updates: int

    def __post_init__(self) -> None:
        require_positive(self, "problems", "epochs", "batch_size", "learning_rate")
        require_not_negative(self, "warmup_updates")

    @property
    def rate(self) -> float:
        return self.learning_rate

    @property
    @abstractmethod
    def draws(self) -> int:
        """Responses that the base model samples for each problem; 0 if the task writes the answers."""

    @abstractmethod
    def picks(self, right: Bool[Tensor, "P G"], lengths: Int[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
        """Which answers to learn, from whether each is right and ended in time, and its length in tokens."""


@dataclass(frozen=True)
class Demonstrations(FineTuning):
    """Learn the task's own solutions, which are right and without a detour (a cold start, DeepSeek-R1 2501.12948).

    Differs from none: RL begins with a policy that works problems out, and samples nothing for it, so its cost is in
    `budget/trained_tokens` only. A task without solutions is refused.
    """

    formula: ClassVar[str] = (
        "the base model after SFT on the task's solutions to {problems} problems, {epochs} epochs at {learning_rate}"
    )

    @property
    def draws(self) -> int:
        return 0

    def picks(self, right: Bool[Tensor, "P G"], lengths: Int[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
        return right


@dataclass(frozen=True)
class RejectionSampling(FineTuning):
    """Learn the shortest right ones of the base model's own answers (RFT, arXiv:2308.01825; Kimi k1.5, 2501.12599).

    `samples` responses a problem are drawn as in training and graded by the training reward. Of the right ones that
    ended, the `keep` shortest are learnt, equals in the order of sampling; problems without one are left out.

    Differs from Demonstrations: nothing but what the model can do already is learnt, and sampling it costs tokens,
    which open the budget. With keep = samples every right answer is learnt, as RFT does.
    """

    samples: int
    keep: int

    formula: ClassVar[str] = (
        "the base model after SFT on the {keep} shortest right ones of {samples} of its own answers to each of "
        "{problems} problems, {epochs} epochs at {learning_rate}"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(self, "samples", "keep")
        require_field(self.keep <= self.samples, self, "keep", f"at most samples ({self.samples})")

    @property
    def draws(self) -> int:
        return self.samples

    def picks(self, right: Bool[Tensor, "P G"], lengths: Int[Tensor, "P G"]) -> Bool[Tensor, "P G"]:
        order = lengths.masked_fill(~right, torch.iinfo(lengths.dtype).max).argsort(dim=1, stable=True)
        return right & (order.argsort(dim=1) < self.keep)
