"""Overrides under names that other laboratories use: the error says what they are called here."""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.overrides import MEANT, OPTIONS, misnamed
from grpo_lab.config.run_config import RunConfig


def test_no_name_of_the_table_is_a_key_or_a_group_of_this_configuration() -> None:
    groups = {path.name for path in conf_folder().iterdir() if path.is_dir()}
    assert MEANT.keys().isdisjoint(RunConfig.__dataclass_fields__.keys() | groups)


@pytest.mark.parametrize("meant", sorted(set(MEANT.values()), key=lambda meant: meant.keys), ids=lambda m: m.keys[0])
def test_what_is_named_instead_is_there(meant) -> None:
    config = compose_config([meant.under] if meant.under else [])
    for key in meant.keys:
        node = config
        if key == "recipe":  # a bundle of options leaves no node of its own
            continue
        *groups, last = key.split(".")
        for part in groups:
            node = node[part]
        assert last in list(node), key


@pytest.mark.parametrize("typed", ["[mlflow,tensorboard]", "[tensorboard, mlflow]", "mlflow,tensorboard"])
def test_several_trackers_are_refused_with_the_command_that_fills_the_others(typed: str) -> None:
    said = (
        "a run logs to one tracker: type tracking=mlflow, and copy its runs to the others at any time "
        "with `grpo-lab sync RUNS --to tensorboard`"
    )
    assert misnamed([f"tracking={typed}"]) == misnamed(["-m", f"tracking={typed}"]) == said
    assert misnamed(["tracking=mlflow", "tracking.uri=http://a:5000"]) == ""
    with pytest.raises(ValueError, match="type tracking=mlflow"):
        compose_config([f"tracking={typed}"])


def test_the_sentence_by_hand() -> None:
    said = "the budget counts steps unless another one is chosen"
    assert misnamed(["seed=0", "steps=10"]) == f"there is no key 'steps': type budget.amount=10 ({said})"
    assert "type schedule=one_step_off schedule.lag=4 (" in misnamed(["+lag=4"])
    assert "type problems_per_step=... and group_size=... (" in misnamed(["batch_size=64"])
    assert misnamed(["lr=1e-4", "beta=0.1"]).count("there is no key") == 2
    assert misnamed(["use_vllm=true"]) == "there is no key 'use_vllm': type engine=vllm"
    assert "type reward=function reward.path=a.py:f (FILE.py:FUNCTION)" in misnamed(["reward_fn=a.py:f"])
    nested = misnamed(["actor_rollout_ref.actor.loss_agg_mode=token-mean", "actor_rollout_ref.actor.optim.lr=1e-6"])
    assert "type aggregation=... (token-mean is token_mean" in nested and "type optimizer.learning_rate=1e-6" in nested
    assert misnamed(["engine.lr=1"]) == "", "of a group of ours the error names the keys that are there"
    assert misnamed(["budget.amount=10", "-m", "steps", "--help", "recipe=plain"]) == ""


def test_options_of_other_names_are_guessed() -> None:
    for written, here in OPTIONS.items():
        slot, _, name = written.partition("/")
        options = [path.stem for path in (conf_folder() / slot).glob("*.yaml")]
        assert here in options and name not in options, written
    with pytest.raises(ValueError, match=r"there is no 'surrogate/clip_higher': did you mean surrogate=ppo_higher\? "):
        compose_config(["surrogate=clip_higher"])
    with pytest.raises(ValueError, match=r"there is no 'kl/k3_los': did you mean kl=k3_loss\? choose from"):
        compose_config(["kl=k3_los"])


def test_a_key_of_before_is_named_as_it_is_now() -> None:
    said = "'pace.sync' is called 'cost_model.sync' now: type cost_model.sync=1"
    assert misnamed(["pace.sync=1"]) == said
    assert misnamed(["scores_per_chunk=8", "logits_per_chunk=8"]).endswith("type logits_per_chunk=8")


@pytest.mark.parametrize("command", [["grpo_lab.train"], ["grpo_lab.cli", "explain"]], ids=lambda command: command[0])
def test_a_command_ends_in_the_right_key(command: list[str]) -> None:
    line = [sys.executable, "-m", *command, "steps=10"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: there is no key 'steps': type budget.amount=10 (")


def test_a_path_with_an_equals_sign_needs_quotes_that_the_shell_leaves() -> None:
    folder = "runs/plain,budget.amount=40/seed=0"
    said = f"model.path has a value with '=' in it: quote it twice, \"model.path='{folder}'\""
    assert misnamed([f"model.path={folder}"]) == said
    for right in (f"model.path='{folder}'", f'model.path="{folder}"', "evaluation.tables={a: {path: x=1}}"):
        assert misnamed([right]) == ""
