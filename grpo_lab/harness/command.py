"""`grpo-lab evaluate`: tasks of another evaluation harness on the checkpoints of runs, and results into their folders.

The harness runs in a process of its own (`worker.py`), which may be of another Python. So it changes no state here, and
its packages need not agree with ours.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import transformers
from omegaconf import OmegaConf

from grpo_lab import fine_tuning
from grpo_lab.config.hydra_setup import compose_config
from grpo_lab.policy.model_folder import fingerprint
from grpo_lab.run import checkpoint
from grpo_lab.tasks.hub import find_model
from grpo_lab.tracking.checksums import AFRESH, check_manifest, damage_of, read_checksummed, read_json, read_yaml
from grpo_lab.tracking.files import write_atomically
from grpo_lab.tracking.harness_results import (
    HarnessResult,
    history_of,
    outdated,
    read_result,
    result_path,
    suite_of,
    write_result,
)
from grpo_lab.tracking.metrics import HARNESSES
from grpo_lab.tracking.mlflow_exporter import sync
from grpo_lab.tracking.run_reader import run_status
from grpo_lab.tracking.sweep_record import FILE as SWEEP
from grpo_lab.tracking.sweep_record import read_sweep

BASE = 0  # the step before the first


@dataclass(frozen=True)
class Settings:
    """Settings that decide a result beside the weights and the task; None is the default of the task or harness."""

    metric: str | None
    limit: int | None  # questions of each task
    num_fewshot: int | None
    apply_chat_template: bool
    dtype: str  # of the weights

    def differences(self, before: Mapping[str, Any]) -> str:
        """In words, from the settings of a result; "" for none."""
        now = asdict(self)
        return ", ".join(
            f"{name}: {before.get(name)} there, {now[name]} now" for name in now if before.get(name) != now[name]
        )


@dataclass(frozen=True)
class HarnessPlan:
    """The evaluations to run. `tasks` maps a suite to the task as the harness calls it."""

    harness: str
    tasks: Mapping[str, str]
    steps: Sequence[str]  # "all", "last", "best" or numbers
    base: bool
    settings: Settings
    include_path: str | None
    batch_size: str
    device: str | None
    python: str
    again: bool
    command: Sequence[str]

    def __post_init__(self) -> None:
        if self.harness == "inspect":
            for name, value in (("--num-fewshot", self.settings.num_fewshot), ("--include-path", self.include_path)):
                if value is not None:
                    raise ValueError(
                        f"{name} is an option of lm_eval only: an Inspect task says in its file what it asks"
                    )
            if not self.batch_size.isdigit():
                raise ValueError(f"--batch-size {self.batch_size}: give Inspect a number of questions")
        if self.settings.limit is not None and self.settings.limit < 1:
            raise ValueError(f"--limit {self.settings.limit}: ask at least one question")
        if self.include_path is not None and not Path(self.include_path).is_dir():
            raise ValueError(
                f"there is no folder {self.include_path} of lm_eval tasks: give --include-path another one"
            )
        for step in self.steps:
            if step not in ("all", "last", "best") and not step.isdigit():
                raise ValueError(f"--steps {step}: say all, last, best, or numbers of steps")


@dataclass(frozen=True)
class EvaluatedWeights:
    """The weights of a run after a step: a model folder, its fingerprint and the history that led there."""

    run: Path
    run_key: str
    step: int
    folder: Path
    fingerprint: str
    history: str


def suites_of(harness: str, tasks: Sequence[str], name: str | None) -> dict[str, str]:
    """Suite -> task as the harness calls it. Raises ValueError where a name cannot tell them apart."""
    if name is not None and len(tasks) != 1:
        raise ValueError(f"--name {name} names one task, and --tasks has {len(tasks)}: evaluate them one by one")
    found: dict[str, str] = {}
    for task in tasks:
        if harness == "inspect" and task.endswith(".py"):
            raise ValueError(f"--tasks {task}: say which of its tasks, {task}@NAME")
        suite = suite_of(harness, name or re.split(r"[@/]", task)[-1])
        if suite in found:
            raise ValueError(f"{found[suite]} and {task} would both be called {suite}: evaluate one with --name")
        found[suite] = task
    if not found:
        raise ValueError("--tasks names no task: give some, separated by commas")
    return found


def runs_of(place: Path) -> list[Path]:
    """The run in a folder; otherwise every finished run below, or of the sweep that is recorded there.

    Raises ValueError where there is none.
    """
    if (place / "run.json").is_file():
        return [place]
    if not place.is_dir():
        raise ValueError(
            f"there is no folder {place}: give a run's folder, such as runs/plain/seed=0, or one of several"
        )
    if (place / SWEEP).is_file():
        below = [place.parent.parent / entry.folder for entry in read_sweep(place).runs]
    else:
        # MLflow keeps a copy of run.json among a run's artifacts; only a run's own folder has its metrics.
        below = sorted(path.parent for path in place.rglob("run.json") if (path.parent / "metrics.jsonl").exists())
    finished = [run for run in dict.fromkeys(below) if run_status(run) == "done"]
    if not finished:
        raise ValueError(f"{place} holds no finished run, of {len(below)} runs: give the folder of one, or finish some")
    return finished


def weights_of(run: Path, steps: Sequence[str], base: bool) -> list[EvaluatedWeights]:
    """The weights of these steps, after checking that they are what the run saved. Raises ValueError with a remedy."""
    run_key = read_json(run / "run.json", AFRESH)["run_key"]
    best, saved = (
        {checkpoint.step_of(place): place for place in checkpoint.complete(run / name)}
        for name in (checkpoint.BEST, "checkpoints")
    )
    both = best | saved
    found: dict[int, EvaluatedWeights] = {}
    errors: dict[int, str] = {}

    def add(step: int) -> bool:
        place = _base(run) if step == BASE and step not in both else both.get(step)
        try:
            if place is None:
                there = f"it has {', '.join(map(str, sorted(both)))}" if both else "it has none"
                raise ValueError(
                    f"{run} has no checkpoint of step {step}; {there}: choose one, or keep more with keep_checkpoints"
                )
            history = history_of(run, step)
            if history is None or (
                place == both.get(step) and check_manifest(place, run_key)["log"]["sha256"] != history
            ):
                raise ValueError(f"{place} does not belong to {run / 'metrics.jsonl'} as it is: {AFRESH}")
            found[step] = EvaluatedWeights(
                run, run_key, step, find_model(str(place), "", "RUN"), fingerprint(place), history
            )
        except ValueError as error:
            errors[step] = str(error)
        return step in found

    for step in [str(BASE)] * base + list(steps):
        if step == "last":  # an older one where the last was damaged, as where a run resumes
            if not any(add(one) for one in reversed(saved)):
                reasons = "; ".join(errors[one] for one in saved) or "it saved none"
                raise ValueError(
                    f"{run} has no whole checkpoint ({reasons}): evaluate its base with --steps 0, or train it"
                )
            continue
        if step == "best":
            if not best:
                raise ValueError(
                    f"{run} kept no best weights: none of its evaluations was above the initial model's (--steps 0), "
                    "or checkpoint.best was null"
                )
            step = str(max(best))
        for one in saved if step == "all" else [int(step)]:
            if one not in found and not add(one):
                raise ValueError(errors[one])
    return [found[step] for step in sorted(found)]


def _base(run: Path) -> Path:
    """The model that RL began with: fine-tuned where the run did that, else the base that its configuration names.

    Raises ValueError if it is no longer the one that the run began with.
    """
    own = run / "sft"
    if own.is_dir():
        files = read_checksummed(own / fine_tuning.FILE, AFRESH)["files"]
        if damaged := [damage for name, digest in files.items() if (damage := damage_of(own / name, digest))]:
            raise ValueError(f"{', '.join(damaged)}; {AFRESH}")
        return own
    described, config = read_json(run / "run.json", AFRESH), read_yaml(run / "config.yaml", AFRESH)
    option = described["choices"]["model"]
    composed = compose_config([f"world={described['choices']['world']}", f"model={option}"])
    model: Any = OmegaConf.to_object(OmegaConf.merge(composed.model, config.model))
    folder = model.resolve()
    began, now = read_json(run / "base.json", AFRESH)["fingerprint"], fingerprint(folder)
    if began != now:
        raise ValueError(f"{run} began with the weights {began}, and {folder} has {now} now: give back what it had")
    return folder


def evaluate(place: Path, plan: HarnessPlan) -> Iterator[tuple[Path, HarnessResult, bool]]:
    """Run, result, and whether it was measured now, for all that is planned; measured ones are written as they come.

    Raises ValueError with a remedy, before a model loads where the harness allows it.
    """
    missing: list[tuple[EvaluatedWeights, str]] = []
    there: list[tuple[Path, HarnessResult]] = []
    for run in runs_of(place):
        for weights in weights_of(run, plan.steps, plan.base):
            for suite in plan.tasks:
                if (before := _before(weights, suite, plan)) is None:
                    missing.append((weights, suite))
                else:
                    there.append((run, before))
    yield from ((run, result, False) for run, result in there)
    if not missing:
        return
    folders = {str(weights.folder): weights for weights, _ in missing}
    if plan.settings.apply_chat_template:
        for folder in folders:
            if transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False).chat_template is None:
                raise ValueError(f"the tokenizer of {folder} has no chat template: leave --apply-chat-template out")
    # Weights that are the same, such as one base of many runs, are asked once.
    one_of: dict[str, str] = {}
    for folder, weights in folders.items():
        one_of.setdefault(weights.fingerprint, folder)
    jobs = list(dict.fromkeys((one_of[weights.fingerprint], plan.tasks[suite]) for weights, suite in missing))
    for reply in _replies(jobs, plan):
        same = folders[reply.pop("model")].fingerprint
        table, task = pd.DataFrame(reply.pop("answers")), reply["task"]
        for weights, suite in missing:
            if weights.fingerprint != same or plan.tasks[suite] != task:
                continue
            result = _result(weights, suite, reply, plan)
            path = result_path(weights.run, suite, weights.step)
            write_atomically(path.with_suffix(".parquet"), partial(table.to_parquet, index=False))
            write_result(weights.run, result)
            yield weights.run, result, True


def _before(weights: EvaluatedWeights, suite: str, plan: HarnessPlan) -> HarnessResult | None:
    """The result of the same weights that may stay; None for none.

    Raises ValueError where the suite has a result of any step with other settings, which would not be comparable.
    """
    own = result_path(weights.run, suite, weights.step)
    for path in sorted(own.parent.glob("step=*.json")):
        if plan.again and path == own:
            continue
        other = read_result(path)
        differences = plan.settings.differences(other.settings)
        if Path(other.task).name != Path(plan.tasks[suite]).name:
            differences = f"task: {other.task} there, {plan.tasks[suite]} now"
        if differences:
            raise ValueError(
                f"{path} has this suite with other settings ({differences}): choose another --name, or move "
                f"{path.parent} away"
            )
    if plan.again or not own.exists():
        return None
    before = read_result(own)
    same = before.weights == weights.fingerprint and outdated(weights.run, before) is None
    return before if same else None


def _replies(jobs: Sequence[tuple[str, str]], plan: HarnessPlan) -> Iterator[dict[str, Any]]:
    """The worker's results, one reply per model folder and task. Raises ValueError with its message."""
    models = list(dict.fromkeys(folder for folder, _ in jobs))
    request = asdict(plan.settings) | {
        "jobs": {folder: [task for one, task in jobs if one == folder] for folder in models},
        "tasks": list(dict.fromkeys(task for _, task in jobs)),
        "include_path": plan.include_path,
        "batch_size": plan.batch_size,
        "device": plan.device,
    }
    worker = Path(__file__).with_name("worker.py")
    try:
        process = subprocess.Popen(
            [plan.python, str(worker), plan.harness], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONSAFEPATH": "1"},  # this folder is no place to import from
        )  # fmt: skip
    except OSError as error:
        raise ValueError(f"--python {plan.python} cannot be started ({error.strerror}): name a Python") from error
    try:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        with contextlib.suppress(BrokenPipeError):  # its status says that it is gone
            json.dump(request, process.stdin)
            process.stdin.close()
        for line in process.stdout:
            reply = json.loads(line)
            if "error" in reply:
                raise ValueError(reply["error"])
            yield reply
        if process.wait() != 0:
            raise ValueError(
                f"{HARNESSES[plan.harness]} failed (status {process.returncode}), see its error above. Results so "
                "far are kept; re-run the same command to continue"
            )
    finally:
        process.kill()
        process.wait()


def _result(weights: EvaluatedWeights, suite: str, reply: Mapping[str, Any], plan: HarnessPlan) -> HarnessResult:
    """The result of these weights. Raises ValueError where its main metric is no share, so no accuracy."""
    value = reply["metrics"][reply["metric"]]["value"]
    if not (reply["is_share"] and 0 <= value <= 1):
        known = "; ".join(reply["metrics"])
        raise ValueError(
            f"{reply['metric']} of {reply['task']} is {value}, no share of answers: choose --metric of {known}"
        )
    return HarnessResult(
        suite=suite,
        harness=plan.harness,
        step=weights.step,
        weights=weights.fingerprint,
        run_key=weights.run_key,
        history=weights.history,
        settings=asdict(plan.settings),
        command=list(plan.command),
        at=time.time_ns() // 1_000_000,
        **{name: part for name, part in reply.items() if name != "is_share"},
    )


def export(run: Path) -> str | None:
    """Send a run's results to the MLflow store it has; a message if that is not possible, else None."""
    if read_json(run / "run.json", AFRESH)["tracking"] is None:
        return None
    try:
        sync(run)
    except (OSError, ValueError, RuntimeError) as error:
        return f"MLflow lacks the results of {run}, and `grpo-lab sync {run}` sends them: {error}"
    return None
