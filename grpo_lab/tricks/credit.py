"""Baselines that look at more than the rewards of whole responses: a critic, continuations, a greedy response."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch

from grpo_lab.shapes import Bool, Float, Tensor
from grpo_lab.tricks.base import require, require_positive
from grpo_lab.tricks.baseline import Baseline, Credit, State
from grpo_lab.types import Graded


def rewards_by_token(
    reward: Float[Tensor, "P G"], charges: Float[Tensor, "N T"], sampled_mask: Bool[Tensor, "N T"]
) -> Float[Tensor, "N T"]:
    """The row's reward without its charges at its last sampled token, and the charges at theirs; float64."""
    charges = torch.where(sampled_mask, charges.to(reward.dtype), 0.0)
    columns = torch.arange(1, sampled_mask.shape[1] + 1)
    last = (sampled_mask * columns).amax(dim=1) - 1
    at_the_end = torch.zeros_like(charges)
    at_the_end[torch.arange(len(last)), last.clamp(min=0)] = reward.flatten() - charges.sum(dim=1)
    return charges + at_the_end


@dataclass(frozen=True)
class CreditBaseline(Baseline, ABC):
    """A baseline that needs a `Credit` beside the graded batch."""

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

    Unbiased, as the greedy response does not depend on the sampled one, and needs no group. Costs one more response a
    prompt, counted in `budget/estimation_tokens`. With rewards 0 and 1 only half of the samples push: the wrong ones,
    with -1, where the greedy response is right, and the right ones, with 1, where it is wrong.
    """

    generates: ClassVar[bool] = True
    formula: ClassVar[str] = "R - R(greedy response)"

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "P G"]:
        prompts = [State(place, ()) for place in range(len(credit.rollouts.problems))]
        baseline = credit.estimator.rewards(prompts, 1, greedy=True)
        return torch.where(graded.counted, graded.reward - baseline, 0.0)


@dataclass(frozen=True)
class MonteCarlo(CreditBaseline):
    """Value each step of a response by fresh ends of it (VinePPO, arXiv:2410.01679).

    V(s) = mean reward of `continuations` ends sampled from s;  s_0 the prompt, s_j where step j of the reasoning ends
    advantage of the tokens of step j = V(s_{j+1}) - V(s_j), and of the last step reward - V(s_last)

    Unbiased where a critic is not, at the price of `continuations` responses for every step, counted in
    `budget/estimation_tokens`. The advantages of a response add up, step by step, to reward - V(s_0). Differs: a state
    that several responses pass through is valued once, so their estimates share its noise.
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
        rows = graded.counted.flatten().nonzero().flatten().tolist()
        starts = {}  # row -> where its steps begin; one that ends with the response begins no further step
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
    """Pay each token what is earned from it on, and subtract nothing (REINFORCE++, arXiv:2501.03262).

    return_t = sum_{s >= t} r_s;  with k1 in the reward, reward - kl_coef * sum_{s >= t} (old_logprob_s - ref_logprob_s)

    Differs from BatchMean: a token is charged for the drift of what comes after it and not for that of what came
    before, on which it has no influence. It is Gae with gamma and lam 1 and a critic that says 0. The paper's whitening
    over the batch is the scale's: batch_std_tokens. Tokens the policy did not choose earn nothing.
    """

    per_token: ClassVar[bool] = True
    centres: ClassVar[bool] = False
    pays_to_go: ClassVar[bool] = True
    formula: ClassVar[str] = "sum of R_t over t and the tokens after it"

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        to_go = credit.token_rewards.flip(1).cumsum(1).flip(1)
        return torch.where(credit.rollouts.sampled_mask & graded.counted.flatten()[:, None], to_go, 0.0)


@dataclass(frozen=True)
class Gae(CreditBaseline):
    """Generalised advantage estimation with a learned critic (PPO, arXiv:1506.02438 and 1707.06347).

    delta_t = r_t + gamma V(s_{t+1}) - V(s_t);  advantage_t = sum_l (gamma lam)^l delta_{t+l}

    With gamma = lam = 1 it is what is still earned less V(s_t). Tokens the policy did not choose are passed through:
    value and sum are carried over them. A response that the budget cut is not bootstrapped: it ends with what it
    earned.
    The critic's target is advantage + value, before any whitening.
    """

    gamma: float
    lam: float

    per_token: ClassVar[bool] = True
    needs_critic: ClassVar[bool] = True
    formula: ClassVar[str] = "sum_l ({gamma} * {lam})^l (R_t + {gamma} * V_next - V), over t and the tokens after it"

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            require(0 < getattr(self, name) <= 1, self, name, "in (0, 1]")

    def centre(self, graded: Graded, credit: Credit) -> Float[Tensor, "N T"]:
        assert credit.values is not None, "needs_critic makes the loop compute them"
        mask = credit.rollouts.sampled_mask & graded.counted.flatten()[:, None]
        return advantage_estimates(credit.token_rewards, credit.values, mask, self.gamma, self.lam)


def advantage_estimates(
    rewards: Float[Tensor, "N T"], values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], gamma: float, lam: float
) -> Float[Tensor, "N T"]:
    """Gae over the masked tokens of each row, 0 elsewhere, in the precision of `rewards`."""
    values, advantages = values.to(rewards.dtype), torch.zeros_like(rewards)
    next_value = following = rewards.new_zeros(rewards.shape[0])
    for t in reversed(range(rewards.shape[1])):
        here = mask[:, t]
        estimate = rewards[:, t] + gamma * next_value - values[:, t] + gamma * lam * following
        following = torch.where(here, estimate, following)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, estimate, 0.0)
    return advantages
