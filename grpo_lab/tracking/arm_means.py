"""The curves of a sweep's arms: at each step the mean over an arm's runs, for trackers that show a sweep as one run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from grpo_lab.tracking.mlflow_view import DOWNSTREAM, HELDOUT, REWARD, arm_label, plain_name
from grpo_lab.tracking.names import marked
from grpo_lab.tracking.run_reader import read_steps
from grpo_lab.tracking.sweep_record import SweepRecord

# What precedes the slash is a section of MLflow's charts.
MEASURES = {"training reward": REWARD, "held-out accuracy": HELDOUT, "downstream accuracy": DOWNSTREAM}


class Point(NamedTuple):
    """A mean at a step; `wall` is the unix time in ms at which the last of the runs logged it."""

    step: int
    wall: int
    value: float


def arm_means(record: SweepRecord, runs_dir: Path) -> dict[str, list[Point]]:
    """`<measure>/<arm>` -> the mean over all recorded runs of the arm, at the steps that every one of them logged.

    So a curve ends where the first of its runs ended, and an arm with a run that has not begun has none.
    """
    logged = {entry.folder: _logged(Path(runs_dir) / entry.folder) for entry in record.runs}
    runs: dict[str, list[str]] = {}
    for entry in record.runs:
        runs.setdefault(arm_label(entry.arm, entry.level), []).append(entry.folder)
    means = {}
    for arm, name in _names(list(runs)).items():
        for measure, metric in MEASURES.items():
            series = [logged[folder].get(metric, {}) for folder in runs[arm]]
            shared = sorted(set.intersection(*(set(one) for one in series)))
            if shared:
                means[f"{measure}/{name}"] = [_mean(step, [one[step] for one in series]) for step in shared]
    return means


def _logged(folder: Path) -> dict[str, dict[int, tuple[int, float]]]:
    """Metric -> step -> when it was logged and its value, where that is finite."""
    found: dict[str, dict[int, tuple[int, float]]] = {}
    for record in read_steps(folder):
        for metric in MEASURES.values():
            if math.isfinite(value := record.metrics.get(metric, math.nan)):
                found.setdefault(metric, {})[record.step] = (record.wall, float(value))
    return found


def _mean(step: int, values: list[tuple[int, float]]) -> Point:
    return Point(step, max(wall for wall, _ in values), math.fsum(value for _, value in values) / len(values))


def _names(arms: list[str]) -> Mapping[str, str]:
    """Arm -> its name within a metric of MLflow, which takes no + = or comma.

    Arms that are values of one key, as `recipe=plain` and `recipe=gspo`, are called by the value.
    """
    keys = {arm.partition("=")[0] if re.fullmatch(r"[\w./@]+=[^=,]+", arm) else arm for arm in arms}
    written = {arm: _written(arm.partition("=")[2] if len(keys) == 1 < len(arms) else arm) for arm in arms}
    times = Counter(written.values())
    return {arm: name if times[name] == 1 else marked(arm, name) for arm, name in written.items()}


def _written(arm: str) -> str:
    words = re.sub(r"\s*\+\s*", " plus ", arm.replace("=", ":").replace(",", " ").replace("/", "."))
    return plain_name(" ".join(words.split()))
