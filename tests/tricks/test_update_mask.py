"""Numbers worked out by hand for the masks of an update, and what the loss makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import F64, assert_close, inputs_of, loss_and_gradient, make_run, noise_of, random_scene, step_of
from loss_options import AGGREGATIONS, SURROGATES, UPDATE_MASKS, label

from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.policy.batching import make_minibatch
from grpo_lab.tricks.aggregation import SequenceMean
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.kl import K2Loss
from grpo_lab.tricks.surrogate import Reinforce
from grpo_lab.tricks.update_mask import Cppo, NoUpdateMask, Opsm, UpdateMask, Vaco
from grpo_lab.types import Microbatching

SAMPLER = -3.0


def kept(mask: UpdateMask, drifts: list[float], advantage: float, *, junk: float = 0.0) -> list[bool]:
    """What stays of one response whose log-probs moved by `drifts` from the sampler's, with two columns of padding."""
    inside = torch.arange(len(drifts) + 2)[None] < len(drifts)
    sampler = torch.where(inside, SAMPLER, junk)
    logprobs = torch.where(inside, torch.tensor([[*(SAMPLER + drift for drift in drifts), 0, 0]], dtype=F64), -junk)
    found = mask(logprobs.to(F64), sampler.to(F64), torch.full_like(logprobs, advantage).to(F64), inside)
    return found[0, : len(drifts)].tolist()


@pytest.mark.parametrize("junk", [0.0, -9.0])
def test_opsm_drops_negative_responses_that_became_less_likely(junk: float) -> None:
    drifts = [-0.4, 0.1, 0.0]  # mean of log sampler - log pi: .1
    assert kept(Opsm(0.11), drifts, -1.0, junk=junk) == [True] * 3
    assert kept(Opsm(0.09), drifts, -1.0, junk=junk) == [False] * 3
    assert kept(Opsm(0.09), drifts, 1.0, junk=junk) == [True] * 3, "A > 0"
    assert kept(Opsm(0.09), drifts, 0.0, junk=junk) == [True] * 3, "A = 0"
    assert kept(Opsm(0.09), [0.4, -0.1, 0.0], -1.0, junk=junk) == [True] * 3, "the mean is signed"


def logs(*ratios: float) -> list[float]:
    return [math.log(ratio) for ratio in ratios]


@pytest.mark.parametrize("advantage,far", [(2.0, [False, True, True]), (-2.0, [True, False, True])])
def test_vaco_drops_what_moves_on_in_a_response_that_is_far(advantage: float, far: list[bool]) -> None:
    ratios = logs(1.5, 0.9, 1.0)  # mean |rho - 1| is .2
    assert kept(Vaco(0.21), ratios, advantage) == [True] * 3
    assert kept(Vaco(0.19), ratios, advantage) == far


def test_vaco_acts_below_one_where_open_instructs_bounds_cannot() -> None:
    """Its bounds are those of a ratio: the upper one has to exceed 1, and a lower one drops responses that are near."""
    assert kept(Vaco(1e-3), logs(1.01, 1.01), 1.0) == [False, False]
    assert kept(Vaco(0.5), logs(1.6, 1.6), 1.0) == [False, False]
    assert kept(Vaco(1e-3), logs(1.0, 1.0), 1.0) == [True, True], "on-policy everything stays"


P = math.exp(SAMPLER)  # .0497871


def moved(*distances: float) -> list[float]:
    """Drifts after which the probabilities are so far above the sampler's."""
    return [math.log((P + distance) / P) for distance in distances]


def test_cppo_tightens_as_the_prefix_drifts_and_relaxes_with_position() -> None:
    # D = .1 four times, weights 1, .9, .8, .7 (floor .7): Z = .1, .09, .08, .07. The budget is fixed at .05:
    # c = delta, delta + .05 - .1, delta + .095 - .19, delta + .135 - .27
    mask = Cppo(0.12, 0.05, 0.05, 0.7)  # c = .12, .07, .025, -.015
    assert kept(mask, moved(0.1, 0.1, 0.1, 0.1), 1.0) == [True, False, False, False]
    mask = Cppo(0.20, 0.05, 0.05, 0.7)  # c = .2, .15, .105, .065
    assert kept(mask, moved(0.1, 0.1, 0.1, 0.1), 1.0) == [True, True, True, False]
    # a prefix near the sampler gives no more than delta: Z = 0, 0, .08, .07 under c = .075, .075, .075, .09 - .005
    assert kept(Cppo(0.075, 0.05, 0.05, 0.7), moved(0.0, 0.0, 0.1, 0.1), 1.0) == [True, True, False, True]
    # what comes back stays, and its distance is spent all the same
    assert kept(Cppo(0.12, 0.05, 0.05, 0.7), moved(0.1, 0.1, 0.1, 0.1), -1.0) == [True] * 4
    assert kept(Cppo(0.05, 0.02, 0.02, 1.0), moved(-0.04, 0.04), 1.0) == [True, False]  # c_2 = .05 + .02 - .04


def test_the_budget_of_cppo_is_a_quantile_of_the_response_within_its_bounds() -> None:
    # |pi - sampler| 0, .1, .1: the 90th percentile is .1, cut. Z = 0, .1, .1; c_3 = .101 + 2 b - .1
    for largest, third in ((0.04, False), (0.06, True), (0.1, True)):  # .081, and beyond delta
        found = kept(Cppo(0.101, 0.02, largest, 1.0), moved(0.0, 0.1, 0.1), 1.0)
        assert found == [True, True, third], largest
    assert kept(Cppo(0.101, 0.06, 0.06, 1.0), moved(0.0, 0.1, 0.1), 1.0) == [True, True, True]
    assert kept(Cppo(0.101, 0.02, 0.04, 1.0), moved(0.1), 1.0) == [True], "one token"
    assert kept(Cppo(0.099, 0.02, 0.04, 1.0), moved(0.1), 1.0) == [False]


@pytest.mark.parametrize(
    "build",
    [
        lambda: Opsm(0.0),
        lambda: Vaco(-1.0),
        lambda: Cppo(0.1, 0.0, 0.1, 0.8),
        lambda: Cppo(0.1, 0.2, 0.1, 0.8),
        lambda: Cppo(0.1, 0.1, 0.1, 1.1),
    ],
)
def test_numbers_out_of_range(build) -> None:
    with pytest.raises(ValueError, match="must be"):
        build()


# --- in the loss ---------------------------------------------------------------------------------------------

LENGTHS, ADVANTAGES = [2, 2, 1, 2], [1.0, -1.0, -1.0, -1.0]
NOW = torch.tensor([[-3.5, -3.5], [-3.5, -3.5], [-3.0, 0.0], [-3.0, -2.9]], dtype=F64)  # the second row fell by .5


def step(mask: UpdateMask, **options):
    inputs = step_of(LENGTHS, ADVANTAGES, 2)
    rollouts = replace(inputs.rollouts, sampler_logprobs=torch.full((4, 2), SAMPLER, dtype=F64))
    run = make_run(update_mask=mask, surrogate=Reinforce(), **options)
    return run, replace(inputs, rollouts=rollouts)


@pytest.mark.parametrize("denominator", [Original(), Survivors()], ids=label)
@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=label)
def test_a_masked_row_counts_in_every_denominator(aggregation, denominator) -> None:
    """As in the paper, TRL and slime. So masking lowers the loss, and survivors are those before the update."""
    plain, masked = (
        loss_and_gradient(*step(mask, aggregation=aggregation, denominator=denominator), NOW)[1]
        for mask in (NoUpdateMask(), Opsm(0.1))
    )
    assert (plain[1] != 0).all() and (masked[1] == 0).all()
    assert torch.equal(masked[[0, 2, 3]], plain[[0, 2, 3]]), "no other row weighs more"


def test_a_masked_row_keeps_its_kl_term() -> None:
    run, inputs = step(Opsm(0.1), kl=K2Loss(0.3, 0.0), aggregation=SequenceMean(0.0))
    inputs = replace(inputs, ref_logprobs=torch.full((4, 2), -2.5, dtype=F64))
    gradient = loss_and_gradient(run, inputs, NOW)[1]
    assert_close(gradient[1], [0.3 * -1.0 / 8] * 2, 1e-12, "kl_coef * (now - ref), of 4 rows of 2 tokens")


def test_the_mask_follows_the_learner_from_update_to_update() -> None:
    run, inputs = step(Opsm(0.1))
    assert (loss_and_gradient(run, inputs, NOW)[1][1] == 0).all()
    back = NOW.clone()
    back[1] = -3.05
    assert (loss_and_gradient(run, inputs, back)[1][1] != 0).all(), "it has come within .1"


def test_the_share_of_masked_tokens_is_logged() -> None:
    run, inputs = step(Opsm(0.1))
    (batch,) = make_minibatch(inputs, range(2), run.denominator, Microbatching(10_000, 192))
    logprobs = NOW.flatten()[batch.tokens].requires_grad_()
    sums = policy_loss(run.loss_tricks, batch, logprobs, -logprobs).sums
    assert (float(sums["masked"]), float(sums["tokens"])) == (2.0, 7.0)


@pytest.mark.parametrize("surrogate", SURROGATES, ids=label)
def test_a_mask_takes_a_token_out_of_any_surrogate_and_changes_no_other(surrogate) -> None:
    for mask in UPDATE_MASKS:
        if not (surrogate.sequence_level and mask.divides_rows):  # refused by the rule mask_is_of_tokens
            check_mask(mask, surrogate)


def check_mask(mask, surrogate) -> None:
    scene = random_scene(0, 3, 4, 6)
    inputs = inputs_of(make_run(), scene)
    (batch,) = make_minibatch(inputs, range(3), Original(), Microbatching(10_000, 192))
    now, real = scene.logprobs.flatten()[batch.tokens], batch.loss_mask
    stays = mask(now, batch.sampler_logprobs, batch.advantages, real)
    assert (real & ~stays).any() and (real & stays).any(), mask
    gradients = []
    for option in (NoUpdateMask(), mask):
        tricks = make_run(update_mask=option, surrogate=surrogate).loss_tricks
        (ready,) = mark_tokens(tricks, [batch], [now], noise_of(inputs.rollouts))
        leaf = now.clone().requires_grad_()
        policy_loss(tricks, ready, leaf, -leaf).loss.backward()
        gradients.append(leaf.grad)
    plain, masked = gradients
    if not surrogate.squares_rows and not surrogate.sequence_level:  # whose loss of a token reads its whole row
        assert torch.equal(masked[real & stays], plain[real & stays]), mask
    assert (masked[real & ~stays] == 0).all() or surrogate.squares_rows, mask


def test_nothing_is_masked_where_nothing_moved() -> None:
    same = torch.full((4, 2), SAMPLER, dtype=F64)
    for mask in UPDATE_MASKS:
        run, inputs = step(mask)
        plain = loss_and_gradient(make_run(surrogate=Reinforce()), inputs, same)
        assert torch.equal(loss_and_gradient(run, inputs, same)[1], plain[1])
