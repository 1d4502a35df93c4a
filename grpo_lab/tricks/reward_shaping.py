"""Reward shaping: terms added to the grader's reward."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.checks import require_field, require_not_negative, require_positive
from grpo_lab.renamed import renamed_facts
from grpo_lab.tricks.base import NEGLIGIBLE, Trick
from grpo_lab.types import Float, Graded, Tensor


@dataclass(frozen=True)
class RewardShaping(Trick, ABC):
    """Adds named components to the reward. Correctness stays unchanged.

    `group_relative`: compares a response with others of its group. `maps_correctness`: adds one number to all right and
    another to all wrong responses, so it changes the step between them and where 0 lies.
    """

    group_relative: ClassVar[bool] = False
    maps_correctness: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        renamed_facts(cls, maps_outcome="maps_correctness")

    @property
    def out_of_proportion(self) -> bool:
        """True if its numbers hardly suit the length of responses."""
        return False

    @property
    def asks_for(self) -> range:
        """The target lengths, in tokens, that a prompt may ask for; empty if prompts ask for none."""
        return range(0)

    def draw_target_length(self, drawn: float) -> int | None:
        """The target length for one prompt, or None. `drawn` is a uniform number in [0, 1)."""
        return self.asks_for[int(drawn * len(self.asks_for))] if self.asks_for else None

    @abstractmethod
    def lowest(self, correct: float, wrong: float) -> float:
        """The lowest possible shaped reward when the verifier's rewards are `correct` and `wrong`."""

    @abstractmethod
    def __call__(self, graded: Graded) -> Graded:
        """The record with its reward components added."""


@dataclass(frozen=True)
class NoShaping(RewardShaping):
    """The reward is the verifier's, with nothing added."""

    is_no_op: ClassVar[bool] = True
    formula: ClassVar[str] = "0"

    def lowest(self, correct: float, wrong: float) -> float:
        return wrong

    def __call__(self, graded: Graded) -> Graded:
        return graded


@dataclass(frozen=True)
class SoftOverlong(RewardShaping):
    """Punish long responses on a ramp before the budget (DAPO, arXiv:2503.14476, eq. 13).

    start   = max_tokens - cache_tokens
    penalty = -factor * (correct - wrong) / 2 * clip((length - start) / cache_tokens, 0, 1)

    Right and wrong responses are both punished, so a truncated wrong one gets less than a short wrong one. A no-op when
    no response is longer than `start`. The unit of `factor` is (correct - wrong) / 2, which is 1 for DAPO's rewards
    of -1 and 1. So a factor means the same with rewards of 0 and 1.
    """

    max_tokens: int  # the run's generation budget, response tokens
    cache_tokens: int  # width of the ramp, response tokens
    factor: float  # the largest penalty, in units of (correct - wrong) / 2
    correct: float  # the verifier's reward of a right answer
    wrong: float  # the verifier's reward of a wrong answer

    formula: ClassVar[str] = (
        "-{factor} * ({correct} - {wrong}) / 2 * clip((n_i - ({max_tokens} - {cache_tokens})) / {cache_tokens}, 0, 1)"
    )

    def __post_init__(self) -> None:
        require_positive(self, "max_tokens", "cache_tokens", "factor")
        require_field(
            self.cache_tokens <= self.max_tokens, self, "cache_tokens", f"at most the budget {self.max_tokens}"
        )
        require_field(self.correct > self.wrong, self, "correct", f"greater than `wrong` ({self.wrong:g})")

    @property
    def out_of_proportion(self) -> bool:
        return self.cache_tokens * 10 < self.max_tokens

    @property
    def largest(self) -> float:
        """The largest penalty, in reward units."""
        return self.factor * ((self.correct - self.wrong) / 2)

    def lowest(self, correct: float, wrong: float) -> float:
        return wrong - self.largest

    def __call__(self, graded: Graded) -> Graded:
        return graded.with_component("soft_overlong", self.penalty(graded))

    def penalty(self, graded: Graded) -> Float[Tensor, "P G"]:
        """The penalty on each response's length, at most 0."""
        start = self.max_tokens - self.cache_tokens
        ramp = (graded.lengths.to(graded.reward.dtype) - start) / self.cache_tokens
        return -self.largest * ramp.clamp(0, 1)


@dataclass(frozen=True)
class SoftOverlongCorrectOnly(SoftOverlong):
    """SoftOverlong's ramp on right answers only (ScaleRL, arXiv:2510.13786, eq. 9).

    penalty = SoftOverlong's where the response is right, otherwise 0

    Differs from SoftOverlong: an all-wrong group stays tied, so its lengths give no signal. With a factor below 2 a
    long right answer still gets more than a wrong one.
    """

    formula: ClassVar[str] = SoftOverlong.formula + " where right"

    def lowest(self, correct: float, wrong: float) -> float:
        return min(wrong, correct - self.largest)

    def __call__(self, graded: Graded) -> Graded:
        return graded.with_component("soft_overlong", self.penalty(graded) * (graded.correctness > 0.5))


@dataclass(frozen=True)
class BackwardCorrection(RewardShaping):
    """Undo on average the mistakes of a verifier whose error rates are known (PGBC, arXiv:2510.00915).

    r = correctness, 0 or 1;  r^ = (r - rho0) / (1 - rho0 - rho1);  added = (correct - wrong) * (r^ - r)

    rho0 is the false positive rate, a share of the wrong responses, and rho1 the false negative rate, a share of the
    right ones. If mistakes are drawn for each response (reward.per_response of reward=noisy), r^ is on average the
    true correctness. With two values of reward the map is affine: a baseline that centres turns it into the factor
    1 / (1 - rho0 - rho1) on the advantages, and a division by a deviation removes that too. So it acts on the balance
    with other parts of the reward and with a KL penalty, and on advantages that are not centred. The paper's default is
    baseline=leave_one_out with scale=none.
    """

    false_positive_rate: float  # share of wrong responses that the verifier calls right
    false_negative_rate: float  # share of right responses that the verifier calls wrong
    correct: float  # the verifier's reward of a right answer
    wrong: float  # the verifier's reward of a wrong answer

    maps_correctness: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "({correct} - {wrong}) * ((r - {false_positive_rate}) / (1 - {false_positive_rate} - {false_negative_rate}) "
        "- r), r = 1 where right, else 0"
    )

    def __post_init__(self) -> None:
        require_not_negative(self, "false_positive_rate", "false_negative_rate")
        rest = f"below {1 - self.false_positive_rate:g}: a verifier of more mistakes tells right from wrong no longer"
        require_field(self.false_positive_rate + self.false_negative_rate < 1, self, "false_negative_rate", rest)
        require_field(self.correct > self.wrong, self, "correct", f"greater than `wrong` ({self.wrong:g})")

    @property
    def _ends(self) -> tuple[float, float]:
        """The corrected rewards of a response that the verifier accepts and of one that it rejects."""
        width, informative = self.correct - self.wrong, 1 - self.false_positive_rate - self.false_negative_rate
        right, wrong = ((called - self.false_positive_rate) / informative - called for called in (1.0, 0.0))
        return width * right, width * wrong

    def lowest(self, correct: float, wrong: float) -> float:
        of_right, of_wrong = self._ends
        return min(correct + of_right, wrong + of_wrong)

    def __call__(self, graded: Graded) -> Graded:
        of_right, of_wrong = self._ends
        added = torch.where(graded.correctness > 0.5, torch.full_like(graded.reward, of_right), of_wrong)
        if graded.failed is not None:
            added = added.masked_fill(graded.failed, 0.0)
        return graded.with_component("backward_correction", added)


@dataclass(frozen=True)
class KimiLength(RewardShaping):
    """Reward short right answers and punish long responses, relative to the group (Kimi k1.5, arXiv:2501.12599).

    lambda = 0.5 - (length - shortest_g) / (longest_g - shortest_g)
    added  = coef * lambda where right, coef * min(0, lambda) where wrong, 0 where all lengths are equal

    Differs from SoftOverlong: there is no threshold; every group is pushed towards its shortest response. Early in
    training that stalls accuracy, so the paper starts without it and later adds it in full. Groups drawn before
    `begins_at` of the budget was spent get nothing.
    """

    coef: float
    begins_at: float  # share of the budget; 0 for the whole run

    group_relative: ClassVar[bool] = True

    @property
    def formula(self) -> str:
        added = "{coef} * (lambda if right else min(0, lambda)), lambda = 0.5 - (n_i - min_g) / (max_g - min_g)"
        return added + (", from {begins_at} of the budget on" if self.begins_at else "")

    def __post_init__(self) -> None:
        require_positive(self, "coef")
        require_field(0 <= self.begins_at < 1, self, "begins_at", "in [0, 1)")

    def lowest(self, correct: float, wrong: float) -> float:
        return min(wrong, correct) - self.coef / 2

    def __call__(self, graded: Graded) -> Graded:
        lengths = graded.lengths.to(graded.reward.dtype)
        shortest, longest = lengths.amin(dim=1, keepdim=True), lengths.amax(dim=1, keepdim=True)
        place = 0.5 - (lengths - shortest) / (longest - shortest).clamp(min=1)
        added = torch.where(graded.correctness > 0.5, place, place.clamp(max=0.0))
        acts = longest > shortest
        if self.begins_at:
            assert graded.progress is not None, "the loop says of every group when it was drawn"
            acts = acts & (graded.progress >= self.begins_at)
        return graded.with_component("kimi_length", self.coef * torch.where(acts, added, 0.0))


@dataclass(frozen=True)
class L1Exact(RewardShaping):
    """Ask for a length in the prompt and punish the distance from it (LCPO-Exact of L1, arXiv:2503.04697).

    n_gold ~ U{shortest..longest}, one for all responses of a prompt, written into it
    penalty = -alpha * |n_gold - length|, for right and wrong answers alike

    The policy learns to respond at the length that the prompt asks for, so one model serves every budget. Evaluation
    prompts ask for lengths too. The metric `target_length/slope` shows whether lengths follow.
    """

    alpha: float  # reward per token
    shortest: int  # smallest target length, tokens
    longest: int  # largest target length, tokens

    formula: ClassVar[str] = "-{alpha} * |n_gold - n_i|, n_gold of {shortest}..{longest} in the prompt"

    def __post_init__(self) -> None:
        require_positive(self, "alpha", "shortest")
        require_field(self.shortest <= self.longest, self, "longest", f"at least `shortest` ({self.shortest})")

    @property
    def asks_for(self) -> range:
        return range(self.shortest, self.longest + 1)

    @property
    def out_of_proportion(self) -> bool:
        return self.alpha * self.longest > 3

    def lowest(self, correct: float, wrong: float) -> float:
        return -math.inf

    def __call__(self, graded: Graded) -> Graded:
        return graded.with_component("l1_exact", -self.alpha * self._left(graded).abs())

    def _left(self, graded: Graded) -> Float[Tensor, "P G"]:
        """Target length minus response length, in tokens; negative if the response is longer."""
        assert graded.target_length is not None, "the loop writes the target length into every prompt"
        return (graded.target_length - graded.lengths).to(graded.reward.dtype)


@dataclass(frozen=True)
class L1Max(L1Exact):
    """Ask for a length and reward right answers for staying below it (LCPO-Max of L1, arXiv:2503.04697).

    reward = right * clip(alpha * (n_gold - length) + delta, 0, 1)

    Here it is a component added to a right answer's reward of 1: right * (clip(...) - 1). Differs from L1Exact: it
    multiplies, so length does not matter for wrong answers, and a short right answer is not punished.
    """

    delta: float  # reward of a right answer of exactly the target length

    formula: ClassVar[str] = (
        "right * (clip({alpha} * (n_gold - n_i) + {delta}, 0, 1) - 1), n_gold of {shortest}..{longest} in the prompt"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_not_negative(self, "delta")
        require_field(self.delta <= 1, self, "delta", "at most 1")

    def lowest(self, correct: float, wrong: float) -> float:
        return min(wrong, correct - 1)

    def __call__(self, graded: Graded) -> Graded:
        worth = (self.alpha * self._left(graded) + self.delta).clamp(0, 1)
        return graded.with_component("l1_max", (graded.correctness > 0.5) * (worth - 1))


@dataclass(frozen=True)
class Unlikeliness(RewardShaping):
    """Reward the right answers that the policy finds likely less than the unlikely ones (arXiv:2506.02355).

    added = -beta * (G - rank) / G * reward where right, 0 where wrong;  rank 1 for the likeliest response of the group

    Rare right answers gain probability that GRPO gives to frequent ones, which raises pass@k for large k. All G
    responses are ranked, wrong ones too, by their log-probability under the policy that sampled them. An all-right
    group is no longer tied. Differs: equally likely responses share the best rank among them, so two equal responses
    earn the same; and the authors' code ranks by the mean log-prob of a token, the paper by that of the response.
    """

    beta: float

    group_relative: ClassVar[bool] = True
    formula: ClassVar[str] = "-{beta} * (G - rank_i) / G * R where right, rank 1 the likeliest of g"

    def __post_init__(self) -> None:
        require_field(0 < self.beta <= 1, self, "beta", "in (0, 1]")

    def lowest(self, correct: float, wrong: float) -> float:
        return min(wrong, correct, correct * (1 - self.beta))

    def __call__(self, graded: Graded) -> Graded:
        assert graded.logprob is not None, "grading sums up the sampler's log-probs"
        likelier = graded.logprob[:, None, :] > graded.logprob[:, :, None] + NEGLIGIBLE
        size = graded.logprob.shape[1]
        below = size - 1 - likelier.sum(dim=2)  # G - rank
        added = -self.beta * below / size * graded.reward
        return graded.with_component("unlikeliness", torch.where(graded.correctness > 0.5, added, 0.0))
