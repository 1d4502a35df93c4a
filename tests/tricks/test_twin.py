"""The random twin selects as many tokens, rows, groups and questions as the option would, at random."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from grpo_lab.config.rules import broken_rules
from grpo_lab.config.run_config import RunConfig
from grpo_lab.config.stages import LogprobTricks
from grpo_lab.learner.loss import draw_twins
from grpo_lab.learner.update import accepted_tokens, correction_weights
from grpo_lab.policy.batching import make_minibatch
from grpo_lab.run.training_problems import read_questions, redrawn
from grpo_lab.seeding import rollout_uniforms
from grpo_lab.tricks.aggregation import TokenMean
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.denominator import Survivors
from grpo_lab.tricks.group_filter import Drop, Signal
from grpo_lab.tricks.selects import Selects
from grpo_lab.tricks.surrogate import Delight, Ppo, SurrogateInputs
from grpo_lab.tricks.truncation import MaskAfter, MaskBefore
from grpo_lab.tricks.twin import NoTwin, RandomTwin, redrawn_masks
from grpo_lab.tricks.updates import Updates
from grpo_lab.types import Microbatching
from tests.shared.helpers import (
    F64,
    ONE_MICROBATCH,
    assert_close,
    inputs_of,
    make_run,
    marked,
    random_scene,
)
from tests.shared.loss_options import CORRECTIONS, IMPORTANCES, REJECTIONS, SURROGATES, label
from tests.shared.short_runs import SMALL, metrics_of, run_in_process

EVERY = RandomTwin([])
seeds = st.integers(0, 10**6)
few = settings(max_examples=8, deadline=None)
MASKING = [one for one in SURROGATES if not one.is_no_op and not one.pulls_without_advantage]


def noise_of(scene, seed: int):
    return partial(rollout_uniforms, scene.rollouts, seed, step=0)


def inputs_at(run: RunConfig, scene, surrogate) -> SurrogateInputs:
    """The whole scene as one microbatch of the surrogate, its marked tokens chosen."""
    inputs = inputs_of(run, scene)
    (batch,) = marked(run, make_minibatch(inputs, range(3), run.denominator, Microbatching(ONE_MICROBATCH, 192)),
                      scene.logprobs, scene.rollouts)  # fmt: skip
    logprobs = scene.logprobs.flatten()[batch.tokens].requires_grad_()
    log_ratio = run.importance(logprobs, batch.old_logprobs, batch.loss_mask)
    return SurrogateInputs(logprobs, log_ratio, batch.advantages, batch.loss_mask, batch.marked)


# --- the draw ---------------------------------------------------------------------------------------------------


def test_every_eligible_element_is_drawn_equally_often_and_no_other() -> None:
    """Two of five are selected and a sixth may not be: in 4,000 draws each of the five 1,600 +- 31 times."""
    selected = torch.tensor([True, True, False, False, False, True])
    eligible = torch.tensor([True] * 5 + [False])
    generator, counts = torch.Generator().manual_seed(0), torch.zeros(6)
    for _ in range(4000):
        drawn = EVERY.redraw(Selects.entropy, selected, eligible, lambda _: torch.rand(6, generator=generator))
        assert drawn.sum() == 3 and drawn[5]
        counts += drawn
    assert ((counts[:5] - 1600).abs() < 5 * 31).all()


def test_only_the_named_axes_are_drawn() -> None:
    twin, values = RandomTwin([Selects.rejection]), torch.arange(8)
    everyone, noise = torch.ones(8, dtype=torch.bool), lambda _: torch.rand(8)
    assert torch.equal(twin.redraw(Selects.entropy, values, everyone, noise), values)
    assert torch.equal(NoTwin().redraw(Selects.rejection, values, everyone, noise), values)
    torch.manual_seed(1)
    dealt = twin.redraw(Selects.rejection, values, everyone, noise)
    assert not torch.equal(dealt, values) and torch.equal(dealt.sort().values, values)


def test_streams_of_the_axes_differ() -> None:
    assert len({axis.stream for axis in Selects}) == len(Selects)


# --- the surrogate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("surrogate", MASKING, ids=label)
@few
@given(seed=seeds)
def test_a_surrogates_own_factors_give_its_own_gradient(surrogate, seed: int) -> None:
    """weight = open weight * factor: dealt out unchanged, the factors are the surrogate itself."""
    run = make_run(surrogate=surrogate, aggregation=TokenMean(Scope.step), denominator=Survivors())
    scene = random_scene(seed, 3, 3, 5)
    assume(inputs_of(run, scene).loss_mask.any())
    tokens = inputs_at(run, scene, surrogate)
    own, opened = surrogate(tokens), surrogate.open_weight(tokens)
    alone = tokens.loss_mask & ~own.affected
    if isinstance(surrogate, Delight):  # it gates a token of advantage 0 too, which has no gradient to affect
        alone &= tokens.advantages != 0
    if not surrogate.sequence_level:
        assert_close(own.weight[alone], opened[alone], 1e-3, "a token left alone has its open weight")
    again = surrogate.with_factors(tokens, own.weight / opened)
    sums = [torch.where(tokens.loss_mask, one.token_loss, 0.0).sum() for one in (own, again)]
    first, second = (torch.autograd.grad(one, tokens.logprobs, retain_graph=True)[0] for one in sums)
    assert_close(first, second, 1e-9, "gradient")


@pytest.mark.few(19)
@pytest.mark.parametrize("importance", [make_run().importance, *IMPORTANCES], ids=label)
@pytest.mark.parametrize("surrogate", MASKING, ids=label)
@few
@given(seed=seeds, budget=st.integers(1, 40))
def test_the_twin_deals_out_the_factors_whatever_the_microbatches(
    surrogate, importance, seed: int, budget: int
) -> None:
    if surrogate.needs_token_ratio and not importance.per_token:
        return
    run = replace_slots(make_run(surrogate=surrogate, importance=importance, denominator=Survivors()), twin=EVERY)
    scene = random_scene(seed, 3, 3, 5)
    inputs = inputs_of(run, scene)
    assume((inputs.loss_mask & (inputs.advantages != 0)).any())
    found, mine = [], []
    for limit in (ONE_MICROBATCH, budget):
        batches = make_minibatch(inputs, range(3), run.denominator, Microbatching(limit, 192))
        batches = marked(run, batches, scene.logprobs, scene.rollouts)
        each = [scene.logprobs.flatten()[batch.tokens] for batch in batches]
        noise = {Selects.surrogate: rollout_uniforms(scene.rollouts, 0, "twin/surrogate", 0)}
        given_out, own = (torch.ones_like(scene.logprobs) for _ in range(2))
        for batch, values in zip(draw_twins(run.loss_tricks, batches, each, noise), each):
            columns = torch.arange(batch.tokens.shape[1])
            given_out[batch.rows[:, None], columns] = batch.twin_factors
            tokens = SurrogateInputs(
                values,
                importance(values, batch.old_logprobs, batch.loss_mask),
                batch.advantages,
                batch.loss_mask,
                batch.marked,
            )
            factor = surrogate(tokens).weight / surrogate.open_weight(tokens)
            own[batch.rows[:, None], columns] = torch.where(batch.loss_mask & (batch.advantages != 0), factor, 1.0)
        found.append(given_out)
        mine.append(own)
    assert_close(found[1], found[0], 1e-12, "the draw under other microbatches")
    where = inputs.loss_mask & (inputs.advantages != 0)
    assert (found[0][~where] == 1).all()
    if importance.per_token:
        assert_close(found[0][where].sort().values, mine[0][where].sort().values, 1e-12, "the same factors")
    else:
        rows = where.any(dim=1)
        dealt, own = (
            torch.stack([one[row][where[row]][0] for row in rows.nonzero()[:, 0]]) for one in (found[0], mine[0])
        )
        assert_close(dealt.sort().values, own.sort().values, 1e-12, "the same factors, by rows")


def replace_slots(run: RunConfig, **slots) -> RunConfig:
    for name, option in slots.items():
        object.__setattr__(run, name, option)
    return run


def test_ppos_twin_by_hand() -> None:
    """Ratios 1.5 and 1 with A = 1: one of two tokens is clipped. Its twin clips one at random and weights the other."""
    tokens = SurrogateInputs(
        torch.tensor([[-1.0, -1.0]], dtype=F64),
        torch.tensor([[1.5, 1.0]], dtype=F64).log(),
        torch.ones(1, 2, dtype=F64),
        torch.ones(1, 2, dtype=torch.bool),
    )
    surrogate = Ppo(0.2, 0.2)
    assert_close(surrogate(tokens).weight, [[0.0, 1.0]], 1e-12, "ppo clips the first")
    other = surrogate.with_factors(tokens, torch.tensor([[1.0, 0.0]], dtype=F64))
    assert_close(other.weight, [[1.5, 0.0]], 1e-12, "the twin that clips the second")
    assert_close(other.token_loss, [[1.5, 0.0]], 1e-12, "-1.5 * A * logp")
    assert other.affected.tolist() == [[False, True]]


# --- correction, rejection, entropy -----------------------------------------------------------------------------


def tricks_of(run: RunConfig, twin) -> LogprobTricks:
    needs = {"needs_logprobs": True, "reads_entropy": False, "needs_collision": False}
    options = {name: getattr(run, name) for name in ("old_policy", "correction", "rejection", "kl", "entropy")}
    return LogprobTricks(
        **options, token_credit=run.token_credit, updates=Updates(1, 1, False), twin=twin, seed=0, **needs
    )


@pytest.mark.parametrize("correction", [one for one in CORRECTIONS if not one.is_no_op], ids=label)
@few
@given(seed=seeds)
def test_a_corrections_factors_are_dealt_out_again(correction, seed: int) -> None:
    scene, run = random_scene(seed, 3, 3, 5), make_run(correction=correction)
    rollouts, sampled = scene.rollouts, scene.rollouts.sampled_mask
    own = correction_weights(tricks_of(run, NoTwin()), rollouts, scene.old_logprobs, noise_of(scene, seed))
    dealt = correction_weights(tricks_of(run, EVERY), rollouts, scene.old_logprobs, noise_of(scene, seed))
    log_ratio = torch.where(sampled, scene.old_logprobs - rollouts.sampler_logprobs, 0.0)
    ratios = correction.ratios(log_ratio, sampled).expand_as(own)
    before, after = ((weights / ratios)[sampled] for weights in (own, dealt))
    if correction.ratios(log_ratio, sampled).shape == sampled.shape:
        assert_close(after.sort().values, before.sort().values, 1e-12, "factors")
    else:
        first = [(weights / ratios)[:, 0].sort().values for weights in (own, dealt)]
        assert_close(first[1], first[0], 1e-12, "factors of rows")
    assert (dealt[~sampled] == 1).all()


@pytest.mark.parametrize("rejection", REJECTIONS, ids=label)
@few
@given(seed=seeds)
def test_as_many_tokens_or_rows_are_rejected(rejection, seed: int) -> None:
    scene, run = random_scene(seed, 3, 4, 5), make_run(rejection=rejection)
    mask, in_loss = scene.rollouts.sampled_mask, ~scene.graded.truncated.flatten()
    own, dealt = (
        accepted_tokens(tricks_of(run, twin), scene.rollouts, scene.old_logprobs, in_loss, noise_of(scene, seed))
        for twin in (NoTwin(), EVERY)
    )
    counted = mask & in_loss[:, None]
    if rejection.per_token:
        assert (own & counted).sum() == (dealt & counted).sum()
    else:
        kept, drawn = ((one & counted).any(dim=1) for one in (own, dealt))
        assert kept.sum() == drawn.sum()
        assert torch.equal(dealt, mask & dealt.any(dim=1, keepdim=True)), "whole rows"
    assert torch.equal(own[~in_loss] & mask[~in_loss], dealt[~in_loss] & mask[~in_loss]), "rows out of the loss"


def test_every_rejection_says_whether_it_judges_tokens() -> None:
    scene = random_scene(3, 6, 4, 6)
    mask = scene.rollouts.sampled_mask
    for rejection in REJECTIONS:
        stays = rejection(scene.old_logprobs, scene.rollouts.sampler_logprobs, mask)
        mixed = (stays.any(dim=1) & (mask & ~stays).any(dim=1)).any()
        assert bool(mixed) == rejection.per_token, label(rejection)


# --- rows and groups --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("truncation", [MaskAfter(), MaskBefore()], ids=label)
@few
@given(seed=seeds)
def test_as_many_rows_are_masked(truncation, seed: int) -> None:
    graded = random_scene(seed, 4, 3, 5).graded
    after, noise = truncation(graded), lambda _: torch.rand(4, 3, generator=torch.Generator().manual_seed(seed))
    dealt = redrawn_masks(EVERY, Selects.truncation, graded, after, False, noise)
    assert dealt.in_loss.sum() == after.in_loss.sum()
    assert dealt.in_statistics.sum() == after.in_statistics.sum()
    left = ~dealt.in_statistics
    assert not (left & dealt.in_loss).any()
    assert torch.equal(redrawn_masks(NoTwin(), Selects.truncation, graded, after, False, noise).in_loss, after.in_loss)


@few
@given(seed=seeds)
def test_as_many_groups_are_dropped(seed: int) -> None:
    graded = random_scene(seed, 6, 2, 3).graded
    after, noise = (
        Drop(Signal.outcome)(graded),
        lambda _: torch.rand(6, 1, generator=torch.Generator().manual_seed(seed)),
    )
    dealt = redrawn_masks(EVERY, Selects.group_filter, graded, after, True, noise)
    assert dealt.in_loss.any(dim=1).sum() == after.in_loss.any(dim=1).sum()
    assert torch.equal(dealt.in_loss, dealt.in_statistics)
    assert torch.equal(dealt.in_loss.any(dim=1), dealt.in_loss.all(dim=1)), "whole groups"


def test_as_many_questions_stay(make_run) -> None:
    overrides = ("question_filter=deduplicated", "task.train_size=64")
    one, other = (read_questions(make_run(*overrides, twin).question_settings) for twin in ("twin=none", "twin=random"))
    assert len(one.problems) == len(other.problems)
    problems = one.problems[:12]
    reasons = ["hard"] * 5 + [""] * 7
    dealt = redrawn(EVERY, Selects.pass_rate, reasons, problems, 0)
    assert Counter(dealt) == Counter(reasons) and dealt != reasons
    assert dealt == redrawn(EVERY, Selects.pass_rate, reasons, problems, 0)
    assert redrawn(RandomTwin([Selects.entropy]), Selects.pass_rate, reasons, problems, 0) == reasons


# --- the run ----------------------------------------------------------------------------------------------------

MASKS = [
    "recipe=dapo", "truncation=mask_after", "rejection=token_tv", "rejection.bound=0.001", "updates=two",
    "entropy=high_entropy_tokens", "learner_precision=fp32", "sampler_precision=bf16", "budget.amount=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def first_step(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of the first step of the run without a twin."""
    folder = tmp_path_factory.mktemp("plain")
    return metrics_of(run_in_process(folder, *SMALL, *MASKS))[1]["metrics"]


@pytest.mark.few(1)
@pytest.mark.parametrize("axis", ["truncation", "group_filter", "rejection", "entropy"])
def test_a_run_with_a_twin_selects_as_much_in_its_first_step(
    axis: str, tmp_path: Path, tiny_base: Path, first_step: dict[str, float]
) -> None:
    """The first step begins from the same weights, so the twin of an axis acts on as much, and on other tokens."""
    run = run_in_process(tmp_path, *SMALL, *MASKS, "twin=random", f"twin.of=[{axis}]")
    name, found = f"active_fraction/{axis}", metrics_of(run)[1]["metrics"]
    assert found[name] == first_step[name] > 0
    assert found["train/gradient_norm"] != first_step["train/gradient_norm"]


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (("twin=random", "surrogate=reinforce"), "twin_selects_nothing"),
        (("twin=random", "twin.of=[rejection]"), "twin_selects_nothing"),
        (("twin=random", "surrogate=kimi", "aggregation=sequence_sum"), "twin_of_a_penalty"),
        (("twin=random", "group_filter=oversample_abort"), "twin_of_a_race"),
        (("twin=random", "importance=sequence", "baseline=gae"), "twin_of_mixed_rows"),
    ],
)
def test_a_twin_that_cannot_be_drawn_is_refused(make_run, overrides: tuple[str, ...], rule: str) -> None:
    assert rule in [one.name for one in broken_rules(make_run(*overrides)).errors]
