"""Other trackers of the same run folder: TensorBoard, Weights & Biases and trackio.

As with MLflow, a background thread reads the folder and sends what is new, or `grpo-lab sync --to` does so later. The
packages are extras of grpo_lab; a run that asks for one that is missing is refused before a model loads.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from grpo_lab.tracking.files import RunFolderBusyError
from grpo_lab.tracking.mlflow_exporter import LONGEST_BACKOFF_SECONDS, Exported, ExportReport
from grpo_lab.tracking.mlflow_sender import ending
from grpo_lab.tracking.mlflow_store import first_line
from grpo_lab.tracking.run_reader import is_held
from grpo_lab.tracking.step_senders import StepSender, TensorBoardSender, TrackioSender, WandbSender

MODES = ("offline", "online")


@dataclass(frozen=True)
class Packaged(Exported):
    """A tracker whose package is an extra of grpo_lab, of the same name as its option."""

    folder: str  # where the tracker keeps its files, absolute

    def __post_init__(self) -> None:
        super().__post_init__()
        if find_spec(self.option) is None:
            raise ValueError(
                f"tracking={self.option} needs a package that is not installed: pip install 'grpo-lab[{self.option}]', "
                "or choose tracking=mlflow or tracking=none"
            )
        if not Path(self.folder).is_absolute():
            raise ValueError(f"tracking.folder={self.folder}: give an absolute path")

    def record(self) -> None:
        return None


@dataclass(frozen=True)
class TensorBoard(Packaged):
    """Event files under `folder`, one folder a run, which carries the run's own path below the folder of runs."""

    name: ClassVar[str] = "TensorBoard"
    option: ClassVar[str] = "tensorboard"

    def sender(self, folder: Path) -> StepSender:
        return TensorBoardSender(folder, self.folder)


@dataclass(frozen=True)
class Wandb(Packaged):
    """A run of Weights & Biases, whose id is the run's key; offline it is a file that `wandb sync` sends."""

    project: str
    mode: str
    name: ClassVar[str] = "Weights & Biases"
    option: ClassVar[str] = "wandb"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode not in MODES:
            raise ValueError(f"tracking.mode={self.mode}: choose one of {', '.join(MODES)}")

    def sender(self, folder: Path) -> StepSender:
        return WandbSender(folder, self.folder, self.project, self.mode)


@dataclass(frozen=True)
class Trackio(Packaged):
    """A run in trackio's database of `project` under `folder`; its id is the run's key."""

    project: str
    name: ClassVar[str] = "trackio"
    option: ClassVar[str] = "trackio"

    def sender(self, folder: Path) -> StepSender:
        return TrackioSender(folder, self.folder, self.project)


def replay(root: Path, tracking: Packaged) -> list[ExportReport]:
    """Send every run folder under `root` to a tracker, each step once; a failure is told in its report's `error`."""
    found = sorted(path.parent for path in Path(root).rglob("run.json"))
    return [_replay_one(folder, tracking) for folder in found if (folder / "metrics.jsonl").exists()]


def _replay_one(folder: Path, tracking: Packaged) -> ExportReport:
    live = is_held(folder)
    try:
        sent = tracking.sender(folder).push(live, LONGEST_BACKOFF_SECONDS, lambda: False)
    except (ValueError, RunFolderBusyError) as error:
        return ExportReport(folder, 0, None, "UNKNOWN", str(error))
    except Exception as error:  # each package raises errors of its own
        return ExportReport(folder, 0, None, "UNKNOWN", f"{tracking.name} did not take it: {first_line(error)}")
    return ExportReport(folder, sent, None, ending(folder, live)[0])
