"""Names of keys in other libraries and earlier versions, so that the error for a wrong override names the right one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hydra.errors import MissingConfigException, OverrideParseException

from grpo_lab.tracking.renames import config_key


@dataclass(frozen=True)
class Meant:
    """The keys or groups that another library's name stands for, with a note.

    `under` is an option to choose first, if the plain one does not have the key. `value` is what to type after the key
    if it is not the value that was given.
    """

    keys: tuple[str, ...]
    note: str = ""
    under: str = ""
    value: str = ""


_AMOUNT = Meant(("budget.amount",), "the budget counts steps unless another one is chosen")
_RATE = Meant(("optimizer.learning_rate",))
_BATCH = Meant(("problems_per_step", "group_size"), "prompts of a batch, and responses to each")
_GROUP = Meant(("group_size",), "responses to a prompt")
_CLIP = Meant(("surrogate.clip_low", "surrogate.clip_high"), "surrogate=ppo_higher clips higher above")
_KL = Meant(("kl.kl_coef",), "the plain kl is none", "kl=k3_loss")
_LENGTH = Meant(("engine.max_tokens",), "evaluation.max_tokens is that of evaluations")
_LAG = Meant(("schedule.lag",), "how many updates old the sampler is", "schedule=one_step_off")
_UPDATES = Meant(("updates",), "an option: one, two, four, sixteen")
_MICROBATCH = Meant(
    ("microbatch_tokens",), "of one pass; batches of any size are cut into such passes, and add up", value="..."
)
_AGGREGATION = Meant(
    ("aggregation",),
    "token-mean is token_mean, seq-mean-token-mean sequence_mean, seq-mean-token-sum-norm constant",
    value="...",
)
_FUNCTION = Meant(("reward.path",), "FILE.py:FUNCTION", "reward=function")

_NESTED = ("actor_rollout_ref", "actor", "rollout", "algorithm", "data", "trainer", "training_args")
MEANT = {
    **dict.fromkeys(
        (
            "steps",
            "max_steps",
            "num_steps",
            "total_steps",
            "iterations",
            "epochs",
            "num_train_epochs",
            "total_epochs",
            "total_training_steps",
        ),
        _AMOUNT,
    ),
    **dict.fromkeys(("lr", "learning_rate", "optimizer.lr", "optim.lr"), _RATE),
    **dict.fromkeys(("batch_size", "train_batch_size", "num_prompts"), _BATCH),
    **dict.fromkeys(("num_generations", "num_samples", "rollouts", "responses"), _GROUP),
    **dict.fromkeys(
        (
            "epsilon",
            "clip",
            "clip_low",
            "clip_high",
            "epsilon_low",
            "epsilon_high",
            "cliprange",
            "clip_ratio",
            "clip_ratio_low",
            "clip_ratio_high",
        ),
        _CLIP,
    ),
    **dict.fromkeys(("beta", "kl_coef", "kl_beta", "kl_loss_coef", "use_kl_loss"), _KL),
    **dict.fromkeys(
        (
            "max_tokens",
            "max_length",
            "max_new_tokens",
            "max_completion_length",
            "max_response_length",
            "response_length",
        ),
        _LENGTH,
    ),
    **dict.fromkeys(
        (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "micro_batch_size",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "train_micro_batch_size",
        ),
        _MICROBATCH,
    ),
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size", "ppo_epochs", "steps_per_generation"), _UPDATES),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "lr_warmup_steps"), Meant(("optimizer.warmup_updates",))),
    **dict.fromkeys(
        ("lr_scheduler_type", "lr_scheduler"),
        Meant(("optimizer.decay",), "constant, cosine or warmup_stable_decay", value="..."),
    ),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), Meant(("optimizer.max_grad_norm",))),
    "weight_decay": Meant(("optimizer.weight_decay",)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), Meant(("optimizer.beta1", "optimizer.beta2"))),
    **dict.fromkeys(("bf16", "fp16"), Meant(("learner_precision", "sampler_precision"), "options: bf16, fp16, fp32")),
    **dict.fromkeys(("loss_agg_mode", "policy_loss_agg_mode"), _AGGREGATION),
    **dict.fromkeys(("use_vllm", "vllm_mode"), Meant(("engine",), value="vllm")),
    **dict.fromkeys(("report_to", "logger"), Meant(("tracking",), "mlflow, wandb, trackio, tensorboard or none")),
    "system_prompt": Meant(("template.system",), "of chat templates", "template=chat"),
    **dict.fromkeys(("save_steps", "save_freq"), Meant(("checkpoint_every",))),
    **dict.fromkeys(("eval_steps", "test_freq"), Meant(("evaluation.every",))),
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain"), Meant(("model.path",), under="model=hf")),
    **dict.fromkeys(("dataset_name", "dataset", "train_files"), Meant(("task.path",), under="task=jsonl")),
    **dict.fromkeys(
        ("scale_rewards", "norm_adv_by_std_in_grpo"), Meant(("scale",), "group_std, batch_std or none", value="...")
    ),
    "importance_sampling_level": Meant(("importance",), "token or sequence"),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), Meant(("truncation",), value="mask_after")),
    **dict.fromkeys(("filter_groups", "dynamic_sampling"), Meant(("group_filter",), value="resample")),
    "overlong_buffer": Meant(("reward_shaping",), value="soft_overlong"),
    "adv_estimator": Meant(("recipe",), "grpo, ppo, rloo, remax, reinforce_pp and others"),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), Meant(("entropy.coef",), under="entropy=bonus")),
    **dict.fromkeys(("custom_reward_function.path", "reward_function", "reward_fn"), _FUNCTION),
    **dict.fromkeys(("use_peft", "lora_r", "lora_rank"), Meant(("model.lora.rank",), under="model=hf")),
    **dict.fromkeys(("lag", "staleness"), _LAG),
    **dict.fromkeys(("num_iterations", "mu", "minibatches"), _UPDATES),
    **dict.fromkeys(("algorithm", "method"), Meant(("recipe",), "a published method; grpo-lab tricks lists the parts")),
    "temperature": Meant(("engine.temperature",), "evaluation.temperature is that of evaluations"),
    "top_p": Meant(("engine.top_p",), "evaluation.top_p is that of evaluations"),
    "loss_type": Meant(("aggregation", "surrogate"), "how tokens add up, and the trust region"),
    "reward_funcs": Meant(("reward",), "an option; reward=math_and_format holds two in a weighted sum"),
    "reward_weights": Meant(
        ("reward.weights",), "a number for each part, {math:1,format:0.2}", "reward=math_and_format"
    ),
    "output_dir": Meant(("runs_dir",)),
}


# Options that have another name here: slot/name elsewhere -> name here.
OPTIONS = {
    **dict.fromkeys(("surrogate/clip_higher", "surrogate/dapo"), "ppo_higher"),
    **dict.fromkeys(("surrogate/clip", "surrogate/grpo", "surrogate/clipped"), "ppo"),
    **dict.fromkeys(("surrogate/none", "surrogate/policy_gradient"), "reinforce"),
    "surrogate/gspo": "ppo_gspo",
    **dict.fromkeys(("aggregation/token-mean", "aggregation/token", "aggregation/dapo"), "token_mean"),
    **dict.fromkeys(("aggregation/seq-mean-token-mean", "aggregation/grpo"), "sequence_mean"),
    **dict.fromkeys(("aggregation/seq-mean-token-sum-norm", "aggregation/dr_grpo"), "constant"),
    **dict.fromkeys(("truncation/mask", "truncation/overlong_filtering"), "mask_after"),
    **dict.fromkeys(("reward_shaping/overlong", "reward_shaping/dapo"), "soft_overlong"),
    **dict.fromkeys(("group_filter/dynamic_sampling", "group_filter/dapo"), "resample"),
    **dict.fromkeys(("kl/k3", "kl/low_var_kl", "kl/grpo"), "k3_loss"),
    **dict.fromkeys(("scale/std", "scale/group"), "group_std"),
    "scale/batch": "batch_std",
    "importance/gspo": "sequence",
}


def _meant(key: str) -> Meant | None:
    """What a key stands for; of verl's nested ones the last part decides."""
    head, _, last = key.partition(".")[0], *key.rpartition(".")[1:]
    return MEANT.get(key) or (MEANT.get(last) if head in _NESTED else None)


def misnamed(arguments: Sequence[str]) -> str:
    """What to type instead of overrides whose key has another name here, or whose value needs quotes; "" for none."""
    lines = []
    for argument in arguments:
        key, assigned, value = argument.partition("=")
        key = key.lstrip("+~")
        if assigned and (meant := _meant(key)):
            typed = meant.value or (value if len(meant.keys) == 1 else "...")
            instead = " and ".join(f"{name}={typed}" for name in meant.keys)
            under = f"{meant.under} " if meant.under else ""
            note = f" ({meant.note})" if meant.note else ""
            lines.append(f"there is no key {key!r}: type {under}{instead}{note}")
        elif key == "tracking" and len(named := re.findall(r"[^\s,\[\]]+", value)) > 1:
            named.sort(
                key=lambda name: name != "mlflow"
            )  # what is not sent to MLflow by the run itself needs its address
            lines.append(
                f"a run logs to one tracker: type tracking={named[0]}, and copy its runs to the others "
                f"at any time with {' and '.join(f'`grpo-lab sync RUNS --to {name}`' for name in named[1:])}"
            )
        elif assigned and "=" in value and value[0] not in "'\"[{" and not key.startswith("hydra"):
            lines.append(f"{key} has a value with '=' in it: quote it twice, \"{key}='{value}'\"")
        elif assigned and (today := config_key(key)) != key:
            lines.append(f"{key!r} is called {today!r} now: type {today}={value}")
    return "; ".join(lines)


def in_one_line(error: BaseException, keys: Collection[str] = ()) -> str:
    """An error of Hydra, OmegaConf or YAML as one line that says what to type; `keys` are the configuration's own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    first, cause = lines[0], error.__cause__
    if first.endswith(":") and len(lines) > 1:
        first = f"{first} {lines[1]}"
    if isinstance(error, RecursionError):
        return (
            "a configuration leads back to itself: look at the defaults lists of your own files among what was chosen, "
            "and take out the entry that names its own file"
        )
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} is not an override ({first}): type key=value and quote a value that holds signs, "
            "'key=\"value\"'; --help lists the options, --cfg job every key"
        )
    if isinstance(error, MissingConfigException):
        known = f"choose from {', '.join(error.options)}" if error.options else "--help lists the options"
        slot, _, name = (error.missing_cfg_file or "").partition("/")
        near = OPTIONS.get(f"{slot}/{name}") or next(iter(get_close_matches(name, error.options or [], 1)), "")
        guess = f"did you mean {slot}={near}? " if near else ""
        return f"there is no {error.missing_cfg_file!r}: {guess}{known}"
    lacking = re.match(r"Could not override '([^']+)'", first)
    if lacking and "To append to your config" in str(error):
        near = get_close_matches(lacking[1].split(".")[0], keys, 1)
        guess = f"did you mean {near[0]!r}? " if near and near[0] != lacking[1].split(".")[0] else ""
        return f"there is no key {lacking[1]!r}: {guess}--help lists the options, --cfg job every key"
    if cause is not None and str(cause).strip():
        first = f"{first}: {str(cause).strip().splitlines()[0]}"
    return f"{first}: correct it; --help lists the options, --cfg job every key"
