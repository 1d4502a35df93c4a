"""One worker that calls functions of the user's; the pool in `grader_pool.py` starts it as a script.

Its further arguments are the functions, FILE.py:FUNCTION or package.module:FUNCTION, each followed by the digest of its
file, or "" for an installed module. A worker that replaces another one would otherwise judge by a file that was edited
while the run goes on.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package may not be installed

from grpo_lab.tasks.grader_worker import serve
from grpo_lab.tracking.checksums import digest_of


def load(function: str, digest: str) -> Callable[..., Any]:
    """The function. Raises ImportError, AttributeError or whatever its module raises."""
    place, _, name = function.rpartition(":")
    if digest and digest_of(Path(place)) != digest:
        raise ImportError(f"{place} was edited while the run goes on")
    if not place.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        return getattr(importlib.import_module(place), name)
    sys.path.insert(0, str(Path(place).parent))  # what stands beside it can be imported
    spec = importlib.util.spec_from_file_location(Path(place).stem, place)
    assert spec is not None and spec.loader is not None, "a file of Python"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise AttributeError(f"{place} has no function {name}")
    return getattr(module, name)


def taken(function: Callable[..., Any]) -> frozenset[str] | None:
    """The names of the arguments that it takes; None for all."""
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return frozenset(one.name for one in parameters)


def make_judge() -> Callable[[str, str, bool], float | str]:
    """The judge, with all functions loaded before the memory is bounded."""
    functions = [load(*pair) for pair in zip(sys.argv[3::2], sys.argv[4::2])]
    arguments = [taken(function) for function in functions]

    def judge(asked: str, response: str, anywhere: bool) -> float | str:
        """The function's result, or the reason why it gave none."""
        place, known = json.loads(asked)
        names, given = arguments[place], {**known, "response": response}
        try:
            score = functions[place](**{name: given[name] for name in given if names is None or name in names})
            score = float(score)
        except (MemoryError, RecursionError):
            raise
        except Exception as error:  # a user's function raises what it likes
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
        return score if math.isfinite(score) else f"it gave {score}, which is no finite number"

    return judge


if __name__ == "__main__":
    serve(make_judge)
