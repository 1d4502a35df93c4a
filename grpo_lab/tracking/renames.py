"""Old names in earlier runs, saved data and declarations, and today's names for them.

Files on disk stay as they were written; readers translate old names to today's, so a rename loses no record.
`grpo_lab.renamed` does the same for the code of plugins.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

METRICS = {
    "critic/clipped": "critic/clip_fraction",
    "reward/kept_mean": "reward/in_loss_mean",
    "reward/kept_outcome": "reward/in_loss_outcome",
    "rollout/zero_signal": "rollout/frac_zero_std",
    "time/score": "time/logprobs",
    "touched/surrogate": "train/clip_fraction",
    "train/k3_old": "train/approx_kl",
    "train/read_share": "train/scored_share",
    "wish/miss": "target_length/error",
    "wish/slope": "target_length/slope",
    "wish/tokens": "target_length/mean",
}
_METRIC_FAMILIES = {
    "reward/kept_component/": "reward/in_loss_component/",
    "touched/": "active_fraction/",
    "foreign/": "external/",
}
SWEEP_FIELDS = {"cells": "runs"}  # of sweep.json and saved data
DECLARED_FIELDS = {"cells_started_before": "runs_started_before"}  # of each declaration in them
MEMORY_FIELDS = {"asked_at": "drawn_at", "asked_again": "repeats"}  # of the curriculum, in checkpoints
DONE_FIELDS = {"inert": "no_ops"}  # also of the runs of saved data, and tags of MLflow
CLASSES = {"CardBase": "GpuBase"}  # of options, in the identity of a run
ROLLOUT_COLUMNS = {"counted": "in_statistics", "trained": "in_loss"}
# Columns that the rollout tables of earlier runs do not have.
ADDED_COLUMNS = frozenset(
    ("prompt_ids", "token_ids", "kept_in_statistics", "kept_in_loss", "token_old_logprob", "token_ref_logprob")
)
# The first part of a dotted configuration key.
KEYS = {
    "cell": "label",
    "pace": "cost_model",
    "scores_per_chunk": "logits_per_chunk",
    "split_cost_tokens": "padding_tolerance_tokens",
}
_FIELDS = {"template.wish": "template.target_length", "model.seed": "model.base"}
# Keys that earlier runs do not have, each with the value under which a run does what it did before.
ADDED_KEYS: Mapping[str, Any] = {
    "convention.k1_limit": 0.0,
    "convention.k2_limit": 0.0,
    "convention.k3_limit": 0.0,
    "evaluation.sharpened": [],
    "evaluation.unreadable_share": 0.05,
    "kl.limit": 0.0,
    "model.lora.alpha": 32.0,
    "model.lora.class": "Lora",
    "model.lora.rank": 0,
    "model.lora.targets": ["all-linear"],
    "rejection.direction": "sampler_to_old",
    "reward.per_response": False,
    "reward.threshold": 1.0,
    "task.unreadable_share": 0.05,
    "token_credit.class": "NoTokenCredit",
    "twin.class": "NoTwin",
    "update_mask.class": "NoUpdateMask",
    "verifier.threshold": 1.0,
}
_AVERAGE = "average/"  # of a metric over all steps, which a prediction may name

Value = TypeVar("Value")


def metric_name(name: str) -> str:
    """Today's name of a metric; names that never changed stay."""
    if name.startswith(_AVERAGE):
        return _AVERAGE + metric_name(name.removeprefix(_AVERAGE))
    if name in METRICS:
        return METRICS[name]
    family = next((old for old in _METRIC_FAMILIES if name.startswith(old)), "")
    return _METRIC_FAMILIES.get(family, "") + name.removeprefix(family)


def first_metric_name(name: str) -> str:
    """The name that a metric had first, by which declarations are distinguished; undoes `metric_name`."""
    if name.startswith(_AVERAGE):
        return _AVERAGE + first_metric_name(name.removeprefix(_AVERAGE))
    for old, new in _METRIC_FAMILIES.items():
        if name.startswith(new):
            return old + name.removeprefix(new)
    return next((old for old, new in METRICS.items() if new == name), name)


@cache
def config_key(key: str) -> str:
    """Today's name of a dotted configuration key."""
    key = _FIELDS.get(key, key)
    first, dot, rest = key.partition(".")
    return KEYS.get(first, first) + dot + rest


def with_metric_names(numbers: Mapping[str, Value]) -> dict[str, Value]:
    """The same values, each under today's name of its metric."""
    return {metric_name(name): value for name, value in numbers.items()}


def with_fields(record: Mapping[str, Value], today: Mapping[str, str]) -> dict[str, Value]:
    """The same values, each under its name in `today`, which maps old names, such as SWEEP_FIELDS, to today's."""
    return {today.get(name, name): value for name, value in record.items()}


def with_done_fields(record: Mapping[str, Value]) -> dict[str, Value]:
    """The same values, each under today's name of its field in the file DONE."""
    return with_fields(record, DONE_FIELDS)


def with_config_keys(config: Mapping[str, Value]) -> dict[str, Value | str]:
    """The same values, each under today's name of its key; of classes of options the value is today's name too."""
    today: dict[str, Value | str] = {config_key(key): value for key, value in config.items()}
    classes = {key: str(value) for key, value in today.items() if key.endswith(".class")}
    return today | {key: CLASSES.get(name, name) for key, name in classes.items()}
