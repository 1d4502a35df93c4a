"""The options and numbers in which the arms of a sweep differ, from the composition of their runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_lab.tracking.renames import with_config_keys

Settings = Mapping[str, Any]
Condition = tuple[str, str]  # level and arm

SAME = " = "
STEPS = "updates.number"  # optimiser steps on one batch of rollouts
# Bundles of options, which show in the options themselves; and what says where and how a run is stored.
_NOT_COMPARED = (
    "recipe", "world", "tracking", "seed", "runs_dir", "checkpoint_minutes", "keep_checkpoints", "device", "plugins",
    "label", "objective", "resume_with_changed_code",
)  # fmt: skip


def settings_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Slot -> option, `slot.field` -> value and STEPS, from a run's run.json; {} where that holds no composition."""
    choices, config = described.get("choices", {}), described.get("config", {})
    found = with_config_keys({**choices, **config})
    found = {key: value for key, value in found.items() if key.partition(".")[0] not in _NOT_COMPARED}
    if "updates.minibatches" in config and "updates.passes" in config:
        found[STEPS] = config["updates.minibatches"] * config["updates.passes"]
    return found


def differing(by_place: Mapping[Condition, Settings]) -> dict[Condition, dict[str, Any]]:
    """The settings of every arm, reduced to those in which some arms differ, and STEPS."""
    known = {place: settings for place, settings in by_place.items() if settings}
    keys = list(dict.fromkeys(key for settings in known.values() for key in settings))
    apart = [key for key in keys if len({repr(settings.get(key)) for settings in known.values()}) > 1]
    return {
        place: {key: settings[key] for key in (*apart, STEPS) if key in settings} for place, settings in known.items()
    }


def differences(here: Settings, control: Settings) -> list[str]:
    """The settings in which two arms differ: slots with another option, and other numbers of the same option.

    A number and those derived from it (equal name, equal values in both arms) are one difference, such as
    `aggregation.max_tokens = engine.max_tokens`.
    """
    apart = [key for key in dict.fromkeys([*here, *control]) if here.get(key) != control.get(key) and key != STEPS]
    slots = [key for key in apart if "." not in key]
    alike: dict[tuple[str, ...], list[str]] = {}
    for key in apart:
        if "." in key and key.partition(".")[0] not in slots:
            mark = (key.rpartition(".")[2], repr(here.get(key)), repr(control.get(key)))
            alike.setdefault(mark, []).append(key)
    return [*slots, *(SAME.join(keys) for keys in alike.values())]
