"""One worker that judges answers to questions of reasoning-gym; the pool in `grader_pool.py` starts it as a script.

Families judge in their own ways, and some compute what the answer says. So it is done in a process that may be killed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package may not be installed

from grpo_lab.tasks.grader_worker import serve
from grpo_lab.tasks.gym import score


def judge(details: str, answer: str, anywhere: bool) -> float | None:
    """The score of an answer to the problem with these details; None where the family fails."""
    try:
        return score(details, answer)
    except (MemoryError, RecursionError):
        raise
    except Exception:  # each family raises what it likes on an answer it did not expect
        return None


def make_judge() -> Callable[[str, str, bool], float | None]:
    """The judge, with reasoning-gym loaded before the memory is bounded."""
    importlib.import_module("reasoning_gym")
    return judge


if __name__ == "__main__":
    serve(make_judge)
