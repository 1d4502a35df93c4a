"""The design of an ablation from the shell: `add=[...]` or `leave_one_out=[...]`, read by `config/additions.py`.

Nothing is declared before its runs, so the design is exploratory, and nothing is judged.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig

from grpo_lab.config.additions import ALL
from grpo_lab.config.design import Kind
from grpo_lab.config.overrides import in_one_line
from grpo_lab.config.run_config import is_volatile
from grpo_lab.sweeps.planned_runs import BASE, is_hidden, key_of, seed_of, shown_words, values_of
from grpo_lab.tracking import names

_AXIS = "sampled_tokens"  # on which arms are compared, as in a sweep without a design


def exploratory(
    kind: str, additions: Sequence[str | Sequence[str]], arguments: Sequence[str], config: DictConfig
) -> tuple[dict[str, Any], list[str]]:
    """The entries of a design, and the arguments that are left for its runs.

    `kind` is add or leave_one_out. Every addition is an arm, beside a control that has none; with leave_one_out every
    arm lacks one, and the control has all. Lists among the arguments are levels, at which every arm runs;
    `model.base=0,1` gives every seed one base model. What else was typed is in all runs, below the additions.
    """
    every = ALL in additions
    added = [_overrides(one) for one in additions if one != ALL]
    tricks = {_label(words): words for words in added}
    if len(set(map(frozenset, added))) < len(added):
        raise ValueError(f"{kind}: duplicate addition in {', '.join(map(_label, additions))}: remove one")
    if every and kind != "add":
        raise ValueError(f"{kind}: its control has all additions, so leave `all` out of the list")
    if every and len(tricks) < 2:
        raise ValueError(f"{kind}: `all` combines the other additions, so list at least two")
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    choices = {override.get_key_element(): values_of(override) for override in parsed}
    seeds = [seed_of(word) for word in choices.pop("seed", [])]
    bases = choices.pop(BASE) if len(choices.get(BASE, ())) > 1 else []
    swept = {key: words for key, words in choices.items() if len(words) > 1}
    hidden = [key for key in choices if (is_volatile(key) or key.split(".")[0] == "plugins") and key not in swept]
    left = [word for word in arguments if key_of(word) in hidden]
    base = [word for key, (word, *_) in choices.items() if key not in swept and key not in hidden]
    design: dict[str, Any] = {
        "name": names.folder_name([kind, *sorted(tricks), *([ALL] if every else []), *shown_words(arguments)]),
        "exploratory": True,
        "kind": (Kind.leave_one_out if kind != "add" else Kind.add_one_and_all if every else Kind.add_one).value,
        "tricks": tricks,
        "control": ALL if kind != "add" else _control(choices),
        "primary": str(config.objective),
        "axis": _AXIS,
        "base": base,
        "seeds": seeds or [0],
    }
    asks = "What does each addition change" if kind == "add" else "What is lost without each of these"
    design["question"] = f"{asks}? Exploratory: nothing was declared or predicted."
    if swept:
        levels = [dict(zip(swept, words)) for words in itertools.product(*swept.values())]
        labels = [",".join(word.partition("=")[2] for word in words.values()) for words in levels]
        design |= {"factor": ",".join(swept), "levels": {a: list(b.values()) for a, b in zip(labels, levels)}}
    if bases:
        numbers = [_base_of(word) for word in bases]
        design |= {"bases": numbers, "seeds": seeds or list(range(len(numbers)))}
        if len(design["seeds"]) % len(numbers):
            raise ValueError(
                f"{len(seeds)} seeds on {len(numbers)} base models: seeds are assigned to base models "
                f"in turn, so give a multiple of {len(numbers)} seeds"
            )
    return design, left


def _control(choices: dict[str, list[str]]) -> str:
    """The name of the arm without additions: its recipe, where that is one."""
    recipes = choices.get("recipe", ["recipe=plain"])
    return recipes[0].partition("=")[2] if len(recipes) == 1 else "control"


def _base_of(word: str) -> int:
    number = word.partition("=")[2]
    if not number.isdigit():
        raise ValueError(f"{word}: a base model is a whole number")
    return int(number)


def _overrides(addition: str | Sequence[str]) -> list[str]:
    """The overrides of an addition as Hydra writes them. Raises ValueError for what no arm can add."""
    found: list[str] = []
    for word in [addition] if isinstance(addition, str) else addition:
        try:
            override = OverridesParser.create().parse_override(word)
        except HydraException as error:
            raise ValueError(f"addition {word}: {in_one_line(error)}") from error
        key = override.get_key_element()
        if is_hidden(bare := key.lstrip("+~")) or bare.split(".")[0] == "experiments":
            raise ValueError(
                f"addition {word}: {key} applies to the whole sweep, not to one arm: move it out of the list"
            )
        if override.is_sweep_override():
            raise ValueError(f"addition {word}: an arm takes one value: list each separately, {key}=..., {key}=...")
        if key_of(word) in map(key_of, found):
            raise ValueError(f"addition {_label(addition)} sets {key} twice: leave one of the two out")
        found += values_of(override)
    return found


def _label(addition: str | Sequence[str]) -> str:
    return addition if isinstance(addition, str) else "+".join(addition)
