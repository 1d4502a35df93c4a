"""What a run says of itself before it starts: formula, nearest recipe, rules, papers; and the lists of tricks."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from compositions import RECIPES, samples
from helpers import composed
from omegaconf import OmegaConf

from grpo_lab.config import catalogue
from grpo_lab.config.explain import explain, formula, nearest_recipe, no_op_lines
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_with_choices
from grpo_lab.config.rules import check_compatible
from grpo_lab.config.run_config import AXES, options, slot_types, to_run
from grpo_lab.loop import start

# The axes whose classes make up the loss; the others say in one line what they are.
SAID = (
    "truncation", "reward_shaping", "group_filter", "old_policy", "correction", "rejection", "baseline", "scale",
    "importance", "surrogate", "aggregation", "denominator", "kl", "entropy", "curriculum", "reference",
)  # fmt: skip


def explained(*overrides: str) -> str:
    config, choices = compose_with_choices(overrides)
    return explain(to_run(config), config, choices)


def definitions(*overrides: str) -> dict[str, str]:
    return dict(formula(to_run(compose_with_choices(overrides)[0])))


def test_the_explanation_of_a_masked_dr_grpo_is_its_loss() -> None:
    text = explained("recipe=dr_grpo", "truncation=mask_after")
    for line in (
        "  loss = sum_{i,t}(m * L) / (N * 72)",
        "     L = S",
        "     S = -min(r * A, clip(r, 1 - 0.2, 1 + 0.2) * A)",
        "     r = exp(logp - old)",
        "     A = C",
        "     C = R - mean_g(R)",
        "     R = 1 if right else 0",
        "     m = 1 on tokens the policy sampled; truncated rows: m = 0, but in the statistics",
        "nearest recipe dr_grpo",
        "  truncation=mask_after for score",
        "  arXiv:2503.14476  truncation=mask_after",
    ):
        assert line in text.splitlines(), line
    assert "no clip, gate or penalty on drift can act" in " ".join(text.split())


@pytest.mark.extended
def test_every_part_that_is_switched_on_shows_in_the_formula_and_no_other() -> None:
    plain = definitions()
    assert plain.keys() == {"loss", "L", "S", "r", "A", "C", "R", "old", "ties", "m", "counts", "steps"}
    assert plain["L"] == "S"
    full = definitions("correction=tis_token", "kl=k3_loss", "entropy=bonus", "reward_shaping=soft_overlong")
    assert full.keys() - plain.keys() == {"w", "prox", "K", "E"} and full["L"] == "w * S + K + E"
    assert (
        "0.04 * (x - log x - 1)" in full["K"] and "-1 * (1 - 0) / 2 * clip((n_i - (72 - 10)) / 10, 0, 1)" in full["R"]
    )
    rloo = definitions("recipe=rloo")
    assert rloo["S"] == "-A * logp" and "r" not in rloo and "- 0.03 * sum_t(old - ref)" in rloo["R"] and "K" not in rloo
    assert definitions("rejection=sequence_mean_k1")["m"].endswith(
        "m = 0 unless exp(mean_t(prox - sampler)) in [0.99, 1.01], rows that left are not counted"
    )


@pytest.mark.extended
def test_advantages_of_tokens_are_explained_with_the_values_they_come_from() -> None:
    ppo = definitions("recipe=ppo")
    assert ppo["C"] == "sum_l (1 * 0.95)^l (R_t + 1 * V_next - V), over t and the tokens after it"
    assert ppo["A"].startswith("(C - mean_batch(C)) / (std_batch(C; each of the tokens counts once")
    assert ppo["R_t"] == "R at the last token, and a token's share of the kl penalty at that token; 0 elsewhere"
    clip = "V held within 0.2 of its old value, "
    assert ppo["V"] == f"a model of its own, fitted to C + V by its square, {clip}4 optimiser steps a batch"
    assert "ties" not in ppo, "no group is compared"
    zero = definitions("recipe=open_reasoner_zero", "critic.pretrain_steps=5")
    assert zero["R_t"] == "R at the last token; 0 elsewhere" and zero["C"].startswith("sum_l (1 * 1)^l")
    assert zero["V"].endswith("by its square, 8 optimiser steps a batch, 5 steps before the policy")
    assert definitions("recipe=ppo", "critic=value_head")["V"].startswith("a linear layer on the policy's hidden")
    vine = definitions("recipe=vineppo")
    assert vine["C"] == "V(s_next) - V(s) of each step, R for the last; V by 9 continuations" and "R_t" not in vine
    assert definitions("recipe=remax")["C"] == "R - R(greedy response)"


def test_a_critic_is_explained_where_something_reads_it_and_nowhere_else() -> None:
    text = explained("recipe=open_reasoner_zero", "critic.learning_rate=0.001")
    assert "  critic.learning_rate=0.001 for 0.0005" in text.splitlines()
    assert "critic=separate_model_orz" in text and "V the value of the state before a token" in " ".join(text.split())
    assert "2503.24290" in text and "2503.24290" not in explained("recipe=grpo")


@pytest.mark.extended
def test_what_is_generated_is_explained_apart_from_what_the_loss_leaves_out() -> None:
    plain = {"m": "1 on tokens the policy sampled"}
    cases = {
        ("group_filter=resample",): {
            "prompts": "groups of one and the same outcome are replaced, in rounds of 1 batches", **plain
        },
        ("group_filter=active",): {
            "prompts": "each group of one and the same outcome is replaced by a further problem", **plain
        },
        ("curriculum=kimi", "group_filter=oversample_abort_partial"): {
            "prompts": "the easiest 0.25 of the problems, growing to all of them at 0.5 of the budget; within them "
            "P(i) proportional to 1 - s_i; of 2 batches the first groups to end that are not of one and the same "
            "outcome; cut ones go on in the next step: True",
            **plain,
        },
        ("truncation=interrupt",): {
            "ends": "unfinished after U(0.75, 0.85) of 72 tokens: '#' is put in, with m = 0", **plain
        },
        ("truncation=repetition_stop",): {
            "ends": "cut after 0.625 of 72 tokens in a row of probability above 0.99", **plain
        },
        ("kl=k3_loss", "reference=ema"): {"ref": "0.95 * reference + (1 - 0.95) * learner after each step", **plain},
        ("group_filter=drop_reward",): {
            "m": "1 on tokens the policy sampled; groups of one and the same reward: m = 0, and not counted in the "
            "statistics"
        },
    }  # fmt: skip
    for overrides, said in cases.items():
        found = definitions(*overrides)
        assert {name: found[name] for name in said} == said, overrides
    assert not definitions().keys() & {"prompts", "ends", "ref", "V", "R_t"}
    assert "ref" not in definitions("reference=ema"), "nothing reads it"


@pytest.mark.extended
def test_a_convention_shows_in_the_formula() -> None:
    verl = definitions("convention=verl", "rejection=token_k1", "old_policy=sampler", "surrogate=kl_cov")
    assert (
        verl["loss"].endswith("/ (n_i + 1e-08) ) / N")
        and "ddof 1" in verl["A"]
        and verl["ties"].endswith("R for a lone one")
    )
    assert "exp(sampler - prox) in [0.5, 5]" in verl["m"] and "the microbatch's tokens" in verl["S"]
    assert verl["old"] == "the sampler's log-probs" and verl["prox"].startswith("the learner's")
    assert definitions("convention=nemo_rl")["A"] == "C / (std_{g without i}(R; ddof 1) + 1e-06), C where that std is 0"
    assert definitions("scale=batch_std", "convention=openrlhf")["A"].startswith("C / sqrt(max(std_batch(C;")
    assert definitions("aggregation=constant", "convention=verl")["loss"].endswith("/ (N * padded width)")
    assert definitions("aggregation=token_mean", "convention=trl_bnpo")["loss"].endswith("per microbatch")


def numbers_in(config_node: object) -> set[str]:
    return {f"{value:g}" for value in vars(config_node).values() if isinstance(value, float)}


@pytest.mark.parametrize("axis", SAID)
def test_every_option_writes_a_formula_with_its_own_numbers(axis: str) -> None:
    for option, trick in samples()[axis].items():
        text = trick.written()
        assert text, option
        assert not re.search(r"<\w|\bNone\b|[{]\w+[}]", text), text
        silent = {"20", "1e-06", "0"} if axis in ("importance", "kl", "scale", "aggregation") else set()
        assert all(number in text for number in numbers_in(trick) - silent), (option, text)


@pytest.mark.few(3)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_is_its_own_nearest_without_a_difference(recipe: str) -> None:
    config, choices = composed("world=arithmetic", f"recipe={recipe}")
    nearest = nearest_recipe(choices, config)
    assert (nearest.recipe, nearest.differences) == (recipe, ())
    assert f"this is recipe {recipe}" in explain(to_run(config), config, choices)


@pytest.mark.extended
def test_a_recipe_reached_by_hand_is_recognised() -> None:
    overrides = ["scale=none", "aggregation=constant", "updates=one", "kl=k2_loss"]
    config, choices = compose_with_choices(overrides)
    nearest = nearest_recipe(choices, config)
    assert nearest.recipe == "dr_grpo" and nearest.differences == ("kl=k2_loss for none",)


@pytest.mark.extended
def test_numbers_conventions_and_rewards_that_differ_are_named() -> None:
    text = explained("recipe=grpo", "kl.kl_coef=0.01", "convention=trl", "reward=strict_plus_minus")
    assert "nearest recipe grpo" in text
    for difference in ("kl.kl_coef=0.01 for 0.04", "convention=trl for house", "reward.wrong=-1 for 0"):
        assert f"  {difference}" in text.splitlines()
    assert "scale.ddof" not in text, "a number that follows the convention is no second difference"


def test_an_optimiser_without_the_numbers_that_recipes_set_is_explained_too() -> None:
    config, choices = compose_with_choices(["recipe=grpo"])
    config = OmegaConf.create(OmegaConf.to_container(config))  # without the schemas, which know adamw alone
    del config.optimizer["eps"], config.optimizer["weight_decay"]
    nearest = nearest_recipe(choices, config)
    assert (nearest.recipe, nearest.differences) == ("grpo", ())


@pytest.mark.extended
def test_what_cannot_run_is_explained_with_the_reason() -> None:
    text = explained("surrogate=kimi", "importance=sequence")
    assert "refused" in text.splitlines() and "set importance=token" in " ".join(text.split())


def test_an_option_of_the_users_own_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "surrogate").mkdir()
    (tmp_path / "surrogate" / "wide.yaml").write_text(
        "# Mine, after 2401.00001.\n"
        "defaults:\n  - /schema/surrogate/ppo@_here_\n  - _self_\nclip_low: 0.4\nclip_high: 0.4\n"
    )
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    text = explained("surrogate=wide")
    assert "surrogate=wide for ppo" in text and "arXiv:2401.00001  surrogate=wide" in text
    assert "clip(r, 1 - 0.4, 1 + 0.4)" in text and "Mine, after 2401.00001." in text


def test_an_option_whose_file_only_hydra_knows_is_explained_by_its_class() -> None:
    config, choices = compose_with_choices(["truncation=mask_after"])
    text = explain(to_run(config), config, choices | {"truncation": "somewhere_else"})
    assert "truncation=somewhere_else: Leave truncated rows in the group statistics" in text


@pytest.mark.extended
def test_only_what_somebody_chose_is_said_to_have_changed_nothing() -> None:
    def lines(*overrides: str, inert: tuple[str, ...] = ("surrogate", "kl", "correction")) -> list[str]:
        return no_op_lines(inert, compose_with_choices(overrides)[1])

    nothing = "changed nothing of the loss in the whole run"
    assert lines() == []  # ppo is the plain surrogate: nobody chose it
    assert lines("recipe=grpo") == [f"recipe=grpo brings kl=k3_loss, which {nothing}"]
    assert lines("recipe=grpo", "kl=k2_loss", "surrogate=ppo_higher") == [
        f"surrogate=ppo_higher {nothing}",
        f"kl=k2_loss {nothing}",
    ]


def test_a_rule_names_the_option_that_was_chosen() -> None:
    config, choices = compose_with_choices(["surrogate=ppo_higher", "updates=one"])
    run = to_run(config)
    (line,) = [line for line in check_compatible(run, choices) if "no clip, gate" in line]
    assert line.startswith("surrogate=ppo_higher, updates=one, old_policy=recomputed, correction=none: ")
    (line,) = [line for line in check_compatible(run) if "no clip, gate" in line]
    assert line.startswith("surrogate=ppo(clip_low=0.2, clip_high=0.28), updates=updates(")
    assert "  - surrogate=ppo_higher, updates=one, " in explain(run, config, choices)


@pytest.mark.extended
def test_the_commands_print_them() -> None:
    def shown(*words: str) -> str:
        code = "import sys; from grpo_lab.cli import main; sys.argv = ['grpo-lab', *sys.argv[1:]]; main()"
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert shown("explain", "recipe=gspo").startswith("  loss = sum_i( sum_t(m * L) / n_i ) / N\n")
    listed = shown("tricks").splitlines()
    for axis in (*AXES, "critic"):
        (start_of_axis,) = (n for n, line in enumerate(listed) if line.startswith(f"{axis}: "))
        names = {path.stem for path in (conf_folder() / axis).glob("*.yaml")}
        lines = listed[start_of_axis + 1 : start_of_axis + 1 + len(names)]
        assert {line.split()[0] for line in lines} == names
        assert all(len(line.split(maxsplit=1)[1]) > 20 for line in lines)


def test_the_recipe_table_holds_every_recipe_and_every_choice() -> None:
    rows = {line.split("|")[1].strip(): line for line in catalogue.recipes_table().splitlines()[2:]}
    assert set(rows) == set(RECIPES)
    for recipe, chosen in catalogue.recipe_overrides().items():
        assert sum(cell.strip() != "-" for cell in rows[recipe].split("|")[2:-1]) == len(chosen)
        assert all(f" {option} " in rows[recipe] for option in chosen.values())


@pytest.mark.extended
def test_what_a_recipe_leaves_out_is_in_its_explanation_and_in_the_table() -> None:
    text = " ".join(explained("recipe=vineppo").split())
    assert "left out of it - sampling at temperature 0.6 (the base is sure already" in text
    assert "unverified in it - the aggregation, the KL estimator and the number of updates" in text
    assert "left out of it" not in explained("recipe=dr_grpo") and "unverified in it" not in explained("recipe=dr_grpo")
    rows = {line.split("|")[1].strip(): line for line in catalogue.ingredients_table().splitlines()[2:]}
    assert set(rows) == set(RECIPES)
    for recipe, chosen in catalogue.recipe_overrides().items():
        gaps = catalogue.recipe_gaps(recipe)
        assert all(f"{slot}={option}" in rows[recipe] for slot, option in chosen.items())
        assert all(item in rows[recipe] for item in (*gaps.left_out, *gaps.unverified))
    assert rows["dr_grpo"].endswith("| - | - |")
    assert "optimizer.weight_decay=0.01" in rows["scalerl"] and "optimizer.eps=1e-15" in rows["cispo"]
    text = explained("recipe=scalerl", "optimizer.weight_decay=0.1", "pass_rate=band", "pass_rate.solved=true")
    for said in ("optimizer.weight_decay=0.1 for 0.01", "pass_rate=band for none", "pass_rate.solved=True for False"):
        assert f"  {said}" in text.splitlines(), said


def test_every_class_of_the_loss_says_what_it_computes_in_its_docstring() -> None:
    for axis in SAID:
        for cls in options(slot_types()[axis]).values():
            if not cls.__module__.startswith("grpo_lab"):  # a test's own class, imported beside this one
                continue
            assert cls.__doc__ and not cls.__doc__.startswith(f"{cls.__name__}("), cls


@pytest.mark.extended
def test_a_run_keeps_its_explanation_and_mlflow_shows_it_with_what_was_inert(tmp_path: Path, tiny_base: Path) -> None:
    overrides = ["world=tiny", f"runs_dir={tmp_path}", "recipe=dr_grpo", "budget.amount=1", "evaluation=brief"]
    config, choices = compose_with_choices(overrides)
    folder = start(config, "run", choices, ["test"])
    text = (folder / "explanation.txt").read_text()
    assert text == explain(to_run(config), config, choices) + "\n"
    assert json.loads((folder / "DONE").read_text())["no_ops"] == ["surrogate"]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (logged,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert logged.data.tags["no_ops"] == "surrogate"
    assert "sum_{i,t}(m * L) / (N * 24)" in logged.data.tags["mlflow.note.content"]
    assert "explanation.txt" in [file.path for file in client.list_artifacts(logged.info.run_id)]
