"""Teacher: a teacher that scores every sampled token: on-policy distillation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Float, Tensor, WeightType


@dataclass(frozen=True)
class Teacher(Trick, ABC):
    """The change of the advantages by a teacher's log-probs.

    `needs_model`: the loop loads the teacher and reads its log-probs of the rollouts and the old policy's.
    """

    needs_model: ClassVar[bool] = True

    @property
    @abstractmethod
    def replaces_reward(self) -> bool:
        """True if nothing of the reward reaches the loss."""

    @abstractmethod
    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        teacher_logprobs: Float[Tensor, "N T"] | None,
        old_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        """The advantages of the loss, from those that the reward gives. Both log-probs are None without a teacher."""


@dataclass(frozen=True)
class NoTeacher(Teacher):
    """Only the reward is learnt from."""

    is_no_op: ClassVar[bool] = True
    needs_model: ClassVar[bool] = False
    formula: ClassVar[str] = "A_R"

    @property
    def replaces_reward(self) -> bool:
        return False

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        teacher_logprobs: Float[Tensor, "N T"] | None,
        old_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        return advantages


@dataclass(frozen=True)
class OnPolicyDistillation(Teacher):
    """Learn from a teacher on the policy's own samples: the reverse KL of each token (GKD, arXiv:2306.13649).

    A_t = reward_weight * A_t + coefficient * sum_(s>=t) discount^(s-t) * (teacher_logprob_s - old_logprob_s)

    The sum is over sampled tokens. At discount 0 a token answers only for itself (Thinking Machines, 2025; Qwen3,
    arXiv:2505.09388). At discount 1 its expected gradient is that of the reverse KL of whole responses (MiniLLM,
    arXiv:2306.08543). With `reward_weight` 0 no verifier is learnt from.
    Differs: the log-prob of the sampled token stands for the divergence over the whole vocabulary, which GKD and Qwen3
    compute.
    """

    path: str  # a folder that save_pretrained wrote, a run's folder (its last checkpoint), or an id of the hub
    revision: str  # of the hub; "" for the newest
    weights: WeightType
    coefficient: float
    discount: float
    reward_weight: float

    formula: ClassVar[str] = (
        "{reward_weight} * A_R + {coefficient} * sum_(s>=t) {discount}^(s-t) * (teacher - old), over sampled tokens"
    )

    def __post_init__(self) -> None:
        require_positive(self, "coefficient")
        require_field(0 <= self.discount <= 1, self, "discount", "in [0, 1]")
        require_not_negative(self, "reward_weight")

    @property
    def replaces_reward(self) -> bool:
        return self.reward_weight == 0

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        teacher_logprobs: Float[Tensor, "N T"] | None,
        old_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        assert teacher_logprobs is not None and old_logprobs is not None, "needs_model makes the loop compute both"
        said = torch.where(sampled_mask, (teacher_logprobs - old_logprobs).double(), 0.0)
        if self.discount > 0:
            for column in reversed(range(said.shape[1] - 1)):
                said[:, column] += self.discount * said[:, column + 1]
        return self.reward_weight * advantages + torch.where(sampled_mask, self.coefficient * said, 0.0)
