"""The pilot of a sweep: short runs that tell, before its first run starts, whether tricks act as required.

Pilots lie in `<runs_dir>/pilots/<code>/`, recorded there under the sweep's name, and are no runs of it. `<code>` is a
digest of the code that they ran: with the same code and declaration they are finished, and made only once.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString

from grpo_lab.analysis.effects.manipulation_checks import ManipulationCheck, manipulation_checks
from grpo_lab.analysis.effects.speed import impossible_gains
from grpo_lab.analysis.final_values import final_values
from grpo_lab.analysis.sources.run_folders import load_sweep
from grpo_lab.config.design import Design, Part
from grpo_lab.sweeps.planned_runs import (
    Compose,
    Plan,
    PlannedRun,
    compose_runs,
    key_of,
    plan_runs,
    share_runs,
    with_overrides,
)
from grpo_lab.tracking import provenance
from grpo_lab.tracking.run_reader import has_ended, was_stopped
from grpo_lab.tracking.sweep_record import record_sweep
from grpo_lab.tracking.terminal import Terminal

_LEFT_OUT = ("parts", "part", "predictions", "changes", "claims")  # of the declaration: a pilot judges nothing
_PLAIN = ("evaluation=brief", "tracking=none")
Start = Callable[[Sequence[PlannedRun]], object]


def pilot_seed(design: Design) -> int:
    """The first number beyond the design's seeds that has its first base."""
    beyond = itertools.count(max(design.seeds) + 1)
    return next(seed for seed in beyond if not design.bases or design.base_of(seed) == design.bases[0])


def pilot_runs(
    design: Design,
    arguments: Sequence[str],
    name: str,
    runs: Sequence[PlannedRun],
    compose: Compose,
    share: float,
    settled: Callable[[Plan], Plan] = lambda plan: plan,
) -> list[PlannedRun]:
    """The arms among `runs` that require something, and their control, of one seed and a `share` of the budget.

    `settled` gives a plan the numbers that its arm is tuned to. None where nothing is required. Raises ValueError for a
    share that is not above 0 and at most 1.
    """
    _require_share(share)
    required = tuple(arm for arm in design.chosen().arms if arm in design.requires)
    if not required:
        return []
    plans = pilot_plans(design, (design.control, *required), arguments, runs, share, settled)
    return share_runs(compose_runs(plans, name, compose))


def pilot_plans(
    design: Design,
    arms: tuple[str, ...],
    arguments: Sequence[str],
    runs: Sequence[PlannedRun],
    share: float,
    settled: Callable[[Plan], Plan] = lambda plan: plan,
) -> list[Plan]:
    """The pilots of these arms, as in `pilot_runs`. Raises ValueError as it does."""
    _require_share(share)
    part = replace(design, parts={"pilot": Part(arms, design.chosen().levels)}, part="pilot")
    words = [word for word in arguments if key_of(word) != "seed"]
    runs_dir = Path(runs[0].run.runs_dir).expanduser().absolute() / "pilots" / _code()
    folder = QuotedString(str(runs_dir), Quote.single).with_quotes()
    # A control that this part leaves out has its level's budget.
    amounts = {planned.plan.level: planned.run.budget.amount for planned in reversed(runs)}
    own = {(planned.plan.level, planned.plan.arm): planned.run.budget.amount for planned in runs}
    plans = []
    for plan in plan_runs(part, [*words, f"seed={pilot_seed(design)}"]):
        amount = own.get((plan.level, plan.arm), amounts[plan.level]) * share
        plans.append(with_overrides(settled(plan), (*_PLAIN, f"budget.amount={amount:.6g}", f"runs_dir={folder}")))
    return plans


def _require_share(share: float) -> None:
    if not 0 < share <= 1:
        raise ValueError(f"hydra.sweeper.pilot_share must be above 0 and at most 1, got {share}: it is a share")


def _code() -> str:
    return hashlib.sha256(json.dumps(provenance.code(), sort_keys=True).encode()).hexdigest()[:12]


def run_pilot(
    runs: Sequence[PlannedRun], name: str, design: Design, declared: Mapping[str, Any], start: Start
) -> list[ManipulationCheck]:
    """Run the unfinished pilots and return what they measured of every requirement.

    Raises ValueError where the control ends within the margin of the ceiling of a predicted gain: it cannot win.

    `start` executes runs. A pilot whose loss was not finite counts with the steps that it had. Raises ValueError where
    another pilot did not finish.
    """
    todo = [planned for planned in runs if not planned.same_as and not has_ended(planned.folder)]
    runs_dir = Path(runs[0].run.runs_dir)
    seed = pilot_seed(design)
    node = {key: value for key, value in declared.items() if key not in _LEFT_OUT} | {"seeds": [seed]}
    node |= {"bases": [design.bases[0]]} if design.bases else {}
    folders = frozenset(planned.folder.parent.name for planned in runs)
    record_sweep(
        runs_dir,
        name,
        [planned.record() for planned in runs],
        folders,
        node,
        design.fingerprint(),
        provenance.typed(),
        provenance.commit(),
        None,
        starts=bool(todo),
    )
    if todo:
        start(todo)
    data = load_sweep(runs_dir, name)
    if len(data.counted) < len(data.runs):
        what = "was stopped" if any(was_stopped(planned.folder) for planned in runs) else "failed"
        raise ValueError(f"no run was started, because a pilot {what} (see {runs_dir}); the same command tries again")
    if impossible := impossible_gains(design, final_values(data)):
        raise ValueError(
            f"no run was started: the pilot's control leaves no headroom for a gain ({'; '.join(impossible)}). "
            "Choose a harder world, a smaller budget, or predict no difference"
        )
    return manipulation_checks(data)


def show_pilot(console: Terminal, name: str, found: Sequence[ManipulationCheck], runs_dir: Path) -> None:
    """Print the manipulation checks."""
    console.say(f"{name}: the pilot ran in {runs_dir}")
    for check in found:
        verdict = "passed" if check.passed else "manipulation check failed"
        where = " ".join(filter(None, (check.arm, check.level)))
        console.say(f"  {verdict:<25} {where}: {check.reason}")
