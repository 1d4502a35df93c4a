"""`grpo-lab reproduce`: check a record, run it again in a process of its own, and compare."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_lab.reproduce.compare import Compared, compare_runs, last_step
from grpo_lab.reproduce.record import RunRecord, changed_code, check_inputs, check_repeatable, code_name, read_record
from grpo_lab.sweeps.child import THREAD_VARIABLES, open_run_process
from grpo_lab.sweeps.jobs import Job, run_jobs
from grpo_lab.sweeps.local import LocalBackend, LocalProcess
from grpo_lab.sweeps.progress_display import ProgressDisplay
from grpo_lab.tracking.checksums import read_json
from grpo_lab.tracking.run_reader import StepReader, has_ended

_MODULE = "grpo_lab.reproduce.again"
_GRACE_SECONDS = 60.0  # from Ctrl-C until it is killed
Say = Callable[[str], object]


@dataclass(frozen=True)
class Reproduced:
    """Where the second run lies, and what comparing it with the first one found."""

    folder: Path
    compared: Compared


def reproduce(run_folder: Path, to: Path, steps: int | None, say: Say) -> Reproduced:
    """Run the run in `run_folder` again under `to`, and compare all of it, or its first `steps`.

    A second run that was interrupted goes on; one that has ended is compared as it is. Nothing in `run_folder` changes.
    Raises ValueError with a remedy where it cannot be repeated, or where the second run fails.
    """
    record = read_record(run_folder)
    for line in check_repeatable(record, steps):
        say(line)
    to = to.expanduser().absolute()
    folder = to / record.name / record.folder.name
    if record.folder == folder or record.folder in to.parents or to == record.folder:
        raise ValueError(f"--to {to} is where the run itself lies: choose another folder")
    if steps is not None:
        logged = last_step(record.folder)
        if steps > logged:
            raise ValueError(f"--steps {steps}: {record.folder} has logged {logged} steps; give at most as many")
    check_inputs(record)
    _say_code(record, steps, say)
    if has_ended(folder):
        say(f"the second run is in {folder} already; to run it again, move that folder away")
    else:
        say(f"running it again in {folder}")
        _run(record, to, folder, steps)
    return Reproduced(folder, compare_runs(record.folder, folder, steps))


def _say_code(record: RunRecord, steps: int | None, say: Say) -> None:
    if changed := changed_code(record, steps):
        say(
            f"the code is not the one that computed this run ({', '.join(changed)}), so bits may differ. Remedy: go "
            f"back to {code_name(record.code_of(steps))} and its packages"
        )
    if record.device != "cpu":
        say("it ran on a GPU, where sums may round otherwise from run to run: expect a table, not equal bits")
    if record.run.engine.overlaps:
        say("its engine samples in a process beside training, so which weights sampled what may differ: expect a table")


def _run(record: RunRecord, to: Path, folder: Path, steps: int | None) -> None:
    """Run it, to its end or until its log has that number of steps. Raises ValueError if it gets neither so far."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "base.json").exists():  # so that it is refused with another model or teacher than the first had
        shutil.copyfile(record.folder / "base.json", folder / "base.json")
    budget = record.run.budget
    words = (str(record.folder), str(to))
    title = f"{record.name} {record.folder.name}"
    processes = record.processes(steps)
    job = Job(title, words, folder, budget.axis.value, budget.amount, record.run.threads, False, processes)
    place = _Again(_threads(record), steps)
    with ProgressDisplay("reproduce", 1, 0) as display:
        (failure,) = run_jobs([job], place, _GRACE_SECONDS, display)
    if failure is not None and not place.reached:
        raise ValueError(f"the second run failed: {failure}")


def _threads(record: RunRecord) -> dict[str, str]:
    """The variables for threads as the first run had them; those that it did not have follow `threads`."""
    path = record.folder / "environment.json"
    known = read_json(path, "restore it from a copy")["threads"] if path.exists() else {}
    return {name: str(known[name]) for name in THREAD_VARIABLES if name in known}


class _Again(LocalBackend):
    """This machine, with the environment of the first run. `reached`: it was stopped since it had enough steps."""

    def __init__(self, variables: dict[str, str], steps: int | None) -> None:
        super().__init__(1, [])
        self.variables, self.steps, self.reached = variables, steps, False

    def start(self, job: Job, slot: int) -> LocalProcess:
        process = open_run_process(job.words, job.folder, job.threads, self.variables, job.processes, _MODULE)
        return _Until(process, self, job.folder)


class _Until(LocalProcess):
    """A process that is interrupted once its log has enough steps, which says the same of them as a whole run."""

    def __init__(self, process: subprocess.Popen, place: _Again, folder: Path) -> None:
        super().__init__(process)
        self.place, self.steps = place, StepReader(folder)

    def poll(self) -> int | None:
        """As for any run; a look at the log on the way."""
        enough = self.place.steps
        found = [] if enough is None or self.place.reached else self.steps.poll()
        if enough is not None and any(record.step >= enough for record in found):
            self.place.reached = True
            self.interrupt()
        return super().poll()
