"""Names of keys in other libraries and earlier versions, so that the error for a wrong override names the right one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches

import yaml
from hydra.errors import MissingConfigException, OverrideParseException

from grpo_lab.config.catalogue import option_text, plain_options, recipe_overrides
from grpo_lab.config.folders import conf_folder
from grpo_lab.config.run_config import flat, slot_types
from grpo_lab.config.user_files import FOLDERS, user_folders
from grpo_lab.tracking.renames import config_key

_CLOSE = 0.75  # least similarity of a name that an error suggests; `delta` and `model` have 0.6


@dataclass(frozen=True)
class Meant:
    """The counterpart of another library's key.

    `typed` holds overrides, in which {} stands for the value given and ... for one to fill in; empty: the key has no
    counterpart. `note` is what else the reader needs to know. `values` holds what to type for single values, in lower
    case, that have names of their own here. `joined` stands between the entries of a list where we take one text.
    """

    typed: str
    note: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    joined: str = ""

    def instead(self, value: str) -> str:
        """The end of the error message: what to type for this value."""
        if not self.typed:
            return f"leave it out ({self.note})"
        typed = self.values.get(value.strip("[]'\" ").lower())
        notes = [self.note] if self.note else []
        if typed is None:
            if self.joined and value.startswith("["):
                value = self.joined.join(re.findall(r"[^\s,\[\]'\"]+", value))
            typed = self.typed.replace("{}", f'"{value}"' if re.search(r"\s", value) else value)
            if typed.endswith("...") and self.values:
                same = {name: self.typed.replace("...", name) for name in self.values}
                known = (name if same[name] == ours else f"{name} is {ours}" for name, ours in self.values.items())
                notes.append(", ".join(known))
        return f"type {typed}" + (f" ({'; '.join(notes)})" if notes else "")


def _switch(on: str, off: str, **others: str) -> dict[str, str]:
    """The counterparts of true and false, and of other values."""
    return {"true": on, "false": off, **others}


def _precision(name: str) -> Meant:
    on, off = (f"learner_precision={kind} sampler_precision={kind}" for kind in (name, "fp32"))
    return Meant("learner_precision=... sampler_precision=...", values=_switch(on, off))


_STEPS = Meant("budget.amount={}", "the budget counts steps, one batch of rollouts each, unless another one is chosen")
_EPOCHS = Meant(
    "budget.amount=...", "the budget counts steps and not epochs: steps = epochs x questions / problems_per_step"
)
_RATE = Meant("optimizer.learning_rate={}")
_PROMPTS = Meant("problems_per_step={}", "prompts of a batch; group_size is the number of responses to each")
_RESPONSES = Meant("problems_per_step=... group_size=...", "prompts of a batch, and responses to each")
_GROUP = Meant("group_size={}", "responses to a prompt")
_CLIP = Meant("surrogate.clip_low={} surrogate.clip_high={}", "surrogate=ppo_higher has a wider upper bound")
_CLIP_LOW = Meant("surrogate.clip_low={}")
_CLIP_HIGH = Meant("surrogate=ppo_higher surrogate.clip_high={}")
_DUAL_CLIP = Meant("surrogate=dual_clip surrogate.bound={}", "the ratio at which a wrong token's loss stops growing")
_NO_KL: dict[str, str] = dict.fromkeys(("0", "0.0", "false"), "kl=none")
_KL = Meant("kl=k3_loss kl.kl_coef={}", "the plain option is kl=none", _NO_KL)
_KL_REWARD = Meant("kl=k1_reward kl.kl_coef={}", "kl=k1_reward subtracts the penalty from the reward", _NO_KL)
_LENGTH = Meant("engine.max_tokens={}", "evaluation.max_tokens is that of evaluations")
_PROMPT_LENGTH = Meant(
    "task=jsonl task.path=... task.max_prompt_tokens={}",
    "of questions in tables, as task=gsm8k too; longer ones are left out, and built-in tasks need no limit",
)
_LAG = Meant("schedule=one_step_off schedule.lag={}", "how many steps old the sampler is")
_PASSES = Meant(
    "updates=one updates.passes={}",
    "passes over the whole batch; options: 1, 2, 4",
    {"1": "updates=one", "2": "updates=two_passes", "4": "updates=four_passes"},
)
_MINIBATCHES = Meant(
    "updates=one updates.minibatches={}",
    "updates on one batch, in TRL steps_per_generation / gradient_accumulation_steps; options: 1, 2, 4, 16",
    {"1": "updates=one", "2": "updates=two", "4": "updates=four", "16": "updates=sixteen"},
)
_MINIBATCH_SIZE = Meant(
    "updates=...",
    "a number of updates and not a size: one, two, four or sixteen = train_batch_size / ppo_mini_batch_size",
)
_MICROBATCH = Meant(
    "microbatch_tokens=...",
    "of one pass; batches of any size are cut into such passes, and add up. The batch itself is problems_per_step "
    "prompts with group_size responses each",
)
_WARMUP = Meant("optimizer.warmup_updates={}")
_WARMUP_RATIO = Meant("optimizer.warmup_updates=...", "a number of updates: the ratio x the updates of the run")
_DECAY = Meant(
    "optimizer.decay=...",
    "a warm-up comes first: optimizer.warmup_updates",
    {
        "constant": "optimizer.decay=constant",
        "constant_with_warmup": "optimizer.decay=constant",
        "cosine": "optimizer.decay=cosine",
        "warmup_stable_decay": "optimizer.decay=warmup_stable_decay",
    },
)
_AGGREGATION = Meant(
    "aggregation=...",
    values={
        "token-mean": "aggregation=token_mean",
        "seq-mean-token-mean": "aggregation=sequence_mean",
        "seq-mean-token-sum": "aggregation=sequence_sum",
        "seq-mean-token-sum-norm": "aggregation=constant",
    },
)
_TRACKING = Meant(
    "tracking=...", values={name: f"tracking={name}" for name in ("mlflow", "wandb", "trackio", "tensorboard", "none")}
)
_SCALE = Meant(
    "scale=...",
    values=_switch(
        "scale=group_std",
        "scale=none",
        group="scale=group_std",
        batch="scale=batch_std_raw",
        none="scale=none",
        mean="scale=group_mean",
    ),
)
_MASK = Meant("truncation=...", values=_switch("truncation=mask_after", "truncation=score"))
_FILTER = Meant("group_filter=...", values=_switch("group_filter=resample", "group_filter=keep"))
_OVERLONG = Meant("reward_shaping=...", values=_switch("reward_shaping=soft_overlong", "reward_shaping=none"))
_ENTROPY = Meant("entropy=bonus entropy.coef={}", values={"0": "entropy=none", "0.0": "entropy=none"})
_FUNCTION = Meant("reward=function reward.path={}", "FILE.py:FUNCTION; several as A+B", joined="+")
_LORA = Meant(
    "model=hf model.lora.rank={}",
    "of any model of the hub; 0 trains all weights",
    _switch("model=hf model.lora.rank=...", "model=hf model.lora.rank=0"),
)
_MODEL = Meant("model=hf model.path={}")
_TABLE = Meant("task=jsonl task.path={}")
_MISMATCH = Meant(
    "correction=mis correction.high={}",
    "correction=mis is TRL's sequence_mask; token_truncate and sequence_truncate, here tis_token and tis_sequence, "
    "have correction.cap",
)
_REFERENCE = "a changing reference needs a KL penalty, as kl=k3_loss"
_LOGGED = Meant("", "every step is logged")

_NESTED = ("actor_rollout_ref", "actor", "rollout", "algorithm", "data", "trainer", "training_args", "reward_model")
MEANT = {
    **dict.fromkeys(
        (
            "steps",
            "max_steps",
            "num_steps",
            "total_steps",
            "iterations",
            "total_training_steps",
            "budget.steps",
            "budget.max_steps",
        ),
        _STEPS,
    ),
    **dict.fromkeys(("epochs", "num_train_epochs", "num_epochs", "total_epochs"), _EPOCHS),
    **dict.fromkeys(("lr", "learning_rate", "optimizer.lr", "optim.lr"), _RATE),
    **dict.fromkeys(("train_batch_size", "num_prompts"), _PROMPTS),
    **dict.fromkeys(("batch_size", "generation_batch_size"), _RESPONSES),
    **dict.fromkeys(("num_generations", "num_samples", "rollouts", "responses", "rollout.n", "n"), _GROUP),
    "num_generations_eval": Meant("evaluation.samples={}", "responses to a question in evaluations"),
    **dict.fromkeys(("epsilon", "clip", "cliprange", "clip_ratio"), _CLIP),
    **dict.fromkeys(("epsilon_low", "clip_low", "clip_ratio_low"), _CLIP_LOW),
    **dict.fromkeys(("epsilon_high", "clip_high", "clip_ratio_high"), _CLIP_HIGH),
    **dict.fromkeys(("delta", "clip_ratio_c"), _DUAL_CLIP),
    **dict.fromkeys(("beta", "kl_coef", "kl_beta", "kl_loss_coef"), _KL),
    "kl_ctrl.kl_coef": _KL_REWARD,
    "use_kl_loss": Meant("kl=...", values=_switch("kl=k3_loss", "kl=none")),
    "use_kl_in_reward": Meant("kl=...", values=_switch("kl=k1_reward", "kl=none")),
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
    "max_prompt_length": _PROMPT_LENGTH,
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
    **dict.fromkeys(("ppo_mini_batch_size", "mini_batch_size"), _MINIBATCH_SIZE),
    **dict.fromkeys(("num_iterations", "mu", "ppo_epochs"), _PASSES),
    **dict.fromkeys(("steps_per_generation", "minibatches"), _MINIBATCHES),
    **dict.fromkeys(("warmup_steps", "lr_warmup_steps"), _WARMUP),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_steps_ratio"), _WARMUP_RATIO),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), _DECAY),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "clip_grad"), Meant("optimizer.max_grad_norm={}")),
    "weight_decay": Meant("optimizer.weight_decay={}"),
    "adam_beta1": Meant("optimizer.beta1={}"),
    "adam_beta2": Meant("optimizer.beta2={}"),
    "bf16": _precision("bf16"),
    "fp16": _precision("fp16"),
    **dict.fromkeys(("loss_agg_mode", "policy_loss_agg_mode"), _AGGREGATION),
    "loss_type": Meant(
        "aggregation=...",
        "surrogate is the trust region, and TRL's scale_rewards is scale",
        {
            "grpo": "aggregation=sequence_mean",
            "dr_grpo": "aggregation=constant",
            "dapo": "aggregation=token_mean",
            "bnpo": "aggregation=token_mean convention=trl_bnpo",
            "cispo": "surrogate=cispo aggregation=token_mean",
            "sapo": "surrogate=sapo aggregation=sequence_mean",
        },
    ),
    "use_vllm": Meant("engine=...", values=_switch("engine=vllm", "engine=native")),
    "vllm_mode": Meant("engine=...", values={"colocate": "engine=vllm", "server": "engine=vllm_process"}),
    **dict.fromkeys(("report_to", "logger"), _TRACKING),
    "system_prompt": Meant("template=chat template.system={}", "of chat templates"),
    **dict.fromkeys(("save_steps", "save_freq"), Meant("checkpoint_every={}")),
    **dict.fromkeys(("eval_steps", "test_freq"), Meant("evaluation.every={}")),
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain", "actor_rollout_ref.model.path"), _MODEL),
    **dict.fromkeys(("dataset_name", "dataset", "train_files"), _TABLE),
    **dict.fromkeys(("scale_rewards", "norm_adv_by_std_in_grpo"), _SCALE),
    "importance_sampling_level": Meant(
        "importance=...", values={name: f"importance={name}" for name in ("token", "sequence", "sequence_token")}
    ),
    **dict.fromkeys(("mask_truncated_completions", "overlong_filter"), _MASK),
    **dict.fromkeys(("filter_groups", "filter_groups.enable", "dynamic_sampling"), _FILTER),
    **dict.fromkeys(("overlong_buffer", "overlong_buffer.enable"), _OVERLONG),
    "adv_estimator": Meant(
        "baseline=... scale=...",
        "recipe=... takes a whole method",
        {
            "grpo": "baseline=group_mean scale=group_std",
            "gae": "baseline=gae scale=batch_std_tokens",
            "rloo": "baseline=leave_one_out scale=none",
            "remax": "baseline=greedy scale=none",
            "reinforce_plus_plus": "baseline=return_to_go scale=batch_std_tokens",
            "reinforce_plus_plus_baseline": "baseline=group_mean scale=batch_std_tokens",
            "opo": "baseline=length_weighted scale=none",
            "gpg": "baseline=group_mean scale=informative_share",
        },
    ),
    **dict.fromkeys(("entropy_coeff", "entropy_coef"), _ENTROPY),
    "top_entropy_quantile": Meant(
        "entropy=high_entropy_tokens entropy.share={}",
        "entropy.share is the share of tokens in the loss, those of highest entropy",
        {"1": "entropy=none", "1.0": "entropy=none"},
    ),
    **dict.fromkeys(("reward_funcs", "reward_function", "reward_fn"), _FUNCTION),
    "custom_reward_function.path": Meant("reward=function reward.path={}:...", "FILE.py:FUNCTION"),
    "reward_weights": Meant("reward=function reward.path=... reward.weights={}", "a number for each function of A+B"),
    **dict.fromkeys(("use_peft", "lora_r", "lora_rank"), _LORA),
    **dict.fromkeys(("lag", "staleness"), _LAG),
    **dict.fromkeys(("algorithm", "method"), Meant("recipe={}", "a published method; grpo-lab tricks lists the parts")),
    "temperature": Meant("engine.temperature={}", "evaluation.temperature is that of evaluations"),
    "top_p": Meant("engine.top_p={}", "evaluation.top_p is that of evaluations"),
    **dict.fromkeys(
        ("top_k", "engine.top_k"), Meant("", "there is no top-k sampling; engine.top_p limits the candidates")
    ),
    **dict.fromkeys(("data.seed", "data_seed", "training_args.seed"), Meant("seed={}")),
    "vllm_importance_sampling_correction": Meant(
        "correction=...",
        "correction=mis is TRL's sequence_mask",
        _switch("correction=mis correction.high=3", "correction=none"),
    ),
    **dict.fromkeys(("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max"), _MISMATCH),
    "vllm_importance_sampling_mode": Meant(
        "correction=...",
        values={
            "token_truncate": "correction=tis_token",
            "token_mask": "correction=icepop correction.low=0",
            "sequence_truncate": "correction=tis_sequence",
            "sequence_mask": "correction=mis",
        },
    ),
    "sync_ref_model": Meant("reference=...", _REFERENCE, _switch("reference=reset", "reference=frozen")),
    "ref_model_sync_steps": Meant("reference=reset reference.every={}", f"in steps; {_REFERENCE}"),
    "logging_steps": _LOGGED,
    "log_completions": Meant("", "a run keeps tables of its rollouts; rollouts_every=10 keeps one every ten steps"),
    "output_dir": Meant("runs_dir={}"),
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
    """The entry for a key; a nested key of verl's is looked up by its longest known ending."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts) if parts[0] in _NESTED else 1))
    return next((MEANT[end] for end in ends if end in MEANT), None)


def misnamed(arguments: Sequence[str]) -> str:
    """Corrections of overrides whose key has another name here, or whose value needs quotes; "" for none."""
    lines = []
    for argument in arguments:
        key, assigned, value = argument.partition("=")
        key = key.lstrip("+~")
        if assigned and (meant := _meant(key)):
            lines.append(f"there is no key {key!r}: {meant.instead(value)}")
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


def _keys(slot: str, option: str) -> set[str]:
    """The dotted keys of an option and of the options that it builds on."""
    written = yaml.safe_load(option_text(slot, option)) or {}
    bases = [base for base in written.pop("defaults", []) if isinstance(base, str) and base[0] not in "/_"]
    return set(flat(written)).union(*(_keys(slot, base) for base in bases))


def _keys_of_options(slot: str) -> dict[str, set[str]]:
    """Option of the slot -> its dotted keys, the user's own options too."""
    files = [path for folder in (conf_folder(), *user_folders()) for path in (folder / slot).glob("*.yaml")]
    return {option: _keys(slot, option) for option in sorted(path.stem for path in files)}


def _of_another_option(key: str, value: str) -> str:
    """The error for a key that the chosen option of its slot lacks; "" if no option has it or one like it."""
    slot, _, name = key.partition(".")
    if slot not in slot_types():
        return ""
    keys = _keys_of_options(slot)
    near = next(iter(get_close_matches(name, sorted(set().union(*keys.values())), 1, cutoff=_CLOSE)), "")
    having = [option for option in keys if near in keys[option]]
    if not near:
        return ""
    meant = f"{slot}.{near}"
    problem = f"there is no key {key!r}: did you mean {meant}?"
    if len(having) == len(keys):
        return f"{problem} type {meant}={value}"
    # The option that MEANT chooses for this key, or else the plain one, or the first.
    known = (m.typed for m in MEANT.values() if m.typed.startswith(f"{slot}=") and f" {meant}={{}}" in m.typed)
    plain = plain_options()[slot]
    typed = next(known, f"{slot}={plain if plain in having else having[0]} {meant}={{}}").replace("{}", value)
    verb = "has" if len(having) == 1 else "have"
    start = f"there is no key {key!r} in the chosen {slot}:" if near == name else problem
    return f"{start} {slot}={', '.join(having)} {verb} it: type {typed}"


def _of_another_slot(group: str, option: str, key: str) -> str:
    """The error for a key that an option of `group`, such as a recipe, sets and the chosen option of its slot lacks.

    "" where the group is the key's own slot, or no option has the key.
    """
    slot, _, name = key.partition(".")
    having = [one for one, keys in _keys_of_options(slot).items() if name in keys] if slot in slot_types() else []
    if group == slot or not having:
        return ""
    chosen = f"{group}={option}"
    remedy = f"choose one that has it, {slot}={', '.join(having)}"
    start = f"{chosen} sets {key}, which the chosen {slot} does not have: {remedy}"
    if group != "recipe":
        return f"{start}, or leave {chosen} out"
    rest = (f"{axis}={name}" for axis, name in recipe_overrides().get(option, {}).items() if axis not in (slot, key))
    return f"{start}; or type the rest of the recipe in place of {chosen}: {' '.join(rest)}"


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
        close = get_close_matches(name, error.options or [], 1, _CLOSE)
        near = OPTIONS.get(f"{slot}/{name}") or next(iter(close), "")
        guess = f"did you mean {slot}={near}? " if near else ""
        own = f"; one of your own goes into FOLDER/{slot}, with {FOLDERS}=FOLDER before the command" if name else ""
        return f"there is no {error.missing_cfg_file!r}: {guess}{known}{own}"
    lacking = re.match(r"Could not override '([^']+)'.*use \+[^=]+=(.*)", str(error), re.DOTALL)
    if lacking:
        key, value = lacking[1], lacking[2].strip()
        if elsewhere := _of_another_option(key, value):
            return elsewhere
        near = get_close_matches(key.split(".")[0], keys, 1, cutoff=_CLOSE)
        guess = f"did you mean {near[0]!r}? " if near and near[0] != key.split(".")[0] else ""
        return f"there is no key {key!r}: {guess}--help lists the options, --cfg job every key"
    elsewhere_in = re.match(r"In '(\w+)/(\w+)': ConfigKeyError.*?full_key: ([\w.]+)", str(error), re.DOTALL)
    if elsewhere_in and (elsewhere := _of_another_slot(*elsewhere_in.groups())):
        return elsewhere
    if "Key 'experiments' not in" in str(error):
        return f"{first.partition(':')[0]}: the file's first line must be `# @package _global_`"
    if cause is not None and str(cause).strip():
        first = f"{first}: {str(cause).strip().splitlines()[0]}"
    return f"{first}: correct it; --help lists the options, --cfg job every key"
