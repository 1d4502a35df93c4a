"""An ablation from the shell: `add=[...]` or `leave_one_out=[...]` on a command line becomes a design of that kind.

Nothing is declared before its runs, so the design is exploratory, and nothing is judged. Hydra's grammar takes no `=`
within an unquoted list, so the words are quoted and handed to the sweeper before Hydra reads them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

from grpo_lab.config.design import ALL, Kind
from grpo_lab.config.overrides import in_one_line
from grpo_lab.config.run_config import VOLATILE
from grpo_lab.sweeps.cells import BASE, is_own, key_of, seed_of, shown_words, values_of
from grpo_lab.tracking import names

_ASKED = re.compile(r"\+{0,2}(add|leave_one_out)=(.*)", re.DOTALL)
_SETTING = re.compile(r"hydra\.sweeper\.(add|leave_one_out)=")
_EXAMPLE = "'[surrogate=ppo_higher,truncation=mask_after]'"
_OPEN, _CLOSE = "[{(", "]})"
_AXIS = "sampled_tokens"  # on which arms are compared, as in a sweep without a design


def as_settings(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra reads it: `add=[a=b,[c=d,e=f],all]` as `hydra.sweeper.add=['a=b',['c=d','e=f'],all]`.

    The outer brackets may be left out. Raises ValueError for what is no list of additions, and where an experiment
    declares the arms.
    """
    asked = [match for word in arguments if (match := _ASKED.fullmatch(word))]
    if not asked:
        return list(arguments)
    if len(asked) > 1:
        raise ValueError(f"{asked[0][0]} and {asked[1][0]} are two ablations: give one of the two")
    if own := [word for word in arguments if is_own(word)]:
        raise ValueError(
            f"{own[0]} declares arms of its own, and {asked[0][1]}= gives others: leave one of the two out, or write "
            "the additions as design.tricks into an experiment of yours"
        )
    if other := [word for word in arguments if re.match(r"hydra/sweeper=(?!cells$)", word)]:
        raise ValueError(f"{other[0]} knows no arms, and {asked[0][1]}= is about them: leave one of the two out")
    name, text = asked[0].groups()
    quoted = ",".join(
        f"[{','.join(map(_quoted, words))}]" if isinstance(words, list) else _quoted(words)
        for words in _additions(name, text)
    )
    return [f"hydra.sweeper.{name}=[{quoted}]" if word == asked[0][0] else word for word in arguments]


def as_typed(arguments: Sequence[str]) -> list[str]:
    """The command line as it was typed, from one that `as_settings` made."""
    return [_typed(word, match[1]) if (match := _SETTING.match(word)) else word for word in arguments]


def is_ablation(arguments: Sequence[str]) -> bool:
    """Whether `as_settings` found one in these arguments."""
    return any(map(_SETTING.match, arguments))


def exploratory(
    kind: str, additions: Sequence[str | Sequence[str]], arguments: Sequence[str], config: DictConfig
) -> tuple[dict[str, Any], list[str]]:
    """The entries of a design, and the arguments that are left for its cells.

    `kind` is add or leave_one_out. Every addition is an arm, beside a control that has none; with leave_one_out every
    arm lacks one, and the control has all. Lists among the arguments are levels, at which every arm runs;
    `model.base=0,1` gives every seed one base model. What else was typed is in all runs, below the additions.
    """
    every = ALL in additions
    added = [_overrides(one) for one in additions if one != ALL]
    tricks = {_label(words): words for words in added}
    if len(set(map(frozenset, added))) < len(added):
        raise ValueError(f"{kind}: an addition is there twice in {', '.join(map(_label, additions))}: remove one")
    if every and kind != "add":
        raise ValueError(f"{kind}: its control has all additions, so leave `all` out of the list")
    if every and len(tricks) < 2:
        raise ValueError(f"{kind}: `all` is two additions or more together, so name them beside it")
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    choices = {override.get_key_element(): values_of(override) for override in parsed}
    seeds = [seed_of(word) for word in choices.pop("seed", [])]
    bases = choices.pop(BASE) if len(choices.get(BASE, ())) > 1 else []
    swept = {key: words for key, words in choices.items() if len(words) > 1}
    hidden = [key for key in choices if key.split(".")[0] in VOLATILE | {"plugins"} and key not in swept]
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
                f"{len(seeds)} seeds on {len(numbers)} base models: a seed runs on one of them, in turn, so give as "
                "many seeds as base models, or twice as many"
            )
    return design, left


def _control(choices: dict[str, list[str]]) -> str:
    """What to call the arm without additions: its recipe, where that is one."""
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
        if key.lstrip("+~").split(".")[0] in VOLATILE | {"seed", "plugins", "hydra", "experiments"}:
            raise ValueError(
                f"addition {word}: {key} is of the whole sweep, no trick of an arm: give it beside the list"
            )
        if override.is_sweep_override():
            raise ValueError(f"addition {word}: an arm has one value, so name each of them: {key}=..., {key}=...")
        if key_of(word) in map(key_of, found):
            raise ValueError(f"addition {_label(addition)} sets {key} twice: leave one of the two out")
        found += values_of(override)
    return found


def _label(addition: str | Sequence[str]) -> str:
    return addition if isinstance(addition, str) else "+".join(addition)


# ---- the text of a list


def _additions(name: str, text: str) -> list[str | list[str]]:
    """Additions as typed: an override, or a list of overrides that one arm adds together."""
    listed = _within(text)
    found: list[str | list[str]] = []
    for part in _split(text if listed is None else listed):
        together = _within(part)
        words = [part] if together is None else _split(together)
        for word in map(_unquoted, words):
            if word != ALL and not re.match(r"\+{0,2}[\w./@]+=|~[\w./@]+", word):
                raise ValueError(
                    f"{name}: {word!r} is no override: type key=value for each addition, such as {name}={_EXAMPLE}"
                )
        if not words or (together is not None and ALL in words):
            raise ValueError(f"{name}: {part} adds no overrides: type them as [key=value,key=value]")
        found.append(_unquoted(part) if together is None else list(map(_unquoted, words)))
    if not found:
        raise ValueError(f"{name}= names no additions: type {name}={_EXAMPLE}")
    return found


def _within(text: str) -> str | None:
    """What stands between two brackets that enclose the whole text; None where none do."""
    text = text.strip()
    closings = (at for at, sign, depth in _signs(text) if sign in _CLOSE and depth == 0)
    return text[1:-1] if text.startswith("[") and next(closings, None) == len(text) - 1 else None


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no bracket and no quote."""
    ends = [at for at, sign, depth in _signs(text) if sign == "," and depth == 0]
    cuts = [-1, *ends, len(text)]
    parts = [text[one + 1 : other].strip() for one, other in itertools.pairwise(cuts)]
    return [] if parts == [""] else parts


def _signs(text: str) -> Iterator[tuple[int, str, int]]:
    """Every character outside of quotes, its place, and its depth in brackets. Raises ValueError if one stays open."""
    depth, quote, escaped = 0, "", False
    for at, sign in enumerate(text):
        if escaped or sign == "\\":
            escaped = not escaped
        elif quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        else:
            depth -= sign in _CLOSE
            yield at, sign, depth
            depth += sign in _OPEN
    if depth or quote:
        raise ValueError(f"{text}: a bracket or a quote of it has no partner")


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _quoted(word: str) -> str:
    return word if word == ALL else QuotedString(word, Quote.single).with_quotes()


def _typed(word: str, name: str) -> str:
    additions: Any = OverridesParser.create().parse_override(word).value()
    listed = (one if isinstance(one, str) else f"[{','.join(one)}]" for one in additions)
    return f"{name}=[{','.join(listed)}]"
