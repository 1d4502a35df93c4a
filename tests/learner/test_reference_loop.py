"""Every update of the real training loop against the same update computed from the formulas alone.

A case is a short run of the tiny world through `start`. Beside its overrides stand plain options: with each of them in
its place the reference's gradient is another one, so that no case says anything of an option that did not act.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from compositions import RECIPES, listed
from reference_loop import Reference
from reference_recording import Recording, furthest, in_double_precision, norm, recorded
from short_runs import run_in_process

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import snake_case, to_run

EXACT = 1e-5  # of a gradient's norm, and nats; models in float64, the rest as the loop has it
SINGLE = 1e-4  # the same in fp32, where 2e-5 was seen
SHORT = """
    problems_per_step=4 group_size=4 budget.amount=3 optimizer.learning_rate=5e-4 optimizer.warmup_updates=0
    evaluation.probe_problems=2 evaluation.heldout_problems=2 evaluation.downstream_problems=2 evaluation.samples=1
    evaluation.pass_at=[1] evaluation.initial_kl=false checkpoint_every=100 rollouts_every=100
"""
# Times under which syncs fall into the middle of responses.
MIDWAY = """
    cost_model.decode_step=0.01 cost_model.decode_token=0 cost_model.read_token=0 cost_model.train_token=0.0002
    cost_model.update=0 cost_model.sync=0
    budget.amount=6 schedule.max_lag=2
"""
SIXTEEN = "problems_per_step=16 group_size=2 budget.amount=2"
OF_RECIPES = {
    "areal": MIDWAY,
    "cispo": SIXTEEN,
    "dapo": SIXTEEN,
    "deepseek_r1": SIXTEEN,
    "magistral": MIDWAY,
    "olmo3": MIDWAY,
    "open_reasoner_zero": "problems_per_step=8 group_size=2 critic.head_range=0.3",
    "pass_at_k": "baseline.k=2",
    "pipeline_rl": MIDWAY,
    "ppo": "critic.head_range=0.3",
    "prime_rl": MIDWAY,
    "scalerl": MIDWAY,
    "vapo": f"{SIXTEEN} critic.head_range=0.3 critic.pretrain_steps=1",
}

LAGGED = "schedule=one_step_off updates=two"  # a batch is a step old: sampler and learner are far apart
CUT = "engine.max_tokens=12"  # many responses are cut
PUT_IN = "truncation=interrupt truncation.earliest=0.2 truncation.latest=0.5 updates=two"
ROUNDED = "sampler_precision=bf16 updates=two"
THROWN = f"{LAGGED} rejection=token_k1 rejection.low=0.8 rejection.high=1.2"

# Name -> overrides, and the plain options beside which each of them shows.
CASES = {
    "two_passes": ("updates=two_passes", "surrogate=reinforce"),
    "two_passes_in_halves": ("updates.minibatches=2 updates.passes=2", "surrogate=reinforce"),
    "padded": ("packing=false microbatch_tokens=150", ""),
    "packed_and_computed_again": ("gradient_checkpointing=true microbatch_tokens=150", ""),
    "mask_before_survivors": (
        f"{CUT} truncation=mask_before denominator=survivors aggregation=token_mean updates=two",
        "truncation=mask_after denominator=original",
    ),
    "mask_before_rows": (
        f"{CUT} truncation=mask_before denominator=survivors scale=batch_std",
        "truncation=score denominator=original scale=group_std",
    ),
    "thrown_tokens": (
        f"{ROUNDED} rejection=token_k1 rejection.low=0.99 rejection.high=1.01 denominator=survivors "
        "aggregation=prompt_mean correction=tis_token",
        "rejection=none denominator=original correction=none",
    ),
    "thrown_tokens_under_sampler": (
        f"{LAGGED} rejection=token_k3 rejection.bound=0.02 old_policy=sampler",
        "rejection=none old_policy=recomputed",
    ),
    "corrected_under_sampler": (
        f"{LAGGED} surrogate=reinforce old_policy=sampler correction=tis_token correction.cap=1.2",
        "correction=none",
    ),
    "charged": ("kl=k1_reward kl.kl_coef=0.3", "kl=none scale=none"),
    "charged_under_sampler": (
        f"{LAGGED} kl=k1_reward kl.kl_coef=0.3 old_policy=sampler baseline=leave_one_out scale=none",
        "kl=none old_policy=recomputed baseline=group_mean",
    ),
    "reset": ("kl=k3_loss reference=reset reference.every=2 budget.amount=4", "reference=frozen"),
    "following": ("kl=k3_unbiased kl.kl_coef=0.1 reference=ema reference.decay=0.7", "reference=frozen"),
    "put_in_whitened": (f"{PUT_IN} scale=batch_std_tokens", "scale=batch_std"),
    "put_in_batch_mean": (f"{PUT_IN} baseline=batch_mean_tokens scale=none", "baseline=batch_mean"),
    "put_in_opo": (f"{PUT_IN} baseline=length_weighted scale=none", "baseline=group_mean"),
    "thrown_whitened": (f"{THROWN} scale=batch_std_tokens", "scale=batch_std"),
    "thrown_batch_mean": (f"{THROWN} baseline=batch_mean_tokens scale=none", "baseline=batch_mean"),
    "thrown_opo": (f"{THROWN} baseline=length_weighted scale=none", "baseline=group_mean"),
    "critic": (
        f"{CUT} baseline=gae scale=batch_std_tokens group_filter=drop truncation=mask_before kl=k1_reward "
        "critic.head_range=0.3 critic.value_clip=0.05 critic.passes=2 critic.minibatches=2 critic.warmup_updates=0 "
        "group_size=8",
        "group_filter=keep truncation=score kl=none",
    ),
    "value_head": (
        "baseline=gae_orz scale=none critic=value_head critic.head_range=0.3 critic.pretrain_steps=1",
        "baseline=gae",
    ),
    "critic_over_thrown_tokens": (
        f"{THROWN} baseline=gae scale=batch_std_tokens critic.head_range=0.3",
        "rejection=none",
    ),
    "dual_clip": (
        f"{LAGGED} surrogate=dual_clip surrogate.clip_high=0.04 surrogate.bound=1.05 old_policy=sampler "
        "rejection=sequence_sum_k1 rejection.low=0.6 rejection.high=3",
        "surrogate=ppo rejection=none",
    ),
    "sapo": (
        f"{LAGGED} surrogate=sapo correction=tis_sequence rejection=sequence_sum_k2 rejection.bound=0.1",
        "surrogate=ppo correction=none rejection=none",
    ),
    "gmpo": (
        f"{LAGGED} surrogate=gmpo surrogate.clip_high=0.05 correction=tis_geometric correction.cap=1.02 "
        "rejection=sequence_sum_k3 rejection.bound=0.3",
        "surrogate=ppo correction=none rejection=none",
    ),
    "dppo": (
        f"{LAGGED} surrogate=dppo surrogate.delta=0.02 correction=mis rejection=sequence_mean_k1 rejection.low=0.9 "
        "rejection.high=1.1",
        "surrogate=ppo correction=none rejection=none",
    ),
    "dppo_kl": (
        f"{LAGGED} surrogate=dppo_kl surrogate.delta=0.001 correction=tis_token_two_sided correction.cap=1.1 "
        "correction.floor=0.9 rejection=sequence_mean_k2",
        "surrogate=ppo correction=none rejection=none",
    ),
    "cispo": (
        f"{LAGGED} surrogate=cispo_two_sided old_policy=sampler rejection=sequence_mean_k3",
        "surrogate=reinforce rejection=none",
    ),
    "topr": (
        f"{LAGGED} surrogate=topr old_policy=sampler rejection=token_k2 rejection.bound=0.02 "
        "reward_shaping=soft_overlong_correct_only reward_shaping.cache_tokens=22",
        "surrogate=reinforce rejection=none reward_shaping=none",
    ),
    "clip_cov": (
        "surrogate=clip_cov surrogate.share=0.05 surrogate.cov_low=0.1 updates=two_passes reward_shaping=l1_max "
        "importance=sequence_token",
        "surrogate=ppo importance=token",
    ),
    "kl_cov": (
        f"{LAGGED} surrogate=kl_cov surrogate.share=0.05 rejection=sequence_max_k2 rejection.bound=0.12",
        "surrogate=ppo rejection=none",
    ),
    "ipo": (
        f"{LAGGED} surrogate=ipo surrogate.eps=0.02 surrogate.kl_tau=0.05 old_policy=sampler "
        "rejection=sequence_outlier rejection.low=0.8 rejection.high=1.2",
        "surrogate=ppo rejection=none",
    ),
    "ratio_mask": (
        f"{LAGGED} surrogate=ratio_mask surrogate.clip_high=0.1 rejection=token_tv rejection.bound=0.03",
        "surrogate=ppo rejection=none",
    ),
    "kimi_token": (
        f"{LAGGED} surrogate=kimi_token surrogate.clip_high=0.1 surrogate.kl_tau=0.05 old_policy=sampler",
        "surrogate=ratio_mask",
    ),
    "sppo": (f"{LAGGED} surrogate=sppo surrogate.clip=0.1 old_policy=sampler", "surrogate=reinforce"),
    "rec_one_side": (f"{LAGGED} surrogate=rec_one_side surrogate.clip=0.1 old_policy=sampler", "surrogate=ppo"),
    "rec_ring": (
        f"{LAGGED} surrogate=rec_ring surrogate.clip=0.05 surrogate.far=0.1 old_policy=sampler",
        "surrogate=ppo",
    ),
    "vespo": (
        f"{LAGGED} surrogate=vespo importance=sequence_product rejection=sequence_mean_tv rejection.bound=0.01",
        "surrogate=reinforce rejection=none",
    ),
    "dro": (
        f"{LAGGED} surrogate=dro old_policy=sampler rejection=token_binary_kl rejection.bound=0.001",
        "surrogate=reinforce rejection=none",
    ),
    "fipo": (
        f"{LAGGED} surrogate=fipo surrogate.half_life=4 surrogate.low=0.1 old_policy=sampler "
        "rejection=sequence_mean_binary_kl rejection.bound=0.0005",
        "surrogate=ppo rejection=none",
    ),
    "m2po": (f"{LAGGED} surrogate=m2po surrogate.bound=0.001 old_policy=sampler", "surrogate=ppo"),
    "delight": (
        "surrogate=delight token_credit=gtpo_weight token_credit.beta=1.5",
        "surrogate=reinforce token_credit=none",
    ),
    "gtpo_by_entropy": (
        f"{THROWN} token_credit=gtpo_weight_entropy token_credit.beta=0.5",
        "token_credit=none token_credit=gtpo_weight",
    ),
    "improbable_tokens": (f"{PUT_IN} token_credit=probability_weight", "token_credit=none"),
    "entropy_in_the_advantage": (
        f"{LAGGED} token_credit=entropy_advantage entropy=high_entropy_tokens entropy.share=0.5",
        "token_credit=none entropy=none",
    ),
    "clip_b": (
        f"{THROWN} token_credit=clip_b token_credit.mu=1 {CUT} truncation=mask_after",
        "token_credit=none truncation=score",
    ),
    "log_linear": (
        "schedule=one_step_off schedule.lag=3 updates=two budget.amount=5 old_policy=log_linear correction=tis_token "
        "correction.cap=1.05",
        "old_policy=sampler old_policy=recomputed correction=none",
    ),
    "opsm": (
        f"{LAGGED} update_mask=opsm update_mask.delta=0.01 denominator=survivors aggregation=token_mean",
        "update_mask=none",
    ),
    "vaco": (
        f"{LAGGED} update_mask=vaco update_mask.delta=0.05 surrogate=reinforce rejection=token_kpop "
        "rejection.bound=0.001",
        "update_mask=none rejection=none",
    ),
    "cppo": (
        f"{LAGGED} update_mask=cppo update_mask.delta=0.01 update_mask.budget=0.002 update_mask.largest_budget=0.004 "
        "update_mask.floor=0.5 old_policy=sampler kl=k3_loss kl.kl_coef=0.1",
        "update_mask=none",
    ),
    "all_of": (
        f"{LAGGED} rejection=all_of rejection.members.outlier.low=0.7 rejection.members.mean.low=0.97 "
        "rejection.members.mean.high=1.03 +rejection@rejection.members.tv=token_tv rejection.members.tv.bound=0.03",
        "rejection=none",
    ),
    "undecided_tokens": (
        f"{LAGGED} entropy=high_entropy_tokens rejection=sequence_max_k3 rejection.bound=0.05",
        "entropy=none rejection=none",
    ),
    "late_length": ("reward_shaping=kimi_length_late", "reward_shaping=none reward_shaping=kimi_length"),
    "bonus": ("entropy=bonus entropy.coef=0.02 scale=group_mean_order_g", "entropy=none scale=none"),
    "own_mean_of_each_token": (
        f"{LAGGED} baseline=optimal_token scale=none correction=tis_token kl=k1_reward kl.kl_coef=0.3",
        "baseline=return_to_go correction=none kl=none",
    ),
    "own_mean_without_tail": (
        f"{PUT_IN} baseline=optimal_token baseline.zero_tail=false scale=none entropy=high_entropy_tokens",
        "baseline=return_to_go entropy=none",
    ),
    "parts": (
        "reward_shaping=soft_overlong reward_shaping.cache_tokens=22 kl=k1_reward kl.kl_coef=0.3 scale=gdpo",
        "reward_shaping=none kl=none scale=group_std",
    ),
    "vapo": (
        "baseline=gae_length_adaptive baseline.alpha=0.3 scale=batch_std_tokens entropy=positive_nll "
        "critic.head_range=0.3",
        "baseline=gae entropy=none",
    ),
    "balanced": (f"{LAGGED} aggregation=balanced kl=k3_loss kl.kl_coef=0.2", "aggregation=prompt_mean"),
    "noise_corrected": (
        "reward_shaping=backward_correction baseline=forward_correction scale=none",
        "reward_shaping=none baseline=none",
    ),
    "kl_follows_a_target": (
        "kl=k3_loss_adaptive kl.kl_coef=0.2 kl.target=1e-3 kl.horizon=16 updates=two",
        "kl=none kl=k3_loss",
    ),
    "charge_follows_a_target": (
        "kl=k1_reward_adaptive kl.kl_coef=0.2 kl.target=1e-3 kl.horizon=16 scale=none",
        "kl=none",
    ),
    "adaptive": ("entropy=adaptive entropy.target=5 entropy.delta=0.02", "entropy=none"),
    "kalman": (f"{LAGGED} baseline=kalman scale=none", "baseline=group_mean"),
    "asymmetric": (
        f"{LAGGED} baseline=asymmetric scale=none reward_shaping=unlikeliness",
        "baseline=group_mean reward_shaping=none",
    ),
    "opmd": (f"{LAGGED} baseline=opmd scale=none", "baseline=group_mean"),
    "focal": ("scale=focal scale.gamma=2", "scale=group_std"),
    "ema": (f"{LAGGED} baseline=ema scale=none group_size=1 problems_per_step=16", "baseline=none"),
    "value_tracker": (  # the same problems in every step
        f"{LAGGED} baseline=value_tracker baseline.low=0.05 baseline.half_life=0.3 scale=none group_size=2 "
        "problems_per_step=8 task.train_size=8 task.probe_size=8 budget.amount=4",
        "baseline=none baseline=value_tracker",
    ),
    "left_over": (
        "group_filter=oversample_abort_partial correction=icepop correction.high=1.2 updates=one",
        "correction=none",
    ),
}
SCHEDULES = {
    "sync": "updates=two",
    "one_step_off": "schedule=one_step_off schedule.lag=2 updates=two budget.amount=5",
    "off_policy_k": "schedule=off_policy_k schedule.k=3 budget.amount=5",
    "interruptible": f"schedule=interruptible {MIDWAY} updates=two",
    "interruptible_and_put_in": f"schedule=interruptible {MIDWAY} {PUT_IN}",
    "in_flight": f"schedule=in_flight {MIDWAY} updates=two",
    "in_flight_and_put_in": f"schedule=in_flight {MIDWAY} {PUT_IN}",
    "in_flight_in_few_places": f"schedule=in_flight {MIDWAY} engine.max_rows=10 group_filter=active",
    "left_over": "group_filter=oversample_abort_partial updates=two budget.amount=4",
}
# One way through the loop each; the others differ from them in formulas that have tests of their own.
AT_EVERY_CHANGE = """
    plain dapo ppo scalerl vineppo
    two_passes packed_and_computed_again thrown_tokens thrown_tokens_under_sampler charged put_in_opo thrown_opo critic
    critic_over_thrown_tokens one_step_off off_policy_k interruptible_and_put_in in_flight in_flight_in_few_places
"""


def tiered(names: Any) -> list[Any]:
    """The cases of these names, those that are not for every change marked."""
    return [
        name if name in AT_EVERY_CHANGE.split() else pytest.param(name, marks=pytest.mark.extended) for name in names
    ]


def record(folder: Path, overrides: str) -> Recording:
    """A run through `start` with all that the reference needs of it."""
    with recorded() as recording:
        run_in_process(folder, *SHORT.split(), *overrides.split(), checked=0)
    return recording


@cache
def option(override: str) -> Any:
    """What stands in a slot under `axis=name`."""
    return getattr(to_run(compose_config(["world=tiny", "tracking=none", override])), override.partition("=")[0])


def gap(recording: Recording, reference: Reference) -> float:
    """How far the gradients of the policy's updates are from the reference's."""
    found = [update.gradient for step in recording.steps for update in step.updates]
    expected = [gradient for step in recording.steps for gradient in reference.gradients(step)]
    assert any(gradient is not None and norm(gradient) > 1e-3 for gradient in expected)
    return furthest(found, expected)


def critic_gap(recording: Recording, reference: Reference) -> float:
    """The same of the critic's."""
    found = [update.gradient for step in recording.steps for update in step.critic_updates]
    return furthest(found, [gradient for step in recording.steps for gradient in reference.critic_gradients(step)])


def stamp_gaps(recording: Recording, reference: Reference, off_by: int = 0) -> list[float]:
    """Of each step, the largest difference between the sampler's log-probs and those of the stamped weights."""
    gaps = []
    for step in recording.steps:
        pairs = zip(reference.sampled_again(step, off_by), reference.responses(step), strict=True)
        parts = [found - row.sampler[row.sampled] for found, row in pairs]
        gaps.append(float(torch.cat(parts).abs().max()))
    return gaps


def held(recording: Recording, against: str = "", bound: float = EXACT) -> None:
    """Each gradient of policy and critic, and each sampler log-prob, is the reference's, and no option is idle."""
    run, reference = recording.run, Reference(recording)
    assert gap(recording, reference) < bound
    if run.baseline.needs_critic:
        assert critic_gap(recording, reference) < bound
    if not run.sampler_precision.rounds:
        assert max(stamp_gaps(recording, reference)) < bound
    for other in against.split():
        elsewhere = Reference(recording, replace(run, **{other.partition("=")[0]: option(other)}))
        assert gap(recording, elsewhere) > 100 * EXACT, f"{other} would have done the same"


@pytest.mark.few(1)
@pytest.mark.parametrize("recipe", tiered(RECIPES))
def test_every_update_of_a_recipe_is_its_formula(tmp_path: Path, tiny_base: Path, recipe: str) -> None:
    with in_double_precision():
        held(record(tmp_path, f"recipe={recipe} {OF_RECIPES.get(recipe, '')}"))


@pytest.mark.parametrize("name", tiered(CASES))
def test_every_update_of_a_variant_is_its_formula(tmp_path: Path, tiny_base: Path, name: str) -> None:
    overrides, against = CASES[name]
    with in_double_precision():
        held(record(tmp_path, overrides), against)


@pytest.mark.extended
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["two_passes", "critic"])
def test_in_the_precision_that_runs_have(tmp_path: Path, tiny_base: Path, name: str) -> None:
    held(record(tmp_path, f"{CASES[name][0]} optimizer.learning_rate=1e-4"), bound=SINGLE)


def test_rows_without_signal_are_left_out_and_the_gradient_stays(tmp_path: Path, tiny_base: Path) -> None:
    with in_double_precision():
        recording = record(tmp_path, "skip_rows_without_signal=true updates=two_passes")
        held(recording)
    assert min(update.rows for step in recording.steps for update in step.updates) < 16


@pytest.mark.extended  # `held` compares the stamps of every variant too
@pytest.mark.parametrize("name", tiered(SCHEDULES))
def test_each_token_was_drawn_by_the_weights_that_its_stamp_names(tmp_path: Path, tiny_base: Path, name: str) -> None:
    with in_double_precision():
        recording = record(tmp_path, SCHEDULES[name])
        held(recording)
    reference, run = Reference(recording), recording.run
    # Another reading is far off: each stamp as that of the sync before, or of the sync after.
    assert min(max(stamp_gaps(recording, reference, off_by)) for off_by in (-1, 1)) > 0.3
    several = [len(set(row.stamps)) > 1 for step in recording.steps for row in reference.responses(step)]
    assert any(several) == (run.schedule.streams or run.group_filter.carries_over)
    if run.schedule.keeps_cache:
        anew = Reference(recording, replace(run, schedule=option("schedule=interruptible")))
        assert max(stamp_gaps(recording, anew)) > 0.02, "the cache of older weights was kept"


FORMULAS = """
    reward_shaping truncation group_filter correction rejection old_policy baseline scale token_credit importance
    surrogate update_mask aggregation denominator kl reference entropy schedule
"""


def test_no_option_of_the_loss_is_without_a_case() -> None:
    """A new option with a test of its own may have one: it asks for its formula in tests/shared."""
    conf = conf_folder()
    files = [conf / "config.yaml", *(conf / "recipe" / f"{recipe}.yaml" for recipe in RECIPES)]
    lines = [line for file in files for line in re.findall(r"- (?:override /)?(\w+: \w+)", file.read_text())]
    cases = " ".join([*(overrides for overrides, _ in CASES.values()), *SCHEDULES.values()])
    named = [line.replace(": ", "=") for line in lines] + cases.split()
    for axis in FORMULAS.split():
        chosen = {override.partition("=")[2] for override in named if override.startswith(f"{axis}=")}
        texts = [(conf / axis / f"{name}.yaml").read_text() for name in chosen]
        covered = {found for text in texts for found in re.findall(rf"/schema/{axis}/(\w+)@", text)}
        known = {snake_case(kind.__name__) for kind in listed(axis)}
        assert covered >= known, f"{axis}: {known - covered} has no case here"
