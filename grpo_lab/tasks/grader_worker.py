"""One worker of the grader pool: judges answers with math-verify, one at a time.

`grader_pool.py` starts this file as a script, with its own process id and a bound on memory as arguments. A request is
a line of JSON on standard input, a reply one on standard output. The worker imports nothing of this package but
`answer_types.py`, so it starts fast and never loads torch.

math-verify's own time limits stay off (`timeout_seconds` and `parsing_timeout` of 0). They are Python signal
handlers, and those wait until a long operation in C ends: a huge power would never be interrupted. Here the kernel
kills the worker instead.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import select
import signal
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package may not be installed

from grpo_lab.tasks.answer_types import (
    choice,
    inequalities,
    is_ratio,
    is_text,
    key,
    latex,
    listed,
    moment,
    quantity,
    same_moment,
    shapes_clash,
    undressed,
)

_LOOKS_FOR_PARENT_S = 1.0
_SIGNS = "−–⁄×÷·⋅°π∞≤≥≠∪∩∅"  # noqa: RUF001
_COMMANDS = r"- - / \times \div \cdot \cdot ^\circ \pi \infty \le \ge \ne \cup \cap \emptyset"
_SPELLINGS = dict(zip(_SIGNS, _COMMANDS.split()))
_ROOT = re.compile(r"√\s*(?:([0-9]+|[a-zA-Z])|\(([^()]*)\))")
_MIXED = re.compile(r"([-+]?[0-9]+)\s+([0-9]+)/([0-9]+)")
_SPACED_THOUSANDS = re.compile(r"(?<![0-9])([0-9]{1,3})((?:(?:\\[,;: ]|~|\s)[0-9]{3})+)(?![0-9])")
_NUMBERS_APART = re.compile(r"[0-9]\s+[0-9]")

Value = Any  # sympy's expressions, sets and matrices have no common base class


def spelled(text: str) -> str:
    """An answer with its signs beyond ASCII in LaTeX, and numbers written so that math-verify reads all of them.

    math-verify knows neither ½ nor full-width digits, takes `3 1/2` for 2 and `1 000` for 0, and does not read `5.`.
    """
    signs = []
    for sign in text:
        plain = unicodedata.normalize("NFKC", sign)
        if sign in _SPELLINGS:
            signs.append(f"{_SPELLINGS[sign]} " if _SPELLINGS[sign].startswith("\\") else _SPELLINGS[sign])
        elif "\u2044" in plain[1:]:  # ½ is 1, a fraction slash and 2
            above, below = plain.split("\u2044")
            signs.append(rf" \frac{{{above}}}{{{below}}}")
        elif unicodedata.decomposition(sign).startswith("<super>"):
            signs.append(f"^{{{plain}}}")
        elif unicodedata.category(sign) != "Cf":  # marks of direction and width zero show nothing
            signs.append(plain)
    text = "".join(signs).replace("~", " ").strip()
    if not (sentence := text.rstrip(".,;: ")).endswith("\\"):  # `\,` is a space
        text = sentence
    text = _ROOT.sub(lambda root: rf"\sqrt{{{root[1] or root[2]}}}", text)
    if mixed := _MIXED.fullmatch(text):
        return r"{}\frac{{{}}}{{{}}}".format(*mixed.groups())
    return _SPACED_THOUSANDS.sub(lambda number: re.sub(r"[^0-9]", "", number[0]), text)


class Judge:
    """math-verify, loaded."""

    def __init__(self) -> None:
        import math_verify
        import sympy
        from latex2sympy2_extended import antlr_parser
        from latex2sympy2_extended.latex2sympy2 import (
            ConversionConfig,
            NormalizationConfig,
            latex2sympy,
            normalize_latex,
        )
        from math_verify.parser import get_last_eq, parse_latex_cached, should_treat_as_complex

        # The parser generated for ANTLR 4.9.3, which Hydra needs, lacks this rule. Without it no percent is read.
        atom, rule = antlr_parser.PSParser.AtomContext, "FUNC_GAMMA"
        if not hasattr(atom, rule):
            setattr(atom, rule, lambda self: None)
        self._parse, self._verify = math_verify.parse, math_verify.verify
        self._parse_latex: Callable[[str], Value] = parse_latex_cached
        self._convert: Callable[..., Value] = latex2sympy
        self._normal: Callable[..., str] = normalize_latex
        self._last_side: Callable[[str], str] = get_last_eq
        self._is_complex: Callable[[str], bool] = should_treat_as_complex
        self._union: Callable[..., Value] = sympy.Union
        self._number: type = sympy.Expr
        self._cases = ConversionConfig(lowercase_symbols=False)
        self._config = NormalizationConfig(
            basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none", equations=False
        )
        self._value_config = replace(self._config, units=False)
        self._gold = lru_cache(maxsize=64)(self._read)
        self._right = lru_cache(maxsize=64)(self._value)

    def __call__(self, gold: str, text: str, anywhere: bool) -> bool | None:
        """True if the answer is right; None if the right answer cannot be read.

        `text` is an answer or, with `anywhere`, a response in which math-verify looks for one.
        """
        if not anywhere:
            return self._same(gold, text)
        right, written = self._gold(gold)
        found = self._search(text)
        if written.strip() and written.strip() in [read.strip() for read in found if isinstance(read, str)]:
            return True
        if right is None:
            return None
        return any(self._equal(right, read) for read in found if not isinstance(read, str))

    def _same(self, gold: str, answer: str) -> bool | None:
        """Compare by the type of the right answer: choice, date or time, text, else value with unit."""
        gold, answer = (undressed(spelled(text)) for text in (gold, answer))
        if key(gold) == key(answer) != "":
            return True
        if (right := choice(gold)) is not None:
            chosen, message = choice(answer, any_case=True) or ("", answer)
            if chosen or right[1]:
                return chosen in ("", right[0]) and (not message or not right[1] or bool(self._same(right[1], message)))
            return False
        if not is_ratio(gold) and (verdict := same_moment(moment(gold), moment(answer))) is not None:
            return verdict
        right, read = quantity(gold), quantity(answer)
        if is_text(right.value) or is_text(read.value):
            return is_text(right.value) and listed(gold) == listed(answer)
        if right.clashes(read) or shapes_clash(right.value, read.value):
            return False
        value = self._right(right.value)
        if value is None:
            return None
        found = self._value(read.value)
        if found is None:
            return False
        pairs = [(right.scale, read.scale)]
        if (right.unit == "%") != (read.unit == "%"):
            pairs += [(right.scale, read.scale * 100) if right.unit == "%" else (right.scale * 100, read.scale)]
        return any(self._equal(scaled(value, one), scaled(found, other)) for one, other in pairs)

    def _value(self, text: str) -> Value | None:
        """A whole answer as an expression, None if it is none."""
        try:
            if len(parts := inequalities(text)) > 1:
                return self._union(*(self._expression(part).as_set() for part in parts))
            return self._expression(text)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # of the parser and of sympy, without a common class: the answer is no mathematics
            return None

    def _expression(self, text: str) -> Value:
        normal = self._normal(latex(text), config=self._value_config)
        if _NUMBERS_APART.search(normal):  # math-verify takes `7 2` for 9
            raise ValueError
        last = self._last_side(normal)
        for written in dict.fromkeys((normal, last)):
            try:
                is_real = not self._is_complex(written)
                return self._convert(written, is_real=is_real, normalization_config=None, conversion_config=self._cases)
            except (MemoryError, RecursionError):
                raise
            except Exception:
                if written == last:
                    raise
        raise AssertionError("one of them was returned or raised")

    def _read(self, answer: str) -> tuple[Value | None, str]:
        """A right answer as an expression, None if it is none, and as normalised text, as math-verify reads both.

        These are the steps of math-verify's `parse` without its search, which could find an answer in the midst of
        this one.
        """
        normal = answer
        try:
            normal = self._normal(spelled(answer), config=self._config)
            if _NUMBERS_APART.search(normal):
                return None, normal
            return self._parse_latex(normal), normal
        except (MemoryError, RecursionError):
            raise
        except Exception:
            return None, normal

    def _search(self, response: str) -> list[Value]:
        """Math-verify's parse of a response: an expression and its text, or one of them, or nothing."""
        try:
            return self._parse(response, parsing_timeout=0, raise_on_error=True)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # as above: nothing is found
            return []

    def _equal(self, right: Value, read: Value) -> bool:
        try:
            text = self._verify(right, read, timeout_seconds=0, raise_on_error=True, allow_set_relation_comp=True)
            return bool(text) and self._close(right, read)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # things that cannot be compared, such as a matrix and a set, are not equal
            return False

    def _close(self, right: Value, read: Value) -> bool:
        """True if two numbers are equal for their size: math-verify takes 2^{-98} for 2^{-99}, as both are small."""
        if not all(isinstance(value, self._number) and value.is_number and value.is_finite for value in (right, read)):
            return True
        one, other = right.evalf(30), read.evalf(30)
        return bool(abs(one - other) <= max(abs(one), abs(other)) * 1e-12)


def scaled(value: Value, factor: int) -> Value:
    """A number times that many; anything else as it is."""
    return value if factor == 1 else value * factor


def reply(judge: Callable[[str, str, bool], float | str | None], request: dict[str, Any]) -> dict[str, Any]:
    """The verdict on one request, None for a failure with the reason if it is known, and whether the worker is spent.

    A spent worker has to be replaced.
    """
    # The kernel ends this process when its time is up, whatever it is doing, and even without its parent.
    signal.setitimer(signal.ITIMER_PROF, request["seconds"])
    signal.setitimer(signal.ITIMER_REAL, request["waits"])
    try:
        verdict = judge(request["gold"], request["text"], request["anywhere"])
    except RecursionError:
        verdict = None
    except MemoryError:
        return {"right": None, "why": f"it took more than {_room >> 30} GiB of memory", "spent": True}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    spent = _used_bytes() > resource.getrlimit(resource.RLIMIT_AS)[0] - _room / 2
    return {"right": None, "why": verdict[:500], "spent": spent} if isinstance(verdict, str) else {
        "right": verdict, "spent": spent
    }  # fmt: skip


def _used_bytes() -> int:
    """The size of the address space; 0 where it is not known. A peak of `getrusage` may be that of the parent."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


_room = 0  # bytes of address space beyond what loading took


def _limit(bytes_of_memory: int) -> None:
    """Bound the address space beyond what is loaded, since a huge power asks for all memory at once; no core file."""
    global _room
    _room = bytes_of_memory
    for kind, limit in ((resource.RLIMIT_AS, _used_bytes() + bytes_of_memory), (resource.RLIMIT_CORE, 0)):
        hard = resource.getrlimit(kind)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bound, bound))


def serve(make_judge: Callable[[], Callable[[str, str, bool], float | str | None]]) -> None:
    """Answer requests until the parent closes the pipe or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the parent handles them, and ends its workers
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    parent, bytes_of_memory = int(sys.argv[1]), int(sys.argv[2])
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    logging.disable()

    def say(message: dict[str, Any]) -> None:
        os.write(replies, json.dumps(message).encode() + b"\n")

    try:
        judge = make_judge()
        _limit(bytes_of_memory)
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"[:500]})
        return
    say({"ready": True})
    pending = b""
    while os.getppid() == parent:
        if not select.select([0], [], [], _LOOKS_FOR_PARENT_S)[0]:
            continue
        part = os.read(0, 1 << 16)
        if not part:
            return
        pending += part
        if pending.endswith(b"\n"):
            request, pending = json.loads(pending), b""
            say(reply(judge, request))


if __name__ == "__main__":
    serve(Judge)
