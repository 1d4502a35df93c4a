"""Runs as jobs of Slurm, submitted through submitit; squeue says what becomes of them, which needs no accounting."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from grpo_lab.sweeps.child import open_run_process
from grpo_lab.sweeps.jobs import Backend, Job, Started, TryLater
from grpo_lab.sweeps.launching import RunLauncher, require_at_least_one, require_gpus_for
from grpo_lab.sweeps.planned_runs import PlannedRun
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.files import write_json
from grpo_lab.tracking.run_reader import saved_step

if TYPE_CHECKING:
    from submitit.core.utils import DelayedSubmission

RECORD = "slurm.json"  # in the run's folder: the job that has it, for a sweep that is started again
_RULE = 22 * "-"  # around the traceback in submitit's errors
_REQUEUES = 10_000  # time limits reached after which a job is given up
_LOOK_SECONDS = 5.0  # between two questions to Slurm
_LATE_SECONDS = 60.0  # until a file that a node has written is visible here: nfs(5), acdirmax
_EARLY_SECONDS = 90.0  # by which Slurm's warning may come early, and a job begin before its run: sbatch(1), --signal
_OF_THE_WARNING = 2 / 3  # of the time from Slurm's warning to the limit, for the run's step
_END_LOOK_SECONDS = 0.2  # between two looks whether a run that was told has ended
_VAIN = 2  # what comes before the first step is done once: the second job may get further than the first
# What sbatch says where it may take the same job later: a limit of jobs in the queue, a controller that is away.
_LATER = re.compile("(Max|Grp)Submit|timed out|temporarily|unable to contact|connection refused", re.IGNORECASE)
# What Slurm tells a job of itself; sbatch and srun take it for what the next job asks, where a sweep runs in a job.
_OF_A_JOB = ("SLURM_", "SLURMD_", "SRUN_", "SUBMITIT_", "PMI")
_OF_THE_CLUSTER = frozenset({"SLURM_CONF", "SLURM_JWT", "SLURM_CLUSTERS"})
# States in which a job runs, or will; the others are ends.
_ALIVE = frozenset(
    {
        "CONFIGURING", "COMPLETING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RESV_DEL_HOLD",
        "RUNNING", "SIGNALING", "SPECIAL_EXIT", "STAGE_OUT", "STOPPED", "SUSPENDED",
    }
)  # fmt: skip


@dataclass(frozen=True)
class SlurmSettings:
    """Resources that each job requests; an empty text or None leaves it to the cluster."""

    partition: str
    account: str
    qos: str
    constraint: str
    minutes: int  # its limit of time; a run that needs longer goes back into the queue and on from its checkpoint
    warning_seconds: int  # before the limit a run is interrupted; it goes on from its last checkpoint
    gpus: int  # of one node
    cpus: int | None  # None: the threads of the run's processes
    memory_gb: float | None
    setup: Sequence[str]  # shell lines before the run, such as "module load cuda"
    further: Mapping[str, Any]  # other options of sbatch, such as {exclude: node7}

    def __post_init__(self) -> None:
        require_at_least_one("minutes", self.minutes, "it is the limit of time of a job")
        require_at_least_one("cpus", self.cpus, "null asks for the run's threads")
        if self.gpus < 0:
            raise ValueError(f"hydra.launcher.gpus must be at least 0, got {self.gpus}: 0 asks for none")
        if not 0 < self.warning_seconds < 60 * self.minutes:
            raise ValueError(
                f"hydra.launcher.warning_seconds must lie between 0 and the {60 * self.minutes} seconds of a job, got "
                f"{self.warning_seconds}: lower it or raise hydra.launcher.minutes"
            )
        if {"M", "cluster", "clusters"} & set(self.further):
            raise ValueError(
                "hydra.launcher.further.clusters is not supported: start the sweep where sbatch submits to that cluster"
            )

    def parameters(self, job: Job) -> dict[str, Any]:
        """The job's options as submitit names them."""
        requested = {name: getattr(self, name) for name in ("partition", "account", "qos", "constraint")}
        # A job whose node fails, or that is preempted, goes back into the queue.
        further = {"requeue": True, **self.further}
        if further["requeue"] is False:
            further["no-requeue"] = True
        return {
            **{name: text for name, text in requested.items() if text},
            **({"setup": list(self.setup)} if self.setup else {}),
            **({"gpus_per_node": self.gpus} if self.gpus else {}),
            **({} if self.memory_gb is None else {"mem": f"{math.ceil(self.memory_gb * 1024)}MB"}),
            "job_name": "".join(one if one.isalnum() or one in "._+=-" else "_" for one in job.title),
            "time": self.minutes,
            "signal_delay_s": self.warning_seconds,
            "cpus_per_task": self.cpus or job.threads * job.processes,
            "stderr_to_stdout": True,
            # An option that is false is one that sbatch is not given.
            "additional_parameters": {name: value for name, value in further.items() if value is not False},
        }


class RunJob:
    """The work of a job on its node: execute the run in a process of its own. submitit pickles it."""

    def __init__(
        self,
        words: tuple[str, ...],
        folder: Path,
        threads: int,
        processes: int,
        seconds: int,
        vain: int = 0,
        patience: float = 60.0,
    ) -> None:
        self.words, self.folder, self.threads, self.processes = words, folder, threads, processes
        self.seconds = seconds  # until Slurm's warning
        self.patience = patience  # seconds from there for the run to finish its step; then it is ended at once
        self.vain = vain  # how many times in a row the whole time went by without a checkpoint
        self.process: subprocess.Popen | None = None
        self.began = math.inf  # on this node's monotonic clock
        self.before: int | None = None  # the step that it went on from

    def __call__(self) -> int:
        """The exit status of the run's process; where Slurm ends the job, it waits for that.

        Slurm tells this process, or all of the job's, by how the cluster tracks them; so signals are passed on. A job
        that ended by itself after SIGTERM would count as complete, and Slurm would not put it back into the queue when
        it is preempted.
        """
        signals: list[int] = []

        def pass_on(number: int, frame: FrameType | None) -> None:
            signals.append(number)
            self._interrupt()

        self.began, self.before = time.monotonic(), saved_step(self.folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, pass_on)
        self.process = open_run_process(self.words, self.folder, self.threads, {}, self.processes)
        if signals:
            self._interrupt()  # it came before there was a process to tell
        code = self.process.wait()
        while signal.SIGTERM in signals:
            signal.pause()
        return code

    def checkpoint(self) -> DelayedSubmission:
        """The job to put back into the queue, when its time is nearly up: the same, once the run has ended.

        Raises RuntimeError where that would go on for ever: the time goes by without a checkpoint.
        """
        from submitit.core.utils import DelayedSubmission

        if self.process is not None:
            self._interrupt()
            with contextlib.suppress(ChildProcessError):  # it has ended
                # This runs in a signal's handler, while `__call__` waits and holds the lock that Popen.wait takes.
                deadline = time.monotonic() + self.patience
                while time.monotonic() < deadline and not self._waited(os.WNOHANG):
                    time.sleep(_END_LOOK_SECONDS)
                self._interrupt()
                self._waited()
        whole = time.monotonic() - self.began > self.seconds - _EARLY_SECONDS
        vain = self.vain + 1 if whole and saved_step(self.folder) == self.before else 0
        if vain >= _VAIN:
            raise RuntimeError(
                f"{vain} jobs reached their time limit without saving a checkpoint: raise "
                "hydra.launcher.minutes, or lower checkpoint_minutes"
            )
        same = (self.words, self.folder, self.threads, self.processes, self.seconds)
        return DelayedSubmission(RunJob(*same, vain, self.patience))

    def _waited(self, how: int = 0) -> bool:
        """True if the run's process has ended, once it has; `__call__` still waits for it itself.

        Raises ChildProcessError once it was waited for.
        """
        assert self.process is not None, "it was started"
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | how) is not None

    def _interrupt(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.kill(self.process.pid, signal.SIGINT)


CellJob = RunJob  # in the pickles of jobs that an earlier version left in the queue


class _Queue:
    """Slurm's state of this user's jobs, queried at most every few seconds."""

    def __init__(self) -> None:
        self.tried = self.answered = -math.inf
        self.states: dict[str, tuple[str, str]] = {}  # job -> state and reason

    def state(self, job: str, since: float) -> tuple[str, str] | None:
        """State and reason of a job, ("", "") if Slurm knows it no more; None if it has not answered after `since`."""
        if time.monotonic() - self.tried > _LOOK_SECONDS:
            self._ask()
        return None if self.answered <= since else self.states.get(job, ("", ""))

    def _ask(self) -> None:
        self.tried = time.monotonic()
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r"]
        with contextlib.suppress(subprocess.SubprocessError, OSError):  # its controller is away: what was known stays
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
            lines = [line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
            self.states = {job: (state, reason) for job, state, reason in lines}
            self.answered = self.tried


def interrupt_job(folder: Path) -> bool:
    """Interrupt the job that has the run in `folder`, or take it out of the queue; False if Slurm has none."""
    path = folder / RECORD
    if not path.exists() or shutil.which("squeue") is None:
        return False
    job = _SlurmJob(str(read_json(path, AFRESH)["job"]), folder, _Queue(), -math.inf)
    if job.queue.state(job.job, job.since) is None or not job.alive():
        return False
    job.interrupt()
    return True


class SlurmBackend(Backend):
    """Slurm's queue: each run is a job, which Slurm starts when it has room."""

    late_seconds = _LATE_SECONDS

    def __init__(self, settings: SlurmSettings, workers: int) -> None:
        self.settings, self.workers = settings, workers
        self.queue = _Queue()

    def known(self, job: Job) -> Started | None:
        path = job.folder / RECORD
        if not path.exists():
            return None
        run = _SlurmJob(str(read_json(path, AFRESH)["job"]), job.folder, self.queue, -math.inf)
        return run if run.alive() else None

    def start(self, job: Job, slot: int) -> Started:
        from submitit import SlurmExecutor

        parameters = self.settings.parameters(job)
        seconds_to_warning = 60 * self.settings.minutes - self.settings.warning_seconds
        patience = self.settings.warning_seconds * _OF_THE_WARNING
        run = RunJob(job.words, job.folder, job.threads, job.processes, seconds_to_warning, patience=patience)
        try:
            with _outside_of_jobs(), contextlib.redirect_stderr(io.StringIO()):  # submitit prints what is raised too
                executor = SlurmExecutor(folder=job.folder / "slurm", max_num_timeout=_REQUEUES)
                executor.update_parameters(**parameters)
                submitted = executor.submit(run)
        except Exception as error:  # submitit's, Slurm's and the system's share no class
            text = _message(error)
            if _LATER.search(text):
                raise TryLater(f"Slurm takes no job for now: {text}") from error
            raise OSError(f"Slurm did not take the job of {job.title}: {text}") from error
        write_json(job.folder / RECORD, {"job": submitted.job_id})
        return _SlurmJob(submitted.job_id, job.folder, self.queue, time.monotonic())

    def interrupt(self, runs: Sequence[Started]) -> None:
        _interrupt_jobs(_jobs_of(runs))

    def kill(self, runs: Sequence[Started]) -> None:
        _scancel(_jobs_of(runs))


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Without what Slurm tells the job that this process may be of."""
    own = {
        name: value for name, value in os.environ.items() if name.startswith(_OF_A_JOB) and name not in _OF_THE_CLUSTER
    }
    for name in own:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(own)


class _SlurmJob(Started):
    def __init__(self, job: str, folder: Path, queue: _Queue, since: float) -> None:
        self.job, self.folder, self.queue, self.since = job, folder, queue, since
        self.ended: float | None = None  # when Slurm was first heard to have ended it

    def alive(self) -> bool:
        """True if Slurm runs it or is going to; true until it has answered."""
        known = self.queue.state(self.job, self.since)
        return known is None or known[0] in _ALIVE

    def poll(self) -> int | None:
        known = self.queue.state(self.job, self.since)
        if known is None or known[0] in _ALIVE:
            self.note = "" if known is None or known[0] == "RUNNING" else f"{known[0].lower()} in Slurm: {known[1]}"
            self.ended = None
            return None
        state, reason = known
        self.ended = self.ended or time.monotonic()
        code = self._result()
        if code is None and time.monotonic() - self.ended < _LATE_SECONDS:
            return None
        if code is not None and code < 0 and state == "OUT_OF_MEMORY":
            self.message = f"Slurm ended job {self.job}: {state}: raise hydra.launcher.memory_gb"
        if code is None:
            why = "" if reason in ("", "None") else f" ({reason})"
            self.message = f"Slurm ended job {self.job}: {state or 'the job is no longer listed'}{why}"
        return 1 if code is None else code

    def _result(self) -> int | None:
        """The exit status of the run's process, if the job came to its end."""
        from submitit import SlurmJob

        job = SlurmJob(self.folder / "slurm", self.job)
        if not job.paths.result_pickle.exists():
            return None
        try:
            return int(job.result())
        except Exception as error:
            self.message = f"job {self.job} could not start the run: {_message(error)}"
            return 1

    def interrupt(self) -> None:
        _interrupt_jobs([self.job])

    def kill(self) -> None:
        _scancel([self.job])

    def gone(self) -> bool:
        return not self.alive()


def _jobs_of(runs: Sequence[Started]) -> list[str]:
    return [run.job for run in runs if isinstance(run, _SlurmJob)]


def _interrupt_jobs(jobs: Sequence[str]) -> None:
    _scancel(jobs, "--state=PENDING")
    _scancel(jobs, "--signal=INT")


def _scancel(jobs: Sequence[str], *options: str) -> None:
    if not jobs:
        return  # without a number scancel takes every job of this user that fits its options
    with contextlib.suppress(subprocess.SubprocessError, OSError):  # it has ended, or its controller is away
        subprocess.run(["scancel", "--quiet", *options, *jobs], capture_output=True, timeout=60)


def _message(error: Exception) -> str:
    """The output of sbatch, its lines joined; of an error on a node the last line of its traceback."""
    text = str(error).partition(_RULE)[2].partition(_RULE)[0] or str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("sbatch: error: ")]
    return ": ".join(errors) or (lines[-1] if lines else type(error).__name__)


class SlurmRunLauncher(RunLauncher):
    """The work of the launcher `slurm`. `at_once`: how many jobs are in the queue or run; None for all."""

    elsewhere = True

    def __init__(
        self,
        at_once: int | None,
        grace_seconds: float,
        silent_minutes: float | None,
        processes: int = 1,
        **settings: Any,
    ) -> None:
        super().__init__(grace_seconds, silent_minutes, processes)
        self.at_once, self.settings = at_once, SlurmSettings(**settings)
        require_gpus_for(processes, self.settings.gpus)

    def backend(self, name: str, jobs: Sequence[Job], runs: Sequence[PlannedRun]) -> Backend:
        workers = self.workers_for(runs)
        try:
            import submitit  # noqa: F401
        except ImportError as error:
            raise ValueError("hydra/launcher=slurm needs submitit: pip install 'grpo-lab[slurm]'") from error
        if missing := [name for name in ("sbatch", "srun", "squeue", "scancel") if shutil.which(name) is None]:
            raise ValueError(
                f"hydra/launcher=slurm needs {', '.join(missing)}, which {os.uname().nodename} lacks: start the sweep "
                "on a machine that submits to Slurm"
            )
        return SlurmBackend(self.settings, workers)

    def workers_for(self, runs: Sequence[PlannedRun]) -> int:
        require_at_least_one("at_once", self.at_once, "null puts all runs into the queue")
        return self.at_once or max(1, len(runs))
