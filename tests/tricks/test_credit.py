"""Credit: a critic, its estimates, fresh ends of states and a greedy response; by hand, and on a world in a table.

The world in a table is a policy whose next token depends on the last one alone, with chances in quarters. All it can
say is enumerated, so values and gradients are known exactly, and the real classes draw from it as from any engine.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
import torch
from helpers import F64, assert_close, continuations_of, make_graded, make_rollouts, tiny_model
from safetensors.torch import load_file
from short_runs import metrics_of, run_in_process, same_ending
from torch import Tensor, nn

from grpo_lab.budget.compute_account import ComputeAccount, ModelFlops
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.engines.base import EngineSession
from grpo_lab.policy.batching import expand
from grpo_lab.policy.critic import LiveCritic, open_critic
from grpo_lab.policy.optim import Adamw, Decay
from grpo_lab.rollout.grading import decode, grade, to_rollouts
from grpo_lab.run.state import RunState, open_state
from grpo_lab.seeding import token_uniforms
from grpo_lab.tricks.baseline import (
    Baseline,
    Credit,
    Gae,
    Greedy,
    LeaveOneOut,
    MonteCarlo,
    NoBaseline,
    ReturnToGo,
    State,
    Weights,
    advantage_estimates,
    rewards_by_token,
)
from grpo_lab.tricks.convention import Floor, Singleton
from grpo_lab.tricks.critic import SeparateModel, ValueHead
from grpo_lab.tricks.kl import K1Reward
from grpo_lab.tricks.precision import Bf16, Fp32, LmHead
from grpo_lab.tricks.reward_shaping import SoftOverlong
from grpo_lab.tricks.scale import BatchStd, Deviation
from grpo_lab.types import Completion, Graded, Microbatching, NoiseKey, OnFinish, Problem, Request, Rollouts, StopReason

# --- generalised advantage estimation, by hand --------------------------------------------------------------

VALUES = torch.tensor([[0.3, 0.5, 0.2, 0.9]], dtype=F64)
TERMINAL = torch.tensor([[0.0, 0.0, 0.0, 1.0]], dtype=F64)
EVERY = torch.ones(1, 4, dtype=torch.bool)


@dataclass(frozen=True)
class NoEstimator:
    """For baselines that ask for none."""

    def rewards(self, states: Sequence[State], samples: int, greedy: bool = False) -> Tensor:
        raise AssertionError("this baseline generates nothing")

    def step_ends(self) -> Tensor:
        raise AssertionError("this baseline has no steps")


def test_the_golden_numbers_of_four_tokens() -> None:
    """delta = (.5-.3, .2-.5, .9-.2, 1-.9) = (.2, -.3, .7, .1).

    lam 1:   .1, .7+.1 = .8, -.3+.8 = .5, .2+.5 = .7, which is 1 - V
    lam .95: .1, .7+.95*.1 = .795, -.3+.95*.795 = .45525, .2+.95*.45525 = .6324875
    gamma .9, lam 1: delta = (.9*.5-.3, .9*.2-.5, .9*.9-.2, .1) = (.15, -.32, .61, .1); then .1, .61+.09 = .7,
             -.32+.63 = .31, .15+.279 = .429
    """
    for gamma, lam, expected in (
        (1.0, 1.0, [0.7, 0.5, 0.8, 0.1]),
        (1.0, 0.95, [0.6324875, 0.45525, 0.795, 0.1]),
        (0.9, 1.0, [0.429, 0.31, 0.7, 0.1]),
        (1.0, 1e-12, [0.2, -0.3, 0.7, 0.1]),
    ):
        found = advantage_estimates(TERMINAL, VALUES, EVERY, gamma, lam)
        assert_close(found, [expected], 1e-11, f"gamma {gamma}, lam {lam}")


def test_tokens_the_policy_did_not_choose_are_passed_through() -> None:
    """Injected text between, before and after changes nothing: value and sum are carried, whatever stands there."""
    places = [1, 2, 4, 7]  # of the four tokens in a row of nine, injected text around them and padding behind
    mask = torch.zeros(1, 9, dtype=torch.bool)
    mask[0, places] = True
    values, rewards = torch.full((1, 9), 77.0, dtype=F64), torch.zeros(1, 9, dtype=F64)
    values[0, places], rewards[0, places] = VALUES[0], TERMINAL[0]
    found = advantage_estimates(rewards, values, mask, 1.0, 0.95)
    expected = torch.zeros(9, dtype=F64)
    expected[places] = torch.tensor([0.6324875, 0.45525, 0.795, 0.1], dtype=F64)
    assert_close(found, expected[None], 1e-12, "carried")
    assert bool((found[~mask] == 0).all())


def _as_verl_writes_it(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """`compute_gae_advantage_return` of verl before whitening, token for token."""
    next_values, last, found = 0, 0, []
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        own = delta + gamma * lam * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = own * mask[:, t] + (1 - mask[:, t]) * last
        found.append(last)
    return torch.stack(found[::-1], dim=1) * mask


def test_random_rows_come_out_as_in_verl() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(64, 11, dtype=F64, generator=generator) for _ in range(2))
    mask = torch.rand(64, 11, generator=generator) < 0.7
    rewards = torch.where(mask, rewards, 0.0)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.97, 0.9)):
        theirs = _as_verl_writes_it(rewards, values, mask.to(F64), gamma, lam)
        assert_close(advantage_estimates(rewards, values, mask, gamma, lam), theirs, 1e-12, f"{gamma}, {lam}")


def credit_of(rollouts: Rollouts, graded: Graded, values: Tensor, charges: Tensor | None = None) -> Credit:
    charges = torch.zeros(rollouts.tokens.shape, dtype=F64) if charges is None else charges
    earned = rewards_by_token(graded.reward, charges, rollouts.sampled_mask)
    return Credit(rollouts, earned, values, NoEstimator())


def test_with_gamma_and_lambda_one_it_is_the_reward_less_the_value() -> None:
    """Also in a response of one token, in one that was cut, whose end is not bootstrapped, and not where uncounted."""
    rollouts = make_rollouts([4, 1, 3, 2], 2)
    graded = make_graded(
        [[1.0, 0.3], [-0.5, 1.0]],
        truncated=[[False, False], [True, False]],
        in_statistics=[[True, True], [True, False]],
    )
    values = torch.rand(4, 4, dtype=F64, generator=torch.Generator().manual_seed(1))
    found = Gae(1.0, 1.0).centre(graded, credit_of(rollouts, graded, values))
    counted = torch.tensor([[True], [True], [True], [False]])
    expected = torch.where(rollouts.sampled_mask & counted, graded.reward.reshape(4, 1) - values, 0.0)
    assert_close(found, expected, 1e-12, "R - V")
    one_token = Gae(1.0, 0.5).centre(graded, credit_of(rollouts, graded, values))[1, 0]
    assert_close(one_token, 0.3 - values[1, 0], 1e-12, "a response of one token has nothing to smooth")


# --- what is still to come ----------------------------------------------------------------------------------


def test_a_token_is_charged_for_the_drift_of_what_comes_after_it() -> None:
    """REINFORCE++ by hand: r - beta * sum_{s >= t} (old - ref), then whitened over the batch's tokens.

    beta .1, r = 1 and 0. Drift of the first response .5, -1, 2: 1 - .2 = .8, 1 + .1 - .2 = .9, 1 - .05 + .1 - .2 = .85;
    of the second 1: -.1. Mean (.85 + .9 + .8 - .1) / 4 = .6125; squares .05640625, .08265625, .03515625, .50765625 add
    up to .681875, a fourth of it is .17046875.
    """
    rollouts, graded = make_rollouts([3, 1], 2), make_graded([[1.0, 0.0]])
    drift = torch.tensor([[0.5, -1.0, 2.0], [1.0, 9.0, 9.0]], dtype=F64)
    kl, mask = K1Reward(0.1, 0.0), rollouts.sampled_mask
    charges = kl.token_penalties(drift, torch.zeros_like(drift), mask)
    charged = kl.shape(graded, charges)
    assert_close(charged.reward, [[0.85, -0.1]], 1e-12, "of whole responses")
    earned = rewards_by_token(charged.reward, charges, mask)
    to_go = ReturnToGo().centre(charged, Credit(rollouts, earned, None, NoEstimator()))
    assert_close(to_go, [[0.85, 0.9, 0.8], [-0.1, 0, 0]], 1e-12, "to go")
    whiten = BatchStd(Deviation.centred, Weights.tokens, True, 0, 0.0, Floor.added)
    sigma = math.sqrt(0.17046875)
    expected = torch.tensor([[0.2375, 0.2875, 0.1875], [-0.7125, 0, 0]], dtype=F64) / sigma
    assert_close(whiten.of_tokens(to_go, mask, charged), expected, 1e-12, "whitened")


def test_what_is_to_go_is_the_estimate_of_a_critic_that_says_nothing() -> None:
    """Also around tokens the policy did not choose, and 0 on rows that are not counted."""
    rollouts = make_rollouts([5, 2, 4, 1], 2)
    chosen = rollouts.sampled_mask.clone()
    chosen[0, 1:3] = False
    rollouts = replace(rollouts, sampled_mask=chosen)
    graded = make_graded([[1.0, 0.3], [-0.5, 1.0]], in_statistics=[[True, True], [False, True]])
    charges = torch.rand(4, 5, dtype=F64, generator=torch.Generator().manual_seed(2)) - 0.5
    earned = rewards_by_token(graded.reward, charges, chosen)
    credit = Credit(rollouts, earned, torch.zeros(4, 5, dtype=F64), NoEstimator())
    found = ReturnToGo().centre(graded, credit)
    assert_close(found, Gae(1.0, 1.0).centre(graded, credit), 1e-12, "gamma and lambda 1, V = 0")
    assert bool((found[~chosen] == 0).all()) and bool((found[2] == 0).all())
    uncharged = Credit(
        rollouts, rewards_by_token(graded.reward, torch.zeros(4, 5, dtype=F64), chosen), None, NoEstimator()
    )
    whole = torch.where(chosen & graded.in_statistics.reshape(4, 1), graded.reward.reshape(4, 1), 0.0)
    assert torch.equal(ReturnToGo().centre(graded, uncharged), whole), "to the bit, so that ties stay ties"


# --- rewards of tokens --------------------------------------------------------------------------------------


def test_a_kl_penalty_is_charged_where_it_fell_and_the_rest_at_the_last_sampled_token() -> None:
    """Charges -.1 * (old - ref) = (-.1, .05, -.02) and a reward of 1: r = (-.1, .05, 1 - .02), in sum .93.

    With gamma = lam = 1 and V = (.5, .4, .3): what is still earned is (.93, 1.03, .98), less V (.43, .63, .68).
    """
    rollouts = make_rollouts([3, 4], 2)
    sampled = rollouts.sampled_mask.clone()
    sampled[1] = torch.tensor([True, True, False, False])  # the second row ends with text that was put in
    rollouts = replace(rollouts, sampled_mask=sampled)
    old = torch.tensor([[-1.0, -1.0, -1.0, 5.0], [-1.0, -1.0, 5.0, 5.0]], dtype=F64)
    ref = torch.tensor([[-2.0, -0.5, -1.2, 9.0], [-1.0, -1.3, 9.0, 9.0]], dtype=F64)
    kl = K1Reward(0.1, 0.0)
    charges = kl.token_penalties(old, ref, sampled)
    charged = kl.shape(make_graded([[1.0, 1.0]]), charges)
    assert_close(charged.reward, [[0.93, 0.97]], 1e-12, "the row's reward")
    earned = rewards_by_token(charged.reward, charges, sampled)
    assert_close(earned, [[-0.1, 0.05, 0.98, 0.0], [0.0, 0.97, 0.0, 0.0]], 1e-12, "each token's")
    assert_close(earned.sum(dim=1), charged.reward.flatten(), 1e-12, "they add up")
    values = torch.tensor([[0.5, 0.4, 0.3, 0.0], [0.2, 0.1, 0.0, 0.0]], dtype=F64)
    found = Gae(1.0, 1.0).centre(charged, credit_of(rollouts, charged, values, charges))
    assert_close(found, [[0.43, 0.63, 0.68, 0.0], [0.77, 0.87, 0.0, 0.0]], 1e-12, "later charges count, earlier do not")


def test_a_row_without_a_sampled_token_keeps_its_reward_to_itself() -> None:
    mask = torch.tensor([[True, True], [False, False]])
    earned = rewards_by_token(torch.tensor([[1.0, 0.5]], dtype=F64), torch.zeros(2, 2, dtype=F64), mask)
    assert_close(advantage_estimates(earned, torch.zeros(2, 2), mask, 1.0, 1.0), [[1, 1], [0, 0]], 0.0, "unseen")


# --- whitening of tokens ------------------------------------------------------------------------------------


def test_tokens_are_whitened_one_by_one_or_row_by_row() -> None:
    """Two rows, (1, 3) and (5), and an uncounted third.

    tokens: mean 3, variance (4 + 0 + 4)/3 = 8/3, so -+2/1.6329932 = -+1.2247449; Bessel's 8/2 = 4 makes it -+1
    rows:   weights 1/2, 1/2, 1: mean (.5 + 1.5 + 5)/2 = 3.5, variance (.5*6.25 + .5*.25 + 2.25)/2 = 2.75, so
            (-2.5, -.5, 1.5)/1.6583124 = (-1.5075567, -.3015113, .9045340)
    """
    centred = torch.tensor([[1.0, 3.0], [5.0, 0.0], [99.0, 99.0]], dtype=F64)
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    graded = make_graded([[1.0], [5.0], [9.0]], in_statistics=[[True], [True], [False]])
    for by, ddof, expected in (
        (Weights.tokens, 0, [[-1.2247449, 0.0], [1.2247449, 0.0], [0.0, 0.0]]),
        (Weights.tokens, 1, [[-1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]),
        (Weights.rows, 0, [[-1.5075567, -0.3015113], [0.9045340, 0.0], [0.0, 0.0]]),
    ):
        whiten = BatchStd(of=Deviation.centred, by=by, recentre=True, ddof=ddof, eps=0.0, floor=Floor.added)
        assert_close(whiten.of_tokens(centred, mask, graded), expected, 1e-7, f"{by}, ddof {ddof}")


def test_advantages_of_tokens_and_of_responses_are_told_apart_where_the_batch_is_square() -> None:
    """Two responses of two tokens to one prompt, and two of one token to each of two prompts."""
    tokens = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=F64)
    assert_close(expand(tokens, torch.ones(2, 2, dtype=torch.bool)), tokens, 0.0, "each token its own")
    rows = torch.tensor([[1.0, 2.0]], dtype=F64)
    assert_close(expand(rows, torch.ones(2, 2, dtype=torch.bool)), [[1, 1], [2, 2]], 0.0, "each row its own")
    assert_close(expand(tokens, torch.ones(4, 1, dtype=torch.bool)), [[1], [2], [3], [4]], 0.0, "one token each")


# --- the critic ---------------------------------------------------------------------------------------------

ADAMW = Adamw(
    1.0, learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-3, weight_decay=0.0, warmup_updates=0, decay=Decay.constant,
    decay_share=1.0, final_share=0.0,
)  # fmt: skip
WHOLE = Microbatching(10**9, 192)
PLAN = {
    "learning_rate": 1e-2, "warmup_updates": 2, "minibatches": 2, "passes": 2, "value_clip": 0.0, "head_range": 0.5,
    "pretrain_steps": 0,
}  # fmt: skip


def live_critic(plan: SeparateModel | ValueHead, dtype: torch.dtype = F64, cut: Microbatching = WHOLE) -> LiveCritic:
    """A critic over a random trunk in memory, its head drawn as `open` draws it."""
    head = nn.Linear(16, 1, dtype=dtype)
    with torch.no_grad():
        noise = torch.rand(1, 16, generator=torch.Generator().manual_seed(3), dtype=F64)
        head.weight.copy_((2 * noise - 1) * plan.head_range)
        head.bias.zero_()
    own = replace(ADAMW, learning_rate=plan.learning_rate, warmup_updates=plan.warmup_updates)
    return LiveCritic(plan, tiny_model(dtype).base_model, head, own, Fp32(LmHead.same, 1e-3), cut)


def mixed_rollouts() -> Rollouts:
    """Four problems of two responses: prompts of several lengths, injected text, one token, a row nobody sampled."""
    lengths = [5, 1, 7, 3, 2, 6, 4, 4]
    prompts = [(1, 2), (3,), (4, 5, 6, 7), (8, 9, 10)]
    tokens = torch.randint(0, 13, (8, 8), generator=torch.Generator().manual_seed(2))
    rollouts = make_rollouts(lengths, 2, width=8, prompts=prompts, tokens=tokens)
    sampled = rollouts.sampled_mask.clone()
    sampled[2, 3:5] = False  # in the middle
    sampled[5, 4:] = False  # at the end
    sampled[7] = False
    return replace(rollouts, sampled_mask=sampled)


def fit_of(
    critic: LiveCritic, rollouts: Rollouts, old: Tensor, targets: Tensor, mask: Tensor | None = None
) -> dict[str, float]:
    return critic.learn(rollouts, rollouts.sampled_mask if mask is None else mask, old, targets, ComputeAccount())


def weights_of(critic: LiveCritic) -> Tensor:
    return torch.cat([p.detach().flatten() for p in (*critic.head.parameters(), *critic.trunk.parameters())])


def test_a_value_is_that_of_the_state_before_its_token() -> None:
    """Each value is what the critic says at the last position of prompt + earlier tokens, read alone."""
    critic, rollouts = live_critic(SeparateModel(**PLAN)), mixed_rollouts()
    expected = torch.zeros(8, 8, dtype=F64)
    with torch.no_grad():
        for row, t in rollouts.sampled_mask.nonzero().tolist():
            before = (*rollouts.prompt_of_row(row), *rollouts.tokens[row, :t].tolist())
            expected[row, t] = critic.head(critic.trunk(torch.tensor([before])).last_hidden_state[0, -1])
    assert expected[rollouts.sampled_mask].unique().numel() > 15, "the states differ"
    for cut in (Microbatching(10**9, 192), Microbatching(9, 0)):
        critic.microbatching = cut
        assert_close(critic.values(rollouts, ComputeAccount()), expected, 1e-12, "V(s_t) stands in column t")


@pytest.mark.parametrize("kind", [SeparateModel, ValueHead])
def test_microbatches_and_padding_do_not_move_a_critic(kind: type) -> None:
    """Each optimiser step divides by its own tokens, however they are cut; uncounted rows are not among them."""
    rollouts = mixed_rollouts()
    mask = rollouts.sampled_mask.clone()
    mask[3] = False
    generator = torch.Generator().manual_seed(4)
    targets, old = (torch.rand(8, 8, dtype=F64, generator=generator) for _ in range(2))
    plan = kind(**PLAN | {"value_clip": 0.3})
    found = []
    for cut in (Microbatching(10**9, 10**9), Microbatching(20, 192), Microbatching(1, 0)):
        critic = live_critic(plan, cut=cut)
        begun = weights_of(critic)
        signs = fit_of(critic, rollouts, old, torch.where(mask, targets, 77.0), mask)
        assert critic.updates == 4 and float((weights_of(critic) - begun).abs().max()) > 1e-3
        found.append((weights_of(critic), torch.tensor(list(signs.values()), dtype=F64)))
    for weights, signs in found[1:]:
        assert_close(weights, found[0][0], 1e-10, "weights")
        assert_close(signs, found[0][1], 1e-10, "metrics")


def test_the_loss_is_a_mean_over_the_tokens_of_each_optimiser_step() -> None:
    """A head of 0 says 0. Step 1: targets (1), (2, 2, 2) -> (1 + 3*4)/4/2 = 1.625 a token; step 2: (3) -> 4.5.

    The gradient in the bias is minus the mean target, clipped to norm 1 here; the log's loss is per token of all
    steps, (13 + 9)/2/5 = 2.2, where the second value is measured after step 1 has moved by a rate of almost nothing.
    """
    rollouts = make_rollouts([1, 3, 1, 1], 2, width=3, tokens=torch.zeros(4, 3, dtype=torch.long))
    mask = rollouts.sampled_mask.clone()
    mask[3] = False
    targets = torch.tensor([[1.0, 0, 0], [2, 2, 2], [3, 0, 0], [50, 0, 0]], dtype=F64)
    critic = live_critic(SeparateModel(**PLAN | {"head_range": 0.0, "learning_rate": 1e-12, "passes": 1}))
    signs = fit_of(critic, rollouts, torch.zeros(4, 3, dtype=F64), targets, mask)
    assert_close(signs["critic/loss"], 2.2, 1e-9, "per token")
    # Targets 1, 2, 2, 2, 3 have mean 2 and variance 2/5; the old values 0 miss them by (1 + 4*3 + 9)/5 = 22/5.
    assert_close(signs["critic/target"], 2.0, 1e-12, "mean target")
    assert_close(signs["critic/explained_variance"], 1 - 22 / 2, 1e-9, "1 - 4.4/0.4")


def test_the_value_clip_by_hand() -> None:
    """Values are 0, the clip 0.2; per token max(v - target, clip(v, old -+ .2) - target)^2 / 2:

    old .5, target 1:   v 0 -> 1, held at .3 -> .49: 1/2, not clipped
    old .5, target -1:  v 0 -> 1, held at .3 -> 1.69: .845, clipped, and so without gradient
    old .1, target .2:  held at 0 itself, .04/2 = .02, not clipped
    """
    rollouts = make_rollouts([3], 1, tokens=torch.zeros(1, 3, dtype=torch.long))
    plan = SeparateModel(**PLAN | {"value_clip": 0.2, "head_range": 0.0, "minibatches": 1, "passes": 1})
    old, targets = torch.tensor([[0.5, 0.5, 0.1]], dtype=F64), torch.tensor([[1.0, -1.0, 0.2]], dtype=F64)
    signs = fit_of(live_critic(plan), rollouts, old, targets)
    assert_close(signs["critic/loss"], (0.5 + 0.845 + 0.02) / 3, 1e-12, "the larger of the two")
    assert_close(signs["critic/clip_fraction"], 1 / 3, 1e-12, "one of three")
    only = torch.tensor([[False, True, False]])
    assert fit_of(live_critic(plan), rollouts, old, targets, only)["critic/gradient_norm"] == 0.0
    free = replace(plan, value_clip=0.0)
    unclipped = fit_of(live_critic(free), rollouts, old, targets)
    assert_close(unclipped["critic/loss"], (1 + 1 + 0.04) / 6, 1e-12, "the square alone")


def test_a_batch_without_spread_has_no_explained_variance_and_one_without_tokens_no_metrics() -> None:
    """All right: targets are 1 but for the rounding of advantage + value, whose variance explains nothing."""
    critic, rollouts = live_critic(SeparateModel(**PLAN)), mixed_rollouts()
    values = critic.values(rollouts, ComputeAccount())
    graded = make_graded([[1.0, 1.0]] * 4)
    targets = Gae(1.0, 0.95).centre(graded, credit_of(rollouts, graded, values)) + values
    flat = Gae(1.0, 1.0).centre(graded, credit_of(rollouts, graded, values)) + values
    assert "critic/explained_variance" in fit_of(critic, rollouts, values, targets)
    signs = fit_of(critic, rollouts, values, flat)
    assert "critic/explained_variance" not in signs and signs["critic/target"] == pytest.approx(1.0)
    before = weights_of(critic)
    assert fit_of(critic, rollouts, values, flat, torch.zeros(8, 8, dtype=torch.bool)) == {}
    assert torch.equal(weights_of(critic), before)


def test_a_critic_whose_loss_is_not_finite_stops_before_its_weights_move() -> None:
    critic, rollouts = live_critic(SeparateModel(**PLAN)), mixed_rollouts()
    before, old = weights_of(critic), torch.zeros(8, 8, dtype=F64)
    with pytest.raises(FloatingPointError, match="the critic's loss is nan at its update 0"):
        fit_of(critic, rollouts, old, torch.full((8, 8), torch.nan, dtype=F64))
    assert torch.equal(weights_of(critic), before)


def test_a_value_head_leaves_the_policy_alone_and_costs_one_forward_pass() -> None:
    """No gradient reaches the trunk, no weight of it moves; a model of its own is read forwards and backwards."""
    rollouts, old = mixed_rollouts(), torch.zeros(8, 8, dtype=F64)
    flops = {}
    for kind in (ValueHead, SeparateModel):
        critic, account = live_critic(kind(**PLAN | {"passes": 1})), ComputeAccount()
        before = [p.detach().clone() for p in critic.trunk.parameters()]
        critic.learn(rollouts, rollouts.sampled_mask, old, old + 1, account)
        moved = any(not torch.equal(p, was) for p, was in zip(critic.trunk.parameters(), before))
        assert moved == kind.owns_trunk and not any(p.grad is not None for p in critic.trunk.parameters())
        assert account.trained_tokens == 0, "these are the policy's"
        assert (critic.to_state()["trunk"] is not None) == kind.owns_trunk
        flops[kind] = account.flops
    cost = ModelFlops.of(tiny_model().base_model)
    live = [row for row in range(8) if bool(rollouts.sampled_mask[row].any())]
    once = sum(cost.forward(len(rollouts.prompt_of_row(row)), int(rollouts.lengths[row])) for row in live)
    assert flops == {ValueHead: once, SeparateModel: 3 * once}


@pytest.mark.parametrize("kind", [SeparateModel, ValueHead])
def test_a_critic_goes_on_from_its_state_with_the_same_bits(kind: type) -> None:
    rollouts, targets = mixed_rollouts(), torch.rand(8, 8, dtype=F64, generator=torch.Generator().manual_seed(5))
    whole, cut = live_critic(kind(**PLAN)), live_critic(kind(**PLAN))
    old = whole.values(rollouts, ComputeAccount())
    fit_of(whole, rollouts, old, targets)
    fit_of(cut, rollouts, old, targets)
    resumed = live_critic(kind(**PLAN))
    resumed.from_state(cut.to_state())
    assert resumed.updates == 4
    assert fit_of(whole, rollouts, old, targets) == fit_of(resumed, rollouts, old, targets)
    assert torch.equal(weights_of(whole), weights_of(resumed))


def test_a_critic_in_bf16_rounds_its_products_and_keeps_its_weights_in_fp32() -> None:
    rollouts = replace(mixed_rollouts(), sampler_logprobs=torch.zeros(8, 8))
    exact, rounded = (live_critic(SeparateModel(**PLAN), torch.float32) for _ in range(2))
    rounded.precision = Bf16(LmHead.same, 0.1)
    true, rough = exact.values(rollouts, ComputeAccount()), rounded.values(rollouts, ComputeAccount())
    assert rough.dtype is torch.float32
    assert 1e-5 < float((true - rough).abs().max()) < 0.1, "eight bits of mantissa"
    before = weights_of(rounded)
    signs = fit_of(rounded, rollouts, rough, torch.ones(8, 8))
    assert signs["critic/gradient_norm"] > 0 and not torch.equal(weights_of(rounded), before)
    assert {p.dtype for p in (*rounded.head.parameters(), *rounded.trunk.parameters())} == {torch.float32}


def test_a_critic_learns_at_its_own_rate(tiny_base: Path) -> None:
    """Adam's first update moves the bias of a head by the rate: the critic's 0.01, and not the policy's 0.001."""
    plan = ValueHead(**PLAN | {"warmup_updates": 0, "minibatches": 1, "passes": 1})
    critic = open_critic(plan, tiny_base, tiny_model(), ADAMW, Fp32(LmHead.same, 1e-3), WHOLE, torch.device("cpu"), 0)
    critic.head.to(F64)
    rollouts, old = mixed_rollouts(), torch.zeros(8, 8, dtype=F64)
    fit_of(critic, rollouts, old, old + 10)
    assert critic.head.bias.item() == pytest.approx(0.01, rel=0.01) and ADAMW.learning_rate == 0.001


# --- critics in the loop ------------------------------------------------------------------------------------

GAE = ["baseline=gae", "scale=batch_std_tokens"]
BRIEF = [
    "evaluation=brief",
    "evaluation.every=100",
    *(f"evaluation.{s}_problems=8" for s in ("probe", "heldout", "downstream")),
]
SMALL = [*BRIEF, "problems_per_step=4", "group_size=4"]


def test_targets_are_taken_before_the_whitening(tmp_path: Path) -> None:
    """Values begin at 0, so the first targets are the rewards themselves, whatever the scale does afterwards."""
    rows = {}
    for scale in ("none", "batch_std_tokens"):
        overrides = ["baseline=gae_orz", f"scale={scale}", "budget.amount=1", *SMALL]
        folder = run_in_process(tmp_path / scale, *overrides)
        rows[scale] = metrics_of(folder)[1]["metrics"]
    critics = [{k: v for k, v in row.items() if k.startswith("critic/")} for row in rows.values()]
    assert critics[0] == critics[1] and critics[0]["critic/value"] == 0.0
    assert critics[0]["critic/target"] == pytest.approx(rows["none"]["advantage/mean"], abs=1e-9), "R - 0"
    assert abs(rows["batch_std_tokens"]["advantage/mean"]) < 1e-6 < critics[0]["critic/target"]


def test_the_loop_charges_tokens_where_they_fell(tmp_path: Path) -> None:
    """With values of 0, gamma and lambda 1, a response's first token is worth its whole reward, each charge once."""
    folder = run_in_process(
        tmp_path, "baseline=gae_orz", "scale=none", "critic.learning_rate=1e-12", "kl=k1_reward", "kl.kl_coef=1",
        "optimizer.learning_rate=3e-3", "optimizer.warmup_updates=1", "budget.amount=2", "rollouts_every=1", *SMALL,
    )  # fmt: skip
    table = pd.read_parquet(folder / "rollouts" / "step=000002.parquet")
    assert table["component_k1"].abs().max() > 0.1, "the policy has left its reference"
    assert_close(table["token_advantage"].map(lambda row: row[0]), table["reward"], 1e-5, "what is still to be earned")


@pytest.mark.extended
def test_a_critic_is_trained_alone_first_and_learns(tmp_path: Path, tiny_base: Path) -> None:
    """Six steps without the policy: its weights keep their bits, the values come to explain fresh rewards.

    A critic of 0 explains 1 - E[R^2]/Var[R] = -p/(1 - p) of rewards that are 1 with chance p, one that knew only their
    mean nothing; what is above 0 is read off the states. Lambda is 1, so no value is in its own target.
    """
    critic = ["pretrain_steps=6", "learning_rate=2e-3", "warmup_updates=5", "minibatches=8", "passes=2", "value_clip=0"]
    folder = run_in_process(
        tmp_path, "baseline=gae_orz", "scale=batch_std_tokens", *(f"critic.{field}" for field in critic),
        "budget.amount=8", "checkpoint_every=6", "keep_checkpoints=9", *BRIEF,
    )  # fmt: skip
    rows = [row["metrics"] for row in metrics_of(folder)[1:]]
    assert [row["train/updates"] for row in rows] == [0] * 6 + [4, 4]
    assert [row["train/skipped_updates"] for row in rows] == [4] * 6 + [0, 0]
    assert all(row["critic/gradient_norm"] > 0 for row in rows)
    # what the waiting policy sampled never enters a loss
    drawn = [row["budget/sampled_tokens"] - row["budget/discarded_tokens"] for row in rows]
    assert drawn[5] < rows[5]["budget/sampled_tokens"] / 2 < rows[5]["budget/discarded_tokens"]
    assert rows[5]["budget/trained_tokens"] == 0 < rows[6]["budget/trained_tokens"]
    assert "train/loss" not in rows[5] and rows[6]["train/learning_rate"] < rows[7]["train/learning_rate"]
    saved = [tiny_base, *(folder / "checkpoints" / f"step={step:06d}" for step in (6, 8))]
    base, waited, moved = (load_file(place / "model.safetensors") for place in saved)
    assert all(torch.equal(base[name], waited[name]) for name in waited)
    assert any(not torch.equal(waited[name], moved[name]) for name in waited)
    explained = [row["critic/explained_variance"] for row in rows]
    assert explained[0] < -0.3 and sum(explained[1:6]) / 5 > 0.05


def same_critic(one: Path, other: Path) -> None:
    """Same bits of the critic in the last checkpoint."""
    ours, theirs = (
        torch.load(folder / "checkpoints" / "step=000006" / "state.pt", weights_only=True)["critic"]
        for folder in (one, other)
    )
    assert ours["updates"] == theirs["updates"] == 24
    for part in ("head", "trunk"):
        assert (ours[part] is None) == (theirs[part] is None)
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in ours[part] or ())


SIX_STEPS = ["budget.amount=6", "checkpoint_every=2", "keep_checkpoints=9", *SMALL]


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([*GAE, "critic.pretrain_steps=4"], id="separate_model"),
        pytest.param([*GAE, "critic=value_head"], id="value_head", marks=pytest.mark.extended),
        pytest.param(["recipe=vineppo", "baseline.continuations=2"], id="monte_carlo"),
    ],
)
def test_a_run_that_was_cut_goes_on_with_the_same_bits(tmp_path: Path, overrides: list[str]) -> None:
    """The folder as a kill after step 5 leaves it: the log is ahead of the last checkpoint, that of step 2."""
    overrides = [*overrides, *SIX_STEPS]
    whole = run_in_process(tmp_path / "whole", *overrides)
    cut = tmp_path / "cut" / "run" / "seed=0"
    shutil.copytree(whole, cut)
    (cut / "DONE").unlink()
    for step in (4, 6):
        shutil.rmtree(cut / "checkpoints" / f"step={step:06d}")
    lines = (cut / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (cut / "metrics.jsonl").write_bytes(b"".join(lines[:6]))
    assert run_in_process(tmp_path / "cut", *overrides) == cut
    same_ending(whole, cut)
    if "baseline=gae" in overrides:
        same_critic(whole, cut)


# --- a world in a table -------------------------------------------------------------------------------------

SYMBOLS = ("1", ";", "#", "<eos>")
# Quarters: the chance of each symbol after the prompt's "?" and after each symbol that does not end the response.
CHANCES = {"?": (1, 1, 2, 0), "1": (1, 1, 0, 2), ";": (1, 0, 3, 0), "#": (3, 1, 0, 0)}
BUDGET = 4  # response tokens
PATTERNS = 4**BUDGET  # of noise: a quarter of [0, 1) for each token


@dataclass
class TableSession(EngineSession):
    """An engine whose policy is the table, drawn by inverse CDF over `SYMBOLS` from one uniform number a token."""

    ids: dict[str, int]
    uniform: Callable[[NoiseKey, int], float]
    version: int = 0

    def generate(self, requests: Sequence[Request], on_finish: OnFinish | None = None) -> list[Completion]:
        return [self._drawn(request) for request in requests]

    def _drawn(self, request: Request) -> Completion:
        symbols = {number: symbol for symbol, number in self.ids.items()}
        tokens, stop = list(request.prompt + request.prefix), StopReason.LENGTH
        begun = len(tokens)
        for position in range(len(request.prefix), request.params.max_tokens):
            chances = CHANCES[symbols[tokens[-1]]]
            if request.params.temperature == 0:
                place = chances.index(max(chances))
            else:
                number = self.uniform(request.noise, position)
                place = sum(number >= sum(chances[: n + 1]) / 4 for n in range(4))
            tokens.append(self.ids[SYMBOLS[place]])
            if SYMBOLS[place] == "<eos>":
                stop = StopReason.EOS
                break
        drawn = tuple(tokens[begun:])
        return Completion.unsampled(drawn, stop)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise AssertionError("the table does not learn")

    def close(self) -> None:
        """Nothing is held."""


def counter_noise(key: NoiseKey, position: int) -> float:
    return float(token_uniforms(key, position, position + 1)[0])


def pattern_noise(pattern: int) -> Callable[[NoiseKey, int], float]:
    """End `response` reads noise pattern `pattern + response`, so as many ends as patterns are all there can be."""
    return lambda key, position: ((pattern + key.response) // 4**position % 4 + 0.5) / 4


@dataclass(frozen=True)
class World:
    """The run and what it holds with the table for an engine, and everything the table can say to the prompt."""

    run: RunConfig
    state: RunState
    problems: tuple[Problem, ...]

    @property
    def ids(self) -> dict[str, int]:
        return {symbol: self.state.tokenizer.convert_tokens_to_ids(symbol) for symbol in ("?", *SYMBOLS)}

    def with_noise(self, uniform: Callable[[NoiseKey, int], float]) -> World:
        session = TableSession(self.ids, uniform)
        return replace(self, state=replace(self.state, session=session, account=ComputeAccount()))

    def batch(self, *responses: str) -> tuple[Rollouts, Graded]:
        """These responses, as many to each problem, with `.` for the end of text; graded by the real verifier."""
        ids, size = self.ids, len(responses) // len(self.problems)
        said = [[ids["<eos>" if symbol == "." else symbol] for symbol in response] for response in responses]
        how = {True: StopReason.EOS, False: StopReason.LENGTH}
        completions = [Completion.unsampled(t, how[t[-1] == ids["<eos>"]]) for t in said]
        rollouts = to_rollouts(self.problems, [(ids["?"],)] * len(self.problems), size, completions)
        return rollouts, grade(rollouts, decode(self.state.tokenizer, rollouts), self.run.reward, [])

    def centred(self, baseline: Baseline, rollouts: Rollouts, graded: Graded, values: Tensor | None = None) -> Tensor:
        """What the baseline makes of the batch, through the real estimator; [N, T]."""
        charges = torch.zeros(rollouts.tokens.shape, dtype=F64)
        earned = rewards_by_token(graded.reward, charges, rollouts.sampled_mask)
        ends = continuations_of(self.run, self.state, rollouts)
        centred = baseline.centre(graded, Credit(rollouts, earned, values, ends))
        return torch.where(rollouts.sampled_mask, centred if baseline.per_token else centred.reshape(-1, 1), 0.0)


@pytest.fixture(scope="module")
def opened() -> World:
    run = to_run(compose_config(["world=tiny", "tracking=none", f"engine.max_tokens={BUDGET}"]))
    return World(run, open_state(run, torch.device("cpu"), None), (Problem(7, "?", "1", 1),))


@pytest.fixture
def world(opened: World) -> World:
    return opened.with_noise(counter_noise)


@cache
def chance(response: str) -> float:
    """The policy's probability of a response or of its beginning."""
    total = 1.0
    for before, symbol in zip("?" + response, response):
        total *= CHANCES[before][SYMBOLS.index("<eos>" if symbol == "." else symbol)] / 4
    return total


def sayings(beginning: str = "") -> Iterator[str]:
    """Every whole response that begins so and has a chance."""
    if beginning.endswith(".") or len(beginning) == BUDGET:
        yield beginning
        return
    for symbol in "1;#.":
        if chance(beginning + symbol) > 0:
            yield from sayings(beginning + symbol)


@cache
def exact_value(beginning: str) -> float:
    """The chance of a right response, `...#1.`, once it has begun so."""
    return sum(chance(said) for said in sayings(beginning) if said.endswith("#1.")) / chance(beginning)


EVERYTHING = tuple(sayings())
LOGITS = torch.tensor([CHANCES[before] for before in "?1;#"], dtype=F64).log()


def policy_gradients(advantages: Tensor, responses: Sequence[str] = EVERYTHING) -> Tensor:
    """[N, 16]: sum_t advantage_t d log pi(token_t) / d logits of each response, from the softmax's own gradient."""
    found = torch.zeros(len(responses), 4, 4, dtype=F64)
    table = LOGITS.exp() / 4
    for row, response in enumerate(responses):
        for t, (before, symbol) in enumerate(zip("?" + response, response)):
            found[row, "?1;#".index(before)] -= advantages[row, t] * table["?1;#".index(before)]
            found[row, "?1;#".index(before), "1;#.".index(symbol)] += advantages[row, t]
    return found.flatten(1)


CHANCE = torch.tensor([chance(response) for response in EVERYTHING], dtype=F64)


def true_gradient() -> Tensor:
    """d J / d logits by autograd through the chances of all right responses; J is the chance of a right response."""
    leaf = torch.where(LOGITS.isinf(), -1e9, LOGITS).requires_grad_()
    logprobs = torch.log_softmax(leaf, dim=1)
    total = sum(
        torch.stack([logprobs["?1;#".index(b), "1;#.".index(s)] for b, s in zip("?" + said, said)]).sum().exp()
        for said in EVERYTHING
        if said.endswith("#1.")
    )
    total.backward()
    return leaf.grad.flatten()


def right_critic() -> Tensor:
    """[N, T]: the exact value of the state before each token of everything the table can say."""
    return torch.tensor(
        [[exact_value(said[:t]) if t < len(said) else 0.0 for t in range(BUDGET)] for said in EVERYTHING], dtype=F64
    )


@pytest.mark.extended
def test_the_table_is_what_it_says(world: World) -> None:
    """Right are `#1.` at 1/2 * 3/4 * 1/2 = 3/16, and `;#1.` at 1/4 * 3/4 * 3/4 * 1/2 = 9/128: V(prompt) = 33/128."""
    assert_close(CHANCE.sum(), 1.0, 1e-15, "all there is")
    assert (exact_value(""), exact_value(";"), exact_value("1;")) == (33 / 128, 9 / 32, 0.0)
    _, graded = world.batch(*EVERYTHING)
    right = [float(said.endswith("#1.")) for said in EVERYTHING]
    assert graded.reward[0].tolist() == right and sum(right) == 2


def test_values_of_steps_by_hand_through_the_real_estimator(world: World) -> None:
    """All noise patterns as ends make the values exact: V(prompt) = 33/128, V(;) = 36/128, V(1;) = 0.

    ;#1.  right in two steps, (36 - 33)/128 and then 1 - 36/128: in sum 1 - 33/128
    #1.   right in one: 1 - 33/128
    ;#1;  cut where a step ends: no further state, so -36/128 for the last step
    1;1;  0 - 33/128, then 0 - 0
    .     one token: -33/128
    """
    exact = MonteCarlo(PATTERNS)
    rollouts, graded = world.batch(";#1.", "#1.", ";#1;", "1;1;", ".")
    found = world.with_noise(pattern_noise(0)).centred(exact, rollouts, graded) * 128
    rows = [[3, 92, 92, 92], [95, 95, 95, 0], [3, -36, -36, -36], [-33, -33, 0, 0], [-33, 0, 0, 0]]
    assert_close(found, rows, 1e-10, "in 128ths")
    left_out = replace(graded, in_statistics=torch.tensor([[False, True, False, True, True]]))
    rows[0] = rows[2] = [0, 0, 0, 0]
    fewer = world.with_noise(pattern_noise(0))
    assert_close(fewer.centred(exact, rollouts, left_out) * 128, rows, 1e-10, "rows that are not counted get 0")
    assert fewer.state.account.completions == 2 * PATTERNS, "and their states are not asked for: the prompt and `1;`"
    assert not world.centred(exact, rollouts, replace(graded, in_statistics=torch.zeros(1, 5, dtype=torch.bool))).any()


def test_the_steps_of_a_response_add_up_to_its_reward_less_the_prompts_value(world: World) -> None:
    """With two noisy ends a state, whatever they say: the values between cancel."""
    rollouts, graded = world.batch(*EVERYTHING)
    found = world.centred(MonteCarlo(2), rollouts, graded)
    begins = torch.tensor([[t == 0 or said[:t].endswith(";") for t in range(BUDGET)] for said in EVERYTHING])
    steps = torch.where(begins & rollouts.response_mask, found, 0.0).sum(dim=1)
    prompt = continuations_of(world.run, world.state, rollouts).rewards([State(0, ())], 2).mean()
    assert_close(steps, graded.reward[0] - prompt, 1e-12, "telescoped")
    assert begins[:, 1:].any() and steps.unique().numel() == 2


def test_what_estimates_cost_is_counted_state_by_state(world: World) -> None:
    """Each distinct state's context is read once, each of its ends token by token; no end is trained on."""
    rollouts, graded = world.batch(";#1.", ";#1.", ";1#1", "#1.")
    drawn: list[tuple[int, int]] = []

    def noise(key: NoiseKey, position: int) -> float:
        drawn.append((key.response, position))
        return counter_noise(key, position)

    asked = world.with_noise(noise)
    asked.centred(MonteCarlo(3), rollouts, graded)
    account, cost = asked.state.account, asked.state.model_flops
    assert account.completions == 2 * 3, "the prompt and `;`, however many responses pass through them"
    assert account.estimation_tokens == account.sampled_tokens == len(drawn)
    assert (account.prompts, account.trained_tokens, account.discarded_tokens) == (0, 0, 0)
    # A token at response position p is decoded at position 1 + p of the sequence; contexts are of 1 and 2 tokens.
    decoded = sum(cost.span(1 + position, 2 + position) for _, position in drawn)
    assert account.flops == cost.span(0, 1) + cost.span(0, 2) + decoded


def test_a_greedy_response_is_the_baseline_of_its_own_prompt(world: World) -> None:
    """Most likely is `#1.`: right where the answer is 1, wrong where it is 11; three tokens and one end a prompt."""
    both = replace(world, problems=(Problem(7, "?", "1", 1), Problem(8, "?", "11", 2)))
    rollouts, graded = both.batch("#1.", "1.", "#11.", "#1.")
    found = Greedy().centre(
        graded, Credit(rollouts, torch.zeros(4, 4), None, continuations_of(both.run, both.state, rollouts))
    )
    assert_close(found, [[1 - 1, 0 - 1], [1 - 0, 0 - 0]], 0.0, "R - R(greedy)")
    assert (both.state.account.completions, both.state.account.estimation_tokens) == (2, 6)
    left_out = replace(graded, in_statistics=torch.tensor([[True, False], [False, True]]))
    again = Greedy().centre(
        left_out, Credit(rollouts, torch.zeros(4, 4), None, continuations_of(both.run, both.state, rollouts))
    )
    assert_close(again, [[0, 0], [0, 0]], 0.0, "uncounted rows")


def test_estimates_are_of_the_shaped_reward(world: World) -> None:
    """The greedy `#1.` is right with three of four tokens: 1 less 3/4 of the ramp over the whole budget."""
    rollouts, _ = world.batch("#1.")
    run = replace(world.run, reward_shaping=SoftOverlong(BUDGET, BUDGET, 1.0, 1.0, -1.0))
    assert continuations_of(run, world.state, rollouts).rewards([State(0, ())], 1, greedy=True).tolist() == [[0.25]]


@pytest.fixture(scope="module")
def of_each_noise(opened: World) -> Tensor:
    """[256, N, 16]: gradients of every response, valued by one end a state, under each pattern of noise."""
    rollouts, graded = opened.batch(*EVERYTHING)
    found = []
    for pattern in range(PATTERNS):
        advantages = opened.with_noise(pattern_noise(pattern)).centred(MonteCarlo(1), rollouts, graded)
        assert set(advantages.unique().tolist()) <= {-1.0, 0.0, 1.0}, "single ends are all or nothing"
        found.append(policy_gradients(advantages))
    return torch.stack(found)


@pytest.mark.extended
def test_one_end_a_state_gives_the_true_gradient_in_the_mean_over_all_noise(
    world: World, of_each_noise: Tensor
) -> None:
    """VinePPO with K = 1, exactly: over every response and every pattern of noise, each with its chance.

    The ends of all states share their noise, and a pattern has 1/256. The gradient through values is that of the
    chance of a right response, to rounding; so is that of a critic that is right, at any lambda, and of a critic that
    is wrong, at lambda 1 alone.
    """
    rollouts, graded = world.batch(*EVERYTHING)
    assert_close(CHANCE @ of_each_noise.mean(dim=0), true_gradient(), 1e-12, "unbiased")
    assert float((CHANCE @ of_each_noise[0] - true_gradient()).abs().max()) > 0.01, "which no one noise is"
    critic = right_critic()
    for lam in (1.0, 0.95, 1e-9):
        found = world.centred(Gae(1.0, lam), rollouts, graded, critic)
        assert_close(CHANCE @ policy_gradients(found), true_gradient(), 1e-12, f"a critic that is right, lam {lam}")
    wrong = critic**2 + 0.1 * rollouts.sampled_mask
    unmoved = world.centred(Gae(1.0, 1.0), rollouts, graded, wrong)
    assert_close(CHANCE @ policy_gradients(unmoved), true_gradient(), 1e-12, "any baseline of the state, lam 1")
    leaning = world.centred(Gae(1.0, 0.5), rollouts, graded, wrong)
    assert float((CHANCE @ policy_gradients(leaning) - true_gradient()).abs().max()) > 1e-3, "bias needs lam below 1"


@pytest.mark.extended
def test_values_from_counter_based_noise_average_to_the_exact_ones(world: World) -> None:
    """1000 ends of each state, ten to a step as in training: within 4 standard errors sqrt(v (1 - v) / 1000)."""
    rollouts, _ = world.batch(*EVERYTHING)
    states = ("", ";", "#", "#1", ";#1", "1;")
    found = torch.zeros(len(states), 1000, dtype=F64)
    asked = [State(0, tuple(world.ids[symbol] for symbol in said)) for said in states]
    for step in range(100):
        world.state.account.steps = step
        found[:, step * 10 : step * 10 + 10] = continuations_of(world.run, world.state, rollouts).rewards(asked, 10)
    for said, mean in zip(states, found.mean(dim=1).tolist()):
        exact = exact_value(said)
        assert abs(mean - exact) <= 4 * math.sqrt(exact * (1 - exact) / 1000), f"V({said}): {mean}, {exact}"
    assert [exact_value(said) for said in states] == [33 / 128, 9 / 32, 3 / 8, 1 / 2, 1 / 2, 0.0]
    # One noise for the same end at the same position: where `#` goes on with 1 and is right, so is that end of `#1`.
    assert bool((found[3][found[2] == 1] == 1).all()) and 0 < float(found[2].sum()) < float(found[3].sum())


@pytest.mark.extended
def test_values_of_steps_take_variance_from_the_gradient(world: World, of_each_noise: Tensor) -> None:
    """The summed variance of the gradient's entries, exactly, for eight responses and nine ends of each state.

    One response, values known: no baseline .2281, the prompt's value .2106, that of each step .1537, of each token
    .0903. Eight responses: no baseline .0285, leave one out .0333, values of steps by nine ends .0251.

    leave one out: as it is the U-statistic of (R_i - R_j)(g_i - g_j) / 2, its variance is, with zeta_1 that of the
    kernel's mean given i and zeta_2 that of the kernel, (4 (n - 2) zeta_1 + 2 zeta_2) / (n (n - 1))
    nine ends: variance of one response / n, and a ninth of the noise of one end; that noise is shared by all
    responses, so its part that is in the mean over responses does not shrink with n
    """
    rollouts, graded = world.batch(*EVERYTHING)
    truth, n = true_gradient(), 8

    def variance(advantages: Tensor) -> float:
        return float(CHANCE @ (policy_gradients(advantages) - truth).pow(2).sum(dim=1))

    raw = world.centred(NoBaseline(), rollouts, graded)
    exact = world.with_noise(pattern_noise(0)).centred(MonteCarlo(PATTERNS), rollouts, graded)
    tokens = world.centred(Gae(1.0, 1e-9), rollouts, graded, right_critic())
    prompt = raw - exact_value("") * rollouts.sampled_mask
    one = [variance(advantages) for advantages in (raw, prompt, exact, tokens)]
    assert_close(one, [0.22806, 0.21059, 0.15370, 0.09029], 1e-5, "of one response")

    reward, scores = graded.reward[0], policy_gradients(rollouts.sampled_mask.to(F64))
    kernel = (reward[:, None, None] - reward[None, :, None]) * (scores[:, None] - scores[None]) / 2
    given = torch.einsum("j,ijd->id", CHANCE, kernel)
    assert_close(CHANCE @ given, truth, 1e-12, "leave one out is unbiased")
    first = float(CHANCE @ (given - truth).pow(2).sum(dim=1))
    both = float(torch.einsum("i,j,ij->", CHANCE, CHANCE, (kernel - truth).pow(2).sum(dim=2)))
    group = (4 * (n - 2) * first + 2 * both) / (n * (n - 1))

    noise = float(CHANCE @ (of_each_noise - policy_gradients(exact)).pow(2).sum(dim=2).mean(dim=0))
    shared = float((torch.einsum("i,pid->pd", CHANCE, of_each_noise) - truth).pow(2).sum(dim=1).mean())
    steps = one[2] / n + (noise / n + (1 - 1 / n) * shared) / 9
    assert_close([one[0] / n, group, steps], [0.02851, 0.03331, 0.02505], 1e-5, "none, leave one out, nine ends")

    # The same from what training draws: sixty batches under the real noise, their mean within 4 standard errors.
    generator = torch.Generator().manual_seed(0)
    for option, exactly in ((LeaveOneOut(Singleton.zero), group), (MonteCarlo(9), steps)):
        drawn = []
        for step in range(60):
            said = torch.multinomial(CHANCE, n, replacement=True, generator=generator).tolist()
            responses = [EVERYTHING[k] for k in said]
            world.state.account.steps = step
            found = world.centred(option, *world.batch(*responses))
            drawn.append(policy_gradients(found, responses).mean(dim=0))
        sample = torch.stack(drawn)
        error = sample.std(dim=0) / math.sqrt(len(sample))
        assert bool(((sample.mean(dim=0) - truth).abs() <= 4 * error + 1e-12).all()), option
        assert 0.5 < float((sample - truth).pow(2).sum(dim=1).mean()) / exactly < 1.5, option
