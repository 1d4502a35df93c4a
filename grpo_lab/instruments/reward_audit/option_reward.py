"""A `reward=` or `verifier=` option as a function, so that the workers of functions can audit it too."""

from __future__ import annotations

import json
import os

from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.config.run_config import to_run
from grpo_lab.instruments.reward_audit import SETTING
from grpo_lab.tasks.grader_errors import details_of
from grpo_lab.types import NoiseKey, Problem

_slot, _overrides = json.loads(os.environ[SETTING])
_grader = getattr(to_run(compose_config(_overrides)), _slot)


def score(prompt: str, response: str, answer: str, finished: bool) -> float:
    """The correctness of a response, 0 or 1. Raises ValueError where the grader gives no verdict."""
    problem = Problem(0, prompt, answer, 1, details=details_of(answer))
    grades = _grader.checked_grades([problem], [response], [finished], [NoiseKey(0, "graders", 0, 0, 0)])
    if grades.correctness[0] != grades.correctness[0]:
        raise ValueError("no verdict, such as beyond its limits of time or memory")
    return grades.correctness[0]


score("", "", "5", True)  # loads what the grader loads at its first call
