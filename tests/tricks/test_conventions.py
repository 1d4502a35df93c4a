"""What the presets of conf/convention compute, against verl's own numbers and the arithmetic of the frameworks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
import yaml
from compositions import option_names
from helpers import (
    F64,
    ONE_MICROBATCH,
    advantages_of,
    assert_close,
    batch_of_rows,
    inputs_of,
    loss_and_gradient,
    make_graded,
    random_scene,
    step_of,
)
from torch import Tensor
from verl_cases import CASES, LOSSES, both_cases, graded_of, tensor, verl_inputs

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.rules import WARNINGS, check_compatible
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.learner.loss import policy_loss
from grpo_lab.tricks.convention import AlphaForm, BoundForm, CapForm, Convention, Floor, Scope, Singleton, Width

EXACT = 1e-12
PRINTED = 5e-3  # two decimals
VERL = 1e-8
TWO_OF_EIGHT = [[1, 0, 0, 0, 1, 0, 0, 0]]
PRESETS = ("verl", "trl", "trl_bnpo", "open_instruct", "nemo_rl", "openrlhf")


# Composing takes half a second, so the n-th options of these axes are composed together and taken apart again.
TOGETHER = {
    "baseline": ("group_mean", "leave_one_out", "length_weighted", "none"),
    "scale": ("group_std", "none", "informative_share", "batch_std", "batch_std_raw", "batch_std_tokens"),
    "aggregation": ("sequence_mean", "token_mean", "constant", "prompt_mean", "sequence_sum"),
    "surrogate": ("ppo", "clip_cov", "kl_cov", "dual_clip", "gmpo", "sapo", "cispo_two_sided"),
}


@cache
def composed(*overrides: str) -> RunConfig:
    return to_run(compose_config(["tracking=none", *overrides]))


def option(convention: str, axis: str, name: str):
    """The object that stands in a slot once this convention and this option of the axis are chosen."""
    place = TOGETHER[axis].index(name)
    choices = [f"{other}={names[place]}" for other, names in TOGETHER.items() if place < len(names)]
    return getattr(composed(f"convention={convention}", *choices), axis)


@cache
def run_under(convention: str, *overrides: str) -> RunConfig:
    """The run of these overrides, refused where the loop would refuse it."""
    chosen = dict(word.split("=") for word in overrides)
    if all(name in TOGETHER.get(axis, ()) for axis, name in chosen.items()):
        plain = {axis: names[0] for axis, names in TOGETHER.items()}
        parts = {axis: option(convention, axis, name) for axis, name in (plain | chosen).items()}
        run = replace(composed(f"convention={convention}", *(f"{a}={n}" for a, n in plain.items())), **parts)
    else:
        run = composed(f"convention={convention}", *overrides)
    check_compatible(run)
    return run


def advantages_under(convention: str, graded, *overrides: str) -> Tensor:
    """[P, G] of the baseline and scale that the overrides choose, with this convention's numbers."""
    run = run_under(convention, *overrides)
    return advantages_of(graded, run.baseline, run.scale)


@pytest.mark.extended
def test_options_composed_together_are_those_composed_alone() -> None:
    alone = composed("convention=verl", "baseline=leave_one_out", "scale=batch_std_tokens", "aggregation=constant")
    assert run_under("verl", "baseline=leave_one_out", "scale=batch_std_tokens", "aggregation=constant") == alone


def test_these_are_all_the_presets() -> None:
    assert set(option_names("convention")) == {*PRESETS, "house"}


# --- house --------------------------------------------------------------------------------------------------

HOUSE = Convention(
    std_ddof=0,
    std_eps=1e-6,
    std_leave_one_out=False,
    batch_ddof=0,
    batch_eps=1e-6,
    batch_floor=Floor.added,
    singleton=Singleton.zero,
    gpg_alpha=AlphaForm.informative_groups,
    cispo_cap=CapForm.absolute,
    k1_bounds=BoundForm.ratio,
    k1_limit=0.0,
    k2_limit=0.0,
    k3_limit=0.0,
    sequence_mean_eps=0.0,
    constant_width=Width.budget,
    token_mean_scope=Scope.step,
    covariance_scope=Scope.step,
)


def test_house_is_what_a_run_gets_that_asks_for_nothing() -> None:
    assert composed().convention == HOUSE
    assert composed("convention=house") == composed()


def test_no_recipe_world_or_option_names_a_convention_of_its_own() -> None:
    for path in sorted(conf_folder().rglob("*.yaml")):
        if path.parent.name == "convention":
            continue
        settings = yaml.safe_load(path.read_text()) or {}
        chosen = [entry for entry in settings.get("defaults", []) if isinstance(entry, dict)]
        picked = [value for entry in chosen for key, value in entry.items() if key.split("/")[-1] == "convention"]
        assert picked == (["house"] if path == conf_folder() / "config.yaml" else []), path
        assert "convention" not in settings, path


@pytest.mark.extended
def test_what_is_of_verl_alone_and_what_of_bnpo() -> None:
    verls = ("singleton", "gpg_alpha", "k1_bounds", "constant_width", "covariance_scope")
    conventions = {name: run_under(name).convention for name in PRESETS}
    for name, convention in conventions.items():
        for field in verls:
            same = getattr(convention, field) == getattr(HOUSE, field)
            assert same == (name != "verl"), (name, field)
    assert replace(conventions["trl"], token_mean_scope=Scope.microbatch) == conventions["trl_bnpo"]


CUT_SENSITIVE = ("aggregation=token_mean", "aggregation=constant", "surrogate=clip_cov", "surrogate=kl_cov")
microbatches_matter = next(rule for rule in WARNINGS if rule.name == "microbatches_matter").broken_when


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("convention", "sensitive"),
    [
        ("house", ()),
        ("trl", ()),
        ("open_instruct", ()),
        ("nemo_rl", ()),
        ("openrlhf", ()),
        ("trl_bnpo", ("aggregation=token_mean",)),
        ("verl", ("aggregation=constant", "surrogate=clip_cov", "surrogate=kl_cov")),
    ],
)
def test_which_options_of_a_preset_depend_on_the_cut_and_are_warned_of(convention: str, sensitive) -> None:
    runs = {option: run_under(convention, option) for option in CUT_SENSITIVE}
    assert tuple(option for option, run in runs.items() if microbatches_matter(run)) == sensitive


def gradient_of(run: RunConfig, microbatch_tokens: int, padding: int = 0) -> Tensor:
    """Of a random step, with shares of the covariance options raised so that they act on a few tokens."""
    scene = random_scene(3, 4, 4, 6, padding=padding, junk=-2.5 if padding else 0.0)
    if run.surrogate.mark_scope is not None:
        lower = {"cov_low": 0.1} if hasattr(run.surrogate, "cov_low") else {}
        run = replace(run, surrogate=replace(run.surrogate, share=0.2, **lower))
    return loss_and_gradient(run, inputs_of(run, scene), scene.logprobs, microbatch_tokens)[1][:, :6]


@pytest.mark.parametrize(
    "option",
    [f"aggregation={name}" for name in option_names("aggregation")] + ["surrogate=clip_cov", "surrogate=kl_cov"],
)
def test_under_house_no_cut_and_no_padding_moves_a_gradient(option: str) -> None:
    run = run_under("house", option)
    whole = gradient_of(run, ONE_MICROBATCH)
    assert whole.abs().max() > 1e-4
    for tokens in (1, 16):
        assert_close(gradient_of(run, tokens), whole, EXACT, f"{option}, {tokens} tokens a microbatch")
    assert_close(gradient_of(run, 16, padding=3), whole, EXACT, f"{option}, wider padding")


@pytest.mark.parametrize(
    ("convention", "option"),
    [
        ("trl_bnpo", "aggregation=token_mean"),
        ("verl", "aggregation=constant"),
        ("verl", "surrogate=clip_cov"),
        ("verl", "surrogate=kl_cov"),
    ],
)
def test_where_the_cut_matters_it_moves_the_gradient(convention: str, option: str) -> None:
    run = run_under(convention, option)
    assert (gradient_of(run, 1) - gradient_of(run, ONE_MICROBATCH)).abs().max() > 1e-4


# --- verl, by its own code ----------------------------------------------------------------------------------


ADVANTAGES = {
    "group_mean / group_std ddof=1 eps=1e-6": (),
    "group_mean / none": ("scale=none",),
    "leave_one_out / none": ("baseline=leave_one_out", "scale=none"),
    "group_mean / batch mean+std, token-weighted, ddof=1": ("scale=batch_std_tokens",),
    "length_weighted (OPO) / none": ("baseline=length_weighted", "scale=none"),
}
TOKEN_CISPO = "cispo clamp to [.8,1.28] | token_mean"
POLICY_LOSSES = {
    "ppo low=.2 high=.28 dual=3 | token_mean": (
        "surrogate=dual_clip",
        "surrogate.clip_high=0.28",
        "aggregation=token_mean",
    ),
    "ppo low=.2 high=.2 dual=3 | sequence_mean": ("surrogate=dual_clip",),
    "ppo low=.2 high=.2 dual=3 | constant L=7": ("surrogate=dual_clip", "aggregation=constant"),
    "gspo-token low=.03 high=.04 | sequence_mean": (
        "importance=sequence_token",
        "surrogate=ppo_gspo",
        "surrogate.clip_low=0.03",
        "surrogate.clip_high=0.04",
    ),
    TOKEN_CISPO: ("surrogate=cispo_two_sided", "aggregation=token_mean"),
    "sapo tau_pos=1 tau_neg=1.05 | sequence_mean": ("surrogate=sapo",),
    "gmpo log-clip .4 | sequence_mean": ("surrogate=gmpo",),
}


def test_every_number_of_the_reference_is_asked_for() -> None:
    for case in CASES:
        assert case["advantages"].keys() == ADVANTAGES.keys()
        assert case[LOSSES].keys() == POLICY_LOSSES.keys()
        assert case["kl elementwise"].keys() == {"k1", "k2", "k3"}


@both_cases
@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_are_those_of_verl(case, name: str) -> None:
    got = advantages_under("verl", graded_of(case), *ADVANTAGES[name]).flatten()
    assert_close(got, case["advantages"][name], VERL, name)


@both_cases
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_and_gradients_are_those_of_verl(case, name: str) -> None:
    run, inputs, expected = run_under("verl", *POLICY_LOSSES[name]), verl_inputs(case), case[LOSSES][name]
    loss, gradient = loss_and_gradient(run, inputs, tensor(case, "logprobs"))
    assert_close(loss, expected["loss"], VERL, f"loss of {name}")
    assert_close(gradient, expected["grad"], VERL, f"gradient of {name}")


@both_cases
def test_a_cap_counted_from_one_is_the_clamp_of_verl(case) -> None:
    overrides = ("surrogate=cispo", "surrogate.cap=0.28", "surrogate.clip_low=0.2", "aggregation=token_mean")
    run, expected = run_under("verl", *overrides), case[LOSSES][TOKEN_CISPO]
    loss, gradient = loss_and_gradient(run, verl_inputs(case), tensor(case, "logprobs"))
    assert_close(loss, expected["loss"], VERL, "loss")
    assert_close(gradient, expected["grad"], VERL, "gradient")


@both_cases
@pytest.mark.parametrize("name", ["k2", "k3"])
def test_kl_terms_are_those_of_verl(case, name: str) -> None:
    kl = composed("convention=verl", f"kl={name}_loss", "kl.kl_coef=1").kl
    logprobs = tensor(case, "logprobs")
    got = kl(logprobs, logprobs, tensor(case, "ref_logprobs")) * tensor(case, "response_mask")
    assert_close(got, case["kl elementwise"][name], VERL, f"{name} on every token")


@both_cases
def test_k1_in_the_reward_is_that_of_verl_summed_over_the_response(case) -> None:
    kl = composed("convention=verl", "kl=k1_reward", "kl.kl_coef=1").kl
    logprobs, ref, mask = tensor(case, "logprobs"), tensor(case, "ref_logprobs"), tensor(case, "response_mask").bool()
    expected = torch.tensor(case["kl elementwise"]["k1"], dtype=F64)
    charged = kl.shape(graded_of(case), kl.token_penalties(logprobs, ref, mask))
    assert_close(charged.components["k1"].flatten(), -expected.sum(dim=1), VERL, "k1 of whole responses")
    for column in range(case["tokens"]):  # a response of which one token was sampled is charged that token's k1
        only = torch.zeros_like(mask)
        only[:, column] = mask[:, column]
        charge = kl.shape(graded_of(case), kl.token_penalties(logprobs, ref, only)).components["k1"]
        assert_close(charge.flatten(), -expected[:, column], VERL, f"k1 of token {column}")


# --- advantages ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "eps", "expected"),
    [
        # rewards 0 and 2 eps: centred by eps, a deviation of eps (ddof 0) or sqrt(2) eps (ddof 1), plus eps
        ("house", 1e-6, 1 / 2),
        ("open_instruct", 1e-8, 1 / 2),
        ("trl", 1e-4, 1 / (math.sqrt(2) + 1)),
        ("trl_bnpo", 1e-4, 1 / (math.sqrt(2) + 1)),
        ("verl", 1e-6, 1 / (math.sqrt(2) + 1)),
        ("openrlhf", 1e-9, 1 / (math.sqrt(2) + 1)),
        # each row has one other, whose deviation is 0: not divided
        ("nemo_rl", 1e-6, 1e-6),
    ],
)
def test_the_eps_beside_a_deviation_of_its_own_size(convention: str, eps: float, expected: float) -> None:
    advantages = advantages_under(convention, make_graded([[0, 2 * eps]]))
    assert_close(advantages, [[-expected, expected]], 1e-10, "advantages")


@pytest.mark.parametrize(
    ("convention", "deviation", "eps"),
    [
        # variance .25 * .75 = 3/16; Bessel's is 8/7 of it, 3/14
        ("house", math.sqrt(3 / 16), 1e-6),
        ("open_instruct", math.sqrt(3 / 16), 1e-8),
        ("trl", math.sqrt(3 / 14), 1e-4),
        ("trl_bnpo", math.sqrt(3 / 14), 1e-4),
        ("verl", math.sqrt(3 / 14), 1e-6),
        ("openrlhf", math.sqrt(3 / 14), 1e-9),
    ],
)
def test_two_right_answers_of_eight(convention: str, deviation: float, eps: float) -> None:
    got = advantages_under(convention, make_graded(TWO_OF_EIGHT))[0, :2]
    assert_close(got, [0.75 / (deviation + eps), -0.25 / (deviation + eps)], EXACT, "advantages")


def test_nemo_leaves_the_rarest_success_small() -> None:
    for right, printed in ((1, 1.0), (2, 2.27)):
        graded = make_graded([[1] * right + [0] * (8 - right)])
        got = advantages_under("nemo_rl", graded, "baseline=leave_one_out")[0]
        assert_close(got[:right], [printed] * right, PRINTED, f"{right} of 8")
        assert (got[right:] < 0).all()
    # others 1 of 7, variance 1/7 with Bessel: 6/7 / (1/sqrt(7) + 1e-6)
    assert_close(got[0], 6 / 7 / (1 / math.sqrt(7) + 1e-6), EXACT, "2 of 8")


def test_a_lone_row_is_raw_for_verl_and_nothing_elsewhere() -> None:
    lone = make_graded([[1, 0, 1, 0]], in_statistics=[[True, False, False, False]])
    assert_close(advantages_under("verl", lone), [[0.999999, 0, 0, 0]], 1e-9, "1 / (1 + 1e-6)")
    overrides = ("baseline=leave_one_out", "scale=none")
    assert_close(advantages_under("verl", lone, *overrides), [[1.0, 0, 0, 0]], 0, "RLOO keeps the raw score")
    for convention in ("house", "trl", "open_instruct", "nemo_rl", "openrlhf"):
        assert_close(advantages_under(convention, lone), [[0.0] * 4], 0, convention)
        assert_close(advantages_under(convention, lone, *overrides), [[0.0] * 4], 0, convention)


@pytest.mark.extended
def test_whitening_over_tokens() -> None:
    graded = make_graded([[1, 1, 0, 0]], lengths=[[100, 10, 10, 10]])
    verl = advantages_under("verl", graded, "scale=batch_std_tokens")
    assert_close(verl, [[0.42, 0.42, -2.34, -2.34]], PRINTED, "two printed decimals")
    # centred +-.5, mean (55 - 10)/130 = 9/26, variance 1/4 - (9/26)^2 = 22/169; verl's is 130/129 of it
    root = math.sqrt(22)
    population = [2 / root, 2 / root, -11 / root, -11 / root]
    shrunk = 22 / 169 / (22 / 169 * 130 / 129 + 1e-8)
    assert_close(verl, [[value * math.sqrt(shrunk) for value in population]], EXACT, "eps below the root")
    biased = advantages_under("openrlhf", graded, "scale=batch_std_tokens")
    assert_close(biased, [population], EXACT, "OpenRLHF's variance is the population's")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("convention", "size", "expected"),
    [
        # rewards 0 and 2 size in a batch of one group: variance size^2, with Bessel 2 size^2
        ("house", 1e-6, 1 / 2),
        ("trl", 1e-4, 1 / (math.sqrt(2) + 1)),
        ("verl", 1e-4, 1 / math.sqrt(3)),  # 1e-8 is added below the root
        ("openrlhf", 1e-3, 1.0),
        ("openrlhf", 1e-6, 0.01),  # a variance of 1e-12 is below the least of 1e-8: 1e-6 / 1e-4
    ],
)
def test_the_eps_beside_a_deviation_of_the_batch(convention: str, size: float, expected: float) -> None:
    graded = make_graded([[0, 2 * size]])
    for scale in ("batch_std", "batch_std_raw"):
        got = advantages_under(convention, graded, f"scale={scale}")
        assert_close(got, [[-expected, expected]], 1e-10, scale)


def test_the_batch_scale_of_trl_is_of_the_raw_rewards() -> None:
    # rewards 1, 0 | 0, 0: centred per group, divided by the Bessel deviation of all four, sqrt(1/4) + 1e-4
    got = advantages_under("trl", make_graded([[1, 0], [0, 0]]), "scale=batch_std_raw")
    assert_close(got, [[0.5 / 0.5001, -0.5 / 0.5001], [0, 0]], EXACT, "advantages")


def test_the_alpha_of_verl_depends_on_how_rewards_are_labelled() -> None:
    plain, relabelled = make_graded(TWO_OF_EIGHT), make_graded([[2 * value - 1 for value in TWO_OF_EIGHT[0]]])
    # 8 rows over 2 rewards that are not 0, then over 8
    assert_close(advantages_under("verl", plain, "scale=informative_share")[0, :2], [3, -1], EXACT, "alpha 4")
    assert_close(advantages_under("verl", relabelled, "scale=informative_share")[0, :2], [1.5, -0.5], EXACT, "alpha 1")
    for convention in ("house", "trl", "open_instruct", "nemo_rl", "openrlhf"):
        for graded, right in ((plain, 0.75), (relabelled, 1.5)):
            got = advantages_under(convention, graded, "scale=informative_share")
            assert_close(got[0, 0], right, EXACT, f"{convention}: one group, and it has signal")


@pytest.mark.parametrize("convention", option_names("convention"))
def test_equal_rewards_give_exactly_nothing_whatever_the_eps(convention: str) -> None:
    """In fp32 the mean of twelve times .7 is not .7, and an eps of 1e-9 makes advantages near 1 of the difference."""
    values = torch.tensor([0.7] * 12)
    assert (values - values.mean()).abs().max() > 1e-8, "the trap is there"
    for reward in ([[0.7] * 12], [[0.9] * 8]):
        graded = make_graded(reward, dtype=torch.float32)
        for overrides in ((), ("baseline=leave_one_out",), ("scale=none",), ("scale=informative_share",)):
            got = advantages_under(convention, graded, *overrides)
            assert_close(got, torch.zeros(graded.reward.shape), 0, f"{convention} {overrides}")


# --- surrogates ---------------------------------------------------------------------------------------------


def weights_under(convention: str, *overrides: str, ratios=(0.5, 1.0, 1.25, 1.5, 7.0)) -> Tensor:
    """What each token's gradient is multiplied with, at A = 1 and these ratios, times the number of tokens."""
    run = composed(f"convention={convention}", "aggregation=token_mean", *overrides)
    logprobs = torch.tensor([[math.log(ratio / 10) for ratio in ratios]], dtype=F64)
    old = torch.full_like(logprobs, math.log(0.1))
    _, gradient = loss_and_gradient(run, step_of([len(ratios)], [1.0], 1, old_logprobs=old), logprobs)
    return -len(ratios) * gradient[0]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("convention", "overrides", "weights"),
    [
        # TRL: min(r, eps_high), and with its own default of .2 REINFORCE at a fifth
        ("trl", ("surrogate.cap=5",), [0.5, 1, 1.25, 1.5, 5]),
        ("trl", ("surrogate.cap=0.2",), [0.2] * 5),
        ("house", (), [0.5, 1, 1.25, 1.5, 5]),
        # open-instruct: min(r, 1 + clip_higher)
        ("open_instruct", ("surrogate.cap=0.272",), [0.5, 1, 1.25, 1.272, 1.272]),
        ("open_instruct", ("surrogate.cap=4",), [0.5, 1, 1.25, 1.5, 5]),
        # verl and NeMo-RL: clamp(r, 1 - eps_low, 1 + eps_high)
        ("verl", ("surrogate.cap=0.2", "surrogate.clip_low=0.2"), [0.8, 1, 1.2, 1.2, 1.2]),
        ("nemo_rl", ("surrogate.cap=0.2", "surrogate.clip_low=0.2"), [0.8, 1, 1.2, 1.2, 1.2]),
    ],
)
def test_the_forms_of_the_cap_of_cispo(convention: str, overrides, weights) -> None:
    got = weights_under(convention, "surrogate=cispo", *overrides)
    assert_close(got, weights, EXACT, "weights at ratios .5, 1, 1.25, 1.5, 7")


@pytest.mark.extended
def test_a_cap_that_only_lowers_the_learning_rate_is_warned_of() -> None:
    rule = next(rule for rule in WARNINGS if rule.name == "loss_is_scaled").broken_when
    assert rule(composed("convention=trl", "surrogate=cispo", "surrogate.cap=0.2"))
    assert not rule(composed("convention=open_instruct", "surrogate=cispo", "surrogate.cap=0.2"))


def test_kl_cov_is_inert_on_policy() -> None:
    scene = random_scene(3, 4, 4, 6)

    def gradient(coef: float, old: Tensor) -> Tensor:
        plain = run_under("verl", "surrogate=kl_cov")
        run = replace(plain, surrogate=replace(plain.surrogate, coef=coef, share=0.2))
        inputs = replace(inputs_of(run, scene), old_logprobs=old)
        return loss_and_gradient(run, inputs, scene.logprobs)[1]

    assert torch.equal(gradient(1.0, scene.logprobs), gradient(1000.0, scene.logprobs))
    assert not torch.equal(gradient(1.0, scene.old_logprobs), gradient(1000.0, scene.old_logprobs))


def test_gmpo_is_not_multiplied_by_the_number_of_microbatches() -> None:
    """verl's own is: eight rows as four times two have four times the loss there. No preset does that."""
    run = run_under("verl", "surrogate=gmpo")
    scene = random_scene(5, 2, 4, 6)
    whole, _ = loss_and_gradient(run, inputs_of(run, scene), scene.logprobs)
    cut, _ = loss_and_gradient(run, inputs_of(run, scene), scene.logprobs, 14)
    assert_close(cut / whole, 1.0, 1e-9, "cut over whole")


# --- aggregation --------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_the_constant_of_verl_is_the_padded_width() -> None:
    # two rows of 4 tokens, A = -1 at ratio 1: losses add up to 8, over 2 rows times the width
    for convention, expected in (("verl", {4: 1.0, 8: 0.5}), ("house", {4: 8 / 80, 8: 8 / 80})):
        run = composed(f"convention={convention}", "aggregation=constant", "engine.max_tokens=40")
        for width, loss in expected.items():
            inputs = step_of([4, 4], [-1.0, -1.0], 2, width=width)
            logprobs = torch.full((2, width), -1.0, dtype=F64)
            got = policy_loss(run.loss_tricks, batch_of_rows(run, inputs, [0, 1]), logprobs, -logprobs).loss
            assert_close(got, loss, EXACT, f"{convention}, padded to {width}")


@pytest.mark.parametrize(
    ("convention", "whole", "cut"),
    [
        # rows of 1 and 3 tokens with losses -1 and +1: (-1 + 3)/4 at once; (-1/1 + 3/3)/2 = 0 one row at a time
        ("trl_bnpo", 0.5, 0.0),
        ("trl", 0.5, 0.5),
        ("house", 0.5, 0.5),
        ("verl", 0.5, 0.5),
    ],
)
def test_a_token_mean_per_microbatch_depends_on_the_cut(convention: str, whole: float, cut: float) -> None:
    run = run_under(convention, "aggregation=token_mean")
    inputs, logprobs = step_of([1, 3], [1.0, -1.0], 2), torch.full((2, 3), -1.0, dtype=F64)
    for tokens, expected in ((ONE_MICROBATCH, whole), (1, cut)):
        assert_close(loss_and_gradient(run, inputs, logprobs, tokens)[0], expected, EXACT, f"{tokens} tokens at most")


@pytest.mark.parametrize(("convention", "eps"), [("house", 0.0), ("trl", 0.0), ("verl", 1e-8)])
def test_what_is_added_to_the_length_in_a_sequence_mean(convention: str, eps: float) -> None:
    run = run_under(convention, "aggregation=sequence_mean")
    loss, _ = loss_and_gradient(run, step_of([1], [-1.0], 1), torch.full((1, 1), -1.0, dtype=F64))
    assert_close(loss, 1 / (1 + eps), 1e-15, "one token of loss 1")


# --- corrections and rejections -----------------------------------------------------------------------------


def stays_under(convention: str, rejection: str, ratios) -> list[bool]:
    """Which rows of one token, of these ratios of learner to sampler, stay with bounds of .1 and 1.2."""
    overrides = (f"rejection={rejection}", "rejection.low=0.1", "rejection.high=1.2")
    old = torch.tensor([[math.log(ratio)] for ratio in ratios], dtype=F64)
    sampled = torch.ones(len(ratios), 1, dtype=torch.bool)
    run = composed(f"convention={convention}", *overrides)
    return run.rejection(old, torch.zeros_like(old), sampled)[:, 0].tolist()


@pytest.mark.few(1)
@pytest.mark.parametrize("rejection", ["token_k1", "sequence_sum_k1", "sequence_mean_k1"])
def test_bounds_of_k1_are_inverted_for_verl(rejection: str) -> None:
    # verl keeps 1/1.2 <= ratio <= 10; the others .1 <= ratio <= 1.2
    ratios = (5.0, 0.5, 1.0, 0.84, 0.82, 1.21, 0.09, 11.0)
    assert stays_under("verl", rejection, ratios) == [True, False, True, True, False, True, False, False]
    assert stays_under("house", rejection, ratios) == [False, True, True, True, True, False, False, False]


@pytest.mark.extended
def test_rejected_rows_feed_the_baseline_where_verl_is_to_be_matched() -> None:
    # rewards 1, 0, 1, 0, the third with a ratio of 20: a mean of 1/3 without it and of 1/2 with it
    old = torch.tensor([[0.0], [0.0], [math.log(20)], [0.0]], dtype=F64)
    sampled = torch.ones(4, 1, dtype=torch.bool)
    for overrides, first in (((), 2 / 3), (("rejection.rejected_in_statistics=true",), 1 / 2)):
        run = composed("convention=verl", "rejection=sequence_max_k3", "scale=none", *overrides)
        settled = run.rejection.settle(make_graded([[1, 0, 1, 0]]), run.rejection(old, torch.zeros_like(old), sampled))
        assert_close(advantages_of(settled, run.baseline, run.scale)[0, 0], first, EXACT, "a sibling's advantage")
        assert settled.in_loss.tolist() == [[True, True, False, True]]


def test_the_sequence_mask_of_trl_drops_long_responses_first() -> None:
    # every token's ratio is 1.2: 1.2^6 = 2.99 stays below 3, 1.2^7 = 3.58 does not
    run = composed("convention=trl", "correction=mis", "correction.high=3")
    sampled = torch.arange(7)[None, :] < torch.tensor([[6], [7]])
    old = torch.full((2, 7), math.log(1.2), dtype=F64)
    weights = run.correction(old, torch.zeros_like(old), sampled)
    assert_close(weights[:, 0], [1.2**6, 0], EXACT, "weights of 6 and of 7 tokens")
