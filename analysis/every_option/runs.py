"""One short run per option of the catalogue, beside one of its axis's default option in the same setting."""

from __future__ import annotations

import contextlib
import json
import math
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from grpo_lab import api
from grpo_lab.config.catalogue import axes, plain_options
from grpo_lab.config.folders import conf_folder
from grpo_lab.tracking.metrics import fraction_metric

HERE = Path(__file__).parent
HELDOUT = "eval/heldout/accuracy"
APART = 1e-3  # relative difference of two update norms that is no rounding
# What options of an axis change, where no active fraction counts it.
COUNTS = {
    "schedule": "rollout/staleness",
    "updates": "train/updates",
    "critic": "critic/explained_variance",
    "learner_precision": "mismatch/absolute",
    "sampler_precision": "mismatch/absolute",
}
TRAINED = "{trained}"  # in a setting: the weights at the end of the run of the base settings


@dataclass(frozen=True)
class Settings:
    """The content of settings.yaml: overrides per axis and option, and the reasons for exceptions."""

    base: list[str]
    axes: dict[str, list[str]]
    options: dict[str, list[str]]
    elsewhere: dict[str, list[str]]
    no_op: dict[str, str]
    no_gain: dict[str, str]
    left_out: dict[str, str]

    def places(self, option: str) -> list[list[str]]:
        """The settings in which an option is tried: that of the tests' environment, then another one if it has one."""
        first = self.options.get(option, self.axes.get(axis_of(option), []))
        return [first, *([self.elsewhere[option]] if option in self.elsewhere else [])]


@cache
def settings() -> Settings:
    """The settings in the file beside this one."""
    return Settings(**yaml.safe_load((HERE / "settings.yaml").read_text()))


def options() -> list[str]:
    """Every option of the catalogue, as `axis=name`, without the user's own."""
    return [f"{axis.name}={option.name}" for axis in axes([conf_folder()]) for option in axis.options]


def axis_of(option: str) -> str:
    """The axis of `axis=name`."""
    return option.partition("=")[0]


def is_default(option: str) -> bool:
    """True if the option is its axis's default."""
    return option == f"{axis_of(option)}={plain_options()[axis_of(option)]}"


def words_of(option: str, setting: Sequence[str]) -> list[str]:
    """The overrides of an option's run; of a default option, without the numbers that others of its axis have."""
    axis = axis_of(option)
    chosen = [word for word in setting if not word.startswith(f"{axis}.")] if is_default(option) else [option, *setting]
    replaced = {axis_of(word) for word in chosen}
    return [*(word for word in settings().base if axis_of(word) not in replaced), *chosen]


@dataclass(frozen=True)
class Outcome:
    """What an option's run did beside that of the default option, of the same seed in the same setting.

    `before` and `after` are held-out accuracies, `default_after` the default's; `share` and `beside` are means over
    the steps of the metric `counted`, with the option and with the default, None where it was not logged; `apart` is
    the first step whose updates have another size than the default's; `no_op` says that the run itself named the
    option a no-op.
    """

    setting: list[str]
    seed: int
    before: float
    after: float
    default_after: float
    counted: str
    share: float | None
    beside: float | None
    apart: int | None
    no_op: bool
    seconds: float


def outcome(option: str, setting: Sequence[str], seed: int, run: api.Run, default: api.Run) -> Outcome:
    """What `run` did beside `default`."""
    axis = axis_of(option)
    metric = COUNTS.get(axis, fraction_metric(axis))
    points, plain = run.metrics.set_index("step"), default.metrics.set_index("step")
    heldout, plainly = points[HELDOUT].dropna(), plain[HELDOUT].dropna()
    return Outcome(
        list(setting),
        seed,
        round(float((plainly if axis == "sft" else heldout).iloc[0]), 4),  # fine-tuning is over at step 0
        round(float(heldout.iloc[-1]), 4),
        round(float(plainly.iloc[-1]), 4),
        metric,
        _mean(points, metric),
        _mean(plain, metric),
        first_apart(_norms(points), _norms(plain)),
        axis in _ending(run)["no_ops"],
        round(float(points["budget/device_seconds"].iloc[-1]), 1),
    )


def _ending(run: api.Run) -> dict[str, Any]:
    return json.loads((run.folder / "DONE").read_text())


def _norms(points: pd.DataFrame) -> dict[int, float]:
    found = points["train/update_norm"].dropna()
    return dict(zip(found.index.tolist(), found.tolist()))


def _mean(points: pd.DataFrame, metric: str) -> float | None:
    if metric not in points or points[metric].isna().all():
        return None
    return float(f"{points[metric].mean():.4g}")


def first_apart(one: Mapping[int, float], other: Mapping[int, float]) -> int | None:
    """The first step at which two runs' update norms differ by more than rounding; None if they never do."""
    for step in sorted(one.keys() | other.keys()):
        if step not in one or step not in other or not math.isclose(one[step], other[step], rel_tol=APART):
            return step
    return None


def train(words: Sequence[str], seed: int, runs_dir: Path) -> tuple[str, str]:
    """Train the run of these overrides, or read it where it is finished: its folder, and why it failed if it did."""
    output = runs_dir / "output"
    output.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as entered:
        log = entered.enter_context((output / f"{os.getpid()}.log").open("w"))
        entered.enter_context(contextlib.redirect_stdout(log))
        entered.enter_context(contextlib.redirect_stderr(log))
        print(*words)
        try:
            run = api.train(*words, runs_dir=str(runs_dir), seed=seed)
        except Exception as error:
            traceback.print_exc()
            return "", f"{type(error).__name__}: {error}"
    return str(run.folder), "" if run.status == "done" else f"the run ended {run.status}"
