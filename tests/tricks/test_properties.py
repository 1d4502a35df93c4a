"""What must hold for any rewards, any lengths and any way to cut a step, in float64.

Shapes of every option are checked in test_options_differ.py, whose calls these repeat.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch
from helpers import (
    F64,
    ONE_MICROBATCH,
    Scene,
    advantages_of,
    assert_close,
    batch_of_rows,
    inputs_of,
    loss_and_gradient,
    make_graded,
    make_rollouts,
    make_run,
    marked,
    noise_of,
    random_scene,
    run_scene,
    shapes_unchecked,
    share_of,
    tiny_model,
)
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from loss_options import (
    AGGREGATIONS,
    BASELINES,
    CORRECTIONS,
    DENOMINATORS,
    ENTROPIES,
    IMPORTANCES,
    KLS,
    REJECTIONS,
    SCALES,
    SURROGATES,
    TOKEN_CREDITS,
    UPDATE_MASKS,
    label,
)
from torch import Tensor

from grpo_lab.config.run_config import RunConfig
from grpo_lab.learner.loss import mark_tokens, policy_loss
from grpo_lab.policy.batching import StepInputs, make_minibatch
from grpo_lab.policy.logprobs import token_logprobs
from grpo_lab.tricks.aggregation import Constant, PromptMean, TokenMean
from grpo_lab.tricks.baseline import (
    BatchMean,
    ForwardCorrection,
    Gae,
    GroupMean,
    LeaveOneOut,
    LengthWeighted,
    NoBaseline,
    PassAtK,
    Weights,
)
from grpo_lab.tricks.baseline_group import Asymmetric, Opmd
from grpo_lab.tricks.convention import AlphaForm, BoundForm, Floor, Scope, Singleton, Width
from grpo_lab.tricks.correction import NoCorrection, TisToken
from grpo_lab.tricks.denominator import Original, Survivors
from grpo_lab.tricks.importance import Token
from grpo_lab.tricks.kl import K3Loss
from grpo_lab.tricks.old_policy import Sampler
from grpo_lab.tricks.precision import Fp32, LmHead
from grpo_lab.tricks.rejection import (
    NoRejection,
    TokenK1,
    TokenK2,
)
from grpo_lab.tricks.scale import BatchStd, Deviation, GroupStd, InformativeShare, NoScale, SignWeighted
from grpo_lab.tricks.scale import GroupMean as MaxRl
from grpo_lab.tricks.surrogate import (
    ClipCov,
    KlCov,
    Ppo,
    Reinforce,
)
from grpo_lab.tricks.truncation import MaskAfter
from grpo_lab.types import Microbatching

TOLERANCE = 1e-10


# --- the losses ---------------------------------------------------------------------------------------------


def loss_run(surrogate, aggregation, denominator, **others) -> RunConfig:
    """Every part of the loss switched on: weights, a KL term, rows that leave and tokens that leave."""
    background = {
        "truncation": MaskAfter(),
        "correction": TisToken(cap=1.3, floor=0.0),
        "rejection": TokenK1(False, 0.6, 1.8, BoundForm.ratio),
        "kl": K3Loss(kl_coef=0.1, log_ratio_limit=20.0, limit=0.0),
    }
    return make_run(surrogate=surrogate, aggregation=aggregation, denominator=denominator, **background | others)


def losses() -> dict[str, RunConfig]:
    """Every surrogate x aggregation x denominator; ratios of responses where the surrogate can read them; and every
    option of the other axes of the loss, each with some surrogate, aggregation and denominator."""
    found = {}
    for parts in product(SURROGATES, AGGREGATIONS, DENOMINATORS):
        found[loss_name(*parts)] = loss_run(*parts)
    for (surrogate, importance), aggregation in product(of_responses(), AGGREGATIONS):
        run = loss_run(surrogate, aggregation, Survivors(), importance=importance)
        found[loss_name(importance, surrogate, aggregation)] = run
    others = zip(cycle(SURROGATES), cycle(AGGREGATIONS), cycle(DENOMINATORS), asides())
    for surrogate, aggregation, denominator, aside in others:
        name = loss_name(*aside.values(), surrogate, aggregation, denominator)
        found[name] = loss_run(surrogate, aggregation, denominator, **aside)
    return found


def loss_name(*parts) -> str:
    return "-".join(map(label, parts))


def of_responses() -> list[tuple]:
    """Each kind of surrogate that can read ratios of responses, with each such ratio."""
    able = {type(option): option for option in SURROGATES if option.uses_ratio and not option.needs_token_ratio}
    return list(product(able.values(), IMPORTANCES))


def rarely() -> set[str]:
    """The losses of make test-all alone. At every change: each surrogate, aggregation x denominator, surrogate x ratio
    of responses, and option of the other axes; the options beside them take turns."""
    ends = cycle(product(AGGREGATIONS, DENOMINATORS))
    often = {loss_name(surrogate, *parts) for surrogate, parts in zip(SURROGATES, ends)}
    often |= {loss_name(ratio, one, end) for (one, ratio), end in zip(of_responses(), cycle(AGGREGATIONS))}
    return set(list(LOSSES)[: -len(asides())]) - often


def asides() -> list[dict[str, object]]:
    """One option of an axis beside the surrogate's each."""
    axes = {
        "correction": CORRECTIONS,
        "rejection": REJECTIONS,
        "token_credit": TOKEN_CREDITS,
        "update_mask": UPDATE_MASKS,
        "kl": KLS,
        "entropy": ENTROPIES,
    }
    found = [{axis: option} for axis, compared in axes.items() for option in compared]
    return [*found, {"old_policy": Sampler(), "correction": NoCorrection()}]


LOSSES = losses()
RARELY = rarely()


def by_loss(condition=lambda run: True):
    """Parametrise by the cases whose run fulfils the condition."""
    cases = [name for name, run in LOSSES.items() if condition(run)]
    return pytest.mark.parametrize("case", [extended(name) if name in RARELY else name for name in cases])


def extended(*values):
    """A case of make test-all alone."""
    return pytest.param(*values, marks=pytest.mark.extended)


by_marking = pytest.mark.parametrize(
    "surrogate", [option for option in SURROGATES if option.mark_scope is not None], ids=label
)


def among(*conditions):
    """Pairs of baseline and scale of which all conditions hold; at every change each option beside two others."""
    turned = (SCALES[turn:] + SCALES[:turn] for turn in range(len(SCALES)))
    cases, seen = [], Counter()
    for pair in (pair for scales in turned for pair in zip(BASELINES, cycle(scales))):
        if all(condition(*pair) for condition in conditions):
            often = min(seen[option] for option in pair) < 2
            cases.append(pair if often else extended(*pair))
            seen.update(pair if often else ())
    assert cases
    return pytest.mark.parametrize(("baseline", "scale"), cases, ids=label)


by_advantage = among()


def examples(number: int):
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


seeds = st.integers(0, 2**31 - 1)
# Rewards in twentieths: shaped values that no binary fraction holds exactly, ties included. None is negative,
# which some scales refuse; a shift makes them so where that is allowed.
rewards = st.integers(0, 30).map(lambda twentieths: twentieths / 20)
groups = st.integers(2, 5).flatmap(
    lambda size: st.lists(st.lists(rewards, min_size=size, max_size=size), min_size=1, max_size=3)
)


def tables(values, cells) -> st.SearchStrategy:
    """One drawn run for each reward."""
    return st.tuples(*(st.tuples(*(cells for _ in row)) for row in values))


groups_with_lengths = groups.flatmap(lambda values: st.tuples(st.just(values), tables(values, st.integers(1, 9))))
masked_groups = groups.flatmap(
    lambda values: st.tuples(st.just(values), tables(values, st.integers(1, 9)), tables(values, st.booleans()))
)


# --- advantages ---------------------------------------------------------------------------------------------


def reads_signs_or_zero(baseline, scale) -> bool:
    """Whether where the zero of the rewards is matters."""
    counts_zeros = isinstance(scale, InformativeShare) and scale.alpha is AlphaForm.nonzero_rewards
    return not baseline.centres or scale.needs_rewards_from_zero or counts_zeros


def divides(scale) -> bool:
    """Whether the unit of the rewards cancels, but for eps. A deviation of the others that is 0 divides by nothing."""
    return scale.divides_by_deviation or isinstance(scale, MaxRl)


def is_linear(baseline) -> bool:
    """Whether what is subtracted has the unit of the rewards."""
    return not isinstance(baseline, (Asymmetric, Opmd))


def without_eps(scale):
    return replace(scale, eps=0.0) if scale.divides_by_deviation else scale


def moved(baseline, factor: float = 1.0, shift: float = 0.0):
    """The same baseline for rewards times `factor` plus `shift`: ForwardCorrection is told what answers earn."""
    if not isinstance(baseline, ForwardCorrection):
        return baseline
    correct, wrong = (factor * value + shift for value in (baseline.correct, baseline.wrong))
    return replace(baseline, correct=correct, wrong=wrong)


@among(lambda baseline, scale: not reads_signs_or_zero(baseline, scale))
@examples(8)
@given(groups_with_lengths, st.integers(-8, 8))
def test_a_shift_of_all_rewards_moves_no_advantage(baseline, scale, drawn, eighths) -> None:
    values, lengths = drawn
    outcome = [[float(value > 0.5) for value in row] for row in values]
    shifted = [[value + eighths / 8 for value in row] for row in values]
    before, after = (
        advantages_of(make_graded(reward, correctness=outcome, lengths=lengths), option, scale)
        for reward, option in ((values, baseline), (shifted, moved(baseline, shift=eighths / 8)))
    )
    assert_close(after, before, TOLERANCE, "shift")


@among(
    lambda baseline, scale: not divides(scale) and not baseline.scales_itself and is_linear(baseline),
)
@examples(8)
@given(groups_with_lengths, st.floats(0.1, 10))
def test_advantages_are_proportional_to_rewards_unless_something_divides(baseline, scale, drawn, factor) -> None:
    values, lengths = drawn
    right = [[float(value > 0.5) for value in row] for row in values]
    scaled = make_graded([[factor * value for value in row] for row in values], correctness=right, lengths=lengths)
    before = advantages_of(make_graded(values, correctness=right, lengths=lengths), baseline, scale)
    after = advantages_of(scaled, moved(baseline, factor), scale)
    assert_close(after, factor * before, TOLERANCE, "proportional")


@among(
    lambda baseline, scale: divides(scale) and not baseline.scales_itself and is_linear(baseline),
    lambda baseline, scale: not getattr(scale, "leave_one_out", False),
)
@examples(8)
@given(groups_with_lengths, st.floats(0.1, 10))
@shapes_unchecked()
def test_a_divisor_without_eps_cancels_the_unit_of_the_rewards(baseline, scale, drawn, factor) -> None:
    values, lengths = drawn
    if isinstance(scale, GroupStd) and not baseline.group_relative:
        assume(all(len(set(row)) > 1 for row in values))
    right = [[float(value > 0.5) for value in row] for row in values]
    scaled = make_graded([[factor * value for value in row] for row in values], correctness=right, lengths=lengths)
    before = advantages_of(make_graded(values, correctness=right, lengths=lengths), baseline, without_eps(scale))
    after = advantages_of(scaled, moved(baseline, factor), without_eps(scale))
    assert_close(after, before, TOLERANCE, "unit of the rewards")


@pytest.mark.parametrize("k", [1, 2, 3])
@examples(8)
@given(groups, st.data())
def test_pass_at_k_reads_the_outcome_and_no_reward(k, values, data) -> None:
    outcome = [[float(value > 0.5) for value in row] for row in values]
    other = data.draw(tables(values, rewards))
    one, two = (PassAtK(k)(make_graded(reward, correctness=outcome)) for reward in (values, other))
    assert_close(two, one, 0, "rewards")


@by_advantage
@examples(5)
@given(groups_with_lengths, st.randoms(use_true_random=False))
@shapes_unchecked()
def test_advantages_follow_a_permutation_within_groups_and_of_groups(baseline, scale, drawn, random) -> None:
    values, lengths = drawn
    order, places = (random.sample(range(number), number) for number in (len(values), len(values[0])))

    def turned(table):
        return [[table[group][place] for place in places] for group in order]

    before = advantages_of(make_graded(values, lengths=lengths), baseline, scale)
    after = advantages_of(make_graded(turned(values), lengths=turned(lengths)), baseline, scale)
    assert_close(after, before[order][:, places], TOLERANCE, "permutation")


@among(lambda baseline, scale: not isinstance(baseline, BatchMean) and not scale.reads_batch)
@examples(6)
@given(groups_with_lengths)
def test_a_group_knows_nothing_of_the_other_groups(baseline, scale, drawn) -> None:
    values, lengths = drawn
    together = advantages_of(make_graded(values, lengths=lengths), baseline, scale)
    alone = [advantages_of(make_graded([row], lengths=[size]), baseline, scale) for row, size in zip(values, lengths)]
    assert_close(together, torch.cat(alone), TOLERANCE, "one group at a time")


@among(lambda baseline, scale: isinstance(baseline, BatchMean) or scale.reads_batch)
def test_what_reads_the_batch_does_know_the_other_groups(baseline, scale) -> None:
    one, other = (
        advantages_of(make_graded([[1, 0, 0.7, 0], second]), baseline, scale)[0]
        for second in ([0, 0, 0, 0], [1, 0.2, 0, 1])
    )
    assert (one - other).abs().max() > 1e-4


@among(
    lambda baseline, scale: isinstance(baseline, (GroupMean, LeaveOneOut, PassAtK)),
    lambda baseline, scale: not scale.moves_zeros and not isinstance(scale, SignWeighted),
    lambda baseline, scale: not getattr(scale, "leave_one_out", False),
)
@examples(8)
@given(groups_with_lengths)
def test_centred_advantages_of_a_group_add_up_to_zero(baseline, scale, drawn) -> None:
    values, lengths = drawn
    got = advantages_of(make_graded(values, lengths=lengths), baseline, scale)
    assert_close(got.sum(dim=1), [0.0] * len(values), TOLERANCE, "sum over the group")


@pytest.mark.parametrize(
    ("baseline", "scale", "weights"),
    [
        (LengthWeighted(Singleton.zero), NoScale(), Weights.tokens),
        (LengthWeighted(Singleton.zero), GroupStd(0, 1e-6, False, Singleton.zero), Weights.tokens),
        (BatchMean(Weights.rows), NoScale(), Weights.rows),
        (BatchMean(Weights.tokens), NoScale(), Weights.tokens),
        (NoBaseline(), BatchStd(Deviation.centred, Weights.tokens, True, 0, 1e-6, Floor.added), Weights.tokens),
        (NoBaseline(), BatchStd(Deviation.centred, Weights.rows, True, 0, 1e-6, Floor.added), Weights.rows),
    ],
    ids=label,
)
@examples(15)
@given(masked_groups)
def test_weighted_advantages_add_up_to_zero_over_what_they_are_centred_on(baseline, scale, weights, drawn) -> None:
    values, lengths, counted = drawn
    graded = make_graded(values, lengths=lengths, in_statistics=counted)
    weighted = weights.of(graded) * advantages_of(graded, baseline, scale)
    total = weighted.sum(dim=1) if baseline.group_relative else weighted.sum()
    assert_close(total, torch.zeros_like(total), TOLERANCE, "weighted sum over the group, or over the batch")


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("of", list(Deviation), ids=lambda of: of.value)
@pytest.mark.parametrize("by", list(Weights), ids=lambda by: by.value)
@examples(10)
@given(groups_with_lengths)
def test_a_batch_deviation_leaves_a_deviation_of_one(ddof, of, by, drawn) -> None:
    values, lengths = drawn
    assume(len({value for row in values for value in row}) > 1)
    graded = make_graded(values, lengths=lengths)
    scale = BatchStd(of, by, False, ddof, 0.0, Floor.added)
    got, weights = advantages_of(graded, NoBaseline(), scale).flatten(), by.of(graded).flatten()
    mean = (weights * got).sum() / weights.sum()
    variance = (weights * (got - mean) ** 2).sum() / (weights.sum() - ddof)
    assert_close(variance, 1.0, TOLERANCE, "variance of the advantages")


@among(lambda baseline, scale: baseline.group_relative and not scale.moves_zeros)
@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
def test_equal_rewards_give_exact_zeros_whatever_eps(baseline, scale, dtype) -> None:
    # The mean of 7 or 12 times .7, or of 8 times .9, is not .7 or .9 in floating point. The second group has signal.
    eps_values = (0.0, 1e-12, 1e-6) if isinstance(scale, (GroupStd, BatchStd)) else (None,)
    for value, size, eps in product((0.0, 1.0, 0.7, 0.9, 1 / 3), (2, 7, 8, 12), eps_values):
        chosen = scale if eps is None else replace(scale, eps=eps)
        graded = make_graded([[value] * size, [0.0] + [1.0] * (size - 1)], dtype=dtype)
        got = advantages_of(graded, baseline, chosen)
        assert got[0].tolist() == [0.0] * size, (value, size, eps)
        assert (got[1] != 0).any() or isinstance(baseline, PassAtK)


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("scale", [scale for scale in SCALES if not isinstance(scale, MaxRl)], ids=label)
@pytest.mark.parametrize("by", list(Weights), ids=lambda by: by.value)
def test_a_batch_of_equal_rewards_gives_exact_zeros_around_its_mean(by, scale, dtype) -> None:
    for value, size in product((0.0, 1.0, 0.7, 0.9, -0.1, 1 / 3), (1, 3, 7)):
        graded = make_graded([[value] * size] * 3, lengths=[[2 + place for place in range(size)]] * 3, dtype=dtype)
        assert (advantages_of(graded, BatchMean(by), scale) == 0).all(), (value, size)


@pytest.mark.parametrize("scale", [scale for scale in SCALES if scale.moves_zeros], ids=label)
def test_a_scale_that_says_it_moves_zeros_does(scale) -> None:
    graded = make_graded([[0, 0, 0], [1, 0, 1]], lengths=[[1, 1, 1], [4, 1, 2]])
    assert (advantages_of(graded, GroupMean(Singleton.zero), scale)[0] != 0).all()


@by_advantage
@examples(6)
@given(masked_groups, rewards, st.integers(1, 9))
@shapes_unchecked()
def test_uncounted_rows_move_no_other_row_and_get_zero(baseline, scale, drawn, other, length) -> None:
    values, lengths, counted = drawn
    bits = torch.tensor(counted)
    graded = make_graded(values, lengths=lengths, in_statistics=counted)
    reward = torch.where(bits, graded.reward, other)
    changed = replace(
        graded,
        reward=reward,
        components={"outcome": reward},
        correctness=torch.where(bits, graded.correctness, float(other > 0.5)),
        lengths=torch.where(bits, graded.lengths, length),
    )
    before, after = (advantages_of(given_rows, baseline, scale) for given_rows in (graded, changed))
    assert_close(after, before, 0, "what uncounted rows hold")
    assert (before[~bits] == 0).all()


@among(
    lambda baseline, scale: (
        baseline.group_relative
        or isinstance(baseline, BatchMean)
        or (scale.group_relative and not isinstance(scale, InformativeShare))  # whose group keeps its signal here
    )
)
def test_a_row_that_is_counted_does_move_its_siblings(baseline, scale) -> None:
    if isinstance(baseline, NoBaseline) and isinstance(scale, MaxRl):
        values = ([1, 0.5, 0, 0], [1, 0.5, 0, 1])
    else:
        values = ([1, 0, 0, 0], [1, 0, 0, 1])
    one, other = (advantages_of(make_graded([row, [1, 0, 0, 0]]), baseline, scale)[0, :3] for row in values)
    assert (one - other).abs().max() > 1e-4


@among(lambda baseline, scale: not isinstance(baseline, BatchMean) and not scale.reads_batch)
@examples(8)
@given(masked_groups)
@shapes_unchecked()
def test_counted_rows_are_advised_as_if_the_others_did_not_exist(baseline, scale, drawn) -> None:
    values, lengths, counted = drawn
    got = advantages_of(make_graded(values, lengths=lengths, in_statistics=counted), baseline, scale)
    for row, sizes, bits, advantages in zip(values, lengths, counted, got):
        kept = [value for value, bit in zip(row, bits) if bit]
        if kept:
            graded = make_graded([kept], lengths=[[size for size, bit in zip(sizes, bits) if bit]])
            alone = advantages_of(graded, baseline, scale)[0]
            assert_close(advantages[torch.tensor(bits)], alone, TOLERANCE, "the counted rows alone")


@among(
    lambda baseline, scale: baseline.group_relative and not scale.moves_zeros,
    lambda baseline, scale: getattr(baseline, "singleton", Singleton.zero) is Singleton.zero,
)
@pytest.mark.parametrize("reward", [0.7, 1.0])
def test_the_only_counted_row_of_a_group_gets_zero(baseline, scale, reward) -> None:
    graded = make_graded([[reward, 0.3, 0.2]], in_statistics=[[True, False, False]])
    assert advantages_of(graded, baseline, scale).tolist() == [[0.0] * 3]


@examples(40)
@given(masked_groups)
def test_without_a_baseline_the_advantage_is_the_counted_reward(drawn) -> None:
    values, _, counted = drawn
    expected = [[value * bit for value, bit in zip(row, bits)] for row, bits in zip(values, counted)]
    assert_close(advantages_of(make_graded(values, in_statistics=counted), NoBaseline()), expected, 0, "reward")


# --- rejection and the statistics ---------------------------------------------------------------------------


def advantages_with(rejection, scene: Scene, reward: Tensor) -> tuple[Tensor, Tensor]:
    """Advantages [N] where `reward` is what the rows got, and the rows the rejection took out."""
    graded, mask = replace(scene.graded, reward=reward), scene.rollouts.sampled_mask
    stays = rejection(scene.old_logprobs, scene.rollouts.sampler_logprobs, mask)
    settled = rejection.settle(graded, stays & mask)
    return advantages_of(settled).flatten(), ~settled.in_loss.flatten()


@pytest.mark.parametrize("rejection", REJECTIONS, ids=label)
@examples(15)
@given(seeds, rewards)
def test_a_rejected_row_moves_no_sibling_and_gets_zero(rejection, seed, other) -> None:
    scene = random_scene(seed, 3, 4, 3)
    before, left = advantages_with(rejection, scene, scene.graded.reward)
    assume(left.any() and not left.all())
    changed = torch.where(left.reshape(3, 4), other, scene.graded.reward)
    after, still_left = advantages_with(rejection, scene, changed)
    assert_close(after, before, 0, "rewards of rejected rows")
    assert (before[left] == 0).all() and torch.equal(left, still_left)


@pytest.mark.parametrize("rejection", REJECTIONS, ids=label)
@examples(15)
@given(seeds)
def test_a_rejected_row_in_the_statistics_moves_its_siblings(rejection, seed) -> None:
    scene, counted = random_scene(seed, 3, 4, 3), replace(rejection, rejected_in_statistics=True)
    before, left = advantages_with(counted, scene, scene.graded.reward)
    with_some = left.reshape(3, 4).any(dim=1) & ~left.reshape(3, 4).all(dim=1)
    assume(with_some.any())
    after, _ = advantages_with(counted, scene, scene.graded.reward + 0.5 * left.reshape(3, 4))
    moved = ((after - before).abs() > 1e-4).reshape(3, 4) & ~left.reshape(3, 4)
    assert torch.equal(moved.any(dim=1), with_some), "the groups that keep a row beside a rejected one"


@pytest.mark.parametrize("rejection", REJECTIONS, ids=label)
@examples(15)
@given(seeds, st.integers(1, 5))
def test_what_a_rejection_keeps_depends_on_the_row_alone(rejection, seed, padding) -> None:
    scenes = [random_scene(seed, 2, 3, 4), random_scene(seed, 2, 3, 4, padding=padding, junk=-7.0)]
    narrow, wide = (rejection(s.old_logprobs, s.rollouts.sampler_logprobs, s.rollouts.sampled_mask) for s in scenes)
    assert torch.equal(wide[:, :4], narrow) and not wide[:, 4:].any()
    rows = [
        rejection(scenes[0].old_logprobs[[row]], scenes[0].rollouts.sampler_logprobs[[row]], mask[None])
        for row, mask in enumerate(scenes[0].rollouts.sampled_mask)
    ]
    assert torch.equal(torch.cat(rows), narrow)


# --- tokens a surrogate chooses over the step ---------------------------------------------------------------


def marks_of(run: RunConfig, inputs: StepInputs, scene: Scene, budget: int, problems: range) -> Tensor:
    """[N, T]; what was marked in the microbatches of the step over `problems`."""
    found = torch.zeros_like(inputs.loss_mask)
    batches = make_minibatch(inputs, problems, run.denominator, Microbatching(budget, 192))
    for batch in marked(run, batches, scene.logprobs, inputs.rollouts):
        found[batch.rows[:, None], torch.arange(batch.tokens.shape[1])] = batch.marked
    return found


def step_covariance(inputs: StepInputs, scene: Scene) -> Tensor:
    """[N, T]; (logp - mean)(A - mean) over the tokens of the loss, nan elsewhere, from its words."""
    mask = inputs.loss_mask
    parts = [values - values[mask].mean() for values in (scene.logprobs, inputs.advantages)]
    return torch.where(mask, parts[0] * parts[1], torch.nan)


@pytest.mark.few(1)
@by_marking
@examples(25)
@given(seeds, st.integers(1, 3), st.integers(2, 4), st.integers(1, 40), st.integers(0, 4))
def test_what_is_marked_depends_on_no_cut_and_no_padding(surrogate, seed, problems, size, budget, padding) -> None:
    run = loss_run(surrogate, TokenMean(Scope.step), Survivors())
    scenes = [random_scene(seed, problems, size, 5), random_scene(seed, problems, size, 5, padding=padding, junk=-3.0)]
    narrow, wide = ((scene, inputs_of(run, scene)) for scene in scenes)
    whole = marks_of(run, *reversed(narrow), ONE_MICROBATCH, range(problems))
    assert not (whole & ~narrow[1].loss_mask).any()
    for budget_of_one in (budget, 1):
        assert torch.equal(marks_of(run, *reversed(narrow), budget_of_one, range(problems)), whole)
    assert torch.equal(marks_of(run, *reversed(wide), budget, range(problems))[:, :5], whole)


@examples(25)
@given(seeds, st.sampled_from([0.01, 0.1, 0.3, 1.0]))
def test_kl_cov_marks_its_share_of_the_largest_covariances(seed, share) -> None:
    run, scene = (
        loss_run(KlCov(share, 1.0, Scope.step), TokenMean(Scope.step), Survivors()),
        random_scene(seed, 3, 3, 5),
    )
    inputs = inputs_of(run, scene)
    assume(inputs.loss_mask.any())
    found, value = marks_of(run, inputs, scene, 20, range(3)), step_covariance(inputs, scene)
    assert found.sum() == max(1, int(share * inputs.loss_mask.sum()))
    others = value[inputs.loss_mask & ~found]
    assert not others.numel() or value[found].min() >= others.max() - TOLERANCE


@examples(25)
@given(seeds, st.sampled_from([0.01, 0.1, 0.3, 1.0]))
def test_clip_cov_draws_its_share_of_the_open_tokens_by_their_noise(seed, share) -> None:
    surrogate = ClipCov(0.2, 0.2, share, 0.05, 0.4, Scope.step)
    run, scene = loss_run(surrogate, TokenMean(Scope.step), Survivors()), random_scene(seed, 3, 3, 5)
    inputs, noise = inputs_of(run, scene), noise_of(scene.rollouts)
    assume(inputs.loss_mask.any())
    found, value = marks_of(run, inputs, scene, 20, range(3)), step_covariance(inputs, scene)
    ratio = (scene.logprobs - scene.old_logprobs).exp()
    clipped = ((inputs.advantages > 0) & (ratio > 1.2)) | ((inputs.advantages < 0) & (ratio < 0.8))
    is_open = (value > 0.05) & (value < 0.4) & ~clipped
    assert not (found & ~is_open).any()
    assert found.sum() == min(max(1, int(share * inputs.loss_mask.sum())), is_open.sum())
    left = noise[is_open & ~found]
    assert not found.any() or not left.numel() or noise[found].max() < left.min()


@by_marking
@examples(15)
@given(seeds)
def test_a_step_marks_by_its_own_problems_alone(surrogate, seed) -> None:
    run, scene = loss_run(surrogate, TokenMean(Scope.step), Survivors()), random_scene(seed, 3, 3, 5)
    inputs = inputs_of(run, scene)
    other = replace(scene, logprobs=torch.cat([scene.logprobs[:3] - 4.0, scene.logprobs[3:]]))
    one, two = (marks_of(run, inputs, given_scene, 20, range(1, 3)) for given_scene in (scene, other))
    assert torch.equal(one, two) and not one[:3].any()


# --- the gradient and how a step is cut ---------------------------------------------------------------------


@by_loss()
@examples(2)
@given(seeds, st.integers(2, 3), st.integers(2, 4), st.integers(3, 6), st.integers(1, 40))
def test_no_microbatch_budget_moves_the_gradient(case, seed, problems, size, longest, budget) -> None:
    run, scene = LOSSES[case], random_scene(seed, problems, size, longest)
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
        len(make_minibatch(inputs_of(run, scene), range(3), run.denominator, Microbatching(b, 192)))
        for b in (10**9, 20, 1)
    ]
    assert counts[0] == 1
    assert 1 < counts[1] < counts[2] == 12


NOT_INVARIANT = {
    "token mean": {"aggregation": TokenMean(Scope.microbatch)},
    "width": {"aggregation": Constant(6, Width.padded)},
    "clip_cov": {"surrogate": ClipCov(0.2, 0.2, 0.3, 0.02, 5.0, Scope.microbatch)},
    "kl_cov": {"surrogate": KlCov(0.3, 1.0, Scope.microbatch)},
}


@pytest.mark.parametrize("options", NOT_INVARIANT.values(), ids=NOT_INVARIANT.keys())
def test_a_convention_of_the_microbatch_does_depend_on_the_cut(options) -> None:
    # The tests around this one can fail: these conventions of other frameworks fail them, and say so.
    run, scene = make_run(truncation=MaskAfter(), **options), random_scene(0, 3, 4, 6)
    assert not run.aggregation.invariant or run.surrogate.mark_scope is Scope.microbatch
    inputs = inputs_of(run, scene)
    whole, cut = (loss_and_gradient(run, inputs, scene.logprobs, budget)[1] for budget in (ONE_MICROBATCH, 20))
    assert (whole - cut).abs().max() > 1e-4


def test_a_padded_width_does_depend_on_the_padding() -> None:
    run, gradients = make_run(aggregation=Constant(6, Width.padded)), []
    for padding in (0, 6):
        scene = random_scene(0, 3, 4, 6, padding=padding)
        gradients.append(sum_of_shares(run, inputs_of(run, scene), scene, [range(12)])[1][:, :6])
    assert_close(gradients[0], 2 * gradients[1], TOLERANCE, "twice the width, half the gradient")


@pytest.mark.parametrize("surrogate", SURROGATES, ids=label)
@examples(3)
@given(seeds, st.integers(1, 40))
def test_the_sums_for_the_log_add_up_over_microbatches(surrogate, seed, budget) -> None:
    run, scene = loss_run(surrogate, TokenMean(Scope.step), Survivors()), random_scene(seed, 2, 4, 5)
    inputs, reports = inputs_of(run, scene), []
    for tokens in (ONE_MICROBATCH, budget):
        sums = {}
        batches = make_minibatch(inputs, range(2), run.denominator, Microbatching(tokens, 192))
        for batch in marked(run, batches, scene.logprobs, scene.rollouts):
            logprobs = scene.logprobs.flatten()[batch.tokens]
            output = policy_loss(run.loss_tricks, batch, logprobs, -logprobs)
            sums = {name: sums.get(name, 0.0) + value for name, value in output.sums.items()}
        reports.append([float(value) for value in sums.values()])
    assert_close(reports[1], reports[0], TOLERANCE, "sums")


@by_loss()
@examples(2)
@given(seeds, st.integers(2, 3), st.integers(2, 4), st.integers(2, 6), st.integers(1, 9))
def test_padding_moves_no_gradient_and_gets_none(case, seed, problems, size, longest, padding) -> None:
    run, narrow = LOSSES[case], random_scene(seed, problems, size, longest)
    wide = random_scene(seed, problems, size, longest, padding=padding, junk=-3.0)
    loss, gradient = loss_and_gradient(run, inputs_of(run, narrow), narrow.logprobs)
    inputs = inputs_of(run, wide)
    for padded_loss, padded in (
        loss_and_gradient(run, inputs, wide.logprobs),
        sum_of_shares(run, inputs, wide, [range(problems * size)]),  # the padded width itself reaches the loss
    ):
        assert_close(padded_loss, loss, TOLERANCE, "loss")
        assert_close(padded[:, :longest], gradient, TOLERANCE, "gradient on tokens")
        assert (padded[:, longest:] == 0).all()


def sum_of_shares(run: RunConfig, inputs: StepInputs, scene: Scene, parts) -> tuple[Tensor, Tensor]:
    """Each part's share computed apart, as ranks would, then added as an all-reduce would.

    What a surrogate marks is found over the whole step and handed to each rank.
    """
    losses, gradients = [], []
    everyone = batch_of_rows(run, inputs, range(inputs.rollouts.num_rows))
    marks = marked(run, [everyone], scene.logprobs, inputs.rollouts)[0].marked
    for rows in map(list, parts):
        leaf = scene.logprobs.clone().requires_grad_()
        batch = replace(batch_of_rows(run, inputs, rows), marked=None if marks is None else marks[rows])
        share = share_of(run, batch, leaf)
        share.backward()
        losses.append(share.detach())
        gradients.append(leaf.grad)
    return sum(losses), sum(gradients)


@pytest.mark.few(40)
@by_loss()
@examples(2)
@given(seeds, st.integers(2, 3), st.integers(2, 4), st.randoms(use_true_random=False))
@shapes_unchecked()
def test_no_split_over_ranks_moves_the_gradient(case, seed, problems, size, random) -> None:
    run, scene, rows = LOSSES[case], random_scene(seed, problems, size, 5), problems * size
    rank_of_row = [random.randrange(3) for _ in range(rows)]
    parts = [[row for row in range(rows) if rank_of_row[row] == rank] for rank in range(3)]
    inputs = inputs_of(run, scene)
    whole = loss_and_gradient(run, inputs, scene.logprobs)
    ranks = sum_of_shares(run, inputs, scene, [part for part in parts if part])
    assert_close(ranks[0], whole[0], TOLERANCE, "loss")
    assert_close(ranks[1], whole[1], TOLERANCE, "gradient")


@pytest.mark.few(40)
@by_loss()
@examples(2)
@given(seeds, st.integers(2, 3), st.integers(2, 4))
@shapes_unchecked()
def test_the_order_of_the_groups_moves_no_gradient(case, seed, problems, size) -> None:
    run, scene = LOSSES[case], random_scene(seed, problems, size, 5)
    inputs = inputs_of(run, scene)
    # Among equal covariances, as those of two tokens are, the order of the rollouts does decide.
    assume(run.surrogate.mark_scope is None or inputs.loss_mask.sum() > 2)
    nudge = 0.01 * torch.arange(problems * size, dtype=F64).sqrt()[:, None]
    inputs = replace(inputs, advantages=torch.where(inputs.loss_mask, inputs.advantages + nudge, 0.0))
    order = torch.arange(problems * size).reshape(problems, size).flip(0).flatten()

    def turned(values: Tensor) -> Tensor:
        return values[order]

    rollouts = make_rollouts(
        scene.rollouts.lengths[order].tolist(), size, width=5, sampler=turned(scene.rollouts.sampler_logprobs)
    )
    flipped = StepInputs(
        replace(rollouts, problems=tuple(reversed(scene.rollouts.problems))),
        *(turned(part) for part in (inputs.loss_mask, inputs.advantages, inputs.old_logprobs)),
        ref_logprobs=turned(inputs.ref_logprobs),
        correction_weights=turned(inputs.correction_weights),
        entropy_coef=inputs.entropy_coef,
        right=turned(inputs.right),
    )
    loss, gradient = loss_and_gradient(run, inputs, scene.logprobs)
    flipped_loss, flipped_gradient = loss_and_gradient(run, flipped, turned(scene.logprobs))
    assert_close(flipped_loss, loss, TOLERANCE, "loss")
    assert_close(flipped_gradient, turned(gradient), TOLERANCE, "gradient")


@by_loss(lambda run: not run.kl.shapes_reward)
@examples(2)
@given(seeds)
@shapes_unchecked()
def test_what_is_on_an_untrained_row_changes_nothing(case, seed) -> None:
    # A penalty in the reward is left out: it charges the row, and a counted row moves its siblings.
    run, scene = LOSSES[case], random_scene(seed, 2, 4, 5)
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


def side_weights(run: RunConfig, inputs: StepInputs) -> Tensor:
    """Weight of a token of each row [N] in Balanced, counted row by row."""
    counted = run.denominator.counted_tokens(inputs.rollouts.sampled_mask, inputs.loss_mask).sum(dim=1)
    size, signs = inputs.rollouts.group_size, inputs.advantages.sum(dim=1).sign()
    problems = sum(bool(group.any()) for group in counted.split(size))
    weights = torch.zeros(len(counted), dtype=F64)
    for row in range(len(counted)):
        group = range(row // size * size, (row // size + 1) * size)
        live = [one for one in group if counted[one] > 0]
        side = [one for one in live if signs[one] == signs[row]]
        if row in live:
            weights[row] = len(side) / len(live) / counted[side].sum().item() / problems
    return weights


def divides_all_alike(run: RunConfig) -> bool:
    """True if a row that leaves changes others by the denominator only.

    Surrogates and token credits that choose tokens over the step or the batch lose the row from what they choose by.
    PositiveNll divides by the tokens of right responses, whatever weight the two sides have under Balanced.
    """
    chooses = run.surrogate.mark_scope is not None or run.token_credit.reads_batch
    return not chooses and not (run.aggregation.reads_signs and run.entropy.imitates)


@by_loss(divides_all_alike)
@examples(2)
@given(seeds)
@shapes_unchecked()
def test_leaving_the_loss_moves_others_by_the_denominator_alone(case, seed) -> None:
    run, scene = LOSSES[case], random_scene(seed, 2, 4, 5)
    # Same advantages, every row in the loss.
    everyone = replace(scene, graded=replace(scene.graded, truncated=torch.zeros(2, 4, dtype=torch.bool)))
    masked_inputs, whole_inputs = inputs_of(run, scene), inputs_of(run, everyone)
    kept = masked_inputs.loss_mask.any(dim=1)
    assume(kept.any())
    _, masked = loss_and_gradient(run, masked_inputs, scene.logprobs)
    _, whole = loss_and_gradient(run, whole_inputs, scene.logprobs)
    if run.aggregation.reads_signs:
        # A row that left has no advantage, so it changes sides: a factor of its own for each side.
        factors = side_weights(run, whole_inputs)[kept] / side_weights(run, masked_inputs)[kept]
        assert_close(masked[kept] * factors[:, None], whole[kept], TOLERANCE, "kept rows times what their side lost")
        return
    if isinstance(run.denominator, Original):
        assert_close(masked[kept], whole[kept], TOLERANCE, "kept rows")
        return
    # Survivors: token, row and constant denominators shrink to the surviving share, one factor for all rows.
    rows = kept.sum().item() / whole_inputs.loss_mask.any(dim=1).sum().item()
    tokens = masked_inputs.loss_mask.sum().item() / whole_inputs.loss_mask.sum().item()
    factor = tokens if isinstance(run.aggregation, TokenMean) else rows
    if not isinstance(run.aggregation, PromptMean):
        assert_close(masked[kept] * factor, whole[kept], TOLERANCE, "kept rows times the surviving share")


# --- end to end ---------------------------------------------------------------------------------------------


MODEL = tiny_model()
PROMPTS = ((1, 2), (3, 4, 5, 6), (7, 8, 9))


def transformer_scene() -> Scene:
    """Log-probs near log(1/13), as the tiny model has them, so that ratios stay moderate."""
    scene = random_scene(1, 3, 4, 7)
    tokens = torch.randint(13, (12, 7), generator=torch.Generator().manual_seed(4))
    lower = scene.rollouts.sampler_logprobs - 1.5
    rollouts = replace(scene.rollouts, prompts=PROMPTS, tokens=tokens, sampler_logprobs=lower)
    return replace(scene, rollouts=rollouts, old_logprobs=scene.old_logprobs - 1.5)


def parameter_gradient(run: RunConfig, batches, rollouts) -> Tensor:
    """Gradient of all parameters of the tiny model, as one vector, through these microbatches of a step."""
    MODEL.zero_grad()
    forwarded = [
        token_logprobs(MODEL, batch.prompts, batch.tokens, batch.loss_mask, 0.8, Fp32(LmHead.same, 1e-3), True)
        for batch in batches
    ]
    logprobs = [pair[0].detach() for pair in forwarded]
    for batch, (values, entropy) in zip(mark_tokens(run.loss_tricks, batches, logprobs, noise_of(rollouts)), forwarded):
        policy_loss(run.loss_tricks, batch, values, entropy).loss.backward()
    return torch.cat([parameter.grad.flatten() for parameter in MODEL.parameters()])


# Weights and rejections are in the inputs, before rows are packed.
@pytest.mark.few(12)
@by_loss(lambda run: type(run.importance) is Token and run.correction == TisToken(cap=1.3, floor=0.0))
def test_parameter_gradients_of_a_transformer_do_not_depend_on_how_rows_are_packed(case) -> None:
    run, scene = LOSSES[case], transformer_scene()
    inputs = inputs_of(run, scene)
    by_budget = [
        make_minibatch(inputs, range(3), run.denominator, Microbatching(budget, 192)) for budget in (10**9, 24, 1)
    ]
    assert len(by_budget[0]) == 1 < len(by_budget[1]) < len(by_budget[2])
    # Rows of different problems side by side, in an order of no one's making, at the full padded width.
    live = inputs.loss_mask.any(dim=1).nonzero().flatten()
    shuffled = live[torch.randperm(len(live), generator=torch.Generator().manual_seed(2))].split(3)
    by_hand = [batch_of_rows(run, inputs, rows.tolist()) for rows in shuffled]
    whole, *others = (parameter_gradient(run, batches, scene.rollouts) for batches in (*by_budget, by_hand))
    size = whole.abs().max()
    assert size > 1e-4
    for other, name in zip(others, ("24 tokens", "row by row", "by hand")):
        assert_close(other / size, whole / size, TOLERANCE, f"relative to the largest entry, {name}")


# --- the scenes ---------------------------------------------------------------------------------------------


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


@by_loss()
def test_every_option_acts_on_the_scenes(case) -> None:
    run, scene = LOSSES[case], random_scene(0, 8, 4, 6)
    inputs = inputs_of(run, scene)
    batches = make_minibatch(inputs, range(8), run.denominator, Microbatching(ONE_MICROBATCH, 192))
    [batch] = marked(run, batches, scene.logprobs, scene.rollouts)
    logprobs = scene.logprobs.flatten()[batch.tokens]
    sums = policy_loss(run.loss_tricks, batch, logprobs, -logprobs).sums
    assert (sums["surrogate_active"] > 0) != run.surrogate.is_no_op
    assert (sums["importance_active"] > 0) != run.importance.is_no_op
    assert ((inputs.correction_weights != 1)[inputs.loss_mask].any()) != run.correction.is_no_op
    assert (inputs.loss_mask.sum() < scene.rollouts.sampled_mask[~scene.graded.truncated.flatten()].sum()) != (
        isinstance(run.rejection, NoRejection) and not run.entropy.selects_tokens
    )


@pytest.mark.parametrize("rejection", REJECTIONS, ids=label)
def test_every_rejection_acts_on_the_scenes(rejection) -> None:
    scene = random_scene(0, 3, 4, 6)
    mask = scene.rollouts.sampled_mask
    stays = rejection(scene.old_logprobs, scene.rollouts.sampler_logprobs, mask)
    assert 0 < (stays & mask).sum() < mask.sum()


# --- what counts once in a statistic over tokens ------------------------------------------------------------


def _with_injected_tokens(seed: int) -> Scene:
    """A scene of which every third response token was put in by a trick."""
    scene = random_scene(seed, 3, 4, 6)
    chosen = scene.rollouts.sampled_mask & (torch.arange(6) % 3 != 2)[None, :]
    graded = replace(scene.graded, sampled_lengths=chosen.sum(dim=1).reshape(3, 4))
    return replace(scene, rollouts=replace(scene.rollouts, sampled_mask=chosen), graded=graded)


def _whitened(values: Tensor, statistics: Tensor) -> Tensor:
    return (values - statistics.mean()) / torch.sqrt(statistics.var() + 1e-8)


WHITEN = BatchStd(Deviation.centred, Weights.tokens, True, 1, 1e-8, Floor.in_variance)


@pytest.mark.parametrize("in_statistics", [True, False])
@pytest.mark.parametrize("name", ["batch_mean", "length_weighted", "whitened_rows", "whitened_tokens"])
@pytest.mark.parametrize("seed", range(3))
def test_a_token_counts_once_if_it_was_sampled_and_stays(name: str, seed: int, in_statistics: bool) -> None:
    """Statistics over tokens, as if each token that counts were laid out with its row's reward."""
    scene = _with_injected_tokens(seed)
    rejection = TokenK2(in_statistics, 0.02)
    options = {
        "batch_mean": {"baseline": BatchMean(Weights.tokens), "scale": NoScale()},
        "length_weighted": {"baseline": LengthWeighted(Singleton.zero), "scale": NoScale()},
        "whitened_rows": {"scale": WHITEN},
        "whitened_tokens": {"baseline": Gae(0.9, 0.8), "scale": WHITEN},
    }[name]
    inputs = inputs_of(make_run(rejection=rejection, **options), scene)
    drift = scene.old_logprobs - scene.rollouts.sampler_logprobs
    stays = scene.rollouts.sampled_mask & (drift**2 / 2 <= 0.02)
    assert 0 < stays.sum() < scene.rollouts.sampled_mask.sum() < scene.rollouts.response_mask.sum()
    reward = scene.graded.reward.flatten()[:, None].expand(stays.shape)
    group = torch.arange(12)[:, None].expand(stays.shape) // 4
    live = stays.any(dim=1) | in_statistics
    expected = torch.zeros(stays.shape, dtype=F64)
    if name == "batch_mean":
        expected = reward - reward[stays].mean()
    elif name == "whitened_tokens":
        credit = make_run(rejection=rejection, baseline=Gae(0.9, 0.8), scale=NoScale())
        alone = inputs_of(credit, scene).advantages
        expected = _whitened(alone, alone[stays])
    else:
        for place in range(3):
            here, rows = group == place, (group[:, 0] == place) & live
            mean = reward[here & stays].mean() if name == "length_weighted" else reward[rows, 0].mean()
            tied = reward[rows, 0].unique().numel() < 2
            expected = torch.where(here, 0.0 if tied else reward - mean, expected)
        if name == "whitened_rows":
            expected = _whitened(expected, expected[stays])
    assert_close(inputs.advantages, torch.where(stays, expected, 0.0), TOLERANCE, name)
