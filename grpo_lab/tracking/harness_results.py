"""Results of evaluation harnesses for a run's checkpoints: checksummed files in the run's folder, beside its own log.

    harness/<suite>/step=000100.json      what was measured, of which weights, and how; sealed with a digest
    harness/<suite>/step=000100.parquet   every question, response and score

A suite is named after harness and task, such as `lm_eval_gsm8k`. metrics.jsonl is never changed: readers join the
results as `eval/<suite>/accuracy` of their step. A result belongs to one history of a run, the lines of metrics.jsonl
up to its step. If a resumed run wrote other lines, the result is of weights that the run no longer has.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from grpo_lab.tracking.checksums import CHECKSUM, read_checksummed, read_json, with_checksum
from grpo_lab.tracking.files import write_json

FOLDER = "harness"
AGAIN = "evaluate again with `grpo-lab evaluate ... --again`, or remove the file"


@dataclass(frozen=True)
class HarnessResult:
    """The result of one harness on one task, for the weights after one step.

    `metrics` maps each metric to its value and stderr; `metric` is the one that counts as accuracy. `questions` is a
    hash of all prompts and targets, `weights` the fingerprint of the weights. `history` is a hash of the run's log up
    to the step. `settings` is what was asked for, `configuration` how the harness itself describes the task.
    """

    suite: str
    harness: str
    harness_version: str
    task: str
    task_version: Any
    step: int
    weights: str
    run_key: str
    history: str
    metric: str
    metrics: Mapping[str, Mapping[str, float | None]]
    samples: int
    questions: str
    settings: Mapping[str, Any]
    configuration: Mapping[str, Any]
    command: list[str]
    at: int  # unix time in ms

    def logged(self) -> dict[str, float]:
        """The metrics of its step, under their names in the registry."""
        main = self.metrics[self.metric]
        found = {"accuracy": main["value"], "accuracy_se": main["stderr"], "responses": self.samples}
        return {f"eval/{self.suite}/{name}": value for name, value in found.items() if value is not None}

    @property
    def protocol(self) -> str:
        """Twelve hexadecimal digits of what was asked and how it was graded: two that differ are not to be compared."""
        task = {"version": self.task_version, "questions": self.questions, "configuration": self.configuration}
        parts = [self.harness, self.harness_version, self.metric, task, self.settings]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def suite_of(harness: str, name: str) -> str:
    """The suite of a task, for the names of its metrics."""
    return f"{harness}_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"


def result_path(folder: Path, suite: str, step: int) -> Path:
    """Where the run in `folder` keeps a result; its answers lie beside it, as parquet."""
    return folder / FOLDER / suite / f"step={step:06d}.json"


def write_result(folder: Path, result: HarnessResult) -> Path:
    """Write it, replacing an earlier one; returns its path. Raises RunFolderError."""
    path = result_path(folder, result.suite, result.step)
    write_json(path, with_checksum(asdict(result)), sort=False)
    return path


def read_result(path: Path) -> HarnessResult:
    """Read what `write_result` wrote. Raises ValueError with a remedy if it is not what was written."""
    content = read_checksummed(path, AGAIN)
    try:
        return HarnessResult(**{name: value for name, value in content.items() if name != CHECKSUM})
    except TypeError as error:
        raise ValueError(f"{path} was written by another version of grpo_lab ({error}): {AGAIN}") from error


def read_results(folder: Path) -> list[HarnessResult]:
    """All results in a run's folder, by suite and step. Raises ValueError for one that is damaged."""
    return [read_result(path) for path in sorted((folder / FOLDER).glob("*/step=*.json"))]


def history_of(folder: Path, step: int) -> str | None:
    """The SHA-256 of the lines of metrics.jsonl up to a step, as a checkpoint has it; None if there are too few."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return hashlib.sha256(b"".join(lines[: step + 1])).hexdigest() if len(lines) > step else None


def outdated(folder: Path, result: HarnessResult) -> str | None:
    """A message if a result is of weights that the run in `folder` does not have, else None."""
    if result.run_key == read_json(folder / "run.json", AGAIN)["run_key"] and result.history == history_of(
        folder, result.step
    ):
        return None
    path = result_path(folder, result.suite, result.step)
    return f"{path} is of weights that this run does not have: it was resumed or exchanged since; {AGAIN}"


def current_results(folder: Path) -> list[HarnessResult]:
    """All results of the run as it is. Raises ValueError for one that is damaged, or of weights it does not have."""
    results = read_results(folder)
    for result in results:
        if (message := outdated(folder, result)) is not None:
            raise ValueError(message)
    return results


def protocols(folder: Path) -> str:
    """Each suite with the protocols of its results, such as `lm_eval_gsm8k=0123456789ab`; "" for none."""
    found: dict[str, set[str]] = {}
    for result in read_results(folder):
        found.setdefault(result.suite, set()).add(result.protocol)
    return " ".join(f"{suite}={'+'.join(sorted(digests))}" for suite, digests in sorted(found.items()))
