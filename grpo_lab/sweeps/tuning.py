"""The tuning of a sweep: before its first run, every arm has as many settings of its numbers tried.

A trial is a run on each tuning seed. Trials lie in `<runs_dir>/tuning/`, recorded there under the sweep's name, and are
no runs of it. The studies, one for each level and arm, are in `tuning.journal` in the sweep's own folder. The same
command gives the same trials, whenever it was killed and in whatever order runs ended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn

from grpo_lab.analysis.sources.chosen_numbers import ChosenNumbers, Trial
from grpo_lab.config.design import Design
from grpo_lab.config.rules import IncompatibleRun
from grpo_lab.config.tuning import Tuning, refuse_judged
from grpo_lab.sweeps.objective import has_settled, objective
from grpo_lab.sweeps.planned_runs import (
    Compose,
    Plan,
    PlannedRun,
    compose_runs,
    folder_name,
    is_hidden,
    key_of,
    plan_runs,
    refuse_no_op_arms,
    share_runs,
    with_overrides,
)
from grpo_lab.sweeps.status import TUNING
from grpo_lab.sweeps.studies import Studies, StudyTrial
from grpo_lab.tracking import provenance
from grpo_lab.tracking.run_reader import was_stopped
from grpo_lab.tracking.sweep_record import record_sweep, sweep_folder
from grpo_lab.tracking.terminal import Terminal

JOURNAL = "tuning.journal"  # within the sweep's folder
ArmLevel = tuple[str, str]  # level and arm
Launch = Callable[[str, Sequence[PlannedRun], int], Sequence[JobReturn]]


@dataclass(frozen=True)
class Search:
    """The tuning of a sweep, planned: for every level and arm of the whole design its runs, one a tuning seed.

    `targets` are the levels and arms that this command tunes, and `runs_dir` is the sweep's.
    """

    name: str
    tuning: Tuning
    axis: str
    plans: Mapping[ArmLevel, Sequence[Plan]]
    targets: Sequence[ArmLevel]
    compose: Compose
    runs_dir: Path
    studies: Studies

    def trials(self, place: ArmLevel) -> list[StudyTrial]:
        """The trials so far."""
        return self.studies.trials(self.study(place))[: self.tuning.trials]

    def study(self, place: ArmLevel) -> str:
        """The name of a study: level, arm, and a digest of all that its trials depend on."""
        ranges = [(key, asdict(own)) for key, own in self.tuning.of(place[1]).items()]
        words = [[word for word in plan.overrides if _identifies(word)] for plan in self.plans[place]]
        content = json.dumps([ranges, self.tuning.seeds, self.tuning.metric, self.tuning.batch, words])
        return " ".join((*filter(None, place), hashlib.sha256(content.encode()).hexdigest()[:12]))

    def open(self) -> list[ArmLevel]:
        """The levels and arms that this command asks for and whose numbers are not chosen yet."""
        chosen = {(one.level, one.arm) for one in self.chosen()}
        return [place for place in self.targets if place not in chosen]

    def chosen(self) -> list[ChosenNumbers]:
        """The choice for every level and arm whose trials all have a value."""
        found = []
        for level, arm in self.plans:
            trials = [Trial(one.numbers, one.value) for one in self.trials((level, arm)) if one.value is not None]
            if len(trials) == self.tuning.trials:
                best = max(range(len(trials)), key=lambda number: (trials[number].value, -number))
                trial_facts = (list(self.tuning.seeds), self.tuning.of(arm), trials, best)
                found.append(ChosenNumbers(level, arm, self.tuning.metric, *trial_facts))
        return found

    def settled(self) -> Callable[[Plan], Plan]:
        """A function that sets the numbers of a plan: those chosen, before that the middle of each range."""
        numbers = {
            place: {key: own.number(0.5) for key, own in self.tuning.of(place[1]).items()} for place in self.plans
        } | {(one.level, one.arm): one.chosen.numbers for one in self.chosen()}
        return lambda plan: with_overrides(plan, _words(numbers[plan.level, plan.arm]))

    def runs(self, place: ArmLevel, number: int, trial: StudyTrial) -> list[Plan]:
        """The runs of one trial."""
        folder = QuotedString(str(self.runs_dir / TUNING), Quote.single).with_quotes()
        words = (*_words(trial.numbers), "tracking=none", f"runs_dir={folder}")
        level = ",".join(filter(None, (place[0], f"trial={number + 1}")))
        return [replace(with_overrides(plan, words), level=level) for plan in self.plans[place]]


def plan_tuning(design: Design, arguments: Sequence[str], name: str, compose: Compose, runs_dir: Path) -> Search:
    """Check a design's tuning before anything runs, at both ends of its ranges. Raises ValueError with a remedy."""
    tuning = design.tuning
    assert tuning is not None, "the caller asks"
    from grpo_lab.analysis.final_values import is_rated

    if not is_rated(tuning.metric):
        raise ValueError(
            f"design.tuning.metric: {tuning.metric} is no accuracy or reward, and tuning maximises its metric: name "
            "one, such as eval/heldout/accuracy"
        )
    judged = plan_runs(design, arguments)
    refuse_judged(tuning.seeds, [plan.seed for plan in judged])
    typed = {key_of(word): word for word in arguments}
    for key in {key for arm in design.arms for key in tuning.of(arm)}:
        if key in typed:
            raise ValueError(f"design.tuning chooses {key}, and so does {typed[key]}: leave that out")
    seeds = ",".join(map(str, tuning.seeds))
    words = [word for word in arguments if key_of(word) != "seed"]
    plans: dict[ArmLevel, list[Plan]] = {}
    for plan in plan_runs(replace(design, part=None), [*words, f"seed={seeds}"]):
        plans.setdefault((plan.level, plan.arm), []).append(plan)
    targets = list(dict.fromkeys((plan.level, plan.arm) for plan in judged))
    studies = Studies(sweep_folder(runs_dir, name) / JOURNAL)
    search = Search(name, tuning, design.axis, plans, targets, compose, runs_dir, studies)
    _check_ends(design, search)
    return search


def _check_ends(design: Design, search: Search) -> None:
    """Raise ValueError for a number that a run refuses, arms that differ at neither end, and unequal budgets."""
    idle: list[IncompatibleRun] = []
    for end in (0.0, 1.0):
        plans = []
        for place in search.targets:
            numbers = {key: own.number(end) for key, own in search.tuning.of(place[1]).items()}
            plans.append(with_overrides(search.plans[place][0], _words(numbers)))
        runs = compose_runs(plans, search.name, search.compose)
        try:
            refuse_no_op_arms(design, runs)
        except IncompatibleRun as error:  # a range may begin at the number that the control has
            idle.append(error)
        if len(idle) == 2:
            raise idle[0]
        budgets: dict[str, dict[tuple[str, float], str]] = {}  # level -> budget -> arm
        for planned in runs:
            budget = planned.run.budget
            budgets.setdefault(planned.plan.level, {})[budget.axis.value, budget.amount] = planned.plan.arm
        for level, arms in budgets.items():
            if len(arms) > 1:
                where = f" at {level}" if level else ""
                raise ValueError(
                    f"design.tuning: {' and '.join(arms.values())} have different budgets{where}, so their trials "
                    "would not be alike: give every arm the same budget"
                )


def run_tuning(console: Terminal, search: Search, launch: Launch) -> None:
    """Run the trials that lack, a batch of every arm at a time. Raises ValueError where a run of one failed."""
    tuning = search.tuning
    while places := search.open():
        batch: list[tuple[ArmLevel, int, list[Plan]]] = []
        for place in places:
            finished = sum(trial.value is not None for trial in search.trials(place))
            number = min(tuning.trials, (finished // tuning.batch + 1) * tuning.batch)
            suggested = search.studies.ask(
                search.study(place), tuning.of(place[1]), number, startup=tuning.batch, seed=tuning.seeds[0]
            )
            batch += [
                (place, at, search.runs(place, at, trial)) for at, trial in enumerate(suggested) if trial.value is None
            ]
        plans = [plan for _, _, runs in batch for plan in runs]
        planned_runs = share_runs(compose_runs(plans, search.name, search.compose), search.axis)
        todo = [planned for planned in planned_runs if not planned.same_as and not has_settled(planned.folder)]
        _record(search, planned_runs, starts=bool(todo))
        first, last = min(at for _, at, _ in batch) + 1, max(at for _, at, _ in batch) + 1
        title = f"{search.name}, tuning, trials {first} to {last} of {tuning.trials}"
        returns = launch(title, todo, sum(not planned.same_as for planned in planned_runs) - len(todo))
        objectives = {planned.folder: result._return_value for planned, result in zip(todo, returns)}
        if lacking := [planned for planned in todo if not has_settled(planned.folder)]:
            lines = "\n".join(f"  {planned.plan.title}: {objectives.get(planned.folder)}" for planned in lacking)
            what = "were stopped" if all(was_stopped(planned.folder) for planned in lacking) else "failed"
            raise ValueError(f"no run was started, because trials {what}; the same command tries again:\n{lines}")
        folders = {planned.plan.title: planned.folder for planned in planned_runs}
        for place, own in itertools.groupby(batch, key=lambda entry: entry[0]):
            values = {at: _value(search, [folders[plan.title] for plan in runs]) for _, at, runs in own}
            search.studies.tell(search.study(place), values)
    chosen = [one for one in search.chosen() if (one.level, one.arm) in search.targets]
    from grpo_lab.analysis.effects.tuned import numbers_text

    console.say(numbers_text(chosen))


def _value(search: Search, folders: Sequence[Path]) -> float:
    """The mean over a trial's runs. Raises ValueError where one did not log the metric."""
    values = [objective(folder, search.tuning.metric, search.axis) for folder in folders]
    for folder, value in zip(folders, values):
        if math.isnan(value):
            raise ValueError(
                f"design.tuning.metric: the run in {folder} did not log {search.tuning.metric}: name a metric that "
                "its evaluation measures"
            )
    return math.fsum(values) / len(values)


def _record(search: Search, runs: Sequence[PlannedRun], starts: bool) -> None:
    """Record the runs of trials in a sweep of their own, where readers list them; those of other ranges leave it."""
    valid = {planned.folder.parent.name for planned in runs}
    for place in search.plans:
        for number, trial in enumerate(search.trials(place)):
            valid |= {folder_name(plan) for plan in search.runs(place, number, trial)}
    record_sweep(
        search.runs_dir / TUNING,
        search.name,
        [planned.record() for planned in runs],
        frozenset(valid),
        None,
        "",
        provenance.typed(),
        provenance.commit(),
        None,
        starts=starts,
    )


def show_tuning(console: Terminal, search: Search) -> None:
    """Print how many trials and runs a tuning has, how many have ended, and what it chose."""
    tuning, places = search.tuning, search.targets
    planned = len(places) * tuning.trials * len(tuning.seeds)
    folder = search.runs_dir / TUNING
    ended = 0
    for place in places:
        for number, trial in enumerate(search.trials(place)):
            runs = search.runs(place, number, trial)
            own = (has_settled(folder / folder_name(plan) / f"seed={plan.seed}") for plan in runs)
            ended += len(runs) if trial.value is not None else sum(own)  # a run may be shared with another arm's
    arms = "1 arm" if len(places) == 1 else f"{len(places)} arms"
    seeds = "1 seed" if len(tuning.seeds) == 1 else f"{len(tuning.seeds)} seeds"
    lines = [
        f"tuning, before the first run: {tuning.trials} trials of each of {arms} on {seeds}, which are {planned} "
        f"runs, {ended} of them finished, in {folder}"
    ]
    chosen = [one for one in search.chosen() if (one.level, one.arm) in places]
    if len(chosen) < len(places):
        lines.append("tuning is not finished: the runs below use mid-range for each value not chosen yet")
    if chosen:
        from grpo_lab.analysis.effects.tuned import numbers_text

        lines = [*lines, numbers_text(chosen)]
    for line in lines:
        console.say(line)


def _identifies(word: str) -> bool:
    return not is_hidden(key_of(word))


def _words(numbers: Mapping[str, float | int]) -> list[str]:
    return [f"{key}={number!r}" for key, number in numbers.items()]
