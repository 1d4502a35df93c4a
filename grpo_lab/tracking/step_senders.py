"""Send one run folder, step by step, to a tracker other than MLflow, continuing after the last step sent.

Only the folder is read. `mirror-<tracker>.json`, written here, holds the last step sent, so a run that was resumed, or
sent by hand, has no step twice. What the packages offer decides what follows from a kill between sending and saving:
TensorBoard's reader drops the older of two, trackio takes a step once, and W&B refuses a step that lies behind.

Packages take seconds to import, so they are imported where they are used.
"""

from __future__ import annotations

import math
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.files import locked, write_json
from grpo_lab.tracking.final_metrics import final_metrics
from grpo_lab.tracking.mlflow_sender import FolderSender, ending, points_of
from grpo_lab.tracking.run_reader import StepReader
from grpo_lab.tracking.system_metrics import SYSTEM, Sample, read_samples

Points = Mapping[str, float | int]


class StepSender(FolderSender):
    """Sends one folder to one place, step by step."""

    TRACKER: ClassVar[str]

    def __init__(self, folder: Path, place: str) -> None:
        self.folder, self.place = Path(folder), place
        path = self.folder / "run.json"
        if not path.exists():
            raise ValueError(f"{folder} is no run folder: it has no run.json")
        self.run = read_json(path, AFRESH)
        self._reader = StepReader(self.folder)
        self._opened = False

    def push(self, live: bool, patience: float, give_up: Callable[[], bool]) -> int:
        """See FolderSender. At a finished run's end its final values follow."""
        with locked(self.folder / f".mirror-{self.TRACKER}.lock", patience):
            cursor, sent = self._load_cursor(), 0
            try:
                records = [record for record in self._reader.poll() if record.step > cursor["last_step"]]
                samples = read_samples(self.folder, cursor["system_bytes"])
                final = {} if cursor["final"] or live else self._final()
                if records or final:
                    self._open_once(cursor["last_step"])
                for record in records:
                    if give_up():
                        raise InterruptedError(f"stopped before step {record.step}; the rest is sent later")
                    machine = [sample for sample in samples if sample.wall <= record.wall]
                    samples = samples[len(machine) :]
                    points = _finite(points_of(record)) | _newest(machine)
                    self._write(record.step, record.wall, points)
                    cursor["last_step"], cursor["wall"] = record.step, record.wall
                    cursor["system_bytes"] = machine[-1].end if machine else cursor["system_bytes"]
                    sent += len(points)
                if final:
                    self._write_final(cursor["last_step"], cursor["wall"], final)
                    cursor["final"] = True
                    sent += len(final)
            except BaseException:
                self._reader = StepReader(self.folder)  # what was read and not sent is read again
                raise
            finally:
                if self._opened:
                    self._flush()
                self._save_cursor(cursor)
            if not live:
                self._close(ending(self.folder, live)[0])
            return sent

    def _final(self) -> dict[str, float]:
        """A finished run's values at its full budget; {} of one that is not done."""
        if not (self.folder / "DONE").exists():
            return {}
        return final_metrics(StepReader(self.folder).poll(), self.run)

    def _open_once(self, last_step: int) -> None:
        if not self._opened:
            self._open(last_step)
            self._opened = True

    def _load_cursor(self) -> dict[str, Any]:
        fresh = {"run_key": self.run["run_key"], "place": self.place}
        path = self.folder / f"mirror-{self.TRACKER}.json"
        stored = read_json(path, "remove it, and sync again") if path.exists() else {}
        if fresh.items() <= stored.items():
            return stored
        return {**fresh, "last_step": -1, "wall": 0, "system_bytes": 0, "final": False}

    def _save_cursor(self, cursor: Mapping[str, Any]) -> None:
        write_json(self.folder / f"mirror-{self.TRACKER}.json", dict(cursor))

    def _close(self, status: str) -> None:
        if self._opened:
            self._end(status)
            self._opened = False

    @property
    def _path(self) -> str:
        """The run's path below the folder of runs, which names it where nothing else does."""
        runs = Path(str(self.run["config"].get("runs_dir", ""))).expanduser().resolve()
        here = self.folder.resolve()
        return str(here.relative_to(runs)) if here.is_relative_to(runs) else "/".join(here.parts[-2:])

    @abstractmethod
    def _open(self, last_step: int) -> None:
        """Begin to send what follows `last_step` (-1: everything)."""

    @abstractmethod
    def _write(self, step: int, wall: int, points: Points) -> None:
        """Send one step; `wall` is the unix time in ms at which it was first logged."""

    @abstractmethod
    def _write_final(self, step: int, wall: int, final: Points) -> None:
        """Send a finished run's values at its full budget."""

    @abstractmethod
    def _flush(self) -> None:
        """Hand over what was sent so far, after which the cursor is saved."""

    @abstractmethod
    def _end(self, status: str) -> None:
        """End with the run's status in MLflow's words."""


def _finite(points: Points) -> dict[str, float | int]:
    """The finite values, which trackers can draw; metrics.jsonl keeps the others."""
    return {name: value for name, value in points.items() if math.isfinite(value)}


def _newest(samples: Sequence[Sample]) -> dict[str, float]:
    """The last of some samples of the machine, under its names in a tracker; {} of none."""
    return {f"{SYSTEM}{name}": value for name, value in samples[-1].values.items()} if samples else {}


class TensorBoardSender(StepSender):
    """One folder of event files a run, written by TensorBoard's own writer."""

    TRACKER: ClassVar[str] = "tensorboard"

    def _open(self, last_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(Path(self.place) / self._path))
        if last_step >= 0:  # TensorBoard then drops what an earlier file has of later steps
            self._add(last_step + 1, time.time_ns() // 1_000_000, session_log=SessionLog(status=SessionLog.START))
        else:
            self._add_text(self.run["name"])

    def _write(self, step: int, wall: int, points: Points) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in points.items()]
        self._add(step, wall, summary=self._summary(value=values))

    def _write_final(self, step: int, wall: int, final: Points) -> None:
        if final:
            self._write(step, wall, final)

    def _flush(self) -> None:
        self._writer.flush()

    def _end(self, status: str) -> None:
        self._writer.close()

    def _add(self, step: int, wall: int, **content: Any) -> None:
        self._writer.add_event(self._event(wall_time=wall / 1000, step=step, **content))

    def _add_text(self, title: str) -> None:
        """The run's description as TensorBoard's text page shows it: its name, loss and options."""
        from tensorboard.plugins.text.summary_v2 import text_pb

        explanation = self.folder / "explanation.txt"
        text = explanation.read_text() if explanation.exists() else ""
        options = "\n".join(f"{name}: {value}" for name, value in self.run["choices"].items())
        began = (self.folder / "run.json").stat().st_mtime_ns // 1_000_000
        self._add(0, began, summary=text_pb("run", f"{title}\n\n```\n{text}\n{options}\n```"))


class WandbSender(StepSender):
    """A run of Weights & Biases, offline or online; one session, and offline one file, for each attempt at the run."""

    TRACKER: ClassVar[str] = "wandb"

    def __init__(self, folder: Path, place: str, project: str, mode: str) -> None:
        super().__init__(folder, place)
        self.project, self.mode = project, mode

    def _open(self, last_step: int) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it is read at import
        import wandb

        # W&B would else read git and the console, and send which machine this is.
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
            x_disable_stats=True, x_disable_meta=True,
        )  # fmt: skip
        Path(self.place).mkdir(parents=True, exist_ok=True)
        self._session = wandb.init(
            mode=self.mode,  # pyright: ignore[reportArgumentType]
            dir=self.place,
            project=self.project,
            id=self.run["run_key"],
            name=self.run["name"],
            group=self.run["tags"].get("sweep"),
            config={**self.run["choices"], **self.run["config"], "folder": str(self.folder.resolve())},
            resume="allow",
            reinit="create_new",
            settings=settings,
        )

    def _write(self, step: int, wall: int, points: Points) -> None:
        self._session.log({**points, "_timestamp": wall / 1000}, step=step, commit=True)

    def _write_final(self, step: int, wall: int, final: Points) -> None:
        self._session.summary.update(dict(final))

    def _flush(self) -> None:
        """W&B's own process has every step from `log` on, and writes it also if this one is killed."""

    def _end(self, status: str) -> None:
        self._session.finish(exit_code=0 if status == "FINISHED" else 1)


class TrackioSender(StepSender):
    """A run in trackio's local database, written without its server; the key of a step makes it a step once."""

    TRACKER: ClassVar[str] = "trackio"

    def __init__(self, folder: Path, place: str, project: str) -> None:
        super().__init__(folder, place)
        self.project = project
        self._rows: list[tuple[int, int, Points, str]] = []

    def _open(self, last_step: int) -> None:
        os.environ.setdefault("TRACKIO_DIR", self.place)  # trackio reads it at import
        used = import_module("trackio.utils").TRACKIO_DIR
        if Path(used).resolve() != Path(self.place).resolve():
            raise ValueError(f"this process has trackio at {used}: unset TRACKIO_DIR, or set tracking.folder to it")
        self._storage = import_module("trackio.sqlite_storage").SQLiteStorage

    def _write(self, step: int, wall: int, points: Points) -> None:
        self._rows.append((step, wall, points, f"{self.run['run_key']}/{step}"))

    def _write_final(self, step: int, wall: int, final: Points) -> None:
        if final:
            self._rows.append((step, wall, final, f"{self.run['run_key']}/final"))

    def _flush(self) -> None:
        if not self._rows:
            return
        steps, walls, points, keys = zip(*self._rows)
        self._storage.bulk_log(
            project=self.project,
            run=self.run["name"],
            metrics_list=[dict(one) for one in points],
            steps=list(steps),
            timestamps=[datetime.fromtimestamp(wall / 1000, UTC).isoformat() for wall in walls],
            config={**self.run["choices"], **self.run["config"]},
            log_ids=list(keys),
            run_id=self.run["run_key"],
        )
        self._rows.clear()

    def _end(self, status: str) -> None:
        """The database has no status of a run."""
