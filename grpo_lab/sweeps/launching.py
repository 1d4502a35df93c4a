"""The common part of all launchers: Hydra's overrides become runs on a backend, whose ends become Hydra's results."""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from hydra.core.utils import JobReturn, JobStatus

from grpo_lab.distributed import ranks
from grpo_lab.distributed.device import choose_device, planned_elsewhere
from grpo_lab.sweeps.jobs import Backend, Job, run_jobs
from grpo_lab.sweeps.local import LocalBackend, gpu_share, slots
from grpo_lab.sweeps.objective import objective
from grpo_lab.sweeps.planned_runs import PlannedRun, compose_runs, plan_runs
from grpo_lab.sweeps.progress_display import ProgressDisplay
from grpo_lab.tracking.progress import clock


class RunLauncher(ABC):
    """The work of a launcher.

    `grace_seconds`: from Ctrl-C until runs that have not ended are killed. `silent_minutes`: after so long without a
    word a run hangs and is ended; None waits for ever. `processes`: how many share one run, started by torchrun.
    `elsewhere`: True if runs execute on other machines than the sweep.
    """

    elsewhere: ClassVar[bool] = False

    def __init__(self, grace_seconds: float, silent_minutes: float | None, processes: int = 1) -> None:
        require_at_least_one("processes", processes, "the number of processes that share one run")
        if silent_minutes is not None and silent_minutes <= 0:
            raise ValueError(
                f"hydra.launcher.silent_minutes must be above 0, got {silent_minutes}: null waits for ever"
            )
        self.grace_seconds, self.processes = grace_seconds, processes
        self.silent_seconds = math.inf if silent_minutes is None else 60 * silent_minutes
        self.expected: tuple[str, Sequence[PlannedRun], int] | None = None

    @abstractmethod
    def backend(self, name: str, jobs: Sequence[Job], runs: Sequence[PlannedRun]) -> Backend:
        """Where the jobs of the sweep `name` run. Raises ValueError with a remedy if they cannot."""

    @abstractmethod
    def workers_for(self, runs: Sequence[PlannedRun]) -> int:
        """Maximum concurrent runs of these, as far as the settings say."""

    @contextlib.contextmanager
    def planned(self) -> Iterator[None]:
        """Within, runs are composed and checked as they are going to be started."""
        with ranks.planned(self.processes), planned_elsewhere(self.elsewhere):
            yield

    def expect(self, name: str, runs: Sequence[PlannedRun], finished: int) -> None:
        """Set the runs of the next `launch`, so that they need not be composed again."""
        self.expected = (name, runs, finished)

    def launch(self, job_overrides: Sequence[Sequence[str]], compose: Any, hydra: Sequence[str]) -> list[JobReturn]:
        """Run the jobs and return one JobReturn each; `hydra` are the sweep's overrides of Hydra's own settings."""
        with self.planned():
            name, runs, finished = self.expected or ("jobs", _planned_runs(job_overrides, compose), 0)
        ours, self.expected = self.expected is not None, None
        # Settings of the sweep stay here; others, such as a search path or a log level, go to the runs.
        own = ("hydra.mode", "hydra.sweep", "hydra/sweeper", "hydra.launcher", "hydra/launcher")
        passed_on = [word for word in hydra if not word.lstrip("+~").startswith(own)]
        overrides = [[*words, *passed_on] for words in job_overrides]
        jobs = [_job(planned, words, self.processes) for planned, words in zip(runs, overrides, strict=True)]
        began = time.monotonic()
        with (
            contextlib.closing(self.backend(name, jobs, runs)) as backend,
            ProgressDisplay(name, len(jobs) + finished, finished) as display,
        ):
            failures = run_jobs(jobs, backend, self.grace_seconds, display, self.silent_seconds)
            display.say(f"{name}: {display.summary()} after {clock(time.monotonic() - began)}")
        # Another sweeper, which may search, is told what each run is worth.
        worth = [None if ours or failure else _objective(planned) for planned, failure in zip(runs, failures)]
        return [_returned(*job) for job in zip(job_overrides, failures, worth)]


class LocalRunLauncher(RunLauncher):
    """The work of the launcher `local`."""

    def __init__(
        self, workers: int | None, grace_seconds: float, silent_minutes: float | None, processes: int = 1
    ) -> None:
        super().__init__(grace_seconds, silent_minutes, processes)
        require_at_least_one("workers", workers, "null uses the machine")
        self.workers = workers

    def backend(self, name: str, jobs: Sequence[Job], runs: Sequence[PlannedRun]) -> Backend:
        return self._backend(runs)

    def workers_for(self, runs: Sequence[PlannedRun]) -> int:
        backend = self._backend(runs)
        backend.widen()
        return backend.workers

    def _backend(self, runs: Sequence[PlannedRun]) -> LocalBackend:
        on_cuda = any(choose_device(planned.run.device).type == "cuda" for planned in runs)
        threads = max((planned.run.threads for planned in runs), default=1)
        workers, devices = slots(self.workers, threads, on_cuda, self.processes)
        # What vLLM's own processes take is not measured.
        measurable = self.workers is None and self.processes == 1 and all(planned.run.engine.forks for planned in runs)
        share = gpu_share([planned.folder for planned in runs], devices, threads) if devices and measurable else None
        return LocalBackend(workers, devices, share)


def require_at_least_one(name: str, value: int | None, remedy: str) -> None:
    """Raise ValueError if the launcher's setting is a number below 1."""
    if value is not None and value < 1:
        raise ValueError(f"hydra.launcher.{name} must be at least 1, got {value}: {remedy}")


def require_gpus_for(processes: int, gpus: float | int) -> None:
    """Raise ValueError for fewer GPUs than the processes of a run, each of which takes one."""
    if 0 < gpus < processes > 1:
        raise ValueError(
            f"hydra.launcher.gpus={gpus:g} is less than hydra.launcher.processes={processes}, and each process takes a "
            "GPU: raise gpus, or set it to 0 for device=cpu"
        )


def _planned_runs(job_overrides: Sequence[Sequence[str]], compose: Any) -> list[PlannedRun]:
    """The runs of jobs from another sweeper."""
    return compose_runs([plan_runs(None, words)[0] for words in job_overrides], "", compose)


def _job(planned: PlannedRun, words: Sequence[str], processes: int) -> Job:
    run, budget = planned.run, planned.run.budget
    forks = run.engine.forks and processes == 1
    described = (planned.plan.title, tuple(words), planned.folder, budget.axis.value, budget.amount)
    return Job(*described, run.threads, forks, processes)


def _objective(planned: PlannedRun) -> float:
    return objective(planned.folder, planned.run.objective, planned.run.budget.axis.value)


def _returned(words: Sequence[str], failure: str | None, value: float | None) -> JobReturn:
    done = JobReturn(overrides=list(words), status=JobStatus.FAILED if failure else JobStatus.COMPLETED)
    done._return_value = RuntimeError(failure) if failure else value
    return done
