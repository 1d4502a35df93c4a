"""What must hold for any rewards, any lengths and any way to cut a step, in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from helpers import (
    F64,
    Scene,
    advantages_of,
    assert_close,
    batch_of_rows,
    inputs_of,
    loss_and_gradient,
    make_graded,
    make_rollouts,
    make_run,
    random_scene,
    run_scene,
    share_of,
    tiny_model,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_lab.batching import Cut, StepInputs, make_minibatch
from grpo_lab.loss import policy_loss
from grpo_lab.policy import token_logprobs
from grpo_lab.tricks.aggregation import Constant, PromptMean, SequenceMean, SequenceSum, TokenMean
from grpo_lab.tricks.baseline import GroupMean, LeaveOneOut, NoBaseline
from grpo_lab.tricks.convention import Scope, Singleton, Width
from grpo_lab.tricks.correction import TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.tricks.scale import GroupStd, NoScale
from grpo_lab.tricks.surrogate import Ppo, Reinforce
from grpo_lab.tricks.truncation import MaskAfter

TOLERANCE = 1e-10
GROUP_BASELINES = (GroupMean(Singleton.zero), LeaveOneOut(Singleton.zero))
SCALES = (NoScale(), GroupStd(0, 1e-6, False, Singleton.zero), GroupStd(1, 1e-6, False, Singleton.zero))
SURROGATES = (Ppo(0.2, 0.2), Ppo(0.2, 0.28), Reinforce())
AGGREGATIONS = (SequenceMean(0.0), TokenMean(Scope.step), PromptMean(), Constant(6, Width.budget), SequenceSum())
DENOMINATORS = (Original(), Survivors())

by_group = pytest.mark.parametrize(
    ("baseline", "scale"), list(product(GROUP_BASELINES, SCALES)), ids=lambda option: repr(option)
)
by_loss = pytest.mark.parametrize(
    ("surrogate", "aggregation", "denominator"),
    list(product(SURROGATES, AGGREGATIONS, DENOMINATORS)),
    ids=lambda option: repr(option),
)


def examples(number: int):
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


seeds = st.integers(0, 2**31 - 1)
# Rewards in twentieths: shaped values that no binary fraction holds exactly, ties included.
rewards = st.integers(-20, 40).map(lambda twentieths: twentieths / 20)
groups = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(rewards, min_size=size, max_size=size), min_size=1, max_size=3)
)
masked_groups = groups.flatmap(
    lambda values: st.tuples(st.just(values), st.tuples(*(st.tuples(*(st.booleans() for _ in row)) for row in values)))
)


def loss_run(surrogate, aggregation, denominator):
    """Every part of the loss switched on: weights, a KL term, and rows that leave."""
    return make_run(
        surrogate=surrogate,
        aggregation=aggregation,
        denominator=denominator,
        truncation=MaskAfter(),
        correction=TisToken(cap=1.3, floor=0.0),
        kl=K3Loss(kl_coef=0.1, log_ratio_limit=20.0),
    )


# --- advantages ---------------------------------------------------------------------------------------------


@by_group
@examples(40)
@given(groups, st.integers(-8, 8))
def test_a_shift_of_all_rewards_moves_no_advantage(baseline, scale, values, eighths) -> None:
    shifted = [[value + eighths / 8 for value in row] for row in values]
    before = advantages_of(make_graded(values), baseline, scale)
    assert_close(advantages_of(make_graded(shifted), baseline, scale), before, TOLERANCE, "shift")


@pytest.mark.parametrize("baseline", GROUP_BASELINES, ids=repr)
@examples(40)
@given(groups, st.floats(0.1, 10))
def test_advantages_are_proportional_to_rewards_without_a_deviation(baseline, values, factor) -> None:
    scaled = make_graded([[factor * value for value in row] for row in values])
    before = advantages_of(make_graded(values), baseline)
    assert_close(advantages_of(scaled, baseline), factor * before, TOLERANCE, "scale")


@pytest.mark.parametrize(("baseline", "ddof"), list(product(GROUP_BASELINES, (0, 1))), ids=repr)
@examples(40)
@given(groups, st.floats(0.1, 10))
def test_a_deviation_without_eps_cancels_the_reward_scale(baseline, ddof, values, factor) -> None:
    scale = GroupStd(ddof, 0.0, False, Singleton.zero)
    scaled = make_graded([[factor * value for value in row] for row in values])
    before = advantages_of(make_graded(values), baseline, scale)
    assert_close(advantages_of(scaled, baseline, scale), before, TOLERANCE, "scale")


@by_group
@examples(30)
@given(groups, st.randoms(use_true_random=False))
def test_advantages_follow_a_permutation_of_the_group(baseline, scale, values, random) -> None:
    order = random.sample(range(len(values[0])), len(values[0]))
    before = advantages_of(make_graded(values), baseline, scale)
    after = advantages_of(make_graded([[row[place] for place in order] for row in values]), baseline, scale)
    assert_close(after, before[:, order], TOLERANCE, "permutation")


@by_group
@examples(30)
@given(groups)
def test_a_group_knows_nothing_of_the_other_groups(baseline, scale, values) -> None:
    together = advantages_of(make_graded(values), baseline, scale)
    alone = torch.cat([advantages_of(make_graded([row]), baseline, scale) for row in values])
    assert_close(together, alone, TOLERANCE, "one group at a time")


@by_group
@examples(40)
@given(groups)
def test_centred_advantages_of_a_group_add_up_to_zero(baseline, scale, values) -> None:
    got = advantages_of(make_graded(values), baseline, scale)
    assert_close(got.sum(dim=1), [0.0] * len(values), TOLERANCE, "sum over the group")


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-9, 1e-6])
@pytest.mark.parametrize("baseline", GROUP_BASELINES, ids=repr)
def test_equal_rewards_give_exact_zeros_whatever_eps(dtype, eps, baseline) -> None:
    # The mean of 7 or 12 times .7, or of 8 times .9, is not .7 or .9 in floating point.
    for value, size in product((0.0, 1.0, 0.7, 0.9, -0.1, 1 / 3), (2, 7, 8, 12)):
        graded = make_graded([[value] * size], dtype=dtype)
        for scale in (NoScale(), GroupStd(0, eps, False, Singleton.zero), GroupStd(1, eps, False, Singleton.zero)):
            assert advantages_of(graded, baseline, scale).tolist() == [[0.0] * size], (value, size, scale)


@by_group
@examples(60)
@given(masked_groups, rewards)
def test_uncounted_rows_move_no_other_row_and_get_zero(baseline, scale, drawn, other) -> None:
    values, counted = drawn
    changed = [[value if bit else other for value, bit in zip(row, bits)] for row, bits in zip(values, counted)]
    before = advantages_of(make_graded(values, counted=counted), baseline, scale)
    after = advantages_of(make_graded(changed, counted=counted), baseline, scale)
    assert_close(after, before, 0, "rewards of uncounted rows")
    assert (before[~torch.tensor(counted)] == 0).all()


@by_group
@examples(60)
@given(masked_groups)
def test_counted_rows_are_advised_as_if_the_others_did_not_exist(baseline, scale, drawn) -> None:
    values, counted = drawn
    got = advantages_of(make_graded(values, counted=counted), baseline, scale)
    for row, bits, advantages in zip(values, counted, got):
        kept = [value for value, bit in zip(row, bits) if bit]
        if kept:
            alone = advantages_of(make_graded([kept]), baseline, scale)[0]
            assert_close(advantages[torch.tensor(bits)], alone, TOLERANCE, "the counted rows alone")


@by_group
@pytest.mark.parametrize("reward", [0.7, -1.0, 1.0])
def test_the_only_counted_row_of_a_group_gets_zero(baseline, scale, reward) -> None:
    graded = make_graded([[reward, 0.3, 0.2]], counted=[[True, False, False]])
    assert advantages_of(graded, baseline, scale).tolist() == [[0.0] * 3]


@examples(40)
@given(masked_groups)
def test_without_a_baseline_the_advantage_is_the_counted_reward(drawn) -> None:
    values, counted = drawn
    expected = [[value * bit for value, bit in zip(row, bits)] for row, bits in zip(values, counted)]
    assert_close(advantages_of(make_graded(values, counted=counted), NoBaseline()), expected, 0, "reward")


# --- the gradient and how a step is cut ---------------------------------------------------------------------


@by_loss
@examples(5)
@given(seeds, st.integers(1, 3), st.integers(2, 4), st.integers(1, 6), st.integers(1, 40))
def test_no_microbatch_budget_moves_the_gradient(
    surrogate, aggregation, denominator, seed, problems, size, longest, budget
) -> None:
    run, scene = loss_run(surrogate, aggregation, denominator), random_scene(seed, problems, size, longest)
    inputs = inputs_of(run, scene)
    whole = loss_and_gradient(run, inputs, scene.logprobs)
    cut = loss_and_gradient(run, inputs, scene.logprobs, budget)
    one_each = loss_and_gradient(run, inputs, scene.logprobs, 1)
    for part, name in ((0, "loss"), (1, "gradient")):
        assert_close(cut[part], whole[part], TOLERANCE, f"{name} at a budget of {budget}")
        assert_close(one_each[part], whole[part], TOLERANCE, f"{name} row by row")


def test_the_budgets_of_these_tests_do_cut_the_step() -> None:
    run, scene = make_run(), random_scene(0, 3, 4, 6)
    counts = [
        len(make_minibatch(inputs_of(run, scene), range(3), run.denominator, Cut(b, 192))) for b in (10**9, 20, 1)
    ]
    assert counts[0] == 1
    assert 1 < counts[1] < counts[2] == 12


@pytest.mark.parametrize("surrogate", SURROGATES, ids=repr)
@examples(5)
@given(seeds, st.integers(1, 40))
def test_the_sums_for_the_log_add_up_over_microbatches(surrogate, seed, budget) -> None:
    run, scene = loss_run(surrogate, TokenMean(Scope.step), Survivors()), random_scene(seed, 2, 4, 5)
    reports = []
    for tokens in (10**9, budget):
        sums, largest = {}, torch.zeros((), dtype=F64)
        for batch in make_minibatch(inputs_of(run, scene), range(2), run.denominator, Cut(tokens, 192)):
            logprobs = scene.logprobs.flatten()[batch.tokens]
            output = policy_loss(run, batch, logprobs, -logprobs)
            sums = {name: sums.get(name, 0.0) + value for name, value in output.sums.items()}
            largest = torch.maximum(largest, output.maxima["mismatch_max"])
        reports.append([float(value) for value in (*sums.values(), largest)])
    assert_close(reports[1], reports[0], TOLERANCE, "sums and the largest mismatch")


@by_loss
@examples(5)
@given(seeds, st.integers(1, 3), st.integers(2, 4), st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_padding_moves_no_gradient_and_gets_none(
    surrogate, aggregation, denominator, seed, problems, size, longest, padding, through_batching
) -> None:
    run = loss_run(surrogate, aggregation, denominator)
    results = []
    for scene in (
        random_scene(seed, problems, size, longest),
        random_scene(seed, problems, size, longest, padding=padding, junk=-3.0),
    ):
        inputs = inputs_of(run, scene)
        if through_batching:
            results.append(loss_and_gradient(run, inputs, scene.logprobs))
        else:  # the padded width itself reaches the loss
            results.append(sum_of_shares(run, inputs, scene, [range(scene.rollouts.num_rows)]))
    (loss, gradient), (padded_loss, padded) = results
    assert_close(padded_loss, loss, TOLERANCE, "loss")
    assert_close(padded[:, :longest], gradient, TOLERANCE, "gradient on tokens")
    assert (padded[:, longest:] == 0).all()


def sum_of_shares(run, inputs: StepInputs, scene: Scene, parts) -> tuple[Tensor, Tensor]:
    """Each part's share computed apart, as ranks would, then added as an all-reduce would."""
    losses, gradients = [], []
    for rows in parts:
        leaf = scene.logprobs.clone().requires_grad_()
        share = share_of(run, batch_of_rows(run, inputs, list(rows)), leaf)
        share.backward()
        losses.append(share.detach())
        gradients.append(leaf.grad)
    return sum(losses), sum(gradients)


@by_loss
@examples(5)
@given(seeds, st.integers(1, 3), st.integers(2, 4), st.data())
def test_no_split_over_ranks_moves_the_gradient(
    surrogate, aggregation, denominator, seed, problems, size, data
) -> None:
    run, scene = loss_run(surrogate, aggregation, denominator), random_scene(seed, problems, size, 5)
    rows = problems * size
    rank_of_row = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
    parts = [[row for row in range(rows) if rank_of_row[row] == rank] for rank in range(3)]
    inputs = inputs_of(run, scene)
    whole = loss_and_gradient(run, inputs, scene.logprobs)
    ranks = sum_of_shares(run, inputs, scene, [part for part in parts if part])
    assert_close(ranks[0], whole[0], TOLERANCE, "loss")
    assert_close(ranks[1], whole[1], TOLERANCE, "gradient")


@by_loss
@examples(4)
@given(seeds, st.integers(2, 3), st.integers(2, 4))
def test_the_order_of_the_groups_moves_no_gradient(surrogate, aggregation, denominator, seed, problems, size) -> None:
    scene = random_scene(seed, problems, size, 5)
    run = loss_run(surrogate, aggregation, denominator)
    inputs = inputs_of(run, scene)
    order = torch.arange(problems * size).reshape(problems, size).flip(0).flatten()

    def turned(values: Tensor) -> Tensor:
        return values[order]

    rollouts = make_rollouts(
        scene.rollouts.lengths[order].tolist(), size, width=5, sampler=turned(scene.rollouts.sampler_logprobs)
    )
    flipped = StepInputs(
        rollouts,
        *(turned(part) for part in (inputs.loss_mask, inputs.advantages, inputs.old_logprobs)),
        ref_logprobs=turned(inputs.ref_logprobs),
        correction_weights=turned(inputs.correction_weights),
    )
    loss, gradient = loss_and_gradient(run, inputs, scene.logprobs)
    flipped_loss, flipped_gradient = loss_and_gradient(run, flipped, turned(scene.logprobs))
    assert_close(flipped_loss, loss, TOLERANCE, "loss")
    assert_close(flipped_gradient, turned(gradient), TOLERANCE, "gradient")


@by_loss
@examples(5)
@given(seeds)
def test_what_is_on_an_untrained_row_changes_nothing(surrogate, aggregation, denominator, seed) -> None:
    run, scene = loss_run(surrogate, aggregation, denominator), random_scene(seed, 2, 4, 5)
    out = scene.graded.truncated.flatten()
    assume(out.any())
    junk = scene.logprobs.clone()
    junk[out] -= 5.0
    other = replace(scene, logprobs=junk, ref_logprobs=torch.where(out[:, None], -9.0, scene.ref_logprobs))
    loss, gradient = loss_and_gradient(run, inputs_of(run, scene), scene.logprobs)
    other_loss, other_gradient = loss_and_gradient(run, inputs_of(run, other), other.logprobs)
    assert_close(other_loss, loss, 0, "loss")
    assert_close(other_gradient, gradient, 0, "gradient")
    assert (gradient[out] == 0).all()


@by_loss
@examples(5)
@given(seeds)
def test_leaving_the_loss_moves_others_by_the_denominator_alone(surrogate, aggregation, denominator, seed) -> None:
    scene = random_scene(seed, 2, 4, 5)
    kept = ~scene.graded.truncated.flatten()
    assume(kept.any() and not kept.all())
    run = loss_run(surrogate, aggregation, denominator)
    _, masked = loss_and_gradient(run, inputs_of(run, scene), scene.logprobs)
    # Same advantages, every row in the loss.
    everyone = replace(scene, graded=replace(scene.graded, truncated=torch.zeros(2, 4, dtype=torch.bool)))
    _, whole = loss_and_gradient(run, inputs_of(run, everyone), scene.logprobs)
    if isinstance(denominator, Original):
        assert_close(masked[kept], whole[kept], TOLERANCE, "kept rows")
        return
    # Survivors: token, row and constant denominators shrink to the surviving share, one factor for all rows.
    mask = scene.rollouts.sampled_mask
    rows = kept.sum().item() / 8
    tokens = mask[kept].sum().item() / mask.sum().item()
    factor = tokens if isinstance(aggregation, TokenMean) else rows
    if not isinstance(aggregation, PromptMean):
        assert_close(masked[kept] * factor, whole[kept], TOLERANCE, "kept rows times the surviving share")


# --- end to end ---------------------------------------------------------------------------------------------


MODEL = tiny_model()


def parameter_gradient(scene: Scene, prompts, tokens: Tensor, budget: int, **options) -> tuple[Tensor, int]:
    """Gradient of all parameters of the tiny model, as one vector, and the number of microbatches."""
    MODEL.zero_grad()
    run = make_run(truncation=MaskAfter(), **options)
    rollouts = replace(scene.rollouts, prompts=prompts, tokens=tokens)
    inputs = inputs_of(run, replace(scene, rollouts=rollouts))
    batches = make_minibatch(inputs, range(len(prompts)), run.denominator, Cut(budget, 192))
    for batch in batches:
        logprobs, entropy = token_logprobs(MODEL, batch.prompts, batch.tokens, batch.loss_mask, 0.8, Fp32(LmHead.same))
        policy_loss(run, batch, logprobs, entropy).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in MODEL.parameters()]), len(batches)


@pytest.mark.parametrize("aggregation", AGGREGATIONS, ids=repr)
@pytest.mark.parametrize("denominator", DENOMINATORS, ids=repr)
def test_parameter_gradients_of_a_transformer_do_not_depend_on_the_budget(aggregation, denominator) -> None:
    scene = random_scene(1, 3, 4, 7)
    scene = replace(scene, old_logprobs=scene.old_logprobs - 1.5)  # near log(1/13), so ratios stay moderate
    prompts = ((1, 2), (3, 4, 5, 6), (7, 8, 9))
    tokens = torch.randint(13, (12, 7), generator=torch.Generator().manual_seed(4))
    options = {"aggregation": aggregation, "denominator": denominator}
    whole, one = parameter_gradient(scene, prompts, tokens, 10**9, **options)
    size = whole.abs().max()
    assert size > 1e-4
    for budget in (24, 1):
        cut, several = parameter_gradient(scene, prompts, tokens, budget, **options)
        assert one == 1 < several
        assert_close(cut / size, whole / size, TOLERANCE, f"relative to the largest entry, budget {budget}")


def test_the_scenes_hold_what_they_are_for() -> None:
    # Clips act on both sides, weights reach the cap, rows leave and stay: otherwise the tests above are idle.
    scene = random_scene(0, 3, 4, 6)
    mask = scene.rollouts.sampled_mask
    ratio = (scene.logprobs - scene.old_logprobs).exp()[mask]
    weight = (scene.old_logprobs - scene.rollouts.sampler_logprobs).exp()[mask]
    assert (ratio > 1.28).any() and (ratio < 0.8).any() and (weight > 1.3).any()
    assert 0 < scene.graded.truncated.sum() < 12
    assert len(set(scene.rollouts.lengths.tolist())) > 2
    plain, clipped = (run_scene(scene, surrogate=s)[1] for s in (Reinforce(), Ppo(0.2, 0.2)))
    assert ((clipped == 0) & (plain != 0)).any()
