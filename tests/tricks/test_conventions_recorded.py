"""What the presets of conf/convention compute against numbers of the frameworks' own code: golden/conventions.json.

What a preset does not reproduce stands in its file, one line each. Every such line has a test here, of both numbers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from compositions import option_names
from helpers import F64, ONE_MICROBATCH, advantages_of, assert_close, loss_and_gradient, make_graded, step_of
from torch import Tensor

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import RunConfig, to_run
from grpo_lab.policy.batching import totals_of
from grpo_lab.tricks.baseline import LeaveOneOut
from grpo_lab.tricks.convention import Scope
from grpo_lab.tricks.importance import SequenceToken
from grpo_lab.tricks.kl import K1Reward, K2Loss, K3Unbiased, NoKl
from grpo_lab.tricks.surrogate import ClipCov, DualClip, Gmpo, Ppo, SurrogateInputs

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "conventions.json").read_text())
INPUTS = RECORDED["inputs"]
FRAMEWORKS = ("verl", "nemo_rl", "trl", "openrlhf", "open_instruct")
# OpenRLHF computes KL in fp32, and NeMo-RL the group statistics; verl adds 1e-8 in its means.
CLOSE = {"openrlhf": 2e-7, "nemo_rl": 3e-7, "verl": 1e-8}
# Options without a number of the convention; each preset is composed once, since that takes most of the time.
SURROGATES = {"ppo": Ppo(0.2, 0.28), "dual_clip": DualClip(0.2, 0.28, 3.0)}


@cache
def composed(convention: str, *overrides: str) -> RunConfig:
    return to_run(compose_config(["tracking=none", f"convention={convention}", *overrides]))


def with_kl(convention: str, kl: str) -> RunConfig:
    """The run of a preset with an option of kl of coefficient 1, and CISPO clamped on both sides."""
    run = composed(convention, "kl=k3_loss", "kl.kl_coef=1", "surrogate=cispo_two_sided")
    limits = run.convention
    options = {"k1": K1Reward(1.0, limits.k1_limit), "k2": K2Loss(1.0, limits.k2_limit), "k3": run.kl}
    return replace(run, kl=options[kl])


@pytest.mark.extended
def test_every_option_of_kl_reads_its_limit_from_the_convention() -> None:
    for name in option_names("kl"):
        settings = yaml.safe_load((conf_folder() / "kl" / f"{name}.yaml").read_text())
        assert settings.get("limit") == (None if name == "none" else f"${{convention.{name[:2]}_limit}}"), name
    assert composed("openrlhf", "kl=k2_loss").kl == K2Loss(0.01, 10.0)


def assert_all_close(got: object, theirs: object, framework: str, why: str) -> None:
    """Every entry as near as the framework's arithmetic allows, relative to its size where that is above 1."""
    have, want = (torch.as_tensor(values, dtype=F64) for values in (got, theirs))
    size = want.abs().clamp(min=1)
    assert_close(have / size, want / size, CLOSE.get(framework, 1e-12), f"{framework}: {why}")


GAPS = torch.tensor(INPUTS["ref - logprob"], dtype=F64)


def kl_of(run: RunConfig, gaps: Tensor = GAPS) -> tuple[Tensor, Tensor]:
    """Value and gradient of a token's KL term, for log-probs of the reference that are `gaps` higher."""
    leaf = torch.full((1, len(gaps)), INPUTS["logprob"], dtype=F64).requires_grad_()
    values = run.kl(leaf, leaf.detach(), INPUTS["logprob"] + gaps[None])
    values.sum().backward()
    return values.detach()[0], leaf.grad[0]


def charged(run: RunConfig, gaps: Tensor = GAPS) -> Tensor:
    """k1 of each token, as the reward is charged with it."""
    old = torch.full((1, len(gaps)), INPUTS["logprob"], dtype=F64)
    return -run.kl.token_penalties(old, old + gaps, torch.ones(1, len(gaps), dtype=torch.bool))[0]


def gradients_of(run: RunConfig, log_ratios: Tensor) -> Tensor:
    """The gradient of each token's loss, advantages 1 in the first row and -1 in the second; old log-probs are -1."""
    leaf = (log_ratios - 1).clone().requires_grad_()
    mask, signs = torch.ones_like(log_ratios, dtype=torch.bool), torch.tensor([[1.0], [-1.0]], dtype=F64)
    log_ratio = run.importance(leaf, -torch.ones_like(leaf), mask)
    run.surrogate(SurrogateInputs(leaf, log_ratio, signs.expand(log_ratios.shape), mask)).token_loss.sum().backward()
    return leaf.grad


RATIOS = torch.tensor([INPUTS["log ratios"]] * 2, dtype=F64)
FAR = RATIOS.abs() > 20


def group_advantages(run: RunConfig, rewards: list) -> Tensor:
    return advantages_of(make_graded(rewards), run.baseline, run.scale)


# --- what a preset reproduces -------------------------------------------------------------------------------


# A line of the preset says what is beyond.
ALIKE_K3 = {"trl": GAPS.abs() <= 20, "open_instruct": GAPS.abs() <= 20}
ALIKE_K2 = {"open_instruct": GAPS.abs() <= 40}


@pytest.mark.few(2)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_kl_term_of_each_token_and_its_gradient(framework: str) -> None:
    theirs, everywhere = RECORDED[framework]["kl"], torch.ones_like(GAPS, dtype=torch.bool)
    shared = {"k3": ALIKE_K3.get(framework, everywhere), "k2": ALIKE_K2.get(framework, everywhere)}
    for name in [name for name in ("k2", "k3") if name in theirs]:
        asked = shared[name]
        value, gradient = kl_of(with_kl(framework, name))
        assert_all_close(
            value[asked], torch.tensor(theirs[name]["value"], dtype=F64)[asked], framework, f"values of {name}"
        )
        if framework != "nemo_rl":  # a line of its preset says what its gradient has more
            found = torch.tensor(theirs[name]["gradient"], dtype=F64)[asked]
            assert_all_close(gradient[asked], found, framework, f"gradient of {name}")


@pytest.mark.parametrize("framework", ["verl", "nemo_rl", "openrlhf"])
def test_k1_in_the_reward_has_the_limit_of_the_framework(framework: str) -> None:
    theirs = RECORDED[framework]["kl"]["k1"]["value"]
    assert_all_close(charged(with_kl(framework, "k1")), theirs, framework, "k1")


@pytest.mark.extended
def test_the_issue_s_own_numbers_of_k3() -> None:
    """logp -4 and ref -0.5: 10 without a gradient in verl and NeMo-RL, 28.6 and -32.1 without the limit."""
    gap = torch.tensor([3.5], dtype=F64)
    for framework in ("verl", "nemo_rl", "openrlhf"):
        value, gradient = kl_of(with_kl(framework, "k3"), gap)
        assert (value.item(), gradient.item()) == (10.0, 0.0), framework
    for convention in ("house", "trl"):
        value, gradient = kl_of(with_kl(convention, "k3"), gap)
        assert_close((value.item(), gradient.item()), (math.exp(3.5) - 4.5, 1 - math.exp(3.5)), 1e-12, convention)


@pytest.mark.parametrize(
    ("framework", "surrogate"),
    [(name, loss) for name in FRAMEWORKS for loss in (*SURROGATES, "cispo") if loss in RECORDED[name]],
)
def test_the_weight_of_each_token_in_the_policy_loss(framework: str, surrogate: str) -> None:
    run = with_kl(framework, "k3")
    run = replace(run, surrogate=SURROGATES.get(surrogate, run.surrogate))
    if surrogate == "cispo" and framework in ("trl", "open_instruct"):  # they have no lower bound
        run = replace(run, surrogate=replace(run.surrogate, clip_low=1.0))
    # Where the framework has no limit on the log-ratio, a line of its preset says so.
    asked = ~FAR if framework in ("trl", "nemo_rl", "open_instruct") else torch.ones_like(FAR)
    got, theirs = gradients_of(run, RATIOS)[asked], torch.tensor(RECORDED[framework][surrogate], dtype=F64)[asked]
    assert_all_close(got, theirs, framework, surrogate)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_advantages_of_groups(framework: str) -> None:
    run = with_kl(framework, "k3")
    theirs = RECORDED[framework]["advantages"]
    rewards = INPUTS["rewards"]
    if framework == "nemo_rl":
        run = replace(run, baseline=LeaveOneOut(run.convention.singleton))
        # The last group's differences are below what its fp32 resolves.
        theirs, rewards = theirs[:3], rewards[:3]
    assert_close(group_advantages(run, rewards), theirs, {"nemo_rl": 1e-5, "trl": 1e-7}.get(framework, 1e-9), framework)


def sequence_mean(run: RunConfig) -> float:
    losses = torch.tensor(INPUTS["losses of 1 and of 3 tokens"], dtype=F64)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    return float(run.aggregation(losses, mask, totals_of(mask, 2, [0, 1], torch.zeros(mask.shape))))


@pytest.mark.parametrize("framework", ["verl", "trl", "openrlhf"])
def test_the_mean_over_responses(framework: str) -> None:
    run = with_kl(framework, "k3")
    assert_close(sequence_mean(run), RECORDED[framework]["sequence_mean"], 1e-14, framework)


LARGEST = {"cispo": 5.0, "cispo_two_sided": 1.28, "cispo_pipeline_rl": 1.2}


@pytest.mark.parametrize(("convention", "largest"), [("verl", 5), ("house", 4)])
def test_a_cap_of_one_s_own_is_read_as_the_convention_says(convention: str, largest: int) -> None:
    run = composed(convention, "surrogate=cispo_two_sided", "surrogate.cap=4")
    assert run.surrogate.largest == largest


@pytest.mark.parametrize("convention", option_names("convention"))
def test_an_option_of_cispo_means_one_weight_under_every_convention(convention: str) -> None:
    run = with_kl(convention, "k3")
    assert run.surrogate.cap_form is run.convention.cispo_cap
    assert_close(run.surrogate.largest, LARGEST["cispo_two_sided"], 1e-12, "as its file says")


@pytest.mark.extended
def test_every_option_of_cispo_has_its_largest_weight_where_caps_count_from_1() -> None:
    assert {f"{name}.yaml" for name in LARGEST} == {path.name for path in (conf_folder() / "surrogate").glob("cispo*")}
    for name in ("cispo", "cispo_pipeline_rl"):
        assert_close(composed("verl", f"surrogate={name}").surrogate.largest, LARGEST[name], 1e-12, name)


# --- what a preset does not reproduce: each line of its file --------------------------------------------------

HELD: dict[tuple[str, str], Callable[[str], None]] = {}


def of(*conventions: str, line: str):
    """Holds the lines `# Not reproduced: <line>...` of these presets."""

    def note(test: Callable[[str], None]) -> Callable[[str], None]:
        HELD.update({(convention, line): test for convention in conventions})
        return test

    return note


@of("verl", "trl", "trl_bnpo", "openrlhf", line="groups of equal rewards")
def _(convention: str) -> None:
    theirs = torch.tensor(RECORDED[convention.removesuffix("_bnpo")]["advantages of ties"], dtype=F64)
    assert theirs.abs().min() > 5e-4
    rewards = INPUTS["tied rewards in fp32"]
    run = with_kl(convention, "k3")
    ours = advantages_of(make_graded(rewards, dtype=torch.float32), run.baseline, run.scale)
    assert not ours.any()


@of("trl", "trl_bnpo", "nemo_rl", "open_instruct", line="importance")
def _(convention: str) -> None:
    run = replace(with_kl(convention, "k3"), surrogate=SURROGATES["ppo"])
    theirs = torch.tensor(RECORDED[convention.removesuffix("_bnpo")]["ppo"], dtype=F64)
    assert theirs[1, -1] > 7e10 and gradients_of(run, RATIOS)[1, -1] == 0
    free = replace(run, importance=replace(run.importance, log_ratio_limit=100.0))
    assert_all_close(gradients_of(free, RATIOS), theirs, convention, "without the limit")


@of("trl", "trl_bnpo", "open_instruct", line="kl=k3_loss")
def _(convention: str) -> None:
    run, theirs = with_kl(convention, "k3"), RECORDED[convention.removesuffix("_bnpo")]["kl"]["k3"]
    assert theirs["value"][-2] > 7e10 and kl_of(run)[0][-2] < 5e8
    limit = 40.0 if convention == "open_instruct" else 100.0
    value, gradient = kl_of(replace(run, kl=replace(run.kl, log_ratio_limit=limit)))
    assert_all_close(value, theirs["value"], convention, "values with that limit")
    assert_all_close(gradient, theirs["gradient"], convention, "gradients with that limit")


@of("open_instruct", line="kl=k2_loss")
def _(convention: str) -> None:
    value, _ = kl_of(with_kl(convention, "k2"))
    assert (RECORDED[convention]["kl"]["k2"]["value"][0], value[0]) == (40**2 / 2, 45**2 / 2)


@of("nemo_rl", line="kl=k2_loss, k3_loss")
def _(convention: str) -> None:
    theirs, run = RECORDED[convention]["kl with its score function"], with_kl(convention, "k3")
    for name in ("k2", "k3"):
        gap = (kl_of(with_kl(convention, name))[1] - torch.tensor(theirs[name]["gradient"], dtype=F64)).abs()
        # The estimate itself, for as long as it is below its limit.
        estimate = torch.tensor(RECORDED[convention]["kl"][name]["value"], dtype=F64)
        assert_all_close(gap, torch.where(estimate < 10, estimate, 0.0), convention, f"what {name}_loss lacks")
    value, gradient = kl_of(replace(run, kl=K3Unbiased(1.0, 20.0, run.convention.k3_limit)))
    assert_all_close(value, theirs["k3"]["value"], convention, "k3_unbiased")
    assert_all_close(gradient, theirs["k3"]["gradient"], convention, "gradient of k3_unbiased")


@of("nemo_rl", line="baseline=group_mean")
def _(convention: str) -> None:
    theirs, run = RECORDED[convention]["advantages with its group mean"][:3], with_kl(convention, "k3")
    rewards = INPUTS["rewards"][:3]
    assert (group_advantages(run, rewards) - torch.tensor(theirs, dtype=F64)).abs().max() > 0.1
    whole = replace(run, scale=replace(run.scale, leave_one_out=False))
    assert_close(group_advantages(whole, rewards), theirs, 1e-5, "with the deviation of all rows")


@of("nemo_rl", line="every mean adds 1e-8")
def _(convention: str) -> None:
    ours, theirs = sequence_mean(with_kl(convention, "k3")), RECORDED[convention]["sequence_mean"]
    assert_close(ours, (1 / (1 + 1e-8) + 6 / (3 + 1e-8)) / 2, 1e-15, "tokens")
    assert_close(theirs, ours * 2 / (2 + 1e-8), 1e-15, "rows")


@of("openrlhf", line="kl=k1_reward")
def _(convention: str) -> None:
    charges = torch.tensor(INPUTS["k1 of tokens"], dtype=F64)
    later = charges.flip(1).cumsum(dim=1).flip(1)
    theirs = RECORDED[convention]["returns with k1 at 0.5 of rewards 1 and -1"]
    assert_close(
        theirs, torch.tensor([[1.0], [-1.0]], dtype=F64) - 0.5 * later, 1e-7, "each token's own and later ones"
    )
    kl = replace(with_kl(convention, "k1").kl, kl_coef=0.5)
    shaped = kl.shape(make_graded([[1.0, -1.0]]), kl.token_penalties(charges, 0 * charges, charges.isfinite()))
    assert_close(shaped.reward, [[1 - 0.5 * 0.3, -1 - 0.5 * 0.3]], 1e-12, "the sum of each response")


@of("verl", line="importance=sequence_token")
def _(convention: str) -> None:
    assert not torch.tensor(RECORDED[convention]["gspo at 12 nats"], dtype=F64).any(), (
        "beyond 10 nats it has no gradient"
    )
    run = replace(with_kl(convention, "k3"), importance=SequenceToken(20.0), surrogate=SURROGATES["ppo"])
    ours = gradients_of(run, torch.full_like(RATIOS, 12.0))
    assert_close(ours[1], [math.exp(12)] * RATIOS.shape[1], 1e-6, "pushed down at its ratio")


@of("verl", line="surrogate=gmpo")
def _(convention: str) -> None:
    whole, by_rows = (torch.tensor(RECORDED[convention][name], dtype=F64) for name in ("gmpo", "gmpo by rows"))
    assert_close(by_rows, 2 * whole, 1e-9, "two microbatches of a row each")
    run = replace(with_kl(convention, "k3"), surrogate=Gmpo(0.4, 0.4), kl=NoKl())
    inputs, logprobs = step_of([2, 2], [1.0, -1.0], 2), torch.full((2, 2), -1.0, dtype=F64)
    once, twice = (loss_and_gradient(run, inputs, logprobs, tokens)[1] for tokens in (ONE_MICROBATCH, 1))
    assert once.any()
    assert_close(twice, once, 1e-15, "ours does not see the cut")


@of("verl", line="surrogate=clip_cov")
def _(convention: str) -> None:
    first, second = RECORDED[convention]["clip_cov by seed"]
    assert first != second, "seeds 0 and 1 of torch's generator"
    surrogate = ClipCov(0.2, 0.2, 0.5, -10.0, 100.0, Scope.microbatch)
    run = replace(with_kl(convention, "k3"), surrogate=surrogate, kl=NoKl())
    inputs, logprobs = step_of([4, 4], [1.0, -1.0], 2), -torch.arange(1.0, 9.0, dtype=F64).reshape(2, 4)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        found.append(loss_and_gradient(run, inputs, logprobs)[1])
    assert torch.equal(*found) and (found[0] == 0).any()


def lines_of(convention: str) -> list[str]:
    """What the file of a preset says that it does not reproduce."""
    mark = "# Not reproduced: "
    text = (conf_folder() / "convention" / f"{convention}.yaml").read_text()
    return [line.removeprefix(mark) for line in text.splitlines() if line.startswith(mark)]


@pytest.mark.parametrize(
    ("convention", "line"), [(name, line) for name in option_names("convention") for line in lines_of(name)]
)
def test_what_a_preset_does_not_reproduce(convention: str, line: str) -> None:
    holding = [test for (name, begins), test in HELD.items() if name == convention and line.startswith(f"{begins}")]
    assert len(holding) == 1, f"no test holds this line of {convention}.yaml"
    holding[0](convention)


def test_every_deviation_that_is_held_stands_in_its_file() -> None:
    for convention, begins in HELD:
        assert any(line.startswith(begins) for line in lines_of(convention)), (convention, begins)


def test_the_numbers_are_of_the_commits_that_the_presets_name() -> None:
    named = {"verl": "verl", "nemo_rl": "RL", "trl": "trl", "openrlhf": "OpenRLHF", "open_instruct": "open-instruct"}
    for convention, repo in named.items():
        first = (conf_folder() / "convention" / f"{convention}.yaml").read_text().splitlines()[0]
        assert any(RECORDED["commits"][repo].startswith(word) for word in first.split() if len(word) > 6), first
    for convention, version in RECORDED["same in"].items():
        first = (conf_folder() / "convention" / f"{convention}.yaml").read_text().splitlines()[0]
        assert version in first.split(), f"{convention} {version} has the same numbers"
