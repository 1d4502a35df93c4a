"""The name of a run, derived from the chosen options and never typed by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from grpo_lab.config.run_config import AXES, is_volatile
from grpo_lab.tracking.names import folder_name


def chosen_options(choices: Mapping[str, str]) -> dict[str, str]:
    """Slot -> option, from Hydra's record of its choices; not Hydra's own groups, nor options within options."""
    return {name: option for name, option in choices.items() if not re.search("[/@]", name) and name != "experiments"}


def run_name(recipe: str, overrides: Sequence[str]) -> str:
    """The run's name from its overrides, such as `dr_grpo,truncation=mask_after`; the seed has its own folder level.

    Tricks come before sizes and budgets, because a name too long for a folder is shortened and ends in a hash. The
    order of the overrides does not matter.
    """
    chosen = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        first = key.lstrip("~").split(".")[0]
        if not is_volatile(key.lstrip("~").split("@")[0]) and first not in {"seed", "recipe", "plugins", "hydra"}:
            chosen.append((first not in AXES, f"{key}={_canonical(value)}"))
    return folder_name([recipe, *(word for _, word in sorted(chosen))])


def _canonical(value: str) -> str:
    """A value as Hydra writes it, so that 1e3 typed by hand and 1000.0 from a sweep give one name.

    A text is without quotes and backslashes, unless it would be read as something else.
    """
    parser = OverridesParser.create()
    try:
        parsed = parser.parse_override(f"key={value}")
        text = parsed.value()
        with suppress(HydraException):
            if isinstance(text, str) and parser.parse_override(f"key={text}").value() == text:
                return text
        return parsed.get_value_element_as_str()
    except HydraException:
        return value
