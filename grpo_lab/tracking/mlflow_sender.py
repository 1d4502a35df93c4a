"""Sends one run folder to its MLflow run, continuing after the last step sent.

Only the folder is read: run.json describes the run, metrics.jsonl and timing.jsonl hold what it logged, harness/ what
harnesses measured, system.jsonl how busy the machine was, and DONE or error.txt how it ended. mirror.json, written
here, holds the last step sent. A step is sent once, with the time at which it was first logged. If mirror.json is lost,
steps are sent again, which adds nothing: MLflow keeps one of two equal points. (On a machine that does not reproduce
bits, a step repeated after a resume keeps the values of its first attempt in MLflow, and of its last in the folder.)
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.tracking.checksums import AFRESH, AGAIN, MANIFEST, read_json
from grpo_lab.tracking.files import locked, write_json
from grpo_lab.tracking.final_metrics import final_metrics
from grpo_lab.tracking.harness_results import outdated, protocols, read_results
from grpo_lab.tracking.mlflow_params import parameters
from grpo_lab.tracking.mlflow_parent import ENTRIES_PER_BATCH, POINTS_PER_BATCH, TAG_LENGTH, chunks, parent_of
from grpo_lab.tracking.mlflow_store import check_uri, first_line, load_mlflow, prepare_store
from grpo_lab.tracking.mlflow_view import membership
from grpo_lab.tracking.passwords import masked, without_mask
from grpo_lab.tracking.renames import with_done_fields
from grpo_lab.tracking.run_reader import StepReader, StepRecord, was_interrupted
from grpo_lab.tracking.sweep_record import FILE as SWEEP
from grpo_lab.tracking.sweep_record import read_sweep
from grpo_lab.tracking.system_metrics import SYSTEM, read_samples

HARNESS_TAG = "harness"  # how harnesses evaluated the run
ARTIFACT_BYTES = 5_000_000
ARTIFACTS = (
    "run.json", "base.json", "config.yaml", "explanation.txt", "first_prompt.txt", "environment.json", "source.diff",
    "DONE", "error.txt",
)  # fmt: skip

_NOT_REGISTERED = ("state.pt", "shards", MANIFEST)  # of a checkpoint: what only a run that goes on reads

logger = logging.getLogger("grpo_lab.tracking")


@dataclass
class _Cursor:
    """The content of mirror.json: which MLflow run copies this folder, and how much was sent to it."""

    uri: str
    experiment: str
    run_key: str
    mlflow_run_id: str | None = None
    last_step: int = -1
    nonfinite: str = ""
    artifacts: dict[str, str] = field(default_factory=dict)  # name -> hash of the file as sent
    harness: dict[str, int] = field(default_factory=dict)  # suite and step -> the time of the result that was sent
    system_bytes: int = 0  # of system.jsonl
    final: bool = False  # whether the values at the run's end were sent
    registered: str = ""  # the registered model and its version


class FolderSender(ABC):
    """The sender of one run folder to one tracker. Every method may raise."""

    @abstractmethod
    def push(self, live: bool, patience: float, give_up: Callable[[], bool]) -> int:
        """Send new steps and the run's status; return the number of points sent.

        `live` is whether the run is still running. Waits at most `patience` seconds for another process that
        copies the same folder, then raises RunFolderBusyError. Stops between batches once `give_up()` is true.
        """


class Sender(FolderSender):
    """Sends one folder to its MLflow run, continuing after the last step sent."""

    FILE: ClassVar[str] = "mirror.json"

    def __init__(self, folder: Path, uri: str | None = None) -> None:
        self.folder = folder
        path = folder / "run.json"
        if not path.exists():
            raise ValueError(f"{folder} is no run folder: it has no run.json")
        self.run = read_json(path, AFRESH)
        tracking = self.run["tracking"] or {"uri": None, "experiment": "grpo_lab"}
        self.experiment = tracking["experiment"]
        if (place := uri or tracking["uri"]) is None:
            raise ValueError(f"{folder} was run with tracking=none: say where to export it with a uri")
        self.uri = without_mask(place)
        check_uri(self.uri)
        self._client: Any = None
        self._reader = StepReader(folder)
        self._waiting: list[StepRecord] = []
        self._cursor = self._new_cursor(None)

    def push(self, live: bool, patience: float, give_up: Callable[[], bool]) -> int:
        """See FolderSender."""
        with locked(self.folder / ".mirror.lock", patience):
            self._load_cursor()
            if self._client is None:
                self._attach(live)
            fresh = self._reader.poll()
            if fresh and self._waiting and fresh[0].step <= self._waiting[-1].step:
                self._waiting.clear()  # the run was rewound, so all steps were read again
            self._waiting += fresh
            sent = 0
            for steps in _batches(r for r in self._waiting if r.step > self._cursor.last_step):
                if give_up():
                    return sent
                sent += self._send(steps)
            self._waiting.clear()
            sent += self._send_harness() + self._send_system() + self._send_final()
            self._send_artifacts()
            self._register()
            self._set_status(live)
            return sent

    @property
    def run_id(self) -> str | None:
        return self._cursor.mlflow_run_id

    def _new_cursor(self, mlflow_run_id: str | None) -> _Cursor:
        return _Cursor(masked(self.uri), self.experiment, self.run["run_key"], mlflow_run_id)

    def _load_cursor(self) -> None:
        path = self.folder / self.FILE
        if path.exists():
            stored = read_json(path, "remove it, and sync again")
            fresh = asdict(self._new_cursor(None))
            if all(stored.get(name) == fresh[name] for name in ("uri", "experiment", "run_key")):
                self._cursor = _Cursor(**stored)

    def _save_cursor(self) -> None:
        write_json(self.folder / self.FILE, asdict(self._cursor))

    def _attach(self, live: bool) -> None:
        """Find this folder's run by its key, or create it; then send params and tags."""
        experiment_id = prepare_store(self.uri, self.experiment)
        client = load_mlflow().MlflowClient(tracking_uri=self.uri)
        found = self._find(client, experiment_id)
        if found is None:
            started = (self.folder / "run.json").stat().st_mtime_ns // 1_000_000
            found = client.create_run(
                experiment_id,
                start_time=started,
                run_name=self.run["name"],
                tags={"run_key": self.run["run_key"]},
            )
            self._cursor = self._new_cursor(found.info.run_id)
        elif found.info.run_id != self._cursor.mlflow_run_id:
            self._cursor = self._new_cursor(found.info.run_id)
        elif found.info.lifecycle_stage != "active":
            raise ValueError(
                f"run {found.info.run_id} was deleted in MLflow: restore it with `mlflow runs restore "
                f"--run-id {found.info.run_id}`, or delete {self.folder / self.FILE} to export it anew"
            )
        self._save_cursor()
        self._describe(client, found, self._parent(client, experiment_id))
        if live and found.info.status != "RUNNING":
            client.update_run(found.info.run_id, status="RUNNING")
        self._client = client

    def _find(self, client: Any, experiment_id: str) -> Any:
        if self._cursor.mlflow_run_id is not None:
            try:
                return client.get_run(self._cursor.mlflow_run_id)
            except load_mlflow().MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":  # which means that the store is a new one
                    raise
        key = self.run["run_key"]
        runs = client.search_runs([experiment_id], f"tags.run_key = '{key}'", max_results=1)
        return runs[0] if runs else None

    def _parent(self, client: Any, experiment_id: str) -> str | None:
        """The id of this run's sweep in MLflow; None for a run on its own, or if the sweep's folder is missing."""
        place = self._sweep_folder()
        return None if place is None else parent_of(place, client, self.uri, experiment_id)

    def _membership(self) -> dict[str, str]:
        """The tag that puts this run into its sweep's page; a sweep that reuses the run adds its own."""
        place = self._sweep_folder()
        if place is None:
            return {}
        return membership(read_sweep(place), os.path.relpath(self.folder.resolve(), place.parent.parent))

    def _sweep_folder(self) -> Path | None:
        place = self.run.get("sweep_folder")
        if place is None or not (self.folder / place / SWEEP).exists():
            return None
        return (self.folder / place).resolve()

    def _describe(self, client: Any, found: Any, parent: str | None) -> None:
        entities = load_mlflow().entities
        run = self.run
        tags = {
            **run["tags"],  # first, as the UI lists tags in this order where runs are grouped
            **self._membership(),
            "recipe": run["recipe"],
            "seed": run["seed"],
            **{f"axis.{axis}": option for axis, option in run["choices"].items()},
            "commit": run["commit"],
            "dirty": None if run["dirty"] is None else str(run["dirty"]).lower(),
            "folder": self.folder.resolve(),
            "mlflow.runName": run["name"],
            "mlflow.source.name": "grpo_lab",
            "mlflow.source.type": "LOCAL",
            "mlflow.source.git.commit": run["commit"],
            "mlflow.parentRunId": parent,
            "mlflow.note.content": self._note(),
        }
        pairs = [entities.RunTag(name, str(value)[:TAG_LENGTH]) for name, value in tags.items() if value is not None]
        for chunk in chunks(pairs, ENTRIES_PER_BATCH):
            client.log_batch(found.info.run_id, tags=chunk, synchronous=True)
        # A parameter cannot change in MLflow: values that a resumed run changed are in its config.yaml.
        # Options are sent as parameters too, because MLflow's page that compares runs plots only parameters.
        params = [entities.Param(key, value) for key, value in parameters(run).items() if key not in found.data.params]
        for chunk in chunks(params, ENTRIES_PER_BATCH):
            client.log_batch(found.info.run_id, params=chunk, synchronous=True)

        if run.get("data"):
            client.log_inputs(found.info.run_id, datasets=_inputs(run))

    def _note(self) -> str:
        """The run's description in MLflow: the loss it optimises, then its folder."""
        run, path = self.run, self.folder / "explanation.txt"
        where = (
            f"Recipe {run['recipe']}, seed {run['seed']}. A copy of the run folder `{self.folder.resolve()}`, which "
            "holds what MLflow does not: tables, checkpoints, diff."
        )
        if not path.exists():
            return where
        return f"```\n{path.read_text()[: TAG_LENGTH - len(where) - 20]}```\n\n{where}"

    def _send(self, steps: list[StepRecord]) -> int:
        """Send whole steps, at most 1000 points per call, and save the last step sent."""
        entities = load_mlflow().entities
        metrics = [
            entities.Metric(name, value, record.wall, record.step)
            for record in steps
            for name, value in points_of(record).items()
            if math.isfinite(value)
        ]
        for chunk in chunks(metrics, POINTS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=chunk, synchronous=True)
        self._note_nonfinite(steps)
        self._cursor.last_step = steps[-1].step
        self._save_cursor()
        return len(metrics)

    def _send_harness(self) -> int:
        """Send what harnesses measured since, whenever that was; return the number of points."""
        entities, sent = load_mlflow().entities, 0
        for result in read_results(self.folder):
            place = f"{result.suite}/{result.step}"
            if self._cursor.harness.get(place) == result.at or outdated(self.folder, result):
                continue
            points = [entities.Metric(name, value, result.at, result.step) for name, value in result.logged().items()]
            self._client.log_batch(self.run_id, metrics=points, synchronous=True)
            self._client.set_tag(self.run_id, HARNESS_TAG, protocols(self.folder)[:TAG_LENGTH], synchronous=True)
            self._cursor.harness[place] = result.at
            self._save_cursor()
            sent += len(points)
        return sent

    def _send_system(self) -> int:
        """Send new samples of the machine, each under its number as the step; return the number of points."""
        samples = read_samples(self.folder, self._cursor.system_bytes)
        entities = load_mlflow().entities
        points = [
            entities.Metric(f"{SYSTEM}{name}", value, sample.wall, sample.number)
            for sample in samples
            for name, value in sample.values.items()
        ]
        for chunk in chunks(points, POINTS_PER_BATCH):
            self._client.log_batch(self.run_id, metrics=chunk, synchronous=True)
        if samples:
            self._cursor.system_bytes = samples[-1].end
            self._save_cursor()
        return len(points)

    def _send_final(self) -> int:
        """Send a finished run's values at its full budget, once; return their number."""
        if self._cursor.final or not (self.folder / "DONE").exists():
            return 0
        records = StepReader(self.folder).poll()
        entities = load_mlflow().entities
        values = final_metrics(records, self.run)
        if values:
            points = [entities.Metric(*item, records[-1].wall, records[-1].step) for item in values.items()]
            self._client.log_batch(self.run_id, metrics=points, synchronous=True)
        self._cursor.final = True
        self._save_cursor()
        return len(values)

    def _register(self) -> None:
        """Make a finished run's last checkpoint a version of a registered model, where the run asks for it, once.

        The files that transformers loads are copied to MLflow, without the optimiser's state.
        """
        name = (self.run["tracking"] or {}).get("register")
        if not name or self._cursor.registered or not (self.folder / "DONE").exists():
            return
        checkpoints = sorted(self.folder.glob("checkpoints/step=*"))
        if not checkpoints:
            raise ValueError(f"{self.folder} has no checkpoint to register as {name}: restore it from a copy")
        errors = load_mlflow().MlflowException
        for path in sorted(checkpoints[-1].iterdir()):
            if path.name not in _NOT_REGISTERED:
                self._client.log_artifact(self.run_id, str(path), "model")
        try:
            self._client.create_registered_model(name)
        except errors as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{self._client.get_run(self.run_id).info.artifact_uri}/model"
        version = self._client.create_model_version(name, source, self.run_id, tags={"step": checkpoints[-1].name[5:]})
        self._cursor.registered = f"{name}/{version.version}"
        self._save_cursor()

    def _note_nonfinite(self, steps: list[StepRecord]) -> None:
        """Record the first value that is not finite in a tag; MLflow would store infinity as 1.8e308."""
        lost = (
            f"step {record.step}: {name} = {value}"
            for record in steps
            for name, value in points_of(record).items()
            if not math.isfinite(value)
        )
        if not self._cursor.nonfinite and (first := next(lost, "")):
            self._client.set_tag(self.run_id, "nonfinite", first, synchronous=True)
            self._cursor.nonfinite = first

    def _send_artifacts(self) -> None:
        """Copy small files that changed since they were sent; it is no error if the store refuses files."""
        for name in ARTIFACTS:
            path = self.folder / name
            if not path.exists() or path.stat().st_size > ARTIFACT_BYTES:
                continue
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            if self._cursor.artifacts.get(name) == digest:
                continue
            try:
                self._client.log_artifact(self.run_id, str(path))
            except Exception as error:
                logger.info("%s was not copied to MLflow: %s", path, first_line(error))
                return
            self._cursor.artifacts[name] = digest
            self._save_cursor()

    def _set_status(self, live: bool) -> None:
        status, ended = ending(self.folder, live)
        if status == "RUNNING":
            return
        if status == "FINISHED":
            no_ops = with_done_fields(read_json(self.folder / "DONE", AGAIN)).get("no_ops", [])
            self._client.set_tag(self.run_id, "no_ops", ", ".join(no_ops) or "nothing", synchronous=True)
        info = self._client.get_run(self.run_id).info
        if (info.status, info.end_time) != (status, ended):
            self._client.set_terminated(self.run_id, status, ended)


def _inputs(run: Mapping[str, Any]) -> list[Any]:
    """The splits of a run's data as MLflow's inputs: name, fingerprint and where they came from."""
    entities, config = load_mlflow().entities, run["config"]
    source = json.dumps({key: config[key] for key in sorted(config) if key.startswith("task.")})
    name = str(config.get("task.path") or config.get("task.family") or run["choices"].get("task", "task"))
    return [
        entities.DatasetInput(
            entities.Dataset(name=f"{name[-400:]}:{split}", digest=digest, source_type="grpo_lab", source=source),
            tags=[entities.InputTag("mlflow.data.context", split)],
        )
        for split, digest in run["data"].items()
    ]


def points_of(record: StepRecord) -> dict[str, float | int]:
    """Everything logged at a step under its name in a tracker; times outside of time/ and budget/ go under time/."""
    timing = {
        name if name.startswith(("time/", "budget/")) else f"time/{name}": value
        for name, value in record.timing.items()
    }
    return {**record.metrics, **timing}


def _batches(records: Iterable[StepRecord]) -> Iterator[list[StepRecord]]:
    """Batches of whole steps, each of at most 1000 points unless a single step has more."""
    batch: list[StepRecord] = []
    points = 0
    for record in records:
        size = len(record.metrics) + len(record.timing)
        if batch and points + size > POINTS_PER_BATCH:
            yield batch
            batch, points = [], 0
        batch.append(record)
        points += size
    if batch:
        yield batch


def ending(folder: Path, live: bool) -> tuple[str, int]:
    """The run's status in MLflow's words, and the unix time in ms at which it ended (0: not ended)."""
    for name, status in (("DONE", "FINISHED"), ("error.txt", "FAILED")):
        if (folder / name).exists():
            status = "KILLED" if name == "error.txt" and was_interrupted(folder) else status
            return status, (folder / name).stat().st_mtime_ns // 1_000_000
    if live:
        return "RUNNING", 0
    last = next(path for path in (folder / "timing.jsonl", folder / "run.json") if path.exists())
    return "KILLED", last.stat().st_mtime_ns // 1_000_000
