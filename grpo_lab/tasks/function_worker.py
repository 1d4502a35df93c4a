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


# Names of arguments in rewards written for verl and TRL, and ours.
_OTHER_NAMES = {
    "solution_str": "response",
    "completion": "response",
    "ground_truth": "answer",
    "solution": "answer",
    "question": "prompt",
}


def arguments(function: Callable[..., Any], known: dict[str, Any]) -> dict[str, Any]:
    """The arguments that it takes, of those known: ours and columns, or by the names of verl and TRL.

    A function with `completions` gets a batch of one in TRL's conversational form: every argument is a list.
    """
    parameters = inspect.signature(function).parameters.values()
    names = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    of_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
    known = {other: known[own] for other, own in _OTHER_NAMES.items() if other in names} | known
    known |= {"data_source": ""} if "data_source" in names - known.keys() else {}
    if "completions" not in names:
        return {name: value for name, value in known.items() if of_all or name in names}
    chats = {"prompts": ("user", known["prompt"]), "completions": ("assistant", known["response"])}
    batch = {name: [[{"role": role, "content": text}]] for name, (role, text) in chats.items()}
    columns = {name: [value] for name, value in known.items() if name not in ("prompt", "response")}
    return {name: value for name, value in {**columns, **batch}.items() if of_all or name in names}


def number(result: Any) -> float:
    """The score in a function's result: a number, TRL's list of one, or the `score` in verl's dict."""
    if isinstance(result, dict):
        result = result["score"]
    return float(result[0] if isinstance(result, (list, tuple)) else result)


def make_judge() -> Callable[[str, str, bool], float | str]:
    """The judge, with all functions loaded before the memory is bounded."""
    functions = [load(*pair) for pair in zip(sys.argv[3::2], sys.argv[4::2])]

    def judge(call: str, response: str, anywhere: bool) -> float | str:
        """The function's result, or the reason why it gave none."""
        place, known = json.loads(call)
        try:
            score = number(functions[place](**arguments(functions[place], {**known, "response": response})))
        except (MemoryError, RecursionError):
            raise
        except (Exception, SystemExit) as error:  # a user's function raises what it likes
            last = traceback.extract_tb(error.__traceback__)[-1]
            return f"{type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
        return score if math.isfinite(score) else f"it gave {score}, which is no finite number"

    return judge


if __name__ == "__main__":
    serve(make_judge)
