"""Matched update norms: the learning rate at which an arm's updates are as large as its control's.

Before the first run, pilots measure the mean `train/update_norm` of every arm and of its control at each level. The
rate of a matched arm is scaled by their ratio, tried in a pilot of its own, and corrected while that is off. The
pilots are those of pilot.py, on the same seed and in the same folders. What was found is kept in the sweep's record, so
that a sweep goes on with it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn

from grpo_lab.analysis.sources.matched_norms import TOLERANCE, MatchedNorm, matched_norms, norms_table
from grpo_lab.config.design import Design
from grpo_lab.sweeps.objective import has_settled
from grpo_lab.sweeps.pilot import pilot_plans, pilot_seed
from grpo_lab.sweeps.planned_runs import (
    Compose,
    Plan,
    PlannedRun,
    compose_runs,
    is_hidden,
    key_of,
    plan_runs,
    with_overrides,
)
from grpo_lab.tracking import provenance
from grpo_lab.tracking.run_reader import read_steps, was_stopped
from grpo_lab.tracking.sweep_record import FILE, read_sweep, record_sweep, sweep_folder
from grpo_lab.tracking.terminal import Terminal

RATE = "optimizer.learning_rate"
NORM = "train/update_norm"
_TRIALS = 3  # of a matched learning rate at most; a rate that scales its updates is right at the first
ArmLevel = tuple[str, str]  # level and arm
Launch = Callable[[str, Sequence[PlannedRun], int], Sequence[JobReturn]]


@dataclass(frozen=True)
class Matching:
    """The pilots of a sweep with matched arms: for every level and plain arm its plan, and what is known.

    `rates` are the learning rates that the arms have, `matched` the levels and arms that this command needs, and `keys`
    what the result of each depends on.
    """

    name: str
    design: Design
    plans: Mapping[ArmLevel, Plan]
    rates: Mapping[ArmLevel, float]
    matched: Sequence[ArmLevel]
    keys: Mapping[ArmLevel, str]
    compose: Compose
    runs_dir: Path

    def found(self) -> dict[ArmLevel, MatchedNorm]:
        """The rates in the sweep's record that still hold."""
        folder = sweep_folder(self.runs_dir, self.name)
        known = matched_norms(read_sweep(folder)) if (folder / FILE).exists() else []
        return {(one.level, one.arm): one for one in known if self.keys.get((one.level, one.arm)) == one.key}

    def settled(self) -> Callable[[Plan], Plan]:
        """A function that gives the plan of a matched arm its learning rate, if that is known."""
        rates = {place: one.learning_rate for place, one in self.found().items()}

        def at_its_rate(plan: Plan) -> Plan:
            rate = rates.get((plan.level, plan.arm))
            return plan if rate is None else with_overrides(plan, [f"{RATE}={rate!r}"])

        return at_its_rate


def plan_matching(
    design: Design, arguments: Sequence[str], name: str, compose: Compose, runs_dir: Path, share: float
) -> Matching:
    """Check the runs of a design with matched arms before anything runs. Raises ValueError with a remedy."""
    runs = compose_runs(plan_runs(design, arguments), name, compose)
    matched = list(
        dict.fromkeys((one.plan.level, one.plan.arm) for one in runs if design.plain_of(one.plan.arm) != one.plan.arm)
    )
    arms = tuple(dict.fromkeys((design.control, *(design.plain_of(arm) for _, arm in matched))))
    short = pilot_plans(design, arms, arguments, runs, share)
    plans = {(plan.level, plan.arm): plan for plan in short}
    pilots = compose_runs(short, name, compose)
    rates = {(one.plan.level, one.plan.arm): one.run.optimizer.learning_rate for one in pilots}
    keys = {}
    for level, arm in matched:
        both = [plans[level, one] for one in (design.control, design.plain_of(arm))]
        words = [[word for word in plan.overrides if not is_hidden(key_of(word))] for plan in both]
        keys[level, arm] = hashlib.sha256(json.dumps([words, pilot_seed(design), share]).encode()).hexdigest()[:12]
    return Matching(name, design, plans, rates, matched, keys, compose, runs_dir)


def run_matching(console: Terminal, matching: Matching, launch: Launch) -> list[MatchedNorm]:
    """Run the pilots that lack and return the rates of all matched arms that were not known.

    Raises ValueError where a pilot failed or made no update.
    """
    design, known = matching.design, matching.found()
    open_ = [place for place in matching.matched if place not in known]
    plain = list(dict.fromkeys((level, one) for level, arm in open_ for one in (design.control, design.plain_of(arm))))
    norms = _norms(matching, [matching.plans[place] for place in plain], launch, "pilots")
    # The factor of each twin and the norm that it gave: the latest, from which the next is scaled, and the nearest.
    latest = {(level, arm): (1.0, norms[level, design.plain_of(arm)]) for level, arm in open_}
    nearest = dict(latest)
    for trial in range(_TRIALS):
        target = {place: norms[place[0], design.control] for place in open_}
        off = [place for place in open_ if abs(nearest[place][1] / target[place] - 1) > TOLERANCE]
        if not off:
            break
        factors = {place: latest[place][0] * target[place] / latest[place][1] for place in off}
        tried = [_at_rate(matching, place, factors[place]) for place in off]
        after = _norms(matching, tried, launch, f"trial {trial + 1} of {_TRIALS} at most")
        for place in off:
            latest[place] = factors[place], after[place]
            nearest[place] = min(nearest[place], latest[place], key=lambda one: abs(one[1] / target[place] - 1))
    found = []
    for level, arm in open_:
        of, place = design.plain_of(arm), (level, arm)
        rate = _rate(matching, place, nearest[place][0])
        found.append(
            MatchedNorm(
                level,
                arm,
                of,
                rate / matching.rates[level, of],
                rate,
                norms[level, design.control],
                norms[level, of],
                nearest[place][1],
                pilot_seed(design),
                matching.keys[place],
            )
        )
    console.say("\n".join(["Matched update norms, in the pilot", *norms_table(found)]))
    return found


def record_matching(matching: Matching, found: Sequence[MatchedNorm], declared: Any) -> None:
    """Keep the rates in the sweep's record, before the first run at one of them."""
    entries, design = [asdict(one) for one in found], matching.design
    record_sweep(
        matching.runs_dir, matching.name, [], None, declared, design.fingerprint(), provenance.typed(),
        provenance.commit(), None, matching=entries,
    )  # fmt: skip


def show_matching(console: Terminal, matching: Matching) -> None:
    """Print which learning rates are known, and how many pilots find the others."""
    known = matching.found()
    if lacking := [place for place in matching.matched if place not in known]:
        console.say(
            f"matching, before the first run: {len(matching.plans)} pilots, and up to {_TRIALS} for each of "
            f"{len(lacking)} arms with a matched update norm, which stand below with their plain arm's learning rate"
        )
    if found := [known[place] for place in matching.matched if place in known]:
        console.say("\n".join(["Matched update norms, in the pilot", *norms_table(found)]))


def _rate(matching: Matching, place: ArmLevel, factor: float) -> float:
    level, arm = place
    return float(f"{matching.rates[level, matching.design.plain_of(arm)] * factor:.4g}")


def _at_rate(matching: Matching, place: ArmLevel, factor: float) -> Plan:
    """The pilot of a matched arm at a multiple of its plain arm's learning rate."""
    level, arm = place
    plan = matching.plans[level, matching.design.plain_of(arm)]
    return replace(with_overrides(plan, [f"{RATE}={_rate(matching, place, factor)!r}"]), arm=arm)


def _norms(matching: Matching, plans: Sequence[Plan], launch: Launch, what: str) -> dict[ArmLevel, float]:
    """The mean update norm of each pilot, which is run unless it has ended."""
    runs = compose_runs(plans, matching.name, matching.compose)
    todo = [planned for planned in runs if not has_settled(planned.folder)]
    if todo:
        runs_dir = runs[0].folder.parent.parent
        record_sweep(
            runs_dir, matching.name, [planned.record() for planned in runs], None, None, "", provenance.typed(),
            provenance.commit(), None,
        )  # fmt: skip
        launch(f"{matching.name}, matching, {what}", todo, len(runs) - len(todo))
    norms = {}
    for planned in runs:
        if not has_settled(planned.folder):
            how = "was stopped" if was_stopped(planned.folder) else "failed"
            raise ValueError(
                f"no run was started, because the pilot {planned.plan.title} {how} (see {planned.folder}); the same "
                "command tries again"
            )
        logged = [step.metrics[NORM] for step in read_steps(planned.folder) if NORM in step.metrics]
        norms[planned.plan.level, planned.plan.arm] = mean = math.fsum(logged) / max(len(logged), 1)
        if not mean > 0:
            raise ValueError(
                f"the pilot {planned.plan.title} made no update, so there is no update norm to match: raise "
                "hydra.sweeper.pilot_share, or choose an environment with signal"
            )
    return norms
