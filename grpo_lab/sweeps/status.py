"""The state of sweeps and single runs, read from their folders without disturbing them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_lab.config.design import read_design
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.progress import clock
from grpo_lab.tracking.run_reader import (
    activity_of,
    first_evaluation_seconds,
    has_ended,
    is_held,
    parse_line,
    run_status,
    saved_step,
    stage_seconds,
    was_exhausted,
    was_interrupted,
    was_stopped,
)
from grpo_lab.tracking.sweep_record import FILE, RunEntry, read_sweep, sweep_folder

TUNING = "tuning"  # the runs_dir of trials, within that of their sweep
STATES = ("done", "running", "waiting", "interrupted", "stopped", "failed")
_NAMED = 20  # sweeps and runs in a message
_CHUNK = 1 << 16  # bytes read at a time from the end of a log
_HELD_OUT = "eval/heldout/accuracy"


@dataclass(frozen=True)
class RunStatus:
    """A run as its folder shows it; None where it has logged nothing of the kind.

    `state`: one of STATES. `waiting` has not begun, or waits in a cluster's queue; `stopped` is by `grpo-lab stop`, and
    `interrupted` by Ctrl-C or a kill.
    """

    title: str
    folder: Path
    state: str
    step: int | None = None
    share: float | None = None  # of its budget
    reward: float | None = None
    heldout: float | None = None  # accuracy in the latest evaluation
    ungraded: float | None = None  # share of responses that the grader failed on; None for none
    seconds_left: float | None = None
    reason: str = ""  # why it failed, or ended before its budget was spent; where it goes on
    activity: str = ""  # what it is doing, where that takes long

    def is_called(self, name: str) -> bool:
        """True if a user means this run: by its title, its folder or the folder's name."""
        return name in (self.title, self.folder.parent.name) or Path(name).absolute() == self.folder.absolute()

    @property
    def line(self) -> str:
        """`running  base seed=0   step   12   34%  reward 0.41  held-out 0.52  3m07s left`."""
        words = [f"{self.state:<11} {self.title:<40}"]
        if self.step is not None:
            words.append(f"step {self.step:>4}")
        if self.share is not None and self.state != "done":
            words.append(f"{self.share:4.0%}")
        words += [
            f"{name} {value:.3f}"
            for name, value in (("reward", self.reward), ("held-out", self.heldout), ("ungraded", self.ungraded))
            if value is not None
        ]  # fmt: skip
        if self.seconds_left is not None:
            words.append(f"{clock(self.seconds_left)} left")
        return "  ".join([*words, *filter(None, (self.activity, self.reason))]).rstrip()


def sweep_names(runs_dir: Path) -> list[str]:
    """The sweeps recorded in a folder of runs, the latest last."""
    found = sorted((runs_dir / "sweeps").glob(f"*/{FILE}"), key=lambda path: path.stat().st_mtime)
    return [path.parent.name for path in found]


def status_lines(runs_dir: Path, name: str | None = None) -> list[str]:
    """A line for each sweep and each single run that is not done; with `name`, each run of that sweep, or that run.

    Raises ValueError if there is none.
    """
    sweeps, single = sweep_names(runs_dir), single_runs(runs_dir)
    if not sweeps and not single:
        raise ValueError(f"no run is recorded in {runs_dir}: start one, or name its folder with --runs")
    named = [run for run in single if name is not None and run.is_called(name)]
    if name is not None and not named and name not in sweeps:
        known = ", ".join([*sweeps, *(run.title for run in single)][:_NAMED])
        raise ValueError(f"there is no sweep or run {name!r} in {runs_dir}; there are: {known}")
    lines = [run.line for run in named]
    for sweep in (one for one in sweeps if name in (None, one)):
        for title, runs, planned in stages_of_sweep(runs_dir, sweep):
            lines += [summary(title, runs, planned), *(f"  {run.line}" for run in runs if name is not None)]
    if name is None and single:
        lines += [summary("single runs", single), *(f"  {run.line}" for run in single if run.state != "done")]
    return lines


def single_runs(runs_dir: Path) -> list[RunStatus]:
    """The runs in a folder of runs that belong to no sweep there, as `<name> <seed>`, the latest last."""
    records = [read_sweep(sweep_folder(runs_dir, name)) for name in sweep_names(runs_dir)]
    of_sweeps = {runs_dir / entry.folder for record in records for entry in record.runs}
    locks = sorted(runs_dir.glob("*/seed=*/.lock"), key=lambda path: path.stat().st_mtime)
    folders = [path.parent for path in locks if path.parent not in of_sweeps]
    return [status_of_run(folder, f"{folder.parent.name} {folder.name}") for folder in folders]


def runs_of_sweep(runs_dir: Path, name: str) -> list[RunStatus]:
    """Every run of a sweep in the order of its record. Raises ValueError if there is no such sweep."""
    record = read_sweep(sweep_folder(runs_dir, name))
    return [status_of_run(runs_dir / entry.folder, title_of(entry)) for entry in record.runs]


def find_run(named: str, runs_dir: Path, sweep: str | None, running: bool = False) -> Path:
    """The folder of a run: `wanted` itself, a run of this title in a sweep (default: the latest), or a single run.

    `running`: of several with one title the one that runs is meant. Raises ValueError that lists what there is.
    """
    if (Path(named) / ".lock").is_file():
        return Path(named)
    known = sweep_names(runs_dir)
    name = sweep or (known[-1] if known else None)
    runs = runs_of_sweep(runs_dir, name) if name else []
    single = [] if sweep else single_runs(runs_dir)
    found = [run for run in runs if run.title == named] or [run for run in single if run.is_called(named)]
    if running and len(found) > 1:  # of one name and several seeds
        found = [run for run in found if run.state == "running"]
    if len(found) != 1:
        known = [run.title for run in (*runs, *single) if not running or run.state == "running"]
        which = "several runs are called so" if found else f"there is no run {named!r}"
        where = f"in the sweep {name} or by itself" if name and not sweep else f"in {name or runs_dir}"
        raise ValueError(
            f"{which} {where}; {'running are' if running else 'there are'}: {', '.join(known[:_NAMED]) or 'none'}"
        )
    return found[0].folder


def stages_of_sweep(runs_dir: Path, name: str) -> list[tuple[str, list[RunStatus], int]]:
    """The title, the runs and the planned number of the sweep's tuning, where it has one, and of the sweep itself.

    Raises ValueError if there is no such sweep.
    """
    runs = runs_of_sweep(runs_dir, name)
    declared = read_sweep(sweep_folder(runs_dir, name)).design
    design = None if declared is None else read_design(declared)
    tuning = design and design.tuning
    if not design or not tuning or not (sweep_folder(runs_dir / TUNING, name) / FILE).exists():
        return [(name, runs, len(runs))]
    trials = runs_of_sweep(runs_dir / TUNING, name)
    now = design.chosen()
    arms = len(now.arms) * len(now.levels)
    planned = max(arms * tuning.trials * len(tuning.seeds), len(trials))
    return [(f"{name}, tuning", trials, planned), (name, runs, len(runs) or arms * len(now.seeds))]


def title_of(entry: RunEntry) -> str:
    """Arm, level and seed, as the sweep's own lines have them."""
    return " ".join(filter(None, (entry.arm, entry.level, f"seed={entry.seed}")))


def status_of_run(folder: Path, title: str) -> RunStatus:
    """The run in `folder`; a damaged log shows as a reason, not as an error."""
    state, reason = _state(folder)
    runs = state == "running"
    activity = activity_of(folder) if runs else ""
    try:
        return RunStatus(title, folder, state, **_progress(folder, runs), reason=reason, activity=activity)
    except (ValueError, OSError) as error:
        return RunStatus(title, folder, state, reason=reason or str(error))


def _state(folder: Path) -> tuple[str, str]:
    note_text = ""
    if (note := folder / "error.txt").exists() and not (folder / "DONE").exists():
        note_text = note.read_text(errors="replace").partition("\n")[0]
    if has_ended(folder):
        return "done", note_text if was_exhausted(folder) else ""
    if is_held(folder):
        return "running", ""
    saved = saved_step(folder)
    goes_on = "" if saved is None else f"resumes from step {saved}"
    if was_stopped(folder):
        return "stopped", goes_on
    if note_text and not was_interrupted(folder):
        return "failed", note_text
    # A killed run leaves no word behind.
    return ("waiting", "") if run_status(folder) == "new" else ("interrupted", goes_on)


def _progress(folder: Path, running: bool) -> dict[str, Any]:
    """Step, share, reward and held-out accuracy as last logged, and the time left of a run that goes on."""
    log = folder / "metrics.jsonl"
    found: dict[str, Any] = {}
    for line in _from_the_end(log):
        record = parse_line(line, log)
        metrics = record["metrics"]
        found.setdefault("step", record["step"])
        if "reward/mean" in metrics:
            found.setdefault("reward", metrics["reward/mean"])
            found.setdefault("ungraded", metrics.get("rollout/ungraded") or None)
        if "share" not in found:
            found["share"] = _share(folder, metrics)
        if _HELD_OUT in metrics:
            found["heldout"] = metrics[_HELD_OUT]
            break
    if running and found.get("step") and (share := found.get("share")):
        found["seconds_left"] = _left(folder, found["step"], share)
    return found


def _share(folder: Path, metrics: dict[str, Any]) -> float | None:
    config = read_json(folder / "run.json", AFRESH).get("config", {})
    amount = config.get("budget.amount")
    spent = metrics.get(f"budget/{str(config.get('budget.axis', '')).rpartition('.')[2].lower()}")
    return None if not amount or spent is None else min(1.0, spent / float(amount))


def _left(folder: Path, step: int, share: float) -> float | None:
    """Seconds until the budget is spent and evaluated, from what the stages of the steps that count took.

    The time between two attempts at the run, and steps that were computed again, are no part of its speed.
    """
    path, seconds, wall = folder / "timing.jsonl", dict[int, float](), 0
    for line in path.read_bytes().rpartition(b"\n")[0].splitlines():  # the last may be being written
        record = parse_line(line, path)
        if 0 < record["step"] <= step:
            seconds[record["step"]], wall = stage_seconds(record["timing"]), record["wall"]
    with (folder / "metrics.jsonl").open("rb") as stream:
        before = _share(folder, parse_line(stream.readline(), folder / "metrics.jsonl")["metrics"]) or 0.0
    taken = sum(seconds.values())
    if taken <= 0 or share <= before:
        return None
    begun = (folder / ".lock").stat().st_mtime  # of this attempt
    since = max(0.0, time.time() - max(wall / 1000, begun))  # the last line was written
    return max(0.0, taken / (share - before) * (1 - share) + first_evaluation_seconds(folder) - since)


def _from_the_end(path: Path) -> Iterator[bytes]:
    """The complete lines of a file, the last first, read no further back than is asked for."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        position, rest, ended = stream.seek(0, os.SEEK_END), b"", False
        while position > 0:
            start = max(0, position - _CHUNK)
            stream.seek(start)
            rest, *lines = (stream.read(position - start) + rest).split(b"\n")  # the first may begin further back
            position = start
            if lines and not ended:
                lines.pop()  # nothing, or a line that is being written
                ended = True
            yield from reversed(lines)
        if ended:
            yield rest


def summary(name: str, runs: Sequence[RunStatus], planned: int | None = None) -> str:
    """`dapo: 3 of 9 done, 2 running, 1 failed`; of `planned`, where more follow than those that are known."""
    counts = Counter(run.state for run in runs)
    others = [f"{counts[state]} {state}" for state in STATES if state != "done" and counts[state]]
    return f"{name}: " + ", ".join([f"{counts['done']} of {planned or len(runs)} done", *others])
