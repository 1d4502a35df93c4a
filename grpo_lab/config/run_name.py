"""The name of a run, derived from the chosen options and never typed by hand."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from grpo_lab.config.run_config import AXES, VOLATILE

_LONGEST_NAME = 120


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
        key, _, value = override.lstrip("+~").partition("=")
        if key.split(".")[0].split("@")[0] not in VOLATILE | {"seed", "recipe", "plugins", "hydra"}:
            chosen.append((key.split(".")[0] not in AXES, f"{key}={_canonical(value)}"))
    return short(",".join([recipe, *(word for _, word in sorted(chosen))]))


def _canonical(value: str) -> str:
    """A value as Hydra writes it, so that 1e3 typed by hand and 1000.0 from a sweep give one name."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").get_value_element_as_str()
    except HydraException:
        return value


def short(name: str) -> str:
    """The name as a folder name: no slashes, spaces, quotes or braces; a long one is shortened and ends in its hash."""
    name = re.sub(r"[\s'\"\\${}]", "", name.replace("/", "_"))
    if len(name) > _LONGEST_NAME:
        name = f"{name[: _LONGEST_NAME - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return name
