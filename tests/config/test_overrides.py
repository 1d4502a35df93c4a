"""Overrides under names that other laboratories use: the error says what they are called here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from enum import Enum
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from grpo_lab.config.folders import conf_folder
from grpo_lab.config.hydra_setup import compose_config, compose_with_choices
from grpo_lab.config.overrides import MEANT, OPTIONS, misnamed
from grpo_lab.config.run_config import RunConfig


def test_no_name_of_the_table_is_a_key_or_a_group_of_this_configuration() -> None:
    groups = {path.name for path in conf_folder().iterdir() if path.is_dir()}
    assert MEANT.keys().isdisjoint(RunConfig.__dataclass_fields__.keys() | groups)


# Keys as people type them from TRL, verl or transformers, a value, and what the configuration is to hold then: the
# option of a slot, or the value of a dotted key. Nothing at all: the key is to be left out.
EXAMPLES: list[tuple[str, str, dict[str, object]]] = [
    ("steps max_steps num_steps total_steps iterations total_training_steps", "30", {"budget.amount": 30}),
    ("budget.steps budget.max_steps trainer.total_training_steps", "6", {"budget.amount": 6}),
    ("epochs num_train_epochs num_epochs total_epochs trainer.total_epochs", "1", {"budget.amount": 123}),
    ("lr learning_rate optimizer.lr optim.lr actor.optim.lr", "0.5", {"optimizer.learning_rate": 0.5}),
    ("train_batch_size num_prompts data.train_batch_size", "64", {"problems_per_step": 64}),
    ("batch_size generation_batch_size", "64", {"problems_per_step": 123, "group_size": 123}),
    ("num_generations num_samples rollouts responses n", "5", {"group_size": 5}),
    ("rollout.n actor_rollout_ref.rollout.n", "5", {"group_size": 5}),
    ("num_generations_eval", "3", {"evaluation.samples": 3}),
    ("epsilon clip cliprange clip_ratio", "0.3", {"surrogate.clip_low": 0.3, "surrogate.clip_high": 0.3}),
    ("epsilon_low clip_low clip_ratio_low", "0.1", {"surrogate.clip_low": 0.1, "surrogate.clip_high": 0.2}),
    ("epsilon_high clip_high clip_ratio_high", "0.4", {"surrogate": "ppo_higher", "surrogate.clip_high": 0.4}),
    ("delta clip_ratio_c", "2", {"surrogate": "dual_clip", "surrogate.bound": 2}),
    ("beta kl_coef kl_beta kl_loss_coef", "0.2", {"kl": "k3_loss", "kl.kl_coef": 0.2}),
    ("beta", "0.0", {"kl": "none"}),
    ("kl_ctrl.kl_coef algorithm.kl_ctrl.kl_coef", "0.2", {"kl": "k1_reward", "kl.kl_coef": 0.2}),
    ("use_kl_loss actor_rollout_ref.actor.use_kl_loss", "True", {"kl": "k3_loss"}),
    ("use_kl_loss use_kl_in_reward", "false", {"kl": "none"}),
    ("use_kl_in_reward", "true", {"kl": "k1_reward"}),
    ("max_tokens max_length max_new_tokens max_completion_length", "99", {"engine.max_tokens": 99}),
    ("max_response_length response_length data.max_response_length", "99", {"engine.max_tokens": 99}),
    ("max_prompt_length data.max_prompt_length", "88", {"task": "jsonl", "task.max_prompt_tokens": 88}),
    ("per_device_train_batch_size gradient_accumulation_steps micro_batch_size", "8", {"microbatch_tokens": 123}),
    ("ppo_micro_batch_size ppo_micro_batch_size_per_gpu train_micro_batch_size", "8", {"microbatch_tokens": 123}),
    ("ppo_mini_batch_size mini_batch_size actor_rollout_ref.actor.ppo_mini_batch_size", "8", {"updates": "two"}),
    ("num_iterations mu ppo_epochs", "2", {"updates": "two_passes", "updates.passes": 2, "updates.minibatches": 1}),
    ("num_iterations", "1", {"updates": "one"}),
    ("num_iterations", "4", {"updates": "four_passes"}),
    ("num_iterations mu ppo_epochs", "3", {"updates.passes": 3, "updates.minibatches": 1}),
    ("steps_per_generation minibatches", "2", {"updates": "two", "updates.minibatches": 2, "updates.passes": 1}),
    ("steps_per_generation", "16", {"updates": "sixteen"}),
    ("steps_per_generation minibatches", "8", {"updates.minibatches": 8, "updates.passes": 1}),
    ("warmup_steps lr_warmup_steps", "7", {"optimizer.warmup_updates": 7}),
    ("warmup_ratio lr_warmup_steps_ratio", "0.1", {"optimizer.warmup_updates": 123}),
    ("lr_scheduler_type lr_scheduler", "cosine", {"optimizer.decay": "cosine"}),
    ("lr_scheduler_type", "constant_with_warmup", {"optimizer.decay": "constant"}),
    ("max_grad_norm grad_clip clip_grad", "0.3", {"optimizer.max_grad_norm": 0.3}),
    ("weight_decay", "0.3", {"optimizer.weight_decay": 0.3}),
    ("adam_beta1", "0.8", {"optimizer.beta1": 0.8, "optimizer.beta2": 0.95}),
    ("adam_beta2", "0.8", {"optimizer.beta1": 0.9, "optimizer.beta2": 0.8}),
    ("bf16", "true", {"learner_precision": "bf16", "sampler_precision": "bf16"}),
    ("fp16", "True", {"learner_precision": "fp16", "sampler_precision": "fp16"}),
    ("bf16 fp16", "false", {"learner_precision": "fp32", "sampler_precision": "fp32"}),
    ("loss_agg_mode policy_loss_agg_mode actor.loss_agg_mode", "token-mean", {"aggregation": "token_mean"}),
    ("loss_agg_mode", "seq-mean-token-mean", {"aggregation": "sequence_mean"}),
    ("loss_agg_mode", "seq-mean-token-sum", {"aggregation": "sequence_sum"}),
    ("loss_agg_mode", "seq-mean-token-sum-norm", {"aggregation": "constant"}),
    ("loss_type", "grpo", {"aggregation": "sequence_mean"}),
    ("loss_type", "dr_grpo", {"aggregation": "constant"}),
    ("loss_type", "dapo", {"aggregation": "token_mean"}),
    ("loss_type", "bnpo", {"aggregation": "token_mean", "aggregation.scope": "microbatch"}),
    ("loss_type", "cispo", {"aggregation": "token_mean", "surrogate": "cispo"}),
    ("loss_type", "sapo", {"aggregation": "sequence_mean", "surrogate": "sapo"}),
    ("use_vllm", "true", {"engine": "vllm"}),
    ("use_vllm", "false", {"engine": "native"}),
    ("vllm_mode", "colocate", {"engine": "vllm"}),
    ("vllm_mode", "server", {"engine": "vllm_process"}),
    ("report_to logger", "[wandb]", {"tracking": "wandb"}),
    ("report_to", "none", {"tracking": "none"}),
    ("system_prompt", "Think first.", {"template": "chat", "template.system": "Think first."}),
    ("save_steps save_freq", "7", {"checkpoint_every": 7}),
    ("eval_steps test_freq trainer.test_freq", "7", {"evaluation.every": 7}),
    ("model_name_or_path model_name pretrain", "me/it", {"model": "hf", "model.path": "me/it"}),
    ("actor_rollout_ref.model.path", "me/it", {"model": "hf", "model.path": "me/it"}),
    ("dataset_name dataset train_files data.train_files", "q.csv", {"task": "jsonl", "task.path": "q.csv"}),
    ("scale_rewards norm_adv_by_std_in_grpo algorithm.norm_adv_by_std_in_grpo", "true", {"scale": "group_std"}),
    ("scale_rewards norm_adv_by_std_in_grpo", "False", {"scale": "none"}),
    ("scale_rewards", "group", {"scale": "group_std"}),
    ("scale_rewards", "batch", {"scale": "batch_std_raw", "scale.of": "raw"}),
    ("scale_rewards", "none", {"scale": "none"}),
    ("importance_sampling_level", "token", {"importance": "token"}),
    ("importance_sampling_level", "sequence", {"importance": "sequence"}),
    ("importance_sampling_level", "sequence_token", {"importance": "sequence_token"}),
    ("mask_truncated_completions overlong_filter", "true", {"truncation": "mask_after"}),
    ("mask_truncated_completions overlong_filter", "false", {"truncation": "score"}),
    ("filter_groups filter_groups.enable dynamic_sampling", "true", {"group_filter": "resample"}),
    ("algorithm.filter_groups.enable", "True", {"group_filter": "resample"}),
    ("algorithm.filter_groups.enable filter_groups.enable dynamic_sampling", "false", {"group_filter": "keep"}),
    ("overlong_buffer reward_model.overlong_buffer.enable", "true", {"reward_shaping": "soft_overlong"}),
    ("overlong_buffer.enable", "false", {"reward_shaping": "none"}),
    ("adv_estimator algorithm.adv_estimator", "grpo", {"baseline": "group_mean", "scale": "group_std"}),
    ("adv_estimator", "rloo", {"baseline": "leave_one_out", "scale": "none"}),
    ("entropy_coeff entropy_coef", "0.3", {"entropy": "bonus", "entropy.coef": 0.3}),
    ("entropy_coeff", "0", {"entropy": "none"}),
    ("top_entropy_quantile", "0.3", {"entropy": "high_entropy_tokens", "entropy.share": 0.3}),
    ("top_entropy_quantile", "1.0", {"entropy": "none"}),
    ("reward_funcs reward_function reward_fn", "a.py:f", {"reward": "function", "reward.path": "a.py:f"}),
    ("reward_funcs", "['a.py:f', 'b.py:g']", {"reward": "function", "reward.path": "a.py:f+b.py:g"}),
    ("custom_reward_function.path", "a.py", {"reward": "function", "reward.path": "a.py:123"}),
    ("reward_weights", "[1,0.3]", {"reward": "function", "reward.weights": [1, 0.3]}),
    ("use_peft", "true", {"model": "hf", "model.lora.rank": 123}),
    ("use_peft", "false", {"model": "hf", "model.lora.rank": 0}),
    ("lora_r lora_rank", "9", {"model": "hf", "model.lora.rank": 9}),
    ("lag staleness", "4", {"schedule": "one_step_off", "schedule.lag": 4}),
    ("algorithm method", "dr_grpo", {"recipe": "dr_grpo"}),
    ("temperature", "0.7", {"engine.temperature": 0.7}),
    ("top_p", "0.7", {"engine.top_p": 0.7}),
    ("top_k engine.top_k", "20", {}),
    ("data.seed data_seed training_args.seed", "7", {"seed": 7}),
    ("vllm_importance_sampling_correction", "true", {"correction": "mis", "correction.high": 3}),
    ("vllm_importance_sampling_correction", "false", {"correction": "none"}),
    ("vllm_importance_sampling_cap", "4", {"correction": "mis", "correction.high": 4}),
    ("vllm_importance_sampling_clip_max", "4", {"correction": "mis", "correction.high": 4}),
    ("vllm_importance_sampling_mode", "token_truncate", {"correction": "tis_token"}),
    ("vllm_importance_sampling_mode", "token_mask", {"correction": "icepop", "correction.low": 0}),
    ("sync_ref_model", "true", {"reference": "reset"}),
    ("sync_ref_model", "false", {"reference": "frozen"}),
    ("ref_model_sync_steps", "9", {"reference": "reset", "reference.every": 9}),
    ("logging_steps log_completions", "1", {}),
    ("output_dir", "there", {"runs_dir": "there"}),
]  # fmt: skip


def _hint(argument: str) -> list[str]:
    """The overrides that the error for this argument says to type, with ... filled in."""
    typed = re.fullmatch(r"there is no key '[^']+': type (.+?)(?: \(.*\))?", misnamed([argument]))
    assert typed, misnamed([argument])
    return [word.replace("...", "two" if word == "updates=..." else "123") for word in shlex.split(typed[1])]


def _slots(words: list[str]) -> set[str]:
    return {re.split(r"[.=]", word)[0] for word in words}


@pytest.mark.extended
def test_every_hint_typed_back_is_what_was_meant() -> None:
    """Hints of different slots share a configuration, because composing costs most of the time."""
    examples = [(f"{key}={value}", meant) for keys, value, meant in EXAMPLES for key in keys.split()]
    typed_keys = {argument.partition("=")[0] for argument, _ in examples}
    assert MEANT.keys() <= typed_keys, "each key of the table has an example"
    keys_of = {id(meant): key for key, meant in MEANT.items()}
    for meant in MEANT.values():  # and each value at least composes
        examples += [(f"{keys_of[id(meant)]}={value}", {}) for value in meant.values]
    shared: list[tuple[list[str], list[tuple[str, list[str], dict[str, object]]]]] = []
    for argument, meant in examples:
        if "leave it out" in misnamed([argument]):
            assert meant == {}, argument
            continue
        words = _hint(argument)
        for together, own in shared:
            alike = any(words == others for _, others, _ in own)
            if alike or _slots(words).isdisjoint(_slots(together)):
                together += [] if alike else words
                own.append((argument, words, meant))
                break
        else:
            shared.append((list(words), [(argument, words, meant)]))
    for together, own in shared:
        config, choices = compose_with_choices(together)
        for argument, words, meant in own:
            typed = {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}
            for key, value in (*typed.items(), *meant.items()):
                held = choices[key] if key in choices else OmegaConf.select(config, key)
                held = held.name if isinstance(held, Enum) else held
                assert held == value or held == str(value), f"{argument}: {key} is {held}"


def test_a_value_without_a_counterpart_is_left_to_fill_in_beside_the_known_ones() -> None:
    said = "there is no key 'scale_rewards': type scale=... (true is scale=group_std, false is scale=none, group is "
    assert misnamed(["scale_rewards=range"]).startswith(said)
    assert "type aggregation=... (" in misnamed(["loss_type=luspo"]) and "grpo is" in misnamed(["loss_type=luspo"])
    assert misnamed(["report_to=all"]).endswith("type tracking=... (mlflow, wandb, trackio, tensorboard, none)")
    assert "epochs x questions / problems_per_step" in misnamed(["num_train_epochs=1"])
    assert "group_size responses" in misnamed(["per_device_train_batch_size=8"])
    assert "not a size" in misnamed(["ppo_mini_batch_size=8"])


@pytest.mark.parametrize(
    "argument,said",
    [
        ("kl.kl_coef=0.04", "no key 'kl.kl_coef' in the chosen kl: kl=k1_reward, k1_reward_adaptive, k2_loss, "),
        ("kl.kl_coef=0.04", "have it: type kl=k3_loss kl.kl_coef=0.04"),
        ("entropy.coef=0.1", "in the chosen entropy: entropy=bonus, positive_nll have it: type entropy=bonus"),
        ("reward.weights=[1,0.3]", "type reward=function reward.path=... reward.weights=[1,0.3]"),
        ("reward.judge.model=a", "reward=rubric, rubric_evolving have it: type reward=rubric reward.judge.model=a"),
        ("surrogate.clip_higher=0.3", "did you mean surrogate.clip_high? surrogate=clip_cov, "),
        ("surrogate.clip_higher=0.3", "ratio_mask have it: type surrogate=ppo_higher surrogate.clip_high=0.3"),
        ("scale.dof=1", "did you mean scale.ddof? scale=batch_std, batch_std_raw, batch_std_tokens, focal, group_std"),
        ("optimizer.warmup_update=3", "did you mean optimizer.warmup_updates? type optimizer.warmup_updates=3"),
        ("budget.steps=6", "there is no key 'budget.steps': type budget.amount=6"),
        ("group_sise=6", "there is no key 'group_sise': did you mean 'group_size'? --help lists"),
        ("modal=2", "there is no key 'modal': did you mean 'model'? --help lists"),
        ("dealt=2", "there is no key 'dealt': --help lists"),
        ("budget.hours=2", "there is no key 'budget.hours': --help lists"),
    ],
)  # fmt: skip
def test_a_key_of_another_option_is_named_with_that_option(argument: str, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        compose_config([argument])
    assert said in str(refused.value)


def test_a_number_of_a_recipe_that_the_chosen_option_lacks_is_named_with_what_to_type() -> None:
    with pytest.raises(ValueError) as refused:
        compose_config(["recipe=scalerl", "optimizer=sgd"])
    said = str(refused.value)
    assert said.startswith("recipe=scalerl sets optimizer.eps, which the chosen optimizer does not have: choose one ")
    assert "optimizer=adamw, adamw_cosine, " in said and "sgd" not in said
    typed = said.partition("in place of recipe=scalerl: ")[2].split()
    config, choices = compose_with_choices(["optimizer=sgd", *typed])
    assert config.optimizer.weight_decay == 0.01 and config.reward.wrong == -1
    _, whole = compose_with_choices(["recipe=scalerl"])
    assert {slot for slot in whole if choices[slot] != whole[slot]} == {"recipe", "optimizer"}


@pytest.mark.extended
def test_a_number_of_a_group_of_ones_own_that_the_chosen_option_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that no option has is a mistake in the file itself, and Hydra's message names that."""
    (tmp_path / "world").mkdir()
    file = tmp_path / "world" / "mine.yaml"
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    file.write_text("# @package _global_\n# Mine.\ndefaults: []\nkl: {kl_coef: 0.1}\n")
    with pytest.raises(ValueError, match=r"world=mine sets kl.kl_coef, .* have: choose .*, or leave world=mine out"):
        compose_config(["world=mine"])
    file.write_text("# @package _global_\n# Mine.\ndefaults: []\nkl: {nothing: 0.1}\n")
    with pytest.raises(ValueError, match="Key 'nothing' not in"):
        compose_config(["world=mine"])


@pytest.mark.extended
def test_a_key_of_an_option_of_ones_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kl").mkdir()
    (tmp_path / "kl" / "mine.yaml").write_text("# Mine.\ndefaults: [k3_loss, _self_]\nmy_number: 3\n")
    monkeypatch.setenv("GRPO_LAB_CONFIG_PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"kl=mine has it: type kl=mine kl.my_number=4"):
        compose_config(["kl.my_number=4"])
    with pytest.raises(ValueError, match=r"k3_unbiased, mine have it: type kl=k3_loss kl.kl_coef=4"):
        compose_config(["kl.kl_coef=4"])


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
    said = "the budget counts steps, one batch of rollouts each, unless another one is chosen"
    assert misnamed(["seed=0", "steps=10"]) == f"there is no key 'steps': type budget.amount=10 ({said})"
    assert "type schedule=one_step_off schedule.lag=4 (" in misnamed(["+lag=4"])
    assert "type problems_per_step=... group_size=... (" in misnamed(["batch_size=64"])
    assert misnamed(["lr=1e-4", "beta=0.1"]).count("there is no key") == 2
    assert misnamed(["use_vllm=true"]) == "there is no key 'use_vllm': type engine=vllm"
    assert "type reward=function reward.path=a.py:f (FILE.py:FUNCTION; several" in misnamed(["reward_fn=a.py:f"])
    nested = misnamed(["actor_rollout_ref.actor.loss_agg_mode=token-mean", "actor_rollout_ref.actor.optim.lr=1e-6"])
    assert "type aggregation=token_mean;" in nested and "type optimizer.learning_rate=1e-6" in nested
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


@pytest.mark.extended  # test_bad_input has that of grpo_lab.train at every change
def test_a_command_ends_in_the_right_key() -> None:
    line = [sys.executable, "-m", "grpo_lab.cli", "explain", "steps=10"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and done.stderr.startswith("error: there is no key 'steps': type budget.amount=10 (")


def test_a_path_with_an_equals_sign_needs_quotes_that_the_shell_leaves() -> None:
    folder = "runs/plain,budget.amount=40/seed=0"
    said = f"model.path has a value with '=' in it: quote it twice, \"model.path='{folder}'\""
    assert misnamed([f"model.path={folder}"]) == said
    for right in (f"model.path='{folder}'", f'model.path="{folder}"', "evaluation.tables={a: {path: x=1}}"):
        assert misnamed([right]) == ""
