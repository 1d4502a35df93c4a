"""MLflow as a copy of run folders: filled by a background thread, or replayed with `grpo-lab sync`.

The thread serves other trackers too, with a sender of theirs: see `trackers.py`.
mlflow takes over a second to import, so only the thread or the command imports it.
"""

from __future__ import annotations

import logging
import math
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from grpo_lab import deferred
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.files import RunFolderBusyError
from grpo_lab.tracking.mlflow_parent import Analyse, sync_sweep
from grpo_lab.tracking.mlflow_sender import FolderSender, Sender, ending
from grpo_lab.tracking.mlflow_store import check_driver, check_uri, first_line
from grpo_lab.tracking.run_reader import is_held
from grpo_lab.tracking.sweep_record import FILE as SWEEP
from grpo_lab.tracking.sweep_record import read_sweep, sweep_status
from grpo_lab.tracking.system_metrics import SystemMonitor

LONGEST_BACKOFF_SECONDS = 60.0
THREAD_NAME = "mlflow-exporter"

logger = logging.getLogger("grpo_lab.tracking")


@dataclass(frozen=True)
class Tracking(ABC):
    """Where a run is shown in addition to its own folder."""

    @abstractmethod
    def record(self) -> dict[str, str] | None:
        """The value of "tracking" in run.json, the run's place in MLflow: {"uri", "experiment"}, or None."""

    @abstractmethod
    def exporter(self, folder: Path) -> Exporter | NoExporter:
        """The exporter of the run in `folder`, not started."""


@dataclass(frozen=True)
class Exported(Tracking):
    """A tracker that a background thread fills from the run folder."""

    interval_seconds: float  # between two reads of the folder
    flush_seconds: float  # longest wait of `stop`
    system_metrics: float  # seconds between two samples of the machine; 0: none
    name: ClassVar[str]  # of the tracker, in messages
    option: ClassVar[str]  # of `tracking=` and of `grpo-lab sync --to`

    def __post_init__(self) -> None:
        for name in ("interval_seconds", "flush_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"tracking.{name} must be over 0 seconds, got {getattr(self, name)!r}")
        if not 0 <= self.system_metrics < math.inf:
            raise ValueError(
                f"tracking.system_metrics={self.system_metrics!r}: give the seconds between two samples, or 0 for none"
            )

    @abstractmethod
    def sender(self, folder: Path) -> FolderSender:
        """The sender of the run in `folder` to this tracker; not yet connected."""

    def exporter(self, folder: Path) -> Exporter:
        return Exporter(
            folder, self.interval_seconds, self.flush_seconds, self.sender, self.name, self.option, self.system_metrics
        )


@dataclass(frozen=True)
class Mlflow(Exported):
    """Export the run to one experiment of an MLflow server or database.

    `uri` is checked when the run is configured, without a connection: a server that is down stops nothing.
    """

    uri: str
    experiment: str
    register: str  # the name of a registered model, which the run's last checkpoint becomes a version of; "": none
    name: ClassVar[str] = "MLflow"
    option: ClassVar[str] = "mlflow"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_uri(self.uri)
        check_driver(self.uri)
        if set(self.register) & set("/:.%\"'"):
            raise ValueError(f"tracking.register={self.register}: MLflow takes no / : . % or quotes in a model's name")

    def record(self) -> dict[str, str]:
        options = {"register": self.register} if self.register else {}
        return {"uri": self.uri, "experiment": self.experiment, **options}

    def sender(self, folder: Path) -> Sender:
        return Sender(folder, self.uri)


@dataclass(frozen=True)
class NoTracking(Tracking):
    """No tracker; only the run folder holds the run."""

    def record(self) -> None:
        return None

    def exporter(self, folder: Path) -> NoExporter:
        return NoExporter()


def _not_from_an_exporter(record: logging.LogRecord) -> bool:
    return record.threadName != THREAD_NAME


class NoExporter:
    """A Mirror that does nothing."""

    def start(self) -> None:
        """Nothing to start."""

    def stop(self) -> None:
        """Nothing to stop."""


class Exporter:
    """Sends a run folder to a tracker from a background thread that neither blocks the run nor raises.

    The folder must hold run.json when `start` is called. Times in seconds. `make_sender`, `name` and `option` are the
    tracker's; with `system_metrics` over 0 another thread samples the machine as often.
    """

    def __init__(
        self,
        folder: Path,
        interval_seconds: float,
        flush_seconds: float,
        make_sender: Callable[[Path], FolderSender] = Sender,
        name: str = "MLflow",
        option: str = "mlflow",
        system_metrics: float = 0.0,
    ) -> None:
        self.folder = Path(folder)
        self._make_sender, self._name = make_sender, name
        self._replay = f"grpo-lab sync {shlex.quote(str(folder))}" + ("" if option == "mlflow" else f" --to {option}")
        self._sampler = SystemMonitor(self.folder, system_metrics) if system_metrics else None
        self.interval_seconds = interval_seconds
        self.flush_seconds = flush_seconds
        self._stopping = threading.Event()
        self._abandoned = threading.Event()
        self._behind = False
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        """Start the thread; returns once the packages that both the run and the thread import are loaded."""
        deferred.load()
        if self._sampler is not None:
            self._sampler.start()
        self._thread.start()

    def stop(self) -> None:
        """Send the rest, waiting at most flush_seconds; a second call does nothing.

        Call it after DONE or error.txt was written, since these decide the status in MLflow. A run that stops
        with neither is KILLED in MLflow.
        """
        if self._thread.ident is None or self._stopping.is_set():
            return
        if self._sampler is not None:
            self._sampler.stop()
        self._stopping.set()
        self._thread.join(self.flush_seconds)
        self._abandoned.set()
        if self._thread.is_alive() or self._behind:
            logger.warning("%s lacks a part of this run: send it with `%s`", self._name, self._replay)

    def _run(self) -> None:
        # urllib3 warns at every failed connection; this thread warns once.
        logging.getLogger("urllib3.connectionpool").addFilter(_not_from_an_exporter)
        sender: FolderSender | None = None
        failures = 0
        # The first read waits too: importing the tracker's package would compete with the run's own start.
        delay = self.interval_seconds
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(delay)
            try:
                sender = sender or self._make_sender(self.folder)
                patience = self.flush_seconds if stopping else 0.0
                sender.push(not stopping, patience, self._abandoned.is_set)
                failures, delay, self._behind = 0, self.interval_seconds, False
            except RunFolderBusyError:  # a `grpo-lab sync` is sending this folder
                delay, self._behind = self.interval_seconds, True
            except Exception as error:
                # No error here may stop the run: its folder has everything.
                if failures == 0 and not stopping:
                    logger.warning(
                        "%s does not take this run (%s); the run goes on, and `%s` sends what is missing",
                        self._name,
                        first_line(error),
                        self._replay,
                    )
                failures += 1
                delay = min(self.interval_seconds * 2**failures, LONGEST_BACKOFF_SECONDS)
                self._behind = True


@dataclass(frozen=True)
class ExportReport:
    """The result of a replay: `points` sent now, the `status` in MLflow's words, and `error` if it failed."""

    folder: Path
    points: int
    run_id: str | None
    status: str
    error: str | None = None


def sync(folder: Path, uri: str | None = None) -> ExportReport:
    """Send, in the foreground, everything of one run folder that MLflow lacks; a second call sends nothing.

    `uri` overrides the one in run.json. A run without DONE or error.txt that no process holds is marked KILLED.
    Raises ValueError for a folder or URI that cannot be exported, RunFolderBusyError if the run's own exporter
    holds the folder for a minute, RuntimeError if MLflow does not answer or refuses.
    """
    folder = Path(folder)
    sender = Sender(folder, uri)
    live = is_held(folder)
    try:
        points = sender.push(live, LONGEST_BACKOFF_SECONDS, lambda: False)
    except (ValueError, RunFolderBusyError):
        raise
    except Exception as error:
        raise RuntimeError(
            f"MLflow at {sender.uri} did not take {folder} ({first_line(error)}): start the server, or mend "
            "the store, and sync again; the folder is complete. No password is recorded: where the store asks for one, "
            "type tracking.uri= with it behind this command, or set PGPASSWORD"
        ) from error
    return ExportReport(folder, points, sender.run_id, ending(folder, live)[0])


def sync_all(root: Path, uri: str | None = None, analyse: Analyse | None = None) -> list[ExportReport]:
    """`sync` every run folder under `root`; a failure is reported in its report's `error`, not raised.

    Runs with tracking=none are left out unless `uri` is given. Sweeps get what `analyse` makes of them.
    """
    reports = []
    described = sorted(path.parent for path in Path(root).rglob("run.json"))
    # MLflow keeps a copy of run.json among a run's artifacts; only a run's own folder has its metrics.
    for folder in (folder for folder in described if (folder / "metrics.jsonl").exists()):
        try:
            if uri is None and read_json(folder / "run.json", AFRESH)["tracking"] is None:
                continue
            reports.append(sync(folder, uri))
        except (OSError, ValueError, RuntimeError) as error:
            reports.append(ExportReport(folder, 0, None, "UNKNOWN", str(error)))
    return reports + [_sync_parent(path.parent, uri, analyse) for path in sorted(Path(root).rglob(f"sweeps/*/{SWEEP}"))]


def _sync_parent(folder: Path, uri: str | None, analyse: Analyse | None) -> ExportReport:
    try:
        record = read_sweep(folder)
    except (OSError, ValueError, TypeError) as error:
        return ExportReport(folder, 0, None, "UNKNOWN", f"its sweep.json cannot be read ({first_line(error)})")
    tracking = record.tracking
    place = uri or (tracking["uri"] if tracking else None)
    status = sweep_status(folder, record)
    if place is None:
        return ExportReport(folder, 0, None, status)
    try:
        experiment = tracking["experiment"] if tracking else "grpo_lab"
        return ExportReport(folder, 0, sync_sweep(folder, place, experiment, None, analyse), status)
    except Exception as error:
        return ExportReport(folder, 0, None, "UNKNOWN", f"MLflow at {place} did not take it: {first_line(error)}")
