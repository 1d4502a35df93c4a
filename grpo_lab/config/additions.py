"""An ablation on the command line, `add=[...]` or `leave_one_out=[...]`: its words as Hydra and the sweeper read them.

Hydra's grammar takes no `=` within an unquoted list, so the words are quoted and handed to the sweeper before Hydra
reads them. `sweeps/ablation.py` makes a design of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString

ALL = "all"  # the arm with every addition
_REQUEST = re.compile(r"\+{0,2}(add|leave_one_out)=(.*)", re.DOTALL)
_SETTING = re.compile(r"hydra\.sweeper\.(add|leave_one_out)=")
_OWN = re.compile(r"[+~]*(experiments|design)\b")  # of a sweep that an experiment declares
_EXAMPLE = "'[surrogate=ppo_higher,truncation=mask_after]'"
_OPEN, _CLOSE = "[{(", "]})"


def as_settings(arguments: Sequence[str]) -> list[str]:
    """The command line as Hydra reads it: `add=[a=b,[c=d,e=f],all]` as `hydra.sweeper.add=['a=b',['c=d','e=f'],all]`.

    The outer brackets may be left out. Raises ValueError for what is no list of additions, and where an experiment
    declares the arms.
    """
    requests = [match for word in arguments if (match := _REQUEST.fullmatch(word))]
    if not requests:
        return list(arguments)
    if len(requests) > 1:
        raise ValueError(f"{requests[0][0]} and {requests[1][0]} are two ablations: give one of the two")
    if own := [word for word in arguments if _OWN.match(word)]:
        raise ValueError(
            f"{own[0]} declares arms of its own, and {requests[0][1]}= gives others: leave one of the two out, or "
            "write the additions as design.tricks into an experiment of yours"
        )
    if other := [word for word in arguments if re.match(r"hydra/sweeper=(?!(runs|cells)$)", word)]:
        raise ValueError(f"{other[0]} does not support arms, which {requests[0][1]}= needs: remove one of the two")
    name, text = requests[0].groups()
    quoted = ",".join(
        f"[{','.join(map(_quoted, words))}]" if isinstance(words, list) else _quoted(words)
        for words in _additions(name, text)
    )
    return [f"hydra.sweeper.{name}=[{quoted}]" if word == requests[0][0] else word for word in arguments]


def as_typed(arguments: Sequence[str]) -> list[str]:
    """The command line as it was typed, from one that `as_settings` made."""
    return [_typed(word, match[1]) if (match := _SETTING.match(word)) else word for word in arguments]


def is_ablation(arguments: Sequence[str]) -> bool:
    """True if `as_settings` found one in these arguments."""
    return any(map(_SETTING.match, arguments))


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
    """The text within one pair of brackets around all of it; None without such a pair."""
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
        raise ValueError(f"{text}: unbalanced brackets or quotes")


def _unquoted(word: str) -> str:
    return word[1:-1] if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"" else word


def _quoted(word: str) -> str:
    return word if word == ALL else QuotedString(word, Quote.single).with_quotes()


def _typed(word: str, name: str) -> str:
    additions: Any = OverridesParser.create().parse_override(word).value()
    listed = (one if isinstance(one, str) else f"[{','.join(one)}]" for one in additions)
    return f"{name}=[{','.join(listed)}]"
