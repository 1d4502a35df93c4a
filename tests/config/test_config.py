"""Composition: every option and every recipe composes, recipes are the published rows, bad values are named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import quick_compose
from compositions import CHOICES, RECIPES, option_names, run_of, samples
from omegaconf import OmegaConf
from processes import python_path

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config, compose_with_choices
from grpo_lab.config.rules import _UNREAD_KEYS, IncompatibleRun, check_compatible, unread_keys
from grpo_lab.config.run_config import AXES, CONFIG_GROUPS, flat, options, slot_types, snake_case, to_run
from grpo_lab.config.run_name import run_name
from grpo_lab.run.identity import describe_run
from grpo_lab.tracking.mlflow_params import parameters
from grpo_lab.tricks.baseline import Weights
from grpo_lab.tricks.convention import AlphaForm, Width
from grpo_lab.tricks.group_filter import Signal
from grpo_lab.tricks.scale import AllWrong, Deviation

# Options that the plain run refuses, and what they need beside them; what a new one needs, the refusal says.
NEEDS = {("baseline", name): "scale=none" for name in ("pass_at_k", "gae", "gae_orz", "monte_carlo", "return_to_go")}
# The config groups a method is made of beside the axes.
OWN_GROUPS = ("reward", "critic", "optimizer")


@pytest.mark.parametrize("axis", AXES)
def test_every_option_composes_into_its_class(axis: str) -> None:
    for option in CHOICES[axis]:
        run = replace(run_of(), **{axis: samples()[axis][option]})
        assert isinstance(getattr(run, axis), slot_types()[axis]), option
        try:
            check_compatible(run)
            assert (axis, option) not in NEEDS, option
        except IncompatibleRun as refusal:
            remedies = re.findall(r"Remedy: set (\w+=\w+)", str(refusal))
            assert remedies and NEEDS.get((axis, option), remedies[0]) in remedies, option
            check_compatible(run_of(f"{axis}={option}", *remedies))


@pytest.mark.extended  # in one of them below, at every change
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_composes_in_every_world(recipe: str) -> None:
    """In a world of vLLM's whole calls, with the engine that a recipe whose weights change on the way asks for."""
    for world in option_names("world"):
        words, alone = [f"world={world}", f"recipe={recipe}"], run_of(f"world={world}")
        if run_of(*words).schedule.streams and not alone.engine.streams:
            with pytest.raises(IncompatibleRun, match="Remedy: set engine=native") as refused:
                check_compatible(run_of(*words))
            assert str(refused.value).count("Remedy") == 1
            words.append("engine=native")
        run = run_of(*words)
        check_compatible(run)
        # A recipe may say what right and wrong answers earn, not what is right.
        assert replace(run.reward, correct=1.0, wrong=0.0) == alone.reward, (world, recipe)
        assert run.optimizer.learning_rate == alone.optimizer.learning_rate, (world, recipe)


# Each recipe's row: what differs from the plain options. Every other axis is at its plain option.
ROWS = {
    "plain": {},
    "grpo": {"kl": "k3_loss", "updates": "one"},
    "deepseek_r1": {"surrogate": "ppo_r1", "kl": "k3_loss_r1", "reference": "reset_r1", "updates": "sixteen"},
    "dr_grpo": {"scale": "none", "aggregation": "constant", "updates": "one"},
    "rloo": {
        "baseline": "leave_one_out", "scale": "none", "aggregation": "sequence_sum", "surrogate": "reinforce",
        "kl": "k1_reward", "updates": "one",
    },
    "reinforce": {
        "baseline": "none", "scale": "none", "aggregation": "sequence_sum", "surrogate": "reinforce",
        "updates": "one",
    },
    "reinforce_pp": {
        "baseline": "return_to_go", "scale": "batch_std_tokens", "aggregation": "token_mean", "kl": "k1_reward",
    },
    "reinforce_pp_baseline": {"scale": "batch_std_tokens", "aggregation": "token_mean", "kl": "k2_loss"},
    "opo": {
        "baseline": "length_weighted", "scale": "none", "aggregation": "token_mean", "surrogate": "reinforce",
        "updates": "one",
    },
    "gpg": {
        "scale": "informative_share", "aggregation": "token_mean", "surrogate": "reinforce", "updates": "one",
    },
    "maxrl": {"scale": "group_mean", "aggregation": "token_mean", "surrogate": "reinforce", "updates": "one"},
    "pass_at_k": {
        "baseline": "pass_at_k", "scale": "none", "aggregation": "token_mean", "surrogate": "ppo_higher",
    },
    **{
        name: {
            "baseline": "none", "scale": f"sign_weighted_{name}", "aggregation": "token_mean",
            "reward": "strict_plus_minus",
        }
        for name in ("psr", "nsr", "w_reinforce")
    },
    "gspo": {"importance": "sequence", "surrogate": "ppo_gspo"},
    "lite_ppo": {"scale": "batch_std_raw", "aggregation": "token_mean"},
    "open_r1": {
        "truncation": "mask_after", "reward_shaping": "soft_overlong", "surrogate": "ppo_higher",
        "aggregation": "token_mean", "updates": "two_passes",
    },
    "dapo": {
        "reward_shaping": "soft_overlong", "group_filter": "resample_three", "surrogate": "dual_clip_dapo",
        "aggregation": "token_mean", "updates": "sixteen", "reward": "strict_plus_minus",
    },
    "cispo": {
        "truncation": "repetition_stop", "reward_shaping": "soft_overlong", "group_filter": "resample",
        "surrogate": "cispo", "aggregation": "prompt_mean", "updates": "sixteen",
    },
    "ppo": {"baseline": "gae", "scale": "batch_std_tokens", "aggregation": "token_mean", "kl": "k1_reward"},
    "open_reasoner_zero": {
        "baseline": "gae_orz", "scale": "batch_std_tokens", "aggregation": "token_mean", "updates": "one",
        "critic": "separate_model_orz",
    },
    "vineppo": {
        "baseline": "monte_carlo", "scale": "batch_std_tokens", "aggregation": "token_mean",
        "kl": "k3_loss_vineppo",
    },
    "remax": {
        "baseline": "greedy", "scale": "none", "aggregation": "sequence_sum", "surrogate": "reinforce",
        "updates": "one",
    },
    "kimi_k15": {
        "curriculum": "kimi", "reward_shaping": "kimi_length_late", "scale": "none", "surrogate": "kimi",
        "aggregation": "sequence_sum", "updates": "four_fresh",
    },
    "l1": {"reward_shaping": "l1_exact", "updates": "one"},
    "olmo3": {
        "schedule": "in_flight", "group_filter": "active", "correction": "tis_token", "scale": "none",
        "surrogate": "ppo_higher_olmo", "aggregation": "token_mean", "updates": "one",
    },
    "scalerl": {
        "curriculum": "no_positive_resampling", "schedule": "in_flight", "truncation": "interrupt",
        "group_filter": "drop", "old_policy": "sampler", "scale": "batch_std", "surrogate": "cispo",
        "aggregation": "prompt_mean", "denominator": "survivors", "updates": "one", "reward": "strict_plus_minus",
    },
    "topr": {
        "baseline": "none", "scale": "none", "importance": "sequence_product", "surrogate": "topr",
        "aggregation": "sequence_sum", "reward": "strict_plus_minus",
    },
    "areal": {
        "schedule": "interruptible", "correction": "icepop_areal", "scale": "batch_std", "aggregation": "token_mean",
    },
    "pipeline_rl": {
        "schedule": "in_flight", "old_policy": "sampler", "baseline": "leave_one_out", "scale": "none",
        "surrogate": "cispo_pipeline_rl", "aggregation": "token_mean", "updates": "one",
    },
    "luspo": {"importance": "sequence", "surrogate": "ppo_luspo", "aggregation": "sequence_sum"},
    "rgra": {"surrogate": "reinforce", "kl": "k3_loss", "updates": "one"},
    "reinforce_rej": {
        "group_filter": "drop", "baseline": "none", "scale": "none", "surrogate": "dual_clip",
        "aggregation": "token_mean", "kl": "k3_loss_r1", "entropy": "bonus", "reward": "strict_plus_minus",
    },
    "minirl": {
        "correction": "tis_token_minirl", "scale": "none", "surrogate": "ppo_minirl", "aggregation": "sequence_sum",
    },
    "flash_reinforce": {
        "schedule": "one_step_off", "correction": "tis_token_uncapped",
        "rejection": "sequence_mean_binary_kl_flash", "baseline": "batch_mean", "scale": "none",
        "surrogate": "reinforce", "updates": "one",
    },
    "prime_rl": {
        "schedule": "in_flight", "group_filter": "drop", "old_policy": "sampler", "scale": "none",
        "surrogate": "ipo_prime_rl", "aggregation": "token_mean", "denominator": "survivors", "updates": "one",
    },
    "glm5": {"correction": "icepop_glm", "surrogate": "ppo_higher", "updates": "one"},
    "kimi_k25": {
        "old_policy": "sampler", "scale": "none", "surrogate": "kimi_token", "aggregation": "token_mean",
    },
    "deepseek_v32": {"scale": "none", "update_mask": "opsm", "kl": "k3_unbiased"},
    "vapo": {
        "baseline": "gae_length_adaptive", "scale": "batch_std_tokens", "aggregation": "token_mean",
        "surrogate": "ppo_higher", "entropy": "positive_nll", "updates": "sixteen", "critic": "separate_model_vapo",
    },
    "magistral": {
        "schedule": "in_flight", "reward_shaping": "soft_overlong_magistral", "group_filter": "active",
        "old_policy": "sampler", "scale": "batch_std", "surrogate": "ppo_higher", "aggregation": "prompt_mean",
        "updates": "one",
    },
    "skywork_or1": {
        "group_filter": "drop", "aggregation": "token_mean", "denominator": "survivors",
        "entropy": "adaptive_skywork_or1", "updates": "one",
    },
    "polaris": {
        "group_filter": "drop", "surrogate": "ppo_higher", "aggregation": "token_mean", "denominator": "survivors",
        "updates": "one",
    },
}  # fmt: skip
# The published numbers of the row; the plain ones hold wherever the surrogate is the plain one.
NUMBERS = {
    "plain": {"updates.minibatches": 4},
    "grpo": {"kl.kl_coef": 0.04, "updates.minibatches": 1},
    "deepseek_r1": {
        "surrogate.clip_low": 10, "surrogate.clip_high": 10, "kl.kl_coef": 0.001, "updates.minibatches": 16,
        "reference.every": 25,
    },
    "dr_grpo": {"updates.minibatches": 1, "aggregation.max_tokens": 72, "aggregation.width": Width.budget},
    "rloo": {"kl.kl_coef": 0.03, "updates.minibatches": 1},
    "reinforce": {"updates.minibatches": 1},
    "reinforce_pp": {"scale.by": Weights.tokens, "scale.recentre": True, "updates.minibatches": 4},
    "reinforce_pp_baseline": {"scale.by": Weights.tokens, "scale.recentre": True, "updates.minibatches": 4},
    "opo": {"updates.minibatches": 1},
    "gpg": {"scale.alpha": AlphaForm.informative_groups, "updates.minibatches": 1},
    "maxrl": {
        "scale.all_wrong": AllWrong.zero, "reward.correct": 1, "reward.wrong": 0, "updates.minibatches": 1,
    },
    "pass_at_k": {
        "baseline.k": 4, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28, "updates.minibatches": 4,
    },
    "psr": {"scale.positive": 1, "scale.negative": 0, "reward.correct": 1, "reward.wrong": -1},
    "nsr": {"scale.positive": 0, "scale.negative": 1, "reward.correct": 1, "reward.wrong": -1},
    "w_reinforce": {"scale.positive": 0.1, "scale.negative": 1, "reward.correct": 1, "reward.wrong": -1},
    "gspo": {"surrogate.clip_low": 3e-4, "surrogate.clip_high": 4e-4, "updates.minibatches": 4},
    "lite_ppo": {"scale.by": Weights.rows, "scale.of": Deviation.raw, "updates.minibatches": 4},
    "open_r1": {
        "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28, "updates.minibatches": 1, "updates.passes": 2,
        "reward_shaping.largest": 0.5,
    },
    "dapo": {
        "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28, "surrogate.bound": 10,
        "group_filter.signal": Signal.outcome, "group_filter.max_rounds": 10, "group_filter.oversample": 3,
        "reward.correct": 1, "reward.wrong": -1, "reward_shaping.largest": 1, "updates.minibatches": 16,
        "optimizer.weight_decay": 0.1, "optimizer.eps": 1e-8,
    },
    "cispo": {
        "surrogate.cap": 5, "group_filter.signal": Signal.outcome, "truncation.probability": 0.99,
        "updates.minibatches": 16, "optimizer.eps": 1e-15, "optimizer.weight_decay": 0,
    },
    "ppo": {
        "baseline.gamma": 1, "baseline.lam": 0.95, "scale.by": Weights.tokens, "scale.recentre": True,
        "critic.value_clip": 0.2, "updates.minibatches": 4,
    },
    "open_reasoner_zero": {
        "baseline.gamma": 1, "baseline.lam": 1, "scale.by": Weights.tokens, "scale.recentre": True,
        "critic.value_clip": 0, "critic.minibatches": 8, "updates.minibatches": 1,
    },
    "vineppo": {
        "baseline.continuations": 9, "scale.by": Weights.tokens, "scale.recentre": True, "kl.kl_coef": 1e-4,
        "updates.minibatches": 4,
    },
    "remax": {"updates.minibatches": 1},
    "kimi_k15": {
        "reward_shaping.coef": 0.5, "reward_shaping.begins_at": 0.5, "updates.minibatches": 4, "updates.passes": 1,
        "updates.fresh_optimizer": True,
    },
    # the paper asks for 100 to 4000 tokens and charges .0003 for each; a budget of 40 tokens is a hundredth
    "l1": {
        "reward_shaping.alpha": 0.03, "reward_shaping.shortest": 8, "reward_shaping.longest": 72,
        "updates.minibatches": 1,
    },
    "olmo3": {
        "schedule.max_lag": 8, "correction.cap": 2, "group_filter.signal": Signal.outcome,
        "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.272, "updates.minibatches": 1,
    },
    "scalerl": {
        "schedule.max_lag": 8, "curriculum.threshold": 0.9, "truncation.earliest": 0.75, "scale.by": Weights.rows,
        "scale.of": Deviation.centred, "surrogate.cap": 5, "reward.wrong": -1, "updates.minibatches": 1,
        "optimizer.eps": 1e-15, "optimizer.weight_decay": 0.01,
    },
    "topr": {"reward.correct": 1, "reward.wrong": -1, "updates.minibatches": 4},
    "areal": {
        "schedule.max_lag": 4, "correction.low": 0, "correction.high": 5, "scale.by": Weights.rows,
        "updates.minibatches": 4,
    },
    "pipeline_rl": {"schedule.max_lag": 8, "surrogate.cap": 1.2, "updates.minibatches": 1},
    "luspo": {"surrogate.clip_low": 2e-3, "surrogate.clip_high": 2.5e-3, "updates.minibatches": 4},
    "rgra": {"kl.kl_coef": 0.04, "updates.minibatches": 1},
    "reinforce_rej": {
        "group_filter.signal": Signal.outcome, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.2,
        "surrogate.bound": 3, "kl.kl_coef": 0.001, "entropy.coef": 0.001, "reward.correct": 1, "reward.wrong": -1,
        "updates.minibatches": 4, "optimizer.weight_decay": 0.01,
    },
    "minirl": {
        "correction.cap": 5, "correction.floor": 0, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.27,
        "updates.minibatches": 4,
    },
    "flash_reinforce": {
        "rejection.bound": 0.005, "correction.cap": 1e6, "baseline.by": Weights.rows, "schedule.lag": 1,
        "updates.minibatches": 1, "optimizer.weight_decay": 0.1,
    },
    "prime_rl": {
        "schedule.max_lag": 8, "group_filter.signal": Signal.outcome, "surrogate.eps": 0.3, "surrogate.kl_tau": 0,
        "updates.minibatches": 1, "optimizer.weight_decay": 0.01,
    },
    "glm5": {
        "correction.low": 0.5, "correction.high": 2, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28,
        "updates.minibatches": 1,
    },
    "kimi_k25": {
        "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28, "surrogate.kl_tau": 0.001, "updates.minibatches": 4,
    },
    "deepseek_v32": {"update_mask.delta": 1e-4, "kl.kl_coef": 0.01, "updates.minibatches": 4},
    "vapo": {
        "baseline.gamma": 1, "baseline.alpha": 0.05, "baseline.lam_value": 1, "scale.by": Weights.tokens,
        "scale.recentre": True, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28, "entropy.coef": 0.1,
        "critic.learning_rate": 2e-4, "critic.minibatches": 16, "critic.pretrain_steps": 2, "updates.minibatches": 16,
    },
    "magistral": {
        "schedule.max_lag": 8, "reward_shaping.largest": 0.1, "group_filter.signal": Signal.outcome,
        "scale.by": Weights.rows, "scale.of": Deviation.centred, "surrogate.clip_low": 0.2,
        "surrogate.clip_high": 0.28, "updates.minibatches": 1,
    },
    "skywork_or1": {
        "group_filter.signal": Signal.outcome, "entropy.target": 0.2, "entropy.delta": 1e-4, "entropy.largest": 0.005,
        "updates.minibatches": 1, "optimizer.weight_decay": 0.01,
    },
    "polaris": {
        "group_filter.signal": Signal.outcome, "surrogate.clip_low": 0.2, "surrogate.clip_high": 0.28,
        "updates.minibatches": 1, "optimizer.weight_decay": 0.01,
    },
}  # fmt: skip
# What nobody could verify in a recipe's source, in the words of its file.
OPEN = {
    "grpo": ["clip width"], "deepseek_r1": ["clip width"], "gspo": ["clip widths"], "rloo": ["KL coefficient"],
    "gpg": ["rescaling"], "ppo": ["KL coefficient"], "reinforce_pp": ["KL coefficient", "updates"],
    "reinforce_pp_baseline": ["KL coefficient", "updates"], "opo": ["aggregation"],
    "maxrl": ["aggregation", "updates"], "pass_at_k": ["clip widths", "updates"], "topr": ["updates"],
    **{name: ["clip", "aggregation", "updates"] for name in ("psr", "nsr", "w_reinforce")}, "lite_ppo": ["updates"],
    "open_r1": ["aggregation", "length penalty"], "cispo": ["the cap", "length penalty", "weight decay"],
    "open_reasoner_zero": ["aggregation"], "vineppo": ["aggregation", "KL estimator", "updates"],
    "remax": ["that no KL is used"], "kimi_k15": ["when the length reward begins", "tau", "updates"],
    "l1": ["that no KL is used"], "areal": ["scale", "baseline", "clip", "updates"], "pipeline_rl": ["aggregation"],
    "luspo": ["clip widths", "updates"], "rgra": ["KL loss", "aggregation", "KL coefficient", "updates"],
    "reinforce_rej": ["rewards of -1", "KL loss", "updates"], "flash_reinforce": ["the paper's own code"],
    "prime_rl": ["caches", "other than the surrogate's"],
    "kimi_k25": ["bounds of the mask and tau", "sampler", "averaged", "updates"],
    "deepseek_v32": ["clip width", "KL coefficient", "threshold", "updates"],
    "vapo": ["whitened", "wrong answers", "value clip"],
    "magistral": ["lower clip width", "sampler", "lag", "length penalty"], "skywork_or1": ["the bonus's numbers"],
}  # fmt: skip
# What it leaves out, in the same words.
ABSENT = {
    "areal": ["lag of 8", "oldest data"], "cispo": ["windows", "losses mixed"], "dapo": ["overlong filter", "eq. 8"],
    "deepseek_r1": ["format"], "grpo": ["single steps"], "l1": ["second stage"], "lite_ppo": ["top-p"],
    "kimi_k15": ["partial rollouts", "filters of prompts", "difficulty", "long2short"],
    "olmo3": ["solved problems", "domains"], "open_r1": ["four passes"], "pipeline_rl": ["gradient clip"],
    "open_reasoner_zero": ["filters of prompts", "last stage", "twelve"], "ppo": ["follows a target"],
    "reinforce_pp": ["one response a prompt"], "scalerl": ["words of its interruption"],
    "topr": ["baseline", "long epochs"], "vineppo": ["temperature 0.6"],
    "reinforce_rej": ["dropped groups"], "minirl": ["routing replay", "FP8", "a cap"],
    "flash_reinforce": ["one response a prompt", "a queue", "filter of tokens"],
    "prime_rl": ["agents", "length penalty"],
    "glm5": ["RL for agents", "reward models", "distillation", "top-k", "hard problems"],
    "kimi_k25": ["budgets", "MuonClip", "reward models"],
    "deepseek_v32": ["keep routing", "keep sampling mask", "each domain", "length penalty", "specialists"],
    "vapo": ["reward model", "50 steps"],
    "magistral": ["format and language", "upper width", "by stage"],
    "skywork_or1": ["by stage", "base model", "once they are solved"],
    "polaris": ["copies", "skipped", "right answers kept", "temperature", "solved problems"],
}  # fmt: skip


def test_every_recipe_has_its_row_here() -> None:
    assert set(RECIPES) == set(ROWS) == set(NUMBERS)


@pytest.mark.few(4)
@pytest.mark.parametrize("recipe", ROWS)
def test_a_recipe_is_the_published_row_on_every_axis(recipe: str) -> None:
    run, plain, row = run_of(f"recipe={recipe}"), run_of(), ROWS[recipe]
    check_compatible(run)
    for slot in (*AXES, *OWN_GROUPS):
        expected = getattr(plain, slot)
        if slot in row:
            # a penalty on length reads what answers are worth
            if slot in OWN_GROUPS or (slot == "reward_shaping" and "reward" in row):
                beside = [f"reward={row['reward']}"] if "reward" in row else []
                expected = getattr(run_of(f"{slot}={row[slot]}", *beside), slot)
            else:
                expected = samples()[slot][row[slot]]
        if slot == "optimizer":  # a recipe changes numbers of the model's own
            numbers = {tuple(name.split(".")): float(value) for name, value in NUMBERS[recipe].items() if slot in name}
            own = {field: value for (of, field), value in numbers.items() if of == slot}
            expected = replace(expected, **own)
        assert getattr(run, slot) == expected, slot
    clips = {} if "surrogate" in row else {"surrogate.clip_low": 0.2, "surrogate.clip_high": 0.2}
    for name, number in (clips | NUMBERS[recipe]).items():
        slot, field = name.split(".")
        assert getattr(getattr(run, slot), field) == number, name


@pytest.mark.extended
def test_recipes_never_set_a_convention() -> None:
    """Nor a config group but reward and critic: another framework's numbers, task or model are no method.

    All count as the house does, then, which is the convention of the plain run: tests/tricks/test_conventions.py.
    """
    for recipe in RECIPES:
        run, plain = run_of(f"recipe={recipe}"), run_of()
        assert [
            group for group in CONFIG_GROUPS if group not in OWN_GROUPS and getattr(run, group) != getattr(plain, group)
        ] == []
        assert "convention" not in (conf_folder() / "recipe" / f"{recipe}.yaml").read_text()


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "plain"])
def test_a_recipe_says_what_is_left_out_with_a_reason_and_what_is_unverified(recipe: str) -> None:
    lines = (conf_folder() / "recipe" / f"{recipe}.yaml").read_text().splitlines()
    for kind, known in (("left out", ABSENT), ("unverified", OPEN)):
        items = [line.removeprefix(f"# {kind}: ") for line in lines if line.startswith(f"# {kind}: ")]
        assert items, f"{kind} what? A source whose every ingredient is there says: nothing"
        assert ("nothing" in items) is (recipe not in known) and (items == ["nothing"] or "nothing" not in items)
        assert all(any(words in item for item in items) for words in known.get(recipe, ())), (kind, items)
        if kind == "left out" and recipe in known:
            assert all(re.search(r" \(.+\)$", item) for item in items), f"no reason in brackets: {items}"


@pytest.mark.few(2)
@pytest.mark.parametrize("importance", ["sequence", "sequence_product"])
@pytest.mark.parametrize("beside", ["recipe=scalerl", "recipe=scalerl surrogate=ppo_gspo", "recipe=topr"])
def test_ratios_of_responses_run_under_the_recipes_that_compare_them(beside: str, importance: str) -> None:
    """ScaleRL's arm with GSPO, whose ratio it writes as a product, and TOPR with a mean in the product's place."""
    check_compatible(run_of(*beside.split(), f"importance={importance}"))


def test_recipes_select_options_and_hold_numbers_of_reward_and_optimizer_alone() -> None:
    """And no learning rate, which belongs to a model, as the grader belongs to a task."""
    for path in (conf_folder() / "recipe").glob("*.yaml"):
        written = OmegaConf.load(path)
        assert set(written) <= {"defaults", "reward", "optimizer"}, path
        assert written.get("reward", {"wrong": -1}) == {"wrong": -1}, path
        assert set(written.get("optimizer", {})) <= {"eps", "weight_decay"}, path
        assert not [entry for entry in written.defaults if {"override /reward", "override /optimizer"} & set(entry)]


def test_the_command_line_wins_over_the_recipe_and_the_recipe_over_the_default() -> None:
    assert type(to_run(compose_config(["recipe=dr_grpo"])).scale).__name__ == "NoScale"
    assert type(to_run(compose_config(["recipe=dr_grpo", "scale=group_std"])).scale).__name__ == "GroupStd"


def test_a_world_may_set_run_level_numbers_and_the_command_line_still_wins() -> None:
    assert to_run(compose_config(["world=tiny"])).engine.max_tokens == 24
    assert to_run(compose_config(["world=tiny", "engine.max_tokens=30"])).engine.max_tokens == 30


def test_numbers_of_other_groups_arrive_by_interpolation() -> None:
    run = to_run(compose_config(["aggregation=constant", "engine.max_tokens=33", "convention.std_ddof=1"]))
    assert run.aggregation.max_tokens == 33
    assert run.scale.ddof == 1


@pytest.mark.few(9)
@pytest.mark.parametrize(
    "override,said",
    [
        ("surrogate.clip_low=-0.1", "Ppo.clip_low must be greater than 0, got -0.1"),
        ("surrogate.clip_high=nan", "Ppo.clip_high must be greater than 0"),
        ("group_size=0", "RunConfig.group_size must be at least 1, got 0"),
        ("engine.top_p=1.5", "top_p must be in (0, 1]"),
        ("optimizer.learning_rate=0", "learning_rate must be greater than 0"),
        ("convention.std_ddof=2", "ddof must be 0 or 1, got 2"),
        ("evaluation.pass_at=[9]", "pass_at must be between 1 and samples"),
        ("model=hf", "model.path"),
        ("group_filter=resample group_filter.max_rounds=0", "Resample.max_rounds must be greater than 0, got 0"),
        ("group_filter=oversample_abort group_filter.oversample=0.5", "oversample must be at least 1, got 0.5"),
        ("curriculum=no_positive_resampling curriculum.threshold=1.5", "threshold must be in (0, 1], got 1.5"),
        ("curriculum=kimi curriculum.ramp=0", "Kimi.ramp must be in (0, 1], got 0"),
        ("baseline=gae baseline.lam=1.1", "Gae.lam must be in (0, 1], got 1.1"),
        ("baseline=monte_carlo baseline.continuations=0", "MonteCarlo.continuations must be greater than 0"),
        ("truncation=interrupt truncation.latest=0.5", "latest must be at least `earliest` (0.75) and below 1"),
        ("truncation=repetition_stop truncation.probability=1", "probability must be in (0, 1), got 1"),
        ("reference=ema reference.decay=1", "Ema.decay must be in (0, 1), got 1"),
        ("reference=reset reference.every=0", "Reset.every must be greater than 0"),
        ("reward_shaping=l1_exact reward_shaping.longest=4", "longest must be at least `shortest` (8), got 4"),
        ("critic.pretrain_steps=100", "pretrain_steps must be below 100"),
        ("updates.passes=0", "Updates.passes must be at least 1, got 0"),
    ],
)
def test_values_out_of_range_fail_with_field_value_and_rule(override: str, said: str) -> None:
    with pytest.raises(ValueError) as error:
        to_run(compose_config(override.split()))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "override,said",
    [
        ("surrogate=ppoo", "ppo_higher"),  # the alternatives are listed
        ("sede=1", "sede"),
        ("surrogate.clip_lo=0.1", "clip_lo"),
        ("group_size=eight", "group_size"),
        ("group_filter.signal=outcome", "signal"),  # keep has no such field
    ],
)
def test_unknown_options_keys_and_types_fail_in_composition(override: str, said: str) -> None:
    with pytest.raises(Exception) as error:
        compose_config([override])
    assert said in str(error.value)


def test_names_come_from_the_choices_whatever_their_order() -> None:
    one = run_name("dr_grpo", ["recipe=dr_grpo", "seed=3", "truncation=mask_after", "budget.amount=5"])
    two = run_name("dr_grpo", ["budget.amount=5", "truncation=mask_after", "runs_dir=/x", "recipe=dr_grpo"])
    assert one == two == "dr_grpo,truncation=mask_after,budget.amount=5"
    assert run_name("plain", []) == "plain"
    assert run_name("plain", ["model=smollm2", "model.file=/mnt/a copy.whl"]) == "plain,model=smollm2"
    long = run_name("plain", [f"task.key{i}={i}" for i in range(40)])
    assert len(long) <= 120 and long != run_name("plain", [f"task.key{i}={i + 1}" for i in range(40)])


def test_snake_case() -> None:
    assert [snake_case(n) for n in ("LeaveOneOut", "K3Loss", "NoKl", "Ppo", "TisToken")] == [
        "leave_one_out", "k3_loss", "no_kl", "ppo", "tis_token",
    ]  # fmt: skip


def test_options_of_an_axis_are_its_concrete_classes() -> None:
    baselines = set(options(slot_types()["baseline"]))
    assert {"group_mean", "gae", "no_baseline", "return_to_go"} < baselines and "baseline" not in baselines
    rejections = set(options(slot_types()["rejection"]))
    assert {"token_k1", "no_rejection"} < rejections
    filters = set(options(slot_types()["group_filter"]))
    assert {"drop", "keep", "resample"} < filters
    assert filters.isdisjoint({"group_filter", "refill"}), "the base of what refills is no option"
    assert rejections.isdisjoint({"rejection", "bounded", "ratio_bounds", "k2_bound"}), "bases are no options"


def test_a_users_own_trick_is_found_before_composition(tmp_path: Path) -> None:
    """A module on PYTHONPATH and a YAML in a folder of the user's own, nothing in the repository edited."""
    (tmp_path / "my_tricks.py").write_text(
        "from dataclasses import dataclass\n"
        "from grpo_lab.tricks.baseline import Baseline\n\n"
        "@dataclass(frozen=True)\n"
        "class HalfMark(Baseline):\n"
        "    mark: float\n"
        "    group_relative = False\n"
        "    formula = 'R - {mark}'\n"
        "    def __call__(self, graded):\n"
        "        return graded.reward - self.mark\n"
    )
    (tmp_path / "conf" / "baseline").mkdir(parents=True)
    (tmp_path / "conf" / "baseline" / "half_mark.yaml").write_text(
        "# mine\ndefaults:\n  - /schema/baseline/half_mark@_here_\n  - _self_\nmark: 0.5\n"
    )
    shown = subprocess.run(
        [sys.executable, "-m", "grpo_lab.train", "plugins=[my_tricks]", "baseline=half_mark", "--cfg", "job"],
        env={
            **os.environ,
            "PYTHONPATH": python_path(tmp_path),
            "GRPO_LAB_CONFIG_PATH": str(tmp_path / "conf"),
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "mark: 0.5" in shown.stdout


PARTS_THAT_READ = {
    "critic": ("recipe=ppo",),
    "reference": ("kl=k3_loss",),
    "optimizer.final_share": ("optimizer=adamw_cosine",),
    "optimizer.decay_share": ("optimizer=adamw_wsd",),
    "model.lora.alpha": ("model=hf", "model.path=x", "model.lora.rank=8"),
    "model.lora.targets": ("model=hf", "model.path=x", "model.lora.rank=8"),
    "evaluation.other_wording": ("evaluation=thorough",),
    "evaluation.suite_problems": ("evaluation=thorough",),
    "template.target_length": ("recipe=l1",),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("key", _UNREAD_KEYS)
def test_a_part_that_is_off_is_unread_until_something_reads_it(key: str) -> None:
    assert key in unread_keys(run_of())
    words = PARTS_THAT_READ[key]
    assert key not in unread_keys(run_of(*words))
    config = flat(compose_config([*words]))
    assert any(name == key or name.startswith(f"{key}.") for name in config) or key in ("critic", "reference")


def test_the_record_of_a_run_has_all_of_its_configuration() -> None:
    """Also what it does not read, and what MLflow does not show."""
    config, choices = compose_with_choices(["world=tiny", "tracking=none", "recipe=dapo"])
    described = describe_run(
        "key", "dapo", config, {}, None, choices, [], None, None, {}, {"git": None}, None, [], [], unread_keys(run_of())
    )
    assert described["config"] == {key: value for key, value in flat(config).items() if key.split(".")[0] != "design"}
    assert described["choices"] == choices and "critic" in described["unread"]
    assert {"critic.learning_rate", "convention.std_eps", "runs_dir"} <= described["config"].keys()
    shown = parameters(described)
    assert {"critic", "critic.learning_rate", "convention.std_eps", "runs_dir", "tracking"}.isdisjoint(shown)
    assert {"convention", "surrogate.clip_high", "optimizer.learning_rate", "seed"} <= shown.keys()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "words",
    [
        ("world=tiny", "kl=k3_loss", "kl.kl_coef=1", "~sft", "+evaluation.tables={own: {path: x.jsonl}}"),
        ("recipe=dapo", "+experiments=overlong", "optimizer.learning_rate=1e-3"),
        ("recipe=none_such",),
        ("no_key=1",),
    ],
    ids=lambda words: words[0],
)
def test_what_tests_compose_is_what_hydra_composes(words: tuple[str, ...]) -> None:
    """And a configuration that one caller changes is not what the next one gets."""

    def composed() -> str:
        try:
            config, choices = compose_with_choices(words)
        except ValueError as error:
            return str(error)
        text = f"{OmegaConf.to_yaml(config)}{choices}{OmegaConf.get_type(config)}"
        config.seed = 71
        return text

    first, again = composed(), composed()
    quick_compose.leave()
    try:
        assert first == again == composed()
    finally:
        quick_compose.enter()
