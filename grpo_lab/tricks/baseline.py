"""Baseline: what is subtracted from the reward.

A baseline may remember earlier steps, such as the rewards of each problem: see `first_memory` of `tricks/base.py`, and
baseline_stateful.py. It reads and changes `Credit.memory`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import comb
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from grpo_lab.checks import require_field, require_positive
from grpo_lab.renamed import renamed_facts
from grpo_lab.tricks.base import Trick, group_mean, tied
from grpo_lab.tricks.convention import Singleton
from grpo_lab.types import Bool, Float, Graded, Rollouts, Tensor, to_groups


class Weights(Enum):
    """The unit of a statistic: each row, or each sampled token that rejection left in."""

    rows = "rows"
    tokens = "tokens"

    def of(self, graded: Graded) -> Float[Tensor, "P G"]:
        """The weight of each row; 0 for rows that are not in the statistics."""
        weights = graded.sampled_lengths if self is Weights.tokens else torch.ones_like(graded.sampled_lengths)
        return (weights * graded.in_statistics).to(graded.reward.dtype)


@dataclass(frozen=True)
class State:
    """A partial response: the index of its problem in the batch, and the tokens so far."""

    place: int
    prefix: tuple[int, ...]


@runtime_checkable
class Estimator(Protocol):
    """Samples continuations from the policy that generated the rollouts, for baselines that need them."""

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Float[Tensor, "K S"]:
        """Shaped rewards of `samples` continuations of each of the K states, float64."""
        ...

    def step_ends(self) -> Bool[Tensor, "N T"]:
        """True on response tokens that end a reasoning step."""
        ...


@dataclass(frozen=True)
class Credit:
    """Inputs of a baseline besides the rewards of whole responses.

    `token_rewards` add up to the row's reward: the KL penalty of a token is its own reward, the rest is at the last
    sampled token. `values` are the critic's estimates for the state before each token; None without a critic.
    `logprobs` are the learner's before the updates, `collision` the sum over the vocabulary of its squared
    probabilities where each token was drawn, `weights` the correction's; None where nothing needs them. `memory` is the
    baseline's own, which it may change. `learner_logprobs` gives the learner's log-probs [N, T], before the step's
    updates, of responses of any step; None where no learner is at hand.
    """

    rollouts: Rollouts
    token_rewards: Float[Tensor, "N T"]
    values: Float[Tensor, "N T"] | None
    estimator: Estimator
    logprobs: Float[Tensor, "N T"] | None = None
    collision: Float[Tensor, "N T"] | None = None
    weights: Float[Tensor, "N T"] | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    learner_logprobs: Callable[[Rollouts], Tensor] | None = None


@dataclass(frozen=True)
class Baseline(Trick, ABC):
    """Subtracts a baseline from rewards. Rows out of the statistics get 0 and do not affect others.

    `group_relative`: compares rows of a group, so a group of equal rewards gets 0. `centres`: the result has both
    signs, whatever the signs of the rewards. `reads_correctness`: reads correctness, not the shaped reward.
    `scales_itself`: the result is already scaled, so a scale would be the second one. `scales_group_mean`: equals the
    group mean up to a factor. `smallest_group`: rows a group needs for an advantage other than 0. `handles_singletons`:
    the only row of a group in the statistics keeps its raw reward (a convention). `per_token`: gives each token its own
    advantage. `needs_critic`: reads a critic's values. `generates`: samples further responses. `continues`: samples
    from the middle of a response. `constant_over_batch`: subtracts one number from all rewards of the batch.
    `reward_to_go`: a token's reward leaves out only the KL penalty of earlier tokens. `needs_collision`: reads the
    learner's log-probs and its squared probabilities summed over the vocabulary. `is_group_mean`: subtracts the group's
    mean and does nothing else. `shifts`: subtracts a number besides the mean of the group. `scores_past`: has the
    learner score responses of earlier steps.
    """

    group_relative: ClassVar[bool]
    centres: ClassVar[bool] = True
    reads_correctness: ClassVar[bool] = False
    scales_itself: ClassVar[bool] = False
    scales_group_mean: ClassVar[bool] = False
    per_token: ClassVar[bool] = False
    needs_critic: ClassVar[bool] = False
    generates: ClassVar[bool] = False
    continues: ClassVar[bool] = False
    constant_over_batch: ClassVar[bool] = False
    reward_to_go: ClassVar[bool] = False
    needs_collision: ClassVar[bool] = False
    is_group_mean: ClassVar[bool] = False
    shifts: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        renamed_facts(
            cls, stretches="scales_group_mean", same_for_all="constant_over_batch", pays_to_go="reward_to_go",
            reads_outcome="reads_correctness",
        )  # fmt: skip

    @property
    def smallest_group(self) -> int:
        return 2 if self.group_relative else 1

    @property
    def handles_singletons(self) -> bool:
        return False

    @property
    def scores_past(self) -> bool:
        return False

    @abstractmethod
    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        """Reward minus baseline, float64."""

    def centre(self, graded: Graded, credit: Credit) -> Tensor:
        """Reward minus baseline, for a baseline that reads more than rewards; [N, T] where `per_token`."""
        return self(graded)

    def value_targets(self, graded: Graded, credit: Credit, centred: Tensor) -> Float[Tensor, "N T"]:
        """The targets of the critic's values, where `needs_critic`; `centred` is the result of `centre`."""
        assert credit.values is not None, "needs_critic makes the loop compute them"
        return centred + credit.values


def _centre(centred: Float[Tensor, "P G"], graded: Graded, singleton: Singleton) -> Float[Tensor, "P G"]:
    """`centred` in the statistics, exactly 0 in tied groups. With `Singleton.raw` a lone row keeps its raw reward."""
    if singleton is Singleton.raw:
        alone = graded.in_statistics.sum(dim=1, keepdim=True) == 1
        centred = torch.where(alone, graded.reward, centred)
        return torch.where(graded.in_statistics & (alone | ~tied(graded.reward, graded.in_statistics)), centred, 0.0)
    return torch.where(graded.in_statistics & ~tied(graded.reward, graded.in_statistics), centred, 0.0)


@dataclass(frozen=True)
class GroupMean(Baseline):
    """Subtract the mean reward of the group (GRPO, arXiv:2402.03300).

    centred = reward - mean_g(reward), over rows in the statistics; exactly 0 when the group is tied

    The mean includes the row itself, which scales the expected gradient by (G - 1)/G. A group with one
    row in the statistics gets 0.
    """

    singleton: Singleton

    group_relative: ClassVar[bool] = True
    is_group_mean: ClassVar[bool] = True
    formula: ClassVar[str] = "R - mean_g(R)"

    @property
    def handles_singletons(self) -> bool:
        return self.singleton is Singleton.raw

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        return _centre(graded.reward - group_mean(graded.reward, graded.in_statistics), graded, self.singleton)


@dataclass(frozen=True)
class LeaveOneOut(Baseline):
    """Subtract the mean reward of the other rows of the group (RLOO, arXiv:2402.14740).

    centred_i = reward_i - sum_{j != i} reward_j / (n - 1) = n/(n - 1) * (reward_i - mean_g(reward))

    Differs from GroupMean by the factor n/(n - 1), where n is the number of rows in the statistics. The row is not part
    of its own baseline, so the estimate is unbiased. A group with one row in the statistics gets 0.
    """

    singleton: Singleton

    group_relative: ClassVar[bool] = True
    scales_group_mean: ClassVar[bool] = True
    formula: ClassVar[str] = "R - mean_{{g without i}}(R)"

    @property
    def handles_singletons(self) -> bool:
        return self.singleton is Singleton.raw

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        number = graded.in_statistics.sum(dim=1, keepdim=True).to(graded.reward.dtype)
        factor = number / (number - 1).clamp(min=1)
        centred = factor * (graded.reward - group_mean(graded.reward, graded.in_statistics))
        return _centre(centred, graded, self.singleton)


@dataclass(frozen=True)
class NoBaseline(Baseline):
    """Subtract nothing: the advantage is the reward itself (REINFORCE, Williams 1992).

    Unbiased, with high variance. With rewards 0 and 1 only right answers have a gradient. Groups without signal
    have one too.
    """

    is_no_op: ClassVar[bool] = True
    group_relative: ClassVar[bool] = False
    constant_over_batch: ClassVar[bool] = True
    centres: ClassVar[bool] = False
    formula: ClassVar[str] = "R"

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        return torch.where(graded.in_statistics, graded.reward, 0.0)


@dataclass(frozen=True)
class BatchMean(Baseline):
    """Subtract the mean reward of the whole batch (REINFORCE++, arXiv:2501.03262).

    centred = reward - sum(weight * reward) / sum(weight), over the rows of all groups that are in the statistics

    Differs from GroupMean: a prompt's difficulty stays in the advantage. A right answer to an easy prompt is worth
    as much as one to a hard prompt, and a group may have a single response. `by` is what counts once: a row, or a
    token as in verl. A batch whose rewards are all equal gets exactly 0.
    """

    by: Weights

    group_relative: ClassVar[bool] = False
    constant_over_batch: ClassVar[bool] = True
    formula: ClassVar[str] = "R - mean_batch(R; each of the {by} counts once)"

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        weights = self.by.of(graded)
        mean = (weights * graded.reward).sum() / weights.sum().clamp(min=1)
        flat = tied(graded.reward.reshape(1, -1), graded.in_statistics.reshape(1, -1))
        return torch.where(graded.in_statistics & ~flat, graded.reward - mean, 0.0)


@dataclass(frozen=True)
class ForwardCorrection(Baseline):
    """Subtract what a right answer earns on average from a verifier that misses some (PGFC, arXiv:2510.00915).

    centred = reward - (wrong + (1 - false_negative_rate) * (correct - wrong))

    In the paper's units, where correct is 1 and wrong 0, a response that was called right gets the false negative rate
    rho1, and one that was called wrong rho1 - 1. Over the verifier's mistakes a right response gets 0 on average and a
    wrong one -(1 - rho0 - rho1), so the expected gradient is that of the clean reward times 1 - rho0 - rho1, and the
    false positive rate rho0 need not be known. Made for rewards of one part with mistakes that are drawn for each
    response, and for scale=none: with a deviation of the group it is no longer this gradient. Differs from
    `reward_shaping=backward_correction`, which needs both rates and corrects the reward itself.
    """

    false_negative_rate: float  # share of right responses that the verifier calls wrong
    correct: float  # the verifier's reward of a right answer
    wrong: float  # the verifier's reward of a wrong answer

    group_relative: ClassVar[bool] = False
    constant_over_batch: ClassVar[bool] = True
    formula: ClassVar[str] = "R - ({wrong} + (1 - {false_negative_rate}) * ({correct} - {wrong}))"

    def __post_init__(self) -> None:
        require_field(0 <= self.false_negative_rate < 1, self, "false_negative_rate", "in [0, 1)")
        require_field(self.correct > self.wrong, self, "correct", f"greater than `wrong` ({self.wrong:g})")

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        expected = self.wrong + (1 - self.false_negative_rate) * (self.correct - self.wrong)
        return torch.where(graded.in_statistics, graded.reward - expected, 0.0)


@dataclass(frozen=True)
class LengthWeighted(Baseline):
    """Subtract the group's mean reward weighted by length (OPO, arXiv:2505.23585).

    centred = reward - sum_j(length_j * reward_j) / sum_j(length_j), over rows of the group in the statistics

    A length counts the sampled tokens that rejection left in. This baseline has the least variance if a response's
    squared gradient norm grows with its length. Differs from GroupMean: a group's advantages add up to 0 only when
    each is weighted by its length. The mean includes the row itself, so it is biased. A tied group, or one with a
    single row, gets 0.
    """

    singleton: Singleton

    group_relative: ClassVar[bool] = True
    formula: ClassVar[str] = "R - sum_g(n_i * R) / sum_g(n_i)"

    @property
    def handles_singletons(self) -> bool:
        return self.singleton is Singleton.raw

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        weights = Weights.tokens.of(graded)
        mean = (weights * graded.reward).sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1)
        return _centre(graded.reward - mean, graded, self.singleton)


@dataclass(frozen=True)
class PassAtK(Baseline):
    """Advantage for pass@k, the chance that one of k responses is right (Pass@k training, arXiv:2508.10751).

    mean  = 1 - C(wrong, k) / C(n, k);  sigma = sqrt(mean * (1 - mean))
    right = (1 - mean) / sigma
    wrong = (1 - mean - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / sigma

    A response gets the standardised best correctness of a subset of k, averaged over all subsets that contain it. At
    k = 1 this is GroupMean with GroupStd. Differs from them: a group in which every subset has a right answer
    (wrong < k) gets 0, so easy prompts have no gradient. Reads the correctness of the n rows in the statistics; a group
    with n <= k has at most one subset and gets 0. verl's `grpo_passk` differs: it rewards only the best response.
    """

    k: int

    group_relative: ClassVar[bool] = True
    reads_correctness: ClassVar[bool] = True
    scales_itself: ClassVar[bool] = True
    formula: ClassVar[str] = "mean over subsets of {k} that hold i of (max correctness - pass@{k}) / std"

    def __post_init__(self) -> None:
        require_field(self.k >= 1, self, "k", "at least 1")

    @property
    def smallest_group(self) -> int:
        return self.k + 1

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        right = graded.correctness > 0.5
        wrong = (graded.in_statistics & ~right).sum(dim=1).tolist()
        pairs = [self._pair(n, w) for n, w in zip(graded.in_statistics.sum(dim=1).tolist(), wrong)]
        worth = torch.tensor(pairs, dtype=graded.reward.dtype).reshape(-1, 2)
        return torch.where(graded.in_statistics, torch.where(right, worth[:, :1], worth[:, 1:]), 0.0)

    def _pair(self, number: int, wrong: int) -> tuple[float, float]:
        """Advantages of a right and of a wrong response in a group of `number` responses, `wrong` of them wrong."""
        k = self.k
        if wrong < k or wrong == number:
            return 0.0, 0.0
        fail = comb(wrong, k) / comb(number, k)
        sigma = (fail * (1 - fail)) ** 0.5
        return fail / sigma, (fail - comb(wrong - 1, k - 1) / comb(number - 1, k - 1)) / sigma


def rewards_by_token(
    reward: Float[Tensor, "P G"], penalties: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """Each token's KL penalty, and the rest of the row's reward at its last sampled token; float64."""
    penalties = torch.where(sampled_mask, penalties.to(reward.dtype), 0.0)
    columns = torch.arange(1, sampled_mask.shape[1] + 1)
    last = (sampled_mask * columns).amax(dim=1) - 1
    at_the_end = torch.zeros_like(penalties)
    at_the_end[torch.arange(len(last)), last.clamp(min=0)] = reward.flatten() - penalties.sum(dim=1)
    return penalties + at_the_end


@dataclass(frozen=True)
class CreditBaseline(Baseline, ABC):
    """A baseline that needs a `Credit` in addition to the graded batch."""

    group_relative: ClassVar[bool] = False

    def __call__(self, graded: Graded) -> Float[Tensor, "P G"]:
        raise TypeError(f"{type(self).__name__} looks at more than rewards: call centre(graded, credit)")

    @abstractmethod
    def centre(self, graded: Graded, credit: Credit) -> Tensor:
        """Reward minus baseline, float64: [N, T] where `per_token`, else [P, G]."""


@dataclass(frozen=True)
class Greedy(CreditBaseline):
    """Subtract the reward of the policy's most likely response (ReMax, arXiv:2310.10505).

    centred = reward - reward(greedy response to the same prompt)

    Unbiased, since the greedy response does not depend on the sampled one. Needs no group. Costs one more response
    per prompt, counted in `budget/estimation_tokens`. With rewards 0 and 1 a sample has a gradient only where it
    differs from the greedy response: -1 for a wrong one if greedy is right, 1 for a right one if greedy is wrong.
    """

    generates: ClassVar[bool] = True
    formula: ClassVar[str] = "R - R(greedy response)"

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "P G"]:
        prompts = [State(place, ()) for place in range(len(credit.rollouts.problems))]
        baseline = credit.estimator.rewards(prompts, 1, greedy=True)
        return torch.where(graded.in_statistics, graded.reward - baseline, 0.0)


@dataclass(frozen=True)
class MonteCarlo(CreditBaseline):
    """Value each reasoning step by sampled continuations of the response (VinePPO, arXiv:2410.01679).

    V(s) = mean reward of `continuations` ends sampled from s;  s_0 the prompt, s_j where step j of the reasoning ends
    advantage of the tokens of step j = V(s_{j+1}) - V(s_j), and of the last step reward - V(s_last)

    Unbiased, unlike a critic. Costs `continuations` responses per step, counted in `budget/estimation_tokens`. The
    advantages of a response's steps add up to reward - V(s_0). Differs: a state that several responses share is
    valued once, so their estimates share its noise.
    """

    continuations: int

    per_token: ClassVar[bool] = True
    generates: ClassVar[bool] = True
    continues: ClassVar[bool] = True
    formula: ClassVar[str] = "V(s_next) - V(s) of each step, R for the last; V by {continuations} continuations"

    def __post_init__(self) -> None:
        require_positive(self, "continuations")

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        rollouts, size = credit.rollouts, credit.rollouts.group_size
        lengths, tokens, ends = rollouts.lengths.tolist(), rollouts.tokens.tolist(), credit.estimator.step_ends()
        rows = graded.in_statistics.flatten().nonzero().flatten().tolist()
        starts = {}  # row -> where its steps begin; the end of the last step begins no further one
        for row in rows:
            after = (ends[row].nonzero().flatten() + 1).tolist()
            starts[row] = [0, *(start for start in after if start < lengths[row])]
        states = {row: [State(row // size, tuple(tokens[row][:start])) for start in starts[row]] for row in rows}
        distinct = list(dict.fromkeys(state for row in rows for state in states[row]))
        advantages = torch.zeros(rollouts.tokens.shape, dtype=graded.reward.dtype)
        if not distinct:
            return advantages
        means = credit.estimator.rewards(distinct, self.continuations).mean(dim=1).tolist()
        value = dict(zip(distinct, means))
        reward = graded.reward.flatten().tolist()
        for row in rows:
            stops = [*starts[row][1:], lengths[row]]
            after_step = [*(value[state] for state in states[row][1:]), reward[row]]
            for start, stop, state, then in zip(starts[row], stops, states[row], after_step):
                advantages[row, start:stop] = then - value[state]
        return torch.where(rollouts.sampled_mask, advantages, 0.0)


@dataclass(frozen=True)
class ReturnToGo(CreditBaseline):
    """Give each token the rewards from itself onwards, and subtract nothing (REINFORCE++, arXiv:2501.03262).

    return_t = sum_{s >= t} r_s;  with k1 in the reward, reward - kl_coef * sum_{s >= t} (old_logprob_s - ref_logprob_s)

    Differs from BatchMean: a token is penalised for the KL of itself and later tokens, not for earlier tokens, which
    it cannot influence. Equals Gae with gamma = lam = 1 and a critic that outputs 0. The paper's whitening over the
    batch is a scale here: batch_std_tokens. Injected tokens get 0.
    """

    per_token: ClassVar[bool] = True
    centres: ClassVar[bool] = False
    reward_to_go: ClassVar[bool] = True
    formula: ClassVar[str] = "sum of R_t over t and the tokens after it"

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        to_go = credit.token_rewards.flip(1).cumsum(1).flip(1)
        return torch.where(credit.rollouts.sampled_mask & graded.in_statistics.flatten()[:, None], to_go, 0.0)


@dataclass(frozen=True)
class OptimalToken(CreditBaseline):
    """Subtract from each token's reward to go its own mean over the group (Optimal Token Baseline, arXiv:2602.07078).

    A_it = G_it - B_t;  B_t = sum_i W_it G_it / (sum_i W_it + eps), over the rows of the group with a token t
    W_it = sum_{u <= t} w_iu^2 (1 - 2 pi_iu + sum_v pi_v^2)

    G is the reward to go, and w the weight of the correction axis, 1 without one. The term in brackets is the squared
    norm of the gradient of token u's log-prob with respect to the logits: pi_iu is the probability of the token and the
    sum is over the vocabulary, both of the learner before the updates, in the same pass as the log-probs. A row whose
    tokens so far were uncertain counts more. Among baselines that depend only on the position this one has the least
    variance if the gradients of different tokens are orthogonal and are those of the logits. Differs from
    LengthWeighted, which weighs a row by all its tokens, also later ones. The mean includes the row itself. Where only
    one row has a token t, B_t is 0 with `zero_tail`, and otherwise that row's own G, so the token gets 0; verl has had
    both defaults. Where all rows with a token t have equal G, two or more, the token gets exactly 0.
    """

    zero_tail: bool
    eps: float

    group_relative: ClassVar[bool] = True
    per_token: ClassVar[bool] = True
    needs_collision: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "eps")

    @property
    def smallest_group(self) -> int:
        return 1 if self.zero_tail else 2

    @property
    def handles_singletons(self) -> bool:
        return self.zero_tail

    @property
    def formula(self) -> str:
        tail = ", B_t = 0 where one row has a token t" if self.zero_tail else ""
        energy = "W_it = sum_{{u<=t}} w^2 (1 - 2 pi + sum_v pi_v^2)"
        return f"G_t - B_t, B_t = sum_g(W_t G_t) / (sum_g(W_t) + {{eps}}), {energy}{tail}"

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        assert credit.logprobs is not None and credit.collision is not None, "needs_collision has them computed"
        sampled = credit.rollouts.sampled_mask & graded.in_statistics.flatten()[:, None]
        dtype, size = graded.reward.dtype, credit.rollouts.group_size
        energy = (1 - 2 * credit.logprobs.to(dtype).exp() + credit.collision.to(dtype)).clamp(min=0)
        if credit.weights is not None:
            energy = energy * credit.weights.to(dtype) ** 2
        mask, to_go, weight = (
            to_groups(values, size)
            for values in (
                sampled,
                credit.token_rewards.flip(1).cumsum(1).flip(1),
                torch.where(sampled, energy, 0.0).cumsum(1),
            )
        )
        weight = torch.where(mask, weight, 0.0)
        # Rewards are counted from the largest, so that equal ones leave exactly 0 whatever the weights and eps.
        largest = torch.where(mask, to_go, -torch.inf).amax(dim=1, keepdim=True)
        above = torch.where(mask, to_go - largest, 0.0)
        centred = above - (weight * above).sum(1, keepdim=True) / (weight.sum(1, keepdim=True) + self.eps)
        if self.zero_tail:
            centred = torch.where(mask.sum(dim=1, keepdim=True) == 1, to_go, centred)
        return torch.where(mask, centred, 0.0).reshape(sampled.shape)


@dataclass(frozen=True)
class Gae(CreditBaseline):
    """Generalised advantage estimation with a learned critic (PPO, arXiv:1506.02438 and 1707.06347).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  advantage_t = sum_l (gamma lam)^l delta_{t+l}

    With gamma = lam = 1 it is the sum of rewards from t on, minus V(s_t). Injected tokens are skipped: the next value
    and the sum carry over them. A truncated response is not bootstrapped: its return ends with its own rewards. The
    critic's target is advantage + value, before any whitening.
    """

    gamma: float
    lam: float

    per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True
    formula: ClassVar[str] = "sum_l ({gamma} * {lam})^l (R_t + {gamma} * V_next - V), over t and the tokens after it"

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            require_field(0 < getattr(self, name) <= 1, self, name, "in (0, 1]")

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        assert credit.values is not None, "needs_critic makes the loop compute them"
        mask = credit.rollouts.sampled_mask & graded.in_statistics.flatten()[:, None]
        return advantage_estimates(credit.token_rewards, credit.values, mask, self.gamma, self.lam)


@dataclass(frozen=True)
class LengthAdaptiveGae(CreditBaseline):
    """Gae whose lambda grows with the response, and whose critic learns with another (VAPO, arXiv:2504.05118).

    advantage: lambda_i = 1 - 1 / max(alpha * n_i, 1), n_i the sampled tokens of the response
    critic's target: sum_l (gamma lam_value)^l delta_{t+l} + V(s_t), the plain return where both are 1

    With a fixed lambda of 0.95 a reward at the end reaches no token more than a hundred before it. Here the sum of the
    weights lambda^l is about alpha * n_i. A response of at most 1 / alpha tokens gets lambda 0, its one-step delta, as
    in NeMo-RL; the paper leaves this open. Differs from Gae, whose critic's target has the lambda of its advantages.
    """

    gamma: float
    alpha: float  # per token
    lam_value: float

    per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True
    formula: ClassVar[str] = (
        "sum_l ({gamma} * lambda_i)^l (R_t + {gamma} * V_next - V), over t and the tokens after it, "
        "lambda_i = 1 - 1 / max({alpha} * n_i, 1); {lam_value} for the critic's target"
    )

    def __post_init__(self) -> None:
        require_positive(self, "alpha")
        for name in ("gamma", "lam_value"):
            require_field(0 < getattr(self, name) <= 1, self, name, "in (0, 1]")

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        lengths = self._mask(graded, credit).sum(dim=1).to(graded.reward.dtype)
        return self._estimates(graded, credit, 1 - 1 / (self.alpha * lengths).clamp(min=1))

    def value_targets(self, graded: Graded, credit: Credit, centred: Tensor) -> Float[Tensor, "N T"]:
        assert credit.values is not None, "needs_critic makes the loop compute them"
        return self._estimates(graded, credit, self.lam_value) + credit.values

    def _mask(self, graded: Graded, credit: Credit) -> Bool[Tensor, "N T"]:
        return credit.rollouts.sampled_mask & graded.in_statistics.flatten()[:, None]

    def _estimates(self, graded: Graded, credit: Credit, lam: float | Float[Tensor, "N"]) -> Float[Tensor, "N T"]:
        assert credit.values is not None, "needs_critic makes the loop compute them"
        return advantage_estimates(credit.token_rewards, credit.values, self._mask(graded, credit), self.gamma, lam)


def advantage_estimates(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    gamma: float,
    lam: float | Float[Tensor, "N"],
) -> Float[Tensor, "N T"]:
    """Gae over the tokens in `mask` of each row, 0 elsewhere, in the precision of `rewards`.

    `lam` is one for all rows or one for each.
    """
    values, advantages = values.to(rewards.dtype), torch.zeros_like(rewards)
    next_value = following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        estimate = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        following = torch.where(here, estimate, following)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, estimate, 0.0)
    return advantages
