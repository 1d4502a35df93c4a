"""A sweep from its command line to its last run: declare, expand, check everything, start, report.

Hydra calls it through two thin classes in the `hydra_plugins` namespace.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from grpo_lab.analysis.effects.manipulation_checks import ManipulationCheck
from grpo_lab.config.additions import as_typed
from grpo_lab.config.design import Design, Match, read_design, require_known_metrics
from grpo_lab.config.run_config import unresolved
from grpo_lab.sweeps.ablation import exploratory
from grpo_lab.sweeps.estimate import estimate_lines, estimates
from grpo_lab.sweeps.matching import Matching, plan_matching, record_matching, run_matching, show_matching
from grpo_lab.sweeps.pilot import pilot_runs, run_pilot, show_pilot
from grpo_lab.sweeps.planned_runs import (
    Plan,
    PlannedRun,
    compose_runs,
    folders_of,
    overrides_for,
    plan_runs,
    refuse_no_op_arms,
    share_runs,
    sweep_name,
)
from grpo_lab.sweeps.results import sweep_results
from grpo_lab.sweeps.tuning import Search, plan_tuning, run_tuning, show_tuning
from grpo_lab.tracking import provenance
from grpo_lab.tracking.checksums import AFRESH, read_json
from grpo_lab.tracking.mlflow_parent import announce_sweep
from grpo_lab.tracking.progress import clock
from grpo_lab.tracking.run_reader import has_ended, run_status, was_exhausted, was_stopped
from grpo_lab.tracking.sweep_record import record_sweep
from grpo_lab.tracking.terminal import Terminal, printable, say


@dataclass(frozen=True)
class SweepSettings:
    """The settings of `hydra.sweeper`: dry run, pilot, its share of the budget.

    `run_no_ops` runs also the arms whose manipulation check failed in the pilot.
    `add` and `leave_one_out` hold the additions of an ablation from the shell, overrides or lists of them.
    """

    dry_run: bool
    pilot: bool
    pilot_share: float
    run_no_ops: bool
    add: Sequence[str | Sequence[str]] = ()
    leave_one_out: Sequence[str | Sequence[str]] = ()
    run_inert: bool | None = None  # the name of `run_no_ops` before

    @property
    def runs_no_ops(self) -> bool:
        return self.run_no_ops if self.run_inert is None else self.run_inert


class SweepFailed(SystemExit):
    """Some runs failed or were stopped; the message lists them, and the exit status is 1."""


@contextlib.contextmanager
def errors_as_messages() -> Iterator[None]:
    """Turn errors that a user can fix, and Ctrl-C, into a message and an exit status without a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        say("interrupted: re-run the same command to resume", error=True)
        sys.exit(130)
    except (ValueError, OSError) as error:
        if os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        sys.exit(printable(f"error: {error}"))


def run_sweep(
    config: DictConfig, arguments: Sequence[str], compose: Any, launcher: Launcher, settings: SweepSettings
) -> list[JobReturn]:
    """Execute every unfinished run and return the launcher's results.

    `config` is the sweep's own composed configuration, and `arguments` its overrides as typed. `compose` turns a
    run's overrides into its configuration. Raises ValueError before anything starts, SweepFailed at the end.
    """
    console = Terminal()
    design, declared, arguments = _declaration(config, arguments, settings)
    if design is not None:
        require_known_metrics(design)
    name = sweep_name(design, arguments)
    runs_dir = Path(config.runs_dir).expanduser().absolute()

    def launch(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        expect = getattr(launcher, "expect", None)
        if expect is not None:
            expect(title, todo, finished)
        return (
            list(launcher.launch([overrides_for(planned, name) for planned in todo], initial_job_idx=0)) if todo else []
        )

    plans, search, settled = plan_runs(design, arguments), None, _as_it_is
    if design is not None and design.tuning is not None:
        search = plan_tuning(design, arguments, name, compose, runs_dir)
        if settings.dry_run:
            show_tuning(console, search)
        elif search.open():
            _tune(console, search, design, declared, launch)
        settled = search.settled()
        plans = [settled(plan) for plan in plans]
    if design is not None and design.match is not Match.none:
        matching = plan_matching(design, arguments, name, compose, runs_dir, settings.pilot_share)
        if settings.dry_run:
            show_matching(console, matching)
        else:
            _match(console, matching, declared, launch)
        settled = matching.settled()
        plans = [settled(plan) for plan in plans]
    composed = compose_runs(plans, name, compose)
    pilots: list[PlannedRun] = []
    if design is not None:
        if search is None:  # else checked before its first trial
            refuse_no_op_arms(design, composed)
        if settings.pilot:
            pilots = pilot_runs(design, arguments, name, composed, compose, settings.pilot_share, settled)
    axis = design.axis if design else ""
    if settings.dry_run:
        _show(console, name, share_runs(composed, axis), pilots, runs_dir, launcher)
        return []
    planned_runs = share_runs(composed, axis)
    found: list[ManipulationCheck] = []
    if design is not None and pilots and any(not has_ended(planned.folder) for planned in planned_runs):
        _resolve_models(pilots)
        found = run_pilot(pilots, name, design, declared, lambda todo: launch(f"{name}, pilot", todo, 0))
        show_pilot(console, name, found, Path(pilots[0].run.runs_dir))
        if not settings.runs_no_ops:
            planned_runs = share_runs(_without_no_ops(console, design, composed, found), axis)
    runs = [planned for planned in planned_runs if not planned.same_as]
    finished = [planned for planned in runs if has_ended(planned.folder)]
    todo = [planned for planned in runs if not has_ended(planned.folder)]
    _resolve_models(todo)
    tracking = composed[0].run.tracking.record()
    uri = None if tracking is None else tracking["uri"]
    folder = record_sweep(
        runs_dir,
        name,
        [planned.record() for planned in planned_runs],
        None if design is None else folders_of(design, arguments, settled),
        declared,
        "" if design is None or design.exploratory else design.fingerprint(),
        as_typed(provenance.typed()),
        provenance.commit(),
        tracking,
        starts=bool(todo),
        pilot=[asdict(check) for check in found],
        tuning=[asdict(one) for one in search.chosen()] if search else (),
    )
    _say_whose(console, name, finished)
    _say_shared(console, planned_runs)
    if planned_runs and not todo:
        console.say(f"{name}: all {len(planned_runs)} runs are finished")
    if todo:
        announce_sweep(folder, True, uri)
    ended = None
    try:
        returns = launch(name, todo, len(finished))
        ended = sweep_results
    finally:  # an interrupted sweep waits for no verdict
        announce_sweep(folder, False, uri, ended)
    _report(name, todo, returns)
    _say_exhausted(console, runs)
    if planned_runs:
        _show_results(console, runs_dir, name)
        draw = shlex.join(["grpo-lab", "figures", name, "--runs", str(config.runs_dir)])
        console.say(f"draw it: {draw}")
    return returns


def _as_it_is(plan: Plan) -> Plan:
    return plan


def _tune(
    console: Terminal, search: Search, design: Design, declared: Any, launch: Callable[..., list[JobReturn]]
) -> None:
    """Record what is declared before the first trial, then run the trials that lack."""
    fingerprint, command, commit = design.fingerprint(), provenance.typed(), provenance.commit()
    record_sweep(search.runs_dir, search.name, [], None, declared, fingerprint, command, commit, None)

    def start(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        _resolve_models(todo)
        return launch(title, todo, finished)

    run_tuning(console, search, start)


def _match(console: Terminal, matching: Matching, declared: Any, launch: Callable[..., list[JobReturn]]) -> None:
    """Run the pilots of matched arms that lack, and record the learning rates that they give."""

    def start(title: str, todo: Sequence[PlannedRun], finished: int) -> list[JobReturn]:
        _resolve_models(todo)
        return launch(title, todo, finished)

    if any(place not in matching.found() for place in matching.matched):
        record_matching(matching, run_matching(console, matching, start), declared)


def _resolve_models(runs: Sequence[PlannedRun]) -> None:
    """Build or find every base model once, instead of in all first runs at the same moment."""
    models = {repr(planned.run.model): planned.run.model for planned in runs if not has_ended(planned.folder)}
    for model in models.values():
        model.resolve()


def _without_no_ops(
    console: Terminal, design: Design, runs: Sequence[PlannedRun], found: Sequence[ManipulationCheck]
) -> list[PlannedRun]:
    """The runs without those whose manipulation check failed in the pilot; none if only the control is left."""
    failed = {(check.level, check.arm) for check in found if not check.passed}
    left = [planned for planned in runs if (planned.plan.level, design.plain_of(planned.plan.arm)) not in failed]
    if len(left) == len(runs):
        return left
    if all(planned.plan.arm == design.control for planned in left):
        left = []
    console.say(
        f"{len(runs) - len(left)} of {len(runs)} runs are left out: their manipulation check failed in the pilot. "
        "Remedy: another regime, such as more updates a batch or a higher rate; a longer pilot "
        "(hydra.sweeper.pilot_share); or hydra.sweeper.run_no_ops=true, which runs them all the same",
    )
    return left


def _say_shared(console: Terminal, runs: Sequence[PlannedRun]) -> None:
    for planned in runs:
        if planned.same_as:
            console.say(f"{planned.plan.title} is the same run as {planned.same_as}: it runs once")


def _say_exhausted(console: Terminal, runs: Sequence[PlannedRun]) -> None:
    """Print which runs ended before their budget; to try one again, its folder must go."""
    for planned in (planned for planned in runs if was_exhausted(planned.folder)):
        why = (planned.folder / "error.txt").read_text(errors="replace").partition("\n")[0]
        console.say(f"{planned.plan.title} ended before its budget was spent: {why}")


def _declaration(
    config: DictConfig, arguments: Sequence[str], settings: SweepSettings
) -> tuple[Design | None, Any, Sequence[str]]:
    """The design, the entries that it is read from, and the arguments for its runs."""
    if additions := settings.add or settings.leave_one_out:
        kind = "add" if settings.add else "leave_one_out"
        declared, arguments = exploratory(kind, additions, arguments, config)
    else:
        declared = _declared(config)
    return None if declared is None else read_design(declared), declared, arguments


def _declared(config: DictConfig) -> Any:
    """The entry `design` in plain values, with what it refers to in place; None where there is none."""
    if config.get("design") is None:
        return None
    if not isinstance(config.design, DictConfig):
        raise ValueError(f"design is {config.design!r}: a declaration has entries, see experiments/declare.md")
    try:
        return OmegaConf.to_container(config.design, resolve=True)
    except InterpolationResolutionError as error:
        raise ValueError(unresolved(config, error)) from error


def _say_whose(console: Terminal, name: str, finished: Sequence[PlannedRun]) -> None:
    """Print which finished runs ran under another sweep, their one parent in MLflow; the charts of both show them."""
    elsewhere = [planned for planned in finished if _sweep_of(planned) != name]
    if elsewhere:
        titles = ", ".join(
            f"{planned.plan.title} ({_sweep_of(planned) or 'a run on its own'})" for planned in elsewhere
        )
        line = f"finished before under another sweep, and in MLflow's charts of both: {titles}"
        console.say(line)


def _sweep_of(planned: PlannedRun) -> str:
    return read_json(planned.folder / "run.json", AFRESH)["tags"].get("sweep", "")


def _show(
    console: Terminal,
    name: str,
    planned_runs: Sequence[PlannedRun],
    pilots: Sequence[PlannedRun],
    runs_dir: Path,
    launcher: Launcher,
) -> None:
    left = estimates(planned_runs, pilots, name, runs_dir)
    expected = {one.planned.plan.title: one for one in left}

    def line_of(planned: PlannedRun, word: str, about: str = "") -> None:
        shared = f"  same run as {planned.same_as}" if planned.same_as else ""
        line = f"  {word:<8} {planned.plan.title:<44} {about}{planned.record().folder}{shared}"
        console.say(line)

    runs = sum(not planned.same_as for planned in planned_runs)
    once = "" if runs == len(planned_runs) else f", which are {runs} runs"
    console.say(f"{name}: {len(planned_runs)} runs{once}; none is started")
    for planned in planned_runs:
        one = expected.get(planned.plan.title)
        about = "" if one is None or math.isnan(one.seconds) else f"about {clock(one.seconds)}  "
        line_of(planned, run_status(planned.folder), about)
    if pilots:
        amount = f"{pilots[0].run.budget.amount:g} {pilots[0].run.budget.axis.value}"
        line = f"pilots, before the first run, of {amount}, in {pilots[0].run.runs_dir}:"
        console.say(line)
    for planned in pilots:
        line_of(planned, run_status(planned.folder))
    at_once = getattr(launcher, "at_once", None)
    for line in estimate_lines(left, 1 if at_once is None else at_once([one.planned for one in left])):
        console.say(line)
    if any(not planned.same_as and not has_ended(planned.folder) for planned in pilots) and left:
        console.say("  the pilots come on top of that")


def _report(name: str, runs: Sequence[PlannedRun], returns: Sequence[JobReturn]) -> None:
    failed = [
        (planned, result) for planned, result in zip(runs, returns, strict=True) if result.status != JobStatus.COMPLETED
    ]
    if not failed:
        return
    stopped = [(planned, result) for planned, result in failed if was_stopped(planned.folder)]
    failed = [(planned, result) for planned, result in failed if not was_stopped(planned.folder)]
    lines = []
    for some, text in (
        (failed, f"error: {len(failed)} of {len(runs)} runs of {name} failed; the same command retries them:"),
        (stopped, f"{len(stopped)} of {len(runs)} runs of {name} were stopped; the same command resumes them:"),
    ):
        lines += (
            [text, *(f"  {planned.plan.title}: {result._return_value}" for planned, result in some)] if some else []
        )
    raise SweepFailed(printable("\n".join(lines)))


def _show_results(console: Terminal, runs_dir: Path, name: str) -> None:
    """Print the table of arms, the verdict in one line, and which tricks were no-ops."""
    from grpo_lab.analysis.caveats import indistinguishable
    from grpo_lab.analysis.effects.arms import arms_table
    from grpo_lab.analysis.effects.manipulation_checks import failed_checks
    from grpo_lab.analysis.final_values import final_values
    from grpo_lab.analysis.sources.run_folders import load_sweep
    from grpo_lab.analysis.tables.headline import headline

    data = load_sweep(runs_dir, name)
    if not data.finished.empty:
        finals = final_values(data)
        say("", *arms_table(data, finals), "", sep="\n", flush=True)
        if judged := headline(data, finals):
            say(f"verdict: {judged}", flush=True)
    lines = [
        f"manipulation check failed: {' '.join(filter(None, (arm, level)))}: {why}"
        for (level, arm), why in failed_checks(data).items()
    ]
    for line in (*lines, *indistinguishable(data)):
        console.say(line)
