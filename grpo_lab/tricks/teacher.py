"""Teacher: a teacher that scores every sampled token: on-policy distillation, from another model or from itself."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.tricks.base import Trick
from grpo_lab.types import Bool, Float, Problem, Tensor, WeightType


class TeacherPolicy(Enum):
    """Whose weights score the tokens when the policy is its own teacher: the learner's, or the reference's."""

    current = "current"
    reference = "reference"


@dataclass(frozen=True)
class Teacher(Trick, ABC):
    """The change of the advantages by a teacher's log-probs.

    `needs_model`: the loop computes the log-probs of the rollouts under a teacher, and the old policy's.
    `group_relative`: the teacher sees other responses of the group.
    """

    needs_model: ClassVar[bool] = True
    group_relative: ClassVar[bool] = False

    @property
    def reads_reference(self) -> bool:
        """True if the teacher is the policy that the axis `reference` keeps."""
        return False

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
        """The advantages of the loss, from those that the reward gives. Both log-probs are None without a teacher.

        `sampled_mask` are the tokens that the teacher scored.
        """


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
        return _distilled(self, advantages, teacher_logprobs, old_logprobs, sampled_mask)


@dataclass(frozen=True)
class SelfDistillation(Teacher, ABC):
    """The policy is its own teacher: it scores each response again, behind a prompt that shows it more.

    A_t = reward_weight * A_t + coefficient * sum_(s>=t) discount^(s-t) * (teacher_logprob_s - old_logprob_s)
    teacher_logprob_s = log policy(token s | template(prompt), the response before s)

    The sampler and the learner only ever see the run's own prompt. The teacher's prompt goes through the same template,
    so chat template, system message and BOS are the same. No gradient passes through the teacher. A response for which
    there is nothing to show, or which does not fit the model's context behind the longer prompt, keeps
    reward_weight * A_t and still counts in the denominators.

    Differs from OnPolicyDistillation: no second model is loaded. `policy=reference` takes the reference's weights: the
    policy at the start with reference=frozen, an average of the learner with reference=ema. `policy=current` takes the
    learner's; OPSD's authors warn that this may be unstable. Differs from the papers, which compute a divergence over
    the vocabulary or its top tokens: here the log-prob of the sampled token stands for it, as in OnPolicyDistillation,
    in TRL's SDPO by default and in an option of OPSD's code.
    """

    prompt: str  # what stands in place of the question, with {question} and what the teacher is shown in it
    policy: TeacherPolicy
    coefficient: float
    discount: float
    reward_weight: float

    shown: ClassVar[str]  # the placeholder of what only the teacher sees

    def __post_init__(self) -> None:
        require_positive(self, "coefficient")
        require_field(0 <= self.discount <= 1, self, "discount", "in [0, 1]")
        require_not_negative(self, "reward_weight")
        once = self.prompt.count(self.shown) == 1 and self.prompt.count("{question}") <= 1
        require_field(once, self, "prompt", f"a text with {self.shown} in it once, and {{question}} at most once")

    @property
    def reads_reference(self) -> bool:
        return self.policy is TeacherPolicy.reference

    @property
    def replaces_reward(self) -> bool:
        return self.reward_weight == 0

    @abstractmethod
    def hint(self, problem: Problem, right: Sequence[str]) -> str | None:
        """The text that the teacher is shown in place of `shown`; None if there is nothing to show.

        `right` are the texts of the group's right responses, without the one that is scored.
        """

    def question(self, problem: Problem, hint: str) -> str:
        """The teacher's question; a placeholder within the inserted texts stays as it is."""
        texts = {"{question}": problem.question, self.shown: hint}
        return re.sub("|".join(map(re.escape, texts)), lambda found: texts[found[0]], self.prompt)

    def __call__(
        self,
        advantages: Float[Tensor, "N T"],
        teacher_logprobs: Float[Tensor, "N T"] | None,
        old_logprobs: Float[Tensor, "N T"] | None,
        sampled_mask: Bool[Tensor, "N T"],
    ) -> Float[Tensor, "N T"]:
        return _distilled(self, advantages, teacher_logprobs, old_logprobs, sampled_mask)


@dataclass(frozen=True)
class Opsd(SelfDistillation):
    """The teacher is shown the right answer (OPSD, arXiv:2601.18734).

    A_t = reward_weight * A_t + coefficient * sum_(s>=t) discount^(s-t) * (teacher_logprob_s - old_logprob_s)

    Right and wrong responses both get a signal, so no verifier is needed. In the paper the teacher is the policy at the
    start and sees a written solution; here it sees the answer that the data have. In prime-rl it is the current policy.
    """

    shown: ClassVar[str] = "{answer}"
    formula: ClassVar[str] = (
        "{reward_weight} * A_R + {coefficient} * sum_(s>=t) {discount}^(s-t) * (teacher - old), over sampled tokens; "
        "teacher is the {policy} policy, shown the right answer"
    )

    def hint(self, problem: Problem, right: Sequence[str]) -> str | None:
        return problem.answer


@dataclass(frozen=True)
class Sdpo(SelfDistillation):
    """The teacher is shown another, right response of the same group (SDPO, arXiv:2601.20802).

    A_t = reward_weight * A_t + coefficient * sum_(s>=t) discount^(s-t) * (teacher_logprob_s - old_logprob_s)

    It is the group's first right response other than the scored one, as in the authors' code and in TRL. A group
    without a right response has no signal, and neither has the only right response of a group. The verifier decides
    which are right, whatever the reward. Differs: the paper also shows an environment's feedback where there is some.
    """

    group_relative: ClassVar[bool] = True
    shown: ClassVar[str] = "{response}"
    formula: ClassVar[str] = (
        "{reward_weight} * A_R + {coefficient} * sum_(s>=t) {discount}^(s-t) * (teacher - old), over sampled tokens; "
        "teacher is the {policy} policy, shown another right response of g; {reward_weight} * A_R if there is none"
    )

    def hint(self, problem: Problem, right: Sequence[str]) -> str | None:
        return right[0] if right else None


def _distilled(
    plan: OnPolicyDistillation | SelfDistillation,
    advantages: Float[Tensor, "N T"],
    teacher_logprobs: Float[Tensor, "N T"] | None,
    old_logprobs: Float[Tensor, "N T"] | None,
    scored: Bool[Tensor, "N T"],
) -> Float[Tensor, "N T"]:
    """The advantages with the reverse KL of each token in `scored`."""
    assert teacher_logprobs is not None and old_logprobs is not None, "needs_model makes the loop compute both"
    gain = torch.where(scored, (teacher_logprobs - old_logprobs).double(), 0.0)
    if plan.discount > 0:
        for column in reversed(range(gain.shape[1] - 1)):
            gain[:, column] += plan.discount * gain[:, column + 1]
    return plan.reward_weight * advantages + torch.where(scored, plan.coefficient * gain, 0.0)
