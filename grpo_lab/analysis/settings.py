"""In which options and numbers the arms of a sweep differ, by what their runs were composed of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_lab.tracking.renames import with_config_keys

if TYPE_CHECKING:
    from grpo_lab.analysis.load import SweepData

Settings = Mapping[str, Any]
Place = tuple[str, str]  # level and arm

_SAME = " = "
STEPS = "updates.number"  # optimiser steps on one batch of rollouts
# Bundles of options, which show in the options themselves; and what says where and how a run is stored.
_NOT_COMPARED = (
    "recipe", "world", "tracking", "seed", "runs_dir", "keep_checkpoints", "device", "plugins", "cell",
    "resume_with_changed_code",
)  # fmt: skip


def settings_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """Slot -> option, `slot.field` -> value and STEPS, from a run's run.json; {} where that holds no composition."""
    choices, config = described.get("choices", {}), described.get("config", {})
    found = with_config_keys({**choices, **config})
    found = {key: value for key, value in found.items() if key.partition(".")[0] not in _NOT_COMPARED}
    if "updates.minibatches" in config and "updates.passes" in config:
        found[STEPS] = config["updates.minibatches"] * config["updates.passes"]
    return found


def differing(by_place: Mapping[Place, Settings]) -> dict[Place, dict[str, Any]]:
    """Of the settings of every arm those in which some arm differs from another, and STEPS."""
    known = {place: settings for place, settings in by_place.items() if settings}
    keys = list(dict.fromkeys(key for settings in known.values() for key in settings))
    apart = [key for key in keys if len({repr(settings.get(key)) for settings in known.values()}) > 1]
    return {
        place: {key: settings[key] for key in (*apart, STEPS) if key in settings} for place, settings in known.items()
    }


def differences(here: Settings, control: Settings) -> list[str]:
    """What one arm has otherwise than another: slots whose option differs, and numbers of a common option.

    Numbers of one name that are the same number in both arms, such as a budget and what is derived from it, are one
    difference: `aggregation.max_tokens = engine.max_tokens`.
    """
    apart = [key for key in dict.fromkeys([*here, *control]) if here.get(key) != control.get(key) and key != STEPS]
    slots = [key for key in apart if "." not in key]
    alike: dict[tuple[str, ...], list[str]] = {}
    for key in apart:
        if "." in key and key.partition(".")[0] not in slots:
            mark = (key.rpartition(".")[2], repr(here.get(key)), repr(control.get(key)))
            alike.setdefault(mark, []).append(key)
    return [*slots, *(_SAME.join(keys) for keys in alike.values())]


def comparison(data: SweepData) -> list[str]:
    """The settings in which arms differ, who has which, and what no difference between the arms can be read as.

    For sweeps that declared nothing: a design says itself what its arms change. None where no run says what it is.
    """
    if not data.settings or len(data.settings) < 2:
        return []
    control = _control_of(data)
    apart = {place: differences(settings, data.settings[control]) for place, settings in data.settings.items()}
    keys = list(dict.fromkeys(key for own in apart.values() for key in own))
    lines = [f"Settings in which the arms differ: {len(keys)}."]
    for key in keys:
        holders: dict[str, list[str]] = {}
        for place, settings in data.settings.items():
            holders.setdefault(str(settings.get(key.split(_SAME)[0], "not there")), []).append(name_of(place))
        lines.append(f"  {key}: {'; '.join(f'{value} in {_listed(names)}' for value, names in holders.items())}")
    mixed = [f"{name_of(place)} in {len(own)} ({_listed(own)})" for place, own in apart.items() if len(own) > 1]
    if mixed:
        lines.append(
            f"WARNING: some arms differ from {name_of(control)} in more than one setting, so that no difference to it "
            f"is the doing of one of them: {'; '.join(mixed)}."
        )
    return lines + _steps_apart({name_of(place): settings.get(STEPS) for place, settings in data.settings.items()})


def undeclared_steps(data: SweepData) -> list[str]:
    """Arms of a design that take another number of optimiser steps than their control, and did not declare it."""
    if data.design is None:
        return []
    lines = []
    for (level, arm), settings in data.settings.items():
        control = data.settings.get((level, data.control), {})
        declared = any(word.startswith("updates") for word in data.design.arms.get(arm, ()))
        steps, others = settings.get(STEPS), control.get(STEPS)
        if not declared and None not in (steps, others) and steps != others:
            lines += _steps_apart({name_of((level, arm)): steps, data.control: others})
    return lines


def _steps_apart(steps: Mapping[str, int | None]) -> list[str]:
    known = {name: number for name, number in steps.items() if number is not None}
    if len(set(known.values())) < 2:
        return []
    by_number: dict[int, list[str]] = {}
    for name, number in known.items():
        by_number.setdefault(number, []).append(name)
    said = "; ".join(f"{number} in {_listed(names)}" for number, names in by_number.items())
    return [
        f"WARNING: optimiser steps on a batch differ: {said}. More steps alone can make such a difference; set updates "
        "to the same option in every arm to take that away."
    ]


def _control_of(data: SweepData) -> Place:
    return next((place for place in data.settings if place[1] == data.control), next(iter(data.settings)))


def name_of(place: Place) -> str:
    """An arm, with its level where it has one."""
    level, arm = place
    return f"{arm} at {level}" if level else arm


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
