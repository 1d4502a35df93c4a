"""Results of a harness that a test makes up, in a run's folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_lab.tracking.harness_results import HarnessResult, history_of, write_result

SUITE = "lm_eval_sums"


def plant_result(run: Path, step: int, accuracy: float, at: int = 1_000, **changes: Any) -> HarnessResult:
    """A result of the run as it is, 0.05 in doubt over 80 answers; `changes` are of its fields."""
    history = history_of(run, step)
    assert history is not None
    result = HarnessResult(
        suite=SUITE,
        harness="lm_eval",
        harness_version="0.4.13",
        task="sums",
        task_version=1,
        step=step,
        weights="w" * 16,
        run_key=json.loads((run / "run.json").read_text())["run_key"],
        history=history,
        metric="exact_match,none",
        metrics={"exact_match,none": {"value": accuracy, "stderr": 0.05}, "f1,none": {"value": 0.5, "stderr": None}},
        samples=80,
        questions="q" * 16,
        settings={"limit": None},
        configuration={},
        command=["grpo-lab", "evaluate"],
        at=at,
    )
    result = replace(result, **changes)
    write_result(run, result)
    return result
