"""A sweep from its command line to its last cell: declare, expand, check everything, start, report.

Hydra calls it through two thin classes in the `hydra_plugins` namespace.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError
from rich.console import Console

from grpo_lab.config.design import Design, read_design, require_known_metrics
from grpo_lab.config.run_config import unresolved
from grpo_lab.policy.device import choose_device
from grpo_lab.sweeps.board import Board
from grpo_lab.sweeps.cells import (
    Cell,
    compose_cells,
    folders_of,
    overrides_for,
    plan_cells,
    refuse_idle_arms,
    sweep_name,
)
from grpo_lab.sweeps.local import Job, run_jobs, slots
from grpo_lab.tracking import provenance
from grpo_lab.tracking.mlflow_parent import announce_sweep
from grpo_lab.tracking.progress import clock
from grpo_lab.tracking.run_reader import run_status
from grpo_lab.tracking.sweep_record import record_sweep
from grpo_lab.tracking.whole import AFRESH, read_json


class SweepFailed(SystemExit):
    """Some cells failed; the message lists them, and the exit status is 1."""


@contextlib.contextmanager
def ends_in_words() -> Iterator[None]:
    """Turn errors that a user can fix, and Ctrl-C, into a message and an exit status without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted: the same command goes on with what is left", file=sys.stderr)
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(f"error: {error}")


def run_sweep(
    config: DictConfig, arguments: Sequence[str], compose: Any, launcher: Launcher, dry_run: bool
) -> list[JobReturn]:
    """Run every unfinished cell and return the launcher's results.

    `config` is the sweep's own composed configuration, and `arguments` its overrides as typed. `compose` turns a
    cell's overrides into its configuration. Raises ValueError before anything starts, SweepFailed at the end.
    """
    console = Console(stderr=True)
    design = _design(config)
    if design is not None:
        require_known_metrics(design)
    name = sweep_name(design, arguments)
    cells = compose_cells(plan_cells(design, arguments), name, compose)
    if design is not None:
        refuse_idle_arms(design, cells)
    finished = [cell for cell in cells if run_status(cell.folder) == "done"]
    todo = [cell for cell in cells if run_status(cell.folder) != "done"]
    if dry_run:
        _show(console, name, cells)
        return []
    for model in {cell.run.model for cell in todo}:
        model.resolve()  # once, instead of in all first cells at the same moment
    runs_dir = Path(config.runs_dir).expanduser().absolute()
    folder = record_sweep(
        runs_dir,
        name,
        [cell.record() for cell in cells],
        None if design is None else folders_of(design, arguments),
        None if design is None else _declared(config),
        "" if design is None else design.fingerprint(),
        ["python", "-m", "grpo_lab.train", *sys.argv[1:]],
        provenance.commit(),
        cells[0].run.tracking.record(),
        starts=bool(todo),
    )
    _say_whose(console, name, finished)
    if not todo:
        console.print(f"{name}: all {len(cells)} cells are finished", highlight=False, soft_wrap=True)
    announce_sweep(folder, running=bool(todo))
    expect = getattr(launcher, "expect", None)
    if expect is not None:
        expect(name, todo, len(finished))
    try:
        returns = list(launcher.launch([overrides_for(cell, name) for cell in todo], initial_job_idx=0)) if todo else []
    finally:
        announce_sweep(folder, running=False)
    _report(name, todo, returns)
    if design is None:
        _show_arms(runs_dir, name)
    draw = shlex.join(["grpo-lab", "figures", name, "--runs", str(config.runs_dir)])
    console.print(f"draw it: {draw}", highlight=False, soft_wrap=True, markup=False)
    return returns


def _design(config: DictConfig) -> Design | None:
    if config.get("design") is None:
        return None
    try:
        return read_design(_declared(config))
    except InterpolationResolutionError as error:
        raise ValueError(unresolved(config, error)) from error


def _declared(config: DictConfig) -> Any:
    """The entry `design` in plain values, with what it refers to in place."""
    return OmegaConf.to_container(config.design, resolve=True)


def _say_whose(console: Console, name: str, finished: Sequence[Cell]) -> None:
    """Print which finished cells MLflow shows elsewhere: a run has one parent there, its first sweep."""
    elsewhere = [cell for cell in finished if _sweep_of(cell) != name]
    if elsewhere:
        titles = ", ".join(f"{cell.plan.title} ({_sweep_of(cell) or 'a run on its own'})" for cell in elsewhere)
        line = f"finished before, and shown in MLflow where they ran: {titles}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _sweep_of(cell: Cell) -> str:
    return read_json(cell.folder / "run.json", AFRESH)["tags"].get("sweep", "")


def _show(console: Console, name: str, cells: Sequence[Cell]) -> None:
    console.print(f"{name}: {len(cells)} cells; none is started", highlight=False, soft_wrap=True)
    for cell in cells:
        line = f"  {run_status(cell.folder):<8} {cell.plan.title:<44} {cell.record().folder}"
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _report(name: str, cells: Sequence[Cell], returns: Sequence[JobReturn]) -> None:
    failed = [
        (cell, result) for cell, result in zip(cells, returns, strict=True) if result.status != JobStatus.COMPLETED
    ]
    if not failed:
        return
    lines = [f"  {cell.plan.title}: {result._return_value}" for cell, result in failed]
    raise SweepFailed(
        f"error: {len(failed)} of {len(cells)} cells of {name} failed; the same command tries them again:\n"
        + "\n".join(lines)
    )


def _show_arms(runs_dir: Path, name: str) -> None:
    """Print a comparison of a finished sweep's arms; used for sweeps without a declared design."""
    from grpo_lab.analysis.effects.verdict import compared_arms
    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import load_sweep

    data = load_sweep(runs_dir, name)
    print("", *compared_arms(data, final_values(data)), "", sep="\n", flush=True)


class LocalCells:
    """The work of the launcher `local`; see `local.run_jobs`."""

    def __init__(self, workers: int | None, grace_seconds: float) -> None:
        self.workers, self.grace_seconds = workers, grace_seconds
        self.expected: tuple[str, Sequence[Cell], int] | None = None

    def expect(self, name: str, cells: Sequence[Cell], finished: int) -> None:
        """Set the cells of the next `launch`, so that they need not be composed again."""
        self.expected = (name, cells, finished)

    def launch(self, job_overrides: Sequence[Sequence[str]], compose: Any, hydra: Sequence[str]) -> list[JobReturn]:
        """Run the jobs and return one JobReturn each; `hydra` are the sweep's overrides of Hydra's own settings."""
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"hydra.launcher.workers must be at least 1, got {self.workers}: null uses the machine")
        name, cells, finished = self.expected or ("jobs", _cells_of(job_overrides, compose), 0)
        self.expected = None
        # Settings of the sweep stay here; others, such as a search path or a log level, go to the cells.
        own = ("hydra.mode", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
        passed_on = [word for word in hydra if not word.lstrip("+~").startswith(own)]
        jobs = [_job(cell, [*words, *passed_on]) for cell, words in zip(cells, job_overrides, strict=True)]
        on_cuda = any(choose_device(cell.run.device).type == "cuda" for cell in cells)
        workers, devices = slots(self.workers, max(job.threads for job in jobs), on_cuda)
        began = time.monotonic()
        with Board(name, len(jobs) + finished, finished) as board:
            failures = run_jobs(jobs, workers, devices, self.grace_seconds, board)
            board.say(f"{name}: {board.summary()} after {clock(time.monotonic() - began)}")
        return [_returned(words, failure) for words, failure in zip(job_overrides, failures)]


def _cells_of(job_overrides: Sequence[Sequence[str]], compose: Any) -> list[Cell]:
    """The cells of jobs from another sweeper."""
    return compose_cells([plan_cells(None, words)[0] for words in job_overrides], "", compose)


def _job(cell: Cell, words: Sequence[str]) -> Job:
    budget = cell.run.budget
    return Job(cell.plan.title, tuple(words), cell.folder, budget.axis.value, budget.amount, cell.run.threads)


def _returned(words: Sequence[str], failure: str | None) -> JobReturn:
    done = JobReturn(overrides=list(words), status=JobStatus.FAILED if failure else JobStatus.COMPLETED)
    done._return_value = RuntimeError(failure) if failure else None
    return done
