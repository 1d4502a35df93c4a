"""No regular expression takes long on what a model may write: each pattern of the package, and what reads text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import PACKAGE
from processes import python_path

SCRIPT = Path(__file__).parents[1] / "shared" / "hostile_patterns.py"


@pytest.mark.extended
def test_every_pattern_and_reader_ends_on_a_hundred_thousand_hostile_characters() -> None:
    """In a process of its own, which takes seconds; a pattern of quadratic time takes hours. Its last line names it."""
    command, env = [sys.executable, str(SCRIPT)], {**os.environ, "PYTHONPATH": python_path(PACKAGE.parent)}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=env)
    except subprocess.TimeoutExpired as late:
        said = (late.stdout or b"").decode().splitlines()
        raise AssertionError(f"this does not end: {said[-1:]}") from late
    lines = done.stdout.splitlines()
    assert lines[-1:] == ["all tried"], (lines[-1:], done.stderr[-2000:])
    tried = {line.split()[0] for line in lines}
    assert {"tasks/rubrics.py", "tasks/verifiers.py", "tasks/gym.py", "tasks/grader_worker.py"} <= tried
