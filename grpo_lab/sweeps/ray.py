"""Runs as tasks of Ray: it places them by CPUs and GPUs, and starts one again elsewhere when its node dies."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.sweeps.child import OUTPUT, PARENT, THREAD_VARIABLES, open_run_process
from grpo_lab.sweeps.jobs import Backend, Job, Started
from grpo_lab.sweeps.launching import RunLauncher, require_at_least_one, require_gpus_for
from grpo_lab.sweeps.planned_runs import PlannedRun
from grpo_lab.tracking.run_reader import is_held

_LOOK_SECONDS = 0.2  # between two looks at a run on its node
_LATE_SECONDS = 60.0  # until a file that a node has written is visible here: nfs(5), acdirmax
_OF_THE_NODE = ("RAY_", "CUDA_", "HOSTNAME", "HOME", "PATH", "LD_LIBRARY_PATH", "TMPDIR", PARENT, *THREAD_VARIABLES)


@dataclass(frozen=True)
class RaySettings:
    """Resources that each run requests of its node; None leaves it out."""

    cpus: float | None  # None: the threads of the run's processes
    gpus: float  # less than one shares a GPU among runs
    memory_gb: float | None
    resources: Mapping[str, float]  # the cluster's own, such as {node_with_disk: 1}
    retries: int  # deaths of nodes or workers after which a run is given up

    def __post_init__(self) -> None:
        for name in ("cpus", "gpus", "memory_gb", "retries"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"hydra.launcher.{name} must be at least 0, got {getattr(self, name)}")
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"hydra.launcher.gpus must be a whole number or below 1, got {self.gpus}")

    def needs(self, job: Job) -> dict[str, float]:
        """Resources of a node for the job, as Ray counts them."""
        memory = {} if self.memory_gb is None else {"memory": math.ceil(self.memory_gb * 2**30)}
        return {"CPU": float(self.cpus or job.threads * job.processes), "GPU": self.gpus, **memory, **self.resources}

    def options(self, job: Job) -> dict[str, Any]:
        """The options of the job's task as Ray names them."""
        needs = self.needs(job)
        requested = {"num_cpus": needs.pop("CPU"), "num_gpus": needs.pop("GPU")}
        if "memory" in needs:
            requested["memory"] = needs.pop("memory")
        return {**requested, "resources": needs, "max_retries": self.retries, "name": job.title}


def execute_run(
    words: tuple[str, ...], folder: Path, threads: int, environment: dict[str, str], processes: int, place: Path
) -> int:
    """On a node: execute the run in a process of its own, in the folder `place`, and return its exit status.

    Ray cancels a task as Ctrl-C would. An exception could strike between any two lines here and leave the run alone,
    so the run is told by a handler instead.
    """
    signals: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: signals.append(number))
    try:
        process = open_run_process(words, folder, threads, environment, processes, cwd=place)
        while process.poll() is None:
            if signals:
                signals.clear()
                process.send_signal(signal.SIGINT)
            time.sleep(_LOOK_SECONDS)
        return process.returncode
    finally:
        signal.signal(signal.SIGINT, before)


class _RayTask(Started):
    def __init__(self, task: Any, folder: Path, waits: str) -> None:
        self.task, self.folder, self.waits = task, folder, waits
        self.submitted = time.time()
        self.code: int | None = None

    def poll(self) -> int | None:
        import ray
        from ray.exceptions import RayError, TaskCancelledError

        if self.code is None:
            try:
                if ray.wait([self.task], timeout=0)[0]:
                    self.code = int(ray.get(self.task))
            except TaskCancelledError:  # said at once, while the run still saves what it has
                self.code = None if is_held(self.folder) else -signal.SIGINT
            except (RayError, OSError) as error:
                self.message, self.code = f"Ray could not start the run: {_message(error)}", 1
        self.note = "" if self.code is not None or self._begun() else self.waits
        return self.code

    def _begun(self) -> bool:
        output = self.folder / OUTPUT
        return output.exists() and output.stat().st_mtime >= self.submitted

    def interrupt(self) -> None:
        self._cancel(force=False)

    def kill(self) -> None:
        self._cancel(force=True)

    def gone(self) -> bool:
        return not is_held(self.folder)  # its process notices that the task was killed: child.py

    def _cancel(self, force: bool) -> None:
        import ray
        from ray.exceptions import RayError

        if self.code is None:
            with contextlib.suppress(RayError, ValueError):  # it has ended, or the cluster has
                ray.cancel(self.task, force=force, recursive=False)


def _message(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RayBackend(Backend):
    """The nodes of a Ray cluster, which is connected to as long as the backend is open."""

    late_seconds = _LATE_SECONDS

    def __init__(self, settings: RaySettings, address: str, workers: int) -> None:
        import ray

        self.settings, self.workers = settings, workers
        handler = signal.getsignal(signal.SIGTERM)  # Ray sets one of its own, which would end the sweep without a word
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        page = None if address or "RAY_ADDRESS" in os.environ else False  # a cluster of this sweep alone needs none
        try:
            ray.init(
                address or None,
                include_dashboard=page,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where, message = address or "this machine", " ".join(str(error).split())
            if "mismatch" in message:  # one answers, of another version of Ray or Python
                raise ValueError(f"the Ray cluster at {where} cannot be used from here: {message}") from error
            raise ValueError(
                f"no Ray cluster answers at {where}: {_message(error)}. Start one with ray start --head, or set "
                "hydra.launcher.address"
            ) from error
        finally:
            signal.signal(signal.SIGTERM, handler)
        self.run = ray.remote(execute_run)
        further = {name: text for name, text in os.environ.items() if not name.startswith(_OF_THE_NODE)}
        if not settings.gpus:  # Ray would show a run every GPU of its node, and all of them would take the first
            further["CUDA_VISIBLE_DEVICES"] = ""
        self.environment = ray.put(further)

    def waits(self, job: Job) -> str:
        """Why a job that was handed over has not begun."""
        import ray

        needs = self.settings.needs(job)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        if any(all(node.get(name, 0) >= amount for name, amount in needs.items()) for node in nodes):
            return "waits for room on Ray"
        requested = ", ".join(f"{amount:g} {name}" for name, amount in needs.items() if amount)
        return f"waits for a node with {requested}: Ray has none now"

    def start(self, job: Job, slot: int) -> Started:
        task = self.run.options(**self.settings.options(job)).remote(
            job.words, job.folder, job.threads, self.environment, job.processes, Path.cwd()
        )
        return _RayTask(task, job.folder, self.waits(job))

    def close(self) -> None:
        import ray

        ray.shutdown()


class RayRunLauncher(RunLauncher):
    """The work of the launcher `ray`. `at_once`: how many runs Ray has at once; None for all."""

    elsewhere = True

    def __init__(
        self,
        address: str,
        at_once: int | None,
        grace_seconds: float,
        silent_minutes: float | None,
        processes: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(grace_seconds, silent_minutes, processes)
        self.address, self.at_once, self.settings = address, at_once, RaySettings(**settings)
        require_gpus_for(processes, self.settings.gpus)

    def backend(self, name: str, jobs: Sequence[Job], runs: Sequence[PlannedRun]) -> Backend:
        workers = self.workers_for(runs)
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ValueError("hydra/launcher=ray needs Ray: pip install 'grpo-lab[ray]'") from error
        return RayBackend(self.settings, self.address, workers)

    def workers_for(self, runs: Sequence[PlannedRun]) -> int:
        require_at_least_one("at_once", self.at_once, "null hands all runs to Ray")
        return self.at_once or max(1, len(runs))
